//! Tracks the read latency of one node, and whether it is deprioritised because it answers late. Pure state: the
//! caller passes the time.

use parking_lot::Mutex;
use spurline_sys::Backoff;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Threshold that no read reaches.
const NEVER: u64 = u64::MAX;
/// Consecutive late answers before a node is deprioritised.
const STRIKES: u32 = 4;
/// Pauses before a deprioritised node is tried, longer each time it is still late.
const TRIAL_PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(8));
/// After this long in time, the pause starts again at the minimum.
const FORGIVEN: Duration = Duration::from_secs(60);
/// A trial without a result for this long is repeated.
const TRIAL: Duration = Duration::from_secs(10);

/// Buckets of read times above the floor, four per doubling.
pub(crate) const BUCKETS: usize = 48;

/// Histogram of read times.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ReadTimes {
    /// Number of all reads.
    pub reads: u64,
    /// Reads longer than the floor, by bucket.
    pub long: Vec<u64>,
}

impl ReadTimes {
    /// Adds another node's counts.
    pub fn add(&mut self, other: &ReadTimes) {
        self.reads += other.reads;
        self.long.resize(BUCKETS, 0);
        self.long.iter_mut().zip(&other.long).for_each(|(sum, n)| *sum += n);
    }

    /// This histogram minus `other`.
    pub fn subtract(&self, other: &ReadTimes) -> ReadTimes {
        let long = self.long.iter().zip(&other.long).map(|(sum, n)| sum.saturating_sub(*n)).collect();
        ReadTimes { reads: self.reads.saturating_sub(other.reads), long }
    }

    /// The time that a share of `share` of the reads above `floor` did not exceed; `floor` if there are too few.
    pub fn percentile(&self, floor: Duration, share: f64) -> Duration {
        let count: u64 = self.long.iter().sum();
        if count < 8 {
            return floor;
        }
        let enough = (count as f64 * share).ceil() as u64;
        let mut sum = 0;
        let at = self
            .long
            .iter()
            .position(|n| {
                sum += n;
                sum >= enough
            })
            .unwrap_or(BUCKETS - 1);
        floor.mul_f64(2f64.powf((at + 1) as f64 / 4.0))
    }
}

/// State of a node that answered late.
#[derive(Debug)]
struct DeprioritisedState {
    /// Others are preferred until then.
    until: Instant,
    pauses: Backoff,
    /// A trial request is in flight.
    trying: bool,
    /// When it was last trusted again.
    trusted: Option<Instant>,
}

/// Latency of one node.
#[derive(Debug)]
pub struct LatencyTracker {
    reads: AtomicU64,
    long: [AtomicU64; BUCKETS],
    /// Lateness threshold in microseconds.
    late_us: AtomicU64,
    strikes: AtomicU32,
    is_deprioritised: AtomicBool,
    deprioritised: Mutex<Option<DeprioritisedState>>,
}

impl Default for LatencyTracker {
    fn default() -> Self {
        LatencyTracker {
            reads: AtomicU64::new(0),
            long: [const { AtomicU64::new(0) }; BUCKETS],
            late_us: AtomicU64::new(NEVER),
            strikes: AtomicU32::new(0),
            is_deprioritised: AtomicBool::new(false),
            deprioritised: Mutex::new(None),
        }
    }
}

impl LatencyTracker {
    /// Records the time of a read; `floor` is the minimum of a late one.
    pub(crate) fn note_read(&self, time: Duration, floor: Duration) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if time > floor {
            let doublings = (time.as_secs_f64() / floor.as_secs_f64()).log2();
            let at = ((doublings * 4.0) as usize).min(BUCKETS - 1);
            self.long[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The recorded times.
    pub(crate) fn read_times(&self) -> ReadTimes {
        let long = self.long.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        ReadTimes { reads: self.reads.load(Ordering::Relaxed), long }
    }

    /// Halves the weight of the recorded times.
    pub(crate) fn fade(&self) {
        halve(&self.reads);
        self.long.iter().for_each(halve);
    }

    /// Sets the lateness threshold; `None` while there are too few reads.
    pub(crate) fn set_late_after(&self, late: Option<Duration>) {
        self.late_us.store(late.map_or(NEVER, |late| late.as_micros() as u64), Ordering::Relaxed);
    }

    /// The lateness threshold; unreachable while there are too few reads.
    pub(crate) fn late_after(&self) -> Duration {
        Duration::from_micros(self.late_us.load(Ordering::Relaxed))
    }

    /// Records an answer in time; true if this ends the node's low priority.
    pub(crate) fn note_in_time(&self, now: Instant) -> bool {
        if self.strikes.load(Ordering::Relaxed) != 0 {
            self.strikes.store(0, Ordering::Relaxed);
        }
        if !self.is_deprioritised.load(Ordering::Acquire) {
            return false;
        }
        let mut deprioritised = self.deprioritised.lock();
        let Some(known) = deprioritised.as_mut().filter(|known| known.trying) else { return false };
        known.trying = false;
        known.trusted = Some(now);
        self.is_deprioritised.store(false, Ordering::Release);
        true
    }

    /// Records a late answer; true if the node is deprioritised from now on because of it.
    pub(crate) fn note_late(&self, now: Instant) -> bool {
        if self.is_deprioritised.load(Ordering::Acquire) {
            let mut deprioritised = self.deprioritised.lock();
            if let Some(known) = deprioritised.as_mut().filter(|known| known.trying) {
                known.until = now + known.pauses.next_pause();
                known.trying = false;
            }
            return false;
        }
        if self.strikes.fetch_add(1, Ordering::Relaxed) + 1 < STRIKES {
            return false;
        }
        self.deprioritise(now)
    }

    /// Deprioritises the node; true if it was not before.
    pub(crate) fn deprioritise(&self, now: Instant) -> bool {
        let mut deprioritised = self.deprioritised.lock();
        if self.is_deprioritised.swap(true, Ordering::AcqRel) {
            if let Some(known) = deprioritised.as_mut() {
                known.until = now + known.pauses.next_pause();
                known.trying = false;
            }
            return false;
        }
        let again = deprioritised.as_ref().filter(|known| known.trusted.is_some_and(|at| now < at + FORGIVEN));
        let mut pauses = again.map_or(TRIAL_PAUSES, |known| known.pauses);
        let until = now + pauses.next_pause();
        *deprioritised = Some(DeprioritisedState { until, pauses, trying: false, trusted: None });
        self.strikes.store(0, Ordering::Relaxed);
        true
    }

    /// Whether the node is deprioritised.
    pub fn is_deprioritised(&self) -> bool {
        self.is_deprioritised.load(Ordering::Acquire)
    }

    /// Whether [`LatencyTracker::admit_request`] would return true now.
    pub(crate) fn would_admit(&self, now: impl FnOnce() -> Instant) -> bool {
        !self.is_deprioritised() || self.deprioritised.lock().as_ref().is_none_or(|known| now() >= known.until)
    }

    /// Returns the trial of [`LatencyTracker::admit_request`]: no request was sent.
    pub(crate) fn return_trial(&self, now: impl FnOnce() -> Instant) {
        if self.is_deprioritised()
            && let Some(known) = self.deprioritised.lock().as_mut().filter(|known| known.trying)
        {
            known.until = now();
            known.trying = false;
        }
    }

    /// Whether a request may go to this node in normal order. A deprioritised node gets one trial request now and
    /// then.
    pub(crate) fn admit_request(&self, now: impl FnOnce() -> Instant) -> bool {
        if !self.is_deprioritised() {
            return true;
        }
        let mut deprioritised = self.deprioritised.lock();
        let now = now();
        let Some(known) = deprioritised.as_mut().filter(|known| now >= known.until) else {
            return !self.is_deprioritised();
        };
        known.until = now + TRIAL;
        known.trying = true;
        true
    }
}

fn halve(count: &AtomicU64) {
    count.store(count.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR: Duration = Duration::from_millis(50);

    #[test]
    fn the_percentile_is_of_the_long_reads_of_the_others() {
        let (quick, cold, slow) = (LatencyTracker::default(), LatencyTracker::default(), LatencyTracker::default());
        (0..1000).for_each(|_| quick.note_read(Duration::from_micros(80), FLOOR));
        (0..1000).for_each(|_| cold.note_read(Duration::from_millis(1), FLOOR));
        // Fetches from the origin take this long and must not count as late.
        (0..10).for_each(|_| cold.note_read(Duration::from_millis(120), FLOOR));
        (0..100).for_each(|_| slow.note_read(Duration::from_secs(2), FLOOR));
        let mut all = ReadTimes::default();
        [&quick, &cold, &slow].into_iter().for_each(|pace| all.add(&pace.read_times()));
        let late = |pace: &LatencyTracker| all.subtract(&pace.read_times()).percentile(FLOOR, 0.95);
        assert!((120..150).contains(&late(&slow).as_millis()), "{:?}", late(&slow));
        assert!(late(&quick) >= Duration::from_secs(2), "the slow one is one of its others");
        assert_eq!(quick.read_times().percentile(FLOOR, 0.95), FLOOR);
        assert_eq!(all.reads, 2110);
        slow.fade();
        assert_eq!(
            (slow.read_times().reads, slow.read_times().percentile(FLOOR, 0.5) > Duration::from_secs(1)),
            (50, true)
        );
        // Times of any length have a bucket.
        slow.note_read(Duration::from_secs(1 << 40), FLOOR);
    }

    #[test]
    fn a_trial_that_was_not_made_is_the_next_request_s() {
        let (pace, start) = (LatencyTracker::default(), Instant::now());
        let at = |seconds: u64| move || start + Duration::from_secs(seconds);
        assert!(pace.would_admit(at(0)) && pace.deprioritise(start));
        assert!(!pace.would_admit(at(0)) && !pace.admit_request(at(0)));
        // `would_ask` does not consume the trial.
        assert!(pace.would_admit(at(1)) && pace.would_admit(at(1)) && pace.admit_request(at(1)));
        assert!(!pace.would_admit(at(1)) && !pace.admit_request(at(1)));
        pace.return_trial(at(1));
        assert!(pace.would_admit(at(1)) && pace.admit_request(at(1)));
        assert!(pace.note_in_time(start + Duration::from_secs(1)) && !pace.is_deprioritised());
        pace.return_trial(at(1));
        assert!(pace.would_admit(at(1)));
    }

    #[test]
    fn four_late_answers_in_a_row_send_requests_elsewhere_until_a_trial_is_in_time() {
        let (pace, start) = (LatencyTracker::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        (0..3).for_each(|_| assert!(!pace.note_late(at(0))));
        assert!(!pace.note_in_time(at(0)));
        (0..3).for_each(|_| assert!(!pace.note_late(at(0))));
        assert!(pace.admit_request(|| at(0)));
        assert!(pace.note_late(at(0)), "the fourth in a row");
        assert!(pace.is_deprioritised() && !pace.admit_request(|| at(0)));
        assert!(!pace.note_in_time(at(0)), "an answer to an earlier request proves nothing");
        assert!(pace.admit_request(|| at(1)), "the trial");
        assert!(!pace.admit_request(|| at(1)), "one at a time");
        assert!(!pace.note_late(at(2)));
        assert!(!pace.admit_request(|| at(3)), "twice as long");
        assert!(pace.admit_request(|| at(4)));
        assert!(!pace.admit_request(|| at(5)));
        assert!(pace.admit_request(|| at(15)), "the trial was lost");
        assert!(pace.note_in_time(at(15)) && !pace.is_deprioritised());
        assert!(pace.admit_request(|| at(15)));
        // Soon again: the pause keeps growing. After a while it starts at the minimum.
        assert!(pace.deprioritise(at(16)) && !pace.admit_request(|| at(19)) && pace.admit_request(|| at(20)));
        assert!(pace.note_in_time(at(20)) && pace.deprioritise(at(100)) && pace.admit_request(|| at(101)));
    }

    #[test]
    fn the_pause_has_an_end() {
        let (pace, start) = (LatencyTracker::default(), Instant::now());
        (0..40).for_each(|_| {
            pace.deprioritise(start);
        });
        assert!(pace.admit_request(|| start + Duration::from_secs(8)));
    }
}
