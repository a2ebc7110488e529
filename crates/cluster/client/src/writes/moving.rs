//! Opens files and directories of a lost process on another node: by their path, by another name, or by one in the same folder. It
//! knows neither their bytes nor what their locks mean.
//!
//! Whatever name is tried, it has to lead to the object that was open.

use super::behind::unsteady;
use super::calls::{CallDeadline, CallEnd, CallTarget, HomeProcess, RequestContext, settle_answer, unexpected};
use super::files::OpenedAs;
use super::held_locks::FileAfterLoss;
use super::{GroupWrites, O_TRUNC, join_path};
use parking_lot::{Mutex, MutexGuard};
use spurline_proto::{OpenFlags, WriteAnswer, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, FileIdentity, ListedName, NodePath};
use std::time::{Duration, Instant};

/// From `asm-generic/fcntl.h`: flags that count only once.
const O_CREAT: u32 = 0o100;
const O_EXCL: u32 = 0o200;
/// From `asm-generic/errno-base.h` and `errno.h`.
const EPERM: i32 = 1;
const ENOENT: i32 = 2;
const EACCES: i32 = 13;
const ENOTDIR: i32 = 20;
const ESTALE: i32 = 116;
/// Names of one request for a listing.
const PAGE: u32 = 1000;
/// Pages of a folder that is searched for a file: a log that was rotated lies in a small one.
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

impl OpenedAs {
    /// While the guard lives, the file moves to no other process. `None` while it moves.
    pub(super) fn try_hold_place(&self) -> Option<MutexGuard<'_, ()>> {
        self.moving.try_lock()
    }

    /// Opens it on a node that can be reached, unless another thread has since `lost`.
    ///
    /// # Errors
    /// `ESTALE` when no name is known that leads to it; those of the nodes and of the source.
    pub(super) fn move_on(&self, writes: &GroupWrites, lost: &HomeProcess, deadline: CallDeadline) -> Result<()> {
        let _one = self.moving.lock();
        if *self.home.lock() != *lost {
            return Ok(());
        }
        let mut passed = Vec::new();
        while !deadline.is_over(Instant::now()) {
            if self.is_closed() {
                return Err(Error::new(ErrorKind::Unavailable, "the file was closed"));
            }
            if self.held.are_lost() {
                drop(self.relying.write());
            }
            let home = self.open_next(writes, lost, deadline)?;
            tracing::info!(
                from = lost.node,
                to = home.node,
                "{}, which is open, moved to another node",
                self.logged_path()
            );
            writes.client.retries().add(1);
            if home.instance == lost.instance {
                self.check_kept_open(&home);
                *self.home.lock() = home.clone();
                if self.is_closed() {
                    writes.calls.close_later(&home, &[self.number]);
                }
                return Ok(());
            }
            match self.reclaim_locks(writes, &home, lost, &passed, deadline) {
                FileAfterLoss::Stayed => {
                    writes.calls.close_numbers(&home, &[self.number]);
                    return Ok(());
                }
                FileAfterLoss::Moved(locks) if self.enter_process(&home, locks.as_deref()) => {
                    // It may only be cut off, and has the file open then.
                    writes.calls.close_later(lost, &[self.number]);
                    if self.is_closed() {
                        writes.calls.close_later(&home, &[self.number]);
                    }
                    self.note_moved(writes, lost);
                    writes.resend_from(self, lost.instance);
                    return Ok(());
                }
                FileAfterLoss::Moved(_) => writes.calls.close_numbers(&home, &[self.number]),
                FileAfterLoss::LostAgain => {
                    writes.calls.close_later(&home, &[self.number]);
                    passed.push(home);
                }
            }
        }
        Err(unsteady())
    }

    /// Opens it on a node that can be reached.
    ///
    /// # Errors
    /// As [`OpenedAs::move_on`].
    fn open_next(&self, writes: &GroupWrites, lost: &HomeProcess, deadline: CallDeadline) -> Result<HomeProcess> {
        let (path, expected) = self.place.lock().clone();
        let mut moved = self.open_at(writes, &path, expected, deadline);
        if moved.as_ref().is_err_and(|error| is_gone(error.kind()))
            && let Some(known) = expected
        {
            match self.open_elsewhere(writes, &path, known, lost, deadline) {
                Ok(Some((other, home))) => {
                    let mut place = self.place.lock();
                    // A rename of this mount may have been faster.
                    if place.0 == path {
                        place.0 = other;
                    }
                    moved = Ok(home);
                }
                Ok(None) => {}
                // It may be found later: its bytes wait, as for a node.
                Err(error) => moved = Err(error),
            }
        }
        moved.map_err(|error| {
            let shown = String::from_utf8_lossy(&path);
            let why = format!("node {} was lost, and '/{shown}' can't be opened again", lost.node);
            match is_gone(error.kind()) {
                // The program has it open, so that it exists for the program.
                true => Error::new(ErrorKind::Io(ESTALE), format!("{why}: no known name leads to the file: {error}")),
                false => error.context(why),
            }
        })
    }

    /// Opens it by a path.
    fn open_at(
        &self,
        writes: &GroupWrites,
        path: &[u8],
        expected: Option<FileIdentity>,
        deadline: CallDeadline,
    ) -> Result<HomeProcess> {
        let at = NodePath { path, expected };
        let call = match self.flags {
            Some(flags) => {
                let flags = OpenFlags::new(flags & !(O_CREAT | O_EXCL | O_TRUNC));
                WriteCall::Open { at, flags, file: self.number }
            }
            None => WriteCall::OpenDirectory { at, file: self.number },
        };
        self.change_anyway(writes, path, call, deadline)
    }

    /// Makes a call as root: the right to open the file was checked, and may have been lost since, as with a file that was
    /// made read-only.
    fn change_anyway(
        &self,
        writes: &GroupWrites,
        path: &[u8],
        call: WriteCall<'_>,
        deadline: CallDeadline,
    ) -> Result<HomeProcess> {
        let root = Caller::default();
        let changed = match writes.change_at(path, call, RequestContext::of(&root), deadline) {
            Err(error) if is_denied(error.kind()) => {
                writes.change_at(path, call, RequestContext::of(&self.caller), deadline)
            }
            other => other,
        };
        changed.map(|(_, home)| home)
    }

    /// Opens it by another name than `gone`: one that the mount knows, or one in the same folder, where another host may
    /// have renamed it. `None` when no such name leads to it.
    fn open_elsewhere(
        &self,
        writes: &GroupWrites,
        gone: &[u8],
        known: FileIdentity,
        lost: &HomeProcess,
        deadline: CallDeadline,
    ) -> Result<Option<(Vec<u8>, HomeProcess)>> {
        let open = |path: &[u8]| self.open_at(writes, path, Some(known), deadline);
        let names = writes.names().map_or(Vec::new(), |names| names.paths_of(known));
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
            let Some(path) = self.find_in_folder(writes, folder, known, deadline)? else { break };
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
        writes: &GroupWrites,
        folder: &[u8],
        known: FileIdentity,
        deadline: CallDeadline,
    ) -> Result<Option<Vec<u8>>> {
        let file = writes.calls.new_file_number();
        let open = |_: &[u8]| {
            let call = WriteCall::OpenDirectory { at: NodePath { path: folder, expected: None }, file };
            self.change_anyway(writes, folder, call, deadline)
        };
        let Some((_, home)) = open_first([folder.to_vec()], open)? else { return Ok(None) };
        let found = self.find_listed(writes, &home, file, known, deadline);
        writes.calls.close_numbers(&home, &[file]);
        Ok(found?.map(|name| join_path(folder, &name.name)))
    }

    /// The entry that is this object, in an open directory of a process.
    fn find_listed(
        &self,
        writes: &GroupWrites,
        home: &HomeProcess,
        file: u64,
        known: FileIdentity,
        deadline: CallDeadline,
    ) -> Result<Option<ListedName>> {
        let mut from = 0;
        for _ in 0..MOST_PAGES {
            let call = WriteCall::ReadDirectory { file, from, max: PAGE, attrs: true };
            let lost = || Error::new(ErrorKind::Unavailable, format!("node {} was lost during a search", home.node));
            let answer = match writes.calls.query(CallTarget::Process(home), &call, &self.caller, deadline) {
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
            let is_known = |name: &ListedName| name.attr.is_some_and(|attr| attr.identity == known);
            if let Some(found) = names.into_iter().find(is_known) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
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
}
