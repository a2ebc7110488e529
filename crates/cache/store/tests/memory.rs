//! Memory of the index: bounded by a number of blocks, and no more per block than is counted. In a process of its own.

#[path = "store/common/mod.rs"]
mod common;

use common::*;
use spurline_store::{StoreConfig, index_bytes_per_block, synthesise};

fn resident_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}

#[test]
fn an_index_takes_no_more_than_is_counted_and_no_more_blocks_than_allowed() {
    let dir = scratch_dir();
    let (blocks, most) = (300_000, 100_000);
    // Small files, the dearest case: an entry, a slot and checksums for few bytes each.
    synthesise(dir.path(), BLOCK, blocks, 1, 4096).unwrap();
    let config = |max_blocks| StoreConfig { max_blocks, ..config(dir.path(), 64 << 30) };
    let before = resident_bytes();
    {
        let (store, _) = open(config(u64::MAX));
        assert_eq!(store.disks()[0].blocks, blocks);
        let each = (resident_bytes() - before) / blocks;
        println!("{each} bytes of memory per block");
        assert!(each <= index_bytes_per_block(BLOCK), "{each} bytes of memory per block");
    }
    let (store, stats) = open(config(most));
    eventually("the oldest blocks are evicted", || store.disks()[0].blocks <= most);
    let obj = object(1, 40 * u64::from(BLOCK));
    (0..40).for_each(|index| assert!(put(&store, &obj, index), "block {index}"));
    assert!(store.disks()[0].blocks <= most && stats.blockcache.evictions.get() >= blocks - most + 40);
    assert!((0..40).all(|index| read(&store, &obj, index).is_some()), "new blocks take the place of old ones");
}
