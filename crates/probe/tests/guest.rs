//! Measurements over verbs, on Soft-RoCE in the virtual machine.

use spurline_probe::client::{Call, Session};
use spurline_probe::drive::{Limits, Progress};
use spurline_probe::judge;
use spurline_probe::measure::{self, Outcome, Pings};
use spurline_probe::message::{Op, Plan, Transport};
use spurline_probe::server::{ServeConfig, Server};
use spurline_testkit::{GuestNet, run_in_guest};
use spurline_types::Congestion;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

#[test]
fn in_the_virtual_machine() {
    run_in_guest(GuestNet::One, &["guest_"], 240);
}

fn server() -> Server {
    let config = ServeConfig {
        addresses: Vec::new(),
        port: 0,
        patience: PATIENCE,
        max_connections: 100,
        facts: None,
        tell: Box::new(drop),
    };
    Server::start(config).unwrap()
}

fn dial(server: &Server, ip: &str) -> Session {
    let ip: IpAddr = ip.parse().unwrap();
    let peer = std::net::SocketAddr::new(ip, server.addresses()[0].port()).to_string();
    Session::connect(&Call { peer, from: vec![ip], timeout: PATIENCE }).unwrap()
}

fn plan(op: Op, size: u64, depth: u32, streams: usize) -> Plan {
    Plan { transport: Transport::Rdma, size, depth, streams: vec![op; streams], ..Plan::default() }
}

fn run(session: &mut Session, plan: &Plan, limits: &Limits) -> Outcome {
    measure::run(session, plan, limits, &AtomicBool::new(false), &mut |_| {}).unwrap()
}

fn limits(ops: Option<u64>) -> Limits {
    Limits { time: PATIENCE, ops, patience: PATIENCE, pause: Duration::ZERO }
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_every_operation() {
    let server = server();
    for (ip, sizes) in [("10.77.0.1", &[1, 4096, 300_001][..]), ("fd77:0::1", &[1 << 20])] {
        let mut session = dial(&server, ip);
        assert!(session.welcome.transports.contains(&Transport::Rdma), "{}", session.welcome.without_rdma);
        for (op, depth) in [(Op::Read, 1), (Op::Read, 8), (Op::Write, 1), (Op::Write, 8), (Op::Send, 8), (Op::Echo, 1)]
        {
            for &size in sizes {
                let plan = plan(op, size, depth, 2);
                let done = run(&mut session, &plan, &limits(Some(20)));
                assert!(done.error.is_none(), "{op:?} {size} x {depth}: {:?}", done.error);
                let total = done.measured.total;
                assert_eq!((total.ops, total.read_bytes + total.write_bytes), (20, 20 * size), "{op:?} {size}");
                let report = done.report.unwrap();
                // Nobody there sees one-sided writes.
                let seen = if op == Op::Write { 0 } else { 20 * size };
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
    let both = Plan { streams: vec![Op::Read, Op::Write], ..plan(Op::Read, 1 << 20, 8, 1) };
    let done = run(&mut session, &both, &Limits { time: Duration::from_secs(1), ..limits(None) });
    let rates = judge::rates(&done);
    println!("{:?} {:?}", rates, judge::bandwidth(&done));
    assert!(done.error.is_none() && rates.read > 0.0 && rates.write > 0.0, "{:?}", done.error);
    let done = run(&mut session, &plan(Op::Echo, 8, 1, 1), &limits(Some(500)));
    println!("{:?}", judge::latency(&done));
    assert_eq!(done.measured.times[0].1.count(), 500);
    let pings = Pings {
        count: 3,
        size: 64,
        interval: Duration::from_millis(1),
        timeout: PATIENCE,
        congestion: Congestion::Auto,
        transport: Transport::Rdma,
    };
    let done = measure::ping(&mut session, &pings, &AtomicBool::new(false), &mut |_| {}).unwrap();
    assert!(done.error.is_none() && done.times.len() == 3 && done.large.is_some(), "{done:?}");
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_what_is_not_there_and_what_ends_midway() {
    let mut server = server();
    // Loopback belongs to no device.
    let error = dial(&server, "127.0.0.1").open(&plan(Op::Read, 1, 1, 1)).err().unwrap();
    assert!(error.what.contains("belongs to no RDMA device"), "{error:?}");
    let mut session = dial(&server, "10.77.0.1");
    let error = session.open(&plan(Op::Send, 64 << 20, 1024, 1)).err().unwrap();
    assert!(error.what.contains("locked memory"), "{error:?}");
    let mut sessions = [(Op::Read, dial(&server, "10.77.0.1")), (Op::Write, dial(&server, "10.77.0.1"))];
    let moving = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let running = sessions.each_mut().map(|(op, session)| {
            let (plan, moving) = (plan(*op, 65_536, 4, 1), &moving);
            let mut first = true;
            scope.spawn(move || {
                let mut observe = |p: &Progress| {
                    if p.ops > 0 && std::mem::take(&mut first) {
                        moving.fetch_add(1, Ordering::Relaxed);
                    }
                };
                measure::run(session, &plan, &limits(None), &AtomicBool::new(false), &mut observe).unwrap()
            })
        });
        while moving.load(Ordering::Relaxed) < 2 && !running.iter().any(|one| one.is_finished()) {
            std::thread::sleep(Duration::from_millis(10));
        }
        server.stop();
        for one in running {
            let done = one.join().unwrap();
            let error = done.error.unwrap();
            assert!(error.contains("the server was stopped"), "{error}");
            assert!(done.measured.total.ops > 0);
        }
    });
}
