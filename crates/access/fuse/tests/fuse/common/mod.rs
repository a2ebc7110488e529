//! A small file system that shows every answer a session can send, and mounts of it that can't hang a test.
#![allow(dead_code, reason = "each test binary uses its own part")]

use spurline_fs::{
    DirRead, FileEntry, FileService, FsCaller, FsError, FsResult, HandleRef, KernelSide, ListedEntry, LiveBacking,
    LookupOutcome, OpenedFile, ROOT, StatAttr,
};
use spurline_fuse::*;
use spurline_mem::{BlockSlice, BufferPool};
use spurline_types::{Error, ErrorKind};
use spurline_volume::ReadData;
use spurline_volume::writes::{FileTime, SourceSpace};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

pub const TTL: Duration = Duration::from_secs(60);
pub const DATA_LEN: u64 = (3 << 20) + 123;
pub const MANY: u64 = 100_000;
const MANY_BASE: u64 = 1 << 20;

/// Names of the root directory; the inode number is the position plus 2.
pub const NAMES: [&str; 9] = ["data", "filled", "slow", "pass", "panic", "link", "odd", "many", "broken"];

pub fn ino_of(name: &str) -> u64 {
    NAMES.iter().position(|n| *n == name).unwrap() as u64 + 2
}

pub fn odd_names() -> Vec<Vec<u8>> {
    let mut names: Vec<Vec<u8>> = (1..=255u8).filter(|b| *b != b'/').map(|b| vec![b'o', b]).collect();
    names.push(vec![0xff; 255]);
    names.push(b"new\nline \\ \xc3\x28".to_vec());
    names
}

pub fn pattern(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn errno(errno: i32) -> FsError {
    Error::new(ErrorKind::Io(errno), "by request of the test").into()
}

pub struct TestFs {
    pool: Arc<BufferPool>,
    /// The file that `pass` is read from, and its registration while it is open.
    pub backing_file: Mutex<Option<File>>,
    pub registered: Mutex<HashMap<u64, Arc<LiveBacking>>>,
    pub cached_too: AtomicBool,
    pub next_fh: AtomicU64,
    pub blocked: Mutex<(usize, bool)>,
    pub unblocked: Condvar,
    /// The call that blocks, as reads of `slow` do.
    pub held_call: Mutex<&'static str>,
    pub released: AtomicU64,
    pub destroyed: AtomicBool,
    pub forgotten: AtomicU64,
    pub max_read_seen: AtomicU64,
    /// Reads of `broken`, which fails until it is repaired.
    pub broken_reads: AtomicU64,
    pub repaired: AtomicBool,
}

impl Default for TestFs {
    fn default() -> Self {
        TestFs {
            pool: BufferPool::new(64 << 20, 1 << 20).unwrap(),
            backing_file: Mutex::default(),
            registered: Mutex::default(),
            cached_too: AtomicBool::new(false),
            next_fh: AtomicU64::new(0),
            blocked: Mutex::default(),
            unblocked: Condvar::new(),
            held_call: Mutex::default(),
            released: AtomicU64::new(0),
            destroyed: AtomicBool::new(false),
            forgotten: AtomicU64::new(0),
            max_read_seen: AtomicU64::new(0),
            broken_reads: AtomicU64::new(0),
            repaired: AtomicBool::new(false),
        }
    }
}

impl TestFs {
    fn attr(&self, ino: u64) -> FsResult<StatAttr> {
        let dir = StatAttr { nlink: 2, ..StatAttr::new(ino, libc::S_IFDIR | 0o755, 0) };
        Ok(match ino {
            ROOT => dir,
            i if i == ino_of("odd") || i == ino_of("many") => dir,
            i if i == ino_of("link") => StatAttr::new(ino, libc::S_IFLNK | 0o777, 4),
            i if i == ino_of("pass") => {
                let len = self.backing_file.lock().unwrap().as_ref().map_or(0, |f| f.metadata().unwrap().len());
                StatAttr::new(ino, libc::S_IFREG | 0o644, len)
            }
            2..=10 => StatAttr {
                mtime: FileTime { seconds: 1_700_000_000, nanos: 5 },
                ..StatAttr::new(ino, libc::S_IFREG | 0o644, DATA_LEN)
            },
            i if i >= 1000 => StatAttr::new(ino, libc::S_IFREG | 0o644, 0),
            _ => return Err(errno(libc::ENOENT)),
        })
    }
    fn entry(&self, ino: u64) -> FsResult<FileEntry> {
        Ok(FileEntry { ino, generation: 0, attr: self.attr(ino)?, entry_ttl: TTL, attr_ttl: TTL })
    }
    fn names(&self, ino: u64, from: u64, mut f: impl FnMut(u64, u64, &[u8]) -> bool) {
        let mut at = from;
        loop {
            let more = match (ino, at) {
                (_, 0 | 1) => f(at, ino, if at == 0 { b"." } else { b".." }),
                (ROOT, i) if i - 2 < NAMES.len() as u64 => f(at, i, NAMES[i as usize - 2].as_bytes()),
                (d, i) if d == ino_of("odd") && i - 2 < odd_names().len() as u64 => {
                    f(at, 1000 + i - 2, &odd_names()[i as usize - 2])
                }
                (d, i) if d == ino_of("many") && i - 2 < MANY => {
                    f(at, MANY_BASE + i - 2, format!("name-{:06}", i - 2).as_bytes())
                }
                _ => false,
            };
            if !more {
                return;
            }
            at += 1;
        }
    }
    /// Blocks if calls of this kind do.
    fn hold(&self, call: &str) {
        if *self.held_call.lock().unwrap() == call {
            self.block();
        }
    }
    fn block(&self) {
        let mut blocked = self.blocked.lock().unwrap();
        blocked.0 += 1;
        while !blocked.1 {
            blocked = self.unblocked.wait_timeout(blocked, Duration::from_secs(20)).unwrap().0;
        }
    }
    pub fn blocked_now(&self) -> usize {
        self.blocked.lock().unwrap().0
    }
    pub fn unblock(&self) {
        self.blocked.lock().unwrap().1 = true;
        self.unblocked.notify_all();
    }
}

impl FileService for TestFs {
    fn close_all(&self) {
        self.destroyed.store(true, Ordering::SeqCst);
    }
    fn lookup(&self, parent: u64, name: &[u8], _caller: &FsCaller<'_>) -> FsResult<LookupOutcome<FileEntry>> {
        self.hold("lookup");
        if parent == ROOT {
            return match NAMES.iter().position(|n| n.as_bytes() == name) {
                Some(i) => self.entry(i as u64 + 2).map(LookupOutcome::Found),
                None => Ok(LookupOutcome::Absent { ttl: TTL }),
            };
        }
        if parent == ino_of("odd") {
            let i = odd_names().iter().position(|n| n == name).ok_or_else(|| errno(libc::ENOENT))?;
            return self.entry(1000 + i as u64).map(LookupOutcome::Found);
        }
        let number = std::str::from_utf8(name).ok().and_then(|n| n.strip_prefix("name-")?.parse::<u64>().ok());
        let number = number.filter(|n| *n < MANY).ok_or_else(|| errno(libc::ENOENT))?;
        self.entry(MANY_BASE + number).map(LookupOutcome::Found)
    }
    fn forget(&self, _ino: u64, n: u64) {
        self.forgotten.fetch_add(n, Ordering::SeqCst);
    }
    fn getattr(&self, ino: u64, _fh: Option<u64>, _caller: &FsCaller<'_>) -> FsResult<(StatAttr, Duration)> {
        Ok((self.attr(ino)?, TTL))
    }
    fn readlink(&self, ino: u64, _caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        if ino == ino_of("link") { Ok(b"data".to_vec()) } else { Err(errno(libc::EINVAL)) }
    }
    fn open(&self, ino: u64, _flags: u32, _caller: &FsCaller<'_>, kernel: &KernelSide<'_>) -> FsResult<OpenedFile> {
        self.hold("open");
        let fh = self.next_fh.fetch_add(1, Ordering::SeqCst);
        let direct_io = ino == ino_of("slow");
        let flush = ino == ino_of("filled");
        let mut opened = OpenedFile { fh, keep_cache: true, direct_io, flush, ..OpenedFile::default() };
        if ino == ino_of("pass") && !self.cached_too.load(Ordering::SeqCst) {
            let backings = kernel.backings.ok_or_else(|| errno(libc::EOPNOTSUPP))?;
            let file = self.backing_file.lock().unwrap();
            let registered = backings.register_file(file.as_ref().ok_or_else(|| errno(libc::EIO))?);
            let registered = registered.map_err(|e| errno(e.raw_os_error().unwrap_or(libc::EIO)))?;
            let backing = Arc::new(LiveBacking::new(registered, Box::new(())));
            opened.backing = Some(Arc::clone(&backing));
            self.registered.lock().unwrap().insert(fh, backing);
        }
        Ok(opened)
    }
    fn flush(&self, _file: HandleRef, _lock_owner: u64, _caller: &FsCaller<'_>) -> FsResult<()> {
        self.hold("flush");
        Ok(())
    }
    fn release(&self, fh: u64) -> FsResult<()> {
        self.released.fetch_add(1, Ordering::SeqCst);
        self.registered.lock().unwrap().remove(&fh);
        Ok(())
    }
    fn read(&self, file: HandleRef, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        let ino = file.ino;
        self.max_read_seen.fetch_max(dst.len() as u64, Ordering::SeqCst);
        let len = DATA_LEN.saturating_sub(offset).min(dst.len() as u64) as usize;
        if ino == ino_of("pass") {
            return Err(errno(libc::EIO));
        }
        if ino == ino_of("panic") {
            panic!("requested by the test");
        }
        if ino == ino_of("broken") && !self.repaired.load(Ordering::SeqCst) {
            self.broken_reads.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(600));
            return Err(errno(libc::ETIMEDOUT));
        }
        if ino == ino_of("slow") {
            self.block();
        }
        let data = pattern(offset, len);
        if ino == ino_of("filled") {
            assert!(dst.as_ptr().addr().is_multiple_of(4096));
            dst[..len].copy_from_slice(&data);
            return Ok(ReadData::Copied(len));
        }
        let mut buffer = self.pool.alloc(len.max(1), Instant::now() + Duration::from_secs(20))?;
        buffer[..len].copy_from_slice(&data);
        Ok(ReadData::Shared(BlockSlice::from_buf(buffer).subslice(0..len)))
    }
    fn readdir(
        &self,
        read: &DirRead,
        _caller: &FsCaller<'_>,
        take: &mut dyn FnMut(&ListedEntry<'_>) -> bool,
    ) -> FsResult<()> {
        self.hold("readdir");
        let mut failed = None;
        self.names(read.directory.ino, read.from, |at, child, name| match self.entry(child) {
            Ok(entry) => take(&ListedEntry {
                name,
                next: at + 1,
                ino: child,
                file_type: entry.attr.mode,
                entry: (read.plus && at >= 2).then_some(entry),
            }),
            Err(error) => {
                failed = Some(error);
                false
            }
        });
        failed.map_or(Ok(()), Err)
    }
    fn statfs(&self) -> FsResult<SourceSpace> {
        Ok(SourceSpace {
            block_size: 4096,
            blocks: 1000,
            blocks_free: 600,
            blocks_available: 500,
            files: 77,
            files_free: 7,
            name_max: 255,
        })
    }
    fn getxattr(&self, ino: u64, name: &[u8], _caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        match name {
            b"user.spurline.version" if ino == ino_of("data") => Ok(b"v1".to_vec()),
            b"user.long" if ino == ino_of("data") => Ok(vec![7; 5000]),
            _ => Err(FsError::NoData),
        }
    }
    fn listxattr(&self, ino: u64, _caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        Ok(if ino == ino_of("data") { b"user.spurline.version\0user.long\0".to_vec() } else { Vec::new() })
    }
}

/// A mounted [`TestFs`]. Should the test hang, its connection is broken so that it fails instead.
pub struct Mount {
    pub fs: Arc<TestFs>,
    pub session: Option<FuseSession>,
    pub dir: tempfile::TempDir,
    pub stats: Arc<spurline_types::Stats>,
    done: Arc<AtomicBool>,
}

impl Mount {
    pub fn new(io: FuseIo) -> Mount {
        Mount::with(io, |_| {})
    }
    pub fn with(io: FuseIo, change: impl FnOnce(&mut SessionConfig)) -> Mount {
        Mount::at("", io, change)
    }
    /// Mounted as `name` in a directory `place` of its own.
    pub fn below(name: &str) -> Mount {
        Mount::at(&format!("place/{name}"), FuseIo::Dev, |_| {})
    }
    fn at(path: &str, io: FuseIo, change: impl FnOnce(&mut SessionConfig)) -> Mount {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join(path)).unwrap();
        let fs = Arc::new(TestFs::default());
        let mut config = SessionConfig { io, ..SessionConfig::default() };
        change(&mut config);
        let stats = config.stats.clone();
        let session = FuseSession::mount(fs.clone(), &dir.path().join(path), config).unwrap();
        session.wait_ready(Duration::from_secs(20)).unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let (unmounter, watched, for_unblock) = (session.unmounter(), done.clone(), fs.clone());
        std::thread::spawn(move || {
            for _ in 0..600 {
                std::thread::sleep(Duration::from_millis(100));
                if watched.load(Ordering::SeqCst) {
                    return;
                }
            }
            eprintln!("a test hangs; its FUSE connection is aborted");
            for_unblock.unblock();
            let _ = unmounter.abort();
        });
        Mount { fs, session: Some(session), dir, stats, done }
    }
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    pub fn session(&self) -> &FuseSession {
        self.session.as_ref().unwrap()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.fs.unblock();
        if let Some(session) = self.session.take() {
            let _ = session.shutdown(Duration::from_secs(5));
        }
        self.done.store(true, Ordering::SeqCst);
    }
}

/// Says why a test can't run, or fails where `SPURLINE_TEST_REQUIRE` lists `thing`.
pub fn skip(thing: &str, why: &str) {
    let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|t| t.trim() == thing), "{thing} is required, but {why}");
    println!("SKIP: {why}");
}

/// Whether mounts can be made here as root.
pub fn can_mount() -> bool {
    // SAFETY: geteuid has no conditions.
    if unsafe { libc::geteuid() } != 0 {
        skip("fuse", "mounting directly needs root");
        return false;
    }
    if let Err(e) = File::options().read(true).write(true).open("/dev/fuse") {
        skip("fuse", &format!("/dev/fuse can't be opened: {e}"));
        return false;
    }
    true
}

/// Puts the kernel's io_uring parameter back when dropped. Tests that set it run one after the other, or
/// one would put back what another had set.
pub struct UringParameter(String, std::sync::MutexGuard<'static, ()>);

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const PARAMETER: &str = "/sys/module/fuse/parameters/enable_uring";

impl UringParameter {
    /// `None`, having said why, where the kernel has it not.
    pub fn enable() -> Option<UringParameter> {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(|broken| broken.into_inner());
        let before = std::fs::read_to_string(PARAMETER).ok();
        match before {
            Some(before) if std::fs::write(PARAMETER, "Y").is_ok() => Some(UringParameter(before.trim().into(), turn)),
            _ => {
                skip(
                    "fuse-uring",
                    &format!("FUSE over io_uring can't be enabled: {PARAMETER} is missing or read-only"),
                );
                None
            }
        }
    }
}

impl Drop for UringParameter {
    fn drop(&mut self) {
        let _ = std::fs::write(PARAMETER, &self.0);
    }
}

/// The `nullfs` example, which `cargo test` builds beside the tests.
pub fn nullfs_binary() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().and_then(Path::parent).unwrap().join("examples/nullfs")
}

/// Waits for `done`, at most ten seconds.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} did not come about within 10 s");
}
