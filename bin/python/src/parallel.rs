//! The threads of a client: parallel work in numbered steps, and single calls. The caller waits, or takes steps in the order of the ends. Knows
//! neither Python nor volumes.
//!
//! A batch that is cancelled takes no further step; a step under way goes on to the end. Memory that steps write to must live until
//! [`Batch::is_idle`].

use parking_lot::{Condvar, Mutex};
use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Work in steps that may run on any thread, several at a time.
pub(crate) trait BatchWork: Send + Sync {
    /// Number of steps.
    fn steps(&self) -> usize;
    /// Runs a step. Returns the number of the item that has ended by this step, if one has.
    fn run_step(&self, step: usize) -> Option<usize>;
    /// A step panicked; returns the item that has ended by this.
    fn step_panicked(&self, step: usize, cause: &str) -> Option<usize>;
}

#[derive(Default)]
struct BatchState {
    next_step: usize,
    running: usize,
    cancelled: bool,
    /// Items that have ended and were not taken.
    ended: VecDeque<usize>,
}

/// Work that the threads of a client share.
pub(crate) struct Batch {
    work: Arc<dyn BatchWork>,
    state: Mutex<BatchState>,
    changed: Condvar,
}

impl Batch {
    fn new(work: Arc<dyn BatchWork>) -> Arc<Batch> {
        Arc::new(Batch { work, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Takes no further step.
    pub fn cancel(&self) {
        self.state.lock().cancelled = true;
        self.changed.notify_all();
    }

    /// Whether no step runs, and none will.
    pub fn is_idle(&self) -> bool {
        self.is_idle_in(&self.state.lock())
    }

    fn is_idle_in(&self, state: &BatchState) -> bool {
        state.running == 0 && (state.cancelled || state.next_step >= self.work.steps())
    }

    /// Waits until an item has ended that was not taken yet, or no step is left, at most for `limit`.
    pub fn wait_item(&self, limit: Duration) -> ItemWait {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        loop {
            if let Some(item) = state.ended.pop_front() {
                return ItemWait::Ended(item);
            }
            if self.is_idle_in(&state) {
                return ItemWait::NoneLeft;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return ItemWait::Later;
            }
            self.changed.wait_for(&mut state, left);
        }
    }

    /// Waits until no step runs and none will, at most for `limit`; whether that is so.
    pub fn wait_idle(&self, limit: Duration) -> bool {
        let mut state = self.state.lock();
        self.changed.wait_while_for(&mut state, |state| !self.is_idle_in(state), limit);
        self.is_idle_in(&state)
    }

    /// Takes a step; `None` when there is none. The second value: more steps are left.
    fn take_step(&self) -> Option<(usize, bool)> {
        let mut state = self.state.lock();
        if state.cancelled || state.next_step >= self.work.steps() {
            return None;
        }
        let step = state.next_step;
        state.next_step += 1;
        state.running += 1;
        Some((step, state.next_step < self.work.steps()))
    }

    fn run(&self, step: usize) {
        let ran = catch_unwind(AssertUnwindSafe(|| self.work.run_step(step)));
        let ended = ran.unwrap_or_else(|cause| self.work.step_panicked(step, panic_text(&*cause)));
        let mut state = self.state.lock();
        state.running -= 1;
        state.ended.extend(ended);
        // A waiting caller that needs all items is woken once.
        if ended.is_some() || self.is_idle_in(&state) {
            self.changed.notify_all();
        }
    }
}

fn panic_text(cause: &(dyn Any + Send)) -> &str {
    let text = cause.downcast_ref::<&str>().copied();
    text.or_else(|| cause.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic")
}

/// The result of [`Batch::wait_item`].
pub(crate) enum ItemWait {
    Ended(usize),
    /// Nothing has ended in that time.
    Later,
    /// All items were taken, or the batch was cancelled.
    NoneLeft,
}

#[derive(Default)]
struct WorkerState {
    batches: VecDeque<Arc<Batch>>,
    /// Threads that wait for work.
    waiting: usize,
    closing: bool,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct WorkerShared {
    state: Mutex<WorkerState>,
    wake: Condvar,
}

/// The threads of a client; started as work comes, up to a limit.
pub(crate) struct ClientWorkers {
    shared: Arc<WorkerShared>,
    most: usize,
}

impl ClientWorkers {
    /// At most `most` threads.
    pub fn new(most: usize) -> Self {
        ClientWorkers { shared: Arc::default(), most }
    }

    /// Starts work. Nothing runs after [`ClientWorkers::close`].
    pub fn start(&self, work: Arc<dyn BatchWork>) -> Arc<Batch> {
        let steps = work.steps();
        let batch = Batch::new(work);
        let mut state = self.shared.state.lock();
        if state.closing {
            batch.cancel();
            return batch;
        }
        if steps == 0 {
            return batch;
        }
        state.batches.push_back(Arc::clone(&batch));
        let wanted = steps.min(self.most);
        let missing = wanted.saturating_sub(state.waiting).min(self.most - state.threads.len());
        for _ in 0..missing {
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("spurline-read".into()).spawn(move || run_worker(&shared));
            match spawned {
                Ok(thread) => state.threads.push(thread),
                // The threads that run do all of the work.
                Err(_) if !state.threads.is_empty() => break,
                Err(_) => {
                    batch.cancel();
                    break;
                }
            }
        }
        drop(state);
        if wanted == 1 {
            self.shared.wake.notify_one();
        } else {
            self.shared.wake.notify_all();
        }
        batch
    }

    /// Cancels all work, and waits for the steps under way.
    pub fn close(&self) {
        let mut state = self.shared.state.lock();
        state.closing = true;
        state.batches.drain(..).for_each(|batch| batch.cancel());
        let threads = std::mem::take(&mut state.threads);
        drop(state);
        self.shared.wake.notify_all();
        for thread in threads {
            let _ = thread.join();
        }
    }
}

fn run_worker(shared: &WorkerShared) {
    let mut state = shared.state.lock();
    loop {
        let Some(batch) = state.batches.pop_front() else {
            if state.closing {
                return;
            }
            state.waiting += 1;
            shared.wake.wait(&mut state);
            state.waiting -= 1;
            continue;
        };
        let Some((step, more)) = batch.take_step() else { continue };
        if more {
            // At the end, so that batches take turns.
            state.batches.push_back(Arc::clone(&batch));
        }
        drop(state);
        batch.run(step);
        // The last reference to a batch is the caller's, who frees the memory with the interpreter's lock.
        drop(batch);
        state = shared.state.lock();
    }
}
