//! The node's side: listeners, the table of connections, the bound on threads. What happens to a request is in
//! `worker`.
//!
//! Idle connections are parked in an epoll set, each armed for one event; a worker thread that takes the event owns
//! the connection until it parks it again. So memory and threads follow the requests in work, not the connections.

use crate::SocketOptions;
use crate::secure::NodeEnd;
use crate::worker::serve;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;
use spurline_proto::{FRAME_ALIGN, HEADER_LEN, MAX_REQUEST_BODY};
use spurline_transport::{ConnState, Crew, Crewed, End, Endpoints, Places, Room, Seated, Service, TransportKind};
use spurline_trust::{Reason, Refusals, Trust};
use spurline_types::stats::Metric;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// That connections can't be accepted is said no more often than this.
const REMIND: Duration = Duration::from_secs(60);

/// A request that takes longer, and did not say that it waits, no longer keeps others from being answered.
const LONG: Duration = Duration::from_millis(250);

/// Bounds of a server.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The most connections. One in eight is kept for those that are not asked for data, so that signs of life are answered
    /// when all others are in use. A further one has the place of the longest idle one; where none is idle, who greets for
    /// data is told so.
    pub max_connections: usize,
    /// How there would be more, for who has them all in use.
    pub more_connections: String,
    /// The most requests that are answered at once, each by a thread. Threads start as needed and end when idle. One more
    /// answers greetings and signs of life when all of them are busy.
    pub max_workers: usize,
    /// The most requests beside them that wait, for a disk or another machine: what is at hand is not to be kept from
    /// readers by those.
    pub max_waiting: usize,
    /// A connection must have sent its whole greeting by then, and any request begun must be whole by then.
    pub request_timeout: Duration,
    /// A reader that takes none of an answer for this long loses its connection. Long answers get a second per MiB on
    /// top.
    pub send_timeout: Duration,
    /// How long a worker waits on a connection for its next request before it parks it: longer than a busy reader
    /// needs between two requests, so that those cost no epoll call.
    pub linger: Duration,
    /// Options of accepted sockets.
    pub socket: SocketOptions,
    /// What peers have to prove.
    pub trust: Arc<Trust>,
    /// The most connections that have not greeted yet; the oldest of them makes room for a further one, so that
    /// strangers can't keep peers out.
    pub max_ungreeted: usize,
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
            trust: Trust::anyone(),
            max_ungreeted: 1024,
        }
    }
}

/// One connection.
pub(crate) struct Conn {
    pub state: ConnState,
    pub socket: TcpStream,
    /// The encrypted end; `None` where nothing is encrypted.
    pub tls: Option<Mutex<NodeEnd>>,
    pub opened: Instant,
    /// Bytes of a request that was not whole when the connection was parked, and since when, or one that another thread is
    /// to answer.
    pub partial: Mutex<Option<(Vec<u8>, Option<Instant>)>>,
}

impl Seated for Conn {
    fn state(&self) -> &ConnState {
        &self.state
    }
    fn may_go(&self) -> bool {
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let nothing_came = || matches!(poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&at_once)), Ok(0));
        self.partial.try_lock().is_some_and(|partial| partial.is_none()) && nothing_came()
    }
}

/// What listeners, workers and the handle share.
pub(crate) struct Shared {
    pub config: ServerConfig,
    pub service: Arc<dyn Service>,
    pub stats: Arc<Stats>,
    pub refusals: Refusals,
    crew: Crew,
    places: Places<Conn>,
}

/// What ends the wait of a parked connection.
pub(crate) const PARKED: EventFlags = EventFlags::IN.union(EventFlags::RDHUP);

impl Crewed for Shared {
    type Conn = Conn;

    fn crew(&self) -> &Crew {
        &self.crew
    }
    fn places(&self) -> &Places<Conn> {
        &self.places
    }
    fn inbox_len(&self) -> usize {
        HEADER_LEN + MAX_REQUEST_BODY + FRAME_ALIGN
    }
    fn serve(&self, conn: &Arc<Conn>, inbox: &mut [u8], life_only: bool) -> End {
        serve(self, conn, inbox, life_only)
    }
    fn refusals(&self) -> &Refusals {
        &self.refusals
    }
    fn remove(&self, conn: &Conn) {
        // The socket leaves the epoll set when its last owner closes it.
        let _ = conn.socket.shutdown(std::net::Shutdown::Both);
        if self.places.remove(&conn.state) && conn.state.peer_name().is_some() {
            self.service.closed(&conn.state);
        }
    }
}

/// A running server; dropping it stops it.
pub struct TcpServer {
    shared: Arc<Shared>,
    local: Vec<SocketAddr>,
    acceptor: Option<std::thread::JoinHandle<()>>,
}

impl TcpServer {
    /// Listens on every one of `addrs` (port 0: the same free port on all after the first) and serves at once.
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
                        "can't listen on {addr}: another process does ('ss -ltnp sport = :{}' says which); choose \
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
            config.socket.prepare(listener.as_fd()).map_err(|e| Error::io(format_args!("can't set up {addr}"), &e))?;
            local.push(at);
            listeners.push(listener);
        }
        let os = |e: rustix::io::Errno| Error::io("can't set up the server", &e.into());
        let most = config.max_workers.max(1) + config.max_waiting;
        let crew = Crew::new("tcp", most, config.max_workers, LONG).map_err(os)?;
        let refusals = Refusals::new(Arc::clone(&stats));
        let gauges: [fn(&Stats) -> &Metric; 2] = [|stats| &stats.tcp.connections, |stats| &stats.tcp.connections_limit];
        let (most, ungreeted) = (config.max_connections, config.max_ungreeted);
        let places = Places::new(most, ungreeted, &config.more_connections, Arc::clone(&stats), gauges);
        let shared = Arc::new(Shared { config, service, stats, refusals, crew, places });
        Crew::spawn(&shared)
            .and_then(|()| Crew::spawn_life(&shared))
            .map_err(|e| Error::io("can't start a worker thread", &e))?;
        let acceptor = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name("tcp-accept".into()).spawn(move || accept_all(&shared, &listeners))
        };
        let mut server = TcpServer { shared, local, acceptor: None };
        server.acceptor = Some(acceptor.map_err(|e| Error::io("can't start the accepting thread", &e))?);
        Ok(server)
    }

    /// The addresses it listens on, in the order they were given, with the ports they got.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.local
    }

    /// Connections there are now.
    pub fn connections(&self) -> usize {
        self.shared.places.len()
    }

    /// Worker threads there are now.
    pub fn workers(&self) -> usize {
        self.shared.crew.workers()
    }

    /// Stops accepting; workers end after the request they are on.
    pub fn shutdown(&self) {
        self.shared.crew.stop();
    }

    /// Stops, waits until `deadline` for requests in work, and closes all connections. Says whether all threads ended.
    pub fn join(mut self, deadline: Instant) -> bool {
        self.stop(deadline)
    }

    fn stop(&mut self, deadline: Instant) -> bool {
        self.shutdown();
        if let Some(acceptor) = self.acceptor.take() {
            // It waits for nothing but the wake-up.
            let _ = acceptor.join();
        }
        // Idle readers learn at once; those in the middle of an answer get it whole.
        let ended = self.shared.crew.join(deadline);
        for conn in &self.shared.places.drain() {
            let _ = conn.socket.shutdown(std::net::Shutdown::Both);
            if conn.state.peer_name().is_some() {
                self.shared.service.closed(&conn.state);
            }
        }
        ended
    }
}

impl Drop for TcpServer {
    fn drop(&mut self) {
        self.stop(Instant::now() + Duration::from_secs(1));
    }
}

/// Accepts until told to stop, and now and then closes connections that are late with a request.
fn accept_all(shared: &Arc<Shared>, listeners: &[TcpListener]) {
    let sweep = (shared.config.request_timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1));
    let timeout = Timespec::try_from(sweep).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
    let mut fds: Vec<PollFd<'_>> = listeners.iter().map(|l| PollFd::new(l, PollFlags::IN)).collect();
    fds.push(PollFd::from_borrowed_fd(shared.crew.wake(), PollFlags::IN));
    let mut next_id = Crew::FIRST_ID;
    let mut swept = Instant::now();
    let mut warned = None;
    while !shared.crew.stopping() {
        if let Err(e) = poll(&mut fds, Some(&timeout)) {
            if e != rustix::io::Errno::INTR {
                tracing::error!("no more connections are accepted: waiting for them failed: {e}");
                return;
            }
            continue;
        }
        for listener in listeners {
            // Also those not reported ready: asking costs nothing next to accepting.
            while let Some((socket, peer)) = accept(listener, &mut warned) {
                match shared.places.room() {
                    Room::Free => {}
                    Room::Of(conn) => make_room(shared, &conn),
                    Room::None => {
                        shared.refusals.refused(&peer.to_string(), Reason::Limit, &shared.places.full());
                        continue;
                    }
                }
                if let Err(e) = adopt(shared, socket, peer, next_id) {
                    shared.refusals.say(&peer.to_string(), &e);
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

/// Closes a connection for another one. One that is idle has been said already.
fn make_room(shared: &Shared, conn: &Conn) {
    if conn.state.peer_name().is_none() {
        let why = "too many connections have not greeted, and it is the oldest of them";
        shared.refusals.refused(&conn.state.endpoints().peer, Reason::Limit, &why);
    }
    shared.remove(conn);
}

/// The next connection that waits for it. `warned` is when it was last said that one could not be accepted.
fn accept(listener: &TcpListener, warned: &mut Option<Instant>) -> Option<(TcpStream, SocketAddr)> {
    match listener.accept() {
        Ok(accepted) => Some(accepted),
        Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => None,
        Err(e) => {
            // It will be so many times a second for as long as it lasts.
            if warned.is_none_or(|at| at.elapsed() > REMIND) {
                *warned = Some(Instant::now());
                tracing::warn!("connections can't be accepted: {e}; raise 'ulimit -n' if it is the descriptors");
            }
            // Out of descriptors, the listener stays ready: without a pause this would spin.
            std::thread::sleep(Duration::from_millis(50));
            None
        }
    }
}

fn adopt(shared: &Shared, socket: TcpStream, peer: SocketAddr, id: u64) -> std::io::Result<()> {
    socket.set_nonblocking(false)?;
    shared.config.socket.apply(socket.as_fd())?;
    let linger = shared.config.linger.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(linger))?;
    let send = shared.config.send_timeout.max(Duration::from_millis(1));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(send))?;
    let local = socket.local_addr()?.to_string();
    let endpoints = Endpoints { kind: TransportKind::Tcp, local, peer: peer.to_string() };
    let sealed = shared.config.trust.tls().map(|tls| tls.accept(&endpoints.peer)).transpose();
    let conn = Conn {
        state: ConnState::guarded(id, endpoints, &shared.config.trust, &shared.stats),
        socket,
        tls: sealed.map_err(std::io::Error::other)?.map(|sealed| Mutex::new(NodeEnd::new(sealed))),
        opened: Instant::now(),
        partial: Mutex::new(None),
    };
    let conn = Arc::new(conn);
    if let Some(oldest) = shared.places.put(Arc::clone(&conn)) {
        make_room(shared, &oldest);
    }
    shared.crew.watch_life(&conn.socket, id, PARKED).map_err(|e| {
        shared.remove(&conn);
        e.into()
    })
}

/// Shuts down connections that have not greeted, or have begun a request and not gone on, for too long. The worker
/// that this wakes cleans up.
fn close_late(shared: &Shared) {
    let limit = shared.config.request_timeout;
    let is_late = |conn: &Arc<Conn>| {
        let ungreeted = conn.state.peer_name().is_none() && conn.opened.elapsed() > limit;
        ungreeted
            || conn.partial.try_lock().is_some_and(|partial| {
                partial.as_ref().is_some_and(|(_, since)| since.is_some_and(|since| since.elapsed() > limit))
            })
    };
    for conn in shared.places.all().iter().filter(|conn| is_late(conn)) {
        let why = format!("no whole request within {limit:?}");
        shared.refusals.refused(&conn.state.endpoints().peer, Reason::Silent, &why);
        let _ = conn.socket.shutdown(std::net::Shutdown::Both);
    }
}
