//! Standard error as a log destination with bounded waits. A stopped terminal (Ctrl-S) or a pipe with a sleeping
//! reader accepts nothing, and the logging thread may be serving a request.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::io::{Result, Write};
use std::os::fd::AsFd;

/// How long a line waits for room; after a lost line, later lines do not wait.
const LINE_WAIT: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
const NO_PATIENCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// A pipe reported writable has room for this many bytes.
const PIPE_WRITE_BYTES: usize = 4096;

/// A writer that drops lines instead of waiting.
pub(super) struct LossyWriter<W> {
    out: W,
    stuck: bool,
    lost: u64,
}

impl<W: Write + AsFd> LossyWriter<W> {
    pub(super) fn new(out: W) -> Self {
        LossyWriter { out, stuck: false, lost: 0 }
    }

    /// Whether a piece can be written without waiting for more than [`LINE_WAIT`].
    fn has_room(&self) -> bool {
        let patience = if self.stuck { NO_PATIENCE } else { LINE_WAIT };
        // A closed or failed stream counts as writable and fails at the write; an interrupted poll counts as no room.
        !matches!(poll(&mut [PollFd::new(&self.out, PollFlags::OUT)], Some(&patience)), Ok(0) | Err(Errno::INTR))
    }

    fn put_bytes(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            if !self.has_room() {
                self.stuck = true;
                self.lost += 1;
                return Ok(());
            }
            self.stuck = false;
            let (piece, rest) = bytes.split_at(bytes.len().min(PIPE_WRITE_BYTES));
            self.out.write_all(piece)?;
            bytes = rest;
        }
        Ok(())
    }
}

impl<W: Write + AsFd> Write for LossyWriter<W> {
    /// Accepts a line. The next line that has room reports the lost lines.
    fn write(&mut self, line: &[u8]) -> Result<usize> {
        if self.lost > 0 && self.has_room() {
            let lost = std::mem::take(&mut self.lost);
            self.stuck = false;
            self.put_bytes(format!("({lost} log lines were lost: standard error accepted nothing)\n").as_bytes())?;
        }
        self.put_bytes(line)?;
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
    fn a_sleeping_reader_blocks_no_writer_and_sees_the_loss() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let (mut reader, mut log) = (File::from(reader), LossyWriter::new(File::from(writer)));
        let line = [b'x'; 1000];
        // Far more than the pipe holds: without the limit this would block for ever.
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
        let told = format!("({lost} log lines were lost: standard error accepted nothing)\nhere again\n");
        assert!(rest.ends_with(&told), "{rest}");
    }

    #[test]
    fn a_reader_that_is_gone_is_an_error_and_no_panic() {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(reader);
        assert!(LossyWriter::new(File::from(writer)).write_all(b"hello").is_err());
    }
}
