//! The block store alone: blocks put once, then read by threads with a single read each; no cache engine above.

use super::blocks::{BlockLane, run_lanes};
use super::{BlockPart, PartFigures};
use crate::engine::ThreadCrew;
use crate::error::{BenchError, Result};
use crate::scratch;
use spurline_mem::{BufferPool, PoolBuf};
use spurline_store::{CacheCapacity, ReadOutcome, Store, StoreConfig};
use spurline_types::{ObjectRef, Stats, Version};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const STORE_BLOCK_BYTES: u64 = 4 << 20;

/// Length of the object of each file, as in a data set.
const OBJECT_BYTES: u64 = 64 << 20;

fn numbered_object(number: u64) -> ObjectRef {
    ObjectRef::new("bench", format!("object-{number}").as_bytes(), Version::new("v1"), OBJECT_BYTES)
}

pub(super) fn run(dir: &Path, part: &BlockPart) -> Result<PartFigures> {
    let block = part.block;
    if block == 0 || block > STORE_BLOCK_BYTES || !STORE_BLOCK_BYTES.is_multiple_of(block) {
        return Err(BenchError::Failed(format!("the block must divide {STORE_BLOCK_BYTES}")));
    }
    let buffers = part.connections.max(1) as u64 + 2;
    let pool = BufferPool::new(buffers * STORE_BLOCK_BYTES, STORE_BLOCK_BYTES as usize)?;
    let mut config = StoreConfig::new(vec![dir.to_owned()], CacheCapacity::Bytes(part.bytes * 2));
    config.free_space_ratio = 0.0;
    config.pool = Some(Arc::clone(&pool));
    let store = Store::open(config, Arc::new(Stats::default()))?;
    let objects: Vec<ObjectRef> = (0..part.bytes.div_ceil(OBJECT_BYTES)).map(numbered_object).collect();
    fill_store(&store, &pool, &objects)?;
    let part = &BlockPart { bytes: objects.len() as u64 * OBJECT_BYTES, ..part.clone() };
    run_lanes(part, |crew, lane| read_store(part, crew, lane, &store, &pool, &objects))
}

fn read_store(
    part: &BlockPart,
    crew: &ThreadCrew,
    lane: usize,
    store: &Store,
    pool: &Arc<BufferPool>,
    objects: &[ObjectRef],
) -> Result<()> {
    let block = part.block as usize;
    let mut lane = BlockLane::new(part, lane);
    let mut buffer: Option<PoolBuf> = Some(pool.alloc(block, Instant::now() + Duration::from_secs(5))?);
    let mut is_first = true;
    while !crew.is_stopped() {
        let at = lane.next_offset();
        let object = (at / OBJECT_BYTES) as usize;
        let inside = at % OBJECT_BYTES;
        let start = (inside % STORE_BLOCK_BYTES) as usize;
        let number = (inside / STORE_BLOCK_BYTES) as u32;
        match store.read(&objects[object], number, start..start + block, &mut buffer)? {
            ReadOutcome::Hit => {}
            other => return Err(BenchError::Failed(format!("block {number} of object {object}: {other:?}"))),
        }
        if std::mem::take(&mut is_first) {
            let mut right = vec![0u8; block];
            scratch::fill_pattern(object as u64, inside, &mut right);
            if buffer.as_ref().is_none_or(|got| got[..block] != right) {
                return Err(BenchError::Failed(format!("wrong bytes at {inside} of object {object}")));
            }
        }
        crew.add_item();
    }
    Ok(())
}

fn fill_store(store: &Store, pool: &Arc<BufferPool>, objects: &[ObjectRef]) -> Result<()> {
    let mut buffer = pool.alloc(STORE_BLOCK_BYTES as usize, Instant::now() + Duration::from_secs(5))?;
    for (seed, object) in objects.iter().enumerate() {
        for index in 0..(OBJECT_BYTES / STORE_BLOCK_BYTES) as u32 {
            if store.contains_block(object, index) {
                continue;
            }
            scratch::fill_pattern(seed as u64, u64::from(index) * STORE_BLOCK_BYTES, &mut buffer);
            if !store.put(object, index, &buffer)? {
                return Err(BenchError::Failed("the store did not keep a block: is the disk full?".into()));
            }
            crate::stop::check_stop()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_put_once_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("cache");
        let mut part = BlockPart { connections: 2, bytes: 64 << 20, random: true, time_ms: 20, ..BlockPart::default() };
        assert!(run(&dir, &part).unwrap().ops > 0);
        run(&dir, &part).unwrap();
        part.block = 3 << 20;
        assert!(run(&dir, &part).is_err());
    }
}
