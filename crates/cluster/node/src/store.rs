//! Sends the requests of a mount to the store of a bucket: each once, unchanged, with this node's credentials. Knows keys and
//! bytes, and neither files nor folders; the mount decides what follows after a failure or a lost answer.
//!
//! | a request | then |
//! |---|---|
//! | names a key that is not below the source | is refused |
//! | is no read of the store, at a node without `--writable` | is refused |
//! | has all bytes | is sent to the store; the answer is the store's |
//! | has the first bytes | waits for memory for all bytes; the others follow in order |
//! | has further bytes | the bytes are added; with the last bytes the change is sent to the store |
//! | has made an object, or removes one | its name counts as made, or as free |
//! | has bytes with another checksum than the mount's | fails, and the mount repeats the change |
//! | ends an upload | is sent to the store; the mount asks again and again until there is an answer |
//! | names the transfers of a new object | the cache makes blocks of the object from the bytes of these |

mod assembly;
mod change_bytes;

use crate::CacheNode;
use crate::path_locks::PathLocks;
use assembly::Assemblies;
use change_bytes::{ChangeBytes, ChangesMemory};
use futures::StreamExt as _;
use parking_lot::{Mutex, RwLock};
use spurline_cache::{Cache, SentRange};
use spurline_object_store::{
    AnswerProgress, BucketSides, CopySource, ObjectAttributes, ObjectBody, RawObject, RawPage, RequestFailure,
    RetryHint, SourceRequests, StoredObject, UploadedPart, WriteCondition,
};
use spurline_proto::{
    AnswerBody as _, FrameError, MAX_PAYLOAD, SentParts, StoreAnswer, StoreAttributes, StoreBody, StoreBytes,
    StoreCall, StoreCondition, StoreObject, StoreRequest, StoreRetry, StoreSettings, StoreSource, TextList,
    UploadParts, VolumeId,
};
use spurline_transport::Responder;
use spurline_types::{CONTENT_HEADERS, Error, ErrorKind, ObjectRef, Result, Version};
use spurline_volume::Volume as _;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

/// Opens the requests below a source.
pub type OpenRequests = dyn Fn(&str) -> Result<SourceRequests> + Send + Sync;

/// Bytes of a change are dropped when no further bytes come for this long: the mount has given the change up, or has ended.
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
    transfers: Mutex<HashMap<u64, StoreChange>>,
    memory: Arc<ChangesMemory>,
    assemblies: Assemblies,
    /// The node keeps staged files now.
    stages: AtomicBool,
}

/// The requests that this node accepts.
struct AcceptedRequests {
    /// How mounts change the stores; `None` for a node that only reads.
    settings: Option<StoreSettings>,
    open: Box<OpenRequests>,
}

/// A change whose bytes arrive.
struct StoreChange {
    volume: VolumeId,
    time: Duration,
    call: Vec<u8>,
    bytes: ChangeBytes,
    last_piece: Instant,
}

impl StoreService {
    pub fn accept(&self, settings: Option<StoreSettings>, open: Box<OpenRequests>) {
        // Only the first call has an effect.
        let _ = self.accepted.set(AcceptedRequests { settings, open });
    }

    fn describe(&self, requests: &SourceRequests) -> Result<StoreAnswer> {
        let settings = self.accepted.get().and_then(|accepted| accepted.settings).ok_or_else(|| no_bytes().error)?;
        let settings = StoreSettings { stages: self.stages.load(Ordering::Relaxed), ..settings };
        Ok(StoreAnswer::Described(requests.describe().into(), settings))
    }

    /// Drops what mounts have left behind.
    pub fn drop_idle(&self, now: Instant) {
        self.transfers.lock().retain(|_, change| now.saturating_duration_since(change.last_piece) < PIECE_IDLE);
        self.assemblies.drop_idle(now, PIECE_IDLE);
    }

    /// Takes bytes of a change; the change, once all bytes are there.
    fn take_bytes(&self, mut change: StoreChange, piece: &[u8]) -> Result<Option<StoreChange>, RequestFailure> {
        let added = change.bytes.append(piece, Instant::now() + change.time);
        added.map_err(|error| match error.kind() {
            ErrorKind::Invalid => RequestFailure { error, advice: RetryHint::Never },
            _ => RequestFailure { error, advice: RetryHint::AfterPause },
        })?;
        if change.bytes.filled() == change.bytes.len() {
            return Ok(Some(change));
        }
        change.last_piece = Instant::now();
        self.transfers.lock().insert(change.bytes.transfer(), change);
        Ok(None)
    }

    /// The change whose bytes go on at `offset`.
    fn find_change(&self, transfer: u64, offset: u64) -> Result<StoreChange, RequestFailure> {
        let mut transfers = self.transfers.lock();
        let fits = transfers.get(&transfer).is_some_and(|change| change.bytes.filled() == offset);
        fits.then(|| transfers.remove(&transfer)).flatten().ok_or_else(|| {
            let why =
                "the node does not have the bytes before this piece: it was started again, or they came too slowly";
            RequestFailure::transient(ErrorKind::Unavailable, why.to_owned())
        })
    }
}

impl CacheNode {
    /// Accepts requests for the stores of buckets, from mounts that write there by `settings`, or with `None` only reads; `open` opens the
    /// requests below a source. Only the first call has an effect.
    pub fn accept_store_requests(&self, settings: Option<StoreSettings>, open: Box<OpenRequests>) {
        self.store.accept(settings, open);
    }

    /// Whether this node keeps staged files now, as mounts learn at their start.
    pub fn set_stages(&self, stages: bool) {
        self.store.stages.store(stages, Ordering::Relaxed);
    }

    fn requests_of(&self, volume: VolumeId, call: &StoreCall<'_>) -> Result<Arc<SourceRequests>> {
        let cache = self.volume_by_id(volume)?;
        let takes_changes = self.store.accepted.get().is_some_and(|accepted| accepted.settings.is_some());
        if !takes_changes && !call.is_read() {
            return Err(self.takes_no_changes(cache.source()));
        }
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
        let requests = self.requests_of(request.volume, &request.call)?;
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

    /// Waits for memory for the bytes of a change.
    fn begin_change(
        &self,
        cache: &Cache,
        request: &StoreRequest<'_>,
        body: StoreBody,
    ) -> Result<StoreChange, RequestFailure> {
        let time = time_of(request.time_ms);
        let deadline = Instant::now() + time;
        let memory = &self.store.memory;
        let mut waiting = None;
        loop {
            let now = Instant::now();
            self.store.drop_idle(now);
            let until = if waiting.is_some() { deadline.min(now + MEMORY_CHECK) } else { now };
            let reserved = memory.reserve(&self.shared.tier, self.shared.block_size, cache.source(), body, until);
            if let Some(bytes) = reserved {
                let call = request.call.to_bytes();
                return Ok(StoreChange { volume: request.volume, time, call, bytes, last_piece: Instant::now() });
            }
            waiting = waiting.or_else(|| memory.admit_waiting(&self.shared.tier, request.payload.len()));
            if waiting.is_none() || Instant::now() >= deadline {
                let why = "the node has no memory for the bytes now: too many changes wait for the store";
                return Err(RequestFailure::transient(ErrorKind::Throttled, why.to_owned()));
            }
        }
    }

    /// Sends a request that reads no bytes to the store, once all bytes are there.
    fn answer_store(
        &self,
        requests: &Arc<SourceRequests>,
        request: &StoreRequest<'_>,
        responder: &mut dyn Responder,
    ) -> Result<Result<StoreAnswer, RequestFailure>> {
        let cache = self.volume_by_id(request.volume)?;
        let begun = match request.call {
            StoreCall::Await { transfer } => return Ok(self.store.assemblies.wait_outcome(transfer)),
            StoreCall::NoteSent { key, etag, size } => {
                if let Some(path) = requests.readable_path(key) {
                    let ranges = sent_ranges(SentParts::decode(request.payload)?);
                    note_sent(&cache, path, etag, size, ranges)?;
                }
                return Ok(Ok(StoreAnswer::Done));
            }
            StoreCall::Piece { transfer, offset } => self.store.find_change(transfer, offset),
            call => match call.body() {
                Some(body) => self.begin_change(&cache, request, body),
                None => {
                    if !call.is_query() {
                        // As late as possible: what stops this process between here and the request delays the change.
                        responder.check_reader()?;
                    }
                    let sent = send_call(requests, call, time_of(request.time_ms), None, &AnswerProgress::default());
                    note_names(self.writes.path_locks(), requests, request.volume, &call, &sent);
                    return Ok(sent);
                }
            },
        };
        let change = match begun.and_then(|change| self.store.take_bytes(change, request.payload)) {
            Ok(Some(change)) if change.volume == request.volume => change,
            Ok(Some(_)) => return Err(Error::new(ErrorKind::Invalid, "a piece of another volume")),
            Ok(None) => return Ok(Ok(StoreAnswer::Taken)),
            Err(failure) => return Ok(Err(failure)),
        };
        responder.check_reader()?;
        self.send_change(&cache, requests, change)
    }

    /// Sends a change with all bytes to the store. The bytes of an object or a part stay in memory.
    fn send_change(
        &self,
        cache: &Cache,
        requests: &Arc<SourceRequests>,
        change: StoreChange,
    ) -> Result<Result<StoreAnswer, RequestFailure>> {
        let StoreChange { call: encoded, time, mut bytes, volume, .. } = change;
        let call = StoreCall::from_bytes(&encoded)?;
        if matches!(call, StoreCall::Complete { .. }) {
            let requests = Arc::clone(requests);
            let path_locks = Arc::clone(self.writes.path_locks());
            return Ok(self.store.assemblies.begin(bytes.transfer(), move |progress| {
                let call = StoreCall::from_bytes(&encoded).map_err(undecodable)?;
                let sent = send_call(&requests, call, time, Some(&mut bytes), progress);
                note_names(&path_locks, &requests, volume, &call, &sent);
                sent
            }));
        }
        let sent = send_call(requests, call, time, Some(&mut bytes), &AnswerProgress::default());
        note_names(self.writes.path_locks(), requests, volume, &call, &sent);
        let Ok(StoreAnswer::Text(etag)) = &sent else { return Ok(sent) };
        let transfer = bytes.transfer();
        let len = bytes.len();
        // Of a part, the mount knows the version at the end of the upload, which may also copy the part from a hidden object.
        if bytes.stay()
            && let StoreCall::Put { key, .. } = call
            && let Some(path) = requests.readable_path(key)
        {
            let range = SentRange { offset: 0, len, transfer, node: self.name().into() };
            note_sent(cache, path, etag, len, vec![range])?;
        }
        Ok(sent)
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
        let read = requests.send(time, &AnswerProgress::default(), async |BucketSides { reads, .. }| {
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

/// Notes which transfers have the bytes of a new object.
fn note_sent(cache: &Cache, path: &str, etag: &str, size: u64, ranges: Vec<SentRange>) -> Result<()> {
    let object = ObjectRef::new(cache.source(), path.as_bytes(), Version::new(etag), size);
    object.check_block_count(cache.block_size())?;
    if size > 0 {
        cache.note_sent(&object, ranges);
    }
    Ok(())
}

/// A request has made an object, or may have removed one: what that means for the name.
fn note_names(
    path_locks: &PathLocks,
    requests: &SourceRequests,
    volume: VolumeId,
    call: &StoreCall<'_>,
    sent: &Result<StoreAnswer, RequestFailure>,
) {
    match call {
        StoreCall::Put { key, .. } | StoreCall::Complete { key, .. } | StoreCall::Copy { key, .. } if sent.is_ok() => {
            if let Some(path) = requests.readable_path(key) {
                path_locks.note_made(volume.0, path.as_bytes(), Instant::now());
            }
        }
        StoreCall::Delete { key, .. } => {
            if let Some(path) = requests.readable_path(key) {
                path_locks.note_removed(volume.0, path.as_bytes());
            }
        }
        _ => {}
    }
}

/// The ranges of an object that transfers have.
fn sent_ranges(sent: SentParts) -> Vec<SentRange> {
    let nodes: Vec<Arc<str>> = sent.nodes.into_iter().map(Arc::from).collect();
    let ranges = sent.parts.into_iter().filter_map(|part| {
        let node = Arc::clone(nodes.get(part.node as usize)?);
        Some(SentRange { offset: part.offset, len: part.len, transfer: part.transfer, node })
    });
    ranges.collect()
}

/// Sends a request to the store.
fn send_call(
    requests: &SourceRequests,
    call: StoreCall<'_>,
    time: Duration,
    bytes: Option<&mut ChangeBytes>,
    progress: &AnswerProgress,
) -> Result<StoreAnswer, RequestFailure> {
    let body = match (call.body(), bytes) {
        (Some(StoreBody { checksum, .. }), Some(bytes)) => {
            let received = ObjectBody::received(bytes.pieces(), checksum);
            Some(received.ok_or_else(|| {
                let why =
                    "the bytes that reached the node are not those that the mount has sent: their checksum differs";
                RequestFailure::transient(ErrorKind::Corrupt, why.to_owned())
            })?)
        }
        _ => None,
    };
    requests.send(time, progress, async |BucketSides { reads, writes }| {
        Ok(match call {
            StoreCall::Head { key } => object_answer(writes.head_all(key).await?),
            StoreCall::List { prefix, token, is_folded: false, .. } => {
                page_answer(writes.list_below(prefix, token).await?)
            }
            StoreCall::List { prefix, token, max, .. } => page_answer(reads.list(prefix, token, max as usize).await?),
            StoreCall::Put { key, attributes, condition, .. } => {
                let Some(received) = &body else { return Err(no_bytes()) };
                let attributes = attributes_of(&attributes);
                text_answer(writes.put(key, received.clone(), &attributes, &condition_of(condition)).await?)
            }
            StoreCall::BeginUpload { key, attributes } => {
                text_answer(writes.begin_upload(key, &attributes_of(&attributes)).await?)
            }
            StoreCall::UploadPart { key, upload, number, .. } => {
                let Some(received) = &body else { return Err(no_bytes()) };
                text_answer(writes.upload_part(key, upload, number, received.clone()).await?)
            }
            StoreCall::CopyPart { key, upload, number, source, from, to } => {
                text_answer(writes.copy_part(key, upload, number, source_of(source), from..to).await?)
            }
            StoreCall::Complete { key, upload, condition, .. } => {
                let Some(received) = &body else { return Err(no_bytes()) };
                let parts = UploadParts::decode(&received.bytes()).map_err(undecodable)?;
                let parts: Vec<UploadedPart> = parts
                    .0
                    .into_iter()
                    .map(|(number, etag)| UploadedPart { number, etag: etag.into_string() })
                    .collect();
                text_answer(writes.complete(key, upload, &parts, &condition_of(condition), progress).await?)
            }
            StoreCall::Abort { key, upload } => {
                writes.abort(key, upload).await?;
                StoreAnswer::Done
            }
            StoreCall::Copy { source, key, attributes, condition } => {
                let attributes = attributes.as_ref().map(attributes_of);
                let condition = condition_of(condition);
                text_answer(writes.copy(source_of(source), key, attributes.as_ref(), &condition, time).await?)
            }
            StoreCall::Delete { key, condition } => {
                writes.delete(key, &condition_of(condition)).await?;
                StoreAnswer::Done
            }
            StoreCall::Describe
            | StoreCall::Get { .. }
            | StoreCall::Piece { .. }
            | StoreCall::Await { .. }
            | StoreCall::NoteSent { .. } => return Err(no_bytes()),
        })
    })
}

fn text_answer(text: String) -> StoreAnswer {
    StoreAnswer::Text(text.into())
}

fn undecodable(error: FrameError) -> RequestFailure {
    RequestFailure { error: error.into(), advice: RetryHint::AfterPause }
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
