//! The rails of a mount or a node: resolves the interfaces of --rdma-network to RDMA devices, makes a mount's connections over
//! these, and starts a node's server there.

use spurline_client::{GroupMembers, NodeRails, PathMonitor, RailDialer, RailsConfig};
use spurline_config::{Fault, MemoryBudget, RdmaConfig, TransportMode, VolumeConfig};
use spurline_fabric::HostTree;
use spurline_mem::BufferPool;
use spurline_net_rdma::{RdmaConnector, RdmaServer, RdmaServerConfig, RdmaTimeouts, connection_bytes};
use spurline_observe::documents::RailStatus;
use spurline_proto::RailInfo;
use spurline_rails::{LocalRail, MemlockLimit, UnusableRail, check_memlock, host_addresses, resolve_rails};
use spurline_transport::{Connector, PathTiming, Service};
use spurline_trust::Trust;
use spurline_types::{ErrorKind, Size, Stats};
use spurline_verbs::{MemoryAccess, VerbsLibrary};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit of a connection attempt over a rail, as over TCP.
const RAIL_CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Concurrent requests; as many are processed as there are processors, the others wait.
const MAX_WORKERS: usize = 1024;

/// Locked memory in bytes: the pool is registered `before` times already and once per rail, and the kernel counts
/// each. Drivers lock less for queues than connections take of the budget.
fn locked_bytes(budget: &MemoryBudget, before: usize, rails: usize) -> u64 {
    budget.total.saturating_mul((before + rails) as u64).saturating_add(budget.rdma_bytes)
}

/// Resolves the interfaces and logs the result; the memory of `budget` is locked `before` times already.
///
/// # Errors
/// For the first interface that can't be used, with the remedy (exit code 3).
pub fn find_rails(config: &RdmaConfig, budget: &MemoryBudget, before: usize) -> Result<Vec<LocalRail>, Fault> {
    let rails = resolve_rails(&config.interfaces, &HostTree::live(), &host_addresses()?).map_err(unusable_rail)?;
    let needed = locked_bytes(budget, before, rails.len());
    for rail in &rails {
        check_memlock(&rail.rail.name, needed, MemlockLimit::of_process()).map_err(unusable_rail)?;
        tracing::info!("rail {}", rail.why);
    }
    Ok(rails)
}

fn unusable_rail(e: UnusableRail) -> Fault {
    Fault::missing(e.to_string(), e.remedy())
}

/// Places the memory of `pool` on the NUMA nodes of the rails. To be called before any registration, also with io_uring, as
/// registering touches the pages.
pub fn place_memory(found: &[LocalRail], pool: &BufferPool) {
    let nodes = found.iter().filter_map(|f| f.numa_node).filter(|node| *node < 64).fold(0u64, |all, n| all | 1 << n);
    if nodes != 0
        && let Err(e) = pool.place_on_nodes(nodes)
    {
        tracing::info!("the memory of the rails is wherever the kernel puts it, not on their NUMA nodes: {e}");
    }
}

/// Opens the devices of `found` and registers `pool` with each.
fn open_rails(
    found: &[LocalRail],
    pool: &Arc<BufferPool>,
    access: MemoryAccess,
    locked: u64,
) -> Result<Vec<Arc<spurline_net_rdma::RdmaRail>>, Fault> {
    let Some(first) = found.first() else { return Ok(Vec::new()) };
    let verbs = VerbsLibrary::load().map_err(|e| rail_fault(&first.rail.name, &e, String::new()))?;
    let rails = found
        .iter()
        .map(|f| {
            let name = &f.rail.name;
            spurline_net_rdma::RdmaRail::open_on(&verbs, name, f.rail.address, f.numa_node, pool, access).map_err(|e| {
                match e.kind() {
                    // Other processes of this user may have locked part of the limit.
                    ErrorKind::NoMemory => rail_fault(name, &e, UnusableRail::memlock_remedy(locked)),
                    _ => match f.device_node_error() {
                        Some((node, why)) => rail_fault(
                            name,
                            &format!("{node}, through which {} is used, can't be opened: {why}", f.device),
                            format!("in a container, pass {node} in beside /dev/infiniband/rdma_cm"),
                        ),
                        None => rail_fault(name, &e, String::new()),
                    },
                }
            })
        })
        .collect::<Result<_, Fault>>()?;
    // Registration has touched every page.
    match pool.numa_placement() {
        None => {}
        Some(Ok(placed)) => tracing::info!(
            "the rails are on several NUMA nodes, and so is their memory, in turn in pieces of {}: of {} pages looked at \
             {} are where they should be, {} elsewhere; among idle rails of one speed a read takes that of its buffer's node",
            Size(placed.stripe as u64),
            placed.right + placed.elsewhere + placed.untouched,
            placed.right,
            placed.elsewhere,
        ),
        Some(Err(e)) => {
            tracing::info!(
                "the rails' memory is on their NUMA nodes in turn; the placement of its pages is unknown: {e}"
            )
        }
    }
    Ok(rails)
}

fn rail_fault(name: &str, what: &dyn std::fmt::Display, remedy: String) -> Fault {
    Fault::missing(format!("--rdma-network {name}: {what}"), remedy)
}

/// The memory that the rails of a server register.
#[derive(Debug, Clone, Copy)]
pub struct RailMemory<'a> {
    /// The terms of the memory.
    pub budget: &'a MemoryBudget,
    /// How often the memory is locked already.
    pub locked_times: usize,
}

/// Serves a node on every rail of `found`, within the budget; returns the rails with ports.
///
/// # Errors
/// When a device can't be used or the port is taken.
pub fn start_rdma_server(
    config: &RdmaConfig,
    found: &[LocalRail],
    pool: &Arc<BufferPool>,
    memory: RailMemory<'_>,
    service: Arc<dyn Service>,
    trust: &Arc<Trust>,
    stats: &Arc<Stats>,
) -> Result<(RdmaServer, Vec<RailInfo>), Fault> {
    let RailMemory { budget, locked_times } = memory;
    let rails = open_rails(found, pool, MemoryAccess::Local, locked_bytes(budget, locked_times, found.len()))?;
    let (_, files, _) = crate::limits::connection_limits();
    let max_connections = ((budget.rdma_bytes / connection_bytes() as u64).max(16) as usize).min(files);
    let server_config = RdmaServerConfig {
        max_connections,
        more_connections: "raise --buffer-size, of which they have a share, or lower --nconnect of the mounts".into(),
        // Many mounts may start at once.
        max_pending_handshakes: max_connections / 2,
        max_workers: MAX_WORKERS,
        patience: RdmaTimeouts { silence: config.silence },
        trust: Arc::clone(trust),
        ..RdmaServerConfig::default()
    };
    let server = RdmaServer::bind(&rails, config.port, service, server_config, Arc::clone(stats)).map_err(|e| {
        Fault::missing(format!("--rdma-network: {e}"), "another --rdma-port, or 0 for one that is free")
    })?;
    let told = found.iter().zip(server.local_addrs()).map(|(f, addr)| RailInfo { port: addr.port(), ..f.rail.clone() });
    let told = told.collect();
    Ok((server, told))
}

/// A rail, for `status`.
pub fn rail_status(rail: &RailInfo, found: &LocalRail) -> RailStatus {
    RailStatus {
        device: found.device.clone(),
        numa_node: found.numa_node,
        interface: rail.name.clone(),
        address: SocketAddr::new(rail.address, rail.port).to_string(),
        link: rail.link.to_string(),
        speed_mbit: rail.speed_mbit,
    }
}

/// Makes channels over the rails of a mount.
struct RdmaDialer {
    found: Vec<LocalRail>,
    told: Vec<RailInfo>,
    rails: Vec<Arc<spurline_net_rdma::RdmaRail>>,
    patience: RdmaTimeouts,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
    pool: Arc<BufferPool>,
}

impl RailDialer for RdmaDialer {
    fn rails_near(&self, at: usize) -> u64 {
        let Some(node) = self.pool.node_of(at) else { return 0 };
        self.found
            .iter()
            .enumerate()
            .map(|(local, found)| u64::from(found.numa_node == Some(node)) << (local % 64))
            .fold(0, |all, rail| all | rail)
    }

    fn rails(&self) -> &[RailInfo] {
        &self.told
    }

    fn connector(&self, local: usize, remote: &RailInfo) -> Arc<dyn Connector> {
        let rail = Arc::clone(&self.rails[local]);
        let peer = SocketAddr::new(remote.address, remote.port);
        let connector = RdmaConnector::new(rail, peer, self.patience, Arc::clone(&self.stats));
        Arc::new(connector.with_trust(Arc::clone(&self.trust)))
    }

    fn link_up(&self, local: usize) -> bool {
        let found = &self.found[local];
        // A removed device may come back under another name, while the interface keeps its name. A new tree each time retries
        // files that did not answer in time.
        let tree = HostTree::live();
        found.is_link_up(&tree) || {
            let name = std::slice::from_ref(&found.rail.name);
            let now = host_addresses().ok().and_then(|here| resolve_rails(name, &tree, &here).ok());
            now.is_some_and(|now| now.iter().all(|now| now.is_link_up(&tree)))
        }
    }
}

/// Gives every node paths over the rails of a mount, connects and monitors the paths while the result is kept.
///
/// # Errors
/// When a device can't be used.
pub fn start_path_monitor(
    config: &VolumeConfig,
    rdma: &RdmaConfig,
    found: Vec<LocalRail>,
    pool: &Arc<BufferPool>,
    trust: &Arc<Trust>,
    members: &Arc<GroupMembers>,
    stats: &Arc<Stats>,
) -> Result<PathMonitor, Fault> {
    place_memory(&found, pool);
    // Only a volume that is changed opens memory to reads.
    let access = if config.writes.is_some() { MemoryAccess::PeerReadsAndWrites } else { MemoryAccess::PeerWrites };
    let rails = open_rails(&found, pool, access, locked_bytes(&config.budget, 0, found.len()))?;
    let told = found.iter().map(|f| f.rail.clone()).collect();
    let patience = RdmaTimeouts { silence: rdma.silence };
    let trust_too = Arc::clone(trust);
    let stats_too = Arc::clone(stats);
    let pool = Arc::clone(pool);
    let dialer: Arc<dyn RailDialer> =
        Arc::new(RdmaDialer { found, told, rails, patience, trust: trust_too, stats: stats_too, pool });
    let paths_config = RailsConfig {
        forced: config.net.transport == TransportMode::Rdma,
        timing: PathTiming { retry: rdma.retry, settle: rdma.settle },
        silence: rdma.silence,
        channels: config.net.nconnect,
        connect_timeout: RAIL_CONNECT_TIMEOUT.min(config.net.peer_timeout),
        name: trust.name().to_owned(),
        source: config.source.to_string(),
        seed: u64::from(std::process::id()),
        loads: Arc::default(),
    };
    let wake = Arc::clone(members.path_wake());
    let stats = Arc::clone(stats);
    members.set_rail_factory(move |member| {
        let dialer = Arc::clone(&dialer);
        let stats = Arc::clone(&stats);
        let wake = Arc::clone(&wake);
        NodeRails::new(&member.name, dialer, paths_config.clone(), stats, wake)
    });
    let monitor = PathMonitor::start(members)?;
    // The first reads find paths; a node that hangs delays the start no longer than this.
    monitor.wait_first(Instant::now() + 2 * RAIL_CONNECT_TIMEOUT);
    Ok(monitor)
}
