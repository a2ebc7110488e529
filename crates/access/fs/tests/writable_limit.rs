//! The memory for inodes of a writable mount: a walk over many names stays below its limit, and no more is taken than is
//! counted. In a process of its own.

#[path = "fs/objects/mod.rs"]
mod objects;

use objects::{MemorySource, NO_KERNEL, NoReads, ROOT_OBJECT, writable_config};
use parking_lot::Mutex;
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::{
    CallerGroups, FileService, ForgetCandidate, FsCaller, InodeLimiter, LookupOutcome, ROOT, RequestForgets,
    RequestNumber,
};
use spurline_types::Stats;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

const FOLDERS: usize = 40;
const FILES: usize = 1000;
const CALLER: FsCaller<'static> =
    FsCaller { uid: 0, gid: 0, pid: 0, umask: 0, groups: CallerGroups::Unknown, request: RequestNumber::NONE };

fn file_name(folder: usize, n: usize) -> String {
    format!("ILSVRC2012_n{folder:08}_{n:08}.JPEG")
}

fn file_system(source: &Arc<MemorySource>, limit: u64) -> (Arc<WritableFileSystem>, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let config = writable_config(limit);
    let fs = WritableFileSystem::new(Arc::new(NoReads), Arc::clone(source) as _, config, Arc::clone(&stats));
    (Arc::new(fs.unwrap()), stats)
}

/// What a kernel keeps: its references, and what programs use.
struct Kernel {
    fs: Arc<WritableFileSystem>,
    references: Mutex<HashMap<u64, u64>>,
    in_use: Mutex<HashSet<u64>>,
}

impl Kernel {
    fn lookup(&self, parent: u64, name: &str) -> u64 {
        let LookupOutcome::Found(entry) = self.fs.lookup(parent, name.as_bytes(), &CALLER).unwrap() else {
            panic!("no {name}")
        };
        *self.references.lock().entry(entry.ino).or_default() += 1;
        entry.ino
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
        for inode in inodes {
            assert!(inode.parent.is_some() && !inode.name.is_empty());
            if !self.0.in_use.lock().contains(&inode.ino)
                && let Some(count) = self.0.references.lock().remove(&inode.ino)
            {
                self.0.fs.forget(inode.ino, count);
            }
        }
        Ok(())
    }
}

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// One test, since it measures the memory of its process.
#[test]
fn many_names_stay_below_the_limit_and_no_more_is_taken_than_is_counted() {
    let source = Arc::new(MemorySource::default());
    for folder in 0..FOLDERS {
        let mut tree = source.tree.lock();
        let at = tree.make(ROOT_OBJECT, format!("n{folder:08}").as_bytes(), true).unwrap();
        for n in 0..FILES {
            tree.make(at, file_name(folder, n).as_bytes(), false).unwrap();
        }
    }
    let kernel_of = |fs: &Arc<WritableFileSystem>| {
        let references = Mutex::new(HashMap::with_capacity(2 * FOLDERS * FILES));
        Arc::new(Kernel { fs: Arc::clone(fs), references, in_use: Mutex::default() })
    };
    // Counted and taken, without a limit.
    let (fs, stats) = file_system(&source, u64::MAX);
    let kernel = kernel_of(&fs);
    let before = resident_bytes();
    for folder in 0..FOLDERS {
        let at = kernel.lookup(ROOT, &format!("n{folder:08}"));
        for n in 0..FILES {
            kernel.lookup(at, &file_name(folder, n));
        }
    }
    let (names, counted) = (stats.fuse.inodes.get(), stats.fuse.inode_bytes.get());
    // The references of this test's kernel are written for the first time.
    let taken = resident_bytes() - before;
    println!("{} bytes per inode counted, {} taken", counted / names, taken / names);
    assert!(taken <= counted + counted / 10, "{counted} bytes are counted, {taken} taken");
    assert!(counted <= 2 * taken, "{counted} bytes are counted, {taken} taken");
    kernel.forget_all();
    assert_eq!((stats.fuse.inodes.get(), stats.fuse.inode_bytes.get()), (1, 0));

    // With a limit, and some names in use.
    let limit = 2 << 20;
    let (fs, stats) = file_system(&source, limit);
    let kernel = kernel_of(&fs);
    assert_eq!(stats.fuse.inode_limit_bytes.get(), limit);
    let inodes = Arc::clone(&fs).limited_inodes().unwrap();
    let limiter = InodeLimiter::start(Arc::clone(&inodes), Box::new(KernelPort(Arc::clone(&kernel)))).unwrap();
    let mut most = 0;
    let mut open = Vec::new();
    for folder in 0..FOLDERS {
        let at = kernel.lookup(ROOT, &format!("n{folder:08}"));
        kernel.in_use.lock().insert(at);
        for n in 0..FILES {
            let ino = kernel.lookup(at, &file_name(folder, n));
            if n == 0 {
                open.push((ino, fs.open(ino, 0, &CALLER, &NO_KERNEL).unwrap().fh));
            }
            let until = Instant::now() + Duration::from_secs(60);
            while inodes.inode_memory() > limit + limit / 8 {
                assert!(Instant::now() < until, "{} bytes stay above the limit", inodes.inode_memory());
                std::thread::yield_now();
            }
            most = most.max(inodes.inode_memory());
        }
    }
    println!("at most {most} bytes; {} forgets were requested", stats.fuse.forgets_requested.get());
    assert!(most > limit / 2 && stats.fuse.forgets_requested.get() as usize >= FOLDERS * FILES * 8 / 10);
    // What is open is never requested; what is in use is kept.
    for (ino, fh) in open {
        fs.getattr(ino, None, &CALLER).unwrap();
        fs.release(fh).unwrap();
    }
    drop(limiter);
    kernel.forget_all();
    assert_eq!((stats.fuse.inodes.get(), stats.fuse.inode_bytes.get()), (1, 0));
}
