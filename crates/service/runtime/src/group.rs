//! How a node joins a group and a mount follows a group, and the group's state for `status`.

use crate::peers::PeerConnector;
use crate::{rules, settings};
use spurline_cache::CacheContext;
use spurline_client::{GroupMembers, GroupPeerFetch, NodeCalls};
use spurline_config::{Fault, GroupConfig, NodeConfig};
use spurline_membership::{HoldTimes, MemberListener, NodeAnnouncer, Registry, RegistryFollower, RegistryState};
use spurline_node::CacheNode;
use spurline_observe::documents::{
    FollowedGroup, FollowedNode, GroupNode, GroupRegistration, REGISTRY_LOST, RegistryStatus, STATE_UP,
};
use spurline_trust::Trust;
use spurline_types::{ErrorKind, Member, Stats};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest wait for the first node of a registry.
const FIRST_NODE_TIMEOUT: Duration = Duration::from_secs(10);
/// Nodes that left together keep shares for so many times the hold of a single node.
const GROUP_LEAVE_HOLDS: u32 = 5;

/// The name of this machine.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn start_follower(
    registry: &Arc<dyn Registry>,
    hold: Duration,
    stats: &Arc<Stats>,
) -> spurline_types::Result<RegistryFollower> {
    RegistryFollower::start(registry, HoldTimes { single: hold, joint: hold * GROUP_LEAVE_HOLDS }, Arc::clone(stats))
}

/// Follows the group by the registry, and returns the first members.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or lists no node.
pub fn follow_group(
    registry: &Arc<dyn Registry>,
    group: &str,
    hold: Duration,
    stats: &Arc<Stats>,
) -> Result<(RegistryFollower, Vec<Arc<Member>>), Fault> {
    let follower = start_follower(registry, hold, stats)?;
    match follower.first_members(Instant::now() + FIRST_NODE_TIMEOUT) {
        Ok(members) => {
            tracing::info!("group {group} by {}: {} known", registry.description(), members.len());
            Ok((follower, members))
        }
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err(Fault::missing(format!("group {group}: {error}"), ""))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Fault::missing(
            format!("group {group}: {error}"),
            "start a node with the same --registry and --cache-group, or correct --cache-group",
        )),
        Err(error) => Err(Fault::missing(
            format!("group {group}: {error}"),
            "start the registry and a node with the same --registry and --cache-group, or correct the address",
        )),
    }
}

/// Updates a mount's nodes when the members of the group change.
struct GroupListener(Arc<GroupMembers>);

impl MemberListener for GroupListener {
    fn set_members(&self, members: &[Arc<Member>]) {
        self.0.set_members(members);
    }

    fn answers_readers(&self, name: &str) -> bool {
        let view = self.0.snapshot();
        let index = view.members().iter().position(|member| member.name == name);
        let peer = index.and_then(|index| view.existing_peer(index as u32));
        peer.is_some_and(|peer| peer.is_connected())
    }
}

/// From now on the nodes of `members` are the members of the group.
pub fn update_members_from(follower: &RegistryFollower, members: &Arc<GroupMembers>) {
    follower.set_listener(Arc::new(GroupListener(Arc::clone(members))));
}

/// The name of a node in the group.
pub fn name_in_group(config: &NodeConfig, host: &str, listening: &[String]) -> String {
    let port = listening.first().and_then(|at| at.rsplit(':').next()).unwrap_or_default();
    config.name.clone().unwrap_or_else(|| format!("{host}:{port}"))
}

/// The addresses at which other machines reach the node: loopback addresses only if there are no others.
fn public_addresses(listening: &[String]) -> Vec<String> {
    let far: Vec<String> = listening
        .iter()
        .filter(|at| !at.parse::<SocketAddr>().is_ok_and(|at| at.ip().is_loopback()))
        .cloned()
        .collect();
    if far.is_empty() { listening.to_vec() } else { far }
}

/// Registers a node with the group; `None` without a group. A node that was a member before starts also while the registry is
/// unreachable.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or refuses the node, with 2 when another process has the name.
pub fn announce_node(
    config: &NodeConfig,
    host: &str,
    listening: &[String],
    instance: u64,
    others: Option<&NodeGroup>,
    was_member: bool,
    stats: &Arc<Stats>,
) -> Result<Option<NodeAnnouncer>, Fault> {
    let (Some(group), Some(NodeGroup { registry, .. })) = (&config.group, others) else { return Ok(None) };
    let member = Member {
        name: name_in_group(config, host, listening),
        instance,
        addresses: public_addresses(listening),
        weight: config.weight,
        zone: group.zone.clone(),
    };
    if config.net.group_network.is_empty() {
        tracing::warn!(
            "this node registers as {}, which other machines can't reach; give --group-network",
            listening.join(",")
        );
    }
    let name = member.name.clone();
    // On the follower's connection: the registry's answer contains the member list too.
    let enter = if was_member { NodeAnnouncer::rejoin } else { NodeAnnouncer::start };
    let announcer = enter(registry, member, Arc::clone(stats)).map_err(|error| match error.kind() {
        ErrorKind::Invalid => Fault::usage(error.message(), ""),
        ErrorKind::PermissionDenied => Fault::missing(error.message(), ""),
        _ => Fault::missing(error.message(), "start the registry, or correct --registry"),
    })?;
    tracing::info!("node {name} of group {} by {}, weight {}", group.name, registry.description(), config.weight);
    Ok(announcer)
}

/// How long after a change of the group nodes fetch moved blocks from each other.
const MOVED_BLOCKS_TIME: Duration = Duration::from_secs(3600);
/// Connections to each other node, per source: for moved blocks only, no reader's load.
const BETWEEN_NODES: usize = 4;
/// Connections to each node for calls about staged files: a call occupies a connection while that node's disk syncs.
const STAGE_CONNECTIONS: usize = 16;

/// Lets a node fetch blocks from the other nodes of the group before the origin, and follow the group's rules, while the result
/// is kept. `name` is the node's name in the group.
///
/// # Errors
/// When the networks can't be used.
pub fn join_group(
    config: &NodeConfig,
    name: &str,
    node: &Arc<CacheNode>,
    shared: &Arc<CacheContext>,
    trust: &Arc<Trust>,
    stats: &Arc<Stats>,
) -> Result<Option<NodeGroup>, Fault> {
    let Some(group) = &config.group else { return Ok(None) };
    let reach =
        PeerConnector { nconnect: BETWEEN_NODES, ..PeerConnector::from_config(&config.net, name, "", trust, stats)? };
    let registry = spurline_membership::open_registry(&group.registry, &group.name, trust)?;
    let follower = start_follower(&registry, group.hold, stats)?;
    settings::compare_with_others(config, name, &follower.known_members(Instant::now() + FIRST_NODE_TIMEOUT), &reach)?;
    let calls = stage_calls(config, &reach);
    let called = Arc::clone(&calls);
    let open = move |source: &str, members: &[Arc<Member>]| reach.group_members(source, members);
    let siblings = GroupPeerFetch::new(name, config.cache.block_size, MOVED_BLOCKS_TIME, Arc::clone(stats), open);
    shared.set_peer_fetch(Arc::clone(&siblings) as _);
    let share = Arc::clone(shared);
    let own = name.to_owned();
    follower.set_listener(Arc::new(move |members: &[Arc<Member>]| {
        siblings.set_members(members);
        called.set_members(members);
        if let Some(part) = group_share(&own, members) {
            share.set_group_share(part);
        }
    }));
    let dirs: &[_] = if shared.capacity_bytes().is_some() { &config.cache.dirs } else { &[] };
    let rules = rules::follow::start_following(node, &registry, rules::state_file::RuleFiles::open(dirs, group))?;
    Ok(Some(NodeGroup { registry, calls, follower: Arc::new(follower), _rules: rules }))
}

/// Calls to the other nodes about staged files, with no member yet. Handshakes name the node's first source: all nodes of a group
/// serve the same.
fn stage_calls(config: &NodeConfig, reach: &PeerConnector) -> Arc<NodeCalls> {
    let source = config.sources.first().map_or("", |source| source.as_str());
    let reach = PeerConnector { nconnect: STAGE_CONNECTIONS, ..reach.clone() };
    Arc::new(NodeCalls::new(reach.group_members(source, &[])))
}

/// A node's share of the group's blocks; `None` for a node that is not listed yet or is drained, which keeps the last share.
fn group_share(name: &str, members: &[Arc<Member>]) -> Option<f64> {
    let own = members.iter().find(|member| member.name == name && member.weight > 0)?;
    let all: u64 = members.iter().map(|member| u64::from(member.weight)).sum();
    Some(f64::from(own.weight) / all as f64)
}

/// A node's membership: the registry, and the tasks that follow the group and the rules.
pub struct NodeGroup {
    /// The registry of the group.
    pub registry: Arc<dyn Registry>,
    /// Calls to the nodes of the group by name, this node included.
    pub calls: Arc<NodeCalls>,
    /// The members, as the registry lists these.
    pub follower: Arc<RegistryFollower>,
    _rules: Option<rules::follow::RuleFollower>,
}

/// A mount's view of the group, for `status`.
pub fn group_status(follower: &RegistryFollower) -> FollowedGroup {
    let group = follower.group_status();
    let (state, reason) = match &group.state {
        RegistryState::Up => (STATE_UP, None),
        RegistryState::Lost { error } => (REGISTRY_LOST, Some(error.to_string())),
    };
    let members = group.members.iter().map(|placed| FollowedNode {
        node: GroupNode::from(&*placed.member),
        state: if placed.present { "up" } else { "away" }.to_owned(),
        for_seconds: placed.since.elapsed().as_secs(),
    });
    FollowedGroup {
        members: members.collect(),
        registry: RegistryStatus {
            registry: group.registry.to_string(),
            state: state.to_owned(),
            for_seconds: Some(group.since.elapsed().as_secs()),
            reason,
        },
    }
}

/// A node's registration, for `status`.
pub fn registration_status(
    group: Option<&GroupConfig>,
    announcer: Option<&NodeAnnouncer>,
) -> Option<GroupRegistration> {
    let group = group?;
    let announcer = announcer?;
    let failure = announcer.registration_failure();
    Some(GroupRegistration {
        name: group.name.clone(),
        registry: RegistryStatus {
            registry: group.registry.to_string(),
            state: if failure.is_none() { STATE_UP } else { REGISTRY_LOST }.to_owned(),
            for_seconds: failure.as_ref().map(|(since, _)| since.elapsed().as_secs()),
            reason: failure.map(|(_, error)| error.to_string()),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_told_no_loopback_address_beside_better_ones() {
        let told =
            |listening: &[&str]| public_addresses(&listening.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(told(&["127.0.0.1:7000", "10.1.2.3:7000", "[::1]:7000"]), ["10.1.2.3:7000"]);
        assert_eq!(told(&["127.0.0.1:7000", "[::1]:7000"]), ["127.0.0.1:7000", "[::1]:7000"]);
    }
}
