//! The writable side of a cache group: every change goes to a node, and is made once. It knows neither inodes nor the
//! kernel, and holds no attributes.
//!
//! Everything about one path goes to one node, its home, chosen as the owner of a block is. An open file stays with the
//! process that opened it. So appends of all mounts meet in one process, and a source whose clients cache (NFS) shows a
//! new file to the node that is asked for it. Names and files are spread over all nodes by their hash.
//!
//! | room | owns |
//! |---|---|
//! | [`calls`] | the session, change numbers, proofs of processes, and the one loop of retries |
//! | [`bytes`] | written bytes that are not durable: pieces, their memory, the queue of the senders |
//! | [`open_file`] | open files: the table of their states, their moves and locks, and paths of a bucket for locks alone; carries pieces to their processes |
//! | this file, [`files`], [`known`] | the interface of the file system over these, and the objects that names led to |
//!
//! A room imports only rooms above it. Modules of one room import each other, and so do this file and [`files`].

mod bytes;
mod calls;
mod files;
mod known;
mod open_file;

use crate::remote::GroupClient;
use calls::{
    CallEnd, CallTarget, ChangeNumber, NodeAnswer, RequestContext, WriteCalls, attr_of, settle_answer, unexpected,
};
use files::{RemoteDirectory, RemoteFile, cache_version_of};
use known::KnownObjects;
pub use open_file::GroupPathLocks;
use open_file::{AdoptedFile, FileOpening, FilePlace, OpenFile, OpenFiles};
use spurline_proto::{OpenFlags, WriteAnswer, WriteCall};
use spurline_sys::join_path;
use spurline_types::errno::{EBADF, EIO, ENODATA, EXDEV};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::capabilities::WriteCapabilities;
use spurline_volume::delayed::{DelayedWrites, WriteLosses};
use spurline_volume::hand_over::{HandOver, LeftOpen, OpenHold, RepeatRule, not_left};
use spurline_volume::kept_client::KeptClient;
use spurline_volume::kept_files::KeptFiles;
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange};
use spurline_volume::writes::{
    CacheVersion, Caller, Change, CreatedFile, FileIdentity, KnownNames, NamePath, NodeAttr, NodePath, OpeningLookups,
    SourceSpace, WritableDirectory, WritableFile, WritableVolume,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// The attribute with a file's capabilities.
const CAPABILITIES: &[u8] = b"security.capability";

/// The writable side of a group's volume.
pub struct GroupWrites {
    calls: Arc<WriteCalls>,
    files: Arc<OpenFiles>,
    known: KnownObjects,
    capabilities: OnceLock<WriteCapabilities>,
    /// The last sync is under way.
    finishing: AtomicBool,
}

/// Why not all changes are durable.
struct SyncFailure {
    error: Error,
    /// The source refused them. Else a process was lost or did not answer, whose host may still write them.
    refused: bool,
}

impl GroupWrites {
    /// Opens the writable side.
    ///
    /// # Errors
    /// `ReadOnly` when the nodes take no changes; the node's error.
    pub(crate) fn connect(
        client: Arc<GroupClient>,
        squash: Option<(u32, u32)>,
        memory: u64,
        kept: Option<Arc<dyn KeptClient>>,
    ) -> Result<Arc<GroupWrites>> {
        let squash = squash.map(|(uid, gid)| Caller { uid, gid, ..Caller::default() });
        let calls = Arc::new(WriteCalls::new(Arc::clone(&client), squash, kept));
        let writes = Arc::new(GroupWrites {
            files: OpenFiles::new(client, Arc::clone(&calls), memory),
            calls,
            known: KnownObjects::default(),
            capabilities: OnceLock::new(),
            finishing: AtomicBool::new(false),
        });
        writes.calls.prove_all()?;
        let root = Caller::default();
        match writes.query(b"", WriteCall::Capabilities, &root)? {
            WriteAnswer::Capabilities(can) => {
                // Set here only.
                let _ = writes.capabilities.set(can);
                writes.files.start()?;
                Ok(writes)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// A call about a path that changes nothing.
    fn query(&self, path: &[u8], call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        settle_answer(self.calls.query(CallTarget::Path(path), &call, caller, self.calls.begin())?.answer)
    }

    /// Opens a file, whose number is that of the change.
    fn open_at(
        &self,
        number: &ChangeNumber<'_>,
        path: &[u8],
        call: WriteCall<'_>,
        caller: &Caller,
    ) -> Result<NodeAnswer> {
        self.calls.change_at(number, path, &call, RequestContext::of(caller), self.calls.begin())
    }

    /// A file that was made.
    fn new_file(&self, path: Vec<u8>, opened: FileOpening<'_>) -> Box<dyn WritableFile> {
        let attr = opened.attr;
        let file = self.files.add_file(path, opened);
        Box::new(RemoteFile::new(Arc::clone(&self.files), file, attr, CacheVersion::JustChanged))
    }

    /// Makes all changes durable that were made until now: also those of closed files, and names.
    ///
    /// # Errors
    /// `EIO`, once, when a process was lost with some of them; those of the nodes and of the source.
    fn sync_touched(&self) -> std::result::Result<(), SyncFailure> {
        self.files.sync_files().map_err(|error| SyncFailure { error, refused: true })?;
        let touched = self.calls.take_touched();
        // Files that stay open are written without another change of a path.
        self.files
            .open_files()
            .iter()
            .filter(|file| file.writes())
            .for_each(|file| self.calls.note_touched(&file.home()));
        let root = Caller::default();
        let mut failed = None;
        for home in &touched {
            let target = CallTarget::Process(home);
            let failure = match self.calls.query(target, &WriteCall::SyncAll, &root, self.calls.begin()) {
                Ok(sent) => settle_answer(sent.answer).err().map(|error| SyncFailure { error, refused: true }),
                Err(CallEnd::Failed(error)) => {
                    self.calls.note_touched(home);
                    Some(SyncFailure { error, refused: false })
                }
                // Bytes of open files are at the next process. Those of closed ones are where its host is.
                Err(CallEnd::Lost { error, .. }) => {
                    let why = format!("node {} was lost with files that were closed without fsync: {error}", home.node);
                    tracing::warn!("{why}");
                    Some(SyncFailure { error: Error::new(ErrorKind::Io(EIO), why), refused: false })
                }
            };
            failed = failed.or(failure);
        }
        failed.map_or(Ok(()), Err)
    }

    /// Memory of bytes that are not durable, and its limit.
    pub fn memory(&self) -> (u64, u64) {
        self.files.memory_use()
    }

    /// Sets how long new locks wait after a loss, and within which time locks are taken again. For tests.
    #[doc(hidden)]
    pub fn set_lock_grace(&self, new_after: Duration, again_within: Duration) {
        self.files.lock_grace.set(new_after, again_within);
    }

    /// What a name leads to, for a change that removes it.
    fn known_at(&self, at: &NamePath<'_>) -> Option<FileIdentity> {
        let path = join_path(at.directory.path, at.name);
        self.known.object(&path).or_else(|| self.files.names()?.object_at(&path))
    }

    fn note(&self, path: &[u8], answer: &WriteAnswer) {
        if let WriteAnswer::Attr(attr) | WriteAnswer::Created(attr, _) = answer {
            self.known.note_object(path, attr.identity);
        }
    }

    /// Sends the bytes that have to be in the source before a change, and adds the known objects to its request. The
    /// path at whose home the change is made: the path of the new name, or else of the removed name.
    fn prepare_change<'a>(&self, change: &Change<'a>, context: &mut RequestContext<'a>) -> Result<Vec<u8>> {
        Ok(match change {
            Change::Mkdir { at, .. } | Change::Mknod { at, .. } | Change::Symlink { at, .. } => {
                join_path(at.directory.path, at.name)
            }
            Change::Unlink { at } | Change::Rmdir { at } => {
                self.calls.report_closed();
                context.known[0] = self.known_at(at);
                join_path(at.directory.path, at.name)
            }
            Change::Rename { from, to, .. } => {
                let old = join_path(from.directory.path, from.name);
                self.files.send_bytes_below(&old)?;
                self.calls.report_closed();
                context.known = [self.known_at(from), self.known_at(to)];
                join_path(to.directory.path, to.name)
            }
            Change::Link { from, to } => {
                self.files.send_bytes_of(from.expected)?;
                join_path(to.directory.path, to.name)
            }
            Change::SetAttr { of, .. } | Change::RemoveXattr { of, .. } => {
                self.files.send_bytes_of(of.expected)?;
                of.path.to_vec()
            }
            Change::SetXattr { of, value, .. } => {
                self.files.send_bytes_of(of.expected)?;
                context.payload = value;
                of.path.to_vec()
            }
        })
    }

    /// A rename has left this object, or none, at a path.
    fn note_moved(&self, path: &[u8], known: Option<FileIdentity>) {
        match known {
            Some(identity) => self.known.note_object(path, identity),
            None => self.known.note_absence(path),
        }
    }

    /// The change was made: `known` are the objects that the names led to before.
    fn note_change(&self, change: &Change<'_>, path: &[u8], answer: &WriteAnswer, known: [Option<FileIdentity>; 2]) {
        match change {
            Change::Unlink { .. } | Change::Rmdir { .. } => self.known.note_absence(path),
            Change::Rename { from, flags, .. } => {
                // From `linux/fs.h`.
                const RENAME_EXCHANGE: u32 = 2;
                let old = join_path(from.directory.path, from.name);
                let exchange = flags & RENAME_EXCHANGE != 0;
                self.note_moved(path, known[0]);
                self.note_moved(&old, known[1].filter(|_| exchange));
                self.files.move_open_files(&old, path, exchange);
            }
            Change::SetAttr { set, .. } => {
                if let (Some(size), WriteAnswer::Attr(attr)) = (set.size, answer) {
                    self.files.cut_bytes_of(attr.identity, size);
                }
            }
            Change::SetXattr { of, .. } => {
                if let Some(open) = self.files.open_bytes_of(of.expected) {
                    open.note_bare(false);
                }
            }
            Change::RemoveXattr { .. } => {}
            _ => self.note(path, answer),
        }
    }

    /// The attributes of a file that other programs of this mount may be writing: again if its bytes were unsent, and by
    /// its open file if it is shorter than what was written. Another mount has cut it then, or a node was lost with bytes,
    /// which the open file finds out.
    fn complete_attr(&self, attr: NodeAttr, again: impl Fn() -> Result<NodeAttr>) -> Result<NodeAttr> {
        let unsent = self.files.send_bytes_of(Some(attr.identity))?;
        let attr = if unsent { again()? } else { attr };
        let shortened = self.files.known_bytes_of(attr.identity).filter(|file| attr.size < file.retained_end());
        let Some(file) = shortened else { return Ok(attr) };
        match self.files.open_files().iter().find(|open| Arc::ptr_eq(&open.bytes, &file)) {
            Some(open) => open.stat_open(&self.files),
            None => Ok(attr),
        }
    }
}

impl DelayedWrites for GroupWrites {
    fn publishes(&self) -> bool {
        false
    }

    fn unsent_files(&self) -> Vec<(String, u64)> {
        self.files.unsent_files()
    }

    fn losses(&self) -> WriteLosses {
        self.files.losses.lock().clone()
    }

    /// Their nodes know, too.
    fn finish_closing(&self) {
        self.files.finish_closing();
    }

    fn finish_durably(&self) {
        self.finishing.store(true, Ordering::Release);
        let begun = Instant::now();
        match self.sync_touched() {
            Ok(()) => tracing::debug!("the nodes made all changes durable in {:.1?}", begun.elapsed()),
            Err(SyncFailure { error, refused }) => {
                tracing::error!("not all changes of this mount are durable on their nodes: {error}");
                let mut losses = self.files.losses.lock();
                let place = if refused { &mut losses.not_durable } else { &mut losses.maybe_not_durable };
                *place = Some(error.to_string());
            }
        }
        self.finishing.store(false, Ordering::Release);
    }

    fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Acquire)
    }
}

fn no_capabilities() -> Error {
    Error::new(ErrorKind::Io(ENODATA), "the file has no capabilities")
}

impl HandOver for GroupWrites {
    /// Nodes have all that open files need.
    fn keep(&self, _files: Arc<dyn KeptFiles>) {}

    fn adopt(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableFile>> {
        let LeftOpen { at, flags, caller, hold: OpenHold::Node(held) } = left else { return Err(not_left()) };
        let Some(identity) = at.expected else {
            return Err(Error::new(ErrorKind::Invalid, "an open file has an identity"));
        };
        let home = self.calls.find_process(&held);
        if held.closing && self.files.is_open_at(&home, held.number, self.calls.begin()) != Some(true) {
            return Err(Error::new(ErrorKind::Io(EBADF), "the node has closed the file"));
        }
        let adopted = AdoptedFile { number: held.number, identity, flags, caller, home };
        let file = self.files.adopt_file(at.path.to_vec(), adopted);
        let attr = file.stat_open(&self.files)?;
        file.bytes.raise_end(attr.size);
        Ok(Box::new(RemoteFile::new(Arc::clone(&self.files), file, attr, CacheVersion::JustChanged)))
    }

    fn adopt_directory(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableDirectory>> {
        let LeftOpen { at, caller, hold: OpenHold::Node(held), .. } = left else { return Err(not_left()) };
        let place = FilePlace { path: at.path.to_vec(), identity: at.expected };
        let opened = OpenFile::new_directory(held.number, place, caller, self.calls.find_process(&held));
        Ok(Box::new(RemoteDirectory::new(Arc::clone(&self.files), self.files.add_open(opened))))
    }

    fn repeat_rule(&self) -> RepeatRule {
        RepeatRule::Numbers
    }
}

impl OpeningLookups for GroupWrites {
    fn lookup_open(
        &self,
        at: NamePath<'_>,
        flags: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Option<Box<dyn WritableFile>>)> {
        let path = join_path(at.directory.path, at.name);
        let change = self.calls.draw_for_request();
        let number = change.get();
        let call = WriteCall::OpenName { at, flags: OpenFlags::new(flags), file: number };
        let answered = self.open_at(&change, &path, call, caller);
        let NodeAnswer { answer, home, .. } = answered.inspect_err(|_| self.known.note_absence(&path))?;
        let version = cache_version_of(&answer);
        let is_open = matches!(answer, WriteAnswer::Opened(..));
        let attr = attr_of(answer)?;
        self.known.note_object(&path, attr.identity);
        let file = is_open.then(|| {
            let opened = FileOpening { number, attr, flags, caller, home };
            RemoteFile::new(Arc::clone(&self.files), self.files.add_file(path.clone(), opened), attr, version)
        });
        // The node did not know what this mount has written.
        let is_older = self.files.known_bytes_of(attr.identity).is_some_and(|bytes| bytes.retained_end() > 0);
        let Some(file) = file.filter(|_| !is_older) else {
            let attr = self.complete_attr(attr, || attr_of(self.query(&path, WriteCall::Lookup(at), caller)?))?;
            return Ok((attr, None));
        };
        Ok((attr, Some(Box::new(file))))
    }
}

impl WritableVolume for GroupWrites {
    fn capabilities(&self) -> WriteCapabilities {
        // None before a node has named the abilities of the source.
        self.capabilities.get().cloned().unwrap_or(WriteCapabilities::NONE)
    }

    fn hand_over(&self) -> Option<&dyn HandOver> {
        Some(self)
    }

    fn use_names(&self, names: Weak<dyn KnownNames>) {
        // Only the first call has an effect.
        let _ = self.files.known_names.set(names);
    }

    fn stat(&self, at: NodePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        self.files.send_bytes_of(at.expected)?;
        let attr = attr_of(self.query(at.path, WriteCall::Stat(at), caller)?)?;
        self.complete_attr(attr, || attr_of(self.query(at.path, WriteCall::Stat(at), caller)?))
    }

    fn lookup(&self, at: NamePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        let path = join_path(at.directory.path, at.name);
        let answer =
            self.query(&path, WriteCall::Lookup(at), caller).inspect_err(|_| self.known.note_absence(&path))?;
        self.note(&path, &answer);
        self.complete_attr(attr_of(answer)?, || attr_of(self.query(&path, WriteCall::Lookup(at), caller)?))
    }

    fn opening_lookups(&self) -> Option<&dyn OpeningLookups> {
        Some(self)
    }

    fn readlink(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>> {
        match self.query(at.path, WriteCall::ReadLink(at), caller)? {
            WriteAnswer::Bytes(target) => Ok(target),
            other => Err(unexpected(&other)),
        }
    }

    fn access(&self, at: NodePath<'_>, mask: u32, caller: &Caller) -> Result<()> {
        self.query(at.path, WriteCall::Access(at, mask), caller).map(drop)
    }

    fn open(&self, at: NodePath<'_>, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        self.files.send_bytes_of(at.expected)?;
        let change = self.calls.draw_for_request();
        let number = change.get();
        let call = WriteCall::Open { at, flags: OpenFlags::new(flags), file: number };
        let NodeAnswer { answer, home, .. } = self.open_at(&change, at.path, call, caller)?;
        let version = cache_version_of(&answer);
        let attr = attr_of(answer)?;
        let file = self.files.add_file(at.path.to_vec(), FileOpening { number, attr, flags, caller, home });
        Ok(Box::new(RemoteFile::new(Arc::clone(&self.files), file, attr, version)))
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let path = join_path(at.directory.path, at.name);
        self.files.send_bytes_of(self.known.object(&path))?;
        let change = self.calls.draw_for_request();
        let number = change.get();
        let call = WriteCall::Create { at, flags: OpenFlags::new(flags), mode, file: number };
        let NodeAnswer { answer, home, .. } = self.open_at(&change, &path, call, caller)?;
        self.note(&path, &answer);
        let (attr, directory) = match answer {
            WriteAnswer::Created(attr, directory) => (attr, directory),
            answer => (attr_of(answer)?, None),
        };
        let file = self.new_file(path, FileOpening { number, attr, flags, caller, home });
        Ok(CreatedFile { attr, file, directory })
    }

    fn create_unnamed(
        &self,
        directory: NodePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Box<dyn WritableFile>)> {
        let change = self.calls.draw_for_request();
        let number = change.get();
        let call = WriteCall::CreateUnnamed { directory, flags: OpenFlags::new(flags), mode, file: number };
        let NodeAnswer { answer, home, .. } = self.open_at(&change, directory.path, call, caller)?;
        let attr = attr_of(answer)?;
        // Without a name it can't be opened on another node: the empty path is the root, which has another identity.
        Ok((attr, self.new_file(Vec::new(), FileOpening { number, attr, flags, caller, home })))
    }

    fn link_open(&self, file: &dyn WritableFile, to: NamePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        let file = file
            .as_any()
            .downcast_ref::<RemoteFile>()
            .ok_or_else(|| Error::new(ErrorKind::Io(EXDEV), "the file belongs to another mount"))?;
        file.send_bytes()?;
        let path = join_path(to.directory.path, to.name);
        let answer = file.change(&WriteCall::LinkOpen { file: file.number(), to }, RequestContext::of(caller))?;
        self.note(&path, &answer);
        let attr = attr_of(answer)?;
        file.set_path(path);
        Ok(attr)
    }

    fn open_directory(&self, at: NodePath<'_>, caller: &Caller) -> Result<Box<dyn WritableDirectory>> {
        let change = self.calls.draw_for_request();
        let number = change.get();
        let call = WriteCall::OpenDirectory { at, file: number };
        let NodeAnswer { home, .. } = self.open_at(&change, at.path, call, caller)?;
        let place = FilePlace { path: at.path.to_vec(), identity: at.expected };
        let opened = OpenFile::new_directory(number, place, caller, home);
        Ok(Box::new(RemoteDirectory::new(Arc::clone(&self.files), self.files.add_open(opened))))
    }

    /// The nodes draw the marks.
    fn change_marked(
        &self,
        change: &Change<'_>,
        caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<Option<NodeAttr>> {
        let mut context = RequestContext::of(caller);
        let path = self.prepare_change(change, &mut context)?;
        let number = self.calls.draw_for_names(context.known);
        context.known = number.known();
        let call = WriteCall::Change(*change);
        let answer = self.calls.change_at(&number, &path, &call, context, self.calls.begin())?.answer;
        self.note_change(change, &path, &answer, context.known);
        match answer {
            WriteAnswer::Attr(attr) => Ok(Some(attr)),
            WriteAnswer::Done => Ok(None),
            other => Err(unexpected(&other)),
        }
    }

    fn outcome_of(&self, _repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        Ok(ChangeOutcome::Unclear("this mount's own requests carry the numbers that the nodes compare"))
    }

    fn get_xattr(&self, at: NodePath<'_>, name: &[u8], caller: &Caller) -> Result<Vec<u8>> {
        // The kernel requests them before each write. The source's kernel removes them at a write, whatever is known here.
        let open = self.files.open_bytes_of(at.expected.filter(|_| name == CAPABILITIES));
        if open.as_ref().is_some_and(|open| open.is_bare()) {
            return Err(no_capabilities());
        }
        match self.query(at.path, WriteCall::GetXattr(at, name), caller) {
            Ok(WriteAnswer::Bytes(value)) => Ok(value),
            Ok(other) => Err(unexpected(&other)),
            Err(error) => {
                if let Some(open) = open.filter(|_| error.kind() == ErrorKind::Io(ENODATA)) {
                    open.note_bare(true);
                }
                Err(error)
            }
        }
    }

    fn list_xattr(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>> {
        match self.query(at.path, WriteCall::ListXattr(at), caller)? {
            WriteAnswer::Bytes(names) => Ok(names),
            other => Err(unexpected(&other)),
        }
    }

    fn space(&self) -> Result<SourceSpace> {
        match self.query(b"", WriteCall::Space, &Caller::default())? {
            WriteAnswer::Space(space) => Ok(space),
            other => Err(unexpected(&other)),
        }
    }

    fn sync_all(&self) -> Result<()> {
        self.sync_touched().map_err(|failure| failure.error)?;
        self.query(b"", WriteCall::SyncAll, &Caller::default()).map(drop)
    }
}
