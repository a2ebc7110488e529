//! Process resource use, refreshed into the gauges of section `usage` on each query.

use spurline_types::Stats;
use std::time::Instant;

/// Refreshes CPU time, resident memory and uptime.
pub fn refresh_usage(stats: &Stats, started: Instant) {
    stats.usage.uptime_seconds.set(started.elapsed().as_secs());
    if let Ok(text) = std::fs::read_to_string("/proc/self/statm")
        && let Some(pages) = text.split_whitespace().nth(1).and_then(|n| n.parse::<u64>().ok())
    {
        stats.usage.rss_bytes.set(pages * rustix::param::page_size() as u64);
    }
    if let Ok(text) = std::fs::read_to_string("/proc/self/stat")
        && let Some(ticks) = cpu_ticks(&text)
    {
        let per_second = rustix::param::clock_ticks_per_second().max(1);
        stats.usage.cpu_us.set(ticks * 1_000_000 / per_second);
    }
}

/// User plus system time from /proc/PID/stat, whose second field may hold blanks and brackets.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let after = &stat[stat.rfind(')')? + 1..];
    let mut fields = after.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let stats = Stats::default();
        refresh_usage(&stats, Instant::now());
        assert!(stats.usage.rss_bytes.get() > 1 << 16);
        assert_eq!(cpu_ticks("1 (a) b) S 1 1 1 0 -1 4 1 1 1 1 7 5 0 0"), Some(12));
        assert_eq!(cpu_ticks("nonsense"), None);
    }
}
