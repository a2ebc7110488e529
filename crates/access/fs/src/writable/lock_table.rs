//! The locks of open files as this mount knows them: which owner has which, through which open file, whose call is under way, and
//! which callers wait for a release. It knows neither the source nor the rules about files that are being closed.

use crate::errno::{FsResult, errno_error};
use crate::kept_records::{KeptLock, KeptRecord, KeptRecords, RecordSlot};
use parking_lot::{Condvar, Mutex};
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use spurline_volume::locks::{KnownLock, KnownLocks, LockOwner};
use spurline_volume::writes::{FileLock, LockConflict, LockFamily, LockKind};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

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
pub(super) struct LockCarrier {
    pub owner: LockOwner,
    pub fh: u64,
    /// A descriptor of the file was closed since the last request for a lock through it: perhaps the last descriptor.
    pub closing: bool,
}

/// A lock of this mount that is in the way of another one.
pub(super) enum KnownConflict {
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
    pub fn is_empty(&self) -> bool {
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
    pub fn begin_call(&self, ino: u64, lock: &FileLock) -> Option<LockCarrier> {
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
    pub fn end_call(&self, ino: u64, owner: LockOwner, set: Option<(KnownLock, u64)>) {
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
    pub fn find_conflict(
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
    pub fn note_closing(&self, ino: u64, fh: u64, closing: bool) {
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

    pub fn has_owner(&self, ino: u64, owner: LockOwner) -> bool {
        !self.is_empty() && self.state.lock().files.get(&ino).is_some_and(|node| node.known.has_owner(owner))
    }

    pub fn releases(&self) -> u64 {
        self.state.lock().releases
    }

    /// Waits until a lock was released since `seen`, for `pause` at most.
    ///
    /// # Errors
    /// `EINTR` for an interrupted request, and when the mount ends.
    pub fn wait_release(&self, seen: u64, request: u64, pause: Duration) -> FsResult<()> {
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

    pub fn interrupt(&self, request: u64) {
        let mut state = self.state.lock();
        if state.interrupted.len() >= EARLY_MAX {
            state.interrupted.pop_front();
        }
        state.interrupted.push_back(request);
        drop(state);
        self.changed.notify_all();
    }

    pub fn end_waits(&self) {
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
pub(super) struct OwnerCall<'a> {
    pub table: &'a LockTable,
    pub ino: u64,
    pub owner: LockOwner,
    pub set: Option<(KnownLock, u64)>,
}

impl Drop for OwnerCall<'_> {
    fn drop(&mut self) {
        self.table.end_call(self.ino, self.owner, self.set);
    }
}
