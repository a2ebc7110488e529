//! What the nodes of a group are asked through: connections over TCP, to the first of a node's addresses that answers.

use spurline_client::Peer;
use spurline_config::NetConfig;
use spurline_net_tcp::{SocketOptions, TcpConnector, group_addresses};
use spurline_transport::{Channel, ChannelPool, Connector, PoolConfig, TransportKind};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A node whose host does not answer a connection attempt for this long is tried again later.
const ATTEMPT: Duration = Duration::from_secs(5);

/// How nodes are reached over TCP.
#[derive(Clone)]
pub struct Reach {
    /// This side's name in greetings.
    pub name: String,
    /// The source asked for.
    pub source: String,
    /// Addresses of this machine to connect from; empty for the route's own.
    pub locals: Vec<IpAddr>,
    /// Socket options.
    pub socket: SocketOptions,
    /// What is proved to nodes and asked of them.
    pub trust: Arc<Trust>,
    /// Connections per node at most: a request holds its own until it is answered.
    pub nconnect: usize,
    /// Counters of this process.
    pub stats: Arc<Stats>,
}

impl Reach {
    /// As the flags of the network say, for questions about `source`.
    ///
    /// # Errors
    /// When the networks named can't be used.
    pub fn by(net: &NetConfig, name: &str, source: &str, trust: &Arc<Trust>, stats: &Arc<Stats>) -> Result<Self> {
        let networks = &net.group_network;
        Ok(Reach {
            name: name.to_owned(),
            source: source.to_owned(),
            locals: if networks.is_empty() { Vec::new() } else { group_addresses(&networks.join(","))? },
            socket: SocketOptions { congestion: net.tcp_congestion, ..SocketOptions::default() },
            trust: Arc::clone(trust),
            nconnect: net.nconnect,
            stats: Arc::clone(stats),
        })
    }

    /// The peer of a member.
    pub fn peer(&self, member: &Member) -> Arc<Peer> {
        Peer::new(self.pool(member), member)
    }

    /// Connections to a member.
    pub fn pool(&self, member: &Member) -> ChannelPool {
        let connectors = member
            .addresses
            .iter()
            .map(|address| TcpConnector::new(address, self.locals.clone(), self.socket, Arc::clone(&self.stats)))
            .map(|connector| connector.trusting(Arc::clone(&self.trust)));
        let connector =
            Addresses { connectors: connectors.collect(), last: AtomicUsize::new(0), name: member.name.clone() };
        let config =
            PoolConfig { nconnect: self.nconnect.max(1), seed: u64::from(std::process::id()), ..PoolConfig::default() };
        ChannelPool::new(Arc::new(connector), &self.name, &self.source, config, Arc::clone(&self.stats))
    }
}

/// A node with several addresses: the one that answered last is tried first.
struct Addresses {
    connectors: Vec<TcpConnector>,
    last: AtomicUsize,
    name: String,
}

impl Connector for Addresses {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let (first, count) = (self.last.load(Ordering::Relaxed), self.connectors.len());
        let mut failed = Error::new(ErrorKind::Unavailable, format!("node {} has no address", self.name));
        for tried in 0..count {
            let at = (first + tried) % count;
            // Each gets its share of the time that is left, so that a silent address leaves some for the others.
            // No attempt waits as long as a request may: others can be asked, or the same again.
            let share = (deadline.saturating_duration_since(Instant::now()) / (count - tried) as u32).min(ATTEMPT);
            match self.connectors[at].connect(Instant::now() + share) {
                Ok(channel) => {
                    self.last.store(at, Ordering::Relaxed);
                    return Ok(channel);
                }
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn peer(&self) -> &str {
        &self.name
    }
}
