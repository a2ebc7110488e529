//! The suite of every transport on real verbs, in the virtual machine, and what only RDMA has: memory that is
//! registered or not, faults of ports, keys and credits.

mod pattern;
mod played;

use pattern::{DATA, Pattern, STUCK_FILE, call, check, fill, read, write};
use played::Played;
use spurline_mem::BufferPool;
use spurline_net_rdma::{RdmaChannel, RdmaConnector, RdmaRail, RdmaServer, RdmaServerConfig, RdmaTimeouts};
use spurline_proto::rdma::{ConnectTerms, MessageKind, MessagePrelude, PayloadRegion, RDMA_MAGIC};
use spurline_proto::{HelloRequest, NodeRequest};
use spurline_testkit::{GuestNet, run_in_guest};
use spurline_transport::conformance::{PeerScript, TestPeer, TransportRig, run_suite};
use spurline_transport::{Channel as _, Connector, Service, perform_handshake};
use spurline_trust::{GroupTokens, ProofConnection, Trust};
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_verbs::{
    CmChannel, ConnectOptions, DeviceContext, MemoryAccess, ProtectionDomain, QueueDepths, QueuePair, VerbsLibrary,
};
use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(90)
}

fn rail(ip: &str, access: MemoryAccess) -> Arc<RdmaRail> {
    let verbs = VerbsLibrary::load().unwrap();
    let pool = BufferPool::new(64 << 20, 8 << 20).unwrap();
    RdmaRail::open(&verbs, "rail", ip.parse().unwrap(), &pool, access).unwrap()
}

/// The suite is not about silence, and an emulated machine may stall for a minute.
const PATIENT: RdmaTimeouts = RdmaTimeouts { silence: Duration::from_secs(150) };

/// What tests want that are not about time.
fn config() -> RdmaServerConfig {
    RdmaServerConfig { request_timeout: PATIENT.silence, ..RdmaServerConfig::default() }
}

struct Rdma {
    reader: Arc<RdmaRail>,
    node: Arc<RdmaRail>,
}

impl Rdma {
    fn over(ip: &str) -> Self {
        Rdma { reader: rail(ip, MemoryAccess::PeerReadsAndWrites), node: rail(ip, MemoryAccess::Local) }
    }

    fn connector(&self, to: SocketAddr, trust: Arc<Trust>) -> Arc<RdmaConnector> {
        let connector = RdmaConnector::new(Arc::clone(&self.reader), to, PATIENT, Arc::default());
        Arc::new(connector.with_trust(trust))
    }
}

struct Served {
    server: Option<RdmaServer>,
    connector: Arc<RdmaConnector>,
}

impl TestPeer for Served {
    fn connector(&self) -> Arc<dyn Connector> {
        Arc::clone(&self.connector) as Arc<dyn Connector>
    }
    fn kill(&mut self) {
        if let Some(server) = self.server.take() {
            server.join(Instant::now() + Duration::from_secs(10));
        }
    }
}

struct PlayedPeer {
    connector: Arc<RdmaConnector>,
    _played: Played,
}

impl TestPeer for PlayedPeer {
    fn connector(&self) -> Arc<dyn Connector> {
        Arc::clone(&self.connector) as Arc<dyn Connector>
    }
    fn kill(&mut self) {}
}

impl TransportRig for Rdma {
    fn serve_with(&self, service: Arc<dyn Service>) -> Box<dyn TestPeer> {
        let rails = [Arc::clone(&self.node)];
        let (request_timeout, send_timeout) = (PATIENT.silence, PATIENT.silence);
        let trust_in = trust(TOKEN);
        let config = RdmaServerConfig {
            trust: trust_in,
            patience: PATIENT,
            request_timeout,
            send_timeout,
            ..Default::default()
        };
        let server = RdmaServer::bind(&rails, 0, service, config, Arc::default()).unwrap();
        let connector = self.connector(server.local_addrs()[0], trust(TOKEN));
        Box::new(Served { server: Some(server), connector })
    }
    fn play_script(&self, script: PeerScript) -> Box<dyn TestPeer> {
        let played = Played::start(self.node.ip(), script);
        Box::new(PlayedPeer { connector: self.connector(played.addr, Trust::without_checks()), _played: played })
    }
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_conforms() {
    run_suite(&Rdma::over("10.77.0.1"));
}

const TOKEN: &str = "q5Ykm0WJ7b2uR1xTzv9sLd3f";

fn trust(token: &str) -> Arc<Trust> {
    Trust::with_tokens(token, GroupTokens::parse(token.as_bytes()).unwrap())
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_asks_for_the_group_token_before_anything_is_served() {
    let (ip, right, wrong) = ("10.77.0.1", TOKEN, "another-WJ7b2uR1xTzv9sLd3f");
    let node_pool = BufferPool::new(32 << 20, 4 << 20).unwrap();
    let node =
        RdmaRail::open(&VerbsLibrary::load().unwrap(), "node", ip.parse().unwrap(), &node_pool, MemoryAccess::Local)
            .unwrap();
    let reader = rail(ip, MemoryAccess::PeerWrites);
    let stats = Arc::new(Stats::default());
    let config = RdmaServerConfig { trust: trust(right), ..config() };
    let server = RdmaServer::bind(&[node], 0, Pattern::new(&node_pool), config, Arc::clone(&stats)).unwrap();
    let to = server.local_addrs()[0];
    let connect = |trust: Arc<Trust>| {
        let connector = RdmaConnector::new(Arc::clone(&reader), to, RdmaTimeouts::default(), Arc::default());
        let mut channel = connector.with_trust(trust).open_channel(soon())?;
        perform_handshake(&mut channel, &HelloRequest::new("tester", ""), soon()).map_err(Error::from)
    };
    connect(trust(right)).unwrap();
    for stranger in [trust(wrong), Trust::without_checks()] {
        let error = connect(stranger).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert!(error.to_string().contains("--group-token-file"), "{error}");
    }
    connect(trust(right)).unwrap();
    assert_eq!((stats.trust.proved.get(), stats.trust.refused_proof.get()), (2, 2));
}

/// A node with [`Pattern`] on one rail, and a reader's rail beside it.
struct Pair {
    reader: Arc<RdmaRail>,
    pool: Arc<BufferPool>,
    node_pool: Arc<BufferPool>,
    service: Arc<Pattern>,
    server: RdmaServer,
    node_stats: Arc<Stats>,
    stats: Arc<Stats>,
}

impl Pair {
    fn on(ip: &str, config: RdmaServerConfig) -> Pair {
        let verbs = VerbsLibrary::load().unwrap();
        let ip = ip.parse().unwrap();
        let (node_pool, pool) =
            (BufferPool::new(32 << 20, 4 << 20).unwrap(), BufferPool::new(32 << 20, 4 << 20).unwrap());
        let node = RdmaRail::open(&verbs, "node", ip, &node_pool, MemoryAccess::Local).unwrap();
        let reader = RdmaRail::open(&verbs, "reader", ip, &pool, MemoryAccess::PeerReadsAndWrites).unwrap();
        let node_stats = Arc::new(Stats::default());
        let service = Pattern::new(&node_pool);
        let server = RdmaServer::bind(&[node], 0, Arc::clone(&service) as _, config, Arc::clone(&node_stats)).unwrap();
        Pair { reader, pool, node_pool, service, server, node_stats, stats: Arc::default() }
    }

    /// A channel for data.
    fn open(&self) -> Result<RdmaChannel> {
        self.open_for("src")
    }

    fn open_for(&self, source: &str) -> Result<RdmaChannel> {
        let (to, patience) = (self.server.local_addrs()[0], RdmaTimeouts::default());
        let connector = RdmaConnector::new(Arc::clone(&self.reader), to, patience, Arc::clone(&self.stats));
        let mut channel = connector.open_channel(soon())?;
        perform_handshake(&mut channel, &HelloRequest::new("tester", source), soon())?;
        Ok(channel)
    }
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_signs_of_life_are_answered_while_every_worker_waits_for_something_slow() {
    let pair = Pair::on("10.77.0.1", RdmaServerConfig { max_workers: 2, ..config() });
    let stuck = |mut channel: RdmaChannel| {
        let mut dst = pair.pool.alloc(4096, soon()).unwrap();
        let read = call(&mut channel, &read("stuck", 7, 4096), &mut dst, soon());
        read.map(|len| check(&dst[..len], 7))
    };
    let readers: Vec<RdmaChannel> = (0..4).map(|_| pair.open().unwrap()).collect();
    std::thread::scope(|scope| {
        let waiting: Vec<_> = readers.into_iter().map(|channel| scope.spawn(|| stuck(channel))).collect();
        pair.service.wait_stuck(2);
        for _ in 0..3 {
            let mut watcher = pair.open_for("").unwrap();
            for _ in 0..2 {
                watcher.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon()).unwrap();
            }
        }
        // The handshake succeeds; the request waits for a worker and delays no heartbeat.
        let late = pair.open().unwrap();
        let late = scope.spawn(|| stuck(late));
        pair.open_for("").unwrap();
        assert_eq!((pair.service.stuck(), pair.server.workers()), (2, 2));
        pair.service.release();
        for reader in waiting {
            reader.join().unwrap().unwrap();
        }
        late.join().unwrap().unwrap();
    });
}

/// A worker that polls several busy connections blocks on one of them without releasing the others.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_busy_connections_do_not_wait_for_one_that_is_stuck() {
    let pair = Pair::on("10.77.0.1", config());
    // More than two workers can poll.
    let done: Vec<AtomicUsize> = (0..24).map(|_| AtomicUsize::new(0)).collect();
    let (gets_stuck, over) = (AtomicBool::new(false), AtomicBool::new(false));
    let channels: Vec<RdmaChannel> = done.iter().map(|_| pair.open().unwrap()).collect();
    std::thread::scope(|scope| {
        for (number, mut channel) in channels.into_iter().enumerate() {
            let (pair, done, gets_stuck, over) = (&pair, &done[number], &gets_stuck, &over);
            scope.spawn(move || {
                let mut dst = pair.pool.alloc(4096, soon()).unwrap();
                while !over.load(Ordering::SeqCst) {
                    let name = if number < 4 && gets_stuck.load(Ordering::SeqCst) { "stuck" } else { "data" };
                    assert_eq!(call(&mut channel, &read(name, number, 4096), &mut dst, soon()), Ok(4096));
                    check(&dst, number);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        let progress = |of: &[AtomicUsize]| {
            let before: Vec<usize> = of.iter().map(|done| done.load(Ordering::SeqCst)).collect();
            let until = soon();
            while of.iter().zip(&before).any(|(done, before)| done.load(Ordering::SeqCst) < before + 200) {
                assert!(Instant::now() < until, "some are not answered");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        progress(&done);
        gets_stuck.store(true, Ordering::SeqCst);
        pair.service.wait_stuck(4);
        progress(&done[4..]);
        over.store(true, Ordering::SeqCst);
        pair.service.release();
    });
}

/// A peer that requests challenges repeatedly and reads none of the answers.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_strangers_that_take_no_answer_hold_no_worker() {
    let ip = "10.77.0.1";
    let node_pool = BufferPool::new(32 << 20, 4 << 20).unwrap();
    let node =
        RdmaRail::open(&VerbsLibrary::load().unwrap(), "node", ip.parse().unwrap(), &node_pool, MemoryAccess::Local)
            .unwrap();
    let reader = rail(ip, MemoryAccess::PeerWrites);
    // Neither time alone would end them within this test.
    let patient = Duration::from_secs(600);
    let config = RdmaServerConfig {
        trust: trust(TOKEN),
        max_workers: 2,
        request_timeout: patient,
        send_timeout: patient,
        ..RdmaServerConfig::default()
    };
    let stats = Arc::new(Stats::default());
    let server = RdmaServer::bind(&[node], 0, Pattern::new(&node_pool), config, Arc::clone(&stats)).unwrap();
    let to = server.local_addrs()[0];
    let prover = trust(TOKEN).prover(ProofConnection { kind: "rdma", binding: b"" }).unwrap().unwrap();
    let challenge = frame(&NodeRequest::Challenge(prover.challenge()), 1);
    let frame_len = challenge.len() as u32;
    let prelude =
        MessagePrelude { kind: MessageKind::Request, granted: 0, frame_len, region: PayloadRegion::default() };
    let message = [&prelude.encode()[..], &challenge].concat();
    for _ in 0..4 {
        let mut stranger = RawReader::connect(&reader, to);
        for _ in 0..4 {
            stranger.send(&message);
        }
        stranger.expect_end();
    }
    let connector = RdmaConnector::new(reader, to, RdmaTimeouts::default(), Arc::default());
    let mut channel = connector.with_trust(trust(TOKEN)).open_channel(soon()).unwrap();
    perform_handshake(&mut channel, &HelloRequest::new("tester", "src"), soon()).unwrap();
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_registered_memory_is_written_in_place() {
    for ip in ["10.77.0.1", "fd77:1::1"] {
        registered_memory_is_written_in_place(ip, true);
    }
}

/// As over iWARP, whose writes carry no immediate data: a message ends each answer.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_writes_that_tell_of_nothing_are_told_of_by_a_message() {
    registered_memory_is_written_in_place("10.77.0.1", false);
}

fn registered_memory_is_written_in_place(ip: &str, announces: bool) {
    let pair = Pair::on(ip, RdmaServerConfig { announces, ..config() });
    let mut channel = pair.open().unwrap();
    let mut dst = pair.pool.try_alloc(DATA).unwrap();
    let mut total = 0;
    for (i, len) in [1, 4096, 65_537, 1 << 20, DATA].into_iter().enumerate() {
        let offset = (DATA - len).min(i * 1001);
        for path in ["data", "vec"] {
            dst.fill(0);
            assert_eq!(call(&mut channel, &read(path, offset, len), &mut dst[..len], soon()), Ok(len));
            check(&dst[..len], offset);
            total += len as u64;
        }
    }
    assert_eq!(pair.stats.rdma.bounced_bytes.get(), 0);
    assert_eq!((pair.stats.rdma.recv_bytes.get(), pair.node_stats.rdma.write_bytes.get()), (total, total));
    // Memory of elsewhere is reached by a copy, which is counted.
    let mut elsewhere = vec![0u8; 1 << 20];
    assert_eq!(call(&mut channel, &read("data", 7, 1 << 20), &mut elsewhere, soon()), Ok(1 << 20));
    check(&elsewhere, 7);
    assert_eq!(pair.stats.rdma.bounced_bytes.get(), 1 << 20);
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_bytes_of_a_write_are_read_from_the_memory_of_the_mount() {
    for ip in ["10.77.0.1", "fd77:1::1"] {
        let pair = Pair::on(ip, config());
        let mut channel = pair.open().unwrap();
        let mut src = pair.pool.try_alloc(DATA).unwrap();
        let (mut by_read, mut total) = (0, 0);
        for (i, len) in [1, 3000, 5000, 65_537, 1 << 20, DATA].into_iter().enumerate() {
            let offset = i * 1001;
            fill(&mut src[..len], offset);
            call(&mut channel, &write(1, offset, &src[..len]), &mut [], soon()).unwrap();
            total += len as u64;
            by_read += if len > 4096 { len as u64 } else { 0 };
        }
        let (sent, node) = (&pair.stats.rdma, &pair.node_stats.rdma);
        assert_eq!((sent.send_bytes.get(), sent.bounced_bytes.get()), (total, 0));
        assert_eq!((node.read_bytes.get(), node.r_ops.get(), node.recv_bytes.get()), (by_read, 4, total - by_read));
        // Memory of elsewhere is reached by a copy, which is counted.
        let elsewhere = src[..1 << 20].to_vec();
        call(&mut channel, &write(1, 5 * 1001, &elsewhere), &mut [], soon()).unwrap();
        assert_eq!((sent.bounced_bytes.get(), node.read_bytes.get()), (1 << 20, by_read + (1 << 20)));
        assert_eq!(pair.service.written().len(), 7);
    }
    // A mount that does not write opens none of its memory.
    let pair = Pair::on("10.77.0.1", config());
    let reader = RdmaRail::open(
        &VerbsLibrary::load().unwrap(),
        "reader",
        "10.77.0.1".parse().unwrap(),
        &pair.pool,
        MemoryAccess::PeerWrites,
    );
    let pair = Pair { reader: reader.unwrap(), ..pair };
    let mut channel = pair.open().unwrap();
    let error = call(&mut channel, &write(1, 0, &[0; 8192]), &mut [], soon()).unwrap_err();
    assert_eq!((error.is_broken(), error.error().kind()), (false, ErrorKind::Unsupported), "{error}");
}

/// The node is late: it waits for memory. What the mount's memory holds later must not become a write.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_bytes_of_a_write_that_was_given_up_are_not_read() {
    let pair = Pair::on("10.77.0.1", config());
    let mut channel = pair.open().unwrap();
    let mut src = pair.pool.try_alloc(1 << 20).unwrap();
    fill(&mut src, 0);
    let mut taken = Vec::new();
    for len in [4 << 20, 1 << 20, 64 << 10] {
        taken.extend(std::iter::from_fn(|| pair.node_pool.try_alloc(len)));
    }
    let soon_over = Instant::now() + Duration::from_millis(500);
    let error = call(&mut channel, &write(1, 0, &src), &mut [], soon_over).unwrap_err();
    assert!(error.is_broken() && error.error().kind() == ErrorKind::Timeout, "{error}");
    src.fill(0xdb);
    drop(taken);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((pair.service.written(), pair.node_stats.rdma.read_bytes.get()), (Vec::new(), 0));
    // The next one is executed.
    let mut channel = pair.open().unwrap();
    fill(&mut src, 7);
    call(&mut channel, &write(2, 7, &src), &mut [], soon()).unwrap();
    assert_eq!(pair.service.written(), [(2, 1 << 20)]);
}

/// A change whose bytes came with its request, or that has none, is not executed after its reader gave it up.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_a_change_that_was_given_up_is_not_executed() {
    let pair = Pair::on("10.77.0.1", config());
    let mut src = pair.pool.try_alloc(4096).unwrap();
    fill(&mut src, 0);
    for len in [0, 100] {
        let mut channel = pair.open().unwrap();
        let soon_over = Instant::now() + Duration::from_millis(500);
        let error = call(&mut channel, &write(STUCK_FILE, 0, &src[..len]), &mut [], soon_over).unwrap_err();
        assert!(error.is_broken(), "{error}");
    }
    pair.service.wait_stuck(2);
    pair.service.release();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(pair.service.written(), []);
    let mut channel = pair.open().unwrap();
    call(&mut channel, &write(STUCK_FILE, 0, &src[..100]), &mut [], soon()).unwrap();
    assert_eq!(pair.service.written(), [(STUCK_FILE, 100)]);
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_an_answer_after_the_deadline_lands_nowhere() {
    let pair = Pair::on("10.77.0.1", config());
    let mut channel = pair.open().unwrap();
    let mut dst = pair.pool.try_alloc(1 << 20).unwrap();
    dst.fill(0);
    let late = call(&mut channel, &read("slow", 0, 1 << 20), &mut dst, Instant::now() + Duration::from_millis(200));
    let error = late.unwrap_err();
    println!("{error}");
    assert!(error.is_broken() && error.error().kind() == ErrorKind::Timeout);
    assert!(!channel.looks_alive());
    // The node's write comes within this time.
    std::thread::sleep(Duration::from_secs(6));
    assert!(dst.iter().all(|b| *b == 0), "a late write landed in memory that was given back");
    drop(channel);
    let mut channel = pair.open().unwrap();
    assert_eq!(call(&mut channel, &read("data", 0, 1 << 20), &mut dst, soon()), Ok(1 << 20));
    check(&dst, 0);
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_64_readers_and_their_end() {
    let pair = Pair::on("10.77.0.1", config());
    std::thread::scope(|scope| {
        for reader in 0..64usize {
            let pair = &pair;
            scope.spawn(move || {
                let mut channel = pair.open().unwrap();
                let mut dst = pair.pool.alloc(32 << 10, soon()).unwrap();
                for i in 0..10 {
                    let (offset, len) = (reader * 4099 + i, 1 + (reader * 977 + i * 4093) % (32 << 10));
                    assert_eq!(call(&mut channel, &read("data", offset, len), &mut dst[..len], soon()), Ok(len));
                    check(&dst[..len], offset);
                }
            });
        }
    });
    // Goodbyes are events, so no connection is left behind, and no memory with it.
    let until = soon();
    while pair.server.connections() > 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!((pair.server.connections(), pair.pool.used_bytes()), (0, 0));
}

#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_limits_are_said_in_words() {
    let config = RdmaServerConfig { max_connections: 2, ..config() };
    let pair = Pair::on("10.77.0.1", config);
    let mut channels = [pair.open().unwrap(), pair.open().unwrap()];
    let refused = pair.open().err().unwrap();
    println!("{refused}");
    assert!(refused.message().contains("all its connections are in use"), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Unavailable);
    // Some of the connections are reserved for heartbeats; readers get the refusal in an answer.
    let eight = Pair::on("10.77.0.1", RdmaServerConfig { max_connections: 8, ..self::config() });
    let readers: Vec<_> = (0..7).map(|_| eight.open().unwrap()).collect();
    let refused = eight.open().err().unwrap();
    assert!(refused.kind() == ErrorKind::Throttled && refused.message().contains("--nconnect"), "{refused}");
    let mut watcher = eight.open_for("").unwrap();
    watcher.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, soon()).unwrap();
    assert_eq!(eight.node_stats.rdma.connections_limit.get(), 8);
    drop((eight, readers));
    // A reader whose pool is exhausted returns that error, and continues afterwards.
    let mut held = Vec::new();
    while let Some(buf) = pair.pool.try_alloc(1 << 20) {
        held.push(buf);
    }
    let mut elsewhere = vec![0u8; 1 << 20];
    let full =
        call(&mut channels[0], &read("data", 0, 1 << 20), &mut elsewhere, Instant::now() + Duration::from_millis(50));
    let full = full.unwrap_err();
    assert!(!full.is_broken() && full.error().kind() == ErrorKind::NoMemory, "{full}");
    held.clear();
    assert_eq!(call(&mut channels[0], &read("data", 0, 1 << 20), &mut elsewhere, soon()), Ok(1 << 20));
    check(&elsewhere, 0);
}

/// Strangers that connect and say nothing push each other out, and no reader.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_strangers_that_say_nothing_make_room() {
    // Their silence alone would take minutes to end them.
    let request_timeout = Duration::from_secs(600);
    let config =
        RdmaServerConfig { max_connections: 8, max_pending_handshakes: 4, request_timeout, ..Default::default() };
    let pair = Pair::on("10.77.0.1", config);
    let mut reader = pair.open().unwrap();
    let connector = RdmaConnector::new(
        Arc::clone(&pair.reader),
        pair.server.local_addrs()[0],
        RdmaTimeouts::default(),
        Arc::default(),
    );
    // More than there may be connections at all.
    let strangers: Vec<RdmaChannel> = (0..12).map(|_| connector.open_channel(soon()).unwrap()).collect();
    let end = soon();
    while pair.node_stats.trust.refused_limit.get() < 8 {
        assert!(Instant::now() < end, "no stranger is pushed out");
        std::thread::sleep(Duration::from_millis(10));
    }
    let mut dst = pair.pool.try_alloc(4096).unwrap();
    assert_eq!(
        call(&mut reader, &read("data", 0, 4096), &mut dst, soon()),
        Ok(4096),
        "the first connection has performed its handshake"
    );
    pair.open().unwrap();
    assert!(pair.server.connections() <= 6, "one reader, four strangers, and one that may have ended meanwhile");
    drop(strangers);
}

/// A reader that keeps no rules costs its own connection and nothing else.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn guest_readers_that_keep_no_rules() {
    let pair = Pair::on("10.77.0.1", config());
    let to = pair.server.local_addrs()[0];
    let mut good = pair.open().unwrap();
    let hello = frame(&NodeRequest::Hello(HelloRequest::new("odd", "")), 1);
    let message = |kind, frame: &[u8], region, frame_len| {
        [&MessagePrelude { kind, granted: 0, frame_len, region }.encode()[..], frame].concat()
    };
    let ask = frame(&read("data", 0, 1 << 20), 2);
    let stale = PayloadRegion { addr: 0x7000_0000_0000, len: 1 << 20, rkey: 0x1234_5678 };
    let whole = |kind, frame: &[u8], region| message(kind, frame, region, frame.len() as u32);
    let oddities: Vec<(&str, Vec<Vec<u8>>)> = vec![
        ("random bytes", vec![vec![0x5a; 4000]]),
        ("a prelude cut short", vec![RDMA_MAGIC.to_le_bytes().to_vec()]),
        ("an answer", vec![whole(MessageKind::Answer, &hello, PayloadRegion::default())]),
        ("the rest of nothing", vec![whole(MessageKind::Rest, &hello, PayloadRegion::default())]),
        ("a frame over all limits", vec![message(MessageKind::Request, &hello, PayloadRegion::default(), 1 << 30)]),
        (
            "too many credits",
            vec![{
                let mut bytes = whole(MessageKind::Grant, &[], PayloadRegion::default());
                bytes[5] = 200;
                bytes
            }],
        ),
        ("no handshake", vec![whole(MessageKind::Request, &ask, PayloadRegion::default())]),
        (
            "a stale key",
            vec![
                whole(MessageKind::Request, &hello, PayloadRegion::default()),
                whole(MessageKind::Request, &ask, stale),
            ],
        ),
        (
            "another request at once",
            vec![
                whole(MessageKind::Request, &hello, PayloadRegion::default()),
                message(MessageKind::Request, &ask[..64], PayloadRegion::default(), ask.len() as u32),
                message(MessageKind::Request, &ask[..64], PayloadRegion::default(), ask.len() as u32),
            ],
        ),
    ];
    for (name, messages) in oddities {
        println!("  {name}");
        let mut odd = RawReader::connect(&pair.reader, to);
        for message in &messages {
            odd.send(message);
        }
        odd.expect_end();
    }
    let mut dst = pair.pool.try_alloc(1 << 20).unwrap();
    assert_eq!(call(&mut good, &read("data", 3, 1 << 20), &mut dst, soon()), Ok(1 << 20));
    check(&dst, 3);
}

/// A request's frame.
fn frame(request: &NodeRequest<'_>, id: u64) -> Vec<u8> {
    let mut out = Vec::new();
    request.encode(id, &mut out).unwrap();
    out
}

/// A reader that sends given bytes.
struct RawReader {
    pair: QueuePair,
}

impl RawReader {
    fn connect(rail: &RdmaRail, to: SocketAddr) -> RawReader {
        let verbs = VerbsLibrary::load().unwrap();
        let mut id = CmChannel::new(&verbs).unwrap().create_id().unwrap();
        id.resolve(rail.ip(), to, soon()).unwrap();
        let mut anchor = CmChannel::new(&verbs).unwrap().create_id().unwrap();
        anchor.bind(SocketAddr::new(rail.ip(), 0)).unwrap();
        let domain = ProtectionDomain::new(&DeviceContext::of_id(anchor).unwrap()).unwrap();
        let memory = domain.register_pool(&BufferPool::new(1 << 20, 1 << 20).unwrap(), MemoryAccess::Local).unwrap();
        let mut pair = QueuePair::new(id, &domain, QueueDepths { receives: 16, sends: 16 }, 0).unwrap();
        for slot in memory.split_slots(memory.pool().try_alloc(4096 * 16).unwrap(), 4096).unwrap() {
            pair.post_receive(slot).unwrap();
        }
        for slot in memory.split_slots(memory.pool().try_alloc(4096 * 8).unwrap(), 4096).unwrap() {
            pair.keep_slot(slot);
        }
        let options = ConnectOptions { ack_timeout: Some(14), retries: 6, rnr_retries: 6 };
        pair.connect(options, &ConnectTerms { receives: 16, slot_len: 4096 }.encode(), soon()).unwrap();
        RawReader { pair }
    }

    fn send(&mut self, bytes: &[u8]) {
        // The node may have ended it by now.
        if let Ok(mut slot) = self.pair.take_slot(soon()) {
            slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
            let _ = self.pair.send_message(slot, bytes.len(), soon());
        }
    }

    fn expect_end(mut self) {
        loop {
            match self.pair.poll_receive() {
                Ok(Some(_)) => {}
                Ok(None) => assert!(self.pair.wait_arrival(soon()).unwrap_or(true), "the node keeps the connection"),
                Err(_) => return,
            }
        }
    }
}

fn sh(command: &str) {
    let out = Command::new("bash").args(["-c", command]).output().unwrap();
    assert!(out.status.success(), "{command}: {}", String::from_utf8_lossy(&out.stderr));
}

/// In a separate process: a bond whose members are devices, when the active member goes down. Both sides find the
/// address on the other one.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn last_an_address_moves_to_another_device() {
    sh("ip addr add 10.77.2.1/24 dev rail0");
    let pair = Pair::on("10.77.2.1", config());
    let mut dst = pair.pool.try_alloc(1 << 20).unwrap();
    let mut channel = pair.open().unwrap();
    assert_eq!(call(&mut channel, &read("data", 3, 1 << 20), &mut dst, soon()), Ok(1 << 20));
    sh("ip link set rail0 down; ip addr del 10.77.2.1/24 dev rail0; ip addr add 10.77.2.1/24 dev rail1");
    let until = soon();
    let mut channel = loop {
        match pair.open() {
            Ok(channel) => break channel,
            Err(e) if Instant::now() > until => panic!("the rail does not follow its address: {e}"),
            Err(e) => println!("not yet: {e}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(call(&mut channel, &read("data", 5, 1 << 20), &mut dst, soon()), Ok(1 << 20));
    check(&dst, 5);
    sh("ip addr del 10.77.2.1/24 dev rail1; ip link set rail0 up; ip addr replace fd77:0::1/64 dev rail0 nodad");
}

/// In a process of its own: a port goes down under calls and comes back, then its device is taken away.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn last_a_port_goes_down_and_comes_back() {
    let pair = Pair::on("10.77.1.1", config());
    let other = Pair::on("10.77.0.1", config());
    let (mut channel, mut elsewhere) = (pair.open().unwrap(), other.open().unwrap());
    let mut dst = pair.pool.try_alloc(1 << 20).unwrap();
    let down = std::thread::spawn(|| {
        std::thread::sleep(Duration::from_millis(300));
        sh("ip link set rail1 down");
    });
    let error = call(&mut channel, &read("slower", 0, 1 << 20), &mut dst, soon()).unwrap_err();
    println!("{error}");
    assert!(error.is_broken() && error.error().kind() == ErrorKind::Unavailable, "{error}");
    assert!(error.error().message().contains("its port went down"), "{error}");
    down.join().unwrap();
    drop(channel);
    // No connection is attempted over a port that is down.
    let error = pair.open().err().unwrap();
    println!("{error}");
    assert!(error.kind() == ErrorKind::Unavailable && error.message().contains("not ACTIVE"), "{error}");
    // The other rail goes on.
    let mut there = other.pool.try_alloc(1 << 20).unwrap();
    assert_eq!(call(&mut elsewhere, &read("data", 9, 1 << 20), &mut there, soon()), Ok(1 << 20));
    check(&there, 9);
    sh("ip link set rail1 up; ip addr replace fd77:1::1/64 dev rail1 nodad");
    let until = soon();
    let mut channel = loop {
        match pair.open() {
            Ok(channel) => break channel,
            Err(e) if Instant::now() > until => panic!("the rail does not come back: {e}"),
            Err(e) => println!("not yet: {e}"),
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    assert_eq!(call(&mut channel, &read("data", 5, 1 << 20), &mut dst, soon()), Ok(1 << 20));
    check(&dst, 5);
}

/// Targets of this process's file descriptors.
fn open_files() -> Vec<String> {
    let fds = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    fds.filter_map(|fd| Some(std::fs::read_link(fd.path()).ok()?.to_string_lossy().into_owned())).collect()
}

/// In a separate process: both devices are removed while in use, the last one too, and come back.
#[test]
#[ignore = "in_the_virtual_machine runs it in the guest"]
fn removed_devices_are_closed_while_the_process_lives() {
    let pairs = [Pair::on("10.77.0.1", config()), Pair::on("10.77.1.1", config())];
    let reads = |pair: &Pair| {
        let mut dst = pair.pool.try_alloc(1 << 20).unwrap();
        let until = soon();
        let mut channel = loop {
            match pair.open() {
                Ok(channel) => break channel,
                Err(e) if Instant::now() > until => panic!("the rail does not come back: {e}"),
                Err(e) => println!("not yet: {e}"),
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        assert_eq!(call(&mut channel, &read("data", 7, 1 << 20), &mut dst, soon()), Ok(1 << 20));
        check(&dst, 7);
        channel
    };
    for _ in 0..2 {
        for (device, pair) in [("rxe1", &pairs[1]), ("rxe0", &pairs[0])] {
            let mut channel = reads(pair);
            let mut dst = pair.pool.try_alloc(1 << 20).unwrap();
            let begun = Instant::now();
            let mut deleting = Command::new("rdma").args(["link", "delete", device]).spawn().unwrap();
            let error = loop {
                if let Err(error) = call(&mut channel, &read("data", 7, 1 << 20), &mut dst, soon()) {
                    break error;
                }
                assert!(Instant::now() < begun + Duration::from_secs(60), "{device} is in use although it is removed");
            };
            println!("{device}: {error}");
            drop(channel);
            while deleting.try_wait().unwrap().is_none() {
                let late = begun.elapsed() > Duration::from_secs(60);
                assert!(!late, "removing {device} blocks; open: {:?}", open_files());
                std::thread::sleep(Duration::from_millis(100));
            }
            println!("{device} was removed within {:?}", begun.elapsed());
        }
        let left = open_files();
        assert!(!left.iter().any(|path| path.contains("uverbs")), "{left:?}");
        sh("rdma link add rxe0 type rxe netdev rail0; rdma link add rxe1 type rxe netdev rail1");
    }
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    #[test]
    fn in_the_virtual_machine() {
        run_in_guest(GuestNet::Two, &["guest_", "last_", "removed_"]);
    }
}
