//! How a node enters its group and a mount follows it, wired to what `status` shows of that.

use crate::peers::Reach;
use crate::{rules, settings};
use serde_json::{Value, json};
use spurline_cache::CacheContext;
use spurline_client::{GroupMembers, GroupPeer, GroupPeerFetch};
use spurline_config::{Fault, GroupConfig, NodeConfig};
use spurline_membership::{HoldTimes, MemberListener, NodeAnnouncer, Registry, RegistryFollower, RegistryState};
use spurline_node::CacheNode;
use spurline_transport::PoolState;
use spurline_trust::Trust;
use spurline_types::{ErrorKind, Member, Stats};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a mount waits for its registry to name the first node.
const FIRST: Duration = Duration::from_secs(10);
/// Nodes that left together keep their places for so many times the hold of one.
const MANY: u32 = 5;

/// The name of this machine.
pub fn hostname() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn start(registry: &Arc<dyn Registry>, hold: Duration, stats: &Arc<Stats>) -> spurline_types::Result<RegistryFollower> {
    RegistryFollower::start(registry, HoldTimes { single: hold, joint: hold * MANY }, Arc::clone(stats))
}

/// Begins to follow the group by its registry, and gives its first members.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or knows no node, saying what was tried.
pub fn follow(
    registry: &Arc<dyn Registry>,
    group: &str,
    hold: Duration,
    stats: &Arc<Stats>,
) -> Result<(RegistryFollower, Vec<Arc<Member>>), Fault> {
    let follower = start(registry, hold, stats)?;
    match follower.first_members(Instant::now() + FIRST) {
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

/// A mount's nodes, as the members of the group change.
struct Nodes(Arc<GroupMembers>);

impl MemberListener for Nodes {
    fn set_members(&self, members: &[Arc<Member>]) {
        self.0.set_members(members);
    }

    fn answers_readers(&self, name: &str) -> bool {
        let view = self.0.snapshot();
        let index = view.members().iter().position(|member| member.name == name);
        let peer = index.and_then(|index| view.existing_peer(index as u32));
        // Over TCP, or over rails: where these carry the data, nobody keeps TCP connected.
        let over_tcp = |peer: &GroupPeer| matches!(peer.pool_state(), (PoolState::Up, open) if open > 0);
        peer.is_some_and(|peer| over_tcp(peer) || peer.paths().is_some_and(|paths| paths.up_count() > 0))
    }
}

/// From now on the nodes of `roster` are the members of the group.
pub fn keep_up(follower: &RegistryFollower, roster: &Arc<GroupMembers>) {
    follower.set_listener(Arc::new(Nodes(Arc::clone(roster))));
}

/// What a node is called in its group.
pub fn name_in_group(config: &NodeConfig, host: &str, listening: &[String]) -> String {
    let port = listening.first().and_then(|at| at.rsplit(':').next()).unwrap_or_default();
    config.name.clone().unwrap_or_else(|| format!("{host}:{port}"))
}

/// Of the addresses at which a node listens those that others are told: at a loopback one each machine finds itself. They are
/// told where there are no others.
fn for_others(listening: &[String]) -> Vec<String> {
    let loopback = |at: &&String| at.parse::<SocketAddr>().is_ok_and(|at| at.ip().is_loopback());
    let far: Vec<String> = listening.iter().filter(|at| !loopback(at)).cloned().collect();
    if far.is_empty() { listening.to_vec() } else { far }
}

/// Enters a node into its group, whose others it knows; `None` when it has none. One that was in it `before` is in it also
/// while the registry can't be reached.
///
/// # Errors
/// With exit code 3 when the registry can't be reached or refuses it, with 2 when the name is another process's.
pub fn announce(
    config: &NodeConfig,
    host: &str,
    listening: &[String],
    instance: u64,
    (others, before): (Option<&Others>, bool),
    stats: &Arc<Stats>,
) -> Result<Option<NodeAnnouncer>, Fault> {
    let (Some(group), Some(Others { registry, .. })) = (&config.group, others) else { return Ok(None) };
    let member = Member {
        name: name_in_group(config, host, listening),
        instance,
        addresses: for_others(listening),
        weight: config.weight,
        zone: group.zone.clone(),
    };
    if config.net.group_network.is_empty() {
        tracing::warn!(
            "the group is told that this node is at {}, which other machines can't reach; give --group-network",
            listening.join(",")
        );
    }
    let name = member.name.clone();
    // By the same connection as all else: what the registry answers to it saves other questions.
    let enter = if before { NodeAnnouncer::rejoin } else { NodeAnnouncer::start };
    let announcer = enter(registry, member, Arc::clone(stats)).map_err(|error| match error.kind() {
        ErrorKind::Invalid => Fault::usage(error.message(), ""),
        ErrorKind::PermissionDenied => Fault::missing(error.message(), ""),
        _ => Fault::missing(error.message(), "start the registry, or correct --registry"),
    })?;
    tracing::info!("node {name} of group {} by {}, weight {}", group.name, registry.description(), config.weight);
    Ok(announcer)
}

/// For so long after a change of the group, nodes ask each other for blocks that moved.
const SETTLES: Duration = Duration::from_secs(3600);
/// Connections of a node to each other node, for each source: they carry what moves between nodes and no reader's load.
const BETWEEN_NODES: usize = 4;

/// Has a node ask the others of its group for what they hold before it asks the under-store, for as long as the answer
/// is kept, and go by the rules of the group. `name` is its own in the group.
///
/// # Errors
/// When its networks can't be used.
pub fn ask_others(
    config: &NodeConfig,
    name: &str,
    node: &Arc<CacheNode>,
    shared: &Arc<CacheContext>,
    trust: &Arc<Trust>,
    stats: &Arc<Stats>,
) -> Result<Option<Others>, Fault> {
    let Some(group) = &config.group else { return Ok(None) };
    let reach = Reach { nconnect: BETWEEN_NODES, ..Reach::by(&config.net, name, "", trust, stats)? };
    let registry = spurline_membership::open_registry(&group.registry, &group.name, trust)?;
    let follower = start(&registry, group.hold, stats)?;
    settings::compare_with_others(config, name, &follower.known_members(Instant::now() + FIRST), &reach)?;
    let open = move |source: &str, members: &[Arc<Member>]| {
        let reach = Reach { source: source.to_owned(), ..reach.clone() };
        GroupMembers::new(members, move |member| reach.peer(member))
    };
    let siblings = GroupPeerFetch::new(name, config.cache.block_size, SETTLES, Arc::clone(stats), open);
    shared.set_peer_fetch(Arc::clone(&siblings) as _);
    let (share, own) = (Arc::clone(shared), name.to_owned());
    follower.set_listener(Arc::new(move |members: &[Arc<Member>]| {
        siblings.set_members(members);
        if let Some(part) = share_of(&own, members) {
            share.set_group_share(part);
        }
    }));
    let dirs: &[_] = if shared.capacity_bytes().is_some() { &config.cache.dirs } else { &[] };
    let rules = rules::follow::start(node, &registry, rules::state_file::Kept::open(dirs, group))?;
    Ok(Some(Others { registry, _follower: follower, _rules: rules }))
}

/// What of the group's blocks is a node's; `None` for one that is not listed yet or drained: it keeps the share it had.
fn share_of(name: &str, members: &[Arc<Member>]) -> Option<f64> {
    let own = members.iter().find(|member| member.name == name && member.weight > 0)?;
    let all: u64 = members.iter().map(|member| u64::from(member.weight)).sum();
    Some(f64::from(own.weight) / all as f64)
}

/// What a node does about its group while this is kept.
pub struct Others {
    registry: Arc<dyn Registry>,
    _follower: RegistryFollower,
    _rules: Option<rules::follow::Following>,
}

/// What a mount's status says of its group.
pub fn seen(follower: &RegistryFollower) -> Value {
    let seen = follower.group_status();
    let (state, reason) = match &seen.state {
        RegistryState::Up => ("up", None),
        RegistryState::Lost { error } => ("lost", Some(error.to_string())),
    };
    json!({
        "registry": seen.registry,
        "state": state,
        "for_seconds": seen.since.elapsed().as_secs(),
        "reason": reason,
        "members": seen.members.iter().map(|placed| json!({
            "name": placed.member.name,
            "addresses": placed.member.addresses,
            "weight": placed.member.weight,
            "zone": placed.member.zone,
            "state": if placed.present { "up" } else { "away" },
            "for_seconds": placed.since.elapsed().as_secs(),
        })).collect::<Vec<_>>(),
    })
}

/// What a node's status says of its group.
pub fn announced(group: Option<&GroupConfig>, announcer: Option<&NodeAnnouncer>) -> Value {
    let (Some(group), Some(announcer)) = (group, announcer) else { return Value::Null };
    let trouble = announcer.registration_failure();
    json!({
        "name": group.name,
        "registry": group.registry.to_string(),
        "state": if trouble.is_none() { "up" } else { "lost" },
        "for_seconds": trouble.as_ref().map(|(since, _)| since.elapsed().as_secs()),
        "reason": trouble.as_ref().map(|(_, error)| error.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_told_no_loopback_address_beside_better_ones() {
        let told = |listening: &[&str]| for_others(&listening.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(told(&["127.0.0.1:7000", "10.1.2.3:7000", "[::1]:7000"]), ["10.1.2.3:7000"]);
        assert_eq!(told(&["127.0.0.1:7000", "[::1]:7000"]), ["127.0.0.1:7000", "[::1]:7000"]);
    }
}
