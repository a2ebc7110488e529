//! What the two ends say to each other over the control connection, as JSON in frames. It knows no socket.
//!
//! Fields a peer does not know are ignored and missing ones have defaults, so that a field may be added without
//! another version of the protocol.

use crate::link::Link;
use crate::paths::{MAX_PATHS, PathPlan};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use spurline_proto::Rail;
use spurline_types::{Congestion, Error, ErrorKind, Result};
use std::net::{IpAddr, Ipv4Addr};

/// The most streams of one measurement.
pub const MAX_STREAMS: usize = 128;
/// The most bytes of one operation.
pub const MAX_SIZE: u64 = 1 << 30;
/// The most operations under way on one stream.
pub const MAX_DEPTH: u32 = 1024;

/// Kinds of frames. Numbers never change meaning.
pub mod kind {
    /// [`super::Hello`], the client's first.
    pub const HELLO: u16 = 1;
    /// [`super::Welcome`], its answer.
    pub const WELCOME: u16 = 2;
    /// [`super::Open`].
    pub const OPEN: u16 = 3;
    /// [`super::Opened`], its answer.
    pub const OPENED: u16 = 4;
    /// [`super::Attach`], first on each data connection.
    pub const ATTACH: u16 = 5;
    /// The answer to it, with no body; what follows on that connection is the measurement's.
    pub const ATTACHED: u16 = 6;
    /// The client lives; no body, no answer.
    pub const ALIVE: u16 = 7;
    /// The streams are done; no body.
    pub const FINISH: u16 = 8;
    /// [`super::Report`], its answer.
    pub const REPORT: u16 = 9;
    /// Asks for the host's facts; no body.
    pub const FACTS: u16 = 10;
    /// They: bytes this crate does not look into.
    pub const FACTS_ARE: u16 = 11;
    /// Asks for the interfaces that a [`super::Transport`] can use there.
    pub const INTERFACES: u16 = 12;
    /// They: a list of [`super::RailTold`].
    pub const INTERFACES_ARE: u16 = 13;
}

/// Who calls.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hello {
    /// Version of the program.
    pub program: String,
    /// Its host's name.
    pub host: String,
}

/// Who answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Welcome {
    /// Version of the program.
    pub program: String,
    /// Its host's name.
    pub host: String,
    /// The interface this connection came in by.
    pub link: Link,
    /// Measurements that are under way.
    pub running: usize,
    /// Transports it can measure over.
    pub transports: Vec<Transport>,
    /// Why rdma is not among them; empty when it is.
    pub without_rdma: String,
    /// Whether it answers [`kind::FACTS`].
    pub facts: bool,
}

/// An interface that can carry a part of a measurement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RailTold {
    /// Its name there.
    pub interface: String,
    /// Its address.
    pub address: IpAddr,
    /// Length of the address's network part in bits.
    pub prefix_len: u8,
    /// What it runs on, by the number of [`spurline_proto::Link::code`]; 0 for no more than IP.
    pub link: u8,
    /// Subnet prefix of an InfiniBand fabric.
    pub fabric: u64,
    /// Megabits per second; 0 when not known.
    pub speed_mbit: u32,
}

impl Default for RailTold {
    fn default() -> Self {
        let address = Ipv4Addr::UNSPECIFIED.into();
        RailTold { interface: String::new(), address, prefix_len: 0, link: 0, fabric: 0, speed_mbit: 0 }
    }
}

impl From<&Rail> for RailTold {
    fn from(rail: &Rail) -> Self {
        RailTold {
            interface: rail.name.clone(),
            address: rail.address,
            prefix_len: rail.prefix_len,
            link: rail.link.code(),
            fabric: rail.fabric,
            speed_mbit: rail.speed_mbit,
        }
    }
}

impl RailTold {
    /// The same as paths are found with.
    pub fn rail(&self) -> Rail {
        Rail {
            name: self.interface.clone(),
            address: self.address,
            prefix_len: self.prefix_len,
            port: 0,
            link: spurline_proto::Link::from_code(self.link),
            fabric: self.fabric,
            speed_mbit: self.speed_mbit,
        }
    }
}

/// What carries the bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP connections.
    #[default]
    Tcp,
    /// Verbs: InfiniBand, RoCE, iWARP.
    Rdma,
}

impl Transport {
    /// As in flags and reports.
    pub fn name(self) -> &'static str {
        match self {
            Transport::Tcp => "tcp",
            Transport::Rdma => "rdma",
        }
    }
}

/// What a stream does again and again; the client begins each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Bytes from the server to the client.
    Read,
    /// Bytes from the client to the server, which says what arrived.
    Write,
    /// The same by messages that the server's memory takes one after the other: SEND instead of WRITE of verbs.
    Send,
    /// Bytes there and as many back, one at a time.
    Echo,
    /// Bytes from the server to the client, who takes them out of the server's memory: READ of verbs.
    Fetch,
    /// Bytes from the server to the client by messages, each asked for: SEND of verbs the other way.
    Receive,
    /// Bytes into the other end's memory and as many back into this one's, one at a time; each end looks at its memory
    /// until they are there.
    PingPong,
}

impl Op {
    /// Whether its bytes go from the server to the client.
    pub fn reads(self) -> bool {
        matches!(self, Op::Read | Op::Fetch | Op::Receive)
    }

    /// Whether it is a round trip whose bytes count once.
    pub fn is_round_trip(self) -> bool {
        matches!(self, Op::Echo | Op::PingPong)
    }

    /// Whether only verbs have it.
    fn needs_verbs(self) -> bool {
        matches!(self, Op::Send | Op::Fetch | Op::Receive | Op::PingPong)
    }
}

/// What is to be measured.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// What carries it.
    pub transport: Transport,
    /// Bytes of one operation.
    pub size: u64,
    /// Operations under way on one stream.
    pub depth: u32,
    /// The streams, each with what it does.
    pub streams: Vec<Op>,
    /// Whether received bytes are dropped in the kernel instead of copied to memory.
    #[serde(default)]
    pub discard: bool,
    /// The congestion control of TCP, on both ends.
    #[serde(default)]
    pub congestion: Congestion,
    /// Where the streams go, in turn; empty: as the control connection.
    #[serde(default)]
    pub paths: Vec<PathPlan>,
}

impl Default for Plan {
    /// Large reads on one stream over TCP.
    fn default() -> Self {
        Plan {
            transport: Transport::Tcp,
            size: 1 << 20,
            depth: 16,
            streams: vec![Op::Read],
            discard: false,
            congestion: Congestion::Auto,
            paths: Vec::new(),
        }
    }
}

impl Plan {
    /// The index of a stream's path.
    pub fn path_of(&self, stream: usize) -> usize {
        stream % self.paths.len().max(1)
    }

    /// Checks the bounds, the same on both ends.
    ///
    /// # Errors
    /// `Invalid`, saying which bound.
    pub fn check(&self) -> Result<()> {
        let wrong = |why: String| Err(Error::new(ErrorKind::Invalid, why));
        if self.size == 0 || self.size > MAX_SIZE {
            return wrong(format!("operations of {} bytes: 1 to {MAX_SIZE} are possible", self.size));
        }
        if self.depth == 0 || self.depth > MAX_DEPTH {
            return wrong(format!("depth {}: 1 to {MAX_DEPTH} are possible", self.depth));
        }
        if self.streams.is_empty() || self.streams.len() > MAX_STREAMS {
            return wrong(format!("{} streams: 1 to {MAX_STREAMS} in all are possible", self.streams.len()));
        }
        if self.paths.len() > MAX_PATHS {
            return wrong(format!("{} paths: {MAX_PATHS} are possible", self.paths.len()));
        }
        if self.transport == Transport::Tcp && self.streams.iter().any(|op| op.needs_verbs()) {
            return wrong("that is an operation of verbs: over tcp there are reads, writes and echoes".into());
        }
        if self.depth > 1 && self.streams.iter().any(|op| op.is_round_trip()) {
            return wrong(format!("depth {}: echoes go one at a time", self.depth));
        }
        Ok(())
    }
}

/// Asks for a measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Open {
    /// What is to be measured.
    pub plan: Plan,
    /// What the transport wants its other half to know; empty for TCP.
    #[serde(default)]
    pub offer: Vec<u8>,
}

/// A measurement is ready.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    /// By which data connections belong to it.
    pub token: u64,
    /// The transport's answer to the offer; empty for TCP.
    #[serde(default)]
    pub answer: Vec<u8>,
}

/// This data connection is a stream of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Attach {
    /// Of [`Opened`].
    pub token: u64,
    /// Index in [`Plan::streams`].
    pub stream: usize,
}

/// TCP's own view of the connections of one end.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TcpView {
    /// The congestion control in use.
    pub congestion: String,
    /// Segments sent again.
    pub retransmits: u64,
    /// Segments with data that were sent.
    pub segments: u64,
    /// Round trip as TCP sees it at the end, mean of the connections, in microseconds.
    pub rtt_us: u64,
    /// Largest segment it sends.
    pub mss: u64,
    /// Share of its busy time in which it could not send because the other end's window was full.
    pub window_limited: f64,
    /// Share of its busy time in which it could not send because its own buffer was too small.
    pub buffer_limited: f64,
}

/// What the server saw of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// Processor seconds of its streams' threads.
    pub cpu_seconds: f64,
    /// The most of those that one thread used.
    pub busiest_seconds: f64,
    /// Bytes it received.
    pub received_bytes: u64,
    /// Bytes it sent.
    pub sent_bytes: u64,
    /// TCP's own view.
    pub tcp: TcpView,
    /// The interface the bytes took there; of several paths that of the first.
    pub link: Link,
    /// Of each path, where there are several.
    pub links: Vec<Link>,
    /// The most other measurements that ran at the same time.
    pub shared_with: usize,
    /// What went wrong there; empty when nothing did.
    pub error: String,
}

/// A message as a body.
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    // These types have no map with keys that are no text, the one thing that does not serialise.
    serde_json::to_vec(message).unwrap_or_default()
}

/// A message out of a body.
///
/// # Errors
/// `Protocol` when it is none.
pub fn decode<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body)
        .map_err(|e| Error::new(ErrorKind::Protocol, format!("a message that can't be read: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan() -> Plan {
        Plan { depth: 4, streams: vec![Op::Read, Op::Write], ..Plan::default() }
    }

    #[test]
    fn messages_travel() {
        let open = Open { plan: plan(), offer: vec![1, 2] };
        assert_eq!(decode::<Open>(&encode(&open)).unwrap(), open);
        let report = Report { cpu_seconds: 0.5, shared_with: 2, ..Report::default() };
        assert_eq!(decode::<Report>(&encode(&report)).unwrap(), report);
        // A newer peer says more, an older one less.
        assert_eq!(decode::<Hello>(br#"{"host":"a","colour":"red"}"#).unwrap().host, "a");
        assert!(decode::<Open>(b"{}").is_err() && decode::<Hello>(b"nonsense").is_err());
    }

    #[test]
    fn plans_have_bounds() {
        plan().check().unwrap();
        for (wrong, says) in [
            (Plan { size: 0, ..plan() }, "0 bytes"),
            (Plan { size: MAX_SIZE + 1, ..plan() }, "bytes"),
            (Plan { depth: 0, ..plan() }, "depth 0"),
            (Plan { depth: MAX_DEPTH + 1, ..plan() }, "depth"),
            (Plan { streams: vec![], ..plan() }, "0 streams"),
            (Plan { streams: vec![Op::Read; MAX_STREAMS + 1], ..plan() }, "129 streams"),
            (Plan { streams: vec![Op::Echo], ..plan() }, "one at a time"),
            (Plan { streams: vec![Op::Send], ..plan() }, "over tcp"),
        ] {
            let error = wrong.check().unwrap_err();
            assert!(error.message().contains(says), "{error}");
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(body: Vec<u8>, text in r#"\{"(plan|token|program|link)":.{0,60}\}"#) {
            for body in [&body[..], text.as_bytes()] {
                let _ = decode::<Hello>(body);
                let _ = decode::<Welcome>(body);
                let _ = decode::<Open>(body).map(|o| o.plan.check());
                let _ = decode::<Attach>(body);
                let _ = decode::<Report>(body);
            }
        }
    }
}
