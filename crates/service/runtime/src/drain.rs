//! Drains a node: has the nodes that will own a node's hot blocks fetch them from it, and takes the node's share
//! away. Nothing is lost when it is broken off: what was handed on stays, and is not sent a second time.

use crate::peers::Reach;
use crate::{group, setup};
use serde_json::Value;
use spurline_client::placement::{CopyCounts, RUN_BLOCKS, ReaderLocation};
use spurline_client::{GroupMembers, GroupVolume, GroupVolumeConfig, ObjectExtent, RequestPatience};
use spurline_config::{Fault, Registry, TrustConfig};
use spurline_mem::{BufferPool, MemTier};
use spurline_membership::{HoldTimes, RegistryFollower};
use spurline_net_tcp::SocketOptions;
use spurline_proto::{NodeRequest, RangeDone};
use spurline_types::units::human_bytes;
use spurline_types::{Error, ErrorKind, Member, ObjectRef, Result, Stats, Version};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long the registry may take to name the nodes.
const FIRST: Duration = Duration::from_secs(10);
/// How long one request may take: so many blocks are fetched by it.
const PATIENCE: Duration = Duration::from_secs(60);
const SILENCE: Duration = Duration::from_secs(10);
/// Blocks handed on before it is looked at whether to stop.
const AT_ONCE: u64 = 128;
/// How long after the registry has it mounts may not know yet that a node has no share any more.
const SPREADS: Duration = Duration::from_secs(2);
/// What is to be handed on of one source, hottest objects first.
struct Held {
    source: String,
    extents: Vec<ObjectExtent>,
}

/// Which node is drained, and by which registry it is found.
#[derive(Debug, Clone)]
pub struct DrainRequest {
    /// The registry of its group.
    pub registry: Registry,
    /// The group's name.
    pub cache_group: String,
    /// What is proved to the registry and to nodes.
    pub trust: TrustConfig,
    /// The node's name or HOST:PORT.
    pub node: String,
}

/// Progress of a drain.
#[derive(Debug, Default)]
pub struct DrainProgress {
    /// Bytes to hand on.
    pub total: u64,
    /// Bytes that were handed on.
    pub handed: u64,
    /// Files of which not all was handed on, and why.
    pub failed: Vec<(String, Error)>,
}

/// How a drain ended.
#[derive(Debug)]
pub struct DrainOutcome {
    /// The node's name.
    pub node: String,
    /// It was stopped before its end.
    pub interrupted: bool,
    /// The node had no share before.
    pub was_drained: bool,
    /// What was handed on.
    pub progress: DrainProgress,
    /// Bytes that were sent for that: others were held already.
    pub moved: u64,
    /// The node's new weight; `None` where it keeps its share.
    pub weight: Option<u32>,
}

/// Drains a node until all is handed on, or `stop` is raised; reports progress after each batch.
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
    let members = follower.first_members(Instant::now() + FIRST).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::PermissionDenied => "",
            _ => "is --cache-group right? correct --registry",
        };
        Fault::missing(format!("group {}: {error}", request.cache_group), remedy)
    })?;
    let node = find(&members, &request.node)?.clone();
    let after: Vec<Arc<Member>> = members.into_iter().filter(|member| member.name != node.name).collect();
    if !after.iter().any(|member| member.weight > 0) {
        let what = format!("node {} is the only one of group {} with a share", node.name, request.cache_group);
        return Err(Fault::failed(what, "start another node first, or stop this one: what it holds is fetched again"));
    }
    // Another registry lists nodes without being told of weights.
    let told = matches!(request.registry, Registry::Coordinator(_) | Registry::Etcd(_));
    let reach = Reach {
        trust,
        name: format!("{host}:drain"),
        source: String::new(),
        locals: Vec::new(),
        socket: SocketOptions::default(),
        nconnect: 4,
        stats: Arc::clone(&stats),
    };
    let (mut sums, mut moved, mut weight) = (DrainProgress::default(), 0, None);
    // Twice where it has an end: what readers had the node fetch meanwhile goes on when it has no share any more.
    for pass in 0..1 + u32::from(told) {
        let (held, block_size) = ask_held(&reach, &node).map_err(|error| unanswered(&node, &error))?;
        sums = DrainProgress {
            total: held.iter().flat_map(|held| &held.extents).map(bytes_of).sum(),
            ..DrainProgress::default()
        };
        for Held { source, extents } in &held {
            let mut remote = None;
            let warm = |some: &[ObjectExtent]| -> Vec<RangeDone> {
                match remote.get_or_insert_with(|| open(&reach, source, &after, &stats)) {
                    Ok(remote) => remote.warm(some, Some(1), false),
                    Err(error) => {
                        let failed = RangeDone { error: Some(error.clone()), ..RangeDone::default() };
                        vec![failed; some.len()]
                    }
                }
            };
            let ended = || stop.load(Ordering::Acquire);
            moved += hand_on(extents, block_size, &mut sums, ended, warm, progress);
        }
        if stop.load(Ordering::Acquire) {
            break;
        }
        if told && pass == 0 {
            weigh(&reach, &node).map_err(|error| {
                Fault::failed(
                    format!("node {} keeps its share: {error}; {} handed on", node.name, human_bytes(sums.handed)),
                    "run it again; what was handed on is not sent again",
                )
            })?;
            weight = Some(0);
            // What readers ask before they know of it is fetched by this node, and is to be handed on, too.
            let known = Instant::now() + SPREADS;
            while Instant::now() < known && !stop.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    Ok(DrainOutcome {
        node: node.name.clone(),
        interrupted: stop.load(Ordering::Acquire),
        was_drained: node.weight == 0,
        progress: sums,
        moved,
        weight,
    })
}

fn unanswered(node: &Member, error: &Error) -> Fault {
    Fault::missing(
        format!("node {} does not answer, so nothing can be handed on: {error}", node.name),
        "when it is gone for good the others take its share by themselves, and fetch what it held",
    )
}

fn bytes_of(extent: &ObjectExtent) -> u64 {
    extent.bytes.end.min(extent.object.size).saturating_sub(extent.bytes.start)
}

/// Hands extents on, so many blocks at a time, until all are or it is to end; how many bytes were sent for that.
fn hand_on(
    extents: &[ObjectExtent],
    block_size: u64,
    sums: &mut DrainProgress,
    ended: impl Fn() -> bool,
    mut warm: impl FnMut(&[ObjectExtent]) -> Vec<RangeDone>,
    shown: impl Fn(&DrainProgress),
) -> u64 {
    let (mut at, mut moved) = (0, 0);
    while at < extents.len() && !ended() {
        let (from, mut blocks) = (at, 0);
        while at < extents.len() && (blocks == 0 || blocks < AT_ONCE) {
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
fn find<'a>(members: &'a [Arc<Member>], wanted: &str) -> std::result::Result<&'a Arc<Member>, Fault> {
    let is = |member: &&Arc<Member>| member.name == wanted || member.addresses.iter().any(|at| at == wanted);
    members.iter().find(is).ok_or_else(|| {
        let names: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
        Fault::failed(
            format!("the group has no node {wanted}"),
            format!("name one of those it has: {}", names.join(", ")),
        )
    })
}

/// What the node says it holds, by source, and its block size.
fn ask_held(reach: &Reach, node: &Member) -> Result<(Vec<Held>, u64)> {
    let pool = reach.pool(node);
    let mut lease = pool.checkout(Instant::now() + FIRST)?;
    let block_size = lease.welcome().block_size;
    let senseless =
        |what: &str| Error::new(ErrorKind::Protocol, format!("what it says it holds makes no sense: {what}"));
    let (mut objects, mut after, mut body) = (Vec::new(), None, Vec::new());
    loop {
        let request = NodeRequest::HeldObjects { after };
        lease.call(&request, &mut body, &mut [], &mut |_| {}, Instant::now() + PATIENCE)?;
        let mut page: Value = serde_json::from_slice(&body).map_err(|error| senseless(&error.to_string()))?;
        let Value::Array(some) = page["objects"].take() else {
            let why = "it is of a version that does not say what it holds; upgrade it first";
            return Err(Error::new(ErrorKind::Unsupported, why));
        };
        objects.extend(some);
        match page["next"].as_str() {
            Some(next) => after = Some(u128::from_str_radix(next, 16).map_err(|_| senseless("next"))?),
            None => break,
        }
    }
    objects.sort_by_key(|one| std::cmp::Reverse(one["times"].as_u64()));
    // Sources in the order of their hottest object.
    let (mut held, mut places): (Vec<Held>, BTreeMap<String, usize>) = Default::default();
    for one in &objects {
        let text = |key: &str| one[key].as_str().ok_or_else(|| senseless(key));
        let (source, path) = (text("source")?, unhex(text("path")?).ok_or_else(|| senseless("path"))?);
        let size = one["size"].as_u64().ok_or_else(|| senseless("size"))?;
        let object = ObjectRef::new(source, &path, Version::new(text("version")?), size);
        let at = *places.entry(source.to_owned()).or_insert_with(|| {
            held.push(Held { source: source.to_owned(), extents: Vec::new() });
            held.len() - 1
        });
        for run in one["runs"].as_array().into_iter().flatten() {
            let (Some(from), Some(to)) = (run[0].as_u64(), run[1].as_u64()) else { continue };
            let to = to.min(object.block_count(block_size));
            // Pieces that are soon done, so that it can be interrupted in the middle of a large file.
            for from in (from..to).step_by(RUN_BLOCKS as usize) {
                let to = to.min(from + u64::from(RUN_BLOCKS));
                held[at]
                    .extents
                    .push(ObjectExtent { object: object.clone(), bytes: from * block_size..to * block_size });
            }
        }
    }
    Ok((held, block_size))
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let (digits, rest) = text.as_bytes().as_chunks::<2>();
    let byte = |two: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(two).ok()?, 16).ok();
    rest.is_empty().then(|| digits.iter().map(byte).collect())?
}

/// The group as it will be, to be asked for `source`.
fn open(reach: &Reach, source: &str, after: &[Arc<Member>], stats: &Arc<Stats>) -> Result<Arc<GroupVolume>> {
    let reach = Reach { source: source.to_owned(), ..reach.clone() };
    let roster = GroupMembers::new(after, move |member| reach.peer(member));
    let config = GroupVolumeConfig {
        patience: RequestPatience::new(PATIENCE),
        fetchers: 2,
        metadata_age: Duration::from_secs(1),
        copies: CopyCounts::default(),
        standpoint: ReaderLocation { zone: String::new(), seed: 0 },
        silence: SILENCE,
        hedge_after: Duration::ZERO,
    };
    // No data comes here: this is what a volume has to have.
    let memory = |block: u64| Ok(MemTier::new(BufferPool::new(2 * block, block as usize)?));
    GroupVolume::connect(source, roster, config, Arc::clone(stats), memory)
}

fn weigh(reach: &Reach, node: &Member) -> Result<()> {
    let pool = reach.pool(node);
    let deadline = Instant::now() + FIRST;
    let mut lease = pool.checkout(deadline)?;
    lease.call(&NodeRequest::Weigh { weight: 0 }, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn paths_of_any_bytes_come_back() {
        assert_eq!(unhex("00ff612f"), Some(vec![0, 255, b'a', b'/']));
        assert_eq!((unhex("0"), unhex("zz"), unhex("")), (None, None, Some(Vec::new())));
    }

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
        let moved = hand_on(&extents, 1 << 20, &mut sums, || rounds.get() == 2, warm, |_| {});
        assert_eq!((rounds.get(), most.get()), (2, 8), "128 blocks at a time");
        assert_eq!((sums.handed, moved), (15 << 24, 15 << 24));
        assert_eq!(sums.failed.iter().map(|(path, _)| path.as_str()).collect::<Vec<_>>(), ["8"]);
    }

    #[test]
    fn a_node_is_found_by_name_or_address() {
        let member = |name: &str, at: &str| Arc::new(Member { name: name.into(), ..Member::from_address(at, 100) });
        let members = [member("a", "h:1"), member("b", "h:2")];
        assert_eq!(find(&members, "b").unwrap().name, "b");
        assert_eq!(find(&members, "h:1").unwrap().name, "a");
        let said = find(&members, "c").unwrap_err().to_string();
        assert!(said.contains("no node c") && said.contains("a, b"), "{said}");
    }
}
