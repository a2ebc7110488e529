//! The access log: a line for each kernel request, written by a separate thread. A request never waits for the disk: when the
//! writer falls behind, lines are dropped and counted, and the log records the gap.

use crate::clock::UtcTime;
use parking_lot::Mutex;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use spurline_types::{Error, ErrorKind, Result};
use std::fmt::{Display, Formatter, Write as _};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

/// Queue length in lines: a tenth of a second at 160,000 requests per second, in about a MiB.
const QUEUED_LINES_MAX: usize = 16 << 10;
/// An idle writer flushes after this time.
const IDLE_FLUSH_TIME: Duration = Duration::from_millis(200);
/// Deadline of the last lines when the process ends, and the interval of attempts to queue the end mark.
const LAST_LINES: Duration = Duration::from_secs(2);
const TRY_EVERY: Duration = Duration::from_millis(10);

#[derive(Debug)]
struct AccessLine {
    time: SystemTime,
    op: &'static str,
    ino: u64,
    offset: u64,
    len: u64,
    errno: i32,
    took: Duration,
}

impl Display for AccessLine {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let AccessLine { time, op, ino, offset, len, errno, took } = self;
        write!(f, "{} {op} ino={ino} off={offset} len={len} errno={errno} us={}", UtcTime(*time), took.as_micros())
    }
}

/// Looks up the present path of an inode below the source; `None` if unknown by then.
pub type InodePaths = Box<dyn Fn(u64) -> Option<Vec<u8>> + Send>;

/// A line with the path of the inode.
struct NamedLine {
    line: AccessLine,
    path: Option<Vec<u8>>,
}

impl Display for NamedLine {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        self.line.fmt(f)?;
        match &self.path {
            // Quoted: names contain blanks, and may contain line breaks.
            Some(path) => write!(f, " path={:?}", format!("/{}", String::from_utf8_lossy(path))),
            None => Ok(()),
        }
    }
}

/// An open access log.
#[derive(Debug)]
pub struct AccessLogWriter {
    /// `None` ends the writer.
    sender: SyncSender<Option<AccessLine>>,
    /// Awaited once, by the first `finish`; `None` afterwards.
    done: Mutex<Option<Receiver<()>>>,
    dropped: Arc<AtomicU64>,
}

impl AccessLogWriter {
    /// Appends to the file at `path`. `names` is called by the writer's thread.
    ///
    /// # Errors
    /// When the file cannot be opened, or is a pipe without a reader.
    pub fn open(path: &Path, names: InodePaths) -> Result<Self> {
        let what = format!("access log {}", path.display());
        // Without O_NONBLOCK, opening a pipe without a reader would block for ever.
        let now = OFlags::NONBLOCK.bits() as i32;
        let opened = OpenOptions::new().append(true).create(true).custom_flags(now).open(path);
        let file = opened.map_err(|e| match Errno::from_io_error(&e) {
            Some(Errno::NXIO) => {
                Error::new(ErrorKind::NotFound, format!("{what}: it has no reader; start its reader first"))
            }
            _ => Error::io(&what, &e),
        })?;
        let flags = fcntl_getfl(&file).map_err(|e| Error::io(&what, &e.into()))?;
        fcntl_setfl(&file, flags - OFlags::NONBLOCK).map_err(|e| Error::io(&what, &e.into()))?;
        let file = AccessLogFile::append_to(path, file);
        let (sender, receiver) = sync_channel(QUEUED_LINES_MAX);
        let (finished, done) = sync_channel(1);
        let dropped = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&dropped);
        std::thread::Builder::new()
            .name("access-log".into())
            .spawn(move || {
                write_lines(&receiver, file, &names, &counted);
                let _ = finished.send(());
            })
            .map_err(|e| Error::io(&what, &e))?;
        Ok(AccessLogWriter { sender, done: Mutex::new(Some(done)), dropped })
    }

    /// Queues a request: name, inode, offset and length if any, 0 or an errno, and the duration. Never waits and allocates
    /// nothing.
    pub fn record_request(&self, op: &'static str, ino: u64, offset: u64, len: u64, errno: i32, took: Duration) {
        let line = AccessLine { time: SystemTime::now(), op, ino, offset, len, errno, took };
        if self.sender.try_send(Some(line)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl AccessLogWriter {
    /// Writes the queued lines and ends the writer. Later lines are lost, and so are lines that cannot be written within two
    /// seconds. For the end of a process whose threads may still hold the log for ever.
    pub fn finish_log(&self) {
        let Some(done) = self.done.lock().take() else { return };
        let until = Instant::now() + LAST_LINES;
        // A full queue has no room for the end mark when nothing is written any more: a pipe whose reader sleeps, a
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
        self.finish_log();
    }
}

fn write_lines(
    receiver: &Receiver<Option<AccessLine>>,
    mut out: AccessLogFile,
    names: &InodePaths,
    dropped: &AtomicU64,
) {
    let mut failed = false;
    loop {
        let result = match receiver.recv_timeout(IDLE_FLUSH_TIME) {
            Ok(Some(line)) => match out.put_line(NamedLine { path: names(line.ino), line }) {
                // The dropped lines came after this line.
                Ok(()) => out.say_dropped(dropped),
                Err(error) => {
                    dropped.fetch_add(1, Ordering::Relaxed);
                    Err(error)
                }
            },
            Err(RecvTimeoutError::Timeout) => out.say_dropped(dropped).and_then(|()| out.file.flush()),
            Ok(None) | Err(RecvTimeoutError::Disconnected) => {
                if let Err(error) = out.say_dropped(dropped).and_then(|()| out.file.flush()) {
                    tracing::warn!(%error, "the access log can't be written: its last lines are lost");
                }
                return;
            }
        };
        match result {
            Ok(()) => failed = false,
            Err(error) if !failed => {
                failed = true;
                tracing::warn!(%error, "the access log can't be written; its lines are lost until it can");
            }
            Err(_) => {}
        }
    }
}

/// A file of whole lines. A line without room is not started; the rest of a started line is kept and written as soon
/// as there is room.
struct AccessLogFile {
    file: BufWriter<File>,
    text: String,
}

impl AccessLogFile {
    /// Continues the file at `path`.
    fn append_to(path: &Path, file: File) -> AccessLogFile {
        let mut lines = AccessLogFile { file: BufWriter::with_capacity(64 << 10, file), text: String::new() };
        // A process that ended on a full disk may have left half a line.
        if file_ends_in_a_line(path).is_ok_and(|ends| !ends) {
            let _ = lines.file.write_all(b"\n");
        }
        lines
    }

    fn put_line(&mut self, line: impl Display) -> std::io::Result<()> {
        self.text.clear();
        let _ = writeln!(self.text, "{line}");
        if self.file.capacity() - self.file.buffer().len() < self.text.len() {
            self.file.flush()?;
        }
        self.file.write_all(self.text.as_bytes())
    }

    fn say_dropped(&mut self, dropped: &AtomicU64) -> std::io::Result<()> {
        let n = dropped.load(Ordering::Relaxed);
        if n > 0 {
            let now = UtcTime(SystemTime::now());
            self.put_line(format_args!("{now} ({n} lines dropped: the log could not keep up)"))?;
            dropped.fetch_sub(n, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn file_ends_in_a_line(path: &Path) -> std::io::Result<bool> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(true);
    }
    let mut file = File::open(path)?;
    if file.seek(SeekFrom::End(0))? == 0 {
        return Ok(true);
    }
    let mut last = [0];
    file.seek(SeekFrom::End(-1))?;
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file system knows no inode any more.
    fn no_names() -> InodePaths {
        Box::new(|_| None)
    }

    fn note(log: &AccessLogWriter, lines: u64) {
        for ino in 0..lines {
            log.record_request("read", ino, 4096, 100, 0, Duration::from_micros(12));
        }
    }

    /// The number of lines and of lines reported as dropped; all lines must be whole.
    fn counted(text: &str) -> (u64, u64) {
        let (mut lines, mut missing) = (0, 0);
        for line in text.lines() {
            let (time, rest) = line.split_once(' ').unwrap();
            assert!(time.len() == 27 && time.ends_with('Z'), "{line}");
            match rest.strip_suffix(" lines dropped: the log could not keep up)") {
                Some(gap) => missing += gap.strip_prefix('(').unwrap().parse::<u64>().unwrap(),
                None => {
                    let ino = rest.strip_prefix("read ino=").unwrap().strip_suffix(" off=4096 len=100 errno=0 us=12");
                    assert!(ino.is_some_and(|ino| ino.parse::<u64>().is_ok()), "{line}");
                    lines += 1;
                }
            }
        }
        (lines, missing)
    }

    #[test]
    fn every_request_is_a_line_or_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        let log = AccessLogWriter::open(&path, no_names()).unwrap();
        let total = QUEUED_LINES_MAX as u64 * 2;
        note(&log, total);
        drop(log);
        let text = std::fs::read_to_string(&path).unwrap();
        let (lines, missing) = counted(&text);
        assert_eq!(lines + missing, total);
        assert!(text.lines().next().unwrap().ends_with("read ino=0 off=4096 len=100 errno=0 us=12"), "{text:.200}");
    }

    #[test]
    fn a_line_names_the_inode_and_stays_one_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        let names = |ino: u64| [&b""[..], b"a b/c\n\xff"].get(ino as usize).map(|path| path.to_vec());
        note(&AccessLogWriter::open(&path, Box::new(names)).unwrap(), 3);
        let text = std::fs::read_to_string(&path).unwrap();
        let ends: Vec<&str> = text.lines().map(|line| line.split_once("us=12").unwrap().1).collect();
        assert_eq!(ends, [" path=\"/\"", " path=\"/a b/c\\n\u{fffd}\"", ""]);
    }

    #[test]
    fn a_line_that_was_begun_by_another_process_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        std::fs::write(&path, "half a l").unwrap();
        for times in 1..3 {
            note(&AccessLogWriter::open(&path, no_names()).unwrap(), 1);
            let text = std::fs::read_to_string(&path).unwrap();
            assert_eq!(counted(text.strip_prefix("half a l\n").unwrap()), (times, 0));
        }
    }

    #[test]
    fn a_full_disk_costs_lines_that_are_counted_and_no_halves() {
        struct Small(tempfile::TempDir);
        impl Drop for Small {
            fn drop(&mut self) {
                let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        if rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, c"size=4m").is_err() {
            assert!(
                !std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default().contains("mount"),
                "mounting a tmpfs failed"
            );
            return println!("SKIP: a tmpfs can't be mounted here (not root)");
        }
        let small = Small(dir);
        let (path, full) = (small.0.path().join("access.log"), small.0.path().join("full"));
        let mut filler = File::create(&full).unwrap();
        while filler.write_all(&[0; 4096]).is_ok() {}
        // The disk is full in the middle of a line.
        filler.set_len(filler.metadata().unwrap().len() - 4096).unwrap();
        let log = AccessLogWriter::open(&path, no_names()).unwrap();
        // More than disk and writer hold, fewer than the queue holds.
        let total = 4000;
        note(&log, total);
        let until = Instant::now() + Duration::from_secs(60);
        while log.dropped.load(Ordering::Relaxed) == 0 {
            assert!(Instant::now() < until, "no line was lost");
            std::thread::sleep(TRY_EVERY);
        }
        assert!(!std::fs::read_to_string(&path).unwrap().ends_with('\n'));
        std::fs::remove_file(&full).unwrap();
        drop(filler);
        note(&log, 10);
        // Before the log ends, because `finish_log` gives up after two seconds and a busy machine may pause longer.
        let (lines, missing) = loop {
            let text = std::fs::read_to_string(&path).unwrap();
            let (lines, missing) = if text.ends_with('\n') { counted(&text) } else { (0, 0) };
            if lines + missing >= total + 10 {
                break (lines, missing);
            }
            assert!(Instant::now() < until, "{lines} lines are written and {missing} are reported as dropped");
            std::thread::sleep(TRY_EVERY);
        };
        drop(log);
        assert_eq!(counted(&std::fs::read_to_string(&path).unwrap()), (lines, missing));
        assert_eq!(lines + missing, total + 10);
        assert!(missing > 0);
    }

    #[test]
    fn a_pipe_without_a_reader_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = AccessLogWriter::open(&path, no_names()).unwrap_err();
        assert!(error.message().contains("it has no reader"), "{error}");
    }

    #[test]
    fn a_log_that_hangs_does_not_keep_the_process() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        // Opened for both, so that the open does not block; nothing is read.
        let _pipe = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let log = AccessLogWriter::open(&path, no_names()).unwrap();
        // More than pipe, writer and queue hold together.
        note(&log, QUEUED_LINES_MAX as u64 * 4);
        let (finished, done) = sync_channel(1);
        std::thread::spawn(move || {
            log.finish_log();
            drop(log);
            let _ = finished.send(());
        });
        done.recv_timeout(Duration::from_secs(60)).expect("the end is waited for without end");
    }

    #[test]
    fn a_path_that_is_no_file_is_named() {
        let error = AccessLogWriter::open(Path::new("/proc/nowhere/log"), no_names()).unwrap_err();
        assert!(error.message().contains("/proc/nowhere/log"));
    }
}
