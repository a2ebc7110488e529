//! Progress of a job: plain numbers, no clock.

use crate::CountOptions;
use crate::checkpoint::FileCounts;
use serde::{Deserialize, Serialize};

/// Maximum failed files kept by name; further files are only counted.
pub(crate) const FAILED_NAMED: usize = 1000;

/// State of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum JobState {
    /// Not begun.
    #[default]
    Waiting,
    /// Working on files.
    Running,
    /// All files were processed and are being read back.
    Verifying,
    /// All files are done.
    Succeeded,
    /// Ended, with some files failed.
    Failed,
    /// Stopped by a user.
    Stopped,
}

impl JobState {
    /// Whether this state is final.
    pub fn is_ended(self) -> bool {
        matches!(self, JobState::Succeeded | JobState::Failed | JobState::Stopped)
    }

    /// The word shown to people and in `--json`.
    pub fn word(self) -> &'static str {
        match self {
            JobState::Waiting => "WAITING",
            JobState::Running => "RUNNING",
            JobState::Verifying => "VERIFYING",
            JobState::Succeeded => "SUCCEEDED",
            JobState::Failed => "FAILED",
            JobState::Stopped => "STOPPED",
        }
    }
}

impl std::fmt::Display for JobState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// A failed file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedFile {
    /// The path below the source; invalid UTF-8 is replaced.
    pub path: String,
    /// The error.
    pub reason: String,
}

/// Progress of a job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobProgress {
    /// The state.
    pub state: JobState,
    /// Why there is no progress, or the reason of the end.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// Deviation from the request without a failure.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Order among jobs of the same paths: the higher number was submitted later.
    #[serde(default)]
    pub submission: u64,
    /// Whether the file list is complete, so that the totals are final.
    pub listed: bool,
    /// Files found so far.
    pub files_total: u64,
    /// Files done, including skipped files.
    pub files_done: u64,
    /// Files that were fully cached before, counted on request.
    pub files_skipped: u64,
    /// Failed files.
    pub files_failed: u64,
    /// Bytes of the files found so far.
    pub bytes_total: u64,
    /// Bytes processed.
    pub bytes_done: u64,
    /// Bytes of these that were fetched or dropped.
    pub bytes_moved: u64,
    /// Bytes of pinned blocks that a free job kept.
    #[serde(default)]
    pub bytes_pinned: u64,
    /// Files read back and found correct.
    pub files_verified: u64,
    /// Bytes read back and found correct.
    pub bytes_verified: u64,
    /// Working time in seconds.
    pub seconds: f64,
    /// Recent speed in bytes per second.
    pub bytes_per_second: f64,
    /// Recent speed in files per second.
    pub files_per_second: f64,
    /// The first thousand failed files.
    #[serde(default)]
    pub failed: Vec<FailedFile>,
}

impl JobProgress {
    /// Progress with these counts.
    pub(crate) fn from_counts(sums: FileCounts) -> JobProgress {
        let FileCounts { files, bytes, done, skipped, failed, bytes_done, bytes_moved, bytes_pinned } = sums;
        JobProgress {
            files_total: files,
            files_done: done,
            files_skipped: skipped,
            files_failed: failed,
            bytes_total: bytes,
            bytes_done,
            bytes_moved,
            bytes_pinned,
            ..JobProgress::default()
        }
    }

    pub(crate) fn file_counts(&self) -> FileCounts {
        FileCounts {
            files: self.files_total,
            bytes: self.bytes_total,
            done: self.files_done,
            skipped: self.files_skipped,
            failed: self.files_failed,
            bytes_done: self.bytes_done,
            bytes_moved: self.bytes_moved,
            bytes_pinned: self.bytes_pinned,
        }
    }

    /// Records a failed file.
    pub(crate) fn note_failed(&mut self, path: &[u8], reason: &str) {
        self.files_failed += 1;
        if self.failed.len() < FAILED_NAMED {
            self.failed
                .push(FailedFile { path: String::from_utf8_lossy(path).into_owned(), reason: reason.to_owned() });
        }
    }

    /// Finished share of the work, 0 to 1, once the totals are known.
    pub fn share(&self, counts: CountOptions) -> Option<f64> {
        if !self.listed {
            return None;
        }
        let CountOptions { verify, metadata_only } = counts;
        let bytes_total = if metadata_only { 0 } else { self.bytes_total };
        let passes = if verify { 2.0 } else { 1.0 };
        // The cost of small files is their number, of large files the bytes.
        let both = |files: u64, bytes: u64| (part_of(files, self.files_total) + part_of(bytes, bytes_total)) / 2.0;
        let loaded = both(self.files_done + self.files_failed, self.bytes_done);
        let verified = if verify { both(self.files_verified, self.bytes_verified) } else { 0.0 };
        Some(((loaded + verified) / passes).min(1.0))
    }

    /// Estimated seconds left, while the job runs; `None` without an estimate.
    pub fn remaining(&self, counts: CountOptions) -> Option<f64> {
        let share = self.share(counts).filter(|_| !self.state.is_ended())?;
        (share > 0.005 && self.seconds > 1.0).then(|| self.seconds * (1.0 - share) / share)
    }
}

fn part_of(done: u64, all: u64) -> f64 {
    if all == 0 { 1.0 } else { (done as f64 / all as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_left_only_while_it_works_and_metadata_bring_no_bytes() {
        let half = JobProgress {
            state: JobState::Running,
            listed: true,
            files_total: 10,
            files_done: 5,
            bytes_total: 100,
            seconds: 10.0,
            ..JobProgress::default()
        };
        let names = CountOptions { metadata_only: true, verify: false };
        assert_eq!((half.share(names), half.remaining(names)), (Some(0.75), half.remaining(names)));
        assert!(half.remaining(names).is_some() && half.share(CountOptions::default()) == Some(0.25));
        for state in [JobState::Succeeded, JobState::Failed, JobState::Stopped] {
            let ended = JobProgress { state, ..half.clone() };
            assert_eq!(ended.remaining(CountOptions::default()), None, "{state}");
        }
        let all = JobProgress { files_done: 10, ..half };
        assert_eq!(all.share(names), Some(1.0));
    }
}
