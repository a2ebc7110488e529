//! Open files and directories of a writable mount. Writes go to the source's file, and so do reads, unless the file is read from
//! cached bytes (`version_reads`); where the kernel supports it, it reads and writes the source's file itself.

use super::kernel_view::{KernelInode, PRIVILEGE_BITS};
use super::life::{made_object, unclear_append};
use super::locks::HandleLocks;
use super::opener::FileOpener;
use super::removed::RemovedDirectory;
use super::version_reads::VersionReads;
use super::{FsCaller, NodeEntry, WritableFileSystem, errno_error, has_lost_name};
use crate::errno::{FsError, FsResult};
use crate::inode_limit::LimitedInodes as _;
use crate::kept_records::{KeptHandle, MadeChange, RecordSlot};
use crate::passthrough::{LiveBacking, RegisterBacking};
use crate::service::{DirName, DirRead, FilePosition, FileWrite, HandleRef};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, ObjectRef, Result};
use spurline_volume::ReadData;
use spurline_volume::capabilities::LimitedCall;
use spurline_volume::kept_files::KeptFileKey;
use spurline_volume::repeated::{ChangeOutcome, RepeatedCall};
use spurline_volume::writes::{
    CacheVersion, Caller, CreatedFile, ListedName, NodeAttr, NodePath, WritableDirectory, WritableFile, WritePlace,
};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// What the first open has done already.
const MAKING_FLAGS: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;

/// The opens of one node.
#[derive(Default)]
pub(super) struct OpenNode {
    state: Mutex<OpenNodeState>,
}

#[derive(Default)]
struct OpenNodeState {
    files: Vec<(u64, Weak<OpenNodeFile>)>,
    /// Opens through this process, and by the kernel itself: it refuses a mixture.
    cached: u32,
    passthrough: u32,
    /// Of the opens by the kernel itself, how many can be mapped to store into.
    mappable: u32,
    live: Option<Arc<LiveBacking>>,
    /// Opens that only write, past the kernel's pages. All later ones bypass them too: pages that are read during such a write
    /// could be older than it.
    direct_writers: u32,
    /// The attributes of the version that files are read in from cached bytes.
    cached_as: Option<NodeAttr>,
}

impl OpenNodeState {
    /// A further open that can be mapped, here and among those of all nodes.
    fn add_mappable(&mut self, of_all: &AtomicU64) {
        self.mappable += 1;
        of_all.fetch_add(1, Ordering::Relaxed);
    }
}

/// An open file.
pub(super) struct OpenNodeFile {
    pub ino: u64,
    pub file: Box<dyn WritableFile>,
    /// The flags of the open.
    flags: i32,
    passthrough: bool,
    direct_writer: bool,
    /// The record that outlives this process; 0 for none.
    record: AtomicU32,
    /// Of a file whose bytes a close shows to others.
    opener: Option<FileOpener>,
    pub kernel_inode: Arc<KernelInode>,
    /// It was opened to be read from cached bytes.
    version_reads: Option<VersionReads>,
    /// Behind `file`: the locks are known as held until the source has closed the file, whichever request drops it last.
    locks: HandleLocks,
}

impl OpenNodeFile {
    fn writes(&self) -> bool {
        may_write(self.flags)
    }

    /// Whether programs can store into the source's own file: that moves the times without a request.
    fn is_mappable(&self) -> bool {
        self.passthrough && self.flags & libc::O_ACCMODE == libc::O_RDWR
    }
}

fn may_write(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

/// A file that the source has opened.
struct NewOpen {
    file: Box<dyn WritableFile>,
    flags: i32,
    /// It was made by the open.
    made: bool,
    version: Option<OpenedVersion>,
}

/// The version in which a file may be read from cached bytes.
struct OpenedVersion {
    object: ObjectRef,
    /// The count of events before the source was asked.
    events: u64,
}

/// An open directory.
pub(super) struct OpenNodeDirectory {
    pub ino: u64,
    pub directory: Box<dyn WritableDirectory>,
    /// The record that outlives this process; 0 for none.
    pub record: AtomicU32,
}

/// An open file, as returned to the kernel.
pub struct OpenedNode {
    /// The handle's number.
    pub fh: u64,
    /// The kernel's pages of the inode are those of this version.
    pub keep_cache: bool,
    /// The kernel's attributes of the inode are not of this version: see [`WritableFileSystem::refresh_opened`].
    pub moved: bool,
    /// The kernel gets the attributes again at each use, and has to forget the kept attributes.
    pub mappable: bool,
    /// The attributes at the open.
    pub attr: NodeAttr,
    /// Every read and write becomes a request.
    pub direct_io: bool,
    /// Writes within the file are made at once.
    pub parallel: bool,
    /// A close can report an error.
    pub flush: bool,
    /// The source's file, for the kernel.
    pub backing: Option<Arc<LiveBacking>>,
}

impl WritableFileSystem {
    /// The kernel can map files that bypass its pages: files that are only written may do that.
    pub fn allow_direct_writes(&self) {
        self.direct_writes.store(true, Ordering::Relaxed);
    }

    /// Any open file of a node.
    pub(super) fn open_file_of(&self, ino: u64) -> Option<Arc<OpenNodeFile>> {
        let open = self.opens.lock().get(&ino).cloned()?;
        let state = open.state.lock();
        state.files.iter().find_map(|(_, file)| file.upgrade())
    }

    /// Whether the kernel may have pages of the node: the source's own file has none here.
    pub(super) fn has_pages(&self, ino: u64) -> bool {
        let open = self.opens.lock().get(&ino).cloned();
        open.is_some_and(|open| open.state.lock().cached > 0)
    }

    /// Whether the kernel reads and writes the source's own file of the node.
    pub(super) fn is_passed_through(&self, ino: u64) -> bool {
        let open = self.opens.lock().get(&ino).cloned();
        open.is_some_and(|open| open.state.lock().passthrough > 0)
    }

    /// How long the kernel may keep the attributes of a node.
    pub(super) fn attr_ttl(&self, ino: u64) -> Duration {
        if self.mappable_opens.load(Ordering::Relaxed) > 0
            && let Some(open) = self.opens.lock().get(&ino).cloned()
            && open.state.lock().mappable > 0
        {
            return Duration::ZERO;
        }
        self.config.attr_ttl
    }

    pub(super) fn file(&self, ino: u64, fh: u64) -> FsResult<Arc<OpenNodeFile>> {
        self.files.get(fh).filter(|file| file.ino == ino).ok_or(FsError::BadHandle(fh))
    }

    /// Opens an existing file with the flags of `open(2)`. With `register`, the kernel may read and write the source's
    /// file directly.
    ///
    /// # Errors
    /// The source's errno; `ESTALE` when the path leads to another object, and the kernel looks it up again.
    pub fn open(
        &self,
        ino: u64,
        flags: i32,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<OpenedNode> {
        if let Some((fh, file)) = self.find_opened(caller) {
            return self.describe_opened(fh, &file);
        }
        let events = self.cache_events.count(ino);
        let opened = self.on_node(ino, caller, false, |at, caller| self.source.open(at, flags as u32, caller));
        let file = match opened {
            Err(error) if has_lost_name(&error) => {
                let open = self.open_file_of(ino).ok_or(error)?;
                self.as_caller(caller, false, |caller| open.file.reopen(flags as u32, caller))?
            }
            opened => opened?,
        };
        let attr = file.attr_at_open()?;
        let version = self.find_version(ino, &*file, flags, &attr).map(|object| OpenedVersion { object, events });
        self.add_open(ino, NewOpen { file, flags, made: false, version }, &attr, caller, register)
    }

    /// Makes and opens a file in `parent`; raises its lookup count.
    ///
    /// # Errors
    /// The source's errno.
    pub fn create(
        &self,
        parent: u64,
        name: &[u8],
        flags: i32,
        mode: u32,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<(NodeEntry, OpenedNode)> {
        if caller.request.repeated
            && let Some(made) = self.find_created(DirName { parent, name }, flags, caller, register)?
        {
            return Ok(made);
        }
        self.note_making(caller);
        let mark = self.directory_attrs.mark(parent);
        let groups_decide = mode & libc::S_ISGID != 0;
        let created = self.on_name(parent, name, caller, groups_decide, |at, caller| {
            self.source.create(at, flags as u32, mode, caller)
        });
        match created.as_ref().map(|created| created.directory) {
            Ok(Some(attr)) => self.directory_attrs.note(parent, mark, attr),
            _ => self.directory_attrs.drop_attr(parent),
        }
        let CreatedFile { attr, file, .. } = created?;
        self.note_made(caller, made_object(attr.identity));
        let entry = self.intern(parent, name, attr);
        if attr.size == 0 {
            self.nodes.note_bare(entry.ino, self.config.attr_ttl);
        }
        self.finish_create(entry, file, flags, caller, register)
    }

    /// Makes a file without a name in `parent`; raises its lookup count.
    ///
    /// # Errors
    /// The source's errno.
    pub fn tmpfile(
        &self,
        parent: u64,
        flags: i32,
        mode: u32,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<(NodeEntry, OpenedNode)> {
        if let Some(opened) = self.find_entry_opened(caller)? {
            return Ok(opened);
        }
        let (attr, file) = self.on_node(parent, caller, mode & libc::S_ISGID != 0, |at, caller| {
            self.source.create_unnamed(at, flags as u32, mode, caller)
        })?;
        let entry = self.node_entry(self.nodes.intern(None, &attr), attr);
        self.finish_create(entry, file, flags, caller, register)
    }

    /// The file that a repeated request has opened already, with its node.
    fn find_entry_opened(&self, caller: &FsCaller) -> FsResult<Option<(NodeEntry, OpenedNode)>> {
        let Some((fh, file)) = self.find_opened(caller) else { return Ok(None) };
        let opened = self.describe_opened(fh, &file)?;
        Ok(Some((self.node_entry(file.ino, opened.attr), opened)))
    }

    /// The file that a repeated request has made already.
    fn find_created(
        &self,
        at: DirName<'_>,
        flags: i32,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<Option<(NodeEntry, OpenedNode)>> {
        if let Some(opened) = self.find_entry_opened(caller)? {
            return Ok(Some(opened));
        }
        let Some(repeat) = self.find_repeat(caller) else { return Ok(None) };
        if self.source.numbers_changes() || self.source.recognises_marks() {
            // The source has the file open under the number of the change, and repeats the answer, or makes files only at the
            // publication.
            return Ok(None);
        }
        let outcome = self.on_name(at.parent, at.name, caller, false, |at, by| {
            self.find_outcome(RepeatedCall::CreateExclusive(at), repeat, None, by)
        })?;
        let ChangeOutcome::Made(Some(attr)) = outcome else { return Ok(None) };
        // The first open had the right that a new file need not give.
        let own = Caller { uid: self.config.owner.0, gid: self.config.owner.1, ..Caller::default() };
        let flags_now = (flags & !MAKING_FLAGS) as u32;
        let file = self.on_name(at.parent, at.name, caller, false, |at, _| {
            let path = at.path();
            self.source.open(NodePath { path: &path, expected: Some(attr.identity) }, flags_now, &own)
        })?;
        let entry = self.intern(at.parent, at.name, attr);
        self.finish_create(entry, file, flags, caller, register).map(Some)
    }

    fn finish_create(
        &self,
        entry: NodeEntry,
        file: Box<dyn WritableFile>,
        flags: i32,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<(NodeEntry, OpenedNode)> {
        self.stats.fuse.change_ops.add(1);
        let new = NewOpen { file, flags, made: entry.attr.size == 0, version: None };
        match self.add_open(entry.ino, new, &entry.attr, caller, register) {
            Ok(opened) => Ok((NodeEntry { attr_ttl: self.attr_ttl(entry.ino), ..entry }, opened)),
            Err(error) => {
                self.forget(entry.ino, 1);
                Err(error)
            }
        }
    }

    fn add_open(
        &self,
        ino: u64,
        new: NewOpen,
        attr: &NodeAttr,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<OpenedNode> {
        let NewOpen { file, flags, made, version } = new;
        let writes = may_write(flags);
        // Any close releases the locks of its process.
        let flush = self.can.locks.is_beyond_mount() || writes && file.needs_flush();
        let seen = self.nodes.note_open(ino, attr);
        let open = Arc::clone(self.opens.lock().entry(ino).or_default());
        let mut state = open.state.lock();
        if writes || seen.moved {
            self.end_cached_reads(ino, &mut state);
        }
        let version = version.filter(|version| !seen.moved && self.may_read_cached(ino, &state, version));
        // The kernel writes a registered file with this process's rights, which would keep the bits.
        let may_register = attr.mode & PRIVILEGE_BITS == 0 && state.cached == 0 && version.is_none();
        let register = register.filter(|_| may_register);
        let backing = match (&state.live, register) {
            (Some(live), _) if state.passthrough > 0 => Some(Arc::clone(live)),
            (_, Some(register)) => {
                let (uid, gid) = self.config.squash.unwrap_or((caller.uid, caller.gid));
                register_source(&*file, uid, gid, register)
            }
            _ => None,
        };
        // A new file that is only written needs no pages; without them, the kernel requests no capabilities before its first
        // write.
        let only_writes = flags & libc::O_ACCMODE == libc::O_WRONLY;
        let alone = made && state.files.is_empty() && backing.is_none();
        let direct_writer = alone && only_writes && self.direct_writes.load(Ordering::Relaxed);
        let passthrough = backing.is_some();
        let kernel_inode = seen.kernel_inode;
        let locks = HandleLocks::new(&self.locks, ino);
        let opener = (writes && file.publishes_at_flush()).then(|| FileOpener::of_thread(caller.pid));
        let version_reads = version.map(|version| self.version_reads(version.object));
        let is_cached = version_reads.is_some();
        let file = Arc::new(OpenNodeFile {
            ino,
            file,
            flags,
            passthrough,
            direct_writer,
            record: AtomicU32::new(0),
            opener,
            kernel_inode,
            version_reads,
            locks,
        });
        let Some(fh) = self.files.insert(Arc::clone(&file)) else {
            return Err(Error::new(ErrorKind::Io(libc::ENFILE), "too many open files").into());
        };
        file.locks.set_handle(fh);
        self.keep_open(fh, &file, backing.as_deref(), caller);
        match &backing {
            Some(live) => {
                state.passthrough += 1;
                state.live = Some(Arc::clone(live));
                self.stats.fuse.passthrough_opens.add(1);
            }
            None => state.cached += 1,
        }
        let mappable = file.is_mappable();
        if mappable {
            state.add_mappable(&self.mappable_opens);
        }
        if is_cached {
            self.cache_events.add_file();
            state.cached_as = Some(*attr);
        }
        state.files.push((fh, Arc::downgrade(&file)));
        state.direct_writers += u32::from(direct_writer);
        let direct_io = bypasses_pages(flags, backing.is_some(), &state);
        drop(state);
        self.stats.fuse.open_handles.add(1);
        // Writes that overlap are made one after the other, unless the program goes around the page cache itself.
        let parallel = flags & libc::O_DIRECT != 0;
        let keep_cache = seen.same;
        let moved = seen.moved;
        let attr = *attr;
        Ok(OpenedNode { fh, keep_cache, moved, mappable, attr, direct_io, parallel, flush, backing })
    }

    /// Keeps a file that is being opened for a successor of this process.
    fn keep_open(&self, fh: u64, file: &OpenNodeFile, backing: Option<&LiveBacking>, caller: &FsCaller) {
        let Some(life) = self.life.get() else { return };
        if let Some(descriptor) = file.file.kept_descriptor() {
            life.files.keep_file(KeptFileKey::File(fh), descriptor);
        }
        let record = life.keep_handle(&KeptHandle {
            fh,
            ino: file.ino,
            backing_id: backing.map_or(0, LiveBacking::id),
            request: caller.request.number,
            flags: file.flags,
            directory: false,
            direct_writer: file.direct_writer,
            opener: file.opener.as_ref().map_or(0, FileOpener::kept),
            owner: [caller.uid, caller.gid],
            held: file.file.held(),
        });
        file.record.store(record, Ordering::Relaxed);
        file.file.keep_record(record);
    }

    /// Continues with an open file of the process before; false if its number is in use.
    pub(super) fn adopt_open(
        &self,
        record: RecordSlot,
        kept: &KeptHandle,
        file: Box<dyn WritableFile>,
        register: Option<&dyn RegisterBacking>,
    ) -> bool {
        let KeptHandle { fh, ino, backing_id, flags, direct_writer, opener, .. } = *kept;
        let kernel_inode = self.nodes.kernel_inode(ino);
        if let Ok(attr) = file.stat() {
            kernel_inode.note_sent(&attr);
        }
        let locks = HandleLocks::new(&self.locks, ino);
        let passthrough = backing_id != 0;
        let file = Arc::new(OpenNodeFile {
            ino,
            file,
            flags,
            passthrough,
            direct_writer,
            record: AtomicU32::new(record),
            opener: Some(FileOpener::of_kept(opener)),
            kernel_inode,
            version_reads: None,
            locks,
        });
        if !self.files.adopt(fh, Arc::clone(&file)) {
            return false;
        }
        self.follow_identity(&file);
        file.file.keep_record(record);
        file.locks.set_handle(fh);
        let open = Arc::clone(self.opens.lock().entry(ino).or_default());
        let mut state = open.state.lock();
        if passthrough {
            state.passthrough += 1;
            // Once for all handles: the end of a registration ends it in the kernel.
            if state.live.is_none() {
                let registered = register.and_then(|register| register.adopt_registration(backing_id));
                state.live = registered.map(|registered| Arc::new(LiveBacking::new(registered, Box::new(()))));
            }
        } else {
            state.cached += 1;
        }
        if file.is_mappable() {
            state.add_mappable(&self.mappable_opens);
        }
        state.direct_writers += u32::from(direct_writer);
        state.files.push((fh, Arc::downgrade(&file)));
        true
    }

    /// The answer to the open of a file that is open.
    fn describe_opened(&self, fh: u64, file: &Arc<OpenNodeFile>) -> FsResult<OpenedNode> {
        let attr = file.file.stat()?;
        let open = Arc::clone(self.opens.lock().entry(file.ino).or_default());
        let state = open.state.lock();
        Ok(OpenedNode {
            fh,
            keep_cache: false,
            moved: false,
            mappable: file.is_mappable(),
            attr,
            direct_io: bypasses_pages(file.flags, file.passthrough, &state),
            parallel: file.flags & libc::O_DIRECT != 0,
            flush: self.can.locks.is_beyond_mount() || file.writes() && file.file.needs_flush(),
            backing: state.live.clone().filter(|_| file.passthrough),
        })
    }

    /// The object whose cached bytes a file that is opened may be read from.
    fn find_version(&self, ino: u64, file: &dyn WritableFile, flags: i32, attr: &NodeAttr) -> Option<ObjectRef> {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return None;
        }
        let CacheVersion::Settled(version) = file.cache_version(attr) else { return None };
        let path = self.nodes.resolve(ino)?.path;
        Some(ObjectRef::new(self.volume.source(), &path, version, attr.size))
    }

    /// Whether a file that is being opened may be read from cached bytes.
    fn may_read_cached(&self, ino: u64, state: &OpenNodeState, version: &OpenedVersion) -> bool {
        let is_written = state.files.iter().any(|(_, file)| file.upgrade().is_some_and(|file| file.writes()));
        !is_written && state.passthrough == 0 && self.cache_events.is_quiet_since(ino, version.events)
    }

    /// All open files of the node are read from the source from now on, also those that are being opened.
    fn end_cached_reads(&self, ino: u64, state: &mut OpenNodeState) {
        self.cache_events.note(ino);
        if state.cached_as.take().is_some() {
            let files = state.files.iter().filter_map(|(_, file)| file.upgrade());
            files.for_each(|file| file.version_reads.iter().for_each(VersionReads::leave));
        }
    }

    /// All open files of the node are read from the source from now on.
    pub(super) fn leave_cache(&self, ino: u64) {
        self.cache_events.note(ino);
        if let Some(open) = self.opens.lock().get(&ino).cloned() {
            self.end_cached_reads(ino, &mut open.state.lock());
        }
    }

    /// The source has the file with these attributes: if it is open in another version, it is read from the source.
    pub(super) fn compare_cached(&self, ino: u64, attr: &NodeAttr) {
        if !self.cache_events.has_files() {
            return;
        }
        let Some(open) = self.opens.lock().get(&ino).cloned() else { return };
        let mut state = open.state.lock();
        if state.cached_as.is_some_and(|cached| !cached.same_bytes(attr)) {
            self.end_cached_reads(ino, &mut state);
        }
    }

    /// Closes a file.
    ///
    /// # Errors
    /// `BadHandle` when it is not open.
    pub fn release(&self, fh: u64) -> FsResult<()> {
        let file = self.files.remove(fh).ok_or(FsError::BadHandle(fh))?;
        self.stats.fuse.open_handles.sub(1);
        let mut unused = None;
        let mut opens = self.opens.lock();
        if let Some(open) = opens.get(&file.ino).cloned() {
            let mut state = open.state.lock();
            state.files.retain(|(own, _)| *own != fh);
            match file.passthrough {
                true => state.passthrough = state.passthrough.saturating_sub(1),
                false => state.cached = state.cached.saturating_sub(1),
            }
            if file.is_mappable() {
                state.mappable -= 1;
                self.mappable_opens.fetch_sub(1, Ordering::Relaxed);
            }
            state.direct_writers = state.direct_writers.saturating_sub(u32::from(file.direct_writer));
            if file.version_reads.is_some() {
                self.cache_events.remove_file();
            }
            if state.passthrough == 0 {
                unused = state.live.take();
            }
            if state.files.is_empty() {
                opens.remove(&file.ino);
            }
        }
        drop(opens);
        let record = file.record.load(Ordering::Relaxed);
        let publishes = file.file.publishes_at_flush();
        if let Some(life) = self.life.get() {
            if !publishes {
                life.files.drop_file(KeptFileKey::File(fh));
            }
            life.records.note_closing(record);
            // The record serves others soon.
            file.file.keep_record(0);
        }
        // Closed outside of the locks: both may take long.
        drop((unused, file));
        if let Some(life) = self.life.get() {
            // Last: without the record, a successor would not close the file at a node, or not publish its bytes.
            life.records.remove_record(record);
            if publishes {
                life.files.drop_file(KeptFileKey::File(fh));
            }
        }
        Ok(())
    }

    /// Reads up to `dst.len()` bytes from `offset`; fewer mean the end of the file.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn read(&self, ino: u64, fh: u64, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        let file = self.file(ino, fh)?;
        let cached = file.version_reads.as_ref().and_then(|reads| self.read_version(reads, offset, dst));
        match cached {
            Some(data) => Ok(data),
            None => Ok(ReadData::Copied(file.file.read_at(offset, dst)?)),
        }
    }

    /// Writes; returns the number of bytes written.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn write(&self, handle: HandleRef, write: &FileWrite<'_>, caller: &FsCaller) -> FsResult<usize> {
        let started = Instant::now();
        let file = self.file(handle.ino, handle.fh)?;
        let loses_privileges = write.lose_privileges.then(|| Caller {
            uid: caller.uid,
            gid: caller.gid,
            pid: caller.pid,
            ..Caller::default()
        });
        let written = if self.life.get().is_some() {
            self.write_once(&file, write, loses_privileges.as_ref(), caller)?
        } else {
            file.file.write_placed(write.place, write.offset, write.data, loses_privileges.as_ref())?
        };
        file.kernel_inode.note_written(write.offset + written as u64);
        let stats = &self.stats.fuse;
        stats.write_ops.add(1);
        stats.write_bytes.add(written as u64);
        stats.write_us.add_us(started.elapsed());
        Ok(written)
    }

    /// Writes what a process before has not written already, if the request is repeated.
    fn write_once(
        &self,
        file: &OpenNodeFile,
        write: &FileWrite<'_>,
        loses_privileges: Option<&Caller>,
        caller: &FsCaller,
    ) -> FsResult<usize> {
        let repeat = self.find_repeat(caller);
        if let Some(made) = repeat.and_then(|repeat| repeat.made) {
            return Ok(made.count as usize);
        }
        let is_compared = !self.source.numbers_changes();
        let appends = is_compared
            && match write.place {
                WritePlace::AsOpened => file.flags & libc::O_APPEND != 0,
                WritePlace::End => true,
                WritePlace::Offset | WritePlace::MappedPages => false,
            };
        let mut found = 0;
        if appends {
            match repeat.and_then(|repeat| repeat.before) {
                Some(end) => {
                    found = file.file.find_appended(end, write.data)?.ok_or_else(unclear_append)?;
                }
                None => self.note_begun(caller, file.file.stat()?.size),
            }
        }
        let mut written = found;
        if found < write.data.len() {
            written += file.file.write_placed(write.place, write.offset, &write.data[found..], loses_privileges)?;
        }
        self.note_made(caller, MadeChange { count: written as u64, object: None });
        Ok(written)
    }

    /// Reports failures of earlier writes, at each `close(2)`, and releases the locks of the process `owner`.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn flush(&self, ino: u64, fh: u64, owner: u64, caller: &FsCaller<'_>) -> FsResult<()> {
        let file = self.file(ino, fh)?;
        let is_close = file.opener.as_ref().is_none_or(|opener| opener.counts_close_of(caller.pid));
        // The bytes first: the next owner of the lock reads them.
        let flushed = if file.writes() && is_close { file.file.flush() } else { Ok(()) };
        self.follow_identity(&file);
        // Of a process that has ended, the locks end with the file; the kernel gives the number of the owner to others.
        if !spurline_sys::is_call_left() {
            self.release_process_locks(HandleRef { ino, fh }, owner);
        }
        Ok(flushed?)
    }

    /// Makes a file's changes durable, or its bytes only.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn fsync(&self, ino: u64, fh: u64, data_only: bool) -> FsResult<()> {
        let file = self.file(ino, fh)?;
        let synced = file.file.sync(data_only);
        self.follow_identity(&file);
        Ok(synced?)
    }

    /// The node of an open file keeps its number when the source has made another object of the file.
    pub(super) fn follow_identity(&self, file: &OpenNodeFile) {
        if let Some(identity) = file.file.new_identity() {
            self.nodes.set_identity(file.ino, identity);
        }
    }

    /// Allocates or frees space; `mode` as for `fallocate(2)`.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn fallocate(&self, ino: u64, fh: u64, mode: u32, offset: u64, len: u64, caller: &FsCaller) -> FsResult<()> {
        self.can.check(LimitedCall::Allocate(mode))?;
        let file = self.file(ino, fh)?;
        Ok(self.as_caller(caller, false, |caller| file.file.allocate(mode, offset, len, caller))?)
    }

    /// Copies bytes between two open files, within the source where it can.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno; `EXDEV` and `EOPNOTSUPP` make the kernel read and write.
    pub fn copy_file_range(&self, from: FilePosition, to: FilePosition, len: u64, caller: &FsCaller) -> FsResult<u64> {
        self.can.check(LimitedCall::Copy)?;
        let input = self.file(from.file.ino, from.file.fh)?;
        let output = self.file(to.file.ino, to.file.fh)?;
        Ok(self.as_caller(caller, false, |caller| {
            input.file.copy_range(from.offset, &*output.file, to.offset, len, caller)
        })?)
    }

    /// The next data or hole.
    ///
    /// # Errors
    /// `BadHandle`; `ENXIO` past the end.
    pub fn lseek(&self, ino: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        self.can.check(LimitedCall::Seek)?;
        Ok(self.file(ino, fh)?.file.seek(offset, whence)?)
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// The source's errno.
    pub fn opendir(&self, ino: u64, caller: &FsCaller) -> FsResult<u64> {
        if let Some(fh) = self.find_opened_handle(caller) {
            return Ok(fh);
        }
        let opened = self.on_node(ino, caller, false, |at, caller| self.source.open_directory(at, caller));
        let directory = opened.or_else(|error| match self.removed_directory(ino) {
            Some(removed) if has_lost_name(&error) => Ok(removed),
            _ => Err(error),
        })?;
        // A listing changes the time of access.
        self.directory_attrs.drop_attr(ino);
        let open = Arc::new(OpenNodeDirectory { ino, directory, record: AtomicU32::new(0) });
        let Some(fh) = self.directories.insert(Arc::clone(&open)) else {
            return Err(errno_error(libc::ENFILE, "too many open directories"));
        };
        if let Some(life) = self.life.get() {
            if let Some(descriptor) = open.directory.descriptor() {
                life.files.keep_file(KeptFileKey::Directory(fh), descriptor);
            }
            let request = caller.request.number;
            let owner = [caller.uid, caller.gid];
            let held = open.directory.held();
            let kept = KeptHandle { fh, ino, request, directory: true, owner, held, ..KeptHandle::default() };
            let record = life.keep_handle(&kept);
            open.record.store(record, Ordering::Relaxed);
        }
        self.stats.fuse.open_handles.add(1);
        Ok(fh)
    }

    /// A directory that this mount has removed, as an open one.
    pub(super) fn removed_directory(&self, ino: u64) -> Option<Box<dyn WritableDirectory>> {
        RemovedDirectory::find(&self.nodes, ino).map(|removed| Box::new(removed) as _)
    }

    fn directory(&self, ino: u64, fh: u64) -> FsResult<Arc<OpenNodeDirectory>> {
        self.directories.get(fh).filter(|directory| directory.ino == ino).ok_or(FsError::BadHandle(fh))
    }

    /// Closes a directory.
    ///
    /// # Errors
    /// `BadHandle` when it is not open.
    pub fn releasedir(&self, fh: u64) -> FsResult<()> {
        let open = self.directories.remove(fh).ok_or(FsError::BadHandle(fh))?;
        let record = open.record.load(Ordering::Relaxed);
        drop(open);
        if let Some(life) = self.life.get() {
            life.files.drop_file(KeptFileKey::Directory(fh));
            life.records.remove_record(record);
        }
        self.stats.fuse.open_handles.sub(1);
        Ok(())
    }

    /// Passes the names that `read` requests to `take`, until it returns false; no name is the end. With
    /// `plus`, each name that could be looked up has its entry, whose lookup count was raised by one; it is lowered
    /// again if `take` refuses the name.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn readdir(
        &self,
        read: &DirRead,
        caller: &FsCaller,
        take: &mut dyn FnMut(&ListedName, Option<NodeEntry>) -> bool,
    ) -> FsResult<()> {
        let HandleRef { ino, fh } = read.directory;
        let open = self.directory(ino, fh)?;
        // Attributes would make inodes faster than the kernel forgets them.
        let plus = read.plus && !self.is_far_over_limit();
        let names: Result<Vec<ListedName>> =
            self.as_caller(caller, false, |caller| open.directory.read(read.from, read.names_max, plus, caller));
        for listed in names? {
            let entry = listed.attr.map(|attr| self.intern(ino, &listed.name, attr));
            if !take(&listed, entry) {
                if let Some(entry) = entry {
                    self.forget(entry.ino, 1);
                }
                break;
            }
        }
        Ok(())
    }

    /// Makes changes of a directory's names durable.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno.
    pub fn fsyncdir(&self, ino: u64, fh: u64, data_only: bool) -> FsResult<()> {
        Ok(self.directory(ino, fh)?.directory.sync(data_only)?)
    }
}

/// Gives the source's file to the kernel, which uses it with the rights of the first that opened it.
fn register_source(
    file: &dyn WritableFile,
    uid: u32,
    gid: u32,
    register: &dyn RegisterBacking,
) -> Option<Arc<LiveBacking>> {
    let backing = file.backing()?;
    let registered = match uid {
        0 => register.register_file(backing),
        uid => register.register_file_as(backing, uid, gid),
    };
    match registered {
        Ok(id) => Some(Arc::new(LiveBacking::new(id, Box::new(())))),
        Err(error) => {
            tracing::debug!(%error, "the kernel refused the source's file; reads and writes go through this process");
            None
        }
    }
}

/// Whether each read and write of an open file becomes a request.
fn bypasses_pages(flags: i32, passthrough: bool, state: &OpenNodeState) -> bool {
    // An appended record may land elsewhere than the kernel believes, if another host appends too.
    let appends = may_write(flags) && flags & libc::O_APPEND != 0;
    !passthrough && (appends || state.direct_writers > 0)
}
