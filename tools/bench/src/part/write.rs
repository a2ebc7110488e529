//! The loads of writers: files that are written in sequence again and again, and many new small files. Knows no file system.

use super::{CreatePart, WritePart};
use crate::error::{BenchError, FileContext, Result};
use crate::scratch;
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The bytes of each block of a writer's file.
pub(crate) fn written_block(writer: usize, len: u64) -> Vec<u8> {
    let mut block = vec![0; len as usize];
    scratch::fill_pattern(writer as u64, 0, &mut block);
    block
}

/// The figures of a writer.
struct WriterFigures {
    seconds: f64,
    each: Vec<Duration>,
}

pub(super) fn write_files(part: &WritePart) -> Result<()> {
    if part.block.0 == 0 || part.size.0 < part.block.0 {
        return Err(BenchError::Failed("--size must be at least --block".into()));
    }
    let start = Barrier::new(part.files.len());
    let figures: Vec<WriterFigures> = std::thread::scope(|scope| {
        let writers: Vec<_> = part
            .files
            .iter()
            .enumerate()
            .map(|(writer, path)| {
                let start = &start;
                scope.spawn(move || {
                    // A writer without a file waits too, so that the others start.
                    let file = open_whole(path, part.size.0);
                    start.wait();
                    file.and_then(|file| write_on(part, writer, &file, path))
                })
            })
            .collect();
        writers
            .into_iter()
            .map(|writer| writer.join().map_err(|_| BenchError::Failed("a writer panicked".into()))?)
            .collect::<Result<_>>()
    })?;
    let seconds = figures.iter().map(|f| f.seconds).fold(0.0, f64::max);
    let mut each: Vec<Duration> = figures.into_iter().flat_map(|f| f.each).collect();
    each.sort_unstable();
    let at = |share: f64| {
        let index = ((each.len() as f64 * share) as usize).min(each.len().saturating_sub(1));
        each.get(index).map_or(0.0, |time| time.as_secs_f64() * 1e6)
    };
    let ops = each.len() as u64;
    let p50 = at(0.5);
    let p99 = at(0.99);
    println!(
        "{}",
        json!({ "seconds": seconds, "ops": ops, "bytes": ops * part.block.0, "p50_us": p50, "p99_us": p99 })
    );
    Ok(())
}

/// Opens a file, and sets the length: pages that exist already are written.
fn open_whole(path: &Path, size: u64) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).in_file(path)?;
    let mut at = file.metadata().in_file(path)?.len();
    let block = vec![1; 1 << 20];
    while at < size {
        let len = (size - at).min(block.len() as u64);
        file.write_all_at(&block[..len as usize], at).in_file(path)?;
        at += len;
    }
    file.sync_all().in_file(path)?;
    Ok(file)
}

fn write_on(part: &WritePart, writer: usize, file: &File, path: &Path) -> Result<WriterFigures> {
    let block = written_block(writer, part.block.0);
    let blocks = part.size.0 / part.block.0;
    let start = Instant::now();
    let mut each = Vec::with_capacity(1 << 16);
    let mut before = Duration::ZERO;
    for n in 0.. {
        file.write_all_at(&block, n % blocks * part.block.0).in_file(path)?;
        if part.sync {
            file.sync_data().in_file(path)?;
        }
        let now = start.elapsed();
        each.push(now - before);
        before = now;
        if now >= part.time {
            break;
        }
    }
    // Bytes that are still on the way count: the file is closed within the measured time.
    file.sync_data().in_file(path)?;
    Ok(WriterFigures { seconds: start.elapsed().as_secs_f64(), each })
}

pub(super) fn create_files(part: &CreatePart) -> Result<()> {
    let text = written_block(0, part.size.0);
    let next = AtomicUsize::new(0);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let makers: Vec<_> = (0..part.threads.max(1))
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    loop {
                        let n = next.fetch_add(1, Ordering::Relaxed);
                        if n >= part.files {
                            return Ok(());
                        }
                        let path = part.dir.join(format!("{}{n}", part.prefix));
                        let made = OpenOptions::new()
                            .write(true)
                            .create_new(true)
                            .open(&path)
                            .and_then(|mut f| f.write_all(&text));
                        made.map_err(|e| BenchError::io(path.display(), &e))?;
                    }
                })
            })
            .collect();
        for maker in makers {
            maker.join().map_err(|_| BenchError::Failed("a maker panicked".into()))??;
        }
        Ok::<(), BenchError>(())
    })?;
    let seconds = start.elapsed().as_secs_f64();
    let bytes = part.files as u64 * part.size.0;
    println!("{}", json!({ "seconds": seconds, "ops": part.files, "bytes": bytes }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::Size;

    #[test]
    fn files_have_their_length_and_blocks() {
        let dir = tempfile::tempdir().unwrap();
        let files = [dir.path().join("a"), dir.path().join("b")].to_vec();
        let mut part = WritePart {
            files: files.clone(),
            block: Size(4096),
            size: Size(20_000),
            sync: true,
            time: Duration::from_millis(20),
        };
        write_files(&part).unwrap();
        for (writer, path) in files.iter().enumerate() {
            let text = std::fs::read(path).unwrap();
            assert_eq!(text.len(), 20_000);
            assert!(text[..4096] == written_block(writer, 4096) && text[16_384..].iter().all(|byte| *byte == 1));
        }
        part.files.push("/no/such/file".into());
        assert!(write_files(&part).is_err(), "and the others do not wait for ever");
        let part = CreatePart { dir: dir.path().join("c"), threads: 3, files: 50, size: Size(100), prefix: "f".into() };
        assert!(create_files(&part).is_err());
        std::fs::create_dir(&part.dir).unwrap();
        create_files(&part).unwrap();
        assert_eq!(std::fs::read_dir(&part.dir).unwrap().count(), 50);
    }
}
