//! The store as a whole: opening its disks, sharing out its capacity, and telling its state.

use crate::classes::Classes;
use crate::config::{Capacity, Finding, IoMode, StoreConfig};
use crate::disk::{Disk, Work, footprint};
use crate::files::{self, FileCache, FileKey};
use crate::health::{DiskState, Health};
use crate::index::{BlockMap, Entry, Index, LEAVING, MAIN, WHOLE};
use crate::io::{RealDisk, Rings};
use crate::journal::Journal;
use crate::restore::{Restore, Second, settle};
use crate::turns::Turns;
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

/// Objects larger than this are spread over the disks in runs of this many bytes.
pub const EXTENT_BYTES: u64 = 1 << 30;
/// One part in so many of the pool may be on its way to one disk: as much is held by one that hangs.
const POOL_PART: u64 = 4;
/// How long dropping a store waits for a background thread that a disk holds up.
const PATIENCE: Duration = Duration::from_secs(5);

/// One disk as shown.
#[derive(Debug, Clone)]
pub struct DiskStatus {
    /// Its directory.
    pub path: PathBuf,
    /// Whether it is used.
    pub state: DiskState,
    /// Since when it is in that state.
    pub since: SystemTime,
    /// Why, when it is not normal.
    pub reason: String,
    /// Bytes of blocks on it.
    pub used: u64,
    /// Bytes it may hold.
    pub capacity: u64,
    /// Bytes free on its file system.
    pub free: u64,
    /// Blocks on it.
    pub blocks: u64,
}

/// Hears of a block that is not to be kept anywhere any more.
pub type Expired = dyn Fn(&BlockId) + Send + Sync;

/// What the store and its background threads share.
pub struct Core {
    pub(crate) config: StoreConfig,
    pub(crate) index: Arc<Index>,
    pub(crate) disks: Vec<Arc<Disk>>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) closing: AtomicBool,
    pub(crate) classes: Classes,
    /// Hears of blocks that went because their class said so.
    pub(crate) expired: OnceLock<Box<Expired>>,
    findings: Vec<Finding>,
    /// Held while the capacity is shared out again.
    sharing: Mutex<()>,
    start: Instant,
    generation: AtomicU16,
}

/// The block store. Dropping it lets go of its directories; pinned files stay readable.
pub struct Store {
    core: Arc<Core>,
    threads: Vec<JoinHandle<()>>,
}

impl std::ops::Deref for Store {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.core.closing.store(true, Ordering::Release);
        let deadline = Instant::now() + PATIENCE;
        for disk in &self.core.disks {
            // Taken so that a thread about to wait sees the flag or the wake-up.
            drop(disk.work.lock());
            disk.wake.notify_all();
        }
        for thread in self.threads.drain(..) {
            while !thread.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            // One that a hung disk holds ends when the disk answers; it keeps only its own directory locked.
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Store {
    /// Opens the directories, reads their index logs and starts their background threads. A million blocks take
    /// about a second; no data file is looked at.
    ///
    /// # Errors
    /// A directory that is none, can't be written, is in use, or holds another block size; a block size that can't be.
    pub fn open(config: StoreConfig, stats: Arc<Stats>) -> Result<Arc<Store>> {
        let size = config.block_size as usize;
        if size == 0 || !size.is_multiple_of(crc::GRANULE) || size > 256 << 20 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("a block size of {size} bytes can't be; give a multiple of 64K of at most 256M"),
            ));
        }
        let disabled = config.capacity == Capacity::None || config.io == IoMode::Disable || config.dirs.is_empty();
        let dirs = if disabled { Vec::new() } else { config.dirs.clone() };
        if dirs.len() > usize::from(u8::MAX) {
            return Err(Error::new(ErrorKind::Invalid, "more than 255 cache directories can't be; give fewer"));
        }
        let index = Arc::new(Index::default());
        let classes = Classes::new(Arc::clone(&stats));
        let rings = Rings::new(config.pool.clone().filter(|_| !dirs.is_empty()));
        let opened = std::thread::scope(|scope| {
            let opening: Vec<_> = dirs
                .iter()
                .enumerate()
                .map(|(n, dir)| {
                    let (config, index, stats, rings, classes) = (&config, &index, &stats, &rings, &classes);
                    let bound = files::bound(dirs.len());
                    scope.spawn(move || open_disk(n as u8, dir, config, (index, classes), stats, rings, bound))
                })
                .collect();
            opening.into_iter().map(|t| t.join().unwrap_or_else(|_| Err(panicked()))).collect::<Result<Vec<_>>>()
        })?;
        let disks: Vec<_> =
            opened.into_iter().map(|(disk, second)| settle_disk((&index, &classes), disk, second)).collect();
        let findings = capacity::share(&config, &disks);
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
        let core = Arc::new(Core {
            config,
            index,
            disks,
            stats,
            closing: AtomicBool::new(false),
            classes,
            expired: OnceLock::new(),
            findings,
            sharing: Mutex::default(),
            start: Instant::now(),
            generation: AtomicU16::new(1),
        });
        let mut store = Store { core: Arc::clone(&core), threads: Vec::new() };
        for disk in &core.disks {
            let (core, disk) = (Arc::clone(&core), Arc::clone(disk));
            let thread = std::thread::Builder::new()
                .name(format!("disk-{}", disk.number))
                .spawn(move || janitor::run(&core, &disk))
                .map_err(|e| Error::io("starting a cache disk's background thread", &e))?;
            store.threads.push(thread);
        }
        Ok(Arc::new(store))
    }
}

fn panicked() -> Error {
    Error::new(ErrorKind::Corrupt, "opening a cache directory panicked; empty it and report the message above")
}

fn open_disk(
    number: u8,
    dir: &std::path::Path,
    config: &StoreConfig,
    (index, classes): (&Index, &Classes),
    stats: &Arc<Stats>,
    rings: &Arc<Rings>,
    bound: usize,
) -> Result<(Arc<Disk>, Second)> {
    let held = layout::open(dir, config.block_size)?;
    layout::reserve_probe(dir);
    let began = Instant::now();
    let mut restore = Restore::new(number, config.block_size, index, classes);
    let journal = Journal::open(dir, config.block_size, |record| restore.take(record))
        .map_err(|e| Error::io(format!("cache directory {}: its index log can't be opened", dir.display()), &e))?;
    let Restore { policy, used, blocks, second, .. } = restore;
    if blocks > 0 {
        tracing::info!(
            "cache directory {}: {blocks} blocks, {} found in {:.2} s",
            dir.display(),
            human_bytes(used),
            began.elapsed().as_secs_f64()
        );
    }
    let rings = if in_memory(dir) { Rings::refused() } else { Arc::clone(rings) };
    let mut io: Arc<dyn crate::io::DiskIo> = Arc::new(RealDisk::new(number, config.io, rings));
    if let Some(decorate) = &config.decorate {
        io = decorate(dir, io);
    }
    let disk = Disk {
        number,
        root: dir.into(),
        held,
        io,
        files: FileCache::new(bound),
        policy,
        journal: Mutex::new(journal),
        health: Health::new(Instant::now(), config.down_after),
        used: AtomicU64::new(used),
        blocks: AtomicU64::new(blocks),
        limit: AtomicU64::new(0),
        free: AtomicU64::new(0),
        total: AtomicU64::new(0),
        work: Mutex::new(VecDeque::new()),
        wake: Condvar::new(),
        turns: Turns::new(config.pool.as_ref().map_or(u64::MAX, |pool| pool.limit_bytes() / POOL_PART)),
        put_out_by: Mutex::default(),
        said_short: Mutex::default(),
        refused: AtomicU64::new(u64::MAX),
        in_vain: AtomicBool::new(false),
        said_refused: Mutex::default(),
        timeouts: (config.read_timeout, config.write_timeout),
        stats: Arc::clone(stats),
    };
    disk.refresh_space();
    Ok((Arc::new(disk), second))
}

/// Whether a directory lies in memory. There nothing is waited for, and what io_uring is asked for there it gives to threads
/// of the kernel: a small file took twice as long.
fn in_memory(dir: &std::path::Path) -> bool {
    rustix::fs::statfs(dir).is_ok_and(|fs| fs.f_type == libc::TMPFS_MAGIC)
}

/// Gives a disk what only it holds of the blocks that another disk's log brought first.
fn settle_disk(known: (&Index, &Classes), disk: Arc<Disk>, second: Second) -> Arc<Disk> {
    let place = |block: &BlockId, entry: &Entry| {
        let slot = disk.policy.restore(*block, footprint(entry.len) as u32, entry.flags & MAIN != 0)?;
        disk.used.fetch_add(footprint(entry.len), Ordering::Relaxed);
        disk.blocks.fetch_add(1, Ordering::Relaxed);
        Some(slot)
    };
    settle(known, second, place, |block, flags| disk.ask(Work::Forget(block, flags & WHOLE != 0)));
    disk
}

impl Core {
    /// What was noticed at the start and an operator should know: a capacity that is not there, for example.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Length of a block in bytes.
    pub fn block_size(&self) -> u32 {
        self.config.block_size
    }

    /// Whether there is any disk to keep blocks on.
    pub fn enabled(&self) -> bool {
        !self.disks.is_empty()
    }

    /// Every disk as it is now.
    pub fn disks(&self) -> Vec<DiskStatus> {
        self.disks
            .iter()
            .map(|disk| {
                let (state, since, reason) = disk.health.get();
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

    /// Which blocks of an object are here, on disks that are in use.
    pub fn blocks_of(&self, obj: &ObjectRef) -> BlockMap {
        let mut map = BlockMap::new(obj.blocks(u64::from(self.config.block_size)).min(u64::from(u32::MAX)) as u32);
        self.index.shard(&obj.id).read().all(&obj.id, |i, entry| {
            if self.serves(entry) {
                map.set(i);
            }
            true
        });
        map
    }

    /// Whether a block is here, on a disk that is in use. Its bytes are not looked at.
    pub fn contains(&self, obj: &ObjectRef, index: u32) -> bool {
        let block = BlockId { object: obj.id, index };
        self.index.shard(&obj.id).read().get(&block).is_some_and(|entry| self.serves(entry))
    }

    /// Notes a use of a block that was served from memory, so that it outlives others on disk too.
    pub fn touch(&self, obj: &ObjectRef, index: u32) {
        let block = BlockId { object: obj.id, index };
        let place = self.index.shard(&obj.id).read().get(&block).map(|e| (e.disk, e.slot));
        if let Some((disk, slot)) = place {
            self.disks[usize::from(disk)].policy.touch(slot, self.now());
        }
    }

    /// Calls `f` with every block here and its length; blocks that come or go meanwhile may be missed.
    pub fn for_each_block(&self, mut f: impl FnMut(BlockId, u32)) {
        self.index.for_each(|block, entry| {
            if entry.flags & LEAVING == 0 {
                f(block, entry.len);
            }
        });
    }

    pub(crate) fn serves(&self, entry: &Entry) -> bool {
        entry.flags & LEAVING == 0 && self.disks[usize::from(entry.disk)].health.usable()
    }

    /// Seconds since the store opened; the policy's time. Starts above 0, which restored slots have.
    pub(crate) fn now(&self) -> u32 {
        self.start.elapsed().as_secs() as u32 + 2 * crate::policy::CORRELATED
    }

    pub(crate) fn next_generation(&self) -> u16 {
        self.generation.fetch_add(1, Ordering::Relaxed)
    }

    /// The file a block lies in.
    pub(crate) fn file_key(&self, object: ObjectId, index: u32, whole: bool) -> FileKey {
        FileKey { object, tag: if whole { 0 } else { 1 + index / self.extent_blocks() } }
    }

    /// The indexes that blocks of a file may have.
    pub(crate) fn indexes(&self, key: &FileKey) -> Range<u32> {
        let of = |tag: u32| tag.saturating_mul(self.extent_blocks());
        if key.tag == 0 { 0..u32::MAX } else { of(key.tag - 1)..of(key.tag) }
    }

    pub(crate) fn extent_blocks(&self) -> u32 {
        (EXTENT_BYTES / u64::from(self.config.block_size)).max(1) as u32
    }

    /// From now on `expired` hears of blocks that went because their class said so; once.
    pub fn on_expired(&self, expired: Box<Expired>) {
        // A second time nothing happens: the first one may be at work.
        let _ = self.expired.set(expired);
    }

    /// Sees to it that what is known of the blocks here outlives a loss of power, on the disks that are in use.
    pub fn sync(&self) {
        for disk in self.disks.iter().filter(|disk| disk.health.usable()) {
            let log = match disk.journal.try_lock_for(self.config.write_timeout) {
                Some(journal) => journal.file(),
                None => Err(std::io::ErrorKind::TimedOut.into()),
            };
            // Not under the lock: writers need it.
            if let Err(error) = log.and_then(|log| disk.io.sync(&log, self.config.write_timeout)) {
                self.write_failed(disk, "syncing the index log", &error);
            }
        }
    }

    /// Shares the capacity out again, if what the disks have room for is no longer what it was.
    pub(crate) fn share_again(&self) {
        let _one = self.sharing.lock();
        if capacity::share_again(&self.config, &self.disks) {
            let limits = self.disks.iter().map(|disk| disk.limit.load(Ordering::Relaxed));
            self.stats.blockcache.capacity_bytes.set(limits.sum());
        }
    }

    /// Updates the gauges of disks by state.
    pub(crate) fn count_states(&self) {
        let count = |state| self.disks.iter().filter(|d| d.health.get().0 == state).count() as u64;
        self.stats.blockcache.disks_normal.set(count(DiskState::Normal));
        self.stats.blockcache.disks_unstable.set(count(DiskState::Unstable));
        self.stats.blockcache.disks_down.set(count(DiskState::Down));
    }
}
