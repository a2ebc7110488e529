//! What the tests of buckets share: bytes, and reads without a cache.

use spurline_origin::OriginStore;
use spurline_types::{ObjectRef, Result, SliceSink};
use std::time::{Duration, Instant};

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Bytes that identify their position.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub fn read(store: &dyn OriginStore, object: &ObjectRef, offset: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = vec![0xaa; len];
    let mut sink = SliceSink::new(&mut bytes);
    store.read(object, offset, &mut sink, soon())?;
    assert_eq!(sink.filled(), len, "a read that succeeds has filled its sink");
    Ok(bytes)
}
