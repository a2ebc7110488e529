//! What a job is to do. It does not know how far it is.

use crate::walk::Filter;
use serde::{Deserialize, Serialize};
use std::hash::Hasher as _;

/// What happens to the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// They are brought into the cache.
    Load,
    /// They are dropped from the cache.
    Free,
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Action::Load => "load",
            Action::Free => "free",
        })
    }
}

/// A job as it was submitted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// What happens to the files.
    pub action: Action,
    /// The source's URL, without credentials.
    pub source: String,
    /// Files and folders below the source; the empty path is all of it.
    pub paths: Vec<String>,
    /// The paths come from a list of files: folders among them are not walked.
    #[serde(default)]
    pub listed: bool,
    /// Only files that one of these patterns names, when there are any.
    #[serde(default)]
    pub include: Vec<String>,
    /// No file and no folder that one of these patterns names.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Names and attributes only, no bytes.
    #[serde(default)]
    pub metadata_only: bool,
    /// Afterwards every block is read back where it is held, and checked.
    #[serde(default)]
    pub verify: bool,
    /// Files held whole already are counted as skipped.
    #[serde(default)]
    pub skip_if_exists: bool,
    /// Nodes that hold each block; the group's own number when not given.
    #[serde(default)]
    pub replicas: Option<u32>,
    /// Bytes per second at the most; 0 for no limit.
    #[serde(default)]
    pub rate: u64,
    /// Requests under way at one time.
    pub parallel: u32,
}

impl Spec {
    /// The name of the job: the same action on the same paths is the same job, however often it is submitted.
    pub fn id(&self) -> String {
        let mut hash = xxhash_rust::xxh3::Xxh3::new();
        let mut paths: Vec<&str> = self.paths.iter().map(String::as_str).collect();
        paths.sort_unstable();
        for part in std::iter::once(self.source.as_str()).chain(paths) {
            hash.write(&(part.len() as u64).to_le_bytes());
            hash.write(part.as_bytes());
        }
        format!("{}-{:012x}", self.action, hash.finish() >> 16)
    }

    /// What it walks past and what it takes.
    ///
    /// # Errors
    /// Which pattern makes no sense, and why.
    pub fn filter(&self) -> Result<Filter, String> {
        Filter::new(&self.include, &self.exclude)
    }
}
