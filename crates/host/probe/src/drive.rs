//! Drives the streams of a measurement, a thread each, and counts. It knows no transport and no server.

use crate::lane::{Lane, Moved, Stop};
use crate::message::{Op, TcpView};
use crate::tcp_info;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often counters are looked at.
const LOOK: Duration = Duration::from_millis(50);
/// What is under way when the time is up gets this long to end.
const DRAIN: Duration = Duration::from_millis(500);
/// Latencies above this count as this.
const LONGEST_NS: u64 = 600_000_000_000;

/// When a measurement ends.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// After this time.
    pub time: Duration,
    /// Or when this many operations were begun on all streams together.
    pub ops: Option<u64>,
    /// A stream on which nothing moves for this long fails.
    pub patience: Duration,
    /// A pause before each operation but the first.
    pub pause: Duration,
}

/// What is known while it runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Progress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written and arrived; those of echoes once.
    pub write_bytes: u64,
    /// Operations that ended.
    pub ops: u64,
}

/// Times of operations.
#[derive(Debug, Clone)]
pub struct Times(Histogram<u64>);

impl Times {
    fn new() -> Self {
        // The bounds are constants that are right, so this never takes the other way.
        let counts = Histogram::new_with_bounds(1, LONGEST_NS, 2).or_else(|_| Histogram::new(2));
        Times(counts.unwrap_or_else(|_| unreachable!("two digits are possible")))
    }
    /// How many there are.
    pub fn count(&self) -> u64 {
        self.0.len()
    }
    /// The time that this share (0 to 1) of operations did not exceed, in microseconds.
    pub fn quantile_us(&self, share: f64) -> f64 {
        self.0.value_at_quantile(share) as f64 / 1e3
    }
    /// Shortest, in microseconds.
    pub fn min_us(&self) -> f64 {
        self.0.min() as f64 / 1e3
    }
    /// Longest, in microseconds.
    pub fn max_us(&self) -> f64 {
        self.0.max() as f64 / 1e3
    }
    /// Mean, in microseconds.
    pub fn mean_us(&self) -> f64 {
        self.0.mean() / 1e3
    }
    fn add_one(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1));
    }
    fn add(&mut self, other: &Times) {
        self.0 += &other.0;
    }
}

/// What was measured.
#[derive(Debug)]
pub struct Measured {
    /// From the start to the end that counts: bytes and operations after it are not in `total`.
    pub elapsed: Duration,
    /// What moved until then.
    pub total: Progress,
    /// Bytes each stream moved until then, in their order.
    pub stream_bytes: Vec<u64>,
    /// The state at every second.
    pub seconds: Vec<Progress>,
    /// Everything that moved, also while streams ended: what processor times belong to.
    pub moved_bytes: u64,
    /// Times of all operations of each kind that was asked for.
    pub times: Vec<(Op, Times)>,
    /// Processor seconds of the streams' threads.
    pub cpu_seconds: f64,
    /// The most that one thread used.
    pub busiest_seconds: f64,
    /// Time from the start to the last thread's end.
    pub wall_seconds: f64,
    /// TCP's own view, where it was TCP.
    pub tcp: Option<TcpView>,
    /// Whether it was interrupted.
    pub interrupted: bool,
    /// What ended it early.
    pub error: Option<Error>,
}

/// What a thread writes and others look at. Apart from its neighbours' cache lines.
#[repr(align(128))]
#[derive(Default)]
struct Counter {
    bytes: AtomicU64,
    ops: AtomicU64,
}

struct Ended {
    op: Op,
    times: Times,
    cpu_seconds: f64,
    tcp: Option<TcpView>,
    result: Result<()>,
}

/// Runs the streams to their end; `interrupt` ends them early, `observe` is told twice a tick and more what moved.
pub fn drive(
    lanes: Vec<(Op, Box<dyn Lane>)>,
    depth: u32,
    limits: &Limits,
    interrupt: &AtomicBool,
    observe: &mut dyn FnMut(&Progress),
) -> Measured {
    let counters: Vec<(Op, Counter)> = lanes.iter().map(|(op, _)| (*op, Counter::default())).collect();
    let stop = Stop::new(limits.patience);
    let budget = limits.ops.map(AtomicU64::new);
    let start = Instant::now();
    let (tx, rx) = channel();
    std::thread::scope(|scope| {
        let mut started = 0;
        let mut failed = None;
        for (index, (op, lane)) in lanes.into_iter().enumerate() {
            let (tx, stop) = (tx.clone(), &stop);
            let (budget, counter) = (budget.as_ref(), &counters[index].1);
            let work = move || {
                let meter = Meter::new(depth, limits.pause, budget, counter);
                // The receiver waits for every one.
                let _ = tx.send(run(op, lane, meter, stop));
            };
            match std::thread::Builder::new().name(format!("stream-{index}")).spawn_scoped(scope, work) {
                Ok(_) => started += 1,
                Err(e) => failed = Some(Error::io("can't start a thread for a stream", &e)),
            }
        }
        drop(tx);
        let mut watch =
            Watch { counters: &counters, start, seconds: Vec::new(), last_move: start, last: Progress::default() };
        let mut ended = Vec::new();
        let mut interrupted = false;
        let mut window: Option<(Progress, Vec<u64>)> = None;
        let mut cut_at = None;
        if failed.is_some() {
            stop.cut();
        }
        while ended.len() < started {
            match rx.recv_timeout(LOOK) {
                Ok(one) => ended.push(one),
                Err(RecvTimeoutError::Timeout) => {}
                // A thread that ended without a word has panicked.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            let now = watch.look();
            if window.is_none() {
                observe(&now);
                let broken = ended.iter().any(|one: &Ended| one.result.is_err());
                interrupted = interrupt.load(Ordering::Relaxed);
                if broken || failed.is_some() {
                    // What counts ends with the last byte, not with the patience after it.
                    let elapsed = watch.last_move.duration_since(start);
                    window = Some((Progress { elapsed, ..now }, watch.each()));
                    stop.cut();
                } else if interrupted || now.elapsed >= limits.time {
                    window = Some((now, watch.each()));
                    stop.ask();
                    cut_at = Some(Instant::now() + DRAIN);
                }
            }
            if cut_at.is_some_and(|at| Instant::now() >= at) {
                stop.cut();
            }
        }
        let (total, stream_bytes) = window.unwrap_or_else(|| (watch.look(), watch.each()));
        let moved = watch.look();
        let mut times: Vec<(Op, Times)> = Vec::new();
        let mut error = failed;
        for one in &mut ended {
            match times.iter_mut().find(|(op, _)| *op == one.op) {
                Some((_, sum)) => sum.add(&one.times),
                None => times.push((one.op, one.times.clone())),
            }
            // A stream that was cut is no failure, and after the first the others fail too.
            if let Err(e) = std::mem::replace(&mut one.result, Ok(()))
                && error.is_none()
                && cut_at.is_none()
            {
                error = Some(e);
            }
        }
        if ended.len() < started && error.is_none() {
            error = Some(Error::new(ErrorKind::Invalid, "a stream's thread panicked"));
        }
        let views: Vec<TcpView> = ended.iter().filter_map(|one| one.tcp.clone()).collect();
        Measured {
            elapsed: total.elapsed,
            total,
            stream_bytes,
            seconds: watch.seconds,
            moved_bytes: moved.read_bytes + moved.write_bytes,
            times,
            cpu_seconds: ended.iter().map(|one| one.cpu_seconds).sum(),
            busiest_seconds: ended.iter().map(|one| one.cpu_seconds).fold(0.0, f64::max),
            wall_seconds: start.elapsed().as_secs_f64(),
            tcp: (!views.is_empty()).then(|| tcp_info::together(&views)),
            interrupted,
            error,
        }
    })
}

/// The sums of all counters, and what they were when.
struct Watch<'a> {
    counters: &'a [(Op, Counter)],
    start: Instant,
    seconds: Vec<Progress>,
    last_move: Instant,
    last: Progress,
}

impl Watch<'_> {
    /// The bytes of each stream now.
    fn each(&self) -> Vec<u64> {
        self.counters.iter().map(|(_, counter)| counter.bytes.load(Ordering::Relaxed)).collect()
    }

    fn look(&mut self) -> Progress {
        let mut now = Progress { elapsed: self.start.elapsed(), ..Progress::default() };
        for (op, counter) in self.counters {
            let bytes = counter.bytes.load(Ordering::Relaxed);
            *(if op.reads() { &mut now.read_bytes } else { &mut now.write_bytes }) += bytes;
            now.ops += counter.ops.load(Ordering::Relaxed);
        }
        if (now.read_bytes, now.write_bytes) != (self.last.read_bytes, self.last.write_bytes) {
            self.last_move = Instant::now();
        }
        if now.elapsed.as_secs() > self.last.elapsed.as_secs() {
            self.seconds.push(now);
        }
        self.last = now;
        now
    }
}

/// One stream, on its own thread.
fn run(op: Op, mut lane: Box<dyn Lane>, mut meter: Meter<'_>, stop: &Stop) -> Ended {
    let result = lane.run(&mut meter, stop);
    meter.keep();
    Ended { op, times: meter.times, cpu_seconds: thread_cpu(), tcp: lane.tcp(), result }
}

/// Lets a stream begin operations, and counts and times them. It allocates nothing per operation.
pub struct Meter<'a> {
    depth: usize,
    pause: Duration,
    budget: Option<&'a AtomicU64>,
    counter: &'a Counter,
    times: Times,
    begun: VecDeque<Instant>,
    /// When the last operation ended, where the next begins at once.
    ended: Option<Instant>,
    /// What it moved and how long it took, until there is leisure to keep it.
    unkept: Option<(Moved, Duration)>,
    first: bool,
    /// Is told the time of each operation.
    each: Option<&'a mut dyn FnMut(Duration)>,
}

impl<'a> Meter<'a> {
    fn new(depth: u32, pause: Duration, budget: Option<&'a AtomicU64>, counter: &'a Counter) -> Self {
        let begun = VecDeque::with_capacity(depth as usize);
        Meter {
            depth: depth as usize,
            pause,
            budget,
            counter,
            times: Times::new(),
            begun,
            ended: None,
            unkept: None,
            first: true,
            each: None,
        }
    }

    /// Whether another operation may begin; then it has, and the stream has to do so.
    pub fn begin(&mut self, stop: &Stop) -> bool {
        if self.begun.len() >= self.depth || stop.is_asked() || !take(self.budget) {
            return false;
        }
        if !self.first && !self.pause.is_zero() {
            rest(self.pause, stop);
            if stop.is_asked() {
                return false;
            }
        }
        self.first = false;
        // One at a time, each begins where the one before ended: a look at the clock takes as long as a short message
        // on some machines.
        self.begun.push_back(self.ended.take().unwrap_or_else(Instant::now));
        true
    }

    /// How many operations were begun and have not ended.
    pub fn under_way(&self) -> usize {
        self.begun.len()
    }

    /// To be called when there is nothing to do but wait, where operations go one at a time: what is left to do about the
    /// last one is then in no other's time.
    pub fn keep(&mut self) {
        if let Some((moved, time)) = self.unkept.take() {
            self.count(moved);
            self.time(time);
        }
    }

    /// The only operation under way ended; [`Meter::keep`] does the rest once the next one is under way.
    pub fn moved_one(&mut self, bytes: u64) {
        let now = Instant::now();
        self.keep();
        if let Some(began) = self.begun.pop_front() {
            self.unkept = Some((Moved { ops: 1, bytes }, now.duration_since(began)));
        }
        self.ended = self.pause.is_zero().then_some(now);
        if self.ended.is_none() || self.each.is_some() {
            // Somebody waits for the number, not for the next operation.
            self.keep();
        }
    }

    /// Something moved: bytes, and the oldest operations that ended by it.
    pub fn moved(&mut self, moved: Moved) {
        self.count(moved);
        if moved.ops > 0 {
            let now = Instant::now();
            for _ in 0..self.begun.len().min(moved.ops as usize) {
                let Some(began) = self.begun.pop_front() else { break };
                self.time(now.duration_since(began));
            }
            self.ended = (self.depth == 1 && self.pause.is_zero()).then_some(now);
        }
    }

    fn time(&mut self, time: Duration) {
        self.times.add_one(time);
        if let Some(each) = &mut self.each {
            each(time);
        }
    }

    fn count(&self, moved: Moved) {
        // One writer: no need of an atomic addition.
        let add = |to: &AtomicU64, n: u64| to.store(to.load(Ordering::Relaxed) + n, Ordering::Relaxed);
        if moved.bytes > 0 {
            add(&self.counter.bytes, moved.bytes);
        }
        if moved.ops > 0 {
            add(&self.counter.ops, moved.ops.into());
        }
    }
}

/// Runs one stream on this thread, `count` operations (0: until `stop`) with `pause` between them; `each` is told the
/// time of every one.
///
/// # Errors
/// Why the stream ended early.
pub fn one_by_one(
    lane: &mut dyn Lane,
    count: u64,
    pause: Duration,
    stop: &Stop,
    each: &mut dyn FnMut(Duration),
) -> Result<()> {
    let (budget, counter) = (AtomicU64::new(count), Counter::default());
    let mut meter = Meter::new(1, pause, (count > 0).then_some(&budget), &counter);
    meter.each = Some(each);
    lane.run(&mut meter, stop)
}

/// Sleeps, but not past the end.
fn rest(pause: Duration, stop: &Stop) {
    let until = Instant::now() + pause;
    while !stop.is_asked() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

fn take(budget: Option<&AtomicU64>) -> bool {
    let Some(budget) = budget else { return true };
    budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// Processor seconds of this thread.
pub(crate) fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A lane that ends what was begun at once, and fails when told.
    struct Instantly {
        fails_after: u64,
        done: u64,
    }

    impl Lane for Instantly {
        fn run(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
            loop {
                let mut ops = 0;
                while meter.begin(stop) {
                    ops += 1;
                }
                if ops == 0 {
                    return Ok(());
                }
                self.done += u64::from(ops);
                if self.done > self.fails_after {
                    return Err(Error::new(ErrorKind::Unavailable, "broken on purpose"));
                }
                if self.done == self.fails_after {
                    // Nothing moves any more.
                    while !stop.is_cut() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                meter.moved(Moved { ops, bytes: u64::from(ops) * 10 });
            }
        }
    }

    fn lanes(count: usize, fails_after: u64) -> Vec<(Op, Box<dyn Lane>)> {
        let op = |i| if i % 2 == 0 { Op::Read } else { Op::Write };
        (0..count).map(|i| (op(i), Box::new(Instantly { fails_after, done: 0 }) as Box<dyn Lane>)).collect()
    }

    fn limits(ops: Option<u64>) -> Limits {
        Limits { time: Duration::from_secs(60), ops, patience: Duration::from_secs(60), pause: Duration::ZERO }
    }

    #[test]
    fn a_number_of_operations() {
        let done = drive(lanes(3, u64::MAX), 4, &limits(Some(1000)), &AtomicBool::new(false), &mut |_| {});
        assert!(done.error.is_none() && !done.interrupted, "{done:?}");
        assert_eq!((done.total.ops, done.total.read_bytes + done.total.write_bytes), (1000, 10_000));
        assert_eq!(done.times.iter().map(|(_, t)| t.count()).sum::<u64>(), 1000);
        let (_, times) = &done.times[0];
        assert!(times.min_us() <= times.quantile_us(0.5) && times.quantile_us(0.5) <= times.max_us() * 1.01);
    }

    #[test]
    fn a_time() {
        let limits = Limits { time: Duration::from_millis(60), ..limits(None) };
        let mut seen = 0;
        let done = drive(lanes(2, u64::MAX), 2, &limits, &AtomicBool::new(false), &mut |p| seen = p.ops);
        assert!(done.error.is_none() && done.total.ops > 0 && seen > 0);
        assert!(done.moved_bytes >= done.total.read_bytes + done.total.write_bytes);
    }

    #[test]
    fn an_interruption() {
        let interrupt = AtomicBool::new(false);
        let done = drive(lanes(1, u64::MAX), 1, &limits(None), &interrupt, &mut |p| {
            interrupt.store(p.ops > 0, Ordering::Relaxed);
        });
        assert!(done.interrupted && done.error.is_none() && done.total.ops > 0);
    }

    #[test]
    fn what_is_stuck_is_cut() {
        let limits = Limits { time: Duration::from_millis(20), ..limits(None) };
        let done = drive(lanes(1, 5), 1, &limits, &AtomicBool::new(false), &mut |_| {});
        assert!(done.error.is_none(), "{:?}", done.error);
    }

    #[test]
    fn a_stream_that_breaks_ends_all() {
        let done = drive(lanes(2, 0), 1, &limits(None), &AtomicBool::new(false), &mut |_| {});
        assert_eq!(done.error.unwrap().message(), "broken on purpose");
    }

    #[test]
    fn pauses() {
        let limits = Limits { pause: Duration::from_millis(5), ..limits(Some(3)) };
        let done = drive(lanes(1, u64::MAX), 1, &limits, &AtomicBool::new(false), &mut |_| {});
        assert!(done.total.ops == 3 && done.elapsed >= Duration::from_millis(10));
    }
}
