//! The node's side: listeners, the table of connections, the limit of threads. `worker` handles the requests.
//!
//! Idle connections are parked in an epoll set, each armed for a single event; the worker that receives the event owns the
//! connection until the next parking. Memory and threads therefore follow the requests in progress, not the connections.

use crate::SocketOptions;
use crate::secure::NodeEnd;
use crate::worker::serve_connection;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use spurline_mem::BufferPool;
use spurline_proto::{FRAME_ALIGN, HEADER_LEN, MAX_REQUEST_BODY};
use spurline_transport::{
    ConnState, ConnectionEndpoints, ConnectionSlots, PooledServer, ServeOutcome, Service, SlotHolder, SlotOffer,
    TransportKind, WorkerPool,
};
use spurline_trust::{RefusalLog, RefusalReason, Trust};
use spurline_types::stats::Metric;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Interval of the warning that connections can't be accepted.
const ACCEPT_LOG_INTERVAL: Duration = Duration::from_secs(60);

/// A request that takes longer, and did not announce a wait, no longer keeps others from being answered.
const LONG_REQUEST: Duration = Duration::from_millis(250);

/// Limits of a server.
#[derive(Clone)]
pub struct ServerConfig {
    /// Limit of connections. An eighth is reserved for control connections, so that heartbeats are answered when all others are
    /// in use. A further connection takes the slot of the longest idle connection; without an idle connection, a handshake for
    /// data is refused with an error.
    pub max_connections: usize,
    /// How to raise the limit, for messages.
    pub more_connections: String,
    /// Limit of requests answered at once, each by a thread. Threads start as needed and end when idle. Another thread answers
    /// handshakes and heartbeats when all are busy.
    pub max_workers: usize,
    /// Limit of further requests that wait for a disk or another machine, so that these do not delay cached data.
    pub max_waiting: usize,
    /// Timeout of the handshake after connecting, and of every request after the first byte.
    pub request_timeout: Duration,
    /// A reader that accepts no byte of an answer for this long loses the connection. Long answers get another second per MiB.
    pub send_timeout: Duration,
    /// How long a worker waits on a connection for the next request before parking: longer than a busy reader's pause between two
    /// requests, which then cost no epoll call.
    pub linger: Duration,
    /// Options of accepted sockets.
    pub socket: SocketOptions,
    /// The proofs that peers must give.
    pub trust: Arc<Trust>,
    /// Limit of connections before the handshake. A further connection replaces the oldest, so that strangers can't lock peers
    /// out.
    pub max_pending_handshakes: usize,
    /// Memory for the bytes of writes; without it, writes longer than a request end the connection.
    pub payload_pool: Option<Arc<BufferPool>>,
}

impl Default for ServerConfig {
    fn default() -> Self {
        ServerConfig {
            max_connections: 8192,
            more_connections: "lower --nconnect of the mounts".into(),
            max_workers: 256,
            max_waiting: 1024,
            request_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
            linger: Duration::from_millis(5),
            socket: SocketOptions::default(),
            trust: Trust::without_checks(),
            max_pending_handshakes: 1024,
            payload_pool: None,
        }
    }
}

pub(crate) struct TcpConnection {
    pub state: ConnState,
    pub socket: TcpStream,
    /// The encrypted end; `None` without TLS.
    pub tls: Option<Mutex<NodeEnd>>,
    pub opened: Instant,
    /// The bytes of an incomplete request when the connection was parked, and since when; or, without a time, a
    /// request that another thread is to answer.
    pub partial: Mutex<Option<(Vec<u8>, Option<Instant>)>>,
}

impl SlotHolder for TcpConnection {
    fn conn_state(&self) -> &ConnState {
        &self.state
    }
    fn is_evictable(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.partial.try_lock().is_some_and(|partial| partial.is_none())
            && matches!(poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&at_once)), Ok(0))
    }
}

/// State shared by listeners, workers and the handle.
pub(crate) struct TcpServerState {
    pub config: ServerConfig,
    pub service: Arc<dyn Service>,
    pub stats: Arc<Stats>,
    pub refusals: RefusalLog,
    workers: WorkerPool,
    places: ConnectionSlots<TcpConnection>,
}

/// The events that end the wait of a parked connection.
pub(crate) const PARKED: EventFlags = EventFlags::IN.union(EventFlags::RDHUP);

impl PooledServer for TcpServerState {
    type Conn = TcpConnection;

    fn worker_pool(&self) -> &WorkerPool {
        &self.workers
    }
    fn connection_slots(&self) -> &ConnectionSlots<TcpConnection> {
        &self.places
    }
    fn inbox_len(&self) -> usize {
        HEADER_LEN + MAX_REQUEST_BODY + FRAME_ALIGN
    }
    fn serve_connection(&self, conn: &Arc<TcpConnection>, inbox: &mut [u8], control_only: bool) -> ServeOutcome {
        serve_connection(self, conn, inbox, control_only)
    }
    fn refusals(&self) -> &RefusalLog {
        &self.refusals
    }
    fn remove_connection(&self, conn: &TcpConnection) {
        // The socket leaves the epoll set when the last owner closes the socket.
        let _ = conn.socket.shutdown(std::net::Shutdown::Both);
        if self.places.remove_connection(&conn.state) && conn.state.peer_name().is_some() {
            self.service.connection_closed(&conn.state);
        }
    }
}

/// A running server; a drop stops the server.
pub struct TcpServer {
    shared: Arc<TcpServerState>,
    local: Vec<SocketAddr>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl TcpServer {
    /// Listens on all of `addrs` and starts serving. Port 0 selects a free port for the first address and the same
    /// port for the others.
    ///
    /// # Errors
    /// When an address is not this host's, a port is taken, or there is no address.
    pub fn bind(
        addrs: &[SocketAddr],
        service: Arc<dyn Service>,
        config: ServerConfig,
        stats: Arc<Stats>,
    ) -> Result<Self> {
        if addrs.is_empty() {
            return Err(Error::new(ErrorKind::Invalid, "no address to listen on"));
        }
        let mut listeners: Vec<TcpListener> = Vec::with_capacity(addrs.len());
        let mut local: Vec<SocketAddr> = Vec::with_capacity(addrs.len());
        for addr in addrs {
            let mut addr = *addr;
            if let (0, Some(first)) = (addr.port(), local.first()) {
                addr.set_port(first.port());
            }
            let bound =
                TcpListener::bind(addr).and_then(|l| l.set_nonblocking(true).and_then(|()| Ok((l.local_addr()?, l))));
            let (at, listener) = bound.map_err(|e| match e.kind() {
                std::io::ErrorKind::AddrInUse => Error::new(
                    ErrorKind::Unavailable,
                    format!(
                        "can't listen on {addr}: another process does ('ss -ltnp sport = :{}' shows it); choose \
                         another --group-port or stop it",
                        addr.port()
                    ),
                ),
                std::io::ErrorKind::AddrNotAvailable => Error::new(
                    ErrorKind::Invalid,
                    format!("can't listen on {addr}: it is no address of this host; see --group-network"),
                ),
                _ => Error::io(format_args!("can't listen on {addr}"), &e),
            })?;
            config
                .socket
                .apply_before_connect(listener.as_fd())
                .map_err(|e| Error::io(format_args!("can't set up {addr}"), &e))?;
            local.push(at);
            listeners.push(listener);
        }
        let most = config.max_workers.max(1) + config.max_waiting;
        let workers = WorkerPool::new("tcp", most, config.max_workers, LONG_REQUEST)
            .map_err(|e| Error::io("can't set up the server", &e.into()))?;
        let refusals = RefusalLog::new(Arc::clone(&stats));
        let gauges: [fn(&Stats) -> &Metric; 2] = [|stats| &stats.tcp.connections, |stats| &stats.tcp.connections_limit];
        let most = config.max_connections;
        let ungreeted = config.max_pending_handshakes;
        let places = ConnectionSlots::new(most, ungreeted, &config.more_connections, Arc::clone(&stats), gauges);
        let shared = Arc::new(TcpServerState { config, service, stats, refusals, workers, places });
        WorkerPool::spawn_worker(&shared)
            .and_then(|()| WorkerPool::spawn_control(&shared))
            .map_err(|e| Error::io("can't start a worker thread", &e))?;
        let acceptor = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name("tcp-accept".into()).spawn(move || accept_all(&shared, &listeners))
        };
        let mut server = TcpServer { shared, local, acceptor: None };
        server.acceptor = Some(acceptor.map_err(|e| Error::io("can't start the accepting thread", &e))?);
        Ok(server)
    }

    /// The listening addresses, in the given order, with the actual ports.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.local
    }

    /// Current number of connections.
    pub fn connection_count(&self) -> usize {
        self.shared.places.len()
    }

    /// Current number of worker threads.
    pub fn worker_count(&self) -> usize {
        self.shared.workers.workers()
    }

    /// Stops accepting; workers end after the current requests.
    pub fn shutdown(&self) {
        self.shared.workers.stop();
    }

    /// Stops, waits until `deadline` for requests in progress, and closes all connections. Returns whether all
    /// threads ended.
    pub fn join(mut self, deadline: Instant) -> bool {
        self.stop_by(deadline)
    }

    fn stop_by(&mut self, deadline: Instant) -> bool {
        self.shutdown();
        if let Some(acceptor) = self.acceptor.take() {
            // The thread only waits for the wake-up.
            let _ = acceptor.join();
        }
        // Idle readers see the end at once; answers in progress are completed.
        let ended = self.shared.workers.join(deadline);
        for conn in &self.shared.places.drain() {
            let _ = conn.socket.shutdown(std::net::Shutdown::Both);
            if conn.state.peer_name().is_some() {
                self.shared.service.connection_closed(&conn.state);
            }
        }
        ended
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.stop_by(Instant::now() + Duration::from_secs(1));
    }
}

/// Accepts connections until the server stops, and periodically closes connections that are late with a request.
fn accept_all(shared: &Arc<TcpServerState>, listeners: &[TcpListener]) {
    let sweep = (shared.config.request_timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    let timeout = Timespec::try_from(sweep).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    let mut fds: Vec<PollFd<'_>> = listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)).collect();
    fds.push(PollFd::from_borrowed_fd(shared.workers.wake(), PollFlags::IN));
    let mut next_id = WorkerPool::FIRST_ID;
    let mut swept = Instant::now();
    let mut warned = None;
    while !shared.workers.stopping() {
        if let Err(e) = poll(&mut fds, Some(&timeout)) {
            if e != rustix::io::Errno::INTR {
                tracing::error!("no more connections are accepted: waiting for them failed: {e}");
                return;
            }
            continue;
        }
        for listener in listeners {
            // Includes listeners not reported ready: the check is cheap next to accepting.
            while let Some((socket, peer)) = accept_next(listener, &mut warned) {
                match shared.places.find_slot() {
                    SlotOffer::Free => {}
                    SlotOffer::Evict(conn) => evict_connection(shared, &conn),
                    SlotOffer::None => {
                        shared.refusals.record_refusal(
                            &peer.to_string(),
                            RefusalReason::Limit,
                            &shared.places.full_message(),
                        );
                        continue;
                    }
                }
                if let Err(e) = adopt_socket(shared, socket, peer, next_id) {
                    shared.refusals.log_closed(&peer.to_string(), &e);
                }
                next_id += 1;
            }
        }
        if swept.elapsed() >= sweep {
            swept = Instant::now();
            close_late(shared);
        }
    }
}

/// Closes a connection for another. The eviction of an idle connection is logged already.
fn evict_connection(shared: &TcpServerState, conn: &TcpConnection) {
    if conn.state.peer_name().is_none() {
        let why = "too many connections before their handshake, and it is the oldest of them";
        shared.refusals.record_refusal(&conn.state.endpoints().peer, RefusalReason::Limit, &why);
    }
    shared.remove_connection(conn);
}

/// The next pending connection. `warned` is the time of the last warning of a failure.
fn accept_next(listener: &TcpListener, warned: &mut Option<Instant>) -> Option<(TcpStream, SocketAddr)> {
    match listener.accept() {
        Ok(accepted) => Some(accepted),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(e) => {
            // The error repeats many times a second.
            if warned.is_none_or(|at| at.elapsed() > ACCEPT_LOG_INTERVAL) {
                *warned = Some(Instant::now());
                tracing::warn!("connections can't be accepted: {e}; raise 'ulimit -n' if it lacks descriptors");
            }
            // Without descriptors the listener stays ready: without a pause this would spin.
            std::thread::sleep(Duration::from_millis(50));
            None
        }
    }
}

fn adopt_socket(shared: &TcpServerState, socket: TcpStream, peer: SocketAddr, id: u64) -> std::io::Result<()> {
    socket.set_nonblocking(false)?;
    shared.config.socket.apply_options(socket.as_fd())?;
    let linger = shared.config.linger.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(linger))?;
    let send = shared.config.send_timeout.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(send))?;
    let local = socket.local_addr()?.to_string();
    let endpoints = ConnectionEndpoints { kind: TransportKind::Tcp, local, peer: peer.to_string() };
    let sealed = shared.config.trust.tls().map(|tls| tls.accept_session(&endpoints.peer)).transpose();
    let conn = TcpConnection {
        state: ConnState::with_proof(id, endpoints, &shared.config.trust, &shared.stats),
        socket,
        tls: sealed.map_err(std::io::Error::other)?.map(|sealed| Mutex::new(NodeEnd::new(sealed))),
        opened: Instant::now(),
        partial: Mutex::new(None),
    };
    let conn = Arc::new(conn);
    if let Some(oldest) = shared.places.add_connection(Arc::clone(&conn)) {
        evict_connection(shared, &oldest);
    }
    shared.workers.watch_control(&conn.socket, id, PARKED).map_err(|e| {
        shared.remove_connection(&conn);
        e.into()
    })
}

/// Shuts down connections whose handshake, or whose next request once begun, takes too long. The worker that this
/// wakes cleans up.
fn close_late(shared: &TcpServerState) {
    let limit = shared.config.request_timeout;
    for conn in shared.places.all_connections().iter().filter(|conn| {
        let ungreeted = conn.state.peer_name().is_none() && conn.opened.elapsed() > limit;
        ungreeted
            || conn.partial.try_lock().is_some_and(|partial| {
                partial.as_ref().is_some_and(|(_, since)| since.is_some_and(|since| since.elapsed() > limit))
            })
    }) {
        let why = format!("no complete request within {limit:?}");
        shared.refusals.record_refusal(&conn.state.endpoints().peer, RefusalReason::Silent, &why);
        let _ = conn.socket.shutdown(std::net::Shutdown::Both);
    }
}
