//! The read-only file system as a [`FileService`]: it converts types, and finds the inodes that the kernel is
//! requested to forget. The rules are in `fs`, `list` and `xattr`.

use crate::attr::{FileAttr, InodeEntry, LookupOutcome};
use crate::errno::{FsError, FsResult};
use crate::fs::{FileSystem, parent_of};
use crate::inode::{Inode, InodeTable};
use crate::inode_limit::{AgeHistogram, ForgetCandidate, LimitAlarm, LimitedInodes, RequestForgets, send_forgets};
use crate::kept_records::KeptLife;
use crate::list::DirItem;
use crate::name_records::NameRecords;
use crate::service::{
    CallerGroups, DirRead, FileEntry, FileService, FsCaller, HandleRef, KernelSide, ListedEntry, OpenedFile, StatAttr,
};
use spurline_types::{ErrorKind, FileKind, unix_time};
use spurline_volume::ReadData;
use spurline_volume::writes::{FileTime, SourceSpace};
use std::io;
use std::sync::Arc;
use std::time::Duration;

fn file_type(kind: FileKind) -> u32 {
    match kind {
        FileKind::File => libc::S_IFREG,
        FileKind::Directory => libc::S_IFDIR,
        FileKind::Symlink => libc::S_IFLNK,
    }
}

fn stat_attr(attr: &FileAttr) -> StatAttr {
    let (seconds, nanos) = unix_time(attr.mtime);
    let mtime = FileTime { seconds, nanos };
    StatAttr {
        ino: attr.ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: mtime,
        mtime,
        ctime: mtime,
        mode: file_type(attr.kind) | u32::from(attr.mode),
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: 0,
        blksize: attr.blksize,
    }
}

fn file_entry(found: &InodeEntry) -> FileEntry {
    FileEntry {
        ino: found.attr.ino,
        generation: found.generation,
        attr: stat_attr(&found.attr),
        entry_ttl: found.entry_ttl,
        attr_ttl: found.attr_ttl,
    }
}

impl FileSystem {
    /// Checks the rights of a caller that no kernel has checked.
    fn check_rights(&self, ino: u64, mask: i32, caller: &FsCaller<'_>) -> FsResult<()> {
        match caller.groups {
            CallerGroups::All(_) => self.access(ino, mask, caller),
            CallerGroups::Unknown | CallerGroups::NotOfDirectory | CallerGroups::OfDirectory(_) => Ok(()),
        }
    }
}

impl FileService for FileSystem {
    fn lookup(&self, parent: u64, name: &[u8], caller: &FsCaller<'_>) -> FsResult<LookupOutcome<FileEntry>> {
        if !matches!(name, b"." | b"..") {
            self.check_rights(parent, libc::X_OK, caller)?;
        }
        Ok(self.lookup(parent, name)?.map(|found| file_entry(&found)))
    }

    fn forget(&self, ino: u64, n: u64) {
        self.forget(ino, n);
    }

    fn getattr(&self, ino: u64, fh: Option<u64>, _caller: &FsCaller<'_>) -> FsResult<(StatAttr, Duration)> {
        let (attr, ttl) = self.getattr(ino, fh)?;
        Ok((stat_attr(&attr), ttl))
    }

    fn readlink(&self, ino: u64, _caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        self.readlink(ino)
    }

    fn access(&self, ino: u64, mask: u32, caller: &FsCaller<'_>) -> FsResult<()> {
        self.access(ino, mask as i32, caller)
    }

    fn open(&self, ino: u64, flags: u32, caller: &FsCaller<'_>, kernel: &KernelSide<'_>) -> FsResult<OpenedFile> {
        self.check_rights(ino, libc::R_OK, caller)?;
        self.open(ino, flags as i32, kernel.backings)
    }

    fn read(&self, file: HandleRef, offset: u64, dst: &mut [u8]) -> FsResult<ReadData> {
        self.read(file.ino, file.fh, offset, dst)
    }

    fn release(&self, fh: u64) -> FsResult<()> {
        self.release(fh)
    }

    fn opendir(&self, ino: u64, caller: &FsCaller<'_>) -> FsResult<u64> {
        self.check_rights(ino, libc::R_OK, caller)?;
        self.opendir(ino)
    }

    fn readdir(
        &self,
        read: &DirRead,
        _caller: &FsCaller<'_>,
        take: &mut dyn FnMut(&ListedEntry<'_>) -> bool,
    ) -> FsResult<()> {
        let HandleRef { ino, fh } = read.directory;
        let mut take_item = |item: &DirItem<'_>| {
            take(&ListedEntry {
                name: item.name,
                next: item.next,
                ino: item.ino,
                file_type: file_type(item.kind),
                entry: item.entry.as_ref().map(file_entry),
            })
        };
        if read.plus {
            self.readdirplus(ino, fh, read.from, &mut take_item)
        } else {
            self.readdir(ino, fh, read.from, &mut take_item)
        }
    }

    fn releasedir(&self, fh: u64) -> FsResult<()> {
        self.release(fh)
    }

    fn statfs(&self) -> FsResult<SourceSpace> {
        let stat = self.statfs()?;
        Ok(SourceSpace {
            block_size: stat.block_size.into(),
            blocks: stat.blocks,
            blocks_free: stat.free,
            blocks_available: stat.free,
            files: stat.files,
            files_free: stat.files_free,
            name_max: stat.name_max,
        })
    }

    fn getxattr(&self, ino: u64, name: &[u8], _caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        self.getxattr(ino, name)
    }

    fn listxattr(&self, ino: u64, _caller: &FsCaller<'_>) -> FsResult<Vec<u8>> {
        self.listxattr(ino)
    }

    fn limited_inodes(self: Arc<Self>) -> Option<Arc<dyn LimitedInodes>> {
        Some(self)
    }

    fn keep_names(&self, records: Arc<dyn NameRecords>) {
        self.keep_names(records);
    }

    fn keep_life(&self, life: &KeptLife<'_>) -> bool {
        self.keep_life(life);
        true
    }

    fn path_of(&self, ino: u64) -> Option<Vec<u8>> {
        self.path_of(ino)
    }

    /// Failures of the volume are logged.
    fn log_failure(&self, op: &'static str, ino: u64, error: &FsError) {
        if let FsError::Volume(cause) = error
            && cause.kind() != ErrorKind::NotFound
        {
            tracing::warn!(op, ino, errno = error.errno(), "{cause}");
        }
    }
}

impl LimitedInodes for FileSystem {
    fn limit_alarm(&self) -> &LimitAlarm {
        &self.limit_alarm
    }

    fn inode_limit(&self) -> u64 {
        self.config.inode_bytes
    }

    fn inode_memory(&self) -> u64 {
        self.inodes.bytes()
    }

    fn inode_count(&self) -> usize {
        self.inodes.len()
    }

    fn request_forgets(&self, kernel: &dyn RequestForgets, bytes: u64) -> io::Result<bool> {
        let now = self.now();
        let step = |inode: &Inode| AgeHistogram::step(now.saturating_sub(inode.seen_at()));
        let mut ages = AgeHistogram::new();
        self.inodes.for_each(|inode| {
            if !inode.opens.lock().is_open() {
                ages.add_memory(step(inode), inode.memory_bytes());
            }
        });
        let newest = ages.step_reaching(bytes);
        // Of the newest step only a part is needed: during a walk most inodes have one age.
        let (newest_step, mut left) = newest.unwrap_or((0, u64::MAX));
        let mut cold: Vec<Arc<Inode>> = Vec::new();
        self.inodes.for_each(|inode| {
            let age = step(inode);
            if age < newest_step || (age == newest_step && left == 0) || inode.opens.lock().is_open() {
                return;
            }
            if age == newest_step {
                left = left.saturating_sub(inode.memory_bytes());
            }
            cold.push(Arc::clone(inode));
        });
        send_forgets(kernel, &self.stats, cold.into_iter().map(|inode| forget_candidate(&self.inodes, &inode)))?;
        Ok(newest.is_none())
    }
}

fn forget_candidate(inodes: &InodeTable, inode: &Inode) -> ForgetCandidate {
    let path = inode.path();
    let folder = parent_of(path);
    let name = if folder.is_empty() { path } else { &path[folder.len() + 1..] };
    ForgetCandidate {
        ino: inode.ino,
        directory: inode.kind == FileKind::Directory,
        parent: inodes.directory_ino(folder),
        name: name.into(),
    }
}
