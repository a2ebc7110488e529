//! Changes a directory: each operation is the same system call below the source's root, made as the calling process,
//! so that POSIX is the source's own. It knows no inode table and no cache.
//!
//! Calls block on the caller's thread, because the identity is the thread's. While a file server does not respond,
//! its calls hang, as they do in a program that uses the directory itself; the read side, which has deadlines, does
//! not.

use crate::caller_identity::{AssumedIdentity, CallerIdentities, Squash, failed};
use crate::object_identity::{RootDevice, change_attr, check_access};
use crate::open_versions::{OpenVersions, is_on_network};
use crate::source_mount::open_tree_with_times;
use crate::writable_file::{FileContext, SourceDirectory, SourceFile, remove_xattr};
use parking_lot::RwLock;
use rustix::fd::{AsFd as _, BorrowedFd, OwnedFd};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, XattrFlags};
use rustix::io::Errno;
use spurline_origin::own_clock;
use spurline_sys::{open_by_parts, proc_path, read_growing, show_path};
use spurline_types::{AccessTimes, Error, ErrorKind, Result};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::hand_over::{HandOver, LeftOpen, OpenHold, RepeatRule, not_left};
use spurline_volume::kept_files::KeptFiles;
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange, mark_access_time, outcome_by_names};
use spurline_volume::writes::{
    AttrChange, Caller, Change, CreatedFile, FileIdentity, NamePath, NodeAttr, NodePath, SourceSpace,
    WritableDirectory, WritableFile, WritableVolume,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The longest path of one system call, less its NUL.
const PATH_PIECE: usize = 4000;
/// Retries of a call that lost a race with a rename.
const RACES: usize = 64;

/// The open root of a source.
struct SourceRoot {
    fd: OwnedFd,
    device: RootDevice,
}

/// A directory to change.
pub struct WritableSource {
    path: PathBuf,
    access_times: AccessTimes,
    /// Kept open, so that the directory stays the same one; opened again when its server has lost it.
    root: RwLock<Arc<SourceRoot>>,
    identities: Arc<CallerIdentities>,
    capabilities: WriteCapabilities,
    versions: Arc<OpenVersions>,
    no_openat2: AtomicBool,
}

impl WritableSource {
    /// Whether the directory at `path` is on this host, so that its own files are as near as a cache.
    pub fn is_near(path: &Path) -> bool {
        open_root(path, AccessTimes::OfSource).is_ok_and(|root| !is_on_network(root.fd.as_fd()))
    }

    /// Opens the directory at `path` for changes. Its files are read through caches if it is on a network file system.
    ///
    /// # Errors
    /// `PermissionDenied` when this process can't act for its callers; `ReadOnly`; the system's error.
    pub fn open(path: &Path, squash: Option<Squash>) -> Result<Arc<WritableSource>> {
        WritableSource::open_with_times(path, squash, AccessTimes::OfSource)
    }

    /// As [`WritableSource::open`], with a rule for access times.
    pub fn open_with_times(path: &Path, squash: Option<Squash>, times: AccessTimes) -> Result<Arc<WritableSource>> {
        WritableSource::open_with(path, squash, times, is_on_network)
    }

    /// As [`WritableSource::open`], for a node, whose readers are on other hosts: they read through caches in any case.
    pub fn open_for_node(path: &Path, squash: Option<Squash>) -> Result<Arc<WritableSource>> {
        WritableSource::open_with(path, squash, AccessTimes::OfSource, |_| true)
    }

    fn open_with(
        path: &Path,
        squash: Option<Squash>,
        access_times: AccessTimes,
        reads_through_cache: impl FnOnce(BorrowedFd<'_>) -> bool,
    ) -> Result<Arc<WritableSource>> {
        let what = format!("the source directory '{}'", path.display());
        let root = open_root(path, access_times).map_err(|errno| failed(&what, errno))?;
        let space = rustix::fs::fstatvfs(&root.fd).map_err(|errno| failed(&what, errno))?;
        if space.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY) {
            return Err(Error::new(
                ErrorKind::ReadOnly,
                format!("{what} is on a file system that is mounted read-only"),
            ));
        }
        let identities = Arc::new(CallerIdentities::new(squash)?);
        let capabilities = find_capabilities(root.fd.as_fd());
        let versions = OpenVersions::new(reads_through_cache(root.fd.as_fd()));
        let root = RwLock::new(Arc::new(root));
        Ok(Arc::new(WritableSource {
            path: path.to_path_buf(),
            access_times,
            root,
            identities,
            capabilities,
            versions,
            no_openat2: AtomicBool::new(false),
        }))
    }

    /// Whether every user's calls are made with the right identity; otherwise only those of this process's user.
    pub fn serves_all_users(&self) -> bool {
        self.identities.serves_all_users()
    }

    fn root(&self) -> Arc<SourceRoot> {
        Arc::clone(&self.root.read())
    }

    /// Opens the root again after its server has lost it.
    fn reopen_root(&self) {
        if let Ok(root) = open_root(&self.path, self.access_times) {
            *self.root.write() = Arc::new(root);
        }
    }

    /// Opens `path` below the root; no link is followed.
    fn open_beneath(&self, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let root = self.root();
        if path.is_empty() {
            return rustix::fs::openat(&root.fd, c".", flags, Mode::empty());
        }
        let (mut at, mut rest): (Option<OwnedFd>, &[u8]) = (None, path);
        loop {
            let end = match rest.len() {
                0..=PATH_PIECE => rest.len(),
                _ => rest[..PATH_PIECE].iter().rposition(|byte| *byte == b'/').ok_or(Errno::NAMETOOLONG)?,
            };
            let (piece, left) = rest.split_at(end);
            let last = left.is_empty();
            let piece_flags = if last { flags } else { OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC };
            let dir = at.as_ref().map_or(root.fd.as_fd(), |fd| fd.as_fd());
            let opened = self.open_piece(dir, piece, piece_flags)?;
            if last {
                return Ok(opened);
            }
            at = Some(opened);
            rest = &left[1..];
        }
    }

    fn open_piece(&self, dir: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        if !self.no_openat2.load(Ordering::Relaxed) {
            let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
            for _ in 0..RACES {
                match rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve) {
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    // A directory on the way was replaced by a link or a mount.
                    Err(Errno::LOOP | Errno::XDEV) => return Err(Errno::STALE),
                    Err(Errno::NOSYS) => {
                        self.no_openat2.store(true, Ordering::Relaxed);
                        break;
                    }
                    answer => return answer,
                }
            }
        }
        open_by_parts(dir.try_clone_to_owned().map_err(|_| Errno::MFILE)?, path, flags)
    }

    /// The device of the root as it is open now.
    fn root_device(&self) -> RootDevice {
        self.root.read().device
    }

    fn stat_fd(&self, fd: BorrowedFd<'_>) -> rustix::io::Result<NodeAttr> {
        self.root_device().stat_fd(fd)
    }

    fn stat_name(&self, dir: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<NodeAttr> {
        self.root_device().stat_name(dir, name)
    }

    fn verify(&self, fd: BorrowedFd<'_>, expected: Option<FileIdentity>) -> rustix::io::Result<()> {
        self.root_device().verify(fd, expected)
    }

    fn file_context(&self) -> FileContext {
        FileContext {
            root_device: self.root_device(),
            identities: Arc::clone(&self.identities),
            versions: Arc::clone(&self.versions),
        }
    }

    fn new_file(&self, fd: OwnedFd, flags: u32) -> SourceFile {
        SourceFile::new(fd, flags, self.file_context())
    }

    /// The object at `at`, without access to its bytes.
    fn open_node(&self, at: NodePath<'_>) -> rustix::io::Result<OwnedFd> {
        let fd = self.open_beneath(at.path, OFlags::PATH)?;
        self.verify(fd.as_fd(), at.expected)?;
        Ok(fd)
    }

    fn open_folder(&self, at: NodePath<'_>) -> rustix::io::Result<OwnedFd> {
        let fd = self.open_beneath(at.path, OFlags::PATH | OFlags::DIRECTORY)?;
        self.verify(fd.as_fd(), at.expected)?;
        Ok(fd)
    }

    /// Runs `call` as the caller. A source whose server has lost the root is opened again.
    fn run<T>(&self, what: &str, path: &[u8], caller: &Caller, call: impl Fn() -> rustix::io::Result<T>) -> Result<T> {
        self.finish(what, path, || {
            let _as_caller = self.identities.assume(caller)?;
            call()
        })
    }

    /// As [`WritableSource::run`], with the caller's mask.
    fn make<T>(
        &self,
        what: &str,
        at: &NamePath<'_>,
        caller: &Caller,
        call: impl Fn() -> rustix::io::Result<T>,
    ) -> Result<T> {
        self.finish(what, at.name, || {
            let _as_caller: AssumedIdentity<'_> = self.identities.assume_with_mask(caller)?;
            call()
        })
    }

    fn finish<T>(&self, what: &str, path: &[u8], attempt: impl Fn() -> rustix::io::Result<T>) -> Result<T> {
        let mut answer = attempt();
        if matches!(answer, Err(Errno::STALE | Errno::NOTCONN)) && self.stat_fd(self.root().fd.as_fd()).is_err() {
            self.reopen_root();
            answer = attempt();
        }
        answer.map_err(|errno| failed(format!("{what} '{}'", show_path(path)), errno))
    }

    fn set_attr(&self, of: NodePath<'_>, set: &AttrChange) -> rustix::io::Result<NodeAttr> {
        let fd = self.open_node(of)?;
        change_attr(fd.as_fd(), set, |len| {
            let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
            rustix::fs::ftruncate(rustix::fs::open(&*proc_path(fd.as_fd()), flags, Mode::empty())?, len)
        })?;
        self.stat_fd(fd.as_fd())
    }

    fn make_change(&self, change: &Change<'_>, caller: &Caller) -> Result<Option<NodeAttr>> {
        match *change {
            Change::Mkdir { at, mode, .. } => self.make("mkdir", &at, caller, || {
                let dir = self.open_folder(at.directory)?;
                rustix::fs::mkdirat(&dir, at.name, Mode::from_raw_mode(mode & 0o7777))?;
                self.stat_name(dir.as_fd(), at.name).map(Some)
            }),
            Change::Mknod { at, mode, rdev } => self.make("mknod", &at, caller, || {
                let dir = self.open_folder(at.directory)?;
                let kind = FileType::from_raw_mode(mode);
                rustix::fs::mknodat(&dir, at.name, kind, Mode::from_raw_mode(mode & 0o7777), rdev)?;
                self.stat_name(dir.as_fd(), at.name).map(Some)
            }),
            Change::Symlink { at, target } => self.make("symlink", &at, caller, || {
                let dir = self.open_folder(at.directory)?;
                rustix::fs::symlinkat(target, &dir, at.name)?;
                self.stat_name(dir.as_fd(), at.name).map(Some)
            }),
            Change::Link { from, to } => self.run("link to", to.name, caller, || {
                let old = self.open_node(from)?;
                let dir = self.open_folder(to.directory)?;
                rustix::fs::linkat(CWD, &*proc_path(old.as_fd()), &dir, to.name, AtFlags::SYMLINK_FOLLOW)?;
                self.stat_fd(old.as_fd()).map(Some)
            }),
            Change::Unlink { at } => self.run("unlink", at.name, caller, || {
                let dir = self.open_folder(at.directory)?;
                rustix::fs::unlinkat(&dir, at.name, AtFlags::empty()).map(|()| None)
            }),
            Change::Rmdir { at } => self.run("rmdir", at.name, caller, || {
                let dir = self.open_folder(at.directory)?;
                rustix::fs::unlinkat(&dir, at.name, AtFlags::REMOVEDIR).map(|()| None)
            }),
            Change::Rename { from, to, flags } => self.run("rename", from.name, caller, || {
                let old = self.open_folder(from.directory)?;
                let new = self.open_folder(to.directory)?;
                let flags = RenameFlags::from_bits_retain(flags);
                match flags.is_empty() {
                    true => rustix::fs::renameat(&old, from.name, &new, to.name),
                    false => rustix::fs::renameat_with(&old, from.name, &new, to.name, flags),
                }
                .map(|()| None)
            }),
            Change::SetAttr { of, set } => {
                self.run("setting attributes of", of.path, caller, || self.set_attr(of, &set).map(Some))
            }
            Change::SetXattr { of, name, value, flags } => self.run("setxattr of", of.path, caller, || {
                let fd = self.open_node(of)?;
                rustix::fs::setxattr(&*proc_path(fd.as_fd()), name, value, XattrFlags::from_bits_retain(flags))
                    .map(|()| None)
            }),
            Change::RemoveXattr { of, name } => self.finish("removexattr of", of.path, || {
                let as_caller = self.identities.assume(caller)?;
                let fd = self.open_node(of)?;
                remove_xattr(as_caller, fd.as_fd(), name).map(|()| None)
            }),
        }
    }

    fn open_file(&self, fd: BorrowedFd<'_>, flags: u32) -> rustix::io::Result<SourceFile> {
        SourceFile::reopen_fd(fd, flags, self.file_context())
    }
}

fn open_root(path: &Path, access_times: AccessTimes) -> rustix::io::Result<SourceRoot> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let tree = open_tree_with_times(path, access_times).inspect_err(|errno| {
        tracing::warn!(
            "the mount option about access times has no effect: '{}': {}; give it to the file system of the source",
            path.display(),
            std::io::Error::from(*errno)
        );
    });
    let fd = match tree {
        Ok(Some(tree)) => rustix::fs::openat(&tree, c".", flags, Mode::empty())?,
        Ok(None) | Err(_) => rustix::fs::open(path, flags, Mode::empty())?,
    };
    let device = RootDevice::of(fd.as_fd())?;
    Ok(SourceRoot { fd, device })
}

/// What the file system of a directory can do, by harmless queries.
fn find_capabilities(root: BorrowedFd<'_>) -> WriteCapabilities {
    let offers = |name: &str| {
        let mut value = [0u8; 4096];
        let answer = rustix::fs::fgetxattr(root, name, &mut value[..]);
        !matches!(answer, Err(Errno::NOTSUP | Errno::NOSYS))
    };
    WriteCapabilities {
        rename_directory: DirectoryRename::Atomic,
        hard_links: true,
        symlinks: true,
        modes: true,
        xattrs: offers("user.spurline"),
        acls: offers("system.posix_acl_access"),
        locks: LockScope::Source,
        holes: true,
        copy: true,
        publishes: false,
    }
}

impl HandOver for WritableSource {
    /// Descriptors of the source's own files are all that open files need.
    fn keep(&self, _files: Arc<dyn KeptFiles>) {}

    fn adopt(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableFile>> {
        let OpenHold::Descriptor(file) = left.hold else { return Err(not_left()) };
        Ok(Box::new(self.new_file(file, left.flags)))
    }

    fn adopt_directory(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableDirectory>> {
        let OpenHold::Descriptor(directory) = left.hold else { return Err(not_left()) };
        Ok(Box::new(SourceDirectory::new(directory, self.root_device(), &self.identities)))
    }

    fn repeat_rule(&self) -> RepeatRule {
        RepeatRule::Names { host_clock: own_clock(self.root().fd.as_fd()) }
    }
}

impl WritableVolume for WritableSource {
    fn capabilities(&self) -> WriteCapabilities {
        self.capabilities.clone()
    }

    fn stat(&self, at: NodePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        self.run("stat of", at.path, caller, || {
            let attr = self.stat_fd(self.open_beneath(at.path, OFlags::PATH)?.as_fd())?;
            match at.expected {
                Some(expected) if expected != attr.identity => Err(Errno::STALE),
                _ => Ok(attr),
            }
        })
    }

    fn lookup(&self, at: NamePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        self.run("lookup of", at.name, caller, || {
            let dir = self.open_folder(at.directory)?;
            self.stat_name(dir.as_fd(), at.name)
        })
    }

    fn readlink(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>> {
        self.run("readlink of", at.path, caller, || {
            let link = self.open_node(at)?;
            match rustix::fs::readlinkat(&link, c"", Vec::new()) {
                Ok(target) => Ok(target.into_bytes()),
                Err(Errno::NOENT) => Err(Errno::INVAL),
                Err(errno) => Err(errno),
            }
        })
    }

    fn access(&self, at: NodePath<'_>, mask: u32, caller: &Caller) -> Result<()> {
        self.run("access to", at.path, caller, || {
            let fd = self.open_node(at)?;
            check_access(&proc_path(fd.as_fd()), mask)
        })
    }

    fn open(&self, at: NodePath<'_>, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        self.finish("open of", at.path, || {
            let as_caller = self.identities.assume(caller)?;
            let fd = self.open_node(at)?;
            SourceFile::reopen_as(as_caller, fd.as_fd(), flags, self.file_context())
        })
        .map(|file| Box::new(file) as _)
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
        mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let (mut attr, file, directory) = self.make("create of", &at, caller, || {
            let dir = self.open_folder(at.directory)?;
            let after = || self.stat_fd(dir.as_fd()).ok();
            let wanted = OFlags::from_bits_retain(flags & !SourceFile::NOT_PASSED);
            let exclusive = wanted | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            for _ in 0..RACES {
                match rustix::fs::openat(&dir, at.name, exclusive, Mode::from_raw_mode(mode & 0o7777)) {
                    Ok(fd) => return Ok((self.stat_fd(fd.as_fd())?, self.new_file(fd, flags), after())),
                    Err(Errno::EXIST) if flags & libc::O_EXCL as u32 == 0 => {
                        // Another process made it, or it is a link.
                        let found = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                        match rustix::fs::openat(&dir, at.name, found, Mode::empty()) {
                            Ok(fd) => {
                                return Ok((self.stat_fd(fd.as_fd())?, self.open_file(fd.as_fd(), flags)?, after()));
                            }
                            Err(Errno::NOENT) => {}
                            Err(errno) => return Err(errno),
                        }
                    }
                    Err(errno) => return Err(errno),
                }
            }
            Err(Errno::STALE)
        })?;
        if let Some(mark) = mark.filter(|_| flags & libc::O_EXCL as u32 != 0) {
            attr = mark_access_time(self, &at, attr, mark);
        }
        Ok(CreatedFile { attr, file: Box::new(file), directory })
    }

    fn create_unnamed(
        &self,
        directory: NodePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Box<dyn WritableFile>)> {
        let at = NamePath { directory, name: b"." };
        let made = self.make("unnamed file in", &at, caller, || {
            let dir = self.open_folder(directory)?;
            let wanted = OFlags::from_bits_retain(flags & !(SourceFile::NOT_PASSED | libc::O_EXCL as u32))
                | OFlags::TMPFILE
                | OFlags::CLOEXEC
                | (OFlags::from_bits_retain(flags) & OFlags::EXCL);
            let fd = rustix::fs::openat(&dir, c".", wanted, Mode::from_raw_mode(mode & 0o7777))?;
            Ok((self.stat_fd(fd.as_fd())?, self.new_file(fd, flags)))
        });
        made.map(|(attr, file)| (attr, Box::new(file) as _))
    }

    fn link_open(&self, file: &dyn WritableFile, to: NamePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        let Some(file) = file.as_any().downcast_ref::<SourceFile>() else {
            return Err(failed("link", Errno::XDEV));
        };
        self.run("link to", to.name, caller, || {
            let dir = self.open_folder(to.directory)?;
            rustix::fs::linkat(CWD, &*proc_path(file.fd()), &dir, to.name, AtFlags::SYMLINK_FOLLOW)?;
            self.stat_fd(file.fd())
        })
    }

    fn open_directory(&self, at: NodePath<'_>, caller: &Caller) -> Result<Box<dyn WritableDirectory>> {
        let fd = self.run("opening the directory", at.path, caller, || {
            let fd = self.open_beneath(at.path, OFlags::RDONLY | OFlags::DIRECTORY)?;
            self.verify(fd.as_fd(), at.expected)?;
            Ok(fd)
        })?;
        Ok(Box::new(SourceDirectory::new(fd, self.root_device(), &self.identities)))
    }

    fn hand_over(&self) -> Option<&dyn HandOver> {
        Some(self)
    }

    fn change_marked(
        &self,
        change: &Change<'_>,
        caller: &Caller,
        mark: Option<ChangeMark>,
    ) -> Result<Option<NodeAttr>> {
        let attr = self.make_change(change, caller)?;
        Ok(match (attr, change.new_name(), mark) {
            (Some(attr), Some(at), Some(mark)) => Some(mark_access_time(self, at, attr, mark)),
            _ => attr,
        })
    }

    fn outcome_of(&self, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        outcome_by_names(self, repeated)
    }

    fn get_xattr(&self, at: NodePath<'_>, name: &[u8], caller: &Caller) -> Result<Vec<u8>> {
        self.run("getxattr of", at.path, caller, || {
            let fd = self.open_node(at)?;
            let path = proc_path(fd.as_fd());
            read_growing(|buffer| rustix::fs::getxattr(&*path, name, buffer))
        })
    }

    fn list_xattr(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>> {
        self.run("listxattr of", at.path, caller, || {
            let fd = self.open_node(at)?;
            let path = proc_path(fd.as_fd());
            read_growing(|buffer| rustix::fs::listxattr(&*path, buffer))
        })
    }

    fn space(&self) -> Result<SourceSpace> {
        let space = rustix::fs::fstatvfs(&self.root().fd).map_err(|errno| failed("statfs of the source", errno))?;
        Ok(SourceSpace {
            block_size: space.f_frsize,
            blocks: space.f_blocks,
            blocks_free: space.f_bfree,
            blocks_available: space.f_bavail,
            files: space.f_files,
            files_free: space.f_ffree,
            name_max: space.f_namemax as u32,
        })
    }

    fn sync_all(&self) -> Result<()> {
        rustix::fs::syncfs(&self.root().fd).map_err(|errno| failed("syncfs of the source", errno))
    }
}
