//! Keeps a node's name in a registry: enters it at the start, renews it on a thread of its own, gives it back at the
//! end. A registry that is gone is tried again for as long as the node lives.

use crate::{LEASE, Lease, Registry};
use parking_lot::{Condvar, Mutex};
use spurline_types::{Error, ErrorKind, Member, Result, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a node tries to enter its name at the start before it is an error.
const PATIENCE: Duration = Duration::from_secs(10);
/// A name may be held by the lease of a process that is gone; this much longer than a lease is waited for that.
const OVER: Duration = Duration::from_secs(5);
/// Between tries.
const PAUSE: Duration = Duration::from_secs(1);
/// Giving a name back takes no longer than this.
const GOODBYE: Duration = Duration::from_secs(2);

/// Keeps a node's name while it is kept.
pub struct Announcer {
    shared: Arc<Shared>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

struct Shared {
    registry: String,
    inner: Mutex<Inner>,
    wake: Condvar,
    stats: Arc<Stats>,
}

struct Inner {
    member: Member,
    /// How often `member` was changed, and the number of the last change that the registry has.
    changes: u64,
    told: u64,
    /// To be told at once.
    news: bool,
    stop: bool,
    /// Why the registry does not have the name now.
    trouble: Option<(Instant, Error)>,
}

impl Announcer {
    /// Enters `member` and keeps it entered; `None` where the registry lists nodes without being told.
    ///
    /// # Errors
    /// `Invalid` when another process has the name and keeps it, `Unavailable` when the registry can't be reached.
    pub fn start(registry: &Arc<dyn Registry>, member: Member, stats: Arc<Stats>) -> Result<Option<Self>> {
        Self::enter(registry, member, stats, false)
    }

    /// The same for a node that was in the group before: a registry that can't be reached is told when it can be, as
    /// mounts keep the node's place meanwhile.
    ///
    /// # Errors
    /// `Invalid` when another process has the name and keeps it, `PermissionDenied` when the registry refuses this one.
    pub fn start_again(registry: &Arc<dyn Registry>, member: Member, stats: Arc<Stats>) -> Result<Option<Self>> {
        Self::enter(registry, member, stats, true)
    }

    fn enter(registry: &Arc<dyn Registry>, member: Member, stats: Arc<Stats>, again: bool) -> Result<Option<Self>> {
        let Some(mut lease) = registry.lease() else { return Ok(None) };
        let begun = Instant::now();
        // Of a registry of several servers, one that hangs may take the first try.
        let mut tries = 0;
        let (first, trouble) = loop {
            tries += 1;
            let error = match lease.renew(&member, Instant::now() + LEASE - LEASE / 3) {
                Ok(lasts) => break (lasts, None),
                Err(error) => error,
            };
            let patience = match error.kind() {
                ErrorKind::Invalid => LEASE + OVER,
                ErrorKind::Unavailable | ErrorKind::Timeout if again => PAUSE,
                ErrorKind::Unavailable | ErrorKind::Timeout => PATIENCE,
                _ => Duration::ZERO,
            };
            if tries > 1 && begun.elapsed() >= patience || patience.is_zero() {
                if again && matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Timeout) {
                    tracing::warn!(
                        "the registry {} is not told of this node: {error}; serving on",
                        registry.describe()
                    );
                    break (LEASE, Some((begun, error)));
                }
                let kind = match error.kind() {
                    kind @ (ErrorKind::Invalid | ErrorKind::PermissionDenied) => kind,
                    _ => ErrorKind::Unavailable,
                };
                let text = match kind {
                    ErrorKind::Invalid => error.message().to_owned(),
                    _ => format!("the registry {} can't be told of this node: {error}", registry.describe()),
                };
                return Err(Error::new(kind, text));
            }
            if tries == 1 {
                tracing::warn!("{error}; trying on for {} s", patience.as_secs());
            }
            std::thread::sleep(PAUSE);
        };
        let shared = Arc::new(Shared {
            registry: registry.describe().to_owned(),
            inner: Mutex::new(Inner { member, changes: 0, told: 0, news: false, stop: false, trouble }),
            wake: Condvar::new(),
            stats,
        });
        let of_thread = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("announce".into())
            .spawn(move || of_thread.run(lease.as_mut(), first))
            .map_err(|e| Error::io("a thread for the registry", &e))?;
        Ok(Some(Announcer { shared, thread: Mutex::new(Some(thread)) }))
    }

    /// Changes what the registry is told (another weight, say), soon.
    pub fn set(&self, change: impl FnOnce(&mut Member)) {
        self.shared.change(change);
    }

    /// The same, and waits until the registry has it. When it is not told by `deadline` the change is taken back.
    ///
    /// # Errors
    /// Why the registry was not told in time.
    pub fn set_by(&self, deadline: Instant, change: impl FnOnce(&mut Member)) -> Result<()> {
        let before = self.member();
        let number = self.shared.change(change);
        let mut inner = self.shared.inner.lock();
        while inner.told < number && !inner.stop {
            if self.shared.wake.wait_until(&mut inner, deadline).timed_out() {
                break;
            }
        }
        if inner.told >= number {
            return Ok(());
        }
        let why = inner.trouble.as_ref().map_or_else(|| "it has not answered".to_owned(), |(_, e)| e.to_string());
        drop(inner);
        self.shared.change(|member| *member = before);
        let what = format!("the registry {} was not told: {why}", self.shared.registry);
        Err(Error::new(ErrorKind::Unavailable, what))
    }

    /// What the registry is told.
    pub fn member(&self) -> Member {
        self.shared.inner.lock().member.clone()
    }

    /// Since when the registry does not have the name, and why; `None` while it has.
    pub fn trouble(&self) -> Option<(Instant, Error)> {
        self.shared.inner.lock().trouble.clone()
    }

    /// Gives the name back and ends; a second time nothing happens.
    pub fn end(&self) {
        self.shared.inner.lock().stop = true;
        self.shared.wake.notify_all();
        if let Some(thread) = self.thread.lock().take() {
            // It ends within GOODBYE and the answer under way.
            let _ = thread.join();
        }
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        self.end();
    }
}

impl Shared {
    /// Makes a change and has the registry told of it; answers its number.
    fn change(&self, change: impl FnOnce(&mut Member)) -> u64 {
        let mut inner = self.inner.lock();
        change(&mut inner.member);
        inner.changes += 1;
        inner.news = true;
        self.wake.notify_all();
        inner.changes
    }

    fn run(&self, lease: &mut dyn Lease, mut lasts: Duration) {
        loop {
            let (member, changes) = {
                let mut inner = self.inner.lock();
                let pause = if inner.trouble.is_some() { PAUSE.min(lasts / 3) } else { lasts / 3 };
                let until = Instant::now() + pause;
                while !inner.stop && !inner.news && !self.wake.wait_until(&mut inner, until).timed_out() {}
                if inner.stop {
                    drop(inner);
                    lease.release(Instant::now() + GOODBYE);
                    return;
                }
                inner.news = false;
                (inner.member.clone(), inner.changes)
            };
            // Another server has to have its turn before the lease is over, when one does not answer.
            let result = lease.renew(&member, Instant::now() + lasts - lasts / 3);
            let now = Instant::now();
            let mut inner = self.inner.lock();
            match result {
                Ok(this) => {
                    lasts = this.max(PAUSE);
                    inner.told = changes;
                    self.wake.notify_all();
                    if inner.trouble.take().is_some() {
                        tracing::info!("the registry {} has this node again", self.registry);
                    }
                }
                Err(error) => {
                    if error.kind() == ErrorKind::Invalid {
                        self.stats.group.refused.add(1);
                    }
                    let same = |(_, old): &(Instant, Error)| old.kind() == error.kind();
                    if !inner.trouble.as_ref().is_some_and(same) {
                        let registry = &self.registry;
                        tracing::warn!("the registry {registry} is not told of this node: {error}; serving on");
                    }
                    let since = inner.trouble.as_ref().map_or(now, |(since, _)| *since);
                    inner.trouble = Some((since, error));
                }
            }
            let lost_for = inner.trouble.as_ref().map_or(0, |(since, _)| now.duration_since(*since).as_secs().max(1));
            self.stats.group.unlisted_seconds.set(lost_for);
        }
    }
}
