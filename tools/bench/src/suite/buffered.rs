//! Sequential reads through the page cache, cold and hot, over both kinds of FUSE session and the choice of `auto`.

use super::section::SuiteSection;
use super::{BenchSuite, file_name, fio_sample};
use crate::child;
use crate::error::{BenchError, Result};
use crate::fio::FioJob;
use crate::measure::{BenchCase, FigureUnit};
use crate::mount::MountUnderTest;
use crate::scratch;
use std::path::PathBuf;

const BUFFERED_FILE_BYTES: u64 = 512 << 20;

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    child::require_program("fio", "fio")?;
    let len = if suite.quick { BUFFERED_FILE_BYTES / 2 } else { BUFFERED_FILE_BYTES };
    let source = suite.make_source("source-one", 1, len)?;
    let mut notes = Vec::new();
    let mut all: Vec<(&str, &str, PathBuf, Option<MountUnderTest>)> =
        vec![("tmpfs", "tmpfs", source.join(file_name(0)), None)];
    let mut keep = |variant, label, mounted: Result<MountUnderTest>, file: &str| match mounted {
        Ok(m) => {
            notes.extend(m.session_line().map(|s| format!("{label}: {s}")));
            all.push((variant, label, m.at().join(file), Some(m)));
            Ok(())
        }
        Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
        Err(e) => {
            notes.push(format!("No {label}: {e}"));
            Ok(())
        }
    };
    keep("null-dev", "empty fs, /dev/fuse", suite.mount_null("dev"), "data")?;
    keep("null-uring", "empty fs, io_uring", suite.mount_null("uring"), "data")?;
    let variants: [(&str, &str, &[&str]); 4] = [
        ("dev", "mount, /dev/fuse", &["--no-passthrough", "--fuse-io", "dev"]),
        ("uring", "mount, io_uring", &["--no-passthrough", "--fuse-io", "uring"]),
        ("auto", "mount, auto", &["--no-passthrough"]),
        ("passthrough", "mount, passthrough", &[]),
    ];
    for (variant, label, words) in variants {
        let name = format!("buffered-{variant}");
        let cache = suite.memory.empty_subdir(&format!("cache-{name}"))?.display().to_string();
        let fixed = ["--cache-dir", &cache, "--cache-size", "2G", "--free-space-ratio", "0", "--buffer-size", "1300M"];
        let words = [&fixed[..], words].concat();
        let mounted = suite.start_mount(&name, &source.display().to_string(), None, &words).and_then(|m| {
            scratch::check_file(&m.at().join(file_name(0)), 0, len)?;
            Ok(m)
        });
        keep(variant, label, mounted, &file_name(0))?;
    }
    let mut cases = Vec::new();
    for (group, cold) in [("cold page cache, 1 job", true), ("hot page cache, 1 job", false)] {
        for (variant, label, file, mounted) in &all {
            let mut job = FioJob {
                direct: false,
                drop_cache: cold,
                ..suite.new_job(vec![file.clone()], "read", 1 << 20, 1, len)
            };
            if cold {
                // A single pass: a second pass would be hot.
                job.runtime = None;
            }
            let first = FioJob { runtime: None, ..job.clone() };
            let mut case = BenchCase::new(group, variant, label, FigureUnit::Bandwidth, move || {
                let roles: Vec<_> = mounted.iter().map(|m| ("mount", m.daemon())).collect();
                fio_sample(&job, FigureUnit::Bandwidth, &roles)
            })
            .warm(move || first.run().map(|_| (Default::default(), None)));
            case = match *variant {
                "dev" => case.against("of empty fs", &["null-dev"], None),
                "uring" => case.against("of empty fs", &["null-uring"], None),
                // The faster way should be chosen; noise of a run is not a wrong choice.
                "auto" => case.against("of the faster kind", &["dev", "uring"], Some(0.95)),
                "passthrough" => case.against("of tmpfs", &["tmpfs"], None),
                _ => case,
            };
            cases.push(case);
        }
    }
    let rows = suite.rounds("buffered", cases)?;
    let title = "Buffered sequential reads of a file with all blocks in the mount's memory.";
    Ok(SuiteSection { name: "buffered", title, skipped: None, notes, rows })
}
