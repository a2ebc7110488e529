//! Moves files and directories of a lost process to another node: makes the requests of each step that the machine gives. A file
//! is opened by its path, by another name, or by one in the same folder, and its locks are set there. It knows neither bytes nor
//! when a lock is lost.
//!
//! Whatever name is tried, it has to lead to the object that was open.

use super::state::{FileMachine, LocksEnd, MoveStep, MoveTerms};
use super::{FilePlace, OpenFile, OpenFiles, set_call};
use crate::writes::calls::{
    CallDeadline, CallEnd, CallKind, CallTarget, HomeProcess, NodeAnswer, RequestContext, WriteCallPlan, is_transient,
    late_move, settle_answer, unexpected,
};
use parking_lot::Mutex;
use spurline_proto::{KnownGrants, LOCK_TIMES, OpenFlags, WriteAnswer, WriteCall};
use spurline_sys::join_path;
use spurline_types::errno::{EACCES, EAGAIN, EIO, ENOENT, ENOTDIR, EPERM, ESTALE};
use spurline_types::open_flags::{O_CREAT, O_EXCL, O_TRUNC};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, FileIdentity, FileLock, ListedName, LockKind, NodePath};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Pause between two attempts to set the locks at the next process.
const RECLAIM_PAUSE: Duration = Duration::from_millis(100);
/// Names of one request for a listing.
const PAGE: u32 = 1000;
/// Pages of a folder that is searched for a file: a log that was rotated lies in a small folder.
const MOST_PAGES: usize = 100;
/// Searches of a folder within one move: a file can be renamed between the listing and the open.
const SEARCHES: usize = 2;
/// How long a folder is not searched again: every call on a file that is gone would read all of it.
const SEARCH_PAUSE: Duration = Duration::from_secs(5);

fn is_denied(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::PermissionDenied | ErrorKind::Io(EPERM | EACCES))
}

/// The path leads to nothing, or to another object.
fn is_gone(kind: ErrorKind) -> bool {
    let by_errno = matches!(kind, ErrorKind::Io(ENOENT | ENOTDIR | ESTALE));
    by_errno || matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::Stale)
}

/// Opens the first path that leads to the object; `None` when none does, or may be used.
///
/// # Errors
/// Those that say nothing about the object, as when a node can't be reached.
fn open_first<T>(
    paths: impl IntoIterator<Item = Vec<u8>>,
    mut open: impl FnMut(&[u8]) -> Result<T>,
) -> Result<Option<(Vec<u8>, T)>> {
    for path in paths {
        match open(&path) {
            Ok(opened) => return Ok(Some((path, opened))),
            Err(error) if is_gone(error.kind()) || is_denied(error.kind()) => {
                tracing::debug!("an open file is not found as '/{}': {error}", String::from_utf8_lossy(&path));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The last search of a folder that did not find the file.
#[derive(Default)]
pub(super) struct VainSearch(Mutex<Option<(u64, Instant)>>);

impl VainSearch {
    /// Notes a search after the loss of a process.
    fn note(&self, lost: &HomeProcess, now: Instant) {
        *self.0.lock() = Some((lost.instance, now));
    }

    /// Whether there was one a short time ago, after the same loss.
    fn is_recent(&self, lost: &HomeProcess, now: Instant) -> bool {
        self.0.lock().is_some_and(|(of, at)| of == lost.instance && now < at + SEARCH_PAUSE)
    }
}

impl OpenFile {
    /// Opens it on a node that can be reached, unless another thread has since `lost`, and sets its locks there.
    ///
    /// # Errors
    /// `ESTALE` when no name is known that leads to it; those of the nodes and of the source.
    pub fn move_on(&self, files: &OpenFiles, lost: &HomeProcess, deadline: CallDeadline) -> Result<()> {
        let _one = self.moving.lock();
        let cut_off_wait = LOCK_TIMES.cut_off_wait.min(files.client.patience().answer);
        let terms = MoveTerms { reclaim_within: files.lock_grace.again_within(), cut_off_wait };
        if !self.machine.lock().begin_move(lost, terms) {
            return Ok(());
        }
        let mut why = "too much time has passed since the lost node answered".to_owned();
        loop {
            let now = Instant::now();
            let step = self.machine.lock().next_step(now);
            let is_waiting = matches!(step, MoveStep::OpenNext { .. } | MoveStep::SetLocks { .. } | MoveStep::Pause);
            if is_waiting && deadline.is_over(now) {
                self.apply(files, &why, FileMachine::stop_move);
                return Err(late_move());
            }
            match step {
                MoveStep::Done => {
                    self.note_held(files);
                    return Ok(());
                }
                MoveStep::Closed => return Err(Error::new(ErrorKind::Unavailable, "the file was closed")),
                MoveStep::OpenNext { lock_lost } => self.enter_opened(files, lost, lock_lost, deadline)?,
                MoveStep::SetLocks { next, locks } => {
                    let end = self.set_locks(files, &next, &locks, deadline, &mut why);
                    self.apply(files, &why, |file| file.note_locks(&locks, end, Instant::now()));
                }
                MoveStep::AskLost => {
                    let open = files.is_open_at(lost, self.number, deadline);
                    if open == Some(true) {
                        let path = self.logged_path();
                        tracing::info!(node = %lost.node, "a node with locks of {path} is reached again");
                    } else if open == Some(false) {
                        why = forgotten_by(lost);
                    }
                    self.apply(files, &why, |file| file.note_asked(open, Instant::now()));
                }
                MoveStep::Pause => {
                    std::thread::sleep(RECLAIM_PAUSE);
                    self.machine.lock().note_pause();
                }
                MoveStep::Enter => self.apply(files, &why, FileMachine::enter_next),
            }
        }
    }

    /// Opens it on a node that can be reached.
    fn enter_opened(
        &self,
        files: &OpenFiles,
        lost: &HomeProcess,
        lock_lost: bool,
        deadline: CallDeadline,
    ) -> Result<()> {
        if lock_lost {
            drop(self.relying.write());
        }
        let home = self.open_next(files, lost, deadline)?.home;
        let path = self.logged_path();
        if home.node != lost.node {
            tracing::info!(from = %lost.node, to = %home.node, "{path}, which is open, moved to another node");
        }
        files.client.retries().add(1);
        if home.instance == lost.instance {
            self.apply(files, &forgotten_by(&home), |file| file.check_kept(Instant::now(), LOCK_TIMES.locks_idle));
        }
        self.apply(files, "", |file| file.note_opened(home, Instant::now()));
        Ok(())
    }

    /// Sets the locks again in process `next`, which has just opened the file. Those that were tried before may have set some.
    fn set_locks(
        &self,
        files: &OpenFiles,
        next: &HomeProcess,
        locks: &[FileLock],
        deadline: CallDeadline,
        why: &mut String,
    ) -> LocksEnd {
        let end = match locks.iter().try_for_each(|lock| self.reclaim_lock(files, next, lock, deadline)) {
            Ok(()) => {
                let path = self.logged_path();
                tracing::info!(node = %next.node, "{} locks of {path} moved to another node", locks.len());
                return LocksEnd::Set;
            }
            Err(end) => end,
        };
        let (error, end) = match end {
            CallEnd::Failed(error) if error.kind() == ErrorKind::Io(EAGAIN) => (error, LocksEnd::Taken),
            CallEnd::Failed(error) => (error, LocksEnd::Denied),
            // Another process has its place.
            CallEnd::Lost { error, .. } if error.kind() == ErrorKind::Stale => (error, LocksEnd::Replaced),
            CallEnd::Lost { error, .. } => (error, LocksEnd::Broken),
        };
        *why = error.to_string();
        if end == LocksEnd::Taken {
            let passed = self.machine.lock().passed().to_vec();
            passed.iter().filter(|passed| *passed != next).for_each(|passed| {
                files.calls.try_close(passed, &[self.number], deadline);
            });
        }
        end
    }

    fn reclaim_lock(
        &self,
        files: &OpenFiles,
        next: &HomeProcess,
        lock: &FileLock,
        deadline: CallDeadline,
    ) -> std::result::Result<(), CallEnd> {
        let call = set_call(self.number, lock);
        let root = Caller::default();
        let doubt_here = self.find_doubt_of_node(&next.node, || {
            let plan = WriteCallPlan::query(CallTarget::Process(next), &call, &root, deadline);
            files.calls.run(WriteCallPlan { kind: CallKind::SetAgain, ..plan })
        })?;
        let doubt = doubt_here.or_else(|| self.find_doubt_elsewhere(files, next, lock, deadline));
        let Some(why) = doubt else { return Ok(()) };
        let unlock = set_call(self.number, &FileLock { kind: LockKind::Unlock, ..*lock });
        // What fails here is released with the file.
        let _ = files.calls.query(CallTarget::Process(next), &unlock, &root, deadline);
        Err(CallEnd::Failed(Error::new(ErrorKind::Io(EIO), why)))
    }

    /// Why a node may have granted another mount the lock since this mount has it, by the answers to a request; none if it has not.
    fn find_doubt_of_node(
        &self,
        node: &str,
        request: impl Fn() -> std::result::Result<NodeAnswer, CallEnd>,
    ) -> std::result::Result<Option<String>, CallEnd> {
        loop {
            let asked = Instant::now();
            let sent = request()?;
            let answered = Instant::now();
            let grants = match settle_answer(sent.answer).map_err(CallEnd::Failed)? {
                WriteAnswer::Grants(grants) => grants,
                other => return Err(CallEnd::Failed(unexpected(&other))),
            };
            let machine = self.machine.lock();
            let in_time = machine.is_in_time(answered);
            // Before this mount got it in the lost process, another mount's lock does not matter.
            let since = machine.locked_since();
            let confirmed = machine.confirmed();
            let is_at_lost_node = *machine.home().node == *node;
            drop(machine);
            // The lost process excluded other mounts until it was lost. Its successor on the same node has granted none in this time.
            if !is_at_lost_node && !has_run_since(grants, confirmed, answered) {
                return Ok(Some(format!(
                    "node {node} was started meanwhile, and does not know what it granted before"
                )));
            }
            if grants.held.is_some() {
                return Ok(Some(format!("another mount has the lock at node {node}")));
            }
            let Some(last_us) = grants.last_us else { return Ok(None) };
            let ago = Duration::from_micros(last_us);
            match since.map_or(Some(false), |since| was_granted_before(ago, since, asked..answered)) {
                Some(true) => return Ok(None),
                // No other mount can have the lock now, so that the next answer is about the same one, and may be faster.
                None if in_time => std::thread::sleep(RECLAIM_PAUSE),
                Some(false) | None => {
                    return Ok(Some(format!("another mount has had the lock meanwhile, granted by node {node}")));
                }
            }
        }
    }

    /// Why another mount may have been granted a lock meanwhile by another node: a mount that could not reach the lost process uses
    /// another one, and may have got the lock there when the lost one ended. The mount of this lock may be cut off from that
    /// node, so each node has to answer while there is time. The node of the lost process need not: it is dead, or grants no new
    /// lock in that time.
    fn find_doubt_elsewhere(
        &self,
        files: &OpenFiles,
        next: &HomeProcess,
        lock: &FileLock,
        deadline: CallDeadline,
    ) -> Option<String> {
        let FilePlace { path, identity: expected } = self.place.lock().clone();
        if expected.is_none() && !self.is_path {
            return None;
        }
        let call = self.find_call(NodePath { path: &path, expected }, lock);
        let root = Caller::default();
        let lost = self.home();
        for node in files.calls.other_nodes(next, &lost) {
            loop {
                let doubt = self
                    .find_doubt_of_node(&node, || files.calls.query(CallTarget::Node(&node), &call, &root, deadline));
                let error = match doubt {
                    Ok(None) => break,
                    Ok(doubt) => return doubt,
                    Err(CallEnd::Failed(error)) if !is_transient(&error) => {
                        tracing::debug!("node {node} does not know its grants: {error}");
                        break;
                    }
                    Err(CallEnd::Failed(error) | CallEnd::Lost { error, .. }) => error,
                };
                if *node == *lost.node {
                    break;
                }
                if !self.machine.lock().is_in_time(Instant::now()) {
                    return Some(format!("node {node} may have granted it to another mount meanwhile: {error}"));
                }
                std::thread::sleep(RECLAIM_PAUSE);
            }
        }
        None
    }

    /// Opens it on a node that can be reached.
    ///
    /// # Errors
    /// As [`OpenFile::move_on`].
    pub(super) fn open_next(
        &self,
        files: &OpenFiles,
        lost: &HomeProcess,
        deadline: CallDeadline,
    ) -> Result<NodeAnswer> {
        let FilePlace { path, identity: expected } = self.place.lock().clone();
        let mut moved = self.open_at(files, &path, expected, deadline);
        if moved.as_ref().is_err_and(|error| is_gone(error.kind()))
            && let Some(known) = expected
        {
            match self.open_elsewhere(files, &path, known, lost, deadline) {
                Ok(Some((other, opened))) => {
                    let mut place = self.place.lock();
                    // A rename of this mount may have been faster.
                    if place.path == path {
                        place.path = other;
                    }
                    moved = Ok(opened);
                }
                Ok(None) => {}
                // It may be found later: its bytes wait, as for a node.
                Err(error) => moved = Err(error),
            }
        }
        moved.map_err(|error| {
            let shown = String::from_utf8_lossy(&path);
            let why = format!("node {} was lost, and '/{shown}' can't be opened again", lost.node);
            if !is_gone(error.kind()) {
                return error.context(why);
            }
            // The program has it open, so that it exists for the program.
            Error::new(ErrorKind::Io(ESTALE), format!("{why}: no known name leads to the file: {error}"))
        })
    }

    /// Opens it by a path.
    fn open_at(
        &self,
        files: &OpenFiles,
        path: &[u8],
        expected: Option<FileIdentity>,
        deadline: CallDeadline,
    ) -> Result<NodeAnswer> {
        let at = NodePath { path, expected };
        let call = match self.flags {
            Some(flags) => {
                let flags = OpenFlags::new(flags & !(O_CREAT | O_EXCL | O_TRUNC));
                WriteCall::OpenAgain { at, flags, file: self.number }
            }
            None if self.is_path => WriteCall::OpenPath { at, file: self.number, reserves: false },
            None => WriteCall::OpenDirectory { at, file: self.number },
        };
        self.change_anyway(files, path, call, deadline)
    }

    /// Makes a call as root: the right to open the file was checked, and may have been lost since, as with a file that was
    /// made read-only.
    fn change_anyway(
        &self,
        files: &OpenFiles,
        path: &[u8],
        call: WriteCall<'_>,
        deadline: CallDeadline,
    ) -> Result<NodeAnswer> {
        let root = Caller::default();
        match files.calls.change_at(&files.calls.draw_number(), path, &call, RequestContext::of(&root), deadline) {
            Err(error) if is_denied(error.kind()) => {
                let context = RequestContext::of(&self.caller);
                files.calls.change_at(&files.calls.draw_number(), path, &call, context, deadline)
            }
            other => other,
        }
    }

    /// Opens it by another name than `gone`: one that the mount knows, or one in the same folder, where another host may
    /// have renamed it. `None` when no such name leads to it.
    fn open_elsewhere(
        &self,
        files: &OpenFiles,
        gone: &[u8],
        known: FileIdentity,
        lost: &HomeProcess,
        deadline: CallDeadline,
    ) -> Result<Option<(Vec<u8>, NodeAnswer)>> {
        let open = |path: &[u8]| self.open_at(files, path, Some(known), deadline);
        let names = files.names().map_or(Vec::new(), |names| names.paths_of(known));
        if let Some(found) = open_first(names.into_iter().filter(|path| path != gone), open)? {
            return Ok(Some(found));
        }
        // An identity that does not last can belong to a later object of the folder. The root and a file without a name are in
        // no folder.
        if !known.is_lasting() || gone.is_empty() || self.vain_search.is_recent(lost, Instant::now()) {
            return Ok(None);
        }
        let folder = &gone[..gone.iter().rposition(|byte| *byte == b'/').unwrap_or(0)];
        for _ in 0..SEARCHES {
            let Some(path) = self.find_in_folder(files, folder, known, deadline)? else { break };
            if let Some(found) = open_first([path], open)? {
                return Ok(Some(found));
            }
        }
        self.vain_search.note(lost, Instant::now());
        Ok(None)
    }

    /// The path of the entry of a folder that is this object; `None` when there is none, or the folder can't be read.
    fn find_in_folder(
        &self,
        files: &OpenFiles,
        folder: &[u8],
        known: FileIdentity,
        deadline: CallDeadline,
    ) -> Result<Option<Vec<u8>>> {
        let file = files.calls.new_file_number();
        let Some((_, NodeAnswer { home, .. })) = open_first([folder.to_vec()], |_| {
            let call = WriteCall::OpenDirectory { at: NodePath { path: folder, expected: None }, file };
            self.change_anyway(files, folder, call, deadline)
        })?
        else {
            return Ok(None);
        };
        let found = self.find_listed(files, &home, file, known, deadline);
        files.calls.close_numbers(&home, &[file]);
        Ok(found?.map(|name| join_path(folder, &name.name)))
    }

    /// The entry that is this object, in an open directory of a process.
    fn find_listed(
        &self,
        files: &OpenFiles,
        home: &HomeProcess,
        file: u64,
        known: FileIdentity,
        deadline: CallDeadline,
    ) -> Result<Option<ListedName>> {
        let mut from = 0;
        for _ in 0..MOST_PAGES {
            let call = WriteCall::ReadDirectory { file, from, max: PAGE, attrs: true };
            let lost = || Error::new(ErrorKind::Unavailable, format!("node {} was lost during a search", home.node));
            let answer = match files.calls.query(CallTarget::Process(home), &call, &self.caller, deadline) {
                Ok(sent) if sent.answer == WriteAnswer::UnknownFile => return Err(lost()),
                Ok(sent) => settle_answer(sent.answer),
                Err(CallEnd::Lost { .. }) => return Err(lost()),
                Err(CallEnd::Failed(error)) => Err(error),
            };
            let names = match answer {
                Ok(WriteAnswer::Names(names)) => names,
                Ok(other) => return Err(unexpected(&other)),
                Err(error) if is_gone(error.kind()) => return Ok(None),
                Err(error) => return Err(error),
            };
            let Some(last) = names.last() else { break };
            from = last.next;
            if let Some(found) = names.into_iter().find(|name| name.attr.is_some_and(|attr| attr.identity == known)) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// Why the locks are lost of a file that its process has closed.
pub(super) fn forgotten_by(home: &HomeProcess) -> String {
    format!("node {} has closed the file, as it heard nothing from this mount for long", home.node)
}

/// Whether the process that gave an answer ran when the lost process had the locks for certain.
fn has_run_since(grants: KnownGrants, confirmed: Option<Instant>, answered: Instant) -> bool {
    confirmed
        .is_some_and(|confirmed| Duration::from_micros(grants.up_us) > answered.saturating_duration_since(confirmed))
}

/// Whether a lock that another mount got this long `ago` was granted before `since`, by an answer that a node gave at some time
/// of `request`; `None` if that request took too long to tell.
fn was_granted_before(ago: Duration, since: Instant, request: Range<Instant>) -> Option<bool> {
    if ago > request.end.saturating_duration_since(since) {
        return Some(true);
    }
    if ago <= request.start.saturating_duration_since(since) {
        return Some(false);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_leads_elsewhere_is_passed_over_and_a_node_that_is_away_ends_the_search() {
        let paths = || [b"gone".to_vec(), b"denied".to_vec(), b"away".to_vec(), b"here".to_vec()];
        let mut away = true;
        let mut open = |path: &[u8]| match path {
            b"gone" => Err(Error::new(ErrorKind::Io(ENOENT), "no such file")),
            b"denied" => Err(Error::new(ErrorKind::PermissionDenied, "not for this user")),
            b"away" if std::mem::take(&mut away) => Err(Error::new(ErrorKind::Unavailable, "no node")),
            b"away" => Err(Error::new(ErrorKind::Stale, "another object")),
            _ => Ok(7),
        };
        let error = open_first(paths(), &mut open).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "the bytes wait for a node");
        assert_eq!(open_first(paths(), &mut open).unwrap(), Some((b"here".to_vec(), 7)));
        assert_eq!(open_first([b"gone".to_vec()], &mut open).unwrap(), None);
    }

    #[test]
    fn a_folder_is_searched_again_after_a_pause_or_another_loss() {
        let process = |instance| HomeProcess { node: "n".into(), instance };
        let (search, now) = (VainSearch::default(), Instant::now());
        assert!(!search.is_recent(&process(1), now));
        search.note(&process(1), now);
        assert!(search.is_recent(&process(1), now));
        assert!(!search.is_recent(&process(2), now) && !search.is_recent(&process(1), now + SEARCH_PAUSE));
    }

    #[test]
    fn a_process_that_was_started_after_the_last_answer_of_the_lost_one_does_not_know_all_grants() {
        let confirmed = Instant::now();
        let answered = confirmed + Duration::from_millis(700);
        let grants = |up_ms: u64| KnownGrants { last_us: None, up_us: 1000 * up_ms, held: None };
        assert!(has_run_since(grants(701), Some(confirmed), answered));
        assert!(!has_run_since(grants(700), Some(confirmed), answered));
        assert!(!has_run_since(grants(9000), None, answered));
    }

    #[test]
    fn a_slow_answer_does_not_tell_which_of_two_locks_was_first() {
        let since = Instant::now();
        let asked = since + Duration::from_millis(100);
        let fast = asked..asked + Duration::from_millis(2);
        let slow = asked..asked + Duration::from_millis(200);
        for (ago_ms, by_fast, by_slow) in [
            (301, Some(true), Some(true)),
            (300, Some(true), None),
            (103, Some(true), None),
            (102, None, None),
            (101, None, None),
            (100, Some(false), Some(false)),
            (50, Some(false), Some(false)),
        ] {
            let ago = Duration::from_millis(ago_ms);
            assert_eq!(was_granted_before(ago, since, fast.clone()), by_fast, "{ago_ms} ms");
            assert_eq!(was_granted_before(ago, since, slow.clone()), by_slow, "{ago_ms} ms");
        }
    }
}
