//! The files of a mount whose changes are published when their last open file ends: no program waits for that, so those that fail
//! are noted for the end of the mount. It knows no bytes and no request.

use crate::volume::WritableBucket;
use parking_lot::Mutex;
use spurline_volume::delayed::{DelayedWrites, WriteLosses};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub(crate) struct EndingFile {
    pub path: String,
    pub bytes: u64,
    /// Bytes that the store has already.
    pub sent_bytes: Arc<AtomicU64>,
}

#[derive(Default)]
struct EndingState {
    next_number: u64,
    /// By the numbers of the endings.
    files: Vec<(u64, EndingFile)>,
    losses: WriteLosses,
}

/// Files that no program has open any more, with changes that are being published, and those whose changes are lost.
#[derive(Default)]
pub(crate) struct EndingFiles {
    state: Mutex<EndingState>,
}

impl EndingFiles {
    /// The last open file of a file with changes has ended.
    pub fn begin(&self, file: EndingFile) -> u64 {
        let mut state = self.state.lock();
        state.next_number += 1;
        let number = state.next_number;
        state.files.push((number, file));
        number
    }

    /// The changes are published, or dropped.
    pub fn end(&self, number: u64) {
        self.state.lock().files.retain(|(known, _)| *known != number);
    }

    /// The changes are lost.
    pub fn end_lost(&self, number: u64) {
        let mut state = self.state.lock();
        let lost: Vec<_> = state.files.extract_if(.., |(known, _)| *known == number).collect();
        lost.into_iter().for_each(|(_, file)| state.losses.add_file(file.path, file.bytes));
    }

    /// The files that are being published, with the bytes that the store does not have yet.
    pub fn files(&self) -> Vec<(String, u64)> {
        let state = self.state.lock();
        let files = state.files.iter().map(|(_, file)| {
            let unsent = file.bytes.saturating_sub(file.sent_bytes.load(Ordering::Relaxed));
            (file.path.clone(), unsent)
        });
        files.collect()
    }

    /// The losses until now.
    pub fn losses(&self) -> WriteLosses {
        self.state.lock().losses.clone()
    }
}

impl DelayedWrites for WritableBucket {
    fn publishes(&self) -> bool {
        true
    }

    fn unsent_files(&self) -> Vec<(String, u64)> {
        let open = self.files.open.lock().all();
        let changed = open.iter().filter(|object| object.is_changed());
        let mut files: Vec<(String, u64)> = changed
            .map(|object| (String::from_utf8_lossy(&object.path()).into_owned(), object.unsent_bytes()))
            .collect();
        files.append(&mut self.files.context.ending.files());
        files
    }

    fn losses(&self) -> WriteLosses {
        self.files.context.ending.losses()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_until_they_end_and_lost_ones_are_kept() {
        let ending = EndingFiles::default();
        let file = |path: &str, sent: u64| EndingFile {
            path: path.to_owned(),
            bytes: 2,
            sent_bytes: Arc::new(AtomicU64::new(sent)),
        };
        let one = ending.begin(file("a", 1));
        let two = ending.begin(file("b", 0));
        assert_eq!(ending.files(), [("a".to_owned(), 1), ("b".to_owned(), 2)]);
        ending.end(one);
        ending.end_lost(two);
        assert_eq!(ending.files(), []);
        assert_eq!(ending.losses().first_files, [("b".to_owned(), 2)]);
    }
}
