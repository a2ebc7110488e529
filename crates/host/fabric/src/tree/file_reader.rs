//! Reads files in a separate thread, so that a file that never answers costs a deadline and does not block the program. Follows
//! no link and knows no tree.

use rustix::fs::OFlags;
use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// Limit of a file; the kernel's files are far shorter.
pub(super) const MAX_FILE_BYTES: u64 = 1024 * 1024;
/// Limit of names in a directory.
pub(super) const MAX_NAMES: usize = 4096;
/// Limit per file when all files of a directory are read; the kernel's files are a page at most.
pub(super) const MAX_PAGE_BYTES: u64 = 64 * 1024;
/// Limit of all files together.
const MAX_DIRECTORY_BYTES: usize = 16 * 1024 * 1024;
/// Deadline of a file, in slices. Firmware queried through sysfs answers in milliseconds, a dead card never. With slices, a
/// suspension of this process costs a single slice, not the deadline.
const READ_SLICE: Duration = Duration::from_millis(250);
const FILE_SLICES: usize = 8;
/// Limit of slices for a directory with all files, each with a deadline.
const DIR_SLICES: usize = 120;
/// After this many timeouts on a device, the other files are skipped.
const MAX_LATE: usize = 2;
/// After this many timeouts on the host, all other files are skipped.
const MAX_LATE_HOST: usize = 10;

#[derive(Debug)]
pub(super) enum FileQuery {
    Read(String),
    Files(String),
    Names(String),
    Link(String),
    Exists(String),
}

#[derive(Debug)]
pub(super) enum FileReply {
    Read(Vec<u8>),
    Files(Vec<(String, Vec<u8>)>),
    Names(Vec<String>),
    Link(String),
    Exists,
}

impl FileQuery {
    /// The directory a file belongs to: a device, an interface, a process.
    fn owner_path(&self) -> String {
        let (FileQuery::Read(p)
        | FileQuery::Files(p)
        | FileQuery::Names(p)
        | FileQuery::Link(p)
        | FileQuery::Exists(p)) = self;
        // Virtual devices are a level deeper, `sys/devices/virtual/net/eth0`; a PCI function is the whole path.
        let depth = if p.starts_with("sys/devices/pci") {
            4
        } else if p.starts_with("sys/devices/") {
            5
        } else {
            4
        };
        p.split('/').take(depth).collect::<Vec<_>>().join("/")
    }
}

/// Reads files in a thread, so that a file that never answers costs only a deadline.
#[derive(Debug)]
pub(super) struct FileReader {
    root: PathBuf,
    line: Option<ReaderThread>,
    late: HashMap<String, usize>,
}

#[derive(Debug)]
struct ReaderThread {
    questions: Sender<FileQuery>,
    replies: Receiver<io::Result<FileReply>>,
    /// Files read so far; as long as the number grows, the thread is not stuck.
    progress: Arc<AtomicUsize>,
}

impl FileReader {
    pub(super) fn new(root: PathBuf) -> Self {
        FileReader { root, line: None, late: HashMap::new() }
    }

    pub(super) fn run_query(&mut self, question: FileQuery) -> io::Result<FileReply> {
        let owner = question.owner_path();
        let all: usize = self.late.values().sum();
        if self.late.get(&owner).is_some_and(|n| *n >= MAX_LATE) || all >= MAX_LATE_HOST {
            return late_error("skipped after other files did not answer".into());
        }
        if self.line.is_none() {
            self.line = Some(start_thread(self.root.clone())?);
        }
        let Some(line) = &self.line else { return Err(io::ErrorKind::Other.into()) };
        line.questions.send(question).map_err(|_| io::Error::other("the reading thread has ended"))?;
        let mut idle = 0;
        let mut seen = line.progress.load(Ordering::Relaxed);
        for _ in 0..DIR_SLICES {
            match line.replies.recv_timeout(READ_SLICE) {
                Ok(reply) => return reply,
                Err(RecvTimeoutError::Disconnected) => {
                    self.line = None;
                    return Err(io::Error::other("the reading thread has ended"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = line.progress.load(Ordering::Relaxed);
            idle = if now == seen { idle + 1 } else { 0 };
            seen = now;
            if idle >= FILE_SLICES {
                break;
            }
        }
        // The blocked thread is abandoned in the kernel; the next query starts another.
        self.line = None;
        *self.late.entry(owner).or_default() += 1;
        late_error(format!("no answer within {} s", (READ_SLICE * FILE_SLICES as u32).as_secs()))
    }
}

fn late_error<T>(why: String) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::TimedOut, why))
}

fn start_thread(root: PathBuf) -> io::Result<ReaderThread> {
    let (questions, asked) = mpsc::channel::<FileQuery>();
    let (answers, replies) = mpsc::channel();
    let progress = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&progress);
    std::thread::Builder::new().name("facts".into()).spawn(move || {
        for question in asked {
            if answers.send(answer_query(&root, question, &count)).is_err() {
                return;
            }
        }
    })?;
    Ok(ReaderThread { questions, replies, progress })
}

fn answer_query(root: &Path, question: FileQuery, progress: &AtomicUsize) -> io::Result<FileReply> {
    match question {
        FileQuery::Read(path) => read_file(&root.join(path), MAX_FILE_BYTES, OFlags::empty()).map(FileReply::Read),
        FileQuery::Names(path) => list_directory(&root.join(path)).map(FileReply::Names),
        FileQuery::Files(path) => {
            let dir = root.join(path);
            let mut files = Vec::new();
            let mut all = 0;
            for name in list_directory(&dir)? {
                // These directories contain no links; in a foreign folder a link could lead out.
                let bytes = read_file(&dir.join(&name), MAX_PAGE_BYTES, OFlags::NOFOLLOW);
                progress.fetch_add(1, Ordering::Relaxed);
                all += bytes.as_ref().map_or(0, Vec::len);
                if all > MAX_DIRECTORY_BYTES {
                    break;
                }
                files.extend(bytes.ok().map(|bytes| (name, bytes)));
            }
            Ok(FileReply::Files(files))
        }
        FileQuery::Link(path) => {
            let target = std::fs::read_link(root.join(path))?;
            target.into_os_string().into_string().map(FileReply::Link).map_err(|_| io::ErrorKind::InvalidData.into())
        }
        FileQuery::Exists(path) => std::fs::metadata(root.join(path)).map(|_| FileReply::Exists),
    }
}

fn read_file(path: &Path, most: u64, more: OFlags) -> io::Result<Vec<u8>> {
    // Does not wait for a FIFO or a device in a foreign folder.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | more;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn list_directory(dir: &Path) -> io::Result<Vec<String>> {
    let names = std::fs::read_dir(dir)?.take(MAX_NAMES).flatten();
    Ok(names.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_never_answers_costs_its_deadline_only() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("there"), "x").unwrap();
        let mut probe = FileReader::new(dir.path().to_owned());
        // A thread that took the query and is stuck in the kernel: no reply, no progress.
        let (questions, _asked) = mpsc::channel();
        let (_stuck, replies) = mpsc::channel();
        probe.line = Some(ReaderThread { questions, replies, progress: Arc::default() });
        let file = || FileQuery::Read("sys/class/infiniband/mlx5_0/ports/1/rate".into());
        assert_eq!(probe.run_query(file()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        // The next query has a thread of its own, and a device with more timeouts is skipped.
        assert!(probe.run_query(FileQuery::Read("there".into())).is_ok());
        probe.late.insert("sys/class/infiniband/mlx5_0".into(), MAX_LATE);
        assert!(probe.run_query(file()).unwrap_err().to_string().contains("skipped"));
        assert_eq!(
            probe.run_query(FileQuery::Read("sys/class/net".into())).unwrap_err().kind(),
            io::ErrorKind::NotFound
        );
    }
}
