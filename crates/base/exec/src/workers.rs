//! A bounded pool of threads for urgent work (a caller waits) and work ahead of readers. Does not know the work: a job that hangs
//! costs one thread, not a caller past its deadline.

use crate::ThreadCpus;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Idle time before a thread ends.
const IDLE_THREAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Most queued jobs of [`PriorityWorkers::try_run_urgent`]: while the operating system hangs, jobs of callers that have left pile up.
const QUEUED_URGENT_MAX: usize = 4096;

type WorkerJob = Box<dyn FnOnce() + Send>;

/// Why a call has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoAnswer {
    /// The deadline passed before the call began: all threads are busy or hang.
    Queued,
    /// The deadline passed while the call ran.
    Running,
}

/// Threads that run jobs: urgent jobs first; ahead jobs leave a quarter of the threads free for urgent jobs. Threads start on
/// demand and end when idle.
pub struct PriorityWorkers {
    inner: Arc<WorkersInner>,
}

struct WorkersInner {
    name: &'static str,
    most: usize,
    most_queued_ahead: usize,
    cpus: ThreadCpus,
    state: Mutex<WorkersState>,
    work: Condvar,
}

#[derive(Default)]
struct WorkersState {
    urgent: VecDeque<WorkerJob>,
    ahead: VecDeque<WorkerJob>,
    threads: usize,
    idle: usize,
    running_ahead: usize,
    closed: bool,
}

impl PriorityWorkers {
    /// At most `most` threads called `name`, on the CPUs of the calling thread, and at most twice as many waiting
    /// ahead jobs.
    pub fn new(name: &'static str, most: usize) -> PriorityWorkers {
        let most = most.max(1);
        PriorityWorkers {
            inner: Arc::new(WorkersInner {
                name,
                most,
                most_queued_ahead: most * 2,
                cpus: ThreadCpus::of_current_thread(),
                state: Mutex::default(),
                work: Condvar::new(),
            }),
        }
    }

    /// Runs `job` as soon as a thread is free. Each urgent job has a waiting reader, so the requests in flight bound the number
    /// of jobs.
    pub fn run_urgent(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.inner.state.lock();
        state.urgent.push_back(Box::new(job));
        self.inner.wake_thread(&mut state);
    }

    /// As [`PriorityWorkers::run_urgent`]; when the queue is full, drops `job` and returns false. The job runs even when its caller
    /// has left, so the job must check for that.
    #[must_use]
    pub fn try_run_urgent(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.inner.state.lock();
        if state.urgent.len() >= QUEUED_URGENT_MAX {
            return false;
        }
        state.urgent.push_back(Box::new(job));
        self.inner.wake_thread(&mut state);
        true
    }

    /// Runs `call` as urgent work and waits for its result until the deadline. A call that has not begun by then does not run.
    ///
    /// # Errors
    /// [`NoAnswer`], also for a full queue or a panic.
    pub fn call_until<T: Send + 'static>(
        &self,
        deadline: Instant,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (sender, receiver) = mpsc::sync_channel(2);
        let queued = self.try_run_urgent(move || {
            // Fails for a caller that has left.
            if sender.send(None).is_ok() {
                let _ = sender.send(Some(call()));
            }
        });
        if !queued {
            return Err(NoAnswer::Queued);
        }
        let mut has_begun = false;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left) {
                Ok(None) => has_begun = true,
                Ok(Some(answer)) => return Ok(answer),
                Err(_) if has_begun => return Err(NoAnswer::Running),
                Err(_) => return Err(NoAnswer::Queued),
            }
        }
    }

    /// Queues `job` behind urgent jobs; when the queue is full, drops `job` and returns false.
    pub fn run_ahead(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let mut state = self.inner.state.lock();
        if state.ahead.len() >= self.inner.most_queued_ahead || state.closed {
            return false;
        }
        state.ahead.push_back(Box::new(job));
        self.inner.wake_thread(&mut state);
        true
    }

    /// As [`PriorityWorkers::run_ahead`], but runs the job in the calling thread when the queue is full, which slows
    /// that caller down.
    pub fn run_ahead_or_here(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.inner.state.lock();
        if state.ahead.len() >= self.inner.most_queued_ahead || state.closed {
            drop(state);
            return job();
        }
        state.ahead.push_back(Box::new(job));
        self.inner.wake_thread(&mut state);
    }
}

impl WorkersInner {
    fn wake_thread(self: &Arc<Self>, state: &mut WorkersState) {
        let waiting = state.urgent.len() + state.ahead.len();
        if state.idle >= waiting || state.threads >= self.most {
            self.work.notify_one();
            return;
        }
        let inner = Arc::clone(self);
        let spawned = std::thread::Builder::new().name(self.name.into()).spawn(move || inner.run_jobs());
        match spawned {
            Ok(_) => state.threads += 1,
            // No new thread: a running thread takes the job later, unless there is none.
            Err(_) if state.threads > 0 => {}
            Err(_) => {
                state.urgent.clear();
                state.ahead.clear();
            }
        }
    }

    fn run_jobs(&self) {
        self.cpus.apply_to_current_thread();
        let mut state = self.state.lock();
        loop {
            let ahead_allowed = state.running_ahead * 4 < self.most * 3;
            if let Some(job) = state.urgent.pop_front() {
                drop(state);
                run_caught(job);
                state = self.state.lock();
            } else if ahead_allowed && let Some(job) = state.ahead.pop_front() {
                state.running_ahead += 1;
                drop(state);
                run_caught(job);
                state = self.state.lock();
                state.running_ahead -= 1;
            } else if state.closed {
                break;
            } else {
                state.idle += 1;
                let timed_out = self.work.wait_for(&mut state, IDLE_THREAD_TIMEOUT).timed_out();
                state.idle -= 1;
                if timed_out && state.urgent.is_empty() && state.ahead.is_empty() {
                    break;
                }
            }
        }
        state.threads -= 1;
    }
}

/// A panicking job ends neither the thread nor the pool's counts. The drop of the job's values fails the block for waiting
/// readers.
fn run_caught(job: WorkerJob) {
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
}

impl Drop for PriorityWorkers {
    fn drop(&mut self) {
        let mut state = self.inner.state.lock();
        state.closed = true;
        state.ahead.clear();
        self.inner.work.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    #[test]
    fn runs_everything_on_few_threads() {
        let workers = PriorityWorkers::new("test", 4);
        let (done, results) = mpsc::channel();
        let most = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
        for n in 0..200 {
            let (done, most) = (done.clone(), Arc::clone(&most));
            workers.run_urgent(move || {
                let now = most.0.fetch_add(1, Ordering::SeqCst) + 1;
                most.1.fetch_max(now, Ordering::SeqCst);
                std::thread::yield_now();
                most.0.fetch_sub(1, Ordering::SeqCst);
                done.send(n).unwrap();
            });
        }
        let mut seen: Vec<i32> = (0..200).map(|_| results.recv_timeout(Duration::from_secs(10)).unwrap()).collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..200).collect::<Vec<_>>());
        assert!(most.1.load(Ordering::SeqCst) <= 4);
    }

    #[test]
    fn a_thread_that_keeps_to_one_cpu_starts_threads_that_do_not() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let before = sched_getaffinity(None).unwrap();
        if before.count() < 2 {
            return println!("SKIP: this process may run on one CPU only");
        }
        let workers = PriorityWorkers::new("test", 4);
        let (tell, told) = mpsc::channel();
        let starter = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap());
            sched_setaffinity(None, &one).unwrap();
            workers.run_urgent(move || tell.send(sched_getaffinity(None).unwrap()).unwrap());
            workers
        });
        assert!(told.recv_timeout(Duration::from_secs(10)).unwrap() == before);
        drop(starter.join());
    }

    #[test]
    fn a_hung_job_costs_no_caller() {
        let workers = PriorityWorkers::new("test", 2);
        let (release, hold) = mpsc::channel::<()>();
        let soon = || Instant::now() + Duration::from_millis(50);
        assert_eq!(workers.call_until(soon(), move || hold.recv().is_ok()), Err(NoAnswer::Running));
        let later = Instant::now() + Duration::from_secs(20);
        for n in 0..10 {
            assert_eq!(workers.call_until(later, move || n), Ok(n));
        }
        let (release2, hold2) = mpsc::channel::<()>();
        assert_eq!(workers.call_until(soon(), move || hold2.recv().is_ok()), Err(NoAnswer::Running));
        assert_eq!(workers.call_until(soon(), || 1), Err(NoAnswer::Queued));
        // Jobs of callers that have left do not pile up without limit.
        let refused = (0..2 * QUEUED_URGENT_MAX).filter(|_| !workers.try_run_urgent(|| {})).count();
        assert!(refused >= QUEUED_URGENT_MAX, "{refused}");
        assert_eq!(workers.call_until(later, || 3), Err(NoAnswer::Queued));
        drop((release, release2));
        while workers.call_until(later, || 2) != Ok(2) {
            assert!(Instant::now() < later, "the queue empties");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_panic_is_no_answer_and_no_loss() {
        let workers = PriorityWorkers::new("test", 1);
        let later = Instant::now() + Duration::from_secs(20);
        assert_eq!(workers.call_until(later, || -> u8 { panic!("on purpose") }), Err(NoAnswer::Running));
        assert_eq!(workers.call_until(later, || 3), Ok(3));
    }

    #[test]
    fn blocked_ahead_jobs_leave_threads_for_urgent_ones_and_panics_do_no_harm() {
        let workers = PriorityWorkers::new("test", 4);
        let (release, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let accepted = (0..100)
            .filter(|_| {
                let gate = Arc::clone(&gate);
                workers.run_ahead(move || {
                    let _ = gate.lock().recv_timeout(Duration::from_secs(10));
                })
            })
            .count();
        assert!(accepted < 100, "the queue of ahead jobs is bounded");
        workers.run_urgent(|| panic!("a job may fail"));
        let (done, result) = mpsc::channel();
        workers.run_urgent(move || done.send(7).unwrap());
        assert_eq!(result.recv_timeout(Duration::from_secs(5)).unwrap(), 7);
        for _ in 0..accepted {
            let _ = release.send(());
        }
    }
}
