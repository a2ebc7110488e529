//! Locks of files whose source has none: the process of a file keeps its locks in memory. Knows neither pieces nor how locks are
//! reclaimed.
//!
//! 1. **Publication.** What was changed under a lock is published before the lock is released.
//! 2. **Set.** The process of the file sets a new lock, unless another mount has the lock there.
//! 3. **Comparison** with the locks that other processes keep: as nodes join, are cut off and leave, two mounts can have one file at
//!    two processes. Each sets its lock first and then looks at the other process, so that either finds the other's lock.
//!    Two open files of this mount can be at two processes, too, so the locks of this mount are compared when the lock is granted.
//! 4. **Refresh.** The file continues with the object that the last owner of the lock has published.
//!
//! A lock that fails in step 3 or 4 is given back.

use super::{OpenCall, OpenFile, OpenFiles, call_open, set_call};
use crate::writes::calls::{
    CallDeadline, CallEnd, CallTarget, HomeProcess, attr_of, is_transient, settle_answer, unexpected,
};
use spurline_proto::{WriteAnswer, WriteCall};
use spurline_types::errno::EAGAIN;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, FileLock, LockConflict, LockKind, LockRange, NodePath};
use std::time::Instant;

impl OpenFiles {
    /// Sets or removes a lock that the process of the file keeps.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way; `Throttled` while a node that may keep such a lock does not answer; those of a
    /// publication, and then the lock stays, unless the changes are lost.
    pub fn set_group_lock(&self, opened: &OpenFile, lock: &FileLock, caller: &Caller) -> Result<()> {
        self.send_all(&opened.bytes)?;
        let published =
            if lets_others_in(&opened.locks_of(lock.owner()), lock) { self.publish(opened) } else { Ok(()) };
        if published.is_err() && opened.bytes.unpublished.check().is_ok() {
            return published;
        }
        if lock.kind == LockKind::Unlock {
            // Forgotten first: a lock that is lost needs no node to be given up.
            opened.forget_lock(self, lock);
            self.set_at_process(opened, lock, caller, self.calls.begin())?;
            return published;
        }
        let deadline = self.calls.begin();
        loop {
            let begun = Instant::now();
            let home = self.set_at_process(opened, lock, caller, deadline)?;
            if let Err(error) = self.complete_lock(opened, lock, deadline) {
                self.give_back(opened, lock, caller);
                return Err(error);
            }
            let granting = self.granting.lock();
            if self.is_excluded(opened, lock) {
                drop(granting);
                self.give_back(opened, lock, caller);
                return Err(Error::new(
                    ErrorKind::Io(EAGAIN),
                    "another program of this mount has the lock, at another node",
                ));
            }
            if opened.note_granted(lock, begun, &home) {
                return Ok(());
            }
            drop(granting);
            self.close_left(opened, &home, deadline);
        }
    }

    /// Whether another program of this mount has a lock of the file in the way.
    fn is_excluded(&self, opened: &OpenFile, lock: &FileLock) -> bool {
        let path = opened.current_path();
        let other = self.find_open(|open| {
            open.has_locks()
                && open.current_path() == path
                && open.all_locks().iter().any(|held| held.owner() != lock.owner() && held.excludes(lock))
        });
        other.is_some()
    }

    /// Sets or removes a lock at the process of the file. Returns the process.
    fn set_at_process(
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

    fn complete_lock(&self, opened: &OpenFile, lock: &FileLock, deadline: CallDeadline) -> Result<()> {
        if self.find_lock_elsewhere(opened, lock, deadline)?.is_some() {
            return Err(Error::new(ErrorKind::Io(EAGAIN), "another mount has the lock, at another node"));
        }
        self.refresh(opened, deadline)
    }

    /// A lock that another mount has set through another process than that of the file.
    ///
    /// # Errors
    /// `Throttled` when a node does not answer that has not been away for long: its mounts may still have their locks, or reclaim
    /// them.
    pub fn find_lock_elsewhere(
        &self,
        opened: &OpenFile,
        lock: &FileLock,
        deadline: CallDeadline,
    ) -> Result<Option<LockConflict>> {
        let path = opened.current_path();
        let at = NodePath { path: &path, expected: None };
        let call = WriteCall::FindGrant { at, family: lock.family, range: lock.whole_if_flock(), kind: lock.kind };
        let root = Caller::default();
        let home = opened.home();
        for node in self.calls.other_nodes(&home, &home) {
            let answer = self.calls.query(CallTarget::Node(&node), &call, &root, deadline).map_err(|end| match end {
                CallEnd::Failed(error) | CallEnd::Lost { error, .. } => error,
            });
            match answer.and_then(|sent| settle_answer(sent.answer)) {
                Ok(WriteAnswer::Grants(grants)) if grants.held.is_some() => return Ok(grants.held),
                Ok(WriteAnswer::Grants(_)) => {}
                Ok(other) => return Err(unexpected(&other)),
                // The request comes first: a node that can be reached again counts as away until the first answer.
                Err(error) if is_transient(&error) && self.has_been_away(&node) => {
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

    /// Continues with the object that another mount has published, unless this mount has changes.
    fn refresh(&self, opened: &OpenFile, deadline: CallDeadline) -> Result<()> {
        let call = WriteCall::Refresh { file: opened.number() };
        let sent = call_open(self, opened, OpenCall::query(&call, opened.caller(), deadline))?;
        let attr = attr_of(settle_answer(sent.answer)?)?;
        let bytes = &opened.bytes;
        bytes.raise_end(attr.size);
        if !bytes.unpublished.is_changed() {
            bytes.note_size(attr.size);
        }
        self.adopt_identity(bytes, attr.identity);
        Ok(())
    }

    /// Has the process take back a lock that was not granted: the locks that the owner had before are there again.
    fn give_back(&self, opened: &OpenFile, lock: &FileLock, caller: &Caller) {
        for before in locks_without(&opened.locks_of(lock.owner()), lock) {
            if let Err(error) = self.set_at_process(opened, &before, caller, self.calls.begin()) {
                tracing::debug!("a lock of {} was not given back: {error}", opened.logged_path());
            }
        }
    }
}

/// Whether a request ends a lock under which the owner may have written.
fn lets_others_in(kept: &[FileLock], lock: &FileLock) -> bool {
    let range = lock.whole_if_flock();
    let mut written = kept.iter().filter(|kept| kept.kind == LockKind::Write);
    lock.kind != LockKind::Write && written.any(|kept| kept.range.start <= range.end && range.start <= kept.range.end)
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
