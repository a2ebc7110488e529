//! Open files and directories that programs have closed, until a request closes them on their nodes: one for many. It knows neither
//! bytes nor names.
//!
//! A close of the program has returned before, so nothing waits for these requests. Files with locks are not among them.

use super::calls::{CallTarget, HomeProcess};
use super::files::OpenedAs;
use super::{GroupWrites, RequestContext};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{FileNumbers, WriteCall};
use spurline_types::{Error, Result};
use spurline_volume::writes::Caller;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a file waits for others.
const GATHERING: Duration = Duration::from_millis(2);
/// Numbers of one request; the thread that closes one more sends it.
const MOST: usize = 64;

#[derive(Default)]
struct ClosedState {
    files: Vec<(HomeProcess, u64)>,
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

    /// Waits for a file; false at the end.
    fn wait_first(&self) -> bool {
        let mut state = self.state.lock();
        while state.files.is_empty() && !state.ended {
            self.added.wait(&mut state);
        }
        !state.ended
    }
}

impl GroupWrites {
    /// Starts the thread that reports closed files.
    pub(super) fn start_closing(&self) -> Result<()> {
        let (closed, this) = (Arc::clone(&self.closed), Weak::clone(&self.this));
        let run = move || {
            while closed.wait_first() {
                std::thread::sleep(GATHERING);
                let Some(writes) = this.upgrade() else { return };
                writes.report_closed();
            }
        };
        let spawned = std::thread::Builder::new().name("close-files".into()).spawn(run);
        spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// Closes an open object on its node soon; at once if it holds locks.
    pub(super) fn close_soon(&self, opened: &OpenedAs) {
        self.remove_open(opened.number());
        let (home, number) = (opened.home(), opened.number());
        if opened.held.any() {
            return self.close_numbers(&home, &[number]);
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

    /// Closes open files on one node, now.
    pub(super) fn close_numbers(&self, home: &HomeProcess, numbers: &[u64]) {
        let (mut scratch, root) = (Vec::new(), Caller::default());
        let call = WriteCall::Close { files: FileNumbers::new(numbers, &mut scratch) };
        // An unreachable node closes them when the session ends.
        let _ = self.send(CallTarget::Process(home), &call, RequestContext::of(&root), 0, None, &mut []);
    }
}
