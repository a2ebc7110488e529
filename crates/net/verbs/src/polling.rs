//! Decides whether a thread may poll instead of sleeping, and for how long. Knows no queue.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Number of polling threads.
static POLLING: AtomicUsize = AtomicUsize::new(0);

/// Permission to poll, for the life of this value. Half of the processors stay free for the threads that are waited
/// for.
pub(crate) struct PollPermit(());

impl PollPermit {
    /// A permit for this thread on a host with `processors`, unless enough threads poll already.
    pub fn try_begin(processors: usize) -> Option<PollPermit> {
        if POLLING.fetch_add(1, Ordering::Relaxed) >= processors / 2 {
            POLLING.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(PollPermit(()))
    }

    /// Pauses between two polls; `look` counts the unsuccessful polls. Returns whether to read the clock, which costs as much as
    /// several polls. So does yielding: software devices work in a kernel thread that may wait for this processor, up to a tick
    /// of 4 ms.
    pub fn spin_pause(look: u32) -> bool {
        if look.is_multiple_of(4) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        look.is_multiple_of(8)
    }
}

impl Drop for PollPermit {
    fn drop(&mut self) {
        POLLING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The longest polling time: longer than a small read over a slow path, shorter than bulk data, for which sleeping is
/// cheaper.
pub(crate) const LONGEST: Duration = Duration::from_micros(400);
/// The shortest polling time, so that an immediate answer does not end polling.
const SHORTEST_POLLING: Duration = Duration::from_micros(20);
/// A wait in this many tries whether polling pays.
const TRIAL_WAITS: u32 = 64;

/// Adapts polling time on a connection: a small multiple of the recent waits, and only occasional tries where polling finds
/// nothing. The duration of sleeps is no measure, as the wake-up may be most of the time.
pub(crate) struct PollPacer {
    pays: u8,
    waits: u32,
    took: Duration,
}

impl PollPacer {
    pub fn new() -> Self {
        PollPacer { pays: 0, waits: 0, took: LONGEST }
    }

    /// Polling time before the next wait; `None` to sleep at once.
    pub fn next_limit(&mut self) -> Option<Duration> {
        self.waits = self.waits.wrapping_add(1);
        if self.waits.is_multiple_of(TRIAL_WAITS) {
            return Some(LONGEST);
        }
        (self.pays > 0).then(|| (self.took * 4).clamp(SHORTEST_POLLING, LONGEST))
    }

    /// Records the result of polling: the time to success, or `None`.
    pub fn record_wait(&mut self, took: Option<Duration>) {
        match took {
            Some(took) if self.pays == 0 => {
                self.pays = 2;
                self.took = took;
            }
            Some(took) => {
                self.pays = (self.pays + 2).min(8);
                self.took = (self.took * 7 + took) / 8;
            }
            None => self.pays = self.pays.saturating_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leave_is_for_half_of_the_processors() {
        assert!(PollPermit::try_begin(1).is_none());
        let one = PollPermit::try_begin(4).expect("two may");
        let two = PollPermit::try_begin(4).expect("two may");
        assert!(PollPermit::try_begin(4).is_none());
        drop(one);
        assert!(PollPermit::try_begin(4).is_some());
        drop(two);
    }

    #[test]
    fn polling_goes_on_where_it_pays_and_for_as_long_as_it_pays() {
        let mut pace = PollPacer::new();
        let tried = (1..=2 * TRIAL_WAITS).filter(|_| pace.next_limit().is_some()).count();
        assert_eq!(tried, 2, "it is tried now and then");
        pace.record_wait(Some(Duration::from_micros(30)));
        assert_eq!(pace.next_limit(), Some(Duration::from_micros(120)));
        for _ in 0..100 {
            pace.record_wait(Some(Duration::from_micros(1)));
        }
        assert_eq!(pace.next_limit(), Some(SHORTEST_POLLING));
        for _ in 0..8 {
            assert!(pace.next_limit().is_some());
            pace.record_wait(None);
        }
        assert_eq!(pace.next_limit(), None, "nothing was found for long");
    }
}
