//! Blocks that this node is a copy of and has not got yet: readers that can do without it are sent on to the node that
//! fetches the block for all, for a while, and meanwhile the block is taken from there. Who that is, and how it is asked,
//! is not known here.

use crate::{AheadBytes, Cache, keep_or_pass};
use parking_lot::Mutex;
use spurline_types::{BlockId, ObjectRef, SliceSink};
use spurline_volume::Fetched;
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const SLOTS: usize = 1 << 12;
/// So long readers are sent on for one block: far longer than the under-store takes for it. What is not here by then is
/// kept nowhere else, or can't be had from there, and is fetched as if there were no other node.
const PATIENCE: Duration = Duration::from_secs(30);
/// What was sent on for so long ago is forgotten: it was here since then, or nobody asked.
const FORGOTTEN: Duration = Duration::from_secs(120);

/// For which blocks readers were sent on lately, and since when.
pub(crate) struct SentOn {
    born: Instant,
    /// The upper half names the block, the lower counts milliseconds since `born`.
    slots: Box<[AtomicU64]>,
    /// Those that are being taken from the other node now.
    sought: Mutex<HashSet<BlockId>>,
}

impl SentOn {
    pub fn new() -> Self {
        let slots = (0..SLOTS).map(|_| AtomicU64::new(0)).collect();
        SentOn { born: Instant::now(), slots, sought: Mutex::default() }
    }

    /// Whether one more reader may be sent on for this block, at `now`.
    fn may(&self, id: &BlockId, now: Instant) -> bool {
        let hash = ((id.object.0 as u64) ^ (id.object.0 >> 64) as u64 ^ u64::from(id.index))
            .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let slot = &self.slots[(hash >> 52) as usize % SLOTS];
        let (name, now) = (hash << 32, now.saturating_duration_since(self.born).as_millis() as u32);
        let old = slot.load(Ordering::Relaxed);
        let since = now.wrapping_sub(old as u32);
        // Two blocks of one slot that are asked for in turn begin anew each time: their readers pay for a second question.
        if old == 0 || old & !0xffff_ffff != name || u128::from(since) >= FORGOTTEN.as_millis() {
            slot.store(name | u64::from(now.max(1)), Ordering::Relaxed);
            return true;
        }
        u128::from(since) < PATIENCE.as_millis()
    }
}

impl Cache {
    /// Whether a reader of the block at `offset`, which is not here, is to ask the node that fetches it for all; then the
    /// block is being taken from there, for those that come next.
    pub fn sends_on(self: &Arc<Self>, object: &ObjectRef, offset: u64) -> bool {
        let Some(others) = self.shared.elsewhere.get() else { return false };
        let (id, _) = self.locate(object, offset, 0);
        let sends =
            others.fetches(self.under.source(), object, id.index) && self.shared.sent_on.may(&id, Instant::now());
        if sends {
            self.shared.stats.remotecache.sent_on.add(1);
            self.seek(object, id);
        }
        sends
    }

    /// Begins to fetch the block at `offset`, when there is memory to spare; another node asks for it.
    pub fn begin(&self, object: &ObjectRef, offset: u64) {
        let (id, _) = self.locate(object, offset, 0);
        self.bring(object, id.index);
    }

    fn seek(self: &Arc<Self>, object: &ObjectRef, id: BlockId) {
        let len = object.block_len(id.index, self.shared.block_size);
        let Some(bytes) = AheadBytes::take(&self.shared, len) else { return };
        if !self.shared.sent_on.sought.lock().insert(id) {
            return;
        }
        let sought = Sought { cache: Arc::clone(self), id };
        let object = object.clone();
        // Dropped when too much waits already: whoever is sent on next has it sought again.
        self.shared.workers.ahead(move || {
            let _bytes = bytes;
            sought.cache.take_over(&object, id, len);
        });
    }

    /// Takes a block from the node that fetches it for all, if that has got it. No reader waits for this, so it may fail.
    fn take_over(&self, object: &ObjectRef, id: BlockId, len: usize) {
        let shared = &self.shared;
        let Some(others) = shared.elsewhere.get() else { return };
        // Apart from all readers.
        let Some(mut buf) = shared.tier.pool().try_alloc(len) else { return };
        let mut sink = SliceSink::new(&mut buf);
        let found = others.seek(self.under.source(), object, id.index, &mut sink);
        if found == Fetched::Nowhere || sink.filled() != len {
            return;
        }
        let Some(bytes) = shared.tier.take_in(id, buf, len) else { return };
        keep_or_pass(shared, self.under.source(), object, id.index, &bytes, found == Fetched::Hot);
    }
}

/// A block that is being sought, until the job that carries this has run or was dropped.
struct Sought {
    cache: Arc<Cache>,
    id: BlockId,
}

impl Drop for Sought {
    fn drop(&mut self) {
        self.cache.shared.sent_on.sought.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::ObjectId;

    #[test]
    fn readers_are_sent_on_for_a_while_and_again_when_that_is_forgotten() {
        let (sent, start) = (SentOn::new(), Instant::now());
        let id = |index| BlockId { object: ObjectId(77), index };
        let may = |index, seconds| sent.may(&id(index), start + Duration::from_secs(seconds));
        assert!(may(1, 0) && may(1, 5) && may(1, 29));
        assert!(may(2, 20), "each block has its own time");
        assert!(!may(1, 31) && !may(1, 119) && may(2, 45));
        assert!(may(1, 121) && may(1, 150) && !may(1, 152));
    }
}
