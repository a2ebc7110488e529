//! Processor time of processes, from `/proc/PID/stat`: all threads, also those that have ended, and reaped children. Knows
//! nothing of the work of the processes.
//!
//! Work of the kernel for a process counts at the place of execution: page copies of a FUSE reply in the mount, those of a
//! passthrough read in the reader, the receiving half of a veth pair mostly in the sender.

use crate::error::{BenchError, Result};
use std::path::Path;

/// Processor seconds of a process and the reaped children.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CpuTime {
    /// The process itself, user and system, all threads.
    pub own: f64,
    /// Children that ended and were waited for.
    pub children: f64,
}

impl CpuTime {
    /// Own and children.
    pub fn total(self) -> f64 {
        self.own + self.children
    }
}

/// The processor time that a process has used so far.
pub fn of_process(pid: u32) -> Result<CpuTime> {
    let path = format!("/proc/{pid}/stat");
    let text = std::fs::read_to_string(Path::new(&path)).map_err(|e| BenchError::io(&path, &e))?;
    parse_stat(&text, rustix::param::clock_ticks_per_second() as f64)
        .ok_or_else(|| BenchError::Failed(format!("{path} reads {text:?}")))
}

/// The processor time in seconds of a process and all its descendants.
pub fn of_tree(pid: u32) -> Result<f64> {
    let own = of_process(pid)?.total();
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children = threads.map(|thread| std::fs::read_to_string(thread.path().join("children")).unwrap_or_default());
    let children: Vec<u32> = children.flat_map(|text| numbers_of(&text)).collect();
    // A child that has just ended counts with the process next time.
    Ok(own + children.into_iter().filter_map(|child| of_tree(child).ok()).sum::<f64>())
}

fn numbers_of(text: &str) -> Vec<u32> {
    text.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect()
}

/// The processor time of this process's reaped children; the growth over a child's life is the child's time.
pub fn of_children() -> Result<f64> {
    Ok(of_process(std::process::id())?.children)
}

/// Fields 14 to 17 of `proc_pid_stat(5)`; the name in field 2 may hold blanks and parentheses.
fn parse_stat(text: &str, ticks_per_second: f64) -> Option<CpuTime> {
    let rest = &text[text.rfind(')')? + 1..];
    let own = (stat_field(rest, 14)? + stat_field(rest, 15)?) / ticks_per_second;
    let children = (stat_field(rest, 16)? + stat_field(rest, 17)?) / ticks_per_second;
    Some(CpuTime { own, children })
}

fn stat_field(rest: &str, n: usize) -> Option<f64> {
    rest.split_ascii_whitespace().nth(n - 3)?.parse::<f64>().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn fields_are_found_behind_odd_names() {
        let line = "42 (a) b (c) S 1 42 42 0 -1 4194560 100 0 0 0 150 50 25 75 20 0 8 0 100 1 2 3";
        assert_eq!(parse_stat(line, 100.0), Some(CpuTime { own: 2.0, children: 1.0 }));
        assert_eq!(parse_stat("42 (x) S 1", 100.0), None);
        assert_eq!(parse_stat("", 100.0), None);
    }

    #[test]
    fn a_child_that_burns_is_seen() {
        let before = of_children().unwrap();
        let mut child = Command::new("sh").args(["-c", "i=0; while :; do i=$((i+1)); done"]).spawn().unwrap();
        let mut own = 0.0;
        // Even on a busy machine, the child is scheduled eventually.
        for _ in 0..2000 {
            own = of_process(child.id()).unwrap().own;
            if own >= 0.1 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert!(of_tree(std::process::id()).unwrap() >= own);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(own >= 0.1, "{own}");
        assert!(of_children().unwrap() - before >= 0.1);
        assert!(of_process(child.id()).is_err());
    }
}
