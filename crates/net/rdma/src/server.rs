//! The node's side: a listener on each rail, the table of connections, the bound on threads. What happens to a request
//! is in `worker`.
//!
//! Idle connections are parked in an epoll set by the descriptors of their completion channels, each armed for one
//! event; a worker thread that takes the event owns the connection until it parks it again (`hand` says when that is).

use crate::depths::NODE;
use crate::hand::{Held, ring};
use crate::rail::{Open, Patience, Rail};
use crate::session::{Session, Takes, equip, terms};
use crate::worker::serve;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use spurline_proto::rdma::Terms;
use spurline_transport::{ConnState, Crew, Crewed, End, Endpoints, Places, Room, Seated, Service, TransportKind};
use spurline_trust::{Reason, Refusals, Trust};
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

/// A request that takes longer has its worker's turn given to another: longer than small answers take, and as short as a
/// request may wait behind one that blocks.
const LONG: Duration = Duration::from_millis(2);
/// Connect requests that wait while others are answered: of all mounts at once when a node is back. The kernel takes no
/// more by itself.
const BACKLOG: i32 = 1024;
/// A rail that can't be listened on is tried again after this.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// A connection waits so long for its part of the pool, which others may be about to give back.
const MEMORY: Duration = Duration::from_millis(100);

/// Bounds of a server.
#[derive(Debug, Clone)]
pub struct RdmaServerConfig {
    /// The most connections; further ones are refused. Each takes [`crate::connection_bytes`] of the pool. One in eight is kept
    /// for those that are not asked for data: a path has one of them for signs of life.
    pub max_connections: usize,
    /// How there would be more, for who has them all in use.
    pub more_connections: String,
    /// The most connections that have not greeted yet; the oldest of them makes room for a further one, so that strangers
    /// don't take the memory and the places of readers.
    pub max_ungreeted: usize,
    /// The most worker threads, and so requests in work at once. They start as needed and end when idle. One more answers
    /// greetings and signs of life when all of them are busy.
    pub max_workers: usize,
    /// A connection must have sent its whole greeting by then, and any request begun must be whole by then.
    pub request_timeout: Duration,
    /// A reader that takes none of an answer for this long loses its connection. Long answers get a second per MiB on
    /// top.
    pub send_timeout: Duration,
    /// How long a worker waits on a connection for its next request before it parks it.
    pub linger: Duration,
    /// A connection idle for this long has its reader's NIC asked for a sign of life: a reader that lost its power says
    /// no goodbye.
    pub idle_probe: Duration,
    /// How long silence is borne.
    pub patience: Patience,
    /// What peers have to prove.
    pub trust: Arc<Trust>,
    /// Whether writes tell the reader of themselves where the device can, which is the faster way; iWARP's can't.
    pub announces: bool,
}

impl Default for RdmaServerConfig {
    fn default() -> Self {
        RdmaServerConfig {
            max_connections: 4096,
            more_connections: "lower --nconnect of the mounts".into(),
            max_ungreeted: 256,
            max_workers: 256,
            request_timeout: Duration::from_secs(10),
            send_timeout: Duration::from_secs(30),
            linger: Duration::from_millis(5),
            idle_probe: Duration::from_secs(30),
            patience: Patience::default(),
            trust: Trust::anyone(),
            announces: true,
        }
    }
}

/// One connection.
pub(crate) struct Conn {
    pub state: ConnState,
    pub session: Mutex<Session>,
    pub memory: Arc<MemoryRegion>,
    pub max_message: usize,
    /// The rail's.
    pub numa_node: Option<u32>,
    /// Whether writes tell the reader of themselves.
    pub announces: bool,
    pub breaker: spurline_verbs::Breaker,
    /// Of [`Shared::events`] when a worker last waited for its next request.
    pub seen: AtomicU64,
    /// Rings for a worker of those, until one has come.
    pub bell: Mutex<Option<OwnedFd>>,
    /// Whether a worker has it at hand.
    pub held: Held,
    opened: Instant,
}

// None is ended for another: the end of an idle connection may be the end of its path, and mounts close what they don't use.
impl Seated for Conn {
    fn state(&self) -> &ConnState {
        &self.state
    }
}

impl Conn {
    /// Whether it should have greeted by now.
    pub fn is_late(&self, config: &RdmaServerConfig) -> bool {
        self.state.peer_name().is_none() && self.opened.elapsed() > config.request_timeout
    }

    /// Notes that a worker took an event of it.
    pub fn event(&self, shared: &Shared) {
        drop(self.bell.lock().take());
        shared.events.fetch_add(1, Ordering::Relaxed);
    }

    /// How long an answer may have to wait for the reader. Whoever has not greeted has room for all that it is answered, and
    /// gets none of a worker's time.
    pub fn patience(&self, config: &RdmaServerConfig, greets: bool) -> Duration {
        match (self.state.peer_name(), greets) {
            (Some(_), _) => config.send_timeout,
            (None, true) => config.send_timeout.min(config.request_timeout.saturating_sub(self.opened.elapsed())),
            (None, false) => Duration::ZERO,
        }
    }
}

/// What acceptor, workers and the handle share.
pub(crate) struct Shared {
    pub config: RdmaServerConfig,
    pub service: Arc<dyn Service>,
    pub stats: Arc<Stats>,
    /// Events of connections that workers took.
    pub events: AtomicU64,
    refusals: Refusals,
    crew: Crew,
    places: Places<Conn>,
}

/// What ends the wait of a parked connection.
pub(crate) const PARKED: EventFlags = EventFlags::IN;

impl Crewed for Shared {
    type Conn = Conn;

    fn crew(&self) -> &Crew {
        &self.crew
    }
    fn places(&self) -> &Places<Conn> {
        &self.places
    }
    fn serve(&self, conn: &Arc<Conn>, _inbox: &mut [u8], life_only: bool) -> End {
        serve(self, conn, life_only)
    }
    fn refusals(&self) -> &Refusals {
        &self.refusals
    }
    fn remove(&self, conn: &Conn) {
        conn.breaker.break_now("the node closed it");
        if self.places.remove(&conn.state) && conn.state.peer_name().is_some() {
            self.service.closed(&conn.state);
        }
    }
}

/// A running server; dropping it stops it.
pub struct RdmaServer {
    shared: Arc<Shared>,
    local: Vec<SocketAddr>,
    acceptor: Option<JoinHandle<()>>,
}

impl RdmaServer {
    /// Listens on the address of every rail, at `port` (0: any; the first rail's for the others too), and serves at once.
    ///
    /// # Errors
    /// When a rail's device is gone, the port is taken, or there is no rail.
    pub fn bind(
        rails: &[Arc<Rail>],
        port: u16,
        service: Arc<dyn Service>,
        config: RdmaServerConfig,
        stats: Arc<Stats>,
    ) -> Result<Self> {
        let Some(first) = rails.first() else {
            return Err(Error::new(ErrorKind::Invalid, "no rail to listen on"));
        };
        let channel = CmChannel::new(first.verbs())?;
        let os = |e: rustix::io::Errno| Error::io("can't set up the RDMA server", &e.into());
        // Two at least, so that one may wait on its connection while the other takes what comes on the others.
        let at_once = std::thread::available_parallelism().map_or(1, usize::from).max(2);
        let crew = Crew::new("rdma", config.max_workers, at_once, LONG).map_err(os)?;
        let refusals = Refusals::new(Arc::clone(&stats));
        let gauges: [fn(&Stats) -> &Metric; 2] =
            [|stats| &stats.rdma.connections, |stats| &stats.rdma.connections_limit];
        let (most, ungreeted) = (config.max_connections, config.max_ungreeted);
        let places = Places::new(most, ungreeted, &config.more_connections, Arc::clone(&stats), gauges);
        let shared = Arc::new(Shared { config, service, stats, events: AtomicU64::new(0), refusals, crew, places });
        let mut acceptor = Acceptor {
            shared: Arc::clone(&shared),
            listeners: Vec::new(),
            channel,
            by_key: HashMap::new(),
            no_memory_until: None,
            next_id: Crew::FIRST_ID,
        };
        let mut port = port;
        for rail in rails {
            let mut listener = Listener::new(rail, SocketAddr::new(rail.ip(), port));
            listener.listen(&acceptor.channel)?;
            port = listener.at.port();
            acceptor.listeners.push(listener);
        }
        let local = acceptor.listeners.iter().map(|l| l.at).collect();
        Crew::spawn(&shared)
            .and_then(|()| Crew::spawn_life(&shared))
            .map_err(|e| Error::io("can't start a worker thread", &e))?;
        let mut server = RdmaServer { shared, local, acceptor: None };
        let thread = std::thread::Builder::new().name("rdma-accept".into()).spawn(move || acceptor.run());
        server.acceptor = Some(thread.map_err(|e| Error::io("can't start the accepting thread", &e))?);
        Ok(server)
    }

    /// The addresses it listens on, in the order of the rails, with the ports they got.
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

    /// Stops, waits until `deadline` for requests in work, and ends all connections. Says whether all threads ended.
    pub fn join(mut self, deadline: Instant) -> bool {
        self.stop(deadline)
    }

    fn stop(&mut self, deadline: Instant) -> bool {
        self.shared.crew.stop();
        if let Some(acceptor) = self.acceptor.take() {
            // It wakes up by itself several times a second.
            let _ = acceptor.join();
        }
        let ended = self.shared.crew.join(deadline);
        for conn in &self.shared.places.drain() {
            match conn.session.try_lock() {
                Some(mut session) => session.pair.disconnect(),
                None => conn.breaker.break_now("the node stops"),
            }
            if conn.state.peer_name().is_some() {
                self.shared.service.closed(&conn.state);
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

/// A rail that is listened on, or is to be again when its device is back.
struct Listener {
    rail: Arc<Rail>,
    at: SocketAddr,
    listening: Option<(CmId, Arc<Open>)>,
    /// Opens the rail's device.
    opening: Option<JoinHandle<Result<()>>>,
    tried: Instant,
    /// Why it is not listened on, as it was last said.
    said: Option<String>,
}

impl Listener {
    fn new(rail: &Arc<Rail>, at: SocketAddr) -> Self {
        Listener { rail: Arc::clone(rail), at, listening: None, opening: None, tried: Instant::now(), said: None }
    }

    /// Listens again where the device is back, or the address is another's. Its memory is registered by a thread of its
    /// own: that takes seconds, and other rails are to be accepted on meanwhile.
    fn again(&mut self, channel: &Arc<CmChannel>) {
        if self.tried.elapsed() < TRY_AGAIN {
            return;
        }
        if let Some((_, open)) = &self.listening {
            self.tried = Instant::now();
            if let Err(moved) = self.rail.let_go_if_moved(open) {
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
            None if self.rail.is_open() => self.rail.usable().and_then(|_| self.listen(channel)),
            None => {
                let rail = Arc::clone(&self.rail);
                let name = format!("open-{}", rail.name());
                let opening = std::thread::Builder::new().name(name).spawn(move || rail.device().map(drop));
                opening.map(|opening| self.opening = Some(opening)).map_err(|e| Error::io("no thread to open it", &e))
            }
        };
        if self.listening.is_some() {
            tracing::info!("rail {}: listening again on {}", self.rail.name(), self.at);
            self.said = None;
        } else if let Err(error) = result {
            self.tried = Instant::now();
            let why = error.to_string();
            if self.said.as_ref() != Some(&why) {
                tracing::warn!("rail {}: it can't be listened on again yet: {why}", self.rail.name());
                self.said = Some(why);
            }
        }
    }

    fn listen(&mut self, channel: &Arc<CmChannel>) -> Result<()> {
        let open = self.rail.device()?;
        let mut id = channel.id()?;
        let context = |e: spurline_verbs::VerbsError| Error::from(e).context(format_args!("rail {}", self.rail.name()));
        self.at = id.listen(self.at, BACKLOG).map_err(context)?;
        self.listening = Some((id, open));
        Ok(())
    }

    fn is(&self, key: usize) -> bool {
        self.listening.as_ref().is_some_and(|(id, _)| id.key() == key)
    }
}

/// The address at the other end, for logs.
fn peer_of(addresses: &(Option<SocketAddr>, Option<SocketAddr>)) -> String {
    addresses.1.map_or_else(|| "?".into(), |addr| addr.to_string())
}

/// Ends a connection that has not greeted for another one.
fn make_room(shared: &Shared, conn: &Conn) {
    let why = "too many connections have not greeted, and it is the oldest of them";
    shared.refusals.refused(&conn.state.endpoints().peer, Reason::Limit, &why);
    if let Some(mut session) = conn.session.try_lock() {
        session.pair.disconnect();
    }
    shared.remove(conn);
}

/// Takes events of all connections, and now and then looks for those that are late.
struct Acceptor {
    shared: Arc<Shared>,
    channel: Arc<CmChannel>,
    listeners: Vec<Listener>,
    /// Connections by the keys of their ids.
    by_key: HashMap<usize, u64>,
    /// The pool had no memory for a connection; until when that was waited for.
    no_memory_until: Option<Instant>,
    next_id: u64,
}

impl Acceptor {
    fn run(mut self) {
        let sweep =
            (self.shared.config.request_timeout / 4).clamp(Duration::from_millis(10), Duration::from_millis(250));
        let mut swept = Instant::now();
        while !self.shared.crew.stopping() {
            match self.channel.next(swept + sweep) {
                Ok(Some(event)) => self.take(event),
                Ok(None) => {}
                Err(e) => {
                    tracing::error!("no more RDMA connections are accepted: {e}");
                    return;
                }
            }
            if swept.elapsed() >= sweep {
                self.look_after();
                swept = Instant::now();
            }
        }
    }

    fn take(&mut self, event: CmEvent) {
        match event.kind {
            CmEventKind::ConnectRequest { id, private } => {
                let peer = peer_of(&id.addresses());
                if let Err(error) = self.accept(event.key, id, &private) {
                    self.shared.refusals.say(&peer, &error.context("it was not accepted"));
                }
            }
            CmEventKind::Disconnected | CmEventKind::Failed(..) | CmEventKind::Rejected(_) => self.end(event.key),
            CmEventKind::DeviceRemoved => {
                self.end(event.key);
                for listener in &mut self.listeners {
                    if listener.is(event.key) {
                        tracing::warn!("rail {}: its device is being taken away; listening ends", listener.rail.name());
                        listener.listening = None;
                    }
                }
            }
            _ => {}
        }
    }

    /// Wakes whoever works on the connection, or a worker that will find it over.
    fn end(&mut self, key: usize) {
        if let Some(conn) = self.by_key.remove(&key).and_then(|id| self.shared.places.get(id)) {
            conn.breaker.break_now("the reader ended it, or its process died");
        }
    }

    fn accept(&mut self, listener: usize, id: CmId, private: &[u8]) -> Result<()> {
        let Some(listener) = self.listeners.iter_mut().find(|l| l.is(listener)) else { return Ok(()) };
        let Some((_, open)) = &listener.listening else { return Ok(()) };
        if !id.is_on(open.domain.context()) {
            id.reject(b"the node's RDMA device was changed; it listens again in a moment");
            listener.rail.let_go(open);
            listener.listening = None;
            return Ok(());
        }
        match self.shared.places.room() {
            Room::Free => {}
            Room::Of(stranger) => make_room(&self.shared, &stranger),
            Room::None => {
                let (subject, addresses) = (id.subject(), id.addresses());
                id.reject(b"all its connections are in use");
                let why = format!("{subject}: {}", self.shared.places.full());
                self.shared.refusals.refused(&peer_of(&addresses), Reason::Limit, &why);
                return Ok(());
            }
        }
        let config = &self.shared.config;
        let peer_terms = match Terms::decode(private) {
            Ok(terms) => terms,
            Err(e) => {
                let why = format!("{}: it is no Spurline of this version: {e}", id.subject());
                self.shared.refusals.refused(&peer_of(&id.addresses()), Reason::Frames, &why);
                id.reject(b"this is a Spurline node of another version");
                return Ok(());
            }
        };
        let (local, peer) = id.addresses();
        let shown = |addr: Option<SocketAddr>| addr.map_or_else(|| "?".into(), |addr| addr.to_string());
        let endpoints = Endpoints { kind: TransportKind::Rdma, local: shown(local), peer: shown(peer) };
        let number = self.next_id;
        self.next_id += 1;
        let key = id.key();
        // Dropping the id, or the pair with it, tells the peer.
        let mut pair = QueuePair::new(id, &open.domain, NODE, number as u32)?;
        // While there is none, those that come together wait together.
        let until = self.no_memory_until.filter(|until| *until > Instant::now() - MEMORY);
        let until = *self.no_memory_until.insert(until.unwrap_or_else(|| Instant::now() + MEMORY));
        equip(&mut pair, &open.memory, NODE, until)?;
        self.no_memory_until = None;
        let breaker = pair.breaker();
        open.watch(breaker.clone());
        let conn = Arc::new(Conn {
            state: ConnState::guarded(number, endpoints, &config.trust, &self.shared.stats),
            session: Mutex::new(Session::new(pair, NODE, peer_terms, Takes::GREETINGS)),
            memory: Arc::clone(&open.memory),
            max_message: open.max_message,
            numa_node: open.numa_node,
            announces: config.announces && open.domain.context().announces(),
            breaker,
            seen: AtomicU64::new(0),
            bell: Mutex::new(None),
            held: Held::default(),
            opened: Instant::now(),
        });
        // All is in place before the reader may send: nothing can arrive unseen.
        let mut session = conn.session.lock();
        session.pair.arm()?;
        let os = |e: rustix::io::Errno| Error::io("can't watch a connection", &e.into());
        self.shared.crew.watch_life(session.pair.fd(), number, PARKED).map_err(os)?;
        self.by_key.insert(key, number);
        let stranger = self.shared.places.put(Arc::clone(&conn));
        let accepted = session.pair.accept(config.patience.connect_options(), &terms(NODE).encode());
        drop(session);
        stranger.iter().for_each(|stranger| make_room(&self.shared, stranger));
        if accepted.is_err() {
            self.shared.remove(&conn);
        }
        Ok(accepted?)
    }

    /// Ends connections that are late with a request, asks idle ones for a sign of life, listens again where a device is
    /// back, and forgets what is over.
    fn look_after(&mut self) {
        let config = &self.shared.config;
        let conns = self.shared.places.all();
        for conn in &conns {
            // No end of it is to be told of: its device is gone.
            if conn.breaker.is_lost() {
                self.shared.remove(conn);
                continue;
            }
            let late = conn.is_late(config);
            let Some(mut session) = conn.session.try_lock() else {
                // One that is being worked on is alive; a stranger may hold up whoever does so.
                if late {
                    conn.breaker.break_now("it has not greeted in time");
                }
                continue;
            };
            // Whoever has it at hand waits for something on another connection, and has not said so.
            if conn.held.is_neglected()
                && let End::Close(error) = ring(&self.shared, conn)
            {
                drop(session);
                tracing::warn!("connection of {}: {error}", conn.state.endpoints().peer);
                self.shared.remove(conn);
                continue;
            }
            let begun = session.line.assembly.begun();
            if late || begun.is_some_and(|begun| begun.elapsed() > config.request_timeout) {
                let (peer, limit) = (&conn.state.endpoints().peer, config.request_timeout);
                let why = format!("no whole request within {limit:?}");
                self.shared.refusals.refused(peer, Reason::Silent, &why);
                session.pair.disconnect();
                conn.breaker.break_now("no whole request came in time");
            } else if session.line.silent_for() > config.idle_probe {
                session.line.listen_anew();
                // A failure breaks the queue pair, which is an event for the workers.
                if session.pair.probe(Instant::now()).is_err() {
                    conn.breaker.break_now("the reader's NIC gives no sign of life");
                }
            }
        }
        let live: std::collections::HashSet<u64> = conns.iter().map(|conn| conn.state.id()).collect();
        self.by_key.retain(|_, id| live.contains(id));
        for listener in &mut self.listeners {
            listener.again(&self.channel);
        }
    }
}
