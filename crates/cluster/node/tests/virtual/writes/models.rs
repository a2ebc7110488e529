//! What a correct source holds after all calls of all programs, whatever order they were executed in. It knows neither mounts
//! nor faults.
//!
//! A call that failed may have been executed, once. So each model tells apart what has to be there and what may be there.

use std::collections::{BTreeMap, BTreeSet};

/// Values of a counter, each written under a lock by the program that had read the one before it.
#[derive(Default)]
pub struct CounterModel {
    /// Each value, the value before it, and whether its write was acknowledged.
    written: BTreeMap<u64, (u64, bool)>,
}

impl CounterModel {
    /// A program is about to write a value.
    pub fn begin_write(&mut self, value: u64, before: u64) {
        self.written.insert(value, (before, false));
    }

    /// The write was acknowledged: no other one may follow the same value.
    pub fn acknowledge(&mut self, value: u64) {
        let Some((before, _)) = self.written.get(&value).copied() else { return };
        self.written.insert(value, (before, true));
        let rivals = self.written.iter().filter(|(_, (other, done))| *done && *other == before);
        let rivals: Vec<_> = rivals.map(|(value, _)| *value).collect();
        assert!(rivals.len() == 1, "two programs had one lock: {rivals:x?} were both written over {before:x}");
    }

    /// Whether some program has begun to write this value.
    pub fn is_known(&self, value: u64) -> bool {
        value == 0 || self.written.contains_key(&value)
    }

    /// Every acknowledged value lies on the way to the last one.
    pub fn check(&self, last: u64) {
        let (mut chain, mut at) = (BTreeSet::new(), last);
        while at != 0 {
            let Some((before, _)) = self.written.get(&at) else { panic!("no program has written {at:x}") };
            assert!(chain.insert(at), "a value was written after itself");
            at = *before;
        }
        let lost = self.written.iter().filter(|(value, (_, done))| *done && !chain.contains(value));
        let lost: Vec<_> = lost.map(|(value, (before, _))| format!("{value:x} over {before:x}")).collect();
        assert!(lost.is_empty(), "acknowledged writes under a lock are not in the file: {lost:?}; it has {last:x}");
    }

    pub fn acknowledged(&self) -> usize {
        self.written.values().filter(|(_, done)| *done).count()
    }
}

/// The records that programs append to a file, each a line.
#[derive(Default)]
pub struct LogModel {
    /// Whether each record has to be there.
    records: BTreeMap<String, bool>,
    /// The records that have to be there, in the order of each program.
    ordered: BTreeMap<usize, Vec<String>>,
}

impl LogModel {
    pub fn begin_append(&mut self, record: &str) {
        self.records.insert(record.to_owned(), false);
    }

    pub fn acknowledge(&mut self, program: usize, record: &str) {
        self.records.insert(record.to_owned(), true);
        self.ordered.entry(program).or_default().push(record.to_owned());
    }

    pub fn check(&self, file: &str, content: &[u8]) {
        let text = String::from_utf8_lossy(content);
        let mut places: BTreeMap<&str, usize> = BTreeMap::new();
        for (place, line) in text.lines().enumerate() {
            assert!(self.records.contains_key(line), "{file} has a line that no program has appended: {line:?}");
            assert!(places.insert(line, place).is_none(), "{file} has {line} twice: an append was made twice");
        }
        let lost: Vec<_> =
            self.records.iter().filter(|(record, done)| **done && !places.contains_key(&***record)).collect();
        assert!(lost.is_empty(), "{file} lacks acknowledged appends: {lost:?}");
        for records in self.ordered.values() {
            let order: Vec<_> = records.iter().map(|record| places[&**record]).collect();
            assert!(order.is_sorted(), "{file} has the appends of a program in another order: {records:?}");
        }
    }

    pub fn acknowledged(&self) -> usize {
        self.records.values().filter(|done| **done).count()
    }
}

/// Attempts to create one name, exclusively.
#[derive(Default)]
pub struct ContestModel {
    pub winners: usize,
    pub losers: usize,
    /// Attempts with an unknown outcome.
    pub unclear: usize,
}

impl ContestModel {
    pub fn check(&self, name: &str) {
        assert!(self.winners <= 1, "{} programs have created {name} exclusively", self.winners);
        let has_winner = self.winners + self.unclear > 0 || self.losers == 0;
        assert!(has_winner, "{} programs found that {name} exists, and none has created it", self.losers);
    }
}

/// A file that one program at a time writes, from open to close.
#[derive(Default)]
pub struct DocumentModel {
    /// A name for each time that a call failed: what the file has then is unknown.
    pub generation: u32,
    pub exists: bool,
    pub content: Vec<u8>,
    pub readers: usize,
    pub writing: bool,
}

/// A file that programs replace by renames.
#[derive(Default)]
pub struct ReplacedModel {
    pub writing: bool,
    /// The last version whose rename was acknowledged, and the last that was begun.
    pub acknowledged: u64,
    pub begun: u64,
}

/// The content of a version.
pub fn version_content(version: u64) -> Vec<u8> {
    let len = 1000 + (version * 7919 % 60_000) as usize;
    let head = version.to_le_bytes();
    head.iter().copied().chain((8..len).map(|at| (at as u64 * 31 + version) as u8)).collect()
}
