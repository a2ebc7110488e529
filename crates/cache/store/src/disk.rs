//! One cache disk: its directory, files, log, room and health. It moves bytes and records; which blocks go where is
//! decided above.

use crate::files::{FileCache, FileKey};
use crate::health::{DiskState, Health};
use crate::io::{DiskIo, OpenFile, Space, is_own};
use crate::journal::Journal;
use crate::layout::{self, Root};
use crate::policy::S3Fifo;
use crate::turns::Turns;
use parking_lot::{Condvar, Mutex};
use spurline_types::units::human_bytes;
use spurline_types::{BlockId, Stats};
use std::collections::VecDeque;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// What may come again and again is said again after this long at the earliest.
const SAY_AGAIN: Duration = Duration::from_secs(60);

/// What the disk's background thread is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// Take a block that is marked as leaving off the disk.
    Discard(BlockId),
    /// Log that a block of the object's one file (else of an extent's) is another disk's now, and give back its space.
    Forget(BlockId, bool),
    /// Give back the space of such a block, which this disk does not hold.
    Reclaim(BlockId, bool),
    /// Remove a file if it holds no block.
    Tidy(FileKey),
}

/// One cache disk.
pub struct Disk {
    /// Its number in the index.
    pub number: u8,
    /// Its directory.
    pub root: PathBuf,
    /// Its place in the directory: the lock, and the disk's own id.
    pub held: Root,
    /// Its operations.
    pub io: Arc<dyn DiskIo>,
    /// Its open files.
    pub files: FileCache,
    /// Which block goes next.
    pub policy: S3Fifo<BlockId>,
    /// Its index log.
    pub journal: Mutex<Journal>,
    /// Its state.
    pub health: Health,
    /// Bytes of blocks on it, reservations of writers included.
    pub used: AtomicU64,
    /// Blocks on it.
    pub blocks: AtomicU64,
    /// Bytes it may hold.
    pub limit: AtomicU64,
    /// Bytes free on its file system, as last asked and corrected since.
    pub free: AtomicU64,
    /// Size of its file system.
    pub total: AtomicU64,
    /// What waits for the background thread.
    pub work: Mutex<VecDeque<Work>>,
    /// Wakes the background thread.
    pub wake: Condvar,
    /// Whose turn it is to write.
    pub turns: Turns,
    /// The block, and its generation, whose late read put the disk out of use the last time.
    pub put_out_by: Mutex<Option<(BlockId, u16)>>,
    /// When it was said last that this process is short of something.
    pub said_short: Mutex<Option<Instant>>,
    /// Bytes of blocks at which the file system refused more, though it said that it had room; `u64::MAX` when it did not.
    pub refused: AtomicU64,
    /// It refused another write though a block went for it: what goes brings nothing, as where inodes are missing and files
    /// are long.
    pub in_vain: AtomicBool,
    /// When that was said last.
    pub said_refused: Mutex<Option<Instant>>,
    /// Timeouts of operations.
    pub timeouts: (Duration, Duration),
    /// Counters.
    pub stats: Arc<Stats>,
}

/// What a block of `len` bytes takes on disk.
pub fn footprint(len: u32) -> u64 {
    u64::from(len).next_multiple_of(4096)
}

impl Disk {
    /// Asks the background thread for something. The queue is bounded by the number of blocks.
    pub fn ask(&self, work: Work) {
        self.work.lock().push_back(work);
        self.wake.notify_one();
    }

    /// An open data file.
    ///
    /// # Errors
    /// What the system says; `NotFound` when it is gone.
    pub fn file(&self, key: &FileKey) -> io::Result<Arc<OpenFile>> {
        if let Some(file) = self.files.get(key) {
            return Ok(file);
        }
        let file = self.io.open(&layout::data_path(&self.root, key), false, self.timeouts.0)?;
        Ok(self.files.put(*key, file, false))
    }

    /// A data file to write to. `first`: it holds no block yet.
    ///
    /// # Errors
    /// What the system says.
    pub fn file_for_write(&self, key: &FileKey, first: bool) -> io::Result<Arc<OpenFile>> {
        if !first && let Some(file) = self.files.get(key) {
            return Ok(file);
        }
        let path = layout::data_path(&self.root, key);
        let file = in_folder(&path, || self.io.open(&path, true, self.timeouts.1))?;
        Ok(self.files.put(*key, file, first))
    }

    /// Makes a data file that begins with the first `len` bytes of `padded`. It is not kept open.
    ///
    /// # Errors
    /// What the system says.
    pub fn create(&self, key: &FileKey, padded: &[u8], len: usize) -> io::Result<()> {
        let path = layout::data_path(&self.root, key);
        in_folder(&path, || self.io.create(&path, padded, len, self.timeouts.1))?;
        // A reader may have found an older file of that name.
        self.files.remove(key);
        Ok(())
    }

    /// Removes a data file that holds no block any more.
    ///
    /// # Errors
    /// What the system says; a file that is gone already is no error.
    pub fn unlink(&self, key: &FileKey) -> io::Result<()> {
        self.files.remove(key);
        match self.io.unlink(&layout::data_path(&self.root, key), self.timeouts.1) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Appends records to the log.
    ///
    /// # Errors
    /// What the system says; `TimedOut` when another append holds the log for longer than a write may take.
    pub fn append(&self, bytes: Vec<u8>, records: u64) -> io::Result<()> {
        self.append_with(bytes, |_| records)
    }

    /// Appends to the log what `records` writes once it is this append's turn, as many records as it answers; nothing when
    /// that is 0.
    ///
    /// # Errors
    /// As [`Disk::append`].
    pub fn append_with(&self, mut out: Vec<u8>, records: impl FnOnce(&mut Vec<u8>) -> u64) -> io::Result<()> {
        let Some(mut journal) = self.journal.try_lock_for(self.timeouts.1) else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        match records(&mut out) {
            0 => Ok(()),
            records => journal.append(&*self.io, &out, records),
        }
    }

    /// Notes a failed operation: counts it, unless it tells nothing of the disk, and changes the disk's state if it has to;
    /// whether it did.
    pub fn failed(&self, what: &str, error: &io::Error) -> bool {
        if is_own(error) {
            self.short(what, error);
            return false;
        }
        self.stats.blockcache.io_errors.add(1);
        let late = error.kind() == io::ErrorKind::TimedOut;
        let changed = self.health.failed(Instant::now(), late, &|| format!("{what}: {error}"));
        match changed {
            Some(state) => self.entered(state),
            None => tracing::debug!("cache disk {}: {what}: {error}", self.root.display()),
        }
        changed.is_some()
    }

    /// Takes it out of use at once.
    pub fn put_out(&self, why: &str) {
        if let Some(state) = self.health.failed(Instant::now(), true, &|| why.into()) {
            self.entered(state);
        }
    }

    /// The bytes that it may hold now.
    pub fn room(&self) -> u64 {
        self.limit.load(Ordering::Relaxed).min(self.refused.load(Ordering::Relaxed))
    }

    /// Notes that the file system refused `more` bytes than are here: these are all it may hold until it is tried again.
    pub fn refuses(&self, what: &str, more: u64, error: &io::Error) {
        let used = self.used.load(Ordering::Relaxed).saturating_sub(more);
        self.refused.fetch_min(used, Ordering::Relaxed);
        self.wake.notify_one();
        if now_and_then(&self.said_refused) {
            tracing::warn!(
                "cache disk {}: {what}: {error}; its file system refuses more than the {} here (perhaps a quota, or there are \
                 no inodes left: 'quota', 'df -i'); older blocks go for new ones; give a smaller --cache-size",
                self.root.display(),
                human_bytes(used)
            );
        }
    }

    /// Says now and then that this process is short of something.
    fn short(&self, what: &str, error: &io::Error) {
        if now_and_then(&self.said_short) {
            tracing::warn!(
                "cache disk {}: {what}: {error}; that is no fault of the disk, and what is not had from it meanwhile is \
                 fetched again; raise 'ulimit -n' if it is the descriptors",
                self.root.display()
            );
        }
    }

    /// Says aloud that the state changed.
    pub fn entered(&self, state: DiskState) {
        let (_, _, reason) = self.health.get();
        let path = self.root.display();
        match state {
            DiskState::Normal => tracing::info!("cache disk {path} is normal again"),
            DiskState::Unstable => {
                tracing::warn!("cache disk {path} is unstable: {reason}; reads go round it until it answers again");
            }
            DiskState::Down => {
                tracing::warn!("cache disk {path} is down: {reason}; check the disk (dmesg, smartctl); it is tried on");
            }
        }
        self.wake.notify_one();
    }

    /// Asks the file system for its room.
    pub fn refresh_space(&self) {
        match self.io.space(&self.root) {
            Ok(Space { total, free }) => {
                self.total.store(total, Ordering::Relaxed);
                self.free.store(free, Ordering::Relaxed);
            }
            Err(error) => {
                self.failed("asking for free space", &error);
            }
        }
    }

    /// Bytes by which the file system is fuller than the free-space ratio allows with `more` bytes to come.
    pub fn overfull(&self, ratio: f64, more: u64) -> u64 {
        let keep = (self.total.load(Ordering::Relaxed) as f64 * ratio) as u64;
        (keep + more).saturating_sub(self.free.load(Ordering::Relaxed))
    }

    /// Bytes came free, or (negative) were taken, between two questions to the file system.
    pub fn adjust_free(&self, by: i64) {
        let _ =
            self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(free.saturating_add_signed(by)));
    }
}

/// Whether what was `said` is to be said again.
fn now_and_then(said: &Mutex<Option<Instant>>) -> bool {
    let mut said = said.lock();
    let again = said.is_none_or(|at| at.elapsed() > SAY_AGAIN);
    if again {
        *said = Some(Instant::now());
    }
    again
}

/// Does something to a data file, once more when its folder had to be made first.
fn in_folder<T>(path: &Path, mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    match work() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Only this one folder: where the disk was unmounted, nothing is to be made on what lies under it.
            match path.parent().map_or(Ok(()), std::fs::create_dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => work(),
            }
        }
        other => other,
    }
}
