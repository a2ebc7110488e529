//! The servers and machines that tests use: an embedded S3 server over a directory or in memory, a proxy that injects faults, real etcd
//! servers, programs written in Go, and a virtual machine with RDMA devices. Deliberately knows nothing of Spurline.
#![forbid(unsafe_code)]

mod aws_identity;
mod chaos_proxy;
mod dir_s3;
pub mod dns_server;
mod etcd;
mod go_program;
pub mod hosts;
mod http1;
mod listing;
mod memory_s3;
mod server;
mod vm;

pub use aws_identity::{AwsIdentityServer, SSO_TOKEN};
pub use chaos_proxy::{ChaosProxy, ProxyFault};
pub use etcd::EtcdServer;
pub use go_program::go_program;
pub use memory_s3::PartAssembly;
pub use server::S3Server;
pub use vm::{GuestKernel, GuestNet, in_guest, run_in_guest, run_in_guest_of};

/// The access key of every embedded server.
pub const ACCESS_KEY: &str = "SPURLINETESTKEY";
/// The secret of [`ACCESS_KEY`].
pub const SECRET_KEY: &str = "spurline-test-secret";
/// The access key of the roles of [`AwsIdentityServer`], which every embedded S3 server accepts too.
pub const ROLE_KEY: &str = "SPURLINETESTROLE";
/// The secret of [`ROLE_KEY`].
pub const ROLE_SECRET: &str = "spurline-test-role-secret";

/// Prints why a test can't run; fails the test instead when `SPURLINE_TEST_REQUIRE` lists `thing`.
///
/// # Panics
/// When `thing` is required.
pub fn skip(thing: &str, reason: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r.trim() == thing), "{thing} is required: {reason}");
    println!("SKIP: {reason}");
}

/// Bytes that identify their position.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
