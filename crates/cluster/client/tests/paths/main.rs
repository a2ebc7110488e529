//! Paths beside TCP on simulated rails: which path carries what, and the effect of failure and recovery on readers.

mod cluster;
mod simulation;

use cluster::{Cluster, Options};
use spurline_net_sim::{FaultRates, RailMode};
use spurline_proto::RailLink;
use spurline_transport::PathPhase;
use spurline_types::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Four readers until `done` returns; any error or wrong byte fails the test.
fn read_while(cluster: &Cluster, len: usize, done: impl FnOnce(&Cluster)) -> u64 {
    let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for reader in 0..4u64 {
            let (stop, count) = (&stop, &count);
            scope.spawn(move || {
                let mut offset = reader << 30;
                while !stop.load(Ordering::Acquire) {
                    cluster.read(offset, len).unwrap_or_else(|error| panic!("reader {reader} at {offset}: {error}"));
                    offset += len as u64;
                    count.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        // A panic in here must end the readers, or the scope waits for them.
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| done(cluster)));
        stop.store(true, Ordering::Release);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
    count.load(Ordering::Relaxed)
}

#[test]
fn rails_carry_everything_but_the_first_greeting() {
    let cluster = Cluster::start(Options::default());
    assert_eq!(cluster.up(), 2, "both paths were tried before the mount went on");
    let reads = read_while(&cluster, 64 << 10, |cluster| {
        cluster.wait("every rail carries", |c| c.rails.iter().all(|rail| rail.payload_bytes() > 4 << 20));
    });
    assert_eq!(cluster.rails.iter().map(|r| r.payload_bytes()).sum::<u64>(), reads * (64 << 10));
    assert_eq!((cluster.tcp.payload_bytes(), cluster.stats.rdma.failovers.get()), (0, 0));
    let json = cluster.stats.to_json();
    let paths = json["paths"].as_array().unwrap();
    let of = |name: &str| paths.iter().find(|p| p["path"] == name).unwrap();
    assert_eq!(of("l0-r0")["recv_bytes"].as_u64(), Some(cluster.rails[0].payload_bytes()), "{json}");
    assert_eq!((of("l1-r1")["up"].as_u64(), json["rdma"]["paths_up"].as_u64()), (Some(1), Some(2)));
    drop(cluster);
}

#[test]
fn a_large_read_is_split_over_the_rails_by_their_speed() {
    let cluster = Cluster::start(Options { speeds: vec![300_000, 100_000], ..Options::default() });
    for i in 0..8 {
        cluster.read(i << 20, 1 << 20).unwrap();
    }
    let [fast, slow] = [0, 1].map(|i| cluster.rails[i].payload_bytes());
    assert_eq!((fast, slow), (6 << 20, 2 << 20), "three quarters went over the rail of three quarters of the speed");
    assert_eq!(cluster.tcp.payload_bytes(), 0);
    // A rail dies within a split read: its share is read over another.
    cluster.rails[0].set_mode(RailMode::Silent);
    cluster.read(1 << 30, 1 << 20).unwrap();
    assert!(cluster.stats.rdma.retries.get() >= 1);
    assert_eq!(cluster.up(), 1);
    cluster.read(2 << 30, 1 << 20).unwrap();
    assert_eq!(cluster.rails[0].payload_bytes(), fast);
}

#[test]
fn rails_of_unequal_speed_are_loaded_by_their_speed() {
    let cluster = Cluster::start(Options { speeds: vec![400_000, 100_000], channels: 8, ..Options::default() });
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Slow(Duration::from_millis(2))));
    let [mut fast, mut slow] = [0.0, 0.0];
    read_while(&cluster, 4096, |cluster| {
        cluster.wait("channels by speed", |c| c.views()[0].channels >= 3);
        let calls = || [0, 1].map(|i| cluster.rails[i].call_count() as f64);
        let before = calls();
        cluster.wait("some reads", |c| {
            c.rails.iter().map(|r| r.call_count() as f64).sum::<f64>() > before[0] + before[1] + 600.0
        });
        let after = calls();
        [fast, slow] = [after[0] - before[0], after[1] - before[1]];
    });
    assert!(fast > 1.5 * slow && slow > 0.0, "{fast} calls on the fast rail, {slow} on the slow one");
}

/// What the speed check after a recovery is worth: one reader, two rails, one of them slow since it came back.
#[test]
fn a_rail_that_is_slower_since_its_return_is_spared() {
    // The shortest read that is compared. The delay outweighs whatever else this machine does meanwhile.
    const LEN: usize = 128 << 10;
    let cluster = Cluster::start(Options { silence: Duration::from_secs(5), ..Options::default() });
    let slow = &cluster.rails[0];
    let mut offset = 0;
    // Calls over the slow rail, and the mean time of a read.
    let mut read = |count: u32| {
        let (before, start) = (slow.call_count(), Instant::now());
        for _ in 0..count {
            cluster.read(offset, LEN).unwrap();
            offset += LEN as u64;
        }
        (slow.call_count() - before, start.elapsed() / count)
    };
    read(200);
    slow.set_mode(RailMode::Down);
    cluster.wait("the link is down", |c| c.up() == 1);
    slow.set_mode(RailMode::Slow(Duration::from_millis(40)));
    cluster.wait("the rail is back", |c| c.up() == 2);
    let unknown = read(100);
    read(200);
    let known = read(100);
    println!("calls over the slow rail and time of a read: first {unknown:?}, then {known:?}");
    assert!(unknown.0 > 20 && known.0 < 5, "first {unknown:?}, then {known:?}");
}

/// Every failure of one rail, then of both, under readers, with recovery.
#[test]
fn a_reader_sees_neither_error_nor_wrong_byte() {
    for fault in [RailMode::Down, RailMode::Silent] {
        for len in [4096, 1 << 20] {
            let cluster = Cluster::start(Options::default());
            read_while(&cluster, len, |cluster| {
                cluster.wait("reads", |c| c.rails.iter().all(|rail| rail.call_count() > 8));
                cluster.rails[0].set_mode(fault);
                cluster.wait("one path fails", |c| c.up() == 1);
                let before = cluster.rails[1].payload_bytes();
                cluster.wait("its share moves", |c| c.rails[1].payload_bytes() > before + (1 << 20));
                assert_eq!(cluster.tcp.payload_bytes(), 0, "{fault:?}: TCP was used while a rail was left");
                cluster.rails[1].set_mode(fault);
                cluster.wait("tcp carries", |c| c.tcp.payload_bytes() > 1 << 20);
                assert_eq!(cluster.up(), 0);
                cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Up));
                cluster.wait("failback", |c| c.up() == 2);
                let (tcp, rails) = (cluster.tcp.payload_bytes(), cluster.rails.each_bytes());
                cluster.wait("the rails carry again", |c| {
                    let now = c.rails.each_bytes();
                    now[0] > rails[0] + (1 << 20) && now[1] > rails[1] + (1 << 20)
                });
                // Each of the four readers may have had one request in flight on TCP when the first path came back.
                assert!(cluster.tcp.payload_bytes() <= tcp + 4 * len as u64, "{fault:?}: TCP goes on carrying");
            });
            let rdma = &cluster.stats.rdma;
            assert!(rdma.failovers.get() >= 2 && rdma.failbacks.get() >= 2, "{fault:?}");
            let reasons: Vec<String> = cluster.views().into_iter().filter_map(|v| v.reason).collect();
            assert_eq!(reasons.len(), 2, "{fault:?}");
            assert_eq!(
                cluster.stats.remotecache.errors.get() > 0,
                rdma.retries.get() > 0,
                "what failed was sent again"
            );
        }
    }
}

/// One sample of the metrics page.
fn sample(page: &str, name: &str) -> Option<f64> {
    page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// The metrics page after a path failed and came back.
#[test]
fn the_metrics_page_tells_what_every_path_carried_and_why_it_failed() {
    // Long, so that only the injected failure ends a path.
    let cluster = Cluster::start(Options { silence: Duration::from_secs(20), ..Options::default() });
    let check = |cluster: &Cluster| {
        let page = cluster.stats.to_prometheus();
        sample(&page, "spurline_path_speed_checks_total{peer=\"node:7000\",path=\"l0-r0\",transport=\"rdma\"}")
    };
    read_while(&cluster, 1 << 20, |cluster| {
        // Enough reads for a baseline.
        cluster.wait("reads", |c| c.rails.iter().all(|rail| rail.call_count() > 80));
        cluster.rails[0].set_mode(RailMode::Down);
        cluster.wait("failover", |c| c.up() == 1);
        cluster.rails[0].set_mode(RailMode::Up);
        cluster.wait("failback", |c| c.up() == 2);
        // Its reads are compared with the earlier ones.
        cluster.wait("the check of its speed", |c| check(c).is_some_and(|checks| checks > 0.0));
    });
    let (page, json) = (cluster.stats.to_prometheus(), cluster.stats.to_json());
    let mut sums = [0.0; 3];
    for rail in 0..2 {
        let labels = format!("{{peer=\"node:7000\",path=\"l{rail}-r{rail}\",transport=\"rdma\"}}");
        let of = |name: &str| {
            let value = sample(&page, &format!("spurline_path_{name}{labels}"));
            value.unwrap_or_else(|| panic!("no {name} of rail {rail} in {page}"))
        };
        for name in ["recv_bytes_total", "ops_total", "lat_us_total", "usual_bytes_per_s"] {
            assert!(of(name) > 0.0, "{name} of rail {rail} in {page}");
        }
        let back = if rail == 0 { 1.0 } else { 0.0 };
        assert_eq!((of("up"), of("failovers_total"), of("failbacks_total")), (1.0, back, back), "{page}");
        for (sum, name) in sums.iter_mut().zip(["retries_total", "failovers_total", "failbacks_total"]) {
            *sum += of(name);
        }
    }
    let why = "spurline_path_last_failure_info{peer=\"node:7000\",path=\"l0-r0\",transport=\"rdma\",reason=\"";
    assert!(page.lines().any(|line| line.starts_with(why) && line.ends_with("\"} 1")), "{page}");
    // The process's own counters are those of its paths.
    for (sum, name) in sums.into_iter().zip(["retries", "failovers", "failbacks"]) {
        let own = sample(&page, &format!("spurline_rdma_{name}_total"));
        assert_eq!((own, json["rdma"][name].as_f64()), (Some(sum), Some(sum)), "{name}");
    }
    assert_eq!(
        (sample(&page, "spurline_rdma_paths_up"), sample(&page, "spurline_rdma_paths_down")),
        (Some(2.0), Some(0.0))
    );
    // Each sample has its help and its type before it.
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        assert!(page.contains(&format!("# TYPE {name} ")) && page.contains(&format!("# HELP {name} ")), "{name}");
    }
}

trait EachBytes {
    fn each_bytes(&self) -> [u64; 2];
}

impl EachBytes for Vec<spurline_net_sim::SimRail> {
    fn each_bytes(&self) -> [u64; 2] {
        [self[0].payload_bytes(), self[1].payload_bytes()]
    }
}

#[test]
fn a_node_that_is_slow_is_not_a_path_that_is_silent() {
    let cluster = Cluster::start(Options::default());
    *cluster.service.thinks.lock() = Duration::from_millis(400);
    // Five times the silence limit of a path, with every heartbeat answered.
    cluster.read(0, 4096).unwrap();
    assert_eq!((cluster.up(), cluster.stats.rdma.failovers.get(), cluster.tcp.payload_bytes()), (2, 0, 0));
}

#[test]
fn parts_of_a_read_that_took_all_the_time_there_is_are_not_asked_for_again() {
    let (answer, silence) = (Duration::from_millis(500), Duration::from_secs(20));
    let cluster = Cluster::start(Options { answer, silence, ..Options::default() });
    cluster.read(0, 1 << 20).unwrap();
    assert_eq!(cluster.service.reads.load(Ordering::Relaxed), 2, "one part over each rail");
    cluster.plan.set_rates(FaultRates { stall: 1000, ..FaultRates::default() });
    let error = cluster.read(1 << 20, 1 << 20).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert_eq!(cluster.service.reads.load(Ordering::Relaxed), 4, "another part over each rail");
}

#[test]
fn every_path_has_a_channel_that_is_asked_for_signs_of_life_alone() {
    let cluster = Cluster::start(Options { silence: Duration::from_secs(20), ..Options::default() });
    assert_eq!(cluster.up(), 2);
    // A node answers heartbeat channels even while all its workers are blocked.
    assert!(cluster.service.of_no_source.load(Ordering::Relaxed) >= 2);
}

#[test]
fn connection_attempts_that_hang_are_never_on_a_readers_time() {
    let modes = vec![RailMode::HangsConnect; 2];
    let cluster = Cluster::start(Options { modes, ..Options::default() });
    assert_eq!(cluster.up(), 0);
    read_while(&cluster, 4096, |cluster| {
        cluster.wait("attempts", |c| c.rails.iter().all(|rail| rail.connect_count() >= 3));
    });
    assert!(cluster.tcp.payload_bytes() > 0);
    let view = cluster.views();
    assert!(
        view.iter().all(|v| v.reason.as_deref().is_some_and(|r| r.contains("no answer to the connection"))),
        "{view:?}"
    );
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Up));
    cluster.wait("both paths", |c| c.up() == 2);
}

#[test]
fn forced_rdma_never_uses_tcp() {
    let cluster = Cluster::start(Options { forced: true, ..Options::default() });
    cluster.read(0, 4096).unwrap();
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Down));
    let error = cluster.read(0, 4096).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    for word in ["no RDMA path", "--transport rdma rules out TCP", "l0-r0 link down"] {
        assert!(error.message().contains(word), "'{word}' is not in: {error}");
    }
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Up));
    cluster.wait("failback", |c| c.up() == 2);
    cluster.read(0, 4096).unwrap();
    assert_eq!(cluster.tcp.payload_bytes(), 0);
}

/// No other transport may carry the data, so retries come quickly.
#[test]
fn forced_rdma_is_tried_again_soon() {
    let hour = Duration::from_secs(3600);
    let cluster = Cluster::start(Options { forced: true, retry: hour, settle: hour, ..Options::default() });
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Silent));
    cluster.read(0, 4096).unwrap_err();
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Up));
    cluster.wait("failback", |c| c.up() == 2);
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Down));
    cluster.wait("links down", |c| c.up() == 0);
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Up));
    cluster.wait("settled links", |c| c.up() == 2);
    cluster.read(0, 4096).unwrap();
    assert_eq!(cluster.tcp.payload_bytes(), 0);
}

#[test]
fn different_fabrics_use_tcp_and_say_why() {
    let cluster = Cluster::start_with(Options::default(), |rails| {
        for rail in rails {
            (rail.link, rail.fabric) = (RailLink::InfiniBand, 0xfe80 << 48);
        }
    });
    cluster.read(0, 1 << 20).unwrap();
    let (paths, why) = cluster.peer.rails().unwrap().path_views();
    assert!(paths.is_empty() && why.as_ref().is_some_and(|why| why.contains("different fabrics")), "{why:?}");
    assert!(cluster.tcp.payload_bytes() == 1 << 20 && cluster.rails[0].connect_count() == 0);
    // The node restarts on the right fabric.
    *cluster.service.rails.lock() = vec![cluster::rail(0, 2, 1), cluster::rail(1, 2, 1)];
    cluster.service.instance.store(2, Ordering::Relaxed);
    cluster.node.kill();
    cluster.node.start();
    cluster.wait("paths", |c| c.up() == 2);
    cluster.read(0, 4096).unwrap();
}

#[test]
fn a_restarted_node_is_found_without_waiting_for_the_retry_time() {
    let cluster = Cluster::start(Options { retry: Duration::from_secs(3600), ..Options::default() });
    cluster.read(0, 4096).unwrap();
    cluster.node.kill();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| cluster.read(0, 4096));
        cluster.wait("the paths fail", |c| c.up() == 0);
        cluster.service.instance.store(2, Ordering::Relaxed);
        cluster.node.start();
        reader.join().unwrap().unwrap();
    });
    cluster.wait("both paths are back", |c| c.up() == 2);
    assert!(cluster.views().iter().all(|v| v.failbacks == 1));
}

/// Without any request or message, the end of the connections is detected.
#[test]
fn the_paths_to_a_node_that_died_fail_though_nobody_reads() {
    let cluster = Cluster::start(Options { retry: Duration::from_secs(3600), ..Options::default() });
    cluster.read(0, 4096).unwrap();
    assert!(cluster.views().iter().all(|v| v.silent.is_some()));
    let calls = || cluster.rails.iter().map(|rail| rail.call_count()).sum::<u64>();
    let before = calls();
    cluster.node.kill();
    cluster.wait("the paths fail", |c| c.up() == 0);
    for view in cluster.views() {
        assert!(view.reason.as_deref().is_some_and(|why| why.contains("ended while they were idle")), "{view:?}");
        assert_eq!((view.phase, view.silent, view.channels), (PathPhase::Failed, None, 0));
    }
    assert_eq!((cluster.stats.rdma.paths_up.get(), calls()), (0, before));
    cluster.service.instance.store(2, Ordering::Relaxed);
    cluster.node.start();
    cluster.wait("both paths are back", |c| c.up() == 2);
    cluster.read(0, 4096).unwrap();
    assert_eq!(cluster.tcp.payload_bytes(), 0);
}

#[test]
fn a_path_that_reaches_another_node_is_not_used() {
    let cluster = Cluster::start(Options::default());
    // The rails answer with another process instance than TCP.
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Down));
    cluster.wait("links down", |c| c.views().iter().all(|v| v.phase == PathPhase::LinkDown));
    cluster.service.instance.store(99, Ordering::Relaxed);
    cluster.rails.iter().for_each(|rail| rail.set_mode(RailMode::Up));
    cluster.wait("a refused attempt", |c| {
        c.views().iter().all(|v| v.reason.as_deref().is_some_and(|r| r.contains("another node (node) answers")))
    });
    cluster.read(0, 4096).unwrap();
    assert!(cluster.tcp.payload_bytes() > 0);
}
