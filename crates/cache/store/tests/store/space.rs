//! Space that is not there though the file system says so, and space that is to be given back.

use crate::common;
use common::*;
use spurline_store::{DiskFault, DiskState};
use std::sync::Arc;

#[test]
fn a_limit_that_the_file_system_does_not_tell_of_lets_older_blocks_go() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    disks.lock()[0].1.set_fault(DiskFault::Quota(20));
    for n in 0..100 {
        assert!(put(&store, &object(n, 5000), 0), "object {n} is kept, in the place of an older one");
    }
    assert_eq!((state(&store), stats.blockcache.io_errors.get()), (DiskState::Normal, 0));
    assert!(stats.blockcache.evictions.get() >= 80);
    eventually("others have room too", || data_files(dir.path()).len() < 20);
    // A block of a longer file, which is written another way.
    let obj = object(200, 3 * u64::from(BLOCK));
    (0..3).for_each(|i| assert!(put(&store, &obj, i)));
    disks.lock()[0].1.set_fault(DiskFault::None);
    eventually("it is filled again", || {
        (0..40).all(|n| put(&store, &object(n, 5000), 0)) && store.disks()[0].blocks >= 40
    });
}

/// No inodes are left and files are long: a block that goes brings none.
#[test]
fn a_limit_that_no_block_that_goes_helps_with_empties_nothing() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    let long = object(1, 40 * u64::from(BLOCK));
    (0..40).for_each(|i| assert!(put(&store, &long, i)));
    disks.lock()[0].1.set_fault(DiskFault::Quota(1));
    for n in 2..60 {
        assert!(!put(&store, &object(n, 5000), 0));
    }
    let held = (0..40).filter(|i| store.contains_block(&long, *i)).count();
    // One for the first of them, and what makes the room that was refused.
    assert!(held >= 36, "{held} of 40 blocks are left, {} went", stats.blockcache.evictions.get());
    disks.lock()[0].1.set_fault(DiskFault::None);
    eventually("it takes more again", || put(&store, &object(100, 5000), 0));
}

#[test]
fn a_directory_that_was_emptied_is_used_no_more_until_a_start() {
    let dir = fast_dir();
    let (mut quick, _) = faulty(config(dir.path(), 64 << 20));
    quick.decorate = None;
    let (store, _) = open(quick);
    assert!(put(&store, &object(1, 5000), 0));
    for entry in std::fs::read_dir(dir.path()).unwrap().flatten() {
        let removed = std::fs::remove_dir_all(entry.path()).or_else(|_| std::fs::remove_file(entry.path()));
        removed.unwrap();
    }
    eventually("it goes down", || state(&store) == DiskState::Down);
    let reason = store.disks()[0].reason.clone();
    assert!(reason.contains("its files were removed under this process; start it again"), "{reason}");
    // Another store can open the directory now, alone.
    let (other, _) = open(config(dir.path(), 64 << 20));
    assert!(put(&other, &object(2, 5000), 0) && !put(&store, &object(3, 5000), 0));
    assert_eq!(data_files(dir.path()).len(), 1);
    drop(store);
    read(&other, &object(2, 5000), 0).unwrap();
}

#[test]
fn a_file_that_could_not_be_removed_is_removed_later() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, _) = open(config);
    assert!(put(&store, &object(1, 5000), 0));
    disks.lock()[0].1.set_fault(DiskFault::Keeps(1));
    store.remove_object(&object(1, 5000));
    assert!(!store.contains_block(&object(1, 5000), 0));
    eventually("its file goes", || data_files(dir.path()).is_empty());
    assert_eq!((state(&store), store.used_bytes()), (DiskState::Normal, 0));
}

#[test]
fn a_disk_that_goes_out_of_use_while_it_is_swept_is_swept_on() {
    let dir = fast_dir();
    drop(open(config(dir.path(), 64 << 20)));
    let folder = dir.path().join("data/3f");
    std::fs::create_dir(&folder).unwrap();
    // What no log names.
    (0..50).for_each(|n| std::fs::write(folder.join(format!("3f{n:030x}")), [7; 100]).unwrap());
    let (mut config, disks) = faulty(config(dir.path(), 64 << 20));
    let inner = config.decorate.take().unwrap();
    let list = Arc::clone(&disks);
    config.decorate = Some(Arc::new(move |path, io| {
        let disk = inner(path, io);
        list.lock()[0].1.set_fault(DiskFault::Keeps(3));
        disk
    }));
    let (store, stats) = open(config);
    eventually("all of them go", || data_files(dir.path()).is_empty());
    assert!(stats.blockcache.io_errors.get() >= 3);
    eventually("normal again", || state(&store) == DiskState::Normal);
}
