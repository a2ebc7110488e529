//! The upload of an open file's parts: begun, and fed with parts, beside the writes of programs, and by a publication. Knows no condition of a
//! publication.
//!
//! | | a write | a publication |
//! |---|---|---|
//! | no upload | begins it, and goes on | begins it, and waits |
//! | an upload that begins | goes on | waits; a failure before is none of this call |
//! | an upload | sends parts that are full, up to eight at once | sends all parts that are missing |

use super::attrs::NextMetadata;
use super::kept::KeptBeginning;
use super::{ObjectChanges, OpenObject, PARTS_IN_FLIGHT, PartBody, UploadBeginning};
use crate::part_upload::{PartState, PartUpload};
use crate::requests::BucketRequests;
use spurline_object_store::CopySource;
use spurline_types::{Error, ErrorKind, Result};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::OwnedSemaphorePermit;

impl UploadBeginning {
    async fn wait(self) -> Result<PartUpload> {
        self.begun.await.map_err(|error| Error::new(ErrorKind::Unavailable, error.to_string()))?
    }
}

/// An upload that no publication will end.
pub(super) struct AbandonedUpload {
    upload: Option<PartUpload>,
    beginning: Option<UploadBeginning>,
}

impl ObjectChanges {
    /// The file has no upload any more.
    pub(super) fn abandon_upload(&mut self) -> AbandonedUpload {
        self.waiting_parts.clear();
        AbandonedUpload { upload: self.upload.take(), beginning: self.beginning.take() }
    }

    /// An upload that has begun meanwhile is that of the file. A failure to begin is none of the next call.
    pub(super) async fn take_begun(&mut self) {
        if let Some(beginning) = self.beginning.take_if(|beginning| beginning.begun.is_finished()) {
            match beginning.wait().await {
                Ok(upload) => self.upload = Some(upload),
                Err(error) => tracing::debug!("an upload is begun again: {error}"),
            }
        }
    }
}

impl OpenObject {
    /// Sends the parts that a write has filled. Waits for the store only while local space is short.
    pub(super) fn send_full_parts(&self, changes: &mut ObjectChanges, written: Range<u64>) -> Result<()> {
        let lengths = self.context.options.part_lengths();
        // Most writes do not reach the end of a part.
        if lengths.at(written.start) == lengths.at(written.end) || self.is_removed() {
            return Ok(());
        }
        self.context.requests.run(async {
            for number in lengths.at(written.start)..lengths.at(written.end) {
                let range = lengths.range(number);
                if is_unsent(changes, number, range.clone()) && !self.spill_full_part(changes, number, range).await? {
                    changes.waiting_parts.insert(number);
                }
            }
            changes.take_begun().await;
            Ok(())
        })?;
        while let Some(number) = changes.waiting_parts.first().copied() {
            let Some(upload) = &mut changes.upload else {
                return if changes.beginning.is_none() { self.begin_upload(changes) } else { Ok(()) };
            };
            upload.note_ended_parts();
            self.sent_bytes.store(upload.sent_bytes(), Ordering::Relaxed);
            let range = self.context.options.part_lengths().range(number);
            if is_unsent(changes, number, range.clone()) {
                let has_place = changes.upload.as_ref().is_some_and(|upload| upload.has_place(PARTS_IN_FLIGHT));
                let reserved = self.context.requests.try_reserve_body(range.end - range.start);
                let Some(reserved) = reserved.filter(|_| has_place) else { return Ok(()) };
                self.send_reserved(changes, number, range, reserved)?;
            }
            changes.waiting_parts.pop_first();
        }
        Ok(())
    }

    /// Begins an upload, after this call.
    fn begin_upload(&self, changes: &mut ObjectChanges) -> Result<()> {
        let key = self.key()?;
        let file_attrs = self.file_attrs();
        let last = changes.known_attributes(self.is_new(), &key);
        let next = NextMetadata::of(&self.facts.lock(), changes, self.context.options.object_attrs);
        let lengths = self.context.options.part_lengths();
        let requests = Arc::clone(&self.context.requests);
        let kept = KeptBeginning::of(self.kept.as_ref());
        let keeper = kept.clone();
        let begun = self.context.requests.spawn(async move {
            let last = match last {
                Some(last) => last,
                None => requests.attributes_of(&key).await?,
            };
            let attributes = next.over(last);
            let upload = requests.begin_upload(&key, &attributes).await?;
            keeper.keep_upload(&key, &upload);
            Ok(PartUpload::new(key, upload, attributes, file_attrs, lengths))
        })?;
        changes.beginning = Some(UploadBeginning { begun, kept });
        Ok(())
    }

    /// The file has an upload when this returns.
    ///
    /// # Errors
    /// The store's.
    pub(super) async fn await_upload(&self, changes: &mut ObjectChanges) -> Result<()> {
        changes.take_begun().await;
        if changes.upload.is_some() {
            return Ok(());
        }
        if changes.beginning.is_none() {
            self.begin_upload(changes)?;
        }
        if let Some(beginning) = changes.beginning.take() {
            changes.upload = Some(beginning.wait().await?);
        }
        Ok(())
    }

    /// Sends a part, which goes on after this call. Waits for the upload, and while eight parts are on their way.
    pub(super) async fn send_part(&self, changes: &mut ObjectChanges, number: u32, range: Range<u64>) -> Result<()> {
        self.await_upload(changes).await?;
        if let Some(upload) = &mut changes.upload {
            upload.wait_for_parts(PARTS_IN_FLIGHT).await;
            self.sent_bytes.store(upload.sent_bytes(), Ordering::Relaxed);
        }
        let reserved = self.context.requests.reserve_body(range.end - range.start).await?;
        self.send_reserved(changes, number, range, reserved)
    }

    /// Sends a part with memory for the body.
    fn send_reserved(
        &self,
        changes: &mut ObjectChanges,
        number: u32,
        range: Range<u64>,
        reserved: OwnedSemaphorePermit,
    ) -> Result<()> {
        let key = self.key()?;
        let copied = self.copied_body(changes, &key, &range);
        let Some(upload) = &changes.upload else { return Ok(()) };
        let body = match copied {
            Some(copied) => copied,
            None => {
                let mut buffer = upload.buffers.take((range.end - range.start) as usize);
                let count = self.read_staged(changes, range.start, buffer.spare())?;
                PartBody::Bytes(buffer.into_bytes(count))
            }
        };
        let Some(upload) = &mut changes.upload else { return Ok(()) };
        let requests = Arc::clone(&self.context.requests);
        let id = upload.upload.id.clone();
        let sent = self.context.requests.spawn(async move {
            let _reserved = reserved;
            match body {
                PartBody::Bytes(bytes) => requests.upload_part(&key, &id, number, bytes).await,
                PartBody::Copied { key: from, etag, range } => {
                    let from = CopySource { key: &from, etag: Some(&etag) };
                    requests.copy_part(&key, &id, number, from, range).await
                }
            }
        })?;
        upload.parts.insert(number, PartState::Sending { sent, changed: false });
        Ok(())
    }
}

impl AbandonedUpload {
    /// Ends the upload without an object.
    pub(super) fn abort(self, requests: &BucketRequests) {
        let AbandonedUpload { upload, beginning } = self;
        if upload.is_none() && beginning.is_none() {
            return;
        }
        let aborted = async {
            let late = match beginning {
                Some(beginning) => beginning.wait().await.ok(),
                None => None,
            };
            for mut upload in upload.into_iter().chain(late) {
                upload.wait_for_parts(1).await;
                requests.abort(&upload.key, &upload.upload).await;
            }
            Ok(())
        };
        if let Err(error) = requests.run(aborted) {
            tracing::warn!("an upload was not aborted: {error}");
        }
    }
}

/// Whether a part lies here whole, and the upload does not have it.
fn is_unsent(changes: &ObjectChanges, number: u32, range: Range<u64>) -> bool {
    let is_full = changes.staged.as_ref().is_some_and(|staged| staged.is_changed(range));
    let is_sent = changes.upload.as_ref().is_some_and(|upload| upload.parts.contains_key(&number));
    is_full && !is_sent
}
