//! Nodes and mounts of a writable source in one process: real services, real clients with all their threads, and links in memory
//! that fail on demand. Times and limits are those of the product.

use crate::sim::BLOCK;
use crate::world::Dice;
use parking_lot::Mutex;
use spurline_cache::CacheContext;
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{
    GroupMembers, GroupPeer, GroupVolume, GroupVolumeConfig, GroupWrites, NodeRails, PathMonitor, RailDialer,
    RailsConfig, RequestPatience,
};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_sim::{DetachedConnector, FaultPlan, FaultRates, RailMode, SimNode, SimRail};
use spurline_node::CacheNode;
use spurline_object_store::SourceRequests;
use spurline_origin::OriginStore;
use spurline_proto::{LOCK_TIMES, RailInfo, RailLink, StoreSettings};
use spurline_transport::{Channel, Connector, DemandConfig, DemandPool, PathTiming, TransportKind};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use spurline_volume::Volume;
use spurline_volume::delayed::DelayedWrites;
use spurline_volume::writes::WritableVolume;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// As `--peer-timeout` and `--peer-silence`.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(75);
const PEER_SILENCE: Duration = Duration::from_secs(2);
/// Memory of a mount for written bytes: little, so that syncs have to make room.
pub const WRITE_MEMORY_BYTES: u64 = 512 << 10;
const NODE_BLOCKS: u64 = 640;
/// As the default of `--nconnect`.
const RAIL_CHANNELS: usize = 4;
/// As the pauses before a failed rail is tried again, and until a rail that returned is used.
const RAIL_TIMING: PathTiming = PathTiming { retry: Duration::from_millis(500), settle: Duration::from_secs(1) };

/// The source of a cluster.
pub trait SimSource: Send + Sync {
    fn url(&self) -> &'static str;
    /// The source as a new process of a host has it.
    fn start_process(&self, host: usize) -> Arc<dyn SourceOfProcess>;
    /// Draws new trouble of the source; returns a description.
    fn disturb(&self, dice: &mut Dice) -> String;
    /// Ends all trouble of the source.
    fn heal(&self);
    /// Opens the writing side of a mount.
    fn open_mount(&self, volume: &Arc<GroupVolume>) -> Result<Arc<dyn MountWrites>> {
        Ok(volume.open_writes(None, WRITE_MEMORY_BYTES)?)
    }
    /// How long a mount may be cut off from a node that others reach: longer, locks are not promised.
    fn longest_partition(&self) -> Duration {
        Duration::MAX
    }
}

/// The writing side of a mount.
pub trait MountWrites: WritableVolume + DelayedWrites {
    /// Memory of written bytes.
    fn kept_bytes(&self) -> u64;
}

impl MountWrites for GroupWrites {
    fn kept_bytes(&self) -> u64 {
        self.memory().0
    }
}

/// The source as one process has it: nothing that the process does after its end has an effect.
pub trait SourceOfProcess: Send + Sync {
    fn open_reads(&self) -> Result<Arc<dyn OriginStore>>;
    fn open_writes(&self, reads: &Arc<dyn Volume>) -> Result<Arc<dyn WritableVolume>>;
    /// The store behind the source.
    fn open_requests(&self) -> Result<SourceRequests> {
        Err(Error::new(ErrorKind::Unsupported, "the source is no bucket"))
    }
    /// The process ends; with `power`, its host as well.
    fn end(&self, power: bool);
}

/// A running process of a node.
struct NodeProcess {
    sim: SimNode,
    source: Arc<dyn SourceOfProcess>,
    node: Arc<CacheNode>,
    ended: Arc<AtomicBool>,
}

/// A host with a node.
pub struct NodeHost {
    pub name: String,
    number: usize,
    /// Faults of its calls.
    pub plan: Arc<FaultPlan>,
    /// To all mounts, over rails and TCP.
    pub link: SimRail,
    /// Number of RDMA rails.
    rails: usize,
    source: Arc<dyn SimSource>,
    process: Mutex<Option<NodeProcess>>,
    stopped: AtomicBool,
}

impl NodeHost {
    fn start(number: usize, rails: usize, source: &Arc<dyn SimSource>) -> Arc<NodeHost> {
        let host = Arc::new(NodeHost {
            name: format!("n{number}"),
            number,
            plan: Arc::new(FaultPlan::new(number as u64 + 1, FaultRates::default())),
            link: SimRail::new(),
            rails,
            source: Arc::clone(source),
            process: Mutex::default(),
            stopped: AtomicBool::new(false),
        });
        host.start_process();
        host
    }

    /// Starts a process, if there is none.
    pub fn start_process(self: &Arc<Self>) {
        let mut process = self.process.lock();
        if process.is_some() {
            return;
        }
        let source = self.source.start_process(self.number);
        let stats = Arc::new(Stats::default());
        let tier = MemTier::new(BufferPool::new(NODE_BLOCKS * BLOCK, BLOCK as usize).expect("memory"));
        let shared = CacheContext::new(tier, None, BLOCK, 4, Duration::from_secs(60), false, stats);
        let reads = Arc::clone(&source);
        let open = move |_: &str| reads.open_reads();
        let node = CacheNode::new(&self.name, shared, vec![self.source.url().into()], Box::new(open));
        node.announce_rails((0..self.rails).map(|rail| rail_info(rail, 2)).collect());
        let changes = Arc::clone(&source);
        node.accept_writes(Box::new(move |volume| changes.open_writes(volume)));
        let requests = Arc::clone(&source);
        node.accept_store_requests(Some(StoreSettings::default()), Box::new(move |_| requests.open_requests()));
        let ended = Arc::new(AtomicBool::new(false));
        let (host, checked, until) = (Arc::clone(self), Arc::clone(&node), Arc::clone(&ended));
        std::thread::spawn(move || {
            while !until.load(Ordering::Acquire) {
                if !host.stopped.load(Ordering::Acquire) {
                    checked.expire_write_sessions();
                }
                std::thread::sleep(LOCK_TIMES.session_check);
            }
        });
        let sim = SimNode::new(&self.name, Arc::clone(&node) as _, Arc::clone(&self.plan));
        *process = Some(NodeProcess { sim, source, node, ended });
    }

    /// Ends the process; with `power`, the host as well.
    pub fn kill(&self, power: bool) {
        let Some(process) = self.process.lock().take() else { return };
        self.stopped.store(false, Ordering::Release);
        process.ended.store(true, Ordering::Release);
        // First of all, nothing that it still does is answered: its calls of the source fail once it has ended.
        process.sim.kill();
        process.source.end(power);
    }

    pub fn set_stopped(&self, stopped: bool) {
        self.stopped.store(stopped, Ordering::Release);
        if let Some(process) = &*self.process.lock() {
            process.sim.set_stopped(stopped);
        }
    }

    /// Open files of mounts on it.
    pub fn open_files(&self) -> u64 {
        let process = self.process.lock();
        process.as_ref().map_or(0, |process| process.node.writes_in_use().open_files as u64)
    }
}

/// Connects to the process that a host runs now.
struct HostConnector(Arc<NodeHost>);

impl Connector for HostConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        let running = self.0.process.lock().as_ref().map(|process| process.sim.connector());
        let refused = || Error::new(ErrorKind::Unavailable, "connection refused");
        // The node's threads are not those of the mount's process.
        let at_start = Arc::new(|| spurline_vtime::set_group(0));
        DetachedConnector::new(running.ok_or_else(refused)?, at_start).connect(deadline)
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }
    fn peer(&self) -> &str {
        &self.0.name
    }
}

/// A rail of a host, in a subnet of its own.
fn rail_info(rail: usize, host: u8) -> RailInfo {
    let address = [10, 0, rail as u8, host].into();
    RailInfo {
        name: format!("r{rail}"),
        address,
        prefix_len: 24,
        port: 1,
        link: RailLink::RoceV2,
        fabric: 0,
        speed_mbit: 100_000,
    }
}

/// Connects the rails of a mount to those of a host.
struct HostDialer {
    local: Vec<RailInfo>,
    rails: Vec<SimRail>,
    host: Arc<NodeHost>,
}

impl RailDialer for HostDialer {
    fn rails(&self) -> &[RailInfo] {
        &self.local
    }
    fn connector(&self, local: usize, _remote: &RailInfo) -> Arc<dyn Connector> {
        let to_host = self.host.link.connector(Arc::new(HostConnector(Arc::clone(&self.host))), TransportKind::Rdma);
        self.rails[local].connector(to_host, TransportKind::Rdma)
    }
    fn link_up(&self, local: usize) -> bool {
        self.rails[local].link_up() && self.host.link.link_up()
    }
}

/// A mount that writes.
pub struct SimMount {
    pub number: usize,
    pub writes: Arc<dyn MountWrites>,
    /// To each node, over TCP.
    pub links: Vec<SimRail>,
    /// To each node, over RDMA: each of its rails.
    pub rails: Vec<Vec<SimRail>>,
    pub stats: Arc<Stats>,
    _monitor: PathMonitor,
    _volume: Arc<GroupVolume>,
}

impl SimMount {
    /// The group of its threads.
    pub fn thread_group(&self) -> u64 {
        self.number as u64 + 1
    }
}

/// Nodes, mounts and their source.
pub struct WriteCluster {
    pub source: Arc<dyn SimSource>,
    pub hosts: Vec<Arc<NodeHost>>,
    pub mounts: Vec<Arc<SimMount>>,
}

impl WriteCluster {
    pub fn start(source: Arc<dyn SimSource>, nodes: usize, mounts: usize, rails: usize) -> WriteCluster {
        let hosts: Vec<_> = (0..nodes).map(|number| NodeHost::start(number, rails, &source)).collect();
        let mounts = (0..mounts).map(|number| {
            // Its threads are a group of their own, as those of a process.
            let hosts = &hosts;
            let source = &*source;
            std::thread::scope(|scope| {
                let start = move || {
                    spurline_vtime::set_group(number as u64 + 1);
                    start_mount(number, source, hosts, rails)
                };
                scope.spawn(start).join().expect("the mount starts")
            })
        });
        WriteCluster { mounts: mounts.collect(), source, hosts }
    }

    /// Ends all processes: those of mounts first.
    pub fn end(self) {
        drop(self.mounts);
        self.hosts.iter().for_each(|host| host.kill(false));
    }

    /// Ends all faults of links and calls, and continues the mounts that are stopped.
    pub fn heal(&self) {
        for host in &self.hosts {
            host.plan.set_rates(FaultRates::default());
            host.link.set_mode(RailMode::Up);
            host.set_stopped(false);
            host.start_process();
        }
        for mount in &self.mounts {
            let all = mount.links.iter().chain(mount.rails.iter().flatten());
            all.for_each(|link| link.set_mode(RailMode::Up));
        }
        self.mounts.iter().for_each(|mount| spurline_vtime::pause_group(mount.thread_group(), Duration::ZERO));
        self.source.heal();
    }
}

fn start_mount(number: usize, source: &dyn SimSource, hosts: &[Arc<NodeHost>], rails: usize) -> Arc<SimMount> {
    let url = source.url();
    let stats = Arc::new(Stats::default());
    let rails: Vec<Vec<SimRail>> = hosts.iter().map(|_| (0..rails).map(|_| SimRail::new()).collect()).collect();
    let links: Vec<SimRail> = hosts.iter().map(|_| SimRail::new()).collect();
    let members: Vec<_> = hosts.iter().map(|host| Arc::new(Member::from_address(&host.name, 100))).collect();
    let ways: Vec<(String, Arc<dyn Connector>)> = hosts
        .iter()
        .zip(&links)
        .map(|(host, own)| {
            let to_host = host.link.connector(Arc::new(HostConnector(Arc::clone(host))), TransportKind::Sim);
            (host.name.clone(), own.connector(to_host, TransportKind::Sim))
        })
        .collect();
    let (name, counted) = (format!("mount-{number}"), Arc::clone(&stats));
    let roster = GroupMembers::new(&members, move |member| {
        let way = ways.iter().find(|(name, _)| *name == member.name).map(|(_, way)| Arc::clone(way));
        let way = way.expect("a way to each node");
        GroupPeer::new(DemandPool::new(way, &name, url, DemandConfig::default(), Arc::clone(&counted)), member)
    });
    let monitor = follow_rails(number, url, &roster, hosts, &rails, &stats);
    let config = GroupVolumeConfig {
        patience: RequestPatience::new(ANSWER_TIMEOUT),
        fetchers: 1,
        metadata_age: Duration::ZERO,
        copies: CopyCounts::default(),
        standpoint: ReaderLocation { zone: String::new(), seed: number as u64 },
        silence: PEER_SILENCE,
        hedge_after: Duration::ZERO,
    };
    let volume = GroupVolume::connect(url, roster, config, Arc::clone(&stats), |block| {
        Ok(MemTier::new(BufferPool::new(16 * block, block as usize)?))
    });
    let volume = volume.expect("the nodes answer");
    let writes = source.open_mount(&volume).expect("the nodes take changes");
    Arc::new(SimMount { number, writes, links, rails, stats, _monitor: monitor, _volume: volume })
}

/// Lets requests to each host go over its rails.
fn follow_rails(
    number: usize,
    url: &'static str,
    roster: &Arc<GroupMembers>,
    hosts: &[Arc<NodeHost>],
    rails: &[Vec<SimRail>],
    stats: &Arc<Stats>,
) -> PathMonitor {
    let hosts = hosts.to_vec();
    let rails = rails.to_vec();
    let stats = Arc::clone(stats);
    let wake = Arc::clone(roster.path_wake());
    roster.set_rail_factory(move |member| {
        let at = hosts.iter().position(|host| host.name == member.name).expect("a host of each member");
        let dialer = HostDialer {
            local: (0..rails[at].len()).map(|rail| rail_info(rail, 1)).collect(),
            rails: rails[at].clone(),
            host: Arc::clone(&hosts[at]),
        };
        let config = RailsConfig {
            forced: false,
            timing: RAIL_TIMING,
            silence: PEER_SILENCE,
            channels: RAIL_CHANNELS,
            connect_timeout: Duration::from_secs(5),
            name: format!("mount-{number}"),
            source: url.into(),
            seed: number as u64,
            loads: Arc::default(),
        };
        NodeRails::new(&member.name, Arc::new(dialer), config, Arc::clone(&stats), Arc::clone(&wake))
    });
    PathMonitor::start(roster).expect("a thread")
}
