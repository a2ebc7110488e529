//! The one memory budget of a process: an arena of fixed size, buffers cut from it, and the blocks
//! held in it. It knows nothing of disks, sockets or files, and of RDMA only that a buffer's address
//! never changes, so that the whole arena can be registered once.

mod buddy;
mod pool;
mod queues;
mod reclaim;
mod stripes;
mod tier;

pub use pool::{Annex, Buf, Pool, Reclaim};
pub use stripes::Placed;
pub use tier::{Fill, Found, MemBlock, Slice, Tier};
