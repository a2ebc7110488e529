//! Serves the kernel's requests from a [`FileSystem`]; it only converts types. All rules of the file system, errnos
//! included, are in `spurline-fs`, where they are tested without a mount.

use crate::ROOT_INO;
use crate::backing::{Backing, BackingId, Backings};
use crate::errno::Errno;
use crate::handler::{Attr, Caller, Entry, Handler, InitInfo, Opened, Statfs};
use crate::reply::{DirPlusSink, DirSink, ReadReply, Replied, XattrReply};
use spurline_fs::{DirItem, FileAttr, Fs, FsError, Lookup, RegisterBacking};
use spurline_types::FileKind;
use spurline_volume::ReadData;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Passthrough stops after this many consecutive refusals by the kernel: each attempt costs the volume the check of a
/// whole file.
const REFUSALS: u32 = 8;

/// A file system as a session's handler.
pub struct FsHandler {
    fs: Arc<Fs>,
    generation: u64,
    passthrough: OnceLock<Passthrough>,
}

struct Passthrough {
    backings: Backings,
    refused: AtomicU32,
}

impl FsHandler {
    /// A handler over `fs`.
    pub fn new(fs: Arc<Fs>) -> Self {
        // Inode numbers restart at every mount. A file handle kept over a remount (by an NFS server that exports the
        // mount) would otherwise reach another file with the same number. The generation, random per mount and as
        // wide as the kernel stores, tells them apart: ESTALE.
        let drawn = RandomState::new().build_hasher().finish() as u32;
        FsHandler { fs, generation: u64::from(drawn.max(1)), passthrough: OnceLock::new() }
    }

    /// The file system.
    pub fn fs(&self) -> &Arc<Fs> {
        &self.fs
    }

    fn entry(&self, found: &spurline_fs::Entry) -> Entry {
        let attr = attr(&found.attr);
        // The kernel uses generation 0 for the root, whose number is the same in every mount.
        let generation = if attr.ino == ROOT_INO { 0 } else { self.generation };
        Entry { ino: attr.ino, generation, attr, entry_ttl: found.entry_ttl, attr_ttl: found.attr_ttl }
    }
}

impl RegisterBacking for Passthrough {
    fn register(&self, file: &File) -> io::Result<Box<dyn spurline_fs::BackingId>> {
        match self.backings.register(file.as_fd()) {
            Ok(backing) => {
                self.refused.store(0, Ordering::Relaxed);
                Ok(Box::new(backing))
            }
            Err(error) => {
                if self.refused.fetch_add(1, Ordering::Relaxed) + 1 == REFUSALS {
                    tracing::warn!(
                        "the kernel refused {REFUSALS} cached files for passthrough in a row: {error}; passthrough is off \
                         from now on, and reads go through this process. Passthrough needs CAP_SYS_ADMIN and a \
                         cache directory on a file system that is not itself stacked (overlayfs, FUSE)"
                    );
                }
                Err(error)
            }
        }
    }
}

impl spurline_fs::BackingId for Backing {
    fn id(&self) -> i32 {
        Backing::id(self).0
    }
}

/// The errno of a failure. Failures of the volume are logged.
fn refuse(op: &'static str, ino: u64, error: &FsError) -> Errno {
    if let FsError::Volume(cause) = error
        && cause.kind() != spurline_types::ErrorKind::NotFound
    {
        tracing::warn!(op, ino, errno = error.errno(), "{cause}");
    }
    Errno(error.errno())
}

fn file_type(kind: FileKind) -> u32 {
    match kind {
        FileKind::File => libc::S_IFREG,
        FileKind::Directory => libc::S_IFDIR,
        FileKind::Symlink => libc::S_IFLNK,
    }
}

fn attr(attr: &FileAttr) -> Attr {
    let mtime = attr.mtime;
    Attr {
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
        blksize: attr.blksize,
    }
}

impl Handler for FsHandler {
    fn init(&self, info: &InitInfo) {
        if let Some(backings) = &info.backings {
            let passthrough = Passthrough { backings: backings.clone(), refused: AtomicU32::new(0) };
            let _ = self.passthrough.set(passthrough);
        }
    }

    fn lookup(&self, parent: u64, name: &[u8]) -> Result<Entry, Errno> {
        match self.fs.lookup(parent, name) {
            Ok(Lookup::Found(found)) => Ok(self.entry(&found)),
            Ok(Lookup::Absent { ttl }) => Ok(Entry::negative(ttl)),
            Err(error) => Err(refuse("lookup", parent, &error)),
        }
    }

    fn forget(&self, ino: u64, nlookup: u64) {
        self.fs.forget(ino, nlookup);
    }

    fn getattr(&self, ino: u64, fh: Option<u64>) -> Result<(Attr, Duration), Errno> {
        let (found, ttl) = self.fs.getattr(ino, fh).map_err(|error| refuse("getattr", ino, &error))?;
        Ok((attr(&found), ttl))
    }

    fn readlink(&self, ino: u64, target: &mut [u8]) -> Result<usize, Errno> {
        let link = self.fs.readlink(ino).map_err(|error| refuse("readlink", ino, &error))?;
        target.get_mut(..link.len()).ok_or(Errno::ENAMETOOLONG)?.copy_from_slice(&link);
        Ok(link.len())
    }

    fn open(&self, ino: u64, flags: u32) -> Result<Opened, Errno> {
        let register = self.passthrough.get().filter(|p| p.refused.load(Ordering::Relaxed) < REFUSALS);
        let register = register.map(|passthrough| passthrough as &dyn RegisterBacking);
        let opened = self.fs.open(ino, flags as i32, register).map_err(|error| refuse("open", ino, &error))?;
        let backing = opened.backing.map(|backing| BackingId(backing.id()));
        Ok(Opened { fh: opened.fh, keep_cache: true, backing, ..Opened::default() })
    }

    fn read(&self, ino: u64, fh: u64, offset: u64, len: u32, mut reply: ReadReply<'_>) -> Replied {
        let buffer = reply.buffer();
        debug_assert!(buffer.len() <= len as usize);
        match self.fs.read(ino, fh, offset, buffer) {
            Ok(ReadData::Copied(n)) => reply.filled(n),
            Ok(ReadData::Shared(slice)) => reply.data(&slice),
            Err(error) => reply.error(refuse("read", ino, &error)),
        }
    }

    fn release(&self, ino: u64, fh: u64) {
        if let Err(error) = self.fs.release(fh) {
            tracing::warn!(ino, fh, "release of a handle that is not open: {error}");
        }
    }

    fn opendir(&self, ino: u64, _flags: u32) -> Result<Opened, Errno> {
        let fh = self.fs.opendir(ino).map_err(|error| refuse("opendir", ino, &error))?;
        Ok(Opened { fh, ..Opened::default() })
    }

    fn readdir(&self, ino: u64, fh: u64, cookie: u64, sink: &mut DirSink<'_>) -> Result<(), Errno> {
        let mut take = |item: &DirItem<'_>| sink.add(item.ino, item.next, file_type(item.kind), item.name);
        self.fs.readdir(ino, fh, cookie, &mut take).map_err(|error| refuse("readdir", ino, &error))
    }

    fn readdirplus(&self, ino: u64, fh: u64, cookie: u64, sink: &mut DirPlusSink<'_>) -> Result<(), Errno> {
        let mut take = |item: &DirItem<'_>| match &item.entry {
            Some(found) => sink.add(&self.entry(found), item.next, item.name),
            None => sink.add_plain(item.ino, item.next, file_type(item.kind), item.name),
        };
        self.fs.readdirplus(ino, fh, cookie, &mut take).map_err(|error| refuse("readdirplus", ino, &error))
    }

    fn releasedir(&self, ino: u64, fh: u64) {
        self.release(ino, fh);
    }

    fn statfs(&self, ino: u64) -> Result<Statfs, Errno> {
        let s = self.fs.statfs().map_err(|error| refuse("statfs", ino, &error))?;
        Ok(Statfs {
            blocks: s.blocks,
            bfree: s.free,
            bavail: s.free,
            files: s.files,
            ffree: s.files_free,
            bsize: s.block_size,
            namelen: s.name_max,
        })
    }

    fn access(&self, ino: u64, mask: u32, caller: &Caller) -> Result<(), Errno> {
        self.fs.access(ino, mask as i32, caller.uid, caller.gid).map_err(|error| refuse("access", ino, &error))
    }

    fn getxattr(&self, ino: u64, name: &[u8], reply: XattrReply<'_>) -> Replied {
        match self.fs.getxattr(ino, name) {
            Ok(value) => reply.value(&value),
            Err(error) => reply.error(refuse("getxattr", ino, &error)),
        }
    }

    fn listxattr(&self, ino: u64, reply: XattrReply<'_>) -> Replied {
        match self.fs.listxattr(ino) {
            Ok(names) => reply.value(&names),
            Err(error) => reply.error(refuse("listxattr", ino, &error)),
        }
    }
}
