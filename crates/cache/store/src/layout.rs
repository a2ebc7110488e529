//! The layout of a cache directory: lock, format file, the path of a block's file. Does not know the contents of the cache.
//!
//! ```text
//! DIR/lock         held by the process that uses the directory, with its pid
//! DIR/format       layout number, block size, the disk's own id
//! DIR/index        the index log
//! DIR/data/3f/3f…  data files: up to 256 folders by the object's first byte, made when first needed
//! DIR/probe        written and read back while the disk is not normal
//! ```

use crate::files::FileKey;
use crate::journal::{LOG_NAME, NEW_LOG_NAME};
use rustix::fs::{FlockOperation, flock};
use spurline_sys::replace_file;
use spurline_types::{Error, ErrorKind, ObjectId, Result, Size};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const LAYOUT_VERSION: u32 = 1;
/// Bytes of a probe of the disk.
pub const PROBE: u64 = 4096;
/// The file that the user of a directory holds locked.
pub const LOCK: &str = "lock";
/// The file with layout number, block size and id.
pub const FORMAT_FILE: &str = "format";
/// Attempts to take that lock, and the pause between attempts.
const LOCK_ATTEMPTS: u32 = 5;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// The data file of a key.
pub fn data_path(root: &Path, key: &FileKey) -> PathBuf {
    let mut name = String::with_capacity(48);
    let _ = write!(name, "data/{:02x}/{}", key.object.0 >> 120, key.object);
    if key.tag > 0 {
        let _ = write!(name, "-{}", key.tag - 1);
    }
    root.join(name)
}

/// The key of a data file's name; `None` for a name this store never makes.
pub fn parse_name(name: &str) -> Option<FileKey> {
    let (object, tag) = match name.split_once('-') {
        None => (name, 0),
        Some((object, extent)) => (object, extent.parse::<u32>().ok()?.checked_add(1)?),
    };
    let digits = object.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
    (object.len() == 32 && digits)
        .then(|| u128::from_str_radix(object, 16).ok())?
        .map(|id| FileKey { object: ObjectId(id), tag })
}

/// A directory locked by this process.
#[derive(Debug)]
pub struct CacheRoot {
    /// The disk's id: the rank for an object stays when the disk is mounted elsewhere.
    pub id: u64,
    /// Device and inode of the directory, to notice that another directory took the place.
    dir_identity: Option<FileIdentity>,
    /// Held while the directory is in use.
    lock: File,
}

fn dir_error(path: &Path, what: &str, error: &std::io::Error, remedy: &str) -> Error {
    let error = Error::io(format!("cache directory {}: {what}", path.display()), error);
    Error::new(error.kind(), format!("{}; {remedy}", error.message()))
}

/// A file or directory on this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    fn new(metadata: &std::fs::Metadata) -> FileIdentity {
        FileIdentity { device: metadata.dev(), inode: metadata.ino() }
    }

    /// Whether `path` leads to another file, or to none.
    fn is_replaced_at(self, path: &Path) -> bool {
        match std::fs::metadata(path) {
            Ok(found) => FileIdentity::new(&found) != self,
            Err(e) => is_missing(&e),
        }
    }
}

impl CacheRoot {
    /// The device number of the file system.
    pub fn device_number(&self) -> Option<u64> {
        self.dir_identity.map(|directory| directory.device)
    }

    /// Why `path` is no longer the opened directory, with a remedy; `None` otherwise. The disk may be unmounted, or the files
    /// removed, so that another process may lock the directory.
    pub fn lost_reason(&self, path: &Path) -> Option<&'static str> {
        // Other errors come up in reads and writes.
        if self.dir_identity.is_some_and(|directory| directory.is_replaced_at(path)) {
            return Some("another directory has taken its place; mount the disk again");
        }
        let lock = self.lock.metadata().ok().map(|held| FileIdentity::new(&held));
        let removed = std::fs::metadata(path.join("data")).is_err_and(|e| is_missing(&e))
            || lock.is_some_and(|lock| lock.is_replaced_at(&path.join(LOCK)));
        removed.then_some("its files were removed under this process; start it again")
    }
}

fn is_missing(e: &std::io::Error) -> bool {
    matches!(e.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory)
}

/// Takes the lock of a directory. Other processes may test the lock for a moment, which is no use of the directory.
fn lock_soon(lock: &File) -> bool {
    for attempt in 0..LOCK_ATTEMPTS {
        if attempt > 0 {
            std::thread::sleep(LOCK_PAUSE);
        }
        if flock(lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            return true;
        }
    }
    false
}

/// Creates a missing directory, locks the directory, and checks or writes the format file.
///
/// # Errors
/// When the path is no directory, can't be written, is in use by another process, or holds another layout or block size.
pub fn open_root(path: &Path, block_size: u32) -> Result<CacheRoot> {
    if std::fs::symlink_metadata(path).is_ok_and(|m| !m.is_dir() && !m.is_symlink())
        || std::fs::metadata(path).is_ok_and(|m| !m.is_dir())
    {
        return Err(Error::new(
            ErrorKind::NotADirectory,
            format!("cache directory {} is not a directory; give another --cache-dir", path.display()),
        ));
    }
    let remedy = "make it writable for this user, or give another --cache-dir";
    std::fs::create_dir_all(path).map_err(|e| dir_error(path, "it can't be made", &e, remedy))?;
    let mut lock = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path.join(LOCK))
        .map_err(|e| dir_error(path, "it can't be written", &e, remedy))?;
    if !lock_soon(&lock) {
        let mut pid = String::new();
        let _ = lock.read_to_string(&mut pid);
        let pid = if pid.trim().is_empty() { "unknown" } else { pid.trim() };
        return Err(Error::new(
            ErrorKind::Unavailable,
            format!(
                "cache directory {} is in use by the process with pid {pid}; give each mount and node its own --cache-dir",
                path.display()
            ),
        ));
    }
    // A failed start may have removed the directory between the last two steps (`fresh`).
    let locked = lock.metadata().map_err(|e| dir_error(path, "its lock file can't be examined", &e, remedy))?;
    if std::fs::metadata(path.join(LOCK)).map_or(true, |named| named.ino() != locked.ino()) {
        let what = format!("cache directory {} was removed during the start; start again", path.display());
        return Err(Error::new(ErrorKind::Unavailable, what));
    }
    let written = lock.set_len(0).and_then(|()| lock.rewind()).and_then(|()| writeln!(lock, "{}", std::process::id()));
    // A full disk may refuse the pid; the lock holds without the pid.
    if let Err(error) = written {
        tracing::debug!("{}: the pid was not written to the lock file: {error}", path.display());
    }
    let id = check_format(path, block_size)?;
    std::fs::create_dir_all(path.join("data")).map_err(|e| dir_error(path, "its folders can't be made", &e, remedy))?;
    Ok(CacheRoot { id, dir_identity: std::fs::metadata(path).ok().map(|found| FileIdentity::new(&found)), lock })
}

/// Removes all that this store makes in a directory but its lock, and nothing else. The caller holds the lock.
pub fn remove_contents(path: &Path) -> std::io::Result<()> {
    for folder in std::fs::read_dir(path.join("data")).into_iter().flatten().flatten() {
        for file in std::fs::read_dir(folder.path()).into_iter().flatten().flatten() {
            if file.file_name().to_str().is_some_and(|name| parse_name(name).is_some()) {
                std::fs::remove_file(file.path())?;
            }
        }
        remove_if_empty(&folder.path())?;
    }
    remove_if_empty(&path.join("data"))?;
    [FORMAT_FILE, LOG_NAME, NEW_LOG_NAME, "probe"].iter().try_for_each(|name| remove_if_there(&path.join(name)))
}

/// Removes a file.
///
/// # Errors
/// The system's; none for a file that is not there.
pub fn remove_if_there(file: &Path) -> std::io::Result<()> {
    std::fs::remove_file(file).or_else(|error| if is_missing(&error) { Ok(()) } else { Err(error) })
}

/// Removes a directory unless something is in it.
fn remove_if_empty(dir: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir(dir) {
        Err(error) if !is_missing(&error) && error.kind() != std::io::ErrorKind::DirectoryNotEmpty => Err(error),
        _ => Ok(()),
    }
}

/// Allocates the probe's space while there is some: a disk that is merely full must not look broken in a probe.
pub fn reserve_probe(path: &Path) {
    if let Err(error) = allocate_probe(path) {
        tracing::debug!("{}: no room for the probe yet: {error}", path.display());
    }
}

fn allocate_probe(path: &Path) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(false).open(path.join("probe"))?;
    if file.metadata()?.len() < PROBE { file.write_all(&[0; PROBE as usize]) } else { Ok(()) }
}

fn check_format(path: &Path, block_size: u32) -> Result<u64> {
    let name = path.join(FORMAT_FILE);
    match std::fs::read_to_string(&name) {
        Ok(text) if !text.is_empty() => {
            let layout = format_value(&text, "layout");
            let size = format_value(&text, "block_size");
            let id = format_value(&text, "disk_id");
            if layout != Some(u64::from(LAYOUT_VERSION)) || id.is_none() {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "cache directory {} holds a cache of another layout than {LAYOUT_VERSION} ({}); empty it or give another \
                         --cache-dir",
                        path.display(),
                        text.lines().next().unwrap_or_default()
                    ),
                ));
            }
            if size != Some(u64::from(block_size)) {
                return Err(Error::new(
                    ErrorKind::Invalid,
                    format!(
                        "cache directory {} holds blocks of {size}, not of {}; give --block-size {size}, or empty the \
                         directory, or give another --cache-dir",
                        path.display(),
                        Size(u64::from(block_size)),
                        size = Size(size.unwrap_or(0)),
                    ),
                ));
            }
            Ok(id.unwrap_or_default())
        }
        Ok(_) => write_format(path, block_size),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => write_format(path, block_size),
        Err(error) => {
            Err(dir_error(path, "its format file can't be read", &error, "check its permissions and the disk"))
        }
    }
}

fn format_value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix('=')).and_then(|v| v.parse::<u64>().ok())
}

fn write_format(path: &Path, block_size: u32) -> Result<u64> {
    let mut seed = [0u8; 24];
    seed[..8].copy_from_slice(&std::process::id().to_le_bytes().repeat(2));
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    seed[8..].copy_from_slice(&since.as_nanos().to_le_bytes());
    let id =
        xxhash_rust::xxh3::xxh3_64_with_seed(path.as_os_str().as_encoded_bytes(), xxhash_rust::xxh3::xxh3_64(&seed));
    let text = format!("layout={LAYOUT_VERSION}\nblock_size={block_size}\ndisk_id={id}\n");
    replace_file(&path.join(FORMAT_FILE), text.as_bytes(), 0o644).map_err(|e| {
        dir_error(path, "its format file can't be written", &e, "free some space or give another --cache-dir")
    })?;
    Ok(id)
}

/// Expands `*` and `?` in the last parts of paths, sorted; a path without a pattern stays as it is.
///
/// # Errors
/// `NotFound` when a pattern matches no directory.
pub fn expand_dirs(patterns: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut out: Vec<PathBuf> = Vec::new();
    for pattern in patterns {
        if !pattern.as_os_str().as_encoded_bytes().iter().any(|b| matches!(b, b'*' | b'?')) {
            out.push(pattern.clone());
            continue;
        }
        let mut found = vec![PathBuf::new()];
        for part in pattern.components() {
            let part = part.as_os_str();
            if !part.as_encoded_bytes().iter().any(|b| matches!(b, b'*' | b'?')) {
                found.iter_mut().for_each(|p| p.push(part));
                continue;
            }
            found = found
                .iter()
                .flat_map(|dir| {
                    let list = std::fs::read_dir(if dir.as_os_str().is_empty() { Path::new(".") } else { dir });
                    list.into_iter()
                        .flatten()
                        .flatten()
                        .map(|e| (dir.join(e.file_name()), e.file_name()))
                        .collect::<Vec<_>>()
                })
                // Hidden names match only a pattern that begins with a dot itself, as in a shell.
                .filter(|(_, name)| part.as_encoded_bytes()[0] == b'.' || name.as_encoded_bytes()[0] != b'.')
                .filter(|(_, name)| matches_pattern(part.as_encoded_bytes(), name.as_encoded_bytes()))
                .map(|(path, _)| path)
                .collect();
        }
        found.retain(|p| p.is_dir());
        found.sort();
        if found.is_empty() {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!("cache directory pattern {} matches no directory; mount the disks first", pattern.display()),
            ));
        }
        out.append(&mut found);
    }
    Ok(out)
}

fn matches_pattern(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern.split_first(), name.split_first()) {
        (None, None) => true,
        (Some((b'*', rest)), _) => (0..=name.len()).any(|n| matches_pattern(rest, &name[n..])),
        (Some((b'?', rest)), Some((_, name))) => matches_pattern(rest, name),
        (Some((p, rest)), Some((n, name))) => p == n && matches_pattern(rest, name),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_back() {
        for key in [FileKey { object: ObjectId(u128::MAX / 3), tag: 0 }, FileKey { object: ObjectId(7), tag: 12 }] {
            let path = data_path(Path::new("/c"), &key);
            assert_eq!(parse_name(path.file_name().unwrap().to_str().unwrap()), Some(key), "{}", path.display());
        }
        for name in ["", "x", "00", "-", "0000000000000000000000000000000g", "00000000000000000000000000000000-x"] {
            assert_eq!(parse_name(name), None, "{name}");
        }
    }

    #[test]
    fn another_block_size_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let id = open_root(dir.path(), 1 << 20).unwrap().id;
        assert_eq!(open_root(dir.path(), 1 << 20).unwrap().id, id);
        let error = open_root(dir.path(), 4 << 20).unwrap_err();
        assert!(error.message().contains("holds blocks of 1M, not of 4M; give --block-size 1M"), "{error}");
        std::fs::write(dir.path().join("format"), "layout=9\n").unwrap();
        assert!(open_root(dir.path(), 1 << 20).unwrap_err().message().contains("another layout"));
    }

    #[test]
    fn bad_directories_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let error = open_root(&file, 1 << 20).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotADirectory);
        assert!(error.message().contains("--cache-dir"), "{error}");
        assert!(open_root(&file.join("below"), 1 << 20).unwrap_err().message().contains("--cache-dir"));
        let held = open_root(&dir.path().join("c"), 1 << 20).unwrap();
        let error = open_root(&dir.path().join("c"), 1 << 20).unwrap_err();
        assert!(error.message().contains(&format!("pid {}", std::process::id())), "{error}");
        drop(held);
        assert!(open_root(&dir.path().join("c"), 1 << 20).is_ok());
    }

    #[test]
    fn patterns() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["disk1", "disk2", "other", ".disk3"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        let found = expand_dirs(&[dir.path().join("disk*"), dir.path().join("new")]).unwrap();
        assert_eq!(found, ["disk1", "disk2", "new"].map(|n| dir.path().join(n)));
        assert_eq!(expand_dirs(&[dir.path().join("*")]).unwrap().len(), 3);
        assert!(expand_dirs(&[dir.path().join("none?")]).is_err());
    }
}
