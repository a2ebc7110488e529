//! The index log of one disk as a file: appending to it, reading it back at start, rewriting it when most of it
//! is garbage. It writes what it is given and knows no index.
//!
//! Appends go to a known offset that moves only when the whole piece was written, so a torn append is overwritten by
//! the next. A rewrite goes to a second file that takes the first one's place by rename; what is appended while
//! it is written goes to both.

use crate::io::DiskIo;
use crate::log;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const NAME: &str = "index";
const NEW: &str = "index.new";

/// An open index log.
pub struct Journal {
    root: PathBuf,
    file: File,
    len: u64,
    /// Records in the file.
    pub records: u64,
    /// What was appended since a rewrite began.
    side: Option<(Vec<u8>, u64)>,
}

/// A file mapped for reading.
struct Mapping {
    ptr: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn new(file: &File, len: usize) -> io::Result<Mapping> {
        // SAFETY: a private read-only mapping of a file at an address of the kernel's choice.
        let ptr = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ,
                libc::MAP_PRIVATE | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if ptr == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Mapping { ptr, len })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is `len` bytes long and lives as long as `self`. The directory's lock keeps other
        // stores from cutting the file meanwhile.
        unsafe { std::slice::from_raw_parts(self.ptr.cast(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` and nothing borrows from it any more.
        unsafe { libc::munmap(self.ptr, self.len) };
    }
}

impl Journal {
    /// Opens the log in `root`, making one if there is none, and calls `f` with every whole record. A torn tail is
    /// cut off; a file that is no log for this block size starts anew, and the blocks it named are orphans.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(root: &Path, block_size: u32, mut f: impl FnMut(log::Record<'_>)) -> io::Result<Journal> {
        let _ = std::fs::remove_file(root.join(NEW));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(root.join(NAME))?;
        let size = file.metadata()?.len();
        let mut journal = Journal { root: root.into(), file, len: log::HEADER as u64, records: 0, side: None };
        if size > log::HEADER as u64 {
            let mapping = Mapping::new(&journal.file, size as usize)?;
            let bytes = mapping.bytes();
            if log::has_header(bytes, block_size) {
                let end = log::replay(&bytes[log::HEADER..], |record| {
                    journal.records += 1;
                    f(record);
                });
                journal.len += end as u64;
            } else {
                tracing::warn!("{}: the index log has no valid header; its cache starts empty", root.display());
            }
        }
        if journal.len < size {
            tracing::info!(
                "{}: cut {} bytes of unfinished records off the index log",
                root.display(),
                size - journal.len
            );
            journal.file.set_len(journal.len)?;
        }
        if journal.len == log::HEADER as u64 {
            journal.file.write_all_at(&log::header(block_size), 0)?;
        }
        Ok(journal)
    }

    /// Appends whole records.
    ///
    /// # Errors
    /// What the system says; then nothing counts as appended.
    pub fn append(&mut self, io: &dyn DiskIo, bytes: &[u8], records: u64) -> io::Result<()> {
        io.append(&self.file, self.len, bytes)?;
        self.len += bytes.len() as u64;
        self.records += records;
        if let Some((side, n)) = &mut self.side {
            side.extend_from_slice(bytes);
            *n += records;
        }
        Ok(())
    }

    /// Starts a rewrite: from here on appends are remembered for the new file too.
    pub fn begin_rewrite(&mut self) {
        self.side = Some((Vec::new(), 0));
    }

    /// Gives a rewrite up.
    pub fn abandon_rewrite(&mut self) {
        self.side = None;
    }

    /// Puts `new`, which has `records` records in `len` bytes, in the place of the log, followed by what was
    /// appended since the rewrite began.
    ///
    /// # Errors
    /// What the system says; then the old log goes on.
    pub fn finish_rewrite(&mut self, new: File, len: u64, records: u64) -> io::Result<()> {
        let Some((side, more)) = self.side.take() else { return Ok(()) };
        new.write_all_at(&side, len)?;
        // The rename must not reach the disk before the bytes do.
        new.sync_data()?;
        std::fs::rename(self.root.join(NEW), self.root.join(NAME))?;
        (self.file, self.len, self.records) = (new, len + side.len() as u64, records + more);
        Ok(())
    }

    /// An empty file for a rewrite.
    ///
    /// # Errors
    /// What the system says.
    pub fn new_file(root: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(root.join(NEW))
    }
}
