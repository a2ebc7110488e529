//! The leader of a term: takes, copies and removes staged objects, and answers questions about names. A change counts when two
//! failure domains have it on their disks.

mod nodes;
mod publish;
mod recovery;

use crate::lapsing::call_upload;
use crate::ledger::{Admitted, Ledger, UploadBase};
use crate::manifest::{BucketKey, KeptAttributes, Manifest, Phase, Piece, StageClass, StoreBase, staged_mark};
use crate::message::{Answer, CopyCall, KnownName, NewObject, Reply, StageCall, StageReply, UnsavedList};
use crate::peers::{TermFacts, TermRecord, no_leader, reply_of};
use crate::shared::{STAGE_CALL_TIME, StageShared, new_name, stale, thread_ended};
use nodes::NodeTable;
use parking_lot::{Condvar, Mutex, MutexGuard};
use spurline_object_store::{
    AnswerProgress, BucketSides, CopySource, ObjectAttributes, RequestFailure, StoredObject, WriteCondition, bare_etag,
    mark_in,
};
use spurline_types::ErrorKind;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

pub use recovery::take_over;

/// Longest time of a change.
const CHANGE_TIME: Duration = Duration::from_secs(20);
/// A leader without a confirmation for this long answers nothing.
pub const VALID_TIME: Duration = Duration::from_secs(3);
/// The time of a look at all nodes, of which the next comes a second later: a node that hangs must not make the leader invalid.
const LOOK_TIME: Duration = Duration::from_secs(1);
/// An upload is late after this time.
const UPLOAD_DEADLINE: Duration = Duration::from_secs(60);
/// Nodes that are called at once, each by a thread.
const CALLS_AT_ONCE: usize = 32;
/// A leader does not know for this long what earlier ones have uploaded lately.
const NEW_LEADER_TIME: Duration = Duration::from_secs(600);
/// A change waits this long for a look at the store.
const HEAD_TIME: Duration = Duration::from_secs(3);
/// If the store gave no answer, the next changes do not look.
const STORE_PAUSE: Duration = Duration::from_secs(20);
/// Nodes that are tried for a copy.
const HOLD_TRIES: usize = 4;
/// Failure domains that have a staged object.
pub const DOMAINS: usize = 2;

/// See the head of this file.
pub struct Leader {
    shared: Arc<StageShared>,
    record: Arc<dyn TermRecord>,
    term: u64,
    instance: u64,
    ledger: Mutex<Ledger>,
    changed: Condvar,
    nodes: NodeTable,
    /// The registry's last record.
    facts: Mutex<TermFacts>,
    /// All acknowledged objects were found at the begin of the term, for at most one failure domain was away.
    is_complete: AtomicBool,
    began: Instant,
    /// The store gave no answer lately: conditions are not compared with that until then.
    store_silent_until: Mutex<Option<Instant>>,
    valid_until: Mutex<Instant>,
    is_over: AtomicBool,
}

/// A name to which a single change is made at a time.
struct NameLock<'a> {
    leader: &'a Leader,
    at: BucketKey,
}

impl Drop for NameLock<'_> {
    fn drop(&mut self) {
        self.leader.ledger.lock().locked.remove(&self.at);
        self.leader.changed.notify_all();
    }
}

/// A record that nodes are about to get.
struct InFlight<'a> {
    leader: &'a Leader,
    record: String,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.leader.ledger.lock().in_flight.remove(&self.record);
    }
}

/// Seconds since 1970.
fn seconds_now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

impl Leader {
    /// Whether another leader may have taken over.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Ends the term, so that another node can begin a term at once.
    pub fn resign(&self) {
        self.step_down("this node stops");
        if let Ok((version, facts)) = self.record.read()
            && facts.term == self.term
        {
            let _ = self.record.replace(version, &TermFacts { leader: String::new(), ..facts });
        }
    }

    /// Ends the term.
    pub fn step_down(&self, why: &str) {
        if !self.is_over.swap(true, Ordering::AcqRel) {
            tracing::info!("this node keeps the order of staged files no longer (term {}): {why}", self.term);
            self.clear_gauges();
        }
        self.changed.notify_all();
    }

    /// Ends the term if another is newer.
    pub fn step_down_before(&self, term: u64) {
        if term > self.term {
            self.step_down(&format!("term {term} has begun"));
        }
    }

    fn check_valid(&self) -> Answer<()> {
        if self.is_over() || Instant::now() > *self.valid_until.lock() { Err(no_leader()) } else { Ok(()) }
    }

    /// Answers a call, to the leader or to any node.
    pub fn serve_any(self: &Arc<Self>, call: StageCall, bytes: &[u8]) -> Reply {
        if !call.is_for_leader() {
            return reply_of(self.shared.serve(call, bytes));
        }
        match self.check_valid() {
            Ok(()) => reply_of(self.answer(call, bytes)),
            Err(_) => StageReply::NotLeader(None).into(),
        }
    }

    fn answer(self: &Arc<Self>, call: StageCall, bytes: &[u8]) -> Answer<Reply> {
        Ok(match call {
            StageCall::Find(at) => StageReply::Known(self.ledger.lock().find(&at)),
            StageCall::FindBelow { prefix, after, is_folded } => {
                StageReply::Names(self.ledger.lock().find_below(&prefix, &after, is_folded))
            }
            StageCall::Locate { at, etag } => StageReply::Located(self.ledger.lock().locate(&at, &etag)),
            StageCall::Commit(new) => StageReply::Text(self.commit(new, bytes.to_vec())?),
            StageCall::Copy(copy) => self.copy(copy)?,
            StageCall::Remove { at, condition } => self.remove(&at, &condition)?,
            StageCall::ListUnsaved => {
                let unsaved = self.ledger.lock().unsaved(Instant::now());
                StageReply::Unsaved(UnsavedList::new(unsaved))
            }
            StageCall::Drop(at) => {
                let deadline = Instant::now() + CHANGE_TIME;
                let _lock = self.lock_name(&at, deadline)?;
                let dropped = self.ledger.lock().entries.get(&at).map(|entry| entry.manifest.clone());
                if let Some(dropped) = dropped {
                    let told = self.settle(&dropped, Phase::Done)?;
                    self.ledger.lock().remove(&at, &told);
                }
                self.changed.notify_all();
                StageReply::Done
            }
            other => return self.shared.serve(other, bytes),
        }
        .into())
    }

    fn lock_name(&self, at: &BucketKey, deadline: Instant) -> Answer<NameLock<'_>> {
        let mut ledger = self.ledger.lock();
        while ledger.locked.contains(at) {
            if self.changed.wait_until(&mut ledger, deadline).timed_out() {
                let why = format!("another change of '{}' takes too long", at.key);
                return Err(RequestFailure::transient(ErrorKind::Timeout, why));
            }
        }
        ledger.locked.insert(at.clone());
        Ok(NameLock { leader: self, at: at.clone() })
    }

    /// Takes an object; its version.
    fn commit(self: &Arc<Self>, new: NewObject, inline: Vec<u8>) -> Answer<String> {
        let _lock = self.lock_name(&new.at, Instant::now() + CHANGE_TIME)?;
        self.commit_locked(new, inline)
    }

    fn commit_locked(self: &Arc<Self>, new: NewObject, inline: Vec<u8>) -> Answer<String> {
        let mark = new.attributes.mark().unwrap_or_else(new_name);
        let admitted = self.admit(&new.at, &new.condition, &mark, new.class)?;
        let UploadBase { base, begun, may_be_absent } = match admitted {
            Admitted::New(base) => base,
            Admitted::Known(etag) => match self.doubtful_base(&new.at, &mark) {
                Some(base) => base,
                None => return Ok(etag),
            },
        };
        let holders = if new.pieces.is_empty() { self.choose_holders(new.class)? } else { holders_of(&new.pieces) };
        let order = self.next_order();
        let manifest = Manifest {
            at: new.at,
            record: new_name(),
            attributes: new.attributes.marked(&mark),
            mark,
            term: self.term,
            order,
            phase: Phase::Waiting,
            class: new.class,
            base,
            begun,
            may_be_absent,
            size: new.size,
            pieces: new.pieces,
            closed_s: seconds_now(),
            holders,
            former: Vec::new(),
            revision: 0,
        };
        let _in_flight = self.note_in_flight(&manifest.record);
        let no_nodes = BTreeSet::new();
        // Parts of a node that was lost since get another copy first.
        let manifest = self.replace_holders(&manifest, &no_nodes, &no_nodes, true)?;
        let manifest = self.hold_everywhere(manifest, &inline)?;
        let etag = manifest.etag();
        let stats = &self.shared.stats.stage;
        stats.acknowledged_objects.add(1);
        stats.acknowledged_bytes.add(manifest.size);
        tracing::debug!(
            key = manifest.at.key,
            mark = manifest.mark,
            base = ?manifest.base,
            begun = ?manifest.begun,
            "a staged file is taken"
        );
        let mut ledger = self.ledger.lock();
        ledger.note_taken(&manifest.at, &manifest.mark);
        ledger.enter(manifest, Instant::now(), false);
        drop(ledger);
        self.changed.notify_all();
        Ok(etag)
    }

    fn note_in_flight(&self, record: &str) -> InFlight<'_> {
        self.ledger.lock().in_flight.insert(record.to_owned());
        InFlight { leader: self, record: record.to_owned() }
    }

    /// Compares a writer's condition with the object of the name: here, or at the store if that answers soon. Without an answer the
    /// upload finds out.
    fn admit(&self, at: &BucketKey, condition: &StoreBase, mark: &str, class: StageClass) -> Answer<Admitted> {
        let is_new_leader = self.term > 1 && self.began.elapsed() < NEW_LEADER_TIME;
        let (is_saved, needs_store) = {
            let ledger = self.ledger.lock();
            // The store has no object of a name that is never uploaded.
            if ledger.is_taken(at, mark) || class != StageClass::Staged {
                return ledger.admit(at, condition, mark);
            }
            let is_saved = matches!(ledger.find(at), KnownName::Saved(_));
            (is_saved, ledger.needs_store(at, condition, is_new_leader)?)
        };
        if !(needs_store || is_saved && *condition == StoreBase::Absent) {
            return self.ledger.lock().admit(at, condition, mark);
        }
        let Some(found) = self.try_head(at) else {
            // The writer has seen another version than the last upload: an older one, or that of a stranger.
            if is_saved && needs_store {
                let why = format!("the store does not say which version of '{}' is the newest", at.key);
                return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
            }
            return self.ledger.lock().admit(at, condition, mark);
        };
        if is_saved && *condition == StoreBase::Absent {
            // A stranger may have removed the object since.
            if found.is_none() {
                self.ledger.lock().forget_saved(at);
            }
            return self.ledger.lock().admit(at, condition, mark);
        }
        let Some(found) = found else {
            return match condition {
                StoreBase::Version(_) => Err(no_object(at)),
                _ => Ok(condition.clone().into()),
            };
        };
        let etag = bare_etag(found.raw.etag.as_deref().unwrap_or_default()).to_owned();
        let found_mark = mark_in(&found.attributes);
        if found_mark == Some(mark) {
            return Ok(Admitted::Known(etag));
        }
        match condition {
            StoreBase::Version(wanted)
                if *wanted == etag || found_mark.is_some() && staged_mark(wanted) == found_mark =>
            {
                Ok(StoreBase::Version(etag).into())
            }
            _ => Err(stale(at)),
        }
    }

    /// The object of the store, if that answers soon.
    fn try_head(&self, at: &BucketKey) -> Option<Option<StoredObject>> {
        let now = Instant::now();
        if self.store_silent_until.lock().is_some_and(|until| now < until) {
            return None;
        }
        let head = self.shared.store(&at.bucket).and_then(|store| {
            store.send(HEAD_TIME, &AnswerProgress::default(), async |sides: BucketSides<'_>| {
                sides.writes.head_all(&at.key).await
            })
        });
        match head {
            Ok(found) => Some(Some(found)),
            Err(failure) if failure.error.kind() == ErrorKind::NotFound => Some(None),
            Err(_) => {
                *self.store_silent_until.lock() = Some(Instant::now() + STORE_PAUSE);
                None
            }
        }
    }

    /// The store's possible objects under an object that a writer asks for again, and that an earlier leader has taken: `None` if two failure
    /// domains have that, and all nodes were heard. Otherwise the object becomes a new record: a node that gives no answer may know that
    /// the earlier record was withdrawn.
    fn doubtful_base(&self, at: &BucketKey, mark: &str) -> Option<UploadBase> {
        let ledger = self.ledger.lock();
        let entry = ledger.entries.get(at).filter(|entry| entry.manifest.mark == mark && !entry.is_absent())?;
        let may_be_withdrawn = entry.manifest.term < self.term && !ledger.unheard_nodes.is_empty();
        if entry.is_confirmed() && !may_be_withdrawn {
            return None;
        }
        let Manifest { base, mut begun, may_be_absent, mark, .. } = entry.manifest.clone();
        if entry.begun {
            begun.push(mark);
        }
        Some(UploadBase { base, begun, may_be_absent })
    }

    fn next_order(&self) -> u64 {
        let mut ledger = self.ledger.lock();
        ledger.order += 1;
        ledger.order
    }

    /// Has all holders keep a manifest, or others in their place; the manifest as kept.
    fn hold_everywhere(self: &Arc<Self>, mut manifest: Manifest, inline: &[u8]) -> Answer<Manifest> {
        for _ in 0..HOLD_TRIES {
            let call = StageCall::Hold { term: self.term, manifest: Box::new(manifest.clone()) };
            let results = self.call_all(&manifest.holders, &call, inline);
            let mut failed = Vec::new();
            let mut last = None;
            for (node, result) in results {
                if let Err(failure) = result {
                    tracing::debug!(node, "a node did not take a staged file: {}", failure.error);
                    failed.push(node);
                    last = Some(failure);
                }
            }
            let Some(failure) = last else { return Ok(manifest) };
            if self.is_over() {
                return Err(no_leader());
            }
            let failed: BTreeSet<String> = failed.into_iter().collect();
            let replaced = self.replace_holders(&manifest, &failed, &failed, !inline.is_empty());
            // Those that failed may have the manifest.
            manifest.former.extend(failed);
            let Ok(replaced) = replaced else {
                self.withdraw(&manifest);
                return Err(failure);
            };
            let former = std::mem::take(&mut manifest.former);
            manifest = Manifest { former, revision: manifest.revision + 1, ..replaced };
        }
        self.withdraw(&manifest);
        let why = format!("no two nodes of different failure domains take '{}' now", manifest.at.key);
        Err(RequestFailure::transient(ErrorKind::Unavailable, why))
    }

    /// Has all nodes forget a manifest that did not count.
    fn withdraw(&self, manifest: &Manifest) {
        self.ledger.lock().end(manifest, Phase::Withdrawn, []);
        self.changed.notify_all();
    }

    /// Has two failure domains know a phase: those that have the object, or others in the place of silent ones. Returns the nodes that know.
    fn settle(self: &Arc<Self>, manifest: &Manifest, phase: Phase) -> Answer<BTreeSet<String>> {
        let _in_flight = self.note_in_flight(&manifest.record);
        let settled = Manifest { phase, revision: manifest.revision + 1, ..manifest.clone() };
        let call = StageCall::Hold { term: self.term, manifest: Box::new(settled) };
        let nodes: BTreeSet<String> = manifest.nodes().map(str::to_owned).collect();
        let mut next: Vec<String> = nodes.into_iter().filter(|node| !self.nodes.is_silent(node)).collect();
        let mut tried = BTreeSet::new();
        let mut told = BTreeSet::new();
        let settled = loop {
            for (node, result) in self.call_all(&next, &call, &[]) {
                tried.insert(node.clone());
                if result.is_ok() {
                    told.insert(node);
                }
            }
            if self.is_over() {
                break Err(no_leader());
            }
            match self.further_holder(&told, &tried, manifest.class.domains()) {
                Ok(Some(node)) => next = vec![node],
                Ok(None) => break Ok(()),
                Err(failure) => break Err(failure),
            }
        };
        let mut ledger = self.ledger.lock();
        if let Some(entry) = ledger.entry_of_mut(manifest) {
            let former = &entry.manifest.former;
            let others = tried.into_iter().filter(|node| !entry.manifest.is_at(node) && !former.contains(node));
            let others: Vec<String> = others.collect();
            entry.manifest.former.extend(others);
            entry.manifest.revision = entry.manifest.revision.max(manifest.revision + 1);
        } else {
            ledger.end(&Manifest { holders: tried.into_iter().collect(), ..manifest.clone() }, Phase::Done, []);
        }
        drop(ledger);
        match settled {
            // The upload is known to one node at least: no object is lost if that one is, for the store has the object.
            Err(failure) if told.is_empty() || phase != Phase::Done || self.is_over() => Err(failure),
            _ => Ok(told),
        }
    }

    /// Sends a call to several nodes at once.
    fn call_all(self: &Arc<Self>, nodes: &[String], call: &StageCall, bytes: &[u8]) -> Vec<(String, Answer<Reply>)> {
        nodes.chunks(CALLS_AT_ONCE).flat_map(|some| self.call_some(some, call, bytes)).collect()
    }

    fn call_some(self: &Arc<Self>, nodes: &[String], call: &StageCall, bytes: &[u8]) -> Vec<(String, Answer<Reply>)> {
        let Some((last, others)) = nodes.split_last() else { return Vec::new() };
        std::thread::scope(|scope| {
            let started: Vec<_> =
                others.iter().map(|node| (node, scope.spawn(move || self.order(node, call, bytes)))).collect();
            let last = (last.clone(), self.order(last, call, bytes));
            let joined = started
                .into_iter()
                .map(|(node, thread)| (node.clone(), thread.join().unwrap_or_else(|_| Err(thread_ended()))));
            joined.chain([last]).collect()
        })
    }

    /// Sends a call to a node. A newer term there ends this term.
    fn order(self: &Arc<Self>, node: &str, call: &StageCall, bytes: &[u8]) -> Answer<Reply> {
        if self.is_over() {
            return Err(no_leader());
        }
        let time = if matches!(call, StageCall::Describe { .. }) { LOOK_TIME } else { STAGE_CALL_TIME };
        let reply = self.shared.call(node, call, bytes, time).inspect_err(|_| self.nodes.note_silent(node))?;
        if let StageReply::OldTerm(term) = reply.reply {
            self.step_down(&format!("node {node} follows term {term}"));
        }
        crate::peers::succeeded(reply)
    }

    /// Removes an object.
    fn remove(self: &Arc<Self>, at: &BucketKey, condition: &StoreBase) -> Answer<StageReply> {
        let _lock = self.lock_name(at, Instant::now() + CHANGE_TIME)?;
        let ledger = self.ledger.lock();
        let Some(entry) = ledger.entries.get(at) else {
            drop(ledger);
            self.remove_saved(at, condition)?;
            return Ok(StageReply::Done);
        };
        let is_gone = entry.manifest.phase != Phase::Waiting;
        let holds = match condition {
            StoreBase::Any => true,
            StoreBase::Absent => false,
            StoreBase::Version(etag) => is_gone || *etag == entry.manifest.etag(),
        };
        if !holds {
            return Err(stale(at));
        }
        let manifest = entry.manifest.clone();
        let is_new = manifest.base == StoreBase::Absent && manifest.begun.is_empty() && !manifest.may_be_absent;
        let is_at_group_only = is_new && !entry.begun || manifest.class != StageClass::Staged;
        drop(ledger);
        let settled = self.settle(&manifest, Phase::Removing);
        self.note_removing(&manifest);
        if settled.is_ok() && is_at_group_only {
            // If no two domains are left for this, the next leader finds the removal.
            let told = self.settle(&manifest, Phase::Done).unwrap_or_default();
            self.ledger.lock().remove(at, &told);
        } else {
            // The object of the store is removed later, and by the next leader if this one is lost.
            self.ledger.lock().queue_at(Instant::now(), at);
        }
        self.changed.notify_all();
        settled.map(|_| StageReply::Done)
    }

    /// Removes an object of which the store alone knows.
    fn remove_saved(&self, at: &BucketKey, condition: &StoreBase) -> Answer<()> {
        let condition = self.real_condition(at, condition).map_err(|failure| {
            // A removal that is sent again finds no object, as at the store.
            match self.shared.head_at_store(at) {
                Ok(None) => RequestFailure::fatal(ErrorKind::NotFound, failure.error.message().to_owned()),
                _ => failure,
            }
        })?;
        self.check_settled(at)?;
        let condition = WriteCondition::from(&condition);
        let delete = async |sides: BucketSides<'_>| sides.writes.delete(&at.key, &condition).await;
        self.change_at_store(at, Duration::ZERO, delete)
    }

    /// Checks that two failure domains know of the last upload of a name, before the store's object is changed without a record.
    fn check_settled(&self, at: &BucketKey) -> Answer<()> {
        let mut ledger = self.ledger.lock();
        let Some(record) = ledger.unsettled.get(at) else { return Ok(()) };
        let told = ledger.ended.told(record);
        if told.is_some_and(|told| self.nodes.count_domains(told) < DOMAINS) {
            let why = format!("a single failure domain knows that '{}' is uploaded yet", at.key);
            return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
        }
        ledger.unsettled.remove(at);
        Ok(())
    }

    /// Sends a change to the store. The name stays locked: no other change comes in between.
    fn change_at_store<T>(
        &self,
        at: &BucketKey,
        work_time: Duration,
        request: impl AsyncFnOnce(BucketSides<'_>) -> Answer<T>,
    ) -> Answer<T> {
        self.check_valid()?;
        let changed = self.shared.store(&at.bucket)?.send(CHANGE_TIME + work_time, &AnswerProgress::default(), request);
        // A refused change leaves the last upload there.
        if !matches!(&changed, Err(failure) if failure.error.kind() == ErrorKind::Stale) {
            self.ledger.lock().forget_saved(at);
        }
        changed
    }

    /// The removal goes on, whatever the answer: a node may know.
    fn note_removing(&self, manifest: &Manifest) {
        let mut ledger = self.ledger.lock();
        if let Some(entry) = ledger.entry_of_mut(manifest) {
            entry.manifest.phase = entry.manifest.phase.max(Phase::Removing);
        }
    }

    /// A condition for the store: versions of the group become those of the store.
    fn real_condition(&self, at: &BucketKey, condition: &StoreBase) -> Answer<StoreBase> {
        match condition {
            StoreBase::Version(etag) if staged_mark(etag).is_some() => {
                Ok(StoreBase::Version(self.real_version(at, etag)?))
            }
            other => Ok(other.clone()),
        }
    }

    /// The store's version of an object that was uploaded.
    fn real_version(&self, at: &BucketKey, etag: &str) -> Answer<String> {
        if let crate::message::Located::Saved(real) = self.ledger.lock().locate(at, etag) {
            return Ok(real);
        }
        let found = self.shared.head_at_store(at)?.ok_or_else(|| stale(at))?;
        let is_same = mark_in(&found.attributes).is_some() && mark_in(&found.attributes) == staged_mark(etag);
        let real = found.raw.etag.filter(|_| is_same).ok_or_else(|| stale(at))?;
        Ok(bare_etag(&real).to_owned())
    }

    /// Copies an object.
    fn copy(self: &Arc<Self>, copy: CopyCall) -> Answer<StageReply> {
        let deadline = Instant::now() + CHANGE_TIME;
        loop {
            let lock = self.lock_name(&copy.to, deadline)?;
            if let Some(source) = self.staged_source(&copy) {
                return Ok(StageReply::Text(self.copy_from_group(&source, copy)?));
            }
            if !self.ledger.lock().entries.contains_key(&copy.to) {
                return Ok(StageReply::Text(self.copy_at_store(&copy)?));
            }
            // No upload begins while the name is changed.
            drop(lock);
            self.flush(&copy.to, deadline)?;
        }
    }

    /// The source of a copy, if it is staged.
    fn staged_source(&self, copy: &CopyCall) -> Option<Manifest> {
        let ledger = self.ledger.lock();
        let entry = ledger.entries.get(&copy.from).filter(|entry| !entry.is_absent())?;
        let is_wanted = copy.etag.as_ref().is_none_or(|etag| *etag == entry.manifest.etag());
        is_wanted.then(|| entry.manifest.clone())
    }

    /// Copies a staged object.
    fn copy_from_group(self: &Arc<Self>, source: &Manifest, copy: CopyCall) -> Answer<String> {
        let CopyCall { to, attributes, mark, condition, .. } = copy;
        let attributes = attributes.unwrap_or_else(|| source.attributes.marked(&mark));
        let copied = self.copy_staged(source, &to, attributes, condition);
        copied.map_err(|failure| match failure.error.kind() {
            ErrorKind::Stale => failure,
            // The source may be uploaded meanwhile: the next attempt finds the object at the store.
            _ => RequestFailure::transient(ErrorKind::Unavailable, failure.error.message().to_owned()),
        })
    }

    /// Has the store copy an object.
    fn copy_at_store(&self, copy: &CopyCall) -> Answer<String> {
        let source = match &copy.etag {
            Some(etag) if staged_mark(etag).is_some() => Some(self.real_version(&copy.from, etag)?),
            other => other.clone(),
        };
        let condition = WriteCondition::from(&self.real_condition(&copy.to, &copy.condition)?);
        let attributes = copy.attributes.as_ref().map(ObjectAttributes::from);
        self.check_settled(&copy.to)?;
        let copied = self.change_at_store(&copy.to, copy.work_time, async |sides: BucketSides<'_>| {
            let from = CopySource { key: &copy.from.key, etag: source.as_deref() };
            sides.writes.copy(from, &copy.to.key, attributes.as_ref(), &condition, copy.work_time).await
        });
        let etag = copied.or_else(|failure| self.find_copied(copy).ok_or(failure))?;
        self.ledger.lock().note_copied(&copy.to, bare_etag(&etag));
        Ok(etag)
    }

    /// The version of the copy that an earlier call has made, whose answer was lost.
    fn find_copied(&self, copy: &CopyCall) -> Option<String> {
        let mark = copy.attributes.as_ref()?.mark()?;
        let found = self.shared.head_at_store(&copy.to).ok()??;
        found.raw.etag.filter(|_| mark_in(&found.attributes) == Some(&mark))
    }

    /// Waits until the store has the staged object of a name.
    fn flush(&self, at: &BucketKey, deadline: Instant) -> Answer<()> {
        let mut ledger = self.ledger.lock();
        if ledger.entries.contains_key(at) {
            ledger.queue_at(Instant::now(), at);
            self.changed.notify_all();
        }
        while ledger.entries.contains_key(at) {
            if self.changed.wait_until(&mut ledger, deadline).timed_out() {
                let why = format!("'{}' is not uploaded yet", at.key);
                return Err(RequestFailure::transient(ErrorKind::Timeout, why));
            }
        }
        Ok(())
    }

    /// Stages the bytes of a staged object under another name.
    fn copy_staged(
        self: &Arc<Self>,
        source: &Manifest,
        to: &BucketKey,
        attributes: KeptAttributes,
        condition: StoreBase,
    ) -> Answer<String> {
        let mark = attributes.mark().unwrap_or_else(new_name);
        let admitted = self.admit(to, &condition, &mark, source.class)?;
        if let Admitted::Known(etag) = admitted
            && self.doubtful_base(to, &mark).is_none()
        {
            return Ok(etag);
        }
        let attributes = attributes.marked(&mark);
        self.commit_copy(source, to.clone(), attributes, condition)
    }

    /// Takes an object with the bytes of another; the caller has locked the name.
    fn commit_copy(
        self: &Arc<Self>,
        source: &Manifest,
        at: BucketKey,
        attributes: KeptAttributes,
        condition: StoreBase,
    ) -> Answer<String> {
        let inline = if source.pieces.is_empty() { self.shared.read_manifest(source)?.to_vec() } else { Vec::new() };
        let upload = call_upload(&new_name());
        let committed = self.link_pieces(&source.pieces, &upload).and_then(|pieces| {
            let new = NewObject { at, attributes, condition, class: source.class, size: source.size, pieces };
            self.commit_locked(new, inline)
        });
        if committed.is_err() {
            // What stays at a node without an answer is removed by its age.
            let call = StageCall::DropUpload(upload);
            self.call_all(&holders_of(&source.pieces), &call, &[]);
        }
        committed
    }

    /// The same bytes as parts of another upload, at those holders that answer.
    fn link_pieces(self: &Arc<Self>, pieces: &[Piece], upload: &str) -> Answer<Vec<Piece>> {
        let mut linked = pieces.to_vec();
        let mut names: HashMap<String, String> = HashMap::new();
        let mut at_nodes: HashMap<String, BTreeSet<(String, String)>> = HashMap::new();
        for slice in linked.iter_mut().flat_map(|piece| &mut piece.slices) {
            let new = names.entry(slice.part.clone()).or_insert_with(|| format!("{upload}-{}", new_name())).clone();
            for node in &slice.holders {
                at_nodes.entry(node.clone()).or_default().insert((slice.part.clone(), new.clone()));
            }
            slice.part = new;
        }
        let mut lost = BTreeSet::new();
        let mut last = no_leader();
        for (node, names) in at_nodes {
            if let Err(failure) = self.order(&node, &StageCall::LinkParts(names.into_iter().collect()), &[]) {
                lost.insert(node);
                last = failure;
            }
        }
        for slice in linked.iter_mut().flat_map(|piece| &mut piece.slices) {
            slice.holders.retain(|node| !lost.contains(node));
            if slice.holders.is_empty() {
                return Err(last);
            }
        }
        Ok(linked)
    }

    fn wait_change<'a>(&'a self, mut ledger: MutexGuard<'a, Ledger>, until: Instant) -> MutexGuard<'a, Ledger> {
        self.changed.wait_until(&mut ledger, until);
        ledger
    }
}

/// Whether the mark is that of this content, or of an earlier one that this replaces.
fn is_mark_of(manifest: &Manifest, mark: &str) -> bool {
    let is_base = matches!(&manifest.base, StoreBase::Version(etag) if staged_mark(etag) == Some(mark));
    manifest.mark == mark || is_base || manifest.begun.iter().any(|begun| begun == mark)
}

fn no_object(at: &BucketKey) -> RequestFailure {
    RequestFailure::fatal(ErrorKind::NotFound, format!("there is no object '{}' any more", at.key))
}

/// All nodes with these parts.
fn holders_of(pieces: &[Piece]) -> Vec<String> {
    let slices = pieces.iter().flat_map(|piece| &piece.slices);
    let nodes: BTreeSet<&String> = slices.flat_map(|slice| &slice.holders).collect();
    nodes.into_iter().cloned().collect()
}
