//! Notifications to the kernel about entries to forget. Does not decide which.

use crate::abi::{self, OutHeader, bytes_of, notify};
use crate::reply::write_vectored;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The first minor version of the protocol with FUSE_NOTIFY_PRUNE.
const PRUNE_MINOR: u32 = 45;

/// Sends notifications to the kernel. Cheap to clone.
#[derive(Debug, Clone)]
pub struct KernelNotifier {
    // Weak, so that a file system that outlives the session does not keep the dead connection open.
    device: Weak<OwnedFd>,
    prunes: Arc<AtomicBool>,
}

impl KernelNotifier {
    pub(crate) fn new(device: &Arc<OwnedFd>, minor: u32) -> Self {
        KernelNotifier { device: Arc::downgrade(device), prunes: Arc::new(AtomicBool::new(minor >= PRUNE_MINOR)) }
    }

    /// Makes the kernel drop the inodes of this list that nothing uses: neither a handle, nor a working directory, nor a
    /// name below. False if the kernel has no such function (before Linux 6.18).
    ///
    /// # Errors
    /// ENODEV after the session's end; the kernel's error.
    pub fn prune_inodes(&self, inodes: impl IntoIterator<Item = u64>) -> io::Result<bool> {
        if !self.prunes.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let list: Vec<u8> = inodes.into_iter().flat_map(u64::to_ne_bytes).collect();
        let head = abi::NotifyPruneOut { count: (list.len() / 8) as u32, padding: 0, spare: 0 };
        match self.send(notify::PRUNE, &[bytes_of(&head), &list]) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                self.prunes.store(false, Ordering::Relaxed);
                Ok(false)
            }
            sent => sent.map(|()| true),
        }
    }

    /// Makes the kernel drop the name `name` in the directory `parent`, and the inode unless in use. A directory in use then has
    /// no path until the name is looked up again. A name that the kernel does not have is no error. Waits for requests in that
    /// directory, so this must not be called while such a request is served.
    ///
    /// # Errors
    /// ENODEV after the session's end; the kernel's error.
    pub fn invalidate_entry(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        let head = abi::NotifyInvalEntryOut { parent, namelen: name.len() as u32, flags: 0 };
        match self.send(notify::INVAL_ENTRY, &[bytes_of(&head), name, &[0]]) {
            // ENOTEMPTY, EBUSY: a directory whose names are in use.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTEMPTY | libc::EBUSY)) => Ok(()),
            sent => sent,
        }
    }

    /// Makes the kernel get the inode's attributes again before the end of the cache time. Pages stay until the attributes show
    /// another length or mtime. Waits for no lock that a request holds. An inode that the kernel does not have is no error.
    ///
    /// # Errors
    /// ENODEV after the session's end; the kernel's error.
    pub fn invalidate_attr(&self, ino: u64) -> io::Result<()> {
        let head = abi::NotifyInvalInodeOut { ino, off: -1, len: 0 };
        match self.send(notify::INVAL_INODE, &[bytes_of(&head)]) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            sent => sent,
        }
    }

    /// Makes the kernel drop the inode's pages and attributes. Waits for reads and writes of these pages that are under way, so
    /// other slots have to serve these. An inode that the kernel does not have is no error.
    ///
    /// # Errors
    /// ENODEV after the session's end; the kernel's error.
    pub fn invalidate_pages(&self, ino: u64) -> io::Result<()> {
        let head = abi::NotifyInvalInodeOut { ino, off: 0, len: 0 };
        match self.send(notify::INVAL_INODE, &[bytes_of(&head)]) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            sent => sent,
        }
    }

    /// Puts a byte into the kernel's pages of the inode, which then has at least that length. Waits for reads and writes of that
    /// page that are under way. An inode that the kernel does not have is no error.
    ///
    /// # Errors
    /// ENODEV after the session's end; the kernel's error.
    pub fn store_byte(&self, ino: u64, offset: u64, byte: u8) -> io::Result<()> {
        let head = abi::NotifyStoreOut { nodeid: ino, offset, size: 1, padding: 0 };
        match self.send(notify::STORE, &[bytes_of(&head), &[byte]]) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            sent => sent,
        }
    }

    /// Makes the kernel queue the requests again that were taken and not answered.
    ///
    /// # Errors
    /// ENODEV after the session's end; EINVAL before Linux 6.9.
    pub(crate) fn request_again(&self) -> io::Result<()> {
        self.send(notify::RESEND, &[])
    }

    fn send(&self, code: i32, pieces: &[&[u8]]) -> io::Result<()> {
        let device = self.device.upgrade().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        let len = size_of::<OutHeader>() + pieces.iter().map(|piece| piece.len()).sum::<usize>();
        let header = OutHeader { len: len as u32, error: code, unique: 0 };
        let mut all = vec![IoSlice::new(bytes_of(&header))];
        all.extend(pieces.iter().map(|piece| IoSlice::new(piece)));
        write_vectored(device.as_fd(), &all).map_err(|errno| match errno {
            // The connection was aborted, or is gone.
            libc::ECONNABORTED | libc::ENOTCONN | libc::EPERM => io::Error::from_raw_os_error(libc::ENODEV),
            errno => io::Error::from_raw_os_error(errno),
        })
    }
}
