//! The TCP transport: blocking client channels, and a server with a bounded number of threads for thousands of connections. Knows
//! no block, no file and no pool: frames and services come from the transport crate.
#![forbid(unsafe_code)]

pub mod addr;
pub mod bare;
mod client;
mod secure;
mod server;
mod socket;
mod source_address;
mod worker;

pub use addr::{LocalAddress, flag_addresses, group_addresses, local_addresses, resolve_peer};
pub use client::{TcpChannel, TcpConnector, connect_socket};
pub use server::{ServerConfig, TcpServer};
pub use socket::SocketOptions;
