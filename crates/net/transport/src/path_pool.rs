//! The paths to one peer and the channels on them: which channel a request takes, and which channels die together.
//! Channels are made and paths are watched by somebody else, in the background; nothing here connects, so no request
//! ever waits for a connection attempt.

use crate::path_speed::{self, PathSpeed, SpeedCheck};
use crate::pool::{Entry, User};
use crate::{Breaker, Channel, Lease, PathState, PathTiming, Phase, TransportKind};
use parking_lot::{Condvar, Mutex, MutexGuard};
use spurline_proto::Welcome;
use spurline_types::{Error, ErrorKind, PathStats, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Channels idle for longer are looked at before they are used.
const PROBE_AFTER: Duration = Duration::from_secs(1);

/// Why a path failed that nobody used.
const IDLE_ENDED: &str = "its connections ended while they were idle";

/// One path as its maker describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSpec {
    /// Both rails, for logs: `ib0-ib1`.
    pub name: String,
    /// What carries the bytes.
    pub kind: TransportKind,
    /// Which local rail; a large read is split over several.
    pub local: usize,
    /// Its speed relative to the other paths', at least 1.
    pub speed_mbit: u32,
}

/// One path as `status` shows it.
#[derive(Debug, Clone)]
pub struct PathView {
    /// What it is.
    pub spec: PathSpec,
    /// What it does.
    pub phase: Phase,
    /// For how long.
    pub for_time: Duration,
    /// Channels on it.
    pub channels: usize,
    /// Requests on it now.
    pub in_flight: usize,
    /// How long ago anything came over it, while it carries data: a peer that lost its power says no goodbye.
    pub silent: Option<Duration>,
    /// Why it last failed.
    pub reason: Option<String>,
    /// How often it failed while it carried data.
    pub failovers: u64,
    /// How often it carried data again after that.
    pub failbacks: u64,
    /// Whether its reads take longer than before it last failed; none before that is known.
    pub speed: Option<SpeedCheck>,
}

/// Wakes whoever watches paths.
#[derive(Debug, Default)]
pub struct Wake {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Wake {
    /// Ends the wait that is under way, or else the next one.
    pub fn ring(&self) {
        *self.rung.lock() = true;
        self.changed.notify_all();
    }
    /// Waits until it is rung, or until `deadline`.
    pub fn wait(&self, deadline: Instant) {
        let mut rung = self.rung.lock();
        while !*rung && !self.changed.wait_until(&mut rung, deadline).timed_out() {}
        *rung = false;
    }
}

/// Requests under way on each rail of this machine, to whatever peer.
#[derive(Debug)]
pub struct RailLoads([AtomicUsize; u64::BITS as usize]);

impl Default for RailLoads {
    fn default() -> Self {
        RailLoads(std::array::from_fn(|_| AtomicUsize::new(0)))
    }
}

impl RailLoads {
    fn of(&self, spec: &PathSpec) -> &AtomicUsize {
        &self.0[spec.local % self.0.len()]
    }
}

/// Where a leased channel came from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub path: usize,
    /// Of the path when the channel was made: after a failure its channels are strangers.
    generation: u64,
    /// Unique among the channels of this pool.
    number: u64,
}

struct Path {
    spec: PathSpec,
    counters: Arc<PathStats>,
    speed: Mutex<PathSpeed>,
    /// With how many thousandths of its speed it is loaded: fewer while it is slower than before it failed.
    share: AtomicU32,
}

impl Path {
    fn load_speed(&self) -> u32 {
        let speed = u64::from(self.spec.speed_mbit.max(1)) * u64::from(self.share.load(Ordering::Relaxed)) / 1000;
        u32::try_from(speed).unwrap_or(u32::MAX).max(1)
    }
}

struct Slot {
    state: PathState,
    idle: Vec<(Place, Entry)>,
    /// Idle and leased.
    open: usize,
    in_flight: usize,
    /// When anything last came over the path, or its first request was sent.
    heard: Instant,
    /// When its idle channels were last looked at.
    looked: Instant,
    generation: u64,
    breakers: Vec<(u64, Arc<dyn Breaker>)>,
    /// A request found no idle channel.
    wanted: bool,
    /// One more channel is being made.
    growing: bool,
    /// Kept for asking for a sign of life while all others wait for answers.
    probe: Option<Box<dyn Channel>>,
    probing: bool,
}

struct Inner {
    slots: Vec<Slot>,
    next_number: u64,
    random: u64,
}

/// The paths to one peer.
pub struct PathPool {
    peer: String,
    paths: Vec<Path>,
    most_channels: usize,
    stats: Arc<Stats>,
    started: Instant,
    wake: Arc<Wake>,
    rails: Arc<RailLoads>,
    /// Paths that carry data: read without the lock by every request of a peer that has any.
    up: AtomicUsize,
    inner: Mutex<Inner>,
    changed: Condvar,
}

/// A path that owes answers and has been silent for a while.
pub struct Quiet {
    /// Which path.
    pub path: usize,
    /// The channel to ask for a sign of life on; `None` when it broke before.
    pub probe: Option<Box<dyn Channel>>,
    heard: Instant,
    generation: u64,
}

impl Quiet {
    /// Its path and which life of it, for [`PathPool::not_asked`].
    pub fn place(&self) -> (usize, u64) {
        (self.path, self.generation)
    }
}

/// What is to be broken and dropped once the lock is free: both may take a while.
#[derive(Default)]
struct Remains {
    breakers: Vec<(u64, Arc<dyn Breaker>)>,
    _idle: Vec<(Place, Entry)>,
    _probe: Option<Box<dyn Channel>>,
}

/// What was found to have ended, for whoever holds the lock to drop without it: a NIC's firmware may take its time.
#[derive(Default)]
struct Dead {
    channels: Vec<Entry>,
    paths: Vec<Remains>,
}

impl Dead {
    fn is_empty(&self) -> bool {
        self.channels.is_empty() && self.paths.is_empty()
    }
    fn clear(&mut self) {
        self.channels.clear();
        self.paths.clear();
    }
}

impl Drop for Remains {
    fn drop(&mut self) {
        // First those who wait for answers that will not come.
        for (_, breaker) in self.breakers.drain(..) {
            breaker.break_off();
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
        wake: Arc<Wake>,
    ) -> Self {
        let slot = |_: &PathSpec| Slot {
            state: PathState::new(timing, Duration::ZERO),
            idle: Vec::with_capacity(most_channels),
            open: 0,
            in_flight: 0,
            heard: Instant::now(),
            looked: Instant::now(),
            generation: 0,
            breakers: Vec::new(),
            wanted: false,
            growing: false,
            probe: None,
            probing: false,
        };
        let slots: Vec<Slot> = specs.iter().map(slot).collect();
        stats.rdma.paths_down.add(slots.len() as u64);
        let path = |spec: PathSpec| {
            let counters = stats.paths.of(peer, &spec.name, &spec.kind.to_string());
            Path { spec, counters, speed: Mutex::default(), share: AtomicU32::new(1000) }
        };
        PathPool {
            peer: peer.to_owned(),
            paths: specs.into_iter().map(path).collect(),
            most_channels: most_channels.max(1),
            started: Instant::now(),
            wake,
            rails: Arc::default(),
            up: AtomicUsize::new(0),
            inner: Mutex::new(Inner { slots, next_number: 1, random: seed | 1 }),
            changed: Condvar::new(),
            stats,
        }
    }

    /// The same, with the loads of this machine's rails that the pools of all peers share.
    pub fn sharing(mut self, rails: Arc<RailLoads>) -> Self {
        self.rails = rails;
        self
    }

    /// The peer's address as configured.
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Paths there are.
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Paths that carry data now.
    pub fn up(&self) -> usize {
        self.up.load(Ordering::Acquire)
    }

    pub(crate) fn counters(&self, place: Place) -> (&Stats, &PathStats) {
        (&self.stats, &self.paths[place.path].counters)
    }

    /// A read over the path of `place` brought `len` bytes in this time. After a failback such reads are compared with
    /// those before the fault; a path that is slower carries less, in proportion, where there are others.
    pub(crate) fn measured(&self, place: Place, len: usize, took: Duration) {
        if len < path_speed::LEAST {
            return;
        }
        let path = &self.paths[place.path];
        let under_way = self.inner.lock().slots[place.path].in_flight;
        let mut speed = path.speed.lock();
        let check = speed.add(len, took, under_way);
        path.counters.usual_bytes_per_s.set(speed.usual().unwrap_or(0));
        drop(speed);
        let Some(check) = check else { return };
        path.share.store(check.share(), Ordering::Relaxed);
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
                "a path is slower than before it failed: {after} MB/s, {usual} before; it is given less where there are \
                 others; 'spurline net doctor' looks at the link, 'spurline net bw' measures it"
            );
        }
    }

    /// A request was sent again elsewhere because the path of `lease`'s channel failed.
    pub fn count_retry(&self, path: usize) {
        self.stats.rdma.retries.add(1);
        self.paths[path].counters.retries.add(1);
    }

    /// Takes an idle channel of the path that is least loaded for its speed; waits for one while all are in use. Among
    /// equals it is one of the rails `near` the memory that is read into (bits by [`PathSpec::local`], 0 where all are
    /// equally near), unless another rail would lie idle meanwhile; at random among what is left. `None` when no path
    /// carries data.
    ///
    /// # Errors
    /// `Timeout` when every channel was in use until `deadline`.
    pub fn checkout(&self, deadline: Instant, near: u64) -> Result<Option<Lease<'_>>> {
        if self.up() == 0 {
            return Ok(None);
        }
        // Dropped after the lock is free.
        let mut dead = Dead::default();
        let mut inner = self.inner.lock();
        loop {
            if let Some((place, entry)) = self.pick(&mut inner, 0, near, &mut dead) {
                return Ok(Some(Lease::of_path(self, place, entry)));
            }
            let (mut any_up, mut grows) = (false, false);
            for slot in inner.slots.iter_mut().filter(|slot| slot.state.phase() == Phase::Up) {
                any_up = true;
                if self.may_grow(slot) {
                    (slot.wanted, grows) = (true, true);
                }
            }
            if !any_up {
                return Ok(None);
            }
            if grows {
                self.wake.ring();
            }
            if !dead.is_empty() {
                MutexGuard::unlocked(&mut inner, || dead.clear());
                continue;
            }
            if self.changed.wait_until(&mut inner, deadline).timed_out() {
                let why = format!(
                    "{}: all {} channels of each path were in use until the deadline; raise --nconnect or look at why answers are slow",
                    self.peer, self.most_channels
                );
                return Err(Error::new(ErrorKind::Timeout, why));
            }
        }
    }

    /// Takes an idle channel of another local rail than those in `taken` (bits by [`PathSpec::local`]), without
    /// waiting; for reads that are split. Gives its speed and its rail's bit, too. `near` is as for
    /// [`PathPool::checkout`].
    pub fn checkout_beside(&self, taken: u64, near: u64) -> Option<(Lease<'_>, u32, u64)> {
        if self.up() == 0 {
            return None;
        }
        let mut dead = Dead::default();
        let (place, entry) = self.pick(&mut self.inner.lock(), taken, near, &mut dead)?;
        let path = &self.paths[place.path];
        Some((Lease::of_path(self, place, entry), path.load_speed(), rail_bit(&path.spec)))
    }

    fn pick(&self, inner: &mut Inner, taken: u64, near: u64, dead: &mut Dead) -> Option<(Place, Entry)> {
        loop {
            let mut best: Option<usize> = None;
            let mut equals = 0;
            for index in 0..inner.slots.len() {
                let slot = &inner.slots[index];
                if slot.idle.is_empty() || !self.may_take(inner, index, taken) {
                    continue;
                }
                let compared = |best| self.compare(inner, index, best).then_with(|| self.nearer(index, best, near));
                match best.map_or(std::cmp::Ordering::Less, compared) {
                    std::cmp::Ordering::Less => (best, equals) = (Some(index), 1),
                    std::cmp::Ordering::Equal => {
                        // One of n equals replaces those before it once in n times.
                        equals += 1;
                        if step(&mut inner.random).is_multiple_of(equals) {
                            best = Some(index);
                        }
                    }
                    std::cmp::Ordering::Greater => {}
                }
            }
            let index = best?;
            // A path that would have been better and has all channels in use gets more, or slow rails would carry as
            // much as fast ones for ever.
            for other in 0..inner.slots.len() {
                let better = self.may_take(inner, other, taken) && self.compare(inner, other, index).is_lt();
                let slot = &mut inner.slots[other];
                if better && slot.idle.is_empty() && !slot.wanted && self.may_grow(slot) {
                    slot.wanted = true;
                    self.wake.ring();
                }
            }
            let at = step(&mut inner.random) as usize % inner.slots[index].idle.len();
            let slot = &mut inner.slots[index];
            let (place, mut entry) = slot.idle.swap_remove(at);
            let now = Instant::now();
            if now.saturating_duration_since(entry.idle_since) < PROBE_AFTER || entry.channel.probe() {
                if slot.in_flight == 0 {
                    slot.heard = now;
                }
                slot.in_flight += 1;
                self.rails.of(&self.paths[index].spec).fetch_add(1, Ordering::Relaxed);
                return Some((place, entry));
            }
            // It ended while nobody used it. The path may be fine; without any channel left it is not.
            slot.open -= 1;
            slot.breakers.retain(|(number, _)| *number != place.number);
            slot.wanted = true;
            if slot.open == 0 {
                dead.paths.push(self.bring_down(inner, index, IDLE_ENDED));
                self.changed.notify_all();
            }
            dead.channels.push(entry);
            self.wake.ring();
        }
    }

    fn may_take(&self, inner: &Inner, index: usize, taken: u64) -> bool {
        inner.slots[index].state.phase() == Phase::Up && taken & rail_bit(&self.paths[index].spec) == 0
    }

    fn may_grow(&self, slot: &Slot) -> bool {
        slot.open < self.most_channels && !slot.growing && slot.state.phase() == Phase::Up
    }

    /// Which of two paths is less loaded for its speed: (in flight + 1) / speed, without dividing.
    fn compare(&self, inner: &Inner, a: usize, b: usize) -> std::cmp::Ordering {
        let load = |of: usize, other: usize| {
            (inner.slots[of].in_flight as u64 + 1) * u64::from(self.paths[other].load_speed())
        };
        load(a, b).cmp(&load(b, a))
    }

    /// Which of two equally loaded paths is to be taken for memory near some rails: a rail that is idle before one that
    /// is not, whatever peers they lead to, then one that is near.
    fn nearer(&self, a: usize, b: usize, near: u64) -> std::cmp::Ordering {
        let far = |path: usize| {
            let spec = &self.paths[path].spec;
            (self.rails.of(spec).load(Ordering::Relaxed) > 0, near & rail_bit(spec) == 0)
        };
        if near == 0 { std::cmp::Ordering::Equal } else { far(a).cmp(&far(b)) }
    }

    /// A request on the path is over.
    fn ended(&self, inner: &mut Inner, path: usize) {
        inner.slots[path].in_flight -= 1;
        self.rails.of(&self.paths[path].spec).fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn give_back(&self, place: Place, mut entry: Entry) {
        let now = Instant::now();
        entry.idle_since = now;
        let mut inner = self.inner.lock();
        self.ended(&mut inner, place.path);
        let slot = &mut inner.slots[place.path];
        let stranger = if slot.generation == place.generation {
            slot.heard = now;
            slot.idle.push((place, entry));
            None
        } else {
            Some(entry)
        };
        drop(inner);
        self.changed.notify_one();
        drop(stranger);
    }

    /// Closes a channel that broke. Its path is given up with it for the `error`, unless it was only too slow: whether a
    /// path is silent is found out by asking it.
    pub(crate) fn give_up(&self, place: Place, entry: Entry, error: Option<&Error>) {
        let mut inner = self.inner.lock();
        self.ended(&mut inner, place.path);
        let slot = &mut inner.slots[place.path];
        let mut remains = Remains::default();
        if slot.generation == place.generation {
            slot.open -= 1;
            slot.wanted = true;
            slot.breakers.retain(|(number, _)| *number != place.number);
            if let Some(error) = error {
                remains = self.bring_down(&mut inner, place.path, error.message());
            }
        }
        drop(inner);
        self.changed.notify_all();
        self.wake.ring();
        // The caller's memory is free for others once this returns: the channel is gone by then.
        drop(entry);
        drop(remains);
    }

    /// Ends a path that carried data; its channels are the caller's to drop.
    fn bring_down(&self, inner: &mut Inner, path: usize, why: &str) -> Remains {
        let now = self.started.elapsed();
        if !inner.slots[path].state.failed(now, why) {
            return Remains::default();
        }
        self.clear(inner, path, why)
    }

    fn clear(&self, inner: &mut Inner, path: usize, why: &str) -> Remains {
        let slot = &mut inner.slots[path];
        slot.generation += 1;
        slot.open = 0;
        slot.wanted = false;
        slot.growing = false;
        slot.probing = false;
        let remains = Remains {
            breakers: std::mem::take(&mut slot.breakers),
            _idle: std::mem::take(&mut slot.idle),
            _probe: slot.probe.take(),
        };
        let in_flight = slot.in_flight;
        self.up.fetch_sub(1, Ordering::AcqRel);
        let Path { spec, counters, .. } = &self.paths[path];
        counters.says(Some(true), None, |_, _| {});
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

    // What the watcher calls.

    /// Says whether each local rail's link is up.
    pub fn links(&self, up: &dyn Fn(usize) -> bool) {
        for (index, path) in self.paths.iter().enumerate() {
            let link = up(path.spec.local);
            let mut inner = self.inner.lock();
            let before = inner.slots[index].state.phase();
            let carried = inner.slots[index].state.link(self.started.elapsed(), link);
            let after = inner.slots[index].state.phase();
            let remains = carried.then(|| self.clear(&mut inner, index, "the local link went down"));
            drop(inner);
            if before != after && !carried {
                tracing::info!(peer = %self.peer, path = %path.spec.name, "the local link {}", match after {
                    Phase::Settling => "came back; it carries data when it has settled",
                    _ => "is down",
                });
            }
            if carried {
                self.changed.notify_all();
            }
            drop(remains);
        }
    }

    /// Paths to be connected now; each counts as being connected from here on.
    pub fn due(&self) -> Vec<usize> {
        let now = self.started.elapsed();
        let mut inner = self.inner.lock();
        inner.slots.iter_mut().enumerate().filter_map(|(i, slot)| slot.state.begin(now).then_some(i)).collect()
    }

    /// When the next path is due.
    pub fn next_due(&self) -> Option<Instant> {
        let inner = self.inner.lock();
        inner.slots.iter().filter_map(|slot| slot.state.due_at()).min().map(|at| self.started + at)
    }

    /// Whether a path is being connected or due at this moment: a start waits for the first attempts.
    pub fn undecided(&self) -> bool {
        let inner = self.inner.lock();
        inner.slots.iter().any(|slot| matches!(slot.state.phase(), Phase::Due | Phase::Connecting))
    }

    /// Requests under way.
    pub fn in_flight(&self) -> usize {
        self.inner.lock().slots.iter().map(|slot| slot.in_flight).sum()
    }

    /// A path that was due has its first channel, and one for signs of life.
    pub fn connected(
        &self,
        path: usize,
        channel: Box<dyn Channel>,
        welcome: Arc<Welcome>,
        probe: Option<Box<dyn Channel>>,
    ) {
        let mut inner = self.inner.lock();
        let back = {
            let state = &mut inner.slots[path].state;
            let failbacks = state.failbacks();
            if !state.connected(self.started.elapsed()) {
                // Its link went down meanwhile.
                drop(inner);
                return;
            }
            state.failbacks() > failbacks
        };
        inner.slots[path].heard = Instant::now();
        inner.slots[path].probe = probe;
        Self::put(&mut inner, path, channel, welcome);
        self.up.fetch_add(1, Ordering::AcqRel);
        let Path { spec, counters, .. } = &self.paths[path];
        counters.says(None, Some(true), |_, _| {});
        drop(inner);
        self.stats.rdma.paths_up.add(1);
        self.stats.rdma.paths_down.sub(1);
        if back {
            counters.failbacks.add(1);
            self.stats.rdma.failbacks.add(1);
            counters.slower.set(0);
            self.paths[path].share.store(1000, Ordering::Relaxed);
            self.paths[path].speed.lock().back();
        }
        let what = if back { "carries data again" } else { "carries data" };
        tracing::info!(peer = %self.peer, path = %spec.name, kind = %spec.kind, "a path {what}");
        self.changed.notify_all();
    }

    /// A path that was due could not be connected.
    pub fn connect_failed(&self, path: usize, error: &Error) {
        let mut inner = self.inner.lock();
        let random = step(&mut inner.random);
        let state = &mut inner.slots[path].state;
        state.connect_failed(self.started.elapsed(), error.message(), random);
        let again = state.due_at().map(|at| at.saturating_sub(self.started.elapsed()));
        drop(inner);
        let Path { spec, counters, .. } = &self.paths[path];
        counters.set_last_failure(error.message());
        let again = again.map_or(0, |d| d.as_millis().div_ceil(1000));
        tracing::warn!(peer = %self.peer, path = %spec.name, "a path can't be used: {error}; tried again in {again} s");
    }

    /// Paths that carry data and want one more channel, with what [`PathPool::add`] takes.
    pub fn wanting(&self) -> Vec<(usize, u64)> {
        let mut inner = self.inner.lock();
        let wants = |(i, slot): (usize, &mut Slot)| {
            let grow = slot.wanted && self.may_grow(slot);
            if grow {
                (slot.wanted, slot.growing) = (false, true);
            }
            grow.then_some((i, slot.generation))
        };
        inner.slots.iter_mut().enumerate().filter_map(wants).collect()
    }

    /// What came of making one more channel for a path. That it could not be made says nothing of the channels that work;
    /// where there is none left the path has failed, or its requests would wait for one until their deadlines.
    pub fn add(&self, path: usize, generation: u64, made: Result<(Box<dyn Channel>, Arc<Welcome>)>) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[path];
        if slot.generation != generation {
            // The path failed since: this is a channel of a path that is not trusted any more.
            drop(inner);
            return;
        }
        slot.growing = false;
        let mut remains = Remains::default();
        match made {
            Ok((channel, welcome)) if slot.open < self.most_channels => Self::put(&mut inner, path, channel, welcome),
            Err(error) if slot.open == 0 => {
                let why = format!("its last channel is gone, and no other could be made: {error}");
                remains = self.bring_down(&mut inner, path, &why);
            }
            _ => {}
        }
        drop(inner);
        self.changed.notify_all();
        drop(remains);
    }

    fn put(inner: &mut Inner, path: usize, channel: Box<dyn Channel>, welcome: Arc<Welcome>) {
        let number = inner.next_number;
        inner.next_number += 1;
        let slot = &mut inner.slots[path];
        let breaker = channel.breaker();
        slot.breakers.extend(breaker.iter().map(|breaker| (number, Arc::clone(breaker))));
        slot.open += 1;
        let place = Place { path, generation: slot.generation, number };
        let (idle_since, user) = (Instant::now(), User::this());
        slot.idle.push((place, Entry { channel, welcome, idle_since, breaks: 0, number, user, breaker }));
    }

    /// Looks at paths that nobody uses, each again after `every`, and sends nothing: a path whose channels the peer ended
    /// has failed, as its next request would find out.
    pub fn look(&self, every: Duration) {
        for (index, path) in self.paths.iter().enumerate() {
            let now = Instant::now();
            let mut inner = self.inner.lock();
            let slot = &mut inner.slots[index];
            let silent = match slot.state.phase() {
                Phase::Up => now.saturating_duration_since(slot.heard),
                _ => Duration::ZERO,
            };
            path.counters.silent_s.set(silent.as_secs());
            if slot.state.phase() != Phase::Up
                || slot.in_flight > 0
                || now.saturating_duration_since(slot.looked) < every
            {
                continue;
            }
            slot.looked = now;
            // One that lives stands for all: what ends a peer ends all of them.
            if slot.idle.first_mut().is_none_or(|(_, entry)| entry.channel.probe()) {
                continue;
            }
            let ended: Vec<_> = slot.idle.extract_if(.., |(_, entry)| !entry.channel.probe()).collect();
            slot.open -= ended.len();
            slot.breakers.retain(|(number, _)| ended.iter().all(|(place, _)| place.number != *number));
            slot.wanted = true;
            let probe = slot.probe.take_if(|probe| !probe.probe());
            let remains = match slot.open {
                0 => self.bring_down(&mut inner, index, IDLE_ENDED),
                _ => Remains::default(),
            };
            drop(inner);
            self.changed.notify_all();
            drop((ended, probe, remains));
        }
    }

    /// Closes channels that nobody used for `idle`, but for the one of each path that was used last: the peer has a place, and
    /// memory, for so many connections only, and others may need them.
    pub fn close_idle(&self, idle: Duration) {
        let now = Instant::now();
        let mut closed = Vec::new();
        let mut inner = self.inner.lock();
        for slot in &mut inner.slots {
            let last = slot.idle.iter().max_by_key(|(_, entry)| entry.idle_since).map(|(place, _)| place.number);
            let unused = |entry: &Entry| now.saturating_duration_since(entry.idle_since) >= idle;
            let before = closed.len();
            closed.extend(slot.idle.extract_if(.., |(place, entry)| Some(place.number) != last && unused(entry)));
            let gone = &closed[before..];
            slot.open -= gone.len();
            slot.breakers.retain(|(number, _)| gone.iter().all(|(place, _)| place.number != *number));
        }
        drop(inner);
        drop(closed);
    }

    /// Paths that owe answers and over which nothing came for `silence`; each is asked for a sign of life, and what
    /// came of it is told to [`PathPool::answered`] or [`PathPool::silent`].
    pub fn quiet(&self, silence: Duration) -> Vec<Quiet> {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let quiet = |(path, slot): (usize, &mut Slot)| {
            let silent = now.saturating_duration_since(slot.heard) >= silence;
            let ask = slot.in_flight > 0 && silent && !slot.probing && slot.state.phase() == Phase::Up;
            ask.then(|| {
                slot.probing = true;
                Quiet { path, probe: slot.probe.take(), heard: slot.heard, generation: slot.generation }
            })
        };
        inner.slots.iter_mut().enumerate().filter_map(quiet).collect()
    }

    /// A quiet path could not be asked: it is asked again when it is still quiet.
    pub fn not_asked(&self, path: usize, generation: u64) {
        let slot = &mut self.inner.lock().slots[path];
        if slot.generation == generation {
            slot.probing = false;
        }
    }

    /// A quiet path gave a sign of life over `probe`.
    pub fn answered(&self, quiet: &Quiet, probe: Box<dyn Channel>) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[quiet.path];
        let mut stranger = Some(probe);
        if slot.generation == quiet.generation {
            slot.probing = false;
            slot.heard = Instant::now();
            slot.probe = stranger.take();
        }
        drop(inner);
        drop(stranger);
    }

    /// A quiet path gave none. It has failed, unless something came over it after all.
    pub fn silent(&self, quiet: &Quiet, why: &str) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[quiet.path];
        let mut remains = Remains::default();
        if slot.generation == quiet.generation {
            slot.probing = false;
            if slot.heard == quiet.heard && slot.in_flight > 0 {
                remains = self.bring_down(&mut inner, quiet.path, why);
            }
        }
        drop(inner);
        self.changed.notify_all();
        drop(remains);
    }

    /// The peer is another process than before: paths that failed are tried at once.
    pub fn renew(&self) {
        let now = self.started.elapsed();
        self.inner.lock().slots.iter_mut().for_each(|slot| slot.state.renewed(now));
    }

    /// Ends every path: the peer has other rails now.
    pub fn close(&self, why: &str) {
        for path in 0..self.paths.len() {
            let remains = self.bring_down(&mut self.inner.lock(), path, why);
            drop(remains);
        }
        self.changed.notify_all();
    }

    /// Every path, for `status`.
    pub fn view(&self) -> Vec<PathView> {
        let now = self.started.elapsed();
        let inner: MutexGuard<'_, Inner> = self.inner.lock();
        let view = |(path, slot): (&Path, &Slot)| PathView {
            spec: path.spec.clone(),
            phase: slot.state.phase(),
            for_time: now.saturating_sub(slot.state.since()),
            channels: slot.open,
            in_flight: slot.in_flight,
            silent: (slot.state.phase() == Phase::Up).then(|| slot.heard.elapsed()),
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
            if slot.state.phase() == Phase::Up {
                path.counters.says(Some(true), None, |_, _| {});
            }
            path.counters.silent_s.set(0);
        }
    }
}

/// Rails past the 64th share a bit; no machine has as many.
fn rail_bit(spec: &PathSpec) -> u64 {
    1 << (spec.local % 64)
}

/// xorshift64.
pub(crate) fn step(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[cfg(test)]
mod tests;
