//! The kernel's NFS server over a mount: configuration files, requirements, the lines that clients type, and the database of
//! names by which file handles outlive a mount. Knows no command line and no FUSE session.
#![forbid(unsafe_code)]

mod client_mounts;
mod configuration;
mod export_records;
mod export_use;
mod firewall;
mod kernel_server;
mod mount_statistics;
mod name_database;
mod requirements;
mod rpc_counters;
mod server_changes;
mod server_settings;

pub use client_mounts::{ClientMount, ExportService, client_mounts, reach_of};
pub use configuration::{ExportPlan, STATE_DIR, export_id, shown_path};
pub use export_records::{ExportRecord, started_server};
pub use export_use::ExportUse;
pub use kernel_server::{
    ServerState, answer_waiting_clients, apply_plan, exports_at, forget_cached_exports, remove_export,
};
pub use mount_statistics::{NfsConnection, NfsMount};
pub use name_database::NameDatabase;
pub use requirements::{MountFacts, RequirementOutcome, RequirementState, V3_LOCKS, check_requirements};
pub use rpc_counters::{NfsClientCounters, NfsServerCounters};
pub use server_changes::ServerChange;
pub use server_settings::NfsSettings;
