//! An under-store seen through cache disks and memory. A lone mount reads from it directly, a cache node
//! serves peers from it. It knows where blocks are and in which order to look; not how disks keep them, how
//! the under-store is spoken to, or who reads.
//!
//! A read looks in memory, then on disk, then fetches the block once for all who want it. A disk that fails
//! or is slow is a miss; only the under-store can make a read fail.
#![forbid(unsafe_code)]

mod heat;
mod in_flight;
mod merge;
mod rules;
mod sent_on;
mod spread;
mod warm;
mod whole;

use heat::Heat;
use in_flight::{AheadBytes, InFlight, WantedBytes};
use parking_lot::Mutex;
use spurline_mem::{Buf, Fill, Found, Pool, Slice, Tier};
use spurline_origin::UnderStore;
use spurline_store::{FileRange, GRANULE, Kept, Outcome, Store};
use spurline_types::{Attr, BlockId, Error, ErrorKind, ListPage, ObjectId, ObjectRef, Result, Sink, Stats};
use spurline_volume::{Backing, Capacity, Data, Elsewhere, Fetched, Volume, Workers};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use merge::merge_rules;
pub use rules::{Gone, RULES_MAX, Rule, RuleSet};
pub use warm::Batch;

/// What the caches of all sources of one process have in common.
pub struct Shared {
    /// Blocks in memory.
    pub tier: Arc<Tier>,
    /// Blocks on disks, if there are any.
    pub store: Option<Arc<Store>>,
    /// Unit of caching in bytes.
    pub block_size: u64,
    /// How long a request of the under-store may take, retries included.
    pub under_timeout: Duration,
    /// Whether blocks may be sent from their files.
    pub splice: bool,
    /// Counters of this process.
    pub stats: Arc<Stats>,
    workers: Workers,
    heat: Heat,
    in_flight: InFlight,
    /// Long objects whose cached file is being checked in the background.
    checking: Mutex<HashSet<ObjectId>>,
    /// Who may have a block before the under-store is asked.
    elsewhere: OnceLock<Arc<dyn Elsewhere>>,
    /// Copies of other nodes' hot blocks.
    spread: spread::Copies,
    rules: rules::Rules,
    sent_on: sent_on::SentOn,
}

impl Shared {
    /// Puts the parts together; at most `max_downloads` blocks are filled at the same time.
    pub fn new(
        tier: Arc<Tier>,
        store: Option<Arc<Store>>,
        block_size: u64,
        max_downloads: usize,
        under_timeout: Duration,
        splice: bool,
        stats: Arc<Stats>,
    ) -> Arc<Shared> {
        if let Some(store) = &store {
            let tier = Arc::downgrade(&tier);
            store.on_expired(Box::new(move |block| {
                tier.upgrade().map(|tier| tier.remove(block));
            }));
        }
        Arc::new(Shared {
            tier,
            store,
            block_size,
            under_timeout,
            splice,
            stats,
            workers: Workers::new("fill", max_downloads),
            heat: Heat::new(),
            in_flight: InFlight::default(),
            checking: Mutex::default(),
            elsewhere: OnceLock::new(),
            spread: spread::Copies::default(),
            rules: rules::Rules::default(),
            sent_on: sent_on::SentOn::new(),
        })
    }

    /// Has other places asked for a block before the under-store is; once.
    pub fn ask_elsewhere(&self, elsewhere: Arc<dyn Elsewhere>) {
        // A second time nothing happens: fills may be under way.
        let _ = self.elsewhere.set(elsewhere);
    }

    /// The disks, unless there are none.
    fn disks(&self) -> Option<&Store> {
        self.store.as_deref().filter(|store| store.enabled())
    }
}

/// Where the bytes of a read are, when nothing is fetched for it.
pub enum Pinned {
    /// Here.
    Here(Slice),
    /// On disk, and so few, or memory so short, that they are better read straight to where they belong.
    Small,
    /// Neither in memory nor on disk.
    Missing,
}

/// One source through the cache.
pub struct Cache {
    shared: Arc<Shared>,
    under: Arc<dyn UnderStore>,
}

impl Cache {
    /// `under` through the disks and the memory of `shared`.
    pub fn new(shared: Arc<Shared>, under: Arc<dyn UnderStore>) -> Arc<Cache> {
        Arc::new(Cache { shared, under })
    }

    /// The memory this cache's buffers come from.
    pub fn pool(&self) -> &Arc<Pool> {
        self.shared.tier.pool()
    }

    /// How long a request of the under-store may take.
    pub fn timeout(&self) -> Duration {
        self.shared.under_timeout
    }

    /// As [`Volume::lookup`], with metadata asked of the under-store no longer than `max_age` ago.
    ///
    /// # Errors
    /// As [`Volume::lookup`].
    pub fn lookup_within(&self, path: &[u8], max_age: Duration) -> Result<Attr> {
        self.under.lookup_within(path, max_age, Instant::now() + self.shared.under_timeout)
    }

    /// As [`Volume::list`], with metadata asked of the under-store no longer than `max_age` ago.
    ///
    /// # Errors
    /// As [`Volume::list`].
    pub fn list_within(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, max_age: Duration) -> Result<ListPage> {
        self.under.list_within(path, cursor, max, max_age, Instant::now() + self.shared.under_timeout)
    }

    /// The block at `offset` and the part of it that `len` bytes from there cover; the part ends with the block.
    fn locate(&self, object: &ObjectRef, offset: u64, len: usize) -> (BlockId, Range<usize>) {
        let size = self.shared.block_size;
        let start = (offset % size) as usize;
        let index = (offset / size) as u32;
        let end = (start + len).min(object.block_len(index, size));
        (BlockId { object: object.id, index }, start..end.max(start))
    }

    /// Sees to it that what is known of the blocks on disk, the rules they are under above all, outlives a loss of power.
    pub fn sync(&self) {
        if let Some(store) = self.shared.disks() {
            store.sync();
        }
    }

    fn deadline(&self) -> Instant {
        // The fill's own deadline is shorter, so that its sentence, which knows more, is the one people read.
        Instant::now() + self.shared.under_timeout + Duration::from_secs(1)
    }

    /// Up to `len` bytes from `offset`, all of one block, pinned in memory: from memory, from disk, or fetched.
    /// `None` when they are on disk and so few that they are better read straight to where they belong. What is read from
    /// disk for this call alone comes into memory of the NUMA node `near`, where there is some.
    ///
    /// # Errors
    /// As for [`Volume::read`].
    pub fn pin(&self, object: &ObjectRef, offset: u64, len: usize, near: Option<u32>) -> Result<Option<Slice>> {
        match self.pin_held(object, offset, len, near, &mut || {})? {
            Pinned::Here(slice) => Ok(Some(slice)),
            Pinned::Small => Ok(None),
            Pinned::Missing => self.pin_fetched(object, offset, len).map(Some),
        }
    }

    /// The same of what [`Cache::pin_held`] found missing.
    ///
    /// # Errors
    /// As for [`Volume::read`].
    pub fn pin_fetched(&self, object: &ObjectRef, offset: u64, len: usize) -> Result<Slice> {
        let (id, range) = self.locate(object, offset, len);
        self.fetch(object, id, range)
    }

    /// As [`Cache::pin`], but nothing is fetched that is not being fetched already. It says when it is about to wait for that.
    ///
    /// # Errors
    /// As for [`Volume::read`].
    pub fn pin_held(
        &self,
        object: &ObjectRef,
        offset: u64,
        len: usize,
        near: Option<u32>,
        waits: &mut dyn FnMut(),
    ) -> Result<Pinned> {
        object.numbered(self.shared.block_size)?;
        let (id, range) = self.locate(object, offset, len);
        if let Some((block, counts)) = self.shared.tier.find_used(&id) {
            if counts && let Some(store) = &self.shared.store {
                // Or the disks would take what is always read from memory for cold.
                store.touch(object, id.index);
            }
            let stats = &self.shared.stats.blockcache;
            if block.is_ready() {
                stats.hit_bytes.add(range.len() as u64);
                stats.mem_hit_bytes.add(range.len() as u64);
            } else if self.on_disk(object, id.index) {
                // On its way from there.
                stats.hit_bytes.add(range.len() as u64);
            } else {
                stats.miss_bytes.add(range.len() as u64);
            }
            if !block.has(range.end) {
                waits();
            }
            match block.wait(range.clone(), self.deadline()) {
                // The fill that was under way belonged to someone else; its failure is tried again once by ours.
                Err(error) if error.kind() != ErrorKind::Stale && error.kind() != ErrorKind::Timeout => {}
                done => return done.map(Pinned::Here),
            }
        }
        if self.on_disk(object, id.index) {
            if range.len() < GRANULE {
                return Ok(Pinned::Small);
            }
            // Without a buffer for them they are read to where they belong, too.
            let Some(buf) = self.pool().try_alloc_near(range.len(), near) else { return Ok(Pinned::Small) };
            if let Some(slice) = self.pin_from_disk(object, id, range, buf) {
                return Ok(Pinned::Here(slice));
            }
        }
        Ok(Pinned::Missing)
    }

    /// The bytes as a file and an offset, for a transport that can send from a file: under `--iorpc-mode splice`, when
    /// they are in one block that is on disk and was checked, and not in memory anyway.
    pub fn file_range(&self, object: &ObjectRef, offset: u64, len: usize) -> Option<FileRange> {
        let store = self.shared.store.as_ref().filter(|_| self.shared.splice)?;
        object.numbered(self.shared.block_size).ok()?;
        let (id, range) = self.locate(object, offset, len);
        if range.len() != len || len < GRANULE || self.shared.tier.find(&id).is_some_and(|block| block.is_ready()) {
            return None;
        }
        let found = store.file_range(object, id.index, &range);
        if found.is_some() {
            self.shared.stats.blockcache.hit_bytes.add(len as u64);
        } else if store.contains(object, id.index) {
            // Reading it whole into memory checks it; from the next time on it can be sent from its file.
            self.bring(object, id.index);
        }
        found
    }

    /// Reads `range` from disk into a buffer of its own; `None` when it can't be read.
    fn pin_from_disk(&self, object: &ObjectRef, id: BlockId, range: Range<usize>, buf: Buf) -> Option<Slice> {
        let store = self.shared.store.as_ref()?;
        let len = range.len();
        let mut buf = Some(buf);
        // The store has counted and logged what went wrong; the under-store still has the bytes. A buffer the disk
        // may still write to has been taken out of `buf` and is kept from reuse by the store.
        if store.read(object, id.index, range, &mut buf) != Ok(Outcome::Hit) {
            return None;
        }
        self.count_disk_hit(object, id, len);
        buf.map(Slice::owned)
    }

    fn on_disk(&self, object: &ObjectRef, index: u32) -> bool {
        self.shared.store.as_ref().is_some_and(|store| store.contains(object, index))
    }

    fn fetch(&self, object: &ObjectRef, id: BlockId, range: Range<usize>) -> Result<Slice> {
        let deadline = self.deadline();
        let shared = &self.shared;
        let len = object.block_len(id.index, shared.block_size);
        shared.stats.blockcache.miss_bytes.add(range.len() as u64);
        let mut again = true;
        loop {
            // A disk that does not answer ends the fill it was asked for, and is asked no more.
            let mut not_ours = self.on_disk(object, id.index);
            let block = match shared.tier.find(&id) {
                Some(block) => {
                    not_ours = true;
                    block
                }
                None => {
                    let room = WantedBytes::take(shared, len, deadline)?;
                    match shared.tier.find_or_fill(id, len, deadline)? {
                        Found::Here(block) => {
                            not_ours = true;
                            block
                        }
                        Found::Vacant(fill) => {
                            let block = fill.block();
                            let job = self.job(object, fill);
                            shared.workers.urgent(move || {
                                job();
                                drop(room);
                            });
                            block
                        }
                    }
                }
            };
            match block.wait(range.clone(), deadline) {
                // What failed was no fetch of ours from the under-store: that is to be tried once.
                Err(error) if again && not_ours && !matches!(error.kind(), ErrorKind::Stale | ErrorKind::Timeout) => {
                    again = false;
                }
                done => return done,
            }
        }
    }

    fn job(&self, object: &ObjectRef, fill: Fill) -> impl FnOnce() + Send + 'static {
        let (shared, under, object) = (Arc::clone(&self.shared), Arc::clone(&self.under), object.clone());
        move || {
            run_fill(&shared, under.as_ref(), &object, fill, false);
        }
    }

    /// Reads `range` of one block from disk into `dst`; false when it is not there or can't be read.
    fn read_disk(&self, object: &ObjectRef, id: BlockId, range: Range<usize>, dst: &mut [u8]) -> bool {
        let len = range.len();
        let hit = self.shared.store.as_ref().is_some_and(|store| store.get(object, id.index, range, dst) == Ok(true));
        if hit {
            self.count_disk_hit(object, id, len);
        }
        hit
    }

    /// A block read from disk again and again is brought into memory.
    fn count_disk_hit(&self, object: &ObjectRef, id: BlockId, len: usize) {
        self.shared.stats.blockcache.hit_bytes.add(len as u64);
        let block_len = object.block_len(id.index, self.shared.block_size);
        let pool = self.pool();
        // More than its length, so that a reader going through a file once does not push others out of memory. While
        // half of the memory is free there is nobody to push out.
        let free = pool.used_bytes() < pool.limit_bytes() / 2;
        let limit = if free { block_len / 4 } else { block_len + GRANULE };
        if self.shared.heat.add(&id, len.max(GRANULE), limit) {
            self.bring(object, id.index);
        }
    }

    /// Brings one block into memory ahead of its readers, if there is memory to spare.
    fn bring(&self, object: &ObjectRef, index: u32) -> bool {
        let shared = &self.shared;
        let len = object.block_len(index, shared.block_size);
        let id = BlockId { object: object.id, index };
        let Some(count) = AheadBytes::take(shared, len) else { return false };
        let Some(fill) = shared.tier.try_fill(id, len) else { return false };
        let job = self.job(object, fill);
        let (workers, shared) = (&shared.workers, Arc::clone(shared));
        workers.ahead(move || {
            job();
            shared.stats.blockcache.prefetch_bytes.add(len as u64);
            drop(count);
        })
    }
}

/// The most runs of blocks that `info` lists.
const RUNS_MAX: usize = 1000;

fn push_run(held: &mut Vec<serde_json::Value>, run: Option<(u32, u32, &str)>) {
    if let Some((first, last, place)) = run
        && !place.is_empty()
        && held.len() < RUNS_MAX
    {
        held.push(serde_json::json!({ "first": first, "last": last, "where": place }));
    }
}

/// Fills one block from disk or, failing that, from the under-store, and keeps what was fetched on disk; what became of
/// it there. Where there are no disks, memory is enough. A copy of a block that is hot elsewhere stays in memory alone,
/// unless it is to be here for good.
fn run_fill(shared: &Shared, under: &dyn UnderStore, object: &ObjectRef, mut fill: Fill, for_good: bool) -> Kept {
    let failed = |fill: Fill, error: Error| {
        fill.fail(error);
        Kept::NoRoom
    };
    let id = fill.id();
    let len = object.block_len(id.index, shared.block_size);
    if let Some(store) = &shared.store
        && store.contains(object, id.index)
    {
        match store.read(object, id.index, 0..len, &mut fill) {
            Ok(Outcome::Hit) => {
                fill.commit(len);
                return Kept::Here;
            }
            Ok(Outcome::Lost) => {
                let why = "a cache disk does not answer; the block is fetched anew";
                return failed(fill, Error::new(ErrorKind::Unavailable, why));
            }
            Ok(Outcome::Miss) | Err(_) => {}
        }
    }
    let offset = u64::from(id.index) * shared.block_size;
    let others = shared.elsewhere.get();
    let fetched = others.map_or(Fetched::Nowhere, |o| o.fetch(under.source(), object, id.index, &mut fill));
    if fetched == Fetched::Nowhere
        && let Err(error) = under.read(object, offset, &mut fill, Instant::now() + shared.under_timeout)
    {
        return failed(fill, error);
    }
    settle(shared, under.source(), object, fill, fetched == Fetched::Hot && !for_good)
}

/// Ends a fill whose bytes have come, and keeps them on disk; those of a passing copy in memory alone. What became
/// of it.
fn settle(shared: &Shared, source: &str, object: &ObjectRef, fill: Fill, passing: bool) -> Kept {
    let id = fill.id();
    let Some(bytes) = fill.finished() else {
        let why =
            format!("{} ended early: it is shorter than its attributes said", String::from_utf8_lossy(&object.path));
        fill.fail(Error::new(ErrorKind::Stale, why));
        return Kept::NoRoom;
    };
    // Readers have their bytes already; writing here slows down only the next fill, which is what a full
    // disk queue should do.
    keep_or_pass(shared, source, object, id.index, &bytes, passing)
}

/// As [`keep`], and a `passing` copy in memory alone where there is room for one more.
fn keep_or_pass(shared: &Shared, source: &str, object: &ObjectRef, index: u32, bytes: &[u8], passing: bool) -> Kept {
    let id = BlockId { object: object.id, index };
    match passing && shared.spread.holds_one_more(id, &shared.stats) {
        true => Kept::Here,
        false => keep(shared, source, object, index, bytes),
    }
}

/// Keeps a block on disk if there is one.
fn keep(shared: &Shared, source: &str, object: &ObjectRef, index: u32, bytes: &[u8]) -> Kept {
    let Some(store) = shared.disks() else { return Kept::Here };
    // Nobody who asks later will ask for it by this version.
    if object.version.is_unsettled() {
        return Kept::Passed;
    }
    let number = shared.rules.number(source, &object.path);
    let kept = store.put_as(object, index, bytes, number).unwrap_or_else(|error| {
        tracing::debug!(%error, "a block was not kept on disk");
        Kept::NoRoom
    });
    // Who gave other rules while it was written looked for it before it was here.
    let now = shared.rules.number(source, &object.path);
    if kept == Kept::Here && now != number {
        store.classify(object, index, now);
    }
    kept
}

impl Volume for Cache {
    fn source(&self) -> &str {
        self.under.source()
    }

    fn block_size(&self) -> u64 {
        self.shared.block_size
    }

    fn lookup(&self, path: &[u8]) -> Result<Attr> {
        self.under.lookup(path, Instant::now() + self.shared.under_timeout)
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.under.list(path, cursor, max, Instant::now() + self.shared.under_timeout)
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.under.readlink(path, Instant::now() + self.shared.under_timeout)
    }

    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<Data> {
        let want = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        let mut done = 0;
        while done < want {
            let at = offset + done as u64;
            if let Some(slice) = self.pin(object, at, want - done, None)? {
                if done == 0 && slice.len() == want {
                    return Ok(Data::Shared(slice));
                }
                dst[done..done + slice.len()].copy_from_slice(&slice);
                done += slice.len();
                continue;
            }
            let (id, range) = self.locate(object, at, want - done);
            let len = range.len();
            if self.read_disk(object, id, range.clone(), &mut dst[done..done + len]) {
                done += len;
            } else {
                let slice = self.fetch(object, id, range)?;
                dst[done..done + len].copy_from_slice(&slice);
                done += len;
            }
        }
        Ok(Data::Copied(done))
    }

    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, _piece: usize) {
        for index in blocks {
            if self.shared.tier.find(&BlockId { object: object.id, index }).is_none() && !self.bring(object, index) {
                return;
            }
        }
    }

    fn backing(&self, object: &ObjectRef) -> Option<Box<dyn Backing>> {
        self.whole(object)
    }

    fn capacity(&self) -> Result<Capacity> {
        // A bucket has no end; large numbers keep `df` and installers content.
        const ENDLESS: Capacity =
            Capacity { total_bytes: 1 << 60, free_bytes: 1 << 60, files: 1 << 40, files_free: 1 << 40 };
        let stat = self.under.statfs(Instant::now() + self.shared.under_timeout)?;
        Ok(stat.map_or(ENDLESS, |s| Capacity {
            // Without what is kept for root, which is free and not to be had: `df` would count it as used.
            total_bytes: s
                .blocks
                .saturating_sub(s.blocks_free.saturating_sub(s.blocks_available))
                .saturating_mul(s.block_size),
            free_bytes: s.blocks_available.saturating_mul(s.block_size),
            files: s.files,
            files_free: s.files_free,
        }))
    }

    fn info(&self, path: &[u8]) -> Result<serde_json::Value> {
        let attr = self.lookup(path)?;
        let object = ObjectRef::new(self.source(), path, attr.version.clone(), attr.size);
        let size = self.shared.block_size;
        object.numbered(size)?;
        let total = object.blocks(size) as u32;
        let on_disk = self.shared.store.as_ref().map(|store| store.blocks_of(&object));
        let (mut memory, mut disk, mut cached) = (0, 0, 0);
        // Runs of blocks that are in the same place: a file of any length is a few lines, unless it is in tatters.
        let mut held: Vec<serde_json::Value> = Vec::new();
        let mut run: Option<(u32, u32, &str)> = None;
        for index in 0..total {
            let id = BlockId { object: object.id, index };
            let here = (
                self.shared.tier.peek(&id).is_some_and(|block| block.is_ready()),
                on_disk.as_ref().is_some_and(|map| map.contains(index)),
            );
            memory += u32::from(here.0);
            disk += u32::from(here.1);
            cached += u32::from(here.0 || here.1);
            let place = match here {
                (true, true) => "memory and disk",
                (true, false) => "memory",
                (false, true) => "disk",
                (false, false) => "",
            };
            match &mut run {
                Some((_, last, at)) if *at == place => *last = index,
                _ => {
                    push_run(&mut held, run);
                    run = Some((index, index, place));
                }
            }
        }
        push_run(&mut held, run);
        Ok(serde_json::json!({
            "source": self.source(),
            "path": String::from_utf8_lossy(path),
            "kind": attr.kind,
            "length": attr.size,
            "version": attr.version.as_str(),
            "etag": attr.etag,
            "block_size": size,
            "blocks": { "total": total, "cached": cached, "memory": memory, "disk": disk },
            "held": held,
            "rule": self.shared.rules().of(self.source(), path).map(Rule::to_json),
        }))
    }
}
