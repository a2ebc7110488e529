//! The RDMA transport: channels over reliable connections, and a server with bounded threads. A request names a region of the
//! reader's memory, into which the node writes the payload. Deliberately knows no block, no file and no interface names: a rail
//! is an address.
//!
//! A channel has a separate queue pair and a single call at a time, so no small message waits behind bulk data on the same queue
//! pair. Credits account for all messages (`spurline_proto::rdma`), so no receive queue runs empty.
#![forbid(unsafe_code)]

mod client;
mod depths;
mod polled_set;
mod rail;
mod responder;
mod server;
mod session;
mod worker;

pub use client::{RdmaChannel, RdmaConnector};
pub use depths::{connection_bytes, reader_bytes};
pub use rail::{RdmaRail, RdmaTimeouts};
pub use server::{RdmaServer, RdmaServerConfig};
