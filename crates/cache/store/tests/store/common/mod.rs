//! What the tests of the store share: objects whose bytes follow from their name, and waiting with a bound.
#![allow(dead_code)]

use parking_lot::Mutex;
use spurline_store::{CacheCapacity, DiskSpace, DiskState, FaultyDisk, Store, StoreConfig};
use spurline_types::{ObjectRef, Stats, Version};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Blocks of the tests are small: four granules.
pub const BLOCK: u32 = 256 << 10;

pub fn object(name: u64, size: u64) -> ObjectRef {
    ObjectRef::new("test:", format!("object-{name}").as_bytes(), Version::new("1"), size)
}

/// The bytes of a block, which follow from the name alone.
pub fn bytes(obj: &ObjectRef, index: u32) -> Vec<u8> {
    let mut state = (obj.id.0 as u64) ^ (u64::from(index) << 32) | 1;
    let mut out = vec![0; obj.block_len(index, u64::from(BLOCK))];
    for chunk in out.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = state.to_le_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    out
}

pub fn config(dir: &Path, capacity: u64) -> StoreConfig {
    let mut config = StoreConfig::new(vec![dir.into()], CacheCapacity::Bytes(capacity));
    config.block_size = BLOCK;
    config.free_space_ratio = 0.0;
    // A machine busy with other tests may hold a read for seconds; tests of deadlines set their own.
    config.read_timeout = Duration::from_secs(120);
    config.write_timeout = Duration::from_secs(120);
    config
}

pub fn open(config: StoreConfig) -> (Arc<Store>, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let store = Store::open(config, Arc::clone(&stats)).unwrap_or_else(|e| panic!("{e}"));
    (store, stats)
}

/// Reads a whole block: `None` for a miss; a hit must have the right bytes.
pub fn read(store: &Store, obj: &ObjectRef, index: u32) -> Option<()> {
    let expected = bytes(obj, index);
    let mut dst = vec![0; expected.len()];
    let hit = store.read_copied(obj, index, 0..expected.len(), &mut dst).unwrap();
    if hit {
        assert!(dst == expected, "block {index} of {} has wrong bytes", obj.id);
    }
    hit.then_some(())
}

pub fn put(store: &Store, obj: &ObjectRef, index: u32) -> bool {
    store.put(obj, index, &bytes(obj, index)).unwrap()
}

/// Waits until `what` holds, for at most half a minute.
pub fn eventually(name: &str, mut what: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !what() {
        assert!(Instant::now() < deadline, "it never came true: {name}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A directory in memory where there is one: for tests that write much and need no disk's own behaviour.
pub fn fast_dir() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| scratch_dir())
}

/// Where tests that want a real disk keep their files.
pub fn scratch_dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// A configuration whose disks can be made to fail; the disks by path once the store is open.
pub type Disks = Arc<Mutex<Vec<(PathBuf, Arc<FaultyDisk>)>>>;

pub fn faulty(config: StoreConfig) -> (StoreConfig, Disks) {
    faulty_of(config, None)
}

/// As [`faulty`], with disks whose file system says first that it has this space.
pub fn faulty_of(mut config: StoreConfig, space: Option<DiskSpace>) -> (StoreConfig, Disks) {
    let disks = Disks::default();
    let list = Arc::clone(&disks);
    config.decorate = Some(Arc::new(move |path, io| {
        let disk = FaultyDisk::new(io);
        disk.set_space(space);
        list.lock().push((path.into(), Arc::clone(&disk)));
        disk
    }));
    // Short for the disk that hangs, and yet longer than the real one takes on a machine busy with other tests.
    config.read_timeout = Duration::from_secs(3);
    config.write_timeout = Duration::from_secs(6);
    config.probe_interval = Duration::from_millis(10);
    config.down_after = Duration::from_millis(100);
    (config, disks)
}

pub fn data_files(dir: &Path) -> Vec<PathBuf> {
    let mut out = Vec::new();
    for folder in std::fs::read_dir(dir.join("data")).unwrap().flatten() {
        out.extend(std::fs::read_dir(folder.path()).unwrap().flatten().map(|f| f.path()));
    }
    out
}

pub fn state(store: &Store) -> DiskState {
    store.disks()[0].state
}
