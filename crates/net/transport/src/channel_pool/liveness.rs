//! Heartbeats of a peer with requests in flight. A peer that answers none is marked as failed with all its channels,
//! so that its requests go to another one long before their deadlines. The monitor thread above decides when to send
//! one.

use super::{ChannelPool, ChannelTable, PoolState, PooledChannel};
use spurline_proto::NodeRequest;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A connection that is closed at once counts as a heartbeat answer this many times in a row. A proxy or load
/// balancer in front of a dead node closes accepted connections, too.
const MAX_CLOSED_HEARTBEATS: usize = 3;

/// A peer with requests in flight and no bytes received for a while; pass it back to
/// [`ChannelPool::heartbeat_ended`].
#[derive(Debug, Clone, Copy)]
pub struct OverduePeer {
    /// When bytes last arrived, in microseconds of this pool.
    last_heard: u64,
}

impl ChannelPool {
    fn now_us(&self) -> u64 {
        self.born.elapsed().as_micros() as u64
    }

    /// A request starts waiting.
    pub(super) fn request_began(&self) {
        if self.in_flight.fetch_add(1, Ordering::AcqRel) == 0 {
            // Silence counts from the first pending request.
            self.last_heard.store(self.now_us(), Ordering::Release);
        }
    }

    /// A request stops waiting.
    pub(super) fn request_ended(&self) {
        self.in_flight.fetch_sub(1, Ordering::AcqRel);
    }

    /// Bytes arrived from the peer at `at`.
    pub(super) fn record_heard(&self, at: Instant) {
        self.last_heard.store(at.saturating_duration_since(self.born).as_micros() as u64, Ordering::Release);
    }

    /// Leaves a peer that is silent for this long to a monitor (`None`: no monitor). From now on no request waits
    /// longer than that for a connection, or connects to a silent peer before [`ChannelPool::revival_ended`].
    pub fn set_monitored(&self, silence: Option<Duration>) {
        self.monitored_silence.store(silence.map_or(0, |silence| silence.as_micros().max(1) as u64), Ordering::Release);
        if silence.is_none() {
            self.inner.lock().held_down = false;
        }
    }

    pub(super) fn is_monitored(&self) -> bool {
        self.monitored_silence.load(Ordering::Acquire) > 0
    }

    /// How long a request waits for a connection of its own. A suspended peer accepts one and completes no handshake.
    pub(super) fn connect_patience(&self) -> Duration {
        match self.monitored_silence.load(Ordering::Acquire) {
            0 => self.config.connect_timeout,
            silence => self.config.connect_timeout.min(Duration::from_micros(silence)),
        }
    }

    /// Probes the idle channels without sending anything. Closes those that the peer ended; whether the peer is
    /// reachable is then unknown until the next connection.
    pub fn check_idle(&self) {
        let mut inner = self.inner.lock();
        // One live channel proves the peer alive: its end closes all of them.
        if inner.idle.first_mut().is_some_and(|entry| entry.channel.looks_alive()) {
            return;
        }
        let ended: Vec<_> = inner.idle.extract_if(.., |entry| !entry.channel.looks_alive()).collect();
        inner.open -= ended.len();
        ended.iter().for_each(|entry| inner.forget_breaker(entry.number));
        // If channels are left, in use or idle, the peer counts as up.
        if inner.open == inner.connecting && inner.shown == Some(true) {
            inner.state = PoolState::Unknown;
            self.show_gauge(&mut inner, None);
        }
        drop(inner);
        self.changed.notify_all();
        drop(ended);
    }

    /// Closes channels unused for `idle`, except the most recently used one: the peer has a limited number of
    /// connection slots.
    pub fn close_idle(&self, idle: Duration) {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let last = inner.idle.iter().max_by_key(|entry| entry.idle_since).map(|entry| entry.number);
        let unused = |entry: &PooledChannel| now.saturating_duration_since(entry.idle_since) >= idle;
        let closed: Vec<_> = inner.idle.extract_if(.., |entry| Some(entry.number) != last && unused(entry)).collect();
        inner.open -= closed.len();
        closed.iter().for_each(|entry| inner.forget_breaker(entry.number));
        drop(inner);
        // Not under the lock, which requests wait for.
        drop(closed);
    }

    /// The peer, if it has requests in flight, sent nothing for `silence`, and no heartbeat is in progress.
    pub fn overdue_peer(&self, silence: Duration) -> Option<OverduePeer> {
        let heard = self.last_heard.load(Ordering::Acquire);
        let quiet = self.in_flight.load(Ordering::Acquire) > 0
            && self.now_us().saturating_sub(heard) >= silence.as_micros() as u64;
        (quiet && !self.heartbeat_running.swap(true, Ordering::AcqRel)).then_some(OverduePeer { last_heard: heard })
    }

    /// Whether the peer is marked as failed, an attempt is due, and no heartbeat is in progress.
    pub fn revival_due(&self) -> bool {
        let inner = self.inner.lock();
        let due = inner.held_down && inner.retry_at.is_none_or(|at| Instant::now() >= at);
        drop(inner);
        due && !self.heartbeat_running.swap(true, Ordering::AcqRel)
    }

    /// Sends the peer a heartbeat over a connection of its own. A peer at its connection limit counts as alive, but
    /// only a limited number of times in a row.
    ///
    /// # Errors
    /// Why there was no answer.
    pub fn send_heartbeat(&self, deadline: Instant) -> Result<()> {
        match self.connect_and_handshake("", deadline) {
            Ok((mut channel, _)) => {
                channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
                self.closed_heartbeats.store(0, Ordering::Relaxed);
                Ok(())
            }
            // A node answers `Throttled` only to handshakes for data, so this connection was closed.
            Err(error) if error.kind() == ErrorKind::Throttled => {
                if self.closed_heartbeats.fetch_add(1, Ordering::Relaxed) < MAX_CLOSED_HEARTBEATS {
                    return Ok(());
                }
                Err(Error::new(ErrorKind::Unavailable, error.message()))
            }
            Err(error) => Err(error),
        }
    }

    /// Reports the result of the heartbeat for an overdue peer. Without an answer the peer is marked as failed,
    /// unless bytes arrived meanwhile. Returns whether it was.
    pub fn heartbeat_ended(&self, owing: OverduePeer, answer: &Result<()>) -> bool {
        let given_up = match answer {
            Ok(()) => {
                self.record_heard(Instant::now());
                false
            }
            Err(error) => self.last_heard.load(Ordering::Acquire) == owing.last_heard && self.fail_peer(error),
        };
        self.heartbeat_running.store(false, Ordering::Release);
        given_up
    }

    /// Reports the result of the heartbeat for a failed peer.
    pub fn revival_ended(&self, answer: &Result<()>) {
        let mut inner = self.inner.lock();
        match answer {
            Ok(()) => {
                inner.held_down = false;
                inner.retry_at = None;
                inner.state = PoolState::Unknown;
            }
            Err(error) => self.mark_down(&mut inner, error),
        }
        drop(inner);
        self.heartbeat_running.store(false, Ordering::Release);
        self.changed.notify_all();
    }

    /// Interrupts every request in flight.
    fn fail_peer(&self, why: &Error) -> bool {
        if !self.is_monitored() {
            return false;
        }
        let mut inner = self.inner.lock();
        inner.breaks += 1;
        inner.held_down = true;
        inner.open -= inner.idle.len();
        let idle = std::mem::take(&mut inner.idle);
        let breakers = std::mem::take(&mut inner.breakers);
        self.mark_down(&mut inner, why);
        drop(inner);
        // The interrupted calls drop their own channels.
        breakers.iter().for_each(|(_, breaker)| breaker.break_channel());
        drop(idle);
        self.changed.notify_all();
        true
    }

    /// Marks the peer as unreachable and schedules the next attempt.
    pub(super) fn mark_down(&self, inner: &mut ChannelTable, error: &Error) {
        let failures = match inner.state {
            PoolState::Down { failures, .. } => failures.saturating_add(1),
            _ => 1,
        };
        let pause = self.config.retry_min.saturating_mul(1 << (failures - 1).min(16));
        inner.retry_at = Some(Instant::now() + pause.min(self.config.retry_max));
        inner.state = PoolState::Down { failures, error: error.clone() };
        self.show_gauge(inner, Some(false));
    }
}
