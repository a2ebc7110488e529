//! The load of many small files: several threads open, read and close every file of a folder, or only stat files. Knows no file
//! system.

use super::FilesPart;
use crate::error::{BenchError, FileContext, Result};
use serde_json::json;
use std::ffi::OsString;
use std::io::Read as _;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// A pass over the folder.
struct FilesPass {
    list_seconds: f64,
    seconds: f64,
    files: usize,
    bytes: u64,
}

pub(super) fn run(part: &FilesPart) -> Result<()> {
    let mut passes = Vec::new();
    for _ in 0..part.passes {
        let p = read_folder(&part.dir, part.threads.max(1), part.stat)?;
        passes.push(json!({ "list_seconds": p.list_seconds, "seconds": p.seconds, "ops": p.files, "bytes": p.bytes }));
    }
    println!("{}", json!({ "passes": passes }));
    Ok(())
}

fn read_folder(dir: &Path, threads: usize, stat: bool) -> Result<FilesPass> {
    let start = Instant::now();
    let entries = std::fs::read_dir(dir).map_err(|e| BenchError::io(dir.display(), &e))?;
    let names: Vec<OsString> = entries
        .map(|entry| entry.map(|e| e.file_name()).map_err(|e| BenchError::io(dir.display(), &e)))
        .collect::<Result<_>>()?;
    let list_seconds = start.elapsed().as_secs_f64();
    let next = AtomicUsize::new(0);
    let bytes = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| -> Result<u64> {
                    let mut bytes = 0u64;
                    let mut buffer = vec![0u8; 1 << 20];
                    loop {
                        // Sixteen at a time, so that the counter costs little.
                        let from = next.fetch_add(16, Ordering::Relaxed);
                        if from >= names.len() {
                            return Ok(bytes);
                        }
                        for name in &names[from..names.len().min(from + 16)] {
                            let path = dir.join(name);
                            if stat {
                                bytes += std::fs::symlink_metadata(&path).in_file(&path)?.len();
                                continue;
                            }
                            let mut file = std::fs::File::open(&path).in_file(&path)?;
                            loop {
                                match file.read(&mut buffer).in_file(&path)? {
                                    0 => break,
                                    n => bytes += n as u64,
                                }
                            }
                        }
                    }
                })
            })
            .collect();
        let mut sum = 0;
        for worker in workers {
            sum += worker.join().map_err(|_| BenchError::Failed("a reader panicked".into()))??;
        }
        Ok::<u64, BenchError>(sum)
    })?;
    Ok(FilesPass { list_seconds, seconds: start.elapsed().as_secs_f64(), files: names.len(), bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_once() {
        let dir = tempfile::tempdir().unwrap();
        for i in 0..50 {
            std::fs::write(dir.path().join(format!("f{i}")), vec![1u8; 100 + i]).unwrap();
        }
        let sum = (0..50).map(|i| 100 + i).sum::<u64>();
        for (threads, stat) in [(1, false), (8, false), (3, true)] {
            let got = read_folder(dir.path(), threads, stat).unwrap();
            assert_eq!((got.files, got.bytes), (50, sum));
            assert!(got.list_seconds <= got.seconds);
        }
        assert!(read_folder(Path::new("/no/such/dir"), 1, false).is_err());
    }
}
