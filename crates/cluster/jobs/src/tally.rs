//! Which files of a job's list have ended. Nearly all of them stand side by side, so they are kept as ranges: millions
//! behind one slow file are one. It knows numbers only.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Numbers, as ranges: the first of each, and the one behind its last.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<Written>", into = "Vec<(u64, u64)>")]
pub(crate) struct Numbers(BTreeMap<u64, u64>);

/// Records of before had each number by itself.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    One(u64),
    Range(u64, u64),
}

impl From<Vec<Written>> for Numbers {
    fn from(written: Vec<Written>) -> Numbers {
        let mut numbers = Numbers::default();
        for one in written {
            match one {
                Written::One(number) => numbers.add(number),
                Written::Range(start, end) => numbers.put(start, end),
            }
        }
        numbers
    }
}

impl From<Numbers> for Vec<(u64, u64)> {
    fn from(numbers: Numbers) -> Self {
        numbers.0.into_iter().collect()
    }
}

impl Numbers {
    /// Adds those from `start` to before `end`, of which it has none.
    fn put(&mut self, mut start: u64, mut end: u64) {
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
            self.put(number, number.saturating_add(1));
        }
    }

    pub(crate) fn has(&self, number: u64) -> bool {
        self.0.range(..=number).next_back().is_some_and(|(_, end)| number < *end)
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).fold(0, u64::saturating_add)
    }

    /// How many ranges they are.
    pub(crate) fn ranges(&self) -> usize {
        self.0.len()
    }
}

/// Which files of the list are done: all before one, and some after it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tally {
    before: u64,
    beyond: Numbers,
}

impl Tally {
    pub(crate) fn up_to(before: u64) -> Tally {
        Tally { before, beyond: Numbers::default() }
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

    /// How many ranges it is beside the first.
    pub(crate) fn ranges(&self) -> usize {
        self.beyond.ranges()
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
            let (mut tally, mut set) = (Tally::default(), BTreeSet::new());
            for number in numbers {
                // A file ends once.
                if set.insert(number) {
                    tally.add(number);
                }
            }
            let read: Tally = serde_json::from_str(&serde_json::to_string(&tally).unwrap()).unwrap();
            prop_assert_eq!(&read, &tally);
            prop_assert_eq!(tally.count(), set.len() as u64);
            prop_assert!((0..70).all(|number| tally.has(number) == set.contains(&number)));
            let gaps = (0..60).filter(|n| set.contains(n) && !set.contains(&(n + 1))).count();
            prop_assert!(tally.ranges() <= gaps);
        }
    }

    #[test]
    fn millions_behind_one_that_is_slow_are_one_range_and_records_of_before_are_read() {
        let mut tally = Tally::up_to(3);
        (4..100_000).for_each(|number| tally.add(number));
        assert_eq!((tally.count(), tally.ranges()), (3 + 99_996, 1));
        assert_eq!(serde_json::to_string(&tally).unwrap(), r#"{"before":3,"beyond":[[4,100000]]}"#);
        tally.add(3);
        assert_eq!((&tally, tally.ranges()), (&Tally::up_to(100_000), 0));
        let old: Tally = serde_json::from_str(r#"{"before":3,"beyond":[4,5,7,18446744073709551615]}"#).unwrap();
        assert!(old.has(2) && !old.has(3) && old.has(5) && !old.has(6) && old.has(7) && !old.has(8));
        assert_eq!((old.count(), old.ranges()), (6, 2));
        // What makes no sense is no range.
        let odd: Tally = serde_json::from_str(r#"{"before":1,"beyond":[[9,9],[8,2],[5,6]]}"#).unwrap();
        assert_eq!((odd.count(), odd.has(5)), (2, true));
    }
}
