//! Locks of files whose source has none: the process of a file keeps its locks in memory. Knows neither pieces nor how locks are
//! reclaimed.
//!
//! 1. **Publication.** What was changed under a lock is published before the lock is released.
//! 2. **Set, comparison, refresh**, as in [`super::path_locks`]. Two open files of this mount can be at two processes, too, so the locks
//!    of this mount are compared when the lock is granted.

use super::{OpenCall, OpenFile, OpenFiles, call_open};
use crate::writes::calls::{CallDeadline, attr_of, settle_answer};
use spurline_proto::WriteCall;
use spurline_types::errno::EAGAIN;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, FileLock, LockKind};

impl OpenFiles {
    /// Sets or removes a lock that the process of the file keeps.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way; `Throttled` while a node that may keep such a lock does not answer; those of a
    /// publication, and then the lock stays, unless the changes are lost.
    pub fn set_group_lock(&self, opened: &OpenFile, lock: &FileLock, caller: &Caller) -> Result<()> {
        self.send_all(&opened.bytes)?;
        let published = if lock.lets_others_in(&opened.locks_of(lock.owner())) { self.publish(opened) } else { Ok(()) };
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
            let attempt = opened.begin_lock();
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
            if opened.note_granted(lock, attempt, &home) {
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

    fn complete_lock(&self, opened: &OpenFile, lock: &FileLock, deadline: CallDeadline) -> Result<()> {
        if self.find_lock_elsewhere(opened, lock, deadline)?.is_some() {
            return Err(Error::new(ErrorKind::Io(EAGAIN), "another mount has the lock, at another node"));
        }
        self.refresh(opened, deadline)
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
}
