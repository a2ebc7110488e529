//! Finds blocks that are read so much from disk that memory should hold them. A small table of fixed size, which forgets by being
//! overwritten, without a clock or a lock.

use spurline_types::BlockId;
use std::sync::atomic::{AtomicU64, Ordering};

const HEAT_SLOTS: usize = 1 << 14;

/// Bytes read from disk per block, for as many blocks as are read at the same time.
pub(crate) struct BlockHeat {
    /// The upper half names the block, the lower half counts KiB.
    slots: Box<[AtomicU64]>,
}

impl BlockHeat {
    pub(crate) fn new() -> Self {
        BlockHeat { slots: (0..HEAT_SLOTS).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Adds a read of `bytes` of `id`; returns whether the block has now been read by more than `limit` bytes. Then the count
    /// begins anew.
    pub(crate) fn record_read(&self, id: &BlockId, bytes: usize, limit: usize) -> bool {
        let hash = ((id.object.0 as u64) ^ (id.object.0 >> 64) as u64 ^ u64::from(id.index))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slot = &self.slots[(hash >> 50) as usize % HEAT_SLOTS];
        let name = hash << 32;
        // Two concurrent updates may count once: the block then warms up a read later.
        let old = slot.load(Ordering::Relaxed);
        let kib = if old & !0xffff_ffff == name { old & 0xffff_ffff } else { 0 } + (bytes as u64).div_ceil(1024);
        let hot = kib << 10 >= limit as u64;
        slot.store(name | if hot { 0 } else { kib }, Ordering::Relaxed);
        hot
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ObjectId;

    #[test]
    fn warms_up_and_forgets() {
        let heat = BlockHeat::new();
        let id = BlockId { object: ObjectId(77), index: 3 };
        assert!(!heat.record_read(&id, 64 << 10, 256 << 10));
        assert!(!heat.record_read(&id, 64 << 10, 256 << 10));
        assert!(!heat.record_read(&id, 64 << 10, 256 << 10));
        assert!(heat.record_read(&id, 64 << 10, 256 << 10));
        assert!(!heat.record_read(&id, 64 << 10, 256 << 10), "counted anew");
    }
}
