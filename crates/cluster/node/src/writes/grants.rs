//! The locks that were granted lately: a mount that lost its lock with another process takes it again only if no other mount
//! has had it since. It knows neither open files nor the source.

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
    /// Notes that `session` got a lock.
    pub fn note_grant(&self, file: FileIdentity, session: u64, lock: &FileLock, now: Instant) {
        let mut table = self.0.lock();
        let (range, writes) = (lock.whole_if_flock(), lock.kind == LockKind::Write);
        let grants = table.files.entry(file).or_default();
        match grants.iter_mut().find(|grants| (grants.session, grants.family) == (session, lock.family)) {
            Some(known) => {
                let (start, end) = (known.range.start.min(range.start), known.range.end.max(range.end));
                (known.range, known.last) = (LockRange { start, end }, now);
                known.writes |= writes;
            }
            None => grants.push(SessionGrants { session, family: lock.family, range, writes, last: now }),
        }
        if table.files.len() > table.most.max(LEAST_FILES) {
            for grants in table.files.values_mut() {
                grants.retain(|grants| now.saturating_duration_since(grants.last) < KEPT);
            }
            table.files.retain(|_, grants| !grants.is_empty());
            table.most = 2 * table.files.len();
        }
    }

    /// Whether another session was granted a lock that excludes this one, after the last grant to `session`.
    pub fn had_another(&self, file: FileIdentity, session: u64, lock: &FileLock, now: Instant) -> bool {
        let table = self.0.lock();
        let Some(grants) = table.files.get(&file) else { return false };
        let of_family = || grants.iter().filter(|grants| grants.family == lock.family);
        let own = of_family().find(|grants| grants.session == session).map(|grants| grants.last);
        let range = lock.whole_if_flock();
        of_family().any(|other| {
            let apart = other.range.end < range.start || range.end < other.range.start;
            let shared = !other.writes && lock.kind == LockKind::Read;
            let lately = now.saturating_duration_since(other.last) < KEPT;
            other.session != session && !apart && !shared && lately && own.is_none_or(|own| own < other.last)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_another_had_is_not_taken_again() {
        let (grants, start) = (LockGrants::default(), Instant::now());
        let file = |inode| FileIdentity { device: 1, inode, born: 0 };
        let lock = |start, end, kind| {
            let range = LockRange { start, end };
            FileLock { family: LockFamily::Posix, owner: 1, range, kind }
        };
        let (write, read) = (lock(0, 9, LockKind::Write), lock(0, 9, LockKind::Read));
        assert!(!grants.had_another(file(1), 1, &write, start));
        grants.note_grant(file(1), 2, &lock(5, 7, LockKind::Read), start);
        assert!(grants.had_another(file(1), 1, &write, start) && !grants.had_another(file(1), 2, &write, start));
        assert!(!grants.had_another(file(1), 1, &read, start), "both can have it");
        assert!(!grants.had_another(file(2), 1, &write, start));
        assert!(!grants.had_another(file(1), 1, &lock(8, 9, LockKind::Write), start), "other bytes");
        assert!(!grants.had_another(file(1), 1, &write, start + KEPT));
        let flock = FileLock { family: LockFamily::Flock, ..write };
        assert!(!grants.had_another(file(1), 1, &flock, start));
        // The session itself had it last.
        let later = start + Duration::from_secs(1);
        grants.note_grant(file(1), 1, &write, later);
        assert!(!grants.had_another(file(1), 1, &write, later));
        for inode in 2..5000 {
            grants.note_grant(file(inode), 1, &write, start + Duration::from_millis(20 * inode));
        }
        assert!(grants.0.lock().files.len() < 2 * LEAST_FILES);
    }
}
