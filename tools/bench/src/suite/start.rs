//! The time from the start of a mount to the first response: with an empty cache, and with a million indexed blocks.

use super::section::SuiteSection;
use super::{BenchSuite, show_progress};
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::MountUnderTest;
use spurline_types::Size;

const START_BLOCK_BYTES: u32 = 4 << 20;
const START_BLOCKS: u64 = 1_000_000;

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let source = suite.make_source("source-start", 1, 1 << 20)?.display().to_string();
    let start = |name: &str, cache: &str| -> Result<(CaseSample, MountUnderTest)> {
        let mounted = suite.start_mount(name, &source, None, &["--cache-dir", cache, "--cache-size", "1P"])?;
        let cpu = vec![("mount", mounted.daemon().cpu()?)];
        Ok((CaseSample { value: mounted.started_in, bytes: 0, ops: 1, cpu, latency_us: None }, mounted))
    };
    let total = Size(START_BLOCKS << 20);
    let label = format!("{START_BLOCKS} blocks indexed ({total})");
    let cases = vec![
        BenchCase::new("until it answers", "empty", "empty cache", FigureUnit::Time, || {
            let cache = suite.disk.empty_subdir("cache-start")?.display().to_string();
            Ok(start("start-empty", &cache)?.0)
        }),
        BenchCase::new("until it answers", "million", &label, FigureUnit::Time, || {
            let dir = suite.disk.empty_subdir("cache-start-full")?;
            show_progress("start", "writing an index");
            // Each time anew: the blocks do not exist, and an access may remove index entries.
            spurline_store::synthesise(&dir, START_BLOCK_BYTES, START_BLOCKS, 1, 1 << 20)?;
            let (sample, mounted) = start("start-full", &dir.display().to_string())?;
            let known = mounted.counters(&suite.spurline)?.get("blockcache.blocks").copied().unwrap_or(0);
            if known < START_BLOCKS / 10 * 9 {
                return Err(BenchError::Failed(format!("the mount knows {known} blocks, {START_BLOCKS} are indexed")));
            }
            Ok(sample)
        }),
    ];
    let rows = suite.rounds("start", cases)?;
    let title = "Time from starting the process until its root directory is listed.";
    let notes = vec!["The index is written just before, so it comes from the page cache.".into()];
    Ok(SuiteSection { name: "start", title, skipped: None, notes, rows })
}
