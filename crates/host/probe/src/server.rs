//! The far end: listens, answers callers, serves their streams and reports what they cost here. It measures nothing by
//! itself and prints nothing; what happens it tells as events.

use crate::drive::thread_cpu;
use crate::frame::{self, MAX_BODY, REFUSED, VERSION};
use crate::lane::Stop;
use crate::link::{self, Counters, Files};
use crate::message::{self, Attach, Hello, Open, Opened, Plan, Report, TcpView, Transport, Welcome, kind};
use crate::{host_name, paths, rdma, tcp, tcp_info};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spurline_net_tcp::SocketOptions;
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::Breaker;
use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hasher as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A caller has said its first word by then.
const GREETING: Duration = Duration::from_secs(5);
/// Streams get this long to end once the client says that it is done.
const ENDING: Duration = Duration::from_secs(3);
/// How often a listener looks whether it should end.
const LOOK: Duration = Duration::from_millis(100);

/// Gathers this host's facts for a caller.
pub type Facts = Box<dyn Fn() -> Result<Vec<u8>> + Send + Sync>;

/// What a server is told.
pub struct ServeConfig {
    /// Where to listen; empty: everywhere, both families.
    pub addresses: Vec<IpAddr>,
    /// The port; 0 lets the kernel choose.
    pub port: u16,
    /// A client that says nothing for this long is given up, and a stream on which nothing moves.
    pub patience: Duration,
    /// The most connections at a time.
    pub max_connections: usize,
    /// Answers [`kind::FACTS`].
    pub facts: Option<Facts>,
    /// Is told what happens, from many threads.
    pub tell: Box<dyn Fn(Event) + Send + Sync>,
}

/// Something happened.
#[derive(Debug, Clone)]
pub enum Event {
    /// A measurement begins: all its streams are there.
    Begun {
        /// The client.
        from: IpAddr,
        /// What it measures.
        plan: Plan,
    },
    /// A measurement ended, one way or the other.
    Ended {
        /// The client.
        from: IpAddr,
        /// What it measured.
        plan: Plan,
        /// How long it took.
        elapsed: Duration,
        /// What it came to.
        report: Box<Report>,
    },
    /// Facts were handed out.
    Facts {
        /// To whom.
        from: IpAddr,
        /// How many bytes.
        bytes: usize,
    },
    /// A connection was of no use.
    Refused {
        /// Whose.
        from: IpAddr,
        /// Why.
        why: String,
    },
}

struct Shared {
    config: ServeConfig,
    files: Files,
    stopping: AtomicBool,
    connections: AtomicUsize,
    /// Measurements by their token.
    tests: Mutex<HashMap<u64, Arc<Test>>>,
    /// Every client that can be told that the server stops.
    controls: Mutex<HashMap<u64, TcpStream>>,
    next: AtomicU64,
}

/// A measurement under way.
struct Test {
    from: IpAddr,
    plan: Plan,
    stop: Stop,
    begun: Instant,
    before: Counters,
    shared_with: AtomicUsize,
    streams: Mutex<Streams>,
    changed: Condvar,
}

/// A stream as other threads can end it.
enum Stream {
    Tcp(TcpStream),
    Rdma(Breaker),
}

#[derive(Default)]
struct Streams {
    attached: HashMap<usize, Stream>,
    ended: usize,
    report: Report,
    views: Vec<TcpView>,
}

/// A server that runs until it is stopped or dropped.
pub struct Server {
    shared: Arc<Shared>,
    listeners: Vec<JoinHandle<()>>,
    addresses: Vec<SocketAddr>,
}

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// When an address can't be listened on; says which.
    pub fn start(config: ServeConfig) -> Result<Server> {
        let sockets = listen(&config)?;
        let shared = Arc::new(Shared {
            config,
            files: Files::default(),
            stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            tests: Mutex::default(),
            controls: Mutex::default(),
            next: AtomicU64::new(0),
        });
        let mut server = Server { shared, listeners: Vec::new(), addresses: Vec::new() };
        for socket in sockets {
            let failed = |e: std::io::Error| Error::io("can't listen", &e);
            server.addresses.push(socket.local_addr().map_err(failed)?);
            let shared = Arc::clone(&server.shared);
            let accept = move || accept(&shared, &socket);
            server.listeners.push(std::thread::Builder::new().name("listen".into()).spawn(accept).map_err(failed)?);
        }
        Ok(server)
    }

    /// Where it listens.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Ends all measurements, telling their clients, and stops listening.
    pub fn stop(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        for control in self.shared.controls.lock().values() {
            // Whoever can't be told any more finds out.
            let _ = refuse(control, "the server was stopped");
        }
        for test in self.shared.tests.lock().values() {
            test.cut();
        }
        for listener in self.listeners.drain(..) {
            // It has nothing to say.
            let _ = listener.join();
        }
        let end = Instant::now() + ENDING;
        while self.shared.connections.load(Ordering::Relaxed) > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

fn listen(config: &ServeConfig) -> Result<Vec<TcpListener>> {
    let bind = |ip: IpAddr| {
        let socket = TcpListener::bind(SocketAddr::new(ip, config.port))?;
        SocketOptions::default().prepare(socket.as_fd())?;
        Ok::<_, std::io::Error>((ip, socket))
    };
    if config.addresses.is_empty() {
        // One socket for both families, where the host has IPv6.
        let both = bind(Ipv6Addr::UNSPECIFIED.into()).or_else(|e| match e.kind() {
            std::io::ErrorKind::AddrInUse | std::io::ErrorKind::PermissionDenied => Err(e),
            _ => bind(Ipv4Addr::UNSPECIFIED.into()),
        });
        return both.map(|(_, socket)| vec![socket]).map_err(|e| cannot(&format!("port {}", config.port), &e));
    }
    let one = |ip: &IpAddr| {
        let address = SocketAddr::new(*ip, config.port);
        bind(*ip).map(|(_, socket)| socket).map_err(|e| cannot(&address.to_string(), &e))
    };
    config.addresses.iter().map(one).collect()
}

fn cannot(at: &str, e: &std::io::Error) -> Error {
    Error::io(format_args!("can't listen on {at}"), e)
}

fn accept(shared: &Arc<Shared>, listener: &TcpListener) {
    // A blocking accept would not see the end.
    let tick = Timespec::try_from(LOOK).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
    while !shared.stopping.load(Ordering::Relaxed) {
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&tick)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        let Ok((socket, peer)) = listener.accept() else {
            // Out of descriptors, or a caller that left at once.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let from = peer.ip().to_canonical();
        let number = shared.connections.fetch_add(1, Ordering::Relaxed);
        let held = Held(Arc::clone(shared));
        if number >= shared.config.max_connections {
            let why = format!("{number} connections are open, which is the most");
            // Its answer matters little to who comes as one too many.
            let _ = refuse(&socket, &why);
            (shared.config.tell)(Event::Refused { from, why });
            continue;
        }
        let work = move || {
            let shared = &held.0;
            if let Err(e) = answer(shared, socket, from) {
                (shared.config.tell)(Event::Refused { from, why: e.message().to_owned() });
            }
        };
        if let Err(e) = std::thread::Builder::new().name("caller".into()).spawn(work) {
            (shared.config.tell)(Event::Refused { from, why: format!("no thread for it: {e}") });
        }
    }
}

/// Counts a connection for as long as it lives.
struct Held(Arc<Shared>);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn refuse(socket: &TcpStream, why: &str) -> Result<()> {
    frame::send(socket, REFUSED, why.as_bytes(), Instant::now() + Duration::from_millis(500))
}

/// Tells the caller, and whoever watches this end.
fn refused(socket: &TcpStream, why: String) -> Result<()> {
    // The caller may be gone.
    let _ = refuse(socket, &why);
    Err(Error::new(ErrorKind::Protocol, why))
}

fn answer(shared: &Arc<Shared>, socket: TcpStream, from: IpAddr) -> Result<()> {
    SocketOptions::default().apply(socket.as_fd()).map_err(|e| Error::io("can't set options", &e))?;
    let first = match frame::receive(&socket, MAX_BODY, Instant::now() + GREETING) {
        Ok(Some(first)) => first,
        // Somebody looked whether the port is open.
        Ok(None) => return Err(Error::new(ErrorKind::Protocol, "it connected and left without a word")),
        Err(e) if e.kind() == ErrorKind::Timeout => {
            let why = format!("it said nothing that could be read within {} s", GREETING.as_secs());
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        Err(e) => return Err(e),
    };
    if first.head.version != VERSION {
        let why = format!(
            "{} is spurline {} and speaks version {VERSION} of this protocol, the caller version {}",
            host_name(),
            env!("CARGO_PKG_VERSION"),
            first.head.version
        );
        return refused(&socket, why);
    }
    match first.head.kind {
        kind::HELLO => control(shared, &socket, from, &message::decode(&first.body)?),
        kind::ATTACH => data(shared, socket, from, &message::decode(&first.body)?),
        other => refused(&socket, format!("a conversation does not begin with a message of kind {other}")),
    }
}

/// A client's control connection, from its greeting to its end.
fn control(shared: &Arc<Shared>, socket: &TcpStream, from: IpAddr, _hello: &Hello) -> Result<()> {
    let number = shared.next.fetch_add(1, Ordering::Relaxed);
    let failed = |e: std::io::Error| Error::io("a connection", &e);
    let here = socket.local_addr().map_err(failed)?;
    let link = shared.files.link_of(here);
    let rdma = rdma::usable(here.ip().to_canonical());
    let welcome = Welcome {
        program: env!("CARGO_PKG_VERSION").into(),
        host: host_name(),
        link,
        running: shared.tests.lock().len(),
        transports: if rdma.is_ok() { vec![Transport::Tcp, Transport::Rdma] } else { vec![Transport::Tcp] },
        without_rdma: rdma.err().map(|e| e.message().to_owned()).unwrap_or_default(),
        facts: shared.config.facts.is_some(),
    };
    let reply = |kind: u16, body: &[u8]| frame::send(socket, kind, body, Instant::now() + shared.config.patience);
    reply(kind::WELCOME, &message::encode(&welcome))?;
    shared.controls.lock().insert(number, socket.try_clone().map_err(failed)?);
    let mut running: Option<Running> = None;
    let result = loop {
        let frame = match frame::receive(socket, MAX_BODY, Instant::now() + shared.config.patience) {
            Ok(Some(frame)) => frame,
            Ok(None) => break Ok(()),
            Err(e) if e.kind() == ErrorKind::Timeout => {
                let why = format!("the client said nothing for {} s", shared.config.patience.as_secs_f64());
                break refused(socket, why);
            }
            Err(e) => break Err(e),
        };
        let handled = match frame.head.kind {
            kind::ALIVE => Ok(()),
            kind::OPEN if running.is_none() => open(shared, from, here, &frame.body).and_then(|(test, opened)| {
                running = Some(test);
                reply(kind::OPENED, &message::encode(&opened))
            }),
            kind::FINISH => match running.take() {
                Some(test) => reply(kind::REPORT, &message::encode(&test.finish())),
                None => Err(Error::new(ErrorKind::Protocol, "nothing was being measured")),
            },
            // Long tables are read for it, so not for every greeting.
            kind::INTERFACES => message::decode::<Transport>(&frame.body)
                .and_then(|transport| paths::here(transport, here.ip()))
                .and_then(|all| reply(kind::INTERFACES_ARE, &message::encode(&all))),
            kind::FACTS => match &shared.config.facts {
                Some(facts) => facts().and_then(|bytes| {
                    (shared.config.tell)(Event::Facts { from, bytes: bytes.len() });
                    reply(kind::FACTS_ARE, &bytes)
                }),
                None => Err(Error::new(ErrorKind::Unsupported, "this server has no facts to give")),
            },
            other => Err(Error::new(ErrorKind::Protocol, format!("a message of kind {other} makes no sense here"))),
        };
        if let Err(e) = handled {
            break refused(socket, e.message().to_owned());
        }
    };
    shared.controls.lock().remove(&number);
    if let Some(test) = running.take() {
        test.abandon();
    }
    // One that leaves while it is stopped is no news.
    if shared.stopping.load(Ordering::Relaxed) { Ok(()) } else { result }
}

/// A measurement in the table, taken out of it at its end.
struct Running {
    shared: Arc<Shared>,
    token: u64,
    here: SocketAddr,
    test: Arc<Test>,
}

fn open(shared: &Arc<Shared>, from: IpAddr, here: SocketAddr, body: &[u8]) -> Result<(Running, Opened)> {
    let open: Open = message::decode(body)?;
    let plan = open.plan;
    plan.check()?;
    let listeners = match plan.transport {
        Transport::Tcp => Vec::new(),
        Transport::Rdma if plan.paths.is_empty() => vec![rdma::Listener::new(here.ip().to_canonical())?],
        Transport::Rdma => plan.paths.iter().map(|p| rdma::Listener::new(p.to)).collect::<Result<_>>()?,
    };
    let test = Arc::new(Test {
        from,
        stop: Stop::new(shared.config.patience),
        begun: Instant::now(),
        before: shared.files.counters(),
        shared_with: AtomicUsize::new(0),
        streams: Mutex::default(),
        changed: Condvar::new(),
        plan,
    });
    let mut tests = shared.tests.lock();
    let loads = |test: &Test| usize::from(test.plan.streams.iter().any(|op| !op.is_round_trip()));
    let all: usize = tests.values().map(|t| loads(t)).sum::<usize>() + loads(&test);
    for one in tests.values().chain([&test]) {
        one.shared_with.fetch_max(all - loads(one), Ordering::Relaxed);
    }
    // Nobody guesses it; the standard library's hash keys are random.
    let token = std::collections::hash_map::RandomState::new().build_hasher().finish();
    tests.insert(token, Arc::clone(&test));
    drop(tests);
    let running = Running { shared: Arc::clone(shared), token, here, test };
    let mut answer = Vec::new();
    for listener in listeners {
        answer.extend(listener.port().to_le_bytes());
        let (shared, test) = (Arc::clone(shared), Arc::clone(&running.test));
        let take = move || {
            listener.run(token, &test.plan, &test.stop, |index, connected| over_rdma(&shared, &test, index, connected));
        };
        let thread = std::thread::Builder::new().name("rdma".into()).spawn(take);
        thread.map_err(|e| Error::io("no thread for rdma", &e))?;
    }
    Ok((running, Opened { token, answer }))
}

impl Running {
    /// Waits for the streams' ends and says what they came to.
    fn finish(self) -> Report {
        self.test.wait(ENDING);
        self.leave("")
    }

    /// Ends the streams of a client that is gone.
    fn abandon(self) {
        self.leave("the client left");
    }

    fn leave(&self, why: &str) -> Report {
        self.shared.tests.lock().remove(&self.token);
        self.test.cut();
        self.test.wait(ENDING);
        let streams = self.test.streams.lock();
        let mut report = streams.report.clone();
        report.tcp = tcp_info::together(&streams.views);
        drop(streams);
        if report.error.is_empty() {
            why.clone_into(&mut report.error);
        }
        report.shared_with = self.test.shared_with.load(Ordering::Relaxed);
        let bytes = report.received_bytes + report.sent_bytes;
        let after = self.shared.files.counters();
        let seen = |address: SocketAddr, bytes: u64| {
            let mut link = self.shared.files.link_of(address);
            if self.test.plan.transport == Transport::Tcp {
                link::compare(&mut link, &self.test.before, &after, bytes);
            }
            link
        };
        let paths = &self.test.plan.paths;
        let several = paths.len() > 1;
        report.links = match several {
            // What each carried is counted at the client's end, which does the comparison too.
            true => paths.iter().map(|p| self.shared.files.link_of((p.to, 0).into())).collect(),
            false => Vec::new(),
        };
        report.link = match (report.links.first(), paths.first()) {
            (Some(first), _) => first.clone(),
            (None, Some(path)) => seen((path.to, 0).into(), bytes),
            (None, None) => seen(self.here, bytes),
        };
        let (from, plan, elapsed) = (self.test.from, self.test.plan.clone(), self.test.begun.elapsed());
        (self.shared.config.tell)(Event::Ended { from, plan, elapsed, report: Box::new(report.clone()) });
        report
    }
}

impl Test {
    /// Ends all streams, also those that wait in the kernel.
    fn cut(&self) {
        self.stop.cut();
        for stream in self.streams.lock().attached.values() {
            match stream {
                // It may have ended by itself.
                Stream::Tcp(socket) => drop(socket.shutdown(Shutdown::Both)),
                Stream::Rdma(breaker) => breaker.break_now("the measurement is over"),
            }
        }
    }

    /// Notes a stream; says whether all of the plan are there now, or `None` when this one was before.
    fn attach(&self, index: usize, stream: Stream) -> Option<bool> {
        let mut streams = self.streams.lock();
        if streams.attached.contains_key(&index) {
            return None;
        }
        streams.attached.insert(index, stream);
        Some(streams.attached.len() == self.plan.streams.len())
    }

    /// Notes what a stream came to.
    fn ended(&self, cpu: f64, served: tcp::Served, view: Option<TcpView>, result: Result<()>) {
        let mut streams = self.streams.lock();
        streams.ended += 1;
        streams.views.extend(view);
        let report = &mut streams.report;
        report.cpu_seconds += cpu;
        report.busiest_seconds = report.busiest_seconds.max(cpu);
        report.received_bytes += served.received;
        report.sent_bytes += served.sent;
        if let Err(e) = result
            && report.error.is_empty()
            && !self.stop.is_cut()
        {
            report.error = e.message().to_owned();
        }
        drop(streams);
        self.changed.notify_all();
    }

    /// Waits until every stream that was attached has ended.
    fn wait(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut streams = self.streams.lock();
        while streams.ended < streams.attached.len() {
            if self.changed.wait_until(&mut streams, end).timed_out() {
                return;
            }
        }
    }
}

/// A client's data connection.
fn data(shared: &Arc<Shared>, socket: TcpStream, from: IpAddr, attach: &Attach) -> Result<()> {
    let test = shared.tests.lock().get(&attach.token).cloned();
    // Over several paths a client has several addresses; nobody guesses the token.
    let Some(test) = test.filter(|test| test.from == from || !test.plan.paths.is_empty()) else {
        return refused(&socket, "no measurement has that token".into());
    };
    let Some(op) = test.plan.streams.get(attach.stream).copied() else {
        return refused(&socket, format!("the measurement has no stream {}", attach.stream));
    };
    let mine = socket.try_clone().map_err(|e| Error::io("a connection", &e))?;
    let Some(all) = test.attach(attach.stream, Stream::Tcp(mine)) else {
        return refused(&socket, format!("stream {} is attached", attach.stream));
    };
    let mut served = tcp::Served::default();
    let cpu = thread_cpu();
    let kept = socket.try_clone();
    let result = frame::send(&socket, kind::ATTACHED, &[], Instant::now() + GREETING).and_then(|()| {
        if all {
            (shared.config.tell)(Event::Begun { from, plan: test.plan.clone() });
        }
        tcp::serve(socket, op, &test.plan, &test.stop, &mut served)
    });
    let cpu = thread_cpu() - cpu;
    let view = kept.ok().map(|kept| {
        let view = tcp_info::of(&kept);
        // Its clones must not keep the other end waiting.
        let _ = kept.shutdown(Shutdown::Both);
        view
    });
    test.ended(cpu, served, view, result);
    Ok(())
}

/// A stream that was connected over verbs, on a thread of its own.
fn over_rdma(shared: &Arc<Shared>, test: &Arc<Test>, index: usize, connected: rdma::Connected) {
    let Some(all) = test.attach(index, Stream::Rdma(connected.breaker())) else { return };
    if all {
        (shared.config.tell)(Event::Begun { from: test.from, plan: test.plan.clone() });
    }
    let mine = Arc::clone(test);
    let work = move || {
        let mut served = tcp::Served::default();
        let cpu = thread_cpu();
        let result = rdma::serve(connected, &mine.plan, &mine.stop, &mut served);
        mine.ended(thread_cpu() - cpu, served, None, result);
    };
    if let Err(e) = std::thread::Builder::new().name("stream".into()).spawn(work) {
        test.ended(0.0, tcp::Served::default(), None, Err(Error::io("no thread for a stream", &e)));
    }
}
