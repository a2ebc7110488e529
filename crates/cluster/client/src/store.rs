//! The store of a bucket, reached through the nodes of a group: the writer of a mount sends requests here, and nodes send the requests on
//! with the nodes' credentials. A single attempt for each request: repeating is the writer's business. Knows keys and bytes, and neither
//! files nor folders.
//!
//! | a request | goes to |
//! |---|---|
//! | a part of an upload | the node whose turn it is, by the number of the part: the parts of a file leave over the links of all nodes |
//! | any other | the home of the key |
//! | one that only reads, while no other node answers | a node without `--writable` |
//!
//! | a node | then |
//! |---|---|
//! | can't be reached, refuses this mount, or is of an older release | the next node gets the request |
//! | got the request, and gives no answer | the answer is lost: the writer finds out what has happened, and repeats |
//! | got a request that changes nothing, and gives no answer | the next node gets the request |
//! | was not seen before, beside others | first shows that its store is the same: the node ends an upload that another node has begun |
//! | takes no changes | goes last, and has nothing to show: what this mount has learned there is a condition of later changes |

mod proof;
mod sent_notes;

use crate::members::MembersSnapshot;
use crate::peer::{GroupPeer, PeerFailure, landing_address};
use crate::placement::{FIRST_HOLDERS, WantedBlock};
use crate::remote::{GroupClient, GroupVolume};
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use proof::KnownProcess;
use sent_notes::{SentBytes, SentNotes, SentObject};
use spurline_object_store::{
    AnswerProgress, CopySource, ObjectAttributes, ObjectBackend, ObjectBody, ObjectWriteBackend, RawBody, RawObject,
    RawPage, RequestFailure, RetryHint, SourceLocation, StoredObject, UploadedPart, WriteCondition, assembly_time,
    transfer_time,
};
use spurline_proto::{
    AnswerBody as _, MAX_WRITE, MIN_STORE_VERSION, NodeRequest, StoreAnswer, StoreAttributes, StoreBody, StoreBytes,
    StoreCall, StoreCondition, StoreObject, StoreRequest, StoreRetry, StoreSettings, StoreSource, TextList,
    UploadParts, WelcomeAnswer,
};
use spurline_sys::random;
use spurline_transport::CallError;
use spurline_types::{CONTENT_HEADERS, Error, ErrorKind, ObjectId, Result, RetryAdvice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The answer of a node whose store gives none comes within this time.
const ANSWER_MARGIN: Duration = Duration::from_secs(5);
/// A note that a node does not take within this time is lost.
const NOTE_TIME: Duration = Duration::from_secs(5);
type Answer<T> = std::result::Result<T, RequestFailure>;

/// The store of a bucket behind the nodes of a group.
pub struct RemoteStore {
    link: Arc<StoreLink>,
    /// The server and the bucket, for messages.
    description: String,
    settings: StoreSettings,
}

/// The nodes, and what all requests need of the source.
struct StoreLink {
    client: Arc<GroupClient>,
    /// The source's prefix with a trailing slash, or empty.
    root: String,
    /// How long a request without bytes takes at most.
    timeout: Duration,
    /// The processes that have the same store.
    proven: RwLock<Vec<KnownProcess>>,
    /// The processes that take no changes.
    readers: RwLock<Vec<KnownProcess>>,
    /// Held during a proof.
    proving: Mutex<()>,
    /// Which nodes have the bytes of new objects.
    notes: SentNotes,
}

impl GroupVolume {
    /// The store behind the group's source, with `timeout` for each request.
    ///
    /// # Errors
    /// `ReadOnly` when the nodes take no changes, `Unsupported` when the nodes are older or serve a directory; the nodes' error.
    pub fn open_store(&self, timeout: Duration) -> Result<RemoteStore> {
        RemoteStore::connect(Arc::clone(self.shared_client()), timeout)
    }
}

impl RemoteStore {
    fn connect(client: Arc<GroupClient>, timeout: Duration) -> Result<RemoteStore> {
        let source = SourceLocation::parse(client.source())?;
        let root = if source.prefix().is_empty() { String::new() } else { format!("{}/", source.prefix()) };
        let link = Arc::new(StoreLink {
            client,
            root,
            timeout,
            proven: RwLock::default(),
            readers: RwLock::default(),
            proving: Mutex::default(),
            notes: SentNotes::default(),
        });
        let attempt = StoreAttempt::new(&link, link.home_of(""), &StoreCall::Describe, Bytes::new());
        match attempt.run() {
            Ok(NodeAnswer { answer: StoreAnswer::Described(text, settings), .. }) => {
                Ok(RemoteStore { link, description: format!("{text}, through nodes,"), settings })
            }
            Ok(other) => Err(unexpected(&other.answer).error),
            Err(failure) => Err(failure.error),
        }
    }

    /// How mounts change the bucket, by the flags of the node that has answered first.
    pub fn settings(&self) -> StoreSettings {
        self.settings
    }

    /// Sends a request to the home of the key.
    async fn send(&self, key: &str, call: StoreCall<'_>) -> Answer<StoreAnswer> {
        self.send_work(key, call, Duration::ZERO).await
    }

    /// As [`Self::send`], for a request that the store may work on for `work_time`.
    async fn send_work(&self, key: &str, call: StoreCall<'_>, work_time: Duration) -> Answer<StoreAnswer> {
        let attempt = StoreAttempt::new(&self.link, self.link.home_of(key), &call, Bytes::new());
        let attempt = StoreAttempt { time: attempt.time + work_time, ..attempt };
        attempt.run_apart().await.map(|answered| answered.answer)
    }
}

impl StoreLink {
    /// The path of a key below the source.
    fn path_of<'a>(&self, key: &'a str) -> &'a str {
        key.strip_prefix(&self.root).unwrap_or(key)
    }

    /// The block whose owner is the home of this key.
    fn home_of(&self, key: &str) -> WantedBlock {
        WantedBlock::of_block(ObjectId::from_text(self.client.source(), self.path_of(key).as_bytes(), ""), 0, 1)
    }

    /// The nodes that a request goes to, in order. Parts of an object take turns.
    fn rank_nodes(&self, view: &MembersSnapshot, place: WantedBlock, turn: usize) -> Vec<u32> {
        let mut ranked = Vec::new();
        let count = if turn == 0 && self.readers.read().is_empty() { FIRST_HOLDERS } else { view.members().len() };
        view.find_holders(place, count, &mut ranked);
        ranked.sort_by_key(|index| self.is_reader(&view.members()[*index as usize].name));
        if turn > 0 {
            // Nodes of weight 0 come behind those with a share, and have no turn.
            let members = ranked.iter().map(|index| &view.members()[*index as usize]);
            let sharing = members.take_while(|member| member.weight > 0 && !self.is_reader(&member.name)).count();
            ranked[..sharing].rotate_left(turn % sharing.max(1));
        }
        ranked
    }

    /// Starts the thread that sends notes, if there is work and no thread.
    fn start_notes(self: &Arc<Self>) {
        if self.notes.claim_thread() {
            let link = Arc::clone(self);
            let thread = std::thread::Builder::new().name("sent-notes".to_owned());
            if let Err(error) = thread.spawn(move || link.send_notes()) {
                tracing::warn!(
                    "the thread for notes to nodes can't be started, and new files are read from the store: {error}"
                );
            }
        }
    }

    /// Sends notes until there is none for a while.
    fn send_notes(self: &Arc<Self>) {
        while let Some(object) = self.notes.wait_next() {
            self.send_note(&object);
        }
    }

    /// Sends a note to the nodes that hold blocks of the object.
    fn send_note(self: &Arc<Self>, object: &SentObject) {
        let SentObject { key, etag, size, .. } = object;
        let view = self.client.members().snapshot();
        let view: &MembersSnapshot = &view;
        let payloads = object.payloads(self.frame_len());
        let call = StoreCall::NoteSent { key, etag, size: *size };
        let attempt = StoreAttempt::new(self, self.home_of(key), &call, Bytes::new());
        // A node that has another store has other versions, too.
        let attempt = StoreAttempt { needs_proof: false, time: NOTE_TIME, ..attempt };
        for index in object.receivers(&self.client, view, self.path_of(key).as_bytes()) {
            let peer = view.peer(index);
            let sent = payloads.iter().try_for_each(|payload| {
                attempt.exchange(peer, None, &call, payload, &mut [], Instant::now() + NOTE_TIME).map(drop)
            });
            if sent.is_err() {
                tracing::debug!(peer = peer.name(), key, "a note of sent bytes is lost: reads go to the store");
            }
        }
    }

    /// Most bytes of a frame: what fits into a buffer of a node.
    fn frame_len(&self) -> usize {
        usize::try_from(self.client.block_size()).unwrap_or(MAX_WRITE).min(MAX_WRITE)
    }
}

/// An attempt of a request, on a thread that waits for nodes.
struct StoreAttempt {
    link: Arc<StoreLink>,
    place: WantedBlock,
    /// The number of a part, or 0.
    turn: usize,
    /// The request.
    call: Vec<u8>,
    /// The bytes of the request.
    payload: Bytes,
    /// Most bytes of the answer.
    room: usize,
    time: Duration,
    /// Only a process gets the request that has the store of the others.
    needs_proof: bool,
    /// How far the store is with the answer.
    progress: AnswerProgress,
    /// No answer is wanted any more.
    is_dropped: Arc<AtomicBool>,
}

/// Tells the thread of an attempt when the future ends.
struct DropNotice(Arc<AtomicBool>);

impl Drop for DropNotice {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// Why a node gave no answer.
enum AttemptFailure {
    /// The node did not execute the request; another node may.
    NotSent(Error),
    /// The node may have executed the request.
    Lost(Error),
    /// This process has not shown yet that it has the store of the others.
    Unproven(u64),
}

/// The answer of a node to a request.
struct NodeAnswer {
    answer: StoreAnswer,
    bytes: Vec<u8>,
    node: Box<str>,
}

struct FrameAnswer {
    answer: StoreAnswer,
    payload_len: usize,
    /// The process that gave it.
    instance: u64,
}

impl StoreAttempt {
    fn new(link: &Arc<StoreLink>, place: WantedBlock, call: &StoreCall<'_>, payload: Bytes) -> StoreAttempt {
        StoreAttempt {
            link: Arc::clone(link),
            place,
            turn: 0,
            call: call.to_bytes(),
            time: link.timeout + transfer_time(payload.len() as u64),
            payload,
            needs_proof: link.client.members().snapshot().members().len() > 1,
            room: 0,
            progress: AnswerProgress::default(),
            is_dropped: Arc::default(),
        }
    }

    /// Runs on a thread that may wait for nodes.
    async fn run_apart(self) -> Answer<NodeAnswer> {
        let _notice = DropNotice(Arc::clone(&self.is_dropped));
        let ran = tokio::task::spawn_blocking(move || self.run()).await;
        ran.unwrap_or_else(|_| Err(RequestFailure::transient(ErrorKind::Unavailable, "the mount ends".to_owned())))
    }

    fn run(&self) -> Answer<NodeAnswer> {
        let call = StoreCall::from_bytes(&self.call).map_err(|error| failure_of(error.into()))?;
        let deadline = Instant::now() + self.time + ANSWER_MARGIN;
        let mut landing = vec![0; self.room];
        let view = self.link.client.members().snapshot();
        let view: &MembersSnapshot = &view;
        let mut unsent: Option<Error> = None;
        let mut has_readers = false;
        for index in self.link.rank_nodes(view, self.place, self.turn) {
            let peer = view.peer(index);
            let answered = self.run_at(peer, &call, &mut landing, deadline);
            match answered {
                Ok(FrameAnswer { answer: StoreAnswer::Failed(error, retry), .. }) => {
                    return Err(RequestFailure { error, advice: hint_of(retry) });
                }
                Ok(FrameAnswer { answer, payload_len, .. }) => {
                    landing.truncate(payload_len);
                    return Ok(NodeAnswer { answer, bytes: landing, node: peer.name().into() });
                }
                Err(AttemptFailure::Lost(error)) if !call.is_query() => {
                    let why = format!("node {} gave no answer to the {}: {error}", peer.name(), call.name());
                    return Err(RequestFailure::transient(error.kind(), why));
                }
                Err(AttemptFailure::Unproven(_)) => {}
                Err(AttemptFailure::Lost(error) | AttemptFailure::NotSent(error)) => {
                    has_readers |= error.kind() == ErrorKind::ReadOnly;
                    // A node that may be back soon counts more than a node that refuses.
                    if unsent.as_ref().is_none_or(is_final) {
                        unsent = Some(error.context(peer.name()));
                    }
                }
            }
            if Instant::now() >= deadline || self.is_dropped.load(Ordering::Acquire) {
                break;
            }
        }
        let unsent = unsent.unwrap_or_else(no_node);
        if has_readers && !is_final(&unsent) {
            return Err(failure_of(unsent.context("no node that takes changes can be reached")));
        }
        Err(failure_of(unsent))
    }

    /// Sends the request to a node, with all bytes.
    fn run_at(
        &self,
        peer: &GroupPeer,
        call: &StoreCall<'_>,
        landing: &mut [u8],
        deadline: Instant,
    ) -> std::result::Result<FrameAnswer, AttemptFailure> {
        let frame_len = self.link.frame_len();
        let first_len = self.payload.len().min(frame_len);
        let first = &self.payload[..first_len];
        let mut answered = match self.exchange(peer, None, call, first, landing, deadline) {
            Err(AttemptFailure::Unproven(instance)) => {
                self.link.prove(peer, instance).map_err(AttemptFailure::NotSent)?;
                self.exchange(peer, Some(instance), call, first, landing, deadline)?
            }
            answered => answered?,
        };
        let Some(StoreBody { transfer, .. }) = call.body() else { return Ok(answered) };
        let mut offset = first_len;
        while answered.answer == StoreAnswer::Taken {
            if self.is_dropped.load(Ordering::Acquire) || offset >= self.payload.len() {
                let why = "its bytes were not all sent";
                return Err(AttemptFailure::Lost(Error::new(ErrorKind::Unavailable, why)));
            }
            let end = self.payload.len().min(offset + frame_len);
            let piece = StoreCall::Piece { transfer, offset: offset as u64 };
            let process = Some(answered.instance);
            answered = match self.exchange(peer, process, &piece, &self.payload[offset..end], landing, deadline) {
                // The first bytes are lost with the node.
                Err(AttemptFailure::NotSent(error)) => return Err(AttemptFailure::Lost(error)),
                answered => answered?,
            };
            offset = end;
        }
        self.await_end(peer, transfer, answered, deadline)
    }

    /// Asks for the answer of a store that takes longer, as long as there is time or the store makes progress.
    fn await_end(
        &self,
        peer: &GroupPeer,
        transfer: u64,
        mut answered: FrameAnswer,
        mut deadline: Instant,
    ) -> std::result::Result<FrameAnswer, AttemptFailure> {
        while let StoreAnswer::Working(quiet_ms) = answered.answer {
            if let Some(quiet_ms) = quiet_ms
                && let Some(last) = Instant::now().checked_sub(Duration::from_millis(quiet_ms))
            {
                self.progress.note_bytes_at(last);
                deadline = deadline.max(last + self.link.timeout + ANSWER_MARGIN);
            }
            if self.is_dropped.load(Ordering::Acquire) || Instant::now() >= deadline {
                let why = "the store makes no progress";
                return Err(AttemptFailure::Lost(Error::new(ErrorKind::Timeout, why)));
            }
            let call = StoreCall::Await { transfer };
            answered = match self.exchange(peer, Some(answered.instance), &call, &[], &mut [], deadline) {
                // The request is lost with the process.
                Err(AttemptFailure::NotSent(error)) => return Err(AttemptFailure::Lost(error)),
                answered => answered?,
            };
        }
        Ok(answered)
    }

    /// Sends a frame to a node, over a single path.
    fn exchange(
        &self,
        peer: &GroupPeer,
        process: Option<u64>,
        call: &StoreCall<'_>,
        payload: &[u8],
        landing: &mut [u8],
        deadline: Instant,
    ) -> std::result::Result<FrameAnswer, AttemptFailure> {
        let near = landing_address(if payload.is_empty() { &*landing } else { payload });
        let time_ms = u32::try_from(self.time.as_millis()).unwrap_or(u32::MAX);
        let mut body = Vec::new();
        let mut broken: Option<Error> = None;
        let mut unproven = None;
        let answered = peer.attempt_write(near, process, deadline, &mut |lease, until| {
            // On another path the request would be a second one.
            if let Some(error) = broken.as_ref().filter(|_| !call.is_query()) {
                return Err(CallError::Answered(error.clone()));
            }
            let welcome = lease.welcome();
            check_release(welcome).map_err(CallError::Answered)?;
            let instance = welcome.instance;
            if self.needs_proof && !self.link.is_known(instance) {
                unproven = Some(instance);
                let why = format!("node {} has not shown that it has the store of the others", welcome.node);
                return Err(CallError::Answered(Error::new(ErrorKind::Stale, why)));
            }
            let request = NodeRequest::Store(StoreRequest { volume: welcome.volume, time_ms, call: *call, payload });
            body.clear();
            let answer = lease.call(&request, &mut body, landing, &mut |_| {}, until).inspect_err(|error| {
                if let CallError::Broken(error) = error {
                    broken = Some(error.clone());
                }
            })?;
            let decoded = StoreAnswer::decode(&body).map_err(|error| {
                let error = Error::from(error).context(format_args!("{request}: the answer can't be decoded"));
                broken = Some(error.clone());
                CallError::Answered(error)
            })?;
            Ok(FrameAnswer { answer: decoded, payload_len: answer.payload_len, instance })
        });
        answered.map_err(|failure| match (broken, unproven, failure) {
            (Some(error), ..) => AttemptFailure::Lost(error),
            (None, Some(instance), _) => AttemptFailure::Unproven(instance),
            (None, None, PeerFailure::Answered(error) | PeerFailure::Broken(error) | PeerFailure::Refused(error)) => {
                AttemptFailure::NotSent(error)
            }
        })
    }
}

/// Checks that a node sends requests to stores.
///
/// # Errors
/// `Unsupported` for an older node.
fn check_release(welcome: &WelcomeAnswer) -> Result<()> {
    if welcome.version >= MIN_STORE_VERSION {
        return Ok(());
    }
    let why = format!(
        "node {} speaks protocol version {}, and changes of a bucket by this mount need {MIN_STORE_VERSION}: the node's release \
         is older; upgrade spurline on its host, or mount without --rw",
        welcome.node, welcome.version
    );
    Err(Error::new(ErrorKind::Unsupported, why))
}

fn no_node() -> Error {
    Error::new(ErrorKind::Unavailable, "the cache group has no node: name one with --registry static:host:port")
}

/// Whether the same request would fail again at any time.
fn is_final(error: &Error) -> bool {
    error.kind().retry_advice() == RetryAdvice::Never
}

/// The failure of a request that no node has executed.
fn failure_of(error: Error) -> RequestFailure {
    let advice = if is_final(&error) { RetryHint::Never } else { RetryHint::AfterPause };
    RequestFailure { error, advice }
}

fn unexpected(answer: &StoreAnswer) -> RequestFailure {
    RequestFailure::fatal(ErrorKind::Protocol, format!("a node gave an answer of another kind: {answer:?}"))
}

fn hint_of(retry: StoreRetry) -> RetryHint {
    match retry {
        StoreRetry::Never => RetryHint::Never,
        StoreRetry::AfterPause => RetryHint::AfterPause,
        StoreRetry::AfterRestart => RetryHint::AfterRestart,
        StoreRetry::AtOnce => RetryHint::AtOnce,
        StoreRetry::SlowDown(pause_ms) => RetryHint::SlowDown(pause_ms.map(Duration::from_millis)),
    }
}

fn text_of(answer: StoreAnswer) -> Answer<String> {
    match answer {
        StoreAnswer::Text(text) => Ok(text.into_string()),
        other => Err(unexpected(&other)),
    }
}

fn done_of(answer: StoreAnswer) -> Answer<()> {
    match answer {
        StoreAnswer::Done => Ok(()),
        other => Err(unexpected(&other)),
    }
}

fn time_of(seconds: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds)).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn raw_object(object: StoreObject) -> RawObject {
    RawObject {
        key: object.key.into_string(),
        size: object.size,
        mtime: time_of(object.mtime_s),
        etag: object.etag.map(Into::into),
    }
}

fn stored_object(answer: StoreAnswer) -> Answer<StoredObject> {
    let StoreAnswer::Object(object, content, user, storage_class) = answer else { return Err(unexpected(&answer)) };
    let content = content.chunks_exact(2).filter_map(|pair| {
        let known = CONTENT_HEADERS.iter().find(|known| **known == &*pair[0])?;
        Some((*known, pair[1].to_string()))
    });
    let attributes = ObjectAttributes {
        content: content.collect(),
        user: user.chunks_exact(2).map(|pair| (pair[0].to_string(), pair[1].to_string())).collect(),
        storage_class: storage_class.map(Into::into),
    };
    Ok(StoredObject { raw: raw_object(object), attributes })
}

fn page_of(answer: StoreAnswer) -> Answer<RawPage> {
    let StoreAnswer::Page(objects, prefixes, next) = answer else { return Err(unexpected(&answer)) };
    Ok(RawPage {
        objects: objects.into_iter().map(raw_object).collect(),
        prefixes: prefixes.into_iter().map(Into::into).collect(),
        next: next.map(Into::into),
    })
}

fn condition_of(condition: &WriteCondition) -> StoreCondition<'_> {
    match condition {
        WriteCondition::None => StoreCondition::None,
        WriteCondition::Absent => StoreCondition::Absent,
        WriteCondition::Version(etag) => StoreCondition::Version(etag),
    }
}

fn source_of<'a>(from: &CopySource<'a>) -> StoreSource<'a> {
    StoreSource { key: from.key, etag: from.etag }
}

/// The encoded attributes of an object.
#[derive(Default)]
struct EncodedAttributes {
    content: Vec<u8>,
    user: Vec<u8>,
}

impl EncodedAttributes {
    fn encode<'a>(&'a mut self, attributes: &'a ObjectAttributes) -> StoreAttributes<'a> {
        let content = attributes.content.iter().flat_map(|(name, value)| [*name, value.as_str()]);
        let user = attributes.user.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]);
        StoreAttributes {
            content: TextList::new(content, &mut self.content),
            user: TextList::new(user, &mut self.user),
            storage_class: attributes.storage_class.as_deref(),
        }
    }
}

/// The description of bytes that are sent under a number of their own.
fn body_of(body: &ObjectBody) -> StoreBody {
    let len = body.pieces().iter().map(|piece| piece.len() as u64).sum();
    StoreBody { transfer: random(), len, checksum: body.checksum() }
}

impl ObjectBackend for RemoteStore {
    fn describe(&self) -> String {
        self.description.clone()
    }

    fn writes(&self) -> Option<&dyn ObjectWriteBackend> {
        Some(self)
    }

    /// Threads wait for nodes.
    fn uses_sockets(&self) -> bool {
        false
    }

    fn list<'a>(&'a self, prefix: &'a str, token: Option<&'a str>, max: usize) -> BoxFuture<'a, Answer<RawPage>> {
        let max = u32::try_from(max).unwrap_or(u32::MAX);
        async move { page_of(self.send(prefix, StoreCall::List { prefix, token, max, is_folded: true }).await?) }
            .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<RawObject>> {
        async move { Ok(stored_object(self.send(key, StoreCall::Head { key }).await?)?.raw) }.boxed()
    }

    fn get<'a>(&'a self, key: &'a str, from: u64, to: u64, etag: Option<&'a str>) -> BoxFuture<'a, Answer<RawBody>> {
        async move {
            let frame_len = self.link.frame_len();
            let room = usize::try_from(to.saturating_sub(from)).unwrap_or(frame_len).min(frame_len);
            let call = StoreCall::Get { key, from, to: from + room as u64, etag };
            let attempt = StoreAttempt::new(&self.link, self.link.home_of(key), &call, Bytes::new());
            match (StoreAttempt { room, ..attempt }).run_apart().await? {
                NodeAnswer { answer: StoreAnswer::Bytes(facts), bytes, .. } => Ok(raw_body(facts, bytes, to)),
                other => Err(unexpected(&other.answer)),
            }
        }
        .boxed()
    }
}

/// The first bytes of an answer that ends at `to`: the reader requests the rest, as after an answer that was cut.
fn raw_body(facts: StoreBytes, bytes: Vec<u8>, to: u64) -> RawBody {
    let end = facts.to.map(|end| facts.total.map_or(end, |total| end.max(to.min(total))));
    RawBody {
        etag: facts.etag.map(Into::into),
        mtime: facts.mtime_s.map(time_of),
        total: facts.total,
        range: facts.from.zip(end).map(|(from, to)| from..to),
        partial: facts.partial,
        stream: Box::pin(futures::stream::iter([Ok(Bytes::from(bytes))])),
    }
}

impl ObjectWriteBackend for RemoteStore {
    fn head_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<StoredObject>> {
        async move { stored_object(self.send(key, StoreCall::Head { key }).await?) }.boxed()
    }

    fn list_below<'a>(&'a self, prefix: &'a str, token: Option<&'a str>) -> BoxFuture<'a, Answer<RawPage>> {
        // The store decides how many names a page has.
        let call = StoreCall::List { prefix, token, max: 0, is_folded: false };
        async move { page_of(self.send(prefix, call).await?) }.boxed()
    }

    /// In as many reads as the bytes need, all of a single version.
    fn read_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<(Vec<u8>, String)>> {
        async move {
            let StoredObject { raw, .. } = self.head_all(key).await?;
            let etag = raw.etag.as_deref().map(|etag| etag.trim_matches('"').to_owned()).unwrap_or_default();
            let mut bytes = Vec::new();
            while (bytes.len() as u64) < raw.size {
                let from = bytes.len() as u64;
                let to = raw.size.min(from + MAX_WRITE as u64);
                let mut body =
                    self.get(key, from, to, Some(&etag)).await.map_err(|failure| match failure.error.kind() {
                        // Another version since the head.
                        ErrorKind::Stale => RequestFailure { advice: RetryHint::AtOnce, ..failure },
                        _ => failure,
                    })?;
                let before = bytes.len();
                while let Some(piece) = futures::StreamExt::next(&mut body.stream).await {
                    bytes.extend_from_slice(&piece?);
                }
                if bytes.len() == before {
                    let why = format!("{} ended the read of '{key}' early", self.description);
                    return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
                }
            }
            Ok((bytes, etag))
        }
        .boxed()
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: ObjectBody,
        attributes: &'a ObjectAttributes,
        condition: &'a WriteCondition,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let mut encoded = EncodedAttributes::default();
            let sent = body_of(&body);
            let call = StoreCall::Put {
                key,
                attributes: encoded.encode(attributes),
                condition: condition_of(condition),
                body: sent,
            };
            let attempt = StoreAttempt::new(&self.link, self.link.home_of(key), &call, body.bytes());
            let answered = attempt.run_apart().await?;
            let etag = text_of(answered.answer)?;
            let sent = SentBytes { node: &answered.node, transfer: sent.transfer, len: sent.len };
            self.link.notes.add_object(key, &etag, sent);
            self.link.start_notes();
            Ok(etag)
        }
        .boxed()
    }

    fn begin_upload<'a>(&'a self, key: &'a str, attributes: &'a ObjectAttributes) -> BoxFuture<'a, Answer<String>> {
        async move {
            let mut encoded = EncodedAttributes::default();
            let call = StoreCall::BeginUpload { key, attributes: encoded.encode(attributes) };
            text_of(self.send(key, call).await?)
        }
        .boxed()
    }

    fn upload_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        body: ObjectBody,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let sent = body_of(&body);
            let call = StoreCall::UploadPart { key, upload, number, body: sent };
            let attempt = StoreAttempt::new(&self.link, self.link.home_of(key), &call, body.bytes());
            let answered = StoreAttempt { turn: number as usize, ..attempt }.run_apart().await?;
            let etag = text_of(answered.answer)?;
            let sent = SentBytes { node: &answered.node, transfer: sent.transfer, len: sent.len };
            self.link.notes.add_part(upload, number, &etag, sent);
            Ok(etag)
        }
        .boxed()
    }

    fn copy_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        from: CopySource<'a>,
        range: Range<u64>,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let source = source_of(&from);
            let call = StoreCall::CopyPart { key, upload, number, source, from: range.start, to: range.end };
            let work_time = transfer_time(range.end - range.start);
            let etag = text_of(self.send_work(key, call, work_time).await?)?;
            self.link.notes.add_copied_part(upload, number, &etag, from, range);
            Ok(etag)
        }
        .boxed()
    }

    fn complete<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        parts: &'a [UploadedPart],
        condition: &'a WriteCondition,
        progress: &'a AnswerProgress,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let listed = parts.iter().map(|part| (part.number, part.etag.as_str().into())).collect();
            let mut encoded = Vec::new();
            UploadParts(listed).encode(&mut encoded);
            let list = ObjectBody::new(encoded.into());
            let call = StoreCall::Complete { key, upload, condition: condition_of(condition), body: body_of(&list) };
            let attempt = StoreAttempt::new(&self.link, self.link.home_of(key), &call, list.bytes());
            let time = attempt.time + assembly_time(parts.len());
            let attempt = StoreAttempt { time, progress: progress.clone(), ..attempt };
            let etag = text_of(attempt.run_apart().await?.answer)?;
            self.link.notes.add_upload(key, &etag, upload, parts);
            self.link.start_notes();
            Ok(etag)
        }
        .boxed()
    }

    fn abort<'a>(&'a self, key: &'a str, upload: &'a str) -> BoxFuture<'a, Answer<()>> {
        async move {
            self.link.notes.forget_upload(upload);
            done_of(self.send(key, StoreCall::Abort { key, upload }).await?)
        }
        .boxed()
    }

    fn copy<'a>(
        &'a self,
        from: CopySource<'a>,
        to: &'a str,
        attributes: Option<&'a ObjectAttributes>,
        condition: &'a WriteCondition,
        work_time: Duration,
    ) -> BoxFuture<'a, Answer<String>> {
        async move {
            let mut encoded = EncodedAttributes::default();
            let call = StoreCall::Copy {
                source: source_of(&from),
                key: to,
                attributes: attributes.map(|attributes| encoded.encode(attributes)),
                condition: condition_of(condition),
            };
            let etag = text_of(self.send_work(to, call, work_time).await?)?;
            self.link.notes.add_copy(from, to, &etag);
            self.link.start_notes();
            Ok(etag)
        }
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str, condition: &'a WriteCondition) -> BoxFuture<'a, Answer<()>> {
        async move {
            let call = StoreCall::Delete { key, condition: condition_of(condition) };
            done_of(self.send(key, call).await?)
        }
        .boxed()
    }
}
