//! The inode table: which number belongs to which path at which version, and for how long. It calls no volume and
//! knows no handles.

use crate::attr::{FileAttr, FsConfig, InodeEntry};
use crate::growth::{EtagForm, GrownVersion, InodeGrowth};
use crate::kept_records::{KeptInode, KeptRecord, KeptRecords, KeptVersion, RecordSlot};
use crate::passthrough::OpenModes;
use parking_lot::{Mutex, RwLock};
use spurline_types::{FileKind, ObjectAttr, ObjectId, ObjectRef, Version};
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

/// The root's inode number.
pub const ROOT: u64 = 1;

/// A number that no inode has: 32-bit programs would take it for "unknown".
const NO_INO: u64 = 0xffff_ffff;

/// The low bits of an inode number select its shard, so that number and path are found under one lock.
const SHARD_BITS: u32 = 6;
const SHARDS: usize = 1 << SHARD_BITS;

/// Memory of an inode without its texts: itself, and its share of both maps, which are between half and nearly full.
const INODE_BYTES: usize = size_of::<Inode>() + 2 * HEAP_BYTES + 80;
/// Memory of the growth of an inode that was opened.
const GROWTH_BYTES: usize = size_of::<InodeGrowth>() + 16;
/// Memory of the counters and the allocator's header and rounding of a text.
const HEAP_BYTES: usize = 32;

/// Memory of the record of an inode without its texts, with the rounding of its length.
const RECORD_BYTES: usize = 128;

/// The lookup key of an inode: the hash of source, path and version, with one bit flipped for a symbolic link so that
/// it never matches a file. Two halves, because a `u128` would pad every entry of the map.
type InodeKey = (u64, u64);

fn key_of(kind: FileKind, id: ObjectId) -> InodeKey {
    let low = id.0 as u64;
    let high = (id.0 >> 64) as u64;
    match kind {
        FileKind::Symlink => (low, high ^ 1 << 63),
        FileKind::File | FileKind::Directory => (low, high),
    }
}

/// The number of the inode with this key and length: the same in every mount of the source, so that an NFS server's file
/// handles outlive a mount. Two inodes that the kernel references at the same time have different numbers all the same.
fn number_of(key: InodeKey, size: u64) -> u64 {
    // The low bits select the shard.
    usable_number(key.0 ^ (size.wrapping_mul(0x9e37_79b9_7f4a_7c15) << SHARD_BITS))
}

/// An inode number made of a hash.
pub(crate) fn usable_number(hash: u64) -> u64 {
    // The sign is left out: languages without unsigned numbers would show it.
    match hash & i64::MAX as u64 {
        n @ (0 | ROOT | NO_INO) => n | 1 << 40,
        n => n,
    }
}

/// One file at one version, one directory, or one symbolic link at one version.
pub struct Inode {
    /// The inode number.
    pub ino: u64,
    /// File, directory or symbolic link.
    pub kind: FileKind,
    /// The first version; only the path is meaningful for a directory.
    object: ObjectRef,
    /// The etag of the first version.
    etag: EtagForm,
    /// Later versions that continue the first, for a file that was opened.
    growth: OnceLock<Box<InodeGrowth>>,
    /// Number of references held by the kernel.
    lookup_count: AtomicU64,
    /// The record that outlives this process; 0 for none.
    record: AtomicU32,
    seen: Mutex<SeenAttr>,
    pub(crate) opens: Mutex<OpenModes>,
}

/// The version that an inode has at present.
pub enum CurrentVersion<'a> {
    First(&'a Inode),
    Grown(Arc<GrownVersion>),
}

impl CurrentVersion<'_> {
    /// The etag, if the origin has one.
    pub fn etag(&self) -> Option<&str> {
        match self {
            CurrentVersion::First(inode) => inode.etag.text(&inode.object),
            CurrentVersion::Grown(grown) => grown.etag.text(&grown.object),
        }
    }
}

impl Deref for CurrentVersion<'_> {
    type Target = ObjectRef;
    fn deref(&self) -> &ObjectRef {
        match self {
            CurrentVersion::First(inode) => &inode.object,
            CurrentVersion::Grown(grown) => &grown.object,
        }
    }
}

/// The attributes that may change while the bytes do not.
#[derive(Clone, Copy)]
struct SeenAttr {
    mtime: SystemTime,
    mode: u16,
    /// When the volume last reported this inode at its path, by the file system's clock.
    at: Duration,
}

impl Inode {
    fn new(ino: u64, object: ObjectRef, attr: &ObjectAttr, at: Duration) -> Self {
        let etag = EtagForm::of_attr(attr);
        let growth = OnceLock::new();
        let seen = Mutex::new(SeenAttr { mtime: attr.mtime, mode: attr.mode, at });
        let lookup_count = AtomicU64::new(0);
        let opens = Mutex::default();
        let record = AtomicU32::new(0);
        Inode { ino, kind: attr.kind, object, etag, growth, lookup_count, record, seen, opens }
    }

    /// Distinguishes inodes that have the same number in different mounts; 32 bits, as the kernel stores them.
    pub fn generation(&self) -> u64 {
        if self.ino == ROOT { 0 } else { key_of(self.kind, self.object.id).1 >> 32 }
    }

    /// The version in which the file was first seen.
    pub fn first(&self) -> &ObjectRef {
        &self.object
    }

    /// The path below the source.
    pub fn path(&self) -> &[u8] {
        &self.object.path
    }

    /// The version that the inode has at present: the first one, or a longer one.
    pub fn current(&self) -> CurrentVersion<'_> {
        let grown = self.growth.get().and_then(|growth| growth.current());
        grown.map_or(CurrentVersion::First(self), CurrentVersion::Grown)
    }

    /// The growth of a file that was opened in cached mode.
    pub fn growth(&self) -> Option<&InodeGrowth> {
        self.growth.get().map(|growth| &**growth)
    }

    /// Prepares a file for growth, at an open in cached mode; true at the first.
    fn prepare_growth(&self) -> bool {
        let mut first = false;
        self.growth.get_or_init(|| {
            first = true;
            Box::new(InodeGrowth::new())
        });
        first
    }

    /// Whether `attr`, seen at this inode's path, is this inode.
    pub fn matches(&self, attr: &ObjectAttr) -> bool {
        if self.kind != attr.kind {
            return false;
        }
        if self.kind == FileKind::Directory {
            return true;
        }
        let current = self.current();
        current.size == attr.size && current.version == attr.version
    }

    /// Whether this inode may be opened when its path shows `attr`. While a file is being written, the origin marks
    /// each observation as a version of its own.
    pub fn may_match(&self, attr: &ObjectAttr) -> bool {
        self.matches(attr)
            || (self.kind == attr.kind
                && attr.version.is_unsettled()
                && attr.version.settled_text() == self.current().version.settled_text())
    }

    /// Stores the report of the volume at `at`; ignores a report older than the last.
    pub fn refresh_attr(&self, attr: &ObjectAttr, at: Duration) {
        let mut seen = self.seen.lock();
        if at >= seen.at {
            *seen = SeenAttr { mtime: attr.mtime, mode: attr.mode, at };
        }
    }

    /// Keeps the inode for a successor of this process.
    fn keep(&self, records: &dyn KeptRecords) -> RecordSlot {
        let seen = *self.seen.lock();
        let grown = self.growth.get().and_then(|growth| growth.current());
        records.keep(&KeptRecord::Inode(KeptInode {
            ino: self.ino,
            kind: self.kind,
            lookups: self.lookups(),
            mtime: seen.mtime,
            mode: seen.mode,
            path: self.path(),
            first: kept_version(&self.object, &self.etag),
            grown: grown.as_ref().map(|grown| kept_version(&grown.object, &grown.etag)),
        }))
    }

    /// When the volume last reported this inode at its path.
    pub fn seen_at(&self) -> Duration {
        self.seen.lock().at
    }

    /// The memory that this inode takes, its names in the table included, in bytes; at most a tenth too few.
    pub fn memory_bytes(&self) -> u64 {
        let etag = if let EtagForm::Other(etag) = &self.etag { etag.len() } else { 0 };
        let version =
            if self.kind == FileKind::Directory { 0 } else { HEAP_BYTES + self.object.version.as_str().len() };
        let growth = if self.growth.get().is_some() { GROWTH_BYTES } else { 0 };
        let kept = if self.record.load(Ordering::Relaxed) == 0 {
            0
        } else {
            RECORD_BYTES + self.object.path.len() + self.object.version.as_str().len() + etag
        };
        (INODE_BYTES + HEAP_BYTES + self.object.path.len() + version + etag + growth + kept) as u64
    }

    /// Number of references held by the kernel.
    pub fn lookups(&self) -> u64 {
        self.lookup_count.load(Ordering::Relaxed)
    }

    /// The result of `stat`.
    pub fn file_attr(&self, config: &FsConfig) -> FileAttr {
        let seen = *self.seen.lock();
        let size = self.current().size;
        FileAttr {
            ino: self.ino,
            kind: self.kind,
            size,
            blocks: size.div_ceil(512),
            mtime: config.shown_time(self.kind, seen.mtime),
            mode: config.shown_mode(self.kind, seen.mode),
            // For a directory, 1 means that its subdirectories are not counted; 2 would mean that it has none.
            nlink: 1,
            uid: config.uid,
            gid: config.gid,
            blksize: config.blksize,
        }
    }

    /// The result of a lookup that found this inode `age` ago.
    pub fn lookup_entry(&self, config: &FsConfig, age: Duration) -> InodeEntry {
        InodeEntry {
            attr: self.file_attr(config),
            generation: self.generation(),
            entry_ttl: config.name_ttl(self.kind).saturating_sub(age),
            attr_ttl: config.attr_ttl.saturating_sub(age),
        }
    }
}

fn kept_version<'a>(object: &'a ObjectRef, etag: &'a EtagForm) -> KeptVersion<'a> {
    KeptVersion { size: object.size, version: object.version.as_str(), etag: etag.text(object) }
}

/// All inodes referenced by the kernel.
pub struct InodeTable {
    source: String,
    no_version: Version,
    root: Arc<Inode>,
    shards: Box<[InodeShard]>,
    /// Memory of the inodes in the shards.
    bytes: AtomicU64,
    /// Where inodes are kept for a successor of this process.
    records: OnceLock<Arc<dyn KeptRecords>>,
}

#[derive(Default)]
struct InodeShard {
    tables: RwLock<InodeMaps>,
}

#[derive(Default)]
struct InodeMaps {
    by_ino: HashMap<u64, Arc<Inode>, MixBuildHasher>,
    by_key: HashMap<InodeKey, Arc<Inode>, MixBuildHasher>,
}

impl InodeTable {
    /// A table with the root of `source` only.
    pub fn new(source: &str) -> Self {
        let no_version = Version::new("");
        let attr = ObjectAttr {
            kind: FileKind::Directory,
            size: 0,
            mtime: SystemTime::UNIX_EPOCH,
            mode: 0o555,
            version: no_version.clone(),
            etag: None,
        };
        let object = ObjectRef::new(source, b"", no_version.clone(), 0);
        let root = Arc::new(Inode::new(ROOT, object, &attr, Duration::ZERO));
        let shards = (0..SHARDS).map(|_| InodeShard::default()).collect();
        let bytes = AtomicU64::new(0);
        InodeTable { source: source.to_owned(), no_version, root, shards, bytes, records: OnceLock::new() }
    }

    /// The inode with number `ino`, if the kernel still references it.
    pub fn get(&self, ino: u64) -> Option<Arc<Inode>> {
        if ino == ROOT {
            return Some(Arc::clone(&self.root));
        }
        self.shard_of(ino).tables.read().by_ino.get(&ino).cloned()
    }

    /// The number of the inode of `path` with these attributes, which the kernel need not reference.
    pub fn number_of(&self, path: &[u8], attr: &ObjectAttr) -> u64 {
        let size = if attr.kind == FileKind::Directory { 0 } else { attr.size };
        self.find_known(path, attr)
            .map_or_else(|| number_of(key_of(attr.kind, self.object_id(path, attr)), size), |inode| inode.ino)
    }

    /// The number of the directory at `path`, if the kernel references one.
    pub fn directory_ino(&self, path: &[u8]) -> Option<u64> {
        if path.is_empty() {
            return Some(ROOT);
        }
        let key = key_of(FileKind::Directory, ObjectId::new(&self.source, path, &self.no_version));
        let tables = self.shard_of(key.0).tables.read();
        tables.by_key.get(&key).filter(|inode| inode.path() == path).map(|inode| inode.ino)
    }

    fn find_known(&self, path: &[u8], attr: &ObjectAttr) -> Option<Arc<Inode>> {
        if path.is_empty() && attr.kind == FileKind::Directory {
            return Some(Arc::clone(&self.root));
        }
        let key = key_of(attr.kind, self.object_id(path, attr));
        self.shard_of(key.0).tables.read().find_matching(key, path, attr).cloned()
    }

    /// The inode of `path` with these attributes, seen at `at`: existing or new. Raises its lookup count by one. The
    /// second value is true for a new inode. `open_inode` may return an open inode of the path that continues with
    /// this version; it is called without a lock, and only before a new inode is made.
    pub fn intern_path(
        &self,
        path: &[u8],
        attr: &ObjectAttr,
        at: Duration,
        open_inode: impl FnOnce() -> Option<Arc<Inode>>,
    ) -> (Arc<Inode>, bool) {
        if path.is_empty() && attr.kind == FileKind::Directory {
            self.root.refresh_attr(attr, at);
            return (Arc::clone(&self.root), false);
        }
        let id = self.object_id(path, attr);
        let key = key_of(attr.kind, id);
        let shard = self.shard_of(key.0);
        {
            let tables = shard.tables.read();
            if let Some(inode) = tables.find_matching(key, path, attr) {
                // Counted under the lock: `forget` removes under the write lock and checks the count again.
                self.add_lookup(inode);
                let inode = Arc::clone(inode);
                drop(tables);
                inode.refresh_attr(attr, at);
                return (inode, false);
            }
        }
        if attr.kind == FileKind::File
            && let Some(inode) = open_inode()
            && self.count_lookup(&inode)
        {
            inode.refresh_attr(attr, at);
            return (inode, false);
        }
        let version = if attr.kind == FileKind::Directory { self.no_version.clone() } else { attr.version.clone() };
        let size = if attr.kind == FileKind::Directory { 0 } else { attr.size };
        let object = ObjectRef { id, path: path.into(), version, size };
        let mut inode = Inode::new(number_of(key, size), object, attr, at);
        let mut tables = shard.tables.write();
        if let Some(faster) = tables.find_matching(key, path, attr) {
            self.add_lookup(faster);
            let faster = Arc::clone(faster);
            drop(tables);
            faster.refresh_attr(attr, at);
            return (faster, false);
        }
        // An equal hash, or an inode with an older key of this path.
        while tables.by_ino.contains_key(&inode.ino) {
            inode.ino += SHARDS as u64;
        }
        *inode.lookup_count.get_mut() = 1;
        if let Some(records) = self.records.get() {
            *inode.record.get_mut() = inode.keep(&**records);
        }
        let inode = Arc::new(inode);
        self.bytes.fetch_add(inode.memory_bytes(), Ordering::Relaxed);
        tables.by_ino.insert(inode.ino, Arc::clone(&inode));
        tables.by_key.insert(key, Arc::clone(&inode));
        (inode, true)
    }

    /// Raises the lookup count of an inode by one; false if the kernel has forgotten it.
    fn count_lookup(&self, inode: &Inode) -> bool {
        let tables = self.shard_of(inode.ino).tables.read();
        let known = tables.by_ino.get(&inode.ino);
        known.is_some_and(|inode| self.add_lookup(inode) < u64::MAX)
    }

    /// Raises the lookup count of an inode by one; returns the count before.
    fn add_lookup(&self, inode: &Inode) -> u64 {
        if let Some(records) = self.records.get() {
            records.add_lookup(inode.record.load(Ordering::Relaxed));
        }
        inode.lookup_count.fetch_add(1, Ordering::Relaxed)
    }

    /// Keeps all inodes in `records` from now on. To be called before the first request.
    pub fn keep_records(&self, records: &Arc<dyn KeptRecords>) {
        let _ = self.records.set(Arc::clone(records));
    }

    /// Takes over an inode of the process before; false if its number is in use.
    pub fn adopt(&self, slot: RecordSlot, kept: &KeptInode<'_>) -> bool {
        let attr = ObjectAttr {
            kind: kept.kind,
            size: kept.first.size,
            mtime: kept.mtime,
            mode: kept.mode,
            version: Version::new(kept.first.version),
            etag: kept.first.etag.map(Into::into),
        };
        let id = self.object_id(kept.path, &attr);
        let key = key_of(kept.kind, id);
        let object = ObjectRef { id, path: kept.path.into(), version: attr.version.clone(), size: attr.size };
        // Seen long ago: the next request looks at the source.
        let mut inode = Inode::new(kept.ino, object, &attr, Duration::ZERO);
        *inode.lookup_count.get_mut() = kept.lookups.max(1);
        *inode.record.get_mut() = slot;
        if let Some(grown) = &kept.grown {
            let attr = ObjectAttr {
                size: grown.size,
                version: Version::new(grown.version),
                etag: grown.etag.map(Into::into),
                ..attr
            };
            let id = self.object_id(kept.path, &attr);
            let object = ObjectRef { id, path: kept.path.into(), version: attr.version.clone(), size: attr.size };
            inode.prepare_growth();
            if let Some(growth) = inode.growth() {
                growth.adopt(GrownVersion { object, etag: EtagForm::of_attr(&attr) });
            }
        }
        let mut tables = self.shard_of(kept.ino).tables.write();
        if tables.by_ino.contains_key(&kept.ino) {
            return false;
        }
        let inode = Arc::new(inode);
        self.bytes.fetch_add(inode.memory_bytes(), Ordering::Relaxed);
        tables.by_ino.insert(inode.ino, Arc::clone(&inode));
        tables.by_key.insert(key, inode);
        true
    }

    /// Keeps the present version of an inode that grew.
    pub fn keep_growth(&self, inode: &Inode) {
        let Some(records) = self.records.get() else { return };
        // Under the lock no reference is added, which the copy of the count would miss, and no inode is forgotten.
        let tables = self.shard_of(inode.ino).tables.write();
        if !tables.by_ino.get(&inode.ino).is_some_and(|known| std::ptr::eq(&**known, inode)) {
            return;
        }
        // Of two records of an inode, either is right: the readers so far had bytes of both.
        let earlier = inode.record.swap(inode.keep(&**records), Ordering::Relaxed);
        records.remove_record(earlier);
    }

    /// The object id of a path without a version.
    pub fn path_id(&self, path: &[u8]) -> ObjectId {
        ObjectId::new(&self.source, path, &self.no_version)
    }

    /// Lowers the lookup count by `n`; returns the memory of the inode when it was removed.
    pub fn forget_lookups(&self, ino: u64, n: u64) -> Option<u64> {
        if ino == ROOT {
            return None;
        }
        let shard = self.shard_of(ino);
        {
            let tables = shard.tables.read();
            let inode = tables.by_ino.get(&ino)?;
            // Saturating: a kernel that forgets more than it looked up must not make the inode immortal.
            let before = inode
                .lookup_count
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |lookups| Some(lookups.saturating_sub(n)));
            if let Some(records) = self.records.get() {
                records.sub_lookups(inode.record.load(Ordering::Relaxed), n);
            }
            if before.is_ok_and(|before| before > n) {
                return None;
            }
        }
        let mut tables = shard.tables.write();
        if tables.by_ino.get(&ino).is_none_or(|inode| inode.lookups() > 0) {
            return None;
        }
        let gone = tables.remove_ino(ino);
        // Freed after the lock is released: the last reference may close a backing file.
        drop(tables);
        let gone = gone?;
        if let Some(records) = self.records.get() {
            records.remove_record(gone.record.load(Ordering::Relaxed));
        }
        let bytes = gone.memory_bytes();
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        Some(bytes)
    }

    /// Prepares a file for growth, at an open in cached mode; returns the memory that this takes.
    pub fn prepare_growth(&self, inode: &Inode) -> u64 {
        let bytes = if inode.prepare_growth() { GROWTH_BYTES as u64 } else { 0 };
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        bytes
    }

    /// Memory of all inodes but the root, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Calls `f` with every inode but the root. Inodes that are added or removed meanwhile may be left out.
    pub fn for_each(&self, mut f: impl FnMut(&Arc<Inode>)) {
        for shard in &self.shards {
            shard.tables.read().by_ino.values().for_each(&mut f);
        }
    }

    /// The number of inodes, the root included.
    pub fn len(&self) -> usize {
        1 + self.shards.iter().map(|shard| shard.tables.read().by_ino.len()).sum::<usize>()
    }

    fn shard_of(&self, bits: u64) -> &InodeShard {
        &self.shards[bits as usize & (SHARDS - 1)]
    }

    /// The object id of `path` with these attributes.
    pub fn object_id(&self, path: &[u8], attr: &ObjectAttr) -> ObjectId {
        let version = if attr.kind == FileKind::Directory { &self.no_version } else { &attr.version };
        ObjectId::new(&self.source, path, version)
    }
}

impl InodeMaps {
    /// The inode of a key, if path and attributes match too: equal hashes are not proof of equal names.
    fn find_matching(&self, key: InodeKey, path: &[u8], attr: &ObjectAttr) -> Option<&Arc<Inode>> {
        self.by_key.get(&key).filter(|inode| inode.path() == path && inode.matches(attr))
    }

    fn remove_ino(&mut self, ino: u64) -> Option<Arc<Inode>> {
        let inode = self.by_ino.remove(&ino)?;
        let key = key_of(inode.kind, inode.object.id);
        if self.by_key.get(&key).is_some_and(|current| current.ino == ino) {
            self.by_key.remove(&key);
        }
        // Tables shrink after a walk over millions of names.
        if self.by_ino.capacity() > 1024 && self.by_ino.len() < self.by_ino.capacity() / 8 {
            let room = self.by_ino.len() * 2;
            self.by_ino.shrink_to(room);
            self.by_key.shrink_to(room);
        }
        Some(inode)
    }
}

/// Hashes numbers that are already hashes or counters, with one multiplication.
type MixBuildHasher = BuildHasherDefault<MixHasher>;

#[derive(Default)]
struct MixHasher(u64);

impl Hasher for MixHasher {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }
    fn write_u64(&mut self, n: u64) {
        // The odd constant nearest 2^64 / golden ratio spreads a counter over the high bits, from which the map takes
        // its tags. The shift brings them down to its bucket bits.
        let product = (self.0 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }
}
