//! How much of a job's walk is done for good: the files found are cut into stretches, and where all of those before a
//! place are done, another process can take the walk up there. It knows neither folders nor threads.

use crate::walk::Place;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// Stretches that are kept; when there are more, each two become one.
const MOST: usize = 1024;

/// What was found, and how it ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Sums {
    pub files: u64,
    pub bytes: u64,
    pub done: u64,
    pub skipped: u64,
    pub failed: u64,
    pub bytes_done: u64,
    pub bytes_moved: u64,
}

impl Sums {
    /// Applies `with` to each number of this and of `other`.
    pub(crate) fn zip(self, other: Sums, with: impl Fn(u64, u64) -> u64) -> Sums {
        Sums {
            files: with(self.files, other.files),
            bytes: with(self.bytes, other.bytes),
            done: with(self.done, other.done),
            skipped: with(self.skipped, other.skipped),
            failed: with(self.failed, other.failed),
            bytes_done: with(self.bytes_done, other.bytes_done),
            bytes_moved: with(self.bytes_moved, other.bytes_moved),
        }
    }

    fn add(&mut self, other: Sums) {
        *self = self.zip(other, |a, b| a + b);
    }
}

/// All that was found before a place of the walk is done.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settled {
    /// Where the walk goes on.
    pub place: Place,
    /// What was found before, and how it ended.
    pub sums: Sums,
}

/// Files that follow each other in the walk.
#[derive(Debug)]
struct Stretch {
    /// Where the walk was when it had found them.
    end: Place,
    /// The number of the first file behind them.
    until: u64,
    /// Files that ended, well or not.
    ended: u64,
    sums: Sums,
}

/// The walk so far.
#[derive(Debug)]
pub(crate) struct Course {
    settled: Settled,
    stretches: VecDeque<Stretch>,
    /// Files that a stretch has at least before another begins.
    least: u64,
}

impl Default for Course {
    fn default() -> Self {
        Course::from(Settled::default())
    }
}

impl From<Settled> for Course {
    fn from(settled: Settled) -> Self {
        Course { settled, stretches: VecDeque::new(), least: 1 }
    }
}

impl Course {
    /// What is done for good.
    pub(crate) fn settled(&self) -> &Settled {
        &self.settled
    }

    /// Files found by now.
    fn files(&self) -> u64 {
        self.stretches.back().map_or(self.settled.sums.files, |last| last.until)
    }

    /// The walk came to `place`; since the place before it found what `sums` has, of which `ended` files have ended.
    pub(crate) fn found(&mut self, place: Place, sums: Sums, ended: u64) {
        let until = self.files() + sums.files;
        match self.stretches.back_mut() {
            Some(last) if sums.files == 0 || last.sums.files < self.least => {
                last.sums.add(sums);
                last.ended += ended;
                (last.end, last.until) = (place, until);
            }
            _ => self.stretches.push_back(Stretch { end: place, until, ended, sums }),
        }
        if self.stretches.len() > MOST {
            self.least *= 2;
            let mut all = std::mem::take(&mut self.stretches).into_iter();
            while let Some(mut first) = all.next() {
                if let Some(second) = all.next() {
                    first.sums.add(second.sums);
                    first.ended += second.ended;
                    (first.end, first.until) = (second.end, second.until);
                }
                self.stretches.push_back(first);
            }
        }
        self.settle();
    }

    /// A file ended, and `sums` says how; what it has of files and bytes was counted when it was found.
    pub(crate) fn ended(&mut self, number: u64, sums: Sums) {
        let at = self.stretches.partition_point(|stretch| stretch.until <= number);
        let Some(stretch) = self.stretches.get_mut(at) else { return };
        stretch.sums.add(Sums { files: 0, bytes: 0, ..sums });
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

    fn place(n: u64) -> Place {
        Place::at_path(n)
    }

    fn some(files: u64) -> Sums {
        Sums { files, bytes: 10 * files, ..Sums::default() }
    }

    const DONE: Sums = Sums { files: 1, bytes: 10, done: 1, skipped: 0, failed: 0, bytes_done: 10, bytes_moved: 4 };

    #[test]
    fn what_is_settled_has_nothing_unfinished_before_it() {
        let mut course = Course::default();
        course.found(place(1), some(2), 0);
        course.found(place(2), some(3), 0);
        course.ended(0, DONE);
        course.ended(3, DONE);
        assert_eq!(*course.settled(), Settled::default());
        course.ended(1, DONE);
        let (at, sums) = (&course.settled().place, course.settled().sums);
        assert_eq!((at, sums.files, sums.done, sums.bytes_moved), (&place(1), 2, 2, 8));
        course.ended(2, Sums { failed: 1, ..Sums::default() });
        course.ended(4, DONE);
        let (at, sums) = (&course.settled().place, course.settled().sums);
        assert_eq!((at, sums.files, sums.bytes, sums.done, sums.failed), (&place(2), 5, 50, 4, 1));
        // Folders without files in them: nothing has to end.
        course.found(place(3), some(0), 0);
        assert_eq!(course.settled().place, place(3));
    }

    #[test]
    fn a_long_walk_is_kept_in_few_stretches_and_settles_all_the_same() {
        let mut course = Course::default();
        let files = 100 * MOST as u64;
        for n in 0..files {
            course.found(place(n + 1), some(1), 0);
            assert!(course.stretches.len() <= MOST);
        }
        for n in 0..files {
            course.ended(n, DONE);
            let settled = course.settled();
            assert!(settled.sums.files <= n + 1 && settled.place == place(settled.sums.files));
        }
        let sums = course.settled().sums;
        assert_eq!((sums.files, sums.done, sums.bytes, sums.bytes_moved), (files, files, 10 * files, 4 * files));
    }
}
