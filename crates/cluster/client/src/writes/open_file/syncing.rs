//! Makes files durable: by each process that has bytes of them. It knows neither pieces nor why a process was lost.

use super::{MOVES_PER_CALL_MAX, OpenCall, OpenFile, OpenFiles, call_open};
use crate::writes::calls::{CallDeadline, HomeProcess, is_transient, settle_answer, unsteady};
use spurline_proto::WriteCall;
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, Result};
use std::sync::Arc;
use std::time::Instant;

/// The result of a call on an open file that another thread may have closed meanwhile: the close has done the same.
pub(super) fn unless_closed(open: &OpenFile, done: Result<()>) -> Result<()> {
    if open.is_closed() { Ok(()) } else { done }
}

impl OpenFiles {
    /// Makes a file durable, by each process that has bytes of it. Returns the process that answered last for `opened`.
    ///
    /// # Errors
    /// When no node takes the bytes; they are kept. An error of the source is a failure of the file.
    pub fn sync_file(&self, opened: &OpenFile, data_only: bool) -> Result<HomeProcess> {
        self.send_all(&opened.bytes)?;
        self.sync_by(opened, data_only, self.calls.begin())
    }

    /// As [`OpenFiles::sync_file`], within the time of a call.
    pub fn sync_by(&self, opened: &OpenFile, data_only: bool, deadline: CallDeadline) -> Result<HomeProcess> {
        let file = &opened.bytes;
        let mark = file.list.lock().mark();
        let failures = file.failure_count();
        let mut other: Option<Arc<OpenFile>> = None;
        let mut own = None;
        for _ in 0..MOVES_PER_CALL_MAX {
            self.send_below(file, mark, None)?;
            let stamp = file.list.lock().stamp();
            let through = other.take();
            let synced = self.sync_once(through.as_deref().unwrap_or(opened), data_only, deadline);
            let by = match synced {
                Ok(by) => by,
                Err(error) if is_transient(&error) => return Err(error),
                Err(error) => {
                    self.stats().failures.add(1);
                    file.add_failure(error);
                    file.list.lock().forget_sent(mark);
                    opened.home()
                }
            };
            if through.is_none() {
                own = Some(by.clone());
            }
            let mut list = file.list.lock();
            list.release(mark, stamp, by.instance);
            let left = list.first_left(mark);
            drop(list);
            match (left, &own) {
                (None, Some(own)) => {
                    if file.failure_count() == failures {
                        file.end_failing();
                    }
                    return Ok(own.clone());
                }
                (Some((owner, Some(to))), _) => match self.open_file(owner).filter(|open| open.home().instance == to) {
                    Some(open) => other = Some(open).filter(|open| open.number() != opened.number()),
                    None => self.resend_from(opened, to),
                },
                _ => {}
            }
        }
        Err(unsteady())
    }

    /// Makes bytes durable that an earlier process has written; false if a node can't be reached.
    pub fn sync_earlier_bytes(&self) -> bool {
        let mut is_done = true;
        for file in self.open_files().iter().filter(|file| file.has_earlier_bytes()) {
            // If the node was lost meanwhile, the move has noted the loss.
            match self.sync_file(file, true) {
                Ok(_) => file.end_earlier_bytes(),
                Err(_) => is_done = false,
            }
        }
        is_done
    }

    /// Makes the bytes of a file durable that would be sent again after the loss of a process: before others may change them.
    ///
    /// # Errors
    /// When no node takes them; they are kept.
    pub fn sync_retained(&self, opened: &OpenFile) -> Result<()> {
        let durable = opened.bytes.list.lock().is_empty();
        if durable { Ok(()) } else { self.sync_file(opened, true).map(drop) }
    }

    fn sync_once(&self, opened: &OpenFile, data_only: bool, deadline: CallDeadline) -> Result<HomeProcess> {
        let started = Instant::now();
        let call = WriteCall::Sync { file: opened.number(), data_only };
        let sent = call_open(self, opened, OpenCall::query(&call, opened.caller(), deadline))?;
        // An answer of the source is final, whatever its kind.
        settle_answer(sent.answer).map_err(|error| {
            if is_transient(&error) { Error::new(ErrorKind::Io(EIO), error.message()) } else { error }
        })?;
        self.stats().sync_ops.add(1);
        self.stats().sync_us.add_us(started.elapsed());
        Ok(sent.home)
    }

    /// Makes the bytes of all open files durable.
    ///
    /// # Errors
    /// When no node takes them.
    pub fn sync_files(&self) -> Result<()> {
        for open in self.open_files() {
            if !open.bytes.list.lock().is_empty() {
                unless_closed(&open, self.sync_file(&open, true).map(drop))?;
            }
        }
        Ok(())
    }
}
