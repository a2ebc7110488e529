//! A hasher for keys that are hashes already: object ids, alone or with a block number. Knows no map.

use std::hash::{BuildHasherDefault, Hasher};

/// A cheap hasher: object ids are hashes already.
#[derive(Default)]
pub struct ObjectHasher(u64);

impl Hasher for ObjectHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }
    fn write_u32(&mut self, n: u32) {
        self.write_u64(u64::from(n));
    }
    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(29) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
    fn write_u128(&mut self, n: u128) {
        self.write_u64(n as u64);
    }
}

/// A hasher for keys that hold an [`crate::ObjectId`].
pub type BuildObjectHasher = BuildHasherDefault<ObjectHasher>;
