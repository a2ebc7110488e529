//! The kernel's view of a file's bytes, and how it learns that others have changed them. It knows neither locks nor the
//! device that notifications go through.
//!
//! A notification makes the kernel drop the answer to a request for attributes that is under way, and not repeat the request.
//! The read that made it then ends at the old length. So a notification alone can hide the end of a file from a
//! reader that holds its lock. A length that grew is therefore put into the kernel before the program goes on: the last byte of
//! the file is stored there. A length that shrank corrects itself at the first short read.

use super::kernel_inode::PRIVILEGE_BITS;
use super::nodes::NodeTable;
use super::open_nodes::OpenNodeFile;
use crate::errno::FsResult;
use crate::service::{BeginWait, KernelView};
use parking_lot::Mutex;
use spurline_types::Error;
use spurline_volume::writes::{Caller, FileLock, LockKind, NodeAttr};
use std::any::Any;
use std::io;

/// Locks, so that files rarely meet.
const SHARDS: usize = 16;
/// From `asm-generic/fcntl.h`.
const O_RDONLY: u32 = 0;

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

/// One change of the kernel's view of a file at a time.
#[derive(Default)]
pub(super) struct KernelRefreshes([Mutex<()>; SHARDS]);

impl KernelRefreshes {
    fn of(&self, ino: u64) -> &Mutex<()> {
        &self.0[ino as usize % SHARDS]
    }

    /// The file was locked: what others wrote under their lock is read now, up to the end that it has now.
    pub fn refresh_locked(&self, file: &OpenNodeFile, kernel: &dyn KernelView) -> FsResult<()> {
        let _one = self.of(file.ino).lock();
        // First: a page that is read until the byte is stored has the bytes up to there.
        kernel_result(kernel.drop_pages(file.ino))?;
        let size = file.file.stat()?.size;
        grow_kernel_size(file, size, kernel)
    }

    /// The file was opened with these attributes, and the kernel's are of another version.
    pub fn refresh_opened(
        &self,
        file: &OpenNodeFile,
        attr: &NodeAttr,
        nodes: &NodeTable,
        kernel: &dyn KernelView,
    ) -> FsResult<()> {
        let ino = file.ino;
        let _one = self.of(ino).lock();
        if file.kernel_inode.size() >= attr.size {
            kernel_result(kernel.forget_attr(ino))?;
        } else {
            kernel_result(kernel.drop_pages(ino))?;
            grow_kernel_size(file, attr.size, kernel)?;
        }
        // Later answers to the kernel are not older.
        nodes.note_refreshed(ino, attr);
        Ok(())
    }
}

/// A caller has changed bytes of the file: set-user-ID and set-group-ID bits that went with that are not in force in the
/// kernel either.
pub(super) fn refresh_privileges(file: &OpenNodeFile, kernel: &dyn KernelView) -> FsResult<()> {
    if !file.kernel_inode.take_privileged() {
        return Ok(());
    }
    let attr = file.file.stat().inspect_err(|_| file.kernel_inode.note_mode(PRIVILEGE_BITS))?;
    file.kernel_inode.note_mode(attr.mode);
    kernel_result(kernel.forget_attr(file.ino))
}

fn grow_kernel_size(file: &OpenNodeFile, size: u64, kernel: &dyn KernelView) -> FsResult<()> {
    let Some(last) = size.checked_sub(1).filter(|_| file.kernel_inode.size() < size) else { return Ok(()) };
    let mut byte = [0];
    let read = match file.file.read_at(last, &mut byte) {
        Ok(read) => read,
        // It may be open for writing only.
        Err(_) => file.file.reopen(O_RDONLY, &Caller::default())?.read_at(last, &mut byte)?,
    };
    if read == 1 {
        // Before the kernel has it: a shorter length that goes there meanwhile counts.
        file.kernel_inode.note_written(size);
        let stored = kernel.store_byte(file.ino, last, byte[0]);
        kernel_result(stored.inspect_err(|_| file.kernel_inode.lower_size(0)))?;
    }
    Ok(())
}

fn kernel_result(sent: io::Result<()>) -> FsResult<()> {
    Ok(sent.map_err(|error| Error::io("the kernel took no notification", &error))?)
}
