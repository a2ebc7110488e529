//! Standard error as a place for log lines on which nobody waits for long: a terminal that is stopped (Ctrl-S) or a pipe
//! whose reader sleeps takes nothing, and whoever logs may be answering a request.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{Result, Write};
use std::os::fd::AsFd;

/// How long a line waits for room; the lines after one that waited in vain don't wait at all.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
const NO_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// A pipe that has room has it for so many bytes.
const PIECE: usize = 4096;

/// A writer that loses lines rather than wait.
pub(super) struct Patient<W> {
    out: W,
    stuck: bool,
    lost: u64,
}

impl<W: Write + AsFd> Patient<W> {
    pub(super) fn new(out: W) -> Self {
        Patient { out, stuck: false, lost: 0 }
    }

    /// Whether a piece can be written without waiting for more than [`PATIENCE`].
    fn has_room(&self) -> bool {
        let patience = if self.stuck { NO_PATIENCE } else { PATIENCE };
        // What has hung up or fails says so when it is written to; a signal in between is no room.
        !matches!(poll(&mut [PollFd::new(&self.out, PollFlags::OUT)], Some(&patience)), Ok(0) | Err(Errno::INTR))
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if !self.has_room() {
                self.stuck = true;
                self.lost += 1;
                return Ok(());
            }
            self.stuck = false;
            let (piece, rest) = bytes.split_at(bytes.len().min(PIECE));
            self.out.write_all(piece)?;
            bytes = rest;
        }
        Ok(())
    }
}

impl<W: Write + AsFd> Write for Patient<W> {
    /// Takes a line; that it is lost is told when the next one is not.
    fn write(&mut self, line: &[u8]) -> Result<usize> {
        if self.lost > 0 && self.has_room() {
            let lost = std::mem::take(&mut self.lost);
            self.stuck = false;
            self.put(format!("({lost} log lines were lost: standard error took nothing)\n").as_bytes())?;
        }
        self.put(line)?;
        Ok(line.len())
    }

    fn flush(&mut self) -> Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read as _;

    #[test]
    fn a_reader_that_sleeps_holds_nobody_up_and_is_told_what_it_missed() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (mut reader, mut log) = (File::from(reader), Patient::new(File::from(writer)));
        let line = [b'x'; 1000];
        // Far more than the pipe holds: without patience's end this would never come back.
        for _ in 0..1000 {
            log.write_all(&line).unwrap();
        }
        assert!(log.lost > 0);
        let lost = log.lost;
        let mut text = vec![0; 1 << 20];
        let n = reader.read(&mut text).unwrap();
        assert!(n > 0);
        log.write_all(b"here again\n").unwrap();
        drop(log);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        let told = format!("({lost} log lines were lost: standard error took nothing)\nhere again\n");
        assert!(rest.ends_with(&told), "{rest}");
    }

    #[test]
    fn a_reader_that_is_gone_is_an_error_and_no_panic() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        assert!(Patient::new(File::from(writer)).write_all(b"anybody?").is_err());
    }
}
