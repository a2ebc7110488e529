//! Fetches blocks from other nodes of the group before the origin: after this node joined or came back, for blocks
//! that others held meanwhile, for copies, and for bytes that a node has sent to the store. Other nodes answer from their cache only and never wait for each
//! other.

use crate::members::{GroupMembers, MembersSnapshot};
use crate::placement::{FIRST_HOLDERS, WantedBlock};
use parking_lot::{Mutex, RwLock};
use spurline_proto::{NodeRequest, ReadFlags, ReadRequest, is_hot_answer};
use spurline_transport::{CallError, PeerReach};
use spurline_types::{ByteSink, Member, ObjectRef, Stats};
use spurline_volume::{PeerFetch, PeerFetched};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout of another node's answer; the origin has the block too.
const PEER_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum nodes tried for one block: nodes that joined together mostly lack it.
const PEERS_TRIED_MAX: usize = 4;

thread_local! {
    static RANKED: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Creates the member list of a source for these nodes.
type OpenGroup = dyn Fn(&str, &[Arc<Member>]) -> Arc<GroupMembers> + Send + Sync;

/// The latest list of nodes.
struct KnownMembers {
    members: Vec<Arc<Member>>,
    /// Time of the last change.
    changed: Instant,
    /// Nodes that joined after this one, and when: they hold the fewest blocks.
    joined_at: HashMap<String, Instant>,
}

fn names_of(members: &[Arc<Member>]) -> HashSet<String> {
    members.iter().map(|member| member.name.clone()).collect()
}

/// What a node does that does not hold the block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum MissingBlock {
    /// Answers that the block is missing.
    Report,
    /// The same, and starts to fetch the block.
    BeginFetch,
}

/// The group as seen by one of its nodes.
pub struct GroupPeerFetch {
    open: Box<OpenGroup>,
    /// By source, because a handshake names one.
    groups: RwLock<HashMap<String, Arc<GroupMembers>>>,
    members: Mutex<KnownMembers>,
    own_name: String,
    block_size: u64,
    /// After a change of the group, blocks may be in their old places for this long.
    settle_time: Duration,
    stats: Arc<Stats>,
}

impl GroupPeerFetch {
    /// The group of the node `own_name`, empty at first; `open` creates the member list of a source. For `settle_time`
    /// after a change of the group, nodes that would hold a block without this one are tried too.
    pub fn new(
        own_name: &str,
        block_size: u64,
        settle_time: Duration,
        stats: Arc<Stats>,
        open: impl Fn(&str, &[Arc<Member>]) -> Arc<GroupMembers> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(GroupPeerFetch {
            open: Box::new(open),
            groups: RwLock::default(),
            members: Mutex::new(KnownMembers {
                members: Vec::new(),
                changed: Instant::now(),
                joined_at: HashMap::new(),
            }),
            own_name: own_name.to_owned(),
            block_size,
            settle_time,
            stats,
        })
    }

    /// Replaces the list of the group's nodes, this one included.
    pub fn set_members(&self, members: &[Arc<Member>]) {
        let mut known = self.members.lock();
        if known.members != members {
            let now = Instant::now();
            let before = std::mem::replace(&mut known.members, members.to_vec());
            known.changed = now;
            let names_before = names_of(&before);
            let names_now = names_of(members);
            known.joined_at.retain(|name, at| names_now.contains(name) && at.elapsed() < self.settle_time);
            if !names_before.is_empty() {
                known.joined_at.extend(names_now.difference(&names_before).map(|name| (name.clone(), now)));
            }
            // Under the lock, so that the later of two lists wins.
            self.groups.read().values().for_each(|group| group.set_members(members));
        }
    }

    fn members_for(&self, source: &str) -> Arc<GroupMembers> {
        if let Some(known) = self.groups.read().get(source) {
            return Arc::clone(known);
        }
        let members = self.members.lock();
        let mut groups = self.groups.write();
        let made = groups.entry(source.to_owned()).or_insert_with(|| (self.open)(source, &members.members));
        Arc::clone(made)
    }

    /// Whether blocks may still be in their places before the last change.
    fn is_unsettled(&self) -> bool {
        self.members.lock().changed.elapsed() < self.settle_time
    }

    /// Removes this node from `ranked` and puts a draining node first: it is not among the holders but has its old
    /// blocks. For this node's own blocks, nodes that joined lately come last; for others, the owner comes first.
    fn order_peers(&self, view: &MembersSnapshot, wanted: WantedBlock, owns: bool, ranked: &mut Vec<u32>) {
        let drained = view.drained_holder(wanted);
        ranked.retain(|at| view.members()[*at as usize].name != self.own_name && Some(*at) != drained);
        let known = self.members.lock();
        if owns && !known.joined_at.is_empty() {
            ranked.sort_by_key(|at| {
                known
                    .joined_at
                    .get(&view.members()[*at as usize].name)
                    .is_some_and(|at| at.elapsed() < self.settle_time)
            });
        }
        drop(known);
        if let Some(at) = drained.filter(|at| view.members()[*at as usize].name != self.own_name) {
            ranked.insert(0, at);
        }
    }
}

impl PeerFetch for GroupPeerFetch {
    fn fetch_block(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn ByteSink) -> PeerFetched {
        let members = self.members_for(source);
        let view = members.snapshot();
        if view.members().len() < 2 {
            return PeerFetched::Missing;
        }
        let mut ranked = RANKED.take();
        let wanted = WantedBlock::of_block(object.id, index, 1);
        view.find_holders(wanted, FIRST_HOLDERS, &mut ranked);
        let owns = ranked.first().is_some_and(|at| view.members()[*at as usize].name == self.own_name);
        let mut found = PeerFetched::Missing;
        // The owner fetches from others only after a change; any other node fetches from the owner.
        if !owns || self.is_unsettled() {
            self.order_peers(&view, wanted, owns, &mut ranked);
            let until = Instant::now() + PEER_ANSWER_TIMEOUT;
            for at in ranked.iter().take(PEERS_TRIED_MAX) {
                if found != PeerFetched::Missing || Instant::now() >= until {
                    break;
                }
                found = self.pull_block(&view, *at, object, index, MissingBlock::Report, sink);
            }
        }
        RANKED.set(ranked);
        found
    }

    fn has_other_owner(&self, source: &str, object: &ObjectRef, index: u32) -> bool {
        let members = self.members_for(source);
        // Readers detect a failed owner themselves. They all use one order, so one node replaces it, not all.
        self.other_owner(&members.snapshot(), object, index).is_some()
    }

    fn fetch_from_owner(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn ByteSink) -> PeerFetched {
        let members = self.members_for(source);
        let view = members.snapshot();
        let owner = self.other_owner(&view, object, index);
        owner.map_or(PeerFetched::Missing, |at| {
            self.pull_block(&view, at, object, index, MissingBlock::BeginFetch, sink)
        })
    }

    fn fetch_from(
        &self,
        source: &str,
        node: &str,
        object: &ObjectRef,
        index: u32,
        sink: &mut dyn ByteSink,
    ) -> PeerFetched {
        let members = self.members_for(source);
        let view = members.snapshot();
        let named = view.members().iter().position(|member| member.name == node && member.name != self.own_name);
        named.map_or(PeerFetched::Missing, |at| {
            self.pull_block(&view, at as u32, object, index, MissingBlock::Report, sink)
        })
    }
}

impl GroupPeerFetch {
    /// The node that fetches a block for all; `None` when it is this one.
    fn other_owner(&self, view: &MembersSnapshot, object: &ObjectRef, index: u32) -> Option<u32> {
        let mut ranked = RANKED.take();
        view.find_holders(WantedBlock::of_block(object.id, index, 1), FIRST_HOLDERS, &mut ranked);
        let owner = ranked.first().copied();
        RANKED.set(ranked);
        owner.filter(|at| view.members()[*at as usize].name != self.own_name)
    }
}

impl GroupPeerFetch {
    /// Reads a block from a node's cache.
    fn pull_block(
        &self,
        view: &MembersSnapshot,
        at: u32,
        object: &ObjectRef,
        index: u32,
        if_missing: MissingBlock,
        sink: &mut dyn ByteSink,
    ) -> PeerFetched {
        let peer = view.peer(at);
        let started = Instant::now();
        if !peer.latency().admit_request(|| started) {
            return PeerFetched::Missing;
        }
        let Ok(mut lease) = peer.tcp_pool().checkout(started + PEER_ANSWER_TIMEOUT) else {
            // All connections in use means busy, not away.
            if peer.tcp_reach() == PeerReach::Up {
                peer.latency().return_trial(Instant::now);
            } else {
                peer.latency().deprioritise(Instant::now());
            }
            return PeerFetched::Missing;
        };
        let deadline = Instant::now() + PEER_ANSWER_TIMEOUT;
        let len = object.block_len(index, self.block_size);
        let read = ReadRequest {
            volume: lease.welcome().volume,
            path: &object.path,
            version: object.version.as_str(),
            size: object.size,
            offset: u64::from(index) * self.block_size,
            len: len as u32,
            flags: match if_missing {
                MissingBlock::Report => ReadFlags::CACHED_ONLY,
                MissingBlock::BeginFetch => ReadFlags::CACHED_ONLY.with(ReadFlags::BEGIN_FETCH),
            },
        };
        let spare = sink.spare();
        if spare.len() != len || lease.welcome().block_size != self.block_size {
            peer.latency().return_trial(Instant::now);
            return PeerFetched::Missing;
        }
        let mut body = Vec::new();
        let answer = lease.call(&NodeRequest::Read(read), &mut body, spare, &mut |_| {}, deadline);
        // Deprioritise a node without an answer, or each block would wait for the full timeout.
        if matches!(answer, Err(CallError::Broken(_))) {
            peer.latency().deprioritise(Instant::now());
        } else {
            peer.latency().note_in_time(Instant::now());
        }
        if !answer.is_ok_and(|answer| answer.payload_len == len) {
            return PeerFetched::Missing;
        }
        sink.commit(len);
        self.stats.remotecache.pulled_bytes.add(len as u64);
        if is_hot_answer(&body) { PeerFetched::FoundHot } else { PeerFetched::Found }
    }
}
