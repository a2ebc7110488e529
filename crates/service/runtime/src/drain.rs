//! Drains a node: the nodes that will own its hot blocks fetch them, then the node's weight becomes 0; last, uploads of the
//! node's staged files are awaited. An interrupted drain loses nothing: blocks that were moved stay, and are not sent again.

use crate::peers::PeerConnector;
use crate::staged_files::{GroupStage, UnsavedOfNode};
use crate::{group, setup};
use spurline_client::ObjectExtent;
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_membership::{HoldTimes, RegistryFollower};
use spurline_node::{HeldObject, HeldPage};
use spurline_proto::{NodeRequest, RangeDone};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for the registry's node list.
const NODE_LIST_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a request, which fetches up to [`DRAIN_REQUEST_BLOCKS`] blocks.
const DRAIN_REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
const DRAIN_SILENCE_LIMIT: Duration = Duration::from_secs(10);
/// Blocks per request; the stop flag is checked between requests.
const DRAIN_REQUEST_BLOCKS: u64 = 128;
/// Blocks of one part of a file in a request: few, so that a drain can be interrupted within a large file.
const EXTENT_BLOCKS: u64 = 16;
/// How long mounts may use an old weight after the registry has the new weight.
const WEIGHT_SPREAD_TIME: Duration = Duration::from_secs(2);
/// How long a drain waits for uploads of the node's staged files: the deadline of uploads, and a minute for a store that was away.
const UPLOAD_PATIENCE: Duration = Duration::from_secs(120);

/// Objects of a source to hand over, the hottest first.
struct HeldObjects {
    source: String,
    extents: Vec<ObjectExtent>,
}

/// The node to drain.
#[derive(Debug, Clone)]
pub struct DrainRequest {
    /// The registry of the group.
    pub registry: Registry,
    /// The group's name.
    pub cache_group: String,
    /// Authentication at the registry and at nodes.
    pub trust: TrustConfig,
    /// The node's name or HOST:PORT.
    pub node: String,
}

/// Progress of a drain.
#[derive(Debug, Default)]
pub struct DrainProgress {
    /// Bytes to hand over.
    pub total: u64,
    /// Bytes handed over.
    pub handed: u64,
    /// Bytes in the node's cache that are not handed over, because the files were not used lately: the node does not know the
    /// names.
    pub unlisted: u64,
    /// Files that were not handed over completely, and the reasons.
    pub failed: Vec<(String, Error)>,
}

/// The outcome of a drain.
#[derive(Debug)]
pub struct DrainOutcome {
    /// The node's name.
    pub node: String,
    /// Stopped before the end.
    pub interrupted: bool,
    /// The node's weight was 0 before.
    pub was_drained: bool,
    /// Bytes handed over, and failures.
    pub progress: DrainProgress,
    /// Bytes sent; the other nodes held the rest already.
    pub moved: u64,
    /// The node's new weight; `None` if the node keeps a share.
    pub weight: Option<u32>,
    /// Staged files that the node keeps still.
    pub staged: UnsavedOfNode,
    /// Why the staged files of the node are not known.
    pub staged_failure: Option<String>,
}

/// Drains a node until all blocks are handed over, or `stop` is set; reports progress after each request.
///
/// # Errors
/// With exit code 3 when the registry, the group or the node can't be reached.
pub fn drain_node(
    request: &DrainRequest,
    stop: &AtomicBool,
    progress: &dyn Fn(&DrainProgress),
) -> std::result::Result<DrainOutcome, Fault> {
    let host = group::hostname();
    let stats = Arc::new(Stats::default());
    let trust = setup::open_trust(&request.trust, &host)?;
    let registry = spurline_membership::open_registry(&request.registry, &request.cache_group, &trust)?;
    let follower = RegistryFollower::start(&registry, HoldTimes::default(), Arc::clone(&stats))?;
    let members = follower.first_members(Instant::now() + NODE_LIST_TIMEOUT).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => "",
            _ => "is --cache-group right? correct --registry",
        };
        Fault::missing(format!("group {}: {error}", request.cache_group), remedy)
    })?;
    let node = find_member(&members, &request.node)?.clone();
    let after: Vec<Arc<Member>> = members.iter().filter(|member| member.name != node.name).cloned().collect();
    if !after.iter().any(|member| member.weight > 0) {
        let what = format!("node {} is the only one of group {} with a share", node.name, request.cache_group);
        return Err(Fault::failed(what, "start another node first, or stop this one: what it holds is fetched again"));
    }
    // Other registries do not store weights.
    let told = matches!(request.registry, Registry::Coordinator(_) | Registry::Etcd(_));
    let calls = PeerConnector::for_calls(format!("{host}:drain"), trust, Arc::clone(&stats));
    let reach = PeerConnector { nconnect: 4, ..calls };
    let mut sums = DrainProgress::default();
    let mut moved = 0;
    let mut weight = None;
    // Twice, where the weight can be cleared: the second pass moves what the node fetched for readers during the
    // first.
    for pass in 0..1 + u32::from(told) {
        let held = list_held(&reach, &node).map_err(|error| unreachable_node(&node, &error))?;
        let block_size = held.block_size;
        let total = held.sources.iter().flat_map(|held| &held.extents).map(bytes_of).sum();
        sums = DrainProgress { total, unlisted: held.cached_bytes.saturating_sub(total), ..DrainProgress::default() };
        for HeldObjects { source, extents } in &held.sources {
            let mut remote = None;
            let warm = |some: &[ObjectExtent]| -> Vec<RangeDone> {
                let open = || {
                    let members = reach.group_members(source, &after);
                    reach.open_group(source, members, DRAIN_REQUEST_TIMEOUT, DRAIN_SILENCE_LIMIT)
                };
                match remote.get_or_insert_with(open) {
                    Ok(remote) => remote.warm(some, Some(1), false),
                    Err(error) => {
                        let failed = RangeDone { error: Some(error.clone()), ..RangeDone::default() };
                        vec![failed; some.len()]
                    }
                }
            };
            moved += hand_over(extents, block_size, &mut sums, || stop.load(Ordering::Acquire), warm, progress);
        }
        if stop.load(Ordering::Acquire) {
            break;
        }
        if told && pass == 0 {
            clear_weight(&reach, &node).map_err(|error| {
                Fault::failed(
                    format!("node {} keeps its share: {error}; {} handed on", node.name, human_bytes(sums.handed)),
                    "run it again; what was handed on is not sent again",
                )
            })?;
            weight = Some(0);
            // Until readers know the new weight, this node still fetches blocks for readers, which the second pass moves.
            let known = Instant::now() + WEIGHT_SPREAD_TIME;
            while Instant::now() < known && !stop.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    let stage = GroupStage::of_nodes(&request.cache_group, &reach, &members);
    let patience = if stop.load(Ordering::Acquire) { Duration::ZERO } else { UPLOAD_PATIENCE };
    let staged = stage.wait_for_uploads(&node.name, patience, || stop.load(Ordering::Acquire));
    Ok(DrainOutcome {
        node: node.name.clone(),
        staged: staged.as_ref().copied().unwrap_or_default(),
        staged_failure: staged.err().map(|fault| fault.what),
        interrupted: stop.load(Ordering::Acquire),
        was_drained: node.weight == 0,
        progress: sums,
        moved,
        weight,
    })
}

fn unreachable_node(node: &Member, error: &Error) -> Fault {
    Fault::missing(
        format!("node {} does not answer, so nothing can be handed on: {error}", node.name),
        "when it is gone for good the others take its share by themselves, and fetch what it held",
    )
}

fn bytes_of(extent: &ObjectExtent) -> u64 {
    extent.bytes.end.min(extent.object.size).saturating_sub(extent.bytes.start)
}

/// Hands extents over in batches until all are done or `ended`; returns the bytes sent.
fn hand_over(
    extents: &[ObjectExtent],
    block_size: u64,
    sums: &mut DrainProgress,
    ended: impl Fn() -> bool,
    mut warm: impl FnMut(&[ObjectExtent]) -> Vec<RangeDone>,
    shown: impl Fn(&DrainProgress),
) -> u64 {
    let mut at = 0;
    let mut moved = 0;
    while at < extents.len() && !ended() {
        let from = at;
        let mut blocks = 0;
        while at < extents.len() && (blocks == 0 || blocks < DRAIN_REQUEST_BLOCKS) {
            blocks += bytes_of(&extents[at]).div_ceil(block_size).max(1);
            at += 1;
        }
        let some = &extents[from..at];
        for (done, extent) in warm(some).into_iter().zip(some) {
            moved += done.moved_bytes;
            match done.error {
                None => sums.handed += bytes_of(extent),
                Some(error) => sums.failed.push((String::from_utf8_lossy(&extent.object.path).into_owned(), error)),
            }
        }
        shown(sums);
    }
    moved
}

/// The member of this name or address.
fn find_member<'a>(members: &'a [Arc<Member>], wanted: &str) -> std::result::Result<&'a Arc<Member>, Fault> {
    members.iter().find(|member| member.name == wanted || member.addresses.iter().any(|at| at == wanted)).ok_or_else(
        || {
            let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
            Fault::failed(
                format!("the group has no node {wanted}"),
                format!("name one of those it has: {}", names.join(", ")),
            )
        },
    )
}

/// The content of a node's cache, as far as the node knows names.
struct HeldList {
    sources: Vec<HeldObjects>,
    block_size: u64,
    /// Bytes of all blocks, also of those without a known name.
    cached_bytes: u64,
}

fn list_held(reach: &PeerConnector, node: &Member) -> Result<HeldList> {
    let pool = reach.pool(node);
    let mut lease = pool.checkout(Instant::now() + NODE_LIST_TIMEOUT)?;
    let block_size = lease.welcome().block_size;
    let mut objects = Vec::new();
    let mut after = None;
    let mut body = Vec::new();
    let mut cached_bytes = 0;
    loop {
        let request = NodeRequest::HeldObjects { after };
        lease.call(&request, &mut body, &mut [], &mut |_| {}, Instant::now() + DRAIN_REQUEST_TIMEOUT)?;
        let page: HeldPage = serde_json::from_slice(&body).map_err(|error| malformed_list(&error.to_string()))?;
        objects.extend(page.objects);
        cached_bytes += page.cached_bytes.unwrap_or(0);
        match page.next {
            Some(next) => after = Some(u128::from_str_radix(&next, 16).map_err(|_| malformed_list("next"))?),
            None => break,
        }
    }
    objects.sort_by_key(|held| std::cmp::Reverse(held.recent.times));
    // Sources in the order of the hottest object.
    let (mut held, mut places): (Vec<HeldObjects>, BTreeMap<String, usize>) = Default::default();
    for HeldObject { recent, runs } in objects {
        let object = recent.object().ok_or_else(|| malformed_list("an object"))?;
        let at = *places.entry(recent.source.clone()).or_insert_with(|| {
            held.push(HeldObjects { source: recent.source.clone(), extents: Vec::new() });
            held.len() - 1
        });
        for [from, to] in runs {
            let from = u64::from(from);
            let to = u64::from(to).min(object.block_count(block_size));
            for from in (from..to).step_by(EXTENT_BLOCKS as usize) {
                let to = to.min(from + EXTENT_BLOCKS);
                held[at]
                    .extents
                    .push(ObjectExtent { object: object.clone(), bytes: from * block_size..to * block_size });
            }
        }
    }
    Ok(HeldList { sources: held, block_size, cached_bytes })
}

fn malformed_list(what: &str) -> Error {
    Error::new(ErrorKind::Protocol, format!("its list of cached blocks is malformed: {what}"))
}

fn clear_weight(reach: &PeerConnector, node: &Member) -> Result<()> {
    let pool = reach.pool(node);
    let deadline = Instant::now() + NODE_LIST_TIMEOUT;
    let mut lease = pool.checkout(deadline)?;
    lease.call(&NodeRequest::Weigh { weight: 0 }, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::{ObjectRef, Version};
    use std::cell::Cell;

    #[test]
    fn it_ends_between_two_rounds_and_says_what_was_done() {
        let object = |n: u32| ObjectRef::new("s", n.to_string().as_bytes(), Version::new("1"), 16 << 20);
        let extents: Vec<ObjectExtent> =
            (0..100).map(|n| ObjectExtent { object: object(n), bytes: 0..16 << 20 }).collect();
        let (rounds, most) = (Cell::new(0), Cell::new(0));
        let mut sums = DrainProgress::default();
        let warm = |some: &[ObjectExtent]| {
            rounds.set(rounds.get() + 1);
            most.set(most.get().max(some.len()));
            let done = |bad: bool| RangeDone {
                moved_bytes: if bad { 0 } else { 16 << 20 },
                held_bytes: 0,
                error: bad.then(|| Error::new(ErrorKind::NoSpace, "full")),
            };
            (0..some.len()).map(|n| done(rounds.get() == 2 && n == 0)).collect()
        };
        let moved = hand_over(&extents, 1 << 20, &mut sums, || rounds.get() == 2, warm, |_| {});
        assert_eq!((rounds.get(), most.get()), (2, 8), "128 blocks at a time");
        assert_eq!((sums.handed, moved), (15 << 24, 15 << 24));
        assert_eq!(sums.failed.iter().map(|(path, _)| path.as_str()).collect::<Vec<_>>(), ["8"]);
    }

    #[test]
    fn a_node_is_found_by_name_or_address() {
        let member = |name: &str, at: &str| Arc::new(Member { name: name.into(), ..Member::from_address(at, 100) });
        let members = [member("a", "h:1"), member("b", "h:2")];
        assert_eq!(find_member(&members, "b").unwrap().name, "b");
        assert_eq!(find_member(&members, "h:1").unwrap().name, "a");
        let said = find_member(&members, "c").unwrap_err().to_string();
        assert!(said.contains("no node c") && said.contains("a, b"), "{said}");
    }
}
