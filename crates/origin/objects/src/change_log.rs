//! The log of an open file that outlives this process, in a memory file: lines of JSON, of which the last state and later lines
//! count. Knows neither requests nor files.
//!
//! Only a line with a newline at the end counts, so a process may end within a line. The first bytes of the file say where the last
//! state begins; the memory before that place is freed.

use parking_lot::Mutex;
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use serde::Serialize;
use serde::de::DeserializeOwned;
use spurline_types::{Error, ErrorKind, Result};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt as _;

/// The first line, behind a page with the place of the last state.
const FIRST_LINE: u64 = 4096;
/// Memory before the last state that is freed at once.
const FREED_AT_ONCE: u64 = 64 << 10;
/// A log with so many bytes behind the state gets another state.
const LONG: u64 = 64 << 10;
/// The entries are longer than the state by this factor then.
const SHORTER: u64 = 4;

/// The log of one open file.
pub(crate) struct ChangeLog {
    file: File,
    place: Mutex<LogPlace>,
}

struct LogPlace {
    /// The last state.
    state: u64,
    state_len: u64,
    end: u64,
    /// The end of the memory that is freed.
    freed: u64,
    line: Vec<u8>,
    /// The log is emptied, because a line could not be written.
    broken: bool,
}

impl LogPlace {
    fn new(state: u64, end: u64) -> LogPlace {
        LogPlace { state, state_len: 0, end, freed: FIRST_LINE, line: Vec::new(), broken: false }
    }

    fn append(&mut self, file: &File, entry: &impl Serialize) -> io::Result<()> {
        self.line.clear();
        serde_json::to_writer(&mut self.line, entry)?;
        self.line.push(b'\n');
        file.write_all_at(&self.line, self.end)?;
        self.end += self.line.len() as u64;
        Ok(())
    }

    fn append_state(&mut self, file: &File, entry: &impl Serialize) -> io::Result<()> {
        let state = self.end;
        self.append(file, entry)?;
        file.write_all_at(&state.to_le_bytes(), 0)?;
        self.state = state;
        self.state_len = self.end - state;
        let free_end = state / FIRST_LINE * FIRST_LINE;
        if free_end - self.freed >= FREED_AT_ONCE {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, flags, self.freed, free_end - self.freed)?;
            self.freed = free_end;
        }
        Ok(())
    }
}

impl ChangeLog {
    /// An empty log.
    ///
    /// # Errors
    /// Without a free descriptor.
    pub fn create() -> Result<ChangeLog> {
        let file = memfd_create("spurline-changes", MemfdFlags::CLOEXEC).map(File::from);
        let file = file.map_err(|error| Error::io("making the log of an open file", &error.into()))?;
        Ok(ChangeLog { file, place: Mutex::new(LogPlace::new(FIRST_LINE, FIRST_LINE)) })
    }

    /// The log of a process that has ended, with the last state and the entries behind it.
    ///
    /// # Errors
    /// `Corrupt` for a log without a state, or with lines of another release.
    pub fn open<T: DeserializeOwned>(file: OwnedFd) -> Result<(ChangeLog, Vec<T>)> {
        let file = File::from(file);
        let lines = read_lines(&file).map_err(|error| Error::io("reading the log of an open file", &error))?;
        let count = lines.bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| last + 1);
        let entries: serde_json::Result<Vec<T>> = lines.bytes[..count]
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(serde_json::from_slice)
            .collect();
        let entries = entries.map_err(|error| {
            Error::new(ErrorKind::Corrupt, format!("the log of an open file has a line of another form: {error}"))
        })?;
        if entries.is_empty() {
            return Err(Error::new(ErrorKind::Corrupt, "the log of an open file is empty"));
        }
        let place = LogPlace::new(lines.start, lines.start + count as u64);
        Ok((ChangeLog { file, place: Mutex::new(place) }, entries))
    }

    /// Adds an entry. A log that can't be written is emptied: the next process must not take a part of the changes for all.
    pub fn append(&self, entry: &impl Serialize) {
        let mut place = self.place.lock();
        if place.broken {
            return;
        }
        let appended = place.append(&self.file, entry);
        self.note_end(&mut place, appended);
    }

    /// Adds a state, in place of all entries before.
    pub fn append_state(&self, state: &impl Serialize) {
        let mut place = self.place.lock();
        if place.broken {
            return;
        }
        let appended = place.append_state(&self.file, state);
        self.note_end(&mut place, appended);
    }

    fn note_end(&self, place: &mut LogPlace, appended: io::Result<()>) {
        let Err(error) = appended else { return };
        tracing::warn!("an open file is lost if this process ends: its log can't be written: {error}");
        place.broken = true;
        if let Err(error) = self.file.set_len(0) {
            tracing::error!("the log of an open file can't be emptied: {error}");
        }
    }

    /// Whether a state should take the place of the entries.
    pub fn is_long(&self) -> bool {
        let place = self.place.lock();
        let behind = place.end - place.state - place.state_len;
        behind > LONG && behind > SHORTER * place.state_len
    }

    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The bytes from the last state on.
struct LogLines {
    start: u64,
    bytes: Vec<u8>,
}

fn read_lines(file: &File) -> io::Result<LogLines> {
    let len = file.metadata()?.len();
    let mut start = [0; size_of::<u64>()];
    if len < FIRST_LINE {
        return Ok(LogLines { start: FIRST_LINE, bytes: Vec::new() });
    }
    file.read_exact_at(&mut start, 0)?;
    let start = u64::from_le_bytes(start).max(FIRST_LINE);
    let mut bytes = vec![0; usize::try_from(len.saturating_sub(start)).unwrap_or(0)];
    file.read_exact_at(&mut bytes, start)?;
    Ok(LogLines { start, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries_of(log: &ChangeLog) -> Result<Vec<u64>> {
        ChangeLog::open(log.descriptor().try_clone_to_owned().unwrap()).map(|(_, entries)| entries)
    }

    #[test]
    fn the_last_state_and_whole_lines_behind_it_count() {
        let log = ChangeLog::create().unwrap();
        assert!(entries_of(&log).is_err());
        log.append_state(&1u64);
        log.append(&2u64);
        log.append(&3u64);
        assert_eq!(entries_of(&log).unwrap(), [1, 2, 3]);
        log.append_state(&40u64);
        log.append(&5u64);
        assert_eq!(entries_of(&log).unwrap(), [40, 5]);
        // A process that ended within a line.
        let end = log.place.lock().end;
        log.file.write_all_at(b"66", end).unwrap();
        let (next, entries) = ChangeLog::open::<u64>(log.file.try_clone().unwrap().into()).unwrap();
        assert_eq!(entries, [40, 5]);
        next.append(&7u64);
        assert_eq!(entries_of(&log).unwrap(), [40, 5, 7]);
    }

    #[test]
    fn states_free_the_memory_before_them() {
        let log = ChangeLog::create().unwrap();
        log.append_state(&"state");
        let mut states = 0;
        for round in 0..200_000u64 {
            log.append(&(round, "an entry"));
            if log.is_long() {
                log.append_state(&"state");
                states += 1;
            }
        }
        assert!(states > 10, "{states} states");
        let blocks = std::os::unix::fs::MetadataExt::blocks(&log.file.metadata().unwrap());
        assert!(blocks * 512 < 4 * LONG, "{blocks} blocks");
    }

    #[test]
    fn a_log_that_cannot_be_written_has_no_entries() {
        let log = ChangeLog::create().unwrap();
        log.append_state(&1u64);
        log.note_end(&mut log.place.lock(), Err(io::Error::other("no memory")));
        log.append(&3u64);
        assert!(entries_of(&log).is_err());
    }
}
