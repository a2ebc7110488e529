//! Nodes in memory that serve made-up bytes, and mounts that read from them and compare.

use parking_lot::Mutex;
use spurline_client::placement::{Copies, Standpoint};
use spurline_client::{Patience, Peer, Remote, RemoteConfig, Roster};
use spurline_mem::{Pool, Tier};
use spurline_net_sim::{FaultPlan, Rates, SimNode};
use spurline_proto::{Body as _, Hello, Part, PartDone, PartsDone, Read, Request, VolumeId, Welcome};
use spurline_transport::{ChannelPool, ConnState, PoolConfig, Responder, Service};
use spurline_types::{Error, ErrorKind, Member, ObjectId, ObjectRef, Result, Stats, Version};
use spurline_volume::{Data, Volume as _};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

pub const BLOCK: u64 = 1 << 20;

/// The byte at an offset of an object.
pub fn byte_at(object: u64, offset: u64) -> u8 {
    (offset ^ (offset >> 8).wrapping_mul(31) ^ object.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8
}

#[derive(Default)]
struct Bytes {
    /// What jobs had it fetch: object, and where a part begins.
    warmed: Mutex<BTreeSet<(u64, u64)>>,
    /// What it answers reads with while it is unwell.
    unwell: Mutex<Option<ErrorKind>>,
}

impl Service for Bytes {
    fn hello(&self, _: &ConnState, _: &Hello<'_>) -> Result<Welcome> {
        Ok(Welcome { volume: VolumeId(7), block_size: BLOCK, node: "node".into(), ..Welcome::default() })
    }
    fn serve(&self, _: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()> {
        if let Request::Warm { parts, .. } = request {
            let mut warmed = self.warmed.lock();
            let done = |part: Part<'_>| {
                let new = warmed.insert((part.version.parse().unwrap(), part.offset));
                let (moved_bytes, held_bytes) = if new { (part.len, 0) } else { (0, part.len) };
                PartDone { moved_bytes, held_bytes, error: None }
            };
            let mut body = Vec::new();
            PartsDone(parts.iter().map(done).collect()).encode(&mut body);
            return responder.data(&body, &[]);
        }
        let Request::Read(Read { offset, len, version, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads and jobs only"));
        };
        if let Some(kind) = *self.unwell.lock() {
            return Err(Error::new(kind, "unwell"));
        }
        let object: u64 = version.parse().unwrap();
        let bytes: Vec<u8> = (offset..offset + u64::from(len)).map(|at| byte_at(object, at)).collect();
        responder.data(&[], &[&bytes])
    }
}

/// An object that is long enough for all.
pub fn object_ref(object: u64) -> ObjectRef {
    let version = Version::new(&object.to_string());
    ObjectRef { id: ObjectId(u128::from(object)), path: b"f"[..].into(), version, size: 1 << 40 }
}

/// The nodes, whether or not a mount knows them.
pub struct Nodes {
    pub nodes: Vec<SimNode>,
    services: Vec<Arc<Bytes>>,
    /// How the calls of each fail.
    pub plans: Vec<Arc<FaultPlan>>,
}

impl Nodes {
    pub fn start(count: usize) -> Nodes {
        let services: Vec<Arc<Bytes>> = (0..count).map(|_| Arc::default()).collect();
        let plans: Vec<_> = (0..count as u64).map(|n| Arc::new(FaultPlan::new(n, Rates::default()))).collect();
        let node = |(n, service): (usize, &Arc<Bytes>)| {
            SimNode::new(&format!("n{n}"), Arc::clone(service) as _, Arc::clone(&plans[n]))
        };
        Nodes { nodes: services.iter().enumerate().map(node).collect(), services, plans }
    }

    /// From now on the node answers every read with an error of this kind, or with bytes.
    pub fn ail(&self, node: usize, kind: Option<ErrorKind>) {
        *self.services[node].unwell.lock() = kind;
    }

    /// Nodes that jobs had fetch the part of an object that begins at `offset`.
    pub fn warmed(&self, object: u64, offset: u64) -> Vec<usize> {
        let has = |node: &usize| self.services[*node].warmed.lock().contains(&(object, offset));
        (0..self.nodes.len()).filter(has).collect()
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
        let object_ref = object_ref(object);
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
