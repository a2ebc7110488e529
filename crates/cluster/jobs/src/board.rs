//! All jobs of a group: submitted, run one beside the other, stopped, gone on with after a restart.

use crate::keep::{Keep, Kept};
use crate::progress::{Progress, State};
use crate::run::{Run, STOPPED, run};
use crate::{Spec, Target};
use parking_lot::Mutex;
use serde_json::{Value, json};
use spurline_types::{Error, ErrorKind, Result, Size};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often a job's state is saved while it works.
const SAVE_EVERY: Duration = Duration::from_secs(2);
/// How often the end of a job is tried to be kept, and the pause between.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_secs(1);
/// How long a job that goes on waits for its group: nodes come back one after the other when all was restarted.
const GROUP_BACK: Duration = Duration::from_secs(300);
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

impl Job {
    /// Whether this process works on it.
    fn under_way(&self) -> bool {
        !self.run.progress().state.ended() && !self.run.suspended()
    }
}

fn next_number(jobs: &BTreeMap<String, Job>) -> u64 {
    jobs.values().map(|job| job.number + 1).max().unwrap_or(0)
}

/// The jobs of several boards together, as the gauges of that name show them.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Totals {
    running: u64,
    succeeded: u64,
    failed: u64,
    files_total: u64,
    files_done: u64,
    files_failed: u64,
    bytes_total: u64,
    bytes_done: u64,
}

impl Totals {
    /// Brings the gauges up to date.
    pub fn show(&self, gauges: &spurline_types::stats::Jobs) {
        let Totals { running, succeeded, failed, files_total, files_done, files_failed, bytes_total, bytes_done } =
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

/// A job with its name and how far it is.
type Named = (String, Spec, Progress);

/// The jobs.
pub struct Board {
    keep: Arc<dyn Keep>,
    /// Where lists of files outlive this process.
    spools: Option<PathBuf>,
    open: Arc<Open>,
    jobs: Mutex<BTreeMap<String, Job>>,
}

impl Board {
    /// Goes on with the jobs that `keep` has; lists of files lie in the directory `spools`, made when there is a job, or
    /// where there is none in temporary files without names, which end with their jobs.
    ///
    /// # Errors
    /// When the jobs can't be read.
    pub fn start(keep: Arc<dyn Keep>, spools: Option<&Path>, open: Arc<Open>) -> Result<Arc<Board>> {
        let board = Arc::new(Board { keep, spools: spools.map(Path::to_owned), open, jobs: Mutex::default() });
        let mut jobs = board.jobs.lock();
        for (id, kept) in board.keep.load()? {
            let job = board.resume(&id, kept, jobs.len() as u64)?;
            jobs.insert(id, job);
        }
        drop(jobs);
        Ok(board)
    }

    /// Goes on with a job that another process worked on.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn adopt(&self, id: &str, kept: Kept) -> Result<()> {
        let mut jobs = self.jobs.lock();
        let number = next_number(&jobs);
        let job = self.resume(id, kept, number)?;
        jobs.insert(id.to_owned(), job);
        Ok(())
    }

    /// Whether a job is being worked on here, or about to be kept as it ended.
    pub fn works_on(&self, id: &str) -> bool {
        let jobs = self.jobs.lock();
        let thread = jobs.get(id).and_then(|job| job.thread.as_ref());
        thread.is_some_and(|thread| !thread.is_finished())
    }

    fn resume(&self, id: &str, kept: Kept, number: u64) -> Result<Job> {
        let (spec, mut checkpoint) = (kept.spec, kept.checkpoint);
        if checkpoint.progress.state.ended() {
            return Ok(Job { spec, run: Run::ended(checkpoint), thread: None, number });
        }
        if checkpoint.stopping {
            let checkpoint = checkpoint.stopped();
            let kept = Kept { spec: spec.clone(), checkpoint: checkpoint.clone() };
            if let Err(error) = self.keep.save(id, &kept) {
                tracing::warn!("job {id} was stopped, which could not be kept: {error}");
            }
            self.clear(id, None);
            tracing::info!("job {id}: {} {}", checkpoint.progress.state, checkpoint.progress.why);
            return Ok(Job { spec, run: Run::ended(checkpoint), thread: None, number });
        }
        // Its list may be on another host, or have lost its end with the power.
        let there =
            self.spool(id, checkpoint.list).and_then(|list| std::fs::metadata(list).ok()).map(|list| list.len());
        checkpoint.progress.listed &= there.is_some() && there == checkpoint.list_bytes;
        tracing::info!("job {id} goes on");
        let run = Run::resumed(checkpoint, &spec);
        let thread = self.work(id, spec.clone(), Arc::clone(&run), GROUP_BACK)?;
        Ok(Job { spec, run, thread: Some(thread), number })
    }

    /// Where a list lies that outlives this process.
    fn spool(&self, id: &str, list: u64) -> Option<PathBuf> {
        self.spools.as_ref().map(|dir| dir.join(format!("{id}.{list:016x}.files")))
    }

    /// Where a list is written and read, and the file itself where it has no name.
    fn place(&self, id: &str, list: u64) -> Result<(PathBuf, Option<File>)> {
        if let (Some(dir), Some(spool)) = (&self.spools, self.spool(id, list)) {
            std::fs::create_dir_all(dir).map_err(|e| Error::io(format_args!("{}", dir.display()), &e))?;
            return Ok((spool, None));
        }
        // It holds names of what may be nobody else's business: no other user can open it, or put another in its place.
        let file = tempfile::tempfile().map_err(|e| {
            Error::io(format_args!("a file for the job's list in {}", std::env::temp_dir().display()), &e)
        })?;
        Ok((format!("/proc/self/fd/{}", file.as_raw_fd()).into(), Some(file)))
    }

    /// Takes lists of this job away that are of no more use.
    fn clear(&self, id: &str, used: Option<&Path>) {
        let Some(spools) = &self.spools else { return };
        let of_job = format!("{id}.");
        let old = |name: &std::ffi::OsStr| {
            name.to_str().is_some_and(|name| name.starts_with(&of_job) && name.ends_with(".files"))
        };
        for entry in std::fs::read_dir(spools).into_iter().flatten().flatten() {
            if old(&entry.file_name()) && Some(&*entry.path()) != used {
                // What stays costs room, no more.
                let _ = std::fs::remove_file(entry.path());
            }
        }
    }

    fn work(&self, id: &str, spec: Spec, run_: Arc<Run>, patience: Duration) -> Result<JoinHandle<()>> {
        let (spool, unnamed) = self.place(id, run_.list())?;
        let (keep, open) = (Arc::clone(&self.keep), Arc::clone(&self.open));
        let id = id.to_owned();
        self.clear(&id, Some(&spool));
        let held = Arc::clone(&keep);
        run_.only_while(move || held.holds());
        let work = move || {
            let mut saved = Instant::now();
            let mut save = |run: &Run| {
                let ended = run.change(|progress| progress.state.ended());
                if saved.elapsed() < SAVE_EVERY && !ended {
                    return;
                }
                if !ended {
                    run.keep_list(&spool);
                }
                // What ended is not worked on again for a moment's trouble.
                for tries in 1.. {
                    saved = Instant::now();
                    let keeping = run.save(|checkpoint| keep.save(&id, &Kept { spec: spec.clone(), checkpoint }));
                    let Err(error) = keeping else { return };
                    if error.kind() == ErrorKind::PermissionDenied {
                        tracing::warn!("job {id} is let go of: {error}");
                        return run.lose();
                    }
                    if !ended || tries == TRIES {
                        tracing::warn!("job {id} could not be saved, and would begin anew after a restart: {error}");
                        return;
                    }
                    std::thread::sleep(PAUSE);
                }
            };
            let end = |state: State, why: String| run_.change(|p| (p.state, p.why) = (state, why));
            let begun = Instant::now();
            let opened = loop {
                match open(&spec.source) {
                    Err(error) if begun.elapsed() < patience && !run_.stopping() => {
                        run_.change(|p| p.why = error.to_string());
                        run_.pause(PAUSE);
                    }
                    opened => break opened,
                }
            };
            match opened {
                Ok(target) => {
                    run_.change(|p| p.why.clear());
                    let work = AssertUnwindSafe(|| run(&*target, &spec, &run_, &spool, &mut save));
                    if catch_unwind(work).is_err() {
                        end(State::Failed, "the job's own thread panicked; the log has where".to_owned());
                        save(&run_);
                    }
                }
                Err(_) if run_.suspended() => end(State::Stopped, STOPPED.to_owned()),
                Err(_) if run_.stopping() => {
                    end(State::Stopped, STOPPED.to_owned());
                    save(&run_);
                }
                Err(error) => {
                    end(State::Failed, error.to_string());
                    save(&run_);
                }
            }
            let progress = run_.progress();
            if !run_.suspended() {
                tracing::info!("job {id}: {} {}", progress.state, progress.why);
                if unnamed.is_none() {
                    let _ = std::fs::remove_file(&spool);
                }
            }
        };
        std::thread::Builder::new().name("job".into()).spawn(work).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Begins a job and says its name. The same job twice is one job; one that ended begins anew.
    ///
    /// # Errors
    /// When the job makes no sense, can't be kept, or is being done at another speed.
    pub fn submit(&self, spec: Spec) -> Result<String> {
        self.begin(spec, 0).map(|(id, _)| id)
    }

    /// The same, as a later job of its paths than `after`; and whether it was under way already.
    fn begin(&self, spec: Spec, after: u64) -> Result<(String, bool)> {
        spec.filter().map_err(|e| Error::new(ErrorKind::Invalid, e))?;
        let id = spec.id();
        let submission = self.last_submission(&spec.subject()).max(after).saturating_add(1);
        let mut jobs = self.jobs.lock();
        let other = match jobs.get(&id).filter(|job| job.under_way()) {
            Some(job) => Some(job.spec.clone()),
            None => {
                let mut kept = Kept::new(spec.clone());
                kept.checkpoint.progress.submission = submission;
                self.keep.begin(&id, &kept)?.map(|kept| kept.spec)
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
                "{id} does this already, with {rate} and -p {}; stop it first (--stop), or wait for its end",
                other.parallel
            );
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let number = next_number(&jobs);
        let run = Run::new();
        run.change(|progress| progress.submission = submission);
        // Who submits it wants to be told when there is no group.
        let thread = self.work(&id, spec.clone(), Arc::clone(&run), Duration::ZERO)?;
        jobs.insert(id.clone(), Job { spec, run, thread: Some(thread), number });
        self.forget_oldest(&mut jobs);
        Ok((id, false))
    }

    /// The most that a job of these paths has, as far as that can be found out.
    fn last_submission(&self, subject: &str) -> u64 {
        let all = self.about(subject).unwrap_or_else(|error| {
            tracing::warn!(
                "which jobs of {subject} there were is not known, which is no hindrance to another: {error}"
            );
            Vec::new()
        });
        all.iter().map(|(_, _, progress)| progress.submission).max().unwrap_or(0)
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

    /// A job and how far it is, whichever process has it.
    ///
    /// # Errors
    /// When that can't be found out.
    pub fn find(&self, id: &str) -> Result<Option<(Spec, Progress)>> {
        let (here, under_way) = {
            let jobs = self.jobs.lock();
            let job = jobs.get(id);
            (job.map(|job| (job.spec.clone(), job.run.progress())), job.is_some_and(Job::under_way))
        };
        if under_way {
            return Ok(here);
        }
        let kept = self.keep.read(id)?;
        Ok(kept.map(|kept| (kept.spec, kept.checkpoint.progress)).or(here))
    }

    /// Adds the jobs of this process to `totals`.
    pub fn count(&self, totals: &mut Totals) {
        for job in self.jobs.lock().values() {
            job.run.change(|progress| match progress.state {
                State::Succeeded => totals.succeeded += 1,
                State::Failed | State::Stopped => totals.failed += 1,
                _ if job.run.suspended() => {}
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

    /// A job of this process and how far it is.
    pub fn progress(&self, id: &str) -> Option<(Spec, Progress)> {
        self.jobs.lock().get(id).map(|job| (job.spec.clone(), job.run.progress()))
    }

    /// All jobs, the newest first, and behind them those of other processes.
    ///
    /// # Errors
    /// When those can't be read.
    pub fn list(&self) -> Result<Vec<Named>> {
        self.those("", |_| true)
    }

    /// Those whose names begin with `prefix`, and that `takes` takes.
    fn those(&self, prefix: &str, takes: impl Fn(&str) -> bool) -> Result<Vec<Named>> {
        let others = self.keep.others(prefix)?.into_iter();
        let mut others: BTreeMap<String, Kept> = others.filter(|(id, _)| takes(id)).collect();
        let jobs = self.jobs.lock();
        let here = |(id, job): &(&String, &Job)| takes(id) && (job.under_way() || !others.contains_key(*id));
        let mut all: Vec<_> = jobs.iter().filter(here).collect();
        all.sort_by_key(|(_, job)| std::cmp::Reverse(job.number));
        let shown = |(id, job): (&String, &Job)| (id.clone(), job.spec.clone(), job.run.progress());
        let mut all: Vec<_> = all.into_iter().map(shown).collect();
        all.iter().for_each(|(id, ..)| drop(others.remove(id)));
        all.extend(others.into_iter().map(|(id, kept)| (id, kept.spec, kept.checkpoint.progress)));
        Ok(all)
    }

    /// All jobs of the same paths; a release before named them by these alone.
    fn about(&self, subject: &str) -> Result<Vec<Named>> {
        self.those(subject, |id| id == subject || id.rsplit_once('-').is_some_and(|(other, _)| other == subject))
    }

    /// The job of this name; or, for a name that says which paths alone, all jobs of these paths: first those under way,
    /// of them the one without options, which has no other name; the latest before the earlier ones.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    fn named(&self, name: &str) -> Result<Vec<Named>> {
        let (subject, alone) = match name.rsplit_once('-') {
            Some((subject, _)) if subject.contains('-') => (subject, false),
            _ => (name, true),
        };
        if !alone && let Some((spec, progress)) = self.find(name)? {
            return Ok(vec![(name.to_owned(), spec, progress)]);
        }
        let mut all = self.about(subject)?;
        all.sort_by_key(|(_, spec, progress)| {
            let ended = progress.state.ended();
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

    /// Ends a job, wherever it is worked on; says whether there was one to end. No restart goes on with it.
    ///
    /// # Errors
    /// When another process works on it and can't be told, or it could not be kept that it ends.
    pub fn stop(&self, id: &str) -> Result<bool> {
        let under_way = {
            let jobs = self.jobs.lock();
            jobs.get(id).filter(|job| job.under_way()).map(|job| (job.spec.clone(), Arc::clone(&job.run)))
        };
        let Some((spec, run)) = under_way else { return self.keep.stop(id) };
        run.stop();
        let kept = run.save(|checkpoint| {
            // How it ended its own thread keeps.
            let ended = checkpoint.progress.state.ended() && !run.suspended();
            if ended { Ok(()) } else { self.keep.save(id, &Kept { spec, checkpoint }) }
        });
        match kept {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                run.lose();
                self.keep.stop(id)
            }
            Err(error) => {
                let what = format!("job {id} ends, but would go on after a restart, as that could not be kept");
                Err(error.context(&what))
            }
        }
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
            let with_threads = jobs.iter_mut().filter_map(|(id, job)| {
                let goes_on = job.under_way();
                if goes_on {
                    job.run.suspend();
                } else if job.run.suspended() {
                    return None;
                }
                // The thread of one that has just ended still has to keep how.
                let thread = job.thread.take()?;
                Some((goes_on.then(|| (id.clone(), job.spec.clone(), Arc::clone(&job.run))), thread))
            });
            with_threads.collect()
        };
        for (goes_on, thread) in threads {
            let _ = thread.join();
            let Some((id, spec, run)) = goes_on else { continue };
            if let Some(spool) = self.spool(&id, run.list()) {
                run.keep_list(&spool);
            }
            if let Err(error) = run.save(|checkpoint| self.keep.save(&id, &Kept { spec, checkpoint })) {
                tracing::warn!("job {id} could not be saved: {error}");
            }
            self.keep.leave(&id);
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
    shown["include"] = json!(spec.include);
    shown["exclude"] = json!(spec.exclude);
    shown["verify"] = json!(spec.verify);
    shown["metadata_only"] = json!(spec.metadata_only);
    shown["skip_if_exists"] = json!(spec.skip_if_exists);
    shown["replicas"] = json!(spec.replicas);
    shown["remaining_seconds"] = json!(progress.remaining(spec.counts()));
    shown
}

/// The first of these, and in `others` the names of the rest that are under way.
fn first_of(named: &[Named]) -> Value {
    let Some((id, spec, progress)) = named.first() else { return Value::Null };
    let mut first = shown(id, spec, progress);
    let others = named.iter().skip(1).filter(|(_, _, progress)| !progress.state.ended()).map(|(id, ..)| id);
    first["others"] = others.cloned().collect::<Vec<_>>().into();
    first
}

impl Board {
    /// Answers `{"do": "submit", "spec": …}`, `{"do": "progress", "id": …}`, `{"do": "stop", "id": …}` and
    /// `{"do": "list"}`, which is how jobs are steered from another process. An id may be that of paths alone
    /// ([`Spec::subject`]): it means the job of these paths that is under way, or that was submitted last, and to stop it
    /// means all of them. `"after": …` in a submission is the most that a job of this name has as its `submission` where
    /// this board does not see it.
    ///
    /// # Errors
    /// When the request makes no sense, or names no job.
    pub fn answer(&self, request: &Value) -> Result<Value> {
        let invalid = |why: String| Error::new(ErrorKind::Invalid, why);
        let id = || request["id"].as_str().ok_or_else(|| invalid("which job? 'id' is missing".to_owned()));
        match request["do"].as_str() {
            Some("submit") => {
                let spec = serde_json::from_value(request["spec"].clone())
                    .map_err(|e| invalid(format!("this is no job that this version knows: {e}")))?;
                let (id, joined) = self.begin(spec, request["after"].as_u64().unwrap_or(0))?;
                let mut begun = first_of(&self.named(&id)?);
                begun["joined"] = joined.into();
                Ok(begun)
            }
            Some("progress") => Ok(first_of(&self.named(id()?)?)),
            Some("stop") => {
                let id = id()?;
                let named = self.named(id).or_else(|error| {
                    // One of another release, which this one can't read.
                    if error.kind() == ErrorKind::NotFound || !self.stop(id)? {
                        return Err(error);
                    }
                    Err(error.context(format_args!("job {id} is ended")))
                })?;
                for (id, ..) in &named {
                    self.stop(id)?;
                }
                Ok(first_of(&named))
            }
            Some("list") => {
                Ok(self.list()?.iter().map(|(id, spec, progress)| shown(id, spec, progress)).collect::<Vec<_>>().into())
            }
            other => Err(invalid(format!("jobs are not asked to '{}'", other.unwrap_or("(nothing)")))),
        }
    }
}
