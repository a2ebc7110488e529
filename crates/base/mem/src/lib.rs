//! The memory budget of a process: an arena of fixed size, buffers cut from the arena, and blocks. Knows no disks, sockets or
//! files, and of RDMA only that a buffer's address never changes, so that the whole arena can be registered once.

pub mod allocator;
mod buddy;
mod pool;
mod queues;
mod reclaim;
mod stripes;
mod tier;

pub use pool::{AnnexPiece, BufferPool, BufferReclaim, PoolBuf};
pub use stripes::NumaPlacement;
pub use tier::{BlockFill, BlockSlice, MemBlock, MemTier, TierLookup};
