//! A mount's view of one node over simulated rails and TCP: the fixture of the path tests.

use parking_lot::Mutex;
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{
    GroupMembers, GroupPeer, GroupVolume, GroupVolumeConfig, NodeRails, PathMonitor, RailDialer, RailsConfig,
    RequestPatience,
};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_sim::{FaultPlan, FaultRates, SimNode, SimRail};
use spurline_proto::{HelloRequest, NodeRequest, RailInfo, RailLink, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{
    ConnState, Connector, DemandConfig, DemandPool, PathTiming, PathView, Responder, Service, TransportKind,
};
use spurline_types::{Error, ErrorKind, Member, ObjectId, ObjectRef, Result, Stats, Version};
use spurline_volume::{ReadData, Volume as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub const SIZE: u64 = 1 << 40;

/// The byte at an offset of every object.
pub fn byte_at(offset: u64) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31) ^ (offset >> 19)) as u8
}

/// Serves those bytes, with a configurable description of its rails.
pub struct Bytes {
    pub rails: Mutex<Vec<RailInfo>>,
    pub instance: AtomicU64,
    /// Handshakes of heartbeat channels.
    pub of_no_source: AtomicU64,
    /// Reads received.
    pub reads: AtomicU64,
    /// Delay of each answer in the node.
    pub thinks: Mutex<Duration>,
}

impl Service for Bytes {
    fn handle_hello(&self, _: &ConnState, hello: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        self.of_no_source.fetch_add(u64::from(hello.source.is_empty()), Ordering::Relaxed);
        Ok(WelcomeAnswer {
            // Each connection numbers the volume itself.
            volume: VolumeId(hello.peer.len() as u32),
            block_size: 4 << 20,
            node: "node".into(),
            instance: self.instance.load(Ordering::Relaxed),
            rails: self.rails.lock().clone(),
            ..WelcomeAnswer::default()
        })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        let NodeRequest::Read(ReadRequest { offset, len, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads only"));
        };
        self.reads.fetch_add(1, Ordering::Relaxed);
        std::thread::sleep(*self.thinks.lock());
        let bytes: Vec<u8> = (offset..offset + u64::from(len)).map(byte_at).collect();
        responder.send_data(&[], &[&bytes])
    }
}

/// Local rails as configured by a test.
pub struct SimDialer {
    local: Vec<RailInfo>,
    rails: Vec<SimRail>,
    node: SimNode,
}

impl RailDialer for SimDialer {
    fn rails(&self) -> &[RailInfo] {
        &self.local
    }
    fn connector(&self, local: usize, _remote: &RailInfo) -> Arc<dyn Connector> {
        self.rails[local].connector(self.node.connector(), TransportKind::Rdma)
    }
    fn link_up(&self, local: usize) -> bool {
        self.rails[local].link_up()
    }
}

/// A rail in a subnet of its own.
pub fn rail(subnet: usize, host: u8, speed_mbit: u32) -> RailInfo {
    let address = [10, 0, subnet as u8, host].into();
    let name = format!("r{subnet}");
    RailInfo { name, address, prefix_len: 24, port: 1, link: RailLink::RoceV2, fabric: 0, speed_mbit }
}

pub struct Options {
    pub speeds: Vec<u32>,
    pub forced: bool,
    pub retry: Duration,
    pub settle: Duration,
    pub silence: Duration,
    pub channels: usize,
    /// Answer timeout.
    pub answer: Duration,
    /// Initial state of the rails.
    pub modes: Vec<spurline_net_sim::RailMode>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            speeds: vec![100_000, 100_000],
            forced: false,
            retry: Duration::from_millis(60),
            settle: Duration::from_millis(40),
            silence: Duration::from_millis(80),
            channels: 4,
            answer: Duration::from_secs(20),
            modes: Vec::new(),
        }
    }
}

pub struct Cluster {
    pub rails: Vec<SimRail>,
    /// The simulated TCP connection, independent of the rails.
    pub tcp: SimRail,
    pub node: SimNode,
    /// Faults of its calls.
    pub plan: Arc<FaultPlan>,
    pub service: Arc<Bytes>,
    pub peer: Arc<GroupPeer>,
    pub stats: Arc<Stats>,
    pub remote: Arc<GroupVolume>,
    _keeper: PathMonitor,
}

impl Cluster {
    pub fn start(options: Options) -> Cluster {
        Self::start_with(options, |_| {})
    }

    /// `say` changes the announced rails.
    pub fn start_with(options: Options, say: impl FnOnce(&mut Vec<RailInfo>)) -> Cluster {
        let mut theirs: Vec<RailInfo> =
            options.speeds.iter().enumerate().map(|(i, speed)| rail(i, 2, *speed)).collect();
        say(&mut theirs);
        let service = Arc::new(Bytes {
            rails: Mutex::new(theirs),
            instance: AtomicU64::new(1),
            of_no_source: AtomicU64::new(0),
            reads: AtomicU64::new(0),
            thinks: Mutex::default(),
        });
        let plan = Arc::new(FaultPlan::new(1, FaultRates::default()));
        let node = SimNode::new("node:7000", Arc::clone(&service) as _, Arc::clone(&plan));
        let rails: Vec<SimRail> = options.speeds.iter().map(|_| SimRail::new()).collect();
        for (rail, mode) in rails.iter().zip(&options.modes) {
            rail.set_mode(*mode);
        }
        let local = options.speeds.iter().enumerate().map(|(i, speed)| rail_here(i, *speed)).collect();
        let dialer = Arc::new(SimDialer { local, rails: rails.clone(), node: node.clone() });
        let stats = Arc::new(Stats::default());
        let config = RailsConfig {
            forced: options.forced,
            timing: PathTiming { retry: options.retry, settle: options.settle },
            silence: options.silence,
            channels: options.channels,
            connect_timeout: Duration::from_millis(100),
            name: "mount".into(),
            source: "src".into(),
            seed: 7,
            loads: Arc::default(),
        };
        let tcp = SimRail::new();
        let pool_config = DemandConfig { retry_min: Duration::from_millis(5), ..DemandConfig::default() };
        let pool = DemandPool::new(
            tcp.connector(node.connector(), TransportKind::Tcp),
            "mount",
            "src",
            pool_config,
            Arc::clone(&stats),
        );
        let member = Member::from_address("node:7000", 100);
        let peer = GroupPeer::new(pool, &member);
        let the_peer = Arc::clone(&peer);
        let members = GroupMembers::new(&[Arc::new(member)], move |_| Arc::clone(&the_peer));
        let wake = Arc::clone(members.path_wake());
        let paths = Mutex::new(Some(NodeRails::new("node:7000", dialer, config, Arc::clone(&stats), wake)));
        members.set_rail_factory(move |_| paths.lock().take().expect("one node has paths"));
        let monitor = PathMonitor::start(&members).unwrap();
        monitor.wait_first(Instant::now() + Duration::from_secs(10));
        let patience = RequestPatience { answer: options.answer, absence: Duration::from_millis(200) };
        let remote_config = GroupVolumeConfig {
            patience,
            fetchers: 2,
            metadata_age: Duration::ZERO,
            copies: CopyCounts::default(),
            standpoint: ReaderLocation::default(),
            silence: Duration::from_secs(2),
            hedge_after: Duration::ZERO,
        };
        let remote = GroupVolume::connect("src", members, remote_config, Arc::clone(&stats), |block_size| {
            Ok(MemTier::new(BufferPool::new(64 << 20, block_size as usize)?))
        });
        let remote = remote.expect("the mount starts");
        Cluster { rails, tcp, node, plan, service, peer, stats, remote, _keeper: monitor }
    }

    /// Reads and compares every byte.
    pub fn read(&self, offset: u64, len: usize) -> Result<()> {
        let object = ObjectRef {
            id: ObjectId(u128::from(offset >> 20)),
            path: b"f"[..].into(),
            version: Version::new("v"),
            size: SIZE,
        };
        let mut dst = vec![0x55; len];
        match self.remote.read(&object, offset, &mut dst)? {
            ReadData::Copied(n) => assert_eq!(n, len),
            ReadData::Shared(_) => panic!("nothing was fetched ahead"),
        }
        if let Some(at) = (0..len).find(|i| dst[*i] != byte_at(offset + *i as u64)) {
            panic!("byte {at} of {len} at {offset} is {:#04x}", dst[at]);
        }
        Ok(())
    }

    pub fn views(&self) -> Vec<PathView> {
        self.peer.rails().unwrap().path_views().0
    }

    pub fn up(&self) -> usize {
        self.peer.rails().unwrap().up_count()
    }

    /// Waits for a condition.
    pub fn wait(&self, what: &str, mut until: impl FnMut(&Cluster) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(150);
        while !until(self) {
            assert!(Instant::now() < deadline, "{what} did not come about: {:?}", self.views());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn rail_here(subnet: usize, speed: u32) -> RailInfo {
    RailInfo { name: format!("l{subnet}"), port: 0, ..rail(subnet, 1, speed) }
}
