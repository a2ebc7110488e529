//! Reads of open files from cached bytes of the version that the source has named at the open. It knows neither the source's
//! rules about versions nor the kernel.
//!
//! A file goes over to the source's file, and its later reads stay there, when
//!
//! | event | reason |
//! |---|---|
//! | the mount opens the file for changes | own writes are read at once |
//! | the mount sets a lock on the file | the bytes that were written under the lock are read |
//! | the mount finds the file in another version | a later open must not read older bytes, which the kernel would keep as its pages |
//! | a read of cached bytes fails | the version is gone, or the cache can't answer |
//!
//! An open during such an event does not read cached bytes: the source may have answered the open before the event.

use crate::block_reads::{BlockReads, FileReadAhead};
use spurline_types::ObjectRef;
use spurline_volume::ReadData;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Counters of events, so that files rarely share one.
const EVENT_COUNTERS: usize = 64;

/// The reads of one open file.
pub(super) struct VersionReads {
    object: ObjectRef,
    readahead: FileReadAhead,
    /// Later reads are of the source's file.
    left: AtomicBool,
}

impl VersionReads {
    /// The reads of an object that is opened.
    pub fn new(object: ObjectRef, blocks: &BlockReads) -> VersionReads {
        let readahead = blocks.open_file(object.size);
        VersionReads { object, readahead, left: AtomicBool::new(false) }
    }

    pub fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// Reads cached bytes; `None` when the source's file has to be read. `find_second`: a clock in seconds.
    pub fn read(
        &self,
        blocks: &BlockReads,
        offset: u64,
        dst: &mut [u8],
        find_second: impl Fn() -> u64,
    ) -> Option<ReadData> {
        if self.has_left() {
            return None;
        }
        match blocks.read(&self.object, &self.readahead, offset, dst, find_second) {
            // An event during the read: these bytes may be older than it.
            Ok(_) if self.has_left() => None,
            Ok(data) => Some(data),
            Err(error) => {
                self.leave();
                let path = String::from_utf8_lossy(&self.object.path);
                tracing::debug!("'/{path}' is read from the source until its next open: {error}");
                None
            }
        }
    }
}

/// Events that end reads of cached bytes, by file, and the number of files that are read so.
pub(super) struct CacheEvents {
    counters: [AtomicU64; EVENT_COUNTERS],
    open_files: AtomicUsize,
}

/// The counts of a moment.
pub(super) struct EventCounts([u64; EVENT_COUNTERS]);

impl EventCounts {
    /// The count of a file, as [`CacheEvents::count`].
    pub fn of(&self, ino: u64) -> u64 {
        self.0[ino as usize % EVENT_COUNTERS]
    }
}

impl Default for CacheEvents {
    fn default() -> Self {
        CacheEvents { counters: [const { AtomicU64::new(0) }; EVENT_COUNTERS], open_files: AtomicUsize::new(0) }
    }
}

impl CacheEvents {
    fn counter(&self, ino: u64) -> &AtomicU64 {
        &self.counters[ino as usize % EVENT_COUNTERS]
    }

    /// The counts of all files, before a lookup that may open a file is sent to the source.
    pub fn counts(&self) -> EventCounts {
        EventCounts(std::array::from_fn(|at| self.counters[at].load(Ordering::SeqCst)))
    }

    /// The count before an open is sent to the source, for [`CacheEvents::is_quiet_since`].
    pub fn count(&self, ino: u64) -> u64 {
        self.counter(ino).load(Ordering::SeqCst)
    }

    pub fn note(&self, ino: u64) {
        self.counter(ino).fetch_add(1, Ordering::SeqCst);
    }

    pub fn is_quiet_since(&self, ino: u64, count: u64) -> bool {
        self.count(ino) == count
    }

    pub fn add_file(&self) {
        self.open_files.fetch_add(1, Ordering::SeqCst);
    }

    pub fn remove_file(&self) {
        self.open_files.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether any file was opened to be read from cached bytes.
    pub fn has_files(&self) -> bool {
        self.open_files.load(Ordering::SeqCst) > 0
    }
}
