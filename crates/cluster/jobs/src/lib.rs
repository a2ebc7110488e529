//! Work on many files of a cache group: loading, checking and freeing. Walks, counts, retries, and resumes after a restart. Knows
//! neither nodes nor networks: a [`JobTarget`] does the work.
#![forbid(unsafe_code)]

mod checkpoint;
mod completed;
mod manager;
mod progress;
mod rate;
mod records;
mod requests;
mod run;
mod spec;
mod speed;
mod spool;
mod walk;

pub use manager::{JobManager, JobTotals, OpenTarget};
pub use progress::{FailedFile, JobProgress, JobState};
pub use records::{DirJobRecords, JobRecord, JobRecords, NoJobRecords};
pub use requests::{JobReport, JobRequest};
pub use run::{JobRun, run_job};
pub use spec::{CountOptions, JobAction, JobSpec};
pub use walk::FileFilter;

use spurline_types::{Error, ListPage, ObjectAttr, ObjectRef, Result};
use std::ops::Range;

/// Result of work on a part of a file, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WorkDone {
    /// Bytes of blocks that were cached before; of a free job, pinned blocks that stay.
    pub held: u64,
    /// Bytes fetched or dropped.
    pub moved: u64,
}

impl std::ops::AddAssign for WorkDone {
    fn add_assign(&mut self, other: WorkDone) {
        self.held += other.held;
        self.moved += other.moved;
    }
}

/// A range of blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilePart {
    /// The file at a version.
    pub object: ObjectRef,
    /// The blocks; never empty.
    pub blocks: Range<u32>,
}

/// A cache as seen by jobs. Every call ends within a timeout and returns a result for each part, in order.
pub trait JobTarget: Send + Sync {
    /// The source's URL, without credentials.
    fn source(&self) -> &str;
    /// Bytes of a block.
    fn block_size(&self) -> u64;
    /// Attributes of a path below the source.
    ///
    /// # Errors
    /// `NotFound`, or the cache's failure.
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr>;
    /// A page of a folder.
    ///
    /// # Errors
    /// As for [`JobTarget::lookup`].
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage>;
    /// Best number of parallel [`JobTarget::warm_parts`] requests for short files, in a job limited to `requests`; 1 if parts are
    /// handled singly.
    fn parallel_short(&self, _requests: usize) -> usize {
        1
    }
    /// Why a block cannot have `copies` copies now; `None` when that is possible.
    fn missing_copies(&self, _copies: u32) -> Option<String> {
        None
    }
    /// Fetches the missing blocks of these parts on `replicas` nodes each (default: the group's number); for short
    /// files, up to `at_once` in parallel.
    fn warm_parts(&self, parts: &[FilePart], replicas: Option<u32>, at_once: usize) -> Vec<Result<WorkDone>>;
    /// Reads back and checks the cached blocks of these parts; a missing or wrong block is an error.
    fn check_parts(&self, parts: &[FilePart], replicas: Option<u32>) -> Vec<Result<WorkDone>>;
    /// A note for people about a finished load with files that are not fully cached. The job loaded `bytes`; `files` yields
    /// each path and length; `replicas` is as for [`JobTarget::warm_parts`].
    fn load_remark(
        &self,
        _replicas: Option<u32>,
        _bytes: u64,
        _files: &mut dyn Iterator<Item = (Vec<u8>, u64)>,
    ) -> Option<String> {
        None
    }
    /// Drops these parts from all caches; pinned blocks only if `with_pinned`.
    fn free_parts(&self, parts: &[FilePart], with_pinned: bool) -> Vec<Result<WorkDone>>;
    /// Drops all blocks of the source from all caches, of any file and version, or of `every_source`; pinned blocks only if
    /// `with_pinned`. Returns also why a cache did not drop all blocks.
    fn free_all(&self, every_source: bool, with_pinned: bool) -> (WorkDone, Option<Error>);
}
