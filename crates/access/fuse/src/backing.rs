//! Files the kernel reads by itself (FUSE passthrough): registering them, and forgetting them on drop.
//! It deliberately does not decide which file may be handed over.

use crate::abi;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// A registered file's number, good while its [`Backing`] lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackingId(pub(crate) i32);

/// Registers files for passthrough with one session. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Backings {
    // Weak, so that a handler that outlives its session does not keep the dead connection open.
    device: Weak<OwnedFd>,
}

impl Backings {
    pub(crate) fn new(device: &Arc<OwnedFd>) -> Self {
        Backings { device: Arc::downgrade(device) }
    }

    /// Registers `file`, which the kernel then reads in place of asking. The descriptor may be closed at once.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ELOOP when the file lies on a stacked file system (overlayfs, FUSE
    /// passthrough); EOPNOTSUPP when its file system can't; ENODEV after the session's end.
    pub fn register(&self, file: BorrowedFd<'_>) -> io::Result<Backing> {
        let device = self.device.upgrade().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        let map = abi::BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: both descriptors are open for the call and the kernel only reads the 16 bytes of `map`.
        let id = unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_OPEN as _, &raw const map) };
        if id <= 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Backing { id: BackingId(id), device: self.device.clone() })
    }
}

/// A registered file. Dropping it forgets the number; handles opened with it go on reading the file.
#[derive(Debug)]
pub struct Backing {
    id: BackingId,
    device: Weak<OwnedFd>,
}

impl Backing {
    /// The number to give in [`crate::Opened::backing`].
    pub fn id(&self) -> BackingId {
        self.id
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        if let Some(device) = self.device.upgrade() {
            let id = self.id.0 as u32;
            // SAFETY: the descriptor is open for the call and the kernel only reads the 4 bytes of `id`.
            unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_CLOSE as _, &raw const id) };
        }
    }
}
