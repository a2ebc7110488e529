//! The files of a load: made in proportion to the room, listed, and compared byte by byte. Knows no reader.

use super::model::TrainLoad;
use crate::engine::pattern::next_uniform;
use crate::error::{BenchError, Result};
use crate::scratch;
use std::path::{Path, PathBuf};

/// A file and the length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFile {
    /// The path below the read folder.
    pub name: PathBuf,
    pub len: u64,
}

/// Names and lengths of files with about `bytes` in all, always the same for a load.
pub fn plan_files(load: &TrainLoad, bytes: u64) -> Vec<DataFile> {
    let count = ((bytes as f64 / load.file_bytes()).round() as usize).max(2);
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    (0..count)
        .map(|index| {
            // A sum of twelve uniform numbers is nearly normal, with a deviation of 1.
            let normal: f64 = (0..12).map(|_| next_uniform(&mut state)).sum::<f64>() - 6.0;
            let deviation = load.deviation_bytes * (load.samples_per_file as f64).sqrt();
            // A file of MLPerf is never empty, however wide the distribution.
            let len = (load.file_bytes() + normal * deviation).max(load.file_bytes() / 100.0);
            DataFile { name: PathBuf::from(format!("{index:06}.{}", load.model_word())), len: len as u64 }
        })
        .collect()
}

/// Writes the files into `dir`, or keeps existing files of the right length.
pub fn make_files(dir: &Path, files: &[DataFile]) -> Result<()> {
    let all: Vec<(usize, &DataFile)> = files.iter().enumerate().collect();
    let wanted: Vec<&(usize, &DataFile)> = all
        .iter()
        .filter(|file| std::fs::metadata(dir.join(&file.1.name)).map_or(true, |known| known.len() != file.1.len))
        .collect();
    let bytes: u64 = wanted.iter().map(|(_, file)| file.len).sum();
    // The folder is made only when the files fit.
    let room = dir.ancestors().find(|above| above.is_dir()).map_or(0, scratch::free_bytes);
    if bytes > room {
        let at = dir.display();
        let need = bytes >> 20;
        let have = room >> 20;
        return Err(BenchError::Missing(format!("{at} has {have} MiB free, {need} are needed: see --data")));
    }
    std::fs::create_dir_all(dir).map_err(|e| BenchError::io(dir.display(), &e))?;
    wanted.into_iter().try_for_each(|(index, file)| scratch::write_file(&dir.join(&file.name), *index as u64, file.len))
}

/// Compares every byte of the files below `dir` with what was written.
pub fn check_files(dir: &Path, files: &[DataFile]) -> Result<()> {
    files.iter().enumerate().try_for_each(|(i, file)| scratch::check_file(&dir.join(&file.name), i as u64, file.len))
}

/// The regular files of a folder, by name.
pub fn list_files(dir: &Path) -> Result<Vec<DataFile>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|e| listing_error(dir, &e))? {
        let entry = entry.map_err(|e| listing_error(dir, &e))?;
        let known = entry.metadata().map_err(|e| listing_error(dir, &e))?;
        if known.is_file() && known.len() > 0 {
            files.push(DataFile { name: entry.file_name().into(), len: known.len() });
        }
    }
    if files.len() < 2 {
        let at = dir.display();
        return Err(BenchError::Missing(format!(
            "{at} has {} files: make some with 'spurline bench train --make' in the source of the mount",
            files.len()
        )));
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn listing_error(dir: &Path, error: &std::io::Error) -> BenchError {
    BenchError::Missing(format!("{}: {error}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::super::model::{AcceleratorName, ModelName};
    use super::*;

    #[test]
    fn files_have_the_lengths_of_the_model_and_stay_the_same() {
        let load = TrainLoad::find(ModelName::Unet3d, AcceleratorName::H100).unwrap();
        let files = plan_files(&load, 400 * 146_600_628);
        assert_eq!((files.len(), &files), (400, &plan_files(&load, 400 * 146_600_628)));
        let mean = files.iter().map(|file| file.len as f64).sum::<f64>() / 400.0;
        assert!((mean / load.sample_bytes - 1.0).abs() < 0.1, "{mean}");
        let spread = files.iter().map(|file| (file.len as f64 - mean).powi(2)).sum::<f64>() / 400.0;
        assert!((spread.sqrt() / load.deviation_bytes - 1.0).abs() < 0.2, "{}", spread.sqrt());
        assert!(files.iter().all(|file| file.len > 1_000_000));
        let resnet = TrainLoad::find(ModelName::Resnet50, AcceleratorName::H100).unwrap();
        let files = plan_files(&resnet, 1 << 30);
        assert!(files.iter().all(|file| file.len == (114_660.07_f64 * 1251.0) as u64), "{files:?}");
        assert_eq!(plan_files(&load, 1).len(), 2);
    }

    #[test]
    fn files_are_made_once_and_compared() {
        let dir = tempfile::tempdir().unwrap();
        let load = TrainLoad::find(ModelName::Retinanet, AcceleratorName::B200).unwrap();
        let files = plan_files(&load, 1_300_000);
        make_files(dir.path(), &files).unwrap();
        check_files(dir.path(), &files).unwrap();
        assert_eq!(list_files(dir.path()).unwrap(), files);
        let first = dir.path().join(&files[0].name);
        let made = std::fs::metadata(&first).unwrap().modified().unwrap();
        make_files(dir.path(), &files).unwrap();
        assert_eq!(std::fs::metadata(&first).unwrap().modified().unwrap(), made);
        std::fs::write(&first, b"x").unwrap();
        assert!(check_files(dir.path(), &files).is_err());
        assert!(list_files(&dir.path().join("none")).is_err());
    }
}
