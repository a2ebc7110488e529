//! The path that requests connect themselves (TCP): idle channels are used first, new ones made as needed, and
//! attempts to reach a failed peer are spaced out. Time comes from the caller's deadline and the clock of the waits.

use super::{PathEntry, PathPool, PathPoolState, PathSlot, PathSpec, next_random};
use crate::channel_lease::{BegunCall, ChannelLease, ChannelLoss};
use crate::channel_set::PooledChannel;
use crate::path_liveness::LastHeard;
use crate::{Channel, Connector, PathPhase, PathState, PathTiming};
use parking_lot::MutexGuard;
use spurline_proto::{HelloRequest, NodeRequest, WelcomeAnswer};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A connection that is closed at once counts as a heartbeat answer this many times in a row. A proxy or load balancer
/// in front of a dead node closes accepted connections, too.
const MAX_CLOSED_HEARTBEATS: usize = 3;

/// Limits and timing of a path on demand.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// Limit of connections (`--nconnect`).
    pub nconnect: usize,
    /// Timeout of a connection attempt including its handshake.
    pub connect_timeout: Duration,
    /// Pause after the first failed attempt; it doubles up to `retry_max`.
    pub retry_min: Duration,
    /// The longest pause between attempts to reach a failed peer.
    pub retry_max: Duration,
    /// Channels idle for longer are probed before use.
    pub probe_after: Duration,
    /// Seed of the choice among idle channels.
    pub seed: u64,
}

impl Default for PoolConfig {
    fn default() -> Self {
        PoolConfig {
            nconnect: 8,
            connect_timeout: Duration::from_secs(3),
            retry_min: Duration::from_millis(100),
            retry_max: Duration::from_secs(2),
            probe_after: Duration::from_secs(1),
            seed: 0x5eed,
        }
    }
}

/// Whether the peer can be reached on demand, as far as is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PoolState {
    /// Not tried yet, or a channel broke and no new one was made since.
    Unknown,
    /// The last attempt to connect succeeded.
    Up,
    /// Connecting failed `failures` times in a row, last with this error.
    Down {
        /// Failed attempts in a row.
        failures: u32,
        /// The last error.
        error: Error,
    },
}

/// A peer with requests in flight and no bytes received for a while; pass it back to [`PathPool::heartbeat_ended`].
#[derive(Debug, Clone, Copy)]
pub struct OverduePeer(LastHeard);

/// How requests connect.
pub(super) struct OnDemand {
    connector: Arc<dyn Connector>,
    peer_name: String,
    source: String,
    config: PoolConfig,
    /// The peer's last known process number; 0 when unknown.
    process: AtomicU64,
    /// Consecutive heartbeats that ended with a closed connection and no other answer.
    closed_heartbeats: AtomicUsize,
    /// The silence after which the monitor sends a heartbeat, in microseconds; 0 where there is no monitor.
    monitored_silence: AtomicU64,
}

impl OnDemand {
    /// Opens a connection for `source`. The error is `Throttled` when the peer runs but is at its connection limit.
    fn connect_and_handshake(&self, source: &str, deadline: Instant) -> Result<(Box<dyn Channel>, WelcomeAnswer)> {
        let process = self.process.load(Ordering::Relaxed);
        self.connector.connect_and_handshake(&HelloRequest::new(&self.peer_name, source), process, deadline)
    }

    fn is_monitored(&self) -> bool {
        self.monitored_silence.load(Ordering::Acquire) > 0
    }

    /// How long a request waits for a connection of its own. A suspended peer accepts one and completes no handshake.
    fn connect_patience(&self) -> Duration {
        match self.monitored_silence.load(Ordering::Acquire) {
            0 => self.config.connect_timeout,
            silence => self.config.connect_timeout.min(Duration::from_micros(silence)),
        }
    }

    /// The peer answered something other than by closing a connection.
    pub fn peer_answered(&self) {
        self.closed_heartbeats.store(0, Ordering::Relaxed);
    }
}

/// What the lock protects beside the path's slot.
#[derive(Default)]
pub(super) struct DemandState {
    /// Connection attempts in progress.
    connecting: usize,
    /// Total time of connection attempts that were cut short by their callers' deadlines.
    waited: Duration,
    /// The peer is at its connection limit: until then the existing channels must suffice.
    full_until: Option<Instant>,
    /// The state shown by the gauges of this peer: `Some(true)` up, `Some(false)` down.
    shown: Option<bool>,
}

impl DemandState {
    pub fn take_shown(&mut self) -> Option<bool> {
        self.shown.take()
    }
}

impl PathPool {
    /// A pool with a path on demand alone. Its handshakes contain `peer_name` and `source` (empty: none).
    pub fn on_demand(
        connector: Arc<dyn Connector>,
        peer_name: &str,
        source: &str,
        config: PoolConfig,
        stats: Arc<Stats>,
    ) -> Self {
        let kind = connector.kind();
        let peer = connector.peer().to_owned();
        let config = PoolConfig { nconnect: config.nconnect.max(1), ..config };
        let (timing, wake) = (PathTiming::default(), Arc::default());
        let mut pool = PathPool::new(&peer, Vec::new(), config.nconnect, timing, config.seed, Arc::clone(&stats), wake);
        let counters = stats.paths.path_stats(&peer, &kind.to_string(), &kind.to_string());
        pool.paths.push(PathEntry::new(PathSpec { name: kind.to_string(), kind, local: 0, speed_mbit: 1 }, counters));
        let state = PathState::on_demand(config.retry_min, config.retry_max);
        pool.inner.get_mut().slots.push(PathSlot::new(state, config.nconnect));
        pool.on_demand = Some(OnDemand {
            connector,
            peer_name: peer_name.to_owned(),
            source: source.to_owned(),
            config,
            process: AtomicU64::new(0),
            closed_heartbeats: AtomicUsize::new(0),
            monitored_silence: AtomicU64::new(0),
        });
        pool
    }

    /// Whether the peer can be reached on demand, as far as is known.
    pub fn state(&self) -> PoolState {
        let mut inner = self.inner.lock();
        let Some(slot) = self.demand_slot(&mut inner) else { return PoolState::Unknown };
        match (slot.state.phase(), slot.state.failure()) {
            (_, Some((error, failures))) => PoolState::Down { failures, error: error.clone() },
            (PathPhase::Up, _) => PoolState::Up,
            _ => PoolState::Unknown,
        }
    }

    /// Current number of connections on demand.
    pub fn open_count(&self) -> usize {
        self.demand_slot(&mut self.inner.lock()).map_or(0, |slot| slot.channels.open_count())
    }

    /// Sets the process that the peer is expected to be, the number in its [`WelcomeAnswer`]; 0 accepts any.
    pub fn expect_process(&self, process: u64) {
        self.on_demand.iter().for_each(|dial| dial.process.store(process, Ordering::Relaxed));
    }

    /// Takes an idle channel on demand, or a new one while there are fewer than `nconnect` and the peer has a slot for
    /// it, or waits for one.
    ///
    /// # Errors
    /// At once with the last error when the peer is down and no attempt is due; with the attempt's own error when this
    /// call made it and there is no channel to wait for; `Timeout` when every channel was in use until `deadline`.
    pub fn checkout(&self, deadline: Instant) -> Result<ChannelLease<'_>> {
        self.take_channel(deadline, true)
    }

    /// [`PathPool::checkout`]; without `waits` it does not wait for channels in use.
    fn take_channel(&self, deadline: Instant, waits: bool) -> Result<ChannelLease<'_>> {
        let Some(dial) = &self.on_demand else {
            return Err(Error::new(ErrorKind::Unavailable, format!("{}: no path on demand", self.peer)));
        };
        let path = self.background();
        let mut inner = self.inner.lock();
        loop {
            while let Some(mut channel) = inner.take_warm(path) {
                let slot = &mut inner.slots[path];
                if slot.channels.check_usable(&mut channel, dial.config.probe_after) {
                    self.request_began(path);
                    return Ok(ChannelLease::new(self, path, channel, true));
                }
                slot.channels.discount(&channel);
                slot.state.mark_unknown(self.now());
            }
            let now = Instant::now();
            let mut until = deadline;
            let open = inner.slots[path].channels.open_count();
            if let Some(full_until) = inner.saturated_until(path, now) {
                until = until.min(full_until);
            } else if open + inner.demand.connecting < dial.config.nconnect {
                let (state, demand) = (&inner.slots[path].state, &inner.demand);
                let connects = match (state.phase(), state.failure()) {
                    (PathPhase::Up, _) if demand.full_until.is_none() => true,
                    (_, Some(_)) if demand.connecting == 0 && state.retry_due(self.now()) => true,
                    // Existing channels may still work; without any, a request does not wait for a failed peer.
                    (_, Some((error, _))) if open == 0 => return Err(error.clone()),
                    (_, Some(_)) => false,
                    // One attempt at a time finds out whether the peer is reachable and has a free slot.
                    _ => demand.connecting == 0,
                };
                if connects {
                    if let Some(lease) = self.connect_channel(dial, inner, deadline)? {
                        return Ok(lease);
                    }
                    inner = self.inner.lock();
                    // A channel may have been returned meanwhile.
                    if waits && now < deadline {
                        continue;
                    }
                }
            }
            if !waits || (self.changed.wait_until(&mut inner, until).timed_out() && until == deadline) {
                let remedy = match inner.demand.full_until {
                    Some(_) => {
                        ", and it is at its connection limit: raise its limit of open files, lower the --nconnect of mounts,"
                    }
                    None => "; raise --nconnect",
                };
                let why = format!(
                    "{}: all {} connections were in use until the deadline{remedy} or find out why answers are slow",
                    self.peer,
                    inner.slots[path].channels.open_count() + inner.demand.connecting
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Sends a request on a channel of its own and returns. `None` when that would have to wait for a channel, when
    /// answers can't stay in the connection, or when it failed: a pipelined request can be repeated.
    pub fn begin_call<'r>(
        &self,
        request: impl FnOnce(&WelcomeAnswer) -> NodeRequest<'r>,
        deadline: Instant,
    ) -> Option<BegunCall> {
        let dial = self.on_demand.as_ref()?;
        {
            let inner = self.inner.lock();
            let path = self.background();
            let slot = &inner.slots[path];
            let may_connect = slot.channels.open_count() + inner.demand.connecting < dial.config.nconnect
                && slot.state.phase() == PathPhase::Up
                && inner.saturated_until(path, Instant::now()).is_none();
            if !slot.channels.has_idle() && !may_connect {
                return None;
            }
        }
        let lease = self.take_channel(deadline, false).ok()?;
        let request = request(lease.welcome());
        lease.begin_call(&request, deadline)
    }

    /// The channel of a request sent by [`PathPool::begin_call`]; [`ChannelLease::finish_call`] receives its answer.
    pub fn resume_call(&self, begun: BegunCall) -> ChannelLease<'_> {
        let path = self.background();
        self.request_began(path);
        ChannelLease::new(self, path, begun.0, true)
    }

    /// Abandons a request sent by [`PathPool::begin_call`] and closes its channel, which may contain the answer.
    pub fn abandon_call(&self, begun: BegunCall) {
        self.inner.lock().slots[self.background()].channels.discount(&begun.0);
        drop(begun);
        self.changed.notify_all();
    }

    /// Makes a channel; `None` when the peer is at its connection limit and the existing channels must suffice.
    fn connect_channel<'a>(
        &'a self,
        dial: &OnDemand,
        mut inner: MutexGuard<'a, PathPoolState>,
        deadline: Instant,
    ) -> Result<Option<ChannelLease<'a>>> {
        let path = self.background();
        inner.demand.connecting += 1;
        drop(inner);
        let (started, patience) = (Instant::now(), dial.connect_patience());
        let until = deadline.min(started + patience);
        let made = dial.connect_and_handshake(&dial.source, until);
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        inner.demand.connecting -= 1;
        let result = match made {
            Ok((channel, welcome)) => {
                self.stats.remotecache.connects.add(1);
                let slot = &mut inner.slots[path];
                slot.state.mark_up(self.now());
                let channel = slot.channels.admit_channel(channel, Arc::new(welcome));
                (inner.demand.waited, inner.demand.full_until) = (Duration::ZERO, None);
                self.show_gauge(&mut inner.demand, Some(true));
                dial.peer_answered();
                self.request_began(path);
                Ok(Some(ChannelLease::new(self, path, channel, false)))
            }
            Err(error) => {
                let slot = &mut inner.slots[path];
                let in_vain = error.kind() == ErrorKind::Timeout;
                // A peer at its connection limit still serves its existing channels.
                let full = error.kind() == ErrorKind::Throttled && slot.channels.open_count() > 0;
                inner.demand.full_until = full.then(|| Instant::now() + dial.config.retry_max);
                if in_vain && until == deadline {
                    inner.demand.waited += started.elapsed();
                }
                // One caller without time for an attempt proves nothing about the peer, many such callers do.
                if !full && (!in_vain || until < deadline || inner.demand.waited >= patience) {
                    inner.demand.waited = Duration::ZERO;
                    // After a timeout the next attempt is left to the monitor.
                    if in_vain && dial.is_monitored() {
                        slot.state.hold_down(true);
                    }
                    self.mark_down(inner, &error);
                }
                if full { Ok(None) } else { Err(error) }
            }
        };
        drop(guard);
        self.changed.notify_all();
        result
    }

    /// Accounts for a channel on demand that is dropped after its call; returns further ones to drop.
    pub(super) fn drop_on_demand(
        &self,
        inner: &mut PathPoolState,
        channel: &PooledChannel,
        loss: ChannelLoss,
    ) -> Vec<PooledChannel> {
        let Some(slot) = self.demand_slot(inner) else { return Vec::new() };
        slot.channels.discount(channel);
        if matches!(loss, ChannelLoss::Broke | ChannelLoss::Silent) {
            slot.channels.count_break();
            slot.state.mark_unknown(self.now());
        }
        // A silent peer is silent on all its connections, which idle ones do not show. A new connection's handshake
        // does.
        if loss == ChannelLoss::Silent { slot.channels.take_idle() } else { Vec::new() }
    }

    /// Sets the gauges to up, down or neither.
    fn show_gauge(&self, demand: &mut DemandState, up: Option<bool>) {
        let shown = std::mem::replace(&mut demand.shown, up);
        self.update_gauges(shown, up);
    }

    /// Nodes use one pool per source for a peer; the gauges count a peer once.
    pub(super) fn update_gauges(&self, shown: Option<bool>, now: Option<bool>) {
        let Some(path) = self.demand_entry() else { return };
        path.counters.report_state(shown, now, |before, combined| {
            let gauges = &self.stats.remotecache;
            let of = |up: bool| if up { &gauges.peers_up } else { &gauges.peers_down };
            if let Some(up) = before {
                of(up).sub(1);
            }
            if let Some(up) = combined {
                of(up).add(1);
            }
        });
    }

    /// Marks the peer as unreachable on demand and schedules the next attempt.
    fn mark_down(&self, inner: &mut PathPoolState, error: &Error) {
        if let Some(slot) = self.demand_slot(inner) {
            slot.state.mark_failed(self.now(), error, 0);
        }
        self.show_gauge(&mut inner.demand, Some(false));
    }

    // Called by the path monitor.

    /// Leaves a peer that is silent for this long to a monitor (`None`: no monitor). From now on no request waits
    /// longer than that for a connection, or connects to a silent peer before [`PathPool::revival_ended`].
    pub fn set_monitored(&self, silence: Option<Duration>) {
        let Some(dial) = &self.on_demand else { return };
        let micros = silence.map_or(0, |silence| silence.as_micros().max(1) as u64);
        dial.monitored_silence.store(micros, Ordering::Release);
        if silence.is_none() {
            let mut inner = self.inner.lock();
            self.demand_slot(&mut inner).into_iter().for_each(|slot| slot.state.hold_down(false));
        }
    }

    /// The peer, if it has requests in flight on demand, sent nothing for `silence`, and no heartbeat is in progress.
    pub fn overdue_peer(&self, silence: Duration) -> Option<OverduePeer> {
        self.demand_entry()?.liveness.claim_overdue(self.now(), silence).map(OverduePeer)
    }

    /// Whether the peer is held down, an attempt is due, and no heartbeat is in progress.
    pub fn revival_due(&self) -> bool {
        let revival_due = |slot: &mut PathSlot| slot.state.revival_due(self.now());
        let due = self.demand_slot(&mut self.inner.lock()).is_some_and(revival_due);
        due && self.demand_entry().is_some_and(|path| path.liveness.claim_heartbeat())
    }

    /// Sends the peer a heartbeat over a connection of its own. A peer at its connection limit counts as alive, but
    /// only a limited number of times in a row.
    ///
    /// # Errors
    /// Why there was no answer.
    pub fn send_heartbeat(&self, deadline: Instant) -> Result<()> {
        let Some(dial) = &self.on_demand else { return Ok(()) };
        match dial.connect_and_handshake("", deadline) {
            Ok((mut channel, _)) => {
                channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
                dial.peer_answered();
                Ok(())
            }
            // A node answers `Throttled` only to handshakes for data, so this connection was closed.
            Err(error) if error.kind() == ErrorKind::Throttled => {
                if dial.closed_heartbeats.fetch_add(1, Ordering::Relaxed) < MAX_CLOSED_HEARTBEATS {
                    return Ok(());
                }
                Err(Error::new(ErrorKind::Unavailable, error.message()))
            }
            Err(error) => Err(error),
        }
    }

    /// Reports the result of the heartbeat for an overdue peer. Without an answer the peer is marked as failed, unless
    /// bytes arrived meanwhile. Returns whether it was.
    pub fn heartbeat_ended(&self, overdue: OverduePeer, answer: &Result<()>) -> bool {
        let Some(path) = self.demand_entry() else { return false };
        let failed = match answer {
            Ok(()) => {
                path.liveness.bytes_arrived(self.now());
                false
            }
            Err(error) => path.liveness.last_heard() == overdue.0 && self.fail_peer(error),
        };
        path.liveness.release_heartbeat();
        failed
    }

    /// Reports the result of the heartbeat for a peer that is held down.
    pub fn revival_ended(&self, answer: &Result<()>) {
        let Some(path) = self.demand_entry() else { return };
        let mut inner = self.inner.lock();
        match (answer, self.demand_slot(&mut inner)) {
            (Ok(()), Some(slot)) => slot.state.revived(self.now()),
            (Err(error), _) => self.mark_down(&mut inner, error),
            _ => {}
        }
        drop(inner);
        path.liveness.release_heartbeat();
        self.changed.notify_all();
    }

    /// The slot of the path on demand, which is the last one.
    fn demand_slot<'a>(&self, inner: &'a mut PathPoolState) -> Option<&'a mut PathSlot> {
        self.on_demand.as_ref().and_then(|_| inner.slots.last_mut())
    }

    fn demand_entry(&self) -> Option<&PathEntry> {
        self.paths.last().filter(|_| self.on_demand.is_some())
    }

    /// Interrupts every request in flight on demand.
    fn fail_peer(&self, why: &Error) -> bool {
        if !self.on_demand.as_ref().is_some_and(OnDemand::is_monitored) {
            return false;
        }
        let mut inner = self.inner.lock();
        let remains = self.demand_slot(&mut inner).map(|slot| {
            slot.state.hold_down(true);
            slot.channels.clear()
        });
        self.mark_down(&mut inner, why);
        drop(inner);
        drop(remains);
        self.changed.notify_all();
        true
    }

    /// Accounts for idle channels on demand that the peer closed: whether it is reachable is then unknown, unless it
    /// has channels left.
    pub(super) fn idle_ended_on_demand(&self, inner: &mut PathPoolState) {
        let Some(slot) = self.demand_slot(inner) else { return };
        if slot.channels.open_count() == 0 {
            slot.state.mark_unknown(self.now());
            if inner.demand.shown == Some(true) {
                self.show_gauge(&mut inner.demand, None);
            }
        }
    }
}

impl PathPoolState {
    fn take_warm(&mut self, path: usize) -> Option<PooledChannel> {
        let PathPoolState { slots, random, .. } = self;
        slots[path].channels.take_warm(|| next_random(random))
    }

    /// Until when the existing channels must suffice because the peer is at its connection limit.
    fn saturated_until(&self, path: usize, now: Instant) -> Option<Instant> {
        let has_channels = self.slots[path].channels.open_count() > 0;
        self.demand.full_until.filter(|until| has_channels && now < *until)
    }
}
