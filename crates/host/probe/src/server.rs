//! The probe server: listens, serves streams and reports the cost on this host. Measures nothing and prints nothing, but reports
//! events.

use crate::drive::thread_cpu;
use crate::frame::{self, MAX_BODY, REFUSED, VERSION};
use crate::link::{self, InterfaceCounters, KernelFiles};
use crate::message::{
    self, AttachRequest, ClientHello, OpenReply, OpenRequest, ProbePlan, ProbeTransport, ServerReport, ServerWelcome,
    TcpView, kind,
};
use crate::stream::StopSignal;
use crate::{host_name, paths, proof, rdma, tcp, tcp_info};
use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use spurline_net_tcp::SocketOptions;
use spurline_sys::random;
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::QueuePairBreaker;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time for a client's first frame.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for streams to end after the client's end of the measurement.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a listener checks for the stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Collects this host's facts for a client.
pub type FactsProvider = Box<dyn Fn() -> Result<Vec<u8>> + Send + Sync>;

/// Configuration of a server.
pub struct ServeConfig {
    /// Addresses to listen on; empty: all, of both families.
    pub addresses: Vec<IpAddr>,
    /// The port; 0: a free port.
    pub port: u16,
    /// Time limit of a silent client, and of a stream without progress.
    pub patience: Duration,
    /// Most connections at a time.
    pub max_connections: usize,
    /// The group token that clients must prove, if any.
    pub trust: Arc<Trust>,
    /// Answers [`kind::FACTS`], if set.
    pub facts: Option<FactsProvider>,
    /// Called for every event, from many threads.
    pub on_event: Box<dyn Fn(ServerEvent) + Send + Sync>,
}

/// An event.
#[derive(Debug, Clone)]
pub enum ServerEvent {
    /// A measurement begins: all streams are connected.
    Begun {
        /// The client.
        from: IpAddr,
        /// The plan.
        plan: ProbePlan,
    },
    /// A measurement ended.
    Ended {
        /// The client.
        from: IpAddr,
        /// The plan.
        plan: ProbePlan,
        /// The duration.
        elapsed: Duration,
        /// The result.
        report: Box<ServerReport>,
    },
    /// Facts were sent.
    Facts {
        /// The client.
        from: IpAddr,
        /// How many bytes.
        bytes: usize,
    },
    /// A connection was refused.
    Refused {
        /// The address.
        from: IpAddr,
        /// Why.
        why: String,
    },
}

struct ServerShared {
    config: ServeConfig,
    files: KernelFiles,
    stopping: AtomicBool,
    connections: AtomicUsize,
    /// Measurements by token.
    tests: Mutex<HashMap<u64, Arc<ActiveMeasurement>>>,
    /// Control connections, to report a stop of the server.
    controls: Mutex<HashMap<u64, TcpStream>>,
    next: AtomicU64,
}

/// A measurement under way.
struct ActiveMeasurement {
    from: IpAddr,
    plan: ProbePlan,
    stop: StopSignal,
    begun: Instant,
    before: InterfaceCounters,
    shared_with: AtomicUsize,
    streams: Mutex<MeasurementStreams>,
    changed: Condvar,
}

/// A stream, as far as other threads need for an abort.
enum AttachedStream {
    Tcp(TcpStream),
    Rdma(QueuePairBreaker),
}

#[derive(Default)]
struct MeasurementStreams {
    attached: HashMap<usize, AttachedStream>,
    ended: usize,
    report: ServerReport,
    views: Vec<TcpView>,
}

/// A running server; a drop stops the server.
pub struct ProbeServer {
    shared: Arc<ServerShared>,
    listeners: Vec<JoinHandle<()>>,
    addresses: Vec<SocketAddr>,
}

impl ProbeServer {
    /// Starts listening.
    ///
    /// # Errors
    /// When an address can't be used; the message names the address.
    pub fn start(config: ServeConfig) -> Result<ProbeServer> {
        let sockets = bind_listeners(&config)?;
        let shared = Arc::new(ServerShared {
            config,
            files: KernelFiles::default(),
            stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            tests: Mutex::default(),
            controls: Mutex::default(),
            next: AtomicU64::new(0),
        });
        let mut server = ProbeServer { shared, listeners: Vec::new(), addresses: Vec::new() };
        for socket in sockets {
            server.addresses.push(socket.local_addr().map_err(|e| Error::io("can't listen", &e))?);
            let shared = Arc::clone(&server.shared);
            server.listeners.push(
                std::thread::Builder::new()
                    .name("listen".into())
                    .spawn(move || accept_connections(&shared, &socket))
                    .map_err(|e| Error::io("can't listen", &e))?,
            );
        }
        Ok(server)
    }

    /// Addresses in use.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Ends all measurements, informs the clients, and stops listening.
    pub fn stop_server(&mut self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        for control in self.shared.controls.lock().values() {
            // An unreachable client notices by itself.
            let _ = send_refusal(control, "the server was stopped");
        }
        for test in self.shared.tests.lock().values() {
            test.abort_streams();
        }
        for listener in self.listeners.drain(..) {
            // There is no result.
            let _ = listener.join();
        }
        let end = Instant::now() + END_TIMEOUT;
        while self.shared.connections.load(Ordering::Relaxed) > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for ProbeServer {
    fn drop(&mut self) {
        self.stop_server();
    }
}

fn bind_listeners(config: &ServeConfig) -> Result<Vec<TcpListener>> {
    let bind = |ip: IpAddr| {
        let socket = TcpListener::bind(SocketAddr::new(ip, config.port))?;
        SocketOptions::default().apply_before_connect(socket.as_fd())?;
        Ok::<_, std::io::Error>((ip, socket))
    };
    if config.addresses.is_empty() {
        // A single socket for both families, where the host has IPv6.
        let both = bind(Ipv6Addr::UNSPECIFIED.into()).or_else(|e| match e.kind() {
            std::io::ErrorKind::AddrInUse | std::io::ErrorKind::PermissionDenied => Err(e),
            _ => bind(Ipv4Addr::UNSPECIFIED.into()),
        });
        return both.map(|(_, socket)| vec![socket]).map_err(|e| listen_error(&format!("port {}", config.port), &e));
    }
    config
        .addresses
        .iter()
        .map(|ip| {
            let address = SocketAddr::new(*ip, config.port);
            bind(*ip).map(|(_, socket)| socket).map_err(|e| listen_error(&address.to_string(), &e))
        })
        .collect()
}

fn listen_error(at: &str, e: &std::io::Error) -> Error {
    Error::io(format_args!("can't listen on {at}"), e)
}

fn accept_connections(shared: &Arc<ServerShared>, listener: &TcpListener) {
    // A blocking accept would not notice the stop.
    let tick = Timespec::try_from(STOP_POLL_INTERVAL).unwrap_or(Timespec { tv_sec: 0, tv_nsec: 100_000_000 });
    while !shared.stopping.load(Ordering::Relaxed) {
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&tick)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => continue,
            Ok(_) => {}
            Err(_) => return,
        }
        let Ok((socket, peer)) = listener.accept() else {
            // Out of descriptors, or a client that left at once.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let from = peer.ip().to_canonical();
        let number = shared.connections.fetch_add(1, Ordering::Relaxed);
        let held = ConnectionCount(Arc::clone(shared));
        if number >= shared.config.max_connections {
            let why = format!("{number} connections are open, the most possible");
            // The refusal itself is optional.
            let _ = send_refusal(&socket, &why);
            (shared.config.on_event)(ServerEvent::Refused { from, why });
            continue;
        }
        if let Err(e) = std::thread::Builder::new().name("caller".into()).spawn(move || {
            let shared = &held.0;
            if let Err(e) = serve_connection(shared, socket, from) {
                (shared.config.on_event)(ServerEvent::Refused { from, why: e.message().to_owned() });
            }
        }) {
            (shared.config.on_event)(ServerEvent::Refused { from, why: format!("no thread for it: {e}") });
        }
    }
}

/// Counts a connection until the drop.
struct ConnectionCount(Arc<ServerShared>);

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

fn send_refusal(socket: &TcpStream, why: &str) -> Result<()> {
    frame::send_frame(socket, REFUSED, why.as_bytes(), Instant::now() + Duration::from_millis(500))
}

/// Reports a refusal to the client and as an event.
fn refuse_connection(socket: &TcpStream, why: String) -> Result<()> {
    // The client may be gone.
    let _ = send_refusal(socket, &why);
    Err(Error::new(ErrorKind::Protocol, why))
}

fn serve_connection(shared: &Arc<ServerShared>, socket: TcpStream, from: IpAddr) -> Result<()> {
    SocketOptions::default().apply_options(socket.as_fd()).map_err(|e| Error::io("can't set options", &e))?;
    let first = match frame::receive_frame(&socket, MAX_BODY, Instant::now() + HELLO_TIMEOUT) {
        Ok(Some(first)) => first,
        // Probably a port check.
        Ok(None) => return Err(Error::new(ErrorKind::Protocol, "it closed the connection without a request")),
        Err(e) if e.kind() == ErrorKind::Timeout => {
            let why = format!("it sent no complete request within {} s", HELLO_TIMEOUT.as_secs());
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        Err(e) => return Err(e),
    };
    if first.head.version != VERSION {
        let why = format!(
            "{} is spurline {} and uses version {VERSION} of this protocol, the client version {}",
            host_name(),
            env!("CARGO_PKG_VERSION"),
            first.head.version
        );
        return refuse_connection(&socket, why);
    }
    let first = match proof::check(&socket, &shared.config.trust, first, Instant::now() + HELLO_TIMEOUT) {
        Ok(Some(first)) => first,
        Ok(None) => return Err(Error::new(ErrorKind::Protocol, "it closed the connection without a request")),
        Err(e) => return refuse_connection(&socket, e.message().to_owned()),
    };
    match first.head.kind {
        kind::HELLO => serve_control(shared, &socket, from, &message::decode_message(&first.body)?),
        kind::ATTACH => serve_data(shared, socket, from, &message::decode_message(&first.body)?),
        other => refuse_connection(&socket, format!("a connection can't begin with a message of kind {other}")),
    }
}

/// Serves a client's control connection, from the hello to the end.
fn serve_control(shared: &Arc<ServerShared>, socket: &TcpStream, from: IpAddr, _hello: &ClientHello) -> Result<()> {
    let number = shared.next.fetch_add(1, Ordering::Relaxed);
    let here = socket.local_addr().map_err(|e| Error::io("a connection", &e))?;
    let link = shared.files.link_of(here);
    let rdma = rdma::check_device(here.ip().to_canonical());
    let welcome = ServerWelcome {
        program: env!("CARGO_PKG_VERSION").into(),
        host: host_name(),
        link,
        running: shared.tests.lock().len(),
        transports: if rdma.is_ok() {
            vec![ProbeTransport::Tcp, ProbeTransport::Rdma]
        } else {
            vec![ProbeTransport::Tcp]
        },
        without_rdma: rdma.err().map(|e| e.message().to_owned()).unwrap_or_default(),
        facts: shared.config.facts.is_some(),
    };
    let reply = |kind: u16, body: &[u8]| frame::send_frame(socket, kind, body, Instant::now() + shared.config.patience);
    reply(kind::WELCOME, &message::encode_message(&welcome))?;
    shared.controls.lock().insert(number, socket.try_clone().map_err(|e| Error::io("a connection", &e))?);
    let mut running: Option<RegisteredMeasurement> = None;
    let result = loop {
        let frame = match frame::receive_frame(socket, MAX_BODY, Instant::now() + shared.config.patience) {
            Ok(Some(frame)) => frame,
            Ok(None) => break Ok(()),
            Err(e) if e.kind() == ErrorKind::Timeout => {
                let why = format!("the client sent nothing for {} s", shared.config.patience.as_secs_f64());
                break refuse_connection(socket, why);
            }
            Err(e) => break Err(e),
        };
        let handled = match frame.head.kind {
            kind::ALIVE => Ok(()),
            kind::OPEN if running.is_none() => {
                open_measurement(shared, from, here, &frame.body).and_then(|(test, opened)| {
                    running = Some(test);
                    reply(kind::OPENED, &message::encode_message(&opened))
                })
            }
            kind::FINISH => match running.take() {
                Some(test) => reply(kind::REPORT, &message::encode_message(&test.finish_measurement())),
                None => Err(Error::new(ErrorKind::Protocol, "no measurement is open")),
            },
            // Reads long tables, so only on request.
            kind::INTERFACES => message::decode_message::<ProbeTransport>(&frame.body)
                .and_then(|transport| paths::local_interfaces(transport, here.ip()))
                .and_then(|all| reply(kind::INTERFACES_ARE, &message::encode_message(&all))),
            kind::FACTS => match &shared.config.facts {
                Some(facts) => facts().and_then(|bytes| {
                    (shared.config.on_event)(ServerEvent::Facts { from, bytes: bytes.len() });
                    reply(kind::FACTS_ARE, &bytes)
                }),
                None => Err(Error::new(ErrorKind::Unsupported, "this server provides no facts")),
            },
            other => Err(Error::new(ErrorKind::Protocol, format!("a message of kind {other} is not expected here"))),
        };
        if let Err(e) = handled {
            break refuse_connection(socket, e.message().to_owned());
        }
    };
    shared.controls.lock().remove(&number);
    if let Some(test) = running.take() {
        test.abandon_measurement();
    }
    // A client that leaves during the stop is not reported.
    if shared.stopping.load(Ordering::Relaxed) { Ok(()) } else { result }
}

/// A measurement in the table; removed at the end.
struct RegisteredMeasurement {
    shared: Arc<ServerShared>,
    token: u64,
    here: SocketAddr,
    test: Arc<ActiveMeasurement>,
}

fn open_measurement(
    shared: &Arc<ServerShared>,
    from: IpAddr,
    here: SocketAddr,
    body: &[u8],
) -> Result<(RegisteredMeasurement, OpenReply)> {
    let open: OpenRequest = message::decode_message(body)?;
    let plan = open.plan;
    plan.check_bounds()?;
    let listeners = match plan.transport {
        ProbeTransport::Tcp => Vec::new(),
        ProbeTransport::Rdma if plan.paths.is_empty() => vec![rdma::RdmaListener::new(here.ip().to_canonical())?],
        ProbeTransport::Rdma => plan.paths.iter().map(|p| rdma::RdmaListener::new(p.to)).collect::<Result<_>>()?,
    };
    let test = Arc::new(ActiveMeasurement {
        from,
        stop: StopSignal::new(shared.config.patience),
        begun: Instant::now(),
        before: shared.files.read_counters(),
        shared_with: AtomicUsize::new(0),
        streams: Mutex::default(),
        changed: Condvar::new(),
        plan,
    });
    let mut tests = shared.tests.lock();
    let all: usize = tests.values().map(|t| load_count(t)).sum::<usize>() + load_count(&test);
    for one in tests.values().chain([&test]) {
        one.shared_with.fetch_max(all - load_count(one), Ordering::Relaxed);
    }
    let token = random();
    tests.insert(token, Arc::clone(&test));
    drop(tests);
    let running = RegisteredMeasurement { shared: Arc::clone(shared), token, here, test };
    let mut answer = Vec::new();
    for listener in listeners {
        answer.extend(listener.port().to_le_bytes());
        let shared = Arc::clone(shared);
        let test = Arc::clone(&running.test);
        let thread = std::thread::Builder::new().name("rdma".into()).spawn(move || {
            listener.accept_streams(token, &test.plan, &test.stop, |index, connected| {
                serve_rdma(&shared, &test, index, connected)
            });
        });
        thread.map_err(|e| Error::io("no thread for rdma", &e))?;
    }
    Ok((running, OpenReply { token, answer }))
}

fn load_count(test: &ActiveMeasurement) -> usize {
    usize::from(test.plan.streams.iter().any(|op| !op.is_round_trip()))
}

impl RegisteredMeasurement {
    /// Waits for the streams to end and reports the result.
    fn finish_measurement(self) -> ServerReport {
        self.test.wait_streams(END_TIMEOUT);
        self.take_report("")
    }

    /// Ends the streams of a lost client.
    fn abandon_measurement(self) {
        self.take_report("the client left");
    }

    fn take_report(&self, why: &str) -> ServerReport {
        self.shared.tests.lock().remove(&self.token);
        self.test.abort_streams();
        self.test.wait_streams(END_TIMEOUT);
        let streams = self.test.streams.lock();
        let mut report = streams.report.clone();
        report.tcp = tcp_info::merge_views(&streams.views);
        drop(streams);
        if report.error.is_empty() {
            why.clone_into(&mut report.error);
        }
        report.shared_with = self.test.shared_with.load(Ordering::Relaxed);
        let bytes = report.received_bytes + report.sent_bytes;
        let after = self.shared.files.read_counters();
        let seen = |address: SocketAddr, bytes: u64| {
            let mut link = self.shared.files.link_of(address);
            if self.test.plan.transport == ProbeTransport::Tcp {
                link::detect_carrier(&mut link, &self.test.before, &after, bytes);
            }
            link
        };
        let paths = &self.test.plan.paths;
        let several = paths.len() > 1;
        if several {
            // The client counts the bytes of each path, and compares the counters.
            report.links = paths.iter().map(|p| self.shared.files.link_of((p.to, 0).into())).collect();
        } else {
            report.links = Vec::new();
        }
        report.link = match (report.links.first(), paths.first()) {
            (Some(first), _) => first.clone(),
            (None, Some(path)) => seen((path.to, 0).into(), bytes),
            (None, None) => seen(self.here, bytes),
        };
        let from = self.test.from;
        let plan = self.test.plan.clone();
        let elapsed = self.test.begun.elapsed();
        (self.shared.config.on_event)(ServerEvent::Ended { from, plan, elapsed, report: Box::new(report.clone()) });
        report
    }
}

impl ActiveMeasurement {
    /// Ends all streams, also streams blocked in the kernel.
    fn abort_streams(&self) {
        self.stop.cut();
        for stream in self.streams.lock().attached.values() {
            match stream {
                // The stream may have ended by itself.
                AttachedStream::Tcp(socket) => drop(socket.shutdown(Shutdown::Both)),
                AttachedStream::Rdma(breaker) => breaker.break_now("the measurement is over"),
            }
        }
    }

    /// Adds a stream; returns whether the plan is complete, or `None` when the index is taken.
    fn attach_stream(&self, index: usize, stream: AttachedStream) -> Option<bool> {
        let mut streams = self.streams.lock();
        if streams.attached.contains_key(&index) {
            return None;
        }
        streams.attached.insert(index, stream);
        Some(streams.attached.len() == self.plan.streams.len())
    }

    /// Records a stream's result.
    fn record_end(&self, cpu: f64, served: tcp::ServedBytes, view: Option<TcpView>, result: Result<()>) {
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
            && !self.stop.is_aborted()
        {
            report.error = e.message().to_owned();
        }
        drop(streams);
        self.changed.notify_all();
    }

    /// Waits until all attached streams have ended.
    fn wait_streams(&self, limit: Duration) {
        let end = Instant::now() + limit;
        let mut streams = self.streams.lock();
        while streams.ended < streams.attached.len() {
            if self.changed.wait_until(&mut streams, end).timed_out() {
                return;
            }
        }
    }
}

/// Serves a client's data connection.
fn serve_data(shared: &Arc<ServerShared>, socket: TcpStream, from: IpAddr, attach: &AttachRequest) -> Result<()> {
    let test = shared.tests.lock().get(&attach.token).cloned();
    // Over several paths a client has several addresses; the token alone identifies the client.
    let Some(test) = test.filter(|test| test.from == from || !test.plan.paths.is_empty()) else {
        return refuse_connection(&socket, "no measurement has that token".into());
    };
    let Some(op) = test.plan.streams.get(attach.stream).copied() else {
        return refuse_connection(&socket, format!("the measurement has no stream {}", attach.stream));
    };
    let mine = socket.try_clone().map_err(|e| Error::io("a connection", &e))?;
    let Some(all) = test.attach_stream(attach.stream, AttachedStream::Tcp(mine)) else {
        return refuse_connection(&socket, format!("stream {} is attached", attach.stream));
    };
    let mut served = tcp::ServedBytes::default();
    let cpu = thread_cpu();
    let kept = socket.try_clone();
    let result = frame::send_frame(&socket, kind::ATTACHED, &[], Instant::now() + HELLO_TIMEOUT).and_then(|()| {
        if all {
            (shared.config.on_event)(ServerEvent::Begun { from, plan: test.plan.clone() });
        }
        tcp::serve_stream(socket, op, &test.plan, &test.stop, &mut served)
    });
    let cpu = thread_cpu() - cpu;
    let view = kept.ok().map(|kept| {
        let view = tcp_info::connection_view(&kept);
        // The socket's clones must not keep the connection open.
        let _ = kept.shutdown(Shutdown::Both);
        view
    });
    test.record_end(cpu, served, view, result);
    Ok(())
}

/// Serves a stream over verbs, on a separate thread.
fn serve_rdma(
    shared: &Arc<ServerShared>,
    test: &Arc<ActiveMeasurement>,
    index: usize,
    connected: rdma::ConnectedStream,
) {
    let Some(all) = test.attach_stream(index, AttachedStream::Rdma(connected.breaker())) else { return };
    if all {
        (shared.config.on_event)(ServerEvent::Begun { from: test.from, plan: test.plan.clone() });
    }
    let mine = Arc::clone(test);
    if let Err(e) = std::thread::Builder::new().name("stream".into()).spawn(move || {
        let mut served = tcp::ServedBytes::default();
        let cpu = thread_cpu();
        let result = rdma::serve_stream(connected, &mine.plan, &mine.stop, &mut served);
        mine.record_end(thread_cpu() - cpu, served, None, result);
    }) {
        test.record_end(0.0, tcp::ServedBytes::default(), None, Err(Error::io("no thread for a stream", &e)));
    }
}
