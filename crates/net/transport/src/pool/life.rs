//! Signs of life of a peer that owes answers: a peer that gives none is given up with all its channels, so that its
//! requests go to another one long before their deadlines. Who asks, and when, is for a thread above to decide.

use super::{ChannelPool, Entry, Inner, PoolState};
use spurline_proto::Request;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A connection that is closed at once is taken for a sign of life so many times in a row: what stands before a dead node, a
/// proxy or a balancer, closes what it accepts, too.
const MOST_CLOSED: usize = 3;

/// A peer that owes answers and was quiet; it has to be given back to [`ChannelPool::heard_of`].
#[derive(Debug, Clone, Copy)]
pub struct Owing {
    /// When it was last heard of, in microseconds of this pool.
    heard: u64,
}

impl ChannelPool {
    fn now(&self) -> u64 {
        self.born.elapsed().as_micros() as u64
    }

    /// A request begins to wait.
    pub(super) fn waits(&self) {
        if self.in_flight.fetch_add(1, Ordering::AcqRel) == 0 {
            // Silence counts from when there was something to answer.
            self.heard.store(self.now(), Ordering::Release);
        }
    }

    /// A request waits no longer.
    pub(super) fn waits_no_longer(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    /// Something came from the peer at `at`.
    pub(super) fn heard(&self, at: Instant) {
        self.heard.store(at.saturating_duration_since(self.born).as_micros() as u64, Ordering::Release);
    }

    /// Lets somebody else see to a peer that is silent for so long (`None`: nobody): from now on no request waits longer
    /// than that for a connection, or makes one to a peer whose silence was found out, until [`ChannelPool::revive`].
    pub fn watch(&self, silence: Option<Duration>) {
        self.watched.store(silence.map_or(0, |silence| silence.as_micros().max(1) as u64), Ordering::Release);
        if silence.is_none() {
            self.inner.lock().held = false;
        }
    }

    pub(super) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Acquire) > 0
    }

    /// How long a request waits for a connection of its own. A peer that stands still accepts one and does not greet.
    pub(super) fn patience_to_connect(&self) -> Duration {
        match self.watched.load(Ordering::Acquire) {
            0 => self.config.connect_timeout,
            silence => self.config.connect_timeout.min(Duration::from_micros(silence)),
        }
    }

    /// Looks at the idle channels and sends nothing: those that the peer ended are closed, and whether it can be reached is
    /// not known then, until somebody connects.
    pub fn look(&self) {
        let mut inner = self.inner.lock();
        // One that lives stands for all: what ends a peer ends all of them.
        if inner.idle.first_mut().is_some_and(|entry| entry.channel.probe()) {
            return;
        }
        let ended: Vec<_> = inner.idle.extract_if(.., |entry| !entry.channel.probe()).collect();
        inner.open -= ended.len();
        ended.iter().for_each(|entry| inner.forget(entry.number));
        // Where some are left, in use or idle, the peer is there as before.
        if inner.open == inner.connecting && inner.shown == Some(true) {
            inner.state = PoolState::Unknown;
            self.show(&mut inner, None);
        }
        drop(inner);
        self.changed.notify_all();
        drop(ended);
    }

    /// Closes what nobody used for `idle`, but for the channel used last: the peer has a place for so many connections only,
    /// and others may need them.
    pub fn close_idle(&self, idle: Duration) {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let last = inner.idle.iter().max_by_key(|entry| entry.idle_since).map(|entry| entry.number);
        let unused = |entry: &Entry| now.saturating_duration_since(entry.idle_since) >= idle;
        let closed: Vec<_> = inner.idle.extract_if(.., |entry| Some(entry.number) != last && unused(entry)).collect();
        inner.open -= closed.len();
        closed.iter().for_each(|entry| inner.forget(entry.number));
        drop(inner);
        // Not under the lock, which requests wait for.
        drop(closed);
    }

    /// The peer when it owes answers and nothing came from it for `silence`, and it is not being asked already.
    pub fn owing(&self, silence: Duration) -> Option<Owing> {
        let heard = self.heard.load(Ordering::Acquire);
        let quiet = self.in_flight.load(Ordering::Acquire) > 0
            && self.now().saturating_sub(heard) >= silence.as_micros() as u64;
        (quiet && !self.asking.swap(true, Ordering::AcqRel)).then_some(Owing { heard })
    }

    /// Whether the peer was given up, is to be asked again now, and is not being asked already.
    pub fn to_be_revived(&self) -> bool {
        let inner = self.inner.lock();
        let due = inner.held && inner.retry_at.is_none_or(|at| Instant::now() >= at);
        drop(inner);
        due && !self.asking.swap(true, Ordering::AcqRel)
    }

    /// Asks the peer for a sign of life over a connection of its own. That it has no place for one is a sign of life, too, but
    /// not again and again while it says nothing else.
    ///
    /// # Errors
    /// Why there is none.
    pub fn sign_of_life(&self, deadline: Instant) -> Result<()> {
        match self.greeted("", deadline) {
            Ok((mut channel, _)) => {
                channel.call(&Request::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
                self.closed.store(0, Ordering::Relaxed);
                Ok(())
            }
            // A node answers `Throttled` to those only who ask for data: this connection was closed.
            Err(error) if error.kind() == ErrorKind::Throttled => {
                if self.closed.fetch_add(1, Ordering::Relaxed) < MOST_CLOSED {
                    return Ok(());
                }
                Err(Error::new(ErrorKind::Unavailable, error.message()))
            }
            Err(error) => Err(error),
        }
    }

    /// What came of asking a peer that owed answers. Without a sign of life it is given up, unless something came from
    /// it meanwhile. Whether it was.
    pub fn heard_of(&self, owing: Owing, answer: &Result<()>) -> bool {
        let given_up = match answer {
            Ok(()) => {
                self.heard(Instant::now());
                false
            }
            Err(error) => self.heard.load(Ordering::Acquire) == owing.heard && self.give_up_peer(error),
        };
        self.asking.store(false, Ordering::Release);
        given_up
    }

    /// What came of asking a peer that was given up.
    pub fn revive(&self, answer: &Result<()>) {
        let mut inner = self.inner.lock();
        match answer {
            Ok(()) => {
                inner.held = false;
                inner.retry_at = None;
                inner.state = PoolState::Unknown;
            }
            Err(error) => self.went_down(&mut inner, error),
        }
        drop(inner);
        self.asking.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    /// Breaks off every request under way.
    fn give_up_peer(&self, why: &Error) -> bool {
        if !self.is_watched() {
            return false;
        }
        let mut inner = self.inner.lock();
        inner.breaks += 1;
        inner.held = true;
        inner.open -= inner.idle.len();
        let idle = std::mem::take(&mut inner.idle);
        let breakers = std::mem::take(&mut inner.breakers);
        self.went_down(&mut inner, why);
        drop(inner);
        // Those whose requests they are give them up.
        breakers.iter().for_each(|(_, breaker)| breaker.break_off());
        drop(idle);
        self.changed.notify_all();
        true
    }

    /// Notes that the peer can't be reached, and when it is to be tried again.
    pub(super) fn went_down(&self, inner: &mut Inner, error: &Error) {
        let failures = match inner.state {
            PoolState::Down { failures, .. } => failures.saturating_add(1),
            _ => 1,
        };
        let pause = self.config.retry_min.saturating_mul(1 << (failures - 1).min(16));
        inner.retry_at = Some(Instant::now() + pause.min(self.config.retry_max));
        inner.state = PoolState::Down { failures, error: error.clone() };
        self.show(inner, Some(false));
    }
}
