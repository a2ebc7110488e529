//! Whether a path that recovered carries reads as fast as before the failure. Pure: the caller reports each long read with its
//! duration, and no read is made for the comparison. Knows no path, no clock and no cause.
//!
//! Reads are compared with reads of similar length. The measure is the bytes a path moved during a read, all concurrent reads
//! included, so that many readers look no slower than a single reader.

use std::time::Duration;

/// Shorter reads measure latency rather than speed.
pub(crate) const SHORTEST_READ: usize = 128 << 10;
/// Reads of a length class judged together, by the median.
const WINDOW_READS: usize = 32;
/// Lengths from 128 KiB to 2 MiB and above, by powers of two.
const LENGTH_CLASSES: usize = 5;
/// Consecutive slow windows before a path counts as slower: a short disturbance is not the path's fault.
const SLOW_WINDOWS: u8 = 3;
/// The share of the former speed that still counts as unchanged; measurements on the same machine vary by less.
const SAME_SPEED_SHARE: (u64, u64) = (4, 5);
/// The lowest load share of a path, in thousandths: a path without reads could not prove faster.
const LEAST_SHARE: u32 = 100;
/// Each slower window lowers the reference speed by a part in this many, so that a changed workload does not count against the
/// path for ever.
const FORGET_DIVISOR: u64 = 64;

/// The result of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpeedCheck {
    /// Bytes per second before the failure.
    pub before: u64,
    /// Bytes per second since.
    pub after: u64,
    /// Whether the path is slower.
    pub slower: bool,
}

#[derive(Debug, Default)]
struct LengthClass {
    usual: Option<u64>,
    window: Vec<u64>,
    slow: u8,
}

/// The speed of a path.
#[derive(Debug, Default)]
pub(crate) struct PathSpeed {
    classes: [LengthClass; LENGTH_CLASSES],
    /// The path recovered and is still to be compared, or was slower.
    comparing: bool,
    last_check: Option<SpeedCheck>,
}

impl PathSpeed {
    /// Records a read of `len` bytes that took `took`, with `under_way` requests on the path at the end, this read included.
    /// Returns a new comparison result.
    pub fn record_read(&mut self, len: usize, took: Duration, under_way: usize) -> Option<SpeedCheck> {
        let index = (len / SHORTEST_READ).checked_ilog2()?.min(LENGTH_CLASSES as u32 - 1) as usize;
        let class = &mut self.classes[index];
        let bytes = (len as u128 * under_way.max(1) as u128).saturating_mul(1_000_000_000);
        let speed = u64::try_from(bytes / took.as_nanos().max(1)).unwrap_or(u64::MAX);
        // Allocated once per class.
        class.window.reserve_exact(WINDOW_READS - class.window.len());
        class.window.push(speed);
        if class.window.len() < WINDOW_READS {
            return None;
        }
        class.window.sort_unstable();
        let after = class.window[WINDOW_READS / 2];
        class.window.clear();
        if class.usual.is_none() {
            let (shorter, longer) = self.classes.split_at(index);
            let nearest = shorter.iter().rev().find_map(|class| class.usual);
            let nearest = longer.iter().find_map(|class| class.usual).or(nearest);
            // A slower path gets shorter parts than before, so only these can show a recovery.
            let slower = self.last_check.is_some_and(|last| last.slower);
            self.classes[index].usual = if slower { nearest } else { None }.or(Some(after));
            if !slower {
                return None;
            }
        }
        let class = &mut self.classes[index];
        let usual = class.usual.as_mut()?;
        if !self.comparing {
            // Slowly, so that a path about to fail does not lower the reference.
            *usual = if after > *usual { after } else { *usual - (*usual - after) / 8 };
            return None;
        }
        let before = *usual;
        let enough =
            u128::from(after) * u128::from(SAME_SPEED_SHARE.1) >= u128::from(before) * u128::from(SAME_SPEED_SHARE.0);
        if enough {
            self.comparing = false;
            self.classes.iter_mut().for_each(|class| class.slow = 0);
        } else {
            class.slow = (class.slow + 1).min(SLOW_WINDOWS);
            *usual -= *usual / FORGET_DIVISOR;
            if class.slow < SLOW_WINDOWS {
                return None;
            }
        }
        let check = SpeedCheck { before, after, slower: !enough };
        self.last_check = Some(check);
        Some(check)
    }

    /// The path carries data again after a failure; reads are compared from now on.
    pub fn path_returned(&mut self) {
        self.comparing = true;
        self.last_check = None;
        for class in &mut self.classes {
            class.window.clear();
            class.slow = 0;
        }
    }

    /// The last comparison; `None` after a recovery, or without a failure.
    pub fn last(&self) -> Option<SpeedCheck> {
        self.last_check
    }

    /// The usual bytes per second, for the longest reads so far.
    pub fn usual_speed(&self) -> Option<u64> {
        self.classes.iter().rev().find_map(|class| class.usual)
    }
}

impl SpeedCheck {
    /// The share of the speed used for load balancing, in thousandths.
    pub(crate) fn load_share(&self) -> u32 {
        let share = u128::from(self.after) * 1000 / u128::from(self.before.max(1));
        if self.slower { u32::try_from(share).unwrap_or(1000).clamp(LEAST_SHARE, 1000) } else { 1000 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN: usize = 1 << 20;

    /// A window of reads that take this long; the last answer.
    fn window(speed: &mut PathSpeed, ms: u64, under_way: usize) -> Option<SpeedCheck> {
        (0..WINDOW_READS).filter_map(|_| speed.record_read(LEN, Duration::from_millis(ms), under_way)).last()
    }

    #[test]
    fn a_path_as_fast_as_before_says_so_once() {
        let mut speed = PathSpeed::default();
        assert_eq!((window(&mut speed, 10, 1), speed.usual_speed(), speed.last()), (None, Some(100 << 20), None));
        speed.path_returned();
        // Two readers share it, each waits twice as long: no slower.
        let check = window(&mut speed, 20, 2).expect("a whole window");
        assert_eq!(check, SpeedCheck { before: 100 << 20, after: 100 << 20, slower: false });
        assert_eq!((check.load_share(), speed.last(), window(&mut speed, 10, 1)), (1000, Some(check), None));
    }

    #[test]
    fn a_slower_path_is_judged_late_and_forgiven_when_it_is_fast_again() {
        let mut speed = PathSpeed::default();
        window(&mut speed, 10, 1);
        speed.path_returned();
        assert_eq!(window(&mut speed, 40, 1), None);
        assert_eq!(window(&mut speed, 40, 1), None);
        let check = window(&mut speed, 40, 1).expect("the third window");
        assert!(check.slower && (250..=270).contains(&check.load_share()), "{check:?}");
        // Something else ran for a moment.
        let check = window(&mut speed, 11, 1).expect("as fast as before");
        assert!(!check.slower && check.load_share() == 1000, "{check:?}");
        // A pause in between starts the count anew.
        speed.path_returned();
        assert_eq!((window(&mut speed, 40, 1), speed.last()), (None, None));
        assert!(!window(&mut speed, 10, 1).expect("fast").slower);
    }

    #[test]
    fn a_path_that_stays_slower_is_not_blamed_for_ever() {
        let mut speed = PathSpeed::default();
        window(&mut speed, 10, 1);
        speed.path_returned();
        let verdicts = (0..400).filter_map(|_| window(&mut speed, 30, 1));
        assert!(verdicts.into_iter().any(|check| !check.slower));
    }

    #[test]
    fn a_slower_path_is_forgiven_by_shorter_parts_than_it_had_before() {
        let mut speed = PathSpeed::default();
        window(&mut speed, 10, 1);
        speed.path_returned();
        let slow: Vec<_> = (0..3).filter_map(|_| window(&mut speed, 100, 1)).collect();
        assert!(slow.len() == 1 && slow[0].slower, "{slow:?}");
        // As slow as before: a length that was never seen does not excuse it.
        let short = |speed: &mut PathSpeed, us: u64| {
            (0..WINDOW_READS).filter_map(|_| speed.record_read(SHORTEST_READ, Duration::from_micros(us), 1)).last()
        };
        for _ in 0..3 {
            assert!(short(&mut speed, 12_500).is_none_or(|check| check.slower));
        }
        // As fast as it was.
        let check = short(&mut speed, 1_250).expect("a verdict");
        assert!(!check.slower && check.load_share() == 1000, "{check:?}");
    }

    #[test]
    fn lengths_are_compared_with_their_like() {
        let mut speed = PathSpeed::default();
        window(&mut speed, 10, 1);
        speed.path_returned();
        // Nothing is known of this length, and short reads are no measure.
        for _ in 0..WINDOW_READS {
            assert_eq!(speed.record_read(SHORTEST_READ, Duration::from_millis(100), 1), None);
            assert_eq!(speed.record_read(SHORTEST_READ - 1, Duration::from_secs(100), 1), None);
        }
        assert!(!window(&mut speed, 10, 1).expect("a length that is known").slower);
        // Lengths and times without bounds.
        for (len, took) in [(usize::MAX, Duration::ZERO), (SHORTEST_READ, Duration::MAX), (0, Duration::ZERO)] {
            for _ in 0..WINDOW_READS {
                speed.record_read(len, took, usize::MAX);
            }
        }
    }
}
