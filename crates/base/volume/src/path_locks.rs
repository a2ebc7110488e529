//! The locks and the new names of paths among the mounts of a group, for a writer in a mount whose source has neither. Who keeps these is
//! the business of who implements the traits.

use crate::kept_client::HeldFile;
use crate::locks::LockOwner;
use crate::writes::{FileLock, LockConflict};
use spurline_types::Result;
use std::sync::Arc;
use std::time::Duration;

/// For how long the group knows a name as made. A mount that has reserved a name may trust a look at the store that began within half of
/// this: the look has found the name, or the group knows the name.
pub const MADE_TIME: Duration = Duration::from_secs(1);

/// Gets the place of an open path whenever that has changed.
pub type KeepPlace = Box<dyn Fn(&HeldFile) + Send + Sync>;

/// The paths of a source.
pub trait PathLocks: Send + Sync {
    /// Those of the nodes.
    fn open(&self, path: &[u8]) -> Result<Arc<dyn LockedPath>>;

    /// As [`PathLocks::open`], and reserves the name for an object that this mount makes: until the object is published, or the result
    /// is dropped.
    ///
    /// # Errors
    /// `EEXIST` while another mount has reserved the name, and for [`MADE_TIME`] after a mount has made the object; those of the nodes.
    fn reserve(&self, path: &[u8]) -> Result<Arc<dyn LockedPath>>;

    /// Continues with a path that a process before had open.
    fn adopt(&self, path: &[u8], held: &HeldFile) -> Arc<dyn LockedPath>;

    /// A lock of another mount that is in the way of `lock`.
    ///
    /// # Errors
    /// `Throttled` while a node that may keep such a lock does not answer; those of the nodes.
    fn find_conflict(&self, path: &[u8], lock: &FileLock) -> Result<Option<LockConflict>>;
}

/// A path that is open for locks, until this is dropped.
pub trait LockedPath: Send + Sync {
    /// Sets a lock, and then calls `refresh`, which reads the object that the last owner has published. If that fails, the lock is given
    /// back. `refresh` may be called several times.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way; `Throttled` while a mount may reclaim such a lock after the loss of a node; `EIO` while
    /// a lock is lost; those of `refresh` and of the nodes.
    fn set(&self, lock: &FileLock, refresh: &dyn Fn() -> Result<()>) -> Result<()>;

    /// Removes a lock, also a lost lock.
    fn remove(&self, lock: &FileLock) -> Result<()>;

    /// Whether this mount has a lock, be it lost or not.
    fn has_locks(&self) -> bool;

    /// The locks of an owner.
    fn locks_of(&self, owner: LockOwner) -> Vec<FileLock>;

    /// Fails while a lock is known to be lost: another mount may have had the lock.
    ///
    /// # Errors
    /// `EIO`.
    fn check(&self) -> Result<()>;

    /// As [`LockedPath::check`], with an answer of a node that is not older than another mount's wait for a lost lock.
    ///
    /// # Errors
    /// As [`LockedPath::check`]; those of the nodes.
    fn confirm(&self) -> Result<()>;

    /// The object has another path. The locks are set there, or are lost.
    fn follow(&self, path: &[u8]) -> Result<Arc<dyn LockedPath>>;

    /// Continues with a lock that a process before has set.
    fn adopt_lock(&self, lock: &FileLock);

    /// The object whose name was reserved is published.
    fn note_published(&self);

    /// Has `keep` get the place where the path is open, now and after each move, for the process after this one.
    fn keep_place(&self, keep: KeepPlace);

    /// Where the path is open, for the process after this one.
    fn held(&self) -> HeldFile;
}
