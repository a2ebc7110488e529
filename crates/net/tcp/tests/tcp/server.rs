//! The server under misbehaving readers, and with more of them than it has threads.

use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HEADER_LEN, HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{
    CallError, Channel, ChannelLease, ConnState, Connector, DemandConfig, DemandPool, Responder, Service,
    perform_handshake,
};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

/// Answers reads with zeros; the path selects a fault.
#[derive(Default)]
struct Zeros {
    closed: AtomicUsize,
    inside: AtomicUsize,
    /// Info requests, which wait as well.
    asked: AtomicUsize,
    /// Reads of "stuck" wait until this is set.
    released: Mutex<bool>,
    release: Condvar,
}

impl Service for Zeros {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        let (volume, node) = (VolumeId(1), "z".to_owned());
        Ok(WelcomeAnswer { version: 0, volume, block_size: 1, node, ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        if request == NodeRequest::Describe {
            self.asked.fetch_add(1, Ordering::SeqCst);
            let mut released = self.released.lock().unwrap();
            while !*released {
                released = self.release.wait(released).unwrap();
            }
            return responder.send_data(b"what there is to tell", &[]);
        }
        let NodeRequest::Read(ReadRequest { path, len, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads only"));
        };
        self.inside.fetch_add(1, Ordering::SeqCst);
        match path {
            b"panic" => panic!("asked to"),
            b"stuck" | b"says" => {
                if path == b"says" {
                    responder.before_wait();
                }
                let mut released = self.released.lock().unwrap();
                while !*released {
                    released = self.release.wait(released).unwrap();
                }
            }
            b"slow" => std::thread::sleep(Duration::from_millis(300)),
            _ => {}
        }
        responder.send_data(&[], &[&vec![0; len as usize]])
    }
    fn connection_closed(&self, _: &ConnState) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn start(config: ServerConfig) -> (TcpServer, SocketAddr, Arc<Zeros>) {
    let (server, addr, service, _) = start_counted(config);
    (server, addr, service)
}

fn start_counted(config: ServerConfig) -> (TcpServer, SocketAddr, Arc<Zeros>, Arc<Stats>) {
    let (service, stats) = (Arc::new(Zeros::default()), Arc::new(Stats::default()));
    let any = ["127.0.0.1:0".parse().unwrap()];
    let server = TcpServer::bind(&any, Arc::clone(&service) as _, config, Arc::clone(&stats)).unwrap();
    let addr = server.local_addrs()[0];
    (server, addr, service, stats)
}

fn connector(addr: SocketAddr) -> TcpConnector {
    TcpConnector::new(&addr.to_string(), vec![], SocketOptions::default(), Arc::default())
}

fn connect(addr: SocketAddr) -> Box<dyn Channel> {
    let mut channel = connector(addr).connect(soon()).unwrap();
    perform_handshake(&mut *channel, &HelloRequest::new("t", "s"), soon()).unwrap();
    channel
}

fn request(path: &str, len: usize) -> NodeRequest<'_> {
    let (path, version) = (path.as_bytes(), "v");
    NodeRequest::Read(ReadRequest {
        volume: VolumeId(1),
        path,
        version,
        size: 1 << 40,
        offset: 0,
        len: len as u32,
        flags: ReadFlags::NONE,
    })
}

fn read(channel: &mut dyn Channel, path: &str, len: usize) -> Result<usize, CallError> {
    let answer = channel.call(&request(path, len), &mut Vec::new(), &mut vec![1; len], &mut |_| {}, soon())?;
    Ok(answer.payload_len)
}

/// Polls until `done`; fails after a long while.
fn until(what: &str, mut done: impl FnMut() -> bool) {
    let give_up = soon();
    while !done() {
        assert!(Instant::now() < give_up, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Reads until the peer closes; says whether it did within the limit.
fn is_closed(socket: &mut TcpStream) -> bool {
    socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut rest = Vec::new();
    match socket.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(e) => e.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn many_connections_need_few_threads() {
    let (server, addr, service) = start(ServerConfig { max_workers: 4, max_waiting: 0, ..ServerConfig::default() });
    let mut channels: Vec<_> = (0..300).map(|_| connect(addr)).collect();
    for _ in 0..3 {
        for channel in &mut channels {
            assert_eq!(read(&mut **channel, "f", 5000).unwrap(), 5000);
        }
    }
    // All at once, with more callers than workers.
    std::thread::scope(|scope| {
        for part in channels.chunks_mut(20) {
            scope.spawn(move || {
                for _ in 0..20 {
                    part.iter_mut().for_each(|channel| assert_eq!(read(&mut **channel, "f", 70_000).unwrap(), 70_000));
                }
            });
        }
    });
    assert_eq!(server.connection_count(), 300);
    assert!(server.worker_count() <= 4, "{} workers", server.worker_count());
    drop(channels);
    until("closed connections stay in the table", || server.connection_count() == 0);
    assert_eq!(service.closed.load(Ordering::SeqCst), 300);
    assert!(server.join(soon()));
}

#[test]
fn slow_requests_do_not_hold_up_others() {
    let (_server, addr, service) = start(ServerConfig::default());
    std::thread::scope(|scope| {
        for _ in 0..30 {
            scope.spawn(move || read(&mut *connect(addr), "slow", 1).unwrap());
        }
        // All of them are served at the same time: the number of workers grew.
        until("slow requests wait for each other", || service.inside.load(Ordering::SeqCst) == 30);
        assert_eq!(read(&mut *connect(addr), "f", 9).unwrap(), 9);
    });
}

#[test]
fn what_is_at_hand_is_answered_while_more_requests_wait_than_are_answered_at_once() {
    // Waits announced by the service, and waits detected by time.
    for how in ["says", "stuck"] {
        let config = ServerConfig { max_workers: 2, max_waiting: 30, ..ServerConfig::default() };
        let (server, addr, service) = start(config);
        std::thread::scope(|scope| {
            let waiting: Vec<_> =
                (0..30).map(|_| scope.spawn(move || read(&mut *connect(addr), how, 10).unwrap())).collect();
            until("they wait for each other", || service.inside.load(Ordering::SeqCst) == 30);
            for _ in 0..10 {
                assert_eq!(read(&mut *connect(addr), "f", 9).unwrap(), 9);
            }
            assert!(server.worker_count() <= 32, "{} workers", server.worker_count());
            *service.released.lock().unwrap() = true;
            service.release.notify_all();
            waiting.into_iter().for_each(|read| assert_eq!(read.join().unwrap(), 10));
        });
        assert!(server.join(soon()));
    }
}

#[test]
fn unfinished_requests_are_closed() {
    let config = ServerConfig { request_timeout: Duration::from_millis(100), ..ServerConfig::default() };
    let (server, addr, _) = start(config);
    let mut silent = TcpStream::connect(addr).unwrap();
    let mut frame = Vec::new();
    NodeRequest::Hello(HelloRequest::new("t", "s")).encode(1, &mut frame).unwrap();
    let mut halves = Vec::new();
    for cut in [1, 3, HEADER_LEN - 1, HEADER_LEN, HEADER_LEN + 3] {
        let mut half = TcpStream::connect(addr).unwrap();
        half.write_all(&frame[..cut]).unwrap();
        halves.push(half);
    }
    // A reader that stops within a later request.
    let mut later = TcpStream::connect(addr).unwrap();
    later.write_all(&frame).unwrap();
    let mut welcome = [0; HEADER_LEN];
    later.read_exact(&mut welcome).unwrap();
    later.write_all(&frame[..HEADER_LEN + 1]).unwrap();
    let mut idle = connect(addr);
    assert!(is_closed(&mut silent) && is_closed(&mut later));
    assert!(halves.iter_mut().all(is_closed));
    // Being idle between requests is no such case.
    assert_eq!(read(&mut *idle, "f", 10).unwrap(), 10);
    until("only the idle one is left", || server.connection_count() == 1);
}

#[test]
fn garbage_costs_its_own_connection_only() {
    let (server, addr, _) = start(ServerConfig::default());
    let mut good = connect(addr);
    let mut frame = Vec::new();
    NodeRequest::Hello(HelloRequest::new("t", "s")).encode(1, &mut frame).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut damaged = frame.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        damaged
    };
    for bytes in [
        b"GET / HTTP/1.1\r\nHost: node\r\n\r\n".to_vec(),
        vec![0; 1000],
        with(20, &u32::MAX.to_le_bytes()),
        with(24, &1u32.to_le_bytes()),
        with(4, &77u16.to_le_bytes()),
        with(16, &1u16.to_le_bytes()),
        with(6, &19u16.to_le_bytes()),
    ] {
        let mut socket = TcpStream::connect(addr).unwrap();
        socket.write_all(&bytes).unwrap();
        assert!(is_closed(&mut socket), "{bytes:?}");
        assert_eq!(read(&mut *good, "f", 100).unwrap(), 100);
    }
    // Several requests in one packet are answered one by one.
    let mut socket = TcpStream::connect(addr).unwrap();
    let mut many = frame.clone();
    for id in 2..50 {
        NodeRequest::Ping.encode(id, &mut many).unwrap();
    }
    socket.write_all(&many).unwrap();
    let mut answers = vec![0; HEADER_LEN * 49];
    socket.read_exact(&mut answers).unwrap();
    drop(socket);
    drop(good);
    until("connections are left", || server.connection_count() == 0);
}

#[test]
fn a_panic_costs_its_own_connection_only() {
    let (server, addr, _) = start(ServerConfig { max_workers: 2, max_waiting: 0, ..ServerConfig::default() });
    let mut good = connect(addr);
    for _ in 0..5 {
        let error = read(&mut *connect(addr), "panic", 10).unwrap_err();
        assert!(error.is_broken() && error.error().kind() == ErrorKind::Unavailable, "{error}");
        assert_eq!(read(&mut *good, "f", 10).unwrap(), 10);
    }
    assert!(server.worker_count() <= 2);
}

/// A connection that requests much and receives nothing of it.
fn stuck_reader(addr: SocketAddr) -> TcpStream {
    let mut stuck = TcpStream::connect(addr).unwrap();
    let mut frame = Vec::new();
    NodeRequest::Hello(HelloRequest::new("t", "s")).encode(1, &mut frame).unwrap();
    stuck.write_all(&frame).unwrap();
    // Once the handshake is answered it is a connection for data, which the workers serve.
    stuck.read_exact(&mut [0; HEADER_LEN]).unwrap();
    frame.clear();
    request("f", 60 << 20).encode(2, &mut frame).unwrap();
    stuck.write_all(&frame).unwrap();
    stuck
}

#[test]
fn readers_that_do_not_read_delay_no_others() {
    let send_timeout = Duration::from_secs(60);
    let (server, addr, service) =
        start(ServerConfig { max_workers: 2, max_waiting: 30, send_timeout, ..ServerConfig::default() });
    let stuck: Vec<_> = (0..8).map(|_| stuck_reader(addr)).collect();
    until("a stuck reader is not served", || service.inside.load(Ordering::SeqCst) >= 2);
    let start = Instant::now();
    for _ in 0..10 {
        assert_eq!(read(&mut *connect(addr), "f", 10).unwrap(), 10);
    }
    // No worker says that it waits for a reader: its permit is taken from it.
    assert!(start.elapsed() < send_timeout / 4, "{:?}", start.elapsed());
    drop(stuck);
    assert!(server.join(soon()));
}

#[test]
fn a_reader_that_does_not_read_frees_its_worker() {
    let send_timeout = Duration::from_millis(100);
    let (server, addr, _) =
        start(ServerConfig { max_workers: 1, max_waiting: 0, send_timeout, ..ServerConfig::default() });
    let stuck = stuck_reader(addr);
    // The only worker is busy with it until the timeout; then it serves others again.
    assert_eq!(read(&mut *connect(addr), "f", 10).unwrap(), 10);
    until("the stuck reader is still there", || server.connection_count() == 0);
    drop(stuck);
}

/// `Throttled` when the server has no slot for a further data connection.
fn try_connect(addr: SocketAddr) -> Result<Box<dyn Channel>> {
    let mut channel = connector(addr).connect(soon())?;
    perform_handshake(&mut *channel, &HelloRequest::new("t", "s"), soon())?;
    Ok(channel)
}

#[test]
fn at_the_limit_the_longest_idle_connection_makes_room() {
    let (server, addr, service, stats) = start_counted(ServerConfig { max_connections: 16, ..ServerConfig::default() });
    // One in eight is reserved for control connections.
    let mut channels: Vec<_> = (0..14).map(|_| connect(addr)).collect();
    assert_eq!(stats.trust.idle_closed.get(), 0);
    // A connection answered a moment ago may not be parked yet.
    let mut further = Vec::new();
    for n in 1..=5 {
        until("no connection is closed for a new one", || {
            try_connect(addr).map(|channel| further.push(channel)).is_ok()
        });
        assert_eq!(stats.trust.idle_closed.get(), n);
    }
    until("the closed ones stay in the table", || server.connection_count() == 14);
    for channel in &mut further {
        assert_eq!(read(&mut **channel, "f", 10).unwrap(), 10);
    }
    let mut closed = 0;
    channels.iter_mut().for_each(|channel| closed += usize::from(!channel.looks_alive()));
    assert_eq!(closed, 5);
    assert_eq!((stats.tcp.connections.get(), stats.tcp.connections_limit.get()), (14, 16));
    drop((channels, further));
    until("closed connections stay in the table", || stats.tcp.connections.get() == 0);
    until("one is not reported", || service.closed.load(Ordering::SeqCst) == 19);
}

#[test]
fn signs_of_life_are_answered_where_all_connections_are_in_use() {
    let (server, addr, service, stats) =
        start_counted(ServerConfig { max_connections: 8, max_workers: 8, ..ServerConfig::default() });
    let mut readers: Vec<_> = (0..7).map(|_| connect(addr)).collect();
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            readers.iter_mut().map(|channel| scope.spawn(|| read(&mut **channel, "stuck", 10))).collect();
        until("all are in use", || service.inside.load(Ordering::SeqCst) == 7);
        for _ in 0..3 {
            let refused = try_connect(addr).err().unwrap();
            assert!(refused.kind() == ErrorKind::Throttled && refused.message().contains("--nconnect"), "{refused}");
            let mut channel = connector(addr).connect(soon()).unwrap();
            perform_handshake(&mut *channel, &HelloRequest::new("watcher", ""), soon()).unwrap();
            channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon()).unwrap();
            // No slot even for a control connection; the closed connection still proves the server alive.
            let pool = DemandPool::new(Arc::new(connector(addr)), "m", "s", DemandConfig::default(), Arc::default());
            pool.send_heartbeat(soon()).unwrap();
            assert_eq!(pool.checkout(soon()).err().unwrap().kind(), ErrorKind::Throttled);
            drop(channel);
            until("the watcher's place is not given back", || server.connection_count() == 7);
        }
        assert!(stats.trust.refused_limit.get() >= 3 && stats.trust.idle_closed.get() == 0);
        *service.released.lock().unwrap() = true;
        service.release.notify_all();
        waiting.into_iter().for_each(|reader| assert_eq!(reader.join().unwrap().unwrap(), 10));
    });
}

#[test]
fn more_mounts_than_places_take_turns() {
    let (server, addr, _, stats) = start_counted(ServerConfig { max_connections: 8, ..ServerConfig::default() });
    std::thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(move || {
                let pause = Duration::from_millis(5);
                let config = DemandConfig { retry_min: pause, retry_max: pause, ..DemandConfig::default() };
                let pool = DemandPool::new(Arc::new(connector(addr)), "m", "s", config, Arc::default());
                let mut done = 0;
                let read = |mut lease: ChannelLease<'_>| {
                    lease.call(&request("f", 3000), &mut Vec::new(), &mut [1; 3000], &mut |_| {}, soon())
                };
                // A mount would retry, or use another node.
                until("there is no turn", || {
                    match pool.checkout(soon()).map_err(CallError::Answered).and_then(read) {
                        Ok(answer) => {
                            assert_eq!(answer.payload_len, 3000);
                            done += 1;
                        }
                        Err(error) => {
                            let kind = error.error().kind();
                            assert!(matches!(kind, ErrorKind::Unavailable | ErrorKind::Throttled), "{error}");
                        }
                    }
                    done == 10
                });
            });
        }
    });
    assert!(stats.trust.idle_closed.get() > 0);
    until("closed connections stay in the table", || server.connection_count() == 0);
    // No slot was lost.
    let all: Vec<_> = (0..7).map(|_| connect(addr)).collect();
    assert_eq!(server.connection_count(), all.len());
}

#[test]
fn it_comes_back_on_the_same_port() {
    let (server, addr, _) = start(ServerConfig::default());
    let mut channel = connect(addr);
    assert!(server.join(soon()));
    assert!(!channel.looks_alive(), "the closed connection looks alive");
    let error = read(&mut *channel, "f", 10).unwrap_err();
    assert!(error.is_broken(), "{error}");
    let error = connector(addr).connect(soon()).err().unwrap();
    assert!(error.kind() == ErrorKind::Unavailable && error.message().contains("refused"), "{error}");
    let again = TcpServer::bind(&[addr], Arc::new(Zeros::default()), ServerConfig::default(), Arc::default()).unwrap();
    assert_eq!(read(&mut *connect(addr), "f", 10).unwrap(), 10);
    // The port is taken now, and the message says so.
    let taken = TcpServer::bind(&[addr], Arc::new(Zeros::default()), ServerConfig::default(), Arc::default());
    let taken = taken.err().unwrap();
    assert!(taken.kind() == ErrorKind::Unavailable && taken.message().contains("--group-port"), "{taken}");
    assert!(taken.message().contains(&format!("ss -ltnp sport = :{}", addr.port())), "{taken}");
    drop(again);
}

#[test]
fn an_answer_under_way_is_finished_before_it_stops() {
    let (server, addr, service) = start(ServerConfig::default());
    let reader = std::thread::spawn(move || read(&mut *connect(addr), "slow", 100_000));
    until("the request has not arrived", || service.inside.load(Ordering::SeqCst) == 1);
    assert!(server.join(soon()));
    assert_eq!(reader.join().unwrap().unwrap(), 100_000);
}

#[test]
fn the_local_address_is_chosen() {
    let (_server, addr, _) = start(ServerConfig::default());
    let from = |local: &str| {
        TcpConnector::new(&addr.to_string(), vec![local.parse().unwrap()], SocketOptions::default(), Arc::default())
    };
    let channel = from("127.0.0.77").connect(soon()).unwrap();
    assert!(channel.endpoints().local.starts_with("127.0.0.77:"), "{}", channel.endpoints());
    let wrong = from("192.0.2.1").connect(soon()).err().unwrap();
    assert!(wrong.message().contains("192.0.2.1"), "{wrong}");
    let family = from("::1").connect(soon()).err().unwrap();
    assert!(family.message().contains("needs an IPv4 address"), "{family}");
}

#[test]
fn signs_of_life_are_answered_while_every_worker_waits_for_something_slow() {
    let (server, addr, service) = start(ServerConfig { max_workers: 2, max_waiting: 0, ..ServerConfig::default() });
    let mut readers: Vec<_> = (0..5).map(|_| connect(addr)).collect();
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            readers.iter_mut().map(|channel| scope.spawn(|| read(&mut **channel, "stuck", 10))).collect();
        until("two requests are in work", || service.inside.load(Ordering::SeqCst) == 2);
        for _ in 0..20 {
            let mut channel = connector(addr).connect(soon()).unwrap();
            perform_handshake(&mut *channel, &HelloRequest::new("watcher", ""), soon()).unwrap();
            channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon()).unwrap();
            channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon()).unwrap();
        }
        // The handshake succeeds; the request has to wait, and delays no heartbeat.
        let mut late = connect(addr);
        let late = scope.spawn(move || read(&mut *late, "stuck", 10));
        let mut channel = connector(addr).connect(soon()).unwrap();
        perform_handshake(&mut *channel, &HelloRequest::new("watcher", ""), soon()).unwrap();
        assert_eq!((service.inside.load(Ordering::SeqCst), server.worker_count()), (2, 2));
        *service.released.lock().unwrap() = true;
        service.release.notify_all();
        for reader in waiting {
            assert_eq!(reader.join().unwrap().unwrap(), 10);
        }
        assert_eq!(late.join().unwrap().unwrap(), 10);
    });
    assert!(server.join(soon()));
}

#[test]
fn signs_of_life_are_answered_while_questions_about_the_node_wait() {
    let (server, addr, service) = start(ServerConfig { max_workers: 2, max_waiting: 0, ..ServerConfig::default() });
    let mut readers: Vec<_> = (0..2).map(|_| connect(addr)).collect();
    let greeted = || {
        let mut channel = connector(addr).connect(soon()).unwrap();
        perform_handshake(&mut *channel, &HelloRequest::new("watcher", ""), soon()).unwrap();
        channel
    };
    let ping = |channel: &mut Box<dyn Channel>| {
        channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon()).unwrap();
    };
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            readers.iter_mut().map(|channel| scope.spawn(|| read(&mut **channel, "stuck", 10))).collect();
        until("two requests are in work", || service.inside.load(Ordering::SeqCst) == 2);
        let mut before = greeted();
        let ask = || {
            let (mut channel, mut body) = (greeted(), Vec::new());
            let request = NodeRequest::Describe;
            channel.call(&request, &mut body, &mut [], &mut |_| {}, soon()).unwrap();
            // The connection is not lost to later heartbeats.
            ping(&mut channel);
            body
        };
        let asked: Vec<_> = (0..6).map(|_| scope.spawn(ask)).collect();
        until("some of them are in work", || service.asked.load(Ordering::SeqCst) == 4);
        ping(&mut before);
        (0..20).for_each(|_| ping(&mut greeted()));
        *service.released.lock().unwrap() = true;
        service.release.notify_all();
        for reader in waiting {
            assert_eq!(reader.join().unwrap().unwrap(), 10);
        }
        asked.into_iter().for_each(|asked| assert_eq!(asked.join().unwrap(), b"what there is to tell"));
    });
    assert_eq!(service.asked.load(Ordering::SeqCst), 6);
    assert!(server.join(soon()));
}

/// A node that closes accepted connections is alive, at its limit, and not silent.
#[test]
fn a_connection_that_is_closed_before_the_greeting_is_a_sign_of_life() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let closer = std::thread::spawn(move || (0..2).for_each(|_| drop(listener.accept().unwrap())));
    let tokens = spurline_trust::GroupTokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap();
    let pool = |connector: TcpConnector| {
        DemandPool::new(Arc::new(connector), "m", "s", DemandConfig::default(), Arc::default())
    };
    let proving = connector(addr).with_trust(spurline_trust::Trust::with_tokens("m", tokens));
    for pool in [pool(connector(addr)), pool(proving)] {
        pool.send_heartbeat(soon()).unwrap();
    }
    closer.join().unwrap();
    // The listener is closed now.
    assert_eq!(pool(connector(addr)).send_heartbeat(soon()).unwrap_err().kind(), ErrorKind::Unavailable);
}
