//! An origin seen through cache disks and memory. A lone mount reads here directly, and a cache node serves peers from here.
//! Knows where blocks are and in which order to search, not how disks store blocks, how the origin is accessed, or where reads
//! come from.
//!
//! A read searches memory, then disk, then fetches the block once for all readers. A failing or slow disk is a miss;
//! only the origin can make a read fail.
#![forbid(unsafe_code)]

mod heat;
mod hot_replicas;
mod in_flight;
mod origin_health;
mod redirect;
mod rules;
mod sent;
mod warm;
mod whole_file;

use heat::BlockHeat;
use in_flight::{FetchPermit, FillBudget, PrefetchPermit};
use origin_health::OriginHealth;
use parking_lot::Mutex;
use spurline_exec::PriorityWorkers;
use spurline_mem::{BlockFill, BlockSlice, BufferPool, MemTier, PoolBuf, TierLookup};
use spurline_origin::OriginStore;
use spurline_store::{FileRange, GRANULE, PutOutcome, ReadOutcome, Store};
use spurline_types::{
    BlockId, ByteSink, Error, ErrorKind, ListPage, ObjectAttr, ObjectHeaders, ObjectId, ObjectRef, Result, Stats,
};
use spurline_volume::info::{BlockCounts, BlockRun, FileInfo};
use spurline_volume::{BackingFile, PeerFetch, PeerFetched, ReadData, Volume, VolumeSpace};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub use rules::{FolderRule, FolderRules, WriteClass, rule_class};
pub use sent::{SentRange, sent_object};
pub use spurline_store::RemovedBytes;
pub use warm::WarmBatch;

/// State shared by the caches of all sources of a process.
pub struct CacheContext {
    /// Blocks in memory.
    pub tier: Arc<MemTier>,
    /// Blocks on disks, if there are any.
    pub store: Option<Arc<Store>>,
    /// Unit of caching in bytes.
    pub block_size: u64,
    /// Deadline of a request to the origin, retries included.
    pub origin_timeout: Duration,
    /// Whether blocks may be sent from the files of the disks.
    pub splice: bool,
    /// Counters of this process.
    pub stats: Arc<Stats>,
    workers: PriorityWorkers,
    heat: BlockHeat,
    in_flight: FillBudget,
    /// Long objects whose cached file is being checked in the background.
    checking: Mutex<HashSet<ObjectId>>,
    /// Peers that may have a block, tried before the origin.
    peer_fetch: OnceLock<Arc<dyn PeerFetch>>,
    /// Copies of other nodes' hot blocks.
    hot_replicas: hot_replicas::HotReplicas,
    rules: rules::RuleTable,
    redirects: redirect::RedirectTable,
    /// New objects whose bytes nodes have sent to the store.
    sent: sent::SentObjects,
}

impl CacheContext {
    /// Creates the context; at most `max_downloads` blocks are filled at the same time.
    pub fn new(
        tier: Arc<MemTier>,
        store: Option<Arc<Store>>,
        block_size: u64,
        max_downloads: usize,
        under_timeout: Duration,
        splice: bool,
        stats: Arc<Stats>,
    ) -> Arc<CacheContext> {
        if let Some(store) = &store {
            let tier = Arc::downgrade(&tier);
            store.set_expiry_handler(Box::new(move |block| {
                tier.upgrade().map(|tier| tier.remove(block));
            }));
        }
        Arc::new(CacheContext {
            tier,
            store,
            block_size,
            origin_timeout: under_timeout,
            splice,
            stats,
            workers: PriorityWorkers::new("fill", max_downloads.max(2)),
            heat: BlockHeat::new(),
            in_flight: FillBudget::default(),
            checking: Mutex::default(),
            peer_fetch: OnceLock::new(),
            hot_replicas: hot_replicas::HotReplicas::default(),
            rules: rules::RuleTable::default(),
            redirects: redirect::RedirectTable::new(),
            sent: sent::SentObjects::default(),
        })
    }

    /// Sets the peers that are tried for a block before the origin; the first call holds.
    pub fn set_peer_fetch(&self, elsewhere: Arc<dyn PeerFetch>) {
        // A second call is ignored: fills may be running.
        let _ = self.peer_fetch.set(elsewhere);
    }

    /// The store, if there are disks.
    fn enabled_store(&self) -> Option<&Store> {
        self.store.as_deref().filter(|store| store.is_enabled())
    }
}

/// The result of pinning cached bytes of a read.
pub enum PinOutcome {
    /// Pinned in memory.
    Slice(BlockSlice),
    /// The bytes are on disk, and so few, or memory is so short, that the caller should read straight to the destination.
    Small,
    /// Neither in memory nor on disk.
    Missing,
}

/// A source through the cache.
pub struct Cache {
    shared: Arc<CacheContext>,
    origin: Arc<dyn OriginStore>,
    /// Set on a cache node: readers have other nodes while this node's origin is down.
    health: Option<Arc<OriginHealth>>,
}

impl Cache {
    /// Caches `under` on the disks and in the memory of `shared`.
    pub fn new(shared: Arc<CacheContext>, under: Arc<dyn OriginStore>) -> Arc<Cache> {
        Arc::new(Cache { shared, origin: under, health: None })
    }

    /// As [`Cache::new`], for a cache node: while the origin does not serve this node, requests that need the origin fail at once
    /// with [`ErrorKind::OriginDown`] or the refusal, so that readers use another node. Cached data is served.
    pub fn for_node(shared: Arc<CacheContext>, under: Arc<dyn OriginStore>) -> Arc<Cache> {
        let health = Some(OriginHealth::new(Arc::clone(&under)));
        Arc::new(Cache { shared, origin: under, health })
    }

    /// Why the origin does not serve this node; `None` while the origin does.
    pub fn origin_error(&self) -> Option<Error> {
        self.health.as_ref()?.down_error()
    }

    /// Waits for data of the origin by `attempt`, which gets the deadline, but not while the origin is down.
    fn wait_origin<T>(&self, deadline: Instant, mut attempt: impl FnMut(Instant) -> Result<T>) -> Result<T> {
        match &self.health {
            None => attempt(deadline),
            Some(health) => health.wait_origin(deadline, attempt),
        }
    }

    /// Sends a metadata request by `ask`, which gets the deadline.
    fn ask_origin<T>(&self, ask: impl Fn(Instant) -> Result<T>) -> Result<T> {
        match &self.health {
            None => ask(Instant::now() + self.shared.origin_timeout),
            Some(health) => health.ask_origin(self.shared.origin_timeout, ask),
        }
    }

    /// The memory this cache's buffers come from.
    pub fn pool(&self) -> &Arc<BufferPool> {
        self.shared.tier.pool()
    }

    /// Deadline of a request to the origin.
    pub fn origin_timeout(&self) -> Duration {
        self.shared.origin_timeout
    }

    /// As [`Volume::lookup`], with metadata at most `max_age` old.
    pub fn lookup_within(&self, path: &[u8], max_age: Duration) -> Result<ObjectAttr> {
        self.ask_origin(|deadline| self.origin.lookup_within(path, max_age, deadline))
    }

    /// As [`Volume::list`], with metadata at most `max_age` old.
    pub fn list_within(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, max_age: Duration) -> Result<ListPage> {
        self.ask_origin(|deadline| self.origin.list_within(path, cursor, max, max_age, deadline))
    }

    /// The block at `offset`, and the part that `len` bytes from there cover, up to the end of the block.
    fn block_range(&self, object: &ObjectRef, offset: u64, len: usize) -> (BlockId, Range<usize>) {
        let size = self.shared.block_size;
        let start = (offset % size) as usize;
        let index = (offset / size) as u32;
        let end = (start + len).min(object.block_len(index, size));
        (BlockId { object: object.id, index }, start..end.max(start))
    }

    /// Syncs the index of the blocks on disk, above all the rules, against a loss of power.
    pub fn sync_index(&self) {
        if let Some(store) = self.shared.enabled_store() {
            store.sync_logs();
        }
    }

    fn read_deadline(&self) -> Instant {
        // Longer than the fill's own deadline, so that the fill's more precise error is reported.
        Instant::now() + self.shared.origin_timeout + Duration::from_secs(1)
    }

    /// Pins up to `len` bytes from `offset`, all of the same block: from memory, from disk, or fetched. `None` when the bytes are
    /// on disk and so few that the caller should read straight to the destination. Bytes read from disk for this call alone go to
    /// memory of the NUMA node `near`, if there is some.
    ///
    /// # Errors
    /// As for [`Volume::read`].
    pub fn pin_range(
        &self,
        object: &ObjectRef,
        offset: u64,
        len: usize,
        near: Option<u32>,
    ) -> Result<Option<BlockSlice>> {
        match self.pin_cached(object, offset, len, near, &mut || {})? {
            PinOutcome::Slice(slice) => Ok(Some(slice)),
            PinOutcome::Small => Ok(None),
            PinOutcome::Missing => self.pin_fetched(object, offset, len).map(Some),
        }
    }

    /// Fetches and pins bytes that [`Cache::pin_cached`] found missing.
    ///
    /// # Errors
    /// As for [`Volume::read`].
    pub fn pin_fetched(&self, object: &ObjectRef, offset: u64, len: usize) -> Result<BlockSlice> {
        let (id, range) = self.block_range(object, offset, len);
        self.fetch_block(object, id, range)
    }

    /// As [`Cache::pin_range`], but starts no fetch; waits for a running fetch, and calls `waits` before.
    ///
    /// # Errors
    /// As for [`Volume::read`].
    pub fn pin_cached(
        &self,
        object: &ObjectRef,
        offset: u64,
        len: usize,
        near: Option<u32>,
        waits: &mut dyn FnMut(),
    ) -> Result<PinOutcome> {
        object.check_block_count(self.shared.block_size)?;
        let (id, range) = self.block_range(object, offset, len);
        if let Some((block, counts)) = self.shared.tier.find_used(&id) {
            if counts && let Some(store) = &self.shared.store {
                // Otherwise the disks would treat blocks that are always read from memory as cold.
                store.touch_block(object, id.index);
            }
            let stats = &self.shared.stats.blockcache;
            if block.is_ready() {
                stats.hit_bytes.add(range.len() as u64);
                stats.mem_hit_bytes.add(range.len() as u64);
            } else if self.on_disk(object, id.index) {
                // Being read from disk.
                stats.hit_bytes.add(range.len() as u64);
            } else {
                stats.miss_bytes.add(range.len() as u64);
            }
            let filled = block.is_filled(&range);
            if !filled {
                waits();
            }
            let wait = |until| block.wait_range(range.clone(), until);
            let slice = if filled || self.on_disk(object, id.index) {
                wait(self.read_deadline())
            } else {
                self.wait_origin(self.read_deadline(), wait)
            };
            match slice {
                // The running fill belonged to another reader; after its failure, this reader fetches.
                Err(error) if !ends_read(error.kind()) => {}
                done => return done.map(PinOutcome::Slice),
            }
        }
        if self.on_disk(object, id.index) {
            if range.len() < GRANULE {
                return Ok(PinOutcome::Small);
            }
            // Without a buffer, too, the caller reads to the destination.
            let Some(buf) = self.pool().try_alloc_near(range.len(), near) else { return Ok(PinOutcome::Small) };
            if let Some(slice) = self.pin_from_disk(object, id, range, buf) {
                return Ok(PinOutcome::Slice(slice));
            }
        }
        Ok(PinOutcome::Missing)
    }

    /// The bytes as file and offset, for a transport that can send from a file: under `--iorpc-mode splice`, when a single block
    /// holds the bytes, and the block is on disk, verified and not in memory.
    pub fn file_range(&self, object: &ObjectRef, offset: u64, len: usize) -> Option<FileRange> {
        let store = self.shared.store.as_ref().filter(|_| self.shared.splice)?;
        object.check_block_count(self.shared.block_size).ok()?;
        let (id, range) = self.block_range(object, offset, len);
        if range.len() != len || len < GRANULE || self.shared.tier.find(&id).is_some_and(|block| block.is_ready()) {
            return None;
        }
        let found = store.file_range(object, id.index, &range);
        if found.is_some() {
            self.shared.stats.blockcache.hit_bytes.add(len as u64);
        } else if store.contains_block(object, id.index) {
            // A whole read into memory verifies the block; later requests can be sent from the file.
            self.prefetch_block(object, id.index);
        }
        found
    }

    /// Reads `range` from disk into a new buffer; `None` when the disk can't be read.
    fn pin_from_disk(&self, object: &ObjectRef, id: BlockId, range: Range<usize>, buf: PoolBuf) -> Option<BlockSlice> {
        let store = self.shared.store.as_ref()?;
        let len = range.len();
        let mut buf = Some(buf);
        // The store has counted and logged the failure; the origin still has the bytes. A buffer to which the disk may still
        // write has been taken out of `buf`, and the store prevents reuse.
        if store.read(object, id.index, range, &mut buf) != Ok(ReadOutcome::Hit) {
            return None;
        }
        self.count_disk_hit(object, id, len);
        buf.map(BlockSlice::from_buf)
    }

    fn on_disk(&self, object: &ObjectRef, index: u32) -> bool {
        self.shared.store.as_ref().is_some_and(|store| store.contains_block(object, index))
    }

    fn fetch_block(&self, object: &ObjectRef, id: BlockId, range: Range<usize>) -> Result<BlockSlice> {
        let deadline = self.read_deadline();
        let shared = &self.shared;
        let len = object.block_len(id.index, shared.block_size);
        shared.stats.blockcache.miss_bytes.add(range.len() as u64);
        let mut again = true;
        loop {
            // A fill from a disk that does not answer fails, and the disk is not used again.
            let mut not_ours = self.on_disk(object, id.index);
            let block = match shared.tier.find(&id) {
                Some(block) => {
                    not_ours = true;
                    block
                }
                None => {
                    let room = self.wait_origin(deadline, |until| FetchPermit::acquire(shared, len, until))?;
                    match self.wait_origin(deadline, |until| shared.tier.find_or_fill(id, len, until))? {
                        TierLookup::Here(block) => {
                            not_ours = true;
                            block
                        }
                        TierLookup::Vacant(fill) => {
                            let block = fill.block();
                            // Long pieces are those of sequential readers, and arrive in any order.
                            let wanted = if range.len() <= SHORT_READ { range.start } else { 0 };
                            let job = self.fill_job(object, fill, wanted);
                            shared.workers.run_urgent(move || {
                                job();
                                drop(room);
                            });
                            block
                        }
                    }
                }
            };
            match self.wait_origin(deadline, |until| block.wait_range(range.clone(), until)) {
                // The failure was not of a fetch of our own from the origin: that is tried once.
                Err(error) if again && not_ours && !ends_read(error.kind()) => {
                    again = false;
                }
                done => return done,
            }
        }
    }

    /// The job that fills a block for a reader of the bytes from `wanted` in the block.
    fn fill_job(&self, object: &ObjectRef, fill: BlockFill, wanted: usize) -> impl FnOnce() + Send + 'static {
        let shared = Arc::clone(&self.shared);
        let under = Arc::clone(&self.origin);
        let object = object.clone();
        move || {
            run_fill(&shared, under.as_ref(), &object, fill, wanted, false);
        }
    }

    /// Reads `range` of a block from disk into `dst`; false when the block is absent or unreadable.
    fn read_disk(&self, object: &ObjectRef, id: BlockId, range: Range<usize>, dst: &mut [u8]) -> bool {
        let len = range.len();
        let hit =
            self.shared.store.as_ref().is_some_and(|store| store.read_copied(object, id.index, range, dst) == Ok(true));
        if hit {
            self.count_disk_hit(object, id, len);
        }
        hit
    }

    /// Brings a block into memory that is read from disk again and again.
    fn count_disk_hit(&self, object: &ObjectRef, id: BlockId, len: usize) {
        self.shared.stats.blockcache.hit_bytes.add(len as u64);
        let block_len = object.block_len(id.index, self.shared.block_size);
        let pool = self.pool();
        // More than the length, so that a single pass over a file evicts nothing from memory. While half of the memory is free
        // nothing is evicted.
        let free = pool.used_bytes() < pool.limit_bytes() / 2;
        let limit = if free { block_len / 4 } else { block_len + GRANULE };
        if self.shared.heat.record_read(&id, len.max(GRANULE), limit) {
            self.prefetch_block(object, id.index);
        }
    }

    /// Begins to make a local file that the origin gives up the object's file on a cache disk; false where there is none.
    fn take_over_file(&self, object: &ObjectRef) -> bool {
        let Some(store) = &self.shared.store else { return false };
        let Some(local) = self.origin.take_local_file(object) else { return false };
        let Some(adoption) = local.file().and_then(|file| store.begin_adoption(object, file)) else { return false };
        let shared = Arc::clone(&self.shared);
        let source = self.origin.source_url().to_owned();
        let object = object.clone();
        self.shared.workers.run_ahead(move || {
            if let Some(file) = local.file() {
                let blocks = 0..object.block_count(shared.block_size) as u32;
                shared.store_classed(&source, &object, blocks, |class| adoption.finish(file, class));
            }
        })
    }

    /// Brings a block into memory ahead of readers, if memory is free.
    fn prefetch_block(&self, object: &ObjectRef, index: u32) -> bool {
        let shared = &self.shared;
        let len = object.block_len(index, shared.block_size);
        let id = BlockId { object: object.id, index };
        let Some(count) = PrefetchPermit::try_acquire(shared, len) else { return false };
        let Some(fill) = shared.tier.try_fill(id, len) else { return false };
        let job = self.fill_job(object, fill, 0);
        let workers = &shared.workers;
        let shared = Arc::clone(shared);
        workers.run_ahead(move || {
            job();
            shared.stats.blockcache.prefetch_bytes.add(len as u64);
            drop(count);
        })
    }
}

/// Whether a failed fill ends the read: another fill would fail too, or take too long.
fn ends_read(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Stale | ErrorKind::Timeout | ErrorKind::OriginDown | ErrorKind::OriginFailed)
}

/// A reader of so few bytes waits for these, and not for what is before in the block.
const SHORT_READ: usize = 128 << 10;

/// Maximum runs of blocks in `info`.
const BLOCK_RUNS_MAX: usize = 1000;

/// Adds a block to the runs of `held`, unless there are as many as are shown.
fn add_to_runs(held: &mut Vec<BlockRun>, index: u32, place: &str) {
    let index = u64::from(index);
    if let Some(run) = held.last_mut()
        && run.place == place
        && run.last + 1 == index
    {
        run.last = index;
    } else if held.len() < BLOCK_RUNS_MAX {
        held.push(BlockRun { first: index, last: index, place: place.to_owned(), holder: None });
    }
}

/// Fills a block from disk or else from the origin, there from the byte `wanted` on, and stores fetched bytes on disk; returns the
/// result of storing. Without disks, memory is enough. A replica of a block that is hot elsewhere stays in memory alone, unless
/// `for_good`.
fn run_fill(
    shared: &CacheContext,
    under: &dyn OriginStore,
    object: &ObjectRef,
    mut fill: BlockFill,
    wanted: usize,
    for_good: bool,
) -> PutOutcome {
    let id = fill.id();
    let len = object.block_len(id.index, shared.block_size);
    if let Some(store) = &shared.store
        && store.contains_block(object, id.index)
    {
        match store.read(object, id.index, 0..len, &mut fill) {
            Ok(ReadOutcome::Hit) => {
                fill.commit(len);
                return PutOutcome::Stored;
            }
            Ok(ReadOutcome::Lost) => {
                let why = "a cache disk does not answer; the block is fetched again";
                return fail_fill(fill, Error::new(ErrorKind::Unavailable, why));
            }
            Ok(ReadOutcome::Miss) | Err(_) => {}
        }
    }
    let source = under.source_url();
    let fetched = if shared.fetch_sent(source, object, id.index, &mut fill) {
        PeerFetched::Found
    } else {
        let others = shared.peer_fetch.get();
        others.map_or(PeerFetched::Missing, |others| others.fetch_block(source, object, id.index, &mut fill))
    };
    if fetched == PeerFetched::Missing {
        let begin = fill.begin_at(wanted / GRANULE * GRANULE);
        if let Err(error) = read_origin(shared, under, object, begin, &mut fill) {
            return fail_fill(fill, error);
        }
    }
    finish_fill(shared, source, object, fill, fetched == PeerFetched::FoundHot && !for_good)
}

/// Fills a block from the origin, from the byte `begin` on: in one read, or in two when that is inside the block.
fn read_origin(
    shared: &CacheContext,
    under: &dyn OriginStore,
    object: &ObjectRef,
    begin: usize,
    fill: &mut BlockFill,
) -> Result<()> {
    let offset = u64::from(fill.id().index) * shared.block_size;
    under.read(object, offset + begin as u64, fill, Instant::now() + shared.origin_timeout)?;
    if fill.go_to_start() {
        under.read(object, offset, fill, Instant::now() + shared.origin_timeout)?;
    }
    Ok(())
}

fn fail_fill(fill: BlockFill, error: Error) -> PutOutcome {
    fill.fail(error);
    PutOutcome::NoRoom
}

/// Ends a fill whose bytes have arrived and stores them on disk; a `passing` replica stays in memory alone. Returns
/// the result of storing.
fn finish_fill(shared: &CacheContext, source: &str, object: &ObjectRef, fill: BlockFill, passing: bool) -> PutOutcome {
    let id = fill.id();
    let Some(bytes) = fill.finished() else {
        let why = format!("{} ended early: it is shorter than its attributes", String::from_utf8_lossy(&object.path));
        fill.fail(Error::new(ErrorKind::Stale, why));
        return PutOutcome::NoRoom;
    };
    // Readers have the bytes already; writing here slows down only the next fill, as a full disk queue should.
    store_or_replicate(shared, source, object, id.index, &bytes, passing)
}

/// As [`store_block`], but a `passing` replica stays in memory alone while there is room.
fn store_or_replicate(
    shared: &CacheContext,
    source: &str,
    object: &ObjectRef,
    index: u32,
    bytes: &[u8],
    passing: bool,
) -> PutOutcome {
    let id = BlockId { object: object.id, index };
    if passing && shared.hot_replicas.try_hold(id, &shared.stats) {
        PutOutcome::Stored
    } else {
        store_block(shared, source, object, index, bytes)
    }
}

/// Stores a block on disk, if there are disks.
fn store_block(shared: &CacheContext, source: &str, object: &ObjectRef, index: u32, bytes: &[u8]) -> PutOutcome {
    let Some(store) = shared.enabled_store() else { return PutOutcome::Stored };
    // No later request will use this version.
    if object.version.is_unsettled() {
        return PutOutcome::Skipped;
    }
    shared.store_classed(source, object, index..index + 1, |class| {
        store.put_classed(object, index, bytes, class).unwrap_or_else(|error| {
            tracing::debug!(%error, "a block was not stored on disk");
            PutOutcome::NoRoom
        })
    })
}

impl Volume for Cache {
    fn source(&self) -> &str {
        self.origin.source_url()
    }

    fn block_size(&self) -> u64 {
        self.shared.block_size
    }

    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.ask_origin(|deadline| self.origin.lookup(path, deadline))
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.ask_origin(|deadline| self.origin.list(path, cursor, max, deadline))
    }

    fn lookup_within(&self, path: &[u8], max_age: Duration) -> Result<ObjectAttr> {
        Cache::lookup_within(self, path, max_age)
    }

    fn list_within(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, max_age: Duration) -> Result<ListPage> {
        Cache::list_within(self, path, cursor, max, max_age)
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        self.ask_origin(|deadline| self.origin.readlink(path, deadline))
    }

    fn object_headers(&self, path: &[u8]) -> Result<ObjectHeaders> {
        self.ask_origin(|deadline| self.origin.object_headers(path, deadline))
    }

    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<ReadData> {
        let want = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        let mut done = 0;
        while done < want {
            let at = offset + done as u64;
            if let Some(slice) = self.pin_range(object, at, want - done, None)? {
                if done == 0 && slice.len() == want {
                    return Ok(ReadData::Shared(slice));
                }
                dst[done..done + slice.len()].copy_from_slice(&slice);
                done += slice.len();
                continue;
            }
            let (id, range) = self.block_range(object, at, want - done);
            let len = range.len();
            if self.read_disk(object, id, range.clone(), &mut dst[done..done + len]) {
                done += len;
            } else {
                let slice = self.fetch_block(object, id, range)?;
                dst[done..done + len].copy_from_slice(&slice);
                done += len;
            }
        }
        Ok(ReadData::Copied(done))
    }

    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, _piece: usize) {
        if self.take_over_file(object) {
            return;
        }
        for index in blocks {
            if self.shared.tier.find(&BlockId { object: object.id, index }).is_none()
                && !self.prefetch_block(object, index)
            {
                return;
            }
        }
    }

    fn backing(&self, object: &ObjectRef) -> Option<Box<dyn BackingFile>> {
        self.whole_backing(object)
    }

    fn capacity(&self) -> Result<VolumeSpace> {
        // A bucket has no capacity; large numbers satisfy `df` and installers.
        const ENDLESS_SPACE: VolumeSpace =
            VolumeSpace { total_bytes: 1 << 60, free_bytes: 1 << 60, files: 1 << 40, files_free: 1 << 40 };
        let stat = self.ask_origin(|deadline| self.origin.statfs(deadline))?;
        Ok(stat.map_or(ENDLESS_SPACE, |s| VolumeSpace {
            // Without the blocks reserved for root: `df` would show such blocks as used.
            total_bytes: s
                .blocks
                .saturating_sub(s.blocks_free.saturating_sub(s.blocks_available))
                .saturating_mul(s.block_size),
            free_bytes: s.blocks_available.saturating_mul(s.block_size),
            files: s.files,
            files_free: s.files_free,
        }))
    }

    fn info(&self, path: &[u8]) -> Result<FileInfo> {
        let attr = self.lookup(path)?;
        let object = ObjectRef::new(self.source(), path, attr.version.clone(), attr.size);
        let size = self.shared.block_size;
        object.check_block_count(size)?;
        let total = object.block_count(size) as u32;
        let on_disk = self.shared.store.as_ref().map(|store| store.blocks_of(&object));
        let mut blocks = BlockCounts { total: u64::from(total), ..BlockCounts::default() };
        // Runs of blocks in the same place: a few lines for a file of any length without fragments.
        let mut held = Vec::new();
        for index in 0..total {
            let id = BlockId { object: object.id, index };
            let in_memory = self.shared.tier.peek(&id).is_some_and(|block| block.is_ready());
            let is_stored = on_disk.as_ref().is_some_and(|map| map.contains(index));
            blocks.memory += u64::from(in_memory);
            blocks.disk += u64::from(is_stored);
            blocks.cached += u64::from(in_memory || is_stored);
            match (in_memory, is_stored) {
                (true, true) => add_to_runs(&mut held, index, "memory and disk"),
                (true, false) => add_to_runs(&mut held, index, "memory"),
                (false, true) => add_to_runs(&mut held, index, "disk"),
                (false, false) => {}
            }
        }
        Ok(FileInfo {
            source: self.source().to_owned(),
            path: String::from_utf8_lossy(path).into_owned(),
            kind: attr.kind,
            length: attr.size,
            version: attr.version.as_str().to_owned(),
            etag: attr.etag,
            block_size: size,
            blocks,
            held,
            rule: self.shared.folder_rules().rule_for(self.source(), path).cloned(),
            nodes: Vec::new(),
            silent: Vec::new(),
        })
    }
}
