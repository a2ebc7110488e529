//! The writable side of a cache group: every change goes to a node, and is made once. It knows neither inodes nor the
//! kernel, and holds no attributes.
//!
//! Everything about one path goes to one node, its home, chosen as the owner of a block is. An open file stays with the
//! process that opened it. So appends of all mounts meet in one process, and a source whose clients cache (NFS) shows a
//! new file to the node that is asked for it. Names and files are spread over all nodes by their hash.

mod behind;
mod bytes;
mod calls;
mod closing;
mod files;
mod known;
mod losses;
mod open_file;

use crate::remote::GroupClient;
use bytes::{FileBytes, SendQueue, WriteMemory};
use calls::{CallDeadline, CallEnd, CallTarget, HomeProcess, RequestContext, WriteCalls, settle_answer, unexpected};
use files::{RemoteDirectory, RemoteFile};
use known::KnownObjects;
pub use losses::WriteLosses;
use open_file::{FilePlace, LockGrace, OpenFile};
use parking_lot::Mutex;
use spurline_proto::{LOCK_TIMES, MAX_WRITE, OpenFlags, WriteAnswer, WriteCall};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange};
use spurline_volume::writes::{
    Caller, Change, CreatedFile, FileIdentity, KnownNames, NamePath, NodeAttr, NodePath, SourceSpace,
    WritableDirectory, WritableFile, WritableVolume,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// From `asm-generic/fcntl.h`.
const O_TRUNC: u32 = 0o1000;
const O_ACCMODE: u32 = 0o3;
/// From `asm-generic/errno.h`.
const ENODATA: i32 = 61;
/// From `asm-generic/errno-base.h`.
const EIO: i32 = 5;
/// The attribute with a file's capabilities.
const CAPABILITIES: &[u8] = b"security.capability";

/// Rounds of the renewal of locks between renewals of sessions.
const SESSION_RENEWAL_ROUNDS: u32 =
    (LOCK_TIMES.session_renewal.as_millis() / LOCK_TIMES.lock_renewal.as_millis()) as u32;

/// Before a node has said what the source can do.
const NO_CAPABILITIES: WriteCapabilities = WriteCapabilities {
    rename_directory: DirectoryRename::No,
    hard_links: false,
    symlinks: false,
    modes: false,
    xattrs: false,
    acls: false,
    locks: LockScope::Mount,
    holes: false,
    copy: false,
};

/// The writable side of a group's volume.
pub struct GroupWrites {
    client: Arc<GroupClient>,
    calls: Arc<WriteCalls>,
    known: KnownObjects,
    /// The names that the file system over this volume knows.
    names: OnceLock<Weak<dyn KnownNames>>,
    /// Open files and directories by their numbers, whose paths move with renames.
    opened: Mutex<HashMap<u64, Weak<OpenFile>>>,
    capabilities: OnceLock<WriteCapabilities>,
    /// Files with bytes that are not durable.
    files: Mutex<HashMap<FileIdentity, Weak<FileBytes>>>,
    memory: Arc<WriteMemory>,
    queue: Arc<SendQueue>,
    /// Open files that the program has closed while no node took their bytes.
    closing: Mutex<HashMap<u64, Arc<OpenFile>>>,
    /// A sync to make room is under way.
    making_room: AtomicBool,
    /// The last sync is under way.
    finishing: AtomicBool,
    losses: Mutex<WriteLosses>,
    lock_grace: LockGrace,
    /// For open files, which outlive a call.
    this: Weak<GroupWrites>,
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
    ) -> Result<Arc<GroupWrites>> {
        let memory = WriteMemory::new(client.tier.pool(), memory, &client.stats);
        let squash = squash.map(|(uid, gid)| Caller { uid, gid, ..Caller::default() });
        let calls = Arc::new(WriteCalls::new(Arc::clone(&client), squash));
        let writes = Arc::new_cyclic(|this| GroupWrites {
            client,
            calls,
            files: Mutex::default(),
            memory,
            queue: Arc::default(),
            closing: Mutex::default(),
            making_room: AtomicBool::new(false),
            finishing: AtomicBool::new(false),
            losses: Mutex::default(),
            known: KnownObjects::default(),
            names: OnceLock::new(),
            opened: Mutex::default(),
            capabilities: OnceLock::new(),
            lock_grace: LockGrace::default(),
            this: Weak::clone(this),
        });
        writes.calls.prove_all()?;
        let root = Caller::default();
        match writes.query(b"", WriteCall::Capabilities, &root)? {
            WriteAnswer::Capabilities(can) => {
                // Set here only.
                let _ = writes.capabilities.set(can);
                writes.start_renewal()?;
                writes.start_senders()?;
                writes.start_closing()?;
                Ok(writes)
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Keeps the sessions and locks on nodes that have files open, although nothing happens to them.
    fn start_renewal(&self) -> Result<()> {
        let this = Weak::clone(&self.this);
        let run = move || {
            for round in 1u32.. {
                std::thread::sleep(LOCK_TIMES.lock_renewal);
                let Some(writes) = this.upgrade() else { return };
                let files: Vec<_> = writes.opened.lock().values().filter_map(Weak::upgrade).collect();
                files.iter().filter(|file| file.has_locks()).for_each(|file| open_file::renew_locks(&writes, file));
                if !round.is_multiple_of(SESSION_RENEWAL_ROUNDS) {
                    continue;
                }
                let root = Caller::default();
                for home in writes.homes() {
                    // A node that can't be reached now has its files opened elsewhere when they are used.
                    let target = CallTarget::Process(&home);
                    let _ = writes.calls.query(target, &WriteCall::Renew, &root, writes.calls.begin());
                }
            }
        };
        let spawned = std::thread::Builder::new().name("renew-writes".into()).spawn(run);
        spawned.map(drop).map_err(|e| Error::io("can't start a thread", &e))
    }

    /// The processes that have files of this mount open.
    fn homes(&self) -> Vec<HomeProcess> {
        let mut homes: Vec<HomeProcess> = Vec::new();
        for file in self.opened.lock().values().filter_map(Weak::upgrade) {
            let home = file.home();
            if !homes.contains(&home) {
                homes.push(home);
            }
        }
        homes
    }

    /// The most bytes of one request: a node receives them into one buffer, and its largest is a block.
    pub(crate) fn most_bytes(&self) -> usize {
        usize::try_from(self.client.block_size()).unwrap_or(MAX_WRITE).min(MAX_WRITE)
    }

    /// A call about a path that changes nothing.
    fn query(&self, path: &[u8], call: WriteCall<'_>, caller: &Caller) -> Result<WriteAnswer> {
        let sent = self.calls.query(CallTarget::Path(path), &call, caller, self.calls.begin())?;
        settle_answer(sent.answer)
    }

    /// A change about a path, made once.
    fn change_at(
        &self,
        path: &[u8],
        call: WriteCall<'_>,
        context: RequestContext<'_>,
        deadline: CallDeadline,
    ) -> Result<(WriteAnswer, HomeProcess)> {
        let sent = self.calls.change(CallTarget::Path(path), &call, context, deadline)?;
        let changes = match call {
            WriteCall::Open { flags, .. } => flags.has_any(OpenFlags::ACCESS | OpenFlags::TRUNCATE),
            WriteCall::OpenDirectory { .. } => false,
            _ => true,
        };
        if changes {
            self.calls.note_touched(&sent.home);
        }
        Ok((settle_answer(sent.answer)?, sent.home))
    }

    /// Makes all changes durable that were made until now: also those of closed files, and names.
    ///
    /// # Errors
    /// `EIO`, once, when a process was lost with some of them; those of the nodes and of the source.
    fn sync_touched(&self) -> std::result::Result<(), SyncFailure> {
        self.sync_files().map_err(|error| SyncFailure { error, refused: true })?;
        let touched = self.calls.take_touched();
        // Files that stay open are written without another change of a path.
        self.open_files().iter().filter(|file| file.writes()).for_each(|file| self.calls.note_touched(&file.home()));
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

    /// The mount has ended: makes all that it has changed durable.
    pub fn finish_durably(&self) {
        self.finishing.store(true, Ordering::Release);
        let begun = Instant::now();
        match self.sync_touched() {
            Ok(()) => tracing::debug!("the nodes made all changes durable in {:.1?}", begun.elapsed()),
            Err(SyncFailure { error, refused }) => {
                tracing::error!("not all changes of this mount are durable on their nodes: {error}");
                let mut losses = self.losses.lock();
                let place = if refused { &mut losses.not_durable } else { &mut losses.maybe_not_durable };
                *place = Some(error.to_string());
            }
        }
        self.finishing.store(false, Ordering::Release);
    }

    /// Sets how long new locks wait after a loss, and within which time locks are taken again. For tests.
    #[doc(hidden)]
    pub fn set_lock_grace(&self, new_after: Duration, again_within: Duration) {
        self.lock_grace.set(new_after, again_within);
    }

    /// The losses until now.
    pub fn losses(&self) -> WriteLosses {
        self.losses.lock().clone()
    }

    /// Whether [`GroupWrites::finish_durably`] is under way.
    pub fn is_finishing(&self) -> bool {
        self.finishing.load(Ordering::Acquire)
    }

    /// What a name leads to, for a change that removes it.
    fn known_at(&self, at: &NamePath<'_>) -> Option<FileIdentity> {
        self.known.object(&join_path(at.directory.path, at.name))
    }

    fn note(&self, path: &[u8], answer: &WriteAnswer) {
        if let WriteAnswer::Attr(attr) | WriteAnswer::Created(attr, _) = answer {
            self.known.note_object(path, attr.identity);
        }
    }

    /// Paths of open files follow a rename.
    fn move_open_files(&self, from: &[u8], to: &[u8], exchange: bool) {
        let mut opened = self.opened.lock();
        opened.retain(|_, file| match file.upgrade() {
            None => false,
            Some(file) => {
                file.follow_rename(from, to, exchange);
                true
            }
        });
    }

    fn names(&self) -> Option<Arc<dyn KnownNames>> {
        self.names.get().and_then(Weak::upgrade)
    }

    fn stats(&self) -> &spurline_types::stats::Writes {
        &self.client.stats.writes
    }

    /// All open files and directories.
    fn open_files(&self) -> Vec<Arc<OpenFile>> {
        self.opened.lock().values().filter_map(Weak::upgrade).collect()
    }

    fn open_file(&self, number: u64) -> Option<Arc<OpenFile>> {
        self.opened.lock().get(&number).and_then(Weak::upgrade)
    }

    fn add_open(&self, opened: OpenFile) -> Arc<OpenFile> {
        let opened = Arc::new(opened);
        self.opened.lock().insert(opened.number(), Arc::downgrade(&opened));
        opened
    }

    fn remove_open(&self, number: u64) {
        self.opened.lock().remove(&number);
    }

    /// The attributes of a file that other programs of this mount may be writing: again if its bytes were unsent, and by
    /// its open file if it is shorter than what was written. Another mount has cut it then, or a node was lost with bytes,
    /// which the open file finds out.
    fn complete_attr(&self, attr: NodeAttr, again: impl Fn() -> Result<NodeAttr>) -> Result<NodeAttr> {
        let unsent = self.send_bytes_of(Some(attr.identity))?;
        let attr = if unsent { again()? } else { attr };
        let shortened = self.known_bytes_of(attr.identity).filter(|file| attr.size < file.retained_end());
        let Some(file) = shortened else { return Ok(attr) };
        match self.open_files().iter().find(|open| Arc::ptr_eq(&open.bytes, &file)) {
            Some(open) => open.stat_open(self),
            None => Ok(attr),
        }
    }

    fn whole(&self) -> Result<Arc<GroupWrites>> {
        self.this.upgrade().ok_or_else(|| Error::new(ErrorKind::Unavailable, "the mount is ending"))
    }

    fn new_file(&self, path: Vec<u8>, opened: FileOpening<'_>) -> Result<Box<dyn WritableFile>> {
        let bytes = self.bytes_of(opened.attr.identity);
        bytes.raise_end(opened.attr.size);
        if opened.flags & O_TRUNC != 0 {
            self.cut_bytes_of(opened.attr.identity, 0);
        }
        let opened = OpenFile::new(opened, path, bytes);
        Ok(Box::new(RemoteFile::new(self.whole()?, self.add_open(opened))))
    }
}

impl Drop for GroupWrites {
    fn drop(&mut self) {
        self.queue.end();
        self.calls.end_closes();
    }
}

/// A file that a node has opened.
struct FileOpening<'a> {
    number: u64,
    attr: NodeAttr,
    flags: u32,
    caller: &'a Caller,
    home: HomeProcess,
}

/// The path of `name` in `directory`.
pub(crate) fn join_path(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, name].join(&b'/') }
}

fn no_capabilities() -> Error {
    Error::new(ErrorKind::Io(ENODATA), "the file has no capabilities")
}

fn attr_of(answer: WriteAnswer) -> Result<NodeAttr> {
    match answer {
        WriteAnswer::Attr(attr) => Ok(attr),
        other => Err(unexpected(&other)),
    }
}

impl WritableVolume for GroupWrites {
    fn capabilities(&self) -> WriteCapabilities {
        self.capabilities.get().cloned().unwrap_or(NO_CAPABILITIES)
    }

    fn use_names(&self, names: Weak<dyn KnownNames>) {
        // Only the first call has an effect.
        let _ = self.names.set(names);
    }

    fn stat(&self, at: NodePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        self.send_bytes_of(at.expected)?;
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
        self.send_bytes_of(at.expected)?;
        let number = self.calls.new_file_number();
        let call = WriteCall::Open { at, flags: OpenFlags::new(flags), file: number };
        let (answer, home) = self.change_at(at.path, call, RequestContext::of(caller), self.calls.begin())?;
        let attr = attr_of(answer)?;
        self.new_file(at.path.to_vec(), FileOpening { number, attr, flags, caller, home })
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let (number, path) = (self.calls.new_file_number(), join_path(at.directory.path, at.name));
        self.send_bytes_of(self.known.object(&path))?;
        let call = WriteCall::Create { at, flags: OpenFlags::new(flags), mode, file: number };
        let (answer, home) = self.change_at(&path, call, RequestContext::of(caller), self.calls.begin())?;
        self.note(&path, &answer);
        let (attr, directory) = match answer {
            WriteAnswer::Created(attr, directory) => (attr, directory),
            answer => (attr_of(answer)?, None),
        };
        Ok(CreatedFile {
            attr,
            file: self.new_file(path, FileOpening { number, attr, flags, caller, home })?,
            directory,
        })
    }

    fn create_unnamed(
        &self,
        directory: NodePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Box<dyn WritableFile>)> {
        let number = self.calls.new_file_number();
        let call = WriteCall::CreateUnnamed { directory, flags: OpenFlags::new(flags), mode, file: number };
        let (answer, home) = self.change_at(directory.path, call, RequestContext::of(caller), self.calls.begin())?;
        let attr = attr_of(answer)?;
        // Without a name it can't be opened on another node: the empty path is the root, which has another identity.
        Ok((attr, self.new_file(Vec::new(), FileOpening { number, attr, flags, caller, home })?))
    }

    fn link_open(&self, file: &dyn WritableFile, to: NamePath<'_>, caller: &Caller) -> Result<NodeAttr> {
        // From `asm-generic/errno-base.h`.
        const EXDEV: i32 = 18;
        let other = || Error::new(ErrorKind::Io(EXDEV), "the file belongs to another mount");
        let file = file.as_any().downcast_ref::<RemoteFile>().ok_or_else(other)?;
        file.send_bytes()?;
        let path = join_path(to.directory.path, to.name);
        let answer = file.change(&WriteCall::LinkOpen { file: file.number(), to }, RequestContext::of(caller))?;
        self.note(&path, &answer);
        let attr = attr_of(answer)?;
        file.set_path(path);
        Ok(attr)
    }

    fn open_directory(&self, at: NodePath<'_>, caller: &Caller) -> Result<Box<dyn WritableDirectory>> {
        let number = self.calls.new_file_number();
        let call = WriteCall::OpenDirectory { at, file: number };
        let (_, home) = self.change_at(at.path, call, RequestContext::of(caller), self.calls.begin())?;
        let place = FilePlace { path: at.path.to_vec(), identity: at.expected };
        let opened = OpenFile::new_directory(number, place, caller, home);
        Ok(Box::new(RemoteDirectory::new(self.whole()?, self.add_open(opened))))
    }

    /// The nodes draw the marks.
    fn change_marked(
        &self,
        change: &Change<'_>,
        caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<Option<NodeAttr>> {
        let mut context = RequestContext::of(caller);
        // The home of a change is that of the name it makes, or else of the one it takes away.
        let path = match change {
            Change::Mkdir { at, .. } | Change::Mknod { at, .. } | Change::Symlink { at, .. } => {
                join_path(at.directory.path, at.name)
            }
            Change::Unlink { at } | Change::Rmdir { at } => {
                self.calls.report_closed();
                context.known[0] = self.known_at(at);
                join_path(at.directory.path, at.name)
            }
            Change::Rename { from, to, .. } => {
                self.send_bytes_below(&join_path(from.directory.path, from.name))?;
                self.calls.report_closed();
                context.known = [self.known_at(from), self.known_at(to)];
                join_path(to.directory.path, to.name)
            }
            Change::Link { from, to } => {
                self.send_bytes_of(from.expected)?;
                join_path(to.directory.path, to.name)
            }
            Change::SetAttr { of, .. } | Change::RemoveXattr { of, .. } => {
                self.send_bytes_of(of.expected)?;
                of.path.to_vec()
            }
            Change::SetXattr { of, value, .. } => {
                self.send_bytes_of(of.expected)?;
                context.payload = value;
                of.path.to_vec()
            }
        };
        let (answer, _) = self.change_at(&path, WriteCall::Change(*change), context, self.calls.begin())?;
        match change {
            Change::Unlink { .. } | Change::Rmdir { .. } => self.known.note_absence(&path),
            Change::Rename { from, flags, .. } => {
                // From `linux/fs.h`.
                const RENAME_EXCHANGE: u32 = 2;
                let (old, exchange) = (join_path(from.directory.path, from.name), flags & RENAME_EXCHANGE != 0);
                let note = |path: &[u8], known: Option<FileIdentity>| match known {
                    Some(identity) => self.known.note_object(path, identity),
                    None => self.known.note_absence(path),
                };
                note(&path, context.known[0]);
                note(&old, context.known[1].filter(|_| exchange));
                self.move_open_files(&old, &path, exchange);
            }
            Change::SetAttr { set, .. } => {
                if let (Some(size), WriteAnswer::Attr(attr)) = (set.size, &answer) {
                    self.cut_bytes_of(attr.identity, size);
                }
            }
            Change::SetXattr { of, .. } => {
                if let Some(open) = self.open_bytes_of(of.expected) {
                    open.note_bare(false);
                }
            }
            Change::RemoveXattr { .. } => {}
            _ => self.note(&path, &answer),
        }
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
        let open = self.open_bytes_of(at.expected.filter(|_| name == CAPABILITIES));
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
