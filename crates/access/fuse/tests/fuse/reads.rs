//! Every read-side call through real mounts, on /dev/fuse and over io_uring.

use crate::common;
use common::*;
use spurline_fuse::FuseIo;
use std::collections::HashSet;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

fn on_dev(test: impl FnOnce(&Mount)) {
    if can_mount() {
        let mount = Mount::new(FuseIo::Dev);
        assert_eq!(mount.session().transport().unwrap().io, FuseIo::Dev);
        test(&mount);
    }
}

fn errno(result: std::io::Result<impl Sized>) -> i32 {
    result.err().and_then(|e| e.raw_os_error()).unwrap_or(0)
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

/// O_DIRECT wants aligned memory.
fn read_direct(path: &Path, offset: u64, len: usize) -> Vec<u8> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path).unwrap();
    let mut memory = vec![0u8; len + 4096];
    let start = memory.as_ptr().align_offset(4096);
    let n = file.read_at(&mut memory[start..start + len], offset).unwrap();
    memory[start..start + n].to_vec()
}

fn whole_files(mount: &Mount) {
    let expected = pattern(0, DATA_LEN as usize);
    for name in ["data", "filled"] {
        assert!(fs::read(mount.path(name)).unwrap() == expected, "{name}");
        assert!(read_direct(&mount.path(name), 0, 4 << 20) == expected, "{name} direct");
        assert!(read_direct(&mount.path(name), 1 << 20, 8192) == expected[1 << 20..][..8192], "{name} direct");
        let tail = &expected[3 << 20..];
        assert!(read_direct(&mount.path(name), 3 << 20, 4096) == tail, "{name} tail");
    }
    assert_eq!(mount.fs.max_read_seen.load(std::sync::atomic::Ordering::SeqCst), 1 << 20);
    assert!(mount.stats.fuse.read_bytes.get() >= 2 * DATA_LEN);
}

fn mapped(mount: &Mount) {
    let file = File::open(mount.path("filled")).unwrap();
    let len = DATA_LEN as usize;
    // SAFETY: a private read-only mapping of a whole open file; it is unmapped below and not used after.
    unsafe {
        let p = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0);
        assert_ne!(p, libc::MAP_FAILED);
        assert!(std::slice::from_raw_parts(p.cast::<u8>(), len) == pattern(0, len));
        libc::munmap(p, len);
    }
}

fn seeks(mount: &Mount) {
    let mut file = File::open(mount.path("data")).unwrap();
    assert_eq!(file.seek(SeekFrom::End(-10)).unwrap(), DATA_LEN - 10);
    let mut tail = Vec::new();
    file.read_to_end(&mut tail).unwrap();
    assert_eq!(tail, pattern(DATA_LEN - 10, 10));
    // SAFETY: lseek takes integers only.
    let (hole, data, past) = unsafe {
        let fd = file.as_raw_fd();
        let end = DATA_LEN as i64;
        (
            libc::lseek(fd, 5, libc::SEEK_HOLE),
            libc::lseek(fd, 5, libc::SEEK_DATA),
            libc::lseek(fd, end, libc::SEEK_DATA),
        )
    };
    assert_eq!((hole, data, past), (DATA_LEN as i64, 5, -1));
}

fn directories(mount: &Mount) {
    let root: HashSet<String> =
        fs::read_dir(mount.dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    assert_eq!(root, NAMES.iter().map(|n| n.to_string()).collect());
    let mut many = 0;
    let mut seen = HashSet::new();
    for entry in fs::read_dir(mount.path("many")).unwrap() {
        let entry = entry.unwrap();
        assert!(entry.file_type().unwrap().is_file());
        assert!(seen.insert(entry.file_name()), "{:?} twice", entry.file_name());
        many += 1;
    }
    assert_eq!(many, MANY);
    assert!(fs::metadata(mount.path("many/name-099999")).unwrap().is_file());
    assert_eq!(errno(fs::metadata(mount.path("many/name-100000"))), libc::ENOENT);
}

fn odd(mount: &Mount) {
    let mut listed: Vec<Vec<u8>> =
        fs::read_dir(mount.path("odd")).unwrap().map(|e| e.unwrap().file_name().into_vec()).collect();
    let mut expected = odd_names();
    listed.sort();
    expected.sort();
    assert!(listed == expected);
    for name in expected {
        assert!(fs::metadata(mount.path("odd").join(OsStr::from_bytes(&name))).is_ok(), "{name:?}");
    }
    assert_eq!(errno(fs::metadata(mount.path("odd").join("x".repeat(256)))), libc::ENAMETOOLONG);
}

fn attributes(mount: &Mount) {
    let m = fs::metadata(mount.path("data")).unwrap();
    assert_eq!((m.len(), m.ino(), m.mode(), m.mtime(), m.mtime_nsec()), (DATA_LEN, 2, 0o100_644, 1_700_000_000, 5));
    assert_eq!(fs::read_link(mount.path("link")).unwrap(), Path::new("data"));
    assert_eq!(fs::metadata(mount.path("link")).unwrap().len(), DATA_LEN);
    assert_eq!(errno(fs::metadata(mount.path("none"))), libc::ENOENT);
    let path = c_path(&mount.path("data"));
    // SAFETY: the path is a C string, the struct is plain data, and the buffers are as long as said.
    unsafe {
        let mut s: libc::statfs = std::mem::zeroed();
        assert_eq!(libc::statfs(path.as_ptr(), &raw mut s), 0);
        assert_eq!((s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_namelen), (1000, 600, 500, 77, 255));
        assert_eq!(libc::access(path.as_ptr(), libc::R_OK), 0);
        let mut value = [0u8; 8192];
        let mut get = |name: &std::ffi::CStr, len: usize| {
            let n = libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), len);
            (n, std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
        };
        assert_eq!(get(c"user.spurline.version", 0).0, 2);
        assert_eq!(get(c"user.spurline.version", 100).0, 2);
        assert_eq!(get(c"user.long", 8192).0, 5000);
        assert_eq!(get(c"user.long", 100), (-1, libc::ERANGE));
        assert_eq!(get(c"user.none", 100), (-1, libc::ENODATA));
        assert_eq!(libc::listxattr(path.as_ptr(), value.as_mut_ptr().cast(), 8192), 32);
        assert!(value.starts_with(b"user.spurline.version\0"));
    }
}

fn writes_are_refused(mount: &Mount) {
    let p = |name: &str| mount.path(name);
    assert_eq!(errno(OpenOptions::new().write(true).open(p("data"))), libc::EROFS);
    assert_eq!(errno(File::create(p("new"))), libc::EROFS);
    assert_eq!(errno(fs::create_dir(p("d"))), libc::EROFS);
    assert_eq!(errno(fs::remove_file(p("data"))), libc::EROFS);
    assert_eq!(errno(fs::rename(p("data"), p("x"))), libc::EROFS);
    assert_eq!(errno(fs::hard_link(p("data"), p("x"))), libc::EROFS);
    assert_eq!(errno(std::os::unix::fs::symlink("x", p("y"))), libc::EROFS);
    assert_eq!(errno(fs::set_permissions(p("data"), std::os::unix::fs::PermissionsExt::from_mode(0o600))), libc::EROFS);
    let path = c_path(&p("data"));
    // SAFETY: C strings and a value of the length given.
    let set = unsafe { libc::setxattr(path.as_ptr(), c"user.x".as_ptr(), b"v".as_ptr().cast(), 1, 0) };
    assert_eq!((set, std::io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EROFS)));
}

fn panics_are_errors(mount: &Mount) {
    assert_eq!(errno(fs::read(mount.path("panic"))), libc::EIO);
    assert!(fs::read(mount.path("data")).is_ok());
}

/// Each attempt of a program is one read, although the kernel repeats those that fail.
fn failures_are_repeated_by_programs_only(mount: &Mount) {
    let file = File::open(mount.path("broken")).unwrap();
    // SAFETY: the call takes integers only. Without read-ahead, the number of requests is certain.
    assert_eq!(unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) }, 0);
    let seen = || mount.fs.broken_reads.load(std::sync::atomic::Ordering::SeqCst);
    let before = seen();
    let mut page = [0; 100];
    for attempt in 1..3 {
        assert_eq!(errno(file.read_at(&mut page, 8192)), libc::ETIMEDOUT);
        assert_eq!(seen() - before, attempt, "each attempt of the program is made, once");
    }
    mount.fs.repaired.store(true, std::sync::atomic::Ordering::SeqCst);
    assert_eq!(file.read_at(&mut page, 8192).unwrap(), 100);
    assert_eq!(page[..], pattern(8192, 100));
    mount.fs.repaired.store(false, std::sync::atomic::Ordering::SeqCst);
    // Past the page cache nothing is repeated.
    let before = seen();
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(mount.path("broken")).unwrap();
    let mut memory = vec![0u8; 8192];
    let start = memory.as_ptr().align_offset(4096);
    for attempt in 1..3 {
        assert_eq!(errno(direct.read_at(&mut memory[start..start + 4096], 1 << 20)), libc::ETIMEDOUT);
        assert_eq!(seen() - before, attempt);
    }
}

#[test]
fn dev_reads_whole_files() {
    on_dev(whole_files);
}
#[test]
fn dev_maps_files() {
    on_dev(mapped);
}
#[test]
fn dev_seeks() {
    on_dev(seeks);
}
#[test]
fn dev_lists_directories() {
    on_dev(directories);
}
#[test]
fn dev_has_names_of_any_byte() {
    on_dev(odd);
}
#[test]
fn dev_shows_attributes() {
    on_dev(attributes);
}
#[test]
fn dev_refuses_writes() {
    on_dev(writes_are_refused);
}
#[test]
fn dev_repeats_no_failed_read() {
    on_dev(failures_are_repeated_by_programs_only);
}
#[test]
fn dev_survives_panics() {
    on_dev(panics_are_errors);
}

#[test]
fn the_session_refuses_writes_where_the_kernel_lets_them_through() {
    if !can_mount() {
        return;
    }
    let mount = Mount::with(FuseIo::Dev, |c| c.options.read_only = false);
    writes_are_refused_by_session(&mount);
}

fn writes_are_refused_by_session(mount: &Mount) {
    assert_eq!(errno(File::create(mount.path("new"))), libc::EROFS);
    assert_eq!(errno(fs::create_dir(mount.path("d"))), libc::EROFS);
    assert_eq!(errno(fs::remove_file(mount.path("data"))), libc::EROFS);
    assert_eq!(errno(fs::rename(mount.path("data"), mount.path("x"))), libc::EROFS);
    assert_eq!(
        errno(OpenOptions::new().write(true).open(mount.path("data")).and_then(|f| f.write_at(b"x", 0))),
        libc::EROFS
    );
}

/// All of the above over io_uring, on one mount, since the kernel's parameter is the host's.
#[test]
fn uring_does_all_that_too() {
    if !can_mount() {
        return;
    }
    let Some(_parameter) = UringParameter::enable() else { return };
    let mount = Mount::with(FuseIo::Uring, |c| c.options.read_only = false);
    let chosen = mount.session().transport().unwrap();
    assert_eq!(chosen.io, FuseIo::Uring, "{chosen}");
    writes_are_refused_by_session(&mount);
    drop(mount);
    let mount = Mount::with(FuseIo::Uring, |c| c.depth = Some(4));
    for test in [whole_files, mapped, seeks, directories, odd, attributes, writes_are_refused, panics_are_errors] {
        test(&mount);
    }
    failures_are_repeated_by_programs_only(&mount);
    let fs = mount.fs.clone();
    drop(mount);
    assert!(fs.destroyed.load(std::sync::atomic::Ordering::SeqCst));
}

#[test]
fn counts_and_logs() {
    if !can_mount() {
        return;
    }
    #[derive(Default)]
    struct Log(std::sync::Mutex<Vec<Line>>);
    type Line = (&'static str, u64, u64, u64, i32);
    impl spurline_fuse::RequestRecorder for Log {
        fn record(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, _took: std::time::Duration) {
            self.0.lock().unwrap().push((op, ino, offset, len, errno));
        }
    }
    let log = Arc::new(Log::default());
    let mount = Mount::with(FuseIo::Dev, |c| c.access_log = Some(log.clone()));
    read_direct(&mount.path("data"), 8192, 4096);
    // Lookup, open, read, release; what goes straight to the device is counted a moment after its reader has it.
    let s = &mount.stats.fuse;
    eventually("four requests", || s.ops.get() >= 4 && s.open_handles.get() == 0);
    assert_eq!((s.lookup_ops.get(), s.open_ops.get(), s.read_ops.get(), s.read_bytes.get()), (1, 1, 1, 4096));
    assert_eq!(s.errors.get(), 0);
    eventually("the log", || log.0.lock().unwrap().contains(&("read", 2, 8192, 4096, 0)));
}
