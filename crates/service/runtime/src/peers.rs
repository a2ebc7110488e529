//! Connections to the nodes of a group over TCP, to the first of a node's addresses at which the node itself answers.

use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupPeer, GroupVolume, GroupVolumeConfig, RequestPatience};
use spurline_config::NetConfig;
use spurline_mem::{BufferPool, MemTier};
use spurline_net_tcp::{SocketOptions, TcpConnector, group_addresses};
use spurline_proto::{HelloRequest, WelcomeAnswer};
use spurline_transport::{Channel, Connector, DemandConfig, DemandPool, TransportKind, first_handshake};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time limit of a connection attempt.
const CONNECT_ATTEMPT_TIMEOUT: Duration = Duration::from_secs(5);

/// Makes connections to nodes over TCP.
#[derive(Clone)]
pub struct PeerConnector {
    /// This side's name in handshakes.
    pub name: String,
    /// The source to read.
    pub source: String,
    /// Addresses of this machine to connect from; empty for the route's own.
    pub locals: Vec<IpAddr>,
    /// Socket options.
    pub socket: SocketOptions,
    /// Authentication, in both directions.
    pub trust: Arc<Trust>,
    /// The most connections per node; a request occupies a connection until the answer.
    pub nconnect: usize,
    /// Counters of this process.
    pub stats: Arc<Stats>,
}

impl PeerConnector {
    /// Connections for a few calls at a time, to no source.
    pub fn for_calls(name: String, trust: Arc<Trust>, stats: Arc<Stats>) -> Self {
        let source = String::new();
        PeerConnector { name, source, locals: Vec::new(), socket: SocketOptions::default(), trust, nconnect: 1, stats }
    }

    /// The nodes of a group, connected to for `source`.
    pub fn group_members(&self, source: &str, members: &[Arc<Member>]) -> Arc<GroupMembers> {
        let reach = PeerConnector { source: source.to_owned(), ..self.clone() };
        GroupMembers::new(members, move |member| reach.peer(member))
    }

    /// The nodes as a volume of `source`, for calls that return no blocks. A node gets `timeout` for an answer, and is left after
    /// `silence`.
    ///
    /// # Errors
    /// When no node answers.
    pub fn open_group(
        &self,
        source: &str,
        members: Arc<GroupMembers>,
        timeout: Duration,
        silence: Duration,
    ) -> Result<Arc<GroupVolume>> {
        let config = GroupVolumeConfig {
            patience: RequestPatience::new(timeout),
            fetchers: 2,
            metadata_age: Duration::from_secs(1),
            copies: CopyCounts::default(),
            standpoint: ReaderLocation { zone: String::new(), seed: u64::from(std::process::id()) },
            silence,
            hedge_after: Duration::ZERO,
        };
        // No data arrives here; a volume requires some memory.
        GroupVolume::connect(source, members, config, Arc::clone(&self.stats), |block| {
            Ok(MemTier::new(BufferPool::new(2 * block, block as usize)?))
        })
    }

    /// Connections by the network's settings, to read `source`.
    ///
    /// # Errors
    /// When the configured networks can't be used.
    pub fn from_config(
        net: &NetConfig,
        name: &str,
        source: &str,
        trust: &Arc<Trust>,
        stats: &Arc<Stats>,
    ) -> Result<Self> {
        let networks = &net.group_network;
        Ok(PeerConnector {
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
    pub fn peer(&self, member: &Member) -> Arc<GroupPeer> {
        GroupPeer::new(self.pool(member), member)
    }

    /// Connections to a member.
    pub fn pool(&self, member: &Member) -> DemandPool {
        let connectors = member
            .addresses
            .iter()
            .map(|address| TcpConnector::new(address, self.locals.clone(), self.socket, Arc::clone(&self.stats)))
            .map(|connector| connector.with_trust(Arc::clone(&self.trust)));
        let addresses = connectors.map(|connector| NodeAddress {
            connector,
            answered: AtomicBool::new(false),
            logged_process: AtomicU64::new(0),
        });
        let connector =
            AddressConnector { addresses: addresses.collect(), last: AtomicUsize::new(0), name: member.name.clone() };
        let config = DemandConfig {
            nconnect: self.nconnect.max(1),
            seed: u64::from(std::process::id()),
            ..DemandConfig::default()
        };
        let pool = DemandPool::new(Arc::new(connector), &self.name, &self.source, config, Arc::clone(&self.stats));
        pool.expect_process(member.instance);
        pool
    }
}

/// Connects to a node with several addresses: the last address that answered is tried first.
struct AddressConnector {
    addresses: Vec<NodeAddress>,
    last: AtomicUsize,
    name: String,
}

struct NodeAddress {
    connector: TcpConnector,
    /// Whether the node itself has answered here.
    answered: AtomicBool,
    /// The process of another node that answered there, when that was last logged; 0 for none.
    logged_process: AtomicU64,
}

impl AddressConnector {
    /// The result of `take` for the first address that is not another node's.
    fn connect_first<T>(
        &self,
        deadline: Instant,
        mut take: impl FnMut(&NodeAddress, Instant) -> Result<Option<T>>,
    ) -> Result<T> {
        let first = self.last.load(Ordering::Relaxed);
        let count = self.addresses.len();
        let mut failed: Option<Error> = None;
        for tried in 0..count {
            let at = (first + tried) % count;
            // Each address has a share of the remaining time, so that a silent address leaves some for the others. An attempt is
            // shorter than a request: other nodes can be tried, or the same again.
            let share = (deadline.saturating_duration_since(Instant::now()) / (count - tried) as u32)
                .min(CONNECT_ATTEMPT_TIMEOUT);
            match take(&self.addresses[at], Instant::now() + share) {
                Ok(Some(made)) => {
                    self.last.store(at, Ordering::Relaxed);
                    return Ok(made);
                }
                Ok(None) => {}
                Err(error) => {
                    failed = Some(match failed {
                        Some(before) => before.prefer_informative(error),
                        None => error,
                    });
                }
            }
        }
        Err(failed.unwrap_or_else(|| {
            let others: Vec<&str> = self.addresses.iter().map(|address| address.connector.peer()).collect();
            let why = match others.as_slice() {
                [] => "it has no address".to_owned(),
                some => format!("at {} another node answers", some.join(" and ")),
            };
            Error::new(ErrorKind::Unavailable, format!("node {} can't be reached: {why}", self.name))
        }))
    }
}

impl NodeAddress {
    /// Logs, once, that the process behind `welcome` is not node `name`.
    fn report_other_node(&self, name: &str, welcome: &WelcomeAnswer) {
        let at = self.connector.peer();
        let other = &welcome.node;
        if self.logged_process.swap(welcome.instance, Ordering::Relaxed) != welcome.instance {
            tracing::warn!(
                "{at}, an address of node {name}, leads to node {other} from here, so it is not used; leave addresses that \
                 several hosts have out of that node's --group-network"
            );
        }
    }
}

/// Whether a node with the reported name `said` may be the node `name` of the group: a node without a configured name has the
/// port after the host's name there.
fn may_be_node(said: &str, name: &str) -> bool {
    let Some(rest) = name.strip_prefix(said) else { return false };
    said.is_empty() || rest.is_empty() || rest.strip_prefix(':').is_some_and(|port| port.parse::<u16>().is_ok())
}

impl Connector for AddressConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        self.connect_first(deadline, |address, until| address.connector.connect(until).map(Some))
    }

    /// Several hosts may have the same address: loopback, a container bridge. A process that is not the registered process, but
    /// has the node's name, is the node after a restart, which the registry does not know yet.
    fn connect_and_handshake(
        &self,
        hello: &HelloRequest<'_>,
        process: u64,
        deadline: Instant,
    ) -> Result<(Box<dyn Channel>, WelcomeAnswer)> {
        self.connect_first(deadline, |address, until| {
            let mut channel = address.connector.connect(until)?;
            // A known node may take long for the handshake, a stranger may not.
            let until = if address.answered.load(Ordering::Relaxed) { deadline } else { until };
            let welcome = first_handshake(&mut *channel, hello, until)?;
            let another = process != 0 && welcome.instance != 0 && welcome.instance != process;
            if another && !may_be_node(&welcome.node, &self.name) {
                address.report_other_node(&self.name, &welcome);
                return Ok(None);
            }
            address.answered.store(true, Ordering::Relaxed);
            Ok(Some((channel, welcome)))
        })
    }

    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn peer(&self) -> &str {
        &self.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_net_tcp::{ServerConfig, TcpServer};
    use spurline_proto::NodeRequest;
    use spurline_transport::{ConnState, Responder, Service};

    /// Welcomes clients as this node, or refuses them.
    struct Says(&'static str, u64);

    impl Service for Says {
        fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
            if self.0.is_empty() {
                return Err(Error::new(ErrorKind::PermissionDenied, "not for you"));
            }
            Ok(WelcomeAnswer { node: self.0.to_owned(), instance: self.1, block_size: 1, ..WelcomeAnswer::default() })
        }
        fn serve_request(&self, _: &ConnState, _: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
            responder.send_data(&[], &[])
        }
    }

    fn listen(service: Says) -> (TcpServer, String) {
        let any = ["127.0.0.1:0".parse().unwrap()];
        let server = TcpServer::bind(&any, Arc::new(service), ServerConfig::default(), Arc::default()).unwrap();
        let at = server.local_addrs()[0].to_string();
        (server, at)
    }

    /// The node that answers as node `name`, process 7, at these addresses.
    fn reached(name: &str, instance: u64, addresses: &[&str]) -> Result<(String, u64)> {
        let reach = PeerConnector {
            name: "me".to_owned(),
            source: String::new(),
            locals: Vec::new(),
            socket: SocketOptions::default(),
            trust: Trust::without_checks(),
            nconnect: 1,
            stats: Arc::default(),
        };
        let addresses = addresses.iter().map(ToString::to_string).collect();
        let member = Member { name: name.to_owned(), instance, addresses, ..Member::from_address("", 100) };
        let pool = reach.pool(&member);
        pool.send_heartbeat(Instant::now() + Duration::from_secs(60))?;
        let lease = pool.checkout(Instant::now() + Duration::from_secs(60))?;
        Ok((lease.welcome().node.clone(), lease.welcome().instance))
    }

    #[test]
    fn another_nodes_process_at_an_address_is_gone_round() {
        let ((_one, ours), (_two, theirs)) = (listen(Says("a", 7)), listen(Says("b", 9)));
        let (_three, again) = listen(Says("a", 8));
        let a = |instance| Ok(("a".to_owned(), instance));
        for addresses in [[&*theirs, &*ours], [&*ours, &*theirs]] {
            assert_eq!(reached("a", 7, &addresses), a(7));
        }
        // Restarted, which the registry does not know yet: with its own name, or its host's.
        for name in ["a", "a:7000"] {
            assert_eq!(reached(name, 7, &[&theirs, &again]), a(8), "{name}");
        }
        // The registered process is unknown.
        assert_eq!(reached("a", 0, &[&theirs, &again]), Ok(("b".to_owned(), 9)));
        assert_eq!(reached("b", 9, &[&theirs]), Ok(("b".to_owned(), 9)));
        let error = reached("a", 7, &[&theirs]).unwrap_err();
        assert!(error.kind() == ErrorKind::Unavailable && error.message().contains("another node answers"), "{error}");
    }

    #[test]
    fn names_of_nodes_without_one_of_their_own() {
        for (said, name, so) in [
            ("a", "a", true),
            ("a", "a:7000", true),
            ("", "a", true),
            ("a", "a:x", false),
            ("a", "ab", false),
            ("a:7000", "a", false),
            ("b", "a:7000", false),
        ] {
            assert_eq!(may_be_node(said, name), so, "{said} {name}");
        }
    }

    #[test]
    fn a_refusal_is_not_hidden_by_an_address_that_nobody_answers_at() {
        let (_refuses, at) = listen(Says("", 7));
        let (gone, nobody) = listen(Says("a", 7));
        drop(gone);
        for addresses in [[&*at, &*nobody], [&*nobody, &*at]] {
            let error = reached("a", 7, &addresses).unwrap_err();
            assert!(error.kind() == ErrorKind::PermissionDenied && error.message().contains("not for you"), "{error}");
        }
    }
}
