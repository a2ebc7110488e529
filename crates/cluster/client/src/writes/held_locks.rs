//! The locks that a mount holds through its open files, and how they outlive a node: the next node gets them with the
//! file. A lock that another mount took meanwhile is lost, and the file then fails with `EIO` until it is closed or unlocked.
//! It knows no placement and no wire format.

use super::calls::{CallTarget, HomeProcess, settle_answer};
use super::files::OpenedAs;
use super::{GroupWrites, RequestContext};
use parking_lot::Mutex;
use spurline_proto::{FileNumbers, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::locks::{KnownLock, KnownLocks};
use spurline_volume::writes::{Caller, FileLock};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// From `asm-generic/errno-base.h`.
const EIO: i32 = 5;
const EAGAIN: i32 = 11;

/// Interval of requests for files with locks: a quarter of the time after which a node closes them.
pub(crate) const LOCK_RENEWAL: Duration = Duration::from_secs(5);
/// How long a lock is requested again from the next node while another is in the way: a lost process that still runs gives
/// the mount's own lock up after 25 s.
const RECLAIM: Duration = Duration::from_secs(30);
const RECLAIM_PAUSE: Duration = Duration::from_millis(100);

/// The locks that were set through one open file.
#[derive(Default)]
pub(crate) struct HeldLocks {
    known: Mutex<KnownLocks>,
    any: AtomicBool,
    lost: AtomicBool,
}

impl HeldLocks {
    /// Whether there are locks.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }
}

/// The open files of one object whose locks are lost. All of them fail: the owner of a lock may write through another one.
#[derive(Default)]
pub(crate) struct LostLocks(AtomicUsize);

impl LostLocks {
    /// Fails while there are some.
    pub fn check_none(&self) -> Result<()> {
        if self.0.load(Ordering::Acquire) > 0 {
            let why =
                "the lock of this file was lost with a node, and another mount has it: close the file, or unlock it";
            return Err(Error::new(ErrorKind::Io(EIO), why));
        }
        Ok(())
    }
}

impl OpenedAs {
    /// Notes a lock that was set or removed.
    pub(super) fn note_lock(&self, lock: &FileLock) {
        let mut known = self.held.known.lock();
        known.set_range(KnownLock { lock: *lock, pid: 0 });
        self.held.any.store(!known.is_empty(), Ordering::Relaxed);
        if known.is_empty() {
            self.end_loss();
        }
    }

    /// The locks are gone, and so is their loss.
    pub(super) fn end_loss(&self) {
        if self.held.lost.swap(false, Ordering::AcqRel) {
            self.bytes.lost_locks.0.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Fails for a call that relies on locks which are lost.
    pub(super) fn check_locks(&self, call: &WriteCall<'_>) -> Result<()> {
        let relies = matches!(
            call,
            WriteCall::Read { .. }
                | WriteCall::Write { .. }
                | WriteCall::Allocate { .. }
                | WriteCall::SetAttrOpen { .. }
                | WriteCall::SetLock { .. }
        );
        if relies { self.bytes.lost_locks.check_none() } else { Ok(()) }
    }

    /// Sets the locks again in process `home`, which has just opened the file that was open in `before`.
    pub(super) fn reclaim_locks(&self, writes: &GroupWrites, home: &HomeProcess, before: &HomeProcess) {
        if !self.held.any() || self.held.lost.load(Ordering::Acquire) {
            return;
        }
        let until = Instant::now() + RECLAIM.min(writes.client.patience().answer);
        let locks: Vec<FileLock> = self.held.known.lock().iter().map(|known| known.lock).collect();
        for lock in &locks {
            let Err(error) = self.reclaim_lock(writes, (home, before), lock, until) else { continue };
            if !self.held.lost.swap(true, Ordering::AcqRel) {
                self.bytes.lost_locks.0.fetch_add(1, Ordering::AcqRel);
            }
            tracing::warn!(
                "a lock is lost with a node: {error}; the file fails with EIO until it is closed or unlocked"
            );
            return;
        }
        tracing::info!(node = home.node, locks = locks.len(), "the locks of an open file moved to another node");
    }

    fn reclaim_lock(
        &self,
        writes: &GroupWrites,
        (home, before): (&HomeProcess, &HomeProcess),
        lock: &FileLock,
        until: Instant,
    ) -> Result<()> {
        let root = Caller::default();
        loop {
            let call = set_call(self.number(), lock);
            let sent = writes.send(CallTarget::Process(home), &call, RequestContext::of(&root), 0, None, &mut []);
            let error = match sent.map_err(Error::from).and_then(|sent| settle_answer(sent.answer)) {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if error.kind() != ErrorKind::Io(EAGAIN) || Instant::now() >= until {
                return Err(error);
            }
            if home.instance != before.instance {
                // A process that is only cut off has the lock for this mount. It gives it up when it is reached, or when
                // it has heard nothing for long.
                let mut numbers = Vec::new();
                let close = WriteCall::Close { files: FileNumbers::new(&[self.number()], &mut numbers) };
                let _ = writes.send(CallTarget::Process(before), &close, RequestContext::of(&root), 0, None, &mut []);
            }
            std::thread::sleep(RECLAIM_PAUSE);
        }
    }
}

/// The call that sets or removes a lock of an open file.
pub(super) fn set_call(file: u64, lock: &FileLock) -> WriteCall<'static> {
    let FileLock { family, owner, range, kind } = *lock;
    WriteCall::SetLock { file, family, owner, range, kind }
}
