//! Messages of the control connection, as JSON in frames. Knows no socket.
//!
//! Unknown fields are ignored and missing fields have defaults, so that new fields need no new protocol version.

use crate::link::InterfaceLink;
use crate::paths::{MAX_PATHS, PathPlan};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spurline_proto::RailInfo;
use spurline_types::{Congestion, Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr};

/// Most streams of a measurement.
pub const MAX_STREAMS: usize = 128;
/// Most bytes of an operation.
pub const MAX_SIZE: u64 = 1 << 30;
/// Most operations under way on a stream.
pub const MAX_DEPTH: u32 = 1024;

/// Kinds of frames. Numbers never change meaning.
pub mod kind {
    /// [`super::ClientHello`], the client's first frame.
    pub const HELLO: u16 = 1;
    /// [`super::ServerWelcome`], the answer.
    pub const WELCOME: u16 = 2;
    /// [`super::OpenRequest`].
    pub const OPEN: u16 = 3;
    /// [`super::OpenReply`], the answer.
    pub const OPENED: u16 = 4;
    /// [`super::AttachRequest`], first on each data connection.
    pub const ATTACH: u16 = 5;
    /// The answer, without a body; the measurement's bytes follow.
    pub const ATTACHED: u16 = 6;
    /// Heartbeat of the client; no body, no answer.
    pub const ALIVE: u16 = 7;
    /// End of the streams; no body.
    pub const FINISH: u16 = 8;
    /// [`super::ServerReport`], the answer.
    pub const REPORT: u16 = 9;
    /// Requests the host's facts; no body.
    pub const FACTS: u16 = 10;
    /// The facts: opaque bytes.
    pub const FACTS_ARE: u16 = 11;
    /// Requests the interfaces that a [`super::ProbeTransport`] can use.
    pub const INTERFACES: u16 = 12;
    /// A list of [`super::InterfaceRecord`].
    pub const INTERFACES_ARE: u16 = 13;
    /// [`super::ProofChallenge`], before the hello of a client with a group token.
    pub const CHALLENGE: u16 = 14;
    /// [`super::ProofNonce`], the answer.
    pub const CHALLENGED: u16 = 15;
    /// [`super::ProofTag`] of the client.
    pub const PROVE: u16 = 16;
    /// [`super::ProofTag`] of the server, the answer.
    pub const PROVED: u16 = 17;
}

/// The client.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ClientHello {
    /// Version of the program.
    pub program: String,
    /// The host's name.
    pub host: String,
}

/// The server.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerWelcome {
    /// Version of the program.
    pub program: String,
    /// The host's name.
    pub host: String,
    /// The interface of this connection.
    pub link: InterfaceLink,
    /// Measurements under way.
    pub running: usize,
    /// Available transports.
    pub transports: Vec<ProbeTransport>,
    /// Why RDMA is not available; empty when RDMA is available.
    pub without_rdma: String,
    /// Whether the server answers [`kind::FACTS`].
    pub facts: bool,
}

/// Starts the proof of the group token.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProofChallenge {
    /// Scheme of the proof.
    pub scheme: u16,
    /// The client's nonce.
    pub nonce: Vec<u8>,
    /// The client's name.
    pub peer: String,
}

/// The server's side of the proof.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProofNonce {
    /// The server's nonce.
    pub nonce: Vec<u8>,
    /// The server's name.
    pub node: String,
}

/// A proof of the group token.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ProofTag {
    /// The bytes.
    pub proof: Vec<u8>,
}

/// An interface that can carry part of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InterfaceRecord {
    /// The name on that host.
    pub interface: String,
    /// The address.
    pub address: IpAddr,
    /// Prefix length of the address in bits.
    pub prefix_len: u8,
    /// Number of [`spurline_proto::RailLink::code`]; 0 when only IP is known.
    pub link: u8,
    /// Subnet prefix of an InfiniBand fabric.
    pub fabric: u64,
    /// Megabits per second; 0 when unknown.
    pub speed_mbit: u32,
}

impl Default for InterfaceRecord {
    fn default() -> Self {
        let address = Ipv4Addr::UNSPECIFIED.into();
        InterfaceRecord { interface: String::new(), address, prefix_len: 0, link: 0, fabric: 0, speed_mbit: 0 }
    }
}

impl From<&RailInfo> for InterfaceRecord {
    fn from(rail: &RailInfo) -> Self {
        InterfaceRecord {
            interface: rail.name.clone(),
            address: rail.address,
            prefix_len: rail.prefix_len,
            link: rail.link.code(),
            fabric: rail.fabric,
            speed_mbit: rail.speed_mbit,
        }
    }
}

impl InterfaceRecord {
    /// The form that the path selection uses.
    pub fn to_rail(&self) -> RailInfo {
        RailInfo {
            name: self.interface.clone(),
            address: self.address,
            prefix_len: self.prefix_len,
            port: 0,
            link: spurline_proto::RailLink::from_code(self.link),
            fabric: self.fabric,
            speed_mbit: self.speed_mbit,
        }
    }
}

/// The transport of a measurement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeTransport {
    /// TCP connections.
    #[default]
    Tcp,
    /// Verbs: InfiniBand, RoCE, iWARP.
    Rdma,
}

impl ProbeTransport {
    /// The name in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            ProbeTransport::Tcp => "tcp",
            ProbeTransport::Rdma => "rdma",
        }
    }
}

/// Operation that a stream repeats; the client begins each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ProbeOp {
    /// Bytes from the server to the client.
    Read,
    /// Bytes from the client to the server, which reports what arrived.
    Write,
    /// Bytes from the client to the server by SEND of verbs, into posted receives.
    Send,
    /// A message and the echo, one at a time.
    Echo,
    /// Bytes that the client reads from the server's memory: READ of verbs.
    Fetch,
    /// Bytes from the server to the client by SEND of verbs, a message for each request.
    Receive,
    /// Bytes written into the server's memory and back into the client's, one message at a time; each end polls memory.
    PingPong,
}

impl ProbeOp {
    /// Whether the bytes flow from the server to the client.
    pub fn reads_server(self) -> bool {
        matches!(self, ProbeOp::Read | ProbeOp::Fetch | ProbeOp::Receive)
    }

    /// Whether the operation is a round trip, whose bytes count once.
    pub fn is_round_trip(self) -> bool {
        matches!(self, ProbeOp::Echo | ProbeOp::PingPong)
    }

    /// Whether only verbs support the operation.
    fn needs_verbs(self) -> bool {
        matches!(self, ProbeOp::Send | ProbeOp::Fetch | ProbeOp::Receive | ProbeOp::PingPong)
    }
}

/// Plan of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbePlan {
    /// The transport.
    pub transport: ProbeTransport,
    /// Bytes of an operation.
    pub size: u64,
    /// Operations under way on a stream.
    pub depth: u32,
    /// The operation of each stream.
    pub streams: Vec<ProbeOp>,
    /// Whether the kernel discards received bytes instead of a copy to memory.
    #[serde(default)]
    pub discard: bool,
    /// TCP congestion control, on both ends.
    #[serde(default)]
    pub congestion: Congestion,
    /// Paths of the streams, in turn; empty: the path of the control connection.
    #[serde(default)]
    pub paths: Vec<PathPlan>,
}

impl Default for ProbePlan {
    /// Large reads on a single stream over TCP.
    fn default() -> Self {
        ProbePlan {
            transport: ProbeTransport::Tcp,
            size: 1 << 20,
            depth: 16,
            streams: vec![ProbeOp::Read],
            discard: false,
            congestion: Congestion::Auto,
            paths: Vec::new(),
        }
    }
}

impl ProbePlan {
    /// The index of a stream's path.
    pub fn path_of(&self, stream: usize) -> usize {
        stream % self.paths.len().max(1)
    }

    /// Checks the bounds; both ends call this.
    ///
    /// # Errors
    /// `Invalid`, with the exceeded bound.
    pub fn check_bounds(&self) -> Result<()> {
        if self.size == 0 || self.size > MAX_SIZE {
            return invalid(format!("operations of {} bytes: 1 to {MAX_SIZE} are possible", self.size));
        }
        if self.depth == 0 || self.depth > MAX_DEPTH {
            return invalid(format!("depth {}: 1 to {MAX_DEPTH} are possible", self.depth));
        }
        if self.streams.is_empty() || self.streams.len() > MAX_STREAMS {
            return invalid(format!("{} streams: 1 to {MAX_STREAMS} in all are possible", self.streams.len()));
        }
        if self.paths.len() > MAX_PATHS {
            return invalid(format!("{} paths: {MAX_PATHS} are possible", self.paths.len()));
        }
        if self.transport == ProbeTransport::Tcp && self.streams.iter().any(|op| op.needs_verbs()) {
            return invalid("that is an operation of verbs: over tcp there are reads, writes and echoes".into());
        }
        if self.depth > 1 && self.streams.iter().any(|op| op.is_round_trip()) {
            return invalid(format!("depth {}: echoes go one at a time", self.depth));
        }
        Ok(())
    }
}

fn invalid(why: String) -> Result<()> {
    Err(Error::new(ErrorKind::Invalid, why))
}

/// Requests a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpenRequest {
    /// The plan.
    pub plan: ProbePlan,
    /// Transport-specific data; empty for TCP.
    #[serde(default)]
    pub offer: Vec<u8>,
}

/// A measurement is ready.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct OpenReply {
    /// Identifies the measurement on data connections.
    pub token: u64,
    /// Transport-specific answer; empty for TCP.
    #[serde(default)]
    pub answer: Vec<u8>,
}

/// Attaches a data connection to a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct AttachRequest {
    /// The token of [`OpenReply`].
    pub token: u64,
    /// Index in [`ProbePlan::streams`].
    pub stream: usize,
}

/// TCP's statistics of the connections of an end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TcpView {
    /// The congestion control in use.
    pub congestion: String,
    /// Retransmitted segments.
    pub retransmits: u64,
    /// Data segments sent.
    pub segments: u64,
    /// Round trip measured by TCP at the end, mean of the connections, in microseconds.
    pub rtt_us: u64,
    /// Largest segment size.
    pub mss: u64,
    /// Share of the busy time in which the peer's window was the limit.
    pub window_limited: f64,
    /// Share of the busy time in which the send buffer was the limit.
    pub buffer_limited: f64,
}

/// The server's report of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ServerReport {
    /// CPU seconds of the streams' threads.
    pub cpu_seconds: f64,
    /// CPU seconds of the busiest thread.
    pub busiest_seconds: f64,
    /// Bytes received.
    pub received_bytes: u64,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// TCP's statistics.
    pub tcp: TcpView,
    /// The interface on the server; of several paths that of the first.
    pub link: InterfaceLink,
    /// The interface of each path, where there are several.
    pub links: Vec<InterfaceLink>,
    /// Most other measurements at the same time.
    pub shared_with: usize,
    /// The server's error; empty without an error.
    pub error: String,
}

/// Serialises a message.
pub fn encode_message<T: Serialize>(message: &T) -> Vec<u8> {
    // Serialising fails only for maps without text keys; these types have none.
    serde_json::to_vec(message).unwrap_or_default()
}

/// Parses a message.
///
/// # Errors
/// `Protocol` for an invalid body.
pub fn decode_message<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body)
        .map_err(|e| Error::new(ErrorKind::Protocol, format!("a message that can't be read: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> ProbePlan {
        ProbePlan { depth: 4, streams: vec![ProbeOp::Read, ProbeOp::Write], ..ProbePlan::default() }
    }

    #[test]
    fn messages_travel() {
        let open = OpenRequest { plan: plan(), offer: vec![1, 2] };
        assert_eq!(decode_message::<OpenRequest>(&encode_message(&open)).unwrap(), open);
        let report = ServerReport { cpu_seconds: 0.5, shared_with: 2, ..ServerReport::default() };
        assert_eq!(decode_message::<ServerReport>(&encode_message(&report)).unwrap(), report);
        // Newer peers send more fields, older ones fewer.
        assert_eq!(decode_message::<ClientHello>(br#"{"host":"a","colour":"red"}"#).unwrap().host, "a");
        assert!(decode_message::<OpenRequest>(b"{}").is_err() && decode_message::<ClientHello>(b"nonsense").is_err());
    }

    #[test]
    fn plans_have_bounds() {
        plan().check_bounds().unwrap();
        for (wrong, says) in [
            (ProbePlan { size: 0, ..plan() }, "0 bytes"),
            (ProbePlan { size: MAX_SIZE + 1, ..plan() }, "bytes"),
            (ProbePlan { depth: 0, ..plan() }, "depth 0"),
            (ProbePlan { depth: MAX_DEPTH + 1, ..plan() }, "depth"),
            (ProbePlan { streams: vec![], ..plan() }, "0 streams"),
            (ProbePlan { streams: vec![ProbeOp::Read; MAX_STREAMS + 1], ..plan() }, "129 streams"),
            (ProbePlan { streams: vec![ProbeOp::Echo], ..plan() }, "one at a time"),
            (ProbePlan { streams: vec![ProbeOp::Send], ..plan() }, "over tcp"),
        ] {
            let error = wrong.check_bounds().unwrap_err();
            assert!(error.message().contains(says), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(body: Vec<u8>, text in r#"\{"(plan|token|program|link)":.{0,60}\}"#) {
            for body in [&body[..], text.as_bytes()] {
                let _ = decode_message::<ClientHello>(body);
                let _ = decode_message::<ServerWelcome>(body);
                let _ = decode_message::<OpenRequest>(body).map(|o| o.plan.check_bounds());
                let _ = decode_message::<AttachRequest>(body);
                let _ = decode_message::<ServerReport>(body);
            }
        }
    }
}
