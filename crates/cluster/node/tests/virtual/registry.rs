//! A registry in memory: the coordinator's own list behind the traits of `spurline-membership`, with time, outages and
//! partitions, and without gRPC.

use parking_lot::Mutex;
use spurline_membership::{Lease, Limits, Registry, Roll, Watch};
use spurline_types::{Error, ErrorKind, Member, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

const GROUP: &str = "g";
/// As a node's registration lasts.
pub const LEASE: Duration = Duration::from_secs(15);

struct State {
    roll: Roll,
    /// How often it was restarted empty.
    life: u64,
    up: bool,
    /// Processes that do not reach it.
    cut: BTreeSet<String>,
}

/// The registry of a cluster. Cheap to clone.
#[derive(Clone)]
pub struct SimRegistry(Arc<Mutex<State>>);

impl SimRegistry {
    pub fn new() -> Self {
        let roll = Roll::new(LEASE, Limits::default());
        SimRegistry(Arc::new(Mutex::new(State { roll, life: 1, up: true, cut: BTreeSet::new() })))
    }

    pub fn set_up(&self, up: bool) {
        self.0.lock().up = up;
    }

    /// Starts it again; it remembers nothing.
    pub fn restart_empty(&self) {
        let mut state = self.0.lock();
        state.roll = Roll::new(LEASE, Limits::default());
        state.life += 1;
        state.up = true;
    }

    /// Whether the process of this name reaches it.
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
        state.roll.sweep(now);
        ask(&mut state)
    }

    fn again(&self) -> Way {
        Way { registry: self.registry.clone(), name: self.name.clone() }
    }
}

impl Registry for Way {
    fn describe(&self) -> &str {
        "sim"
    }
    fn watch(&self) -> Box<dyn Watch> {
        Box::new(Looking { way: self.again(), since: (0, 0), known: BTreeMap::new() })
    }
    fn lease(&self) -> Option<Box<dyn Lease>> {
        Some(Box::new(Held { way: self.again(), name: None }))
    }
}

struct Looking {
    way: Way,
    /// The registry's life, and the revision seen last.
    since: (u64, u64),
    known: BTreeMap<String, Arc<Member>>,
}

impl Watch for Looking {
    fn next(&mut self, until: Instant) -> Result<Option<Vec<Arc<Member>>>> {
        loop {
            let since = self.since;
            let (life, changes) = self.way.reach(|state| {
                let from = if state.life == since.0 { since.1 } else { 0 };
                Ok((state.life, state.roll.changes(GROUP, from)))
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

impl Lease for Held {
    fn renew(&mut self, member: &Member, _: Instant) -> Result<Duration> {
        self.way.reach(|state| state.roll.announce(Instant::now(), GROUP, member))?;
        self.name = Some((member.name.clone(), member.instance));
        Ok(LEASE)
    }

    fn release(&mut self, _: Instant) {
        if let Some((name, instance)) = self.name.take() {
            // One that can't be told sees the lease run out.
            let _ = self.way.reach(|state| Ok(state.roll.leave(GROUP, &name, instance)));
        }
    }
}
