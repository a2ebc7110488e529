//! Ends of uploads: a store may take minutes to make an object of parts. A thread waits for the store, and the mount asks for the
//! answer again and again, which shows to the mount that the node lives and that the store makes progress. Knows no request.

use parking_lot::{Condvar, Mutex};
use spurline_object_store::{AnswerProgress, RequestFailure};
use spurline_proto::StoreAnswer;
use spurline_types::ErrorKind;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The mount gets an answer after this time, although the store has not answered.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(2);

type StoreOutcome = Result<StoreAnswer, RequestFailure>;

/// The end of an upload.
#[derive(Default)]
struct Assembly {
    progress: AnswerProgress,
    outcome: Mutex<Option<StoreOutcome>>,
    ended: Condvar,
}

impl Assembly {
    fn end(&self, outcome: StoreOutcome) {
        *self.outcome.lock() = Some(outcome);
        self.ended.notify_all();
    }
}

/// An end of an upload, and when the mount has asked for the answer.
struct AwaitedAssembly {
    assembly: Arc<Assembly>,
    asked: Instant,
}

/// The ends of uploads that stores work on, by the numbers of the transfers.
#[derive(Default)]
pub struct Assemblies(Mutex<HashMap<u64, AwaitedAssembly>>);

impl Assemblies {
    /// Sends the end of an upload on a thread, and waits for the store, as [`Self::wait_outcome`].
    pub fn begin(
        &self,
        transfer: u64,
        send: impl FnOnce(&AnswerProgress) -> StoreOutcome + Send + 'static,
    ) -> StoreOutcome {
        let assembly = Arc::<Assembly>::default();
        let awaited = AwaitedAssembly { assembly: Arc::clone(&assembly), asked: Instant::now() };
        self.0.lock().insert(transfer, awaited);
        let started = std::thread::Builder::new()
            .name("upload-end".to_owned())
            .spawn(move || assembly.end(send(&assembly.progress)));
        if let Err(error) = started {
            self.0.lock().remove(&transfer);
            let why = format!("the node can't start a thread for the end of an upload: {error}");
            return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
        }
        self.wait_outcome(transfer)
    }

    /// The store's answer; without an answer soon, that the store works.
    pub fn wait_outcome(&self, transfer: u64) -> StoreOutcome {
        let now = Instant::now();
        let found = self.0.lock().get_mut(&transfer).map(|awaited| {
            awaited.asked = now;
            Arc::clone(&awaited.assembly)
        });
        let Some(assembly) = found else {
            let why =
                "the node does not know the end of this upload: it was started again, or the mount asked too late";
            return Err(RequestFailure::transient(ErrorKind::Unavailable, why.to_owned()));
        };
        let mut outcome = assembly.outcome.lock();
        while outcome.is_none() && !assembly.ended.wait_until(&mut outcome, now + PROGRESS_INTERVAL).timed_out() {}
        match outcome.take() {
            Some(outcome) => {
                self.0.lock().remove(&transfer);
                outcome
            }
            None => {
                let quiet = assembly.progress.last_bytes().map(|at| at.elapsed());
                Ok(StoreAnswer::Working(quiet.map(|quiet| quiet.as_millis() as u64)))
            }
        }
    }

    /// Forgets the ends of uploads whose mounts have not asked for `idle`: these mounts have given up, or have ended.
    pub fn drop_idle(&self, now: Instant, idle: Duration) {
        self.0.lock().retain(|_, awaited| now.saturating_duration_since(awaited.asked) < idle);
    }
}
