//! The file of a part: the bytes, a CRC32C of each chunk, and a footer. Bytes go past the page cache where the file system permits that:
//! most of the time of a write is the first touch of memory there, and no byte is read twice. Knows no records.

use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes with a checksum of their own.
pub(super) const PART_CHUNK: u64 = 256 << 10;
const PART_MAGIC: &[u8; 8] = b"SPLSTG01";
/// Length of the bytes, checksum of the table and the length, magic.
const FOOTER: u64 = 8 + 4 + 8;
/// Bytes of a read or a write; a multiple of [`PART_CHUNK`].
const TRANSFER_LEN: usize = 1 << 20;
/// The alignment of memory, places and lengths past the page cache.
const DIRECT_ALIGN: usize = 4096;
/// Buffers that are kept for later parts.
const BUFFERS_KEPT: usize = 16;

/// The failure of a call to the disk.
pub(super) fn disk_error(path: &Path, error: &std::io::Error) -> Error {
    let kind = match error.kind() {
        std::io::ErrorKind::NotFound => ErrorKind::NotFound,
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => ErrorKind::NoSpace,
        _ => ErrorKind::Io(error.raw_os_error().unwrap_or(5)),
    };
    Error::new(kind, format!("{}: {error}", path.display()))
}

/// Makes the names of a folder durable.
pub(super) fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(|error| disk_error(folder, &error))
}

/// Aligned memory for a read or a write.
struct TransferBuffer {
    memory: Vec<u8>,
    /// Where the aligned bytes begin.
    start: usize,
}

impl TransferBuffer {
    fn new() -> TransferBuffer {
        let memory = vec![0; TRANSFER_LEN + DIRECT_ALIGN];
        let start = memory.as_ptr().align_offset(DIRECT_ALIGN);
        TransferBuffer { memory, start }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + TRANSFER_LEN]
    }
}

/// Buffers that no part uses now.
#[derive(Default)]
pub(super) struct TransferBuffers(Mutex<Vec<TransferBuffer>>);

impl TransferBuffers {
    fn take(self: &Arc<Self>) -> HeldBuffer {
        let buffer = self.0.lock().pop().unwrap_or_else(TransferBuffer::new);
        HeldBuffer { buffer: Some(buffer), buffers: Arc::clone(self) }
    }
}

/// A buffer in use, returned when dropped.
struct HeldBuffer {
    buffer: Option<TransferBuffer>,
    buffers: Arc<TransferBuffers>,
}

impl HeldBuffer {
    fn bytes(&mut self) -> &mut [u8] {
        self.buffer.get_or_insert_with(TransferBuffer::new).bytes()
    }
}

impl Drop for HeldBuffer {
    fn drop(&mut self) {
        let mut kept = self.buffers.0.lock();
        if kept.len() < BUFFERS_KEPT {
            kept.extend(self.buffer.take());
        }
    }
}

/// Opens a file past the page cache; false where the file system does not permit that.
fn open_direct(options: &mut OpenOptions, path: &Path) -> io::Result<(File, bool)> {
    match options.custom_flags(spurline_sys::O_DIRECT as i32).open(path) {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => Ok((options.custom_flags(0).open(path)?, false)),
        opened => Ok((opened?, true)),
    }
}

/// A part that is read.
pub(super) struct OpenPart {
    path: PathBuf,
    /// Past the page cache, if possible.
    bytes: File,
    pub len: u64,
    table: Vec<u8>,
    buffers: Arc<TransferBuffers>,
}

impl OpenPart {
    pub fn open(path: &Path, buffers: &Arc<TransferBuffers>) -> Result<OpenPart> {
        let read = File::open(path).and_then(|file| {
            let size = file.metadata()?.len();
            let mut footer = [0; FOOTER as usize];
            file.read_exact_at(&mut footer, size.saturating_sub(FOOTER))?;
            let (len, rest) = footer.split_at(8);
            let len = u64::from_le_bytes(len.try_into().unwrap_or_default());
            let table_len = len.div_ceil(PART_CHUNK) * 4;
            if rest[4..] != *PART_MAGIC || len + table_len + FOOTER != size {
                return Ok(None);
            }
            let mut table = vec![0; table_len as usize];
            file.read_exact_at(&mut table, len)?;
            let sum = crc32c::crc32c_append(crc32c::crc32c(&table), &footer[..8]);
            if rest[..4] != sum.to_le_bytes() {
                return Ok(None);
            }
            let (bytes, _) = open_direct(OpenOptions::new().read(true), path)?;
            Ok(Some(OpenPart { path: path.to_owned(), bytes, len, table, buffers: Arc::clone(buffers) }))
        });
        read.map_err(|error| disk_error(path, &error))?
            .ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("{}: its checksums are damaged", path.display())))
    }

    /// Reads the chunks around these bytes.
    pub fn read(&self, from: u64, out: &mut [u8]) -> Result<()> {
        let end = from + out.len() as u64;
        if end > self.len {
            let why =
                format!("{} has {} bytes of a part, and {from} to {end} were asked for", self.path.display(), self.len);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let mut buffer = self.buffers.take();
        let mut at = from;
        while at < end {
            let start = at / PART_CHUNK * PART_CHUNK;
            let whole = end.next_multiple_of(PART_CHUNK).min(self.len) - start;
            let len = whole.min(TRANSFER_LEN as u64) as usize;
            let bytes = buffer.bytes();
            self.read_whole(&mut bytes[..len.next_multiple_of(DIRECT_ALIGN)], len, start)?;
            self.check(&bytes[..len], start)?;
            let until = end.min(start + len as u64);
            out[(at - from) as usize..(until - from) as usize]
                .copy_from_slice(&bytes[(at - start) as usize..(until - start) as usize]);
            at = until;
        }
        Ok(())
    }

    /// Reads at least `len` bytes: the last page of the file may be longer than these, or shorter than the buffer.
    fn read_whole(&self, buffer: &mut [u8], len: usize, start: u64) -> Result<()> {
        let mut done = 0;
        while done < len {
            match self.bytes.read_at(&mut buffer[done..], start + done as u64) {
                Ok(0) => return Err(Error::new(ErrorKind::Corrupt, format!("{} is too short", self.path.display()))),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(disk_error(&self.path, &error)),
            }
        }
        Ok(())
    }

    /// Compares the checksums of chunks.
    fn check(&self, bytes: &[u8], start: u64) -> Result<()> {
        let first = (start / PART_CHUNK) as usize;
        for (index, chunk) in bytes.chunks(PART_CHUNK as usize).enumerate() {
            let sum = self.table.get((first + index) * 4..(first + index + 1) * 4);
            if sum != Some(&crc32c::crc32c(chunk).to_le_bytes()[..]) {
                let why = format!(
                    "{}: the bytes from {} have another checksum than they were written with",
                    self.path.display(),
                    start + index as u64 * PART_CHUNK
                );
                return Err(Error::new(ErrorKind::Corrupt, why));
            }
        }
        Ok(())
    }
}

/// A part file that is being written, under another name.
pub(super) struct NewPart {
    file: File,
    is_direct: bool,
    new: PathBuf,
    path: PathBuf,
    len: u64,
    table: Vec<u8>,
    /// Checksum of the chunk that is not full.
    sum: u32,
    buffer: HeldBuffer,
    /// Bytes in the buffer, and bytes in the file.
    filled: usize,
    written: u64,
}

impl NewPart {
    pub fn create(path: PathBuf, buffers: &Arc<TransferBuffers>) -> Result<NewPart> {
        let new = path.with_extension("new");
        let opened = open_direct(OpenOptions::new().write(true).create(true).truncate(true), &new);
        let (file, is_direct) = opened.map_err(|error| disk_error(&new, &error))?;
        let buffer = buffers.take();
        Ok(NewPart { file, is_direct, new, path, len: 0, table: Vec::new(), sum: 0, buffer, filled: 0, written: 0 })
    }

    fn note_sums(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = (PART_CHUNK - self.len % PART_CHUNK) as usize;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.sum = crc32c::crc32c_append(self.sum, now);
            self.len += now.len() as u64;
            if self.len.is_multiple_of(PART_CHUNK) {
                self.table.extend_from_slice(&std::mem::take(&mut self.sum).to_le_bytes());
            }
            bytes = later;
        }
    }

    fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = &mut self.buffer.bytes()[self.filled..];
            let (now, later) = bytes.split_at(room.len().min(bytes.len()));
            room[..now.len()].copy_from_slice(now);
            self.filled += now.len();
            if self.filled == TRANSFER_LEN {
                self.write_buffer()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Writes the buffer, which is padded past the page cache: the end of the file is cut off later.
    fn write_buffer(&mut self) -> io::Result<()> {
        let padded = if self.is_direct { self.filled.next_multiple_of(DIRECT_ALIGN) } else { self.filled };
        let bytes = self.buffer.bytes();
        bytes[self.filled..padded].fill(0);
        match self.file.write_all_at(&bytes[..padded], self.written) {
            // The device wants another alignment.
            Err(error) if self.is_direct && error.kind() == io::ErrorKind::InvalidInput => {
                self.file = OpenOptions::new().write(true).open(&self.new)?;
                self.is_direct = false;
                self.file.write_all_at(&bytes[..self.filled], self.written)?;
            }
            written => written?,
        }
        self.written += self.filled as u64;
        self.filled = 0;
        Ok(())
    }

    /// Adds bytes.
    pub fn add(&mut self, bytes: &[u8]) -> Result<()> {
        self.note_sums(bytes);
        self.put(bytes).map_err(|error| disk_error(&self.new, &error))
    }

    /// The part is complete, and durable when this returns.
    pub fn end(mut self) -> Result<()> {
        self.close().map_err(|error| disk_error(&self.path, &error))?;
        self.path.parent().map_or(Ok(()), sync_folder)
    }

    fn close(&mut self) -> io::Result<()> {
        if !self.len.is_multiple_of(PART_CHUNK) {
            self.table.extend_from_slice(&self.sum.to_le_bytes());
        }
        let len = self.len.to_le_bytes();
        let sum = crc32c::crc32c_append(crc32c::crc32c(&self.table), &len);
        let footer = [&self.table[..], &len, &sum.to_le_bytes(), PART_MAGIC].concat();
        self.put(&footer)?;
        if self.filled > 0 {
            self.write_buffer()?;
        }
        if self.is_direct {
            self.file.set_len(self.written)?;
        }
        self.file.sync_all()?;
        std::fs::rename(&self.new, &self.path)
    }
}

impl Drop for NewPart {
    fn drop(&mut self) {
        // Absent after the end.
        let _ = std::fs::remove_file(&self.new);
    }
}
