//! Work on many files of a cache group: warming them, checking that they are held, freeing them. It walks, counts,
//! repeats what failed, and goes on after a restart. It knows neither nodes nor networks: a [`Target`] does the work.
#![forbid(unsafe_code)]

mod board;
mod course;
mod keep;
mod pace;
mod progress;
mod run;
mod spec;
mod speed;
mod spool;
mod tally;
mod walk;

pub use board::{Board, Open, Totals, shown};
pub use keep::{DirKeep, Keep, Kept, NoKeep};
pub use progress::{Failed, Progress, State};
pub use run::{Run, run};
pub use spec::{Action, Counts, Spec};
pub use walk::Filter;

use spurline_types::{Attr, ListPage, ObjectRef, Result};
use std::ops::Range;

/// What came of working on a part of a file, in bytes.
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

/// Some blocks of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The file at one version.
    pub object: ObjectRef,
    /// Its blocks; never none.
    pub blocks: Range<u32>,
}

/// A cache as jobs see it. Every call ends within a time of its own, and answers for each part in the order given.
pub trait Target: Send + Sync {
    /// The source's URL, without credentials.
    fn source(&self) -> &str;
    /// Bytes of a block.
    fn block_size(&self) -> u64;
    /// Attributes of a path below the source.
    ///
    /// # Errors
    /// `NotFound`, or what kept the cache from answering.
    fn lookup(&self, path: &[u8]) -> Result<Attr>;
    /// A page of a folder.
    ///
    /// # Errors
    /// As for [`Target::lookup`].
    fn list(&self, path: &[u8], cursor: Option<&[u8]>) -> Result<ListPage>;
    /// How many requests [`Target::warm`] has best under way at once for short files, in a job that may have `requests`
    /// of them; 1 where all it is given is one.
    fn at_once(&self, _requests: usize) -> usize {
        1
    }
    /// Why a block can't have `copies` copies now, in words; `None` where it can.
    fn short_of(&self, _copies: u32) -> Option<String> {
        None
    }
    /// Fetches what is not held of these parts, on `replicas` nodes each, or the group's own number of them; of several
    /// short files up to `at_once` together.
    fn warm(&self, parts: &[Part], replicas: Option<u32>, at_once: usize) -> Vec<Result<Worked>>;
    /// Reads back what is held of these parts and checks it; what is missing or wrong is an error.
    fn check(&self, parts: &[Part], replicas: Option<u32>) -> Vec<Result<Worked>>;
    /// What a person should know of a job that has loaded all it was to: that not all of it is held. It loaded `bytes`, the
    /// files in `files`, each a path and a length, to as many nodes as [`Target::warm`] was told.
    fn remark(
        &self,
        _replicas: Option<u32>,
        _bytes: u64,
        _files: &mut dyn Iterator<Item = (Vec<u8>, u64)>,
    ) -> Option<String> {
        None
    }
    /// Has everybody forget these parts.
    fn free(&self, parts: &[Part]) -> Vec<Result<Worked>>;
}
