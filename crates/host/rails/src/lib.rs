//! Network interfaces as RDMA rails: which device, port and GID an interface is, why, and what is wrong with one
//! that can't be used. What stands in the kernel's files the fabric crate reads; this one deliberately opens no file, no
//! device, and knows no verbs.
#![forbid(unsafe_code)]

mod host;
mod memlock;
mod resolve;
mod unusable;

pub use host::{Address, host_addresses};
pub use memlock::{Memlock, check_memlock};
pub use resolve::{LocalRail, resolve, usable};
pub use unusable::Unusable;
