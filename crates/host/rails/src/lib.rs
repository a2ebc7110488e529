//! Network interfaces as RDMA rails: device, port and GID of each interface, with the reason, and why an interface cannot be
//! used. The fabric crate reads the kernel's files; this crate opens no file and no device, and knows no verbs.
#![forbid(unsafe_code)]

mod host;
mod memlock;
mod resolve;
mod unusable;

pub use host::{HostAddress, host_addresses};
pub use memlock::{MemlockLimit, check_memlock};
pub use resolve::{LocalRail, resolve_rails, usable_rails};
pub use unusable::UnusableRail;
