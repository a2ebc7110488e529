//! The numbers of a session's changes, and which of them are answered. It knows no request.
//!
//! A session that outlives this process keeps answered numbers a while: a process that ends between an answer and its own reply
//! leaves the change to the next process, which sends the change again under the same number.

use super::MaybeExecuted;
use parking_lot::Mutex;
use spurline_volume::kept_client::{KeptClient, SentChange};
use spurline_volume::writes::FileIdentity;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Numbers that a process reserves at once.
const NUMBERS_RESERVED: u64 = 1 << 16;
/// Answered numbers of a session that outlives its process, which nodes still know the answers to: fewer than a node keeps.
const ANSWERED_KEPT: usize = 1024;

pub(crate) struct ChangeNumbers {
    state: Mutex<NumbersState>,
    kept: Option<Arc<dyn KeptClient>>,
}

struct NumbersState {
    last: u64,
    /// The last number that this process may use.
    reserved: u64,
    /// The numbers whose answers nodes have to know.
    open: BTreeSet<u64>,
    /// Those that were answered, the oldest first.
    answered: VecDeque<u64>,
}

/// The number of a change; dropping it says that its answer arrived.
pub(crate) struct ChangeNumber<'a> {
    numbers: &'a ChangeNumbers,
    number: u64,
    before: MaybeExecuted,
    known: [Option<FileIdentity>; 2],
}

impl ChangeNumbers {
    /// With `kept`, these are the numbers of a session that outlives this process.
    pub fn new(kept: Option<Arc<dyn KeptClient>>) -> ChangeNumbers {
        let last = kept.as_ref().map_or(0, |kept| kept.reserve_numbers(NUMBERS_RESERVED));
        let reserved = if kept.is_some() { last + NUMBERS_RESERVED } else { u64::MAX };
        let state = NumbersState { last, reserved, open: BTreeSet::new(), answered: VecDeque::new() };
        ChangeNumbers { state: Mutex::new(state), kept }
    }

    /// The next number. Numbers begin at 1.
    pub fn draw_number(&self) -> ChangeNumber<'_> {
        self.draw_for_names([None; 2])
    }

    /// As [`ChangeNumbers::draw_number`], for a change of names that lead to these objects.
    pub fn draw_for_names(&self, known: [Option<FileIdentity>; 2]) -> ChangeNumber<'_> {
        ChangeNumber { numbers: self, number: self.draw_raw(), before: MaybeExecuted::Nowhere, known }
    }

    /// The next number, until [`ChangeNumbers::end_number`].
    pub fn draw_raw(&self) -> u64 {
        let mut state = self.state.lock();
        if state.last == state.reserved
            && let Some(kept) = &self.kept
        {
            state.last = kept.reserve_numbers(NUMBERS_RESERVED);
            state.reserved = state.last + NUMBERS_RESERVED;
        }
        state.last += 1;
        let number = state.last;
        state.open.insert(number);
        number
    }

    /// The number of a change that a process before has sent.
    pub fn take_up(&self, sent: &SentChange) -> ChangeNumber<'_> {
        let SentChange { number, process, known, .. } = *sent;
        ChangeNumber { numbers: self, number, before: MaybeExecuted::of_kept(process), known }
    }

    /// The answer to a change arrived, or it is abandoned.
    pub fn end_number(&self, number: u64) {
        let mut state = self.state.lock();
        if !state.open.contains(&number) {
            // Of a process before: the nodes keep the answer.
            return;
        }
        if self.kept.is_none() {
            state.open.remove(&number);
            return;
        }
        state.answered.push_back(number);
        if state.answered.len() > ANSWERED_KEPT
            && let Some(oldest) = state.answered.pop_front()
        {
            state.open.remove(&oldest);
        }
    }

    /// The number that the next change gets.
    pub fn upcoming(&self) -> u64 {
        self.state.lock().last + 1
    }

    pub fn answered_below(&self) -> u64 {
        let state = self.state.lock();
        state.open.first().copied().unwrap_or(state.last + 1)
    }
}

impl ChangeNumber<'_> {
    pub fn get(&self) -> u64 {
        self.number
    }

    /// The processes that may have executed the change.
    pub fn before(&self) -> MaybeExecuted {
        self.before
    }

    /// The objects that the names of the change led to when it was sent first.
    pub fn known(&self) -> [Option<FileIdentity>; 2] {
        self.known
    }

    pub fn to_kept(&self) -> SentChange {
        SentChange { number: self.number, process: self.before.to_kept(), place: 0, known: self.known }
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
        let numbers = ChangeNumbers::new(None);
        assert_eq!(numbers.answered_below(), 1);
        let (first, second) = (numbers.draw_number(), numbers.draw_number());
        assert_eq!((first.get(), second.get(), numbers.answered_below()), (1, 2, 1));
        drop(second);
        assert_eq!(numbers.answered_below(), 1);
        drop(first);
        assert_eq!(numbers.answered_below(), 3);
    }

    #[derive(Default)]
    struct Reserved(std::sync::atomic::AtomicU64);

    impl KeptClient for Reserved {
        fn begin(&self, _session: u64) -> spurline_volume::kept_client::ClientStart {
            unreachable!("only numbers are kept here")
        }

        fn reserve_numbers(&self, count: u64) -> u64 {
            self.0.fetch_add(count, std::sync::atomic::Ordering::Relaxed)
        }

        fn take_repeated(&self) -> Option<SentChange> {
            None
        }

        fn note_sending(&self, _change: &SentChange) {}

        fn note_held(&self, _record: u32, _held: &spurline_volume::kept_client::HeldFile) {}

        fn note_sent(&self, _number: u64, _process: u64) {}
    }

    #[test]
    fn the_next_process_draws_higher_numbers_and_nodes_keep_answers_for_it() {
        let kept = Arc::new(Reserved::default());
        let numbers = ChangeNumbers::new(Some(Arc::clone(&kept) as _));
        let last = (0..=NUMBERS_RESERVED).map(|_| numbers.draw_number().get()).last();
        assert_eq!(last, Some(NUMBERS_RESERVED + 1));
        assert_eq!(numbers.answered_below(), NUMBERS_RESERVED + 2 - ANSWERED_KEPT as u64);
        let next = ChangeNumbers::new(Some(kept));
        let known = [Some(FileIdentity::from_number(9)), None];
        let taken = next.take_up(&SentChange { number: 7, process: 3, known, ..SentChange::default() });
        assert_eq!((taken.before(), taken.known()), (MaybeExecuted::At(3), known));
        assert!((0..2 * ANSWERED_KEPT).all(|_| next.draw_number().get() > 2 * NUMBERS_RESERVED));
        let answered_below = next.answered_below();
        assert!(answered_below > 2 * NUMBERS_RESERVED);
        drop(taken);
        assert_eq!(next.answered_below(), answered_below);
    }
}
