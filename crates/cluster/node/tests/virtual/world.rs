//! The cluster under the scripts: nodes that announce themselves, mounts that follow, readers that compare every byte
//! and record the longest wait.

pub use crate::dice::Dice;
use crate::registry::SimRegistry;
use crate::sim::{BLOCK, Cluster, Mount, Waits};
use parking_lot::Mutex;
use spurline_membership::{HoldTimes, NodeAnnouncer, RegistryFollower};
use spurline_store::{CacheCapacity, FaultyDisk, Store, StoreConfig};
use spurline_types::{Member, ObjectRef, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    pub reads: u64,
    /// The longest a read took, in virtual time.
    pub longest: Duration,
    /// Length of the run in virtual time.
    pub time: Duration,
    /// Blocks read from the origin, and distinct ones.
    pub fetched: (u64, usize),
    /// Corrupt blocks found on cache disks.
    pub corrupt: u64,
}

/// Configuration of a world.
#[derive(Debug)]
pub struct Plan {
    pub nodes: usize,
    pub mounts: usize,
    /// Blocks each node has memory for.
    pub blocks: u64,
    pub copies: u32,
    pub hedge_after: Duration,
    /// Whether nodes have cache disks.
    pub disks: bool,
    /// Only the registry has trouble.
    pub calm: bool,
}

/// The disk of one node, and where its files are.
pub struct Disk {
    pub fault: Arc<FaultyDisk>,
    pub dir: tempfile::TempDir,
}

/// A mount and what it follows.
pub struct Reader {
    pub mount: Mount,
    pub name: String,
    _follower: RegistryFollower,
}

pub struct World {
    pub cluster: Cluster,
    pub registry: SimRegistry,
    pub readers: Vec<Arc<Reader>>,
    pub announcers: Vec<Option<NodeAnnouncer>>,
    pub disks: Vec<Disk>,
    _others: Vec<RegistryFollower>,
}

/// A node without an answer and heartbeat for this long is abandoned, as with `--peer-silence`.
pub const SILENCE: Duration = Duration::from_secs(2);
const HOLDS: HoldTimes = HoldTimes { single: Duration::from_secs(60), joint: Duration::from_secs(300) };

fn disk(blocks: u64, stats: &Arc<Stats>, into: &Mutex<Vec<Disk>>) -> Option<Arc<Store>> {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a directory");
    let mut config = StoreConfig::new(vec![dir.path().into()], CacheCapacity::Bytes(8 * blocks * BLOCK));
    config.block_size = BLOCK as u32;
    config.free_space_ratio = 0.0;
    let found: Arc<Mutex<Option<Arc<FaultyDisk>>>> = Arc::default();
    let keep = Arc::clone(&found);
    config.decorate = Some(Arc::new(move |_, io| {
        let disk = FaultyDisk::new(io);
        *keep.lock() = Some(Arc::clone(&disk));
        disk
    }));
    let store = Store::open(config, Arc::clone(stats)).expect("the cache disk opens");
    let fault = found.lock().take().expect("the disk was wrapped");
    into.lock().push(Disk { fault, dir });
    Some(store)
}

impl World {
    pub fn start(plan: &Plan) -> World {
        let disks = Mutex::new(Vec::new());
        let open = |_, stats: &Arc<Stats>| plan.disks.then(|| disk(plan.blocks, stats, &disks)).flatten();
        let cluster = Cluster::start_on(plan.nodes, plan.blocks, open);
        let registry = SimRegistry::new();
        let mut announcers = Vec::new();
        for host in &cluster.hosts {
            announcers.push(announce(&registry, &host.member, &host.stats));
        }
        let others = cluster.join(&(0..plan.nodes).collect::<Vec<_>>());
        let follow = |name: &str, stats: &Arc<Stats>| {
            RegistryFollower::start(&registry.seen_by(name), HOLDS, Arc::clone(stats)).expect("a thread")
        };
        let others = cluster.hosts.iter().zip(others).map(|(host, siblings)| {
            let follower = follow(&host.member.name, &host.stats);
            follower.set_listener(Arc::new(move |members: &[Arc<Member>]| siblings.set_members(members)));
            follower
        });
        let others = others.collect();
        let readers = (0..plan.mounts as u64).map(|number| {
            let name = format!("mount-{number}");
            let waits = Waits { silence: SILENCE, hedge_after: plan.hedge_after, copies: plan.copies, number };
            let mount = cluster.mount_as(0..plan.nodes, waits);
            let follower = follow(&name, &mount.stats);
            follower.first_members(Instant::now() + Duration::from_secs(60)).expect("the registry names the nodes");
            let group = Arc::clone(mount.remote.members());
            follower.set_listener(Arc::new(move |members: &[Arc<Member>]| group.set_members(members)));
            Arc::new(Reader { mount, name, _follower: follower })
        });
        let readers = readers.collect();
        World { readers, registry, announcers, disks: disks.into_inner(), _others: others, cluster }
    }

    /// A node that left enters its name again.
    pub fn announce(&mut self, n: usize) {
        let host = &self.cluster.hosts[n];
        self.announcers[n] = announce(&self.registry, &host.member, &host.stats);
    }

    /// Of all mounts.
    pub fn corrupt(&self) -> u64 {
        self.cluster.hosts.iter().map(|host| host.stats.blockcache.checksum_errors.get()).sum()
    }
}

fn announce(registry: &SimRegistry, member: &Member, stats: &Arc<Stats>) -> Option<NodeAnnouncer> {
    // If the registry is unreachable, the node stays out.
    NodeAnnouncer::start(&registry.seen_by(&member.name), member.clone(), Arc::clone(stats)).ok().flatten()
}

/// Observations of the readers.
#[derive(Default)]
pub struct Seen {
    /// Whether to print long reads.
    pub told: bool,
    pub stop: AtomicBool,
    pub reads: AtomicU64,
    pub longest: Mutex<Duration>,
}

/// Ends the readers, also when the script panics.
pub struct Stop<'a>(pub &'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Reads at random until stopped; an error or a wrong byte ends the run.
pub fn read_on(reader: &Reader, objects: &[ObjectRef], seen: &Seen, mut dice: Dice) {
    while !seen.stop.load(Ordering::Acquire) {
        let object = &objects[dice.below(objects.len())];
        let offset = dice.below(object.size as usize) as u64;
        // Mostly short: comparing costs real time but no virtual time.
        let len = if dice.below(40) == 0 { 2 * BLOCK as usize } else { [1, 100, 2000, 5000][dice.below(4)] };
        let start = Instant::now();
        if let Err(error) = reader.mount.read(object, offset, len) {
            panic!("{}: a read failed after {:?}: {error}", reader.name, start.elapsed());
        }
        let took = start.elapsed();
        if seen.told && took > SILENCE {
            println!("{}: block {} of {} took {took:?}", reader.name, offset / BLOCK, object.id);
        }
        seen.reads.fetch_add(1, Ordering::Relaxed);
        let mut longest = seen.longest.lock();
        *longest = took.max(*longest);
        drop(longest);
        std::thread::sleep(Duration::from_millis(dice.below(500) as u64));
    }
}
