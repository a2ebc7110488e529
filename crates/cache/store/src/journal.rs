//! The index log of a disk as a file: append, read back at start, rewrite when most is garbage. Writes opaque records and knows
//! no index.
//!
//! Appends go to a known offset that moves only when the whole piece was written, so a torn append is overwritten by
//! the next. A rewrite goes to a second file that replaces the first by rename; records appended meanwhile go to
//! both.

use crate::io::DiskIo;
use crate::log;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub const LOG_NAME: &str = "index";
pub const NEW_LOG_NAME: &str = "index.new";

/// An open index log.
pub struct IndexJournal {
    root: PathBuf,
    log_file: File,
    len: u64,
    /// Records in the file.
    pub records: u64,
    /// Records appended since a rewrite began, and how many.
    appended_since: Option<(Vec<u8>, u64)>,
}

/// Bytes of the log read at a time at start.
const READ_PIECE: usize = 1 << 20;

/// Calls `f` with every whole record of a log, which `read` reads from an offset. Returns the offset behind the last record, and
/// the error at the end, if any.
fn replay_file(
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    mut f: impl FnMut(log::LogRecord<'_>),
) -> (u64, Option<io::Error>) {
    let mut buffer = vec![0; READ_PIECE];
    let mut at = log::HEADER as u64;
    let mut filled = 0;
    loop {
        let n = match read(&mut buffer[filled..], at + filled as u64) {
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return (at, Some(error)),
        };
        filled += n;
        let used = log::replay_records(&buffer[..filled], &mut f);
        buffer.copy_within(used..filled, 0);
        at += used as u64;
        filled -= used;
        // This many bytes contain a whole record, unless the log ends here.
        if n == 0 || filled >= log::RECORD_MAX {
            return (at, None);
        }
    }
}

impl IndexJournal {
    /// Opens the log in `root`, or creates a log, and calls `f` with every whole record. A torn tail is cut off. A file that is
    /// no log for this block size starts anew, and the blocks in that file are orphans.
    pub fn open(root: &Path, block_size: u32, mut f: impl FnMut(log::LogRecord<'_>)) -> io::Result<IndexJournal> {
        let _ = std::fs::remove_file(root.join(NEW_LOG_NAME));
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(root.join(LOG_NAME))?;
        let size = file.metadata()?.len();
        let mut journal = IndexJournal {
            root: root.into(),
            log_file: file,
            len: log::HEADER as u64,
            records: 0,
            appended_since: None,
        };
        if size > log::HEADER as u64 {
            let mut header = [0; log::HEADER];
            // Not through a mapping: an unreadable sector would kill the process.
            match journal.log_file.read_exact_at(&mut header, 0) {
                Ok(()) if log::has_header(&header, block_size) => {
                    let (end, error) = replay_file(
                        |buffer, at| journal.log_file.read_at(buffer, at),
                        |record| {
                            journal.records += 1;
                            f(record);
                        },
                    );
                    journal.len = end;
                    if let Some(error) = error {
                        tracing::warn!(
                            "cache disk {}: the index log can't be read from byte {end} on: {error}; blocks named \
                             only in the rest are fetched again; check the disk (dmesg, smartctl)",
                            root.display()
                        );
                    }
                }
                Ok(()) => {
                    tracing::warn!("{}: the index log has no valid header; its cache starts empty", root.display());
                }
                Err(error) => {
                    tracing::warn!(
                        "cache disk {}: the index log can't be read: {error}; its cache starts empty; check the disk \
                         (dmesg, smartctl)",
                        root.display()
                    );
                }
            }
        }
        if journal.len < size {
            tracing::info!(
                "{}: cut {} bytes of unfinished records off the index log",
                root.display(),
                size - journal.len
            );
            journal.log_file.set_len(journal.len)?;
        }
        if journal.len == log::HEADER as u64 {
            journal.log_file.write_all_at(&log::encode_header(block_size), 0)?;
        }
        Ok(journal)
    }

    /// Appends whole records.
    ///
    /// # Errors
    /// The system's error; then nothing counts as appended.
    pub fn append(&mut self, io: &dyn DiskIo, bytes: &[u8], records: u64) -> io::Result<()> {
        io.append(&self.log_file, self.len, bytes)?;
        self.len += bytes.len() as u64;
        self.records += records;
        if let Some((side, n)) = &mut self.appended_since {
            side.extend_from_slice(bytes);
            *n += records;
        }
        Ok(())
    }

    /// Starts a rewrite: from here on appends are also collected for the new file.
    pub fn begin_rewrite(&mut self) {
        self.appended_since = Some((Vec::new(), 0));
    }

    /// Abandons a rewrite, and frees the space.
    pub fn abandon_rewrite(&mut self) {
        self.appended_since = None;
        // A file that remains is overwritten by the next rewrite, or removed at the next start.
        let _ = std::fs::remove_file(self.root.join(NEW_LOG_NAME));
    }

    /// A second descriptor of the log's file, for syncing.
    pub fn file(&self) -> io::Result<File> {
        self.log_file.try_clone()
    }

    /// Replaces the log by `new`, which holds `records` synced records in `len` bytes, followed by the records
    /// appended since the rewrite began.
    ///
    /// # Errors
    /// The system's error; then the old log stays in use.
    pub fn finish_rewrite(&mut self, new: File, len: u64, records: u64) -> io::Result<()> {
        let Some((side, more)) = self.appended_since.take() else { return Ok(()) };
        new.write_all_at(&side, len)?;
        // The rename must not reach the disk before the bytes do. The caller has synced all but these.
        new.sync_data()?;
        std::fs::rename(self.root.join(NEW_LOG_NAME), self.root.join(LOG_NAME))?;
        self.log_file = new;
        self.len = len + side.len() as u64;
        self.records = records + more;
        Ok(())
    }

    /// Creates an empty file for a rewrite.
    pub fn new_file(root: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(root.join(NEW_LOG_NAME))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::{BlockId, ObjectId};

    fn log_of(records: u32) -> Vec<u8> {
        let mut out = log::encode_header(4096).to_vec();
        (0..records).for_each(|index| log::push_put(&mut out, &BlockId { object: ObjectId(1), index }, 4096, 0, &[7]));
        out
    }

    #[test]
    fn a_log_is_read_back_in_pieces_up_to_what_can_be_read() {
        let records = 3 * READ_PIECE as u32 / 40;
        let bytes = log_of(records);
        assert!(bytes.len() > 2 * READ_PIECE);
        let one = (bytes.len() - log::HEADER) / records as usize;
        // Whatever is given at once, and wherever a sector can't be read.
        for (most, bad) in [(usize::MAX, bytes.len()), (4096, bytes.len()), (65_537, 1_100_000), (usize::MAX, 512)] {
            let read = |buffer: &mut [u8], at: u64| match at as usize {
                at if at >= bytes.len() => Ok(0),
                at if at >= bad => Err(io::Error::from_raw_os_error(libc::EIO)),
                at => {
                    let n = buffer.len().min(most).min(bad - at);
                    buffer[..n].copy_from_slice(&bytes[at..at + n]);
                    Ok(n)
                }
            };
            let mut seen = 0;
            let (end, error) = replay_file(read, |record| {
                let log::LogRecord::Put { block, .. } = record else { panic!("{record:?}") };
                assert_eq!(block.index, seen);
                seen += 1;
            });
            assert_eq!(seen as usize, (bad - log::HEADER) / one);
            assert_eq!(end as usize, log::HEADER + seen as usize * one);
            assert_eq!(error.is_some(), bad < bytes.len());
        }
    }

    #[test]
    fn what_makes_no_sense_ends_a_log_wherever_it_stands() {
        let mut bytes = log_of(100_000);
        bytes[2_000_000] ^= 1;
        let read = |buffer: &mut [u8], at: u64| {
            let rest = &bytes[(at as usize).min(bytes.len())..];
            let n = buffer.len().min(rest.len());
            buffer[..n].copy_from_slice(&rest[..n]);
            Ok(n)
        };
        let (end, error) = replay_file(read, |_| {});
        assert!(error.is_none() && end <= 2_000_000 && end > 2_000_000 - log::RECORD_MAX as u64);
    }
}
