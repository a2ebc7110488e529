//! Channels over TCP: the suite of every transport, servers, trust.

mod conformance;
mod serve;
mod server;
mod trust;
