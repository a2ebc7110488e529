//! The bytes of objects that this process has just published: the cache reads them from the local files that they were written
//! to, and not back from the store. The cache takes a local file over when others follow, or when it is read. It knows no cache and
//! no request.

use super::staged::StagedBytes;
use crate::{LocalFile, OriginCapabilities, OriginCapacity, OriginRead, OriginStore, forward_to};
use parking_lot::Mutex;
use spurline_types::{ByteSink, Error, ListPage, ObjectAttr, ObjectHeaders, ObjectId, ObjectRef, Result};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// Most objects whose local files are kept.
const OBJECTS_MAX: usize = 64;
/// Most bytes of these files.
const BYTES_MAX: u64 = 1 << 30;

/// An object, and the local bytes that it was published from.
struct PublishedObject {
    object: ObjectRef,
    staged: Arc<StagedBytes>,
    /// Whether the cache may take the local file over.
    is_offered: bool,
    /// Whether the cache is taking the local file over.
    is_taken: bool,
}

#[derive(Default)]
struct PublishedList {
    /// The oldest first.
    objects: VecDeque<PublishedObject>,
}

impl PublishedList {
    /// The oldest object that is not offered yet, if there are too many, or too many bytes of several.
    fn find_excess(&self) -> Option<usize> {
        let kept = || self.objects.iter().filter(|known| !known.is_offered);
        let bytes: u64 = kept().map(|known| known.staged.len()).sum();
        let count = kept().count();
        let is_excess = count > OBJECTS_MAX || count > 1 && bytes > BYTES_MAX;
        self.objects.iter().position(|known| !known.is_offered).filter(|_| is_excess)
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
    pub(super) fn insert(&self, object: ObjectRef, staged: StagedBytes) -> Vec<ObjectRef> {
        let mut list = self.list.lock();
        let staged = Arc::new(staged);
        list.objects.push_back(PublishedObject { object, staged, is_offered: false, is_taken: false });
        let mut offered = Vec::new();
        while let Some(index) = list.find_excess() {
            let oldest = &mut list.objects[index];
            if oldest.staged.whole_file().is_some() {
                oldest.is_offered = true;
                offered.push(oldest.object.clone());
            } else {
                list.objects.remove(index);
            }
        }
        offered
    }

    /// Gives up the local file of an object unless the cache is taking it over.
    pub(super) fn end_offer(&self, object: &ObjectRef) {
        self.list.lock().objects.retain(|known| known.object.id != object.id || known.is_taken || !known.is_offered);
    }

    /// Gives up all local files; whether there were any.
    pub(super) fn clear(&self) -> bool {
        let objects = std::mem::take(&mut *self.list.lock()).objects;
        !objects.is_empty()
    }

    /// The bytes of an object are those of another one now: the store has copied them.
    pub(super) fn move_to(&self, old: ObjectId, new: &ObjectRef) {
        for known in &mut self.list.lock().objects {
            if known.object.id == old && !known.is_taken {
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

    /// The local file of an object, for the first caller.
    fn take_local_file(self: &Arc<Self>, id: ObjectId) -> Option<Box<dyn LocalFile>> {
        let mut list = self.list.lock();
        let known = list.objects.iter_mut().find(|known| known.object.id == id && !known.is_taken)?;
        known.staged.whole_file()?;
        known.is_taken = true;
        let staged = Arc::clone(&known.staged);
        Some(Box::new(TakenFile { published: Arc::clone(self), id, staged, is_taken_over: false }))
    }
}

/// The local file of an object while the cache takes it over.
struct TakenFile {
    published: Arc<PublishedBytes>,
    id: ObjectId,
    staged: Arc<StagedBytes>,
    is_taken_over: bool,
}

impl LocalFile for TakenFile {
    fn file(&self) -> Option<&File> {
        self.staged.whole_file()
    }

    fn note_taken_over(mut self: Box<Self>) {
        self.is_taken_over = true;
    }
}

impl Drop for TakenFile {
    fn drop(&mut self) {
        let mut list = self.published.list.lock();
        let Some(index) = list.objects.iter().position(|known| known.object.id == self.id) else { return };
        if self.is_taken_over || list.objects[index].is_offered {
            list.objects.remove(index);
        } else {
            list.objects[index].is_taken = false;
        }
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
pub(super) struct PublishedTimes {
    list: Mutex<TimeList>,
}

impl PublishedTimes {
    /// From now on, the object at `path` in this version has this time.
    pub(super) fn insert(&self, path: &[u8], attr: &ObjectAttr) {
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
    pub(super) fn shown(&self, path: &[u8], attr: ObjectAttr) -> ObjectAttr {
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
