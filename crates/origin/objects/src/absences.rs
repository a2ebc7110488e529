//! The names that lookups did not find a moment ago: the kernel looks up a name before it creates a file, and the creation needs not
//! ask the store again. A new file is published under the condition that its name leads to no object, so a wrong memory
//! overwrites nothing.

use crate::made_folders::MadeFolders;
use parking_lot::Mutex;
use spurline_volume::path_locks::MADE_TIME;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For how long an absence is remembered: far longer than the time between the kernel's two requests.
pub(crate) const ABSENCE_AGE: Duration = Duration::from_secs(1);
/// The same for an exclusive creation: a program may know that another program has made the object since the lookup.
pub(crate) const EXCLUSIVE_ABSENCE_AGE: Duration = Duration::from_millis(10);
/// The same where the group has reserved the name.
pub(crate) const RESERVED_ABSENCE_AGE: Duration = MADE_TIME.checked_div(2).unwrap();
/// Limit of the names.
const ABSENCES_MAX: usize = 4096;
/// Groups of names, each with a number that changes with every publication.
const NAME_GROUPS: usize = 1024;

/// The names that were absent, for all mounts.
pub(crate) struct RecentAbsences {
    names: Mutex<HashMap<Vec<u8>, Instant>>,
    publications: Box<[AtomicU64]>,
    hasher: RandomState,
    /// The folders whose listings exclude names.
    pub folders: MadeFolders,
}

/// The publications of a name's group when a lookup began.
#[derive(Clone, Copy)]
pub(crate) struct LookupStart(u64);

impl RecentAbsences {
    /// No names. `listings_exclude_for`: how long listings of folders exclude names.
    pub fn new(listings_exclude_for: Duration) -> RecentAbsences {
        let publications = (0..NAME_GROUPS).map(|_| AtomicU64::new(0)).collect();
        let folders = MadeFolders::new(listings_exclude_for);
        RecentAbsences { names: Mutex::default(), publications, hasher: RandomState::new(), folders }
    }

    fn publications_of(&self, path: &[u8]) -> &AtomicU64 {
        let group = self.hasher.hash_one(path) as usize % NAME_GROUPS;
        &self.publications[group]
    }

    /// A lookup of the name begins.
    pub fn begin_lookup(&self, path: &[u8]) -> LookupStart {
        LookupStart(self.publications_of(path).load(Ordering::SeqCst))
    }

    /// Whether this process may have published the name since the lookup began; names share their numbers with some others.
    pub fn has_publications_since(&self, path: &[u8], start: LookupStart) -> bool {
        self.begin_lookup(path).0 != start.0
    }

    /// The lookup has not found the name, which was absent at `now`. What this process has published since is not absent.
    pub fn note(&self, path: Vec<u8>, start: LookupStart, now: Instant) {
        let mut names = self.names.lock();
        if self.has_publications_since(&path, start) {
            return;
        }
        if names.len() >= ABSENCES_MAX {
            names.retain(|_, since| now < *since + ABSENCE_AGE);
        }
        if names.len() < ABSENCES_MAX {
            names.insert(path, now);
        }
    }

    /// The name is published.
    pub fn note_published(&self, path: &[u8]) {
        self.publications_of(path).fetch_add(1, Ordering::SeqCst);
        self.names.lock().remove(path);
        self.folders.note_published(path);
    }

    /// Forgets all, also what lookups that are under way find: names appear.
    pub fn clear(&self) {
        for group in &self.publications {
            group.fetch_add(1, Ordering::SeqCst);
        }
        self.names.lock().clear();
        self.folders.forget_listings();
    }

    /// Whether a lookup within `age` did not find the name; it counts once.
    pub fn take(&self, path: &[u8], age: Duration) -> bool {
        self.names.lock().remove(path).is_some_and(|since| since.elapsed() < age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absence_counts_once_and_for_a_moment() {
        let absences = RecentAbsences::new(Duration::ZERO);
        let note = |name: &[u8]| absences.note(name.to_vec(), absences.begin_lookup(name), Instant::now());
        note(b"a");
        assert!(
            !absences.take(b"b", ABSENCE_AGE) && absences.take(b"a", ABSENCE_AGE) && !absences.take(b"a", ABSENCE_AGE)
        );
        note(b"a");
        absences.clear();
        assert!(!absences.take(b"a", ABSENCE_AGE));
        let long_ago = Instant::now().checked_sub(ABSENCE_AGE).unwrap();
        absences.names.lock().extend((0..ABSENCES_MAX).map(|n| (n.to_string().into_bytes(), long_ago)));
        assert!(!absences.take(b"7", ABSENCE_AGE));
        note(b"new");
        assert!(absences.take(b"new", ABSENCE_AGE), "old names make room");
        let before = Instant::now().checked_sub(EXCLUSIVE_ABSENCE_AGE).unwrap();
        absences.names.lock().extend([(b"e".to_vec(), before), (b"f".to_vec(), before)]);
        assert!(!absences.take(b"e", EXCLUSIVE_ABSENCE_AGE) && absences.take(b"f", ABSENCE_AGE));
    }

    #[test]
    fn a_published_name_is_not_absent() {
        let absences = RecentAbsences::new(Duration::ZERO);
        let start = absences.begin_lookup(b"a");
        absences.note(b"a".to_vec(), start, Instant::now());
        absences.note_published(b"a");
        assert!(!absences.take(b"a", ABSENCE_AGE));
        absences.note(b"a".to_vec(), start, Instant::now());
        assert!(!absences.take(b"a", ABSENCE_AGE), "the lookup began before the publication");
    }
}
