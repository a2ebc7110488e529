//! The process that follows patterns on a host: takes orders as lines of JSON on standard input, and answers with lines. The end of
//! the input removes all written files. Compares no figures.

use super::pattern::{FileAccess, FileList, FilePattern, LaneFigures, temporary_path};
use super::{SAMPLE_INTERVAL, ThreadCrew};
use crate::cpu;
use crate::error::{BenchError, FileContext as _, Result};
use crate::mount::{mountpoint_of, query_counters};
use crate::scratch::free_bytes;
use crate::stop;
use crate::workplace::find_spurline;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, IoSliceMut, Write as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// Longest wait until another mount shows a new folder: beyond the kernel's cache times.
const NEW_FOLDER_TIMEOUT: Duration = Duration::from_secs(15);
/// `f_type` of tmpfs in statfs(2).
const TMPFS_MAGIC: u32 = 0x0102_1994;

/// What an agent is ordered to do.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum AgentOrder {
    /// Make the folder of this run in `dir`, which has to have room for `bytes`.
    Open { dir: PathBuf, folder: PathBuf, bytes: u64 },
    /// Wait until a folder that was made elsewhere is seen here.
    Find { folder: PathBuf },
    /// Follow a pattern.
    Run { pattern: FilePattern },
    /// Drop files from this host's page cache, under the names of each of these lists.
    Drop { lists: Vec<FileList> },
    /// Remove the files of these lists.
    Remove { lists: Vec<FileList> },
    /// Query the counters of the mount that `dir` is in.
    Counters { dir: PathBuf, spurline: Option<PathBuf> },
}

/// The figures of the threads of a host.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HostRun {
    /// The figures of each thread.
    pub lanes: Vec<LaneFigures>,
    /// Seconds since the start, and bytes so far.
    pub over_time: Vec<(f64, u64)>,
    /// Processor seconds of this process.
    pub cpu: f64,
}

/// What became of the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DropResult {
    /// Pages are no longer in memory.
    Dropped,
    /// The kernel does not tell about this file system.
    Requested,
    /// Pages are still in memory.
    Kept,
    /// The file system is memory.
    InMemory,
}

/// Runs an agent until the end of standard input.
pub fn serve_orders() -> Result<()> {
    stop::catch_signals()?;
    let (orders, next) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if orders.send(line).is_err() {
                break;
            }
        }
        // The controlling process is gone, or has all figures.
        stop::request_stop();
    });
    let mut agent = HostAgent::default();
    for line in next {
        let order = serde_json::from_str::<AgentOrder>(&line).map_err(|e| {
            BenchError::Failed(format!("an order is not understood ({e}); install the same build everywhere"))
        });
        let answer = match order.and_then(|order| agent.obey(order)) {
            Ok(value) => json!({ "done": value }),
            Err(BenchError::Missing(why)) => json!({ "missing": why }),
            Err(error) => json!({ "failed": error.to_string() }),
        };
        print_line(&answer)?;
    }
    Ok(())
}

fn print_line(line: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|e| BenchError::io("standard output", &e))
}

/// What an agent has made; removed when dropped.
#[derive(Default)]
struct HostAgent {
    folders: BTreeSet<PathBuf>,
    files: BTreeSet<PathBuf>,
}

impl Drop for HostAgent {
    fn drop(&mut self) {
        for path in &self.files {
            let _ = std::fs::remove_file(path);
            let _ = std::fs::remove_file(temporary_path(path));
        }
        for folder in &self.folders {
            // The last agent of several removes the folder.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

impl HostAgent {
    fn obey(&mut self, order: AgentOrder) -> Result<Value> {
        match order {
            AgentOrder::Open { dir, folder, bytes } => self.open(&dir, folder, bytes),
            AgentOrder::Find { folder } => {
                let what = format!("{} is not seen there: is it the same source? The folder", folder.display());
                stop::wait_until(&what, NEW_FOLDER_TIMEOUT, Duration::from_millis(50), || {
                    Ok(folder.is_dir().then_some(Value::Null))
                })
            }
            AgentOrder::Run { pattern } => {
                if let FileAccess::Write { .. } = pattern.access {
                    self.files.extend(pattern.lists.iter().flat_map(|list| list.files.iter().cloned()));
                }
                answer_of(&run_pattern(&pattern)?)
            }
            AgentOrder::Drop { lists } => answer_of(&lists.iter().map(drop_pages).collect::<Vec<_>>()),
            AgentOrder::Remove { lists } => {
                for path in lists.iter().flat_map(|list| &list.files) {
                    std::fs::remove_file(path).in_file(path)?;
                    self.files.remove(path);
                }
                Ok(Value::Null)
            }
            AgentOrder::Counters { dir, spurline } => {
                let at = mountpoint_of(&dir);
                let program = spurline.or_else(|| find_spurline(None).ok());
                answer_of(&program.and_then(|program| query_counters(&program, &at.display().to_string(), None).ok()))
            }
        }
    }

    fn open(&mut self, dir: &Path, folder: PathBuf, bytes: u64) -> Result<Value> {
        if !dir.is_dir() {
            return Err(BenchError::Missing(format!("there is no folder {}", dir.display())));
        }
        let room = free_bytes(dir);
        if bytes > room {
            let at = dir.display();
            let need = bytes >> 20;
            let have = room >> 20;
            return Err(BenchError::Missing(format!(
                "{at} has {have} MiB free, and one checkpoint needs {need}: give a smaller --size or fewer --ranks"
            )));
        }
        match std::fs::create_dir(&folder) {
            Ok(()) => {}
            // Another host of this run was first.
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(why_not_writable(dir, &e)),
        }
        self.folders.insert(folder);
        Ok(Value::Null)
    }
}

fn answer_of(made: &impl Serialize) -> Result<Value> {
    serde_json::to_value(made).map_err(|e| BenchError::Failed(format!("an answer can't be made: {e}")))
}

/// Follows a pattern, and reports progress.
fn run_pattern(pattern: &FilePattern) -> Result<HostRun> {
    let before = own_cpu()?;
    let mut over_time: Vec<(f64, u64)> = Vec::new();
    let watch = |crew: &ThreadCrew, elapsed: Duration| {
        if over_time.last().is_none_or(|(at, _)| elapsed.as_secs_f64() - at >= SAMPLE_INTERVAL.as_secs_f64()) {
            over_time.push((elapsed.as_secs_f64(), crew.bytes()));
            // A controlling process that is gone ends the run by the end of the input.
            let _ = print_line(&json!({ "progress": crew.bytes() }));
        }
        Ok(true)
    };
    let run = pattern.run(watch)?;
    over_time.push((run.seconds, run.bytes));
    Ok(HostRun { lanes: run.lanes, over_time, cpu: own_cpu()? - before })
}

/// Processor seconds of this process so far.
pub fn own_cpu() -> Result<f64> {
    cpu::of_process(std::process::id()).map(|time| time.own)
}

fn why_not_writable(dir: &Path, error: &std::io::Error) -> BenchError {
    let at = dir.display();
    BenchError::Missing(match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::ROFS) => format!(
            "{at} is read-only: a checkpoint is written. Mount the source with 'spurline mount --rw', with '--writable' on its nodes"
        ),
        Some(Errno::ACCESS | Errno::PERM) => {
            format!("no folder can be made in {at}: {error}; give one that this user may write to")
        }
        _ => format!("no folder can be made in {at}: {error}"),
    })
}

/// Drops the pages of all files of a list; the worst result counts.
fn drop_pages(list: &FileList) -> DropResult {
    let folder = list.files.first().and_then(|path| path.parent()).unwrap_or(Path::new("/"));
    if rustix::fs::statfs(folder).is_ok_and(|known| known.f_type as u32 == TMPFS_MAGIC) {
        return DropResult::InMemory;
    }
    let mut worst = DropResult::Dropped;
    for range in &list.ranges {
        match drop_file(&list.files[range.file], range.len) {
            DropResult::Dropped => {}
            other if worst != DropResult::Kept => worst = other,
            _ => {}
        }
    }
    worst
}

fn drop_file(path: &Path, len: u64) -> DropResult {
    let Ok(file) = File::open(path) else { return DropResult::Kept };
    if fadvise(&file, 0, None, Advice::DontNeed).is_err() {
        return DropResult::Kept;
    }
    // A read that may not wait finds only pages in memory.
    let mut kept = 0;
    let mut byte = [0u8; 1];
    for part in 0..8 {
        match preadv2(&file, &mut [IoSliceMut::new(&mut byte)], len / 8 * part, ReadWriteFlags::NOWAIT) {
            Ok(1) => kept += 1,
            Err(Errno::AGAIN) => {}
            _ => return DropResult::Requested,
        }
    }
    // Pages beside the first read may have come along.
    if kept > 4 { DropResult::Kept } else { DropResult::Dropped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_files_go_with_the_order_or_with_the_agent() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("run");
        let list = FileList::of_files([(folder.join("a.pt"), 3_000_001), (folder.join("b.pt"), 10)]);
        let mut agent = HostAgent::default();
        let open = |bytes| AgentOrder::Open { dir: dir.path().into(), folder: folder.clone(), bytes };
        let error = agent.obey(open(1 << 60)).unwrap_err();
        assert!(matches!(&error, BenchError::Missing(why) if why.contains("--size")), "{error}");
        agent.obey(open(1)).unwrap();
        let access = FileAccess::Write { piece: 1 << 20, sync: true, rename: true };
        let pattern = FilePattern { measured: true, ..FilePattern::of_list(list.clone(), 1, access) };
        let write = || {
            // An order survives its line.
            let order = AgentOrder::Run { pattern: pattern.clone() };
            serde_json::from_str(&serde_json::to_string(&order).unwrap()).unwrap()
        };
        let run: HostRun = serde_json::from_value(agent.obey(write()).unwrap()).unwrap();
        assert_eq!((run.lanes[0].bytes, run.over_time.last().unwrap().1), (3_000_011, 3_000_011));
        let names = || std::fs::read_dir(&folder).unwrap().count();
        assert_eq!(names(), 2);
        let dropped = agent.obey(AgentOrder::Drop { lists: vec![list.clone()] }).unwrap();
        assert_eq!(serde_json::from_value::<Vec<DropResult>>(dropped).unwrap().len(), 1);
        agent.obey(AgentOrder::Remove { lists: vec![list.clone()] }).unwrap();
        assert_eq!(names(), 0);
        // What an interrupted run has written goes with the agent.
        agent.obey(write()).unwrap();
        std::fs::write(temporary_path(&list.files[0]), "begun").unwrap();
        drop(agent);
        assert!(!folder.exists());
    }

    #[test]
    fn a_folder_that_refuses_says_why() {
        let said = |errno: Errno| why_not_writable(Path::new("/mnt/x"), &errno.into()).to_string();
        assert!(said(Errno::ROFS).contains("spurline mount --rw"), "{}", said(Errno::ROFS));
        assert!(said(Errno::ACCESS).contains("this user"));
        assert!(said(Errno::NOSPC).contains("/mnt/x"));
    }
}
