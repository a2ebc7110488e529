//! Staged objects on virtual time: real stages of three or four nodes over disks, a network, a registry and a store in memory, programs that
//! compare each answer with a model, and trouble that a seed draws.
//!
//! What was acknowledged is what all nodes show, until a later change. One failure domain at a time may be lost: at the end the store has
//! each acknowledged object, under the name or as a conflict with a stranger, and nothing that was replaced or removed.

#[path = "../../../node/tests/virtual/dice.rs"]
mod dice;

mod world {
    pub use crate::dice::Dice;
}

mod bucket;
mod cluster;
mod disk;
mod model;
mod network;
mod programs;
mod script;
#[path = "../../../node/tests/virtual/writes/seeds.rs"]
mod seeds;

use programs::{Shared, locked};
use seeds::{RunCounts, SeededTest, run_in_process, seed_of_process};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const STAGED: SeededTest =
    SeededTest { name: "what_was_acknowledged_is_there_whatever_happens", filter: "acknowledged", seeds: 8 };

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The seeds in `SPURLINE_TEST_SEEDS`: the first n, or n to m for `n..m`; the first `few` without it.
fn seeds(few: u64) -> std::ops::RangeInclusive<u64> {
    let text = std::env::var("SPURLINE_TEST_SEEDS").unwrap_or_default();
    let (from, to) = text.split_once("..").unwrap_or(("1", &text));
    from.parse().unwrap_or(1)..=to.parse().unwrap_or(few)
}

/// Writes lines of the stage's log among the events.
struct EventLog(Arc<Shared>);

impl std::io::Write for EventLog {
    fn write(&mut self, line: &[u8]) -> std::io::Result<usize> {
        self.0.tell(format_args!("{}", String::from_utf8_lossy(line).trim_end()));
        Ok(line.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs one seed in this process, and prints its events.
fn run_here(seed: u64) {
    let shared = Arc::new(Shared::default());
    let logged = Arc::clone(&shared);
    let log = tracing_subscriber::fmt().with_max_level(tracing::Level::DEBUG).without_time().with_ansi(false);
    let log =
        log.with_target(false).with_thread_names(true).with_writer(move || EventLog(Arc::clone(&logged))).finish();
    let _ = tracing::subscriber::set_global_default(log);
    let panicked = Arc::clone(&shared);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        panicked.has_panicked.store(true, Ordering::Release);
        panicked.stop.store(true, Ordering::Release);
        before(panic);
    }));
    let of_run = Arc::clone(&shared);
    let ran = std::panic::catch_unwind(move || spurline_vtime::run(seed, || script::run(seed, &of_run)));
    locked(&shared.events).iter().for_each(|event| println!("{event}"));
    let ran = ran.map_or_else(|panic| std::panic::resume_unwind(panic), |((), ran)| ran);
    assert!(!shared.has_panicked.load(Ordering::Acquire), "seed {seed}: a thread has panicked");
    println!("{ran:?}");
    assert!(ran.left.is_empty(), "seed {seed}: threads that never end: {:?}", ran.left);
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    let (longest, longest_call) = locked(&shared.longest).clone();
    let counts = RunCounts {
        trace: ran.trace,
        runs: 1,
        calls: count(&shared.calls),
        outages: count(&shared.outages),
        longest_ms: longest.as_millis() as u64,
        longest_call,
        ..RunCounts::default()
    };
    counts.print();
}

/// Eight seeds. `SPURLINE_TEST_SEEDS=n` runs the first n, `SPURLINE_TEST_SEEDS=n..m` others, `SPURLINE_TEST_SEED=n` one with all its calls.
#[test]
fn what_was_acknowledged_is_there_whatever_happens() {
    if let Some(seed) = seed_of_process() {
        return run_here(seed);
    }
    let one = number("SPURLINE_TEST_SEED");
    let seeds = one.map_or_else(|| seeds(STAGED.seeds), |seed| seed..=seed);
    run_seeds(seeds, one.is_some());
}

/// Runs seeds, and prints the sums of their counts.
fn run_seeds(seeds: std::ops::RangeInclusive<u64>, shown: bool) {
    let mut total = RunCounts::default();
    for seed in seeds {
        let ran = run_in_process(STAGED, seed, shown);
        total.runs += 1;
        total.calls += ran.calls;
        total.outages += ran.outages;
    }
    println!("{} runs, {} calls, {} without an answer", total.runs, total.calls, total.outages);
}

#[test]
fn a_seed_runs_the_same_way_again() {
    if !spurline_vtime::can_fix_addresses() {
        println!("SKIP: this system does not let a program choose that its addresses are not random");
        return;
    }
    let first = run_in_process(STAGED, 9551, false);
    assert_eq!(run_in_process(STAGED, 9551, false), first);
}

mod test_all {
    /// The first 300 seeds, two at a time.
    #[test]
    fn many_seeds_lose_nothing() {
        std::thread::scope(|scope| {
            scope.spawn(|| super::run_seeds(1..=150, false));
            super::run_seeds(151..=300, false);
        });
    }
}
