//! The channels to one peer on one path: idle ones first, new ones as needed, a dead peer asked rarely.
//! It knows no transport; time is the caller's deadline and the clock of the waits themselves.

mod life;

pub use life::Owing;

use crate::path_pool::{PathPool, Place, step};
use crate::{Answer, Breaker, CallError, Channel, Connector};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{Body, Hello, Request, Welcome};
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How many channels, and how patient.
#[derive(Debug, Clone)]
pub struct PoolConfig {
    /// The most connections (`--nconnect`).
    pub nconnect: usize,
    /// The longest a connection attempt with its greeting may take.
    pub connect_timeout: Duration,
    /// The pause after a first failed attempt; it doubles up to `retry_max`.
    pub retry_min: Duration,
    /// The longest pause between attempts to reach a dead peer.
    pub retry_max: Duration,
    /// Channels idle for longer are probed before they are used.
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
    /// The last thing that happened was a connection.
    Up,
    /// Connecting failed, with this error; `failures` in a row.
    Down {
        /// Failed attempts in a row.
        failures: u32,
        /// What the last one said.
        error: Error,
    },
}

pub(crate) struct Entry {
    pub channel: Box<dyn Channel>,
    pub welcome: Arc<Welcome>,
    pub idle_since: Instant,
    /// The number of breaks seen when this channel last worked.
    pub breaks: u64,
    /// Unique in this process.
    pub number: u64,
    /// Where it was used last.
    pub user: User,
    /// Ends the channel's call from another thread.
    pub breaker: Option<Arc<dyn Breaker>>,
}

/// A thread and the processor it ran on: the node's worker that waits on a channel, and both ends' buffers, are warm where
/// it was used last; a pair of threads that stays a pair is kept together by the scheduler, and a network card that steers
/// packets to their reader's processor finds it where it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct User {
    thread: u64,
    cpu: usize,
}

impl User {
    pub fn this() -> User {
        static THREADS: AtomicU64 = AtomicU64::new(0);
        thread_local! {
            static THIS: u64 = THREADS.fetch_add(1, Ordering::Relaxed);
        }
        User { thread: THIS.with(|n| *n), cpu: rustix::thread::sched_getcpu() }
    }
}

/// A channel with a request under way whose answer nobody waits for yet. It has to go back to its pool, by
/// [`ChannelPool::resume`] or [`ChannelPool::abandon`].
pub struct Begun(Entry);

/// An answer or a connection that somebody had no more time for says nothing of the peer: at work it takes as long.
const NO_WAIT: Duration = Duration::from_millis(100);

/// How a channel was lost.
enum Loss {
    Broke,
    /// No answer came in time.
    Silent,
    /// There was no time for an answer.
    NotAwaited,
    /// The answer came from elsewhere, and the call was broken off for that.
    NotNeeded,
}

/// Numbers of channels; 0 is none.
static NUMBERS: AtomicU64 = AtomicU64::new(1);

struct Inner {
    idle: Vec<Entry>,
    /// Idle, leased and being made.
    open: usize,
    /// Being made.
    connecting: usize,
    state: PoolState,
    retry_at: Option<Instant>,
    /// How long the peer was waited for in vain by attempts to connect that their callers had no more time for.
    waited: Duration,
    /// Channels that broke so far.
    breaks: u64,
    random: u64,
    /// What ends the channels there are, by their numbers.
    breakers: Vec<(u64, Arc<dyn Breaker>)>,
    /// The peer gave no sign of life: no request tries it until it gives one.
    held: bool,
    /// The peer had no place for one more connection: until then those that there are have to do.
    full_until: Option<Instant>,
    /// What the gauges of this peer say: `Some(true)` up, `Some(false)` down.
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
    inner: Mutex<Inner>,
    changed: Condvar,
    born: Instant,
    /// When the peer was last heard of, or began to owe answers, in microseconds since `born`.
    heard: AtomicU64,
    /// Requests that wait for answers.
    in_flight: AtomicUsize,
    /// How often in a row the peer closed the connection that was to ask it for a sign of life, and said nothing else.
    closed: AtomicUsize,
    /// Whether the peer is being asked for a sign of life.
    asking: AtomicBool,
    /// The silence after which somebody asks for a sign of life, in microseconds; 0 where nobody does.
    watched: AtomicU64,
    /// Which process the peer is, as last told; 0 where that is not known.
    process: AtomicU64,
}

impl ChannelPool {
    /// A pool that greets as `peer_name` and asks for `source` (empty: for none). Connects when first used.
    pub fn new(
        connector: Arc<dyn Connector>,
        peer_name: &str,
        source: &str,
        config: PoolConfig,
        stats: Arc<Stats>,
    ) -> Self {
        let inner = Inner {
            idle: Vec::with_capacity(config.nconnect),
            open: 0,
            connecting: 0,
            state: PoolState::Unknown,
            retry_at: None,
            waited: Duration::ZERO,
            breaks: 0,
            random: config.seed | 1,
            breakers: Vec::with_capacity(config.nconnect),
            held: false,
            full_until: None,
            shown: None,
        };
        let kind = connector.kind().to_string();
        let path = stats.paths.of(connector.peer(), &kind, &kind);
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
            heard: AtomicU64::new(0),
            in_flight: AtomicUsize::new(0),
            closed: AtomicUsize::new(0),
            asking: AtomicBool::new(false),
            watched: AtomicU64::new(0),
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

    /// Connections there are now.
    pub fn open(&self) -> usize {
        let inner = self.inner.lock();
        inner.open - inner.connecting
    }

    /// Takes a channel: an idle one, or a new one while there are fewer than `nconnect` and the peer has a place for it, or
    /// waits for one.
    ///
    /// # Errors
    /// At once with the last error when the peer is down and no new attempt is due; with the attempt's own error
    /// when this call made it and there is no channel to wait for; `Timeout` when every channel was in use until `deadline`.
    pub fn checkout(&self, deadline: Instant) -> Result<Lease<'_>> {
        self.take(deadline, true)
    }

    /// [`ChannelPool::checkout`], which need not wait for those who have a channel now.
    fn take(&self, deadline: Instant, waits: bool) -> Result<Lease<'_>> {
        let mut inner = self.inner.lock();
        loop {
            while let Some(mut entry) = inner.pick() {
                let fresh = entry.breaks == inner.breaks && entry.idle_since.elapsed() < self.config.probe_after;
                if fresh || entry.channel.probe() {
                    entry.breaks = inner.breaks;
                    return Ok(Lease::new(self, entry, true));
                }
                inner.open -= 1;
                inner.forget(entry.number);
                if inner.state == PoolState::Up {
                    inner.state = PoolState::Unknown;
                }
            }
            let now = Instant::now();
            let mut until = deadline;
            if let Some(full_until) = inner.has_to_do(now) {
                until = until.min(full_until);
            } else if inner.open < self.config.nconnect {
                let connects = match &inner.state {
                    PoolState::Up if inner.full_until.is_none() => true,
                    // One finds out for all whether the peer is there, and whether it has a place by now.
                    PoolState::Up | PoolState::Unknown => inner.connecting == 0,
                    PoolState::Down { .. }
                        if inner.connecting == 0 && !inner.held && inner.retry_at.is_none_or(|at| now >= at) =>
                    {
                        true
                    }
                    // Some channels may still work; without any, nobody waits for a dead peer.
                    PoolState::Down { error, .. } if inner.open == inner.connecting => return Err(error.clone()),
                    PoolState::Down { .. } => false,
                };
                if connects {
                    if let Some(lease) = self.connect(inner, deadline)? {
                        return Ok(lease);
                    }
                    inner = self.inner.lock();
                    // One of those that have to do may have come back meanwhile.
                    if waits && now < deadline {
                        continue;
                    }
                }
            }
            if !waits || (self.changed.wait_until(&mut inner, until).timed_out() && until == deadline) {
                let remedy = match inner.full_until {
                    Some(_) => {
                        ", and it has no place for more: give it more open files, lower the --nconnect of mounts,"
                    }
                    None => "; raise --nconnect",
                };
                let why = format!(
                    "{}: all {} connections were in use until the deadline{remedy} or look at why answers are slow",
                    self.connector.peer(),
                    inner.open
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Sends a request on a channel of its own and returns; `None` when that would have to wait for a channel, when
    /// answers can't be left in the connection, or when it failed: what is asked ahead can be asked again.
    pub fn begin<'r>(&self, request: impl FnOnce(&Welcome) -> Request<'r>, deadline: Instant) -> Option<Begun> {
        {
            let inner = self.inner.lock();
            let may_connect = inner.open < self.config.nconnect
                && inner.state == PoolState::Up
                && inner.has_to_do(Instant::now()).is_none();
            if inner.idle.is_empty() && !may_connect {
                return None;
            }
        }
        let mut lease = self.take(deadline, false).ok()?;
        let request = request(&lease.welcome);
        // Its answer is what counts as an operation.
        let time = deadline.saturating_duration_since(Instant::now());
        lease.attempt(None, time, |channel| channel.begin(&request, deadline)).ok()?;
        lease.entry.take().map(Begun)
    }

    /// The channel of a request of [`ChannelPool::begin`], to take its answer from by [`Lease::finish`].
    pub fn resume(&self, begun: Begun) -> Lease<'_> {
        Lease::new(self, begun.0, true)
    }

    /// Gives up a request of [`ChannelPool::begin`]: its channel is closed, for the answer may be in it.
    pub fn abandon(&self, begun: Begun) {
        let mut inner = self.inner.lock();
        inner.open -= 1;
        inner.forget(begun.0.number);
        drop(inner);
        drop(begun);
        self.changed.notify_all();
    }

    /// From now on the peer is this process, the number in its [`Welcome`]; 0 for whichever answers.
    pub fn expect(&self, process: u64) {
        self.process.store(process, Ordering::Relaxed);
    }

    /// A connection that is asked for `source`. Of a peer that is there and has no place for it the error is `Throttled`.
    fn greeted(&self, source: &str, deadline: Instant) -> Result<(Box<dyn Channel>, Welcome)> {
        let process = self.process.load(Ordering::Relaxed);
        self.connector.connect_to(&Hello::new(&self.peer_name, source), process, deadline)
    }

    /// Makes a channel; `None` when the peer has no place for it and those that there are have to do.
    fn connect<'a>(
        &'a self,
        mut inner: parking_lot::MutexGuard<'a, Inner>,
        deadline: Instant,
    ) -> Result<Option<Lease<'a>>> {
        inner.open += 1;
        inner.connecting += 1;
        drop(inner);
        let (started, patience) = (Instant::now(), self.patience_to_connect());
        let until = deadline.min(started + patience);
        let made = self.greeted(&self.source, until);
        let mut inner = self.inner.lock();
        inner.connecting -= 1;
        let result = match made {
            Ok((channel, welcome)) => {
                self.stats.remotecache.connects.add(1);
                inner.state = PoolState::Up;
                inner.retry_at = None;
                inner.waited = Duration::ZERO;
                self.show(&mut inner, Some(true));
                let breaks = inner.breaks;
                let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
                inner.held = false;
                let breaker = channel.breaker();
                inner.breakers.extend(breaker.iter().map(|breaker| (number, Arc::clone(breaker))));
                let (welcome, idle_since) = (Arc::new(welcome), Instant::now());
                let user = User::this();
                let entry = Entry { channel, welcome, idle_since, breaks, number, user, breaker };
                inner.full_until = None;
                self.closed.store(0, Ordering::Relaxed);
                Ok(Some(Lease::new(self, entry, false)))
            }
            Err(error) => {
                inner.open -= 1;
                let in_vain = error.kind() == ErrorKind::Timeout;
                // A peer that has no place for one more is as well as before for those that have theirs.
                let full = error.kind() == ErrorKind::Throttled && inner.open > inner.connecting;
                inner.full_until = full.then(|| Instant::now() + self.config.retry_max);
                if in_vain && until == deadline {
                    inner.waited += started.elapsed();
                }
                // A caller who had no time for it does not speak for all, only many of them do.
                if !full && (!in_vain || until < deadline || inner.waited >= patience) {
                    inner.waited = Duration::ZERO;
                    // Who waited in vain leaves the next attempt to whoever watches.
                    inner.held |= in_vain && self.is_watched();
                    self.went_down(&mut inner, &error);
                }
                if full { Ok(None) } else { Err(error) }
            }
        };
        drop(inner);
        self.changed.notify_all();
        result
    }

    /// Has the gauges show the peer as up, as down, or as neither.
    fn show(&self, inner: &mut Inner, up: Option<bool>) {
        let said = std::mem::replace(&mut inner.shown, up);
        self.say(said, up);
    }

    /// Nodes ask a peer for each source through a pool of its own: a peer counts once.
    fn say(&self, said: Option<bool>, now: Option<bool>) {
        self.path.says(said, now, |before, together| {
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

    fn give_back(&self, mut entry: Entry) {
        entry.user = User::this();
        entry.idle_since = Instant::now();
        self.heard(entry.idle_since);
        self.closed.store(0, Ordering::Relaxed);
        let mut inner = self.inner.lock();
        inner.idle.push(entry);
        drop(inner);
        self.changed.notify_one();
    }

    fn give_up(&self, entry: Entry, loss: Loss) {
        let idle = {
            let mut inner = self.inner.lock();
            inner.open -= 1;
            inner.forget(entry.number);
            if !matches!(loss, Loss::NotNeeded | Loss::NotAwaited) {
                inner.breaks += 1;
                if inner.state == PoolState::Up {
                    inner.state = PoolState::Unknown;
                }
            }
            // A peer that stopped answering does so on all its connections, and nothing in them shows it; a new
            // connection with its greeting does.
            if matches!(loss, Loss::Silent) {
                inner.open -= inner.idle.len();
                let idle = std::mem::take(&mut inner.idle);
                idle.iter().for_each(|entry| inner.forget(entry.number));
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
        self.say(said, None);
    }
}

impl Inner {
    /// Takes the idle channel that this thread used last, or one used last on this processor, or one of them at random,
    /// so that they share the links of a bond.
    fn pick(&mut self) -> Option<Entry> {
        let n = self.idle.len();
        if n == 0 {
            return None;
        }
        let this = User::this();
        let of = |same: &dyn Fn(&User) -> bool| self.idle.iter().position(|entry| same(&entry.user));
        let at = of(&|user| user.thread == this.thread).or_else(|| of(&|user| user.cpu == this.cpu));
        let at = at.unwrap_or_else(|| (step(&mut self.random) % n as u64) as usize);
        Some(self.idle.swap_remove(at))
    }

    /// Until when those that there are have to do, as the peer has no place for one more.
    fn has_to_do(&self, now: Instant) -> Option<Instant> {
        self.full_until.filter(|until| self.open > self.connecting && now < *until)
    }

    /// A channel is gone, and what ends it.
    fn forget(&mut self, number: u64) {
        self.breakers.retain(|(of, _)| *of != number);
    }
}

/// Where a channel goes back to.
enum Home<'a> {
    Pool(&'a ChannelPool),
    Paths(&'a PathPool, Place),
}

/// A channel taken out of the pool; it goes back when dropped, unless a call broke it.
pub struct Lease<'a> {
    home: Home<'a>,
    welcome: Arc<Welcome>,
    /// Empty only after a call broke it.
    entry: Option<Entry>,
    /// It was idle before.
    was_idle: bool,
}

impl<'a> Lease<'a> {
    fn new(pool: &'a ChannelPool, entry: Entry, was_idle: bool) -> Self {
        pool.waits();
        Lease { home: Home::Pool(pool), welcome: Arc::clone(&entry.welcome), entry: Some(entry), was_idle }
    }

    pub(crate) fn of_path(paths: &'a PathPool, place: Place, entry: Entry) -> Self {
        Lease {
            home: Home::Paths(paths, place),
            welcome: Arc::clone(&entry.welcome),
            entry: Some(entry),
            was_idle: true,
        }
    }

    /// Whether the channel was idle before it was taken: the peer may have ended it the moment before.
    pub fn was_idle(&self) -> bool {
        self.was_idle
    }

    fn peer(&self) -> &str {
        match &self.home {
            Home::Pool(pool) => pool.peer(),
            Home::Paths(paths, _) => paths.peer(),
        }
    }

    /// Which of a [`PathPool`]'s paths the channel is of.
    pub fn path(&self) -> Option<usize> {
        match self.home {
            Home::Pool(_) => None,
            Home::Paths(_, place) => Some(place.path),
        }
    }

    /// The counters of the process and of the path.
    fn counters(&self) -> (&'a Stats, &'a PathStats) {
        match self.home {
            Home::Pool(pool) => (&pool.stats, &pool.path),
            Home::Paths(paths, place) => paths.counters(place),
        }
    }

    /// What the node answered to the greeting on this connection: its number for the volume among others.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// [`Channel::call`], counted. A channel that it breaks is closed at once, before this returns.
    ///
    /// # Errors
    /// Those of [`Channel::call`]; `Unavailable` after a call that broke the channel.
    pub fn call(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        self.counted(deadline, None, |channel, deadline| channel.call(request, body, dst, progress, deadline))
    }

    /// [`Lease::call`] that another thread may break off, by [`Lease::breaker`], once it has set `unless`: then the
    /// channel is closed as ever, and neither the peer nor its path is blamed for it.
    ///
    /// # Errors
    /// Those of [`Lease::call`].
    pub fn call_unless(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        deadline: Instant,
        unless: Option<&AtomicBool>,
    ) -> Result<Answer, CallError> {
        self.counted(deadline, unless, |channel, deadline| channel.call(request, body, dst, &mut |_| {}, deadline))
    }

    /// Takes the answer to a request that was begun on this channel, as [`Lease::call_unless`] would.
    ///
    /// # Errors
    /// Those of [`Lease::call`].
    pub fn finish(
        &mut self,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        deadline: Instant,
        unless: Option<&AtomicBool>,
    ) -> Result<Answer, CallError> {
        self.counted(deadline, unless, |channel, deadline| channel.finish(body, dst, deadline))
    }

    /// Closes the channel, which somebody may have broken off after its last call.
    pub fn discard(&mut self) {
        if let Some(entry) = self.entry.take() {
            self.lose(entry, Loss::NotNeeded, None);
        }
    }

    fn lose(&self, entry: Entry, loss: Loss, error: Option<&Error>) {
        match self.home {
            Home::Pool(pool) => pool.give_up(entry, loss),
            // That a call was too slow does not end its path.
            Home::Paths(paths, place) => paths.give_up(place, entry, error.filter(|_| matches!(loss, Loss::Broke))),
        }
    }

    /// What ends the channel's call from another thread.
    pub fn breaker(&self) -> Option<&Arc<dyn Breaker>> {
        self.entry.as_ref()?.breaker.as_ref()
    }

    /// [`Channel::call_while`], counted.
    ///
    /// # Errors
    /// Those of [`Lease::call`].
    pub fn call_while(
        &mut self,
        request: &Request<'_>,
        dst: &mut [u8],
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, CallError> {
        self.counted(deadline, None, |channel, deadline| {
            channel.call_while(request, &mut Vec::new(), dst, &mut |_| {}, deadline, meanwhile)
        })
    }

    fn counted(
        &mut self,
        deadline: Instant,
        unless: Option<&AtomicBool>,
        call: impl FnOnce(&mut dyn Channel, Instant) -> Result<Answer, CallError>,
    ) -> Result<Answer, CallError> {
        let (stats, path) = self.counters();
        let counted = &stats.remotecache;
        let whole = self.entry.is_some();
        let start = Instant::now();
        let time = deadline.saturating_duration_since(start);
        let result = self.attempt(unless, time, |channel| call(channel, deadline));
        if whole {
            let took = start.elapsed();
            counted.ops.add(1);
            counted.lat_us.add_us(took);
            path.ops.add(1);
            path.lat_us.add_us(took);
            if let (Ok(answer), Home::Paths(paths, place)) = (&result, &self.home) {
                paths.measured(*place, answer.payload_len, took);
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

    /// Does something with the channel for which there is so much `time`; one that breaks is counted and given up.
    fn attempt<T>(
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
                _ if unless.is_some_and(|answered| answered.load(Ordering::Acquire)) => Loss::NotNeeded,
                ErrorKind::Timeout if time < NO_WAIT => Loss::NotAwaited,
                ErrorKind::Timeout => Loss::Silent,
                _ => Loss::Broke,
            };
            if !matches!(loss, Loss::NotNeeded) {
                let (stats, path) = self.counters();
                stats.remotecache.errors.add(1);
                path.errors.add(1);
            }
            if let Some(entry) = self.entry.take() {
                self.lose(entry, loss, Some(error));
            }
        }
        result
    }

    /// A call whose answer is one value in the body. `body` is scratch.
    ///
    /// # Errors
    /// Those of [`Lease::call`]; `Protocol` when the body is no such value.
    pub fn call_for<T: Body>(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        deadline: Instant,
    ) -> Result<T, CallError> {
        self.call(request, body, &mut [], &mut |_| {}, deadline)?;
        T::decode(body).map_err(|e| {
            CallError::Answered(
                Error::from(e).context(format_args!("{request} of {}: the answer makes no sense", self.peer())),
            )
        })
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if let Home::Pool(pool) = self.home {
            pool.waits_no_longer();
        }
        if let Some(entry) = self.entry.take() {
            match self.home {
                Home::Pool(pool) => pool.give_back(entry),
                Home::Paths(paths, place) => paths.give_back(place, entry),
            }
        }
    }
}
