//! The path to a peer that requests connect themselves (TCP): idle channels are used first, new channels made as needed, and
//! attempts to reach a failed peer are spaced out. Time comes from the caller's deadline and the clock of the waits. Knows no
//! rails, and makes no choice of paths: the caller decides when requests come here.

use crate::channel_lease::{BegunCall, ChannelLease, ChannelLoss, ChannelOwner};
use crate::channel_set::{ChannelSet, ChannelUser, PathEnds, PooledChannel, next_random};
use crate::path_liveness::{LastHeard, PathLiveness};
use crate::peer_reach::{PeerReach, ReachState};
use crate::{Channel, Connector};
use parking_lot::{Condvar, Mutex, MutexGuard};
use spurline_proto::{HelloRequest, NodeRequest, WelcomeAnswer};
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A connection that is closed at once counts as a heartbeat answer this many times in a row. A proxy or load balancer
/// in front of a dead node closes accepted connections, too.
const MAX_CLOSED_HEARTBEATS: usize = 3;

/// Limits and timing of connections on demand.
#[derive(Debug, Clone)]
pub struct DemandConfig {
    /// Limit of connections (`--nconnect`).
    pub nconnect: usize,
    /// Timeout of a connection attempt including the handshake.
    pub connect_timeout: Duration,
    /// Pause after the first failed attempt; doubles up to `retry_max`.
    pub retry_min: Duration,
    /// The longest pause between attempts to reach a failed peer.
    pub retry_max: Duration,
    /// Channels idle for longer are probed before use.
    pub probe_after: Duration,
    /// Seed of the choice among idle channels.
    pub seed: u64,
}

impl Default for DemandConfig {
    fn default() -> Self {
        DemandConfig {
            nconnect: 8,
            connect_timeout: Duration::from_secs(3),
            retry_min: Duration::from_millis(100),
            retry_max: Duration::from_secs(2),
            probe_after: Duration::from_secs(1),
            seed: 0x5eed,
        }
    }
}

/// A peer with requests in flight and no bytes received for a while; to be passed back to [`DemandPool::heartbeat_ended`].
#[derive(Debug, Clone, Copy)]
pub struct OverduePeer(LastHeard);

/// The path to a peer that requests connect when necessary. There is a single path, with index 0 in leases.
pub struct DemandPool {
    connector: Arc<dyn Connector>,
    peer: String,
    /// This side's name in handshakes.
    own_name: String,
    /// The source in handshakes; empty for none.
    source: String,
    config: DemandConfig,
    stats: Arc<Stats>,
    counters: Arc<PathStats>,
    liveness: PathLiveness,
    started: Instant,
    /// The peer's last known process number; 0 when unknown.
    process: AtomicU64,
    /// Consecutive heartbeats that ended with a closed connection and no other answer.
    closed_heartbeats: AtomicUsize,
    /// The silence after which the monitor sends a heartbeat, in microseconds; 0 where there is no monitor.
    monitored_silence: AtomicU64,
    inner: Mutex<DemandPoolState>,
    changed: Condvar,
}

/// The part under the lock.
struct DemandPoolState {
    reach: ReachState,
    channels: ChannelSet,
    random: u64,
    /// Connection attempts in progress.
    connecting: usize,
    /// Total time of connection attempts that were cut short by the callers' deadlines.
    waited: Duration,
    /// The peer is at the connection limit: until then the existing channels must suffice.
    full_until: Option<Instant>,
    /// The state shown by the gauges of this peer: `Some(true)` up, `Some(false)` down.
    shown: Option<bool>,
}

impl DemandPool {
    /// Without any connection yet. Handshakes contain `own_name` and `source` (empty: none).
    pub fn new(
        connector: Arc<dyn Connector>,
        own_name: &str,
        source: &str,
        config: DemandConfig,
        stats: Arc<Stats>,
    ) -> Self {
        let peer = connector.peer().to_owned();
        let config = DemandConfig { nconnect: config.nconnect.max(1), ..config };
        let kind = connector.kind().to_string();
        let inner = DemandPoolState {
            reach: ReachState::new(config.retry_min, config.retry_max),
            channels: ChannelSet::with_capacity(config.nconnect),
            random: config.seed | 1,
            connecting: 0,
            waited: Duration::ZERO,
            full_until: None,
            shown: None,
        };
        DemandPool {
            connector,
            own_name: own_name.to_owned(),
            source: source.to_owned(),
            config,
            counters: stats.paths.path_stats(&peer, &kind, &kind),
            peer,
            stats,
            liveness: PathLiveness::default(),
            started: Instant::now(),
            process: AtomicU64::new(0),
            closed_heartbeats: AtomicUsize::new(0),
            monitored_silence: AtomicU64::new(0),
            inner: Mutex::new(inner),
            changed: Condvar::new(),
        }
    }

    /// Time on the clock of the path's state.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// Opens a connection for `source`. The error is `Throttled` when the peer runs but is at the connection limit.
    fn connect_and_handshake(&self, source: &str, deadline: Instant) -> Result<(Box<dyn Channel>, WelcomeAnswer)> {
        let process = self.process.load(Ordering::Relaxed);
        self.connector.connect_and_handshake(&HelloRequest::new(&self.own_name, source), process, deadline)
    }

    fn is_monitored(&self) -> bool {
        self.monitored_silence.load(Ordering::Acquire) > 0
    }

    /// How long a request waits for a new connection. A suspended peer accepts connections and completes no handshake.
    fn connect_patience(&self) -> Duration {
        match self.monitored_silence.load(Ordering::Acquire) {
            0 => self.config.connect_timeout,
            silence => self.config.connect_timeout.min(Duration::from_micros(silence)),
        }
    }

    /// The peer answered something other than by closing a connection.
    fn peer_answered(&self) {
        self.closed_heartbeats.store(0, Ordering::Relaxed);
    }

    /// A request starts waiting.
    fn request_began(&self) {
        self.liveness.request_began(|| self.now());
    }

    /// The peer's address as configured.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Whether the peer can be reached on demand, as far as is known.
    pub fn reach(&self) -> PeerReach {
        self.inner.lock().reach.reach().clone()
    }

    /// The time since the last failed attempt, for a peer that is down. Requests between two attempts fail at once.
    pub fn since_failure(&self) -> Option<Duration> {
        self.inner.lock().reach.since_failure(self.now())
    }

    /// Current number of connections.
    pub fn open_count(&self) -> usize {
        self.inner.lock().channels.open_count()
    }

    /// The addresses of the connections, each pair once.
    pub fn connection_ends(&self) -> Vec<PathEnds> {
        self.inner.lock().channels.distinct_ends()
    }

    /// Sets the expected process of the peer, the number in its [`WelcomeAnswer`]; 0 accepts any.
    pub fn expect_process(&self, process: u64) {
        self.process.store(process, Ordering::Relaxed);
    }

    /// Takes an idle channel, or a new channel while there are fewer than `nconnect` and the peer has a slot, or waits for a
    /// channel.
    ///
    /// # Errors
    /// At once with the last error when the peer is down and no attempt is due; with the attempt's own error when this
    /// call made it and there is no channel to wait for; `Timeout` when every channel was in use until `deadline`.
    pub fn checkout(&self, deadline: Instant) -> Result<ChannelLease<'_>> {
        self.take_channel(deadline, true)
    }

    /// [`DemandPool::checkout`]; without `waits` it does not wait for channels in use.
    fn take_channel(&self, deadline: Instant, waits: bool) -> Result<ChannelLease<'_>> {
        let mut inner = self.inner.lock();
        loop {
            while let Some(mut channel) = inner.take_warm() {
                if inner.channels.check_usable(&mut channel, self.config.probe_after) {
                    self.request_began();
                    return Ok(ChannelLease::new(self, 0, channel, true));
                }
                inner.channels.discount(&channel);
                inner.reach.mark_unknown();
            }
            let now = Instant::now();
            let mut until = deadline;
            if let Some(full_until) = inner.saturated_until(now) {
                until = until.min(full_until);
            } else if inner.channels.open_count() + inner.connecting < self.config.nconnect
                && inner.may_connect(self.now())?
            {
                if let Some(lease) = self.connect_channel(inner, deadline)? {
                    return Ok(lease);
                }
                inner = self.inner.lock();
                // A channel may have been returned meanwhile.
                if waits && now < deadline {
                    continue;
                }
            }
            if !waits || (self.changed.wait_until(&mut inner, until).timed_out() && until == deadline) {
                let remedy = match inner.full_until {
                    Some(_) => {
                        ", and it is at its connection limit: raise its limit of open files, lower the --nconnect of mounts,"
                    }
                    None => "; raise --nconnect",
                };
                let why = format!(
                    "{}: all {} connections were in use until the deadline{remedy} or find out why answers are slow",
                    self.peer,
                    inner.channels.open_count() + inner.connecting
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Sends a request on a separate channel and returns. `None` when that would have to wait for a channel, when answers can't
    /// stay in the connection, or after a failure: a pipelined request can be repeated.
    pub fn begin_call<'r>(
        &self,
        request: impl FnOnce(&WelcomeAnswer) -> NodeRequest<'r>,
        deadline: Instant,
    ) -> Option<BegunCall> {
        {
            let inner = self.inner.lock();
            let may_connect = inner.channels.open_count() + inner.connecting < self.config.nconnect
                && *inner.reach.reach() == PeerReach::Up
                && inner.saturated_until(Instant::now()).is_none();
            if !inner.channels.has_idle() && !may_connect {
                return None;
            }
        }
        let lease = self.take_channel(deadline, false).ok()?;
        let request = request(lease.welcome());
        lease.begin_call(&request, deadline)
    }

    /// The channel of a request sent by [`DemandPool::begin_call`]; [`ChannelLease::finish_call`] receives the answer.
    pub fn resume_call(&self, begun: BegunCall) -> ChannelLease<'_> {
        self.request_began();
        ChannelLease::new(self, 0, begun.0, true)
    }

    /// Abandons a request sent by [`DemandPool::begin_call`] and closes the channel, which may contain the answer.
    pub fn abandon_call(&self, begun: BegunCall) {
        self.inner.lock().channels.discount(&begun.0);
        drop(begun);
        self.changed.notify_all();
    }

    /// Makes a channel; `None` when the peer is at the connection limit and the existing channels must suffice.
    fn connect_channel<'a>(
        &'a self,
        mut inner: MutexGuard<'a, DemandPoolState>,
        deadline: Instant,
    ) -> Result<Option<ChannelLease<'a>>> {
        inner.connecting += 1;
        drop(inner);
        let started = Instant::now();
        let patience = self.connect_patience();
        let until = deadline.min(started + patience);
        let made = self.connect_and_handshake(&self.source, until);
        let mut inner = self.inner.lock();
        inner.connecting -= 1;
        let result = match made {
            Ok((channel, welcome)) => {
                self.stats.remotecache.connects.add(1);
                inner.reach.mark_up();
                let channel = inner.channels.admit_channel(channel, Arc::new(welcome));
                inner.waited = Duration::ZERO;
                inner.full_until = None;
                self.show_gauge(&mut inner, Some(true));
                self.peer_answered();
                self.request_began();
                Ok(Some(ChannelLease::new(self, 0, channel, false)))
            }
            Err(error) => {
                let in_vain = error.kind() == ErrorKind::Timeout;
                // A peer at the connection limit still serves existing channels.
                let full = error.kind() == ErrorKind::Throttled && inner.channels.open_count() > 0;
                inner.full_until = full.then(|| Instant::now() + self.config.retry_max);
                if in_vain && until == deadline {
                    inner.waited += started.elapsed();
                }
                // A single caller without time for an attempt proves nothing about the peer, many such callers do.
                if !full && (!in_vain || until < deadline || inner.waited >= patience) {
                    inner.waited = Duration::ZERO;
                    // After a timeout the next attempt is left to the monitor.
                    if in_vain && self.is_monitored() {
                        inner.reach.hold_down(true);
                    }
                    self.mark_down(&mut inner, &error);
                }
                if full { Ok(None) } else { Err(error) }
            }
        };
        drop(inner);
        self.changed.notify_all();
        result
    }

    /// Sets the gauges to up, down or neither.
    fn show_gauge(&self, inner: &mut DemandPoolState, up: Option<bool>) {
        let shown = std::mem::replace(&mut inner.shown, up);
        self.update_gauges(shown, up);
    }

    /// Nodes use a pool for each source of a peer; the gauges count a peer once.
    fn update_gauges(&self, shown: Option<bool>, now: Option<bool>) {
        self.counters.report_state(shown, now, |before, combined| {
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

    /// Marks the peer as unreachable and schedules the next attempt.
    fn mark_down(&self, inner: &mut DemandPoolState, error: &Error) {
        inner.reach.mark_failed(self.now(), error);
        self.show_gauge(inner, Some(false));
    }

    // Called by the path monitor.

    /// Leaves a peer that is silent for this long to a monitor (`None`: no monitor). From now on no request waits
    /// longer than that for a connection, or connects to a silent peer before [`DemandPool::revival_ended`].
    pub fn set_monitored(&self, silence: Option<Duration>) {
        let micros = silence.map_or(0, |silence| silence.as_micros().max(1) as u64);
        self.monitored_silence.store(micros, Ordering::Release);
        if silence.is_none() {
            self.inner.lock().reach.hold_down(false);
        }
    }

    /// The peer, if requests are in flight, it has sent nothing for `silence`, and no heartbeat is in progress.
    pub fn overdue_peer(&self, silence: Duration) -> Option<OverduePeer> {
        self.liveness.claim_overdue(self.now(), silence).map(OverduePeer)
    }

    /// Whether the peer is held down, an attempt is due, and no heartbeat is in progress.
    pub fn revival_due(&self) -> bool {
        let due = self.inner.lock().reach.revival_due(self.now());
        due && self.liveness.claim_heartbeat()
    }

    /// Sends the peer a heartbeat over a separate connection. A peer at the connection limit counts as alive, but only a limited
    /// number of times in a row.
    ///
    /// # Errors
    /// Why there was no answer.
    pub fn send_heartbeat(&self, deadline: Instant) -> Result<()> {
        match self.connect_and_handshake("", deadline) {
            Ok((mut channel, _)) => {
                channel.call(&NodeRequest::Ping, &mut Vec::new(), &mut [], &mut |_| {}, deadline)?;
                self.peer_answered();
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

    /// Reports the result of the heartbeat for an overdue peer. Without an answer the peer is marked as failed, unless bytes
    /// arrived meanwhile. Returns whether that was so.
    pub fn heartbeat_ended(&self, overdue: OverduePeer, answer: &Result<()>) -> bool {
        let failed = match answer {
            Ok(()) => {
                self.liveness.bytes_arrived(self.now());
                false
            }
            Err(error) => self.liveness.last_heard() == overdue.0 && self.fail_peer(error),
        };
        self.liveness.release_heartbeat();
        failed
    }

    /// Reports the result of the heartbeat for a peer that is held down.
    pub fn revival_ended(&self, answer: &Result<()>) {
        let mut inner = self.inner.lock();
        match answer {
            Ok(()) => inner.reach.revived(self.now()),
            Err(error) => self.mark_down(&mut inner, error),
        }
        drop(inner);
        self.liveness.release_heartbeat();
        self.changed.notify_all();
    }

    /// Interrupts every request in flight.
    fn fail_peer(&self, why: &Error) -> bool {
        if !self.is_monitored() {
            return false;
        }
        let mut inner = self.inner.lock();
        inner.reach.hold_down(true);
        let remains = inner.channels.clear();
        self.mark_down(&mut inner, why);
        drop(inner);
        drop(remains);
        self.changed.notify_all();
        true
    }

    /// Drops idle channels that the peer closed, without sending anything. Whether the peer is reachable is unknown
    /// when no channel is left.
    pub fn check_idle(&self) {
        let mut inner = self.inner.lock();
        let ended = inner.channels.take_ended();
        if inner.channels.open_count() == 0 {
            inner.reach.mark_unknown();
            if inner.shown == Some(true) {
                self.show_gauge(&mut inner, None);
            }
        }
        drop(inner);
        self.changed.notify_all();
        drop(ended);
    }

    /// Closes channels unused for `idle`, except the most recently used channel: the peer has connection slots and memory for a
    /// limited number.
    pub fn close_idle(&self, idle: Duration) {
        let unused = self.inner.lock().channels.take_unused(Instant::now(), idle);
        // Not under the lock, which requests wait for.
        drop(unused);
    }
}

impl DemandPoolState {
    fn take_warm(&mut self) -> Option<PooledChannel> {
        let DemandPoolState { channels, random, .. } = self;
        channels.take_warm(|| next_random(random))
    }

    /// Until when the existing channels must suffice because the peer is at the connection limit.
    fn saturated_until(&self, now: Instant) -> Option<Instant> {
        let has_channels = self.channels.open_count() > 0;
        self.full_until.filter(|until| has_channels && now < *until)
    }

    /// Whether a request may make a connection at `now`, on the clock of the path's state.
    ///
    /// # Errors
    /// The last error of a peer that is down, when no channel is left and no attempt is due.
    fn may_connect(&self, now: Duration) -> Result<bool> {
        // One attempt at a time finds out whether the peer is reachable and has a free slot.
        let only_attempt = self.connecting == 0;
        match self.reach.reach() {
            PeerReach::Up => Ok(self.full_until.is_none() || only_attempt),
            PeerReach::Unknown => Ok(only_attempt),
            PeerReach::Down { .. } if only_attempt && self.reach.retry_due(now) => Ok(true),
            // Existing channels may still work; without any, a request does not wait for a failed peer.
            PeerReach::Down { error, .. } if self.channels.open_count() == 0 => Err(error.clone()),
            PeerReach::Down { .. } => Ok(false),
        }
    }
}

impl ChannelOwner for DemandPool {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn path_counters(&self, _: usize) -> &PathStats {
        &self.counters
    }

    fn request_ended(&self, _: usize) {
        self.liveness.request_ended();
    }

    fn record_read(&self, _: usize, _: usize, _: Duration) {}

    fn return_channel(&self, _: usize, mut channel: PooledChannel) {
        channel.idle_since = Instant::now();
        channel.user = ChannelUser::current();
        self.peer_answered();
        let mut inner = self.inner.lock();
        if inner.channels.is_current(&channel) {
            self.liveness.bytes_arrived(channel.idle_since.saturating_duration_since(self.started));
        }
        self.liveness.request_ended();
        let outdated = inner.channels.put_idle(channel);
        drop(inner);
        self.changed.notify_one();
        drop(outdated);
    }

    fn drop_channel(&self, _: usize, channel: PooledChannel, loss: ChannelLoss, _: Option<&Error>) {
        let mut inner = self.inner.lock();
        self.liveness.request_ended();
        inner.channels.discount(&channel);
        if matches!(loss, ChannelLoss::Broke | ChannelLoss::Silent) {
            inner.channels.count_break();
            inner.reach.mark_unknown();
        }
        // A silent peer is silent on all connections, which idle connections do not show. A new connection's handshake does.
        let idle = if loss == ChannelLoss::Silent { inner.channels.take_idle() } else { Vec::new() };
        drop(inner);
        self.changed.notify_all();
        // The caller's memory may be reused once this returns, so the channel must be gone by then.
        drop(channel);
        drop(idle);
    }
}

impl Drop for DemandPool {
    fn drop(&mut self) {
        let shown = self.inner.get_mut().shown.take();
        self.update_gauges(shown, None);
    }
}
