//! Requests that change a bucket, repeated until the store has answered each: what a lost answer leaves open is resolved by
//! the mark of the change, never by guessing. It knows keys and bytes, and neither files nor folders.
//!
//! | answer | a request without an answer before | outcome |
//! |---|---|---|
//! | success | any | done |
//! | the condition does not hold | no | the failure: another writer has changed the object |
//! | the condition does not hold | yes | done, if the object has the mark of this change; else the failure |
//! | the upload does not exist | yes | done, if the object has the mark of this change; else the failure |
//! | none in the time of an attempt | any | the request is sent again, and twice as much time is given to the answer |
//! | none until the deadline | any | done, if the object has the mark of this change; else the failure |
//!
//! The outcome of a change whose object can't be looked at is not known: the failure is that of the look then.
//!
//! With [`BucketRequests::stage_changes`] new objects carry the request that nodes keep these and upload later. An upload whose id says
//! that nodes keep the parts has no record in the store. Hidden objects always go to the store.

use crate::spilled::PART_NAME;
use crate::upload_record::record_upload;
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::{StreamExt as _, TryStreamExt as _};
use spurline_object_store::{
    AnswerProgress, CopySource, HIDDEN_NAME, ObjectAttributes, ObjectBackend, ObjectBody, ObjectWriteBackend,
    RawObject, RequestFailure, RetryHint, RetryState, STAGE_ATTRIBUTE, SharedBucket, StoredObject, UploadedPart,
    WriteCondition, assembly_time, bare_etag, bucket_unavailable, is_staged_etag, is_staged_upload, mark_in, marked_as,
    transfer_time,
};
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_volume::repeated::ChangeMark;
use std::borrow::Cow;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A request with more bytes has a single attempt while its connection lives: on a slow link the bytes take longer than an answer.
const RESENT_MAX: u64 = 128 << 10;

/// A request that took this long and was repeated is logged with the last failure.
const LONG_PAUSE: Duration = Duration::from_secs(10);

/// Largest object that one request copies, as S3 has it.
const COPY_MAX: u64 = 5 << 30;
/// Length of the parts in which a larger object is copied.
const COPY_PART: u64 = 1 << 30;
/// Memory for the bodies of requests that are under way, of all files: eighteen parts of the first length.
const BODY_BYTES: u64 = 144 << 20;
/// Unit of that memory.
const BODY_UNIT: u64 = 1 << 20;
/// Parts of one object that are copied at once.
const COPIES_AT_ONCE: usize = 8;

/// The changing side of a bucket.
pub(crate) struct BucketRequests {
    bucket: Arc<SharedBucket>,
    /// The source's prefix with a trailing slash, or empty: uploads are recorded there.
    root: String,
    /// Largest object that one request copies.
    copy_max: u64,
    /// Units of [`BODY_UNIT`] for the bodies of requests.
    body_units: Arc<Semaphore>,
    /// The store keeps no conditions, and may refuse requests that have any.
    is_unconditional: bool,
    /// New objects are to be kept by nodes and uploaded later.
    stages: bool,
}

/// An upload in parts.
pub(crate) struct OpenUpload {
    pub id: String,
    /// The key of its record.
    record: Option<String>,
    _shown: ShownUpload,
}

impl OpenUpload {
    /// The key of the record.
    pub fn record(&self) -> Option<&str> {
        self.record.as_deref()
    }
}

/// Counts an upload as long as it is under way.
struct ShownUpload(Arc<Stats>);

impl ShownUpload {
    fn begin(stats: &Arc<Stats>) -> ShownUpload {
        stats.object.uploads.add(1);
        ShownUpload(Arc::clone(stats))
    }
}

impl Drop for ShownUpload {
    fn drop(&mut self) {
        self.0.object.uploads.sub(1);
    }
}

/// An object to make.
pub(crate) struct NewObject<'a> {
    pub key: &'a str,
    /// Those of the object, with the mark of the change.
    pub attributes: &'a ObjectAttributes,
    pub condition: &'a WriteCondition,
}

/// The attributes with the mark of a change of its own.
pub(crate) fn marked(attributes: ObjectAttributes) -> ObjectAttributes {
    marked_as(attributes, &new_mark())
}

/// Whether an object was made by the change with this mark.
pub(crate) fn is_marked_as(attributes: &ObjectAttributes, mark: &str) -> bool {
    mark_in(attributes) == Some(mark)
}

/// A mark that no other change has.
pub(crate) fn new_mark() -> String {
    format!("{:016x}{:016x}", random(), random())
}

/// The mark of a change: the mark of the request, or a new one.
pub(crate) fn mark_of(request: Option<ChangeMark>) -> String {
    request.map_or_else(new_mark, |mark| format!("{:032x}", mark.0))
}

/// The time of a request with all repetitions.
#[derive(Clone, Copy)]
struct RequestTime {
    deadline: Instant,
    /// The time for the answer to the first attempt, which doubles with each further one; `None` for all the time.
    first_attempt: Option<Duration>,
}

impl RequestTime {
    /// When the attempt with this number, from 0, ends without an answer.
    fn end_of_attempt(&self, attempt: u32) -> Instant {
        let time = self.first_attempt.map(|first| first * 2_u32.saturating_pow(attempt.min(8)));
        time.map_or(self.deadline, |time| self.deadline.min(Instant::now() + time))
    }
}

impl BucketRequests {
    /// # Errors
    /// `ReadOnly` when the store can't be changed by this program.
    pub fn new(bucket: Arc<SharedBucket>, root: &str) -> Result<BucketRequests> {
        if bucket.backend.writes().is_none() {
            return Err(unchangeable());
        }
        let body_units = Arc::new(Semaphore::new((BODY_BYTES / BODY_UNIT) as usize));
        Ok(BucketRequests {
            bucket,
            root: root.to_owned(),
            copy_max: COPY_MAX,
            body_units,
            is_unconditional: false,
            stages: false,
        })
    }

    /// No change has a condition from now on.
    pub fn send_no_conditions(&mut self) {
        self.is_unconditional = true;
    }

    /// New objects are kept by nodes from now on, and uploaded later.
    pub fn stage_changes(&mut self) {
        self.stages = true;
    }

    /// The attributes of a new object, as the nodes or the store get these.
    fn sent_attributes<'a>(&self, key: &str, attributes: &'a ObjectAttributes) -> Cow<'a, ObjectAttributes> {
        let hidden = key.strip_prefix(&self.root).and_then(|path| path.strip_prefix(HIDDEN_NAME));
        let stages = self.stages && hidden.is_none_or(|name| name.starts_with(PART_NAME));
        if !stages && attributes.get(STAGE_ATTRIBUTE).is_none() {
            return Cow::Borrowed(attributes);
        }
        let mut sent = attributes.clone();
        // Metadata of a user with this name is no request.
        sent.take_stage();
        if stages {
            sent.set_stage();
        }
        Cow::Owned(sent)
    }

    /// The condition of a change, as the store gets it.
    fn sent_condition<'a>(&self, condition: &'a WriteCondition) -> &'a WriteCondition {
        if self.is_unconditional { &WriteCondition::None } else { condition }
    }

    /// Waits until there is memory for the body of a request of `len` bytes; dropping the result frees the memory. A larger body
    /// than all of it has the memory alone.
    ///
    /// # Errors
    /// `Unavailable` after the end of the bucket.
    pub async fn reserve_body(&self, len: u64) -> Result<OwnedSemaphorePermit> {
        let permit = Arc::clone(&self.body_units).acquire_many_owned(body_units(len)).await;
        permit.map_err(|_| closed())
    }

    /// As [`Self::reserve_body`], without a wait.
    pub fn try_reserve_body(&self, len: u64) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.body_units).try_acquire_many_owned(body_units(len)).ok()
    }

    /// Runs requests on this thread.
    ///
    /// # Errors
    /// Those of the requests; `Unavailable` after the end of the bucket.
    pub fn run<T>(&self, requests: impl Future<Output = Result<T>>) -> Result<T> {
        match self.bucket.runtime() {
            Some(runtime) => runtime.block_on(requests),
            None => Err(closed()),
        }
    }

    /// Runs requests on the threads of the bucket.
    pub fn spawn<T: Send + 'static>(
        &self,
        requests: impl Future<Output = T> + Send + 'static,
    ) -> Result<tokio::task::JoinHandle<T>> {
        match self.bucket.runtime() {
            Some(runtime) => Ok(runtime.spawn(requests)),
            None => Err(closed()),
        }
    }

    /// The server and the bucket, for messages.
    pub fn describe(&self) -> String {
        self.bucket.backend.describe()
    }

    /// The time for an answer of the store, with all repetitions.
    pub fn timeout(&self) -> Duration {
        self.bucket.config.timeout
    }

    /// The deadline of a read that begins now.
    pub fn read_deadline(&self) -> Instant {
        Instant::now() + self.timeout()
    }

    /// The time of a request with `len` bytes that the store answers at once.
    fn time_of(&self, len: u64) -> RequestTime {
        RequestTime {
            deadline: self.read_deadline() + transfer_time(len),
            first_attempt: (len <= RESENT_MAX).then(|| self.bucket.config.resend_after()),
        }
    }

    /// The time of a change with `len` bytes. A change without a condition is not sent twice at once: executed late, the first would undo what follows.
    fn time_of_change(&self, len: u64, condition: &WriteCondition) -> RequestTime {
        let time = self.time_of(len);
        match condition {
            WriteCondition::None => RequestTime { first_attempt: None, ..time },
            _ => time,
        }
    }

    /// The time of a request that the store works on for as long as `work`, and which is not sent twice meanwhile.
    fn time_of_work(&self, work: Duration) -> RequestTime {
        RequestTime { deadline: self.read_deadline() + work, first_attempt: None }
    }

    /// The time of a copy of `len` bytes within the store.
    fn time_of_copy(&self, len: u64) -> RequestTime {
        self.time_of_work(transfer_time(len))
    }

    /// Sends a request until the store answers it.
    async fn repeat<'a, T>(
        &'a self,
        time: RequestTime,
        what: &str,
        send: impl FnMut(&'a dyn ObjectWriteBackend) -> BoxFuture<'a, Result<T, RequestFailure>>,
    ) -> Result<T, ChangeFailure> {
        self.repeat_over(&*self.bucket.backend, time, what, send).await
    }

    /// As [`Self::repeat`], over the connections of `backend`.
    async fn repeat_over<'a, T>(
        &self,
        backend: &'a dyn ObjectBackend,
        time: RequestTime,
        what: &str,
        send: impl FnMut(&'a dyn ObjectWriteBackend) -> BoxFuture<'a, Result<T, RequestFailure>>,
    ) -> Result<T, ChangeFailure> {
        self.repeat_while(backend, time, &AnswerProgress::default(), what, send).await
    }

    /// As [`Self::repeat_over`]; an attempt whose answer makes `progress` is waited for beyond the deadline.
    async fn repeat_while<'a, T>(
        &self,
        backend: &'a dyn ObjectBackend,
        time: RequestTime,
        progress: &AnswerProgress,
        what: &str,
        mut send: impl FnMut(&'a dyn ObjectWriteBackend) -> BoxFuture<'a, Result<T, RequestFailure>>,
    ) -> Result<T, ChangeFailure> {
        let begun = Instant::now();
        let mut retry = RetryState::new(time.deadline, &self.bucket.stats);
        let mut maybe_executed = false;
        let mut last_failure = None;
        let Some(backend) = backend.writes() else {
            return Err(ChangeFailure { error: unchangeable(), maybe_executed });
        };
        let mut repeated = 0;
        loop {
            let until = time.end_of_attempt(repeated);
            let failure = match progress.await_answer(until, self.bucket.config.timeout, send(backend)).await {
                Some(Ok(answer)) => {
                    self.note_pause(what, begun, repeated, last_failure.as_ref());
                    return Ok(answer);
                }
                Some(Err(failure)) => failure,
                None if until < time.deadline => {
                    let server = self.describe();
                    RequestFailure::transient(ErrorKind::Timeout, format!("{server} did not answer {what}"))
                }
                None => RequestFailure::fatal(
                    ErrorKind::Timeout,
                    format!("{} did not answer {what} in time; check it, or raise --origin-timeout", self.describe()),
                ),
            };
            let is_refused = failure.advice == RetryHint::Never && failure.error.kind() != ErrorKind::Timeout;
            if is_refused {
                self.bucket.note_failure(&self.root, &failure.error);
                return Err(ChangeFailure { error: failure.error, maybe_executed });
            }
            maybe_executed = true;
            last_failure = Some(failure.error.clone());
            if let Err(error) = retry.pause(failure).await {
                return Err(ChangeFailure { error, maybe_executed });
            }
            repeated += 1;
        }
    }

    /// Logs why a request that was repeated took long.
    fn note_pause(&self, what: &str, begun: Instant, repeated: u32, last_failure: Option<&Error>) {
        let took = begun.elapsed();
        if let Some(failure) = last_failure
            && took >= LONG_PAUSE
        {
            let seconds = took.as_secs_f64();
            tracing::warn!(
                "{what} took {seconds:.0} s and was sent {} times; the last failure was: {failure}",
                repeated + 1
            );
        }
    }

    /// Whether the object is the one that the change with these attributes made; its etag then.
    ///
    /// # Errors
    /// The store's: the outcome is not known then.
    async fn find_own(&self, backend: &dyn ObjectBackend, object: &NewObject<'_>) -> Result<Option<String>> {
        let found = match self.head_over(backend, object.key).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            found => found?,
        };
        let is_own = mark_in(&found.attributes).is_some() && mark_in(&found.attributes) == mark_in(object.attributes);
        Ok(is_own.then_some(found.raw.etag).flatten().map(|etag| bare_etag(&etag).to_owned()))
    }

    /// The result of a change, after a failure that may have come after its execution.
    async fn settle(
        &self,
        backend: &dyn ObjectBackend,
        object: &NewObject<'_>,
        failure: ChangeFailure,
    ) -> Result<String> {
        if failure.maybe_executed
            && let Some(etag) = self.find_own(backend, object).await?
        {
            return Ok(etag);
        }
        Err(failure.error)
    }

    /// The error of a change whose condition does not hold now, with the facts of both versions; `None` if it holds, or the
    /// store does not say.
    pub async fn find_conflict(&self, key: &str, condition: &WriteCondition) -> Option<Error> {
        let found = match self.head(key).await {
            Ok(found) => Some(found.raw),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(_) => return None,
        };
        let found_etag = found.as_ref().and_then(|found| found.etag.as_deref()).map(bare_etag);
        let expected = match condition {
            WriteCondition::None => return None,
            WriteCondition::Absent if found.is_none() => return None,
            WriteCondition::Version(etag) if found_etag == Some(etag) => return None,
            WriteCondition::Absent => "no object".to_owned(),
            WriteCondition::Version(etag) => format!("ETag {etag}"),
        };
        let shown = match &found {
            Some(found) => {
                let time = chrono::DateTime::<chrono::Utc>::from(found.mtime).format("%Y-%m-%d %H:%M:%S");
                let etag = found_etag.unwrap_or("none");
                format!("an object of {} bytes, written at {time} UTC, with ETag {etag}", found.size)
            }
            None => "no object".to_owned(),
        };
        let why = format!(
            "'{key}' was changed by another writer since it was opened: this mount expected {expected} and found {shown}; nothing \
             was written over it. Open it again, or mount with --last-writer-wins"
        );
        self.bucket.stats.object.conflicts.add(1);
        Some(Error::new(ErrorKind::Stale, why))
    }

    /// The changes of a file could not be published.
    pub fn count_failed_publication(&self) {
        self.bucket.stats.writes.failures.add(1);
    }

    fn count_put(&self, len: u64) {
        self.bucket.stats.object.put_ops.add(1);
        self.bucket.stats.object.put_bytes.add(len);
    }

    /// One object with its attributes.
    ///
    /// # Errors
    /// `NotFound`; the store's.
    pub async fn head(&self, key: &str) -> Result<StoredObject> {
        self.head_over(&*self.bucket.backend, key).await
    }

    /// The attributes of an object that is about to be replaced, as they are in the store. The condition of the replacement finds out
    /// that there is none.
    ///
    /// # Errors
    /// The store's.
    pub async fn attributes_of(&self, key: &str) -> Result<ObjectAttributes> {
        match self.head(key).await {
            Ok(found) => Ok(found.attributes),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(ObjectAttributes::default()),
            Err(error) => Err(error),
        }
    }

    /// Whether nodes keep an object that the store does not have.
    ///
    /// # Errors
    /// The nodes'.
    pub async fn is_unsaved(&self, key: &str) -> Result<bool> {
        let found = self.head_raw(&*self.bucket.backend, key).await;
        match found {
            Ok(mut found) => Ok(found.attributes.take_stage() && found.raw.etag.as_deref().is_some_and(is_staged_etag)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn head_over(&self, backend: &dyn ObjectBackend, key: &str) -> Result<StoredObject> {
        let mut found = self.head_raw(backend, key).await?;
        // The note that the store does not have the object is no metadata of the file.
        found.attributes.take_stage();
        Ok(found)
    }

    async fn head_raw(&self, backend: &dyn ObjectBackend, key: &str) -> Result<StoredObject> {
        let answer = self.repeat_over(backend, self.time_of(0), "a head", |backend| backend.head_all(key)).await;
        answer.map_err(|failure| failure.error)
    }

    /// All objects whose keys start with `prefix`, in the order of their keys; at most about `limit` of them.
    pub async fn list_below(&self, prefix: &str, limit: usize) -> Result<Vec<RawObject>> {
        let mut all = Vec::new();
        let mut token: Option<String> = None;
        loop {
            let from = token.as_deref();
            let page = self.repeat(self.time_of(0), "a listing", |backend| backend.list_below(prefix, from)).await;
            let page = page.map_err(|failure| bucket_unavailable(failure.error))?;
            all.extend(page.objects);
            if page.next.is_none() || page.next == token || all.len() > limit {
                return Ok(all);
            }
            token = page.next;
        }
    }

    /// The bytes of an object and its etag; `None` where no object has the name.
    pub async fn read_all(&self, key: &str) -> Result<Option<(Vec<u8>, String)>> {
        match self.repeat(self.time_of(0), "a read", |backend| backend.read_all(key)).await {
            Ok(found) => Ok(Some(found)),
            Err(failure) if failure.error.kind() == ErrorKind::NotFound => Ok(None),
            Err(failure) => Err(failure.error),
        }
    }

    /// Writes an object of few bytes; returns its etag.
    ///
    /// # Errors
    /// `Stale` when the condition does not hold; the store's.
    pub async fn put(&self, object: &NewObject<'_>, body: Bytes) -> Result<String> {
        self.put_over(&*self.bucket.backend, object, body).await
    }

    /// As [`Self::put`], for a thread that waits: no other thread has a part in the request, where connections are left.
    pub fn put_here(&self, object: &NewObject<'_>, body: Bytes) -> Result<String> {
        self.bucket
            .run_transfer(async |backend| self.put_over(backend, object, body).await, Result::is_ok)
            .unwrap_or_else(|| Err(closed()))
    }

    async fn put_over(&self, backend: &dyn ObjectBackend, object: &NewObject<'_>, body: Bytes) -> Result<String> {
        let len = body.len() as u64;
        let body = ObjectBody::new(body);
        let NewObject { key, attributes, condition } = *object;
        let condition = self.sent_condition(condition);
        let attributes = &*self.sent_attributes(key, attributes);
        let sent = self
            .repeat_over(backend, self.time_of_change(len, condition), "a write", |backend| {
                backend.put(key, body.clone(), attributes, condition)
            })
            .await;
        self.count_put(len);
        match sent {
            Ok(etag) => Ok(etag),
            Err(failure) => self.settle(backend, object, failure).await,
        }
    }

    /// Begins an upload in parts, and records the upload, unless nodes keep the parts. A lost answer leaves an upload without a record
    /// behind.
    pub async fn begin_upload(&self, key: &str, attributes: &ObjectAttributes) -> Result<OpenUpload> {
        let upload = self.begin_unrecorded_upload(key, attributes).await?;
        if is_staged_upload(&upload.id) {
            return Ok(upload);
        }
        let record = record_upload(self, &self.root, key, &upload.id).await;
        Ok(OpenUpload { record, ..upload })
    }

    /// Begins an upload that ends within a moment.
    pub async fn begin_unrecorded_upload(&self, key: &str, attributes: &ObjectAttributes) -> Result<OpenUpload> {
        let attributes = &*self.sent_attributes(key, attributes);
        let begun =
            self.repeat(self.time_of(0), "the start of an upload", |backend| backend.begin_upload(key, attributes));
        let id = begun.await.map_err(|failure| failure.error)?;
        Ok(OpenUpload { id, record: None, _shown: ShownUpload::begin(&self.bucket.stats) })
    }

    /// An upload that a process which has ended has begun.
    pub fn earlier_upload(&self, id: String, record: Option<String>) -> OpenUpload {
        OpenUpload { id, record, _shown: ShownUpload::begin(&self.bucket.stats) }
    }

    /// An upload has ended.
    async fn remove_record(&self, upload: &OpenUpload) {
        let Some(record) = &upload.record else { return };
        if let Err(error) = self.delete(record, &WriteCondition::None).await {
            tracing::debug!("the record of an upload that has ended stays until it is old: {error}");
        }
    }

    /// Uploads a part; returns its etag. A part that is sent again replaces the first one.
    pub async fn upload_part(&self, key: &str, upload: &str, number: u32, body: Bytes) -> Result<String> {
        let len = body.len() as u64;
        let body = ObjectBody::new(body);
        let sent = self
            .repeat(self.time_of(len), "a part", |backend| backend.upload_part(key, upload, number, body.clone()))
            .await;
        self.count_put(len);
        sent.map_err(|failure| failure.error)
    }

    /// Makes a part from bytes of an object; returns its etag.
    ///
    /// # Errors
    /// `Stale` when the object is of another version; the store's.
    pub async fn copy_part(
        &self,
        key: &str,
        upload: &str,
        number: u32,
        from: CopySource<'_>,
        range: Range<u64>,
    ) -> Result<String> {
        let copied = self
            .repeat(self.time_of_copy(range.end - range.start), "the copy of a part", |backend| {
                backend.copy_part(key, upload, number, from, range.clone())
            })
            .await;
        copied.map_err(|failure| failure.error)
    }

    /// Makes the object of an upload; returns its etag. The request is not repeated while its answer may come: the store assembles
    /// the object meanwhile.
    ///
    /// # Errors
    /// `Stale` when the condition does not hold; the store's.
    pub async fn complete(
        &self,
        object: &NewObject<'_>,
        upload: &OpenUpload,
        parts: &[UploadedPart],
    ) -> Result<String> {
        let NewObject { key, condition, .. } = *object;
        let condition = self.sent_condition(condition);
        let id = upload.id.as_str();
        let time = self.time_of_work(assembly_time(parts.len()));
        let progress = AnswerProgress::default();
        let completed = self
            .repeat_while(&*self.bucket.backend, time, &progress, "the end of an upload", |backend| {
                backend.complete(key, id, parts, condition, &progress)
            })
            .await;
        let etag = match completed {
            Ok(etag) => etag,
            Err(failure) => self.settle(&*self.bucket.backend, object, failure).await?,
        };
        self.remove_record(upload).await;
        Ok(etag)
    }

    /// Ends an upload without an object, as far as the store can be reached.
    pub async fn abort(&self, key: &str, upload: &OpenUpload) {
        match self.abort_upload(key, &upload.id).await {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!("an upload of '{key}' was not aborted, and its parts stay in the bucket: {error}");
            }
            _ => self.remove_record(upload).await,
        }
    }

    /// Ends the upload with this id without an object.
    ///
    /// # Errors
    /// `NotFound` when there is no such upload; the store's.
    pub async fn abort_upload(&self, key: &str, id: &str) -> Result<()> {
        let aborted = self.repeat(self.time_of(0), "the end of an upload", |backend| backend.abort(key, id)).await;
        aborted.map_err(|failure| failure.error)
    }

    /// Copies an object of `len` bytes within the bucket; returns the new etag.
    ///
    /// # Errors
    /// `Stale` when the source is of another version, or for a conflict; the store's.
    pub async fn copy(&self, from: CopySource<'_>, len: u64, object: &NewObject<'_>) -> Result<String> {
        if len > self.copy_max {
            return self.copy_in_parts(from, len, object).await;
        }
        let NewObject { key, attributes, condition } = *object;
        let condition = self.sent_condition(condition);
        let attributes = &*self.sent_attributes(key, attributes);
        let copied = self
            .repeat(self.time_of_copy(len), "a copy", |backend| {
                backend.copy(from, key, Some(attributes), condition, transfer_time(len))
            })
            .await;
        match copied {
            Ok(etag) => Ok(etag),
            Err(failure) => self.settle(&*self.bucket.backend, object, failure).await,
        }
    }

    /// Copies an object that is too large for one request.
    async fn copy_in_parts(&self, from: CopySource<'_>, len: u64, object: &NewObject<'_>) -> Result<String> {
        let upload = self.begin_upload(object.key, object.attributes).await?;
        let part_len = self.copy_max.min(COPY_PART);
        let count = len.div_ceil(part_len) as u32;
        let upload_id = upload.id.as_str();
        let parts = (1..=count).map(|number| async move {
            let start = u64::from(number - 1) * part_len;
            let range = start..len.min(start + part_len);
            let etag = self.copy_part(object.key, upload_id, number, from, range).await?;
            Ok(UploadedPart { number, etag })
        });
        let copied = async {
            let parts: Vec<UploadedPart> = futures::stream::iter(parts).buffered(COPIES_AT_ONCE).try_collect().await?;
            self.complete(object, &upload, &parts).await
        };
        let copied = copied.await;
        if copied.is_err() {
            self.abort(object.key, &upload).await;
        }
        copied
    }

    /// Removes the object of this version; an absent one counts as removed.
    ///
    /// # Errors
    /// `Stale` when it is of another version; the store's.
    pub async fn delete(&self, key: &str, condition: &WriteCondition) -> Result<()> {
        let condition = self.sent_condition(condition);
        let removed =
            self.repeat(self.time_of_change(0, condition), "a removal", |backend| backend.delete(key, condition)).await;
        match removed {
            Err(ChangeFailure { error, .. }) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// The units for the body of a request.
fn body_units(len: u64) -> u32 {
    len.div_ceil(BODY_UNIT).clamp(1, BODY_BYTES / BODY_UNIT) as u32
}

/// Why a change has no result.
struct ChangeFailure {
    error: Error,
    /// An earlier attempt, or this one, may have been executed.
    maybe_executed: bool,
}

fn closed() -> Error {
    Error::new(ErrorKind::Unavailable, "the bucket is closed")
}

fn unchangeable() -> Error {
    Error::new(ErrorKind::ReadOnly, "buckets of this kind can't be changed; mount it without --rw")
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use spurline_object_store::{AwsCredentials, OriginOptions, SourceLocation};
    use spurline_testkit::{ACCESS_KEY, ChaosProxy, PartAssembly, ProxyFault, S3Server, SECRET_KEY};

    pub fn options_for(server: &S3Server) -> OriginOptions {
        OriginOptions {
            endpoint: Some(server.endpoint()),
            credentials: Some(AwsCredentials {
                access_key_id: ACCESS_KEY.to_owned(),
                secret_access_key: SECRET_KEY.to_owned(),
                session_token: None,
            }),
            ..OriginOptions::default()
        }
    }

    #[test]
    fn an_object_too_large_for_one_request_is_copied_in_parts() {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let bytes: Vec<u8> = (0..20_000_001_u32).map(|n| (n / 7) as u8).collect();
        let etag = server.put("bucket", "from", &bytes);
        let config = options_for(&server);
        let source = SourceLocation::parse("s3://bucket").unwrap();
        let bucket = spurline_object_store::open_bucket(&source, &config, Arc::default()).unwrap();
        let requests = BucketRequests { copy_max: 6 << 20, ..BucketRequests::new(bucket, "").unwrap() };
        let attributes = marked(ObjectAttributes::with_content_type("text/plain"));
        let copy = |etag: &str, condition: WriteCondition| {
            let object = NewObject { key: "to", attributes: &attributes, condition: &condition };
            let from = CopySource { key: "from", etag: Some(etag) };
            requests.run(requests.copy(from, bytes.len() as u64, &object))
        };
        copy(&etag, WriteCondition::Absent).unwrap();
        assert!(server.bytes("bucket", "to").unwrap() == bytes);
        let found = requests.run(requests.head("to")).unwrap();
        assert_eq!(found.attributes, attributes);
        assert_eq!(copy(&etag, WriteCondition::Absent).unwrap_err().kind(), ErrorKind::Stale);
        assert_eq!(copy("another", WriteCondition::None).unwrap_err().kind(), ErrorKind::Stale);
        assert_eq!(server.open_uploads(), 0);
        assert_eq!(server.keys("bucket"), ["from", "to"], "the records of uploads are removed");
    }

    /// A store that takes longer than a request, and sends blanks meanwhile.
    #[test]
    fn an_upload_is_completed_once_while_its_answer_comes_slowly() {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let config = OriginOptions { timeout: Duration::from_secs(3), ..options_for(&server) };
        let source = SourceLocation::parse("s3://bucket").unwrap();
        let bucket = spurline_object_store::open_bucket(&source, &config, Arc::default()).unwrap();
        let requests = BucketRequests::new(bucket, "").unwrap();
        let attributes = marked(ObjectAttributes::with_content_type("text/plain"));
        let object = NewObject { key: "to", attributes: &attributes, condition: &WriteCondition::Absent };
        server.set_assembly(PartAssembly { takes: Duration::from_secs(5), answers_at_once: true });
        let completed = requests.run(async {
            let upload = requests.begin_upload("to", &attributes).await?;
            let etag = requests.upload_part("to", &upload.id, 1, Bytes::from_static(b"bytes")).await?;
            requests.complete(&object, &upload, &[UploadedPart { number: 1, etag }]).await
        });
        assert!(completed.unwrap().ends_with("-1"));
        assert_eq!((server.bytes("bucket", "to").unwrap(), server.completes()), (b"bytes".to_vec(), 1));
    }

    #[test]
    fn a_write_without_an_answer_is_sent_again_before_its_deadline() {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("bucket");
        let proxy = ChaosProxy::start(server.address()).unwrap();
        proxy.inject_on(Some("PUT"), "/bucket/to", ProxyFault::Stall, 2);
        let config = OriginOptions {
            endpoint: Some(proxy.endpoint()),
            stall_timeout: Duration::from_millis(100),
            timeout: Duration::from_secs(600),
            ..options_for(&server)
        };
        let source = SourceLocation::parse("s3://bucket").unwrap();
        let bucket = spurline_object_store::open_bucket(&source, &config, Arc::default()).unwrap();
        let requests = BucketRequests::new(bucket, "").unwrap();
        let attributes = marked(ObjectAttributes::with_content_type("text/plain"));
        let object = NewObject { key: "to", attributes: &attributes, condition: &WriteCondition::Absent };
        requests.run(requests.put(&object, Bytes::from_static(b"bytes"))).unwrap();
        assert_eq!(server.bytes("bucket", "to").unwrap(), b"bytes");
        assert_eq!(proxy.count_requests("PUT", "/bucket/to"), 3);
    }

    #[test]
    fn the_time_for_the_end_of_an_upload_grows_with_its_parts() {
        assert!(assembly_time(1780) > Duration::from_secs(7 * 60));
        assert!(assembly_time(1) < Duration::from_secs(1));
    }
}
