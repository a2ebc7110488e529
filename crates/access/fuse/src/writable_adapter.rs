//! Serves the kernel's requests from a [`WritableFileSystem`]; it only converts types.

use crate::adapter::{KernelNames, PassthroughState};
use crate::backing::BackingId;
use crate::errno::Errno;
use crate::handler::{FuseHandler, HandleReply, InitInfo, LookupReply, RequestCaller, StatAttr, StatfsReply};
use crate::notify::KernelNotifier;
use crate::reply::{DirPlusSink, DirSink, ReadReply, ReplyReceipt, XattrReply};
use crate::waiting::WaitingSlots;
use parking_lot::Mutex;
use spurline_fs::writable::{
    BeginWait, CreateGroup, FsCaller, KernelView, LockRequest, NewNode, NodeEntry, NodeLookup, OpenedNode,
    WritableFileSystem,
};
use spurline_fs::{FsError, InodeLimiter, RegisterBacking};
use spurline_types::{Error, ErrorKind};
use spurline_volume::writes::{
    AttrChange, FileLock, FileTime, ListedName, LockConflict, LockKind, NodeAttr, WritePlace,
};
use std::any::Any;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// Bytes of a listing's entry without its name, padded: a `fuse_dirent` and, with attributes, a `fuse_entry_out`.
const PLAIN_ENTRY: usize = 32;
const PLUS_ENTRY: usize = 160;

/// A writable file system as a session's handler.
pub struct WritableFsHandler {
    file_system: Arc<WritableFileSystem>,
    passthrough: OnceLock<PassthroughState>,
    notifier: OnceLock<KernelNotifier>,
    waiting: OnceLock<WaitingSlots>,
    inode_limiter: Mutex<Option<InodeLimiter>>,
    create_group: AtomicBool,
}

/// The session of one request.
struct SessionWait<'a> {
    slots: &'a OnceLock<WaitingSlots>,
    /// The request has begun a wait, which lasts as long as the request.
    waits: bool,
}

impl BeginWait for SessionWait<'_> {
    fn begin_wait(&self) -> Result<Box<dyn Any>, FsError> {
        let Some(slots) = self.slots.get().filter(|_| !self.waits) else { return Ok(Box::new(())) };
        let no_slot = |errno: Errno| Error::new(ErrorKind::Io(errno.0), "no slot for a request that waits").into();
        slots.begin_wait().map(|slot| Box::new(slot) as _).map_err(no_slot)
    }

    fn has_all_closes(&self, fh: u64) -> bool {
        self.slots.get().is_none_or(|slots| slots.has_no_release(fh))
    }
}

/// The kernel's view of files, changed by notifications. Those about pages wait for requests that other slots serve: each begins a
/// wait.
struct KernelPages<'a>(&'a KernelNotifier, &'a dyn BeginWait);

impl KernelPages<'_> {
    fn wait_for(&self, send: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let waiting = self.1.begin_wait();
        let _waiting = waiting.map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        send()
    }

    /// Drops the pages of a file before its lock changes, which writes those that a program has stored into. Returns a begun
    /// wait for a lock that is set, so that nothing hinders the notifications that follow. Without a slot to wait in, a lock is
    /// refused; a release goes on, and the stores are written later.
    ///
    /// # Errors
    /// ENOLCK for a lock that is set, when there is no slot.
    fn drop_before_lock(&self, ino: u64, lock: &FileLock) -> Result<Option<Box<dyn Any>>, Errno> {
        let unlocks = lock.kind == LockKind::Unlock;
        let slot = match self.1.begin_wait() {
            Ok(slot) => slot,
            Err(error) if unlocks => {
                tracing::debug!(ino, "the kernel keeps pages of a file before a lock is released: {error}");
                return Ok(None);
            }
            Err(error) => return Err(Errno(error.errno())),
        };
        if let Err(error) = self.0.invalidate_pages(ino) {
            tracing::debug!(ino, "the kernel keeps pages of a file before a lock: {error}");
        }
        Ok((!unlocks).then_some(slot))
    }
}

impl KernelView for KernelPages<'_> {
    fn forget_attr(&self, ino: u64) -> io::Result<()> {
        self.0.invalidate_attr(ino)
    }

    fn drop_pages(&self, ino: u64) -> io::Result<()> {
        self.wait_for(|| self.0.invalidate_pages(ino))
    }

    fn store_byte(&self, ino: u64, offset: u64, byte: u8) -> io::Result<()> {
        self.wait_for(|| self.0.store_byte(ino, offset, byte))
    }
}

impl WritableFsHandler {
    /// A handler over `fs`.
    pub fn new(fs: Arc<WritableFileSystem>) -> Self {
        WritableFsHandler {
            file_system: fs,
            passthrough: OnceLock::new(),
            notifier: OnceLock::new(),
            waiting: OnceLock::new(),
            inode_limiter: Mutex::default(),
            create_group: AtomicBool::new(false),
        }
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<WritableFileSystem> {
        &self.file_system
    }

    fn register(&self) -> Option<&dyn RegisterBacking> {
        self.passthrough.get().and_then(PassthroughState::usable)
    }

    fn lookup_reply(&self, entry: &NodeEntry) -> LookupReply {
        let generation = self.file_system.generation(&entry.attr.identity);
        let attr = self.stat_attr(&entry.attr);
        LookupReply { ino: entry.ino, generation, attr, entry_ttl: entry.entry_ttl, attr_ttl: entry.attr_ttl }
    }

    fn stat_attr(&self, attr: &NodeAttr) -> StatAttr {
        StatAttr {
            ino: self.file_system.shown_inode(&attr.identity),
            size: attr.size,
            blocks: attr.blocks,
            atime: system_time(attr.atime),
            mtime: system_time(attr.mtime),
            ctime: system_time(attr.ctime),
            mode: attr.mode,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            blksize: attr.blksize,
        }
    }

    /// The caller of a request that makes something.
    fn creator(&self, caller: &RequestCaller) -> FsCaller {
        let create_group = match (self.create_group.load(Ordering::Relaxed), caller.group) {
            (false, _) => CreateGroup::Unknown,
            (true, None) => CreateGroup::NoMember,
            (true, Some(group)) => CreateGroup::Member(group),
        };
        FsCaller { create_group, ..fs_caller(caller) }
    }

    fn session_wait(&self, waits: bool) -> SessionWait<'_> {
        SessionWait { slots: &self.waiting, waits }
    }

    fn kernel_pages<'a>(&'a self, session: &'a dyn BeginWait) -> Option<KernelPages<'a>> {
        self.notifier.get().map(|notifier| KernelPages(notifier, session))
    }

    /// The errno of a failure. What POSIX lets any program run into is not logged.
    fn errno_of(&self, op: &'static str, ino: u64, error: &FsError) -> Errno {
        match error.errno() {
            errno @ (libc::EIO
            | libc::ETIMEDOUT
            | libc::EHOSTDOWN
            | libc::ENOTCONN
            | libc::EREMOTEIO
            | libc::EPROTO) => {
                let path = self.file_system.logged_path(ino);
                tracing::warn!(op, ino, errno, "{path}: {error}");
            }
            errno => tracing::trace!(op, ino, errno, "{error}"),
        }
        Errno(error.errno())
    }

    /// The value of a call, or its errno.
    fn checked<T>(&self, op: &'static str, ino: u64, answer: Result<T, FsError>) -> Result<T, Errno> {
        answer.map_err(|error| self.errno_of(op, ino, &error))
    }

    fn handle_reply(&self, opened: &OpenedNode) -> HandleReply {
        HandleReply {
            fh: opened.fh,
            keep_cache: opened.keep_cache,
            direct_io: opened.direct_io,
            parallel_direct_writes: opened.parallel,
            flush: opened.flush,
            backing: opened.backing.as_ref().map(|backing| BackingId(backing.id())),
            ..HandleReply::default()
        }
    }
}

fn system_time(time: FileTime) -> SystemTime {
    let whole = Duration::from_secs(time.seconds.unsigned_abs());
    let seconds = match time.seconds < 0 {
        true => SystemTime::UNIX_EPOCH.checked_sub(whole),
        false => SystemTime::UNIX_EPOCH.checked_add(whole),
    };
    seconds.and_then(|at| at.checked_add(Duration::from_nanos(time.nanos.into()))).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn fs_caller(caller: &RequestCaller) -> FsCaller {
    let RequestCaller { uid, gid, pid, umask, .. } = *caller;
    FsCaller { uid, gid, pid, umask, create_group: CreateGroup::Unknown }
}

impl FuseHandler for WritableFsHandler {
    fn init(&self, info: &InitInfo) {
        if let Some(backings) = &info.backings {
            let _ = self.passthrough.set(PassthroughState::new(backings));
        }
        let _ = self.notifier.set(info.notifier.clone());
        let _ = self.waiting.set(info.waiting.clone());
        self.create_group.store(info.create_group, Ordering::Relaxed);
        if info.direct_mmap {
            self.file_system.allow_direct_writes();
        }
        let names = Box::new(KernelNames(info.notifier.clone()));
        match InodeLimiter::start(Arc::clone(&self.file_system) as _, names) {
            Ok(limiter) => *self.inode_limiter.lock() = limiter,
            Err(error) => tracing::warn!("no thread limits the memory of inodes: {error}"),
        }
    }

    fn destroy(&self) {
        let limiter = self.inode_limiter.lock().take();
        drop(limiter);
        // Before the session counts as ended: what waits for its end also waits for written bytes.
        self.file_system.close_all();
    }

    fn lookup(&self, parent: u64, name: &[u8], caller: &RequestCaller) -> Result<LookupReply, Errno> {
        match self.checked("lookup", parent, self.file_system.lookup(parent, name, &fs_caller(caller)))? {
            NodeLookup::Found(entry) => Ok(self.lookup_reply(&entry)),
            NodeLookup::Absent { ttl } => Ok(LookupReply::negative(ttl)),
        }
    }

    fn forget(&self, ino: u64, nlookup: u64) {
        self.file_system.forget(ino, nlookup);
    }

    fn getattr(&self, ino: u64, fh: Option<u64>, caller: &RequestCaller) -> Result<(StatAttr, Duration), Errno> {
        let (attr, ttl) = self.checked("getattr", ino, self.file_system.getattr(ino, fh, &fs_caller(caller)))?;
        Ok((self.stat_attr(&attr), ttl))
    }

    fn readlink(&self, ino: u64, target: &mut [u8], caller: &RequestCaller) -> Result<usize, Errno> {
        let link = self.checked("readlink", ino, self.file_system.readlink(ino, &fs_caller(caller)))?;
        target.get_mut(..link.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(&link);
        Ok(link.len())
    }

    fn open(&self, ino: u64, flags: u32, caller: &RequestCaller) -> Result<HandleReply, Errno> {
        let opened = self.file_system.open(ino, flags as i32, &fs_caller(caller), self.register());
        let opened = self.checked("open", ino, opened)?;
        // Before the reply: the first read through the handle has to see the new length.
        if let Some(kernel) = self.kernel_pages(&self.session_wait(false)).filter(|_| opened.moved)
            && let Err(error) = self.file_system.refresh_opened(ino, &opened, &kernel)
        {
            tracing::debug!(ino, "the kernel keeps attributes for their time: {error}");
        }
        Ok(self.handle_reply(&opened))
    }

    fn read(&self, ino: u64, fh: u64, offset: u64, _len: u32, mut reply: ReadReply<'_>) -> ReplyReceipt {
        match self.file_system.read(ino, fh, offset, reply.buffer()) {
            Ok(n) => reply.reply_filled(n),
            Err(error) => reply.reply_error(self.errno_of("read", ino, &error)),
        }
    }

    fn release(&self, ino: u64, fh: u64) {
        if let Err(error) = self.file_system.release(fh) {
            tracing::warn!(ino, fh, "release of a handle that is not open: {error}");
        }
    }

    fn opendir(&self, ino: u64, _flags: u32, caller: &RequestCaller) -> Result<HandleReply, Errno> {
        let fh = self.checked("opendir", ino, self.file_system.opendir(ino, &fs_caller(caller)))?;
        Ok(HandleReply { fh, ..HandleReply::default() })
    }

    fn readdir(
        &self,
        ino: u64,
        fh: u64,
        cookie: u64,
        sink: &mut DirSink<'_>,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        let max = sink.room() / PLAIN_ENTRY;
        let mut take = |listed: &ListedName, _: Option<NodeEntry>| {
            sink.add_entry(listed.inode, listed.next, listed.file_type, &listed.name)
        };
        let read = self.file_system.readdir((ino, fh), cookie, max, false, &fs_caller(caller), &mut take);
        self.checked("readdir", ino, read)
    }

    fn readdirplus(
        &self,
        ino: u64,
        fh: u64,
        cookie: u64,
        sink: &mut DirPlusSink<'_>,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        let max = sink.room() / PLUS_ENTRY;
        let mut take = |listed: &ListedName, entry: Option<NodeEntry>| match entry {
            Some(entry) => sink.add_entry(&self.lookup_reply(&entry), listed.next, &listed.name),
            None => sink.add_plain(listed.inode, listed.next, listed.file_type, &listed.name),
        };
        let read = self.file_system.readdir((ino, fh), cookie, max, true, &fs_caller(caller), &mut take);
        self.checked("readdirplus", ino, read)
    }

    fn releasedir(&self, ino: u64, fh: u64) {
        if let Err(error) = self.file_system.releasedir(fh) {
            tracing::warn!(ino, fh, "release of a directory that is not open: {error}");
        }
    }

    fn statfs(&self, ino: u64) -> Result<StatfsReply, Errno> {
        let space = self.checked("statfs", ino, self.file_system.statfs())?;
        Ok(StatfsReply {
            blocks: space.blocks,
            bfree: space.blocks_free,
            bavail: space.blocks_available,
            files: space.files,
            ffree: space.files_free,
            bsize: space.block_size as u32,
            namelen: space.name_max,
        })
    }

    fn access(&self, ino: u64, mask: u32, caller: &RequestCaller) -> Result<(), Errno> {
        self.checked("access", ino, self.file_system.access(ino, mask, &fs_caller(caller)))
    }

    fn getxattr(&self, ino: u64, name: &[u8], reply: XattrReply<'_>, caller: &RequestCaller) -> ReplyReceipt {
        match self.file_system.getxattr(ino, name, &fs_caller(caller)) {
            Ok(value) => reply.reply_value(&value),
            Err(error) => reply.reply_error(self.errno_of("getxattr", ino, &error)),
        }
    }

    fn listxattr(&self, ino: u64, reply: XattrReply<'_>, caller: &RequestCaller) -> ReplyReceipt {
        match self.file_system.listxattr(ino, &fs_caller(caller)) {
            Ok(names) => reply.reply_value(&names),
            Err(error) => reply.reply_error(self.errno_of("listxattr", ino, &error)),
        }
    }

    fn lseek(&self, ino: u64, fh: u64, offset: u64, whence: u32) -> Result<u64, Errno> {
        self.checked("lseek", ino, self.file_system.lseek(ino, fh, offset, whence))
    }

    fn setattr(
        &self,
        ino: u64,
        fh: Option<u64>,
        set: &AttrChange,
        caller: &RequestCaller,
    ) -> Result<(StatAttr, Duration), Errno> {
        let (attr, ttl) = self.checked("setattr", ino, self.file_system.setattr(ino, fh, set, &fs_caller(caller)))?;
        Ok((self.stat_attr(&attr), ttl))
    }

    fn make(&self, parent: u64, name: &[u8], new: NewNode<'_>, caller: &RequestCaller) -> Result<LookupReply, Errno> {
        let entry = self.checked("make", parent, self.file_system.make(parent, name, new, &self.creator(caller)))?;
        Ok(self.lookup_reply(&entry))
    }

    fn link(&self, ino: u64, parent: u64, name: &[u8], caller: &RequestCaller) -> Result<LookupReply, Errno> {
        let entry = self.checked("link", ino, self.file_system.link(ino, parent, name, &fs_caller(caller)))?;
        Ok(self.lookup_reply(&entry))
    }

    fn remove(&self, parent: u64, name: &[u8], directory: bool, caller: &RequestCaller) -> Result<(), Errno> {
        self.checked("remove", parent, self.file_system.remove(parent, name, directory, &fs_caller(caller)))
    }

    fn rename(&self, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32, caller: &RequestCaller) -> Result<(), Errno> {
        self.checked("rename", from.0, self.file_system.rename(from, to, flags, &fs_caller(caller)))
    }

    fn create(
        &self,
        parent: u64,
        name: &[u8],
        flags: u32,
        mode: u32,
        caller: &RequestCaller,
    ) -> Result<(LookupReply, HandleReply), Errno> {
        let made = self.file_system.create(parent, name, flags as i32, mode, &self.creator(caller), self.register());
        let (entry, opened) = self.checked("create", parent, made)?;
        Ok((self.lookup_reply(&entry), self.handle_reply(&opened)))
    }

    fn tmpfile(
        &self,
        parent: u64,
        flags: u32,
        mode: u32,
        caller: &RequestCaller,
    ) -> Result<(LookupReply, HandleReply), Errno> {
        let made = self.file_system.tmpfile(parent, flags as i32, mode, &self.creator(caller), self.register());
        let (entry, opened) = self.checked("tmpfile", parent, made)?;
        Ok((self.lookup_reply(&entry), self.handle_reply(&opened)))
    }

    fn write(
        &self,
        at: (u64, u64),
        place: (u64, WritePlace),
        data: &[u8],
        lose_privileges: bool,
        caller: &RequestCaller,
    ) -> Result<usize, Errno> {
        let caller = lose_privileges.then(|| fs_caller(caller));
        self.checked("write", at.0, self.file_system.write(at, place, data, caller.as_ref()))
    }

    fn flush(&self, ino: u64, fh: u64, lock_owner: u64) -> Result<(), Errno> {
        self.checked("flush", ino, self.file_system.flush(ino, fh, lock_owner))
    }

    fn test_lock(
        &self,
        at: (u64, u64),
        lock: &FileLock,
        caller: &RequestCaller,
    ) -> Result<Option<LockConflict>, Errno> {
        let session = self.session_wait(false);
        let found = self.file_system.test_lock(at, lock, caller.unique, Some(&session));
        self.checked("getlk", at.0, found)
    }

    fn set_lock(
        &self,
        at: (u64, u64),
        lock: &FileLock,
        pid: u32,
        wait: bool,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        let request = LockRequest { lock: *lock, pid, number: caller.unique };
        let session = self.session_wait(false);
        let stores = self.kernel_pages(&session).filter(|_| self.file_system.has_stores_to_write(at.0, lock));
        let slot = stores.map_or(Ok(None), |kernel| kernel.drop_before_lock(at.0, lock))?;
        // One wait for the request, however often it waits.
        let session = self.session_wait(slot.is_some());
        let slots = Some(&session as &dyn BeginWait);
        let set = self.file_system.set_lock(at, &request, &fs_caller(caller), (slots, wait));
        let stale = self.checked("setlk", at.0, set)?;
        if let Some(kernel) = self.kernel_pages(&session).filter(|_| stale)
            && let Err(error) = self.file_system.refresh_locked(at, &kernel)
        {
            tracing::debug!(ino = at.0, "the kernel keeps pages of a file that was locked: {error}");
        }
        Ok(())
    }

    fn interrupt(&self, unique: u64) {
        self.file_system.interrupt(unique);
    }

    fn disconnect(&self) {
        self.file_system.end_waits();
    }

    fn fsync(&self, ino: u64, fh: u64, data_only: bool) -> Result<(), Errno> {
        self.checked("fsync", ino, self.file_system.fsync(ino, fh, data_only))
    }

    fn fsyncdir(&self, ino: u64, fh: u64, data_only: bool) -> Result<(), Errno> {
        self.checked("fsyncdir", ino, self.file_system.fsyncdir(ino, fh, data_only))
    }

    fn fallocate(
        &self,
        (ino, fh): (u64, u64),
        mode: u32,
        offset: u64,
        len: u64,
        caller: &RequestCaller,
    ) -> Result<(), Errno> {
        self.checked("fallocate", ino, self.file_system.fallocate(ino, fh, mode, offset, len, &fs_caller(caller)))
    }

    fn copy_file_range(
        &self,
        from: (u64, u64, u64),
        to: (u64, u64, u64),
        len: u64,
        caller: &RequestCaller,
    ) -> Result<u64, Errno> {
        self.checked("copy_file_range", from.0, self.file_system.copy_file_range(from, to, len, &fs_caller(caller)))
    }

    fn setxattr(&self, ino: u64, name: &[u8], value: &[u8], flags: u32, caller: &RequestCaller) -> Result<(), Errno> {
        self.checked("setxattr", ino, self.file_system.setxattr(ino, name, value, flags, &fs_caller(caller)))
    }

    fn removexattr(&self, ino: u64, name: &[u8], caller: &RequestCaller) -> Result<(), Errno> {
        self.checked("removexattr", ino, self.file_system.removexattr(ino, name, &fs_caller(caller)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_volume::writes::{LockFamily, LockRange};
    use std::io::Read as _;

    /// Slots that are all taken, or not.
    struct FullSlots(bool);

    impl BeginWait for FullSlots {
        fn begin_wait(&self) -> Result<Box<dyn Any>, FsError> {
            match self.0 {
                true => Err(Error::new(ErrorKind::Io(libc::ENOLCK), "all are taken").into()),
                false => Ok(Box::new(())),
            }
        }

        fn has_all_closes(&self, _fh: u64) -> bool {
            true
        }
    }

    #[test]
    fn without_a_slot_to_wait_in_no_notification_is_sent_and_a_lock_is_refused() {
        let (mut sent, device) = io::pipe().unwrap();
        let device = Arc::new(device.into());
        let notifier = KernelNotifier::new(&device, 38);
        let range = LockRange { start: 0, end: 9 };
        let lock = |kind| FileLock { family: LockFamily::Posix, owner: 1, range, kind };
        let full = KernelPages(&notifier, &FullSlots(true));
        assert_eq!(full.drop_before_lock(1, &lock(LockKind::Write)).unwrap_err(), Errno(libc::ENOLCK));
        assert!(full.drop_before_lock(1, &lock(LockKind::Unlock)).unwrap().is_none());
        assert_eq!(full.drop_pages(1).unwrap_err().raw_os_error(), Some(libc::ENOLCK));
        let free = KernelPages(&notifier, &FullSlots(false));
        assert!(free.drop_before_lock(1, &lock(LockKind::Unlock)).unwrap().is_none());
        assert!(free.drop_before_lock(1, &lock(LockKind::Write)).unwrap().is_some(), "the wait goes on with the lock");
        free.drop_pages(1).unwrap();
        drop(device);
        let mut bytes = Vec::new();
        sent.read_to_end(&mut bytes).unwrap();
        let one = size_of::<crate::abi::OutHeader>() + size_of::<crate::abi::NotifyInvalInodeOut>();
        assert_eq!(bytes.len(), 3 * one, "those of the free slots, and one within a wait");
    }
}
