//! Permits to wait for events: a permit per CPU, and another for each worker whose request takes long. A burst of small requests
//! is then answered by few threads that stay awake between requests, while a worker that waits for a disk or another machine
//! blocks no other. Knows no connection.

use parking_lot::{Condvar, Mutex};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A worker without a permit for this long is superfluous.
const SPARE_TIMEOUT: Duration = Duration::from_secs(10);

thread_local! {
    /// The permit with which this thread began the request, and when.
    static ON: Cell<(usize, u64)> = const { Cell::new((0, 0)) };
}

/// The permits of a worker pool.
pub struct WorkerPermits {
    started: Instant,
    /// A worker that takes longer for a request loses the permit to another worker.
    long: Duration,
    /// When the current request of each permit's worker began, in µs since the start; 0 while the worker waits for events.
    since: Box<[AtomicU64]>,
    /// Requests begun so far, for the periodic check whether there are any.
    begun: AtomicU64,
    /// Workers without a permit.
    waiting: AtomicUsize,
    /// The check for long requests is suspended, as there were no requests.
    asleep: AtomicBool,
    inner: Mutex<WorkerPermitState>,
    /// For the worker that checks for long requests, and for the other workers without a permit.
    watcher: Condvar,
    reserve: Condvar,
}

struct WorkerPermitState {
    free: Vec<usize>,
    watched: bool,
    over: bool,
}

/// The right to wait for events; returned when dropped.
pub struct WorkerPermit<'a> {
    permits: &'a WorkerPermits,
    slot: usize,
}

impl WorkerPermits {
    /// Permits for `at_once` workers, never none. A worker loses the permit when a request takes `long`.
    pub fn new(at_once: usize, long: Duration) -> Self {
        let at_once = at_once.max(1);
        WorkerPermits {
            started: Instant::now(),
            long,
            since: (0..at_once).map(|_| AtomicU64::new(0)).collect(),
            begun: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            inner: Mutex::new(WorkerPermitState { free: (0..at_once).rev().collect(), watched: false, over: false }),
            watcher: Condvar::new(),
            reserve: Condvar::new(),
        }
    }

    /// Workers without a permit.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Ends the issue of permits.
    pub fn shut_down(&self) {
        self.inner.lock().over = true;
        self.watcher.notify_all();
        self.reserve.notify_all();
    }

    /// Releases the permit of this thread's current request, because the thread is about to block.
    pub fn release_current(&self) {
        let (slot, begun) = ON.take();
        if begun != 0 && self.since[slot].compare_exchange(begun, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            drop(WorkerPermit { permits: self, slot });
        }
    }

    /// Starts the next request of this thread, so that the previous requests do not count as long. Returns whether the thread
    /// still holds the permit.
    pub fn renew_current(&self) -> bool {
        let (slot, begun) = ON.get();
        if begun == 0 {
            return false;
        }
        let now = self.now_us();
        let own = self.since[slot].compare_exchange(begun, now, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        ON.set(if own { (slot, now) } else { (0, 0) });
        own
    }

    fn now_us(&self) -> u64 {
        // Never 0, which means no request.
        self.started.elapsed().as_micros() as u64 + 1
    }

    /// Waits for a permit; `None` after the shutdown, or when this worker was not needed for a long time.
    pub fn acquire_permit(&self) -> Option<WorkerPermit<'_>> {
        let mut inner = self.inner.lock();
        if inner.over {
            return None;
        }
        if let Some(slot) = inner.free.pop() {
            return Some(WorkerPermit { permits: self, slot });
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let came = Instant::now();
        let slot = loop {
            if inner.over {
                break None;
            }
            if let Some(slot) = inner.free.pop() {
                break Some(slot);
            }
            let late = came.elapsed() > SPARE_TIMEOUT;
            if inner.watched {
                if late {
                    // Another worker checks already.
                    break None;
                }
                self.reserve.wait_for(&mut inner, SPARE_TIMEOUT);
                continue;
            }
            if late && self.is_needless() {
                self.reserve.notify_one();
                return None;
            }
            // Requests that are overdue now need no further wait.
            if let Some(slot) = self.long() {
                break Some(slot);
            }
            inner.watched = true;
            let begun = self.begun.load(Ordering::SeqCst);
            let timed_out = self.watcher.wait_for(&mut inner, self.long).timed_out();
            let idle = timed_out && begun == self.begun.load(Ordering::SeqCst) && self.nothing_begun();
            if idle && !inner.over && inner.free.is_empty() {
                // A request that begins now either sees this flag or is seen here.
                self.asleep.store(true, Ordering::SeqCst);
                if self.nothing_begun() {
                    self.watcher.wait_for(&mut inner, SPARE_TIMEOUT);
                }
                self.asleep.store(false, Ordering::SeqCst);
            }
            inner.watched = false;
            if let Some(slot) = self.long() {
                break Some(slot);
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if !inner.watched {
            self.reserve.notify_one();
        }
        slot.map(|slot| WorkerPermit { permits: self, slot })
    }

    fn nothing_begun(&self) -> bool {
        self.since.iter().all(|since| since.load(Ordering::SeqCst) == 0)
    }

    /// Whether this worker may end although a long request would need a worker; the worker is then no longer counted.
    fn is_needless(&self) -> bool {
        // A request that begins now either sees the lower count or is seen here.
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.nothing_begun() {
            return true;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        false
    }

    /// Takes the permit of a worker whose request takes long.
    fn long(&self) -> Option<usize> {
        let before = self.now_us().saturating_sub(self.long.as_micros() as u64);
        self.since.iter().position(|since| {
            let begun = since.load(Ordering::SeqCst);
            begun != 0
                && begun <= before
                && since.compare_exchange(begun, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        })
    }
}

impl<'a> WorkerPermit<'a> {
    /// Marks the start of a request on this thread.
    pub fn begin_request(&self) {
        let now = self.permits.now_us();
        self.permits.since[self.slot].store(now, Ordering::SeqCst);
        ON.set((self.slot, now));
        self.permits.begun.fetch_add(1, Ordering::SeqCst);
        if self.permits.asleep.load(Ordering::SeqCst) {
            let _inner = self.permits.inner.lock();
            self.permits.watcher.notify_one();
        }
    }

    /// Marks the end of the request. Returns the permit, unless another worker has taken the permit.
    pub fn end_request(self) -> Option<WorkerPermit<'a>> {
        let (_, begun) = ON.take();
        // Two requests of the same permit never begin at the same time: there was a long request in between.
        let since = &self.permits.since[self.slot];
        if begun != 0 && since.compare_exchange(begun, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return Some(self);
        }
        std::mem::forget(self);
        None
    }
}

impl Drop for WorkerPermit<'_> {
    fn drop(&mut self) {
        let mut inner = self.permits.inner.lock();
        inner.free.push(self.slot);
        let watched = inner.watched;
        drop(inner);
        if watched {
            self.permits.watcher.notify_one()
        } else {
            self.permits.reserve.notify_one()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LONG: Duration = Duration::from_millis(2);

    fn soon() -> Duration {
        Duration::from_secs(60)
    }

    #[test]
    fn a_turn_that_takes_long_is_another_workers() {
        let permits = WorkerPermits::new(1, LONG);
        let first = permits.acquire_permit().unwrap();
        first.begin_request();
        std::thread::scope(|scope| {
            let (has, had) = channel();
            let (go, gone) = channel::<()>();
            let permits = &permits;
            scope.spawn(move || {
                let second = permits.acquire_permit().unwrap();
                has.send(()).unwrap();
                gone.recv_timeout(soon()).unwrap();
                drop(second);
            });
            // It gets the permit although the first worker never returns it.
            had.recv_timeout(soon()).unwrap();
            assert!(first.end_request().is_none() && permits.waiting() == 0);
            go.send(()).unwrap();
            // The worker that lost the permit gets it once it is returned.
            let again = permits.acquire_permit().unwrap();
            again.begin_request();
            drop(again.end_request());
        });
        assert_eq!(permits.inner.lock().free.len(), 1);
    }

    #[test]
    fn a_worker_that_is_about_to_wait_gives_its_turn_away() {
        let permits = WorkerPermits::new(1, LONG);
        let first = permits.acquire_permit().unwrap();
        permits.release_current();
        first.begin_request();
        permits.release_current();
        // Without waiting: it is there.
        let second = permits.acquire_permit().unwrap();
        assert!(first.end_request().is_none() && permits.inner.lock().free.is_empty());
        drop(second);
        assert_eq!(permits.inner.lock().free.len(), 1);
    }

    #[test]
    fn turns_are_given_on_among_many_and_end() {
        let permits = WorkerPermits::new(2, LONG);
        let served = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for worker in 0..6u64 {
                let (permits, served) = (&permits, &served);
                scope.spawn(move || {
                    let mut held = None;
                    while let Some(permit) = held.take().or_else(|| permits.acquire_permit()) {
                        permit.begin_request();
                        if (served.fetch_add(1, Ordering::SeqCst) as u64 + worker).is_multiple_of(50) {
                            std::thread::sleep(2 * LONG);
                        }
                        held = permit.end_request();
                        if served.load(Ordering::SeqCst).is_multiple_of(7) {
                            held = None;
                        }
                    }
                });
            }
            let until = Instant::now() + soon();
            while served.load(Ordering::SeqCst) < 2000 {
                assert!(Instant::now() < until, "no worker has a permit");
                std::thread::yield_now();
            }
            permits.shut_down();
        });
        assert!(permits.acquire_permit().is_none() && permits.waiting() == 0);
        assert_eq!(permits.inner.lock().free.len(), 2, "a permit was lost or made");
    }
}
