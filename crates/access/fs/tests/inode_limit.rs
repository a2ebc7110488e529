//! The memory for inodes: a walk over a million names stays below its limit, and no more is taken than is counted. In a
//! process of its own.

use parking_lot::Mutex;
use spurline_fs::{FileSystem, ForgetCandidate, FsConfig, InodeLimiter, LookupOutcome, ROOT, RequestForgets};
use spurline_types::{DirEntry, Error, ErrorKind, FileKind, ListPage, ObjectAttr, ObjectRef, Result, Stats, Version};
use spurline_volume::info::FileInfo;
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Folders with this many files each, with names as data sets have them.
const FILES: usize = 1000;

struct DataSet {
    folders: usize,
}

fn attr(kind: FileKind, n: usize) -> ObjectAttr {
    let version = if kind == FileKind::File {
        format!("{:x}-{}-{n:09}-1735689600-123456789", n + 7_000_000, n % 90_000)
    } else {
        String::new()
    };
    ObjectAttr {
        kind,
        size: 100_000,
        mtime: SystemTime::UNIX_EPOCH,
        mode: 0o644,
        version: Version::new(&version),
        etag: None,
    }
}

fn folder_name(n: usize) -> String {
    format!("n{n:08}")
}

fn file_name(folder: usize, n: usize) -> String {
    format!("ILSVRC2012_n{folder:08}_{n:08}.JPEG")
}

impl Volume for DataSet {
    fn source(&self) -> &str {
        "file:///data"
    }

    fn block_size(&self) -> u64 {
        1 << 20
    }

    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        let depth = path.split(|byte| *byte == b'/').count();
        Ok(attr(if depth > 2 { FileKind::File } else { FileKind::Directory }, path.len()))
    }

    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        let from: usize = cursor.map_or(0, |cursor| std::str::from_utf8(cursor).unwrap().parse().unwrap());
        let path = std::str::from_utf8(path).unwrap();
        let all = match path {
            "" => 1,
            "train" => self.folders,
            _ => FILES,
        };
        let entry = |n: usize| match path {
            "" => DirEntry { name: b"train".to_vec(), attr: attr(FileKind::Directory, 0) },
            "train" => DirEntry { name: folder_name(n).into_bytes(), attr: attr(FileKind::Directory, n) },
            folder => {
                let folder = folder["train/n".len()..].parse().unwrap();
                DirEntry { name: file_name(folder, n).into_bytes(), attr: attr(FileKind::File, folder * FILES + n) }
            }
        };
        let to = (from + max).min(all);
        let next = (to < all).then(|| to.to_string().into_bytes());
        Ok(ListPage { entries: (from..to).map(entry).collect(), next, marker: None })
    }

    fn readlink(&self, _path: &[u8]) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Invalid, "no link"))
    }

    fn read(&self, _object: &ObjectRef, _offset: u64, _dst: &mut [u8]) -> Result<ReadData> {
        Err(Error::new(ErrorKind::Invalid, "no bytes"))
    }

    fn prefetch(&self, _object: &ObjectRef, _blocks: std::ops::Range<u32>, _piece: usize) {}

    fn capacity(&self) -> Result<VolumeSpace> {
        Err(Error::new(ErrorKind::Invalid, "no capacity"))
    }

    fn info(&self, _path: &[u8]) -> Result<FileInfo> {
        Err(Error::new(ErrorKind::Unsupported, "no blocks are cached"))
    }
}

/// What a kernel keeps: its references, and what programs use.
struct Kernel {
    fs: Arc<FileSystem>,
    references: Mutex<HashMap<u64, u64>>,
    in_use: Mutex<HashSet<u64>>,
    requests: AtomicU64,
}

impl Kernel {
    fn new(folders: usize, config: FsConfig) -> (Arc<Kernel>, Arc<Stats>) {
        let stats = Arc::new(Stats::default());
        let fs = Arc::new(FileSystem::new(Arc::new(DataSet { folders }), config, Arc::clone(&stats)));
        let (references, in_use, requests) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        (Arc::new(Kernel { fs, references, in_use, requests }), stats)
    }

    fn refer(&self, ino: u64) -> u64 {
        *self.references.lock().entry(ino).or_default() += 1;
        ino
    }

    fn lookup(&self, parent: u64, name: &str) -> u64 {
        match self.fs.lookup(parent, name.as_bytes()).unwrap() {
            LookupOutcome::Found(entry) => self.refer(entry.attr.ino),
            LookupOutcome::Absent { .. } => panic!("no {name}"),
        }
    }

    /// Lists a folder with attributes, as `ls -l` does: a name without an inode is looked up. Calls `each` after every
    /// part.
    fn list(&self, ino: u64, mut each: impl FnMut()) -> usize {
        let fh = self.fs.opendir(ino).unwrap();
        let (mut at, mut seen) = (0, 0);
        loop {
            let (before, mut plain) = (at, Vec::new());
            let mut room = 100;
            self.fs
                .readdirplus(ino, fh, at, &mut |item| {
                    if room == 0 {
                        return false;
                    }
                    (room, at) = (room - 1, item.next);
                    match &item.entry {
                        Some(entry) => drop(self.refer(entry.attr.ino)),
                        None if item.name.starts_with(b".") => {}
                        None => plain.push(String::from_utf8(item.name.to_vec()).unwrap()),
                    }
                    true
                })
                .unwrap();
            if at == before {
                self.fs.release(fh).unwrap();
                return seen - 2;
            }
            seen += (at - before) as usize;
            for name in plain {
                self.lookup(ino, &name);
                each();
            }
            each();
        }
    }

    fn forget_all(&self) {
        for (ino, count) in self.references.lock().drain() {
            self.fs.forget(ino, count);
        }
    }
}

struct KernelPort(Arc<Kernel>);

impl RequestForgets for KernelPort {
    fn request_forgets(&self, inodes: &[ForgetCandidate]) -> io::Result<()> {
        let kernel = &self.0;
        kernel.requests.fetch_add(inodes.len() as u64, Ordering::Relaxed);
        for inode in inodes {
            assert!(!inode.name.contains(&b'/') && !inode.name.is_empty());
            if !kernel.in_use.lock().contains(&inode.ino)
                && let Some(count) = kernel.references.lock().remove(&inode.ino)
            {
                kernel.fs.forget(inode.ino, count);
            }
        }
        Ok(())
    }
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}

/// One test, since it measures the memory of its process.
#[test]
fn a_million_names_stay_below_the_limit_and_no_more_is_taken_than_is_counted() {
    // Counted and taken, without a limit.
    let (kernel, stats) = Kernel::new(100, FsConfig::default());
    let train = kernel.lookup(ROOT, "train");
    // What the kernel of this test keeps is not part of the measurement.
    kernel.references.lock().reserve(2 * 100 * FILES);
    let before = resident_bytes();
    for n in 0..100 {
        let folder = kernel.lookup(train, &folder_name(n));
        assert_eq!(kernel.list(folder, || {}), FILES);
    }
    let (names, counted) = (stats.fuse.inodes.get(), stats.fuse.inode_bytes.get());
    let taken = resident_bytes() - before;
    println!("{} bytes per inode counted, {} taken", counted / names, taken / names);
    assert!(taken <= counted + counted / 10, "{counted} bytes are counted, {taken} taken");
    assert!(counted <= 2 * taken, "{counted} bytes are counted, {taken} taken");
    assert_eq!(stats.fuse.inode_limit_bytes.get(), 0);
    kernel.forget_all();
    assert_eq!((stats.fuse.inodes.get(), stats.fuse.inode_bytes.get()), (1, 0));

    // A walk over a million names, with two thousand in use.
    let limit = 16 << 20;
    let (kernel, stats) = Kernel::new(1000, FsConfig { inode_bytes: limit, ..FsConfig::default() });
    assert_eq!(stats.fuse.inode_limit_bytes.get(), limit);
    let limiter = InodeLimiter::start(Arc::clone(&kernel.fs) as _, Box::new(KernelPort(Arc::clone(&kernel)))).unwrap();
    let train = kernel.lookup(ROOT, "train");
    kernel.in_use.lock().insert(train);
    let (mut most, mut names) = (0, 0);
    for n in 0..1000 {
        let folder = kernel.lookup(train, &folder_name(n));
        kernel.in_use.lock().insert(folder);
        if n == 7 {
            let used: Vec<u64> = (0..FILES).map(|i| kernel.lookup(folder, &file_name(n, i))).collect();
            kernel.in_use.lock().extend(used);
        }
        names += kernel.list(folder, || {
            // The machine may be slow: the walk waits as a reader would for its next request.
            let held = || stats.fuse.inode_bytes.get();
            let until = Instant::now() + Duration::from_secs(60);
            while held() > limit + limit / 8 {
                assert!(Instant::now() < until, "{} bytes stay above the limit", held());
                std::thread::yield_now();
            }
            most = most.max(held());
        });
    }
    assert_eq!(names, 1000 * FILES);
    let bytes = stats.fuse.inode_bytes.get();
    println!("at most {most} bytes, {} requests for 1,001,001 names", kernel.requests.load(Ordering::Relaxed));
    assert!(bytes <= limit + limit / 8, "{bytes}");
    // The limit is used: names that fit are kept.
    assert!(most > limit / 2 && kernel.requests.load(Ordering::Relaxed) >= 900_000);
    assert_eq!(stats.fuse.forgets_requested.get(), kernel.requests.load(Ordering::Relaxed));
    for ino in kernel.in_use.lock().iter() {
        kernel.fs.getattr(*ino, None).expect("what is in use is kept");
    }
    drop(limiter);
    kernel.forget_all();
    assert_eq!((stats.fuse.inodes.get(), stats.fuse.inode_bytes.get()), (1, 0));
}
