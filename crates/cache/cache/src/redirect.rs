//! Redirects readers of a block for which this node is a replica without the bytes. For a while such readers are redirected to
//! the node that fetches the block for all, and meanwhile the block is copied from there. Does not know which node that is, or
//! the way there.

use crate::{Cache, PrefetchPermit, store_or_replicate};
use parking_lot::Mutex;
use spurline_types::{BlockId, ObjectRef, SliceSink};
use spurline_volume::PeerFetched;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const REDIRECT_SLOTS: usize = 1 << 12;
/// How long readers of a block are redirected: far longer than the origin takes. A block that is still missing then is stored
/// nowhere else, or can't be copied, and this node fetches from the origin.
const REDIRECT_PERIOD: Duration = Duration::from_secs(30);
/// A redirect this long ago is forgotten: the block has arrived since, or was not requested again.
const FORGET_AFTER: Duration = Duration::from_secs(120);

/// The blocks of recent redirects, and the time of each block's first.
pub(crate) struct RedirectTable {
    born: Instant,
    /// The upper half names the block, the lower counts milliseconds since `born`.
    slots: Box<[AtomicU64]>,
    /// Blocks being copied from the other node now.
    pending: Mutex<HashSet<BlockId>>,
}

impl RedirectTable {
    pub fn new() -> Self {
        let slots = (0..REDIRECT_SLOTS).map(|_| AtomicU64::new(0)).collect();
        RedirectTable { born: Instant::now(), slots, pending: Mutex::default() }
    }

    /// Whether another reader may be redirected for this block, at `now`.
    fn may_redirect(&self, id: &BlockId, now: Instant) -> bool {
        let hash = ((id.object.0 as u64) ^ (id.object.0 >> 64) as u64 ^ u64::from(id.index))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slot = &self.slots[(hash >> 52) as usize % REDIRECT_SLOTS];
        let name = hash << 32;
        let now = now.saturating_duration_since(self.born).as_millis() as u32;
        let old = slot.load(Ordering::Relaxed);
        let since = now.wrapping_sub(old as u32);
        // Two blocks of a slot that are requested in turn begin anew each time, and the readers pay for a second request.
        if old == 0 || old & !0xffff_ffff != name || u128::from(since) >= FORGET_AFTER.as_millis() {
            slot.store(name | u64::from(now.max(1)), Ordering::Relaxed);
            return true;
        }
        u128::from(since) < REDIRECT_PERIOD.as_millis()
    }
}

impl Cache {
    /// Whether to redirect a reader of the absent block at `offset` to the node that fetches for all; then the block is copied
    /// from there for later readers.
    pub fn redirects_reader(self: &Arc<Self>, object: &ObjectRef, offset: u64) -> bool {
        let Some(others) = self.shared.peer_fetch.get() else { return false };
        let (id, _) = self.block_range(object, offset, 0);
        let sends = others.has_other_owner(self.origin.source_url(), object, id.index)
            && self.shared.redirects.may_redirect(&id, Instant::now());
        if sends {
            self.shared.stats.remotecache.sent_on.add(1);
            self.schedule_takeover(object, id);
        }
        sends
    }

    /// Begins to fetch the block at `offset` for another node, when there is memory to spare.
    pub fn begin_fetch(&self, object: &ObjectRef, offset: u64) {
        let (id, _) = self.block_range(object, offset, 0);
        self.prefetch_block(object, id.index);
    }

    fn schedule_takeover(self: &Arc<Self>, object: &ObjectRef, id: BlockId) {
        let len = object.block_len(id.index, self.shared.block_size);
        let Some(bytes) = PrefetchPermit::try_acquire(&self.shared, len) else { return };
        if !self.shared.redirects.pending.lock().insert(id) {
            return;
        }
        let sought = PendingTakeover { cache: Arc::clone(self), id };
        let object = object.clone();
        // Dropped when too many jobs wait already: the next redirect schedules another job.
        self.shared.workers.run_ahead(move || {
            let _bytes = bytes;
            sought.cache.take_over_block(&object, id, len);
        });
    }

    /// Copies a block from the node that fetches it for all, if that node has it. No reader waits for the copy, so a failure has
    /// no consequence.
    fn take_over_block(&self, object: &ObjectRef, id: BlockId, len: usize) {
        let shared = &self.shared;
        let Some(others) = shared.peer_fetch.get() else { return };
        // A buffer that no reader sees.
        let Some(mut buf) = shared.tier.pool().try_alloc(len) else { return };
        let mut sink = SliceSink::new(&mut buf);
        let found = others.fetch_from_owner(self.origin.source_url(), object, id.index, &mut sink);
        if found == PeerFetched::Missing || sink.filled() != len {
            return;
        }
        let Some(bytes) = shared.tier.insert_filled(id, buf, len) else { return };
        store_or_replicate(shared, self.origin.source_url(), object, id.index, &bytes, found == PeerFetched::FoundHot);
    }
}

/// A block being copied, until the job that carries this has run or was dropped.
struct PendingTakeover {
    cache: Arc<Cache>,
    id: BlockId,
}

impl Drop for PendingTakeover {
    fn drop(&mut self) {
        self.cache.shared.redirects.pending.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ObjectId;

    #[test]
    fn readers_are_sent_on_for_a_while_and_again_when_that_is_forgotten() {
        let (sent, start) = (RedirectTable::new(), Instant::now());
        let id = |index| BlockId { object: ObjectId(77), index };
        let may = |index, seconds| sent.may_redirect(&id(index), start + Duration::from_secs(seconds));
        assert!(may(1, 0) && may(1, 5) && may(1, 29));
        assert!(may(2, 20), "each block has its own time");
        assert!(!may(1, 31) && !may(1, 119) && may(2, 45));
        assert!(may(1, 121) && may(1, 150) && !may(1, 152));
    }
}
