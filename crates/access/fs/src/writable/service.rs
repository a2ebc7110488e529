//! The writable file system as a [`FileService`]: it converts types, and keeps a kernel's view of a file in step with
//! opens and locks. The rules are in the modules beside it.

use super::WritableFileSystem;
use super::kernel_view::{BegunWait, WaitingView, refresh_privileges};
use super::names::{MountNames, NodeEntry};
use crate::attr::LookupOutcome;
use crate::errno::{FsError, FsResult};
use crate::inode_limit::LimitedInodes;
use crate::kept_records::{KeptLife, KeptRecord};
use crate::name_records::NameRecords;
use crate::service::{
    CreateMode, DirName, DirRead, FileEntry, FilePosition, FileService, FileWrite, FsCaller, HandleRef, KernelSide,
    KernelView, ListedEntry, LockRequest, NewNode, OpenedFile, StatAttr,
};
use spurline_volume::ReadData;
use spurline_volume::whole_files::WholeFiles;
use spurline_volume::writes::{AttrChange, FileLock, LockConflict, NodeAttr, SourceSpace};
use std::sync::Arc;
use std::time::Duration;

impl WritableFileSystem {
    fn file_entry(&self, entry: &NodeEntry) -> FileEntry {
        FileEntry {
            ino: entry.ino,
            generation: self.names.generation(entry.ino, &entry.attr.identity),
            attr: self.stat_attr(entry.ino, &entry.attr),
            entry_ttl: entry.entry_ttl,
            attr_ttl: entry.attr_ttl,
        }
    }

    fn stat_attr(&self, ino: u64, attr: &NodeAttr) -> StatAttr {
        StatAttr {
            ino: self.names.shown_number(ino, attr),
            size: attr.size,
            blocks: attr.blocks,
            atime: attr.atime,
            mtime: attr.mtime,
            ctime: attr.ctime,
            mode: attr.mode,
            nlink: attr.nlink,
            uid: attr.uid,
            gid: attr.gid,
            rdev: attr.rdev,
            blksize: attr.blksize,
        }
    }
}

impl FileService for WritableFileSystem {
    fn lookup(&self, parent: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<LookupOutcome<FileEntry>> {
        Ok(self.opens.lookup(parent, name, caller)?.map(|entry| self.file_entry(&entry)))
    }

    fn forget(&self, ino: u64, n: u64) {
        self.names.nodes.forget(ino, n);
    }

    fn getattr(&self, ino: u64, fh: Option<u64>, caller: &FsCaller<'_>) -> FsResult<(StatAttr, Duration)> {
        let (attr, ttl) = self.names.getattr(ino, fh, caller)?;
        Ok((self.stat_attr(ino, &attr), ttl))
    }

    fn readlink(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        self.names.readlink(ino, caller)
    }

    fn access(&self, ino: u64, mask: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        self.names.access(ino, mask, caller)
    }

    fn open(&self, ino: u64, flags: u32, caller: &FsCaller<'_>, kernel: &KernelSide<'_>) -> FsResult<OpenedFile> {
        let opened = self.opens.open(ino, flags as i32, caller, kernel.backings)?;
        // Before the answer: the first read through the handle has to see the new length.
        if let Some(view) = kernel.view.filter(|_| opened.moved) {
            let view = WaitingView { view, waits: kernel.waits };
            let refreshed = self
                .names
                .open_nodes
                .file(ino, opened.file.fh)
                .and_then(|file| self.refreshes.refresh_opened(&file, &opened.attr, &self.names.nodes, &view));
            if let Err(error) = refreshed {
                tracing::debug!(ino, "the kernel keeps attributes for their time: {error}");
            }
        } else if let Some(view) = kernel.view.filter(|_| opened.mappable)
            && let Err(error) = view.forget_attr(ino)
        {
            tracing::debug!(ino, "the kernel keeps attributes for their time: {error}");
        }
        Ok(opened.file)
    }

    fn read(&self, file: HandleRef, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        self.opens.read(file.ino, file.fh, offset, dst)
    }

    fn release(&self, fh: u64) -> FsResult<()> {
        self.opens.release(fh)
    }

    fn whole_files(&self) -> Option<&dyn WholeFiles> {
        self.names.source.whole_files()
    }

    fn opendir(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<u64> {
        self.opens.opendir(ino, caller)
    }

    fn readdir(
        &self,
        read: &DirRead,
        caller: &FsCaller<'_>,
        take: &mut dyn FnMut(&ListedEntry<'_>) -> bool,
    ) -> FsResult<()> {
        self.opens.readdir(read, caller, &mut |listed, entry| {
            take(&ListedEntry {
                name: &listed.name,
                next: listed.next,
                ino: listed.inode,
                file_type: listed.file_type,
                entry: entry.as_ref().map(|entry| self.file_entry(entry)),
            })
        })
    }

    fn releasedir(&self, fh: u64) -> FsResult<()> {
        self.opens.releasedir(fh)
    }

    fn statfs(&self) -> FsResult<SourceSpace> {
        Ok(self.names.source.space()?)
    }

    fn getxattr(&self, ino: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        self.names.getxattr(ino, name, caller)
    }

    fn listxattr(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        self.names.listxattr(ino, caller)
    }

    fn lseek(&self, file: HandleRef, offset: u64, whence: u32) -> FsResult<u64> {
        self.opens.lseek(file.ino, file.fh, offset, whence)
    }

    fn setattr(
        &self,
        ino: u64,
        fh: Option<u64>,
        set: &AttrChange,
        caller: &FsCaller<'_>,
    ) -> FsResult<(StatAttr, Duration)> {
        let (attr, ttl) = self.names.setattr(ino, fh, set, caller)?;
        Ok((self.stat_attr(ino, &attr), ttl))
    }

    fn make(&self, parent: u64, name: &[u8], new: NewNode<'_>, caller: &FsCaller<'_>) -> FsResult<FileEntry> {
        Ok(self.file_entry(&self.names.make(parent, name, new, caller)?))
    }

    fn link(&self, ino: u64, parent: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<FileEntry> {
        Ok(self.file_entry(&self.names.link(ino, parent, name, caller)?))
    }

    fn remove(&self, parent: u64, name: &[u8], directory: bool, caller: &FsCaller<'_>) -> FsResult<()> {
        self.names.remove(parent, name, directory, caller)
    }

    fn rename(&self, from: DirName<'_>, to: DirName<'_>, flags: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        self.names.rename(from, to, flags, caller)
    }

    fn create(
        &self,
        parent: u64,
        name: &[u8],
        how: CreateMode,
        caller: &FsCaller<'_>,
        kernel: &KernelSide<'_>,
    ) -> FsResult<(FileEntry, OpenedFile)> {
        let (entry, opened) = self.opens.create(parent, name, how, caller, kernel.backings)?;
        Ok((self.file_entry(&entry), opened.file))
    }

    fn tmpfile(
        &self,
        parent: u64,
        how: CreateMode,
        caller: &FsCaller<'_>,
        kernel: &KernelSide<'_>,
    ) -> FsResult<(FileEntry, OpenedFile)> {
        let (entry, opened) = self.opens.tmpfile(parent, how, caller, kernel.backings)?;
        Ok((self.file_entry(&entry), opened.file))
    }

    fn write(&self, file: HandleRef, write: &FileWrite<'_>, caller: &FsCaller<'_>) -> FsResult<usize> {
        self.opens.write(file, write, caller)
    }

    fn flush(&self, file: HandleRef, lock_owner: u64, caller: &FsCaller<'_>) -> FsResult<()> {
        self.opens.flush(file.ino, file.fh, lock_owner, caller)
    }

    fn fsync(&self, file: HandleRef, data_only: bool) -> FsResult<()> {
        self.opens.fsync(file.ino, file.fh, data_only)
    }

    fn fsyncdir(&self, directory: HandleRef, data_only: bool) -> FsResult<()> {
        self.opens.fsyncdir(directory.ino, directory.fh, data_only)
    }

    fn fallocate(&self, at: FilePosition, len: u64, mode: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        self.opens.fallocate(at.file.ino, at.file.fh, mode, at.offset, len, caller)
    }

    fn refresh_privileges(&self, file: HandleRef, view: &dyn KernelView) {
        let open = self.names.open_nodes.file(file.ino, file.fh);
        if let Err(error) = open.and_then(|open| refresh_privileges(&open, view)) {
            tracing::debug!(ino = file.ino, "the kernel keeps set-user-ID bits for their time: {error}");
        }
    }

    fn copy_file_range(&self, from: FilePosition, to: FilePosition, len: u64, caller: &FsCaller<'_>) -> FsResult<u64> {
        self.opens.copy_file_range(from, to, len, caller)
    }

    fn setxattr(&self, ino: u64, name: &[u8], value: &[u8], flags: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        self.names.setxattr(ino, name, value, flags, caller)
    }

    fn removexattr(&self, ino: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<()> {
        self.names.removexattr(ino, name, caller)
    }

    fn test_lock(
        &self,
        file: HandleRef,
        lock: &FileLock,
        number: u64,
        kernel: &KernelSide<'_>,
    ) -> FsResult<Option<LockConflict>> {
        self.locks.test_lock(file, lock, number, kernel.waits)
    }

    fn set_lock(
        &self,
        file: HandleRef,
        request: &LockRequest,
        wait: bool,
        caller: &FsCaller<'_>,
        kernel: &KernelSide<'_>,
    ) -> FsResult<()> {
        let ino = file.ino;
        let stores = kernel.view.filter(|_| self.locks.has_stores_to_write(ino, &request.lock));
        let begun = match stores {
            Some(view) => WaitingView { view, waits: kernel.waits }.drop_before_lock(ino, &request.lock)?,
            None => None,
        };
        let one_wait = BegunWait(kernel.waits);
        let waits = if begun.is_some() { Some(&one_wait as _) } else { kernel.waits };
        let stale = self.locks.set_lock(file, request, caller, waits, wait)?;
        if let Some(view) = kernel.view.filter(|_| stale)
            && let Err(error) = self
                .names
                .open_nodes
                .file(ino, file.fh)
                .and_then(|open| self.refreshes.refresh_locked(&open, &WaitingView { view, waits }))
        {
            tracing::debug!(ino, "the kernel keeps pages of a file that was locked: {error}");
        }
        Ok(())
    }

    fn interrupt(&self, number: u64) {
        self.locks.table.interrupt(number);
    }

    fn end_waits(&self) {
        self.locks.table.end_waits();
    }

    fn allow_direct_writes(&self) {
        self.opens.allow_direct_writes();
    }

    fn close_all(&self) {
        self.names.open_nodes.clear();
    }

    fn limited_inodes(self: Arc<Self>) -> Option<Arc<dyn LimitedInodes>> {
        Some(Arc::clone(&self.names) as _)
    }

    fn keep_names(&self, records: Arc<dyn NameRecords>) {
        self.names.keep_names(records);
    }

    fn keep_life(&self, life: &KeptLife<'_>) -> bool {
        let Some(files) = &life.files else { return false };
        let MountNames { nodes, open_nodes, .. } = &*self.names;
        open_nodes.set_takeovers(life.takeovers);
        nodes.keep_records(&life.records);
        let is_kept = self.life.begin(life, files, |mount, slot, record| match record {
            KeptRecord::Node(node) => nodes.adopt_node(slot, node),
            KeptRecord::Name(name) => nodes.adopt_name(slot, name),
            KeptRecord::Handle(handle) => self.opens.adopt_handle(slot, handle, mount, life.register),
            KeptRecord::Lock(lock) => self.locks.adopt_lock(slot, lock, mount),
            KeptRecord::Inode(_) | KeptRecord::Change(_) => false,
        });
        self.locks.table.keep_records(&life.records, files);
        is_kept
    }

    fn path_of(&self, ino: u64) -> Option<Vec<u8>> {
        Some(self.names.nodes.resolve(ino)?.path)
    }

    /// What POSIX lets any program run into is not logged.
    fn log_failure(&self, op: &'static str, ino: u64, error: &FsError) {
        match error.errno() {
            errno @ (libc::EIO
            | libc::ETIMEDOUT
            | libc::EHOSTDOWN
            | libc::ENOTCONN
            | libc::EREMOTEIO
            | libc::EPROTO) => {
                let path = match self.path_of(ino) {
                    Some(path) => format!("'/{}'", String::from_utf8_lossy(&path)),
                    None => "an object without a name".to_owned(),
                };
                tracing::warn!(op, ino, errno, "{path}: {error}");
            }
            errno => tracing::trace!(op, ino, errno, "{error}"),
        }
    }
}
