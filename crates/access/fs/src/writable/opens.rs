//! Open files and directories of a writable mount. Writes go to the source's file, and so do reads, unless the file is read from
//! cached bytes (`version_reads`); where the kernel supports it, it reads and writes the source's file itself.

use super::kernel_inode::{KernelInode, PRIVILEGE_BITS};
use super::life::{KeptMount, MountRecords, made_object, unclear_append};
use super::lock_table::HandleLocks;
use super::locks::MountLocks;
use super::lookup_opens::{LookupOpen, LookupOpens};
use super::names::{MountNames, NodeEntry, has_lost_name};
use super::open_nodes::{OpenNodeDirectory, OpenNodeFile, OpenNodeState, OpenNodes, bypasses_pages, may_write};
use super::opener::{FileOpener, has_other_writer};
use super::removed::RemovedDirectory;
use super::version_reads::VersionReads;
use crate::attr::LookupOutcome;
use crate::block_reads::{BlockReads, ReadAheadLimits};
use crate::errno::{FsError, FsResult, errno_error};
use crate::inode_limit::LimitedInodes as _;
use crate::kept_records::{KeptHandle, KeptRecord, MadeChange, RecordSlot};
use crate::passthrough::{LiveBacking, RegisterBacking};
use crate::service::{CreateMode, DirName, DirRead, FilePosition, FileWrite, FsCaller, HandleRef, OpenedFile};
use spurline_types::{ObjectRef, Result, Stats};
use spurline_volume::capabilities::LimitedCall;
use spurline_volume::hand_over::{LeftOpen, OpenHold, RepeatRule};
use spurline_volume::kept_files::KeptFileKey;
use spurline_volume::repeated::{ChangeOutcome, RepeatedCall};
use spurline_volume::writes::{
    CacheVersion, Caller, CreatedFile, ListedName, NamePath, NodeAttr, NodePath, S_IFMT, S_IFREG, WritableDirectory,
    WritableFile, WritableVolume, WritePlace,
};
use spurline_volume::{ReadData, Volume};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// What the first open has done already.
const MAKING_FLAGS: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;

/// A file that the source has opened.
struct NewOpen {
    file: Box<dyn WritableFile>,
    flags: i32,
    made: bool,
    version: Option<OpenedVersion>,
}

/// The version in which a file may be read from cached bytes.
struct OpenedVersion {
    object: ObjectRef,
    /// The count of events before the source was asked.
    events: u64,
}

/// An open file, as returned to the kernel.
pub(super) struct OpenedNode {
    /// How the kernel is to use the file.
    pub file: OpenedFile,
    /// The kernel's attributes of the inode are not of this version, and have to be refreshed.
    pub moved: bool,
    /// The kernel gets the attributes again at each use, and has to forget the kept attributes.
    pub mappable: bool,
    /// The attributes at the open.
    pub attr: NodeAttr,
}

/// Opens, reads, writes and closes files and directories.
pub(super) struct MountOpens {
    open_nodes: Arc<OpenNodes>,
    names: Arc<MountNames>,
    locks: Arc<MountLocks>,
    life: Arc<MountRecords>,
    source: Arc<dyn WritableVolume>,
    volume: Arc<dyn Volume>,
    reads: BlockReads,
    started: Instant,
    stats: Arc<Stats>,
    direct_writes: AtomicBool,
    lookup_opens: LookupOpens,
}

impl MountOpens {
    pub fn new(volume: Arc<dyn Volume>, names: &Arc<MountNames>, locks: &Arc<MountLocks>) -> MountOpens {
        let config = &names.config;
        let limits = ReadAheadLimits { of_reader: config.max_readahead, of_all: config.readahead_budget };
        MountOpens {
            open_nodes: Arc::clone(&names.open_nodes),
            names: Arc::clone(names),
            locks: Arc::clone(locks),
            life: Arc::clone(&names.life),
            source: Arc::clone(&names.source),
            reads: BlockReads::new(Arc::clone(&volume), limits),
            volume,
            started: Instant::now(),
            stats: Arc::clone(&names.stats),
            direct_writes: AtomicBool::new(false),
            lookup_opens: LookupOpens::default(),
        }
    }

    /// The kernel can map files that bypass its pages: files that are only written may do that.
    pub fn allow_direct_writes(&self) {
        self.direct_writes.store(true, Ordering::Relaxed);
    }

    /// Finds `name` in the directory `parent`, and opens the file where the caller is expected to do that next.
    pub fn lookup(&self, parent: u64, name: &[u8], caller: &FsCaller) -> FsResult<LookupOutcome<NodeEntry>> {
        // An NFS server's threads open files by their handles, and open files of a kept mount belong to requests that open.
        let is_excluded = self.life.kept().is_some() || self.names.exported.load(Ordering::Relaxed);
        let Some(source) = self.source.opening_lookups().filter(|_| !is_excluded) else {
            let look = |at: NamePath<'_>, by: &Caller| Ok((self.source.lookup(at, by)?, None));
            return Ok(self.names.lookup_by(parent, name, caller, look)?.map(|(entry, _)| entry));
        };
        let flags = self.lookup_opens.flags_for(parent, caller);
        let counts = self.open_nodes.cache_events.counts();
        let outcome = self.names.lookup_by(parent, name, caller, |at, caller| match flags {
            Some(flags) => source.lookup_open(at, flags as u32, caller),
            None => Ok((self.source.lookup(at, caller)?, None)),
        });
        Ok(outcome?.map(|(entry, file)| {
            if flags.is_some() && file.is_none() && entry.attr.mode & S_IFMT == S_IFREG {
                self.lookup_opens.note_miss(parent);
            }
            let opened = file.zip(flags).map(|(file, flags)| {
                let events = counts.of(entry.ino);
                LookupOpen { file, flags, events, since: Instant::now() }
            });
            let entry_ttl = if opened.is_some() { Duration::ZERO } else { entry.entry_ttl };
            self.lookup_opens.note_lookup(parent, entry.ino, caller, opened);
            NodeEntry { entry_ttl, ..entry }
        }))
    }

    /// Opens an existing file with the flags of `open(2)`. With `register`, the kernel may read and write the source's
    /// file directly.
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
        if let Some(LookupOpen { file, events, .. }) = self.lookup_opens.take(ino, flags, caller) {
            return self.add_opened(ino, file, flags, events, caller, register);
        }
        let events = self.open_nodes.cache_events.count(ino);
        let opened = self.names.on_node(ino, caller, false, |at, caller| self.source.open(at, flags as u32, caller));
        let file = match opened {
            Err(error) if has_lost_name(&error) => {
                let open = self.open_nodes.any_file(ino).ok_or(error)?;
                self.names.as_caller(caller, false, |caller| open.file.reopen(flags as u32, caller))?
            }
            opened => opened?,
        };
        self.add_opened(ino, file, flags, events, caller, register)
    }

    /// Adds an existing file that the source has opened; `events`: their count before.
    fn add_opened(
        &self,
        ino: u64,
        file: Box<dyn WritableFile>,
        flags: i32,
        events: u64,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<OpenedNode> {
        let attr = file.attr_at_open()?;
        let version = self.find_version(ino, &*file, flags, &attr).map(|object| OpenedVersion { object, events });
        self.add_open(ino, NewOpen { file, flags, made: false, version }, &attr, caller, register)
    }

    /// Makes and opens a file in `parent`; raises its lookup count.
    pub fn create(
        &self,
        parent: u64,
        name: &[u8],
        how: CreateMode,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<(NodeEntry, OpenedNode)> {
        let flags = how.flags as i32;
        if caller.request.repeated
            && let Some(made) = self.find_created(DirName { parent, name }, flags, caller, register)?
        {
            return Ok(made);
        }
        self.life.note_making(caller);
        let mark = self.names.directory_attrs.mark(parent);
        let groups_decide = how.mode & libc::S_ISGID != 0;
        let created = self.names.on_name(parent, name, caller, groups_decide, |at, caller| {
            self.source.create(at, how.flags, how.mode, caller)
        });
        match created.as_ref().map(|created| created.directory) {
            Ok(Some(attr)) => self.names.directory_attrs.note(parent, mark, attr),
            _ => self.names.directory_attrs.drop_attr(parent),
        }
        let CreatedFile { attr, file, .. } = created?;
        self.life.note_made(caller, made_object(attr.identity));
        let entry = self.names.intern(parent, name, attr);
        if attr.size == 0 {
            self.names.nodes.note_bare(entry.ino, self.names.config.attr_ttl);
        }
        self.finish_create(entry, file, flags, caller, register)
    }

    /// Makes a file without a name in `parent`; raises its lookup count.
    pub fn tmpfile(
        &self,
        parent: u64,
        how: CreateMode,
        caller: &FsCaller,
        register: Option<&dyn RegisterBacking>,
    ) -> FsResult<(NodeEntry, OpenedNode)> {
        if let Some(opened) = self.find_entry_opened(caller)? {
            return Ok(opened);
        }
        let (attr, file) = self.names.on_node(parent, caller, how.mode & libc::S_ISGID != 0, |at, caller| {
            self.source.create_unnamed(at, how.flags, how.mode, caller)
        })?;
        let entry = self.names.node_entry(self.names.nodes.intern(None, &attr), attr);
        self.finish_create(entry, file, how.flags as i32, caller, register)
    }

    /// The file that the request has opened already, with its handle.
    fn find_opened(&self, caller: &FsCaller<'_>) -> Option<(u64, Arc<OpenNodeFile>)> {
        let fh = self.life.find_opened_handle(caller)?;
        Some((fh, self.open_nodes.files.get(fh)?))
    }

    /// The file that a repeated request has opened already, with its node.
    fn find_entry_opened(&self, caller: &FsCaller) -> FsResult<Option<(NodeEntry, OpenedNode)>> {
        let Some((fh, file)) = self.find_opened(caller) else { return Ok(None) };
        let opened = self.describe_opened(fh, &file)?;
        Ok(Some((self.names.node_entry(file.ino, opened.attr), opened)))
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
        let Some(repeat) = self.life.find_repeat(caller) else { return Ok(None) };
        if !matches!(self.life.repeat_rule(), Some(RepeatRule::Names { .. })) {
            // The source has the file open under the number of the change, and repeats the answer, or makes files only at the
            // publication.
            return Ok(None);
        }
        let outcome = self.names.on_name(at.parent, at.name, caller, false, |at, by| {
            self.life.find_outcome(RepeatedCall::CreateExclusive(at), repeat, None, by)
        })?;
        let ChangeOutcome::Made(Some(attr)) = outcome else { return Ok(None) };
        // The first open had the right that a new file need not give.
        let own = Caller { uid: self.names.config.owner.0, gid: self.names.config.owner.1, ..Caller::default() };
        let flags_now = (flags & !MAKING_FLAGS) as u32;
        let file = self.names.on_name(at.parent, at.name, caller, false, |at, _| {
            let path = at.path();
            self.source.open(NodePath { path: &path, expected: Some(attr.identity) }, flags_now, &own)
        })?;
        let entry = self.names.intern(at.parent, at.name, attr);
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
            Ok(opened) => Ok((NodeEntry { attr_ttl: self.names.attr_ttl(entry.ino), ..entry }, opened)),
            Err(error) => {
                self.names.nodes.forget(entry.ino, 1);
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
        let seen = self.names.nodes.note_open(ino, attr);
        let open = self.open_nodes.of_node(ino);
        let mut state = open.state.lock();
        if writes || seen.moved {
            self.open_nodes.end_cached_reads(ino, &mut state);
        }
        let version =
            version.filter(|version| !seen.moved && self.open_nodes.may_read_cached(ino, &state, version.events));
        // The kernel writes a registered file with this process's rights, which would keep the bits.
        let may_register = attr.mode & PRIVILEGE_BITS == 0 && state.cached == 0 && version.is_none();
        let register = register.filter(|_| may_register);
        let backing = match (&state.live, register) {
            (Some(live), _) if state.passthrough > 0 => Some(Arc::clone(live)),
            (_, Some(register)) => {
                let (uid, gid) = self.names.config.squash.unwrap_or((caller.uid, caller.gid));
                register_source(&*file, uid, gid, register)
            }
            _ => None,
        };
        // A new file that is only written needs no pages; without them, the kernel requests no capabilities before its first
        // write.
        let only_writes = flags & libc::O_ACCMODE == libc::O_WRONLY;
        let alone = made && state.files.is_empty() && backing.is_none();
        let direct_writer = alone && only_writes && self.direct_writes.load(Ordering::Relaxed);
        let opener = (writes && file.publishes_at_flush()).then(|| FileOpener::of_thread(caller.pid));
        let file = Arc::new(OpenNodeFile {
            passthrough: backing.is_some(),
            direct_writer,
            opener,
            version_reads: version.map(|version| VersionReads::new(version.object, &self.reads)),
            ..self.open_file(ino, file, flags, seen.kernel_inode)
        });
        let Some(fh) = self.open_nodes.files.insert(Arc::clone(&file)) else {
            return Err(errno_error(libc::ENFILE, "too many open files"));
        };
        file.locks.set_handle(fh);
        self.keep_open(fh, &file, backing.as_deref(), caller);
        if let Some(live) = &backing {
            state.live = Some(Arc::clone(live));
            self.stats.fuse.passthrough_opens.add(1);
        }
        if file.version_reads.is_some() {
            state.cached_as = Some(*attr);
        }
        self.open_nodes.add_file(&mut state, fh, &file);
        self.stats.fuse.open_handles.add(1);
        let opened = OpenedFile { keep_cache: seen.same, ..self.opened_file(fh, &file, &state) };
        Ok(OpenedNode { file: opened, moved: seen.moved, mappable: file.is_mappable(), attr: *attr })
    }

    /// An open file that nothing else is known of.
    fn open_file(
        &self,
        ino: u64,
        file: Box<dyn WritableFile>,
        flags: i32,
        kernel_inode: Arc<KernelInode>,
    ) -> OpenNodeFile {
        OpenNodeFile {
            ino,
            file,
            flags,
            passthrough: false,
            direct_writer: false,
            record: AtomicU32::new(0),
            opener: None,
            kernel_inode,
            version_reads: None,
            locks: HandleLocks::new(&self.locks.table, ino),
        }
    }

    /// How the kernel is to use an open file.
    fn opened_file(&self, fh: u64, file: &OpenNodeFile, state: &OpenNodeState) -> OpenedFile {
        OpenedFile {
            fh,
            keep_cache: false,
            direct_io: bypasses_pages(file.flags, file.passthrough, state),
            // Writes that overlap are made one after the other, unless the program goes around the page cache itself.
            parallel_direct_writes: file.flags & libc::O_DIRECT != 0,
            // Any close releases the locks of its process.
            flush: self.names.can.locks.is_beyond_mount() || file.writes() && file.file.needs_flush(),
            backing: state.live.clone().filter(|_| file.passthrough),
        }
    }

    /// Keeps a file that is being opened for a successor of this process.
    fn keep_open(&self, fh: u64, file: &OpenNodeFile, backing: Option<&LiveBacking>, caller: &FsCaller) {
        let Some(life) = self.life.kept() else { return };
        let hold = file.file.hold();
        if let OpenHold::Descriptor(descriptor) = hold {
            life.files.keep_file(KeptFileKey::File(fh), descriptor);
        }
        let record = life.records.keep(&KeptRecord::Handle(KeptHandle {
            fh,
            ino: file.ino,
            backing_id: backing.map_or(0, LiveBacking::id),
            request: caller.request.number,
            flags: file.flags,
            directory: false,
            direct_writer: file.direct_writer,
            opener: file.opener.as_ref().map_or(0, FileOpener::kept),
            owner: [caller.uid, caller.gid],
            held: hold.at_node(),
        }));
        file.record.store(record, Ordering::Relaxed);
        file.file.keep_record(record);
    }

    /// Continues with an open file or directory of the process before; false if that is lost.
    pub fn adopt_handle(
        &self,
        slot: RecordSlot,
        kept: &KeptHandle,
        mount: &KeptMount,
        register: Option<&dyn RegisterBacking>,
    ) -> bool {
        let Some(source) = self.source.hand_over() else { return false };
        let key = if kept.directory { KeptFileKey::Directory(kept.fh) } else { KeptFileKey::File(kept.fh) };
        let hold = match kept.held {
            Some(held) => OpenHold::Node(held),
            None => mount.files.take_file(key).map_or(OpenHold::Name, OpenHold::Descriptor),
        };
        let [uid, gid] = kept.owner;
        let caller = Caller { uid, gid, ..Caller::default() };
        let path = self.names.nodes.resolve(kept.ino).map(|found| found.path);
        // Without a name, only a descriptor or a node has the object.
        let is_left = path.is_some() || !matches!(hold, OpenHold::Name);
        let at = NodePath { path: &path.unwrap_or_default(), expected: self.names.nodes.identity_of(kept.ino) };
        let left = LeftOpen { at, flags: kept.flags as u32, caller: &caller, hold };
        let is_adopted = if kept.directory {
            let adopted = if is_left { source.adopt_directory(left).ok() } else { None };
            adopted.or_else(|| self.removed_directory(kept.ino)).is_some_and(|directory| {
                let open = OpenNodeDirectory { ino: kept.ino, directory, record: slot.into() };
                self.open_nodes.directories.adopt(kept.fh, Arc::new(open))
            })
        } else {
            source.adopt(left).is_ok_and(|file| self.adopt_open(slot, kept, file, register))
        };
        if is_adopted {
            self.stats.fuse.open_handles.add(1);
            mount.adopt_opened(kept.request, kept.fh);
        } else if !kept.held.is_some_and(|held| held.closing) {
            tracing::warn!(ino = kept.ino, fh = kept.fh, "an open file of the process before is lost");
        }
        is_adopted
    }

    /// Continues with an open file of the process before; false if its number is in use.
    fn adopt_open(
        &self,
        record: RecordSlot,
        kept: &KeptHandle,
        file: Box<dyn WritableFile>,
        register: Option<&dyn RegisterBacking>,
    ) -> bool {
        let KeptHandle { fh, ino, backing_id, flags, direct_writer, opener, .. } = *kept;
        let kernel_inode = self.names.nodes.kernel_inode(ino);
        if let Ok(attr) = file.stat() {
            kernel_inode.note_sent(&attr);
        }
        let passthrough = backing_id != 0;
        let file = Arc::new(OpenNodeFile {
            passthrough,
            direct_writer,
            record: AtomicU32::new(record),
            opener: Some(FileOpener::of_kept(opener)),
            ..self.open_file(ino, file, flags, kernel_inode)
        });
        if !self.open_nodes.files.adopt(fh, Arc::clone(&file)) {
            return false;
        }
        self.names.follow_identity(&file);
        file.file.keep_record(record);
        file.locks.set_handle(fh);
        let open = self.open_nodes.of_node(ino);
        let mut state = open.state.lock();
        // Once for all handles: the end of a registration ends it in the kernel.
        if passthrough && state.live.is_none() {
            let registered = register.and_then(|register| register.adopt_registration(backing_id));
            state.live = registered.map(|registered| Arc::new(LiveBacking::new(registered, Box::new(()))));
        }
        self.open_nodes.add_file(&mut state, fh, &file);
        true
    }

    /// The answer to the open of a file that is open.
    fn describe_opened(&self, fh: u64, file: &Arc<OpenNodeFile>) -> FsResult<OpenedNode> {
        let attr = file.file.stat()?;
        let open = self.open_nodes.of_node(file.ino);
        let state = open.state.lock();
        let opened = self.opened_file(fh, file, &state);
        Ok(OpenedNode { file: opened, moved: false, mappable: file.is_mappable(), attr })
    }

    /// The object whose cached bytes a file that is opened may be read from.
    fn find_version(&self, ino: u64, file: &dyn WritableFile, flags: i32, attr: &NodeAttr) -> Option<ObjectRef> {
        if flags & libc::O_ACCMODE != libc::O_RDONLY {
            return None;
        }
        let CacheVersion::Settled(version) = file.cache_version(attr) else { return None };
        let path = self.names.nodes.resolve(ino)?.path;
        Some(ObjectRef::new(self.volume.source(), &path, version, attr.size))
    }

    /// Closes a file.
    pub fn release(&self, fh: u64) -> FsResult<()> {
        let file = self.open_nodes.files.remove(fh).ok_or(FsError::BadHandle(fh))?;
        self.stats.fuse.open_handles.sub(1);
        let unused = self.open_nodes.remove_file(fh, &file);
        let record = file.record.load(Ordering::Relaxed);
        let publishes = file.file.publishes_at_flush();
        if let Some(life) = self.life.kept() {
            if !publishes {
                life.files.drop_file(KeptFileKey::File(fh));
            }
            life.records.note_closing(record);
            // The record serves others soon.
            file.file.keep_record(0);
        }
        // Closed outside of the locks: both may take long.
        drop((unused, file));
        if let Some(life) = self.life.kept() {
            // Last: without the record, a successor would not close the file at a node, or not publish its bytes.
            life.records.remove_record(record);
            if publishes {
                life.files.drop_file(KeptFileKey::File(fh));
            }
        }
        Ok(())
    }

    /// Reads up to `dst.len()` bytes from `offset`; fewer mean the end of the file.
    pub fn read(&self, ino: u64, fh: u64, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        let file = self.open_nodes.file(ino, fh)?;
        let cached = file
            .version_reads
            .as_ref()
            .and_then(|reads| reads.read(&self.reads, offset, dst, || self.started.elapsed().as_secs()));
        match cached {
            Some(data) => Ok(data),
            None => Ok(ReadData::Copied(file.file.read_at(offset, dst)?)),
        }
    }

    /// Writes; returns the number of bytes written.
    pub fn write(&self, handle: HandleRef, write: &FileWrite<'_>, caller: &FsCaller) -> FsResult<usize> {
        let started = Instant::now();
        let file = self.open_nodes.file(handle.ino, handle.fh)?;
        let loses_privileges = write.lose_privileges.then(|| Caller {
            uid: caller.uid,
            gid: caller.gid,
            pid: caller.pid,
            ..Caller::default()
        });
        let written = if self.life.kept().is_some() {
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
        let repeat = self.life.find_repeat(caller);
        if let Some(made) = repeat.and_then(|repeat| repeat.made) {
            return Ok(made.count as usize);
        }
        let is_compared = self.life.repeat_rule().is_some_and(|rule| rule != RepeatRule::Numbers);
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
                None => self.life.note_begun(caller, file.file.stat()?.size),
            }
        }
        let mut written = found;
        if found < write.data.len() {
            written += file.file.write_placed(write.place, write.offset, &write.data[found..], loses_privileges)?;
        }
        self.life.note_made(caller, MadeChange { count: written as u64, object: None });
        Ok(written)
    }

    /// Reports failures of earlier writes, at each `close(2)`, and releases the locks of the process `owner`.
    pub fn flush(&self, ino: u64, fh: u64, owner: u64, caller: &FsCaller<'_>) -> FsResult<()> {
        let file = self.open_nodes.file(ino, fh)?;
        // The bytes first: the next owner of the lock reads them.
        let flushed = if file.writes() && self.is_close(&file, caller) { file.file.flush() } else { Ok(()) };
        self.names.follow_identity(&file);
        // Of a process that has ended, the locks end with the file; the kernel gives the number of the owner to others.
        if !spurline_sys::is_call_left() {
            self.locks.release_process_locks(HandleRef { ino, fh }, owner);
        }
        Ok(flushed?)
    }

    /// Whether a close by this caller counts as the close of the file, where that shows the bytes to others: it is the opener's, and
    /// not that of a redirection which is being set up.
    fn is_close(&self, file: &OpenNodeFile, caller: &FsCaller<'_>) -> bool {
        let Some(opener) = &file.opener else { return true };
        if !opener.counts_close_of(caller.pid) {
            return false;
        }
        let empty = file.file.stat().ok().filter(|attr| attr.size == 0);
        empty.is_none_or(|attr| !has_other_writer(caller.pid, self.names.shown_number(file.ino, &attr)))
    }

    /// Makes a file's changes durable, or its bytes only.
    pub fn fsync(&self, ino: u64, fh: u64, data_only: bool) -> FsResult<()> {
        let file = self.open_nodes.file(ino, fh)?;
        let synced = file.file.sync(data_only);
        self.names.follow_identity(&file);
        Ok(synced?)
    }

    /// Allocates or frees space; `mode` as for `fallocate(2)`.
    pub fn fallocate(&self, ino: u64, fh: u64, mode: u32, offset: u64, len: u64, caller: &FsCaller) -> FsResult<()> {
        self.names.can.check(LimitedCall::Allocate(mode))?;
        let file = self.open_nodes.file(ino, fh)?;
        Ok(self.names.as_caller(caller, false, |caller| file.file.allocate(mode, offset, len, caller))?)
    }

    /// Copies bytes between two open files, within the source where it can.
    pub fn copy_file_range(&self, from: FilePosition, to: FilePosition, len: u64, caller: &FsCaller) -> FsResult<u64> {
        self.names.can.check(LimitedCall::Copy)?;
        let input = self.open_nodes.file(from.file.ino, from.file.fh)?;
        let output = self.open_nodes.file(to.file.ino, to.file.fh)?;
        Ok(self.names.as_caller(caller, false, |caller| {
            input.file.copy_range(from.offset, &*output.file, to.offset, len, caller)
        })?)
    }

    /// The next data or hole.
    pub fn lseek(&self, ino: u64, fh: u64, offset: u64, whence: u32) -> FsResult<u64> {
        self.names.can.check(LimitedCall::Seek)?;
        Ok(self.open_nodes.file(ino, fh)?.file.seek(offset, whence)?)
    }

    /// Opens a directory.
    pub fn opendir(&self, ino: u64, caller: &FsCaller) -> FsResult<u64> {
        if let Some(fh) = self.life.find_opened_handle(caller) {
            return Ok(fh);
        }
        let opened = self.names.on_node(ino, caller, false, |at, caller| self.source.open_directory(at, caller));
        let directory = opened.or_else(|error| match self.removed_directory(ino) {
            Some(removed) if has_lost_name(&error) => Ok(removed),
            _ => Err(error),
        })?;
        // A listing changes the time of access.
        self.names.directory_attrs.drop_attr(ino);
        let open = Arc::new(OpenNodeDirectory { ino, directory, record: AtomicU32::new(0) });
        let Some(fh) = self.open_nodes.directories.insert(Arc::clone(&open)) else {
            return Err(errno_error(libc::ENFILE, "too many open directories"));
        };
        if let Some(life) = self.life.kept() {
            let hold = open.directory.hold();
            if let OpenHold::Descriptor(descriptor) = hold {
                life.files.keep_file(KeptFileKey::Directory(fh), descriptor);
            }
            let request = caller.request.number;
            let owner = [caller.uid, caller.gid];
            let held = hold.at_node();
            let kept = KeptHandle { fh, ino, request, directory: true, owner, held, ..KeptHandle::default() };
            let record = life.records.keep(&KeptRecord::Handle(kept));
            open.record.store(record, Ordering::Relaxed);
        }
        self.stats.fuse.open_handles.add(1);
        Ok(fh)
    }

    /// A directory that this mount has removed, as an open one.
    fn removed_directory(&self, ino: u64) -> Option<Box<dyn WritableDirectory>> {
        RemovedDirectory::find(&self.names.nodes, ino).map(|removed| Box::new(removed) as _)
    }

    /// Closes a directory.
    pub fn releasedir(&self, fh: u64) -> FsResult<()> {
        let open = self.open_nodes.directories.remove(fh).ok_or(FsError::BadHandle(fh))?;
        let record = open.record.load(Ordering::Relaxed);
        drop(open);
        if let Some(life) = self.life.kept() {
            life.files.drop_file(KeptFileKey::Directory(fh));
            life.records.remove_record(record);
        }
        self.stats.fuse.open_handles.sub(1);
        Ok(())
    }

    /// Passes the names that `read` requests to `take`, until it returns false; no name is the end. With
    /// `plus`, each name that could be looked up has its entry, whose lookup count was raised by one; it is lowered
    /// again if `take` refuses the name.
    pub fn readdir(
        &self,
        read: &DirRead,
        caller: &FsCaller,
        take: &mut dyn FnMut(&ListedName, Option<NodeEntry>) -> bool,
    ) -> FsResult<()> {
        let HandleRef { ino, fh } = read.directory;
        let open = self.open_nodes.directory(ino, fh)?;
        // Attributes would make inodes faster than the kernel forgets them.
        let plus = read.plus && !self.names.is_far_over_limit();
        let names: Result<Vec<ListedName>> =
            self.names.as_caller(caller, false, |caller| open.directory.read(read.from, read.names_max, plus, caller));
        for listed in names? {
            let entry = listed.attr.map(|attr| self.names.intern(ino, &listed.name, attr));
            if !take(&listed, entry) {
                if let Some(entry) = entry {
                    self.names.nodes.forget(entry.ino, 1);
                }
                break;
            }
        }
        Ok(())
    }

    /// Makes changes of a directory's names durable.
    pub fn fsyncdir(&self, ino: u64, fh: u64, data_only: bool) -> FsResult<()> {
        Ok(self.open_nodes.directory(ino, fh)?.directory.sync(data_only)?)
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
