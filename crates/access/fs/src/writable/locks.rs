//! Locks of open files: which owner has which, through which open file, and requests that wait for one. The source
//! decides who gets a lock; this table spares requests whose answer is known, and wakes waiters of the same mount.
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

use super::WritableFileSystem;
use super::open::OpenNodeFile;
use crate::errno::{FsError, FsResult, errno_error};
use crate::kept_records::{KeptLock, KeptRecord, KeptRecords, RecordSlot};
use crate::service::{BeginWait, FsCaller, HandleRef, LockRequest};
use parking_lot::{Condvar, Mutex};
use spurline_types::{ErrorKind, Result};
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use spurline_volume::locks::{KnownLock, KnownLocks, LAST_BYTE, LockOwner};
use spurline_volume::writes::{FileLock, LockConflict, LockFamily, LockKind, LockRange, WritableFile};
use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
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
/// Interruptions that arrived before their request began to wait.
const EARLY_MAX: usize = 256;

/// The locks of all open files.
#[derive(Default)]
pub(super) struct LockTable {
    state: Mutex<LockTableState>,
    changed: Condvar,
    /// Number of files in the table: a close is a single load while there is none.
    files: AtomicUsize,
    /// Where locks are kept for a successor of this process.
    kept: OnceLock<KeptLocks>,
}

struct KeptLocks {
    records: Arc<dyn KeptRecords>,
    files: Arc<dyn KeptFiles>,
}

#[derive(Default)]
struct LockTableState {
    files: HashMap<u64, NodeLocks>,
    /// Counts releases.
    releases: u64,
    interrupted: VecDeque<u64>,
    ended: bool,
}

/// The locks of one inode.
#[derive(Default)]
struct NodeLocks {
    known: KnownLocks,
    carriers: Vec<LockCarrier>,
    /// Locks of which a call is under way.
    busy: Vec<FileLock>,
    /// The records that outlive this process, several of an owner.
    records: Vec<OwnerRecord>,
}

#[derive(Clone, Copy)]
struct OwnerRecord {
    owner: LockOwner,
    record: RecordSlot,
}

/// The open file that an owner's locks go through: the source tells owners apart by it.
#[derive(Clone, Copy)]
struct LockCarrier {
    owner: LockOwner,
    fh: u64,
    /// A descriptor of the file was closed since the last request for a lock through it: perhaps the last descriptor.
    closing: bool,
}

/// A lock of this mount that is in the way of another one.
enum KnownConflict {
    Held(LockConflict),
    /// All such locks go through files that may be closed already; this is one of them.
    Closing(u64, LockConflict),
}

/// The locks that go through one open file, which leave the table when this is dropped.
pub(super) struct HandleLocks {
    table: Arc<LockTable>,
    ino: u64,
    fh: OnceLock<u64>,
}

impl HandleLocks {
    pub fn new(table: &Arc<LockTable>, ino: u64) -> HandleLocks {
        HandleLocks { table: Arc::clone(table), ino, fh: OnceLock::new() }
    }

    /// Sets the number of the open file, before the first request with it.
    pub fn set_handle(&self, fh: u64) {
        let _ = self.fh.set(fh);
    }
}

impl Drop for HandleLocks {
    fn drop(&mut self) {
        if let Some(fh) = self.fh.get() {
            self.table.remove_handle(self.ino, *fh);
        }
    }
}

impl LockTable {
    fn is_empty(&self) -> bool {
        self.files.load(Ordering::Acquire) == 0
    }

    /// Keeps locks from now on. Called before the first request.
    pub fn keep_records(&self, records: &Arc<dyn KeptRecords>, files: &Arc<dyn KeptFiles>) {
        let _ = self.kept.set(KeptLocks { records: Arc::clone(records), files: Arc::clone(files) });
    }

    /// Adds a lock of the process before.
    pub fn adopt(&self, record: RecordSlot, kept: &KeptLock) {
        let mut state = self.state.lock();
        let node = state.files.entry(kept.ino).or_default();
        let owner = kept.lock.owner();
        node.known.set_range(KnownLock { lock: kept.lock, pid: kept.pid });
        node.records.push(OwnerRecord { owner, record });
        if !node.carriers.iter().any(|carrier| carrier.owner == owner) {
            // Whether a descriptor was closed since the last request is not known.
            node.carriers.push(LockCarrier { owner, fh: kept.fh, closing: true });
        }
        self.files.store(state.files.len(), Ordering::Release);
    }

    /// Begins a call about a lock: one of an owner at a time, and one of locks that exclude each other, because two nodes could
    /// grant these. Returns the file that the owner's locks go through, if there is one.
    fn begin_call(&self, ino: u64, lock: &FileLock) -> Option<LockCarrier> {
        let owner = lock.owner();
        let mut state = self.state.lock();
        loop {
            let node = state.files.entry(ino).or_default();
            if !node.busy.iter().any(|busy| busy.owner() == owner || busy.excludes(lock)) {
                node.busy.push(*lock);
                let carrier = node.carriers.iter().find(|carrier| carrier.owner == owner).copied();
                self.files.store(state.files.len(), Ordering::Release);
                return carrier;
            }
            // As long as the source takes.
            self.changed.wait(&mut state);
        }
    }

    /// Ends a call; `set` is the lock that was set or removed through `fh`.
    fn end_call(&self, ino: u64, owner: LockOwner, set: Option<(KnownLock, u64)>) {
        let mut state = self.state.lock();
        let Some(node) = state.files.get_mut(&ino) else { return };
        node.busy.retain(|busy| busy.owner() != owner);
        let mut released = false;
        if let Some((lock, fh)) = set {
            node.known.set_range(lock);
            // A read lock in place of a write lock lets others in, too.
            released = lock.lock.kind != LockKind::Write;
            let carried = node.carriers.iter().any(|carrier| carrier.owner == owner);
            match node.known.has_owner(owner) {
                true if !carried => node.carriers.push(LockCarrier { owner, fh, closing: false }),
                true => {}
                false => node.carriers.retain(|carrier| carrier.owner != owner),
            }
            if let Some(kept) = self.kept.get() {
                kept.keep_owner(ino, fh, owner, node);
            }
        }
        self.finish_change(state, ino, released);
    }

    fn finish_change(&self, mut state: parking_lot::MutexGuard<'_, LockTableState>, ino: u64, released: bool) {
        if state.files.get(&ino).is_some_and(|node| node.known.is_empty() && node.busy.is_empty()) {
            state.files.remove(&ino);
        }
        state.releases += u64::from(released);
        self.files.store(state.files.len(), Ordering::Release);
        drop(state);
        self.changed.notify_all();
    }

    /// A lock of another owner in the way of `lock`. `may_be_closed`: whether that may be so of the file that a lock goes through.
    fn find_conflict(
        &self,
        ino: u64,
        lock: &FileLock,
        may_be_closed: impl Fn(&LockCarrier) -> bool,
    ) -> Option<KnownConflict> {
        let state = self.state.lock();
        let node = state.files.get(&ino)?;
        let mut closing = None;
        for known in node.known.conflicts(*lock) {
            let carrier = node.carriers.iter().find(|carrier| carrier.owner == known.lock.owner());
            match carrier.filter(|carrier| may_be_closed(carrier)) {
                Some(carrier) => closing = Some(KnownConflict::Closing(carrier.fh, known.as_conflict())),
                None => return Some(KnownConflict::Held(known.as_conflict())),
            }
        }
        closing
    }

    /// Notes whether a descriptor of `fh` was closed since the last request for a lock through it.
    fn note_closing(&self, ino: u64, fh: u64, closing: bool) {
        if self.is_empty() {
            return;
        }
        if let Some(node) = self.state.lock().files.get_mut(&ino) {
            node.carriers.iter_mut().filter(|carrier| carrier.fh == fh).for_each(|carrier| carrier.closing = closing);
        }
    }

    /// The locks that went through `fh` are gone.
    fn remove_handle(&self, ino: u64, fh: u64) {
        if self.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        let Some(node) = state.files.get_mut(&ino) else { return };
        let (gone, kept) = node.carriers.drain(..).partition(|carrier| carrier.fh == fh);
        node.carriers = kept;
        let gone: Vec<LockCarrier> = gone;
        gone.iter().for_each(|carrier| node.known.remove_owner(carrier.owner));
        if let Some(kept) = self.kept.get() {
            gone.iter().for_each(|carrier| kept.keep_owner(ino, fh, carrier.owner, node));
        }
        self.finish_change(state, ino, !gone.is_empty());
    }

    fn has_owner(&self, ino: u64, owner: LockOwner) -> bool {
        !self.is_empty() && self.state.lock().files.get(&ino).is_some_and(|node| node.known.has_owner(owner))
    }

    fn releases(&self) -> u64 {
        self.state.lock().releases
    }

    /// Waits until a lock was released since `seen`, for `pause` at most.
    ///
    /// # Errors
    /// `EINTR` for an interrupted request, and when the mount ends.
    fn wait_release(&self, seen: u64, request: u64, pause: Duration) -> FsResult<()> {
        let until = Instant::now() + pause;
        let mut state = self.state.lock();
        loop {
            if let Some(at) = state.interrupted.iter().position(|number| *number == request) {
                state.interrupted.remove(at);
                return Err(errno_error(libc::EINTR, "a signal ended the wait for a lock"));
            }
            if state.ended {
                return Err(errno_error(libc::EINTR, "the mount ended during the wait for a lock"));
            }
            if state.releases != seen || self.changed.wait_until(&mut state, until).timed_out() {
                return Ok(());
            }
        }
    }

    fn interrupt(&self, request: u64) {
        let mut state = self.state.lock();
        if state.interrupted.len() >= EARLY_MAX {
            state.interrupted.pop_front();
        }
        state.interrupted.push_back(request);
        drop(state);
        self.changed.notify_all();
    }

    fn end_waits(&self) {
        self.state.lock().ended = true;
        self.changed.notify_all();
    }
}

impl KeptLocks {
    /// Replaces the records of an owner by those of the locks that the owner has now.
    fn keep_owner(&self, ino: u64, fh: u64, owner: LockOwner, node: &mut NodeLocks) {
        let has_locks = node.known.has_owner(owner);
        let earlier: Vec<OwnerRecord> = node.records.extract_if(.., |record| record.owner == owner).collect();
        for known in node.known.iter().filter(|known| known.lock.owner() == owner) {
            let kept = KeptLock { ino, fh, lock: known.lock, pid: known.pid };
            node.records.push(OwnerRecord { owner, record: self.records.keep(&KeptRecord::Lock(kept)) });
        }
        // Of two records of a range, either is right: the request that has changed the lock comes again.
        earlier.iter().for_each(|earlier| self.records.remove_record(earlier.record));
        if !has_locks && owner.family == LockFamily::Posix {
            self.files.drop_file(KeptFileKey::Lock { fh, owner: owner.number });
        }
    }
}

/// Ends a call for an owner, also when the source's code panics.
struct OwnerCall<'a> {
    table: &'a LockTable,
    ino: u64,
    owner: LockOwner,
    set: Option<(KnownLock, u64)>,
}

impl Drop for OwnerCall<'_> {
    fn drop(&mut self) {
        self.table.end_call(self.ino, self.owner, self.set);
    }
}

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

impl WritableFileSystem {
    /// Sets or removes a lock; with `wait`, as soon as no other is in the way. `slots`: see [`BeginWait`]. Returns whether the kernel has to drop its
    /// pages of the inode: what others wrote under their lock has to be read now.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way and there is no `wait`; `EINTR` after an interruption; the source's
    /// errno.
    pub(super) fn set_lock(
        &self,
        handle: HandleRef,
        request: &LockRequest,
        caller: &FsCaller,
        slots: Option<&dyn BeginWait>,
        wait: bool,
    ) -> FsResult<bool> {
        let HandleRef { ino, fh } = handle;
        let file = self.file(ino, fh)?;
        self.locks.note_closing(ino, fh, false);
        let started = Instant::now();
        let mut waiting = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let seen = self.locks.releases();
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
                        self.leave_cache(ino);
                    }
                    return Ok(is_set && self.has_pages(ino));
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
            self.locks.wait_release(seen, request.number, longest)?;
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
        carrier.closing && !closes_known || !self.files.is_open(carrier.fh)
    }

    /// One attempt. `closes_known`: see [`WritableFileSystem::may_be_closed`].
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
        let own = self.locks.begin_call(ino, lock);
        let mut call = OwnerCall { table: &self.locks, ino, owner: lock.owner(), set: None };
        match self.locks.find_conflict(ino, lock, |carrier| self.may_be_closed(carrier, closes_known)) {
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
        let through = if own.fh == fh { Some(Arc::clone(file)) } else { self.files.get(own.fh) };
        let Some(through) = through else {
            // Its locks go with it.
            return if unlocks { LockAttempt::Done } else { LockAttempt::Closing(own.fh) };
        };
        let set = self.as_caller(caller, false, |caller| through.file.set_lock(lock, caller));
        self.follow_identity(&through);
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
        let Some(life) = self.life.get().filter(|_| lock.family == LockFamily::Posix) else { return };
        if let Some(descriptor) = file.lock_descriptor(lock.owner) {
            life.files.keep_file(KeptFileKey::Lock { fh, owner: lock.owner }, descriptor.as_fd());
        }
    }

    /// A lock of another owner that is in the way of this one. `slots`: see [`BeginWait`].
    ///
    /// # Errors
    /// `BadHandle`; `EINTR` after an interruption of request `number`; the source's errno.
    pub(super) fn test_lock(
        &self,
        handle: HandleRef,
        lock: &FileLock,
        number: u64,
        slots: Option<&dyn BeginWait>,
    ) -> FsResult<Option<LockConflict>> {
        let HandleRef { ino, fh } = handle;
        let file = self.file(ino, fh)?;
        self.locks.note_closing(ino, fh, false);
        let started = Instant::now();
        let mut waiting = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let seen = self.locks.releases();
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
            self.locks.wait_release(seen, number, pause)?;
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
        let own = self.locks.begin_call(ino, &FileLock { kind: LockKind::Unlock, ..*lock });
        let _call = OwnerCall { table: &self.locks, ino, owner: lock.owner(), set: None };
        let conflict = self.locks.find_conflict(ino, lock, |carrier| self.may_be_closed(carrier, closes_known));
        if conflict.is_some() {
            return Ok(conflict);
        }
        let other = own.map(|own| own.fh).filter(|own| *own != fh);
        let through = other.and_then(|other| self.files.get(other));
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
    pub(super) fn has_stores_to_write(&self, ino: u64, lock: &FileLock) -> bool {
        (lock.kind != LockKind::Unlock || self.locks.has_owner(ino, lock.owner())) && self.has_pages(ino)
    }

    /// A process closed a descriptor of the file: it loses all of its locks of the file.
    pub(super) fn release_process_locks(&self, handle: HandleRef, owner: u64) {
        let HandleRef { ino, fh } = handle;
        if self.locks.is_empty() {
            return;
        }
        self.locks.note_closing(ino, fh, true);
        let range = LockRange { start: 0, end: LAST_BYTE };
        let lock = FileLock { family: LockFamily::Posix, owner, range, kind: LockKind::Unlock };
        let carrier = self.locks.begin_call(ino, &lock);
        let mut call = OwnerCall { table: &self.locks, ino, owner: lock.owner(), set: None };
        let Some((carrier, file)) = carrier.and_then(|carrier| Some((carrier.fh, self.files.get(carrier.fh)?))) else {
            return;
        };
        if let Err(error) = self.as_caller(&FsCaller::default(), false, |caller| file.file.set_lock(&lock, caller)) {
            tracing::debug!(ino, "a lock is released with its file: {error}");
        }
        self.follow_identity(&file);
        call.set = Some((KnownLock { lock, pid: 0 }, carrier));
    }

    /// The program that made request `number` got a signal: if it waits for a lock, the wait ends.
    pub(super) fn interrupt(&self, number: u64) {
        self.locks.interrupt(number);
    }

    /// Ends all waits: the kernel takes no more answers.
    pub(super) fn end_waits(&self) {
        self.locks.end_waits();
    }
}
