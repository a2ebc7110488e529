//! All jobs of a group: submitted, run one beside the other, stopped, gone on with after a restart.

use crate::keep::{Keep, Kept};
use crate::progress::{Progress, State};
use crate::run::{Run, run};
use crate::{Spec, Target};
use parking_lot::Mutex;
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a job's state is saved while it works.
const SAVE_EVERY: Duration = Duration::from_secs(2);
/// Jobs that ended are remembered, this many at the most.
const REMEMBERED: usize = 1000;

/// Reaches the group that caches a source.
pub type Open = dyn Fn(&str) -> Result<Arc<dyn Target>> + Send + Sync;

struct Job {
    spec: Spec,
    run: Arc<Run>,
    thread: Option<JoinHandle<()>>,
    /// The order of submission.
    number: u64,
}

/// The jobs.
pub struct Board {
    keep: Arc<dyn Keep>,
    spools: PathBuf,
    open: Arc<Open>,
    jobs: Mutex<BTreeMap<String, Job>>,
}

impl Board {
    /// Goes on with the jobs that `keep` has; lists of files lie in the directory `spools`, made when there is a job.
    ///
    /// # Errors
    /// When the jobs can't be read.
    pub fn start(keep: Arc<dyn Keep>, spools: &Path, open: Arc<Open>) -> Result<Arc<Board>> {
        let board = Arc::new(Board { keep, spools: spools.to_owned(), open, jobs: Mutex::default() });
        let mut jobs = board.jobs.lock();
        for (id, kept) in board.keep.load()? {
            let number = jobs.len() as u64;
            let (spec, mut checkpoint) = (kept.spec, kept.checkpoint);
            if checkpoint.progress.state.ended() {
                let run = Run::ended(checkpoint);
                jobs.insert(id, Job { spec, run, thread: None, number });
                continue;
            }
            // Its list may be on another host.
            checkpoint.progress.listed &= board.spool(&id).is_file();
            tracing::info!("job {id} goes on");
            let run = Run::resumed(checkpoint);
            let thread = board.work(&id, spec.clone(), Arc::clone(&run))?;
            jobs.insert(id, Job { spec, run, thread: Some(thread), number });
        }
        drop(jobs);
        Ok(board)
    }

    fn spool(&self, id: &str) -> PathBuf {
        self.spools.join(format!("{id}.files"))
    }

    fn work(&self, id: &str, spec: Spec, run_: Arc<Run>) -> Result<JoinHandle<()>> {
        let spools = &self.spools;
        std::fs::create_dir_all(spools).map_err(|e| Error::io(format_args!("{}", spools.display()), &e))?;
        let (keep, open, spool, id) = (Arc::clone(&self.keep), Arc::clone(&self.open), self.spool(id), id.to_owned());
        let work = move || {
            let mut saved = Instant::now();
            let mut save = |run: &Run| {
                let checkpoint = run.checkpoint();
                if saved.elapsed() < SAVE_EVERY && !checkpoint.progress.state.ended() {
                    return;
                }
                saved = Instant::now();
                if let Err(error) = keep.save(&id, &Kept { spec: spec.clone(), checkpoint }) {
                    tracing::warn!("job {id} could not be saved, and would begin anew after a restart: {error}");
                }
            };
            match open(&spec.source) {
                Ok(target) => run(&*target, &spec, &run_, &spool, &mut save),
                Err(error) => {
                    run_.change(|p| {
                        p.state = State::Failed;
                        p.why = error.to_string();
                    });
                    save(&run_);
                }
            }
            let progress = run_.progress();
            if !run_.suspended() {
                tracing::info!("job {id}: {} {}", progress.state, progress.why);
                let _ = std::fs::remove_file(&spool);
            }
        };
        std::thread::Builder::new().name("job".into()).spawn(work).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Begins a job and says its name. The same job twice is one job; one that ended begins anew.
    ///
    /// # Errors
    /// When the job makes no sense, can't be kept, or the same paths are being worked on in another way.
    pub fn submit(&self, spec: Spec) -> Result<String> {
        spec.filter().map_err(|e| Error::new(ErrorKind::Invalid, e))?;
        let id = spec.id();
        let mut jobs = self.jobs.lock();
        if let Some(job) = jobs.get(&id)
            && !job.run.progress().state.ended()
        {
            if job.spec == spec {
                return Ok(id);
            }
            let why = format!("{id} works on these paths with other options; stop it first, or wait for its end");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        self.keep.save(&id, &Kept::new(spec.clone()))?;
        let number = jobs.values().map(|job| job.number + 1).max().unwrap_or(0);
        let run = Run::new();
        let thread = self.work(&id, spec.clone(), Arc::clone(&run))?;
        jobs.insert(id.clone(), Job { spec, run, thread: Some(thread), number });
        self.forget_oldest(&mut jobs);
        Ok(id)
    }

    fn forget_oldest(&self, jobs: &mut BTreeMap<String, Job>) {
        while jobs.len() > REMEMBERED {
            let ended = jobs.iter().filter(|(_, job)| job.run.progress().state.ended());
            let Some(id) = ended.min_by_key(|(_, job)| job.number).map(|(id, _)| id.clone()) else { return };
            jobs.remove(&id);
            if let Err(error) = self.keep.remove(&id) {
                tracing::warn!("job {id} could not be forgotten: {error}");
            }
        }
    }

    /// A job and how far it is.
    pub fn progress(&self, id: &str) -> Option<(Spec, Progress)> {
        self.jobs.lock().get(id).map(|job| (job.spec.clone(), job.run.progress()))
    }

    /// All jobs, the newest first.
    pub fn list(&self) -> Vec<(String, Spec, Progress)> {
        let jobs = self.jobs.lock();
        let mut all: Vec<_> = jobs.iter().collect();
        all.sort_by_key(|(_, job)| std::cmp::Reverse(job.number));
        all.into_iter().map(|(id, job)| (id.clone(), job.spec.clone(), job.run.progress())).collect()
    }

    /// Ends a job; says whether there was one to end.
    pub fn stop(&self, id: &str) -> bool {
        let jobs = self.jobs.lock();
        let Some(job) = jobs.get(id).filter(|job| !job.run.progress().state.ended()) else { return false };
        job.run.stop();
        true
    }

    /// Ends all jobs, without waiting for what is under way.
    pub fn stop_all(&self) {
        for job in self.jobs.lock().values() {
            job.run.stop();
        }
    }

    /// Ends the threads; jobs under way go on when the board starts again.
    pub fn suspend(&self) {
        let threads: Vec<_> = {
            let mut jobs = self.jobs.lock();
            let under_way = jobs.values_mut().filter(|job| !job.run.progress().state.ended());
            under_way
                .filter_map(|job| {
                    job.run.suspend();
                    job.thread.take().map(|t| (job.spec.clone(), Arc::clone(&job.run), t))
                })
                .collect()
        };
        for (spec, run, thread) in threads {
            let _ = thread.join();
            let mut checkpoint = run.checkpoint();
            // It may have come to its end before it saw that it was to stop.
            if checkpoint.progress.state == State::Stopped {
                checkpoint.progress.state = State::Running;
            }
            if let Err(error) = self.keep.save(&spec.id(), &Kept { spec, checkpoint }) {
                tracing::warn!("a job could not be saved: {error}");
            }
        }
    }
}

/// A job as `--json` and the admin socket show it.
pub fn shown(id: &str, spec: &Spec, progress: &Progress) -> Value {
    let mut shown = serde_json::to_value(progress).unwrap_or_default();
    shown["id"] = json!(id);
    shown["action"] = json!(spec.action);
    shown["source"] = json!(spec.source);
    // A list may name millions.
    shown["paths"] = json!(spec.paths.iter().take(100).collect::<Vec<_>>());
    shown["paths_total"] = json!(spec.paths.len());
    shown["verify"] = json!(spec.verify);
    shown["remaining_seconds"] = json!(progress.remaining(spec.verify));
    shown
}

impl Board {
    /// Answers `{"do": "submit", "spec": …}`, `{"do": "progress", "id": …}`, `{"do": "stop", "id": …}` and
    /// `{"do": "list"}`, which is how jobs are steered from another process.
    ///
    /// # Errors
    /// When the request makes no sense, or names no job.
    pub fn answer(&self, request: &Value) -> Result<Value> {
        let invalid = |why: String| Error::new(ErrorKind::Invalid, why);
        let id = || request["id"].as_str().ok_or_else(|| invalid("which job? 'id' is missing".to_owned()));
        let of = |id: &str| {
            let (spec, progress) = self.progress(id).ok_or_else(|| {
                Error::new(ErrorKind::NotFound, format!("there is no job {id}: nothing was submitted for these paths"))
            })?;
            Ok(shown(id, &spec, &progress))
        };
        match request["do"].as_str() {
            Some("submit") => {
                let spec = serde_json::from_value(request["spec"].clone())
                    .map_err(|e| invalid(format!("this is no job that this version knows: {e}")))?;
                of(&self.submit(spec)?)
            }
            Some("progress") => of(id()?),
            Some("stop") => {
                let id = id()?;
                self.stop(id);
                of(id)
            }
            Some("list") => {
                Ok(self.list().iter().map(|(id, spec, progress)| shown(id, spec, progress)).collect::<Vec<_>>().into())
            }
            other => Err(invalid(format!("jobs are not asked to '{}'", other.unwrap_or("(nothing)")))),
        }
    }
}
