//! The open files and directories of a writable mount, and the state that the opens of a node share: the kernel's pages, the source's own
//! file in the kernel, and cached bytes. It knows neither names nor the source.

use super::kernel_inode::KernelInode;
use super::lock_table::HandleLocks;
use super::opener::FileOpener;
use super::version_reads::{CacheEvents, VersionReads};
use crate::errno::{FsError, FsResult};
use crate::handle::HandleTable;
use crate::passthrough::LiveBacking;
use parking_lot::Mutex;
use spurline_volume::writes::{NodeAttr, WritableDirectory, WritableFile};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The opens of one node.
#[derive(Default)]
pub(super) struct OpenNode {
    pub state: Mutex<OpenNodeState>,
}

#[derive(Default)]
pub(super) struct OpenNodeState {
    pub files: Vec<(u64, Weak<OpenNodeFile>)>,
    /// Opens through this process, and by the kernel itself: it refuses a mixture.
    pub cached: u32,
    pub passthrough: u32,
    /// Of the opens by the kernel itself, how many can be mapped to store into.
    pub mappable: u32,
    pub live: Option<Arc<LiveBacking>>,
    /// Opens that only write, past the kernel's pages. All later ones bypass them too: pages that are read during such a write
    /// could be older than it.
    pub direct_writers: u32,
    /// The attributes of the version that files are read in from cached bytes.
    pub cached_as: Option<NodeAttr>,
}

pub(super) struct OpenNodeFile {
    pub ino: u64,
    pub file: Box<dyn WritableFile>,
    pub flags: i32,
    pub passthrough: bool,
    pub direct_writer: bool,
    /// The record that outlives this process; 0 for none.
    pub record: AtomicU32,
    /// Of a file whose bytes a close shows to others.
    pub opener: Option<FileOpener>,
    pub kernel_inode: Arc<KernelInode>,
    /// It was opened to be read from cached bytes.
    pub version_reads: Option<VersionReads>,
    /// Behind `file`: the locks are known as held until the source has closed the file, whichever request drops it last.
    pub locks: HandleLocks,
}

impl OpenNodeFile {
    pub fn writes(&self) -> bool {
        may_write(self.flags)
    }

    /// Whether programs can store into the source's own file: that moves the times without a request.
    pub fn is_mappable(&self) -> bool {
        self.passthrough && self.flags & libc::O_ACCMODE == libc::O_RDWR
    }
}

pub(super) fn may_write(flags: i32) -> bool {
    flags & libc::O_ACCMODE != libc::O_RDONLY
}

pub(super) struct OpenNodeDirectory {
    pub ino: u64,
    pub directory: Box<dyn WritableDirectory>,
    /// The record that outlives this process; 0 for none.
    pub record: AtomicU32,
}

/// All open files and directories.
#[derive(Default)]
pub(super) struct OpenNodes {
    // Field order is drop order: open handles release their backing files first.
    pub files: HandleTable<OpenNodeFile>,
    pub directories: HandleTable<OpenNodeDirectory>,
    opens: Mutex<HashMap<u64, Arc<OpenNode>>>,
    /// Open files whose times can move without a request.
    mappable_opens: AtomicU64,
    pub cache_events: CacheEvents,
}

impl OpenNodes {
    /// Closes everything that is open.
    pub fn clear(&self) {
        self.files.clear();
        self.directories.clear();
    }

    /// Processes that have served the mount before: see [`HandleTable::set_takeovers`].
    pub fn set_takeovers(&self, takeovers: u64) {
        self.files.set_takeovers(takeovers);
        self.directories.set_takeovers(takeovers);
    }

    fn find(&self, ino: u64) -> Option<Arc<OpenNode>> {
        self.opens.lock().get(&ino).cloned()
    }

    /// The opens of a node, for a further open.
    pub fn of_node(&self, ino: u64) -> Arc<OpenNode> {
        Arc::clone(self.opens.lock().entry(ino).or_default())
    }

    /// The nodes of all open files.
    pub fn inodes(&self) -> HashSet<u64> {
        self.opens.lock().keys().copied().collect()
    }

    pub fn any_file(&self, ino: u64) -> Option<Arc<OpenNodeFile>> {
        let open = self.find(ino)?;
        let state = open.state.lock();
        state.files.iter().find_map(|(_, file)| file.upgrade())
    }

    /// Whether the kernel may have pages of the node: the source's own file has none here.
    pub fn has_pages(&self, ino: u64) -> bool {
        let open = self.find(ino);
        open.is_some_and(|open| open.state.lock().cached > 0)
    }

    /// Whether the kernel reads and writes the source's own file of the node.
    pub fn is_passed_through(&self, ino: u64) -> bool {
        let open = self.find(ino);
        open.is_some_and(|open| open.state.lock().passthrough > 0)
    }

    /// Whether programs can store into the node's own file of the source.
    pub fn is_mappable(&self, ino: u64) -> bool {
        self.mappable_opens.load(Ordering::Relaxed) > 0
            && self.find(ino).is_some_and(|open| open.state.lock().mappable > 0)
    }

    /// The open file of a handle.
    pub fn file(&self, ino: u64, fh: u64) -> FsResult<Arc<OpenNodeFile>> {
        self.files.get(fh).filter(|file| file.ino == ino).ok_or(FsError::BadHandle(fh))
    }

    /// The open directory of a handle.
    pub fn directory(&self, ino: u64, fh: u64) -> FsResult<Arc<OpenNodeDirectory>> {
        self.directories.get(fh).filter(|directory| directory.ino == ino).ok_or(FsError::BadHandle(fh))
    }

    /// A further open of the node of `state`.
    pub fn add_file(&self, state: &mut OpenNodeState, fh: u64, file: &Arc<OpenNodeFile>) {
        match file.passthrough {
            true => state.passthrough += 1,
            false => state.cached += 1,
        }
        if file.is_mappable() {
            state.mappable += 1;
            self.mappable_opens.fetch_add(1, Ordering::Relaxed);
        }
        if file.version_reads.is_some() {
            self.cache_events.add_file();
        }
        state.files.push((fh, Arc::downgrade(file)));
        state.direct_writers += u32::from(file.direct_writer);
    }

    /// The end of an open of a node. Returns the bytes that the kernel has read and written directly, if this was the last such open.
    pub fn remove_file(&self, fh: u64, file: &OpenNodeFile) -> Option<Arc<LiveBacking>> {
        let mut opens = self.opens.lock();
        let open = opens.get(&file.ino).cloned()?;
        let mut state = open.state.lock();
        state.files.retain(|(own, _)| *own != fh);
        match file.passthrough {
            true => state.passthrough = state.passthrough.saturating_sub(1),
            false => state.cached = state.cached.saturating_sub(1),
        }
        if file.is_mappable() {
            state.mappable -= 1;
            self.mappable_opens.fetch_sub(1, Ordering::Relaxed);
        }
        state.direct_writers = state.direct_writers.saturating_sub(u32::from(file.direct_writer));
        if file.version_reads.is_some() {
            self.cache_events.remove_file();
        }
        if state.files.is_empty() {
            opens.remove(&file.ino);
        }
        if state.passthrough == 0 { state.live.take() } else { None }
    }

    /// Whether a file that is being opened may be read from cached bytes; `events`: the count before the source was asked.
    pub fn may_read_cached(&self, ino: u64, state: &OpenNodeState, events: u64) -> bool {
        let is_written = state.files.iter().any(|(_, file)| file.upgrade().is_some_and(|file| file.writes()));
        !is_written && state.passthrough == 0 && self.cache_events.is_quiet_since(ino, events)
    }

    /// All open files of the node are read from the source from now on, also those that are being opened.
    pub fn end_cached_reads(&self, ino: u64, state: &mut OpenNodeState) {
        self.cache_events.note(ino);
        if state.cached_as.take().is_some() {
            let files = state.files.iter().filter_map(|(_, file)| file.upgrade());
            files.for_each(|file| file.version_reads.iter().for_each(VersionReads::leave));
        }
    }

    /// All open files of the node are read from the source from now on.
    pub fn leave_cache(&self, ino: u64) {
        self.cache_events.note(ino);
        if let Some(open) = self.find(ino) {
            self.end_cached_reads(ino, &mut open.state.lock());
        }
    }

    /// The source has the file with these attributes: if it is open in another version, it is read from the source.
    pub fn compare_cached(&self, ino: u64, attr: &NodeAttr) {
        if !self.cache_events.has_files() {
            return;
        }
        let Some(open) = self.find(ino) else { return };
        let mut state = open.state.lock();
        if state.cached_as.is_some_and(|cached| !cached.same_bytes(attr)) {
            self.end_cached_reads(ino, &mut state);
        }
    }
}

/// Whether each read and write of an open file becomes a request.
pub(super) fn bypasses_pages(flags: i32, passthrough: bool, state: &OpenNodeState) -> bool {
    // An appended record may land elsewhere than the kernel believes, if another host appends too.
    let appends = may_write(flags) && flags & libc::O_APPEND != 0;
    !passthrough && (appends || state.direct_writers > 0)
}
