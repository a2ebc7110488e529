//! The default cache folder, which all processes of a user share that name no cache directory. Each process has a separate folder
//! there, and all together hold as much as a single `--cache-size`. The blocks of a process that has ended stay until others need
//! the space. Knows no blocks.

use crate::cache_dirs::{USED_FILE, is_in_use, published_bytes, remove_unused, stored_at};
use parking_lot::{Condvar, Mutex};
use spurline_config::Fault;
use spurline_store::{LOCK, Store};
use spurline_types::Error;
use spurline_types::units::human_bytes;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

/// Interval at which each process looks at the folders of the others: as much as a disk takes in this time may exceed the size.
const LOOK_INTERVAL: Duration = Duration::from_secs(2);

/// Keeps the share of this process in the default cache folder; a drop ends that.
pub struct SharedCacheFolder {
    ended: Arc<(Mutex<bool>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

/// The folder of another process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SiblingFolder {
    path: PathBuf,
    used_bytes: u64,
    /// When the folder's process last stored or removed blocks.
    changed: SystemTime,
    /// Whether the folder's process runs.
    in_use: bool,
}

impl SharedCacheFolder {
    /// Limits the store in the folder `own`, so that this folder and the neighbours hold at most `size` bytes.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(own: &Path, size: u64, store: &Arc<Store>) -> Result<Self, Fault> {
        let ended = Arc::new((Mutex::new(false), Condvar::new()));
        let share = CacheShare { own: own.to_owned(), size, store: Arc::downgrade(store) };
        let end = Arc::clone(&ended);
        let spawned = std::thread::Builder::new().name("cache-share".into()).spawn(move || share.keep_until(&end));
        let thread = spawned.map_err(|e| Error::io("can't start a thread", &e))?;
        Ok(SharedCacheFolder { ended, thread: Some(thread) })
    }
}

impl Drop for SharedCacheFolder {
    fn drop(&mut self) {
        *self.ended.0.lock() = true;
        self.ended.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The part of a process.
struct CacheShare {
    own: PathBuf,
    /// The most bytes of all folders.
    size: u64,
    store: Weak<Store>,
}

impl CacheShare {
    fn keep_until(&self, end: &(Mutex<bool>, Condvar)) {
        let mut over = end.0.lock();
        while !*over {
            self.update();
            end.1.wait_for(&mut over, LOOK_INTERVAL);
        }
        self.publish();
    }

    /// Publishes the bytes of this process, removes unused folders where the space is needed, and sets the limit.
    fn update(&self) {
        let Some(used) = self.publish() else { return };
        let mut siblings = list_siblings(&self.own);
        while let Some(oldest) = oldest_in_the_way(self.size, used, &siblings) {
            let SiblingFolder { path, used_bytes, .. } = siblings.remove(oldest);
            if remove_unused(&path).unwrap_or(false) {
                tracing::info!(
                    "{} is removed: {} of a process that has ended make room in the default cache folder",
                    path.display(),
                    human_bytes(used_bytes)
                );
            }
        }
        if let Some(store) = self.store.upgrade() {
            store.set_capacity(share_of(self.size, &siblings));
        }
    }

    /// Publishes the bytes of this process; `None` when the store is gone.
    fn publish(&self) -> Option<u64> {
        let used = self.store.upgrade()?.disks().iter().map(|disk| disk.used).sum();
        publish_used(&self.own, used);
        Some(used)
    }
}

/// The limit of this process: the rest beside the others, and at least an equal share.
fn share_of(size: u64, siblings: &[SiblingFolder]) -> u64 {
    let used: u64 = siblings.iter().map(|sibling| sibling.used_bytes).sum();
    let processes = 1 + siblings.iter().filter(|sibling| sibling.in_use).count() as u64;
    size.saturating_sub(used).max(size / processes)
}

/// The folder that was unused for the longest time, if this process has nearly filled the rest beside the others.
fn oldest_in_the_way(size: u64, used: u64, siblings: &[SiblingFolder]) -> Option<usize> {
    let left = size.saturating_sub(siblings.iter().map(|sibling| sibling.used_bytes).sum());
    if used < left - left / 16 {
        return None;
    }
    let unused = siblings.iter().enumerate().filter(|(_, sibling)| !sibling.in_use && sibling.used_bytes > 0);
    unused.min_by_key(|(_, sibling)| sibling.changed).map(|(place, _)| place)
}

fn publish_used(own: &Path, used: u64) {
    let file = own.join(USED_FILE);
    let text = used.to_string();
    if fs::read_to_string(&file).is_ok_and(|known| known == text) {
        return;
    }
    // Others see the last number until the disk takes this number.
    if let Err(error) = fs::write(&file, text) {
        tracing::debug!("{}: {error}", file.display());
    }
}

/// The folders beside `own` that hold caches.
fn list_siblings(own: &Path) -> Vec<SiblingFolder> {
    let Some(shared) = own.parent() else { return Vec::new() };
    let mut siblings = Vec::new();
    for entry in fs::read_dir(shared).into_iter().flatten().flatten() {
        let path = entry.path();
        if path == own || !path.join(LOCK).is_file() {
            continue;
        }
        let used_bytes = published_bytes(&path).unwrap_or(0);
        let changed = stored_at(&path).unwrap_or(SystemTime::UNIX_EPOCH);
        let in_use = is_in_use(&path);
        siblings.push(SiblingFolder { path, used_bytes, changed, in_use });
    }
    siblings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sibling(name: &str, used_bytes: u64, seconds: u64, in_use: bool) -> SiblingFolder {
        let changed = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        SiblingFolder { path: name.into(), used_bytes, changed, in_use }
    }

    #[test]
    fn processes_share_the_size_and_each_has_an_equal_part_at_least() {
        assert_eq!(share_of(100, &[]), 100);
        assert_eq!(share_of(100, &[sibling("a", 10, 1, true)]), 90);
        assert_eq!(share_of(100, &[sibling("a", 100, 1, true)]), 50);
        assert_eq!(share_of(100, &[sibling("a", 60, 1, true), sibling("b", 60, 1, true)]), 33);
        // An unused folder has no part of its own.
        assert_eq!(share_of(100, &[sibling("old", 98, 1, false)]), 100);
    }

    #[test]
    fn unused_folders_go_when_their_space_is_needed_and_the_oldest_first() {
        let siblings = [sibling("new", 40, 9, false), sibling("old", 40, 5, false), sibling("busy", 10, 1, true)];
        assert_eq!(oldest_in_the_way(100, 5, &siblings), None, "there is room");
        assert_eq!(oldest_in_the_way(100, 10, &siblings), Some(1));
        assert_eq!(oldest_in_the_way(100, 60, &siblings[2..]), None, "it is in use");
        assert_eq!(oldest_in_the_way(80, 0, &siblings[..2]), Some(1), "nothing is left");
    }

    #[test]
    fn a_folder_in_use_is_not_removed() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("own");
        let busy = dir.path().join("busy");
        let old = dir.path().join("old");
        for folder in [&own, &busy, &old] {
            fs::create_dir(folder).unwrap();
            fs::write(folder.join(LOCK), "").unwrap();
            publish_used(folder, 7);
        }
        fs::write(dir.path().join("file"), "").unwrap();
        let held = fs::File::open(busy.join(LOCK)).unwrap();
        rustix::fs::flock(&held, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
        let mut found = list_siblings(&own);
        found.sort_by(|a, b| a.path.cmp(&b.path));
        let seen: Vec<_> = found.iter().map(|found| (found.path.clone(), found.used_bytes, found.in_use)).collect();
        assert_eq!(seen, [(busy.clone(), 7, true), (old.clone(), 7, false)]);
        assert!(!remove_unused(&busy).unwrap() && busy.exists());
        assert!(remove_unused(&old).unwrap() && !old.exists());
    }
}
