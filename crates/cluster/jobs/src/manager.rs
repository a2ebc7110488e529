//! Owns the jobs of a group: submission, parallel runs, stops, and resumption after a restart.

use crate::progress::{JobProgress, JobState};
use crate::records::{JobRecord, JobRecords};
use crate::run::{JobRun, STOPPED, run_job};
use crate::{JobSpec, JobTarget};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, Result, Size};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval of saving a running job's state.
const SAVE_EVERY: Duration = Duration::from_secs(2);
/// Attempts to save the end of a job, and the pause between attempts.
const SAVE_ATTEMPTS: u32 = 5;
const SAVE_RETRY_PAUSE: Duration = Duration::from_secs(1);
/// How long a resumed job waits for the group: after a full restart nodes come back in turn.
const GROUP_BACK: Duration = Duration::from_secs(300);
/// Maximum ended jobs kept.
const MAX_ENDED_JOBS: usize = 1000;

/// Opens the group that caches a source.
pub type OpenTarget = dyn Fn(&str) -> Result<Arc<dyn JobTarget>> + Send + Sync;

struct ManagedJob {
    spec: JobSpec,
    run: Arc<JobRun>,
    thread: Option<JoinHandle<()>>,
    /// Order of submission.
    number: u64,
}

impl ManagedJob {
    /// Whether this process works on the job.
    fn under_way(&self) -> bool {
        !self.run.progress().state.is_ended() && !self.run.is_suspended()
    }
}

fn next_number(jobs: &BTreeMap<String, ManagedJob>) -> u64 {
    jobs.values().map(|job| job.number + 1).max().unwrap_or(0)
}

/// Sums over the jobs of several managers, for the gauges of the same names.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct JobTotals {
    running: u64,
    succeeded: u64,
    failed: u64,
    files_total: u64,
    files_done: u64,
    files_failed: u64,
    bytes_total: u64,
    bytes_done: u64,
}

impl JobTotals {
    /// Sets the gauges.
    pub fn set_gauges(&self, gauges: &spurline_types::stats::Jobs) {
        let JobTotals { running, succeeded, failed, files_total, files_done, files_failed, bytes_total, bytes_done } =
            self;
        gauges.running.set(*running);
        gauges.succeeded.set(*succeeded);
        gauges.failed.set(*failed);
        gauges.files_total.set(*files_total);
        gauges.files_done.set(*files_done);
        gauges.files_failed.set(*files_failed);
        gauges.bytes_total.set(*bytes_total);
        gauges.bytes_done.set(*bytes_done);
    }
}

pub(crate) type NamedJob = (String, JobSpec, JobProgress);

/// Runs the jobs of a process.
pub struct JobManager {
    keep: Arc<dyn JobRecords>,
    /// Directory for file lists that survive a restart.
    spools: Option<PathBuf>,
    open: Arc<OpenTarget>,
    jobs: Mutex<BTreeMap<String, ManagedJob>>,
}

impl JobManager {
    /// Resumes the jobs in `keep`. File lists go to the directory `spools`, created on demand; without a directory, to unnamed
    /// temporary files that end with the jobs.
    ///
    /// # Errors
    /// When the jobs cannot be read.
    pub fn start(keep: Arc<dyn JobRecords>, spools: Option<&Path>, open: Arc<OpenTarget>) -> Result<Arc<JobManager>> {
        let manager = Arc::new(JobManager { keep, spools: spools.map(Path::to_owned), open, jobs: Mutex::default() });
        let mut jobs = manager.jobs.lock();
        for (id, kept) in manager.keep.load_jobs()? {
            let job = manager.resume_job(&id, kept, jobs.len() as u64)?;
            jobs.insert(id, job);
        }
        drop(jobs);
        Ok(manager)
    }

    /// Resumes a job of another process.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn adopt_job(&self, id: &str, kept: JobRecord) -> Result<()> {
        let mut jobs = self.jobs.lock();
        let number = next_number(&jobs);
        let job = self.resume_job(id, kept, number)?;
        jobs.insert(id.to_owned(), job);
        Ok(())
    }

    /// Whether this process works on a job, or is about to save the end.
    pub fn works_on(&self, id: &str) -> bool {
        let jobs = self.jobs.lock();
        let thread = jobs.get(id).and_then(|job| job.thread.as_ref());
        thread.is_some_and(|thread| !thread.is_finished())
    }

    fn resume_job(&self, id: &str, kept: JobRecord, number: u64) -> Result<ManagedJob> {
        let spec = kept.spec;
        let mut checkpoint = kept.checkpoint;
        if checkpoint.progress.state.is_ended() {
            return Ok(ManagedJob { spec, run: JobRun::from_ended(checkpoint), thread: None, number });
        }
        if checkpoint.stopping {
            let checkpoint = checkpoint.stopped();
            let kept = JobRecord { spec: spec.clone(), checkpoint: checkpoint.clone() };
            if let Err(error) = self.keep.save_job(id, &kept) {
                tracing::warn!("job {id} was stopped, but its record cannot be saved: {error}");
            }
            self.remove_lists(id, None);
            tracing::info!("job {id}: {} {}", checkpoint.progress.state, checkpoint.progress.why);
            return Ok(ManagedJob { spec, run: JobRun::from_ended(checkpoint), thread: None, number });
        }
        // The list may be on another host, or have lost the end in a power failure.
        let there =
            self.spool_path(id, checkpoint.list).and_then(|list| std::fs::metadata(list).ok()).map(|list| list.len());
        checkpoint.progress.listed &= there.is_some() && there == checkpoint.list_bytes;
        tracing::info!("job {id} resumes");
        let run = JobRun::resume_from(checkpoint, &spec);
        let thread = self.spawn_job(id, spec.clone(), Arc::clone(&run), GROUP_BACK)?;
        Ok(ManagedJob { spec, run, thread: Some(thread), number })
    }

    /// Path of a list that survives a restart.
    fn spool_path(&self, id: &str, list: u64) -> Option<PathBuf> {
        self.spools.as_ref().map(|dir| dir.join(format!("{id}.{list:016x}.files")))
    }

    /// Path of a list, and the open file if unnamed.
    fn list_place(&self, id: &str, list: u64) -> Result<(PathBuf, Option<File>)> {
        if let (Some(dir), Some(spool)) = (&self.spools, self.spool_path(id, list)) {
            std::fs::create_dir_all(dir).map_err(|e| Error::io(format_args!("{}", dir.display()), &e))?;
            return Ok((spool, None));
        }
        // Names may be confidential: no other user can open or replace an unnamed file.
        let file = tempfile::tempfile().map_err(|e| {
            Error::io(format_args!("a file for the job's list in {}", std::env::temp_dir().display()), &e)
        })?;
        Ok((format!("/proc/self/fd/{}", file.as_raw_fd()).into(), Some(file)))
    }

    /// Removes obsolete lists of this job.
    fn remove_lists(&self, id: &str, used: Option<&Path>) {
        let Some(spools) = &self.spools else { return };
        let of_job = format!("{id}.");
        for entry in std::fs::read_dir(spools).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let is_list = name.to_str().is_some_and(|name| name.starts_with(&of_job) && name.ends_with(".files"));
            if is_list && Some(&*entry.path()) != used {
                // A leftover only costs space.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    fn spawn_job(&self, id: &str, spec: JobSpec, run_: Arc<JobRun>, patience: Duration) -> Result<JoinHandle<()>> {
        let (spool, unnamed) = self.list_place(id, run_.list())?;
        let keep = Arc::clone(&self.keep);
        let open = Arc::clone(&self.open);
        let id = id.to_owned();
        self.remove_lists(&id, Some(&spool));
        let held = Arc::clone(&keep);
        run_.only_while(move || held.may_work());
        std::thread::Builder::new().name("job".into()).spawn(move || {
            let mut saved = Instant::now();
            let mut save = |run: &JobRun| {
                let ended = run.update_progress(|progress| progress.state.is_ended());
                if saved.elapsed() < SAVE_EVERY && !ended {
                    return;
                }
                if !ended {
                    run.keep_list(&spool);
                }
                // Retry, so that a transient error does not repeat a finished job.
                for tries in 1.. {
                    saved = Instant::now();
                    let keeping = run.save_checkpoint(|checkpoint| {
                        keep.save_job(&id, &JobRecord { spec: spec.clone(), checkpoint })
                    });
                    let Err(error) = keeping else { return };
                    if error.kind() == ErrorKind::PermissionDenied {
                        tracing::warn!("job {id} is abandoned by this process: {error}");
                        return run.abandon_run();
                    }
                    if !ended || tries == SAVE_ATTEMPTS {
                        tracing::warn!(
                            "job {id} cannot be saved and would start from its last saved state after a restart: {error}"
                        );
                        return;
                    }
                    std::thread::sleep(SAVE_RETRY_PAUSE);
                }
            };
            let end = |state: JobState, why: String| {
                run_.update_progress(|progress| {
                    progress.state = state;
                    progress.why = why;
                });
            };
            let begun = Instant::now();
            let opened = loop {
                match open(&spec.source) {
                    Err(error) if begun.elapsed() < patience && !run_.is_stopping() => {
                        run_.update_progress(|p| p.why = error.to_string());
                        run_.pause(SAVE_RETRY_PAUSE);
                    }
                    opened => break opened,
                }
            };
            match opened {
                Ok(target) => {
                    run_.update_progress(|p| p.why.clear());
                    let work = AssertUnwindSafe(|| run_job(&*target, &spec, &run_, &spool, &mut save));
                    if catch_unwind(work).is_err() {
                        end(JobState::Failed, "the thread of the job panicked; see the log".to_owned());
                        save(&run_);
                    }
                }
                Err(_) if run_.is_suspended() => end(JobState::Stopped, STOPPED.to_owned()),
                Err(_) if run_.is_stopping() => {
                    end(JobState::Stopped, STOPPED.to_owned());
                    save(&run_);
                }
                Err(error) => {
                    end(JobState::Failed, error.to_string());
                    save(&run_);
                }
            }
            let progress = run_.progress();
            if !run_.is_suspended() {
                tracing::info!("job {id}: {} {}", progress.state, progress.why);
                if unnamed.is_none() {
                    let _ = std::fs::remove_file(&spool);
                }
            }
        }).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Starts a job and returns the name. Another submission of a running job has no effect; an ended job starts anew.
    ///
    /// # Errors
    /// When the job is invalid, cannot be saved, or is running at another speed.
    pub fn submit(&self, spec: JobSpec) -> Result<String> {
        self.begin_job(spec).map(|(id, _)| id)
    }

    /// As `submit`; also returns whether the job was running already.
    pub(crate) fn begin_job(&self, spec: JobSpec) -> Result<(String, bool)> {
        spec.file_filter().map_err(|e| Error::new(ErrorKind::Invalid, e))?;
        let id = spec.id();
        let submission = self.last_submission(&spec.subject()).saturating_add(1);
        let mut jobs = self.jobs.lock();
        let other = match jobs.get(&id).filter(|job| job.under_way()) {
            Some(job) => Some(job.spec.clone()),
            None => {
                let mut kept = JobRecord::new(spec.clone());
                kept.checkpoint.progress.submission = submission;
                self.keep.begin_job(&id, &kept)?.map(|kept| kept.spec)
            }
        };
        if let Some(other) = other {
            if (other.rate, other.parallel) == (spec.rate, spec.parallel) {
                return Ok((id, true));
            }
            let rate = match other.rate {
                0 => "no --rate".to_owned(),
                rate => format!("--rate {}", Size(rate)),
            };
            let why = format!(
                "{id} is running already, with {rate} and -p {}; stop it first (--stop), or wait for its end",
                other.parallel
            );
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let number = next_number(&jobs);
        let run = JobRun::new();
        run.update_progress(|progress| progress.submission = submission);
        // No waiting for the group: the submitter should see the error.
        let thread = self.spawn_job(&id, spec.clone(), Arc::clone(&run), Duration::ZERO)?;
        jobs.insert(id.clone(), ManagedJob { spec, run, thread: Some(thread), number });
        self.forget_oldest(&mut jobs);
        Ok((id, false))
    }

    /// The highest submission number among jobs of these paths, as far as known.
    fn last_submission(&self, subject: &str) -> u64 {
        let all = self.jobs_of_subject(subject).unwrap_or_else(|error| {
            tracing::warn!("cannot read earlier jobs of {subject}; the new job starts without them: {error}");
            Vec::new()
        });
        all.iter().map(|(_, _, progress)| progress.submission).max().unwrap_or(0)
    }

    fn forget_oldest(&self, jobs: &mut BTreeMap<String, ManagedJob>) {
        while jobs.len() > MAX_ENDED_JOBS {
            let ended = jobs.iter().filter(|(_, job)| job.run.progress().state.is_ended());
            let Some(id) = ended.min_by_key(|(_, job)| job.number).map(|(id, _)| id.clone()) else { return };
            jobs.remove(&id);
            if let Err(error) = self.keep.remove_job(&id) {
                tracing::warn!("the record of job {id} cannot be removed: {error}");
            }
        }
    }

    /// A job and the progress, of this or another process.
    ///
    /// # Errors
    /// When the records cannot be read.
    pub fn find_job(&self, id: &str) -> Result<Option<(JobSpec, JobProgress)>> {
        let (here, under_way) = {
            let jobs = self.jobs.lock();
            let job = jobs.get(id);
            (job.map(|job| (job.spec.clone(), job.run.progress())), job.is_some_and(ManagedJob::under_way))
        };
        if under_way {
            return Ok(here);
        }
        let kept = self.keep.read_job(id)?;
        Ok(kept.map(|kept| (kept.spec, kept.checkpoint.progress)).or(here))
    }

    /// Adds the jobs of this process to `totals`.
    pub fn add_totals(&self, totals: &mut JobTotals) {
        for job in self.jobs.lock().values() {
            job.run.update_progress(|progress| match progress.state {
                JobState::Succeeded => totals.succeeded += 1,
                JobState::Failed | JobState::Stopped => totals.failed += 1,
                _ if job.run.is_suspended() => {}
                _ => {
                    totals.running += 1;
                    totals.files_total += progress.files_total;
                    totals.files_done += progress.files_done;
                    totals.files_failed += progress.files_failed;
                    totals.bytes_total += progress.bytes_total;
                    totals.bytes_done += progress.bytes_done;
                }
            });
        }
    }

    /// A job of this process and the progress.
    pub fn local_progress(&self, id: &str) -> Option<(JobSpec, JobProgress)> {
        self.jobs.lock().get(id).map(|job| (job.spec.clone(), job.run.progress()))
    }

    /// All jobs of this process, newest first, then jobs of other processes.
    ///
    /// # Errors
    /// When the others cannot be read.
    pub fn list_jobs(&self) -> Result<Vec<NamedJob>> {
        self.jobs_with_prefix("", |_| true)
    }

    /// Jobs with names that begin with `prefix` and satisfy `takes`.
    fn jobs_with_prefix(&self, prefix: &str, takes: impl Fn(&str) -> bool) -> Result<Vec<NamedJob>> {
        let others = self.keep.other_jobs(prefix)?.into_iter();
        let mut others: BTreeMap<String, JobRecord> = others.filter(|(id, _)| takes(id)).collect();
        let jobs = self.jobs.lock();
        let mut all: Vec<_> =
            jobs.iter().filter(|(id, job)| takes(id) && (job.under_way() || !others.contains_key(*id))).collect();
        all.sort_by_key(|(_, job)| std::cmp::Reverse(job.number));
        let mut all: Vec<_> =
            all.into_iter().map(|(id, job)| (id.clone(), job.spec.clone(), job.run.progress())).collect();
        all.iter().for_each(|(id, ..)| drop(others.remove(id)));
        all.extend(others.into_iter().map(|(id, kept)| (id, kept.spec, kept.checkpoint.progress)));
        Ok(all)
    }

    /// All jobs of the same paths; older releases used the bare subject as name.
    fn jobs_of_subject(&self, subject: &str) -> Result<Vec<NamedJob>> {
        self.jobs_with_prefix(subject, |id| {
            id == subject || id.rsplit_once('-').is_some_and(|(other, _)| other == subject)
        })
    }

    /// The job of this name. If the name is a subject, all jobs of these paths: running jobs first (first that without options,
    /// which has no other name), then by latest submission.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub(crate) fn jobs_named(&self, name: &str) -> Result<Vec<NamedJob>> {
        let (subject, alone) = match name.rsplit_once('-') {
            Some((subject, _)) if subject.contains('-') => (subject, false),
            _ => (name, true),
        };
        if !alone && let Some((spec, progress)) = self.find_job(name)? {
            return Ok(vec![(name.to_owned(), spec, progress)]);
        }
        let mut all = self.jobs_of_subject(subject)?;
        all.sort_by_key(|(_, spec, progress)| {
            let ended = progress.state.is_ended();
            (ended, !ended && !spec.is_plain(), std::cmp::Reverse(progress.submission))
        });
        if alone && !all.is_empty() {
            return Ok(all);
        }
        let why = match all.first() {
            None => format!("there is no job {name}: nothing was submitted for these paths"),
            Some((other, ..)) => format!(
                "there is no job {name}: nothing was submitted for these paths with these options; without them \
                 --progress and --stop mean {other}"
            ),
        };
        Err(Error::new(ErrorKind::NotFound, why))
    }

    /// Stops a job in any process; returns whether there was a job to stop. A stopped job is not resumed after a restart.
    ///
    /// # Errors
    /// When the process of the job cannot be notified, or the stop cannot be saved.
    pub fn stop_job(&self, id: &str) -> Result<bool> {
        let under_way = {
            let jobs = self.jobs.lock();
            jobs.get(id).filter(|job| job.under_way()).map(|job| (job.spec.clone(), Arc::clone(&job.run)))
        };
        let Some((spec, run)) = under_way else { return self.keep.request_stop(id) };
        run.stop();
        let kept = run.save_checkpoint(|checkpoint| {
            // The job's thread saves the end.
            let ended = checkpoint.progress.state.is_ended() && !run.is_suspended();
            if ended { Ok(()) } else { self.keep.save_job(id, &JobRecord { spec, checkpoint }) }
        });
        match kept {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                run.abandon_run();
                self.keep.request_stop(id)
            }
            Err(error) => {
                let what =
                    format!("job {id} is stopping, but would resume after a restart: its record cannot be saved");
                Err(error.context(&what))
            }
        }
    }

    /// Stops all jobs without waiting for running requests.
    pub fn stop_all(&self) {
        for job in self.jobs.lock().values() {
            job.run.stop();
        }
    }

    /// Ends the threads; running jobs resume at the next start.
    pub fn suspend(&self) {
        let threads: Vec<_> = {
            let mut jobs = self.jobs.lock();
            let with_threads = jobs.iter_mut().filter_map(|(id, job)| {
                let goes_on = job.under_way();
                if goes_on {
                    job.run.suspend();
                } else if job.run.is_suspended() {
                    return None;
                }
                // The thread of a job that just ended still has to save the end.
                let thread = job.thread.take()?;
                Some((goes_on.then(|| (id.clone(), job.spec.clone(), Arc::clone(&job.run))), thread))
            });
            with_threads.collect()
        };
        for (goes_on, thread) in threads {
            let _ = thread.join();
            let Some((id, spec, run)) = goes_on else { continue };
            if let Some(spool) = self.spool_path(&id, run.list()) {
                run.keep_list(&spool);
            }
            if let Err(error) =
                run.save_checkpoint(|checkpoint| self.keep.save_job(&id, &JobRecord { spec, checkpoint }))
            {
                tracing::warn!("job {id} cannot be saved: {error}");
            }
            self.keep.leave_job(&id);
        }
    }
}
