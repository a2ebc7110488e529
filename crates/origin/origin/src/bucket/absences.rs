//! The names that lookups did not find a moment ago: the kernel looks up a name before it creates a file, and the creation needs not
//! ask the store again. A new file is published under the condition that its name leads to no object, so a wrong memory
//! overwrites nothing.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// For how long an absence is remembered: far longer than the time between the kernel's two requests.
const ABSENCE_AGE: Duration = Duration::from_secs(1);
/// Limit of the names.
const ABSENCES_MAX: usize = 4096;

#[derive(Default)]
pub(super) struct RecentAbsences {
    names: Mutex<HashMap<Vec<u8>, Instant>>,
}

impl RecentAbsences {
    pub fn note(&self, path: Vec<u8>) {
        let now = Instant::now();
        let mut names = self.names.lock();
        if names.len() >= ABSENCES_MAX {
            names.retain(|_, since| now < *since + ABSENCE_AGE);
        }
        if names.len() < ABSENCES_MAX {
            names.insert(path, now);
        }
    }

    /// Forgets all: names change.
    pub fn clear(&self) {
        self.names.lock().clear();
    }

    /// Whether a lookup did not find the name a moment ago; it counts once.
    pub fn take(&self, path: &[u8]) -> bool {
        self.names.lock().remove(path).is_some_and(|since| since.elapsed() < ABSENCE_AGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absence_counts_once_and_for_a_moment() {
        let absences = RecentAbsences::default();
        absences.note(b"a".to_vec());
        assert!(!absences.take(b"b") && absences.take(b"a") && !absences.take(b"a"));
        absences.note(b"a".to_vec());
        absences.clear();
        assert!(!absences.take(b"a"));
        let old = Instant::now().checked_sub(ABSENCE_AGE).unwrap();
        absences.names.lock().extend((0..ABSENCES_MAX).map(|n| (n.to_string().into_bytes(), old)));
        assert!(!absences.take(b"7"));
        absences.note(b"new".to_vec());
        assert!(absences.take(b"new"), "old names make room");
    }
}
