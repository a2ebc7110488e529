//! Files that the kernel reads directly (FUSE passthrough): registration, and withdrawal on drop. It does not decide
//! which files are eligible.

use crate::abi;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// A registered file's number, valid while its [`RegisteredFile`] lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BackingId(pub(crate) i32);

/// Registers files for passthrough with one session. Cheap to clone.
#[derive(Debug, Clone)]
pub struct BackingRegistrar {
    // Weak, so that a handler that outlives its session does not keep the dead connection open.
    device: Weak<OwnedFd>,
}

impl BackingRegistrar {
    pub(crate) fn new(device: &Arc<OwnedFd>) -> Self {
        BackingRegistrar { device: Arc::downgrade(device) }
    }

    /// Registers `file`, which the kernel then reads directly. The caller may close the descriptor at once.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ELOOP when the file is on a stacked file system (overlayfs, FUSE passthrough);
    /// EOPNOTSUPP when its file system has no support; ENODEV after the session's end.
    pub fn register_file(&self, file: BorrowedFd<'_>) -> io::Result<RegisteredFile> {
        let device = self.device.upgrade().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        let map = abi::BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: both descriptors are open for the call and the kernel only reads the 16 bytes of `map`.
        let id = unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_OPEN as _, &raw const map) };
        if id <= 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(RegisteredFile { id: BackingId(id), device: self.device.clone() })
    }
}

/// A registered file. Dropping it withdraws the number; open handles continue to read the file.
#[derive(Debug)]
pub struct RegisteredFile {
    id: BackingId,
    device: Weak<OwnedFd>,
}

impl RegisteredFile {
    /// The number for [`crate::HandleReply::backing`].
    pub fn id(&self) -> BackingId {
        self.id
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        if let Some(device) = self.device.upgrade() {
            let id = self.id.0 as u32;
            // SAFETY: the descriptor is open for the call and the kernel only reads the 4 bytes of `id`.
            unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_CLOSE as _, &raw const id) };
        }
    }
}
