//! Which call fails how: scripted faults first, then a seeded draw. It knows nothing of channels.

use parking_lot::Mutex;
use std::collections::VecDeque;
use std::time::Duration;

/// How one call fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The connection ends before the request is sent.
    Drop,
    /// The request is served, and the connection ends somewhere within the answer.
    Cut,
    /// What comes back is no frame.
    Garbage,
    /// Nothing comes back until the deadline.
    Stall,
    /// The answer comes, and once more in front of the next one: answers out of their order.
    Twice,
    /// The answer comes this much later.
    Delay(Duration),
}

/// How often calls fail, each out of 1000.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rates {
    /// [`Fault::Drop`].
    pub drop: u32,
    /// [`Fault::Cut`].
    pub cut: u32,
    /// [`Fault::Garbage`].
    pub garbage: u32,
    /// [`Fault::Stall`].
    pub stall: u32,
    /// [`Fault::Twice`].
    pub twice: u32,
    /// [`Fault::Delay`] by up to `max_delay`.
    pub delay: u32,
    /// The longest delay.
    pub max_delay: Duration,
}

/// Decides about every call, the same way for the same seed and order of calls.
#[derive(Debug)]
pub struct FaultPlan {
    state: Mutex<(u64, Rates, VecDeque<Fault>)>,
}

impl FaultPlan {
    /// Draws from `seed` at `rates`.
    pub fn new(seed: u64, rates: Rates) -> Self {
        // An even spread also for small seeds, and never 0, where xorshift stays.
        FaultPlan { state: Mutex::new((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, rates, VecDeque::new())) }
    }

    /// Changes how often calls fail from now on.
    pub fn set_rates(&self, rates: Rates) {
        self.state.lock().1 = rates;
    }

    /// The next call without a scripted fault gets this one.
    pub fn inject(&self, fault: Fault) {
        self.state.lock().2.push_back(fault);
    }

    /// What happens to this call.
    pub fn draw(&self) -> Option<Fault> {
        let mut state = self.state.lock();
        if let Some(fault) = state.2.pop_front() {
            return Some(fault);
        }
        let rates = state.1;
        let mut dice = (step(&mut state.0) % 1000) as u32;
        let delay = rates.max_delay.mul_f64((step(&mut state.0) % 1000) as f64 / 1000.0);
        for (rate, fault) in [
            (rates.drop, Fault::Drop),
            (rates.cut, Fault::Cut),
            (rates.garbage, Fault::Garbage),
            (rates.stall, Fault::Stall),
            (rates.twice, Fault::Twice),
            (rates.delay, Fault::Delay(delay)),
        ] {
            if dice < rate {
                return Some(fault);
            }
            dice -= rate;
        }
        None
    }

    /// A number below `below` (1 at least).
    pub(crate) fn below(&self, below: usize) -> usize {
        (step(&mut self.state.lock().0) % below.max(1) as u64) as usize
    }
}

/// xorshift64.
fn step(state: &mut u64) -> u64 {
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
        let rates = Rates { drop: 100, cut: 100, stall: 50, ..Rates::default() };
        let draws = |seed| {
            let plan = FaultPlan::new(seed, rates);
            (0..500).map(|_| plan.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        let faults = draws(3).iter().flatten().count();
        assert!((60..200).contains(&faults), "{faults} of 500 at 250 in 1000");
        let plan = FaultPlan::new(1, Rates::default());
        plan.inject(Fault::Stall);
        assert_eq!((plan.draw(), plan.draw()), (Some(Fault::Stall), None));
    }
}
