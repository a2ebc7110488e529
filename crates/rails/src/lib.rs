//! Network interfaces as RDMA rails: which device, port and GID an interface is, why, and what is wrong with one
//! that can't be used. It reads sysfs and the interfaces' addresses, below a root that a test may choose; it
//! deliberately knows no verbs and opens no device.
#![forbid(unsafe_code)]

mod host;
mod memlock;
mod resolve;
mod sysfs;
mod unusable;

pub use host::{Address, host_addresses};
pub use memlock::{Memlock, check_memlock};
pub use resolve::{LocalRail, resolve, usable};
pub use sysfs::{Gid, GidType};
pub use unusable::Unusable;
