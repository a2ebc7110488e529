//! Programs that change and read objects through the nodes, as writers of mounts do: a change is sent again until there is an answer, and a
//! lost answer is found out by the mark of the object. Each answer is compared with the model. It knows no faults.

use crate::cluster::{NodeProcess, StageCluster};
use crate::dice::Dice;
use crate::model::{CHANGE_TIME, ChangeNumber, FoundObject, KEYS, StageModel, found_by_etag};
use bytes::Bytes;
use futures::StreamExt as _;
use spurline_object_store::{
    AnswerProgress, CopySource, ObjectAttributes, ObjectBackend as _, ObjectBody, ObjectWriteBackend as _,
    RequestFailure, RetryHint, StoredObject, UploadedPart, WriteCondition, mark_in, marked_as,
};
use spurline_stage::StagedBackend;
use spurline_types::ErrorKind;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

type Answer<T> = Result<T, RequestFailure>;

/// What a run tells; outlives the run.
#[derive(Default)]
pub struct Shared {
    pub events: Mutex<Vec<String>>,
    pub stop: AtomicBool,
    pub began: Mutex<Option<Instant>>,
    pub calls: AtomicU64,
    pub outages: AtomicU64,
    pub longest: Mutex<(Duration, String)>,
    /// A thread has panicked.
    pub has_panicked: AtomicBool,
}

/// A lock of std: the events are read after the run, by another thread.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Shared {
    pub fn tell(&self, what: std::fmt::Arguments<'_>) {
        let at = locked(&self.began).map_or(0.0, |began| began.elapsed().as_secs_f64());
        locked(&self.events).push(format!("{at:9.3} {what}"));
    }

    pub fn is_over(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}

/// Ends the other threads when one has failed.
pub struct StopOnPanic<'a>(pub &'a Shared);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop.store(true, Ordering::Release);
        }
    }
}

/// Why a change has no result.
struct ChangeFailure {
    failure: RequestFailure,
    maybe_executed: bool,
}

/// A program.
pub struct StageProgram<'a> {
    pub number: usize,
    pub cluster: &'a StageCluster,
    pub model: &'a StageModel,
    pub dice: Dice,
    pub turn: u64,
    /// Versions seen by key: the object may have been replaced since.
    pub seen: BTreeMap<usize, String>,
    /// Objects without conditions are written too.
    pub is_unconditional: bool,
}

/// A condition as a writer chooses it.
struct ChosenCondition {
    condition: WriteCondition,
    calm: Option<u64>,
    chosen: Option<Instant>,
}

/// An object for a change.
struct NewVersion {
    key: usize,
    content: u64,
    mark: String,
    attributes: ObjectAttributes,
    condition: WriteCondition,
    /// The activity of the key when the condition was chosen, and when that was.
    calm: Option<u64>,
    chosen: Option<Instant>,
    change: ChangeNumber,
    /// Disks that were lost before.
    lost_disks: u64,
}

impl<'a> StageProgram<'a> {
    fn tell(&self, what: std::fmt::Arguments<'_>) {
        self.cluster.shared.tell(format_args!("program {}: {what}", self.number));
    }

    /// Works until it is stopped.
    pub fn run(mut self) {
        let shared = Arc::clone(&self.cluster.shared);
        let _stop = StopOnPanic(&shared);
        while !shared.is_over() {
            self.turn += 1;
            let key = self.dice.below(KEYS.len());
            match self.dice.below(16) {
                0..=2 => self.put(key),
                3 => self.put_large(key),
                4 | 5 => self.upload(key),
                6 => self.rename(key),
                7 => self.remove(key),
                8 | 9 => drop(self.head(key)),
                10..=12 => self.read(key),
                13 => self.read_old(key),
                14 => self.list_all(),
                _ => self.list_folded(),
            }
            let pause = [20, 200, 2000][self.dice.below(3)];
            std::thread::sleep(Duration::from_millis(self.dice.below(pause) as u64));
        }
    }

    /// A node that runs.
    fn pick(&mut self) -> Option<(usize, Arc<NodeProcess>)> {
        let node = self.dice.below(self.cluster.nodes.len());
        self.cluster.process(node).map(|process| (node, process))
    }

    /// Makes requests at a node, on a thread of the node.
    fn at_node<T>(&mut self, what: &str, request: impl AsyncFnOnce(&StagedBackend) -> Answer<T>) -> Option<Answer<T>> {
        let (node, process) = self.pick()?;
        let start = Instant::now();
        spurline_vtime::set_group(crate::network::group_of(node));
        let answer = process.runtime.block_on(request(&process.backend));
        drop(process);
        spurline_vtime::set_group(0);
        let took = start.elapsed();
        let shared = &self.cluster.shared;
        shared.calls.fetch_add(1, Ordering::Relaxed);
        let outcome = match &answer {
            Ok(_) => "done".to_owned(),
            Err(failure) => format!("{:?}: {}", failure.error.kind(), failure.error.message()),
        };
        self.tell(format_args!("{what} at node {node}, {:.3} s: {outcome}", took.as_secs_f64()));
        let mut longest = locked(&shared.longest);
        if took > longest.0 {
            *longest = (took, what.to_owned());
        }
        Some(answer)
    }

    fn count_outage(&self) {
        self.cluster.shared.outages.fetch_add(1, Ordering::Relaxed);
    }

    /// Sends a change until there is an answer, each attempt at any node.
    fn repeat<T>(
        &mut self,
        what: &str,
        request: impl AsyncFn(&StagedBackend) -> Answer<T>,
    ) -> Result<T, ChangeFailure> {
        let deadline = Instant::now() + CHANGE_TIME;
        let mut maybe_executed = false;
        let mut pause = 100;
        loop {
            let failure = match self.at_node(what, &request) {
                Some(Ok(value)) => return Ok(value),
                Some(Err(failure)) => failure,
                None => RequestFailure::transient(ErrorKind::Unavailable, "the node does not run".to_owned()),
            };
            // A writer at a node that is killed ends with that; this one goes on at another.
            let is_killed = failure.error.message() == "the process has ended";
            let is_final = failure.advice == RetryHint::Never && failure.error.kind() != ErrorKind::Timeout;
            let is_refused = is_final && !is_killed;
            if is_refused {
                return Err(ChangeFailure { failure, maybe_executed });
            }
            maybe_executed = true;
            if Instant::now() >= deadline || self.cluster.shared.is_over() {
                return Err(ChangeFailure { failure, maybe_executed });
            }
            std::thread::sleep(Duration::from_millis(pause));
            pause = (pause * 2).min(5000);
        }
    }

    /// A head until there is an answer; `None` for no answer at all.
    fn look(&mut self, key: usize) -> Option<Option<StoredObject>> {
        let found = self.repeat(&format!("look at {}", KEYS[key]), async |backend: &StagedBackend| {
            backend.head_all(KEYS[key]).await
        });
        match found {
            Ok(found) => Some(Some(found)),
            Err(ChangeFailure { failure, .. }) if failure.error.kind() == ErrorKind::NotFound => Some(None),
            Err(_) => None,
        }
    }

    fn new_mark(&mut self) -> String {
        format!("{:02x}{:06x}{:024x}", self.number, self.turn, self.dice.below(1 << 30))
    }

    fn make_content(&mut self, mark: &str, len: usize) -> Bytes {
        let mut bytes = format!("{mark}:").into_bytes();
        let first = bytes.len();
        let step = 1 + self.dice.below(250) as u64;
        bytes.extend((first as u64..(len.max(first)) as u64).map(|at| ((at * step) >> 3) as u8));
        bytes.into()
    }

    /// A condition as a writer chooses it, after a look.
    fn choose_condition(&mut self, key: usize) -> Option<ChosenCondition> {
        if self.is_unconditional && self.dice.below(3) == 0 {
            return Some(ChosenCondition { condition: WriteCondition::None, calm: None, chosen: None });
        }
        let calm = self.model.calm_activity(key);
        let start = Instant::now();
        let found = self.look(key)?;
        let condition = match found {
            Some(found) => {
                self.check_found(key, &found, start);
                let etag = found.raw.etag.as_deref().unwrap_or_default().trim_matches('"').to_owned();
                WriteCondition::Version(etag)
            }
            None => WriteCondition::Absent,
        };
        Some(ChosenCondition { condition, calm, chosen: Some(start) })
    }

    fn begin(&mut self, key: usize, content: u64, mark: String, condition: ChosenCondition) -> NewVersion {
        let mut attributes = ObjectAttributes::default();
        attributes.set_stage();
        let attributes = marked_as(attributes, &mark);
        let change = self.model.begin(key, &mark, Some(content));
        let ChosenCondition { condition, calm, chosen } = condition;
        self.model.note_condition(&mark, &condition);
        NewVersion {
            key,
            content,
            mark,
            attributes,
            condition,
            calm,
            chosen,
            change,
            lost_disks: self.cluster.lost_disks(),
        }
    }

    /// The outcome of a change that makes an object, as the table of the real writer has it.
    fn settle(&mut self, new: &NewVersion, result: Result<String, ChangeFailure>) -> bool {
        let ChangeFailure { failure, maybe_executed } = match result {
            Ok(etag) => {
                self.check_domains(new, &etag);
                self.acknowledge(new);
                self.seen.insert(new.key, etag);
                return true;
            }
            Err(failed) => failed,
        };
        if !maybe_executed {
            let is_conflict = matches!(failure.error.kind(), ErrorKind::Stale | ErrorKind::NotFound);
            assert!(is_conflict, "{} was refused: {}", KEYS[new.key], failure.error);
            self.model.refuse(new.change);
            // The beginning and the end of this change.
            let is_calm = new.calm.is_some() && self.model.calm_activity(new.key) == new.calm.map(|calm| calm + 2);
            assert!(!is_calm, "{} was refused, and nothing else changed it: {}", KEYS[new.key], failure.error);
            return false;
        }
        if let Some(Some(found)) = self.look(new.key)
            && mark_in(&found.attributes) == Some(&new.mark)
        {
            self.acknowledge(new);
            return true;
        }
        self.model.give_up(new.change);
        self.count_outage();
        false
    }

    /// What is acknowledged is on the disks of two failure domains, or at the store.
    fn check_domains(&self, new: &NewVersion, etag: &str) {
        let mut domains = self.cluster.domains_with(&new.mark);
        // The mark of a conflict.
        let reversed: String = new.mark.chars().rev().collect();
        domains.extend(self.cluster.domains_with(&reversed));
        let is_elsewhere = !etag.starts_with("staged-")
            || self.cluster.lost_disks() != new.lost_disks
            || self.cluster.shown_contents(new.key).contains(&new.content);
        let is_safe = domains.len() >= 2 || is_elsewhere || self.model.is_replaced_since(new.change);
        assert!(is_safe, "{:.8} of {} was acknowledged, and only {domains:?} have it", new.mark, KEYS[new.key]);
    }

    fn acknowledge(&self, new: &NewVersion) {
        self.model.note_shown(new.key, &self.cluster.shown_contents(new.key));
        match new.chosen {
            Some(chosen) if self.cluster.may_doubt(chosen) => self.model.acknowledge_since(new.change, chosen),
            _ => self.model.acknowledge(new.change),
        }
    }

    fn put(&mut self, key: usize) {
        let len = 40 + self.dice.below(1500);
        self.put_bytes(key, len);
    }

    fn put_large(&mut self, key: usize) {
        let len = (64 << 10) + 1 + self.dice.below(100_000);
        self.put_bytes(key, len);
    }

    fn put_bytes(&mut self, key: usize, len: usize) {
        let Some(condition) = self.choose_condition(key) else { return self.count_outage() };
        let mark = self.new_mark();
        let bytes = self.make_content(&mark, len);
        let content = self.model.note_content(&bytes);
        let new = self.begin(key, content, mark, condition);
        let body = ObjectBody::new(bytes);
        let what = format!("put {:.8} to {} {:?}", new.mark, KEYS[key], new.condition);
        let put = self.repeat(&what, async |backend: &StagedBackend| {
            backend.put(KEYS[key], body.clone(), &new.attributes, &new.condition).await
        });
        self.settle(&new, put);
    }

    /// An object in parts; a part may be a copy.
    fn upload(&mut self, key: usize) {
        let Some(condition) = self.choose_condition(key) else { return self.count_outage() };
        let mark = self.new_mark();
        let mut attributes = ObjectAttributes::default();
        attributes.set_stage();
        let attributes = marked_as(attributes, &mark);
        let begun = self.repeat("begin an upload", async |backend: &StagedBackend| {
            backend.begin_upload(KEYS[key], &attributes).await
        });
        let Ok(upload) = begun else { return self.count_outage() };
        let mut parts = Vec::new();
        let mut all = Vec::new();
        for number in 1..=1 + self.dice.below(3) as u32 {
            let made = if self.dice.below(3) == 0 { self.copy_part(key, &upload, number) } else { None };
            let made = made.or_else(|| {
                let len = 100 + self.dice.below(60_000);
                let bytes = self.make_content(&format!("{mark}-{number}"), len);
                self.upload_part(key, &upload, number, bytes)
            });
            let Some((etag, bytes)) = made else {
                let _ = self.at_node("abort", async |backend: &StagedBackend| backend.abort(KEYS[key], &upload).await);
                return self.count_outage();
            };
            parts.push(UploadedPart { number, etag });
            all.extend_from_slice(&bytes);
        }
        if self.dice.below(10) == 0 {
            let _ = self.at_node("abort", async |backend: &StagedBackend| backend.abort(KEYS[key], &upload).await);
            return;
        }
        let content = self.model.note_content(&all.into());
        let new = self.begin(key, content, mark, condition);
        let what = format!("complete {:.8} of {} {:?}", new.mark, KEYS[key], new.condition);
        let progress = AnswerProgress::default();
        let completed = self.repeat(&what, async |backend: &StagedBackend| {
            backend.complete(KEYS[key], &upload, &parts, &new.condition, &progress).await
        });
        if !self.settle(&new, completed) {
            let _ = self.at_node("abort", async |backend: &StagedBackend| backend.abort(KEYS[key], &upload).await);
        }
    }

    fn upload_part(&mut self, key: usize, upload: &str, number: u32, bytes: Bytes) -> Option<(String, Bytes)> {
        let body = ObjectBody::new(bytes.clone());
        let sent = self.repeat("upload a part", async |backend: &StagedBackend| {
            backend.upload_part(KEYS[key], upload, number, body.clone()).await
        });
        sent.ok().map(|etag| (etag, bytes))
    }

    /// A part from bytes of an object.
    fn copy_part(&mut self, key: usize, upload: &str, number: u32) -> Option<(String, Bytes)> {
        let from = self.dice.below(KEYS.len());
        let found = self.look(from)??;
        let etag = found.raw.etag?.trim_matches('"').to_owned();
        let (_, bytes) = self.model.content_of(from, &etag)?;
        let start = self.dice.below(bytes.len());
        let end = start + 1 + self.dice.below(bytes.len() - start);
        let source = CopySource { key: KEYS[from], etag: Some(&etag) };
        let what = format!("copy {start} to {end} of {} with {etag:.16}", KEYS[from]);
        let copied = self.repeat(&what, async |backend: &StagedBackend| {
            backend.copy_part(KEYS[key], upload, number, source, start as u64..end as u64).await
        });
        Some((copied.ok()?, bytes.slice(start..end)))
    }

    /// A copy and a removal.
    fn rename(&mut self, from: usize) {
        let to = self.dice.below(KEYS.len());
        if to == from {
            return;
        }
        let start = Instant::now();
        let Some(found) = self.look(from) else { return self.count_outage() };
        let Some(found) = found else { return };
        self.check_found(from, &found, start);
        let etag = found.raw.etag.as_deref().unwrap_or_default().trim_matches('"').to_owned();
        let Some((content, _)) = self.model.content_of(from, &etag) else { panic!("{etag} of {}", KEYS[from]) };
        let Some(condition) = self.choose_condition(to) else { return self.count_outage() };
        if condition.condition == WriteCondition::None {
            return;
        }
        let mark = self.new_mark();
        let attributes = marked_as(found.attributes.clone(), &mark);
        let new =
            NewVersion { attributes, ..self.begin(to, content, mark, ChosenCondition { calm: None, ..condition }) };
        let what = format!("copy {} to {} as {:.8} {:?}", KEYS[from], KEYS[to], new.mark, new.condition);
        let source = CopySource { key: KEYS[from], etag: Some(&etag) };
        let copied = self.repeat(&what, async |backend: &StagedBackend| {
            backend.copy(source, KEYS[to], Some(&new.attributes), &new.condition, Duration::from_secs(5)).await
        });
        if self.settle(&new, copied) {
            self.remove_version(from, etag);
        }
    }

    fn remove(&mut self, key: usize) {
        let start = Instant::now();
        let Some(found) = self.look(key) else { return self.count_outage() };
        let Some(found) = found else { return };
        self.check_found(key, &found, start);
        let etag = found.raw.etag.as_deref().unwrap_or_default().trim_matches('"').to_owned();
        self.remove_version(key, etag);
    }

    fn remove_version(&mut self, key: usize, etag: String) {
        let mark = self.new_mark();
        let change = self.model.begin(key, &mark, None);
        let condition = WriteCondition::Version(etag);
        self.model.note_condition(&mark, &condition);
        let removed = self.repeat(&format!("remove {} {condition:?}", KEYS[key]), async |backend: &StagedBackend| {
            backend.delete(KEYS[key], &condition).await
        });
        match removed {
            Ok(()) => {
                self.model.note_shown(key, &self.cluster.shown_contents(key));
                self.model.acknowledge(change);
            }
            Err(ChangeFailure { failure, maybe_executed: false }) => {
                let is_conflict = matches!(failure.error.kind(), ErrorKind::Stale | ErrorKind::NotFound);
                assert!(is_conflict, "the removal of {} was refused: {}", KEYS[key], failure.error);
                self.model.refuse(change);
            }
            Err(_) => {
                self.model.give_up(change);
                self.count_outage();
            }
        }
    }

    fn check_read(&self, key: usize, found: &FoundObject, start: Instant, what: &str) {
        // A condition of absence holds again after a removal: the store may execute a request late.
        if !self.cluster.store.is_made_late(KEYS[key]) || !self.model.has_removals(key) {
            self.model.check_read(key, found, start, what);
        }
    }

    fn check_found(&mut self, key: usize, found: &StoredObject, start: Instant) {
        let etag = found.raw.etag.clone().unwrap_or_default();
        let by_mark = mark_in(&found.attributes).map(|mark| FoundObject::Marked(mark.to_owned()));
        let seen = by_mark.unwrap_or_else(|| found_by_etag(&etag));
        self.check_read(key, &seen, start, "a look");
        self.seen.insert(key, etag.trim_matches('"').to_owned());
    }

    fn head(&mut self, key: usize) -> Option<String> {
        let start = Instant::now();
        match self
            .at_node(&format!("head of {}", KEYS[key]), async |backend: &StagedBackend| backend.head(KEYS[key]).await)?
        {
            Ok(found) => {
                let etag = found.etag.unwrap_or_default();
                self.check_read(key, &found_by_etag(&etag), start, "a head");
                Some(etag.trim_matches('"').to_owned())
            }
            Err(failure) if failure.error.kind() == ErrorKind::NotFound => {
                self.check_read(key, &FoundObject::Nothing, start, "a head");
                None
            }
            Err(_) => {
                self.count_outage();
                None
            }
        }
    }

    /// Reads all bytes.
    fn get(&mut self, key: usize, etag: Option<&str>) -> Option<Answer<(String, Bytes)>> {
        let version = etag.map_or("any version".to_owned(), |etag| format!("{etag:.16}"));
        self.at_node(&format!("get {} of {version}", KEYS[key]), async |backend: &StagedBackend| {
            let mut body = backend.get(KEYS[key], 0, u64::MAX, etag).await?;
            let mut all = Vec::new();
            while let Some(piece) = body.stream.next().await {
                all.extend_from_slice(&piece?);
            }
            Ok((body.etag.unwrap_or_default(), all.into()))
        })
    }

    fn read(&mut self, key: usize) {
        let start = Instant::now();
        match self.get(key, None) {
            Some(Ok((etag, bytes))) => {
                self.check_bytes(key, &etag, &bytes);
                let content = FoundObject::Content(crate::bucket::store::hash_of(&bytes));
                self.check_read(key, &content, start, "a read");
                self.seen.insert(key, etag.trim_matches('"').to_owned());
            }
            Some(Err(failure)) if failure.error.kind() == ErrorKind::NotFound => {
                // The object may have been removed between the lookup and the read.
                self.check_read(key, &FoundObject::Nothing, start, "a read");
            }
            _ => self.count_outage(),
        }
    }

    /// Bytes of a version are those of the version.
    fn check_bytes(&mut self, key: usize, etag: &str, bytes: &Bytes) {
        let (_, expected) = self.model.content_of(key, etag).unwrap_or_else(|| panic!("{etag} of {}", KEYS[key]));
        assert!(*bytes == expected, "{} bytes of {} are not those of {etag}", bytes.len(), KEYS[key]);
    }

    fn read_old(&mut self, key: usize) {
        let Some(etag) = self.seen.get(&key).cloned() else { return };
        match self.get(key, Some(&etag)) {
            Some(Ok((found, bytes))) => {
                assert_eq!(found.trim_matches('"'), etag, "another version than that asked for");
                self.check_bytes(key, &etag, &bytes);
            }
            _ => self.count_outage(),
        }
    }

    fn list_all(&mut self) {
        let start = Instant::now();
        let mut found: BTreeMap<String, String> = BTreeMap::new();
        let mut token: Option<String> = None;
        let mut last = String::new();
        for _ in 0..100 {
            let from = token.clone();
            let page =
                self.at_node("list", async |backend: &StagedBackend| backend.list_below("", from.as_deref()).await);
            let Some(Ok(page)) = page else { return self.count_outage() };
            for object in page.objects {
                assert!(object.key > last, "a listing has {} behind {last}", object.key);
                last.clone_from(&object.key);
                found.insert(object.key, object.etag.unwrap_or_default());
            }
            token = page.next;
            if token.is_none() {
                break;
            }
        }
        assert_eq!(token, None, "a listing does not end");
        for (key, name) in KEYS.iter().enumerate() {
            let seen = found.get(*name).map_or(FoundObject::Nothing, |etag| found_by_etag(etag));
            self.check_read(key, &seen, start, "a listing");
        }
    }

    fn list_folded(&mut self) {
        let start = Instant::now();
        let max = 1 + self.dice.below(3);
        let mut prefixes = Vec::new();
        let mut token: Option<String> = None;
        for _ in 0..100 {
            let from = token.clone();
            let page = self
                .at_node("list folders", async |backend: &StagedBackend| backend.list("", from.as_deref(), max).await);
            let Some(Ok(page)) = page else { return self.count_outage() };
            prefixes.extend(page.prefixes);
            assert!(page.objects.is_empty(), "objects outside of folders: {:?}", page.objects);
            token = page.next;
            if token.is_none() {
                break;
            }
        }
        assert_eq!(token, None, "a listing does not end");
        assert!(prefixes.is_sorted_by(|one, two| one < two), "folders are listed twice: {prefixes:?}");
        for (key, name) in KEYS.iter().enumerate() {
            let is_listed = prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()));
            let is_missed = !is_listed && self.model.must_be_there(key, start);
            assert!(!is_missed, "{name} is there, and a listing has only the folders {prefixes:?}");
        }
    }
}
