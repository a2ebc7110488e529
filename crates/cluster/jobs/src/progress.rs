//! How far a job is. Plain numbers; it knows no clock.

use crate::Counts;
use crate::course::Sums;
use serde::{Deserialize, Serialize};

/// Failed files whose names are kept; more are counted only.
pub(crate) const NAMED: usize = 1000;

/// What a job is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// It has not begun.
    #[default]
    Waiting,
    /// Files are being worked on.
    Running,
    /// All files were worked on and are read back.
    Verifying,
    /// All files are done.
    Succeeded,
    /// It ended, and some files could not be done.
    Failed,
    /// Somebody stopped it.
    Stopped,
}

impl State {
    /// Whether nothing more will happen.
    pub fn ended(self) -> bool {
        matches!(self, State::Succeeded | State::Failed | State::Stopped)
    }

    /// The word people and `--json` see.
    pub fn word(self) -> &'static str {
        match self {
            State::Waiting => "WAITING",
            State::Running => "RUNNING",
            State::Verifying => "VERIFYING",
            State::Succeeded => "SUCCEEDED",
            State::Failed => "FAILED",
            State::Stopped => "STOPPED",
        }
    }
}

impl std::fmt::Display for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// A file that could not be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failed {
    /// Its path below the source; bytes that are no UTF-8 are replaced.
    pub path: String,
    /// Why.
    pub reason: String,
}

/// How far a job is.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Progress {
    /// What it is doing.
    pub state: State,
    /// Why it is not getting on, or why it ended as it did.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
    /// What was not done as it was asked for, though nothing failed.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub note: String,
    /// Which of the jobs of its paths it is: of two that one was submitted later that has more.
    #[serde(default)]
    pub submission: u64,
    /// Whether all files are known, so that the totals are.
    pub listed: bool,
    /// Files found so far.
    pub files_total: u64,
    /// Files done, those skipped among them.
    pub files_done: u64,
    /// Files that were held whole before, counted when that was asked for.
    pub files_skipped: u64,
    /// Files that could not be done.
    pub files_failed: u64,
    /// Bytes of the files found so far.
    pub bytes_total: u64,
    /// Bytes worked on.
    pub bytes_done: u64,
    /// Of them, bytes that had to be fetched, or were dropped.
    pub bytes_moved: u64,
    /// Files read back and found right.
    pub files_verified: u64,
    /// Bytes read back and found right.
    pub bytes_verified: u64,
    /// Seconds it has worked.
    pub seconds: f64,
    /// Bytes worked on per second, lately.
    pub bytes_per_second: f64,
    /// Files done per second, lately.
    pub files_per_second: f64,
    /// Failed files by name, the first thousand.
    #[serde(default)]
    pub failed: Vec<Failed>,
}

impl Progress {
    /// So far and no further.
    pub(crate) fn of(sums: Sums) -> Progress {
        let Sums { files, bytes, done, skipped, failed, bytes_done, bytes_moved } = sums;
        Progress {
            files_total: files,
            files_done: done,
            files_skipped: skipped,
            files_failed: failed,
            bytes_total: bytes,
            bytes_done,
            bytes_moved,
            ..Progress::default()
        }
    }

    /// What was found, and how it ended.
    pub(crate) fn sums(&self) -> Sums {
        Sums {
            files: self.files_total,
            bytes: self.bytes_total,
            done: self.files_done,
            skipped: self.files_skipped,
            failed: self.files_failed,
            bytes_done: self.bytes_done,
            bytes_moved: self.bytes_moved,
        }
    }

    /// Notes a file that could not be done.
    pub(crate) fn fail(&mut self, path: &[u8], reason: &str) {
        self.files_failed += 1;
        if self.failed.len() < NAMED {
            self.failed.push(Failed { path: String::from_utf8_lossy(path).into_owned(), reason: reason.to_owned() });
        }
    }

    /// The share of the work that is done, from 0 to 1, once the totals are known.
    pub fn share(&self, counts: Counts) -> Option<f64> {
        if !self.listed {
            return None;
        }
        let Counts { verify, metadata_only } = counts;
        let bytes_total = if metadata_only { 0 } else { self.bytes_total };
        let passes = if verify { 2.0 } else { 1.0 };
        let part = |done: u64, all: u64| if all == 0 { 1.0 } else { (done as f64 / all as f64).min(1.0) };
        // Small files cost by their number, large ones by their bytes.
        let both = |files: u64, bytes: u64| (part(files, self.files_total) + part(bytes, bytes_total)) / 2.0;
        let loaded = both(self.files_done + self.files_failed, self.bytes_done);
        let verified = if verify { both(self.files_verified, self.bytes_verified) } else { 0.0 };
        Some(((loaded + verified) / passes).min(1.0))
    }

    /// Seconds until the end at the speed so far, while it has not ended and when that can be said.
    pub fn remaining(&self, counts: Counts) -> Option<f64> {
        let share = self.share(counts).filter(|_| !self.state.ended())?;
        (share > 0.005 && self.seconds > 1.0).then(|| self.seconds * (1.0 - share) / share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_left_only_while_it_works_and_metadata_bring_no_bytes() {
        let half = Progress {
            state: State::Running,
            listed: true,
            files_total: 10,
            files_done: 5,
            bytes_total: 100,
            seconds: 10.0,
            ..Progress::default()
        };
        let names = Counts { metadata_only: true, verify: false };
        assert_eq!((half.share(names), half.remaining(names)), (Some(0.75), half.remaining(names)));
        assert!(half.remaining(names).is_some() && half.share(Counts::default()) == Some(0.25));
        for state in [State::Succeeded, State::Failed, State::Stopped] {
            let ended = Progress { state, ..half.clone() };
            assert_eq!(ended.remaining(Counts::default()), None, "{state}");
        }
        let all = Progress { files_done: 10, ..half };
        assert_eq!(all.share(names), Some(1.0));
    }
}
