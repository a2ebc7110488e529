//! What tests stand on: an embedded S3 server over a directory or in memory, a proxy that stalls, cuts, throttles and
//! refuses on demand, real etcd servers, and a virtual machine with RDMA devices. It deliberately knows nothing of Spurline.
#![forbid(unsafe_code)]

mod chaos;
mod dir_s3;
mod etcd;
mod http1;
mod listing;
mod memory_s3;
mod server;
mod vm;

pub use chaos::{ChaosProxy, Fault};
pub use etcd::EtcdServer;
pub use server::S3Server;
pub use vm::{GuestNet, in_guest, run_in_guest};

/// The access key every embedded server knows.
pub const ACCESS_KEY: &str = "SPURLINETESTKEY";
/// The secret that goes with [`ACCESS_KEY`].
pub const SECRET_KEY: &str = "spurline-test-secret";

/// Prints why a test can't run; fails it instead when `SPURLINE_REQUIRE` lists `thing`.
///
/// # Panics
/// When the thing is required.
pub fn skip(thing: &str, reason: &str) {
    let required = std::env::var("SPURLINE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r.trim() == thing), "{thing} is required: {reason}");
    println!("SKIP: {reason}");
}
