//! The paths to one peer and the channels on them: which channel a request takes, and which channels fail together.
//! The path monitor creates channels and watches paths in the background; nothing here connects, so no request waits
//! for a connection attempt.

use crate::channel_pool::{ChannelUser, PooledChannel};
use crate::path_speed::{self, PathSpeed, SpeedCheck};
use crate::{Channel, ChannelBreaker, ChannelLease, PathPhase, PathState, PathTiming, TransportKind};
use parking_lot::{Condvar, Mutex, MutexGuard};
use spurline_proto::WelcomeAnswer;
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A channel idle for longer is probed before use.
const PROBE_AFTER: Duration = Duration::from_secs(1);

/// The failure reason of an unused path.
const IDLE_ENDED: &str = "its connections ended while they were idle";

/// The fixed properties of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSpec {
    /// Both rails, for logs: `ib0-ib1`.
    pub name: String,
    /// What carries the bytes.
    pub kind: TransportKind,
    /// Index of the local rail; a large read is split over several.
    pub local: usize,
    /// Its speed relative to the other paths, at least 1.
    pub speed_mbit: u32,
}

/// The state of a path, for `status`.
#[derive(Debug, Clone)]
pub struct PathView {
    /// Its fixed properties.
    pub spec: PathSpec,
    /// Its phase.
    pub phase: PathPhase,
    /// Time since the phase began.
    pub for_time: Duration,
    /// Channels on it.
    pub channels: usize,
    /// Requests in flight on it.
    pub in_flight: usize,
    /// Time since the last bytes arrived, while it carries data. A peer that lost its power does not close its
    /// connections.
    pub silent: Option<Duration>,
    /// The reason of the last failure.
    pub reason: Option<String>,
    /// Failures while it carried data.
    pub failovers: u64,
    /// Recoveries after such a failure.
    pub failbacks: u64,
    /// Whether its reads are slower than before its last failure; `None` while unknown.
    pub speed: Option<SpeedCheck>,
}

/// Wakes the path monitor.
#[derive(Debug, Default)]
pub struct PathWake {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl PathWake {
    /// Ends the current wait, or else the next one.
    pub fn wake_monitor(&self) {
        *self.woken.lock() = true;
        self.changed.notify_all();
    }
    /// Waits for [`PathWake::wake_monitor`] or for `deadline`.
    pub fn wait_until(&self, deadline: Instant) {
        let mut rung = self.woken.lock();
        while !*rung && !self.changed.wait_until(&mut rung, deadline).timed_out() {}
        *rung = false;
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

/// Identifies a leased channel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChannelId {
    pub path: usize,
    /// The path's generation when the channel was made. A failure starts a new generation, and older channels no
    /// longer count.
    generation: u64,
    /// Unique among the channels of this pool.
    number: u64,
}

struct PathEntry {
    spec: PathSpec,
    counters: Arc<PathStats>,
    speed: Mutex<PathSpeed>,
    /// The share of its speed used for load balancing, in thousandths; below 1000 while it is slower than before a
    /// failure.
    share: AtomicU32,
}

impl PathEntry {
    fn load_speed(&self) -> u32 {
        let speed = u64::from(self.spec.speed_mbit.max(1)) * u64::from(self.share.load(Ordering::Relaxed)) / 1000;
        u32::try_from(speed).unwrap_or(u32::MAX).max(1)
    }
}

struct PathSlot {
    state: PathState,
    idle: Vec<(ChannelId, PooledChannel)>,
    /// Idle and leased.
    open: usize,
    in_flight: usize,
    /// When bytes last arrived on the path, or when its first request was sent.
    last_heard: Instant,
    /// When its idle channels were last probed.
    last_checked: Instant,
    generation: u64,
    breakers: Vec<(u64, Arc<dyn ChannelBreaker>)>,
    /// A request found no idle channel.
    wanted: bool,
    /// A further channel is being made.
    growing: bool,
    /// Reserved for heartbeats while all other channels wait for answers.
    probe: Option<Box<dyn Channel>>,
    probing: bool,
}

struct PathPoolState {
    slots: Vec<PathSlot>,
    next_number: u64,
    random: u64,
}

/// The paths to one peer.
pub struct PathPool {
    peer: String,
    paths: Vec<PathEntry>,
    most_channels: usize,
    stats: Arc<Stats>,
    started: Instant,
    wake: Arc<PathWake>,
    rails: Arc<RailLoads>,
    /// Number of paths that carry data; every request reads it without the lock.
    up: AtomicUsize,
    inner: Mutex<PathPoolState>,
    changed: Condvar,
}

/// A path with requests in flight and no bytes received for a while.
pub struct QuietPath {
    /// Index of the path.
    pub path: usize,
    /// The channel for a heartbeat; `None` when it broke earlier.
    pub probe: Option<Box<dyn Channel>>,
    last_heard: Instant,
    generation: u64,
}

impl QuietPath {
    /// Its path and generation, for [`PathPool::probe_skipped`].
    pub fn path_generation(&self) -> (usize, u64) {
        (self.path, self.generation)
    }
}

/// What to break and drop after the lock is released: both may take a while.
#[derive(Default)]
struct PathRemains {
    breakers: Vec<(u64, Arc<dyn ChannelBreaker>)>,
    _idle: Vec<(ChannelId, PooledChannel)>,
    _probe: Option<Box<dyn Channel>>,
}

/// Ended channels and paths, dropped without the lock: destroying them in a NIC's firmware may take a while.
#[derive(Default)]
struct EndedChannels {
    channels: Vec<PooledChannel>,
    paths: Vec<PathRemains>,
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

impl Drop for PathRemains {
    fn drop(&mut self) {
        // Waiting calls first: their answers will not come.
        for (_, breaker) in self.breakers.drain(..) {
            breaker.break_channel();
        }
    }
}

impl PathPool {
    /// Paths that are due, none connected, each with up to `most_channels` channels.
    pub fn new(
        peer: &str,
        specs: Vec<PathSpec>,
        most_channels: usize,
        timing: PathTiming,
        seed: u64,
        stats: Arc<Stats>,
        wake: Arc<PathWake>,
    ) -> Self {
        let slot = |_: &PathSpec| PathSlot {
            state: PathState::new(timing, Duration::ZERO),
            idle: Vec::with_capacity(most_channels),
            open: 0,
            in_flight: 0,
            last_heard: Instant::now(),
            last_checked: Instant::now(),
            generation: 0,
            breakers: Vec::new(),
            wanted: false,
            growing: false,
            probe: None,
            probing: false,
        };
        let slots: Vec<PathSlot> = specs.iter().map(slot).collect();
        stats.rdma.paths_down.add(slots.len() as u64);
        let path = |spec: PathSpec| {
            let counters = stats.paths.path_stats(peer, &spec.name, &spec.kind.to_string());
            PathEntry { spec, counters, speed: Mutex::default(), share: AtomicU32::new(1000) }
        };
        PathPool {
            peer: peer.to_owned(),
            paths: specs.into_iter().map(path).collect(),
            most_channels: most_channels.max(1),
            started: Instant::now(),
            wake,
            rails: Arc::default(),
            up: AtomicUsize::new(0),
            inner: Mutex::new(PathPoolState { slots, next_number: 1, random: seed | 1 }),
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

    pub(crate) fn path_counters(&self, place: ChannelId) -> (&Stats, &PathStats) {
        (&self.stats, &self.paths[place.path].counters)
    }

    /// Records a read of `len` bytes over the path of `place`. After a recovery such reads are compared with those
    /// before the failure; a slower path carries proportionally less where there are others.
    pub(crate) fn record_read(&self, place: ChannelId, len: usize, took: Duration) {
        if len < path_speed::SHORTEST_READ {
            return;
        }
        let path = &self.paths[place.path];
        let under_way = self.inner.lock().slots[place.path].in_flight;
        let mut speed = path.speed.lock();
        let check = speed.record_read(len, took, under_way);
        path.counters.usual_bytes_per_s.set(speed.usual_speed().unwrap_or(0));
        drop(speed);
        let Some(check) = check else { return };
        path.share.store(check.load_share(), Ordering::Relaxed);
        path.counters.speed_checks.add(1);
        path.counters.checked_bytes_per_s.set(check.after);
        let before = path.counters.slower.get();
        path.counters.slower.set(u64::from(check.slower));
        let mb = |bytes: u64| bytes / 1_000_000;
        let SpeedCheck { before: usual, after, slower } = check;
        let (name, usual, after) = (&path.spec.name, mb(usual), mb(after));
        if !slower {
            tracing::info!(peer = %self.peer, path = %name, "a path is as fast as before it failed: {after} MB/s, {usual} before");
        } else if before == 0 {
            tracing::warn!(
                peer = %self.peer, path = %name,
                "a path is slower than before it failed: {after} MB/s, {usual} before; it carries less where there are \
                 others; 'spurline net doctor' checks the link, 'spurline net bw' measures it"
            );
        }
    }

    /// Counts a request that was repeated elsewhere because this path failed.
    pub fn count_retry(&self, path: usize) {
        self.stats.rdma.retries.add(1);
        self.paths[path].counters.retries.add(1);
    }

    /// Takes an idle channel of the path with the lowest load relative to its speed, and waits while all are in use.
    /// Ties go to the rails `near` the destination memory (bits by [`PathSpec::local`], 0 when all are equally near),
    /// unless another rail would stay idle; then at random. `None` when no path carries data.
    ///
    /// # Errors
    /// `Timeout` when every channel was in use until `deadline`.
    pub fn checkout(&self, deadline: Instant, near: u64) -> Result<Option<ChannelLease<'_>>> {
        if self.up() == 0 {
            return Ok(None);
        }
        // Dropped after the lock is released.
        let mut dead = EndedChannels::default();
        let mut inner = self.inner.lock();
        loop {
            if let Some((place, entry)) = self.pick_channel(&mut inner, 0, near, &mut dead) {
                return Ok(Some(ChannelLease::from_path(self, place, entry)));
            }
            let (mut any_up, mut grows) = (false, false);
            for slot in inner.slots.iter_mut().filter(|slot| slot.state.phase() == PathPhase::Up) {
                any_up = true;
                if self.may_grow(slot) {
                    (slot.wanted, grows) = (true, true);
                }
            }
            if !any_up {
                return Ok(None);
            }
            if grows {
                self.wake.wake_monitor();
            }
            if !dead.is_empty() {
                MutexGuard::unlocked(&mut inner, || dead.clear());
                continue;
            }
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                let why = format!(
                    "{}: all {} channels of each path were in use until the deadline; raise --nconnect or find out why answers are slow",
                    self.peer, self.most_channels
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Takes an idle channel of a local rail that is not in `taken` (bits by [`PathSpec::local`]), without waiting;
    /// for reads split over rails. Returns its speed and its rail's bit as well. `near` is as for
    /// [`PathPool::checkout`].
    pub fn checkout_beside(&self, taken: u64, near: u64) -> Option<(ChannelLease<'_>, u32, u64)> {
        if self.up() == 0 {
            return None;
        }
        let mut dead = EndedChannels::default();
        let (place, entry) = self.pick_channel(&mut self.inner.lock(), taken, near, &mut dead)?;
        let path = &self.paths[place.path];
        Some((ChannelLease::from_path(self, place, entry), path.load_speed(), rail_bit(&path.spec)))
    }

    fn pick_channel(
        &self,
        inner: &mut PathPoolState,
        taken: u64,
        near: u64,
        dead: &mut EndedChannels,
    ) -> Option<(ChannelId, PooledChannel)> {
        loop {
            let mut best: Option<usize> = None;
            let mut equals = 0;
            for index in 0..inner.slots.len() {
                let slot = &inner.slots[index];
                if slot.idle.is_empty() || !self.may_take(inner, index, taken) {
                    continue;
                }
                let compared =
                    |best| self.compare_load(inner, index, best).then_with(|| self.compare_nearness(index, best, near));
                match best.map_or(std::cmp::Ordering::Less, compared) {
                    std::cmp::Ordering::Less => (best, equals) = (Some(index), 1),
                    std::cmp::Ordering::Equal => {
                        // The n-th of n equals replaces the choice with probability 1/n.
                        equals += 1;
                        if next_random(&mut inner.random).is_multiple_of(equals) {
                            best = Some(index);
                        }
                    }
                    std::cmp::Ordering::Greater => {}
                }
            }
            let index = best?;
            // A better path whose channels are all in use gets one more; otherwise slow rails would always carry as
            // much as fast ones.
            for other in 0..inner.slots.len() {
                let better = self.may_take(inner, other, taken) && self.compare_load(inner, other, index).is_lt();
                let slot = &mut inner.slots[other];
                if better && slot.idle.is_empty() && !slot.wanted && self.may_grow(slot) {
                    slot.wanted = true;
                    self.wake.wake_monitor();
                }
            }
            let at = next_random(&mut inner.random) as usize % inner.slots[index].idle.len();
            let slot = &mut inner.slots[index];
            let (place, mut entry) = slot.idle.swap_remove(at);
            let now = Instant::now();
            if now.saturating_duration_since(entry.idle_since) < PROBE_AFTER || entry.channel.looks_alive() {
                if slot.in_flight == 0 {
                    slot.last_heard = now;
                }
                slot.in_flight += 1;
                self.rails.path_load(&self.paths[index].spec).fetch_add(1, Ordering::Relaxed);
                return Some((place, entry));
            }
            // The channel ended while idle. The path may be usable, unless this was its last channel.
            slot.open -= 1;
            slot.breakers.retain(|(number, _)| *number != place.number);
            slot.wanted = true;
            if slot.open == 0 {
                dead.paths.push(self.fail_path(inner, index, IDLE_ENDED));
                self.changed.notify_all();
            }
            dead.channels.push(entry);
            self.wake.wake_monitor();
        }
    }

    fn may_take(&self, inner: &PathPoolState, index: usize, taken: u64) -> bool {
        inner.slots[index].state.phase() == PathPhase::Up && taken & rail_bit(&self.paths[index].spec) == 0
    }

    fn may_grow(&self, slot: &PathSlot) -> bool {
        slot.open < self.most_channels && !slot.growing && slot.state.phase() == PathPhase::Up
    }

    /// Compares the load of two paths relative to their speed, (in flight + 1) / speed, without a division.
    fn compare_load(&self, inner: &PathPoolState, a: usize, b: usize) -> std::cmp::Ordering {
        let load = |of: usize, other: usize| {
            (inner.slots[of].in_flight as u64 + 1) * u64::from(self.paths[other].load_speed())
        };
        load(a, b).cmp(&load(b, a))
    }

    /// Breaks a tie between two equally loaded paths: first a rail that is idle towards all peers, then a rail near
    /// the memory.
    fn compare_nearness(&self, a: usize, b: usize, near: u64) -> std::cmp::Ordering {
        let far = |path: usize| {
            let spec = &self.paths[path].spec;
            (self.rails.path_load(spec).load(Ordering::Relaxed) > 0, near & rail_bit(spec) == 0)
        };
        if near == 0 { std::cmp::Ordering::Equal } else { far(a).cmp(&far(b)) }
    }

    /// Accounts for the end of a request on the path.
    fn request_ended(&self, inner: &mut PathPoolState, path: usize) {
        inner.slots[path].in_flight -= 1;
        self.rails.path_load(&self.paths[path].spec).fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn return_channel(&self, place: ChannelId, mut entry: PooledChannel) {
        let now = Instant::now();
        entry.idle_since = now;
        let mut inner = self.inner.lock();
        self.request_ended(&mut inner, place.path);
        let slot = &mut inner.slots[place.path];
        let stranger = if slot.generation == place.generation {
            slot.last_heard = now;
            slot.idle.push((place, entry));
            None
        } else {
            Some(entry)
        };
        drop(inner);
        self.changed.notify_one();
        drop(stranger);
    }

    /// Closes a channel that broke. With an `error` its path fails too; a call that was only too slow passes none, as
    /// silence is detected by heartbeats.
    pub(crate) fn drop_broken(&self, place: ChannelId, entry: PooledChannel, error: Option<&Error>) {
        let mut inner = self.inner.lock();
        self.request_ended(&mut inner, place.path);
        let slot = &mut inner.slots[place.path];
        let mut remains = PathRemains::default();
        if slot.generation == place.generation {
            slot.open -= 1;
            slot.wanted = true;
            slot.breakers.retain(|(number, _)| *number != place.number);
            if let Some(error) = error {
                remains = self.fail_path(&mut inner, place.path, error.message());
            }
        }
        drop(inner);
        self.changed.notify_all();
        self.wake.wake_monitor();
        // The caller's memory may be reused once this returns, so the channel must be gone by then.
        drop(entry);
        drop(remains);
    }

    /// Fails a path that carried data; the caller drops its channels.
    fn fail_path(&self, inner: &mut PathPoolState, path: usize, why: &str) -> PathRemains {
        let now = self.started.elapsed();
        if !inner.slots[path].state.path_failed(now, why) {
            return PathRemains::default();
        }
        self.clear_path(inner, path, why)
    }

    fn clear_path(&self, inner: &mut PathPoolState, path: usize, why: &str) -> PathRemains {
        let slot = &mut inner.slots[path];
        slot.generation += 1;
        slot.open = 0;
        slot.wanted = false;
        slot.growing = false;
        slot.probing = false;
        let remains = PathRemains {
            breakers: std::mem::take(&mut slot.breakers),
            _idle: std::mem::take(&mut slot.idle),
            _probe: slot.probe.take(),
        };
        let in_flight = slot.in_flight;
        self.up.fetch_sub(1, Ordering::AcqRel);
        let PathEntry { spec, counters, .. } = &self.paths[path];
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
        tracing::warn!(peer = %self.peer, path = %spec.name, kind = %spec.kind, in_flight, "a path failed: {why}; {next}");
        remains
    }

    // Called by the path monitor.

    /// Reports whether the link of each local rail is up.
    pub fn update_links(&self, up: &dyn Fn(usize) -> bool) {
        for (index, path) in self.paths.iter().enumerate() {
            let link = up(path.spec.local);
            let mut inner = self.inner.lock();
            let before = inner.slots[index].state.phase();
            let carried = inner.slots[index].state.link_changed(self.started.elapsed(), link);
            let after = inner.slots[index].state.phase();
            let remains = carried.then(|| self.clear_path(&mut inner, index, "the local link went down"));
            drop(inner);
            if before != after && !carried {
                tracing::info!(peer = %self.peer, path = %path.spec.name, "the local link {}", match after {
                    PathPhase::Settling => "came back; it carries data when it has settled",
                    _ => "is down",
                });
            }
            if carried {
                self.changed.notify_all();
            }
            drop(remains);
        }
    }

    /// The paths to connect now; each counts as connecting from here on.
    pub fn begin_due(&self) -> Vec<usize> {
        let now = self.started.elapsed();
        let mut inner = self.inner.lock();
        inner.slots.iter_mut().enumerate().filter_map(|(i, slot)| slot.state.begin_connect(now).then_some(i)).collect()
    }

    /// When the next path is due.
    pub fn next_due(&self) -> Option<Instant> {
        let inner = self.inner.lock();
        inner.slots.iter().filter_map(|slot| slot.state.due_at()).min().map(|at| self.started + at)
    }

    /// Whether a path is due or connecting; a start waits for the first attempts.
    pub fn is_undecided(&self) -> bool {
        let inner = self.inner.lock();
        inner.slots.iter().any(|slot| matches!(slot.state.phase(), PathPhase::Due | PathPhase::Connecting))
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.inner.lock().slots.iter().map(|slot| slot.in_flight).sum()
    }

    /// Reports that a path has its first channel, and one for heartbeats.
    pub fn path_connected(
        &self,
        path: usize,
        channel: Box<dyn Channel>,
        welcome: Arc<WelcomeAnswer>,
        probe: Option<Box<dyn Channel>>,
    ) {
        let mut inner = self.inner.lock();
        let back = {
            let state = &mut inner.slots[path].state;
            let failbacks = state.failbacks();
            if !state.connect_succeeded(self.started.elapsed()) {
                // Its link went down meanwhile.
                drop(inner);
                return;
            }
            state.failbacks() > failbacks
        };
        inner.slots[path].last_heard = Instant::now();
        inner.slots[path].probe = probe;
        Self::put_channel(&mut inner, path, channel, welcome);
        self.up.fetch_add(1, Ordering::AcqRel);
        let PathEntry { spec, counters, .. } = &self.paths[path];
        counters.report_state(None, Some(true), |_, _| {});
        drop(inner);
        self.stats.rdma.paths_up.add(1);
        self.stats.rdma.paths_down.sub(1);
        if back {
            counters.failbacks.add(1);
            self.stats.rdma.failbacks.add(1);
            counters.slower.set(0);
            self.paths[path].share.store(1000, Ordering::Relaxed);
            self.paths[path].speed.lock().path_returned();
        }
        let what = if back { "carries data again" } else { "carries data" };
        tracing::info!(peer = %self.peer, path = %spec.name, kind = %spec.kind, "a path {what}");
        self.changed.notify_all();
    }

    /// Reports that a path could not be connected.
    pub fn connect_failed(&self, path: usize, error: &Error) {
        let mut inner = self.inner.lock();
        let random = next_random(&mut inner.random);
        let state = &mut inner.slots[path].state;
        state.connect_failed(self.started.elapsed(), error.message(), random);
        let again = state.due_at().map(|at| at.saturating_sub(self.started.elapsed()));
        drop(inner);
        let PathEntry { spec, counters, .. } = &self.paths[path];
        counters.set_last_failure(error.message());
        let again = again.map_or(0, |d| d.as_millis().div_ceil(1000));
        tracing::warn!(peer = %self.peer, path = %spec.name, "a path can't be used: {error}; tried again in {again} s");
    }

    /// The paths that need a further channel, with the generation for [`PathPool::add_channel`].
    pub fn begin_growing(&self) -> Vec<(usize, u64)> {
        let mut inner = self.inner.lock();
        let wants = |(i, slot): (usize, &mut PathSlot)| {
            let grow = slot.wanted && self.may_grow(slot);
            if grow {
                (slot.wanted, slot.growing) = (false, true);
            }
            grow.then_some((i, slot.generation))
        };
        inner.slots.iter_mut().enumerate().filter_map(wants).collect()
    }

    /// Reports the result of making a further channel. A failure does not affect working channels; without any, the
    /// path fails, as its requests would otherwise wait until their deadlines.
    pub fn add_channel(&self, path: usize, generation: u64, made: Result<(Box<dyn Channel>, Arc<WelcomeAnswer>)>) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[path];
        if slot.generation != generation {
            // The path has failed since, so its channel is not used.
            drop(inner);
            return;
        }
        slot.growing = false;
        let mut remains = PathRemains::default();
        match made {
            Ok((channel, welcome)) if slot.open < self.most_channels => {
                Self::put_channel(&mut inner, path, channel, welcome)
            }
            Err(error) if slot.open == 0 => {
                let why = format!("its last channel is gone, and no other could be made: {error}");
                remains = self.fail_path(&mut inner, path, &why);
            }
            _ => {}
        }
        drop(inner);
        self.changed.notify_all();
        drop(remains);
    }

    fn put_channel(inner: &mut PathPoolState, path: usize, channel: Box<dyn Channel>, welcome: Arc<WelcomeAnswer>) {
        let number = inner.next_number;
        inner.next_number += 1;
        let slot = &mut inner.slots[path];
        let breaker = channel.breaker();
        slot.breakers.extend(breaker.iter().map(|breaker| (number, Arc::clone(breaker))));
        slot.open += 1;
        let place = ChannelId { path, generation: slot.generation, number };
        let (idle_since, user) = (Instant::now(), ChannelUser::current());
        slot.idle.push((place, PooledChannel { channel, welcome, idle_since, breaks: 0, number, user, breaker }));
    }

    /// Probes idle paths, each at most once per `every`, without sending anything. A path whose channels the peer
    /// closed has failed.
    pub fn check_idle(&self, every: Duration) {
        for (index, path) in self.paths.iter().enumerate() {
            let now = Instant::now();
            let mut inner = self.inner.lock();
            let slot = &mut inner.slots[index];
            let silent = match slot.state.phase() {
                PathPhase::Up => now.saturating_duration_since(slot.last_heard),
                _ => Duration::ZERO,
            };
            path.counters.silent_s.set(silent.as_secs());
            if slot.state.phase() != PathPhase::Up
                || slot.in_flight > 0
                || now.saturating_duration_since(slot.last_checked) < every
            {
                continue;
            }
            slot.last_checked = now;
            // One live channel proves the peer alive: its end closes all of them.
            if slot.idle.first_mut().is_none_or(|(_, entry)| entry.channel.looks_alive()) {
                continue;
            }
            let ended: Vec<_> = slot.idle.extract_if(.., |(_, entry)| !entry.channel.looks_alive()).collect();
            slot.open -= ended.len();
            slot.breakers.retain(|(number, _)| ended.iter().all(|(place, _)| place.number != *number));
            slot.wanted = true;
            let probe = slot.probe.take_if(|probe| !probe.looks_alive());
            let remains = match slot.open {
                0 => self.fail_path(&mut inner, index, IDLE_ENDED),
                _ => PathRemains::default(),
            };
            drop(inner);
            self.changed.notify_all();
            drop((ended, probe, remains));
        }
    }

    /// Closes channels unused for `idle`, except the most recently used one of each path: the peer has connection
    /// slots and memory for a limited number.
    pub fn close_idle(&self, idle: Duration) {
        let now = Instant::now();
        let mut closed = Vec::new();
        let mut inner = self.inner.lock();
        for slot in &mut inner.slots {
            let last = slot.idle.iter().max_by_key(|(_, entry)| entry.idle_since).map(|(place, _)| place.number);
            let unused = |entry: &PooledChannel| now.saturating_duration_since(entry.idle_since) >= idle;
            let before = closed.len();
            closed.extend(slot.idle.extract_if(.., |(place, entry)| Some(place.number) != last && unused(entry)));
            let gone = &closed[before..];
            slot.open -= gone.len();
            slot.breakers.retain(|(number, _)| gone.iter().all(|(place, _)| place.number != *number));
        }
        drop(inner);
        drop(closed);
    }

    /// The paths with requests in flight and no bytes received for `silence`. The caller sends each a heartbeat and
    /// reports the result to [`PathPool::probe_answered`] or [`PathPool::probe_failed`].
    pub fn quiet_paths(&self, silence: Duration) -> Vec<QuietPath> {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let quiet = |(path, slot): (usize, &mut PathSlot)| {
            let silent = now.saturating_duration_since(slot.last_heard) >= silence;
            let ask = slot.in_flight > 0 && silent && !slot.probing && slot.state.phase() == PathPhase::Up;
            ask.then(|| {
                slot.probing = true;
                QuietPath { path, probe: slot.probe.take(), last_heard: slot.last_heard, generation: slot.generation }
            })
        };
        inner.slots.iter_mut().enumerate().filter_map(quiet).collect()
    }

    /// Reports that a heartbeat could not be sent; the path is offered again while it is quiet.
    pub fn probe_skipped(&self, path: usize, generation: u64) {
        let slot = &mut self.inner.lock().slots[path];
        if slot.generation == generation {
            slot.probing = false;
        }
    }

    /// Reports that a quiet path answered a heartbeat over `probe`.
    pub fn probe_answered(&self, quiet: &QuietPath, probe: Box<dyn Channel>) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[quiet.path];
        let mut stranger = Some(probe);
        if slot.generation == quiet.generation {
            slot.probing = false;
            slot.last_heard = Instant::now();
            slot.probe = stranger.take();
        }
        drop(inner);
        drop(stranger);
    }

    /// Reports that a quiet path did not answer. It has failed, unless bytes arrived meanwhile.
    pub fn probe_failed(&self, quiet: &QuietPath, why: &str) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[quiet.path];
        let mut remains = PathRemains::default();
        if slot.generation == quiet.generation {
            slot.probing = false;
            if slot.last_heard == quiet.last_heard && slot.in_flight > 0 {
                remains = self.fail_path(&mut inner, quiet.path, why);
            }
        }
        drop(inner);
        self.changed.notify_all();
        drop(remains);
    }

    /// Reports that the peer is a new process: failed paths are tried at once.
    pub fn peer_restarted(&self) {
        let now = self.started.elapsed();
        self.inner.lock().slots.iter_mut().for_each(|slot| slot.state.peer_restarted(now));
    }

    /// Ends every path, because the peer has other rails now.
    pub fn close(&self, why: &str) {
        for path in 0..self.paths.len() {
            let remains = self.fail_path(&mut self.inner.lock(), path, why);
            drop(remains);
        }
        self.changed.notify_all();
    }

    /// The state of every path, for `status`.
    pub fn view(&self) -> Vec<PathView> {
        let now = self.started.elapsed();
        let inner: MutexGuard<'_, PathPoolState> = self.inner.lock();
        let view = |(path, slot): (&PathEntry, &PathSlot)| PathView {
            spec: path.spec.clone(),
            phase: slot.state.phase(),
            for_time: now.saturating_sub(slot.state.since()),
            channels: slot.open,
            in_flight: slot.in_flight,
            silent: (slot.state.phase() == PathPhase::Up).then(|| slot.last_heard.elapsed()),
            reason: slot.state.reason().map(str::to_owned),
            failovers: slot.state.failovers(),
            failbacks: slot.state.failbacks(),
            speed: path.speed.lock().last(),
        };
        self.paths.iter().zip(&inner.slots).map(view).collect()
    }
}

impl Drop for PathPool {
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

/// xorshift64.
pub(crate) fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[cfg(test)]
mod tests;
