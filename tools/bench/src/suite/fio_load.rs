//! A load of fio that a section measures over several folders. Knows no folder.

use crate::measure::FigureUnit;

/// Reads by several jobs.
pub(super) struct FioLoad {
    /// The name in the table.
    pub name: &'static str,
    /// As fio calls the order of reads.
    pub pattern: &'static str,
    /// Bytes of a read.
    pub block: u64,
    /// Concurrent readers.
    pub jobs: usize,
    /// The least ratio to the ceiling.
    pub floor: f64,
    /// The figure.
    pub unit: FigureUnit,
}

impl FioLoad {
    /// Reads in sequence, counted in bytes.
    pub const fn sequential(name: &'static str, block: u64, jobs: usize, floor: f64) -> Self {
        FioLoad { name, pattern: "read", block, jobs, floor, unit: FigureUnit::Bandwidth }
    }

    /// Reads in random order: small reads are counted, larger reads measured in bytes.
    pub const fn random(name: &'static str, block: u64, jobs: usize, floor: f64) -> Self {
        let unit = if block > 64 << 10 { FigureUnit::Bandwidth } else { FigureUnit::Rate };
        FioLoad { name, pattern: "randread", block, jobs, floor, unit }
    }
}
