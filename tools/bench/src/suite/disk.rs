//! Reads of the cache disk through the block store, against fio with O_DIRECT and io_uring at the same depth.

use super::section::SuiteSection;
use super::setup::{BenchSuite, FioLoad, SuitePlace};
use crate::error::{BenchError, Result};
use crate::fio::{FioJob, takes_direct};
use crate::measure::{BenchCase, FigureUnit};
use crate::part::{BlockPart, PartOrder};
use crate::terminal::show_progress;
use crate::{child, scratch};
use std::path::Path;
use std::time::Duration;

/// Reads whose jobs are requests at a time of one process; 0 is no floor.
const DISK_LOADS: [FioLoad; 4] = [
    FioLoad::sequential("1 MiB, depth 1", "read", 1 << 20, 1, 0.95),
    FioLoad::sequential("1 MiB, depth 4", "read", 1 << 20, 4, 0.95),
    FioLoad::random("1 MiB random, depth 8", 1 << 20, 8, 0.95),
    FioLoad::random("64 KiB random, depth 8", 64 << 10, 8, 0.0),
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let len: u64 = if suite.quick { 1 << 30 } else { 4 << 30 };
    let path = suite.disk.path().display();
    let have = scratch::free_bytes(suite.disk.path()) >> 20;
    let need = (len * 3) >> 20;
    if have < need {
        return Err(BenchError::Missing(format!("{path} has {have} MiB free, {need} are needed: see --disk-dir")));
    }
    let plain = SuitePlace::plain("fio", "fio, O_DIRECT io_uring", suite.disk.path().join("plain.bin"));
    let cache = suite.disk.subdir("store")?;
    show_progress("disk  writing the files");
    scratch::write_file(&plain.at, 0, len)?;
    if !takes_direct(&plain.at) {
        return Err(BenchError::Missing(format!("{path} does not support O_DIRECT")));
    }
    let order = store_order(&cache, &DISK_LOADS[0], len, Duration::from_millis(100));
    child::run_to_end(suite.part_command(&order, None)?, Duration::from_secs(600))?;
    // Pending writeback would be measured, too.
    rustix::fs::sync();
    let mut cases = Vec::new();
    for load in &DISK_LOADS {
        let job = FioJob { depth: load.jobs, jobs: 1, ..suite.new_job(plain.files(1), load, len) };
        cases.push(suite.fio_case(load, &plain, job));
        let order = store_order(&cache, load, len, suite.time);
        let take = move || suite.part_sample(&order, None, load.unit, "reader", &[]);
        let floor = (load.unit == FigureUnit::Bandwidth).then_some(load.floor);
        cases.push(BenchCase::new(load.name, "store", "block store", load.unit, take).against(
            "of fio",
            &["fio"],
            floor,
        ));
    }
    let title =
        "Reads of blocks on the disk, past the page cache, each checked against its checksum; no network, no FUSE.";
    let notes = vec![
        "fio does not checksum. At depth 1 fio reads by pread, at others by io_uring with registered buffers.".into(),
    ];
    suite.measure("disk", title, cases, notes)
}

fn store_order(dir: &Path, load: &FioLoad, bytes: u64, time: Duration) -> PartOrder {
    let reads = BlockPart {
        connections: load.jobs,
        block: load.block,
        bytes,
        random: load.pattern == "randread",
        time_ms: time.as_millis() as u64,
        ..BlockPart::default()
    };
    PartOrder::Store { dir: dir.to_owned(), reads }
}
