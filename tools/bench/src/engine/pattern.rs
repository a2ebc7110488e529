//! A pattern of file accesses: which files, in which order, in which pieces, by how many threads, with which pauses. A pattern is
//! data that may travel to another host, and [`FilePattern::run`] follows the pattern. Knows no mount, and no figure of a report.

use super::mapping::FileMapping;
use super::{CrewRun, ThreadCrew, run_threads};
use crate::error::{BenchError, FileContext as _, Result};
use crate::scratch::fill_pattern;
use parking_lot::Mutex;
use rustix::fs::{Advice, OFlags, fadvise};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// Alignment that O_DIRECT needs of memory, places and lengths.
const DIRECT_ALIGN: usize = 4096;
/// Distance of the words that tell a written page from all others.
const PAGE_BYTES: usize = 4096;
/// Bytes that a thread copies out of a mapping at a time: its memory stays small, and each page is still used once.
const COPY_BYTES: usize = 1 << 20;
/// Batches that each reader may have ready: PyTorch's prefetch factor.
const PREFETCH_BATCHES: usize = 2;
/// Length of a file that is not known before the read.
pub const UNKNOWN_LEN: u64 = u64::MAX;

/// What threads do with files.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FilePattern {
    /// The files. Each list has own threads, which take the ranges in order.
    pub lists: Vec<FileList>,
    pub threads: usize,
    /// What a thread does with a range.
    pub access: FileAccess,
    /// Whether each call is timed and each file has a checksum.
    pub measured: bool,
    /// Repeats the lists without end, each time in a new order, by this seed.
    pub endless: Option<u64>,
    /// Readers that feed accelerators.
    pub steps: Option<ComputeSteps>,
}

/// Files, and ranges of the files in the order of use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileList {
    pub files: Vec<PathBuf>,
    pub ranges: Vec<FileRange>,
}

impl FileList {
    /// Whole files of these lengths.
    pub fn of_files(files: impl IntoIterator<Item = (PathBuf, u64)>) -> FileList {
        let mut list = FileList::default();
        for (number, (path, len)) in files.into_iter().enumerate() {
            list.files.push(path);
            list.ranges.push(FileRange { file: number, start: 0, len });
        }
        list
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRange {
    /// Number of the file in the list.
    pub file: usize,
    /// Bytes from the start of the file.
    pub start: u64,
    pub len: u64,
}

/// What a thread does with a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileAccess {
    /// Opens and reads the file from the start, `piece` bytes at a time.
    Read {
        piece: usize,
        /// Drops the file's pages from the page cache first.
        cold: bool,
        /// Reads until the file system reports the end, which has to be that of the range.
        to_end: bool,
    },
    /// Reads `piece` bytes at the start of the range, of a file that is open already.
    ReadPiece { piece: usize, direct: bool },
    /// Copies the range out of a mapping of the file.
    Map,
    /// Creates and writes the file, `piece` bytes at a time.
    Write {
        piece: usize,
        /// Syncs the file before the close.
        sync: bool,
        /// Writes under a temporary name and renames.
        rename: bool,
    },
    /// Looks the name up.
    Stat {
        /// Whether the name has to be there.
        present: bool,
    },
}

/// Emulated accelerators: each takes a batch from the readers, and computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeSteps {
    /// Threads that read for one accelerator.
    pub readers: usize,
    /// A batch: files, or bytes.
    pub batch: u64,
    /// Whether a batch is counted in files.
    pub of_files: bool,
    /// Time that a step computes.
    pub compute: Duration,
}

/// The figures of a thread.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneFigures {
    pub bytes: u64,
    /// Seconds in calls of the file system, where measured; making and comparing bytes is outside.
    pub seconds: f64,
    /// Seconds of these in fsync.
    pub sync_seconds: f64,
    /// CRC-32C of each file, where measured.
    pub checksums: Vec<u32>,
    /// Microseconds of each lookup.
    pub lookups_us: Vec<f64>,
    /// Steps of an accelerator.
    pub steps: u64,
    /// The share of the time that an accelerator computed since [`ThreadCrew::start_window`].
    pub utilisation: f64,
}

impl FilePattern {
    /// A pattern of threads that share one list.
    pub fn of_list(list: FileList, threads: usize, access: FileAccess) -> FilePattern {
        FilePattern { lists: vec![list], threads, access, measured: false, endless: None, steps: None }
    }

    /// Runs all threads; `watch` as for [`run_threads`]. The figures are in the order of lists, then of threads, with
    /// accelerators behind all readers.
    pub fn run(&self, watch: impl FnMut(&ThreadCrew, Duration) -> Result<bool>) -> Result<CrewRun<LaneFigures>> {
        let readers = self.lists.len() * self.threads;
        let mut content = Vec::new();
        if let FileAccess::Write { piece, .. } = self.access {
            let longest = self.lists.iter().flat_map(|list| &list.ranges).map(|range| range.len).max().unwrap_or(0);
            content.resize(longest.min(piece as u64) as usize, 0);
            fill_pattern(0, 0, &mut content);
        }
        // Each reader takes another sender, so that a channel ends with the last reader.
        let mut senders = Vec::new();
        let mut receivers = Vec::new();
        if let Some(steps) = self.steps {
            for _ in 0..readers / steps.readers {
                let (sender, receiver) = sync_channel(PREFETCH_BATCHES * steps.readers);
                senders.extend((0..steps.readers).map(|_| Mutex::new(Some(sender.clone()))));
                receivers.push(Mutex::new(Some(receiver)));
            }
        }
        let lists: Vec<ListState> = self.lists.iter().map(|list| ListState::new(list, self.endless)).collect();
        let work = |crew: &ThreadCrew, number: usize| {
            if number >= readers {
                let batches = receivers[number - readers].lock().take();
                return Ok(batches.map_or_else(LaneFigures::default, |batches| self.compute(crew, &batches)));
            }
            let ready = senders.get(number).and_then(|sender| sender.lock().take());
            let mut lane = FileLane {
                pattern: self,
                crew,
                state: &lists[number / self.threads],
                content: &content,
                held: None,
                memory: Vec::new(),
                spent: Duration::ZERO,
                gate: BatchGate { steps: self.steps.zip(ready), left: self.steps.map_or(0, |steps| steps.batch) },
                figures: LaneFigures::default(),
            };
            lane.run()?;
            Ok(lane.figures)
        };
        run_threads(readers + receivers.len(), work, watch)
    }

    /// An accelerator: takes a batch, computes, until the end.
    fn compute(&self, crew: &ThreadCrew, batches: &Receiver<()>) -> LaneFigures {
        let compute = self.steps.map_or(Duration::ZERO, |steps| steps.compute);
        let mut figures = LaneFigures::default();
        let mut window: Option<Instant> = None;
        let mut busy = Duration::ZERO;
        let mut is_first = true;
        while !crew.is_stopped() {
            match batches.recv_timeout(Duration::from_millis(20)) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let start = Instant::now();
            if !compute.is_zero() {
                std::thread::sleep(compute);
            }
            if window.is_some() {
                busy += start.elapsed();
                figures.steps += 1;
            } else if crew.is_window_open() {
                window = Some(Instant::now());
            }
            if std::mem::take(&mut is_first) {
                crew.add_ready();
            }
        }
        let share = |since: Instant| busy.as_secs_f64() / since.elapsed().as_secs_f64().max(1e-9);
        figures.utilisation = window.map_or(0.0, share);
        figures
    }
}

/// The files of a list that stay open.
enum HeldFiles {
    Open(Vec<File>),
    Mapped(Vec<FileMapping>),
}

/// The state that the threads of a list share.
struct ListState<'a> {
    list: &'a FileList,
    order: Mutex<RangeOrder>,
    held: Mutex<Option<Arc<HeldFiles>>>,
}

impl<'a> ListState<'a> {
    fn new(list: &'a FileList, endless: Option<u64>) -> Self {
        let order = Mutex::new(RangeOrder::new(list.ranges.len(), endless));
        ListState { list, order, held: Mutex::new(None) }
    }

    /// The list's files, opened by the first thread.
    fn hold(&self, open: impl FnOnce(&[PathBuf]) -> Result<HeldFiles>) -> Result<Arc<HeldFiles>> {
        let mut held = self.held.lock();
        match &*held {
            Some(known) => Ok(Arc::clone(known)),
            None => Ok(Arc::clone(held.insert(Arc::new(open(&self.list.files)?)))),
        }
    }
}

/// The order of a list's ranges: as in the list, or without end and shuffled anew for each pass.
struct RangeOrder {
    order: Vec<usize>,
    next: usize,
    random: Option<u64>,
}

impl RangeOrder {
    fn new(count: usize, endless: Option<u64>) -> Self {
        let random = endless.map(|seed| seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        RangeOrder { order: (0..count).collect(), next: if random.is_some() { count } else { 0 }, random }
    }

    fn take(&mut self) -> Option<usize> {
        if self.next >= self.order.len() {
            shuffle(&mut self.order, self.random.as_mut()?);
            self.next = 0;
        }
        self.next += 1;
        self.order.get(self.next - 1).copied()
    }
}

/// Fisher and Yates, by [`next_uniform`].
pub fn shuffle<T>(values: &mut [T], state: &mut u64) {
    for last in (1..values.len()).rev() {
        let other = (next_uniform(state) * (last + 1) as f64) as usize;
        values.swap(last, other.min(last));
    }
}

/// xorshift64, as a number from 0 to 1.
pub fn next_uniform(state: &mut u64) -> f64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) as f64 / (1u64 << 53) as f64
}

/// Hands whole batches of a reader to the accelerator.
struct BatchGate {
    steps: Option<(ComputeSteps, SyncSender<()>)>,
    /// Files or bytes that the batch lacks.
    left: u64,
}

impl BatchGate {
    /// Bytes that may be read at once.
    fn most(&self, piece: u64) -> u64 {
        match &self.steps {
            Some((steps, _)) if !steps.of_files => piece.min(self.left),
            _ => piece,
        }
    }

    /// Counts a read; `false` once the accelerator has ended.
    fn count(&mut self, bytes: u64, ends_file: bool) -> bool {
        let Some((steps, ready)) = &self.steps else { return true };
        self.left -= if steps.of_files { u64::from(ends_file) } else { bytes };
        if self.left > 0 {
            return true;
        }
        self.left = steps.batch;
        ready.send(()).is_ok()
    }
}

/// A thread that works off a list.
struct FileLane<'a> {
    pattern: &'a FilePattern,
    crew: &'a ThreadCrew,
    state: &'a ListState<'a>,
    /// The bytes of a write, unless each page is made different.
    content: &'a [u8],
    held: Option<Arc<HeldFiles>>,
    /// The buffer of this thread.
    memory: Vec<u8>,
    /// Time in calls, where measured.
    spent: Duration,
    gate: BatchGate,
    figures: LaneFigures,
}

/// Calls the file system, and adds the time where the pattern is measured.
fn timed<T>(pattern: &FilePattern, spent: &mut Duration, call: impl FnOnce() -> T) -> T {
    if !pattern.measured {
        return call();
    }
    let start = Instant::now();
    let result = call();
    *spent += start.elapsed();
    result
}

impl FileLane<'_> {
    /// Works off the list, until the end of the run or of the accelerator, or a failure.
    fn run(&mut self) -> Result<()> {
        match self.pattern.access {
            FileAccess::Read { piece, .. } => self.memory = vec![0; piece],
            FileAccess::ReadPiece { piece, direct } => {
                self.memory = vec![0; piece + DIRECT_ALIGN];
                self.held = Some(self.state.hold(|files| open_files(files, direct))?);
            }
            FileAccess::Map => {
                self.memory = vec![0; COPY_BYTES];
                self.held = Some(self.state.hold(map_files)?);
            }
            FileAccess::Write { .. } if self.pattern.measured => self.memory = self.content.to_vec(),
            FileAccess::Write { .. } | FileAccess::Stat { .. } => {}
        }
        let list = self.state.list;
        while !self.crew.is_stopped() {
            let Some(number) = self.state.order.lock().take() else { break };
            let range = list.ranges[number];
            let path = &list.files[range.file];
            self.crew.add_item();
            let goes_on = match self.pattern.access {
                FileAccess::Read { piece, cold, to_end } => self.read_file(path, range.len, piece, cold, to_end)?,
                FileAccess::ReadPiece { piece, .. } => self.read_piece(path, &range, piece)?,
                FileAccess::Map => self.copy_range(&range),
                FileAccess::Write { sync, rename, .. } => self.write_file(path, range.len, sync, rename)?,
                FileAccess::Stat { present } => self.look_up(path, present)?,
            };
            if !goes_on {
                break;
            }
        }
        self.figures.seconds = self.spent.as_secs_f64();
        Ok(())
    }

    fn add_bytes(&mut self, bytes: u64) {
        self.figures.bytes += bytes;
        self.crew.add_bytes(bytes);
    }

    fn read_file(&mut self, path: &Path, len: u64, piece: usize, cold: bool, to_end: bool) -> Result<bool> {
        let pattern = self.pattern;
        let mut file = timed(pattern, &mut self.spent, || File::open(path)).in_file(path)?;
        if cold {
            // A file system without the call keeps such pages, which the counters then show.
            let _ = fadvise(&file, 0, None, Advice::DontNeed);
        }
        let mut at = 0;
        let mut checksum = 0;
        while to_end || at < len {
            if self.crew.is_stopped() {
                return Ok(false);
            }
            let most = if to_end { piece as u64 } else { self.gate.most((len - at).min(piece as u64)) };
            let buffer = &mut self.memory[..most as usize];
            let got = timed(pattern, &mut self.spent, || file.read(buffer)).in_file(path)?;
            if got == 0 {
                break;
            }
            if pattern.measured {
                checksum = crc32c::crc32c_append(checksum, &self.memory[..got]);
            }
            at += got as u64;
            self.add_bytes(got as u64);
            if !self.gate.count(got as u64, at == len) {
                return Ok(false);
            }
        }
        if at != len && len != UNKNOWN_LEN {
            return Err(BenchError::Failed(format!("{}: {at} bytes instead of {len}", path.display())));
        }
        self.figures.checksums.extend(pattern.measured.then_some(checksum));
        Ok(true)
    }

    fn read_piece(&mut self, path: &Path, range: &FileRange, piece: usize) -> Result<bool> {
        let Some(HeldFiles::Open(files)) = self.held.as_deref() else { return Ok(false) };
        let skipped = self.memory.as_ptr().align_offset(DIRECT_ALIGN);
        let buffer = &mut self.memory[skipped..skipped + piece];
        let mut done = 0;
        while done < piece {
            let read = files[range.file].read_at(&mut buffer[done..], range.start + done as u64).in_file(path)?;
            done += read;
            // The end of the file: with O_DIRECT, the next read would not be aligned.
            if read == 0 || !done.is_multiple_of(DIRECT_ALIGN) {
                break;
            }
        }
        self.add_bytes(done as u64);
        Ok(true)
    }

    fn copy_range(&mut self, range: &FileRange) -> bool {
        let Some(HeldFiles::Mapped(files)) = self.held.as_deref() else { return false };
        let mut done = 0;
        while done < range.len && !self.crew.is_stopped() {
            let len = self.memory.len().min((range.len - done) as usize);
            files[range.file].copy_to((range.start + done) as usize, &mut self.memory[..len]);
            // An optimising compiler removes copies that nothing reads.
            std::hint::black_box(&mut self.memory);
            done += len as u64;
        }
        self.add_bytes(done);
        true
    }

    fn write_file(&mut self, path: &Path, len: u64, sync: bool, rename: bool) -> Result<bool> {
        let pattern = self.pattern;
        let temporary = if rename { temporary_path(path) } else { path.to_owned() };
        let create = || File::options().write(true).create_new(true).open(&temporary);
        let mut file = timed(pattern, &mut self.spent, create).in_file(&temporary)?;
        let mut at = 0;
        let mut checksum = 0;
        while at < len {
            if self.crew.is_stopped() {
                return Ok(false);
            }
            let n = (len - at).min(self.content.len() as u64) as usize;
            let mut piece = &self.content[..n];
            if pattern.measured {
                stamp_pages(&mut self.memory[..n], path, at);
                piece = &self.memory[..n];
                checksum = crc32c::crc32c_append(checksum, piece);
            }
            timed(pattern, &mut self.spent, || file.write_all(piece)).in_file(&temporary)?;
            at += n as u64;
            self.add_bytes(n as u64);
        }
        if sync {
            let before = self.spent;
            timed(pattern, &mut self.spent, || file.sync_all()).in_file(&temporary)?;
            self.figures.sync_seconds += (self.spent - before).as_secs_f64();
        }
        timed(pattern, &mut self.spent, || drop(file));
        if rename {
            timed(pattern, &mut self.spent, || std::fs::rename(&temporary, path)).in_file(&temporary)?;
        }
        self.figures.checksums.extend(pattern.measured.then_some(checksum));
        Ok(true)
    }

    fn look_up(&mut self, path: &Path, present: bool) -> Result<bool> {
        let began = Instant::now();
        let found = std::fs::symlink_metadata(path);
        self.figures.lookups_us.push(began.elapsed().as_secs_f64() * 1e6);
        match found {
            Ok(known) if present => self.add_bytes(known.len()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !present => {}
            Ok(_) => return Err(BenchError::Failed(format!("{} is there", path.display()))),
            Err(error) => return Err(BenchError::io(path.display(), &error)),
        }
        Ok(true)
    }
}

fn open_files(files: &[PathBuf], direct: bool) -> Result<HeldFiles> {
    let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
    let open = |path: &PathBuf| File::options().read(true).custom_flags(flags).open(path).in_file(path);
    Ok(HeldFiles::Open(files.iter().map(open).collect::<Result<_>>()?))
}

fn map_files(files: &[PathBuf]) -> Result<HeldFiles> {
    Ok(HeldFiles::Mapped(files.iter().map(|path| FileMapping::open(path)).collect::<Result<_>>()?))
}

/// The name under which a file is written before the rename.
pub fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    name.into()
}

/// Makes every page of a piece different from all others of a run.
fn stamp_pages(piece: &mut [u8], path: &Path, at: u64) {
    let name = path.file_name().unwrap_or_default();
    let seed = u64::from(crc32c::crc32c(name.as_encoded_bytes())) << 32;
    for (index, page) in piece.chunks_mut(PAGE_BYTES).enumerate() {
        let stamp = seed.rotate_left(17) ^ (at + (index * PAGE_BYTES) as u64);
        let n = page.len().min(8);
        page[..n].copy_from_slice(&stamp.to_le_bytes()[..n]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::to_the_end;
    use super::*;
    use std::collections::BTreeSet;

    const READ: FileAccess = FileAccess::Read { piece: 1 << 20, cold: true, to_end: true };

    fn files(dir: &Path, lens: &[u64]) -> FileList {
        FileList::of_files(lens.iter().enumerate().map(|(number, len)| (dir.join(format!("f{number}")), *len)))
    }

    #[test]
    fn written_files_are_read_looked_up_and_copied() {
        let dir = tempfile::tempdir().unwrap();
        let lens = [3_000_001, 5, 1 << 20, 0];
        let all: u64 = lens.iter().sum();
        let list = files(dir.path(), &lens);
        let access = FileAccess::Write { piece: 1 << 20, sync: true, rename: true };
        let lists = vec![list.clone()];
        let write = FilePattern { lists, threads: 1, access, measured: true, endless: None, steps: None };
        let written = write.run(to_the_end).unwrap();
        assert_eq!((written.bytes, written.items, written.lanes[0].checksums.len()), (all, 4, 4));
        assert!(written.lanes[0].sync_seconds <= written.lanes[0].seconds);
        let names = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert!(names.into_iter().all(|name| !name.to_string_lossy().ends_with(".part")));
        let read = FilePattern { access: READ, ..write.clone() }.run(to_the_end).unwrap();
        assert_eq!(read.lanes[0].checksums, written.lanes[0].checksums);
        // Three threads, which share the list.
        let by_three = |access| FilePattern::of_list(list.clone(), 3, access).run(to_the_end);
        for access in [READ, FileAccess::ReadPiece { piece: 4 << 20, direct: false }] {
            assert_eq!(by_three(access).unwrap().bytes, all);
        }
        let found = by_three(FileAccess::Stat { present: true }).unwrap();
        assert_eq!(found.lanes.iter().map(|lane| lane.lookups_us.len()).sum::<usize>(), 4);
        assert!(by_three(FileAccess::Stat { present: false }).unwrap_err().to_string().contains("is there"));
        let mapped = FileList { ranges: list.ranges[..3].to_vec(), files: list.files[..3].to_vec() };
        assert_eq!(FilePattern::of_list(mapped, 2, FileAccess::Map).run(to_the_end).unwrap().bytes, all);
        // Cut short: another length.
        File::options().write(true).open(dir.path().join("f2")).unwrap().set_len(5).unwrap();
        assert!(by_three(READ).unwrap_err().to_string().contains("5 bytes instead of 1048576"));
        std::fs::remove_file(dir.path().join("f1")).unwrap();
        assert!(by_three(READ).unwrap_err().to_string().contains("f1"));
    }

    #[test]
    fn accelerators_take_batches_of_endless_files() {
        let dir = tempfile::tempdir().unwrap();
        let list = files(dir.path(), &[20_000; 7]);
        let write = FileAccess::Write { piece: 1 << 20, sync: false, rename: false };
        FilePattern::of_list(list.clone(), 2, write).run(to_the_end).unwrap();
        let access = FileAccess::Read { piece: 8 << 10, cold: true, to_end: false };
        for (batch, of_files) in [(3, true), (30_000, false)] {
            let steps = ComputeSteps { readers: 2, batch, of_files, compute: Duration::from_millis(1) };
            let lists = vec![list.clone()];
            let pattern =
                FilePattern { lists, threads: 4, access, measured: false, endless: Some(7), steps: Some(steps) };
            let run = pattern
                .run(|crew, elapsed| {
                    if crew.ready() == 2 {
                        crew.start_window();
                    }
                    Ok(elapsed < Duration::from_millis(300))
                })
                .unwrap();
            let accelerators = &run.lanes[4..];
            assert_eq!(accelerators.len(), 2);
            assert!(accelerators.iter().all(|lane| lane.utilisation > 0.0 && lane.utilisation <= 1.0), "{run:?}");
            assert!(accelerators.iter().all(|lane| lane.steps > 0) && run.items > 7, "{run:?}");
        }
    }

    #[test]
    fn an_order_has_each_range_once_and_the_next_is_another() {
        let mut order = RangeOrder::new(50, Some(3));
        let first: Vec<_> = (0..50).map(|_| order.take().unwrap()).collect();
        let second: Vec<_> = (0..50).map(|_| order.take().unwrap()).collect();
        assert_ne!(first, second);
        for pass in [first, second] {
            assert_eq!(pass.into_iter().collect::<BTreeSet<_>>(), (0..50).collect());
        }
        let mut once = RangeOrder::new(2, None);
        assert_eq!([once.take(), once.take(), once.take()], [Some(0), Some(1), None]);
        assert!(RangeOrder::new(0, Some(1)).take().is_none());
    }

    #[test]
    fn pages_differ() {
        let mut piece = vec![0u8; 1 << 20];
        let mut sums = BTreeSet::new();
        for (name, at) in [("a", 0), ("b", 0), ("a", 1 << 20)] {
            stamp_pages(&mut piece, Path::new(name), at);
            sums.insert(crc32c::crc32c(&piece));
        }
        assert_eq!(sums.len(), 3);
        assert_ne!(piece[0..8], piece[PAGE_BYTES..PAGE_BYTES + 8]);
    }
}
