//! The locks of an open file among the mounts of a group, and the reserved name of a new file. A lock that another mount may have had is
//! lost: the file fails until the lock is released, and changes are dropped, since the other mount may have read the object. Knows no
//! node.

use super::OpenObject;
use super::state::{CHANGES_DROPPED, ObjectEvent};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::locks::LockOwner;
use spurline_volume::path_locks::LockedPath;
use spurline_volume::writes::{FileLock, LockConflict, LockKind};
use std::sync::Arc;

/// The path of a file, while it is open for locks.
#[derive(Default)]
pub(crate) struct ObjectLocks {
    path: Mutex<Option<Arc<dyn LockedPath>>>,
    /// Held while the path is opened.
    opening: Mutex<()>,
}

impl ObjectLocks {
    pub fn get(&self) -> Option<Arc<dyn LockedPath>> {
        self.path.lock().clone()
    }

    /// Whether the owner has locks of the file.
    pub fn has_locks_of(&self, owner: LockOwner) -> bool {
        self.get().is_some_and(|locked| !locked.locks_of(owner).is_empty())
    }

    pub fn set(&self, path: Option<Arc<dyn LockedPath>>) {
        // The earlier one is closed after the lock.
        let _earlier = std::mem::replace(&mut *self.path.lock(), path);
    }
}

impl OpenObject {
    /// Sets or removes a lock; `refresh` reads the object that the last owner has published. Changes are published before other owners
    /// get the lock.
    ///
    /// # Errors
    /// As [`LockedPath::set`]; those of a publication, and then the lock stays, unless the changes are lost for good.
    pub fn set_lock(&self, lock: &FileLock, refresh: &dyn Fn() -> Result<()>) -> Result<()> {
        let locked = match self.locks.get() {
            Some(locked) => locked,
            None if lock.kind == LockKind::Unlock => return Ok(()),
            None => self.open_path()?,
        };
        let lets_others_in = lock.lets_others_in(&locked.locks_of(lock.owner()));
        let published = if lets_others_in { self.publish_changes() } else { Ok(()) };
        if published.is_err() && self.facts.lock().publication().is_ok() {
            return published;
        }
        if lock.kind != LockKind::Unlock {
            return locked.set(lock, refresh);
        }
        locked.remove(lock)?;
        published
    }

    /// Releases a lock whose open file has ended.
    pub fn end_lock(&self, lock: &FileLock) {
        let Some(locked) = self.locks.get() else { return };
        let held = locked.locks_of(lock.owner());
        if held.is_empty() {
            return;
        }
        let published = if lock.lets_others_in(&held) { self.publish_changes() } else { Ok(()) };
        if let Err(error) = locked.remove(lock).and(published) {
            tracing::debug!("a lock of an open file that has ended: {error}");
        }
    }

    /// A lock of another mount that is in the way.
    pub fn find_lock_of_others(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        let locks = self.context.path_locks.get();
        locks.map_or(Ok(None), |locks| locks.find_conflict(&self.path(), lock))
    }

    /// Continues with a lock that a process before has set.
    pub fn adopt_lock(&self, lock: &FileLock) {
        match self.locks.get() {
            Some(locked) => locked.adopt_lock(lock),
            None => {
                tracing::warn!("a lock of '/{}' ended with the process before", String::from_utf8_lossy(&self.path()))
            }
        }
    }

    /// The path for locks, opened at the first lock.
    fn open_path(&self) -> Result<Arc<dyn LockedPath>> {
        let _one = self.locks.opening.lock();
        if let Some(locked) = self.locks.get() {
            return Ok(locked);
        }
        let Some(locks) = self.context.path_locks.get() else {
            return Err(Error::new(ErrorKind::Io(libc::ENOLCK), "a bucket has no locks; the mount keeps its own"));
        };
        let locked = locks.open(&self.path())?;
        self.lock_by(Arc::clone(&locked));
        Ok(locked)
    }

    /// The file has its locks, and a reserved name, by this path.
    pub fn lock_by(&self, locked: Arc<dyn LockedPath>) {
        if let Some(kept) = &self.kept {
            locked.keep_place(kept.place_keeper());
        }
        self.locks.set(Some(locked));
    }

    /// The file has another path: the locks are set there.
    pub(super) fn follow_locks(&self, path: &[u8]) {
        let _one = self.locks.opening.lock();
        let Some(locked) = self.locks.get() else { return };
        if !locked.has_locks() {
            return self.locks.set(None);
        }
        // The locks are lost if that fails.
        match locked.follow(path) {
            Ok(followed) => self.lock_by(followed),
            Err(error) => tracing::warn!("'/{}' has no locks: {error}", String::from_utf8_lossy(path)),
        }
    }

    /// A new file was removed: other mounts may make the name.
    pub(super) fn give_up_name(&self) {
        if self.is_new() {
            self.locks.set(None);
        }
    }

    /// Fails while a lock of the file is known to be lost; changes are dropped then.
    ///
    /// # Errors
    /// `EIO`, for changes that are dropped at every later call.
    pub fn check_locks(&self) -> Result<()> {
        self.facts.lock().state.check_read()?;
        let Some(locked) = self.locks.get() else { return Ok(()) };
        locked.check().inspect_err(|_| {
            if self.has_unpublished() {
                self.drop_changes();
            }
        })
    }

    /// As [`OpenObject::check_locks`], for a write: the refused bytes are missing in all that follows.
    pub fn check_locks_to_write(&self) -> Result<()> {
        self.check_locks().inspect_err(|_| self.drop_changes())
    }

    /// As [`OpenObject::check_locks`], before a publication: by a present answer of a node.
    pub(super) fn confirm_locks(&self) -> Result<()> {
        let Some(locked) = self.locks.get() else { return Ok(()) };
        locked.confirm().map_err(|error| self.check_locks().err().unwrap_or(error))
    }

    fn drop_changes(&self) {
        let mut facts = self.facts.lock();
        if facts.apply(ObjectEvent::LockLost) {
            tracing::warn!("'/{}': {CHANGES_DROPPED}", String::from_utf8_lossy(&facts.path));
        }
    }
}
