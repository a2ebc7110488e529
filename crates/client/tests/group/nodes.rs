//! Nodes in memory that serve made-up bytes, and mounts that read from them and compare.

use spurline_client::placement::{Copies, Standpoint};
use spurline_client::{Patience, Peer, Remote, RemoteConfig, Roster};
use spurline_mem::{Pool, Tier};
use spurline_net_sim::{FaultPlan, Rates, SimNode};
use spurline_proto::{Hello, Read, Request, VolumeId, Welcome};
use spurline_transport::{ChannelPool, ConnState, PoolConfig, Responder, Service};
use spurline_types::{Error, ErrorKind, Member, ObjectId, ObjectRef, Result, Stats, Version};
use spurline_volume::{Data, Volume as _};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub const BLOCK: u64 = 1 << 20;

/// The byte at an offset of an object.
pub fn byte_at(object: u64, offset: u64) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31) ^ object.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
}

/// What a node answers reads with while it is unwell.
type Unwell = Arc<Mutex<Option<ErrorKind>>>;

struct Bytes(Unwell);

impl Service for Bytes {
    fn hello(&self, _: &ConnState, _: &Hello<'_>) -> Result<Welcome> {
        Ok(Welcome { volume: VolumeId(7), block_size: BLOCK, node: "node".into(), ..Welcome::default() })
    }
    fn serve(&self, _: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()> {
        let Request::Read(Read { offset, len, version, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads only"));
        };
        if let Some(kind) = *self.0.lock().unwrap() {
            return Err(Error::new(kind, "unwell"));
        }
        let object: u64 = version.parse().unwrap();
        let bytes: Vec<u8> = (offset..offset + u64::from(len)).map(|at| byte_at(object, at)).collect();
        responder.data(&[], &[&bytes])
    }
}

/// The nodes, whether or not a mount knows them.
pub struct Nodes {
    pub nodes: Vec<SimNode>,
    unwell: Vec<Unwell>,
}

impl Nodes {
    pub fn start(count: usize) -> Nodes {
        let unwell: Vec<Unwell> = (0..count).map(|_| Unwell::default()).collect();
        let node = |(n, unwell): (usize, &Unwell)| {
            let plan = Arc::new(FaultPlan::new(n as u64, Rates::default()));
            SimNode::new(&format!("n{n}"), Arc::new(Bytes(Arc::clone(unwell))), plan)
        };
        Nodes { nodes: unwell.iter().enumerate().map(node).collect(), unwell }
    }

    /// From now on the node answers every read with an error of this kind, or with bytes.
    pub fn ail(&self, node: usize, kind: Option<ErrorKind>) {
        *self.unwell[node].lock().unwrap() = kind;
    }

    pub fn members(&self, which: &[usize]) -> Vec<Arc<Member>> {
        let member =
            |n: &usize| Member { addresses: vec![format!("10.0.0.{n}:7000")], ..Member::at(&format!("n{n}"), 100) };
        which.iter().map(|n| Arc::new(member(n))).collect()
    }

    /// A mount that knows these.
    pub fn mount(&self, which: &[usize]) -> Arc<Remote> {
        self.mount_waiting(which, Duration::from_millis(200))
    }

    /// The same, which waits so long for a node that does not answer.
    pub fn mount_waiting(&self, which: &[usize], absence: Duration) -> Arc<Remote> {
        let stats = Arc::new(Stats::default());
        let (nodes, counted) = (self.nodes.clone(), Arc::clone(&stats));
        let roster = Roster::new(&self.members(which), move |member| {
            let node = &nodes[member.name[1..].parse::<usize>().unwrap()];
            let config = PoolConfig { retry_min: Duration::from_millis(5), ..PoolConfig::default() };
            Peer::new(ChannelPool::new(node.connector(), "mount", "src", config, Arc::clone(&counted)), member)
        });
        let patience = Patience { answer: Duration::from_secs(60), absence };
        let config = RemoteConfig {
            patience,
            fetchers: 2,
            metadata_age: Duration::ZERO,
            copies: Copies::default(),
            standpoint: Standpoint::default(),
            silence: Duration::from_secs(2),
            hedge_after: Duration::ZERO,
        };
        let remote = Remote::connect("src", roster, config, stats, |block| {
            Ok(Tier::new(Pool::new(16 * block, block as usize)?))
        });
        remote.expect("the mount starts")
    }

    /// Connections made to a node so far.
    pub fn connects(&self, node: usize) -> u64 {
        self.nodes[node].connects()
    }

    /// Reads and compares every byte.
    pub fn read(&self, remote: &Remote, object: u64, offset: u64, len: usize) -> Result<()> {
        let version = Version::new(&object.to_string());
        let object_ref = ObjectRef { id: ObjectId(u128::from(object)), path: b"f"[..].into(), version, size: 1 << 40 };
        let mut dst = vec![0x55; len];
        match remote.read(&object_ref, offset, &mut dst)? {
            Data::Copied(n) => assert_eq!(n, len),
            Data::Shared(_) => panic!("nothing was fetched ahead"),
        }
        let wrong = (0..len).find(|i| dst[*i] != byte_at(object, offset + *i as u64));
        assert_eq!(wrong, None, "a wrong byte of {len} at {offset} of {object}");
        Ok(())
    }
}
