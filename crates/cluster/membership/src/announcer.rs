//! Keeps a node registered: enters the name at the start, renews the entry on a separate thread, removes the entry at the end. A
//! lost registry is retried for the node's whole life.

use crate::{LEASE_TIME, NodeLease, Registry};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a node tries to register at the start before the error.
const ENTRY_TIMEOUT: Duration = Duration::from_secs(10);
/// The lease of a dead process may still hold the name; the wait for the name is a lease plus this time.
const NAME_WAIT_MARGIN: Duration = Duration::from_secs(5);
/// Between two tries.
const ANNOUNCE_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Upper limit for removing a name.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(2);

/// A registered node; a drop removes the name.
pub struct NodeAnnouncer {
    shared: Arc<AnnouncerShared>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct AnnouncerShared {
    registry: String,
    inner: Mutex<AnnouncerState>,
    wake: Condvar,
    stats: Arc<Stats>,
}

struct AnnouncerState {
    member: Member,
    /// Number of changes to `member`, and the number of the last change that the registry has.
    changes: u64,
    announced_change: u64,
    /// Whether a change must be sent at once.
    pending: bool,
    stop: bool,
    /// Since when the registry lacks the name, and why.
    failure: Option<(Instant, Error)>,
}

impl NodeAnnouncer {
    /// Registers `member` and renews the registration; `None` where the registry takes no registrations.
    ///
    /// # Errors
    /// `Invalid` when another process holds and keeps the name, `Unavailable` when the registry can't be reached.
    pub fn start(registry: &Arc<dyn Registry>, member: Member, stats: Arc<Stats>) -> Result<Option<Self>> {
        Self::enter_name(registry, member, stats, false)
    }

    /// As [`NodeAnnouncer::start`] for a node that was in the group before. An unreachable registry is retried in the
    /// background, because mounts keep the node's place meanwhile.
    ///
    /// # Errors
    /// `Invalid` when another process holds and keeps the name, `PermissionDenied` when the registry refuses this node.
    pub fn rejoin(registry: &Arc<dyn Registry>, member: Member, stats: Arc<Stats>) -> Result<Option<Self>> {
        Self::enter_name(registry, member, stats, true)
    }

    fn enter_name(
        registry: &Arc<dyn Registry>,
        member: Member,
        stats: Arc<Stats>,
        again: bool,
    ) -> Result<Option<Self>> {
        let Some(mut lease) = registry.node_lease() else { return Ok(None) };
        let begun = Instant::now();
        // A hung server of a registry with several may use up the first try.
        let mut tries = 0;
        let (first, trouble) = loop {
            tries += 1;
            let error = match lease.renew(&member, Instant::now() + LEASE_TIME - LEASE_TIME / 3) {
                Ok(lasts) => break (lasts, None),
                Err(error) => error,
            };
            let patience = match error.kind() {
                ErrorKind::Invalid => LEASE_TIME + NAME_WAIT_MARGIN,
                ErrorKind::Unavailable | ErrorKind::Timeout if again => ANNOUNCE_RETRY_PAUSE,
                ErrorKind::Unavailable | ErrorKind::Timeout => ENTRY_TIMEOUT,
                _ => Duration::ZERO,
            };
            if tries > 1 && begun.elapsed() >= patience || patience.is_zero() {
                if again && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
                    tracing::warn!("this node is not registered at {}: {error}; serving on", registry.description());
                    break (LEASE_TIME, Some((begun, error)));
                }
                let kind = match error.kind() {
                    kind @ (ErrorKind::Invalid | ErrorKind::PermissionDenied) => kind,
                    _ => ErrorKind::Unavailable,
                };
                let text = match kind {
                    ErrorKind::Invalid => error.message().to_owned(),
                    _ => format!("this node can't be registered at {}: {error}", registry.description()),
                };
                return Err(Error::new(kind, text));
            }
            if tries == 1 {
                tracing::warn!("{error}; retrying for {} s", patience.as_secs());
            }
            std::thread::sleep(ANNOUNCE_RETRY_PAUSE);
        };
        let shared = Arc::new(AnnouncerShared {
            registry: registry.description().to_owned(),
            inner: Mutex::new(AnnouncerState {
                member,
                changes: 0,
                announced_change: 0,
                pending: false,
                stop: false,
                failure: trouble,
            }),
            wake: Condvar::new(),
            stats,
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("announce".into())
            .spawn(move || of_thread.run_renewals(lease.as_mut(), first))
            .map_err(|e| Error::io("a thread for the registry", &e))?;
        Ok(Some(NodeAnnouncer { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Changes the registered member (its weight, for example) and sends the change soon.
    pub fn update_member(&self, change: impl FnOnce(&mut Member)) {
        self.shared.apply_change(change);
    }

    /// As [`NodeAnnouncer::update_member`], and waits until the registry has the change. Takes a change back that the registry
    /// does not have by `deadline`.
    ///
    /// # Errors
    /// Why the registry did not take the change in time.
    pub fn update_member_by(&self, deadline: Instant, change: impl FnOnce(&mut Member)) -> Result<()> {
        let before = self.member();
        let number = self.shared.apply_change(change);
        let mut inner = self.shared.inner.lock();
        while inner.announced_change < number && !inner.stop {
            if self.shared.wake.wait_until(&mut inner, deadline).timed_out() {
                break;
            }
        }
        if inner.announced_change >= number {
            return Ok(());
        }
        let why = inner.failure.as_ref().map_or_else(|| "it has not answered".to_owned(), |(_, e)| e.to_string());
        drop(inner);
        self.shared.apply_change(|member| *member = before);
        let what = format!("the registry {} did not take the change: {why}", self.shared.registry);
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// The member as registered.
    pub fn member(&self) -> Member {
        self.shared.inner.lock().member.clone()
    }

    /// Since when the registry lacks the name, and why; `None` while the registry has the name.
    pub fn registration_failure(&self) -> Option<(Instant, Error)> {
        self.shared.inner.lock().failure.clone()
    }

    /// Removes the name and stops; a second call does nothing.
    pub fn stop_announcing(&self) {
        self.shared.inner.lock().stop = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            // The thread ends within [`RELEASE_TIMEOUT`] plus the request under way.
            let _ = thread.join();
        }
    }
}

impl Drop for NodeAnnouncer {
    fn drop(&mut self) {
        self.stop_announcing();
    }
}

impl AnnouncerShared {
    /// Applies a change, wakes the sender and returns the number of the change.
    fn apply_change(&self, change: impl FnOnce(&mut Member)) -> u64 {
        let mut inner = self.inner.lock();
        change(&mut inner.member);
        inner.changes += 1;
        inner.pending = true;
        self.wake.notify_all();
        inner.changes
    }

    fn run_renewals(&self, lease: &mut dyn NodeLease, mut lasts: Duration) {
        loop {
            let (member, changes) = {
                let mut inner = self.inner.lock();
                let pause = if inner.failure.is_some() { ANNOUNCE_RETRY_PAUSE.min(lasts / 3) } else { lasts / 3 };
                let until = Instant::now() + pause;
                while !inner.stop && !inner.pending && !self.wake.wait_until(&mut inner, until).timed_out() {}
                if inner.stop {
                    drop(inner);
                    lease.release(Instant::now() + RELEASE_TIMEOUT);
                    return;
                }
                inner.pending = false;
                (inner.member.clone(), inner.changes)
            };
            // When a server does not answer, another must be tried before the lease ends.
            let result = lease.renew(&member, Instant::now() + lasts - lasts / 3);
            let now = Instant::now();
            let mut inner = self.inner.lock();
            match result {
                Ok(this) => {
                    lasts = this.max(ANNOUNCE_RETRY_PAUSE);
                    inner.announced_change = changes;
                    self.wake.notify_all();
                    if inner.failure.take().is_some() {
                        tracing::info!("this node is registered at {} again", self.registry);
                    }
                }
                Err(error) => {
                    if error.kind() == ErrorKind::Invalid {
                        self.stats.group.refused.add(1);
                    }
                    if !inner.failure.as_ref().is_some_and(|(_, old)| old.kind() == error.kind()) {
                        let registry = &self.registry;
                        tracing::warn!("this node is not registered at {registry}: {error}; serving on");
                    }
                    let since = inner.failure.as_ref().map_or(now, |(since, _)| *since);
                    inner.failure = Some((since, error));
                }
            }
            let lost_for = inner.failure.as_ref().map_or(0, |(since, _)| now.duration_since(*since).as_secs().max(1));
            self.stats.group.unlisted_seconds.set(lost_for);
        }
    }
}
