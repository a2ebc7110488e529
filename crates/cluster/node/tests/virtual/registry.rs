//! A registry in memory: the coordinator's own list behind the traits of `spurline-membership`, with time, outages and
//! partitions, and without gRPC.

use parking_lot::Mutex;
use spurline_membership::{LeaseTable, MemberWatch, NodeLease, Registry, TableLimits};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

const GROUP: &str = "g";
/// Lifetime of a node's registration.
pub const LEASE: Duration = Duration::from_secs(15);

struct State {
    roll: LeaseTable,
    /// Number of restarts without state.
    life: u64,
    up: bool,
    /// Processes that cannot reach it.
    cut: BTreeSet<String>,
}

/// The registry of a cluster. Cheap to clone.
#[derive(Clone)]
pub struct SimRegistry(Arc<Mutex<State>>);

impl SimRegistry {
    pub fn new() -> Self {
        let roll = LeaseTable::new(LEASE, TableLimits::default());
        SimRegistry(Arc::new(Mutex::new(State { roll, life: 1, up: true, cut: BTreeSet::new() })))
    }

    pub fn set_up(&self, up: bool) {
        self.0.lock().up = up;
    }

    /// Restarts it without state.
    pub fn restart_empty(&self) {
        let mut state = self.0.lock();
        state.roll = LeaseTable::new(LEASE, TableLimits::default());
        state.life += 1;
        state.up = true;
    }

    /// Sets whether the process of this name can reach it.
    pub fn set_reached(&self, name: &str, reached: bool) {
        let mut state = self.0.lock();
        if reached {
            state.cut.remove(name)
        } else {
            state.cut.insert(name.to_owned())
        };
    }

    /// The registry as one process sees it.
    pub fn seen_by(&self, name: &str) -> Arc<dyn Registry> {
        Arc::new(Way { registry: self.clone(), name: name.to_owned() })
    }
}

struct Way {
    registry: SimRegistry,
    name: String,
}

impl Way {
    fn reach<T>(&self, ask: impl FnOnce(&mut State) -> Result<T>) -> Result<T> {
        let mut state = self.registry.0.lock();
        if !state.up || state.cut.contains(&self.name) {
            return Err(Error::new(ErrorKind::Unavailable, "no way to the registry"));
        }
        let now = Instant::now();
        state.roll.remove_expired(now);
        ask(&mut state)
    }

    fn again(&self) -> Way {
        Way { registry: self.registry.clone(), name: self.name.clone() }
    }
}

impl Registry for Way {
    fn description(&self) -> &str {
        "sim"
    }
    fn watch_members(&self) -> Box<dyn MemberWatch> {
        Box::new(Looking { way: self.again(), since: (0, 0), known: BTreeMap::new() })
    }
    fn node_lease(&self) -> Option<Box<dyn NodeLease>> {
        Some(Box::new(Held { way: self.again(), name: None }))
    }
}

struct Looking {
    way: Way,
    /// The registry's life, and the last revision received.
    since: (u64, u64),
    known: BTreeMap<String, Arc<Member>>,
}

impl MemberWatch for Looking {
    fn next_members(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        loop {
            let since = self.since;
            let (life, changes) = self.way.reach(|state| {
                let from = if state.life == since.0 { since.1 } else { 0 };
                Ok((state.life, state.roll.changes_since(GROUP, from)))
            })?;
            let reset = life != since.0 || (changes.reset && since.1 > 0);
            let changed = reset || !changes.put.is_empty() || !changes.gone.is_empty();
            self.since = (life, changes.revision);
            if reset {
                self.known.clear();
            }
            self.known.extend(changes.put.into_iter().map(|member| (member.name.clone(), Arc::new(member))));
            changes.gone.iter().for_each(|name| drop(self.known.remove(name)));
            if changed {
                return Ok(Some(self.known.values().cloned().collect()));
            }
            if Instant::now() >= until {
                return Ok(None);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }
}

struct Held {
    way: Way,
    name: Option<(String, u64)>,
}

impl NodeLease for Held {
    fn renew(&mut self, member: &Member, _: Instant) -> Result<Duration> {
        self.way.reach(|state| state.roll.enter_node(Instant::now(), GROUP, member))?;
        self.name = Some((member.name.clone(), member.instance));
        Ok(LEASE)
    }

    fn release(&mut self, _: Instant) {
        if let Some((name, instance)) = self.name.take() {
            // If the registry is unreachable, the lease expires.
            let _ = self.way.reach(|state| Ok(state.roll.remove_own(GROUP, &name, instance)));
        }
    }
}
