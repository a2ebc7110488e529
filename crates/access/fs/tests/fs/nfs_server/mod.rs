//! The calls of an NFSv3 server (RFC 1813) over a [`FileService`], without sockets and encodings. The server keeps nothing
//! between two calls: neither lookup counts, nor open files, nor open directories.

use spurline_fs::{
    CreateMode, DirName, DirRead, FileEntry, FileService, FileWrite, FsCaller, FsResult, HandleRef, KernelSide,
    LookupOutcome, NewNode, ROOT, StatAttr,
};
use spurline_volume::ReadData;
use spurline_volume::writes::{AttrChange, FileTime, NewTime, SourceSpace, WritePlace};
use std::sync::Arc;

/// `NFS3ERR_NOT_SYNC`: the object has changed since the client saw the time that guards a SETATTR.
pub const NOT_SYNC: i32 = 10002;
/// Names per READDIRPLUS of these tests.
pub const PAGE_NAMES: usize = 3;

/// An answer, or the errno of its status.
pub type NfsAnswer<T> = Result<T, i32>;

/// What a client keeps of a file for as long as it likes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NfsHandle {
    ino: u64,
    generation: u64,
}

/// How CREATE makes a file.
pub enum NfsCreate {
    /// An existing file is opened, and cut to this length if there is one.
    Unchecked(Option<u64>),
    /// The name must not exist.
    Guarded,
    /// The name must not exist, unless the file was made by a call with the same verifier, whose answer was lost.
    Exclusive([u8; 8]),
}

/// A name in a directory.
pub struct NfsDirName<'a> {
    pub directory: NfsHandle,
    pub name: &'a [u8],
}

/// A name of READDIRPLUS.
pub struct NfsName {
    pub name: Vec<u8>,
    pub cookie: u64,
    pub object: Option<(NfsHandle, StatAttr)>,
}

pub struct NfsServer {
    files: Arc<dyn FileService>,
}

/// An inode for the time of one call.
struct HeldInode<'a> {
    files: &'a dyn FileService,
    entry: FileEntry,
}

impl Drop for HeldInode<'_> {
    fn drop(&mut self) {
        self.files.forget(self.entry.ino, 1);
    }
}

impl HeldInode<'_> {
    fn answer(&self) -> (NfsHandle, StatAttr) {
        (handle_of(&self.entry), self.entry.attr)
    }
}

fn handle_of(entry: &FileEntry) -> NfsHandle {
    NfsHandle { ino: entry.ino, generation: entry.generation }
}

fn status<T>(answer: FsResult<T>) -> NfsAnswer<T> {
    answer.map_err(|error| error.errno())
}

/// A client that keeps no pages and takes no notifications.
fn no_kernel() -> KernelSide<'static> {
    KernelSide::default()
}

fn time_of_verifier(half: &[u8]) -> FileTime {
    FileTime { seconds: u32::from_be_bytes(half.try_into().unwrap()).into(), nanos: 0 }
}

impl NfsServer {
    pub fn new(files: Arc<dyn FileService>) -> NfsServer {
        NfsServer { files }
    }

    fn held(&self, entry: FileEntry) -> HeldInode<'_> {
        HeldInode { files: &*self.files, entry }
    }

    fn resolve(&self, handle: NfsHandle) -> NfsAnswer<HeldInode<'_>> {
        match status(self.files.lookup(handle.ino, b".", &FsCaller::default()))? {
            LookupOutcome::Found(entry) => {
                let inode = self.held(entry);
                if handle_of(&inode.entry) == handle { Ok(inode) } else { Err(libc::ESTALE) }
            }
            LookupOutcome::Absent { .. } => Err(libc::ESTALE),
        }
    }

    fn find(&self, directory: &HeldInode<'_>, name: &[u8], caller: &FsCaller<'_>) -> NfsAnswer<HeldInode<'_>> {
        match status(self.files.lookup(directory.entry.ino, name, caller))? {
            LookupOutcome::Found(entry) => Ok(self.held(entry)),
            LookupOutcome::Absent { .. } => Err(libc::ENOENT),
        }
    }

    /// Opens a file for one call.
    fn with_open<T>(
        &self,
        handle: NfsHandle,
        flags: i32,
        caller: &FsCaller<'_>,
        call: impl FnOnce(HandleRef) -> FsResult<T>,
    ) -> NfsAnswer<T> {
        let inode = self.resolve(handle)?;
        let ino = inode.entry.ino;
        let opened = status(self.files.open(ino, flags as u32, caller, &no_kernel()))?;
        let answer = call(HandleRef { ino, fh: opened.fh });
        status(self.files.release(opened.fh))?;
        status(answer)
    }

    /// What MOUNT returns.
    pub fn root(&self) -> NfsAnswer<NfsHandle> {
        match status(self.files.lookup(ROOT, b".", &FsCaller::default()))? {
            LookupOutcome::Found(entry) => Ok(handle_of(&self.held(entry).entry)),
            LookupOutcome::Absent { .. } => Err(libc::ESTALE),
        }
    }

    pub fn lookup(&self, directory: NfsHandle, name: &[u8], caller: &FsCaller<'_>) -> NfsAnswer<(NfsHandle, StatAttr)> {
        Ok(self.find(&self.resolve(directory)?, name, caller)?.answer())
    }

    pub fn getattr(&self, handle: NfsHandle) -> NfsAnswer<StatAttr> {
        let inode = self.resolve(handle)?;
        Ok(status(self.files.getattr(inode.entry.ino, None, &FsCaller::default()))?.0)
    }

    /// `guard`: the time of the last change that the client knows.
    pub fn setattr(
        &self,
        handle: NfsHandle,
        set: &AttrChange,
        guard: Option<FileTime>,
        caller: &FsCaller<'_>,
    ) -> NfsAnswer<StatAttr> {
        let inode = self.resolve(handle)?;
        if guard.is_some_and(|ctime| ctime != inode.entry.attr.ctime) {
            return Err(NOT_SYNC);
        }
        Ok(status(self.files.setattr(inode.entry.ino, None, set, caller))?.0)
    }

    /// The rights of `wanted` (`R_OK`, `W_OK`, `X_OK`) that the caller has.
    pub fn access(&self, handle: NfsHandle, wanted: i32, caller: &FsCaller<'_>) -> NfsAnswer<i32> {
        let inode = self.resolve(handle)?;
        let mut granted = 0;
        for right in [libc::R_OK, libc::W_OK, libc::X_OK] {
            if wanted & right != 0 && self.files.access(inode.entry.ino, right as u32, caller).is_ok() {
                granted |= right;
            }
        }
        Ok(granted)
    }

    pub fn readlink(&self, handle: NfsHandle, caller: &FsCaller<'_>) -> NfsAnswer<Vec<u8>> {
        status(self.files.readlink(self.resolve(handle)?.entry.ino, caller))
    }

    pub fn read(&self, handle: NfsHandle, offset: u64, len: usize, caller: &FsCaller<'_>) -> NfsAnswer<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.with_open(handle, libc::O_RDONLY, caller, |file| {
            match self.files.read(file, offset, &mut bytes)? {
                ReadData::Copied(n) => bytes.truncate(n),
                ReadData::Shared(slice) => bytes = slice.to_vec(),
            }
            Ok(())
        })?;
        Ok(bytes)
    }

    /// An unstable write.
    pub fn write(&self, handle: NfsHandle, offset: u64, data: &[u8], caller: &FsCaller<'_>) -> NfsAnswer<usize> {
        let write = FileWrite { offset, place: WritePlace::Offset, data, lose_privileges: caller.uid != 0 };
        self.with_open(handle, libc::O_WRONLY, caller, |file| self.files.write(file, &write, caller))
    }

    pub fn commit(&self, handle: NfsHandle, caller: &FsCaller<'_>) -> NfsAnswer<()> {
        self.with_open(handle, libc::O_WRONLY, caller, |file| self.files.fsync(file, false))
    }

    pub fn create(
        &self,
        directory: NfsHandle,
        name: &[u8],
        kind: &NfsCreate,
        mode: u32,
        caller: &FsCaller<'_>,
    ) -> NfsAnswer<(NfsHandle, StatAttr)> {
        let parent = self.resolve(directory)?;
        let exclusive = if matches!(kind, NfsCreate::Unchecked(_)) { 0 } else { libc::O_EXCL };
        let flags = (libc::O_CREAT | libc::O_WRONLY | exclusive) as u32;
        let how = CreateMode { flags, mode: libc::S_IFREG | mode };
        let mut set = AttrChange::default();
        match kind {
            NfsCreate::Unchecked(size) => set.size = *size,
            NfsCreate::Guarded => {}
            NfsCreate::Exclusive(verifier) => {
                set.atime = Some(NewTime::At(time_of_verifier(&verifier[..4])));
                set.mtime = Some(NewTime::At(time_of_verifier(&verifier[4..])));
            }
        }
        let (entry, opened) = match self.files.create(parent.entry.ino, name, how, caller, &no_kernel()) {
            Err(error) if error.errno() == libc::EEXIST => {
                let there = self.find(&parent, name, caller)?;
                let attr = there.entry.attr;
                let made_by_this = set.atime.is_some()
                    && set.atime == Some(NewTime::At(attr.atime))
                    && set.mtime == Some(NewTime::At(attr.mtime))
                    && attr.size == 0;
                return if made_by_this { Ok(there.answer()) } else { Err(libc::EEXIST) };
            }
            made => status(made)?,
        };
        let mut inode = self.held(entry);
        let changed = if set == AttrChange::default() {
            Ok(())
        } else {
            let answer = self.files.setattr(entry.ino, Some(opened.fh), &set, caller);
            answer.map(|(attr, _)| inode.entry.attr = attr)
        };
        status(self.files.release(opened.fh))?;
        status(changed)?;
        Ok(inode.answer())
    }

    /// MKDIR and SYMLINK.
    pub fn make(
        &self,
        directory: NfsHandle,
        name: &[u8],
        new: NewNode<'_>,
        caller: &FsCaller<'_>,
    ) -> NfsAnswer<(NfsHandle, StatAttr)> {
        let parent = self.resolve(directory)?;
        Ok(self.held(status(self.files.make(parent.entry.ino, name, new, caller))?).answer())
    }

    /// REMOVE, or RMDIR of an empty directory.
    pub fn remove(
        &self,
        directory: NfsHandle,
        name: &[u8],
        is_directory: bool,
        caller: &FsCaller<'_>,
    ) -> NfsAnswer<()> {
        let parent = self.resolve(directory)?;
        status(self.files.remove(parent.entry.ino, name, is_directory, caller))
    }

    pub fn rename(&self, from: NfsDirName<'_>, to: NfsDirName<'_>, caller: &FsCaller<'_>) -> NfsAnswer<()> {
        let old_parent = self.resolve(from.directory)?;
        let new_parent = self.resolve(to.directory)?;
        // An inode that is known gets its new name, by which its handle is resolved.
        let _moved = self.find(&old_parent, from.name, caller)?;
        let old = DirName { parent: old_parent.entry.ino, name: from.name };
        let new = DirName { parent: new_parent.entry.ino, name: to.name };
        status(self.files.rename(old, new, 0, caller))
    }

    pub fn link(&self, handle: NfsHandle, directory: NfsHandle, name: &[u8], caller: &FsCaller<'_>) -> NfsAnswer<()> {
        let inode = self.resolve(handle)?;
        let parent = self.resolve(directory)?;
        status(self.files.link(inode.entry.ino, parent.entry.ino, name, caller)).map(|entry| drop(self.held(entry)))
    }

    /// One page of READDIRPLUS after `cookie`; an empty one is the end.
    pub fn readdirplus(&self, directory: NfsHandle, cookie: u64, caller: &FsCaller<'_>) -> NfsAnswer<Vec<NfsName>> {
        let inode = self.resolve(directory)?;
        let ino = inode.entry.ino;
        let fh = status(self.files.opendir(ino, caller))?;
        let read = DirRead { directory: HandleRef { ino, fh }, from: cookie, names_max: PAGE_NAMES, plus: true };
        let mut page = Vec::new();
        let answer = self.files.readdir(&read, caller, &mut |listed| {
            if page.len() == PAGE_NAMES {
                return false;
            }
            let object = listed.entry.map(|entry| self.held(entry).answer());
            page.push(NfsName { name: listed.name.to_vec(), cookie: listed.next, object });
            true
        });
        status(self.files.releasedir(fh))?;
        status(answer)?;
        Ok(page)
    }

    pub fn fsstat(&self) -> NfsAnswer<SourceSpace> {
        status(self.files.statfs())
    }
}
