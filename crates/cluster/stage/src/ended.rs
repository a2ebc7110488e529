//! Records that are done, until all nodes that may have them know that, and forget them. Knows no node's state.

use crate::manifest::{BucketKey, Manifest, Phase};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Which of two changes is later; the record tells two changes of one place apart.
type RecordPlace = ((u64, u64), String);

struct EndedRecord {
    at: BucketKey,
    mark: String,
    place: RecordPlace,
    /// `Done` or `Withdrawn`.
    phase: Phase,
    /// Nodes that may have the manifest.
    holders: BTreeSet<String>,
    /// Nodes that know that the object is done.
    told: BTreeSet<String>,
}

impl EndedRecord {
    fn is_told(&self) -> bool {
        self.told.is_superset(&self.holders)
    }
}

/// See the head of this file.
#[derive(Default)]
pub struct EndedRecords {
    records: HashMap<String, EndedRecord>,
    by_name: HashMap<BucketKey, BTreeSet<RecordPlace>>,
    /// By node: records that the node may have and does not know to be done.
    untold: BTreeMap<String, HashSet<String>>,
    /// Names of records that all nodes know to be done, since the last look.
    told_names: HashSet<BucketKey>,
}

impl EndedRecords {
    /// All nodes that may have this record are to forget it; these know already that the record is done.
    pub fn add<'a>(&mut self, manifest: &Manifest, phase: Phase, told: impl IntoIterator<Item = &'a String>) {
        let record = &manifest.record;
        let place = (manifest.place(), record.clone());
        if !self.records.contains_key(record) {
            self.by_name.entry(manifest.at.clone()).or_default().insert(place.clone());
            let ended = EndedRecord {
                at: manifest.at.clone(),
                mark: manifest.mark.clone(),
                place,
                phase,
                holders: BTreeSet::new(),
                told: BTreeSet::new(),
            };
            self.records.insert(record.clone(), ended);
        }
        for node in manifest.nodes().chain(manifest.former.iter().map(String::as_str)) {
            self.add_holder(record, node);
        }
        for node in told {
            self.note_told(record, node);
        }
        self.look_at(record);
    }

    /// A further node may have the record; false for a record that is not done.
    pub fn add_holder(&mut self, record: &str, node: &str) -> bool {
        let Some(ended) = self.records.get_mut(record) else { return false };
        ended.holders.insert(node.to_owned());
        if !ended.told.contains(node) {
            self.untold.entry(node.to_owned()).or_default().insert(record.to_owned());
        }
        true
    }

    /// A node knows that the record is done.
    pub fn note_told(&mut self, record: &str, node: &str) {
        let Some(ended) = self.records.get_mut(record) else { return };
        ended.holders.insert(node.to_owned());
        ended.told.insert(node.to_owned());
        if let Some(untold) = self.untold.get_mut(node) {
            untold.remove(record);
            if untold.is_empty() {
                self.untold.remove(node);
            }
        }
        self.look_at(record);
    }

    fn look_at(&mut self, record: &str) {
        if let Some(ended) = self.records.get(record).filter(|ended| ended.is_told()) {
            self.told_names.insert(ended.at.clone());
        }
    }

    /// The nodes that do not know all ends.
    pub fn untold_nodes(&self) -> Vec<String> {
        self.untold.keys().cloned().collect()
    }

    /// The records that a node may have and does not know to be done, by phase.
    pub fn untold_records(&self, node: &str) -> BTreeMap<Phase, Vec<String>> {
        let mut by_phase: BTreeMap<Phase, Vec<String>> = BTreeMap::new();
        for record in self.untold.get(node).into_iter().flatten() {
            if let Some(ended) = self.records.get(record) {
                by_phase.entry(ended.phase).or_default().push(record.clone());
            }
        }
        by_phase
    }

    /// The nodes that know the end of a record; `None` for a record that all have forgotten.
    pub fn told(&self, record: &str) -> Option<&BTreeSet<String>> {
        self.records.get(record).map(|ended| &ended.told)
    }

    /// The number of records.
    pub fn count(&self) -> usize {
        self.records.len()
    }

    /// Marks of objects of the name that are done: the store may have any of these.
    pub fn marks_of(&self, at: &BucketKey) -> Vec<String> {
        let places = self.by_name.get(at).into_iter().flatten();
        let ended = places.filter_map(|(_, record)| self.records.get(record));
        ended.filter(|ended| ended.phase == Phase::Done).map(|ended| ended.mark.clone()).collect()
    }

    /// Whether a later object of the name is done.
    pub fn is_replaced(&self, at: &BucketKey, place: (u64, u64)) -> bool {
        let places = self.by_name.get(at).into_iter().flatten();
        let later = places.filter(|(other, _)| *other > place).filter_map(|(_, record)| self.records.get(record));
        later.into_iter().any(|ended| ended.phase == Phase::Done)
    }

    /// Takes out the records that all nodes know to be done: by node, the records to forget. A record stays while a node does not
    /// know the end of an earlier one of the same name, which would be the newest otherwise.
    pub fn take_told(&mut self) -> BTreeMap<String, Vec<String>> {
        let mut by_node: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for at in std::mem::take(&mut self.told_names) {
            let Some(places) = self.by_name.get_mut(&at) else { continue };
            while let Some((_, record)) = places.first() {
                if !self.records.get(record).is_some_and(EndedRecord::is_told) {
                    break;
                }
                let Some(ended) = self.records.remove(record) else { break };
                for node in ended.holders {
                    by_node.entry(node).or_default().push(record.clone());
                }
                places.remove(&ended.place);
            }
            if places.is_empty() {
                self.by_name.remove(&at);
            }
        }
        by_node
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest_samples::sample;

    fn nodes() -> [String; 2] {
        ["node-0".to_owned(), "node-1".to_owned()]
    }

    #[test]
    fn an_end_is_forgotten_when_all_nodes_know_those_of_earlier_objects_too() {
        let mut ended = EndedRecords::default();
        ended.add(&sample("a", "first", 1), Phase::Done, []);
        ended.add(&sample("a", "second", 9), Phase::Done, &nodes());
        // A node may have the first object, and does not know the end: the second is to be found later than that.
        assert!(ended.take_told().is_empty());
        let at = sample("a", "first", 1).at;
        assert!(ended.is_replaced(&at, (1, 8)) && !ended.is_replaced(&at, (1, 9)));
        for node in ended.untold_nodes() {
            assert_eq!(ended.untold_records(&node)[&Phase::Done], ["record-first"]);
            ended.note_told("record-first", &node);
        }
        let told = ended.take_told();
        assert_eq!(told.keys().cloned().collect::<Vec<_>>(), nodes());
        assert!(told.values().all(|records| *records == ["record-first", "record-second"]), "{told:?}");
        assert!(ended.untold_nodes().is_empty() && !ended.is_replaced(&at, (1, 1)));
    }
}
