//! Open data files of one disk, kept open up to a bound so that a read opens nothing. Knows names and descriptors,
//! not what is in the files.

use crate::index::IdHash;
use crate::io::OpenFile;
use parking_lot::Mutex;
use spurline_types::ObjectId;
use std::collections::HashMap;
use std::sync::Arc;

/// A data file: the object, and 0 for its one file or 1 + the extent's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileKey {
    /// Whose bytes.
    pub object: ObjectId,
    /// 0, or 1 + the extent's number.
    pub tag: u32,
}

const SHARDS: usize = 16;

struct Slot {
    key: FileKey,
    file: Arc<OpenFile>,
    used: bool,
}

/// CLOCK over open files.
#[derive(Default)]
struct Part {
    at: HashMap<FileKey, usize, IdHash>,
    slots: Vec<Slot>,
    hand: usize,
}

/// The open files of one disk.
pub struct FileCache {
    parts: [Mutex<Part>; SHARDS],
    /// Most files a part keeps.
    bound: usize,
}

impl FileCache {
    /// Keeps at most about `bound` files open.
    pub fn new(bound: usize) -> Self {
        FileCache { parts: std::array::from_fn(|_| Mutex::default()), bound: (bound / SHARDS).max(1) }
    }

    fn part(&self, key: &FileKey) -> &Mutex<Part> {
        &self.parts[(key.object.0 >> 96) as usize % SHARDS]
    }

    /// The open file, if it is kept.
    pub fn get(&self, key: &FileKey) -> Option<Arc<OpenFile>> {
        let mut part = self.part(key).lock();
        let at = *part.at.get(key)?;
        let slot = &mut part.slots[at];
        slot.used = true;
        Some(Arc::clone(&slot.file))
    }

    /// Keeps a file; with `replace` also in the place of another of that name, else the one already kept wins.
    pub fn put(&self, key: FileKey, file: OpenFile, replace: bool) -> Arc<OpenFile> {
        let file = Arc::new(file);
        let mut part = self.part(&key).lock();
        let part = &mut *part;
        if let Some(&at) = part.at.get(&key) {
            if replace {
                part.slots[at].file = Arc::clone(&file);
            }
            return Arc::clone(&part.slots[at].file);
        }
        let slot = Slot { key, file: Arc::clone(&file), used: true };
        if part.slots.len() < self.bound {
            part.at.insert(key, part.slots.len());
            part.slots.push(slot);
            return file;
        }
        while std::mem::take(&mut part.slots[part.hand].used) {
            part.hand = (part.hand + 1) % part.slots.len();
        }
        let old = std::mem::replace(&mut part.slots[part.hand], slot);
        part.at.remove(&old.key);
        part.at.insert(key, part.hand);
        part.hand = (part.hand + 1) % part.slots.len();
        file
    }

    /// Lets go of a file.
    pub fn remove(&self, key: &FileKey) {
        let mut part = self.part(key).lock();
        let part = &mut *part;
        if let Some(at) = part.at.remove(key) {
            part.slots.swap_remove(at);
            if let Some(moved) = part.slots.get(at) {
                part.at.insert(moved.key, at);
            }
            part.hand = if part.slots.is_empty() { 0 } else { part.hand % part.slots.len() };
        }
    }
}

/// How many files one of `disks` may keep open: a quarter of the process's limit between them, at most 16,384 each.
pub fn bound(disks: usize) -> usize {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: `limit` outlives the call.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    (limit.rlim_cur as usize / 4 / disks.max(1)).clamp(SHARDS, 16_384)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_and_consistent() {
        let cache = FileCache::new(SHARDS * 4);
        let key = |n: u32| FileKey { object: ObjectId(5), tag: n };
        let open = || OpenFile { file: std::fs::File::open("/dev/null").unwrap(), direct: false };
        for n in 0..50 {
            cache.put(key(n), open(), false);
        }
        let kept = (0..50).filter(|n| cache.get(&key(*n)).is_some()).count();
        assert_eq!(kept, 4);
        let first = cache.put(key(100), open(), false);
        assert!(Arc::ptr_eq(&first, &cache.put(key(100), open(), false)));
        assert!(!Arc::ptr_eq(&first, &cache.put(key(100), open(), true)));
        for n in 0..101 {
            cache.remove(&key(n));
        }
        assert!((0..101).all(|n| cache.get(&key(n)).is_none()));
        cache.put(key(1), open(), false);
        assert!(cache.get(&key(1)).is_some());
    }
}
