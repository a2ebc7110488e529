//! Loads of files and folders into the cache: a job that runs on a separate thread. Knows no reads.

use crate::client::{interruptible, no_thread};
use crate::failure::CallFailure;
use parking_lot::{Condvar, Mutex};
use pyo3::prelude::*;
use rustix::io::Errno;
use spurline_jobs::{JobRun, JobSpec, JobTarget, run_job};
use std::sync::Arc;
use std::time::Duration;

/// A load under way, or ended.
#[pyclass(frozen, module = "spurline._native")]
pub(crate) struct LoadJob {
    run: Arc<JobRun>,
    ended: Arc<LoadEnd>,
}

#[derive(Default)]
struct LoadEnd {
    is_over: Mutex<bool>,
    changed: Condvar,
}

impl LoadEnd {
    fn wait(&self, limit: Duration) -> bool {
        let mut is_over = self.is_over.lock();
        self.changed.wait_while_for(&mut is_over, |is_over| !*is_over, limit);
        *is_over
    }
}

impl LoadJob {
    /// Starts the load.
    ///
    /// # Errors
    /// `EAGAIN` without a thread; `EIO` without a folder for the list of files.
    pub fn start(spec: JobSpec, target: Arc<dyn JobTarget>) -> Result<LoadJob, CallFailure> {
        let folder =
            tempfile::tempdir().map_err(|error| CallFailure::new(Errno::IO, format!("the list of files: {error}")))?;
        let job = LoadJob { run: JobRun::new(), ended: Arc::default() };
        let run = Arc::clone(&job.run);
        let ended = Arc::clone(&job.ended);
        let spawned = std::thread::Builder::new().name("spurline-load".into()).spawn(move || {
            run_job(&*target, &spec, &run, &folder.path().join("files"), &mut |_| {});
            drop(target);
            *ended.is_over.lock() = true;
            ended.changed.notify_all();
        });
        spawned.map_err(no_thread)?;
        Ok(job)
    }

    /// The job, for the end of its client.
    pub fn run(&self) -> Arc<JobRun> {
        Arc::clone(&self.run)
    }
}

#[pymethods]
impl LoadJob {
    /// The progress, as JSON.
    fn progress(&self) -> PyResult<String> {
        let text = serde_json::to_string(&self.run.progress());
        text.map_err(|error| CallFailure::new(Errno::IO, error.to_string()).into())
    }

    /// Waits for `seconds` at most, and until the end without a number; whether the load has ended.
    #[pyo3(signature = (seconds=None))]
    fn wait(&self, py: Python<'_>, seconds: Option<f64>) -> PyResult<bool> {
        match seconds {
            None => interruptible(py, |limit| self.ended.wait(limit)).map(|()| true),
            Some(seconds) => {
                let limit = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::ZERO);
                let is_over = py.detach(|| self.ended.wait(limit));
                py.check_signals()?;
                Ok(is_over)
            }
        }
    }

    /// Stops after the requests under way.
    fn stop(&self) {
        self.run.stop();
    }
}
