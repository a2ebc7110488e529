//! A minimal file system: a directory with a single file, `data`, served from a static buffer; written bytes are dropped, and new
//! files are forgotten. Measures the upper limit for file systems on the same session code.

use spurline_fs::{
    CreateMode, DirRead, FileEntry, FileService, FileWrite, FsCaller, FsError, FsResult, HandleRef, KernelSide,
    ListedEntry, LookupOutcome, OpenedFile, StatAttr,
};
use spurline_mem::{BlockSlice, BufferPool};
use spurline_types::{Error, ErrorKind};
use spurline_volume::ReadData;
use spurline_volume::writes::SourceSpace;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const ROOT: u64 = crate::abi::ROOT_ID;
const DATA_INO: u64 = 2;
/// Nothing ever changes.
const ATTR_TTL: Duration = Duration::from_secs(86_400);
/// The longest read; the bytes repeat with this period.
const PATTERN_BYTES: usize = 1 << 20;

/// See the module.
pub struct NullFs {
    size: u64,
    /// Longer than the nominal length by the longest read, so that a read from any offset is a single piece.
    held: BlockSlice,
    fill: bool,
    /// The number of the last file that was made.
    made: AtomicU64,
}

impl NullFs {
    /// A file system whose file has `size` bytes, served from a mebibyte, which stays in the processor's cache.
    ///
    /// # Errors
    /// As [`NullFs::with_buffer`].
    pub fn new(size: u64) -> Result<Self, Error> {
        NullFs::with_buffer(size, PATTERN_BYTES as u64)
    }

    /// The same served from `held` bytes of memory (a mebibyte at least), like a file system with data in memory.
    ///
    /// # Errors
    /// `NoMemory` when the system has no address space for the bytes.
    pub fn with_buffer(size: u64, held: u64) -> Result<Self, Error> {
        let len = (held as usize).next_multiple_of(PATTERN_BYTES).max(PATTERN_BYTES) + PATTERN_BYTES;
        let pool = BufferPool::new(BufferPool::footprint(len), len)?;
        let mut buffer =
            pool.try_alloc(len).ok_or_else(|| Error::new(ErrorKind::NoMemory, "a new pool has no buffer"))?;
        let (first, rest) = buffer.split_at_mut(PATTERN_BYTES);
        for (i, byte) in (0u64..).zip(first.iter_mut()) {
            *byte = i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0];
        }
        rest.chunks_exact_mut(PATTERN_BYTES).for_each(|chunk| chunk.copy_from_slice(first));
        Ok(NullFs { size, held: BlockSlice::from_buf(buffer), fill: false, made: AtomicU64::new(DATA_INO) })
    }

    /// The same served from the slot's buffer without writing there: the cost of a file system whose bytes a device writes.
    ///
    /// # Errors
    /// As [`NullFs::with_buffer`].
    pub fn from_slot_buffers(size: u64) -> Result<Self, Error> {
        Ok(NullFs { fill: true, ..NullFs::new(size)? })
    }

    fn attr_of(&self, ino: u64) -> FsResult<StatAttr> {
        match ino {
            ROOT => Ok(StatAttr { nlink: 2, ..StatAttr::new(ROOT, libc::S_IFDIR | 0o555, 0) }),
            DATA_INO => Ok(StatAttr::new(DATA_INO, libc::S_IFREG | 0o444, self.size)),
            made if made <= self.made.load(Ordering::Relaxed) => Ok(StatAttr::new(made, libc::S_IFREG | 0o644, 0)),
            other => Err(FsError::Stale(other)),
        }
    }

    fn entry_of(&self, ino: u64) -> FsResult<FileEntry> {
        Ok(FileEntry { ino, generation: 0, attr: self.attr_of(ino)?, entry_ttl: ATTR_TTL, attr_ttl: ATTR_TTL })
    }
}

impl FileService for NullFs {
    fn lookup(&self, _parent: u64, name: &[u8], _caller: &FsCaller<'_>) -> FsResult<LookupOutcome<FileEntry>> {
        Ok(match name {
            b"." | b".." => LookupOutcome::Found(self.entry_of(ROOT)?),
            b"data" => LookupOutcome::Found(self.entry_of(DATA_INO)?),
            _ => LookupOutcome::Absent { ttl: ATTR_TTL },
        })
    }

    fn getattr(&self, ino: u64, _fh: Option<u64>, _caller: &FsCaller<'_>) -> FsResult<(StatAttr, Duration)> {
        Ok((self.attr_of(ino)?, ATTR_TTL))
    }

    fn open(&self, ino: u64, _flags: u32, _caller: &FsCaller<'_>, _kernel: &KernelSide<'_>) -> FsResult<OpenedFile> {
        match ino {
            DATA_INO => Ok(OpenedFile { keep_cache: true, ..OpenedFile::default() }),
            _ => Err(FsError::IsADirectory),
        }
    }

    fn read(&self, _file: HandleRef, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        let len = self.size.saturating_sub(offset).min(dst.len() as u64).min(PATTERN_BYTES as u64) as usize;
        if self.fill {
            return Ok(ReadData::Copied(len));
        }
        let start = (offset % (self.held.len() - PATTERN_BYTES) as u64) as usize;
        Ok(ReadData::Shared(self.held.subslice(start..start + len)))
    }

    fn write(&self, _file: HandleRef, write: &FileWrite<'_>, _caller: &FsCaller<'_>) -> FsResult<usize> {
        Ok(write.data.len())
    }

    fn create(
        &self,
        _parent: u64,
        _name: &[u8],
        _how: CreateMode,
        _caller: &FsCaller<'_>,
        _kernel: &KernelSide<'_>,
    ) -> FsResult<(FileEntry, OpenedFile)> {
        let ino = self.made.fetch_add(1, Ordering::Relaxed) + 1;
        // As where a source has the locks: each close is a request.
        let opened = OpenedFile { flush: true, direct_io: true, ..OpenedFile::default() };
        Ok((self.entry_of(ino)?, opened))
    }

    fn flush(&self, _file: HandleRef, _lock_owner: u64, _caller: &FsCaller<'_>) -> FsResult<()> {
        Ok(())
    }

    fn readdir(
        &self,
        read: &DirRead,
        _caller: &FsCaller<'_>,
        take: &mut dyn FnMut(&ListedEntry<'_>) -> bool,
    ) -> FsResult<()> {
        let names: [(&[u8], u64); 3] = [(b".", ROOT), (b"..", ROOT), (b"data", DATA_INO)];
        for (next, (name, ino)) in (1..).zip(names).skip(read.from as usize) {
            let file_type = self.attr_of(ino)?.mode;
            let entry = if read.plus && ino == DATA_INO { Some(self.entry_of(ino)?) } else { None };
            if !take(&ListedEntry { name, next, ino, file_type, entry }) {
                break;
            }
        }
        Ok(())
    }

    fn statfs(&self) -> FsResult<SourceSpace> {
        Ok(SourceSpace {
            block_size: 4096,
            blocks: self.size.div_ceil(4096),
            blocks_free: 0,
            blocks_available: 0,
            files: 2,
            files_free: 0,
            name_max: 255,
        })
    }
}
