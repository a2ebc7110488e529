//! The sorted names of directories that are being listed page by page, kept from page to page. It reads no directory.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Directories whose names are kept.
const MOST: usize = 8;
/// Bytes of names kept; those of the directory listed last are kept in any case, as reading them for every page of
/// thousands would take the square of the time.
const BYTES: usize = 32 << 20;
/// Names kept for longer are read again.
const AGE: Duration = Duration::from_secs(60);

/// Names one after the other, sorted.
pub(crate) struct Names {
    taken: Instant,
    bytes: Vec<u8>,
    ends: Vec<u64>,
}

impl Names {
    /// Sorts the names of a directory that were read from the moment `taken` on.
    pub(crate) fn new(taken: Instant, mut names: Vec<Vec<u8>>) -> Self {
        names.sort_unstable();
        let mut all = Names { taken, bytes: Vec::with_capacity(names.iter().map(Vec::len).sum()), ends: Vec::new() };
        for name in &names {
            all.bytes.extend_from_slice(name);
            all.ends.push(all.bytes.len() as u64);
        }
        all
    }

    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, i: usize) -> &[u8] {
        let start = if i == 0 { 0 } else { self.ends[i - 1] as usize };
        &self.bytes[start..self.ends[i] as usize]
    }

    /// The first index whose name comes after `cursor`.
    pub(crate) fn after(&self, cursor: &[u8]) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low + (high - low) / 2;
            if self.get(middle) <= cursor { low = middle + 1 } else { high = middle }
        }
        low
    }
}

/// The directories being listed, the one listed last first.
#[derive(Default)]
pub(crate) struct Snapshots(Mutex<VecDeque<(Vec<u8>, Arc<Names>)>>);

impl Snapshots {
    /// The names of `path`, if they were read not long ago.
    pub(crate) fn of(&self, path: &[u8]) -> Option<Arc<Names>> {
        let mut kept = self.0.lock();
        kept.retain(|(_, names)| names.taken.elapsed() < AGE);
        kept.iter().find(|(at, _)| at == path).map(|(_, names)| Arc::clone(names))
    }

    /// A page of `path` was made of `names`: they are kept if there are `more` pages. Of two listings side by side
    /// both go on with the names that were read later: what appeared since the others were read is not lost again.
    pub(crate) fn listed(&self, path: &[u8], names: Arc<Names>, more: bool) {
        let mut kept = self.0.lock();
        kept.retain(|(_, names)| names.taken.elapsed() < AGE);
        let before = kept.iter().position(|(at, _)| at == path).and_then(|i| kept.remove(i)).map(|(_, names)| names);
        let later = before.filter(|before| before.taken > names.taken);
        if let Some(names) = later.or_else(|| more.then_some(names)) {
            kept.push_front((path.to_vec(), names));
        }
        let mut bytes = 0;
        let fit = kept.iter().take(MOST).take_while(|(_, names)| {
            bytes += names.bytes.len();
            bytes <= BYTES
        });
        let fit = fit.count().max(1);
        kept.truncate(fit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(taken: Instant, names: &[&str]) -> Arc<Names> {
        Arc::new(Names::new(taken, names.iter().map(|name| name.as_bytes().to_vec()).collect()))
    }

    #[test]
    fn the_page_of_an_older_listing_does_not_put_its_names_back() {
        let (snapshots, start) = (Snapshots::default(), Instant::now());
        let (old, new) = (names(start, &["a", "c"]), names(start + Duration::from_millis(1), &["a", "b", "c"]));
        snapshots.listed(b"d", Arc::clone(&old), true);
        // Another listing begins while a page of the first is made.
        snapshots.listed(b"d", Arc::clone(&new), true);
        snapshots.listed(b"d", Arc::clone(&old), true);
        assert!(Arc::ptr_eq(&snapshots.of(b"d").unwrap(), &new));
        // Nor does its end take the other's names away.
        snapshots.listed(b"d", old, false);
        assert!(Arc::ptr_eq(&snapshots.of(b"d").unwrap(), &new));
        snapshots.listed(b"d", new, false);
        assert!(snapshots.of(b"d").is_none());
    }

    #[test]
    fn a_directory_of_any_size_is_kept_while_it_is_listed_and_all_together_are_bounded() {
        let (snapshots, now) = (Snapshots::default(), Instant::now());
        let long = "x".repeat(BYTES / 2 + 1);
        for path in ["a", "b"] {
            snapshots.listed(path.as_bytes(), names(now, &[&long, &long]), true);
            assert_eq!(snapshots.of(path.as_bytes()).unwrap().len(), 2);
        }
        assert!(snapshots.of(b"a").is_none());
        for path in 0..20u8 {
            snapshots.listed(&[path], names(now, &["n"]), true);
        }
        assert_eq!((0..20u8).filter(|path| snapshots.of(&[*path]).is_some()).count(), MOST);
    }

    #[test]
    fn names_are_found_by_what_comes_before_them() {
        let names = names(Instant::now(), &["b", "a", "d"]);
        assert_eq!((names.get(0), names.get(2)), (&b"a"[..], &b"d"[..]));
        assert_eq!([&b""[..], b"a", b"c", b"z"].map(|cursor| names.after(cursor)), [0, 1, 2, 3]);
    }
}
