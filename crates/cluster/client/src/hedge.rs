//! Hedged reads: a late read is repeated on a second node, and the first good answer is taken. Late is relative:
//! slower than almost all long reads of the other nodes, and slower than a floor. Owns the reads in flight and the
//! node each waits for; does not know how a node is called.
//!
//! A read in time costs two uncontended locks and no allocation. The second answer lands in its own buffer. The first
//! call is cancelled, which closes its channel before it returns: nothing can land in the reader's memory afterwards.

use crate::latency::ReadTimes;
use crate::peer::GroupPeer;
use crate::remote::GroupClient;
use parking_lot::Mutex;
use spurline_exec::PriorityWorkers;
use spurline_mem::PoolBuf;
use spurline_proto::{NodeRequest, ReadFlags};
use spurline_transport::{CallAnswer, CallError, ChannelBreaker, ChannelLease, PathWake};
use spurline_types::{Error, ObjectRef, Result};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Maximum reads watched at once; further ones are not watched.
const SLOTS: usize = 256;
/// Slots that a reader tries before its read goes unwatched.
const LOOKS: usize = 4;
/// Maximum second requests in flight.
const AT_ONCE: usize = 4;
/// At most one request in this many may be a second one.
const ONE_IN: u64 = 20;
/// Maximum unused budget of second requests.
const SAVED: u64 = 32;
/// Late means slower than this share of the other nodes' long reads.
const PERCENTILE: f64 = 0.95;
/// A second node fetches an uncached block for a read that is this many times as late. A first node that is only busy has answered by
/// then, and the origin is not read twice.
const FETCH_AFTER: u32 = 4;
/// Minimum number of other nodes' reads before any read counts as late.
const LEAST: u64 = 16;
/// Interval of updating the thresholds.
const SETTLE: Duration = Duration::from_millis(250);
/// Half-life of the measured times.
const FADE: Duration = Duration::from_secs(10);
/// The watcher sleeps after this long without a read.
const QUIET: Duration = Duration::from_secs(1);

thread_local! {
    /// The slot of this thread's last read; its cached values often fit the next one.
    static PLACE: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// What a second node was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum SecondRequest {
    #[default]
    None,
    /// Bytes of the node's cache.
    Cached,
    /// The node's cache does not have the bytes.
    NotCached,
    /// Bytes that the node may fetch.
    Any,
}

/// One read in flight.
#[derive(Default)]
struct ReadFlight {
    /// Number of the read in this slot.
    number: u64,
    object: Option<ObjectRef>,
    offset: u64,
    len: usize,
    /// The node called.
    peer: Option<Arc<GroupPeer>>,
    breaker: Option<Arc<dyn ChannelBreaker>>,
    second: SecondRequest,
    /// Its lateness was counted against the node.
    blamed: bool,
    /// The second node's answer.
    answer: Option<PoolBuf>,
}

#[derive(Default)]
struct FlightSlot {
    taken: AtomicBool,
    /// Start of the read in microseconds, never 0; 0 when the slot is free.
    since: AtomicU64,
    /// The second answer arrived and the first call was cancelled.
    answered: AtomicBool,
    flight: Mutex<ReadFlight>,
}

impl FlightSlot {
    /// Delivers a second node's answer to read `number`; false if that read has ended.
    fn deliver_answer(&self, number: u64, buf: PoolBuf) -> bool {
        let mut flight = self.flight.lock();
        if flight.number != number {
            return false;
        }
        flight.answer = Some(buf);
        self.answered.store(true, Ordering::Release);
        // Under the lock, so that the cancelled call is this read's and not a later one's.
        if let Some(breaker) = &flight.breaker {
            breaker.break_channel();
        }
        true
    }

    /// The second node does not have the bytes of read `number`.
    fn note_not_cached(&self, number: u64) {
        let mut flight = self.flight.lock();
        if flight.number == number {
            flight.second = SecondRequest::NotCached;
        }
    }
}

/// The reads in flight of one mount.
pub(crate) struct HedgedReads {
    slots: Box<[FlightSlot]>,
    /// Minimum time of a late read.
    floor: Duration,
    born: Instant,
    /// Most reads of several nodes are late: no node is at fault, and more requests would make it worse.
    all_late: AtomicBool,
    /// Number of deprioritised nodes.
    deprioritised: AtomicUsize,
    asleep: AtomicBool,
    stopping: AtomicBool,
    wake: PathWake,
}

/// A read watched until it ends.
pub(crate) struct WatchedRead<'a> {
    hedge: &'a HedgedReads,
    slot: &'a FlightSlot,
    peer: &'a Arc<GroupPeer>,
    started: Instant,
}

impl HedgedReads {
    /// No read is late before `floor`; zero disables hedging.
    pub fn new(floor: Duration) -> HedgedReads {
        let count = if floor.is_zero() { 0 } else { SLOTS };
        HedgedReads {
            slots: (0..count).map(|_| FlightSlot::default()).collect(),
            floor,
            born: Instant::now(),
            all_late: AtomicBool::new(false),
            deprioritised: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            wake: PathWake::default(),
        }
    }

    /// Whether any node is deprioritised.
    pub fn deprioritises_any(&self) -> bool {
        self.deprioritised.load(Ordering::Relaxed) > 0
    }

    fn claim_slot(&self) -> Option<&FlightSlot> {
        if self.slots.is_empty() {
            return None;
        }
        let mut at = PLACE.get();
        if at == usize::MAX {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            at = NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS;
        }
        for _ in 0..LOOKS {
            let slot = &self.slots[at];
            if slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                PLACE.set(at);
                return Some(slot);
            }
            at = (at + 1) % SLOTS;
        }
        None
    }

    /// Watches a read sent to `peer` now; `breaker` cancels the call.
    pub fn watch_read<'a>(
        &'a self,
        object: &ObjectRef,
        offset: u64,
        len: usize,
        peer: &'a Arc<GroupPeer>,
        breaker: Option<&Arc<dyn ChannelBreaker>>,
    ) -> Option<WatchedRead<'a>> {
        let breaker = breaker?;
        let slot = self.claim_slot()?;
        let started = Instant::now();
        let mut flight = slot.flight.lock();
        // The slot's last read may have ended by a panic. Its late answer is not for this read.
        flight.number += 1;
        flight.answer = None;
        slot.answered.store(false, Ordering::Relaxed);
        if flight.object.as_ref().is_none_or(|known| known.id != object.id || known.path != object.path) {
            flight.object = Some(object.clone());
        }
        if flight.peer.as_ref().is_none_or(|known| !Arc::ptr_eq(known, peer)) {
            flight.peer = Some(Arc::clone(peer));
        }
        if flight.breaker.as_ref().is_none_or(|known| !Arc::ptr_eq(known, breaker)) {
            flight.breaker = Some(Arc::clone(breaker));
        }
        flight.offset = offset;
        flight.len = len;
        flight.second = SecondRequest::None;
        flight.blamed = false;
        drop(flight);
        let since = started.saturating_duration_since(self.born).as_micros() as u64;
        slot.since.store(since.max(1), Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.wake.wake_monitor();
        }
        Some(WatchedRead { hedge: self, slot, peer, started })
    }
}

impl WatchedRead<'_> {
    /// Set when the call is cancelled because another node answered.
    pub fn cancelled_flag(&self) -> &AtomicBool {
        &self.slot.answered
    }

    /// Ends the read: returns `result` of the call over `lease`, or the second node's answer if that came first.
    pub fn end_read(
        self,
        result: Result<CallAnswer, CallError>,
        lease: &mut ChannelLease<'_>,
        dst: &mut [u8],
    ) -> Result<CallAnswer, CallError> {
        let hedge = self.hedge;
        let now = Instant::now();
        let mut flight = self.slot.flight.lock();
        self.slot.since.store(0, Ordering::Release);
        flight.number += 1;
        let second = flight.answer.take();
        let blamed = flight.blamed;
        drop(flight);
        if second.is_some() {
            // The call was cancelled, possibly after its answer arrived.
            lease.discard_channel();
        }
        let took = now.saturating_duration_since(self.started);
        match (&result, second) {
            // A redirect does not show how fast the node reads.
            (Ok(answer), _) if answer.payload_len < dst.len() => result,
            (Ok(_), _) => {
                hedge.note_time(self.peer, took, now, blamed);
                result
            }
            (Err(_), Some(second)) if second.len() == dst.len() => {
                self.peer.latency().note_read(took, hedge.floor);
                if !blamed {
                    hedge.blame_node(self.peer, now);
                }
                dst.copy_from_slice(&second);
                Ok(CallAnswer { payload_len: dst.len() })
            }
            _ => result,
        }
    }
}

impl Drop for WatchedRead<'_> {
    fn drop(&mut self) {
        self.slot.since.store(0, Ordering::Release);
        self.slot.taken.store(false, Ordering::Release);
    }
}

impl HedgedReads {
    /// Records an unwatched read answered by `peer`.
    pub fn note_unwatched(&self, peer: &GroupPeer, started: Instant) {
        if !self.slots.is_empty() {
            let now = Instant::now();
            self.note_time(peer, now.saturating_duration_since(started), now, false);
        }
    }

    fn note_time(&self, peer: &GroupPeer, took: Duration, now: Instant, blamed: bool) {
        let pace = peer.latency();
        pace.note_read(took, self.floor);
        if took > pace.late_after().saturating_mul(2) {
            if !blamed {
                self.blame_node(peer, now);
            }
        } else if pace.note_in_time(now) {
            tracing::info!(peer = peer.name(), "a node answers in time again");
        }
    }

    fn blame_node(&self, peer: &GroupPeer, now: Instant) {
        if self.all_late.load(Ordering::Relaxed) {
            return;
        }
        if peer.latency().note_late(now) {
            // The exact count follows in the next update.
            self.deprioritised.fetch_max(1, Ordering::Relaxed);
            tracing::warn!(peer = peer.name(), "a node answers late repeatedly: other nodes are preferred");
        }
    }
}

/// The watching thread and the threads of second requests; dropping it stops them.
pub(crate) struct HedgeThread {
    inner: Arc<GroupClient>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl HedgeThread {
    /// Watches the reads of `inner`; `None` when hedging is disabled.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(inner: &Arc<GroupClient>) -> Result<Option<HedgeThread>> {
        if inner.hedge.slots.is_empty() {
            return Ok(None);
        }
        let watched = Arc::clone(inner);
        let thread =
            std::thread::Builder::new().name("late-reads".into()).spawn(move || LateReadWatcher::new(&watched).run());
        let thread = thread.map_err(|e| Error::io("can't start the thread that watches reads", &e))?;
        Ok(Some(HedgeThread { inner: Arc::clone(inner), thread: Some(thread) }))
    }
}

impl Drop for HedgeThread {
    fn drop(&mut self) {
        self.inner.hedge.stopping.store(true, Ordering::Release);
        self.inner.hedge.wake.wake_monitor();
        if let Some(thread) = self.thread.take() {
            // The thread only waits for this wake-up.
            let _ = thread.join();
        }
    }
}

struct LateReadWatcher<'a> {
    inner: &'a Arc<GroupClient>,
    workers: PriorityWorkers,
    /// Second requests allowed now, and the request count at the last update.
    allowed: u64,
    counted: u64,
    settled: Instant,
    faded: Instant,
    under_way: Arc<AtomicUsize>,
}

impl<'a> LateReadWatcher<'a> {
    fn new(inner: &'a Arc<GroupClient>) -> Self {
        let now = Instant::now();
        LateReadWatcher {
            inner,
            workers: PriorityWorkers::new("second-read", AT_ONCE),
            allowed: 0,
            counted: 0,
            settled: now,
            faded: now,
            under_way: Arc::default(),
        }
    }

    fn run(mut self) {
        let hedge = &self.inner.hedge;
        let tick = (hedge.floor / 4).clamp(Duration::from_millis(1), Duration::from_millis(25));
        let mut active = Instant::now();
        while !hedge.stopping.load(Ordering::Acquire) {
            let now = Instant::now();
            if self.scan_flights(now) {
                active = now;
            }
            if now.saturating_duration_since(self.settled) >= SETTLE {
                self.update_thresholds(now);
            }
            if now.saturating_duration_since(active) < QUIET {
                hedge.wake.wait_until(now + tick);
                continue;
            }
            hedge.asleep.store(true, Ordering::SeqCst);
            // A read that began before the sleeping flag was visible.
            if !self.scan_flights(now) {
                hedge.wake.wait_until(now + FADE);
            }
            if !hedge.asleep.swap(false, Ordering::SeqCst) {
                active = Instant::now();
            }
        }
    }

    /// Checks all reads in flight; returns whether there are any.
    fn scan_flights(&mut self, now: Instant) -> bool {
        let inner = self.inner;
        let hedge = &inner.hedge;
        let now_us = now.saturating_duration_since(hedge.born).as_micros() as u64;
        let floor_us = hedge.floor.as_micros() as u64;
        let age = |slot: &FlightSlot| match slot.since.load(Ordering::SeqCst) {
            0 => None,
            since => Some(now_us.saturating_sub(since)),
        };
        let mut flights = 0;
        let mut old = 0;
        for slot in &hedge.slots {
            if let Some(age) = age(slot) {
                flights += 1;
                old += usize::from(age > floor_us);
            }
        }
        if old == 0 {
            hedge.all_late.store(false, Ordering::Relaxed);
            return flights > 0;
        }
        // If most reads are late on several nodes, the cause is not one node.
        let mut late = 0;
        let mut nodes = Vec::new();
        let mut candidates = Vec::new();
        for (at, slot) in hedge.slots.iter().enumerate() {
            let Some(age) = age(slot).filter(|age| *age > floor_us) else { continue };
            let flight = slot.flight.lock();
            let Some(peer) = flight.peer.as_ref().filter(|_| slot.since.load(Ordering::Acquire) != 0) else { continue };
            let age = Duration::from_micros(age);
            if age > peer.latency().late_after() {
                late += 1;
                if !nodes.iter().any(|known: &Arc<GroupPeer>| Arc::ptr_eq(known, peer)) {
                    nodes.push(Arc::clone(peer));
                }
                candidates.push((at, flight.number, age));
            }
        }
        let all_late = nodes.len() > 1 && late * 2 > flights;
        hedge.all_late.store(all_late, Ordering::Relaxed);
        if !all_late {
            candidates.into_iter().for_each(|(at, number, age)| self.handle_late(at, number, age, now));
        }
        true
    }

    /// Handles one late read.
    fn handle_late(&mut self, at: usize, number: u64, age: Duration, now: Instant) {
        let inner = self.inner;
        let slot = &inner.hedge.slots[at];
        let mut flight = slot.flight.lock();
        if flight.number != number {
            return;
        }
        let (Some(object), Some(peer)) = (flight.object.clone(), flight.peer.clone()) else { return };
        let late_after = peer.latency().late_after();
        if age > late_after.saturating_mul(2) && !flight.blamed {
            flight.blamed = true;
            inner.hedge.blame_node(&peer, now);
        }
        let wanted = match flight.second {
            SecondRequest::None => SecondRequest::Cached,
            SecondRequest::NotCached if age > late_after.saturating_mul(FETCH_AFTER) => SecondRequest::Any,
            _ => return,
        };
        if self.under_way.load(Ordering::Acquire) >= AT_ONCE || !self.may_send_second() {
            return;
        }
        let offset = flight.offset;
        let len = flight.len;
        let Some(second) = inner.second_peer(&object, offset, &peer) else { return };
        // Only from free memory of the budget.
        let Some(buf) = inner.tier.pool().try_alloc(len) else { return };
        flight.second = wanted;
        drop(flight);
        self.allowed -= 1;
        inner.stats.remotecache.hedges.add(1);
        tracing::debug!(
            late = peer.name(),
            asked = second.name(),
            ?wanted,
            ?age,
            "a late read is sent to a second node"
        );
        let inner = Arc::clone(inner);
        let under_way = SecondInFlight::begin(&self.under_way);
        self.workers.run_urgent(move || {
            let _under_way = under_way;
            call_second_node(&inner, HedgedFlight { at, number, wanted }, &object, offset, buf, &second);
        });
    }

    /// Whether the budget allows one more second request.
    fn may_send_second(&mut self) -> bool {
        if self.allowed == 0 {
            let ops = self.inner.stats.remotecache.ops.get();
            self.allowed = ((ops - self.counted) / ONE_IN).min(SAVED);
            if self.allowed > 0 {
                self.counted = ops;
            }
        }
        self.allowed > 0
    }

    /// Updates each node's threshold, releases nodes that left, and counts deprioritised ones.
    fn update_thresholds(&mut self, now: Instant) {
        self.settled = now;
        let hedge = &self.inner.hedge;
        let view = self.inner.members.snapshot();
        let fades = now.saturating_duration_since(self.faded) >= FADE;
        if fades {
            self.faded = now;
        }
        let mut all = ReadTimes::default();
        view.existing_peers().for_each(|peer| all.add(&peer.latency().read_times()));
        let mut deprioritised = 0;
        for peer in view.existing_peers() {
            let pace = peer.latency();
            let others = all.subtract(&pace.read_times());
            pace.set_late_after((others.reads >= LEAST).then(|| others.percentile(hedge.floor, PERCENTILE)));
            deprioritised += usize::from(pace.is_deprioritised());
            if fades {
                pace.fade();
            }
        }
        hedge.deprioritised.store(deprioritised, Ordering::Relaxed);
        self.inner.stats.remotecache.peers_slow.set(deprioritised as u64);
        if fades {
            // A free slot must not keep a node that left the group.
            for slot in hedge.slots.iter().filter(|slot| !slot.taken.load(Ordering::Acquire)) {
                let mut flight = slot.flight.lock();
                if slot.since.load(Ordering::Acquire) == 0 {
                    flight.object = None;
                    flight.peer = None;
                    flight.breaker = None;
                }
            }
        }
    }
}

/// Counts a second request until it ends or is dropped.
struct SecondInFlight(Arc<AtomicUsize>);

impl SecondInFlight {
    fn begin(count: &Arc<AtomicUsize>) -> SecondInFlight {
        count.fetch_add(1, Ordering::AcqRel);
        SecondInFlight(Arc::clone(count))
    }
}

impl Drop for SecondInFlight {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A read that waits for either of two nodes.
#[derive(Clone, Copy)]
struct HedgedFlight {
    /// The place of its slot.
    at: usize,
    number: u64,
    wanted: SecondRequest,
}

/// Calls the second node and delivers its answer if the read still waits.
fn call_second_node(
    inner: &GroupClient,
    flight: HedgedFlight,
    object: &ObjectRef,
    offset: u64,
    mut buf: PoolBuf,
    second: &Arc<GroupPeer>,
) {
    let deadline = Instant::now() + inner.patience().answer;
    let mut body = Vec::new();
    let plan = inner.plan_read(object, offset, &buf, deadline);
    let is_cached_only = flight.wanted == SecondRequest::Cached;
    let got = second.call_once(&plan.call, &mut |lease, deadline| {
        let mut request = plan.request(lease.welcome().volume, false);
        if is_cached_only {
            request.flags = ReadFlags::CACHED_ONLY;
        }
        lease.call(&NodeRequest::Read(request), &mut body, &mut buf, &mut |_| {}, deadline)
    });
    if !got.is_ok_and(|answer| answer.payload_len == buf.len()) {
        if is_cached_only {
            inner.hedge.slots[flight.at].note_not_cached(flight.number);
        }
        return;
    }
    if inner.hedge.slots[flight.at].deliver_answer(flight.number, buf) {
        inner.stats.remotecache.hedges_won.add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_mem::BufferPool;
    use spurline_net_sim::{AfterAnswer, FaultPlan, FaultRates, SimNode};
    use spurline_transport::{DemandConfig, DemandPool};
    use spurline_types::{Member, Version};

    struct Unbroken;

    impl ChannelBreaker for Unbroken {
        fn break_channel(&self) {
            panic!("a finished call is aborted");
        }
    }

    #[test]
    fn what_comes_for_a_read_that_panicked_is_not_handed_to_the_next_one_in_its_place() {
        let hedge = HedgedReads::new(Duration::from_millis(1));
        let node = SimNode::with_script(
            "n",
            |_| (Vec::new(), AfterAnswer::Close),
            Arc::new(FaultPlan::new(1, FaultRates::default())),
        );
        let pool = DemandPool::new(node.connector(), "m", "s", DemandConfig::default(), Arc::default());
        let peer = GroupPeer::new(pool, &Member::from_address("n", 100));
        let buffers = BufferPool::new(64 << 10, 4096).unwrap();
        let breaker: Arc<dyn ChannelBreaker> = Arc::new(Unbroken);
        let object = |name: &str| ObjectRef::new("s", name.as_bytes(), Version::new("1"), 4096);
        let watch = |name| hedge.watch_read(&object(name), 0, 4096, &peer, Some(&breaker)).unwrap();
        let first = watch("a");
        let (slot, number) = (first.slot, first.slot.flight.lock().number);
        drop(first);
        let second = watch("b");
        assert!(std::ptr::eq(slot, second.slot), "the same place");
        assert!(!slot.deliver_answer(number, buffers.try_alloc(4096).unwrap()), "that read is over");
        assert!(slot.flight.lock().answer.is_none() && !second.cancelled_flag().load(Ordering::Acquire));
        // The answer may also arrive before the next read begins.
        slot.flight.lock().answer = Some(buffers.try_alloc(4096).unwrap());
        slot.answered.store(true, Ordering::Release);
        drop(second);
        let third = watch("c");
        assert!(slot.flight.lock().answer.is_none() && !third.cancelled_flag().load(Ordering::Acquire));
    }
}
