//! Open files and directories that programs have closed, until a request closes them on their nodes: one for many. It knows neither
//! bytes nor names.
//!
//! A close of the program has returned before, so nothing waits for these requests; only the first one for a file with locks is
//! waited for. A request that failed is repeated: a session that goes on keeps a file and its locks for ever.

use super::behind::is_transient;
use super::calls::{CallEnd, CallTarget, HomeProcess};
use super::files::OpenedAs;
use super::{GroupWrites, RequestContext};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{FileNumbers, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::Caller;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a file waits for others.
const GATHERING: Duration = Duration::from_millis(2);
/// Numbers of one request; the thread that closes one more sends it.
const MOST: usize = 64;
/// How long requests for a file with locks are repeated while the program waits, as a broken connection is made again, and their
/// interval.
const LOCKED_WAIT: Duration = Duration::from_millis(500);
const LOCKED_PAUSE: Duration = Duration::from_millis(20);
/// Interval of requests that failed before.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// A process that heard nothing for this long has ended the session (`SESSION_IDLE` of the node, and its next look at it).
const GIVE_UP: Duration = Duration::from_secs(150);

/// A file that a process may still have open, as a request to close it failed.
struct FailedClose {
    since: Instant,
    home: HomeProcess,
    number: u64,
}

#[derive(Default)]
struct ClosedState {
    files: Vec<(HomeProcess, u64)>,
    failed: Vec<FailedClose>,
    ended: bool,
}

/// The files that are closed and not reported.
#[derive(Default)]
pub(crate) struct ClosedFiles {
    state: Mutex<ClosedState>,
    added: Condvar,
}

impl ClosedFiles {
    /// Ends the thread.
    pub fn end(&self) {
        self.state.lock().ended = true;
        self.added.notify_all();
    }

    fn take_files(&self) -> Vec<(HomeProcess, u64)> {
        std::mem::take(&mut self.state.lock().files)
    }

    /// Waits for a file, or until it is time to repeat a request; false at the end.
    fn wait_first(&self, retry_at: Instant) -> bool {
        let mut state = self.state.lock();
        while state.files.is_empty() && !state.ended {
            if state.failed.is_empty() {
                self.added.wait(&mut state);
            } else if self.added.wait_until(&mut state, retry_at).timed_out() {
                break;
            }
        }
        !state.ended
    }
}

impl GroupWrites {
    /// Starts the thread that reports closed files.
    pub(super) fn start_closing(&self) -> Result<()> {
        let (closed, this) = (Arc::clone(&self.closed), Weak::clone(&self.this));
        let run = move || {
            let mut retry_at = Instant::now();
            while closed.wait_first(retry_at) {
                std::thread::sleep(GATHERING);
                let Some(writes) = this.upgrade() else { return };
                writes.report_closed();
                if Instant::now() >= retry_at {
                    writes.repeat_failed();
                    retry_at = Instant::now() + RETRY_PAUSE;
                }
            }
        };
        let spawned = std::thread::Builder::new().name("close-files".into()).spawn(run);
        spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Closes an open object on its node soon; at once if it holds locks.
    pub(super) fn close_soon(&self, opened: &OpenedAs) {
        self.remove_open(opened.number());
        opened.mark_closed();
        let (home, number) = (opened.home(), opened.number());
        if opened.held.any() {
            // The next owner of the locks waits for it.
            if !self.close_locked(&home, number) {
                self.close_later(&home, &[number]);
            }
            return;
        }
        let mut state = self.closed.state.lock();
        state.files.push((home, number));
        let waiting = state.files.len();
        drop(state);
        if waiting == 1 {
            self.closed.added.notify_one();
        } else if waiting >= MOST {
            self.report_closed();
        }
    }

    /// Reports the closed files. A source may keep the name of a removed file for as long as it is open, as NFS does.
    pub(super) fn report_closed(&self) {
        let mut files = self.closed.take_files();
        while let Some((home, _)) = files.first().cloned() {
            let numbers: Vec<u64> = files.extract_if(.., |(at, _)| *at == home).map(|(_, number)| number).collect();
            numbers.chunks(MOST).for_each(|numbers| self.close_numbers(&home, numbers));
        }
    }

    /// Closes open files on one node, now; later if the request fails.
    pub(super) fn close_numbers(&self, home: &HomeProcess, numbers: &[u64]) {
        if !self.try_close(home, numbers) {
            self.close_later(home, numbers);
        }
    }

    /// Closes files later on a node that may have them open.
    pub(super) fn close_later(&self, home: &HomeProcess, numbers: &[u64]) {
        let since = Instant::now();
        let failed = numbers.iter().map(|number| FailedClose { since, home: home.clone(), number: *number });
        self.closed.state.lock().failed.extend(failed);
        self.closed.added.notify_one();
    }

    /// Whether the process has the files no longer open.
    pub(super) fn try_close(&self, home: &HomeProcess, numbers: &[u64]) -> bool {
        let (mut scratch, root) = (Vec::new(), Caller::default());
        let call = WriteCall::Close { files: FileNumbers::new(numbers, &mut scratch) };
        match self.send(CallTarget::Process(home), &call, RequestContext::of(&root), 0, &mut []) {
            Ok(_) => true,
            // Another process has its place.
            Err(CallEnd::Lost { error, .. }) => error.kind() == ErrorKind::Stale,
            Err(CallEnd::Failed(error)) => !is_transient(&error),
        }
    }

    /// Closes a file with locks; whether that came about within a short time.
    fn close_locked(&self, home: &HomeProcess, number: u64) -> bool {
        let until = Instant::now() + LOCKED_WAIT;
        loop {
            if self.try_close(home, &[number]) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(LOCKED_PAUSE);
        }
    }

    /// Closes an open file at a process that it has left, now: another call for its locks waits for those there. What fails is
    /// repeated later anyway.
    pub(super) fn close_left(&self, opened: &OpenedAs, left: &HomeProcess) {
        let Some(_stays) = opened.try_hold_place() else { return };
        if opened.home() != *left {
            self.close_locked(left, opened.number());
        }
    }

    /// Closes files again whose requests failed: one attempt for all files of a process that can't be reached.
    fn repeat_failed(&self) {
        let failed = std::mem::take(&mut self.closed.state.lock().failed);
        let (mut left, mut unreached) = (Vec::new(), Vec::new());
        for close in failed {
            if !unreached.contains(&close.home) {
                match self.repeat_close(&close) {
                    Some(true) => continue,
                    Some(false) => unreached.push(close.home.clone()),
                    None => {
                        left.push(close);
                        continue;
                    }
                }
            }
            if close.since.elapsed() < GIVE_UP {
                left.push(close);
            }
        }
        self.closed.state.lock().failed.append(&mut left);
    }

    /// Whether the process has the file no longer open, or rightly has it open; `None` while the file moves.
    fn repeat_close(&self, close: &FailedClose) -> Option<bool> {
        let Some(open) = self.open_file(close.number) else {
            return Some(self.try_close(&close.home, &[close.number]));
        };
        // It does not move to that process meanwhile.
        let _stays = open.try_hold_place()?;
        Some(open.home() == close.home || self.try_close(&close.home, &[close.number]))
    }
}
