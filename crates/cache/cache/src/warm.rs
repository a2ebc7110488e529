//! Brings blocks into the cache, and removes blocks, for jobs rather than readers: many at once, each with a result. Does not
//! know the jobs. The same for the blocks of new objects whose bytes nodes have sent to the store.

use crate::in_flight::PrefetchPermit;
use crate::sent::{SentBlock, SentRange};
use crate::{Cache, CacheContext, finish_fill, run_fill, store_block};
use parking_lot::{Condvar, Mutex};
use spurline_mem::{BlockFill, BlockSlice, MemBlock, TierLookup};
use spurline_origin::{OriginRead, OriginStore};
use spurline_store::{PutOutcome, ReadOutcome, RemovedBytes};
use spurline_types::units::human_bytes;
use spurline_types::{BlockId, ByteSink, Error, ErrorKind, ObjectId, ObjectRef, Result, SourceTag};
use spurline_volume::PeerFetched;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// The result of a part of a batch: bytes of whole blocks.
#[derive(Debug, Clone, Default)]
pub struct WarmedPart {
    /// Fetched by this batch.
    pub fetched_bytes: u64,
    /// Present already.
    pub held_bytes: u64,
    /// The first reason why the part is incomplete.
    pub error: Option<Error>,
}

#[derive(Default)]
struct BatchState {
    parts: Vec<WarmedPart>,
    under_way: usize,
}

/// Parts of objects that are being fetched together.
#[derive(Default)]
pub struct WarmBatch {
    state: Mutex<BatchState>,
    changed: Condvar,
}

/// How a block arrived.
enum WarmOutcome {
    Fetched,
    AlreadyHeld,
}

impl WarmBatch {
    fn begin_block(&self, part: usize) {
        let mut state = self.state.lock();
        state.under_way += 1;
        if state.parts.len() <= part {
            state.parts.resize_with(part + 1, WarmedPart::default);
        }
    }

    fn end_block(&self, part: usize, bytes: u64, came: Result<WarmOutcome>) {
        let mut state = self.state.lock();
        state.under_way -= 1;
        let warmed = &mut state.parts[part];
        match came {
            Ok(WarmOutcome::Fetched) => warmed.fetched_bytes += bytes,
            Ok(WarmOutcome::AlreadyHeld) => warmed.held_bytes += bytes,
            Err(error) => drop(warmed.error.get_or_insert(error)),
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits for all parts, or until `deadline`; returns the results of `parts` parts.
    pub fn wait_parts(&self, parts: usize, deadline: Instant) -> Vec<WarmedPart> {
        let mut state = self.state.lock();
        while state.under_way > 0 && !self.changed.wait_until(&mut state, deadline).timed_out() {}
        let late = state.under_way > 0;
        let mut done = state.parts.clone();
        done.resize_with(parts, WarmedPart::default);
        if late {
            for part in &mut done {
                // Which parts are late is unknown here; in a repeated request the others are present already.
                part.error.get_or_insert_with(|| Error::new(ErrorKind::Timeout, "not all of it came in time"));
            }
        }
        done
    }
}

/// Ends a begun block whatever happens to the job.
struct PendingBlock {
    batch: Arc<WarmBatch>,
    part: usize,
    bytes: u64,
    outcome: Option<Result<WarmOutcome>>,
}

impl PendingBlock {
    fn complete(mut self, came: Result<WarmOutcome>) {
        self.outcome = Some(came);
    }
}

impl Drop for PendingBlock {
    fn drop(&mut self) {
        self.batch.end_block(
            self.part,
            self.bytes,
            self.outcome
                .take()
                .unwrap_or_else(|| Err(Error::new(ErrorKind::Unavailable, "it was abandoned: too many jobs wait"))),
        );
    }
}

impl Cache {
    /// Begins to bring `blocks` of `object` here, as part number `part` of `batch`: onto the disks, or into memory
    /// without disks. Present blocks are read back and checked if `verify`.
    pub fn warm_blocks(
        &self,
        object: &ObjectRef,
        blocks: Range<u32>,
        verify: bool,
        batch: &Arc<WarmBatch>,
        part: usize,
    ) {
        for index in blocks {
            let len = object.block_len(index, self.shared.block_size);
            if len == 0 {
                return;
            }
            batch.begin_block(part);
            let begun = PendingBlock { batch: Arc::clone(batch), part, bytes: len as u64, outcome: None };
            if !verify && self.shared.holds_block(object, index) {
                self.classify_blocks(object, index..index + 1);
                begun.complete(Ok(WarmOutcome::AlreadyHeld));
                continue;
            }
            // Another node takes the block, and this node does not collect jobs that would fail late.
            if let Some(error) = self.origin_error().filter(|_| !self.shared.holds_block(object, index)) {
                begun.complete(Err(error));
                continue;
            }
            let shared = Arc::clone(&self.shared);
            let under = Arc::clone(&self.origin);
            let object = object.clone();
            self.shared.workers.run_ahead_or_here(move || {
                begun.complete(warm_block(&shared, under.as_ref(), &object, index, verify));
            });
        }
    }

    /// Brings a block here, on the calling thread; returns whether that took a fetch. A present block is read back and checked if
    /// `verify`.
    ///
    /// # Errors
    /// Why the block is not here.
    pub fn bring_block(&self, object: &ObjectRef, index: u32, verify: bool) -> Result<bool> {
        let came = warm_block(&self.shared, self.origin.as_ref(), object, index, verify)?;
        Ok(matches!(came, WarmOutcome::Fetched))
    }

    /// Bytes that the cache disks may hold; `None` where there are none.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.shared.capacity_bytes()
    }

    /// Whether [`Cache::bring_blocks`] can fetch several blocks at once.
    pub fn fetches_together(&self) -> bool {
        self.origin.capabilities().concurrent_reads
    }

    /// As [`Cache::bring_block`] for many short blocks, up to `at_once` fetched together.
    pub fn bring_blocks(&self, blocks: &[(&ObjectRef, u32)], at_once: usize) -> Vec<Result<bool>> {
        let shared = &self.shared;
        let vacant = |object: &ObjectRef, index: u32| {
            if shared.peer_fetch.get().is_some() || shared.holds_block(object, index) {
                return None;
            }
            let id = BlockId { object: object.id, index };
            let len = object.block_len(index, shared.block_size);
            shared.tier.try_fill(id, len)
        };
        let mut fills: Vec<Option<BlockFill>> = blocks.iter().map(|_| None).collect();
        // A block is claimed when the read begins, so that no reader waits for a block that was not requested yet.
        let mut reads = blocks.iter().zip(&mut fills).filter_map(|(&(object, index), fill)| {
            *fill = vacant(object, index);
            Some(OriginRead { object, offset: u64::from(index) * shared.block_size, sink: fill.as_mut()? })
        });
        let mut answers = self.origin.read_many(&mut reads, at_once, shared.origin_timeout).into_iter();
        drop(reads);
        let fetched: Vec<Option<Result<WarmOutcome>>> = blocks
            .iter()
            .zip(fills)
            .map(|(&(object, index), fill)| {
                let fill = fill?;
                let answer = answers.next()?;
                Some(finish_fetched(shared, self.origin.source_url(), object, index, fill, answer))
            })
            .collect();
        // Blocks that other threads fetch, or without memory, come singly, when no reader waits for the claimed blocks any more.
        fetched
            .into_iter()
            .zip(blocks)
            .map(|(fetched, &(object, index))| match fetched {
                Some(came) => came.map(|came| matches!(came, WarmOutcome::Fetched)),
                None => self.bring_block(object, index, false),
            })
            .collect()
    }

    /// Applies the file's rule to the `blocks` that are on disk; returns the bytes of these.
    pub fn classify_blocks(&self, object: &ObjectRef, blocks: Range<u32>) -> u64 {
        self.shared.classify_blocks(self.origin.source_url(), object, blocks)
    }

    /// Removes `blocks` of `object` from memory and disks; a block that is on both counts once. Pinned blocks stay on disk, unless
    /// `with_pinned`.
    pub fn drop_blocks(&self, object: &ObjectRef, blocks: Range<u32>, with_pinned: bool) -> RemovedBytes {
        self.shared.sent.remove(object.id);
        let disks = self.shared.enabled_store();
        let on_disk = |index| disks.is_some_and(|store| store.contains_block(object, index));
        let in_memory_only: Vec<u32> = blocks.clone().filter(|index| !on_disk(*index)).collect();
        let mut bytes =
            disks.map_or_else(RemovedBytes::default, |store| store.remove_blocks(object, blocks.clone(), with_pinned));
        let mut uncounted = in_memory_only.iter().peekable();
        for index in blocks {
            let counts = uncounted.next_if_eq(&&index).is_some();
            if self.shared.tier.remove(&BlockId { object: object.id, index }) && counts {
                bytes.removed += object.block_len(index, self.shared.block_size) as u64;
            }
        }
        self.shared.stats.blockcache.freed_bytes.add(bytes.removed);
        bytes
    }

    /// Removes a part of all blocks of this source, of any version, or of `every_source`, from memory and disks; `None` beyond
    /// the last part. A block that is on both counts once. Pinned blocks stay on disk, unless `with_pinned`.
    pub fn drop_part(&self, part: usize, every_source: bool, with_pinned: bool) -> Option<RemovedBytes> {
        let tag = SourceTag::of_source(self.origin.source_url());
        let wanted = |object: &ObjectId| every_source || object.has_tag(tag);
        // All of the memory belongs to the first part.
        let disks = self.shared.enabled_store();
        let mut bytes = RemovedBytes::default();
        if part == 0 {
            let on_no_disk = |block: &BlockId| disks.is_none_or(|store| !store.contains(block));
            bytes.removed = self.shared.tier.remove_where(|block| wanted(&block.object), on_no_disk);
        }
        match disks {
            Some(store) => bytes += store.remove_in_part(part, wanted, with_pinned)?,
            None if part > 0 => return None,
            None => {}
        }
        self.shared.stats.blockcache.freed_bytes.add(bytes.removed);
        Some(bytes)
    }
}

impl Cache {
    /// Whether a read of `len` bytes at `offset` needs no fetch: all blocks of the range are complete in memory, or on disk.
    pub fn has_range(&self, object: &ObjectRef, offset: u64, len: usize) -> bool {
        let size = self.shared.block_size;
        let end = (offset + len as u64).min(object.size);
        (offset / size..end.div_ceil(size)).all(|index| {
            let index = index as u32;
            let ready = self.shared.tier.peek(&BlockId { object: object.id, index }).is_some_and(|b| b.is_ready());
            ready || self.on_disk(object, index)
        })
    }
}

impl CacheContext {
    /// Whether a block is where blocks stay: on disk, or in memory without disks.
    fn holds_block(&self, object: &ObjectRef, index: u32) -> bool {
        match self.enabled_store() {
            Some(store) => store.contains_block(object, index),
            None => self.tier.peek(&BlockId { object: object.id, index }).is_some_and(|block| block.is_ready()),
        }
    }

    /// The bytes of all blocks that are where blocks stay: on disk, or in memory without disks.
    pub fn cached_bytes(&self) -> u64 {
        let Some(store) = self.enabled_store() else { return self.tier.held_bytes() };
        let mut bytes = 0;
        store.for_each_block(|_, len| bytes += u64::from(len));
        bytes
    }

    /// Stores blocks with the class of their path. Rules that change meanwhile do not find the blocks yet, so the class is compared again.
    pub(crate) fn store_classed<T>(
        &self,
        source: &str,
        object: &ObjectRef,
        blocks: Range<u32>,
        store: impl FnOnce(u64) -> T,
    ) -> T {
        let class = self.rules.class_for(source, &object.path);
        let stored = store(class);
        if self.rules.class_for(source, &object.path) != class {
            self.classify_blocks(source, object, blocks);
        }
        stored
    }

    fn classify_blocks(&self, source: &str, object: &ObjectRef, blocks: Range<u32>) -> u64 {
        let Some(store) = self.enabled_store() else { return 0 };
        let class = self.rules.class_for(source, &object.path);
        // While no rules are known, classes stay.
        let known = self.rules.is_known();
        let here = blocks.filter(|index| store.contains_block(object, *index));
        here.map(|index| {
            if known {
                store.classify_block(object, index, class);
            }
            object.block_len(index, self.block_size) as u64
        })
        .sum()
    }

    /// Verifies a block by a whole read from disk, and drops a wrong block.
    fn verify_block(&self, object: &ObjectRef, index: u32, deadline: Instant) -> Result<bool> {
        let Some(store) = self.enabled_store() else { return Ok(true) };
        let len = object.block_len(index, self.block_size);
        let mut buf = Some(self.tier.pool().alloc(len, deadline)?);
        Ok(store.read(object, index, 0..len, &mut buf)? == ReadOutcome::Hit)
    }
}

fn warm_block(
    shared: &Arc<CacheContext>,
    under: &dyn OriginStore,
    object: &ObjectRef,
    index: u32,
    verify: bool,
) -> Result<WarmOutcome> {
    let deadline = Instant::now() + shared.origin_timeout;
    let held = shared.holds_block(object, index);
    if held && (!verify || shared.verify_block(object, index, deadline)?) {
        shared.classify_blocks(under.source_url(), object, index..index + 1);
        return Ok(WarmOutcome::AlreadyHeld);
    }
    check_rule_allows(shared, under.source_url(), object, index, verify && !held)?;
    let id = BlockId { object: object.id, index };
    let len = object.block_len(index, shared.block_size);
    let kept = match shared.tier.find_or_fill(id, len, deadline)? {
        TierLookup::Here(block) => {
            let bytes = block.wait_range(0..len, deadline)?;
            store_block(shared, under.source_url(), object, index, &bytes)
        }
        TierLookup::Vacant(fill) => {
            let block = fill.block();
            let kept = run_fill(shared, under, object, fill, true);
            count_warmed(shared, &block, len)?;
            kept
        }
    };
    warm_outcome(shared, under.source_url(), object, index, kept)
}

impl CacheContext {
    /// The bytes of a block that this node has sent.
    fn own_sent(&self, sent: &SentBlock) -> Option<BlockSlice> {
        let block = self.tier.peek(&sent.id())?;
        if !block.is_ready() || block.len() != sent.len {
            return None;
        }
        block.wait_range(0..sent.len, Instant::now()).ok()
    }

    /// Fills the empty `sink` with a block that a node has sent to the store; false, without effect, if no node has the bytes now.
    pub(crate) fn fetch_sent(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn ByteSink) -> bool {
        let Some(sent) = self.sent.find(source, object, index, self.block_size) else { return false };
        if let Some(bytes) = self.own_sent(&sent) {
            sink.spare().copy_from_slice(&bytes);
            sink.commit(bytes.len());
            return true;
        }
        let Some(others) = self.peer_fetch.get() else { return false };
        others.fetch_from(source, &sent.node, &sent.object, sent.index, sink) != PeerFetched::Missing
    }

    /// Brings the blocks of a new object that this node owns onto the disks.
    fn install_owned(self: &Arc<Self>, source: &str, object: &ObjectRef) {
        let others = self.peer_fetch.get();
        for index in 0..u32::try_from(object.block_count(self.block_size)).unwrap_or(u32::MAX) {
            if others.is_none_or(|others| !others.has_other_owner(source, object, index)) {
                self.install_sent(source, object, index);
            }
        }
    }

    /// Brings a block of a new object onto the disks, if a node has the bytes.
    fn install_sent(self: &Arc<Self>, source: &str, object: &ObjectRef, index: u32) {
        let Some(sent) = self.sent.find(source, object, index, self.block_size) else { return };
        if self.holds_block(object, index) {
            return;
        }
        if let Some(bytes) = self.own_sent(&sent) {
            // The result is in the counters of the disks.
            let _ = store_block(self, source, object, index, &bytes);
            return;
        }
        let len = object.block_len(index, self.block_size);
        let Some(_permit) = PrefetchPermit::try_acquire(self, len) else { return };
        let Some(mut fill) = self.tier.try_fill(BlockId { object: object.id, index }, len) else { return };
        if self.fetch_sent(source, object, index, &mut fill) {
            // As above.
            let _ = finish_fill(self, source, object, fill, false);
        } else {
            fill.fail(Error::new(ErrorKind::Unavailable, "no node has the bytes that were sent to the store"));
        }
    }
}

impl Cache {
    /// Notes which transfers have the bytes of a new object.
    pub fn note_sent(&self, object: &ObjectRef, ranges: Vec<SentRange>) {
        let shared = &self.shared;
        shared.sent.insert(object.id, ranges);
        if shared.enabled_store().is_none() {
            // The group has the bytes in memory once, which is enough.
            return;
        }
        let source = self.origin.source_url().to_owned();
        let object = object.clone();
        let context = Arc::clone(shared);
        // Without a free place in the queue, readers bring the blocks.
        let _ = shared.workers.run_ahead(move || context.install_owned(&source, &object));
    }
}

/// Ends a fill that the origin has answered.
fn finish_fetched(
    shared: &CacheContext,
    source: &str,
    object: &ObjectRef,
    index: u32,
    fill: BlockFill,
    answer: Result<()>,
) -> Result<WarmOutcome> {
    if let Err(error) = answer {
        fill.fail(error.clone());
        return Err(error);
    }
    let block = fill.block();
    let len = object.block_len(index, shared.block_size);
    let kept = finish_fill(shared, source, object, fill, false);
    count_warmed(shared, &block, len)?;
    warm_outcome(shared, source, object, index, kept)
}

/// Counts a block whose fill has ended: this does not wait, and returns the fill's error.
fn count_warmed(shared: &CacheContext, block: &Arc<MemBlock>, len: usize) -> Result<()> {
    block.wait_range(0..len, Instant::now())?;
    shared.stats.blockcache.warmed_bytes.add(len as u64);
    Ok(())
}

/// Prevents fetches that the folder's rule would not keep: of a block longer than the quota, and of a `missed` block that is only
/// to be read back, since that would evict another such block.
fn check_rule_allows(shared: &CacheContext, source: &str, object: &ObjectRef, index: u32, missed: bool) -> Result<()> {
    let rules = shared.folder_rules();
    let (Some(store), Some(rule)) = (shared.enabled_store(), rules.rule_for(source, &object.path)) else {
        return Ok(());
    };
    let len = object.block_len(index, shared.block_size);
    if let Some(quota) = store.quota_below(crate::rule_class(rule), len) {
        let why = format!(
            "the quota of {} leaves {} to this node, less than one block of {}: it is not stored; raise the quota \
             with 'spurline limit'",
            rule.url,
            human_bytes(quota),
            human_bytes(len as u64)
        );
        return Err(Error::new(ErrorKind::NoSpace, why));
    }
    if missed && (rule.ttl_seconds.is_some() || rule.quota_bytes.is_some()) {
        let most = rule.quota_bytes.map(|quota| format!(", {} of it at most", human_bytes(quota)));
        let time = rule.ttl_seconds.map(|ttl| format!(", for {ttl} s"));
        let most = most.unwrap_or_default();
        let time = time.unwrap_or_default();
        let why = format!("it is not cached any more: {} is kept by a rule{most}{time}", rule.url);
        return Err(Error::new(ErrorKind::NotFound, why));
    }
    Ok(())
}

/// The result for a fetched block, stored or not.
fn warm_outcome(
    shared: &CacheContext,
    source: &str,
    object: &ObjectRef,
    index: u32,
    kept: PutOutcome,
) -> Result<WarmOutcome> {
    if matches!(kept, PutOutcome::Stored | PutOutcome::Skipped) || shared.holds_block(object, index) {
        return Ok(WarmOutcome::Fetched);
    }
    if kept == PutOutcome::Busy {
        let why = "it is being written or removed, or its file is open in the kernel, or no block on its cache disk \
                   can be evicted for it (all are being written, pinned or open), or the file system refuses writes \
                   although it reports free space (see the log)";
        return Err(Error::new(ErrorKind::Unavailable, why));
    }
    // A rule may have been given during the fetch.
    check_rule_allows(shared, source, object, index, false)?;
    let why = "no cache disk has room for it, or a disk does not answer; 'spurline status' shows them";
    Err(Error::new(ErrorKind::NoSpace, why))
}
