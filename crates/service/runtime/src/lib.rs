//! Opens volumes and starts mounts, nodes, gateways and coordinators from a checked configuration, and finds and drains running processes.
//! Composes the layers below for any front end. Knows no command line, screen or signal, and never ends the process.
#![forbid(unsafe_code)]

pub mod admin;
pub mod cache_dirs;
pub mod coordinator;
pub mod drain;
mod exported;
pub mod gateway;
pub mod group;
pub mod group_nodes;
pub mod jobs;
pub mod limits;
pub mod locator;
pub mod mount;
mod mount_server;
pub mod node;
mod peer_status;
pub mod peers;
mod rails;
mod recent_file;
mod recovery;
pub mod rules;
mod s3_endpoint;
mod settings;
pub mod setup;
mod shared_folder;
mod stage;
pub mod staged_files;
pub mod unmount;
pub mod upgrade;
pub mod volume;
mod writable_files;
mod writes;

pub use coordinator::{RunningCoordinator, start_coordinator};
pub use drain::{DrainOutcome, DrainProgress, DrainRequest, drain_node};
pub use gateway::{RunningGateway, start_gateway};
pub use mount::{MountStop, PreparedMount, RunningMount, start_mount};
pub use node::{RunningNode, start_node};
pub use recovery::{MountRecovery, check_takeover};
pub use volume::{OpenVolume, open_volume};
pub use writable_files::{WritableFiles, open_writable_files};
pub use writes::{UnsentBytes, describe_losses, describe_unsent};
