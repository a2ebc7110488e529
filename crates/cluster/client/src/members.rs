//! Owns the current list of group nodes. The list is replaced as a whole while requests run; a node keeps its
//! connections for as long as it stays. Does not know the source of the list or the content of requests.

use crate::node_rails::NodeRails;
use crate::path_monitor::MonitorThread;
use crate::peer::GroupPeer;
use crate::placement::{NodePlacement, ReaderLocation, WantedBlock};
use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use spurline_transport::PathWake;
use spurline_types::Member;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

/// Up to this group size every node is connected in advance; in larger groups on first use.
const ALL_READY: usize = 64;

/// Creates the connections of one node.
pub type MakePeer = dyn Fn(&Member) -> Arc<GroupPeer> + Send + Sync;

/// Creates the rail paths of one node.
type MakeRails = dyn Fn(&Member) -> NodeRails + Send + Sync;

/// Creates peers for members.
struct PeerFactory {
    make_peer: Box<MakePeer>,
    make_rails: OnceLock<Box<MakeRails>>,
    /// Wakes the path monitor.
    wake: Arc<PathWake>,
    /// All live peers, including those of nodes that left the group while a request still uses them.
    made: Mutex<Vec<Weak<GroupPeer>>>,
}

impl PeerFactory {
    fn make(&self, member: &Member) -> Arc<GroupPeer> {
        let peer = (self.make_peer)(member);
        let mut made = self.made.lock();
        if made.len() == made.capacity() {
            made.retain(|peer| peer.strong_count() > 0);
        }
        made.push(Arc::downgrade(&peer));
        peer
    }

    fn add_rails(&self, member: &Member, peer: &GroupPeer) {
        if let Some(make_rails) = self.make_rails.get() {
            peer.set_rails(make_rails(member));
            self.wake.wake_monitor();
        }
    }
}

/// The peer of one node. It outlives the list for as long as the node keeps its name and addresses.
#[derive(Default)]
struct PeerSlot {
    peer: OnceLock<Arc<GroupPeer>>,
}

/// The nodes at one moment. A running request keeps its own snapshot.
pub struct MembersSnapshot {
    members: Vec<Arc<Member>>,
    slots: Vec<Arc<PeerSlot>>,
    placement: NodePlacement,
    peer_factory: Arc<PeerFactory>,
}

impl MembersSnapshot {
    /// Writes up to `most` nodes for `wanted` to `out`, in request order for a reader at `from`. Returns the owner,
    /// which fetches the block for all.
    pub fn rank_holders(
        &self,
        wanted: WantedBlock,
        from: &ReaderLocation,
        most: usize,
        out: &mut Vec<u32>,
    ) -> Option<u32> {
        self.placement.find_holders(wanted, most, out);
        let owner = out.first().copied();
        self.placement.near_first(wanted, &self.members, from, out);
        owner
    }

    /// Writes up to `most` nodes to `out`: the holders of `wanted`, owner first, then their successors.
    pub fn find_holders(&self, wanted: WantedBlock, most: usize, out: &mut Vec<u32>) {
        self.placement.find_holders(wanted, most, out);
    }

    /// The nodes, in registry order.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// The draining node (weight 0) that would hold `wanted` at full weight.
    pub fn drained_holder(&self, wanted: WantedBlock) -> Option<u32> {
        self.placement.drained_holder(wanted)
    }

    /// The peer of node `index` in [`MembersSnapshot::members`]; created on first use.
    pub fn peer(&self, index: u32) -> &Arc<GroupPeer> {
        let member = &self.members[index as usize];
        let slot = &self.slots[index as usize];
        let mut made = false;
        let peer = slot.peer.get_or_init(|| {
            made = true;
            self.peer_factory.make(member)
        });
        if made {
            // After the slot is filled, so that a concurrent change of the path factory cannot miss this peer.
            self.peer_factory.add_rails(member, peer);
        }
        peer
    }

    /// Creates the peers that no request has used yet.
    fn create_all_peers(&self) {
        for index in 0..self.members.len() as u32 {
            self.peer(index);
        }
    }

    /// The peer of node `index`, if it was created already.
    pub fn existing_peer(&self, index: u32) -> Option<&Arc<GroupPeer>> {
        self.slots[index as usize].peer.get()
    }

    /// All peers created so far.
    pub fn existing_peers(&self) -> impl Iterator<Item = &Arc<GroupPeer>> {
        self.slots.iter().filter_map(|slot| slot.peer.get())
    }
}

/// Each of `members` with its index in `old`, matched by name. Of two members with one name, the last wins.
fn match_by_name<'a>(old: &[Arc<Member>], members: &'a [Arc<Member>]) -> Vec<(&'a Arc<Member>, Option<usize>)> {
    fn by_name(list: &[Arc<Member>]) -> HashMap<&str, usize> {
        list.iter().enumerate().map(|(at, member)| (member.name.as_str(), at)).collect()
    }
    if is_sorted_by_name(old) && is_sorted_by_name(members) {
        // Registries return sorted lists: merging both lists costs less than a map.
        let mut rest = old.iter().enumerate().peekable();
        return members
            .iter()
            .map(|member| {
                while rest.next_if(|(_, known)| known.name < member.name).is_some() {}
                (member, rest.next_if(|(_, known)| known.name == member.name).map(|(at, _)| at))
            })
            .collect();
    }
    let known = by_name(old);
    let last = by_name(members);
    let stays = members.iter().enumerate().filter(|(at, member)| last[member.name.as_str()] == *at);
    stays.map(|(_, member)| (member, known.get(member.name.as_str()).copied())).collect()
}

/// The list of a group's nodes, replaceable at run time.
pub struct GroupMembers {
    current: ArcSwap<MembersSnapshot>,
    peer_factory: Arc<PeerFactory>,
    /// Serialises replacements of the list.
    changing: Mutex<()>,
    /// The running path monitor, if any.
    monitor: Mutex<Weak<MonitorThread>>,
}

impl GroupMembers {
    /// A group of `members`; `make` creates the peer of each.
    pub fn new(
        members: &[Arc<Member>],
        make: impl Fn(&Member) -> Arc<GroupPeer> + Send + Sync + 'static,
    ) -> Arc<GroupMembers> {
        let peer_factory = Arc::new(PeerFactory {
            make_peer: Box::new(make),
            make_rails: OnceLock::new(),
            wake: Arc::default(),
            made: Mutex::default(),
        });
        let empty = MembersSnapshot {
            members: Vec::new(),
            slots: Vec::new(),
            placement: NodePlacement::new::<Member>(&[]),
            peer_factory: Arc::clone(&peer_factory),
        };
        let group = GroupMembers {
            current: ArcSwap::from_pointee(empty),
            peer_factory,
            changing: Mutex::new(()),
            monitor: Mutex::default(),
        };
        group.set_members(members);
        Arc::new(group)
    }

    /// Replaces the list. Nodes with unchanged name and addresses keep their connections; requests on removed nodes
    /// finish. Of two members with one name, the last wins.
    pub fn set_members(&self, members: &[Arc<Member>]) {
        let _changing = self.changing.lock();
        let old = self.current.load();
        if old.members == members {
            return;
        }
        let mut kept_members = Vec::with_capacity(members.len());
        let mut slots = Vec::with_capacity(members.len());
        for (index, (member, known)) in match_by_name(&old.members, members).into_iter().enumerate() {
            let kept = known.filter(|at| old.members[*at].addresses == member.addresses);
            let slot = kept.map_or_else(Arc::default, |at| Arc::clone(&old.slots[at]));
            if let Some(peer) = slot.peer.get() {
                peer.update_member(member);
            }
            tracing::trace!(index, name = member.name, kept = kept.is_some(), "a node of the group");
            kept_members.push(Arc::clone(member));
            slots.push(slot);
        }
        let placement = NodePlacement::new(&kept_members);
        let view = Arc::new(MembersSnapshot {
            members: kept_members,
            slots,
            placement,
            peer_factory: Arc::clone(&self.peer_factory),
        });
        self.current.store(Arc::clone(&view));
        if view.members.len() <= ALL_READY {
            view.create_all_peers();
        }
    }

    /// The nodes now. Takes no lock and allocates nothing.
    pub fn snapshot(&self) -> Guard<Arc<MembersSnapshot>> {
        self.current.load()
    }

    /// All peers in use, including nodes that left the group while a request is still running: they need a heartbeat
    /// too.
    pub(crate) fn peers_in_use(&self) -> Vec<Arc<GroupPeer>> {
        self.peer_factory.made.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Wakes the path monitor of these nodes; for their paths beside TCP.
    pub fn path_wake(&self) -> &Arc<PathWake> {
        &self.peer_factory.wake
    }

    pub(crate) fn monitor(&self) -> &Mutex<Weak<MonitorThread>> {
        &self.monitor
    }

    /// Gives all current and later nodes rail paths, which must use [`GroupMembers::path_wake`]. Only the first
    /// call has an effect.
    pub fn set_rail_factory(&self, make_rails: impl Fn(&Member) -> NodeRails + Send + Sync + 'static) {
        if self.peer_factory.make_rails.set(Box::new(make_rails)).is_ok() {
            let view = self.current.load();
            for (member, slot) in view.members.iter().zip(&view.slots) {
                if let Some(peer) = slot.peer.get() {
                    self.peer_factory.add_rails(member, peer);
                }
            }
        }
    }

    /// Whether nodes may have rail paths.
    pub fn has_rail_factory(&self) -> bool {
        self.peer_factory.make_rails.get().is_some()
    }
}

fn is_sorted_by_name(members: &[Arc<Member>]) -> bool {
    members.is_sorted_by(|a, b| a.name < b.name)
}
