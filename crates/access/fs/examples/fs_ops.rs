//! What the calls of the file system cost by themselves, over a volume that answers at once from memory:
//! nanoseconds of CPU time per call (what else runs on the machine is not counted), the median of eleven
//! runs. `fs_ops [THREADS]`

use spurline_fs::{FileSystem, FsConfig, LookupOutcome, ROOT};
use spurline_types::{Error, ErrorKind, FileKind, ListPage, ObjectAttr, ObjectRef, Result, Stats, Version};
use spurline_volume::info::FileInfo;
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::cell::RefCell;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

const BLOCK: u64 = 4 << 20;
const RUNS: usize = 11;

/// Every name is a file of 1 GiB; nothing is copied.
struct AtOnce {
    file: ObjectAttr,
    directory: ObjectAttr,
    prefetched: AtomicU64,
}

impl Volume for AtOnce {
    fn source(&self) -> &str {
        "memory:"
    }
    fn block_size(&self) -> u64 {
        BLOCK
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        Ok(if path.is_empty() { self.directory.clone() } else { self.file.clone() })
    }
    fn list(&self, _path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        let first = cursor.map_or(0, |c| u64::from_be_bytes(c.try_into().unwrap_or_default()));
        let end = (first + max as u64).min(100_000);
        let entry = |i| spurline_types::DirEntry { name: format!("file-{i:08}").into(), attr: self.file.clone() };
        let next = (end < 100_000).then(|| end.to_be_bytes().to_vec());
        Ok(ListPage { entries: (first..end).map(entry).collect(), next, marker: None })
    }
    fn readlink(&self, _path: &[u8]) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn read(&self, _object: &ObjectRef, _offset: u64, dst: &mut [u8]) -> Result<ReadData> {
        Ok(ReadData::Copied(dst.len()))
    }
    fn prefetch(&self, _object: &ObjectRef, blocks: Range<u32>, _piece: usize) {
        self.prefetched.fetch_add(blocks.len() as u64, Ordering::Relaxed);
    }
    fn capacity(&self) -> Result<VolumeSpace> {
        Ok(VolumeSpace { total_bytes: 0, free_bytes: 0, files: 0, files_free: 0 })
    }
    fn info(&self, _path: &[u8]) -> Result<FileInfo> {
        Err(Error::new(ErrorKind::Unsupported, "no blocks are cached"))
    }
}

fn attr(kind: FileKind, version: &str) -> ObjectAttr {
    let version = Version::new(version);
    ObjectAttr { kind, size: 1 << 30, mtime: SystemTime::now(), mode: 0o555, version, etag: None }
}

/// CPU time of this thread, in nanoseconds.
fn cpu_ns() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0)
}

/// Resident memory of this process, in bytes.
fn resident() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * rustix::param::page_size() as u64
}

/// Nanoseconds of one `call`, made `times` times by each of `threads` threads at once.
fn measure(name: &str, threads: usize, times: u64, call: impl Fn(u64) + Sync) {
    let mut runs: Vec<f64> = (0..RUNS)
        .map(|_| {
            let spent = AtomicU64::new(0);
            std::thread::scope(|scope| {
                for thread in 0..threads as u64 {
                    let (call, spent) = (&call, &spent);
                    scope.spawn(move || {
                        let start = cpu_ns();
                        (0..times).for_each(|i| call(thread * times + i));
                        spent.fetch_add(cpu_ns() - start, Ordering::Relaxed);
                    });
                }
            });
            spent.into_inner() as f64 / times as f64 / threads as f64
        })
        .collect();
    runs.sort_by(f64::total_cmp);
    println!("{name:<44} {:>8.0} ns   (from {:.0} to {:.0})", runs[RUNS / 2], runs[0], runs[RUNS - 1]);
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1);
    let (file, directory) =
        (attr(FileKind::File, "\"d41d8cd98f00b204e9800998ecf8427e\""), attr(FileKind::Directory, ""));
    let volume: Arc<dyn Volume> = Arc::new(AtOnce { file, directory, prefetched: AtomicU64::new(0) });
    let fs = FileSystem::new(volume, FsConfig::default(), Arc::new(Stats::default()));
    let find = |name: &[u8]| match fs.lookup(ROOT, name) {
        Ok(LookupOutcome::Found(entry)) => entry.attr.ino,
        other => panic!("{other:?}"),
    };
    println!("{threads} thread(s), CPU time per call");
    let names: Vec<Vec<u8>> = (0..4096).map(|i| format!("file-{i:08}").into_bytes()).collect();
    let name = |i: u64| &names[i as usize % names.len()];

    measure("lookup and forget, a new inode each time", threads, 100_000, |i| {
        let ino = find(name(i));
        fs.forget(ino, 1);
    });
    let before = resident();
    let million: Vec<u64> = (0..1_000_000).map(|i| find(format!("file-{i:08}").as_bytes())).collect();
    let grown = resident().saturating_sub(before + million.len() as u64 * 8);
    println!("{:<44} {:>8} bytes of memory", "an inode, with a name of 13 bytes", grown / million.len() as u64);
    million.into_iter().for_each(|ino| fs.forget(ino, 1));
    let known: Vec<u64> = names.iter().map(|name| find(name)).collect();
    let ino = |i: u64| known[i as usize % known.len()];
    measure("lookup and forget, a known inode", threads, 200_000, |i| {
        let ino = find(name(i));
        fs.forget(ino, 1);
    });
    measure("getattr of a file", threads, 200_000, |i| {
        black_box(fs.getattr(ino(i), None).is_ok());
    });
    measure("open and release", threads, 100_000, |i| {
        let fh = fs.open(ino(i), 0, None).map_or(0, |opened| opened.fh);
        let _ = fs.release(fh);
    });
    measure("lookup, open, read, release, forget", threads, 100_000, |i| {
        let ino = find(name(i));
        let fh = fs.open(ino, 0, None).map_or(0, |opened| opened.fh);
        black_box(fs.read(ino, fh, 0, &mut [0; 64]).is_ok());
        let _ = fs.release(fh);
        fs.forget(ino, 1);
    });
    let open = || fs.open(known[0], 0, None).map_or(0, |opened| opened.fh);
    let handles: Vec<u64> = (0..threads).map(|_| open()).collect();
    // Each thread's own, because filling one for every read would cost as much as the read.
    thread_local!(static DST: RefCell<[u8; 4096]> = const { RefCell::new([0; 4096]) });
    let read = |fh: u64, offset: u64| {
        DST.with_borrow_mut(|dst| black_box(fs.read(known[0], fh, offset % (1 << 30), dst).is_ok()));
    };
    let (times, blocks) = (200_000, 1 << 18);
    measure("read 4 KiB, sequential, a handle each", threads, times, |i| {
        let thread = (i / times) as usize;
        read(handles[thread], i % times * 4096);
    });
    let own = |i: u64| handles[(i / times) as usize];
    measure("read 4 KiB, random, a handle each", threads, times, |i| {
        read(own(i), i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks * 4096);
    });
    measure("read 4 KiB, random, one handle for all", threads, times, |i| {
        read(handles[0], i.wrapping_mul(0x9e37_79b9_7f4a_7c15) % blocks * 4096);
    });
    measure("read 4 KiB, 16 shards in turn, a handle each", threads, times, |i| {
        read(own(i), i % 16 * (64 << 20) + i / 16 % 16384 * 4096);
    });
    let entries = 100_000;
    measure("readdirplus and forget, per 100,000 names", threads, 1, |_| {
        let fh = fs.opendir(ROOT).unwrap_or(0);
        let mut inos = Vec::with_capacity(entries);
        let (mut from, mut more) = (0, true);
        while std::mem::take(&mut more) {
            let _ = fs.readdirplus(ROOT, fh, from, &mut |item| {
                inos.extend(item.entry.map(|entry| entry.attr.ino));
                (from, more) = (item.next, true);
                true
            });
        }
        let _ = fs.release(fh);
        inos.into_iter().for_each(|ino| fs.forget(ino, 1));
    });
}
