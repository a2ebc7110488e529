//! The calls of the file system and their rules. Inode numbers are decided in `inode`, names in `dir`, errnos in
//! `errno`.

use crate::NAME_MAX;
use crate::attr::{FileAttr, FsConfig, InodeEntry, LookupOutcome, VolumeStat};
use crate::block_reads::{BlockReads, FileReadAhead, ReadAheadLimits};
use crate::errno::{FsError, FsResult};
use crate::following::{FOLLOWED_BYTES, ListingWalks};
use crate::handle::{HandleTable, OpenFileState, OpenHandle, OpenKind};
use crate::inode::{Inode, InodeTable, ROOT};
use crate::inode_limit::LimitAlarm;
use crate::kept_records::{KeptHandle, KeptLife, KeptRecord, KeptRecords};
use crate::name_records::NameRecords;
use crate::open_inodes::OpenInodes;
use crate::page_starts::PageStarts;
use crate::passthrough::{LiveBacking, RegisterBacking, RegisteredBacking};
use crate::service::{FsCaller, OpenedFile};
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, FileKind, ObjectAttr, ObjectRef, Stats};
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Monotonic time since some moment before the file system was made.
pub type FsClock = Box<dyn Fn() -> Duration + Send + Sync>;

/// A mounted volume. Every call may be made from any thread. Calls into the volume block as long as the volume does;
/// they hold no lock other than that of the directory or file in question.
pub struct FileSystem {
    // Field order is drop order: open handles release their backing files before the volume is dropped.
    pub(crate) handles: HandleTable,
    pub(crate) inodes: InodeTable,
    open_inodes: OpenInodes,
    pub(crate) volume: Arc<dyn Volume>,
    pub(crate) config: FsConfig,
    pub(crate) stats: Arc<Stats>,
    pub(crate) starts: PageStarts,
    clock: FsClock,
    reads: BlockReads,
    walks: ListingWalks,
    capacity: Mutex<Option<(Duration, VolumeSpace)>>,
    pub(crate) limit_alarm: LimitAlarm,
    name_records: OnceLock<Arc<dyn NameRecords>>,
    kept_records: OnceLock<Arc<dyn KeptRecords>>,
}

impl FileSystem {
    /// A file system over `volume` with the options of `config`.
    pub fn new(volume: Arc<dyn Volume>, config: FsConfig, stats: Arc<Stats>) -> Self {
        let start = Instant::now();
        Self::with_clock(volume, config, stats, Box::new(move || start.elapsed()))
    }

    /// As [`FileSystem::new`], with a given clock.
    pub fn with_clock(volume: Arc<dyn Volume>, config: FsConfig, stats: Arc<Stats>, clock: FsClock) -> Self {
        let inodes = InodeTable::new(volume.source());
        let limits = ReadAheadLimits { of_reader: config.max_readahead, of_all: config.readahead_budget };
        let reads = BlockReads::new(Arc::clone(&volume), limits);
        stats.fuse.inodes.add(1);
        if config.inode_bytes < u64::MAX {
            stats.fuse.inode_limit_bytes.set(config.inode_bytes);
        }
        let handles = HandleTable::default();
        let walks = ListingWalks::default();
        let capacity = Mutex::default();
        let starts = PageStarts::default();
        let open_inodes = OpenInodes::new();
        let limit_alarm = LimitAlarm::default();
        FileSystem {
            volume,
            config,
            stats,
            starts,
            inodes,
            open_inodes,
            handles,
            clock,
            reads,
            walks,
            capacity,
            limit_alarm,
            name_records: OnceLock::new(),
            kept_records: OnceLock::new(),
        }
    }

    /// Keeps the names of all inodes in the first `records` from now on, and stores the names of the present inodes there: file
    /// handles of an NFS server are resolved by them.
    pub fn keep_names(&self, records: Arc<dyn NameRecords>) {
        let records = self.name_records.get_or_init(|| records);
        self.inodes.for_each(|inode| records.record_name(inode.ino, ROOT, inode.path()));
    }

    /// The path of an inode below the source, for logs; `None` once the kernel has forgotten it.
    pub fn path_of(&self, ino: u64) -> Option<Vec<u8>> {
        Some(self.inodes.get(ino)?.path().to_vec())
    }

    /// The file system's options.
    pub fn config(&self) -> &FsConfig {
        &self.config
    }

    /// The underlying volume.
    pub fn volume(&self) -> &Arc<dyn Volume> {
        &self.volume
    }

    /// The number of inodes referenced by the kernel, the root included.
    pub fn known_inodes(&self) -> usize {
        self.inodes.len()
    }

    pub(crate) fn now(&self) -> Duration {
        (self.clock)()
    }

    pub(crate) fn live_inode(&self, ino: u64) -> FsResult<Arc<Inode>> {
        self.inodes.get(ino).ok_or(FsError::Stale(ino))
    }

    /// The inode of `path` with `attr`, seen at `at`. Raises its lookup count by one.
    pub(crate) fn intern_inode(&self, path: &[u8], attr: &ObjectAttr, at: Duration) -> Arc<Inode> {
        let (inode, new) = self.inodes.intern_path(path, attr, at, || self.open_inode(path, attr));
        if new {
            if let Some(records) = self.name_records.get() {
                records.record_name(inode.ino, ROOT, path);
            }
            self.stats.fuse.inodes.add(1);
            self.stats.fuse.inode_bytes.add(inode.memory_bytes());
            if self.inodes.bytes() > self.config.inode_bytes {
                self.limit_alarm.raise();
            }
        }
        inode
    }

    /// The inode of an open file at `path` that has, or continues with, the version of `attr`.
    fn open_inode(&self, path: &[u8], attr: &ObjectAttr) -> Option<Arc<Inode>> {
        let inode = self.open_inodes.find_open(self.inodes.path_id(path))?;
        (inode.path() == path && self.try_grow(&inode, attr)).then_some(inode)
    }

    /// Whether `inode` has the version of `attr`, or continues with it from now on: the file only grew while it was
    /// open in cached mode, and every block served so far is the same in both versions. Reads those blocks.
    fn try_grow(&self, inode: &Inode, attr: &ObjectAttr) -> bool {
        if inode.matches(attr) {
            return true;
        }
        let Some(growth) = inode.growth().filter(|_| inode.kind == attr.kind) else { return false };
        let id = self.inodes.object_id(inode.path(), attr);
        let cached_opens = || Some(inode.opens.lock()).filter(|opens| opens.is_cached());
        let published = growth.try_publish(&*self.volume, inode.first(), id, attr, cached_opens);
        if published {
            self.inodes.keep_growth(inode);
        }
        published
    }

    /// Looks the path of an open file up, and continues with its version if the file only grew.
    fn follow_growth(&self, inode: &Inode) -> bool {
        let at = self.now();
        match self.volume.lookup(inode.path()) {
            Ok(attr) if self.try_grow(inode, &attr) => {
                inode.refresh_attr(&attr, at);
                true
            }
            _ => false,
        }
    }

    /// Finds `name` in the directory `parent`, `.` and `..` included. Raises the lookup count of the inode found;
    /// [`FileSystem::forget`] lowers it.
    ///
    /// # Errors
    /// `Stale` for a forgotten parent, `NotADirectory`, `NameTooLong`, or an error of the volume.
    pub fn lookup(&self, parent: u64, name: &[u8]) -> FsResult<LookupOutcome> {
        let dir = match self.inodes.get(parent) {
            Some(dir) => dir,
            None => return self.lookup_forgotten(parent, name),
        };
        match name {
            b"." => return self.lookup_itself(parent, dir.path()),
            b".." => return self.lookup_path(parent_of(dir.path())),
            b"" => return Err(FsError::Invalid("an empty name")),
            _ if name.len() > NAME_MAX => return Err(FsError::NameTooLong),
            _ if name.contains(&b'/') || name.contains(&0) => {
                return Err(FsError::Invalid("a name with a slash or a NUL in it"));
            }
            _ => {}
        }
        if dir.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        with_child(dir.path(), name, |path| self.lookup_path(path))
    }

    /// Finds an inode that the kernel has forgotten: it asks for `.` or `..` of a file handle.
    fn lookup_forgotten(&self, ino: u64, name: &[u8]) -> FsResult<LookupOutcome> {
        let path = self.name_records.get().and_then(|records| records.find_path(ino)).ok_or(FsError::Stale(ino))?;
        match name {
            b"." => self.lookup_itself(ino, &path),
            b".." => self.lookup_path(parent_of(&path)),
            _ => Err(FsError::Stale(ino)),
        }
    }

    /// Finds the inode `ino` at its path; absent if the path has another one by now.
    fn lookup_itself(&self, ino: u64, path: &[u8]) -> FsResult<LookupOutcome> {
        match self.lookup_path(path)? {
            LookupOutcome::Found(entry) if entry.attr.ino != ino => {
                self.forget(entry.attr.ino, 1);
                Ok(LookupOutcome::Absent { ttl: Duration::ZERO })
            }
            outcome => Ok(outcome),
        }
    }

    fn lookup_path(&self, path: &[u8]) -> FsResult<LookupOutcome> {
        let at = self.now();
        let answer = self.volume.lookup(path);
        // The volume's result may be as old as the request.
        let age = self.now().saturating_sub(at);
        let attr = match answer {
            Ok(attr) => attr,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(LookupOutcome::Absent { ttl: self.config.negative_ttl.saturating_sub(age) });
            }
            Err(error) => return Err(error.into()),
        };
        if path.is_empty() && attr.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        let inode = self.intern_inode(path, &attr, at);
        Ok(LookupOutcome::Found(inode.lookup_entry(&self.config, age)))
    }

    /// Lowers the lookup count of `ino` by `n`. At zero the number becomes invalid for good; open handles stay valid.
    pub fn forget(&self, ino: u64, n: u64) {
        if let Some(bytes) = self.inodes.forget_lookups(ino, n) {
            self.stats.fuse.inodes.sub(1);
            self.stats.fuse.inode_bytes.sub(bytes);
        }
    }

    /// Attributes of an inode, and how long they are valid. A file's attributes belong to its version. A directory's
    /// are looked up again when they are older than the attribute cache time.
    ///
    /// # Errors
    /// `Stale` for an inode that was forgotten (unless `fh` has it open) or is no longer a directory.
    pub fn getattr(&self, ino: u64, fh: Option<u64>) -> FsResult<(FileAttr, Duration)> {
        let inode = match self.inodes.get(ino) {
            Some(inode) => inode,
            None => {
                let handle = fh.and_then(|fh| self.handles.get(fh)).filter(|handle| handle.inode.ino == ino);
                Arc::clone(&handle.ok_or(FsError::Stale(ino))?.inode)
            }
        };
        let mut ttl = self.config.attr_ttl;
        if inode.kind == FileKind::Directory {
            self.revalidate(&inode)?;
            ttl = ttl.saturating_sub(self.now().saturating_sub(inode.seen_at()));
        }
        // A program that follows a growing file polls the size of its descriptor.
        if inode.growth().is_some() && self.now() >= inode.seen_at() + ttl && inode.opens.lock().is_cached() {
            self.follow_growth(&inode);
        }
        Ok((inode.file_attr(&self.config), ttl))
    }

    /// Verifies that the path held this inode within the attribute cache time.
    fn revalidate(&self, inode: &Inode) -> FsResult<()> {
        let at = self.now();
        // The root starts without attributes of its own, so time 0 means "never seen".
        let seen = inode.seen_at();
        if seen > Duration::ZERO && at < seen + self.config.attr_ttl {
            return Ok(());
        }
        match self.volume.lookup(inode.path()) {
            Ok(attr) if inode.may_match(&attr) => {
                inode.refresh_attr(&attr, at.max(Duration::from_nanos(1)));
                Ok(())
            }
            Ok(attr) if self.try_grow(inode, &attr) => {
                inode.refresh_attr(&attr, at);
                Ok(())
            }
            Ok(_) => Err(FsError::Stale(inode.ino)),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                Err(FsError::Stale(inode.ino))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Opens a file with the flags of `open(2)`. With `register`, the kernel may read a file directly that is cached
    /// in full. Cached pages of an inode stay valid for the inode's whole life.
    ///
    /// # Errors
    /// `ReadOnly` for every form of write access, `IsADirectory`, `NotADirectory` for `O_DIRECTORY`. `Stale` when the
    /// path now holds another version or nothing: the kernel then looks the path up again.
    pub fn open(&self, ino: u64, flags: i32, register: Option<&dyn RegisterBacking>) -> FsResult<OpenedFile> {
        let inode = self.live_inode(ino)?;
        match inode.kind {
            FileKind::Directory => return Err(FsError::IsADirectory),
            _ if flags & libc::O_DIRECTORY != 0 => return Err(FsError::NotADirectory),
            FileKind::Symlink => return Err(FsError::Invalid("a symbolic link can't be opened")),
            FileKind::File => {}
        }
        if flags & libc::O_ACCMODE != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
            return Err(FsError::ReadOnly);
        }
        self.revalidate(&inode)?;
        let direct = flags & libc::O_DIRECT != 0;
        let mut opens = inode.opens.lock();
        let object = inode.current();
        let register = register.filter(|_| object.size >= self.config.passthrough_min.max(1));
        let backing = opens.count_open(&*self.volume, &object, register, direct);
        drop(opens);
        if backing.is_none() {
            self.stats.fuse.inode_bytes.add(self.inodes.prepare_growth(&inode));
            self.open_inodes.add_open(self.inodes.path_id(inode.path()), &inode);
        }
        let readahead = if backing.is_none() { self.reads.open_file(object.size) } else { FileReadAhead::none() };
        drop(object);
        self.fetch_following(&inode);
        if backing.is_some() {
            self.stats.fuse.passthrough_opens.add(1);
        }
        let open = OpenFileState { readahead, backing: backing.clone() };
        let fh = self.insert_handle(OpenHandle::new(inode, OpenKind::File(open)))?;
        // An inode's bytes never change.
        Ok(OpenedFile { fh, keep_cache: true, backing, ..OpenedFile::default() })
    }

    /// Fetches the files that a reader of this file's folder opens next.
    fn fetch_following(&self, opened: &Arc<Inode>) {
        if self.config.max_readahead == 0 {
            return;
        }
        for next in self.walks.note_open(opened, &self.inodes) {
            let object = next.current();
            let blocks = u32::try_from(object.block_count(self.reads.block_size())).unwrap_or(0);
            self.stats.blockcache.followed_files.add(1);
            self.volume.prefetch(&object, 0..blocks, 0);
        }
    }

    pub(crate) fn insert_handle(&self, handle: OpenHandle) -> FsResult<u64> {
        let handle = Arc::new(handle);
        let Some(fh) = self.handles.insert(Arc::clone(&handle)) else {
            self.close_handle(&handle);
            return Err(Error::new(ErrorKind::Io(libc::ENFILE), "too many open files").into());
        };
        self.stats.fuse.open_handles.add(1);
        if let Some(records) = self.kept_records.get() {
            let backing_id = handle.backing().map_or(0, |backing| backing.id());
            let kept = KeptHandle { fh, ino: handle.inode.ino, backing_id, ..KeptHandle::default() };
            let slot = records.keep(&KeptRecord::Handle(kept));
            handle.record.store(slot, Ordering::Relaxed);
        }
        Ok(fh)
    }

    /// Keeps inodes and handles from now on, and continues with those of the processes before. To be called before the first
    /// request.
    pub fn keep_life(&self, life: &KeptLife<'_>) {
        let records = &life.records;
        self.handles.set_takeovers(life.takeovers);
        if life.takeovers > 0 {
            records.for_each(&mut |slot, record| {
                let is_adopted = match record {
                    // Twice, if a process ended between the record of a grown file and the removal of the earlier record.
                    KeptRecord::Inode(kept) => {
                        let is_new = self.inodes.adopt(slot, kept);
                        self.stats.fuse.inodes.add(u64::from(is_new));
                        is_new
                    }
                    KeptRecord::Handle(kept) => self.adopt_handle(slot, kept, life.register),
                    _ => false,
                };
                if !is_adopted {
                    records.remove_record(slot);
                }
            });
            self.stats.fuse.inode_bytes.add(self.inodes.bytes());
        }
        self.inodes.keep_records(records);
        let _ = self.kept_records.set(Arc::clone(records));
    }

    fn adopt_handle(&self, slot: u32, kept: &KeptHandle, register: Option<&dyn RegisterBacking>) -> bool {
        let Some(inode) = self.inodes.get(kept.ino) else { return false };
        let open = if inode.kind == FileKind::Directory {
            OpenKind::Dir(Mutex::default())
        } else {
            let mut opens = inode.opens.lock();
            let backing = match kept.backing_id {
                0 => None,
                id => opens
                    .live_backing()
                    .or_else(|| self.adopt_backing(&inode.current(), register?.adopt_registration(id)?)),
            };
            opens.adopt_open(backing.clone());
            drop(opens);
            if kept.backing_id == 0 {
                self.inodes.prepare_growth(&inode);
                if let Some(growth) = inode.growth() {
                    // Which blocks the processes before have served is not known.
                    growth.record_served(0..u32::MAX - 1);
                }
                self.open_inodes.add_open(self.inodes.path_id(inode.path()), &inode);
            }
            let readahead =
                if backing.is_none() { self.reads.open_file(inode.current().size) } else { FileReadAhead::none() };
            OpenKind::File(OpenFileState { readahead, backing })
        };
        let handle = OpenHandle::new(inode, open);
        handle.record.store(slot, Ordering::Relaxed);
        let adopted = self.handles.adopt(kept.fh, Arc::new(handle));
        if adopted {
            self.stats.fuse.open_handles.add(1);
        }
        adopted
    }

    /// The file behind a registration of a process before. The kernel has that file open, whether or not it is in the cache still.
    fn adopt_backing(&self, object: &ObjectRef, registered: Box<dyn RegisteredBacking>) -> Option<Arc<LiveBacking>> {
        let kept: Box<dyn Send + Sync> = match self.volume.backing(object) {
            Some(backing) => backing.close(),
            None => Box::new(()),
        };
        Some(Arc::new(LiveBacking::new(registered, kept)))
    }

    /// Reads up to `dst.len()` bytes from `offset`; less only at the end of the file. A cache hit allocates nothing
    /// and holds no lock during the copy.
    ///
    /// # Errors
    /// `BadHandle`; `IsADirectory`; `Stale` when the version is gone from the origin and is not in the cache; an
    /// error of the volume.
    pub fn read(&self, ino: u64, fh: u64, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        let handle = self.handles.get(fh).filter(|handle| handle.inode.ino == ino).ok_or(FsError::BadHandle(fh))?;
        let OpenKind::File(file) = &handle.open else { return Err(FsError::IsADirectory) };
        loop {
            let (generation, data) = self.read_current(&handle.inode, file, offset, dst);
            let same = || handle.inode.growth().is_none_or(|growth| growth.generation() == generation);
            match data {
                // The file grew meanwhile: these bytes may belong to blocks that were not compared.
                _ if !same() => {}
                // A reader who never queries the attributes of a growing file learns of its new version here.
                Err(FsError::Stale(_)) if self.follow_growth(&handle.inode) && !same() => {}
                data => return data,
            }
        }
    }

    /// Reads from the present version of a file; also returns its generation.
    fn read_current(
        &self,
        inode: &Inode,
        file: &OpenFileState,
        offset: u64,
        dst: &mut [u8],
    ) -> (u64, FsResult<ReadData>) {
        let growth = inode.growth();
        let generation = growth.map_or(0, |growth| growth.generation());
        let object = &*inode.current();
        let len = usize::try_from(object.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(dst.len());
        if len == 0 {
            return (generation, Ok(ReadData::Copied(0)));
        }
        if let Some(growth) = growth {
            let block = |at: u64| u32::try_from(at / self.reads.block_size()).unwrap_or(u32::MAX - 1);
            growth.record_served(block(offset)..block(offset + len as u64 - 1) + 1);
        }
        let began = (offset == 0 && object.size <= FOLLOWED_BYTES && inode.next_listed().is_some()).then(|| self.now());
        let data = self.reads.read(object, &file.readahead, offset, &mut dst[..len], || self.now().as_secs());
        if let Some(began) = began {
            self.walks.note_read(self.now().saturating_sub(began));
        }
        let data = data.map_err(|error| match error.kind() {
            // A deleted object is a version that no longer exists.
            ErrorKind::NotFound | ErrorKind::Stale => FsError::Stale(inode.ino),
            _ => error.into(),
        });
        (generation, data)
    }

    /// Closes a file or a directory.
    ///
    /// # Errors
    /// `BadHandle` when it is not open.
    pub fn release(&self, fh: u64) -> FsResult<()> {
        let handle = self.handles.remove(fh).ok_or(FsError::BadHandle(fh))?;
        self.stats.fuse.open_handles.sub(1);
        if let Some(records) = self.kept_records.get() {
            records.remove_record(handle.record());
        }
        self.close_handle(&handle);
        Ok(())
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// `NotADirectory`; `Stale` for an inode that was forgotten.
    pub fn opendir(&self, ino: u64) -> FsResult<u64> {
        let inode = self.live_inode(ino)?;
        if inode.kind != FileKind::Directory {
            return Err(FsError::NotADirectory);
        }
        self.insert_handle(OpenHandle::new(inode, OpenKind::Dir(Mutex::default())))
    }

    /// Target of a symbolic link.
    ///
    /// # Errors
    /// `Invalid` for any other kind of file; `Stale`; an error of the volume.
    pub fn readlink(&self, ino: u64) -> FsResult<Vec<u8>> {
        let inode = self.live_inode(ino)?;
        if inode.kind != FileKind::Symlink {
            return Err(FsError::Invalid("not a symbolic link"));
        }
        match self.volume.readlink(inode.path()) {
            // The path now holds another kind of file, or nothing.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Invalid) => Err(FsError::Stale(ino)),
            answer => Ok(answer?),
        }
    }

    /// Whether the mode bits grant `mask` (`R_OK`, `W_OK`, `X_OK`) to the caller. Root may read all files,
    /// search all directories, and execute a file with any execute bit. Without [`FsConfig::check_modes`] all users
    /// may.
    ///
    /// # Errors
    /// `ReadOnly` for `W_OK`; `AccessDenied`; `Stale`.
    pub fn access(&self, ino: u64, mask: i32, caller: &FsCaller<'_>) -> FsResult<()> {
        let inode = self.live_inode(ino)?;
        if mask & libc::W_OK != 0 {
            return Err(FsError::ReadOnly);
        }
        let attr = inode.file_attr(&self.config);
        let bits = if caller.uid == 0 || !self.config.check_modes {
            let any = attr.mode >> 6 | attr.mode >> 3 | attr.mode | 4;
            if inode.kind == FileKind::Directory { any | 1 } else { any }
        } else if caller.uid == attr.uid {
            attr.mode >> 6
        } else if caller.is_member(attr.gid) {
            attr.mode >> 3
        } else {
            attr.mode
        };
        let wanted = mask & (libc::R_OK | libc::X_OK);
        if i32::from(bits) & wanted == wanted { Ok(()) } else { Err(FsError::AccessDenied) }
    }

    /// The volume's size. The volume is queried at most once per [`FsConfig::statfs_ttl`].
    ///
    /// # Errors
    /// An error of the volume, unless an earlier query succeeded.
    pub fn statfs(&self) -> FsResult<VolumeStat> {
        let now = self.now();
        let held = *self.capacity.lock();
        let capacity = match held {
            Some((at, capacity)) if now < at + self.config.statfs_ttl => capacity,
            _ => match (self.volume.capacity(), held) {
                (Ok(capacity), _) => {
                    *self.capacity.lock() = Some((now, capacity));
                    capacity
                }
                // People run `df` when something is wrong: the last known size helps more than an error.
                (Err(_), Some((_, capacity))) => capacity,
                (Err(error), None) => return Err(error.into()),
            },
        };
        let block_size = 4096;
        Ok(VolumeStat {
            block_size,
            blocks: capacity.total_bytes / u64::from(block_size),
            free: capacity.free_bytes / u64::from(block_size),
            files: capacity.files,
            files_free: capacity.files_free,
            name_max: NAME_MAX as u32,
        })
    }

    /// The lookup result of an inode, `age` after the volume reported it.
    pub(crate) fn inode_entry(&self, inode: &Inode, age: Duration) -> InodeEntry {
        inode.lookup_entry(&self.config, age)
    }

    fn close_handle(&self, handle: &OpenHandle) {
        let OpenKind::File(file) = &handle.open else { return };
        // The lock is released before the backing file: withdrawing it from the kernel is slow.
        let unused = handle.inode.opens.lock().count_release(file.backing.is_some());
        drop(unused);
        if file.backing.is_none() {
            self.open_inodes.remove_closed(self.inodes.path_id(handle.inode.path()), &handle.inode);
        }
    }

    /// The inode number of the parent directory of `path`.
    pub(crate) fn parent_number(&self, path: &[u8]) -> u64 {
        self.inodes.directory_ino(parent_of(path)).unwrap_or(ROOT)
    }
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        self.stats.fuse.inodes.sub(self.inodes.len() as u64);
        self.stats.fuse.inode_bytes.sub(self.inodes.bytes());
    }
}

pub(crate) fn parent_of(path: &[u8]) -> &[u8] {
    path.iter().rposition(|byte| *byte == b'/').map_or(b"", |slash| &path[..slash])
}

/// Calls `f` with the path of `name` in `dir`, built in a thread-local buffer.
pub(crate) fn with_child<T>(dir: &[u8], name: &[u8], f: impl FnOnce(&[u8]) -> T) -> T {
    thread_local!(static PATH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) });
    let mut path = PATH.take();
    path.clear();
    path.extend_from_slice(dir);
    if !dir.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
    let answer = f(&path);
    PATH.set(path);
    answer
}
