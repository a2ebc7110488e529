//! The store as a whole: opens the disks, distributes the capacity, and reports the state.

use crate::classes::ClassTable;
use crate::config::{CacheCapacity, IoMode, StoreConfig, StoreFinding};
use crate::disk::{CacheDisk, DiskWork, disk_footprint};
use crate::files::{self, FileCache, FileKey};
use crate::health::{DiskHealth, DiskState};
use crate::index::{BlockEntry, BlockIndex, BlockMap, MAIN, WHOLE};
use crate::io::{RealDisk, RingSet};
use crate::journal::IndexJournal;
use crate::restore::{DuplicateBlocks, LogRestore, settle_duplicates};
use crate::write_permits::WritePermits;
use crate::{capacity, crc, janitor, layout};
use parking_lot::{Condvar, Mutex};
use spurline_types::units::human_bytes;
use spurline_types::{BlockId, Error, ErrorKind, ObjectId, ObjectRef, Result, Stats};
use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// Objects larger than this are divided among the disks in extents of this many bytes.
pub const EXTENT_BYTES: u64 = 1 << 30;
/// A part of the pool's memory, divided by this number, may be in writes to a disk: a hung disk holds at most that much.
const POOL_SHARE_DIVISOR: u64 = 4;
/// How long dropping a store waits for a background thread that a disk blocks.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);

/// The reported state of a disk.
#[derive(Debug, Clone)]
pub struct DiskStatus {
    /// The directory.
    pub path: PathBuf,
    /// Whether the disk is used.
    pub state: DiskState,
    /// Since when the disk is in that state.
    pub since: SystemTime,
    /// The reason for a state that is not normal.
    pub reason: String,
    /// Bytes of blocks.
    pub used: u64,
    /// Bytes that the disk may hold.
    pub capacity: u64,
    /// Bytes free on the file system.
    pub free: u64,
    /// Number of blocks.
    pub blocks: u64,
}

/// Called with each block that expired by the rule of the class.
pub type ExpiryHandler = dyn Fn(&BlockId) + Send + Sync;

/// State shared by the store and its background threads.
pub struct StoreCore {
    pub(crate) config: StoreConfig,
    pub(crate) index: Arc<BlockIndex>,
    pub(crate) disks: Vec<Arc<CacheDisk>>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) closing: AtomicBool,
    pub(crate) classes: ClassTable,
    /// Called with each block that expired.
    pub(crate) expired: OnceLock<Box<ExpiryHandler>>,
    findings: Vec<StoreFinding>,
    /// The capacity over all disks; held during a redistribution.
    capacity: Mutex<CacheCapacity>,
    start: Instant,
    generation: AtomicU16,
}

/// The block store. A drop unlocks the directories; pinned files stay readable.
pub struct Store {
    core: Arc<StoreCore>,
    threads: Vec<JoinHandle<()>>,
}

impl std::ops::Deref for Store {
    type Target = StoreCore;
    fn deref(&self) -> &StoreCore {
        &self.core
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.core.closing.store(true, Ordering::Release);
        let deadline = Instant::now() + CLOSE_TIMEOUT;
        for disk in &self.core.disks {
            // Locked so that a thread about to wait sees the flag or the wake-up.
            drop(disk.work.lock());
            disk.wake.notify_all();
        }
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            // A thread blocked by a hung disk ends when the disk answers; only that disk's directory stays locked.
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Store {
    pub(crate) fn core(&self) -> &Arc<StoreCore> {
        &self.core
    }

    /// Opens the directories, reads the index logs and starts the background threads. A million blocks take about a second; no
    /// data file is read.
    ///
    /// # Errors
    /// A path that is no directory, can't be written, is in use, or holds another block size; an invalid block size.
    pub fn open(config: StoreConfig, stats: Arc<Stats>) -> Result<Arc<Store>> {
        let size = config.block_size as usize;
        if size == 0 || !size.is_multiple_of(crc::GRANULE) || size > 256 << 20 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a block size of {size} bytes is invalid; give a multiple of 64K of at most 256M"),
            ));
        }
        let disabled = config.capacity == CacheCapacity::None || config.io == IoMode::Disable || config.dirs.is_empty();
        let dirs = if disabled { Vec::new() } else { config.dirs.clone() };
        if dirs.len() > usize::from(u8::MAX) {
            return Err(Error::new(
                ErrorKind::Invalid,
                "more than 255 cache directories are not supported; give fewer",
            ));
        }
        let index = Arc::new(BlockIndex::default());
        let classes = ClassTable::new(Arc::clone(&stats));
        let rings = RingSet::new(config.pool.clone().filter(|_| !dirs.is_empty()));
        let opened = std::thread::scope(|scope| {
            let opening: Vec<_> = dirs
                .iter()
                .enumerate()
                .map(|(n, dir)| {
                    let config = &config;
                    let index = &index;
                    let stats = &stats;
                    let rings = &rings;
                    let classes = &classes;
                    scope.spawn(move || open_disk(n as u8, dir, config, index, classes, stats, rings))
                })
                .collect();
            opening.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(panic_error()))).collect::<Result<Vec<_>>>()
        })?;
        let disks: Vec<_> =
            opened.into_iter().map(|(disk, second)| settle_disk(&index, &classes, disk, second)).collect();
        let findings = capacity::distribute(&config, &disks);
        for finding in &findings {
            tracing::warn!("{}: {}; {}", finding.subject, finding.evidence, finding.remedy);
        }
        let gauges = &stats.blockcache;
        gauges.disks_normal.add(disks.len() as u64);
        for disk in &disks {
            gauges.blocks.add(disk.blocks.load(Ordering::Relaxed));
            gauges.used_bytes.add(disk.used.load(Ordering::Relaxed));
            gauges.capacity_bytes.add(disk.limit.load(Ordering::Relaxed));
        }
        let core = Arc::new(StoreCore {
            capacity: Mutex::new(config.capacity),
            config,
            index,
            disks,
            stats,
            closing: AtomicBool::new(false),
            classes,
            expired: OnceLock::new(),
            findings,
            start: Instant::now(),
            generation: AtomicU16::new(1),
        });
        let mut store = Store { core: Arc::clone(&core), threads: Vec::new() };
        for disk in &core.disks {
            let core = Arc::clone(&core);
            let disk = Arc::clone(disk);
            let thread = std::thread::Builder::new()
                .name(format!("disk-{}", disk.number))
                .spawn(move || janitor::run_janitor(&core, &disk))
                .map_err(|e| Error::io("starting a cache disk's background thread", &e))?;
            store.threads.push(thread);
        }
        Ok(Arc::new(store))
    }
}

fn panic_error() -> Error {
    Error::new(ErrorKind::Corrupt, "opening a cache directory panicked; empty it and report the message above")
}

fn open_disk(
    number: u8,
    dir: &std::path::Path,
    config: &StoreConfig,
    index: &BlockIndex,
    classes: &ClassTable,
    stats: &Arc<Stats>,
    rings: &Arc<RingSet>,
) -> Result<(Arc<CacheDisk>, DuplicateBlocks)> {
    let held = layout::open_root(dir, config.block_size)?;
    layout::reserve_probe(dir);
    let began = Instant::now();
    let mut restore = LogRestore::new(number, config.block_size, index, classes);
    let journal = IndexJournal::open(dir, config.block_size, |record| restore.apply_record(record))
        .map_err(|e| Error::io(format!("cache directory {}: its index log can't be opened", dir.display()), &e))?;
    let LogRestore { policy, used, blocks, second, .. } = restore;
    if blocks > 0 {
        tracing::info!(
            "cache directory {}: {blocks} blocks, {} found in {:.2} s",
            dir.display(),
            human_bytes(used),
            began.elapsed().as_secs_f64()
        );
    }
    let rings = if in_memory(dir) { RingSet::refused() } else { Arc::clone(rings) };
    let mut io: Arc<dyn crate::io::DiskIo> = Arc::new(RealDisk::new(number, config.io, rings));
    if let Some(decorate) = &config.decorate {
        io = decorate(dir, io);
    }
    let disk = CacheDisk {
        number,
        root: dir.into(),
        root_lock: held,
        io,
        files: FileCache::new(files::open_file_limit(config.dirs.len())),
        policy,
        journal: Mutex::new(journal),
        health: DiskHealth::new(Instant::now(), config.down_after),
        used: AtomicU64::new(used),
        blocks: AtomicU64::new(blocks),
        limit: AtomicU64::new(0),
        free: AtomicU64::new(0),
        total: AtomicU64::new(0),
        work: Mutex::new(VecDeque::new()),
        wake: Condvar::new(),
        write_permits: WritePermits::new(
            config.pool.as_ref().map_or(u64::MAX, |pool| pool.limit_bytes() / POOL_SHARE_DIVISOR),
        ),
        disabled_by: Mutex::default(),
        shortage_logged_at: Mutex::default(),
        index_full_logged_at: Mutex::default(),
        refused_above: AtomicU64::new(u64::MAX),
        eviction_futile: AtomicBool::new(false),
        refusal_logged_at: Mutex::default(),
        timeouts: (config.read_timeout, config.write_timeout),
        stats: Arc::clone(stats),
    };
    disk.refresh_space();
    Ok((Arc::new(disk), second))
}

/// Whether a directory lies in memory. Nothing blocks there, and io_uring hands such operations to kernel threads: a
/// small file took twice as long.
fn in_memory(dir: &std::path::Path) -> bool {
    rustix::fs::statfs(dir).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC)
}

/// Assigns to a disk the blocks that only this disk holds, of those that another disk's log named first.
fn settle_disk(
    index: &BlockIndex,
    classes: &ClassTable,
    disk: Arc<CacheDisk>,
    second: DuplicateBlocks,
) -> Arc<CacheDisk> {
    let place = |block: &BlockId, entry: &BlockEntry| {
        let slot =
            disk.policy.restore(*block, disk_footprint(entry.len, entry.flags) as u32, entry.flags & MAIN != 0)?;
        disk.used.fetch_add(disk_footprint(entry.len, entry.flags), Ordering::Relaxed);
        disk.blocks.fetch_add(1, Ordering::Relaxed);
        Some(slot)
    };
    settle_duplicates(index, classes, second, place, |block, flags| {
        disk.enqueue(DiskWork::Forget(block, flags & WHOLE != 0));
    });
    disk
}

impl StoreCore {
    /// Conditions found at start that an operator should know, such as missing capacity.
    pub fn findings(&self) -> &[StoreFinding] {
        &self.findings
    }

    /// Length of a block in bytes.
    pub fn block_size(&self) -> u32 {
        self.config.block_size
    }

    /// Whether there is any disk to store blocks on.
    pub fn is_enabled(&self) -> bool {
        !self.disks.is_empty()
    }

    /// The current state of every disk.
    pub fn disks(&self) -> Vec<DiskStatus> {
        self.disks
            .iter()
            .map(|disk| {
                let (state, since, reason) = disk.health.current_state();
                DiskStatus {
                    path: disk.root.clone(),
                    state,
                    since,
                    reason,
                    used: disk.used.load(Ordering::Relaxed),
                    capacity: disk.limit.load(Ordering::Relaxed),
                    free: disk.free.load(Ordering::Relaxed),
                    blocks: disk.blocks.load(Ordering::Relaxed),
                }
            })
            .collect()
    }

    /// The blocks of an object that are on usable disks.
    pub fn blocks_of(&self, obj: &ObjectRef) -> BlockMap {
        let mut map = BlockMap::new(obj.block_count(u64::from(self.config.block_size)).min(u64::from(u32::MAX)) as u32);
        self.index.shard_of(&obj.id).read().all_blocks(&obj.id, |i, entry| {
            if self.is_served(entry) {
                map.set(i);
            }
            true
        });
        map
    }

    /// Whether a block is on a usable disk. The bytes are not read.
    pub fn contains_block(&self, obj: &ObjectRef, index: u32) -> bool {
        self.contains(&BlockId { object: obj.id, index })
    }

    /// As [`Store::contains_block`].
    pub fn contains(&self, block: &BlockId) -> bool {
        self.index.shard_of(&block.object).read().get(block).is_some_and(|entry| self.is_served(entry))
    }

    /// Notes a use of a block that was served from memory, so that the block outlives others on disk too.
    pub fn touch_block(&self, obj: &ObjectRef, index: u32) {
        let block = BlockId { object: obj.id, index };
        let place = self.index.shard_of(&obj.id).read().get(&block).map(|e| (e.disk, e.slot));
        if let Some((disk, slot)) = place {
            self.disks[usize::from(disk)].policy.touch(slot, self.policy_time());
        }
    }

    /// Calls `f` with every block and length; blocks that come or go meanwhile may be missed.
    pub fn for_each_block(&self, mut f: impl FnMut(BlockId, u32)) {
        self.index.for_each(|block, entry| {
            if entry.is_readable() {
                f(block, entry.len);
            }
        });
    }

    pub(crate) fn is_served(&self, entry: &BlockEntry) -> bool {
        entry.is_readable() && self.disks[usize::from(entry.disk)].health.usable()
    }

    /// Seconds since the store opened: the policy's time. Starts above 0, the time of restored slots.
    pub(crate) fn policy_time(&self) -> u32 {
        self.start.elapsed().as_secs() as u32 + 2 * crate::policy::CORRELATED
    }

    pub(crate) fn next_generation(&self) -> u16 {
        self.generation.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether a disk holds as many blocks as the disk's share of the index memory allows.
    pub(crate) fn is_index_full(&self, disk: &CacheDisk) -> bool {
        if self.config.max_blocks == u64::MAX {
            return false;
        }
        let limits: u64 = self.disks.iter().map(|disk| disk.limit.load(Ordering::Relaxed)).sum();
        let share = u128::from(self.config.max_blocks) * u128::from(disk.limit.load(Ordering::Relaxed));
        let most = (share / u128::from(limits.max(1))) as u64;
        disk.blocks.load(Ordering::Relaxed) >= most.max(1)
    }

    /// The file that holds a block.
    pub(crate) fn file_key(&self, object: ObjectId, index: u32, whole: bool) -> FileKey {
        FileKey { object, tag: if whole { 0 } else { 1 + index / self.extent_blocks() } }
    }

    /// The range of block indexes of a file.
    pub(crate) fn index_range(&self, key: &FileKey) -> Range<u32> {
        if key.tag == 0 {
            0..u32::MAX
        } else {
            (key.tag - 1).saturating_mul(self.extent_blocks())..key.tag.saturating_mul(self.extent_blocks())
        }
    }

    pub(crate) fn extent_blocks(&self) -> u32 {
        (EXTENT_BYTES / u64::from(self.config.block_size)).max(1) as u32
    }

    /// Sets the function that is called with each expired block; the first call holds.
    pub fn set_expiry_handler(&self, expired: Box<ExpiryHandler>) {
        // A second handler is ignored: the first may be running.
        let _ = self.expired.set(expired);
    }

    /// Syncs the index logs of the usable disks, so that the index outlives a loss of power.
    pub fn sync_logs(&self) {
        for disk in self.disks.iter().filter(|disk| disk.health.usable()) {
            let log = match disk.journal.try_lock_for(self.config.write_timeout) {
                Some(journal) => journal.file(),
                None => Err(std::io::ErrorKind::TimedOut.into()),
            };
            // Not under the lock, which writers need.
            if let Err(error) = log.and_then(|log| disk.io.sync(&log, self.config.write_timeout)) {
                self.write_failed(disk, "syncing the index log", &error);
            }
        }
    }

    /// Redistributes the capacity when the disks' room has changed.
    pub(crate) fn redistribute(&self) {
        self.redistribute_bytes(*self.capacity.lock(), false);
    }

    /// Changes the capacity over all disks. Blocks above the capacity are evicted within seconds.
    pub fn set_capacity(&self, bytes: u64) {
        let mut capacity = self.capacity.lock();
        let resized = *capacity != CacheCapacity::Bytes(bytes);
        *capacity = CacheCapacity::Bytes(bytes);
        if resized {
            self.redistribute_bytes(*capacity, true);
        }
    }

    fn redistribute_bytes(&self, capacity: CacheCapacity, resized: bool) {
        if capacity::redistribute(&self.config, capacity, resized, &self.disks) {
            let limits = self.disks.iter().map(|disk| disk.limit.load(Ordering::Relaxed));
            self.stats.blockcache.capacity_bytes.set(limits.sum());
        }
    }

    /// Updates the gauges of disks by state.
    pub(crate) fn count_states(&self) {
        let count = |state| self.disks.iter().filter(|d| d.health.current_state().0 == state).count() as u64;
        self.stats.blockcache.disks_normal.set(count(DiskState::Normal));
        self.stats.blockcache.disks_unstable.set(count(DiskState::Unstable));
        self.stats.blockcache.disks_down.set(count(DiskState::Down));
    }
}
