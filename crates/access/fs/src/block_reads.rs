//! Reads of an open file through a volume's blocks, at one version, with read-ahead. It knows no inode and no errno.

use crate::readahead::ReadAhead;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, ObjectRef, Result};
use spurline_volume::{ReadData, Volume};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How far blocks are read ahead.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadAheadLimits {
    /// Of one reader, in bytes; 0 for no read-ahead.
    pub of_reader: u64,
    /// Of all readers together, in bytes.
    pub of_all: u64,
}

/// The readers of a volume.
pub(crate) struct BlockReads {
    volume: Arc<dyn Volume>,
    block_size: u64,
    limits: ReadAheadLimits,
    readers: ActiveReaders,
}

/// The read-ahead of one open file.
pub(crate) struct FileReadAhead {
    /// `None` for a file of one block.
    runs: Option<Mutex<Box<ReadAhead>>>,
    /// The second in which this file was last counted as an active reader.
    counted: AtomicU64,
}

impl FileReadAhead {
    /// Of a file that the kernel reads.
    pub fn none() -> FileReadAhead {
        FileReadAhead { runs: None, counted: AtomicU64::new(u64::MAX) }
    }
}

impl BlockReads {
    pub fn new(volume: Arc<dyn Volume>, limits: ReadAheadLimits) -> BlockReads {
        let block_size = volume.block_size().max(1);
        BlockReads { volume, block_size, limits, readers: ActiveReaders::default() }
    }

    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// The read-ahead of a file that is opened with `size` bytes.
    pub fn open_file(&self, size: u64) -> FileReadAhead {
        let ahead = self.limits.of_reader > 0 && size > self.block_size;
        let runs = ahead.then(|| Mutex::new(Box::new(ReadAhead::new(size, self.block_size))));
        FileReadAhead { runs, ..FileReadAhead::none() }
    }

    /// Reads up to `dst.len()` bytes from `offset`; fewer only at the end of the object. `find_second`: a clock in seconds. A
    /// cache hit allocates nothing.
    ///
    /// # Errors
    /// Those of the volume; `Corrupt` when the volume has fewer bytes than the object.
    pub fn read(
        &self,
        object: &ObjectRef,
        ahead: &FileReadAhead,
        offset: u64,
        dst: &mut [u8],
        find_second: impl Fn() -> u64,
    ) -> Result<ReadData> {
        let len = usize::try_from(object.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(dst.len());
        if len == 0 {
            return Ok(ReadData::Copied(0));
        }
        if let Some(runs) = &ahead.runs {
            let blocks = runs.lock().observe_read(offset, len, || self.limit_of_reader(ahead, find_second()));
            if let Some(blocks) = blocks {
                self.volume.prefetch(object, blocks, len);
            }
        }
        let data = self.volume.read(object, offset, &mut dst[..len])?;
        let got = match &data {
            ReadData::Copied(n) => *n,
            ReadData::Shared(slice) => slice.len(),
        };
        // The kernel treats a short reply as the end of the file and fills the rest with zeros.
        if got != len {
            let what =
                format!("a read of {len} bytes at {offset} returned {got}; the object has {} bytes", object.size);
            return Err(Error::new(ErrorKind::Corrupt, what));
        }
        Ok(data)
    }

    /// The read-ahead limit of one reader in blocks: its own limit, or its share of the limit of all.
    fn limit_of_reader(&self, ahead: &FileReadAhead, second: u64) -> u32 {
        let readers = self.readers.count_reader(&ahead.counted, second);
        let bytes = self.limits.of_reader.min(self.limits.of_all / readers.max(1));
        u32::try_from(bytes / self.block_size).unwrap_or(u32::MAX).max(1)
    }
}

/// How many handles were read ahead recently. Counted per second, so that an idle open handle takes no share.
#[derive(Default)]
struct ActiveReaders {
    second: AtomicU64,
    now: AtomicU64,
    before: AtomicU64,
}

impl ActiveReaders {
    /// Counts the handle with mark `counted`, and returns the number of active readers. Two threads at a change of
    /// second may miscount by one for that second, which is harmless.
    fn count_reader(&self, counted: &AtomicU64, second: u64) -> u64 {
        let last = self.second.load(Ordering::Relaxed);
        if last != second && self.second.compare_exchange(last, second, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            let now = self.now.swap(0, Ordering::Relaxed);
            self.before.store(if second == last + 1 { now } else { 0 }, Ordering::Relaxed);
        }
        if counted.swap(second, Ordering::Relaxed) != second {
            self.now.fetch_add(1, Ordering::Relaxed);
        }
        self.now.load(Ordering::Relaxed).max(self.before.load(Ordering::Relaxed))
    }
}
