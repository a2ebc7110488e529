//! Which files of a job's list have ended, stored as ranges: millions behind a slow file are a single range. Knows numbers only.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A set of numbers as ranges: start (included) to end (excluded).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<Written>", into = "Vec<(u64, u64)>")]
pub(crate) struct NumberRanges(BTreeMap<u64, u64>);

/// Older records list single numbers.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    One(u64),
    Range(u64, u64),
}

impl From<Vec<Written>> for NumberRanges {
    fn from(written: Vec<Written>) -> NumberRanges {
        let mut numbers = NumberRanges::default();
        for one in written {
            match one {
                Written::One(number) => numbers.add(number),
                Written::Range(start, end) => numbers.insert_range(start, end),
            }
        }
        numbers
    }
}

impl From<NumberRanges> for Vec<(u64, u64)> {
    fn from(numbers: NumberRanges) -> Self {
        numbers.0.into_iter().collect()
    }
}

impl NumberRanges {
    /// Adds `start..end`, none of which is present.
    fn insert_range(&mut self, mut start: u64, mut end: u64) {
        if start >= end {
            return;
        }
        if let Some((before, _)) = self.0.range(..start).next_back().filter(|(_, until)| **until == start) {
            start = *before;
        }
        if let Some(until) = self.0.remove(&end) {
            end = until;
        }
        self.0.insert(start, end);
    }

    pub(crate) fn add(&mut self, number: u64) {
        if !self.has(number) {
            self.insert_range(number, number.saturating_add(1));
        }
    }

    pub(crate) fn has(&self, number: u64) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, end)| number < *end)
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).fold(0, u64::saturating_add)
    }

    pub(crate) fn range_count(&self) -> usize {
        self.0.len()
    }
}

/// The finished files of a list: all before a number, and some beyond.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CompletedRanges {
    before: u64,
    beyond: NumberRanges,
}

impl CompletedRanges {
    pub(crate) fn up_to(before: u64) -> CompletedRanges {
        CompletedRanges { before, beyond: NumberRanges::default() }
    }

    pub(crate) fn count(&self) -> u64 {
        self.before.saturating_add(self.beyond.count())
    }

    pub(crate) fn add(&mut self, number: u64) {
        self.beyond.add(number);
        if let Some(end) = self.beyond.0.remove(&self.before) {
            self.before = end;
        }
    }

    pub(crate) fn has(&self, number: u64) -> bool {
        number < self.before || self.beyond.has(number)
    }

    /// Number of ranges beyond the first.
    pub(crate) fn range_count(&self) -> usize {
        self.beyond.range_count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    proptest! {
        #[test]
        fn it_has_what_was_added_and_is_read_back_so(numbers in proptest::collection::vec(0u64..60, 0..90)) {
            let (mut tally, mut set) = (CompletedRanges::default(), BTreeSet::new());
            for number in numbers {
                // A file ends once.
                if set.insert(number) {
                    tally.add(number);
                }
            }
            let read: CompletedRanges = serde_json::from_str(&serde_json::to_string(&tally).unwrap()).unwrap();
            prop_assert_eq!(&read, &tally);
            prop_assert_eq!(tally.count(), set.len() as u64);
            prop_assert!((0..70).all(|number| tally.has(number) == set.contains(&number)));
            let gaps = (0..60).filter(|n| set.contains(n) && !set.contains(&(n + 1))).count();
            prop_assert!(tally.range_count() <= gaps);
        }
    }

    #[test]
    fn millions_behind_one_that_is_slow_are_one_range_and_records_of_before_are_read() {
        let mut tally = CompletedRanges::up_to(3);
        (4..100_000).for_each(|number| tally.add(number));
        assert_eq!((tally.count(), tally.range_count()), (3 + 99_996, 1));
        assert_eq!(serde_json::to_string(&tally).unwrap(), r#"{"before":3,"beyond":[[4,100000]]}"#);
        tally.add(3);
        assert_eq!((&tally, tally.range_count()), (&CompletedRanges::up_to(100_000), 0));
        let old: CompletedRanges =
            serde_json::from_str(r#"{"before":3,"beyond":[4,5,7,18446744073709551615]}"#).unwrap();
        assert!(old.has(2) && !old.has(3) && old.has(5) && !old.has(6) && old.has(7) && !old.has(8));
        assert_eq!((old.count(), old.range_count()), (6, 2));
        // Invalid ranges are ignored.
        let odd: CompletedRanges = serde_json::from_str(r#"{"before":1,"beyond":[[9,9],[8,2],[5,6]]}"#).unwrap();
        assert_eq!((odd.count(), odd.has(5)), (2, true));
    }
}
