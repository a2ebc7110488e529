//! The raw operations on the files of a cache disk, as a trait, so that a test can substitute a disk that fails, hangs, corrupts
//! or tears. Knows nothing of blocks, indexes or checksums.

mod faulty;
mod real;
mod ring;

pub use faulty::{DiskFault, FaultyDisk};
pub use real::RealDisk;
pub use ring::RingSet;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Alignment of offsets, lengths and memory for O_DIRECT: at least every device's logical block.
pub const ALIGN: usize = 4096;

/// Memory that a disk read may target, and that can be held beyond the read if the disk does not answer in time.
///
/// # Safety
/// The memory that `raw_parts` names stays valid for writes until the next call on the buffer. After `keep_alive` that memory
/// stays valid and untouched until the returned box is dropped.
pub unsafe trait IoBuf {
    /// First byte and capacity in bytes. O_DIRECT requires the first byte aligned to 4096 and a capacity that holds
    /// the range rounded up to 4096; other buffers are filled through a copy.
    fn raw_parts(&mut self) -> (*mut u8, usize);
    /// Called when the disk missed its deadline and may still write into the memory. The returned box owns the memory
    /// until the late operation ends; the caller's read is `Lost`.
    fn keep_alive(&mut self) -> Box<dyn Send>;
}

// SAFETY: a pool buffer never moves and owns a part of the arena until dropped; `keep_alive` passes on the whole.
unsafe impl IoBuf for Option<spurline_mem::PoolBuf> {
    fn raw_parts(&mut self) -> (*mut u8, usize) {
        self.as_ref().map_or((std::ptr::null_mut(), 0), |buf| (buf.as_ptr(), buf.footprint()))
    }
    fn keep_alive(&mut self) -> Box<dyn Send> {
        Box::new(self.take())
    }
}

// SAFETY: the memory above a fill's mark belongs to the fill alone, and the returned block owns that memory. The owner of a fill
// that lost the buffer this way fails the fill, so no reader gets the block.
unsafe impl IoBuf for spurline_mem::BlockFill {
    fn raw_parts(&mut self) -> (*mut u8, usize) {
        self.spare_parts()
    }
    fn keep_alive(&mut self) -> Box<dyn Send> {
        Box::new(self.block())
    }
}

/// The target of a read: `len` bytes at `ptr`, owned by the box that `keep` returns.
pub struct ReadTarget<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) keep: &'a mut dyn FnMut() -> Box<dyn Send>,
}

/// An open file of a cache disk.
#[derive(Debug)]
pub struct DataFile {
    /// The descriptor, open for reading and writing.
    pub file: File,
    /// Whether opened with O_DIRECT.
    pub direct: bool,
}

/// Space of a file system in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DiskSpace {
    /// Total size.
    pub total: u64,
    /// What this process may still write.
    pub free: u64,
}

/// Whether an error comes from this process or host (no descriptors, no memory, interrupted) and says nothing about the disk.
/// io_uring answers `ECANCELED` without a thread for an operation.
pub fn is_process_error(error: &io::Error) -> bool {
    use libc::{EAGAIN, ECANCELED, EINTR, EMFILE, ENFILE, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOMEM | EINTR | EAGAIN | ECANCELED))
}

/// Whether an error means that the file system, or a quota, is full: not a fault of the disk either.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// [`DiskIo::create`] by opening and writing.
fn create_in_steps<D: DiskIo + ?Sized>(
    disk: &D,
    path: &Path,
    padded: &[u8],
    len: usize,
    timeout: Duration,
) -> io::Result<()> {
    let file = disk.open(path, true, timeout)?;
    disk.write(&file, 0, if file.direct { padded } else { &padded[..len] }, timeout)
}

/// Operations on the files of a disk. Each may fail; an operation with a `timeout` ends then with [`io::ErrorKind::TimedOut`].
pub trait DiskIo: Send + Sync {
    /// Opens a data file for reading and writing; `create` creates a missing file.
    ///
    /// # Errors
    /// The system's error, or `TimedOut`.
    fn open(&self, path: &Path, create: bool, timeout: Duration) -> io::Result<DataFile>;

    /// Opens a data file for reading through the page cache.
    ///
    /// # Errors
    /// As [`DiskIo::open`].
    fn open_to_share(&self, path: &Path, timeout: Duration) -> io::Result<File>;

    /// Creates a data file with the first `len` bytes of `padded`, which is aligned to 4096 in address and length.
    ///
    /// # Errors
    /// As [`DiskIo::open`] and [`DiskIo::write`].
    fn create(&self, path: &Path, padded: &[u8], len: usize, timeout: Duration) -> io::Result<()> {
        create_in_steps(self, path, padded, len, timeout)
    }

    /// Reads into `target` from `offset` and returns the number of bytes, fewer than requested only at the file's end. `done` is
    /// called with each filled part of the target, in any order, so that a part can be checked while another is read.
    ///
    /// # Errors
    /// The system's error. With `TimedOut`, `keep` has taken a target that was still being written.
    fn read(
        &self,
        file: &DataFile,
        offset: u64,
        target: &mut ReadTarget<'_>,
        timeout: Duration,
        done: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<usize>;

    /// Writes all of `data` at `offset`. With an O_DIRECT file all three are aligned.
    ///
    /// # Errors
    /// The system's error, or `TimedOut`: then the disk may still write the contents of `data` later.
    fn write(&self, file: &DataFile, offset: u64, data: &[u8], timeout: Duration) -> io::Result<()>;

    /// Frees the space of a range, which reads as zeros afterwards.
    ///
    /// # Errors
    /// The system's error, or `TimedOut`: the operation may still happen later.
    fn punch(&self, file: &DataFile, offset: u64, len: u64, timeout: Duration) -> io::Result<()>;

    /// Sets the length of a data file.
    ///
    /// # Errors
    /// The system's error, or `TimedOut`: the operation may still happen later.
    fn truncate(&self, file: &DataFile, len: u64, timeout: Duration) -> io::Result<()>;

    /// Removes a data file.
    ///
    /// # Errors
    /// The system's error, or `TimedOut`: the operation may still happen later.
    fn unlink(&self, path: &Path, timeout: Duration) -> io::Result<()>;

    /// Writes a piece of the index log at `offset`.
    ///
    /// # Errors
    /// The system's error; part of the piece may be written.
    fn append(&self, log: &File, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Syncs the index log.
    ///
    /// # Errors
    /// The system's error, or `TimedOut`.
    fn sync(&self, log: &File, timeout: Duration) -> io::Result<()>;

    /// Queries the space of the file system.
    fn disk_space(&self, path: &Path) -> io::Result<DiskSpace>;

    /// Number of operations that missed their deadline and have not ended. Until then the disk is not used.
    fn late_count(&self) -> usize;
}
