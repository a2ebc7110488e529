//! Replays the reads of model loaders: mapped tensors, reads of pieces, with the page cache and past it. Knows no mounts.

use super::mapping::FileMapping;
use super::model::ModelFiles;
use crate::cpu;
use crate::error::{BenchError, Result};
use crate::stop;
use rustix::fs::{Advice, OFlags, fadvise};
use std::fs::File;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Alignment that O_DIRECT needs of memory, places and lengths.
const DIRECT_ALIGN: usize = 4096;
/// Bytes that a thread copies out of a mapping at a time: its memory stays small, and each page is still used once.
const COPY_BYTES: usize = 1 << 20;

/// A way to read a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LoadCase {
    /// The files one after the other, in reads of 1 MiB: the measure of the other ways
    Cat,
    /// A copy by cp into the work folder
    Cp,
    /// Mapped files, tensors in the order of the file: safetensors, vLLM and transformers by default
    Mmap,
    /// Mapped files, tensors in a random order: a loader that follows the layers of its own model
    MmapShuffled,
    /// Reads of 2 MiB: prefetching loaders
    #[value(name = "pread-2m")]
    Pread2m,
    /// Reads of 16 MiB: streaming loaders
    #[value(name = "pread-16m")]
    Pread16m,
    /// Reads of 2 MiB past the page cache
    #[value(name = "direct-2m")]
    Direct2m,
    /// Reads of 16 MiB past the page cache
    #[value(name = "direct-16m")]
    Direct16m,
}

impl LoadCase {
    /// All, in the order of the report.
    pub const ALL: [LoadCase; 8] = [
        LoadCase::Cat,
        LoadCase::Cp,
        LoadCase::Mmap,
        LoadCase::MmapShuffled,
        LoadCase::Pread2m,
        LoadCase::Pread16m,
        LoadCase::Direct2m,
        LoadCase::Direct16m,
    ];

    /// The word on the command line and in reports.
    pub fn word(self) -> &'static str {
        match self {
            LoadCase::Cat => "cat",
            LoadCase::Cp => "cp",
            LoadCase::Mmap => "mmap",
            LoadCase::MmapShuffled => "mmap-shuffled",
            LoadCase::Pread2m => "pread-2m",
            LoadCase::Pread16m => "pread-16m",
            LoadCase::Direct2m => "direct-2m",
            LoadCase::Direct16m => "direct-16m",
        }
    }

    /// Whether the case is run with several numbers of threads.
    pub fn has_threads(self) -> bool {
        !matches!(self, LoadCase::Cat | LoadCase::Cp)
    }
}

/// The figures of a load.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadFigures {
    /// Bytes that were read.
    pub bytes: u64,
    /// Time from the first open to the last byte.
    pub seconds: f64,
    /// Page faults of this process without a read of the file system, or with one.
    pub faults: u64,
    /// Processor time of this process in seconds.
    pub cpu_seconds: f64,
}

/// Drops the pages of the files from the page cache; files in memory keep their pages.
pub fn drop_pages(model: &ModelFiles) {
    for path in &model.paths {
        if let Ok(file) = File::open(path) {
            let _ = fadvise(&file, 0, None, Advice::DontNeed);
        }
    }
}

/// Loads a model.
///
/// # Errors
/// When a file can't be read; `Interrupted` by the user.
pub fn run_load(model: &ModelFiles, case: LoadCase, threads: usize, round: u32, work: &Path) -> Result<LoadFigures> {
    drop_pages(model);
    let own = std::process::id();
    let faults = fault_count()?;
    let cpu_before = cpu::of_process(own)?.total();
    let began = Instant::now();
    let bytes = match case {
        LoadCase::Cat => read_pieces(model, 1, 1 << 20, false)?,
        LoadCase::Cp => copy_files(model, work)?,
        LoadCase::Mmap => map_tensors(model, threads, None)?,
        LoadCase::MmapShuffled => map_tensors(model, threads, Some(round))?,
        LoadCase::Pread2m => read_pieces(model, threads, 2 << 20, false)?,
        LoadCase::Pread16m => read_pieces(model, threads, 16 << 20, false)?,
        LoadCase::Direct2m => read_pieces(model, threads, 2 << 20, true)?,
        LoadCase::Direct16m => read_pieces(model, threads, 16 << 20, true)?,
    };
    let seconds = began.elapsed().as_secs_f64();
    Ok(LoadFigures {
        bytes,
        seconds,
        faults: fault_count()?.saturating_sub(faults),
        cpu_seconds: cpu::of_process(own)?.total() - cpu_before,
    })
}

/// Page faults of this process so far: fields 10 and 12 of proc_pid_stat(5).
fn fault_count() -> Result<u64> {
    let path = "/proc/self/stat";
    let text = std::fs::read_to_string(path).map_err(|error| BenchError::io(path, &error))?;
    let fields = text[text.rfind(')').map_or(0, |end| end + 1)..].split_ascii_whitespace();
    let numbers: Vec<u64> = fields.skip(7).step_by(2).take(2).filter_map(|field| field.parse().ok()).collect();
    Ok(numbers.iter().sum())
}

fn copy_files(model: &ModelFiles, work: &Path) -> Result<u64> {
    let target = work.join("copy");
    for path in &model.paths {
        stop::check_stop()?;
        let copied = Command::new("cp").arg(path).arg(&target).status();
        let copied = copied.map_err(|error| BenchError::Missing(format!("cp can't be run: {error}")))?;
        if !copied.success() {
            return Err(BenchError::Failed(format!("cp of {} into {} failed", path.display(), target.display())));
        }
    }
    let _ = std::fs::remove_file(target);
    Ok(model.bytes)
}

/// Runs `work` on each thread, and returns the first failure.
fn on_threads(threads: usize, work: impl Fn() -> Result<()> + Sync) -> Result<()> {
    let failure = Mutex::new(Ok(()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                if let Err(error) = work() {
                    *failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Err(error);
                }
            });
        }
    });
    failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Copies all tensors out of mappings; threads take the next tensor each.
fn map_tensors(model: &ModelFiles, threads: usize, shuffled: Option<u32>) -> Result<u64> {
    let mappings = model.paths.iter().map(|path| FileMapping::open(path)).collect::<Result<Vec<_>>>()?;
    let order = tensor_order(model.tensors.len(), shuffled);
    let next = AtomicUsize::new(0);
    let bytes = AtomicU64::new(0);
    on_threads(threads, || {
        let mut buffer = vec![0; COPY_BYTES];
        while let Some(number) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
            let tensor = &model.tensors[*number];
            let mut done = 0;
            while done < tensor.len {
                stop::check_stop()?;
                let len = buffer.len().min((tensor.len - done) as usize);
                mappings[tensor.file].copy_to((tensor.start + done) as usize, &mut buffer[..len]);
                // An optimising compiler removes copies that nothing reads.
                std::hint::black_box(&mut buffer);
                done += len as u64;
            }
            bytes.fetch_add(tensor.len, Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(bytes.into_inner())
}

/// The numbers of tensors in the order of their use: Fisher and Yates by a generator of the round's own.
fn tensor_order(count: usize, shuffled: Option<u32>) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let Some(round) = shuffled else { return order };
    let mut state = 0x9E37_79B9_7F4A_7C15 ^ u64::from(round);
    for last in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(last, (state >> 33) as usize % (last + 1));
    }
    order
}

/// Reads all files in pieces; threads take the next piece each.
fn read_pieces(model: &ModelFiles, threads: usize, piece: usize, direct: bool) -> Result<u64> {
    let mut files = Vec::new();
    let mut pieces = Vec::new();
    for (number, path) in model.paths.iter().enumerate() {
        let flags = if direct { OFlags::DIRECT.bits() as i32 } else { 0 };
        let opened = File::options().read(true).custom_flags(flags).open(path);
        let file = opened.map_err(|error| BenchError::io(path.display(), &error))?;
        let len = file.metadata().map_err(|error| BenchError::io(path.display(), &error))?.len();
        pieces.extend((0..len).step_by(piece).map(|at| (number, at)));
        files.push(file);
    }
    let next = AtomicUsize::new(0);
    let bytes = AtomicU64::new(0);
    on_threads(threads, || {
        let mut memory = vec![0; piece + DIRECT_ALIGN];
        let skipped = memory.as_ptr().align_offset(DIRECT_ALIGN);
        let buffer = &mut memory[skipped..skipped + piece];
        while let Some(&(number, at)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            stop::check_stop()?;
            let mut done = 0;
            while done < piece {
                let read = files[number].read_at(&mut buffer[done..], at + done as u64);
                let read = read.map_err(|error| BenchError::io(model.paths[number].display(), &error))?;
                done += read;
                // The end of the file: with O_DIRECT, the next read would not be aligned.
                if read == 0 || done % DIRECT_ALIGN != 0 {
                    break;
                }
            }
            bytes.fetch_add(done as u64, Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(bytes.into_inner())
}

#[cfg(test)]
mod tests {
    use super::super::model::{find_model, write_model};
    use super::*;

    #[test]
    fn every_way_reads_everything() {
        let dir = tempfile::tempdir().unwrap();
        let work = tempfile::tempdir().unwrap();
        write_model(dir.path(), 20 << 20, 2).unwrap();
        let model = find_model(dir.path()).unwrap();
        let tensor_bytes: u64 = model.tensors.iter().map(|tensor| tensor.len).sum();
        for case in LoadCase::ALL {
            for threads in [1, 5] {
                let figures = match run_load(&model, case, threads, 1, work.path()) {
                    Ok(figures) => figures,
                    // A file system in memory may have no direct reads.
                    Err(error) if matches!(case, LoadCase::Direct2m | LoadCase::Direct16m) => {
                        assert!(error.to_string().contains("Invalid argument"), "{error}");
                        continue;
                    }
                    Err(error) => panic!("{case:?}: {error}"),
                };
                let mapped = matches!(case, LoadCase::Mmap | LoadCase::MmapShuffled);
                assert_eq!(figures.bytes, if mapped { tensor_bytes } else { model.bytes }, "{case:?}");
                assert!(figures.seconds > 0.0);
            }
        }
        assert_eq!(std::fs::read_dir(work.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_shuffled_order_has_each_tensor_once() {
        let mut order = tensor_order(1000, Some(3));
        assert_ne!(order, tensor_order(1000, None));
        order.sort_unstable();
        assert_eq!(order, tensor_order(1000, None));
    }
}
