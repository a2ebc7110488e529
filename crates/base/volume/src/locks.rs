//! The known locks of a file: byte ranges by owner, replaced, split and merged as `fcntl(2)` does. Calls no source and waits for
//! nothing.

/// The last byte of any file.
pub const LAST_BYTE: u64 = u64::MAX >> 1;

/// A range of bytes for a lock; `end` is included, and [`LAST_BYTE`] is the end of any file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockRange {
    /// First byte.
    pub start: u64,
    /// Last byte.
    pub end: u64,
}

/// The type of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockKind {
    /// Shared.
    Read,
    /// Exclusive.
    Write,
    /// None: unlocks.
    Unlock,
}

/// A lock that is in the way of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LockConflict {
    /// The type.
    pub kind: LockKind,
    /// The range.
    pub range: LockRange,
    /// The process, or 0 where not known.
    pub pid: u32,
}

/// A lock family: `fcntl(2)` locks ranges for an owner, `flock(2)` locks files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LockFamily {
    /// `fcntl(2)`.
    Posix,
    /// `flock(2)`.
    Flock,
}

/// A lock to set or to test, or a range to unlock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileLock {
    /// The family.
    pub family: LockFamily,
    /// The number of the owner: locks of the same owner are never in each other's way.
    pub owner: u64,
    /// The range; of no meaning for `flock(2)`.
    pub range: LockRange,
    /// The type.
    pub kind: LockKind,
}

impl FileLock {
    /// The owner.
    pub fn owner(&self) -> LockOwner {
        LockOwner { family: self.family, number: self.owner }
    }

    /// Whether this lock of another owner is in the way of `wanted`.
    pub fn excludes(&self, wanted: &FileLock) -> bool {
        let range = self.whole_if_flock();
        let wanted_range = wanted.whole_if_flock();
        let apart = range.end < wanted_range.start || wanted_range.end < range.start;
        let shared = self.kind == LockKind::Read && wanted.kind == LockKind::Read;
        let locks = self.kind != LockKind::Unlock && wanted.kind != LockKind::Unlock;
        locks && self.family == wanted.family && !apart && !shared
    }

    /// Whether this request lets other owners see bytes that were written under `held`, the locks of the same owner.
    pub fn lets_others_in(&self, held: &[FileLock]) -> bool {
        let range = self.whole_if_flock();
        let mut written = held.iter().filter(|held| held.kind == LockKind::Write);
        self.kind != LockKind::Write
            && written.any(|held| held.range.start <= range.end && range.start <= held.range.end)
    }

    /// The range, which is the whole file for `flock(2)`.
    pub fn whole_if_flock(&self) -> LockRange {
        match self.family {
            LockFamily::Posix => self.range,
            LockFamily::Flock => LockRange { start: 0, end: LAST_BYTE },
        }
    }
}

/// The owner of locks: a process for `fcntl(2)`, an open file for `flock(2)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LockOwner {
    /// The family of the owner's locks.
    pub family: LockFamily,
    /// The number, unique among the owners of a mount.
    pub number: u64,
}

/// A lock, and the process that set the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownLock {
    /// The lock.
    pub lock: FileLock,
    /// The process, or 0 where not known.
    pub pid: u32,
}

impl KnownLock {
    /// The lock as shown to the owner of another lock.
    pub fn as_conflict(&self) -> LockConflict {
        LockConflict { kind: self.lock.kind, range: self.lock.range, pid: self.pid }
    }
}

/// The known locks of a file.
#[derive(Debug, Default)]
pub struct KnownLocks {
    locks: Vec<KnownLock>,
}

impl KnownLocks {
    /// Applies a lock that was set, or removed: earlier locks of the owner in the range are replaced.
    pub fn set_range(&mut self, new: KnownLock) {
        let range = new.lock.whole_if_flock();
        let mut kept = Vec::with_capacity(self.locks.len() + 2);
        for known in self.locks.drain(..) {
            let old = known.lock.range;
            if known.lock.owner() != new.lock.owner() || old.end < range.start || range.end < old.start {
                kept.push(known);
                continue;
            }
            let mut keep = |range| kept.push(KnownLock { lock: FileLock { range, ..known.lock }, ..known });
            if old.start < range.start {
                keep(LockRange { start: old.start, end: range.start - 1 });
            }
            if old.end > range.end {
                keep(LockRange { start: range.end + 1, end: old.end });
            }
        }
        self.locks = kept;
        if new.lock.kind != LockKind::Unlock {
            self.add_merged(KnownLock { lock: FileLock { range, ..new.lock }, ..new });
        }
    }

    /// Adds a lock, joined with equal neighbours: a program that locks record after record has a single range.
    fn add_merged(&mut self, mut new: KnownLock) {
        self.locks.retain(|known| {
            let own = new.lock.range;
            let range = known.lock.range;
            let equal = known.lock.owner() == new.lock.owner() && known.lock.kind == new.lock.kind;
            let beside = range.end.checked_add(1) == Some(own.start) || own.end.checked_add(1) == Some(range.start);
            if equal && beside {
                new.lock.range = LockRange { start: own.start.min(range.start), end: own.end.max(range.end) };
            }
            !(equal && beside)
        });
        self.locks.push(new);
    }

    /// The locks of other owners that are in the way of `wanted`.
    pub fn conflicts(&self, wanted: FileLock) -> impl Iterator<Item = &KnownLock> {
        self.locks.iter().filter(move |known| known.lock.owner() != wanted.owner() && known.lock.excludes(&wanted))
    }

    /// A lock that is in the way of `wanted`, which is of another mount: its owners have numbers of their own.
    pub fn find_exclusion(&self, wanted: &FileLock) -> Option<LockConflict> {
        self.locks.iter().find(|known| known.lock.excludes(wanted)).map(KnownLock::as_conflict)
    }

    /// A lock of another owner that is in the way of `wanted`.
    pub fn find_conflict(&self, wanted: &FileLock) -> Option<LockConflict> {
        self.conflicts(*wanted).next().map(KnownLock::as_conflict)
    }

    /// Whether this owner has a lock.
    pub fn has_owner(&self, owner: LockOwner) -> bool {
        self.locks.iter().any(|known| known.lock.owner() == owner)
    }

    /// Forgets the locks of an owner.
    pub fn remove_owner(&mut self, owner: LockOwner) {
        self.locks.retain(|known| known.lock.owner() != owner);
    }

    /// All locks.
    pub fn iter(&self) -> impl Iterator<Item = &KnownLock> {
        self.locks.iter()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.locks.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(owner: u64, start: u64, end: u64, kind: LockKind) -> KnownLock {
        let range = LockRange { start, end };
        KnownLock { lock: FileLock { family: LockFamily::Posix, owner, range, kind }, pid: owner as u32 }
    }

    fn ranges(known: &KnownLocks) -> Vec<(u64, u64, u64, LockKind)> {
        let mut all: Vec<_> = known
            .iter()
            .map(|known| (known.lock.owner, known.lock.range.start, known.lock.range.end, known.lock.kind))
            .collect();
        all.sort_by_key(|(owner, start, ..)| (*owner, *start));
        all
    }

    #[test]
    fn ranges_are_replaced_split_and_merged() {
        use LockKind::{Read, Unlock, Write};
        let mut known = KnownLocks::default();
        known.set_range(lock(1, 0, 99, Read));
        known.set_range(lock(1, 10, 19, Write));
        assert_eq!(ranges(&known), [(1, 0, 9, Read), (1, 10, 19, Write), (1, 20, 99, Read)]);
        known.set_range(lock(1, 10, 19, Read));
        assert_eq!(ranges(&known), [(1, 0, 99, Read)]);
        known.set_range(lock(1, 50, LAST_BYTE, Unlock));
        known.set_range(lock(2, 0, 9, Read));
        assert_eq!(ranges(&known), [(1, 0, 49, Read), (2, 0, 9, Read)]);
        known.remove_owner(lock(2, 0, 0, Read).lock.owner());
        known.set_range(lock(1, 0, LAST_BYTE, Unlock));
        assert!(known.is_empty());
    }

    #[test]
    fn only_other_owners_of_the_same_family_are_in_the_way() {
        use LockKind::{Read, Unlock, Write};
        let mut known = KnownLocks::default();
        known.set_range(lock(1, 0, 9, Read));
        let conflict = |owner, start, kind| known.find_conflict(&lock(owner, start, start + 5, kind).lock);
        assert!(conflict(2, 0, Read).is_none() && conflict(1, 0, Write).is_none() && conflict(2, 10, Write).is_none());
        assert_eq!(conflict(2, 9, Write).map(|conflict| conflict.pid), Some(1));
        assert!(conflict(2, 9, Unlock).is_none());
        assert!(known.find_exclusion(&lock(1, 9, 9, Write).lock).is_some(), "an owner of another mount");
        assert!(known.find_exclusion(&lock(1, 9, 9, Read).lock).is_none());
        let flock = FileLock { family: LockFamily::Flock, ..lock(2, 0, 9, Write).lock };
        assert!(known.find_conflict(&flock).is_none());
    }

    /// Against a table with one entry per byte.
    #[test]
    fn ranges_agree_with_bytes() {
        let mut known = KnownLocks::default();
        let mut bytes = [[LockKind::Unlock; 64]; 3];
        let mut seed = 7u64;
        let mut draw = |limit: u64| {
            seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (seed >> 33) % limit
        };
        for _ in 0..5000 {
            let (owner, start, len) = (draw(3), draw(64), draw(64) + 1);
            let end = (start + len - 1).min(63);
            let kind = [LockKind::Read, LockKind::Write, LockKind::Unlock][draw(3) as usize];
            let wanted = lock(owner, start, end, kind);
            let in_the_way = (0..3).filter(|other| *other != owner).any(|other| {
                let row = &bytes[other as usize][start as usize..=end as usize];
                row.iter().any(|held| match kind {
                    LockKind::Unlock => false,
                    LockKind::Read => *held == LockKind::Write,
                    LockKind::Write => *held != LockKind::Unlock,
                })
            });
            assert_eq!(known.find_conflict(&wanted.lock).is_some(), in_the_way);
            if !in_the_way {
                known.set_range(wanted);
                bytes[owner as usize][start as usize..=end as usize].fill(kind);
            }
            for (owner, row) in bytes.iter().enumerate() {
                for (at, held) in row.iter().enumerate() {
                    let found = known.iter().filter(|known| {
                        let range = known.lock.range;
                        known.lock.owner == owner as u64 && (range.start..=range.end).contains(&(at as u64))
                    });
                    let found: Vec<_> = found.map(|known| known.lock.kind).collect();
                    assert_eq!(found, Vec::from_iter(Some(*held).filter(|held| *held != LockKind::Unlock)));
                }
            }
        }
    }
}
