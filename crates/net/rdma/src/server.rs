//! The node's side: a listener on each rail, the connections, the limit of threads. Requests are handled in `worker`.
//!
//! Idle connections are parked in an epoll set by the descriptors of the completion channels, each armed for a single event. The
//! worker thread that takes the event owns the connection until the next parking (see `polled_set`).

use crate::depths::NODE;
use crate::polled_set::{PolledFlag, ring_bell};
use crate::rail::{OpenRail, RdmaRail, RdmaTimeouts};
use crate::session::{FrameLimits, RdmaSession, own_terms, post_buffers};
use crate::worker::serve_conn;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use spurline_proto::rdma::ConnectTerms;
use spurline_transport::{
    ConnState, ConnectionEndpoints, ConnectionSlots, PooledServer, ServeOutcome, Service, SlotHolder, SlotOffer,
    TransportKind, WorkerPool,
};
use spurline_trust::{RefusalLog, RefusalReason, Trust};
use spurline_types::stats::Metric;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_verbs::{CmChannel, CmEvent, CmEventKind, CmId, MemoryRegion, QueuePair};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A longer request loses the worker's permit: longer than small answers take, and the limit of the delay behind a blocking
/// request.
const LONG_REQUEST_TIME: Duration = Duration::from_millis(2);
/// Queue length of connect requests: all mounts reconnect at once when a node is back. The kernel's limit.
const CONNECT_BACKLOG: i32 = 1024;
/// Interval between attempts to listen again on a rail.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Wait for a new connection's memory, which other connections may be about to return.
const MEMORY_WAIT: Duration = Duration::from_millis(100);

/// Limits of a server.
#[derive(Debug, Clone)]
pub struct RdmaServerConfig {
    /// Maximum of connections; further connections are refused. Each takes [`crate::connection_bytes`] of the pool. An eighth is
    /// reserved for connections without data requests: each path has such a connection for heartbeats.
    pub max_connections: usize,
    /// How to allow more connections, for the message at the limit.
    pub more_connections: String,
    /// Maximum of connections before the handshake; a further connection closes the oldest, so that unauthenticated peers cannot
    /// take the memory and slots of readers.
    pub max_pending_handshakes: usize,
    /// Maximum of worker threads, and so of requests in progress. Threads start on demand and end when idle. Another thread
    /// answers handshakes and heartbeats when all are busy.
    pub max_workers: usize,
    /// Deadline of a connection's handshake, and of completing a request once begun.
    pub request_timeout: Duration,
    /// A reader that accepts no part of an answer for this long loses the connection. Long answers get a second per MiB in
    /// addition.
    pub send_timeout: Duration,
    /// Time for which a worker waits for a connection's next request before parking.
    pub linger: Duration,
    /// A connection idle for this long has the reader's NIC probed: a reader that lost power does not disconnect.
    pub idle_probe: Duration,
    /// Time limits of the rails' connections.
    pub patience: RdmaTimeouts,
    /// Credentials required of peers.
    pub trust: Arc<Trust>,
    /// Whether writes carry immediate data where the device supports that, which is faster; iWARP does not.
    pub announces: bool,
}

impl Default for RdmaServerConfig {
    fn default() -> Self {
        RdmaServerConfig {
            max_connections: 4096,
            more_connections: "lower --nconnect of the mounts".into(),
            max_pending_handshakes: 256,
            max_workers: 256,
            request_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
            linger: Duration::from_millis(5),
            idle_probe: Duration::from_secs(30),
            patience: RdmaTimeouts::default(),
            trust: Trust::without_checks(),
            announces: true,
        }
    }
}

/// A connection.
pub(crate) struct RdmaConn {
    pub state: ConnState,
    pub session: Mutex<RdmaSession>,
    pub memory: Arc<MemoryRegion>,
    pub max_message: usize,
    /// The rail's NUMA node.
    pub numa_node: Option<u32>,
    /// Whether writes carry immediate data.
    pub announces: bool,
    pub breaker: spurline_verbs::QueuePairBreaker,
    /// Value of [`RdmaServerState::events`] when a worker last waited for a request here.
    pub events_seen: AtomicU64,
    /// An eventfd that signals the connection to a worker, until a worker has taken the connection.
    pub bell: Mutex<Option<OwnedFd>>,
    /// Whether a worker polls the connection.
    pub polled: PolledFlag,
    opened: Instant,
}

// No connection is evicted for another: the end of an idle connection may mean the end of the path, and mounts close unused
// connections.
impl SlotHolder for RdmaConn {
    fn conn_state(&self) -> &ConnState {
        &self.state
    }
}

impl RdmaConn {
    /// Whether the handshake is overdue.
    pub fn is_late(&self, config: &RdmaServerConfig) -> bool {
        self.state.peer_name().is_none() && self.opened.elapsed() > config.request_timeout
    }

    /// Records that a worker took an event of the connection.
    pub fn note_event(&self, shared: &RdmaServerState) {
        drop(self.bell.lock().take());
        shared.events.fetch_add(1, Ordering::Relaxed);
    }

    /// How long an answer may wait for the reader. Before the handshake the reader has room for every answer, and
    /// gets no further worker time.
    pub fn send_patience(&self, config: &RdmaServerConfig, greets: bool) -> Duration {
        match (self.state.peer_name(), greets) {
            (Some(_), _) => config.send_timeout,
            (None, true) => config.send_timeout.min(config.request_timeout.saturating_sub(self.opened.elapsed())),
            (None, false) => Duration::ZERO,
        }
    }
}

/// State shared by acceptor, workers and the handle.
pub(crate) struct RdmaServerState {
    pub config: RdmaServerConfig,
    pub service: Arc<dyn Service>,
    pub stats: Arc<Stats>,
    /// Number of connection events taken by workers.
    pub events: AtomicU64,
    refusals: RefusalLog,
    workers: WorkerPool,
    places: ConnectionSlots<RdmaConn>,
}

/// Events that end the wait of a parked connection.
pub(crate) const PARKED: EventFlags = EventFlags::IN;

impl PooledServer for RdmaServerState {
    type Conn = RdmaConn;

    fn worker_pool(&self) -> &WorkerPool {
        &self.workers
    }
    fn connection_slots(&self) -> &ConnectionSlots<RdmaConn> {
        &self.places
    }
    fn serve_connection(&self, conn: &Arc<RdmaConn>, _inbox: &mut [u8], control_only: bool) -> ServeOutcome {
        serve_conn(self, conn, control_only)
    }
    fn refusals(&self) -> &RefusalLog {
        &self.refusals
    }
    fn remove_connection(&self, conn: &RdmaConn) {
        conn.breaker.break_now("the node closed it");
        if self.places.remove_connection(&conn.state) && conn.state.peer_name().is_some() {
            self.service.connection_closed(&conn.state);
        }
    }
}

/// A running server; a drop stops the server.
pub struct RdmaServer {
    shared: Arc<RdmaServerState>,
    local: Vec<SocketAddr>,
    acceptor: Option<JoinHandle<()>>,
}

impl RdmaServer {
    /// Listens on the address of every rail, at `port`, and serves at once. With port 0 the kernel chooses a port for the first
    /// rail; the others use the same.
    ///
    /// # Errors
    /// When a rail's device is gone, the port is in use, or there is no rail.
    pub fn bind(
        rails: &[Arc<RdmaRail>],
        port: u16,
        service: Arc<dyn Service>,
        config: RdmaServerConfig,
        stats: Arc<Stats>,
    ) -> Result<Self> {
        let Some(first) = rails.first() else {
            return Err(Error::new(ErrorKind::Invalid, "no rail to listen on"));
        };
        let channel = CmChannel::new(first.verbs())?;
        // At least two, so that one may wait on a connection while the other takes further events.
        let at_once = std::thread::available_parallelism().map_or(1, usize::from).max(2);
        let workers = WorkerPool::new("rdma", config.max_workers, at_once, LONG_REQUEST_TIME)
            .map_err(|e| Error::io("can't set up the RDMA server", &e.into()))?;
        let refusals = RefusalLog::new(Arc::clone(&stats));
        let gauges: [fn(&Stats) -> &Metric; 2] =
            [|stats| &stats.rdma.connections, |stats| &stats.rdma.connections_limit];
        let most = config.max_connections;
        let ungreeted = config.max_pending_handshakes;
        let places = ConnectionSlots::new(most, ungreeted, &config.more_connections, Arc::clone(&stats), gauges);
        let shared =
            Arc::new(RdmaServerState { config, service, stats, events: AtomicU64::new(0), refusals, workers, places });
        let mut acceptor = RdmaAcceptor {
            shared: Arc::clone(&shared),
            listeners: Vec::new(),
            channel,
            by_key: HashMap::new(),
            no_memory_until: None,
            next_id: WorkerPool::FIRST_ID,
        };
        let mut port = port;
        for rail in rails {
            let mut listener = RailListener::new(rail, SocketAddr::new(rail.ip(), port));
            listener.listen(&acceptor.channel)?;
            port = listener.at.port();
            acceptor.listeners.push(listener);
        }
        let local = acceptor.listeners.iter().map(|l| l.at).collect();
        WorkerPool::spawn_worker(&shared)
            .and_then(|()| WorkerPool::spawn_control(&shared))
            .map_err(|e| Error::io("can't start a worker thread", &e))?;
        let mut server = RdmaServer { shared, local, acceptor: None };
        let thread = std::thread::Builder::new().name("rdma-accept".into()).spawn(move || acceptor.run_loop());
        server.acceptor = Some(thread.map_err(|e| Error::io("can't start the accepting thread", &e))?);
        Ok(server)
    }

    /// The bound addresses, in the order of the rails.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.local
    }

    /// Current number of connections.
    pub fn connections(&self) -> usize {
        self.shared.places.len()
    }

    /// Current number of worker threads.
    pub fn workers(&self) -> usize {
        self.shared.workers.workers()
    }

    /// Stops, waits until `deadline` for requests in progress, and ends all connections. Returns whether all threads
    /// ended.
    pub fn join(mut self, deadline: Instant) -> bool {
        self.stop(deadline)
    }

    fn stop(&mut self, deadline: Instant) -> bool {
        self.shared.workers.stop();
        if let Some(acceptor) = self.acceptor.take() {
            // The thread wakes up several times a second by itself.
            let _ = acceptor.join();
        }
        let ended = self.shared.workers.join(deadline);
        for conn in &self.shared.places.drain() {
            match conn.session.try_lock() {
                Some(mut session) => session.pair.disconnect(),
                None => conn.breaker.break_now("the node stops"),
            }
            if conn.state.peer_name().is_some() {
                self.shared.service.connection_closed(&conn.state);
            }
        }
        ended
    }
}

impl Drop for RdmaServer {
    fn drop(&mut self) {
        self.stop(Instant::now() + Duration::from_secs(1));
    }
}

/// A listener on a rail, which listens again when a removed device is back.
struct RailListener {
    rail: Arc<RdmaRail>,
    at: SocketAddr,
    listening: Option<(CmId, Arc<OpenRail>)>,
    /// The thread that opens the rail's device.
    opening: Option<JoinHandle<Result<()>>>,
    tried: Instant,
    /// The last logged reason for not listening.
    last_error: Option<String>,
}

impl RailListener {
    fn new(rail: &Arc<RdmaRail>, at: SocketAddr) -> Self {
        RailListener {
            rail: Arc::clone(rail),
            at,
            listening: None,
            opening: None,
            tried: Instant::now(),
            last_error: None,
        }
    }

    /// Listens again when the device is back, or the address moved. A separate thread registers the memory: that
    /// takes seconds, while other rails must accept.
    fn listen_again(&mut self, channel: &Arc<CmChannel>) {
        if self.tried.elapsed() < RETRY_AFTER {
            return;
        }
        if let Some((_, open)) = &self.listening {
            self.tried = Instant::now();
            if let Err(moved) = self.rail.forget_if_moved(open) {
                tracing::warn!("{moved}; listening there");
                self.listening = None;
            }
            return;
        }
        let result = match self.opening.take() {
            Some(opening) if !opening.is_finished() => {
                self.opening = Some(opening);
                return;
            }
            Some(opening) => opening.join().unwrap_or(Ok(())),
            None if self.rail.is_open() => self.rail.usable_device().and_then(|_| self.listen(channel)),
            None => {
                let rail = Arc::clone(&self.rail);
                let name = format!("open-{}", rail.name());
                let opening = std::thread::Builder::new().name(name).spawn(move || rail.open_device().map(drop));
                opening
                    .map(|opening| self.opening = Some(opening))
                    .map_err(|e| Error::io("can't start the thread that opens the device", &e))
            }
        };
        if self.listening.is_some() {
            tracing::info!("rail {}: listening again on {}", self.rail.name(), self.at);
            self.last_error = None;
        } else if let Err(error) = result {
            self.tried = Instant::now();
            let why = error.to_string();
            if self.last_error.as_ref() != Some(&why) {
                tracing::warn!("rail {}: listening there is not possible yet: {why}", self.rail.name());
                self.last_error = Some(why);
            }
        }
    }

    fn listen(&mut self, channel: &Arc<CmChannel>) -> Result<()> {
        let open = self.rail.open_device()?;
        let mut id = channel.create_id()?;
        self.at = id
            .listen(self.at, CONNECT_BACKLOG)
            .map_err(|e| Error::from(e).context(format_args!("rail {}", self.rail.name())))?;
        self.listening = Some((id, open));
        Ok(())
    }

    fn has_key(&self, key: usize) -> bool {
        self.listening.as_ref().is_some_and(|(id, _)| id.key() == key)
    }
}

/// The peer's address, for logs.
fn peer_text(addresses: &(Option<SocketAddr>, Option<SocketAddr>)) -> String {
    addresses.1.map_or_else(|| "?".into(), |addr| addr.to_string())
}

/// Closes a connection before the handshake, to make room for another.
fn evict_stranger(shared: &RdmaServerState, conn: &RdmaConn) {
    let why = "too many connections have not completed their handshake, and this is the oldest";
    shared.refusals.record_refusal(&conn.state.endpoints().peer, RefusalReason::Limit, &why);
    if let Some(mut session) = conn.session.try_lock() {
        session.pair.disconnect();
    }
    shared.remove_connection(conn);
}

/// Handles connection events, and periodically closes overdue connections.
struct RdmaAcceptor {
    shared: Arc<RdmaServerState>,
    channel: Arc<CmChannel>,
    listeners: Vec<RailListener>,
    /// Connection ids by the keys of rdma_cm ids.
    by_key: HashMap<usize, u64>,
    /// Deadline of the wait for memory, when the pool had none for a connection.
    no_memory_until: Option<Instant>,
    next_id: u64,
}

impl RdmaAcceptor {
    fn run_loop(mut self) {
        let sweep =
            (self.shared.config.request_timeout / 4).clamp(Duration::from_millis(10), Duration::from_millis(250));
        let mut swept = Instant::now();
        while !self.shared.workers.stopping() {
            match self.channel.next_event(swept + sweep) {
                Ok(Some(event)) => self.handle_event(event),
                Ok(None) => {}
                Err(e) => {
                    tracing::error!("accepting RDMA connections has failed: {e}");
                    return;
                }
            }
            if swept.elapsed() >= sweep {
                self.sweep_connections();
                swept = Instant::now();
            }
        }
    }

    fn handle_event(&mut self, event: CmEvent) {
        match event.kind {
            CmEventKind::ConnectRequest { id, private } => {
                let peer = peer_text(&id.addresses());
                if let Err(error) = self.accept_connection(event.key, id, &private) {
                    self.shared.refusals.log_closed(&peer, &error.context("it was not accepted"));
                }
            }
            CmEventKind::Disconnected | CmEventKind::Failed(..) | CmEventKind::Rejected(_) => {
                self.end_connection(event.key)
            }
            CmEventKind::DeviceRemoved => {
                self.end_connection(event.key);
                for listener in &mut self.listeners {
                    if listener.has_key(event.key) {
                        tracing::warn!("rail {}: its device is being removed; listening ends", listener.rail.name());
                        listener.listening = None;
                    }
                }
            }
            _ => {}
        }
    }

    /// Wakes the thread that uses the connection, or a worker, which then finds the end.
    fn end_connection(&mut self, key: usize) {
        if let Some(conn) = self.by_key.remove(&key).and_then(|id| self.shared.places.get(id)) {
            conn.breaker.break_now("the reader ended it, or its process died");
        }
    }

    fn accept_connection(&mut self, listener: usize, id: CmId, private: &[u8]) -> Result<()> {
        let Some(listener) = self.listeners.iter_mut().find(|l| l.has_key(listener)) else { return Ok(()) };
        let Some((_, open)) = &listener.listening else { return Ok(()) };
        if !id.is_on(open.domain.context()) {
            id.reject(b"the node's RDMA device was changed; it listens again in a moment");
            listener.rail.forget_device(open);
            listener.listening = None;
            return Ok(());
        }
        match self.shared.places.find_slot() {
            SlotOffer::Free => {}
            SlotOffer::Evict(stranger) => evict_stranger(&self.shared, &stranger),
            SlotOffer::None => {
                let subject = id.subject();
                let addresses = id.addresses();
                id.reject(b"all its connections are in use");
                let why = format!("{subject}: {}", self.shared.places.full_message());
                self.shared.refusals.record_refusal(&peer_text(&addresses), RefusalReason::Limit, &why);
                return Ok(());
            }
        }
        let config = &self.shared.config;
        let peer_terms = match ConnectTerms::decode(private) {
            Ok(terms) => terms,
            Err(e) => {
                let why = format!("{}: not a Spurline client of this version: {e}", id.subject());
                self.shared.refusals.record_refusal(&peer_text(&id.addresses()), RefusalReason::Frames, &why);
                id.reject(b"this is a Spurline node of another version");
                return Ok(());
            }
        };
        let (local, peer) = id.addresses();
        let endpoints =
            ConnectionEndpoints { kind: TransportKind::Rdma, local: shown_address(local), peer: shown_address(peer) };
        let number = self.next_id;
        self.next_id += 1;
        let key = id.key();
        // Dropping the id, or the pair that holds the id, notifies the peer.
        let mut pair = QueuePair::new(id, &open.domain, NODE, number as u32)?;
        // Concurrent connections share a wait for memory.
        let until = self.no_memory_until.filter(|until| *until > Instant::now() - MEMORY_WAIT);
        let until = *self.no_memory_until.insert(until.unwrap_or_else(|| Instant::now() + MEMORY_WAIT));
        post_buffers(&mut pair, &open.memory, NODE, until)?;
        self.no_memory_until = None;
        let breaker = pair.breaker();
        open.watch_breaker(breaker.clone());
        let conn = Arc::new(RdmaConn {
            state: ConnState::with_proof(number, endpoints, &config.trust, &self.shared.stats),
            session: Mutex::new(RdmaSession::new(pair, NODE, peer_terms, FrameLimits::HANDSHAKES)),
            memory: Arc::clone(&open.memory),
            max_message: open.max_message,
            numa_node: open.numa_node,
            announces: config.announces && open.domain.context().supports_immediate(),
            breaker,
            events_seen: AtomicU64::new(0),
            bell: Mutex::new(None),
            polled: PolledFlag::default(),
            opened: Instant::now(),
        });
        // Everything is armed before the reader may send, so no arrival is missed.
        let mut session = conn.session.lock();
        session.pair.arm_receive()?;
        self.shared
            .workers
            .watch_control(session.pair.fd(), number, PARKED)
            .map_err(|e| Error::io("can't wait for events of a connection", &e.into()))?;
        self.by_key.insert(key, number);
        let stranger = self.shared.places.add_connection(Arc::clone(&conn));
        let accepted = session.pair.accept(config.patience.connect_options(), &own_terms(NODE).encode());
        drop(session);
        stranger.iter().for_each(|stranger| evict_stranger(&self.shared, stranger));
        if accepted.is_err() {
            self.shared.remove_connection(&conn);
        }
        Ok(accepted?)
    }

    /// Closes connections with overdue requests, probes idle connections, listens again where a device is back, and forgets ended
    /// connections.
    fn sweep_connections(&mut self) {
        let config = &self.shared.config;
        let conns = self.shared.places.all_connections();
        for conn in &conns {
            // The device is gone, so no event reports the end.
            if conn.breaker.is_lost() {
                self.shared.remove_connection(conn);
                continue;
            }
            let late = conn.is_late(config);
            let Some(mut session) = conn.session.try_lock() else {
                // A connection in use is alive, but a connection before the handshake may block a worker.
                if late {
                    conn.breaker.break_now("its handshake was not completed in time");
                }
                continue;
            };
            // The polling worker waits for another connection and has not released this connection.
            if conn.polled.check_neglected()
                && let ServeOutcome::Failed(error) = ring_bell(&self.shared, conn)
            {
                drop(session);
                tracing::warn!("connection of {}: {error}", conn.state.endpoints().peer);
                self.shared.remove_connection(conn);
                continue;
            }
            let begun = session.line.assembly.begun_at();
            if late || begun.is_some_and(|begun| begun.elapsed() > config.request_timeout) {
                let peer = &conn.state.endpoints().peer;
                let limit = config.request_timeout;
                let why = format!("no whole request within {limit:?}");
                self.shared.refusals.record_refusal(peer, RefusalReason::Silent, &why);
                session.pair.disconnect();
                conn.breaker.break_now("no whole request came in time");
            } else if session.line.silent_for() > config.idle_probe {
                session.line.reset_silence();
                // A failure breaks the queue pair, which causes an event for the workers.
                if session.pair.post_probe(Instant::now()).is_err() {
                    conn.breaker.break_now("the reader's NIC does not respond");
                }
            }
        }
        let live: std::collections::HashSet<u64> = conns.iter().map(|conn| conn.state.id()).collect();
        self.by_key.retain(|_, id| live.contains(id));
        for listener in &mut self.listeners {
            listener.listen_again(&self.channel);
        }
    }
}

fn shown_address(addr: Option<SocketAddr>) -> String {
    addr.map_or_else(|| "?".into(), |addr| addr.to_string())
}
