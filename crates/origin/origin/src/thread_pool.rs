//! A bounded pool of threads that block in system calls on behalf of callers. It deliberately knows no file and no
//! directory: jobs are closures, and a job that hangs costs one thread, not a caller past its deadline.

use parking_lot::Mutex;
use spurline_exec::ThreadCpus;
use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

type PoolJob = Box<dyn FnOnce() + Send>;

struct JobQueue {
    jobs: VecDeque<PoolJob>,
    /// Threads waiting for a job.
    idle: usize,
    threads: usize,
    closed: bool,
}

struct PoolShared {
    queue: Mutex<JobQueue>,
    wake: parking_lot::Condvar,
    limit: usize,
    cpus: ThreadCpus,
}

/// Threads start when all others are busy, up to the limit, and end after a time without work.
pub(crate) struct ThreadPool {
    shared: Arc<PoolShared>,
}

/// A thread without work for this long ends.
const IDLE: Duration = Duration::from_secs(30);

/// Most queued jobs. While the operating system hangs, jobs of callers that have left pile up; further jobs are
/// refused at once.
const QUEUE: usize = 4096;

/// Why a job has no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// The deadline passed before the job started: all threads are busy or hang.
    Queued,
    /// The deadline passed while the job ran.
    Running,
}

impl ThreadPool {
    pub(crate) fn new(limit: usize) -> Self {
        let queue = JobQueue { jobs: VecDeque::new(), idle: 0, threads: 0, closed: false };
        ThreadPool {
            shared: Arc::new(PoolShared {
                queue: Mutex::new(queue),
                wake: parking_lot::Condvar::new(),
                limit: limit.max(1),
                cpus: ThreadCpus::of_current_thread(),
            }),
        }
    }

    /// Queues a job; `false` when the queue is full. It runs even when its caller has left, so it must check for that
    /// itself.
    #[must_use]
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let mut queue = self.shared.queue.lock();
        if queue.jobs.len() >= QUEUE {
            return false;
        }
        queue.jobs.push_back(Box::new(job));
        if queue.idle >= queue.jobs.len() {
            self.shared.wake.notify_one();
        } else if queue.threads < self.shared.limit {
            queue.threads += 1;
            drop(queue);
            let shared = Arc::clone(&self.shared);
            let spawned = std::thread::Builder::new().name("under-dir".into()).spawn(move || worker_loop(&shared));
            if spawned.is_err() {
                // The running threads will take the job; without any, callers reach their deadlines.
                self.shared.queue.lock().threads -= 1;
            }
        }
        true
    }

    /// Runs `f` on the pool and waits for its result until the deadline.
    pub(crate) fn call_until<T: Send + 'static>(
        &self,
        deadline: Instant,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (sender, receiver) = mpsc::sync_channel(2);
        let queued = self.submit(move || {
            // Make no system call for a caller that has left.
            if sender.send(None).is_ok() {
                let _ = sender.send(Some(f()));
            }
        });
        if !queued {
            return Err(NoAnswer::Queued);
        }
        let mut begun = false;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match receiver.recv_timeout(left) {
                Ok(None) => begun = true,
                Ok(Some(answer)) => return Ok(answer),
                Err(_) if begun => return Err(NoAnswer::Running),
                Err(_) => return Err(NoAnswer::Queued),
            }
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.closed = true;
        queue.jobs.clear();
        drop(queue);
        // Threads are not joined: one may hang in a system call for ever.
        self.shared.wake.notify_all();
    }
}

fn worker_loop(shared: &PoolShared) {
    shared.cpus.apply_to_current_thread();
    let mut queue = shared.queue.lock();
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            drop(queue);
            // A job that panics must not end its thread; its caller sees the channel close.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            queue = shared.queue.lock();
            continue;
        }
        if queue.closed {
            break;
        }
        queue.idle += 1;
        let timed_out = shared.wake.wait_for(&mut queue, IDLE).timed_out();
        queue.idle -= 1;
        if timed_out && queue.jobs.is_empty() {
            break;
        }
    }
    queue.threads -= 1;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hung_job_costs_no_caller() {
        let pool = ThreadPool::new(2);
        let (release, hold) = mpsc::channel::<()>();
        let soon = || Instant::now() + Duration::from_millis(50);
        assert_eq!(pool.call_until(soon(), move || hold.recv().is_ok()), Err(NoAnswer::Running));
        let later = Instant::now() + Duration::from_secs(20);
        for n in 0..10 {
            assert_eq!(pool.call_until(later, move || n), Ok(n));
        }
        let (release2, hold2) = mpsc::channel::<()>();
        assert_eq!(pool.call_until(soon(), move || hold2.recv().is_ok()), Err(NoAnswer::Running));
        assert_eq!(pool.call_until(soon(), || 1), Err(NoAnswer::Queued));
        // Jobs of callers that have left do not pile up without limit.
        let refused = (0..2 * QUEUE).filter(|_| !pool.submit(|| {})).count();
        assert!(refused >= QUEUE, "{refused}");
        assert_eq!(pool.call_until(later, || 3), Err(NoAnswer::Queued));
        drop((release, release2));
        while !pool.submit(|| {}) {
            std::thread::yield_now();
        }
        assert_eq!(pool.call_until(later, || 2), Ok(2));
    }

    #[test]
    fn a_thread_that_keeps_to_one_cpu_starts_threads_that_do_not() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let before = sched_getaffinity(None).unwrap();
        if before.count() < 2 {
            return println!("SKIP: this process may run on one CPU only");
        }
        let pool = ThreadPool::new(2);
        let asker = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap());
            sched_setaffinity(None, &one).unwrap();
            pool.call_until(Instant::now() + Duration::from_secs(20), || sched_getaffinity(None).unwrap())
        });
        assert!(asker.join().unwrap() == Ok(before));
    }

    #[test]
    fn a_panic_is_no_answer_and_no_loss() {
        let pool = ThreadPool::new(1);
        let later = Instant::now() + Duration::from_secs(20);
        assert_eq!(pool.call_until(later, || -> u8 { panic!("on purpose") }), Err(NoAnswer::Running));
        assert_eq!(pool.call_until(later, || 3), Ok(3));
    }
}
