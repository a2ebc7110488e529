//! Tracks which part of a job's walk is finished for good. Files are grouped into stretches; where all stretches
//! before a position are done, another process can resume the walk. Knows neither folders nor threads.

use crate::walk::WalkPosition;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Maximum stretches; above that, pairs are merged.
const MAX_STRETCHES: usize = 1024;

/// Counts of files found and of results.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct FileCounts {
    pub files: u64,
    pub bytes: u64,
    pub done: u64,
    pub skipped: u64,
    pub failed: u64,
    pub bytes_done: u64,
    pub bytes_moved: u64,
    pub bytes_pinned: u64,
}

impl FileCounts {
    /// Combines each number of this and `other` by `with`.
    pub(crate) fn zip_with(self, other: FileCounts, with: impl Fn(u64, u64) -> u64) -> FileCounts {
        FileCounts {
            files: with(self.files, other.files),
            bytes: with(self.bytes, other.bytes),
            done: with(self.done, other.done),
            skipped: with(self.skipped, other.skipped),
            failed: with(self.failed, other.failed),
            bytes_done: with(self.bytes_done, other.bytes_done),
            bytes_moved: with(self.bytes_moved, other.bytes_moved),
            bytes_pinned: with(self.bytes_pinned, other.bytes_pinned),
        }
    }

    fn add(&mut self, other: FileCounts) {
        *self = self.zip_with(other, |a, b| a + b);
    }
}

/// The finished part of the walk: all files before a position.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SettledWalk {
    /// Where the walk resumes.
    pub place: WalkPosition,
    /// Counts of the files before.
    pub sums: FileCounts,
}

/// Consecutive files of the walk.
#[derive(Debug)]
struct FileStretch {
    /// Position of the walk afterwards.
    end: WalkPosition,
    /// Number of the first file afterwards.
    until: u64,
    /// Files that ended, with or without success.
    ended: u64,
    sums: FileCounts,
}

/// The walk so far.
#[derive(Debug)]
pub(crate) struct WalkCheckpoint {
    settled: SettledWalk,
    stretches: VecDeque<FileStretch>,
    /// Minimum files per stretch.
    least: u64,
}

impl Default for WalkCheckpoint {
    fn default() -> Self {
        WalkCheckpoint::from(SettledWalk::default())
    }
}

impl From<SettledWalk> for WalkCheckpoint {
    fn from(settled: SettledWalk) -> Self {
        WalkCheckpoint { settled, stretches: VecDeque::new(), least: 1 }
    }
}

impl WalkCheckpoint {
    /// The finished part.
    pub(crate) fn settled(&self) -> &SettledWalk {
        &self.settled
    }

    /// Files found so far.
    fn files(&self) -> u64 {
        self.stretches.back().map_or(self.settled.sums.files, |last| last.until)
    }

    /// Records that the walk reached `place`. Since the last position the walk found `sums`; `ended` of these files have ended.
    pub(crate) fn note_found(&mut self, place: WalkPosition, sums: FileCounts, ended: u64) {
        let until = self.files() + sums.files;
        match self.stretches.back_mut() {
            Some(last) if sums.files == 0 || last.sums.files < self.least => {
                last.sums.add(sums);
                last.ended += ended;
                last.end = place;
                last.until = until;
            }
            _ => self.stretches.push_back(FileStretch { end: place, until, ended, sums }),
        }
        if self.stretches.len() > MAX_STRETCHES {
            self.least *= 2;
            let mut all = std::mem::take(&mut self.stretches).into_iter();
            while let Some(mut first) = all.next() {
                if let Some(second) = all.next() {
                    first.sums.add(second.sums);
                    first.ended += second.ended;
                    first.end = second.end;
                    first.until = second.until;
                }
                self.stretches.push_back(first);
            }
        }
        self.settle();
    }

    /// Records the end of a file with the result in `sums`; the counts of files and bytes were added when the file was found.
    pub(crate) fn note_ended(&mut self, number: u64, sums: FileCounts) {
        let at = self.stretches.partition_point(|stretch| stretch.until <= number);
        let Some(stretch) = self.stretches.get_mut(at) else { return };
        stretch.sums.add(FileCounts { files: 0, bytes: 0, ..sums });
        stretch.ended += 1;
        if at == 0 {
            self.settle();
        }
    }

    fn settle(&mut self) {
        while let Some(first) = self.stretches.pop_front_if(|first| first.ended == first.sums.files) {
            self.settled.place = first.end;
            self.settled.sums.add(first.sums);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(n: u64) -> WalkPosition {
        WalkPosition::at_path(n)
    }

    fn some(files: u64) -> FileCounts {
        FileCounts { files, bytes: 10 * files, ..FileCounts::default() }
    }

    const DONE: FileCounts = FileCounts {
        files: 1,
        bytes: 10,
        done: 1,
        skipped: 0,
        failed: 0,
        bytes_done: 10,
        bytes_moved: 4,
        bytes_pinned: 0,
    };

    #[test]
    fn what_is_settled_has_nothing_unfinished_before_it() {
        let mut course = WalkCheckpoint::default();
        course.note_found(place(1), some(2), 0);
        course.note_found(place(2), some(3), 0);
        course.note_ended(0, DONE);
        course.note_ended(3, DONE);
        assert_eq!(*course.settled(), SettledWalk::default());
        course.note_ended(1, DONE);
        let (at, sums) = (&course.settled().place, course.settled().sums);
        assert_eq!((at, sums.files, sums.done, sums.bytes_moved), (&place(1), 2, 2, 8));
        course.note_ended(2, FileCounts { failed: 1, ..FileCounts::default() });
        course.note_ended(4, DONE);
        let (at, sums) = (&course.settled().place, course.settled().sums);
        assert_eq!((at, sums.files, sums.bytes, sums.done, sums.failed), (&place(2), 5, 50, 4, 1));
        // Empty folders: nothing has to end.
        course.note_found(place(3), some(0), 0);
        assert_eq!(course.settled().place, place(3));
    }

    #[test]
    fn a_long_walk_is_kept_in_few_stretches_and_settles_all_the_same() {
        let mut course = WalkCheckpoint::default();
        let files = 100 * MAX_STRETCHES as u64;
        for n in 0..files {
            course.note_found(place(n + 1), some(1), 0);
            assert!(course.stretches.len() <= MAX_STRETCHES);
        }
        for n in 0..files {
            course.note_ended(n, DONE);
            let settled = course.settled();
            assert!(settled.sums.files <= n + 1 && settled.place == place(settled.sums.files));
        }
        let sums = course.settled().sums;
        assert_eq!((sums.files, sums.done, sums.bytes, sums.bytes_moved), (files, files, 10 * files, 4 * files));
    }
}
