//! The process that is all ranks of a host: takes orders as lines of JSON on standard input, and answers with lines. The end of
//! the input removes all written files. Compares no figures.

use super::plan::{RankFile, RankPlan};
use crate::cpu;
use crate::error::{BenchError, FileContext, Result};
use crate::mount::{mountpoint_of, query_counters};
use crate::scratch::{fill_pattern, free_bytes};
use crate::{child, stop};
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead as _, IoSliceMut, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// Bytes of a write and of a read.
const PIECE_BYTES: usize = 1 << 20;
/// Distance of the words that tell a page from all others.
const PAGE_BYTES: usize = 4096;
/// Interval of the throughput over time, and of progress.
const WORKER_SAMPLE_INTERVAL: Duration = Duration::from_millis(250);
/// Longest wait until another mount shows a new folder: beyond the kernel's cache times.
const NEW_FOLDER_TIMEOUT: Duration = Duration::from_secs(15);

/// What a worker is ordered to do.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum WorkerOrder {
    /// Make the folder of this run in `dir`, which has to have room for `bytes`.
    Open { dir: PathBuf, folder: PathBuf, bytes: u64 },
    /// Wait until a folder that was made elsewhere is seen here.
    Find { folder: PathBuf },
    /// Write, sync and rename the files of these ranks.
    Write { folder: PathBuf, ranks: Vec<RankPlan> },
    /// Drop the files from this host's page cache, in each of these folders.
    Drop { folders: Vec<PathBuf>, ranks: Vec<RankPlan> },
    /// Read the files of these ranks.
    Read { folder: PathBuf, ranks: Vec<RankPlan> },
    /// Remove the files of these ranks.
    Remove { folder: PathBuf, ranks: Vec<RankPlan> },
    /// Query the counters of the mount that `dir` is in.
    Counters { dir: PathBuf, spurline: Option<PathBuf> },
}

/// The figures of a rank in a phase.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RankFigures {
    /// The number.
    pub rank: usize,
    /// Bytes written or read.
    pub bytes: u64,
    /// Seconds in the calls of the file system; making and comparing bytes is outside.
    pub seconds: f64,
    /// Seconds of these in fsync.
    pub sync_seconds: f64,
    /// CRC-32C of each file.
    pub checksums: Vec<u32>,
}

/// The figures of a host in a phase.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct HostPhase {
    /// The ranks.
    pub ranks: Vec<RankFigures>,
    /// Seconds since the start, and bytes so far.
    pub over_time: Vec<(f64, u64)>,
    /// Processor seconds of the ranks.
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

/// Runs a worker until the end of standard input.
///
/// # Errors
/// When standard output is closed.
pub fn run() -> Result<()> {
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
    let mut worker = Worker::default();
    for line in next {
        let done = serde_json::from_str::<WorkerOrder>(&line)
            .map_err(|e| {
                BenchError::Failed(format!("an order is not understood ({e}); install the same build everywhere"))
            })
            .and_then(|order| worker.obey(order));
        let answer = match done {
            Ok(value) => json!({ "done": value }),
            Err(BenchError::Missing(why)) => json!({ "missing": why }),
            Err(error) => json!({ "failed": error.to_string() }),
        };
        say(&answer)?;
    }
    Ok(())
}

fn say(line: &Value) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|e| BenchError::io("standard output", &e))
}

/// What a worker has made; removed when dropped.
#[derive(Default)]
struct Worker {
    files: Mutex<BTreeSet<PathBuf>>,
    folders: BTreeSet<PathBuf>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        for file in self.files.get_mut().unwrap_or_else(PoisonError::into_inner).iter() {
            // The next run removes the rest, or the user does by the name of the folder.
            let _ = std::fs::remove_file(file);
        }
        for folder in &self.folders {
            // Not empty while another host still has files there: the last host removes the folder.
            let _ = std::fs::remove_dir(folder);
        }
    }
}

impl Worker {
    fn obey(&mut self, order: WorkerOrder) -> Result<Value> {
        match order {
            WorkerOrder::Open { dir, folder, bytes } => self.open(&dir, folder, bytes),
            WorkerOrder::Find { folder } => {
                let what = format!("{} is not seen there: is it the same source? The folder", folder.display());
                stop::wait_until(&what, NEW_FOLDER_TIMEOUT, Duration::from_millis(50), || {
                    Ok(folder.is_dir().then_some(Value::Null))
                })
            }
            WorkerOrder::Write { folder, ranks } => {
                self.folders.insert(folder.clone());
                made_value(serde_json::to_value(run_ranks(&ranks, |plan, done| self.write_rank(&folder, plan, done))?))
            }
            WorkerOrder::Drop { folders, ranks } => {
                let dropped: Vec<DropResult> = folders.iter().map(|folder| drop_pages(folder, &ranks)).collect();
                made_value(serde_json::to_value(dropped))
            }
            WorkerOrder::Read { folder, ranks } => {
                made_value(serde_json::to_value(run_ranks(&ranks, |plan, done| read_rank(&folder, plan, done))?))
            }
            WorkerOrder::Remove { folder, ranks } => self.remove(&folder, &ranks),
            WorkerOrder::Counters { dir, spurline } => {
                let at = mountpoint_of(&dir);
                let program = spurline.or_else(own_spurline);
                let known = program.and_then(|program| query_counters(&program, &at.display().to_string(), None).ok());
                Ok(json!({ "mountpoint": at, "counters": known }))
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

    /// Writes the files of a rank: each under a temporary name, synced, then renamed.
    fn write_rank(&self, folder: &Path, plan: &RankPlan, done: &AtomicU64) -> Result<RankFigures> {
        let mut figures = RankFigures { rank: plan.rank, ..RankFigures::default() };
        let mut piece = vec![0u8; PIECE_BYTES];
        fill_pattern(plan.rank as u64, 0, &mut piece);
        for (index, known) in plan.files.iter().enumerate() {
            let path = folder.join(&known.name);
            let part = folder.join(format!("{}.part", known.name));
            self.made(part.clone());
            let mut timed = Stopwatch::default();
            let mut file = timed.time(|| File::options().write(true).create_new(true).open(&part)).in_file(&part)?;
            let mut at = 0;
            let mut checksum = 0;
            while at < known.len {
                let n = ((known.len - at) as usize).min(PIECE_BYTES);
                stamp_pages(&mut piece[..n], plan.rank, index, &known.name, at);
                checksum = crc32c::crc32c_append(checksum, &piece[..n]);
                timed.time(|| file.write_all(&piece[..n])).in_file(&part)?;
                at += n as u64;
                done.fetch_add(n as u64, Ordering::Relaxed);
                stop::check_stop()?;
            }
            let before = timed.spent;
            timed.time(|| file.sync_all()).in_file(&part)?;
            figures.sync_seconds += (timed.spent - before).as_secs_f64();
            timed.time(|| drop(file));
            self.made(path.clone());
            timed.time(|| std::fs::rename(&part, &path)).in_file(&part)?;
            figures.bytes += known.len;
            figures.seconds += timed.spent.as_secs_f64();
            figures.checksums.push(checksum);
        }
        Ok(figures)
    }

    fn made(&self, path: PathBuf) {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).insert(path);
    }

    fn remove(&mut self, folder: &Path, ranks: &[RankPlan]) -> Result<Value> {
        let files = self.files.get_mut().unwrap_or_else(PoisonError::into_inner);
        for file in ranks.iter().flat_map(|plan| &plan.files) {
            let path = folder.join(&file.name);
            std::fs::remove_file(&path).map_err(|e| BenchError::io(path.display(), &e))?;
            files.remove(&path);
            files.remove(&folder.join(format!("{}.part", file.name)));
        }
        Ok(Value::Null)
    }
}

fn made_value(made: serde_json::Result<Value>) -> Result<Value> {
    made.map_err(|e| BenchError::Failed(format!("an answer can't be made: {e}")))
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

fn own_spurline() -> Option<PathBuf> {
    let beside = std::env::current_exe().ok()?.with_file_name("spurline");
    Some(beside).filter(|file| file.is_file()).or_else(|| child::find_program("spurline"))
}

/// Time in calls.
#[derive(Default)]
struct Stopwatch {
    spent: Duration,
}

impl Stopwatch {
    fn time<T>(&mut self, call: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = call();
        self.spent += start.elapsed();
        result
    }
}

/// Makes every page of a piece different from all others of the run.
fn stamp_pages(piece: &mut [u8], rank: usize, file: usize, name: &str, at: u64) {
    let seed = u64::from(crc32c::crc32c(name.as_bytes())) << 32 | (rank as u64) << 1 | file as u64;
    for (index, page) in piece.chunks_mut(PAGE_BYTES).enumerate() {
        let stamp = seed.rotate_left(17) ^ (at + (index * PAGE_BYTES) as u64);
        let n = page.len().min(8);
        page[..n].copy_from_slice(&stamp.to_le_bytes()[..n]);
    }
}

/// Runs all ranks at once, a thread each, and reports progress.
fn run_ranks(
    plans: &[RankPlan],
    work: impl Fn(&RankPlan, &AtomicU64) -> Result<RankFigures> + Sync,
) -> Result<HostPhase> {
    let done = AtomicU64::new(0);
    let barrier = Barrier::new(plans.len() + 1);
    let work = &work;
    let cpu_before = own_cpu()?;
    let mut over_time = Vec::new();
    let figures: Vec<Result<RankFigures>> = std::thread::scope(|scope| {
        let done = &done;
        let barrier = &barrier;
        let threads: Vec<_> = plans
            .iter()
            .map(|plan| {
                scope.spawn(move || {
                    barrier.wait();
                    work(plan, done)
                })
            })
            .collect();
        barrier.wait();
        let start = Instant::now();
        let mut last = start;
        loop {
            let ended = threads.iter().all(std::thread::ScopedJoinHandle::is_finished);
            if ended || last.elapsed() >= WORKER_SAMPLE_INTERVAL {
                last = Instant::now();
                let bytes = done.load(Ordering::Relaxed);
                over_time.push((start.elapsed().as_secs_f64(), bytes));
                // A controlling process that is gone ends the ranks by the end of the input.
                let _ = say(&json!({ "progress": bytes }));
            }
            if ended {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(BenchError::Failed("a rank panicked".to_owned()))))
            .collect()
    });
    let ranks = figures.into_iter().collect::<Result<Vec<_>>>()?;
    Ok(HostPhase { ranks, over_time, cpu: own_cpu()? - cpu_before })
}

fn own_cpu() -> Result<f64> {
    cpu::of_process(std::process::id()).map(|time| time.own)
}

fn read_rank(folder: &Path, plan: &RankPlan, done: &AtomicU64) -> Result<RankFigures> {
    let mut figures = RankFigures { rank: plan.rank, ..RankFigures::default() };
    let mut piece = vec![0u8; PIECE_BYTES];
    for known in &plan.files {
        let path = folder.join(&known.name);
        let mut timed = Stopwatch::default();
        let mut file = timed.time(|| File::open(&path)).in_file(&path)?;
        let mut at = 0;
        let mut checksum = 0;
        loop {
            let n = timed.time(|| file.read(&mut piece)).in_file(&path)?;
            if n == 0 {
                break;
            }
            checksum = crc32c::crc32c_append(checksum, &piece[..n]);
            at += n as u64;
            done.fetch_add(n as u64, Ordering::Relaxed);
            stop::check_stop()?;
        }
        if at != known.len {
            return Err(BenchError::Failed(format!("{}: {at} bytes instead of {}", path.display(), known.len)));
        }
        figures.bytes += at;
        figures.seconds += timed.spent.as_secs_f64();
        figures.checksums.push(checksum);
    }
    Ok(figures)
}

/// Drops the pages of all files in a folder; the worst result counts.
fn drop_pages(folder: &Path, ranks: &[RankPlan]) -> DropResult {
    const TMPFS_MAGIC: u32 = 0x0102_1994;
    if rustix::fs::statfs(folder).is_ok_and(|known| known.f_type as u32 == TMPFS_MAGIC) {
        return DropResult::InMemory;
    }
    let mut worst = DropResult::Dropped;
    for file in ranks.iter().flat_map(|plan| &plan.files) {
        match drop_file(folder, file) {
            DropResult::Dropped => {}
            other if worst != DropResult::Kept => worst = other,
            _ => {}
        }
    }
    worst
}

fn drop_file(folder: &Path, known: &RankFile) -> DropResult {
    let Ok(file) = File::open(folder.join(&known.name)) else { return DropResult::Kept };
    if fadvise(&file, 0, None, Advice::DontNeed).is_err() {
        return DropResult::Kept;
    }
    // A read that may not wait finds only pages in memory.
    let mut kept = 0;
    let mut byte = [0u8; 1];
    for part in 0..8 {
        let at = known.len / 8 * part;
        match preadv2(&file, &mut [IoSliceMut::new(&mut byte)], at, ReadWriteFlags::NOWAIT) {
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
    use super::super::plan::{CheckpointModel, plan_ranks};
    use super::*;

    #[test]
    fn files_are_written_renamed_read_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("run");
        let ranks = plan_ranks(CheckpointModel::Llama3x8b, 2, 3_000_001, 1);
        let mut worker = Worker::default();
        let open = |bytes| WorkerOrder::Open { dir: dir.path().into(), folder: folder.clone(), bytes };
        let error = worker.obey(open(1 << 60)).unwrap_err();
        assert!(matches!(&error, BenchError::Missing(why) if why.contains("--size")), "{error}");
        worker.obey(open(1)).unwrap();
        let write = WorkerOrder::Write { folder: folder.clone(), ranks: ranks.clone() };
        // An order survives its line.
        let write = serde_json::from_str(&serde_json::to_string(&write).unwrap()).unwrap();
        let written: HostPhase = serde_json::from_value(worker.obey(write).unwrap()).unwrap();
        let names = || {
            let mut names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
            names.sort();
            names
        };
        assert_eq!(names().len(), 4);
        assert!(names().iter().all(|name| name.to_string_lossy().ends_with(".pt")));
        let read = || WorkerOrder::Read { folder: folder.clone(), ranks: ranks.clone() };
        let got: HostPhase = serde_json::from_value(worker.obey(read()).unwrap()).unwrap();
        for (wrote, read) in written.ranks.iter().zip(&got.ranks) {
            assert_eq!((wrote.bytes, &wrote.checksums), (read.bytes, &read.checksums));
        }
        assert_eq!(got.ranks[0].bytes, 3_000_001);
        assert_ne!(got.ranks[0].checksums, got.ranks[1].checksums);
        let dropped = worker.obey(WorkerOrder::Drop { folders: vec![folder.clone()], ranks: ranks.clone() }).unwrap();
        assert!(serde_json::from_value::<Vec<DropResult>>(dropped).unwrap().len() == 1);
        // Cut short: another length.
        File::options().write(true).open(folder.join(&ranks[0].files[1].name)).unwrap().set_len(5).unwrap();
        assert!(worker.obey(read()).unwrap_err().to_string().contains("5 bytes instead of"));
        worker.obey(WorkerOrder::Remove { folder: folder.clone(), ranks: ranks.clone() }).unwrap();
        assert!(names().is_empty());
        // What an interrupted run has written goes with the worker.
        worker.obey(WorkerOrder::Write { folder: folder.clone(), ranks }).unwrap();
        drop(worker);
        assert!(!folder.exists());
    }

    #[test]
    fn pages_differ() {
        let mut first = vec![0u8; PIECE_BYTES];
        let stamped = |piece: &mut Vec<u8>, rank, file, name, at| {
            stamp_pages(piece, rank, file, name, at);
            crc32c::crc32c(piece)
        };
        let sums = [
            stamped(&mut first, 0, 0, "a", 0),
            stamped(&mut first, 1, 0, "a", 0),
            stamped(&mut first, 0, 1, "a", 0),
            stamped(&mut first, 0, 0, "b", 0),
            stamped(&mut first, 0, 0, "a", 1 << 20),
        ];
        let unique: BTreeSet<u32> = sums.into_iter().collect();
        assert_eq!(unique.len(), 5);
        assert_ne!(first[0..8], first[PAGE_BYTES..PAGE_BYTES + 8]);
    }

    #[test]
    fn a_folder_that_refuses_says_why() {
        let said = |errno: Errno| why_not_writable(Path::new("/mnt/x"), &errno.into()).to_string();
        assert!(said(Errno::ROFS).contains("spurline mount --rw"), "{}", said(Errno::ROFS));
        assert!(said(Errno::ACCESS).contains("this user"));
        assert!(said(Errno::NOSPC).contains("/mnt/x"));
    }
}
