//! Sends the bytes of writes after the writer has gone on, and again when the node that has them is lost: carries the pieces of
//! [`crate::writes::bytes`] to the processes of their open files. It knows nothing about names.

use super::syncing::unless_closed;
use super::{MOVES_PER_CALL_MAX, OpenFile, OpenFiles};
use crate::writes::bytes::{
    AddedBytes, AwaitedPiece, FileBytes, NewBytes, NextJob, NextPiece, PieceOutcome, PieceToSend, SendJob,
};
use crate::writes::calls::{
    CallDeadline, CallEnd, CallKind, CallTarget, HomeProcess, MaybeExecuted, RequestContext, WriteCallPlan,
    is_transient, late_move, settle_answer, unsteady,
};
use spurline_proto::{WriteAnswer, WriteCall};
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, FileIdentity};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Threads that send: enough requests in flight for one fast stream, each up to a MiB.
const SENDERS: usize = 4;
/// Interval of looks at the files that are being closed.
const CLOSING_PAUSE: Duration = Duration::from_millis(20);
/// Unsent pieces of a file; above, its writers send too.
const MOST_UNSENT: usize = 8;

/// How bytes are sent.
#[derive(Clone, Copy)]
struct SendAttempt {
    before: MaybeExecuted,
    /// Failures of the file are reported with the last request.
    flush: bool,
    deadline: CallDeadline,
}

/// The end of an attempt to send bytes.
enum SendResult {
    /// This process has them.
    Sent(u64),
    /// They have to be sent again; with a cause, when a node is there.
    Retry { maybe_executed: MaybeExecuted, cause: Option<Error> },
    /// The source refuses them.
    Refused(Error),
}

impl SendResult {
    /// The bytes have no answer.
    fn failed(error: Error, maybe_executed: MaybeExecuted) -> SendResult {
        if is_transient(&error) {
            SendResult::Retry { maybe_executed, cause: Some(error) }
        } else {
            SendResult::Refused(error)
        }
    }
}

impl OpenFiles {
    /// Starts the sender threads.
    pub fn start_senders(&self) -> Result<()> {
        for _ in 0..SENDERS {
            let queue = Arc::clone(&self.queue);
            let this = Weak::clone(&self.this);
            let spawned = std::thread::Builder::new().name("send-writes".into()).spawn(move || {
                while let Some(NextJob { job, all }) = queue.next_job() {
                    let Some(writes) = this.upgrade() else { return };
                    writes.run_job(&job, all);
                }
            });
            spawned.map_err(|e| Error::io("can't start a thread", &e))?;
        }
        Ok(())
    }

    fn run_job(&self, job: &SendJob, all: bool) {
        match job {
            SendJob::Piece(file) => {
                let Some(file) = file.upgrade() else { return };
                let sent = if all { self.send_all(&file) } else { self.send_ready(&file).map(drop) };
                if let Err(error) = sent {
                    tracing::debug!("bytes of a write wait for a node: {error}");
                    self.queue.push_due(SendJob::Piece(Arc::downgrade(&file)));
                }
            }
            SendJob::Close { number, until } => {
                let Some(opened) = self.closing.lock().get(number).cloned() else { return };
                let sent = self.send_all(&opened.bytes);
                if sent.is_err() && Instant::now() < *until {
                    self.queue.push_due(SendJob::Close { number: *number, until: *until });
                    return;
                }
                self.end_open(&opened, sent.err());
                self.closing.lock().remove(number);
            }
            SendJob::Room => {
                // A failure is the file's, and an unreachable node stops the writers when the memory is full.
                let _ = self.make_room();
                self.making_room.store(false, Ordering::Release);
            }
        }
    }

    /// Takes the bytes of a write, which are sent later; at once if the file or its opening requires that.
    ///
    /// # Errors
    /// When there is no memory and no node takes the bytes; the source's errno if they were sent at once. None of the bytes
    /// are sent after that.
    pub fn write_behind(&self, opened: &OpenFile, new: NewBytes<'_>) -> Result<()> {
        let file = &opened.bytes;
        let failures = file.failure_count();
        // A write under a lock finds out whether the lock was lost with a node.
        let waits = new.appended || opened.writes_at_once() || opened.has_locks();
        // No program waits for pages of a map: a failure is the file's, and the bytes stay. Bytes of this process alone do not
        // outlive it.
        let at_once = self.calls.is_kept() || !new.mapped && (waits || file.is_failing());
        let new = &NewBytes { awaited: at_once, ..new };
        let mut added = file.list.lock().add_bytes(&self.memory, new);
        if added.is_none() {
            self.make_room()?;
            added = file.list.lock().add_bytes(&self.memory, new);
        }
        let Some(AddedBytes { piece, begun, ready }) = added else {
            return self.write_durably(opened, new);
        };
        if at_once {
            self.send_awaited(file, piece, failures)?;
            if opened.writes_durably() {
                file.list.lock().release_durable(piece);
            }
        } else {
            if begun {
                self.queue.push_due(SendJob::Piece(Arc::downgrade(file)));
            }
            if ready {
                self.queue.push_ready(SendJob::Piece(Arc::downgrade(file)));
            }
            while file.list.lock().unsent_pieces() > MOST_UNSENT {
                // An unreachable node stops the writer when the memory is full.
                if !matches!(self.send_ready(file), Ok(true)) {
                    break;
                }
            }
        }
        let is_half_full = self.memory.used_bytes() > self.memory.limit_bytes() / 2;
        if is_half_full && !self.making_room.swap(true, Ordering::AcqRel) {
            self.queue.push_ready(SendJob::Room);
        }
        Ok(())
    }

    /// Sends what is unsent, for a write whose bytes are `piece`. If they are sent, a failure of others is not its own.
    fn send_awaited(&self, file: &FileBytes, piece: u64, failures: u64) -> Result<()> {
        let sent = self.send_all(file);
        let mut list = file.list.lock();
        loop {
            match list.end_awaited(piece, sent.is_err(), &self.client.stats) {
                AwaitedPiece::Written => return Ok(()),
                AwaitedPiece::Sending => file.sent.wait(&mut list),
                AwaitedPiece::Refused => {
                    drop(list);
                    file.failure_after(failures)?;
                    return sent.and_then(|()| Err(unsteady()));
                }
                AwaitedPiece::TakenBack(mut change) => {
                    drop(list);
                    // Those that overlap it wait for it.
                    file.sent.notify_all();
                    self.end_change(&mut change);
                    return sent.and_then(|()| Err(unsteady()));
                }
            }
        }
    }

    /// Makes room for writes: the file with the most bytes becomes durable.
    fn make_room(&self) -> Result<()> {
        let files = self.open_files().into_iter().map(|open| {
            let bytes = open.bytes.list.lock().bytes();
            (bytes, open)
        });
        let Some((_, open)) = files.filter(|(bytes, _)| *bytes > 0).max_by_key(|(bytes, _)| *bytes) else {
            return Ok(());
        };
        self.stats().room_syncs.add(1);
        unless_closed(&open, self.sync_file(&open, true).map(drop))
    }

    /// Writes bytes for which there is no memory: they are durable before the writer goes on.
    fn write_durably(&self, opened: &OpenFile, new: &NewBytes<'_>) -> Result<()> {
        let mut change = new.change;
        let written = self.write_and_sync(opened, new, &mut change);
        self.end_change(&mut change);
        written
    }

    fn write_and_sync(&self, opened: &OpenFile, new: &NewBytes<'_>, change: &mut Option<u64>) -> Result<()> {
        let failures = opened.bytes.failure_count();
        self.send_all(&opened.bytes)?;
        let deadline = self.calls.begin();
        let mut before = new.before;
        while !deadline.is_over(Instant::now()) {
            match self.send_bytes(opened, new, SendAttempt { before, flush: false, deadline }, change) {
                SendResult::Sent(to) => {
                    if self.sync_by(opened, true, deadline)?.instance == to {
                        return opened.bytes.failure_after(failures);
                    }
                    before = MaybeExecuted::Anywhere;
                }
                SendResult::Refused(error) | SendResult::Retry { cause: Some(error), .. } => return Err(error),
                SendResult::Retry { maybe_executed, cause: None } => before = maybe_executed,
            }
            self.send_all(&opened.bytes)?;
        }
        Err(late_move())
    }

    /// Sends all unsent bytes of a file that were written until now.
    ///
    /// # Errors
    /// When no node takes them; they are kept. What the source refuses is a failure of the file.
    pub fn send_all(&self, file: &FileBytes) -> Result<()> {
        let mark = {
            let mut list = file.list.lock();
            if list.unsent_pieces() == 0 {
                return Ok(());
            }
            list.mark()
        };
        self.send_below(file, mark, None).map(drop)
    }

    /// As [`OpenFiles::send_all`], before a close of `opened`. Whether its last bytes were sent here: their request has then
    /// reported failures as [`WriteCall::Flush`] does.
    pub fn send_at_close(&self, opened: &OpenFile) -> Result<bool> {
        let mark = opened.bytes.list.lock().mark();
        self.send_below(&opened.bytes, mark, Some(opened.number()))
    }

    /// Sends what lies below `mark`. With `closing`, the last request for that open file is a flush as well; whether it was
    /// sent.
    pub(super) fn send_below(&self, file: &FileBytes, mark: u64, closing: Option<u64>) -> Result<bool> {
        let mut moves = 0;
        let mut flushed = false;
        loop {
            let mut list = file.list.lock();
            let piece = loop {
                match list.next_piece(mark, false) {
                    NextPiece::Send(piece) => break piece,
                    NextPiece::Wait => file.sent.wait(&mut list),
                    NextPiece::Done => return Ok(flushed),
                }
            };
            let flush = closing == Some(piece.owner) && list.unsent_pieces() == 1;
            drop(list);
            let outcome = self.send_piece(file, piece, flush)?;
            flushed = flush && matches!(outcome, PieceOutcome::Sent(_));
            if let PieceOutcome::Unsent(_) = outcome {
                moves += 1;
                if moves > MOVES_PER_CALL_MAX {
                    return Err(unsteady());
                }
            }
        }
    }

    /// Sends one piece that gets no more bytes, or waits for a thread that does; false if there is none.
    fn send_ready(&self, file: &FileBytes) -> Result<bool> {
        let mut list = file.list.lock();
        match list.next_piece(u64::MAX, true) {
            NextPiece::Send(piece) => {
                drop(list);
                self.send_piece(file, piece, false)?;
                Ok(true)
            }
            NextPiece::Wait if list.unsent_pieces() > MOST_UNSENT => {
                file.sent.wait(&mut list);
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Sends a piece; it stays unsent if its process was lost. `flush`: see [`WriteCall::Write`].
    fn send_piece(&self, file: &FileBytes, mut piece: PieceToSend, flush: bool) -> Result<PieceOutcome> {
        let mut change = piece.change;
        // Earlier calls have written the bytes, and their number has no limit: each piece has a deadline of its own.
        let attempt = SendAttempt { before: piece.before, flush, deadline: self.calls.begin() };
        let owner = self.open_file(piece.owner);
        let result = match &owner {
            Some(owner) => self.send_bytes(owner, &piece.as_new(), attempt, &mut change),
            None => SendResult::Refused(Error::new(ErrorKind::Io(EIO), "the file was closed")),
        };
        if !matches!(result, SendResult::Retry { .. }) {
            self.end_change(&mut change);
        }
        piece.change = change;
        let mut unsent = None;
        let outcome = match result {
            SendResult::Sent(to) => {
                self.stats().behind_us.add_us(piece.since.elapsed());
                PieceOutcome::Sent(to)
            }
            SendResult::Retry { maybe_executed, cause } => {
                unsent = cause;
                PieceOutcome::Unsent(maybe_executed)
            }
            SendResult::Refused(error) => {
                let path = owner.as_ref().map_or_else(|| "a closed file".to_owned(), |owner| owner.logged_path());
                tracing::warn!("{} bytes at {} of {path} were not written: {error}", piece.len, piece.offset);
                self.stats().failures.add(1);
                file.add_failure(error);
                PieceOutcome::Refused
            }
        };
        let mut list = file.list.lock();
        list.end_sending(piece, outcome, &self.client.stats);
        drop(list);
        file.sent.notify_all();
        unsent.map_or(Ok(outcome), Err)
    }

    /// The process that had the file open is lost: the pieces before these bytes may have to be sent again first.
    fn moved(&self, owner: &OpenFile, lost: &HomeProcess, before: MaybeExecuted, deadline: CallDeadline) -> SendResult {
        match owner.move_on(self, lost, deadline) {
            Ok(()) => SendResult::Retry { maybe_executed: before, cause: None },
            Err(error) => SendResult::failed(error, before),
        }
    }

    /// Sends bytes to the process that has the file open.
    fn send_bytes(
        &self,
        owner: &OpenFile,
        new: &NewBytes<'_>,
        attempt: SendAttempt,
        change: &mut Option<u64>,
    ) -> SendResult {
        let SendAttempt { mut before, deadline, .. } = attempt;
        let home = owner.home();
        let mut written = 0;
        while written < new.data.len() {
            let most = self.most_bytes().min(new.data.len() - written);
            let payload = &new.data[written..written + most];
            let call = WriteCall::Write {
                file: owner.number(),
                offset: new.offset + written as u64,
                append: new.appended,
                lose_privileges: new.lose_privileges.is_some(),
                flush: attempt.flush && written + most == new.data.len(),
            };
            let caller = new.lose_privileges.map(|(uid, gid)| Caller { uid, gid, ..Caller::default() });
            let caller = caller.as_ref().unwrap_or(owner.caller());
            let context = RequestContext { payload, ..RequestContext::of(caller) };
            // The same bytes at the same place can be written twice, an append can't: it keeps its number until it is
            // answered.
            let kind = if new.appended {
                CallKind::Change { number: *change.get_or_insert_with(|| self.calls.draw_lasting_number()) }
            } else {
                CallKind::Query
            };
            let confirms = owner.begin_confirm();
            // After a loss, another mount has the lock under which these bytes were written.
            let relying = match owner.begin_relying() {
                Ok(relying) => relying,
                Err(error) => return SendResult::Refused(error),
            };
            let target = CallTarget::Process(&home);
            let plan = WriteCallPlan { target, kind, call: &call, context, landing: &mut [], before, deadline };
            let answer = self.calls.run(plan);
            drop(relying);
            let sent = match answer {
                Ok(sent) if sent.answer == WriteAnswer::UnknownFile => {
                    owner.note_unknown(self, &home);
                    return self.moved(owner, &home, before, deadline);
                }
                Ok(sent) => {
                    owner.confirm(confirms, &home);
                    settle_answer(sent.answer)
                }
                Err(CallEnd::Lost { sent, .. }) => {
                    if sent {
                        before.note_sent(home.instance);
                    }
                    return self.moved(owner, &home, before, deadline);
                }
                Err(CallEnd::Failed(error)) => return SendResult::failed(error, before),
            };
            self.end_change(change);
            before = MaybeExecuted::Anywhere;
            match sent {
                Ok(WriteAnswer::Number(n)) if n > 0 => {
                    let n = n.min(payload.len() as u64);
                    written += n as usize;
                    self.stats().sent_ops.add(1);
                    self.stats().sent_bytes.add(n);
                }
                Ok(_) => {
                    let why = format!("{written} of {} bytes were written", new.data.len());
                    return SendResult::Refused(Error::new(ErrorKind::Io(EIO), why));
                }
                Err(error) => return SendResult::Refused(error),
            }
        }
        // Another thread has seen the locks lost meanwhile, and opened the file again without them.
        if let Err(error) = owner.bytes.check_lock_loss() {
            return SendResult::Refused(error);
        }
        // Another thread has seen the process lost meanwhile.
        if owner.home().instance == home.instance {
            SendResult::Sent(home.instance)
        } else {
            SendResult::Retry { maybe_executed: before, cause: None }
        }
    }

    /// A change is answered, or abandoned.
    fn end_change(&self, change: &mut Option<u64>) {
        if let Some(number) = change.take() {
            self.calls.end_number(number);
        }
    }

    /// The process `lost` can't be reached: its bytes are to be sent again.
    pub fn resend_from(&self, opened: &OpenFile, lost: u64) {
        let bytes = opened.bytes.list.lock().resend_from(lost, &self.client.stats);
        if bytes > 0 {
            let path = opened.logged_path();
            tracing::info!("{bytes} bytes of {path} are sent again: the node that had them was lost");
        }
    }

    /// The program has closed a file, or its mount has ended: its bytes are sent, and it is closed. If no node takes them now,
    /// threads try that for the time of an answer.
    pub fn close_behind(&self, opened: &Arc<OpenFile>) {
        let sent = if opened.failed_close() {
            Err(unsteady())
        } else if opened.has_locks() {
            // Its locks go with it.
            self.sync_retained(opened)
        } else {
            self.send_all(&opened.bytes)
        };
        if sent.is_ok() || !opened.bytes.has_unsent() {
            return self.end_open(opened, None);
        }
        self.closing.lock().insert(opened.number(), Arc::clone(opened));
        let until = Instant::now() + self.client.patience().answer;
        self.queue.push_due(SendJob::Close { number: opened.number(), until });
    }

    /// Waits until the files that were closed have ended, and their nodes know.
    pub fn finish_closing(&self) {
        while !self.closing.lock().is_empty() {
            std::thread::sleep(CLOSING_PAUSE);
        }
        self.calls.report_closed();
    }

    /// Ends an open file. Its bytes that are not durable stay while another open file can send them again.
    fn end_open(&self, opened: &OpenFile, error: Option<Error>) {
        self.leave_bytes(opened, error);
        self.close_soon(opened);
    }

    fn leave_bytes(&self, opened: &OpenFile, error: Option<Error>) {
        let file = &opened.bytes;
        let home = opened.home();
        if file.list.lock().is_empty() {
            return;
        }
        let other = self.open_files().into_iter().find(|other| {
            let shares = Arc::ptr_eq(&other.bytes, file) && other.number() != opened.number();
            shares && other.writes_anywhere() && other.home() == home
        });
        let other = other.map(|other| other.number());
        let mut changes = Vec::new();
        let mut list = file.list.lock();
        // Another thread may be sending one of its pieces again, and learns the outcome within the time of a request.
        while list.is_sending_for(opened.number()) {
            file.sent.wait(&mut list);
        }
        let lost = list.pass_on(opened.number(), other, &self.client.stats, &mut changes);
        drop(list);
        changes.into_iter().for_each(|number| self.calls.end_number(number));
        if lost > 0 {
            let error = error.map_or_else(String::new, |error| format!(": {error}"));
            tracing::error!("{lost} bytes of {} are lost, no node took them{error}", opened.logged_path());
            self.losses.lock().add_file(opened.shown_path(), lost);
            file.add_failure(Error::new(ErrorKind::Io(EIO), "no node took bytes of a closed file"));
        }
    }

    /// Whether any file has unsent bytes.
    fn has_unsent(&self) -> bool {
        self.stats().dirty_bytes.get() > 0
    }

    /// Sends the unsent bytes of the object, before something that would see them; whether there were any.
    ///
    /// # Errors
    /// When no node takes them.
    pub fn send_bytes_of(&self, identity: Option<FileIdentity>) -> Result<bool> {
        if !self.has_unsent() {
            return Ok(false);
        }
        let file = identity.and_then(|identity| self.known_bytes_of(identity));
        match file.filter(|file| file.has_unsent()) {
            Some(file) => self.send_all(&file).map(|()| true),
            None => Ok(false),
        }
    }

    /// Sends the unsent bytes of the files at and below a path, as [`OpenFiles::send_bytes_of`].
    ///
    /// # Errors
    /// When no node takes them.
    pub fn send_bytes_below(&self, path: &[u8]) -> Result<()> {
        if !self.has_unsent() {
            return Ok(());
        }
        for open in self.open_files() {
            if open.bytes.has_unsent() && open.is_below(path) {
                self.send_all(&open.bytes)?;
            }
        }
        Ok(())
    }

    /// The file was cut to `size` bytes: those behind are not sent again.
    pub fn cut_bytes_of(&self, identity: FileIdentity, size: u64) {
        if let Some(file) = self.known_bytes_of(identity) {
            self.cut_bytes(&file, size);
        }
    }

    /// As [`OpenFiles::cut_bytes_of`], for a file with these bytes.
    pub fn cut_bytes(&self, file: &FileBytes, size: u64) {
        let mut changes = Vec::new();
        file.list.lock().cut_at(size, &self.client.stats, &mut changes);
        changes.into_iter().for_each(|number| self.calls.end_number(number));
    }

    /// The state of a file, if it is open.
    pub fn open_bytes_of(&self, identity: Option<FileIdentity>) -> Option<Arc<FileBytes>> {
        identity.and_then(|identity| self.files.lock().get(&identity).and_then(Weak::upgrade))
    }

    /// The bytes of a file, if it is open and has some that are not durable.
    pub fn known_bytes_of(&self, identity: FileIdentity) -> Option<Arc<FileBytes>> {
        if self.memory.used_bytes() == 0 {
            return None;
        }
        self.files.lock().get(&identity).and_then(Weak::upgrade)
    }

    /// The bytes of a file, shared by its open files.
    pub fn bytes_of(&self, identity: FileIdentity) -> Arc<FileBytes> {
        let mut files = self.files.lock();
        if let Some(file) = files.get(&identity).and_then(Weak::upgrade) {
            return file;
        }
        // The entries of closed files, once in a while.
        if files.len() == files.capacity() {
            files.retain(|_, file| file.strong_count() > 0);
        }
        let file = Arc::new(FileBytes::default());
        files.insert(identity, Arc::downgrade(&file));
        file
    }

    /// Memory of bytes that are not durable, and its limit.
    pub fn memory_use(&self) -> (u64, u64) {
        (self.memory.used_bytes(), self.memory.limit_bytes())
    }

    /// Files with bytes that no node has, and their numbers of bytes: they are lost if this process ends.
    pub fn unsent_files(&self) -> Vec<(String, u64)> {
        let mut files: Vec<(*const FileBytes, String, u64)> = Vec::new();
        for open in self.open_files() {
            let unsent = open.bytes.unsent_bytes();
            let at = Arc::as_ptr(&open.bytes);
            if unsent > 0 && files.iter().all(|(known, ..)| *known != at) {
                files.push((at, open.shown_path(), unsent));
            }
        }
        files.into_iter().map(|(_, path, bytes)| (path, bytes)).collect()
    }
}
