//! Creates a cache directory whose index names many blocks without data files, to measure how fast a large cache opens. Knows the
//! log's format and nothing of data.

use crate::{crc, layout, log};
use spurline_types::{BlockId, Error, ObjectId, Result};
use std::io::{BufWriter, Write};
use std::path::Path;

/// Writes to `dir` an index of `objects` objects of `blocks` blocks of `len` bytes each.
///
/// # Errors
/// The error of opening the directory or of writing the log.
pub fn synthesise(dir: &Path, block_size: u32, objects: u64, blocks: u32, len: u32) -> Result<()> {
    let _held = layout::open_root(dir, block_size)?;
    let crcs = vec![0x5eed_5eed; crc::granule_count(len as usize)];
    let write = || -> std::io::Result<()> {
        let mut out = BufWriter::with_capacity(1 << 20, std::fs::File::create(dir.join("index"))?);
        out.write_all(&log::encode_header(block_size))?;
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
