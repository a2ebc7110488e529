//! Open files and directories of a group: each stays with the process of a node that opened it, and is opened again
//! elsewhere when that process is lost. It knows no placement and no wire format.

use super::behind::{FileBytes, ReportedFailures};
use super::calls::{
    CallDeadline, CallEnd, CallKind, CallTarget, HomeProcess, MaybeExecuted, NodeAnswer, RequestContext, WriteCallPlan,
    settle_answer, unexpected,
};
use super::held_locks::{HeldLocks, set_call};
use super::moving::VainSearch;
use super::retained::NewBytes;
use super::{CAPABILITIES, ENODATA, FileOpening, GroupWrites, O_ACCMODE, attr_of, no_capabilities};
use parking_lot::{Mutex, RwLock};
use spurline_proto::{OpenFlags, WriteAnswer, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{
    AttrChange, Caller, FileIdentity, FileLock, ListedName, LockConflict, LockKind, NodeAttr, OpenAttrCall,
    WritableDirectory, WritableFile, WritableObject, WritePlace,
};
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// From `asm-generic/fcntl.h`.
const O_APPEND: u32 = 0o2000;
/// A part of `O_SYNC` too.
const O_DSYNC: u32 = 0o10000;
const O_DIRECT: u32 = if cfg!(any(target_arch = "aarch64", target_arch = "arm")) { 0o200_000 } else { 0o40_000 };
/// From `linux/falloc.h`: the only mode that changes no bytes.
const FALLOC_FL_KEEP_SIZE: u32 = 1;
/// How often an open file moves to another process within one call.
pub(super) const MOVES: usize = 16;

/// An open file or directory as the nodes know it.
pub(crate) struct OpenedAs {
    pub(super) number: u64,
    /// `None` for a directory.
    pub(super) flags: Option<u32>,
    pub(super) caller: Caller,
    /// The path now, and the object.
    pub(super) place: Mutex<(Vec<u8>, Option<FileIdentity>)>,
    pub(super) home: Mutex<HomeProcess>,
    /// Held while it is opened elsewhere.
    pub(super) moving: Mutex<()>,
    /// Held by requests that rely on its locks, from the look at these to the answer. An opening after their loss has the same
    /// number: it waits for those that were sent before.
    pub(super) relying: RwLock<()>,
    pub(super) vain_search: VainSearch,
    /// The bytes of the file that are not durable.
    pub bytes: Arc<FileBytes>,
    pub reported: ReportedFailures,
    /// The last close failed, as no node took the bytes.
    failed_close: AtomicBool,
    /// The program has closed it, and its process is asked to.
    pub(super) closed: AtomicBool,
    /// It has written or changed something, which a close has to report.
    used: AtomicBool,
    pub(super) held: HeldLocks,
}

impl OpenedAs {
    pub fn new(opening: FileOpening<'_>, path: Vec<u8>, bytes: Arc<FileBytes>) -> OpenedAs {
        OpenedAs {
            number: opening.number,
            flags: Some(opening.flags),
            caller: opening.caller.clone(),
            place: Mutex::new((path, Some(opening.attr.identity))),
            home: Mutex::new(opening.home),
            moving: Mutex::new(()),
            relying: RwLock::new(()),
            vain_search: VainSearch::default(),
            reported: bytes.start_reports(),
            bytes,
            failed_close: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            used: AtomicBool::new(false),
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
            relying: RwLock::new(()),
            vain_search: VainSearch::default(),
            bytes: Arc::default(),
            reported: ReportedFailures::default(),
            failed_close: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            used: AtomicBool::new(false),
            held: HeldLocks::default(),
        }
    }

    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn home(&self) -> HomeProcess {
        self.home.lock().clone()
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Whether the last close has reported that no node took the bytes.
    pub fn failed_close(&self) -> bool {
        self.failed_close.load(Ordering::Relaxed)
    }

    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    fn has_flag(&self, flag: u32) -> bool {
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

    /// It can write.
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
        let rest = place.0.strip_prefix(path);
        rest.is_some_and(|rest| path.is_empty() || rest.is_empty() || rest[0] == b'/')
    }

    pub(super) fn current_path(&self) -> Vec<u8> {
        self.place.lock().0.clone()
    }

    /// The path, for messages.
    pub fn shown_path(&self) -> String {
        String::from_utf8_lossy(&self.place.lock().0).into_owned()
    }

    /// The path in quotes, for the log.
    pub fn logged_path(&self) -> String {
        let path = self.shown_path();
        if path.is_empty() { "a file without a name".to_owned() } else { format!("'/{path}'") }
    }

    /// The attributes, by its process.
    pub fn stat_open(&self, writes: &GroupWrites) -> Result<NodeAttr> {
        attr_of(query_open(writes, self, WriteCall::StatOpen { file: self.number }, &self.caller)?)
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
}

impl OpenedAs {
    /// Sends a request for a file with locks, so that its node keeps them, or the next one gets them.
    pub(super) fn renew_locks(&self, writes: &GroupWrites) {
        // A failure is that of the next call, too.
        let _ = query_open(writes, self, WriteCall::StatOpen { file: self.number }, &self.caller);
    }
}

/// A call on an open object, wherever that is.
pub(super) struct OpenCall<'a> {
    pub kind: CallKind,
    pub call: &'a WriteCall<'a>,
    pub context: RequestContext<'a>,
    /// Where bytes of the answer go.
    pub landing: &'a mut [u8],
    pub deadline: CallDeadline,
}

impl<'a> OpenCall<'a> {
    /// A call that may be repeated.
    pub fn query(call: &'a WriteCall<'a>, caller: &'a Caller, deadline: CallDeadline) -> OpenCall<'a> {
        let context = RequestContext::of(caller);
        OpenCall { kind: CallKind::Query, call, context, landing: &mut [], deadline }
    }

    fn plan<'b>(&'b mut self, home: &'b HomeProcess, before: MaybeExecuted) -> WriteCallPlan<'b> {
        let OpenCall { kind, call, context, landing, deadline } = self;
        let target = CallTarget::Process(home);
        WriteCallPlan { target, kind: *kind, call, context: *context, landing, before, deadline: *deadline }
    }
}

/// A call on an open object: on its process, or on the next one, after it got the bytes that the first one may have lost. The
/// answer may be an error of the source.
pub(super) fn call_open(writes: &GroupWrites, opened: &OpenedAs, mut open: OpenCall<'_>) -> Result<NodeAnswer> {
    let OpenCall { call, deadline, .. } = open;
    let mut before = MaybeExecuted::Nowhere;
    let mut last = None;
    for _ in 0..MOVES {
        let relying = opened.relying.read();
        opened.check_locks(writes, call)?;
        let home = opened.home();
        let confirms = opened.held.begin_confirm();
        let sent = writes.calls.run(open.plan(&home, before));
        drop(relying);
        match sent {
            Ok(sent) if sent.answer == WriteAnswer::UnknownFile => opened.note_unknown(&home),
            Ok(sent) => {
                opened.held.confirm(confirms);
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
        opened.move_on(writes, &home, deadline)?;
        // A lock that it has set, or should have removed, would stand in the way.
        if matches!(call, WriteCall::SetLock { .. }) {
            writes.close_left(opened, &home, deadline);
        }
        writes.send_all(&opened.bytes)?;
        if deadline.is_over(Instant::now()) {
            break;
        }
    }
    Err(last.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "no node keeps the file open")))
}

/// As [`call_open`], for a call that may be repeated.
fn query_open(writes: &GroupWrites, opened: &OpenedAs, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
    settle_answer(call_open(writes, opened, OpenCall::query(&call, caller, writes.calls.begin()))?.answer)
}

/// As [`call_open`], for a call that is made once.
fn change_open(
    writes: &GroupWrites,
    opened: &OpenedAs,
    call: &WriteCall<'_>,
    context: RequestContext<'_>,
) -> Result<WriteAnswer> {
    opened.used.store(true, Ordering::Relaxed);
    let number = writes.calls.draw_number();
    let kind = CallKind::Change { number: number.get() };
    let deadline = writes.calls.begin();
    let sent = call_open(writes, opened, OpenCall { kind, call, context, landing: &mut [], deadline })?;
    writes.calls.note_touched(&sent.home);
    settle_answer(sent.answer)
}

/// A call about the rights or the extended attributes of an open object: a value or names, and nothing for the others.
fn call_attr_open(
    writes: &GroupWrites,
    opened: &OpenedAs,
    call: &OpenAttrCall<'_>,
    caller: &Caller,
) -> Result<Vec<u8>> {
    let of_open = WriteCall::AttrOpen { file: opened.number, call: *call };
    let answer = match *call {
        OpenAttrCall::Set { value, .. } => {
            change_open(writes, opened, &of_open, RequestContext { payload: value, ..RequestContext::of(caller) })?
        }
        OpenAttrCall::Remove(_) => change_open(writes, opened, &of_open, RequestContext::of(caller))?,
        OpenAttrCall::Access(_) | OpenAttrCall::Get(_) | OpenAttrCall::List => {
            query_open(writes, opened, of_open, caller)?
        }
    };
    match answer {
        WriteAnswer::Bytes(found) => Ok(found),
        WriteAnswer::Done => Ok(Vec::new()),
        other => Err(unexpected(&other)),
    }
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

    /// Sends the bytes of earlier writes.
    pub fn send_bytes(&self) -> Result<()> {
        self.writes.send_all(&self.opened.bytes)
    }

    pub fn set_path(&self, path: Vec<u8>) {
        self.opened.place.lock().0 = path;
    }

    /// A call that may be repeated.
    fn query(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        query_open(&self.writes, &self.opened, call, caller)
    }

    /// As [`RemoteFile::query`], after the bytes of earlier writes were sent, which the call would see.
    fn query_after_writes(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        self.writes.send_all(&self.opened.bytes)?;
        self.query(call, caller)
    }

    /// A call that is made once.
    pub fn change(&self, call: &WriteCall<'_>, context: RequestContext<'_>) -> Result<WriteAnswer> {
        change_open(&self.writes, &self.opened, call, context)
    }

    /// Takes bytes that fit into one request.
    fn write_piece(&self, place: WritePlace, offset: u64, data: &[u8], lose_privileges: Option<&Caller>) -> Result<()> {
        self.opened.used.store(true, Ordering::Relaxed);
        let appends = match place {
            WritePlace::AsOpened => self.opened.has_flag(O_APPEND),
            WritePlace::End => true,
            WritePlace::Offset | WritePlace::MappedPages => false,
        };
        // One at a time, so that the place of each is known.
        let _one = appends.then(|| self.opened.bytes.begin_append());
        let offset = if appends { self.opened.bytes.end() } else { offset };
        let lose_privileges = lose_privileges.map(|caller| (caller.uid, caller.gid));
        let (owner, mapped) = (self.opened.number, place == WritePlace::MappedPages);
        let new = NewBytes { owner, offset, data, appended: appends, mapped, lose_privileges, awaited: false };
        self.writes.write_behind(&self.opened, new)?;
        self.opened.bytes.raise_end(offset + data.len() as u64);
        Ok(())
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        self.writes.close_behind(&self.opened);
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

impl WritableObject for RemoteFile {
    fn stat(&self) -> Result<NodeAttr> {
        self.send_bytes()?;
        let attr = self.opened.stat_open(&self.writes)?;
        self.opened.bytes.note_size(attr.size);
        Ok(attr)
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        let call = WriteCall::SetAttrOpen { file: self.opened.number, set: *set };
        self.writes.send_all(&self.opened.bytes)?;
        let attr = attr_of(self.change(&call, RequestContext::of(caller))?)?;
        self.opened.bytes.note_size(attr.size);
        if let Some(size) = set.size {
            self.writes.cut_bytes_of(attr.identity, size);
        }
        Ok(attr)
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>> {
        // The kernel requests them before each write.
        let capabilities = matches!(call, OpenAttrCall::Get(name) if *name == CAPABILITIES);
        let bytes = &self.opened.bytes;
        if capabilities && bytes.is_bare() {
            return Err(no_capabilities());
        }
        match *call {
            OpenAttrCall::Set { .. } => {
                bytes.note_bare(false);
                self.writes.send_all(bytes)?;
            }
            OpenAttrCall::Remove(_) => self.writes.send_all(bytes)?,
            OpenAttrCall::Access(_) | OpenAttrCall::Get(_) | OpenAttrCall::List => {}
        }
        call_attr_open(&self.writes, &self.opened, call, caller).inspect_err(|error| {
            if capabilities && error.kind() == ErrorKind::Io(ENODATA) {
                bytes.note_bare(true);
            }
        })
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        let opened = &*self.opened;
        self.writes.sync_file(opened, data_only)?;
        opened.bytes.report_at_sync(&opened.reported)
    }
}

impl WritableFile for RemoteFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        self.writes.send_all(&self.opened.bytes)?;
        let deadline = self.writes.calls.begin();
        let mut read = 0;
        for piece in dst.chunks_mut(self.writes.most_bytes()) {
            let wanted = piece.len();
            let len = u32::try_from(wanted).unwrap_or(u32::MAX);
            let call = WriteCall::Read { file: self.opened.number, offset: offset + read as u64, len };
            let open = OpenCall { landing: piece, ..OpenCall::query(&call, &self.opened.caller, deadline) };
            let sent = call_open(&self.writes, &self.opened, open)?;
            done(settle_answer(sent.answer)?)?;
            read += sent.payload_len;
            if sent.payload_len < wanted {
                break;
            }
        }
        Ok(read)
    }

    fn write_placed(
        &self,
        place: WritePlace,
        offset: u64,
        data: &[u8],
        lose_privileges: Option<&Caller>,
    ) -> Result<usize> {
        let mut written = 0;
        for piece in data.chunks(self.writes.most_bytes()) {
            match self.write_piece(place, offset + written as u64, piece, lose_privileges) {
                Ok(()) => written += piece.len(),
                Err(error) if written == 0 => return Err(error),
                // The next write reports it.
                Err(_) => break,
            }
        }
        Ok(written)
    }

    fn allocate(&self, mode: u32, offset: u64, len: u64, caller: &Caller) -> Result<()> {
        if mode & !FALLOC_FL_KEEP_SIZE == 0 {
            self.writes.send_all(&self.opened.bytes)?;
        } else {
            // Bytes that it takes away must not be sent again.
            self.writes.sync_file(&self.opened, true)?;
        }
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
        self.writes.send_all(&self.opened.bytes)?;
        self.writes.send_all(&to.opened.bytes)?;
        let call = WriteCall::CopyRange { file: self.opened.number, offset, to: to.opened.number, to_offset, len };
        let context = RequestContext::of(caller);
        let failures = to.opened.bytes.failure_count();
        let home = self.opened.home();
        let deadline = self.writes.calls.begin();
        // The other file may have moved, so this call does not: the caller then reads and writes.
        let copied = match self.writes.calls.change(CallTarget::Process(&home), &call, context, deadline) {
            Ok(sent) => match settle_answer(sent.answer)? {
                WriteAnswer::UnknownFile => return Err(apart()),
                answer => {
                    to.opened.used.store(true, Ordering::Relaxed);
                    number_of(answer)?
                }
            },
            Err(CallEnd::Lost { .. }) => return Err(apart()),
            Err(CallEnd::Failed(error)) => return Err(error),
        };
        // The mount has no bytes to send again, neither these nor what earlier writes would put over them. If the process
        // is lost before they are durable, the caller reads and writes.
        if copied > 0 && self.writes.sync_by(&to.opened, true, deadline)? != home {
            return Err(apart());
        }
        to.opened.bytes.failure_after(failures)?;
        Ok(copied)
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64> {
        let call = WriteCall::Seek { file: self.opened.number, offset, whence };
        number_of(self.query_after_writes(call, &self.opened.caller)?)
    }

    fn flush(&self) -> Result<()> {
        let opened = &*self.opened;
        let sent = self.writes.send_at_close(opened);
        opened.failed_close.store(sent.is_err(), Ordering::Relaxed);
        // The call finds out whether the process still has the bytes; so does a write that goes there.
        let flushed = match sent? || !opened.used.load(Ordering::Relaxed) {
            true => Ok(WriteAnswer::Done),
            false => self.query(WriteCall::Flush { file: opened.number }, &opened.caller),
        };
        opened.bytes.report_at_close(&opened.reported)?;
        done(flushed?)
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
        // The next owner of the lock reads what was written under this one. While no node takes that, the lock stays: sent after its
        // release, the bytes would replace those of the next owner.
        self.send_bytes()?;
        let call = set_call(self.opened.number, lock);
        if lock.kind == LockKind::Unlock {
            // Nor are they sent again when a node is lost later.
            self.writes.sync_retained(&self.opened)?;
            // Forgotten first: a lock that is lost needs no node to be given up.
            self.opened.forget_lock(lock);
        }
        let deadline = self.writes.calls.begin();
        loop {
            let begun = Instant::now();
            let sent = call_open(&self.writes, &self.opened, OpenCall::query(&call, caller, deadline))?;
            done(settle_answer(sent.answer)?)?;
            if lock.kind == LockKind::Unlock {
                return Ok(());
            }
            self.opened.held.confirm(Some(begun));
            if self.opened.note_granted(lock, begun, &sent.home) {
                return Ok(());
            }
            self.writes.close_left(&self.opened, &sent.home, deadline);
        }
    }

    fn reopen(&self, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        let number = self.writes.calls.new_file_number();
        let call = WriteCall::Reopen { of: self.opened.number, flags: OpenFlags::new(flags), file: number };
        self.writes.send_all(&self.opened.bytes)?;
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
        query_open(&self.writes, &self.opened, call, caller)
    }
}

impl Drop for RemoteDirectory {
    fn drop(&mut self) {
        self.writes.close_soon(&self.opened);
    }
}

impl WritableObject for RemoteDirectory {
    fn stat(&self) -> Result<NodeAttr> {
        self.opened.stat_open(&self.writes)
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        let call = WriteCall::SetAttrOpen { file: self.opened.number, set: *set };
        attr_of(change_open(&self.writes, &self.opened, &call, RequestContext::of(caller))?)
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>> {
        call_attr_open(&self.writes, &self.opened, call, caller)
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        done(self.query(WriteCall::Sync { file: self.opened.number, data_only }, &self.opened.caller)?)
    }
}

impl WritableDirectory for RemoteDirectory {
    fn read(&self, from: u64, max: usize, attrs: bool, caller: &Caller) -> Result<Vec<ListedName>> {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        let read =
            || match self.query(WriteCall::ReadDirectory { file: self.opened.number, from, max, attrs }, caller)? {
                WriteAnswer::Names(names) => Ok(names),
                other => Err(unexpected(&other)),
            };
        let names = read()?;
        let mut moved = false;
        for attr in names.iter().filter_map(|name| name.attr.as_ref()) {
            moved |= self.writes.send_bytes_of(Some(attr.identity))?;
        }
        if moved { read() } else { Ok(names) }
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
