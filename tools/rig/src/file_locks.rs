//! Locks of files as programs set them, and what holds between two paths that lead to one file.

use crate::world::*;
use rustix::fs::FlockOperation;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// A lock of fcntl(2) on some bytes; `kind` is `F_RDLCK`, `F_WRLCK` or `F_UNLCK`.
pub fn record(kind: i32, bytes: std::ops::Range<i64>) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start,
        l_len: bytes.end - bytes.start,
        l_pid: 0,
    }
}

pub fn call(file: &File, command: i32, record: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the file is open, and the record lives for the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(record)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// A lock of the open file; true if it was free.
pub fn try_lock(file: &File, kind: i32, bytes: std::ops::Range<i64>) -> bool {
    match call(file, libc::F_OFD_SETLK, &mut record(kind, bytes)) {
        Ok(()) => true,
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
            false
        }
    }
}

pub fn try_flock(file: &File, operation: FlockOperation) -> bool {
    match rustix::fs::flock(file, operation) {
        Ok(()) => true,
        Err(errno) => {
            assert_eq!(errno, rustix::io::Errno::WOULDBLOCK);
            false
        }
    }
}

pub const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
pub const SHARED: FlockOperation = FlockOperation::NonBlockingLockShared;

/// What holds wherever `one` and `other` reach the same file from.
pub fn check_exclusion(one: &Path, other: &Path) {
    let (a, b) = (open(one), open(other));
    // Ranges of open files.
    assert!(try_lock(&a, libc::F_WRLCK, 0..10) && try_lock(&a, libc::F_RDLCK, 20..30));
    assert!(!try_lock(&b, libc::F_RDLCK, 5..6) && !try_lock(&b, libc::F_WRLCK, 29..40));
    assert!(try_lock(&b, libc::F_RDLCK, 20..30) && try_lock(&b, libc::F_WRLCK, 10..20));
    let mut seen = record(libc::F_WRLCK, 0..100);
    call(&b, libc::F_OFD_GETLK, &mut seen).unwrap();
    assert_eq!((seen.l_type, seen.l_start, seen.l_len), (libc::F_WRLCK as i16, 0, 10));
    // Part of a range is released, and one type becomes the other.
    assert!(try_lock(&a, libc::F_UNLCK, 0..5) && try_lock(&b, libc::F_WRLCK, 0..5));
    assert!(!try_lock(&a, libc::F_WRLCK, 20..30));
    assert!(try_lock(&b, libc::F_UNLCK, 20..30) && try_lock(&a, libc::F_WRLCK, 20..30));
    drop(a);
    eventually("the locks of a closed file are gone", || try_lock(&b, libc::F_WRLCK, 0..100));
    drop(b);
    // Locks of this process go with any close of the file.
    let (a, again, b) = (open(one), open(one), open(other));
    // Another test may just be starting a program, which has a copy of the closed file for a moment.
    let mine = || call(&a, libc::F_SETLK, &mut record(libc::F_WRLCK, 0..10));
    eventually("the locks of a closed file are gone", || mine().is_ok());
    call(&again, libc::F_SETLK, &mut record(libc::F_WRLCK, 5..15)).unwrap();
    assert!(!try_lock(&b, libc::F_WRLCK, 12..13));
    drop(again);
    assert!(try_lock(&b, libc::F_WRLCK, 0..100));
    drop((a, b));
    // Whole files.
    let (a, b) = (open(one), open(other));
    eventually("the locks of a closed file are gone", || try_flock(&a, SHARED));
    assert!(try_flock(&b, SHARED) && !try_flock(&a, EXCLUSIVE));
    assert!(try_flock(&b, FlockOperation::NonBlockingUnlock) && try_flock(&a, EXCLUSIVE) && !try_flock(&b, SHARED));
    // Another descriptor of the file keeps the lock.
    drop(a.try_clone().unwrap());
    assert!(!try_flock(&b, SHARED));
    drop(a);
    eventually("the lock of a closed file is gone", || try_flock(&b, EXCLUSIVE));
}

/// Adds one to the number in the file, under its lock.
pub fn add_one(file: &File, flock: bool) {
    if flock {
        rustix::fs::flock(file, FlockOperation::LockExclusive).unwrap();
    } else {
        call(file, libc::F_OFD_SETLKW, &mut record(libc::F_WRLCK, 0..8)).unwrap();
    }
    let mut number = [0; 8];
    let read = file.read_at(&mut number, 0).unwrap();
    assert!(read == 0 || read == 8);
    file.write_all_at(&(u64::from_le_bytes(number) + 1).to_le_bytes(), 0).unwrap();
    if flock {
        rustix::fs::flock(file, FlockOperation::Unlock).unwrap();
    } else {
        call(file, libc::F_OFD_SETLK, &mut record(libc::F_UNLCK, 0..8)).unwrap();
    }
}

/// Two threads at each path add to the number in the file that all paths lead to, each this many times.
pub fn count_together(paths: &[PathBuf], times: u64, flock: bool) {
    std::thread::scope(|scope| {
        for path in paths.iter().flat_map(|path| [path; 2]) {
            scope.spawn(move || {
                let file = open(path);
                (0..times).for_each(|_| add_one(&file, flock));
            });
        }
    });
}
