//! The specification of a job. Does not know the progress.

use crate::walk::FileFilter;
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::hash::Hasher as _;

/// Action on the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobAction {
    /// Load into the cache.
    Load,
    /// Drop from the cache.
    Free,
}

impl std::fmt::Display for JobAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            JobAction::Load => "load",
            JobAction::Free => "free",
        })
    }
}

/// A submitted job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSpec {
    /// Action on the files.
    pub action: JobAction,
    /// The source's URL, without credentials.
    pub source: String,
    /// Files and folders below the source; the empty path means the whole source.
    pub paths: Vec<String>,
    /// The paths come from a file list: folders there are not walked.
    #[serde(default)]
    pub listed: bool,
    /// If not empty, only files that match any of these patterns.
    #[serde(default)]
    pub include: Vec<String>,
    /// No file or folder that matches any of these patterns.
    #[serde(default)]
    pub exclude: Vec<String>,
    /// Names and attributes only, no bytes.
    #[serde(default)]
    pub metadata_only: bool,
    /// Read back and check every block at the holder, after the load.
    #[serde(default)]
    pub verify: bool,
    /// Count fully cached files as skipped.
    #[serde(default)]
    pub skip_if_exists: bool,
    /// Holders of each block; absent for the group's number.
    #[serde(default)]
    pub replicas: Option<u32>,
    /// Maximum bytes per second of a load; 0 for no limit.
    #[serde(default)]
    pub rate: u64,
    /// Free pinned blocks as well.
    #[serde(default)]
    pub with_pinned: bool,
    /// Free all blocks of the caches, of any file, version and source; `paths` have no effect.
    #[serde(default)]
    pub everything: bool,
    /// Requests in flight.
    pub parallel: u32,
}

/// A digest of these words, independent of their order.
fn digest_words<'a>(first: &str, words: impl Iterator<Item = &'a String>) -> u64 {
    let mut hash = xxhash_rust::xxh3::Xxh3::new();
    let mut words: Vec<&str> = words.map(String::as_str).collect();
    words.sort_unstable();
    for part in std::iter::once(first).chain(words) {
        hash.write(&(part.len() as u64).to_le_bytes());
        hash.write(part.as_bytes());
    }
    hash.finish()
}

/// The counts of a job beside files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CountOptions {
    /// Files are read back.
    pub verify: bool,
    /// Files transfer no bytes.
    pub metadata_only: bool,
}

impl JobSpec {
    /// The name of the job: equal for the same action, paths and options. Speed options do not change the name.
    pub fn id(&self) -> String {
        let JobSpec { include, exclude, metadata_only, verify, skip_if_exists, replicas, .. } = self;
        let JobSpec { with_pinned, everything, .. } = self;
        let copies = replicas.unwrap_or(0);
        let flags = format!("{metadata_only} {verify} {skip_if_exists} {copies} {with_pinned} {everything}");
        // Rotated, because the same pattern means the opposite here.
        let options = digest_words(&flags, include.iter()) ^ digest_words("", exclude.iter()).rotate_left(1);
        format!("{}-{:08x}", self.subject(), options >> 32)
    }

    /// The common prefix, before a '-', of the names of all jobs with the same action on the same paths.
    pub fn subject(&self) -> String {
        let listed = if self.listed { "listed " } else { "" };
        format!("{}-{:012x}", self.action, digest_words(&format!("{listed}{}", self.source), self.paths.iter()) >> 16)
    }

    /// Whether all files are processed with default options.
    pub fn is_plain(&self) -> bool {
        let JobSpec { include, exclude, metadata_only, verify, skip_if_exists, replicas, .. } = self;
        include.is_empty()
            && exclude.is_empty()
            && !(*metadata_only || *verify || *skip_if_exists || self.with_pinned || self.everything)
            && replicas.is_none()
    }

    /// Whether patterns choose the files.
    pub fn has_patterns(&self) -> bool {
        !self.include.is_empty() || !self.exclude.is_empty()
    }

    /// Whether the job is about all files of the source.
    pub fn covers_source(&self) -> bool {
        !self.listed && !self.has_patterns() && self.paths.iter().any(|path| path.trim_matches('/').is_empty())
    }

    /// The counts of the job.
    pub fn count_options(&self) -> CountOptions {
        let loads = self.action == JobAction::Load && !self.metadata_only;
        CountOptions { verify: self.verify && loads, metadata_only: self.metadata_only }
    }

    /// Whether a path is listed twice or lies below another.
    pub fn has_overlaps(&self) -> bool {
        let all: HashSet<&str> = self.paths.iter().map(|path| path.trim_matches('/')).collect();
        all.len() < self.paths.len()
            || all.iter().any(|path| {
                let mut above = path.match_indices('/').map(|(end, _)| &path[..end]);
                !path.is_empty() && all.contains("") || above.any(|folder| all.contains(folder))
            })
    }

    /// The include and exclude patterns.
    ///
    /// # Errors
    /// Which pattern is invalid, and why.
    pub fn file_filter(&self) -> Result<FileFilter, String> {
        FileFilter::new(&self.include, &self.exclude)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec() -> JobSpec {
        let words = r#"{"action":"load","source":"s3://b","paths":["a","b"],"parallel":50}"#;
        serde_json::from_str(words).unwrap()
    }

    #[test]
    fn paths_overlap_that_name_a_file_twice() {
        let overlaps = |paths: &[&str]| {
            let paths = paths.iter().map(|path| (*path).to_owned()).collect();
            JobSpec { paths, ..spec() }.has_overlaps()
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
            JobSpec { paths: vec!["b".into(), "a".into()], ..spec() },
            JobSpec { rate: 1, ..spec() },
            JobSpec { parallel: 1, ..spec() },
        ];
        assert!(same.iter().all(|same| same.id() == one.id()));
        let words = || vec!["*.bin".to_owned()];
        let others = [
            JobSpec { include: words(), ..spec() },
            JobSpec { exclude: words(), ..spec() },
            JobSpec { metadata_only: true, ..spec() },
            JobSpec { verify: true, ..spec() },
            JobSpec { skip_if_exists: true, ..spec() },
            JobSpec { replicas: Some(2), ..spec() },
            JobSpec { with_pinned: true, ..spec() },
            JobSpec { everything: true, ..spec() },
        ];
        let ids: std::collections::BTreeSet<_> = others.iter().chain([&one]).map(JobSpec::id).collect();
        assert_eq!(ids.len(), others.len() + 1, "{ids:?}");
        assert!(others.iter().all(|other| other.subject() == one.subject() && !other.is_plain()));
        let elsewhere = [
            JobSpec { action: JobAction::Free, ..spec() },
            JobSpec { source: "s3://c".into(), ..spec() },
            JobSpec { paths: vec!["a".into()], ..spec() },
            JobSpec { listed: true, ..spec() },
        ];
        assert!(elsewhere.iter().all(|other| other.subject() != one.subject()));
    }
}
