//! A bounded pool of threads that wait for the operating system in a caller's place.
//! It deliberately knows no file and no directory: jobs are closures, and a job that hangs costs one thread, not a
//! caller past its deadline.

use parking_lot::Mutex;
use spurline_volume::Cpus;
use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

struct Queue {
    jobs: VecDeque<Job>,
    /// Threads waiting for a job.
    idle: usize,
    threads: usize,
    closed: bool,
}

struct Shared {
    queue: Mutex<Queue>,
    wake: parking_lot::Condvar,
    limit: usize,
    cpus: Cpus,
}

/// Threads are made when all others are busy, up to the limit, and leave after a time without work.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

/// A thread without work for this long ends.
const IDLE: Duration = Duration::from_secs(30);

/// Jobs queued at most. While the operating system hangs, jobs of callers that have left pile up; further callers are
/// refused at once instead.
const QUEUE: usize = 4096;

/// Why a job gave no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoAnswer {
    /// The deadline passed before the job had begun: all threads are busy or hang.
    Queued,
    /// The deadline passed while the job ran.
    Running,
}

impl Pool {
    pub(crate) fn new(limit: usize) -> Self {
        let queue = Queue { jobs: VecDeque::new(), idle: 0, threads: 0, closed: false };
        Pool {
            shared: Arc::new(Shared {
                queue: Mutex::new(queue),
                wake: parking_lot::Condvar::new(),
                limit: limit.max(1),
                cpus: Cpus::here(),
            }),
        }
    }

    /// Queues a job; `false` when the queue is full. It runs even when nobody waits for it any more, so it looks whether
    /// anybody does.
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
            let spawned = std::thread::Builder::new().name("under-dir".into()).spawn(move || work(&shared));
            if spawned.is_err() {
                // The threads there are will come to it; with none, callers run into their deadlines.
                self.shared.queue.lock().threads -= 1;
            }
        }
        true
    }

    /// Runs `f` on the pool and waits for its answer until the deadline.
    pub(crate) fn call<T: Send + 'static>(
        &self,
        deadline: Instant,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, NoAnswer> {
        let (sender, receiver) = mpsc::sync_channel(2);
        let queued = self.submit(move || {
            // A caller that has left gets no system call made in its name.
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

impl Drop for Pool {
    fn drop(&mut self) {
        let mut queue = self.shared.queue.lock();
        queue.closed = true;
        queue.jobs.clear();
        drop(queue);
        // Threads are not waited for: one may hang in the operating system for ever.
        self.shared.wake.notify_all();
    }
}

fn work(shared: &Shared) {
    shared.cpus.take();
    let mut queue = shared.queue.lock();
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            drop(queue);
            // A job that panics must not take a thread of the pool along; its caller sees its channel close.
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
        let pool = Pool::new(2);
        let (release, hold) = mpsc::channel::<()>();
        let soon = || Instant::now() + Duration::from_millis(50);
        assert_eq!(pool.call(soon(), move || hold.recv().is_ok()), Err(NoAnswer::Running));
        let later = Instant::now() + Duration::from_secs(20);
        for n in 0..10 {
            assert_eq!(pool.call(later, move || n), Ok(n));
        }
        let (release2, hold2) = mpsc::channel::<()>();
        assert_eq!(pool.call(soon(), move || hold2.recv().is_ok()), Err(NoAnswer::Running));
        assert_eq!(pool.call(soon(), || 1), Err(NoAnswer::Queued));
        // Callers that left their jobs behind do not pile them up without end.
        let refused = (0..2 * QUEUE).filter(|_| !pool.submit(|| {})).count();
        assert!(refused >= QUEUE, "{refused}");
        assert_eq!(pool.call(later, || 3), Err(NoAnswer::Queued));
        drop((release, release2));
        while !pool.submit(|| {}) {
            std::thread::yield_now();
        }
        assert_eq!(pool.call(later, || 2), Ok(2));
    }

    #[test]
    fn a_thread_that_keeps_to_one_cpu_starts_threads_that_do_not() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
        let before = sched_getaffinity(None).unwrap();
        if before.count() < 2 {
            return println!("SKIP: this process may run on one CPU only");
        }
        let pool = Pool::new(2);
        let asker = std::thread::spawn(move || {
            let mut one = CpuSet::new();
            one.set((0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap());
            sched_setaffinity(None, &one).unwrap();
            pool.call(Instant::now() + Duration::from_secs(20), || sched_getaffinity(None).unwrap())
        });
        assert!(asker.join().unwrap() == Ok(before));
    }

    #[test]
    fn a_panic_is_no_answer_and_no_loss() {
        let pool = Pool::new(1);
        let later = Instant::now() + Duration::from_secs(20);
        assert_eq!(pool.call(later, || -> u8 { panic!("on purpose") }), Err(NoAnswer::Running));
        assert_eq!(pool.call(later, || 3), Ok(3));
    }
}
