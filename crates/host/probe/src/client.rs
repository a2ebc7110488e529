//! The client: connects to a probe server, opens measurements and fetches the reports. Every failure carries a remedy. Judges no
//! result.

use crate::frame::{self, Frame, MAX_BODY, MAX_FACTS, REFUSED, VERSION};
use crate::message::{
    self, AttachRequest, ClientHello, InterfaceRecord, OpenReply, OpenRequest, ProbePlan, ProbeTransport, ServerReport,
    ServerWelcome, kind,
};
use crate::rdma::RdmaProbeStream;
use crate::stream::ProbeStream;
use crate::tcp::TcpProbeStream;
use crate::{DEFAULT_PORT, host_name, proof};
use spurline_net_tcp::{SocketOptions, connect_socket, resolve_peer};
use spurline_trust::Trust;
use spurline_types::Fault;
use spurline_types::{Error, ErrorKind, Result};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

/// Interval of heartbeats to the server.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(1);
/// The server's command.
const SERVER_COMMAND: &str = "`spurline net serve`";
/// The remedy when no server listens.
const START_REMEDY: &str =
    "start it on the other host: spurline net serve --bind INTERFACE (or with --group-token-file)";

/// The server to connect to, and how.
#[derive(Debug, Clone)]
pub struct ConnectConfig {
    /// `host:port`, brackets around IPv6.
    pub peer: String,
    /// Local addresses to connect from; empty: the kernel chooses.
    pub from: Vec<IpAddr>,
    /// Upper limit of every step.
    pub timeout: Duration,
    /// The group token to prove, if any.
    pub trust: Arc<Trust>,
}

/// `HOST` or `HOST:PORT` as `host:port`: a name, an IPv4 address, an IPv6 address with or without brackets and scope.
///
/// # Errors
/// A usage fault for any other text.
pub fn parse_peer(words: &str) -> std::result::Result<String, Fault> {
    let wrong = || {
        let what = format!("'{words}' is no host");
        Fault::usage(
            what,
            "write a name, 192.0.2.1, 2001:db8::1 or fe80::1%eth0; with a port name:1234 or [fe80::1%eth0]:1234",
        )
    };
    let port = |text: &str| text.parse::<u16>().map_err(|_| wrong());
    if let Some(rest) = words.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or_else(wrong)?;
        let number = if after.is_empty() { DEFAULT_PORT } else { port(after.strip_prefix(':').ok_or_else(wrong)?)? };
        return if is_clean_host(host) && host.contains(':') { Ok(format!("[{host}]:{number}")) } else { Err(wrong()) };
    }
    let (host, number) = match words.rsplit_once(':') {
        // Several colons: an IPv6 address without a port.
        Some((host, _)) if host.contains(':') => (format!("[{words}]"), DEFAULT_PORT),
        Some((host, number)) => (host.to_owned(), port(number)?),
        None => (words.to_owned(), DEFAULT_PORT),
    };
    if is_clean_host(host.trim_matches(['[', ']'])) { Ok(format!("{host}:{number}")) } else { Err(wrong()) }
}

fn is_clean_host(host: &str) -> bool {
    !host.is_empty() && host.chars().all(|c| !c.is_whitespace() && !"[]/".contains(c))
}

/// A control connection to a server.
#[derive(Debug)]
pub struct ProbeSession {
    control: TcpStream,
    peer: String,
    local: SocketAddr,
    remote: SocketAddr,
    timeout: Duration,
    /// The server's hello.
    pub welcome: ServerWelcome,
    /// How long connecting took.
    pub connect_time: Duration,
}

impl ProbeSession {
    /// Connects and exchanges hellos; uses the first address that answers.
    ///
    /// # Errors
    /// Separate faults for: unknown name, host down, no listener, another program, another version, and a refusal.
    pub fn connect(call: &ConnectConfig) -> std::result::Result<ProbeSession, Fault> {
        let deadline = Instant::now() + call.timeout;
        let addresses = resolve_peer(&call.peer, deadline).map_err(Fault::from)?;
        let mut last = None;
        for remote in addresses {
            let from = call.from.iter().find(|ip| ip.is_ipv4() == remote.is_ipv4()).copied();
            if from.is_none() && !call.from.is_empty() {
                let family = if remote.is_ipv4() { "IPv4" } else { "IPv6" };
                let what = format!("{remote} needs an {family} address, and the interface chosen has none");
                last = Some(Fault::missing(what, "choose another interface, or another address of the other end"));
                continue;
            }
            let start = Instant::now();
            match connect_socket(remote, from, &SocketOptions::default(), deadline, SERVER_COMMAND) {
                // The first open port decides: no further address is tried silently.
                Ok(socket) => return exchange_hello(call, TcpStream::from(socket), start.elapsed()),
                Err(e) => last = Some(unreachable_fault(&e)),
            }
        }
        Err(last.unwrap_or_else(|| Fault::missing(format!("{} has no address", call.peer), "")))
    }

    /// The local address.
    pub fn local(&self) -> SocketAddr {
        self.local
    }

    /// The server's address.
    pub fn remote(&self) -> SocketAddr {
        self.remote
    }

    /// The server as named by the user.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Opens a measurement and all streams.
    ///
    /// # Errors
    /// When the server refuses, or a stream can't connect.
    pub fn open_streams(&mut self, plan: &ProbePlan) -> std::result::Result<Vec<Box<dyn ProbeStream>>, Fault> {
        plan.check_bounds().map_err(Fault::from)?;
        if !self.welcome.transports.contains(&plan.transport) {
            let why = &self.welcome.without_rdma;
            let what = format!("{} does not measure over {}: {why}", self.peer, plan.transport.name());
            let remedy = "use an address of an RDMA device there (spurline net list), or measure with --transport tcp";
            return Err(Fault::missing(what, remedy));
        }
        let open = OpenRequest { plan: plan.clone(), offer: Vec::new() };
        let frame = self.request_frame(kind::OPEN, &message::encode_message(&open), kind::OPENED, MAX_BODY)?;
        let opened: OpenReply = message::decode_message(&frame.body).map_err(|e| self.session_fault(&e))?;
        self.with_heartbeats(|| match plan.transport {
            ProbeTransport::Tcp => (0..plan.streams.len()).map(|i| self.attach_tcp(plan, &opened, i)).collect(),
            ProbeTransport::Rdma => (0..plan.streams.len()).map(|i| self.connect_rdma(plan, &opened, i)).collect(),
        })
    }

    /// Runs `work` with a heartbeat each second: many streams, or a slow stream, take longer to connect than the server waits for
    /// a message.
    fn with_heartbeats<T>(&self, work: impl FnOnce() -> T) -> T {
        let (done, ended) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while ended.recv_timeout(HEARTBEAT) == Err(RecvTimeoutError::Timeout) {
                    // A lost server is noticed by the streams.
                    let _ = self.send_heartbeat();
                }
            });
            let result = work();
            drop(done);
            result
        })
    }

    fn attach_tcp(
        &self,
        plan: &ProbePlan,
        opened: &OpenReply,
        stream: usize,
    ) -> std::result::Result<Box<dyn ProbeStream>, Fault> {
        let deadline = Instant::now() + self.timeout;
        // Use the address of the control connection, so that all connections take the same route. A link-local address is bound
        // to an interface by the remote's scope.
        let path = plan.paths.get(plan.path_of(stream));
        let local = path.map_or(self.local.ip(), |p| p.from);
        let mut to = self.remote;
        if let Some(path) = path {
            to.set_ip(path.to);
        }
        let scoped = matches!(local, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let from = (!scoped).then_some(local);
        let lane = || -> Result<Box<dyn ProbeStream>> {
            let socket =
                TcpStream::from(connect_socket(to, from, &SocketOptions::default(), deadline, SERVER_COMMAND)?);
            let attach = AttachRequest { token: opened.token, stream };
            frame::send_frame(&socket, kind::ATTACH, &message::encode_message(&attach), deadline)?;
            let answer = frame::receive_frame(&socket, MAX_BODY, deadline)?;
            expect_frame(answer, kind::ATTACHED)?;
            Ok(Box::new(TcpProbeStream::new(socket, plan.streams[stream], plan)?))
        };
        lane().map_err(|e| {
            // The server may have sent the reason on the control connection.
            let why = self.refusal_reason().unwrap_or_else(|| e.message().to_owned());
            let what = format!("{}: stream {} of {}: {why}", self.peer, stream + 1, plan.streams.len());
            Fault::failed(what, "see the output of the server, or try fewer --streams")
        })
    }

    fn connect_rdma(
        &self,
        plan: &ProbePlan,
        opened: &OpenReply,
        stream: usize,
    ) -> std::result::Result<Box<dyn ProbeStream>, Fault> {
        // A port for each path, in the order of the paths.
        let at = plan.path_of(stream);
        let port = opened.answer.chunks_exact(2).nth(at).map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]]));
        let Some(port) = port else { return Err(Fault::failed(format!("{} sent no port for rdma", self.peer), "")) };
        let mut to = self.remote;
        to.set_port(port);
        let path = plan.paths.get(at);
        if let Some(path) = path {
            to.set_ip(path.to);
        }
        let from = path.map_or(self.local.ip(), |p| p.from);
        match RdmaProbeStream::connect(from, to, opened.token, stream, plan, Instant::now() + self.timeout) {
            Ok(lane) => Ok(Box::new(lane)),
            Err(e) => {
                let why = self.refusal_reason().unwrap_or_else(|| e.message().to_owned());
                let what = format!("{}: stream {} of {}: {why}", self.peer, stream + 1, plan.streams.len());
                Err(Fault::missing(what, "see both ends' devices with: spurline net list; or --transport tcp"))
            }
        }
    }

    /// Sends a heartbeat; to be called about every second during a measurement.
    ///
    /// # Errors
    /// When the server is gone.
    pub fn send_heartbeat(&self) -> Result<()> {
        frame::send_frame(&self.control, kind::ALIVE, &[], Instant::now() + Duration::from_secs(1))
    }

    /// Ends a measurement whose streams are closed, and fetches the server's report.
    ///
    /// # Errors
    /// When the server does not answer in time.
    pub fn finish_measurement(&mut self) -> std::result::Result<ServerReport, Fault> {
        let frame = self.request_frame(kind::FINISH, &[], kind::REPORT, MAX_BODY)?;
        message::decode_message(&frame.body).map_err(|e| self.session_fault(&e))
    }

    /// The server's refusal before the server closed the connection, if any.
    pub fn refusal_reason(&self) -> Option<String> {
        let until = Instant::now() + Duration::from_millis(300);
        let frame = frame::receive_frame(&self.control, MAX_BODY, until).ok()??;
        (frame.head.kind == REFUSED).then(|| printable_text(&frame.body))
    }

    /// The server's interfaces that `transport` can use.
    ///
    /// # Errors
    /// When the server does not answer in time.
    pub fn fetch_interfaces(&mut self, transport: ProbeTransport) -> std::result::Result<Vec<InterfaceRecord>, Fault> {
        let frame =
            self.request_frame(kind::INTERFACES, &message::encode_message(&transport), kind::INTERFACES_ARE, MAX_BODY)?;
        message::decode_message(&frame.body).map_err(|e| self.session_fault(&e))
    }

    /// The other host's facts, as the bytes of `spurline net collect`.
    ///
    /// # Errors
    /// When the server has none, or does not answer within `limit`.
    pub fn fetch_facts(&mut self, limit: Duration) -> std::result::Result<Vec<u8>, Fault> {
        if !self.welcome.facts {
            let what = format!("{} (spurline {}) provides no facts", self.peer, self.welcome.program);
            return Err(Fault::missing(what, "collect them there: spurline net collect -o FILE.tar.zst"));
        }
        let timeout = std::mem::replace(&mut self.timeout, limit);
        let frame = self.request_frame(kind::FACTS, &[], kind::FACTS_ARE, MAX_FACTS);
        self.timeout = timeout;
        frame.map(|frame| frame.body)
    }

    fn request_frame(&self, kind: u16, body: &[u8], answer: u16, max: u32) -> std::result::Result<Frame, Fault> {
        let deadline = Instant::now() + self.timeout;
        frame::send_frame(&self.control, kind, body, deadline)
            .and_then(|()| frame::receive_frame(&self.control, max, deadline))
            .and_then(|frame| expect_frame(frame, answer))
            .map_err(|e| self.session_fault(&e))
    }

    fn session_fault(&self, e: &Error) -> Fault {
        Fault::failed(format!("{}: {e}", self.peer), "")
    }
}

/// The fault for an unreachable server, with a remedy.
fn unreachable_fault(e: &Error) -> Fault {
    let remedy = match e.kind() {
        ErrorKind::Unavailable if e.message().contains("refused") => START_REMEDY.to_owned(),
        ErrorKind::Unavailable | ErrorKind::Timeout => {
            "see whether the address is right, both links are up (spurline net list) and no firewall is between".into()
        }
        _ => String::new(),
    };
    Fault::missing(e.message(), remedy)
}

fn exchange_hello(
    call: &ConnectConfig,
    control: TcpStream,
    connect_time: Duration,
) -> std::result::Result<ProbeSession, Fault> {
    let peer = call.peer.clone();
    let failed = |e: std::io::Error| Fault::failed(format!("{peer}: {e}"), "");
    let local = control.local_addr().map_err(failed)?;
    let remote = control.peer_addr().map_err(failed)?;
    let deadline = Instant::now() + call.timeout;
    if let Err(e) = proof::prove(&control, &call.trust, deadline) {
        let remedy = "give both sides the same --group-token-file, or neither";
        return Err(Fault::missing(format!("{peer}: {e}"), remedy));
    }
    let hello = ClientHello { program: env!("CARGO_PKG_VERSION").into(), host: host_name() };
    let answer = frame::send_frame(&control, kind::HELLO, &message::encode_message(&hello), deadline)
        .and_then(|()| frame::receive_frame(&control, MAX_BODY, deadline));
    let elsewhere = format!("the port may be another program's: use the one that {SERVER_COMMAND} prints, HOST:PORT");
    let frame = match answer {
        Ok(Some(frame)) => frame,
        Ok(None) => {
            return Err(Fault::missing(format!("{peer} closed the connection before the handshake"), elsewhere));
        }
        Err(e) if e.kind() == ErrorKind::Timeout => {
            let what =
                format!("{peer} accepts connections, but sent no handshake within {:.0} s", call.timeout.as_secs_f64());
            return Err(Fault::missing(what, format!("{elsewhere}; or that host hangs")));
        }
        Err(e) if e.kind() == ErrorKind::Protocol => {
            return Err(Fault::missing(format!("{peer} is no {SERVER_COMMAND}: {e}"), elsewhere));
        }
        Err(e) => return Err(Fault::missing(format!("{peer} failed during the handshake: {e}"), elsewhere)),
    };
    if frame.head.version != VERSION {
        let said =
            if frame.head.kind == REFUSED { format!(" (\"{}\")", printable_text(&frame.body)) } else { String::new() };
        let what = format!(
            "{peer} uses version {} of this protocol{said}, this is spurline {} with version {VERSION}",
            frame.head.version,
            env!("CARGO_PKG_VERSION")
        );
        return Err(Fault::failed(what, "install the same version of spurline on both hosts"));
    }
    let welcome = expect_frame(Some(frame), kind::WELCOME).and_then(|frame| message::decode_message(&frame.body));
    let welcome = welcome.map_err(|e| Fault { what: format!("{peer}: {e}"), ..Fault::from(e) })?;
    Ok(ProbeSession { control, peer, local, remote, timeout: call.timeout, welcome, connect_time })
}

/// The expected frame, or the server's refusal.
fn expect_frame(frame: Option<Frame>, kind: u16) -> Result<Frame> {
    match frame {
        Some(frame) if frame.head.kind == kind => Ok(frame),
        Some(frame) if frame.head.kind == REFUSED => {
            Err(Error::new(ErrorKind::Unavailable, printable_text(&frame.body)))
        }
        Some(frame) => {
            let why = format!("it answered with a message of kind {}, not {kind}", frame.head.kind);
            Err(Error::new(ErrorKind::Protocol, why))
        }
        None => Err(Error::new(ErrorKind::Unavailable, "the server closed the connection")),
    }
}

/// Text from the network, without control characters.
fn printable_text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().filter(|c| !c.is_control()).take(500).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_written_in_many_ways() {
        for (words, is) in [
            ("node2", "node2:18600"),
            ("node2:7", "node2:7"),
            ("10.0.0.1", "10.0.0.1:18600"),
            ("10.0.0.1:7", "10.0.0.1:7"),
            ("::1", "[::1]:18600"),
            ("[::1]", "[::1]:18600"),
            ("[::1]:7", "[::1]:7"),
            ("fe80::1%ib0", "[fe80::1%ib0]:18600"),
        ] {
            assert_eq!(parse_peer(words).unwrap(), is);
        }
        for words in ["", ":7", "a b", "a:b", "a:70000", "[::1", "[::1]7", "[node]:7", "http://node2", "[]", "a:"] {
            assert!(parse_peer(words).is_err(), "{words}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(words in ".{0,30}", bytes: Vec<u8>) {
            let _ = parse_peer(&words);
            proptest::prop_assert!(printable_text(&bytes).chars().all(|c| !c.is_control()));
        }
    }
}
