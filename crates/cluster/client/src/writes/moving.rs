//! Opens files and directories of a lost process on another node: by their path, by another name, or by one in the same folder. It
//! knows neither their bytes nor what their locks mean.
//!
//! Whatever name is tried, it has to lead to the object that was open.

use super::calls::{CallTarget, HomeProcess, settle_answer, unexpected};
use super::files::OpenedAs;
use super::held_locks::FileAfterLoss;
use super::{GroupWrites, O_TRUNC, RequestContext, join_path};
use spurline_proto::{OpenFlags, WriteAnswer, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Caller, FileIdentity, NodePath};

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

fn is_denied(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::PermissionDenied | ErrorKind::Io(EPERM | EACCES))
}

/// The path leads to nothing, or to another object.
fn is_gone(kind: ErrorKind) -> bool {
    let by_errno = matches!(kind, ErrorKind::Io(ENOENT | ENOTDIR | ESTALE));
    by_errno || matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory | ErrorKind::Stale)
}

impl OpenedAs {
    /// Opens it on a node that can be reached, unless another thread has since `lost`.
    ///
    /// # Errors
    /// `ESTALE` when no name is known that leads to it; those of the nodes and of the source.
    pub(super) fn move_on(&self, writes: &GroupWrites, lost: &HomeProcess) -> Result<()> {
        let _one = self.moving.lock();
        if *self.home.lock() != *lost {
            return Ok(());
        }
        let (path, expected) = self.place.lock().clone();
        let mut moved = self.open_at(writes, &path, expected);
        if moved.as_ref().is_err_and(|error| is_gone(error.kind()))
            && let Some(known) = expected
            && let Some((other, home)) = self.open_elsewhere(writes, &path, known)
        {
            let mut place = self.place.lock();
            // A rename of this mount may have been faster.
            if place.0 == path {
                place.0 = other;
            }
            moved = Ok(home);
        }
        let home = moved.map_err(|error| {
            let shown = String::from_utf8_lossy(&path);
            let why = format!("node {} was lost, and '/{shown}' can't be opened again", lost.node);
            match is_gone(error.kind()) {
                // The program has it open, so that it exists for the program.
                true => Error::new(ErrorKind::Io(ESTALE), format!("{why}: no known name leads to the file: {error}")),
                false => error.context(why),
            }
        })?;
        tracing::info!(from = lost.node, to = home.node, "an open file moved to another node");
        writes.client.retries().add(1);
        let another = home.instance != lost.instance;
        // The same process has kept it open.
        if another && self.reclaim_locks(writes, &home, lost) == FileAfterLoss::Stayed {
            writes.close_numbers(&home, &[self.number]);
            return Ok(());
        }
        *self.home.lock() = home;
        if another {
            self.note_moved(writes, lost);
            writes.resend_from(&self.bytes, lost.instance);
        }
        Ok(())
    }

    /// Opens it by a path.
    fn open_at(&self, writes: &GroupWrites, path: &[u8], expected: Option<FileIdentity>) -> Result<HomeProcess> {
        let at = NodePath { path, expected };
        let call = match self.flags {
            Some(flags) => {
                let flags = OpenFlags::new(flags & !(O_CREAT | O_EXCL | O_TRUNC));
                WriteCall::Open { at, flags, file: self.number }
            }
            None => WriteCall::OpenDirectory { at, file: self.number },
        };
        self.change_anyway(writes, path, call)
    }

    /// Makes a call as root: the right to open the file was checked, and may have been lost since, as with a file that was
    /// made read-only.
    fn change_anyway(&self, writes: &GroupWrites, path: &[u8], call: WriteCall<'_>) -> Result<HomeProcess> {
        let root = Caller::default();
        let changed = match writes.change_at(path, call, RequestContext::of(&root)) {
            Err(error) if is_denied(error.kind()) => writes.change_at(path, call, RequestContext::of(&self.caller)),
            other => other,
        };
        changed.map(|(_, home)| home)
    }

    /// Opens it by another name than `gone`: one that the mount knows, or one in the same folder, where another host may
    /// have renamed it.
    fn open_elsewhere(&self, writes: &GroupWrites, gone: &[u8], known: FileIdentity) -> Option<(Vec<u8>, HomeProcess)> {
        let open = |path: Vec<u8>| match self.open_at(writes, &path, Some(known)) {
            Ok(home) => Some((path, home)),
            Err(error) => {
                tracing::debug!("an open file is not found as '/{}': {error}", String::from_utf8_lossy(&path));
                None
            }
        };
        let names = writes.names().map_or(Vec::new(), |names| names.paths_of(known));
        names.into_iter().filter(|path| path != gone).find_map(open).or_else(|| {
            // Without a time of birth, a number in a folder can belong to a later object.
            let folder = &gone[..gone.iter().rposition(|byte| *byte == b'/').unwrap_or(0)];
            let found = if known.born == 0 { None } else { self.find_in_folder(writes, folder, known.inode) };
            found.and_then(open)
        })
    }

    /// The path of the entry of a folder with this inode number.
    fn find_in_folder(&self, writes: &GroupWrites, folder: &[u8], inode: u64) -> Option<Vec<u8>> {
        let file = writes.new_file_number();
        let call = WriteCall::OpenDirectory { at: NodePath { path: folder, expected: None }, file };
        let home = self.change_anyway(writes, folder, call).ok()?;
        let list = |from| -> Result<_> {
            let call = WriteCall::ReadDirectory { file, from, max: PAGE, attrs: false };
            let context = RequestContext::of(&self.caller);
            match settle_answer(writes.send(CallTarget::Process(&home), &call, context, 0, None, &mut [])?.answer)? {
                WriteAnswer::Names(names) => Ok(names),
                other => Err(unexpected(&other)),
            }
        };
        let (mut from, mut found) = (0, None);
        for _ in 0..MOST_PAGES {
            let Ok(names) = list(from) else { break };
            let Some(last) = names.last() else { break };
            from = last.next;
            let here = names.iter().filter(|name| !matches!(&*name.name, b"." | b".."));
            found = here.into_iter().find(|name| name.inode == inode).map(|name| join_path(folder, &name.name));
            if found.is_some() {
                break;
            }
        }
        writes.close_numbers(&home, &[file]);
        found
    }
}
