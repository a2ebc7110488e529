//! Makes a cache directory whose index names many blocks that no data file holds: for measuring how fast a large cache
//! opens. Knows the log's format and nothing of data.

use crate::{crc, layout, log};
use spurline_types::{BlockId, Error, ObjectId, Result};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes an index of `objects` objects of `blocks` blocks of `len` bytes each to `dir`.
///
/// # Errors
/// What opening the directory or writing the log says.
pub fn synthesise(dir: &Path, block_size: u32, objects: u64, blocks: u32, len: u32) -> Result<()> {
    let _held = layout::open(dir, block_size)?;
    let crcs = vec![0x5eed_5eed; crc::granules(len as usize)];
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, std::fs::File::create(dir.join("index"))?);
        out.write_all(&log::header(block_size))?;
        let mut record = Vec::new();
        for n in 0..objects {
            let object = ObjectId(xxhash_rust::xxh3::xxh3_128(&n.to_le_bytes()));
            for index in 0..blocks {
                record.clear();
                log::push_put(&mut record, &BlockId { object, index }, len, log::WHOLE, &crcs);
                out.write_all(&record)?;
            }
        }
        out.flush()
    };
    write().map_err(|e| Error::io(format!("writing an index to {}", dir.display()), &e))
}
