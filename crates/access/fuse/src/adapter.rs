//! Serves the kernel's requests from a [`FileSystem`]; it only converts types. All rules of the file system, errnos
//! included, are in `spurline-fs`, where they are tested without a mount.

use crate::backing::{BackingId, BackingRegistrar, RegisteredFile};
use crate::errno::Errno;
use crate::handler::{FuseHandler, HandleReply, InitInfo, LookupReply, RequestCaller, StatAttr, StatfsReply};
use crate::notify::KernelNotifier;
use crate::reply::{DirPlusSink, DirSink, ReadReply, ReplyReceipt, XattrReply};
use parking_lot::Mutex;
use spurline_fs::{
    DirItem, FileAttr, FileSystem, ForgetCandidate, FsError, InodeLimiter, LookupOutcome, RegisterBacking,
    RequestForgets,
};
use spurline_types::FileKind;
use spurline_volume::ReadData;
use std::fs::File;
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Passthrough stops after this many consecutive refusals by the kernel: each attempt costs the volume the check of a
/// whole file.
const REFUSALS: u32 = 8;

/// A file system as a session's handler.
pub struct FsHandler {
    file_system: Arc<FileSystem>,
    passthrough: OnceLock<PassthroughState>,
    notifier: OnceLock<KernelNotifier>,
    inode_limiter: Mutex<Option<InodeLimiter>>,
}

/// Registers files with the kernel, until it refuses too often.
pub(crate) struct PassthroughState {
    backings: BackingRegistrar,
    refused: AtomicU32,
}

impl PassthroughState {
    pub(crate) fn new(backings: &BackingRegistrar) -> Self {
        PassthroughState { backings: backings.clone(), refused: AtomicU32::new(0) }
    }

    /// The registration, unless the kernel refused too often.
    pub(crate) fn usable(&self) -> Option<&dyn RegisterBacking> {
        (self.refused.load(Ordering::Relaxed) < REFUSALS).then_some(self as &dyn RegisterBacking)
    }
}

impl FsHandler {
    /// A handler over `fs`.
    pub fn new(fs: Arc<FileSystem>) -> Self {
        FsHandler {
            file_system: fs,
            passthrough: OnceLock::new(),
            notifier: OnceLock::new(),
            inode_limiter: Mutex::default(),
        }
    }

    /// Sends notifications to the kernel; `None` before the session is ready.
    pub fn notifier(&self) -> Option<&KernelNotifier> {
        self.notifier.get()
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<FileSystem> {
        &self.file_system
    }

    fn lookup_reply(&self, found: &spurline_fs::InodeEntry) -> LookupReply {
        let attr = stat_attr(&found.attr);
        let &spurline_fs::InodeEntry { generation, entry_ttl, attr_ttl, .. } = found;
        LookupReply { ino: attr.ino, generation, attr, entry_ttl, attr_ttl }
    }
}

/// The kernel's names of inodes.
pub(crate) struct KernelNames(pub(crate) KernelNotifier);

impl RequestForgets for KernelNames {
    fn request_forgets(&self, inodes: &[ForgetCandidate]) -> io::Result<()> {
        if self.0.prune_inodes(inodes.iter().map(|inode| inode.ino))? {
            return Ok(());
        }
        // An older kernel would also take the path of a directory in which a program works: getcwd would fail there.
        for inode in inodes.iter().filter(|inode| !inode.directory) {
            if let Some(parent) = inode.parent {
                self.0.invalidate_entry(parent, &inode.name)?;
            }
        }
        Ok(())
    }
}

impl PassthroughState {
    fn register(&self, file: &File, user: Option<(u32, u32)>) -> io::Result<Box<dyn spurline_fs::RegisteredBacking>> {
        match self.backings.register_file_as(file.as_fd(), user) {
            Ok(backing) => {
                self.refused.store(0, Ordering::Relaxed);
                Ok(Box::new(backing))
            }
            Err(error) => {
                if self.refused.fetch_add(1, Ordering::Relaxed) + 1 == REFUSALS {
                    tracing::warn!(
                        "the kernel refused {REFUSALS} cached files for passthrough in a row: {error}; passthrough is off \
                         from now on, and reads go through this process. Passthrough needs CAP_SYS_ADMIN and a \
                         cache directory on a file system that is not itself stacked (overlayfs, FUSE)"
                    );
                }
                Err(error)
            }
        }
    }
}

impl RegisterBacking for PassthroughState {
    fn register_file(&self, file: &File) -> io::Result<Box<dyn spurline_fs::RegisteredBacking>> {
        self.register(file, None)
    }

    fn register_file_as(&self, file: &File, uid: u32, gid: u32) -> io::Result<Box<dyn spurline_fs::RegisteredBacking>> {
        self.register(file, Some((uid, gid)))
    }
}

impl spurline_fs::RegisteredBacking for RegisteredFile {
    fn backing_id(&self) -> i32 {
        RegisteredFile::id(self).0
    }
}

/// The errno of a failure. Failures of the volume are logged.
fn log_errno(op: &'static str, ino: u64, error: &FsError) -> Errno {
    if let FsError::Volume(cause) = error
        && cause.kind() != spurline_types::ErrorKind::NotFound
    {
        tracing::warn!(op, ino, errno = error.errno(), "{cause}");
    }
    Errno(error.errno())
}

fn file_type(kind: FileKind) -> u32 {
    match kind {
        FileKind::File => libc::S_IFREG,
        FileKind::Directory => libc::S_IFDIR,
        FileKind::Symlink => libc::S_IFLNK,
    }
}

fn stat_attr(attr: &FileAttr) -> StatAttr {
    let mtime = attr.mtime;
    StatAttr {
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: mtime,
        mtime,
        ctime: mtime,
        mode: file_type(attr.kind) | u32::from(attr.mode),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: attr.blksize,
    }
}

impl FuseHandler for FsHandler {
    fn init(&self, info: &InitInfo) {
        if let Some(backings) = &info.backings {
            let _ = self.passthrough.set(PassthroughState::new(backings));
        }
        let _ = self.notifier.set(info.notifier.clone());
        match InodeLimiter::start(Arc::clone(&self.file_system) as _, Box::new(KernelNames(info.notifier.clone()))) {
            Ok(limiter) => *self.inode_limiter.lock() = limiter,
            Err(error) => tracing::warn!("the memory for inodes has no limit: no thread: {error}"),
        }
    }

    fn destroy(&self) {
        let limiter = self.inode_limiter.lock().take();
        drop(limiter);
    }

    fn lookup(&self, parent: u64, name: &[u8], _caller: &RequestCaller) -> Result<LookupReply, Errno> {
        match self.file_system.lookup(parent, name) {
            Ok(LookupOutcome::Found(found)) => Ok(self.lookup_reply(&found)),
            Ok(LookupOutcome::Absent { ttl }) => Ok(LookupReply::negative(ttl)),
            Err(error) => Err(log_errno("lookup", parent, &error)),
        }
    }

    fn forget(&self, ino: u64, nlookup: u64) {
        self.file_system.forget(ino, nlookup);
    }

    fn getattr(&self, ino: u64, fh: Option<u64>, _caller: &RequestCaller) -> Result<(StatAttr, Duration), Errno> {
        let (found, ttl) = self.file_system.getattr(ino, fh).map_err(|error| log_errno("getattr", ino, &error))?;
        Ok((stat_attr(&found), ttl))
    }

    fn readlink(&self, ino: u64, target: &mut [u8], _caller: &RequestCaller) -> Result<usize, Errno> {
        let link = self.file_system.readlink(ino).map_err(|error| log_errno("readlink", ino, &error))?;
        target.get_mut(..link.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(&link);
        Ok(link.len())
    }

    fn open(&self, ino: u64, flags: u32, _caller: &RequestCaller) -> Result<HandleReply, Errno> {
        let register = self.passthrough.get().and_then(PassthroughState::usable);
        let opened =
            self.file_system.open(ino, flags as i32, register).map_err(|error| log_errno("open", ino, &error))?;
        let backing = opened.backing.map(|backing| BackingId(backing.id()));
        Ok(HandleReply { fh: opened.fh, keep_cache: true, backing, ..HandleReply::default() })
    }

    fn read(&self, ino: u64, fh: u64, offset: u64, len: u32, mut reply: ReadReply<'_>) -> ReplyReceipt {
        let buffer = reply.buffer();
        debug_assert!(buffer.len() <= len as usize);
        match self.file_system.read(ino, fh, offset, buffer) {
            Ok(ReadData::Copied(n)) => reply.reply_filled(n),
            Ok(ReadData::Shared(slice)) => reply.reply_data(&slice),
            Err(error) => reply.reply_error(log_errno("read", ino, &error)),
        }
    }

    fn release(&self, ino: u64, fh: u64) {
        if let Err(error) = self.file_system.release(fh) {
            tracing::warn!(ino, fh, "release of a handle that is not open: {error}");
        }
    }

    fn opendir(&self, ino: u64, _flags: u32, _caller: &RequestCaller) -> Result<HandleReply, Errno> {
        let fh = self.file_system.opendir(ino).map_err(|error| log_errno("opendir", ino, &error))?;
        Ok(HandleReply { fh, ..HandleReply::default() })
    }

    fn readdir(
        &self,
        ino: u64,
        fh: u64,
        cookie: u64,
        sink: &mut DirSink<'_>,
        _caller: &RequestCaller,
    ) -> Result<(), Errno> {
        let mut take = |item: &DirItem<'_>| sink.add_entry(item.ino, item.next, file_type(item.kind), item.name);
        self.file_system.readdir(ino, fh, cookie, &mut take).map_err(|error| log_errno("readdir", ino, &error))
    }

    fn readdirplus(
        &self,
        ino: u64,
        fh: u64,
        cookie: u64,
        sink: &mut DirPlusSink<'_>,
        _caller: &RequestCaller,
    ) -> Result<(), Errno> {
        let mut take = |item: &DirItem<'_>| match &item.entry {
            Some(found) => sink.add_entry(&self.lookup_reply(found), item.next, item.name),
            None => sink.add_plain(item.ino, item.next, file_type(item.kind), item.name),
        };
        self.file_system.readdirplus(ino, fh, cookie, &mut take).map_err(|error| log_errno("readdirplus", ino, &error))
    }

    fn releasedir(&self, ino: u64, fh: u64) {
        self.release(ino, fh);
    }

    fn statfs(&self, ino: u64) -> Result<StatfsReply, Errno> {
        let s = self.file_system.statfs().map_err(|error| log_errno("statfs", ino, &error))?;
        Ok(StatfsReply {
            blocks: s.blocks,
            bfree: s.free,
            bavail: s.free,
            files: s.files,
            ffree: s.files_free,
            bsize: s.block_size,
            namelen: s.name_max,
        })
    }

    fn access(&self, ino: u64, mask: u32, caller: &RequestCaller) -> Result<(), Errno> {
        self.file_system
            .access(ino, mask as i32, caller.uid, caller.gid)
            .map_err(|error| log_errno("access", ino, &error))
    }

    fn getxattr(&self, ino: u64, name: &[u8], reply: XattrReply<'_>, _caller: &RequestCaller) -> ReplyReceipt {
        match self.file_system.getxattr(ino, name) {
            Ok(value) => reply.reply_value(&value),
            Err(error) => reply.reply_error(log_errno("getxattr", ino, &error)),
        }
    }

    fn listxattr(&self, ino: u64, reply: XattrReply<'_>, _caller: &RequestCaller) -> ReplyReceipt {
        match self.file_system.listxattr(ino) {
            Ok(names) => reply.reply_value(&names),
            Err(error) => reply.reply_error(log_errno("listxattr", ino, &error)),
        }
    }
}
