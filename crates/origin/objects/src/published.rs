//! The bytes of objects that this process has just published: the cache reads them from the local files that they were written
//! to, and not back from the store. When others follow, the cache takes the local file over. It knows no cache
//! and no request.

use crate::staged::StagedBytes;
use parking_lot::Mutex;
use spurline_origin::{LocalFile, OriginCapabilities, OriginCapacity, OriginRead, OriginStore, forward_to};
use spurline_types::{ByteSink, Error, ListPage, ObjectAttr, ObjectHeaders, ObjectId, ObjectRef, Result};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Most objects whose local files are kept.
const OBJECTS_MAX: usize = 64;
/// Most bytes of these files.
const BYTES_MAX: u64 = 1 << 30;

/// What becomes of a local file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileFate {
    Kept,
    /// The cache may take the file over.
    Offered,
    /// The cache is taking the file over.
    Taken,
}

/// An object, and the local bytes that it was published from.
struct PublishedObject {
    object: ObjectRef,
    staged: Arc<StagedBytes>,
    fate: FileFate,
}

#[derive(Default)]
struct PublishedList {
    /// The oldest first.
    objects: VecDeque<PublishedObject>,
}

impl PublishedList {
    /// The oldest object that is kept, if there are too many of these, or too many bytes of several.
    fn find_excess(&self) -> Option<usize> {
        let mut count = 0;
        let mut bytes = 0;
        for kept in self.objects.iter().filter(|known| known.fate == FileFate::Kept) {
            count += 1;
            bytes += kept.staged.len();
        }
        let is_excess = count > OBJECTS_MAX || count > 1 && bytes > BYTES_MAX;
        self.objects.iter().position(|known| known.fate == FileFate::Kept).filter(|_| is_excess)
    }
}

/// The local files of the objects that were published last.
#[derive(Default)]
pub struct PublishedBytes {
    list: Mutex<PublishedList>,
}

impl PublishedBytes {
    /// Keeps the bytes of an object. Of the oldest objects, those in memory go; returns the others, whose local files the cache may
    /// take over until [`PublishedBytes::end_offer`].
    pub(crate) fn insert(&self, object: ObjectRef, staged: StagedBytes) -> Vec<ObjectRef> {
        let mut list = self.list.lock();
        list.objects.push_back(PublishedObject { object, staged: Arc::new(staged), fate: FileFate::Kept });
        let mut offered = Vec::new();
        while let Some(index) = list.find_excess() {
            let oldest = &mut list.objects[index];
            if oldest.staged.whole_file().is_some() {
                oldest.fate = FileFate::Offered;
                offered.push(oldest.object.clone());
            } else {
                list.objects.remove(index);
            }
        }
        offered
    }

    /// Gives up the local file of an object unless the cache is taking it over.
    pub(crate) fn end_offer(&self, object: &ObjectRef) {
        let is_refused = |known: &PublishedObject| known.object.id == object.id && known.fate == FileFate::Offered;
        self.list.lock().objects.retain(|known| !is_refused(known));
    }

    /// Gives up all local files; whether there were any.
    pub(crate) fn clear(&self) -> bool {
        let objects = std::mem::take(&mut *self.list.lock()).objects;
        !objects.is_empty()
    }

    /// The bytes of an object are those of another one now: the store has copied them.
    pub(crate) fn move_to(&self, old: ObjectId, new: &ObjectRef) {
        for known in &mut self.list.lock().objects {
            if known.object.id == old && known.fate == FileFate::Kept {
                known.object = new.clone();
            }
        }
    }

    fn find(&self, id: ObjectId) -> Option<Arc<StagedBytes>> {
        let list = self.list.lock();
        list.objects.iter().find(|known| known.object.id == id).map(|known| Arc::clone(&known.staged))
    }

    fn is_empty(&self) -> bool {
        self.list.lock().objects.is_empty()
    }

    fn take_local_file(self: &Arc<Self>, id: ObjectId) -> Option<Box<dyn LocalFile>> {
        let mut list = self.list.lock();
        let mut objects = list.objects.iter_mut();
        let offered = objects.find(|known| known.object.id == id && known.fate == FileFate::Offered)?;
        offered.fate = FileFate::Taken;
        Some(Box::new(TakenFile { published: Arc::clone(self), id, staged: Arc::clone(&offered.staged) }))
    }
}

/// The local file of an object while the cache takes it over.
struct TakenFile {
    published: Arc<PublishedBytes>,
    id: ObjectId,
    staged: Arc<StagedBytes>,
}

impl LocalFile for TakenFile {
    fn file(&self) -> Option<&File> {
        self.staged.whole_file()
    }
}

impl Drop for TakenFile {
    fn drop(&mut self) {
        self.published.list.lock().objects.retain(|known| known.object.id != self.id);
    }
}

/// Most objects whose times are known.
const TIMES_MAX: usize = 50_000;

#[derive(Default)]
struct TimeList {
    times: HashMap<ObjectId, SystemTime>,
    /// The oldest first.
    order: VecDeque<ObjectId>,
}

/// The times of the objects that this process has written last, as programs have seen them. The store's own time is that of the
/// request, in whole seconds: a file whose time changed after its close would count as changed by another program.
#[derive(Default)]
pub(crate) struct PublishedTimes {
    list: Mutex<TimeList>,
}

impl PublishedTimes {
    /// From now on, the object at `path` in this version has this time.
    pub(crate) fn insert(&self, path: &[u8], attr: &ObjectAttr) {
        let id = time_id(path, attr);
        let mut list = self.list.lock();
        if list.times.insert(id, attr.mtime).is_none() {
            list.order.push_back(id);
        }
        while list.order.len() > TIMES_MAX {
            let Some(oldest) = list.order.pop_front() else { return };
            list.times.remove(&oldest);
        }
    }

    /// The attributes with the time that programs have seen.
    pub(crate) fn shown(&self, path: &[u8], attr: ObjectAttr) -> ObjectAttr {
        let known = self.list.lock().times.get(&time_id(path, &attr)).copied();
        ObjectAttr { mtime: known.unwrap_or(attr.mtime), ..attr }
    }
}

fn time_id(path: &[u8], attr: &ObjectAttr) -> ObjectId {
    ObjectId::from_text("", path, attr.version.as_str())
}

/// An origin whose objects are read from their local files as long as these are kept.
pub struct PublishingOrigin {
    store: Arc<dyn OriginStore>,
    published: Arc<PublishedBytes>,
}

impl PublishingOrigin {
    /// The origin `store` beside the bytes that were published into it.
    pub fn new(store: Arc<dyn OriginStore>, published: Arc<PublishedBytes>) -> PublishingOrigin {
        PublishingOrigin { store, published }
    }

    /// Fills the sink from a local file; false when the file does not have all of the bytes.
    fn read_published(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink) -> Result<bool> {
        let Some(staged) = self.published.find(object.id) else { return Ok(false) };
        let len = sink.spare().len();
        if !staged.is_changed(offset..offset + len as u64) {
            return Ok(false);
        }
        let read = staged.read(offset, sink.spare(), &|_, _, _| Ok(()))?;
        sink.commit(read);
        Ok(read == len)
    }
}

impl OriginStore for PublishingOrigin {
    forward_to! { store:
        fn source_url(&self) -> &str;
        fn describe(&self) -> String;
        fn capabilities(&self) -> OriginCapabilities;
        fn check(&self, deadline: Instant) -> Result<()>;
        fn refusal(&self, deadline: Instant) -> Option<Error>;
        fn lookup(&self, path: &[u8], deadline: Instant) -> Result<ObjectAttr>;
        fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, deadline: Instant) -> Result<ListPage>;
        fn lists_all(&self, path: &[u8]) -> bool;
        fn lookup_within(&self, path: &[u8], max_age: Duration, deadline: Instant) -> Result<ObjectAttr>;
        fn list_within(&self, path: &[u8], cursor: Option<&[u8]>, max: usize, max_age: Duration, deadline: Instant) -> Result<ListPage>;
        fn readlink(&self, path: &[u8], deadline: Instant) -> Result<Vec<u8>>;
        fn object_headers(&self, path: &[u8], deadline: Instant) -> Result<ObjectHeaders>;
        fn statfs(&self, deadline: Instant) -> Result<Option<OriginCapacity>>;
    }

    fn take_local_file(&self, object: &ObjectRef) -> Option<Box<dyn LocalFile>> {
        self.published.take_local_file(object.id)
    }

    fn read(&self, object: &ObjectRef, offset: u64, sink: &mut dyn ByteSink, deadline: Instant) -> Result<()> {
        if self.read_published(object, offset, sink)? {
            return Ok(());
        }
        self.store.read(object, offset, sink, deadline)
    }

    fn read_many<'a>(
        &self,
        reads: &mut dyn Iterator<Item = OriginRead<'a>>,
        at_once: usize,
        time: Duration,
    ) -> Vec<Result<()>> {
        if self.published.is_empty() {
            return self.store.read_many(reads, at_once, time);
        }
        reads.map(|read| self.read(read.object, read.offset, read.sink, Instant::now() + time)).collect()
    }
}
