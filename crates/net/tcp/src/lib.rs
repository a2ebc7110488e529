//! The TCP transport: blocking client channels, and a server with bounded threads for thousands of connections.
//! It deliberately knows no block, no file and no pool: frames and services come from the transport crate.
#![forbid(unsafe_code)]

pub mod addr;
pub mod bare;
mod client;
mod outgoing;
mod secure;
mod server;
mod socket;
mod worker;

pub use addr::{flag_addresses, group_addresses, local_addresses, resolve};
pub use client::{TcpChannel, TcpConnector, connect_socket};
pub use server::{ServerConfig, TcpServer};
pub use socket::SocketOptions;
