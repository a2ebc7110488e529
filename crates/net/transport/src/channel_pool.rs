//! The channels to one peer on one path: idle ones are used first, new ones made as needed, and attempts to reach a
//! failed peer are spaced out. It knows no transport; time comes from the caller's deadline and the clock of the
//! waits themselves.

mod liveness;

pub use liveness::OverduePeer;

use crate::path_pool::{ChannelId, PathPool, next_random};
use crate::{CallAnswer, CallError, Channel, ChannelBreaker, Connector};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{AnswerBody, HelloRequest, NodeRequest, WelcomeAnswer};
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Limits and timing of a pool.
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

/// Whether the peer can be reached, as far as is known.
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

pub(crate) struct PooledChannel {
    pub channel: Box<dyn Channel>,
    pub welcome: Arc<WelcomeAnswer>,
    pub idle_since: Instant,
    /// The number of breaks counted when this channel last worked.
    pub breaks: u64,
    /// Unique in this process.
    pub number: u64,
    /// Its last user.
    pub user: ChannelUser,
    /// Ends the channel's call from another thread.
    pub breaker: Option<Arc<dyn ChannelBreaker>>,
}

/// A thread and the CPU it ran on. A channel is warm where it was used last: the node's worker that waits on it, and
/// the buffers of both ends. The scheduler keeps a stable pair of threads together, and a NIC that steers packets to
/// their reader's CPU finds it there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChannelUser {
    thread: u64,
    cpu: usize,
}

impl ChannelUser {
    pub fn current() -> ChannelUser {
        static THREADS: AtomicU64 = AtomicU64::new(0);
        thread_local! {
            static THIS: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        ChannelUser { thread: THIS.with(|n| *n), cpu: rustix::thread::sched_getcpu() }
    }
}

/// A channel with a request in flight; its answer is not awaited yet. It must go back to its pool by
/// [`ChannelPool::resume_call`] or [`ChannelPool::abandon_call`].
pub struct BegunCall(PooledChannel);

/// A wait shorter than this proves nothing about the peer: an answer takes as long under load.
const SHORT_WAIT: Duration = Duration::from_millis(100);

/// How a channel was lost.
enum ChannelLoss {
    Broke,
    /// No answer arrived in time.
    Silent,
    /// The deadline left no time for an answer.
    NotAwaited,
    /// The call was interrupted because another source had answered.
    NotNeeded,
}

/// Numbers of channels; 0 is not used.
static NEXT_CHANNEL_NUMBER: AtomicU64 = AtomicU64::new(1);

struct ChannelTable {
    idle: Vec<PooledChannel>,
    /// Idle, leased and connecting channels.
    open: usize,
    /// Connecting channels.
    connecting: usize,
    state: PoolState,
    retry_at: Option<Instant>,
    /// Total time that connection attempts were cut short by their callers' deadlines.
    waited: Duration,
    /// Number of channels that broke.
    breaks: u64,
    random: u64,
    /// Breakers of the existing channels, by channel number.
    breakers: Vec<(u64, Arc<dyn ChannelBreaker>)>,
    /// The peer answered no heartbeat: requests do not try it until it does.
    held_down: bool,
    /// The peer is at its connection limit: until then the existing channels must suffice.
    full_until: Option<Instant>,
    /// The state shown by the gauges of this peer: `Some(true)` up, `Some(false)` down.
    shown: Option<bool>,
}

/// Channels to one peer on one path.
pub struct ChannelPool {
    connector: Arc<dyn Connector>,
    peer_name: String,
    source: String,
    config: PoolConfig,
    stats: Arc<Stats>,
    path: Arc<PathStats>,
    inner: Mutex<ChannelTable>,
    changed: Condvar,
    born: Instant,
    /// When bytes last arrived from the peer, or its first pending request was sent, in microseconds since `born`.
    last_heard: AtomicU64,
    /// Requests waiting for answers.
    in_flight: AtomicUsize,
    /// Consecutive heartbeats that ended with a closed connection and no other answer.
    closed_heartbeats: AtomicUsize,
    /// Whether a heartbeat is in progress.
    heartbeat_running: AtomicBool,
    /// The silence after which the monitor sends a heartbeat, in microseconds; 0 where there is no monitor.
    monitored_silence: AtomicU64,
    /// The peer's last known process number; 0 when unknown.
    process: AtomicU64,
}

impl ChannelPool {
    /// A pool with `peer_name` and `source` (empty: none) in its handshakes. It connects on first use.
    pub fn new(
        connector: Arc<dyn Connector>,
        peer_name: &str,
        source: &str,
        config: PoolConfig,
        stats: Arc<Stats>,
    ) -> Self {
        let inner = ChannelTable {
            idle: Vec::with_capacity(config.nconnect),
            open: 0,
            connecting: 0,
            state: PoolState::Unknown,
            retry_at: None,
            waited: Duration::ZERO,
            breaks: 0,
            random: config.seed | 1,
            breakers: Vec::with_capacity(config.nconnect),
            held_down: false,
            full_until: None,
            shown: None,
        };
        let kind = connector.kind().to_string();
        let path = stats.paths.path_stats(connector.peer(), &kind, &kind);
        ChannelPool {
            path,
            connector,
            peer_name: peer_name.to_owned(),
            source: source.to_owned(),
            config: PoolConfig { nconnect: config.nconnect.max(1), ..config },
            stats,
            inner: Mutex::new(inner),
            changed: Condvar::new(),
            born: Instant::now(),
            last_heard: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            closed_heartbeats: AtomicUsize::new(0),
            heartbeat_running: AtomicBool::new(false),
            monitored_silence: AtomicU64::new(0),
            process: AtomicU64::new(0),
        }
    }

    /// The peer's address as configured.
    pub fn peer(&self) -> &str {
        self.connector.peer()
    }

    /// Whether the peer can be reached, as far as is known.
    pub fn state(&self) -> PoolState {
        self.inner.lock().state.clone()
    }

    /// Current number of connections.
    pub fn open_count(&self) -> usize {
        let inner = self.inner.lock();
        inner.open - inner.connecting
    }

    /// Takes an idle channel, or a new one while there are fewer than `nconnect` and the peer has a slot for it, or
    /// waits for one.
    ///
    /// # Errors
    /// At once with the last error when the peer is down and no attempt is due; with the attempt's own error when
    /// this call made it and there is no channel to wait for; `Timeout` when every channel was in use until
    /// `deadline`.
    pub fn checkout(&self, deadline: Instant) -> Result<ChannelLease<'_>> {
        self.take_channel(deadline, true)
    }

    /// [`ChannelPool::checkout`]; without `waits` it does not wait for channels in use.
    fn take_channel(&self, deadline: Instant, waits: bool) -> Result<ChannelLease<'_>> {
        let mut inner = self.inner.lock();
        loop {
            while let Some(mut entry) = inner.pick_idle() {
                let fresh = entry.breaks == inner.breaks && entry.idle_since.elapsed() < self.config.probe_after;
                if fresh || entry.channel.looks_alive() {
                    entry.breaks = inner.breaks;
                    return Ok(ChannelLease::new(self, entry, true));
                }
                inner.open -= 1;
                inner.forget_breaker(entry.number);
                if inner.state == PoolState::Up {
                    inner.state = PoolState::Unknown;
                }
            }
            let now = Instant::now();
            let mut until = deadline;
            if let Some(full_until) = inner.saturated_until(now) {
                until = until.min(full_until);
            } else if inner.open < self.config.nconnect {
                let connects = match &inner.state {
                    PoolState::Up if inner.full_until.is_none() => true,
                    // One attempt at a time finds out whether the peer is reachable and has a free slot.
                    PoolState::Up | PoolState::Unknown => inner.connecting == 0,
                    PoolState::Down { .. }
                        if inner.connecting == 0 && !inner.held_down && inner.retry_at.is_none_or(|at| now >= at) =>
                    {
                        true
                    }
                    // Existing channels may still work; without any, a request does not wait for a failed peer.
                    PoolState::Down { error, .. } if inner.open == inner.connecting => return Err(error.clone()),
                    PoolState::Down { .. } => false,
                };
                if connects {
                    if let Some(lease) = self.connect_channel(inner, deadline)? {
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
                let remedy = match inner.full_until {
                    Some(_) => {
                        ", and it is at its connection limit: raise its limit of open files, lower the --nconnect of mounts,"
                    }
                    None => "; raise --nconnect",
                };
                let why = format!(
                    "{}: all {} connections were in use until the deadline{remedy} or find out why answers are slow",
                    self.connector.peer(),
                    inner.open
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Sends a request on a channel of its own and returns. `None` when that would have to wait for a channel, when
    /// answers can't stay in the connection, or when it failed: a read-ahead request can be repeated.
    pub fn begin_call<'r>(
        &self,
        request: impl FnOnce(&WelcomeAnswer) -> NodeRequest<'r>,
        deadline: Instant,
    ) -> Option<BegunCall> {
        {
            let inner = self.inner.lock();
            let may_connect = inner.open < self.config.nconnect
                && inner.state == PoolState::Up
                && inner.saturated_until(Instant::now()).is_none();
            if inner.idle.is_empty() && !may_connect {
                return None;
            }
        }
        let mut lease = self.take_channel(deadline, false).ok()?;
        let request = request(&lease.welcome);
        // Its answer counts as the operation.
        let time = deadline.saturating_duration_since(Instant::now());
        lease.attempt_call(None, time, |channel| channel.begin_call(&request, deadline)).ok()?;
        lease.entry.take().map(BegunCall)
    }

    /// The channel of a request sent by [`ChannelPool::begin_call`]; [`ChannelLease::finish_call`] receives its
    /// answer.
    pub fn resume_call(&self, begun: BegunCall) -> ChannelLease<'_> {
        ChannelLease::new(self, begun.0, true)
    }

    /// Abandons a request sent by [`ChannelPool::begin_call`] and closes its channel, which may contain the answer.
    pub fn abandon_call(&self, begun: BegunCall) {
        let mut inner = self.inner.lock();
        inner.open -= 1;
        inner.forget_breaker(begun.0.number);
        drop(inner);
        drop(begun);
        self.changed.notify_all();
    }

    /// Sets the process that the peer is expected to be, the number in its [`WelcomeAnswer`]; 0 accepts any.
    pub fn expect_process(&self, process: u64) {
        self.process.store(process, Ordering::Relaxed);
    }

    /// Opens a connection for `source`. The error is `Throttled` when the peer runs but is at its connection limit.
    fn connect_and_handshake(&self, source: &str, deadline: Instant) -> Result<(Box<dyn Channel>, WelcomeAnswer)> {
        let process = self.process.load(Ordering::Relaxed);
        self.connector.connect_and_handshake(&HelloRequest::new(&self.peer_name, source), process, deadline)
    }

    /// Makes a channel; `None` when the peer is at its connection limit and the existing channels must suffice.
    fn connect_channel<'a>(
        &'a self,
        mut inner: parking_lot::MutexGuard<'a, ChannelTable>,
        deadline: Instant,
    ) -> Result<Option<ChannelLease<'a>>> {
        inner.open += 1;
        inner.connecting += 1;
        drop(inner);
        let (started, patience) = (Instant::now(), self.connect_patience());
        let until = deadline.min(started + patience);
        let made = self.connect_and_handshake(&self.source, until);
        let mut inner = self.inner.lock();
        inner.connecting -= 1;
        let result = match made {
            Ok((channel, welcome)) => {
                self.stats.remotecache.connects.add(1);
                inner.state = PoolState::Up;
                inner.retry_at = None;
                inner.waited = Duration::ZERO;
                self.show_gauge(&mut inner, Some(true));
                let breaks = inner.breaks;
                let number = NEXT_CHANNEL_NUMBER.fetch_add(1, Ordering::Relaxed);
                inner.held_down = false;
                let breaker = channel.breaker();
                inner.breakers.extend(breaker.iter().map(|breaker| (number, Arc::clone(breaker))));
                let (welcome, idle_since) = (Arc::new(welcome), Instant::now());
                let user = ChannelUser::current();
                let entry = PooledChannel { channel, welcome, idle_since, breaks, number, user, breaker };
                inner.full_until = None;
                self.closed_heartbeats.store(0, Ordering::Relaxed);
                Ok(Some(ChannelLease::new(self, entry, false)))
            }
            Err(error) => {
                inner.open -= 1;
                let in_vain = error.kind() == ErrorKind::Timeout;
                // A peer at its connection limit still serves its existing channels.
                let full = error.kind() == ErrorKind::Throttled && inner.open > inner.connecting;
                inner.full_until = full.then(|| Instant::now() + self.config.retry_max);
                if in_vain && until == deadline {
                    inner.waited += started.elapsed();
                }
                // One caller without time for an attempt proves nothing about the peer, many such callers do.
                if !full && (!in_vain || until < deadline || inner.waited >= patience) {
                    inner.waited = Duration::ZERO;
                    // After a timeout the next attempt is left to the monitor.
                    inner.held_down |= in_vain && self.is_monitored();
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
    fn show_gauge(&self, inner: &mut ChannelTable, up: Option<bool>) {
        let said = std::mem::replace(&mut inner.shown, up);
        self.update_gauges(said, up);
    }

    /// Nodes use one pool per source for a peer; the gauges count a peer once.
    fn update_gauges(&self, said: Option<bool>, now: Option<bool>) {
        self.path.report_state(said, now, |before, together| {
            let gauges = &self.stats.remotecache;
            let of = |up: bool| if up { &gauges.peers_up } else { &gauges.peers_down };
            if let Some(up) = before {
                of(up).sub(1);
            }
            if let Some(up) = together {
                of(up).add(1);
            }
        });
    }

    fn return_channel(&self, mut entry: PooledChannel) {
        entry.user = ChannelUser::current();
        entry.idle_since = Instant::now();
        self.record_heard(entry.idle_since);
        self.closed_heartbeats.store(0, Ordering::Relaxed);
        let mut inner = self.inner.lock();
        inner.idle.push(entry);
        drop(inner);
        self.changed.notify_one();
    }

    fn drop_channel(&self, entry: PooledChannel, loss: ChannelLoss) {
        let idle = {
            let mut inner = self.inner.lock();
            inner.open -= 1;
            inner.forget_breaker(entry.number);
            if !matches!(loss, ChannelLoss::NotNeeded | ChannelLoss::NotAwaited) {
                inner.breaks += 1;
                if inner.state == PoolState::Up {
                    inner.state = PoolState::Unknown;
                }
            }
            // A silent peer is silent on all its connections, which idle ones do not show. A new connection's
            // handshake does.
            if matches!(loss, ChannelLoss::Silent) {
                inner.open -= inner.idle.len();
                let idle = std::mem::take(&mut inner.idle);
                idle.iter().for_each(|entry| inner.forget_breaker(entry.number));
                idle
            } else {
                Vec::new()
            }
        };
        self.changed.notify_all();
        drop((entry, idle));
    }
}

impl Drop for ChannelPool {
    fn drop(&mut self) {
        let said = self.inner.get_mut().shown.take();
        self.update_gauges(said, None);
    }
}

impl ChannelTable {
    /// Takes the idle channel last used by this thread, or on this CPU, or a random one so that a bond's links are
    /// shared.
    fn pick_idle(&mut self) -> Option<PooledChannel> {
        let n = self.idle.len();
        if n == 0 {
            return None;
        }
        let this = ChannelUser::current();
        let of = |same: &dyn Fn(&ChannelUser) -> bool| self.idle.iter().position(|entry| same(&entry.user));
        let at = of(&|user| user.thread == this.thread).or_else(|| of(&|user| user.cpu == this.cpu));
        let at = at.unwrap_or_else(|| (next_random(&mut self.random) % n as u64) as usize);
        Some(self.idle.swap_remove(at))
    }

    /// Until when the existing channels must suffice because the peer is at its connection limit.
    fn saturated_until(&self, now: Instant) -> Option<Instant> {
        self.full_until.filter(|until| self.open > self.connecting && now < *until)
    }

    /// Drops the breaker of a closed channel.
    fn forget_breaker(&mut self, number: u64) {
        self.breakers.retain(|(of, _)| *of != number);
    }
}

/// The pool a channel returns to.
enum LeaseHome<'a> {
    Pool(&'a ChannelPool),
    Paths(&'a PathPool, ChannelId),
}

/// A channel taken from a pool; dropping it returns the channel, unless a call broke it.
pub struct ChannelLease<'a> {
    home: LeaseHome<'a>,
    welcome: Arc<WelcomeAnswer>,
    /// Empty only after a call broke it.
    entry: Option<PooledChannel>,
    /// The channel was idle before.
    was_idle: bool,
}

impl<'a> ChannelLease<'a> {
    fn new(pool: &'a ChannelPool, entry: PooledChannel, was_idle: bool) -> Self {
        pool.request_began();
        ChannelLease { home: LeaseHome::Pool(pool), welcome: Arc::clone(&entry.welcome), entry: Some(entry), was_idle }
    }

    pub(crate) fn from_path(paths: &'a PathPool, place: ChannelId, entry: PooledChannel) -> Self {
        ChannelLease {
            home: LeaseHome::Paths(paths, place),
            welcome: Arc::clone(&entry.welcome),
            entry: Some(entry),
            was_idle: true,
        }
    }

    /// Whether the channel was idle before it was taken: the peer may just have closed it.
    pub fn was_idle(&self) -> bool {
        self.was_idle
    }

    fn peer(&self) -> &str {
        match &self.home {
            LeaseHome::Pool(pool) => pool.peer(),
            LeaseHome::Paths(paths, _) => paths.peer(),
        }
    }

    /// Index of the channel's path within a [`PathPool`].
    pub fn path_index(&self) -> Option<usize> {
        match self.home {
            LeaseHome::Pool(_) => None,
            LeaseHome::Paths(_, place) => Some(place.path),
        }
    }

    /// The counters of the process and of the path.
    fn path_counters(&self) -> (&'a Stats, &'a PathStats) {
        match self.home {
            LeaseHome::Pool(pool) => (&pool.stats, &pool.path),
            LeaseHome::Paths(paths, place) => paths.path_counters(place),
        }
    }

    /// The node's answer to this connection's handshake, including its number for the volume.
    pub fn welcome(&self) -> &WelcomeAnswer {
        &self.welcome
    }

    /// [`Channel::call`], counted. A channel that it breaks is closed before this returns.
    ///
    /// # Errors
    /// Those of [`Channel::call`]; `Unavailable` after a call that broke the channel.
    pub fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, None, |channel, deadline| channel.call(request, body, dst, progress, deadline))
    }

    /// [`ChannelLease::call`] that another thread may interrupt through [`ChannelLease::breaker`] after setting
    /// `unless`. The channel is closed as usual, but neither the peer nor its path counts as failed.
    ///
    /// # Errors
    /// Those of [`ChannelLease::call`].
    pub fn call_unless(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        deadline: Instant,
        unless: Option<&AtomicBool>,
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, unless, |channel, deadline| channel.call(request, body, dst, &mut |_| {}, deadline))
    }

    /// Receives the answer to a request begun on this channel, as [`ChannelLease::call_unless`] would.
    ///
    /// # Errors
    /// Those of [`ChannelLease::call`].
    pub fn finish_call(
        &mut self,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        deadline: Instant,
        unless: Option<&AtomicBool>,
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, unless, |channel, deadline| channel.finish_call(body, dst, deadline))
    }

    /// Closes the channel, which another thread may have interrupted after its last call.
    pub fn discard_channel(&mut self) {
        if let Some(entry) = self.entry.take() {
            self.lose_channel(entry, ChannelLoss::NotNeeded, None);
        }
    }

    fn lose_channel(&self, entry: PooledChannel, loss: ChannelLoss, error: Option<&Error>) {
        match self.home {
            LeaseHome::Pool(pool) => pool.drop_channel(entry, loss),
            // A call that was only too slow does not end its path.
            LeaseHome::Paths(paths, place) => {
                paths.drop_broken(place, entry, error.filter(|_| matches!(loss, ChannelLoss::Broke)))
            }
        }
    }

    /// A handle that ends the channel's call from another thread.
    pub fn breaker(&self) -> Option<&Arc<dyn ChannelBreaker>> {
        self.entry.as_ref()?.breaker.as_ref()
    }

    /// [`Channel::call_while`], counted.
    ///
    /// # Errors
    /// Those of [`ChannelLease::call`].
    pub fn call_while(
        &mut self,
        request: &NodeRequest<'_>,
        dst: &mut [u8],
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<CallAnswer, CallError> {
        self.counted_call(deadline, None, |channel, deadline| {
            channel.call_while(request, &mut Vec::new(), dst, &mut |_| {}, deadline, meanwhile)
        })
    }

    fn counted_call(
        &mut self,
        deadline: Instant,
        unless: Option<&AtomicBool>,
        call: impl FnOnce(&mut dyn Channel, Instant) -> Result<CallAnswer, CallError>,
    ) -> Result<CallAnswer, CallError> {
        let (stats, path) = self.path_counters();
        let counted = &stats.remotecache;
        let whole = self.entry.is_some();
        let start = Instant::now();
        let time = deadline.saturating_duration_since(start);
        let result = self.attempt_call(unless, time, |channel| call(channel, deadline));
        if whole {
            let took = start.elapsed();
            counted.ops.add(1);
            counted.lat_us.add_us(took);
            path.ops.add(1);
            path.lat_us.add_us(took);
            if let (Ok(answer), LeaseHome::Paths(paths, place)) = (&result, &self.home) {
                paths.record_read(*place, answer.payload_len, took);
            }
        }
        match &result {
            Ok(answer) => {
                counted.recv_bytes.add(answer.payload_len as u64);
                path.recv_bytes.add(answer.payload_len as u64);
            }
            Err(CallError::Answered(error)) => counted.errors.add(u64::from(error.kind() != ErrorKind::NotFound)),
            Err(CallError::Broken(_)) => {}
        }
        result
    }

    /// Runs a call for which there is `time` left; a channel that breaks is counted and dropped.
    fn attempt_call<T>(
        &mut self,
        unless: Option<&AtomicBool>,
        time: Duration,
        call: impl FnOnce(&mut dyn Channel) -> Result<T, CallError>,
    ) -> Result<T, CallError> {
        let Some(entry) = &mut self.entry else {
            let why = format!("{}: the channel broke in an earlier call", self.peer());
            return Err(CallError::Broken(Error::new(ErrorKind::Unavailable, why)));
        };
        let result = call(&mut *entry.channel);
        if let Err(CallError::Broken(error)) = &result {
            let loss = match error.kind() {
                _ if unless.is_some_and(|answered| answered.load(Ordering::Acquire)) => ChannelLoss::NotNeeded,
                ErrorKind::Timeout if time < SHORT_WAIT => ChannelLoss::NotAwaited,
                ErrorKind::Timeout => ChannelLoss::Silent,
                _ => ChannelLoss::Broke,
            };
            if !matches!(loss, ChannelLoss::NotNeeded) {
                let (stats, path) = self.path_counters();
                stats.remotecache.errors.add(1);
                path.errors.add(1);
            }
            if let Some(entry) = self.entry.take() {
                self.lose_channel(entry, loss, Some(error));
            }
        }
        result
    }

    /// A call whose answer is one value in the body. `body` is scratch space.
    ///
    /// # Errors
    /// Those of [`ChannelLease::call`]; `Protocol` when the body does not decode.
    pub fn call_for<T: AnswerBody>(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<T, CallError> {
        self.call(request, body, &mut [], &mut |_| {}, deadline)?;
        T::decode(body).map_err(|e| {
            CallError::Answered(
                Error::from(e).context(format_args!("{request} of {}: the answer can't be decoded", self.peer())),
            )
        })
    }
}

impl Drop for ChannelLease<'_> {
    fn drop(&mut self) {
        if let LeaseHome::Pool(pool) = self.home {
            pool.request_ended();
        }
        if let Some(entry) = self.entry.take() {
            match self.home {
                LeaseHome::Pool(pool) => pool.return_channel(entry),
                LeaseHome::Paths(paths, place) => paths.return_channel(place, entry),
            }
        }
    }
}
