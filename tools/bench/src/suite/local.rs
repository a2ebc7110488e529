//! Hot O_DIRECT reads of a single mount, against the empty file system on the same session code: sending the same mebibyte again
//! and again, and holding as many bytes as are read.

use super::section::SuiteSection;
use super::setup::{BenchSuite, BytePath, EmptyVariant, FioLoad, SuitePlace, optional};
use crate::error::Result;
use crate::fio::{FioJob, takes_direct};
use crate::measure::{CeilingFloor, CeilingSpec, best_of};
use crate::mount::{MountUnderTest, counter_growth};
use crate::scratch::{self, file_name};
use crate::{child, stop};
use std::path::Path;
use std::time::Duration;

const LOCAL_FILES: usize = 4;
const LOCAL_FILE_BYTES: u64 = 128 << 20;
const ALL_BYTES: u64 = LOCAL_FILES as u64 * LOCAL_FILE_BYTES;

const LOCAL_LOADS: [FioLoad; 5] = [
    FioLoad::sequential("1 MiB, 1 job", "read", 1 << 20, 1, 0.9),
    FioLoad::sequential("1 MiB, 2 jobs", "read", 1 << 20, 2, 0.9),
    FioLoad::sequential("1 MiB, 4 jobs", "read", 1 << 20, 4, 0.9),
    FioLoad::random("4 KiB random, 1 job", 4096, 1, 0.8),
    FioLoad::random("4 KiB random, 4 jobs", 4096, 4, 0.8),
];

const EMPTY_VARIANTS: [EmptyVariant; 4] = [
    ("null-dev", "empty fs, /dev/fuse", "dev", 1 << 20),
    ("null-uring", "empty fs, io_uring", "uring", 1 << 20),
    ("held-dev", "fs in memory, /dev/fuse", "dev", ALL_BYTES),
    ("held-uring", "fs in memory, io_uring", "uring", ALL_BYTES),
];

/// A kind of mount.
struct MountVariant {
    name: &'static str,
    label: &'static str,
    words: &'static [&'static str],
    path: BytePath,
    ceilings: &'static [CeilingSpec],
}

const LOCAL_VARIANTS: [MountVariant; 3] = [
    MountVariant {
        name: "blocks-dev",
        label: "mount, blocks in memory, /dev/fuse",
        words: &["--no-passthrough", "--fuse-io", "dev"],
        path: BytePath::Memory,
        ceilings: &[
            best_of("of fs in memory", &["held-dev"], CeilingFloor::OfLoad),
            best_of("of empty fs", &["null-dev"], CeilingFloor::None),
        ],
    },
    MountVariant {
        name: "blocks-uring",
        label: "mount, blocks in memory, io_uring",
        words: &["--no-passthrough", "--fuse-io", "uring"],
        path: BytePath::Memory,
        ceilings: &[
            best_of("of fs in memory", &["held-uring"], CeilingFloor::OfLoad),
            best_of("of empty fs", &["null-uring"], CeilingFloor::None),
        ],
    },
    MountVariant {
        name: "passthrough",
        label: "mount, passthrough",
        words: &[],
        path: BytePath::Passthrough,
        ceilings: &[
            best_of("of fs in memory", &["held-dev", "held-uring"], CeilingFloor::OfLoad),
            best_of("of empty fs", &["null-dev", "null-uring"], CeilingFloor::None),
            best_of("of tmpfs", &["tmpfs"], CeilingFloor::None),
        ],
    },
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let source = suite.make_source("source-big", LOCAL_FILES, LOCAL_FILE_BYTES)?;
    let mut notes = Vec::new();
    let empties = suite.mount_empties(&mut notes, &EMPTY_VARIANTS)?;
    let mut mounts = Vec::new();
    for variant in &LOCAL_VARIANTS {
        let mounted = optional(&mut notes, variant.label, mount_ready(suite, variant, &source))?;
        mounts.extend(mounted.map(|mounted| (variant, mounted)));
    }
    let mut places = vec![SuitePlace::plain("tmpfs", "tmpfs", source.clone())];
    places.extend(empties.iter().map(|(variant, mount)| SuitePlace::empty(variant.0, variant.1, "mount", mount)));
    for (variant, mounted) in &mounts {
        let MountVariant { name, label, path, ceilings, .. } = variant;
        notes.extend(mounted.session_line().map(|line| format!("{label}: {line}")));
        places.push(SuitePlace::mounted(name, label, "mount", mounted, Some(*path), ceilings));
    }
    let direct = takes_direct(&source.join(file_name(0)));
    let mut cases = Vec::new();
    for load in LOCAL_LOADS.iter().filter(|load| !suite.quick || load.jobs != 2) {
        for place in &places {
            let job = suite.new_job(place.files(LOCAL_FILES), load, LOCAL_FILE_BYTES);
            // Each job reads a part of a single file.
            let apart = if job.files.len() == 1 { LOCAL_FILE_BYTES } else { 0 };
            let job = FioJob { apart, direct: direct || place.mount.is_some(), ..job };
            cases.push(suite.fio_case(load, place, job));
        }
    }
    notes.push(format!(
        "The empty fs sends one mebibyte again and again, out of the processor's cache; the fs in memory holds {} MiB, as \
         the mounts do, and has no names, versions or blocks to look for.",
        ALL_BYTES >> 20
    ));
    notes.push("The kernel copies a passthrough read in the reader, an empty-fs or block read in the mount.".into());
    suite.measure("local", "Hot O_DIRECT reads of a single mount, cache and source on tmpfs.", cases, notes)
}

/// A mount. The data was read and compared once, and comes by the path of the variant.
fn mount_ready(suite: &BenchSuite, variant: &MountVariant, source: &Path) -> Result<MountUnderTest> {
    let cache = suite.memory.empty_dir(&format!("cache-{}", variant.name))?;
    // Twice the data, so that no hot block is evicted.
    let sizes = ["--cache-size", "2G", "--free-space-ratio", "0", "--buffer-size", "1300M"];
    let words = [&["--cache-dir", &cache][..], &sizes, variant.words].concat();
    let mounted = suite.mount(variant.name, source, None, &words)?;
    scratch::check_files(mounted.at(), LOCAL_FILES, LOCAL_FILE_BYTES)?;
    if variant.path == BytePath::Passthrough {
        // Blocks reach the cache disk asynchronously, and the kernel gets only whole files.
        for file in 0..LOCAL_FILES {
            let what = format!("{} to be opened with passthrough", file_name(file));
            stop::wait_until(&what, Duration::from_secs(10), Duration::from_millis(50), || {
                let before = mounted.counters()?;
                drop(std::fs::File::open(mounted.at().join(file_name(file))));
                let grown = counter_growth(&before, &mounted.counters()?);
                Ok(grown.contains_key("fuse.passthrough_opens").then_some(()))
            })?;
        }
    }
    Ok(mounted)
}
