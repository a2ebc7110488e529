//! The memory of written bytes that are not durable: a share of the mount's budget. It does not know what is written.

use spurline_mem::{BufferPool, PoolBuf};
use spurline_types::Stats;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The memory for bytes that are not durable.
pub(crate) struct WriteMemory {
    pool: Arc<BufferPool>,
    used: AtomicU64,
    limit: u64,
    pub(super) stats: Arc<Stats>,
}

impl WriteMemory {
    pub fn new(pool: &Arc<BufferPool>, limit: u64, stats: &Arc<Stats>) -> Arc<Self> {
        stats.writes.memory_limit_bytes.set(limit);
        Arc::new(WriteMemory { pool: Arc::clone(pool), used: AtomicU64::new(0), limit, stats: Arc::clone(stats) })
    }

    pub fn limit_bytes(&self) -> u64 {
        self.limit
    }

    pub fn used_bytes(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// A buffer, if there is memory for it.
    pub(super) fn take(self: &Arc<Self>, len: usize) -> Option<WriteBuffer> {
        let bytes = BufferPool::footprint(len);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
                Some(used + bytes).filter(|used| *used <= self.limit)
            })
            .ok()?;
        let Some(buffer) = self.pool.try_alloc(len) else {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        };
        self.stats.writes.memory_bytes.add(bytes);
        Some(WriteBuffer { memory: Arc::clone(self), buffer })
    }
}

pub(crate) struct WriteBuffer {
    memory: Arc<WriteMemory>,
    buffer: PoolBuf,
}

impl Deref for WriteBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer
    }
}

impl DerefMut for WriteBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}

impl Drop for WriteBuffer {
    fn drop(&mut self) {
        let bytes = BufferPool::footprint(self.buffer.len());
        self.memory.used.fetch_sub(bytes, Ordering::Relaxed);
        self.memory.stats.writes.memory_bytes.sub(bytes);
    }
}
