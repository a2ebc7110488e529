//! The store on a real directory: what goes in comes out, across restarts, within the capacity.

use crate::common;
use common::*;
use spurline_mem::BufferPool;
use spurline_store::{CacheCapacity, GRANULE, IoMode, ReadOutcome, Store, UNCLASSIFIED};
use spurline_types::{ErrorKind, ObjectRef, Stats};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

#[test]
fn what_goes_in_comes_out_in_every_mode() {
    for mode in [IoMode::Dio, IoMode::PageCache, IoMode::Splice] {
        let dir = scratch_dir();
        let mut config = config(dir.path(), 64 << 20);
        config.io = mode;
        let (store, stats) = open(config);
        let obj = object(1, 3 * u64::from(BLOCK) + 12_345);
        assert_eq!(read(&store, &obj, 0), None);
        for index in 0..4 {
            assert!(put(&store, &obj, index));
            assert!(store.contains_block(&obj, index));
        }
        for index in 0..4 {
            read(&store, &obj, index).unwrap();
        }
        // Any range, aligned or not.
        let all = bytes(&obj, 1);
        for (start, end) in
            [(0, 1), (1, 2), (4095, 4097), (GRANULE - 1, GRANULE + 1), (100, all.len()), (70_000, 200_001)]
        {
            let mut dst = vec![0; end - start];
            assert!(store.read_copied(&obj, 1, start..end, &mut dst).unwrap());
            assert_eq!(dst, all[start..end]);
        }
        let map = store.blocks_of(&obj);
        assert_eq!((map.count(), map.blocks()), (4, 4));
        assert_eq!(stats.blockcache.blocks.get(), 4);
        assert_eq!(stats.blockcache.checksum_errors.get() + stats.blockcache.io_errors.get(), 0);
        // Ranges that can't be.
        for range in [5..5, 0..all.len() + 1] {
            let mut dst = vec![0; range.len()];
            assert_eq!(store.read_copied(&obj, 1, range, &mut dst).unwrap_err().kind(), ErrorKind::Invalid);
        }
        assert_eq!(store.put(&obj, 0, &[1, 2, 3]).unwrap_err().kind(), ErrorKind::Invalid);
        store.remove_object(&obj);
        assert_eq!(store.blocks_of(&obj).count(), 0);
        assert_eq!((store.used_bytes(), stats.blockcache.used_bytes.get()), (0, 0));
    }
}

#[test]
fn reads_go_straight_into_pool_buffers() {
    let dir = scratch_dir();
    let pool = BufferPool::new(4 << 20, 1 << 20).unwrap();
    let mut config = config(dir.path(), 64 << 20);
    config.pool = Some(Arc::clone(&pool));
    let (store, _) = open(config);
    let obj = object(2, u64::from(BLOCK) + 100_001);
    assert!(put(&store, &obj, 0) && put(&store, &obj, 1));
    let expected = [bytes(&obj, 0), bytes(&obj, 1)];
    for (index, range) in
        [(0, 0..BLOCK as usize), (0, GRANULE..3 * GRANULE), (1, 0..100_001), (1, GRANULE..100_001), (0, 5..77)]
    {
        let mut buf = pool.try_alloc(range.len());
        let outcome = store.read(&obj, index, range.clone(), &mut buf).unwrap();
        assert_eq!(outcome, ReadOutcome::Hit);
        assert_eq!(buf.unwrap()[..range.len()], expected[index as usize][range]);
    }
    let mut none = None::<spurline_mem::PoolBuf>;
    assert!(store.read(&obj, 0, 0..10, &mut none).is_err(), "a buffer that is not there");
    drop(store);
    assert_eq!(pool.used_bytes(), 0);
}

#[test]
fn a_restart_keeps_the_cache() {
    let dir = scratch_dir();
    let obj = object(3, 10 * u64::from(BLOCK));
    {
        let (store, _) = open(config(dir.path(), 64 << 20));
        (0..10).for_each(|i| assert!(put(&store, &obj, i)));
        store.remove_object(&object(99, 10));
        assert!(put(&store, &object(4, 10), 0));
        store.remove_object(&object(4, 10));
    }
    let (store, stats) = open(config(dir.path(), 64 << 20));
    (0..10).for_each(|i| read(&store, &obj, i).unwrap());
    assert!(!store.contains_block(&object(4, 10), 0));
    assert_eq!(stats.blockcache.blocks.get(), 10);
    assert_eq!(store.used_bytes(), 10 * u64::from(BLOCK));
}

#[test]
fn an_object_of_another_length_is_a_miss() {
    let dir = scratch_dir();
    let (store, _) = open(config(dir.path(), 64 << 20));
    let obj = object(5, 1000);
    assert!(put(&store, &obj, 0));
    let mut other = obj.clone();
    other.size = 999;
    assert!(!store.read_copied(&other, 0, 0..10, &mut [0; 10]).unwrap());
}

#[test]
fn a_smaller_capacity_evicts_and_a_larger_one_has_room() {
    let dir = scratch_dir();
    let block = u64::from(BLOCK);
    let (store, stats) = open(config(dir.path(), 40 * block));
    let first = object(31, 20 * block);
    (0..20).for_each(|index| assert!(put(&store, &first, index)));
    store.set_capacity(10 * block);
    assert_eq!((store.disks()[0].capacity, stats.blockcache.capacity_bytes.get()), (10 * block, 10 * block));
    eventually("the blocks above it are evicted", || store.used_bytes() <= 10 * block);
    store.set_capacity(40 * block);
    let second = object(32, 20 * block);
    (0..20).for_each(|index| assert!(put(&store, &second, index)));
    assert!(store.used_bytes() > 20 * block);
}

#[test]
fn capacity_holds_and_pins_stay() {
    let dir = scratch_dir();
    let (store, stats) = open(config(dir.path(), 20 * u64::from(BLOCK)));
    let pinned = object(6, 2 * u64::from(BLOCK) + 777);
    (0..3).for_each(|i| assert!(put(&store, &pinned, i)));
    let mut held = store.whole_file(&pinned).unwrap();
    for n in 0..100 {
        put(&store, &object(1000 + n, 2 * u64::from(BLOCK)), (n % 2) as u32);
        assert!(store.used_bytes() <= 20 * u64::from(BLOCK));
    }
    assert!(stats.blockcache.evictions.get() >= 80);
    (0..3).for_each(|i| read(&store, &pinned, i).unwrap());
    let mut all = Vec::new();
    held.file.read_to_end(&mut all).unwrap();
    let expected: Vec<u8> = (0..3).flat_map(|i| bytes(&pinned, i)).collect();
    assert!(all == expected);
    drop(held);
    for n in 0..200 {
        assert!(put(&store, &object(2000 + n, u64::from(BLOCK)), 0));
    }
    // Evicted blocks have freed their space.
    eventually("data files take no more than the capacity and a little", || {
        let taken: u64 = walk(dir.path()).iter().map(|m| std::os::unix::fs::MetadataExt::blocks(m) * 512).sum();
        taken <= 22 * u64::from(BLOCK)
    });
}

fn walk(dir: &std::path::Path) -> Vec<std::fs::Metadata> {
    let mut out = Vec::new();
    for folder in std::fs::read_dir(dir.join("data")).unwrap().flatten() {
        out.extend(std::fs::read_dir(folder.path()).unwrap().flatten().filter_map(|f| f.metadata().ok()));
    }
    out
}

#[test]
fn whole_files_need_every_block() {
    let dir = scratch_dir();
    let (store, _) = open(config(dir.path(), 64 << 20));
    let obj = object(7, 3 * u64::from(BLOCK));
    assert!(store.whole_file(&obj).is_none());
    assert!(put(&store, &obj, 0) && put(&store, &obj, 2));
    assert!(store.whole_file(&obj).is_none());
    assert!(put(&store, &obj, 1));
    assert!(store.whole_file_if_checked(&obj).is_none(), "nothing was read back yet");
    let held = store.whole_file(&obj).unwrap();
    assert_eq!(held.file.metadata().unwrap().len(), obj.size);
    assert!(store.whole_file_if_checked(&obj).is_some());
}

#[test]
fn ranges_for_sendfile_are_checked_and_pinned() {
    let dir = scratch_dir();
    let mut config = config(dir.path(), 64 << 20);
    config.io = IoMode::Splice;
    let (store, _) = open(config);
    let obj = object(8, 2 * u64::from(BLOCK));
    assert!(put(&store, &obj, 1));
    assert!(store.file_range(&obj, 1, &(0..100)).is_none(), "not checked yet");
    read(&store, &obj, 1).unwrap();
    let range = store.file_range(&obj, 1, &(50..100)).unwrap();
    let mut dst = [0; 50];
    std::os::unix::fs::FileExt::read_exact_at(range.file(), &mut dst, range.offset).unwrap();
    assert_eq!(dst, bytes(&obj, 1)[50..100]);
}

#[test]
fn no_disk_is_a_store_of_misses() {
    for (capacity, io) in [(CacheCapacity::None, IoMode::Dio), (CacheCapacity::All, IoMode::Disable)] {
        let dir = scratch_dir();
        let path = dir.path().join("never-made");
        let mut config = config(&path, 0);
        (config.capacity, config.io) = (capacity, io);
        let (store, _) = open(config);
        let obj = object(9, 100);
        assert!(!store.is_enabled());
        assert!(!put(&store, &obj, 0));
        assert_eq!(read(&store, &obj, 0), None);
        assert!(!path.exists());
    }
}

#[test]
fn more_than_the_disk_is_a_finding_with_the_number() {
    let dir = scratch_dir();
    let mut config = config(dir.path(), 1 << 60);
    config.free_space_ratio = 0.1;
    let (store, _) = open(config);
    let finding = &store.findings()[0];
    assert_eq!(finding.subject, "--cache-size");
    assert!(finding.evidence.contains("will be used"), "{}", finding.evidence);
    assert!(store.disks()[0].capacity < 1 << 60);
}

#[test]
fn several_disks_share_the_objects() {
    let dirs: Vec<_> = (0..4).map(|_| scratch_dir()).collect();
    let mut config = config(dirs[0].path(), 400 << 20);
    config.dirs = dirs.iter().map(|d| d.path().into()).collect();
    let place = |store: &Store| -> Vec<u64> { store.disks().iter().map(|d| d.blocks).collect() };
    {
        let (store, _) = open(config.clone());
        for n in 0..200 {
            assert!(put(&store, &object(n, 1000), 0));
        }
        let spread = place(&store);
        assert!(spread.iter().all(|n| (20..100).contains(n)), "{spread:?}");
        // Blocks of one small object lie together.
        let obj = object(1234, 4 * u64::from(BLOCK));
        (0..4).for_each(|i| assert!(put(&store, &obj, i)));
        assert!(store.whole_file(&obj).is_some());
    }
    let (store, _) = open(config);
    for n in 0..200 {
        read(&store, &object(n, 1000), 0).unwrap();
    }
}

#[test]
fn two_stores_on_one_directory_are_refused() {
    let dir = scratch_dir();
    let (_store, _) = open(config(dir.path(), 1 << 20));
    let error = Store::open(config(dir.path(), 1 << 20), Arc::new(Stats::default())).err().unwrap();
    assert!(error.message().contains("in use by the process with pid"), "{error}");
    assert!(error.message().contains("--cache-dir"), "{error}");
}

#[test]
fn a_hot_set_outlives_a_scan() {
    let dir = scratch_dir();
    let (store, _) = open(config(dir.path(), 40 * u64::from(BLOCK)));
    let hot: Vec<_> = (0..15).map(|n| object(n, u64::from(BLOCK))).collect();
    hot.iter().for_each(|o| assert!(put(&store, o, 0)));
    // A scan passes by before the hot set is used again, and again after: what was used stays.
    hot.iter().for_each(|o| store.touch_block(o, 0));
    std::thread::sleep(std::time::Duration::from_secs(5));
    hot.iter().for_each(|o| store.touch_block(o, 0));
    for n in 0..200 {
        put(&store, &object(10_000 + n, u64::from(BLOCK)), 0);
    }
    let kept = hot.iter().filter(|o| read(&store, o, 0).is_some()).count();
    assert!(kept >= 14, "{kept} of 15 are left");
}

#[test]
fn a_log_full_of_garbage_is_rewritten_under_writers() {
    let dir = fast_dir();
    let (store, _) = open(config(dir.path(), 64 << 20));
    let log = dir.path().join("index");
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..1500 {
                    let obj = object(thread << 32 | n, 10 + n);
                    assert!(put(store, &obj, 0));
                    // Every hundredth stays.
                    if !n.is_multiple_of(100) {
                        store.remove_object(&obj);
                    }
                }
            });
        }
    });
    // 8,955 records of 32 to 40 bytes were appended; those of 45 blocks and 4096 of garbage may stay.
    eventually("the log shrinks", || std::fs::metadata(&log).unwrap().len() < 4300 * 40);
    drop(store);
    let (store, stats) = open(config(dir.path(), 64 << 20));
    assert_eq!(stats.blockcache.blocks.get(), 45);
    for (thread, n) in (0..3u64).flat_map(|t| (0..15u64).map(move |n| (t, n * 100))) {
        read(&store, &object(thread << 32 | n, 10 + n), 0).unwrap();
    }
}

#[test]
fn a_million_blocks_open_in_seconds() {
    let dir = fast_dir();
    spurline_store::synthesise(dir.path(), 4 << 20, 250_000, 4, 60_000).unwrap();
    let began = std::time::Instant::now();
    let mut config = config(dir.path(), 1 << 50);
    config.block_size = 4 << 20;
    let (store, _) = open(config);
    println!("1,000,000 blocks opened in {:.2} s (this build)", began.elapsed().as_secs_f64());
    assert_eq!(store.disks()[0].blocks, 1_000_000);
}

/// The logs are read side by side: what one disk's log brings and takes back must not hide what the other one has.
#[test]
fn a_block_that_moved_to_another_disk_is_found_whichever_log_is_read_first() {
    let dirs = [fast_dir(), fast_dir()];
    let objects: Vec<_> = (0..2000).map(|n| object(n, 100)).collect();
    for (n, dir) in dirs.iter().enumerate() {
        let (store, _) = open(config(dir.path(), 64 << 20));
        objects.iter().for_each(|o| assert!(put(&store, o, 0)));
        if n == 0 {
            objects.iter().for_each(|o| store.remove_object(o));
        }
    }
    for order in [[0, 1], [1, 0]].iter().cycle().take(10) {
        let mut both = config(dirs[0].path(), 64 << 20);
        both.dirs = order.iter().map(|n| dirs[*n].path().into()).collect();
        let (store, stats) = open(both);
        let missing = objects.iter().filter(|o| !store.contains_block(o, 0)).count();
        assert_eq!((missing, stats.blockcache.blocks.get()), (0, 2000));
        read(&store, &objects[7], 0).unwrap();
    }
}

#[test]
fn a_block_on_two_disks_is_counted_once_and_forgotten_by_one() {
    let dirs = [fast_dir(), fast_dir()];
    let objects: Vec<_> = (0..50).map(|n| object(n, 5000)).collect();
    for dir in &dirs {
        let (store, _) = open(config(dir.path(), 64 << 20));
        objects.iter().for_each(|o| assert!(put(&store, o, 0)));
    }
    let mut both = config(dirs[0].path(), 64 << 20);
    both.dirs = dirs.iter().map(|dir| dir.path().into()).collect();
    let files = || -> usize {
        let folders = dirs.iter().flat_map(|dir| std::fs::read_dir(dir.path().join("data")).unwrap().flatten());
        folders.map(|folder| std::fs::read_dir(folder.path()).unwrap().count()).sum()
    };
    let (store, stats) = open(both.clone());
    assert_eq!(stats.blockcache.blocks.get(), 50);
    eventually("each is on one disk", || files() == 50);
    objects.iter().for_each(|o| read(&store, o, 0).unwrap());
    drop(store);
    let (store, stats) = open(both);
    assert_eq!(stats.blockcache.blocks.get(), 50);
    objects.iter().for_each(|o| read(&store, o, 0).unwrap());
}

#[test]
fn blocks_of_zeros_take_a_page_on_disk_and_no_room_from_others() {
    let dir = scratch_dir();
    let obj = object(1, 40 * u64::from(BLOCK) + 70_000);
    let is_hole = |index: u32| index % 10 != 3;
    let write = |store: &Store, index: u32| {
        let len = obj.block_len(index, u64::from(BLOCK));
        let bytes = if is_hole(index) { vec![0; len] } else { vec![7; len] };
        assert!(store.put(&obj, index, &bytes).unwrap(), "block {index}");
    };
    let check = |store: &Store| {
        for index in 0..41 {
            let len = obj.block_len(index, u64::from(BLOCK));
            let mut bytes = vec![1; len];
            assert!(store.read_copied(&obj, index, 0..len, &mut bytes).unwrap(), "block {index}");
            assert!(bytes.iter().all(|b| *b == if is_hole(index) { 0 } else { 7 }), "block {index}");
        }
    };
    // 41 blocks in room for ten, of which four are not zeros.
    let (store, stats) = open(config(dir.path(), 10 * u64::from(BLOCK)));
    (0..41).for_each(|index| write(&store, index));
    let used = 4 * u64::from(BLOCK) + 37 * 4096;
    assert_eq!(
        (store.used_bytes(), stats.blockcache.used_bytes.get(), stats.blockcache.evictions.get()),
        (used, used, 0)
    );
    check(&store);
    drop(store);
    let (store, stats) = open(config(dir.path(), 10 * u64::from(BLOCK)));
    assert_eq!(store.used_bytes(), used);
    check(&store);
    let file = store.whole_file(&obj).unwrap().file;
    assert!(file.metadata().unwrap().len() == obj.size && disk_bytes(&file) <= used + (64 << 10));
    // In place of other bytes, as after an eviction whose space could not be freed.
    store.remove_blocks(&obj, 0..41, true);
    eventually("they are gone", || store.used_bytes() == 0);
    assert_eq!((stats.blockcache.checksum_errors.get(), stats.blockcache.blocks.get()), (0, 0));
    (0..41).for_each(|index| write(&store, index));
    check(&store);
}

fn disk_bytes(file: &std::fs::File) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    file.metadata().unwrap().blocks() * 512
}

/// A file without a name in a cache directory, with the bytes of an object.
fn unnamed_file(dir: &Path, obj: &ObjectRef, blocks: u32) -> File {
    let unnamed = File::options().read(true).write(true).custom_flags(libc::O_TMPFILE).open(dir).unwrap();
    for index in 0..blocks {
        unnamed.write_all_at(&bytes(obj, index), u64::from(index) * u64::from(BLOCK)).unwrap();
    }
    unnamed
}

#[test]
fn a_local_file_becomes_the_file_of_an_object() {
    for mode in [IoMode::Dio, IoMode::PageCache] {
        let dir = scratch_dir();
        let mut config = config(dir.path(), 64 << 20);
        config.io = mode;
        let (store, stats) = open(config.clone());
        let obj = object(1, 3 * u64::from(BLOCK) + 12_345);
        let unnamed = unnamed_file(dir.path(), &obj, 4);
        let adoption = store.begin_adoption(&obj, &unnamed).unwrap();
        assert!(!put(&store, &obj, 0) && store.begin_adoption(&obj, &unnamed).is_none(), "it is claimed");
        adoption.finish(&unnamed, UNCLASSIFIED);
        (0..4).for_each(|index| read(&store, &obj, index).unwrap());
        assert_eq!((stats.blockcache.blocks.get(), stats.blockcache.write_bytes.get()), (4, 0));
        let mut all = Vec::new();
        store.whole_file(&obj).unwrap().file.read_to_end(&mut all).unwrap();
        assert_eq!(all.len() as u64, obj.size);
        assert!(store.begin_adoption(&obj, &unnamed).is_none(), "it has blocks");
        // An adoption that is dropped leaves the blocks to others.
        let other = object(2, u64::from(BLOCK));
        let unfinished = unnamed_file(dir.path(), &other, 1);
        drop(store.begin_adoption(&other, &unfinished).unwrap());
        assert!(put(&store, &other, 0));
        assert!(store.begin_adoption(&object(3, 5), &unfinished).is_none(), "another length");
        drop(store);
        let (store, _) = open(config);
        (0..4).for_each(|index| read(&store, &obj, index).unwrap());
        store.remove_object(&obj);
        assert_eq!(store.blocks_of(&obj).count(), 0);
    }
}

#[test]
fn a_local_file_that_is_longer_than_the_cache_is_kept_in_part() {
    let dir = scratch_dir();
    let (store, _) = open(config(dir.path(), 6 * u64::from(BLOCK)));
    let obj = object(1, 9 * u64::from(BLOCK));
    let unnamed = unnamed_file(dir.path(), &obj, 9);
    store.begin_adoption(&obj, &unnamed).unwrap().finish(&unnamed, UNCLASSIFIED);
    eventually("the cache is as long as it may be", || store.used_bytes() <= 6 * u64::from(BLOCK));
    let held = (0..9).filter(|index| read(&store, &obj, *index).is_some()).count();
    assert!((1..=6).contains(&held), "{held}");
    eventually("the space of the others is free", || {
        unnamed.metadata().unwrap().blocks() * 512 <= 7 * u64::from(BLOCK)
    });
}
