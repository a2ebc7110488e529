//! Queries every node of a group over the connection for readers. A registry does not know used space, rates and rails, so each
//! node reports these.

use crate::peers::PeerConnector;
use crate::{group, setup};
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_membership::{HoldTimes, RegistryFollower};
use spurline_observe::documents::{NodeDescription, NodeStatus, ProcessRole};
use spurline_proto::NodeRequest;
use spurline_transport::{CallError, DemandPool};
use spurline_types::stats::Metric;
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for the registry's node list.
const GROUP_LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for a node's answer.
const NODE_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two readings of the counters, from which the rates are computed.
const RATE_INTERVAL: Duration = Duration::from_secs(1);
/// Nodes queried concurrently.
const CONCURRENT_NODES: usize = 64;

/// A node and the answer.
pub struct NodeReport {
    /// The node, as named by the registry.
    pub member: Arc<Member>,
    /// The answer, or why there is none.
    pub answer: Result<NodeFigures>,
}

/// The state of a node.
pub struct NodeFigures {
    /// The status.
    pub status: NodeStatus,
    /// The counters.
    pub stats: Stats,
    /// Bytes per second sent to readers.
    pub sent: f64,
    /// Bytes per second fetched from the origin.
    pub fetched: f64,
}

/// The nodes of the group `name`, sorted by zone and name, each with the state or the reason why there is none. Takes a second
/// for the rates.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or knows no node.
pub fn query_group(registry: &Registry, name: &str, trust: &TrustConfig) -> Result<Vec<NodeReport>, Fault> {
    let GroupReach { mut members, reach } = reach_group(registry, name, trust)?;
    members.sort_by(|a, b| (&a.zone, &a.name).cmp(&(&b.zone, &b.name)));
    Ok(query_members(&members, |member| NodeReport { member: Arc::clone(member), answer: query_node(&reach, member) }))
}

/// The nodes of a group, and the way to these.
pub(crate) struct GroupReach {
    pub members: Vec<Arc<Member>>,
    pub reach: PeerConnector,
}

/// The nodes of the group `name`, for a few calls.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or knows no node.
pub(crate) fn reach_group(registry: &Registry, name: &str, trust: &TrustConfig) -> Result<GroupReach, Fault> {
    let stats = Arc::new(Stats::default());
    let host = group::hostname();
    let trust = setup::open_trust(trust, &host)?;
    let opened = spurline_membership::open_registry(registry, name, &trust)?;
    let follower = RegistryFollower::start(&opened, HoldTimes::default(), Arc::clone(&stats))?;
    let members = follower.first_members_once(Instant::now() + GROUP_LIST_TIMEOUT).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => "",
            ErrorKind::NotFound => {
                "is --cache-group right? else start a node with the same --registry and --cache-group; nodes that can't \
                 reach the registry go on serving, and 'spurline status MOUNTPOINT' of a mount says which"
            }
            _ => "start the registry, or correct --registry",
        };
        Fault::missing(format!("group {name}: {error}"), remedy)
    })?;
    Ok(GroupReach { members, reach: PeerConnector::for_calls(host, trust, stats) })
}

/// Calls `query` with each node, up to 64 at the same time; the answers have the order of the nodes.
pub fn query_members<T: Send>(members: &[Arc<Member>], query: impl Fn(&Arc<Member>) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let query_next = || {
        let index = next.fetch_add(1, Ordering::Relaxed);
        members.get(index).map(|member| (index, query(member)))
    };
    let mut answers: Vec<(usize, T)> = std::thread::scope(|scope| {
        let threads = (0..CONCURRENT_NODES.min(members.len()))
            .map(|_| scope.spawn(|| std::iter::from_fn(query_next).collect::<Vec<_>>()));
        let threads: Vec<_> = threads.collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect()
    });
    answers.sort_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

fn query_node(reach: &PeerConnector, member: &Member) -> Result<NodeFigures> {
    let pool = reach.pool(member);
    let (_, before) = fetch_description(&pool)?;
    let start = Instant::now();
    std::thread::sleep(RATE_INTERVAL);
    let (status, stats) = fetch_description(&pool)?;
    let seconds = start.elapsed().as_secs_f64();
    let rate = |before: &Metric, now: &Metric| now.get().saturating_sub(before.get()) as f64 / seconds;
    let sent = rate(&before.remotecache.send_bytes, &stats.remotecache.send_bytes);
    let fetched = rate(&before.object.get_bytes, &stats.object.get_bytes);
    Ok(NodeFigures { status, stats, sent, fetched })
}

/// A node's current status and counters.
fn fetch_description(pool: &DemandPool) -> Result<(NodeStatus, Stats)> {
    let deadline = Instant::now() + NODE_ANSWER_TIMEOUT;
    let mut lease = pool.checkout(deadline)?;
    let mut body = Vec::new();
    let request = NodeRequest::Describe;
    lease.call(&request, &mut body, &mut [], &mut |_| {}, deadline).map_err(|error| match error {
        CallError::Answered(error) | CallError::Broken(error) => error,
    })?;
    let Some(NodeDescription { status, stats }) = NodeDescription::read(&body)? else {
        return Err(Error::new(ErrorKind::Unsupported, "the node is starting, or its version has no status"));
    };
    match status.role {
        ProcessRole::Node(status) => Ok((status, stats)),
        _ => Err(Error::new(ErrorKind::Protocol, "its status is not that of a node")),
    }
}
