//! Copies of blocks that are hot on another node, held in memory as long as readers here use the copies. A list of bounded
//! length, without a measure of heat.

use crate::CacheContext;
use parking_lot::Mutex;
use spurline_types::{BlockId, Stats};

/// Maximum number of copies; further copies are stored like any other block.
const MAX_REPLICAS: usize = 4096;

/// Blocks that are held only for a while.
#[derive(Default)]
pub(crate) struct HotReplicas(Mutex<Vec<BlockId>>);

impl HotReplicas {
    /// Adds a copy; false when there are too many.
    pub fn try_hold(&self, id: BlockId, stats: &Stats) -> bool {
        let mut copies = self.0.lock();
        if copies.len() >= MAX_REPLICAS {
            return false;
        }
        if !copies.contains(&id) {
            copies.push(id);
        }
        stats.blockcache.spread_blocks.set(copies.len() as u64);
        true
    }
}

impl CacheContext {
    /// Drops the copies of other nodes' hot blocks that have cooled here.
    pub fn drop_cooled(&self, cooled: impl Fn(&BlockId) -> bool) {
        let mut copies = self.hot_replicas.0.lock();
        if copies.is_empty() {
            return;
        }
        let gone: Vec<BlockId> = copies.extract_if(.., |id| cooled(id)).collect();
        self.stats.blockcache.spread_blocks.set(copies.len() as u64);
        drop(copies);
        for id in gone {
            self.tier.remove(&id);
        }
    }
}
