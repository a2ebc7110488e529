//! The open data files of a disk, up to a bound, so that a read need not open the file. Knows names and descriptors, not
//! contents.

use crate::io::DataFile;
use parking_lot::Mutex;
use spurline_types::ObjectId;
use spurline_types::id_hash::BuildObjectHasher;
use std::collections::HashMap;
use std::sync::Arc;

/// A data file: the object, and 0 for the object's single file or 1 + the extent's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileKey {
    pub object: ObjectId,
    /// 0, or 1 + the extent's number.
    pub tag: u32,
}

const FILE_CACHE_SHARDS: usize = 16;

struct FileSlot {
    key: FileKey,
    file: Arc<DataFile>,
    used: bool,
}

/// CLOCK over open files.
#[derive(Default)]
struct FileShard {
    slot_of: HashMap<FileKey, usize, BuildObjectHasher>,
    slots: Vec<FileSlot>,
    hand: usize,
}

/// The open files of a disk.
pub struct FileCache {
    parts: [Mutex<FileShard>; FILE_CACHE_SHARDS],
    /// Maximum files per shard.
    bound: usize,
}

impl FileCache {
    /// Keeps at most about `bound` files open.
    pub fn new(bound: usize) -> Self {
        FileCache { parts: std::array::from_fn(|_| Mutex::default()), bound: (bound / FILE_CACHE_SHARDS).max(1) }
    }

    fn shard_of(&self, key: &FileKey) -> &Mutex<FileShard> {
        &self.parts[(key.object.0 >> 96) as usize % FILE_CACHE_SHARDS]
    }

    /// The open file, if cached.
    pub fn get(&self, key: &FileKey) -> Option<Arc<DataFile>> {
        let mut part = self.shard_of(key).lock();
        let at = *part.slot_of.get(key)?;
        let slot = &mut part.slots[at];
        slot.used = true;
        Some(Arc::clone(&slot.file))
    }

    /// Caches a file. With `replace` the file replaces another of that name, else the file that is cached already wins.
    pub fn put(&self, key: FileKey, file: DataFile, replace: bool) -> Arc<DataFile> {
        let file = Arc::new(file);
        let mut part = self.shard_of(&key).lock();
        let part = &mut *part;
        if let Some(&at) = part.slot_of.get(&key) {
            if replace {
                part.slots[at].file = Arc::clone(&file);
            }
            return Arc::clone(&part.slots[at].file);
        }
        let slot = FileSlot { key, file: Arc::clone(&file), used: true };
        if part.slots.len() < self.bound {
            part.slot_of.insert(key, part.slots.len());
            part.slots.push(slot);
            return file;
        }
        while std::mem::take(&mut part.slots[part.hand].used) {
            part.hand = (part.hand + 1) % part.slots.len();
        }
        let old = std::mem::replace(&mut part.slots[part.hand], slot);
        part.slot_of.remove(&old.key);
        part.slot_of.insert(key, part.hand);
        part.hand = (part.hand + 1) % part.slots.len();
        file
    }

    pub fn remove(&self, key: &FileKey) {
        let mut part = self.shard_of(key).lock();
        let part = &mut *part;
        if let Some(at) = part.slot_of.remove(key) {
            part.slots.swap_remove(at);
            if let Some(moved) = part.slots.get(at) {
                part.slot_of.insert(moved.key, at);
            }
            part.hand = if part.slots.is_empty() { 0 } else { part.hand % part.slots.len() };
        }
    }
}

/// Files that each of `disks` may keep open: a quarter of the process's limit divided by the disks, at most 16,384
/// each.
pub fn open_file_limit(disks: usize) -> usize {
    let mut limit = libc::rlimit { rlim_cur: 1024, rlim_max: 1024 };
    // SAFETY: `limit` outlives the call.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    (limit.rlim_cur as usize / 4 / disks.max(1)).clamp(FILE_CACHE_SHARDS, 16_384)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounded_and_consistent() {
        let cache = FileCache::new(FILE_CACHE_SHARDS * 4);
        let key = |n: u32| FileKey { object: ObjectId(5), tag: n };
        let open = || DataFile { file: std::fs::File::open("/dev/null").unwrap(), direct: false };
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
