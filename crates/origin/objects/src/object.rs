//! A file of a bucket that programs have open, for all its open files in this process: the object as it was read, the
//! changes above it, and the requests that publish them. It knows no folder and no caller.
//!
//! 1. A file without changes is read from the object, through the cache.
//! 2. The first change begins a local file of [`StagedBytes`] above the object.
//! 3. A part whose bytes were all written is uploaded while the program goes on; a later change of it uploads it again.
//!    Where local space is short, parts are moved to the store ([`spill`]).
//! 4. A sync or a close publishes: the missing parts are sent, unchanged ones are copied in the store, and the object
//!    appears under the condition that no other writer has changed it.
//! 5. Then the file is again one without changes, of the new version, and the cache gets its blocks from the local file.

mod apart;
mod attrs;
mod below;
mod facts;
mod following;
mod kept;
mod locked;
mod nameless;
mod spill;
mod state;
mod upload;

pub(crate) use attrs::learn_attributes;
use facts::{ObjectFacts, ReportedFailure};
pub(crate) use kept::KeptFile;
use kept::{KeptBeginning, KeptObject};
use locked::ObjectLocks;
pub(crate) use nameless::keep_all_bytes;
use spill::Spilling;
use state::{LostWrite, ObjectEvent, ObjectState, Publication};

use crate::absences::RecentAbsences;
use crate::file_attrs::{FileAttrs, file_time};
use crate::found::{FoundObject, OpenedNode};
use crate::last_known::LastKnown;
use crate::names::{file_number, identity_of, key_of, random_identity};
use crate::open_table::OpenTable;
use crate::part_upload::{PartState, PartUpload};
use crate::published::{PublishedBytes, PublishedTimes};
use crate::requests::{BucketRequests, NewObject};
use crate::staged::{StagedBytes, StagingSpace};
use crate::unpublished::{EndingFile, EndingFiles};
use crate::write_options::BucketWriteOptions;
use bytes::Bytes;
use parking_lot::Mutex;
use spurline_object_store::{ObjectAttributes, UploadedPart, WriteCondition};
use spurline_origin::object_attr;
use spurline_types::{Error, ErrorKind, ObjectAttr, ObjectRef, Result};
use spurline_volume::Volume;
use spurline_volume::kept_files::KeptFiles;
use spurline_volume::path_locks::PathLocks;
use spurline_volume::repeated::ChangeMark;
use spurline_volume::writes::FileIdentity;
use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;
use tokio::task::JoinHandle;

/// Least length of a part that is copied, as S3 has it for all parts but the last.
const LEAST_COPY: u64 = 5 << 20;
/// Parts of one file that are on their way at once.
const PARTS_IN_FLIGHT: usize = 8;
/// Bytes that readers of a file are expected to read at a time.
const HOT_PIECE: usize = 1 << 20;
/// Zeros that are written at a time.
const CLEARED_PIECE: usize = 64 << 10;
/// How often a publication sends parts that are missing; each request is repeated until its own deadline.
const PART_ROUNDS: u32 = 2;

/// The bytes of a part.
enum PartBody {
    Bytes(Bytes),
    /// The store copies them from this range of an object.
    Copied {
        key: String,
        etag: String,
        range: Range<u64>,
    },
}

/// An upload that begins.
struct UploadBeginning {
    begun: JoinHandle<Result<PartUpload>>,
    kept: KeptBeginning,
}

/// The changed bytes of a file and their upload. Requests are sent while they are locked.
#[derive(Default)]
struct ObjectChanges {
    staged: Option<StagedBytes>,
    upload: Option<PartUpload>,
    /// The upload, until it has begun.
    beginning: Option<UploadBeginning>,
    /// Parts that writes have filled, and that could not be sent without a wait.
    waiting_parts: BTreeSet<u32>,
    spilling: Spilling,
    /// The attributes of the published object, once they are known.
    attributes: Option<ObjectAttributes>,
    /// The mark of the next publication, where the request has a mark.
    mark: Option<ChangeMark>,
    /// The marks of publications that failed, and that the store may have executed or may execute late; the last ones.
    failed_marks: VecDeque<String>,
    /// The mark of a publication of these changes by a process that has ended.
    sent_before: Option<String>,
}

/// What the open files of a bucket have in common.
pub(crate) struct ObjectContext {
    pub requests: Arc<BucketRequests>,
    pub reads: Arc<dyn Volume>,
    pub options: Arc<BucketWriteOptions>,
    pub published: Arc<PublishedBytes>,
    pub times: PublishedTimes,
    /// For the changed bytes of all files.
    pub space: Arc<StagingSpace>,
    /// The files that programs have changed, or may change, by the numbers of their identities.
    pub writing: Mutex<OpenTable<u64, OpenObject>>,
    pub absences: Arc<RecentAbsences>,
    pub known: Arc<LastKnown>,
    pub ending: EndingFiles,
    /// Where open files outlive this process.
    pub kept_files: OnceLock<Arc<dyn KeptFiles>>,
    /// The locks and new names of the mounts of a group; a lone mount has none.
    pub path_locks: OnceLock<Arc<dyn PathLocks>>,
    /// Looks at objects and changes of these, in their order.
    pub steps: AtomicU64,
}

impl ObjectContext {
    /// The object at a path is this one from now on, also while the store does not respond.
    fn note_known(&self, path: &[u8], attr: &ObjectAttr, attributes: Option<&ObjectAttributes>) {
        let attributes = attributes.filter(|_| self.options.object_attrs).cloned();
        if self.options.object_attrs && attributes.is_none() {
            return self.known.forget(path);
        }
        self.known.note_published(path, FoundObject { attr: attr.clone(), attributes });
    }

    /// Begins to bring the bytes of an object into the cache.
    fn bring_into_cache(&self, object: &ObjectRef) {
        let blocks = object.size.div_ceil(self.reads.block_size());
        self.reads.prefetch(object, 0..u32::try_from(blocks).unwrap_or(u32::MAX), HOT_PIECE);
    }

    /// The number of a look that begins now, or of a change that has just been made.
    pub fn next_step(&self) -> u64 {
        self.steps.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// A file that is open.
pub(crate) struct OpenObject {
    context: Arc<ObjectContext>,
    /// The identity of a new file.
    unpublished: FileIdentity,
    /// Open files that write.
    writers: AtomicUsize,
    /// A new file that no other writer may have made.
    is_exclusive: bool,
    /// Bytes of the parts that the store has of the next publication, as of the last part that was sent.
    sent_bytes: Arc<AtomicU64>,
    facts: Mutex<ObjectFacts>,
    /// Locked before `facts`.
    changes: Mutex<ObjectChanges>,
    pub(crate) locks: ObjectLocks,
    /// Behind `changes`: the keeper drops the local file last.
    kept: Option<KeptObject>,
}

impl OpenObject {
    /// A file that exists, or a new one.
    pub fn new(context: Arc<ObjectContext>, path: Vec<u8>, node: OpenedNode) -> OpenObject {
        let mut changes = ObjectChanges::default();
        let mut is_exclusive = false;
        let facts = match node {
            OpenedNode::Found(found) => {
                let file_attrs = found.file_attrs();
                changes.attributes = found.attributes;
                ObjectFacts::new(path, Some(found.attr), file_attrs)
            }
            OpenedNode::New { attrs, exclusive } => {
                is_exclusive = exclusive;
                ObjectFacts::new(path, None, attrs)
            }
        };
        let mut object = OpenObject::with_changes(context, random_identity(), facts, changes);
        object.is_exclusive = is_exclusive;
        object
    }

    fn with_changes(
        context: Arc<ObjectContext>,
        unpublished: FileIdentity,
        facts: ObjectFacts,
        changes: ObjectChanges,
    ) -> OpenObject {
        OpenObject {
            context,
            unpublished,
            is_exclusive: false,
            sent_bytes: Arc::default(),
            writers: AtomicUsize::new(0),
            facts: Mutex::new(facts),
            changes: Mutex::new(changes),
            locks: ObjectLocks::default(),
            kept: None,
        }
    }

    /// The same file, whose object was found by a look that began as this step.
    pub fn found_at(self, step: u64) -> OpenObject {
        self.facts.lock().found_at = step;
        self
    }

    /// An open file that writes begins.
    pub fn add_writer(self: &Arc<Self>) {
        self.context.writing.lock().insert(file_number(&self.unpublished), self);
        self.writers.fetch_add(1, Ordering::SeqCst);
    }

    /// An open file that writes has ended.
    pub fn remove_writer(&self) {
        self.writers.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether an open file writes, whose close publishes.
    pub fn has_writers(&self) -> bool {
        self.writers.load(Ordering::SeqCst) > 0
    }

    /// The path that leads to the file, or has led to it.
    pub fn path(&self) -> Vec<u8> {
        self.facts.lock().path.clone()
    }

    /// Owner, mode, times and extended attributes with the changes.
    pub fn file_attrs(&self) -> FileAttrs {
        self.facts.lock().file_attrs.clone()
    }

    /// The attributes with the changes.
    pub fn attr(&self) -> ObjectAttr {
        self.facts.lock().attr()
    }

    /// What makes the file the same one: its path and version, or for a new file a number of its own.
    pub fn identity(&self) -> FileIdentity {
        let facts = self.facts.lock();
        match &facts.published {
            Some(attr) => identity_of(&facts.path, attr),
            None => self.unpublished,
        }
    }

    /// The etag of the object below the changes.
    pub fn published_etag(&self) -> Option<String> {
        self.facts.lock().published_etag().map(str::to_owned)
    }

    /// Whether the name leads to bytes that are not published.
    pub fn is_changed(&self) -> bool {
        self.facts.lock().state.is_changed()
    }

    /// Bytes that the store does not have yet.
    pub fn unsent_bytes(&self) -> u64 {
        self.facts.lock().len.saturating_sub(self.sent_bytes.load(Ordering::Relaxed))
    }

    /// Whether the name still leads to this file.
    pub fn is_current(&self) -> bool {
        self.facts.lock().state.is_current()
    }

    /// Whether this process has removed the file or replaced it.
    pub fn is_removed(&self) -> bool {
        matches!(self.facts.lock().state, ObjectState::Removed { .. })
    }

    /// The name was removed or given to another object, or the changes are not wanted any more: the next open begins with the object
    /// of the name. When this returns, no publication is under way.
    pub fn note_removed(&self) {
        self.facts.lock().apply(ObjectEvent::NameRemoved);
        let mut changes = self.changes.lock();
        let abandoned = changes.abandon_upload();
        self.keep_state(&changes);
        drop(changes);
        abandoned.abort(&self.context.requests);
        self.give_up_name();
    }

    /// The object has another name now, in this version.
    pub fn note_renamed(&self, path: Vec<u8>, found: FoundObject) {
        let mut changes = self.changes.lock();
        // It is of the old name.
        let abandoned = changes.abandon_upload();
        let mut facts = self.facts.lock();
        facts.path = path.clone();
        if !facts.attrs_changed {
            facts.file_attrs = found.file_attrs();
        }
        changes.attributes = found.attributes;
        facts.published = Some(found.attr);
        facts.found_at = self.context.next_step();
        drop(facts);
        self.keep_state(&changes);
        drop(changes);
        abandoned.abort(&self.context.requests);
        self.follow_locks(&path);
    }

    /// Reads up to `dst.len()` bytes from `offset`; fewer mean the end of the file.
    ///
    /// # Errors
    /// Those of the cache and the store; `Stale` when the object that the changes lie above is gone.
    pub fn read(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let changes = self.changes.lock();
        if changes.staged.is_some() {
            return self.read_staged(&changes, offset, dst);
        }
        let object = self.object();
        drop(changes);
        let Some(object) = object else { return Ok(0) };
        let len = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        self.read_object(Some(&object), offset, &mut dst[..len])?;
        Ok(len)
    }

    /// The object below the changes.
    fn object(&self) -> Option<ObjectRef> {
        let facts = self.facts.lock();
        let attr = facts.published.as_ref()?;
        Some(ObjectRef::new(self.context.reads.source(), &facts.path, attr.version.clone(), attr.size))
    }

    fn key(&self) -> Result<String> {
        key_of(&self.context.options.root, &self.facts.lock().path)
    }

    /// The bytes above the object, for a change.
    fn stage<'a>(&self, changes: &'a mut ObjectChanges) -> Result<&'a mut StagedBytes> {
        if changes.staged.is_none() {
            let object_len = self.facts.lock().published.as_ref().map_or(0, |attr| attr.size);
            let options = Arc::clone(&self.context.options);
            let mut staged = StagedBytes::over_object(options, object_len, Arc::clone(&self.context.space));
            self.keep_bytes(&mut staged)?;
            changes.staged = Some(staged);
            self.keep_state(changes);
        }
        changes.staged.as_mut().ok_or_else(|| Error::new(ErrorKind::Invalid, "no changed bytes"))
    }

    /// Writes at `offset`, or with `None` at the end. Waits for the store while local space is short.
    ///
    /// # Errors
    /// Those of the local file system, and of the store for bytes that make room; the conflict with a change of another writer,
    /// once it is known.
    pub fn write(&self, offset: Option<u64>, data: &[u8]) -> Result<usize> {
        loop {
            let mut changes = self.changes.lock();
            self.facts.lock().state.check_write()?;
            let offset = offset.unwrap_or(self.stage(&mut changes)?.len());
            let range = offset..offset + data.len() as u64;
            let error = match self.change_bytes(&mut changes, range.clone(), &|staged| staged.write(offset, data)) {
                Ok(()) => {
                    self.keep_write(&changes, offset, data.len() as u64);
                    self.send_full_parts(&mut changes, range)?;
                    return Ok(data.len());
                }
                Err(error) => error,
            };
            drop(changes);
            let error = match self.make_room_elsewhere(error) {
                None => continue,
                Some(error) => self.note_lost_write(LostWrite { offset, len: data.len() as u64, error }),
            };
            self.keep_state_now();
            return Err(error);
        }
    }

    fn note_lost_write(&self, lost: LostWrite) -> Error {
        let LostWrite { offset, len, error } = lost.clone();
        let mut facts = self.facts.lock();
        if facts.apply(ObjectEvent::WriteLost(lost)) {
            let path = facts.shown_path();
            tracing::error!(
                "a write to '/{path}' failed ({len} bytes at {offset}), and nothing of its changes is published: {error}"
            );
        }
        error
    }

    /// Cuts the file, or lengthens it by zeros.
    ///
    /// # Errors
    /// As [`OpenObject::write`].
    pub fn set_len(&self, len: u64) -> Result<()> {
        let mut changes = self.changes.lock();
        let facts = self.facts.lock();
        let before = facts.len;
        if before == len && !matches!(facts.state, ObjectState::Lost(_)) {
            return Ok(());
        }
        drop(facts);
        self.stage(&mut changes)?.set_len(len)?;
        self.facts.lock().apply(ObjectEvent::Cut(len));
        self.note_change(&mut changes, before.min(len)..before.max(len));
        self.keep_state(&changes);
        Ok(())
    }

    /// Makes a range within the file read as zeros.
    ///
    /// # Errors
    /// As [`OpenObject::write`].
    pub fn clear(&self, range: Range<u64>) -> Result<()> {
        let end = range.end.min(self.facts.lock().len);
        let zeros = vec![0; CLEARED_PIECE.min(end.saturating_sub(range.start) as usize)];
        let mut at = range.start;
        while at < end {
            at += self.write(Some(at), &zeros[..zeros.len().min((end - at) as usize)])? as u64;
        }
        Ok(())
    }

    fn note_change(&self, changes: &mut ObjectChanges, range: Range<u64>) {
        changes.sent_before = None;
        let mut facts = self.facts.lock();
        facts.apply(ObjectEvent::Written);
        facts.reported_failure = None;
        facts.changed_at = SystemTime::now();
        if self.context.options.object_attrs {
            facts.file_attrs.mtime = Some(file_time(facts.changed_at));
            facts.mtime_is_set = false;
        }
        if let Some(staged) = &changes.staged {
            facts.len = staged.len();
        }
        drop(facts);
        changes.spilling.note_changed(&range);
        if let Some(upload) = &mut changes.upload {
            upload.note_changed(range);
        }
    }

    /// The bytes of a range of the file.
    fn staged_bytes(&self, changes: &ObjectChanges, range: Range<u64>) -> Result<Bytes> {
        let mut body = vec![0; (range.end - range.start) as usize];
        let count = self.read_staged(changes, range.start, &mut body)?;
        body.truncate(count);
        Ok(body.into())
    }

    /// Fills `dst` with bytes of a changed file; returns how many there are.
    fn read_staged(&self, changes: &ObjectChanges, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let Some(staged) = &changes.staged else { return Ok(0) };
        let object = self.object();
        staged.read(offset, dst, &|part, at, piece| self.read_below(part, object.as_ref(), at, piece))
    }

    /// As [`OpenObject::publish`], with the mark of a request.
    pub fn publish_marked(&self, mark: Option<ChangeMark>) -> Result<()> {
        self.changes.lock().mark = mark;
        self.publish()
    }

    /// Makes the file's bytes the object's, for the program that writes them and learns the outcome. Nothing of them is visible
    /// before, and all of them are when this returns. After a failure the next call tries again, and the end of the file does not.
    ///
    /// # Errors
    /// `Stale` when another writer has changed the object, now and at every later call; the store's.
    pub fn publish(&self) -> Result<()> {
        let published = self.publish_changes();
        let mut facts = self.facts.lock();
        let reported = published.as_ref().err().cloned().map(ReportedFailure::now);
        let reported_before = std::mem::replace(&mut facts.reported_failure, reported);
        if let Err(error) = &published
            && reported_before.is_none()
        {
            self.context.requests.count_failed_publication();
            // All other failures were logged when the file got into their state.
            if facts.publication().is_ok() {
                let path = facts.shown_path();
                let len = facts.len;
                tracing::error!(
                    "the changes of '/{path}' ({len} bytes) are not published: {error}; fsync and close try again while the file is open"
                );
            }
        }
        drop(facts);
        if reported_before.is_some() || published.is_err() {
            self.keep_state_now();
        }
        published
    }

    /// As [`OpenObject::publish`], for a close: soon after a call without an answer of the store, the same failure is reported without another
    /// wait.
    ///
    /// # Errors
    /// As [`OpenObject::publish`].
    pub fn publish_at_close(&self) -> Result<()> {
        let reported = self.facts.lock().reported_failure.clone();
        match reported.filter(|reported| reported.is_recent_timeout(self.context.requests.timeout())) {
            Some(reported) => Err(reported.error),
            None => self.publish(),
        }
    }

    /// As [`OpenObject::publish`], for a call that may be of another program than the writer of the bytes.
    ///
    /// # Errors
    /// As [`OpenObject::publish`].
    pub fn publish_changes(&self) -> Result<()> {
        let mut changes = self.changes.lock();
        let publication = self.facts.lock().publication()?;
        if publication == Publication::Nothing {
            return Ok(());
        }
        self.confirm_locks()?;
        if publication == Publication::Attributes {
            return self.store_attrs(&mut changes);
        }
        if self.find_published(&mut changes) {
            self.keep_state(&changes);
            return Ok(());
        }
        let Err(error) = self.send_all(&mut changes) else { return Ok(()) };
        // A store without an answer would not answer a look at the object either.
        if error.kind() == ErrorKind::Timeout {
            return Err(error);
        }
        let Some(conflict) = self.find_conflict() else { return Err(error) };
        if self.join_published(&mut changes) {
            return Ok(());
        }
        if self.continue_failed(&changes) {
            return self.send_all(&mut changes);
        }
        tracing::error!("{conflict}");
        self.facts.lock().apply(ObjectEvent::ConflictFound(conflict.clone()));
        let abandoned = changes.abandon_upload();
        drop(changes);
        abandoned.abort(&self.context.requests);
        Err(conflict)
    }

    /// The change of another writer for which a publication failed, if there is one: the store can refuse the copy of a part
    /// before it looks at any condition.
    fn find_conflict(&self) -> Option<Error> {
        let key = self.key().ok()?;
        let condition = self.facts.lock().condition(self.context.options.last_writer_wins);
        self.context
            .requests
            .run(async { Ok(self.context.requests.find_conflict(&key, &condition).await) })
            .ok()
            .flatten()
    }

    fn send_all(&self, changes: &mut ObjectChanges) -> Result<()> {
        let len = changes.staged.as_ref().map_or(0, StagedBytes::len);
        let condition = self.facts.lock().condition(self.context.options.last_writer_wins);
        let requests = &self.context.requests;
        requests.run(async {
            self.settle_spills(changes, 1).await;
            changes.take_begun().await;
            Ok(())
        })?;
        let has_upload = changes.upload.is_some() || changes.beginning.is_some();
        let (etag, attributes) = if !has_upload && len <= self.context.options.part_len {
            self.send_whole(changes, len, &condition)?
        } else {
            let sent = requests.run(self.send_parts(changes, len, &condition));
            if sent.is_err() && changes.upload.as_ref().is_some_and(|upload| upload.is_gone) {
                // All bytes are here, so another upload can begin.
                changes.upload = None;
                requests.run(self.send_parts(changes, len, &condition))?
            } else {
                sent?
            }
        };
        changes.attributes = Some(attributes);
        let staged = changes.staged.take();
        changes.spilling.note_published();
        let attrs_changed = self.note_published(len, etag, changes.attributes.as_ref());
        self.keep_state(changes);
        let attrs_copied = if attrs_changed { requests.run(self.copy_attrs(changes)) } else { Ok(()) };
        self.keep_hot(staged);
        attrs_copied
    }

    /// The object has the bytes of the file; whether attributes are left to be changed.
    fn note_published(&self, len: u64, etag: String, attributes: Option<&ObjectAttributes>) -> bool {
        let mut facts = self.facts.lock();
        let attr = object_attr(len, facts.changed_at, etag);
        self.context.times.insert(&facts.path, &attr);
        self.context.absences.note_published(&facts.path);
        self.context.note_known(&facts.path, &attr, attributes);
        facts.published = Some(attr);
        facts.found_at = self.context.next_step();
        facts.len = len;
        facts.apply(ObjectEvent::Published);
        self.locks.get().iter().for_each(|locked| locked.note_published());
        self.sent_bytes.store(0, Ordering::Relaxed);
        facts.attrs_changed
    }

    /// The bytes that were just published are read from the local file, unless local space was too short for all of them.
    fn keep_hot(&self, staged: Option<StagedBytes>) {
        let fills_cache = self.context.options.fills_cache;
        if let Some(staged) = staged.filter(|staged| fills_cache && staged.spilled_parts().is_empty())
            && let Some(object) = self.object()
        {
            let is_local_file = staged.whole_file().is_some();
            for oldest in self.context.published.insert(object.clone(), staged) {
                self.context.bring_into_cache(&oldest);
                self.context.published.end_offer(&oldest);
            }
            if !is_local_file {
                self.context.bring_into_cache(&object);
            }
        }
    }

    /// Publishes a small file by one request.
    fn send_whole(
        &self,
        changes: &mut ObjectChanges,
        len: u64,
        condition: &WriteCondition,
    ) -> Result<(String, ObjectAttributes)> {
        let requests = &self.context.requests;
        let key = self.key()?;
        let attributes = requests.run(self.next_attributes(changes, &key))?;
        let _reserved = requests.run(requests.reserve_body(len))?;
        let body = self.staged_bytes(changes, 0..len)?;
        let object = NewObject { key: &key, attributes: &attributes, condition };
        self.keep_sending(&attributes);
        let etag = requests.put_here(&object, body).inspect_err(|_| changes.note_failed(&attributes))?;
        self.facts.lock().attrs_changed = false;
        Ok((etag, attributes))
    }

    /// Publishes a file in parts: those that the store does not have yet are sent or copied.
    async fn send_parts(
        &self,
        changes: &mut ObjectChanges,
        len: u64,
        condition: &WriteCondition,
    ) -> Result<(String, ObjectAttributes)> {
        self.await_upload(changes).await?;
        changes.waiting_parts.clear();
        let lengths = self.context.options.part_lengths();
        let count = lengths.at(len.saturating_sub(1));
        // Parts behind the end belong to bytes that were cut off.
        if let Some(upload) = &mut changes.upload {
            upload.wait_for_parts(1).await;
            upload.parts.retain(|number, _| *number <= count);
            upload.failure = None;
        }
        for _ in 0..PART_ROUNDS {
            let open = changes.upload.as_ref().filter(|upload| !upload.is_gone);
            let missing = open.map_or_else(Vec::new, |upload| upload.missing_parts(count));
            for number in missing {
                let range = lengths.range(number);
                self.send_part(changes, number, range.start..range.end.min(len)).await?;
                if changes.upload.as_ref().is_some_and(PartUpload::has_timed_out) {
                    break;
                }
            }
            if let Some(upload) = &mut changes.upload {
                upload.wait_for_parts(1).await;
                if upload.has_timed_out() {
                    break;
                }
            }
        }
        let Some(upload) = &mut changes.upload else {
            return Err(Error::new(ErrorKind::Invalid, "no upload"));
        };
        let missing = upload.missing_parts(count);
        if !missing.is_empty() {
            let reason = upload.failure.as_ref().map_or_else(String::new, |error| format!(": {error}"));
            let why = format!("{} of {count} parts could not be sent{reason}", missing.len());
            // An upload that is gone is no missing file, and the source of a copy is no conflict by itself.
            let kind = upload.failure.as_ref().map(Error::kind);
            let kind = kind.filter(|kind| !matches!(kind, ErrorKind::NotFound | ErrorKind::Stale));
            return Err(Error::new(kind.unwrap_or(ErrorKind::OriginFailed), why));
        }
        let parts = upload.parts.iter().filter_map(|(number, part)| match part {
            PartState::Sent { etag } => Some(UploadedPart { number: *number, etag: etag.clone() }),
            PartState::Sending { .. } => None,
        });
        let parts: Vec<UploadedPart> = parts.collect();
        // The parts may have taken long.
        self.confirm_locks()?;
        let object = NewObject { key: &upload.key, attributes: &upload.attributes, condition };
        self.keep_sending(&upload.attributes);
        let completed = self.context.requests.complete(&object, &upload.upload, &parts).await;
        // An object that is missing is a conflict, which shows in a second attempt.
        upload.is_gone |= completed.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotFound);
        let attributes = upload.attributes.clone();
        let file_attrs = upload.file_attrs.clone();
        // The store may execute the request late.
        let etag = completed.inspect_err(|_| changes.note_failed(&attributes))?;
        self.facts.lock().note_uploaded_attrs(&file_attrs);
        changes.upload = None;
        Ok((etag, attributes))
    }

    /// Whether the end of the file publishes or loses something.
    fn has_unpublished(&self) -> bool {
        self.facts.lock().publication() != Ok(Publication::Nothing)
    }

    /// Publishes the changes of a file that no program has open; a failure is one of the mount. After a failure that a call has
    /// reported the changes are dropped: the program knows that they are not in the store, and may have written something else since.
    fn publish_at_end(&self) {
        let facts = self.facts.lock();
        let path = facts.shown_path();
        let len = facts.changed_len();
        let reported = facts.reported_failure.clone();
        drop(facts);
        if let Some(ReportedFailure { error, .. }) = reported {
            return tracing::error!("the changes of '/{path}' ({len} bytes) are lost: {error}");
        }
        let sent_bytes = Arc::clone(&self.sent_bytes);
        let number = self.context.ending.begin(EndingFile { path: path.clone(), bytes: len, sent_bytes });
        let Err(error) = self.publish_changes() else { return self.context.ending.end(number) };
        tracing::error!("the changes of '/{path}' ({len} bytes) are lost: {error}");
        self.context.requests.count_failed_publication();
        self.context.ending.end_lost(number);
    }
}

impl Drop for OpenObject {
    fn drop(&mut self) {
        // Pages of a memory map can come after the last close.
        if self.has_unpublished() {
            self.publish_at_end();
        }
        let mut changes = std::mem::take(&mut *self.changes.lock());
        changes.abandon_upload().abort(&self.context.requests);
        let ObjectChanges { staged, spilling, .. } = changes;
        if let Some(removed) = spilling.end(staged)
            && let Err(error) = self.context.requests.run(removed)
        {
            tracing::warn!("hidden objects of a file stay in the bucket: {error}");
        }
    }
}
