//! The bytes of one file that are not durable, with what its open files have to know about them. It knows no requests.

use super::pieces::PieceList;
use super::queue::LONGEST_WAIT;
use parking_lot::{Condvar, Mutex, MutexGuard};
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// The bytes of one file that are not durable, for all its open files in this mount.
#[derive(Default)]
pub(crate) struct FileBytes {
    pub(in crate::writes) list: Mutex<PieceList>,
    /// A piece was sent, or could not be.
    pub(in crate::writes) sent: Condvar,
    failures: Mutex<FileFailures>,
    /// The last sync failed, or a write since: writes wait for their node, so that they fail themselves.
    failing: AtomicBool,
    /// The end of the file, as far as is known here: where the next append goes if no other mount appends.
    end: AtomicU64,
    /// Held during an append.
    appending: Mutex<()>,
    /// The open files of the object whose locks are lost.
    lost_locks: AtomicUsize,
    /// Until then, it is known to have no file capabilities.
    bare_until: Mutex<Option<Instant>>,
}

#[derive(Default)]
struct FileFailures {
    count: u64,
    last: Option<Error>,
}

/// Which failures of its file an open file has reported.
#[derive(Default)]
pub(crate) struct ReportedFailures {
    at_sync: AtomicU64,
    at_close: AtomicU64,
}

impl FileBytes {
    /// For an open file of now on: earlier failures are not its own.
    pub fn start_reports(&self) -> ReportedFailures {
        let now = self.failures.lock().count;
        ReportedFailures { at_sync: AtomicU64::new(now), at_close: AtomicU64::new(now) }
    }

    /// Begins an append; the next one waits for its end.
    pub fn begin_append(&self) -> MutexGuard<'_, ()> {
        self.appending.lock()
    }

    /// Where the next append goes.
    pub fn end(&self) -> u64 {
        self.end.load(Ordering::Relaxed)
    }

    /// The file has at least `end` bytes.
    pub fn raise_end(&self, end: u64) {
        self.end.fetch_max(end, Ordering::Relaxed);
    }

    /// The file has `size` bytes, unless some are being appended or are not sent.
    pub fn note_size(&self, size: u64) {
        if let Some(_none) = self.appending.try_lock()
            && !self.has_unsent()
        {
            self.end.store(size, Ordering::Relaxed);
        }
    }

    /// Whether the file is known to have no file capabilities (`security.capability`).
    pub fn is_bare(&self) -> bool {
        self.bare_until.lock().is_some_and(|until| Instant::now() < until)
    }

    /// Notes that the file has no file capabilities, or that it may have some.
    pub fn note_bare(&self, bare: bool) {
        *self.bare_until.lock() = bare.then(|| Instant::now() + LONGEST_WAIT);
    }

    /// One more open file of the object has lost its locks. All of them fail: the owner of a lock may write through another one.
    pub fn begin_lock_loss(&self) {
        self.lost_locks.fetch_add(1, Ordering::AcqRel);
    }

    /// The lost locks of an open file were released.
    pub fn end_lock_loss(&self) {
        self.lost_locks.fetch_sub(1, Ordering::AcqRel);
    }

    /// Fails while locks of the object are lost.
    pub fn check_lock_loss(&self) -> Result<()> {
        if self.lost_locks.load(Ordering::Acquire) > 0 {
            let why = "the lock of this file was lost with a node, and another mount may have had it: close the file, or unlock it";
            return Err(Error::new(ErrorKind::Io(EIO), why));
        }
        Ok(())
    }

    pub fn has_unsent(&self) -> bool {
        self.list.lock().unsent_pieces() > 0
    }

    /// What was written until now is durable without a failure.
    pub fn end_failing(&self) {
        self.failing.store(false, Ordering::Release);
    }

    pub fn is_failing(&self) -> bool {
        self.failing.load(Ordering::Acquire)
    }

    pub fn unsent_bytes(&self) -> u64 {
        self.list.lock().unsent_bytes()
    }

    /// The end of the bytes that a node may have lost.
    pub fn retained_end(&self) -> u64 {
        self.list.lock().end()
    }

    /// The number of failures until now.
    pub fn failure_count(&self) -> u64 {
        self.failures.lock().count
    }

    pub fn add_failure(&self, error: Error) {
        self.failing.store(true, Ordering::Release);
        let mut failures = self.failures.lock();
        failures.count += 1;
        failures.last = Some(error);
    }

    /// Fails if there was a failure after the first `count`.
    pub fn failure_after(&self, count: u64) -> Result<()> {
        let failures = self.failures.lock();
        match &failures.last {
            Some(error) if failures.count > count => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn unreported(&self, seen: &AtomicU64) -> Result<()> {
        let failures = self.failures.lock();
        match &failures.last {
            Some(error) if seen.swap(failures.count, Ordering::AcqRel) < failures.count => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Fails with a failure that this open file has not reported at a sync.
    pub fn report_at_sync(&self, reported: &ReportedFailures) -> Result<()> {
        self.unreported(&reported.at_sync)
    }

    /// Fails with a failure that this open file has not reported at a close.
    pub fn report_at_close(&self, reported: &ReportedFailures) -> Result<()> {
        self.unreported(&reported.at_close)
    }
}
