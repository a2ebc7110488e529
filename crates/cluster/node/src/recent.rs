//! Objects used lately by readers or jobs, with counts: the ones worth handing on before a drain. Bounded: an object
//! unused while as many others were used is forgotten.

use parking_lot::Mutex;
use spurline_types::{ObjectId, ObjectRef};
use std::collections::HashMap;

/// Objects per generation; at most two generations are kept.
const MOST: usize = 8192;

/// One object.
#[derive(Clone)]
pub(crate) struct RecentObject {
    /// Index of its volume.
    pub volume: usize,
    pub object: ObjectRef,
    /// Number of times it was opened by a reader or job, not of reads.
    pub times: u64,
}

#[derive(Default)]
struct RecentGenerations {
    /// Objects added since start.
    added: u64,
    young: HashMap<ObjectId, RecentObject>,
    old: HashMap<ObjectId, RecentObject>,
}

/// The objects in use.
#[derive(Default)]
pub(crate) struct RecentObjects(Mutex<RecentGenerations>);

impl RecentObjects {
    /// Records a use of `object`. The lock is held for one table lookup.
    pub fn note_object(&self, volume: usize, object: &ObjectRef) {
        let mut both = self.0.lock();
        if let Some(known) = both.young.get_mut(&object.id) {
            known.times += 1;
            return;
        }
        if both.young.len() >= MOST {
            both.old = std::mem::take(&mut both.young);
        }
        let times = both.old.remove(&object.id).map_or(0, |known| known.times) + 1;
        both.young.insert(object.id, RecentObject { volume, object: object.clone(), times });
        both.added += 1;
    }

    /// Adds an object that was used before the start, unless there are enough.
    pub fn restore_object(&self, volume: usize, object: ObjectRef, times: u64) {
        let mut both = self.0.lock();
        if both.old.len() < MOST && !both.young.contains_key(&object.id) {
            both.old.insert(object.id, RecentObject { volume, object, times });
        }
    }

    /// The number of objects added since start: while it stays, only counts have changed.
    pub fn added_count(&self) -> u64 {
        self.0.lock().added
    }

    /// The objects after `id` in the order of ids, or all.
    pub fn objects_after(&self, id: Option<ObjectId>) -> Vec<RecentObject> {
        let both = self.0.lock();
        let all = both.young.values().chain(both.old.values());
        let mut all: Vec<RecentObject> =
            all.filter(|asked| id.is_none_or(|id| asked.object.id.0 > id.0)).cloned().collect();
        drop(both);
        all.sort_by_key(|asked| asked.object.id.0);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::Version;

    #[test]
    fn what_is_asked_for_is_remembered_and_the_rest_is_forgotten() {
        let recent = RecentObjects::default();
        let object = |n: usize| ObjectRef::new("s", n.to_string().as_bytes(), Version::new("1"), 1);
        let often = object(usize::MAX);
        for n in 0..5 * MOST {
            recent.note_object(0, &object(n));
            if n % 1000 == 0 {
                recent.note_object(0, &often);
            }
        }
        let all = recent.objects_after(None);
        assert!(all.len() <= 2 * MOST && all.len() > MOST);
        assert!(all.iter().any(|asked| asked.object.id == often.id && asked.times == 41));
        assert!(all.iter().all(|asked| asked.object.id != object(0).id));
        assert!(all.is_sorted_by_key(|asked| asked.object.id.0));
        let rest = recent.objects_after(Some(all[99].object.id));
        assert_eq!((rest.len(), rest[0].object.id), (all.len() - 100, all[100].object.id));
    }
}
