//! The network between mounts and nodes: settings and checks. Opens no device and no socket.

use crate::host::HostLimits;
use crate::settings::check_positive;
use crate::trust::TrustConfig;
use crate::values::TransportMode;
use spurline_types::fault::Fault;
use spurline_types::{Congestion, parse_duration};
use std::time::Duration;

settings! {
    /// The network.
    #[command(next_help_heading = "Network")]
    pub struct RawNetwork {
        /// Interfaces, addresses or CIDRs of the group: IF[:IF]; IPv6 in brackets
        ///
        /// A node listens on loopback only, unless this is given; other networks require --group-token-file. A mount
        /// uses the interface of the route, unless this is given.
        #[arg(long, alias = "group-ip", value_name = "IF[:IF]")]
        pub group_network: Option<String>,
        /// RDMA rails: interface names, IF[:IF] [default: none, data uses TCP]
        ///
        /// The RDMA device, port and GID of each interface are detected and logged. An interface that can't be used ends
        /// the start with exit code 3 and the reason.
        #[arg(long, value_name = "IF[:IF]")]
        pub rdma_network: Option<String>,
        /// Transport of a mount's data: auto uses rdma where both sides have rails and tcp elsewhere
        ///
        /// A node with rails serves both, and fetches blocks from other nodes over tcp; with tcp it leaves its rails
        /// unused.
        #[arg(long, value_name = "KIND", value_enum, default_value_t)]
        pub transport: TransportMode,
        /// Retry RDMA this long after a failure; TCP carries the data meanwhile (also IORPC_RDMA_RETRY_DURATION)
        ///
        /// If this machine's own link caused the failure, RDMA is retried as soon as the link is up and has settled,
        /// unless it also failed earlier within this time. A failed connection attempt is retried after one second, then
        /// after twice as long each time, up to this limit. With --transport rdma no pause is longer than 4 s, and a
        /// link settles for one second.
        #[arg(long, value_name = "TIME")]
        pub rdma_retry: Duration = parse_duration("5m"),
        /// A link that came back carries data after it was up for this long
        #[arg(long, value_name = "TIME")]
        pub rdma_settle: Duration = parse_duration("10s"),
        /// Close an RDMA path that owes answers and receives nothing for this long
        #[arg(long, value_name = "TIME")]
        pub rdma_silence: Duration = parse_duration("2s"),
        /// TCP congestion control of connections between mounts and nodes: auto, system, cubic, reno, dctcp
        ///
        /// auto uses the host's default, unless that is BBR: its pacing leaves a fast network idle between short
        /// answers.
        #[arg(long, value_name = "NAME", default_value_t)]
        pub tcp_congestion: Congestion,
        /// Connections per path; 0 derives the number from the processors
        #[arg(long, value_name = "N")]
        pub nconnect: u16 = 0,
        /// Deadline of one request to a node
        ///
        /// It should exceed the node's --origin-timeout, so that the node's report of a slow origin arrives. A node that
        /// can't be reached causes an error after 10 s (or this time, if shorter), and at once from then on until it is
        /// back.
        #[arg(long, value_name = "TIME")]
        pub peer_timeout: Duration = parse_duration("75s"),
        /// Use other nodes instead of a node that owes answers and sends no heartbeat for this long
        ///
        /// A separate connection carries the heartbeats, so a node that waits for a slow origin stays in use. In a group
        /// with one node, requests wait for up to --peer-timeout.
        #[arg(long, value_name = "TIME")]
        pub peer_silence: Duration = parse_duration("2s"),
    }
}

/// Access to nodes, or a node's listening addresses.
#[derive(Debug, Clone)]
pub struct NetConfig {
    /// Interface names, addresses or CIDRs; empty when not given (a node: loopback only).
    pub group_network: Vec<String>,
    /// The transports allowed for data.
    pub transport: TransportMode,
    /// The rails for RDMA; `None` if data may not use RDMA.
    pub rdma: Option<RdmaConfig>,
    /// TCP congestion control.
    pub tcp_congestion: Congestion,
    /// Connections per path, at least 1.
    pub nconnect: usize,
    /// Deadline of a request to a node.
    pub peer_timeout: Duration,
    /// A node that owes replies is abandoned after this long without a heartbeat, if there are other nodes.
    pub peer_silence: Duration,
}

/// The rails for RDMA data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RdmaConfig {
    /// Interface names: never empty, no duplicates. The devices are resolved later.
    pub interfaces: Vec<String>,
    /// Fixed port of a node, or 0 for a free port.
    pub port: u16,
    /// Retry interval of a failed path.
    pub retry: Duration,
    /// How long a restored link must be up before use.
    pub settle: Duration,
    /// A path without progress under load for this long is closed.
    pub silence: Duration,
}

/// Default connections per path: two per processor within these bounds. A request holds a connection until the reply, so this is
/// also the limit of requests in flight.
const AUTO_NCONNECT: (usize, usize) = (8, 16);

/// Minimum silence: below, a busy processor looks like a dead rail.
const LEAST_SILENCE: Duration = Duration::from_millis(100);

impl RawNetwork {
    /// Checks the values; `rdma_port` is a node's.
    pub(crate) fn check(
        self,
        rdma_port: u16,
        host: &HostLimits,
        warnings: &mut Vec<String>,
    ) -> Result<NetConfig, Fault> {
        let rdma = self.check_rdma(rdma_port, warnings)?;
        check_positive("--peer-timeout", self.peer_timeout)?;
        if self.peer_silence < LEAST_SILENCE {
            return Err(Fault::usage(
                format!("--peer-silence {:?} would take a busy node for a dead one", self.peer_silence),
                "give 100ms or more; 2s is the default",
            ));
        }
        let nconnect = match self.nconnect {
            0 => (2 * host.processors).clamp(AUTO_NCONNECT.0, AUTO_NCONNECT.1),
            n @ 1..=64 => usize::from(n),
            n => return Err(Fault::usage(format!("--nconnect {n} is above 64"), "8 fill most networks; 0 chooses")),
        };
        Ok(NetConfig {
            group_network: self.group_network.as_deref().map(split_networks).transpose()?.unwrap_or_default(),
            transport: self.transport,
            tcp_congestion: self.tcp_congestion,
            rdma,
            nconnect,
            peer_timeout: self.peer_timeout,
            peer_silence: self.peer_silence,
        })
    }

    /// Whether the settings require rails.
    pub(crate) fn wants_rdma(&self) -> bool {
        self.rdma_network.is_some() && self.transport != TransportMode::Tcp
    }

    /// The rails; `port` is a node's.
    fn check_rdma(&self, port: u16, warnings: &mut Vec<String>) -> Result<Option<RdmaConfig>, Fault> {
        let Some(text) = self.rdma_network.as_deref() else {
            if self.transport == TransportMode::Rdma {
                return Err(Fault::usage(
                    "--transport rdma without --rdma-network leaves nothing to carry the data",
                    "name the rails: --rdma-network ib0:ib1 ('spurline net list' shows which interfaces have RDMA)",
                ));
            }
            if port != 0 {
                warnings.push("--rdma-port is not used: there is no --rdma-network".to_owned());
            }
            return Ok(None);
        };
        let mut interfaces: Vec<String> = Vec::new();
        for name in text.split([':', ',']).map(str::trim) {
            // The kernel's rule for interface names.
            let wrong = match name {
                "" => "a part is empty",
                "." | ".." => "that is no interface",
                _ if name.parse::<std::net::IpAddr>().is_ok() => "that is an address, not an interface",
                _ if name.len() > 15 => "the name of an interface has at most 15 characters",
                _ if name.contains(['/', '[', ']']) || name.contains(char::is_whitespace) => "that is no interface",
                _ => {
                    if !interfaces.iter().any(|known| known == name) {
                        interfaces.push(name.to_owned());
                    }
                    continue;
                }
            };
            return Err(Fault::usage(
                format!("--rdma-network '{text}': '{name}': {wrong}"),
                "write names of interfaces with colons between, ib0:ib1; 'spurline net list' shows them",
            ));
        }
        check_positive("--rdma-retry", self.rdma_retry)?;
        if self.rdma_silence < LEAST_SILENCE {
            return Err(Fault::usage(
                format!("--rdma-silence {:?} would take a busy node for a dead rail", self.rdma_silence),
                "give 100ms or more; 2s is the default",
            ));
        }
        if self.transport == TransportMode::Tcp {
            warnings.push("--rdma-network is not used: --transport tcp rules out RDMA".to_owned());
            return Ok(None);
        }
        let retry = self.rdma_retry;
        let settle = self.rdma_settle;
        let silence = self.rdma_silence;
        Ok(Some(RdmaConfig { interfaces, port, retry, settle, silence }))
    }
}

/// Splits `ib0:10.0.0.0/8:[fe80::1]` at the colons outside brackets.
pub(crate) fn split_networks(text: &str) -> Result<Vec<String>, Fault> {
    let wrong = |why: &str| {
        Fault::usage(
            format!("--group-network '{text}': {why}"),
            "write interface names, addresses or CIDRs with colons between, IPv6 in brackets: ib0:10.0.0.0/24:[fd00::1]",
        )
    };
    let mut parts = Vec::new();
    let mut part = String::new();
    let mut inside = false;
    for c in text.chars() {
        match c {
            '[' if !inside => inside = true,
            ']' if inside => inside = false,
            ':' if !inside => parts.push(std::mem::take(&mut part)),
            c => part.push(c),
        }
    }
    parts.push(part);
    if inside {
        return Err(wrong("a bracket is not closed"));
    }
    if parts.iter().any(String::is_empty) {
        return Err(wrong("a part is empty"));
    }
    Ok(parts)
}

/// Warns about connections that --tls does not cover.
pub(crate) fn warn_unencrypted(net: &NetConfig, trust: &TrustConfig, warnings: &mut Vec<String>) {
    if trust.tls.is_some() && net.rdma.is_some() {
        warnings
            .push("--tls does not cover RDMA: data over --rdma-network is not encrypted (docs/trust.md)".to_owned());
    }
}
