//! The other nodes of a node's group as places where a block may be already: asked before the under-store is, by a node
//! that joined or came back, for blocks that others held meanwhile, and by one that holds a copy. They are asked for
//! what they hold and never fetch it themselves, so nodes that ask each other never wait for each other.

use crate::placement::{FIRST, Wanted};
use crate::roster::{Roster, View};
use parking_lot::{Mutex, RwLock};
use spurline_proto::{Read, Request, says_hot};
use spurline_transport::{CallError, PoolState};
use spurline_types::{Member, ObjectRef, Sink, Stats};
use spurline_volume::{Elsewhere, Fetched};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the answer of another node is waited for; the under-store would have the block, too.
const PATIENCE: Duration = Duration::from_secs(1);
/// The most nodes that are asked for one block: of several that joined together most have not got it.
const MOST: usize = 4;

thread_local! {
    static RANKED: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

/// Makes what a source is asked for through, of these nodes.
type OpenGroup = dyn Fn(&str, &[Arc<Member>]) -> Arc<Roster> + Send + Sync;

/// The nodes as they were last told.
struct Known {
    members: Vec<Arc<Member>>,
    /// When they were told to be others than before.
    changed: Instant,
    /// The names of those that came while this node was there, and when: they have the least of what is sought.
    came: HashMap<String, Instant>,
}

/// The group of a node as the node itself sees it.
pub struct Siblings {
    open: Box<OpenGroup>,
    /// Of each source that was asked for: connections greet for one.
    rosters: RwLock<HashMap<String, Arc<Roster>>>,
    members: Mutex<Known>,
    own_name: String,
    block_size: u64,
    /// After the group changed, blocks may be where they were before for this long.
    settles: Duration,
    stats: Arc<Stats>,
}

impl Siblings {
    /// The group of the node called `own_name`, nobody else in it yet; `open` makes what it asks others for a source
    /// through. For as long as `settles` after a change of the group, nodes that would hold a block without this one are
    /// asked for it.
    pub fn new(
        own_name: &str,
        block_size: u64,
        settles: Duration,
        stats: Arc<Stats>,
        open: impl Fn(&str, &[Arc<Member>]) -> Arc<Roster> + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Siblings {
            open: Box::new(open),
            rosters: RwLock::default(),
            members: Mutex::new(Known { members: Vec::new(), changed: Instant::now(), came: HashMap::new() }),
            own_name: own_name.to_owned(),
            block_size,
            settles,
            stats,
        })
    }

    /// Replaces the list of the group's nodes, this one included.
    pub fn set_members(&self, members: &[Arc<Member>]) {
        let mut known = self.members.lock();
        if known.members != members {
            let now = Instant::now();
            let had = std::mem::replace(&mut known.members, members.to_vec());
            known.changed = now;
            let names = |list: &[Arc<Member>]| list.iter().map(|m| m.name.clone()).collect::<HashSet<_>>();
            let (had, has) = (names(&had), names(members));
            known.came.retain(|name, at| has.contains(name) && at.elapsed() < self.settles);
            if !had.is_empty() {
                known.came.extend(has.difference(&had).map(|name| (name.clone(), now)));
            }
            // Under the lock, so that of two lists the later one stays.
            self.rosters.read().values().for_each(|roster| roster.set_members(members));
        }
    }

    fn roster(&self, source: &str) -> Arc<Roster> {
        if let Some(known) = self.rosters.read().get(source) {
            return Arc::clone(known);
        }
        let members = self.members.lock();
        let mut rosters = self.rosters.write();
        let made = rosters.entry(source.to_owned()).or_insert_with(|| (self.open)(source, &members.members));
        Arc::clone(made)
    }

    /// Whether blocks may still be where they were before the group changed.
    fn unsettled(&self) -> bool {
        self.members.lock().changed.elapsed() < self.settles
    }

    /// The nodes of `ranked` without this one, and before them the one that is being drained: it is none of the first, and has
    /// what it had. Those of this node's own blocks begin with those that were there before others came; of another's with
    /// its owner.
    fn in_order(&self, view: &View, wanted: Wanted, owns: bool, ranked: &mut Vec<u32>) {
        let drained = view.drained(wanted);
        ranked.retain(|at| view.members()[*at as usize].name != self.own_name && Some(*at) != drained);
        let known = self.members.lock();
        if owns && !known.came.is_empty() {
            let lately = |at: &Instant| at.elapsed() < self.settles;
            ranked.sort_by_key(|at| known.came.get(&view.members()[*at as usize].name).is_some_and(lately));
        }
        drop(known);
        if let Some(at) = drained.filter(|at| view.members()[*at as usize].name != self.own_name) {
            ranked.insert(0, at);
        }
    }
}

impl Elsewhere for Siblings {
    fn fetch(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn Sink) -> Fetched {
        let roster = self.roster(source);
        let view = roster.view();
        if view.members().len() < 2 {
            return Fetched::Nowhere;
        }
        let mut ranked = RANKED.take();
        let wanted = Wanted::block(object.id, index, 1);
        view.holders(wanted, FIRST, &mut ranked);
        let owns = ranked.first().is_some_and(|at| view.members()[*at as usize].name == self.own_name);
        let mut found = Fetched::Nowhere;
        // A block's owner asks only after a change; another node that was asked for it has the owner to ask.
        if !owns || self.unsettled() {
            self.in_order(&view, wanted, owns, &mut ranked);
            let until = Instant::now() + PATIENCE;
            for at in ranked.iter().take(MOST) {
                if found != Fetched::Nowhere || Instant::now() >= until {
                    break;
                }
                found = self.pull(&view, *at, object, index, false, sink);
            }
        }
        RANKED.set(ranked);
        found
    }

    fn fetches(&self, source: &str, object: &ObjectRef, index: u32) -> bool {
        let roster = self.roster(source);
        // Whether it is well the reader finds out, who asks all in one order: then one of them stands in for it, not each.
        self.owner(&roster.view(), object, index).is_some()
    }

    fn seek(&self, source: &str, object: &ObjectRef, index: u32, sink: &mut dyn Sink) -> Fetched {
        let roster = self.roster(source);
        let view = roster.view();
        let owner = self.owner(&view, object, index);
        owner.map_or(Fetched::Nowhere, |at| self.pull(&view, at, object, index, true, sink))
    }
}

impl Siblings {
    /// The node that fetches a block for all; `None` when it is this one.
    fn owner(&self, view: &View, object: &ObjectRef, index: u32) -> Option<u32> {
        let mut ranked = RANKED.take();
        view.holders(Wanted::block(object.id, index, 1), FIRST, &mut ranked);
        let owner = ranked.first().copied();
        RANKED.set(ranked);
        owner.filter(|at| view.members()[*at as usize].name != self.own_name)
    }
}

impl Siblings {
    /// Takes a block from a node, if it holds it; one that does not is asked to fetch it if `begins`.
    fn pull(&self, view: &View, at: u32, object: &ObjectRef, index: u32, begins: bool, sink: &mut dyn Sink) -> Fetched {
        let (peer, started) = (view.peer(at), Instant::now());
        if !peer.pace().may_ask(|| started) {
            return Fetched::Nowhere;
        }
        let Ok(mut lease) = peer.tcp().checkout(started + PATIENCE) else {
            // One whose connections are all in use is busy, and not away.
            if peer.state().0 == PoolState::Up {
                peer.pace().not_asked(Instant::now);
            } else {
                peer.pace().shun(Instant::now());
            }
            return Fetched::Nowhere;
        };
        let deadline = Instant::now() + PATIENCE;
        let len = object.block_len(index, self.block_size);
        let read = Read {
            volume: lease.welcome().volume,
            path: &object.path,
            version: object.version.as_str(),
            size: object.size,
            offset: u64::from(index) * self.block_size,
            len: len as u32,
        };
        let seeks = begins && lease.welcome().capabilities.sends_on();
        let request = if seeks { Request::Seek(read) } else { Request::Pull(read) };
        let spare = sink.spare();
        if spare.len() != len || lease.welcome().block_size != self.block_size {
            peer.pace().not_asked(Instant::now);
            return Fetched::Nowhere;
        }
        let mut body = Vec::new();
        let answer = lease.call(&request, &mut body, spare, &mut |_| {}, deadline);
        // One that did not answer is not asked for every block anew, or each would wait as long for it.
        if matches!(answer, Err(CallError::Broken(_))) {
            peer.pace().shun(Instant::now());
        } else {
            peer.pace().in_time(Instant::now());
        }
        if !answer.is_ok_and(|answer| answer.payload_len == len) {
            return Fetched::Nowhere;
        }
        sink.commit(len);
        self.stats.remotecache.pulled_bytes.add(len as u64);
        if says_hot(&body) { Fetched::Hot } else { Fetched::There }
    }
}
