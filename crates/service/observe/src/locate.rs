//! Finds the admin socket of a mount or node, and the mount that contains a path. Reads mount tables below `/proc` and parses
//! paths, and never accesses a mount, which may hang.

use crate::client::AdminPeer;
use crate::dial;
use spurline_sys::{MountEntry, MountTable};
use spurline_types::{Error, ErrorKind, IoContext, Result};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

/// The file system type of a Spurline mount in the mount table (`subtype=spurline`).
pub const FS_TYPE: &str = "fuse.spurline";
/// Overrides the directory of admin sockets.
pub const RUNTIME_DIR_ENV: &str = "SPURLINE_RUNTIME_DIR";

/// The name of our runtime directory.
const RUNTIME_DIR_NAME: &str = "spurline";

/// The parent of the runtime directories of systemd's units, and the start of the names of ours: `RuntimeDirectory=spurline-node`.
const SERVICE_DIRS_PARENT: &str = "/run";
const SERVICE_DIR_PREFIX: &[u8] = b"spurline-";

/// Deadline of the status query for a process that may be about to mount.
const DETACHED_ANSWER: Duration = Duration::from_secs(5);

/// A Spurline mount in the mount table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpurlineMount {
    /// The mountpoint.
    pub mountpoint: PathBuf,
    /// The source.
    pub source: String,
    /// The user that mounted.
    pub uid: u32,
    /// The minor number of the device: the connection's name below /sys/fs/fuse/connections.
    pub minor: u32,
    /// Whether users other than `uid` may use the mount.
    pub allow_other: bool,
    /// Whether the mount is read-only.
    pub read_only: bool,
}

/// The Spurline mounts of this mount namespace, the latest last.
///
/// # Errors
/// When /proc is not mounted.
pub fn list_mounts() -> Result<Vec<SpurlineMount>> {
    let table = MountTable::read().map_err(|e| Error::io("/proc/self/mountinfo", &e))?;
    Ok(spurline_mounts(&table))
}

/// Whether the process behind `socket` no longer has a mount at `mountpoint`: detached while files were open. Read from that
/// process's mount table, since the process may be in another namespace. False if that is not readable, or if the process is
/// about to mount.
pub fn is_detached(socket: &Path, mountpoint: &Path) -> bool {
    let Some(process) = dial::listener_process(socket) else { return false };
    let table = MountTable::read_file(Path::new(&format!("/proc/{}/mountinfo", process.as_raw_pid())));
    table.is_ok_and(|table| !spurline_mounts(&table).iter().any(|mount| mount.mountpoint == mountpoint)) && {
        let peer = AdminPeer::Socket(socket.to_owned(), None);
        peer.fetch_status(DETACHED_ANSWER).is_ok_and(|status| !status.is_starting())
    }
}

fn spurline_mounts(table: &MountTable) -> Vec<SpurlineMount> {
    let ours = table.entries().iter().filter(|entry| entry.fstype == FS_TYPE);
    ours.map(SpurlineMount::from_entry).collect()
}

impl SpurlineMount {
    fn from_entry(entry: &MountEntry) -> Self {
        SpurlineMount {
            mountpoint: entry.mountpoint.clone(),
            source: entry.source.clone(),
            uid: entry.option("user_id").and_then(|uid| uid.parse().ok()).unwrap_or(0),
            minor: entry.device.1,
            allow_other: entry.has_option("allow_other"),
            read_only: entry.has_option("ro"),
        }
    }
}

/// A path divided into the containing mount and the rest, without a leading slash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedPath {
    /// The mount.
    pub mount: SpurlineMount,
    /// The path below the mountpoint; empty for the mountpoint itself.
    pub below: Vec<u8>,
}

/// Limit of symbolic links in a path, as in the kernel.
const MAX_PATH_LINKS: usize = 40;

/// Finds the mount that contains `path`. Symbolic links before the mountpoint are followed; nothing below is accessed. `None`
/// when the path is in no Spurline mount.
pub fn locate_mount(path: &Path, mounts: &[SpurlineMount]) -> Option<LocatedPath> {
    let mut rest: Vec<OsString> = Vec::new();
    push_parts(&mut rest, path);
    if path.is_relative() {
        push_parts(&mut rest, &std::env::current_dir().ok()?);
    }
    let mut at = PathBuf::from("/");
    let mut links = 0;
    loop {
        // The mount made last covers the others.
        if let Some(mount) = mounts.iter().rev().find(|m| m.mountpoint == at) {
            let mut below = PathBuf::new();
            while let Some(part) = rest.pop() {
                if part == ".." {
                    if !below.pop() {
                        // The path leaves the mount; continue from the mountpoint's parent.
                        at.pop();
                        break;
                    }
                } else {
                    below.push(part);
                }
            }
            if rest.is_empty() && at == mount.mountpoint {
                return Some(LocatedPath { mount: mount.clone(), below: below.into_os_string().into_vec() });
            }
            continue;
        }
        let part = rest.pop()?;
        if part == ".." {
            at.pop();
            continue;
        }
        at.push(part);
        if mounts.iter().any(|m| m.mountpoint == at) {
            continue;
        }
        if let Ok(link) = std::fs::read_link(&at) {
            links += 1;
            if links > MAX_PATH_LINKS {
                return None;
            }
            push_parts(&mut rest, &link);
            if link.is_absolute() {
                at = PathBuf::from("/");
            } else {
                at.pop();
            }
        }
    }
}

/// The owner of an admin socket.
#[derive(Debug, Clone, Copy)]
pub enum SocketOwner<'a> {
    /// The mount at this canonical path.
    Mount(&'a Path),
    /// The node at this address.
    Node(&'a str),
}

impl SocketOwner<'_> {
    /// The socket's name in a runtime directory.
    pub fn file_name(self) -> String {
        match self {
            SocketOwner::Mount(path) => {
                format!("mount-{:032x}.sock", xxhash_rust::xxh3::xxh3_128(path.as_os_str().as_bytes()))
            }
            SocketOwner::Node(address) => {
                format!(
                    "node-{}.sock",
                    address
                        .chars()
                        .map(|c| if c.is_ascii_alphanumeric() || c == '.' || c == '-' { c } else { '_' })
                        .collect::<String>()
                )
            }
        }
    }
}

/// The possible directories of user `uid`'s admin sockets, the likeliest first.
pub fn runtime_dirs(uid: u32) -> Vec<PathBuf> {
    let named = named_dir().into_iter().flat_map(|dir| [dir.clone(), dir.join(RUNTIME_DIR_NAME)]);
    named.chain(own_dirs(uid)).chain(service_dirs(uid)).collect()
}

/// The directories of packaged units, for root: their processes run as a user of their own. Only root makes directories there.
fn service_dirs(uid: u32) -> Vec<PathBuf> {
    if uid == 0 { service_dirs_in(Path::new(SERVICE_DIRS_PARENT)) } else { Vec::new() }
}

fn service_dirs_in(parent: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().as_bytes().starts_with(SERVICE_DIR_PREFIX));
    let found = named.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut dirs: Vec<PathBuf> = found.map(|entry| entry.path()).collect();
    dirs.sort();
    dirs
}

/// The directory given in the environment, which may hold other files too.
fn named_dir() -> Option<PathBuf> {
    env_path(RUNTIME_DIR_ENV)
}

fn env_path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute())
}

/// The directories that bear our name.
fn own_dirs(uid: u32) -> Vec<PathBuf> {
    if uid == 0 {
        return vec![Path::new("/run").join(RUNTIME_DIR_NAME)];
    }
    let here = (uid == rustix::process::geteuid().as_raw()).then(|| env_path("XDG_RUNTIME_DIR")).flatten();
    let session =
        here.into_iter().chain([PathBuf::from(format!("/run/user/{uid}"))]).map(|dir| dir.join(RUNTIME_DIR_NAME));
    session.chain([PathBuf::from(format!("/tmp/{RUNTIME_DIR_NAME}-{uid}"))]).collect()
}

/// The possible paths of the socket of `owner`, run by user `uid`.
pub fn socket_candidates(owner: SocketOwner<'_>, uid: u32) -> Vec<PathBuf> {
    runtime_dirs(uid).into_iter().map(|dir| dir.join(owner.file_name())).collect()
}

/// The required owner of a socket among this user's [`socket_candidates`]. In a directory given in the environment or of a
/// packaged unit, that directory's owner.
pub fn required_owner(socket: &Path) -> u32 {
    let user = rustix::process::geteuid().as_raw();
    let of_others = named_dir().into_iter().chain(service_dirs(user)).find(|dir| socket.starts_with(dir));
    of_others.and_then(|dir| std::fs::metadata(dir).ok()).map_or(user, |dir| dir.uid())
}

/// Makes this user's private runtime directory.
///
/// # Errors
/// When no such directory can be made, or another user owns the existing directory.
pub fn make_runtime_dir() -> Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    let mut last = Error::new(ErrorKind::NotFound, "no runtime directory");
    let named = named_dir().into_iter().map(|dir| private_in(dir, uid));
    for made in named.chain(own_dirs(uid).into_iter().map(|dir| make_private(&dir, uid).map(|()| dir))) {
        match made {
            Ok(dir) => return Ok(dir),
            Err(error) => last = error,
        }
    }
    Err(last.context(format!("this user has no private runtime directory; set {RUNTIME_DIR_ENV} to one")))
}

/// Makes the directory, and returns the path of `owner`'s socket there.
///
/// # Errors
/// As [`make_runtime_dir`].
pub fn make_socket_path(owner: SocketOwner<'_>) -> Result<PathBuf> {
    Ok(make_runtime_dir().map_err(|e| e.context("the admin socket"))?.join(owner.file_name()))
}

/// A directory given in the environment, or a directory below if others may read there. The permissions stay unchanged: `/run` or
/// `/tmp` serves the whole machine.
fn private_in(dir: PathBuf, uid: u32) -> Result<PathBuf> {
    if !make_dir(&dir, uid)? {
        return Ok(dir);
    }
    let below = dir.join(RUNTIME_DIR_NAME);
    make_private(&below, uid).map(|()| below)
}

/// A directory that bears our name, made private.
fn make_private(dir: &Path, uid: u32) -> Result<()> {
    if make_dir(dir, uid)? {
        let private = std::fs::Permissions::from_mode(0o700);
        std::fs::set_permissions(dir, private).map_err(|e| Error::io(dir.display(), &e))?;
    }
    Ok(())
}

/// Makes a directory of user `uid` if missing. Returns whether other users may enter an existing directory.
fn make_dir(dir: &Path, uid: u32) -> Result<bool> {
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(Error::io(dir.display(), &e)),
        _ => {}
    }
    let meta = std::fs::symlink_metadata(dir).io_context(dir.display())?;
    if !meta.is_dir() || meta.uid() != uid {
        let text = format!("{} is not a directory of user {uid}", dir.display());
        return Err(Error::new(ErrorKind::PermissionDenied, text));
    }
    Ok(meta.permissions().mode() & 0o077 != 0)
}

fn push_parts(rest: &mut Vec<OsString>, path: &Path) {
    for part in path.components().rev() {
        match part {
            Component::Normal(name) => rest.push(name.to_owned()),
            Component::ParentDir => rest.push("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(at: &Path) -> SpurlineMount {
        SpurlineMount {
            mountpoint: at.to_owned(),
            source: "s".into(),
            uid: 0,
            minor: 0,
            allow_other: false,
            read_only: true,
        }
    }

    #[test]
    fn mount_table() {
        let text = b"36 35 98:0 /mnt1 /a rw,noatime master:1 - ext3 /dev/root rw\n\
            40 35 0:50 / /mnt/with\\040blank ro,nosuid - fuse.spurline s3://b/a\\011b ro,user_id=1000,group_id=0\n\
            broken line\n41 35 0:51 / /m rw shared:3 - fuse.spurline file:///x rw\n";
        let found = spurline_mounts(&MountTable::parse(text));
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].mountpoint, Path::new("/mnt/with blank"));
        assert_eq!(found[0].minor, 50);
        assert_eq!((found[0].source.as_str(), found[0].uid), ("s3://b/a\tb", 1000));
        assert_eq!(found[1].mountpoint, Path::new("/m"));
    }

    #[test]
    fn paths_are_located_without_touching_the_mount() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().canonicalize().unwrap();
        // The mountpoint does not exist, so any access to it would fail.
        let point = base.join("real/m");
        std::fs::create_dir(base.join("real")).unwrap();
        std::os::unix::fs::symlink("real", base.join("link")).unwrap();
        std::os::unix::fs::symlink(&point, base.join("direct")).unwrap();
        std::os::unix::fs::symlink("loop", base.join("loop")).unwrap();
        let mounts = [mount(Path::new("/other")), mount(&point)];
        let below = |path: &str| {
            locate_mount(&base.join(path), &mounts).map(|l| (l.mount.mountpoint, String::from_utf8(l.below).unwrap()))
        };
        let hit = |rest: &str| Some((point.clone(), rest.to_owned()));
        assert_eq!(below("real/m"), hit(""));
        assert_eq!(below("real/m/a/./b"), hit("a/b"));
        assert_eq!(below("link/m/a/../b"), hit("b"));
        assert_eq!(below("direct/x"), hit("x"));
        assert_eq!(below("real/m/../m/x"), hit("x"));
        assert_eq!(below("real/m/../elsewhere"), None);
        assert_eq!(below("real"), None);
        assert_eq!(below("loop/x"), None);
    }

    #[test]
    fn socket_names() {
        assert_eq!(SocketOwner::Node("[::1]:7000").file_name(), "node-___1__7000.sock");
        let a = SocketOwner::Mount(Path::new("/a")).file_name();
        assert!(a.starts_with("mount-") && a != SocketOwner::Mount(Path::new("/b")).file_name());
    }

    #[test]
    fn root_looks_into_the_directories_of_packaged_units() {
        let run = tempfile::tempdir().unwrap();
        for name in ["spurline-node", "spurline-gateway-data", "spurline", "other"] {
            std::fs::create_dir(run.path().join(name)).unwrap();
        }
        std::fs::write(run.path().join("spurline-file"), b"").unwrap();
        std::os::unix::fs::symlink("other", run.path().join("spurline-link")).unwrap();
        let found = service_dirs_in(run.path());
        assert_eq!(found, ["spurline-gateway-data", "spurline-node"].map(|name| run.path().join(name)));
        assert_eq!(service_dirs(1000), Vec::<PathBuf>::new());
    }

    #[test]
    fn a_directory_of_another_user_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("spurline");
        let uid = rustix::process::geteuid().as_raw();
        std::fs::create_dir(&place).unwrap();
        make_private(&place, uid).unwrap();
        assert_eq!(std::fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(make_private(&place, uid + 1).is_err());
        std::os::unix::fs::symlink(&place, dir.path().join("link")).unwrap();
        assert!(make_private(&dir.path().join("link"), uid).is_err());
    }

    #[test]
    fn the_rights_of_a_directory_that_was_named_stay_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let shared = dir.path().join("shared");
        let uid = rustix::process::geteuid().as_raw();
        let mode = |dir: &Path| std::fs::metadata(dir).unwrap().permissions().mode() & 0o7777;
        let allow = |mode| std::fs::set_permissions(&shared, std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::create_dir(&shared).unwrap();
        allow(0o1777);
        let below = private_in(shared.clone(), uid).unwrap();
        assert_eq!((&below, mode(&shared), mode(&below)), (&shared.join("spurline"), 0o1777, 0o700));
        // Another user's entry below it is not used.
        std::fs::remove_dir(&below).unwrap();
        std::os::unix::fs::symlink("/", &below).unwrap();
        assert!(private_in(shared.clone(), uid).is_err());
        allow(0o700);
        assert_eq!(private_in(shared.clone(), uid).unwrap(), shared);
        // A new directory is private.
        let new = shared.join("new");
        assert_eq!((private_in(new.clone(), uid).unwrap(), mode(&new)), (new, 0o700));
    }
}
