//! Nodes over a directory, and mounts of it over TCP, whose connections fail by a plan.

use spurline_cache::CacheContext;
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupPeer, GroupVolume, GroupVolumeConfig, GroupWrites, RequestPatience};
use spurline_directory::WritableSource;
use spurline_mem::{BufferPool, MemTier};
use spurline_net_sim::{FaultPlan, FaultRates, FaultyConnector};
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_node::CacheNode;
use spurline_object_store::OriginOptions;
use spurline_proto::{HelloRequest, WelcomeAnswer};
use spurline_transport::{AnswerState, Channel, Connector, DemandConfig, DemandPool, Responder, TransportKind};
use spurline_types::{Error, Member, Result, Stats};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

pub const BLOCK: u64 = 1 << 20;

/// A node of its own over `dir`.
pub struct Node {
    pub at: SocketAddr,
    pub node: Arc<CacheNode>,
    /// Its memory.
    pub pool: Arc<BufferPool>,
    server: Option<TcpServer>,
    dir: PathBuf,
    writable: bool,
}

impl Node {
    pub fn start(dir: &Path, writable: bool) -> Node {
        Self::start_at(dir, dir, "127.0.0.1:0".parse().unwrap(), writable)
    }

    /// A node that has another directory than its source says.
    pub fn start_over(dir: &Path, real: &Path) -> Node {
        Self::start_at(dir, real, "127.0.0.1:0".parse().unwrap(), true)
    }

    fn start_at(dir: &Path, real: &Path, at: SocketAddr, writable: bool) -> Node {
        let stats = Arc::new(Stats::default());
        let pool = BufferPool::new(64 * BLOCK, BLOCK as usize).unwrap();
        let tier = MemTier::new(Arc::clone(&pool));
        let time = Duration::from_secs(5);
        let shared = CacheContext::new(tier, None, BLOCK, 16, time, false, Arc::clone(&stats));
        let under_stats = Arc::clone(&stats);
        let sources = vec![format!("file://{}", dir.display())];
        let under = OriginOptions { within: sources.clone(), ..OriginOptions::default() };
        let open = move |source: &str| spurline_origin::open(source, &under, Arc::clone(&under_stats));
        let node = CacheNode::new("n", shared, sources, Box::new(open));
        // Tests say themselves when locks wait.
        node.settle_locks();
        if writable {
            let dir = real.to_owned();
            node.accept_writes(Box::new(move |_| Ok(WritableSource::open_for_node(&dir, None)?)));
        }
        let config = ServerConfig { payload_pool: Some(Arc::clone(&pool)), ..ServerConfig::default() };
        let service = Arc::clone(&node);
        let server = TcpServer::bind(&[at], service, config, stats).unwrap();
        let at = server.local_addrs()[0];
        Node { at, node, pool, server: Some(server), dir: dir.to_owned(), writable }
    }

    /// Ends all connections and forgets all sessions.
    pub fn kill(&mut self) {
        drop(self.server.take());
        self.node.expire_write_sessions_at(Instant::now() + Duration::from_secs(3600));
    }

    /// Starts another process at the same address.
    pub fn restart(&mut self) {
        self.kill();
        *self = Self::start_at(&self.dir, &self.dir, self.at, self.writable);
    }
}

/// Connections of an older release, by their handshake.
pub struct OldHandshake {
    pub inner: Arc<dyn Connector>,
    /// The newest version that is offered.
    pub offered: u16,
    /// The mount takes the node's answer for this version.
    pub found: u16,
    /// Whether it is an older release by now.
    pub is_old: Arc<AtomicBool>,
}

impl Connector for OldHandshake {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        self.inner.connect(deadline)
    }
    fn connect_and_handshake(
        &self,
        hello: &HelloRequest<'_>,
        process: u64,
        deadline: Instant,
    ) -> Result<(Box<dyn Channel>, WelcomeAnswer)> {
        if !self.is_old.load(Ordering::Relaxed) {
            return self.inner.connect_and_handshake(hello, process, deadline);
        }
        let hello = HelloRequest { max_version: self.offered, ..*hello };
        let (channel, welcome) = self.inner.connect_and_handshake(&hello, process, deadline)?;
        assert_eq!(welcome.version, self.offered);
        Ok((channel, WelcomeAnswer { version: self.found, ..welcome }))
    }
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn peer(&self) -> &str {
        self.inner.peer()
    }
}

/// A mount's side of `nodes`; its channels fail by `plan`.
pub fn mount(
    dir: &Path,
    nodes: &[&Node],
    plan: Option<Arc<FaultPlan>>,
) -> Result<(Arc<GroupVolume>, Arc<GroupWrites>)> {
    start_writes(connect(dir, nodes, plan, None)?)
}

/// The writing side of a mount.
pub fn start_writes(volume: Arc<GroupVolume>) -> Result<(Arc<GroupVolume>, Arc<GroupWrites>)> {
    let writes = volume.open_writes(None, 4 * BLOCK)?;
    // Tests say themselves when locks wait for those of lost nodes.
    writes.set_lock_grace(Duration::ZERO, Duration::from_secs(60));
    Ok((volume, writes))
}

/// What of the nodes is of an older release: the handshake offers the first version, and finds the second one.
#[derive(Clone)]
pub struct OldRelease {
    pub versions: (u16, u16),
    /// This node only.
    pub node: Option<SocketAddr>,
    pub is_old: Arc<AtomicBool>,
}

/// The reading side of `nodes`, some of them with an older release.
pub fn connect(
    dir: &Path,
    nodes: &[&Node],
    plan: Option<Arc<FaultPlan>>,
    old: Option<OldRelease>,
) -> Result<Arc<GroupVolume>> {
    let source = format!("file://{}", dir.display());
    let addresses: Vec<_> = nodes.iter().map(|node| node.at).collect();
    let plan = plan.unwrap_or_else(|| Arc::new(FaultPlan::new(1, FaultRates::default())));
    connect_through(&source, &addresses, move |tcp, member| {
        let faulty: Arc<dyn Connector> = Arc::new(FaultyConnector::new(tcp, Arc::clone(&plan)));
        let old = old.as_ref().filter(|old| old.node.is_none_or(|at| at.to_string() == member.name));
        match old {
            None => faulty,
            Some(OldRelease { versions: (offered, found), is_old, .. }) => {
                let is_old = Arc::clone(is_old);
                Arc::new(OldHandshake { inner: faulty, offered: *offered, found: *found, is_old })
            }
        }
    })
}

/// The reading side of the nodes at `addresses`, over the connections that `wrap` makes of those over TCP.
pub fn connect_through(
    source: &str,
    addresses: &[SocketAddr],
    wrap: impl Fn(Arc<dyn Connector>, &Member) -> Arc<dyn Connector> + Send + Sync + 'static,
) -> Result<Arc<GroupVolume>> {
    let stats = Arc::new(Stats::default());
    let members: Vec<_> = addresses.iter().map(|at| Arc::new(Member::from_address(&at.to_string(), 100))).collect();
    let of = source.to_owned();
    let counted = Arc::clone(&stats);
    let roster = GroupMembers::new(&members, move |member| {
        let tcp = TcpConnector::new(&member.name, Vec::new(), SocketOptions::default(), Arc::clone(&counted));
        let connector = wrap(Arc::new(tcp), member);
        let pool = DemandPool::new(connector, "test", &of, DemandConfig::default(), Arc::clone(&counted));
        GroupPeer::new(pool, member)
    });
    let config = GroupVolumeConfig {
        patience: RequestPatience::new(Duration::from_secs(10)),
        fetchers: 4,
        metadata_age: Duration::ZERO,
        copies: CopyCounts::default(),
        standpoint: ReaderLocation::default(),
        silence: Duration::from_secs(2),
        hedge_after: Duration::ZERO,
    };
    GroupVolume::connect(source, roster, config, stats, |block| {
        Ok(MemTier::new(BufferPool::new(16 * block, block as usize)?))
    })
}

/// Takes an answer, on a thread that must not become another user.
#[derive(Default)]
pub struct BoundAnswer(pub Vec<u8>);

impl Responder for BoundAnswer {
    fn send_data(&mut self, body: &[u8], _: &[&[u8]]) -> Result<()> {
        self.0 = body.to_vec();
        Ok(())
    }
    fn send_file(&mut self, _: &[u8], _: BorrowedFd<'_>, _: u64, _: usize) -> Result<()> {
        unreachable!("no file is sent")
    }
    fn begin_payload(&mut self, _: &[u8], _: usize) -> Result<()> {
        unreachable!("no file is sent")
    }
    fn push_payload(&mut self, _: &[u8]) -> Result<()> {
        unreachable!("no file is sent")
    }
    fn send_error(&mut self, error: &Error) -> Result<()> {
        Err(error.clone())
    }
    fn keeps_identity(&self) -> bool {
        true
    }
    fn answer_state(&self) -> AnswerState {
        AnswerState::None
    }
}
