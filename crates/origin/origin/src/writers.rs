//! Whether somebody has a file open for writing, as its file system tells. It knows no path and no cache.
//!
//! A kernel sets a file's times when a `write(2)` begins, and those of a page that is written through a memory map when
//! the page is touched first. So bytes may still change under the times, and the version, that the file has for good. Who
//! wants to know asks for a read lease (fcntl(2), `F_SETLEASE`), which is not given while anybody has the file open for
//! writing or mapped so, and gives it back at once. It is the one place of this crate that needs unsafe code: no library
//! in use has leases.
#![allow(unsafe_code, reason = "fcntl with commands rustix does not have")]

use crate::seen::{Seen, own_clock};
use parking_lot::Mutex;
use rustix::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use rustix::io::Errno;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// A file that was changed longer ago is not asked about: no `write(2)` takes this long, and a page that was written
/// through a memory map is written to disk, and its next change seen, within half a minute.
const LATELY: Duration = Duration::from_secs(600);

/// A lookup that nobody but the clock keeps waiting waits no longer than this; the first read would have to.
const PATIENCE: Duration = Duration::from_millis(50);

/// From `asm-generic/fcntl.h`; libc has it not for every C library.
const F_SETSIG: libc::c_int = 10;

/// Who writes, as far as the operating system says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Writers {
    None,
    Some,
    /// It does not say of this file.
    Hidden,
    /// It does not say of any file there.
    Never,
}

/// What is known of the file systems of a source.
#[derive(Default)]
pub(crate) struct Askable {
    /// By device, whether one tells who writes. One with a clock of its own is also written to by other machines or
    /// processes, behind this kernel's back; two such refuse leases for reasons of their own, and an open is a request to them.
    tells: Mutex<HashMap<u64, bool>>,
    marks: RandomState,
    /// It was said that files of other users can't be asked about.
    said: AtomicBool,
}

impl Askable {
    /// `seen`, marked where its bytes may change under its version, and for how long they may although nobody writes: until
    /// the clock has ticked, if that is soon. Files that are old, and all that are none, are let be; others are opened by
    /// `open`, for reading, and taken as they are then.
    pub fn settle(&self, seen: Seen, open: impl FnOnce() -> rustix::io::Result<OwnedFd>) -> (Seen, Duration) {
        let no_more = |seen| (seen, Duration::ZERO);
        if !seen.changed_within(LATELY, SystemTime::now()) || self.tells.lock().get(&seen.device()) == Some(&false) {
            return no_more(seen);
        }
        let fd = match open() {
            Ok(fd) => fd,
            // Somebody has a lease for writing.
            Err(Errno::AGAIN) => return no_more(self.mark(seen)),
            Err(_) => return no_more(seen),
        };
        // In this order: a write that begins after the asking changes what was seen before it, if the clock has ticked.
        let Ok(stat) = rustix::fs::fstat(&fd) else { return no_more(seen) };
        let seen = Seen::from(&stat);
        // It may be another one, which is no file.
        if !seen.changed_within(LATELY, SystemTime::now()) {
            return no_more(seen);
        }
        if !*self.tells.lock().entry(seen.device()).or_insert_with(|| own_clock(fd.as_fd())) {
            return no_more(seen);
        }
        let left = seen.young_for(SystemTime::now(), 0);
        match writers(fd.as_fd()) {
            Writers::None if left.is_zero() => no_more(seen),
            Writers::None => (self.mark(seen), if left <= PATIENCE { left } else { Duration::ZERO }),
            Writers::Some if own_clock(fd.as_fd()) => no_more(self.mark(seen)),
            // The device's number was another file system's before.
            Writers::Some | Writers::Never => {
                self.tells.lock().insert(seen.device(), false);
                no_more(seen)
            }
            Writers::Hidden => {
                if !self.said.swap(true, Ordering::Relaxed) {
                    tracing::info!(
                        "it can't be asked who is writing a file of another user: this process has not CAP_LEASE; what \
                         is read of one while it is overwritten in place may stay a mix in the cache"
                    );
                }
                no_more(seen)
            }
        }
    }

    fn mark(&self, seen: Seen) -> Seen {
        seen.unsettled(self.marks.hash_one(Instant::now()))
    }
}

/// Who has the file open for writing; `fd` is open for reading alone.
fn writers(fd: BorrowedFd<'_>) -> Writers {
    // A writer that comes while the lease is held waits until it is given back. The process is told of it by a signal:
    // SIGIO, which ends it, unless one is named that is ignored by default.
    let asked = fcntl(fd, F_SETSIG, libc::SIGURG).and_then(|()| fcntl(fd, libc::F_SETLEASE, libc::F_RDLCK));
    // Not left to the closing: a child that was forked meanwhile has the file open, too.
    let _ = asked.is_ok() && fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK).is_ok();
    match asked {
        Ok(()) => Writers::None,
        // Short of memory: nobody knows.
        Err(Errno::AGAIN | Errno::NOMEM) => Writers::Some,
        // Another user's file, and the process has not CAP_LEASE.
        Err(Errno::ACCESS | Errno::PERM) => Writers::Hidden,
        Err(_) => Writers::Never,
    }
}

fn fcntl(fd: BorrowedFd<'_>, command: libc::c_int, value: libc::c_int) -> rustix::io::Result<()> {
    // SAFETY: the descriptor is open for as long as it is borrowed, and both commands take a number and no pointer.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, value) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{UnderConfig, open};
    use rustix::fs::{Mode, OFlags};
    use spurline_types::{ErrorKind, ObjectRef, SliceSink, Stats};
    use std::fs::File;
    use std::os::unix::fs::FileExt as _;
    use std::path::Path;
    use std::sync::Arc;

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

    /// A file of a page in a directory whose file system tells who writes.
    fn file(dir: &Path) -> Option<File> {
        std::fs::write(dir.join("f"), vec![b'a'; PAGE]).unwrap();
        match writers(File::open(dir.join("f")).unwrap().as_fd()) {
            Writers::Never => {
                spurline_testkit::skip("leases", "the file system of the directory for temporary files has none");
                None
            }
            answer => {
                assert_eq!(answer, Writers::None);
                Some(File::options().read(true).write(true).open(dir.join("f")).unwrap())
            }
        }
    }

    #[test]
    fn a_file_is_written_while_it_is_open_for_writing_or_mapped_so() {
        let dir = tempfile::tempdir().unwrap();
        let Some(writer) = file(dir.path()) else { return };
        let ask = || writers(File::open(dir.path().join("f")).unwrap().as_fd());
        assert_eq!(ask(), Writers::Some);
        let map = Map::of(&writer);
        drop(writer);
        assert_eq!(ask(), Writers::Some);
        drop(map);
        assert_eq!(ask(), Writers::None);
        // Whoever reads it is none, and the lease is given back.
        let _reader = File::open(dir.path().join("f")).unwrap();
        assert_eq!(ask(), Writers::None);
        let writer = OFlags::WRONLY | OFlags::NONBLOCK;
        rustix::fs::open(dir.path().join("f"), writer, Mode::empty()).unwrap();
    }

    /// Bytes that come under times which the file has already, as those of one long `write(2)` do.
    #[test]
    fn nothing_that_is_read_while_a_file_is_written_is_found_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let Some(writer) = file(dir.path()) else { return };
        let store = open(dir.path().to_str().unwrap(), &UnderConfig::default(), Arc::new(Stats::default())).unwrap();
        let soon = || Instant::now() + Duration::from_secs(30);
        let look = || store.lookup(b"f", soon()).unwrap();
        let list = || store.list(b"", None, 10, soon()).unwrap().entries[0].attr.clone();
        let read = |version| {
            let object = ObjectRef::new(store.source(), b"f", version, PAGE as u64);
            let mut bytes = vec![0; PAGE];
            store.read(&object, 0, &mut SliceSink::new(&mut bytes), soon()).map(|()| bytes[PAGE - 1])
        };
        let map = Map::of(&writer);
        map.fill(b'b');
        let versions = [look().version, list().version, look().version];
        let mut read_as = versions.clone().map(|version| read(version).unwrap());
        assert_eq!(read_as, [b'b'; 3]);
        map.fill(b'c');
        assert_eq!(look().version.settled(), versions[0].settled(), "a page that is dirty already moves no time");
        read_as[0] = read(look().version).unwrap();
        assert_eq!(read_as, *b"cbb");
        drop((map, writer));
        let after = look().version;
        assert!(!after.is_unsettled() && after == list().version);
        assert!(versions.iter().all(|version| version.is_unsettled() && version.settled() == after.as_str()));
        assert!(versions[0] != versions[1] && versions[1] != versions[2] && versions[0] != versions[2]);
        assert_eq!(read(after.clone()).unwrap(), b'c');
        // Opened again and not changed it stays what it was; changed, it is no version of before.
        let writer = File::options().write(true).open(dir.path().join("f")).unwrap();
        assert_eq!(look().version.settled(), after.as_str());
        assert_eq!(read(after.clone()).unwrap(), b'c');
        std::thread::sleep(Duration::from_millis(25));
        writer.write_all_at(b"d", 0).unwrap();
        assert_eq!(read(after).unwrap_err().kind(), ErrorKind::Stale);
        assert_eq!(read(versions[0].clone()).unwrap_err().kind(), ErrorKind::Stale);
    }
}
