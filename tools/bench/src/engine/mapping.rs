//! A file in the address space, as loaders of models map files: pages arrive by page faults. Knows no tensors.
#![allow(unsafe_code, reason = "a mapping of a file, which no library in use has")]

use crate::error::{BenchError, Result};
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::Path;

/// A file that is mapped for reading.
pub struct FileMapping {
    start: *const u8,
    len: usize,
}

// SAFETY: the pages are only read, by any thread.
unsafe impl Send for FileMapping {}
// SAFETY: as above.
unsafe impl Sync for FileMapping {}

impl FileMapping {
    /// Maps a whole file, which is not empty.
    pub fn open(path: &Path) -> Result<FileMapping> {
        let file = File::open(path).map_err(|error| mapping_error(path, &error))?;
        let len = file.metadata().map_err(|error| mapping_error(path, &error))?.len() as usize;
        // SAFETY: a new mapping of an open file at an address that the kernel chooses.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_PRIVATE, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(mapping_error(path, &std::io::Error::last_os_error()));
        }
        Ok(FileMapping { start: start.cast(), len })
    }

    /// Copies bytes out of the mapping.
    ///
    /// # Panics
    /// Past the end of the file.
    pub fn copy_to(&self, at: usize, dst: &mut [u8]) {
        assert!(at <= self.len && dst.len() <= self.len - at, "a range of the file");
        // SAFETY: inside of the mapping, as checked above; `dst` is other memory. The file is not cut while it is mapped: a
        // file of this program, or of a mount, whose files have no other version.
        unsafe { std::ptr::copy_nonoverlapping(self.start.add(at), dst.as_mut_ptr(), dst.len()) }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and not used any more.
        unsafe { libc::munmap(self.start.cast_mut().cast(), self.len) };
    }
}

fn mapping_error(path: &Path, error: &std::io::Error) -> BenchError {
    BenchError::io(format_args!("{} can't be mapped", path.display()), error)
}
