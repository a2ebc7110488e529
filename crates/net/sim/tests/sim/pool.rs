//! The channel pool on simulated peers: waiting, failing fast, counters, and channels that must never be handed out.

use parking_lot::{Condvar, Mutex};
use spurline_net_sim::{FaultPlan, FaultRates, FaultyConnector, SimFault, SimNode};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{
    Channel, ConnState, Connector, DemandConfig, DemandPool, PeerReach, Responder, Service, TransportKind,
};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Answers reads with their offset repeated; delays answers while closed.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    inside: AtomicUsize,
    most: AtomicUsize,
}

impl Service for Gate {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        let (volume, node) = (VolumeId(4), "gate".to_owned());
        Ok(WelcomeAnswer { version: 0, volume, block_size: 1, node, ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        let NodeRequest::Read(ReadRequest { offset, len, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads only"));
        };
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(inside, Ordering::SeqCst);
        let mut closed = self.closed.lock();
        while *closed {
            self.opened.wait(&mut closed);
        }
        drop(closed);
        self.inside.fetch_sub(1, Ordering::SeqCst);
        responder.send_data(&[], &[&vec![offset as u8; len as usize]])
    }
}

impl Gate {
    fn open(&self) {
        *self.closed.lock() = false;
        self.opened.notify_all();
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn read(offset: u64, len: u32) -> NodeRequest<'static> {
    NodeRequest::Read(ReadRequest {
        volume: VolumeId(4),
        path: b"f",
        version: "v",
        size: 1 << 40,
        offset,
        len,
        flags: ReadFlags::NONE,
    })
}

fn call(pool: &DemandPool, offset: u64) -> Result<()> {
    let mut dst = [0xee; 300];
    let mut lease = pool.checkout(soon())?;
    assert_eq!(lease.welcome().volume, VolumeId(4));
    lease.call(&read(offset, 300), &mut Vec::new(), &mut dst, &mut |_| {}, soon())?;
    assert!(dst.iter().all(|byte| *byte == offset as u8), "bytes of another request");
    Ok(())
}

fn pool(connector: Arc<dyn Connector>, nconnect: usize) -> (DemandPool, Arc<Stats>) {
    patient_pool(connector, nconnect, 20)
}

fn patient_pool(connector: Arc<dyn Connector>, nconnect: usize, retry_ms: u64) -> (DemandPool, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let config = DemandConfig {
        nconnect,
        retry_min: Duration::from_millis(retry_ms),
        retry_max: Duration::from_millis(2 * retry_ms),
        ..DemandConfig::default()
    };
    (DemandPool::new(connector, "me", "src", config, Arc::clone(&stats)), stats)
}

fn quiet() -> Arc<FaultPlan> {
    Arc::new(FaultPlan::new(1, FaultRates::default()))
}

#[test]
fn connects_lazily_and_never_more_than_allowed() {
    let gate = Arc::new(Gate::default());
    let node = SimNode::new("n", Arc::clone(&gate) as _, quiet());
    let (pool, stats) = pool(node.connector(), 3);
    assert_eq!((node.connect_count(), pool.open_count(), pool.reach()), (0, 0, PeerReach::Unknown));
    for i in 0..10 {
        call(&pool, i).unwrap();
    }
    assert_eq!((node.connect_count(), stats.remotecache.connects.get()), (1, 1), "one caller needs one connection");
    assert_eq!(stats.remotecache.peers_up.get(), 1);
    *gate.closed.lock() = true;
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8)
            .map(|i| {
                scope.spawn({
                    let pool = &pool;
                    move || call(pool, i)
                })
            })
            .collect();
        while gate.most.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        // All three are in use: a further call waits no longer than its own deadline.
        let error = pool.checkout(Instant::now() + Duration::from_millis(30)).err().unwrap();
        assert!(error.kind() == ErrorKind::Timeout && error.message().contains("--nconnect"), "{error}");
        gate.open();
        calls.into_iter().for_each(|call| call.join().unwrap().unwrap());
    });
    assert_eq!((node.connect_count(), pool.open_count(), gate.most.load(Ordering::SeqCst)), (3, 3, 3));
    assert_eq!(stats.remotecache.ops.get(), 18);
    drop(pool);
    assert_eq!(stats.remotecache.peers_up.get(), 0);
}

#[test]
fn a_dead_peer_is_asked_rarely_and_found_again() {
    let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
    let (pool, stats) = pool(node.connector(), 4);
    call(&pool, 1).unwrap();
    node.kill();
    let start = Instant::now();
    let mut failed = 0;
    std::thread::scope(|scope| {
        let calls: Vec<_> = (0..8)
            .map(|_| {
                let pool = &pool;
                scope.spawn(move || {
                    let mut failed = 0;
                    for i in 0..200 {
                        let error = call(pool, i).unwrap_err();
                        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
                        failed += 1;
                    }
                    failed
                })
            })
            .collect();
        calls.into_iter().for_each(|call| failed += call.join().unwrap());
    });
    assert_eq!(failed, 1600);
    // One attempt per pause at most (20 ms, then 40), one connection from before, two in flight at the edges.
    let allowed = 3 + start.elapsed().as_millis() as u64 / 20;
    assert!(node.connect_count() <= allowed, "{} connections, {allowed} allowed", node.connect_count());
    assert!(matches!(pool.reach(), PeerReach::Down { .. }));
    assert_eq!((stats.remotecache.peers_up.get(), stats.remotecache.peers_down.get()), (0, 1));
    node.start();
    while call(&pool, 2).is_err() {
        assert!(start.elapsed() < Duration::from_secs(20), "the peer is back and was not found");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!((stats.remotecache.peers_up.get(), stats.remotecache.peers_down.get()), (1, 0));
}

#[test]
fn a_peer_counts_once_however_many_pools_ask_it_and_is_up_while_one_of_them_is() {
    let (node, dead) =
        (SimNode::new("n", Arc::new(Gate::default()), quiet()), SimNode::new("n", Arc::new(Gate::default()), quiet()));
    dead.kill();
    let stats = Arc::new(Stats::default());
    let of = |connector: Arc<dyn Connector>| {
        DemandPool::new(connector, "me", "src", DemandConfig::default(), Arc::clone(&stats))
    };
    let shown = || {
        let gauges = &stats.remotecache;
        (stats.paths.to_json()[0]["up"].as_u64(), gauges.peers_up.get(), gauges.peers_down.get())
    };
    let (first, second, third) = (of(node.connector()), of(node.connector()), of(dead.connector()));
    assert_eq!(shown(), (Some(0), 0, 0));
    call(&first, 1).unwrap();
    call(&second, 2).unwrap();
    call(&third, 3).unwrap_err();
    assert_eq!(shown(), (Some(1), 1, 0));
    drop(first);
    assert_eq!(shown(), (Some(1), 1, 0));
    drop(second);
    assert_eq!(shown(), (Some(0), 0, 1));
    drop(third);
    assert_eq!(shown(), (Some(0), 0, 0), "of a node that left nothing is said");
}

/// Accepts every connection, but only when released.
struct Slow {
    inner: Arc<dyn Connector>,
    attempts: AtomicUsize,
    go: AtomicBool,
    fail: AtomicBool,
}

impl Connector for Slow {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        self.attempts.fetch_add(1, Ordering::SeqCst);
        while !self.go.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.fail.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "no listener"));
        }
        self.inner.connect(deadline)
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }
    fn peer(&self) -> &str {
        "slow"
    }
}

#[test]
fn one_attempt_answers_for_all_who_wait() {
    for fail in [false, true] {
        let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
        let slow = Arc::new(Slow {
            inner: node.connector(),
            attempts: AtomicUsize::new(0),
            go: AtomicBool::new(false),
            fail: AtomicBool::new(fail),
        });
        let (pool, _) = patient_pool(Arc::clone(&slow) as _, 8, 60_000);
        std::thread::scope(|scope| {
            let calls: Vec<_> = (0..8)
                .map(|i| {
                    scope.spawn({
                        let pool = &pool;
                        move || call(pool, i)
                    })
                })
                .collect();
            while slow.attempts.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(slow.attempts.load(Ordering::SeqCst), 1, "all tried a peer without any connection");
            slow.go.store(true, Ordering::SeqCst);
            for call in calls {
                let result = call.join().unwrap();
                assert_eq!(result.is_err(), fail, "{result:?}");
            }
        });
        if fail {
            assert_eq!(slow.attempts.load(Ordering::SeqCst), 1);
        }
    }
}

#[test]
fn broken_channels_are_not_handed_out_again() {
    let plan = quiet();
    let node = SimNode::new("n", Arc::new(Gate::default()), Arc::clone(&plan));
    let (pool, stats) = pool(node.connector(), 2);
    for fault in [SimFault::Drop, SimFault::Cut, SimFault::Garbage] {
        call(&pool, 1).unwrap();
        let before = node.connect_count();
        let mut lease = pool.checkout(soon()).unwrap();
        plan.inject_fault(fault);
        let mut dst = [0; 300];
        let mut again = || lease.call(&read(1, 300), &mut Vec::new(), &mut dst, &mut |_| {}, soon()).unwrap_err();
        assert!(again().is_broken() && again().is_broken(), "{fault:?}");
        drop(lease);
        call(&pool, 2).unwrap();
        assert_eq!(node.connect_count(), before + 1, "{fault:?}");
    }
    // A call that timed out closes the idle connections, which may be dead as well. A call without time for an answer
    // does not.
    for (waits, open) in [(false, 1), (true, 0)] {
        let mut lease = pool.checkout(soon()).unwrap();
        drop(pool.checkout(soon()).unwrap());
        assert_eq!(pool.open_count(), 2);
        plan.inject_fault(SimFault::Stall);
        let deadline = if waits { Instant::now() + Duration::from_secs(2) } else { Instant::now() };
        let error = lease.call(&read(1, 9), &mut Vec::new(), &mut [0; 9], &mut |_| {}, deadline).unwrap_err();
        assert_eq!(error.error().kind(), ErrorKind::Timeout);
        drop(lease);
        assert_eq!((pool.open_count(), pool.reach() == PeerReach::Up), (open, !waits));
    }
    call(&pool, 3).unwrap();
    assert!(stats.remotecache.errors.get() >= 5);
}

/// A peer that never answers.
struct Nowhere;

impl Connector for Nowhere {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        Err(Error::new(ErrorKind::Timeout, "no answer to the connection attempt"))
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }
    fn peer(&self) -> &str {
        "nowhere"
    }
}

#[test]
fn a_caller_without_time_does_not_take_a_peer_down_for_all() {
    let stats = Arc::new(Stats::default());
    let config =
        |patience| DemandConfig { connect_timeout: patience, retry_min: soon() - Instant::now(), ..Default::default() };
    let pool = DemandPool::new(Arc::new(Nowhere), "me", "src", config(Duration::from_secs(3600)), Arc::clone(&stats));
    for _ in 0..2 {
        let error = pool.checkout(Instant::now() + Duration::from_millis(2)).err().unwrap();
        assert_eq!((error.kind(), pool.reach()), (ErrorKind::Timeout, PeerReach::Unknown));
    }
    assert_eq!(stats.remotecache.peers_down.get(), 0);
    // A caller that waited for the whole timeout marks the peer as down for all.
    let fresh = || DemandPool::new(Arc::new(Nowhere), "me", "src", config(Duration::from_millis(60)), Arc::default());
    let is_down = |pool: &DemandPool| matches!(pool.reach(), PeerReach::Down { .. });
    let pool = fresh();
    assert!(pool.checkout(soon()).is_err() && is_down(&pool));
    // So do many callers with short deadlines together.
    let (pool, until) = (fresh(), soon());
    while !is_down(&pool) {
        assert!(pool.checkout(Instant::now() + Duration::from_millis(20)).is_err() && Instant::now() < until);
    }
}

#[test]
fn idle_channels_are_closed_but_for_one() {
    let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
    let (pool, _) = pool(node.connector(), 3);
    let burst = || drop([(); 3].map(|()| pool.checkout(soon()).unwrap()));
    burst();
    pool.close_idle(Duration::from_secs(3600));
    assert_eq!(pool.open_count(), 3, "they were in use just now");
    let used = pool.checkout(soon()).unwrap();
    pool.close_idle(Duration::ZERO);
    assert_eq!(pool.open_count(), 2, "one is in use, and one of the others stays");
    drop(used);
    pool.close_idle(Duration::ZERO);
    pool.close_idle(Duration::ZERO);
    assert_eq!((pool.open_count(), pool.reach()), (1, PeerReach::Up));
    call(&pool, 1).unwrap();
    assert_eq!((pool.open_count(), node.connect_count()), (1, 3));
    burst();
    assert_eq!((pool.open_count(), node.connect_count()), (3, 5));
}

/// A peer that accepts a limited number of connections.
struct Full {
    inner: Arc<dyn Connector>,
    places: AtomicUsize,
    refused: AtomicUsize,
}

impl Full {
    fn new(node: &SimNode, places: usize) -> Arc<Full> {
        Arc::new(Full { inner: node.connector(), places: AtomicUsize::new(places), refused: AtomicUsize::new(0) })
    }
}

impl Connector for Full {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let one_less = |places: usize| places.checked_sub(1);
        match self.places.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less) {
            Ok(_) => self.inner.connect(deadline),
            Err(_) => {
                self.refused.fetch_add(1, Ordering::SeqCst);
                Err(Error::new(ErrorKind::Throttled, "no place"))
            }
        }
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }
    fn peer(&self) -> &str {
        "full"
    }
}

#[test]
fn a_peer_without_a_place_for_more_is_no_dead_one() {
    let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
    let full = Full::new(&node, 1);
    let (pool, stats) = patient_pool(Arc::clone(&full) as _, 8, 60_000);
    let only = pool.checkout(soon()).unwrap();
    // After this caller's refusal, the next ones do not try again: all wait for the existing connection.
    for _ in 0..2 {
        let error = pool.checkout(Instant::now() + Duration::from_millis(20)).err().unwrap();
        assert_eq!((error.kind(), pool.reach()), (ErrorKind::Timeout, PeerReach::Up), "{error}");
        assert!(error.message().contains("at its connection limit"), "{error}");
        full.places.store(1, Ordering::SeqCst);
    }
    assert_eq!(full.refused.load(Ordering::SeqCst), 1);
    assert_eq!((stats.remotecache.peers_up.get(), stats.remotecache.peers_down.get()), (1, 0));
    full.places.store(0, Ordering::SeqCst);
    pool.send_heartbeat(soon()).unwrap();
    // An overdue peer without a free slot for the heartbeat counts as alive.
    pool.set_monitored(Some(Duration::from_secs(1)));
    let owing = pool.overdue_peer(Duration::ZERO).unwrap();
    assert!(!pool.heartbeat_ended(owing, &pool.send_heartbeat(soon())));
    drop(only);
    call(&pool, 1).unwrap();
    assert_eq!(node.connect_count(), 1);
    // A caller without any channel fails.
    let (other, stats) = patient_pool(full, 8, 60_000);
    assert_eq!(other.checkout(soon()).err().unwrap().kind(), ErrorKind::Throttled);
    assert!(matches!(other.reach(), PeerReach::Down { .. }) && stats.remotecache.peers_down.get() == 1);
}

#[test]
fn who_finds_out_that_a_peer_is_full_waits_for_a_channel_that_is_in_use() {
    let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
    let full = Full::new(&node, 1);
    let (pool, _) = patient_pool(Arc::clone(&full) as _, 8, 60_000);
    let only = pool.checkout(soon()).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| call(&pool, 1));
        while full.refused.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        drop(only);
        waiting.join().unwrap().unwrap();
    });
    assert_eq!((node.connect_count(), pool.reach()), (1, PeerReach::Up));
    // A pipelined request waits for no slot, and waiting calls use a slot that becomes free.
    let full = Full::new(&node, 1);
    let (pool, _) = patient_pool(Arc::clone(&full) as _, 8, 20);
    let only = pool.checkout(soon()).unwrap();
    let late = Instant::now() + Duration::from_secs(60);
    assert!(pool.begin_call(|_| read(1, 9), late).is_none() && Instant::now() < late);
    let before = full.refused.load(Ordering::SeqCst);
    assert_eq!(before, 1);
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..4)
            .map(|i| {
                scope.spawn({
                    let pool = &pool;
                    move || call(pool, i)
                })
            })
            .collect();
        while full.refused.load(Ordering::SeqCst) < before + 2 {
            std::thread::yield_now();
        }
        full.places.store(1, Ordering::SeqCst);
        waiting.into_iter().for_each(|waiting| waiting.join().unwrap().unwrap());
    });
    assert_eq!((node.connect_count(), pool.open_count()), (3, 2));
    drop(only);
}

#[test]
fn a_peer_that_only_closes_is_not_taken_for_a_full_one_for_ever() {
    let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
    let full = Full::new(&node, 1);
    let (pool, _) = patient_pool(Arc::clone(&full) as _, 8, 60_000);
    let closed = || {
        (0..3).for_each(|_| pool.send_heartbeat(soon()).unwrap());
        assert_eq!(pool.send_heartbeat(soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    };
    call(&pool, 1).unwrap();
    closed();
    // An answer over the existing connection proves the peer alive, and so does an answer to the heartbeat.
    call(&pool, 2).unwrap();
    closed();
    full.places.store(1, Ordering::SeqCst);
    pool.send_heartbeat(soon()).unwrap();
    closed();
    pool.set_monitored(Some(Duration::from_secs(1)));
    let only = pool.checkout(soon()).unwrap();
    let owing = pool.overdue_peer(Duration::ZERO).unwrap();
    assert!(pool.heartbeat_ended(owing, &pool.send_heartbeat(soon())));
    assert!(matches!(pool.reach(), PeerReach::Down { .. }));
    drop(only);
}

#[test]
fn under_faults_every_success_is_right() {
    let seed = 20_261_121;
    println!("seed {seed}");
    let rates = FaultRates {
        drop: 40,
        cut: 60,
        garbage: 30,
        stall: 5,
        twice: 20,
        delay: 50,
        max_delay: Duration::from_millis(2),
    };
    for decorated in [false, true] {
        let plan = Arc::new(FaultPlan::new(seed, rates));
        let gate = Arc::new(Gate::default());
        let inner = if decorated { quiet() } else { Arc::clone(&plan) };
        let node = SimNode::new("n", gate, inner);
        let connector: Arc<dyn Connector> = if decorated {
            Arc::new(FaultyConnector::new(node.connector(), Arc::clone(&plan)))
        } else {
            node.connector()
        };
        let (pool, _) = pool(connector, 4);
        let right = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for thread in 0..6u64 {
                let (pool, right) = (&pool, &right);
                scope.spawn(move || {
                    for i in 0..150u64 {
                        let deadline = Instant::now() + Duration::from_millis(200);
                        let offset = thread * 150 + i;
                        let mut dst = [0xee; 700];
                        let mut landed = 0;
                        let Ok(mut lease) = pool.checkout(deadline) else {
                            std::thread::sleep(Duration::from_millis(2));
                            continue;
                        };
                        let request = read(offset, 700);
                        let result = lease.call(&request, &mut Vec::new(), &mut dst, &mut |n| landed = n, deadline);
                        assert!(dst[..landed].iter().all(|byte| *byte == offset as u8), "reported bytes are wrong");
                        if let Ok(answer) = result {
                            assert_eq!((answer.payload_len, landed), (700, 700));
                            right.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert!(right.into_inner() > 100, "the pool does not get over faults");
        // Without faults everything works again.
        plan.set_rates(FaultRates::default());
        let start = Instant::now();
        while call(&pool, 1).is_err() {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_millis(5));
        }
        for i in 0..50 {
            call(&pool, i).unwrap();
        }
    }
}
