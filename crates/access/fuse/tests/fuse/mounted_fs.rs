//! A file system over a volume in memory, mounted and used through the kernel.

#[path = "../../../fs/tests/fs/support/mod.rs"]
mod support;

use spurline_fs::{FileSystem, FsConfig};
use spurline_fuse::{FuseIo, FuseSession, SessionConfig};
use spurline_types::Stats;
use spurline_volume::Volume;
use std::collections::BTreeSet;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use support::{BLOCK, Tree, byte};

struct Mount {
    tree: Arc<Tree>,
    stats: Arc<Stats>,
    fs: Arc<FileSystem>,
    session: Option<FuseSession>,
    dir: tempfile::TempDir,
}

/// Mounts `tree`; `None` where this machine can't, unless `SPURLINE_TEST_REQUIRE` says that it has to.
fn mount(io: FuseIo, config: FsConfig, passthrough: bool) -> Option<Mount> {
    let tree = Tree::new();
    let dir = tempfile::tempdir().unwrap();
    let stats = Arc::new(Stats::default());
    let fs = Arc::new(FileSystem::new(Arc::clone(&tree) as Arc<dyn Volume>, config, Arc::clone(&stats)));
    let session =
        SessionConfig { io, passthrough, max_threads: Some(4), stats: Arc::clone(&stats), ..Default::default() };
    let mounted = FuseSession::mount(Arc::clone(&fs), dir.path(), session)
        .and_then(|session| session.wait_ready(Duration::from_secs(10)).map(|()| session));
    let required =
        |what: &str| std::env::var("SPURLINE_TEST_REQUIRE").is_ok_and(|all| all.split(',').any(|one| one == what));
    match mounted {
        Ok(session) if session.transport().is_none_or(|chosen| chosen.io != io) => {
            let chosen = session.transport().map(|chosen| chosen.to_string()).unwrap_or_default();
            let _ = session.shutdown(Duration::from_secs(5));
            assert!(!required("uring"), "{io:?} is required here, but: {chosen}");
            println!("SKIP: no session of kind {io:?} here: {chosen}");
            None
        }
        Ok(session) => Some(Mount { tree, stats, fs, session: Some(session), dir }),
        Err(error) if required("fuse") => {
            panic!("FUSE is required here: {error}")
        }
        Err(error) => {
            println!("SKIP: no mount here: {error}");
            None
        }
    }
}

impl Mount {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(session) = self.session.take() {
            let _ = session.shutdown(Duration::from_secs(5));
        }
    }
}

fn errno<T>(result: io::Result<T>) -> i32 {
    result.err().and_then(|error| error.raw_os_error()).unwrap_or(0)
}

fn xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (CString::new(path.as_os_str().as_bytes())?, CString::new(name)?);
    let mut value = vec![0u8; 256];
    // SAFETY: both strings end with a NUL and the buffer is as long as is said.
    let n = unsafe { libc::getxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    if n < 0 {
        return Err(io::Error::last_os_error());
    }
    value.truncate(n as usize);
    Ok(value)
}

fn expected(version: u64, range: std::ops::Range<u64>) -> Vec<u8> {
    range.map(|i| byte(version, i)).collect()
}

fn exercise(io: FuseIo) {
    let config = FsConfig { list_page: 50, ..FsConfig::default() };
    let Some(mount) = mount(io, config, false) else { return };
    let tree = &mount.tree;
    let size = 40 * BLOCK + 123;
    tree.put(b"big", 1, size);
    tree.put(b"small", 1, 10);
    tree.dir(b"d");
    for i in 0..500 {
        tree.put(format!("d/{i:04}").as_bytes(), 1, i);
    }
    tree.put(b"d/\xff\n x", 1, 3);
    tree.link(b"link", b"d/0007");

    // Whole, at random, mapped from two threads' views, and past the end.
    assert!(fs::read(mount.path("big")).unwrap() == expected(1, 0..size));
    let file = File::open(mount.path("big")).unwrap();
    let mut bytes = [0; 5000];
    for at in [size - 77, BLOCK - 1, 7, size, size + 9] {
        let n = file.read_at(&mut bytes, at).unwrap();
        assert_eq!(bytes[..n], expected(1, at..(at + 5000).min(size).max(at)));
    }
    let direct = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(mount.path("big")).unwrap();
    let mut aligned = vec![0; 1 << 20];
    let n = direct.read_at(&mut aligned, 4096).unwrap();
    assert!(aligned[..n] == expected(1, 4096..4096 + n as u64) && n > 0);
    assert_eq!(fs::metadata(mount.path("big")).unwrap().size(), size);
    assert_eq!(fs::read(mount.path("link")).unwrap(), expected(1, 0..7));
    assert_eq!(fs::read_link(mount.path("link")).unwrap(), Path::new("d/0007"));

    // All names, in one go and in small steps, with the attributes that `ls -l` needs.
    let names: BTreeSet<Vec<u8>> =
        fs::read_dir(mount.path("d")).unwrap().map(|entry| entry.unwrap().file_name().as_bytes().to_vec()).collect();
    assert_eq!(names.len(), 501);
    assert!(names.contains(b"\xff\n x".as_slice()));
    for entry in fs::read_dir(mount.path("d")).unwrap() {
        let entry = entry.unwrap();
        let meta = entry.metadata().unwrap();
        assert_eq!(meta.ino(), fs::metadata(entry.path()).unwrap().ino());
        assert!(meta.is_file());
    }
    assert_eq!(fs::read(mount.path("d").join(OsStr::from_bytes(b"\xff\n x"))).unwrap().len(), 3);

    // What can't be done, and what isn't there.
    assert_eq!(errno(File::open(mount.path("none"))), libc::ENOENT);
    assert_eq!(errno(File::open(mount.path("small/x"))), libc::ENOTDIR);
    assert_eq!(errno(OpenOptions::new().write(true).open(mount.path("small"))), libc::EROFS);
    assert_eq!(errno(File::create(mount.path("new"))), libc::EROFS);
    assert_eq!(errno(fs::remove_file(mount.path("small"))), libc::EROFS);
    assert_eq!(errno(fs::metadata(mount.path(&"x".repeat(256)))), libc::ENAMETOOLONG);
    assert_eq!(xattr(&mount.path("small"), "user.spurline.version").unwrap(), b"v1");
    assert_eq!(errno(xattr(&mount.path("small"), "user.none")), libc::ENODATA);

    // Replaced while open: the old bytes whole while they are cached, then ESTALE; the path shows the new.
    let mut old = File::open(mount.path("small")).unwrap();
    tree.cached.lock().push((b"small".to_vec(), 1));
    tree.put(b"small", 2, 12);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(fs::read(mount.path("small")).unwrap(), expected(2, 0..12));
    let mut bytes = Vec::new();
    old.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, expected(1, 0..10));
    let stale = File::open(mount.path("d/0100")).unwrap();
    tree.put(b"d/0100", 9, 100);
    assert_eq!(errno(stale.read_at(&mut [0; 100], 0)), libc::ESTALE);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(fs::read(mount.path("d/0100")).unwrap(), expected(9, 0..100));

    drop((file, direct, old, stale));
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while mount.stats.fuse.open_handles.get() > 0 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(mount.stats.fuse.open_handles.get(), 0);
    // drop_caches makes the kernel forget every inode. Any process on the machine may trigger that, so the number
    // before is not checked.
    if fs::write("/proc/sys/vm/drop_caches", "2").is_ok() {
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        while mount.fs.known_inodes() > 1 && std::time::Instant::now() < deadline {
            let _ = fs::write("/proc/sys/vm/drop_caches", "2");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!((mount.fs.known_inodes(), mount.stats.fuse.inodes.get()), (1, 1), "the root alone is left");
    } else {
        println!("SKIP: dropping caches needs root, so forgets were not counted");
    }
}

#[test]
fn through_dev_fuse() {
    exercise(FuseIo::Dev);
}

#[test]
fn through_io_uring() {
    exercise(FuseIo::Uring);
}

/// Repeats until true.
fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(std::time::Instant::now() < deadline, "never came: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn the_kernel_gives_inodes_back_that_it_does_not_use() {
    let limit = 1 << 20;
    let Some(mount) = mount(FuseIo::Dev, FsConfig { inode_bytes: limit, ..FsConfig::default() }, false) else { return };
    for d in 0..10 {
        mount.tree.dir(format!("d{d}").as_bytes());
        for f in 0..1000 {
            mount.tree.put(format!("d{d}/{f:04}").as_bytes(), 1, 10);
        }
    }
    let open = File::open(mount.path("d0/0500")).unwrap();
    let folder = File::open(mount.path("d1")).unwrap();
    let mut seen = 0;
    for d in 0..10 {
        for entry in fs::read_dir(mount.path(&format!("d{d}"))).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().len(), 10);
            seen += 1;
        }
    }
    assert_eq!(seen, 10_000);
    eventually("the memory is within its limit", || mount.stats.fuse.inode_bytes.get() <= limit);
    let known = mount.fs.known_inodes();
    assert!(mount.stats.fuse.forgets_requested.get() > 0 && known < 5_000, "{known} inodes");
    // What programs use is kept.
    assert_eq!(open.metadata().unwrap().ino(), fs::metadata(mount.path("d0/0500")).unwrap().ino());
    assert_eq!(open.read_at(&mut [0; 20], 0).unwrap(), 10);
    assert!(folder.metadata().unwrap().is_dir());

    // The way of kernels before 6.18, name by name.
    let notifier = mount.session.as_ref().unwrap().notifier().unwrap();
    mount.tree.put(b"by name", 1, 10);
    let ino = fs::metadata(mount.path("by name")).unwrap().ino();
    assert!(mount.fs.getattr(ino, None).is_ok());
    notifier.invalidate_entry(spurline_fs::ROOT, b"by name").unwrap();
    notifier.invalidate_entry(spurline_fs::ROOT, b"unknown").unwrap();
    eventually("it is forgotten", || mount.fs.getattr(ino, None).is_err());
}

#[test]
fn a_file_cached_whole_is_read_by_the_kernel_itself() {
    let Some(mount) = mount(FuseIo::Dev, FsConfig { passthrough_min: 1, ..FsConfig::default() }, true) else { return };
    let size = 3 * BLOCK;
    let mut backing = tempfile::NamedTempFile::new_in("/dev/shm").or_else(|_| tempfile::NamedTempFile::new()).unwrap();
    backing.write_all(&vec![7; size as usize]).unwrap();
    *mount.tree.backing.lock() = Some(Arc::new(backing));
    mount.tree.put(b"f", 1, size);
    let file = File::open(mount.path("f")).unwrap();
    let again = File::open(mount.path("f")).unwrap();
    if mount.stats.fuse.passthrough_opens.get() == 0 {
        println!("SKIP: the kernel takes no backing files here");
        return;
    }
    // What the backing file holds differs from what the volume would have said.
    for file in [&file, &again] {
        let mut bytes = vec![0; size as usize + 1];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap() as u64, size);
        assert!(bytes[..size as usize].iter().all(|b| *b == 7));
    }
    assert_eq!((mount.stats.fuse.read_ops.get(), mount.stats.fuse.passthrough_opens.get()), (0, 2));
    drop((file, again));
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while mount.tree.backings.load(Ordering::SeqCst) > 0 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(mount.tree.backings.load(Ordering::SeqCst), 0, "given back with the last close");
    // Opened in cached mode, it stays so while it is open, and passthrough comes back after.
    let held = mount.tree.backing.lock().take();
    let cached = File::open(mount.path("f")).unwrap();
    *mount.tree.backing.lock() = held;
    let other = File::open(mount.path("f")).unwrap();
    let mut bytes = [0; 64];
    assert_eq!(other.read_at(&mut bytes, 0).unwrap(), 64);
    assert_eq!(bytes[..], expected(1, 0..64));
    drop((cached, other));
    while mount.stats.fuse.open_handles.get() > 0 && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let file = File::open(mount.path("f")).unwrap();
    assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 64);
    assert!(bytes.iter().all(|b| *b == 7));
    drop(file);
    *mount.tree.backing.lock() = None;
}

/// A file handle as NFS servers keep them: the kernel's `struct file_handle` with room behind it.
#[repr(C)]
struct Kept {
    bytes: u32,
    kind: i32,
    room: [u8; 128],
}

fn handle_of(path: &Path) -> io::Result<Kept> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let (mut kept, mut mount_id) = (Kept { bytes: 128, kind: 0, room: [0; 128] }, 0);
    // SAFETY: the string ends with a NUL, and the handle has as much room behind its two numbers as it says.
    let done =
        unsafe { libc::name_to_handle_at(libc::AT_FDCWD, path.as_ptr(), (&raw mut kept).cast(), &raw mut mount_id, 0) };
    if done == 0 { Ok(kept) } else { Err(io::Error::last_os_error()) }
}

fn open_handle(mount: &File, kept: &mut Kept) -> io::Result<File> {
    // SAFETY: the handle is one the kernel gave out, with as much behind it as it says.
    match unsafe { libc::open_by_handle_at(mount.as_raw_fd(), (&raw mut *kept).cast(), libc::O_RDONLY) } {
        // SAFETY: just made, without another owner.
        fd @ 0.. => Ok(unsafe { File::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[test]
fn a_file_handle_from_before_a_remount_opens_the_same_version_or_nothing() {
    const FILES: u64 = 300;
    let remount = || {
        let mount = mount(FuseIo::Dev, FsConfig::default(), false)?;
        (0..FILES).for_each(|n| mount.tree.put(format!("f{n}").as_bytes(), 1, n + 1));
        Some(mount)
    };
    let Some(mount) = remount() else { return };
    // SAFETY: geteuid has no conditions.
    if unsafe { libc::geteuid() } != 0 {
        return println!("SKIP: opening by handle needs root");
    }
    let root = File::open(mount.dir.path()).unwrap();
    let mut kept: Vec<_> = (0..FILES).map(|n| handle_of(&mount.path(&format!("f{n}"))).unwrap()).collect();
    for (n, kept) in kept.iter_mut().enumerate() {
        assert_eq!(open_handle(&root, kept).unwrap().metadata().unwrap().len(), n as u64 + 1);
    }
    drop((root, mount));
    // The same names, looked up in another order; every third file is another version.
    let Some(mount) = remount() else { return };
    (0..FILES).step_by(3).for_each(|n| mount.tree.put(format!("f{n}").as_bytes(), 2, n + 1));
    for n in (0..FILES).rev() {
        assert_eq!(fs::metadata(mount.path(&format!("f{n}"))).unwrap().len(), n + 1);
    }
    let root = File::open(mount.dir.path()).unwrap();
    for (n, kept) in kept.iter_mut().enumerate() {
        let opened = open_handle(&root, kept).and_then(|file| Ok(file.metadata()?.len()));
        let expected = if n % 3 == 0 { Err(Some(libc::ESTALE)) } else { Ok(n as u64 + 1) };
        assert_eq!(opened.map_err(|error| error.raw_os_error()), expected, "f{n}");
    }
    // Its own handles work, those of files and of the root.
    for name in ["", "f0", "f299"] {
        assert!(open_handle(&root, &mut handle_of(&mount.path(name)).unwrap()).is_ok(), "{name:?}");
    }
}
