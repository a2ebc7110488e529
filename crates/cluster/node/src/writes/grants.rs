//! The locks that were granted lately, so that a mount that takes its lock again after the loss of another process learns whether
//! another mount has had it since. It knows neither open files nor the source.

use parking_lot::Mutex;
use spurline_volume::writes::{FileIdentity, FileLock, LockFamily, LockKind, LockRange};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Longer than the time within which mounts take locks again (`LOCK_GRACE` of the client), and their requests.
const KEPT: Duration = Duration::from_secs(15);
/// Files, before old grants are forgotten.
const LEAST_FILES: usize = 1024;

/// What one session was granted in one file.
struct SessionGrants {
    session: u64,
    family: LockFamily,
    /// From the first byte to the last.
    range: LockRange,
    writes: bool,
    last: Instant,
    /// The last one that the session did not take again: only the mount knows since when it has had those.
    last_new: Option<Instant>,
}

#[derive(Default)]
struct GrantTable {
    files: HashMap<FileIdentity, Vec<SessionGrants>>,
    most: usize,
}

/// The grants of all sessions.
#[derive(Default)]
pub(crate) struct LockGrants(Mutex<GrantTable>);

impl LockGrants {
    /// Notes that `session` got a lock, or took one again.
    pub fn note_grant(&self, file: FileIdentity, session: u64, lock: &FileLock, again: bool, now: Instant) {
        let mut table = self.0.lock();
        let (range, writes) = (lock.whole_if_flock(), lock.kind == LockKind::Write);
        let grants = table.files.entry(file).or_default();
        let new = (!again).then_some(now);
        match grants.iter_mut().find(|grants| (grants.session, grants.family) == (session, lock.family)) {
            Some(known) => {
                let (start, end) = (known.range.start.min(range.start), known.range.end.max(range.end));
                (known.range, known.last) = (LockRange { start, end }, now);
                known.writes |= writes;
                known.last_new = known.last_new.max(new);
            }
            None => {
                grants.push(SessionGrants { session, family: lock.family, range, writes, last: now, last_new: new });
            }
        }
        if table.files.len() > table.most.max(LEAST_FILES) {
            for grants in table.files.values_mut() {
                grants.retain(|grants| now.saturating_duration_since(grants.last) < KEPT);
            }
            table.files.retain(|_, grants| !grants.is_empty());
            table.most = 2 * table.files.len();
        }
    }

    /// When another session was last granted a lock that excludes this one, if that was after the last new lock of `session`.
    pub fn last_of_others(&self, file: FileIdentity, session: u64, lock: &FileLock, now: Instant) -> Option<Instant> {
        let table = self.0.lock();
        let grants = table.files.get(&file)?;
        let of_family = || grants.iter().filter(|grants| grants.family == lock.family);
        let own = of_family().find(|grants| grants.session == session).and_then(|grants| grants.last_new);
        let range = lock.whole_if_flock();
        let others = of_family().filter(|other| {
            let apart = other.range.end < range.start || range.end < other.range.start;
            let shared = !other.writes && lock.kind == LockKind::Read;
            let lately = now.saturating_duration_since(other.last) < KEPT;
            other.session != session && !apart && !shared && lately && own.is_none_or(|own| own < other.last)
        });
        others.map(|other| other.last).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_of_other_mounts_are_remembered() {
        let (grants, start) = (LockGrants::default(), Instant::now());
        let file = |inode| FileIdentity { device: 1, inode, born: 0 };
        let lock = |start, end, kind| {
            let range = LockRange { start, end };
            FileLock { family: LockFamily::Posix, owner: 1, range, kind }
        };
        let (write, read) = (lock(0, 9, LockKind::Write), lock(0, 9, LockKind::Read));
        let last = |file, session, lock: &FileLock, now| grants.last_of_others(file, session, lock, now);
        assert_eq!(last(file(1), 1, &write, start), None);
        grants.note_grant(file(1), 2, &lock(5, 7, LockKind::Read), false, start);
        assert_eq!([last(file(1), 1, &write, start), last(file(1), 2, &write, start)], [Some(start), None]);
        assert_eq!(last(file(1), 1, &read, start), None, "both can have it");
        assert_eq!(last(file(2), 1, &write, start), None);
        assert_eq!(last(file(1), 1, &lock(8, 9, LockKind::Write), start), None, "other bytes");
        assert_eq!(last(file(1), 1, &write, start + KEPT), None);
        let flock = FileLock { family: LockFamily::Flock, ..write };
        assert_eq!(last(file(1), 1, &flock, start), None);
        // Taking a lock again says nothing about the time before; a new lock is the later one.
        let later = start + Duration::from_secs(1);
        grants.note_grant(file(1), 1, &write, true, later);
        assert_eq!([last(file(1), 1, &write, later), last(file(1), 2, &write, later)], [Some(start), Some(later)]);
        grants.note_grant(file(1), 1, &write, false, later);
        assert_eq!(last(file(1), 1, &write, later), None);
        for inode in 2..5000 {
            grants.note_grant(file(inode), 1, &write, false, start + Duration::from_millis(20 * inode));
        }
        assert!(grants.0.lock().files.len() < 2 * LEAST_FILES);
    }
}
