//! Reads the kernel's mount table. It never touches a mount itself, so a hung one can't hang it.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::{env, fs, io};

/// One line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Device number, major and minor; the minor names a FUSE connection in sysfs.
    pub device: (u32, u32),
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// File system type, `fuse.spurline` for ours.
    pub fstype: String,
    /// What was mounted, `fsname` for ours.
    pub source: String,
}

impl MountEntry {
    /// Whether it is a FUSE mount of any kind.
    pub fn is_fuse(&self) -> bool {
        self.fstype == "fuse" || self.fstype.starts_with("fuse.")
    }
}

/// The mount seen at `path`: the topmost one, should there be several. `path` as [`absolute`] gives it.
///
/// # Errors
/// When the mount table can't be read.
pub fn mounted_at(path: &Path) -> io::Result<Option<MountEntry>> {
    Ok(parse(&fs::read("/proc/self/mountinfo")?).into_iter().rfind(|m| m.mountpoint == path))
}

/// `path` without symbolic links, found without touching its last part, which may be a mount that hangs.
/// (A last part that is itself a symbolic link is followed, unless something is mounted there.)
///
/// # Errors
/// When a directory on the way does not exist or may not be searched.
pub fn absolute(path: &Path) -> io::Result<PathBuf> {
    let path = env::current_dir()?.join(path);
    let Some(Component::Normal(last)) = path.components().next_back() else { return fs::canonicalize(path) };
    let parent = path.parent().unwrap_or(Path::new("/"));
    let found = fs::canonicalize(parent)?.join(last);
    match mounted_at(&found)? {
        Some(_) => Ok(found),
        // Only now is it safe to look at the last part: nothing is mounted on it.
        None => match fs::read_link(&found) {
            Ok(target) => absolute(&found.parent().unwrap_or(Path::new("/")).join(target)),
            Err(_) => Ok(found),
        },
    }
}

fn parse(table: &[u8]) -> Vec<MountEntry> {
    let line = |line: &[u8]| -> Option<MountEntry> {
        let mut words = line.split(|b| *b == b' ');
        let device = std::str::from_utf8(words.nth(2)?).ok()?;
        let (major, minor) = device.split_once(':')?;
        let mountpoint = unescape(words.nth(1)?);
        let mut rest = words.skip_while(|w| *w != b"-").skip(1);
        let text = |word: &[u8]| unescape(word).to_string_lossy().into_owned();
        Some(MountEntry {
            device: (major.parse().ok()?, minor.parse().ok()?),
            mountpoint: mountpoint.into(),
            fstype: text(rest.next()?),
            source: text(rest.next()?),
        })
    };
    table.split(|b| *b == b'\n').filter_map(line).collect()
}

/// Undoes the kernel's `\040` for space, tab, newline and backslash.
fn unescape(word: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(word.len());
    let mut at = 0;
    while at < word.len() {
        let octal =
            word.get(at + 1..at + 4).filter(|d| word[at] == b'\\' && d.iter().all(|b| (b'0'..b'8').contains(b)));
        if let Some(d) = octal {
            out.push(d.iter().fold(0u32, |n, b| n * 8 + u32::from(b - b'0')) as u8);
            at += 4;
        } else {
            out.push(word[at]);
            at += 1;
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let table = b"22 27 0:20 / /proc rw,nosuid - proc proc rw\n\
            90 27 0:51 / /mnt/a\\040b\\134 ro shared:5 master:2 - fuse.spurline s3://b\\054 ro,user_id=0\n\
            garbage\n1 2 x:y / / rw - t s o\n";
        let mounts = parse(table);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[1].mountpoint, Path::new("/mnt/a b\\"));
        assert_eq!((mounts[1].device, mounts[1].is_fuse(), mounts[1].source.as_str()), ((0, 51), true, "s3://b,"));
    }

    #[test]
    fn paths() {
        let dir = tempfile::tempdir().unwrap();
        let dir = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(dir.join("d")).unwrap();
        std::os::unix::fs::symlink("d", dir.join("link")).unwrap();
        assert_eq!(absolute(&dir.join("link")).unwrap(), dir.join("d"));
        assert_eq!(absolute(&dir.join("d/..")).unwrap(), dir);
        assert_eq!(absolute(&dir.join("none")).unwrap(), dir.join("none"));
        assert!(absolute(&dir.join("none/none")).is_err());
        assert!(mounted_at(Path::new("/proc")).unwrap().is_some());
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(table in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            let _ = parse(&table);
        }
    }
}
