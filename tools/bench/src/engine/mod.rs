//! The threads of every load: all start at once, work until all work is done or a time has passed, and end with the first
//! failure. Knows no file and no figure.

pub mod agent;
pub mod crew;
mod mapping;
pub mod pattern;

use crate::error::{BenchError, Result};
use crate::stop;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Interval in which the threads are watched.
const WATCH_INTERVAL: Duration = Duration::from_millis(5);
/// Interval of a rate over time.
pub const SAMPLE_INTERVAL: Duration = Duration::from_millis(250);

/// The state that the threads of a load share.
#[derive(Debug, Default)]
pub struct ThreadCrew {
    stopped: AtomicBool,
    bytes: AtomicU64,
    items: AtomicU64,
    next: AtomicUsize,
    ready: AtomicUsize,
    window: AtomicBool,
}

impl ThreadCrew {
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Counts bytes that were moved.
    pub fn add_bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts a file, block or object.
    pub fn add_item(&self) {
        self.items.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts an accelerator that has computed once.
    pub fn add_ready(&self) {
        self.ready.fetch_add(1, Ordering::Relaxed);
    }

    pub fn ready(&self) -> usize {
        self.ready.load(Ordering::Relaxed)
    }

    /// Lets accelerators measure from now on.
    pub fn start_window(&self) {
        self.window.store(true, Ordering::Relaxed);
    }

    /// Whether accelerators measure.
    pub fn is_window_open(&self) -> bool {
        self.window.load(Ordering::Relaxed)
    }

    /// The number of the next piece of work of a list below `count` that all threads share.
    pub fn take(&self, count: usize) -> Option<usize> {
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|next| *next < count && !self.is_stopped())
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn items(&self) -> u64 {
        self.items.load(Ordering::Relaxed)
    }
}

/// The results of the threads of a load.
#[derive(Debug)]
pub struct CrewRun<T> {
    /// The result of each thread.
    pub lanes: Vec<T>,
    /// Seconds from the common start to the end of the last thread.
    pub seconds: f64,
    pub bytes: u64,
    /// Files, blocks or objects.
    pub items: u64,
}

/// Ends the other threads when the thread of this guard panics.
struct PanicGuard<'a>(&'a ThreadCrew);

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop();
        }
    }
}

/// Runs `work` on each of `threads` threads at once. `watch` is called in between with the time since the start, and ends the
/// threads by an answer of `false`.
pub fn run_threads<T: Send>(
    threads: usize,
    work: impl Fn(&ThreadCrew, usize) -> Result<T> + Sync,
    mut watch: impl FnMut(&ThreadCrew, Duration) -> Result<bool>,
) -> Result<CrewRun<T>> {
    let crew = &ThreadCrew::default();
    let start = &Barrier::new(threads + 1);
    let work = &work;
    std::thread::scope(|scope| {
        let lanes: Vec<_> = (0..threads)
            .map(|lane| {
                scope.spawn(move || {
                    let _guard = PanicGuard(crew);
                    start.wait();
                    let began = Instant::now();
                    let done = work(crew, lane);
                    if done.is_err() {
                        crew.stop();
                    }
                    (began, Instant::now(), done)
                })
            })
            .collect();
        start.wait();
        let began = Instant::now();
        let mut failed: Option<(Instant, BenchError)> = None;
        while !lanes.iter().all(|lane| lane.is_finished()) {
            if !crew.is_stopped() {
                match stop::check_stop().and_then(|()| watch(crew, began.elapsed())) {
                    Ok(true) => {}
                    Ok(false) => crew.stop(),
                    Err(error) => {
                        crew.stop();
                        failed = Some((Instant::now(), error));
                    }
                }
            }
            std::thread::sleep(WATCH_INTERVAL);
        }
        let mut done = Vec::new();
        // This thread may see the start late, and the end.
        let mut first = Instant::now();
        let mut last = began;
        for lane in lanes {
            let panicked = || Err(BenchError::Failed("a thread of the load panicked".into()));
            let (from, to, result) = lane.join().unwrap_or_else(|_| (began, began, panicked()));
            first = first.min(from);
            last = last.max(to);
            match result {
                Ok(value) => done.push(value),
                Err(error) if failed.as_ref().is_none_or(|(at, _)| to < *at) => failed = Some((to, error)),
                Err(_) => {}
            }
        }
        match failed {
            Some((_, error)) => Err(error),
            None => Ok(CrewRun {
                lanes: done,
                seconds: last.saturating_duration_since(first).as_secs_f64(),
                bytes: crew.bytes(),
                items: crew.items(),
            }),
        }
    })
}

/// For [`run_threads`]: until all work is done.
pub fn to_the_end(_: &ThreadCrew, _: Duration) -> Result<bool> {
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_share_work_and_end_together() {
        let run = run_threads(
            3,
            |crew, lane| {
                while crew.take(100).is_some() {
                    crew.add_bytes(2);
                    crew.add_item();
                }
                Ok(lane)
            },
            to_the_end,
        );
        let run = run.unwrap();
        assert_eq!((run.lanes, run.bytes, run.items), (vec![0, 1, 2], 200, 100));
        assert!(run.seconds > 0.0);
        // A time ends threads that would go on.
        let endless = |crew: &ThreadCrew, _: usize| {
            while !crew.is_stopped() {
                std::thread::yield_now();
            }
            Ok(())
        };
        let time = Duration::from_millis(20);
        assert!(run_threads(2, endless, |_, elapsed| Ok(elapsed < time)).unwrap().seconds >= 0.02);
        // So do a failure and a panic of one of them, and a failure of the watch.
        let failing = |crew: &ThreadCrew, lane: usize| {
            assert!(lane != 2, "a panic");
            if lane == 1 { Err(BenchError::Failed("broke".into())) } else { endless(crew, lane) }
        };
        let said = |threads| run_threads(threads, failing, to_the_end).unwrap_err().to_string();
        assert_eq!(said(2), "broke");
        assert!(!said(3).is_empty());
        let watch = |_: &ThreadCrew, _| Err(BenchError::Failed("watched".into()));
        assert_eq!(run_threads(2, endless, watch).unwrap_err().to_string(), "watched");
    }
}
