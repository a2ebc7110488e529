//! The sorted names of directories during their listing, kept between pages. It reads no directory.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Most directories with kept names.
const MOST: usize = 8;
/// Most bytes of names. Those of the last listed directory are kept in any case: reading them for every page would
/// take quadratic time.
const BYTES: usize = 32 << 20;
/// Names kept for longer are read again.
const AGE: Duration = Duration::from_secs(60);

/// Sorted names, stored contiguously.
pub(crate) struct SortedNames {
    taken: Instant,
    bytes: Vec<u8>,
    ends: Vec<u64>,
}

impl SortedNames {
    /// Sorts the names of a directory; reading them started at `taken`.
    pub(crate) fn new(taken: Instant, mut names: Vec<Vec<u8>>) -> Self {
        names.sort_unstable();
        let mut all =
            SortedNames { taken, bytes: Vec::with_capacity(names.iter().map(Vec::len).sum()), ends: Vec::new() };
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

    /// The index of the first name after `cursor`.
    pub(crate) fn index_after(&self, cursor: &[u8]) -> usize {
        let mut low = 0;
        let mut high = self.len();
        while low < high {
            let middle = low + (high - low) / 2;
            if self.get(middle) <= cursor { low = middle + 1 } else { high = middle }
        }
        low
    }
}

/// The directories being listed, the last one first.
#[derive(Default)]
pub(crate) struct ListingSnapshots(Mutex<VecDeque<(Vec<u8>, Arc<SortedNames>)>>);

impl ListingSnapshots {
    /// The names of `path`, if they are recent.
    pub(crate) fn names_of(&self, path: &[u8]) -> Option<Arc<SortedNames>> {
        let mut kept = self.0.lock();
        kept.retain(|(_, names)| names.taken.elapsed() < AGE);
        kept.iter().find(|(at, _)| at == path).map(|(_, names)| Arc::clone(names))
    }

    /// Keeps the names of a page of `path` if there are `more` pages. Of two concurrent listings, both continue with
    /// the names that were read later, so that names which appeared in between are not lost again.
    pub(crate) fn keep_listed(&self, path: &[u8], names: Arc<SortedNames>, more: bool) {
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

    fn names(taken: Instant, names: &[&str]) -> Arc<SortedNames> {
        Arc::new(SortedNames::new(taken, names.iter().map(|name| name.as_bytes().to_vec()).collect()))
    }

    #[test]
    fn the_page_of_an_older_listing_does_not_put_its_names_back() {
        let (snapshots, start) = (ListingSnapshots::default(), Instant::now());
        let (old, new) = (names(start, &["a", "c"]), names(start + Duration::from_millis(1), &["a", "b", "c"]));
        snapshots.keep_listed(b"d", Arc::clone(&old), true);
        // Another listing begins during a page of the first.
        snapshots.keep_listed(b"d", Arc::clone(&new), true);
        snapshots.keep_listed(b"d", Arc::clone(&old), true);
        assert!(Arc::ptr_eq(&snapshots.names_of(b"d").unwrap(), &new));
        // Nor does its end remove the other's names.
        snapshots.keep_listed(b"d", old, false);
        assert!(Arc::ptr_eq(&snapshots.names_of(b"d").unwrap(), &new));
        snapshots.keep_listed(b"d", new, false);
        assert!(snapshots.names_of(b"d").is_none());
    }

    #[test]
    fn a_directory_of_any_size_is_kept_while_it_is_listed_and_all_together_are_bounded() {
        let (snapshots, now) = (ListingSnapshots::default(), Instant::now());
        let long = "x".repeat(BYTES / 2 + 1);
        for path in ["a", "b"] {
            snapshots.keep_listed(path.as_bytes(), names(now, &[&long, &long]), true);
            assert_eq!(snapshots.names_of(path.as_bytes()).unwrap().len(), 2);
        }
        assert!(snapshots.names_of(b"a").is_none());
        for path in 0..20u8 {
            snapshots.keep_listed(&[path], names(now, &["n"]), true);
        }
        assert_eq!((0..20u8).filter(|path| snapshots.names_of(&[*path]).is_some()).count(), MOST);
    }

    #[test]
    fn names_are_found_by_what_comes_before_them() {
        let names = names(Instant::now(), &["b", "a", "d"]);
        assert_eq!((names.get(0), names.get(2)), (&b"a"[..], &b"d"[..]));
        assert_eq!([&b""[..], b"a", b"c", b"z"].map(|cursor| names.index_after(cursor)), [0, 1, 2, 3]);
    }
}
