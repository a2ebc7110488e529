//! Measures the store on a real disk, beside fio where it is installed: reads of several sizes by several threads,
//! writes, the checksum alone, and opening a large index. Every figure comes with the CPU it cost.
//!
//! `cargo run --release -p spurline-store --example storebench -- [DIR] [MIB]`

use spurline_mem::BufferPool;
use spurline_store::{CacheCapacity, IoMode, ReadOutcome, Store, StoreConfig, synthesise};
use spurline_types::{ObjectRef, Stats, Version};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: u32 = 4 << 20;

fn cpu() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` is as long as the kernel writes.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let time = |t: libc::timeval| Duration::from_micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    time(usage.ru_utime) + time(usage.ru_stime)
}

fn rss() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    text.split(' ').nth(1).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * rustix::param::page_size() as u64
}

fn report(name: &str, bytes: u64, ops: u64, took: Duration, cpu: Duration) {
    let gb = bytes as f64 / 1e9;
    println!(
        "{name:<44} {:>6.2} GB/s {:>9.0} ops/s {:>6.3} CPU-s/GB {:>6.1} us CPU/op",
        gb / took.as_secs_f64(),
        ops as f64 / took.as_secs_f64(),
        cpu.as_secs_f64() / gb,
        cpu.as_secs_f64() * 1e6 / ops as f64
    );
}

fn main() {
    let mut args = std::env::args().skip(1);
    let root = args.next().map_or_else(|| std::env::temp_dir().join("spurline-storebench"), PathBuf::from);
    let mib: u64 = args.next().and_then(|n| n.parse().ok()).unwrap_or(2048);
    let dir = root.join("cache");
    let _ = std::fs::remove_dir_all(&dir);
    checksum();
    let pool = BufferPool::new(64 << 20, BLOCK as usize).expect("64 MiB of buffers");
    let obj = ObjectRef::new("bench:", b"big", Version::new("1"), mib << 20);
    for registered in [true, false] {
        let mut config = StoreConfig::new(vec![dir.clone()], CacheCapacity::All);
        config.free_space_ratio = 0.01;
        config.pool = registered.then(|| Arc::clone(&pool));
        let store = Store::open(config, Arc::new(Stats::default())).unwrap_or_else(|e| panic!("{e}"));
        if registered {
            write(&store, &pool, &obj);
        }
        let kind = if registered { "registered buffers" } else { "plain buffers" };
        for (size, threads) in [(1 << 20, 1), (1 << 20, 2), (1 << 20, 4), (4 << 20, 1), (128 << 10, 1), (128 << 10, 4)]
        {
            for turn in 0..2 {
                if registered && turn == 0 {
                    fio(&dir, &obj, size, threads);
                }
                reads(&store, &pool, &obj, size, threads, kind);
            }
        }
        small(&store, &obj, 1);
        small(&store, &obj, 4);
    }
    let _ = std::fs::remove_dir_all(&dir);
    let files = root.join("files");
    many_files(&files, &pool);
    let _ = std::fs::remove_dir_all(&files);
    for (name, objects, blocks, len) in [
        ("1M objects of one block of 100 KiB", 1_000_000, 1, 100 << 10),
        ("250 objects of 4000 blocks of 1 MiB", 250, 4000, 1 << 20),
        ("1000 objects of 1000 blocks of 4 MiB", 1000, 1000, BLOCK),
    ] {
        let dir = root.join("index");
        let _ = std::fs::remove_dir_all(&dir);
        synthesise(&dir, BLOCK, objects, blocks, len).unwrap_or_else(|e| panic!("{e}"));
        let log = std::fs::metadata(dir.join("index")).map_or(0, |m| m.len());
        let (before, began, used) = (rss(), Instant::now(), cpu());
        let config = StoreConfig::new(vec![dir.clone()], CacheCapacity::Bytes(1 << 50));
        let store = Store::open(config, Arc::new(Stats::default())).unwrap_or_else(|e| panic!("{e}"));
        let took = began.elapsed();
        let n = store.disks()[0].blocks.max(1);
        println!(
            "open, {name:<38} {:.2} s, {:.2} CPU-s, log {} MiB, {} bytes of memory per block ({n} left)",
            took.as_secs_f64(),
            (cpu() - used).as_secs_f64(),
            log >> 20,
            (rss().saturating_sub(before)) / (objects * u64::from(blocks)),
        );
        drop(store);
        let _ = std::fs::remove_dir_all(&dir);
    }
}

fn checksum() {
    let data = vec![7u8; 256 << 20];
    for (name, part) in [("CRC32C, 1 MiB again and again", 1 << 20), ("CRC32C, 256 MiB of memory", 256 << 20)] {
        let (began, used) = (Instant::now(), cpu());
        for i in 0..(2 << 30) / part {
            std::hint::black_box(spurline_store::crc::checksums(&data[i * part % data.len()..][..part]));
        }
        report(name, 2 << 30, (2 << 30) / (64 << 10), began.elapsed(), cpu() - used);
    }
}

fn write(store: &Store, pool: &Arc<BufferPool>, obj: &ObjectRef) {
    let mut buf = pool.try_alloc(BLOCK as usize).expect("a block of buffer");
    for (i, byte) in buf.iter_mut().enumerate() {
        *byte = ((i * 31) >> 3) as u8;
    }
    let (began, used) = (Instant::now(), cpu());
    let blocks = obj.block_count(u64::from(BLOCK)) as u32;
    for index in 0..blocks {
        assert!(store.put(obj, index, &buf).unwrap_or_else(|e| panic!("{e}")), "block {index} was not kept");
    }
    report("put, 4 MiB, 1 thread", obj.size, u64::from(blocks), began.elapsed(), cpu() - used);
}

fn reads(store: &Arc<Store>, pool: &Arc<BufferPool>, obj: &ObjectRef, size: usize, threads: u64, kind: &str) {
    let (began, used) = (Instant::now(), cpu());
    let total = obj.size / size as u64;
    let per_block = u64::from(BLOCK) / size as u64;
    std::thread::scope(|scope| {
        for t in 0..threads {
            scope.spawn(move || {
                let mut buf = pool.try_alloc(size);
                for n in (total * t / threads)..(total * (t + 1) / threads) {
                    let at = (n % per_block) as usize * size;
                    let outcome = store.read(obj, (n / per_block) as u32, at..at + size, &mut buf);
                    assert_eq!(outcome.unwrap_or_else(|e| panic!("{e}")), ReadOutcome::Hit);
                }
            });
        }
    });
    let name = format!("read, {} KiB, {threads} threads, {kind}", size >> 10);
    report(&name, obj.size, total, began.elapsed(), cpu() - used);
}

fn small(store: &Arc<Store>, obj: &ObjectRef, threads: u64) {
    let (began, used) = (Instant::now(), cpu());
    let each = 4000u64;
    std::thread::scope(|scope| {
        for t in 0..threads {
            scope.spawn(move || {
                let mut dst = [0; 4096];
                let mut state = t * 77 + 5;
                for _ in 0..each {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let at = (state >> 20) % (obj.size / 4096) * 4096;
                    let (index, at) = ((at / u64::from(BLOCK)) as u32, (at % u64::from(BLOCK)) as usize);
                    assert!(store.read_copied(obj, index, at..at + 4096, &mut dst).unwrap_or_else(|e| panic!("{e}")));
                }
            });
        }
    });
    let n = each * threads;
    report(&format!("get, 4 KiB random, {threads} threads"), n * 4096, n, began.elapsed(), cpu() - used);
}

fn fio(dir: &Path, obj: &ObjectRef, size: usize, threads: u64) {
    let file = dir.join(format!("data/{:02x}/{}", obj.id.0 >> 120, obj.id));
    let command = Command::new("fio")
        .args([
            "--name=r",
            "--rw=read",
            "--direct=1",
            "--ioengine=io_uring",
            "--fixedbufs=1",
            "--iodepth=1",
            "--thread",
        ])
        .args(["--group_reporting", "--minimal", "--readonly", "--offset_increment=0"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--bs={size}"))
        .arg(format!("--numjobs={threads}"))
        .arg(format!("--size={}", obj.size / threads))
        .arg(format!("--offset_increment={}", obj.size / threads))
        .output();
    let Ok(output) = command else { return println!("fio is not installed") };
    let text = String::from_utf8_lossy(&output.stdout);
    let fields: Vec<&str> = text.trim().split(';').collect();
    let field = |n: usize| fields.get(n).and_then(|f| f.trim_end_matches('%').parse::<f64>().ok()).unwrap_or(0.0);
    // Terse version 3: read bandwidth in KiB/s, run time in ms, user and system CPU in percent of one job's time.
    let gb = field(6) * 1024.0 / 1e9;
    println!(
        "{:<44} {gb:>6.2} GB/s {:>9.0} ops/s {:>6.3} CPU-s/GB",
        format!("fio,  {} KiB, {threads} threads, fixed buffers", size >> 10),
        field(7),
        (field(87) + field(88)) / 100.0 * threads as f64 / gb.max(1e-9)
    );
}

fn many_files(dir: &Path, pool: &Arc<BufferPool>) {
    let mut config = StoreConfig::new(vec![dir.into()], CacheCapacity::All);
    (config.free_space_ratio, config.pool, config.io) = (0.01, Some(Arc::clone(pool)), IoMode::Dio);
    let objects: Vec<_> =
        (0..5000).map(|n| ObjectRef::new("bench:", format!("f{n}").as_bytes(), Version::new("1"), 100 << 10)).collect();
    let data = vec![3u8; 100 << 10];
    {
        let store = Store::open(config.clone(), Arc::new(Stats::default())).unwrap_or_else(|e| panic!("{e}"));
        let (began, used) = (Instant::now(), cpu());
        for obj in &objects {
            assert!(store.put(obj, 0, &data).unwrap_or_else(|e| panic!("{e}")));
        }
        report("put, 5000 files of 100 KiB", 5000 * (100 << 10), 5000, began.elapsed(), cpu() - used);
    }
    let store = Store::open(config, Arc::new(Stats::default())).unwrap_or_else(|e| panic!("{e}"));
    for (name, threads) in [("first", 1usize), ("again", 1), ("again", 4)] {
        let (began, used) = (Instant::now(), cpu());
        std::thread::scope(|scope| {
            for part in objects.chunks(objects.len().div_ceil(threads)) {
                let store = &store;
                scope.spawn(move || {
                    let mut buf = pool.try_alloc(100 << 10);
                    for obj in part {
                        let outcome = store.read(obj, 0, 0..100 << 10, &mut buf);
                        assert_eq!(outcome.unwrap_or_else(|e| panic!("{e}")), ReadOutcome::Hit);
                    }
                });
            }
        });
        let name = format!("read, 5000 files of 100 KiB, {name}, {threads} threads");
        report(&name, 5000 * (100 << 10), 5000, began.elapsed(), cpu() - used);
    }
    let (began, used) = (Instant::now(), cpu());
    for obj in &objects {
        assert!(store.whole_file(obj).is_some());
    }
    report("whole_file of those, checked before", 5000 * (100 << 10), 5000, began.elapsed(), cpu() - used);
}
