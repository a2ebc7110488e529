//! The numbers of a session's changes, and which of them are answered. It knows no request.

use parking_lot::Mutex;
use std::collections::BTreeSet;

/// Numbers of changes.
#[derive(Default)]
pub(crate) struct ChangeNumbers {
    state: Mutex<(u64, BTreeSet<u64>)>,
}

/// The number of a change; dropping it says that its answer arrived.
pub(crate) struct ChangeNumber<'a> {
    numbers: &'a ChangeNumbers,
    number: u64,
}

impl ChangeNumbers {
    /// The next number. Numbers begin at 1.
    pub fn draw_number(&self) -> ChangeNumber<'_> {
        ChangeNumber { numbers: self, number: self.draw_raw() }
    }

    /// The next number, until [`ChangeNumbers::end_number`].
    pub fn draw_raw(&self) -> u64 {
        let mut state = self.state.lock();
        state.0 += 1;
        let number = state.0;
        state.1.insert(number);
        number
    }

    /// The answer to a change arrived, or it is abandoned.
    pub fn end_number(&self, number: u64) {
        self.state.lock().1.remove(&number);
    }

    /// The number that the next change gets.
    pub fn upcoming(&self) -> u64 {
        self.state.lock().0 + 1
    }

    /// All changes below this number are answered.
    pub fn answered_below(&self) -> u64 {
        let state = self.state.lock();
        state.1.first().copied().unwrap_or(state.0 + 1)
    }
}

impl ChangeNumber<'_> {
    pub fn get(&self) -> u64 {
        self.number
    }
}

impl Drop for ChangeNumber<'_> {
    fn drop(&mut self) {
        self.numbers.end_number(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_open_number_bounds_the_answered_ones() {
        let numbers = ChangeNumbers::default();
        assert_eq!(numbers.answered_below(), 1);
        let (first, second) = (numbers.draw_number(), numbers.draw_number());
        assert_eq!((first.get(), second.get(), numbers.answered_below()), (1, 2, 1));
        drop(second);
        assert_eq!(numbers.answered_below(), 1);
        drop(first);
        assert_eq!(numbers.answered_below(), 3);
    }
}
