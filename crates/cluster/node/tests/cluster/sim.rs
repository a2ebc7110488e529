//! A cluster in memory: real cache nodes and mounts, joined by links that fail on demand, over an origin that counts
//! its reads. The bytes of each object follow from its name, so every read can be checked.

use parking_lot::Mutex;
use spurline_cache::CacheContext;
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupPeer, GroupPeerFetch, GroupVolume, GroupVolumeConfig, RequestPatience};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_sim::{FaultPlan, FaultRates, SimNode, SimRail};
use spurline_node::{CacheNode, HotRule};
use spurline_origin::{OriginCapabilities, OriginCapacity, OriginStore};
use spurline_store::Store;
use spurline_transport::{Connector, DemandConfig, DemandPool, TransportKind};
use spurline_types::{
    ByteSink, Error, ErrorKind, FileKind, ListPage, Member, ObjectAttr, ObjectRef, Result, Stats, Version,
};
use spurline_volume::{ReadData, Volume as _};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

pub const BLOCK: u64 = 64 << 10;
pub const SOURCE: &str = "sim://data";

/// The byte at an offset of an object.
pub fn byte_at(object: u64, offset: u64) -> u8 {
    let mixed = (offset ^ object.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (mixed >> 32) as u8
}

/// An origin with unlimited names and bytes: object `n/LEN` has LEN bytes.
#[derive(Default)]
pub struct Under {
    /// Reads of each block.
    reads: Mutex<HashMap<(u64, u64), u64>>,
    pub latency: Mutex<Duration>,
}

impl Under {
    /// Total reads, and the number of distinct blocks read.
    pub fn reads(&self) -> (u64, usize) {
        let reads = self.reads.lock();
        (reads.values().sum(), reads.len())
    }
}

/// Number and length of an object by its path.
fn parse(path: &[u8]) -> Result<(u64, u64)> {
    let text = std::str::from_utf8(path).ok().and_then(|text| text.split_once('/'));
    let numbers = text.and_then(|(n, len)| Some((n.parse().ok()?, len.parse().ok()?)));
    numbers.ok_or_else(|| Error::new(ErrorKind::NotFound, "no such object"))
}

impl OriginStore for Under {
    fn source_url(&self) -> &str {
        SOURCE
    }
    fn describe(&self) -> String {
        SOURCE.into()
    }
    fn capabilities(&self) -> OriginCapabilities {
        OriginCapabilities { symlinks: false, byte_names: true, modes: false, etags: true, concurrent_reads: false }
    }
    fn check(&self, _: Instant) -> Result<()> {
        Ok(())
    }
    fn lookup(&self, path: &[u8], _: Instant) -> Result<ObjectAttr> {
        let (_, size) = parse(path)?;
        let version = Version::new("1");
        Ok(ObjectAttr { kind: FileKind::File, size, mtime: UNIX_EPOCH, mode: 0o444, version, etag: None })
    }
    fn list(&self, _: &[u8], _: Option<&[u8]>, _: usize, _: Instant) -> Result<ListPage> {
        Err(Error::new(ErrorKind::Unsupported, "no listings"))
    }
    fn readlink(&self, _: &[u8], _: Instant) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Invalid, "no links"))
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, _: Instant) -> Result<()> {
        let (number, _) = parse(&object.path)?;
        *self.reads.lock().entry((number, offset / BLOCK)).or_default() += 1;
        let latency = *self.latency.lock();
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
        let spare = sink.spare();
        let len = spare.len();
        spare.iter_mut().zip(offset..).for_each(|(byte, at)| *byte = byte_at(number, at));
        sink.commit(len);
        Ok(())
    }
    fn statfs(&self, _: Instant) -> Result<Option<OriginCapacity>> {
        Ok(None)
    }
}

/// A fault of one node's access to the origin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OriginFault {
    /// Requests get no answer.
    Silent,
    /// Requests fail at once.
    Refuses(ErrorKind),
}

/// The origin as one node reaches it.
pub struct OriginAccess {
    under: Arc<Under>,
    pub fault: Mutex<Option<OriginFault>>,
}

impl OriginAccess {
    /// Returns once the origin is reached.
    fn reach(&self, deadline: Instant) -> Result<()> {
        loop {
            match *self.fault.lock() {
                None => return Ok(()),
                Some(OriginFault::Refuses(kind)) => return Err(Error::new(kind, "the origin refuses this node")),
                Some(OriginFault::Silent) if Instant::now() >= deadline => {
                    return Err(Error::new(ErrorKind::Timeout, "the origin does not answer this node"));
                }
                Some(OriginFault::Silent) => {}
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl OriginStore for OriginAccess {
    fn source_url(&self) -> &str {
        self.under.source_url()
    }
    fn describe(&self) -> String {
        self.under.describe()
    }
    fn capabilities(&self) -> OriginCapabilities {
        self.under.capabilities()
    }
    fn check(&self, deadline: Instant) -> Result<()> {
        self.reach(deadline).and_then(|()| self.under.check(deadline))
    }
    fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr> {
        self.reach(deadline).and_then(|()| self.under.lookup(path, deadline))
    }
    fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage> {
        self.reach(deadline).and_then(|()| self.under.list(path, cursor, max, deadline))
    }
    fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>> {
        self.reach(deadline).and_then(|()| self.under.readlink(path, deadline))
    }
    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        self.reach(deadline).and_then(|()| self.under.read(object, offset, sink, deadline))
    }
    fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>> {
        self.reach(deadline).and_then(|()| self.under.statfs(deadline))
    }
}

/// An object of a cluster's origin.
pub fn object(number: u64, len: u64) -> ObjectRef {
    ObjectRef::new(SOURCE, format!("{number}/{len}").as_bytes(), Version::new("1"), len)
}

/// One cache node and its link.
pub struct Host {
    pub sim: SimNode,
    pub plan: Arc<FaultPlan>,
    pub link: SimRail,
    pub stats: Arc<Stats>,
    pub tier: Arc<MemTier>,
    pub shared: Arc<CacheContext>,
    pub member: Member,
    pub origin: Arc<OriginAccess>,
}

/// Short timeouts for a cluster with many faults.
pub fn patience() -> RequestPatience {
    RequestPatience { answer: Duration::from_secs(60), absence: Duration::from_secs(60) }
}

/// Short, so that a run has many faults; false detections on a busy machine only add to them.
pub fn silence() -> Duration {
    Duration::from_millis(200)
}

/// Timeouts of a mount, and its number of copies.
pub struct Waits {
    pub silence: Duration,
    /// Zero: no second requests.
    pub hedge_after: Duration,
    pub copies: u32,
    /// Its number among the mounts.
    pub number: u64,
}

impl Default for Waits {
    fn default() -> Self {
        Waits { silence: silence(), hedge_after: Duration::ZERO, copies: 1, number: 0 }
    }
}

fn pool_config() -> DemandConfig {
    DemandConfig {
        connect_timeout: Duration::from_millis(200),
        retry_min: Duration::from_millis(5),
        retry_max: Duration::from_millis(100),
        ..DemandConfig::default()
    }
}

/// Connectors to nodes by name, until the cluster ends.
type Ways = Arc<Mutex<HashMap<String, Arc<dyn Connector>>>>;

/// The member list of a mount or a node: each member over its default link and over one of its own, which are the
/// second result.
fn reach(
    hosts: &[Host],
    name: &str,
    stats: &Arc<Stats>,
) -> (impl Fn(&Member) -> Arc<GroupPeer> + Send + Sync + 'static, Vec<SimRail>, Ways) {
    let links: Vec<SimRail> = hosts.iter().map(|_| SimRail::new()).collect();
    let way = |(host, own): (&Host, &SimRail)| {
        let to_host = host.link.connector(host.sim.connector(), TransportKind::Sim);
        (host.member.name.clone(), own.connector(to_host, TransportKind::Sim))
    };
    let ways: Ways = Arc::new(Mutex::new(hosts.iter().zip(&links).map(way).collect()));
    let (name, stats, known) = (name.to_owned(), Arc::clone(stats), Arc::clone(&ways));
    let make = move |member: &Member| {
        let way = Arc::clone(&known.lock()[&member.name]);
        GroupPeer::new(DemandPool::new(way, &name, SOURCE, pool_config(), Arc::clone(&stats)), member)
    };
    (make, links, ways)
}

pub struct Cluster {
    pub hosts: Vec<Host>,
    pub under: Arc<Under>,
    /// Links between nodes, cleared at the end: in one process they would keep each other alive.
    known: Mutex<Vec<(Ways, Arc<GroupPeerFetch>)>>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for (ways, siblings) in self.known.lock().drain(..) {
            siblings.set_members(&[]);
            ways.lock().clear();
        }
    }
}

impl Cluster {
    /// `count` separate nodes with memory for this many blocks each.
    pub fn start(count: usize, blocks: u64) -> Cluster {
        Cluster::start_on(count, blocks, |_, _| None)
    }

    /// As `start`, with the cache disks opened by `disks`.
    pub fn start_on(count: usize, blocks: u64, disks: impl Fn(usize, &Arc<Stats>) -> Option<Arc<Store>>) -> Cluster {
        let under = Arc::new(Under::default());
        let hosts = (0..count).map(|n| host(n, blocks, &under, &disks)).collect();
        Cluster { hosts, under, known: Mutex::default() }
    }

    pub fn members(&self, which: impl IntoIterator<Item = usize>) -> Vec<Arc<Member>> {
        which.into_iter().map(|n| Arc::new(self.hosts[n].member.clone())).collect()
    }

    /// A mount with these nodes.
    pub fn mount(&self, which: impl IntoIterator<Item = usize>) -> Mount {
        self.mount_with(which, silence())
    }

    /// As `mount`, with a silence limit.
    pub fn mount_with(&self, which: impl IntoIterator<Item = usize>, silence: Duration) -> Mount {
        self.mount_as(which, Waits { silence, ..Waits::default() })
    }

    /// As `mount`, with all timeouts.
    pub fn mount_as(&self, which: impl IntoIterator<Item = usize>, waits: Waits) -> Mount {
        let stats = Arc::new(Stats::default());
        let (make, links, _) = reach(&self.hosts, &format!("mount-{}", waits.number), &stats);
        let members = GroupMembers::new(&self.members(which), make);
        let config = GroupVolumeConfig {
            patience: patience(),
            fetchers: 2,
            metadata_age: Duration::ZERO,
            copies: CopyCounts::new(waits.copies, []),
            standpoint: ReaderLocation { zone: String::new(), seed: waits.number },
            silence: waits.silence,
            hedge_after: waits.hedge_after,
        };
        let remote = GroupVolume::connect(SOURCE, members, config, Arc::clone(&stats), |block| {
            Ok(MemTier::new(BufferPool::new(16 * block, block as usize)?))
        });
        Mount { remote: remote.expect("the mount starts"), stats, links }
    }

    /// Connects the nodes `which` with each other: they fetch from each other before the origin.
    pub fn join(&self, which: &[usize]) -> Vec<Arc<GroupPeerFetch>> {
        let join = |n: &usize| {
            let host = &self.hosts[*n];
            let (make, _, ways) = reach(&self.hosts, &host.member.name, &host.stats);
            let make = Arc::new(make);
            let open = move |_: &str, members: &[Arc<Member>]| {
                let make = Arc::clone(&make);
                GroupMembers::new(members, move |member| make(member))
            };
            let stats = Arc::clone(&host.stats);
            let siblings = GroupPeerFetch::new(&host.member.name, BLOCK, Duration::from_secs(3600), stats, open);
            siblings.set_members(&self.members(which.iter().copied()));
            host.shared.set_peer_fetch(Arc::clone(&siblings) as _);
            self.known.lock().push((ways, Arc::clone(&siblings)));
            siblings
        };
        which.iter().map(join).collect()
    }

    /// Number of an object's blocks held by a node.
    pub fn held(&self, node: usize, object: &ObjectRef) -> u32 {
        let blocks = object.block_count(BLOCK) as u32;
        let id = |index| spurline_types::BlockId { object: object.id, index };
        (0..blocks).filter(|index| self.hosts[node].tier.peek(&id(*index)).is_some_and(|b| b.is_ready())).count() as u32
    }
}

/// Opens the cache disks of one node.
type OpenDisks<'a> = dyn Fn(usize, &Arc<Stats>) -> Option<Arc<Store>> + 'a;

fn host(n: usize, blocks: u64, under: &Arc<Under>, disks: &OpenDisks<'_>) -> Host {
    let stats = Arc::new(Stats::default());
    let tier = MemTier::new(BufferPool::new(blocks * BLOCK, BLOCK as usize).unwrap());
    let timeout = Duration::from_secs(60);
    let shared = CacheContext::new(Arc::clone(&tier), disks(n, &stats), BLOCK, 8, timeout, false, Arc::clone(&stats));
    let kept = Arc::clone(&shared);
    let origin = Arc::new(OriginAccess { under: Arc::clone(under), fault: Mutex::default() });
    let under = Arc::clone(&origin);
    let open = move |_: &str| Ok(Arc::clone(&under) as Arc<dyn OriginStore>);
    let rule = HotRule { window: Duration::from_millis(200), times: 2, share: 4, readers: 3, cools: 5 };
    let node = CacheNode::with_rule(&format!("n{n}"), shared, vec![SOURCE.into()], Box::new(open), rule);
    let shared = kept;
    let plan = Arc::new(FaultPlan::new(n as u64 + 1, FaultRates::default()));
    let sim = SimNode::new(&format!("n{n}"), node, Arc::clone(&plan));
    Host {
        sim,
        plan,
        link: SimRail::new(),
        stats,
        tier,
        shared,
        member: Member::from_address(&format!("n{n}"), 100),
        origin,
    }
}

pub struct Mount {
    pub remote: Arc<GroupVolume>,
    pub stats: Arc<Stats>,
    /// To each node.
    pub links: Vec<SimRail>,
}

impl Mount {
    /// Reads and compares every byte.
    pub fn read(&self, object: &ObjectRef, offset: u64, len: usize) -> Result<()> {
        let (number, _) = parse(&object.path)?;
        let mut dst = vec![0x55; len];
        let got = match self.remote.read(object, offset, &mut dst)? {
            ReadData::Copied(n) => dst[..n].to_vec(),
            ReadData::Shared(slice) => slice.to_vec(),
        };
        assert_eq!(got.len() as u64, object.size.saturating_sub(offset).min(len as u64), "{len} at {offset}");
        let wrong = got.iter().zip(offset..).find(|(byte, at)| **byte != byte_at(number, *at));
        assert_eq!(wrong, None, "a wrong byte of {len} at {offset} of object {number}");
        Ok(())
    }

    /// Reads all of it.
    pub fn read_all(&self, object: &ObjectRef) -> Result<()> {
        (0..object.block_count(BLOCK)).try_for_each(|block| self.read(object, block * BLOCK, BLOCK as usize))
    }
}
