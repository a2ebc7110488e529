//! The objects that readers or jobs came to on this node lately, each with how often: what is worth handing on when the
//! node is drained. Of bounded size: what was not come to while as many others were is forgotten.

use parking_lot::Mutex;
use spurline_types::{ObjectId, ObjectRef};
use std::collections::HashMap;

/// Objects of one generation; twice as many are remembered at most.
const MOST: usize = 8192;

/// One object.
#[derive(Clone)]
pub(crate) struct Asked {
    /// The number of its volume.
    pub volume: usize,
    pub object: ObjectRef,
    /// How often it was come to, not how many reads it had.
    pub times: u64,
}

#[derive(Default)]
struct Generations {
    young: HashMap<ObjectId, Asked>,
    old: HashMap<ObjectId, Asked>,
}

/// What was asked for.
#[derive(Default)]
pub(crate) struct Recent(Mutex<Generations>);

impl Recent {
    /// A reader or a job comes to `object`. The lock is held for as long as a look into a table takes.
    pub fn asked(&self, volume: usize, object: &ObjectRef) {
        let mut both = self.0.lock();
        if let Some(known) = both.young.get_mut(&object.id) {
            known.times += 1;
            return;
        }
        if both.young.len() >= MOST {
            both.old = std::mem::take(&mut both.young);
        }
        let times = both.old.remove(&object.id).map_or(0, |known| known.times) + 1;
        both.young.insert(object.id, Asked { volume, object: object.clone(), times });
    }

    /// Those after `id` in the order of ids, or all.
    pub fn after(&self, id: Option<ObjectId>) -> Vec<Asked> {
        let both = self.0.lock();
        let all = both.young.values().chain(both.old.values());
        let mut all: Vec<Asked> = all.filter(|asked| id.is_none_or(|id| asked.object.id.0 > id.0)).cloned().collect();
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
        let recent = Recent::default();
        let object = |n: usize| ObjectRef::new("s", n.to_string().as_bytes(), Version::new("1"), 1);
        let often = object(usize::MAX);
        for n in 0..5 * MOST {
            recent.asked(0, &object(n));
            if n % 1000 == 0 {
                recent.asked(0, &often);
            }
        }
        let all = recent.after(None);
        assert!(all.len() <= 2 * MOST && all.len() > MOST);
        assert!(all.iter().any(|asked| asked.object.id == often.id && asked.times == 41));
        assert!(all.iter().all(|asked| asked.object.id != object(0).id));
        assert!(all.is_sorted_by_key(|asked| asked.object.id.0));
        let rest = recent.after(Some(all[99].object.id));
        assert_eq!((rest.len(), rest[0].object.id), (all.len() - 100, all[100].object.id));
    }
}
