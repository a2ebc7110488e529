//! A file of a bucket that programs have open, for all its open files in this process: the object as it was read, the
//! changes above it, and the requests that publish them. It knows no folder and no caller.
//!
//! 1. A file without changes is read from the object, through the cache.
//! 2. The first change begins a local file of [`StagedBytes`] above the object.
//! 3. A part whose bytes were all written is uploaded while the program goes on; a later change of it uploads it again.
//! 4. A sync or a close publishes: the missing parts are sent, unchanged ones are copied in the store, and the object
//!    appears under the condition that no other writer has changed it.
//! 5. Then the file is again one without changes, of the new version.

use super::BucketWriteOptions;
use super::names::{content_type_of, identity_of, key_of, random_identity};
use super::requests::{BucketRequests, NewObject, marked};
use super::staged::StagedBytes;
use crate::object_origin::object_attr;
use crate::s3_wire::bare_etag;
use crate::write_backend::{CopySource, ObjectAttributes, UploadedPart, WriteCondition};
use bytes::Bytes;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, FileKind, ObjectAttr, ObjectRef, Result, Version};
use spurline_volume::writes::FileIdentity;
use spurline_volume::{ReadData, Volume};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::task::JoinHandle;

/// Length of the first parts of an upload. A file of at most one part is one request.
const FIRST_PART: u64 = 8 << 20;
/// Parts of one length; those behind are twice as long, so that the most parts that S3 allows (10,000) hold its largest
/// object (5 TiB).
const PARTS_PER_LENGTH: u32 = 1000;
/// Least length of a part that is copied, as S3 has it for all parts but the last.
const LEAST_COPY: u64 = 5 << 20;
/// Parts of one file that are on their way at once.
const PARTS_IN_FLIGHT: usize = 4;

/// The range of a part, whose numbers begin at 1.
fn part_range(number: u32) -> Range<u64> {
    let mut start = 0;
    let mut len = FIRST_PART;
    let mut left = number - 1;
    while left >= PARTS_PER_LENGTH {
        start += u64::from(PARTS_PER_LENGTH) * len;
        len *= 2;
        left -= PARTS_PER_LENGTH;
    }
    start += u64::from(left) * len;
    start..start + len
}

/// The number of the part with this byte.
fn part_at(offset: u64) -> u32 {
    let mut number = 1;
    let mut start = 0;
    let mut len = FIRST_PART;
    loop {
        let all = u64::from(PARTS_PER_LENGTH) * len;
        if offset < start + all {
            return number + ((offset - start) / len) as u32;
        }
        start += all;
        number += PARTS_PER_LENGTH;
        len *= 2;
    }
}

/// An object of the bucket, as it was read or published.
#[derive(Clone)]
struct PublishedObject {
    attr: ObjectAttr,
    attributes: Option<ObjectAttributes>,
}

impl PublishedObject {
    fn etag(&self) -> Option<&str> {
        self.attr.etag.as_deref().map(bare_etag)
    }
}

/// A part of an upload.
enum PartState {
    /// On its way; `changed` since.
    Sending { sent: JoinHandle<Result<String>>, changed: bool },
    /// The store has it.
    Sent { etag: String },
}

/// An upload under way.
struct PartUpload {
    id: String,
    /// With the mark of the change.
    attributes: ObjectAttributes,
    key: String,
    parts: BTreeMap<u32, PartState>,
}

impl PartUpload {
    /// Bytes of these parts were changed.
    fn note_changed(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let last = part_at(range.end - 1);
        let mut again = Vec::new();
        for (number, part) in self.parts.range_mut(part_at(range.start)..=last) {
            match part {
                PartState::Sending { changed, .. } => *changed = true,
                PartState::Sent { .. } => again.push(*number),
            }
        }
        for number in again {
            self.parts.remove(&number);
        }
    }

    /// Waits until fewer than `limit` parts are on their way. A part that failed, or was changed, is sent again later.
    async fn wait_for_parts(&mut self, limit: usize) {
        loop {
            let sending = |part: &&PartState| matches!(part, PartState::Sending { .. });
            if self.parts.values().filter(sending).count() < limit.max(1) {
                return;
            }
            let first = self.parts.iter().find(|(_, part)| sending(part)).map(|(number, _)| *number);
            let Some(number) = first else { return };
            let Some(PartState::Sending { sent, changed }) = self.parts.remove(&number) else { return };
            match sent.await {
                Ok(Ok(etag)) if !changed => {
                    self.parts.insert(number, PartState::Sent { etag });
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!("part {number} of '{}' is sent again: {error}", self.key),
                Err(error) => tracing::debug!("part {number} of '{}' is sent again: {error}", self.key),
            }
        }
    }
}

struct ObjectState {
    path: Vec<u8>,
    /// `None` before a new file is published.
    published: Option<PublishedObject>,
    staged: Option<StagedBytes>,
    upload: Option<PartUpload>,
    /// There is something to publish.
    changed: bool,
    changed_at: SystemTime,
    /// Removed or replaced by this process: nothing is published any more.
    removed: bool,
    /// Another writer has changed the object; every later call that publishes fails with this.
    conflict: Option<Error>,
}

impl ObjectState {
    fn is_current(&self) -> bool {
        !self.removed && self.conflict.is_none()
    }
}

/// A file that is open.
pub(super) struct OpenObject {
    requests: Arc<BucketRequests>,
    reads: Arc<dyn Volume>,
    options: Arc<BucketWriteOptions>,
    /// The identity of a new file.
    unpublished: FileIdentity,
    state: Mutex<ObjectState>,
}

impl OpenObject {
    /// An object that exists, or with `None` a new file.
    pub fn new(
        requests: &Arc<BucketRequests>,
        reads: &Arc<dyn Volume>,
        options: &Arc<BucketWriteOptions>,
        path: Vec<u8>,
        attr: Option<ObjectAttr>,
    ) -> OpenObject {
        let unpublished = random_identity();
        let state = ObjectState {
            path,
            changed: attr.is_none(),
            published: attr.map(|attr| PublishedObject { attr, attributes: None }),
            staged: None,
            upload: None,
            changed_at: SystemTime::now(),
            removed: false,
            conflict: None,
        };
        OpenObject {
            requests: Arc::clone(requests),
            reads: Arc::clone(reads),
            options: Arc::clone(options),
            unpublished,
            state: Mutex::new(state),
        }
    }

    /// The path that leads to the file, or has led to it.
    pub fn path(&self) -> Vec<u8> {
        self.state.lock().path.clone()
    }

    /// The attributes with the changes.
    pub fn attr(&self) -> ObjectAttr {
        let state = self.state.lock();
        let mut attr = match &state.published {
            Some(published) => published.attr.clone(),
            None => ObjectAttr {
                kind: FileKind::File,
                size: 0,
                mtime: state.changed_at,
                mode: 0o644,
                version: Version::new(""),
                etag: None,
            },
        };
        if state.changed {
            attr.mtime = state.changed_at;
        }
        if let Some(staged) = &state.staged {
            attr.size = staged.len();
        }
        attr
    }

    /// What makes the file the same one: its path and version, or for a new file a number of its own.
    pub fn identity(&self) -> FileIdentity {
        let state = self.state.lock();
        match &state.published {
            Some(published) => identity_of(&state.path, &published.attr),
            None => self.unpublished,
        }
    }

    /// The etag of the object below the changes.
    pub fn published_etag(&self) -> Option<String> {
        self.state.lock().published.as_ref().and_then(|published| published.attr.etag.clone())
    }

    /// Whether there is something to publish.
    pub fn is_changed(&self) -> bool {
        let state = self.state.lock();
        state.changed && state.is_current()
    }

    /// Whether the name still leads to this file.
    pub fn is_current(&self) -> bool {
        self.state.lock().is_current()
    }

    /// An open has found the object in this version; a file with changes keeps the one that it was opened with.
    pub fn note_found(&self, attr: ObjectAttr) {
        let mut state = self.state.lock();
        let is_known = state.published.as_ref().is_some_and(|published| published.attr.version == attr.version);
        if !state.changed && !is_known {
            state.published = Some(PublishedObject { attr, attributes: None });
            state.staged = None;
        }
    }

    /// The name was removed or given to another object.
    pub fn note_removed(&self) {
        let mut state = self.state.lock();
        state.removed = true;
        let upload = state.upload.take();
        drop(state);
        self.abort(upload);
    }

    /// The object has another name now, in this version.
    pub fn note_renamed(&self, path: Vec<u8>, attr: ObjectAttr) {
        let mut state = self.state.lock();
        state.path = path;
        state.published = Some(PublishedObject { attr, attributes: None });
    }

    /// Reads up to `dst.len()` bytes from `offset`; fewer mean the end of the file.
    ///
    /// # Errors
    /// Those of the cache and the store; `Stale` when the object that the changes lie above is gone.
    pub fn read(&self, offset: u64, dst: &mut [u8]) -> Result<usize> {
        let state = self.state.lock();
        let object = state.published.as_ref().map(|published| self.object_ref(&state.path, &published.attr));
        if let Some(staged) = &state.staged {
            return staged.read(offset, dst, &|at, piece| self.read_object(object.as_ref(), at, piece));
        }
        drop(state);
        let Some(object) = object else { return Ok(0) };
        let len = object.size.saturating_sub(offset).min(dst.len() as u64) as usize;
        self.read_object(Some(&object), offset, &mut dst[..len])?;
        Ok(len)
    }

    fn object_ref(&self, path: &[u8], attr: &ObjectAttr) -> ObjectRef {
        ObjectRef::new(self.reads.source(), path, attr.version.clone(), attr.size)
    }

    /// Fills `dst` from the object.
    fn read_object(&self, object: Option<&ObjectRef>, offset: u64, dst: &mut [u8]) -> Result<()> {
        let Some(object) = object else { return Ok(()) };
        let mut read = 0;
        while read < dst.len() {
            let at = offset + read as u64;
            let count = match self.reads.read(object, at, &mut dst[read..])? {
                ReadData::Copied(count) => count,
                ReadData::Shared(slice) => {
                    let count = slice.len().min(dst.len() - read);
                    dst[read..read + count].copy_from_slice(&slice[..count]);
                    count
                }
            };
            if count == 0 {
                let why = format!("the object ends at {at}, before its length of {}", object.size);
                return Err(Error::new(ErrorKind::Corrupt, why));
            }
            read += count;
        }
        Ok(())
    }

    /// The local file above the object, for a change.
    fn stage<'a>(&self, state: &'a mut ObjectState) -> Result<&'a mut StagedBytes> {
        if state.staged.is_none() {
            let file = self.options.new_staging_file()?;
            let object_len = state.published.as_ref().map_or(0, |published| published.attr.size);
            state.staged = Some(StagedBytes::over_object(file, object_len));
        }
        match &mut state.staged {
            Some(staged) => Ok(staged),
            None => Err(Error::new(ErrorKind::Invalid, "no local file")),
        }
    }

    /// Writes at `offset`, or with `None` at the end.
    ///
    /// # Errors
    /// Those of the local file system; the conflict with a change of another writer, once it is known.
    pub fn write(&self, offset: Option<u64>, data: &[u8]) -> Result<usize> {
        let mut state = self.state.lock();
        if let Some(conflict) = &state.conflict {
            return Err(conflict.clone());
        }
        let staged = self.stage(&mut state)?;
        let offset = offset.unwrap_or(staged.len());
        staged.write(offset, data)?;
        let end = offset + data.len() as u64;
        self.note_change(&mut state, offset..end);
        self.send_full_parts(&mut state, offset..end)?;
        Ok(data.len())
    }

    /// Cuts the file, or lengthens it by zeros.
    ///
    /// # Errors
    /// As [`OpenObject::write`].
    pub fn set_len(&self, len: u64) -> Result<()> {
        let mut state = self.state.lock();
        let staged = self.stage(&mut state)?;
        let before = staged.len();
        if before != len {
            staged.set_len(len)?;
            self.note_change(&mut state, before.min(len)..before.max(len));
        }
        Ok(())
    }

    /// Makes a range within the file read as zeros.
    ///
    /// # Errors
    /// As [`OpenObject::write`].
    pub fn clear(&self, range: Range<u64>) -> Result<()> {
        let mut state = self.state.lock();
        let staged = self.stage(&mut state)?;
        let range = range.start..range.end.min(staged.len());
        if range.is_empty() {
            return Ok(());
        }
        staged.clear(range.clone())?;
        self.note_change(&mut state, range);
        Ok(())
    }

    fn note_change(&self, state: &mut ObjectState, range: Range<u64>) {
        state.changed = true;
        state.changed_at = SystemTime::now();
        if let Some(upload) = &mut state.upload {
            upload.note_changed(range);
        }
    }

    /// Sends the parts that a write has filled.
    fn send_full_parts(&self, state: &mut ObjectState, written: Range<u64>) -> Result<()> {
        // Most writes do not reach the end of a part.
        if state.removed || part_at(written.start) == part_at(written.end) {
            return Ok(());
        }
        for number in part_at(written.start)..part_at(written.end) {
            let range = part_range(number);
            let is_full = state.staged.as_ref().is_some_and(|staged| staged.is_changed(range.clone()));
            let is_sent = state.upload.as_ref().is_some_and(|upload| upload.parts.contains_key(&number));
            if is_full && !is_sent {
                self.requests.run(self.send_part(state, number, range))?;
            }
        }
        Ok(())
    }

    /// The attributes of the next version: those of the last one, and a content type by the name.
    async fn next_attributes(&self, state: &mut ObjectState, key: &str) -> Result<ObjectAttributes> {
        let attributes = match &mut state.published {
            Some(PublishedObject { attributes: Some(attributes), .. }) => attributes.clone(),
            Some(published) => {
                let found = self.requests.head(key).await;
                let attributes = match found {
                    Ok(found) => found.attributes,
                    // The condition of the change finds that out.
                    Err(error) if error.kind() == ErrorKind::NotFound => ObjectAttributes::default(),
                    Err(error) => return Err(error),
                };
                published.attributes = Some(attributes.clone());
                attributes
            }
            None => ObjectAttributes::with_content_type(content_type_of(&state.path)),
        };
        Ok(marked(attributes))
    }

    async fn begin_upload(&self, state: &mut ObjectState) -> Result<()> {
        if state.upload.is_none() {
            let key = key_of(&self.options.root, &state.path)?;
            let attributes = self.next_attributes(state, &key).await?;
            let id = self.requests.begin_upload(&key, &attributes).await?;
            state.upload = Some(PartUpload { id, attributes, key, parts: BTreeMap::new() });
        }
        Ok(())
    }

    /// Sends a part, which goes on after this call.
    async fn send_part(&self, state: &mut ObjectState, number: u32, range: Range<u64>) -> Result<()> {
        self.begin_upload(state).await?;
        let body = self.staged_bytes(state, range.clone())?;
        let copied = match body {
            Some(_) => None,
            None => self.copy_source(state),
        };
        let Some(upload) = &mut state.upload else { return Ok(()) };
        upload.wait_for_parts(PARTS_IN_FLIGHT).await;
        let requests = Arc::clone(&self.requests);
        let key = upload.key.clone();
        let id = upload.id.clone();
        let sent = self.requests.spawn(async move {
            match (body, copied) {
                (Some(body), _) => requests.upload_part(&key, &id, number, body).await,
                (None, Some((from_key, etag))) => {
                    let from = CopySource { key: &from_key, etag: Some(&etag) };
                    requests.copy_part(&key, &id, number, from, range).await
                }
                (None, None) => Err(Error::new(ErrorKind::Invalid, "a part without bytes")),
            }
        })?;
        upload.parts.insert(number, PartState::Sending { sent, changed: false });
        Ok(())
    }

    /// The bytes of a range; `None` when the store can copy all of them from the object.
    fn staged_bytes(&self, state: &ObjectState, range: Range<u64>) -> Result<Option<Bytes>> {
        let Some(staged) = &state.staged else { return Ok(None) };
        let object = state.published.as_ref();
        let is_copied = range.end - range.start >= LEAST_COPY
            && staged.is_of_object(range.clone())
            && object.is_some_and(|object| object.etag().is_some());
        if is_copied {
            return Ok(None);
        }
        let object = object.map(|published| self.object_ref(&state.path, &published.attr));
        let mut body = vec![0; (range.end - range.start) as usize];
        let count = staged.read(range.start, &mut body, &|at, piece| self.read_object(object.as_ref(), at, piece))?;
        body.truncate(count);
        Ok(Some(body.into()))
    }

    /// The key and the version of the object below the changes.
    fn copy_source(&self, state: &ObjectState) -> Option<(String, String)> {
        let etag = state.published.as_ref()?.etag()?.to_owned();
        Some((key_of(&self.options.root, &state.path).ok()?, etag))
    }

    /// Makes the file's bytes the object's. Nothing of them is visible before, and all of them are when this returns.
    ///
    /// # Errors
    /// `Stale` when another writer has changed the object, now and at every later call; the store's.
    pub fn publish(&self) -> Result<()> {
        let mut state = self.state.lock();
        if !state.changed || state.removed {
            return Ok(());
        }
        if let Some(conflict) = &state.conflict {
            return Err(conflict.clone());
        }
        let Err(error) = self.requests.run(self.send_all(&mut state)) else { return Ok(()) };
        let Some(conflict) = self.find_conflict(&state) else { return Err(error) };
        tracing::error!("{conflict}");
        state.conflict = Some(conflict.clone());
        let upload = state.upload.take();
        drop(state);
        self.abort(upload);
        Err(conflict)
    }

    /// The change of another writer for which a publication failed, if there is one: the store can refuse the copy of a part
    /// before it looks at any condition.
    fn find_conflict(&self, state: &ObjectState) -> Option<Error> {
        let key = key_of(&self.options.root, &state.path).ok()?;
        let conflict = async { Ok(self.requests.find_conflict(&key, &self.condition(state)).await) };
        self.requests.run(conflict).ok().flatten()
    }

    /// What must be true of the object when the file is published.
    fn condition(&self, state: &ObjectState) -> WriteCondition {
        if self.options.last_writer_wins {
            return WriteCondition::None;
        }
        match &state.published {
            None => WriteCondition::Absent,
            Some(published) => match published.etag() {
                Some(etag) => WriteCondition::Version(etag.to_owned()),
                None => WriteCondition::None,
            },
        }
    }

    async fn send_all(&self, state: &mut ObjectState) -> Result<()> {
        let len = state.staged.as_ref().map_or(0, StagedBytes::len);
        let condition = self.condition(state);
        let (etag, attributes) = if state.upload.is_none() && len <= FIRST_PART {
            self.send_whole(state, len, &condition).await?
        } else {
            self.send_parts(state, len, &condition).await?
        };
        let attr = object_attr(len, SystemTime::now(), etag);
        state.published = Some(PublishedObject { attr, attributes: Some(attributes) });
        state.staged = None;
        state.changed = false;
        Ok(())
    }

    /// Publishes a small file by one request.
    async fn send_whole(
        &self,
        state: &mut ObjectState,
        len: u64,
        condition: &WriteCondition,
    ) -> Result<(String, ObjectAttributes)> {
        let key = key_of(&self.options.root, &state.path)?;
        let attributes = self.next_attributes(state, &key).await?;
        let mut body = vec![0; len as usize];
        if let Some(staged) = &state.staged {
            let object = state.published.as_ref().map(|published| self.object_ref(&state.path, &published.attr));
            staged.read(0, &mut body, &|at, piece| self.read_object(object.as_ref(), at, piece))?;
        }
        let object = NewObject { key: &key, attributes: &attributes, condition };
        let etag = self.requests.put(&object, body.into()).await?;
        Ok((etag, attributes))
    }

    /// Publishes a file in parts: those that the store does not have yet are sent or copied.
    async fn send_parts(
        &self,
        state: &mut ObjectState,
        len: u64,
        condition: &WriteCondition,
    ) -> Result<(String, ObjectAttributes)> {
        self.begin_upload(state).await?;
        let count = part_at(len.saturating_sub(1));
        // Parts behind the end belong to bytes that were cut off.
        if let Some(upload) = &mut state.upload {
            upload.wait_for_parts(1).await;
            upload.parts.retain(|number, _| *number <= count);
        }
        let mut failures = 0;
        loop {
            let is_missing =
                |number: &u32| state.upload.as_ref().is_some_and(|upload| !upload.parts.contains_key(number));
            let missing: Vec<u32> = (1..=count).filter(is_missing).collect();
            if missing.is_empty() {
                break;
            }
            if failures > 1 {
                let why = format!("{} of {count} parts could not be sent", missing.len());
                return Err(Error::new(ErrorKind::OriginFailed, why));
            }
            failures += 1;
            for number in missing {
                let range = part_range(number);
                self.send_part(state, number, range.start..range.end.min(len)).await?;
            }
            if let Some(upload) = &mut state.upload {
                upload.wait_for_parts(1).await;
            }
        }
        let Some(upload) = &state.upload else {
            return Err(Error::new(ErrorKind::Invalid, "no upload"));
        };
        let parts = upload.parts.iter().filter_map(|(number, part)| match part {
            PartState::Sent { etag } => Some(UploadedPart { number: *number, etag: etag.clone() }),
            PartState::Sending { .. } => None,
        });
        let parts: Vec<UploadedPart> = parts.collect();
        let object = NewObject { key: &upload.key, attributes: &upload.attributes, condition };
        let etag = self.requests.complete(&object, &upload.id, &parts).await?;
        let attributes = upload.attributes.clone();
        state.upload = None;
        Ok((etag, attributes))
    }

    fn abort(&self, upload: Option<PartUpload>) {
        let Some(mut upload) = upload else { return };
        let aborted = async {
            upload.wait_for_parts(1).await;
            self.requests.abort(&upload.key, &upload.id).await;
            Ok(())
        };
        if let Err(error) = self.requests.run(aborted) {
            tracing::warn!("an upload was not aborted: {error}");
        }
    }
}

impl Drop for OpenObject {
    fn drop(&mut self) {
        // Pages of a memory map can come after the last close.
        if let Err(error) = self.publish() {
            let state = self.state.lock();
            let len = state.staged.as_ref().map_or(0, StagedBytes::len);
            let path = String::from_utf8_lossy(&state.path).into_owned();
            drop(state);
            tracing::error!("the changes of '/{path}' ({len} bytes) are lost: {error}");
            let upload = self.state.lock().upload.take();
            self.abort(upload);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_follow_each_other_up_to_the_largest_object() {
        let mut end = 0;
        for number in [1, 2, 999, 1000, 1001, 1002, 2000, 2001, 9_999, 10_000] {
            let range = part_range(number);
            assert_eq!(part_at(range.start), number);
            assert_eq!(part_at(range.end - 1), number);
            assert!(range.start >= end, "part {number}");
            assert_eq!(part_range(number + 1).start, range.end);
            end = range.end;
        }
        assert!(end >= 5 << 40, "10,000 parts hold 5 TiB");
    }
}
