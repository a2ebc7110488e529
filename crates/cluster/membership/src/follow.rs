//! Follows a registry on a thread of its own, and goes on with the members last known when it is gone.
//! What the members are for, its audience knows.

use crate::view::Placed;
use crate::{Holds, Registry, View, Watch};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who goes by the members.
pub trait Audience: Send + Sync {
    /// These are the members from now on; never empty. Called on the follower's thread.
    fn members(&self, members: &[Arc<Member>]);

    /// Whether the node of this name answers its readers at this moment; asked of nodes that left the registry.
    fn answers(&self, name: &str) -> bool;
}

/// One that is told and asks no node often enough to say what answers.
impl<F: Fn(&[Arc<Member>]) + Send + Sync> Audience for F {
    fn members(&self, members: &[Arc<Member>]) {
        self(members);
    }

    fn answers(&self, _name: &str) -> bool {
        false
    }
}

/// How a registry is, seen from here.
#[derive(Debug, Clone)]
pub enum State {
    /// It answers.
    Up,
    /// It does not.
    Lost {
        /// Why.
        error: Error,
    },
}

/// What is known of a group.
#[derive(Debug, Clone)]
pub struct Seen {
    /// The registry, as a person wrote it.
    pub registry: String,
    /// How the registry is.
    pub state: State,
    /// Since when.
    pub since: Instant,
    /// The members, by name.
    pub members: Vec<Placed>,
}

/// How long one look at the registry takes, and so how late a place is given up.
const LOOK: Duration = Duration::from_secs(1);
/// Pauses before a lost registry is tried again; each drawn anew, so that not all come back at once.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));
/// How often a registry that stays lost is said to be.
const REMIND: Duration = Duration::from_secs(300);

/// Follows a registry while it is kept.
pub struct Follower {
    shared: Arc<Shared>,
}

struct Shared {
    registry: String,
    stats: Arc<Stats>,
    inner: Mutex<Inner>,
    wake: Condvar,
}

struct Inner {
    view: View,
    state: State,
    since: Instant,
    /// Whether the registry has answered at all.
    answered: bool,
    audience: Option<Arc<dyn Audience>>,
    stop: bool,
}

impl Follower {
    /// Begins to follow.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(registry: &Arc<dyn Registry>, holds: Holds, stats: Arc<Stats>) -> Result<Self> {
        let inner = Inner {
            view: View::new(holds),
            state: State::Up,
            since: Instant::now(),
            answered: false,
            audience: None,
            stop: false,
        };
        let shared = Arc::new(Shared {
            registry: registry.describe().to_owned(),
            stats,
            inner: Mutex::new(inner),
            wake: Condvar::new(),
        });
        let (thread, watch) = (Arc::clone(&shared), registry.watch());
        std::thread::Builder::new()
            .name("registry".into())
            .spawn(move || thread.run(watch))
            .map_err(|e| Error::io("a thread for the registry", &e))?;
        Ok(Follower { shared })
    }

    /// Waits for the first members.
    ///
    /// # Errors
    /// When there were none by `deadline`: `Unavailable` of a registry that can't be reached, saying what was tried,
    /// `NotFound` of one that knows no node; `PermissionDenied` as soon as the registry refuses this process.
    pub fn first(&self, deadline: Instant) -> Result<Vec<Arc<Member>>> {
        self.await_first(deadline, true)
    }

    /// The same for somebody who only asks: a registry that can't be reached is not tried again.
    ///
    /// # Errors
    /// As [`Follower::first`], and `Unavailable` as soon as the registry can't be reached.
    pub fn first_answer(&self, deadline: Instant) -> Result<Vec<Arc<Member>>> {
        self.await_first(deadline, false)
    }

    fn await_first(&self, deadline: Instant, patient: bool) -> Result<Vec<Arc<Member>>> {
        let mut inner = self.shared.inner.lock();
        loop {
            let members = inner.view.members();
            if !members.is_empty() {
                return Ok(members);
            }
            // Who was refused for what it is will be again.
            let refused = matches!(&inner.state, State::Lost { error } if error.kind() == ErrorKind::PermissionDenied);
            let lost = !patient && matches!(inner.state, State::Lost { .. });
            if refused || lost || self.shared.wake.wait_until(&mut inner, deadline).timed_out() {
                let registry = &self.shared.registry;
                let text = match &inner.state {
                    State::Lost { error } if refused => format!("the registry {registry} refused: {error}"),
                    State::Lost { error } => format!("the registry {registry} can't be reached: {error}"),
                    State::Up if inner.answered => format!("the registry {registry} answers, but knows no node"),
                    State::Up => format!("the registry {registry} has not answered"),
                };
                let kind = match &inner.state {
                    _ if refused => ErrorKind::PermissionDenied,
                    State::Up if inner.answered => ErrorKind::NotFound,
                    _ => ErrorKind::Unavailable,
                };
                return Err(Error::new(kind, text));
            }
        }
    }

    /// Waits until the registry has answered or failed once, at most until `deadline`: the members by then, perhaps none.
    pub fn known(&self, deadline: Instant) -> Vec<Arc<Member>> {
        let mut inner = self.shared.inner.lock();
        while inner.view.members().is_empty() && !inner.answered && matches!(inner.state, State::Up) {
            if self.shared.wake.wait_until(&mut inner, deadline).timed_out() {
                break;
            }
        }
        inner.view.members()
    }

    /// From now on `audience` goes by the members, those of now first.
    pub fn tell(&self, audience: Arc<dyn Audience>) {
        let mut inner = self.shared.inner.lock();
        let members = inner.view.members();
        if !members.is_empty() {
            audience.members(&members);
        }
        inner.audience = Some(audience);
    }

    /// What is known now.
    pub fn seen(&self) -> Seen {
        let inner = self.shared.inner.lock();
        let (registry, state) = (self.shared.registry.clone(), inner.state.clone());
        Seen { registry, state, since: inner.since, members: inner.view.placed() }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.stop = true;
        inner.audience = None;
        self.shared.wake.notify_all();
    }
}

fn nodes(count: usize) -> String {
    format!("{count} {}", if count == 1 { "node" } else { "nodes" })
}

impl Shared {
    fn run(&self, mut watch: Box<dyn Watch>) {
        let (mut pause, mut reminded, mut forgot) = (PAUSES.0, Instant::now(), false);
        loop {
            let news = watch.next(Instant::now() + LOOK);
            let now = Instant::now();
            let mut inner = self.inner.lock();
            if inner.stop {
                return;
            }
            let mut changed = false;
            let lost = match news {
                Ok(members) => {
                    if let State::Lost { .. } = inner.state {
                        tracing::info!("the registry {} answers again", self.registry);
                        inner.state = State::Up;
                        inner.since = now;
                    }
                    inner.answered = true;
                    pause = PAUSES.0;
                    if let Some(members) = members {
                        let empty = members.is_empty();
                        changed = inner.view.apply(now, &members);
                        // Once: registries that are asked say so each time.
                        let before = std::mem::replace(&mut forgot, empty);
                        if empty && !before && inner.view.count().0 > 0 {
                            let known = nodes(inner.view.count().0);
                            tracing::warn!("the registry {} forgot all nodes; going on with {known}", self.registry);
                        }
                    }
                    None
                }
                Err(error) => Some(error),
            };
            if let Some(error) = &lost {
                let first = !matches!(inner.state, State::Lost { .. });
                if first {
                    inner.since = now;
                    self.stats.group.registry_losses.add(1);
                }
                if first || now.duration_since(reminded) > REMIND {
                    reminded = now;
                    let since = match now.duration_since(inner.since).as_secs() {
                        0 => String::new(),
                        seconds => format!(" for {seconds} s"),
                    };
                    let known = nodes(inner.view.count().0);
                    tracing::warn!("the registry {} is gone{since}: {error}; going on with {known}", self.registry);
                }
                inner.state = State::Lost { error: error.clone() };
            } else {
                // While the registry is lost nobody is known to have left, so no place is given up.
                let audience = inner.audience.clone();
                changed |= inner.view.tick(now, &|name| audience.as_ref().is_some_and(|a| a.answers(name)));
            }
            let (members, away) = inner.view.count();
            let group = &self.stats.group;
            group.members.set(members as u64);
            group.members_away.set(away as u64);
            let lost_for = if lost.is_some() { now.duration_since(inner.since).as_secs().max(1) } else { 0 };
            group.registry_lost_seconds.set(lost_for);
            if changed {
                group.changes.add(1);
                tracing::info!("the group has {} now, {away} of them away", nodes(members));
                if let Some(audience) = inner.audience.clone() {
                    let members = inner.view.members();
                    if !members.is_empty() {
                        audience.members(&members);
                    }
                }
            }
            self.wake.notify_all();
            if lost.is_some() {
                // From half of the pause to one and a half.
                let share = RandomState::new().hash_one(now) % 1000;
                let drawn = pause / 2 + pause.mul_f64(share as f64 / 1000.0);
                let until = now + drawn;
                while !inner.stop && !self.wake.wait_until(&mut inner, until).timed_out() {}
                pause = (pause * 2).min(PAUSES.1);
            }
        }
    }
}
