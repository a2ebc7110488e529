//! Executes the requests of mounts that write, each change once. It knows neither how the source is changed nor how
//! requests arrive.

mod apart;
mod grants;
mod sessions;

use crate::CacheNode;
use crate::path_locks::{OpenPath, PathLocks, PathOwner, lock_identity};
use apart::{CallerThreads, acts_as_caller};
use grants::LockGrants;
use parking_lot::RwLock;
use sessions::{ChangeState, OpenObject, WriteSession, WriteSessions};
use spurline_proto::{
    AnswerBody as _, KnownGrants, LOCK_TIMES, MAX_PAYLOAD, OpenFlags, WriteAnswer, WriteCall, WriteRequest,
};
use spurline_transport::Responder;
use spurline_types::errno::{EBADF, EIO};
use spurline_types::open_flags::{O_ACCMODE, O_RDONLY};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::Volume;
use spurline_volume::capabilities::WriteCapabilities;
use spurline_volume::repeated::{ChangeOutcome, RepeatedCall, RepeatedChange};
use spurline_volume::writes::{
    CacheVersion, Caller, FileIdentity, FileLock, LockConflict, LockFamily, LockKind, NamePath, NodeAttr, NodePath,
    OpenAttrCall, S_IFMT, S_IFREG, WritableFile, WritableObject, WritableVolume, WritePlace,
};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Opens the writable side of a source, which is read through this volume.
pub type OpenWritable = dyn Fn(&Arc<dyn Volume>) -> Result<Arc<dyn WritableVolume>> + Send + Sync;

/// How long a repeated request waits for the first one; the mount's own deadline is shorter.
const REPEATED_WAIT: Duration = Duration::from_secs(120);
/// Limit of names in an answer.
const NAMES_MAX: u32 = 1000;
/// Flags of an open that count only once.
const MADE: u32 = OpenFlags::CREATE | OpenFlags::EXCLUSIVE;

/// The use of a node's writing side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WritesInUse {
    /// Whether the node takes changes.
    pub writable: bool,
    /// Sessions of writing mounts.
    pub sessions: usize,
    /// Files that these mounts have open.
    pub open_files: usize,
}

/// The writing side of a node.
#[derive(Default)]
pub(crate) struct WriteService {
    open: OnceLock<Box<OpenWritable>>,
    /// By the number of the volume.
    sources: RwLock<Vec<(u32, Arc<dyn WritableVolume>)>>,
    sessions: WriteSessions,
    grants: LockGrants,
    /// Of objects that mounts write themselves.
    path_locks: Arc<PathLocks>,
    threads: CallerThreads,
}

impl WriteService {
    pub fn set_open(&self, open: Box<OpenWritable>) {
        // Only the first call has an effect.
        let _ = self.open.set(open);
    }

    pub fn is_on(&self) -> bool {
        self.open.get().is_some()
    }

    fn has_source(&self, volume: spurline_proto::VolumeId) -> bool {
        self.sources.read().iter().any(|(number, _)| *number == volume.0)
    }

    pub fn sessions(&self) -> &WriteSessions {
        &self.sessions
    }

    pub fn path_locks(&self) -> &Arc<PathLocks> {
        &self.path_locks
    }
}

/// Whether a call needs no file of the source: calls about paths of a bucket, and those on the open paths of a mount that has nothing
/// else open.
fn is_about_paths(call: &WriteCall<'_>, session: &WriteSession) -> bool {
    match call {
        WriteCall::OpenPath { .. } | WriteCall::FindPathLock { .. } => true,
        WriteCall::SetLock { .. } | WriteCall::StatOpen { .. } | WriteCall::Close { .. } | WriteCall::Renew => {
            session.has_no_source()
        }
        _ => false,
    }
}

/// Gives a failure if the thread unwinds before there is an answer, so that no repeated request waits for it.
struct AnswerGuard<'a> {
    session: &'a WriteSession,
    number: u64,
    given: bool,
}

impl Drop for AnswerGuard<'_> {
    fn drop(&mut self) {
        if !self.given {
            self.session.forget_change(self.number);
        }
    }
}

impl CacheNode {
    /// Accepts changes; `open` opens the writable side of a source. Only the first call has an effect.
    pub fn accept_writes(self: &Arc<Self>, open: Box<OpenWritable>) {
        self.writes.threads.set_node(self);
        self.writes.set_open(open);
    }

    /// Ends the sessions of mounts that sent nothing for a while. To be called now and then.
    pub fn expire_write_sessions(&self) {
        self.expire_write_sessions_at(Instant::now());
    }

    /// As [`CacheNode::expire_write_sessions`], at another time. For tests.
    #[doc(hidden)]
    pub fn expire_write_sessions_at(&self, now: Instant) {
        self.store.drop_idle(now);
        let (ended, unlocked) = self.writes.sessions().expire_idle(now);
        if unlocked > 0 {
            tracing::warn!(
                "{unlocked} files with locks were closed: their mounts sent nothing for {:?}",
                LOCK_TIMES.locks_idle
            );
        }
        if ended > 0 {
            let idle = LOCK_TIMES.session_idle;
            tracing::info!("{ended} sessions of writing mounts ended: no request for {idle:?}");
        }
    }

    /// Grants new locks from now on, without a grace period after the start. For tests.
    #[doc(hidden)]
    pub fn settle_locks(&self) {
        self.writes.grants.settle();
    }

    /// The present use of the writing side.
    pub fn writes_in_use(&self) -> WritesInUse {
        let (sessions, open_files) = self.writes.sessions().counts();
        WritesInUse { writable: self.writes.is_on(), sessions, open_files }
    }

    /// The refusal of a node without `--writable`.
    pub(crate) fn takes_no_changes(&self, source: &str) -> Error {
        let name = self.name();
        let why = format!("node {name} takes no changes of {source}: start it with --writable, or mount without --rw");
        Error::new(ErrorKind::ReadOnly, why)
    }

    pub(crate) fn writable_source(&self, volume: spurline_proto::VolumeId) -> Result<Arc<dyn WritableVolume>> {
        let cache: Arc<dyn Volume> = self.volume_by_id(volume)?;
        if let Some((_, source)) = self.writes.sources.read().iter().find(|(number, _)| *number == volume.0) {
            return Ok(Arc::clone(source));
        }
        let Some(open) = self.writes.open.get() else {
            return Err(self.takes_no_changes(cache.source()));
        };
        let source = open(&cache)?;
        let mut sources = self.writes.sources.write();
        if let Some((_, source)) = sources.iter().find(|(number, _)| *number == volume.0) {
            return Ok(Arc::clone(source));
        }
        sources.push((volume.0, Arc::clone(&source)));
        Ok(source)
    }

    /// Answers one request; each change is executed once however often it arrives.
    pub(crate) fn serve_write(&self, request: &WriteRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        // Almost every call waits for the source.
        responder.before_wait();
        let cache = self.volume_by_id(request.volume)?;
        // A refusal, and no answer of the source: another node may take the request.
        if !self.writes.is_on() {
            return Err(self.takes_no_changes(cache.source()));
        }
        let session = self.writes.sessions().session(request.id.session)?;
        if is_about_paths(&request.call, &session) {
            return self.serve_in_session(&session, None, request, responder);
        }
        if responder.keeps_identity() && (acts_as_caller(&request.call) || !self.writes.has_source(request.volume)) {
            responder.check_reader()?;
            return self.writes.threads.serve(request, responder);
        }
        let source = match self.writable_source(request.volume) {
            Ok(source) => source,
            // The connection numbers volumes anew.
            Err(error) if error.kind() == ErrorKind::Protocol => return Err(error),
            Err(error) => return send_answer(&WriteAnswer::Failed(error), responder),
        };
        session.note_source();
        if let WriteCall::Read { file, offset, len } = request.call {
            return self.serve_open_read(&session, file, offset, len, responder);
        }
        self.serve_in_session(&session, Some(&*source), request, responder)
    }

    /// Executes a request, each change once.
    fn serve_in_session(
        &self,
        session: &WriteSession,
        volume: Option<&dyn WritableVolume>,
        request: &WriteRequest<'_>,
        responder: &mut dyn Responder,
    ) -> Result<()> {
        let serve = ServedWrite { volume, session, service: &self.writes, request };
        if !request.is_change() {
            let in_order =
                matches!(request.call, WriteCall::Write { .. } | WriteCall::SetLock { .. } | WriteCall::Close { .. });
            let _executing = in_order.then(|| session.begin_attempt(request.answered)).transpose()?;
            if matches!(request.call, WriteCall::Write { .. } | WriteCall::Sync { .. }) {
                responder.check_reader()?;
            }
            return send_answer(&serve.execute(), responder);
        }
        match session.begin_change(request.id.number, request.answered, request.again)? {
            ChangeState::Known(slot) => match slot.wait_answer(Instant::now() + REPEATED_WAIT) {
                Some(bytes) => responder.send_data(&bytes, &[]),
                None => Err(Error::new(ErrorKind::Timeout, "the first request for this change is still executed")),
            },
            ChangeState::New(slot) => {
                let mut guard = AnswerGuard { session, number: request.id.number, given: false };
                // As late as possible: what stops this process between here and the system call delays the change.
                responder.check_reader()?;
                let answer = serve.execute();
                // Sent again with the file open, it is executed.
                if answer == WriteAnswer::UnknownFile {
                    return send_answer(&answer, responder);
                }
                let mut bytes = Vec::with_capacity(160);
                answer.encode(&mut bytes);
                slot.give_answer(&bytes);
                guard.given = true;
                responder.send_data(&bytes, &[])
            }
        }
    }

    fn serve_open_read(
        &self,
        session: &WriteSession,
        file: u64,
        offset: u64,
        len: u32,
        responder: &mut dyn Responder,
    ) -> Result<()> {
        let len = len as usize;
        if len > MAX_PAYLOAD {
            let why = format!("a read of {len} bytes exceeds the maximum of {MAX_PAYLOAD}");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let file = match session.open_object(file) {
            Some(OpenObject::File(file)) => file,
            Some(_) => return send_answer(&failed(EBADF, "it is no file"), responder),
            None => return send_answer(&WriteAnswer::UnknownFile, responder),
        };
        let deadline = Instant::now() + REPEATED_WAIT;
        let mut buffer = self.shared.tier.pool().alloc_near(len.max(1), responder.numa_node(), deadline)?;
        match file.read_at(offset, &mut buffer[..len]) {
            Err(error) => send_answer(&WriteAnswer::Failed(error), responder),
            Ok(read) => {
                let mut body = Vec::new();
                WriteAnswer::Done.encode(&mut body);
                responder.send_data(&body, &[&buffer[..read]])
            }
        }
    }
}

fn as_micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn send_answer(answer: &WriteAnswer, responder: &mut dyn Responder) -> Result<()> {
    CacheNode::send_body(answer, responder)
}

/// The abilities of a source for mounts, which write the objects of a bucket themselves.
fn capabilities_answer(can: WriteCapabilities) -> WriteAnswer {
    if can.publishes {
        let why = "mounts write the objects of a bucket themselves, and the release of this mount is older: upgrade spurline on its host";
        return WriteAnswer::Failed(Error::new(ErrorKind::Unsupported, why));
    }
    WriteAnswer::Capabilities(can)
}

fn failed(errno: i32, why: &str) -> WriteAnswer {
    WriteAnswer::Failed(Error::new(ErrorKind::Io(errno), why))
}

/// One request being executed.
struct ServedWrite<'a> {
    /// The source; `None` for a call that needs no file of it.
    volume: Option<&'a dyn WritableVolume>,
    session: &'a WriteSession,
    service: &'a WriteService,
    request: &'a WriteRequest<'a>,
}

impl ServedWrite<'_> {
    fn execute(&self) -> WriteAnswer {
        match self.try_execute() {
            Ok(answer) => answer,
            Err(error) => self.find_late_answer().unwrap_or(WriteAnswer::Failed(error)),
        }
    }

    /// The answer to a change that a process which the mount has given up has executed after this one looked for it.
    fn find_late_answer(&self) -> Option<WriteAnswer> {
        if !self.request.again {
            return None;
        }
        let found = self.find_answer(self.volume?, &self.request.caller.to_caller()).ok()??;
        (!matches!(found, WriteAnswer::Unclear(_))).then_some(found)
    }

    /// The open file with this number; `None` when the node does not have it.
    fn file(&self, number: u64) -> Result<Option<Arc<dyn WritableFile>>> {
        match self.session.open_object(number) {
            Some(OpenObject::File(file)) => Ok(Some(file)),
            Some(_) => Err(Error::new(ErrorKind::Io(EBADF), "it is no file")),
            None => Ok(None),
        }
    }

    /// The answer to a change that another process has executed, or perhaps has; `None` if it has to be executed here.
    fn find_answer(&self, volume: &dyn WritableVolume, caller: &Caller) -> Result<Option<WriteAnswer>> {
        let request = self.request;
        let call = match request.call {
            WriteCall::Create { at, flags, .. } if flags.has_any(OpenFlags::EXCLUSIVE) => {
                RepeatedCall::CreateExclusive(at)
            }
            WriteCall::LinkOpen { to, .. } => RepeatedCall::LinkOpen(to),
            WriteCall::Change(change) => RepeatedCall::Change(change),
            // Executed twice, they have the same result.
            _ => return Ok(None),
        };
        let repeated = RepeatedChange { call, mark: request.id.mark(), known: request.known, caller };
        Ok(match volume.outcome_of(&repeated)? {
            ChangeOutcome::NotMade => None,
            ChangeOutcome::Unclear(why) => {
                let number = request.id.number;
                Some(WriteAnswer::Unclear(format!("a node was lost during change {number}: {why}")))
            }
            ChangeOutcome::Made(None) => Some(WriteAnswer::Done),
            ChangeOutcome::Made(Some(attr)) => {
                self.open_made(volume, &attr, caller)?;
                Some(WriteAnswer::Attr(attr))
            }
        })
    }

    /// Opens here the file that a creation by another process has made.
    fn open_made(&self, volume: &dyn WritableVolume, made: &NodeAttr, caller: &Caller) -> Result<()> {
        let WriteCall::Create { at, flags, file, .. } = self.request.call else { return Ok(()) };
        let path = at.path();
        let at = NodePath { path: &path, expected: Some(made.identity) };
        let opened = volume.open(at, flags.without(MADE).bits(), caller)?;
        self.add_object(file, OpenObject::File(opened.into()))
    }

    /// Adds an object that this request has opened.
    fn add_object(&self, file: u64, object: OpenObject) -> Result<()> {
        self.session.add_object(file, self.request.id.number, object)
    }

    /// Keeps a file open under the mount's number; answers with its attributes, and the version whose cached bytes it may be
    /// read from.
    fn keep_open(&self, file: u64, flags: OpenFlags, opened: Box<dyn WritableFile>) -> Result<WriteAnswer> {
        let attr = opened.stat()?;
        let version = match flags.bits() & O_ACCMODE {
            O_RDONLY => opened.cache_version(&attr),
            _ => CacheVersion::OpenForChanges,
        };
        self.add_object(file, OpenObject::File(opened.into()))?;
        Ok(WriteAnswer::Opened(attr, version))
    }

    fn try_execute(&self) -> Result<WriteAnswer> {
        let Some(volume) = self.volume else { return self.execute_on_path() };
        let request = self.request;
        let call = request.call;
        let caller = request.caller.to_caller();
        let mark = request.marked.then(|| request.id.mark());
        if request.again
            && let Some(answer) = self.find_answer(volume, &caller)?
        {
            return Ok(answer);
        }
        Ok(match call {
            WriteCall::Capabilities => capabilities_answer(volume.capabilities()),
            WriteCall::Space => WriteAnswer::Space(volume.space()?),
            WriteCall::SyncAll => {
                volume.sync_all()?;
                WriteAnswer::Done
            }
            WriteCall::Stat(at) => WriteAnswer::Attr(volume.stat(at, &caller)?),
            WriteCall::Lookup(at) => WriteAnswer::Attr(volume.lookup(at, &caller)?),
            WriteCall::ReadLink(at) => WriteAnswer::Bytes(volume.readlink(at, &caller)?),
            WriteCall::Access(at, mask) => volume.access(at, mask, &caller).map(|()| WriteAnswer::Done)?,
            WriteCall::GetXattr(at, name) => WriteAnswer::Bytes(volume.get_xattr(at, name, &caller)?),
            WriteCall::ListXattr(at) => WriteAnswer::Bytes(volume.list_xattr(at, &caller)?),
            WriteCall::Open { at, flags, file } => {
                self.keep_open(file, flags, volume.open(at, flags.bits(), &caller)?)?
            }
            WriteCall::OpenName { at, flags, file } => self.open_name(volume, at, flags, file, &caller)?,
            WriteCall::OpenAgain { at, flags, file } => self.open_again(volume, at, flags, file, &caller)?,
            WriteCall::Create { at, flags, mode, file } => {
                let created = volume.create_marked(at, flags.bits(), mode, &caller, mark)?;
                self.add_object(file, OpenObject::File(created.file.into()))?;
                WriteAnswer::Created(created.attr, created.directory)
            }
            WriteCall::CreateUnnamed { directory, flags, mode, file } => {
                let (attr, opened) = volume.create_unnamed(directory, flags.bits(), mode, &caller)?;
                self.add_object(file, OpenObject::File(opened.into()))?;
                WriteAnswer::Attr(attr)
            }
            WriteCall::LinkOpen { file, to } => match self.file(file)? {
                Some(file) => WriteAnswer::Attr(volume.link_open(&*file, to, &caller)?),
                None => WriteAnswer::UnknownFile,
            },
            WriteCall::Reopen { of, flags, file } => match self.file(of)? {
                Some(open) => self.keep_open(file, flags, open.reopen(flags.bits(), &caller)?)?,
                None => WriteAnswer::UnknownFile,
            },
            WriteCall::OpenDirectory { at, file } => {
                let opened = volume.open_directory(at, &caller)?;
                self.add_object(file, OpenObject::Directory(opened.into()))?;
                WriteAnswer::Done
            }
            WriteCall::Change(change) => {
                let attr = volume.change_marked(&change, &caller, mark)?;
                attr.map_or(WriteAnswer::Done, WriteAnswer::Attr)
            }
            WriteCall::KeepAnswers { changes } => {
                self.session.keep_answers(changes.iter());
                WriteAnswer::Done
            }
            WriteCall::FindGrant { at, family, range, kind } => {
                // The owner's number means nothing to other mounts.
                let lock = FileLock { family, owner: 0, range, kind };
                self.find_grants(at.expected, &lock, None)
            }
            WriteCall::OpenPath { .. }
            | WriteCall::FindPathLock { .. }
            | WriteCall::Close { .. }
            | WriteCall::Renew => self.execute_on_path()?,
            WriteCall::ReadDirectory { file, from, max, attrs } => match self.session.open_object(file) {
                Some(OpenObject::Directory(directory)) => {
                    WriteAnswer::Names(directory.read(from, max.clamp(1, NAMES_MAX) as usize, attrs, &caller)?)
                }
                Some(_) => failed(EBADF, "it is no directory"),
                None => WriteAnswer::UnknownFile,
            },
            WriteCall::Sync { file, data_only } => self.sync_object(file, data_only)?,
            WriteCall::StatOpen { file } | WriteCall::SetAttrOpen { file, .. } | WriteCall::AttrOpen { file, .. } => {
                let Some(open) = self.session.open_object(file) else { return Ok(WriteAnswer::UnknownFile) };
                self.execute_on_object(&call, open.object()?, &caller)?
            }
            WriteCall::Read { file, .. }
            | WriteCall::Write { file, .. }
            | WriteCall::Allocate { file, .. }
            | WriteCall::CopyRange { file, .. }
            | WriteCall::Seek { file, .. }
            | WriteCall::Flush { file }
            | WriteCall::TestLock { file, .. }
            | WriteCall::SetLock { file, .. } => match self.file(file)? {
                Some(file) => self.execute_open(&call, &*file, &caller)?,
                None => WriteAnswer::UnknownFile,
            },
        })
    }

    /// Looks a name up, and opens the file if the caller can do that.
    fn open_name(
        &self,
        volume: &dyn WritableVolume,
        at: NamePath<'_>,
        flags: OpenFlags,
        file: u64,
        caller: &Caller,
    ) -> Result<WriteAnswer> {
        let found = volume.lookup(at, caller)?;
        let path = at.path();
        let at = NodePath { path: &path, expected: Some(found.identity) };
        if found.mode & S_IFMT != S_IFREG {
            return Ok(WriteAnswer::Attr(found));
        }
        match volume.open(at, flags.bits(), caller) {
            Ok(opened) => self.keep_open(file, flags, opened),
            // The mount asks again for the right to open.
            Err(_) => Ok(WriteAnswer::Attr(found)),
        }
    }

    /// Opens a file that the mount had open in a lost process.
    fn open_again(
        &self,
        volume: &dyn WritableVolume,
        at: NodePath<'_>,
        flags: OpenFlags,
        file: u64,
        caller: &Caller,
    ) -> Result<WriteAnswer> {
        // The mount lost its connections and found this process again: the file's locks stay.
        match self.file(file)? {
            Some(open) => Ok(WriteAnswer::Attr(open.stat()?)),
            None => self.keep_open(file, flags, volume.open(at, flags.bits(), caller)?),
        }
    }

    fn sync_object(&self, file: u64, data_only: bool) -> Result<WriteAnswer> {
        let Some(open) = self.session.open_object(file) else { return Ok(WriteAnswer::UnknownFile) };
        open.object()?.sync(data_only)?;
        Ok(WriteAnswer::Done)
    }

    /// A call that needs no file of the source: see [`is_about_paths`].
    fn execute_on_path(&self) -> Result<WriteAnswer> {
        let table = &self.service.path_locks;
        let session = self.request.id.session;
        let volume = self.request.volume.0;
        Ok(match self.request.call {
            WriteCall::OpenPath { at, file, reserves } => {
                // The mount lost its connections and found this process again: the locks stay.
                if self.session.open_object(file).is_none() {
                    let owner = PathOwner { session, file };
                    let opened = OpenPath::open(table, volume, at.path, owner, reserves)?;
                    self.add_object(file, OpenObject::Path(Arc::new(opened)))?;
                }
                WriteAnswer::Done
            }
            WriteCall::FindPathLock { at, family, range, kind } => {
                // The owner's number means nothing to other mounts.
                let lock = FileLock { family, owner: 0, range, kind };
                let held = table.find_conflict_of_others(volume, at.path, session, &lock);
                self.find_grants(Some(lock_identity(volume, at.path)), &lock, held)
            }
            WriteCall::SetLock { file, family, owner, range, kind } => {
                let Some(OpenObject::Path(path)) = self.session.open_object(file) else {
                    return Ok(WriteAnswer::UnknownFile);
                };
                let lock = FileLock { family, owner, range, kind };
                let of = (kind != LockKind::Unlock).then(|| path.lock_identity());
                self.set_lock(file, of, &lock, || path.set(&lock))?
            }
            WriteCall::StatOpen { file } if self.session.open_object(file).is_none() => WriteAnswer::UnknownFile,
            WriteCall::Close { opened_below, files } => {
                // Closing a second time changes nothing.
                files.iter().for_each(|file| self.session.close_object(file, opened_below));
                WriteAnswer::Done
            }
            _ => WriteAnswer::Done,
        })
    }

    fn find_grants(&self, of: Option<FileIdentity>, lock: &FileLock, held: Option<LockConflict>) -> WriteAnswer {
        WriteAnswer::Grants(KnownGrants { held, ..self.known_grants(of, lock, Instant::now()) })
    }

    /// What is known of locks of other mounts that exclude this one.
    fn known_grants(&self, of: Option<FileIdentity>, lock: &FileLock, now: Instant) -> KnownGrants {
        let last = of.and_then(|of| self.service.grants.last_of_others(of, self.request.id.session, lock, now));
        KnownGrants {
            last_us: last.map(|at| as_micros(now.saturating_duration_since(at))),
            up_us: as_micros(self.service.grants.up_time(now)),
            held: None,
        }
    }

    /// A call on an open file or directory.
    fn execute_on_object(
        &self,
        call: &WriteCall<'_>,
        open: &dyn WritableObject,
        caller: &Caller,
    ) -> Result<WriteAnswer> {
        Ok(match *call {
            WriteCall::StatOpen { .. } => WriteAnswer::Attr(open.stat()?),
            WriteCall::SetAttrOpen { ref set, .. } => WriteAnswer::Attr(open.set_attr(set, caller)?),
            WriteCall::AttrOpen { ref call, .. } => {
                let found = open.call_attr(call, caller)?;
                match call {
                    OpenAttrCall::Get(_) | OpenAttrCall::List => WriteAnswer::Bytes(found),
                    OpenAttrCall::Access(_) | OpenAttrCall::Set { .. } | OpenAttrCall::Remove(_) => WriteAnswer::Done,
                }
            }
            _ => failed(EIO, "no call on an open object"),
        })
    }

    /// A call on an open file.
    fn execute_open(&self, call: &WriteCall<'_>, file: &dyn WritableFile, caller: &Caller) -> Result<WriteAnswer> {
        let request = self.request;
        Ok(match *call {
            WriteCall::Write { offset, append, lose_privileges, flush, .. } => {
                let place = if append { WritePlace::End } else { WritePlace::Offset };
                let mut done = 0;
                if request.again && request.is_change() {
                    let Some(found) = file.find_appended(offset, request.payload)? else {
                        let why = format!("a node was lost during an append at {offset}, and other bytes are there");
                        return Ok(WriteAnswer::Unclear(why));
                    };
                    done = found;
                }
                let rest = &request.payload[done..];
                if !rest.is_empty() {
                    let lose_privileges = lose_privileges.then_some(caller);
                    done += file.write_placed(place, offset + done as u64, rest, lose_privileges)?;
                }
                if flush {
                    file.flush()?;
                }
                WriteAnswer::Number(done as u64)
            }
            WriteCall::Allocate { mode, offset, len, .. } => {
                file.allocate(mode, offset, len, caller)?;
                WriteAnswer::Done
            }
            WriteCall::CopyRange { offset, to, to_offset, len, .. } => match self.file(to)? {
                Some(to) => WriteAnswer::Number(file.copy_range(offset, &*to, to_offset, len, caller)?),
                None => WriteAnswer::UnknownFile,
            },
            WriteCall::Seek { offset, whence, .. } => WriteAnswer::Number(file.seek(offset, whence)?),
            WriteCall::Flush { .. } => {
                file.flush()?;
                WriteAnswer::Done
            }
            WriteCall::TestLock { owner, range, kind, .. } => {
                let lock = FileLock { family: LockFamily::Posix, owner, range, kind };
                // A process of this host is none of the mount's.
                let conflict = file.test_lock(&lock)?.map(|conflict| LockConflict { pid: 0, ..conflict });
                WriteAnswer::Conflict(conflict)
            }
            WriteCall::SetLock { file: number, family, owner, range, kind } => {
                let lock = FileLock { family, owner, range, kind };
                let of = (kind != LockKind::Unlock).then(|| file.stat().map(|attr| attr.identity)).transpose()?;
                self.set_lock(number, of, &lock, || file.set_lock(&lock, caller))?
            }
            _ => failed(EIO, "no call on an open file"),
        })
    }
    /// Sets by `set` a lock of the file `of`, or removes a lock where there is none to remember.
    fn set_lock(
        &self,
        number: u64,
        of: Option<FileIdentity>,
        lock: &FileLock,
        set: impl FnOnce() -> Result<()>,
    ) -> Result<WriteAnswer> {
        let Some(of) = of else {
            set()?;
            return Ok(WriteAnswer::Done);
        };
        let request = self.request;
        if !request.again {
            self.service.grants.check_settled(Instant::now())?;
        }
        set()?;
        self.session.note_lock(number);
        let now = Instant::now();
        let answer =
            if request.again { WriteAnswer::Grants(self.known_grants(Some(of), lock, now)) } else { WriteAnswer::Done };
        self.service.grants.note_grant(of, request.id.session, lock, now);
        Ok(answer)
    }
}
