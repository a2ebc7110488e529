//! The rail paths to a peer and the channels there: which channel a request takes, and which channels fail together. The path
//! monitor connects, watches and retries rail paths, so that no request waits for a connection attempt. Does not know the peer's
//! TCP connections (`demand_pool`), nor how channels are made.

mod monitored;

pub use monitored::QuietPath;

use crate::channel_lease::{ChannelLease, ChannelLoss, ChannelOwner};
use crate::channel_set::{ChannelRemains, ChannelSet, PathEnds, PooledChannel, next_random};
use crate::path_liveness::PathLiveness;
use crate::path_speed::{self, PathSpeed, SpeedCheck};
use crate::path_state::PathState;
use crate::{Channel, PathPhase, PathTiming, TransportKind};
use parking_lot::{Condvar, Mutex, MutexGuard};
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::cmp::Ordering as Order;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A channel idle for longer is probed before use.
const PROBE_AFTER: Duration = Duration::from_secs(1);

/// The failure reason of an unused path.
const IDLE_ENDED: &str = "its connections ended while they were idle";

/// The fixed properties of a rail path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSpec {
    /// Both rails, for logs: `ib0-ib1`.
    pub name: String,
    /// What carries the bytes.
    pub kind: TransportKind,
    /// Index of the local rail; a large read is split over several.
    pub local: usize,
    /// The speed relative to the other paths, at least 1.
    pub speed_mbit: u32,
}

/// The state of a rail path, for `status`.
#[derive(Debug, Clone)]
pub struct PathView {
    /// The fixed properties.
    pub spec: PathSpec,
    /// The phase.
    pub phase: PathPhase,
    /// Time since the phase began.
    pub for_time: Duration,
    /// Channels on the path.
    pub channels: usize,
    /// Requests in flight on the path.
    pub in_flight: usize,
    /// Time since the last bytes arrived, while it carries data. A peer that lost its power does not close its connections.
    pub silent: Option<Duration>,
    /// The reason of the last failure.
    pub reason: Option<String>,
    /// Failures while carrying data.
    pub failovers: u64,
    /// Recoveries after such a failure.
    pub failbacks: u64,
    /// Whether reads are slower than before the last failure; `None` while unknown.
    pub speed: Option<SpeedCheck>,
    /// The ends of the channels, without ports, each pair once.
    pub ends: Vec<PathEnds>,
}

/// Wakes the path monitor.
#[derive(Debug, Default)]
pub struct PathWake {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl PathWake {
    /// Ends the current wait, or else the next wait.
    pub fn wake_monitor(&self) {
        *self.woken.lock() = true;
        self.changed.notify_all();
    }
    /// Waits for [`PathWake::wake_monitor`] or for `deadline`; returns whether a wake-up came.
    pub fn wait_until(&self, deadline: Instant) -> bool {
        let mut woken = self.woken.lock();
        while !*woken && !self.changed.wait_until(&mut woken, deadline).timed_out() {}
        std::mem::take(&mut *woken)
    }
}

/// Requests in flight on each rail of this machine, to all peers together.
#[derive(Debug)]
pub struct RailLoads([AtomicUsize; u64::BITS as usize]);

impl Default for RailLoads {
    fn default() -> Self {
        RailLoads(std::array::from_fn(|_| AtomicUsize::new(0)))
    }
}

impl RailLoads {
    fn path_load(&self, spec: &PathSpec) -> &AtomicUsize {
        &self.0[spec.local % self.0.len()]
    }
}

/// The part of a path that needs no lock.
struct PathEntry {
    spec: PathSpec,
    counters: Arc<PathStats>,
    liveness: PathLiveness,
    speed: Mutex<PathSpeed>,
    /// The share of the speed used for load balancing, in thousandths; below 1000 while the path is slower than before a failure.
    share: AtomicU32,
}

impl PathEntry {
    fn new(spec: PathSpec, counters: Arc<PathStats>) -> Self {
        let liveness = PathLiveness::default();
        let speed = Mutex::default();
        PathEntry { spec, counters, liveness, speed, share: AtomicU32::new(1000) }
    }

    fn load_speed(&self) -> u32 {
        let speed = u64::from(self.spec.speed_mbit.max(1)) * u64::from(self.share.load(Ordering::Relaxed)) / 1000;
        u32::try_from(speed).unwrap_or(u32::MAX).max(1)
    }
}

/// The part of a path under the lock.
struct PathSlot {
    state: PathState,
    channels: ChannelSet,
    /// When the idle channels were last probed.
    last_checked: Instant,
    /// A request found no idle channel.
    wanted: bool,
    /// A further channel is being made.
    growing: bool,
    /// Reserved for heartbeats while all other channels wait for answers.
    probe: Option<Box<dyn Channel>>,
}

impl PathSlot {
    fn new(state: PathState, max_channels: usize) -> Self {
        let channels = ChannelSet::with_capacity(max_channels);
        let last_checked = Instant::now();
        PathSlot { state, channels, last_checked, wanted: false, growing: false, probe: None }
    }
}

struct RailPoolState {
    slots: Vec<PathSlot>,
    random: u64,
}

/// The rail paths to a peer.
pub struct RailPool {
    peer: String,
    paths: Vec<PathEntry>,
    max_channels: usize,
    stats: Arc<Stats>,
    started: Instant,
    wake: Arc<PathWake>,
    rails: Arc<RailLoads>,
    /// Number of paths that carry data; every request reads this without the lock.
    up: AtomicUsize,
    inner: Mutex<RailPoolState>,
    changed: Condvar,
}

/// Ended channels and paths, dropped without the lock: their destruction in a NIC's firmware may take a while.
#[derive(Default)]
struct EndedChannels {
    channels: Vec<PooledChannel>,
    paths: Vec<ChannelRemains>,
}

impl EndedChannels {
    fn is_empty(&self) -> bool {
        self.channels.is_empty() && self.paths.is_empty()
    }
    fn clear(&mut self) {
        self.channels.clear();
        self.paths.clear();
    }
}

impl RailPool {
    /// Paths that are due, none connected, each with up to `max_channels` channels.
    pub fn new(
        peer: &str,
        specs: Vec<PathSpec>,
        max_channels: usize,
        timing: PathTiming,
        seed: u64,
        stats: Arc<Stats>,
        wake: Arc<PathWake>,
    ) -> Self {
        let max_channels = max_channels.max(1);
        let slots: Vec<PathSlot> =
            specs.iter().map(|_| PathSlot::new(PathState::new(timing, Duration::ZERO), max_channels)).collect();
        stats.rdma.paths_down.add(slots.len() as u64);
        RailPool {
            peer: peer.to_owned(),
            paths: specs
                .into_iter()
                .map(|spec| {
                    let counters = stats.paths.path_stats(peer, &spec.name, &spec.kind.to_string());
                    PathEntry::new(spec, counters)
                })
                .collect(),
            max_channels,
            started: Instant::now(),
            wake,
            rails: Arc::default(),
            up: AtomicUsize::new(0),
            inner: Mutex::new(RailPoolState { slots, random: seed | 1 }),
            changed: Condvar::new(),
            stats,
        }
    }

    /// Uses rail loads that the pools of all peers share.
    pub fn with_rail_loads(mut self, rails: Arc<RailLoads>) -> Self {
        self.rails = rails;
        self
    }

    /// The peer's address as configured.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Number of paths.
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// Whether there are no paths.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Number of paths that carry data.
    pub fn up(&self) -> usize {
        self.up.load(Ordering::Acquire)
    }

    /// Time on the clock of the path states.
    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    /// A request starts waiting on the path.
    fn request_began(&self, path: usize) {
        self.paths[path].liveness.request_began(|| self.now());
        self.rails.path_load(&self.paths[path].spec).fetch_add(1, Ordering::Relaxed);
    }

    /// Takes an idle channel of the path with the lowest load relative to the speed, and waits while all are in use. Ties go to
    /// the rails `near` the destination memory (bits by [`PathSpec::local`], 0 when all are equally near), unless another rail
    /// would stay idle; then at random. `None` when no path carries data.
    ///
    /// # Errors
    /// `Timeout` when every channel was in use until `deadline`.
    pub fn checkout(&self, deadline: Instant, near: u64) -> Result<Option<ChannelLease<'_>>> {
        if self.up() == 0 {
            return Ok(None);
        }
        // Dropped after the lock is released.
        let mut ended = EndedChannels::default();
        let mut inner = self.inner.lock();
        loop {
            if let Some((path, channel)) = self.pick_channel(&mut inner, 0, near, &mut ended) {
                return Ok(Some(ChannelLease::new(self, path, channel, true)));
            }
            let mut any_up = false;
            let mut grows = false;
            for slot in inner.slots.iter_mut().filter(|slot| slot.state.phase() == PathPhase::Up) {
                any_up = true;
                if self.may_grow(slot) {
                    slot.wanted = true;
                    grows = true;
                }
            }
            if !any_up {
                return Ok(None);
            }
            if grows {
                self.wake.wake_monitor();
            }
            if !ended.is_empty() {
                MutexGuard::unlocked(&mut inner, || ended.clear());
                continue;
            }
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                let why = format!(
                    "{}: all {} channels of each path were in use until the deadline; raise --nconnect or find out why answers are slow",
                    self.peer, self.max_channels
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Takes an idle channel of a local rail that is not in `taken` (bits by [`PathSpec::local`]), without waiting; for reads
    /// split over rails. Also returns the speed and the rail's bit. `near` is as for [`RailPool::checkout`].
    pub fn checkout_beside(&self, taken: u64, near: u64) -> Option<(ChannelLease<'_>, u32, u64)> {
        if self.up() == 0 {
            return None;
        }
        let mut ended = EndedChannels::default();
        let (index, channel) = self.pick_channel(&mut self.inner.lock(), taken, near, &mut ended)?;
        let path = &self.paths[index];
        Some((ChannelLease::new(self, index, channel, true), path.load_speed(), rail_bit(&path.spec)))
    }

    fn pick_channel(
        &self,
        inner: &mut RailPoolState,
        taken: u64,
        near: u64,
        ended: &mut EndedChannels,
    ) -> Option<(usize, PooledChannel)> {
        loop {
            let mut best: Option<usize> = None;
            let mut equals = 0;
            for index in 0..self.paths.len() {
                if !inner.slots[index].channels.has_idle() || !self.may_take(inner, index, taken) {
                    continue;
                }
                match best.map_or(Order::Less, |best| {
                    self.compare_load(index, best).then_with(|| self.compare_nearness(index, best, near))
                }) {
                    Order::Less => {
                        best = Some(index);
                        equals = 1;
                    }
                    Order::Equal => {
                        // The n-th of n equals replaces the choice with probability 1/n.
                        equals += 1;
                        if next_random(&mut inner.random).is_multiple_of(equals) {
                            best = Some(index);
                        }
                    }
                    Order::Greater => {}
                }
            }
            let index = best?;
            // A better path with all channels in use gets another; otherwise slow rails would always carry as much as fast rails.
            for other in 0..self.paths.len() {
                let better = self.may_take(inner, other, taken) && self.compare_load(other, index).is_lt();
                let slot = &mut inner.slots[other];
                if better && !slot.channels.has_idle() && !slot.wanted && self.may_grow(slot) {
                    slot.wanted = true;
                    self.wake.wake_monitor();
                }
            }
            let random = next_random(&mut inner.random);
            let slot = &mut inner.slots[index];
            let mut channel = slot.channels.take_random(random)?;
            if slot.channels.check_usable(&mut channel, PROBE_AFTER) {
                self.request_began(index);
                return Some((index, channel));
            }
            // The channel ended while idle. The path may be usable, unless this was the last channel.
            slot.channels.discount(&channel);
            slot.wanted = true;
            if slot.channels.open_count() == 0 {
                ended.paths.push(self.fail_path(inner, index, IDLE_ENDED));
                self.changed.notify_all();
            }
            ended.channels.push(channel);
            self.wake.wake_monitor();
        }
    }

    fn may_take(&self, inner: &RailPoolState, index: usize, taken: u64) -> bool {
        inner.slots[index].state.phase() == PathPhase::Up && taken & rail_bit(&self.paths[index].spec) == 0
    }

    fn may_grow(&self, slot: &PathSlot) -> bool {
        slot.channels.open_count() < self.max_channels && !slot.growing && slot.state.phase() == PathPhase::Up
    }

    /// Compares the load of two paths relative to the speed, (in flight + 1) / speed, without a division.
    fn compare_load(&self, a: usize, b: usize) -> Order {
        let load = |of: usize, other: usize| {
            (self.paths[of].liveness.in_flight() as u64 + 1) * u64::from(self.paths[other].load_speed())
        };
        load(a, b).cmp(&load(b, a))
    }

    /// Breaks a tie between two equally loaded paths: first a rail that is idle towards all peers, then a rail near
    /// the memory.
    fn compare_nearness(&self, a: usize, b: usize, near: u64) -> Order {
        let far = |path: usize| {
            let spec = &self.paths[path].spec;
            (self.rails.path_load(spec).load(Ordering::Relaxed) > 0, near & rail_bit(spec) == 0)
        };
        if near == 0 { Order::Equal } else { far(a).cmp(&far(b)) }
    }

    /// Fails a path that carried data; the caller drops the channels.
    fn fail_path(&self, inner: &mut RailPoolState, path: usize, why: &str) -> ChannelRemains {
        let now = self.now();
        if !inner.slots[path].state.path_failed(now, why) {
            return ChannelRemains::default();
        }
        self.clear_path(inner, path, why)
    }

    fn clear_path(&self, inner: &mut RailPoolState, path: usize, why: &str) -> ChannelRemains {
        let slot = &mut inner.slots[path];
        slot.wanted = false;
        slot.growing = false;
        let mut remains = slot.channels.clear();
        remains.probe = slot.probe.take();
        self.up.fetch_sub(1, Ordering::AcqRel);
        let PathEntry { spec, counters, liveness, .. } = &self.paths[path];
        liveness.release_heartbeat();
        counters.report_state(Some(true), None, |_, _| {});
        counters.silent_s.set(0);
        counters.failovers.add(1);
        counters.set_last_failure(why);
        self.stats.rdma.failovers.add(1);
        self.stats.rdma.paths_up.sub(1);
        self.stats.rdma.paths_down.add(1);
        let next = match self.up() {
            0 => "no path is left",
            _ => "the other paths carry its share",
        };
        let in_flight = liveness.in_flight();
        tracing::warn!(peer = %self.peer, path = %spec.name, kind = %spec.kind, in_flight, "a path failed: {why}; {next}");
        remains
    }
}

impl ChannelOwner for RailPool {
    fn peer(&self) -> &str {
        &self.peer
    }

    fn stats(&self) -> &Stats {
        &self.stats
    }

    fn path_counters(&self, path: usize) -> &PathStats {
        &self.paths[path].counters
    }

    fn request_ended(&self, path: usize) {
        self.paths[path].liveness.request_ended();
        self.rails.path_load(&self.paths[path].spec).fetch_sub(1, Ordering::Relaxed);
    }

    /// After a recovery, long reads are compared with reads before the failure; a slower path carries proportionally less where
    /// there are others.
    fn record_read(&self, path: usize, len: usize, took: Duration) {
        if len < path_speed::SHORTEST_READ {
            return;
        }
        let path = &self.paths[path];
        let under_way = path.liveness.in_flight();
        let mut speed = path.speed.lock();
        let check = speed.record_read(len, took, under_way);
        path.counters.usual_bytes_per_s.set(speed.usual_speed().unwrap_or(0));
        drop(speed);
        let Some(check) = check else { return };
        path.share.store(check.load_share(), Ordering::Relaxed);
        path.counters.speed_checks.add(1);
        path.counters.checked_bytes_per_s.set(check.after);
        let was_slower = path.counters.slower.get() != 0;
        path.counters.slower.set(u64::from(check.slower));
        let name = &path.spec.name;
        let usual = check.before / 1_000_000;
        let after = check.after / 1_000_000;
        if !check.slower {
            tracing::info!(peer = %self.peer, path = %name, "a path is as fast as before it failed: {after} MB/s, {usual} before");
        } else if !was_slower {
            tracing::warn!(
                peer = %self.peer, path = %name,
                "a path is slower than before it failed: {after} MB/s, {usual} before; it carries less where there are \
                 others; 'spurline net doctor' checks the link, 'spurline net bw' measures it"
            );
        }
    }

    fn return_channel(&self, path: usize, mut channel: PooledChannel) {
        channel.idle_since = Instant::now();
        let liveness = &self.paths[path].liveness;
        let mut inner = self.inner.lock();
        if inner.slots[path].channels.is_current(&channel) {
            liveness.bytes_arrived(channel.idle_since.saturating_duration_since(self.started));
        }
        self.request_ended(path);
        let outdated = inner.slots[path].channels.put_idle(channel);
        drop(inner);
        self.changed.notify_one();
        drop(outdated);
    }

    /// The path fails with a channel that broke. A call that was only too slow does not end a path, because
    /// heartbeats detect silence.
    fn drop_channel(&self, path: usize, channel: PooledChannel, loss: ChannelLoss, error: Option<&Error>) {
        let mut inner = self.inner.lock();
        self.request_ended(path);
        let mut remains = ChannelRemains::default();
        if inner.slots[path].channels.discount(&channel) {
            inner.slots[path].wanted = true;
            if let Some(error) = error.filter(|_| loss == ChannelLoss::Broke) {
                remains = self.fail_path(&mut inner, path, error.message());
            }
        }
        drop(inner);
        self.changed.notify_all();
        self.wake.wake_monitor();
        // The caller's memory may be reused once this returns, so the channel must be gone by then.
        drop(channel);
        drop(remains);
    }
}

impl Drop for RailPool {
    fn drop(&mut self) {
        let up = self.up() as u64;
        self.stats.rdma.paths_up.sub(up);
        self.stats.rdma.paths_down.sub(self.paths.len() as u64 - up);
        for (path, slot) in self.paths.iter().zip(&self.inner.get_mut().slots) {
            if slot.state.phase() == PathPhase::Up {
                path.counters.report_state(Some(true), None, |_, _| {});
            }
            path.counters.silent_s.set(0);
        }
    }
}

/// Rails beyond the 64th share bits; no machine has as many.
fn rail_bit(spec: &PathSpec) -> u64 {
    1 << (spec.local % 64)
}

#[cfg(test)]
mod tests;
