//! A real disk: io_uring with O_DIRECT, the page cache, or plain system calls, as the mode and the kernel allow.

use super::{ALIGN, DataFile, DiskIo, DiskSpace, ReadTarget, RingSet, create_in_steps};
use crate::config::IoMode;
use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The operations of a real disk.
pub struct RealDisk {
    /// Distinguishes this disk's late operations from those of other disks.
    number: u8,
    rings: Arc<RingSet>,
    /// Whether files are opened with O_DIRECT: the mode requests that and the file system has not refused.
    direct: AtomicBool,
}

impl RealDisk {
    /// Operations in the given mode, on rings shared with the store's other disks.
    pub fn new(number: u8, mode: IoMode, rings: Arc<RingSet>) -> Self {
        RealDisk { number, rings, direct: AtomicBool::new(mode == IoMode::Dio) }
    }

    fn open_once(&self, path: &Path, flags: i32, timeout: Duration) -> io::Result<OwnedFd> {
        let name = c_name(path)?;
        if flags & libc::O_CREAT == 0 {
            // A path in the name cache opens at once and can't block on the disk.
            match open_cached(&name, flags) {
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOSYS | libc::EPERM)) => {}
                other => return other,
            }
        }
        self.rings.open(self.number, &name, flags, timeout).unwrap_or_else(|| {
            // SAFETY: the name is a C string that outlives the call.
            owned_fd(unsafe { libc::open(name.as_ptr(), flags, 0o600) }.into())
        })
    }
}

fn c_name(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn owned_fd(result: i64) -> io::Result<OwnedFd> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the system call created this descriptor, and there is no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(result as i32) })
}

fn open_cached(name: &CString, flags: i32) -> io::Result<OwnedFd> {
    // SAFETY: `open_how` is plain data for which all zeros is valid.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = flags as u64;
    how.resolve = libc::RESOLVE_CACHED;
    // SAFETY: name and `how` outlive the call, and the size is `how`'s.
    owned_fd(unsafe {
        libc::syscall(libc::SYS_openat2, libc::AT_FDCWD, name.as_ptr(), &how, std::mem::size_of::<libc::open_how>())
    })
}

fn check_result(result: i32) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Reads bytes that are in the page cache, without waiting for the disk; returns the number.
fn read_cached(file: &File, offset: u64, ptr: *mut u8, len: usize) -> usize {
    let vector = libc::iovec { iov_base: ptr.cast(), iov_len: len };
    // SAFETY: the vector names memory for which the caller of `DiskIo::read` is responsible.
    let n = unsafe { libc::preadv2(file.as_raw_fd(), &vector, 1, offset as i64, libc::RWF_NOWAIT) };
    usize::try_from(n).unwrap_or(0)
}

impl DiskIo for RealDisk {
    fn open(&self, path: &Path, create: bool, timeout: Duration) -> io::Result<DataFile> {
        let base = libc::O_RDWR | libc::O_CLOEXEC | libc::O_NOFOLLOW | if create { libc::O_CREAT } else { 0 };
        if self.direct.load(Ordering::Relaxed) {
            match self.open_once(path, base | libc::O_DIRECT, timeout) {
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                    if self.direct.swap(false, Ordering::Relaxed) {
                        tracing::warn!(
                            "{}: the file system refuses O_DIRECT; this cache disk is read through the page cache",
                            path.display()
                        );
                    }
                }
                other => return other.map(|fd| DataFile { file: fd.into(), direct: true }),
            }
        }
        self.open_once(path, base, timeout).map(|fd| DataFile { file: fd.into(), direct: false })
    }

    fn open_to_share(&self, path: &Path, timeout: Duration) -> io::Result<File> {
        self.open_once(path, libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOFOLLOW, timeout).map(File::from)
    }

    fn create(&self, path: &Path, padded: &[u8], len: usize, timeout: Duration) -> io::Result<()> {
        let name = c_name(path)?;
        let (flag, data) =
            if self.direct.load(Ordering::Relaxed) { (libc::O_DIRECT, padded) } else { (0, &padded[..len]) };
        match self.rings.create(
            self.number,
            &name,
            libc::O_WRONLY | libc::O_CREAT | libc::O_NOFOLLOW | flag,
            data,
            timeout,
        ) {
            Some(Ok(n)) if n == data.len() => Ok(()),
            Some(Err(error)) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
            // The separate steps return the precise error.
            _ => create_in_steps(self, path, padded, len, timeout),
        }
    }

    fn read(
        &self,
        file: &DataFile,
        offset: u64,
        target: &mut ReadTarget<'_>,
        timeout: Duration,
        done: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<usize> {
        if !file.direct && read_cached(&file.file, offset, target.ptr, target.len) == target.len {
            done(0..target.len);
            return Ok(target.len);
        }
        if let Some(result) = self.rings.read(self.number, file.file.as_raw_fd(), offset, target, timeout, done) {
            return result;
        }
        let mut n = 0;
        while n < target.len {
            // SAFETY: the memory belongs to the target, and this call is the only user.
            let rest = unsafe { std::slice::from_raw_parts_mut(target.ptr.add(n), target.len - n) };
            match file.file.read_at(rest, offset + n as u64) {
                Ok(0) => break,
                Ok(more) => n += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if file.direct && !n.is_multiple_of(ALIGN) {
                break;
            }
        }
        done(0..n);
        Ok(n)
    }

    fn write(&self, file: &DataFile, offset: u64, data: &[u8], timeout: Duration) -> io::Result<()> {
        match self.rings.write(self.number, file.file.as_raw_fd(), offset, data, timeout) {
            None => file.file.write_all_at(data, offset),
            Some(Ok(n)) if n == data.len() => Ok(()),
            // A short write: writing the rest reveals the cause (no space, most likely), or completes the write.
            Some(Ok(n)) if n.is_multiple_of(ALIGN) => file.file.write_all_at(&data[n..], offset + n as u64),
            Some(Ok(_)) => Err(io::ErrorKind::WriteZero.into()),
            Some(Err(error)) => Err(error),
        }
    }

    fn punch(&self, file: &DataFile, offset: u64, len: u64, timeout: Duration) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let fd = file.file.as_raw_fd();
        self.rings.fallocate(self.number, fd, mode, offset, len, timeout).unwrap_or_else(|| {
            // SAFETY: a call on a descriptor that is open for as long as `file` lives.
            check_result(unsafe { libc::fallocate(fd, mode, offset as i64, len as i64) })
        })
    }

    fn truncate(&self, file: &DataFile, len: u64, timeout: Duration) -> io::Result<()> {
        self.rings.truncate(self.number, file.file.as_raw_fd(), len, timeout).unwrap_or_else(|| file.file.set_len(len))
    }

    fn unlink(&self, path: &Path, timeout: Duration) -> io::Result<()> {
        self.rings.unlink(self.number, &c_name(path)?, timeout).unwrap_or_else(|| std::fs::remove_file(path))
    }

    fn append(&self, log: &File, offset: u64, data: &[u8]) -> io::Result<()> {
        log.write_all_at(data, offset)
    }

    fn sync(&self, log: &File, timeout: Duration) -> io::Result<()> {
        self.rings.sync(self.number, log.as_raw_fd(), timeout).unwrap_or_else(|| log.sync_data())
    }

    fn disk_space(&self, path: &Path) -> io::Result<DiskSpace> {
        let name = c_name(path)?;
        // SAFETY: `statvfs` is plain data for which all zeros is valid.
        let mut s: libc::statvfs = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers outlive the call.
        check_result(unsafe { libc::statvfs(name.as_ptr(), &mut s) })?;
        Ok(DiskSpace { total: s.f_blocks * s.f_frsize, free: s.f_bavail * s.f_frsize })
    }

    fn late_count(&self) -> usize {
        self.rings.reap_late();
        self.rings.late(self.number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::{self, SCRATCH_BYTES};

    /// What holds with io_uring holds with plain system calls, for O_DIRECT and for the page cache.
    #[test]
    fn reads_back_what_was_written_in_every_way() {
        let dir = tempfile::tempdir().unwrap();
        for (n, rings) in [RingSet::new(None), RingSet::refused()].into_iter().enumerate() {
            for mode in [IoMode::Dio, IoMode::PageCache] {
                let disk = RealDisk::new(0, mode, Arc::clone(&rings));
                let path = dir.path().join(format!("{n}-{mode:?}"));
                let second = Duration::from_secs(60);
                assert_eq!(disk.open(&path, false, second).unwrap_err().kind(), io::ErrorKind::NotFound);
                let file = disk.open(&path, true, second).unwrap();
                scratch::with_scratch(|scratch| {
                    let pattern = |i: usize| ((i * 7) >> 3) as u8;
                    scratch.bounce_bytes().iter_mut().enumerate().for_each(|(i, b)| *b = pattern(i));
                    disk.write(&file, 8192, &scratch.bounce_bytes()[..], second).unwrap();
                    disk.truncate(&file, 8192 + 100_000, second).unwrap();
                    disk.punch(&file, 8192, 4096, second).unwrap();
                    disk.sync(&file.file, second).unwrap();
                    scratch.bounce_bytes().fill(1);
                    let (ptr, _) = crate::io::IoBuf::raw_parts(scratch.bounce().0);
                    let mut none = || Box::new(()) as Box<dyn Send>;
                    let mut target = ReadTarget { ptr, len: SCRATCH_BYTES, keep: &mut none };
                    let mut seen = 0;
                    let n = disk.read(&file, 8192, &mut target, second, &mut |part| seen += part.len()).unwrap();
                    assert_eq!((n, seen), (100_000, 100_000), "{mode:?}");
                    let bytes = scratch.bounce_bytes();
                    assert!(bytes[..4096].iter().all(|b| *b == 0));
                    assert!((4096..100_000).all(|i| bytes[i] == pattern(i)));
                });
                disk.unlink(&path, second).unwrap();
                assert_eq!(disk.unlink(&path, second).unwrap_err().kind(), io::ErrorKind::NotFound);
            }
        }
    }

    #[test]
    fn small_files_are_made_in_one_go_and_errors_are_the_systems() {
        let dir = tempfile::tempdir().unwrap();
        for (n, rings) in [RingSet::new(None), RingSet::refused()].into_iter().enumerate() {
            for mode in [IoMode::Dio, IoMode::PageCache] {
                let disk = RealDisk::new(0, mode, Arc::clone(&rings));
                let path = dir.path().join(format!("{n}-{mode:?}"));
                let second = Duration::from_secs(60);
                scratch::with_scratch(|scratch| {
                    let padded = &mut scratch.bounce_bytes()[..12_288];
                    padded.iter_mut().enumerate().for_each(|(i, b)| *b = (i >> 5) as u8);
                    padded[10_240..].fill(0);
                    let missing = dir.path().join("none").join("file");
                    let error = disk.create(&missing, padded, 10_240, second).unwrap_err();
                    assert_eq!(error.kind(), io::ErrorKind::NotFound);
                    let error = disk.create(dir.path(), padded, 10_240, second).unwrap_err();
                    assert_eq!(error.raw_os_error(), Some(libc::EISDIR));
                    // Twice: the second has the place of the first.
                    for _ in 0..2 {
                        disk.create(&path, padded, 10_240, second).unwrap();
                        let got = std::fs::read(&path).unwrap();
                        assert!(got[..10_240] == padded[..10_240] && got[10_240..].iter().all(|b| *b == 0), "{mode:?}");
                    }
                });
                assert_eq!(disk.late_count(), 0);
            }
        }
    }
}
