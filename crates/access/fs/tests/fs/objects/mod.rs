//! A source in memory for writable file systems. [`ObjectTree`] has the rules of names and bytes, by object and without
//! paths; [`MemorySource`] serves one by path and identity, as a directory does. A test keeps a second tree as its model.
#![allow(dead_code, reason = "each test binary uses its own part")]

use parking_lot::Mutex;
use spurline_fs::writable::WritableConfig;
use spurline_fs::{CreateMode, KernelSide};
use spurline_types::{Error, ErrorKind, ListPage, ObjectAttr, ObjectRef, Result};
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::info::FileInfo;
use spurline_volume::locks::{KnownLock, KnownLocks};
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange, outcome_by_names};
use spurline_volume::writes::*;
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub const ROOT_OBJECT: u64 = 1;
const RENAME_NOREPLACE: u32 = 1;
pub const RENAME_EXCHANGE: u32 = 2;

/// A result with an errno.
pub type Answer<T> = std::result::Result<T, i32>;

#[derive(Clone)]
enum Object {
    Directory(BTreeMap<Vec<u8>, u64>),
    File(Vec<u8>),
}

#[derive(Clone)]
struct Kept {
    object: Object,
    nlink: u32,
    changed: i64,
}

/// Objects by number. A removed one stays, for those that have it open.
#[derive(Clone)]
pub struct ObjectTree {
    objects: HashMap<u64, Kept>,
    last: u64,
    clock: i64,
}

/// A client that is no kernel.
pub const NO_KERNEL: KernelSide<'static> = KernelSide { backings: None, view: None, waits: None };

/// How a file is made that root alone writes.
pub const READ_WRITE: CreateMode = CreateMode { flags: libc::O_RDWR as u32, mode: 0o644 };

/// A mount of root whose names and attributes are valid for a second.
pub fn writable_config(inode_bytes: u64) -> WritableConfig {
    let second = Duration::from_secs(1);
    WritableConfig {
        attr_ttl: second,
        entry_ttl: second,
        dir_entry_ttl: second,
        negative_ttl: second,
        kernel_checks: true,
        inode_bytes,
        max_readahead: 0,
        readahead_budget: 0,
        owner: (0, 0),
        squash: None,
    }
}

impl Default for ObjectTree {
    fn default() -> Self {
        let root = Kept { object: Object::Directory(BTreeMap::new()), nlink: 2, changed: 0 };
        ObjectTree { objects: HashMap::from([(ROOT_OBJECT, root)]), last: ROOT_OBJECT, clock: 0 }
    }
}

impl ObjectTree {
    fn names(&mut self, directory: u64) -> Answer<&mut BTreeMap<Vec<u8>, u64>> {
        match self.objects.get_mut(&directory) {
            Some(Kept { object: Object::Directory(names), nlink: 1.., .. }) => Ok(names),
            Some(Kept { object: Object::File(_), .. }) => Err(libc::ENOTDIR),
            _ => Err(libc::ENOENT),
        }
    }

    pub fn is_directory(&self, object: u64) -> bool {
        matches!(self.objects[&object].object, Object::Directory(_))
    }

    pub fn has_name(&self, object: u64) -> bool {
        self.objects[&object].nlink > 0
    }

    pub fn find(&mut self, directory: u64, name: &[u8]) -> Answer<u64> {
        self.names(directory)?.get(name).copied().ok_or(libc::ENOENT)
    }

    pub fn list(&mut self, directory: u64) -> Answer<Vec<(Vec<u8>, u64)>> {
        Ok(self.names(directory)?.iter().map(|(name, object)| (name.clone(), *object)).collect())
    }

    pub fn make(&mut self, directory: u64, name: &[u8], is_directory: bool) -> Answer<u64> {
        let number = self.last + 1;
        if self.names(directory)?.contains_key(name) {
            return Err(libc::EEXIST);
        }
        self.names(directory)?.insert(name.to_vec(), number);
        (self.last, self.clock) = (number, self.clock + 1);
        let object = if is_directory { Object::Directory(BTreeMap::new()) } else { Object::File(Vec::new()) };
        let nlink = if is_directory { 2 } else { 1 };
        self.objects.insert(number, Kept { object, nlink, changed: self.clock });
        Ok(number)
    }

    pub fn link(&mut self, object: u64, directory: u64, name: &[u8]) -> Answer<u64> {
        if self.is_directory(object) {
            return Err(libc::EPERM);
        }
        if !self.has_name(object) {
            return Err(libc::ENOENT);
        }
        if self.names(directory)?.contains_key(name) {
            return Err(libc::EEXIST);
        }
        self.names(directory)?.insert(name.to_vec(), object);
        self.objects.get_mut(&object).unwrap().nlink += 1;
        Ok(object)
    }

    pub fn remove(&mut self, directory: u64, name: &[u8], is_directory: bool) -> Answer<()> {
        let object = self.find(directory, name)?;
        match (&self.objects[&object].object, is_directory) {
            (Object::Directory(_), false) => return Err(libc::EISDIR),
            (Object::File(_), true) => return Err(libc::ENOTDIR),
            (Object::Directory(names), true) if !names.is_empty() => return Err(libc::ENOTEMPTY),
            _ => {}
        }
        self.names(directory)?.remove(name);
        self.drop_name(object);
        Ok(())
    }

    fn drop_name(&mut self, object: u64) {
        let kept = self.objects.get_mut(&object).unwrap();
        kept.nlink = if matches!(kept.object, Object::Directory(_)) { 0 } else { kept.nlink - 1 };
    }

    fn is_below(&self, object: u64, above: u64) -> bool {
        object == above
            || match &self.objects[&above].object {
                Object::Directory(names) => names.values().any(|name| self.is_below(object, *name)),
                Object::File(_) => false,
            }
    }

    pub fn rename(&mut self, from: (u64, &[u8]), to: (u64, &[u8]), flags: u32) -> Answer<()> {
        let moved = self.find(from.0, from.1)?;
        let other = match self.find(to.0, to.1) {
            Ok(other) => Some(other),
            Err(libc::ENOENT) if self.names(to.0).is_ok() => None,
            Err(errno) => return Err(errno),
        };
        if flags & RENAME_EXCHANGE != 0 && other.is_none() {
            return Err(libc::ENOENT);
        }
        if flags & RENAME_NOREPLACE != 0 && other.is_some() {
            return Err(libc::EEXIST);
        }
        if self.is_below(to.0, moved) {
            return Err(libc::EINVAL);
        }
        if other == Some(moved) {
            return Ok(());
        }
        if let Some(other) = other {
            if self.is_below(from.0, other) {
                return Err(if flags & RENAME_EXCHANGE != 0 { libc::EINVAL } else { libc::ENOTEMPTY });
            }
            if flags & RENAME_EXCHANGE == 0 {
                match (self.is_directory(moved), &self.objects[&other].object) {
                    (true, Object::File(_)) => return Err(libc::ENOTDIR),
                    (false, Object::Directory(_)) => return Err(libc::EISDIR),
                    (true, Object::Directory(names)) if !names.is_empty() => return Err(libc::ENOTEMPTY),
                    _ => {}
                }
                self.drop_name(other);
            }
        }
        self.names(from.0)?.remove(from.1);
        self.names(to.0)?.insert(to.1.to_vec(), moved);
        if let Some(other) = other.filter(|_| flags & RENAME_EXCHANGE != 0) {
            self.names(from.0)?.insert(from.1.to_vec(), other);
        }
        Ok(())
    }

    pub fn read(&self, file: u64, offset: u64, len: usize) -> Answer<&[u8]> {
        match &self.objects[&file].object {
            Object::File(bytes) => {
                let start = (offset as usize).min(bytes.len());
                Ok(&bytes[start..(start + len).min(bytes.len())])
            }
            Object::Directory(_) => Err(libc::EISDIR),
        }
    }

    pub fn write(&mut self, file: u64, offset: u64, data: &[u8]) -> Answer<usize> {
        self.clock += 1;
        let clock = self.clock;
        let kept = self.objects.get_mut(&file).unwrap();
        let Object::File(bytes) = &mut kept.object else { return Err(libc::EISDIR) };
        let end = offset as usize + data.len();
        bytes.resize(bytes.len().max(end), 0);
        bytes[offset as usize..end].copy_from_slice(data);
        kept.changed = clock;
        Ok(data.len())
    }

    pub fn truncate(&mut self, file: u64, len: u64) -> Answer<()> {
        self.clock += 1;
        let clock = self.clock;
        let kept = self.objects.get_mut(&file).unwrap();
        let Object::File(bytes) = &mut kept.object else { return Err(libc::EISDIR) };
        bytes.resize(len as usize, 0);
        kept.changed = clock;
        Ok(())
    }

    pub fn attr(&self, object: u64) -> NodeAttr {
        let kept = &self.objects[&object];
        let (mode, size) = match &kept.object {
            Object::Directory(_) => (S_IFDIR | 0o755, 0),
            Object::File(bytes) => (S_IFREG | 0o644, bytes.len() as u64),
        };
        let changed = FileTime { seconds: kept.changed, nanos: 0 };
        NodeAttr {
            identity: identity_of(object),
            inode: object,
            mode,
            nlink: kept.nlink,
            uid: 0,
            gid: 0,
            rdev: 0,
            size,
            blocks: size.div_ceil(512),
            blksize: 4096,
            atime: changed,
            mtime: changed,
            ctime: changed,
        }
    }
}

pub fn identity_of(object: u64) -> FileIdentity {
    FileIdentity::from_number(object)
}

/// A tree served by path.
#[derive(Default)]
pub struct MemorySource {
    pub tree: Arc<Mutex<ObjectTree>>,
    /// Locks by object. The owner is one of an open file, as for locks of open file descriptions.
    pub locks: Arc<Mutex<HashMap<u64, KnownLocks>>>,
    /// The number of files that were opened.
    pub opened: AtomicU64,
    /// The number of these that a lookup has opened.
    pub opened_by_lookups: AtomicU64,
    /// Directories can't be renamed.
    pub directories_stay: bool,
}

fn failed(errno: i32) -> Error {
    Error::new(ErrorKind::Io(errno), "the source in memory")
}

impl MemorySource {
    /// The object at `at`.
    fn resolve(tree: &mut ObjectTree, at: NodePath<'_>) -> Answer<u64> {
        let mut object = ROOT_OBJECT;
        for name in at.path.split(|byte| *byte == b'/').filter(|name| !name.is_empty()) {
            object = tree.find(object, name)?;
        }
        match at.expected {
            Some(expected) if expected != identity_of(object) => Err(libc::ESTALE),
            _ => Ok(object),
        }
    }

    fn with<T>(&self, run: impl FnOnce(&mut ObjectTree) -> Answer<T>) -> Result<T> {
        run(&mut self.tree.lock()).map_err(failed)
    }

    fn new_file(&self, object: u64) -> Box<dyn WritableFile> {
        let (tree, locks) = (Arc::clone(&self.tree), Arc::clone(&self.locks));
        let number = self.opened.fetch_add(1, Ordering::Relaxed) + 1;
        Box::new(MemoryFile { tree, locks, object, number })
    }
}

impl OpeningLookups for MemorySource {
    fn lookup_open(
        &self,
        at: NamePath<'_>,
        flags: u32,
        caller: &Caller,
    ) -> Result<(NodeAttr, Option<Box<dyn WritableFile>>)> {
        let attr = self.lookup(at, caller)?;
        let path = at.path();
        let file = self.open(NodePath { path: &path, expected: Some(attr.identity) }, flags, caller).ok();
        self.opened_by_lookups.fetch_add(u64::from(file.is_some()), Ordering::Relaxed);
        Ok((attr, file))
    }
}

impl WritableVolume for MemorySource {
    fn capabilities(&self) -> WriteCapabilities {
        WriteCapabilities {
            rename_directory: if self.directories_stay { DirectoryRename::No } else { DirectoryRename::Atomic },
            hard_links: true,
            symlinks: false,
            modes: false,
            xattrs: false,
            acls: false,
            locks: LockScope::Source,
            holes: false,
            copy: false,
            publishes: false,
        }
    }

    fn stat(&self, at: NodePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        self.with(|tree| Self::resolve(tree, at).map(|object| tree.attr(object)))
    }

    fn lookup(&self, at: NamePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        self.with(|tree| {
            let directory = Self::resolve(tree, at.directory)?;
            let object = tree.find(directory, at.name)?;
            Ok(tree.attr(object))
        })
    }

    fn opening_lookups(&self) -> Option<&dyn OpeningLookups> {
        Some(self)
    }

    fn readlink(&self, _at: NodePath<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Err(failed(libc::EINVAL))
    }

    fn access(&self, at: NodePath<'_>, _mask: u32, caller: &Caller) -> Result<()> {
        self.stat(at, caller).map(drop)
    }

    fn open(&self, at: NodePath<'_>, flags: u32, _caller: &Caller) -> Result<Box<dyn WritableFile>> {
        let object = self.with(|tree| {
            let object = Self::resolve(tree, at)?;
            if flags & libc::O_TRUNC as u32 != 0 {
                tree.truncate(object, 0)?;
            }
            if tree.is_directory(object) { Err(libc::EISDIR) } else { Ok(object) }
        })?;
        Ok(self.new_file(object))
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        _mode: u32,
        _caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let (object, attr, directory) = self.with(|tree| {
            let directory = Self::resolve(tree, at.directory)?;
            let object = match tree.make(directory, at.name, false) {
                Err(libc::EEXIST) if flags & libc::O_EXCL as u32 == 0 => tree.find(directory, at.name)?,
                made => made?,
            };
            if tree.is_directory(object) {
                return Err(libc::EISDIR);
            }
            Ok((object, tree.attr(object), tree.attr(directory)))
        })?;
        Ok(CreatedFile { attr, file: self.new_file(object), directory: Some(directory) })
    }

    fn create_unnamed(
        &self,
        _directory: NodePath<'_>,
        _flags: u32,
        _mode: u32,
        _caller: &Caller,
    ) -> Result<(NodeAttr, Box<dyn WritableFile>)> {
        Err(failed(libc::EOPNOTSUPP))
    }

    fn link_open(&self, _file: &dyn WritableFile, _to: NamePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        Err(failed(libc::ENOENT))
    }

    fn open_directory(&self, at: NodePath<'_>, _caller: &Caller) -> Result<Box<dyn WritableDirectory>> {
        let object = self.with(|tree| Self::resolve(tree, at))?;
        Ok(Box::new(MemoryDirectory { tree: Arc::clone(&self.tree), object }))
    }

    fn change_marked(&self, change: &Change<'_>, _: &Caller, _: Option<ChangeMark>) -> Result<Option<NodeAttr>> {
        self.with(|tree| {
            let made = match *change {
                Change::Mkdir { at, .. } => {
                    let directory = Self::resolve(tree, at.directory)?;
                    tree.make(directory, at.name, true)?
                }
                Change::Mknod { at, .. } => {
                    let directory = Self::resolve(tree, at.directory)?;
                    tree.make(directory, at.name, false)?
                }
                Change::Link { from, to } => {
                    let object = Self::resolve(tree, from)?;
                    let directory = Self::resolve(tree, to.directory)?;
                    tree.link(object, directory, to.name)?
                }
                Change::Unlink { at } | Change::Rmdir { at } => {
                    let directory = Self::resolve(tree, at.directory)?;
                    tree.remove(directory, at.name, matches!(change, Change::Rmdir { .. }))?;
                    return Ok(None);
                }
                Change::Rename { from, to, flags } => {
                    let (old, new) = (Self::resolve(tree, from.directory)?, Self::resolve(tree, to.directory)?);
                    tree.rename((old, from.name), (new, to.name), flags)?;
                    return Ok(None);
                }
                Change::SetAttr { of, set } => {
                    let object = Self::resolve(tree, of)?;
                    set.size.map_or(Ok(()), |len| tree.truncate(object, len))?;
                    object
                }
                Change::Symlink { .. } | Change::SetXattr { .. } | Change::RemoveXattr { .. } => {
                    return Err(libc::EOPNOTSUPP);
                }
            };
            Ok(Some(tree.attr(made)))
        })
    }

    fn outcome_of(&self, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        outcome_by_names(self, repeated)
    }

    fn get_xattr(&self, _at: NodePath<'_>, _name: &[u8], _caller: &Caller) -> Result<Vec<u8>> {
        Err(failed(libc::ENODATA))
    }

    fn list_xattr(&self, _at: NodePath<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn space(&self) -> Result<SourceSpace> {
        Err(failed(libc::ENOSYS))
    }

    fn sync_all(&self) -> Result<()> {
        Ok(())
    }
}

struct MemoryFile {
    tree: Arc<Mutex<ObjectTree>>,
    locks: Arc<Mutex<HashMap<u64, KnownLocks>>>,
    object: u64,
    number: u64,
}

impl MemoryFile {
    /// Owners of different open files differ.
    fn own(&self, lock: &FileLock) -> FileLock {
        let owner = if lock.family == LockFamily::Flock { 0 } else { lock.owner };
        FileLock { owner: self.number << 32 | owner, ..*lock }
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let mut locks = self.locks.lock();
        let Some(known) = locks.get_mut(&self.object) else { return };
        let own: Vec<_> =
            known.iter().map(|known| known.lock.owner()).filter(|o| o.number >> 32 == self.number).collect();
        own.into_iter().for_each(|owner| known.remove_owner(owner));
    }
}

impl WritableObject for MemoryFile {
    fn stat(&self) -> Result<NodeAttr> {
        Ok(self.tree.lock().attr(self.object))
    }

    fn set_attr(&self, set: &AttrChange, _caller: &Caller) -> Result<NodeAttr> {
        let mut tree = self.tree.lock();
        set.size.map_or(Ok(()), |len| tree.truncate(self.object, len)).map_err(failed)?;
        Ok(tree.attr(self.object))
    }

    fn call_attr(&self, _call: &OpenAttrCall<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Err(failed(libc::EOPNOTSUPP))
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
}

impl WritableFile for MemoryFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let tree = self.tree.lock();
        let bytes = tree.read(self.object, offset, dst.len()).map_err(failed)?;
        dst[..bytes.len()].copy_from_slice(bytes);
        Ok(bytes.len())
    }

    fn write_placed(&self, _: WritePlace, offset: u64, data: &[u8], _: Option<&Caller>) -> Result<usize> {
        self.tree.lock().write(self.object, offset, data).map_err(failed)
    }

    fn allocate(&self, _mode: u32, _offset: u64, _len: u64, _caller: &Caller) -> Result<()> {
        Err(failed(libc::EOPNOTSUPP))
    }

    fn copy_range(&self, _at: u64, _to: &dyn WritableFile, _to_at: u64, _len: u64, _caller: &Caller) -> Result<u64> {
        Err(failed(libc::EXDEV))
    }

    fn seek(&self, _offset: u64, _whence: u32) -> Result<u64> {
        Err(failed(libc::ENXIO))
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        Ok(self.locks.lock().entry(self.object).or_default().find_conflict(&self.own(lock)))
    }

    fn set_lock(&self, lock: &FileLock, _caller: &Caller) -> Result<()> {
        let mut locks = self.locks.lock();
        let (known, lock) = (locks.entry(self.object).or_default(), self.own(lock));
        if known.find_conflict(&lock).is_some() {
            return Err(failed(libc::EAGAIN));
        }
        known.set_range(KnownLock { lock, pid: 0 });
        Ok(())
    }

    fn reopen(&self, _flags: u32, _caller: &Caller) -> Result<Box<dyn WritableFile>> {
        let (tree, locks) = (Arc::clone(&self.tree), Arc::clone(&self.locks));
        Ok(Box::new(MemoryFile { tree, locks, object: self.object, number: self.number | 1 << 20 }))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct MemoryDirectory {
    tree: Arc<Mutex<ObjectTree>>,
    object: u64,
}

impl WritableObject for MemoryDirectory {
    fn stat(&self) -> Result<NodeAttr> {
        Ok(self.tree.lock().attr(self.object))
    }

    fn set_attr(&self, _set: &AttrChange, _caller: &Caller) -> Result<NodeAttr> {
        self.stat()
    }

    fn call_attr(&self, _call: &OpenAttrCall<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Err(failed(libc::EOPNOTSUPP))
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        Ok(())
    }
}

impl WritableDirectory for MemoryDirectory {
    fn read(&self, from: u64, max: usize, attrs: bool, _caller: &Caller) -> Result<Vec<ListedName>> {
        let mut tree = self.tree.lock();
        let names = match tree.list(self.object) {
            Err(libc::ENOENT) => Vec::new(),
            names => names.map_err(failed)?,
        };
        let listed = names.into_iter().enumerate().skip(from as usize).take(max);
        let listed = listed.map(|(at, (name, object))| {
            let attr = tree.attr(object);
            ListedName {
                name,
                file_type: attr.mode & S_IFMT,
                inode: object,
                next: at as u64 + 1,
                attr: attrs.then_some(attr),
            }
        });
        Ok(listed.collect())
    }
}

/// The reading side, which a writable file system only passes on.
pub struct NoReads;

impl Volume for NoReads {
    fn source(&self) -> &str {
        "file:///memory"
    }

    fn block_size(&self) -> u64 {
        1 << 20
    }

    fn lookup(&self, _path: &[u8]) -> Result<ObjectAttr> {
        Err(failed(libc::ENOENT))
    }

    fn list(&self, _path: &[u8], _cursor: Option<&[u8]>, _max: usize) -> Result<ListPage> {
        Err(failed(libc::ENOENT))
    }

    fn readlink(&self, _path: &[u8]) -> Result<Vec<u8>> {
        Err(failed(libc::ENOENT))
    }

    fn read(&self, _object: &ObjectRef, _offset: u64, _dst: &mut [u8]) -> Result<ReadData> {
        Err(failed(libc::ENOENT))
    }

    fn prefetch(&self, _object: &ObjectRef, _blocks: std::ops::Range<u32>, _piece: usize) {}

    fn capacity(&self) -> Result<VolumeSpace> {
        Err(failed(libc::ENOSYS))
    }

    fn info(&self, _path: &[u8]) -> Result<FileInfo> {
        Err(Error::new(ErrorKind::Unsupported, "no blocks are cached"))
    }
}
