//! Cache directories as other processes see them: how much they hold, of which sources, and whether a process uses them. Knows no
//! blocks.

use crate::recent_file::RECENT_FILE;
use crate::settings::SETTINGS_FILE;
use rustix::fs::{FlockOperation, flock};
use spurline_store::{FORMAT_FILE, LOCK};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// In a directory of the default folder: the bytes of the blocks.
pub(crate) const USED_FILE: &str = "used";
/// In each directory: the sources of the process that used it last, a line for each.
const SOURCES_FILE: &str = "sources";

/// A cache directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheDir {
    /// The directory.
    pub path: PathBuf,
    /// Bytes that it takes.
    pub used_bytes: u64,
    /// When a process last started there, or stored or removed blocks.
    pub last_used: SystemTime,
    /// The sources of that process.
    pub sources: Vec<String>,
    /// Whether that process runs.
    pub in_use: bool,
}

impl CacheDir {
    /// The directory at `path`; `None` if it holds no cache.
    pub fn read(path: &Path) -> Option<CacheDir> {
        let started = fs::metadata(path.join(LOCK)).and_then(|lock| lock.modified()).ok()?;
        let format = fs::read_to_string(path.join(FORMAT_FILE)).ok()?;
        format.starts_with("layout=").then(|| CacheDir {
            path: path.to_owned(),
            used_bytes: published_bytes(path).unwrap_or_else(|| taken_bytes(path)),
            last_used: stored_at(path).map_or(started, |stored| stored.max(started)),
            sources: fs::read_to_string(path.join(SOURCES_FILE))
                .map_or_else(|_| Vec::new(), |text| text.lines().map(str::to_owned).collect()),
            in_use: is_in_use(path),
        })
    }

    /// Removes the cache, and the directory if nothing else is in it; false if a process has begun to use it.
    pub fn remove_unused(&self) -> io::Result<bool> {
        remove_unused(&self.path)
    }
}

/// The cache directory at `place`, or those in it, by name. Directories that this process may not read are left out.
pub fn list_cache_dirs(place: &Path) -> Vec<CacheDir> {
    if let Some(own) = CacheDir::read(place) {
        return vec![own];
    }
    let below = fs::read_dir(place).into_iter().flatten().flatten();
    // A link leads to a directory that is listed where it is.
    let below = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut found: Vec<CacheDir> = below.filter_map(|entry| CacheDir::read(&entry.path())).collect();
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Notes the sources of this process in its cache directory, for people and other processes.
pub(crate) fn note_sources(dir: &Path, sources: &[&str]) {
    if let Err(error) = fs::write(dir.join(SOURCES_FILE), sources.join("\n") + "\n") {
        tracing::debug!("{}: {error}", dir.display());
    }
}

/// The bytes that the process of a directory has published.
pub(crate) fn published_bytes(dir: &Path) -> Option<u64> {
    fs::read_to_string(dir.join(USED_FILE)).ok()?.trim().parse().ok()
}

/// When the bytes were published.
pub(crate) fn stored_at(dir: &Path) -> Option<SystemTime> {
    fs::metadata(dir.join(USED_FILE)).and_then(|used| used.modified()).ok()
}

pub(crate) fn is_in_use(dir: &Path) -> bool {
    File::open(dir.join(LOCK)).is_ok_and(|lock| !try_lock(&lock, FlockOperation::NonBlockingLockShared))
}

pub(crate) fn try_lock(lock: &File, operation: FlockOperation) -> bool {
    flock(lock, operation).is_ok()
}

/// Removes what Spurline has made in a directory, and the directory if nothing else is in it; false if a process has begun to use it.
pub(crate) fn remove_unused(dir: &Path) -> io::Result<bool> {
    let lock = File::open(dir.join(LOCK))?;
    // Held until all is removed. A process that starts there meanwhile fails and says so.
    if !try_lock(&lock, FlockOperation::NonBlockingLockExclusive) {
        return Ok(false);
    }
    spurline_store::remove_contents(dir)?;
    for name in [SOURCES_FILE, USED_FILE, RECENT_FILE, SETTINGS_FILE, LOCK] {
        spurline_store::remove_if_there(&dir.join(name))?;
    }
    match fs::remove_dir(dir) {
        // Files of others stay, as do the mountpoint of a disk and the directory of a process that has just started.
        Err(error) if !matches!(error.kind(), io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::ResourceBusy) => {
            Err(error)
        }
        _ => Ok(true),
    }
}

/// The space of all files in a directory.
fn taken_bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)));
    sizes.map(|(path, found)| if found.is_dir() { taken_bytes(&path) } else { found.blocks() * 512 }).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_without_a_process_are_removed_and_others_are_not() {
        let dir = tempfile::tempdir().unwrap();
        let place = |name: &str| dir.path().join(name);
        for name in ["busy", "old"] {
            fs::create_dir_all(place(name).join("data")).unwrap();
            fs::write(place(name).join(LOCK), "1\n").unwrap();
            fs::write(place(name).join(FORMAT_FILE), "layout=1\n").unwrap();
            note_sources(&place(name), &["s3://a", "s3://b"]);
        }
        fs::write(place("busy").join(USED_FILE), "77").unwrap();
        fs::create_dir_all(place("old/data/3f")).unwrap();
        fs::write(place("old/data/3f/3f000000000000000000000000000001"), [7; 10_000]).unwrap();
        fs::create_dir_all(place("mixed/data/2026")).unwrap();
        for name in [LOCK, FORMAT_FILE, "thesis", "data/2026/results"] {
            fs::write(place("mixed").join(name), "layout=1\n").unwrap();
        }
        fs::create_dir(place("other")).unwrap();
        fs::write(place("other").join(LOCK), "").unwrap();
        let held = File::open(place("busy").join(LOCK)).unwrap();
        assert!(try_lock(&held, FlockOperation::NonBlockingLockExclusive));
        let found = list_cache_dirs(dir.path());
        let seen: Vec<_> = found.iter().map(|dir| (dir.path.clone(), dir.in_use)).collect();
        assert_eq!(seen, [(place("busy"), true), (place("mixed"), false), (place("old"), false)]);
        assert!(found[0].used_bytes == 77 && found[2].used_bytes >= 10_000, "{found:?}");
        assert_eq!(found[2].sources, ["s3://a", "s3://b"]);
        assert_eq!([0, 1, 2].map(|n: usize| found[n].remove_unused().unwrap()), [false, true, true]);
        assert!(place("busy").exists() && !place("old").exists());
        // Files of others stay.
        assert!(place("mixed/thesis").exists() && place("mixed/data/2026/results").exists());
        assert!(!place("mixed").join(FORMAT_FILE).exists());
        assert_eq!(list_cache_dirs(&place("busy")), found[..1]);
    }
}
