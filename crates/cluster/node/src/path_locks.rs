//! Locks of objects, and names of new objects, of the mounts that write a bucket themselves: a bucket has none. Objects are known by their
//! paths, since a change makes another object. Knows no other node, and waits for nothing.
//!
//! | a name of a new object | until |
//! |---|---|
//! | is reserved for a mount that makes the object with `O_EXCL` | the mount closes the path, or its session ends |
//! | | this node has sent a request that has made the object: the name is made |
//! | is made, reserved or not | this node sends a request that removes the object |
//! | | [`MADE_TIME`] has passed: no mount trusts an earlier look at the store |
//!
//! | a reservation of a name that | by the same mount | by another mount |
//! |---|---|---|
//! | nothing is known of | succeeds | succeeds |
//! | is reserved | succeeds | fails |
//! | is made | succeeds if this mount had reserved the name | fails |

use parking_lot::Mutex;
use spurline_types::errno::{EAGAIN, EEXIST};
use spurline_types::{Error, ErrorKind, ObjectId, Result};
use spurline_volume::locks::{KnownLock, KnownLocks, LockOwner};
use spurline_volume::path_locks::MADE_TIME;
use spurline_volume::writes::{FileIdentity, FileLock, LockConflict};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

type VolumePath = (u32, Vec<u8>);

/// The locks of a path, by the sessions of the mounts.
type MountLocks = HashMap<u64, KnownLocks>;

/// The open path of a mount that a new name is reserved for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PathOwner {
    /// The session of the mount.
    pub session: u64,
    /// The number that the mount gave to the open path.
    pub file: u64,
}

/// A new name.
struct NewName {
    /// `None` for an object that was made without a reservation.
    owner: Option<PathOwner>,
    /// When the object was made.
    made_at: Option<Instant>,
}

#[derive(Default)]
struct NewNames {
    by_path: HashMap<VolumePath, NewName>,
    /// Names that were made, the oldest first.
    made: VecDeque<(Instant, VolumePath)>,
}

impl NewNames {
    /// Forgets names that were made long ago.
    fn prune(&mut self, now: Instant) {
        while let Some((made_at, path)) = self.made.pop_front_if(|(made_at, _)| *made_at + MADE_TIME <= now) {
            if self.by_path.get(&path).is_some_and(|name| name.made_at == Some(made_at)) {
                self.by_path.remove(&path);
            }
        }
    }
}

/// The locks and the new names of all mounts.
#[derive(Default)]
pub(crate) struct PathLocks {
    locks: Mutex<HashMap<VolumePath, MountLocks>>,
    names: Mutex<NewNames>,
}

/// The identity by which grants of a path are remembered.
pub(crate) fn lock_identity(volume: u32, path: &[u8]) -> FileIdentity {
    let mut bytes = [0; FileIdentity::LEN];
    let hash = ObjectId::from_text("path", path, "").0.to_le_bytes();
    bytes[..hash.len()].copy_from_slice(&hash);
    bytes[hash.len()..][..size_of::<u32>()].copy_from_slice(&volume.to_le_bytes());
    FileIdentity::new(bytes, false)
}

impl PathLocks {
    /// A lock of another mount that is in the way of `lock`.
    pub fn find_conflict_of_others(
        &self,
        volume: u32,
        path: &[u8],
        session: u64,
        lock: &FileLock,
    ) -> Option<LockConflict> {
        find_conflict_of_others(self.locks.lock().get(&(volume, path.to_vec()))?, session, lock)
    }

    /// A mount has made the object of this path.
    pub fn note_made(&self, volume: u32, path: &[u8], now: Instant) {
        let mut names = self.names.lock();
        names.prune(now);
        let at = (volume, path.to_vec());
        names.by_path.entry(at.clone()).or_insert(NewName { owner: None, made_at: None }).made_at = Some(now);
        names.made.push_back((now, at));
    }

    /// A mount removes the object of this path.
    pub fn note_removed(&self, volume: u32, path: &[u8]) {
        let mut names = self.names.lock();
        let at = (volume, path.to_vec());
        if names.by_path.get(&at).is_some_and(|name| name.made_at.is_some()) {
            names.by_path.remove(&at);
        }
    }

    /// Sets or removes a lock. Whether its owner has locks of the path afterwards.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way.
    fn set(&self, at: &VolumePath, session: u64, lock: &FileLock) -> Result<bool> {
        let mut locks = self.locks.lock();
        let mounts = locks.entry(at.clone()).or_default();
        let own = mounts.get(&session).and_then(|known| known.find_conflict(lock));
        let is_free = own.or_else(|| find_conflict_of_others(mounts, session, lock)).is_none();
        let known = mounts.entry(session).or_default();
        if is_free {
            known.set_range(KnownLock { lock: *lock, pid: 0 });
        }
        let has_locks = known.has_owner(lock.owner());
        drop_empty(&mut locks, at);
        if is_free {
            return Ok(has_locks);
        }
        Err(Error::new(ErrorKind::Io(EAGAIN), "another program has the lock"))
    }

    fn remove_owner(&self, at: &VolumePath, session: u64, owner: LockOwner) {
        let mut locks = self.locks.lock();
        if let Some(known) = locks.get_mut(at).and_then(|mounts| mounts.get_mut(&session)) {
            known.remove_owner(owner);
        }
        drop_empty(&mut locks, at);
    }

    /// # Errors
    /// `EEXIST` while another mount has the name, or if the object was just made.
    fn reserve_name(&self, at: &VolumePath, owner: PathOwner, now: Instant) -> Result<()> {
        let mut names = self.names.lock();
        names.prune(now);
        let known = names.by_path.entry(at.clone()).or_insert(NewName { owner: Some(owner), made_at: None });
        if known.owner.is_none_or(|known| known.session != owner.session) {
            let why = if known.made_at.is_some() { "was just made" } else { "is being made by another mount" };
            return Err(Error::new(ErrorKind::Io(EEXIST), format!("the file {why}")));
        }
        // The mount excludes its own programs.
        if known.made_at.take().is_some() {
            known.owner = Some(owner);
        }
        Ok(())
    }

    fn release_name(&self, at: &VolumePath, owner: PathOwner) {
        let mut names = self.names.lock();
        if names.by_path.get(at).is_some_and(|name| name.owner == Some(owner) && name.made_at.is_none()) {
            names.by_path.remove(at);
        }
    }
}

fn find_conflict_of_others(mounts: &MountLocks, session: u64, lock: &FileLock) -> Option<LockConflict> {
    mounts.iter().filter(|(other, _)| **other != session).find_map(|(_, known)| known.find_exclusion(lock))
}

fn drop_empty(locks: &mut HashMap<VolumePath, MountLocks>, at: &VolumePath) {
    let Some(mounts) = locks.get_mut(at) else { return };
    mounts.retain(|_, known| !known.is_empty());
    if mounts.is_empty() {
        locks.remove(at);
    }
}

/// A path that a mount has open: the locks and the reserved name end with this.
pub(crate) struct OpenPath {
    table: Arc<PathLocks>,
    at: VolumePath,
    owner: PathOwner,
    lock_owners: Mutex<Vec<LockOwner>>,
}

impl OpenPath {
    /// Opens a path; with `reserves`, as the only mount that makes the object.
    ///
    /// # Errors
    /// `EEXIST` while another mount has reserved the name.
    pub fn open(
        table: &Arc<PathLocks>,
        volume: u32,
        path: &[u8],
        owner: PathOwner,
        reserves: bool,
    ) -> Result<OpenPath> {
        let at = (volume, path.to_vec());
        if reserves {
            table.reserve_name(&at, owner, Instant::now())?;
        }
        Ok(OpenPath { table: Arc::clone(table), at, owner, lock_owners: Mutex::default() })
    }

    /// As [`lock_identity`].
    pub fn lock_identity(&self) -> FileIdentity {
        lock_identity(self.at.0, &self.at.1)
    }

    /// Sets or removes a lock.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way.
    pub fn set(&self, lock: &FileLock) -> Result<()> {
        let owner = lock.owner();
        let mut owners = self.lock_owners.lock();
        let has_locks = self.table.set(&self.at, self.owner.session, lock)?;
        owners.retain(|known| *known != owner);
        if has_locks {
            owners.push(owner);
        }
        Ok(())
    }

    /// Releases the locks and the name.
    pub fn release(&self) {
        for owner in self.lock_owners.lock().drain(..) {
            self.table.remove_owner(&self.at, self.owner.session, owner);
        }
        self.table.release_name(&self.at, self.owner);
    }
}

impl Drop for OpenPath {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_volume::locks::LAST_BYTE;
    use spurline_volume::writes::{LockFamily, LockKind, LockRange};
    use std::time::Duration;

    fn lock(kind: LockKind, start: u64, end: u64) -> FileLock {
        FileLock { family: LockFamily::Posix, owner: 1, range: LockRange { start, end }, kind }
    }

    fn open(table: &Arc<PathLocks>, session: u64, path: &[u8], reserves: bool) -> Result<OpenPath> {
        OpenPath::open(table, 7, path, PathOwner { session, file: session + 100 }, reserves)
    }

    #[test]
    fn mounts_exclude_each_other_although_their_owners_have_the_same_number() {
        let table = Arc::<PathLocks>::default();
        let one = open(&table, 1, b"a", false).unwrap();
        let other = open(&table, 2, b"a", false).unwrap();
        let all = lock(LockKind::Write, 0, LAST_BYTE);
        one.set(&lock(LockKind::Write, 0, 9)).unwrap();
        assert_eq!(other.set(&all).unwrap_err().kind(), ErrorKind::Io(EAGAIN));
        let held = |volume, session| table.find_conflict_of_others(volume, b"a", session, &all).is_some();
        assert!(held(7, 2) && held(7, 3) && !held(7, 1) && !held(8, 2));
        open(&table, 2, b"b", false).unwrap().set(&all).unwrap();
        other.set(&lock(LockKind::Write, 10, 19)).unwrap();
        one.set(&lock(LockKind::Unlock, 0, 4)).unwrap();
        assert!(other.set(&lock(LockKind::Write, 0, 4)).is_ok());
        assert!(other.set(&lock(LockKind::Write, 0, 5)).is_err());
        one.release();
        other.set(&all).unwrap();
        drop(other);
        assert!(table.locks.lock().is_empty());
    }

    #[test]
    fn a_new_name_has_one_mount_until_the_object_is_made_or_given_up() {
        let table = Arc::<PathLocks>::default();
        let one = open(&table, 1, b"a", true).unwrap();
        assert_eq!(open(&table, 2, b"a", true).err().unwrap().kind(), ErrorKind::Io(EEXIST));
        assert!(open(&table, 2, b"a", false).is_ok(), "locks are not reserved");
        drop(one);
        let other = open(&table, 2, b"a", true).unwrap();
        let now = Instant::now();
        table.note_removed(7, b"a");
        table.note_made(8, b"a", now);
        assert!(open(&table, 3, b"b", true).is_ok(), "nothing is known of the name");
        assert!(open(&table, 1, b"a", true).is_err(), "the object is another volume's, and the name is not made");
        // The other mount may have looked before the object was made.
        table.note_made(7, b"a", now);
        drop(other);
        let reserve = |session, at| table.reserve_name(&(7, b"a".to_vec()), PathOwner { session, file: 1 }, at);
        assert_eq!(reserve(1, now).unwrap_err().kind(), ErrorKind::Io(EEXIST));
        assert!(reserve(1, now + MADE_TIME - Duration::from_millis(1)).is_err());
        reserve(1, now + MADE_TIME).unwrap();
        table.note_made(7, b"a", now + MADE_TIME);
        // The mount that has made the name looks itself.
        reserve(1, now + MADE_TIME).unwrap();
        table.note_made(7, b"a", now + MADE_TIME);
        table.note_removed(7, b"a");
        reserve(2, now + MADE_TIME).unwrap();
        // The earlier object does not count for this name.
        assert!(reserve(1, now + 3 * MADE_TIME).is_err());
        table.release_name(&(7, b"a".to_vec()), PathOwner { session: 2, file: 1 });
        table.note_made(7, b"a", now + 3 * MADE_TIME);
        assert!(reserve(1, now + 3 * MADE_TIME).is_err(), "made without a reservation");
        reserve(1, now + 4 * MADE_TIME).unwrap();
        table.release_name(&(7, b"a".to_vec()), PathOwner { session: 1, file: 1 });
        let names = table.names.lock();
        assert!(names.by_path.is_empty() && names.made.is_empty());
    }
}
