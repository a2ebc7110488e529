//! Locks of files whose source has none, at the nodes, and the paths of a bucket that a mount opens for locks alone: the mount writes the
//! objects itself. Knows neither bytes nor how locks are reclaimed.
//!
//! 1. **Set.** The process of the file sets a new lock, unless another mount has the lock there.
//! 2. **Comparison** with the locks that other processes keep: as nodes join, are cut off and leave, two mounts can have one path at
//!    two processes. Each sets its lock first and then looks at the other process, so that either finds the other's lock.
//! 3. **Refresh.** The caller reads the object that the last owner of the lock has published.
//!
//! A lock that fails in step 2 or 3 is given back.

use super::{FilePlace, OpenCall, OpenFile, OpenFiles, call_open, query_open, set_call};
use crate::remote::GroupClient;
use crate::writes::calls::{
    CallDeadline, CallTarget, HomeProcess, RequestContext, WriteCalls, is_transient, settle_answer, unexpected,
};
use spurline_proto::{LOCK_TIMES, WriteAnswer, WriteCall};
use spurline_types::errno::EAGAIN;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::kept_client::{HeldFile, KeptClient};
use spurline_volume::locks::LockOwner;
use spurline_volume::path_locks::{KeepPlace, LockedPath, PathLocks};
use spurline_volume::writes::{Caller, FileLock, LockConflict, LockKind, LockRange, NodePath};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Locks with an answer of this age are another mount's at the earliest when as much time again has passed.
const CONFIRMED_FOR: Duration = Duration::from_millis(LOCK_TIMES.grace.as_millis() as u64 / 2);
/// A node that has heard nothing for longer may have closed the path, and have given the lock to another mount.
const GRANTED_FOR: Duration = Duration::from_millis(LOCK_TIMES.locks_idle.as_millis() as u64 / 2);
/// For how long, and how often, a lock is set under a new path while mounts reclaim locks of a lost node.
const FOLLOW_WAIT: Duration = Duration::from_millis(LOCK_TIMES.grace.as_millis() as u64 * 2);
const FOLLOW_PAUSE: Duration = Duration::from_millis(100);

/// The paths of a bucket whose locks nodes keep.
pub struct GroupPathLocks {
    files: Arc<OpenFiles>,
}

impl GroupPathLocks {
    /// With `kept`, this process goes on as the client of processes before.
    ///
    /// # Errors
    /// When a thread can't be started.
    pub(crate) fn connect(client: Arc<GroupClient>, kept: Option<Arc<dyn KeptClient>>) -> Result<Arc<GroupPathLocks>> {
        let calls = Arc::new(WriteCalls::about_paths(Arc::clone(&client), kept));
        let files = OpenFiles::new(client, calls, 0);
        files.start_locks()?;
        Ok(Arc::new(GroupPathLocks { files }))
    }
}

impl PathLocks for GroupPathLocks {
    fn open(&self, path: &[u8]) -> Result<Arc<dyn LockedPath>> {
        Ok(RemotePath::open(&self.files, path, false)?)
    }

    fn reserve(&self, path: &[u8]) -> Result<Arc<dyn LockedPath>> {
        Ok(RemotePath::open(&self.files, path, true)?)
    }

    fn adopt(&self, path: &[u8], held: &HeldFile) -> Arc<dyn LockedPath> {
        let home = self.files.calls.find_process(held);
        RemotePath::new(&self.files, OpenFile::new_path(held.number, path, home), false)
    }

    fn find_conflict(&self, path: &[u8], lock: &FileLock) -> Result<Option<LockConflict>> {
        let calls = &self.files.calls;
        let call = find_path_call(NodePath { path, expected: None }, lock);
        self.files.find_lock_at(&calls.all_nodes(), &call, calls.begin())
    }
}

/// A path that a process of a node has open for this mount.
struct RemotePath {
    files: Arc<OpenFiles>,
    opened: Arc<OpenFile>,
    /// A new name is reserved.
    reserves: AtomicBool,
}

impl RemotePath {
    fn new(files: &Arc<OpenFiles>, opened: OpenFile, reserves: bool) -> Arc<RemotePath> {
        let opened = files.add_open(opened);
        Arc::new(RemotePath { files: Arc::clone(files), opened, reserves: AtomicBool::new(reserves) })
    }

    fn open(files: &Arc<OpenFiles>, path: &[u8], reserves: bool) -> Result<Arc<RemotePath>> {
        let number = files.calls.draw_number();
        let at = NodePath { path, expected: None };
        let call = WriteCall::OpenPath { at, file: number.get(), reserves };
        let root = Caller::default();
        let sent = files.calls.change_at(&number, path, &call, RequestContext::of(&root), files.calls.begin())?;
        Ok(RemotePath::new(files, OpenFile::new_path(number.get(), path, sent.home), reserves))
    }

    /// Sets a lock that the object had under the path before.
    fn set_followed(&self, lock: &FileLock) -> Result<()> {
        let until = Instant::now() + FOLLOW_WAIT;
        loop {
            match self.set(lock, &|| Ok(())) {
                Err(error) if error.kind() == ErrorKind::Throttled && Instant::now() < until => {
                    std::thread::sleep(FOLLOW_PAUSE);
                }
                set => return set,
            }
        }
    }

    /// The locks are another mount's, or may be.
    fn lose_locks(&self, why: &str) {
        let home = self.opened.home();
        self.opened.apply(&self.files, why, |file| file.note_forgotten(&home));
    }
}

impl LockedPath for RemotePath {
    fn set(&self, lock: &FileLock, refresh: &dyn Fn() -> Result<()>) -> Result<()> {
        let RemotePath { files, opened, .. } = self;
        let root = Caller::default();
        let deadline = files.calls.begin();
        loop {
            let attempt = opened.begin_lock();
            let home = files.set_at_process(opened, lock, &root, deadline)?;
            let completed = match files.find_lock_elsewhere(opened, lock, deadline) {
                Ok(Some(_)) => Err(Error::new(ErrorKind::Io(EAGAIN), "another mount has the lock, at another node")),
                Ok(None) => refresh(),
                Err(error) => Err(error),
            };
            if completed.is_err() {
                files.give_back(opened, lock, &root);
                return completed;
            }
            if attempt.sent.elapsed() < GRANTED_FOR && opened.note_granted(lock, attempt, &home) {
                return Ok(());
            }
            files.close_left(opened, &home, deadline);
            if deadline.is_over(Instant::now()) {
                files.give_back(opened, lock, &root);
                return Err(Error::new(
                    ErrorKind::Throttled,
                    "the object could not be read in time that was written under the lock",
                ));
            }
        }
    }

    fn remove(&self, lock: &FileLock) -> Result<()> {
        // Forgotten first: a lock that is lost needs no node to be given up.
        self.opened.forget_lock(&self.files, lock);
        self.files.set_at_process(&self.opened, lock, &Caller::default(), self.files.calls.begin()).map(drop)
    }

    fn has_locks(&self) -> bool {
        self.opened.has_locks()
    }

    fn locks_of(&self, owner: LockOwner) -> Vec<FileLock> {
        self.opened.locks_of(owner)
    }

    fn check(&self) -> Result<()> {
        self.opened.bytes.check_lock_loss()
    }

    fn confirm(&self) -> Result<()> {
        if self.opened.has_locks() && !self.opened.was_confirmed_within(CONFIRMED_FOR) {
            let call = WriteCall::StatOpen { file: self.opened.number() };
            query_open(&self.files, &self.opened, call, &Caller::default())?;
        }
        self.check()
    }

    fn follow(&self, path: &[u8]) -> Result<Arc<dyn LockedPath>> {
        let next = RemotePath::open(&self.files, path, false).inspect_err(|error| {
            self.lose_locks(&format!("the file was renamed, and no node has the new name: {error}"))
        })?;
        let locks = self.opened.all_locks();
        let set = self.check().and_then(|()| locks.iter().try_for_each(|lock| next.set_followed(lock)));
        if let Err(error) = set {
            locks.iter().for_each(|lock| next.opened.adopt_lock(lock));
            next.lose_locks(&format!("the file was renamed, and can't be locked under the new name: {error}"));
        }
        Ok(next)
    }

    fn adopt_lock(&self, lock: &FileLock) {
        self.opened.adopt_lock(lock);
    }

    fn note_published(&self) {
        self.reserves.store(false, Ordering::Relaxed);
    }

    fn keep_place(&self, keep: KeepPlace) {
        // Only the first call has an effect.
        let _ = self.opened.keep.set(keep);
        self.opened.note_held(&self.files);
    }

    fn held(&self) -> HeldFile {
        self.opened.held()
    }
}

impl Drop for RemotePath {
    fn drop(&mut self) {
        if self.reserves.load(Ordering::Relaxed) {
            // The next mount may make the object.
            self.files.close_now(&self.opened);
        } else {
            self.files.close_soon(&self.opened);
        }
    }
}

fn find_path_call<'a>(at: NodePath<'a>, lock: &FileLock) -> WriteCall<'a> {
    WriteCall::FindPathLock { at, family: lock.family, range: lock.whole_if_flock(), kind: lock.kind }
}

impl OpenFile {
    /// A path without bytes.
    fn new_path(number: u64, path: &[u8], home: HomeProcess) -> OpenFile {
        let place = FilePlace { path: path.to_vec(), identity: None };
        OpenFile { is_path: true, ..OpenFile::new_directory(number, place, &Caller::default(), home) }
    }

    /// The call by which another node shows its locks and grants.
    pub(super) fn find_call<'a>(&self, at: NodePath<'a>, lock: &FileLock) -> WriteCall<'a> {
        if self.is_path {
            return find_path_call(at, lock);
        }
        WriteCall::FindGrant { at, family: lock.family, range: lock.whole_if_flock(), kind: lock.kind }
    }
}

impl OpenFiles {
    /// Sets or removes a lock at the process of the file. Returns the process.
    pub(super) fn set_at_process(
        &self,
        opened: &OpenFile,
        lock: &FileLock,
        caller: &Caller,
        deadline: CallDeadline,
    ) -> Result<HomeProcess> {
        let call = set_call(opened.number(), lock);
        let sent = call_open(self, opened, OpenCall::query(&call, caller, deadline))?;
        match settle_answer(sent.answer)? {
            WriteAnswer::Done => Ok(sent.home),
            other => Err(unexpected(&other)),
        }
    }

    /// A lock that another mount has set through another process than that of the file.
    ///
    /// # Errors
    /// As [`OpenFiles::find_lock_at`].
    pub fn find_lock_elsewhere(
        &self,
        opened: &OpenFile,
        lock: &FileLock,
        deadline: CallDeadline,
    ) -> Result<Option<LockConflict>> {
        let path = opened.current_path();
        let home = opened.home();
        let nodes = self.calls.other_nodes(&home, &home);
        self.find_lock_at(&nodes, &opened.find_call(NodePath { path: &path, expected: None }, lock), deadline)
    }

    /// A lock of another mount at one of these nodes, by the call that looks for one.
    ///
    /// # Errors
    /// `Throttled` when a node does not answer that has not been away for long: its mounts may still have their locks, or reclaim
    /// them.
    fn find_lock_at(
        &self,
        nodes: &[Arc<str>],
        call: &WriteCall<'_>,
        deadline: CallDeadline,
    ) -> Result<Option<LockConflict>> {
        let root = Caller::default();
        for node in nodes {
            let answer = self.calls.query(CallTarget::Node(node), call, &root, deadline).map_err(Error::from);
            match answer.and_then(|sent| settle_answer(sent.answer)) {
                Ok(WriteAnswer::Grants(grants)) if grants.held.is_some() => return Ok(grants.held),
                Ok(WriteAnswer::Grants(_)) => {}
                Ok(other) => return Err(unexpected(&other)),
                // The request comes first: a node that can be reached again counts as away until the first answer.
                Err(error) if is_transient(&error) && self.has_been_away(node) => {
                    tracing::debug!("node {node} has been away for long, its locks are lost: {error}");
                }
                Err(error) if is_transient(&error) => {
                    let why = format!("node {node} does not say whether another mount has the lock there: {error}");
                    return Err(Error::new(ErrorKind::Throttled, why));
                }
                // A node that takes no changes keeps no locks.
                Err(error) => tracing::debug!("node {node} keeps no locks: {error}"),
            }
        }
        Ok(None)
    }

    /// Whether a node could still not be reached after the grace period: mounts have lost their locks there.
    fn has_been_away(&self, node: &str) -> bool {
        self.calls.node_away(node).is_some_and(|away| away >= self.lock_grace.new_after())
    }

    /// Has the process take back a lock that was not granted: the locks that the owner had before are there again.
    pub(super) fn give_back(&self, opened: &OpenFile, lock: &FileLock, caller: &Caller) {
        for before in locks_without(&opened.locks_of(lock.owner()), lock) {
            if let Err(error) = self.set_at_process(opened, &before, caller, self.calls.begin()) {
                tracing::debug!("a lock of {} was not given back: {error}", opened.logged_path());
            }
        }
    }
}

/// The requests after which an owner has the locks `kept` again in the range of a lock that was set over them: those first, so that no
/// other owner gets a lock between.
fn locks_without(kept: &[FileLock], set: &FileLock) -> Vec<FileLock> {
    let range = set.whole_if_flock();
    let overlaps = kept.iter().filter(|lock| lock.range.start <= range.end && range.start <= lock.range.end);
    let mut again: Vec<FileLock> = overlaps
        .map(|lock| {
            let start = lock.range.start.max(range.start);
            FileLock { range: LockRange { start, end: lock.range.end.min(range.end) }, ..*lock }
        })
        .collect();
    again.sort_by_key(|lock| lock.range.start);
    let mut free = Vec::new();
    let mut free_from = range.start;
    for lock in &again {
        if free_from < lock.range.start {
            free.push(LockRange { start: free_from, end: lock.range.start - 1 });
        }
        free_from = lock.range.end.saturating_add(1);
    }
    if free_from <= range.end {
        free.push(LockRange { start: free_from, end: range.end });
    }
    again.extend(free.into_iter().map(|range| FileLock { range, kind: LockKind::Unlock, ..*set }));
    again
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_volume::locks::{KnownLock, KnownLocks};
    use spurline_volume::writes::LockFamily;

    fn lock(kind: LockKind, start: u64, end: u64) -> FileLock {
        FileLock { family: LockFamily::Posix, owner: 1, range: LockRange { start, end }, kind }
    }

    #[test]
    fn a_lock_that_is_given_back_leaves_the_locks_before() {
        use LockKind::{Read, Write};
        let befores = [
            vec![],
            vec![lock(Read, 0, 9)],
            vec![lock(Write, 15, 30), lock(Read, 5, 12)],
            vec![lock(Read, 10, 20)],
            vec![lock(Read, 40, 50)],
        ];
        for before in befores {
            let mut known = KnownLocks::default();
            let mut set = |lock: &FileLock| known.set_range(KnownLock { lock: *lock, pid: 0 });
            before.iter().for_each(&mut set);
            let failed = lock(Write, 10, 20);
            set(&failed);
            locks_without(&before, &failed).iter().for_each(&mut set);
            let mut after: Vec<FileLock> = known.iter().map(|known| known.lock).collect();
            after.sort_by_key(|lock| lock.range.start);
            let mut before = before;
            before.sort_by_key(|lock| lock.range.start);
            assert_eq!(after, before);
        }
    }
}
