//! What an open file keeps for the process after this one, and how that process continues the file: facts and changed ranges are in
//! a log, and the changed bytes in a local file. A keeper holds both.
//!
//! | the log ends with | the next process |
//! |---|---|
//! | a state, or writes | has these changes, and publishes them at the next sync or close |
//! | the mark of a publication | looks first whether the object has the mark: then that publication was executed |
//! | the mark, and later writes | publishes; an object with the mark is no conflict |

use super::facts::ReportedFailure;
use super::state::{LostWrite, ObjectState, dropped_error};
use super::{FileAttrs, ObjectChanges, ObjectContext, ObjectFacts, OpenObject, Spilling, file_number};
use crate::byte_ranges::ByteRanges;
use crate::change_log::ChangeLog;
use crate::requests::{OpenUpload, is_marked_as};
use crate::spilled::{KeptPart, SpillGroup, SpilledPart};
use crate::staged::StagedBytes;
use serde::{Deserialize, Serialize};
use spurline_object_store::{ObjectAttributes, RawObject, bare_etag, mark_in};
use spurline_origin::file_attr;
use spurline_types::{Error, ErrorKind, FileKind, ObjectAttr, Result};
use spurline_volume::kept_client::HeldFile;
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use spurline_volume::path_locks::KeepPlace;
use spurline_volume::writes::FileIdentity;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

/// The place of an open file's changes, where they outlive this process.
pub(super) struct KeptObject {
    files: Arc<dyn KeptFiles>,
    log: Arc<ChangeLog>,
    number: u64,
    /// The keeper has a local file.
    has_bytes: AtomicBool,
}

impl Drop for KeptObject {
    fn drop(&mut self) {
        self.drop_bytes();
    }
}

impl KeptObject {
    fn bytes_key(&self) -> KeptFileKey {
        KeptFileKey::ChangedBytes(self.number)
    }

    /// Keeps where the path of the file is open for locks.
    pub fn place_keeper(&self) -> KeepPlace {
        let log = Arc::clone(&self.log);
        Box::new(move |held| log.append(&LogEntry::Locked(KeptPlace::of(held))))
    }

    fn keep_bytes(&self, file: BorrowedFd<'_>) {
        self.files.keep_file(self.bytes_key(), file);
        self.has_bytes.store(true, Ordering::Relaxed);
    }

    fn drop_bytes(&self) {
        if self.has_bytes.swap(false, Ordering::Relaxed) {
            self.files.drop_file(self.bytes_key());
        }
    }
}

/// What is kept of an upload that begins beside the calls of programs.
#[derive(Clone)]
pub(super) struct KeptBeginning {
    log: Option<Arc<ChangeLog>>,
    /// For the states that are kept from then on.
    begun: Arc<OnceLock<KeptUpload>>,
}

impl KeptBeginning {
    /// For an upload of this file.
    pub fn of(kept: Option<&KeptObject>) -> KeptBeginning {
        KeptBeginning { log: kept.map(|kept| Arc::clone(&kept.log)), begun: Arc::default() }
    }

    pub fn keep_upload(&self, key: &str, upload: &OpenUpload) {
        let upload = KeptUpload::of(key, upload);
        if self.begun.set(upload.clone()).is_ok() {
            self.log.iter().for_each(|log| log.append(&LogEntry::Upload(upload.clone())));
        }
    }
}

/// A line of the log.
#[derive(Debug, Serialize, Deserialize)]
enum LogEntry {
    State(Box<KeptState>),
    Write {
        at: u64,
        len: u64,
        time: SystemTime,
    },
    /// A publication with this mark is about to be sent.
    Sending {
        mark: String,
    },
    Upload(KeptUpload),
    /// All bytes of a part are in the store.
    Spilled {
        at: u64,
        part: KeptPart,
    },
    Locked(KeptPlace),
}

/// Where the path of the file is open for locks.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct KeptPlace {
    number: u64,
    node: u64,
    process: u64,
}

impl KeptPlace {
    fn of(held: &HeldFile) -> KeptPlace {
        KeptPlace { number: held.number, node: held.node, process: held.process }
    }

    fn held(self) -> HeldFile {
        HeldFile { number: self.number, node: self.node, process: self.process, closing: false }
    }
}

/// An upload under way.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct KeptUpload {
    key: String,
    id: String,
    record: Option<String>,
}

impl KeptUpload {
    fn of(key: &str, upload: &OpenUpload) -> KeptUpload {
        KeptUpload { key: key.to_owned(), id: upload.id.clone(), record: upload.record().map(str::to_owned) }
    }
}

/// The object below the changes.
#[derive(Debug, Serialize, Deserialize)]
struct KeptVersion {
    size: u64,
    mtime: SystemTime,
    etag: Option<String>,
    is_link: bool,
}

/// The changed bytes, which are in a local file and in spilled parts.
#[derive(Debug, Serialize, Deserialize)]
struct KeptBytes {
    object_len: u64,
    changed: ByteRanges,
    #[serde(default)]
    spilled: BTreeMap<u64, KeptPart>,
}

#[derive(Debug, Serialize, Deserialize)]
struct KeptError {
    code: u16,
    message: String,
}

impl KeptError {
    fn of(error: &Error) -> KeptError {
        KeptError { code: error.kind().code(), message: error.message().to_owned() }
    }

    fn error(&self) -> Error {
        Error::new(ErrorKind::from_code(self.code), self.message.clone())
    }
}

/// All of an open file but its bytes.
#[derive(Debug, Serialize, Deserialize)]
struct KeptState {
    identity: [u8; FileIdentity::LEN],
    is_exclusive: bool,
    path: String,
    published: Option<KeptVersion>,
    len: u64,
    changed: bool,
    changed_at: SystemTime,
    file_attrs: FileAttrs,
    attrs_changed: bool,
    mtime_is_set: bool,
    removed: bool,
    conflict: Option<KeptError>,
    lost_write_at: u64,
    lost_write: Option<KeptError>,
    failure_reported: bool,
    bytes: Option<KeptBytes>,
    failed_marks: VecDeque<String>,
    upload: Option<KeptUpload>,
    locked: Option<KeptPlace>,
    /// The mark of the file in the names of spilled parts.
    #[serde(default)]
    spill_mark: Option<String>,
    /// The mark of the publication that was sent last, if nothing was changed since.
    #[serde(skip)]
    sent: Option<String>,
}

impl KeptState {
    fn object_state(&self) -> ObjectState {
        match self.conflict.as_ref().map(KeptError::error) {
            refusal if self.removed => ObjectState::Removed { refusal },
            Some(refusal) if refusal == dropped_error() => ObjectState::Dropped { had_changes: self.changed },
            Some(conflict) => ObjectState::Conflict(conflict),
            None => match &self.lost_write {
                Some(lost) => ObjectState::Lost(LostWrite { offset: self.lost_write_at, len: 0, error: lost.error() }),
                None if self.changed => ObjectState::Changed,
                None => ObjectState::Clean,
            },
        }
    }

    fn add(&mut self, entry: LogEntry) {
        match entry {
            LogEntry::State(state) => *self = *state,
            LogEntry::Write { at, len, time } => {
                self.sent = None;
                self.changed = true;
                self.failure_reported = false;
                self.changed_at = time;
                self.len = self.len.max(at + len);
                if let Some(bytes) = &mut self.bytes {
                    bytes.changed.insert(at..at + len);
                }
            }
            LogEntry::Sending { mark } => {
                self.failed_marks.push_back(mark.clone());
                self.sent = Some(mark);
            }
            LogEntry::Upload(upload) => self.upload = Some(upload),
            LogEntry::Locked(place) => self.locked = Some(place),
            LogEntry::Spilled { at, part } => {
                if let Some(bytes) = &mut self.bytes {
                    bytes.changed.remove(at..at + part.len);
                    bytes.spilled.insert(at, part);
                }
            }
        }
    }
}

/// The failure of a publication that the process before has reported.
fn reported_before() -> Error {
    Error::new(ErrorKind::Io(libc::EIO), "the mount's process before this one has logged the reason")
}

/// An open file of a process that has ended.
pub(crate) struct KeptFile {
    log: ChangeLog,
    state: KeptState,
}

impl KeptFile {
    /// Reads the log of an open file.
    ///
    /// # Errors
    /// As [`ChangeLog::open`].
    pub fn read(log: OwnedFd) -> Result<KeptFile> {
        let (log, entries) = ChangeLog::open::<LogEntry>(log)?;
        let mut entries = entries.into_iter();
        let Some(LogEntry::State(state)) = entries.next() else {
            return Err(Error::new(ErrorKind::Corrupt, "the log of an open file does not begin with a state"));
        };
        let mut state = *state;
        entries.for_each(|entry| state.add(entry));
        Ok(KeptFile { log, state })
    }

    /// What distinguishes the file from all others.
    pub fn number(&self) -> u64 {
        file_number(&self.identity())
    }

    fn identity(&self) -> FileIdentity {
        FileIdentity::new(self.state.identity, false)
    }
}

impl ObjectFacts {
    fn of_kept(state: &KeptState) -> ObjectFacts {
        let published = state.published.as_ref().map(|version| {
            let raw =
                RawObject { key: String::new(), size: version.size, mtime: version.mtime, etag: version.etag.clone() };
            let kind = if version.is_link { FileKind::Symlink } else { FileKind::File };
            ObjectAttr { kind, ..file_attr(&raw) }
        });
        ObjectFacts {
            len: state.len,
            state: state.object_state(),
            changed_at: state.changed_at,
            attrs_changed: state.attrs_changed,
            mtime_is_set: state.mtime_is_set,
            reported_failure: state.failure_reported.then(reported_before).map(ReportedFailure::now),
            ..ObjectFacts::new(state.path.clone().into_bytes(), published, state.file_attrs.clone())
        }
    }
}

impl OpenObject {
    /// The same file, kept for the process after this one.
    pub fn kept_by(self, files: &Arc<dyn KeptFiles>) -> OpenObject {
        match ChangeLog::create() {
            Ok(log) => {
                let number = file_number(&self.unpublished);
                let log = Arc::new(log);
                let kept = KeptObject { files: Arc::clone(files), log, number, has_bytes: AtomicBool::new(false) };
                let mut object = self;
                object.kept = Some(kept);
                object.keep_state(&object.changes.lock());
                object
            }
            Err(error) => {
                tracing::warn!("an open file is lost if this process ends: {error}");
                self
            }
        }
    }

    /// Continues a file of a process that has ended.
    ///
    /// # Errors
    /// `Corrupt` when the keeper has no changed bytes.
    pub fn continued(context: Arc<ObjectContext>, files: &Arc<dyn KeptFiles>, file: KeptFile) -> Result<OpenObject> {
        let number = file.number();
        let unpublished = file.identity();
        let KeptFile { log, state } = file;
        let facts = ObjectFacts::of_kept(&state);
        let has_bytes = state.bytes.is_some();
        let mut changes =
            ObjectChanges { failed_marks: state.failed_marks, sent_before: state.sent, ..ObjectChanges::default() };
        if let Some(bytes) = state.bytes {
            let local = files.take_file(KeptFileKey::ChangedBytes(number));
            let local =
                local.ok_or_else(|| Error::new(ErrorKind::Corrupt, "the changed bytes of an open file are lost"))?;
            let staged =
                StagedBytes::over_object(Arc::clone(&context.options), bytes.object_len, Arc::clone(&context.space));
            let mut spilled = BTreeMap::new();
            if let Some(mark) = state.spill_mark.filter(|_| !bytes.spilled.is_empty()) {
                let group = SpillGroup::continued(&context.requests, &context.options.root, mark);
                let parts = bytes.spilled.into_iter();
                spilled = parts.map(|(at, part)| (at, SpilledPart::continued(&group, part))).collect();
                changes.spilling = Spilling::continued(group);
            }
            changes.staged = Some(staged.continued(local, bytes.changed, spilled, state.len));
        }
        let mut object = OpenObject::with_changes(context, unpublished, facts, changes);
        object.is_exclusive = state.is_exclusive;
        let log = Arc::new(log);
        object.kept = Some(KeptObject { files: Arc::clone(files), log, number, has_bytes: AtomicBool::new(has_bytes) });
        if let (Some(place), Some(locks)) = (state.locked, object.context.path_locks.get()) {
            object.lock_by(locks.adopt(&object.path(), &place.held()));
        }
        if let Some(KeptUpload { key, id, record }) = state.upload {
            object.abort_earlier(key, id, record);
        }
        Ok(object)
    }

    /// All bytes are in the local file or in spilled parts: another upload begins.
    fn abort_earlier(&self, key: String, id: String, record: Option<String>) {
        let requests = Arc::clone(&self.context.requests);
        let upload = requests.earlier_upload(id, record);
        let aborted = async move { requests.abort(&key, &upload).await };
        if let Err(error) = self.context.requests.spawn(aborted) {
            tracing::warn!("an upload of the process before is not aborted: {error}");
        }
    }

    /// The log, for a keeper.
    pub fn kept_log(&self) -> Option<BorrowedFd<'_>> {
        self.kept.as_ref().map(|kept| kept.log.descriptor())
    }

    /// Local files are kept where they outlive this process.
    pub(super) fn keep_bytes(&self, staged: &mut StagedBytes) -> Result<()> {
        if let Some(kept) = &self.kept {
            kept.keep_bytes(staged.use_file()?.as_fd());
        }
        Ok(())
    }

    pub(super) fn keep_state(&self, changes: &ObjectChanges) {
        let Some(kept) = &self.kept else { return };
        kept.log.append_state(&LogEntry::State(Box::new(self.kept_state(changes))));
        if changes.staged.is_none() {
            kept.drop_bytes();
        }
    }

    /// As [`OpenObject::keep_state`], after the changes were unlocked.
    pub(super) fn keep_state_now(&self) {
        if self.kept.is_some() {
            self.keep_state(&self.changes.lock());
        }
    }

    fn kept_state(&self, changes: &ObjectChanges) -> KeptState {
        let facts = self.facts.lock();
        let published = facts.published.as_ref().map(|attr| KeptVersion {
            size: attr.size,
            mtime: attr.mtime,
            etag: attr.etag.clone(),
            is_link: attr.kind == FileKind::Symlink,
        });
        let lost = if let ObjectState::Lost(lost) = &facts.state { Some(lost) } else { None };
        let bytes = changes.staged.as_ref().map(|staged| KeptBytes {
            object_len: staged.object_len(),
            changed: staged.changed_ranges().clone(),
            spilled: staged.spilled_parts().iter().map(|(at, part)| (*at, part.kept())).collect(),
        });
        let begun = changes.beginning.as_ref().and_then(|beginning| beginning.kept.begun.get().cloned());
        let upload = changes.upload.as_ref().map(|upload| KeptUpload::of(&upload.key, &upload.upload)).or(begun);
        KeptState {
            identity: *self.unpublished.bytes(),
            is_exclusive: self.is_exclusive,
            path: String::from_utf8_lossy(&facts.path).into_owned(),
            published,
            len: facts.len,
            changed: !facts.state.is_clean(),
            changed_at: facts.changed_at,
            file_attrs: facts.file_attrs.clone(),
            attrs_changed: facts.attrs_changed,
            mtime_is_set: facts.mtime_is_set,
            removed: matches!(facts.state, ObjectState::Removed { .. }),
            conflict: facts.state.check_write().err().as_ref().map(KeptError::of),
            lost_write_at: lost.map_or(0, |lost| lost.offset),
            lost_write: lost.map(|lost| KeptError::of(&lost.error)),
            failure_reported: facts.reported_failure.is_some(),
            bytes,
            failed_marks: changes.failed_marks.clone(),
            upload,
            locked: self.locks.get().map(|locked| KeptPlace::of(&locked.held())),
            spill_mark: changes.spilling.mark().map(str::to_owned),
            sent: None,
        }
    }

    /// Bytes were written into the local file.
    pub(super) fn keep_write(&self, changes: &ObjectChanges, at: u64, len: u64) {
        let Some(kept) = &self.kept else { return };
        if kept.log.is_long() {
            return self.keep_state(changes);
        }
        let time = self.facts.lock().changed_at;
        kept.log.append(&LogEntry::Write { at, len, time });
    }

    /// A part is in the store, and its local bytes are about to be given up.
    pub(super) fn keep_spilled(&self, at: u64, part: &SpilledPart) {
        let Some(kept) = &self.kept else { return };
        kept.log.append(&LogEntry::Spilled { at, part: part.kept() });
    }

    /// A publication with these attributes is about to be sent.
    pub(super) fn keep_sending(&self, attributes: &ObjectAttributes) {
        if let (Some(kept), Some(mark)) = (&self.kept, mark_in(attributes)) {
            kept.log.append(&LogEntry::Sending { mark: mark.to_owned() });
        }
    }

    /// Whether the process before has published the changes without learning of it.
    pub(super) fn find_published(&self, changes: &mut ObjectChanges) -> bool {
        let Some(mark) = changes.sent_before.take() else { return false };
        let Ok(key) = self.key() else { return false };
        let Ok(stored) = self.context.requests.run(self.context.requests.head(&key)) else { return false };
        let len = changes.staged.as_ref().map_or(0, StagedBytes::len);
        if !is_marked_as(&stored.attributes, &mark) || stored.raw.size != len {
            return false;
        }
        let Some(etag) = stored.raw.etag.as_deref().map(bare_etag) else { return false };
        if self.context.options.object_attrs {
            self.facts.lock().note_uploaded_attrs(&FileAttrs::parse(&stored.attributes));
        }
        self.note_published(len, etag.to_owned(), Some(&stored.attributes));
        changes.attributes = Some(stored.attributes);
        let staged = changes.staged.take();
        changes.spilling.note_published();
        self.keep_hot(staged);
        true
    }
}
