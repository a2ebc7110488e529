//! Lanes for transfers: each a small runtime with connections of its own, driven by the thread that reads.
//! It deliberately knows no request.
//!
//! On one shared runtime every piece of a transfer hops from a network thread to the reading thread and a wish for the
//! next one hops back. In a lane the reading thread receives by itself: measured with 4 MiB ranges that is the
//! difference between 0.8 and 0.95 of what a client gets that throws the bytes away.

use crate::backend::Backend;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// Lanes at most, in use and idle: each costs four descriptors. Further reads use the shared runtime.
const LANES: usize = 48;
/// A lane that nobody used for so long is dropped.
pub(crate) const IDLE: Duration = Duration::from_secs(60);

/// A runtime for one thread at a time and the backend whose connections live on it.
struct Lane {
    runtime: Runtime,
    backend: Box<dyn Backend>,
}

#[derive(Default)]
struct State {
    /// Since when, the one used last at the end.
    idle: Vec<(Instant, Lane)>,
    made: usize,
}

/// The lanes of one bucket.
#[derive(Default)]
pub(crate) struct Lanes {
    state: Mutex<State>,
}

/// A lane taken out; it goes back only when its transfer went well, so that a broken one's connections are closed.
pub(crate) struct Taken<'a> {
    lanes: &'a Lanes,
    lane: Option<Lane>,
}

impl Lanes {
    /// The lane used last, a new one, or `None` when there are enough or `origin` can't be had twice.
    pub(crate) fn take(&self, origin: &dyn Backend) -> Option<Taken<'_>> {
        {
            let mut state = self.state.lock();
            if let Some((_, lane)) = state.idle.pop() {
                return Some(Taken { lanes: self, lane: Some(lane) });
            }
            if state.made >= LANES {
                return None;
            }
            state.made += 1;
        }
        let mut taken = Taken { lanes: self, lane: None };
        let backend = origin.twin()?;
        // The driver is asked at every turn, so that a connection its server has closed is seen before it is used.
        let runtime = Builder::new_current_thread().enable_all().event_interval(1).build().ok()?;
        taken.lane = Some(Lane { runtime, backend });
        Some(taken)
    }

    /// Drops the lanes that nobody used for as long as `age`.
    pub(crate) fn drop_idle(&self, age: Duration) {
        let mut state = self.state.lock();
        let old = state.idle.iter().take_while(|(since, _)| since.elapsed() >= age).count();
        state.made -= old;
        let old: Vec<_> = state.idle.drain(..old).collect();
        drop(state);
        old.into_iter().for_each(|(_, lane)| lane.runtime.shutdown_background());
    }
}

impl Taken<'_> {
    /// Runs `work` with the lane's backend on this thread.
    pub(crate) fn run<T>(&self, work: impl AsyncFnOnce(&dyn Backend) -> T) -> Option<T> {
        let lane = self.lane.as_ref()?;
        Some(lane.runtime.block_on(async {
            // Nobody has driven the lane's connections since it was used: let them see what has happened.
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
            work(&*lane.backend).await
        }))
    }

    /// Puts the lane back for the next reader.
    pub(crate) fn keep(mut self) {
        if let Some(lane) = self.lane.take() {
            self.lanes.state.lock().idle.push((Instant::now(), lane));
        }
        std::mem::forget(self);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.lanes.state.lock().made -= 1;
        if let Some(lane) = self.lane.take() {
            lane.runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{Failure, RawBody, RawObject, RawPage};
    use futures::future::BoxFuture;

    /// Can be had any number of times, and is asked nothing.
    struct Mute;

    impl Backend for Mute {
        fn describe(&self) -> String {
            String::new()
        }
        fn twin(&self) -> Option<Box<dyn Backend>> {
            Some(Box::new(Mute))
        }
        fn list<'a>(&'a self, _: &'a str, _: Option<&'a str>, _: usize) -> BoxFuture<'a, Result<RawPage, Failure>> {
            unreachable!("nothing is asked")
        }
        fn head<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<RawObject, Failure>> {
            unreachable!("nothing is asked")
        }
        fn get<'a>(
            &'a self,
            _: &'a str,
            _: u64,
            _: u64,
            _: Option<&'a str>,
        ) -> BoxFuture<'a, Result<RawBody, Failure>> {
            unreachable!("nothing is asked")
        }
    }

    #[test]
    fn lanes_that_nobody_uses_are_dropped_and_others_made_when_there_are_readers_again() {
        let lanes = Lanes::default();
        let counts = || {
            let state = lanes.state.lock();
            (state.idle.len(), state.made)
        };
        for _ in 0..2 {
            let all: Vec<_> = (0..LANES).map(|_| lanes.take(&Mute).unwrap()).collect();
            assert!(lanes.take(&Mute).is_none());
            all.into_iter().for_each(Taken::keep);
            let used = lanes.take(&Mute).unwrap();
            lanes.drop_idle(IDLE);
            assert_eq!(counts(), (LANES - 1, LANES));
            lanes.drop_idle(Duration::ZERO);
            assert_eq!(counts(), (0, 1), "the one in use is kept");
            used.keep();
            assert_eq!(counts(), (1, 1));
        }
    }
}
