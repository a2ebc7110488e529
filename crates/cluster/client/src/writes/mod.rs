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
use files::{RemoteDirectory, RemoteFile, cache_version_of, reopen_file};
use known::KnownObjects;
pub use open_file::GroupPathLocks;
use open_file::{AdoptedFile, FileOpening, FilePlace, OpenFile, OpenFiles, call_attr_open, change_open};
use spurline_proto::{OpenFlags, WriteAnswer, WriteCall};
use spurline_sys::join_path;
use spurline_types::errno::{EBADF, EEXIST, EIO, ENODATA, ENOENT, ENOTEMPTY, EXDEV};
use spurline_types::open_flags::O_EXCL;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::capabilities::WriteCapabilities;
use spurline_volume::delayed::{DelayedWrites, WriteLosses};
use spurline_volume::kept_client::{HeldFile, KeptClient};
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange};
use spurline_volume::writes::{
    AttrChange, CacheVersion, Caller, Change, CreatedFile, FileIdentity, KnownNames, NamePath, NodeAttr, NodePath,
    OpenAttrCall, SourceSpace, WritableDirectory, WritableFile, WritableVolume,
};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// The attribute with a file's capabilities.
const CAPABILITIES: &[u8] = b"security.capability";
/// The bits of a mode that `chmod(2)` sets.
const PERMISSION_BITS: u32 = 0o7777;
/// Pause before a request is sent once more to a process that closes moved files.
const CLOSED_PAUSE: Duration = Duration::from_millis(20);

/// The writable side of a group's volume.
pub struct GroupWrites {
    calls: Arc<WriteCalls>,
    files: Arc<OpenFiles>,
    known: KnownObjects,
    capabilities: OnceLock<WriteCapabilities>,
    /// The last sync is under way.
    finishing: AtomicBool,
}

/// An answer to the request to open a file. The number of the change is the number of the file.
struct SentOpen<'a> {
    number: ChangeNumber<'a>,
    sent: NodeAnswer,
}

/// Why not all changes are durable.
struct SyncFailure {
    error: Error,
    /// The source refused them. Else a process was lost or did not answer, whose host may still write them.
    refused: bool,
}

/// Whether the file is new: no process had the file open before.
fn is_exclusive(call: &WriteCall<'_>) -> bool {
    matches!(call, WriteCall::Create { flags, .. } if flags.bits() & O_EXCL != 0)
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
                writes.files.publishes.store(can.publishes, Ordering::Relaxed);
                // Set here only.
                let _ = writes.capabilities.set(can);
                writes.files.start()?;
                Ok(writes)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// A call about a path that changes nothing. A process that was away may still show files that another process has published or
    /// renamed since: such a process closes these files first.
    fn query(&self, path: &[u8], call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        let deadline = self.calls.begin();
        loop {
            let sent = self.calls.query(CallTarget::Path(path), &call, caller, deadline)?;
            let is_outdated = self.files.publishes() && self.files.close_kept_at(&sent.home);
            if !is_outdated || deadline.is_over(Instant::now()) {
                return settle_answer(sent.answer);
            }
            std::thread::sleep(CLOSED_PAUSE);
        }
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

    /// As [`GroupWrites::open_at`], for a file that may have been open before. A process that was away may still have the file open with
    /// changes that another process has published: such a process closes the file first.
    fn open_file_at<'a>(
        &'a self,
        path: &[u8],
        call: impl Fn(u64) -> WriteCall<'a>,
        caller: &Caller,
    ) -> Result<SentOpen<'a>> {
        let deadline = self.calls.begin();
        loop {
            let number = self.calls.draw_for_request();
            let call = call(number.get());
            let sent = self.open_at(&number, path, call, caller)?;
            if !self.files.publishes() || is_exclusive(&call) || !self.files.close_kept_at(&sent.home) {
                return Ok(SentOpen { number, sent });
            }
            self.calls.close_numbers(&sent.home, &[number.get()]);
            if deadline.is_over(Instant::now()) {
                let why = format!("node {} does not close files that moved to another node", sent.home.node);
                return Err(Error::new(ErrorKind::Timeout, why));
            }
            std::thread::sleep(CLOSED_PAUSE);
        }
    }

    /// A file that was made.
    fn new_file(&self, path: Vec<u8>, opened: FileOpening<'_>) -> Box<dyn WritableFile> {
        let attr = opened.attr;
        let file = self.files.add_file(path, opened);
        if self.files.publishes() {
            // A new file is published although it may stay empty.
            file.bytes.unpublished.note_creation();
            if self.capabilities().modes {
                let mode = Some(attr.mode & PERMISSION_BITS);
                let owned = AttrChange { mode, uid: Some(attr.uid), gid: Some(attr.gid), ..AttrChange::default() };
                file.bytes.unpublished.note_attrs(&owned);
            }
        }
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
                // A bucket has what a process acknowledged, and open files have sent the rest to the next process.
                Err(CallEnd::Lost { .. }) if self.files.publishes() => None,
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

    /// All files belong to this user and group, where the source has no owners. Only the first call has an effect.
    pub fn set_owner(&self, uid: u32, gid: u32) {
        if !self.capabilities().modes {
            self.calls.set_owner(uid, gid);
        }
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

    /// Sets attributes of a file with unpublished changes, which are published when it is closed.
    fn set_attr_of_changed(&self, open: &OpenFile, set: &AttrChange, caller: &Caller) -> Result<NodeAttr> {
        self.files.send_all(&open.bytes)?;
        let call = WriteCall::SetAttrOpen { file: open.number(), set: *set };
        let attr = attr_of(change_open(&self.files, open, &call, RequestContext::of(caller))?)?;
        set.size.iter().for_each(|size| self.files.cut_bytes(&open.bytes, *size));
        self.files.note_attrs(&open.bytes, set, &attr);
        Ok(attr)
    }

    /// A call on the extended attributes of a file whose close publishes, by the process that has the file. Another process does not
    /// get those that are not published.
    fn xattr_of_changed(&self, open: &OpenFile, call: &OpenAttrCall<'_>, caller: &Caller) -> Result<Vec<u8>> {
        self.files.send_all(&open.bytes)?;
        let found = call_attr_open(&self.files, open, call, caller)?;
        if matches!(call, OpenAttrCall::Set { .. } | OpenAttrCall::Remove(_)) {
            if open.bytes.unpublished.is_changed() {
                open.bytes.unpublished.note_incomplete();
            }
            self.files.adopt_identity(&open.bytes, open.stat_open(&self.files)?.identity);
        }
        Ok(found)
    }

    /// Sends or publishes the bytes that have to be in the source before a change, and adds the known objects to its request. The
    /// path at whose home the change is made: the path of the new name, or else of the removed name.
    fn prepare_change<'a>(&self, change: &Change<'a>, context: &mut RequestContext<'a>) -> Result<Vec<u8>> {
        Ok(match change {
            Change::Mkdir { at, .. } | Change::Mknod { at, .. } | Change::Symlink { at, .. } => {
                join_path(at.directory.path, at.name)
            }
            Change::Unlink { at } | Change::Rmdir { at } => {
                self.calls.report_closed();
                context.known[0] = self.known_at(at);
                let path = join_path(at.directory.path, at.name);
                let is_folder = matches!(change, Change::Rmdir { .. });
                // The process of the folder does not know of files in other processes.
                if is_folder && self.files.publishes() && self.files.has_changed_below(&path) {
                    return Err(Error::new(ErrorKind::Io(ENOTEMPTY), "the folder has files that are not published"));
                }
                path
            }
            Change::Rename { from, to, .. } => {
                let old = join_path(from.directory.path, from.name);
                if self.files.publishes() {
                    self.files.publish_below(&old)?;
                } else {
                    self.files.send_bytes_below(&old)?;
                }
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

    /// The change was made: `known` are the objects that the names led to before.
    fn note_change(&self, change: &Change<'_>, path: &[u8], answer: &WriteAnswer, known: [Option<FileIdentity>; 2]) {
        match change {
            Change::Unlink { .. } | Change::Rmdir { .. } => {
                self.known.note_absence(path);
                if self.files.publishes() {
                    self.files.note_removed(path);
                }
            }
            Change::Rename { from, flags, .. } => {
                // From `linux/fs.h`.
                const RENAME_EXCHANGE: u32 = 2;
                let old = join_path(from.directory.path, from.name);
                let exchange = flags & RENAME_EXCHANGE != 0;
                let note = |path: &[u8], known: Option<FileIdentity>| match known {
                    Some(identity) => self.known.note_object(path, identity),
                    None => self.known.note_absence(path),
                };
                note(path, known[0]);
                note(&old, known[1].filter(|_| exchange));
                if self.files.publishes() {
                    self.note(path, answer);
                    self.files.note_removed(path);
                }
                self.files.move_open_files(&old, path, exchange);
                if self.files.publishes() {
                    self.files.follow_renamed(path);
                }
            }
            // The object is another one now. A file that is published by the new length has no other changes.
            Change::SetAttr { of, .. } | Change::SetXattr { of, .. } | Change::RemoveXattr { of, .. }
                if self.files.publishes() =>
            {
                let bytes = of.expected.and_then(|identity| self.files.known_bytes_of(identity));
                if let (Some(bytes), WriteAnswer::Attr(attr)) = (bytes, answer) {
                    self.files.adopt_identity(&bytes, attr.identity);
                }
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

    /// Changes an extended attribute, if an open file has changes that are published with it.
    fn change_xattr_of_changed(&self, change: &Change<'_>, caller: &Caller) -> Result<Option<NodeAttr>> {
        let (of, call) = match *change {
            Change::SetXattr { of, name, value, flags } => (of, OpenAttrCall::Set { name, value, flags }),
            Change::RemoveXattr { of, name } => (of, OpenAttrCall::Remove(name)),
            _ => return Ok(None),
        };
        let changed = unless_closed_meanwhile(self.files.find_writer(of.path), |open| {
            self.xattr_of_changed(open, &call, caller)?;
            open.stat_open(&self.files)
        });
        changed.transpose()
    }

    /// Whether a change removes the name of a file that is only in the process which has it open.
    fn is_removed_here(&self, change: &Change<'_>, path: &[u8]) -> bool {
        matches!(change, Change::Unlink { .. }) && self.files.find_changed(path).is_some()
    }

    /// The result of a call on the open file with unpublished changes that a path leads to, as [`unless_closed_meanwhile`].
    fn by_changed<T>(&self, path: &[u8], call: impl Fn(&Arc<OpenFile>) -> Result<T>) -> Option<Result<T>> {
        unless_closed_meanwhile(self.files.find_changed(path), call)
    }

    /// The attributes of a file with unpublished changes, by the process that has them.
    fn attr_of_changed(&self, open: &OpenFile) -> Result<NodeAttr> {
        self.files.send_all(&open.bytes)?;
        open.stat_open(&self.files)
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

/// The result of a call on an open file. `None` without a file, and after a failure on a file that another thread closes, and so
/// publishes, meanwhile: the path leads to all changes then.
fn unless_closed_meanwhile<T>(
    open: Option<Arc<OpenFile>>,
    call: impl Fn(&Arc<OpenFile>) -> Result<T>,
) -> Option<Result<T>> {
    let open = open?;
    let result = call(&open);
    if result.is_err() && open.is_closed() { None } else { Some(result) }
}

impl DelayedWrites for GroupWrites {
    fn publishes(&self) -> bool {
        self.files.publishes()
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

/// Whether no object has the name.
fn is_absent(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Io(ENOENT))
}

fn no_capabilities() -> Error {
    Error::new(ErrorKind::Io(ENODATA), "the file has no capabilities")
}

impl WritableVolume for GroupWrites {
    fn capabilities(&self) -> WriteCapabilities {
        // None before a node has named the abilities of the source.
        self.capabilities.get().cloned().unwrap_or(WriteCapabilities::NONE)
    }

    fn numbers_changes(&self) -> bool {
        self.calls.is_kept()
    }

    fn adopt_held(
        &self,
        held: &HeldFile,
        at: NodePath<'_>,
        flags: u32,
        caller: &Caller,
    ) -> Result<Box<dyn WritableFile>> {
        let Some(identity) = at.expected else {
            return Err(Error::new(ErrorKind::Invalid, "an open file has an identity"));
        };
        let home = self.calls.find_process(held);
        if held.closing && self.files.is_open_at(&home, held.number, self.calls.begin()) != Some(true) {
            return Err(Error::new(ErrorKind::Io(EBADF), "the node has closed the file"));
        }
        let adopted = AdoptedFile { number: held.number, identity, flags, caller, home };
        let file = self.files.adopt_file(at.path.to_vec(), adopted);
        if self.files.publishes() {
            file.begin_adoption();
        }
        let attr = file.stat_open(&self.files)?;
        file.bytes.raise_end(attr.size);
        if self.files.publishes() {
            file.end_adoption(at.path.is_empty());
            self.files.adopt_identity(&file.bytes, attr.identity);
        }
        Ok(Box::new(RemoteFile::new(Arc::clone(&self.files), file, attr, CacheVersion::JustChanged)))
    }

    fn adopt_held_directory(
        &self,
        held: &HeldFile,
        at: NodePath<'_>,
        caller: &Caller,
    ) -> Result<Box<dyn WritableDirectory>> {
        let place = FilePlace { path: at.path.to_vec(), identity: at.expected };
        let opened = OpenFile::new_directory(held.number, place, caller, self.calls.find_process(held));
        Ok(Box::new(RemoteDirectory::new(Arc::clone(&self.files), self.files.add_open(opened))))
    }

    fn use_names(&self, names: Weak<dyn KnownNames>) {
        // Only the first call has an effect.
        let _ = self.files.known_names.set(names);
    }

    fn stat(&self, at: NodePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        if let Some(attr) = self.by_changed(at.path, |open| self.attr_of_changed(open)) {
            return attr;
        }
        self.files.send_bytes_of(at.expected)?;
        let attr = attr_of(self.query(at.path, WriteCall::Stat(at), caller)?)?;
        self.complete_attr(attr, || attr_of(self.query(at.path, WriteCall::Stat(at), caller)?))
    }

    fn lookup(&self, at: NamePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        let path = join_path(at.directory.path, at.name);
        if let Some(attr) = self.by_changed(&path, |open| self.attr_of_changed(open)) {
            return attr.inspect(|attr| self.known.note_object(&path, attr.identity));
        }
        let answer =
            self.query(&path, WriteCall::Lookup(at), caller).inspect_err(|_| self.known.note_absence(&path))?;
        self.note(&path, &answer);
        self.complete_attr(attr_of(answer)?, || attr_of(self.query(&path, WriteCall::Lookup(at), caller)?))
    }

    fn readlink(&self, at: NodePath<'_>, caller: &Caller) -> Result<Vec<u8>> {
        match self.query(at.path, WriteCall::ReadLink(at), caller)? {
            WriteAnswer::Bytes(target) => Ok(target),
            other => Err(unexpected(&other)),
        }
    }

    fn access(&self, at: NodePath<'_>, mask: u32, caller: &Caller) -> Result<()> {
        // Perhaps only this mount has the file.
        if self.files.find_changed(at.path).is_some() {
            return Ok(());
        }
        self.query(at.path, WriteCall::Access(at, mask), caller).map(drop)
    }

    fn open(&self, at: NodePath<'_>, flags: u32, caller: &Caller) -> Result<Box<dyn WritableFile>> {
        if let Some(opened) = self.by_changed(at.path, |open| reopen_file(&self.files, open, flags, caller)) {
            return opened.map(|(_, file)| Box::new(file) as _);
        }
        // A process that is lost, or has closed the file meanwhile, has no changes of it.
        if let Some(open) = self.files.find_beside(at, flags)
            && let Ok((_, file)) = reopen_file(&self.files, &open, flags, caller)
        {
            return Ok(Box::new(file));
        }
        self.files.send_bytes_of(at.expected)?;
        let flags_sent = self.files.sent_flags(flags);
        let open = |file| WriteCall::Open { at, flags: flags_sent, file };
        let opened = self.open_file_at(at.path, open, caller)?;
        let number = opened.number.get();
        let NodeAnswer { answer, home, .. } = opened.sent;
        let version = cache_version_of(&answer);
        let attr = attr_of(answer)?;
        let opening = FileOpening { number, attr, flags, caller, home };
        let bytes = self.files.bytes_of_opened(at.path, &opening);
        let file = self.files.add_file_of(bytes, at.path.to_vec(), opening);
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
        let opened = self.by_changed(&path, |open| match flags & O_EXCL {
            0 => reopen_file(&self.files, open, flags, caller),
            _ => Err(Error::new(ErrorKind::Io(EEXIST), "the name exists")),
        });
        if let Some(opened) = opened {
            let (attr, file) = opened?;
            return Ok(CreatedFile { attr, file: Box::new(file), directory: None });
        }
        self.files.send_bytes_of(self.known.object(&path))?;
        let flags_sent = self.files.sent_flags(flags);
        let create = |file| WriteCall::Create { at, flags: flags_sent, mode, file };
        let opened = self.open_file_at(&path, create, caller)?;
        let number = opened.number.get();
        let NodeAnswer { answer, home, .. } = opened.sent;
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
        if let Some(attr) = self.change_xattr_of_changed(change, caller)? {
            return Ok(Some(attr));
        }
        if let Change::SetAttr { of, set } = change {
            let writer = self.files.find_writer(of.path);
            let changed = unless_closed_meanwhile(writer, |open| self.set_attr_of_changed(open, set, caller));
            if let Some(attr) = changed {
                return attr.map(Some);
            }
        }
        let mut context = RequestContext::of(caller);
        let path = self.prepare_change(change, &mut context)?;
        let number = self.calls.draw_for_names(context.known);
        context.known = number.known();
        let call = WriteCall::Change(*change);
        let answer = match self.calls.change_at(&number, &path, &call, context, self.calls.begin()) {
            Ok(sent) => sent.answer,
            // Another process than that of the name has the new file.
            Err(error) if is_absent(&error) && self.is_removed_here(change, &path) => WriteAnswer::Done,
            Err(error) => return Err(error),
        };
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
        let call = OpenAttrCall::Get(name);
        if let Some(value) = self.by_changed(at.path, |open| self.xattr_of_changed(open, &call, caller)) {
            return value;
        }
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
        if let Some(names) = self.by_changed(at.path, |open| self.xattr_of_changed(open, &OpenAttrCall::List, caller)) {
            return names;
        }
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
