//! Whole files on the cache disks that are handed to the kernel. The store checks the files.

use crate::{Cache, CacheContext};
use spurline_store::PinnedFile;
use spurline_types::{ObjectId, ObjectRef};
use spurline_volume::BackingFile;
use std::sync::Arc;

/// A file up to this length is checked at open; a longer file is checked in the background, and handed over from the next open
/// on.
const CHECK_AT_OPEN: u64 = 64 << 20;

impl Cache {
    pub(crate) fn whole_backing(&self, object: &ObjectRef) -> Option<Box<dyn BackingFile>> {
        let store = self.shared.store.as_ref()?;
        if object.size <= CHECK_AT_OPEN {
            return store.whole_file(object).map(boxed_backing);
        }
        if let Some(file) = store.whole_file_if_checked(object) {
            return Some(boxed_backing(file));
        }
        let checking = FileCheck::try_begin(&self.shared, object.id)?;
        let object = object.clone();
        // Dropped when too many jobs wait already: the next open begins anew.
        self.shared.workers.run_ahead(move || {
            if let Some(store) = &checking.shared.store {
                drop(store.whole_file(&object));
            }
            drop(checking);
        });
        None
    }
}

/// A long object whose file is being checked, until the job that carries this has run or was dropped.
struct FileCheck {
    shared: Arc<CacheContext>,
    id: ObjectId,
}

impl FileCheck {
    /// `None` when another check of the file is running.
    fn try_begin(shared: &Arc<CacheContext>, id: ObjectId) -> Option<FileCheck> {
        let begins = shared.checking.lock().insert(id);
        begins.then(|| FileCheck { shared: Arc::clone(shared), id })
    }
}

impl Drop for FileCheck {
    fn drop(&mut self) {
        self.shared.checking.lock().remove(&self.id);
    }
}

fn boxed_backing(file: PinnedFile) -> Box<dyn BackingFile> {
    Box::new(WholeFile(file))
}

struct WholeFile(PinnedFile);

impl BackingFile for WholeFile {
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
    use spurline_mem::{BufferPool, MemTier};
    use std::time::{Duration, Instant};

    #[test]
    fn a_file_is_checked_again_whatever_became_of_the_job_that_checked_it() {
        let tier = MemTier::new(BufferPool::new(1 << 20, 1 << 20).unwrap());
        let shared = CacheContext::new(tier, None, 1 << 20, 4, Duration::from_secs(5), false, Arc::default());
        let id = ObjectId(7);
        let first = FileCheck::try_begin(&shared, id).unwrap();
        assert!(FileCheck::try_begin(&shared, id).is_none(), "once at a time");
        drop(first);
        let second = FileCheck::try_begin(&shared, id).unwrap();
        assert!(shared.workers.run_ahead(move || {
            let _second = second;
            panic!("while a file is checked");
        }));
        let until = Instant::now() + Duration::from_secs(60);
        while FileCheck::try_begin(&shared, id).is_none() {
            assert!(Instant::now() < until, "the job has ended");
            std::thread::yield_now();
        }
    }
}
