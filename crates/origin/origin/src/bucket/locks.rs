//! Locks of a bucket's files that mounts have set through this process: a bucket has none. The files are known by their paths, since
//! their objects change. Knows no other process, and waits for nothing.

use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::locks::{KnownLock, KnownLocks, LockOwner};
use spurline_volume::writes::{FileLock, LockConflict, LockKind};
use std::collections::HashMap;
use std::sync::Arc;

/// The locks of a file, by the numbers of the mounts.
type MountLocks = HashMap<u64, KnownLocks>;

/// The locks of all mounts.
#[derive(Default)]
pub(super) struct BucketLocks {
    files: Mutex<HashMap<Vec<u8>, MountLocks>>,
}

impl BucketLocks {
    /// A lock that is in the way of `lock`.
    pub fn find_conflict(&self, path: &[u8], mount: u64, lock: &FileLock) -> Option<LockConflict> {
        find_conflict(self.files.lock().get(path)?, mount, lock)
    }

    /// A lock of another mount that is in the way of `lock`.
    pub fn find_conflict_of_others(&self, path: &[u8], mount: u64, lock: &FileLock) -> Option<LockConflict> {
        find_conflict_of_others(self.files.lock().get(path)?, mount, lock)
    }

    /// Sets or removes a lock. Whether its owner has locks of the file afterwards.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way.
    fn set(&self, path: &[u8], mount: u64, lock: &FileLock) -> Result<bool> {
        let mut files = self.files.lock();
        let mounts = files.entry(path.to_vec()).or_default();
        let conflict = find_conflict(mounts, mount, lock);
        let known = mounts.entry(mount).or_default();
        if conflict.is_none() {
            known.set_range(KnownLock { lock: *lock, pid: 0 });
        }
        let has_locks = known.has_owner(lock.owner());
        drop_empty(&mut files, path);
        match conflict {
            None => Ok(has_locks),
            Some(_) => Err(Error::new(ErrorKind::Io(libc::EAGAIN), "another program has the lock")),
        }
    }

    fn remove_owner(&self, path: &[u8], mount: u64, owner: LockOwner) {
        let mut files = self.files.lock();
        if let Some(known) = files.get_mut(path).and_then(|mounts| mounts.get_mut(&mount)) {
            known.remove_owner(owner);
        }
        drop_empty(&mut files, path);
    }
}

fn find_conflict(mounts: &MountLocks, mount: u64, lock: &FileLock) -> Option<LockConflict> {
    let own = mounts.get(&mount).and_then(|known| known.find_conflict(lock));
    own.or_else(|| find_conflict_of_others(mounts, mount, lock))
}

fn find_conflict_of_others(mounts: &MountLocks, mount: u64, lock: &FileLock) -> Option<LockConflict> {
    mounts.iter().filter(|(other, _)| **other != mount).find_map(|(_, known)| known.find_exclusion(lock))
}

fn drop_empty(files: &mut HashMap<Vec<u8>, MountLocks>, path: &[u8]) {
    let Some(mounts) = files.get_mut(path) else { return };
    mounts.retain(|_, known| !known.is_empty());
    if mounts.is_empty() {
        files.remove(path);
    }
}

/// An owner of locks, and the path of the file when the owner set them.
#[derive(PartialEq, Eq)]
struct CarriedOwner {
    path: Vec<u8>,
    owner: LockOwner,
}

/// The locks that were set through one open file of a mount. They are released when this is dropped.
pub(super) struct CarriedLocks {
    table: Arc<BucketLocks>,
    mount: u64,
    owners: Mutex<Vec<CarriedOwner>>,
}

impl CarriedLocks {
    pub fn new(table: &Arc<BucketLocks>, mount: u64) -> CarriedLocks {
        CarriedLocks { table: Arc::clone(table), mount, owners: Mutex::default() }
    }

    /// A lock of another owner that is in the way.
    pub fn find_conflict(&self, path: &[u8], lock: &FileLock) -> Option<LockConflict> {
        self.table.find_conflict(path, self.mount, lock)
    }

    /// Sets a lock of the file at `path`, or removes a lock.
    ///
    /// # Errors
    /// `EAGAIN` while another lock is in the way.
    pub fn set(&self, path: &[u8], lock: &FileLock) -> Result<()> {
        let owner = lock.owner();
        let mut owners = self.owners.lock();
        if lock.kind != LockKind::Unlock {
            self.table.set(path, self.mount, lock)?;
            let carried = CarriedOwner { path: path.to_vec(), owner };
            if !owners.contains(&carried) {
                owners.push(carried);
            }
            return Ok(());
        }
        // The file may have got another name since.
        owners.retain(|carried| {
            carried.owner != owner || self.table.set(&carried.path, self.mount, lock).is_ok_and(|has_locks| has_locks)
        });
        Ok(())
    }

    /// Releases all of them.
    pub fn release(&self) {
        for carried in self.owners.lock().drain(..) {
            self.table.remove_owner(&carried.path, self.mount, carried.owner);
        }
    }
}

impl Drop for CarriedLocks {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_volume::locks::LAST_BYTE;
    use spurline_volume::writes::{LockFamily, LockRange};

    fn lock(kind: LockKind, start: u64, end: u64) -> FileLock {
        FileLock { family: LockFamily::Posix, owner: 1, range: LockRange { start, end }, kind }
    }

    #[test]
    fn mounts_exclude_each_other_although_their_owners_have_the_same_number() {
        let table = Arc::<BucketLocks>::default();
        let one = CarriedLocks::new(&table, 1);
        let other = CarriedLocks::new(&table, 2);
        let all = lock(LockKind::Write, 0, LAST_BYTE);
        one.set(b"a", &lock(LockKind::Write, 0, 9)).unwrap();
        assert_eq!(other.set(b"a", &all).unwrap_err().kind(), ErrorKind::Io(libc::EAGAIN));
        assert!(other.find_conflict(b"a", &all).is_some() && one.find_conflict(b"a", &all).is_none());
        assert!(table.find_conflict_of_others(b"a", 3, &all).is_some());
        assert!(table.find_conflict_of_others(b"a", 1, &all).is_none());
        other.set(b"b", &all).unwrap();
        other.set(b"a", &lock(LockKind::Write, 10, 19)).unwrap();
        one.set(b"a", &lock(LockKind::Unlock, 0, 4)).unwrap();
        assert!(other.set(b"a", &lock(LockKind::Write, 0, 4)).is_ok());
        assert!(other.set(b"a", &lock(LockKind::Write, 0, 5)).is_err());
        one.release();
        other.set(b"a", &all).unwrap();
        drop(other);
        assert!(table.files.lock().is_empty());
    }

    #[test]
    fn a_lock_is_released_under_the_name_that_it_was_set_under() {
        let table = Arc::<BucketLocks>::default();
        let file = CarriedLocks::new(&table, 1);
        file.set(b"old", &lock(LockKind::Write, 0, 9)).unwrap();
        file.set(b"new", &lock(LockKind::Write, 0, 9)).unwrap();
        file.set(b"new", &lock(LockKind::Unlock, 0, LAST_BYTE)).unwrap();
        assert!(table.files.lock().is_empty() && file.owners.lock().is_empty());
    }
}
