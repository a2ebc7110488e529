//! Hot O_DIRECT reads of a single mount, against the empty file system on the same session code: sending the same mebibyte again
//! and again, and holding as many bytes as are read.

use super::fio_load::FioLoad;
use super::section::SuiteSection;
use super::{BenchSuite, BytePath, file_name, fio_sample};
use crate::child;
use crate::error::{BenchError, Result};
use crate::measure::BenchCase;
use crate::mount::MountUnderTest;
use crate::{fio, stop};
use std::path::{Path, PathBuf};
use std::time::Duration;

const LOCAL_FILES: usize = 4;
const LOCAL_FILE_BYTES: u64 = 128 << 20;

const LOCAL_LOADS: [FioLoad; 5] = [
    FioLoad::sequential("1 MiB, 1 job", 1 << 20, 1, 0.9),
    FioLoad::sequential("1 MiB, 2 jobs", 1 << 20, 2, 0.9),
    FioLoad::sequential("1 MiB, 4 jobs", 1 << 20, 4, 0.9),
    FioLoad::random("4 KiB random, 1 job", 4096, 1, 0.8),
    FioLoad::random("4 KiB random, 4 jobs", 4096, 4, 0.8),
];

/// A kind of mount.
struct MountVariant {
    name: &'static str,
    label: &'static str,
    /// The ceilings: a file system that holds as much, and the empty file system.
    ceilings: &'static [&'static str],
    empty: &'static [&'static str],
    words: &'static [&'static str],
    way: BytePath,
}

const LOCAL_VARIANTS: [MountVariant; 3] = [
    MountVariant {
        name: "blocks-dev",
        label: "mount, blocks in memory, /dev/fuse",
        ceilings: &["held-dev"],
        empty: &["null-dev"],
        words: &["--no-passthrough", "--fuse-io", "dev"],
        way: BytePath::Memory,
    },
    MountVariant {
        name: "blocks-uring",
        label: "mount, blocks in memory, io_uring",
        ceilings: &["held-uring"],
        empty: &["null-uring"],
        words: &["--no-passthrough", "--fuse-io", "uring"],
        way: BytePath::Memory,
    },
    MountVariant {
        name: "passthrough",
        label: "mount, passthrough",
        ceilings: &["held-dev", "held-uring"],
        empty: &["null-dev", "null-uring"],
        words: &[],
        way: BytePath::Passthrough,
    },
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let source = suite.make_source("source-big", LOCAL_FILES, LOCAL_FILE_BYTES)?;
    let mut notes = Vec::new();
    let mut nulls: Vec<(&str, &str, MountUnderTest)> = Vec::new();
    let all = LOCAL_FILES as u64 * LOCAL_FILE_BYTES;
    for (variant, io, held, label) in [
        ("null-dev", "dev", 1 << 20, "empty fs, /dev/fuse"),
        ("null-uring", "uring", 1 << 20, "empty fs, io_uring"),
        ("held-dev", "dev", all, "fs in memory, /dev/fuse"),
        ("held-uring", "uring", all, "fs in memory, io_uring"),
    ] {
        match suite.mount_holding(io, held) {
            Ok(null) => nulls.push((variant, label, null)),
            Err(e) => notes.push(format!("No {label}: {e}")),
        }
    }
    let mut mounts: Vec<(&MountVariant, MountUnderTest)> = Vec::new();
    for variant in &LOCAL_VARIANTS {
        let cache = suite.memory.empty_subdir(&format!("cache-{}", variant.name))?.display().to_string();
        // Twice the data, so that no hot block is evicted.
        let sizes = ["--cache-size", "2G", "--free-space-ratio", "0", "--buffer-size", "1300M"];
        let words = [&["--cache-dir", &cache][..], &sizes, variant.words].concat();
        let label = variant.label;
        match mount_ready(suite, variant.name, &source, &words, variant.way) {
            Ok(mounted) => {
                notes.extend(mounted.session_line().map(|s| format!("{label}: {s}")));
                mounts.push((variant, mounted));
            }
            Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
            Err(e) => notes.push(format!("No {label}: {e}")),
        }
    }
    let mut cases = Vec::new();
    for load in LOCAL_LOADS.iter().filter(|l| !suite.quick || l.jobs != 2) {
        let job = |local_files: Vec<PathBuf>, size: u64| {
            suite.new_job(local_files, load.pattern, load.block, load.jobs, size)
        };
        let direct = fio::takes_direct(&source.join(file_name(0)));
        let plain = fio::FioJob { direct, ..job(local_files(&source), LOCAL_FILE_BYTES) };
        cases.push(BenchCase::new(load.name, "tmpfs", "tmpfs", load.unit, move || fio_sample(&plain, load.unit, &[])));
        for (variant, label, null) in &nulls {
            // Each job reads a part of the single file.
            let job = fio::FioJob { apart: LOCAL_FILE_BYTES, ..job(vec![null.at().join("data")], LOCAL_FILE_BYTES) };
            cases.push(BenchCase::new(load.name, variant, label, load.unit, move || {
                fio_sample(&job, load.unit, &[("mount", null.daemon())])
            }));
        }
        for (variant, mounted) in &mounts {
            let job = job(local_files(mounted.at()), LOCAL_FILE_BYTES);
            let first = job.clone();
            let case = BenchCase::new(load.name, variant.name, variant.label, load.unit, move || {
                fio_sample(&job, load.unit, &[("mount", mounted.daemon())])
            })
            .against("of fs in memory", variant.ceilings, Some(load.floor))
            .against("of empty fs", variant.empty, None)
            .warm(move || suite.warm_up(mounted, &first, variant.way));
            let passthrough = matches!(variant.way, BytePath::Passthrough);
            cases.push(if passthrough { case.against("of tmpfs", &["tmpfs"], None) } else { case });
        }
    }
    let rows = suite.rounds("local", cases)?;
    notes.push(format!(
        "The empty fs sends one mebibyte again and again, out of the processor's cache; the fs in memory holds {} MiB, as \
         the mounts do, and has no names, versions or blocks to look for.",
        all >> 20
    ));
    notes.push("The kernel copies a passthrough read in the reader, an empty-fs or block read in the mount.".into());
    let title = "Hot O_DIRECT reads of a single mount, cache and source on tmpfs.";
    Ok(SuiteSection { name: "local", title, skipped: None, notes, rows })
}

fn local_files(at: &Path) -> Vec<PathBuf> {
    (0..LOCAL_FILES).map(|i| at.join(file_name(i))).collect::<Vec<PathBuf>>()
}

/// A mount. The data was read and compared once, and comes by `way`.
pub(super) fn mount_ready(
    suite: &BenchSuite,
    name: &str,
    source: &Path,
    words: &[&str],
    way: BytePath,
) -> Result<MountUnderTest> {
    let mounted = suite.start_mount(name, &source.display().to_string(), None, words)?;
    suite.check_files("local", mounted.at(), LOCAL_FILES, LOCAL_FILE_BYTES)?;
    if matches!(way, BytePath::Passthrough) {
        // Blocks reach the cache disk asynchronously, and the kernel gets only whole files.
        let opens = |file: usize| -> Result<bool> {
            let before = mounted.counters(&suite.spurline)?;
            drop(std::fs::File::open(mounted.at().join(file_name(file))));
            let after = mounted.counters(&suite.spurline)?;
            Ok(crate::mount::counter_growth(&before, &after).contains_key("fuse.passthrough_opens"))
        };
        for file in 0..LOCAL_FILES {
            let what = format!("{} to be opened with passthrough", file_name(file));
            stop::wait_until(&what, Duration::from_secs(10), Duration::from_millis(50), || {
                Ok(opens(file)?.then_some(()))
            })?;
        }
    }
    Ok(mounted)
}
