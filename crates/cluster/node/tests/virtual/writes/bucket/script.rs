//! A run over a bucket: nodes, mounts, programs, strangers, and trouble as a seed draws it.

use super::super::hosts::WriteCluster;
use super::super::programs::{Shared, StopOnPanic, locked};
use super::super::script::{SOURCE_TROUBLE, WriteScript, draw_plan, run_programs};
use super::BucketSource;
use super::models::{BucketModel, DOCUMENT_COUNT};
use super::programs::BucketProgram;
use super::store::SimStore;
use crate::world::Dice;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Longest time until nothing is open any more after all programs have ended.
const CLOSED_AFTER: Duration = Duration::from_secs(400);
/// A length that takes several parts.
const LARGE_DOCUMENT: usize = 9 << 20;
/// The same in a run with short space.
const LONGEST_IN_SHORT_SPACE: usize = 200_000;

/// One run. `events` outlives it.
pub fn run(seed: u64, events: &Arc<Shared>) {
    let mut dice = Dice::new(seed);
    let mut plan = draw_plan(&mut dice, 0);
    // The host of a node keeps nothing that its power could take away.
    plan.power = false;
    plan.kinds.push(SOURCE_TROUBLE);
    if dice.below(3) == 0 {
        plan.kinds = vec![SOURCE_TROUBLE];
    }
    let store = SimStore::new(seed, events);
    store.make_ends_slow();
    let short_space = seed.is_multiple_of(3);
    let source = Arc::new(BucketSource { store: store.clone(), short_space });
    *locked(&events.began) = Some(Instant::now());
    let cluster = WriteCluster::start(source, plan.nodes, plan.mounts, 0);
    let shared = &**events;
    shared.tell(format_args!("{plan:?}, short space: {short_space}"));
    let model = BucketModel::new(store, if short_space { LONGEST_IN_SHORT_SPACE } else { LARGE_DOCUMENT });
    let script = WriteScript::new(dice, &cluster, shared, &plan);
    let start_program = |number, mount: &_, dice| BucketProgram::new(number, mount, shared, &model, dice).run();
    let mut kept = Vec::new();
    std::thread::scope(|scope| {
        let mut stranger_dice = Dice::new(!seed);
        if stranger_dice.below(2) == 0 {
            scope.spawn(|| run_stranger(stranger_dice, shared, &model));
        }
        let _stop = StopOnPanic(shared);
        kept = run_programs(seed, script, &start_program);
    });
    wait_closed(&cluster, kept.len());
    drop(kept);
    wait_closed(&cluster, 0);
    check_end(&cluster, shared, &model);
    cluster.end();
}

/// Replaces documents, also those that programs have open.
fn run_stranger(mut dice: Dice, shared: &Shared, model: &BucketModel) {
    while !shared.is_over() {
        std::thread::sleep(Duration::from_millis(500 + dice.below(20_000) as u64));
        let number = dice.below(DOCUMENT_COUNT);
        let mut document = locked(&model.documents[number]);
        if document.readers > 0 || !document.exists && !document.writing {
            continue;
        }
        document.strangers += 1;
        let name = format!("document-{number}-{}", document.generation);
        let len = dice.below(50_000);
        let content: Vec<u8> = (0..len).map(|at| (at as u64 * 11 + document.strangers * 17 + 3) as u8).collect();
        model.store.put_as_stranger(&name, content.clone());
        shared.tell(format_args!("a stranger writes {len} bytes to {name}"));
        if !document.writing {
            document.content = content;
        }
    }
}

/// No program runs any more; waits until at most this many files are open: a node that was stopped for long has ended the sessions of
/// its mounts, which open their files again when they are used.
fn wait_closed(cluster: &WriteCluster, kept: usize) {
    let until = Instant::now() + CLOSED_AFTER;
    loop {
        let open = cluster.hosts.iter().map(|host| host.open_files()).sum::<u64>();
        if open <= kept as u64 {
            return;
        }
        assert!(Instant::now() < until, "{open} files are still open on nodes: programs have {kept}");
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// Checks the bucket after the run.
fn check_end(cluster: &WriteCluster, shared: &Shared, model: &BucketModel) {
    for mount in &cluster.mounts {
        mount.writes.finish_closing();
        let unsent = mount.writes.unsent_files();
        assert!(unsent.is_empty(), "mount {} has unsent bytes of closed files: {unsent:?}", mount.number);
        assert_eq!(mount.writes.kept_bytes(), 0, "mount {} keeps written bytes of closed files", mount.number);
    }
    model.check();
    let content = model.store.content("counter").unwrap_or_default();
    let value = content.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let counter = locked(&shared.whole);
    counter.check(value);
    for (number, contest) in locked(&shared.contests).iter().enumerate() {
        contest.check(&format!("contest-{number}"));
    }
    let keys = model.store.keys().len();
    let outages = shared.outages.load(Ordering::Relaxed);
    let (spilled, left) = model.store.count_below(".spurline-part-");
    shared.tell(format_args!("{spilled} objects with parts of open files, {left} left"));
    shared.tell(format_args!("{keys} keys, {} values of the counter, {outages} outages", counter.acknowledged()));
}
