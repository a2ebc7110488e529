//! What a job is to do. It does not know how far it is.

use crate::walk::Filter;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
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

/// A digest of these words, whatever their order.
fn digest<'a>(first: &str, words: impl Iterator<Item = &'a String>) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let mut words: Vec<&str> = words.map(String::as_str).collect();
    words.sort_unstable();
    for part in std::iter::once(first).chain(words) {
        hash.write(&(part.len() as u64).to_le_bytes());
        hash.write(part.as_bytes());
    }
    hash.finish()
}

/// What there is to count of a job beside its files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Counts {
    /// Its files are read back, too.
    #[serde(default)]
    pub verify: bool,
    /// Its files bring no bytes.
    #[serde(default)]
    pub metadata_only: bool,
}

impl Spec {
    /// The name of the job: the same action on the same paths with the same options is the same job, however often it is
    /// submitted. How fast it is to be done makes no other job of it.
    pub fn id(&self) -> String {
        let Spec { include, exclude, metadata_only, verify, skip_if_exists, replicas, .. } = self;
        let flags = format!("{metadata_only} {verify} {skip_if_exists} {}", replicas.unwrap_or(0));
        // A pattern is not the same on the other side.
        let options = digest(&flags, include.iter()) ^ digest("", exclude.iter()).rotate_left(1);
        format!("{}-{:08x}", self.subject(), options >> 32)
    }

    /// What the names of all jobs begin with that do the same to the same paths, before a '-'.
    pub fn subject(&self) -> String {
        let listed = if self.listed { "listed " } else { "" };
        format!("{}-{:012x}", self.action, digest(&format!("{listed}{}", self.source), self.paths.iter()) >> 16)
    }

    /// Whether all files are done as they are by default.
    pub fn is_plain(&self) -> bool {
        let Spec { include, exclude, metadata_only, verify, skip_if_exists, replicas, .. } = self;
        include.is_empty()
            && exclude.is_empty()
            && !(*metadata_only || *verify || *skip_if_exists)
            && replicas.is_none()
    }

    /// What there is to count.
    pub fn counts(&self) -> Counts {
        let loads = self.action == Action::Load && !self.metadata_only;
        Counts { verify: self.verify && loads, metadata_only: self.metadata_only }
    }

    /// Whether a path is named twice, or is below another.
    pub fn overlaps(&self) -> bool {
        let all: HashSet<&str> = self.paths.iter().map(|path| path.trim_matches('/')).collect();
        let is_below = |path: &&str| {
            let mut above = path.match_indices('/').map(|(end, _)| &path[..end]);
            !path.is_empty() && all.contains("") || above.any(|folder| all.contains(folder))
        };
        all.len() < self.paths.len() || all.iter().any(is_below)
    }

    /// What it walks past and what it takes.
    ///
    /// # Errors
    /// Which pattern makes no sense, and why.
    pub fn filter(&self) -> Result<Filter, String> {
        Filter::new(&self.include, &self.exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> Spec {
        let words = r#"{"action":"load","source":"s3://b","paths":["a","b"],"parallel":50}"#;
        serde_json::from_str(words).unwrap()
    }

    #[test]
    fn paths_overlap_that_name_a_file_twice() {
        let overlaps = |paths: &[&str]| {
            let paths = paths.iter().map(|path| (*path).to_owned()).collect();
            Spec { paths, ..spec() }.overlaps()
        };
        for twice in [&["x", "x/y"][..], &["x/y/z", "x-", "x"], &["x", "x"], &["x/", "x"], &["", "x"]] {
            assert!(overlaps(twice), "{twice:?}");
        }
        for once in [&[""][..], &[], &["x", "xy", "x-/y"], &["x/y", "x/z"]] {
            assert!(!overlaps(once), "{once:?}");
        }
    }

    #[test]
    fn another_job_is_one_that_does_something_else_and_not_one_that_is_faster() {
        let one = spec();
        assert!(one.is_plain() && one.id().starts_with(&format!("{}-", one.subject())));
        let same = [
            Spec { paths: vec!["b".into(), "a".into()], ..spec() },
            Spec { rate: 1, ..spec() },
            Spec { parallel: 1, ..spec() },
        ];
        assert!(same.iter().all(|same| same.id() == one.id()));
        let words = || vec!["*.bin".to_owned()];
        let others = [
            Spec { include: words(), ..spec() },
            Spec { exclude: words(), ..spec() },
            Spec { metadata_only: true, ..spec() },
            Spec { verify: true, ..spec() },
            Spec { skip_if_exists: true, ..spec() },
            Spec { replicas: Some(2), ..spec() },
        ];
        let ids: std::collections::BTreeSet<_> = others.iter().chain([&one]).map(Spec::id).collect();
        assert_eq!(ids.len(), others.len() + 1, "{ids:?}");
        assert!(others.iter().all(|other| other.subject() == one.subject() && !other.is_plain()));
        let elsewhere = [
            Spec { action: Action::Free, ..spec() },
            Spec { source: "s3://c".into(), ..spec() },
            Spec { paths: vec!["a".into()], ..spec() },
            Spec { listed: true, ..spec() },
        ];
        assert!(elsewhere.iter().all(|other| other.subject() != one.subject()));
    }
}
