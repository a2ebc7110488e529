//! Which opens of an inode the kernel serves from a cached file (passthrough). The kernel allows no mixture: an inode
//! open in cached mode cannot be opened for passthrough, nor the reverse, and all passthrough opens of an inode use
//! the same backing file. It does not know how a file is registered with the kernel.

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use spurline_types::ObjectRef;
use spurline_volume::Volume;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Registers backing files with the kernel.
pub trait RegisterBacking {
    /// Registers `file`; dropping the result withdraws it.
    ///
    /// # Errors
    /// The kernel's error; the file is then read in cached mode.
    fn register_file(&self, file: &File) -> io::Result<Box<dyn RegisteredBacking>>;

    /// As [`RegisterBacking::register_file`], for reads and writes with the rights of a user and a group.
    fn register_file_as(&self, file: &File, uid: u32, gid: u32) -> io::Result<Box<dyn RegisteredBacking>> {
        let _ = (uid, gid);
        self.register_file(file)
    }

    /// The registration with this number that a process before has made.
    fn adopt_registration(&self, id: i32) -> Option<Box<dyn RegisteredBacking>> {
        let _ = id;
        None
    }
}

/// A registered backing file; withdrawn when dropped.
pub trait RegisteredBacking: Send + Sync {
    /// The kernel's number for it.
    fn backing_id(&self) -> i32;
}

/// A registered backing file. Its registration is withdrawn before the file may be evicted.
pub struct LiveBacking {
    backing_id: Box<dyn RegisteredBacking>,
    // Not the file itself: the kernel has it open, and descriptors are scarce when programs hold many files open.
    _kept: Box<dyn Send + Sync>,
}

impl LiveBacking {
    /// A registered file; `kept` lives as long.
    pub fn new(backing_id: Box<dyn RegisteredBacking>, kept: Box<dyn Send + Sync>) -> Self {
        LiveBacking { backing_id, _kept: kept }
    }

    /// The kernel's number for it.
    pub fn id(&self) -> i32 {
        self.backing_id.backing_id()
    }
}

/// The opens of one inode, by mode.
#[derive(Default)]
pub struct OpenModes {
    cached: u32,
    passthrough: u32,
    live: Option<Arc<LiveBacking>>,
}

impl OpenModes {
    /// Counts one more open and returns its mode: passthrough with a backing file, or cached. Requests a backing file
    /// from the volume only when no earlier open of the inode decided the mode. `direct`: the program uses O_DIRECT,
    /// which the backing file must support as well.
    pub fn count_open(
        &mut self,
        volume: &dyn Volume,
        object: &ObjectRef,
        register: Option<&dyn RegisterBacking>,
        direct: bool,
    ) -> Option<Arc<LiveBacking>> {
        if self.cached == 0
            && let Some(live) = &self.live
        {
            self.passthrough += 1;
            return Some(Arc::clone(live));
        }
        let live = match register {
            Some(register) if self.cached == 0 => register_backing(volume, object, register, direct),
            _ => None,
        };
        match &live {
            Some(live) => {
                self.passthrough += 1;
                self.live = Some(Arc::clone(live));
            }
            None => self.cached += 1,
        }
        live
    }

    /// Counts an open that a process before has made.
    pub fn adopt_open(&mut self, backing: Option<Arc<LiveBacking>>) {
        match backing {
            Some(backing) => {
                self.passthrough += 1;
                self.live = Some(backing);
            }
            None => self.cached += 1,
        }
    }

    /// The file that the kernel reads directly.
    pub fn live_backing(&self) -> Option<Arc<LiveBacking>> {
        self.live.clone()
    }

    /// Whether handles have the inode open in cached mode.
    pub fn is_cached(&self) -> bool {
        self.cached > 0
    }

    /// Whether any handle has the inode open.
    pub fn is_open(&self) -> bool {
        self.cached > 0 || self.passthrough > 0
    }

    /// Counts one open less. The caller drops the result after it has released the lock.
    pub fn count_release(&mut self, passthrough: bool) -> Option<Arc<LiveBacking>> {
        if !passthrough {
            self.cached = self.cached.saturating_sub(1);
            return None;
        }
        self.passthrough = self.passthrough.saturating_sub(1);
        if self.passthrough == 0 { self.live.take() } else { None }
    }
}

/// Whether the file's file system supports O_DIRECT.
fn takes_direct(file: &File) -> bool {
    let Ok(flags) = fcntl_getfl(file) else { return false };
    fcntl_setfl(file, flags | OFlags::DIRECT).and_then(|()| fcntl_setfl(file, flags)).is_ok()
}

fn register_backing(
    volume: &dyn Volume,
    object: &ObjectRef,
    register: &dyn RegisterBacking,
    direct: bool,
) -> Option<Arc<LiveBacking>> {
    let backing = volume.backing(object)?;
    // A file of another length would show the kernel another end of file.
    if backing.file().metadata().ok()?.len() != object.size {
        tracing::warn!(object = %object.id, "the length of a cached file differs from its object's; the kernel does not read it directly");
        return None;
    }
    // The open would fail with EIO.
    if direct && !takes_direct(backing.file()) {
        return None;
    }
    match register.register_file(backing.file()) {
        Ok(id) => Some(Arc::new(LiveBacking::new(id, backing.close()))),
        Err(error) => {
            tracing::debug!(%error, "the kernel refused a backing file; the file is read in cached mode");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn direct_opens_are_told_from_what_the_file_system_takes() {
        assert!(!takes_direct(&File::open("/proc/self/status").unwrap()));
        let file = tempfile::NamedTempFile::new().unwrap();
        let direct = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(file.path()).is_ok();
        let shared = file.reopen().unwrap();
        assert_eq!(takes_direct(&shared), direct);
        assert!(!fcntl_getfl(&shared).unwrap().contains(OFlags::DIRECT), "it is read through the page cache still");
    }
}
