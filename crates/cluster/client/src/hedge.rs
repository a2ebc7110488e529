//! Reads that are late are asked of a second node, and the first good answer is taken. What is late is measured: longer
//! than almost all long reads of the other nodes, and longer than a floor. It knows which reads are under way and
//! whom they wait for; how a node is asked is known below.
//!
//! A read that is in time costs two uncontended locks and no allocation. The second answer comes into memory of its
//! own; the first call is broken off, which ends its channel before it returns, so nothing can land in the reader's
//! memory afterwards.

use crate::pace::Times;
use crate::peer::{Peer, middle};
use crate::reads::read_of;
use crate::remote::Inner;
use parking_lot::Mutex;
use spurline_mem::Buf;
use spurline_proto::Request;
use spurline_transport::{Answer, Breaker, CallError, Lease, Wake};
use spurline_types::{Error, ObjectRef, Result};
use spurline_volume::Workers;
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Reads watched at one time; of more, some are not.
const SLOTS: usize = 256;
/// How many places a reader looks at for one that is free.
const LOOKS: usize = 4;
/// Second requests under way at one time.
const AT_ONCE: usize = 4;
/// One request in so many may be a second one.
const ONE_IN: u64 = 20;
/// The most that is saved up of that.
const SAVED: u64 = 32;
/// This share of the long reads of the other nodes is no longer than what is late.
const PERCENTILE: f64 = 0.95;
/// So many reads of other nodes have to be seen before anything is late.
const LEAST: u64 = 16;
/// How often it is worked out anew what is late.
const SETTLE: Duration = Duration::from_millis(250);
/// How often what was measured loses half its weight.
const FADE: Duration = Duration::from_secs(10);
/// Without a read for this long nobody watches.
const QUIET: Duration = Duration::from_secs(1);

thread_local! {
    /// The place this thread's last read had: what is remembered there is most often right for the next, too.
    static PLACE: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// One read under way.
#[derive(Default)]
struct Flight {
    /// Which read of this place.
    number: u64,
    object: Option<ObjectRef>,
    offset: u64,
    len: usize,
    /// Who is asked.
    peer: Option<Arc<Peer>>,
    breaker: Option<Arc<dyn Breaker>>,
    /// A second node was asked.
    doubled: bool,
    /// That it is late was held against its node.
    blamed: bool,
    /// What the second node answered.
    answer: Option<Buf>,
}

#[derive(Default)]
struct Slot {
    taken: AtomicBool,
    /// When the read began, in microseconds and not 0; 0 when there is none.
    since: AtomicU64,
    /// The second answer is there, and the first call broken off.
    answered: AtomicBool,
    flight: Mutex<Flight>,
}

impl Slot {
    /// Hands a second node's answer to the read of this number; whether that still waits.
    fn answer(&self, number: u64, buf: Buf) -> bool {
        let mut flight = self.flight.lock();
        if flight.number != number {
            return false;
        }
        flight.answer = Some(buf);
        self.answered.store(true, Ordering::Release);
        // Under the lock: the read can't end before, so it is its call that is broken off and nobody else's.
        if let Some(breaker) = &flight.breaker {
            breaker.break_off();
        }
        true
    }
}

/// The reads under way of one mount.
pub(crate) struct Hedge {
    slots: Box<[Slot]>,
    /// What takes no longer is never late.
    floor: Duration,
    born: Instant,
    /// Nodes that are late are many: that is no node's fault, and more requests would make it worse.
    all_late: AtomicBool,
    /// Nodes that others are asked before.
    shunned: AtomicUsize,
    asleep: AtomicBool,
    stopping: AtomicBool,
    wake: Wake,
}

/// A read that is watched until it ends.
pub(crate) struct Watched<'a> {
    hedge: &'a Hedge,
    slot: &'a Slot,
    peer: &'a Arc<Peer>,
    started: Instant,
}

impl Hedge {
    /// Nothing is late before `floor`; zero for never.
    pub fn new(floor: Duration) -> Hedge {
        let count = if floor.is_zero() { 0 } else { SLOTS };
        Hedge {
            slots: (0..count).map(|_| Slot::default()).collect(),
            floor,
            born: Instant::now(),
            all_late: AtomicBool::new(false),
            shunned: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            wake: Wake::default(),
        }
    }

    /// Whether some nodes are to be asked after others.
    pub fn shuns(&self) -> bool {
        self.shunned.load(Ordering::Relaxed) > 0
    }

    fn place(&self) -> Option<&Slot> {
        let take = |slot: &Slot| slot.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok();
        if self.slots.is_empty() {
            return None;
        }
        let mut at = PLACE.get();
        if at == usize::MAX {
            static NEXT: AtomicUsize = AtomicUsize::new(0);
            at = NEXT.fetch_add(1, Ordering::Relaxed) % SLOTS;
        }
        for _ in 0..LOOKS {
            if take(&self.slots[at]) {
                PLACE.set(at);
                return Some(&self.slots[at]);
            }
            at = (at + 1) % SLOTS;
        }
        None
    }

    /// Watches a read that `peer` is asked for now; `breaker` ends the call.
    pub fn watch<'a>(
        &'a self,
        object: &ObjectRef,
        offset: u64,
        len: usize,
        peer: &'a Arc<Peer>,
        breaker: Option<&Arc<dyn Breaker>>,
    ) -> Option<Watched<'a>> {
        let breaker = breaker?;
        let slot = self.place()?;
        let started = Instant::now();
        let mut flight = slot.flight.lock();
        // The read before it in this place may have ended by a panic, without a word: what is on its way for that one, or came
        // since, is not for this one.
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
        (flight.offset, flight.len, flight.doubled, flight.blamed) = (offset, len, false, false);
        drop(flight);
        let since = started.saturating_duration_since(self.born).as_micros() as u64;
        slot.since.store(since.max(1), Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.wake.ring();
        }
        Some(Watched { hedge: self, slot, peer, started })
    }
}

impl Watched<'_> {
    /// Set when the call is broken off because another node has answered.
    pub fn unless(&self) -> &AtomicBool {
        &self.slot.answered
    }

    /// The read ended: `result` is what came of the call over `lease`, or the second node's answer if that was first.
    pub fn end(
        self,
        result: Result<Answer, CallError>,
        lease: &mut Lease<'_>,
        dst: &mut [u8],
    ) -> Result<Answer, CallError> {
        let (hedge, now) = (self.hedge, Instant::now());
        let mut flight = self.slot.flight.lock();
        self.slot.since.store(0, Ordering::Release);
        flight.number += 1;
        let (second, blamed) = (flight.answer.take(), flight.blamed);
        drop(flight);
        if second.is_some() {
            // Broken off, perhaps after its answer had come.
            lease.discard();
        }
        let took = now.saturating_duration_since(self.started);
        match (&result, second) {
            // Who sends on to another has not shown how fast it reads.
            (Ok(answer), _) if answer.payload_len < dst.len() => result,
            (Ok(_), _) => {
                hedge.measured(self.peer, took, now, blamed);
                result
            }
            (Err(_), Some(second)) if second.len() == dst.len() => {
                self.peer.pace().took(took, hedge.floor);
                if !blamed {
                    hedge.blame(self.peer, now);
                }
                dst.copy_from_slice(&second);
                Ok(Answer { payload_len: dst.len() })
            }
            _ => result,
        }
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.slot.since.store(0, Ordering::Release);
        self.slot.taken.store(false, Ordering::Release);
    }
}

impl Hedge {
    /// A read that was not watched was answered by `peer`.
    pub fn took(&self, peer: &Peer, started: Instant) {
        if !self.slots.is_empty() {
            let now = Instant::now();
            self.measured(peer, now.saturating_duration_since(started), now, false);
        }
    }

    fn measured(&self, peer: &Peer, took: Duration, now: Instant, blamed: bool) {
        let pace = peer.pace();
        pace.took(took, self.floor);
        if took > pace.late().saturating_mul(2) {
            if !blamed {
                self.blame(peer, now);
            }
        } else if pace.in_time(now) {
            tracing::info!(peer = peer.name(), "a node answers in time again");
        }
    }

    fn blame(&self, peer: &Peer, now: Instant) {
        if self.all_late.load(Ordering::Relaxed) {
            return;
        }
        if peer.pace().was_late(now) {
            // Counted exactly a moment later.
            self.shunned.fetch_max(1, Ordering::Relaxed);
            tracing::warn!(peer = peer.name(), "a node answers late again and again: others are asked before it");
        }
    }
}

/// The thread that watches, and those that ask second nodes; all end when it is dropped.
pub(crate) struct Hedger {
    inner: Arc<Inner>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Hedger {
    /// Watches the reads of `inner`; `None` when nothing is ever late there.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(inner: &Arc<Inner>) -> Result<Option<Hedger>> {
        if inner.hedge.slots.is_empty() {
            return Ok(None);
        }
        let watched = Arc::clone(inner);
        let run = move || Watcher::new(&watched).run();
        let thread = std::thread::Builder::new().name("late-reads".into()).spawn(run);
        let thread = thread.map_err(|e| Error::io("can't start the thread that watches reads", &e))?;
        Ok(Some(Hedger { inner: Arc::clone(inner), thread: Some(thread) }))
    }
}

impl Drop for Hedger {
    fn drop(&mut self) {
        self.inner.hedge.stopping.store(true, Ordering::Release);
        self.inner.hedge.wake.ring();
        if let Some(thread) = self.thread.take() {
            // It waits for nothing but the wake-up.
            let _ = thread.join();
        }
    }
}

struct Watcher<'a> {
    inner: &'a Arc<Inner>,
    workers: Workers,
    /// Second requests that may be made now, and how many requests there were when that was worked out.
    allowed: u64,
    counted: u64,
    settled: Instant,
    faded: Instant,
    under_way: Arc<AtomicUsize>,
}

impl<'a> Watcher<'a> {
    fn new(inner: &'a Arc<Inner>) -> Self {
        let now = Instant::now();
        Watcher {
            inner,
            workers: Workers::new("second-read", AT_ONCE),
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
            if self.look(now) {
                active = now;
            }
            if now.saturating_duration_since(self.settled) >= SETTLE {
                self.settle(now);
            }
            if now.saturating_duration_since(active) < QUIET {
                hedge.wake.wait(now + tick);
                continue;
            }
            hedge.asleep.store(true, Ordering::SeqCst);
            // A read that began before it could see that.
            if !self.look(now) {
                hedge.wake.wait(now + FADE);
            }
            if !hedge.asleep.swap(false, Ordering::SeqCst) {
                active = Instant::now();
            }
        }
    }

    /// Looks at every read under way; whether there is any.
    fn look(&mut self, now: Instant) -> bool {
        let inner = self.inner;
        let hedge = &inner.hedge;
        let now_us = now.saturating_duration_since(hedge.born).as_micros() as u64;
        let floor_us = hedge.floor.as_micros() as u64;
        let age = |slot: &Slot| match slot.since.load(Ordering::SeqCst) {
            0 => None,
            since => Some(now_us.saturating_sub(since)),
        };
        let (mut flights, mut old) = (0, 0);
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
        // Late ones of several nodes, and most of all there are: then the reason is not one node.
        let (mut late, mut nodes) = (0, Vec::new());
        let mut candidates = Vec::new();
        for (at, slot) in hedge.slots.iter().enumerate() {
            let Some(age) = age(slot).filter(|age| *age > floor_us) else { continue };
            let flight = slot.flight.lock();
            let Some(peer) = flight.peer.as_ref().filter(|_| slot.since.load(Ordering::Acquire) != 0) else { continue };
            let age = Duration::from_micros(age);
            if age > peer.pace().late() {
                late += 1;
                if !nodes.iter().any(|known: &Arc<Peer>| Arc::ptr_eq(known, peer)) {
                    nodes.push(Arc::clone(peer));
                }
                candidates.push((at, flight.number, age));
            }
        }
        let all_late = nodes.len() > 1 && late * 2 > flights;
        hedge.all_late.store(all_late, Ordering::Relaxed);
        if !all_late {
            candidates.into_iter().for_each(|(at, number, age)| self.late(at, number, age, now));
        }
        true
    }

    /// Sees to one late read.
    fn late(&mut self, at: usize, number: u64, age: Duration, now: Instant) {
        let inner = self.inner;
        let slot = &inner.hedge.slots[at];
        let mut flight = slot.flight.lock();
        if flight.number != number {
            return;
        }
        let (Some(object), Some(peer)) = (flight.object.clone(), flight.peer.clone()) else { return };
        if age > peer.pace().late().saturating_mul(2) && !flight.blamed {
            flight.blamed = true;
            inner.hedge.blame(&peer, now);
        }
        if flight.doubled || self.under_way.load(Ordering::Acquire) >= AT_ONCE || !self.may_double() {
            return;
        }
        let (offset, len) = (flight.offset, flight.len);
        let Some(second) = inner.second_peer(&object, offset, &peer) else { return };
        // Memory comes out of the budget, and only what is free.
        let Some(buf) = inner.tier.pool().try_alloc(len) else { return };
        flight.doubled = true;
        drop(flight);
        self.allowed -= 1;
        inner.stats.remotecache.hedges.add(1);
        tracing::debug!(late = peer.name(), asked = second.name(), ?age, "a late read is asked of a second node");
        let (inner, under_way) = (Arc::clone(inner), UnderWay::begin(&self.under_way));
        self.workers.urgent(move || {
            let _under_way = under_way;
            ask_second(&inner, (at, number), &object, offset, buf, &second);
        });
    }

    /// Whether one more second request is within the share that may be such.
    fn may_double(&mut self) -> bool {
        if self.allowed == 0 {
            let ops = self.inner.stats.remotecache.ops.get();
            self.allowed = ((ops - self.counted) / ONE_IN).min(SAVED);
            if self.allowed > 0 {
                self.counted = ops;
            }
        }
        self.allowed > 0
    }

    /// Works out anew what is late of each node, lets go of nodes that are gone, and counts.
    fn settle(&mut self, now: Instant) {
        self.settled = now;
        let hedge = &self.inner.hedge;
        let view = self.inner.roster.view();
        let fades = now.saturating_duration_since(self.faded) >= FADE;
        if fades {
            self.faded = now;
        }
        let mut all = Times::default();
        view.all_made().for_each(|peer| all.add(&peer.pace().times()));
        let mut shunned = 0;
        for peer in view.all_made() {
            let pace = peer.pace();
            let others = all.without(&pace.times());
            pace.set_late((others.reads >= LEAST).then(|| others.percentile(hedge.floor, PERCENTILE)));
            shunned += usize::from(pace.is_shunned());
            if fades {
                pace.fade();
            }
        }
        hedge.shunned.store(shunned, Ordering::Relaxed);
        self.inner.stats.remotecache.peers_slow.set(shunned as u64);
        if fades {
            // A node that left the group is not kept by a place that nobody uses.
            for slot in hedge.slots.iter().filter(|slot| !slot.taken.load(Ordering::Acquire)) {
                let mut flight = slot.flight.lock();
                if slot.since.load(Ordering::Acquire) == 0 {
                    (flight.object, flight.peer, flight.breaker) = (None, None, None);
                }
            }
        }
    }
}

/// Counts a second request until it ends, or was never begun.
struct UnderWay(Arc<AtomicUsize>);

impl UnderWay {
    fn begin(count: &Arc<AtomicUsize>) -> UnderWay {
        count.fetch_add(1, Ordering::AcqRel);
        UnderWay(Arc::clone(count))
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Asks the second node, and hands its answer to the read if that still waits.
fn ask_second(
    inner: &Inner,
    (at, number): (usize, u64),
    object: &ObjectRef,
    offset: u64,
    mut buf: Buf,
    second: &Arc<Peer>,
) {
    let (deadline, mut body) = (Instant::now() + inner.patience().answer, Vec::new());
    let got = second.ask_once(middle(&buf), deadline, &mut |lease, deadline| {
        let request = Request::Read(read_of(object, lease.welcome().volume, offset, buf.len()));
        lease.call(&request, &mut body, &mut buf, &mut |_| {}, deadline)
    });
    if !got.is_ok_and(|answer| answer.payload_len == buf.len()) {
        return;
    }
    if inner.hedge.slots[at].answer(number, buf) {
        inner.stats.remotecache.hedges_won.add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_mem::Pool;
    use spurline_net_sim::{After, FaultPlan, Rates, SimNode};
    use spurline_transport::{ChannelPool, PoolConfig};
    use spurline_types::{Member, Version};

    struct Unbroken;

    impl Breaker for Unbroken {
        fn break_off(&self) {
            panic!("a call that is over is broken off");
        }
    }

    #[test]
    fn what_comes_for_a_read_that_panicked_is_not_handed_to_the_next_one_in_its_place() {
        let hedge = Hedge::new(Duration::from_millis(1));
        let node = SimNode::playing("n", |_| (Vec::new(), After::Close), Arc::new(FaultPlan::new(1, Rates::default())));
        let pool = ChannelPool::new(node.connector(), "m", "s", PoolConfig::default(), Arc::default());
        let peer = Peer::new(pool, &Member::at("n", 100));
        let buffers = Pool::new(64 << 10, 4096).unwrap();
        let breaker: Arc<dyn Breaker> = Arc::new(Unbroken);
        let object = |name: &str| ObjectRef::new("s", name.as_bytes(), Version::new("1"), 4096);
        let watch = |name| hedge.watch(&object(name), 0, 4096, &peer, Some(&breaker)).unwrap();
        let first = watch("a");
        let (slot, number) = (first.slot, first.slot.flight.lock().number);
        drop(first);
        let second = watch("b");
        assert!(std::ptr::eq(slot, second.slot), "the same place");
        assert!(!slot.answer(number, buffers.try_alloc(4096).unwrap()), "that read is over");
        assert!(slot.flight.lock().answer.is_none() && !second.unless().load(Ordering::Acquire));
        // Or it came before the next one began.
        slot.flight.lock().answer = Some(buffers.try_alloc(4096).unwrap());
        slot.answered.store(true, Ordering::Release);
        drop(second);
        let third = watch("c");
        assert!(slot.flight.lock().answer.is_none() && !third.unless().load(Ordering::Acquire));
    }
}
