//! Closes the files that programs have closed, and those that a process kept when they moved. It knows neither bytes nor names.

use super::{OpenFile, OpenFiles};
use crate::writes::calls::{CallDeadline, FailedClose, HomeProcess};
use spurline_types::{Error, Result};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long a file waits for others.
const GATHERING_TIME: Duration = Duration::from_millis(2);
/// Interval of requests that failed before.
const CLOSE_RETRY_PAUSE: Duration = Duration::from_millis(200);

impl OpenFiles {
    /// Starts the thread that reports closed files.
    pub fn start_closing(&self) -> Result<()> {
        let calls = Arc::clone(&self.calls);
        let this = Weak::clone(&self.this);
        let spawned = std::thread::Builder::new().name("close-files".into()).spawn(move || {
            let mut retry_at = Instant::now();
            while calls.wait_closes(retry_at) {
                std::thread::sleep(GATHERING_TIME);
                let Some(files) = this.upgrade() else { return };
                calls.report_closed();
                if Instant::now() >= retry_at {
                    files.repeat_failed();
                    retry_at = Instant::now() + CLOSE_RETRY_PAUSE;
                }
            }
        });
        spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Closes an open object on its node soon; at once if it holds locks.
    pub fn close_soon(&self, opened: &OpenFile) {
        if opened.has_locks() {
            return self.close_now(opened);
        }
        self.remove_open(opened.number());
        let home = opened.mark_closed(self);
        if self.calls.is_kept() {
            // The session goes on: a file whose close is not reported stays open at the node.
            self.calls.close_numbers(&home, &[opened.number()]);
        } else {
            self.calls.close_soon(home, opened.number());
        }
    }

    /// Closes an open object on its node: the next owner of the locks, or of a name, waits for that.
    pub fn close_now(&self, opened: &OpenFile) {
        self.remove_open(opened.number());
        let home = opened.mark_closed(self);
        if !self.calls.close_locked(&home, opened.number(), self.calls.begin()) {
            self.calls.close_later(&home, &[opened.number()]);
        }
    }

    /// Closes an open file at a process that it has left, now: another call for its locks waits for those there. What fails is
    /// repeated later anyway.
    pub fn close_left(&self, opened: &OpenFile, left: &HomeProcess, deadline: CallDeadline) {
        let Some(_stays) = opened.try_hold_place() else { return };
        if opened.home() != *left {
            self.calls.close_locked(left, opened.number(), deadline);
        }
    }

    /// Closes files again whose requests failed: one attempt for all files of a process that can't be reached.
    fn repeat_failed(&self) {
        let mut unreached: Vec<HomeProcess> = Vec::new();
        for close in self.calls.failed_closes() {
            let is_unreached = unreached.contains(&close.home);
            let closed = if is_unreached { Some(false) } else { self.repeat_close(&close) };
            if closed == Some(false) && !is_unreached {
                unreached.push(close.home.clone());
            }
            if closed == Some(true) || closed == Some(false) && close.is_settled() {
                self.calls.forget_failed_close(&close);
            }
        }
    }

    /// Whether the process has the file no longer open, or rightly has it open; `None` while the file moves.
    fn repeat_close(&self, close: &FailedClose) -> Option<bool> {
        let Some(open) = self.open_file(close.number) else {
            return Some(self.calls.try_close(&close.home, &[close.number], self.calls.begin()));
        };
        // It does not move to that process meanwhile.
        let _stays = open.try_hold_place()?;
        Some(open.home() == close.home || self.calls.try_close(&close.home, &[close.number], self.calls.begin()))
    }
}
