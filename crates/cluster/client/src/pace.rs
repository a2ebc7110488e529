//! How soon one node answers reads, and whether others are asked before it because it answers late. It knows no
//! network; when something happened is told to it.

use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Lateness that nothing reaches.
const NEVER: u64 = u64::MAX;
/// Late answers in a row after which others are asked first.
const STRIKES: u32 = 4;
/// For so long others are asked first; it doubles each time the node is still late.
const PAUSE_MIN: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(8);
/// A node that was in time for so long begins with the shortest pause again.
const FORGIVEN: Duration = Duration::from_secs(60);
/// A trial of which nothing is heard for this long is made again.
const TRIAL: Duration = Duration::from_secs(10);

/// Times of reads that took longer than the least time that can be late: buckets a fourth of a doubling wide.
pub(crate) const BUCKETS: usize = 48;

/// How often reads took how long.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Times {
    /// All reads.
    pub reads: u64,
    /// Those longer than the floor, by bucket.
    pub long: Vec<u64>,
}

impl Times {
    /// Adds another node's.
    pub fn add(&mut self, other: &Times) {
        self.reads += other.reads;
        self.long.resize(BUCKETS, 0);
        self.long.iter_mut().zip(&other.long).for_each(|(sum, n)| *sum += n);
    }

    /// Takes them off again.
    pub fn without(&self, other: &Times) -> Times {
        let long = self.long.iter().zip(&other.long).map(|(sum, n)| sum.saturating_sub(*n)).collect();
        Times { reads: self.reads.saturating_sub(other.reads), long }
    }

    /// What `share` of the reads that took longer than `floor` did not exceed; `floor` when there were hardly any.
    pub fn percentile(&self, floor: Duration, share: f64) -> Duration {
        let count: u64 = self.long.iter().sum();
        if count < 8 {
            return floor;
        }
        let enough = (count as f64 * share).ceil() as u64;
        let mut sum = 0;
        let within = |n: &u64| {
            sum += n;
            sum >= enough
        };
        let at = self.long.iter().position(within).unwrap_or(BUCKETS - 1);
        floor.mul_f64(2f64.powf((at + 1) as f64 / 4.0))
    }
}

/// What is remembered of a node that answered late.
#[derive(Debug)]
struct Shunned {
    /// Others are asked first until then.
    until: Instant,
    pause: Duration,
    /// One request tries it.
    trying: bool,
    /// When it was trusted again.
    trusted: Option<Instant>,
}

/// One node's pace.
#[derive(Debug)]
pub struct Pace {
    reads: AtomicU64,
    long: [AtomicU64; BUCKETS],
    /// From when on an answer is late, in microseconds.
    late_us: AtomicU64,
    strikes: AtomicU32,
    is_shunned: AtomicBool,
    shunned: Mutex<Option<Shunned>>,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            reads: AtomicU64::new(0),
            long: [const { AtomicU64::new(0) }; BUCKETS],
            late_us: AtomicU64::new(NEVER),
            strikes: AtomicU32::new(0),
            is_shunned: AtomicBool::new(false),
            shunned: Mutex::new(None),
        }
    }
}

impl Pace {
    /// A read took so long; `floor` is the least that can be late.
    pub(crate) fn took(&self, time: Duration, floor: Duration) {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if time > floor {
            let doublings = (time.as_secs_f64() / floor.as_secs_f64()).log2();
            let at = ((doublings * 4.0) as usize).min(BUCKETS - 1);
            self.long[at].fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What was seen so far.
    pub(crate) fn times(&self) -> Times {
        let long = self.long.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        Times { reads: self.reads.load(Ordering::Relaxed), long }
    }

    /// Gives what was seen so far half its weight.
    pub(crate) fn fade(&self) {
        let halve = |n: &AtomicU64| n.store(n.load(Ordering::Relaxed) / 2, Ordering::Relaxed);
        halve(&self.reads);
        self.long.iter().for_each(halve);
    }

    /// Sets from when on an answer is late; `None` while that can't be said.
    pub(crate) fn set_late(&self, late: Option<Duration>) {
        self.late_us.store(late.map_or(NEVER, |late| late.as_micros() as u64), Ordering::Relaxed);
    }

    /// From when on an answer is late; a time that never comes while that can't be said.
    pub(crate) fn late(&self) -> Duration {
        Duration::from_micros(self.late_us.load(Ordering::Relaxed))
    }

    /// An answer came in time.
    pub(crate) fn in_time(&self, now: Instant) -> bool {
        if self.strikes.load(Ordering::Relaxed) != 0 {
            self.strikes.store(0, Ordering::Relaxed);
        }
        if !self.is_shunned.load(Ordering::Acquire) {
            return false;
        }
        let mut shunned = self.shunned.lock();
        let Some(known) = shunned.as_mut().filter(|known| known.trying) else { return false };
        (known.trying, known.trusted) = (false, Some(now));
        self.is_shunned.store(false, Ordering::Release);
        true
    }

    /// An answer was late. Whether that is why others are asked first from now on.
    pub(crate) fn was_late(&self, now: Instant) -> bool {
        if self.is_shunned.load(Ordering::Acquire) {
            let mut shunned = self.shunned.lock();
            if let Some(known) = shunned.as_mut().filter(|known| known.trying) {
                known.pause = (known.pause * 2).min(PAUSE_MAX);
                (known.until, known.trying) = (now + known.pause, false);
            }
            return false;
        }
        if self.strikes.fetch_add(1, Ordering::Relaxed) + 1 < STRIKES {
            return false;
        }
        self.shun(now)
    }

    /// Others are asked first from now on; whether they were not before.
    pub(crate) fn shun(&self, now: Instant) -> bool {
        let mut shunned = self.shunned.lock();
        if self.is_shunned.swap(true, Ordering::AcqRel) {
            if let Some(known) = shunned.as_mut() {
                known.pause = (known.pause * 2).min(PAUSE_MAX);
                (known.until, known.trying) = (now + known.pause, false);
            }
            return false;
        }
        let again = shunned.as_ref().filter(|known| known.trusted.is_some_and(|at| now < at + FORGIVEN));
        let pause = again.map_or(PAUSE_MIN, |known| (known.pause * 2).min(PAUSE_MAX));
        *shunned = Some(Shunned { until: now + pause, pause, trying: false, trusted: None });
        self.strikes.store(0, Ordering::Relaxed);
        true
    }

    /// Whether others are asked first.
    pub fn is_shunned(&self) -> bool {
        self.is_shunned.load(Ordering::Acquire)
    }

    /// Whether a request would go to this node now, as [`Pace::may_ask`] says of one that does.
    pub(crate) fn would_ask(&self, now: impl FnOnce() -> Instant) -> bool {
        !self.is_shunned() || self.shunned.lock().as_ref().is_none_or(|known| now() >= known.until)
    }

    /// The request that [`Pace::may_ask`] let go to this node did not.
    pub(crate) fn not_asked(&self, now: impl FnOnce() -> Instant) {
        if self.is_shunned()
            && let Some(known) = self.shunned.lock().as_mut().filter(|known| known.trying)
        {
            (known.until, known.trying) = (now(), false);
        }
    }

    /// Whether a request goes to this node as if nothing were wrong: one does now and then, to try it.
    pub(crate) fn may_ask(&self, now: impl FnOnce() -> Instant) -> bool {
        if !self.is_shunned() {
            return true;
        }
        let (mut shunned, now) = (self.shunned.lock(), now());
        let Some(known) = shunned.as_mut().filter(|known| now >= known.until) else { return !self.is_shunned() };
        (known.until, known.trying) = (now + TRIAL, true);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR: Duration = Duration::from_millis(50);

    #[test]
    fn the_percentile_is_of_the_long_reads_of_the_others() {
        let (quick, cold, slow) = (Pace::default(), Pace::default(), Pace::default());
        (0..1000).for_each(|_| quick.took(Duration::from_micros(80), FLOOR));
        (0..1000).for_each(|_| cold.took(Duration::from_millis(1), FLOOR));
        // Some had to be fetched: what that takes is not late.
        (0..10).for_each(|_| cold.took(Duration::from_millis(120), FLOOR));
        (0..100).for_each(|_| slow.took(Duration::from_secs(2), FLOOR));
        let mut all = Times::default();
        [&quick, &cold, &slow].into_iter().for_each(|pace| all.add(&pace.times()));
        let late = |pace: &Pace| all.without(&pace.times()).percentile(FLOOR, 0.95);
        assert!((120..150).contains(&late(&slow).as_millis()), "{:?}", late(&slow));
        assert!(late(&quick) >= Duration::from_secs(2), "the slow one is one of its others");
        assert_eq!(quick.times().percentile(FLOOR, 0.95), FLOOR);
        assert_eq!(all.reads, 2110);
        slow.fade();
        assert_eq!((slow.times().reads, slow.times().percentile(FLOOR, 0.5) > Duration::from_secs(1)), (50, true));
        // Times of any length have a bucket.
        slow.took(Duration::from_secs(1 << 40), FLOOR);
    }

    #[test]
    fn a_trial_that_was_not_made_is_the_next_request_s() {
        let (pace, start) = (Pace::default(), Instant::now());
        let at = |seconds: u64| move || start + Duration::from_secs(seconds);
        assert!(pace.would_ask(at(0)) && pace.shun(start));
        assert!(!pace.would_ask(at(0)) && !pace.may_ask(at(0)));
        // To look whether it is due takes it from nobody.
        assert!(pace.would_ask(at(1)) && pace.would_ask(at(1)) && pace.may_ask(at(1)));
        assert!(!pace.would_ask(at(1)) && !pace.may_ask(at(1)));
        pace.not_asked(at(1));
        assert!(pace.would_ask(at(1)) && pace.may_ask(at(1)));
        assert!(pace.in_time(start + Duration::from_secs(1)) && !pace.is_shunned());
        pace.not_asked(at(1));
        assert!(pace.would_ask(at(1)));
    }

    #[test]
    fn four_late_answers_in_a_row_send_requests_elsewhere_until_a_trial_is_in_time() {
        let (pace, start) = (Pace::default(), Instant::now());
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        (0..3).for_each(|_| assert!(!pace.was_late(at(0))));
        assert!(!pace.in_time(at(0)));
        (0..3).for_each(|_| assert!(!pace.was_late(at(0))));
        assert!(pace.may_ask(|| at(0)));
        assert!(pace.was_late(at(0)), "the fourth in a row");
        assert!(pace.is_shunned() && !pace.may_ask(|| at(0)));
        assert!(!pace.in_time(at(0)), "an answer to what was asked before says nothing");
        assert!(pace.may_ask(|| at(1)), "the trial");
        assert!(!pace.may_ask(|| at(1)), "one at a time");
        assert!(!pace.was_late(at(2)));
        assert!(!pace.may_ask(|| at(3)), "twice as long");
        assert!(pace.may_ask(|| at(4)));
        assert!(!pace.may_ask(|| at(5)));
        assert!(pace.may_ask(|| at(15)), "the trial was lost");
        assert!(pace.in_time(at(15)) && !pace.is_shunned());
        assert!(pace.may_ask(|| at(15)));
        // Soon again: the pause goes on growing; after a while it does not.
        assert!(pace.shun(at(16)) && !pace.may_ask(|| at(19)) && pace.may_ask(|| at(20)));
        assert!(pace.in_time(at(20)) && pace.shun(at(100)) && pace.may_ask(|| at(101)));
    }

    #[test]
    fn the_pause_has_an_end() {
        let (pace, start) = (Pace::default(), Instant::now());
        (0..40).for_each(|_| {
            pace.shun(start);
        });
        assert!(pace.may_ask(|| start + PAUSE_MAX));
    }
}
