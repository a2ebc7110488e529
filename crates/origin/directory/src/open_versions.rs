//! The version whose cached bytes may be read in place of an open file of a directory that is changed. It knows neither paths
//! nor caches.
//!
//! | the file | reads |
//! |---|---|
//! | this process has it open for changes | the file |
//! | another process of this host has, as its file system reports | the file |
//! | it can still change without changing its times | the file |
//! | otherwise | cached bytes of the version that its times make |
//!
//! The last three are the rules of a directory that is only read.

use parking_lot::Mutex;
use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::AtFlags;
use rustix::io::Errno;
use spurline_origin::{ClockLag, FileStat, WriterCheck, stat_on_server};
use spurline_types::FileKind;
use spurline_volume::writes::{CacheVersion, FileIdentity, NodeAttr};
use std::collections::HashMap;
use std::sync::Arc;

/// File systems whose files are on another host, or in another process: NFS, SMB (three), Lustre, FUSE, Ceph, 9P, GPFS,
/// BeeGFS, AFS and Coda.
const NETWORK_FILE_SYSTEMS: [u32; 12] = [
    0x6969,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x0bd0_0bd0,
    0x6573_5546,
    0x00c3_6400,
    0x0102_1997,
    0x4750_4653,
    0x1983_0326,
    0x5346_414f,
    0x7375_7245,
];

/// Whether a directory is on a network file system, or on one in user space.
pub(crate) fn is_on_network(fd: BorrowedFd<'_>) -> bool {
    // The numbers have 32 bits, whatever the width of the field, and some are sign-extended.
    rustix::fs::fstatfs(fd).is_ok_and(|found| NETWORK_FILE_SYSTEMS.contains(&(found.f_type as u32)))
}

/// The files of a source that this process has open for changes, and the versions of all others.
pub(crate) struct OpenVersions {
    /// Otherwise every file is read itself.
    through_cache: bool,
    lag: ClockLag,
    writers: WriterCheck,
    open_for_changes: Mutex<HashMap<FileIdentity, usize>>,
}

impl OpenVersions {
    pub fn new(through_cache: bool) -> Arc<OpenVersions> {
        let writers = WriterCheck::default();
        Arc::new(OpenVersions { through_cache, lag: ClockLag::default(), writers, open_for_changes: Mutex::default() })
    }

    /// Counts an open file that can be changed, until the result is dropped. Nothing is counted where no file is read through a
    /// cache.
    pub fn count_changer(
        self: &Arc<Self>,
        find_identity: impl FnOnce() -> Option<FileIdentity>,
    ) -> Option<OpenChanger> {
        if !self.through_cache {
            return None;
        }
        let identity = find_identity()?;
        *self.open_for_changes.lock().entry(identity).or_default() += 1;
        Some(OpenChanger { versions: Arc::clone(self), identity })
    }

    /// The version of a file that is open for reading, as long as it has the attributes `attr`.
    ///
    /// Cost: one system call for a file that was not changed in the last minutes; `has_server`: as long as a request to its server,
    /// since a client of a file server may have older attributes at an open.
    pub fn version_of(&self, fd: BorrowedFd<'_>, attr: &NodeAttr, has_server: bool) -> CacheVersion {
        if !self.through_cache {
            return CacheVersion::SourceIsNear;
        }
        if self.open_for_changes.lock().contains_key(&attr.identity) {
            return CacheVersion::OpenForChanges;
        }
        let found = if has_server {
            stat_on_server(fd, b"", AtFlags::EMPTY_PATH)
        } else {
            rustix::fs::fstat(fd).map(|stat| FileStat::from(&stat))
        };
        let Ok(found) = found else { return CacheVersion::JustChanged };
        let (settled, _) = self.writers.settle_stat(found, || clone_fd(fd));
        if !self.lag.young_for(fd, &settled).is_zero() || !settled.has_times_of(attr) {
            return CacheVersion::JustChanged;
        }
        if settled.is_unsettled() {
            return CacheVersion::OpenForChanges;
        }
        match settled.object_attr() {
            Some(object) if object.kind == FileKind::File => CacheVersion::Settled(object.version),
            _ => CacheVersion::JustChanged,
        }
    }
}

fn clone_fd(fd: BorrowedFd<'_>) -> rustix::io::Result<OwnedFd> {
    fd.try_clone_to_owned().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

/// A file that is open for changes in this process.
pub(crate) struct OpenChanger {
    versions: Arc<OpenVersions>,
    identity: FileIdentity,
}

impl Drop for OpenChanger {
    fn drop(&mut self) {
        let mut open = self.versions.open_for_changes.lock();
        if let Some(count) = open.get_mut(&self.identity) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.identity);
            }
        }
    }
}
