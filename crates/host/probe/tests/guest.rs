//! Measurements over verbs, on Soft-RoCE in the virtual machine.

use spurline_probe::client::{ConnectConfig, ProbeSession};
use spurline_probe::drive::{RunLimits, RunProgress};
use spurline_probe::judge;
use spurline_probe::measure::{self, PingConfig, ProbeOutcome};
use spurline_probe::message::{ProbeOp, ProbePlan, ProbeTransport};
use spurline_probe::paths;
use spurline_probe::server::{ProbeServer, ServeConfig};
use spurline_testkit::{GuestNet, run_in_guest};
use spurline_trust::Trust;
use spurline_types::Congestion;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Far longer than anything takes here, also in a guest that gets no processor for a while.
const PATIENCE: Duration = Duration::from_secs(120);

fn server() -> ProbeServer {
    let config = ServeConfig {
        addresses: Vec::new(),
        port: 0,
        patience: PATIENCE,
        max_connections: 100,
        facts: None,
        trust: Trust::without_checks(),
        on_event: Box::new(drop),
    };
    ProbeServer::start(config).unwrap()
}

fn dial(server: &ProbeServer, ip: &str) -> ProbeSession {
    let ip: IpAddr = ip.parse().unwrap();
    let peer = std::net::SocketAddr::new(ip, server.addresses()[0].port()).to_string();
    ProbeSession::connect(&ConnectConfig { peer, from: vec![ip], timeout: PATIENCE, trust: Trust::without_checks() })
        .unwrap()
}

fn plan(op: ProbeOp, size: u64, depth: u32, streams: usize) -> ProbePlan {
    ProbePlan { transport: ProbeTransport::Rdma, size, depth, streams: vec![op; streams], ..ProbePlan::default() }
}

fn run(session: &mut ProbeSession, plan: &ProbePlan, limits: &RunLimits) -> ProbeOutcome {
    measure::run_measurement(session, plan, limits, &AtomicBool::new(false), &mut |_| {}).unwrap()
}

fn limits(ops: Option<u64>) -> RunLimits {
    RunLimits { time: PATIENCE, ops, patience: PATIENCE, pause: Duration::ZERO }
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_every_operation() {
    let server = server();
    for (ip, sizes) in [("10.77.0.1", &[1, 4096, 300_001][..]), ("fd77:0::1", &[1 << 20])] {
        let mut session = dial(&server, ip);
        assert!(session.welcome.transports.contains(&ProbeTransport::Rdma), "{}", session.welcome.without_rdma);
        let ops = [
            (ProbeOp::Read, 1),
            (ProbeOp::Read, 8),
            (ProbeOp::Write, 1),
            (ProbeOp::Write, 8),
            (ProbeOp::Send, 8),
            (ProbeOp::Echo, 1),
        ];
        for (op, depth) in ops.into_iter().chain([
            (ProbeOp::Fetch, 1),
            (ProbeOp::Fetch, 8),
            (ProbeOp::Receive, 8),
            (ProbeOp::PingPong, 1),
        ]) {
            for &size in sizes {
                let plan = plan(op, size, depth, 2);
                let done = run(&mut session, &plan, &limits(Some(20)));
                assert!(done.error.is_none(), "{op:?} {size} x {depth}: {:?}", done.error);
                let total = done.measured.total;
                assert_eq!((total.ops, total.read_bytes + total.write_bytes), (20, 20 * size), "{op:?} {size}");
                let report = done.report.unwrap();
                // One-sided operations are invisible to the server.
                let seen = if matches!(op, ProbeOp::Write | ProbeOp::Fetch) { 0 } else { 20 * size };
                assert_eq!(report.sent_bytes.max(report.received_bytes), seen, "{op:?} {size}: {report:?}");
                assert_eq!((report.error.as_str(), done.measured.tcp.is_none()), ("", true));
            }
        }
    }
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_for_a_time_both_ways_and_pings() {
    let server = server();
    let mut session = dial(&server, "10.77.0.1");
    let both = ProbePlan { streams: vec![ProbeOp::Read, ProbeOp::Write], ..plan(ProbeOp::Read, 1 << 20, 8, 1) };
    let end = Instant::now() + PATIENCE;
    loop {
        let done = run(&mut session, &both, &RunLimits { time: Duration::from_secs(1), ..limits(None) });
        let rates = judge::byte_rates(&done);
        println!("{:?} {:?}", rates, judge::judge_bandwidth(&done));
        assert!(done.error.is_none(), "{:?}", done.error);
        // A second may pass without a whole operation where the guest gets no CPU time.
        if rates.read > 0.0 && rates.write > 0.0 {
            break;
        }
        assert!(Instant::now() < end, "{rates:?}");
    }
    let done = run(&mut session, &plan(ProbeOp::Echo, 8, 1, 1), &limits(Some(500)));
    println!("{:?}", judge::judge_latency(&done));
    assert_eq!(done.measured.times[0].1.count(), 500);
    let pings = PingConfig {
        count: 3,
        size: 64,
        interval: Duration::from_millis(1),
        timeout: PATIENCE,
        congestion: Congestion::Auto,
        transport: ProbeTransport::Rdma,
    };
    let done = measure::run_pings(&mut session, &pings, &AtomicBool::new(false), &mut |_| {}).unwrap();
    assert!(done.error.is_none() && done.times.len() == 3 && done.large.is_some(), "{done:?}");
    // The four steps of rping, and the same session afterwards.
    let steps = measure::run_rping_steps(&mut session, 64, PATIENCE).unwrap();
    let names: Vec<&str> = steps.iter().map(|step| step.name).collect();
    assert_eq!(names, ["RDMA_READ_ADV", "RDMA_READ_COMPLETE", "RDMA_WRITE_ADV", "RDMA_WRITE_COMPLETE"], "{steps:?}");
    assert!(steps.iter().all(|step| step.error.is_none() && step.time.is_some()), "{steps:?}");
    let done = measure::run_pings(&mut session, &pings, &AtomicBool::new(false), &mut |_| {}).unwrap();
    assert!(done.error.is_none() && done.times.len() == 3, "{done:?}");
    // Without a device at the address the first step fails.
    let fault = measure::run_rping_steps(&mut dial(&server, "127.0.0.1"), 64, PATIENCE).unwrap_err();
    assert!(fault.what.starts_with("RDMA_READ_ADV: ") && fault.what.contains("belongs to no RDMA device"), "{fault:?}");
}

/// Packets that an RDMA device has received, by its own counter.
fn received_packets(device: &str) -> u64 {
    let path = format!("/sys/class/infiniband/{device}/ports/1/hw_counters/rcvd_pkts");
    std::fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_two_rails_at_once() {
    let server = server();
    let mut session = dial(&server, "10.77.0.1");
    let ours = paths::local_interfaces(ProbeTransport::Rdma, session.local().ip()).unwrap();
    let theirs = session.fetch_interfaces(ProbeTransport::Rdma).unwrap();
    assert_eq!(ours, theirs, "both ends are this host");
    let names: Vec<&str> = ours.iter().map(|rail| rail.interface.as_str()).collect();
    assert_eq!(names, ["rail0", "rail1"]);
    let paths = paths::choose_paths(None, &ours, &theirs).unwrap();
    let shown: Vec<String> = paths.iter().map(|p| format!("{} {}", p.from, p.to)).collect();
    assert_eq!(shown, ["10.77.0.1 10.77.0.1", "10.77.1.1 10.77.1.1"]);
    let received = || ["rxe0", "rxe1"].map(received_packets);
    for (ops, size) in [
        (vec![ProbeOp::Read; 4], 65_536),
        (vec![ProbeOp::Fetch, ProbeOp::Fetch, ProbeOp::Write, ProbeOp::Write], 65_536),
    ] {
        let plan = ProbePlan { streams: ops.clone(), paths: paths.clone(), ..plan(ProbeOp::Read, size, 4, 1) };
        // The scheduler divides the operations: it may leave one rail out once.
        let end = Instant::now() + PATIENCE;
        let done = loop {
            let before = received();
            let done = run(&mut session, &plan, &limits(Some(400)));
            assert!(done.error.is_none(), "{ops:?}: {:?}", done.error);
            assert_eq!(done.rails.len(), 2);
            let after = received();
            let bytes: Vec<u64> = done.rails.iter().map(|rail| rail.read_bytes + rail.write_bytes).collect();
            // Each device's own counter confirms the bytes of its rail: a RoCE packet carries at most 4096 bytes.
            for ((bytes, before), after) in bytes.iter().zip(before).zip(after) {
                assert!((after - before) * 4096 >= *bytes, "{ops:?}: {bytes} bytes in packets {before} to {after}");
            }
            if bytes.iter().all(|bytes| *bytes > 0) {
                break done;
            }
            assert!(Instant::now() < end, "{ops:?}: one rail carries nothing: {bytes:?}");
        };
        let sum: u64 = done.rails.iter().map(|rail| rail.read_bytes + rail.write_bytes).sum();
        assert_eq!(sum, 400 * size);
        for (rail, name) in done.rails.iter().zip(["rail0", "rail1"]) {
            assert_eq!(rail.link.interface, name, "{ops:?}");
            assert_eq!(rail.peer.as_ref().unwrap().interface, name);
        }
    }
    // The second one alone, though the call came over the first.
    let names = ["rail1".to_owned()];
    let paths = paths::choose_paths(Some(&names), &ours, &theirs).unwrap();
    let plan = ProbePlan { paths, ..plan(ProbeOp::PingPong, 64, 1, 1) };
    let done = run(&mut session, &plan, &limits(Some(100)));
    assert!(done.error.is_none() && done.link.interface == "rail1", "{done:?}");
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_what_is_not_there_and_what_ends_midway() {
    let mut server = server();
    // Loopback belongs to no device.
    let error = dial(&server, "127.0.0.1").open_streams(&plan(ProbeOp::Read, 1, 1, 1)).err().unwrap();
    assert!(error.what.contains("belongs to no RDMA device"), "{error:?}");
    let mut session = dial(&server, "10.77.0.1");
    let error = session.open_streams(&plan(ProbeOp::Send, 64 << 20, 1024, 1)).err().unwrap();
    assert!(error.what.contains("locked memory"), "{error:?}");
    let mut sessions = [(ProbeOp::Read, dial(&server, "10.77.0.1")), (ProbeOp::Write, dial(&server, "10.77.0.1"))];
    let moving = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let running = sessions.each_mut().map(|(op, session)| {
            let (plan, moving) = (plan(*op, 65_536, 4, 1), &moving);
            let mut first = true;
            scope.spawn(move || {
                let mut observe = |p: &RunProgress| {
                    if p.ops > 0 && std::mem::take(&mut first) {
                        moving.fetch_add(1, Ordering::Relaxed);
                    }
                };
                measure::run_measurement(session, &plan, &limits(None), &AtomicBool::new(false), &mut observe).unwrap()
            })
        });
        while moving.load(Ordering::Relaxed) < 2 && !running.iter().any(|one| one.is_finished()) {
            std::thread::sleep(Duration::from_millis(10));
        }
        server.stop_server();
        for one in running {
            let done = one.join().unwrap();
            let error = done.error.unwrap();
            assert!(error.contains("the server was stopped"), "{error}");
            assert!(done.measured.total.ops > 0);
        }
    });
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_in_guest(GuestNet::Two, &["guest_"]);
    }
}
