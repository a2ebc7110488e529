//! Where a run keeps its data: a directory on memory and one on the disk, both gone at its end, and files with
//! contents that a wrong offset would show in. It knows no file system under test.

use crate::error::{Error, Result};
use crate::stop;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A directory that goes away with its value.
#[derive(Debug)]
pub struct Scratch {
    root: PathBuf,
}

/// The name every directory, namespace and interface of a run starts with; the process id follows.
pub const PREFIX: &str = "spurbench";

impl Scratch {
    /// Makes a directory of this run in `parent`.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn new(parent: &Path, purpose: &str) -> Result<Self> {
        let root = parent.join(format!("{PREFIX}-{}-{purpose}", std::process::id()));
        std::fs::create_dir_all(&root).map_err(|e| Error::io(root.display(), &e))?;
        Ok(Scratch { root })
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.root
    }

    /// A directory inside it, made when not there.
    ///
    /// # Errors
    /// When it can't be made.
    pub fn dir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(name);
        std::fs::create_dir_all(&dir).map_err(|e| Error::io(dir.display(), &e))?;
        Ok(dir)
    }

    /// A directory inside it, empty.
    ///
    /// # Errors
    /// When it can't be emptied or made.
    pub fn fresh(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(name);
        if dir.exists() {
            std::fs::remove_dir_all(&dir).map_err(|e| Error::io(dir.display(), &e))?;
        }
        self.dir(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A mount that did not go away would keep its mountpoint; never descend into one.
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let root = self.root.to_string_lossy();
        if mounts.lines().filter_map(|l| l.split(' ').nth(1)).any(|at| at.starts_with(root.as_ref())) {
            eprintln!("left behind, as something is still mounted in it: {root}");
            return;
        }
        // What can't be removed is told by the next run's sweep.
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

/// Removes directories of runs that were killed: those whose process is gone.
pub fn sweep(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_stale(&name) {
            // The guard's own drop knows what must not be removed.
            drop(Scratch { root: entry.path() });
        }
    }
}

/// Whether a name is of a run whose process is gone.
pub fn is_stale(name: &str) -> bool {
    let Some(pid) = name.strip_prefix(PREFIX).and_then(|rest| rest.trim_start_matches('-').split('-').next()) else {
        return false;
    };
    pid.parse::<u32>().is_ok_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

/// Fills `bytes` as they stand at `offset` (a multiple of 8) of the file with this seed: every 8 bytes differ from
/// all others of all files, and nothing compresses.
pub fn fill(seed: u64, offset: u64, bytes: &mut [u8]) {
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(offset / 8 + i as u64 + 1);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
}

/// Writes a file of `len` bytes of [`fill`].
///
/// # Errors
/// When it can't be written, or the user interrupts.
pub fn write_file(path: &Path, seed: u64, len: u64) -> Result<()> {
    let mut file = File::create(path).map_err(|e| Error::io(path.display(), &e))?;
    let mut buffer = vec![0u8; (1 << 20).min(len as usize)];
    let mut at = 0;
    while at < len {
        let n = ((len - at) as usize).min(buffer.len());
        fill(seed, at, &mut buffer[..n]);
        file.write_all(&buffer[..n]).map_err(|e| Error::io(path.display(), &e))?;
        at += n as u64;
        stop::check()?;
    }
    Ok(())
}

/// Reads all of a file and checks that it is [`write_file`]'s.
///
/// # Errors
/// When it can't be read or differs, saying where.
pub fn check_file(path: &Path, seed: u64, len: u64) -> Result<()> {
    let mut file = File::open(path).map_err(|e| Error::io(path.display(), &e))?;
    let size = (1 << 20).min(len.max(1) as usize);
    let (mut got, mut right) = (vec![0u8; size], vec![0u8; size]);
    let mut at = 0;
    while at < len {
        let n = ((len - at) as usize).min(size);
        file.read_exact(&mut got[..n]).map_err(|e| Error::io(format_args!("{} at {at}", path.display()), &e))?;
        fill(seed, at, &mut right[..n]);
        if got[..n] != right[..n] {
            let i = (0..n).find(|&i| got[i] != right[i]).unwrap_or(0) as u64;
            return Err(Error::Failed(format!("{}: wrong byte at {}", path.display(), at + i)));
        }
        at += n as u64;
        stop::check()?;
    }
    match file.read_at(&mut got[..1], len) {
        Ok(0) => Ok(()),
        Ok(_) => Err(Error::Failed(format!("{}: longer than {len} bytes", path.display()))),
        Err(e) => Err(Error::io(path.display(), &e)),
    }
}

/// Bytes free for use in the file system of `path`.
pub fn free_bytes(path: &Path) -> u64 {
    rustix::fs::statvfs(path).map(|s| s.f_bavail * s.f_frsize).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_what_they_should_be() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        let len = (3 << 20) + 12_345;
        write_file(&file, 7, len).unwrap();
        check_file(&file, 7, len).unwrap();
        assert!(check_file(&file, 8, len).unwrap_err().to_string().contains("wrong byte at 0"));
        assert!(check_file(&file, 7, len - 1).unwrap_err().to_string().contains("longer"));
        assert!(check_file(&file, 7, len + 8).is_err());
        File::options().write(true).open(&file).unwrap().write_all_at(&[0, 0, 0, 0], 2 << 20).unwrap();
        let error = check_file(&file, 7, len).unwrap_err().to_string();
        assert!(error.contains("wrong byte at 209715"), "{error}");
    }

    #[test]
    fn directories_go_away() {
        let parent = tempfile::tempdir().unwrap();
        let scratch = Scratch::new(parent.path(), "t").unwrap();
        let root = scratch.path().to_owned();
        std::fs::write(scratch.dir("a").unwrap().join("f"), b"x").unwrap();
        assert_eq!(std::fs::read_dir(scratch.fresh("a").unwrap()).unwrap().count(), 0);
        assert!(!is_stale(&root.file_name().unwrap().to_string_lossy()));
        drop(scratch);
        assert!(!root.exists());
        let stale = parent.path().join(format!("{PREFIX}-999999999-t"));
        let other = parent.path().join("other");
        std::fs::create_dir(&stale).unwrap();
        std::fs::create_dir(&other).unwrap();
        sweep(parent.path());
        assert!(!stale.exists() && other.exists());
    }
}
