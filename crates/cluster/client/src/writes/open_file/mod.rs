//! Open files and directories of a group: each stays with the process of a node that opened it, and moves to another node, with its
//! bytes and its locks, when that process is lost. The room knows no placement and no wire format.
//!
//! 1. **A call** goes to the file's process ([`call_open`]).
//! 2. **A loss** begins a move: [`state`] has the table of states, events and actions, and says each next step; [`moving`] makes the
//!    requests.
//! 3. **Opening.** The next process opens the file by its path and identity, and its locks are set there.
//! 4. **Bytes** that the lost process had are sent again, before any other call on the file.
//! 5. **A lost lock** fails the file until it is unlocked or closed, for all open files of the object: the owner of a lock may write
//!    through another process.

mod closing;
mod grace;
mod moving;
mod path_locks;
mod registry;
mod sending;
mod state;
mod syncing;

use super::bytes::{FileBytes, ReportedFailures};
use super::calls::{
    CallDeadline, CallEnd, CallKind, CallTarget, ChangeNumber, HomeProcess, MaybeExecuted, NodeAnswer, RequestContext,
    WriteCallPlan, attr_of, node_hash, settle_answer, unexpected,
};
use grace::LockGrace;
use moving::VainSearch;
use parking_lot::{Mutex, MutexGuard, RwLock};
pub use path_locks::GroupPathLocks;
pub(crate) use registry::OpenFiles;
use spurline_proto::{WriteAnswer, WriteCall};
use spurline_sys::O_DIRECT;
use spurline_types::errno::EIO;
use spurline_types::open_flags::{O_ACCMODE, O_APPEND, O_DSYNC};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::kept_client::HeldFile;
use spurline_volume::locks::LockOwner;
use spurline_volume::path_locks::KeepPlace;
use spurline_volume::writes::{Caller, FileIdentity, FileLock, LockKind, NodeAttr, OpenAttrCall};
use state::{FileAction, FileMachine, FileOutcome, LockAttempt, SettleTime};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often an open file moves to another process within one call.
pub(super) const MOVES_PER_CALL_MAX: usize = 16;

/// A file that a node has opened.
pub(crate) struct FileOpening<'a> {
    pub number: u64,
    pub attr: NodeAttr,
    pub flags: u32,
    pub caller: &'a Caller,
    pub home: HomeProcess,
}

/// A file that a node has open for an earlier process.
pub(crate) struct AdoptedFile<'a> {
    pub number: u64,
    pub identity: FileIdentity,
    pub flags: u32,
    pub caller: &'a Caller,
    pub home: HomeProcess,
}

/// Where an open object is found.
#[derive(Debug, Clone)]
pub(super) struct FilePlace {
    pub path: Vec<u8>,
    pub identity: Option<FileIdentity>,
}

/// An open file or directory as the nodes know it.
pub(crate) struct OpenFile {
    number: u64,
    /// `None` for a directory, and for a path.
    flags: Option<u32>,
    /// It is a path without bytes, which is open for locks.
    is_path: bool,
    caller: Caller,
    /// Its path now, and the object.
    place: Mutex<FilePlace>,
    machine: Mutex<FileMachine>,
    /// As the machine says, for those that only want to know this.
    has_locks: AtomicBool,
    /// Held while it is opened elsewhere.
    moving: Mutex<()>,
    /// Held by requests that rely on its locks, from the look at these to the answer. An opening after their loss has the same
    /// number: it waits for those that were sent before.
    relying: RwLock<()>,
    vain_search: VainSearch,
    /// The bytes of the file that are not durable.
    pub bytes: Arc<FileBytes>,
    pub reported: ReportedFailures,
    /// The last close failed, as no node took the bytes.
    failed_close: AtomicBool,
    /// It has written or changed something, which a close has to report.
    used: AtomicBool,
    /// An earlier process may have written bytes that are not durable, and that this process can't send again.
    has_earlier_bytes: AtomicBool,
    /// The record that shows where it is; 0 for none.
    record: Mutex<u32>,
    /// Gets where it is, in place of a record.
    keep: OnceLock<KeepPlace>,
}

impl OpenFile {
    pub fn new(opening: FileOpening<'_>, path: Vec<u8>, bytes: Arc<FileBytes>) -> OpenFile {
        let place = FilePlace { path, identity: Some(opening.attr.identity) };
        let reported = bytes.start_reports();
        let FileOpening { number, flags, caller, home, .. } = opening;
        OpenFile { flags: Some(flags), bytes, reported, ..OpenFile::new_directory(number, place, caller, home) }
    }

    /// A file of an earlier process, with bytes that may be lost with the node's process.
    pub fn adopted(adopted: AdoptedFile<'_>, path: Vec<u8>, bytes: Arc<FileBytes>) -> OpenFile {
        let AdoptedFile { number, identity, flags, caller, home } = adopted;
        let place = FilePlace { path, identity: Some(identity) };
        let reported = bytes.start_reports();
        let opened = OpenFile::new_directory(number, place, caller, home);
        let has_earlier_bytes = AtomicBool::new(flags & O_ACCMODE != 0);
        let used = AtomicBool::new(true);
        OpenFile { flags: Some(flags), bytes, reported, has_earlier_bytes, used, ..opened }
    }

    pub fn new_directory(number: u64, place: FilePlace, caller: &Caller, home: HomeProcess) -> OpenFile {
        OpenFile {
            number,
            flags: None,
            is_path: false,
            caller: caller.clone(),
            place: Mutex::new(place),
            machine: Mutex::new(FileMachine::new(home)),
            has_locks: AtomicBool::new(false),
            moving: Mutex::new(()),
            relying: RwLock::new(()),
            vain_search: VainSearch::default(),
            bytes: Arc::default(),
            reported: ReportedFailures::default(),
            failed_close: AtomicBool::new(false),
            used: AtomicBool::new(false),
            has_earlier_bytes: AtomicBool::new(false),
            record: Mutex::new(0),
            keep: OnceLock::new(),
        }
    }

    /// This record shows where it is from now on.
    pub fn keep_record(&self, files: &OpenFiles, record: u32) {
        *self.record.lock() = record;
        self.note_held(files);
    }

    /// For the next process of this client.
    fn note_held(&self, files: &OpenFiles) {
        let record = self.record.lock();
        let held = self.held();
        files.calls.note_held(*record, &held);
        if let Some(keep) = self.keep.get() {
            keep(&held);
        }
    }

    /// Where it is, for the next process of this client.
    pub fn held(&self) -> HeldFile {
        let home = self.home();
        HeldFile { number: self.number, node: node_hash(&home.node), process: home.instance, closing: false }
    }

    /// Continues with a lock that a process before has set. Whether it was lost meanwhile is known at the next answer.
    pub fn adopt_lock(&self, lock: &FileLock) {
        let mut machine = self.machine.lock();
        machine.adopt_lock(lock, Instant::now());
        self.has_locks.store(machine.has_locks(), Ordering::Relaxed);
    }

    /// Whether an earlier process may have written bytes that are not durable.
    pub fn has_earlier_bytes(&self) -> bool {
        self.has_earlier_bytes.load(Ordering::Acquire)
    }

    pub fn end_earlier_bytes(&self) {
        self.has_earlier_bytes.store(false, Ordering::Release);
    }

    /// The process is lost that has bytes of the process before.
    fn lose_earlier_bytes(&self, node: &str) {
        if self.has_earlier_bytes.swap(false, Ordering::AcqRel) {
            let why =
                format!("node {node} was lost with bytes of an earlier process of this mount that were not synced");
            tracing::warn!("{}: {why}", self.logged_path());
            self.bytes.add_failure(Error::new(ErrorKind::Io(EIO), why));
        }
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn home(&self) -> HomeProcess {
        self.machine.lock().home().clone()
    }

    /// Whether the program has closed the file: a call of another thread on the file can fail for that.
    pub fn is_closed(&self) -> bool {
        self.machine.lock().is_closed()
    }

    /// While the guard lives, the file moves to no other process. `None` while it moves.
    pub fn try_hold_place(&self) -> Option<MutexGuard<'_, ()>> {
        self.moving.try_lock()
    }

    /// Whether the last close has reported that no node took the bytes.
    pub fn failed_close(&self) -> bool {
        self.failed_close.load(Ordering::Relaxed)
    }

    pub fn set_failed_close(&self, failed: bool) {
        self.failed_close.store(failed, Ordering::Relaxed);
    }

    /// Whether it has written or changed something.
    pub fn is_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    pub fn note_used(&self) {
        self.used.store(true, Ordering::Relaxed);
    }

    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    pub fn has_flag(&self, flag: u32) -> bool {
        self.flags.is_some_and(|flags| flags & flag != 0)
    }

    /// A write returns when its process has the bytes.
    pub fn writes_at_once(&self) -> bool {
        self.has_flag(O_DSYNC | O_DIRECT)
    }

    /// The process makes each write durable.
    pub fn writes_durably(&self) -> bool {
        self.has_flag(O_DSYNC)
    }

    pub fn writes(&self) -> bool {
        self.has_flag(O_ACCMODE)
    }

    /// It can write, and where it wants.
    pub fn writes_anywhere(&self) -> bool {
        self.has_flag(O_ACCMODE) && !self.has_flag(O_APPEND)
    }

    /// Whether its path is `path` or below it.
    pub fn is_below(&self, path: &[u8]) -> bool {
        let place = self.place.lock();
        let rest = place.path.strip_prefix(path);
        rest.is_some_and(|rest| path.is_empty() || rest.is_empty() || rest[0] == b'/')
    }

    pub fn set_path(&self, path: Vec<u8>) {
        self.place.lock().path = path;
    }

    pub fn current_path(&self) -> Vec<u8> {
        self.place.lock().path.clone()
    }

    /// The path, for messages.
    pub fn shown_path(&self) -> String {
        String::from_utf8_lossy(&self.place.lock().path).into_owned()
    }

    /// The path in quotes, for the log.
    pub fn logged_path(&self) -> String {
        let path = self.shown_path();
        if path.is_empty() { "a file without a name".to_owned() } else { format!("'/{path}'") }
    }

    /// The attributes, by its process.
    pub fn stat_open(&self, files: &OpenFiles) -> Result<NodeAttr> {
        attr_of(query_open(files, self, WriteCall::StatOpen { file: self.number }, &self.caller)?)
    }

    /// Its path after a rename of `from` to `to`, or their exchange.
    pub fn follow_rename(&self, from: &[u8], to: &[u8], exchange: bool) {
        let mut place = self.place.lock();
        for (old, new) in [(from, to), (to, from)].into_iter().take(1 + usize::from(exchange)) {
            let rest = place.path.strip_prefix(old).filter(|rest| rest.is_empty() || rest[0] == b'/');
            if let Some(rest) = rest {
                place.path = [new, rest].concat();
                return;
            }
        }
    }
}

/// The locks that were set through it.
impl OpenFile {
    /// Whether it has locks, be they lost or not.
    pub fn has_locks(&self) -> bool {
        self.has_locks.load(Ordering::Relaxed)
    }

    /// The locks of all owners.
    pub fn all_locks(&self) -> Vec<FileLock> {
        self.machine.lock().all_locks()
    }

    /// The locks of an owner.
    pub fn locks_of(&self, owner: LockOwner) -> Vec<FileLock> {
        self.machine.lock().locks_of(owner)
    }

    /// The time of a request whose answer confirms the locks.
    pub fn begin_confirm(&self) -> Option<Instant> {
        self.has_locks().then(Instant::now)
    }

    /// Process `home` answered a request that was sent at `sent`.
    pub fn confirm(&self, sent: Option<Instant>, home: &HomeProcess) {
        if let Some(sent) = sent {
            self.machine.lock().confirm(sent, home);
        }
    }

    /// Whether the process has answered a request that was sent within this time.
    fn was_confirmed_within(&self, time: Duration) -> bool {
        self.machine.lock().confirmed().is_some_and(|confirmed| confirmed.elapsed() < time)
    }

    /// A request for a lock is about to be sent.
    pub fn begin_lock(&self) -> LockAttempt {
        self.machine.lock().begin_lock(Instant::now())
    }

    /// Notes a lock that `home` granted. False if the file has begun to move since the attempt.
    pub fn note_granted(&self, lock: &FileLock, attempt: LockAttempt, home: &HomeProcess) -> bool {
        let mut machine = self.machine.lock();
        machine.confirm(attempt.sent, home);
        let granted = machine.note_granted(lock, attempt, home);
        self.has_locks.store(machine.has_locks(), Ordering::Relaxed);
        granted
    }

    /// Forgets a lock that is to be released: one that is lost needs no node to be given up.
    pub fn forget_lock(&self, files: &OpenFiles, lock: &FileLock) {
        self.apply(files, "", |file| file.forget_lock(lock));
    }

    /// The program has closed it. Returns its process.
    pub fn mark_closed(&self, files: &OpenFiles) -> HomeProcess {
        self.apply(files, "", FileMachine::close);
        self.home()
    }

    /// Process `home` has closed it, and with it its locks.
    pub fn note_unknown(&self, files: &OpenFiles, home: &HomeProcess) {
        self.apply(files, &moving::forgotten_by(home), |file| file.note_forgotten(home));
    }

    /// Changes the machine, and does what follows. `why` a lock is lost by that.
    fn apply(&self, files: &OpenFiles, why: &str, change: impl FnOnce(&mut FileMachine) -> FileOutcome) {
        let mut machine = self.machine.lock();
        let outcome = change(&mut machine);
        self.has_locks.store(machine.has_locks(), Ordering::Relaxed);
        // Before another thread sees the state.
        for action in outcome.actions {
            match action {
                FileAction::BeginLoss => self.bytes.begin_lock_loss(),
                FileAction::EndLoss => self.bytes.end_lock_loss(),
                _ => {}
            }
        }
        drop(machine);
        for action in outcome.actions {
            self.perform(files, *action, &outcome, why);
        }
    }

    fn perform(&self, files: &OpenFiles, action: FileAction, outcome: &FileOutcome, why: &str) {
        match action {
            FileAction::BeginLoss => {
                let path = self.logged_path();
                tracing::warn!(
                    "a lock of {path} is lost: {why}; the file fails with EIO until it is closed or unlocked"
                );
            }
            FileAction::EndLoss => {}
            FileAction::EnterNext => {
                if let Some(left) = &outcome.left {
                    self.machine.lock().settle(files.lock_grace.note_lost(left.instance));
                }
            }
            FileAction::CloseNext => {
                outcome.next.iter().for_each(|next| files.calls.close_numbers(next, &[self.number]));
            }
            FileAction::CloseNextLater => {
                outcome.next.iter().for_each(|next| files.calls.close_later(next, &[self.number]));
            }
            FileAction::CloseLeft => {
                outcome.left.iter().for_each(|left| files.calls.close_later(left, &[self.number]));
            }
            FileAction::Resend => outcome.left.iter().for_each(|left| {
                self.lose_earlier_bytes(&left.node);
                files.resend_from(self, left.instance);
            }),
        }
    }

    /// Fails for a new lock while mounts that had locks in a lost process may take them again.
    ///
    /// # Errors
    /// `Throttled` until then.
    fn check_settled(&self, files: &OpenFiles) -> Result<()> {
        let settled = self.machine.lock().settled();
        let at = match settled {
            SettleTime::At(at) => Some(at),
            SettleTime::Entered => None,
            SettleTime::Unknown => {
                let away = files.calls.better_node_away(&self.current_path(), &self.home());
                let left = away.map(|away| files.lock_grace.new_after().saturating_sub(away));
                let at = Instant::now() + left.unwrap_or_default();
                self.machine.lock().settle_first(at);
                Some(at)
            }
        };
        if at.is_none_or(|at| Instant::now() < at) {
            let why = "a node was lost: mounts that had locks there take them again first";
            return Err(Error::new(ErrorKind::Throttled, why));
        }
        Ok(())
    }

    /// Fails for a call that relies on locks which are lost.
    fn check_lost(&self, call: &WriteCall<'_>) -> Result<()> {
        let relies = matches!(
            call,
            WriteCall::Read { .. }
                | WriteCall::Write { .. }
                | WriteCall::Allocate { .. }
                | WriteCall::SetAttrOpen { .. }
                | WriteCall::SetLock { .. }
        );
        if relies { self.bytes.check_lock_loss() } else { Ok(()) }
    }

    /// Fails for a call that relies on locks which are lost, and for a new lock that has to wait.
    fn check_locks(&self, files: &OpenFiles, call: &WriteCall<'_>) -> Result<()> {
        self.check_lost(call)?;
        match call {
            WriteCall::SetLock { kind, .. } if *kind != LockKind::Unlock => self.check_settled(files),
            _ => Ok(()),
        }
    }

    /// While the guard lives, the file is not opened again without its locks.
    ///
    /// # Errors
    /// When they are lost.
    pub fn begin_relying(&self) -> Result<parking_lot::RwLockReadGuard<'_, ()>> {
        let relying = self.relying.read();
        self.bytes.check_lock_loss()?;
        Ok(relying)
    }
}

/// The call that sets or removes a lock of an open file.
pub(super) fn set_call(file: u64, lock: &FileLock) -> WriteCall<'static> {
    let FileLock { family, owner, range, kind } = *lock;
    WriteCall::SetLock { file, family, owner, range, kind }
}

/// A request for a file with locks, so that its node keeps them, or the next one gets them.
pub(super) fn renew_locks(files: &OpenFiles, opened: &OpenFile) {
    // A failure is that of the next call, too.
    let _ = query_open(files, opened, WriteCall::StatOpen { file: opened.number }, &opened.caller);
}

/// A call on an open object, wherever that is.
pub(super) struct OpenCall<'a> {
    pub kind: CallKind,
    pub call: &'a WriteCall<'a>,
    pub context: RequestContext<'a>,
    /// Where bytes of the answer go.
    pub landing: &'a mut [u8],
    /// The processes that may have executed it.
    pub before: MaybeExecuted,
    pub deadline: CallDeadline,
}

impl<'a> OpenCall<'a> {
    /// A call that may be repeated.
    pub fn query(call: &'a WriteCall<'a>, caller: &'a Caller, deadline: CallDeadline) -> OpenCall<'a> {
        let context = RequestContext::of(caller);
        let before = MaybeExecuted::Nowhere;
        OpenCall { kind: CallKind::Query, call, context, landing: &mut [], before, deadline }
    }

    fn plan<'b>(&'b mut self, home: &'b HomeProcess, before: MaybeExecuted) -> WriteCallPlan<'b> {
        let OpenCall { kind, call, context, landing, deadline, .. } = self;
        let target = CallTarget::Process(home);
        WriteCallPlan { target, kind: *kind, call, context: *context, landing, before, deadline: *deadline }
    }
}

/// A call on an open object: on its process, or on the next one, after it got the bytes that the first one may have lost. The
/// answer may be an error of the source.
pub(super) fn call_open(files: &OpenFiles, opened: &OpenFile, mut open: OpenCall<'_>) -> Result<NodeAnswer> {
    let OpenCall { call, deadline, .. } = open;
    let mut before = open.before;
    let mut last = None;
    for _ in 0..MOVES_PER_CALL_MAX {
        let relying = opened.relying.read();
        opened.check_locks(files, call)?;
        let home = opened.home();
        let confirms = opened.begin_confirm();
        let sent = files.calls.run(open.plan(&home, before));
        drop(relying);
        match sent {
            Ok(sent) if sent.answer == WriteAnswer::UnknownFile => opened.note_unknown(files, &home),
            Ok(sent) => {
                opened.confirm(confirms, &home);
                // Another thread may have seen the locks lost meanwhile, and opened the file again without them.
                if !matches!(call, WriteCall::SetLock { .. }) {
                    opened.check_lost(call)?;
                }
                return Ok(sent);
            }
            Err(CallEnd::Failed(error)) => return Err(error),
            Err(CallEnd::Lost { error, sent }) => {
                if sent {
                    before.note_sent(home.instance);
                }
                last = Some(error);
            }
        }
        opened.move_on(files, &home, deadline)?;
        // A lock that it has set, or should have removed, would stand in the way.
        if matches!(call, WriteCall::SetLock { .. }) {
            files.close_left(opened, &home, deadline);
        }
        files.send_all(&opened.bytes)?;
        if deadline.is_over(Instant::now()) {
            break;
        }
    }
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "no node keeps the file open")))
}

/// As [`call_open`], for a call that may be repeated.
pub(super) fn query_open(
    files: &OpenFiles,
    opened: &OpenFile,
    call: WriteCall<'_>,
    caller: &Caller,
) -> Result<WriteAnswer> {
    settle_answer(call_open(files, opened, OpenCall::query(&call, caller, files.calls.begin()))?.answer)
}

/// As [`call_open`], for a call that is made once.
pub(super) fn change_open(
    files: &OpenFiles,
    opened: &OpenFile,
    call: &WriteCall<'_>,
    context: RequestContext<'_>,
) -> Result<WriteAnswer> {
    let sent = change_open_as(&files.calls.draw_for_request(), files, opened, call, context)?;
    settle_answer(sent.answer)
}

/// As [`change_open`], under this number.
pub(super) fn change_open_as(
    number: &ChangeNumber<'_>,
    files: &OpenFiles,
    opened: &OpenFile,
    call: &WriteCall<'_>,
    context: RequestContext<'_>,
) -> Result<NodeAnswer> {
    opened.note_used();
    let kind = CallKind::Change { number: number.get() };
    let before = number.before();
    let deadline = files.calls.begin();
    let sent = call_open(files, opened, OpenCall { kind, call, context, landing: &mut [], before, deadline })?;
    files.calls.note_touched(&sent.home);
    Ok(sent)
}

/// A call about the rights or the extended attributes of an open object: a value or names, and nothing for the others.
pub(super) fn call_attr_open(
    files: &OpenFiles,
    opened: &OpenFile,
    call: &OpenAttrCall<'_>,
    caller: &Caller,
) -> Result<Vec<u8>> {
    let of_open = WriteCall::AttrOpen { file: opened.number, call: *call };
    let answer = match *call {
        OpenAttrCall::Set { value, .. } => {
            change_open(files, opened, &of_open, RequestContext { payload: value, ..RequestContext::of(caller) })?
        }
        OpenAttrCall::Remove(_) => change_open(files, opened, &of_open, RequestContext::of(caller))?,
        OpenAttrCall::Access(_) | OpenAttrCall::Get(_) | OpenAttrCall::List => {
            query_open(files, opened, of_open, caller)?
        }
    };
    match answer {
        WriteAnswer::Bytes(found) => Ok(found),
        WriteAnswer::Done => Ok(Vec::new()),
        other => Err(unexpected(&other)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_follow_renames_of_their_folders() {
        let home = HomeProcess { node: "n".into(), instance: 1 };
        let opened =
            OpenFile::new_directory(1, FilePlace { path: b"a/b/c".to_vec(), identity: None }, &Caller::default(), home);
        let path = || opened.current_path();
        opened.follow_rename(b"a/b", b"x", false);
        assert_eq!(path(), b"x/c");
        opened.follow_rename(b"x/", b"y", false);
        opened.follow_rename(b"x/cc", b"y", false);
        assert_eq!(path(), b"x/c", "neither is above it");
        opened.follow_rename(b"q", b"x", true);
        assert_eq!(path(), b"q/c", "an exchange moves both ways");
        opened.follow_rename(b"q/c", b"r", false);
        assert_eq!(path(), b"r");
    }
}
