//! Runs a job: a walker finds files, threads process the files, a second pass checks. The state can be saved at any moment and
//! resumed later.

mod ending;
#[cfg(test)]
mod tests;

use crate::checkpoint::{FileCounts, SettledWalk, WalkCheckpoint};
use crate::completed::{CompletedRanges, NumberRanges};
use crate::progress::{FailedFile, JobProgress, JobState};
use crate::rate::JobRateLimit;
use crate::spec::{JobAction, JobSpec};
use crate::speed::SpeedMeter;
use crate::spool::{FileRecord, ListReader, ListWriter, list_file_error};
use crate::walk::{WalkEvent, WalkPosition, walk_files};
use crate::{FilePart, JobTarget, WorkDone};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use spurline_sys::random;
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, ObjectRef, Result, RetryAdvice, Version};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// Attempts of a request with a transient error.
pub(crate) const TRIES: u32 = 6;
/// First pause between attempts; it doubles each time.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// Interval of updating speeds and calling `save`.
const TICK: Duration = Duration::from_millis(250);
const STACK: usize = 512 << 10;
/// Parts per request: many, so that small files cost few requests; few enough that all threads have work.
const PARTS: usize = 16;
/// Blocks per request.
const BLOCKS: u32 = 16;
/// Maximum size of a short file: its request costs more than its bytes.
const SHORT: u64 = 128 << 10;
/// Short files per batch of a thread with several requests in flight: large, so that the tail with fewer requests is
/// a small share.
const SHORT_PARTS: usize = 64;
/// Interval at which a rate-limited thread checks whether its reservation moved up.
const MOVES_UP: Duration = Duration::from_millis(50);
/// Interval at which a waiting thread checks for a stop.
const LOOK: Duration = Duration::from_millis(250);
/// Maximum ranges of a saved list state; above it, the list is built anew after a restart.
const RANGES: usize = 4096;
/// Stands for the walk position of files that failed when read back.
const READ_BACK: u64 = u64::MAX;
/// Reason of a job that a user stopped.
pub(crate) const STOPPED: &str = "it was stopped";

/// Saved state of a running job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct JobCheckpoint {
    pub progress: JobProgress,
    pub tally: CompletedRanges,
    /// Identifies the file list that `tally` refers to: another walk may find another order.
    #[serde(default)]
    pub list: u64,
    /// Number of the list's first file: earlier ones were done before the list was started.
    #[serde(default)]
    pub first: u64,
    /// Length of the list; absent while it is not durable or its state is not included here.
    #[serde(default)]
    pub list_bytes: Option<u64>,
    /// Failed files of the list.
    #[serde(default)]
    pub undone: NumberRanges,
    /// Files wrong when read back; they count as failed too.
    #[serde(default)]
    pub unverified: u64,
    /// Finished part of the walk, for a process without the list.
    #[serde(default)]
    pub settled: SettledWalk,
    /// For each named failed file, the number of files found before the walk passed it.
    #[serde(default)]
    pub failed_by: Vec<u64>,
    /// A user stopped it: do not resume.
    #[serde(default)]
    pub stopping: bool,
}

impl JobCheckpoint {
    /// The same job, stopped.
    pub(crate) fn stopped(mut self) -> JobCheckpoint {
        self.progress.state = JobState::Stopped;
        self.progress.why = STOPPED.to_owned();
        self.progress.bytes_per_second = 0.0;
        self.progress.files_per_second = 0.0;
        self
    }
}

#[derive(Default)]
struct RunState {
    progress: JobProgress,
    tally: CompletedRanges,
    course: WalkCheckpoint,
    list_bytes: Option<u64>,
    undone: NumberRanges,
    unverified: u64,
    failed_by: Vec<u64>,
    /// Bytes counted for unfinished files.
    unfinished: u64,
}

impl RunState {
    /// Records a failed path; the walk was past it after `by` files.
    fn note_failed(&mut self, path: &[u8], reason: &str, by: u64) {
        self.progress.note_failed(path, reason);
        self.failed_by.resize(self.progress.failed.len(), by);
    }
}

/// A running job, as seen and controlled by others.
#[derive(Default)]
pub struct JobRun {
    inner: Mutex<RunState>,
    stop: AtomicBool,
    /// The process ends; the job resumes in the next one.
    suspend: AtomicBool,
    /// A user stopped the job, here and anywhere else.
    end: AtomicBool,
    woken: Condvar,
    /// Whether this process may still work on it.
    holds: OnceLock<Box<dyn Fn() -> bool + Send + Sync>>,
    /// Held while a checkpoint is made and saved, so that the newest is saved last.
    saving: Mutex<()>,
    list_number: u64,
    first: u64,
}

impl JobRun {
    /// A job that has not begun.
    pub fn new() -> Arc<JobRun> {
        Arc::new(JobRun { list_number: random(), ..JobRun::default() })
    }

    /// The job `spec`, resumed from `checkpoint`.
    pub(crate) fn resume_from(checkpoint: JobCheckpoint, spec: &JobSpec) -> Arc<JobRun> {
        let JobCheckpoint { mut progress, mut tally, mut list, mut first, mut list_bytes, mut undone, .. } = checkpoint;
        let JobCheckpoint { settled, failed_by, unverified, .. } = checkpoint;
        let named = std::mem::take(&mut progress.failed).into_iter().zip(failed_by);
        let (course, failed): (_, Vec<(FailedFile, u64)>) = if progress.listed {
            // Reading back restarts: blocks may have changed meanwhile.
            progress.files_verified = 0;
            progress.bytes_verified = 0;
            progress.files_failed = progress.files_failed.saturating_sub(unverified);
            let rest = progress.file_counts().zip_with(settled.sums, u64::saturating_sub);
            let ended = tally.count().saturating_sub(settled.sums.files);
            let mut course = WalkCheckpoint::from(settled);
            course.note_found(WalkPosition::at_path(spec.paths.len() as u64), rest, ended);
            (course, named.filter(|(_, by)| *by != READ_BACK).collect())
        } else {
            // The list is incomplete or elsewhere: build a new one of the unfinished part. Files already cached cost
            // one request each. Reading back needs the names of all files.
            let settled = if spec.verify { SettledWalk::default() } else { settled };
            let sums = settled.sums;
            let JobProgress { seconds, submission, .. } = progress;
            progress = JobProgress { seconds, submission, ..JobProgress::from_counts(sums) };
            tally = CompletedRanges::up_to(sums.files);
            list = random();
            first = sums.files;
            list_bytes = None;
            undone = NumberRanges::default();
            (WalkCheckpoint::from(settled), named.filter(|(_, by)| *by <= sums.files && sums.failed > 0).collect())
        };
        let failed_by;
        (progress.failed, failed_by) = failed.into_iter().unzip();
        progress.state = JobState::Waiting;
        let inner = RunState { progress, tally, course, list_bytes, undone, failed_by, ..RunState::default() };
        Arc::new(JobRun { inner: Mutex::new(inner), list_number: list, first, ..JobRun::default() })
    }

    /// A job that ended earlier.
    pub(crate) fn from_ended(checkpoint: JobCheckpoint) -> Arc<JobRun> {
        Arc::new(JobRun {
            inner: Mutex::new(RunState { progress: checkpoint.progress, ..RunState::default() }),
            ..JobRun::default()
        })
    }

    /// Its progress.
    pub fn progress(&self) -> JobProgress {
        self.inner.lock().progress.clone()
    }

    /// Stops it after the running requests.
    pub fn stop(&self) {
        self.end.store(true, Ordering::Release);
        self.halt();
    }

    fn halt(&self) {
        self.stop.store(true, Ordering::Release);
        let _inner = self.inner.lock();
        self.woken.notify_all();
    }

    /// Interrupts it, to be resumed later.
    pub(crate) fn suspend(&self) {
        self.suspend.store(true, Ordering::Release);
        self.halt();
    }

    /// Whether it must not be resumed.
    pub(crate) fn is_ending(&self) -> bool {
        self.end.load(Ordering::Acquire)
    }

    pub(crate) fn is_suspended(&self) -> bool {
        self.suspend.load(Ordering::Acquire)
    }

    /// Works on it only while `holds` returns true.
    pub(crate) fn only_while(&self, holds: impl Fn() -> bool + Send + Sync + 'static) {
        // Only the first call has an effect.
        let _ = self.holds.set(Box::new(holds));
    }

    /// Abandons it here for good: another process owns it now.
    pub(crate) fn abandon_run(&self) {
        self.suspend.store(true, Ordering::Release);
        self.stop.store(true, Ordering::Release);
        self.woken.notify_all();
    }

    /// The name of its file list.
    pub(crate) fn list(&self) -> u64 {
        self.list_number
    }

    pub(crate) fn is_stopping(&self) -> bool {
        if self.stop.load(Ordering::Acquire) {
            return true;
        }
        let lost = self.holds.get().is_some_and(|holds| !holds());
        if lost {
            self.abandon_run();
        }
        lost
    }

    pub(crate) fn update_progress<T>(&self, change: impl FnOnce(&mut JobProgress) -> T) -> T {
        change(&mut self.inner.lock().progress)
    }

    /// Sleeps, but returns on a stop.
    pub(crate) fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut inner = self.inner.lock();
        while !self.is_stopping() && !self.woken.wait_until(&mut inner, until).timed_out() {}
    }

    /// Waits briefly for the walker.
    fn wait_for_files(&self) {
        let mut inner = self.inner.lock();
        self.woken.wait_for(&mut inner, Duration::from_millis(50));
    }

    /// Makes the complete list at `spool` durable; no checkpoint relies on it before.
    pub(crate) fn keep_list(&self, spool: &Path) {
        let inner = self.inner.lock();
        if !inner.progress.listed || inner.list_bytes.is_some() {
            return;
        }
        drop(inner);
        let synced = std::fs::File::open(spool).and_then(|list| list.sync_data().and_then(|()| list.metadata()));
        match synced {
            Ok(list) => self.inner.lock().list_bytes = Some(list.len()),
            Err(error) => tracing::warn!("{}: {error}; the list is built anew after a restart", spool.display()),
        }
    }

    /// Passes a checkpoint to `keep`.
    pub(crate) fn save_checkpoint<T>(&self, keep: impl FnOnce(JobCheckpoint) -> T) -> T {
        let _saving = self.saving.lock();
        let mut checkpoint = self.checkpoint();
        // It may have ended before it saw that another process resumes it.
        if self.is_suspended() && !self.is_ending() && checkpoint.progress.state == JobState::Stopped {
            checkpoint.progress.state = JobState::Running;
        }
        keep(checkpoint)
    }

    fn checkpoint(&self) -> JobCheckpoint {
        let inner = self.inner.lock();
        let mut progress = inner.progress.clone();
        progress.bytes_done -= inner.unfinished.min(progress.bytes_done);
        let RunState { tally, course, undone, failed_by, .. } = &*inner;
        let rest = JobCheckpoint {
            progress,
            list: self.list_number,
            first: self.first,
            settled: course.settled().clone(),
            failed_by: failed_by.clone(),
            unverified: inner.unverified,
            stopping: self.is_ending(),
            ..JobCheckpoint::default()
        };
        if tally.range_count() + undone.range_count() > RANGES {
            return rest;
        }
        JobCheckpoint { tally: tally.clone(), undone: undone.clone(), list_bytes: inner.list_bytes, ..rest }
    }
}

/// One pass over the files.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum FilePass {
    Work,
    Verify,
}

/// A file in progress.
struct PendingFile {
    number: u64,
    object: ObjectRef,
    /// It was being written when last looked up.
    unsettled: AtomicBool,
    /// Units left.
    left: AtomicU64,
    worked: Mutex<(WorkDone, Option<Error>)>,
}

/// A range of blocks of one file, requested together.
struct WorkUnit {
    file: Arc<PendingFile>,
    part: FilePart,
}

impl WorkUnit {
    fn len_bytes(&self, block: u64) -> u64 {
        let blocks = &self.part.blocks;
        (u64::from(blocks.end) * block).min(self.part.object.size) - u64::from(blocks.start) * block
    }
}

/// Yields the units of all files in order.
struct UnitFeed {
    reader: ListReader,
    next: u64,
    current: Option<(Arc<PendingFile>, Range<u32>)>,
    /// Requests that threads may still start.
    requests: usize,
}

/// A thread's permit for requests in flight, returned when the thread ends or panics.
struct RequestPermit<'a> {
    work: &'a JobWork<'a>,
    requests: usize,
}

impl Drop for RequestPermit<'_> {
    fn drop(&mut self) {
        self.work.feed.lock().requests -= self.requests;
        self.work.freed.notify_all();
    }
}

struct JobWork<'a> {
    target: &'a dyn JobTarget,
    spec: &'a JobSpec,
    run: &'a JobRun,
    pace: JobRateLimit,
    /// Blocks per unit; fewer under a rate limit, for an even flow.
    grain: u32,
    /// Parallel requests of one thread for short files.
    at_once: usize,
    feed: Mutex<UnitFeed>,
    /// Signals returned request permits.
    freed: Condvar,
    /// Readable records, and whether the list is complete.
    published: &'a AtomicU64,
    all: &'a AtomicBool,
    pass: FilePass,
}

/// Runs the job until it is done or stopped, with its file list at `spool`. Calls `save` several times a second.
pub fn run_job(target: &dyn JobTarget, spec: &JobSpec, run: &JobRun, spool: &Path, save: &mut dyn FnMut(&JobRun)) {
    let result = run_passes(target, spec, run, spool, save);
    ending::note_end(target, spec, run, spool, result);
    if !run.is_suspended() {
        save(run);
    }
}

/// Drops all blocks of the source, or of every source.
fn free_all(target: &dyn JobTarget, spec: &JobSpec, run: &JobRun) -> Result<()> {
    let (freed, error) = target.free_all(spec.everything, spec.with_pinned);
    run.update_progress(|progress| {
        progress.bytes_moved += freed.moved;
        // Of all files and versions, with those that the walk has met.
        progress.bytes_pinned = freed.held;
    });
    error.map_or(Ok(()), Err)
}

fn run_passes(
    target: &dyn JobTarget,
    spec: &JobSpec,
    run: &JobRun,
    spool: &Path,
    save: &mut dyn FnMut(&JobRun),
) -> Result<()> {
    let short =
        || spec.replicas.filter(|_| spec.action == JobAction::Load).and_then(|copies| target.missing_copies(copies));
    let (listed, files) = run.update_progress(|p| {
        p.state = JobState::Running;
        p.note = short().unwrap_or_default();
        (p.listed, p.files_total)
    });
    if spec.everything {
        run.update_progress(|progress| progress.listed = true);
        return free_all(target, spec, run);
    }
    let first = run.first;
    let published = AtomicU64::new(if listed { files } else { first });
    let all = AtomicBool::new(listed);
    let mut list = if listed {
        None
    } else {
        Some(ListWriter::new(std::fs::File::create(spool).map_err(|e| list_file_error(spool, &e))?))
    };
    let filter = spec.file_filter().map_err(|e| Error::new(ErrorKind::Invalid, e))?;
    let pass = |kind, list: Option<&mut ListWriter>, save: &mut dyn FnMut(&JobRun)| {
        let reader = ListReader::new(std::fs::File::open(spool).map_err(|e| list_file_error(spool, &e))?);
        let fetches = kind == FilePass::Work && spec.action == JobAction::Load;
        let work = JobWork {
            target,
            spec,
            run,
            pace: JobRateLimit::new(spec.rate),
            grain: blocks_per_unit(spec.rate, target.block_size()),
            at_once: if fetches { target.parallel_short(thread_count(spec)).clamp(1, thread_count(spec)) } else { 1 },
            feed: Mutex::new(UnitFeed { reader, next: first, current: None, requests: 0 }),
            freed: Condvar::new(),
            published: &published,
            all: &all,
            pass: kind,
        };
        work.run_pass(list, &filter, save)
    };
    pass(FilePass::Work, list.as_mut(), save)?;
    let (total, ended) = {
        let inner = run.inner.lock();
        (inner.progress.files_total, inner.tally.count())
    };
    if ended < total && !run.is_stopping() {
        let lost = total - ended;
        let why = format!("the file list of the job is damaged: {lost} of {total} are missing; start the job again");
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if spec.action == JobAction::Free && spec.covers_source() && !run.is_stopping() {
        // Versions that were replaced, and files that were removed.
        free_all(target, spec, run)?;
    }
    if spec.verify && spec.action == JobAction::Load && !spec.metadata_only && !run.is_stopping() {
        run.update_progress(|p| p.state = JobState::Verifying);
        pass(FilePass::Verify, None, save)?;
    }
    // Nodes lost meanwhile, or not contacted before.
    if let Some(short) = short() {
        run.update_progress(|p| p.note = short);
    }
    Ok(())
}

/// Blocks in a quarter of a second at this rate, at least one; a rate of 0 means no limit.
fn blocks_per_unit(rate: u64, block_size: u64) -> u32 {
    let even = rate / 4 / block_size.max(1);
    if rate == 0 { BLOCKS } else { u32::try_from(even).unwrap_or(BLOCKS).clamp(1, BLOCKS) }
}

/// Threads of a job, and its maximum requests in flight.
fn thread_count(spec: &JobSpec) -> usize {
    spec.parallel.clamp(1, 1024) as usize
}

fn spawn_worker<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() -> Result<()> + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, Result<()>>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK);
    thread.spawn_scoped(scope, work).map_err(|e| Error::io("can't start a thread", &e))
}

impl JobWork<'_> {
    fn run_pass(
        &self,
        list: Option<&mut ListWriter>,
        filter: &crate::FileFilter,
        save: &mut dyn FnMut(&JobRun),
    ) -> Result<()> {
        let threads = thread_count(self.spec);
        let waiter = std::thread::current();
        let ended = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let walk = |list| {
                move || {
                    let _end = EndOfList(self);
                    self.write_list(list, filter)
                }
            };
            let walker = list.map(|list| spawn_worker(scope, "job-walk", walk(list))).transpose()?;
            let mut workers = Vec::with_capacity(threads);
            for _ in 0..threads {
                let waiter = waiter.clone();
                let ended = &ended;
                match spawn_worker(scope, "job", move || {
                    let result = self.work_units();
                    ended.fetch_add(1, Ordering::AcqRel);
                    waiter.unpark();
                    result
                }) {
                    Ok(worker) => workers.push(worker),
                    // Fewer threads only take longer.
                    Err(error) if !workers.is_empty() => {
                        tracing::warn!("a job runs with {} threads instead of {threads}: {error}", workers.len());
                        break;
                    }
                    Err(error) => {
                        self.run.halt();
                        return Err(error);
                    }
                }
            }
            let mut speed = SpeedMeter::new(self.run, self.pass);
            // A panicked thread does not count itself as ended.
            while ended.load(Ordering::Acquire) < workers.len() && !workers.iter().all(ScopedJoinHandle::is_finished) {
                std::thread::park_timeout(TICK);
                speed.tick(self.run);
                save(self.run);
            }
            let ended = workers.into_iter().chain(walker).map(|thread| {
                thread.join().unwrap_or_else(|_| Err(Error::new(ErrorKind::Io(EIO), "a thread of the job panicked")))
            });
            ended.collect::<Result<Vec<()>>>().map(drop)
        })
    }

    fn write_list(&self, list: &mut ListWriter, filter: &crate::FileFilter) -> Result<()> {
        // Since the last position of the walk.
        let mut since = FileCounts::default();
        let mut failed = Vec::new();
        let place = self.run.inner.lock().course.settled().place.clone();
        walk_files(self.target, self.spec, filter, self.run, place, &mut |found| {
            match found {
                WalkEvent::File(record) => {
                    list.push(&record)?;
                    since.files += 1;
                    since.bytes += record.size;
                }
                WalkEvent::Failed(path, reason) => {
                    since.failed += 1;
                    failed.push((path, reason));
                }
                WalkEvent::Position(place) => {
                    list.flush()?;
                    let mut inner = self.run.inner.lock();
                    inner.progress.files_total += since.files;
                    inner.progress.bytes_total += since.bytes;
                    let by = inner.progress.files_total;
                    failed.drain(..).for_each(|(path, reason)| inner.note_failed(&path, &reason, by));
                    inner.course.note_found(place, std::mem::take(&mut since), 0);
                    self.published.store(by, Ordering::Release);
                    self.run.woken.notify_all();
                }
            }
            Ok(())
        })?;
        if !self.run.is_stopping() {
            self.run.update_progress(|p| p.listed = true);
        }
        Ok(())
    }

    /// The loop of one thread.
    fn work_units(&self) -> Result<()> {
        let mut batch = Vec::with_capacity(PARTS);
        let mut turn = RequestPermit { work: self, requests: 0 };
        while !self.run.is_stopping() {
            // Load the flag before the last check of the list.
            let all = self.all.load(Ordering::Acquire);
            self.take_units(&mut batch, &mut turn.requests)?;
            if !batch.is_empty() {
                self.work_batch(&mut batch, &mut turn.requests);
            } else if all {
                break;
            } else {
                self.run.wait_for_files();
            }
        }
        Ok(())
    }

    /// Takes the units of the next batch and the permit for their requests; `requests` is returned and taken again.
    fn take_units(&self, batch: &mut Vec<WorkUnit>, requests: &mut usize) -> Result<()> {
        let mut feed = self.feed.lock();
        feed.requests -= std::mem::take(requests);
        let mut most = 0;
        let mut room = 0;
        while self.advance_feed(&mut feed)? {
            let Some((file, rest)) = &feed.current else { break };
            let wanted = if file.object.size <= SHORT { self.at_once } else { 1 };
            if batch.is_empty() {
                if feed.requests + wanted > thread_count(self.spec) {
                    self.freed.wait_for(&mut feed, LOOK);
                    if self.run.is_stopping() {
                        break;
                    }
                    continue;
                }
                (most, room) = self.batch_limits(&feed, wanted);
            } else if batch.len() == most || room == 0 || wanted != *requests {
                break;
            }
            // Cut at fixed places, so that a unit rarely spans two sets of nodes.
            let (start, end) = (rest.start, ((rest.start / self.grain + 1) * self.grain).min(rest.end));
            if end - start > room && !batch.is_empty() {
                break;
            }
            room = room.saturating_sub(end - start);
            let part = FilePart { object: file.object.clone(), blocks: start..end };
            batch.push(WorkUnit { file: Arc::clone(file), part });
            feed.current =
                feed.current.take().map(|(file, rest)| (file, end..rest.end)).filter(|(_, rest)| !rest.is_empty());
            feed.requests += wanted - *requests;
            *requests = wanted;
        }
        let others = feed.requests < thread_count(self.spec);
        drop(feed);
        if batch.is_empty() {
            self.freed.notify_all();
        } else if others {
            self.freed.notify_one();
        }
        Ok(())
    }

    /// Returns request permits above `needed`.
    fn return_requests(&self, requests: &mut usize, needed: usize) {
        let more = requests.saturating_sub(needed);
        if more > 0 {
            self.feed.lock().requests -= more;
            *requests -= more;
            self.freed.notify_all();
        }
    }

    /// Maximum units and blocks per batch for a thread with this many requests.
    fn batch_limits(&self, feed: &UnitFeed, requests: usize) -> (usize, u32) {
        if requests == 1 {
            return (PARTS, self.grain);
        }
        // Near the end, share the rest among all threads.
        let left = self.published.load(Ordering::Acquire).saturating_sub(feed.next) + 1;
        let threads = (thread_count(self.spec) / requests) as u64;
        let share = left.div_ceil(2 * threads) as usize;
        let most = share.clamp(requests, SHORT_PARTS);
        (most, if self.spec.rate == 0 { SHORT_PARTS as u32 } else { self.grain })
    }

    /// Advances to the next file if needed; false when there is none yet, or none left.
    fn advance_feed(&self, feed: &mut UnitFeed) -> Result<bool> {
        while feed.current.is_none() {
            if feed.next >= self.published.load(Ordering::Acquire) {
                return Ok(false);
            }
            let Some(record) = feed.reader.next()? else { return Ok(false) };
            let number = feed.next;
            feed.next += 1;
            if self.pass_includes(number) {
                self.begin_file(feed, number, record);
            }
        }
        Ok(true)
    }

    /// Whether this pass includes a file of the list: files that were not loaded are not read back.
    fn pass_includes(&self, number: u64) -> bool {
        let inner = self.run.inner.lock();
        match self.pass {
            FilePass::Work => !inner.tally.has(number),
            FilePass::Verify => !inner.undone.has(number),
        }
    }

    /// Makes a file the current one; a file without blocks is finished at once.
    fn begin_file(&self, feed: &mut UnitFeed, number: u64, record: FileRecord) {
        // A file that was being written is loaded at its version after the writer closed it.
        let unsettled = record.version.is_unsettled();
        let version = Version::new(record.version.settled_text());
        let object = ObjectRef::new(self.target.source(), &record.path, version, record.size);
        let blocks = if self.spec.metadata_only { 0 } else { object.block_count(self.target.block_size()) };
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let file = PendingFile {
            number,
            object,
            unsettled: AtomicBool::new(unsettled),
            left: AtomicU64::new(blocks.div_ceil(self.grain).into()),
            worked: Mutex::default(),
        };
        if blocks == 0 {
            self.finish_file(&file, WorkDone::default(), None);
        } else {
            feed.current = Some((Arc::new(file), 0..blocks));
        }
    }

    /// Processes all units of `batch`, retrying transient failures.
    fn work_batch(&self, batch: &mut Vec<WorkUnit>, requests: &mut usize) {
        // The rest of a failed file is skipped.
        batch.retain(|unit| {
            let spoilt = unit.file.worked.lock().1.is_some();
            if spoilt {
                self.note_unit(unit, Ok(WorkDone::default()), true);
            }
            !spoilt
        });
        if self.pass == FilePass::Work && self.spec.rate > 0 {
            let place =
                self.pace.reserve_bytes(batch.iter().map(|unit| unit.len_bytes(self.target.block_size())).sum());
            loop {
                let left = self.pace.time_left(&place);
                if left.is_zero() || self.run.is_stopping() {
                    break;
                }
                self.run.pause(left.min(MOVES_UP));
            }
        }
        for tries in 0.. {
            // Begin nothing after a stop.
            if self.run.is_stopping() {
                return;
            }
            let results = match (self.pass, self.spec.action) {
                (FilePass::Verify, _) => self
                    .target
                    .check_parts(&batch.iter().map(|unit| unit.part.clone()).collect::<Vec<_>>(), self.spec.replicas),
                (FilePass::Work, JobAction::Load) => self.warm_batch(batch, *requests),
                (FilePass::Work, JobAction::Free) => self
                    .target
                    .free_parts(&batch.iter().map(|unit| unit.part.clone()).collect::<Vec<_>>(), self.spec.with_pinned),
            };
            let mut again = Vec::new();
            let mut why = None;
            for (unit, result) in batch.drain(..).zip(results) {
                if let (Ok(did), FilePass::Work, 0) = (&result, self.pass, tries) {
                    // Blocks cached before do not count against the rate.
                    self.pace.return_bytes(unit.len_bytes(self.target.block_size()).saturating_sub(did.moved));
                }
                match result {
                    // Their result is unknown.
                    Err(_) if self.run.is_stopping() => {}
                    Err(error) if tries < TRIES && error.kind().retry_advice() != RetryAdvice::Never => {
                        why = Some(error);
                        again.push(unit);
                    }
                    result => self.note_unit(&unit, result, false),
                }
            }
            self.run.update_progress(|p| match (why, tries) {
                (Some(why), _) => p.why = why.to_string(),
                (None, 0) => {}
                (None, _) => p.why.clear(),
            });
            if again.is_empty() {
                return;
            }
            *batch = again;
            self.return_requests(requests, batch.len());
            self.run.pause(FIRST_PAUSE * (1 << tries));
        }
    }

    /// Makes the target fetch the files, except those still being written.
    fn warm_batch(&self, batch: &[WorkUnit], requests: usize) -> Vec<Result<WorkDone>> {
        let settled: Vec<Result<()>> = batch.iter().map(|unit| self.check_settled(&unit.file)).collect();
        let parts = batch.iter().zip(&settled).filter(|(_, settled)| settled.is_ok());
        let parts: Vec<FilePart> = parts.map(|(unit, _)| unit.part.clone()).collect();
        let mut warmed =
            if parts.is_empty() { Vec::new() } else { self.target.warm_parts(&parts, self.spec.replicas, requests) }
                .into_iter();
        settled.into_iter().map(|settled| settled.and_then(|()| warmed.next().unwrap_or_else(no_result))).collect()
    }

    /// Checks that a file is no longer being written and still has the listed version.
    fn check_settled(&self, file: &PendingFile) -> Result<()> {
        if !file.unsettled.load(Ordering::Acquire) {
            return Ok(());
        }
        let version = self.target.lookup(&file.object.path)?.version;
        if version.settled_text() != file.object.version.as_str() {
            return Err(Error::new(ErrorKind::Stale, "it changed during the load; load it again"));
        }
        if version.is_unsettled() {
            let why = "it is open for writing and may still change; load it again after it is closed";
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        file.unsettled.store(false, Ordering::Release);
        Ok(())
    }

    /// Records the end of a unit, and of its file with the last unit.
    fn note_unit(&self, unit: &WorkUnit, result: Result<WorkDone>, spoilt: bool) {
        let file = &*unit.file;
        let mut worked = file.worked.lock();
        match result {
            Ok(did) => {
                worked.0 += did;
                if !spoilt {
                    let bytes = unit.len_bytes(self.target.block_size());
                    let mut inner = self.run.inner.lock();
                    match self.pass {
                        FilePass::Work => {
                            inner.progress.bytes_done += bytes;
                            inner.progress.bytes_moved += did.moved;
                            if self.spec.action == JobAction::Free {
                                inner.progress.bytes_pinned += did.held;
                            }
                            inner.unfinished += bytes;
                        }
                        FilePass::Verify => inner.progress.bytes_verified += bytes,
                    }
                }
            }
            Err(error) => worked.1 = Some(error),
        }
        if file.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let did = worked.0;
            let error = worked.1.take();
            drop(worked);
            self.finish_file(file, did, error);
        }
    }

    fn finish_file(&self, file: &PendingFile, did: WorkDone, error: Option<Error>) {
        let mut inner = self.run.inner.lock();
        let size = file.object.size;
        let moved = did.moved;
        let bytes_pinned = if self.spec.action == JobAction::Free { did.held } else { 0 };
        match (self.pass, error) {
            (FilePass::Verify, None) => inner.progress.files_verified += 1,
            (FilePass::Verify, Some(error)) => {
                inner.unverified += 1;
                inner.note_failed(&file.object.path, &format!("after loading: {error}"), READ_BACK);
            }
            (FilePass::Work, None) => {
                let skipped = u64::from(self.spec.skip_if_exists && moved == 0 && size > 0);
                inner.progress.files_done += 1;
                inner.progress.files_skipped += skipped;
                inner.unfinished -= size.min(inner.unfinished);
                inner.tally.add(file.number);
                let bytes_done = if self.spec.metadata_only { 0 } else { size };
                let sums = FileCounts {
                    done: 1,
                    skipped,
                    bytes_done,
                    bytes_moved: moved,
                    bytes_pinned,
                    ..FileCounts::default()
                };
                inner.course.note_ended(file.number, sums);
            }
            (FilePass::Work, Some(error)) => {
                inner.note_failed(&file.object.path, &error.to_string(), file.number + 1);
                inner.tally.add(file.number);
                inner.undone.add(file.number);
                inner
                    .course
                    .note_ended(file.number, FileCounts { failed: 1, bytes_moved: moved, ..FileCounts::default() });
            }
        }
    }
}

/// Marks the list as complete, also when the walker panics: no thread waits forever.
struct EndOfList<'a>(&'a JobWork<'a>);

impl Drop for EndOfList<'_> {
    fn drop(&mut self) {
        self.0.all.store(true, Ordering::Release);
        self.0.run.woken.notify_all();
    }
}

fn no_result() -> Result<WorkDone> {
    Err(Error::new(ErrorKind::Unavailable, "the cache returned no result for it"))
}
