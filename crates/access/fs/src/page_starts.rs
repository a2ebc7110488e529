//! Page positions of directories, for handles that start in the middle: an NFS server opens a directory anew for
//! every part of a listing. It lists nothing itself and knows names only as the volume's cursors.

use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Directories with stored positions: those listed at the same time.
const DIRECTORIES: usize = 16;
/// Positions stored per directory. Above this, half of them are dropped evenly: from any position the nearest is some
/// pages away, and pages listed since are all present. A cursor has about 400 bytes, 1700 at most.
const STARTS: usize = 1024;
/// Unused positions expire after this time: an NFS client that continues later waits for a listing from the start.
const AGE: Duration = Duration::from_secs(300);

/// The directories listed most recently, newest first.
#[derive(Default)]
pub struct PageStarts(Mutex<VecDeque<DirectoryStarts>>);

struct DirectoryStarts {
    path: Box<[u8]>,
    used: Duration,
    /// Cursors by position.
    cursors: BTreeMap<u64, Vec<u8>>,
}

impl PageStarts {
    /// Records that the page of `path` from `first` ends at `position`, and that `cursor` continues there.
    pub fn record_page(&self, path: &[u8], first: u64, position: u64, cursor: &[u8], now: Duration) {
        let mut all = self.0.lock();
        let mut directory = take_directory(&mut all, path, now).unwrap_or_else(|| DirectoryStarts {
            path: path.into(),
            used: now,
            cursors: BTreeMap::new(),
        });
        // Positions from an earlier listing with other page lengths would count other names.
        directory.cursors.retain(|at, _| *at <= first || *at >= position);
        directory.cursors.insert(position, cursor.to_vec());
        if directory.cursors.len() > STARTS {
            directory.thin_out();
        }
        all.push_front(directory);
        all.truncate(DIRECTORIES);
    }

    /// The nearest stored position at or before `position`, with its cursor.
    pub fn nearest_before(&self, path: &[u8], position: u64, now: Duration) -> Option<(u64, Vec<u8>)> {
        let mut all = self.0.lock();
        let directory = take_directory(&mut all, path, now)?;
        let start = directory.cursors.range(..=position).next_back().map(|(at, cursor)| (*at, cursor.clone()));
        all.push_front(directory);
        start
    }

    /// Removes `path`: one of its cursors was refused.
    pub fn forget_directory(&self, path: &[u8]) {
        self.0.lock().retain(|directory| &*directory.path != path);
    }
}

impl DirectoryStarts {
    fn thin_out(&mut self) {
        let last = self.cursors.last_key_value().map_or(0, |(position, _)| *position);
        let apart = last / (STARTS as u64 / 2);
        let mut next = 0;
        self.cursors.retain(|position, _| {
            let keep = *position >= next || *position == last;
            if keep {
                next = *position + apart;
            }
            keep
        });
    }
}

/// Removes the directory from the list and marks it as used now.
fn take_directory(all: &mut VecDeque<DirectoryStarts>, path: &[u8], now: Duration) -> Option<DirectoryStarts> {
    all.retain(|directory| now < directory.used + AGE);
    let mut directory = all.iter().position(|directory| &*directory.path == path).and_then(|i| all.remove(i))?;
    directory.used = now;
    Some(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::from_secs(1);

    fn at(starts: &PageStarts, path: &[u8], position: u64) -> Option<u64> {
        starts.nearest_before(path, position, NOW).map(|(at, cursor)| {
            assert_eq!(cursor, at.to_be_bytes());
            at
        })
    }

    #[test]
    fn the_nearest_before_is_found() {
        let starts = PageStarts::default();
        for position in [10, 20, 30u64] {
            starts.record_page(b"d", position - 10, position, &position.to_be_bytes(), NOW);
        }
        assert_eq!([9, 10, 19, 20, 99].map(|p| at(&starts, b"d", p)), [None, Some(10), Some(10), Some(20), Some(30)]);
        assert_eq!(at(&starts, b"e", 99), None);
        // A later listing with a longer page.
        starts.record_page(b"d", 10, 25, &25u64.to_be_bytes(), NOW);
        assert_eq!([24, 25, 30].map(|p| at(&starts, b"d", p)), [Some(10), Some(25), Some(30)]);
        starts.forget_directory(b"d");
        assert_eq!(at(&starts, b"d", 99), None);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let starts = PageStarts::default();
        for position in 1..=100_000u64 {
            starts.record_page(b"large", position - 1, position, &position.to_be_bytes(), NOW);
        }
        assert_eq!((at(&starts, b"large", 1 << 40), at(&starts, b"large", 99_999)), (Some(100_000), Some(99_999)));
        for position in (1..100_000).step_by(777) {
            let near = at(&starts, b"large", position).unwrap();
            assert!(position - near < 1000, "{near} before {position}");
        }
        assert!(starts.0.lock()[0].cursors.len() <= STARTS);
        for i in 0..DIRECTORIES as u64 {
            starts.record_page(&i.to_be_bytes(), 0, 1, &1u64.to_be_bytes(), NOW);
        }
        assert_eq!(at(&starts, b"large", 99_999), None);
        // The one used last stays for as long as that was not long ago.
        assert_eq!(at(&starts, &0u64.to_be_bytes(), 1), Some(1));
        assert!(starts.nearest_before(&1u64.to_be_bytes(), 1, NOW + AGE).is_none());
    }
}
