//! Selects how each call fails: scripted faults first, then a seeded draw. Knows no channels.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Duration;

/// How a call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SimFault {
    /// The connection ends before the request is sent.
    Drop,
    /// The request is served, and the connection ends within the answer.
    Cut,
    /// The answer is no frame.
    Garbage,
    /// No answer until the deadline.
    Stall,
    /// The answer arrives, and again before the next answer: answers out of order.
    Twice,
    /// The answer arrives this much later.
    Delay(Duration),
}

/// Fault rates, each per 1000 calls.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FaultRates {
    /// [`SimFault::Drop`].
    pub drop: u32,
    /// [`SimFault::Cut`].
    pub cut: u32,
    /// [`SimFault::Garbage`].
    pub garbage: u32,
    /// [`SimFault::Stall`].
    pub stall: u32,
    /// [`SimFault::Twice`].
    pub twice: u32,
    /// [`SimFault::Delay`] by up to `max_delay`.
    pub delay: u32,
    /// The longest delay.
    pub max_delay: Duration,
}

/// Decides the fate of every call, reproducibly for the same seed and order of calls.
#[derive(Debug)]
pub struct FaultPlan {
    state: Mutex<(u64, FaultRates, VecDeque<SimFault>)>,
}

impl FaultPlan {
    /// A plan that draws from `seed` at `rates`.
    pub fn new(seed: u64, rates: FaultRates) -> Self {
        // Spreads small seeds evenly, and avoids 0, where xorshift stays.
        FaultPlan { state: Mutex::new((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, rates, VecDeque::new())) }
    }

    /// Changes the rates from now on.
    pub fn set_rates(&self, rates: FaultRates) {
        self.state.lock().1 = rates;
    }

    /// Scripts a fault for the next call that has none.
    pub fn inject_fault(&self, fault: SimFault) {
        self.state.lock().2.push_back(fault);
    }

    /// The fault of this call.
    pub fn draw_fault(&self) -> Option<SimFault> {
        let mut state = self.state.lock();
        if let Some(fault) = state.2.pop_front() {
            return Some(fault);
        }
        let rates = state.1;
        let mut dice = (next_random(&mut state.0) % 1000) as u32;
        let delay = rates.max_delay.mul_f64((next_random(&mut state.0) % 1000) as f64 / 1000.0);
        for (rate, fault) in [
            (rates.drop, SimFault::Drop),
            (rates.cut, SimFault::Cut),
            (rates.garbage, SimFault::Garbage),
            (rates.stall, SimFault::Stall),
            (rates.twice, SimFault::Twice),
            (rates.delay, SimFault::Delay(delay)),
        ] {
            if dice < rate {
                return Some(fault);
            }
            dice -= rate;
        }
        None
    }

    /// A number below `below` (at least 1).
    pub(crate) fn draw_below(&self, below: usize) -> usize {
        (next_random(&mut self.state.lock().0) % below.max(1) as u64) as usize
    }
}

/// xorshift64.
fn next_random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_draws_the_same() {
        let rates = FaultRates { drop: 100, cut: 100, stall: 50, ..FaultRates::default() };
        let draws = |seed| {
            let plan = FaultPlan::new(seed, rates);
            (0..500).map(|_| plan.draw_fault()).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        let faults = draws(3).iter().flatten().count();
        assert!((60..200).contains(&faults), "{faults} of 500 at 250 in 1000");
        let plan = FaultPlan::new(1, FaultRates::default());
        plan.inject_fault(SimFault::Stall);
        assert_eq!((plan.draw_fault(), plan.draw_fault()), (Some(SimFault::Stall), None));
    }
}
