//! Raw operations on the files of one cache disk, as a trait, so that a test can put a disk that fails, hangs,
//! corrupts or tears in the place of a real one. Knows nothing of blocks, indexes or checksums.

mod faulty;
mod real;
mod ring;

pub use faulty::{Fault, FaultyDisk};
pub use real::RealDisk;
pub use ring::Rings;

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Alignment of offsets, lengths and memory that O_DIRECT is given: at least every device's logical block.
pub const ALIGN: usize = 4096;

/// Memory a read from disk may go to, and that can be held beyond the read if the disk does not answer in time.
///
/// # Safety
/// The memory `parts` names stays valid for writes until the next call that takes the buffer apart; after
/// `keep` it stays so, untouched by anyone, until the box `keep` gave is dropped.
pub unsafe trait IoBuf {
    /// First byte and capacity in bytes. O_DIRECT wants the first byte on 4096 and a capacity that holds the
    /// range rounded up to 4096; a buffer that is not so is served by way of another.
    fn parts(&mut self) -> (*mut u8, usize);
    /// Called once the disk missed its deadline while it may still write into the memory: what is given keeps
    /// the memory until the late answer came. The caller gets the outcome "lost".
    fn keep(&mut self) -> Box<dyn Send>;
}

// SAFETY: a pool buffer never moves and owns its part of the arena until dropped; `keep` hands it over whole.
unsafe impl IoBuf for Option<spurline_mem::Buf> {
    fn parts(&mut self) -> (*mut u8, usize) {
        self.as_ref().map_or((std::ptr::null_mut(), 0), |buf| (buf.as_ptr(), buf.footprint()))
    }
    fn keep(&mut self) -> Box<dyn Send> {
        Box::new(self.take())
    }
}

// SAFETY: what is above a fill's mark is the fill's alone, and the block it gives to keep owns that memory; a fill
// that lost its buffer this way is failed by its owner, so nobody else gets the block.
unsafe impl IoBuf for spurline_mem::Fill {
    fn parts(&mut self) -> (*mut u8, usize) {
        self.spare_parts()
    }
    fn keep(&mut self) -> Box<dyn Send> {
        Box::new(self.block())
    }
}

/// Where a read goes: `len` bytes at `ptr`, which belong to what `keep` gives.
pub struct Target<'a> {
    pub(crate) ptr: *mut u8,
    pub(crate) len: usize,
    pub(crate) keep: &'a mut dyn FnMut() -> Box<dyn Send>,
}

/// An open file of a cache disk.
#[derive(Debug)]
pub struct OpenFile {
    /// The descriptor, open for reading and writing.
    pub file: File,
    /// Whether it was opened with O_DIRECT.
    pub direct: bool,
}

/// Space of a file system in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Space {
    /// All there is.
    pub total: u64,
    /// What this process may still write.
    pub free: u64,
}

/// Whether an error tells of this process or its host, out of descriptors or memory or called away, and nothing of the disk.
/// `ECANCELED` is what io_uring answers when it can't have a thread for an operation.
pub fn is_own(error: &io::Error) -> bool {
    use libc::{EAGAIN, ECANCELED, EINTR, EMFILE, ENFILE, ENOMEM};
    matches!(error.raw_os_error(), Some(EMFILE | ENFILE | ENOMEM | EINTR | EAGAIN | ECANCELED))
}

/// Whether an error says that the file system, or a quota of it, has no room: no fault of the disk either.
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

/// Operations on the files of one disk. Every one may fail; those that are given a `timeout` give up after it with
/// [`io::ErrorKind::TimedOut`].
pub trait DiskIo: Send + Sync {
    /// Opens a data file for reading and writing; `create` makes it if it is missing.
    ///
    /// # Errors
    /// What the system says, or `TimedOut`.
    fn open(&self, path: &Path, create: bool, timeout: Duration) -> io::Result<OpenFile>;

    /// Opens a data file for reading through the page cache.
    ///
    /// # Errors
    /// As [`DiskIo::open`].
    fn open_to_share(&self, path: &Path, timeout: Duration) -> io::Result<File>;

    /// Makes a data file that begins with the first `len` bytes of `padded`, which starts on 4096 and is as long as a
    /// multiple of it, and closes it.
    ///
    /// # Errors
    /// As [`DiskIo::open`] and [`DiskIo::write`].
    fn create(&self, path: &Path, padded: &[u8], len: usize, timeout: Duration) -> io::Result<()> {
        create_in_steps(self, path, padded, len, timeout)
    }

    /// Reads into `target` from `offset` and gives the number of bytes, fewer than asked only at the file's end.
    /// `done` is called with each part of the target as it fills, in any order, so that checking one part goes
    /// on while another is still read.
    ///
    /// # Errors
    /// What the system says. With `TimedOut` the target was taken by `keep` if it was still being written.
    fn read(
        &self,
        file: &OpenFile,
        offset: u64,
        target: &mut Target<'_>,
        timeout: Duration,
        done: &mut dyn FnMut(Range<usize>),
    ) -> io::Result<usize>;

    /// Writes all of `data` at `offset`. With an O_DIRECT file all three are aligned.
    ///
    /// # Errors
    /// What the system says, or `TimedOut`: then the disk may still write what stands in `data` later on.
    fn write(&self, file: &OpenFile, offset: u64, data: &[u8], timeout: Duration) -> io::Result<()>;

    /// Gives the space of a range back to the file system; the range reads as zeros afterwards.
    ///
    /// # Errors
    /// What the system says, or `TimedOut`: then it may happen later on.
    fn punch(&self, file: &OpenFile, offset: u64, len: u64, timeout: Duration) -> io::Result<()>;

    /// Cuts or extends a data file.
    ///
    /// # Errors
    /// What the system says, or `TimedOut`: then it may happen later on.
    fn truncate(&self, file: &OpenFile, len: u64, timeout: Duration) -> io::Result<()>;

    /// Removes a data file.
    ///
    /// # Errors
    /// What the system says, or `TimedOut`: then it may happen later on.
    fn unlink(&self, path: &Path, timeout: Duration) -> io::Result<()>;

    /// Writes a piece of the index log at `offset`.
    ///
    /// # Errors
    /// What the system says; part of the piece may be written.
    fn append(&self, log: &File, offset: u64, data: &[u8]) -> io::Result<()>;

    /// Sees to it that what was appended to the index log is on the disk.
    ///
    /// # Errors
    /// What the system says, or `TimedOut`.
    fn sync(&self, log: &File, timeout: Duration) -> io::Result<()>;

    /// How much room the file system has.
    ///
    /// # Errors
    /// What the system says.
    fn space(&self, path: &Path) -> io::Result<Space>;

    /// How many operations missed their deadline and have not ended yet. While there is one, the disk is not used.
    fn late(&self) -> usize;
}
