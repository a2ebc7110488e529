//! A volume in memory whose tree, versions and failures a test decides.
#![allow(dead_code)]

use parking_lot::{Condvar, Mutex};
use spurline_fs::{FileSystem, FsConfig};
use spurline_types::{
    DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, ObjectHeaders, ObjectRef, Result, STAGED_ETAG, Stats,
    Version,
};
use spurline_volume::info::FileInfo;
use spurline_volume::{BackingFile, ReadData, Volume, VolumeSpace};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

pub const BLOCK: u64 = 64 << 10;
/// A file of this version is staged.
pub const STAGED_VERSION: u64 = 1_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Node {
    File { version: u64, size: u64 },
    Dir,
    Link(Vec<u8>),
}

/// Byte `offset` of version `version` of any file.
pub fn byte(version: u64, offset: u64) -> u8 {
    (offset.wrapping_mul(31) ^ version.wrapping_mul(101) ^ (offset >> 8)) as u8
}

pub struct Tree {
    pub nodes: Mutex<BTreeMap<Vec<u8>, Node>>,
    /// Versions whose bytes are cached, and so readable when the path has moved on.
    pub cached: Mutex<Vec<(Vec<u8>, u64)>>,
    /// Single cached blocks: path, version, index.
    pub cached_blocks: Mutex<Vec<(Vec<u8>, u64, u64)>>,
    /// The next error of each call, by name.
    pub fail: Mutex<HashMap<&'static str, ErrorKind>>,
    pub lookups: AtomicU64,
    pub lists: AtomicU64,
    pub capacities: AtomicU64,
    pub prefetched: Mutex<Vec<(Vec<u8>, Range<u32>)>>,
    pub backing: Mutex<Option<Arc<tempfile::NamedTempFile>>>,
    pub backings: Arc<AtomicU64>,
    /// While true, reads wait.
    pub stalled: Mutex<bool>,
    pub go_on: Condvar,
    pub waiting: AtomicU64,
    pub short: AtomicBool,
    pub now_ms: Arc<AtomicU64>,
    /// How long each lookup and each page of a listing takes.
    pub slow_ms: AtomicU64,
    /// How long each read takes.
    pub slow_reads_ms: AtomicU64,
    /// Files are open for writing: each look at one is another version.
    pub written: AtomicBool,
    /// All versions of a file have the same bytes, as far as they go.
    pub appended: AtomicBool,
}

struct TestBacking(File, Arc<AtomicU64>);

impl BackingFile for TestBacking {
    fn file(&self) -> &File {
        &self.0
    }

    fn close(self: Box<Self>) -> Box<dyn Send + Sync> {
        self
    }
}

impl Drop for TestBacking {
    fn drop(&mut self) {
        self.1.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Tree {
    pub fn new() -> Arc<Tree> {
        let tree = Tree {
            nodes: Mutex::default(),
            cached: Mutex::default(),
            cached_blocks: Mutex::default(),
            fail: Mutex::default(),
            lookups: AtomicU64::new(0),
            lists: AtomicU64::new(0),
            capacities: AtomicU64::new(0),
            prefetched: Mutex::default(),
            backing: Mutex::default(),
            backings: Arc::default(),
            stalled: Mutex::new(false),
            go_on: Condvar::new(),
            waiting: AtomicU64::new(0),
            short: AtomicBool::new(false),
            now_ms: Arc::new(AtomicU64::new(1_000)),
            slow_ms: AtomicU64::new(0),
            slow_reads_ms: AtomicU64::new(0),
            written: AtomicBool::new(false),
            appended: AtomicBool::new(false),
        };
        tree.nodes.lock().insert(Vec::new(), Node::Dir);
        Arc::new(tree)
    }

    pub fn put(&self, path: &[u8], version: u64, size: u64) {
        self.nodes.lock().insert(path.to_vec(), Node::File { version, size });
    }

    pub fn dir(&self, path: &[u8]) {
        self.nodes.lock().insert(path.to_vec(), Node::Dir);
    }

    pub fn link(&self, path: &[u8], target: &[u8]) {
        self.nodes.lock().insert(path.to_vec(), Node::Link(target.to_vec()));
    }

    pub fn remove(&self, path: &[u8]) {
        self.nodes.lock().remove(path);
    }

    pub fn fail_next(&self, call: &'static str, kind: ErrorKind) {
        self.fail.lock().insert(call, kind);
    }

    fn failing(&self, call: &'static str) -> Result<()> {
        match self.fail.lock().remove(call) {
            Some(kind) => Err(Error::new(kind, format!("{call} fails by request of the test"))),
            None => Ok(()),
        }
    }

    fn pass(&self) {
        self.now_ms.fetch_add(self.slow_ms.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    pub fn attr(&self, node: &Node) -> ObjectAttr {
        let (kind, size, mode, version, etag) = match node {
            Node::File { version, size } => {
                let start = if *version == STAGED_VERSION { STAGED_ETAG } else { "" };
                (FileKind::File, *size, 0o640, format!("v{version}"), Some(format!("\"{start}{version}\"")))
            }
            Node::Dir => (FileKind::Directory, 0, 0o755, String::new(), None),
            Node::Link(target) => (FileKind::Symlink, target.len() as u64, 0o777, "l".to_owned(), None),
        };
        let mtime = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let mut version = Version::new(&version);
        if kind == FileKind::File && self.written.load(Ordering::Relaxed) {
            version = version.with_unsettled_mark(self.lookups.load(Ordering::Relaxed));
        }
        ObjectAttr { kind, size, mtime, mode, version, etag }
    }
}

fn not_found(path: &[u8]) -> Error {
    Error::new(ErrorKind::NotFound, format!("no {}", path.escape_ascii()))
}

impl Volume for Tree {
    fn source(&self) -> &str {
        "s3://bucket/prefix"
    }

    fn block_size(&self) -> u64 {
        BLOCK
    }

    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        self.lookups.fetch_add(1, Ordering::Relaxed);
        self.pass();
        self.failing("lookup")?;
        let nodes = self.nodes.lock();
        nodes.get(path).map(|node| self.attr(node)).ok_or_else(|| not_found(path))
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.pass();
        self.failing("list")?;
        let nodes = self.nodes.lock();
        match nodes.get(path) {
            Some(Node::Dir) => {}
            Some(_) => return Err(Error::new(ErrorKind::NotADirectory, "no directory")),
            None => return Err(not_found(path)),
        }
        let mut prefix = path.to_vec();
        if !prefix.is_empty() {
            prefix.push(b'/');
        }
        let after = cursor.map_or_else(|| prefix.clone(), |cursor| [&prefix, cursor].concat());
        let mut page = ListPage::default();
        for (full, node) in nodes.range(after.clone()..) {
            let Some(name) = full.strip_prefix(&*prefix) else { break };
            if full.is_empty() || *full == after || full == path || name.contains(&b'/') {
                continue;
            }
            if page.entries.len() == max {
                page.next = page.entries.last().map(|entry: &DirEntry| entry.name.clone());
                break;
            }
            page.entries.push(DirEntry { name: name.to_vec(), attr: self.attr(node) });
        }
        Ok(page)
    }

    fn object_headers(&self, path: &[u8]) -> Result<ObjectHeaders> {
        let is_unsaved = !path.ends_with(b"uploaded");
        let staged = is_unsaved.then(|| ("x-amz-meta-spurline-stage".to_owned(), "1".to_owned()));
        Ok(ObjectHeaders(staged.into_iter().collect()))
    }

    fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
        match self.nodes.lock().get(path) {
            Some(Node::Link(target)) => Ok(target.clone()),
            Some(_) => Err(Error::new(ErrorKind::Invalid, "no link")),
            None => Err(not_found(path)),
        }
    }

    fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<ReadData> {
        {
            let mut stalled = self.stalled.lock();
            self.waiting.fetch_add(1, Ordering::SeqCst);
            while *stalled {
                self.go_on.wait(&mut stalled);
            }
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        self.failing("read")?;
        self.now_ms.fetch_add(self.slow_reads_ms.load(Ordering::SeqCst), Ordering::SeqCst);
        let version: u64 = object.version.settled_text()[1..].parse().unwrap();
        let current = self.nodes.lock().get(&*object.path).cloned();
        let there = matches!(current, Some(Node::File { version: now, .. }) if now == version);
        let block = offset / BLOCK;
        let cached = self.cached.lock().iter().any(|(path, v)| **path == *object.path && *v == version)
            || self.cached_blocks.lock().iter().any(|(p, v, b)| **p == *object.path && (*v, *b) == (version, block));
        if !there && !cached {
            let kind = if current.is_some() { ErrorKind::Stale } else { ErrorKind::NotFound };
            return Err(Error::new(kind, "that version is gone"));
        }
        let mut n = (object.size.saturating_sub(offset) as usize).min(dst.len());
        if self.short.load(Ordering::Relaxed) {
            n /= 2;
        }
        let content = if self.appended.load(Ordering::Relaxed) { 0 } else { version };
        for (i, out) in dst[..n].iter_mut().enumerate() {
            *out = byte(content, offset + i as u64);
        }
        Ok(ReadData::Copied(n))
    }

    fn prefetch(&self, object: &ObjectRef, blocks: Range<u32>, _piece: usize) {
        self.prefetched.lock().push((object.path.to_vec(), blocks));
    }

    fn backing(&self, _object: &ObjectRef) -> Option<Box<dyn BackingFile>> {
        let file = self.backing.lock().as_ref()?.reopen().ok()?;
        self.backings.fetch_add(1, Ordering::SeqCst);
        Some(Box::new(TestBacking(file, Arc::clone(&self.backings))))
    }

    fn capacity(&self) -> Result<VolumeSpace> {
        self.capacities.fetch_add(1, Ordering::Relaxed);
        self.failing("capacity")?;
        Ok(VolumeSpace { total_bytes: 1 << 40, free_bytes: 1 << 39, files: 77, files_free: 7 })
    }

    fn info(&self, _path: &[u8]) -> Result<FileInfo> {
        Err(Error::new(ErrorKind::Unsupported, "no blocks are cached"))
    }
}

/// A file system over a tree on a clock that a test moves.
pub struct Rig {
    pub tree: Arc<Tree>,
    pub fs: FileSystem,
    pub stats: Arc<Stats>,
    now_ms: Arc<AtomicU64>,
}

impl Rig {
    pub fn new(config: FsConfig) -> Rig {
        let (tree, stats) = (Tree::new(), Arc::new(Stats::default()));
        let now_ms = Arc::clone(&tree.now_ms);
        let clock = Arc::clone(&now_ms);
        let volume: Arc<dyn Volume> = Arc::clone(&tree) as Arc<dyn Volume>;
        let clock = Box::new(move || Duration::from_millis(clock.load(Ordering::SeqCst)));
        Rig { fs: FileSystem::with_clock(volume, config, Arc::clone(&stats), clock), tree, stats, now_ms }
    }

    pub fn pass(&self, ms: u64) {
        self.now_ms.fetch_add(ms, Ordering::SeqCst);
    }

    /// The inode that a path leads to, looked up from the root; each lookup on the way is forgotten again.
    pub fn walk(&self, path: &[u8]) -> Option<u64> {
        let mut ino = spurline_fs::ROOT;
        for name in path.split(|b| *b == b'/') {
            let parent = ino;
            match self.fs.lookup(parent, name).unwrap() {
                spurline_fs::LookupOutcome::Found(entry) => ino = entry.attr.ino,
                spurline_fs::LookupOutcome::Absent { .. } => return None,
            }
            self.fs.forget(parent, 1);
        }
        Some(ino)
    }

    pub fn errno<T>(answer: spurline_fs::FsResult<T>) -> i32 {
        answer.err().expect("it fails").errno()
    }

    pub fn read(&self, ino: u64, fh: u64, offset: u64, len: usize) -> spurline_fs::FsResult<Vec<u8>> {
        let mut dst = vec![0; len];
        match self.fs.read(ino, fh, offset, &mut dst)? {
            ReadData::Copied(n) => dst.truncate(n),
            ReadData::Shared(slice) => dst = slice.to_vec(),
        }
        Ok(dst)
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        assert_eq!(self.backings.load(Ordering::SeqCst), 0, "every backing file is given back");
    }
}
