//! Nodes in memory that serve made-up bytes, and mounts that read from them and compare.

use parking_lot::Mutex;
use spurline_client::placement::{CopyCounts, ReaderLocation};
use spurline_client::{GroupMembers, GroupPeer, GroupVolume, GroupVolumeConfig, RequestPatience};
use spurline_mem::{BufferPool, MemTier};
use spurline_net_sim::{FaultPlan, FaultRates, SimNode};
use spurline_proto::{
    AnswerBody as _, HelloRequest, NodeRequest, ObjectRange, RangeDone, RangesDone, ReadRequest, VolumeId,
    WelcomeAnswer,
};
use spurline_transport::{ConnState, DemandConfig, DemandPool, Responder, Service};
use spurline_types::{Error, ErrorKind, Member, ObjectId, ObjectRef, Result, Stats, Version};
use spurline_volume::{ReadData, Volume as _};
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
    /// Parts loaded by jobs: object and offset.
    warmed: Mutex<BTreeSet<(u64, u64)>>,
    /// Error for all reads while the node is unwell.
    unwell: Mutex<Option<ErrorKind>>,
}

impl Service for Bytes {
    fn handle_hello(&self, _: &ConnState, _: &HelloRequest<'_>) -> Result<WelcomeAnswer> {
        Ok(WelcomeAnswer { volume: VolumeId(7), block_size: BLOCK, node: "node".into(), ..WelcomeAnswer::default() })
    }
    fn serve_request(&self, _: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        if let NodeRequest::Warm { parts, .. } = request {
            let mut warmed = self.warmed.lock();
            let done = |part: ObjectRange<'_>| {
                let new = warmed.insert((part.version.parse().unwrap(), part.offset));
                let (moved_bytes, held_bytes) = if new { (part.len, 0) } else { (0, part.len) };
                RangeDone { moved_bytes, held_bytes, error: None }
            };
            let mut body = Vec::new();
            RangesDone(parts.iter().map(done).collect()).encode(&mut body);
            return responder.send_data(&body, &[]);
        }
        let NodeRequest::Read(ReadRequest { offset, len, version, .. }) = request else {
            return Err(Error::new(ErrorKind::Unsupported, "reads and jobs only"));
        };
        if let Some(kind) = *self.unwell.lock() {
            return Err(Error::new(kind, "unwell"));
        }
        let object: u64 = version.parse().unwrap();
        let bytes: Vec<u8> = (offset..offset + u64::from(len)).map(|at| byte_at(object, at)).collect();
        responder.send_data(&[], &[&bytes])
    }
}

/// An object long enough for all tests.
pub fn object_ref(object: u64) -> ObjectRef {
    let version = Version::new(&object.to_string());
    ObjectRef { id: ObjectId(u128::from(object)), path: b"f"[..].into(), version, size: 1 << 40 }
}

/// The nodes, known to a mount or not.
pub struct Nodes {
    pub nodes: Vec<SimNode>,
    services: Vec<Arc<Bytes>>,
    /// Faults of each node's calls.
    pub plans: Vec<Arc<FaultPlan>>,
}

impl Nodes {
    pub fn start(count: usize) -> Nodes {
        let services: Vec<Arc<Bytes>> = (0..count).map(|_| Arc::default()).collect();
        let plans: Vec<_> = (0..count as u64).map(|n| Arc::new(FaultPlan::new(n, FaultRates::default()))).collect();
        let node = |(n, service): (usize, &Arc<Bytes>)| {
            SimNode::new(&format!("n{n}"), Arc::clone(service) as _, Arc::clone(&plans[n]))
        };
        Nodes { nodes: services.iter().enumerate().map(node).collect(), services, plans }
    }

    /// Makes the node answer every read with an error of this kind, or with bytes.
    pub fn ail(&self, node: usize, kind: Option<ErrorKind>) {
        *self.services[node].unwell.lock() = kind;
    }

    /// Nodes that loaded the part of an object at `offset`.
    pub fn warmed(&self, object: u64, offset: u64) -> Vec<usize> {
        let has = |node: &usize| self.services[*node].warmed.lock().contains(&(object, offset));
        (0..self.nodes.len()).filter(has).collect()
    }

    pub fn members(&self, which: &[usize]) -> Vec<Arc<Member>> {
        let member = |n: &usize| Member {
            addresses: vec![format!("10.0.0.{n}:7000")],
            ..Member::from_address(&format!("n{n}"), 100)
        };
        which.iter().map(|n| Arc::new(member(n))).collect()
    }

    /// A mount with these nodes.
    pub fn mount(&self, which: &[usize]) -> Arc<GroupVolume> {
        self.mount_waiting(which, Duration::from_millis(200))
    }

    /// As `mount`, with an absence timeout.
    pub fn mount_waiting(&self, which: &[usize], absence: Duration) -> Arc<GroupVolume> {
        let stats = Arc::new(Stats::default());
        let (nodes, counted) = (self.nodes.clone(), Arc::clone(&stats));
        let members = GroupMembers::new(&self.members(which), move |member| {
            let node = &nodes[member.name[1..].parse::<usize>().unwrap()];
            let config = DemandConfig { retry_min: Duration::from_millis(5), ..DemandConfig::default() };
            GroupPeer::new(DemandPool::new(node.connector(), "mount", "src", config, Arc::clone(&counted)), member)
        });
        let patience = RequestPatience { answer: Duration::from_secs(60), absence };
        let config = GroupVolumeConfig {
            patience,
            fetchers: 2,
            metadata_age: Duration::ZERO,
            copies: CopyCounts::default(),
            standpoint: ReaderLocation::default(),
            silence: Duration::from_secs(2),
            hedge_after: Duration::ZERO,
        };
        let remote = GroupVolume::connect("src", members, config, stats, |block| {
            Ok(MemTier::new(BufferPool::new(16 * block, block as usize)?))
        });
        remote.expect("the mount starts")
    }

    /// Connections made to a node so far.
    pub fn connects(&self, node: usize) -> u64 {
        self.nodes[node].connect_count()
    }

    /// Reads and compares every byte.
    pub fn read(&self, remote: &GroupVolume, object: u64, offset: u64, len: usize) -> Result<()> {
        let object_ref = object_ref(object);
        let mut dst = vec![0x55; len];
        match remote.read(&object_ref, offset, &mut dst)? {
            ReadData::Copied(n) => assert_eq!(n, len),
            ReadData::Shared(_) => panic!("nothing was fetched ahead"),
        }
        let wrong = (0..len).find(|i| dst[*i] != byte_at(object, offset + *i as u64));
        assert_eq!(wrong, None, "a wrong byte of {len} at {offset} of {object}");
        Ok(())
    }
}
