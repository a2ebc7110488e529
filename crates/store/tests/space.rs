//! Space that is not there though the file system says so, and space that is to be given back.

mod common;

use common::*;
use spurline_store::{DiskState, Fault};

#[test]
fn a_limit_that_the_file_system_does_not_tell_of_lets_older_blocks_go() {
    let dir = fast_dir();
    let (config, disks) = faulty(config(dir.path(), 64 << 20));
    let (store, stats) = open(config);
    disks.lock()[0].1.set(Fault::Quota(20));
    for n in 0..100 {
        assert!(put(&store, &object(n, 5000), 0), "object {n} is kept, in the place of an older one");
    }
    assert_eq!((state(&store), stats.blockcache.io_errors.get()), (DiskState::Normal, 0));
    assert!(stats.blockcache.evictions.get() >= 80);
    eventually("others have room too", || data_files(dir.path()).len() < 20);
    // A block of a longer file, which is written another way.
    let obj = object(200, 3 * u64::from(BLOCK));
    (0..3).for_each(|i| assert!(put(&store, &obj, i)));
    disks.lock()[0].1.set(Fault::None);
    eventually("it is filled again", || {
        (0..40).all(|n| put(&store, &object(n, 5000), 0)) && store.disks()[0].blocks >= 40
    });
}
