//! The demo's data: copies of files that every machine has, with checksums.

use super::DemoControl;
use spurline_config::Fault;
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// The source of the files.
const SAMPLE_DIR: &str = "/usr";
/// The most small files: enough to exercise metadata, too few to dominate.
const SMALL_FILES: usize = 500;
/// The largest small file.
const SMALL_FILE_BYTES: u64 = 256 << 10;
/// The most files to consider.
const MOST_SEEN: usize = 200_000;

/// A file of the data set.
#[derive(Debug, Clone)]
pub struct SampleFile {
    /// The path below the source and below the mountpoint.
    pub path: PathBuf,
    /// The length.
    pub bytes: u64,
    pub checksum: u64,
}

/// The files of the demo.
#[derive(Debug)]
pub struct DemoDataset {
    pub files: Vec<SampleFile>,
    /// The total length of the files.
    pub bytes: u64,
}

/// Copies up to `limit` bytes of files into `to`.
///
/// # Errors
/// When the copies can't be written, there is nothing to copy, or the user interrupts.
pub fn make_dataset(to: &Path, limit: u64, control: &DemoControl) -> Result<DemoDataset, Fault> {
    let chosen = choose_files(Path::new(SAMPLE_DIR), limit, control)?;
    let total = chosen.iter().map(|(_, bytes)| bytes).sum();
    let bar = control.progress_bar("copying", total);
    let mut files: Vec<SampleFile> = Vec::new();
    for (number, (from, _)) in chosen.into_iter().enumerate() {
        control.go_on()?;
        // Folders two levels deep, as in data sets, with recognisable names.
        let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = PathBuf::from(format!("part-{:02}", number % 16)).join(format!("{number:05}-{name}"));
        let Ok(source) = File::open(&from) else { continue };
        let place = to.join(&path);
        std::fs::create_dir_all(place.parent().unwrap_or(to)).map_err(|e| copy_error(&place, &e))?;
        let target = File::create(&place).map_err(|e| copy_error(&place, &e))?;
        let (bytes, checksum) = copy_file(source, &target, |n| bar.inc(n)).map_err(|e| copy_error(&place, &e))?;
        files.push(SampleFile { path, bytes, checksum });
    }
    bar.finish_and_clear();
    let bytes = files.iter().map(|f| f.bytes).sum();
    if bytes == 0 {
        return Err(Fault::missing(
            format!("no file to be read below {SAMPLE_DIR}"),
            "run the demo as a user who can read there",
        ));
    }
    Ok(DemoDataset { files, bytes })
}

fn copy_file(mut from: File, mut to: &File, mut copied: impl FnMut(u64)) -> std::io::Result<(u64, u64)> {
    let mut buffer = vec![0; 1 << 20];
    let mut hash = Xxh3::new();
    let mut total = 0;
    loop {
        let n = from.read(&mut buffer)?;
        if n == 0 {
            return Ok((total, hash.digest()));
        }
        hash.update(&buffer[..n]);
        to.write_all(&buffer[..n])?;
        total += n as u64;
        copied(n as u64);
    }
}

/// Some small files, and the largest others that fit.
fn choose_files(root: &Path, limit: u64, control: &DemoControl) -> Result<Vec<(PathBuf, u64)>, Fault> {
    let mut seen: Vec<(PathBuf, u64)> = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        control.go_on()?;
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => {
                    let bytes = entry.metadata().map_or(0, |m| m.len());
                    if bytes > 0 {
                        seen.push((entry.path(), bytes));
                    }
                }
                _ => {}
            }
        }
        if seen.len() >= MOST_SEEN {
            break;
        }
    }
    let (mut small, mut large): (Vec<_>, Vec<_>) = seen.into_iter().partition(|(_, bytes)| *bytes < SMALL_FILE_BYTES);
    small.sort();
    large.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let mut left = limit;
    let mut chosen = Vec::new();
    // A tenth of the space is for small files, however large the others are.
    let step = (small.len() / SMALL_FILES).max(1);
    for file in small.into_iter().step_by(step) {
        if file.1 <= left && limit - left + file.1 <= limit / 10 {
            left -= file.1;
            chosen.push(file);
        }
    }
    for file in large {
        if file.1 <= left {
            left -= file.1;
            chosen.push(file);
        }
    }
    Ok(chosen)
}

fn copy_error(place: &Path, error: &std::io::Error) -> Fault {
    Fault::failed(format!("{}: {error}", place.display()), "give more room with --dir, or a smaller --size")
}
