//! Transfer runtimes: each a small runtime with connections of its own, driven by the reading thread. They
//! deliberately know no request.
//!
//! On one shared runtime, each piece of a transfer passes from a network thread to the reading thread, and the
//! request for the next one passes back. With a transfer runtime the reading thread receives by itself. Measured with
//! 4 MiB ranges, this raises throughput from 0.8 to 0.95 of a client that discards the bytes.

use crate::backend::ObjectBackend;
use parking_lot::Mutex;
use std::time::{Duration, Instant};
use tokio::runtime::{Builder, Runtime};

/// Most runtimes, in use and idle: each costs four descriptors. Further reads use the shared runtime.
const MAX_RUNTIMES: usize = 48;
/// A runtime that is idle for this long is dropped.
pub(crate) const IDLE: Duration = Duration::from_secs(60);

/// A runtime for one thread at a time, and the backend with its connections on it.
struct TransferRuntime {
    runtime: Runtime,
    backend: Box<dyn ObjectBackend>,
}

#[derive(Default)]
struct RuntimeSlots {
    /// Idle runtimes with the start of their idle time; the most recently used is last.
    idle: Vec<(Instant, TransferRuntime)>,
    made: usize,
}

/// The transfer runtimes of one bucket.
#[derive(Default)]
pub(crate) struct TransferRuntimes {
    state: Mutex<RuntimeSlots>,
}

/// A runtime taken out of the set. It returns there only after a successful transfer, so that broken connections are
/// closed.
pub(crate) struct BorrowedRuntime<'a> {
    runtimes: &'a TransferRuntimes,
    runtime: Option<TransferRuntime>,
}

impl TransferRuntimes {
    /// The most recently used runtime, or a new one. `None` at the limit, or when `origin` can't be duplicated.
    pub(crate) fn take_runtime(&self, origin: &dyn ObjectBackend) -> Option<BorrowedRuntime<'_>> {
        {
            let mut state = self.state.lock();
            if let Some((_, runtime)) = state.idle.pop() {
                return Some(BorrowedRuntime { runtimes: self, runtime: Some(runtime) });
            }
            if state.made >= MAX_RUNTIMES {
                return None;
            }
            state.made += 1;
        }
        let mut taken = BorrowedRuntime { runtimes: self, runtime: None };
        let backend = origin.try_clone()?;
        // The driver is polled at every turn, so that a connection closed by its server is noticed before it is used.
        let runtime = Builder::new_current_thread().enable_all().event_interval(1).build().ok()?;
        taken.runtime = Some(TransferRuntime { runtime, backend });
        Some(taken)
    }

    /// Drops the runtimes that were idle for `age`.
    pub(crate) fn drop_idle(&self, age: Duration) {
        let mut state = self.state.lock();
        let old = state.idle.iter().take_while(|(since, _)| since.elapsed() >= age).count();
        state.made -= old;
        let old: Vec<_> = state.idle.drain(..old).collect();
        drop(state);
        old.into_iter().for_each(|(_, runtime)| runtime.runtime.shutdown_background());
    }
}

impl BorrowedRuntime<'_> {
    /// Runs `work` with the runtime's backend on this thread.
    pub(crate) fn run_transfer<T>(&self, work: impl AsyncFnOnce(&dyn ObjectBackend) -> T) -> Option<T> {
        let runtime = self.runtime.as_ref()?;
        Some(runtime.runtime.block_on(async {
            // The connections were not driven since the last use: let them process pending events.
            tokio::task::yield_now().await;
            tokio::task::yield_now().await;
            work(&*runtime.backend).await
        }))
    }

    /// Returns the runtime to the set.
    pub(crate) fn put_back(mut self) {
        if let Some(runtime) = self.runtime.take() {
            self.runtimes.state.lock().idle.push((Instant::now(), runtime));
        }
        std::mem::forget(self);
    }
}

impl Drop for BorrowedRuntime<'_> {
    fn drop(&mut self) {
        self.runtimes.state.lock().made -= 1;
        if let Some(runtime) = self.runtime.take() {
            runtime.runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::{RawBody, RawObject, RawPage, RequestFailure};
    use futures::future::BoxFuture;

    /// Can be duplicated without limit and receives no request.
    struct Mute;

    impl ObjectBackend for Mute {
        fn describe(&self) -> String {
            String::new()
        }
        fn try_clone(&self) -> Option<Box<dyn ObjectBackend>> {
            Some(Box::new(Mute))
        }
        fn list<'a>(
            &'a self,
            _: &'a str,
            _: Option<&'a str>,
            _: usize,
        ) -> BoxFuture<'a, Result<RawPage, RequestFailure>> {
            unreachable!("no request is sent")
        }
        fn head<'a>(&'a self, _: &'a str) -> BoxFuture<'a, Result<RawObject, RequestFailure>> {
            unreachable!("no request is sent")
        }
        fn get<'a>(
            &'a self,
            _: &'a str,
            _: u64,
            _: u64,
            _: Option<&'a str>,
        ) -> BoxFuture<'a, Result<RawBody, RequestFailure>> {
            unreachable!("no request is sent")
        }
    }

    #[test]
    fn lanes_that_nobody_uses_are_dropped_and_others_made_when_there_are_readers_again() {
        let runtimes = TransferRuntimes::default();
        let counts = || {
            let state = runtimes.state.lock();
            (state.idle.len(), state.made)
        };
        for _ in 0..2 {
            let all: Vec<_> = (0..MAX_RUNTIMES).map(|_| runtimes.take_runtime(&Mute).unwrap()).collect();
            assert!(runtimes.take_runtime(&Mute).is_none());
            all.into_iter().for_each(BorrowedRuntime::put_back);
            let used = runtimes.take_runtime(&Mute).unwrap();
            runtimes.drop_idle(IDLE);
            assert_eq!(counts(), (MAX_RUNTIMES - 1, MAX_RUNTIMES));
            runtimes.drop_idle(Duration::ZERO);
            assert_eq!(counts(), (0, 1), "the one in use is kept");
            used.put_back();
            assert_eq!(counts(), (1, 1));
        }
    }
}
