//! A writable directory in memory that the processes of several hosts share: names and bytes are seen by all at once, and the
//! bytes of a host that no sync covered end with its power. Locks end with the process that has them. Why not a real
//! directory: a seed decides everything here, also what a host loses and how long a call takes.

use super::hosts::{SimSource, SourceOfProcess};
use crate::sim::{SOURCE, Under};
use crate::world::Dice;
use parking_lot::Mutex;
use spurline_origin::OriginStore;
use spurline_types::errno::{
    EAGAIN, EEXIST, EINVAL, EIO, EISDIR, ENODATA, ENOENT, ENOSYS, ENOTDIR, EOPNOTSUPP, ESTALE,
};
use spurline_types::open_flags::{O_APPEND, O_DSYNC, O_EXCL, O_TRUNC};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::Volume;
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::locks::{KnownLock, KnownLocks};
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange, mark_access_time, outcome_by_names};
use spurline_volume::writes::*;
use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// The number of the root, which is the only directory with names in it.
const ROOT_OBJECT: u64 = 1;

type Answer<T> = std::result::Result<T, i32>;

fn failed(errno: i32) -> Error {
    Error::new(ErrorKind::Io(errno), "the source in memory")
}

/// A change of the bytes of a file.
struct LoggedChange {
    host: usize,
    durable: bool,
    change: ByteChange,
}

enum ByteChange {
    Write { offset: usize, data: Vec<u8> },
    Cut(usize),
}

impl ByteChange {
    fn apply(&self, bytes: &mut Vec<u8>) {
        match self {
            ByteChange::Cut(size) => bytes.resize(*size, 0),
            ByteChange::Write { offset, data } => {
                let end = offset + data.len();
                bytes.resize(bytes.len().max(end), 0);
                bytes[*offset..end].copy_from_slice(data);
            }
        }
    }
}

#[derive(Default)]
struct SourceObject {
    is_directory: bool,
    names: u32,
    bytes: Vec<u8>,
    /// Durable bytes, and the changes since, of which some may be durable.
    base: Vec<u8>,
    log: Vec<LoggedChange>,
    changed: i64,
    atime: FileTime,
    locks: KnownLocks,
    /// The process of each open file.
    opened: BTreeMap<u64, u64>,
}

impl SourceObject {
    fn change_bytes(&mut self, logged: LoggedChange) {
        logged.change.apply(&mut self.bytes);
        self.log.push(logged);
        self.fold_log();
    }

    /// What another host uses leaves the caches of all others, as in a cluster file system.
    fn use_from(&mut self, host: usize) {
        self.log.iter_mut().filter(|logged| logged.host != host).for_each(|logged| logged.durable = true);
        self.fold_log();
    }

    fn make_durable(&mut self, host: usize) {
        self.log.iter_mut().filter(|logged| logged.host == host).for_each(|logged| logged.durable = true);
        self.fold_log();
    }

    fn fold_log(&mut self) {
        let first_lost = self.log.iter().position(|logged| !logged.durable).unwrap_or(self.log.len());
        for logged in self.log.drain(..first_lost) {
            logged.change.apply(&mut self.base);
        }
    }

    /// The host loses its power.
    fn lose_host(&mut self, host: usize) {
        self.log.retain(|logged| logged.durable || logged.host != host);
        self.fold_log();
        self.bytes = self.base.clone();
        for logged in &self.log {
            logged.change.apply(&mut self.bytes);
        }
    }

    fn close(&mut self, opened: u64) {
        if self.opened.remove(&opened).is_some() {
            let owners: Vec<_> = self.locks.iter().map(|known| known.lock.owner()).collect();
            for owner in owners.into_iter().filter(|owner| owner.number >> 32 == opened) {
                self.locks.remove_owner(owner);
            }
        }
    }
}

#[derive(Default)]
struct SourceState {
    names: BTreeMap<Vec<u8>, u64>,
    objects: BTreeMap<u64, SourceObject>,
    last_object: u64,
    last_opened: u64,
    clock: i64,
    /// The running processes.
    processes: BTreeSet<u64>,
    last_process: u64,
}

impl SourceState {
    fn resolve(&self, at: NodePath<'_>) -> Answer<u64> {
        let object = if at.path.is_empty() { ROOT_OBJECT } else { *self.names.get(at.path).ok_or(ENOENT)? };
        match at.expected {
            Some(expected) if expected != identity_of(object) => Err(ESTALE),
            _ => Ok(object),
        }
    }

    /// The name, in the root.
    fn name<'a>(&self, at: NamePath<'a>) -> Answer<&'a [u8]> {
        if self.resolve(at.directory)? == ROOT_OBJECT { Ok(at.name) } else { Err(ENOTDIR) }
    }

    fn find(&self, name: &[u8]) -> Answer<u64> {
        self.names.get(name).copied().ok_or(ENOENT)
    }

    fn object(&mut self, number: u64) -> Answer<&mut SourceObject> {
        self.objects.get_mut(&number).ok_or(ESTALE)
    }

    fn use_object(&mut self, number: u64, host: usize) -> Answer<&mut SourceObject> {
        let object = self.object(number)?;
        object.use_from(host);
        Ok(object)
    }

    fn make(&mut self, name: &[u8], is_directory: bool) -> Answer<u64> {
        if self.names.contains_key(name) {
            return Err(EEXIST);
        }
        self.last_object += 1;
        self.clock += 1;
        let new = SourceObject { is_directory, names: 1, changed: self.clock, ..SourceObject::default() };
        self.objects.insert(self.last_object, new);
        self.names.insert(name.to_vec(), self.last_object);
        Ok(self.last_object)
    }

    fn remove_name(&mut self, name: &[u8]) {
        if let Some(number) = self.names.remove(name) {
            self.drop_name(number);
        }
    }

    fn drop_name(&mut self, number: u64) {
        if let Some(object) = self.objects.get_mut(&number) {
            object.names -= 1;
        }
        self.forget_unused(number);
    }

    fn forget_unused(&mut self, number: u64) {
        if self.objects.get(&number).is_some_and(|object| object.names == 0 && object.opened.is_empty()) {
            self.objects.remove(&number);
        }
    }

    fn remove(&mut self, name: &[u8], is_directory: bool) -> Answer<()> {
        let number = self.find(name)?;
        match (self.object(number)?.is_directory, is_directory) {
            (true, false) => Err(EISDIR),
            (false, true) => Err(ENOTDIR),
            _ => {
                self.remove_name(name);
                Ok(())
            }
        }
    }

    fn rename(&mut self, from: &[u8], to: &[u8], flags: u32) -> Answer<()> {
        let moved = self.find(from)?;
        if flags != 0 {
            return Err(EINVAL);
        }
        let replaced = self.names.get(to).copied();
        if replaced == Some(moved) {
            return Ok(());
        }
        if let Some(replaced) = replaced {
            match (self.object(moved)?.is_directory, self.object(replaced)?.is_directory) {
                (true, false) => return Err(ENOTDIR),
                (false, true) => return Err(EISDIR),
                _ => self.remove_name(to),
            }
        }
        self.names.remove(from);
        self.names.insert(to.to_vec(), moved);
        Ok(())
    }

    fn link(&mut self, number: u64, name: &[u8]) -> Answer<u64> {
        if self.names.contains_key(name) {
            return Err(EEXIST);
        }
        let object = self.object(number)?;
        if object.names == 0 {
            return Err(ENOENT);
        }
        object.names += 1;
        self.names.insert(name.to_vec(), number);
        Ok(number)
    }

    fn attr(&self, number: u64) -> NodeAttr {
        let root = SourceObject { is_directory: true, names: 2, ..SourceObject::default() };
        let object = self.objects.get(&number).unwrap_or(&root);
        let mode = if object.is_directory { S_IFDIR | 0o755 } else { S_IFREG | 0o644 };
        let changed = FileTime { seconds: object.changed, nanos: 0 };
        NodeAttr {
            identity: identity_of(number),
            inode: number,
            mode,
            nlink: object.names,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: object.bytes.len() as u64,
            blocks: (object.bytes.len() as u64).div_ceil(512),
            blksize: 4096,
            atime: object.atime,
            mtime: changed,
            ctime: changed,
        }
    }

    fn write(&mut self, number: u64, logged: LoggedChange) -> Answer<()> {
        self.clock += 1;
        let clock = self.clock;
        let object = self.object(number)?;
        object.changed = clock;
        object.change_bytes(logged);
        Ok(())
    }

    fn set_attr(&mut self, number: u64, host: usize, set: &AttrChange) -> Answer<()> {
        if let Some(size) = set.size {
            let change = ByteChange::Cut(size as usize);
            // As a server does that changes attributes at once.
            self.write(number, LoggedChange { host, durable: true, change })?;
        }
        if let Some(NewTime::At(time)) = set.atime {
            self.object(number)?.atime = time;
        }
        Ok(())
    }
}

fn identity_of(object: u64) -> FileIdentity {
    FileIdentity::from_number(object)
}

/// The directory. Cheap to clone.
#[derive(Clone, Default)]
pub struct SharedSource {
    state: Arc<Mutex<SourceState>>,
    /// How much later the answer of a call comes than its effect.
    pub latency: Arc<Mutex<Duration>>,
}

impl SharedSource {
    pub fn new() -> SharedSource {
        let source = SharedSource::default();
        source.state.lock().last_object = ROOT_OBJECT;
        source
    }

    /// The bytes of a file by its name.
    pub fn content(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.state.lock();
        let number = state.names.get(name.as_bytes())?;
        state.objects.get(number).map(|object| object.bytes.clone())
    }

    /// The names of files that are open, and of removed files their numbers: for messages.
    pub fn open_names(&self) -> Vec<String> {
        let state = self.state.lock();
        let opened = state.objects.iter().filter(|(_, object)| !object.opened.is_empty());
        let name_of = |number: &u64| state.names.iter().find(|(_, named)| *named == number);
        opened
            .map(|(number, object)| {
                let name = name_of(number)
                    .map_or(format!("removed {number}"), |(name, _)| String::from_utf8_lossy(name).into());
                format!("{name} {:?}", object.opened)
            })
            .collect()
    }

    /// Numbers of open files and of locks.
    pub fn in_use(&self) -> (usize, usize) {
        let state = self.state.lock();
        let opened = state.objects.values().map(|object| object.opened.len()).sum();
        (opened, state.objects.values().map(|object| object.locks.iter().count()).sum())
    }
}

impl SimSource for SharedSource {
    fn url(&self) -> &'static str {
        SOURCE
    }

    fn start_process(&self, host: usize) -> Arc<dyn SourceOfProcess> {
        let mut state = self.state.lock();
        state.last_process += 1;
        let process = state.last_process;
        state.processes.insert(process);
        Arc::new(ProcessSource { source: self.clone(), process, host })
    }

    fn disturb(&self, dice: &mut Dice) -> String {
        let latency = Duration::from_millis([0, 1, 20, 300][dice.below(4)]);
        *self.latency.lock() = latency;
        format!("the source takes {latency:?}")
    }

    fn heal(&self) {
        *self.latency.lock() = Duration::ZERO;
    }
}

/// The directory as one process has it.
#[derive(Clone)]
pub struct ProcessSource {
    source: SharedSource,
    process: u64,
    host: usize,
}

impl ProcessSource {
    fn call<T>(&self, run: impl FnOnce(&mut SourceState) -> Answer<T>) -> Result<T> {
        let mut state = self.source.state.lock();
        if !state.processes.contains(&self.process) {
            return Err(failed(EIO));
        }
        let answer = run(&mut state);
        drop(state);
        let latency = *self.source.latency.lock();
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
        answer.map_err(failed)
    }

    fn make_change(&self, change: &Change<'_>) -> Result<Option<NodeAttr>> {
        self.call(|state| {
            let number = match *change {
                Change::Mkdir { at, .. } => {
                    let name = state.name(at)?;
                    state.make(name, true)?
                }
                Change::Mknod { at, .. } => {
                    let name = state.name(at)?;
                    state.make(name, false)?
                }
                Change::Link { from, to } => {
                    let (number, name) = (state.resolve(from)?, state.name(to)?);
                    state.link(number, name)?
                }
                Change::Unlink { at } => {
                    let name = state.name(at)?;
                    return state.remove(name, false).map(|()| None);
                }
                Change::Rmdir { at } => {
                    let name = state.name(at)?;
                    return state.remove(name, true).map(|()| None);
                }
                Change::Rename { from, to, flags } => {
                    let (from, to) = (state.name(from)?, state.name(to)?);
                    return state.rename(from, to, flags).map(|()| None);
                }
                Change::SetAttr { of, set } => {
                    let number = state.resolve(of)?;
                    state.set_attr(number, self.host, &set)?;
                    number
                }
                Change::Symlink { .. } | Change::SetXattr { .. } | Change::RemoveXattr { .. } => {
                    return Err(EOPNOTSUPP);
                }
            };
            Ok(Some(state.attr(number)))
        })
    }

    fn open_object(&self, state: &mut SourceState, number: u64, flags: u32) -> Answer<MemoryFile> {
        if number == ROOT_OBJECT || state.object(number)?.is_directory {
            return Err(EISDIR);
        }
        if flags & O_TRUNC != 0 {
            state.set_attr(number, self.host, &AttrChange { size: Some(0), ..AttrChange::default() })?;
        }
        state.last_opened += 1;
        let opened = state.last_opened;
        state.object(number)?.opened.insert(opened, self.process);
        Ok(MemoryFile { process: self.clone(), object: number, opened, flags })
    }
}

impl SourceOfProcess for ProcessSource {
    fn open_reads(&self) -> Result<Arc<dyn OriginStore>> {
        Ok(Arc::new(Under::default()))
    }

    fn open_writes(&self, _: &Arc<dyn Volume>) -> Result<Arc<dyn WritableVolume>> {
        Ok(Arc::new(self.clone()))
    }

    fn end(&self, power: bool) {
        // Its files are closed. With its power a host loses what no sync covered.
        let mut state = self.source.state.lock();
        state.processes.remove(&self.process);
        let numbers: Vec<u64> = state.objects.keys().copied().collect();
        for number in numbers {
            let Some(object) = state.objects.get_mut(&number) else { continue };
            let opened: Vec<u64> =
                object.opened.iter().filter(|(_, by)| **by == self.process).map(|(opened, _)| *opened).collect();
            opened.into_iter().for_each(|opened| object.close(opened));
            if power {
                object.lose_host(self.host);
            }
            state.forget_unused(number);
        }
    }
}

impl WritableVolume for ProcessSource {
    fn capabilities(&self) -> WriteCapabilities {
        WriteCapabilities {
            rename_directory: DirectoryRename::Atomic,
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

    fn stat(&self, at: NodePath<'_>, _: &Caller) -> Result<NodeAttr> {
        self.call(|state| state.resolve(at).map(|number| state.attr(number)))
    }

    fn lookup(&self, at: NamePath<'_>, _: &Caller) -> Result<NodeAttr> {
        self.call(|state| state.name(at).and_then(|name| state.find(name)).map(|number| state.attr(number)))
    }

    fn readlink(&self, _: NodePath<'_>, _: &Caller) -> Result<Vec<u8>> {
        Err(failed(EINVAL))
    }

    fn access(&self, at: NodePath<'_>, _: u32, caller: &Caller) -> Result<()> {
        self.stat(at, caller).map(drop)
    }

    fn open(&self, at: NodePath<'_>, flags: u32, _: &Caller) -> Result<Box<dyn WritableFile>> {
        let opened = self.call(|state| {
            let number = state.resolve(at)?;
            self.open_object(state, number, flags)
        })?;
        Ok(Box::new(opened))
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        _: u32,
        _: &Caller,
        mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let (mut attr, file) = self.call(|state| {
            let name = state.name(at)?;
            let number = match state.make(name, false) {
                Err(EEXIST) if flags & O_EXCL == 0 => state.find(name)?,
                made => made?,
            };
            let file = self.open_object(state, number, flags)?;
            Ok((state.attr(number), file))
        })?;
        if let Some(mark) = mark.filter(|_| flags & O_EXCL != 0) {
            attr = mark_access_time(self, &at, attr, mark);
        }
        Ok(CreatedFile { attr, file: Box::new(file), directory: None })
    }

    fn create_unnamed(&self, _: NodePath<'_>, _: u32, _: u32, _: &Caller) -> Result<(NodeAttr, Box<dyn WritableFile>)> {
        Err(failed(EOPNOTSUPP))
    }

    fn link_open(&self, _: &dyn WritableFile, _: NamePath<'_>, _: &Caller) -> Result<NodeAttr> {
        Err(failed(ENOENT))
    }

    fn open_directory(&self, at: NodePath<'_>, _: &Caller) -> Result<Box<dyn WritableDirectory>> {
        let number = self.call(|state| state.resolve(at))?;
        if number != ROOT_OBJECT {
            return Err(failed(ENOTDIR));
        }
        Ok(Box::new(MemoryDirectory(self.clone())))
    }

    fn change_marked(&self, change: &Change<'_>, _: &Caller, mark: Option<ChangeMark>) -> Result<Option<NodeAttr>> {
        let attr = self.make_change(change)?;
        Ok(match (attr, change.new_name(), mark) {
            (Some(attr), Some(at), Some(mark)) => Some(mark_access_time(self, at, attr, mark)),
            _ => attr,
        })
    }

    fn outcome_of(&self, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        outcome_by_names(self, repeated)
    }

    fn get_xattr(&self, _: NodePath<'_>, _: &[u8], _: &Caller) -> Result<Vec<u8>> {
        Err(failed(ENODATA))
    }

    fn list_xattr(&self, _: NodePath<'_>, _: &Caller) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn space(&self) -> Result<SourceSpace> {
        Err(failed(ENOSYS))
    }

    fn sync_all(&self) -> Result<()> {
        self.call(|state| {
            state.objects.values_mut().for_each(|object| object.make_durable(self.host));
            Ok(())
        })
    }
}

struct MemoryFile {
    process: ProcessSource,
    object: u64,
    opened: u64,
    flags: u32,
}

impl MemoryFile {
    /// Owners of different open files differ.
    fn own(&self, lock: &FileLock) -> FileLock {
        let owner = if lock.family == LockFamily::Flock { 0 } else { lock.owner };
        FileLock { owner: self.opened << 32 | owner, ..*lock }
    }

    /// The object; the open file of a process that has ended has none.
    fn call<T>(&self, run: impl FnOnce(&mut SourceState, u64) -> Answer<T>) -> Result<T> {
        self.process.call(|state| run(state, self.object))
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        let mut state = self.process.source.state.lock();
        if let Some(object) = state.objects.get_mut(&self.object) {
            object.close(self.opened);
        }
        state.forget_unused(self.object);
    }
}

impl WritableObject for MemoryFile {
    fn sync(&self, _: bool) -> Result<()> {
        let host = self.process.host;
        self.call(|state, number| {
            state.object(number)?.make_durable(host);
            Ok(())
        })
    }

    fn stat(&self) -> Result<NodeAttr> {
        let host = self.process.host;
        self.call(|state, number| {
            state.use_object(number, host)?;
            Ok(state.attr(number))
        })
    }

    fn set_attr(&self, set: &AttrChange, _: &Caller) -> Result<NodeAttr> {
        let host = self.process.host;
        self.call(|state, number| {
            state.set_attr(number, host, set)?;
            Ok(state.attr(number))
        })
    }

    fn call_attr(&self, _: &OpenAttrCall<'_>, _: &Caller) -> Result<Vec<u8>> {
        Err(failed(ENODATA))
    }
}

impl WritableFile for MemoryFile {
    fn read_at(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let host = self.process.host;
        self.call(|state, number| {
            let bytes = &state.use_object(number, host)?.bytes;
            let start = (offset as usize).min(bytes.len());
            let len = dst.len().min(bytes.len() - start);
            dst[..len].copy_from_slice(&bytes[start..start + len]);
            Ok(len)
        })
    }

    fn write_placed(&self, place: WritePlace, offset: u64, data: &[u8], _: Option<&Caller>) -> Result<usize> {
        let appends = match place {
            WritePlace::AsOpened => self.flags & O_APPEND != 0,
            WritePlace::End => true,
            WritePlace::Offset | WritePlace::MappedPages => false,
        };
        let durable = self.flags & O_DSYNC != 0;
        self.call(|state, number| {
            let end = state.use_object(number, self.process.host)?.bytes.len();
            let offset = if appends { end } else { offset as usize };
            let change = ByteChange::Write { offset, data: data.to_vec() };
            state.write(number, LoggedChange { host: self.process.host, durable, change })?;
            Ok(data.len())
        })
    }

    fn allocate(&self, _: u32, _: u64, _: u64, _: &Caller) -> Result<()> {
        Err(failed(EOPNOTSUPP))
    }

    fn copy_range(&self, _: u64, _: &dyn WritableFile, _: u64, _: u64, _: &Caller) -> Result<u64> {
        Err(failed(EOPNOTSUPP))
    }

    fn seek(&self, _: u64, _: u32) -> Result<u64> {
        Err(failed(EINVAL))
    }

    fn flush(&self) -> Result<()> {
        Ok(())
    }

    fn test_lock(&self, lock: &FileLock) -> Result<Option<LockConflict>> {
        let lock = self.own(lock);
        self.call(|state, number| Ok(state.object(number)?.locks.find_conflict(&lock)))
    }

    fn set_lock(&self, lock: &FileLock, _: &Caller) -> Result<()> {
        let lock = self.own(lock);
        self.call(|state, number| {
            let locks = &mut state.object(number)?.locks;
            if locks.find_conflict(&lock).is_some() {
                return Err(EAGAIN);
            }
            locks.set_range(KnownLock { lock, pid: 0 });
            Ok(())
        })
    }

    fn reopen(&self, flags: u32, _: &Caller) -> Result<Box<dyn WritableFile>> {
        let opened = self.call(|state, number| self.process.open_object(state, number, flags & !O_TRUNC))?;
        Ok(Box::new(opened))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct MemoryDirectory(ProcessSource);

impl WritableObject for MemoryDirectory {
    fn sync(&self, _: bool) -> Result<()> {
        Ok(())
    }

    fn stat(&self) -> Result<NodeAttr> {
        self.0.call(|state| Ok(state.attr(ROOT_OBJECT)))
    }

    fn set_attr(&self, _: &AttrChange, _: &Caller) -> Result<NodeAttr> {
        Err(failed(EOPNOTSUPP))
    }

    fn call_attr(&self, _: &OpenAttrCall<'_>, _: &Caller) -> Result<Vec<u8>> {
        Err(failed(ENODATA))
    }
}

impl WritableDirectory for MemoryDirectory {
    fn read(&self, from: u64, max: usize, attrs: bool, _: &Caller) -> Result<Vec<ListedName>> {
        self.0.call(|state| {
            let names = state.names.iter().enumerate().skip(from as usize).take(max);
            let listed = names.map(|(at, (name, number))| {
                let attr = state.attr(*number);
                ListedName {
                    name: name.clone(),
                    file_type: attr.mode & S_IFMT,
                    inode: *number,
                    next: at as u64 + 1,
                    attr: attrs.then_some(attr),
                }
            });
            Ok(listed.collect())
        })
    }
}
