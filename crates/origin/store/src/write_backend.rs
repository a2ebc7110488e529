//! The interface to the changing side of one bucket: single attempts, before retries and the meaning of names. It
//! deliberately knows no folder and no file.

use crate::backend::{RawObject, RawPage, RequestFailure};
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use futures::future::BoxFuture;
use parking_lot::Mutex;
use spurline_types::{CONTENT_HEADERS, ObjectHeaders, USER_METADATA_PREFIX};
pub use spurline_types::{STAGE_ATTRIBUTE, STAGED_ETAG, STAGED_UPLOAD, is_staged_etag, is_staged_upload};
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The time of a request grows with its bytes by this rate, in bytes per second.
const LEAST_RATE: u64 = 1 << 20;
/// The time for the end of an upload grows with its parts by this time: stores assemble thousands of parts in minutes.
const TIME_PER_PART: Duration = Duration::from_millis(250);

/// The time that a request with `len` bytes, or a copy of these within the store, may take in addition.
pub fn transfer_time(len: u64) -> Duration {
    Duration::from_secs(len / LEAST_RATE)
}

/// The time in which a store makes an object of parts.
pub fn assembly_time(parts: usize) -> Duration {
    TIME_PER_PART * u32::try_from(parts).unwrap_or(u32::MAX)
}

/// What must be true of an object when a request changes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WriteCondition {
    /// Nothing.
    None,
    /// No object has the name.
    Absent,
    /// The object has this etag.
    Version(String),
}

/// The attributes that are stored with an object and that a copy keeps.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectAttributes {
    /// Those of [`CONTENT_HEADERS`] that the object has.
    pub content: Vec<(&'static str, String)>,
    /// Names, without the store's prefix, and values.
    pub user: Vec<(String, String)>,
    /// The storage class, where the store names one.
    pub storage_class: Option<String>,
}

impl ObjectAttributes {
    /// No attributes but the type of the content.
    pub fn with_content_type(content_type: &str) -> ObjectAttributes {
        let content = vec![("content-type", content_type.to_owned())];
        ObjectAttributes { content, ..ObjectAttributes::default() }
    }

    /// The value of an attribute of the user.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.user.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// Sets an attribute of the user.
    pub fn set(&mut self, name: &str, value: String) {
        self.user.retain(|(known, _)| known != name);
        self.user.push((name.to_owned(), value));
    }

    /// Requests that nodes keep the object and upload later.
    pub fn set_stage(&mut self) {
        self.set(STAGE_ATTRIBUTE, "1".to_owned());
    }

    /// Takes the request of [`Self::set_stage`] away, and says whether there was such a request.
    pub fn take_stage(&mut self) -> bool {
        let requested = self.get(STAGE_ATTRIBUTE) == Some("1");
        self.user.retain(|(name, _)| name != STAGE_ATTRIBUTE);
        requested
    }

    /// Replaces all attributes but the storage class.
    pub fn set_headers(&mut self, headers: &ObjectHeaders) {
        let content = CONTENT_HEADERS.iter().filter_map(|name| Some((*name, headers.0.get(*name)?.clone())));
        self.content = content.collect();
        self.user = headers.user_metadata().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    }

    /// The headers of the object.
    pub fn headers(&self) -> ObjectHeaders {
        let content = self.content.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        let user = self.user.iter().map(|(name, value)| (format!("{USER_METADATA_PREFIX}{name}"), value.clone()));
        ObjectHeaders(content.chain(user).collect::<BTreeMap<_, _>>())
    }
}

/// An object with its attributes.
#[derive(Debug, Clone)]
pub struct StoredObject {
    /// The object as a head describes it.
    pub raw: RawObject,
    /// The attributes that are stored with it.
    pub attributes: ObjectAttributes,
}

/// The bytes of an object or a part, in one piece or several, and the checksum that the writer has computed: the store compares
/// both.
#[derive(Debug, Clone)]
pub struct ObjectBody {
    pieces: Arc<[Bytes]>,
    checksum: u64,
}

impl ObjectBody {
    /// The bytes of a writer.
    pub fn new(bytes: Bytes) -> ObjectBody {
        ObjectBody::of_pieces([bytes].into())
    }

    /// Bytes that came with the writer's checksum; `None` if changed on the way.
    pub fn received(pieces: Vec<Bytes>, checksum: u64) -> Option<ObjectBody> {
        Some(ObjectBody::of_pieces(pieces.into())).filter(|body| body.checksum == checksum)
    }

    fn of_pieces(pieces: Arc<[Bytes]>) -> ObjectBody {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        pieces.iter().for_each(|piece| digest.update(piece));
        ObjectBody { pieces, checksum: digest.finalize() }
    }

    /// The bytes, in order.
    pub fn pieces(&self) -> &[Bytes] {
        &self.pieces
    }

    /// All bytes in a row; several pieces are copied.
    pub fn bytes(&self) -> Bytes {
        match &*self.pieces {
            [whole] => whole.clone(),
            pieces => pieces.concat().into(),
        }
    }

    /// The CRC64NVME.
    pub fn checksum(&self) -> u64 {
        self.checksum
    }
}

/// A part that the store has acknowledged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadedPart {
    /// From 1.
    pub number: u32,
    /// Bare.
    pub etag: String,
}

/// When the last byte of an answer came, as far as the backend says. Clones share the time.
#[derive(Clone, Default)]
pub struct AnswerProgress(Arc<Mutex<Option<Instant>>>);

impl AnswerProgress {
    /// Notes that bytes of the answer have come.
    pub fn note_bytes(&self) {
        self.note_bytes_at(Instant::now());
    }

    /// Notes that bytes of the answer came at this time.
    pub fn note_bytes_at(&self, time: Instant) {
        let mut last = self.0.lock();
        *last = Some(last.map_or(time, |known| known.max(time)));
    }

    /// When the last bytes came; `None` before the first.
    pub fn last_bytes(&self) -> Option<Instant> {
        *self.0.lock()
    }

    /// The result of an attempt; `None` when the deadline has passed, and `patience` since the last byte of the answer.
    pub async fn await_answer<T>(
        &self,
        deadline: Instant,
        patience: Duration,
        attempt: impl Future<Output = T>,
    ) -> Option<T> {
        let mut attempt = pin!(attempt);
        let mut until = deadline;
        loop {
            if let Ok(answer) = tokio::time::timeout_at(until.into(), &mut attempt).await {
                return Some(answer);
            }
            let longer = self.last_bytes().map(|at| at + patience);
            until = longer.filter(|longer| *longer > until)?;
        }
    }
}

/// The source of a copy within the bucket.
#[derive(Debug, Clone, Copy)]
pub struct CopySource<'a> {
    /// The key of the object that is copied.
    pub key: &'a str,
    /// The version to copy; the newest without one.
    pub etag: Option<&'a str>,
}

/// The changing side of one bucket, one attempt at a time. Etags are bare. A condition that does not hold is a failure of
/// kind `Stale`, or `NotFound` where no object has the name. Dropping a future cancels its request, which the store may
/// execute nevertheless.
pub trait ObjectWriteBackend: Send + Sync {
    /// One object with its attributes.
    fn head_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<StoredObject, RequestFailure>>;

    /// A page of all objects whose keys start with `prefix`, without folders.
    fn list_below<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
    ) -> BoxFuture<'a, Result<RawPage, RequestFailure>>;

    /// The bytes of an object, and its etag.
    fn read_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(Vec<u8>, String), RequestFailure>>;

    /// Writes an object; returns its etag.
    fn put<'a>(
        &'a self,
        key: &'a str,
        body: ObjectBody,
        attributes: &'a ObjectAttributes,
        condition: &'a WriteCondition,
    ) -> BoxFuture<'a, Result<String, RequestFailure>>;

    /// Begins an upload in parts; returns its id.
    fn begin_upload<'a>(
        &'a self,
        key: &'a str,
        attributes: &'a ObjectAttributes,
    ) -> BoxFuture<'a, Result<String, RequestFailure>>;

    /// Uploads a part; returns its etag.
    fn upload_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        body: ObjectBody,
    ) -> BoxFuture<'a, Result<String, RequestFailure>>;

    /// Makes a part from bytes of an object; returns its etag.
    fn copy_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        from: CopySource<'a>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Result<String, RequestFailure>>;

    /// Makes the object of an upload; returns its etag. A store may begin its answer at once, and send blanks until the object is
    /// there: these count as progress.
    fn complete<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        parts: &'a [UploadedPart],
        condition: &'a WriteCondition,
        progress: &'a AnswerProgress,
    ) -> BoxFuture<'a, Result<String, RequestFailure>>;

    /// Ends an upload without an object.
    fn abort<'a>(&'a self, key: &'a str, upload: &'a str) -> BoxFuture<'a, Result<(), RequestFailure>>;

    /// Copies an object within the bucket, with its attributes or with other ones; returns the new etag. The store may work on the
    /// copy for `work_time`, which depends on the length of the object.
    fn copy<'a>(
        &'a self,
        from: CopySource<'a>,
        to: &'a str,
        attributes: Option<&'a ObjectAttributes>,
        condition: &'a WriteCondition,
        work_time: Duration,
    ) -> BoxFuture<'a, Result<String, RequestFailure>>;

    /// Removes an object; an absent one counts as removed.
    fn delete<'a>(&'a self, key: &'a str, condition: &'a WriteCondition) -> BoxFuture<'a, Result<(), RequestFailure>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_request_to_stage_an_object_is_taken_once() {
        let plain = ObjectAttributes::with_content_type("text/plain");
        let mut attributes = plain.clone();
        attributes.set("note", "stays".to_owned());
        assert!(!attributes.take_stage());
        attributes.set_stage();
        attributes.set_stage();
        assert_eq!(attributes.get(STAGE_ATTRIBUTE), Some("1"));
        assert!(attributes.take_stage() && !attributes.take_stage());
        attributes.set(STAGE_ATTRIBUTE, "of a user".to_owned());
        assert!(!attributes.take_stage(), "another value is no request, and does not stay");
        assert_eq!(attributes.user, [("note".to_owned(), "stays".to_owned())]);
        assert_eq!(attributes.content, plain.content);
    }
}
