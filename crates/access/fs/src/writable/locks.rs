//! Locks of open files: which owner has which, through which open file, and requests that wait for one. The source
//! decides who gets a lock; this table spares requests whose answer is known, and wakes waiters of the same mount.

use super::open::OpenNodeFile;
use super::{FsCaller, WritableFileSystem, errno_error};
use crate::errno::{FsError, FsResult};
use parking_lot::{Condvar, Mutex};
use spurline_types::ErrorKind;
use spurline_volume::locks::{KnownLock, KnownLocks, LAST_BYTE, LockOwner};
use spurline_volume::writes::{FileLock, LockConflict, LockFamily, LockKind, LockRange};
use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Pauses between two requests for a lock that a program outside of this mount has. Its release raises no event here.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);
/// Longest sleep of a waiter, which is woken by events.
const WAKE: Duration = Duration::from_secs(1);
/// How long a lock that was requested without a wait waits for the end of a close: the kernel tells of it after close(2)
/// has returned.
const CLOSING: Duration = Duration::from_millis(100);
/// How long a lock that was requested without a wait waits after the loss of a node, for mounts that had it there.
const UNSETTLED: Duration = Duration::from_secs(10);
/// Interruptions that arrived before their request began to wait.
const EARLY_MAX: usize = 256;

/// A lock as a program requests it.
#[derive(Debug, Clone, Copy)]
pub struct LockRequest {
    /// The lock, or the range to unlock.
    pub lock: FileLock,
    /// The process.
    pub pid: u32,
    /// The number of the request, for [`WritableFileSystem::interrupt`].
    pub number: u64,
}

/// What a request for a lock has to do before it waits for other requests.
pub trait BeginWait {
    /// Lets other requests be served meanwhile. Dropping the result ends that.
    ///
    /// # Errors
    /// `ENOLCK` when too many requests wait.
    fn begin_wait(&self) -> FsResult<Box<dyn Any>>;
}

/// The locks of all open files.
#[derive(Default)]
pub(super) struct LockTable {
    state: Mutex<LockTableState>,
    changed: Condvar,
    /// Number of files in the table: a close is a single load while there is none.
    files: AtomicUsize,
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
    /// Owners with a call under way.
    busy: Vec<LockOwner>,
}

/// The open file that an owner's locks go through: the source tells owners apart by it.
struct LockCarrier {
    owner: LockOwner,
    fh: u64,
    /// A descriptor of the file was closed, perhaps the last.
    closing: bool,
}

impl LockTable {
    fn is_empty(&self) -> bool {
        self.files.load(Ordering::Acquire) == 0
    }

    /// Begins a call for an owner, one at a time. Returns the file that its locks go through, if it has any.
    fn begin_call(&self, ino: u64, owner: LockOwner) -> Option<u64> {
        let mut state = self.state.lock();
        loop {
            let node = state.files.entry(ino).or_default();
            if !node.busy.contains(&owner) {
                node.busy.push(owner);
                let carrier = node.carriers.iter().find(|carrier| carrier.owner == owner).map(|carrier| carrier.fh);
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
        node.busy.retain(|busy| *busy != owner);
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

    fn find_conflict(&self, ino: u64, lock: &FileLock) -> Option<LockConflict> {
        self.state.lock().files.get(&ino)?.known.find_conflict(lock)
    }

    /// Whether a lock in the way goes through a file that may be closing.
    fn is_closing(&self, ino: u64, lock: &FileLock) -> bool {
        let state = self.state.lock();
        let Some(node) = state.files.get(&ino) else { return false };
        node.known.find_conflict(lock).is_some() && node.carriers.iter().any(|carrier| carrier.closing)
    }

    /// A descriptor of `fh` was closed.
    fn note_closing(&self, ino: u64, fh: u64) {
        if let Some(node) = self.state.lock().files.get_mut(&ino) {
            node.carriers.iter_mut().filter(|carrier| carrier.fh == fh).for_each(|carrier| carrier.closing = true);
        }
    }

    /// The locks that went through `fh` are gone.
    pub fn remove_handle(&self, ino: u64, fh: u64) {
        if self.is_empty() {
            return;
        }
        let mut state = self.state.lock();
        let Some(node) = state.files.get_mut(&ino) else { return };
        let (gone, kept) = node.carriers.drain(..).partition(|carrier| carrier.fh == fh);
        node.carriers = kept;
        let gone: Vec<LockCarrier> = gone;
        gone.iter().for_each(|carrier| node.known.remove_owner(carrier.owner));
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

fn is_taken(error: &FsError) -> bool {
    error.errno() == libc::EAGAIN
}

/// It can't be known yet: a mount that had the lock in a lost node may take it again.
fn is_unsettled(error: &FsError) -> bool {
    matches!(error, FsError::Volume(error) if error.kind() == ErrorKind::Throttled)
}

impl WritableFileSystem {
    /// Sets or removes a lock; with `wait`, as soon as no other is in the way. `slots`: see [`BeginWait`]. Returns whether the kernel has to drop its
    /// pages of the inode: what others wrote under their lock has to be read now.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way and there is no `wait`; `EINTR` after an interruption; the source's
    /// errno.
    pub fn set_lock(
        &self,
        (ino, fh): (u64, u64),
        request: &LockRequest,
        caller: &FsCaller,
        (slots, wait): (Option<&dyn BeginWait>, bool),
    ) -> FsResult<bool> {
        let file = self.file(ino, fh)?;
        let (mut waiting, mut pause, started) = (None, FIRST_PAUSE, Instant::now());
        loop {
            let seen = self.locks.releases();
            let (answer, known) = self.try_lock((ino, fh), &file, request, caller);
            let taken = match answer {
                Ok(()) => return Ok(request.lock.kind != LockKind::Unlock && self.has_pages(ino)),
                Err(error) if is_taken(&error) || is_unsettled(&error) => error,
                Err(error) => return Err(error),
            };
            let unsettled = is_unsettled(&taken);
            let closing = || started.elapsed() < CLOSING && self.locks.is_closing(ino, &request.lock);
            if waiting.is_none() && (wait || unsettled) {
                waiting = Some(slots.map(BeginWait::begin_wait).transpose()?);
                if wait {
                    self.give_up_flock((ino, fh), &file, request, caller);
                }
            }
            let patient = wait || unsettled && started.elapsed() < UNSETTLED;
            if !patient && !closing() {
                return Err(if unsettled { errno_error(libc::EAGAIN, "a node was lost") } else { taken });
            }
            let longest = if known && wait { WAKE } else { pause };
            self.locks.wait_release(seen, request.number, longest)?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// As in the kernel, a `flock(2)` that waits for another type has given up the old one: two that share a lock and both
    /// want it alone would wait for each other.
    fn give_up_flock(&self, at: (u64, u64), file: &Arc<OpenNodeFile>, request: &LockRequest, caller: &FsCaller) {
        if request.lock.family == LockFamily::Flock {
            let lock = FileLock { kind: LockKind::Unlock, ..request.lock };
            // Without an old lock this does nothing.
            let _ = self.try_lock(at, file, &LockRequest { lock, ..*request }, caller);
        }
    }

    /// One attempt; the second value is true if a lock of this mount is in the way.
    fn try_lock(
        &self,
        (ino, fh): (u64, u64),
        file: &Arc<OpenNodeFile>,
        request: &LockRequest,
        caller: &FsCaller,
    ) -> (FsResult<()>, bool) {
        let lock = &request.lock;
        let carrier = self.locks.begin_call(ino, lock.owner());
        let mut call = OwnerCall { table: &self.locks, ino, owner: lock.owner(), set: None };
        if self.locks.find_conflict(ino, lock).is_some() {
            return (Err(errno_error(libc::EAGAIN, "another program of this mount has the lock")), true);
        }
        if lock.kind == LockKind::Unlock && carrier.is_none() {
            return (Ok(()), false);
        }
        let through = carrier.and_then(|carrier| self.files.get(carrier));
        let (through, fh) = match (through, carrier) {
            (Some(file), Some(carrier)) => (file, carrier),
            _ => (Arc::clone(file), fh),
        };
        let set = self.as_caller(caller, false, |caller| through.file.set_lock(lock, caller));
        if set.is_ok() {
            call.set = Some((KnownLock { lock: *lock, pid: request.pid }, fh));
        }
        (set.map_err(FsError::from), false)
    }

    /// A lock of another owner that is in the way of this one.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn test_lock(&self, (ino, fh): (u64, u64), lock: &FileLock) -> FsResult<Option<LockConflict>> {
        let file = self.file(ino, fh)?;
        let carrier = self.locks.begin_call(ino, lock.owner());
        let _call = OwnerCall { table: &self.locks, ino, owner: lock.owner(), set: None };
        if let Some(conflict) = self.locks.find_conflict(ino, lock) {
            return Ok(Some(conflict));
        }
        let through = carrier.and_then(|carrier| self.files.get(carrier)).unwrap_or(file);
        Ok(through.file.test_lock(lock)?)
    }

    /// Whether the kernel may have pages with bytes that programs stored into a shared map, which have to be written before a lock
    /// is set or given up: it does so by itself at a close only. Bytes that were stored under a lock are there for the next one
    /// that gets it; older ones must not be written over its bytes.
    pub fn has_stores_to_write(&self, ino: u64, lock: &FileLock) -> bool {
        (lock.kind != LockKind::Unlock || self.locks.has_owner(ino, lock.owner())) && self.has_pages(ino)
    }

    /// A process closed a descriptor of the file: it loses all of its locks of the file.
    pub(super) fn release_process_locks(&self, (ino, fh): (u64, u64), owner: u64) {
        if self.locks.is_empty() {
            return;
        }
        self.locks.note_closing(ino, fh);
        let range = LockRange { start: 0, end: LAST_BYTE };
        let lock = FileLock { family: LockFamily::Posix, owner, range, kind: LockKind::Unlock };
        let carrier = self.locks.begin_call(ino, lock.owner());
        let mut call = OwnerCall { table: &self.locks, ino, owner: lock.owner(), set: None };
        let Some((carrier, file)) = carrier.and_then(|carrier| Some((carrier, self.files.get(carrier)?))) else {
            return;
        };
        if let Err(error) = self.as_caller(&FsCaller::default(), false, |caller| file.file.set_lock(&lock, caller)) {
            tracing::debug!(ino, "a lock is released with its file: {error}");
        }
        call.set = Some((KnownLock { lock, pid: 0 }, carrier));
    }

    /// The program that made request `number` got a signal: if it waits for a lock, the wait ends.
    pub fn interrupt(&self, number: u64) {
        self.locks.interrupt(number);
    }

    /// Ends all waits: the kernel takes no more answers.
    pub fn end_waits(&self) {
        self.locks.end_waits();
    }
}
