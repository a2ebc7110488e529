//! Writes and locks on virtual time: real mounts and nodes over links in memory, a source in memory, programs that compare each
//! answer with a model, and trouble that a seed draws.
//!
//! Each acknowledged change is there once, an exclusive creation has one winner, what was closed is read by the next open, what
//! was synced outlives the power of its host, no two mounts have a lock, no lock outlives its open file, every call ends, and
//! nothing stays open.

mod hosts;
mod models;
mod programs;
mod script;
mod source;

use programs::{Shared, locked};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Seeds of a run without `SPURLINE_SEEDS`.
const SEEDS: u64 = 300;

/// Runs one seed; prints its events and how to repeat it when it fails.
fn run(seed: u64, shown: bool) -> (Arc<Shared>, spurline_vtime::RunReport) {
    let shared = Arc::new(Shared::default());
    let of_run = Arc::clone(&shared);
    let ran = std::panic::catch_unwind(move || spurline_vtime::run(seed, || script::run(seed, shown, &of_run)));
    match ran {
        Ok(((), report)) => (shared, report),
        Err(_) => {
            if !shown {
                locked(&shared.events).iter().for_each(|event| println!("{event}"));
            }
            panic!(
                "seed {seed} failed, its events are above; this runs it again: \
                 SPURLINE_SEED={seed} cargo test -p spurline-node --test virtual writers -- --nocapture"
            )
        }
    }
}

/// Three hundred seeds. `SPURLINE_SEEDS=n` runs the first n, `SPURLINE_SEEDS=n..m` others, `SPURLINE_SEED=n` one with all its calls.
#[test]
fn writers_lose_nothing_and_share_no_lock_whatever_happens() {
    let (seeds, shown) = match crate::number("SPURLINE_SEED") {
        Some(seed) => (seed..=seed, true),
        None => (crate::seeds(SEEDS), false),
    };
    let mut calls = 0;
    let mut outages = 0;
    let mut lost = 0;
    let mut failovers = 0;
    let mut failbacks = 0;
    let mut longest = (Duration::ZERO, String::new(), 0);
    for seed in seeds.clone() {
        let (shared, ran) = run(seed, shown);
        if shown {
            println!("{ran:?}");
        }
        assert!(ran.left.is_empty(), "seed {seed}: threads that never end: {:?}", ran.left);
        calls += shared.calls.load(Ordering::Relaxed);
        outages += shared.outages.load(Ordering::Relaxed);
        lost += shared.lost_locks.load(Ordering::Relaxed);
        failovers += shared.failovers.load(Ordering::Relaxed);
        failbacks += shared.failbacks.load(Ordering::Relaxed);
        let (took, what) = locked(&shared.longest).clone();
        longest = longest.max((took, what, seed));
    }
    // A hundred runs have dozens.
    assert!(seeds.clone().count() < 100 || failovers > 0 && failbacks > 0, "no rail has failed and returned");
    println!(
        "{calls} calls, {outages} failed in an outage, {lost} lost locks, {failovers} failovers and {failbacks} failbacks of \
         rails; the longest took {:.1} s with seed {}: {}",
        longest.0.as_secs_f64(),
        longest.2,
        longest.1
    );
}
