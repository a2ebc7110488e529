//! The access log: one line per request of the kernel, written by a thread of its own. A request never waits
//! for the disk: when the writer falls behind, lines are dropped, counted, and the gap is said in the log.

use crate::clock::Utc;
use spurline_types::{Error, Result};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// Lines that may wait: a tenth of a second at 160,000 requests per second, in about a MiB.
const WAITING: usize = 16 << 10;
/// A line is in the file at most this long after its request when nothing follows.
const FLUSH: Duration = Duration::from_millis(200);
/// How long the end of the process waits for the last lines, and how often it tries to say that they are the last.
const LAST_LINES: Duration = Duration::from_secs(2);
const TRY_EVERY: Duration = Duration::from_millis(10);

#[derive(Debug)]
struct Line {
    time: SystemTime,
    op: &'static str,
    ino: u64,
    offset: u64,
    len: u64,
    errno: i32,
    took: Duration,
}

/// An open access log.
#[derive(Debug)]
pub struct AccessLogWriter {
    /// `None` asks the writer to end.
    sender: SyncSender<Option<Line>>,
    /// It is waited on once, at the end: `None` after it.
    done: std::sync::Mutex<Option<Receiver<()>>>,
    dropped: Arc<AtomicU64>,
}

impl AccessLogWriter {
    /// Appends to the file at `path`.
    ///
    /// # Errors
    /// When it can't be opened.
    pub fn open(path: &Path) -> Result<Self> {
        let io = |e: std::io::Error| Error::io(format_args!("access log {}", path.display()), &e);
        let file = OpenOptions::new().append(true).create(true).open(path).map_err(io)?;
        let (sender, receiver) = sync_channel(WAITING);
        let (finished, done) = sync_channel(1);
        let dropped = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&dropped);
        std::thread::Builder::new()
            .name("access-log".into())
            .spawn(move || {
                write_lines(&receiver, file, &counted);
                let _ = finished.send(());
            })
            .map_err(io)?;
        Ok(AccessLogWriter { sender, done: std::sync::Mutex::new(Some(done)), dropped })
    }

    /// Notes one request: its name, inode, offset and length where it has them, 0 or an errno, and its time.
    /// Never waits and allocates nothing.
    pub fn record(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, took: Duration) {
        let line = Line { time: SystemTime::now(), op, ino, offset, len, errno, took };
        if self.sender.try_send(Some(line)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl AccessLogWriter {
    /// Writes what was noted so far and ends; lines noted later are lost, and so are those that can't be written within
    /// two seconds. For a process about to end, which may still share the log with threads that never drop it.
    pub fn finish(&self) {
        let Some(done) = self.done.lock().unwrap_or_else(PoisonError::into_inner).take() else { return };
        let until = Instant::now() + LAST_LINES;
        // Lines that wait leave no room for this word where nothing is written any more: a pipe that nobody reads, a
        // file server that is gone.
        while let Err(TrySendError::Full(_)) = self.sender.try_send(None) {
            if Instant::now() >= until {
                break;
            }
            std::thread::sleep(TRY_EVERY);
        }
        if let Err(RecvTimeoutError::Timeout) = done.recv_timeout(until.saturating_duration_since(Instant::now())) {
            let within = LAST_LINES.as_secs();
            tracing::warn!("the access log could not be written within {within} s: its last lines are lost");
        }
    }
}

impl Drop for AccessLogWriter {
    fn drop(&mut self) {
        self.finish();
    }
}

fn write_lines(receiver: &Receiver<Option<Line>>, file: File, dropped: &AtomicU64) {
    let mut out = BufWriter::with_capacity(64 << 10, file);
    let mut failed = false;
    loop {
        let result = match receiver.recv_timeout(FLUSH) {
            Ok(Some(line)) => write_line(&mut out, &line),
            Err(RecvTimeoutError::Timeout) => out.flush(),
            Ok(None) | Err(RecvTimeoutError::Disconnected) => {
                let _ = say_dropped(&mut out, dropped).and_then(|()| out.flush());
                return;
            }
        };
        match result.and_then(|()| say_dropped(&mut out, dropped)) {
            Ok(()) => failed = false,
            Err(error) if !failed => {
                failed = true;
                tracing::warn!(%error, "the access log can't be written; its lines are lost until it can");
            }
            Err(_) => {}
        }
    }
}

fn write_line(out: &mut impl Write, line: &Line) -> std::io::Result<()> {
    let Line { time, op, ino, offset, len, errno, took } = line;
    writeln!(out, "{} {op} ino={ino} off={offset} len={len} errno={errno} us={}", Utc(*time), took.as_micros())
}

fn say_dropped(out: &mut impl Write, dropped: &AtomicU64) -> std::io::Result<()> {
    match dropped.swap(0, Ordering::Relaxed) {
        0 => Ok(()),
        n => writeln!(out, "{} ({n} lines dropped: the log could not keep up)", Utc(SystemTime::now())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_is_a_line_or_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        let log = AccessLogWriter::open(&path).unwrap();
        let total = WAITING as u64 * 2;
        for ino in 0..total {
            log.record("read", ino, 4096, 100, 0, Duration::from_micros(12));
        }
        drop(log);
        let text = std::fs::read_to_string(&path).unwrap();
        let lines = text.lines().filter(|l| l.contains(" read ino=")).count() as u64;
        let gaps: u64 = text.lines().filter_map(|l| l.split_once(" (")?.1.split(' ').next()?.parse::<u64>().ok()).sum();
        assert_eq!(lines + gaps, total);
        assert!(text.lines().next().unwrap().ends_with("read ino=0 off=4096 len=100 errno=0 us=12"), "{text:.200}");
    }

    #[test]
    fn a_log_that_hangs_does_not_keep_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        // Whoever has it open for both can be sure that it opens; nothing is read.
        let _pipe = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let log = AccessLogWriter::open(&path).unwrap();
        // More than the pipe, the writer and the lines that wait are together.
        for ino in 0..WAITING as u64 * 4 {
            log.record("read", ino, 4096, 100, 0, Duration::from_micros(12));
        }
        let (finished, done) = sync_channel(1);
        std::thread::spawn(move || {
            log.finish();
            drop(log);
            let _ = finished.send(());
        });
        done.recv_timeout(Duration::from_secs(60)).expect("the end is waited for without end");
    }

    #[test]
    fn a_path_that_is_no_file_is_named() {
        let error = AccessLogWriter::open(Path::new("/proc/nowhere/log")).unwrap_err();
        assert!(error.message().contains("/proc/nowhere/log"));
    }
}
