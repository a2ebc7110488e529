//! Drives the streams of a measurement, a thread each, and counts. Knows no transport and no server.

use crate::message::{ProbeOp, TcpView};
use crate::stream::{ProbeStream, StopSignal, StreamProgress};
use crate::tcp_info;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often the counters are read.
const COUNTER_INTERVAL: Duration = Duration::from_millis(50);
/// Time for operations under way to end after the time limit.
const DRAIN_TIME: Duration = Duration::from_millis(500);
/// Longer latencies count as this.
const LONGEST_NS: u64 = 600_000_000_000;

/// When a measurement ends.
#[derive(Debug, Clone, Copy)]
pub struct RunLimits {
    /// After this time.
    pub time: Duration,
    /// Or after this many operations on all streams together.
    pub ops: Option<u64>,
    /// A stream without progress for this long fails.
    pub patience: Duration,
    /// Pause before each operation but the first.
    pub pause: Duration,
}

/// Totals while a measurement runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct RunProgress {
    /// Time since the start.
    pub elapsed: Duration,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written and arrived; bytes of echoes count once.
    pub write_bytes: u64,
    /// Completed operations.
    pub ops: u64,
}

/// Latencies of operations.
#[derive(Debug, Clone)]
pub struct LatencyTimes(Histogram<u64>);

impl LatencyTimes {
    fn new() -> Self {
        // The constant bounds are valid, so the fallback is never used.
        let counts = Histogram::new_with_bounds(1, LONGEST_NS, 2).or_else(|_| Histogram::new(2));
        LatencyTimes(counts.unwrap_or_else(|_| unreachable!("two significant digits are valid")))
    }
    /// Number of latencies.
    pub fn count(&self) -> u64 {
        self.0.len()
    }
    /// The latency that this share (0 to 1) of operations did not exceed, in microseconds.
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
    /// Standard deviation, in microseconds.
    pub fn deviation_us(&self) -> f64 {
        self.0.stdev() / 1e3
    }
    fn record_time(&mut self, time: Duration) {
        self.0.saturating_record(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1));
    }
    fn merge_times(&mut self, other: &LatencyTimes) {
        self.0 += &other.0;
    }
}

/// Result of a measurement.
#[derive(Debug)]
pub struct RunResult {
    /// Time of the measurement; later bytes and operations are not in `total`.
    pub elapsed: Duration,
    /// Totals at that time.
    pub total: RunProgress,
    /// Bytes of each stream at that time, in order.
    pub stream_bytes: Vec<u64>,
    /// Totals at every second.
    pub seconds: Vec<RunProgress>,
    /// All bytes, also while streams ended; CPU times refer to these.
    pub moved_bytes: u64,
    /// Latencies of each kind of operation.
    pub times: Vec<(ProbeOp, LatencyTimes)>,
    /// CPU seconds of the streams' threads.
    pub cpu_seconds: f64,
    /// CPU seconds of the busiest thread.
    pub busiest_seconds: f64,
    /// Time from the start to the last thread's end.
    pub wall_seconds: f64,
    /// TCP statistics, with TCP.
    pub tcp: Option<TcpView>,
    /// Whether the run was interrupted.
    pub interrupted: bool,
    /// Why the run ended early.
    pub error: Option<Error>,
}

/// Counters of a stream, written by that stream's thread only; aligned against false sharing.
#[repr(align(128))]
#[derive(Default)]
struct StreamCounter {
    bytes: AtomicU64,
    ops: AtomicU64,
}

struct StreamResult {
    op: ProbeOp,
    times: LatencyTimes,
    cpu_seconds: f64,
    tcp: Option<TcpView>,
    result: Result<()>,
}

/// Runs the streams to the end. `interrupt` ends all early; `observe` gets the totals at every poll.
pub fn drive_streams(
    lanes: Vec<(ProbeOp, Box<dyn ProbeStream>)>,
    depth: u32,
    limits: &RunLimits,
    interrupt: &AtomicBool,
    observe: &mut dyn FnMut(&RunProgress),
) -> RunResult {
    let counters: Vec<(ProbeOp, StreamCounter)> = lanes.iter().map(|(op, _)| (*op, StreamCounter::default())).collect();
    let stop = StopSignal::new(limits.patience);
    let budget = limits.ops.map(AtomicU64::new);
    let start = Instant::now();
    let (tx, rx) = channel();
    std::thread::scope(|scope| {
        let mut started = 0;
        let mut failed = None;
        for (index, (op, lane)) in lanes.into_iter().enumerate() {
            let tx = tx.clone();
            let stop = &stop;
            let budget = budget.as_ref();
            let counter = &counters[index].1;
            match std::thread::Builder::new().name(format!("stream-{index}")).spawn_scoped(scope, move || {
                let meter = StreamMeter::new(depth, limits.pause, budget, counter);
                // The receiver waits for every thread.
                let _ = tx.send(run_stream(op, lane, meter, stop));
            }) {
                Ok(_) => started += 1,
                Err(e) => failed = Some(Error::io("can't start a thread for a stream", &e)),
            }
        }
        drop(tx);
        let mut watch = StreamWatch {
            counters: CounterWatch {
                counters: &counters,
                start,
                seconds: Vec::new(),
                last_moved_at: start,
                last: RunProgress::default(),
            },
            ended: Vec::new(),
            window: None,
            cut_at: None,
            interrupted: false,
            failed,
        };
        if watch.failed.is_some() {
            stop.cut();
        }
        while watch.ended.len() < started {
            match rx.recv_timeout(COUNTER_INTERVAL) {
                Ok(result) => watch.ended.push(result),
                Err(RecvTimeoutError::Timeout) => {}
                // A thread that ended without a result has panicked.
                Err(RecvTimeoutError::Disconnected) => break,
            }
            watch.poll(limits, interrupt, &stop, observe);
        }
        watch.into_result(started)
    })
}

/// A measurement while the threads run and end.
struct StreamWatch<'a> {
    counters: CounterWatch<'a>,
    ended: Vec<StreamResult>,
    /// Totals at the end of the measurement, and the bytes of each stream then.
    window: Option<(RunProgress, Vec<u64>)>,
    /// When operations under way are abandoned.
    cut_at: Option<Instant>,
    interrupted: bool,
    /// Why a thread did not start.
    failed: Option<Error>,
}

impl StreamWatch<'_> {
    /// Reads the counters, and ends the streams when the measurement is over.
    fn poll(
        &mut self,
        limits: &RunLimits,
        interrupt: &AtomicBool,
        stop: &StopSignal,
        observe: &mut dyn FnMut(&RunProgress),
    ) {
        let now = self.counters.read_counters();
        if self.window.is_none() {
            observe(&now);
            let broken = self.ended.iter().any(|stream| stream.result.is_err());
            self.interrupted = interrupt.load(Ordering::Relaxed);
            if broken || self.failed.is_some() {
                // The measurement ends with the last byte, not with the timeout after that.
                let elapsed = self.counters.last_moved_at.duration_since(self.counters.start);
                self.window = Some((RunProgress { elapsed, ..now }, self.counters.stream_bytes()));
                stop.cut();
            } else if self.interrupted || now.elapsed >= limits.time {
                self.window = Some((now, self.counters.stream_bytes()));
                stop.request_stop();
                self.cut_at = Some(Instant::now() + DRAIN_TIME);
            }
        }
        if self.cut_at.is_some_and(|at| Instant::now() >= at) {
            stop.cut();
        }
    }

    /// The result of all streams; `started` streams had a thread.
    fn into_result(mut self, started: usize) -> RunResult {
        let window = self.window.take();
        let (total, stream_bytes) =
            window.unwrap_or_else(|| (self.counters.read_counters(), self.counters.stream_bytes()));
        let moved = self.counters.read_counters();
        let mut times: Vec<(ProbeOp, LatencyTimes)> = Vec::new();
        for stream in &self.ended {
            match times.iter_mut().find(|(op, _)| *op == stream.op) {
                Some((_, sum)) => sum.merge_times(&stream.times),
                None => times.push((stream.op, stream.times.clone())),
            }
        }
        let views: Vec<TcpView> = self.ended.iter().filter_map(|stream| stream.tcp.clone()).collect();
        let cpu_seconds = self.ended.iter().map(|stream| stream.cpu_seconds);
        RunResult {
            elapsed: total.elapsed,
            total,
            stream_bytes,
            moved_bytes: moved.read_bytes + moved.write_bytes,
            times,
            cpu_seconds: cpu_seconds.clone().sum(),
            busiest_seconds: cpu_seconds.fold(0.0, f64::max),
            wall_seconds: self.counters.start.elapsed().as_secs_f64(),
            tcp: (!views.is_empty()).then(|| tcp_info::merge_views(&views)),
            interrupted: self.interrupted,
            error: self.first_error(started),
            seconds: self.counters.seconds,
        }
    }

    fn first_error(&mut self, started: usize) -> Option<Error> {
        let panicked = self.ended.len() < started;
        // An aborted stream is no failure; after a first failure the others fail too.
        let aborted = self.cut_at.is_some();
        let of_stream = self.ended.drain(..).find_map(|stream| stream.result.err()).filter(|_| !aborted);
        let of_panic = panicked.then(|| Error::new(ErrorKind::Invalid, "a stream's thread panicked"));
        self.failed.take().or(of_stream).or(of_panic)
    }
}

/// Reads all counters and keeps the history.
struct CounterWatch<'a> {
    counters: &'a [(ProbeOp, StreamCounter)],
    start: Instant,
    seconds: Vec<RunProgress>,
    last_moved_at: Instant,
    last: RunProgress,
}

impl CounterWatch<'_> {
    /// Bytes of each stream now.
    fn stream_bytes(&self) -> Vec<u64> {
        self.counters.iter().map(|(_, counter)| counter.bytes.load(Ordering::Relaxed)).collect()
    }

    fn read_counters(&mut self) -> RunProgress {
        let mut now = RunProgress { elapsed: self.start.elapsed(), ..RunProgress::default() };
        for (op, counter) in self.counters {
            let bytes = counter.bytes.load(Ordering::Relaxed);
            *(if op.reads_server() { &mut now.read_bytes } else { &mut now.write_bytes }) += bytes;
            now.ops += counter.ops.load(Ordering::Relaxed);
        }
        if (now.read_bytes, now.write_bytes) != (self.last.read_bytes, self.last.write_bytes) {
            self.last_moved_at = Instant::now();
        }
        if now.elapsed.as_secs() > self.last.elapsed.as_secs() {
            self.seconds.push(now);
        }
        self.last = now;
        now
    }
}

/// A stream, on a separate thread.
fn run_stream(
    op: ProbeOp,
    mut lane: Box<dyn ProbeStream>,
    mut meter: StreamMeter<'_>,
    stop: &StopSignal,
) -> StreamResult {
    let result = lane.run_operations(&mut meter, stop);
    meter.record_pending();
    StreamResult { op, times: meter.times, cpu_seconds: thread_cpu(), tcp: lane.tcp_view(), result }
}

/// Admits, counts and times the operations of a stream. No allocation per operation.
pub struct StreamMeter<'a> {
    depth: usize,
    pause: Duration,
    budget: Option<&'a AtomicU64>,
    counter: &'a StreamCounter,
    times: LatencyTimes,
    begun: VecDeque<Instant>,
    /// End of the last operation, where the next begins at once.
    ended: Option<Instant>,
    /// The last operation's bytes and latency, recorded when there is time.
    pending: Option<(StreamProgress, Duration)>,
    first: bool,
    /// Gets the latency of each operation.
    each: Option<&'a mut dyn FnMut(Duration)>,
}

impl<'a> StreamMeter<'a> {
    fn new(depth: u32, pause: Duration, budget: Option<&'a AtomicU64>, counter: &'a StreamCounter) -> Self {
        let begun = VecDeque::with_capacity(depth as usize);
        StreamMeter {
            depth: depth as usize,
            pause,
            budget,
            counter,
            times: LatencyTimes::new(),
            begun,
            ended: None,
            pending: None,
            first: true,
            each: None,
        }
    }

    /// Whether another operation may begin; if so, the operation counts as begun and the stream has to start the work.
    pub fn try_begin(&mut self, stop: &StopSignal) -> bool {
        if self.begun.len() >= self.depth || stop.is_requested() || !take_budget(self.budget) {
            return false;
        }
        if !self.first && !self.pause.is_zero() {
            sleep_until_stop(self.pause, stop);
            if stop.is_requested() {
                return false;
            }
        }
        self.first = false;
        // With one operation at a time, each begins where the last ended: reading the clock costs as much as a short message on
        // some machines.
        self.begun.push_back(self.ended.take().unwrap_or_else(Instant::now));
        true
    }

    /// Operations under way.
    pub fn under_way(&self) -> usize {
        self.begun.len()
    }

    /// Records the last operation. To be called while waiting, with one operation at a time: the cost is then in no operation's
    /// latency.
    pub fn record_pending(&mut self) {
        if let Some((moved, time)) = self.pending.take() {
            self.add_counts(moved);
            self.record_time(time);
        }
    }

    /// The only operation under way ended; [`StreamMeter::record_pending`] records that operation once the next is under way.
    pub fn record_single(&mut self, bytes: u64) {
        let now = Instant::now();
        self.record_pending();
        if let Some(began) = self.begun.pop_front() {
            self.pending = Some((StreamProgress { ops: 1, bytes }, now.duration_since(began)));
        }
        self.ended = self.pause.is_zero().then_some(now);
        if self.ended.is_none() || self.each.is_some() {
            // The observer needs the latency now, before the next operation.
            self.record_pending();
        }
    }

    /// Counts bytes, and the oldest operations that are complete now.
    pub fn record_progress(&mut self, moved: StreamProgress) {
        self.add_counts(moved);
        if moved.ops > 0 {
            let now = Instant::now();
            for _ in 0..self.begun.len().min(moved.ops as usize) {
                let Some(began) = self.begun.pop_front() else { break };
                self.record_time(now.duration_since(began));
            }
            self.ended = (self.depth == 1 && self.pause.is_zero()).then_some(now);
        }
    }

    fn record_time(&mut self, time: Duration) {
        self.times.record_time(time);
        if let Some(each) = &mut self.each {
            each(time);
        }
    }

    fn add_counts(&self, moved: StreamProgress) {
        // A single writer: no atomic addition needed.
        if moved.bytes > 0 {
            add_alone(&self.counter.bytes, moved.bytes);
        }
        if moved.ops > 0 {
            add_alone(&self.counter.ops, moved.ops.into());
        }
    }
}

fn add_alone(to: &AtomicU64, n: u64) {
    to.store(to.load(Ordering::Relaxed) + n, Ordering::Relaxed)
}

/// Runs a stream on this thread, `count` operations (0: until `stop`) with `pause` in between; `each` gets every latency.
///
/// # Errors
/// Why the stream ended early.
pub fn run_single(
    lane: &mut dyn ProbeStream,
    count: u64,
    pause: Duration,
    stop: &StopSignal,
    each: &mut dyn FnMut(Duration),
) -> Result<()> {
    let budget = AtomicU64::new(count);
    let counter = StreamCounter::default();
    let mut meter = StreamMeter::new(1, pause, (count > 0).then_some(&budget), &counter);
    meter.each = Some(each);
    lane.run_operations(&mut meter, stop)
}

/// Sleeps, at most until the stop.
fn sleep_until_stop(pause: Duration, stop: &StopSignal) {
    let until = Instant::now() + pause;
    while !stop.is_requested() {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left.min(COUNTER_INTERVAL));
    }
}

fn take_budget(budget: Option<&AtomicU64>) -> bool {
    let Some(budget) = budget else { return true };
    budget.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// CPU seconds of this thread.
pub(crate) fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stream that completes operations at once, and fails on demand.
    struct Instantly {
        fails_after: u64,
        done: u64,
    }

    impl ProbeStream for Instantly {
        fn run_operations(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
            loop {
                let mut ops = 0;
                while meter.try_begin(stop) {
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
                    // No progress any more.
                    while !stop.is_aborted() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                meter.record_progress(StreamProgress { ops, bytes: u64::from(ops) * 10 });
            }
        }
    }

    fn lanes(count: usize, fails_after: u64) -> Vec<(ProbeOp, Box<dyn ProbeStream>)> {
        let op = |i| if i % 2 == 0 { ProbeOp::Read } else { ProbeOp::Write };
        (0..count).map(|i| (op(i), Box::new(Instantly { fails_after, done: 0 }) as Box<dyn ProbeStream>)).collect()
    }

    fn limits(ops: Option<u64>) -> RunLimits {
        RunLimits { time: Duration::from_secs(60), ops, patience: Duration::from_secs(60), pause: Duration::ZERO }
    }

    #[test]
    fn a_number_of_operations() {
        let done = drive_streams(lanes(3, u64::MAX), 4, &limits(Some(1000)), &AtomicBool::new(false), &mut |_| {});
        assert!(done.error.is_none() && !done.interrupted, "{done:?}");
        assert_eq!((done.total.ops, done.total.read_bytes + done.total.write_bytes), (1000, 10_000));
        assert_eq!(done.times.iter().map(|(_, t)| t.count()).sum::<u64>(), 1000);
        let (_, times) = &done.times[0];
        assert!(times.min_us() <= times.quantile_us(0.5) && times.quantile_us(0.5) <= times.max_us() * 1.01);
    }

    #[test]
    fn a_time() {
        let limits = RunLimits { time: Duration::from_millis(60), ..limits(None) };
        let mut seen = 0;
        let done = drive_streams(lanes(2, u64::MAX), 2, &limits, &AtomicBool::new(false), &mut |p| seen = p.ops);
        assert!(done.error.is_none() && done.total.ops > 0 && seen > 0);
        assert!(done.moved_bytes >= done.total.read_bytes + done.total.write_bytes);
    }

    #[test]
    fn an_interruption() {
        let interrupt = AtomicBool::new(false);
        let done = drive_streams(lanes(1, u64::MAX), 1, &limits(None), &interrupt, &mut |p| {
            interrupt.store(p.ops > 0, Ordering::Relaxed);
        });
        assert!(done.interrupted && done.error.is_none() && done.total.ops > 0);
    }

    #[test]
    fn what_is_stuck_is_cut() {
        let limits = RunLimits { time: Duration::from_millis(20), ..limits(None) };
        let done = drive_streams(lanes(1, 5), 1, &limits, &AtomicBool::new(false), &mut |_| {});
        assert!(done.error.is_none(), "{:?}", done.error);
    }

    #[test]
    fn a_stream_that_breaks_ends_all() {
        let done = drive_streams(lanes(2, 0), 1, &limits(None), &AtomicBool::new(false), &mut |_| {});
        assert_eq!(done.error.unwrap().message(), "broken on purpose");
    }

    #[test]
    fn pauses() {
        let limits = RunLimits { pause: Duration::from_millis(5), ..limits(Some(3)) };
        let done = drive_streams(lanes(1, u64::MAX), 1, &limits, &AtomicBool::new(false), &mut |_| {});
        assert!(done.total.ops == 3 && done.elapsed >= Duration::from_millis(10));
    }
}
