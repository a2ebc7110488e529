//! Cache directories that a start made: one that fails takes them away again. It knows nothing of what is in them.

use crate::layout::LOCK;
use rustix::fs::{FlockOperation, flock};
use std::fs::{File, OpenOptions};
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Directories this process made before it opened a store in them; taken away when dropped, unless kept. Drop the store
/// first. One that another process has used is left alone.
#[derive(Debug, Default)]
#[must_use = "directories are taken away when this is dropped"]
pub struct Fresh(Vec<PathBuf>);

impl Fresh {
    /// Makes those of `dirs` that are not there. Why one can't be made is left for opening the store to say.
    pub fn make<'a>(dirs: impl IntoIterator<Item = &'a PathBuf>) -> Self {
        let made = |dir: &&PathBuf| {
            if let Some(parent) = dir.parent() {
                let _ = std::fs::create_dir_all(parent);
            }
            // Of two processes that start together it is made by one.
            std::fs::create_dir(dir).is_ok()
        };
        Fresh(dirs.into_iter().filter(made).cloned().collect())
    }

    /// The start succeeded: they stay.
    pub fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        for dir in &self.0 {
            // The lock is held until the directory is gone, so nobody begins to use it meanwhile.
            if let Some(_lock) = lock_of_nobody_else(dir) {
                // What can't be taken away is no worse than before.
                let _ = std::fs::remove_dir_all(dir);
            }
        }
    }
}

/// The lock of a directory that nobody uses and that nobody but this process has used last.
fn lock_of_nobody_else(dir: &Path) -> Option<File> {
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
        let fresh = Fresh::make([&old, &new]);
        Fresh::make([&kept]).keep();
        let held = layout::open(&new, 1 << 20).unwrap();
        drop(held);
        drop(fresh);
        assert!(old.exists() && kept.exists() && !new.exists());
        // Somebody holds it.
        let fresh = Fresh::make([&new]);
        let held = layout::open(&new, 1 << 20).unwrap();
        drop(fresh);
        assert!(new.join("format").exists());
        drop(held);
        // Somebody held it since, and left blocks.
        std::fs::remove_dir_all(&new).unwrap();
        let fresh = Fresh::make([&new]);
        drop(layout::open(&new, 1 << 20).unwrap());
        std::fs::write(new.join("lock"), "1\n").unwrap();
        drop(fresh);
        assert!(new.join("format").exists());
    }
}
