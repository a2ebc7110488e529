//! The records of a disk's index log: encoding, decoding, and where a torn tail is cut. Bytes in, records out; no file and no
//! index.
//!
//! A log is a header of 16 bytes (`SPURLIX2`, block size, CRC32C of the two), followed by records. A record is `length: u32, crc:
//! u32, payload`; the CRC32C covers length and payload. All numbers are little-endian. Only whole records count: replay ends at
//! the first torn record, and appending continues there.

use crate::crc;
use spurline_types::{BlockId, ObjectId};

/// Length of the header.
pub const HEADER: usize = 16;
const LOG_MAGIC: &[u8; 8] = b"SPURLIX2";
const FRAME_BYTES: usize = 8;
/// Maximum length of a record.
pub const RECORD_MAX: usize = FRAME_BYTES + MAX_PAYLOAD;
/// Maximum length of a payload: 28 bytes and the checksums of the largest block (256 MiB).
const MAX_PAYLOAD: usize = 28 + 4 * 4096;

const PUT_KIND: u8 = 1;
const REMOVE_KIND: u8 = 2;
const PROMOTE_KIND: u8 = 3;
const CLASS_KIND: u8 = 4;

/// Bit of [`LogRecord::Put`]'s flags: the block lies in the object's single file, not in an extent's.
pub const WHOLE: u8 = 1;
/// Bit of [`LogRecord::Put`]'s flags: the block was in the main queue when the log was rewritten.
pub const MAIN: u8 = 2;

/// Bit of [`LogRecord::Put`]'s flags: all bytes of the block are zero, and the block takes a page on disk.
pub const HOLE: u8 = 4;

/// A change of the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LogRecord<'a> {
    /// The block is on this disk.
    Put {
        block: BlockId,
        /// The length in bytes.
        len: u32,
        /// [`WHOLE`], [`MAIN`] and [`HOLE`].
        flags: u8,
        /// The checksums, four bytes each.
        crcs: LoggedCrcs<'a>,
    },
    /// The block is no longer on this disk.
    Remove(BlockId),
    /// The block moved to the main queue of the eviction policy.
    Promote(BlockId),
    /// The block, which is on this disk, belongs to a class.
    Class {
        block: BlockId,
        /// The class, 0 for none.
        class: u64,
        /// The time of arrival, in seconds since 1970.
        came: u32,
    },
}

/// Checksums as encoded in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoggedCrcs<'a>(&'a [u8]);

impl LoggedCrcs<'_> {
    /// The checksums as numbers.
    pub fn to_boxed(self) -> Box<[u32]> {
        self.0.as_chunks::<4>().0.iter().map(|c| u32::from_le_bytes(*c)).collect()
    }
}

/// The header of a log for blocks of `block_size` bytes.
pub fn encode_header(block_size: u32) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..8].copy_from_slice(LOG_MAGIC);
    out[8..12].copy_from_slice(&block_size.to_le_bytes());
    let sum = crc32c::crc32c(&out[..12]);
    out[12..].copy_from_slice(&sum.to_le_bytes());
    out
}

fn push_frame(out: &mut Vec<u8>, payload: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; FRAME_BYTES]);
    payload(out);
    let len = ((out.len() - start - FRAME_BYTES) as u32).to_le_bytes();
    let sum = crc32c::crc32c_append(crc32c::crc32c(&len), &out[start + FRAME_BYTES..]);
    out[start..start + 4].copy_from_slice(&len);
    out[start + 4..start + 8].copy_from_slice(&sum.to_le_bytes());
}

fn push_block(out: &mut Vec<u8>, block: &BlockId) {
    out.extend_from_slice(&block.index.to_le_bytes());
    out.extend_from_slice(&block.object.0.to_le_bytes());
}

/// Appends a [`LogRecord::Put`].
pub fn push_put(out: &mut Vec<u8>, block: &BlockId, len: u32, flags: u8, crcs: &[u32]) {
    push_frame(out, |out| {
        out.extend_from_slice(&[PUT_KIND, flags, 0, 0]);
        push_block(out, block);
        out.extend_from_slice(&len.to_le_bytes());
        crcs.iter().for_each(|c| out.extend_from_slice(&c.to_le_bytes()));
    });
}

/// Appends a [`LogRecord::Remove`].
pub fn push_remove(out: &mut Vec<u8>, block: &BlockId) {
    push_frame(out, |out| {
        out.extend_from_slice(&[REMOVE_KIND, 0, 0, 0]);
        push_block(out, block);
    });
}

/// Appends a [`LogRecord::Promote`].
pub fn push_promote(out: &mut Vec<u8>, block: &BlockId) {
    push_frame(out, |out| {
        out.extend_from_slice(&[PROMOTE_KIND, 0, 0, 0]);
        push_block(out, block);
    });
}

/// Appends a [`LogRecord::Class`].
pub fn push_class(out: &mut Vec<u8>, block: &BlockId, class: u64, came: u32) {
    push_frame(out, |out| {
        out.extend_from_slice(&[CLASS_KIND, 0, 0, 0]);
        push_block(out, block);
        out.extend_from_slice(&came.to_le_bytes());
        out.extend_from_slice(&class.to_le_bytes());
    });
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Decodes a whole record at the start of `bytes`; `None` without a record, or with a torn or foreign record.
fn decode_record(bytes: &[u8]) -> Option<(LogRecord<'_>, usize)> {
    let len = u32_at(bytes, 0)? as usize;
    let sum = u32_at(bytes, 4)?;
    if len > MAX_PAYLOAD {
        return None;
    }
    let payload = bytes.get(FRAME_BYTES..FRAME_BYTES + len)?;
    if crc32c::crc32c_append(crc32c::crc32c(&bytes[..4]), payload) != sum {
        return None;
    }
    let kind = *payload.first()?;
    let flags = *payload.get(1)?;
    let index = u32_at(payload, 4)?;
    let object = ObjectId(u128::from_le_bytes(payload.get(8..24)?.try_into().ok()?));
    let block = BlockId { object, index };
    let record = match kind {
        PUT_KIND => {
            let len = u32_at(payload, 24)?;
            let crcs = payload.get(28..)?;
            if len == 0 || crcs.len() != crc::granule_count(len as usize) * 4 {
                return None;
            }
            LogRecord::Put { block, len, flags, crcs: LoggedCrcs(crcs) }
        }
        REMOVE_KIND => LogRecord::Remove(block),
        PROMOTE_KIND => LogRecord::Promote(block),
        CLASS_KIND => {
            let class = u64::from_le_bytes(payload.get(28..36)?.try_into().ok()?);
            LogRecord::Class { block, class, came: u32_at(payload, 24)? }
        }
        _ => return None,
    };
    Some((record, FRAME_BYTES + len))
}

/// Whether `bytes` starts with the header of a log for this block size.
pub fn has_header(bytes: &[u8], block_size: u32) -> bool {
    bytes.get(..HEADER) == Some(&encode_header(block_size)[..])
}

/// Calls `f` with every whole record of `bytes` (which start after the header) and returns the number of bytes of these: where
/// appending continues.
pub fn replay_records<'a>(bytes: &'a [u8], mut f: impl FnMut(LogRecord<'a>)) -> usize {
    let mut at = 0;
    while let Some((record, len)) = decode_record(&bytes[at..]) {
        f(record);
        at += len;
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(n: u32) -> Vec<u8> {
        let mut out = Vec::new();
        for i in 0..n {
            let block = BlockId { object: ObjectId(u128::from(i) << 70 | 5), index: i };
            match i % 4 {
                0 => push_put(&mut out, &block, 70_000, WHOLE, &[i, !i]),
                1 => push_remove(&mut out, &block),
                2 => push_promote(&mut out, &block),
                _ => push_class(&mut out, &block, 0x0102_0304_0506_0708, i),
            }
        }
        out
    }

    #[test]
    fn reads_back_what_was_written() {
        let bytes = sample(4);
        let mut seen = Vec::new();
        assert_eq!(replay_records(&bytes, |r| seen.push(r)), bytes.len());
        let block = BlockId { object: ObjectId(5), index: 0 };
        let LogRecord::Put { block: b, len: 70_000, flags: WHOLE, crcs } = &seen[0] else { panic!("{:?}", seen[0]) };
        assert_eq!((*b, &*crcs.to_boxed()), (block, &[0, u32::MAX][..]));
        assert!(matches!(seen[1], LogRecord::Remove(BlockId { index: 1, .. })));
        assert!(matches!(seen[2], LogRecord::Promote(BlockId { index: 2, .. })));
        assert!(matches!(
            seen[3],
            LogRecord::Class { block: BlockId { index: 3, .. }, class: 0x0102_0304_0506_0708, came: 3 }
        ));
        assert!(has_header(&encode_header(4 << 20), 4 << 20));
        assert!(!has_header(&encode_header(4 << 20), 1 << 20));
        assert!(!has_header(b"SPUR", 1 << 20));
    }

    #[test]
    fn a_cut_anywhere_keeps_every_whole_record() {
        let bytes = sample(8);
        let mut ends = vec![0];
        while let Some((_, len)) = decode_record(&bytes[*ends.last().unwrap()..]) {
            ends.push(ends.last().unwrap() + len);
        }
        for cut in 0..=bytes.len() {
            let whole = ends.iter().filter(|e| **e <= cut).count() - 1;
            let mut n = 0;
            assert_eq!(replay_records(&bytes[..cut], |_| n += 1), ends[whole]);
            assert_eq!(n, whole);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
            let end = replay_records(&bytes, |r| if let LogRecord::Put { crcs, .. } = r { drop(crcs.to_boxed()) });
            prop_assert!(end <= bytes.len());
        }

        /// A flipped bit ends the replay at the record: nothing wrong is ever taken for a record.
        #[test]
        fn a_flipped_bit_is_seen(at in 0usize..2000, bit in 0u8..8) {
            let good = sample(12);
            let mut bad = good.clone();
            let at = at % bad.len();
            bad[at] ^= 1 << bit;
            let mut expected = Vec::new();
            replay_records(&good, |r| expected.push(r));
            let mut seen = Vec::new();
            let end = replay_records(&bad, |r| seen.push(r));
            prop_assert!(end <= at);
            prop_assert_eq!(&seen[..], &expected[..seen.len()]);
        }
    }
}
