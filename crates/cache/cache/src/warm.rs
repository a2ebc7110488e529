//! Blocks brought into the cache, or taken out of it, because a job asked for it and not a reader: many at once, each
//! with its own outcome. It does not know who asks.

use crate::{Cache, Shared, keep, run_fill, settle};
use parking_lot::{Condvar, Mutex};
use spurline_mem::{Fill, Found, MemBlock};
use spurline_origin::{Read, UnderStore};
use spurline_store::{Kept, Outcome};
use spurline_types::units::human_bytes;
use spurline_types::{BlockId, Error, ErrorKind, ObjectRef, Result};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// What became of one part of a batch: bytes of whole blocks.
#[derive(Debug, Clone, Default)]
pub struct Warmed {
    /// Fetched now.
    pub fetched_bytes: u64,
    /// Here already.
    pub held_bytes: u64,
    /// Why not all of it is here, the first reason.
    pub error: Option<Error>,
}

#[derive(Default)]
struct State {
    parts: Vec<Warmed>,
    under_way: usize,
}

/// Parts of objects that are being brought here together.
#[derive(Default)]
pub struct Batch {
    state: Mutex<State>,
    changed: Condvar,
}

/// How one block got here.
enum Came {
    Fetched,
    WasHere,
}

impl Batch {
    fn begin(&self, part: usize) {
        let mut state = self.state.lock();
        state.under_way += 1;
        if state.parts.len() <= part {
            state.parts.resize_with(part + 1, Warmed::default);
        }
    }

    fn end(&self, part: usize, bytes: u64, came: Result<Came>) {
        let mut state = self.state.lock();
        state.under_way -= 1;
        let warmed = &mut state.parts[part];
        match came {
            Ok(Came::Fetched) => warmed.fetched_bytes += bytes,
            Ok(Came::WasHere) => warmed.held_bytes += bytes,
            Err(error) => drop(warmed.error.get_or_insert(error)),
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits until all is here, or until `deadline`: what became of `parts` parts.
    pub fn wait(&self, parts: usize, deadline: Instant) -> Vec<Warmed> {
        let mut state = self.state.lock();
        while state.under_way > 0 && !self.changed.wait_until(&mut state, deadline).timed_out() {}
        let late = state.under_way > 0;
        let mut done = state.parts.clone();
        done.resize_with(parts, Warmed::default);
        if late {
            for part in &mut done {
                // Which of them are late is not known here; asked for again, those that are not are here already.
                part.error.get_or_insert_with(|| Error::new(ErrorKind::Timeout, "not all of it came in time"));
            }
        }
        done
    }
}

/// Sees to it that a block that was begun is ended, whatever becomes of its job.
struct Begun {
    batch: Arc<Batch>,
    part: usize,
    bytes: u64,
    came: Option<Result<Came>>,
}

impl Begun {
    fn ended(mut self, came: Result<Came>) {
        self.came = Some(came);
    }
}

impl Drop for Begun {
    fn drop(&mut self) {
        let given_up = || Err(Error::new(ErrorKind::Unavailable, "it was given up"));
        self.batch.end(self.part, self.bytes, self.came.take().unwrap_or_else(given_up));
    }
}

impl Cache {
    /// Begins to bring `blocks` of `object` here, as part number `part` of `batch`: onto the disks, or into memory
    /// where there are none. What is here already is read back and checked if `verify`.
    pub fn warm(&self, object: &ObjectRef, blocks: Range<u32>, verify: bool, batch: &Arc<Batch>, part: usize) {
        for index in blocks {
            let len = object.block_len(index, self.shared.block_size);
            if len == 0 {
                return;
            }
            batch.begin(part);
            let begun = Begun { batch: Arc::clone(batch), part, bytes: len as u64, came: None };
            if !verify && self.shared.holds(object, index) {
                self.classify(object, index..index + 1);
                begun.ended(Ok(Came::WasHere));
                continue;
            }
            let (shared, under, object) = (Arc::clone(&self.shared), Arc::clone(&self.under), object.clone());
            self.shared.workers.ahead_or_here(move || {
                begun.ended(bring_here(&shared, under.as_ref(), &object, index, verify));
            });
        }
    }

    /// Brings one block here, on the thread that asks; whether it had to be fetched. What is here already is read back
    /// and checked if `verify`.
    ///
    /// # Errors
    /// Why it is not here.
    pub fn bring_block(&self, object: &ObjectRef, index: u32, verify: bool) -> Result<bool> {
        let came = bring_here(&self.shared, self.under.as_ref(), object, index, verify)?;
        Ok(matches!(came, Came::Fetched))
    }

    /// Bytes that the cache disks may hold; `None` where there are none.
    pub fn capacity_bytes(&self) -> Option<u64> {
        self.shared.capacity_bytes()
    }

    /// Whether [`Cache::bring_blocks`] can fetch several blocks at once.
    pub fn fetches_together(&self) -> bool {
        self.under.capabilities().together
    }

    /// As [`Cache::bring_block`] for many short blocks, up to `at_once` of them fetched together.
    pub fn bring_blocks(&self, blocks: &[(&ObjectRef, u32)], at_once: usize) -> Vec<Result<bool>> {
        let shared = &self.shared;
        let vacant = |object: &ObjectRef, index: u32| {
            if shared.elsewhere.get().is_some() || shared.holds(object, index) {
                return None;
            }
            let (id, len) = (BlockId { object: object.id, index }, object.block_len(index, shared.block_size));
            shared.tier.try_fill(id, len)
        };
        let mut fills: Vec<Option<Fill>> = blocks.iter().map(|_| None).collect();
        // Each is claimed when its read begins, so that no reader waits for one that nobody has asked for yet.
        let mut reads = blocks.iter().zip(&mut fills).filter_map(|(&(object, index), fill)| {
            *fill = vacant(object, index);
            Some(Read { object, offset: u64::from(index) * shared.block_size, sink: fill.as_mut()? })
        });
        let mut answers = self.under.read_many(&mut reads, at_once, shared.under_timeout).into_iter();
        drop(reads);
        let fetched: Vec<Option<Result<Came>>> = blocks
            .iter()
            .zip(fills)
            .map(|(&(object, index), fill)| {
                let (fill, answer) = (fill?, answers.next()?);
                Some(fetched(shared, self.under.source(), object, index, fill, answer))
            })
            .collect();
        // Those that others are fetching, or that found no memory: one by one, when nobody waits for these any more.
        let one = |(fetched, &(object, index)): (Option<Result<Came>>, &(&ObjectRef, u32))| match fetched {
            Some(came) => came.map(|came| matches!(came, Came::Fetched)),
            None => self.bring_block(object, index, false),
        };
        fetched.into_iter().zip(blocks).map(one).collect()
    }

    /// Sees to it that those of `blocks` that are on disk are under the rule for their file; the bytes that they have.
    pub fn classify(&self, object: &ObjectRef, blocks: Range<u32>) -> u64 {
        self.shared.classify(self.under.source(), object, blocks)
    }

    /// Takes `blocks` of `object` out of memory and off the disks; how many bytes they had.
    pub fn drop_blocks(&self, object: &ObjectRef, blocks: Range<u32>) -> u64 {
        let disks = self.shared.disks();
        let mut bytes = disks.map_or(0, |store| store.remove_blocks(object, blocks.clone()));
        for index in blocks {
            let id = BlockId { object: object.id, index };
            let in_memory = self.shared.tier.remove(&id);
            if disks.is_none() && in_memory {
                bytes += object.block_len(index, self.shared.block_size) as u64;
            }
        }
        self.shared.stats.blockcache.freed_bytes.add(bytes);
        bytes
    }
}

impl Cache {
    /// Whether this cache can answer a read of `len` bytes at `offset` without fetching anything: all of it is in blocks
    /// that are whole in memory, or on disk.
    pub fn has(&self, object: &ObjectRef, offset: u64, len: usize) -> bool {
        let (size, end) = (self.shared.block_size, (offset + len as u64).min(object.size));
        let here = |index: u64| {
            let index = index as u32;
            let ready = self.shared.tier.peek(&BlockId { object: object.id, index }).is_some_and(|b| b.is_ready());
            ready || self.on_disk(object, index)
        };
        (offset / size..end.div_ceil(size)).all(here)
    }
}

impl Shared {
    /// Whether a block is where it stays: on disk, or in memory where there are no disks.
    fn holds(&self, object: &ObjectRef, index: u32) -> bool {
        match self.disks() {
            Some(store) => store.contains(object, index),
            None => self.tier.peek(&BlockId { object: object.id, index }).is_some_and(|block| block.is_ready()),
        }
    }

    fn classify(&self, source: &str, object: &ObjectRef, blocks: Range<u32>) -> u64 {
        let Some(store) = self.disks() else { return 0 };
        let number = self.rules.number(source, &object.path);
        // While no rules are known, blocks keep the classes they have.
        let known = self.rules.set().revision > 0;
        let here = blocks.filter(|index| store.contains(object, *index));
        here.map(|index| {
            if known {
                store.classify(object, index, number);
            }
            object.block_len(index, self.block_size) as u64
        })
        .sum()
    }

    /// Reads a whole block from disk, which checks it; a wrong one is dropped by that.
    fn is_right(&self, object: &ObjectRef, index: u32, deadline: Instant) -> Result<bool> {
        let Some(store) = self.disks() else { return Ok(true) };
        let len = object.block_len(index, self.block_size);
        let mut buf = Some(self.tier.pool().alloc(len, deadline)?);
        Ok(store.read(object, index, 0..len, &mut buf)? == Outcome::Hit)
    }
}

fn bring_here(
    shared: &Arc<Shared>,
    under: &dyn UnderStore,
    object: &ObjectRef,
    index: u32,
    verify: bool,
) -> Result<Came> {
    let deadline = Instant::now() + shared.under_timeout;
    let held = shared.holds(object, index);
    if held && (!verify || shared.is_right(object, index, deadline)?) {
        shared.classify(under.source(), object, index..index + 1);
        return Ok(Came::WasHere);
    }
    let_be(shared, under.source(), object, index, verify && !held)?;
    let (id, len) = (BlockId { object: object.id, index }, object.block_len(index, shared.block_size));
    let kept = match shared.tier.find_or_fill(id, len, deadline)? {
        Found::Here(block) => {
            let bytes = block.wait(0..len, deadline)?;
            keep(shared, under.source(), object, index, &bytes)
        }
        Found::Vacant(fill) => {
            let block = fill.block();
            let kept = run_fill(shared, under, object, fill, true);
            warmed(shared, &block, len)?;
            kept
        }
    };
    came(shared, under.source(), object, index, kept)
}

/// Ends a fill that the under-store has answered.
fn fetched(
    shared: &Shared,
    source: &str,
    object: &ObjectRef,
    index: u32,
    fill: Fill,
    answer: Result<()>,
) -> Result<Came> {
    if let Err(error) = answer {
        fill.fail(error.clone());
        return Err(error);
    }
    let (block, len) = (fill.block(), object.block_len(index, shared.block_size));
    let kept = settle(shared, source, object, fill, false);
    warmed(shared, &block, len)?;
    came(shared, source, object, index, kept)
}

/// Counts a block whose fill has ended: this does not wait, and tells why it failed if it did.
fn warmed(shared: &Shared, block: &Arc<MemBlock>, len: usize) -> Result<()> {
    block.wait(0..len, Instant::now())?;
    shared.stats.blockcache.warmed_bytes.add(len as u64);
    Ok(())
}

/// Sees to it that nothing is fetched that the rule for its folder does not keep: a block longer than all the room, and
/// one that is `missed` when it is to be read back, for in its place another would go that is still to be read back.
fn let_be(shared: &Shared, source: &str, object: &ObjectRef, index: u32, missed: bool) -> Result<()> {
    let rules = shared.rules();
    let (Some(store), Some(rule)) = (shared.disks(), rules.of(source, &object.path)) else { return Ok(()) };
    let len = object.block_len(index, shared.block_size);
    if let Some(quota) = store.quota_below(rule.number, len) {
        let why = format!(
            "the quota of {} leaves {} to this node, less than a block of {}, and blocks do not divide: it is not kept; \
             'spurline limit' gives more",
            rule.url,
            human_bytes(quota),
            human_bytes(len as u64)
        );
        return Err(Error::new(ErrorKind::NoSpace, why));
    }
    if missed && (rule.ttl_seconds.is_some() || rule.quota_bytes.is_some()) {
        let most = rule.quota_bytes.map(|quota| format!(", {} of it at most", human_bytes(quota)));
        let time = rule.ttl_seconds.map(|ttl| format!(", for {ttl} s"));
        let (most, time) = (most.unwrap_or_default(), time.unwrap_or_default());
        let why = format!("it is not held any more: {} is kept by a rule{most}{time}", rule.url);
        return Err(Error::new(ErrorKind::NotFound, why));
    }
    Ok(())
}

/// What became of a block that was fetched, and kept or not.
fn came(shared: &Shared, source: &str, object: &ObjectRef, index: u32, kept: Kept) -> Result<Came> {
    if matches!(kept, Kept::Here | Kept::Passed) || shared.holds(object, index) {
        return Ok(Came::Fetched);
    }
    if kept == Kept::Busy {
        let why = "it is being written or removed, its file is open and read past this process, or nothing on its cache disk \
                   may go for it: all of that is being written, pinned or open; or its file system refuses more than it seems to \
                   have room for, which the log says";
        return Err(Error::new(ErrorKind::Unavailable, why));
    }
    // A rule that came while it was fetched.
    let_be(shared, source, object, index, false)?;
    let why = "no cache disk has room for it, or a disk does not answer; 'spurline status' shows them";
    Err(Error::new(ErrorKind::NoSpace, why))
}
