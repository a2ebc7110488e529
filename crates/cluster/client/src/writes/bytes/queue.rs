//! What the sender threads have to do, in the order of its time. It knows no requests.

use super::FileBytes;
use parking_lot::{Condvar, Mutex};
use std::collections::VecDeque;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// How long a piece waits for more bytes.
pub(super) const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// How much earlier a piece is sent, so that one timer serves many.
const DUE_TOGETHER: Duration = Duration::from_millis(50);

/// A file with something to send.
pub(crate) enum SendJob {
    /// One full piece.
    Piece(Weak<FileBytes>),
    /// A sync, so that memory becomes free.
    Room,
    /// The open file with this number, which the program has closed while no node took its bytes; tried until then.
    Close { number: u64, until: Instant },
}

/// A job for a sender thread.
pub(crate) struct NextJob {
    pub job: SendJob,
    /// All bytes of the file are due.
    pub all: bool,
}

#[derive(Default)]
struct SendJobs {
    ready: VecDeque<SendJob>,
    /// In the order of their times.
    due: VecDeque<(Instant, SendJob)>,
    ended: bool,
}

/// What the sender threads have to do.
#[derive(Default)]
pub(crate) struct SendQueue {
    jobs: Mutex<SendJobs>,
    added: Condvar,
}

impl SendQueue {
    /// Ends the threads.
    pub fn end(&self) {
        self.jobs.lock().ended = true;
        self.added.notify_all();
    }

    pub fn push_ready(&self, job: SendJob) {
        self.jobs.lock().ready.push_back(job);
        self.added.notify_one();
    }

    pub fn push_due(&self, job: SendJob) {
        let mut jobs = self.jobs.lock();
        let last = jobs.due.back().map(|(at, _)| *at);
        let at = round_due(Instant::now() + LONGEST_WAIT, last);
        jobs.due.push_back((at, job));
        let first = jobs.due.len() == 1;
        drop(jobs);
        if first {
            self.added.notify_one();
        }
    }

    /// Waits for the next job; `None` at the end.
    pub fn next_job(&self) -> Option<NextJob> {
        let mut jobs = self.jobs.lock();
        loop {
            if jobs.ended {
                return None;
            }
            if let Some(job) = jobs.ready.pop_front() {
                return Some(NextJob { job, all: false });
            }
            match jobs.due.front().map(|(at, _)| *at) {
                None => self.added.wait(&mut jobs),
                Some(at) if at <= Instant::now() => {
                    let (_, job) = jobs.due.pop_front()?;
                    return Some(NextJob { job, all: true });
                }
                Some(at) => {
                    self.added.wait_until(&mut jobs, at);
                }
            }
        }
    }
}

/// When a job is due that could be due `at`, after a job that is due at `last`: with it, if that is a little earlier. Most
/// pieces of small files are sent long before, and a timer for each would cost more than the piece.
fn round_due(at: Instant, last: Option<Instant>) -> Instant {
    last.filter(|last| at.saturating_duration_since(*last) < DUE_TOGETHER).unwrap_or(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_that_follow_each_other_share_a_timer_and_none_is_late() {
        let begun = Instant::now() + LONGEST_WAIT;
        let (mut last, mut timers) = (None, 0);
        for ms in 0..1000 {
            let at = begun + Duration::from_millis(ms);
            let due = round_due(at, last);
            assert!(due <= at && at < due + DUE_TOGETHER);
            timers += u64::from(last != Some(due));
            last = Some(due);
        }
        assert_eq!(timers, 20);
    }
}
