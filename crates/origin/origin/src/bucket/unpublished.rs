//! The files of a mount whose changes are published when their last open file ends: no program waits for that, so those that fail
//! are noted for the end of the mount. It knows no bytes and no request.

use parking_lot::Mutex;
use spurline_volume::delayed::WriteLosses;

#[derive(Default)]
struct EndingState {
    next_number: u64,
    /// By the number of the ending: the path, and the bytes of the file.
    files: Vec<(u64, String, u64)>,
    losses: WriteLosses,
}

/// Files that no program has open any more, with changes that are being published, and those whose changes are lost.
#[derive(Default)]
pub(super) struct EndingFiles {
    state: Mutex<EndingState>,
}

impl EndingFiles {
    /// The last open file of a file with changes has ended.
    pub fn begin(&self, path: String, bytes: u64) -> u64 {
        let mut state = self.state.lock();
        state.next_number += 1;
        let number = state.next_number;
        state.files.push((number, path, bytes));
        number
    }

    /// The changes are published, or dropped.
    pub fn end(&self, number: u64) {
        self.state.lock().files.retain(|(known, ..)| *known != number);
    }

    /// The changes are lost.
    pub fn end_lost(&self, number: u64) {
        let mut state = self.state.lock();
        let lost: Vec<_> = state.files.extract_if(.., |(known, ..)| *known == number).collect();
        lost.into_iter().for_each(|(_, path, bytes)| state.losses.add_file(path, bytes));
    }

    /// The files that are being published, with their bytes.
    pub fn files(&self) -> Vec<(String, u64)> {
        self.state.lock().files.iter().map(|(_, path, bytes)| (path.clone(), *bytes)).collect()
    }

    /// The losses until now.
    pub fn losses(&self) -> WriteLosses {
        self.state.lock().losses.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_until_they_end_and_lost_ones_are_kept() {
        let ending = EndingFiles::default();
        let one = ending.begin("a".to_owned(), 1);
        let two = ending.begin("b".to_owned(), 2);
        assert_eq!(ending.files(), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
        ending.end(one);
        ending.end_lost(two);
        assert_eq!(ending.files(), []);
        assert_eq!(ending.losses().first_files, [("b".to_owned(), 2)]);
    }
}
