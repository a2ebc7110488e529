//! Tables of files that do not keep a file open. Knows nothing of a file.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// Entries of a table, before those of closed files are dropped.
const LEAST_ENTRIES: usize = 64;

/// Open files by their paths or numbers.
pub(crate) struct OpenTable<K, F> {
    pub files: BTreeMap<K, Weak<F>>,
    /// The number of entries at which closed files are dropped.
    sweep_at: usize,
}

impl<K, F> Default for OpenTable<K, F> {
    fn default() -> OpenTable<K, F> {
        OpenTable { files: BTreeMap::new(), sweep_at: LEAST_ENTRIES }
    }
}

impl<K: Ord, F> OpenTable<K, F> {
    pub fn insert(&mut self, key: K, file: &Arc<F>) {
        if self.files.len() >= self.sweep_at {
            self.files.retain(|_, open| open.strong_count() > 0);
            self.sweep_at = LEAST_ENTRIES.max(2 * self.files.len());
        }
        self.files.insert(key, Arc::downgrade(file));
    }

    pub fn all(&self) -> Vec<Arc<F>> {
        self.files.values().filter_map(Weak::upgrade).collect()
    }
}
