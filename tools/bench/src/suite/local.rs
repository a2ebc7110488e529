//! Hot O_DIRECT reads of a mount that runs alone, against the empty file system on the same session code: one that
//! sends the same mebibyte again and again, and one that holds as many bytes as are read.

use super::{Suite, Way, file_name, fio_sample};
use crate::child;
use crate::error::{Error, Result};
use crate::measure::{Case, Unit};
use crate::mount::Mounted;
use crate::table::Section;
use crate::{fio, stop};
use std::path::{Path, PathBuf};
use std::time::Duration;

const FILES: usize = 4;
const LEN: u64 = 128 << 20;

/// One workload.
struct Load {
    name: &'static str,
    pattern: &'static str,
    block: u64,
    jobs: usize,
    floor: f64,
    unit: Unit,
}

const LOADS: [Load; 5] = [
    Load { name: "1 MiB, 1 job", pattern: "read", block: 1 << 20, jobs: 1, floor: 0.9, unit: Unit::Bandwidth },
    Load { name: "1 MiB, 2 jobs", pattern: "read", block: 1 << 20, jobs: 2, floor: 0.9, unit: Unit::Bandwidth },
    Load { name: "1 MiB, 4 jobs", pattern: "read", block: 1 << 20, jobs: 4, floor: 0.9, unit: Unit::Bandwidth },
    Load { name: "4 KiB random, 1 job", pattern: "randread", block: 4096, jobs: 1, floor: 0.8, unit: Unit::Rate },
    Load { name: "4 KiB random, 4 jobs", pattern: "randread", block: 4096, jobs: 4, floor: 0.8, unit: Unit::Rate },
];

/// One way to mount.
struct Variant {
    name: &'static str,
    label: &'static str,
    /// The file systems it is held against: one that holds as much, and the empty one.
    ceilings: &'static [&'static str],
    empty: &'static [&'static str],
    words: &'static [&'static str],
    way: Way,
}

const VARIANTS: [Variant; 3] = [
    Variant {
        name: "blocks-dev",
        label: "mount, blocks in memory, /dev/fuse",
        ceilings: &["held-dev"],
        empty: &["null-dev"],
        words: &["--no-passthrough", "--fuse-io", "dev"],
        way: Way::Memory,
    },
    Variant {
        name: "blocks-uring",
        label: "mount, blocks in memory, io_uring",
        ceilings: &["held-uring"],
        empty: &["null-uring"],
        words: &["--no-passthrough", "--fuse-io", "uring"],
        way: Way::Memory,
    },
    Variant {
        name: "passthrough",
        label: "mount, passthrough",
        ceilings: &["held-dev", "held-uring"],
        empty: &["null-dev", "null-uring"],
        words: &[],
        way: Way::Passthrough,
    },
];

pub(super) fn run(suite: &Suite) -> Result<Section> {
    child::need("fio", "fio")?;
    let source = suite.source("source-big", FILES, LEN)?;
    let mut notes = Vec::new();
    let mut nulls: Vec<(&str, &str, Mounted)> = Vec::new();
    let all = FILES as u64 * LEN;
    for (variant, io, held, label) in [
        ("null-dev", "dev", 1 << 20, "empty fs, /dev/fuse"),
        ("null-uring", "uring", 1 << 20, "empty fs, io_uring"),
        ("held-dev", "dev", all, "fs in memory, /dev/fuse"),
        ("held-uring", "uring", all, "fs in memory, io_uring"),
    ] {
        match suite.holding(io, held) {
            Ok(null) => nulls.push((variant, label, null)),
            Err(e) => notes.push(format!("No {label}: {e}")),
        }
    }
    let mut mounts: Vec<(&Variant, Mounted)> = Vec::new();
    for variant in &VARIANTS {
        let cache = suite.memory.fresh(&format!("cache-{}", variant.name))?.display().to_string();
        // Twice the data, so that nothing that is hot has to leave.
        let sizes = ["--cache-size", "2G", "--free-space-ratio", "0", "--buffer-size", "1300M"];
        let words = [&["--cache-dir", &cache][..], &sizes, variant.words].concat();
        let label = variant.label;
        match ready(suite, variant.name, &source, &words, variant.way) {
            Ok(mounted) => {
                notes.extend(mounted.session().map(|s| format!("{label}: {s}")));
                mounts.push((variant, mounted));
            }
            Err(Error::Interrupted) => return Err(Error::Interrupted),
            Err(e) => notes.push(format!("No {label}: {e}")),
        }
    }
    let files = |at: &Path| (0..FILES).map(|i| at.join(file_name(i))).collect::<Vec<PathBuf>>();
    let mut cases = Vec::new();
    for load in LOADS.iter().filter(|l| !suite.quick || l.jobs != 2) {
        let job = |files: Vec<PathBuf>, size: u64| suite.job(files, load.pattern, load.block, load.jobs, size);
        let direct = fio::takes_direct(&source.join(file_name(0)));
        let plain = fio::Job { direct, ..job(files(&source), LEN) };
        cases.push(Case::new(load.name, "tmpfs", "tmpfs", load.unit, move || fio_sample(&plain, load.unit, &[])));
        for (variant, label, null) in &nulls {
            // The jobs get a part each of the one file there is.
            let job = fio::Job { apart: LEN, ..job(vec![null.at().join("data")], LEN) };
            cases.push(Case::new(load.name, variant, label, load.unit, move || {
                fio_sample(&job, load.unit, &[("mount", null.daemon())])
            }));
        }
        for (variant, mounted) in &mounts {
            let job = job(files(mounted.at()), LEN);
            let first = job.clone();
            let case = Case::new(load.name, variant.name, variant.label, load.unit, move || {
                fio_sample(&job, load.unit, &[("mount", mounted.daemon())])
            })
            .against("of fs in memory", variant.ceilings, Some(load.floor))
            .against("of empty fs", variant.empty, None)
            .warm(move || suite.warm(mounted, &first, variant.way));
            let passthrough = matches!(variant.way, Way::Passthrough);
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
    let title = "Hot O_DIRECT reads of a mount that runs alone, cache and source on tmpfs.";
    Ok(Section { name: "local", title, skipped: None, notes, rows })
}

/// A mount whose data was read and compared once, and is where `way` says.
pub(super) fn ready(suite: &Suite, name: &str, source: &Path, words: &[&str], way: Way) -> Result<Mounted> {
    let mounted = suite.mount(name, &source.display().to_string(), None, words)?;
    suite.check("local", mounted.at(), FILES, LEN)?;
    if matches!(way, Way::Passthrough) {
        // Blocks go to the cache disk behind the reader's back; only whole files are handed to the kernel.
        let opens = |file: usize| -> Result<bool> {
            let before = mounted.counters(&suite.spurline)?;
            drop(std::fs::File::open(mounted.at().join(file_name(file))));
            let after = mounted.counters(&suite.spurline)?;
            Ok(crate::mount::growth(&before, &after).contains_key("fuse.passthrough_opens"))
        };
        for file in 0..FILES {
            let what = format!("{} to be opened with passthrough", file_name(file));
            stop::wait(&what, Duration::from_secs(10), Duration::from_millis(50), || Ok(opens(file)?.then_some(())))?;
        }
    }
    Ok(mounted)
}
