//! What must hold for each key: a read finds a change that was made before the read ended and was not surely replaced before the read
//! began. It knows no node and no fault.

use crate::bucket::store::hash_of;
use bytes::Bytes;
use parking_lot::Mutex;
use spurline_object_store::WriteCondition;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

pub const KEYS: [&str; 6] = ["a/0", "a/1", "a/2", "b/0", "b/1", "b/2"];

/// The end of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ChangeEnd {
    /// No answer: made at any time since, or never.
    Open,
    /// Never made.
    Refused,
    Acknowledged(Instant),
    /// Acknowledged while the store gave no answer, and another change came between the writer's look and this one: the condition may not
    /// hold at the store, which the upload finds out. The object is kept as a conflict then.
    Doubtful,
}

#[derive(Debug, Clone)]
struct KeyChange {
    mark: String,
    /// The number of the bytes; `None` for a removal.
    content: Option<u64>,
    start: Instant,
    end: ChangeEnd,
    /// The writer has given up.
    gave_up: Option<Instant>,
    /// Whether the store has shown the object of a doubtful change, at the name or as a conflict.
    is_settled: bool,
}

/// What a read has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FoundObject {
    Nothing,
    Marked(String),
    Content(u64),
}

#[derive(Debug, Default)]
struct KeyHistory {
    changes: Vec<KeyChange>,
    /// Contents that strangers wrote.
    strangers: HashSet<u64>,
    /// A stranger has written or removed the object.
    is_strange: bool,
    /// Starts and ends of changes.
    activity: u64,
}

/// A change under way.
#[derive(Debug, Clone, Copy)]
pub struct ChangeNumber {
    key: usize,
    at: usize,
}

#[derive(Default)]
struct ModelState {
    keys: [KeyHistory; KEYS.len()],
    contents: HashMap<u64, Bytes>,
    /// By mark: the condition of the change.
    conditions: HashMap<String, WriteCondition>,
}

impl ModelState {
    /// Whether a change of the key before the change with this mark knew the object with this content.
    fn is_known_before(&self, mark: &str, content: u64) -> bool {
        let Some(history) = self.keys.iter().find(|history| history.changes.iter().any(|change| change.mark == mark))
        else {
            return false;
        };
        let earlier = history.changes.iter().take_while(|change| change.mark != mark);
        let mut conditions = earlier.filter_map(|change| self.conditions.get(&change.mark));
        conditions.any(|condition| knows(condition, content))
    }
}

#[derive(Default)]
pub struct StageModel {
    state: Mutex<ModelState>,
    began: Option<Instant>,
}

/// The content in an etag of the store.
fn content_of_etag(etag: &str) -> Option<u64> {
    u64::from_str_radix(etag.trim_matches('"').get(..16)?, 16).ok()
}

/// Whether a change with this condition knew the object with this content.
fn knows(condition: &WriteCondition, content: u64) -> bool {
    let WriteCondition::Version(etag) = condition else { return false };
    matches!(found_by_etag(etag), FoundObject::Content(known) if known == content)
}

/// What an etag says of an object.
pub fn found_by_etag(etag: &str) -> FoundObject {
    let etag = etag.trim_matches('"');
    match etag.strip_prefix("staged-") {
        Some(mark) => FoundObject::Marked(mark.to_owned()),
        None => FoundObject::Content(content_of_etag(etag).unwrap_or_else(|| panic!("an etag of the store: {etag}"))),
    }
}

impl KeyHistory {
    fn is_found(change: &KeyChange, found: &FoundObject) -> bool {
        match found {
            FoundObject::Nothing => change.content.is_none(),
            FoundObject::Marked(mark) => change.content.is_some() && change.mark == *mark,
            FoundObject::Content(content) => change.content == Some(*content),
        }
    }

    /// Whether another change has surely replaced a change that ended then, before `by`.
    fn is_replaced(&self, ended: Option<Instant>, by: Instant) -> bool {
        let acknowledged = self.changes.iter().filter_map(|change| match change.end {
            ChangeEnd::Acknowledged(end) => Some((change.start, end)),
            _ => None,
        });
        acknowledged.into_iter().any(|(start, end)| ended.is_none_or(|ended| start > ended) && end < by)
    }

    fn explains(&self, found: &FoundObject, start: Instant, end: Instant) -> bool {
        if *found == FoundObject::Nothing && (self.is_strange || !self.is_replaced(None, start)) {
            return true;
        }
        if matches!(found, FoundObject::Content(content) if self.strangers.contains(content)) {
            return true;
        }
        self.changes.iter().filter(|change| Self::is_found(change, found) && change.start <= end).any(|change| {
            match change.end {
                ChangeEnd::Open | ChangeEnd::Doubtful => true,
                ChangeEnd::Refused => false,
                ChangeEnd::Acknowledged(ended) => self.is_strange || !self.is_replaced(Some(ended), start),
            }
        })
    }
}

impl StageModel {
    pub fn new(began: Instant) -> StageModel {
        StageModel { began: Some(began), ..StageModel::default() }
    }

    fn seconds(&self, time: Instant) -> f64 {
        self.began.map_or(0.0, |began| time.saturating_duration_since(began).as_secs_f64())
    }

    /// The number of these bytes, which are remembered.
    pub fn note_content(&self, bytes: &Bytes) -> u64 {
        let content = hash_of(bytes);
        self.state.lock().contents.insert(content, bytes.clone());
        content
    }

    /// The bytes of an etag, if a change with these has been begun.
    pub fn content_of(&self, key: usize, etag: &str) -> Option<(u64, Bytes)> {
        let found = found_by_etag(etag);
        let state = self.state.lock();
        let content = match found {
            FoundObject::Content(content) => Some(content),
            FoundObject::Marked(mark) => {
                state.keys[key].changes.iter().find(|change| change.mark == mark).and_then(|change| change.content)
            }
            FoundObject::Nothing => None,
        }?;
        state.contents.get(&content).map(|bytes| (content, bytes.clone()))
    }

    /// A change begins; `None` removes the object.
    pub fn begin(&self, key: usize, mark: &str, content: Option<u64>) -> ChangeNumber {
        let start = Instant::now();
        let mut state = self.state.lock();
        let history = &mut state.keys[key];
        history.activity += 1;
        history.changes.push(KeyChange {
            mark: mark.to_owned(),
            content,
            start,
            end: ChangeEnd::Open,
            gave_up: None,
            is_settled: false,
        });
        ChangeNumber { key, at: history.changes.len() - 1 }
    }

    fn end(&self, change: ChangeNumber, end: ChangeEnd) {
        let mut state = self.state.lock();
        state.keys[change.key].activity += 1;
        state.keys[change.key].changes[change.at].end = end;
    }

    pub fn acknowledge(&self, change: ChangeNumber) {
        let is_doubtful = self.follows_doubt(change);
        self.end(change, if is_doubtful { ChangeEnd::Doubtful } else { ChangeEnd::Acknowledged(Instant::now()) });
    }

    /// Whether a change replaces or removes the object of a doubtful change, for which the store may have another, or of a change without
    /// an answer, which a node may have brought back after a removal.
    fn follows_doubt(&self, change: ChangeNumber) -> bool {
        let state = self.state.lock();
        let changes = &state.keys[change.key].changes;
        let Some(WriteCondition::Version(etag)) = state.conditions.get(&changes[change.at].mark) else { return false };
        let FoundObject::Marked(before) = found_by_etag(etag) else { return false };
        let mut known = changes.iter().filter(|other| other.mark == before);
        known.any(|other| other.end == ChangeEnd::Open || other.end == ChangeEnd::Doubtful && !other.is_settled)
    }

    /// As [`Self::acknowledge`], for a change whose condition was chosen at this time, while the store gave no answers.
    pub fn acknowledge_since(&self, change: ChangeNumber, chosen: Instant) {
        let now = Instant::now();
        let is_alone = {
            let state = self.state.lock();
            let changes = state.keys[change.key].changes.iter().enumerate();
            changes.filter(|(at, _)| *at != change.at).all(|(_, other)| match other.end {
                ChangeEnd::Refused => true,
                ChangeEnd::Open => other.gave_up.is_some_and(|end| end + OPEN_TIME < chosen),
                ChangeEnd::Doubtful => other.is_settled,
                ChangeEnd::Acknowledged(end) => end < chosen,
            })
        };
        self.end(change, if is_alone { ChangeEnd::Acknowledged(now) } else { ChangeEnd::Doubtful });
    }

    pub fn note_condition(&self, mark: &str, condition: &WriteCondition) {
        self.state.lock().conditions.insert(mark.to_owned(), condition.clone());
    }

    /// Whether the change with this mark, or one that it replaces, knew the object with this content or had no condition.
    pub fn may_replace(&self, mark: &str, content: u64) -> bool {
        let state = self.state.lock();
        let mut mark = mark.to_owned();
        loop {
            let known = match state.conditions.get(&mark) {
                Some(WriteCondition::Version(etag)) => found_by_etag(etag),
                // The object of a change that knew the content was removed before the upload.
                Some(WriteCondition::Absent) => return state.is_known_before(&mark, content),
                // A part of a rename, or no condition.
                Some(WriteCondition::None) | None => return true,
            };
            match known {
                FoundObject::Marked(before) => mark = before,
                FoundObject::Content(known) => return known == content,
                FoundObject::Nothing => return false,
            }
        }
    }

    /// Whether another change of the key was begun after this one, or at the same time.
    pub fn is_replaced_since(&self, change: ChangeNumber) -> bool {
        let state = self.state.lock();
        let changes = &state.keys[change.key].changes;
        let start = changes[change.at].start;
        changes.iter().enumerate().any(|(at, other)| {
            let is_ended = matches!(other.end, ChangeEnd::Acknowledged(end) if end < start);
            at != change.at && other.end != ChangeEnd::Refused && !is_ended
        })
    }

    /// No answer comes any more.
    pub fn give_up(&self, change: ChangeNumber) {
        self.state.lock().keys[change.key].changes[change.at].gave_up = Some(Instant::now());
    }

    /// Notes which doubtful changes the store has shown: those with these contents.
    pub fn note_shown(&self, key: usize, contents: &HashSet<u64>) {
        let mut state = self.state.lock();
        let doubtful = state.keys[key].changes.iter_mut().filter(|change| change.end == ChangeEnd::Doubtful);
        for change in doubtful {
            change.is_settled |= change.content.is_none_or(|content| contents.contains(&content));
        }
    }

    pub fn refuse(&self, change: ChangeNumber) {
        self.end(change, ChangeEnd::Refused);
    }

    /// A stranger changes the object.
    pub fn note_stranger(&self, key: usize, content: Option<u64>) {
        let mut state = self.state.lock();
        let history = &mut state.keys[key];
        history.activity += 1;
        history.is_strange = true;
        history.strangers.extend(content);
    }

    /// Counts what happens to a key; `None` while a change without an answer may still be made, and for keys of strangers.
    pub fn calm_activity(&self, key: usize) -> Option<u64> {
        let state = self.state.lock();
        let history = &state.keys[key];
        let is_open = history.changes.iter().any(|change| matches!(change.end, ChangeEnd::Open | ChangeEnd::Doubtful));
        (!is_open && !history.is_strange).then_some(history.activity)
    }

    /// Compares what a read between these times has found.
    pub fn check_read(&self, key: usize, found: &FoundObject, start: Instant, what: &str) {
        let end = Instant::now();
        let state = self.state.lock();
        let history = &state.keys[key];
        if history.explains(found, start, end) {
            return;
        }
        let changes: Vec<String> = history.changes.iter().map(|change| self.shown(change)).collect();
        drop(state);
        panic!(
            "{what} of {} from {:.3} to {:.3} found {found:x?}; the changes: {changes:#?}",
            KEYS[key],
            self.seconds(start),
            self.seconds(end)
        );
    }

    fn shown(&self, change: &KeyChange) -> String {
        let end = match change.end {
            ChangeEnd::Acknowledged(end) => format!("acknowledged {:.3}", self.seconds(end)),
            other => format!("{other:?}"),
        };
        let content = change.content.map_or("removal".to_owned(), |content| format!("{content:016x}"));
        format!("{:.8} {content} {:.3} {end}", change.mark, self.seconds(change.start))
    }

    /// Whether nothing may have the name now is sure to be wrong.
    pub fn must_be_there(&self, key: usize, start: Instant) -> bool {
        let end = Instant::now();
        !self.state.lock().keys[key].explains(&FoundObject::Nothing, start, end)
    }

    /// Whether a change came between the look and the change of a writer.
    pub fn has_doubts(&self, key: usize) -> bool {
        let is_doubtful = |change: &KeyChange| matches!(change.end, ChangeEnd::Doubtful | ChangeEnd::Open);
        self.state.lock().keys[key].changes.iter().any(is_doubtful)
    }

    pub fn is_strange(&self, key: usize) -> bool {
        self.state.lock().keys[key].is_strange
    }

    /// Whether an object of the key was ever removed, or a stranger touched the key: a request that the store executes late may have made
    /// another one.
    pub fn has_removals(&self, key: usize) -> bool {
        self.state.lock().keys[key].changes.iter().any(|change| change.content.is_none())
    }

    /// Contents that must not be lost: of acknowledged changes that no other change may have replaced.
    pub fn kept_contents(&self, key: usize) -> Vec<u64> {
        let state = self.state.lock();
        let changes = &state.keys[key].changes;
        let mut kept = Vec::new();
        for change in changes {
            let is_acknowledged = matches!(change.end, ChangeEnd::Acknowledged(_) | ChangeEnd::Doubtful);
            let Some(content) = change.content.filter(|_| is_acknowledged) else { continue };
            let is_maybe_replaced = changes.iter().any(|other| {
                let is_other = other.mark != change.mark && other.end != ChangeEnd::Refused;
                let is_before = matches!(other.end, ChangeEnd::Acknowledged(end) if end < change.start);
                is_other && !is_before
            });
            if !is_maybe_replaced {
                kept.push(content);
            }
        }
        kept
    }
}

/// A change whose writer has given up is made within this time, or never.
const OPEN_TIME: Duration = Duration::from_secs(300);
/// The longest time of a change with all attempts.
pub const CHANGE_TIME: Duration = Duration::from_secs(150);
