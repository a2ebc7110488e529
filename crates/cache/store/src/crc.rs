//! Checksums of blocks: a CRC32C for every granule of 64 KiB. Knows nothing of files or indexes.

/// Bytes under a checksum; every read from disk covers whole granules.
pub const GRANULE: usize = 64 << 10;

/// The number of granules of `len` bytes.
pub fn granule_count(len: usize) -> usize {
    len.div_ceil(GRANULE)
}

/// The checksums of a block's bytes; the last granule may be short.
pub fn checksums(data: &[u8]) -> Box<[u32]> {
    data.chunks(GRANULE).map(crc32c::crc32c).collect()
}

/// Checks `data`, which starts on a granule, against `expected`.
///
/// # Errors
/// The number of the first granule that differs, or that has no checksum.
pub fn verify_granules(data: &[u8], expected: &[u32]) -> Result<(), usize> {
    for (i, granule) in data.chunks(GRANULE).enumerate() {
        if expected.get(i) != Some(&crc32c::crc32c(granule)) {
            return Err(i);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_wrong_granule() {
        let mut data: Vec<u8> = (0..GRANULE * 2 + 5).map(|i| (i % 251) as u8).collect();
        let sums = checksums(&data);
        assert_eq!(sums.len(), 3);
        assert_eq!(verify_granules(&data, &sums), Ok(()));
        data[GRANULE * 2 + 4] ^= 1;
        assert_eq!(verify_granules(&data, &sums), Err(2));
        data[GRANULE] ^= 0x80;
        assert_eq!(verify_granules(&data, &sums), Err(1));
        assert_eq!(verify_granules(&data[..GRANULE], &[]), Err(0));
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283, "the check value of CRC-32C");
    }
}
