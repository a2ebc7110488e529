//! Notifications to the kernel about entries and pages to forget. Does not decide which.

use crate::abi::{self, OutHeader, bytes_of, notify};
use crate::reply::write_vectored;
use std::fmt::Debug;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The first minor version of the protocol with FUSE_NOTIFY_PRUNE.
const PRUNE_MINOR: u32 = 45;

/// Another process that sends notifications which wait for requests. No signal ends such a wait: a process that is killed while it
/// waits for a request to itself does not end.
pub trait NotificationRelay: Debug + Send + Sync {
    /// Sends a notification to the connection `device`, and `if_ended` if this process has ended before the kernel's answer.
    /// Returns the kernel's error number, or 0; `None` when the other process takes no notification.
    fn relay(&self, device: BorrowedFd<'_>, notification: &[u8], if_ended: &[u8]) -> Option<i32>;
}

/// Sends notifications to the kernel. Cheap to clone.
#[derive(Debug, Clone)]
pub struct KernelNotifier {
    // Weak, so that a file system that outlives the session does not keep the dead connection open.
    device: Weak<OwnedFd>,
    prunes: Arc<AtomicBool>,
    relay: Option<Arc<dyn NotificationRelay>>,
}

impl KernelNotifier {
    pub(crate) fn new(device: &Arc<OwnedFd>, minor: u32, relay: Option<Arc<dyn NotificationRelay>>) -> Self {
        let prunes = Arc::new(AtomicBool::new(minor >= PRUNE_MINOR));
        KernelNotifier { device: Arc::downgrade(device), prunes, relay }
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
        match self.send_waiting(&message(notify::PRUNE, &[bytes_of(&head), &list]), &[]) {
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
        match self.send_waiting(&message(notify::INVAL_ENTRY, &[bytes_of(&head), name, &[0]]), &[]) {
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
        match self.send(&message(notify::INVAL_INODE, &[bytes_of(&head)])) {
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
        match self.send_waiting(&drop_pages_message(ino), &[]) {
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
        let store = message(notify::STORE, &[bytes_of(&head), &[byte]]);
        // After the end of this process, the next one takes writes of this byte before the kernel has stored it.
        match self.send_waiting(&store, &drop_pages_message(ino)) {
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
            sent => sent,
        }
    }

    /// Makes the kernel queue the requests again that were taken and not answered.
    ///
    /// # Errors
    /// ENODEV after the session's end; EINVAL before Linux 6.9.
    pub(crate) fn request_again(&self) -> io::Result<()> {
        self.send(&message(notify::RESEND, &[]))
    }

    /// Sends a notification that waits for requests, and `if_ended` if this process ends meanwhile.
    fn send_waiting(&self, notification: &[u8], if_ended: &[u8]) -> io::Result<()> {
        if let Some(relay) = &self.relay
            && let Some(errno) = relay.relay(self.device()?.as_fd(), notification, if_ended)
        {
            return kernel_result(errno);
        }
        self.send(notification)
    }

    fn send(&self, notification: &[u8]) -> io::Result<()> {
        let sent = write_vectored(self.device()?.as_fd(), &[IoSlice::new(notification)]);
        kernel_result(sent.err().unwrap_or(0))
    }

    fn device(&self) -> io::Result<Arc<OwnedFd>> {
        self.device.upgrade().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))
    }
}

fn message(code: i32, pieces: &[&[u8]]) -> Vec<u8> {
    let len = size_of::<OutHeader>() + pieces.iter().map(|piece| piece.len()).sum::<usize>();
    let header = OutHeader { len: len as u32, error: code, unique: 0 };
    let mut bytes = Vec::with_capacity(len);
    bytes.extend_from_slice(bytes_of(&header));
    for piece in pieces {
        bytes.extend_from_slice(piece);
    }
    bytes
}

fn drop_pages_message(ino: u64) -> Vec<u8> {
    message(notify::INVAL_INODE, &[bytes_of(&abi::NotifyInvalInodeOut { ino, off: 0, len: 0 })])
}

fn kernel_result(errno: i32) -> io::Result<()> {
    match errno {
        0 => Ok(()),
        // The connection was aborted, or is gone.
        libc::ECONNABORTED | libc::ENOTCONN | libc::EPERM => Err(io::Error::from_raw_os_error(libc::ENODEV)),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
