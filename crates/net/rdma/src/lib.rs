//! The RDMA transport: channels over reliable connections, and a server with bounded threads. The reader's message
//! names a region of its own memory, the node writes the payload there. It deliberately knows no block and no file,
//! and no interface names: a rail is an address.
//!
//! A channel has a queue pair of its own and one call at a time, so no small message ever waits behind bulk data on
//! the same queue pair. What is sent is accounted by credits (`spurline_proto::rdma`), so no receive queue runs dry.
#![forbid(unsafe_code)]

mod client;
mod depths;
mod hand;
mod rail;
mod responder;
mod server;
mod session;
mod worker;

pub use client::{RdmaChannel, RdmaConnector};
pub use depths::{connection_bytes, reader_bytes};
pub use rail::{Patience, Rail};
pub use server::{RdmaServer, RdmaServerConfig};
