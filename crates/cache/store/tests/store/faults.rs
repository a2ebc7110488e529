//! Disks that fail, hang, fill up, lose or change bytes: readers get a miss, never wrong bytes, and never wait long;
//! the disk's state shows it, and it comes back by itself.

use crate::common;
use common::*;
use spurline_mem::BufferPool;
use spurline_store::{
    BlockClass, DiskFault, DiskSpace, DiskState, FaultyDisk, PutOutcome, ReadOutcome, Store, UNCLASSIFIED,
};
use spurline_types::Stats;
use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn flipped_bits_on_disk_are_a_miss_and_heal() {
    let dir = scratch_dir();
    let obj = object(1, 3 * u64::from(BLOCK) + 9);
    {
        let (store, _) = open(config(dir.path(), 64 << 20));
        (0..4).for_each(|i| assert!(put(&store, &obj, i)));
    }
    let file = std::fs::OpenOptions::new().write(true).read(true).open(&data_files(dir.path())[0]).unwrap();
    for at in [70_000u64, 3 * u64::from(BLOCK) + 8] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 4], at).unwrap();
    }
    let (store, stats) = open(config(dir.path(), 64 << 20));
    // The granules beside the wrong one are right still.
    assert!(store.read_copied(&obj, 0, 0..65_536, &mut vec![0; 65_536]).unwrap());
    assert_eq!(read(&store, &obj, 0), None);
    read(&store, &obj, 1).unwrap();
    read(&store, &obj, 2).unwrap();
    assert_eq!(read(&store, &obj, 3), None);
    assert_eq!(stats.blockcache.checksum_errors.get(), 2);
    assert_eq!(state(&store), DiskState::Normal);
    assert!(store.whole_file(&obj).is_none());
    eventually("the block can be written again", || put(&store, &obj, 0) && put(&store, &obj, 3));
    (0..4).for_each(|i| read(&store, &obj, i).unwrap());
    assert!(store.whole_file(&obj).is_some());
}

#[test]
fn a_whole_file_is_checked_before_it_is_handed_out() {
    let dir = scratch_dir();
    let obj = object(2, 2 * u64::from(BLOCK));
    let (store, stats) = open(config(dir.path(), 64 << 20));
    (0..2).for_each(|i| assert!(put(&store, &obj, i)));
    let file = std::fs::OpenOptions::new().write(true).open(&data_files(dir.path())[0]).unwrap();
    file.write_all_at(b"not what it was", u64::from(BLOCK) + 100_000).unwrap();
    file.sync_all().unwrap();
    assert!(store.whole_file(&obj).is_none());
    assert_eq!(stats.blockcache.checksum_errors.get(), 1);
}

#[test]
fn nobody_writes_to_a_whole_file_that_is_handed_out() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(1, 2 * u64::from(BLOCK) + 9);
    (0..3).for_each(|i| assert!(put(&store, &obj, i)));
    let held = store.whole_file(&obj).unwrap();
    disk.set_fault(DiskFault::Corrupts);
    assert_eq!(read(&store, &obj, 2), None);
    disk.set_fault(DiskFault::None);
    eventually("it is dropped", || store.disks()[0].blocks == 2);
    assert!(!put(&store, &obj, 2));
    assert_eq!(held.file.metadata().unwrap().len(), obj.size);
    drop(held);
    eventually("it can be written again", || put(&store, &obj, 2));
    assert_eq!(store.whole_file(&obj).unwrap().file.metadata().unwrap().len(), obj.size);
}

#[test]
fn missing_and_cut_files_are_a_miss() {
    let dir = scratch_dir();
    let (a, b) = (object(3, 100_000), object(4, 100_000));
    {
        let (store, _) = open(config(dir.path(), 64 << 20));
        assert!(put(&store, &a, 0) && put(&store, &b, 0));
    }
    let files = data_files(dir.path());
    std::fs::remove_file(&files[0]).unwrap();
    std::fs::OpenOptions::new().write(true).open(&files[1]).unwrap().set_len(8192).unwrap();
    let (store, stats) = open(config(dir.path(), 64 << 20));
    assert_eq!((read(&store, &a, 0), read(&store, &b, 0)), (None, None));
    let counters = &stats.blockcache;
    assert_eq!((counters.missing_blocks.get(), counters.checksum_errors.get()), (2, 0));
    assert_eq!((counters.io_errors.get(), state(&store)), (0, DiskState::Normal));
    eventually("both can be written again", || put(&store, &a, 0) && put(&store, &b, 0));
    read(&store, &a, 0).unwrap();
    read(&store, &b, 0).unwrap();
}

#[test]
fn files_removed_under_a_running_store_are_missing_and_no_fault_of_the_disk() {
    let dir = scratch_dir();
    let obj = object(1, 3 * u64::from(BLOCK));
    let remove_files = || data_files(dir.path()).iter().for_each(|file| std::fs::remove_file(file).unwrap());
    let missing = |store: &Store, stats: &Stats| {
        let counters = &stats.blockcache;
        assert_eq!((counters.checksum_errors.get(), counters.io_errors.get()), (0, 0));
        assert_eq!(state(store), DiskState::Normal);
        counters.missing_blocks.get()
    };
    {
        let (store, stats) = open(config(dir.path(), 64 << 20));
        (0..3).for_each(|i| assert!(put(&store, &obj, i)));
        assert!(store.whole_file(&obj).is_some());
        remove_files();
        for _ in 0..4 {
            assert!(store.whole_file(&obj).is_none());
        }
        assert_eq!(missing(&store, &stats), 3);
        (0..2).for_each(|i| eventually("it can be written again", || put(&store, &obj, i)));
    }
    remove_files();
    // A write beside the blocks of a removed file: they are not read from holes of the new one.
    let (store, stats) = open(config(dir.path(), 64 << 20));
    assert!(put(&store, &obj, 2));
    assert_eq!((read(&store, &obj, 0), read(&store, &obj, 1)), (None, None));
    read(&store, &obj, 2).unwrap();
    assert_eq!(missing(&store, &stats), 2);
}

#[test]
fn a_disk_that_corrupts_or_tears_serves_nothing_wrong() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(5, 8 * u64::from(BLOCK));
    assert!(put(&store, &obj, 0));
    disk.set_fault(DiskFault::Corrupts);
    assert_eq!(read(&store, &obj, 0), None);
    disk.set_fault(DiskFault::None);
    assert_eq!(stats.blockcache.checksum_errors.get(), 1);
    disk.set_fault(DiskFault::Tears);
    // The data of this block is cut in half without a word, and the record fails half-way.
    let kept = put(&store, &obj, 1);
    disk.set_fault(DiskFault::None);
    assert!(!kept);
    assert_eq!(read(&store, &obj, 1), None);
    // What comes after the torn record is found after a restart. (Background work may have met the fault as well, and
    // the disk then is back in use only after a probe.)
    eventually("the disk takes blocks again", || put(&store, &obj, 2));
    drop(store);
    let (store, _) = open(common::config(dir.path(), 64 << 20));
    read(&store, &obj, 2).unwrap();
    assert_eq!(read(&store, &obj, 1), None);
}

#[test]
fn errors_make_a_disk_unstable_then_down_then_normal_again() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(6, 8 * u64::from(BLOCK));
    (0..8).for_each(|i| assert!(put(&store, &obj, i)));
    disk.set_fault(DiskFault::Errors);
    eventually("three errors make it unstable", || {
        (0..8).for_each(|i| assert_eq!(read(&store, &obj, i), None));
        state(&store) != DiskState::Normal
    });
    assert!(stats.blockcache.io_errors.get() >= 3);
    assert!(store.disks()[0].reason.contains("Input/output error"), "{}", store.disks()[0].reason);
    let asked = disk.reads();
    assert_eq!(read(&store, &obj, 1), None);
    assert!(!put(&store, &object(7, 10), 0));
    assert!(!store.contains_block(&obj, 1));
    assert_eq!(store.blocks_of(&obj).count(), 0);
    assert!(disk.reads() <= asked + 2, "reads skip it (probes aside)");
    eventually("down after a while", || state(&store) == DiskState::Down);
    eventually("the gauge follows", || {
        stats.blockcache.disks_down.get() == 1 && stats.blockcache.disks_normal.get() == 0
    });
    disk.set_fault(DiskFault::None);
    eventually("normal again", || state(&store) == DiskState::Normal);
    let lost = (0..8).filter(|i| read(&store, &obj, *i).is_none()).count();
    assert!(lost <= 2, "those by whose errors it was found out, and no more: {lost}");
    eventually("the gauge follows", || stats.blockcache.disks_normal.get() == 1);
}

#[test]
fn a_block_in_a_bad_sector_is_dropped_and_heals() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(1, 4 * u64::from(BLOCK));
    (0..4).for_each(|i| assert!(put(&store, &obj, i)));
    disk.set_fault(DiskFault::BadSector(u64::from(BLOCK) + 70_000));
    assert_eq!(read(&store, &obj, 1), None);
    assert!(!store.contains_block(&obj, 1));
    for i in [0, 2, 3] {
        read(&store, &obj, i).unwrap();
    }
    eventually("it is written anew, which heals the sector", || put(&store, &obj, 1));
    (0..4).for_each(|i| read(&store, &obj, i).unwrap());
    let counters = &stats.blockcache;
    assert_eq!((state(&store), counters.io_errors.get(), counters.checksum_errors.get()), (DiskState::Normal, 1, 0));
}

#[test]
fn a_block_that_puts_its_disk_out_of_use_twice_is_dropped() {
    let dir = scratch_dir();
    let (mut config, disks) = faulty(config(dir.path(), 64 << 20));
    // The other read here is the probe, which is tried again.
    config.read_timeout = Duration::from_secs(1);
    config.write_timeout = Duration::from_secs(60);
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(1, 4 * u64::from(BLOCK));
    (0..4).for_each(|i| assert!(put(&store, &obj, i)));
    disk.set_fault(DiskFault::SlowSector(u64::from(BLOCK) + 70_000));
    for once in [true, false] {
        assert_eq!(read(&store, &obj, 1), None);
        eventually("normal again", || state(&store) == DiskState::Normal);
        assert_eq!(store.contains_block(&obj, 1), once);
    }
    eventually("it is written anew, which heals the sector", || put(&store, &obj, 1));
    read(&store, &obj, 1).unwrap();
}

#[test]
fn to_be_short_of_descriptors_is_no_fault_of_the_disk() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    // Files of this length are not kept open.
    (0..8).for_each(|n| assert!(put(&store, &object(n, 5000), 0)));
    disk.set_fault(DiskFault::NoDescriptors);
    for n in 0..8 {
        assert_eq!(read(&store, &object(n, 5000), 0), None);
        assert!(!put(&store, &object(100 + n, 5000), 0));
    }
    assert_eq!((state(&store), stats.blockcache.io_errors.get()), (DiskState::Normal, 0));
    disk.set_fault(DiskFault::None);
    (0..8).for_each(|n| read(&store, &object(n, 5000), 0).unwrap());
}

#[test]
fn a_hung_disk_holds_nobody_and_its_late_answer_hurts_nobody() {
    let dir = scratch_dir();
    let pool = BufferPool::new(4 << 20, 1 << 20).unwrap();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(8, 4 * u64::from(BLOCK));
    (0..4).for_each(|i| assert!(put(&store, &obj, i)));
    disk.set_fault(DiskFault::Hangs);
    let mut buf = pool.try_alloc(BLOCK as usize);
    let outcome = store.read(&obj, 0, 0..BLOCK as usize, &mut buf).unwrap();
    assert_eq!(outcome, ReadOutcome::Lost);
    assert!(buf.is_none(), "the buffer stays with the disk");
    assert_eq!(pool.used_bytes(), u64::from(BLOCK));
    assert_ne!(state(&store), DiskState::Normal);
    // Later reads skip it at once.
    for _ in 0..100 {
        assert!(!store.read_copied(&obj, 1, 0..10, &mut [0; 10]).unwrap());
    }
    assert!(!put(&store, &object(9, 100), 0));
    assert!(disk.reads() <= 2, "the first read, and a probe at most: no other read waited");
    assert!(stats.blockcache.io_errors.get() >= 1);
    eventually("the buffer comes back after the late answer", || pool.used_bytes() == 0);
    disk.set_fault(DiskFault::None);
    eventually("normal again", || state(&store) == DiskState::Normal);
    (0..4).for_each(|i| read(&store, &obj, i).unwrap());
    // A thread's own scratch is replaced the same way.
    disk.set_fault(DiskFault::Hangs);
    assert_eq!(read(&store, &obj, 2), None);
    disk.set_fault(DiskFault::None);
    eventually("normal again", || state(&store) == DiskState::Normal);
    std::thread::sleep(Duration::from_millis(50));
    (0..4).for_each(|i| read(&store, &obj, i).unwrap());
}

#[test]
fn other_disks_take_over_for_one_that_hangs() {
    let dirs = [scratch_dir(), scratch_dir()];
    let mut base = config(dirs[0].path(), 64 << 20);
    base.dirs = dirs.iter().map(|d| d.path().into()).collect();
    let (config, disks) = faulty(base.clone());
    let (store, _) = open(config);
    let objects: Vec<_> = (0..40).map(|n| object(n, 5000)).collect();
    objects.iter().for_each(|o| assert!(put(&store, o, 0)));
    let bad = Arc::clone(&disks.lock().iter().find(|(path, _)| path == dirs[0].path()).unwrap().1);
    bad.set_fault(DiskFault::Hangs);
    let lost: Vec<_> = objects.iter().filter(|o| read(&store, o, 0).is_none()).collect();
    assert!(!lost.is_empty() && lost.len() < 40, "{} of 40", lost.len());
    for obj in &objects {
        assert!(store.contains_block(obj, 0) || put(&store, obj, 0), "it goes to the other disk");
        read(&store, obj, 0).unwrap();
    }
    bad.set_fault(DiskFault::None);
    eventually("normal again", || store.disks().iter().all(|d| d.state == DiskState::Normal));
    objects.iter().for_each(|o| read(&store, o, 0).unwrap());
    assert_eq!(store.disks().iter().map(|d| d.blocks).sum::<u64>(), 40);
    eventually("the first disk forgets what moved", || {
        data_files(dirs[0].path()).len() + data_files(dirs[1].path()).len() == 40
    });
    drop(store);
    let (store, _) = open(base);
    objects.iter().for_each(|o| read(&store, o, 0).unwrap());
}

/// Runs `work` on a thread of its own and gives what came of it, which must come by itself.
fn by_itself<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (told, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || told.send(work()));
    hears.recv_timeout(Duration::from_secs(60)).unwrap_or_else(|_| panic!("a hung disk blocks a caller that {what}"))
}

#[test]
fn a_hung_disk_holds_nobody_who_writes() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    disk.set_fault(DiskFault::Hangs);
    // The first to find out; what it began is put in order once the disk is back.
    let writer = Arc::clone(&store);
    assert!(!by_itself("writes", move || put(&writer, &object(20, 5000), 0)));
    disk.set_fault(DiskFault::None);
    eventually("normal again", || state(&store) == DiskState::Normal && put(&store, &object(20, 5000), 0));
    read(&store, &object(20, 5000), 0).unwrap();
}

#[test]
fn a_hung_disk_holds_nobody_who_opens_a_whole_file() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(1, u64::from(BLOCK) + 9);
    for i in 0..2 {
        assert!(put(&store, &obj, i));
        read(&store, &obj, i).unwrap();
    }
    disk.set_fault(DiskFault::Hangs);
    let (opener, of) = (Arc::clone(&store), obj.clone());
    assert!(by_itself("opens a whole file", move || opener.whole_file_if_checked(&of).is_none()));
    assert_ne!(state(&store), DiskState::Normal);
    disk.set_fault(DiskFault::None);
    eventually("it is handed out again", || store.whole_file(&obj).is_some());
}

#[test]
fn a_hung_disk_has_no_more_than_its_part_of_the_memory() {
    let dir = fast_dir();
    let (mut config, disks) = faulty(config(dir.path(), 64 << 20));
    (config.read_timeout, config.write_timeout) = (Duration::from_secs(1), Duration::from_secs(600));
    // A quarter of it is one block.
    config.pool = Some(BufferPool::new(4 * u64::from(BLOCK), BLOCK as usize).unwrap());
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    disk.set_fault(DiskFault::Hangs);
    let obj = object(1, 8 * u64::from(BLOCK));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| put(&store, &obj, 0));
        eventually("one is being written", || disk.held() == 1);
        (1..8).for_each(|i| assert!(!put(&store, &obj, i), "it is let be"));
        assert_eq!((disk.held(), stats.blockcache.write_skipped.get()), (1, 7));
        disk.set_fault(DiskFault::None);
        assert!(first.join().unwrap());
    });
    eventually("the disk takes blocks again", || put(&store, &obj, 1));
    assert_eq!((state(&store), stats.blockcache.io_errors.get()), (DiskState::Normal, 0));
}

#[test]
fn a_log_that_takes_nothing_is_found_out_by_those_who_wait() {
    let dir = fast_dir();
    let (mut config, disks) = faulty(config(dir.path(), 64 << 20));
    (config.read_timeout, config.write_timeout) = (Duration::from_secs(1), Duration::from_secs(2));
    config.pool = Some(BufferPool::new(4 * u64::from(BLOCK), BLOCK as usize).unwrap());
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(1, 8 * u64::from(BLOCK));
    disk.set_fault(DiskFault::StuckLog);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| put(&store, &obj, 0));
        eventually("its record is being written", || disk.held() == 1);
        eventually("no turn comes", || {
            let _ = put(&store, &obj, 1);
            state(&store) != DiskState::Normal
        });
        disk.set_fault(DiskFault::None);
        let _ = first.join().unwrap();
    });
    eventually("normal again", || state(&store) == DiskState::Normal && put(&store, &obj, 1));
}

#[test]
fn a_disk_that_gives_no_space_back_holds_nobody() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 8 * u64::from(BLOCK)));
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    disk.set_fault(DiskFault::Sticks);
    // More than there is room for: a writer must make some.
    let writer = Arc::clone(&store);
    by_itself("writes", move || (0..40).filter(|n| put(&writer, &object(*n, u64::from(BLOCK)), 0)).count());
    let (eraser, before) = (Arc::clone(&store), store.disks()[0].blocks);
    by_itself("frees", move || (0..40).for_each(|n| eraser.remove_object(&object(n, u64::from(BLOCK)))));
    assert!((0..40).all(|n| !store.contains_block(&object(n, u64::from(BLOCK)), 0)));
    assert!(before > 0 && store.disks()[0].blocks > 0, "their space is not free yet");
    disk.set_fault(DiskFault::None);
    eventually("all goes once the disk answers", || store.disks()[0].blocks == 0 && data_files(dir.path()).is_empty());
    assert_eq!(store.used_bytes(), 0);
    eventually("and it takes blocks again", || put(&store, &object(50, 100), 0));
}

/// Two disks, the first of which fails on demand; forty objects on both.
fn two_disks(dirs: &[tempfile::TempDir; 2], class: u64) -> (Arc<Store>, Arc<FaultyDisk>) {
    let mut base = config(dirs[0].path(), 64 << 20);
    base.dirs = dirs.iter().map(|d| d.path().into()).collect();
    let (config, disks) = faulty(base);
    let (store, _) = open(config);
    store.set_classes(BTreeMap::from([(1, BlockClass::default())]));
    for n in 0..40 {
        let obj = object(n, 5000);
        assert_eq!(store.put_classed(&obj, 0, &bytes(&obj, 0), class).unwrap(), PutOutcome::Stored);
    }
    let bad = Arc::clone(&disks.lock().iter().find(|(path, _)| path == dirs[0].path()).unwrap().1);
    (store, bad)
}

/// Makes the first of two disks fail until it is not in use; the objects that are on it.
fn break_first(store: &Store, bad: &FaultyDisk) -> Vec<u64> {
    bad.set_fault(DiskFault::Errors);
    eventually("errors put it out of use", || {
        let _ = (0..40).filter(|n| read(store, &object(*n, 5000), 0).is_some()).count();
        store.disks()[0].state != DiskState::Normal
    });
    let lost: Vec<u64> = (0..40).filter(|n| !store.contains_block(&object(*n, 5000), 0)).collect();
    assert!(!lost.is_empty() && lost.len() < 40, "{} of 40", lost.len());
    lost
}

#[test]
fn what_its_time_took_off_a_disk_out_of_use_does_not_come_back_with_it() {
    let dirs = [scratch_dir(), scratch_dir()];
    let (store, bad) = two_disks(&dirs, 1);
    break_first(&store, &bad);
    store.set_classes(BTreeMap::from([(1, BlockClass { ttl: Some(Duration::ZERO), ..BlockClass::default() })]));
    eventually("their time is up", || store.class_used(1) == 0);
    bad.set_fault(DiskFault::None);
    eventually("normal again", || store.disks()[0].state == DiskState::Normal);
    assert!((0..40).all(|n| read(&store, &object(n, 5000), 0).is_none()));
    eventually("all has gone", || store.disks().iter().all(|disk| disk.blocks == 0));
}

#[test]
fn what_a_disk_out_of_use_is_to_forget_comes_to_another() {
    let dirs = [scratch_dir(), scratch_dir()];
    let (store, bad) = two_disks(&dirs, 0);
    let lost = break_first(&store, &bad);
    for n in &lost {
        store.remove_object(&object(*n, 5000));
        assert!(put(&store, &object(*n, 5000), 0), "the other disk takes it");
    }
    bad.set_fault(DiskFault::None);
    eventually("normal again", || store.disks()[0].state == DiskState::Normal);
    eventually("the first disk has forgotten them", || {
        data_files(dirs[0].path()).is_empty() && store.disks()[0].blocks == 0
    });
    (0..40).for_each(|n| read(&store, &object(n, 5000), 0).unwrap());
    drop(store);
    let mut base = config(dirs[0].path(), 64 << 20);
    base.dirs = dirs.iter().map(|d| d.path().into()).collect();
    let (store, _) = open(base);
    (0..40).for_each(|n| read(&store, &object(n, 5000), 0).unwrap());
}

/// Bytes that the data files in a directory take.
fn taken(dir: &Path) -> u64 {
    data_files(dir).iter().filter_map(|file| file.metadata().ok()).map(|file| file.blocks() * 512).sum()
}

#[test]
fn a_disk_that_was_out_of_use_gives_back_the_space_of_what_moved() {
    let dirs = [fast_dir(), fast_dir()];
    let mut base = config(dirs[0].path(), 64 << 20);
    base.dirs = dirs.iter().map(|d| d.path().into()).collect();
    let (config, disks) = faulty(base);
    let (store, _) = open(config);
    let bad = Arc::clone(&disks.lock().iter().find(|(path, _)| path == dirs[0].path()).unwrap().1);
    // The first object that the first disk draws.
    let of_eight = |n| object(n, 8 * u64::from(BLOCK));
    let obj = (0..100).map(of_eight).find(|obj| put(&store, obj, 0) && store.disks()[0].blocks == 1).unwrap();
    (1..8).for_each(|i| assert!(put(&store, &obj, i)));
    bad.set_fault(DiskFault::Errors);
    eventually("errors put it out of use", || {
        (0..8).for_each(|i| assert_eq!(read(&store, &obj, i), None));
        store.disks()[0].state != DiskState::Normal
    });
    (0..4).for_each(|i| assert!(put(&store, &obj, i), "the other disk takes it"));
    bad.set_fault(DiskFault::None);
    eventually("normal again", || store.disks()[0].state == DiskState::Normal);
    eventually("only what it holds takes space", || {
        let used = store.disks()[0].used;
        used <= 4 * u64::from(BLOCK) && taken(dirs[0].path()) <= used
    });
    (0..4).for_each(|i| read(&store, &obj, i).unwrap());
}

#[test]
fn what_a_write_began_and_what_was_held_open_is_given_back() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(1, 4 * u64::from(BLOCK));
    let fits = || taken(dir.path()) <= store.used_bytes();
    assert!(put(&store, &obj, 0));
    disk.set_fault(DiskFault::FillsUp);
    assert!(!put(&store, &obj, 1));
    eventually("the half that was written goes", fits);
    disk.set_fault(DiskFault::None);
    // Also for the one that went in the place of what was refused.
    eventually("room again", || (0..4).all(|i| put(&store, &obj, i)) && (0..4).all(|i| store.contains_block(&obj, i)));
    let held = store.whole_file(&obj).unwrap();
    store.remove_blocks(&obj, 1..3, true);
    assert_eq!(store.used_bytes(), 2 * u64::from(BLOCK));
    assert!(!fits(), "it may be read still");
    drop(held);
    eventually("what is not held open any more goes", fits);
    read(&store, &obj, 0).unwrap();
    read(&store, &obj, 3).unwrap();
}

#[test]
fn a_log_that_finds_no_room_is_no_fault_of_the_disk() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    (0..8).for_each(|n| assert!(put(&store, &object(n, 100), 0)));
    disk.set_fault(DiskFault::Full);
    // Each of them is a removal that can't be logged, and a file that goes all the same.
    (0..8).for_each(|n| store.remove_object(&object(n, 100)));
    assert_eq!((state(&store), stats.blockcache.io_errors.get()), (DiskState::Normal, 0));
    assert_eq!(store.disks()[0].blocks, 0);
    disk.set_fault(DiskFault::None);
    eventually("room again", || put(&store, &object(9, 100), 0));
}

#[test]
fn a_full_disk_is_no_error_for_readers() {
    let dir = scratch_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let obj = object(10, 4 * u64::from(BLOCK));
    assert!(put(&store, &obj, 0));
    disk.set_fault(DiskFault::Full);
    assert!(!put(&store, &obj, 1));
    assert_eq!((state(&store), stats.blockcache.io_errors.get()), (DiskState::Normal, 0));
    assert!(stats.blockcache.write_skipped.get() >= 1);
    disk.set_fault(DiskFault::None);
    // What the disk takes while its limit is still that of the refusal is evicted again.
    eventually("room again", || put(&store, &obj, 2) && read(&store, &obj, 2).is_some());
}

#[test]
fn a_disk_that_had_no_room_at_the_start_takes_blocks_once_it_has() {
    let dir = fast_dir();
    let capacity = 8 * u64::from(BLOCK);
    let full = DiskSpace { total: 1 << 30, free: 0 };
    let (config, disks) = faulty_of(config(dir.path(), capacity), Some(full));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    assert!(store.findings().iter().any(|f| f.evidence.contains("nothing is cached there")));
    assert_eq!((put(&store, &object(1, 5000), 0), stats.blockcache.capacity_bytes.get()), (false, 0));
    disk.set_space(Some(DiskSpace { free: 1 << 29, ..full }));
    eventually("it takes blocks", || put(&store, &object(1, 5000), 0));
    // And no more than the requested total.
    assert_eq!((store.disks()[0].capacity, stats.blockcache.capacity_bytes.get()), (capacity, capacity));
}

#[test]
fn a_disk_whose_space_is_not_known_keeps_what_it_has() {
    let dir = fast_dir();
    {
        let (store, _) = open(config(dir.path(), 64 << 20));
        (0..8).for_each(|n| assert!(put(&store, &object(n, 5000), 0)));
    }
    let (config, disks) = faulty_of(config(dir.path(), 64 << 20), Some(DiskSpace::default()));
    let (store, _) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    (0..8).for_each(|n| read(&store, &object(n, 5000), 0).unwrap());
    disk.set_space(None);
    eventually("it takes blocks", || put(&store, &object(8, 5000), 0));
    (0..9).for_each(|n| read(&store, &object(n, 5000), 0).unwrap());
}

#[test]
fn a_small_file_system_that_fills_up() {
    let dir = scratch_dir();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"])
        .arg(dir.path())
        .output()
        .is_ok_and(|o| o.status.success());
    if !mounted {
        assert!(
            !std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default().contains("mount"),
            "mounting a tmpfs failed"
        );
        println!("SKIP: a tmpfs can't be mounted here (not root)");
        return;
    }
    struct Unmount<'a>(&'a Path);
    impl Drop for Unmount<'_> {
        fn drop(&mut self) {
            let _ = std::process::Command::new("umount").arg("-l").arg(self.0).status();
        }
    }
    let _unmount = Unmount(dir.path());
    let mut config = config(dir.path(), 1 << 30);
    config.free_space_ratio = 0.1;
    let (store, _) = open(config.clone());
    assert!(store.findings()[0].evidence.contains("will be used"));
    for n in 0..100 {
        put(&store, &object(n, u64::from(BLOCK)), 0);
    }
    assert!(store.used_bytes() <= 8 << 20);
    let free = || store.disks()[0].free;
    eventually("a tenth stays free", || free() >= (8 << 20) / 10);
    // Other files take most of it: the cache shrinks.
    let before = store.used_bytes();
    let mut other = std::fs::File::create(dir.path().join("other")).unwrap();
    eventually("the cache shrinks", || {
        if store.used_bytes() >= before {
            // Again and again, as room comes free of what was leaving before. That it can't have all is as good.
            let _ = other.write_all(&vec![0u8; (free() / 2) as usize]);
        }
        store.used_bytes() < before && free() >= (8 << 20) / 10
    });
    let hits = (0..100).filter(|n| read(&store, &object(*n, u64::from(BLOCK)), 0).is_some()).count();
    assert!(hits > 0);
    drop(store);
    // Read-only: a clear refusal.
    let ro = std::process::Command::new("mount").args(["-o", "remount,ro"]).arg(dir.path()).status();
    if ro.is_ok_and(|s| s.success()) {
        let error = Store::open(config, Arc::new(Stats::default())).err().unwrap();
        assert!(error.message().contains("can't be written") && error.message().contains("--cache-dir"), "{error}");
    }
}

#[test]
fn a_block_passes_where_those_being_written_have_all_the_room_of_its_class() {
    let dir = fast_dir();
    let (mut config, disks) = faulty(config(dir.path(), 64 << 20));
    (config.read_timeout, config.write_timeout) = (Duration::from_secs(120), Duration::from_secs(120));
    let (store, stats) = open(config);
    let disk = Arc::clone(&disks.lock()[0].1);
    let rule = |quota| BTreeMap::from([(1, BlockClass { quota_bytes: Some(quota), ..BlockClass::default() })]);
    let block = u64::from(BLOCK);
    store.set_classes(rule(2 * block));
    let put = |name, class| {
        let obj = object(name, block);
        store.put_classed(&obj, 0, &bytes(&obj, 0), class).unwrap()
    };
    disk.set_fault(DiskFault::Hangs);
    std::thread::scope(|scope| {
        let written = [1, 2].map(|name| scope.spawn(move || put(name, 1)));
        eventually("two are being written", || disk.held() == 2);
        assert_eq!(put(1, 1), PutOutcome::Busy, "it is being written by another");
        let third = scope.spawn(|| put(3, 1));
        eventually("the third has been decided on", || disk.held() == 3);
        disk.set_fault(DiskFault::None);
        assert_eq!(written.map(|writer| writer.join().unwrap()), [PutOutcome::Stored; 2]);
        assert_eq!(third.join().unwrap(), PutOutcome::Skipped);
    });
    assert_eq!((store.class_used(1), stats.blockcache.limited_blocks.get()), (2 * block, 1));
    // Now that they are here the older ones go.
    assert_eq!(put(3, 1), PutOutcome::Stored);
    assert_eq!((store.class_used(1), stats.blockcache.limited_blocks.get()), (2 * block, 2));
    // Blocks do not divide: one that is longer than all the room never comes.
    store.set_classes(rule(block - 1));
    assert_eq!((put(4, 1), put(4, UNCLASSIFIED)), (PutOutcome::TooLong, PutOutcome::Stored));
    assert_eq!((store.quota_below(1, 4096), store.quota_below(1, BLOCK as usize)), (None, Some(block - 1)));
}
