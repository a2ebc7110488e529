//! Open files and directories that processes are to close: one request for many. It knows neither bytes nor names, nor which files
//! programs have open.
//!
//! A close of the program has returned before, so nothing waits for these requests; only the first one for a file with locks is
//! waited for. A request that failed is repeated: a session that goes on keeps a file and its locks for ever.

use super::{CallDeadline, CallEnd, CallTarget, HomeProcess, WriteCalls, is_transient};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{LOCK_TIMES, NumberList, WriteCall};
use spurline_types::ErrorKind;
use spurline_volume::writes::Caller;
use std::time::{Duration, Instant};

/// Numbers of one request; the thread that closes one more sends it.
const NUMBERS_MAX: usize = 64;
/// How long requests for a file with locks are repeated while the program waits, as a broken connection is made again, and their
/// interval.
const LOCKED_WAIT: Duration = Duration::from_millis(500);
const LOCKED_PAUSE: Duration = Duration::from_millis(20);

/// A file that a process may still have open, as a request to close it failed.
#[derive(Clone)]
pub(in crate::writes) struct FailedClose {
    since: Instant,
    pub home: HomeProcess,
    pub number: u64,
}

impl FailedClose {
    /// Whether the process has ended the session since, as it got no request.
    pub fn is_settled(&self) -> bool {
        self.since.elapsed() >= LOCK_TIMES.close_give_up
    }
}

#[derive(Default)]
struct ClosedState {
    files: Vec<(HomeProcess, u64)>,
    failed: Vec<FailedClose>,
    ended: bool,
}

/// The files that are closed and not reported.
#[derive(Default)]
pub(super) struct CloseQueue {
    state: Mutex<ClosedState>,
    added: Condvar,
}

impl WriteCalls {
    /// Ends [`WriteCalls::wait_closes`].
    pub fn end_closes(&self) {
        self.closes.state.lock().ended = true;
        self.closes.added.notify_all();
    }

    /// Waits for a file to close, or until it is time to repeat a request; false at the end.
    pub fn wait_closes(&self, retry_at: Instant) -> bool {
        let mut state = self.closes.state.lock();
        while state.files.is_empty() && !state.ended {
            if state.failed.is_empty() {
                self.closes.added.wait(&mut state);
            } else if self.closes.added.wait_until(&mut state, retry_at).timed_out() {
                break;
            }
        }
        !state.ended
    }

    /// Closes a file together with others.
    pub fn close_soon(&self, home: HomeProcess, number: u64) {
        let mut state = self.closes.state.lock();
        state.files.push((home, number));
        let waiting = state.files.len();
        drop(state);
        if waiting == 1 {
            self.closes.added.notify_one();
        } else if waiting >= NUMBERS_MAX {
            self.report_closed();
        }
    }

    /// Reports the closed files. A source may keep the name of a removed file for as long as it is open, as NFS does.
    pub fn report_closed(&self) {
        let mut files = std::mem::take(&mut self.closes.state.lock().files);
        while let Some((home, _)) = files.first().cloned() {
            let numbers: Vec<u64> = files.extract_if(.., |(at, _)| *at == home).map(|(_, number)| number).collect();
            numbers.chunks(NUMBERS_MAX).for_each(|numbers| self.close_numbers(&home, numbers));
        }
    }

    /// Closes open files on one node, now; later if the request fails.
    pub fn close_numbers(&self, home: &HomeProcess, numbers: &[u64]) {
        if !self.try_close(home, numbers, self.begin()) {
            self.close_later(home, numbers);
        }
    }

    /// Closes files later on a node that may have them open.
    pub fn close_later(&self, home: &HomeProcess, numbers: &[u64]) {
        let since = Instant::now();
        let failed = numbers.iter().map(|number| FailedClose { since, home: home.clone(), number: *number });
        self.closes.state.lock().failed.extend(failed);
        self.closes.added.notify_one();
    }

    /// The closes that failed; the caller repeats them.
    pub fn failed_closes(&self) -> Vec<FailedClose> {
        self.closes.state.lock().failed.clone()
    }

    /// Forgets a failed close that was done later or is settled.
    pub fn forget_failed_close(&self, close: &FailedClose) {
        let mut state = self.closes.state.lock();
        state.failed.retain(|failed| failed.number != close.number || failed.home != close.home);
    }

    /// Whether the process has the files no longer open.
    pub fn try_close(&self, home: &HomeProcess, numbers: &[u64], deadline: CallDeadline) -> bool {
        let mut scratch = Vec::new();
        let files = NumberList::new(numbers, &mut scratch);
        let call = WriteCall::Close { opened_below: self.numbers.upcoming(), files };
        match self.query(CallTarget::Process(home), &call, &Caller::default(), deadline) {
            Ok(_) => true,
            // Another process has its place.
            Err(CallEnd::Lost { error, .. }) => error.kind() == ErrorKind::Stale,
            Err(CallEnd::Failed(error)) => !is_transient(&error),
        }
    }

    /// Closes a file with locks; whether that came about within a short time.
    pub fn close_locked(&self, home: &HomeProcess, number: u64, deadline: CallDeadline) -> bool {
        let until = Instant::now() + LOCKED_WAIT;
        loop {
            if self.try_close(home, &[number], deadline) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOCKED_PAUSE);
        }
    }
}
