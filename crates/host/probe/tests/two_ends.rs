//! Both ends in one process, over loopback: measurements, and everything that may come instead of them.

use spurline_probe::client::{Call, Session};
use spurline_probe::drive::Limits;
use spurline_probe::frame::{self, HEAD, Head, MAX_BODY, REFUSED, VERSION};
use spurline_probe::judge;
use spurline_probe::measure::{self, Outcome, Pings};
use spurline_probe::message::{self, Attach, Hello, Op, Open, Opened, Plan, Welcome, kind};
use spurline_probe::server::{Event, ServeConfig, Server};
use spurline_types::Congestion;
use spurline_types::Fault;
use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Longer than anything here takes on the busiest machine.
const PATIENCE: Duration = Duration::from_secs(60);

type Events = Arc<Mutex<Vec<Event>>>;

fn config(events: &Events) -> ServeConfig {
    let events = Arc::clone(events);
    ServeConfig {
        addresses: vec![Ipv4Addr::LOCALHOST.into()],
        port: 0,
        patience: PATIENCE,
        max_connections: 100,
        facts: None,
        tell: Box::new(move |event| events.lock().unwrap().push(event)),
    }
}

fn server() -> (Server, Events) {
    let events = Events::default();
    (Server::start(config(&events)).unwrap(), events)
}

fn call(peer: impl ToString) -> Call {
    Call { peer: peer.to_string(), from: Vec::new(), timeout: PATIENCE }
}

fn dial(server: &Server) -> Session {
    Session::connect(&call(server.addresses()[0])).unwrap()
}

fn limits(ops: Option<u64>) -> Limits {
    Limits { time: PATIENCE, ops, patience: PATIENCE, pause: Duration::ZERO }
}

fn run(session: &mut Session, plan: &Plan, limits: &Limits) -> Outcome {
    measure::run(session, plan, limits, &AtomicBool::new(false), &mut |_| {}).unwrap()
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

/// Why a connection was of no use to the server.
fn refusal(events: &Events) -> String {
    wait_for(|| {
        events.lock().unwrap().iter().find_map(|event| match event {
            Event::Refused { why, .. } => Some(why.clone()),
            _ => None,
        })
    })
}

#[track_caller]
fn fault(result: Result<Session, Fault>, what: &str, remedy: &str) {
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
            let streams = vec![Op::Read, Op::Write];
            let plan = Plan { size, depth, streams, discard, ..Plan::default() };
            let done = run(&mut session, &plan, &limits(Some(20)));
            assert!(done.error.is_none(), "{size} x {depth}: {:?}", done.error);
            let total = done.measured.total;
            assert_eq!((total.ops, total.read_bytes + total.write_bytes), (20, 20 * size), "{size} x {depth}");
            let report = done.report.unwrap();
            assert_eq!((report.sent_bytes, report.received_bytes), (total.read_bytes, total.write_bytes));
            assert_eq!(report.error, "");
        }
        let plan = Plan { size, depth: 1, streams: vec![Op::Echo], ..Plan::default() };
        let done = run(&mut session, &plan, &limits(Some(10)));
        assert!(done.error.is_none(), "{size}: {:?}", done.error);
        assert_eq!(done.measured.times[0].1.count(), 10);
        assert!(judge::latency(&done).sentence.contains("within this host"));
    }
}

#[test]
fn a_time_and_both_directions() {
    let (server, events) = server();
    let mut session = dial(&server);
    let plan = Plan { streams: vec![Op::Read, Op::Write, Op::Read, Op::Write], ..Plan::default() };
    let limits = Limits { time: Duration::from_millis(300), ..limits(None) };
    let mut looks = 0;
    let done = measure::run(&mut session, &plan, &limits, &AtomicBool::new(false), &mut |_| looks += 1).unwrap();
    assert!(done.error.is_none() && done.same_host && looks > 1, "{done:?}");
    let rates = judge::rates(&done);
    assert!(rates.read > 0.0 && rates.write > 0.0 && done.measured.cpu_seconds > 0.0);
    let report = done.report.as_ref().unwrap();
    assert!(report.cpu_seconds > 0.0 && report.shared_with == 0 && report.link.interface == "lo");
    assert!(report.tcp.segments > 0 && done.measured.tcp.unwrap().segments > 0);
    let said = wait_for(|| {
        let events = events.lock().unwrap();
        events.iter().find_map(|e| if let Event::Ended { report, .. } = e { Some(report.clone()) } else { None })
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
        let plan = Plan { streams: vec![Op::Read, Op::Write], congestion, ..Plan::default() };
        let done = run(&mut session, &plan, &limits(Some(4)));
        let names = [done.measured.tcp.unwrap().congestion, done.report.unwrap().tcp.congestion];
        assert_eq!((done.error, names), (None, [name.to_owned(), name.to_owned()]));
    }
}

#[test]
fn pings() {
    let (server, _events) = server();
    let pings = Pings {
        count: 3,
        size: 64,
        interval: Duration::from_millis(1),
        timeout: PATIENCE,
        congestion: Congestion::Auto,
        transport: message::Transport::Tcp,
    };
    let mut seen = 0;
    let mut observe = |_: &measure::Pong| seen += 1;
    let done = measure::ping(&mut dial(&server), &pings, &AtomicBool::new(false), &mut observe).unwrap();
    assert!(done.error.is_none() && done.large.is_some() && done.times.len() == 3 && seen == 3, "{done:?}");
}

#[test]
fn ipv6_and_everywhere() {
    let events = Events::default();
    let both = Server::start(ServeConfig { addresses: vec![], ..config(&events) }).unwrap();
    let port = both.addresses()[0].port();
    let mut peers = vec![format!("127.0.0.1:{port}"), format!("localhost:{port}")];
    if TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok() {
        peers.push(format!("[::1]:{port}"));
    }
    for peer in peers {
        let mut session = Session::connect(&call(&peer)).unwrap_or_else(|e| panic!("{peer}: {e}"));
        let done = run(&mut session, &Plan::default(), &limits(Some(5)));
        assert!(done.error.is_none() && done.report.is_some(), "{peer}: {done:?}");
    }
    let wrong = Server::start(ServeConfig { addresses: vec![[192, 0, 2, 1].into()], ..config(&events) });
    assert!(wrong.err().unwrap().message().contains("192.0.2.1"));
    let taken = Server::start(ServeConfig { port, addresses: vec![], ..config(&events) });
    assert!(taken.err().unwrap().message().contains(&port.to_string()));
}

#[test]
fn facts_are_handed_through() {
    let events = Events::default();
    let bytes: Vec<u8> = (0..300_000u32).map(|n| n as u8).collect();
    let given = bytes.clone();
    let facts = Some(Box::new(move || Ok(given.clone())) as spurline_probe::server::Facts);
    let with = Server::start(ServeConfig { facts, ..config(&events) }).unwrap();
    assert!(dial(&with).facts(PATIENCE).unwrap() == bytes);
    let (without, _events) = server();
    let none = dial(&without).facts(PATIENCE).unwrap_err();
    assert!(none.what.contains("gives no facts") && none.remedy.contains("net collect"), "{none:?}");
}

#[test]
fn two_clients_at_once_are_told() {
    let (server, _events) = server();
    let (mut one, mut two) = (dial(&server), dial(&server));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let long = Limits { time: PATIENCE * 10, ..limits(None) };
        let (stop, one) = (&stop, &mut one);
        let moving = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&moving);
        let first = scope.spawn(move || {
            measure::run(one, &Plan::default(), &long, stop, &mut |p| moving.store(p.ops > 0, Ordering::Relaxed))
                .unwrap()
        });
        wait_for(|| seen.load(Ordering::Relaxed).then_some(()));
        let second = run(&mut two, &Plan::default(), &limits(Some(50)));
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
        let mut bytes = Head { version, kind, len: body.len() as u32 }.encode().to_vec();
        bytes.extend_from_slice(body);
        bytes
    };
    let open = |plan: Plan| {
        let mut bytes = frame(VERSION, kind::HELLO, b"{}");
        bytes.extend(frame(VERSION, kind::OPEN, &message::encode(&Open { plan, offer: vec![] })));
        bytes
    };
    let attach = Attach { token: 7, stream: 0 };
    for (bytes, says) in [
        (Vec::new(), ""),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".to_vec(), ""),
        (vec![0xff; 5000], ""),
        (frame(VERSION, kind::HELLO, b"nonsense"), ""),
        (Head { version: VERSION, kind: kind::HELLO, len: u32::MAX }.encode().to_vec(), ""),
        (frame(9, kind::HELLO, b"{}"), "speaks version 1 of this protocol, the caller version 9"),
        (frame(VERSION, 77, b""), "does not begin with a message of kind 77"),
        (frame(VERSION, kind::ATTACH, &message::encode(&attach)), "no measurement has that token"),
        (open(Plan { size: 0, ..Plan::default() }), "0 bytes"),
        (open(Plan { streams: vec![Op::Read; 1000], ..Plan::default() }), "1000 streams"),
        (
            [frame(VERSION, kind::HELLO, b"{}"), frame(VERSION, kind::FINISH, b"")].concat(),
            "nothing was being measured",
        ),
        ([frame(VERSION, kind::HELLO, b"{}"), frame(VERSION, 78, b"")].concat(), "kind 78 makes no sense"),
    ] {
        events.lock().unwrap().clear();
        let answer = String::from_utf8_lossy(&send(&bytes)).into_owned();
        assert!(answer.contains(says), "{says:?} is not in {answer:?}");
        refusal(&events);
    }
    let done = run(&mut dial(&server), &Plan::default(), &limits(Some(5)));
    assert!(done.error.is_none());
}

#[test]
fn rdma_where_there_is_none_says_why() {
    let (server, _events) = server();
    let mut session = dial(&server);
    // Loopback belongs to no device anywhere.
    let plan = Plan { transport: message::Transport::Rdma, ..Plan::default() };
    let error = session.open(&plan).err().unwrap();
    assert!(error.what.contains("does not measure over rdma: "), "{error:?}");
    assert!(error.remedy.contains("--transport tcp"), "{error:?}");
    assert!(run(&mut session, &Plan::default(), &limits(Some(5))).error.is_none());
}

#[test]
fn a_stream_that_lies_ends_its_measurement() {
    let (server, _events) = server();
    let control = TcpStream::connect(server.addresses()[0]).unwrap();
    let soon = || Instant::now() + PATIENCE;
    frame::send(&control, kind::HELLO, &message::encode(&Hello::default()), soon()).unwrap();
    frame::receive(&control, MAX_BODY, soon()).unwrap().unwrap();
    let open = Open { plan: Plan::default(), offer: vec![] };
    frame::send(&control, kind::OPEN, &message::encode(&open), soon()).unwrap();
    let opened: Opened = message::decode(&frame::receive(&control, MAX_BODY, soon()).unwrap().unwrap().body).unwrap();
    let attach = |stream| {
        let data = TcpStream::connect(server.addresses()[0]).unwrap();
        frame::send(&data, kind::ATTACH, &message::encode(&Attach { token: opened.token, stream }), soon()).unwrap();
        let head = frame::receive(&data, MAX_BODY, soon()).unwrap().unwrap().head;
        (data, head.kind)
    };
    assert_eq!(attach(1).1, REFUSED);
    let (mut data, kind) = attach(0);
    assert_eq!((kind, attach(0).1), (kind::ATTACHED, REFUSED));
    // The first request is number one.
    data.write_all(&77u64.to_le_bytes()).unwrap();
    assert!(matches!(data.read(&mut [0; 1]), Ok(0) | Err(_)));
    frame::send(&control, kind::FINISH, &[], soon()).unwrap();
    let report = frame::receive(&control, MAX_BODY, soon()).unwrap().unwrap();
    let report: message::Report = message::decode(&report.body).unwrap();
    assert_eq!(report.error, "request 77 where 1 should be");
}

/// A listener that does `answer` with the first caller.
fn stranger(answer: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || answer(listener.accept().unwrap().0));
    at
}

#[test]
fn wrong_ports_are_told_apart() {
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    fault(Session::connect(&call(closed)), "connection refused", "spurline net serve");
    let ssh = stranger(|mut socket| {
        socket.write_all(b"SSH-2.0-OpenSSH_9.2p1 Debian\r\n").unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    fault(Session::connect(&call(ssh)), "it said \"SSH-2.0-Open", "another program's");
    let left = stranger(|mut socket| {
        let _ = socket.read(&mut [0; 1000]);
    });
    fault(Session::connect(&call(left)), "closed the connection instead", "another program's");
    let (tx, rx) = std::sync::mpsc::channel::<()>();
    let silent = stranger(move |socket| {
        let _ = rx.recv();
        drop(socket);
    });
    let short = Call { timeout: Duration::from_millis(200), ..call(silent) };
    fault(Session::connect(&short), "did not greet within", "that host hangs");
    drop(tx);
    let unknown = Session::connect(&call("no-such-host.invalid:1"));
    assert!(unknown.unwrap_err().what.contains("does not resolve"));
    let family = Call { from: vec![IpAddr::V6(Ipv6Addr::LOCALHOST)], ..call(closed) };
    fault(Session::connect(&family), "needs an IPv4 address", "another interface");
}

#[test]
fn another_version_is_named() {
    let newer = stranger(|mut socket| {
        let _ = socket.read(&mut [0; HEAD]);
        let why = b"node2 is spurline 9.9\x1b[2J";
        let head = Head { version: 9, kind: REFUSED, len: why.len() as u32 };
        socket.write_all(&head.encode()).unwrap();
        socket.write_all(why).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
    });
    let error = Session::connect(&call(newer)).unwrap_err();
    assert!(error.what.contains("speaks version 9") && error.what.contains("node2 is spurline 9.9[2J"), "{error:?}");
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
            server.stop();
        });
        let plan = Plan { streams: vec![Op::Read, Op::Write], ..Plan::default() };
        let done = measure::run(&mut session, &plan, &limits(None), &AtomicBool::new(false), &mut |p| {
            if p.read_bytes > 0 && p.write_bytes > 0 {
                // Once is enough.
                let _ = tx.send(());
            }
        });
        let done = done.unwrap();
        let error = done.error.as_deref().unwrap();
        assert!(error.contains("the server was stopped"), "{error}");
        let judgement = judge::bandwidth(&done);
        assert!(judgement.level == judge::Level::Broken && done.measured.total.read_bytes > 0, "{judgement:?}");
    });
}

/// A server that greets, opens and attaches as it should, and then does `then` with a stream.
fn scripted(then: impl FnOnce(TcpStream) + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let soon = || Instant::now() + PATIENCE;
        let control = listener.accept().unwrap().0;
        frame::receive(&control, MAX_BODY, soon()).unwrap();
        let welcome = Welcome { transports: vec![message::Transport::Tcp], ..Welcome::default() };
        frame::send(&control, kind::WELCOME, &message::encode(&welcome), soon()).unwrap();
        frame::receive(&control, MAX_BODY, soon()).unwrap();
        frame::send(&control, kind::OPENED, &message::encode(&Opened::default()), soon()).unwrap();
        let data = listener.accept().unwrap().0;
        frame::receive(&data, MAX_BODY, soon()).unwrap();
        frame::send(&data, kind::ATTACHED, &[], soon()).unwrap();
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
    let impatient = Limits { patience: Duration::from_millis(100), ..limits(None) };
    let done = run(&mut Session::connect(&call(hangs)).unwrap(), &Plan::default(), &impatient);
    assert!(done.error.as_deref().unwrap().contains("stopped answering: nothing moved"), "{done:?}");
    assert_eq!(done.measured.total.read_bytes, 5000);
    drop(tx);
    let dies = scripted(|mut data| data.write_all(&[0; 300_000]).unwrap());
    let done = run(&mut Session::connect(&call(dies)).unwrap(), &Plan::default(), &limits(None));
    assert!(done.error.as_deref().unwrap().contains("is gone"), "{done:?}");
    let lies = scripted(|mut data| {
        data.write_all(&u64::MAX.to_le_bytes()).unwrap();
        let _ = data.read_to_end(&mut Vec::new());
    });
    let plan = Plan { streams: vec![Op::Write], ..Plan::default() };
    let done = run(&mut Session::connect(&call(lies)).unwrap(), &plan, &limits(None));
    assert!(done.error.as_deref().unwrap().contains("bytes arrived"), "{done:?}");
}

#[test]
fn a_client_that_stalls_is_given_up() {
    let events = Events::default();
    let server = Server::start(ServeConfig { patience: Duration::from_millis(300), ..config(&events) }).unwrap();
    let mut session = dial(&server);
    // It asks for much, and takes nothing; nor does it say that it lives.
    let plan = Plan { size: 64 << 20, depth: 8, ..Plan::default() };
    let lanes = session.open(&plan).unwrap();
    let report = wait_for(|| {
        let events = events.lock().unwrap();
        events.iter().find_map(|e| if let Event::Ended { report, .. } = e { Some(report.clone()) } else { None })
    });
    assert_eq!(report.error, "the client left");
    assert!(refusal(&events).contains("the client said nothing for 0.3 s"));
    drop(lanes);
    assert!(session.last_words().unwrap().contains("said nothing"));
    let done = run(&mut dial(&server), &Plan::default(), &limits(Some(5)));
    assert_eq!((done.error.as_deref(), done.report.unwrap().shared_with), (None, 0));
}

#[test]
fn connections_have_a_bound() {
    let events = Events::default();
    let server = Server::start(ServeConfig { max_connections: 3, ..config(&events) }).unwrap();
    let mut session = dial(&server);
    let wide = Plan { streams: vec![Op::Read; 4], ..Plan::default() };
    let error = session.open(&wide).err().unwrap();
    assert!(error.what.contains("which is the most") && error.remedy.contains("--streams"), "{error:?}");
    drop(session);
    // What was open ends, and there is room again.
    // The control connection may find room before the data connections do, and ends with them: both are tried anew.
    wait_for(|| {
        Session::connect(&call(server.addresses()[0])).and_then(|mut session| session.open(&Plan::default())).ok()
    });
}
