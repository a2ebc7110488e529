//! Reading files in a thread of its own, so that one which never answers costs its deadline and not the program. It
//! follows no link and knows no tree.

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

/// The longest text of one file that is read; what the kernel shows is far shorter.
pub(super) const MOST_BYTES: u64 = 1024 * 1024;
/// The most names of one directory that are looked at.
pub(super) const MOST_NAMES: usize = 4096;
/// The most of one file where all of a directory are read: a page, which is what the kernel's own are at most.
pub(super) const MOST_PAGE: u64 = 64 * 1024;
/// The most of all of them together.
const MOST_DIRECTORY: usize = 16 * 1024 * 1024;
/// How long one file may take, in slices. Firmware that is asked through sysfs answers in milliseconds, and a dead card
/// not at all. Counted in slices, a process that was stopped for long loses one of them and not its deadline.
const SLICE: Duration = Duration::from_millis(250);
const SLICES: usize = 8;
/// The most slices that a directory with its files may take, each of them in time.
const MOST_SLICES: usize = 120;
/// After so many files of one device without an answer, the rest of it is left out.
const MOST_LATE: usize = 2;
/// After so many on the whole host, the rest is.
const MOST_LATE_HOST: usize = 10;

#[derive(Debug)]
pub(super) enum Question {
    Read(String),
    Files(String),
    Names(String),
    Link(String),
    Exists(String),
}

#[derive(Debug)]
pub(super) enum Reply {
    Read(Vec<u8>),
    Files(Vec<(String, Vec<u8>)>),
    Names(Vec<String>),
    Link(String),
    Exists,
}

impl Question {
    /// What a file belongs to: a device, an interface, a process.
    fn owner(&self) -> String {
        let (Question::Read(p) | Question::Files(p) | Question::Names(p) | Question::Link(p) | Question::Exists(p)) =
            self;
        // Virtual devices are one level deeper, `sys/devices/virtual/net/eth0`; a PCI function is all of its path.
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

/// A thread that does the reading, so that a file which never answers costs its deadline and not the program.
#[derive(Debug)]
pub(super) struct Probe {
    root: PathBuf,
    line: Option<Line>,
    late: HashMap<String, usize>,
}

#[derive(Debug)]
struct Line {
    questions: Sender<Question>,
    replies: Receiver<io::Result<Reply>>,
    /// Files read so far; while it grows, the thread is not stuck.
    progress: Arc<AtomicUsize>,
}

impl Probe {
    pub(super) fn new(root: PathBuf) -> Self {
        Probe { root, line: None, late: HashMap::new() }
    }

    pub(super) fn ask(&mut self, question: Question) -> io::Result<Reply> {
        let owner = question.owner();
        let late = |why: String| Err(io::Error::new(io::ErrorKind::TimedOut, why));
        let all: usize = self.late.values().sum();
        if self.late.get(&owner).is_some_and(|n| *n >= MOST_LATE) || all >= MOST_LATE_HOST {
            return late("left out after other files did not answer".into());
        }
        if self.line.is_none() {
            self.line = Some(start(self.root.clone())?);
        }
        let Some(line) = &self.line else { return Err(io::ErrorKind::Other.into()) };
        let gone = || io::Error::other("the reading thread has ended");
        line.questions.send(question).map_err(|_| gone())?;
        let (mut idle, mut seen) = (0, line.progress.load(Ordering::Relaxed));
        for _ in 0..MOST_SLICES {
            match line.replies.recv_timeout(SLICE) {
                Ok(reply) => return reply,
                Err(RecvTimeoutError::Disconnected) => {
                    self.line = None;
                    return Err(gone());
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            let now = line.progress.load(Ordering::Relaxed);
            idle = if now == seen { idle + 1 } else { 0 };
            seen = now;
            if idle >= SLICES {
                break;
            }
        }
        // The thread stays behind in the kernel; another takes its place.
        self.line = None;
        *self.late.entry(owner).or_default() += 1;
        late(format!("no answer within {} s", (SLICE * SLICES as u32).as_secs()))
    }
}

fn start(root: PathBuf) -> io::Result<Line> {
    let (questions, asked) = mpsc::channel::<Question>();
    let (answers, replies) = mpsc::channel();
    let progress = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&progress);
    std::thread::Builder::new().name("facts".into()).spawn(move || {
        for question in asked {
            if answers.send(answer(&root, question, &count)).is_err() {
                return;
            }
        }
    })?;
    Ok(Line { questions, replies, progress })
}

fn answer(root: &Path, question: Question, progress: &AtomicUsize) -> io::Result<Reply> {
    match question {
        Question::Read(path) => read(&root.join(path), MOST_BYTES, OFlags::empty()).map(Reply::Read),
        Question::Names(path) => names(&root.join(path)).map(Reply::Names),
        Question::Files(path) => {
            let dir = root.join(path);
            let (mut files, mut all) = (Vec::new(), 0);
            for name in names(&dir)? {
                // What these directories hold are no links; one in a folder from elsewhere could lead out of it.
                let bytes = read(&dir.join(&name), MOST_PAGE, OFlags::NOFOLLOW);
                progress.fetch_add(1, Ordering::Relaxed);
                all += bytes.as_ref().map_or(0, Vec::len);
                if all > MOST_DIRECTORY {
                    break;
                }
                files.extend(bytes.ok().map(|bytes| (name, bytes)));
            }
            Ok(Reply::Files(files))
        }
        Question::Link(path) => {
            let target = std::fs::read_link(root.join(path))?;
            target.into_os_string().into_string().map(Reply::Link).map_err(|_| io::ErrorKind::InvalidData.into())
        }
        Question::Exists(path) => std::fs::metadata(root.join(path)).map(|_| Reply::Exists),
    }
}

fn read(path: &Path, most: u64, more: OFlags) -> io::Result<Vec<u8>> {
    // A FIFO or a device in a folder from elsewhere is not waited for.
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY | more;
    let file = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn names(dir: &Path) -> io::Result<Vec<String>> {
    let names = std::fs::read_dir(dir)?.take(MOST_NAMES).flatten();
    Ok(names.filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_never_answers_costs_its_deadline_only() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("there"), "x").unwrap();
        let mut probe = Probe::new(dir.path().to_owned());
        // A thread that took the question and is stuck in the kernel: nobody ever replies, and nothing moves.
        let (questions, _asked) = mpsc::channel();
        let (_stuck, replies) = mpsc::channel();
        probe.line = Some(Line { questions, replies, progress: Arc::default() });
        let file = || Question::Read("sys/class/infiniband/mlx5_0/ports/1/rate".into());
        assert_eq!(probe.ask(file()).unwrap_err().kind(), io::ErrorKind::TimedOut);
        // The next question has a thread of its own, and a device that is late again is left alone.
        assert!(probe.ask(Question::Read("there".into())).is_ok());
        probe.late.insert("sys/class/infiniband/mlx5_0".into(), MOST_LATE);
        assert!(probe.ask(file()).unwrap_err().to_string().contains("left out"));
        assert_eq!(probe.ask(Question::Read("sys/class/net".into())).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
