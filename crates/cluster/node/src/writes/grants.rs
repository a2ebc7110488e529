//! The locks that were granted lately, so that a mount that takes its lock again after the loss of another process learns whether
//! another mount has had it since. A process that has just started grants no new ones: mounts that had locks in the one before it
//! take them again first, and what that one has granted is not known any more. It knows neither open files nor the source.

use parking_lot::Mutex;
use spurline_proto::LOCK_TIMES;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{FileIdentity, FileLock, LockFamily, LockKind, LockRange};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Files, before old grants are forgotten.
const LEAST_FILES: usize = 1024;
/// Grants of a file, before old ones are forgotten and then those of each session count as one.
const MOST_GRANTS: usize = 256;

/// A lock that a session was granted.
#[derive(Clone, Copy)]
struct LockGrant {
    session: u64,
    family: LockFamily,
    /// From the first byte to the last.
    range: LockRange,
    writes: bool,
    at: Instant,
}

impl LockGrant {
    fn is_old(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.at) >= LOCK_TIMES.grants_kept
    }

    fn is_same_lock(&self, other: &LockGrant) -> bool {
        self.session == other.session
            && self.family == other.family
            && self.range == other.range
            && self.writes == other.writes
    }
}

#[derive(Default)]
struct GrantTable {
    files: HashMap<FileIdentity, Vec<LockGrant>>,
    most: usize,
}

/// The grants of all sessions.
pub(crate) struct LockGrants {
    table: Mutex<GrantTable>,
    /// When the process was started; none if that was long ago.
    started_at: Mutex<Option<Instant>>,
}

impl Default for LockGrants {
    /// Those of a process that starts now.
    fn default() -> Self {
        LockGrants { table: Mutex::default(), started_at: Mutex::new(Some(Instant::now())) }
    }
}

impl LockGrants {
    /// Fails for a new lock while mounts may take those again that they had in the process before this one.
    ///
    /// # Errors
    /// `Throttled` until then.
    pub fn check_settled(&self, now: Instant) -> Result<()> {
        if self.up_time(now) < LOCK_TIMES.grace {
            let why = "the node has just started: mounts that had locks there take them again first";
            return Err(Error::new(ErrorKind::Throttled, why));
        }
        Ok(())
    }

    /// How long the process has run.
    pub fn up_time(&self, now: Instant) -> Duration {
        self.started_at.lock().map_or(Duration::MAX, |at| now.saturating_duration_since(at))
    }

    /// As if the process had run for long. For tests.
    pub fn settle(&self) {
        *self.started_at.lock() = None;
    }

    /// Notes that `session` got a lock, or took one again.
    pub fn note_grant(&self, file: FileIdentity, session: u64, lock: &FileLock, now: Instant) {
        let mut table = self.table.lock();
        let range = lock.whole_if_flock();
        let writes = lock.kind == LockKind::Write;
        let new = LockGrant { session, family: lock.family, range, writes, at: now };
        let grants = table.files.entry(file).or_default();
        match grants.iter_mut().find(|grant| grant.is_same_lock(&new)) {
            Some(known) => known.at = now,
            None => {
                if grants.len() >= MOST_GRANTS {
                    grants.retain(|grant| !grant.is_old(now));
                }
                if grants.len() >= MOST_GRANTS {
                    *grants = join_sessions(grants);
                }
                grants.push(new);
            }
        }
        if table.files.len() > table.most.max(LEAST_FILES) {
            for grants in table.files.values_mut() {
                grants.retain(|grant| !grant.is_old(now));
            }
            table.files.retain(|_, grants| !grants.is_empty());
            table.most = 2 * table.files.len();
        }
    }

    /// When another session was last granted a lock that excludes this one.
    pub fn last_of_others(&self, file: FileIdentity, session: u64, lock: &FileLock, now: Instant) -> Option<Instant> {
        let table = self.table.lock();
        let range = lock.whole_if_flock();
        let others = table.files.get(&file)?.iter().filter(|other| {
            let apart = other.range.end < range.start || range.end < other.range.start;
            let shared = !other.writes && lock.kind == LockKind::Read;
            other.session != session && other.family == lock.family && !apart && !shared && !other.is_old(now)
        });
        others.map(|other| other.at).max()
    }
}

/// The grants of each session as one for the whole range: more excludes them than has to, and nothing less.
fn join_sessions(grants: &[LockGrant]) -> Vec<LockGrant> {
    let mut joined: Vec<LockGrant> = Vec::new();
    for grant in grants {
        let Some(known) =
            joined.iter_mut().find(|known| (known.session, known.family) == (grant.session, grant.family))
        else {
            joined.push(*grant);
            continue;
        };
        let start = known.range.start.min(grant.range.start);
        let end = known.range.end.max(grant.range.end);
        known.range = LockRange { start, end };
        known.writes |= grant.writes;
        known.at = known.at.max(grant.at);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_just_started_grants_no_new_locks() {
        let grants = LockGrants::default();
        let settled_at = grants.started_at.lock().unwrap() + LOCK_TIMES.grace;
        assert!(grants.check_settled(settled_at - Duration::from_millis(1)).is_err());
        assert!(grants.check_settled(settled_at).is_ok());
    }

    #[test]
    fn grants_of_other_mounts_are_remembered() {
        let (grants, start) = (LockGrants::default(), Instant::now());
        let file = FileIdentity::from_number;
        let lock = |start, end, kind| {
            let range = LockRange { start, end };
            FileLock { family: LockFamily::Posix, owner: 1, range, kind }
        };
        let (write, read) = (lock(0, 9, LockKind::Write), lock(0, 9, LockKind::Read));
        let last = |file, session, lock: &FileLock, now| grants.last_of_others(file, session, lock, now);
        assert_eq!(last(file(1), 1, &write, start), None);
        grants.note_grant(file(1), 2, &lock(5, 7, LockKind::Read), start);
        assert_eq!([last(file(1), 1, &write, start), last(file(1), 2, &write, start)], [Some(start), None]);
        assert_eq!(last(file(1), 1, &read, start), None, "both can have it");
        assert_eq!(last(file(2), 1, &write, start), None);
        assert_eq!(last(file(1), 1, &lock(8, 9, LockKind::Write), start), None, "other bytes");
        assert_eq!(last(file(1), 1, &write, start + LOCK_TIMES.grants_kept), None);
        let flock = FileLock { family: LockFamily::Flock, ..write };
        assert_eq!(last(file(1), 1, &flock, start), None);
        // Each grant of a session counts for its own range.
        let later = start + Duration::from_secs(1);
        grants.note_grant(file(1), 2, &lock(20, 29, LockKind::Write), later);
        assert_eq!(last(file(1), 1, &lock(10, 19, LockKind::Write), later), None);
        assert_eq!([last(file(1), 1, &write, later), last(file(1), 1, &read, later)], [Some(start), None]);
        // Until there are many.
        for byte in 0..MOST_GRANTS as u64 {
            grants.note_grant(file(1), 2, &lock(100 + 2 * byte, 100 + 2 * byte, LockKind::Write), later);
        }
        assert!(grants.table.lock().files[&file(1)].len() <= MOST_GRANTS);
        assert_eq!(last(file(1), 1, &lock(10, 19, LockKind::Write), later), Some(later));
        for inode in 2..5000 {
            grants.note_grant(file(inode), 1, &write, start + Duration::from_millis(20 * inode));
        }
        assert!(grants.table.lock().files.len() < 2 * LEAST_FILES);
    }
}
