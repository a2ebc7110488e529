//! A directory in memory and a directory on disk, both removed at the end of the run. File contents depend on the offset, so that
//! a read at a wrong offset is detected. Knows no file system under test.

use crate::error::{BenchError, Result};
use crate::stop;
use crate::terminal::show_progress;
use spurline_sys::MountTable;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// A directory that is removed on drop.
#[derive(Debug)]
pub struct ScratchDir {
    root: PathBuf,
}

/// Prefix of the names of a run's directories, namespaces and interfaces; the process id follows.
pub const PREFIX: &str = "spurbench";

impl ScratchDir {
    /// Creates a directory of this run in `parent`, which `flag` names on the command line.
    /// `Missing` without `parent`; `Failed` when the directory can't be created.
    pub fn new(parent: &Path, purpose: &str, flag: &str) -> Result<Self> {
        if !parent.is_dir() {
            return Err(BenchError::Missing(format!(
                "there is no folder {}: make it, or give another one to {flag}",
                parent.display()
            )));
        }
        let root = parent.join(format!("{PREFIX}-{}-{purpose}", std::process::id()));
        std::fs::create_dir_all(&root).map_err(|e| BenchError::io(root.display(), &e))?;
        Ok(ScratchDir { root })
    }

    pub fn path(&self) -> &Path {
        &self.root
    }

    /// A directory inside, created if absent.
    pub fn subdir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(name);
        std::fs::create_dir_all(&dir).map_err(|e| BenchError::io(dir.display(), &e))?;
        Ok(dir)
    }

    /// An empty directory inside.
    pub fn empty_subdir(&self, name: &str) -> Result<PathBuf> {
        let dir = self.root.join(name);
        if dir.exists() {
            std::fs::remove_dir_all(&dir).map_err(|e| BenchError::io(dir.display(), &e))?;
        }
        self.subdir(name)
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        // A mount that is still there keeps the mountpoint; never descend into a mount.
        let table = MountTable::read().unwrap_or_default();
        if table.entries().iter().any(|entry| entry.mountpoint.starts_with(&self.root)) {
            eprintln!("left behind, as something is still mounted in it: {}", self.root.display());
            return;
        }
        // The next run's sweep removes the rest.
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

/// Removes directories of killed runs, which have no process.
pub fn sweep_stale(parent: &Path) {
    let Ok(entries) = std::fs::read_dir(parent) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if is_stale(&name) {
            // The guard's drop handles remaining mounts.
            drop(ScratchDir { root: entry.path() });
        }
    }
}

/// Whether a name belongs to a run without a process.
pub fn is_stale(name: &str) -> bool {
    let Some(pid) = name.strip_prefix(PREFIX).and_then(|rest| rest.trim_start_matches('-').split('-').next()) else {
        return false;
    };
    pid.parse::<u32>().is_ok_and(|pid| !Path::new(&format!("/proc/{pid}")).exists())
}

/// Fills `bytes` with the contents at `offset` (a multiple of 8) of the file with this seed. Every 8 bytes differ
/// from all others of all files, and the contents do not compress.
pub fn fill_pattern(seed: u64, offset: u64, bytes: &mut [u8]) {
    for (i, word) in bytes.chunks_mut(8).enumerate() {
        let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(offset / 8 + i as u64 + 1);
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^= x >> 31;
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
}

/// Writes a file of `len` bytes with [`fill_pattern`].
pub fn write_file(path: &Path, seed: u64, len: u64) -> Result<()> {
    let mut file = File::create(path).map_err(|e| BenchError::io(path.display(), &e))?;
    let mut buffer = vec![0u8; (1 << 20).min(len as usize)];
    let mut at = 0;
    while at < len {
        let n = ((len - at) as usize).min(buffer.len());
        fill_pattern(seed, at, &mut buffer[..n]);
        file.write_all(&buffer[..n]).map_err(|e| BenchError::io(path.display(), &e))?;
        at += n as u64;
        stop::check_stop()?;
    }
    Ok(())
}

/// Reads a whole file and checks for the contents of [`write_file`].
/// When the file can't be read or differs; the message has the position.
pub fn check_file(path: &Path, seed: u64, len: u64) -> Result<()> {
    let mut file = File::open(path).map_err(|e| BenchError::io(path.display(), &e))?;
    let size = (1 << 20).min(len.max(1) as usize);
    let mut got = vec![0u8; size];
    let mut right = vec![0u8; size];
    let mut at = 0;
    while at < len {
        let n = ((len - at) as usize).min(size);
        file.read_exact(&mut got[..n]).map_err(|e| BenchError::io(format_args!("{} at {at}", path.display()), &e))?;
        fill_pattern(seed, at, &mut right[..n]);
        if got[..n] != right[..n] {
            let i = (0..n).find(|&i| got[i] != right[i]).unwrap_or(0) as u64;
            return Err(BenchError::Failed(format!("{}: wrong byte at {}", path.display(), at + i)));
        }
        at += n as u64;
        stop::check_stop()?;
    }
    match file.read_at(&mut got[..1], len) {
        Ok(0) => Ok(()),
        Ok(_) => Err(BenchError::Failed(format!("{}: longer than {len} bytes", path.display()))),
        Err(e) => Err(BenchError::io(path.display(), &e)),
    }
}

/// Reads the first `files` files of a source in a folder and checks every byte.
pub fn check_files(at: &Path, files: usize, len: u64) -> Result<()> {
    show_progress(&format!("checking {}", at.display()));
    (0..files).try_for_each(|i| check_file(&at.join(file_name(i)), i as u64, len))
}

/// The name of file `i` of a source.
pub fn file_name(i: usize) -> String {
    format!("file-{i:05}.bin")
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
        let scratch = ScratchDir::new(parent.path(), "t", "--work-dir").unwrap();
        let root = scratch.path().to_owned();
        std::fs::write(scratch.subdir("a").unwrap().join("f"), b"x").unwrap();
        assert_eq!(std::fs::read_dir(scratch.empty_subdir("a").unwrap()).unwrap().count(), 0);
        assert!(!is_stale(&root.file_name().unwrap().to_string_lossy()));
        drop(scratch);
        assert!(!root.exists());
        let absent = parent.path().join("absent");
        let error = ScratchDir::new(&absent, "t", "--work-dir").unwrap_err();
        assert!(
            matches!(&error, BenchError::Missing(why) if why.contains("--work-dir")) && !absent.exists(),
            "{error}"
        );
        let stale = parent.path().join(format!("{PREFIX}-999999999-t"));
        let other = parent.path().join("other");
        std::fs::create_dir(&stale).unwrap();
        std::fs::create_dir(&other).unwrap();
        sweep_stale(parent.path());
        assert!(!stale.exists() && other.exists());
    }
}
