//! The changed bytes of an open file of a bucket, in a local file without a name, above the object that they change. It
//! knows no request and no name.

use super::byte_ranges::ByteRanges;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

/// The part of a read that the object has.
pub(super) type ReadObject<'a> = dyn Fn(u64, &mut [u8]) -> Result<()> + 'a;

/// The space for changed bytes of all files.
pub(super) struct StagingSpace {
    max: u64,
    used: Mutex<u64>,
}

impl StagingSpace {
    /// At most `max` bytes.
    pub fn new(max: u64) -> StagingSpace {
        StagingSpace { max, used: Mutex::new(0) }
    }

    /// # Errors
    /// `NoSpace`.
    fn take(&self, bytes: u64) -> Result<()> {
        let mut used = self.used.lock();
        if bytes > self.max.saturating_sub(*used) {
            let why = format!(
                "the changed bytes of files lie in memory, and {} bytes are the most: give the mount a disk (--cache-dir, \
                 --cache-size), or more memory (--buffer-size)",
                self.max
            );
            return Err(Error::new(ErrorKind::NoSpace, why));
        }
        *used += bytes;
        Ok(())
    }

    fn give_back(&self, bytes: u64) {
        *self.used.lock() -= bytes;
    }
}

/// The bytes of a file as the mount's programs see them: changed ones here, others in the object, and zeros.
pub(super) struct StagedBytes {
    file: File,
    changed: ByteRanges,
    len: u64,
    /// The object's bytes count up to here: a file that was cut keeps nothing behind its end.
    object_len: u64,
    space: Arc<StagingSpace>,
}

impl Drop for StagedBytes {
    fn drop(&mut self) {
        self.space.give_back(self.changed.len());
    }
}

impl StagedBytes {
    /// The bytes of an object of this length, in an empty `file`.
    pub fn over_object(file: File, object_len: u64, space: Arc<StagingSpace>) -> StagedBytes {
        StagedBytes { file, changed: ByteRanges::default(), len: object_len, object_len, space }
    }

    pub fn len(&self) -> u64 {
        self.len
    }

    /// # Errors
    /// The local file system's, as when it is full.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        let range = offset..offset + data.len() as u64;
        let added = self.changed.missing_in(range.clone());
        self.space.take(added)?;
        if let Err(error) = self.file.write_all_at(data, offset) {
            self.space.give_back(added);
            return Err(Error::io("writing the changed bytes of a file into the cache directory", &error));
        }
        self.len = self.len.max(range.end);
        self.changed.insert(range);
        Ok(())
    }

    /// Cuts the file, or lengthens it by zeros.
    ///
    /// # Errors
    /// The local file system's.
    pub fn set_len(&mut self, len: u64) -> Result<()> {
        if len < self.len {
            let before = self.changed.len();
            self.changed.cut(len);
            self.space.give_back(before - self.changed.len());
            self.object_len = self.object_len.min(len);
            // Frees the space. Bytes that are written there later are marked as changed again.
            self.file.set_len(len).map_err(|e| Error::io("cutting the changed bytes of a file", &e))?;
        }
        self.len = len;
        Ok(())
    }

    /// Makes a range read as zeros.
    ///
    /// # Errors
    /// The local file system's.
    pub fn clear(&mut self, range: Range<u64>) -> Result<()> {
        const PIECE: usize = 64 << 10;
        let zeros = vec![0; PIECE.min((range.end - range.start) as usize)];
        let mut at = range.start;
        while at < range.end {
            let len = zeros.len().min((range.end - at) as usize);
            self.write(at, &zeros[..len])?;
            at += len as u64;
        }
        Ok(())
    }

    /// Whether all bytes of a range were changed.
    pub fn is_changed(&self, range: Range<u64>) -> bool {
        self.changed.covers(range)
    }

    /// Whether the object has all bytes of a range.
    pub fn is_of_object(&self, range: Range<u64>) -> bool {
        range.end <= self.object_len && !self.changed.meets(range)
    }

    /// Fills `dst` from `offset`, up to the end of the file; returns the number of bytes.
    ///
    /// # Errors
    /// The local file system's, and those of `read_object`.
    pub fn read(&self, offset: u64, dst: &mut [u8], read_object: &ReadObject<'_>) -> Result<usize> {
        let count = self.len.saturating_sub(offset).min(dst.len() as u64);
        let end = offset + count;
        let mut at = offset;
        while at < end {
            let (is_changed, piece_end) = self.changed.piece_at(at);
            let is_of_object = !is_changed && at < self.object_len;
            let limit = if is_of_object { self.object_len } else { u64::MAX };
            let piece_end = piece_end.min(limit).min(end);
            let piece = &mut dst[(at - offset) as usize..(piece_end - offset) as usize];
            if is_changed {
                self.file.read_exact_at(piece, at).map_err(|e| Error::io("reading the changed bytes of a file", &e))?;
            } else if is_of_object {
                read_object(at, piece)?;
            } else {
                piece.fill(0);
            }
            at = piece_end;
        }
        Ok(count as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_lie_over_the_object_and_a_cut_forgets() {
        let object = *b"0123456789";
        let read_object = |at: u64, dst: &mut [u8]| {
            dst.copy_from_slice(&object[at as usize..at as usize + dst.len()]);
            Ok(())
        };
        let mut staged = StagedBytes::over_object(tempfile::tempfile().unwrap(), 10, Arc::new(StagingSpace::new(14)));
        let text = |staged: &StagedBytes| {
            let mut bytes = vec![b'?'; 40];
            let len = staged.read(0, &mut bytes, &read_object).unwrap();
            String::from_utf8(bytes[..len].to_vec()).unwrap().replace('\0', ".")
        };
        assert_eq!(text(&staged), "0123456789");
        staged.write(3, b"abc").unwrap();
        assert_eq!(text(&staged), "012abc6789");
        assert!(staged.is_changed(3..6) && staged.is_of_object(6..10) && !staged.is_of_object(5..7));
        staged.set_len(5).unwrap();
        staged.set_len(8).unwrap();
        assert_eq!(text(&staged), "012ab...");
        staged.write(12, b"z").unwrap();
        assert_eq!(text(&staged), "012ab.......z");
        staged.clear(1..4).unwrap();
        assert_eq!(text(&staged), "0...b.......z");
        // Zeros between changed bytes take no space: 0 to 5, and 12.
        assert_eq!(staged.write(20, &[1; 10]).unwrap_err().kind(), ErrorKind::NoSpace);
        staged.write(13, &[1; 8]).unwrap();
        staged.set_len(13).unwrap();
        staged.write(13, &[1; 8]).unwrap();
        staged.set_len(13).unwrap();
        let mut few = [0; 2];
        assert_eq!(staged.read(12, &mut few, &read_object).unwrap(), 1);
    }
}
