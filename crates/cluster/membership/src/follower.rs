//! Follows a registry on a separate thread, and continues with the last known members while the registry is lost. Knows nothing
//! of the use of the members.

use crate::members::MemberStatus;
use crate::{HoldTimes, MemberView, MemberWatch, Registry};
use parking_lot::{Condvar, Mutex};
use spurline_sys::{Backoff, random};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A user of the member list.
pub trait MemberListener: Send + Sync {
    /// Sets the members; never empty. Called on the follower's thread.
    fn set_members(&self, members: &[Arc<Member>]);

    /// Whether this node answers readers now; called for nodes that left the registry.
    fn answers_readers(&self, name: &str) -> bool;
}

/// A plain function contacts no node, so there is no knowledge of answers.
impl<F: Fn(&[Arc<Member>]) + Send + Sync> MemberListener for F {
    fn set_members(&self, members: &[Arc<Member>]) {
        self(members);
    }

    fn answers_readers(&self, _name: &str) -> bool {
        false
    }
}

/// State of a registry, as seen by this process.
#[derive(Debug, Clone)]
pub enum RegistryState {
    /// The registry answers.
    Up,
    /// The registry does not answer.
    Lost {
        /// Why.
        error: Error,
    },
}

/// Status of a group.
#[derive(Debug, Clone)]
pub struct GroupStatus {
    /// The registry's URL, without secrets.
    pub registry: String,
    /// State of the registry.
    pub state: RegistryState,
    /// When that state began.
    pub since: Instant,
    /// The members, by name.
    pub members: Vec<MemberStatus>,
}

/// Upper limit of a wait for changes, and so the delay with which a place expires.
const WATCH_TIMEOUT: Duration = Duration::from_secs(1);
/// Range of pauses before a lost registry is retried; each is randomised, so that not all clients retry at once.
const REGISTRY_RETRY_PAUSES: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(5));
/// How often a lasting loss is logged.
const REMIND_AFTER: Duration = Duration::from_secs(300);

/// Follows a registry until dropped.
pub struct RegistryFollower {
    shared: Arc<FollowerShared>,
}

struct FollowerShared {
    registry: String,
    stats: Arc<Stats>,
    inner: Mutex<FollowerState>,
    wake: Condvar,
}

struct FollowerState {
    members: MemberView,
    state: RegistryState,
    since: Instant,
    /// Whether the registry has ever answered.
    has_answered: bool,
    listener: Option<Arc<dyn MemberListener>>,
    stop: bool,
}

impl RegistryFollower {
    /// Starts following.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start(registry: &Arc<dyn Registry>, holds: HoldTimes, stats: Arc<Stats>) -> Result<Self> {
        let inner = FollowerState {
            members: MemberView::new(holds),
            state: RegistryState::Up,
            since: Instant::now(),
            has_answered: false,
            listener: None,
            stop: false,
        };
        let shared = Arc::new(FollowerShared {
            registry: registry.description().to_owned(),
            stats,
            inner: Mutex::new(inner),
            wake: Condvar::new(),
        });
        let thread = Arc::clone(&shared);
        let watch = registry.watch_members();
        std::thread::Builder::new()
            .name("registry".into())
            .spawn(move || thread.run_watch(watch))
            .map_err(|e| Error::io("a thread for the registry", &e))?;
        Ok(RegistryFollower { shared })
    }

    /// Waits for the first members.
    ///
    /// # Errors
    /// When there are none by `deadline`: `Unavailable` when the registry can't be reached, `NotFound` when the registry has no
    /// node; `PermissionDenied` as soon as the registry refuses this process.
    pub fn first_members(&self, deadline: Instant) -> Result<Vec<Arc<Member>>> {
        self.await_first(deadline, true)
    }

    /// As [`RegistryFollower::first_members`] without retries, for a command that only queries.
    ///
    /// # Errors
    /// As [`RegistryFollower::first_members`], and `Unavailable` as soon as the registry can't be reached.
    pub fn first_members_once(&self, deadline: Instant) -> Result<Vec<Arc<Member>>> {
        self.await_first(deadline, false)
    }

    fn await_first(&self, deadline: Instant, patient: bool) -> Result<Vec<Arc<Member>>> {
        let mut inner = self.shared.inner.lock();
        loop {
            let members = inner.members.members();
            if !members.is_empty() {
                return Ok(members);
            }
            // A refusal is final: the same credentials would be refused again.
            let refused =
                matches!(&inner.state, RegistryState::Lost { error } if error.kind() == ErrorKind::PermissionDenied);
            let lost = !patient && matches!(inner.state, RegistryState::Lost { .. });
            if refused || lost || self.shared.wake.wait_until(&mut inner, deadline).timed_out() {
                let registry = &self.shared.registry;
                let text = match &inner.state {
                    RegistryState::Lost { error } if refused => format!("the registry {registry} refused: {error}"),
                    RegistryState::Lost { error } => format!("the registry {registry} can't be reached: {error}"),
                    RegistryState::Up if inner.has_answered => {
                        format!("the registry {registry} answers, but lists no node")
                    }
                    RegistryState::Up => format!("the registry {registry} has not answered"),
                };
                let kind = match &inner.state {
                    _ if refused => ErrorKind::PermissionDenied,
                    RegistryState::Up if inner.has_answered => ErrorKind::NotFound,
                    _ => ErrorKind::Unavailable,
                };
                return Err(Error::new(kind, text));
            }
        }
    }

    /// Waits until the registry has answered or failed once, at most until `deadline`; returns the members, perhaps
    /// none.
    pub fn known_members(&self, deadline: Instant) -> Vec<Arc<Member>> {
        let mut inner = self.shared.inner.lock();
        while inner.members.members().is_empty() && !inner.has_answered && matches!(inner.state, RegistryState::Up) {
            if self.shared.wake.wait_until(&mut inner, deadline).timed_out() {
                break;
            }
        }
        inner.members.members()
    }

    /// Sends the present members to `listener`, and all later lists.
    pub fn set_listener(&self, audience: Arc<dyn MemberListener>) {
        let mut inner = self.shared.inner.lock();
        let members = inner.members.members();
        if !members.is_empty() {
            audience.set_members(&members);
        }
        inner.listener = Some(audience);
    }

    /// The present status.
    pub fn group_status(&self) -> GroupStatus {
        let inner = self.shared.inner.lock();
        let registry = self.shared.registry.clone();
        let state = inner.state.clone();
        GroupStatus { registry, state, since: inner.since, members: inner.members.member_statuses() }
    }
}

impl Drop for RegistryFollower {
    fn drop(&mut self) {
        let mut inner = self.shared.inner.lock();
        inner.stop = true;
        inner.listener = None;
        self.shared.wake.notify_all();
    }
}

fn node_count(count: usize) -> String {
    format!("{count} {}", if count == 1 { "node" } else { "nodes" })
}

/// The log line of a registry that does not answer.
fn describe_silence(registry: &str, follower: &FollowerState, silence: Duration, error: &Error) -> String {
    let since = match silence.as_secs() {
        0 => String::new(),
        seconds => format!(" for {seconds} s"),
    };
    if !follower.has_answered {
        return format!("the registry {registry} could not be reached yet{since}: {error}; trying again");
    }
    let known = node_count(follower.members.count_members().0);
    format!("the registry {registry} is lost{since}: {error}; continuing with {known}")
}

impl FollowerShared {
    fn run_watch(&self, mut watch: Box<dyn MemberWatch>) {
        let mut pauses = REGISTRY_RETRY_PAUSES;
        let mut reminded = Instant::now();
        let mut forgot = false;
        loop {
            let news = watch.next_members(Instant::now() + WATCH_TIMEOUT);
            let now = Instant::now();
            let mut inner = self.inner.lock();
            if inner.stop {
                return;
            }
            let mut changed = false;
            let lost = match news {
                Ok(members) => {
                    if let RegistryState::Lost { .. } = inner.state {
                        let again = if inner.has_answered { " again" } else { "" };
                        tracing::info!("the registry {} answers{again}", self.registry);
                        inner.state = RegistryState::Up;
                        inner.since = now;
                    }
                    inner.has_answered = true;
                    pauses.reset();
                    if let Some(members) = members {
                        let empty = members.is_empty();
                        changed = inner.members.apply_members(now, &members);
                        // Log once: a polled registry repeats the answer.
                        let before = std::mem::replace(&mut forgot, empty);
                        if empty && !before && inner.members.count_members().0 > 0 {
                            let known = node_count(inner.members.count_members().0);
                            tracing::warn!("the registry {} lost its nodes; continuing with {known}", self.registry);
                        }
                    }
                    None
                }
                Err(error) => Some(error),
            };
            if let Some(error) = &lost {
                let first = !matches!(inner.state, RegistryState::Lost { .. });
                if first {
                    inner.since = now;
                    self.stats.group.registry_losses.add(1);
                }
                if first || now.duration_since(reminded) > REMIND_AFTER {
                    reminded = now;
                    let silence = now.duration_since(inner.since);
                    let line = describe_silence(&self.registry, &inner, silence, error);
                    tracing::warn!("{line}");
                }
                inner.state = RegistryState::Lost { error: error.clone() };
            } else {
                // A lost registry proves no departure, so no place expires meanwhile.
                let audience = inner.listener.clone();
                changed |= inner
                    .members
                    .expire_absent(now, &|name| audience.as_ref().is_some_and(|a| a.answers_readers(name)));
            }
            let (members, away) = inner.members.count_members();
            let group = &self.stats.group;
            group.members.set(members as u64);
            group.members_away.set(away as u64);
            let lost_for = if lost.is_some() { now.duration_since(inner.since).as_secs().max(1) } else { 0 };
            group.registry_lost_seconds.set(lost_for);
            if changed {
                group.changes.add(1);
                tracing::info!("the group has {} now, {away} of them absent", node_count(members));
                if let Some(audience) = inner.listener.clone() {
                    let members = inner.members.members();
                    if !members.is_empty() {
                        audience.set_members(&members);
                    }
                }
            }
            self.wake.notify_all();
            if lost.is_some() {
                // From half the pause to three halves.
                let share = random() % 1000;
                let pause = pauses.next_pause();
                let drawn = pause / 2 + pause.mul_f64(share as f64 / 1000.0);
                let until = now + drawn;
                while !inner.stop && !self.wake.wait_until(&mut inner, until).timed_out() {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registry_is_lost_only_after_it_has_answered() {
        let mut follower = FollowerState {
            members: MemberView::new(HoldTimes::default()),
            state: RegistryState::Up,
            since: Instant::now(),
            has_answered: false,
            listener: None,
            stop: false,
        };
        let error = Error::new(ErrorKind::Unavailable, "refused");
        let line = describe_silence("R", &follower, Duration::ZERO, &error);
        assert_eq!(line, "the registry R could not be reached yet: refused; trying again");
        follower.has_answered = true;
        let line = describe_silence("R", &follower, Duration::from_secs(7), &error);
        assert_eq!(line, "the registry R is lost for 7 s: refused; continuing with 0 nodes");
    }
}
