//! A cluster on virtual time: real cache nodes, mounts, registry followers and announcers, each with its own threads,
//! over links in memory and an in-memory registry. The seed decides the events, their times and the thread order;
//! real cache disks can make runs of one seed differ. CONTRIBUTING.md lists what is simulated.

#[allow(dead_code)]
#[path = "../cluster/sim.rs"]
mod sim;

mod dice;
mod registry;
mod script;
mod world;
mod writes;

use sim::{Cluster, OriginFault, object};
use spurline_net_sim::{FaultRates, RailMode};
use spurline_types::{ErrorKind, ObjectRef};
use spurline_volume::Volume as _;
use std::time::{Duration, Instant};
use world::Outcome;

/// Runs one seed; prints how to repeat it when it fails.
fn run(seed: u64) -> (Outcome, spurline_vtime::RunReport) {
    let ran = std::panic::catch_unwind(|| {
        spurline_vtime::run(seed, || script::run(seed, number("SPURLINE_TEST_SEED").is_some()))
    });
    ran.unwrap_or_else(|_| {
        panic!("seed {seed} failed; this runs it again: SPURLINE_TEST_SEED={seed} cargo test -p spurline-node --test virtual whatever")
    })
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// The seeds in `SPURLINE_TEST_SEEDS`: the first n, or n to m for `n..m`; the first `few` without it.
fn seeds(few: u64) -> std::ops::RangeInclusive<u64> {
    let text = std::env::var("SPURLINE_TEST_SEEDS").unwrap_or_default();
    let (from, to) = text.split_once("..").unwrap_or(("1", &text));
    from.parse().unwrap_or(1)..=to.parse().unwrap_or(few)
}

/// A few dozen seeds. `SPURLINE_TEST_SEEDS=n` runs the first n, `SPURLINE_TEST_SEEDS=n..m` others, `SPURLINE_TEST_SEED=n` one with a
/// log of its events.
#[test]
fn whatever_happens_no_read_fails_waits_long_or_is_wrong() {
    let seeds = match number("SPURLINE_TEST_SEED") {
        Some(seed) => seed..=seed,
        None => seeds(24),
    };
    let (mut reads, mut longest, mut time) = (0, (Duration::ZERO, 0), Duration::ZERO);
    for seed in seeds.clone() {
        let (outcome, ran) = run(seed);
        if seeds.start() == seeds.end() {
            println!("{outcome:#?}\n{ran:?}");
        }
        assert!(ran.left.is_empty(), "seed {seed}: threads that never end: {:?}", ran.left);
        reads += outcome.reads;
        time += outcome.time;
        longest = longest.max((outcome.longest, seed));
    }
    println!(
        "{reads} reads in {:.0} s of virtual time; the longest took {:.1} s, with seed {}",
        time.as_secs_f64(),
        longest.0.as_secs_f64(),
        longest.1
    );
}

/// From seed 2327: heartbeats must cover nodes that left the group, or reads on them wait for their full timeout.
#[test]
fn a_node_that_leaves_the_group_while_it_owes_answers_is_given_up_as_any_other() {
    for left in [vec![1], vec![1, 2]] {
        let run = || {
            let cluster = Cluster::start(3, 256);
            let mount = cluster.mount_with(0..3, world::SILENCE);
            let objects: Vec<_> = (0..8).map(|n| object(n, 100)).collect();
            objects.iter().for_each(|object| mount.read_all(object).unwrap());
            cluster.hosts[0].link.set_mode(RailMode::Silent);
            std::thread::scope(|scope| {
                let read = |object| {
                    let start = Instant::now();
                    mount.read_all(object).unwrap();
                    start.elapsed()
                };
                let reads: Vec<_> = objects.iter().map(|object| scope.spawn(move || read(object))).collect();
                std::thread::sleep(world::SILENCE / 4);
                mount.remote.set_members(&cluster.members(left.iter().copied()));
                reads.into_iter().map(|read| read.join().unwrap()).max()
            })
        };
        let (longest, _) = spurline_vtime::run(1, run);
        let longest = longest.unwrap();
        assert!(longest > world::SILENCE / 4, "no read was under way: {longest:?}");
        assert!(longest <= script::PAUSE, "a read took {longest:?}");
    }
}

/// What readers see of one node's lost origin: the longest read while the fault is detected, and after that.
fn with_origin_fault(fault: OriginFault) -> (Duration, Duration) {
    let cluster = Cluster::start(3, 1024);
    cluster.join(&[0, 1, 2]);
    let mount = cluster.mount_with(0..3, world::SILENCE);
    // One block each, so that each node owns some.
    let objects = |numbers: std::ops::Range<u64>| numbers.map(|n| object(n, sim::BLOCK)).collect::<Vec<_>>();
    let read = |objects: &[ObjectRef]| {
        std::thread::scope(|scope| {
            let read = |part: Vec<ObjectRef>| {
                let times = part.into_iter().map(|object| {
                    let start = Instant::now();
                    mount.remote.lookup(&object.path).unwrap();
                    mount.read_all(&object).unwrap();
                    start.elapsed()
                });
                times.max().unwrap()
            };
            let readers: Vec<_> = objects.chunks(8).map(|part| scope.spawn(move || read(part.to_vec()))).collect();
            readers.into_iter().map(|reader| reader.join().unwrap()).max().unwrap()
        })
    };
    let held_by = |node, objects: &[ObjectRef]| objects.iter().map(|object| cluster.held(node, object)).sum::<u32>();
    let warm = objects(0..64);
    read(&warm);
    assert!(held_by(1, &warm) > 5);
    *cluster.hosts[1].origin.fault.lock() = Some(fault);
    let detected = read(&objects(64..128));
    let later = read(&objects(128..192));
    assert_eq!(held_by(1, &objects(128..192)), 0);
    // Cached blocks stay where they are.
    let (fetched, sent) = (cluster.under.reads(), cluster.hosts[1].stats.remotecache.send_bytes.get());
    warm.iter().for_each(|object| mount.read_all(object).unwrap());
    assert_eq!(cluster.under.reads(), fetched);
    let own = u64::from(held_by(1, &warm)) * sim::BLOCK;
    assert_eq!(cluster.hosts[1].stats.remotecache.send_bytes.get() - sent, own);
    // The node has its share again after its origin is back.
    *cluster.hosts[1].origin.fault.lock() = None;
    std::thread::sleep(Duration::from_secs(5));
    read(&objects(192..256));
    assert!(held_by(1, &objects(192..256)) > 5);
    (detected, later)
}

#[test]
fn a_node_without_its_origin_costs_a_short_pause_and_serves_its_cached_blocks() {
    use spurline_types::ErrorKind::{PermissionDenied, Unavailable};
    for fault in [OriginFault::Silent, OriginFault::Refuses(PermissionDenied), OriginFault::Refuses(Unavailable)] {
        let ((detected, later), _) = spurline_vtime::run(1, || with_origin_fault(fault));
        println!("{fault:?}: the longest read took {detected:?} at first and {later:?} later");
        assert!(detected <= Duration::from_secs(5), "{fault:?}: a read took {detected:?}");
        assert!(later <= Duration::from_millis(100), "{fault:?}: a read took {later:?} later");
    }
}

#[test]
fn readers_wait_for_an_origin_that_no_node_reaches_unless_it_refuses_all() {
    for (fault, kind) in [
        (OriginFault::Refuses(ErrorKind::PermissionDenied), Some(ErrorKind::PermissionDenied)),
        (OriginFault::Silent, None),
    ] {
        let run = || {
            let cluster = Cluster::start(3, 256);
            let mount = cluster.mount_with(0..3, world::SILENCE);
            let faulty = |fault| cluster.hosts.iter().for_each(|host| *host.origin.fault.lock() = fault);
            faulty(Some(fault));
            std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let start = Instant::now();
                    (mount.read_all(&object(1, sim::BLOCK)).map_err(|error| error.kind()), start.elapsed())
                });
                std::thread::sleep(Duration::from_secs(20));
                faulty(None);
                reader.join().unwrap()
            })
        };
        let ((result, took), _) = spurline_vtime::run(1, run);
        println!("{fault:?} on all nodes: {result:?} after {took:?}");
        assert_eq!(result.err(), kind);
        let expected = if kind.is_some() { 0..1 } else { 20..23 };
        assert!(expected.contains(&took.as_secs()), "{fault:?}: the read took {took:?}");
    }
}

/// The wait for a failed fetch ahead counts against the read's own deadline.
#[test]
fn a_read_has_one_deadline_whether_it_waits_for_a_fetch_ahead_or_asks_for_itself() {
    let all = sim::patience().answer;
    for (hangs, since) in [(false, Duration::ZERO), (true, Duration::ZERO), (true, all / 2), (true, all - all / 100)] {
        let run = || {
            let cluster = Cluster::start(1, 256);
            let mount = cluster.mount_with(0..1, world::SILENCE);
            let object = object(1, sim::BLOCK);
            // Its origin hangs, or the node itself.
            *cluster.under.latency.lock() = if hangs { Duration::ZERO } else { 3 * all };
            cluster.hosts[0]
                .plan
                .set_rates(FaultRates { stall: if hangs { 1000 } else { 0 }, ..FaultRates::default() });
            mount.remote.prefetch(&object, 0..1, 4096);
            std::thread::sleep(since);
            let start = Instant::now();
            (mount.read(&object, 0, 4096).unwrap_err().kind(), start.elapsed())
        };
        let ((error, took), _) = spurline_vtime::run(1, run);
        println!("hangs: {hangs}, {since:?} after the fetch ahead: {error:?} after {took:?}");
        assert_eq!(error, ErrorKind::Timeout, "{since:?} after the fetch ahead");
        assert!(took <= all + Duration::from_secs(1), "{since:?} after the fetch ahead a read took {took:?}");
    }
}
