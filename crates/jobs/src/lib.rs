//! Work on many files of a cache group: warming them, checking that they are held, freeing them. It walks, counts,
//! repeats what failed, and goes on after a restart. It knows neither nodes nor networks: a [`Target`] does the work.
#![forbid(unsafe_code)]

mod board;
mod keep;
mod pace;
mod progress;
mod run;
mod spec;
mod spool;
mod walk;

pub use board::{Board, Open};
pub use keep::{DirKeep, Keep, Kept};
pub use progress::{Failed, Progress, State};
pub use run::{Run, run};
pub use spec::{Action, Spec};
pub use walk::Filter;

use spurline_types::{Attr, ListPage, ObjectRef, Result};
use std::ops::Range;

/// What came of working on some blocks, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Worked {
    /// Bytes of the blocks that were held before.
    pub held: u64,
    /// Bytes that had to be fetched, or were dropped.
    pub moved: u64,
}

impl std::ops::AddAssign for Worked {
    fn add_assign(&mut self, other: Worked) {
        self.held += other.held;
        self.moved += other.moved;
    }
}

/// A cache group as jobs see it. Every call ends within a time of its own.
pub trait Target: Send + Sync {
    /// The source's URL, without credentials.
    fn source(&self) -> &str;
    /// Bytes of a block.
    fn block_size(&self) -> u64;
    /// Blocks from the first on that one call may name: they are held by the same nodes.
    fn blocks_at_once(&self) -> u32;
    /// Attributes of a path below the source.
    ///
    /// # Errors
    /// `NotFound`, or what kept the group from answering.
    fn lookup(&self, path: &[u8]) -> Result<Attr>;
    /// A page of a folder.
    ///
    /// # Errors
    /// As for [`Target::lookup`].
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage>;
    /// Has the nodes that are to hold these blocks fetch them, on as many nodes as `replicas` says, or the group's own
    /// number of them.
    ///
    /// # Errors
    /// When they can't.
    fn warm(&self, object: &ObjectRef, blocks: Range<u32>, replicas: Option<u32>) -> Result<Worked>;
    /// Has the nodes read back what they hold of these blocks and check it; what is missing or wrong is an error.
    ///
    /// # Errors
    /// Which block is missing, or what kept them from telling.
    fn check(&self, object: &ObjectRef, blocks: Range<u32>, replicas: Option<u32>) -> Result<Worked>;
    /// Has every node forget these blocks.
    ///
    /// # Errors
    /// When a node can't be asked.
    fn free(&self, object: &ObjectRef, blocks: Range<u32>) -> Result<Worked>;
}
