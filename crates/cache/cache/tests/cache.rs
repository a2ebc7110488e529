//! The cache over a scripted origin: how often blocks are fetched, which failures reach readers, and what is
//! found again after a restart.

use spurline_cache::{Cache, CacheContext, FolderRule, WarmBatch};
use spurline_mem::{BufferPool, MemTier};
use spurline_origin::{OriginCapabilities, OriginCapacity, OriginStore};
use spurline_store::{CacheCapacity, DiskFault, FaultyDisk, Store, StoreConfig};
use spurline_types::errno::EFBIG;
use spurline_types::{BlockId, ByteSink, Error, ErrorKind, ListPage, ObjectAttr, ObjectRef, Result, Stats, Version};
use spurline_volume::{ReadData, Volume as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

const BLOCK: u64 = 256 << 10;

/// Objects whose bytes follow from their path, version and offset; counts reads and fails on demand.
#[derive(Default)]
struct Scripted {
    reads: AtomicU64,
    fail: AtomicU64,
    pause_ms: AtomicU64,
    stands_still: AtomicBool,
}

fn byte(version: &str, at: u64) -> u8 {
    (at.wrapping_mul(31).wrapping_add(at >> 12) as u8) ^ version.as_bytes()[0]
}

fn unsupported<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Unsupported, "not supported by this origin"))
}

impl OriginStore for Scripted {
    fn source_url(&self) -> &str {
        "mem://scripted"
    }
    fn describe(&self) -> String {
        "scripted".into()
    }
    fn capabilities(&self) -> OriginCapabilities {
        OriginCapabilities { symlinks: false, byte_names: true, modes: false, etags: true, concurrent_reads: false }
    }
    fn check(&self, _: Instant) -> Result<()> {
        Ok(())
    }
    fn lookup(&self, _: &[u8], _: Instant) -> Result<ObjectAttr> {
        unsupported()
    }
    fn list(&self, _: &[u8], _: Option<&[u8]>, _: usize, _: Instant) -> Result<ListPage> {
        unsupported()
    }
    fn readlink(&self, _: &[u8], _: Instant) -> Result<Vec<u8>> {
        unsupported()
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, _: Instant) -> Result<()> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(self.pause_ms.load(Ordering::SeqCst)));
        while self.stands_still.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if object.version.as_str() == "gone" {
            return Err(Error::new(ErrorKind::Stale, "another version by now"));
        }
        let mut at = offset;
        while !sink.spare().is_empty() {
            // In the middle of the block, so that readers have seen a part by then.
            if at > offset && self.fail.load(Ordering::SeqCst) > 0 {
                self.fail.fetch_sub(1, Ordering::SeqCst);
                return Err(Error::new(ErrorKind::Unavailable, "the connection broke"));
            }
            let spare = sink.spare();
            let n = spare.len().min(64 << 10);
            for (i, b) in spare[..n].iter_mut().enumerate() {
                *b = byte(object.version.as_str(), at + i as u64);
            }
            sink.commit(n);
            at += n as u64;
        }
        Ok(())
    }
    fn statfs(&self, _: Instant) -> Result<Option<OriginCapacity>> {
        Ok(None)
    }
}

struct Rig {
    under: Arc<Scripted>,
    shared: Arc<CacheContext>,
    cache: Arc<Cache>,
    stats: Arc<Stats>,
}

fn rig(dir: Option<&Path>, blocks_in_memory: u64) -> Rig {
    rig_with(dir, blocks_in_memory, |_| {})
}

fn rig_with(dir: Option<&Path>, blocks_in_memory: u64, change: impl FnOnce(&mut StoreConfig)) -> Rig {
    let stats = Arc::new(Stats::default());
    let pool = BufferPool::new(blocks_in_memory * BLOCK, BLOCK as usize).unwrap();
    let store = dir.map(|dir| {
        let mut config = StoreConfig {
            block_size: BLOCK as u32,
            pool: Some(Arc::clone(&pool)),
            free_space_ratio: 0.0,
            ..StoreConfig::new(vec![dir.to_owned()], CacheCapacity::Bytes(1 << 30))
        };
        change(&mut config);
        Store::open(config, Arc::clone(&stats)).unwrap()
    });
    let shared =
        CacheContext::new(MemTier::new(pool), store, BLOCK, 16, Duration::from_secs(5), false, Arc::clone(&stats));
    let under = Arc::new(Scripted::default());
    Rig { cache: Cache::new(Arc::clone(&shared), Arc::clone(&under) as _), shared, under, stats }
}

fn object(version: &str, size: u64) -> ObjectRef {
    ObjectRef::new("mem://scripted", b"dir/file", Version::new(version), size)
}

fn check(cache: &Cache, object: &ObjectRef, offset: u64, len: usize) -> Result<()> {
    let mut buf = vec![0; len];
    let want = len.min(object.size.saturating_sub(offset) as usize);
    let data = cache.read(object, offset, &mut buf)?;
    let bytes: &[u8] = match &data {
        ReadData::Copied(n) => &buf[..*n],
        ReadData::Shared(slice) => slice,
    };
    assert_eq!(bytes.len(), want, "{len} bytes at {offset}");
    for (i, b) in bytes.iter().enumerate() {
        assert_eq!(*b, byte(object.version.as_str(), offset + i as u64), "byte {} of {len} at {offset}", i);
    }
    Ok(())
}

#[test]
fn a_reader_inside_a_block_gets_its_bytes_first_and_the_block_is_whole_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    for rig in [rig(None, 8), rig(Some(dir.path()), 8)] {
        let file = object("v1", 2 * BLOCK + 100_000);
        check(&rig.cache, &file, BLOCK + 150_000, 4096).unwrap();
        check(&rig.cache, &file, BLOCK, BLOCK as usize).unwrap();
        assert_eq!(rig.under.reads.load(Ordering::SeqCst), 2, "from the reader's bytes on, and what is before");
        check(&rig.cache, &file, 2 * BLOCK + 99_000, 4096).unwrap();
        check(&rig.cache, &file, 2 * BLOCK, BLOCK as usize).unwrap();
        check(&rig.cache, &file, 4096, 4096).unwrap();
        assert_eq!(rig.under.reads.load(Ordering::SeqCst), 5);
        // A failure in the first half and in the second.
        for fails in [1, 2] {
            let file = object(["v2", "v3"][fails as usize - 1], BLOCK);
            rig.under.fail.store(1, Ordering::SeqCst);
            let failed = check(&rig.cache, &file, BLOCK - 130_000, 130_000).is_err();
            check(&rig.cache, &file, 0, BLOCK as usize).unwrap();
            assert!(failed || rig.under.fail.load(Ordering::SeqCst) == 0);
        }
    }
}

#[test]
fn removed_blocks_count_once_also_those_in_memory_alone() {
    let (dir, full) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let file = object("v1", 3 * BLOCK);
    let ways = [
        rig(None, 8),
        rig_with(Some(full.path()), 8, |config| config.capacity = CacheCapacity::Bytes(BLOCK / 2)),
        rig(Some(dir.path()), 8),
    ];
    for (way, rig) in ways.iter().enumerate() {
        check(&rig.cache, &file, 0, 3 * BLOCK as usize).unwrap();
        if way == 2 {
            while rig.stats.blockcache.blocks.get() < 3 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        assert_eq!(rig.cache.drop_blocks(&file, 1..2, false).removed, BLOCK, "way {way}");
        let parts = (0..).map_while(|part| rig.cache.drop_part(part, false, false));
        assert_eq!(parts.map(|bytes| bytes.removed).sum::<u64>(), 2 * BLOCK, "way {way}");
    }
}

#[test]
fn any_range_is_right_from_the_under_store_from_memory_and_from_disk() {
    let dir = tempfile::tempdir().unwrap();
    let file = object("v1", 5 * BLOCK + 12_345);
    // Two blocks of memory for a file of six: most reads come from disk after the first pass.
    for memory in [2, 64] {
        let rig = rig(Some(dir.path()), memory.max(4));
        for (offset, len) in [
            (0, 10),
            (BLOCK - 5, 10),
            (BLOCK, BLOCK as usize),
            (3 * BLOCK - 1, 70_000),
            (5 * BLOCK, 20_000),
            (7, 1 << 20),
        ] {
            check(&rig.cache, &file, offset, len).unwrap();
            check(&rig.cache, &file, offset, len).unwrap();
        }
        check(&rig.cache, &file, file.size - 3, 100).unwrap();
        check(&rig.cache, &file, file.size + 3, 100).unwrap();
    }
}

#[test]
fn a_block_is_fetched_once_however_many_ask() {
    let rig = rig(None, 64);
    rig.under.pause_ms.store(50, Ordering::SeqCst);
    let file = object("v1", 4 * BLOCK);
    std::thread::scope(|scope| {
        for reader in 0..32u64 {
            let (cache, file) = (&rig.cache, &file);
            scope.spawn(move || {
                for block in 0..4 {
                    check(cache, file, ((block + reader) % 4) * BLOCK + reader, 4000).unwrap();
                }
            });
        }
    });
    assert_eq!(rig.under.reads.load(Ordering::SeqCst), 4);
}

#[test]
fn short_blocks_brought_together_are_each_answered_for_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let rig = rig(Some(dir.path()), 4);
    let named = |n: usize, version: &str| {
        ObjectRef::new("mem://scripted", format!("dir/{n}").as_bytes(), Version::new(version), BLOCK / 2 + 1)
    };
    // More than the memory has room for, one of another version by now, one that is held, one twice.
    let mut objects: Vec<ObjectRef> = (0..20).map(|n| named(n, if n == 5 { "gone" } else { "v1" })).collect();
    assert!(rig.cache.bring_block(&objects[2], 0, false).unwrap());
    objects.push(objects[7].clone());
    let blocks: Vec<(&ObjectRef, u32)> = objects.iter().map(|object| (object, 0)).collect();
    for (n, came) in rig.cache.bring_blocks(&blocks, 8).into_iter().enumerate() {
        match n {
            5 => assert_eq!(came.unwrap_err().kind(), ErrorKind::Stale),
            2 => assert!(!came.unwrap(), "it was held"),
            7 | 20 => assert!(came.is_ok()),
            _ => assert!(came.unwrap(), "{n} was fetched"),
        }
    }
    assert_eq!(rig.under.reads.load(Ordering::SeqCst), 20, "each was read once");
    for (n, came) in rig.cache.bring_blocks(&blocks, 8).into_iter().enumerate() {
        assert!(n == 5 || !came.unwrap(), "{n} is held now");
    }
    for (n, object) in objects.iter().enumerate() {
        assert_eq!(check(&rig.cache, object, 0, object.size as usize).is_ok(), n != 5, "{n}");
    }
}

#[test]
fn a_block_that_is_wrong_on_disk_is_brought_again_and_nobody_speaks_of_room() {
    fn spoil(dir: &Path) {
        for entry in std::fs::read_dir(dir).unwrap().flatten() {
            match entry.file_type().unwrap().is_dir() {
                true => spoil(&entry.path()),
                false if entry.metadata().unwrap().len() >= BLOCK => {
                    let file = std::fs::File::options().write(true).open(entry.path()).unwrap();
                    std::os::unix::fs::FileExt::write_all_at(&file, b"spoilt", 1000).unwrap();
                }
                false => {}
            }
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let rig = rig(Some(dir.path()), 16);
    let file = object("v1", BLOCK);
    for round in 1..5 {
        assert!(round > 1 || rig.cache.bring_block(&file, 0, false).unwrap());
        spoil(dir.path());
        let until = Instant::now() + Duration::from_secs(60);
        while let Err(error) = rig.cache.bring_block(&file, 0, true) {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
            assert!(Instant::now() < until, "{error}");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert!(!rig.cache.bring_block(&file, 0, true).unwrap(), "it is right again");
        check(&rig.cache, &file, 0, file.size as usize).unwrap();
    }
}

#[test]
fn a_restart_keeps_the_cache() {
    let dir = tempfile::tempdir().unwrap();
    let file = object("v1", 3 * BLOCK + 7);
    let first = rig(Some(dir.path()), 16);
    check(&first.cache, &file, 0, file.size as usize).unwrap();
    assert_eq!(first.under.reads.load(Ordering::SeqCst), 4);
    // A fill answers readers before the block is on disk.
    let until = Instant::now() + Duration::from_secs(10);
    while first.stats.blockcache.blocks.get() < 4 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(first);
    let again = open_again(dir.path());
    check(&again.cache, &file, 0, file.size as usize).unwrap();
    assert_eq!(again.under.reads.load(Ordering::SeqCst), 0, "all of it was on disk");
    assert!(again.cache.backing(&file).is_some(), "a whole file can be handed to the kernel");
    assert!(again.cache.backing(&object("v2", file.size)).is_none());
}

#[test]
fn what_is_read_of_a_file_that_is_being_written_comes_to_no_disk() {
    let dir = tempfile::tempdir().unwrap();
    let rig = rig(Some(dir.path()), 16);
    let mut file = object("v1", 2 * BLOCK);
    check(&rig.cache, &file, 0, 10).unwrap();
    file.version = file.version.with_unsettled_mark(7);
    let marked = ObjectRef::new("mem://scripted", &file.path, file.version, file.size);
    assert!(rig.cache.bring_block(&marked, 0, false).unwrap());
    check(&rig.cache, &marked, 0, file.size as usize).unwrap();
    assert_eq!(rig.under.reads.load(Ordering::SeqCst), 3, "nothing of the other version was taken, memory is");
    assert!(!rig.shared.store.as_ref().unwrap().contains_block(&marked, 0));
    assert!(rig.cache.backing(&marked).is_none());
}

/// The last job of the first cache may hold the directory a moment longer than the owner.
fn open_again(dir: &Path) -> Rig {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        if let Ok(rig) = std::panic::catch_unwind(|| rig(Some(dir), 16)) {
            return rig;
        }
        assert!(Instant::now() < until, "the directory stays in use");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn failures_reach_the_reader_and_leave_nothing_behind() {
    let rig = rig(None, 16);
    let file = object("v1", BLOCK);
    rig.under.fail.store(1, Ordering::SeqCst);
    let error = check(&rig.cache, &file, 10, BLOCK as usize - 10).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    check(&rig.cache, &file, BLOCK - 10, 10).unwrap();

    let gone = object("gone", BLOCK);
    assert_eq!(check(&rig.cache, &gone, 0, 10).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(rig.stats.blockcache.mem_hit_bytes.get(), 0, "no failed block was ever served");
}

#[test]
fn a_stalled_under_store_is_an_error_in_time() {
    let stats = Arc::new(Stats::default());
    let pool = BufferPool::new(16 * BLOCK, BLOCK as usize).unwrap();
    let shared = CacheContext::new(MemTier::new(pool), None, BLOCK, 4, Duration::from_millis(100), false, stats);
    let under = Arc::new(Scripted::default());
    under.pause_ms.store(4_000, Ordering::SeqCst);
    let cache = Cache::new(shared, Arc::clone(&under) as _);
    let error = check(&cache, &object("v1", BLOCK), 0, 10).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
}

#[test]
fn what_is_on_disk_is_read_while_all_memory_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let rig = rig(Some(dir.path()), 8);
    let (file, other) = (object("v1", BLOCK), object("v2", 8 * BLOCK));
    check(&rig.cache, &file, 0, BLOCK as usize).unwrap();
    let id = BlockId { object: file.id, index: 0 };
    let until = Instant::now() + Duration::from_secs(60);
    while !rig.shared.store.as_ref().unwrap().contains_block(&file, 0) {
        assert!(Instant::now() < until, "the block comes to disk");
        std::thread::yield_now();
    }
    // Fills of a source that stalls have all memory. The disk's writer may hold a buffer a little longer.
    let mut fills = Vec::new();
    while rig.shared.tier.peek(&id).is_some() || rig.cache.pool().try_alloc(BLOCK as usize).is_some() {
        assert!(Instant::now() < until, "fills take all of the memory");
        let next = BlockId { object: other.id, index: fills.len() as u32 };
        fills.extend(rig.shared.tier.try_fill(next, BLOCK as usize));
    }
    rig.under.fail.store(1_000, Ordering::SeqCst);
    check(&rig.cache, &file, 0, BLOCK as usize).unwrap();
    drop(fills);
}

#[test]
fn a_source_that_stands_still_leaves_buffers_whatever_the_lengths() {
    // A little more than half of a buffer, and a little of one.
    for len in [BLOCK / 2 + 1, 3000] {
        let rig = rig(None, 32);
        let pool = rig.cache.pool();
        rig.under.stands_still.store(true, Ordering::SeqCst);
        let file = |n: u32| ObjectRef::new("mem://scripted", format!("f{n}").as_bytes(), Version::new("v"), len);
        let buffers = (pool.limit_bytes() / BufferPool::footprint(len as usize)) as u32;
        let (wanted, rig) = (buffers.min(600), &rig);
        std::thread::scope(|scope| {
            for n in 0..wanted {
                scope.spawn(move || drop(check(&rig.cache, &file(n), 0, 10)));
            }
            let until = Instant::now() + Duration::from_secs(60);
            while pool.used_bytes() < pool.limit_bytes() / 2 {
                assert!(Instant::now() < until, "half of it may be under way");
                std::thread::yield_now();
            }
            // Later readers, and blocks to be fetched ahead.
            std::thread::sleep(Duration::from_millis(100));
            for n in buffers..2 * buffers {
                rig.cache.prefetch(&file(n), 0..1, 4096);
            }
            let used = pool.used_bytes() * 100 / pool.limit_bytes();
            rig.under.stands_still.store(false, Ordering::SeqCst);
            assert!(used <= 84, "{used} % of the memory is under way");
        });
    }
}

#[test]
fn a_fill_that_somebody_else_gave_up_is_no_readers_error() {
    let rig = rig(None, 8);
    let file = object("v1", BLOCK);
    let fill = rig.shared.tier.try_fill(BlockId { object: file.id, index: 0 }, BLOCK as usize).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| check(&rig.cache, &file, 0, 10));
        // Whether or not the reader waits by now.
        std::thread::yield_now();
        drop(fill);
        reader.join().unwrap().unwrap();
    });
}

#[test]
fn many_readers_of_much_more_than_the_memory() {
    let rig = rig(None, 8);
    let files: Vec<ObjectRef> = (0..8)
        .map(|n| ObjectRef::new("mem://scripted", format!("f{n}").as_bytes(), Version::new("v"), 8 * BLOCK))
        .collect();
    std::thread::scope(|scope| {
        for reader in 0..64u64 {
            let (cache, files) = (&rig.cache, &files);
            scope.spawn(move || {
                for step in 0..16u64 {
                    let file = &files[((reader + step) % 8) as usize];
                    cache.prefetch(file, 0..8, 4096);
                    check(cache, file, ((reader * 7 + step * 3) % 8) * BLOCK + step, 3000).unwrap();
                }
            });
        }
    });
    assert!(rig.cache.pool().used_bytes() <= rig.cache.pool().limit_bytes());
}

#[test]
fn a_rule_given_while_a_block_is_written_holds_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let disk: Arc<OnceLock<Arc<FaultyDisk>>> = Arc::default();
    let decorated = Arc::clone(&disk);
    let rig = rig_with(Some(dir.path()), 8, move |config| {
        config.decorate = Some(Arc::new(move |_, io| Arc::clone(decorated.get_or_init(|| FaultyDisk::new(io))) as _));
        // No deadline of the disk's passes while the test holds the disk.
        (config.read_timeout, config.write_timeout) = (Duration::from_secs(600), Duration::from_secs(600));
    });
    let disk = Arc::clone(disk.get().unwrap());
    let file = object("v1", BLOCK);
    disk.set_fault(DiskFault::Hangs);
    check(&rig.cache, &file, 0, BLOCK as usize).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while disk.held() == 0 {
        assert!(Instant::now() < deadline, "the block is written");
        std::thread::yield_now();
    }
    let rule = FolderRule { url: "mem://scripted/dir".into(), pin: true, ..FolderRule::default() };
    rig.shared.set_folder_rules([rule.clone()]);
    assert_eq!(rig.cache.classify_blocks(&file, 0..1), 0, "it is not here yet");
    disk.set_fault(DiskFault::None);
    while rig.shared.bytes_under_rule(&rule) == 0 {
        assert!(Instant::now() < deadline + Duration::from_secs(60), "the block comes under its rule");
        std::thread::sleep(Duration::from_millis(5));
    }
    rig.cache.sync_index();
}

#[test]
fn a_job_brings_more_than_a_quota_keeps_and_what_went_again_is_said_when_it_is_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let disk: Arc<OnceLock<Arc<FaultyDisk>>> = Arc::default();
    let decorated = Arc::clone(&disk);
    let rig = rig_with(Some(dir.path()), 16, move |config| {
        config.decorate = Some(Arc::new(move |_, io| Arc::clone(decorated.get_or_init(|| FaultyDisk::new(io))) as _));
        (config.read_timeout, config.write_timeout) = (Duration::from_secs(600), Duration::from_secs(600));
    });
    let disk = Arc::clone(disk.get().unwrap());
    let rule =
        |quota| FolderRule { url: "mem://scripted/dir".into(), quota_bytes: Some(quota), ..FolderRule::default() };
    rig.shared.set_folder_rules([rule(2 * BLOCK)]);
    let held = || rig.shared.bytes_under_rule(&rule(0));
    let file = object("v1", 6 * BLOCK);
    disk.set_fault(DiskFault::Hangs);
    let done = std::thread::scope(|scope| {
        let job = scope.spawn(|| {
            let batch = Arc::new(WarmBatch::default());
            rig.cache.warm_blocks(&file, 0..6, false, &batch, 0);
            batch.wait_parts(1, Instant::now() + Duration::from_secs(120)).remove(0)
        });
        // Two are being written, and for the others nothing can go that is here.
        let deadline = Instant::now() + Duration::from_secs(60);
        while rig.stats.blockcache.limited_blocks.get() < 4 {
            assert!(Instant::now() < deadline, "all but two pass");
            std::thread::sleep(Duration::from_millis(5));
        }
        disk.set_fault(DiskFault::None);
        job.join().unwrap()
    });
    assert_eq!((done.error, done.fetched_bytes, held()), (None, 6 * BLOCK, 2 * BLOCK));
    // Reading back fetches nothing in the place of blocks that are still to be read back.
    let reads = || rig.under.reads.load(Ordering::SeqCst);
    let before = reads();
    let back: Vec<_> = (0..6).map(|index| rig.cache.bring_block(&file, index, true)).collect();
    assert_eq!(back.iter().filter(|one| one.as_ref().is_ok_and(|fetched| !fetched)).count(), 2, "{back:?}");
    let gone: Vec<_> = back.into_iter().filter_map(std::result::Result::err).collect();
    assert!(gone.iter().all(|error| error.kind() == ErrorKind::NotFound), "{gone:?}");
    assert!(gone[0].message().contains("mem://scripted/dir is kept by a rule, 512 KiB of it at most"), "{gone:?}");
    assert_eq!((reads(), held()), (before, 2 * BLOCK));
    // Blocks do not divide: less than one keeps nothing, is not fetched for nothing, and is read all the same.
    rig.shared.set_folder_rules([rule(BLOCK - 1)]);
    let error = rig.cache.bring_block(&object("v2", BLOCK), 0, false).unwrap_err();
    assert_eq!((error.kind(), reads()), (ErrorKind::NoSpace, before));
    assert!(error.message().contains("leaves 256 KiB to this node"), "{error}");
    check(&rig.cache, &object("v2", BLOCK), 0, BLOCK as usize).unwrap();
    assert_eq!(reads(), before + 1);
}

#[test]
fn a_file_of_more_blocks_than_there_are_numbers_is_refused() {
    let rig = rig(None, 8);
    let huge = object("v1", (u64::from(u32::MAX) + 2) * BLOCK);
    let error = rig.cache.read(&huge, (u64::from(u32::MAX) + 1) * BLOCK, &mut [0; 10]).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Io(EFBIG), "{error}");
    assert_eq!(rig.under.reads.load(Ordering::SeqCst), 0);
}
