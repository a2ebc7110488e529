//! A small file system that shows every answer a handler can give, and mounts of it that can't hang a test.
#![allow(dead_code, reason = "each test binary uses its own part")]

use spurline_fuse::*;
use std::collections::HashMap;
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, SystemTime};

pub const TTL: Duration = Duration::from_secs(60);
pub const DATA_LEN: u64 = (3 << 20) + 123;
pub const MANY: u64 = 100_000;
const MANY_BASE: u64 = 1 << 20;

/// Names of the root directory; the inode number is the position plus 2.
pub const NAMES: [&str; 10] = ["data", "vectored", "filled", "slow", "pass", "panic", "link", "odd", "many", "broken"];

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

#[derive(Default)]
pub struct TestFs {
    pub backings: Mutex<Option<BackingRegistrar>>,
    /// The file that `pass` is read from, and its registration while it is open.
    pub backing_file: Mutex<Option<File>>,
    pub registered: Mutex<HashMap<u64, RegisteredFile>>,
    pub cached_too: AtomicBool,
    pub next_fh: AtomicU64,
    pub blocked: Mutex<(usize, bool)>,
    pub unblocked: Condvar,
    pub destroyed: AtomicBool,
    pub forgotten: AtomicU64,
    pub max_read_seen: AtomicU64,
    /// Reads of `broken`, which fails until it is repaired.
    pub broken_reads: AtomicU64,
    pub repaired: AtomicBool,
}

impl TestFs {
    fn attr(&self, ino: u64) -> Result<StatAttr, Errno> {
        let dir = StatAttr { nlink: 2, ..StatAttr::new(ino, libc::S_IFDIR | 0o755, 0) };
        Ok(match ino {
            ROOT_INO => dir,
            i if i == ino_of("odd") || i == ino_of("many") => dir,
            i if i == ino_of("link") => StatAttr::new(ino, libc::S_IFLNK | 0o777, 4),
            i if i == ino_of("pass") => {
                let len = self.backing_file.lock().unwrap().as_ref().map_or(0, |f| f.metadata().unwrap().len());
                StatAttr::new(ino, libc::S_IFREG | 0o644, len)
            }
            2..=11 => StatAttr {
                mtime: SystemTime::UNIX_EPOCH + Duration::new(1_700_000_000, 5),
                ..StatAttr::new(ino, libc::S_IFREG | 0o644, DATA_LEN)
            },
            i if i >= 1000 => StatAttr::new(ino, libc::S_IFREG | 0o644, 0),
            _ => return Err(Errno::ENOENT),
        })
    }
    fn entry(&self, ino: u64) -> Result<LookupReply, Errno> {
        Ok(LookupReply { ino, generation: 0, attr: self.attr(ino)?, entry_ttl: TTL, attr_ttl: TTL })
    }
    fn names(&self, ino: u64, from: u64, mut f: impl FnMut(u64, u64, &[u8]) -> bool) {
        let mut at = from;
        loop {
            let more = match (ino, at) {
                (_, 0 | 1) => f(at, ino, if at == 0 { b"." } else { b".." }),
                (ROOT_INO, i) if i - 2 < NAMES.len() as u64 => f(at, i, NAMES[i as usize - 2].as_bytes()),
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
    pub fn blocked_now(&self) -> usize {
        self.blocked.lock().unwrap().0
    }
    pub fn unblock(&self) {
        self.blocked.lock().unwrap().1 = true;
        self.unblocked.notify_all();
    }
}

impl FuseHandler for TestFs {
    fn init(&self, info: &InitInfo) {
        *self.backings.lock().unwrap() = info.backings.clone();
    }
    fn destroy(&self) {
        self.destroyed.store(true, Ordering::SeqCst);
    }
    fn lookup(&self, parent: u64, name: &[u8], _caller: &RequestCaller) -> Result<LookupReply, Errno> {
        if parent == ROOT_INO {
            return match NAMES.iter().position(|n| n.as_bytes() == name) {
                Some(i) => self.entry(i as u64 + 2),
                None => Ok(LookupReply::negative(TTL)),
            };
        }
        if parent == ino_of("odd") {
            let i = odd_names().iter().position(|n| n == name).ok_or(Errno::ENOENT)?;
            return self.entry(1000 + i as u64);
        }
        let number = std::str::from_utf8(name).ok().and_then(|n| n.strip_prefix("name-")?.parse::<u64>().ok());
        self.entry(MANY_BASE + number.filter(|n| *n < MANY).ok_or(Errno::ENOENT)?)
    }
    fn forget(&self, _ino: u64, nlookup: u64) {
        self.forgotten.fetch_add(nlookup, Ordering::SeqCst);
    }
    fn getattr(&self, ino: u64, _fh: Option<u64>, _caller: &RequestCaller) -> Result<(StatAttr, Duration), Errno> {
        Ok((self.attr(ino)?, TTL))
    }
    fn readlink(&self, ino: u64, target: &mut [u8], _caller: &RequestCaller) -> Result<usize, Errno> {
        if ino != ino_of("link") {
            return Err(Errno::EINVAL);
        }
        target[..4].copy_from_slice(b"data");
        Ok(4)
    }
    fn open(&self, ino: u64, _flags: u32, _caller: &RequestCaller) -> Result<HandleReply, Errno> {
        let fh = self.next_fh.fetch_add(1, Ordering::SeqCst);
        let mut opened =
            HandleReply { fh, keep_cache: true, direct_io: ino == ino_of("slow"), ..HandleReply::default() };
        if ino == ino_of("pass") && !self.cached_too.load(Ordering::SeqCst) {
            let backings = self.backings.lock().unwrap().clone().ok_or(Errno::EOPNOTSUPP)?;
            let file = self.backing_file.lock().unwrap();
            let backing =
                backings.register_file(file.as_ref().ok_or(Errno::EIO)?.as_fd()).map_err(|e| Errno::from_io(&e))?;
            opened.backing = Some(backing.id());
            self.registered.lock().unwrap().insert(fh, backing);
        }
        Ok(opened)
    }
    fn release(&self, _ino: u64, fh: u64) {
        self.registered.lock().unwrap().remove(&fh);
    }
    fn read(&self, ino: u64, _fh: u64, offset: u64, len: u32, mut reply: ReadReply<'_>) -> ReplyReceipt {
        self.max_read_seen.fetch_max(u64::from(len), Ordering::SeqCst);
        let len = DATA_LEN.saturating_sub(offset).min(u64::from(len)) as usize;
        if ino == ino_of("pass") {
            return reply.reply_error(Errno::EIO);
        }
        if ino == ino_of("panic") {
            panic!("requested by the test");
        }
        if ino == ino_of("broken") && !self.repaired.load(Ordering::SeqCst) {
            self.broken_reads.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(600));
            return reply.reply_error(Errno(libc::ETIMEDOUT));
        }
        if ino == ino_of("slow") {
            let mut blocked = self.blocked.lock().unwrap();
            blocked.0 += 1;
            while !blocked.1 {
                blocked = self.unblocked.wait_timeout(blocked, Duration::from_secs(20)).unwrap().0;
            }
        }
        let data = pattern(offset, len);
        if ino == ino_of("vectored") {
            let pieces: Vec<IoSlice<'_>> = data.chunks(len.div_ceil(300).max(1)).map(IoSlice::new).collect();
            return reply.reply_vectored(&pieces);
        }
        if ino == ino_of("filled") {
            assert!(reply.buffer().as_ptr().addr().is_multiple_of(4096));
            reply.buffer()[..len].copy_from_slice(&data);
            return reply.reply_filled(len);
        }
        reply.reply_data(&data)
    }
    fn readdir(
        &self,
        ino: u64,
        _fh: u64,
        cookie: u64,
        sink: &mut DirSink<'_>,
        _caller: &RequestCaller,
    ) -> Result<(), Errno> {
        let mut error = None;
        self.names(ino, cookie, |at, child, name| match self.attr(child) {
            Ok(attr) => sink.add_entry(child, at + 1, attr.mode, name),
            Err(e) => {
                error = Some(e);
                false
            }
        });
        error.map_or(Ok(()), Err)
    }
    fn readdirplus(
        &self,
        ino: u64,
        _fh: u64,
        cookie: u64,
        sink: &mut DirPlusSink<'_>,
        _caller: &RequestCaller,
    ) -> Result<(), Errno> {
        self.names(ino, cookie, |at, child, name| match self.entry(child) {
            Ok(entry) if at >= 2 => sink.add_entry(&entry, at + 1, name),
            _ => sink.add_plain(child, at + 1, libc::S_IFDIR, name),
        });
        Ok(())
    }
    fn statfs(&self, _ino: u64) -> Result<StatfsReply, Errno> {
        Ok(StatfsReply { blocks: 1000, bfree: 600, bavail: 500, files: 77, ffree: 7, ..StatfsReply::default() })
    }
    fn getxattr(&self, ino: u64, name: &[u8], reply: XattrReply<'_>, _caller: &RequestCaller) -> ReplyReceipt {
        match (ino == ino_of("data"), name) {
            (true, b"user.spurline.version") => reply.reply_value(b"v1"),
            (true, b"user.long") => reply.reply_value(&[7; 5000]),
            _ => reply.reply_error(Errno::ENODATA),
        }
    }
    fn listxattr(&self, ino: u64, reply: XattrReply<'_>, _caller: &RequestCaller) -> ReplyReceipt {
        if ino == ino_of("data") {
            reply.reply_value(b"user.spurline.version\0user.long\0")
        } else {
            reply.reply_value(b"")
        }
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

/// Says why a test can't run, or fails where `SPURLINE_REQUIRE` lists `thing`.
pub fn skip(thing: &str, why: &str) {
    let required = std::env::var("SPURLINE_REQUIRE").unwrap_or_default();
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
