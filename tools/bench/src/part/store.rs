//! The block store alone: blocks put once, then read by threads with a single read each; no cache engine above.

use super::{ReadLane, ReadPart, StorePart, read_lanes};
use crate::error::{BenchError, Result};
use crate::scratch;
use spurline_mem::{BufferPool, PoolBuf};
use spurline_store::{CacheCapacity, ReadOutcome, Store, StoreConfig};
use spurline_types::{ObjectRef, Stats, Version};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const STORE_BLOCK_BYTES: u64 = 4 << 20;

/// Length of the object of each file, as in a data set.
const OBJECT_BYTES: u64 = 64 << 20;

fn numbered_object(number: u64) -> ObjectRef {
    ObjectRef::new("bench", format!("object-{number}").as_bytes(), Version::new("v1"), OBJECT_BYTES)
}

pub(super) fn run(part: &StorePart) -> Result<()> {
    let block = part.block.0;
    if block == 0 || block > STORE_BLOCK_BYTES || !STORE_BLOCK_BYTES.is_multiple_of(block) {
        return Err(BenchError::Failed(format!("--block must divide {STORE_BLOCK_BYTES}")));
    }
    let depth = part.depth.max(1);
    let pool = BufferPool::new((depth as u64 + 2) * STORE_BLOCK_BYTES, STORE_BLOCK_BYTES as usize)?;
    let mut config = StoreConfig::new(vec![part.dir.clone()], CacheCapacity::Bytes(part.size.0 * 2));
    config.free_space_ratio = 0.0;
    config.pool = Some(Arc::clone(&pool));
    let store = Store::open(config, Arc::new(Stats::default()))?;
    let objects: Vec<ObjectRef> = (0..part.size.0.div_ceil(OBJECT_BYTES)).map(numbered_object).collect();
    fill_store(&store, &pool, &objects)?;
    let lanes = ReadPart {
        addr: std::net::SocketAddr::from(([0, 0, 0, 0], 0)),
        connections: depth,
        depth: 1,
        block: part.block,
        size: spurline_types::Size(objects.len() as u64 * OBJECT_BYTES),
        random: part.random,
        time: part.time,
    };
    read_lanes(&lanes, |index, stop| {
        let mut lane = ReadLane::new(&lanes, index);
        let mut buffer: Option<PoolBuf> = Some(pool.alloc(block as usize, Instant::now() + Duration::from_secs(5))?);
        let mut reads = 0;
        while !stop.load(Ordering::Relaxed) {
            let at = lane.next_offset();
            let object = &objects[(at / OBJECT_BYTES) as usize];
            let inside = at % OBJECT_BYTES;
            let start = (inside % STORE_BLOCK_BYTES) as usize;
            let number = (inside / STORE_BLOCK_BYTES) as u32;
            match store.read(object, number, start..start + block as usize, &mut buffer)? {
                ReadOutcome::Hit => {}
                other => {
                    return Err(BenchError::Failed(format!(
                        "block {number} of object {}: {other:?}",
                        at / OBJECT_BYTES
                    )));
                }
            }
            if reads == 0 {
                let mut right = vec![0u8; block as usize];
                scratch::fill_pattern(at / OBJECT_BYTES, inside, &mut right);
                if buffer.as_ref().is_none_or(|b| b[..block as usize] != right) {
                    return Err(BenchError::Failed(format!("wrong bytes at {inside} of object {}", at / OBJECT_BYTES)));
                }
            }
            reads += 1;
        }
        Ok(reads)
    })
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
    use spurline_types::Size;

    #[test]
    fn blocks_are_put_once_and_read() {
        let dir = tempfile::tempdir().unwrap();
        let mut part = StorePart {
            dir: dir.path().join("cache"),
            depth: 2,
            block: Size(1 << 20),
            size: Size(64 << 20),
            random: true,
            time: Duration::from_millis(20),
        };
        run(&part).unwrap();
        run(&part).unwrap();
        part.block = Size(3 << 20);
        assert!(run(&part).is_err());
    }
}
