//! Files on the cache disks that are handed to the kernel whole. How they are checked is the store's.

use crate::{Cache, Shared};
use spurline_store::PinnedFile;
use spurline_types::{ObjectId, ObjectRef};
use spurline_volume::Backing;
use std::sync::Arc;

/// A file is checked at open when it is no longer than this; a longer one is checked in the background and handed over from
/// the next open on.
const CHECK_AT_OPEN: u64 = 64 << 20;

impl Cache {
    pub(crate) fn whole(&self, object: &ObjectRef) -> Option<Box<dyn Backing>> {
        let store = self.shared.store.as_ref()?;
        if object.size <= CHECK_AT_OPEN {
            return store.whole_file(object).map(whole);
        }
        if let Some(file) = store.whole_file_if_checked(object) {
            return Some(whole(file));
        }
        let checking = Checking::begin(&self.shared, object.id)?;
        let object = object.clone();
        // Dropped when too much waits already: the next open begins anew.
        self.shared.workers.ahead(move || {
            if let Some(store) = &checking.shared.store {
                drop(store.whole_file(&object));
            }
            drop(checking);
        });
        None
    }
}

/// A long object whose file is being checked, until the job that carries this has run or was dropped.
struct Checking {
    shared: Arc<Shared>,
    id: ObjectId,
}

impl Checking {
    /// `None` when somebody else checks it.
    fn begin(shared: &Arc<Shared>, id: ObjectId) -> Option<Checking> {
        let begins = shared.checking.lock().insert(id);
        begins.then(|| Checking { shared: Arc::clone(shared), id })
    }
}

impl Drop for Checking {
    fn drop(&mut self) {
        self.shared.checking.lock().remove(&self.id);
    }
}

fn whole(file: PinnedFile) -> Box<dyn Backing> {
    Box::new(Whole(file))
}

struct Whole(PinnedFile);

impl Backing for Whole {
    fn file(&self) -> &std::fs::File {
        &self.0.file
    }

    fn close(self: Box<Self>) -> Box<dyn Send + Sync> {
        Box::new(self.0.close())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_mem::{Pool, Tier};
    use std::time::{Duration, Instant};

    #[test]
    fn a_file_is_checked_again_whatever_became_of_the_job_that_checked_it() {
        let tier = Tier::new(Pool::new(1 << 20, 1 << 20).unwrap());
        let shared = Shared::new(tier, None, 1 << 20, 4, Duration::from_secs(5), false, Arc::default());
        let id = ObjectId(7);
        let first = Checking::begin(&shared, id).unwrap();
        assert!(Checking::begin(&shared, id).is_none(), "once at a time");
        drop(first);
        let second = Checking::begin(&shared, id).unwrap();
        assert!(shared.workers.ahead(move || {
            let _second = second;
            panic!("while a file is checked");
        }));
        let until = Instant::now() + Duration::from_secs(60);
        while Checking::begin(&shared, id).is_none() {
            assert!(Instant::now() < until, "the job has ended");
            std::thread::yield_now();
        }
    }
}
