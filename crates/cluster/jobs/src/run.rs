//! One job at work: a walker that finds files, threads that work on them, a second pass that checks. What it has done
//! can be saved at any moment and gone on with later.

use crate::course::{Course, Settled, Sums};
use crate::pace::Pace;
use crate::progress::{Failed, Progress, State};
use crate::spec::{Action, Spec};
use crate::speed::Speed;
use crate::spool::{Reader, Record, Writer};
use crate::tally::{Numbers, Tally};
use crate::walk::{Found, Place, walk};
use crate::{Part, Target, Worked};
use parking_lot::{Condvar, Mutex};
use serde::{Deserialize, Serialize};
use spurline_types::{Error, ErrorKind, ObjectRef, Result, Retry, Version};
use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

/// How often a request that may succeed later is made again.
pub(crate) const TRIES: u32 = 6;
/// The pause before the first of them; each further one is twice as long.
pub(crate) const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// How often speeds are worked out and `save` is offered the state.
const TICK: Duration = Duration::from_millis(250);
const STACK: usize = 512 << 10;
/// Parts that are asked for at once: enough that small files cost few requests, few enough that all threads have some.
const PARTS: usize = 16;
/// Blocks that are asked for at once.
const BLOCKS: u32 = 16;
/// A file of no more bytes is short: a request for it costs more than its bytes.
const SHORT: u64 = 128 << 10;
/// Short files that one thread takes at once where it has several requests under way: enough that the last of them,
/// when fewer are left than could be under way, are few among them.
const SHORT_PARTS: usize = 64;
/// How often a thread that waits for its time looks whether that has come sooner.
const MOVES_UP: Duration = Duration::from_millis(50);
/// How often a thread that waits for its turn looks whether the job was stopped.
const LOOK: Duration = Duration::from_millis(250);
/// What is done of a list is saved while it is no more ranges than this; else a list is made anew after a restart.
const RANGES: usize = 4096;
/// Stands for the place of the walk with files that failed when they were read back.
const READ_BACK: u64 = u64::MAX;
/// Why a job ended that somebody wanted the end of.
pub(crate) const STOPPED: &str = "it was stopped";

/// What is saved of a job under way.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Checkpoint {
    pub progress: Progress,
    pub tally: Tally,
    /// Names the list of files that the tally counts: another walk may find them in another order.
    #[serde(default)]
    pub list: u64,
    /// The number of the list's first file: those before it were done when the list was begun.
    #[serde(default)]
    pub first: u64,
    /// How long the list is; not given while it is not kept, or what is done of it is not said here.
    #[serde(default)]
    pub list_bytes: Option<u64>,
    /// Files of the list that could not be done.
    #[serde(default)]
    pub undone: Numbers,
    /// Files that were not right when they were read back; they are counted as failed, too.
    #[serde(default)]
    pub unverified: u64,
    /// What is done of the walk, for who does not have the list.
    #[serde(default)]
    pub settled: Settled,
    /// For each failed file that is named, how many files were found before the walk was past it.
    #[serde(default)]
    pub failed_by: Vec<u64>,
    /// Somebody wants its end: it is not gone on with.
    #[serde(default)]
    pub stopping: bool,
}

impl Checkpoint {
    /// As it is when it was stopped.
    pub(crate) fn stopped(mut self) -> Checkpoint {
        (self.progress.state, self.progress.why) = (State::Stopped, STOPPED.to_owned());
        (self.progress.bytes_per_second, self.progress.files_per_second) = (0.0, 0.0);
        self
    }
}

#[derive(Default)]
struct Inner {
    progress: Progress,
    tally: Tally,
    course: Course,
    list_bytes: Option<u64>,
    undone: Numbers,
    unverified: u64,
    failed_by: Vec<u64>,
    /// Bytes counted for files that are not done.
    unfinished: u64,
}

impl Inner {
    /// Notes what could not be done, all of it found when the walk had found `by` files.
    fn fail(&mut self, path: &[u8], reason: &str, by: u64) {
        self.progress.fail(path, reason);
        self.failed_by.resize(self.progress.failed.len(), by);
    }
}

/// A job at work, as others see and steer it.
#[derive(Default)]
pub struct Run {
    inner: Mutex<Inner>,
    stop: AtomicBool,
    /// The process ends: the job is to go on in the next one.
    suspend: AtomicBool,
    /// Somebody wants its end, here and wherever it would be gone on with.
    end: AtomicBool,
    woken: Condvar,
    /// Whether this process may still work on it.
    holds: OnceLock<Box<dyn Fn() -> bool + Send + Sync>>,
    /// Held while a checkpoint is made and kept: what is kept last is the newest.
    saving: Mutex<()>,
    list: u64,
    first: u64,
}

/// A name for a list of files that no other has.
fn fresh() -> u64 {
    RandomState::new().hash_one(Instant::now())
}

impl Run {
    /// A job that has not begun.
    pub fn new() -> Arc<Run> {
        Arc::new(Run { list: fresh(), ..Run::default() })
    }

    /// The job `spec` goes on from `checkpoint`.
    pub(crate) fn resumed(checkpoint: Checkpoint, spec: &Spec) -> Arc<Run> {
        let Checkpoint { mut progress, mut tally, mut list, mut first, mut list_bytes, mut undone, .. } = checkpoint;
        let Checkpoint { settled, failed_by, unverified, .. } = checkpoint;
        let named = std::mem::take(&mut progress.failed).into_iter().zip(failed_by);
        let (course, failed): (_, Vec<(Failed, u64)>) = if progress.listed {
            // Reading back starts anew: nothing says what happened to the blocks meanwhile.
            (progress.files_verified, progress.bytes_verified) = (0, 0);
            progress.files_failed = progress.files_failed.saturating_sub(unverified);
            let rest = progress.sums().zip(settled.sums, u64::saturating_sub);
            let ended = tally.count().saturating_sub(settled.sums.files);
            let mut course = Course::from(settled);
            course.found(Place::at_path(spec.paths.len() as u64), rest, ended);
            (course, named.filter(|(_, by)| *by != READ_BACK).collect())
        } else {
            // The list is not whole, or not here: one is made of what is not done for good. Of what is held already
            // that costs one question for each file. Reading back needs the names of all files.
            let settled = if spec.verify { Settled::default() } else { settled };
            let sums = settled.sums;
            let Progress { seconds, submission, .. } = progress;
            progress = Progress { seconds, submission, ..Progress::of(sums) };
            (tally, list, first) = (Tally::up_to(sums.files), fresh(), sums.files);
            (list_bytes, undone) = (None, Numbers::default());
            (Course::from(settled), named.filter(|(_, by)| *by <= sums.files && sums.failed > 0).collect())
        };
        let failed_by;
        (progress.failed, failed_by) = failed.into_iter().unzip();
        progress.state = State::Waiting;
        let inner = Inner { progress, tally, course, list_bytes, undone, failed_by, ..Inner::default() };
        Arc::new(Run { inner: Mutex::new(inner), list, first, ..Run::default() })
    }

    /// A job that ended earlier.
    pub(crate) fn ended(checkpoint: Checkpoint) -> Arc<Run> {
        Arc::new(Run {
            inner: Mutex::new(Inner { progress: checkpoint.progress, ..Inner::default() }),
            ..Run::default()
        })
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.inner.lock().progress.clone()
    }

    /// Ends it; what is under way is finished first.
    pub fn stop(&self) {
        self.end.store(true, Ordering::Release);
        self.halt();
    }

    fn halt(&self) {
        self.stop.store(true, Ordering::Release);
        let _inner = self.inner.lock();
        self.woken.notify_all();
    }

    /// Ends it for now, to be gone on with.
    pub(crate) fn suspend(&self) {
        self.suspend.store(true, Ordering::Release);
        self.halt();
    }

    /// Whether it is not to be gone on with.
    pub(crate) fn ends(&self) -> bool {
        self.end.load(Ordering::Acquire)
    }

    pub(crate) fn suspended(&self) -> bool {
        self.suspend.load(Ordering::Acquire)
    }

    /// From now on it is worked on only while `holds` says so.
    pub(crate) fn only_while(&self, holds: impl Fn() -> bool + Send + Sync + 'static) {
        // There is one answer, and it was given before if this is not the first.
        let _ = self.holds.set(Box::new(holds));
    }

    /// Ends it here, as it is another process's by now; for good, whatever is found out later.
    pub(crate) fn lose(&self) {
        self.suspend.store(true, Ordering::Release);
        self.stop.store(true, Ordering::Release);
        self.woken.notify_all();
    }

    /// The name of the list of its files.
    pub(crate) fn list(&self) -> u64 {
        self.list
    }

    pub(crate) fn stopping(&self) -> bool {
        if self.stop.load(Ordering::Acquire) {
            return true;
        }
        let lost = self.holds.get().is_some_and(|holds| !holds());
        if lost {
            self.lose();
        }
        lost
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut Progress) -> T) -> T {
        change(&mut self.inner.lock().progress)
    }

    /// Waits, unless it is stopped.
    pub(crate) fn pause(&self, time: Duration) {
        let until = Instant::now() + time;
        let mut inner = self.inner.lock();
        while !self.stopping() && !self.woken.wait_until(&mut inner, until).timed_out() {}
    }

    /// Waits a little for the walker.
    fn wait_for_files(&self) {
        let mut inner = self.inner.lock();
        self.woken.wait_for(&mut inner, Duration::from_millis(50));
    }

    /// Has the list at `spool` outlive a power loss, once it is whole: before, no checkpoint counts on it.
    pub(crate) fn keep_list(&self, spool: &Path) {
        let inner = self.inner.lock();
        if !inner.progress.listed || inner.list_bytes.is_some() {
            return;
        }
        drop(inner);
        let synced = std::fs::File::open(spool).and_then(|list| list.sync_data().and_then(|()| list.metadata()));
        match synced {
            Ok(list) => self.inner.lock().list_bytes = Some(list.len()),
            Err(error) => tracing::warn!("{}: {error}; it is made anew after a restart", spool.display()),
        }
    }

    /// Keeps how far it is by `keep`, which is given it.
    pub(crate) fn save<T>(&self, keep: impl FnOnce(Checkpoint) -> T) -> T {
        let _saving = self.saving.lock();
        let mut checkpoint = self.checkpoint();
        // It may have come to its end before it saw that it is to go on elsewhere.
        if self.suspended() && !self.ends() && checkpoint.progress.state == State::Stopped {
            checkpoint.progress.state = State::Running;
        }
        keep(checkpoint)
    }

    fn checkpoint(&self) -> Checkpoint {
        let inner = self.inner.lock();
        let mut progress = inner.progress.clone();
        progress.bytes_done -= inner.unfinished.min(progress.bytes_done);
        let Inner { tally, course, undone, failed_by, .. } = &*inner;
        let rest = Checkpoint {
            progress,
            list: self.list,
            first: self.first,
            settled: course.settled().clone(),
            failed_by: failed_by.clone(),
            unverified: inner.unverified,
            stopping: self.ends(),
            ..Checkpoint::default()
        };
        if tally.ranges() + undone.ranges() > RANGES {
            return rest;
        }
        Checkpoint { tally: tally.clone(), undone: undone.clone(), list_bytes: inner.list_bytes, ..rest }
    }
}

/// What is done to the files in one pass over them.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Pass {
    Work,
    Verify,
}

/// A file that is being worked on.
struct Pending {
    number: u64,
    object: ObjectRef,
    /// Somebody was writing it when it was last asked for.
    unsettled: AtomicBool,
    /// Units not done yet.
    left: AtomicU64,
    worked: Mutex<(Worked, Option<Error>)>,
}

/// What is asked for at once of one file.
struct Unit {
    file: Arc<Pending>,
    part: Part,
}

impl Unit {
    fn bytes(&self, block: u64) -> u64 {
        let blocks = &self.part.blocks;
        (u64::from(blocks.end) * block).min(self.part.object.size) - u64::from(blocks.start) * block
    }
}

/// Hands out the units of all files in order.
struct Feed {
    reader: Reader,
    next: u64,
    current: Option<(Arc<Pending>, Range<u32>)>,
    /// Requests that threads may have under way by now.
    requests: usize,
}

/// The right of one thread to have requests under way; it ends with the thread, also when that panics.
struct Turn<'a> {
    work: &'a Work<'a>,
    requests: usize,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.work.feed.lock().requests -= self.requests;
        self.work.freed.notify_all();
    }
}

struct Work<'a> {
    target: &'a dyn Target,
    spec: &'a Spec,
    run: &'a Run,
    pace: Pace,
    /// Blocks worked on at once, of one file or of several: fewer where a rate is to be kept, so that they go evenly.
    grain: u32,
    /// Requests that one thread has under way for short files.
    at_once: usize,
    feed: Mutex<Feed>,
    /// Others may have requests under way again.
    freed: Condvar,
    /// Records that may be read, and whether there will be no more.
    published: &'a AtomicU64,
    all: &'a AtomicBool,
    pass: Pass,
}

/// Works on the job until it is done or stopped; the list of its files is kept at `spool`. `save` is offered what there
/// is to save, several times a second.
pub fn run(target: &dyn Target, spec: &Spec, run: &Run, spool: &Path, save: &mut dyn FnMut(&Run)) {
    let result = passes(target, spec, run, spool, save);
    let remark = result.as_ref().ok().and_then(|()| remark(target, spec, run, spool));
    let mut inner = run.inner.lock();
    let progress = &mut inner.progress;
    (progress.bytes_per_second, progress.files_per_second) = (0.0, 0.0);
    if let Some(remark) = remark {
        let between = if progress.note.is_empty() { "" } else { "; " };
        progress.note = format!("{}{between}{remark}", progress.note);
    }
    match result {
        Err(error) => {
            progress.state = State::Failed;
            progress.why = error.to_string();
        }
        Ok(()) if run.stopping() => {
            progress.state = State::Stopped;
            progress.why = STOPPED.to_owned();
        }
        Ok(()) if progress.files_failed > 0 => {
            progress.state = State::Failed;
            let files = if progress.files_failed == 1 { "file" } else { "files" };
            progress.why = format!("{} {files} could not be done", progress.files_failed);
        }
        Ok(()) => {
            progress.state = State::Succeeded;
            progress.why.clear();
        }
    }
    drop(inner);
    if !run.suspended() {
        save(run);
    }
}

/// What is to be said of what was loaded, from the list of it: of files that were done before the list was begun nothing
/// is known, and nothing is said of a list that can't be read.
fn remark(target: &dyn Target, spec: &Spec, run: &Run, spool: &Path) -> Option<String> {
    // A file that is named twice is in the list twice, and held once.
    if spec.action != Action::Load || spec.metadata_only || run.stopping() || spec.overlaps() {
        return None;
    }
    let (bytes, undone) = {
        let inner = run.inner.lock();
        (inner.progress.bytes_done, inner.undone.clone())
    };
    let mut list = Reader::new(std::fs::File::open(spool).ok()?);
    let records = std::iter::from_fn(|| list.next().ok().flatten());
    let done = (run.first..).zip(records).filter(|(number, _)| !undone.has(*number));
    target.remark(spec.replicas, bytes, &mut done.map(|(_, record)| (record.path, record.size)))
}

fn passes(target: &dyn Target, spec: &Spec, run: &Run, spool: &Path, save: &mut dyn FnMut(&Run)) -> Result<()> {
    let short = || spec.replicas.filter(|_| spec.action == Action::Load).and_then(|copies| target.short_of(copies));
    let (listed, files) = run.change(|p| {
        p.state = State::Running;
        p.note = short().unwrap_or_default();
        (p.listed, p.files_total)
    });
    let first = run.first;
    // Of a list without a name the link says in which directory it lies.
    let shown = || std::fs::read_link(spool).unwrap_or_else(|_| spool.to_owned());
    let cant = |e: std::io::Error| Error::io(format_args!("{}", shown().display()), &e);
    let (published, all) = (AtomicU64::new(if listed { files } else { first }), AtomicBool::new(listed));
    let mut list = if listed { None } else { Some(Writer::new(std::fs::File::create(spool).map_err(cant)?)) };
    let filter = spec.filter().map_err(|e| Error::new(ErrorKind::Invalid, e))?;
    let pass = |kind, list: Option<&mut Writer>, save: &mut dyn FnMut(&Run)| {
        let reader = Reader::new(std::fs::File::open(spool).map_err(cant)?);
        let fetches = kind == Pass::Work && spec.action == Action::Load;
        let work = Work {
            target,
            spec,
            run,
            pace: Pace::new(spec.rate),
            grain: grain(spec.rate, target.block_size()),
            at_once: if fetches { target.at_once(threads(spec)).clamp(1, threads(spec)) } else { 1 },
            feed: Mutex::new(Feed { reader, next: first, current: None, requests: 0 }),
            freed: Condvar::new(),
            published: &published,
            all: &all,
            pass: kind,
        };
        work.go(list, &filter, save)
    };
    pass(Pass::Work, list.as_mut(), save)?;
    let (total, ended) = {
        let inner = run.inner.lock();
        (inner.progress.files_total, inner.tally.count())
    };
    if ended < total && !run.stopping() {
        let lost = total - ended;
        let why =
            format!("the list of the job's files is damaged: {lost} of {total} were not in it; start the job again");
        return Err(Error::new(ErrorKind::Corrupt, why));
    }
    if spec.verify && spec.action == Action::Load && !spec.metadata_only && !run.stopping() {
        run.change(|p| p.state = State::Verifying);
        pass(Pass::Verify, None, save)?;
    }
    // Nodes that were lost meanwhile, or that nobody had tried to reach before.
    if let Some(short) = short() {
        run.change(|p| p.note = short);
    }
    Ok(())
}

/// As many blocks as a quarter of a second of the rate has, at least one; 0 is no limit.
fn grain(rate: u64, block_size: u64) -> u32 {
    let even = rate / 4 / block_size.max(1);
    if rate == 0 { BLOCKS } else { u32::try_from(even).unwrap_or(BLOCKS).clamp(1, BLOCKS) }
}

/// Threads of a job, and requests that it has under way at most.
fn threads(spec: &Spec) -> usize {
    spec.parallel.clamp(1, 1024) as usize
}

fn spawn<'scope, 'env>(
    scope: &'scope Scope<'scope, 'env>,
    name: &str,
    work: impl FnOnce() -> Result<()> + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, Result<()>>> {
    let thread = std::thread::Builder::new().name(name.to_owned()).stack_size(STACK);
    thread.spawn_scoped(scope, work).map_err(|e| Error::io("can't start a thread", &e))
}

impl Work<'_> {
    fn go(&self, list: Option<&mut Writer>, filter: &crate::Filter, save: &mut dyn FnMut(&Run)) -> Result<()> {
        let threads = threads(self.spec);
        let (waiter, ended) = (std::thread::current(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            let walk = |list| {
                move || {
                    let _end = EndOfList(self);
                    self.list(list, filter)
                }
            };
            let walker = list.map(|list| spawn(scope, "job-walk", walk(list))).transpose()?;
            let mut workers = Vec::with_capacity(threads);
            for _ in 0..threads {
                let (waiter, ended) = (waiter.clone(), &ended);
                let work = move || {
                    let result = self.units();
                    ended.fetch_add(1, Ordering::AcqRel);
                    waiter.unpark();
                    result
                };
                match spawn(scope, "job", work) {
                    Ok(worker) => workers.push(worker),
                    // With fewer threads it takes longer.
                    Err(error) if !workers.is_empty() => {
                        tracing::warn!("a job works with {} threads instead of {threads}: {error}", workers.len());
                        break;
                    }
                    Err(error) => {
                        self.run.halt();
                        return Err(error);
                    }
                }
            }
            let mut speed = Speed::new(self.run, self.pass);
            // A thread that panicked does not count itself.
            while ended.load(Ordering::Acquire) < workers.len() && !workers.iter().all(ScopedJoinHandle::is_finished) {
                std::thread::park_timeout(TICK);
                speed.tick(self.run);
                save(self.run);
            }
            let panicked = |_| Err(Error::new(ErrorKind::Io(5), "a thread of the job panicked"));
            let ended = workers.into_iter().chain(walker).map(|thread| thread.join().unwrap_or_else(panicked));
            ended.collect::<Result<Vec<()>>>().map(drop)
        })
    }

    fn list(&self, list: &mut Writer, filter: &crate::Filter) -> Result<()> {
        // Since the last place that the walk told.
        let (mut since, mut failed) = (Sums::default(), Vec::new());
        let place = self.run.inner.lock().course.settled().place.clone();
        walk(self.target, self.spec, filter, self.run, place, &mut |found| {
            match found {
                Found::File(record) => {
                    list.push(&record)?;
                    since.files += 1;
                    since.bytes += record.size;
                }
                Found::Failed(path, reason) => {
                    since.failed += 1;
                    failed.push((path, reason));
                }
                Found::Place(place) => {
                    list.flush()?;
                    let mut inner = self.run.inner.lock();
                    inner.progress.files_total += since.files;
                    inner.progress.bytes_total += since.bytes;
                    let by = inner.progress.files_total;
                    failed.drain(..).for_each(|(path, reason)| inner.fail(&path, &reason, by));
                    inner.course.found(place, std::mem::take(&mut since), 0);
                    self.published.store(by, Ordering::Release);
                    self.run.woken.notify_all();
                }
            }
            Ok(())
        })?;
        if !self.run.stopping() {
            self.run.change(|p| p.listed = true);
        }
        Ok(())
    }

    /// What one thread does.
    fn units(&self) -> Result<()> {
        let mut batch = Vec::with_capacity(PARTS);
        let mut turn = Turn { work: self, requests: 0 };
        while !self.run.stopping() {
            // The walker's word comes before the last look at what it wrote.
            let all = self.all.load(Ordering::Acquire);
            self.take(&mut batch, &mut turn.requests)?;
            match batch.is_empty() {
                false => self.work(&mut batch, &mut turn.requests),
                true if all => break,
                true => self.run.wait_for_files(),
            }
        }
        Ok(())
    }

    /// Takes the next units, as many as are asked for at once, and the right to the requests for them: `requests` are
    /// given back and taken anew.
    fn take(&self, batch: &mut Vec<Unit>, requests: &mut usize) -> Result<()> {
        let mut feed = self.feed.lock();
        feed.requests -= std::mem::take(requests);
        let (mut most, mut room) = (0, 0);
        while self.advance(&mut feed)? {
            let Some((file, rest)) = &feed.current else { break };
            let wanted = if file.object.size <= SHORT { self.at_once } else { 1 };
            if batch.is_empty() {
                if feed.requests + wanted > threads(self.spec) {
                    self.freed.wait_for(&mut feed, LOOK);
                    if self.run.stopping() {
                        break;
                    }
                    continue;
                }
                (most, room) = self.limits(&feed, wanted);
            } else if batch.len() == most || room == 0 || wanted != *requests {
                break;
            }
            // Cut at the same places whatever went before, so that a unit rarely lies on two sets of nodes.
            let (start, end) = (rest.start, ((rest.start / self.grain + 1) * self.grain).min(rest.end));
            if end - start > room && !batch.is_empty() {
                break;
            }
            room = room.saturating_sub(end - start);
            let part = Part { object: file.object.clone(), blocks: start..end };
            batch.push(Unit { file: Arc::clone(file), part });
            feed.current =
                feed.current.take().map(|(file, rest)| (file, end..rest.end)).filter(|(_, rest)| !rest.is_empty());
            feed.requests += wanted - *requests;
            *requests = wanted;
        }
        let others = feed.requests < threads(self.spec);
        drop(feed);
        match batch.is_empty() {
            true => drop(self.freed.notify_all()),
            false if others => drop(self.freed.notify_one()),
            false => {}
        }
        Ok(())
    }

    /// Gives back what is more than `needed` of the right to requests.
    fn give_back(&self, requests: &mut usize, needed: usize) {
        let more = requests.saturating_sub(needed);
        if more > 0 {
            self.feed.lock().requests -= more;
            *requests -= more;
            self.freed.notify_all();
        }
    }

    /// How many units a thread with this many requests takes at once, and how many blocks.
    fn limits(&self, feed: &Feed, requests: usize) -> (usize, u32) {
        if requests == 1 {
            return (PARTS, self.grain);
        }
        // When few are left, all threads have some.
        let left = self.published.load(Ordering::Acquire).saturating_sub(feed.next) + 1;
        let threads = (threads(self.spec) / requests) as u64;
        let share = left.div_ceil(2 * threads) as usize;
        let most = share.clamp(requests, SHORT_PARTS);
        (most, if self.spec.rate == 0 { SHORT_PARTS as u32 } else { self.grain })
    }

    /// Sees to it that there is a current file; false when there is none yet, or none left.
    fn advance(&self, feed: &mut Feed) -> Result<bool> {
        while feed.current.is_none() {
            if feed.next >= self.published.load(Ordering::Acquire) {
                return Ok(false);
            }
            let Some(record) = feed.reader.next()? else { return Ok(false) };
            let number = feed.next;
            feed.next += 1;
            if self.takes(number) {
                self.begin(feed, number, record);
            }
        }
        Ok(true)
    }

    /// Whether this pass has to do with a file of the list: what was not loaded is not read back.
    fn takes(&self, number: u64) -> bool {
        let inner = self.run.inner.lock();
        match self.pass {
            Pass::Work => !inner.tally.has(number),
            Pass::Verify => !inner.undone.has(number),
        }
    }

    /// Makes a file the current one; one without blocks to work on is done at once.
    fn begin(&self, feed: &mut Feed, number: u64, record: Record) {
        // A file that somebody was writing is loaded as the version that it has when they are through.
        let (unsettled, version) = (record.version.is_unsettled(), Version::new(record.version.settled()));
        let object = ObjectRef::new(self.target.source(), &record.path, version, record.size);
        let blocks = if self.spec.metadata_only { 0 } else { object.blocks(self.target.block_size()) };
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        let file = Pending {
            number,
            object,
            unsettled: AtomicBool::new(unsettled),
            left: AtomicU64::new(blocks.div_ceil(self.grain).into()),
            worked: Mutex::default(),
        };
        if blocks == 0 {
            self.done(&file, Worked::default(), None);
        } else {
            feed.current = Some((Arc::new(file), 0..blocks));
        }
    }

    /// Works on all units of `batch`, again and again on those that may do better later.
    fn work(&self, batch: &mut Vec<Unit>, requests: &mut usize) {
        // The rest of a file that failed is not worth the traffic.
        batch.retain(|unit| {
            let spoilt = unit.file.worked.lock().1.is_some();
            if spoilt {
                self.ended(unit, Ok(Worked::default()), true);
            }
            !spoilt
        });
        if self.pass == Pass::Work && self.spec.rate > 0 {
            let place = self.pace.take(batch.iter().map(|unit| unit.bytes(self.target.block_size())).sum());
            loop {
                let left = self.pace.left(&place);
                if left.is_zero() || self.run.stopping() {
                    break;
                }
                self.run.pause(left.min(MOVES_UP));
            }
        }
        for tries in 0.. {
            // Whoever waited for its time, or for a second try, begins nothing after a stop.
            if self.run.stopping() {
                return;
            }
            let part = |unit: &Unit| unit.part.clone();
            let results = match (self.pass, self.spec.action) {
                (Pass::Verify, _) => self.target.check(&batch.iter().map(part).collect::<Vec<_>>(), self.spec.replicas),
                (Pass::Work, Action::Load) => self.warm(batch, *requests),
                (Pass::Work, Action::Free) => self.target.free(&batch.iter().map(part).collect::<Vec<_>>()),
            };
            let mut again = Vec::new();
            let mut why = None;
            for (unit, result) in batch.drain(..).zip(results) {
                if let (Ok(did), Pass::Work, 0) = (&result, self.pass, tries) {
                    // What was held already is not what the rate is about.
                    self.pace.give_back(unit.bytes(self.target.block_size()).saturating_sub(did.moved));
                }
                match result {
                    // It is not known how they would have ended.
                    Err(_) if self.run.stopping() => {}
                    Err(error) if tries < TRIES && error.kind().retry() != Retry::Never => {
                        why = Some(error);
                        again.push(unit);
                    }
                    result => self.ended(&unit, result, false),
                }
            }
            self.run.change(|p| match (why, tries) {
                (Some(why), _) => p.why = why.to_string(),
                (None, 0) => {}
                (None, _) => p.why.clear(),
            });
            if again.is_empty() {
                return;
            }
            *batch = again;
            self.give_back(requests, batch.len());
            self.run.pause(FIRST_PAUSE * (1 << tries));
        }
    }

    /// Has the target fetch what is to be loaded, but for files that somebody is still writing.
    fn warm(&self, batch: &[Unit], requests: usize) -> Vec<Result<Worked>> {
        let settled: Vec<Result<()>> = batch.iter().map(|unit| self.settled(&unit.file)).collect();
        let parts = batch.iter().zip(&settled).filter(|(_, settled)| settled.is_ok());
        let parts: Vec<Part> = parts.map(|(unit, _)| unit.part.clone()).collect();
        let mut warmed = match parts.is_empty() {
            true => Vec::new(),
            false => self.target.warm(&parts, self.spec.replicas, requests),
        }
        .into_iter();
        let none = || Err(Error::new(ErrorKind::Unavailable, "it was not answered for"));
        settled.into_iter().map(|settled| settled.and_then(|()| warmed.next().unwrap_or_else(none))).collect()
    }

    /// Whether a file that was being written is so no longer, and what the list says of it is right.
    fn settled(&self, file: &Pending) -> Result<()> {
        if !file.unsettled.load(Ordering::Acquire) {
            return Ok(());
        }
        let version = self.target.lookup(&file.object.path)?.version;
        if version.settled() != file.object.version.as_str() {
            return Err(Error::new(ErrorKind::Stale, "it changed while it was to be loaded; load it again"));
        }
        if version.is_unsettled() {
            let why = "somebody has it open for writing, and it may still change; load it again when it is closed";
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        file.unsettled.store(false, Ordering::Release);
        Ok(())
    }

    /// Notes how a unit ended, and with the last of a file how the file did.
    fn ended(&self, unit: &Unit, result: Result<Worked>, spoilt: bool) {
        let file = &*unit.file;
        let mut worked = file.worked.lock();
        match result {
            Ok(did) => {
                worked.0 += did;
                if !spoilt {
                    let bytes = unit.bytes(self.target.block_size());
                    let mut inner = self.run.inner.lock();
                    match self.pass {
                        Pass::Work => {
                            inner.progress.bytes_done += bytes;
                            inner.progress.bytes_moved += did.moved;
                            inner.unfinished += bytes;
                        }
                        Pass::Verify => inner.progress.bytes_verified += bytes,
                    }
                }
            }
            Err(error) => worked.1 = Some(error),
        }
        if file.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            let (did, error) = (worked.0, worked.1.take());
            drop(worked);
            self.done(file, did, error);
        }
    }

    fn done(&self, file: &Pending, did: Worked, error: Option<Error>) {
        let mut inner = self.run.inner.lock();
        let (size, moved) = (file.object.size, did.moved);
        match (self.pass, error) {
            (Pass::Verify, None) => inner.progress.files_verified += 1,
            (Pass::Verify, Some(error)) => {
                inner.unverified += 1;
                inner.fail(&file.object.path, &format!("after loading: {error}"), READ_BACK);
            }
            (Pass::Work, None) => {
                let skipped = u64::from(self.spec.skip_if_exists && moved == 0 && size > 0);
                inner.progress.files_done += 1;
                inner.progress.files_skipped += skipped;
                inner.unfinished -= size.min(inner.unfinished);
                inner.tally.add(file.number);
                let bytes_done = if self.spec.metadata_only { 0 } else { size };
                let sums = Sums { done: 1, skipped, bytes_done, bytes_moved: moved, ..Sums::default() };
                inner.course.ended(file.number, sums);
            }
            (Pass::Work, Some(error)) => {
                inner.fail(&file.object.path, &error.to_string(), file.number + 1);
                inner.tally.add(file.number);
                inner.undone.add(file.number);
                inner.course.ended(file.number, Sums { failed: 1, bytes_moved: moved, ..Sums::default() });
            }
        }
    }
}

/// Says that there will be no more files, also when the walker panicked: nobody waits for it then.
struct EndOfList<'a>(&'a Work<'a>);

impl Drop for EndOfList<'_> {
    fn drop(&mut self) {
        self.0.all.store(true, Ordering::Release);
        self.0.run.woken.notify_all();
    }
}

#[cfg(test)]
mod tests;
