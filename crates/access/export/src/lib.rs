//! The kernel's NFS server over a mount: its configuration files, the requirements, the lines that clients type, and the
//! database of names by which file handles outlive a mount. It knows no command line and no FUSE session.
#![forbid(unsafe_code)]

mod client_mounts;
mod configuration;
mod export_use;
mod kernel_server;
mod mount_statistics;
mod name_database;
mod requirements;

pub use client_mounts::{ClientMount, client_mounts, reach_of};
pub use configuration::{ExportPlan, ExportRecord, STATE_DIR, export_id, shown_path};
pub use export_use::ExportUse;
pub use kernel_server::{
    ServerChange, ServerState, answer_waiting_clients, apply_plan, forget_cached_exports, remove_export,
};
pub use mount_statistics::{NfsConnection, NfsMount, parse_mountstats};
pub use name_database::NameDatabase;
pub use requirements::{MountFacts, RequirementOutcome, RequirementState, V3_LOCKS, check_requirements};
