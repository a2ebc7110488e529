//! The time from the start of a mount to the first response: with an empty cache, and with a million indexed blocks.

use super::section::SuiteSection;
use super::setup::BenchSuite;
use crate::error::{BenchError, Result};
use crate::measure::{BenchCase, CaseSample, FigureUnit};
use crate::mount::{MountUnderTest, counter};
use crate::terminal::show_progress;
use spurline_types::Size;
use std::path::Path;

const START_BLOCK_BYTES: u32 = 4 << 20;
const START_BLOCKS: u64 = 1_000_000;
const START_GROUP: &str = "until it answers";

pub(super) fn run(suite: &BenchSuite) -> Result<SuiteSection> {
    let source = &suite.make_source("source-start", 1, 1 << 20)?;
    let label = format!("{START_BLOCKS} blocks indexed ({})", Size(START_BLOCKS << 20));
    let empty = BenchCase::new(START_GROUP, "empty", "empty cache", FigureUnit::Time, || {
        let cache = suite.disk.empty_subdir("cache-start")?;
        Ok(start_mount(suite, "start-empty", source, &cache)?.0)
    });
    let full = BenchCase::new(START_GROUP, "million", &label, FigureUnit::Time, || {
        let cache = suite.disk.empty_subdir("cache-start-full")?;
        show_progress("start  writing an index");
        // Each time anew: the blocks do not exist, and an access may remove index entries.
        spurline_store::synthesise(&cache, START_BLOCK_BYTES, START_BLOCKS, 1, 1 << 20)?;
        let (sample, mounted) = start_mount(suite, "start-full", source, &cache)?;
        let known = counter(&mounted.counters()?, "blockcache.blocks");
        if known < START_BLOCKS / 10 * 9 {
            return Err(BenchError::Failed(format!("the mount knows {known} blocks, {START_BLOCKS} are indexed")));
        }
        Ok(sample)
    });
    let title = "Time from starting the process until its root directory is listed.";
    let notes = vec!["The index is written just before, so it comes from the page cache.".into()];
    suite.measure("start", title, vec![empty, full], notes)
}

fn start_mount(suite: &BenchSuite, name: &str, source: &Path, cache: &Path) -> Result<(CaseSample, MountUnderTest)> {
    let words = ["--cache-dir", &cache.display().to_string(), "--cache-size", "1P"];
    let mounted = suite.mount(name, source, None, &words)?;
    let cpu = vec![("mount", mounted.daemon().cpu()?)];
    Ok((CaseSample { value: mounted.started_in, ops: 1, cpu, ..CaseSample::default() }, mounted))
}
