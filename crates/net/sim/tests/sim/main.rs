//! Channels in memory: the suite of every transport, and the pool of channels over them.

mod conformance;
mod pool;
