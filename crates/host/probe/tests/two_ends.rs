//! Both ends in one process, over loopback: measurements, and their failures.

use spurline_probe::client::{ConnectConfig, ProbeSession};
use spurline_probe::drive::RunLimits;
use spurline_probe::frame::{self, FrameHead, HEAD, MAX_BODY, REFUSED, VERSION};
use spurline_probe::judge;
use spurline_probe::measure::{self, PingConfig, ProbeOutcome};
use spurline_probe::message::{
    self, AttachRequest, ClientHello, OpenReply, OpenRequest, ProbeOp, ProbePlan, ServerWelcome, kind,
};
use spurline_probe::server::{ProbeServer, ServeConfig, ServerEvent};
use spurline_trust::Trust;
use spurline_types::Congestion;
use spurline_types::Fault;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than anything here takes on the busiest machine.
const PATIENCE: Duration = Duration::from_secs(60);

type Events = Arc<Mutex<Vec<ServerEvent>>>;

fn config(events: &Events) -> ServeConfig {
    let events = Arc::clone(events);
    ServeConfig {
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        port: 0,
        patience: PATIENCE,
        max_connections: 100,
        facts: None,
        trust: Trust::without_checks(),
        on_event: Box::new(move |event| events.lock().unwrap().push(event)),
    }
}

fn server() -> (ProbeServer, Events) {
    let events = Events::default();
    (ProbeServer::start(config(&events)).unwrap(), events)
}

fn call(peer: impl ToString) -> ConnectConfig {
    ConnectConfig { peer: peer.to_string(), from: Vec::new(), timeout: PATIENCE, trust: Trust::without_checks() }
}

fn dial(server: &ProbeServer) -> ProbeSession {
    ProbeSession::connect(&call(server.addresses()[0])).unwrap()
}

fn limits(ops: Option<u64>) -> RunLimits {
    RunLimits { time: PATIENCE, ops, patience: PATIENCE, pause: Duration::ZERO }
}

fn run(session: &mut ProbeSession, plan: &ProbePlan, limits: &RunLimits) -> ProbeOutcome {
    measure::run_measurement(session, plan, limits, &AtomicBool::new(false), &mut |_| {}).unwrap()
}

fn wait_for<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = what() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Why the server refused a connection.
fn refusal(events: &Events) -> String {
    wait_for(|| {
        events.lock().unwrap().iter().find_map(|event| match event {
            ServerEvent::Refused { why, .. } => Some(why.clone()),
            _ => None,
        })
    })
}

#[track_caller]
fn fault(result: Result<ProbeSession, Fault>, what: &str, remedy: &str) {
    let fault = result.unwrap_err();
    assert!(fault.what.contains(what) && fault.remedy.contains(remedy), "{fault:?}");
}

#[test]
fn every_operation_arrives_whole() {
    let (server, _events) = server();
    let mut session = dial(&server);
    // One session, many measurements; sizes around the pieces and buffers of the transport.
    for size in [1, 7, 4096, 65_536, 262_144, 300_001, 1 << 20, 3 << 20] {
        for (depth, discard) in [(1, false), (3, false), (16, true)] {
            let streams = vec![ProbeOp::Read, ProbeOp::Write];
            let plan = ProbePlan { size, depth, streams, discard, ..ProbePlan::default() };
            let done = run(&mut session, &plan, &limits(Some(20)));
            assert!(done.error.is_none(), "{size} x {depth}: {:?}", done.error);
            let total = done.measured.total;
            assert_eq!((total.ops, total.read_bytes + total.write_bytes), (20, 20 * size), "{size} x {depth}");
            let report = done.report.unwrap();
            assert_eq!((report.sent_bytes, report.received_bytes), (total.read_bytes, total.write_bytes));
            assert_eq!(report.error, "");
        }
        let plan = ProbePlan { size, depth: 1, streams: vec![ProbeOp::Echo], ..ProbePlan::default() };
        let done = run(&mut session, &plan, &limits(Some(10)));
        assert!(done.error.is_none(), "{size}: {:?}", done.error);
        assert_eq!(done.measured.times[0].1.count(), 10);
        assert!(judge::judge_latency(&done).sentence.contains("within this host"));
    }
}

#[test]
fn a_time_and_both_directions() {
    let (server, events) = server();
    let mut session = dial(&server);
    let plan = ProbePlan {
        streams: vec![ProbeOp::Read, ProbeOp::Write, ProbeOp::Read, ProbeOp::Write],
        ..ProbePlan::default()
    };
    let limits = RunLimits { time: Duration::from_millis(300), ..limits(None) };
    let mut looks = 0;
    let done =
        measure::run_measurement(&mut session, &plan, &limits, &AtomicBool::new(false), &mut |_| looks += 1).unwrap();
    assert!(done.error.is_none() && done.same_host && looks > 1, "{done:?}");
    let rates = judge::byte_rates(&done);
    assert!(rates.read > 0.0 && rates.write > 0.0 && done.measured.cpu_seconds > 0.0);
    let report = done.report.as_ref().unwrap();
    assert!(report.cpu_seconds > 0.0 && report.shared_with == 0 && report.link.interface == "lo");
    assert!(report.tcp.segments > 0 && done.measured.tcp.unwrap().segments > 0);
    let said = wait_for(|| {
        let events = events.lock().unwrap();
        events.iter().find_map(|e| if let ServerEvent::Ended { report, .. } = e { Some(report.clone()) } else { None })
    });
    assert_eq!(said.sent_bytes, report.sent_bytes);
}

#[test]
fn congestion_control_is_that_of_the_plan_on_both_ends() {
    let (server, _events) = server();
    let mut session = dial(&server);
    let system = std::fs::read_to_string("/proc/sys/net/ipv4/tcp_congestion_control").unwrap();
    let system = system.trim();
    let auto = if system.starts_with("bbr") { "cubic" } else { system };
    for (congestion, name) in [(Congestion::Auto, auto), (Congestion::System, system), (Congestion::Reno, "reno")] {
        let plan = ProbePlan { streams: vec![ProbeOp::Read, ProbeOp::Write], congestion, ..ProbePlan::default() };
        let done = run(&mut session, &plan, &limits(Some(4)));
        let names = [done.measured.tcp.unwrap().congestion, done.report.unwrap().tcp.congestion];
        assert_eq!((done.error, names), (None, [name.to_owned(), name.to_owned()]));
    }
}

#[test]
fn pings() {
    let (server, _events) = server();
    let pings = PingConfig {
        count: 3,
        size: 64,
        interval: Duration::from_millis(1),
        timeout: PATIENCE,
        congestion: Congestion::Auto,
        transport: message::ProbeTransport::Tcp,
    };
    let mut seen = 0;
    let mut observe = |_: &measure::PingReply| seen += 1;
    let done = measure::run_pings(&mut dial(&server), &pings, &AtomicBool::new(false), &mut observe).unwrap();
    assert!(done.error.is_none() && done.large.is_some() && done.times.len() == 3 && seen == 3, "{done:?}");
}

#[test]
fn ipv6_and_everywhere() {
    let events = Events::default();
    let both = ProbeServer::start(ServeConfig { addresses: vec![], ..config(&events) }).unwrap();
    let port = both.addresses()[0].port();
    let mut peers = vec![format!("127.0.0.1:{port}"), format!("localhost:{port}")];
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        peers.push(format!("[::1]:{port}"));
    }
    for peer in peers {
        let mut session = ProbeSession::connect(&call(&peer)).unwrap_or_else(|e| panic!("{peer}: {e}"));
        let done = run(&mut session, &ProbePlan::default(), &limits(Some(5)));
        assert!(done.error.is_none() && done.report.is_some(), "{peer}: {done:?}");
    }
    let wrong = ProbeServer::start(ServeConfig { addresses: vec![[192, 0, 2, 1].into()], ..config(&events) });
    assert!(wrong.err().unwrap().message().contains("192.0.2.1"));
    let taken = ProbeServer::start(ServeConfig { port, addresses: vec![], ..config(&events) });
    assert!(taken.err().unwrap().message().contains(&port.to_string()));
}

#[test]
fn a_server_with_a_group_token_serves_clients_that_hold_it() {
    let dir = tempfile::tempdir().unwrap();
    let trust = |name: &str, secret: &str| {
        let file = dir.path().join(name);
        std::fs::write(&file, secret).unwrap();
        Trust::new(name, Some(&file)).unwrap()
    };
    let right = trust("right", "an unguessable secret 0123456789\n");
    let wrong = trust("wrong", "another unguessable secret 98765\n");
    let events = Events::default();
    let server = ProbeServer::start(ServeConfig { trust: Arc::clone(&right), ..config(&events) }).unwrap();
    let connect = |trust: &Arc<Trust>| {
        ProbeSession::connect(&ConnectConfig { trust: Arc::clone(trust), ..call(server.addresses()[0]) })
    };
    let done = run(&mut connect(&right).unwrap(), &ProbePlan::default(), &limits(Some(5)));
    assert!(done.error.is_none(), "{done:?}");
    for (trust, says) in [(&Trust::without_checks(), "--group-token-file"), (&wrong, "token")] {
        let fault = connect(trust).unwrap_err();
        assert!(fault.what.contains(says), "{fault:?}");
    }
    // A client with a token does not measure with a server that can't prove it.
    let (open, _events) = self::server();
    let fault = ProbeSession::connect(&ConnectConfig { trust: right, ..call(open.addresses()[0]) }).unwrap_err();
    assert!(fault.what.contains("no group token") && fault.remedy.contains("both sides"), "{fault:?}");
}

#[test]
fn facts_are_handed_through() {
    let events = Events::default();
    let bytes: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
    let given = bytes.clone();
    let facts = Some(Box::new(move || Ok(given.clone())) as spurline_probe::server::FactsProvider);
    let with = ProbeServer::start(ServeConfig { facts, ..config(&events) }).unwrap();
    assert!(dial(&with).fetch_facts(PATIENCE).unwrap() == bytes);
    let (without, _events) = server();
    let none = dial(&without).fetch_facts(PATIENCE).unwrap_err();
    assert!(none.what.contains("provides no facts") && none.remedy.contains("net collect"), "{none:?}");
}

#[test]
fn two_clients_at_once_are_told() {
    let (server, _events) = server();
    let (mut one, mut two) = (dial(&server), dial(&server));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let long = RunLimits { time: PATIENCE * 10, ..limits(None) };
        let (stop, one) = (&stop, &mut one);
        let moving = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&moving);
        let first = scope.spawn(move || {
            measure::run_measurement(one, &ProbePlan::default(), &long, stop, &mut |p| {
                moving.store(p.ops > 0, Ordering::Relaxed)
            })
            .unwrap()
        });
        wait_for(|| seen.load(Ordering::Relaxed).then_some(()));
        let second = run(&mut two, &ProbePlan::default(), &limits(Some(50)));
        stop.store(true, Ordering::Relaxed);
        let first = first.join().unwrap();
        for done in [&first, &second] {
            assert_eq!(done.report.as_ref().unwrap().shared_with, 1);
        }
        assert!(first.measured.interrupted && first.error.is_none());
    });
}

#[test]
fn garbage_does_the_server_no_harm() {
    let (server, events) = server();
    let at = server.addresses()[0];
    let send = |bytes: &[u8]| {
        let mut socket = TcpStream::connect(at).unwrap();
        // It may be closed in the middle.
        let _ = socket.write_all(bytes);
        let _ = socket.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        answer
    };
    let frame = |version: u16, kind: u16, body: &[u8]| {
        let mut bytes = FrameHead { version, kind, len: body.len() as u32 }.encode().to_vec();
        bytes.extend_from_slice(body);
        bytes
    };
    let open = |plan: ProbePlan| {
        let mut bytes = frame(VERSION, kind::HELLO, b"{}");
        bytes.extend(frame(VERSION, kind::OPEN, &message::encode_message(&OpenRequest { plan, offer: vec![] })));
        bytes
    };
    let attach = AttachRequest { token: 7, stream: 0 };
    for (bytes, says) in [
        (Vec::new(), ""),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), ""),
        (vec![0xff; 5000], ""),
        (frame(VERSION, kind::HELLO, b"nonsense"), ""),
        (FrameHead { version: VERSION, kind: kind::HELLO, len: u32::MAX }.encode().to_vec(), ""),
        (frame(9, kind::HELLO, b"{}"), "uses version 1 of this protocol, the client version 9"),
        (frame(VERSION, 77, b""), "can't begin with a message of kind 77"),
        (frame(VERSION, kind::ATTACH, &message::encode_message(&attach)), "no measurement has that token"),
        (open(ProbePlan { size: 0, ..ProbePlan::default() }), "0 bytes"),
        (open(ProbePlan { streams: vec![ProbeOp::Read; 1000], ..ProbePlan::default() }), "1000 streams"),
        ([frame(VERSION, kind::HELLO, b"{}"), frame(VERSION, kind::FINISH, b"")].concat(), "no measurement is open"),
        ([frame(VERSION, kind::HELLO, b"{}"), frame(VERSION, 78, b"")].concat(), "kind 78 is not expected"),
    ] {
        events.lock().unwrap().clear();
        let answer = String::from_utf8_lossy(&send(&bytes)).into_owned();
        assert!(answer.contains(says), "{says:?} is not in {answer:?}");
        refusal(&events);
    }
    let done = run(&mut dial(&server), &ProbePlan::default(), &limits(Some(5)));
    assert!(done.error.is_none());
}

#[test]
fn rdma_where_there_is_none_says_why() {
    let (server, _events) = server();
    let mut session = dial(&server);
    // Loopback belongs to no device anywhere.
    let plan = ProbePlan { transport: message::ProbeTransport::Rdma, ..ProbePlan::default() };
    let error = session.open_streams(&plan).err().unwrap();
    assert!(error.what.contains("does not measure over rdma: "), "{error:?}");
    assert!(error.remedy.contains("--transport tcp"), "{error:?}");
    assert!(run(&mut session, &ProbePlan::default(), &limits(Some(5))).error.is_none());
}

#[test]
fn a_stream_that_lies_ends_its_measurement() {
    let (server, _events) = server();
    let control = TcpStream::connect(server.addresses()[0]).unwrap();
    let soon = || Instant::now() + PATIENCE;
    frame::send_frame(&control, kind::HELLO, &message::encode_message(&ClientHello::default()), soon()).unwrap();
    frame::receive_frame(&control, MAX_BODY, soon()).unwrap().unwrap();
    let open = OpenRequest { plan: ProbePlan::default(), offer: vec![] };
    frame::send_frame(&control, kind::OPEN, &message::encode_message(&open), soon()).unwrap();
    let opened: OpenReply =
        message::decode_message(&frame::receive_frame(&control, MAX_BODY, soon()).unwrap().unwrap().body).unwrap();
    let attach = |stream| {
        let data = TcpStream::connect(server.addresses()[0]).unwrap();
        frame::send_frame(
            &data,
            kind::ATTACH,
            &message::encode_message(&AttachRequest { token: opened.token, stream }),
            soon(),
        )
        .unwrap();
        let head = frame::receive_frame(&data, MAX_BODY, soon()).unwrap().unwrap().head;
        (data, head.kind)
    };
    assert_eq!(attach(1).1, REFUSED);
    let (mut data, kind) = attach(0);
    assert_eq!((kind, attach(0).1), (kind::ATTACHED, REFUSED));
    // The first request is number one.
    data.write_all(&77u64.to_le_bytes()).unwrap();
    assert!(matches!(data.read(&mut [0; 1]), Ok(0) | Err(_)));
    frame::send_frame(&control, kind::FINISH, &[], soon()).unwrap();
    let report = frame::receive_frame(&control, MAX_BODY, soon()).unwrap().unwrap();
    let report: message::ServerReport = message::decode_message(&report.body).unwrap();
    assert_eq!(report.error, "request 77 where 1 should be");
}

/// A listener that runs `answer` with its first connection.
fn stranger(answer: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || answer(listener.accept().unwrap().0));
    at
}

#[test]
fn wrong_ports_are_told_apart() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fault(ProbeSession::connect(&call(closed)), "connection refused", "spurline net serve");
    let ssh = stranger(|mut socket| {
        socket.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n").unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    fault(ProbeSession::connect(&call(ssh)), "it sent \"SSH-2.0-Open", "another program's");
    let left = stranger(|mut socket| {
        let _ = socket.read(&mut [0; 1000]);
    });
    fault(ProbeSession::connect(&call(left)), "closed the connection before", "another program's");
    let (tx, rx) = std::sync::mpsc::channel::<()>();
    let silent = stranger(move |socket| {
        let _ = rx.recv();
        drop(socket);
    });
    let short = ConnectConfig { timeout: Duration::from_millis(200), ..call(silent) };
    fault(ProbeSession::connect(&short), "sent no handshake within", "that host hangs");
    drop(tx);
    let unknown = ProbeSession::connect(&call("no-such-host.invalid:1"));
    assert!(unknown.unwrap_err().what.contains("does not resolve"));
    let family = ConnectConfig { from: vec![IpAddr::V6(Ipv6Addr::LOCALHOST)], ..call(closed) };
    fault(ProbeSession::connect(&family), "needs an IPv4 address", "another interface");
}

#[test]
fn another_version_is_named() {
    let newer = stranger(|mut socket| {
        let _ = socket.read(&mut [0; HEAD]);
        let why = b"node2 is spurline 9.9\x1b[2J";
        let head = FrameHead { version: 9, kind: REFUSED, len: why.len() as u32 };
        socket.write_all(&head.encode()).unwrap();
        socket.write_all(why).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    let error = ProbeSession::connect(&call(newer)).unwrap_err();
    assert!(error.what.contains("uses version 9") && error.what.contains("node2 is spurline 9.9[2J"), "{error:?}");
    assert!(error.remedy.contains("same version"), "{error:?}");
}

#[test]
fn a_server_stopped_midway_says_so() {
    let (mut server, _events) = server();
    let mut session = dial(&server);
    let (tx, rx) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            rx.recv().unwrap();
            server.stop_server();
        });
        let plan = ProbePlan { streams: vec![ProbeOp::Read, ProbeOp::Write], ..ProbePlan::default() };
        let done = measure::run_measurement(&mut session, &plan, &limits(None), &AtomicBool::new(false), &mut |p| {
            if p.read_bytes > 0 && p.write_bytes > 0 {
                // Once is enough.
                let _ = tx.send(());
            }
        });
        let done = done.unwrap();
        let error = done.error.as_deref().unwrap();
        assert!(error.contains("the server was stopped"), "{error}");
        let judgement = judge::judge_bandwidth(&done);
        assert!(judgement.level == judge::VerdictLevel::Broken && done.measured.total.read_bytes > 0, "{judgement:?}");
    });
}

/// A server with a correct handshake that then runs `then` with a stream.
fn scripted(then: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let soon = || Instant::now() + PATIENCE;
        let control = listener.accept().unwrap().0;
        frame::receive_frame(&control, MAX_BODY, soon()).unwrap();
        let welcome = ServerWelcome { transports: vec![message::ProbeTransport::Tcp], ..ServerWelcome::default() };
        frame::send_frame(&control, kind::WELCOME, &message::encode_message(&welcome), soon()).unwrap();
        frame::receive_frame(&control, MAX_BODY, soon()).unwrap();
        frame::send_frame(&control, kind::OPENED, &message::encode_message(&OpenReply::default()), soon()).unwrap();
        let data = listener.accept().unwrap().0;
        frame::receive_frame(&data, MAX_BODY, soon()).unwrap();
        frame::send_frame(&data, kind::ATTACHED, &[], soon()).unwrap();
        then(data);
        drop(control);
    });
    at
}

#[test]
fn a_server_that_hangs_or_lies_midway() {
    let (tx, rx) = std::sync::mpsc::channel::<()>();
    let hangs = scripted(move |mut data| {
        data.write_all(&[0; 5000]).unwrap();
        let _ = rx.recv();
    });
    let impatient = RunLimits { patience: Duration::from_millis(100), ..limits(None) };
    let done = run(&mut ProbeSession::connect(&call(hangs)).unwrap(), &ProbePlan::default(), &impatient);
    assert!(done.error.as_deref().unwrap().contains("stopped answering: nothing moved"), "{done:?}");
    assert_eq!(done.measured.total.read_bytes, 5000);
    drop(tx);
    let dies = scripted(|mut data| data.write_all(&[0; 300_000]).unwrap());
    let done = run(&mut ProbeSession::connect(&call(dies)).unwrap(), &ProbePlan::default(), &limits(None));
    assert!(done.error.as_deref().unwrap().contains("was lost"), "{done:?}");
    let lies = scripted(|mut data| {
        data.write_all(&u64::MAX.to_le_bytes()).unwrap();
        let _ = data.read_to_end(&mut Vec::new());
    });
    let plan = ProbePlan { streams: vec![ProbeOp::Write], ..ProbePlan::default() };
    let done = run(&mut ProbeSession::connect(&call(lies)).unwrap(), &plan, &limits(None));
    assert!(done.error.as_deref().unwrap().contains("bytes arrived"), "{done:?}");
}

#[test]
fn a_client_that_stalls_is_given_up() {
    let events = Events::default();
    let server = ProbeServer::start(ServeConfig { patience: Duration::from_millis(300), ..config(&events) }).unwrap();
    let mut session = dial(&server);
    // A client that requests much, receives nothing, and sends no heartbeat.
    let plan = ProbePlan { size: 64 << 20, depth: 8, ..ProbePlan::default() };
    let lanes = session.open_streams(&plan).unwrap();
    let report = wait_for(|| {
        let events = events.lock().unwrap();
        events.iter().find_map(|e| if let ServerEvent::Ended { report, .. } = e { Some(report.clone()) } else { None })
    });
    assert_eq!(report.error, "the client left");
    assert!(refusal(&events).contains("the client sent nothing for 0.3 s"));
    drop(lanes);
    assert!(session.refusal_reason().unwrap().contains("sent nothing"));
    let done = run(&mut dial(&server), &ProbePlan::default(), &limits(Some(5)));
    assert_eq!((done.error.as_deref(), done.report.unwrap().shared_with), (None, 0));
}

#[test]
fn connections_have_a_bound() {
    let events = Events::default();
    let server = ProbeServer::start(ServeConfig { max_connections: 3, ..config(&events) }).unwrap();
    let mut session = dial(&server);
    let wide = ProbePlan { streams: vec![ProbeOp::Read; 4], ..ProbePlan::default() };
    let error = session.open_streams(&wide).err().unwrap();
    assert!(error.what.contains("the most possible") && error.remedy.contains("--streams"), "{error:?}");
    drop(session);
    // What was open ends, and there is room again.
    // The control connection may find room before the data connections do, and ends with them: both are tried anew.
    wait_for(|| {
        ProbeSession::connect(&call(server.addresses()[0]))
            .and_then(|mut session| session.open_streams(&ProbePlan::default()))
            .ok()
    });
}
