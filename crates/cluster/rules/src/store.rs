//! The rule set in the group's registry: a record, replaced by compare-and-swap, so that there is a single history of revisions.
//! Knows nothing of the kind of registry.

use crate::RuleSet;
use parking_lot::Mutex;
use spurline_membership::{GroupRecord, RecordName, Registry};
use spurline_types::{Error, ErrorKind, Result};

/// Retries after concurrent changes.
const CONFLICT_RETRIES: usize = 8;

/// A group's rule set in the registry.
pub struct RuleStore {
    record: Box<dyn GroupRecord>,
    last: Mutex<Option<LastRead>>,
}

/// The record as last read or written.
#[derive(Clone)]
struct LastRead {
    version: u64,
    set: RuleSet,
}

impl RuleStore {
    /// The rule set of the registry's group; `None` where the registry stores nothing.
    pub fn open(registry: &dyn Registry) -> Option<RuleStore> {
        registry.group_record(RecordName::Rules).map(|record| RuleStore { record, last: Mutex::default() })
    }

    /// The stored set. An unchanged record costs little or no traffic.
    ///
    /// # Errors
    /// When the registry does not answer; `Invalid` when the record there is no rule set.
    pub fn read(&self) -> Result<RuleSet> {
        self.read_record().map(|last| last.set)
    }

    fn read_record(&self) -> Result<LastRead> {
        let mut last = self.last.lock();
        match self.record.read(last.as_ref().map(|last| last.version))? {
            Some(record) => {
                *last = None;
                let set = RuleSet::from_record(&record.value)?;
                Ok(last.insert(LastRead { version: record.version, set }).clone())
            }
            None => last.clone().ok_or_else(|| Error::new(ErrorKind::Protocol, "the registry returned no record")),
        }
    }

    fn replace(&self, before: &LastRead, set: &RuleSet) -> Result<bool> {
        let replaced = self.record.replace(before.version, &serde_json::to_value(set).unwrap_or_default())?;
        // The next read gets the new version.
        *self.last.lock() = None;
        Ok(replaced)
    }

    /// Changes the set and returns the result. `change` gets the stored set, or `known` where that is newer: then the registry
    /// lost the record. `change` is called again after a concurrent change.
    ///
    /// # Errors
    /// The error of `change`; when the registry does not answer, or others keep changing the set, as `failed` maps it.
    pub fn change<E>(
        &self,
        known: &RuleSet,
        mut change: impl FnMut(&RuleSet) -> std::result::Result<RuleSet, E>,
        failed: impl Fn(Error) -> E,
    ) -> std::result::Result<RuleSet, E> {
        for _ in 0..CONFLICT_RETRIES {
            let stored = self.read_record().map_err(&failed)?;
            let set = change(&stored.set.clone().or_newer(known.clone()))?;
            if set == stored.set || self.replace(&stored, &set).map_err(&failed)? {
                return Ok(set);
            }
        }
        Err(failed(Error::new(ErrorKind::Unavailable, "others keep changing the group's rules")))
    }

    /// The stored set, for a process that has `own`. A registry with an older set lost the record, and gets `own`.
    ///
    /// # Errors
    /// As [`RuleStore::read`].
    pub fn read_or_restore(&self, own: &RuleSet) -> Result<RuleSet> {
        let stored = self.read()?;
        if stored.revision >= own.revision {
            return Ok(stored);
        }
        // The record may have changed a moment ago: the whole record is asked for.
        *self.last.lock() = None;
        let stored = self.read()?;
        if stored.revision >= own.revision {
            return Ok(stored);
        }
        let restored = self.change(own, |newest| Ok(newest.clone()), |error| error)?;
        tracing::warn!(
            "the registry lost the folder rules of the group (it had revision {}, this process {}): they were restored",
            stored.revision,
            own.revision,
        );
        Ok(restored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use spurline_cache::FolderRule;
    use spurline_membership::StoredRecord;
    use std::sync::Arc;

    /// A record in memory: version, contents, and the number of full reads.
    type MemoryState = Arc<Mutex<(u64, Value, usize)>>;

    struct InMemory(MemoryState);

    impl GroupRecord for InMemory {
        fn read(&self, known: Option<u64>) -> Result<Option<StoredRecord>> {
            let mut state = self.0.lock();
            if known == Some(state.0) {
                return Ok(None);
            }
            state.2 += 1;
            Ok(Some(StoredRecord { version: state.0, value: state.1.clone() }))
        }

        fn replace(&self, version: u64, value: &Value) -> Result<bool> {
            let mut state = self.0.lock();
            let same = state.0 == version;
            if same {
                (state.0, state.1) = (version + 1, value.clone());
            }
            Ok(same)
        }
    }

    fn store(record: &MemoryState) -> RuleStore {
        RuleStore { record: Box::new(InMemory(Arc::clone(record))), last: Mutex::default() }
    }

    fn pin(set: &RuleSet, url: &str) -> Result<RuleSet> {
        set.with_changes(&[url.to_owned()], &|rule| rule.pin = true)
    }

    #[test]
    fn concurrent_changes_are_all_kept_in_one_history() {
        let record = MemoryState::default();
        let (one, two) = (store(&record), store(&record));
        let mut first = true;
        // The second writer comes between the first one's read and its write.
        let set = one.change(
            &RuleSet::default(),
            |set| {
                if std::mem::take(&mut first) {
                    two.change(&RuleSet::default(), |set| pin(set, "s3://b/two"), |error| error)?;
                }
                pin(set, "s3://b/one")
            },
            |error| error,
        );
        let set = set.unwrap();
        assert_eq!((set.revision, set.rules.len()), (2, 2));
        assert_eq!((one.read().unwrap(), two.read().unwrap()), (set.clone(), set));
        let reads = record.lock().2;
        (0..5).for_each(|_| drop(one.read().unwrap()));
        assert_eq!(record.lock().2, reads, "an unchanged record is not read again");
    }

    #[test]
    fn a_lost_record_is_restored_by_the_newest_revision() {
        let record = MemoryState::default();
        let node = store(&record);
        let one = pin(&RuleSet::default(), "s3://b/one").unwrap();
        let two = pin(&one, "s3://b/two").unwrap();
        assert_eq!(node.read_or_restore(&one).unwrap(), one);
        assert_eq!(store(&record).read_or_restore(&two).unwrap(), two);
        assert_eq!(node.read_or_restore(&one).unwrap(), two);
        // Lost again: a change continues from what the nodes have.
        *record.lock() = (9, Value::Null, 0);
        let three = store(&record).change(&two, |set| pin(set, "s3://b/three"), |error| error).unwrap();
        assert_eq!((three.revision, three.rules.len()), (3, 3));
    }

    #[test]
    fn a_record_of_another_form_is_an_error_each_time() {
        let record = MemoryState::default();
        *record.lock() = (1, serde_json::json!({"rules": "none"}), 0);
        let store = store(&record);
        for _ in 0..2 {
            assert_eq!(store.read().unwrap_err().kind(), ErrorKind::Invalid);
        }
        let rule = FolderRule { url: "s3://b".into(), pin: true, ..FolderRule::default() };
        let own = RuleSet { revision: 1, rules: vec![rule] };
        assert!(store.read_or_restore(&own).is_err(), "it may be of a newer release");
    }
}
