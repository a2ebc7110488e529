//! Sends the requests of a mount to the store of a bucket: each once, unchanged, with this node's credentials. Knows keys and
//! bytes, and neither files nor folders; the mount decides what follows after a failure or a lost answer.
//!
//! | a request | then |
//! |---|---|
//! | names a key that is not below the source | is refused |
//! | has all bytes | is sent to the store; the answer is the store's |
//! | has the first bytes | waits for memory for all bytes; the others follow in order |
//! | has further bytes | the bytes are added; with the last bytes the change is sent to the store |
//! | has made an object | the reservation of its name ends |
//! | has bytes with another checksum than the mount's | fails, and the mount repeats the change |

use crate::CacheNode;
use bytes::Bytes;
use futures::StreamExt as _;
use parking_lot::{Condvar, Mutex, RwLock};
use spurline_origin::{
    AnswerProgress, BucketSides, CopySource, ObjectAttributes, ObjectBody, RawObject, RawPage, RequestFailure,
    RetryHint, SourceRequests, StoredObject, UploadedPart, WriteCondition,
};
use spurline_proto::{
    AnswerBody as _, MAX_PAYLOAD, StoreAnswer, StoreAttributes, StoreBody, StoreBytes, StoreCall, StoreCondition,
    StoreObject, StoreRequest, StoreRetry, StoreSettings, StoreSource, TextList, UploadParts, VolumeId,
};
use spurline_transport::Responder;
use spurline_types::{CONTENT_HEADERS, Error, ErrorKind, Result};
use spurline_volume::Volume as _;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// Opens the requests below a source.
pub type OpenRequests = dyn Fn(&str) -> Result<SourceRequests> + Send + Sync;

/// Memory for the bytes of changes, of all mounts. A larger body has all of the memory.
const BODY_BYTES: u64 = 144 << 20;
/// Bytes of a change whose next ones do not come for this long are dropped: the mount has given the change up, or has ended.
const PIECE_IDLE: Duration = Duration::from_secs(10);
/// While memory is short, such bytes are looked for this often.
const MEMORY_CHECK: Duration = Duration::from_secs(1);
/// The longest time of a request.
const LONGEST_REQUEST: Duration = Duration::from_secs(3600);

/// The requests of mounts to stores.
#[derive(Default)]
pub(crate) struct StoreService {
    accepted: OnceLock<AcceptedRequests>,
    /// By the number of the volume.
    sources: RwLock<Vec<(u32, Arc<SourceRequests>)>>,
    /// Changes whose bytes are not complete, by the numbers of the transfers.
    transfers: Mutex<HashMap<u64, BodyTransfer>>,
    memory: Arc<BodyMemory>,
}

/// The requests that this node accepts.
struct AcceptedRequests {
    settings: StoreSettings,
    open: Box<OpenRequests>,
}

/// A change whose bytes arrive.
struct BodyTransfer {
    volume: VolumeId,
    time_ms: u32,
    /// The change.
    call: Vec<u8>,
    /// Length of all bytes.
    len: usize,
    bytes: Vec<u8>,
    last_piece: Instant,
    memory: BodyShare,
}

/// The memory for bodies.
#[derive(Default)]
struct BodyMemory {
    used_bytes: Mutex<u64>,
    freed: Condvar,
}

/// A share of the memory, returned when dropped.
struct BodyShare {
    memory: Arc<BodyMemory>,
    bytes: u64,
}

impl BodyMemory {
    /// Waits for memory for `len` bytes; `None` when there is none until `deadline`.
    fn reserve(self: &Arc<Self>, len: u64, deadline: Instant) -> Option<BodyShare> {
        let bytes = len.min(BODY_BYTES);
        let mut used = self.used_bytes.lock();
        while *used + bytes > BODY_BYTES {
            if self.freed.wait_until(&mut used, deadline).timed_out() {
                return None;
            }
        }
        *used += bytes;
        Some(BodyShare { memory: Arc::clone(self), bytes })
    }
}

impl Drop for BodyShare {
    fn drop(&mut self) {
        *self.memory.used_bytes.lock() -= self.bytes;
        self.memory.freed.notify_all();
    }
}

/// All bytes of a change.
struct WholeBody {
    bytes: Bytes,
    _memory: BodyShare,
}

impl StoreService {
    pub fn accept(&self, settings: StoreSettings, open: Box<OpenRequests>) {
        // Only the first call has an effect.
        let _ = self.accepted.set(AcceptedRequests { settings, open });
    }

    fn describe(&self, requests: &SourceRequests) -> Result<StoreAnswer> {
        let accepted = self.accepted.get().ok_or_else(|| no_bytes().error)?;
        Ok(StoreAnswer::Described(requests.describe().into(), accepted.settings))
    }

    /// Drops the bytes of mounts that have ended.
    pub fn drop_idle(&self, now: Instant) {
        self.transfers.lock().retain(|_, transfer| now.saturating_duration_since(transfer.last_piece) < PIECE_IDLE);
    }

    /// Takes the first bytes of a change: all bytes, or the transfer goes on.
    fn begin_body(&self, request: &StoreRequest<'_>, body: StoreBody) -> Result<Option<WholeBody>, RequestFailure> {
        let len = request.payload.len() as u64;
        if len > body.len {
            let why = format!("{len} bytes came for an object or a part of {}", body.len);
            return Err(RequestFailure::fatal(ErrorKind::Invalid, why));
        }
        let deadline = Instant::now() + time_of(request.time_ms);
        let memory = loop {
            let now = Instant::now();
            self.drop_idle(now);
            if let Some(memory) = self.memory.reserve(body.len, deadline.min(now + MEMORY_CHECK)) {
                break memory;
            }
            if Instant::now() >= deadline {
                let why = "the node had no memory for the bytes in time: it waits for the store";
                return Err(RequestFailure::transient(ErrorKind::Throttled, why.to_owned()));
            }
        };
        if len == body.len {
            return Ok(Some(WholeBody { bytes: Bytes::copy_from_slice(request.payload), _memory: memory }));
        }
        let transfer = BodyTransfer {
            volume: request.volume,
            time_ms: request.time_ms,
            call: request.call.to_bytes(),
            len: body.len as usize,
            bytes: request.payload.to_vec(),
            last_piece: Instant::now(),
            memory,
        };
        self.transfers.lock().insert(body.transfer, transfer);
        Ok(None)
    }

    /// Adds bytes to a transfer, which is taken out with the last bytes.
    fn add_piece(&self, number: u64, offset: u64, piece: &[u8]) -> Result<Option<BodyTransfer>, RequestFailure> {
        let mut transfers = self.transfers.lock();
        let fits = transfers.get_mut(&number).filter(|transfer| {
            transfer.bytes.len() as u64 == offset && transfer.bytes.len() + piece.len() <= transfer.len
        });
        let Some(transfer) = fits else {
            let why =
                "the node does not have the bytes before this piece: it was started again, or they came too slowly";
            return Err(RequestFailure::transient(ErrorKind::Unavailable, why.to_owned()));
        };
        transfer.bytes.extend_from_slice(piece);
        transfer.last_piece = Instant::now();
        let is_whole = transfer.bytes.len() == transfer.len;
        Ok(if is_whole { transfers.remove(&number) } else { None })
    }
}

impl CacheNode {
    /// Accepts requests for the stores of buckets, from mounts that write there by `settings`; `open` opens the requests below a
    /// source. Only the first call has an effect.
    pub fn accept_store_requests(&self, settings: StoreSettings, open: Box<OpenRequests>) {
        self.store.accept(settings, open);
    }

    fn requests_of(&self, volume: VolumeId) -> Result<Arc<SourceRequests>> {
        let cache = self.volume_by_id(volume)?;
        if let Some((_, source)) = self.store.sources.read().iter().find(|(number, _)| *number == volume.0) {
            return Ok(Arc::clone(source));
        }
        let Some(accepted) = self.store.accepted.get() else {
            return Err(self.takes_no_changes(cache.source()));
        };
        let opened = Arc::new((accepted.open)(cache.source())?);
        let mut sources = self.store.sources.write();
        if let Some((_, source)) = sources.iter().find(|(number, _)| *number == volume.0) {
            return Ok(Arc::clone(source));
        }
        sources.push((volume.0, Arc::clone(&opened)));
        Ok(opened)
    }

    /// Answers a request for a store.
    pub(crate) fn serve_store(&self, request: &StoreRequest<'_>, responder: &mut dyn Responder) -> Result<()> {
        // All wait for the store, or for memory.
        responder.before_wait();
        let requests = self.requests_of(request.volume)?;
        request.call.keys().try_for_each(|key| requests.check_key(key))?;
        if matches!(request.call, StoreCall::Get { .. }) {
            return self.serve_bytes(&requests, request, responder);
        }
        if matches!(request.call, StoreCall::Describe) {
            return Self::send_body(&self.store.describe(&requests)?, responder);
        }
        let answer = match self.answer_store(&requests, request, responder)? {
            Ok(answer) => answer,
            Err(failure) => failure_answer(failure),
        };
        Self::send_body(&answer, responder)
    }

    /// Sends a request that reads no bytes to the store, once all bytes are there.
    fn answer_store(
        &self,
        requests: &SourceRequests,
        request: &StoreRequest<'_>,
        responder: &mut dyn Responder,
    ) -> Result<Result<StoreAnswer, RequestFailure>> {
        if let StoreCall::Piece { transfer, offset } = request.call {
            let transfer = match self.store.add_piece(transfer, offset, request.payload) {
                Ok(Some(transfer)) if transfer.volume == request.volume => transfer,
                Ok(Some(_)) => return Err(Error::new(ErrorKind::Invalid, "a piece of another volume")),
                Ok(None) => return Ok(Ok(StoreAnswer::Taken)),
                Err(failure) => return Ok(Err(failure)),
            };
            responder.check_reader()?;
            let BodyTransfer { time_ms, call, bytes, memory, .. } = transfer;
            let body = WholeBody { bytes: bytes.into(), _memory: memory };
            let call = StoreCall::from_bytes(&call)?;
            let sent = send_call(requests, call, time_of(time_ms), Some(body));
            self.note_sent(requests, request.volume, &call, sent.is_ok());
            return Ok(sent);
        }
        let body = match request.call.body().map(|body| self.store.begin_body(request, body)) {
            None => None,
            Some(Ok(Some(body))) => Some(body),
            Some(Ok(None)) => return Ok(Ok(StoreAnswer::Taken)),
            Some(Err(failure)) => return Ok(Err(failure)),
        };
        if !request.call.is_query() {
            // As late as possible: what stops this process between here and the request delays the change.
            responder.check_reader()?;
        }
        let sent = send_call(requests, request.call, time_of(request.time_ms), body);
        self.note_sent(requests, request.volume, &request.call, sent.is_ok());
        Ok(sent)
    }

    /// The store has executed a request, or not. An object that is made needs no reserved name any more.
    fn note_sent(&self, requests: &SourceRequests, volume: VolumeId, call: &StoreCall<'_>, is_executed: bool) {
        if let StoreCall::Put { key, .. } | StoreCall::Complete { key, .. } | StoreCall::Copy { key, .. } = call
            && is_executed
        {
            self.writes.path_locks().note_made(volume.0, requests.path_of(key).as_bytes());
        }
    }

    /// Reads bytes of an object into the payload of the answer.
    fn serve_bytes(
        &self,
        requests: &SourceRequests,
        request: &StoreRequest<'_>,
        responder: &mut dyn Responder,
    ) -> Result<()> {
        let StoreCall::Get { key, from, to, etag } = request.call else { return Err(no_bytes().error) };
        let time = time_of(request.time_ms);
        let room = usize::try_from(to.saturating_sub(from)).unwrap_or(usize::MAX);
        if room == 0 || room > MAX_PAYLOAD {
            let why = format!("a read of {room} bytes; 1 to {MAX_PAYLOAD} are possible");
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let pool = self.shared.tier.pool();
        let mut buffer = pool.alloc_near(room, responder.numa_node(), Instant::now() + time)?;
        let read = requests.send(time, async |BucketSides { reads, .. }| {
            let mut body = reads.get(key, from, to, etag).await?;
            let mut landed = 0;
            while landed < room
                && let Some(chunk) = body.stream.next().await
            {
                let chunk = chunk?;
                let taken = chunk.len().min(room - landed);
                buffer[landed..landed + taken].copy_from_slice(&chunk[..taken]);
                landed += taken;
            }
            let facts = StoreBytes {
                etag: body.etag.map(Into::into),
                mtime_s: body.mtime.map(seconds),
                total: body.total,
                from: body.range.as_ref().map(|range| range.start),
                to: body.range.as_ref().map(|range| range.end),
                partial: body.partial,
            };
            Ok((facts, landed))
        });
        match read {
            Err(failure) => Self::send_body(&failure_answer(failure), responder),
            Ok((facts, landed)) => {
                let mut body = Vec::new();
                StoreAnswer::Bytes(facts).encode(&mut body);
                responder.send_data(&body, &[&buffer[..landed]])
            }
        }
    }
}

/// The time of a request that the mount has set.
fn time_of(time_ms: u32) -> Duration {
    Duration::from_millis(time_ms.into()).min(LONGEST_REQUEST)
}

/// Sends a request to the store.
fn send_call(
    requests: &SourceRequests,
    call: StoreCall<'_>,
    time: Duration,
    body: Option<WholeBody>,
) -> Result<StoreAnswer, RequestFailure> {
    let body = match (call.body(), body) {
        (Some(StoreBody { checksum, .. }), Some(whole)) => {
            let received = ObjectBody::received(whole.bytes.clone(), checksum);
            let received = received.ok_or_else(|| {
                let why =
                    "the bytes that reached the node are not those that the mount has sent: their checksum differs";
                RequestFailure::transient(ErrorKind::Corrupt, why.to_owned())
            })?;
            Some((received, whole))
        }
        _ => None,
    };
    requests.send(time, async |BucketSides { reads, writes }| {
        Ok(match call {
            StoreCall::Head { key } => object_answer(writes.head_all(key).await?),
            StoreCall::List { prefix, token, is_folded: false, .. } => {
                page_answer(writes.list_below(prefix, token).await?)
            }
            StoreCall::List { prefix, token, max, .. } => page_answer(reads.list(prefix, token, max as usize).await?),
            StoreCall::Put { key, attributes, condition, .. } => {
                let Some((received, _)) = &body else { return Err(no_bytes()) };
                let attributes = attributes_of(&attributes);
                text_answer(writes.put(key, received.clone(), &attributes, &condition_of(condition)).await?)
            }
            StoreCall::BeginUpload { key, attributes } => {
                text_answer(writes.begin_upload(key, &attributes_of(&attributes)).await?)
            }
            StoreCall::UploadPart { key, upload, number, .. } => {
                let Some((received, _)) = &body else { return Err(no_bytes()) };
                text_answer(writes.upload_part(key, upload, number, received.clone()).await?)
            }
            StoreCall::CopyPart { key, upload, number, source, from, to } => {
                text_answer(writes.copy_part(key, upload, number, source_of(source), from..to).await?)
            }
            StoreCall::Complete { key, upload, condition, .. } => {
                let Some((received, _)) = &body else { return Err(no_bytes()) };
                let parts = UploadParts::decode(received.bytes())
                    .map_err(|error| RequestFailure { error: error.into(), advice: RetryHint::AfterPause })?;
                let parts: Vec<UploadedPart> = parts
                    .0
                    .into_iter()
                    .map(|(number, etag)| UploadedPart { number, etag: etag.into_string() })
                    .collect();
                let progress = AnswerProgress::default();
                text_answer(writes.complete(key, upload, &parts, &condition_of(condition), &progress).await?)
            }
            StoreCall::Abort { key, upload } => {
                writes.abort(key, upload).await?;
                StoreAnswer::Done
            }
            StoreCall::Copy { source, key, attributes, condition } => {
                let attributes = attributes.as_ref().map(attributes_of);
                text_answer(writes.copy(source_of(source), key, attributes.as_ref(), &condition_of(condition)).await?)
            }
            StoreCall::Delete { key, condition } => {
                writes.delete(key, &condition_of(condition)).await?;
                StoreAnswer::Done
            }
            StoreCall::Describe | StoreCall::Get { .. } | StoreCall::Piece { .. } => return Err(no_bytes()),
        })
    })
}

fn text_answer(text: String) -> StoreAnswer {
    StoreAnswer::Text(text.into())
}

fn no_bytes() -> RequestFailure {
    RequestFailure::fatal(ErrorKind::Invalid, "a request without its bytes".to_owned())
}

fn source_of(source: StoreSource<'_>) -> CopySource<'_> {
    CopySource { key: source.key, etag: source.etag }
}

fn condition_of(condition: StoreCondition<'_>) -> WriteCondition {
    match condition {
        StoreCondition::None => WriteCondition::None,
        StoreCondition::Absent => WriteCondition::Absent,
        StoreCondition::Version(etag) => WriteCondition::Version(etag.to_owned()),
    }
}

fn attributes_of(attributes: &StoreAttributes<'_>) -> ObjectAttributes {
    let content = pairs(attributes.content).filter_map(|(name, value)| {
        let known = CONTENT_HEADERS.iter().find(|known| **known == name)?;
        Some((*known, value.to_owned()))
    });
    ObjectAttributes {
        content: content.collect(),
        user: pairs(attributes.user).map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        storage_class: attributes.storage_class.map(str::to_owned),
    }
}

/// Texts in pairs.
fn pairs(texts: TextList<'_>) -> impl Iterator<Item = (&str, &str)> {
    let mut texts = texts.iter();
    std::iter::from_fn(move || Some((texts.next()?, texts.next()?)))
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn object_of(object: RawObject) -> StoreObject {
    StoreObject {
        key: object.key.into(),
        size: object.size,
        mtime_s: seconds(object.mtime),
        etag: object.etag.map(Into::into),
    }
}

fn object_answer(stored: StoredObject) -> StoreAnswer {
    let StoredObject { raw, attributes } = stored;
    let content = attributes.content.into_iter().flat_map(|(name, value)| [name.into(), value.into()]);
    let user = attributes.user.into_iter().flat_map(|(name, value)| [name.into(), value.into()]);
    let storage_class = attributes.storage_class.map(Into::into);
    StoreAnswer::Object(object_of(raw), content.collect(), user.collect(), storage_class)
}

fn page_answer(page: RawPage) -> StoreAnswer {
    let prefixes = page.prefixes.into_iter().map(Into::into).collect();
    StoreAnswer::Page(page.objects.into_iter().map(object_of).collect(), prefixes, page.next.map(Into::into))
}

fn failure_answer(failure: RequestFailure) -> StoreAnswer {
    let retry = match failure.advice {
        RetryHint::Never => StoreRetry::Never,
        RetryHint::AfterPause => StoreRetry::AfterPause,
        RetryHint::AfterRestart => StoreRetry::AfterRestart,
        RetryHint::AtOnce => StoreRetry::AtOnce,
        RetryHint::SlowDown(pause) => StoreRetry::SlowDown(pause.map(|pause| pause.as_millis() as u64)),
    };
    StoreAnswer::Failed(failure.error, retry)
}
