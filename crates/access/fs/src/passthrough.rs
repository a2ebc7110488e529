//! Which opens of an inode read through its cached file inside the kernel. The kernel allows no mixing: while
//! an inode is open in cached mode it can't be opened for passthrough, nor the other way round, and all its
//! passthrough opens must name the same backing file. How a file is made known to the kernel is not known here.

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use spurline_types::ObjectRef;
use spurline_volume::Volume;
use std::fs::File;
use std::io;
use std::sync::Arc;

/// Makes backing files known to the kernel.
pub trait RegisterBacking {
    /// Makes `file` known; dropping the answer takes that back.
    ///
    /// # Errors
    /// What the kernel says; the file is then read in cached mode.
    fn register(&self, file: &File) -> io::Result<Box<dyn BackingId>>;
}

/// A backing file the kernel knows; taken back when dropped.
pub trait BackingId: Send + Sync {
    /// The kernel's number for it.
    fn id(&self) -> i32;
}

/// A registered backing file. The number is taken back before the file may be evicted.
pub struct LiveBacking {
    id: Box<dyn BackingId>,
    // Not the file itself: the kernel has it open, and descriptors are few beside files that programs hold open.
    _kept: Box<dyn Send + Sync>,
}

impl LiveBacking {
    /// The kernel's number for it.
    pub fn id(&self) -> i32 {
        self.id.id()
    }
}

/// The opens of one inode, by mode.
#[derive(Default)]
pub struct Opens {
    cached: u32,
    passthrough: u32,
    live: Option<Arc<LiveBacking>>,
}

impl Opens {
    /// Counts one more open and says in which mode: passthrough with its backing file, or cached.
    /// Asks the volume for a backing file only when no open of the inode has decided already. `direct`: the program opens it
    /// with O_DIRECT, which the kernel asks of the backing file as well.
    pub fn open(
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
            Some(register) if self.cached == 0 => back(volume, object, register, direct),
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

    /// Counts one open less; the answer is to be dropped after the lock is let go.
    pub fn release(&mut self, passthrough: bool) -> Option<Arc<LiveBacking>> {
        if !passthrough {
            self.cached = self.cached.saturating_sub(1);
            return None;
        }
        self.passthrough = self.passthrough.saturating_sub(1);
        if self.passthrough == 0 { self.live.take() } else { None }
    }
}

/// Whether the file's file system takes O_DIRECT.
fn takes_direct(file: &File) -> bool {
    let Ok(flags) = fcntl_getfl(file) else { return false };
    fcntl_setfl(file, flags | OFlags::DIRECT).and_then(|()| fcntl_setfl(file, flags)).is_ok()
}

fn back(
    volume: &dyn Volume,
    object: &ObjectRef,
    register: &dyn RegisterBacking,
    direct: bool,
) -> Option<Arc<LiveBacking>> {
    let backing = volume.backing(object)?;
    // A file of another length would show the kernel's readers another end of file.
    if backing.file().metadata().ok()?.len() != object.size {
        tracing::warn!(object = %object.id, "a cached file has not the length of its object; it is not handed to the kernel");
        return None;
    }
    // The open would fail with EIO.
    if direct && !takes_direct(backing.file()) {
        return None;
    }
    match register.register(backing.file()) {
        Ok(id) => Some(Arc::new(LiveBacking { id, _kept: backing.close() })),
        Err(error) => {
            tracing::debug!(%error, "the kernel did not take a backing file; the file is read in cached mode");
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
