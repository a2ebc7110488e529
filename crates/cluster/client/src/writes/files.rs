//! Open files and directories of a group: each stays with the process of a node that opened it, and is opened again
//! elsewhere when that process is lost. It knows no placement and no wire format.

use super::calls::{CallEnd, CallTarget, HomeProcess, settle_answer, unexpected};
use super::held_locks::{HeldLocks, set_call};
use super::{FileOpening, GroupWrites, RequestContext, attr_of};
use parking_lot::Mutex;
use spurline_proto::{WriteAnswer, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{
    AttrChange, Caller, FileIdentity, FileLock, ListedName, LockConflict, LockKind, NodeAttr, NodePath, OpId,
    WritableDirectory, WritableFile,
};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// From `asm-generic/fcntl.h`: flags that count only once.
const O_CREAT: u32 = 0o100;
const O_EXCL: u32 = 0o200;
const O_TRUNC: u32 = 0o1000;
const O_APPEND: u32 = 0o2000;
/// From `asm-generic/errno-base.h`.
const EIO: i32 = 5;
/// How often an open file moves to another process within one call.
const MOVES: usize = 16;

/// An open file or directory as the nodes know it.
pub(crate) struct OpenedAs {
    number: u64,
    /// `None` for a directory.
    flags: Option<u32>,
    caller: Caller,
    /// The path now, and the object.
    place: Mutex<(Vec<u8>, Option<FileIdentity>)>,
    home: Mutex<HomeProcess>,
    /// Held while it is opened elsewhere.
    moving: Mutex<()>,
    /// The end of the file, as far as is known here: where the next append goes if no other mount appends.
    end: AtomicU64,
    /// The first process that got bytes since the last sync.
    unsynced: Mutex<Option<HomeProcess>>,
    pub(super) held: HeldLocks,
}

impl OpenedAs {
    pub fn new(number: u64, path: Vec<u8>, attr: NodeAttr, flags: u32, caller: &Caller, home: HomeProcess) -> OpenedAs {
        OpenedAs {
            number,
            flags: Some(flags),
            caller: caller.clone(),
            place: Mutex::new((path, Some(attr.identity))),
            home: Mutex::new(home),
            moving: Mutex::new(()),
            end: AtomicU64::new(attr.size),
            unsynced: Mutex::new(None),
            held: HeldLocks::default(),
        }
    }

    pub fn new_directory(
        number: u64,
        path: Vec<u8>,
        identity: Option<FileIdentity>,
        caller: &Caller,
        home: HomeProcess,
    ) -> OpenedAs {
        OpenedAs {
            number,
            flags: None,
            caller: caller.clone(),
            place: Mutex::new((path, identity)),
            home: Mutex::new(home),
            moving: Mutex::new(()),
            end: AtomicU64::new(0),
            unsynced: Mutex::new(None),
            held: HeldLocks::default(),
        }
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn home(&self) -> HomeProcess {
        self.home.lock().clone()
    }

    /// Process `home` has bytes that are not synced.
    fn mark_unsynced(&self, home: HomeProcess) {
        self.unsynced.lock().get_or_insert(home);
    }

    /// Fails if `held`, the process that got bytes since the last sync, is another than `home`, which answered: it was lost.
    /// The bytes are durable if only the process was lost, and gone if its host was. A sync by the next process can't tell.
    fn check_held(&self, held: Option<&HomeProcess>, home: &HomeProcess) -> Result<()> {
        match held {
            Some(lost) if lost != home => {
                let what = format!(
                    "node {} was lost with bytes of '/{}' that were not synced; write them again",
                    lost.node,
                    String::from_utf8_lossy(&self.place.lock().0)
                );
                Err(Error::new(ErrorKind::Io(EIO), what))
            }
            _ => Ok(()),
        }
    }

    /// Its path after a rename of `from` to `to`, or their exchange.
    pub fn follow_rename(&self, from: &[u8], to: &[u8], exchange: bool) {
        let mut place = self.place.lock();
        for (old, new) in [(from, to), (to, from)].into_iter().take(1 + usize::from(exchange)) {
            let rest = place.0.strip_prefix(old).filter(|rest| rest.is_empty() || rest[0] == b'/');
            if let Some(rest) = rest {
                place.0 = [new, rest].concat();
                return;
            }
        }
    }

    /// Opens it on a node that can be reached, unless another thread has since `lost`.
    fn move_on(&self, writes: &GroupWrites, lost: &HomeProcess) -> Result<()> {
        let _one = self.moving.lock();
        if *self.home.lock() != *lost {
            return Ok(());
        }
        let (path, expected) = self.place.lock().clone();
        let at = NodePath { path: &path, expected };
        let call = match self.flags {
            Some(flags) => WriteCall::Open { at, flags: flags & !(O_CREAT | O_EXCL | O_TRUNC), file: self.number },
            None => WriteCall::OpenDirectory { at, file: self.number },
        };
        // The right to open it was checked; it may have been lost since, as with a file that was made read-only.
        let root = Caller::default();
        let moved = writes.change_at(&path, call, RequestContext::of(&root));
        let moved = match moved {
            Err(error) if error.kind() == ErrorKind::PermissionDenied || is_denied(error.kind()) => {
                writes.change_at(&path, call, RequestContext::of(&self.caller))
            }
            other => other,
        };
        let (_, home) = moved.map_err(|error| {
            let shown = String::from_utf8_lossy(&path);
            error.context(format_args!("node {} was lost, and '/{shown}' can't be opened again", lost.node))
        })?;
        tracing::info!(from = lost.node, to = home.node, "an open file moved to another node");
        writes.client.retries().add(1);
        self.reclaim_locks(writes, &home);
        *self.home.lock() = home;
        Ok(())
    }
}

fn is_denied(kind: ErrorKind) -> bool {
    // From `asm-generic/errno-base.h`.
    matches!(kind, ErrorKind::Io(1 | 13))
}

/// The answer to a call on an open object, and the process that gave it.
struct OpenAnswer {
    answer: WriteAnswer,
    payload_len: usize,
    home: HomeProcess,
}

/// Whether the call changes bytes that a sync makes durable.
fn changes_bytes(call: &WriteCall<'_>) -> bool {
    match call {
        WriteCall::Write { .. } | WriteCall::Allocate { .. } => true,
        WriteCall::SetAttrOpen { set, .. } => set.size.is_some(),
        _ => false,
    }
}

impl OpenedAs {
    /// Sends a request for a file with locks, so that its node keeps them, or the next one gets them.
    pub(super) fn renew_locks(&self, writes: &GroupWrites) {
        let call = WriteCall::StatOpen { file: self.number };
        // A failure is that of the next call, too.
        let _ = call_open(writes, self, &call, RequestContext::of(&self.caller), 0, &mut []);
    }
}

/// A call on an open object: on its process, or on the next one.
fn call_open(
    writes: &GroupWrites,
    opened: &OpenedAs,
    call: &WriteCall<'_>,
    context: RequestContext<'_>,
    number: u64,
    dst: &mut [u8],
) -> Result<OpenAnswer> {
    let mut before = None;
    let mut last = None;
    for _ in 0..MOVES {
        opened.held.check_call(call)?;
        let home = opened.home();
        match writes.send(CallTarget::Process(&home), call, context, number, before, dst) {
            Ok(sent) if sent.answer == WriteAnswer::UnknownFile => {}
            Ok(sent) => {
                let answer = settle_answer(sent.answer)?;
                // Another thread may move the file before this one returns, so the process that answered counts.
                if changes_bytes(call) {
                    opened.mark_unsynced(home.clone());
                }
                return Ok(OpenAnswer { answer, payload_len: sent.payload_len, home });
            }
            Err(CallEnd::Failed(error)) => return Err(error),
            Err(CallEnd::Lost { error, sent }) => {
                if sent {
                    before = Some(home.instance);
                }
                last = Some(error);
            }
        }
        opened.move_on(writes, &home)?;
    }
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "no node keeps the file open")))
}

/// Closes an open object; its process may be gone, and the file with it.
fn close_open(writes: &GroupWrites, opened: &OpenedAs) {
    writes.remove_open(opened.number);
    let call = WriteCall::Close { file: opened.number };
    let context = RequestContext::of(&opened.caller);
    // An unreachable node closes it when the session ends.
    let _ = writes.send(CallTarget::Process(&opened.home()), &call, context, 0, None, &mut []);
}

/// An open file.
pub(crate) struct RemoteFile {
    writes: Arc<GroupWrites>,
    opened: Arc<OpenedAs>,
}

impl RemoteFile {
    pub fn new(writes: Arc<GroupWrites>, opened: Arc<OpenedAs>) -> Self {
        RemoteFile { writes, opened }
    }

    pub fn number(&self) -> u64 {
        self.opened.number
    }

    pub fn set_path(&self, path: Vec<u8>) {
        self.opened.place.lock().0 = path;
    }

    /// A call that may be repeated.
    fn query(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        Ok(call_open(&self.writes, &self.opened, &call, RequestContext::of(caller), 0, &mut [])?.answer)
    }

    /// As [`RemoteFile::query`], for calls that only succeed or fail; returns the process that answered.
    fn query_home(&self, call: &WriteCall<'_>) -> Result<HomeProcess> {
        let context = RequestContext::of(&self.opened.caller);
        let sent = call_open(&self.writes, &self.opened, call, context, 0, &mut [])?;
        done(sent.answer)?;
        Ok(sent.home)
    }

    /// A call that is made once.
    pub fn change(&self, call: &WriteCall<'_>, context: RequestContext<'_>) -> Result<WriteAnswer> {
        let number = self.writes.numbers.draw_number();
        Ok(call_open(&self.writes, &self.opened, call, context, number.get(), &mut [])?.answer)
    }

    /// Writes bytes that fit into one request.
    fn write_piece(&self, offset: u64, data: &[u8], lose_privileges: Option<&Caller>) -> Result<usize> {
        let caller = lose_privileges.unwrap_or(&self.opened.caller);
        let appends = self.appends();
        let end = self.opened.end.load(Ordering::Relaxed);
        let call = WriteCall::Write {
            file: self.opened.number,
            offset: if appends { end } else { offset },
            lose_privileges: lose_privileges.is_some(),
        };
        let context = RequestContext { payload: data, ..RequestContext::of(caller) };
        // The same bytes at the same place can be written twice, an append can't.
        let answer = if appends {
            self.change(&call, context)?
        } else {
            call_open(&self.writes, &self.opened, &call, context, 0, &mut [])?.answer
        };
        let written = number_of(answer)?.min(data.len() as u64);
        self.opened.end.fetch_max(if appends { end } else { offset } + written, Ordering::Relaxed);
        Ok(written as usize)
    }

    fn appends(&self) -> bool {
        self.opened.flags.is_some_and(|flags| flags & O_APPEND != 0)
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        close_open(&self.writes, &self.opened);
    }
}

fn done(answer: WriteAnswer) -> Result<()> {
    match answer {
        WriteAnswer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn number_of(answer: WriteAnswer) -> Result<u64> {
    match answer {
        WriteAnswer::Number(number) => Ok(number),
        other => Err(unexpected(&other)),
    }
}

impl WritableFile for RemoteFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let mut read = 0;
        for piece in dst.chunks_mut(self.writes.most_bytes()) {
            let (at, len) = (offset + read as u64, u32::try_from(piece.len()).unwrap_or(u32::MAX));
            let call = WriteCall::Read { file: self.opened.number, offset: at, len };
            let context = RequestContext::of(&self.opened.caller);
            let sent = call_open(&self.writes, &self.opened, &call, context, 0, piece)?;
            done(sent.answer)?;
            read += sent.payload_len;
            if sent.payload_len < piece.len() {
                break;
            }
        }
        Ok(read)
    }

    fn write_at(&self, offset: u64, data: &[u8], lose_privileges: Option<&Caller>) -> Result<usize> {
        let mut written = 0;
        for piece in data.chunks(self.writes.most_bytes()) {
            match self.write_piece(offset + written as u64, piece, lose_privileges) {
                Ok(n) => {
                    written += n;
                    if n < piece.len() {
                        break;
                    }
                }
                Err(error) if written == 0 => return Err(error),
                // The next write reports it.
                Err(_) => break,
            }
        }
        Ok(written)
    }

    fn allocate(&self, mode: u32, offset: u64, len: u64, caller: &Caller) -> Result<()> {
        let call = WriteCall::Allocate { file: self.opened.number, mode, offset, len };
        done(self.change(&call, RequestContext::of(caller))?)
    }

    fn copy_range(&self, offset: u64, to: &dyn WritableFile, to_offset: u64, len: u64, caller: &Caller) -> Result<u64> {
        // From `asm-generic/errno-base.h`.
        const EXDEV: i32 = 18;
        let apart = || Error::new(ErrorKind::Io(EXDEV), "the files are open on different nodes");
        let to = to.as_any().downcast_ref::<RemoteFile>().ok_or_else(apart)?;
        if self.opened.home() != to.opened.home() {
            return Err(apart());
        }
        let call = WriteCall::CopyRange { file: self.opened.number, offset, to: to.opened.number, to_offset, len };
        let context = RequestContext::of(caller);
        let number = self.writes.numbers.draw_number();
        let home = self.opened.home();
        // The other file may have moved, so this call does not: the caller then reads and writes.
        match self.writes.send(CallTarget::Process(&home), &call, context, number.get(), None, &mut []) {
            Ok(sent) => match settle_answer(sent.answer)? {
                WriteAnswer::UnknownFile => Err(apart()),
                answer => {
                    to.opened.mark_unsynced(home);
                    number_of(answer)
                }
            },
            Err(CallEnd::Lost { .. }) => Err(apart()),
            Err(CallEnd::Failed(error)) => Err(error),
        }
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64> {
        let call = WriteCall::Seek { file: self.opened.number, offset, whence };
        number_of(self.query(call, &self.opened.caller)?)
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        // Bytes that arrive during the sync are not part of it.
        let held = self.opened.unsynced.lock().take();
        match self.query_home(&WriteCall::Sync { file: self.opened.number, data_only }) {
            // Reported once.
            Ok(home) => self.opened.check_held(held.as_ref(), &home),
            Err(error) => {
                if let Some(held) = held {
                    *self.opened.unsynced.lock() = Some(held);
                }
                Err(error)
            }
        }
    }

    fn flush(&self) -> Result<()> {
        let home = self.query_home(&WriteCall::Flush { file: self.opened.number })?;
        let held = self.opened.unsynced.lock().clone();
        self.opened.check_held(held.as_ref(), &home)
    }

    fn stat(&self) -> Result<NodeAttr> {
        let attr = attr_of(self.query(WriteCall::StatOpen { file: self.opened.number }, &self.opened.caller)?)?;
        self.opened.end.store(attr.size, Ordering::Relaxed);
        Ok(attr)
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller, _op: OpId) -> Result<NodeAttr> {
        let call = WriteCall::SetAttrOpen { file: self.opened.number, set: *set };
        let attr = attr_of(self.change(&call, RequestContext::of(caller))?)?;
        self.opened.end.store(attr.size, Ordering::Relaxed);
        Ok(attr)
    }

    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        let FileLock { owner, range, kind, .. } = *lock;
        let call = WriteCall::TestLock { file: self.opened.number, owner, range, kind };
        match self.query(call, &self.opened.caller)? {
            WriteAnswer::Conflict(conflict) => Ok(conflict),
            other => Err(unexpected(&other)),
        }
    }

    fn set_lock(&self, lock: &FileLock, caller: &Caller) -> Result<()> {
        let call = set_call(self.opened.number, lock);
        if lock.kind == LockKind::Unlock {
            // Forgotten first: a lock that is lost needs no node to be given up.
            self.opened.held.note_lock(lock);
        }
        loop {
            let sent = call_open(&self.writes, &self.opened, &call, RequestContext::of(caller), 0, &mut [])?;
            done(sent.answer)?;
            if lock.kind == LockKind::Unlock {
                return Ok(());
            }
            self.opened.held.note_lock(lock);
            // If the file has moved since the answer, the lock was not among those that moved with it.
            if self.opened.home() == sent.home {
                return Ok(());
            }
        }
    }

    fn reopen(&self, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        let number = self.writes.new_file_number();
        let call = WriteCall::Reopen { of: self.opened.number, flags, file: number };
        let attr = attr_of(self.change(&call, RequestContext::of(caller))?)?;
        let (path, home) = (self.opened.place.lock().0.clone(), self.opened.home());
        self.writes.new_file(path, FileOpening { number, attr, flags, caller, home })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An open directory.
pub(crate) struct RemoteDirectory {
    writes: Arc<GroupWrites>,
    opened: Arc<OpenedAs>,
}

impl RemoteDirectory {
    pub fn new(writes: Arc<GroupWrites>, opened: Arc<OpenedAs>) -> Self {
        RemoteDirectory { writes, opened }
    }

    fn query(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        let context = RequestContext::of(caller);
        Ok(call_open(&self.writes, &self.opened, &call, context, 0, &mut [])?.answer)
    }
}

impl Drop for RemoteDirectory {
    fn drop(&mut self) {
        close_open(&self.writes, &self.opened);
    }
}

impl WritableDirectory for RemoteDirectory {
    fn read(&self, from: u64, max: usize, attrs: bool, caller: &Caller) -> Result<Vec<ListedName>> {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        match self.query(WriteCall::ReadDirectory { file: self.opened.number, from, max, attrs }, caller)? {
            WriteAnswer::Names(names) => Ok(names),
            other => Err(unexpected(&other)),
        }
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        done(self.query(WriteCall::Sync { file: self.opened.number, data_only }, &self.opened.caller)?)
    }

    fn stat(&self) -> Result<NodeAttr> {
        attr_of(self.query(WriteCall::StatOpen { file: self.opened.number }, &self.opened.caller)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_follow_renames_of_their_folders() {
        let home = HomeProcess { node: "n".into(), instance: 1 };
        let opened = OpenedAs::new_directory(1, b"a/b/c".to_vec(), None, &Caller::default(), home);
        let path = || opened.place.lock().0.clone();
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
