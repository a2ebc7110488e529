//! The leader's table of all staged objects. Knows no node, no store and no clock of its own.

use crate::aged::AgedObjects;
use crate::ended::EndedRecords;
use crate::manifest::{BucketKey, KeptAttributes, Manifest, Phase, StageClass, StoreBase, staged_etag};
use crate::message::{Answer, KnownName, Located, NamesBelow, SavedName, UnsavedObject};
use crate::shared::stale;
use spurline_object_store::RequestFailure;
use spurline_types::ErrorKind;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::time::{Duration, Instant, SystemTime};

/// Uploaded objects whose readers keep the version of the group.
const SAVED_MAX: usize = 100_000;
/// Objects that were taken, and are remembered.
const TAKEN_MAX: usize = 100_000;
/// Names of an answer.
const STAGED_NAMES_MAX: usize = 2000;
/// The upload of an object begins this long after the close: programs write a file and rename it.
const UPLOAD_LINGER: Duration = Duration::from_secs(1);
/// An upload whose name is being changed is looked at again after this time.
const LOCKED_NAME_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause after a failed upload.
const UPLOAD_PAUSE_MAX: Duration = Duration::from_secs(30);

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
    /// Nodes of the manifest that do not have the object: they came back without, or never got it.
    pub missing: BTreeSet<String>,
    /// Nodes of the manifest that have given no answer since the begin of the term.
    pub unheard: BTreeSet<String>,
    /// Earlier objects of the name, which stay until this object is at two failure domains with the leader's knowledge of these.
    pub replaced: Vec<Manifest>,
    /// The nodes have the object without the leader's knowledge of earlier objects.
    pub is_untold: bool,
    /// Scratch data whose node gives no answer: readers find nothing until the node is back.
    pub is_away: bool,
}

impl Entry {
    /// Whether all nodes of the manifest are known to have the object.
    pub fn is_confirmed(&self) -> bool {
        self.missing.is_empty() && self.unheard.is_empty()
    }

    /// Whether nodes are to get the object, or more knowledge of earlier objects.
    pub fn is_wounded(&self) -> bool {
        !self.missing.is_empty() || self.is_untold && self.unheard.is_empty()
    }

    /// Whether readers find no object of the name.
    pub fn is_absent(&self) -> bool {
        self.manifest.phase != Phase::Waiting || self.is_away
    }
}

/// An upload or a removal under way.
pub struct UploadJob {
    record: String,
    /// Another object has the name since: this object ends with the job.
    replaced: Option<Manifest>,
}

/// The object of a job at its end.
enum JobEnd {
    /// Another object has the name since; this one was the last of the job's record.
    Replaced(Box<Manifest>),
    /// The object still has the name, in this phase.
    Newest(Phase),
    /// The object was dropped.
    Gone,
}

/// What a writer's condition means for a new object.
pub enum Admitted {
    /// The object is there already: the writer asks once more.
    Known(String),
    /// The possible objects of the store.
    New(UploadBase),
}

/// What the store may have when an object is uploaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadBase {
    /// The object that the writer has seen.
    pub base: StoreBase,
    /// Marks of contents that the group may have uploaded since.
    pub begun: Vec<String>,
    /// The group may have removed the object since.
    pub may_be_absent: bool,
}

impl From<StoreBase> for Admitted {
    fn from(base: StoreBase) -> Admitted {
        Admitted::New(UploadBase { base, begun: Vec::new(), may_be_absent: false })
    }
}

/// An object that was taken. All copies of the rename of a folder have one mark: the name counts, too.
#[derive(Clone, PartialEq, Eq, Hash)]
struct TakenObject {
    at: BucketKey,
    mark: String,
}

/// See the head of this file.
#[derive(Default)]
pub struct Ledger {
    /// The last place.
    pub order: u64,
    /// Objects that the store does not have.
    pub entries: BTreeMap<BucketKey, Entry>,
    /// Those of the entries that wait for their upload.
    pub unsaved: AgedObjects,
    /// Those of the entries that are scratch, by folder.
    scratch: HashMap<u64, AgedObjects>,
    /// Objects that were closed until then were said to be late.
    late_until: Option<Instant>,
    /// The record of each uploaded name that fewer than two failure domains may know to be done. A leader that does not know that
    /// uploads the object again, also after a removal at the store.
    pub unsettled: HashMap<BucketKey, String>,
    /// Nodes that have not told in this term what they keep.
    pub unheard_nodes: BTreeSet<String>,
    /// Entries may be wounded.
    pub has_missing: bool,
    saved: BTreeMap<BucketKey, SavedName>,
    saved_order: VecDeque<(BucketKey, String)>,
    /// Names that a change is made to.
    pub locked: HashSet<BucketKey>,
    /// Uploads and removals under way, by name.
    pub uploading: HashMap<BucketKey, UploadJob>,
    /// Objects by the time of their next upload.
    queue: BTreeMap<(Instant, u64), BucketKey>,
    queued: u64,
    /// Records that are done, and that nodes may have.
    pub ended: EndedRecords,
    /// Records that nodes are about to get.
    pub in_flight: HashSet<String>,
    /// Marks of objects that were taken, by the time: a call that comes once more, and late, is not executed again.
    taken: HashSet<TakenObject>,
    taken_order: VecDeque<TakenObject>,
}

impl Ledger {
    /// The entry of this record, if no other record has the name.
    pub fn entry_of(&self, manifest: &Manifest) -> Option<&Entry> {
        self.entries.get(&manifest.at).filter(|entry| entry.manifest.record == manifest.record)
    }

    /// The same, to change that.
    pub fn entry_of_mut(&mut self, manifest: &Manifest) -> Option<&mut Entry> {
        self.entries.get_mut(&manifest.at).filter(|entry| entry.manifest.record == manifest.record)
    }

    /// Compares a writer's condition with the entry of the name.
    ///
    /// # Errors
    /// `Stale` if the condition does not hold.
    pub fn admit(&self, at: &BucketKey, condition: &StoreBase, mark: &str) -> Answer<Admitted> {
        if self.is_taken(at, mark) {
            return Ok(Admitted::Known(staged_etag(mark)));
        }
        let Some(entry) = self.entries.get(at) else { return self.admit_at_store(at, condition, mark) };
        let manifest = &entry.manifest;
        if manifest.mark == mark {
            return Ok(Admitted::Known(manifest.etag()));
        }
        let is_gone = entry.is_absent();
        let holds = match condition {
            StoreBase::Any => true,
            StoreBase::Absent => is_gone,
            StoreBase::Version(etag) => !is_gone && *etag == manifest.etag(),
        };
        if !holds {
            return Err(stale(at));
        }
        // The removal takes any object of the store, and a new one must not: another writer may have made that.
        if is_gone && !entry.is_away && manifest.base == StoreBase::Any && *condition == StoreBase::Absent {
            let why = format!("'{}' is being removed at the store", at.key);
            return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
        }
        let mut begun = manifest.begun.clone();
        if entry.begun {
            begun.push(manifest.mark.clone());
        }
        // Whatever the store has: the object here may be about to meet a conflict.
        let base = if *condition == StoreBase::Any { StoreBase::Any } else { manifest.base.clone() };
        Ok(Admitted::New(UploadBase { base, begun, may_be_absent: manifest.may_be_absent || is_gone }))
    }

    fn admit_at_store(&self, at: &BucketKey, condition: &StoreBase, mark: &str) -> Answer<Admitted> {
        let Some(saved) = self.saved.get(at) else { return Ok(condition.clone().into()) };
        if crate::manifest::staged_mark(&saved.etag) == Some(mark) {
            return Ok(Admitted::Known(saved.etag.clone()));
        }
        match condition {
            StoreBase::Absent => Err(stale(at)),
            StoreBase::Version(etag) if *etag == saved.etag => Ok(StoreBase::Version(saved.real.clone()).into()),
            StoreBase::Version(etag) if crate::manifest::staged_mark(etag).is_some() => Err(stale(at)),
            other => Ok(other.clone().into()),
        }
    }

    /// Takes an object; the object before is done unless its upload is under way.
    pub fn enter(&mut self, manifest: Manifest, closed: Instant, begun: bool) {
        let Some(before) = self.put_entry(manifest, closed, begun) else { return };
        let before = self.leave_to_job(before);
        before.iter().for_each(|before| self.end(before, Phase::Done, []));
    }

    /// Gives an object the name; the entry before.
    fn put_entry(&mut self, manifest: Manifest, closed: Instant, begun: bool) -> Option<Entry> {
        let at = manifest.at.clone();
        self.saved.remove(&at);
        if manifest.class == StageClass::Staged {
            self.queue_at(closed + UPLOAD_LINGER, &at);
        }
        let entry = Entry {
            manifest,
            closed,
            begun,
            failures: 0,
            error: None,
            missing: BTreeSet::new(),
            unheard: BTreeSet::new(),
            replaced: Vec::new(),
            is_untold: false,
            is_away: false,
        };
        let before = self.take_entry(&at);
        if let Some(aged) = self.aged(entry.manifest.class) {
            aged.add(entry.closed, &at, entry.manifest.size);
        }
        self.entries.insert(at, entry);
        before
    }

    /// The objects of an entry that has lost its name, without an object whose upload is under way: that object ends with the upload.
    fn leave_to_job(&mut self, before: Entry) -> Vec<Manifest> {
        let Entry { manifest, mut replaced, .. } = before;
        match self.uploading.get_mut(&manifest.at).filter(|job| job.record == manifest.record) {
            Some(job) => job.replaced = Some(manifest),
            None => replaced.push(manifest),
        }
        replaced
    }

    fn aged(&mut self, class: StageClass) -> Option<&mut AgedObjects> {
        match class {
            StageClass::Staged => Some(&mut self.unsaved),
            StageClass::Scratch { folder, .. } => Some(self.scratch.entry(folder).or_default()),
            StageClass::Part => None,
        }
    }

    fn take_entry(&mut self, at: &BucketKey) -> Option<Entry> {
        let entry = self.entries.remove(at)?;
        if let Some(aged) = self.aged(entry.manifest.class) {
            aged.remove(entry.closed, at, entry.manifest.size);
        }
        Some(entry)
    }

    /// Scratch objects that are older than their folder allows, and the oldest of folders with more bytes than their quota. The rule of a
    /// folder is that of its newest object.
    pub fn expired_scratch(&self, now: Instant) -> Vec<BucketKey> {
        let mut expired = Vec::new();
        for folder in self.scratch.values() {
            let newest = folder.iter().next_back().and_then(|(_, at)| self.entries.get(at));
            let Some(StageClass::Scratch { ttl_s, quota, .. }) = newest.map(|entry| entry.manifest.class) else {
                continue;
            };
            let mut excess = folder.bytes().saturating_sub(quota);
            for (closed, at) in folder.iter() {
                // A folder stays when the last of its files ends.
                if at.key.ends_with('/') {
                    continue;
                }
                if excess == 0 && now.saturating_duration_since(*closed) < Duration::from_secs(ttl_s) {
                    break;
                }
                excess = excess.saturating_sub(self.entries.get(at).map_or(0, |entry| entry.manifest.size));
                expired.push(at.clone());
            }
        }
        expired
    }

    /// The objects that have waited longer than this for their upload, and were not late at the last call.
    pub fn new_late(&mut self, now: Instant, deadline: Duration) -> Vec<&Entry> {
        let Some(until) = now.checked_sub(deadline) else { return Vec::new() };
        let late = self.unsaved.closed_between(self.late_until, until);
        let late = late.filter_map(|at| self.entries.get(at)).collect();
        self.late_until = Some(until);
        late
    }

    /// Earlier objects of the name are done, if two failure domains have the newest, with the leader's knowledge of these.
    pub fn end_replaced(&mut self, at: &BucketKey) {
        let Some(entry) = self.entries.get_mut(at).filter(|entry| entry.is_confirmed() && !entry.is_untold) else {
            return;
        };
        let replaced = std::mem::take(&mut entry.replaced);
        replaced.iter().for_each(|replaced| self.end(replaced, Phase::Done, []));
    }

    /// Drops the records from `unsettled` that all nodes know to be done.
    pub fn forget_settled(&mut self) {
        let Ledger { unsettled, ended, .. } = self;
        unsettled.retain(|_, record| ended.told(record).is_some());
    }

    /// Whether an object of this name with this mark was taken.
    pub fn is_taken(&self, at: &BucketKey, mark: &str) -> bool {
        self.taken.contains(&TakenObject { at: at.clone(), mark: mark.to_owned() })
    }

    /// Notes an object that was taken.
    pub fn note_taken(&mut self, at: &BucketKey, mark: &str) {
        let taken = TakenObject { at: at.clone(), mark: mark.to_owned() };
        if self.taken.insert(taken.clone()) {
            self.taken_order.push_back(taken);
        }
        while self.taken_order.len() > TAKEN_MAX {
            let Some(oldest) = self.taken_order.pop_front() else { break };
            self.taken.remove(&oldest);
        }
    }

    /// Takes an object that a node has brought back, unless a later object has the name. `has_told`: nodes that have listed their objects
    /// before, without this one.
    pub fn adopt(&mut self, mut manifest: Manifest, node: &str, has_told: impl Fn(&str) -> bool) {
        let is_old = self.ended.is_replaced(&manifest.at, manifest.place());
        if !manifest.is_at(node) {
            manifest.former.push(node.to_owned());
        }
        let at = manifest.at.clone();
        match self.entries.get(&at).map(|entry| &entry.manifest) {
            Some(newer) if newer.place() > manifest.place() => return self.note_replaced(manifest),
            None if is_old => return self.end(&manifest, Phase::Done, []),
            Some(before) => manifest.absorb(before),
            None => {}
        }
        let uploaded = self.ended.marks_of(&at);
        uploaded.iter().for_each(|mark| manifest.add_begun(mark));
        let others: Vec<String> = manifest.nodes().filter(|holder| *holder != node).map(str::to_owned).collect();
        let closed = closed_at(manifest.closed_s);
        let before = self.put_entry(manifest, closed, true);
        let is_untold = before.is_some() || !uploaded.is_empty();
        let replaced = before.map(|before| self.leave_to_job(before)).unwrap_or_default();
        if let Some(entry) = self.entries.get_mut(&at) {
            (entry.missing, entry.unheard) = others.into_iter().partition(|other| has_told(other));
            entry.is_untold = is_untold;
            entry.replaced = replaced;
            self.has_missing = true;
        }
    }

    /// Ends an object that is done by the word of a node that has come back, and earlier objects of the name.
    pub fn note_done(&mut self, manifest: &Manifest, node: &String) {
        self.end(manifest, Phase::Done, [node]);
        let at = &manifest.at;
        if self.entries.get(at).is_some_and(|entry| entry.manifest.place() <= manifest.place()) {
            self.remove(at, []);
        } else if let Some(entry) = self.entries.get_mut(at) {
            entry.manifest.add_begun(&manifest.mark);
            entry.is_untold = true;
            self.has_missing = true;
        }
    }

    /// Notes an object that a node has brought back, and that a later object of the name has replaced without this leader's knowledge.
    fn note_replaced(&mut self, manifest: Manifest) {
        if let Some(entry) = self.entries.get_mut(&manifest.at) {
            entry.manifest.absorb(&manifest);
            entry.replaced.push(manifest);
            entry.is_untold = true;
            self.has_missing = true;
        }
    }

    /// The nodes that lack an object.
    pub fn lacking_nodes(&self) -> BTreeSet<String> {
        if !self.has_missing {
            return BTreeSet::new();
        }
        // The loss of scratch data is no reason to wait for a node.
        let entries = self.entries.values().filter(|entry| entry.manifest.class.domains() > 1);
        let names: BTreeSet<&String> = entries.flat_map(|entry| &entry.missing).collect();
        names.into_iter().cloned().collect()
    }

    /// A node answers again: readers find the scratch data there.
    pub fn note_back(&mut self, node: &str) {
        let of_node = self.entries.values_mut().filter(|entry| entry.is_away && entry.manifest.is_at(node));
        of_node.for_each(|entry| entry.is_away = false);
    }

    /// All nodes that may have this record are to forget it; these know already that the record is done.
    pub fn end<'a>(&mut self, manifest: &Manifest, phase: Phase, told: impl IntoIterator<Item = &'a String>) {
        self.ended.add(manifest, phase, told);
        if manifest.class.domains() == 1 {
            // A node that comes back may have earlier scratch data of the name.
            for node in &self.unheard_nodes {
                self.ended.add_holder(&manifest.record, node);
            }
        }
    }

    /// Whether the store's object decides about a condition: nothing is known of the name.
    ///
    /// # Errors
    /// `Stale` for a version that was replaced or removed.
    pub fn needs_store(&self, at: &BucketKey, condition: &StoreBase, is_new_leader: bool) -> Answer<bool> {
        if self.entries.contains_key(at) {
            return Ok(false);
        }
        if let Some(saved) = self.saved.get(at) {
            // An older version, or that of a stranger.
            let StoreBase::Version(etag) = condition else { return Ok(false) };
            return Ok(crate::manifest::staged_mark(etag).is_none() && *etag != saved.real);
        }
        match condition {
            StoreBase::Any => Ok(false),
            // Most objects are new.
            StoreBase::Absent => Ok(is_new_leader),
            StoreBase::Version(etag) => match crate::manifest::staged_mark(etag) {
                Some(mark) if self.is_taken(at, mark) => Err(stale(at)),
                _ => Ok(true),
            },
        }
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
            if self.uploading.contains_key(&at) {
                continue;
            }
            // A change is under way that takes this object for one whose upload has not begun.
            if self.locked.contains(&at) {
                self.queue_at(now + LOCKED_NAME_PAUSE, &at);
                continue;
            }
            entry.begun = true;
            self.uploading.insert(at, UploadJob { record: entry.manifest.record.clone(), replaced: None });
            return Ok(entry.manifest.clone());
        }
    }

    /// An upload has ended with this etag of the store, and these nodes know.
    pub fn note_saved(&mut self, manifest: &Manifest, real: &str, told: &BTreeSet<String>, now: Instant) {
        let at = &manifest.at;
        match self.end_job(manifest) {
            JobEnd::Replaced(replaced) => {
                // The store has this content, and none before.
                if let Some(entry) = self.entries.get_mut(at) {
                    entry.manifest.begun = vec![manifest.mark.clone()];
                }
                self.end_of_job(*replaced, told, now);
            }
            JobEnd::Newest(Phase::Waiting) => {
                self.remove(at, told);
                let saved =
                    SavedName { real: real.to_owned(), etag: manifest.etag(), closed_s: Some(manifest.closed_s) };
                self.enter_saved(at, saved);
            }
            // Removed meanwhile: the object is removed at the store, too.
            JobEnd::Newest(_) => self.queue_at(now, at),
            JobEnd::Gone => self.end(manifest, Phase::Done, told),
        }
    }

    /// The store does not have a removed object any more, and these nodes know.
    pub fn note_removed(&mut self, manifest: &Manifest, told: &BTreeSet<String>, now: Instant) {
        let at = &manifest.at;
        match self.end_job(manifest) {
            JobEnd::Replaced(replaced) => self.end_of_job(*replaced, told, now),
            // The store may have another object of the group, by the word of a node that has come back meanwhile.
            JobEnd::Newest(_) if self.knows_more(manifest) => self.queue_at(now, at),
            JobEnd::Newest(_) => self.remove(at, told),
            JobEnd::Gone => self.end(manifest, Phase::Done, told),
        }
    }

    /// Another object has the name of a job since, and is next.
    fn end_of_job(&mut self, replaced: Manifest, told: &BTreeSet<String>, now: Instant) {
        let at = replaced.at.clone();
        match self.entries.get_mut(&at).filter(|entry| entry.is_untold) {
            Some(entry) => entry.replaced.push(replaced),
            None => self.end(&replaced, Phase::Done, told),
        }
        self.queue_at(now, &at);
    }

    fn knows_more(&self, manifest: &Manifest) -> bool {
        self.entry_of(manifest).is_some_and(|entry| entry.manifest.begun != manifest.begun)
    }

    fn end_job(&mut self, manifest: &Manifest) -> JobEnd {
        if let Some(replaced) = self.uploading.remove(&manifest.at).and_then(|job| job.replaced) {
            return JobEnd::Replaced(Box::new(replaced));
        }
        self.entry_of(manifest).map_or(JobEnd::Gone, |entry| JobEnd::Newest(entry.manifest.phase))
    }

    fn enter_saved(&mut self, at: &BucketKey, saved: SavedName) {
        self.saved_order.push_back((at.clone(), saved.etag.clone()));
        self.saved.insert(at.clone(), saved);
        while self.saved_order.len() > SAVED_MAX {
            let Some((old, etag)) = self.saved_order.pop_front() else { break };
            if self.saved.get(&old).is_some_and(|saved| saved.etag == etag) {
                self.saved.remove(&old);
            }
        }
    }

    /// The store has made a copy: readers know the object by the store's version.
    pub fn note_copied(&mut self, at: &BucketKey, real: &str) {
        self.enter_saved(at, SavedName { real: real.to_owned(), etag: real.to_owned(), closed_s: None });
    }

    /// An upload or a removal has failed.
    pub fn note_failed(&mut self, manifest: &Manifest, why: &str, now: Instant) {
        let at = &manifest.at;
        match self.end_job(manifest) {
            JobEnd::Replaced(replaced) => self.end_of_job(*replaced, &BTreeSet::new(), now),
            JobEnd::Newest(_) => {
                let Some(entry) = self.entries.get_mut(at) else { return };
                entry.failures += 1;
                entry.error = Some(why.to_owned());
                let pause = Duration::from_secs(1 << entry.failures.min(5)).min(UPLOAD_PAUSE_MAX);
                self.queue_at(now + pause, at);
            }
            JobEnd::Gone => self.end(manifest, Phase::Done, []),
        }
    }

    /// Forgets a name that was removed, or that scratch data had; these nodes know already.
    pub fn remove<'a>(&mut self, at: &BucketKey, told: impl IntoIterator<Item = &'a String>) {
        if let Some(entry) = self.take_entry(at) {
            entry.replaced.iter().for_each(|replaced| self.end(replaced, Phase::Done, []));
            self.end(&entry.manifest, Phase::Done, told);
        }
    }

    /// The knowledge of a name.
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
        let entries = names_below(&self.entries, prefix, after, is_folded, listed_entry);
        // A table that goes on has all names up to the last only.
        let cut = |names: &[(String, KnownName)]| {
            (names.len() > STAGED_NAMES_MAX).then(|| names[STAGED_NAMES_MAX - 1].0.clone())
        };
        let until = cut(&saved).into_iter().chain(cut(&entries)).min();
        // The store lists the folders of its objects.
        names.extend(saved.into_iter().map(|(name, known)| match known {
            KnownName::Folder => (name, KnownName::Unknown),
            _ => (name, known),
        }));
        names.extend(entries);
        if let Some(until) = &until {
            names.retain(|name, _| name <= until);
        }
        let has_more = until.is_some() || names.len() > STAGED_NAMES_MAX;
        let object = prefix.key.strip_suffix('/').map(|key| BucketKey::new(&prefix.bucket, key));
        let entry = object.and_then(|object| self.entries.get(&object));
        let is_object = entry.is_some_and(|entry| !entry.is_absent());
        NamesBelow { names: names.into_iter().take(STAGED_NAMES_MAX).collect(), has_more, is_object }
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

    /// The object of the store was removed.
    pub fn forget_saved(&mut self, at: &BucketKey) {
        self.saved.remove(at);
    }

    /// All objects that the store does not have, oldest first.
    pub fn unsaved(&self, now: Instant) -> Vec<UnsavedObject> {
        let entries = self.entries.values().filter(|entry| entry.manifest.class != StageClass::Part);
        let mut entries: Vec<&Entry> = entries.collect();
        entries.sort_by_key(|entry| entry.closed);
        let shown = entries.into_iter().map(|entry| {
            let nodes: BTreeSet<&str> = entry.manifest.nodes().collect();
            UnsavedObject {
                at: entry.manifest.at.clone(),
                size: entry.manifest.size,
                age_s: now.saturating_duration_since(entry.closed).as_secs(),
                holders: nodes.into_iter().map(str::to_owned).collect(),
                is_scratch: entry.manifest.class != StageClass::Staged,
                is_removal: entry.manifest.phase != Phase::Waiting,
                error: entry.error.clone(),
            }
        });
        shown.collect()
    }
}

/// The time of a close by this process's clock, from seconds since 1970.
pub fn closed_at(closed_s: u64) -> Instant {
    let now_s = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let age = Duration::from_secs(now_s.saturating_sub(closed_s));
    Instant::now().checked_sub(age).unwrap_or_else(Instant::now)
}

/// An object as a listing needs it.
fn listed_entry(entry: &Entry) -> KnownName {
    if entry.is_absent() {
        return KnownName::Removing;
    }
    let pieces = Vec::new();
    let attributes = KeptAttributes::default();
    let manifest = Manifest { pieces, attributes, begun: Vec::new(), ..entry.manifest.clone() };
    KnownName::Object(Box::new(manifest))
}

fn known_entry(entry: &Entry) -> KnownName {
    if entry.is_absent() { KnownName::Removing } else { KnownName::Object(Box::new(entry.manifest.clone())) }
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
    while names.len() <= STAGED_NAMES_MAX {
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

#[cfg(test)]
mod tests;
