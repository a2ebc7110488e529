//! The times of a bucket's folders, which stores do not have: that of the folder's marker, else that of the newest object that
//! an answer has shown in the folder. It deliberately sends no request.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::time::SystemTime;

/// Most folders that are remembered, about 150 bytes each.
const FOLDERS_MAX: usize = 1 << 16;

#[derive(Clone, Copy)]
struct FolderTime {
    of_marker: bool,
    time: SystemTime,
}

/// Folders by their keys, which end with a slash; the root of a bucket has the empty key.
#[derive(Default)]
pub struct FolderTimes(Mutex<HashMap<Box<str>, FolderTime>>);

impl FolderTimes {
    /// Notes the objects that were seen in a folder, each with key and time.
    pub fn note<'a>(&self, folder: &str, objects: impl Iterator<Item = (&'a str, SystemTime)>) {
        let seen = objects.map(|(key, time)| FolderTime { of_marker: key == folder, time });
        let Some(newest) = seen.max_by_key(|seen| (seen.of_marker, seen.time)) else { return };
        let mut folders = self.0.lock();
        if folders.len() >= FOLDERS_MAX && !folders.contains_key(folder) {
            folders.clear();
        }
        let known = folders.entry(folder.into()).or_insert(newest);
        // A marker can be written again, and a listing need not show it.
        if newest.of_marker || !known.of_marker && newest.time > known.time {
            *known = newest;
        }
    }

    /// The time of a folder; `None` where no answer had one.
    pub fn find(&self, folder: &str) -> Option<SystemTime> {
        self.0.lock().get(folder).map(|known| known.time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_marker_decides_and_else_the_newest_object() {
        let times = FolderTimes::default();
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let note = |objects: &[(&'static str, u64)]| {
            times.note("a/", objects.iter().map(|(key, seconds)| (*key, at(*seconds))));
            times.find("a/")
        };
        assert_eq!([note(&[]), note(&[("a/x", 5), ("a/y", 7)])], [None, Some(at(7))]);
        assert_eq!([note(&[("a/x", 6)]), note(&[("a/z", 9)])], [Some(at(7)), Some(at(9))]);
        assert_eq!([note(&[("a/", 3), ("a/z", 9)]), note(&[("a/z", 10)])], [Some(at(3)), Some(at(3))]);
        assert_eq!((note(&[("a/", 4)]), times.find("b/")), (Some(at(4)), None));
    }
}
