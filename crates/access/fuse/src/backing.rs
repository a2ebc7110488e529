//! Files that the kernel reads directly (FUSE passthrough): registration, and withdrawal on drop. Does not decide which files are
//! eligible.

use crate::abi;
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Registers files for passthrough with a session.
pub(crate) struct BackingRegistrar {
    // Weak, so that a file system that outlives the session does not keep the dead connection open.
    device: Weak<OwnedFd>,
}

impl BackingRegistrar {
    pub(crate) fn new(device: &Arc<OwnedFd>) -> Self {
        BackingRegistrar { device: Arc::downgrade(device) }
    }

    /// Registers `file`, which the kernel then reads and writes directly: with the rights of the user and group, if given, so
    /// that a file server gets these, and quotas are the user's. The caller may close the descriptor at once.
    ///
    /// # Errors
    /// EPERM without CAP_SYS_ADMIN; ELOOP when the file is on a stacked file system (overlayfs, FUSE passthrough); EOPNOTSUPP
    /// when the file system there has no support; ENODEV after the session's end.
    pub(crate) fn register_file(&self, file: BorrowedFd<'_>, user: Option<(u32, u32)>) -> io::Result<RegisteredFile> {
        let device = self.device.upgrade().ok_or_else(|| io::Error::from_raw_os_error(libc::ENODEV))?;
        let _as_user = user.map(|(uid, gid)| FileUser::assume(uid, gid));
        let map = abi::BackingMap { fd: file.as_raw_fd(), flags: 0, padding: 0 };
        // SAFETY: both descriptors are open for the call and the kernel only reads the 16 bytes of `map`.
        let id = unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_OPEN as _, &raw const map) };
        if id <= 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(RegisteredFile { id, device: self.device.clone() })
    }
}

impl BackingRegistrar {
    /// The file that a process before has registered with this number.
    pub(crate) fn adopt_file(&self, id: i32) -> RegisteredFile {
        RegisteredFile { id, device: self.device.clone() }
    }
}

/// This thread opens files as another user, until this value is dropped. The thread keeps the right to register files.
struct FileUser {
    uid: u32,
    gid: u32,
    capabilities: Option<CapabilitySets>,
}

impl FileUser {
    fn assume(uid: u32, gid: u32) -> FileUser {
        // Without this right, quotas and the reserve of a full disk bind the user.
        let capabilities = capabilities(None).ok();
        if let Some(sets) = capabilities {
            let effective = sets.effective - CapabilitySet::SYS_RESOURCE;
            let _ = set_capabilities(None, CapabilitySets { effective, ..sets });
        }
        // SAFETY: both calls change numbers of this thread only, and have no other condition.
        let (gid, uid) = unsafe { (libc::setfsgid(gid), libc::setfsuid(uid)) };
        FileUser { uid: uid as u32, gid: gid as u32, capabilities }
    }
}

impl Drop for FileUser {
    fn drop(&mut self) {
        // SAFETY: as in `assume`. Setting back brings back the capabilities of files, too.
        unsafe {
            libc::setfsuid(self.uid);
            libc::setfsgid(self.gid);
        }
        if let Some(sets) = self.capabilities.take() {
            let _ = set_capabilities(None, sets);
        }
    }
}

/// A registered file. A drop withdraws the number; open handles continue to read the file.
pub(crate) struct RegisteredFile {
    id: i32,
    device: Weak<OwnedFd>,
}

impl RegisteredFile {
    /// The kernel's number of the file.
    pub(crate) fn id(&self) -> i32 {
        self.id
    }
}

impl Drop for RegisteredFile {
    fn drop(&mut self) {
        if let Some(device) = self.device.upgrade() {
            let id = self.id as u32;
            // SAFETY: the descriptor is open for the call and the kernel only reads the 4 bytes of `id`.
            unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_CLOSE as _, &raw const id) };
        }
    }
}
