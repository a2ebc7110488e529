//! Owns a cache disk: directory, files, log, room and health. Moves bytes and records, and does not decide which block goes
//! where.

use crate::files::{FileCache, FileKey};
use crate::health::{DiskHealth, DiskState};
use crate::index::HOLE;
use crate::io::{ALIGN, DataFile, DiskIo, DiskSpace, is_process_error};
use crate::journal::IndexJournal;
use crate::layout::{self, CacheRoot};
use crate::policy::S3Fifo;
use crate::write_permits::WritePermits;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, CWD, linkat};
use spurline_types::units::human_bytes;
use spurline_types::{BlockId, Stats};
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Minimum interval between two log lines about the same recurring condition.
const DISK_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A task of the disk's background thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DiskWork {
    /// Remove a block that is marked as leaving.
    Discard(BlockId),
    /// Log that another disk now holds the block, and free its space here. True: the block lies in the object's single file, else
    /// in an extent's file.
    Forget(BlockId, bool),
    /// Free the space of such a block, which this disk does not hold.
    Reclaim(BlockId, bool),
    /// Remove a file without blocks.
    RemoveEmpty(FileKey),
}

pub struct CacheDisk {
    /// The number in the index.
    pub number: u8,
    /// The directory.
    pub root: PathBuf,
    /// The locked directory and the disk's own id.
    pub root_lock: CacheRoot,
    /// The disk's raw operations.
    pub io: Arc<dyn DiskIo>,
    /// The open files.
    pub files: FileCache,
    /// The order of eviction.
    pub policy: S3Fifo<BlockId>,
    /// The index log.
    pub journal: Mutex<IndexJournal>,
    /// The state.
    pub health: DiskHealth,
    /// Bytes of blocks, including reservations of writers.
    pub used: AtomicU64,
    /// Number of blocks.
    pub blocks: AtomicU64,
    /// The bytes that the disk may hold.
    pub limit: AtomicU64,
    /// Free bytes of the file system: the last answer, corrected by own writes and removals since.
    pub free: AtomicU64,
    /// Size of the file system.
    pub total: AtomicU64,
    /// Tasks of the background thread.
    pub work: Mutex<VecDeque<DiskWork>>,
    /// Wakes the background thread.
    pub wake: Condvar,
    /// Limits the bytes that are being written at a time.
    pub write_permits: WritePermits,
    /// The block and generation whose late read last made the disk unusable.
    pub disabled_by: Mutex<Option<(BlockId, u16)>>,
    /// When a shortage of this process was last logged.
    pub shortage_logged_at: Mutex<Option<Instant>>,
    /// The time of the last log line about a full index.
    pub index_full_logged_at: Mutex<Option<Instant>>,
    /// Bytes of blocks at which the file system refused more although it reported free space; `u64::MAX` without a refusal.
    pub refused_above: AtomicU64,
    /// The file system refused another write although a block had been evicted. Further evictions are futile, as when inodes are
    /// missing and files are long.
    pub eviction_futile: AtomicBool,
    /// When a refusal was last logged.
    pub refusal_logged_at: Mutex<Option<Instant>>,
    /// Timeouts of reads and of writes.
    pub timeouts: (Duration, Duration),
    /// Counters.
    pub stats: Arc<Stats>,
}

/// Bytes that a block of `len` bytes with these flags takes on disk.
pub fn disk_footprint(len: u32, flags: u8) -> u64 {
    if flags & HOLE != 0 { ALIGN as u64 } else { u64::from(len).next_multiple_of(ALIGN as u64) }
}

impl CacheDisk {
    /// Queues a task for the background thread. The queue is bounded by the number of blocks.
    pub fn enqueue(&self, work: DiskWork) {
        self.work.lock().push_back(work);
        self.wake.notify_one();
    }

    /// Returns an open data file.
    ///
    /// # Errors
    /// The system's error; `NotFound` when the file does not exist.
    pub fn open_file(&self, key: &FileKey) -> io::Result<Arc<DataFile>> {
        if let Some(file) = self.files.get(key) {
            return Ok(file);
        }
        let file = self.io.open(&layout::data_path(&self.root, key), false, self.timeouts.0)?;
        Ok(self.files.put(*key, file, false))
    }

    /// Returns a data file to write to. `first`: no block is there yet.
    pub fn file_for_write(&self, key: &FileKey, first: bool) -> io::Result<Arc<DataFile>> {
        if !first && let Some(file) = self.files.get(key) {
            return Ok(file);
        }
        let path = layout::data_path(&self.root, key);
        let file = with_folder(&path, || self.io.open(&path, true, self.timeouts.1))?;
        Ok(self.files.put(*key, file, first))
    }

    /// Creates a data file that begins with the first `len` bytes of `padded`.
    pub fn create_file(&self, key: &FileKey, padded: &[u8], len: usize) -> io::Result<()> {
        let path = layout::data_path(&self.root, key);
        with_folder(&path, || self.io.create(&path, padded, len, self.timeouts.1))?;
        // A reader may hold an older file of that name.
        self.files.remove(key);
        Ok(())
    }

    /// Gives a file without a name the name of a data file.
    ///
    /// # Errors
    /// The system's error; `AlreadyExists` when there is such a data file.
    pub fn link_file(&self, key: &FileKey, file: &File) -> io::Result<()> {
        let path = layout::data_path(&self.root, key);
        let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
        with_folder(&path, || Ok(linkat(CWD, &unnamed, CWD, &path, AtFlags::SYMLINK_FOLLOW)?))?;
        // A reader may hold an older file of that name.
        self.files.remove(key);
        Ok(())
    }

    /// Removes a data file that holds no block any more.
    ///
    /// # Errors
    /// The system's error; a missing file is no error.
    pub fn remove_file(&self, key: &FileKey) -> io::Result<()> {
        self.files.remove(key);
        match self.io.unlink(&layout::data_path(&self.root, key), self.timeouts.1) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    /// Appends records to the log.
    ///
    /// # Errors
    /// The system's error; `TimedOut` when another append holds the log for longer than a write may take.
    pub fn append_log(&self, bytes: Vec<u8>, records: u64) -> io::Result<()> {
        self.append_log_with(bytes, |_| records)
    }

    /// Appends to the log the records that `records` writes under the log's lock; `records` returns the number of records, or 0
    /// for nothing to append.
    ///
    /// # Errors
    /// As [`CacheDisk::append_log`].
    pub fn append_log_with(&self, mut out: Vec<u8>, records: impl FnOnce(&mut Vec<u8>) -> u64) -> io::Result<()> {
        let Some(mut journal) = self.journal.try_lock_for(self.timeouts.1) else {
            return Err(io::ErrorKind::TimedOut.into());
        };
        match records(&mut out) {
            0 => Ok(()),
            records => journal.append(&*self.io, &out, records),
        }
    }

    /// Counts a failed operation, unless the failure is this process's own, and updates the disk's state. Returns
    /// whether the state changed.
    pub fn note_failure(&self, what: &str, error: &io::Error) -> bool {
        if is_process_error(error) {
            self.warn_shortage(what, error);
            return false;
        }
        self.stats.blockcache.io_errors.add(1);
        let late = error.kind() == io::ErrorKind::TimedOut;
        let changed = self.health.operation_failed(Instant::now(), late, &|| format!("{what}: {error}"));
        match changed {
            Some(state) => self.log_state_change(state),
            None => tracing::debug!("cache disk {}: {what}: {error}", self.root.display()),
        }
        changed.is_some()
    }

    /// Makes the disk unusable at once.
    pub fn mark_unusable(&self, why: &str) {
        if let Some(state) = self.health.operation_failed(Instant::now(), true, &|| why.into()) {
            self.log_state_change(state);
        }
    }

    /// The bytes that the disk may hold now.
    pub fn room_bytes(&self) -> u64 {
        self.limit.load(Ordering::Relaxed).min(self.refused_above.load(Ordering::Relaxed))
    }

    /// Notes that the file system refused `more` bytes beyond the used bytes. The used bytes are the limit until the disk is
    /// tried again.
    pub fn note_refusal(&self, what: &str, more: u64, error: &io::Error) {
        let used = self.used.load(Ordering::Relaxed).saturating_sub(more);
        self.refused_above.fetch_min(used, Ordering::Relaxed);
        self.wake.notify_one();
        if is_log_due(&self.refusal_logged_at) {
            tracing::warn!(
                "cache disk {}: {what}: {error}; its file system refuses more than the {} stored (perhaps a quota, \
                 or no inodes left: check 'quota' and 'df -i'); older blocks are evicted for new ones; give a \
                 smaller --cache-size",
                self.root.display(),
                human_bytes(used)
            );
        }
    }

    /// Logs a shortage of this process, at intervals.
    fn warn_shortage(&self, what: &str, error: &io::Error) {
        if is_log_due(&self.shortage_logged_at) {
            tracing::warn!(
                "cache disk {}: {what}: {error}; this process or its host lacks a resource, the disk is not at \
                 fault; blocks that can't be read are fetched again; raise 'ulimit -n' if descriptors are missing",
                self.root.display()
            );
        }
    }

    /// Logs, at intervals, that blocks are evicted because the index is full.
    pub fn warn_index_full(&self) {
        if is_log_due(&self.index_full_logged_at) {
            tracing::warn!(
                "cache disk {}: the index of its {} blocks takes all the memory that it may; older blocks are evicted for \
                 new ones although the disk has room; raise the memory limit, or give a smaller --buffer-size",
                self.root.display(),
                self.blocks.load(Ordering::Relaxed)
            );
        }
    }

    pub fn log_state_change(&self, state: DiskState) {
        let (_, _, reason) = self.health.current_state();
        let path = self.root.display();
        match state {
            DiskState::Normal => tracing::info!("cache disk {path} is normal again"),
            DiskState::Unstable => {
                tracing::warn!("cache disk {path} is unstable: {reason}; it is not used until it answers again");
            }
            DiskState::Down => {
                tracing::warn!(
                    "cache disk {path} is down: {reason}; check the disk (dmesg, smartctl); probes continue"
                );
            }
        }
        self.wake.notify_one();
    }

    /// Queries the free space of the file system.
    pub fn refresh_space(&self) {
        match self.io.disk_space(&self.root) {
            Ok(DiskSpace { total, free }) => {
                self.total.store(total, Ordering::Relaxed);
                self.free.store(free, Ordering::Relaxed);
            }
            Err(error) => {
                self.note_failure("querying free space", &error);
            }
        }
    }

    /// Bytes that must be freed to keep the free-space ratio when `more` bytes are written.
    pub fn overfull_bytes(&self, ratio: f64, more: u64) -> u64 {
        let keep = (self.total.load(Ordering::Relaxed) as f64 * ratio) as u64;
        (keep + more).saturating_sub(self.free.load(Ordering::Relaxed))
    }

    /// Corrects the free space by bytes that were freed, or (negative) taken, between two queries of the file system.
    pub fn adjust_free(&self, by: i64) {
        let _ =
            self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| Some(free.saturating_add_signed(by)));
    }
}

/// Whether the interval since the last log line has passed; if so, a new interval begins.
fn is_log_due(said: &Mutex<Option<Instant>>) -> bool {
    let mut said = said.lock();
    let again = said.is_none_or(|at| at.elapsed() > DISK_LOG_INTERVAL);
    if again {
        *said = Some(Instant::now());
    }
    again
}

/// Runs an operation on a data file, and again after the folder was created.
fn with_folder<T>(path: &Path, mut work: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    match work() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            // Only this folder: if the disk was unmounted, nothing may be created on the mount point below.
            match path.parent().map_or(Ok(()), std::fs::create_dir) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => work(),
            }
        }
        other => other,
    }
}
