//! The locks that a mount holds through its open files, and how they outlive a node: the next node gets them with the
//! file, unless another mount may have had them meanwhile. A lock that is lost fails the file with `EIO` until it is closed or
//! unlocked. It knows no placement and no wire format.

use super::GroupWrites;
use super::calls::{
    CallDeadline, CallEnd, CallKind, CallTarget, HomeProcess, WriteCallPlan, settle_answer, unexpected,
};
use super::files::OpenedAs;
use parking_lot::Mutex;
use spurline_proto::{LOCK_TIMES, WriteAnswer, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::locks::{KnownLock, KnownLocks};
use spurline_volume::writes::{Caller, FileLock, LockKind};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// From `asm-generic/errno-base.h`.
const EIO: i32 = 5;
const EAGAIN: i32 = 11;

const RECLAIM_PAUSE: Duration = Duration::from_millis(100);
/// How often the next process is tried once more after its connections broke.
const RECLAIM_RETRIES: usize = 3;
/// Lost processes that are remembered.
const LOST_MAX: usize = 16;

/// When locks are set after a process was lost.
pub(crate) struct LockGrace {
    new_after_ms: AtomicU64,
    again_within_ms: AtomicU64,
    /// The lost processes, and when that was seen first.
    lost: Mutex<VecDeque<(u64, Instant)>>,
}

impl Default for LockGrace {
    fn default() -> Self {
        let grace = || AtomicU64::new(LOCK_TIMES.grace.as_millis() as u64);
        LockGrace { new_after_ms: grace(), again_within_ms: grace(), lost: Mutex::default() }
    }
}

impl LockGrace {
    fn new_after(&self) -> Duration {
        Duration::from_millis(self.new_after_ms.load(Ordering::Relaxed))
    }

    fn again_within(&self) -> Duration {
        Duration::from_millis(self.again_within_ms.load(Ordering::Relaxed))
    }

    /// From when on new locks may be set in the place of a lost process.
    fn note_lost(&self, instance: u64) -> Instant {
        let (mut lost, now) = (self.lost.lock(), Instant::now());
        // A process that was found again may be lost a second time.
        lost.retain(|(_, seen)| now - *seen < self.new_after());
        let seen = lost.iter().find(|(of, _)| *of == instance).map(|(_, seen)| *seen);
        let seen = seen.unwrap_or_else(|| {
            lost.push_back((instance, now));
            now
        });
        if lost.len() > LOST_MAX {
            lost.pop_front();
        }
        seen + self.new_after()
    }
}

/// The locks that were set through one open file.
#[derive(Default)]
pub(crate) struct HeldLocks {
    known: Mutex<KnownLocks>,
    /// When the request for the first of them was sent.
    since: Mutex<Option<Instant>>,
    any: AtomicBool,
    lost: AtomicBool,
    /// When the last request was sent that its process answered: it had the locks then.
    confirmed: Mutex<Option<Instant>>,
    /// New locks are set from then on; `None` before the first.
    settled: Mutex<Option<Instant>>,
}

impl HeldLocks {
    /// Whether there are locks.
    pub fn any(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Whether there are locks that are lost.
    pub fn are_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// The time of a request whose answer confirms the locks.
    pub fn begin_confirm(&self) -> Option<Instant> {
        self.any().then(Instant::now)
    }

    /// The process answered a request that was sent at `sent`.
    pub fn confirm(&self, sent: Option<Instant>) {
        if sent.is_some() {
            let mut confirmed = self.confirmed.lock();
            *confirmed = (*confirmed).max(sent);
        }
    }
}

/// The open files of one object whose locks are lost. All of them fail: the owner of a lock may write through another one.
#[derive(Default)]
pub(crate) struct LostLocks(AtomicUsize);

impl LostLocks {
    /// Fails while there are some.
    pub fn check_none(&self) -> Result<()> {
        if self.0.load(Ordering::Acquire) > 0 {
            let why = "the lock of this file was lost with a node, and another mount may have had it: close the file, or unlock it";
            return Err(Error::new(ErrorKind::Io(EIO), why));
        }
        Ok(())
    }
}

/// Where an open file is after its process could not be reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FileAfterLoss {
    /// In the process that has opened it now, with these locks; `None` if the locks are lost.
    Moved(Option<Vec<FileLock>>),
    /// In the process before, with its locks: that was only cut off.
    Stayed,
    /// The next process is lost too.
    LostAgain,
}

impl GroupWrites {
    /// Sets how long new locks wait after a loss, and within which time locks are taken again. For tests.
    #[doc(hidden)]
    pub fn set_lock_grace(&self, new_after: Duration, again_within: Duration) {
        self.lock_grace.new_after_ms.store(new_after.as_millis() as u64, Ordering::Relaxed);
        self.lock_grace.again_within_ms.store(again_within.as_millis() as u64, Ordering::Relaxed);
    }
}

impl OpenedAs {
    /// Notes a lock that `home` granted to a request of the time `sent`. False if the file has moved since: the lock was not
    /// among those that moved with it.
    pub(super) fn note_granted(&self, lock: &FileLock, sent: Instant, home: &HomeProcess) -> bool {
        let mut known = self.held.known.lock();
        if *self.home.lock() != *home {
            return false;
        }
        known.set_range(KnownLock { lock: *lock, pid: 0 });
        self.held.any.store(true, Ordering::Relaxed);
        self.held.since.lock().get_or_insert(sent);
        true
    }

    /// Forgets a lock that is to be released.
    pub(super) fn forget_lock(&self, lock: &FileLock) {
        let mut known = self.held.known.lock();
        known.set_range(KnownLock { lock: *lock, pid: 0 });
        self.held.any.store(!known.is_empty(), Ordering::Relaxed);
        if known.is_empty() {
            *self.held.since.lock() = None;
            self.end_loss();
        }
    }

    /// The file is in process `home` from now on. False if a lock was set or released in the process before, since `locks` were
    /// set in `home`.
    pub(super) fn enter_process(&self, home: &HomeProcess, locks: Option<&[FileLock]>) -> bool {
        let known = self.held.known.lock();
        let as_known = locks.is_none_or(|locks| known.iter().map(|known| known.lock).eq(locks.iter().copied()));
        if as_known {
            *self.home.lock() = home.clone();
        }
        as_known
    }

    /// The program has closed it.
    pub(super) fn mark_closed(&self) {
        // After a loss that begins now, or before it.
        let _known = self.held.known.lock();
        self.closed.store(true, Ordering::Release);
    }

    /// The locks are gone, and so is their loss.
    pub(super) fn end_loss(&self) {
        if self.held.lost.swap(false, Ordering::AcqRel) {
            self.bytes.lost_locks.0.fetch_sub(1, Ordering::AcqRel);
        }
    }

    fn begin_loss(&self, why: &str) {
        let known = self.held.known.lock();
        // Released or closed meanwhile.
        if known.is_empty() || self.is_closed() {
            return;
        }
        if !self.held.lost.swap(true, Ordering::AcqRel) {
            self.bytes.lost_locks.0.fetch_add(1, Ordering::AcqRel);
            let path = self.logged_path();
            tracing::warn!("a lock of {path} is lost: {why}; the file fails with EIO until it is closed or unlocked");
        }
    }

    /// Its process has closed it, and with it its locks.
    pub(super) fn note_unknown(&self, home: &HomeProcess) {
        if self.held.any() {
            let why = format!("node {} has closed the file, as it heard nothing from this mount for long", home.node);
            self.begin_loss(&why);
        }
    }

    /// The process is reached again, and has kept the file open unless that took too long.
    pub(super) fn check_kept_open(&self, home: &HomeProcess) {
        let confirmed = *self.held.confirmed.lock();
        if confirmed.is_none_or(|at| at.elapsed() >= LOCK_TIMES.locks_idle) {
            self.note_unknown(home);
        }
    }

    /// It moved because its process was lost.
    pub(super) fn note_moved(&self, writes: &GroupWrites, lost: &HomeProcess) {
        *self.held.settled.lock() = Some(writes.lock_grace.note_lost(lost.instance));
    }

    /// Fails for a new lock while mounts that had locks in a lost process may take them again.
    ///
    /// # Errors
    /// `Throttled` until then.
    fn check_settled(&self, writes: &GroupWrites) -> Result<()> {
        let mut settled = self.held.settled.lock();
        let at = *settled.get_or_insert_with(|| {
            let away = writes.calls.better_node_away(&self.current_path(), &self.home());
            let left = away.map(|away| writes.lock_grace.new_after().saturating_sub(away));
            Instant::now() + left.unwrap_or_default()
        });
        if Instant::now() < at {
            let why = "a node was lost: mounts that had locks there take them again first";
            return Err(Error::new(ErrorKind::Throttled, why));
        }
        Ok(())
    }

    /// Fails for a call that relies on locks which are lost.
    pub(super) fn check_lost(&self, call: &WriteCall<'_>) -> Result<()> {
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

    /// Fails for a call that relies on locks which are lost, and for a new lock that has to wait.
    pub(super) fn check_locks(&self, writes: &GroupWrites, call: &WriteCall<'_>) -> Result<()> {
        self.check_lost(call)?;
        match call {
            WriteCall::SetLock { kind, .. } if *kind != LockKind::Unlock => self.check_settled(writes),
            _ => Ok(()),
        }
    }

    /// Sets the locks again in process `home`, which has just opened the file that was open in `before`. Those of `passed` may
    /// have set some.
    pub(super) fn reclaim_locks(
        &self,
        writes: &GroupWrites,
        home: &HomeProcess,
        before: &HomeProcess,
        passed: &[HomeProcess],
        deadline: CallDeadline,
    ) -> FileAfterLoss {
        let again_until = self.held.confirmed.lock().map(|confirmed| confirmed + writes.lock_grace.again_within());
        let in_time = || again_until.is_some_and(|until| Instant::now() < until);
        let until = Instant::now() + LOCK_TIMES.cut_off_wait.min(writes.client.patience().answer);
        let mut last = Error::new(ErrorKind::Timeout, "too much time has passed since the lost node answered");
        let mut retries = 0;
        loop {
            if self.held.lost.load(Ordering::Acquire) {
                return FileAfterLoss::Moved(None);
            }
            let locks: Vec<FileLock> = self.held.known.lock().iter().map(|known| known.lock).collect();
            if locks.is_empty() {
                return FileAfterLoss::Moved(Some(locks));
            }
            if in_time() {
                match locks.iter().try_for_each(|lock| self.reclaim_lock(writes, home, lock, &in_time, deadline)) {
                    // It was executed in time if the answer is.
                    Ok(()) if in_time() => {
                        let path = self.logged_path();
                        tracing::info!(node = home.node, "{} locks of {path} moved to another node", locks.len());
                        return FileAfterLoss::Moved(Some(locks));
                    }
                    Ok(()) => {}
                    Err(CallEnd::Failed(error)) if error.kind() == ErrorKind::Io(EAGAIN) => {
                        passed.iter().filter(|passed| *passed != home).for_each(|passed| {
                            writes.calls.try_close(passed, &[self.number()], deadline);
                        });
                        last = error;
                    }
                    // Another process has its place, or it can't be reached.
                    Err(CallEnd::Lost { error, .. })
                        if error.kind() == ErrorKind::Stale || retries == RECLAIM_RETRIES =>
                    {
                        return FileAfterLoss::LostAgain;
                    }
                    Err(CallEnd::Lost { error, .. }) => (last, retries) = (error, retries + 1),
                    Err(CallEnd::Failed(error)) => {
                        self.begin_loss(&error.to_string());
                        return FileAfterLoss::Moved(None);
                    }
                }
            }
            // A process that is only cut off has the locks until it has heard nothing for long.
            match self.is_open_at(writes, before, deadline) {
                Some(true) => {
                    let path = self.logged_path();
                    tracing::info!(node = before.node, "a node with locks of {path} is reached again");
                    return FileAfterLoss::Stayed;
                }
                Some(false) => {
                    self.note_unknown(before);
                    return FileAfterLoss::Moved(None);
                }
                None => {}
            }
            if Instant::now() >= until || !in_time() && last.kind() != ErrorKind::Io(EAGAIN) {
                self.begin_loss(&last.to_string());
                return FileAfterLoss::Moved(None);
            }
            std::thread::sleep(RECLAIM_PAUSE);
        }
    }

    /// Whether a process has this file open; `None` if it can't be reached.
    fn is_open_at(&self, writes: &GroupWrites, process: &HomeProcess, deadline: CallDeadline) -> Option<bool> {
        let call = WriteCall::StatOpen { file: self.number() };
        let sent = writes.calls.query(CallTarget::Process(process), &call, &Caller::default(), deadline);
        sent.ok().map(|sent| sent.answer != WriteAnswer::UnknownFile)
    }

    fn reclaim_lock(
        &self,
        writes: &GroupWrites,
        home: &HomeProcess,
        lock: &FileLock,
        in_time: &dyn Fn() -> bool,
        deadline: CallDeadline,
    ) -> std::result::Result<(), CallEnd> {
        let call = set_call(self.number(), lock);
        let root = Caller::default();
        loop {
            let asked = Instant::now();
            let plan = WriteCallPlan::query(CallTarget::Process(home), &call, &root, deadline);
            let sent = writes.calls.run(WriteCallPlan { kind: CallKind::SetAgain, ..plan })?;
            let answered = Instant::now();
            let ago = match settle_answer(sent.answer).map_err(CallEnd::Failed)? {
                WriteAnswer::Done => return Ok(()),
                WriteAnswer::Number(us) => Duration::from_micros(us),
                other => return Err(CallEnd::Failed(unexpected(&other))),
            };
            // Before this mount got it in the lost process, another mount's lock does not matter.
            let was_before = match *self.held.since.lock() {
                Some(since) => was_granted_before(ago, since, asked..answered),
                None => Some(false),
            };
            match was_before {
                Some(true) => return Ok(()),
                // No other mount can have the lock now, so that the next answer is about the same one, and may be faster.
                None if in_time() => std::thread::sleep(RECLAIM_PAUSE),
                _ => break,
            }
        }
        let unlock = set_call(self.number(), &FileLock { kind: LockKind::Unlock, ..*lock });
        // What fails here is released with the file.
        let _ = writes.calls.query(CallTarget::Process(home), &unlock, &root, deadline);
        Err(CallEnd::Failed(Error::new(ErrorKind::Io(EIO), "another mount has had the lock meanwhile")))
    }
}

/// Whether a lock that another mount got this long `ago` was granted before `since`, by an answer that a node gave at some time
/// of `request`; `None` if that request took too long to tell.
fn was_granted_before(ago: Duration, since: Instant, request: Range<Instant>) -> Option<bool> {
    if ago > request.end.saturating_duration_since(since) {
        return Some(true);
    }
    if ago <= request.start.saturating_duration_since(since) {
        return Some(false);
    }
    None
}

/// The call that sets or removes a lock of an open file.
pub(super) fn set_call(file: u64, lock: &FileLock) -> WriteCall<'static> {
    let FileLock { family, owner, range, kind } = *lock;
    WriteCall::SetLock { file, family, owner, range, kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_answer_does_not_tell_which_of_two_locks_was_first() {
        let since = Instant::now();
        let asked = since + Duration::from_millis(100);
        let fast = asked..asked + Duration::from_millis(2);
        let slow = asked..asked + Duration::from_millis(200);
        for (ago_ms, by_fast, by_slow) in [
            (301, Some(true), Some(true)),
            (300, Some(true), None),
            (103, Some(true), None),
            (102, None, None),
            (101, None, None),
            (100, Some(false), Some(false)),
            (50, Some(false), Some(false)),
        ] {
            let ago = Duration::from_millis(ago_ms);
            assert_eq!(was_granted_before(ago, since, fast.clone()), by_fast, "{ago_ms} ms");
            assert_eq!(was_granted_before(ago, since, slow.clone()), by_slow, "{ago_ms} ms");
        }
    }
}
