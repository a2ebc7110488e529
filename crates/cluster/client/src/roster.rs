//! The nodes of a group as this process knows them now: replaced as a whole while requests are under way, each node
//! with its connections kept for as long as it stays. It knows neither where the list comes from nor what is asked.

use crate::paths::Paths;
use crate::peer::Peer;
use crate::placement::{Placement, Standpoint, Wanted};
use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;
use spurline_transport::Wake;
use spurline_types::Member;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

/// In a group this small every node is made ready before it is asked for anything; in a larger one when it is.
const ALL_READY: usize = 64;

/// Makes what a node is asked through.
pub type MakePeer = dyn Fn(&Member) -> Arc<Peer> + Send + Sync;

/// Gives the nodes paths beside TCP, and whom to wake when one got them.
struct Equipment {
    paths: Box<dyn Fn(&Member) -> Paths + Send + Sync>,
    wake: Arc<Wake>,
}

/// What makes peers of members.
struct Workshop {
    make: Box<MakePeer>,
    equipment: OnceLock<Equipment>,
    /// All that were made and are there: those of nodes that left the group too, while somebody waits for them.
    made: Mutex<Vec<Weak<Peer>>>,
}

impl Workshop {
    fn make(&self, member: &Member) -> Arc<Peer> {
        let peer = (self.make)(member);
        let mut made = self.made.lock();
        if made.len() == made.capacity() {
            made.retain(|peer| peer.strong_count() > 0);
        }
        made.push(Arc::downgrade(&peer));
        peer
    }

    fn equip(&self, member: &Member, peer: &Peer) {
        if let Some(equipment) = self.equipment.get() {
            peer.set_paths((equipment.paths)(member));
            equipment.wake.ring();
        }
    }
}

/// A node's place in the list. It outlives the list for as long as the node keeps its name and its addresses.
#[derive(Default)]
struct Slot {
    peer: OnceLock<Arc<Peer>>,
}

/// The nodes at one moment. Requests under way keep theirs.
pub struct View {
    members: Vec<Arc<Member>>,
    slots: Vec<Arc<Slot>>,
    placement: Placement,
    workshop: Arc<Workshop>,
}

impl View {
    /// The nodes to ask for `wanted`, at most `most`, in the order in which a reader at `from` asks them; and the one of
    /// them that all agree on as its owner, which fetches it for all.
    pub fn rank(&self, wanted: Wanted, from: &Standpoint, most: usize, out: &mut Vec<u32>) -> Option<u32> {
        self.placement.holders(wanted, most, out);
        let owner = out.first().copied();
        self.placement.near_first(wanted, &self.members, from, out);
        owner
    }

    /// The nodes that hold `wanted`, its owner first, and those that would if they were gone, at most `most`.
    pub fn holders(&self, wanted: Wanted, most: usize, out: &mut Vec<u32>) {
        self.placement.holders(wanted, most, out);
    }

    /// The nodes, in the order in which they were told.
    pub fn members(&self) -> &[Arc<Member>] {
        &self.members
    }

    /// Of the nodes that are being drained the one that would hold `wanted` if it were not.
    pub fn drained(&self, wanted: Wanted) -> Option<u32> {
        self.placement.drained(wanted)
    }

    /// What node `index` of [`View::members`] is asked through; made now if it was not needed before.
    pub fn peer(&self, index: u32) -> &Arc<Peer> {
        let (member, slot) = (&self.members[index as usize], &self.slots[index as usize]);
        let mut made = false;
        let peer = slot.peer.get_or_init(|| {
            made = true;
            self.workshop.make(member)
        });
        if made {
            // In its place already, so that paths asked for meanwhile reach it one way or the other.
            self.workshop.equip(member, peer);
        }
        peer
    }

    /// The same, unless it was not needed so far.
    pub fn made(&self, index: u32) -> Option<&Arc<Peer>> {
        self.slots[index as usize].peer.get()
    }

    /// All that were needed so far.
    pub fn all_made(&self) -> impl Iterator<Item = &Arc<Peer>> {
        self.slots.iter().filter_map(|slot| slot.peer.get())
    }
}

/// Each of `members` with its place in `old`, if its name is there; of two under one name the last.
fn matched<'a>(old: &[Arc<Member>], members: &'a [Arc<Member>]) -> Vec<(&'a Arc<Member>, Option<usize>)> {
    fn by_name(list: &[Arc<Member>]) -> HashMap<&str, usize> {
        list.iter().enumerate().map(|(at, member)| (member.name.as_str(), at)).collect()
    }
    let rising = |list: &[Arc<Member>]| list.is_sorted_by(|a, b| a.name < b.name);
    if rising(old) && rising(members) {
        // As registries tell them: to go along both lists is less than to look each name up.
        let mut rest = old.iter().enumerate().peekable();
        let place = |member: &'a Arc<Member>| {
            while rest.next_if(|(_, known)| known.name < member.name).is_some() {}
            (member, rest.next_if(|(_, known)| known.name == member.name).map(|(at, _)| at))
        };
        return members.iter().map(place).collect();
    }
    let (known, last) = (by_name(old), by_name(members));
    let stays = members.iter().enumerate().filter(|(at, member)| last[member.name.as_str()] == *at);
    stays.map(|(_, member)| (member, known.get(member.name.as_str()).copied())).collect()
}

/// The list of a group's nodes, changed at run time.
pub struct Roster {
    current: ArcSwap<View>,
    workshop: Arc<Workshop>,
    /// Held while the list is being replaced.
    changing: Mutex<()>,
}

impl Roster {
    /// A group of `members`, asked through what `make` makes of each.
    pub fn new(members: &[Arc<Member>], make: impl Fn(&Member) -> Arc<Peer> + Send + Sync + 'static) -> Arc<Roster> {
        let workshop = Arc::new(Workshop { make: Box::new(make), equipment: OnceLock::new(), made: Mutex::default() });
        let empty = View {
            members: Vec::new(),
            slots: Vec::new(),
            placement: Placement::new::<Member>(&[]),
            workshop: Arc::clone(&workshop),
        };
        let roster = Roster { current: ArcSwap::from_pointee(empty), workshop, changing: Mutex::new(()) };
        roster.set_members(members);
        Arc::new(roster)
    }

    /// Replaces the list. Nodes that stay under the same name and addresses keep their connections; those that go
    /// finish what is under way. Of two under one name the last told is the one.
    pub fn set_members(&self, members: &[Arc<Member>]) {
        let _changing = self.changing.lock();
        let old = self.current.load();
        if old.members == members {
            return;
        }
        let (mut kept_members, mut slots) = (Vec::with_capacity(members.len()), Vec::with_capacity(members.len()));
        for (index, (member, known)) in matched(&old.members, members).into_iter().enumerate() {
            let kept = known.filter(|at| old.members[*at].addresses == member.addresses);
            let slot = kept.map_or_else(Arc::default, |at| Arc::clone(&old.slots[at]));
            if let Some(peer) = slot.peer.get() {
                peer.is_now(member);
            }
            tracing::trace!(index, name = member.name, kept = kept.is_some(), "a node of the group");
            kept_members.push(Arc::clone(member));
            slots.push(slot);
        }
        let placement = Placement::new(&kept_members);
        let view = Arc::new(View { members: kept_members, slots, placement, workshop: Arc::clone(&self.workshop) });
        self.current.store(Arc::clone(&view));
        if view.members.len() <= ALL_READY {
            (0..view.members.len() as u32).for_each(|index| drop(Arc::clone(view.peer(index))));
        }
    }

    /// The nodes now. Takes no lock and allocates nothing.
    pub fn view(&self) -> Guard<Arc<View>> {
        self.current.load()
    }

    /// What nodes are asked through, those that left the group included for as long as a request of theirs is under way:
    /// they may fall silent as others do, and whoever waits for them is to go on all the same.
    pub(crate) fn in_use(&self) -> Vec<Arc<Peer>> {
        self.workshop.made.lock().iter().filter_map(Weak::upgrade).collect()
    }

    /// Gives the nodes, those of now and later ones, paths beside TCP, once; `wake` is rung whenever one got them.
    pub fn equip(&self, wake: Arc<Wake>, paths: impl Fn(&Member) -> Paths + Send + Sync + 'static) {
        let equipment = Equipment { paths: Box::new(paths), wake };
        if self.workshop.equipment.set(equipment).is_ok() {
            let view = self.current.load();
            for (member, slot) in view.members.iter().zip(&view.slots) {
                if let Some(peer) = slot.peer.get() {
                    self.workshop.equip(member, peer);
                }
            }
        }
    }

    /// Whether the nodes may have paths beside TCP.
    pub fn equipped(&self) -> bool {
        self.workshop.equipment.get().is_some()
    }
}
