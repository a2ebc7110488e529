//! Open files and directories of a source that is changed: system calls on their descriptors. It knows no path.

use crate::caller_identity::{AssumedIdentity, CallerIdentities, close_copy, failed};
use crate::object_identity::{RootDevice, change_attr, check_access};
use crate::open_versions::{OpenChanger, OpenVersions};
use crate::source_locks::SourceLocks;
use parking_lot::Mutex;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{Access, FallocateFlags, FileType, Mode, OFlags, SeekFrom, XattrFlags};
use rustix::io::{Errno, ReadWriteFlags};
use spurline_origin::own_clock;
use spurline_sys::{proc_path, read_growing};
use spurline_types::Result;
use spurline_types::open_flags::FMODE_EXEC;
use spurline_volume::hand_over::OpenHold;
use spurline_volume::writes::{
    AttrChange, CacheVersion, Caller, FileLock, ListedName, LockConflict, NodeAttr, OpenAttrCall, WritableDirectory,
    WritableFile, WritableObject, WritePlace,
};
use std::any::Any;
use std::collections::VecDeque;
use std::fs::File;
use std::io::IoSlice;
use std::sync::{Arc, OnceLock};

/// The attribute with a file's capabilities.
const CAPABILITIES: &[u8] = b"security.capability";

/// What the open files of a source share.
#[derive(Clone)]
pub(crate) struct FileContext {
    pub root_device: RootDevice,
    pub identities: Arc<CallerIdentities>,
    pub versions: Arc<OpenVersions>,
}

/// An open file.
pub(crate) struct SourceFile {
    file: File,
    /// It was opened for appending.
    appends: bool,
    /// The same file, opened for appending if `file` was not, and the other way round: made for the first write that needs it,
    /// where the kernel has no flag for such a write.
    other_place: OnceLock<File>,
    context: FileContext,
    /// While it is open, if it can be changed.
    _changer: Option<OpenChanger>,
    /// The file system is of a server, or unknown: it reports failures of writes when a file is closed.
    reports_at_close: bool,
    locks: SourceLocks,
}

impl Drop for SourceFile {
    fn drop(&mut self) {
        self.locks.release_all(self.file.as_fd());
    }
}

impl SourceFile {
    /// Flags that are not the source's: O_DIRECT wants aligned memory, which a request's bytes need not have.
    pub(crate) const NOT_PASSED: u32 =
        (libc::O_DIRECT | libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY | libc::O_NOFOLLOW | libc::O_NONBLOCK) as u32
            | FMODE_EXEC;

    pub(crate) fn new(fd: OwnedFd, flags: u32, context: FileContext) -> SourceFile {
        let reports_at_close = !own_clock(fd.as_fd());
        let flags = OFlags::from_bits_retain(flags);
        let changer = if flags & OFlags::RWMODE == OFlags::RDONLY {
            None
        } else {
            context.versions.count_changer(|| context.root_device.stat_fd(fd.as_fd()).ok().map(|attr| attr.identity))
        };
        SourceFile {
            file: File::from(fd),
            appends: flags.contains(OFlags::APPEND),
            other_place: OnceLock::new(),
            context,
            _changer: changer,
            reports_at_close,
            locks: SourceLocks::default(),
        }
    }

    /// Opens the file of `fd` for reads or writes. Anything but a file is refused: an open of a pipe could wait for
    /// ever.
    pub(crate) fn reopen_fd(fd: BorrowedFd<'_>, flags: u32, context: FileContext) -> rustix::io::Result<SourceFile> {
        match FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            FileType::Symlink => return Err(Errno::LOOP),
            _ => return Err(Errno::STALE),
        }
        let opened_as = OFlags::from_bits_retain(flags & !Self::NOT_PASSED) | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&*proc_path(fd), opened_as, Mode::empty())?;
        Ok(SourceFile::new(opened, flags, context))
    }

    /// As [`SourceFile::reopen_fd`] as a caller. A program that the caller may run and not read is opened as this process: the
    /// caller's kernel reads it to run it.
    pub(crate) fn reopen_as(
        as_caller: AssumedIdentity<'_>,
        fd: BorrowedFd<'_>,
        flags: u32,
        context: FileContext,
    ) -> rustix::io::Result<SourceFile> {
        let runs = flags & FMODE_EXEC != 0 && flags & libc::O_ACCMODE as u32 == libc::O_RDONLY as u32;
        match SourceFile::reopen_fd(fd, flags, context.clone()) {
            Err(Errno::ACCESS) if runs => {
                check_access(&proc_path(fd), Access::EXEC_OK.bits())?;
                drop(as_caller);
                SourceFile::reopen_fd(fd, flags, context)
            }
            opened => opened,
        }
    }

    /// Writes to the place that the file was not opened for, by a flag of the call: its access mode and its rights stay.
    fn write_other_place(&self, offset: u64, data: &[u8]) -> rustix::io::Result<usize> {
        // Since Linux 6.9.
        const NO_APPEND: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x20);
        // Unlike `pwrite`, the call takes -1 for the descriptor's own position.
        if i64::try_from(offset).is_err() {
            return Err(Errno::INVAL);
        }
        let flags = if self.appends { NO_APPEND } else { ReadWriteFlags::APPEND };
        rustix::io::pwritev2(&self.file, &[IoSlice::new(data)], offset, flags)
    }

    /// The same file, opened for the other place, for a kernel that has no flag for it. To be called as this process.
    fn open_other_place(&self) -> rustix::io::Result<&File> {
        if let Some(other) = self.other_place.get() {
            return Ok(other);
        }
        let own = rustix::fs::fcntl_getfl(&self.file)?;
        // This process may have rights that the opener did not have.
        if own & OFlags::RWMODE == OFlags::RDONLY {
            return Err(Errno::BADF);
        }
        let place = if self.appends { OFlags::empty() } else { OFlags::APPEND };
        let flags = (own & (OFlags::DSYNC | OFlags::SYNC)) | place | OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened =
            rustix::fs::open(&*proc_path(self.file.as_fd()), flags, Mode::empty()).map_err(|errno| match errno {
                // Only appends are permitted.
                Errno::PERM => errno,
                // No program expects the others of a write.
                _ => {
                    let path = rustix::fs::readlink(&*proc_path(self.file.as_fd()), Vec::new()).unwrap_or_default();
                    let path = path.to_string_lossy();
                    tracing::warn!("'{path}' can't be opened once more for writes to another place: {errno}");
                    Errno::IO
                }
            })?;
        Ok(self.other_place.get_or_init(|| File::from(opened)))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    fn as_caller<T>(&self, what: &str, caller: &Caller, call: impl FnOnce() -> rustix::io::Result<T>) -> Result<T> {
        run_as(&self.context.identities, caller, what, call)
    }
}

/// Runs a call on an open object as its caller.
fn run_as<T>(
    identities: &CallerIdentities,
    caller: &Caller,
    what: &str,
    call: impl FnOnce() -> rustix::io::Result<T>,
) -> Result<T> {
    let assumed = identities.assume(caller);
    assumed.and_then(|_as_caller| call()).map_err(|errno| failed(what, errno))
}

/// A call about the rights or the extended attributes of an open object.
fn call_attr_of(
    fd: BorrowedFd<'_>,
    call: &OpenAttrCall<'_>,
    identities: &CallerIdentities,
    caller: &Caller,
) -> Result<Vec<u8>> {
    let path = proc_path(fd);
    let what = match call {
        OpenAttrCall::Access(_) => "access",
        OpenAttrCall::Get(_) => "getxattr",
        OpenAttrCall::List => "listxattr",
        OpenAttrCall::Set { .. } => "setxattr",
        OpenAttrCall::Remove(_) => "removexattr",
    };
    let assumed = identities.assume(caller);
    let answer = assumed.and_then(|as_caller| {
        match *call {
            OpenAttrCall::Get(name) => return read_growing(|buffer| rustix::fs::getxattr(&*path, name, buffer)),
            OpenAttrCall::List => return read_growing(|buffer| rustix::fs::listxattr(&*path, buffer)),
            OpenAttrCall::Access(mask) => check_access(&path, mask),
            OpenAttrCall::Set { name, value, flags } => {
                rustix::fs::setxattr(&*path, name, value, XattrFlags::from_bits_retain(flags))
            }
            OpenAttrCall::Remove(name) => remove_xattr(as_caller, fd, name),
        }
        .map(|()| Vec::new())
    });
    answer.map_err(|errno| failed(what, errno))
}

/// Removes an extended attribute as a caller. Capabilities are removed as this process if the caller may not: the caller's kernel
/// has checked the right to that, or takes them away because the caller changes the file.
pub(crate) fn remove_xattr(as_caller: AssumedIdentity<'_>, fd: BorrowedFd<'_>, name: &[u8]) -> rustix::io::Result<()> {
    match rustix::fs::removexattr(&*proc_path(fd), name) {
        Err(Errno::PERM) if name == CAPABILITIES => {
            drop(as_caller);
            rustix::fs::removexattr(&*proc_path(fd), name)
        }
        removed => removed,
    }
}

/// Repeats a call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> rustix::io::Result<T>) -> rustix::io::Result<T> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            answer => return answer,
        }
    }
}

impl WritableObject for SourceFile {
    fn stat(&self) -> Result<NodeAttr> {
        self.context.root_device.stat_fd(self.file.as_fd()).map_err(|errno| failed("fstat", errno))
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        self.as_caller("setting attributes", caller, || {
            change_attr(self.file.as_fd(), set, |len| {
                match rustix::fs::ftruncate(&self.file, len) {
                    // Open for reading only: the caller's right to write decides.
                    Err(Errno::INVAL | Errno::BADF) => {
                        let flags = OFlags::WRONLY | OFlags::NOCTTY | OFlags::CLOEXEC;
                        let path = proc_path(self.file.as_fd());
                        rustix::fs::ftruncate(rustix::fs::open(&*path, flags, Mode::empty())?, len)
                    }
                    answer => answer,
                }
            })?;
            self.context.root_device.stat_fd(self.file.as_fd())
        })
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>> {
        call_attr_of(self.file.as_fd(), call, &self.context.identities, caller)
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        let synced = match data_only {
            true => retry(|| rustix::fs::fdatasync(&self.file)),
            false => retry(|| rustix::fs::fsync(&self.file)),
        };
        synced.map_err(|errno| failed("fsync", errno))
    }
}

impl WritableFile for SourceFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let mut done = 0;
        while done < dst.len() {
            match retry(|| rustix::io::pread(&self.file, &mut dst[done..], offset + done as u64)) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(_) if done > 0 => break,
                Err(errno) => return Err(failed("read", errno)),
            }
        }
        Ok(done)
    }

    fn write_placed(
        &self,
        place: WritePlace,
        offset: u64,
        data: &[u8],
        lose_privileges: Option<&Caller>,
    ) -> Result<usize> {
        let appends = match place {
            WritePlace::AsOpened => self.appends,
            WritePlace::End => true,
            WritePlace::Offset | WritePlace::MappedPages => false,
        };
        // A short write is the caller's to continue: it may be the last byte that fits.
        let write = |call: &dyn Fn() -> rustix::io::Result<usize>| {
            let _as_caller = lose_privileges.map(|caller| self.context.identities.assume(caller)).transpose()?;
            retry(call)
        };
        let written = match appends == self.appends {
            true => write(&|| rustix::io::pwrite(&self.file, data, offset)),
            false => match write(&|| self.write_other_place(offset, data)) {
                Err(Errno::OPNOTSUPP) => {
                    self.open_other_place().and_then(|other| write(&|| rustix::io::pwrite(other, data, offset)))
                }
                written => written,
            },
        };
        written.map_err(|errno| failed("write", errno))
    }

    fn allocate(&self, mode: u32, offset: u64, len: u64, caller: &Caller) -> Result<()> {
        let mode = FallocateFlags::from_bits_retain(mode);
        self.as_caller("fallocate", caller, || retry(|| rustix::fs::fallocate(&self.file, mode, offset, len)))
    }

    fn copy_range(
        &self,
        mut offset: u64,
        to: &dyn WritableFile,
        mut to_offset: u64,
        len: u64,
        caller: &Caller,
    ) -> Result<u64> {
        let Some(to) = to.as_any().downcast_ref::<SourceFile>() else {
            return Err(failed("copy_file_range", Errno::XDEV));
        };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let copied = self.as_caller("copy_file_range", caller, || {
            rustix::fs::copy_file_range(&self.file, Some(&mut offset), &to.file, Some(&mut to_offset), len)
        });
        copied.map(|n| n as u64)
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64> {
        let from = match whence as i32 {
            libc::SEEK_DATA => SeekFrom::Data(offset),
            libc::SEEK_HOLE => SeekFrom::Hole(offset),
            _ => return Err(failed("lseek", Errno::INVAL)),
        };
        rustix::fs::seek(&self.file, from).map_err(|errno| failed("lseek", errno))
    }

    fn needs_flush(&self) -> bool {
        self.reports_at_close
    }

    fn flush(&self) -> Result<()> {
        if !self.reports_at_close {
            return Ok(());
        }
        close_copy(self.file.as_fd()).map_err(|errno| failed("close", errno))
    }

    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        self.locks.find_conflict(self.file.as_fd(), lock).map_err(|errno| failed("fcntl", errno))
    }

    fn set_lock(&self, lock: &FileLock, caller: &Caller) -> Result<()> {
        let set = self.locks.set_lock(self.file.as_fd(), lock, |flags| {
            let _as_caller = self.context.identities.assume(caller)?;
            rustix::fs::open(&*proc_path(self.file.as_fd()), flags, Mode::empty())
        });
        set.map_err(|errno| failed("lock", errno))
    }

    fn release_locks(&self) {
        self.locks.release_all(self.file.as_fd());
    }

    fn backing(&self) -> Option<&File> {
        Some(&self.file)
    }

    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        OpenHold::Descriptor(self.file.as_fd())
    }

    fn lock_descriptor(&self, owner: u64) -> Option<OwnedFd> {
        self.locks.duplicate_of(owner)
    }

    fn adopt_lock(&self, lock: &FileLock, descriptor: Option<OwnedFd>) {
        self.locks.adopt(lock, descriptor);
    }

    fn cache_version(&self, attr: &NodeAttr) -> CacheVersion {
        self.context.versions.version_of(self.file.as_fd(), attr, self.reports_at_close)
    }

    fn reopen(&self, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        let assumed = self.context.identities.assume(caller);
        let reopened = assumed
            .and_then(|as_caller| SourceFile::reopen_as(as_caller, self.file.as_fd(), flags, self.context.clone()));
        reopened.map(|file| Box::new(file) as _).map_err(|errno| failed("open", errno))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// Bytes of names read from the kernel at a time.
const LISTING: usize = 32 << 10;

/// An open directory.
pub(crate) struct SourceDirectory {
    fd: OwnedFd,
    root_device: RootDevice,
    identities: Arc<CallerIdentities>,
    listing: Mutex<ListingState>,
}

/// What was read from the kernel and not returned yet.
#[derive(Default)]
struct ListingState {
    /// The position of the first of them.
    at: u64,
    names: VecDeque<ListedName>,
}

impl SourceDirectory {
    pub(crate) fn new(fd: OwnedFd, root_device: RootDevice, identities: &Arc<CallerIdentities>) -> SourceDirectory {
        SourceDirectory { fd, root_device, identities: Arc::clone(identities), listing: Mutex::default() }
    }

    /// Reads names from the kernel, from `from` on.
    fn read_names(&self, from: u64) -> rustix::io::Result<VecDeque<ListedName>> {
        rustix::fs::seek(&self.fd, SeekFrom::Start(from))?;
        let mut buffer = Vec::with_capacity(LISTING);
        let mut raw = rustix::fs::RawDir::new(&self.fd, buffer.spare_capacity_mut());
        let mut names = VecDeque::new();
        while let Some(entry) = raw.next() {
            let entry = entry?;
            names.push_back(ListedName {
                name: entry.file_name().to_bytes().to_vec(),
                file_type: entry.file_type().as_raw_mode(),
                inode: entry.ino(),
                next: entry.next_entry_cookie(),
                attr: None,
            });
            // One call of the kernel at a time: a reader of a long directory sees names soon.
            if raw.is_buffer_empty() {
                break;
            }
        }
        Ok(names)
    }
}

impl WritableObject for SourceDirectory {
    fn stat(&self) -> Result<NodeAttr> {
        self.root_device.stat_fd(self.fd.as_fd()).map_err(|errno| failed("fstat", errno))
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        run_as(&self.identities, caller, "setting attributes", || {
            change_attr(self.fd.as_fd(), set, |_| Err(Errno::ISDIR))?;
            self.root_device.stat_fd(self.fd.as_fd())
        })
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>> {
        call_attr_of(self.fd.as_fd(), call, &self.identities, caller)
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        let synced = if data_only { rustix::fs::fdatasync(&self.fd) } else { rustix::fs::fsync(&self.fd) };
        synced.map_err(|errno| failed("fsync of a directory", errno))
    }
}

impl WritableDirectory for SourceDirectory {
    fn read(&self, from: u64, max: usize, attrs: bool, caller: &Caller) -> Result<Vec<ListedName>> {
        let failed = |errno| failed("listing", errno);
        let mut listing = self.listing.lock();
        if from == 0 || listing.at != from || listing.names.is_empty() {
            listing.names = self.read_names(from).map_err(failed)?;
        }
        let count = max.max(1).min(listing.names.len());
        let mut names: Vec<ListedName> = listing.names.drain(..count).collect();
        listing.at = names.last().map_or(from, |last| last.next);
        drop(listing);
        if attrs {
            let _as_caller = self.identities.assume(caller).map_err(failed)?;
            for listed in names.iter_mut().filter(|listed| !matches!(&*listed.name, b"." | b"..")) {
                listed.attr = self.root_device.stat_name(self.fd.as_fd(), &listed.name).ok();
            }
        }
        Ok(names)
    }

    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        OpenHold::Descriptor(self.fd.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::SourceFile;
    use crate::WritableSource;
    use rustix::io::Errno;
    use spurline_types::ErrorKind;
    use spurline_volume::writes::{Caller, NamePath, NodePath, WritableVolume as _, WritePlace};

    /// A file that its writer may not open once more is written all the same.
    #[test]
    fn bytes_go_where_the_write_says_whatever_the_file_was_opened_for() {
        let folder = tempfile::tempdir().unwrap();
        let source = WritableSource::open(folder.path(), None).unwrap();
        let own = Caller::default();
        let directory = NodePath { path: b"", expected: None };
        let writers = [None, Some(Caller { uid: 65534, gid: 65534, ..Caller::default() })];
        let writers = &writers[..if source.serves_all_users() { 2 } else { 1 }];
        for (flags, name) in [(libc::O_RDWR, &b"plain"[..]), (libc::O_RDWR | libc::O_APPEND, b"log")] {
            for writer in writers {
                let flags = (flags | libc::O_CREAT | libc::O_TRUNC) as u32;
                let file = source.create(NamePath { directory, name }, flags, 0o600, &own).unwrap().file;
                file.write_at(0, b"0123", None).unwrap();
                for (place, offset, bytes) in [(WritePlace::End, 0, b"45"), (WritePlace::MappedPages, 1, b"ab")] {
                    assert_eq!(file.write_placed(place, offset, bytes, writer.as_ref()).unwrap(), 2, "{writer:?}");
                }
                let mut seen = [0; 8];
                assert_eq!((file.read_at(0, &mut seen).unwrap(), &seen[..6]), (6, &b"0ab345"[..]), "{writer:?}");
            }
        }
    }

    /// Neither way to the other place gives more than the opener got.
    #[test]
    fn a_file_opened_for_reading_takes_no_bytes_at_any_place() {
        let folder = tempfile::tempdir().unwrap();
        let source = WritableSource::open(folder.path(), None).unwrap();
        std::fs::write(folder.path().join("file"), "0123").unwrap();
        let own = Caller::default();
        let at = NodePath { path: b"file", expected: None };
        for flags in [libc::O_RDONLY, libc::O_RDONLY | libc::O_APPEND] {
            let file = source.open(at, flags as u32, &own).unwrap();
            for place in [WritePlace::AsOpened, WritePlace::End, WritePlace::Offset, WritePlace::MappedPages] {
                let refused = file.write_placed(place, 0, b"x", None).unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Io(libc::EBADF), "{place:?}");
            }
            let file = file.as_any().downcast_ref::<SourceFile>().unwrap();
            assert_eq!(file.open_other_place().unwrap_err(), Errno::BADF);
        }
        assert_eq!(std::fs::read(folder.path().join("file")).unwrap(), b"0123");
    }

    /// What kernels without a flag for a write's place do.
    #[test]
    fn a_second_open_file_writes_to_the_other_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let source = WritableSource::open(folder.path(), None).unwrap();
        let own = Caller::default();
        let at = NodePath { path: b"file", expected: None };
        for (flags, seen) in [(libc::O_WRONLY, "0123x"), (libc::O_WRONLY | libc::O_APPEND, "x123")] {
            std::fs::write(&path, "0123").unwrap();
            let file = source.open(at, flags as u32, &own).unwrap();
            let other = file.as_any().downcast_ref::<SourceFile>().unwrap().open_other_place().unwrap();
            assert_eq!(rustix::io::pwrite(other, b"x", 0), Ok(1));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), seen);
        }
    }
}
