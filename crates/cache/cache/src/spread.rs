//! Copies of blocks that are hot on another node: held in memory for as long as they are asked for here. A list of
//! bounded length; who says what is hot, and what has cooled, is not known here.

use crate::Shared;
use parking_lot::Mutex;
use spurline_types::{BlockId, Stats};

/// The most copies; of more, each is kept like any other block.
const MOST: usize = 4096;

/// What is held only for a while.
#[derive(Default)]
pub(crate) struct Copies(Mutex<Vec<BlockId>>);

impl Copies {
    /// Notes one more; false when there are too many.
    pub fn holds_one_more(&self, id: BlockId, stats: &Stats) -> bool {
        let mut copies = self.0.lock();
        if copies.len() >= MOST {
            return false;
        }
        if !copies.contains(&id) {
            copies.push(id);
        }
        stats.blockcache.spread_blocks.set(copies.len() as u64);
        true
    }
}

impl Shared {
    /// Drops the copies of other nodes' hot blocks that have cooled here.
    pub fn drop_cooled(&self, cooled: impl Fn(&BlockId) -> bool) {
        let mut copies = self.spread.0.lock();
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
