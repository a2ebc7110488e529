//! The pattern of key-value caches in files: a file for each block, written whole under a temporary name, renamed, read once or
//! never, and looked up far more often than it is there. Knows no mounts.

use crate::error::{BenchError, FileContext, Result};
use crate::numbers::median;
use crate::scratch::fill_pattern;
use crate::stop;
use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Blocks of a run.
#[derive(Debug, Clone, Copy)]
pub struct KvPlan {
    /// Bytes of a block.
    pub block_bytes: usize,
    /// Number of blocks.
    pub blocks: usize,
    /// Lookups of names that are not there.
    pub lookups: usize,
}

/// The figures of a run.
#[derive(Debug, Clone, Copy, Default)]
pub struct KvFigures {
    /// Bytes per second from the creation to the rename.
    pub write_rate: f64,
    /// Bytes per second from the open to the last byte.
    pub read_rate: f64,
    /// Time of a lookup of an absent name in microseconds: the median.
    pub absent_us: f64,
    /// The same, of the slowest hundredth.
    pub absent_slow_us: f64,
    /// Time of a lookup of a block that is there in microseconds: the median.
    pub present_us: f64,
}

/// Writes blocks into `write`, and reads every second one in `read`, the same folder of another mount.
///
/// # Errors
/// When a call fails, a block is not whole, or an absent name is found.
pub fn run_blocks(plan: &KvPlan, write: &Path, read: &Path, round: u32) -> Result<KvFigures> {
    let name = |number: usize| format!("{round:03}-{number:08x}.kv");
    let mut block = vec![0; plan.block_bytes];
    let mut figures = KvFigures::default();
    let absent = look_up(plan.lookups, |number| read.join(format!("absent-{round}-{number:08x}.kv")), false)?;
    figures.absent_us = median(&absent);
    figures.absent_slow_us = slowest_hundredth(&absent);
    let began = Instant::now();
    for number in 0..plan.blocks {
        stop::check_stop()?;
        fill_pattern(number as u64, 0, &mut block);
        put_block(&write.join(name(number)), &block)?;
    }
    figures.write_rate = (plan.blocks * plan.block_bytes) as f64 / began.elapsed().as_secs_f64();
    let present = look_up(plan.blocks, |number| read.join(name(number)), true)?;
    figures.present_us = median(&present);
    let mut expected = vec![0; plan.block_bytes];
    let mut seconds = 0.0;
    let mut bytes = 0;
    // The other half is never read.
    for number in (0..plan.blocks).step_by(2) {
        stop::check_stop()?;
        let path = read.join(name(number));
        let began = Instant::now();
        File::open(&path).in_file(&path)?.read_exact(&mut block).in_file(&path)?;
        seconds += began.elapsed().as_secs_f64();
        bytes += block.len();
        fill_pattern(number as u64, 0, &mut expected);
        if block != expected {
            return Err(BenchError::Failed(format!("{} has other bytes than were written", path.display())));
        }
    }
    figures.read_rate = bytes as f64 / f64::max(seconds, 1e-9);
    for number in 0..plan.blocks {
        let path = write.join(name(number));
        std::fs::remove_file(&path).map_err(|error| BenchError::io(path.display(), &error))?;
    }
    Ok(figures)
}

fn put_block(path: &Path, block: &[u8]) -> Result<()> {
    let temporary = path.with_extension("tmp");
    File::create(&temporary).and_then(|mut file| file.write_all(block)).in_file(path)?;
    std::fs::rename(&temporary, path).in_file(path)
}

/// The time of each lookup in microseconds.
fn look_up(count: usize, path: impl Fn(usize) -> PathBuf, expected: bool) -> Result<Vec<f64>> {
    let mut times = Vec::with_capacity(count);
    for number in 0..count {
        if number % 64 == 0 {
            stop::check_stop()?;
        }
        let path = path(number);
        let began = Instant::now();
        let found = std::fs::metadata(&path);
        times.push(began.elapsed().as_secs_f64() * 1e6);
        match found {
            Ok(_) if expected => {}
            Err(error) if error.kind() == ErrorKind::NotFound && !expected => {}
            Ok(_) => return Err(BenchError::Failed(format!("{} is there", path.display()))),
            Err(error) => return Err(BenchError::io(path.display(), &error)),
        }
    }
    Ok(times)
}

fn slowest_hundredth(times: &[f64]) -> f64 {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) * 99 / 100).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_and_nothing_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let plan = KvPlan { block_bytes: 100_000, blocks: 5, lookups: 100 };
        let figures = run_blocks(&plan, dir.path(), dir.path(), 1).unwrap();
        assert!(figures.write_rate > 0.0 && figures.read_rate > 0.0);
        assert!(figures.absent_us > 0.0 && figures.absent_slow_us >= figures.absent_us && figures.present_us > 0.0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let other = tempfile::tempdir().unwrap();
        assert!(run_blocks(&plan, dir.path(), other.path(), 1).is_err());
    }
}
