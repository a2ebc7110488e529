//! Reads of the cache disk through the block store, against fio with O_DIRECT and io_uring at the same depth.

use super::section::SuiteSection;
use super::{BenchSuite, fio_sample, part_sample, show_progress};
use crate::child;
use crate::error::{BenchError, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, FigureUnit};
use crate::scratch;
use spurline_types::Size;
use std::time::Duration;

struct DiskLoad {
    name: &'static str,
    pattern: &'static str,
    block: u64,
    depth: usize,
    unit: FigureUnit,
    floor: Option<f64>,
}

const DISK_LOADS: [DiskLoad; 4] = [
    DiskLoad {
        name: "1 MiB, depth 1",
        pattern: "read",
        block: 1 << 20,
        depth: 1,
        unit: FigureUnit::Bandwidth,
        floor: Some(0.95),
    },
    DiskLoad {
        name: "1 MiB, depth 4",
        pattern: "read",
        block: 1 << 20,
        depth: 4,
        unit: FigureUnit::Bandwidth,
        floor: Some(0.95),
    },
    DiskLoad {
        name: "1 MiB random, depth 8",
        pattern: "randread",
        block: 1 << 20,
        depth: 8,
        unit: FigureUnit::Bandwidth,
        floor: Some(0.95),
    },
    DiskLoad {
        name: "64 KiB random, depth 8",
        pattern: "randread",
        block: 64 << 10,
        depth: 8,
        unit: FigureUnit::Rate,
        floor: None,
    },
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let len: u64 = if suite.quick { 1 << 30 } else { 4 << 30 };
    let room = scratch::free_bytes(suite.disk.path());
    if room < len * 3 {
        let path = suite.disk.path().display();
        return Err(BenchError::Missing(format!(
            "{path} has {} MiB free, {} are needed: see --disk-dir",
            room >> 20,
            (len * 3) >> 20
        )));
    }
    let plain = suite.disk.path().join("plain.bin");
    let cache = suite.disk.subdir("store")?;
    let words = |load: &DiskLoad, time: Duration| -> Vec<String> {
        let mut words: Vec<String> = vec!["store".into(), cache.display().to_string()];
        words.extend(["--size".into(), Size(len).to_string(), "--block".into(), Size(load.block).to_string()]);
        words.extend(["--depth".into(), load.depth.to_string(), "--time".into(), format!("{}ms", time.as_millis())]);
        words.extend((load.pattern == "randread").then(|| "--random".into()));
        words
    };
    show_progress("disk", "writing the files");
    scratch::write_file(&plain, 0, len)?;
    if !crate::fio::takes_direct(&plain) {
        return Err(BenchError::Missing(format!("{} does not support O_DIRECT", suite.disk.path().display())));
    }
    child::run_to_end(
        suite.part_command(&words(&DISK_LOADS[0], Duration::from_millis(100)), None),
        Duration::from_secs(600),
    )?;
    // Pending writeback would be measured, too.
    rustix::fs::sync();
    let mut cases = Vec::new();
    for load in &DISK_LOADS {
        let job = FioJob { depth: load.depth, ..suite.new_job(vec![plain.clone()], load.pattern, load.block, 1, len) };
        cases.push(BenchCase::new(load.name, "fio", "fio, O_DIRECT io_uring", load.unit, move || {
            fio_sample(&job, load.unit, &[])
        }));
        let words = words(load, suite.time);
        let case = BenchCase::new(load.name, "store", "block store", load.unit, move || {
            part_sample(suite.part_command(&words, None), suite.time * 3 + Duration::from_secs(60), load.unit, &[])
        })
        .against("of fio", &["fio"], load.floor);
        cases.push(if load.block == 1 << 20 { case.limit_cpu("reader", 0.05) } else { case });
    }
    let rows = suite.rounds("disk", cases)?;
    let title =
        "Reads of blocks on the disk, past the page cache, each checked against its checksum; no network, no FUSE.";
    let notes = vec![
        "fio does not checksum. At depth 1 fio reads by pread, at others by io_uring with registered buffers.".into(),
    ];
    Ok(SuiteSection { name: "disk", title, skipped: None, notes, rows })
}
