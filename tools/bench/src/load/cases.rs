//! How loaders read models: mapped tensors, reads of pieces, with the page cache and past it, and a plain copy. Knows no mounts.

use super::model::ModelFiles;
use crate::cpu;
use crate::engine::pattern::{FileAccess, FileList, FilePattern, FileRange, shuffle};
use crate::engine::{ThreadCrew, run_threads, to_the_end};
use crate::error::{BenchError, Result};
use rustix::fs::{Advice, fadvise};
use std::fs::File;
use std::path::Path;
use std::process::Command;

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
    /// The numbers of threads that the case is run with.
    pub fn threads(self, all: &[u32]) -> &[u32] {
        if matches!(self, LoadCase::Cat | LoadCase::Cp) { &[1] } else { all }
    }

    /// The access, and the bytes of each range; whole tensors without such.
    fn access(self) -> (FileAccess, Option<usize>) {
        let read = |piece, direct| (FileAccess::ReadPiece { piece, direct }, Some(piece));
        match self {
            LoadCase::Cat | LoadCase::Cp => read(1 << 20, false),
            LoadCase::Mmap | LoadCase::MmapShuffled => (FileAccess::Map, None),
            LoadCase::Pread2m => read(2 << 20, false),
            LoadCase::Pread16m => read(16 << 20, false),
            LoadCase::Direct2m => read(2 << 20, true),
            LoadCase::Direct16m => read(16 << 20, true),
        }
    }
}

#[derive(Debug, Clone, Copy, Default)]
pub struct LoadFigures {
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
        let _ = File::open(path).map(|file| fadvise(&file, 0, None, Advice::DontNeed));
    }
}

/// Loads models at the same moment, each by threads of its own.
pub fn run_load(models: &[ModelFiles], case: LoadCase, threads: usize, round: u32, work: &Path) -> Result<LoadFigures> {
    let faults = fault_count()?;
    let own = std::process::id();
    let cpu_before = cpu::of_process(own)?.total();
    let mut figures = LoadFigures::default();
    if case == LoadCase::Cp {
        let copy = |crew: &ThreadCrew, number: usize| copy_files(&models[number], work, number, crew);
        let run = run_threads(models.len(), copy, to_the_end)?;
        figures.bytes = run.bytes;
        figures.seconds = run.seconds;
    } else {
        let (access, piece) = case.access();
        let shuffled = (case == LoadCase::MmapShuffled).then_some(round);
        let lists = models.iter().map(|model| ranges_of(model, piece, shuffled)).collect();
        let pattern = FilePattern { lists, threads, access, measured: false, endless: None, steps: None };
        let run = pattern.run(to_the_end)?;
        figures.bytes = run.bytes;
        figures.seconds = run.seconds;
    }
    figures.faults = fault_count()?.saturating_sub(faults);
    figures.cpu_seconds = cpu::of_process(own)?.total() - cpu_before;
    Ok(figures)
}

/// Page faults of this process so far: fields 10 and 12 of proc_pid_stat(5).
fn fault_count() -> Result<u64> {
    let path = "/proc/self/stat";
    let text = std::fs::read_to_string(path).map_err(|error| BenchError::io(path, &error))?;
    let fields = text[text.rfind(')').map_or(0, |end| end + 1)..].split_ascii_whitespace();
    let numbers: Vec<u64> = fields.skip(7).step_by(2).take(2).filter_map(|field| field.parse().ok()).collect();
    Ok(numbers.iter().sum())
}

/// Pieces of all files, or the tensors, in the order of the files or shuffled.
fn ranges_of(model: &ModelFiles, piece: Option<usize>, shuffled: Option<u32>) -> FileList {
    let mut ranges = model.tensors.clone();
    if let Some(piece) = piece {
        let pieces = |(file, len): (usize, &u64)| {
            (0..*len).step_by(piece).map(move |start| FileRange { file, start, len: piece as u64 })
        };
        ranges = model.lens.iter().enumerate().flat_map(pieces).collect();
    }
    if let Some(round) = shuffled {
        shuffle(&mut ranges, &mut (0x9E37_79B9_7F4A_7C15 ^ u64::from(round)));
    }
    FileList { files: model.paths.clone(), ranges }
}

fn copy_files(model: &ModelFiles, work: &Path, number: usize, crew: &ThreadCrew) -> Result<()> {
    let target = work.join(format!("copy-{number}"));
    for (path, len) in model.paths.iter().zip(&model.lens) {
        if crew.is_stopped() {
            break;
        }
        let copied = Command::new("cp").arg(path).arg(&target).status();
        let copied = copied.map_err(|error| BenchError::Missing(format!("cp can't be run: {error}")))?;
        if !copied.success() {
            return Err(BenchError::Failed(format!("cp of {} into {} failed", path.display(), target.display())));
        }
        crew.add_bytes(*len);
    }
    let _ = std::fs::remove_file(target);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::model::{find_model, write_model};
    use super::*;
    use clap::ValueEnum as _;

    #[test]
    fn every_way_reads_everything() {
        let dir = tempfile::tempdir().unwrap();
        let work = tempfile::tempdir().unwrap();
        write_model(dir.path(), 20 << 20, 2).unwrap();
        let model = find_model(dir.path()).unwrap();
        let models = [model.clone(), model.clone()];
        let tensor_bytes: u64 = model.tensors.iter().map(|tensor| tensor.len).sum();
        for case in LoadCase::value_variants() {
            for (hosts, threads) in [(1, 1), (1, 5), (2, 1)] {
                drop_pages(&model);
                let figures = match run_load(&models[..hosts], *case, threads, 1, work.path()) {
                    Ok(figures) => figures,
                    // A file system in memory may have no direct reads.
                    Err(error) if matches!(case, LoadCase::Direct2m | LoadCase::Direct16m) => {
                        assert!(error.to_string().contains("Invalid argument"), "{error}");
                        continue;
                    }
                    Err(error) => panic!("{case:?}: {error}"),
                };
                let mapped = matches!(case, LoadCase::Mmap | LoadCase::MmapShuffled);
                let bytes = if mapped { tensor_bytes } else { model.bytes() };
                assert_eq!(figures.bytes, bytes * hosts as u64, "{case:?}");
                assert!(figures.seconds > 0.0);
            }
        }
        assert_eq!(std::fs::read_dir(work.path()).unwrap().count(), 0);
        assert_ne!(ranges_of(&model, None, Some(3)), ranges_of(&model, None, None));
    }
}
