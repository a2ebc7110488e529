//! Reads the kernel's mount table. Accesses no mount, so a hung mount cannot block the reader.

use crate::octal::unescape_octal;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};
use std::{env, fs, io};

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// The mount's id, unchanged by a move; reused after the end.
    pub id: u32,
    /// The id of the parent mount.
    pub parent: u32,
    /// Device number, major and minor; the minor is the name of a FUSE connection in sysfs.
    pub device: (u32, u32),
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// File system type, `fuse.spurline` for ours.
    pub fstype: String,
    /// The source, `fsname` for ours.
    pub source: String,
    /// Options of the mountpoint, such as `rw,nosuid`.
    pub flags: String,
    /// Options of the file system, such as `rw,user_id=0`; an NFS mount has the server's address here.
    pub options: String,
}

impl MountEntry {
    /// Whether this is a FUSE mount of any kind.
    pub fn is_fuse(&self) -> bool {
        self.fstype == "fuse" || self.fstype.starts_with("fuse.")
    }

    /// Whether the file system has this option.
    pub fn has_option(&self, name: &str) -> bool {
        self.options.split(',').any(|option| option == name)
    }

    /// The value of the file system's option `name=VALUE`.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.options.split(',').find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
    }
}

/// A snapshot of the mounts in the namespace of a process.
#[derive(Debug, Default)]
pub struct MountTable(Vec<MountEntry>);

impl MountTable {
    /// Reads the table of this process.
    ///
    /// # Errors
    /// When /proc is not mounted.
    pub fn read() -> io::Result<MountTable> {
        MountTable::read_file(Path::new("/proc/self/mountinfo"))
    }

    /// Reads the table of a process, or of another host, from the file `mountinfo`.
    ///
    /// # Errors
    /// When the file can't be read.
    pub fn read_file(mountinfo: &Path) -> io::Result<MountTable> {
        Ok(MountTable::parse(&fs::read(mountinfo)?))
    }

    /// The table in the text of a `mountinfo`; lines that are none are left out.
    pub fn parse(mountinfo: &[u8]) -> MountTable {
        MountTable(parse_mountinfo(mountinfo))
    }

    /// All entries in the order of mounting, covered entries included.
    pub fn entries(&self) -> &[MountEntry] {
        &self.0
    }

    /// The mount that serves `path`: the topmost mount there, else the mount that contains the path. `None` if that mount is not
    /// listed, as in a chroot. `path` has no symbolic links, as returned by `resolve_mountpoint`.
    pub fn seen_at(&self, path: &Path) -> Option<&MountEntry> {
        let mut now: Option<&MountEntry> = None;
        let mut at = PathBuf::new();
        for part in path.components() {
            at.push(part);
            // A mount over the root is invisible to a process whose root lies below; a process with the upper root does not list
            // the lower mounts.
            let most = if part == Component::RootDir { 1 } else { self.0.len() };
            for _ in 0..most {
                let Some(next) = self.0.iter().find(|m| m.mountpoint == at && self.lies_on(m, now)) else { break };
                now = Some(next);
            }
        }
        now
    }

    /// Whether `mount` lies on `base`, or on no listed mount.
    fn lies_on(&self, mount: &MountEntry, base: Option<&MountEntry>) -> bool {
        match base {
            Some(base) => mount.parent == base.id && mount.id != base.id,
            None => mount.parent == mount.id || !self.0.iter().any(|m| m.id == mount.parent),
        }
    }
}

/// The topmost mount at `path`. `path` is as returned by `resolve_mountpoint`.
///
/// # Errors
/// When the mount table cannot be read.
pub fn mounted_at(path: &Path) -> io::Result<Option<MountEntry>> {
    Ok(MountTable::read()?.seen_at(path).filter(|m| m.mountpoint == path).cloned())
}

/// `path` without symbolic links, found without touching the last part, which may be a mount that hangs. (A last part that is a
/// symbolic link is followed, unless something is mounted there.)
///
/// # Errors
/// When a directory on the way does not exist or may not be searched.
pub fn resolve_mountpoint(path: &Path) -> io::Result<PathBuf> {
    let path = env::current_dir()?.join(path);
    let Some(Component::Normal(last)) = path.components().next_back() else { return fs::canonicalize(path) };
    let parent = path.parent().unwrap_or(Path::new("/"));
    let found = fs::canonicalize(parent)?.join(last);
    match mounted_at(&found)? {
        Some(_) => Ok(found),
        // Only now is it safe to access the last component: nothing is mounted there.
        None => match fs::read_link(&found) {
            Ok(target) => resolve_mountpoint(&found.parent().unwrap_or(Path::new("/")).join(target)),
            Err(_) => Ok(found),
        },
    }
}

fn parse_mountinfo(table: &[u8]) -> Vec<MountEntry> {
    table.split(|b| *b == b'\n').filter_map(mount_entry_of_line).collect()
}

fn mount_entry_of_line(line: &[u8]) -> Option<MountEntry> {
    let mut words = line.split(|b| *b == b' ');
    let id = number_of_word(words.next())?;
    let parent = number_of_word(words.next())?;
    let device = std::str::from_utf8(words.next()?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let mountpoint = OsString::from_vec(unescape_octal(words.nth(1)?));
    let flags = unescaped_text(words.next()?);
    let mut rest = words.skip_while(|w| *w != b"-").skip(1);
    Some(MountEntry {
        id,
        parent,
        device: (major.parse().ok()?, minor.parse().ok()?),
        mountpoint: mountpoint.into(),
        fstype: unescaped_text(rest.next()?),
        source: unescaped_text(rest.next()?),
        flags,
        options: rest.next().map(unescaped_text).unwrap_or_default(),
    })
}

fn number_of_word(word: Option<&[u8]>) -> Option<u32> {
    std::str::from_utf8(word?).ok()?.parse().ok()
}

fn unescaped_text(word: &[u8]) -> String {
    String::from_utf8_lossy(&unescape_octal(word)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines() {
        let table = b"22 27 0:20 / /proc rw,nosuid - proc proc rw\n\
            90 27 0:51 / /mnt/a\\040b\\134 ro shared:5 master:2 - fuse.spurline s3://b\\054 ro,user_id=0\n\
            garbage\n1 2 x:y / / rw - t s o\n";
        let mounts = parse_mountinfo(table);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[1].mountpoint, Path::new("/mnt/a b\\"));
        assert_eq!((mounts[1].device, mounts[1].is_fuse(), mounts[1].source.as_str()), ((0, 51), true, "s3://b,"));
        assert_eq!((mounts[0].flags.as_str(), mounts[0].options.as_str()), ("rw,nosuid", "rw"));
        assert!(mounts[1].has_option("ro") && !mounts[1].has_option("user_id"));
        assert_eq!((mounts[1].option("user_id"), mounts[1].option("user")), (Some("0"), None));
    }

    #[test]
    fn what_is_seen_at_a_path() {
        let table = MountTable(parse_mountinfo(
            b"22 1 8:1 / / rw - ext4 root rw\n\
            30 22 0:30 / /a rw - tmpfs below rw\n\
            31 30 0:31 / /a/x rw - fuse.spurline hidden rw\n\
            32 30 0:32 / /a rw - tmpfs above rw\n\
            34 22 0:34 / /m rw - tmpfs first rw\n\
            33 34 0:33 / /m rw - fuse.spurline moved rw\n\
            35 33 0:35 / /m/in rw - tmpfs inner rw\n\
            36 22 0:36 / / rw - tmpfs later rw\n",
        ));
        let seen = |path: &str| table.seen_at(Path::new(path)).map(|m| m.source.as_str());
        assert_eq!(seen("/"), Some("root"));
        assert_eq!(seen("/none/x"), Some("root"));
        assert_eq!((seen("/a"), seen("/a/x")), (Some("above"), Some("above")));
        assert_eq!((seen("/m"), seen("/m/in/y"), seen("/min")), (Some("moved"), Some("inner"), Some("root")));
        // The root of a chroot is no mount.
        let table =
            MountTable(parse_mountinfo(b"40 7 0:40 / /m rw - tmpfs one rw\n41 40 0:41 / /m rw - tmpfs two rw\n"));
        assert_eq!(table.seen_at(Path::new("/m/x")).map(|m| m.id), Some(41));
        assert_eq!(table.seen_at(Path::new("/n")), None);
        // A table that no kernel writes.
        let table = MountTable(parse_mountinfo(b"1 2 0:1 / /m rw - t s rw\n2 1 0:2 / /m rw - t s rw\n"));
        assert_eq!(table.seen_at(Path::new("/m")), None);
    }

    #[test]
    fn paths() {
        let dir = tempfile::tempdir().unwrap();
        let dir = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(dir.join("d")).unwrap();
        std::os::unix::fs::symlink("d", dir.join("link")).unwrap();
        assert_eq!(resolve_mountpoint(&dir.join("link")).unwrap(), dir.join("d"));
        assert_eq!(resolve_mountpoint(&dir.join("d/..")).unwrap(), dir);
        assert_eq!(resolve_mountpoint(&dir.join("none")).unwrap(), dir.join("none"));
        assert!(resolve_mountpoint(&dir.join("none/none")).is_err());
        assert!(mounted_at(Path::new("/proc")).unwrap().is_some());
    }

    proptest::proptest! {
        #[test]
        fn garbage_never_panics(table in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
            let _ = MountTable(parse_mountinfo(&table)).seen_at(Path::new("/m"));
        }
    }
}
