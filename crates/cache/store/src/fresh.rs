//! Cache directories that a start created: a failed start removes them. Knows nothing of the contents.

use crate::layout::LOCK;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Directories that this process created before it opened a store there. Removed on drop unless kept. Drop the store first. A
/// directory that another process has used is left alone.
#[derive(Debug, Default)]
#[must_use = "directories are removed when this is dropped"]
pub struct FreshDirs(Vec<PathBuf>);

impl FreshDirs {
    /// Creates those of `dirs` that are missing. A failure is reported later, by opening the store.
    pub fn create_missing<'a>(dirs: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        FreshDirs(
            dirs.into_iter()
                .filter(|dir| {
                    if let Some(parent) = dir.parent() {
                        let _ = std::fs::create_dir_all(parent);
                    }
                    // Of two processes that start together, only the first creates the directory.
                    std::fs::create_dir(dir).is_ok()
                })
                .cloned()
                .collect(),
        )
    }

    /// The start succeeded: the directories stay.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for FreshDirs {
    fn drop(&mut self) {
        for dir in &self.0 {
            // The lock is held until the directory is gone, so no process begins to use the directory meanwhile.
            if let Some(_lock) = lock_if_unused(dir) {
                // A failed removal has no consequence.
                let _ = std::fs::remove_dir_all(dir);
            }
        }
    }
}

/// Takes the lock of a directory that is unused and whose last user was this process.
fn lock_if_unused(dir: &Path) -> Option<File> {
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(dir.join(LOCK));
    let mut lock = open.ok()?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive).ok()?;
    let mut pid = String::new();
    lock.read_to_string(&mut pid).ok()?;
    let own = pid.trim().is_empty() || pid.trim() == std::process::id().to_string();
    own.then_some(lock)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout;

    #[test]
    fn only_what_this_process_made_and_nobody_else_used_is_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let (old, new, kept) = (dir.path().join("old"), dir.path().join("a/new"), dir.path().join("kept"));
        std::fs::create_dir(&old).unwrap();
        let fresh = FreshDirs::create_missing([&old, &new]);
        FreshDirs::create_missing([&kept]).keep();
        let held = layout::open_root(&new, 1 << 20).unwrap();
        drop(held);
        drop(fresh);
        assert!(old.exists() && kept.exists() && !new.exists());
        // Locked by another store.
        let fresh = FreshDirs::create_missing([&new]);
        let held = layout::open_root(&new, 1 << 20).unwrap();
        drop(fresh);
        assert!(new.join("format").exists());
        drop(held);
        // Used by another process since, which left blocks.
        std::fs::remove_dir_all(&new).unwrap();
        let fresh = FreshDirs::create_missing([&new]);
        drop(layout::open_root(&new, 1 << 20).unwrap());
        std::fs::write(new.join("lock"), "1\n").unwrap();
        drop(fresh);
        assert!(new.join("format").exists());
    }
}
