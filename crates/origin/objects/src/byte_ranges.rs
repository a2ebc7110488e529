//! A set of byte ranges of a file. It knows no bytes.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that neither touch nor overlap: starts and ends.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct ByteRanges(BTreeMap<u64, u64>);

impl ByteRanges {
    /// Adds a range.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let mut start = range.start;
        let mut end = range.end;
        while let Some((known_start, known_end)) = self.last_starting_up_to(end) {
            if known_end < start {
                break;
            }
            self.0.remove(&known_start);
            start = start.min(known_start);
            end = end.max(known_end);
        }
        self.0.insert(start, end);
    }

    /// Removes all bytes from `start` on.
    pub fn cut(&mut self, start: u64) {
        self.0.split_off(&start);
        if let Some(mut last) = self.0.last_entry()
            && *last.get() > start
        {
            last.insert(start);
        }
    }

    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let mut behind = self.0.split_off(&range.end);
        if let Some((_, end)) = self.last_starting_up_to(range.end)
            && end > range.end
        {
            behind.insert(range.end, end);
        }
        self.cut(range.start);
        self.0.append(&mut behind);
    }

    /// Whether all bytes of the range are in the set.
    pub fn covers(&self, range: Range<u64>) -> bool {
        range.is_empty() || self.last_starting_up_to(range.start).is_some_and(|(_, end)| end >= range.end)
    }

    /// The number of bytes of the range that are not in the set.
    pub fn missing_in(&self, range: Range<u64>) -> u64 {
        let mut missing = 0;
        let mut at = range.start;
        while at < range.end {
            let (is_known, piece_end) = self.piece_at(at);
            let piece_end = piece_end.min(range.end);
            if !is_known {
                missing += piece_end - at;
            }
            at = piece_end;
        }
        missing
    }

    /// The number of bytes.
    pub fn len(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Whether any byte of the range is in the set.
    pub fn meets(&self, range: Range<u64>) -> bool {
        !range.is_empty() && self.last_starting_up_to(range.end - 1).is_some_and(|(_, end)| end > range.start)
    }

    /// Whether the set begins at `at` or holds that byte, and how far that goes: to the end of the range in the set, or to
    /// the start of the next one.
    pub fn piece_at(&self, at: u64) -> (bool, u64) {
        if let Some((_, end)) = self.last_starting_up_to(at)
            && end > at
        {
            return (true, end);
        }
        let next = self.0.range(at..).next().map_or(u64::MAX, |(start, _)| *start);
        (false, next)
    }

    fn last_starting_up_to(&self, at: u64) -> Option<(u64, u64)> {
        self.0.range(..=at).next_back().map(|(start, end)| (*start, *end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_cut() {
        let mut ranges = ByteRanges::default();
        ranges.insert(10..20);
        ranges.insert(30..40);
        assert!(ranges.covers(12..20) && !ranges.covers(12..21) && ranges.meets(0..11) && !ranges.meets(20..30));
        assert_eq!(ranges.piece_at(5), (false, 10));
        assert_eq!(ranges.piece_at(15), (true, 20));
        assert_eq!(ranges.piece_at(20), (false, 30));
        assert_eq!(ranges.piece_at(40), (false, u64::MAX));
        ranges.insert(20..30);
        assert!(ranges.covers(10..40));
        ranges.cut(25);
        assert!(ranges.covers(10..25) && !ranges.meets(25..100));
        ranges.cut(10);
        assert_eq!(ranges, ByteRanges::default());
        ranges.insert(0..9);
        ranges.remove(3..6);
        assert_eq!((ranges.piece_at(0), ranges.piece_at(3), ranges.len()), ((true, 3), (false, 6), 6));
    }

    proptest::proptest! {
        #[test]
        fn a_set_is_what_a_list_of_bytes_says(steps in proptest::collection::vec((0u64..50, 0u64..20, 0..3), 0..30)) {
            let mut ranges = ByteRanges::default();
            let mut model = [false; 80];
            for (start, len, step) in steps {
                let range = start as usize..(start + len) as usize;
                match step {
                    0 => {
                        ranges.cut(start);
                        model[range.start..].fill(false);
                    }
                    1 => {
                        ranges.remove(start..start + len);
                        model[range].fill(false);
                    }
                    _ => {
                        ranges.insert(start..start + len);
                        model[range].fill(true);
                    }
                }
            }
            for at in 0..79u64 {
                let (inside, end) = ranges.piece_at(at);
                proptest::prop_assert_eq!(inside, model[at as usize]);
                let end = end.min(79);
                proptest::prop_assert!(model[at as usize..end as usize].iter().all(|byte| *byte == inside));
                proptest::prop_assert_eq!(ranges.meets(at..at + 1), inside);
            }
            let count = model.iter().filter(|inside| **inside).count() as u64;
            proptest::prop_assert_eq!(ranges.len(), count);
            proptest::prop_assert_eq!(ranges.missing_in(0..80), 80 - count);
        }
    }
}
