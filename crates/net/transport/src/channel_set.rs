//! The channels of a path: the idle channels, the number of open channels, and the handles that interrupt calls. Knows neither
//! the state of the path nor how channels are made.

use crate::{Channel, ChannelBreaker, ConnectionEndpoints};
use spurline_proto::WelcomeAnswer;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Numbers of channels; 0 is not used.
static NEXT_CHANNEL_NUMBER: AtomicU64 = AtomicU64::new(1);

/// A channel, and the pool's knowledge of the channel.
pub(crate) struct PooledChannel {
    pub channel: Box<dyn Channel>,
    pub welcome: Arc<WelcomeAnswer>,
    pub breaker: Option<Arc<dyn ChannelBreaker>>,
    pub idle_since: Instant,
    /// The last user.
    pub user: ChannelUser,
    /// The set's generation when the channel was made.
    generation: u64,
    /// The number of breaks counted when this channel last worked.
    breaks: u64,
    /// Unique in this process.
    number: u64,
}

/// A thread and the CPU where the thread ran. A channel is warm at the place of the last use: the node's worker that waits there,
/// and the buffers of both ends. The scheduler keeps a stable pair of threads together, and a NIC that steers packets to the
/// reader's CPU finds the reader there.
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

/// The addresses of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathEnds {
    /// The address of this host; `None` where unknown.
    pub local: Option<IpAddr>,
    /// The peer's.
    pub peer: Option<IpAddr>,
}

pub(crate) struct ChannelSet {
    idle: Vec<PooledChannel>,
    /// Idle and leased.
    open: usize,
    /// A failure of the path starts a new generation; channels of an older generation no longer count.
    generation: u64,
    /// Channels that broke.
    breaks: u64,
    /// By channel number.
    breakers: Vec<(u64, Arc<dyn ChannelBreaker>)>,
    /// The ends of open channels, by channel number.
    ends: Vec<(u64, ConnectionEndpoints)>,
}

/// The channels of a failed path, to be interrupted and dropped after the pool's lock is released: both may take a
/// while.
#[derive(Default)]
pub(crate) struct ChannelRemains {
    breakers: Vec<(u64, Arc<dyn ChannelBreaker>)>,
    _idle: Vec<PooledChannel>,
    /// The path's heartbeat channel.
    pub probe: Option<Box<dyn Channel>>,
}

impl Drop for ChannelRemains {
    fn drop(&mut self) {
        // Waiting calls first: the answers will not come.
        for (_, breaker) in self.breakers.drain(..) {
            breaker.break_channel();
        }
    }
}

impl ChannelSet {
    pub fn with_capacity(channels: usize) -> Self {
        ChannelSet {
            idle: Vec::with_capacity(channels),
            open: 0,
            generation: 0,
            breaks: 0,
            breakers: Vec::with_capacity(channels),
            ends: Vec::with_capacity(channels),
        }
    }

    /// The addresses of the open channels, each pair once.
    pub fn distinct_ends(&self) -> Vec<PathEnds> {
        let mut all: Vec<PathEnds> = Vec::new();
        for (_, ends) in &self.ends {
            let ends = PathEnds { local: address_without_port(&ends.local), peer: address_without_port(&ends.peer) };
            if !all.contains(&ends) {
                all.push(ends);
            }
        }
        all
    }

    /// Idle and leased channels.
    pub fn open_count(&self) -> usize {
        self.open
    }

    pub fn has_idle(&self) -> bool {
        !self.idle.is_empty()
    }

    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Counts a new channel, which the caller leases or puts among the idle channels.
    pub fn admit_channel(&mut self, channel: Box<dyn Channel>, welcome: Arc<WelcomeAnswer>) -> PooledChannel {
        let number = NEXT_CHANNEL_NUMBER.fetch_add(1, Ordering::Relaxed);
        let breaker = channel.breaker();
        self.breakers.extend(breaker.iter().map(|breaker| (number, Arc::clone(breaker))));
        self.ends.push((number, channel.endpoints().clone()));
        self.open += 1;
        let idle_since = Instant::now();
        let user = ChannelUser::current();
        let generation = self.generation;
        let breaks = self.breaks;
        PooledChannel { channel, welcome, breaker, idle_since, user, generation, breaks, number }
    }

    /// Whether the channel still counts.
    pub fn is_current(&self, channel: &PooledChannel) -> bool {
        channel.generation == self.generation
    }

    /// Adds an idle channel; gives a channel of an older generation back, to be dropped without the lock.
    pub fn put_idle(&mut self, channel: PooledChannel) -> Option<PooledChannel> {
        if !self.is_current(&channel) {
            return Some(channel);
        }
        self.idle.push(channel);
        None
    }

    /// Takes an idle channel by a random number.
    pub fn take_random(&mut self, random: u64) -> Option<PooledChannel> {
        let count = self.idle.len() as u64;
        (count > 0).then(|| self.idle.swap_remove((random % count) as usize))
    }

    /// Takes the idle channel last used by this thread, or on this CPU, or a channel by a random number, so that a bond's links
    /// are shared.
    pub fn take_warm(&mut self, random: impl FnOnce() -> u64) -> Option<PooledChannel> {
        if self.idle.is_empty() {
            return None;
        }
        let this = ChannelUser::current();
        let of = |same: &dyn Fn(&ChannelUser) -> bool| self.idle.iter().position(|channel| same(&channel.user));
        match of(&|user| user.thread == this.thread).or_else(|| of(&|user| user.cpu == this.cpu)) {
            Some(at) => Some(self.idle.swap_remove(at)),
            None => self.take_random(random()),
        }
    }

    /// Whether a taken channel may be used: at once after recent work, if no other channel broke since, else after a check.
    pub fn check_usable(&self, channel: &mut PooledChannel, probe_after: Duration) -> bool {
        let fresh = channel.breaks == self.breaks && channel.idle_since.elapsed() < probe_after;
        let usable = fresh || channel.channel.looks_alive();
        if usable {
            channel.breaks = self.breaks;
        }
        usable
    }

    /// Discounts a taken channel that is to be dropped. Returns whether the channel still counted.
    pub fn discount(&mut self, channel: &PooledChannel) -> bool {
        let counted = self.is_current(channel);
        if counted {
            self.open -= 1;
            self.breakers.retain(|(number, _)| *number != channel.number);
            self.ends.retain(|(number, _)| *number != channel.number);
        }
        counted
    }

    /// Counts a break: idle channels are probed before the next use.
    pub fn count_break(&mut self) {
        self.breaks += 1;
    }

    /// Takes the idle channels that the peer closed. A single live channel proves the peer alive, as the peer's end closes all
    /// channels.
    pub fn take_ended(&mut self) -> Vec<PooledChannel> {
        if self.idle.first_mut().is_none_or(|first| first.channel.looks_alive()) {
            return Vec::new();
        }
        self.take_where(|channel| !channel.channel.looks_alive())
    }

    /// Takes channels that are idle for `idle`, except the most recently used channel: the peer has connection slots and memory
    /// for a limited number.
    pub fn take_unused(&mut self, now: Instant, idle: Duration) -> Vec<PooledChannel> {
        let last = self.idle.iter().max_by_key(|channel| channel.idle_since).map(|channel| channel.number);
        self.take_where(|channel| {
            Some(channel.number) != last && now.saturating_duration_since(channel.idle_since) >= idle
        })
    }

    pub fn take_idle(&mut self) -> Vec<PooledChannel> {
        self.take_where(|_| true)
    }

    fn take_where(&mut self, gone: impl FnMut(&mut PooledChannel) -> bool) -> Vec<PooledChannel> {
        let taken: Vec<_> = self.idle.extract_if(.., gone).collect();
        self.open -= taken.len();
        self.breakers.retain(|(number, _)| taken.iter().all(|channel| channel.number != *number));
        self.ends.retain(|(number, _)| taken.iter().all(|channel| channel.number != *number));
        taken
    }

    /// Ends the generation: all channels are to be dropped, also channels in use.
    pub fn clear(&mut self) -> ChannelRemains {
        self.generation += 1;
        self.open = 0;
        self.ends.clear();
        ChannelRemains {
            breakers: std::mem::take(&mut self.breakers),
            _idle: std::mem::take(&mut self.idle),
            probe: None,
        }
    }
}

fn address_without_port(text: &str) -> Option<IpAddr> {
    text.parse::<SocketAddr>().ok().map(|address| address.ip().to_canonical())
}

/// xorshift64.
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}
