//! The pattern of key-value caches in files: a file for each block, written whole under a temporary name, renamed, read once or
//! never, and looked up far more often than it is there. Knows no mounts.

use crate::engine::pattern::{FileAccess, FileList, FilePattern, LaneFigures};
use crate::engine::to_the_end;
use crate::error::{BenchError, Result};
use crate::numbers::{median, percentile};
use std::path::Path;

/// Blocks of a run.
#[derive(Debug, Clone, Copy)]
pub struct KvPlan {
    pub block_bytes: usize,
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
pub fn run_blocks(plan: &KvPlan, write: &Path, read: &Path, round: u32) -> Result<KvFigures> {
    let len = plan.block_bytes as u64;
    let piece = plan.block_bytes;
    let names = |dir: &Path, kind: &str, numbers: &mut dyn Iterator<Item = usize>| {
        FileList::of_files(numbers.map(|number| (dir.join(format!("{kind}-{round:03}-{number:08x}.kv")), len)))
    };
    let absent = follow(names(read, "absent", &mut (0..plan.lookups)), FileAccess::Stat { present: false })?;
    let write_whole = FileAccess::Write { piece, sync: false, rename: true };
    let written = follow(names(write, "block", &mut (0..plan.blocks)), write_whole)?;
    let present = follow(names(read, "block", &mut (0..plan.blocks)), FileAccess::Stat { present: true })?;
    // The other half is never read.
    let read_once = FileAccess::Read { piece, cold: false, to_end: false };
    let got = follow(names(read, "block", &mut (0..plan.blocks).step_by(2)), read_once)?;
    if !got.checksums.iter().eq(written.checksums.iter().step_by(2)) {
        return Err(BenchError::Failed(format!("a block in {} has other bytes than were written", read.display())));
    }
    Ok(KvFigures {
        write_rate: written.bytes as f64 / written.seconds.max(1e-9),
        read_rate: got.bytes as f64 / got.seconds.max(1e-9),
        absent_us: median(&absent.lookups_us),
        absent_slow_us: percentile(&absent.lookups_us, 0.99),
        present_us: median(&present.lookups_us),
    })
}

/// One thread that follows a pattern.
fn follow(list: FileList, access: FileAccess) -> Result<LaneFigures> {
    let pattern = FilePattern { measured: true, ..FilePattern::of_list(list, 1, access) };
    Ok(pattern.run(to_the_end)?.lanes.pop().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back() {
        let dir = tempfile::tempdir().unwrap();
        let plan = KvPlan { block_bytes: 100_000, blocks: 5, lookups: 100 };
        let figures = run_blocks(&plan, dir.path(), dir.path(), 1).unwrap();
        assert!(figures.write_rate > 0.0 && figures.read_rate > 0.0);
        assert!(figures.absent_us > 0.0 && figures.absent_slow_us >= figures.absent_us && figures.present_us > 0.0);
        let other = tempfile::tempdir().unwrap();
        assert!(run_blocks(&plan, dir.path(), other.path(), 2).is_err());
    }
}
