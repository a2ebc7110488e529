//! Locks of open files: which owner has which, through which open file, and requests that wait for one. The source
//! decides who gets a lock; the table (`lock_table`) spares requests whose answer is known, and wakes waiters of the same mount.
//!
//! The end of an open file arrives after close(2) has returned, at times after the next request of the same program. Until then its
//! locks are those of a file without a descriptor:
//!
//! | a request for a lock finds | and then |
//! |---|---|
//! | a lock of another owner through a file of which no descriptor was closed | it is refused, or waits for a release |
//! | a lock of another owner through a file of which a descriptor was closed | it waits for the end of the file, until the session is certain that none is on its way: then another descriptor is open |
//! | locks of its own owner through another such file | the same: the number of an owner is used again when its file is closed |
//! | a lock through a file that is being closed | it waits until the source has closed the file |

use super::life::{KeptMount, MountRecords};
use super::lock_table::{KnownConflict, LockCarrier, LockTable, OwnerCall};
use super::names::MountNames;
use super::open_nodes::{OpenNodeFile, OpenNodes};
use crate::errno::{FsError, FsResult, errno_error};
use crate::kept_records::{KeptLock, RecordSlot};
use crate::service::{BeginWait, FsCaller, HandleRef, LockRequest};
use spurline_types::{ErrorKind, Result};
use spurline_volume::kept_files::KeptFileKey;
use spurline_volume::locks::{KnownLock, LAST_BYTE};
use spurline_volume::writes::{FileLock, LockConflict, LockFamily, LockKind, LockRange, WritableFile};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pauses between two requests for a lock that a program outside of this mount has. Its release raises no event here.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Longest sleep of a waiter, which is woken by events.
const WAKE: Duration = Duration::from_secs(1);
/// How long a lock that was requested without a wait waits for the end of an open file, while the session is never certain
/// that none is on its way: it serves more requests than it can look through.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(10);
/// How long a lock that was requested without a wait waits after the loss of a node, for mounts that had it there.
const UNSETTLED: Duration = Duration::from_secs(10);

/// The outcome of one attempt to set a lock.
enum LockAttempt {
    Done,
    /// Another program of this mount has a lock in the way, whose release is an event here.
    Held,
    /// A lock is in the way that goes through this open file, which may be closed already.
    Closing(u64),
    /// A program outside of this mount has a lock in the way.
    HeldElsewhere,
    /// It can't be known yet: a mount that had the lock in a lost node may take it again.
    Unsettled,
    Failed(FsError),
}

impl LockAttempt {
    fn of_source(answer: Result<()>) -> LockAttempt {
        match answer {
            Ok(()) => LockAttempt::Done,
            Err(error) if error.kind() == ErrorKind::Throttled => LockAttempt::Unsettled,
            Err(error) => match FsError::from(error) {
                error if error.errno() == libc::EAGAIN => LockAttempt::HeldElsewhere,
                error => LockAttempt::Failed(error),
            },
        }
    }

    /// How long a request without a wait waits all the same.
    fn patience(&self) -> Duration {
        match self {
            LockAttempt::Closing(_) => CLOSE_WAIT_MAX,
            LockAttempt::Unsettled => UNSETTLED,
            _ => Duration::ZERO,
        }
    }

    fn refusal(&self) -> FsError {
        let why = match self {
            LockAttempt::Unsettled => "a node was lost",
            LockAttempt::HeldElsewhere => "another program has the lock",
            _ => "another program of this mount has the lock",
        };
        errno_error(libc::EAGAIN, why)
    }
}

/// Sets, removes and tests the locks of open files.
pub(super) struct MountLocks {
    pub table: Arc<LockTable>,
    names: Arc<MountNames>,
    open_nodes: Arc<OpenNodes>,
    life: Arc<MountRecords>,
}

impl MountLocks {
    pub fn new(names: &Arc<MountNames>) -> MountLocks {
        MountLocks {
            table: Arc::default(),
            names: Arc::clone(names),
            open_nodes: Arc::clone(&names.open_nodes),
            life: Arc::clone(&names.life),
        }
    }

    /// Sets or removes a lock; with `wait`, as soon as no other is in the way. `slots`: see [`BeginWait`]. Returns whether the
    /// kernel has to drop its pages of the inode: what others wrote under their lock has to be read now.
    pub fn set_lock(
        &self,
        handle: HandleRef,
        request: &LockRequest,
        caller: &FsCaller,
        slots: Option<&dyn BeginWait>,
        wait: bool,
    ) -> FsResult<bool> {
        let HandleRef { ino, fh } = handle;
        let file = self.open_nodes.file(ino, fh)?;
        self.table.note_closing(ino, fh, false);
        let started = Instant::now();
        let mut waiting = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let seen = self.table.releases();
            let mut attempt = self.try_lock(handle, &file, request, caller, false);
            if let LockAttempt::Closing(closing) = attempt
                && slots.is_none_or(|slots| slots.has_all_closes(closing))
            {
                attempt = self.try_lock(handle, &file, request, caller, true);
            }
            match attempt {
                LockAttempt::Done => {
                    let is_set = request.lock.kind != LockKind::Unlock;
                    if is_set {
                        self.open_nodes.leave_cache(ino);
                    }
                    return Ok(is_set && self.open_nodes.has_pages(ino));
                }
                LockAttempt::Failed(error) => return Err(error),
                _ if !wait && started.elapsed() >= attempt.patience() => return Err(attempt.refusal()),
                _ => {}
            }
            let longest = if wait && matches!(attempt, LockAttempt::Held) { WAKE } else { pause };
            if waiting.is_none() {
                waiting = Some(slots.map(BeginWait::begin_wait).transpose()?);
                if wait {
                    self.give_up_flock(handle, &file, request, caller);
                }
            }
            self.table.wait_release(seen, request.number, longest)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// As in the kernel, a `flock(2)` that waits for another type has given up the old one: two that share a lock and both
    /// want it alone would wait for each other.
    fn give_up_flock(&self, handle: HandleRef, file: &Arc<OpenNodeFile>, request: &LockRequest, caller: &FsCaller) {
        if request.lock.family == LockFamily::Flock {
            let lock = FileLock { kind: LockKind::Unlock, ..request.lock };
            // Without an old lock this does nothing.
            let _ = self.try_lock(handle, file, &LockRequest { lock, ..*request }, caller, false);
        }
    }

    /// Whether the end of the file that locks go through may be on its way. `closes_known`: of no file of which a descriptor
    /// is open. A file that is not open any more is being closed in the source.
    fn may_be_closed(&self, carrier: &LockCarrier, closes_known: bool) -> bool {
        carrier.closing && !closes_known || !self.open_nodes.files.is_open(carrier.fh)
    }

    /// One attempt. `closes_known`: see [`MountLocks::may_be_closed`].
    fn try_lock(
        &self,
        handle: HandleRef,
        file: &Arc<OpenNodeFile>,
        request: &LockRequest,
        caller: &FsCaller,
        closes_known: bool,
    ) -> LockAttempt {
        let HandleRef { ino, fh } = handle;
        let lock = &request.lock;
        let unlocks = lock.kind == LockKind::Unlock;
        let own = self.table.begin_call(ino, lock);
        let mut call = OwnerCall { table: &self.table, ino, owner: lock.owner(), set: None };
        match self.table.find_conflict(ino, lock, |carrier| self.may_be_closed(carrier, closes_known)) {
            Some(KnownConflict::Held(_)) => return LockAttempt::Held,
            Some(KnownConflict::Closing(closing, _)) => return LockAttempt::Closing(closing),
            None => {}
        }
        let Some(own) = own.or((!unlocks).then_some(LockCarrier { owner: lock.owner(), fh, closing: false })) else {
            return LockAttempt::Done;
        };
        // The owner may be another open file, with the number of the one that these locks belong to.
        if own.fh != fh && !unlocks && self.may_be_closed(&own, closes_known) {
            return LockAttempt::Closing(own.fh);
        }
        let through = if own.fh == fh { Some(Arc::clone(file)) } else { self.open_nodes.files.get(own.fh) };
        let Some(through) = through else {
            // Its locks go with it.
            return if unlocks { LockAttempt::Done } else { LockAttempt::Closing(own.fh) };
        };
        let set = self.names.as_caller(caller, false, |caller| through.file.set_lock(lock, caller));
        self.names.follow_identity(&through);
        if set.is_ok() && !unlocks {
            self.keep_lock_file(own.fh, lock, &*through.file);
        }
        if set.is_ok() {
            call.set = Some((KnownLock { lock: *lock, pid: request.pid }, own.fh));
        }
        // Before the file is dropped, which takes its locks out of the table.
        drop(call);
        drop(through);
        LockAttempt::of_source(set)
    }

    /// Keeps the descriptor that the source's locks of an owner belong to, when the owner gets the first.
    fn keep_lock_file(&self, fh: u64, lock: &FileLock, file: &dyn WritableFile) {
        let Some(life) = self.life.kept().filter(|_| lock.family == LockFamily::Posix) else { return };
        if let Some(descriptor) = file.lock_descriptor(lock.owner) {
            life.files.keep_file(KeptFileKey::Lock { fh, owner: lock.owner }, descriptor.as_fd());
        }
    }

    /// A lock of another owner that is in the way of this one. `slots`: see [`BeginWait`].
    pub fn test_lock(
        &self,
        handle: HandleRef,
        lock: &FileLock,
        number: u64,
        slots: Option<&dyn BeginWait>,
    ) -> FsResult<Option<LockConflict>> {
        let HandleRef { ino, fh } = handle;
        let file = self.open_nodes.file(ino, fh)?;
        self.table.note_closing(ino, fh, false);
        let started = Instant::now();
        let mut waiting = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let seen = self.table.releases();
            let mut found = self.find_conflict(handle, &file, lock, false)?;
            if let Some(KnownConflict::Closing(closing, _)) = found
                && slots.is_none_or(|slots| slots.has_all_closes(closing))
            {
                found = self.find_conflict(handle, &file, lock, true)?;
            }
            match found {
                None => return Ok(None),
                Some(KnownConflict::Held(conflict)) => return Ok(Some(conflict)),
                Some(KnownConflict::Closing(_, conflict)) if started.elapsed() >= CLOSE_WAIT_MAX => {
                    return Ok(Some(conflict));
                }
                Some(KnownConflict::Closing(..)) => {}
            }
            if waiting.is_none() {
                waiting = Some(slots.map(BeginWait::begin_wait).transpose()?);
            }
            self.table.wait_release(seen, number, pause)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// A lock in the way, by the table or else by the source.
    fn find_conflict(
        &self,
        handle: HandleRef,
        file: &Arc<OpenNodeFile>,
        lock: &FileLock,
        closes_known: bool,
    ) -> FsResult<Option<KnownConflict>> {
        let HandleRef { ino, fh } = handle;
        // A test excludes no lock.
        let own = self.table.begin_call(ino, &FileLock { kind: LockKind::Unlock, ..*lock });
        let _call = OwnerCall { table: &self.table, ino, owner: lock.owner(), set: None };
        let conflict = self.table.find_conflict(ino, lock, |carrier| self.may_be_closed(carrier, closes_known));
        if conflict.is_some() {
            return Ok(conflict);
        }
        let other = own.map(|own| own.fh).filter(|own| *own != fh);
        let through = other.and_then(|other| self.open_nodes.files.get(other));
        let found = through.as_ref().unwrap_or(file).file.test_lock(lock)?;
        Ok(found.map(|conflict| match other.filter(|_| through.is_none()) {
            // A lock with the owner's number, whose file is being closed.
            Some(other) => KnownConflict::Closing(other, conflict),
            None => KnownConflict::Held(conflict),
        }))
    }

    /// Whether the kernel may have pages with bytes that programs stored into a shared map, which have to be written before a lock
    /// is set or given up: it does so by itself at a close only. Bytes that were stored under a lock are there for the next one
    /// that gets it; older ones must not be written over its bytes.
    pub fn has_stores_to_write(&self, ino: u64, lock: &FileLock) -> bool {
        (lock.kind != LockKind::Unlock || self.table.has_owner(ino, lock.owner())) && self.open_nodes.has_pages(ino)
    }

    /// A process closed a descriptor of the file: it loses all of its locks of the file.
    pub fn release_process_locks(&self, handle: HandleRef, owner: u64) {
        let HandleRef { ino, fh } = handle;
        if self.table.is_empty() {
            return;
        }
        self.table.note_closing(ino, fh, true);
        let range = LockRange { start: 0, end: LAST_BYTE };
        let lock = FileLock { family: LockFamily::Posix, owner, range, kind: LockKind::Unlock };
        let carrier = self.table.begin_call(ino, &lock);
        let mut call = OwnerCall { table: &self.table, ino, owner: lock.owner(), set: None };
        let Some((carrier, file)) =
            carrier.and_then(|carrier| Some((carrier.fh, self.open_nodes.files.get(carrier.fh)?)))
        else {
            return;
        };
        if let Err(error) =
            self.names.as_caller(&FsCaller::default(), false, |caller| file.file.set_lock(&lock, caller))
        {
            tracing::debug!(ino, "a lock is released with its file: {error}");
        }
        self.names.follow_identity(&file);
        call.set = Some((KnownLock { lock, pid: 0 }, carrier));
    }

    /// Continues with a lock of the process before; false if its file is not open.
    pub fn adopt_lock(&self, slot: RecordSlot, kept: &KeptLock, mount: &KeptMount) -> bool {
        let Some(file) = self.open_nodes.files.get(kept.fh) else { return false };
        self.table.adopt(slot, kept);
        // The first of an owner's locks has the descriptor.
        let descriptor = mount.files.take_file(KeptFileKey::Lock { fh: kept.fh, owner: kept.lock.owner });
        file.file.adopt_lock(&kept.lock, descriptor);
        true
    }
}
