//! The rails of a mount or a node: interfaces of --rdma-network made into RDMA devices at start, or a refusal that
//! names the interface; connections over them for a mount, a server on them for a node.

use serde_json::{Value, json};
use spurline_client::{GroupMembers, NodePaths, PathMonitor, PathsConfig, RailDialer};
use spurline_config::{Fault, MemoryBudget, RdmaConfig, TransportMode, VolumeConfig};
use spurline_fabric::HostTree;
use spurline_mem::BufferPool;
use spurline_net_rdma::{RdmaConnector, RdmaServer, RdmaServerConfig, RdmaTimeouts, connection_bytes};
use spurline_proto::RailInfo;
use spurline_rails::{LocalRail, MemlockLimit, UnusableRail, check_memlock, host_addresses, resolve_rails};
use spurline_transport::{Connector, PathTiming, Service};
use spurline_trust::Trust;
use spurline_types::{ErrorKind, Size, Stats};
use spurline_verbs::{MemoryAccess, VerbsLibrary};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The longest a connection attempt over a rail may take: as long as one over TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Requests in work at once; no more of them are answered than there are processors, the others wait.
const MAX_WORKERS: usize = 1024;

/// The memory that will be locked, in bytes: what is registered, `before` times by then and once for each rail, as the
/// kernel counts it anew each time. What drivers lock for the queues of connections is less than those take of the budget.
fn locked(budget: &MemoryBudget, before: usize, rails: usize) -> u64 {
    budget.total.saturating_mul((before + rails) as u64).saturating_add(budget.rdma_bytes)
}

/// Resolves the interfaces and logs what each is; the memory of `budget` is locked `before` times by then.
///
/// # Errors
/// The first interface that can't be used, with what is wrong and what to do (exit 3).
pub fn find(config: &RdmaConfig, budget: &MemoryBudget, before: usize) -> Result<Vec<LocalRail>, Fault> {
    let missing = |e: UnusableRail| Fault::missing(e.to_string(), e.remedy());
    let rails = resolve_rails(&config.interfaces, &HostTree::live(), &host_addresses()?).map_err(missing)?;
    let needed = locked(budget, before, rails.len());
    for rail in &rails {
        check_memlock(&rail.rail.name, needed, MemlockLimit::of_process()).map_err(missing)?;
        tracing::info!("rail {}", rail.why);
    }
    Ok(rails)
}

/// Has the memory of `pool` come from the NUMA nodes of the rails. To be called before anything registers the pool, which
/// touches its pages: io_uring does, too.
pub fn place(found: &[LocalRail], pool: &BufferPool) {
    let nodes = found.iter().filter_map(|f| f.numa_node).filter(|node| *node < 64).fold(0u64, |all, n| all | 1 << n);
    if nodes != 0
        && let Err(e) = pool.place_on_nodes(nodes)
    {
        tracing::info!("the memory of the rails is wherever the kernel puts it, not on their NUMA nodes: {e}");
    }
}

/// Opens the devices of `found` and registers `pool` with each.
fn open(
    found: &[LocalRail],
    pool: &Arc<BufferPool>,
    access: MemoryAccess,
    locked: u64,
) -> Result<Vec<Arc<spurline_net_rdma::RdmaRail>>, Fault> {
    let named = |name: &str, what: &dyn std::fmt::Display, remedy: String| {
        Fault::missing(format!("--rdma-network {name}: {what}"), remedy)
    };
    let Some(first) = found.first() else { return Ok(Vec::new()) };
    let verbs = VerbsLibrary::load().map_err(|e| named(&first.rail.name, &e, String::new()))?;
    let open = |f: &LocalRail| {
        let name = &f.rail.name;
        spurline_net_rdma::RdmaRail::open_on(&verbs, name, f.rail.address, f.numa_node, pool, access).map_err(|e| {
            match e.kind() {
                // Others of this user may have locked their share of what is allowed.
                ErrorKind::NoMemory => named(name, &e, UnusableRail::memlock_remedy(locked)),
                _ => match f.device_node_error() {
                    Some((node, why)) => named(
                        name,
                        &format!("{node}, through which {} is used, can't be opened: {why}", f.device),
                        format!("in a container, pass {node} in beside /dev/infiniband/rdma_cm"),
                    ),
                    None => named(name, &e, String::new()),
                },
            }
        })
    };
    let rails = found.iter().map(open).collect::<Result<_, Fault>>()?;
    // Registering has touched every page.
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
            tracing::info!("the rails' memory is on their NUMA nodes in turn; where its pages are can't be told: {e}")
        }
    }
    Ok(rails)
}

/// A node's side: serves on every rail of `found`, within `budget`, and tells where.
///
/// # Errors
/// When a device can't be used or the port is taken.
pub fn serve(
    config: &RdmaConfig,
    found: &[LocalRail],
    pool: &Arc<BufferPool>,
    (budget, before): (&MemoryBudget, usize),
    service: Arc<dyn Service>,
    trust: &Arc<Trust>,
    stats: &Arc<Stats>,
) -> Result<(RdmaServer, Vec<RailInfo>), Fault> {
    let rails = open(found, pool, MemoryAccess::Local, locked(budget, before, found.len()))?;
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

/// A rail as `status` shows it.
pub fn shown(rail: &RailInfo, found: &LocalRail) -> Value {
    json!({
        "device": found.device,
        // Null where the kernel knows none.
        "numa_node": found.numa_node,
        "interface": rail.name,
        "address": SocketAddr::new(rail.address, rail.port).to_string(),
        "link": rail.link.to_string(),
        "speed_mbit": rail.speed_mbit,
    })
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
        let near = |(local, found): (usize, &LocalRail)| u64::from(found.numa_node == Some(node)) << (local % 64);
        self.found.iter().enumerate().map(near).fold(0, |all, rail| all | rail)
    }

    fn rails(&self) -> &[RailInfo] {
        &self.told
    }

    fn connector(&self, local: usize, remote: &RailInfo) -> Arc<dyn Connector> {
        let (rail, peer) = (Arc::clone(&self.rails[local]), SocketAddr::new(remote.address, remote.port));
        let connector = RdmaConnector::new(rail, peer, self.patience, Arc::clone(&self.stats));
        Arc::new(connector.with_trust(Arc::clone(&self.trust)))
    }

    fn link_up(&self, local: usize) -> bool {
        let found = &self.found[local];
        // A device that was taken away may come back under another name; its interface keeps its own.
        // A tree of its own each time: what once did not answer in time is asked again.
        let tree = HostTree::live();
        found.is_link_up(&tree) || {
            let name = std::slice::from_ref(&found.rail.name);
            let now = host_addresses().ok().and_then(|here| resolve_rails(name, &tree, &here).ok());
            now.is_some_and(|now| now.iter().all(|now| now.is_link_up(&tree)))
        }
    }
}

/// A mount's side: gives every node paths over the rails of `found`, connects them, and keeps them while the answer
/// is kept.
///
/// # Errors
/// When a device can't be used.
pub fn keep(
    config: &VolumeConfig,
    rdma: &RdmaConfig,
    found: Vec<LocalRail>,
    pool: &Arc<BufferPool>,
    trust: &Arc<Trust>,
    roster: &Arc<GroupMembers>,
    stats: &Arc<Stats>,
) -> Result<PathMonitor, Fault> {
    place(&found, pool);
    let rails = open(&found, pool, MemoryAccess::PeerWrites, locked(&config.budget, 0, found.len()))?;
    let told = found.iter().map(|f| f.rail.clone()).collect();
    let patience = RdmaTimeouts { silence: rdma.silence };
    let (trust_too, stats_too, pool) = (Arc::clone(trust), Arc::clone(stats), Arc::clone(pool));
    let dialer: Arc<dyn RailDialer> =
        Arc::new(RdmaDialer { found, told, rails, patience, trust: trust_too, stats: stats_too, pool });
    let paths_config = PathsConfig {
        forced: config.net.transport == TransportMode::Rdma,
        timing: PathTiming { retry: rdma.retry, settle: rdma.settle },
        silence: rdma.silence,
        channels: config.net.nconnect,
        connect_timeout: CONNECT_TIMEOUT.min(config.net.peer_timeout),
        name: trust.name().to_owned(),
        source: config.source.to_string(),
        seed: u64::from(std::process::id()),
        loads: Arc::default(),
    };
    let (wake, stats) = (Arc::clone(roster.path_wake()), Arc::clone(stats));
    roster.set_path_factory(move |member| {
        let (dialer, stats, wake) = (Arc::clone(&dialer), Arc::clone(&stats), Arc::clone(&wake));
        NodePaths::new(&member.name, dialer, paths_config.clone(), stats, wake)
    });
    let keeper = PathMonitor::start(roster)?;
    // So the first reads find their paths; a node that hangs holds the start up no longer than this.
    keeper.wait_first(Instant::now() + 2 * CONNECT_TIMEOUT);
    Ok(keeper)
}
