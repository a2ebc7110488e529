//! Runs each seed in a process of its own, whose addresses are the same in each run: so a seed runs equally whenever it runs, alone
//! or after others. It knows nothing of a run but its counts.

use std::process::{Command, Output};

/// Set in the process that runs one seed.
const SEED_OF_PROCESS: &str = "SPURLINE_TEST_SEED_OF_PROCESS";
/// The beginning of the line with the counts.
const COUNTS: &str = "counts of the run:";

/// A test that runs seeds.
#[derive(Clone, Copy)]
pub struct SeededTest {
    pub name: &'static str,
    /// The word that selects the test on a command line.
    pub filter: &'static str,
    /// Seeds of a run without `SPURLINE_TEST_SEEDS`.
    pub seeds: u64,
}

/// What a run counts.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RunCounts {
    /// Of all thread switches and their times.
    pub trace: u64,
    pub runs: u64,
    pub calls: u64,
    pub outages: u64,
    pub lost_locks: u64,
    pub failovers: u64,
    pub failbacks: u64,
    pub longest_ms: u64,
    pub longest_call: String,
}

impl RunCounts {
    /// Prints them for the process that has started this one.
    pub fn print(&self) {
        let RunCounts { trace, calls, outages, lost_locks, failovers, failbacks, longest_ms, longest_call, .. } = self;
        println!("{COUNTS} {trace} {calls} {outages} {lost_locks} {failovers} {failbacks} {longest_ms} {longest_call}");
    }

    fn parse(line: &str) -> Option<RunCounts> {
        let mut words = line.strip_prefix(COUNTS)?.trim_start().splitn(8, ' ');
        let mut number = || words.next()?.parse().ok();
        Some(RunCounts {
            trace: number()?,
            runs: 1,
            calls: number()?,
            outages: number()?,
            lost_locks: number()?,
            failovers: number()?,
            failbacks: number()?,
            longest_ms: number()?,
            longest_call: words.next()?.to_owned(),
        })
    }
}

/// The seed that this process is to run.
pub fn seed_of_process() -> Option<u64> {
    crate::number(SEED_OF_PROCESS)
}

/// Runs a seed by starting this test once more. Prints its events if it fails, or if they are wanted.
///
/// # Panics
/// When the run fails.
pub fn run_in_process(test: SeededTest, seed: u64, shown: bool) -> RunCounts {
    let mut command = Command::new(std::env::current_exe().expect("the path of this program"));
    command.args([test.name, "--exact", "--nocapture"]).env(SEED_OF_PROCESS, seed.to_string());
    spurline_vtime::fix_addresses(&mut command);
    let Output { status, stdout, stderr } = command.output().expect("this program starts");
    let text = String::from_utf8_lossy(&stdout);
    if shown || !status.success() {
        println!("{text}");
        eprintln!("{}", String::from_utf8_lossy(&stderr));
    }
    assert!(
        status.success(),
        "seed {seed} failed ({status}), its events are above; this runs it again: \
         SPURLINE_TEST_SEED={seed} cargo test -p {} --test virtual {} -- --nocapture",
        env!("CARGO_PKG_NAME"),
        test.filter
    );
    text.lines().find_map(RunCounts::parse).expect("a run prints its counts")
}
