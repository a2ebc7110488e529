//! Open files and directories as the file system over this volume has them. It knows no processes and no locks of others.

use super::bytes::NewBytes;
use super::calls::{
    CallEnd, CallTarget, MaybeExecuted, RequestContext, WriteCallPlan, attr_of, settle_answer, unexpected,
};
use super::open_file::{
    FileOpening, OpenCall, OpenFile, OpenFiles, call_attr_open, call_open, change_open, change_open_as, query_open,
    set_call,
};
use super::{CAPABILITIES, no_capabilities};
use spurline_proto::{OpenFlags, WriteAnswer, WriteCall};
use spurline_types::errno::{ENODATA, EXDEV};
use spurline_types::open_flags::O_APPEND;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::hand_over::OpenHold;
use spurline_volume::writes::{
    AttrChange, CacheVersion, Caller, FileLock, ListedName, LockConflict, LockKind, NodeAttr, OpenAttrCall,
    WritableDirectory, WritableFile, WritableObject, WritePlace,
};
use std::any::Any;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// From `linux/falloc.h`: the only mode that changes no bytes.
const FALLOC_FL_KEEP_SIZE: u32 = 1;

/// An open file.
pub(crate) struct RemoteFile {
    files: Arc<OpenFiles>,
    opened: Arc<OpenFile>,
    /// As its process opened it.
    attr_at_open: NodeAttr,
    version_at_open: CacheVersion,
}

/// The version in the answer to an open.
pub(crate) fn cache_version_of(answer: &WriteAnswer) -> CacheVersion {
    match answer {
        WriteAnswer::Opened(_, version) => version.clone(),
        // The process had the file open already.
        _ => CacheVersion::JustChanged,
    }
}

impl RemoteFile {
    pub fn new(files: Arc<OpenFiles>, opened: Arc<OpenFile>, attr: NodeAttr, version: CacheVersion) -> Self {
        RemoteFile { files, opened, attr_at_open: attr, version_at_open: version }
    }

    pub fn number(&self) -> u64 {
        self.opened.number()
    }

    /// Sends the bytes of earlier writes.
    pub fn send_bytes(&self) -> Result<()> {
        self.files.send_all(&self.opened.bytes)
    }

    pub fn set_path(&self, path: Vec<u8>) {
        self.opened.set_path(path);
    }

    /// A call that may be repeated.
    fn query(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        query_open(&self.files, &self.opened, call, caller)
    }

    /// As [`RemoteFile::query`], after the bytes of earlier writes were sent, which the call would see.
    fn query_after_writes(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        self.files.send_all(&self.opened.bytes)?;
        self.query(call, caller)
    }

    /// A call that is made once.
    pub fn change(&self, call: &WriteCall<'_>, context: RequestContext<'_>) -> Result<WriteAnswer> {
        change_open(&self.files, &self.opened, call, context)
    }

    fn appends(&self, place: WritePlace) -> bool {
        match place {
            WritePlace::AsOpened => self.opened.has_flag(O_APPEND),
            WritePlace::End => true,
            WritePlace::Offset | WritePlace::MappedPages => false,
        }
    }

    /// Takes bytes that fit into one request.
    fn write_piece(&self, place: WritePlace, offset: u64, data: &[u8], lose_privileges: Option<&Caller>) -> Result<()> {
        self.opened.note_used();
        let appends = self.appends(place);
        // One at a time, so that the place of each is known.
        let _one = appends.then(|| self.opened.bytes.begin_append());
        let offset = if appends { self.opened.bytes.end() } else { offset };
        let lose_privileges = lose_privileges.map(|caller| (caller.uid, caller.gid));
        let owner = self.opened.number();
        let mapped = place == WritePlace::MappedPages;
        let drawn = if appends { self.files.calls.draw_for_append(offset, &self.opened.home()) } else { None };
        let offset = drawn.map_or(offset, |drawn| drawn.place);
        let change = drawn.map(|drawn| drawn.number);
        let before = drawn.map_or(MaybeExecuted::Nowhere, |drawn| drawn.before);
        let appended = appends;
        let new = NewBytes { owner, offset, data, appended, mapped, lose_privileges, awaited: false, change, before };
        self.files.write_behind(&self.opened, new)?;
        self.opened.bytes.raise_end(offset + data.len() as u64);
        Ok(())
    }
}

/// Opens an open file once more.
pub(crate) fn reopen_file(
    files: &Arc<OpenFiles>,
    opened: &OpenFile,
    flags: u32,
    caller: &Caller,
) -> Result<(NodeAttr, RemoteFile)> {
    files.send_all(&opened.bytes)?;
    let change = files.calls.draw_for_request();
    let number = change.get();
    let call = WriteCall::Reopen { of: opened.number(), flags: OpenFlags::new(flags), file: number };
    let sent = change_open_as(&change, files, opened, &call, RequestContext::of(caller))?;
    let answer = settle_answer(sent.answer)?;
    let version = cache_version_of(&answer);
    let attr = attr_of(answer)?;
    let home = opened.home();
    if sent.home != home {
        // The open file has moved since: the new file follows at the first request there.
        files.calls.close_later(&sent.home, &[number]);
    }
    let opening = FileOpening { number, attr, flags, caller, home };
    let file = files.add_file(opened.current_path(), opening);
    Ok((attr, RemoteFile::new(Arc::clone(files), file, attr, version)))
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        self.files.close_behind(&self.opened);
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
        let attr = self.opened.stat_open(&self.files)?;
        self.opened.bytes.note_size(attr.size);
        Ok(attr)
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        let call = WriteCall::SetAttrOpen { file: self.opened.number(), set: *set };
        self.files.send_all(&self.opened.bytes)?;
        let attr = attr_of(self.change(&call, RequestContext::of(caller))?)?;
        self.opened.bytes.note_size(attr.size);
        if let Some(size) = set.size {
            self.files.cut_bytes_of(attr.identity, size);
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
                self.files.send_all(bytes)?;
            }
            OpenAttrCall::Remove(_) => self.files.send_all(bytes)?,
            OpenAttrCall::Access(_) | OpenAttrCall::Get(_) | OpenAttrCall::List => {}
        }
        call_attr_open(&self.files, &self.opened, call, caller).inspect_err(|error| {
            if capabilities && error.kind() == ErrorKind::Io(ENODATA) {
                bytes.note_bare(true);
            }
        })
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        let opened = &*self.opened;
        self.files.sync_file(opened, data_only)?;
        opened.bytes.report_at_sync(&opened.reported)
    }
}

impl WritableFile for RemoteFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        self.files.send_all(&self.opened.bytes)?;
        let deadline = self.files.calls.begin();
        let mut read = 0;
        for piece in dst.chunks_mut(self.files.most_bytes()) {
            let wanted = piece.len();
            let len = u32::try_from(wanted).unwrap_or(u32::MAX);
            let call = WriteCall::Read { file: self.opened.number(), offset: offset + read as u64, len };
            let open = OpenCall { landing: piece, ..OpenCall::query(&call, self.opened.caller(), deadline) };
            let sent = call_open(&self.files, &self.opened, open)?;
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
        // The next process repeats one change for a request.
        let pieces_max = if self.files.calls.is_kept() && self.appends(place) { 1 } else { usize::MAX };
        for piece in data.chunks(self.files.most_bytes()).take(pieces_max) {
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
            self.files.send_all(&self.opened.bytes)?;
        } else {
            // Bytes that it takes away must not be sent again.
            self.files.sync_file(&self.opened, true)?;
        }
        let call = WriteCall::Allocate { file: self.opened.number(), mode, offset, len };
        done(self.change(&call, RequestContext::of(caller))?)
    }

    fn copy_range(&self, offset: u64, to: &dyn WritableFile, to_offset: u64, len: u64, caller: &Caller) -> Result<u64> {
        let to = to.as_any().downcast_ref::<RemoteFile>().ok_or_else(different_nodes_error)?;
        // Copied bytes could not be sent again.
        if self.opened.home() != to.opened.home() {
            return Err(different_nodes_error());
        }
        self.files.send_all(&self.opened.bytes)?;
        self.files.send_all(&to.opened.bytes)?;
        let call = WriteCall::CopyRange { file: self.opened.number(), offset, to: to.opened.number(), to_offset, len };
        let context = RequestContext::of(caller);
        let failures = to.opened.bytes.failure_count();
        let home = self.opened.home();
        let deadline = self.files.calls.begin();
        // The other file may have moved, so this call does not: the caller then reads and writes.
        let number = self.files.calls.draw_for_request();
        let plan = WriteCallPlan::change(CallTarget::Process(&home), &number, &call, context, deadline);
        let copied = match self.files.calls.run(plan) {
            Ok(sent) => match settle_answer(sent.answer)? {
                WriteAnswer::UnknownFile => return Err(different_nodes_error()),
                answer => {
                    to.opened.note_used();
                    number_of(answer)?
                }
            },
            Err(CallEnd::Lost { .. }) => return Err(different_nodes_error()),
            Err(CallEnd::Failed(error)) => return Err(error),
        };
        // The mount has no bytes to send again, neither these nor what earlier writes would put over them. If the process
        // is lost before they are durable, the caller reads and writes.
        if copied > 0 && self.files.sync_by(&to.opened, true, deadline)? != home {
            return Err(different_nodes_error());
        }
        to.opened.bytes.failure_after(failures)?;
        Ok(copied)
    }

    fn seek(&self, offset: u64, whence: u32) -> Result<u64> {
        let call = WriteCall::Seek { file: self.opened.number(), offset, whence };
        number_of(self.query_after_writes(call, self.opened.caller())?)
    }

    fn flush(&self) -> Result<()> {
        let opened = &*self.opened;
        let sent = self.files.send_at_close(opened);
        opened.set_failed_close(sent.is_err());
        // The call finds out whether the process still has the bytes; so does a write that goes there.
        let flushed = if sent? || !opened.is_used() {
            Ok(WriteAnswer::Done)
        } else {
            self.query(WriteCall::Flush { file: opened.number() }, opened.caller())
        };
        opened.bytes.report_at_close(&opened.reported)?;
        done(flushed?)
    }

    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        let FileLock { owner, range, kind, .. } = *lock;
        let call = WriteCall::TestLock { file: self.opened.number(), owner, range, kind };
        match self.query(call, self.opened.caller())? {
            WriteAnswer::Conflict(conflict) => Ok(conflict),
            other => Err(unexpected(&other)),
        }
    }

    fn set_lock(&self, lock: &FileLock, caller: &Caller) -> Result<()> {
        // The next owner of the lock reads what was written under this one. While no node takes that, the lock stays: sent after its
        // release, the bytes would replace those of the next owner.
        self.send_bytes()?;
        let call = set_call(self.opened.number(), lock);
        if lock.kind == LockKind::Unlock {
            // Nor are they sent again when a node is lost later.
            self.files.sync_retained(&self.opened)?;
            // Forgotten first: a lock that is lost needs no node to be given up.
            self.opened.forget_lock(&self.files, lock);
        }
        let deadline = self.files.calls.begin();
        loop {
            let attempt = self.opened.begin_lock();
            let sent = call_open(&self.files, &self.opened, OpenCall::query(&call, caller, deadline))?;
            done(settle_answer(sent.answer)?)?;
            if lock.kind == LockKind::Unlock {
                return Ok(());
            }
            if self.opened.note_granted(lock, attempt, &sent.home) {
                return Ok(());
            }
            self.files.close_left(&self.opened, &sent.home, deadline);
        }
    }

    fn attr_at_open(&self) -> Result<NodeAttr> {
        // The end of a file that is written has to be known.
        if self.opened.writes() { self.stat() } else { Ok(self.attr_at_open) }
    }

    fn cache_version(&self, attr: &NodeAttr) -> CacheVersion {
        if *attr == self.attr_at_open { self.version_at_open.clone() } else { CacheVersion::JustChanged }
    }

    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        OpenHold::Node(self.opened.held())
    }

    fn adopt_lock(&self, lock: &FileLock, _descriptor: Option<OwnedFd>) {
        self.opened.adopt_lock(lock);
    }

    fn keep_record(&self, record: u32) {
        self.opened.keep_record(&self.files, record);
    }

    fn reopen(&self, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        let (_, file) = reopen_file(&self.files, &self.opened, flags, caller)?;
        Ok(Box::new(file))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// An open directory.
pub(crate) struct RemoteDirectory {
    files: Arc<OpenFiles>,
    opened: Arc<OpenFile>,
}

impl RemoteDirectory {
    pub fn new(files: Arc<OpenFiles>, opened: Arc<OpenFile>) -> Self {
        RemoteDirectory { files, opened }
    }

    fn read_process(&self, from: u64, max: usize, attrs: bool, caller: &Caller) -> Result<Vec<ListedName>> {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        let file = self.opened.number();
        match self.query(WriteCall::ReadDirectory { file, from, max, attrs }, caller)? {
            WriteAnswer::Names(names) => Ok(names),
            other => Err(unexpected(&other)),
        }
    }

    fn query(&self, call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        query_open(&self.files, &self.opened, call, caller)
    }
}

impl Drop for RemoteDirectory {
    fn drop(&mut self) {
        self.files.close_soon(&self.opened);
    }
}

impl WritableObject for RemoteDirectory {
    fn stat(&self) -> Result<NodeAttr> {
        self.opened.stat_open(&self.files)
    }

    fn set_attr(&self, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        let call = WriteCall::SetAttrOpen { file: self.opened.number(), set: *set };
        attr_of(change_open(&self.files, &self.opened, &call, RequestContext::of(caller))?)
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>> {
        call_attr_open(&self.files, &self.opened, call, caller)
    }

    fn sync(&self, data_only: bool) -> Result<()> {
        done(self.query(WriteCall::Sync { file: self.opened.number(), data_only }, self.opened.caller())?)
    }
}

impl WritableDirectory for RemoteDirectory {
    fn hold(&self) -> OpenHold<BorrowedFd<'_>> {
        OpenHold::Node(self.opened.held())
    }

    fn read(&self, from: u64, max: usize, attrs: bool, caller: &Caller) -> Result<Vec<ListedName>> {
        let names = self.read_process(from, max, attrs, caller)?;
        let mut moved = false;
        for attr in names.iter().filter_map(|name| name.attr.as_ref()) {
            moved |= self.files.send_bytes_of(Some(attr.identity))?;
        }
        if moved { self.read_process(from, max, attrs, caller) } else { Ok(names) }
    }
}

fn different_nodes_error() -> Error {
    Error::new(ErrorKind::Io(EXDEV), "the files are open on different nodes")
}
