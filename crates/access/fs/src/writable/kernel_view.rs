//! The kernel's view of a file's bytes, and how it learns that others have changed them. It knows neither locks nor the
//! device that notifications go through.
//!
//! A notification makes the kernel drop the answer to a request for attributes that is under way, and not repeat the request.
//! The read that made it then ends at the old length. So a notification alone can hide the end of a file from a
//! reader that holds its lock. A length that grew is therefore put into the kernel before the program goes on: the last byte of
//! the file is stored there. A length that shrank corrects itself at the first short read.

use super::WritableFileSystem;
use super::open::OpenedNode;
use crate::errno::FsResult;
use crate::service::{BeginWait, HandleRef, KernelView};
use parking_lot::Mutex;
use spurline_types::Error;
use spurline_volume::writes::{Caller, FileLock, LockKind, NodeAttr, WritableFile};
use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Locks, so that files rarely meet.
const SHARDS: usize = 16;
/// From `asm-generic/fcntl.h`.
const O_RDONLY: u32 = 0;
/// Set-user-ID and set-group-ID.
pub(super) const PRIVILEGE_BITS: u32 = 0o6000;

/// The view of a kernel that waits, at each notification about pages, for requests that are served meanwhile: each begins a
/// wait.
pub(super) struct WaitingView<'a> {
    pub view: &'a dyn KernelView,
    pub waits: Option<&'a dyn BeginWait>,
}

impl WaitingView<'_> {
    fn begin_wait(&self) -> FsResult<Box<dyn Any>> {
        self.waits.map_or_else(|| Ok(Box::new(()) as _), BeginWait::begin_wait)
    }

    fn begin_notification(&self) -> io::Result<Box<dyn Any>> {
        self.begin_wait().map_err(|error| io::Error::from_raw_os_error(error.errno()))
    }

    /// Drops the pages of a file before its lock changes, which writes those that a program has stored into. Returns a begun
    /// wait for a lock that is set, so that nothing hinders the notifications that follow. Without a slot to wait in, a lock is
    /// refused; a release goes on, and the stores are written later.
    ///
    /// # Errors
    /// `ENOLCK` for a lock that is set, when there is no slot.
    pub fn drop_before_lock(&self, ino: u64, lock: &FileLock) -> FsResult<Option<Box<dyn Any>>> {
        let unlocks = lock.kind == LockKind::Unlock;
        let slot = match self.begin_wait() {
            Ok(slot) => slot,
            Err(error) if unlocks => {
                tracing::debug!(ino, "the kernel keeps pages of a file before a lock is released: {error}");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if let Err(error) = self.view.drop_pages(ino) {
            tracing::debug!(ino, "the kernel keeps pages of a file before a lock: {error}");
        }
        Ok((!unlocks).then_some(slot))
    }
}

impl KernelView for WaitingView<'_> {
    fn forget_attr(&self, ino: u64) -> io::Result<()> {
        self.view.forget_attr(ino)
    }

    fn drop_pages(&self, ino: u64) -> io::Result<()> {
        let _waiting = self.begin_notification()?;
        self.view.drop_pages(ino)
    }

    fn store_byte(&self, ino: u64, offset: u64, byte: u8) -> io::Result<()> {
        let _waiting = self.begin_notification()?;
        self.view.store_byte(ino, offset, byte)
    }
}

/// A wait that has begun, and lasts as long as the request.
pub(super) struct BegunWait<'a>(pub Option<&'a dyn BeginWait>);

impl BeginWait for BegunWait<'_> {
    fn begin_wait(&self) -> FsResult<Box<dyn Any>> {
        Ok(Box::new(()))
    }

    fn has_all_closes(&self, fh: u64) -> bool {
        self.0.is_none_or(|waits| waits.has_all_closes(fh))
    }
}

/// The attributes of a file in the kernel.
#[derive(Default)]
pub(super) struct KernelInode {
    /// A length that its file certainly has at least: what it wrote itself, or got stored. Any answer with attributes can lower
    /// it; none raises it for certain, because the kernel drops some.
    size: AtomicU64,
    /// It may have set-user-ID or set-group-ID bits.
    privileged: AtomicBool,
}

impl KernelInode {
    /// The kernel wrote up to `end`.
    pub fn note_written(&self, end: u64) {
        self.size.fetch_max(end, Ordering::AcqRel);
    }

    /// An answer with these attributes goes to the kernel.
    pub fn note_sent(&self, attr: &NodeAttr) {
        self.lower_size(attr.size);
        self.note_mode(attr.mode);
    }

    /// The kernel may have this mode.
    pub fn note_mode(&self, mode: u32) {
        if mode & PRIVILEGE_BITS != 0 {
            self.privileged.store(true, Ordering::Release);
        }
    }

    fn lower_size(&self, size: u64) {
        self.size.fetch_min(size, Ordering::AcqRel);
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }
}

/// One change of the kernel's view of a file at a time.
#[derive(Default)]
pub(super) struct KernelRefreshes([Mutex<()>; SHARDS]);

impl KernelRefreshes {
    fn of(&self, ino: u64) -> &Mutex<()> {
        &self.0[ino as usize % SHARDS]
    }
}

impl WritableFileSystem {
    /// The file was locked: what others wrote under their lock is read now, up to the end that it has now.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno; the kernel's.
    pub(super) fn refresh_locked(&self, handle: HandleRef, kernel: &dyn KernelView) -> FsResult<()> {
        let HandleRef { ino, fh } = handle;
        let file = self.file(ino, fh)?;
        let _one = self.refreshes.of(ino).lock();
        // First: a page that is read until the byte is stored has the bytes up to there.
        kernel_result(kernel.drop_pages(ino))?;
        let size = file.file.stat()?.size;
        self.grow_kernel_size(ino, &*file.file, &file.kernel_inode, size, kernel)
    }

    /// The file was opened, and the kernel's attributes are of another version.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno; the kernel's.
    pub(super) fn refresh_opened(&self, ino: u64, opened: &OpenedNode, kernel: &dyn KernelView) -> FsResult<()> {
        let file = self.file(ino, opened.fh)?;
        let _one = self.refreshes.of(ino).lock();
        if file.kernel_inode.size() >= opened.attr.size {
            kernel_result(kernel.forget_attr(ino))?;
        } else {
            kernel_result(kernel.drop_pages(ino))?;
            self.grow_kernel_size(ino, &*file.file, &file.kernel_inode, opened.attr.size, kernel)?;
        }
        // Later answers to the kernel are not older.
        self.nodes.note_refreshed(ino, &opened.attr);
        Ok(())
    }

    /// A caller has changed bytes of the file: set-user-ID and set-group-ID bits that went with that are not in force in the
    /// kernel either.
    ///
    /// # Errors
    /// `BadHandle`; the source's errno; the kernel's.
    pub(super) fn refresh_privileges(&self, handle: HandleRef, kernel: &dyn KernelView) -> FsResult<()> {
        let HandleRef { ino, fh } = handle;
        let file = self.file(ino, fh)?;
        if !file.kernel_inode.privileged.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        let attr = file.file.stat().inspect_err(|_| file.kernel_inode.note_mode(PRIVILEGE_BITS))?;
        file.kernel_inode.note_mode(attr.mode);
        kernel_result(kernel.forget_attr(ino))
    }

    fn grow_kernel_size(
        &self,
        ino: u64,
        file: &dyn WritableFile,
        known: &Arc<KernelInode>,
        size: u64,
        kernel: &dyn KernelView,
    ) -> FsResult<()> {
        let Some(last) = size.checked_sub(1).filter(|_| known.size() < size) else { return Ok(()) };
        let mut byte = [0];
        let read = match file.read_at(last, &mut byte) {
            Ok(read) => read,
            // It may be open for writing only.
            Err(_) => file.reopen(O_RDONLY, &Caller::default())?.read_at(last, &mut byte)?,
        };
        if read == 1 {
            // Before the kernel has it: a shorter length that goes there meanwhile counts.
            known.note_written(size);
            let stored = kernel.store_byte(ino, last, byte[0]);
            kernel_result(stored.inspect_err(|_| known.lower_size(0)))?;
        }
        Ok(())
    }
}

fn kernel_result(sent: io::Result<()>) -> FsResult<()> {
    Ok(sent.map_err(|error| Error::io("the kernel took no notification", &error))?)
}
