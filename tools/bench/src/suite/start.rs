//! The time from starting a mount until it answers: with an empty cache, and with a million blocks indexed.

use super::{Suite, tell};
use crate::error::{Error, Result};
use crate::measure::{Case, Sample, Unit};
use crate::mount::Mounted;
use crate::table::Section;
use spurline_types::Size;

const BLOCK: u32 = 4 << 20;
const BLOCKS: u64 = 1_000_000;

pub(super) fn run(suite: &Suite) -> Result<Section> {
    let source = suite.source("source-start", 1, 1 << 20)?.display().to_string();
    let start = |name: &str, cache: &str| -> Result<(Sample, Mounted)> {
        let mounted = suite.mount(name, &source, None, &["--cache-dir", cache, "--cache-size", "1P"])?;
        let cpu = vec![("mount", mounted.daemon().cpu()?)];
        Ok((Sample { value: mounted.started_in, bytes: 0, ops: 1, cpu, latency_us: None }, mounted))
    };
    let empty = || {
        let cache = suite.disk.fresh("cache-start")?.display().to_string();
        Ok(start("start-empty", &cache)?.0)
    };
    let full = || {
        let dir = suite.disk.fresh("cache-start-full")?;
        tell("start", "writing an index");
        // Each time anew: the blocks are not there, and whoever looks for them may notice and tidy up.
        spurline_store::synthesise(&dir, BLOCK, BLOCKS, 1, 1 << 20)?;
        let (sample, mounted) = start("start-full", &dir.display().to_string())?;
        let known = mounted.counters(&suite.spurline)?.get("blockcache.blocks").copied().unwrap_or(0);
        if known < BLOCKS / 10 * 9 {
            return Err(Error::Failed(format!("the mount knows of {known} blocks, {BLOCKS} are indexed")));
        }
        Ok(sample)
    };
    let total = Size(BLOCKS << 20);
    let label = format!("{BLOCKS} blocks indexed ({total})");
    let cases = vec![
        Case::new("until it answers", "empty", "empty cache", Unit::Time, empty),
        Case::new("until it answers", "million", &label, Unit::Time, full),
    ];
    let rows = suite.rounds("start", cases)?;
    let title = "Time from starting the process until its root directory is listed.";
    let notes = vec!["The index is written just before, so it comes from the page cache.".into()];
    Ok(Section { name: "start", title, skipped: None, notes, rows })
}
