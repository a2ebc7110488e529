//! Classes of blocks: pinned blocks outlive any scan, a quota holds for all writers, blocks expire, and all of it
//! outlives a restart. Restarts by `kill -9` are among the tests of crashes.

use crate::common;
use common::*;
use spurline_store::{BlockClass, PINNED_PERCENT, PutOutcome, RemovedBytes, Store, UNCLASSIFIED};
use spurline_types::{ObjectId, ObjectRef, SourceTag, Version};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const BLOCK_BYTES: u64 = BLOCK as u64;

fn put_as(store: &Store, name: u64, class: u64) -> bool {
    kept_as(store, name, class) == PutOutcome::Stored
}

fn kept_as(store: &Store, name: u64, class: u64) -> PutOutcome {
    let obj = object(name, BLOCK_BYTES);
    store.put_classed(&obj, 0, &bytes(&obj, 0), class).unwrap()
}

fn here(store: &Store, name: u64) -> bool {
    read(store, &object(name, BLOCK_BYTES), 0).is_some()
}

fn count(store: &Store, names: std::ops::Range<u64>) -> u64 {
    names.filter(|name| here(store, *name)).count() as u64
}

fn pinned() -> BlockClass {
    BlockClass { pinned: true, ..BlockClass::default() }
}

#[test]
fn pinned_blocks_outlive_scans_and_leave_room_for_others() {
    let dir = fast_dir();
    let capacity = 100 * BLOCK_BYTES;
    let (store, stats) = open(config(dir.path(), capacity));
    store.set_classes(BTreeMap::from([(1, pinned())]));
    // More than may be pinned; the last ones are as others are.
    (0..95).for_each(|name| assert!(put_as(&store, name, 1)));
    let most = 100 * PINNED_PERCENT / 100;
    assert_eq!((store.most_pinned(), stats.blockcache.pinned_bytes.get()), (most * BLOCK_BYTES, most * BLOCK_BYTES));
    assert_eq!(stats.blockcache.pins_refused.get(), 95 - most);
    for name in 1000..1500 {
        assert!(put_as(&store, name, UNCLASSIFIED), "block {name} finds room beside the pinned ones");
    }
    assert_eq!(count(&store, 0..most), most);
    // Over a restart, and afterwards as well.
    drop(store);
    let (store, stats) = open(config(dir.path(), capacity));
    store.set_classes(BTreeMap::from([(1, pinned())]));
    assert_eq!(stats.blockcache.pinned_bytes.get(), most * BLOCK_BYTES);
    (2000..2500).for_each(|name| {
        put_as(&store, name, UNCLASSIFIED);
    });
    assert_eq!(count(&store, 0..most), most);
    assert!(store.used_bytes() <= capacity);
    // On a smaller disk as many blocks stay pinned as fit the share; unpinned blocks go as others do.
    drop(store);
    let smaller = 50 * BLOCK_BYTES;
    let (store, stats) = open(config(dir.path(), smaller));
    store.set_classes(BTreeMap::from([(1, pinned())]));
    eventually("there is room", || store.used_bytes() <= smaller);
    assert_eq!(stats.blockcache.pinned_bytes.get(), store.most_pinned());
    assert_eq!((count(&store, 0..40), count(&store, 40..95) <= 10), (40, true), "the oldest ones");
    store.set_classes(BTreeMap::new());
    assert_eq!(stats.blockcache.pinned_bytes.get(), 0);
    drop(store);
    let (store, _) = open(config(dir.path(), 10 * BLOCK_BYTES));
    // What was of a class is held until the rules are known.
    store.set_classes(BTreeMap::new());
    eventually("there is room again", || store.used_bytes() <= 10 * BLOCK_BYTES);
}

#[test]
fn a_quota_holds_whoever_writes() {
    let dir = fast_dir();
    // Room enough for blocks that are leaving.
    let (store, stats) = open(config(dir.path(), 1000 * BLOCK_BYTES));
    let quota = 10 * BLOCK_BYTES;
    store.set_classes(BTreeMap::from([(1, BlockClass { quota_bytes: Some(quota), ..BlockClass::default() })]));
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..4u64)
            .map(|writer| {
                let store = &store;
                // Some of them write the same ones.
                scope.spawn(move || {
                    (0..60).for_each(|n| {
                        put_as(store, writer / 2 * 1000 + n, 1);
                    })
                })
            })
            .collect();
        scope.spawn(|| {
            while !ended.load(Ordering::Acquire) {
                assert!(store.class_used(1) <= quota);
                std::thread::yield_now();
            }
        });
        (5000..5100).for_each(|name| {
            put_as(&store, name, UNCLASSIFIED);
        });
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        ended.store(true, Ordering::Release);
    });
    assert!(stats.blockcache.limited_blocks.get() > 0 && store.class_used(1) > 0);
    assert_eq!(count(&store, 5000..5100), 100, "no other block was evicted");
    // What the books say is what is there.
    assert_eq!(store.class_used(1), (count(&store, 0..60) + count(&store, 1000..1060)) * BLOCK_BYTES);
    // A smaller quota: the oldest go by themselves. None at all: nothing is kept.
    store
        .set_classes(BTreeMap::from([(1, BlockClass { quota_bytes: Some(2 * BLOCK_BYTES), ..BlockClass::default() })]));
    eventually("the smaller quota holds", || store.class_used(1) <= 2 * BLOCK_BYTES);
    store.set_classes(BTreeMap::from([(1, BlockClass { quota_bytes: Some(0), ..BlockClass::default() })]));
    eventually("nothing is left", || store.class_used(1) == 0);
    assert!(!put_as(&store, 9000, 1) && put_as(&store, 9000, UNCLASSIFIED));
}

#[test]
fn what_has_a_time_goes_and_others_stay() {
    let dir = fast_dir();
    let (store, stats) = open(config(dir.path(), 200 * BLOCK_BYTES));
    let ttl = |seconds| BlockClass { ttl: Some(Duration::from_secs(seconds)), ..BlockClass::default() };
    store.set_classes(BTreeMap::from([(1, ttl(3600)), (2, ttl(3600))]));
    for name in 0..30 {
        assert!(put_as(&store, name, name % 3));
    }
    store.set_classes(BTreeMap::from([(1, ttl(1)), (2, ttl(3600))]));
    eventually("their time is up", || store.class_used(1) == 0);
    for name in 0..30 {
        assert_eq!(here(&store, name), name % 3 != 1, "block {name}");
    }
    eventually("they are counted", || stats.blockcache.limited_blocks.get() == 10);
    eventually("their room is given back", || store.used_bytes() == 20 * BLOCK_BYTES);
}

#[test]
fn a_removal_keeps_pinned_blocks_unless_they_are_meant_and_finds_all_versions_of_a_source() {
    let dir = fast_dir();
    let (store, stats) = open(config(dir.path(), 200 * BLOCK_BYTES));
    store.set_classes(BTreeMap::from([(1, pinned())]));
    // Two versions of each file of two sources; one file is pinned.
    let of_source = |source: &str| {
        let object = move |n: u32| {
            let version = Version::new(&format!("v{}", n % 2));
            ObjectRef::new(source, format!("f{}", n / 2).as_bytes(), version, BLOCK_BYTES)
        };
        (0..20).map(object).collect::<Vec<ObjectRef>>()
    };
    let sources = ["s3://one", "s3://two"].map(of_source);
    for obj in sources.iter().flatten() {
        let class = if *obj.path == *b"f0" { 1 } else { UNCLASSIFIED };
        assert_eq!(store.put_classed(obj, 0, &bytes(obj, 0), class).unwrap(), PutOutcome::Stored);
    }
    let held = |objects: &[ObjectRef]| objects.iter().filter(|obj| store.contains_block(obj, 0)).count();
    let removed = |n: u64, kept: u64| RemovedBytes { removed: n * BLOCK_BYTES, kept_pinned: kept * BLOCK_BYTES };
    assert_eq!(store.remove_blocks(&sources[0][0], 0..1, false), removed(0, 1));
    assert_eq!(store.remove_blocks(&sources[0][2], 0..1, false), removed(1, 0));
    let tag = SourceTag::of_source("s3://one");
    let remove = |with_pinned: bool, every_source: bool| {
        let wanted = |object: &ObjectId| every_source || object.has_tag(tag);
        let mut sum = RemovedBytes::default();
        let parts = (0..).map_while(|part| store.remove_in_part(part, wanted, with_pinned));
        parts.for_each(|bytes| sum += bytes);
        sum
    };
    assert_eq!(remove(false, false), removed(17, 2));
    assert_eq!((held(&sources[0]), held(&sources[1])), (2, 20));
    assert_eq!(remove(true, false), removed(2, 0));
    assert_eq!((held(&sources[0]), held(&sources[1])), (0, 20));
    assert_eq!(remove(true, true), removed(20, 0));
    assert_eq!((held(&sources[1]), stats.blockcache.pinned_bytes.get(), store.used_bytes()), (0, 0, 0));
}

#[test]
fn a_block_that_is_here_changes_its_class_and_the_log_remembers() {
    let dir = fast_dir();
    let rules = || BTreeMap::from([(1, pinned()), (2, BlockClass::default())]);
    let (store, stats) = open(config(dir.path(), 200 * BLOCK_BYTES));
    store.set_classes(rules());
    (0..4).for_each(|name| assert!(put_as(&store, name, UNCLASSIFIED)));
    let obj = |name| object(name, BLOCK_BYTES);
    store.classify_block(&obj(0), 0, 1);
    store.classify_block(&obj(1), 0, 1);
    store.classify_block(&obj(1), 0, UNCLASSIFIED);
    store.classify_block(&obj(77), 0, 1);
    assert_eq!((store.class_used(1), stats.blockcache.pinned_bytes.get()), (BLOCK_BYTES, BLOCK_BYTES));
    // So many changes that the log is rewritten.
    (0..6000).for_each(|n| store.classify_block(&obj(2), 0, 1 + n % 2));
    drop(store);
    let (store, stats) = open(config(dir.path(), 200 * BLOCK_BYTES));
    store.set_classes(rules());
    assert_eq!((store.class_used(1), store.class_used(2)), (BLOCK_BYTES, BLOCK_BYTES));
    assert_eq!(stats.blockcache.pinned_bytes.get(), BLOCK_BYTES);
    assert_eq!(count(&store, 0..4), 4);
    // A block that is taken out is of no class when the block comes again.
    store.remove_object(&obj(0));
    assert!(put_as(&store, 0, UNCLASSIFIED));
    drop(store);
    let (store, _) = open(config(dir.path(), 200 * BLOCK_BYTES));
    store.set_classes(rules());
    assert_eq!(store.class_used(1), 0);
}
