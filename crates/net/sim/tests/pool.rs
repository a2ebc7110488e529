//! The pool of channels, on simulated peers: who waits, who fails fast, what is counted, what is never handed out.

use parking_lot::{Condvar, Mutex};
use spurline_net_sim::{Fault, FaultPlan, FaultyConnector, Rates, SimNode};
use spurline_proto::{Capabilities, Hello, Read, Request, VolumeId, Welcome};
use spurline_transport::{
    Channel, ChannelPool, ConnState, Connector, PoolConfig, PoolState, Responder, Service, TransportKind,
};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Answers reads by their offset repeated; holds answers back while closed.
#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    opened: Condvar,
    inside: AtomicUsize,
    most: AtomicUsize,
}

impl Service for Gate {
    fn hello(&self, _: &ConnState, _: &Hello<'_>) -> Result<Welcome> {
        let (volume, node) = (VolumeId(4), "gate".to_owned());
        Ok(Welcome { version: 0, volume, block_size: 1, node, capabilities: Capabilities(0), ..Welcome::default() })
    }
    fn serve(&self, _: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()> {
        let Request::Read(Read { offset, len, .. }) = request else {
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
        responder.data(&[], &[&vec![offset as u8; len as usize]])
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

fn read(offset: u64, len: u32) -> Request<'static> {
    Request::Read(Read { volume: VolumeId(4), path: b"f", version: "v", size: 1 << 40, offset, len })
}

fn call(pool: &ChannelPool, offset: u64) -> Result<()> {
    let mut dst = [0xee; 300];
    let mut lease = pool.checkout(soon())?;
    assert_eq!(lease.welcome().volume, VolumeId(4));
    lease.call(&read(offset, 300), &mut Vec::new(), &mut dst, &mut |_| {}, soon())?;
    assert!(dst.iter().all(|byte| *byte == offset as u8), "bytes of another request");
    Ok(())
}

fn pool(connector: Arc<dyn Connector>, nconnect: usize) -> (ChannelPool, Arc<Stats>) {
    patient_pool(connector, nconnect, 20)
}

fn patient_pool(connector: Arc<dyn Connector>, nconnect: usize, retry_ms: u64) -> (ChannelPool, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    let config = PoolConfig {
        nconnect,
        retry_min: Duration::from_millis(retry_ms),
        retry_max: Duration::from_millis(2 * retry_ms),
        ..PoolConfig::default()
    };
    (ChannelPool::new(connector, "me", "src", config, Arc::clone(&stats)), stats)
}

fn quiet() -> Arc<FaultPlan> {
    Arc::new(FaultPlan::new(1, Rates::default()))
}

#[test]
fn connects_lazily_and_never_more_than_allowed() {
    let gate = Arc::new(Gate::default());
    let node = SimNode::new("n", Arc::clone(&gate) as _, quiet());
    let (pool, stats) = pool(node.connector(), 3);
    assert_eq!((node.connects(), pool.open(), pool.state()), (0, 0, PoolState::Unknown));
    for i in 0..10 {
        call(&pool, i).unwrap();
    }
    assert_eq!((node.connects(), stats.remotecache.connects.get()), (1, 1), "one caller needs one connection");
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
        // All three are in use: one more waits no longer than its own deadline.
        let error = pool.checkout(Instant::now() + Duration::from_millis(30)).err().unwrap();
        assert!(error.kind() == ErrorKind::Timeout && error.message().contains("--nconnect"), "{error}");
        gate.open();
        calls.into_iter().for_each(|call| call.join().unwrap().unwrap());
    });
    assert_eq!((node.connects(), pool.open(), gate.most.load(Ordering::SeqCst)), (3, 3, 3));
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
    assert!(node.connects() <= allowed, "{} connections, {allowed} allowed", node.connects());
    assert!(matches!(pool.state(), PoolState::Down { .. }));
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
        ChannelPool::new(connector, "me", "src", PoolConfig::default(), Arc::clone(&stats))
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

/// Refuses nobody and connects only when let.
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
            return Err(Error::new(ErrorKind::Unavailable, "nobody there"));
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
            assert_eq!(slow.attempts.load(Ordering::SeqCst), 1, "all asked a peer that nobody had reached yet");
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
    for fault in [Fault::Drop, Fault::Cut, Fault::Garbage] {
        call(&pool, 1).unwrap();
        let before = node.connects();
        let mut lease = pool.checkout(soon()).unwrap();
        plan.inject(fault);
        let mut dst = [0; 300];
        let mut again = || lease.call(&read(1, 300), &mut Vec::new(), &mut dst, &mut |_| {}, soon()).unwrap_err();
        assert!(again().is_broken() && again().is_broken(), "{fault:?}");
        drop(lease);
        call(&pool, 2).unwrap();
        assert_eq!(node.connects(), before + 1, "{fault:?}");
    }
    // A stalled call tells nothing about the other connections but that they may be as dead: they go too.
    // Not so one that nobody had the time to wait for.
    for (waits, open) in [(false, 1), (true, 0)] {
        let mut lease = pool.checkout(soon()).unwrap();
        drop(pool.checkout(soon()).unwrap());
        assert_eq!(pool.open(), 2);
        plan.inject(Fault::Stall);
        let deadline = if waits { Instant::now() + Duration::from_secs(2) } else { Instant::now() };
        let error = lease.call(&read(1, 9), &mut Vec::new(), &mut [0; 9], &mut |_| {}, deadline).unwrap_err();
        assert_eq!(error.error().kind(), ErrorKind::Timeout);
        drop(lease);
        assert_eq!((pool.open(), pool.state() == PoolState::Up), (open, !waits));
    }
    call(&pool, 3).unwrap();
    assert!(stats.remotecache.errors.get() >= 5);
}

/// Nobody is there, and nothing says so.
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
        |patience| PoolConfig { connect_timeout: patience, retry_min: soon() - Instant::now(), ..Default::default() };
    let pool = ChannelPool::new(Arc::new(Nowhere), "me", "src", config(Duration::from_secs(3600)), Arc::clone(&stats));
    for _ in 0..2 {
        let error = pool.checkout(Instant::now() + Duration::from_millis(2)).err().unwrap();
        assert_eq!((error.kind(), pool.state()), (ErrorKind::Timeout, PoolState::Unknown));
    }
    assert_eq!(stats.remotecache.peers_down.get(), 0);
    // Who waited for all the time that an attempt has says it for the others.
    let fresh = || ChannelPool::new(Arc::new(Nowhere), "me", "src", config(Duration::from_millis(60)), Arc::default());
    let is_down = |pool: &ChannelPool| matches!(pool.state(), PoolState::Down { .. });
    let pool = fresh();
    assert!(pool.checkout(soon()).is_err() && is_down(&pool));
    // So do many who did not.
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
    assert_eq!(pool.open(), 3, "they were in use just now");
    let used = pool.checkout(soon()).unwrap();
    pool.close_idle(Duration::ZERO);
    assert_eq!(pool.open(), 2, "one is in use, and one of the others stays");
    drop(used);
    pool.close_idle(Duration::ZERO);
    pool.close_idle(Duration::ZERO);
    assert_eq!((pool.open(), pool.state()), (1, PoolState::Up));
    call(&pool, 1).unwrap();
    assert_eq!((pool.open(), node.connects()), (1, 3));
    burst();
    assert_eq!((pool.open(), node.connects()), (3, 5));
}

/// Is there, and has a place for so many connections only.
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
    // What this caller learns, the next need not find out again: both wait for the one there is.
    for _ in 0..2 {
        let error = pool.checkout(Instant::now() + Duration::from_millis(20)).err().unwrap();
        assert_eq!((error.kind(), pool.state()), (ErrorKind::Timeout, PoolState::Up), "{error}");
        assert!(error.message().contains("no place for more"), "{error}");
        full.places.store(1, Ordering::SeqCst);
    }
    assert_eq!(full.refused.load(Ordering::SeqCst), 1);
    assert_eq!((stats.remotecache.peers_up.get(), stats.remotecache.peers_down.get()), (1, 0));
    full.places.store(0, Ordering::SeqCst);
    pool.sign_of_life(soon()).unwrap();
    // Somebody who owes an answer and has no place for the question whether it lives is not given up.
    pool.watch(Some(Duration::from_secs(1)));
    let owing = pool.owing(Duration::ZERO).unwrap();
    assert!(!pool.heard_of(owing, &pool.sign_of_life(soon())));
    drop(only);
    call(&pool, 1).unwrap();
    assert_eq!(node.connects(), 1);
    // Whoever has no channel at all can't go on.
    let (other, stats) = patient_pool(full, 8, 60_000);
    assert_eq!(other.checkout(soon()).err().unwrap().kind(), ErrorKind::Throttled);
    assert!(matches!(other.state(), PoolState::Down { .. }) && stats.remotecache.peers_down.get() == 1);
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
    assert_eq!((node.connects(), pool.state()), (1, PoolState::Up));
    // What is only asked ahead waits for nobody, and a place that there is in the end is found by those who wait.
    let full = Full::new(&node, 1);
    let (pool, _) = patient_pool(Arc::clone(&full) as _, 8, 20);
    let only = pool.checkout(soon()).unwrap();
    let late = Instant::now() + Duration::from_secs(60);
    assert!(pool.begin(|_| read(1, 9), late).is_none() && Instant::now() < late);
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
    assert_eq!((node.connects(), pool.open()), (3, 2));
    drop(only);
}

#[test]
fn a_peer_that_only_closes_is_not_taken_for_a_full_one_for_ever() {
    let node = SimNode::new("n", Arc::new(Gate::default()), quiet());
    let full = Full::new(&node, 1);
    let (pool, _) = patient_pool(Arc::clone(&full) as _, 8, 60_000);
    let closed = || {
        (0..3).for_each(|_| pool.sign_of_life(soon()).unwrap());
        assert_eq!(pool.sign_of_life(soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    };
    call(&pool, 1).unwrap();
    closed();
    // An answer over the connection there is says that somebody is there, and so does one to the question itself.
    call(&pool, 2).unwrap();
    closed();
    full.places.store(1, Ordering::SeqCst);
    pool.sign_of_life(soon()).unwrap();
    closed();
    pool.watch(Some(Duration::from_secs(1)));
    let only = pool.checkout(soon()).unwrap();
    let owing = pool.owing(Duration::ZERO).unwrap();
    assert!(pool.heard_of(owing, &pool.sign_of_life(soon())));
    assert!(matches!(pool.state(), PoolState::Down { .. }));
    drop(only);
}

#[test]
fn under_faults_every_success_is_right() {
    let seed = 20_261_121;
    println!("seed {seed}");
    let rates =
        Rates { drop: 40, cut: 60, garbage: 30, stall: 5, twice: 20, delay: 50, max_delay: Duration::from_millis(2) };
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
        // And without faults everything works again.
        plan.set_rates(Rates::default());
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
