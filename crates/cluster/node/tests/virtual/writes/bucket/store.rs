//! An object store in memory, on virtual time, below the bucket layer of each node: conditions, uploads in parts, copies, listings.
//! Requests and answers are delayed, get lost, are refused or hang, as a seed draws. Keeps all versions of each object. Knows neither
//! files nor folders.

use super::super::programs::Shared;
use crate::world::Dice;
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use spurline_object_store::{
    AnswerProgress, CopySource, ObjectAttributes, ObjectBackend, ObjectBody, ObjectWriteBackend, RawBody, RawObject,
    RawPage, RequestFailure, RetryHint, StoredObject, UploadedPart, WriteCondition,
};
use spurline_types::{Error, ErrorKind};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher as _};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// The attribute with the mark of the change that made an object.
const MARK: &str = "spurline-op";

type Answer<T> = std::result::Result<T, RequestFailure>;

/// How often requests fail, of a thousand each, and how long the others take.
#[derive(Debug, Clone, Copy, Default)]
pub struct StoreFaults {
    /// The request does not arrive.
    pub lost: u32,
    /// The request is executed, and the answer does not arrive.
    pub answer_lost: u32,
    /// HTTP 500, which says nothing about the execution.
    pub failed: u32,
    /// HTTP 503.
    pub slow_down: u32,
    /// No answer, while the request is executed soon, later, or never.
    pub hangs: u32,
    /// Longest delay of a request, and of an answer.
    pub max_delay: Duration,
}

impl StoreFaults {
    pub fn draw(dice: &mut Dice) -> StoreFaults {
        let mut rate = |most: usize| if dice.below(2) == 0 { 0 } else { dice.below(most) as u32 };
        let lost = rate(200);
        let answer_lost = rate(300);
        let failed = rate(200);
        let slow_down = rate(300);
        let hangs = rate(60);
        let max_delay = Duration::from_millis([0, 5, 50, 1000, 6000][dice.below(5)]);
        StoreFaults { lost, answer_lost, failed, slow_down, hangs, max_delay }
    }
}

/// The fate of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestFate {
    Answered,
    Lost,
    AnswerLost,
    Failed {
        executed: bool,
    },
    SlowDown,
    /// No answer for this long.
    Hangs(Duration),
    /// The process that sends it has ended.
    Ended,
}

/// A version of an object.
#[derive(Clone)]
pub struct ObjectVersion {
    pub bytes: Bytes,
    etag: String,
    mtime: SystemTime,
    attributes: ObjectAttributes,
    /// The process that made it; `None` for a stranger.
    pub writer: Option<u64>,
}

impl ObjectVersion {
    /// The mark of the change that made it.
    #[allow(dead_code, reason = "for the tests of staged objects")]
    pub fn mark(&self) -> Option<&str> {
        self.attributes.get(MARK)
    }

    fn raw(&self, key: &str) -> RawObject {
        let etag = Some(format!("\"{}\"", self.etag));
        RawObject { key: key.to_owned(), size: self.bytes.len() as u64, mtime: self.mtime, etag }
    }
}

/// An upload that is open.
struct StoreUpload {
    key: String,
    attributes: ObjectAttributes,
    parts: BTreeMap<u32, Bytes>,
}

#[derive(Default)]
struct StoreState {
    /// All versions of each key, the present one last; `None` is a removal.
    keys: BTreeMap<String, Vec<Option<ObjectVersion>>>,
    uploads: BTreeMap<String, StoreUpload>,
    last_upload: u64,
    last_process: u64,
    processes: BTreeSet<u64>,
    /// Names of objects that a request has made after the end of its process, or once more.
    made_late: BTreeSet<String>,
    /// Processes whose requests do not fail yet.
    starting: BTreeSet<u64>,
    faults: StoreFaults,
    /// The ends of some uploads take minutes, with blanks meanwhile.
    has_slow_ends: bool,
}

impl StoreState {
    fn find(&self, key: &str) -> Option<&ObjectVersion> {
        self.keys.get(key)?.last()?.as_ref()
    }

    fn get(&self, key: &str) -> Answer<&ObjectVersion> {
        self.find(key).ok_or_else(|| refused(ErrorKind::NotFound, "there is no such object"))
    }

    fn check(&self, key: &str, condition: &WriteCondition) -> Answer<()> {
        match (condition, self.find(key)) {
            (WriteCondition::None, _) | (WriteCondition::Absent, None) => Ok(()),
            (WriteCondition::Version(etag), Some(found)) if found.etag == *etag => Ok(()),
            (WriteCondition::Version(_), None) => Err(refused(ErrorKind::NotFound, "there is no such object")),
            _ => Err(refused(ErrorKind::Stale, "the condition does not hold")),
        }
    }

    fn put(&mut self, key: &str, version: ObjectVersion) -> String {
        let etag = version.etag.clone();
        let versions = self.keys.entry(key.to_owned()).or_default();
        let mark = version.attributes.get(MARK);
        let is_repeated =
            mark.is_some() && versions.iter().flatten().any(|earlier| earlier.attributes.get(MARK) == mark);
        if is_repeated || version.writer.is_some_and(|process| !self.processes.contains(&process)) {
            self.made_late.insert(key.trim_end_matches('/').to_owned());
        }
        versions.push(Some(version));
        etag
    }

    fn upload(&mut self, id: &str) -> Answer<&mut StoreUpload> {
        self.uploads.get_mut(id).ok_or_else(|| refused(ErrorKind::NotFound, "there is no such upload"))
    }

    /// The object that a copy is made from.
    fn copied(&self, key: &str, etag: Option<&str>) -> Answer<&ObjectVersion> {
        let found = self.get(key)?;
        if etag.is_some_and(|etag| etag != found.etag) {
            return Err(refused(ErrorKind::Stale, "the source of the copy is of another version"));
        }
        Ok(found)
    }

    fn list(&self, prefix: &str, token: Option<&str>, max: usize, folded: bool) -> RawPage {
        let mut page = RawPage::default();
        let mut last = String::new();
        for (key, _) in self.keys.range(prefix.to_owned()..).take_while(|(key, _)| key.starts_with(prefix)) {
            let Some(found) = self.find(key) else { continue };
            let folder = key[prefix.len()..].find('/').filter(|_| folded).map(|at| &key[..=prefix.len() + at]);
            let name = folder.unwrap_or(key);
            if token.is_some_and(|token| name <= token) || name == last {
                continue;
            }
            if page.objects.len() + page.prefixes.len() == max {
                page.next = Some(last);
                return page;
            }
            match folder {
                Some(folder) => page.prefixes.push(folder.to_owned()),
                None => page.objects.push(found.raw(key)),
            }
            last = name.to_owned();
        }
        page
    }
}

fn refused(kind: ErrorKind, why: &str) -> RequestFailure {
    RequestFailure::fatal(kind, why.to_owned())
}

fn unanswered(why: &str) -> RequestFailure {
    RequestFailure::transient(ErrorKind::Unavailable, why.to_owned())
}

/// Time between two blanks of an answer.
const BLANK_INTERVAL: Duration = Duration::from_secs(10);
/// More than a request has time for.
const BLANKS_OF_SLOW_END: u32 = 15;

/// A number for bytes: equal bytes have equal ones, as in S3.
pub fn hash_of(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn etag_of(bytes: &[u8]) -> String {
    format!("{:016x}", hash_of(bytes))
}

/// The object's times have whole seconds.
fn time_now() -> SystemTime {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("a time after 1970");
    SystemTime::UNIX_EPOCH + Duration::from_secs(now.as_secs())
}

/// The store. Cheap to clone.
#[derive(Clone)]
pub struct SimStore {
    state: Arc<Mutex<StoreState>>,
    dice: Arc<Mutex<Dice>>,
    events: Arc<Shared>,
}

impl SimStore {
    pub fn new(seed: u64, events: &Arc<Shared>) -> SimStore {
        let dice = Arc::new(Mutex::new(Dice::new(seed)));
        SimStore { state: Arc::default(), dice, events: Arc::clone(events) }
    }

    pub fn set_faults(&self, faults: StoreFaults) {
        self.state.lock().faults = faults;
    }

    pub fn make_ends_slow(&self) {
        self.state.lock().has_slow_ends = true;
    }

    /// How many blanks come before the answer to the end of an upload.
    fn blanks_before_end(&self, upload: &str) -> u32 {
        let is_slow = self.state.lock().has_slow_ends && hash_of(upload.as_bytes()).is_multiple_of(3);
        if is_slow { BLANKS_OF_SLOW_END } else { 0 }
    }

    pub fn start_process(&self) -> u64 {
        let mut state = self.state.lock();
        state.last_process += 1;
        let process = state.last_process;
        state.processes.insert(process);
        process
    }

    /// Whether requests of the process are spared from faults.
    pub fn set_starting(&self, process: u64, is_starting: bool) {
        let starting = &mut self.state.lock().starting;
        if is_starting {
            starting.insert(process)
        } else {
            starting.remove(&process)
        };
    }

    /// Later requests of the process do not reach the store.
    pub fn end_process(&self, process: u64) {
        self.state.lock().processes.remove(&process);
    }

    /// The present bytes of an object.
    pub fn content(&self, key: &str) -> Option<Bytes> {
        self.state.lock().find(key).map(|found| found.bytes.clone())
    }

    /// All versions that an object has had; `None` is a removal.
    pub fn versions(&self, key: &str) -> Vec<Option<ObjectVersion>> {
        self.state.lock().keys.get(key).cloned().unwrap_or_default()
    }

    /// Whether a request has made the object, or the folder, after the end of its process, or once more after its writer has given
    /// the answer up.
    pub fn is_made_late(&self, key: &str) -> bool {
        self.state.lock().made_late.contains(key)
    }

    /// The keys that lead to objects.
    pub fn keys(&self) -> Vec<String> {
        let state = self.state.lock();
        state.keys.keys().filter(|key| state.find(key).is_some()).cloned().collect()
    }

    /// The number of objects that were made below a prefix, and of those that are left.
    pub fn count_below(&self, prefix: &str) -> (usize, usize) {
        let state = self.state.lock();
        let made: Vec<_> = state.keys.keys().filter(|key| key.starts_with(prefix)).collect();
        (made.len(), made.iter().filter(|key| state.find(key).is_some()).count())
    }

    /// A stranger writes an object.
    pub fn put_as_stranger(&self, key: &str, bytes: Vec<u8>) {
        let etag = etag_of(&bytes);
        let attributes = ObjectAttributes::default();
        let version = ObjectVersion { bytes: bytes.into(), etag, mtime: time_now(), attributes, writer: None };
        self.state.lock().put(key, version);
    }

    /// A stranger removes an object.
    #[allow(dead_code, reason = "for the tests of staged objects")]
    pub fn remove_as_stranger(&self, key: &str) {
        let mut state = self.state.lock();
        if state.find(key).is_some() {
            state.keys.entry(key.to_owned()).or_default().push(None);
        }
    }

    fn draw_fate(&self, process: u64, delays: &mut [Duration; 2]) -> RequestFate {
        let state = self.state.lock();
        let is_running = state.processes.contains(&process);
        let faults = if state.starting.contains(&process) { StoreFaults::default() } else { state.faults };
        drop(state);
        let mut dice = self.dice.lock();
        for delay in delays {
            *delay = faults.max_delay.mul_f64(dice.below(1000) as f64 / 1000.0);
        }
        if !is_running {
            return RequestFate::Ended;
        }
        let fates = [
            (faults.lost, RequestFate::Lost),
            (faults.answer_lost, RequestFate::AnswerLost),
            (faults.failed, RequestFate::Failed { executed: dice.below(2) == 0 }),
            (faults.slow_down, RequestFate::SlowDown),
            (faults.hangs, RequestFate::Hangs(Duration::from_secs([5, 20, 90][dice.below(3)]))),
        ];
        let mut drawn = dice.below(1000) as u32;
        for (rate, fate) in fates {
            if drawn < rate {
                return fate;
            }
            drawn -= rate;
        }
        RequestFate::Answered
    }
}

/// The store as a process reaches it.
pub struct StoreAccess {
    pub store: SimStore,
    pub process: u64,
}

impl StoreAccess {
    /// Sends a request. An execution goes on when the future of the answer is dropped.
    async fn send<T: Send + 'static>(
        &self,
        what: String,
        execute: impl FnOnce(&mut StoreState) -> Answer<T> + Send + 'static,
    ) -> Answer<T> {
        let mut delays = [Duration::ZERO; 2];
        let fate = self.store.draw_fate(self.process, &mut delays);
        if fate != RequestFate::Answered {
            self.store.events.tell(format_args!("store: {what} of process {}: {fate:?}", self.process));
        }
        let is_executed = match fate {
            RequestFate::Answered | RequestFate::AnswerLost => true,
            RequestFate::Failed { executed } => executed,
            RequestFate::Lost | RequestFate::SlowDown | RequestFate::Ended => false,
            RequestFate::Hangs(_) => self.store.dice.lock().below(3) > 0,
        };
        let late = match fate {
            RequestFate::Hangs(time) => time.mul_f64(self.store.dice.lock().below(1000) as f64 / 1000.0),
            _ => Duration::ZERO,
        };
        let state = Arc::clone(&self.store.state);
        let before = delays[0] + late;
        let execution = async move {
            if !before.is_zero() {
                tokio::time::sleep(before).await;
            }
            is_executed.then(|| execute(&mut state.lock()))
        };
        let executed = if before.is_zero() { execution.await } else { run_detached(execution).await };
        if !delays[1].is_zero() {
            tokio::time::sleep(delays[1]).await;
        }
        match (fate, executed) {
            (RequestFate::Answered, Some(answer)) => answer,
            (RequestFate::Failed { .. }, _) => Err(unanswered("HTTP 500")),
            (RequestFate::SlowDown, _) => {
                let error = Error::new(ErrorKind::Throttled, "HTTP 503");
                Err(RequestFailure { error, advice: RetryHint::SlowDown(None) })
            }
            (RequestFate::Ended, _) => Err(refused(ErrorKind::Unavailable, "the process has ended")),
            (RequestFate::Hangs(time), _) => {
                self.wait_for_nothing(time).await;
                Err(unanswered("the connection was closed after a while"))
            }
            _ => Err(unanswered("the connection was closed")),
        }
    }

    /// Waits for this time, or until all trouble has ended.
    async fn wait_for_nothing(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until && self.store.state.lock().faults.hangs > 0 {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }
}

/// Lets work go on when the future is dropped; `None` when the runtime ends before.
async fn run_detached<T: Send + 'static>(work: impl Future<Output = Option<T>> + Send + 'static) -> Option<T> {
    tokio::spawn(work).await.ok().flatten()
}

/// The beginning of an etag, for events.
fn shown(condition: &WriteCondition) -> String {
    match condition {
        WriteCondition::None => "without a condition".to_owned(),
        WriteCondition::Absent => "if absent".to_owned(),
        WriteCondition::Version(etag) => format!("if {etag:.6}"),
    }
}

impl ObjectBackend for StoreAccess {
    fn describe(&self) -> String {
        "the store in memory".to_owned()
    }

    fn writes(&self) -> Option<&dyn ObjectWriteBackend> {
        Some(self)
    }

    fn uses_sockets(&self) -> bool {
        false
    }

    fn list<'a>(&'a self, prefix: &'a str, token: Option<&'a str>, max: usize) -> BoxFuture<'a, Answer<RawPage>> {
        let prefix = prefix.to_owned();
        let token = token.map(str::to_owned);
        self.send(format!("list '{prefix}'"), move |state| Ok(state.list(&prefix, token.as_deref(), max, true))).boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<RawObject>> {
        let key = key.to_owned();
        self.send(format!("head '{key}'"), move |state| Ok(state.get(&key)?.raw(&key))).boxed()
    }

    fn get<'a>(&'a self, key: &'a str, from: u64, to: u64, etag: Option<&'a str>) -> BoxFuture<'a, Answer<RawBody>> {
        let key = key.to_owned();
        let etag = etag.map(str::to_owned);
        self.send(format!("get '{key}'"), move |state| {
            let found = state.copied(&key, etag.as_deref())?;
            let total = found.bytes.len() as u64;
            let range = from..to.min(total);
            if range.is_empty() {
                return Err(refused(ErrorKind::Stale, "the object has become shorter"));
            }
            let bytes = found.bytes.slice(range.start as usize..range.end as usize);
            let stream = futures::stream::iter([Ok(bytes)]);
            Ok(RawBody {
                etag: found.raw(&key).etag,
                mtime: Some(found.mtime),
                total: Some(total),
                range: Some(range),
                partial: true,
                stream: Box::pin(stream),
            })
        })
        .boxed()
    }
}

impl ObjectWriteBackend for StoreAccess {
    fn head_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<StoredObject>> {
        let key = key.to_owned();
        self.send(format!("head '{key}'"), move |state| {
            let found = state.get(&key)?;
            Ok(StoredObject { raw: found.raw(&key), attributes: found.attributes.clone() })
        })
        .boxed()
    }

    fn list_below<'a>(&'a self, prefix: &'a str, token: Option<&'a str>) -> BoxFuture<'a, Answer<RawPage>> {
        let prefix = prefix.to_owned();
        let token = token.map(str::to_owned);
        // Few names in a page, so that there are several.
        let list = move |state: &mut StoreState| Ok(state.list(&prefix, token.as_deref(), 4, false));
        self.send("list below".to_owned(), list).boxed()
    }

    fn read_all<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Answer<(Vec<u8>, String)>> {
        let key = key.to_owned();
        self.send(format!("read '{key}'"), move |state| {
            let found = state.get(&key)?;
            Ok((found.bytes.to_vec(), found.etag.clone()))
        })
        .boxed()
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: ObjectBody,
        attributes: &'a ObjectAttributes,
        condition: &'a WriteCondition,
    ) -> BoxFuture<'a, Answer<String>> {
        let key = key.to_owned();
        let condition = condition.clone();
        let body = body.bytes();
        let etag = etag_of(&body);
        let what = format!("put '{key}' {} of {etag:.6}", shown(&condition));
        let attributes = attributes.clone();
        let process = self.process;
        self.send(what, move |state| {
            state.check(&key, &condition)?;
            let mtime = time_now();
            Ok(state.put(&key, ObjectVersion { bytes: body, etag, mtime, attributes, writer: Some(process) }))
        })
        .boxed()
    }

    fn begin_upload<'a>(&'a self, key: &'a str, attributes: &'a ObjectAttributes) -> BoxFuture<'a, Answer<String>> {
        let upload = StoreUpload { key: key.to_owned(), attributes: attributes.clone(), parts: BTreeMap::new() };
        self.send(format!("begin an upload of '{key}'"), move |state| {
            state.last_upload += 1;
            let id = format!("upload-{}", state.last_upload);
            state.uploads.insert(id.clone(), upload);
            Ok(id)
        })
        .boxed()
    }

    fn upload_part<'a>(
        &'a self,
        key: &'a str,
        upload: &'a str,
        number: u32,
        body: ObjectBody,
    ) -> BoxFuture<'a, Answer<String>> {
        let id = upload.to_owned();
        let body = body.bytes();
        self.send(format!("part {number} of '{key}'"), move |state| {
            let etag = etag_of(&body);
            state.upload(&id)?.parts.insert(number, body);
            Ok(etag)
        })
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
        let id = upload.to_owned();
        let from_key = from.key.to_owned();
        let from_etag = from.etag.map(str::to_owned);
        self.send(format!("copy part {number} of '{key}'"), move |state| {
            let source = state.copied(&from_key, from_etag.as_deref())?;
            if range.end > source.bytes.len() as u64 {
                return Err(refused(ErrorKind::Invalid, "the range ends behind the object"));
            }
            let body = source.bytes.slice(range.start as usize..range.end as usize);
            let etag = etag_of(&body);
            state.upload(&id)?.parts.insert(number, body);
            Ok(etag)
        })
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
        let key = key.to_owned();
        let id = upload.to_owned();
        let parts = parts.to_vec();
        let condition = condition.clone();
        let process = self.process;
        let blanks = self.store.blanks_before_end(upload);
        let completed = self.send(format!("complete '{key}' {}", shown(&condition)), move |state| {
            state.upload(&id)?;
            state.check(&key, &condition)?;
            let upload = state.upload(&id)?;
            let mut bytes = Vec::new();
            for part in &parts {
                match upload.parts.get(&part.number) {
                    Some(found) if etag_of(found) == part.etag => bytes.extend_from_slice(found),
                    _ => return Err(refused(ErrorKind::Invalid, "a part is missing or another one")),
                }
            }
            let etag = format!("{}-{}", etag_of(&bytes), parts.len());
            let attributes = upload.attributes.clone();
            assert_eq!(upload.key, key, "the upload is of another object");
            state.uploads.remove(&id);
            let mtime = time_now();
            Ok(state.put(&key, ObjectVersion { bytes: bytes.into(), etag, mtime, attributes, writer: Some(process) }))
        });
        async move {
            for _ in 0..blanks {
                progress.note_bytes();
                tokio::time::sleep(BLANK_INTERVAL).await;
            }
            completed.await
        }
        .boxed()
    }

    fn abort<'a>(&'a self, key: &'a str, upload: &'a str) -> BoxFuture<'a, Answer<()>> {
        let id = upload.to_owned();
        self.send(format!("abort an upload of '{key}'"), move |state| {
            state.upload(&id)?;
            state.uploads.remove(&id);
            Ok(())
        })
        .boxed()
    }

    fn copy<'a>(
        &'a self,
        from: CopySource<'a>,
        to: &'a str,
        attributes: Option<&'a ObjectAttributes>,
        condition: &'a WriteCondition,
        _work_time: Duration,
    ) -> BoxFuture<'a, Answer<String>> {
        let from_key = from.key.to_owned();
        let from_etag = from.etag.map(str::to_owned);
        let to = to.to_owned();
        let attributes = attributes.cloned();
        let condition = condition.clone();
        let process = self.process;
        self.send(format!("copy '{from_key}' to '{to}' {}", shown(&condition)), move |state| {
            let source = state.copied(&from_key, from_etag.as_deref())?.clone();
            state.check(&to, &condition)?;
            // The etag of a copy is that of an object of one part.
            let etag = etag_of(&source.bytes);
            let attributes = attributes.unwrap_or(source.attributes);
            let version =
                ObjectVersion { bytes: source.bytes, etag, mtime: time_now(), attributes, writer: Some(process) };
            Ok(state.put(&to, version))
        })
        .boxed()
    }

    fn delete<'a>(&'a self, key: &'a str, condition: &'a WriteCondition) -> BoxFuture<'a, Answer<()>> {
        let key = key.to_owned();
        let condition = condition.clone();
        self.send(format!("delete '{key}' {}", shown(&condition)), move |state| {
            state.check(&key, &condition)?;
            if state.find(&key).is_some() {
                state.keys.entry(key).or_default().push(None);
            }
            Ok(())
        })
        .boxed()
    }
}
