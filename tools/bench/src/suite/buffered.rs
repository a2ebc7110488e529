//! Sequential reads through the page cache, cold and hot, over both kinds of FUSE session and the choice of `auto`.

use super::section::SuiteSection;
use super::setup::{BenchSuite, EmptyVariant, FioLoad, SuitePlace, optional};
use crate::error::Result;
use crate::fio::FioJob;
use crate::measure::{CeilingFloor, CeilingSpec, WarmUpResult, best_of};
use crate::{child, scratch};

const BUFFERED_FILE_BYTES: u64 = 512 << 20;

const COLD_LOAD: FioLoad = FioLoad::sequential("cold page cache, 1 job", "read", 1 << 20, 1, 0.0);
const HOT_LOAD: FioLoad = FioLoad::sequential("hot page cache, 1 job", "read", 1 << 20, 1, 0.0);

const UNREAD_VARIANTS: [EmptyVariant; 2] =
    [("null-dev", "empty fs, /dev/fuse", "dev", 1 << 20), ("null-uring", "empty fs, io_uring", "uring", 1 << 20)];

/// Mounts: variant, label, ceilings, and arguments.
const BUFFERED_VARIANTS: [(&str, &str, &[CeilingSpec], &[&str]); 4] = [
    (
        "dev",
        "mount, /dev/fuse",
        &[best_of("of empty fs", &["null-dev"], CeilingFloor::None)],
        &["--no-passthrough", "--fuse-io", "dev"],
    ),
    (
        "uring",
        "mount, io_uring",
        &[best_of("of empty fs", &["null-uring"], CeilingFloor::None)],
        &["--no-passthrough", "--fuse-io", "uring"],
    ),
    (
        "auto",
        "mount, auto",
        // The faster way should be chosen; noise of a run is not a wrong choice.
        &[best_of("of the faster kind", &["dev", "uring"], CeilingFloor::At(0.95))],
        &["--no-passthrough"],
    ),
    ("passthrough", "mount, passthrough", &[best_of("of tmpfs", &["tmpfs"], CeilingFloor::None)], &[]),
];

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let len = if suite.quick { BUFFERED_FILE_BYTES / 2 } else { BUFFERED_FILE_BYTES };
    let source = suite.make_source("source-one", 1, len)?;
    let mut notes = Vec::new();
    let empties = suite.mount_empties(&mut notes, &UNREAD_VARIANTS)?;
    let mut mounts = Vec::new();
    for (variant, label, ceilings, words) in BUFFERED_VARIANTS {
        let name = format!("buffered-{variant}");
        let cache = suite.memory.empty_dir(&format!("cache-{name}"))?;
        let fixed = ["--cache-dir", &cache, "--cache-size", "2G", "--free-space-ratio", "0", "--buffer-size", "1300M"];
        let mounted = suite.mount(&name, &source, None, &[&fixed[..], words].concat());
        let checked = mounted.and_then(|mounted| scratch::check_files(mounted.at(), 1, len).map(|()| mounted));
        mounts.extend(optional(&mut notes, label, checked)?.map(|mounted| (variant, label, ceilings, mounted)));
    }
    let mut places = vec![SuitePlace::plain("tmpfs", "tmpfs", source)];
    places.extend(empties.iter().map(|(variant, mount)| SuitePlace::empty(variant.0, variant.1, "mount", mount)));
    for (variant, label, ceilings, mounted) in &mounts {
        notes.extend(mounted.session_line().map(|line| format!("{label}: {line}")));
        places.push(SuitePlace::mounted(variant, label, "mount", mounted, None, ceilings));
    }
    let mut cases = Vec::new();
    for (load, cold) in [(&COLD_LOAD, true), (&HOT_LOAD, false)] {
        for place in &places {
            let job = FioJob { direct: false, drop_cache: cold, ..suite.new_job(place.files(1), load, len) };
            let once = FioJob { runtime: None, ..job.clone() };
            // A single pass: a second pass would be hot.
            let case = suite.fio_case(load, place, if cold { once.clone() } else { job });
            cases.push(case.warm(move || once.run().map(|_| WarmUpResult::default())));
        }
    }
    let title = "Buffered sequential reads of a file with all blocks in the mount's memory.";
    suite.measure("buffered", title, cases, notes)
}
