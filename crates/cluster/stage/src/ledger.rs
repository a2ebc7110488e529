//! The leader's table of all staged objects. Knows no node, no store and no clock of its own.

use crate::manifest::{BucketKey, KeptAttributes, Manifest, Phase, StageClass, StoreBase};
use crate::message::{Answer, KnownName, Located, NamesBelow, SavedName, UnsavedObject};
use crate::shared::stale;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::time::{Duration, Instant};

/// Uploaded objects whose readers keep the version of the group.
const SAVED_MAX: usize = 100_000;
/// Names of an answer.
const NAMES_MAX: usize = 2000;
/// The upload of an object begins this long after the close: programs write a file and rename it.
const UPLOAD_LINGER: Duration = Duration::from_secs(1);
/// Longest pause after a failed upload.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// A staged object.
pub struct Entry {
    /// The object.
    pub manifest: Manifest,
    /// When the leader took it.
    pub closed: Instant,
    /// An upload has begun, perhaps by an earlier leader.
    pub begun: bool,
    /// Failed uploads in a row.
    pub failures: u32,
    /// The last failure.
    pub error: Option<String>,
    /// Said to be late.
    pub is_overdue: bool,
}

/// An object that is done, whose holders are to forget it.
pub struct DoneObject {
    /// Nodes that have the manifest.
    pub holders: BTreeSet<String>,
    /// Nodes that know that the object is done.
    pub told: BTreeSet<String>,
}

/// What a writer's condition means for a new object.
pub enum Admitted {
    /// The object is there already: the writer asks once more.
    Known(String),
    /// The base, and the marks of contents that the store may have.
    New(StoreBase, Vec<String>),
}

/// See the head of this file.
#[derive(Default)]
pub struct Ledger {
    /// The last place.
    pub order: u64,
    /// Objects that the store does not have.
    pub entries: BTreeMap<BucketKey, Entry>,
    saved: BTreeMap<BucketKey, SavedName>,
    saved_order: VecDeque<(BucketKey, String)>,
    /// Names that a change is made to.
    pub locked: HashSet<BucketKey>,
    /// By name: the mark of the content that is being uploaded.
    pub uploading: HashMap<BucketKey, String>,
    /// Objects by the time of their next upload.
    queue: BTreeMap<(Instant, u64), BucketKey>,
    queued: u64,
    /// By mark.
    pub done: HashMap<String, DoneObject>,
}

impl Ledger {
    /// Compares a writer's condition with what is known of the name.
    ///
    /// # Errors
    /// `Stale` if the condition does not hold.
    pub fn admit(&self, at: &BucketKey, condition: &StoreBase, mark: &str) -> Answer<Admitted> {
        let Some(entry) = self.entries.get(at) else { return self.admit_at_store(at, condition, mark) };
        let manifest = &entry.manifest;
        if manifest.mark == mark {
            return Ok(Admitted::Known(manifest.etag()));
        }
        let is_gone = manifest.phase != Phase::Waiting;
        let holds = match condition {
            StoreBase::Any => true,
            StoreBase::Absent => is_gone,
            StoreBase::Version(etag) => !is_gone && *etag == manifest.etag(),
        };
        if !holds {
            return Err(stale(at));
        }
        let mut begun = manifest.begun.clone();
        if entry.begun {
            begun.push(manifest.mark.clone());
        }
        Ok(Admitted::New(manifest.base.clone(), begun))
    }

    fn admit_at_store(&self, at: &BucketKey, condition: &StoreBase, mark: &str) -> Answer<Admitted> {
        let Some(saved) = self.saved.get(at) else { return Ok(Admitted::New(condition.clone(), Vec::new())) };
        if crate::manifest::staged_mark(&saved.etag) == Some(mark) {
            return Ok(Admitted::Known(saved.etag.clone()));
        }
        match condition {
            StoreBase::Absent => Err(stale(at)),
            StoreBase::Version(etag) if *etag == saved.etag => {
                Ok(Admitted::New(StoreBase::Version(saved.real.clone()), Vec::new()))
            }
            other => Ok(Admitted::New(other.clone(), Vec::new())),
        }
    }

    /// Takes an object; the one before is done unless its upload is under way.
    pub fn enter(&mut self, manifest: Manifest, closed: Instant, begun: bool) {
        let at = manifest.at.clone();
        self.saved.remove(&at);
        if manifest.class == StageClass::Staged {
            self.queue_at(closed + UPLOAD_LINGER, &at);
        }
        let entry = Entry { manifest, closed, begun, failures: 0, error: None, is_overdue: false };
        let before = self.entries.insert(at.clone(), entry);
        if let Some(before) = before
            && self.uploading.get(&at) != Some(&before.manifest.mark)
        {
            self.end(&before.manifest);
        }
    }

    /// Takes an object that a node has brought back, unless a later one has the name.
    pub fn adopt(&mut self, manifest: Manifest) {
        match self.entries.get(&manifest.at) {
            Some(entry) if entry.manifest.place() > manifest.place() => self.end(&manifest),
            _ => self.enter(manifest, Instant::now(), true),
        }
    }

    /// All holders of this object are to forget it.
    pub fn end(&mut self, manifest: &Manifest) {
        let former = manifest.former.iter().map(String::as_str);
        let holders = manifest.nodes().chain(former).map(str::to_owned).collect();
        self.done.insert(manifest.mark.clone(), DoneObject { holders, told: BTreeSet::new() });
    }

    /// Puts an object in the queue for uploads.
    pub fn queue_at(&mut self, time: Instant, at: &BucketKey) {
        self.queued += 1;
        self.queue.insert((time, self.queued), at.clone());
    }

    /// The next object to upload, or to remove at the store; or the time of the next.
    pub fn take_job(&mut self, now: Instant) -> Result<Manifest, Option<Instant>> {
        loop {
            let Some((key, _)) = self.queue.first_key_value() else { return Err(None) };
            if key.0 > now {
                return Err(Some(key.0));
            }
            let Some((_, at)) = self.queue.pop_first() else { return Err(None) };
            let Some(entry) = self.entries.get_mut(&at) else { continue };
            // The end of the upload under way puts the name into the queue again.
            if self.uploading.contains_key(&at) || self.locked.contains(&at) && entry.manifest.phase == Phase::Removing
            {
                continue;
            }
            if entry.manifest.phase == Phase::Waiting {
                entry.begun = true;
                self.uploading.insert(at, entry.manifest.mark.clone());
            }
            return Ok(entry.manifest.clone());
        }
    }

    /// An upload has ended with this etag of the store. Whether the object was still the newest of the name.
    pub fn note_saved(&mut self, manifest: &Manifest, real: &str, now: Instant) -> bool {
        let at = &manifest.at;
        self.uploading.remove(at);
        self.end(manifest);
        let is_newest = self.entries.get(at).is_some_and(|entry| entry.manifest.mark == manifest.mark);
        if !is_newest {
            self.queue_at(now, at);
            return false;
        }
        if self.entries.get(at).is_some_and(|entry| entry.manifest.phase == Phase::Waiting) {
            self.entries.remove(at);
            let saved = SavedName { real: real.to_owned(), etag: manifest.etag(), closed_s: manifest.closed_s };
            self.saved_order.push_back((at.clone(), saved.etag.clone()));
            self.saved.insert(at.clone(), saved);
            while self.saved_order.len() > SAVED_MAX {
                let Some((old, etag)) = self.saved_order.pop_front() else { break };
                if self.saved.get(&old).is_some_and(|saved| saved.etag == etag) {
                    self.saved.remove(&old);
                }
            }
        }
        true
    }

    /// An upload has failed.
    pub fn note_failed(&mut self, manifest: &Manifest, why: &str, now: Instant) {
        let at = &manifest.at;
        self.uploading.remove(at);
        let Some(entry) = self.entries.get_mut(at) else { return self.end(manifest) };
        if entry.manifest.mark != manifest.mark {
            self.end(manifest);
            return self.queue_at(now, at);
        }
        entry.failures += 1;
        entry.error = Some(why.to_owned());
        let pause = Duration::from_secs(1 << entry.failures.min(5)).min(LONGEST_PAUSE);
        self.queue_at(now + pause, at);
    }

    /// Forgets a name that is being removed, or that scratch data had.
    pub fn remove(&mut self, at: &BucketKey) {
        if let Some(entry) = self.entries.remove(at) {
            self.end(&entry.manifest);
        }
    }

    /// What is known of a name.
    pub fn find(&self, at: &BucketKey) -> KnownName {
        if let Some(entry) = self.entries.get(at) {
            return known_entry(entry);
        }
        self.saved.get(at).cloned().map_or(KnownName::Unknown, KnownName::Saved)
    }

    /// The names with this prefix behind `after`, and whether there are more.
    pub fn find_below(&self, prefix: &BucketKey, after: &str, is_folded: bool) -> NamesBelow {
        let mut names = BTreeMap::new();
        let saved = names_below(&self.saved, prefix, after, is_folded, |saved| KnownName::Saved(saved.clone()));
        // The store lists the folders of its objects.
        names.extend(saved.into_iter().filter(|(_, known)| !matches!(known, KnownName::Folder)));
        names.extend(names_below(&self.entries, prefix, after, is_folded, listed_entry));
        let has_more = names.len() > NAMES_MAX;
        let object = prefix.key.strip_suffix('/').map(|key| BucketKey::new(&prefix.bucket, key));
        let entry = object.and_then(|object| self.entries.get(&object));
        let is_object = entry.is_some_and(|entry| entry.manifest.phase == Phase::Waiting);
        NamesBelow { names: names.into_iter().take(NAMES_MAX).collect(), has_more, is_object }
    }

    /// What a version of the group is.
    pub fn locate(&self, at: &BucketKey, etag: &str) -> Located {
        if let Some(entry) = self.entries.get(at)
            && entry.manifest.etag() == etag
        {
            return Located::Here(Box::new(entry.manifest.clone()));
        }
        match self.saved.get(at) {
            Some(saved) if saved.etag == etag => Located::Saved(saved.real.clone()),
            _ => Located::Unknown,
        }
    }

    /// The name leads to another object of the store from now on.
    pub fn forget_saved(&mut self, at: &BucketKey) {
        self.saved.remove(at);
    }

    /// All objects that the store does not have, oldest first.
    pub fn unsaved(&self, now: Instant) -> Vec<UnsavedObject> {
        let mut entries: Vec<&Entry> = self.entries.values().collect();
        entries.sort_by_key(|entry| entry.closed);
        let shown = entries.into_iter().map(|entry| {
            let nodes: BTreeSet<&str> = entry.manifest.nodes().collect();
            UnsavedObject {
                at: entry.manifest.at.clone(),
                size: entry.manifest.size,
                age_s: now.saturating_duration_since(entry.closed).as_secs(),
                holders: nodes.into_iter().map(str::to_owned).collect(),
                is_scratch: entry.manifest.class != StageClass::Staged,
                error: entry.error.clone(),
            }
        });
        shown.collect()
    }
}

/// An object as a listing needs it.
fn listed_entry(entry: &Entry) -> KnownName {
    match entry.manifest.phase {
        Phase::Waiting => {
            let (pieces, attributes) = (Vec::new(), KeptAttributes::default());
            let manifest = Manifest { pieces, attributes, begun: Vec::new(), ..entry.manifest.clone() };
            KnownName::Object(Box::new(manifest))
        }
        Phase::Removing | Phase::Done => KnownName::Removing,
    }
}

fn known_entry(entry: &Entry) -> KnownName {
    match entry.manifest.phase {
        Phase::Waiting => KnownName::Object(Box::new(entry.manifest.clone())),
        Phase::Removing | Phase::Done => KnownName::Removing,
    }
}

/// The names of a table with this prefix behind `after`, one more than fit into an answer.
fn names_below<T>(
    table: &BTreeMap<BucketKey, T>,
    prefix: &BucketKey,
    after: &str,
    is_folded: bool,
    known: impl Fn(&T) -> KnownName,
) -> Vec<(String, KnownName)> {
    let mut names = Vec::new();
    let first = if after > prefix.key.as_str() { Bound::Excluded(after) } else { Bound::Included(&*prefix.key) };
    let mut from = first.map(|key| BucketKey::new(&prefix.bucket, key));
    while names.len() <= NAMES_MAX {
        let next = table.range((from, Bound::Unbounded)).next();
        let Some((at, value)) = next.filter(|(at, _)| at.bucket == prefix.bucket && at.key.starts_with(&prefix.key))
        else {
            break;
        };
        let folder = at.key[prefix.key.len()..].split_once('/').filter(|_| is_folded);
        match folder {
            Some((name, _)) => {
                let folder = format!("{}{name}/", prefix.key);
                from = Bound::Included(BucketKey::new(&prefix.bucket, &format!("{}{name}0", prefix.key)));
                if folder.as_str() > after {
                    names.push((folder, KnownName::Folder));
                }
            }
            None => {
                from = Bound::Excluded(at.clone());
                names.push((at.key.clone(), known(value)));
            }
        }
    }
    names
}
