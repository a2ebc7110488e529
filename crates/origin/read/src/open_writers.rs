//! Whether a file is open for writing, as its file system reports. It knows no path and no cache.
//!
//! A kernel sets a file's times when a `write(2)` begins, and those of a page written through a memory map at the
//! first access to the page. So bytes may still change after the times, and the version, have become final. A read
//! lease (fcntl(2), `F_SETLEASE`) is refused while any process has the file open for writing or mapped so; it is
//! requested and released at once. The code is unsafe because no library in use has leases.
#![allow(unsafe_code, reason = "fcntl with commands rustix does not have")]

use crate::file_stat::{FileStat, own_clock};
use parking_lot::Mutex;
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use spurline_sys::random;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

/// A file that was changed longer ago is not checked: no `write(2)` takes this long, and a page that was written
/// through a memory map is written back, and its next change noticed, within half a minute.
const LATELY: Duration = Duration::from_secs(600);

/// Longest wait of a lookup for the clock alone; without it, the first read would have to wait.
const PATIENCE: Duration = Duration::from_millis(50);

/// From `asm-generic/fcntl.h`; libc does not define it for every C library.
const F_SETSIG: libc::c_int = 10;

/// The open writers of a file, as far as the operating system reports them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenWriters {
    None,
    Some,
    /// Not reported for this file.
    Hidden,
    /// Not reported for any file of that file system.
    Never,
}

/// What the file systems of a source report.
#[derive(Default)]
pub struct WriterCheck {
    /// By device, whether it reports writers. A file system with a clock of its own is also written by other machines
    /// or processes, without this kernel's knowledge. Two such refuse leases for other reasons, and an open is a
    /// request to them.
    reports_writers: Mutex<HashMap<u64, bool>>,
    /// The message that other users' files can't be checked has been logged.
    warned: AtomicBool,
}

impl WriterCheck {
    /// The stat, marked where the bytes may change under its version, and the wait for the clock's tick if nothing
    /// else prevents a final version and the wait is short. Old files, and anything other than a file, stay as they
    /// are; others are opened by `open` for reading, and their stat is taken again.
    pub fn settle_stat(
        &self,
        seen: FileStat,
        open: impl FnOnce() -> rustix::io::Result<OwnedFd>,
    ) -> (FileStat, Duration) {
        if !seen.changed_within(LATELY, SystemTime::now())
            || self.reports_writers.lock().get(&seen.device()) == Some(&false)
        {
            return without_wait(seen);
        }
        let fd = match open() {
            Ok(fd) => fd,
            // Another process has a lease for writing.
            Err(Errno::AGAIN) => return without_wait(seen.mark_unsettled(random())),
            Err(_) => return without_wait(seen),
        };
        // The order matters: a write that begins after the check changes the earlier stat, if the clock has ticked.
        let Ok(stat) = rustix::fs::fstat(&fd) else { return without_wait(seen) };
        let seen = FileStat::from(&stat);
        // It may be another object now, which is not a file.
        if !seen.changed_within(LATELY, SystemTime::now()) {
            return without_wait(seen);
        }
        if !*self.reports_writers.lock().entry(seen.device()).or_insert_with(|| own_clock(fd.as_fd())) {
            return without_wait(seen);
        }
        let left = seen.young_for(SystemTime::now(), 0);
        match find_writers(fd.as_fd()) {
            OpenWriters::None if left.is_zero() => without_wait(seen),
            OpenWriters::None => (seen.mark_unsettled(random()), if left <= PATIENCE { left } else { Duration::ZERO }),
            OpenWriters::Some if own_clock(fd.as_fd()) => without_wait(seen.mark_unsettled(random())),
            // The device number belonged to another file system before.
            OpenWriters::Some | OpenWriters::Never => {
                self.reports_writers.lock().insert(seen.device(), false);
                without_wait(seen)
            }
            OpenWriters::Hidden => {
                if !self.warned.swap(true, Ordering::Relaxed) {
                    tracing::info!(
                        "writers of other users' files can't be detected: this process lacks CAP_LEASE; a read of such a file \
                         while it is overwritten in place may leave mixed data in the cache"
                    );
                }
                without_wait(seen)
            }
        }
    }
}

/// Whether the file is open for writing; `fd` is open for reading only.
fn find_writers(fd: BorrowedFd<'_>) -> OpenWriters {
    // A writer that arrives while the lease is held waits until it is released. The kernel then sends the process a
    // signal: SIGIO, which ends it, unless another is set, one that is ignored by default.
    let asked =
        fcntl_number(fd, F_SETSIG, libc::SIGURG).and_then(|()| fcntl_number(fd, libc::F_SETLEASE, libc::F_RDLCK));
    // Closing is not enough: a child that was forked meanwhile has the file open, too.
    let _ = asked.is_ok() && fcntl_number(fd, libc::F_SETLEASE, libc::F_UNLCK).is_ok();
    match asked {
        Ok(()) => OpenWriters::None,
        // Out of memory: assume a writer.
        Err(Errno::AGAIN | Errno::NOMEM) => OpenWriters::Some,
        // Another user's file, and the process has not CAP_LEASE.
        Err(Errno::ACCESS | Errno::PERM) => OpenWriters::Hidden,
        Err(_) => OpenWriters::Never,
    }
}

fn fcntl_number(fd: BorrowedFd<'_>, command: libc::c_int, value: libc::c_int) -> rustix::io::Result<()> {
    // SAFETY: the descriptor is open for as long as it is borrowed, and both commands take a number and no pointer.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, value) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

/// The answer for a file whose version is as final as waiting can make it.
fn without_wait(seen: FileStat) -> (FileStat, Duration) {
    (seen, Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open;
    use rustix::fs::{Mode, OFlags};
    use spurline_object_store::OriginOptions;
    use spurline_types::{ErrorKind, ObjectRef, SliceSink, Stats};
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Instant;

    const PAGE: usize = 4096;

    /// The first page of a file, to be written through a memory map.
    struct Map(*mut u8);

    impl Map {
        fn of(file: &File) -> Map {
            let (protection, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
            // SAFETY: the kernel chooses the address, and the file is as long as the map.
            let at = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, protection, libc::MAP_SHARED, fd, 0) };
            assert_ne!(at, libc::MAP_FAILED);
            Map(at.cast())
        }

        fn fill(&self, byte: u8) {
            // SAFETY: the map is a page long, and nothing else of this process refers to it.
            unsafe { std::ptr::write_bytes(self.0, byte, PAGE) }
        }
    }

    impl Drop for Map {
        fn drop(&mut self) {
            // SAFETY: the map is unmapped once, and is a page long.
            unsafe { libc::munmap(self.0.cast(), PAGE) };
        }
    }

    /// A file of one page, on a file system that reports writers.
    fn file(dir: &Path) -> Option<File> {
        std::fs::write(dir.join("f"), vec![b'a'; PAGE]).unwrap();
        match find_writers(File::open(dir.join("f")).unwrap().as_fd()) {
            OpenWriters::Never => {
                spurline_testkit::skip("leases", "the file system of the directory for temporary files has none");
                None
            }
            answer => {
                assert_eq!(answer, OpenWriters::None);
                Some(File::options().read(true).write(true).open(dir.join("f")).unwrap())
            }
        }
    }

    #[test]
    fn a_file_is_written_while_it_is_open_for_writing_or_mapped_so() {
        let dir = tempfile::tempdir().unwrap();
        let Some(writer) = file(dir.path()) else { return };
        let ask = || find_writers(File::open(dir.path().join("f")).unwrap().as_fd());
        assert_eq!(ask(), OpenWriters::Some);
        let map = Map::of(&writer);
        drop(writer);
        assert_eq!(ask(), OpenWriters::Some);
        drop(map);
        assert_eq!(ask(), OpenWriters::None);
        // A reader is no writer, and the lease is released.
        let _reader = File::open(dir.path().join("f")).unwrap();
        assert_eq!(ask(), OpenWriters::None);
        let writer = OFlags::WRONLY | OFlags::NONBLOCK;
        rustix::fs::open(dir.path().join("f"), writer, Mode::empty()).unwrap();
    }

    /// Bytes that change after the file's times, as those of one long `write(2)` do.
    #[test]
    fn nothing_that_is_read_while_a_file_is_written_is_found_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let Some(writer) = file(dir.path()) else { return };
        let store = open(dir.path().to_str().unwrap(), &OriginOptions::default(), Arc::new(Stats::default())).unwrap();
        let soon = || Instant::now() + Duration::from_secs(30);
        let look = || store.lookup(b"f", soon()).unwrap();
        let list = || store.list(b"", None, 10, soon()).unwrap().entries[0].attr.clone();
        let read = |version| {
            let object = ObjectRef::new(store.source_url(), b"f", version, PAGE as u64);
            let mut bytes = vec![0; PAGE];
            store.read(&object, 0, &mut SliceSink::new(&mut bytes), soon()).map(|()| bytes[PAGE - 1])
        };
        let map = Map::of(&writer);
        map.fill(b'b');
        let versions = [look().version, list().version, look().version];
        let mut read_as = versions.clone().map(|version| read(version).unwrap());
        assert_eq!(read_as, [b'b'; 3]);
        map.fill(b'c');
        assert_eq!(
            look().version.settled_text(),
            versions[0].settled_text(),
            "a page that is dirty already moves no time"
        );
        read_as[0] = read(look().version).unwrap();
        assert_eq!(read_as, *b"cbb");
        drop((map, writer));
        let after = look().version;
        assert!(!after.is_unsettled() && after == list().version);
        assert!(versions.iter().all(|version| version.is_unsettled() && version.settled_text() == after.as_str()));
        assert!(versions[0] != versions[1] && versions[1] != versions[2] && versions[0] != versions[2]);
        assert_eq!(read(after.clone()).unwrap(), b'c');
        // Opened again without a change, it keeps its version; after a change, it has none of the earlier ones.
        let writer = File::options().write(true).open(dir.path().join("f")).unwrap();
        assert_eq!(look().version.settled_text(), after.as_str());
        assert_eq!(read(after.clone()).unwrap(), b'c');
        std::thread::sleep(Duration::from_millis(25));
        writer.write_all_at(b"d", 0).unwrap();
        assert_eq!(read(after).unwrap_err().kind(), ErrorKind::Stale);
        assert_eq!(read(versions[0].clone()).unwrap_err().kind(), ErrorKind::Stale);
    }
}
