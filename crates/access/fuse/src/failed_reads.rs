//! Reads that failed after a long wait. The kernel reads ahead into the page cache. When such a read fails, the kernel reads the
//! page that a program waits for once more, alone, and only then does the program get the error. Tried again, that repetition
//! would wait as long as the first read. Here the repetition fails at once, with the errno of the first. It knows nothing of
//! files.
//!
//! Each page is refused once: the next read there is a new attempt of a program. A read past the page cache is never repeated by
//! the kernel, and does not come here.

use crate::errno::Errno;
use parking_lot::Mutex;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// After a shorter failure the repetition is allowed, and may succeed.
const SLOW_FAILURE: Duration = Duration::from_millis(500);
/// The kernel repeats a read as soon as the thread of the waiting program runs.
const REPETITION_WITHIN: Duration = Duration::from_secs(2);
/// A refused page that is tried again lies in the page cache, unless the memory was needed since. A page whose last failure is
/// older counts as new.
const REFUSAL_KEPT: Duration = Duration::from_secs(600);
/// Remembered failures: more than the requests that a session has under way. The oldest are replaced.
const FAILURES_MAX: usize = 256;

/// A failed read. Bytes before `refused_to` were refused once.
struct FailedRead {
    ino: u64,
    range: Range<u64>,
    refused_to: u64,
    errno: i32,
    failed_at: Instant,
    /// The last failure of a page that was refused.
    last_failure_at: Instant,
}

#[derive(Default)]
struct FailureList {
    reads: Vec<FailedRead>,
    /// The place of the next failure, when all places are taken.
    oldest: usize,
}

/// The failures of a session.
pub(crate) struct FailedReads {
    since: Instant,
    /// Until then repetitions are possible, in milliseconds after `since`: the only thing that a read looks at otherwise.
    expected_until_ms: AtomicU64,
    failures: Mutex<FailureList>,
}

impl Default for FailedReads {
    fn default() -> Self {
        FailedReads { since: Instant::now(), expected_until_ms: AtomicU64::new(0), failures: Mutex::default() }
    }
}

impl FailedReads {
    fn ms_until(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.since).as_millis()).unwrap_or(u64::MAX)
    }

    /// The errno of a read that only repeats a failed read.
    pub(crate) fn refuse_repetition(&self, ino: u64, offset: u64, len: u32, now: Instant) -> Option<Errno> {
        let expected_until_ms = self.expected_until_ms.load(Ordering::Relaxed);
        if expected_until_ms == 0 || self.ms_until(now) > expected_until_ms {
            return None;
        }
        let mut failures = self.failures.lock();
        let failed = failures.reads.iter_mut().find(|failed| {
            let not_refused = failed.refused_to..failed.range.end;
            failed.ino == ino && not_refused.contains(&offset) && now < failed.failed_at + REPETITION_WITHIN
        })?;
        failed.refused_to = offset + u64::from(len);
        Some(Errno(failed.errno))
    }

    /// Notes a failure, unless only the program can repeat the read: the page cache has the page already, without the bytes.
    pub(crate) fn note_failure(&self, ino: u64, offset: u64, len: u32, errno: Errno, began: Instant) {
        let failed_at = Instant::now();
        self.note_failure_at(
            FailedRead {
                ino,
                range: offset..offset + u64::from(len),
                refused_to: offset,
                errno: errno.0,
                failed_at,
                last_failure_at: failed_at,
            },
            failed_at.saturating_duration_since(began),
        );
    }

    fn note_failure_at(&self, failed: FailedRead, took: Duration) {
        if took < SLOW_FAILURE {
            return;
        }
        let mut failures = self.failures.lock();
        let refused_before = failures.reads.iter_mut().find(|other| {
            let refused = other.range.start..other.refused_to;
            let kept_until = other.last_failure_at + REFUSAL_KEPT;
            other.ino == failed.ino && refused.contains(&failed.range.start) && failed.failed_at < kept_until
        });
        if let Some(refused_before) = refused_before {
            refused_before.last_failure_at = failed.failed_at;
            return;
        }
        let until_ms = self.ms_until(failed.failed_at + REPETITION_WITHIN);
        if failures.reads.len() < FAILURES_MAX {
            failures.reads.push(failed);
        } else {
            let oldest = failures.oldest;
            failures.reads[oldest] = failed;
            failures.oldest = (oldest + 1) % FAILURES_MAX;
        }
        self.expected_until_ms.fetch_max(until_ms, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EIO: Errno = Errno(libc::EIO);
    const PAGE: u32 = 4096;

    fn fail(reads: &FailedReads, ino: u64, pages: Range<u64>, failed_at: Instant) {
        let range = pages.start * u64::from(PAGE)..pages.end * u64::from(PAGE);
        let refused_to = range.start;
        let failed = FailedRead { ino, range, refused_to, errno: libc::EIO, failed_at, last_failure_at: failed_at };
        reads.note_failure_at(failed, SLOW_FAILURE);
    }

    fn refused(reads: &FailedReads, ino: u64, page: u64, now: Instant) -> bool {
        reads.refuse_repetition(ino, page * u64::from(PAGE), PAGE, now).is_some()
    }

    #[test]
    fn the_repetition_of_a_failed_read_fails_at_once_and_the_attempt_after_that_is_made() {
        let reads = FailedReads::default();
        let now = Instant::now();
        assert!(!refused(&reads, 1, 0, now));
        fail(&reads, 1, 0..32, now);
        assert!(!refused(&reads, 2, 0, now) && !refused(&reads, 1, 32, now), "another file, and behind the range");
        assert_eq!(reads.refuse_repetition(1, 0, PAGE, now), Some(EIO));
        assert!(!refused(&reads, 1, 0, now), "the program's next attempt");
        // That one fails too: the page is in the page cache, and nothing repeats its read.
        fail(&reads, 1, 0..1, now);
        assert!(!refused(&reads, 1, 0, now));
        assert!(refused(&reads, 1, 7, now), "a page that was read ahead, and not refused yet");
        assert!(!refused(&reads, 1, 7, now));
        // In the next outage the page is read ahead again.
        let later = now + REFUSAL_KEPT;
        fail(&reads, 1, 0..32, later);
        assert!(refused(&reads, 1, 0, later) && !refused(&reads, 1, 0, later));
    }

    #[test]
    fn old_and_quick_failures_refuse_nothing() {
        let reads = FailedReads::default();
        let now = Instant::now();
        fail(&reads, 1, 0..32, now);
        assert!(!refused(&reads, 1, 0, now + REPETITION_WITHIN));
        fail(&reads, 2, 0..32, now + REPETITION_WITHIN);
        assert!(!refused(&reads, 1, 0, now + REPETITION_WITHIN), "another failure does not prolong it");
        reads.note_failure(3, 0, PAGE, EIO, Instant::now());
        assert!(!refused(&reads, 3, 0, Instant::now()));
    }

    #[test]
    fn the_memory_of_failures_is_bounded() {
        let reads = FailedReads::default();
        let now = Instant::now();
        (0..2 * FAILURES_MAX as u64).for_each(|ino| fail(&reads, ino, 0..1, now));
        assert_eq!(reads.failures.lock().reads.len(), FAILURES_MAX);
        assert!(!refused(&reads, 0, 0, now) && refused(&reads, 2 * FAILURES_MAX as u64 - 1, 0, now));
    }
}
