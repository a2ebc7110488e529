//! Who may poll instead of sleeping, and for how long it pays. It knows no queue.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Threads polling now.
static POLLING: AtomicUsize = AtomicUsize::new(0);

/// Leave to poll: there are never more than leave a processor for those that are waited for. Ends with this value.
pub(crate) struct Polling(());

impl Polling {
    /// Leave for this thread, on a machine with `processors`, unless enough poll already.
    pub fn begin(processors: usize) -> Option<Polling> {
        if POLLING.fetch_add(1, Ordering::Relaxed) >= processors / 2 {
            POLLING.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Polling(()))
    }

    /// To be called with the number of each look that found nothing; says whether it is time to look at the clock,
    /// which costs as much as several looks. So does offering the processor to others: software devices do their work in
    /// a kernel thread that may wait for this very one, up to a tick of 4 ms.
    pub fn pause(look: u32) -> bool {
        if look.is_multiple_of(4) {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
        look.is_multiple_of(8)
    }
}

impl Drop for Polling {
    fn drop(&mut self) {
        POLLING.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The longest that one waits by polling: longer than a small read takes over a slow path, shorter than bulk data, which
/// is cheaper waited for asleep.
pub(crate) const LONGEST: Duration = Duration::from_micros(400);
/// The shortest, so that one answer that came at once does not end polling.
const SHORTEST: Duration = Duration::from_micros(20);
/// Of this many waits one tries whether polling is worth it.
const TRY: u32 = 64;

/// What polling brought on one connection: it goes on for a few times as long as it took lately, and where it brings nothing
/// it is only tried now and then. How long a sleep lasts would not tell, as its wake-up may be most of it.
pub(crate) struct Pace {
    pays: u8,
    waits: u32,
    took: Duration,
}

impl Pace {
    pub fn new() -> Self {
        Pace { pays: 0, waits: 0, took: LONGEST }
    }

    /// How long to poll for before this wait; `None` to sleep at once.
    pub fn next(&mut self) -> Option<Duration> {
        self.waits = self.waits.wrapping_add(1);
        if self.waits.is_multiple_of(TRY) {
            return Some(LONGEST);
        }
        (self.pays > 0).then(|| (self.took * 4).clamp(SHORTEST, LONGEST))
    }

    /// Polling found what was waited for after `took`, or did not find it.
    pub fn learn(&mut self, took: Option<Duration>) {
        match took {
            Some(took) if self.pays == 0 => (self.pays, self.took) = (2, took),
            Some(took) => (self.pays, self.took) = ((self.pays + 2).min(8), (self.took * 7 + took) / 8),
            None => self.pays = self.pays.saturating_sub(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leave_is_for_half_of_the_processors() {
        assert!(Polling::begin(1).is_none());
        let one = Polling::begin(4).expect("two may");
        let two = Polling::begin(4).expect("two may");
        assert!(Polling::begin(4).is_none());
        drop(one);
        assert!(Polling::begin(4).is_some());
        drop(two);
    }

    #[test]
    fn polling_goes_on_where_it_pays_and_for_as_long_as_it_pays() {
        let mut pace = Pace::new();
        let tried = (1..=2 * TRY).filter(|_| pace.next().is_some()).count();
        assert_eq!(tried, 2, "it is tried now and then");
        pace.learn(Some(Duration::from_micros(30)));
        assert_eq!(pace.next(), Some(Duration::from_micros(120)));
        for _ in 0..100 {
            pace.learn(Some(Duration::from_micros(1)));
        }
        assert_eq!(pace.next(), Some(SHORTEST));
        for _ in 0..8 {
            assert!(pace.next().is_some());
            pace.learn(None);
        }
        assert_eq!(pace.next(), None, "nothing was found for long");
    }
}
