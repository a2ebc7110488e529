//! The keeper of a mount: a small process that holds the connection to the kernel and the state of the mount, and starts the
//! mount's process again when that dies. Both ends of their conversation are here. Knows neither FUSE nor the inside of the state.
#![forbid(unsafe_code)]

mod descriptor_socket;
mod life;
mod messages;
mod notifications;
mod store;
mod stored_files;
mod supervise;

pub use life::{KeeperLink, LIFE_VARIABLE, MountLife};
pub use messages::{KeptDescriptors, LifeOrder, UPGRADE_ACCEPTED, UPGRADE_CAUSE, monotonic_ns};
pub use notifications::KeeperNotifications;
pub use store::{DescriptorStore, ReportedProcess, STORE_VARIABLE, StoreLink};
pub use stored_files::{STORED_NAME_BYTES, StoredFiles, StoredName};
pub use supervise::{CHECK_LIMIT, KeeperReports, StopRequests, SupervisedProgram, supervise};
