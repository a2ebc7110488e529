//! The part of a node that keeps staged objects for the group. It takes orders of the newest term only, and knows no store.
//!
//! | the leader's call | is executed if |
//! |---|---|
//! | `Fence` | its term is the newest: earlier leaders are refused from then on |
//! | `Hold`, `SetPhases`, `Forget` | its term is the newest |
//! | parts, reads | always: a part counts when a manifest names it |

use crate::disk::{PartWriter, RecordChange, StageDisk};
use crate::kept::KeptObjects;
use crate::lapsing::{CALL_PART, LapsingParts};
use crate::manifest::{Manifest, Phase};
use crate::message::{Answer, NodeFacts, Reply, StageReply};
use crate::peers::failure_of;
use parking_lot::{Condvar, Mutex};
use spurline_object_store::RequestFailure;
use spurline_sys::random;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Parts that no manifest names are removed at this age: no upload of a writer lasts as long.
const ORPHAN_AGE: Duration = Duration::from_secs(24 * 3600);
/// A part whose next bytes do not come for this long is abandoned.
const PART_IDLE: Duration = Duration::from_secs(120);
/// Bytes of manifests in an answer, and one manifest more.
const LISTED_BYTES: usize = 1 << 20;
/// The parts of an object that was refused, and those of a call that has not named them, stay for this long.
const LAPSE_TIME: Duration = Duration::from_secs(600);
/// A call that was sent before a record ended may come this much later.
const LATE_TIME: Duration = Duration::from_secs(3600);
/// Most bytes of an answer.
pub const READ_MAX: u64 = 4 << 20;

struct OpenPart {
    writer: Box<dyn PartWriter>,
    len: u64,
    last: Instant,
}

struct HolderState {
    term: u64,
    kept: KeptObjects,
    arriving: HashMap<String, OpenPart>,
    /// Records that a change is made to, with the parts that the change needs.
    busy: HashMap<String, Vec<String>>,
    /// Records that are done and were not here: a call that was under way when they ended comes too late.
    ended: HashMap<String, Instant>,
    /// Parts of objects that were refused, and of calls that have not named these yet.
    lapsing: LapsingParts,
    /// Parts that are being finished, linked or removed.
    locked_parts: BTreeSet<String>,
}

impl HolderState {
    fn used(&self) -> u64 {
        self.kept.bytes() + self.arriving.values().map(|part| part.len).sum::<u64>()
    }

    /// Whether a live manifest names the part, or one that is being written.
    fn is_named(&self, part: &String) -> bool {
        self.kept.is_named(part) || self.busy.values().any(|parts| parts.contains(part))
    }

    /// A part is here.
    fn note_part(&mut self, part: &str, len: u64) {
        self.kept.insert_part(part, len);
        if part.starts_with(CALL_PART) && !self.kept.is_named(part) {
            self.lapsing.add(part, Instant::now());
        }
    }

    /// Whether the holder keeps a later state of the record.
    fn knows_later(&self, manifest: &Manifest) -> bool {
        match self.kept.manifest(&manifest.record) {
            Some(known) => known.revision > manifest.revision || known.phase > manifest.phase,
            None => self.ended.contains_key(&manifest.record),
        }
    }
}

/// A failure of this node's disk: other nodes may do.
fn disk_failure(error: Error) -> RequestFailure {
    match error.kind() {
        // A part that is not here any more may be at the store.
        ErrorKind::Corrupt | ErrorKind::Io(_) | ErrorKind::NoSpace | ErrorKind::NotFound => {
            let kind = if error.kind() == ErrorKind::NoSpace { ErrorKind::NoSpace } else { ErrorKind::Unavailable };
            RequestFailure::transient(kind, error.message().to_owned())
        }
        _ => failure_of(error),
    }
}

fn ended_here(node: &str, manifest: &Manifest) -> RequestFailure {
    let why = format!("node {node} knows a later state of '{}'", manifest.at.key);
    RequestFailure::transient(ErrorKind::Unavailable, why)
}

/// The staged objects of a node.
pub struct Holder {
    name: String,
    domain: String,
    size: u64,
    disk: Arc<dyn StageDisk>,
    /// A drained node keeps what it has, and takes no more.
    is_closed: AtomicBool,
    /// Identifies the content of the disk.
    identity: u64,
    /// Identifies this process.
    process: u64,
    state: Mutex<HolderState>,
    freed: Condvar,
}

/// Records to which a single change is made at a time: the disk and the memory have the same order.
struct RecordLock<'a> {
    holder: &'a Holder,
    records: Vec<String>,
}

impl Drop for RecordLock<'_> {
    fn drop(&mut self) {
        let mut state = self.holder.state.lock();
        for record in &self.records {
            state.busy.remove(record);
        }
        self.holder.freed.notify_all();
    }
}

impl Holder {
    /// Reads the records of the disk.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(name: &str, domain: &str, size: u64, disk: Arc<dyn StageDisk>) -> Result<Holder> {
        let mut kept = KeptObjects::new(name);
        for (manifest, inline_bytes) in disk.manifests()? {
            kept.insert(manifest, inline_bytes);
        }
        let parts = disk.parts()?;
        let names: BTreeSet<&str> = parts.iter().map(|part| part.name.as_str()).collect();
        let waiting = kept.manifests_after("").filter(|manifest| manifest.phase == Phase::Waiting);
        if waiting.flat_map(|manifest| manifest.parts_at(name)).any(|slice| !names.contains(slice.part.as_str())) {
            disk.note_loss()?;
        }
        let identity = disk.identity()?;
        let mut state = HolderState {
            term: disk.term()?,
            kept,
            arriving: HashMap::new(),
            busy: HashMap::new(),
            ended: HashMap::new(),
            lapsing: LapsingParts::default(),
            locked_parts: BTreeSet::new(),
        };
        parts.iter().for_each(|part| state.note_part(&part.name, part.len));
        Ok(Holder {
            name: name.to_owned(),
            domain: domain.to_owned(),
            size,
            disk,
            is_closed: AtomicBool::new(false),
            identity,
            process: random(),
            state: Mutex::new(state),
            freed: Condvar::new(),
        })
    }

    /// Space and place.
    pub fn facts(&self) -> NodeFacts {
        let used = self.state.lock().used();
        let size = if self.is_closed.load(Ordering::Relaxed) { 0 } else { self.size };
        NodeFacts { domain: self.domain.clone(), size, used, process: self.process, disk: self.identity }
    }

    /// Takes no further objects, or takes them again.
    pub fn set_closed(&self, is_closed: bool) {
        self.is_closed.store(is_closed, Ordering::Relaxed);
    }

    /// The number of objects that wait for their upload.
    pub fn kept_objects(&self) -> usize {
        self.state.lock().kept.unsaved()
    }

    /// The newest term.
    pub fn term(&self) -> u64 {
        self.state.lock().term
    }

    /// Takes orders of this term from now on; orders of earlier terms that are under way have ended then.
    pub fn fence(&self, term: u64) -> Answer<Reply> {
        {
            let mut state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            state.term = term;
            while !state.busy.is_empty() {
                self.freed.wait(&mut state);
            }
        }
        self.disk.change_records(vec![RecordChange::Term(term)]).map_err(disk_failure)?;
        Ok(StageReply::Facts(self.facts()).into())
    }

    /// Waits for other changes of these records.
    fn lock_records(&self, records: &[String]) -> RecordLock<'_> {
        let mut state = self.state.lock();
        while records.iter().any(|record| state.busy.contains_key(record)) {
            self.freed.wait(&mut state);
        }
        state.busy.extend(records.iter().map(|record| (record.clone(), Vec::new())));
        RecordLock { holder: self, records: records.to_vec() }
    }

    /// Manifests by record, as many as fit into an answer.
    pub fn list_kept(&self, after: &str) -> Reply {
        let state = self.state.lock();
        let mut listed = Vec::new();
        let mut len = 0;
        let mut manifests = state.kept.manifests_after(after);
        for manifest in manifests.by_ref() {
            // One of several disks may be lost: the leader is to send the bytes again.
            let is_whole = manifest.parts_at(&self.name).all(|slice| state.kept.has_part(&slice.part));
            if manifest.phase != Phase::Waiting || is_whole {
                len += serde_json::to_vec(manifest).map_or(0, |text| text.len());
                listed.push(manifest.clone());
            }
            if len >= LISTED_BYTES {
                break;
            }
        }
        let has_more = manifests.next().is_some();
        StageReply::Kept(listed, has_more).into()
    }

    fn check_space(&self, state: &HolderState, more: u64) -> Answer<()> {
        if self.is_closed.load(Ordering::Relaxed) {
            let why = format!("node {} is drained, and takes no more staged files", self.name);
            return Err(RequestFailure::transient(ErrorKind::NoSpace, why));
        }
        if state.used() + more <= self.size {
            return Ok(());
        }
        let why = format!("node {} keeps as many staged bytes as --stage-size permits ({})", self.name, self.size);
        Err(RequestFailure::transient(ErrorKind::NoSpace, why))
    }

    /// Keeps a manifest, unless a later state of the record is known.
    pub fn hold(&self, term: u64, manifest: Manifest, inline: &[u8]) -> Answer<Reply> {
        let manifest = manifest.without_needless();
        let record = manifest.record.clone();
        let _lock = self.lock_records(std::slice::from_ref(&record));
        let phase = manifest.phase;
        let is_waiting = phase == Phase::Waiting;
        let brings_bytes = manifest.pieces.is_empty() && is_waiting;
        if brings_bytes && inline.len() as u64 != manifest.size {
            let why = format!("{} bytes of '{}' came, and not {}", inline.len(), manifest.at.key, manifest.size);
            return Err(RequestFailure::fatal(ErrorKind::Invalid, why));
        }
        let mut old_parts = Vec::new();
        {
            let mut state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            if state.knows_later(&manifest) {
                // A late call is refused: the leader does not wait for the answer any more.
                return if is_waiting { Err(ended_here(&self.name, &manifest)) } else { Ok(StageReply::Done.into()) };
            }
            let parts = state.kept.parts_of(&manifest);
            if is_waiting && let Some(part) = parts.iter().find(|part| !state.kept.has_part(part)) {
                let why = format!("node {} does not have part {part} of '{}'", self.name, manifest.at.key);
                return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
            }
            match state.kept.manifest(&record) {
                None if brings_bytes => self.check_space(&state, inline.len() as u64)?,
                known => old_parts.extend(known.into_iter().flat_map(|known| state.kept.parts_of(known))),
            }
            if manifest.is_live() {
                // Another node has the parts in the place of this node, or the removal needs no bytes.
                old_parts.retain(|part| !parts.contains(part));
                state.busy.insert(record.clone(), parts);
            } else {
                old_parts.extend(parts);
            }
        }
        let bytes = if brings_bytes { Some(inline.to_vec()) } else { (!manifest.is_live()).then(Vec::new) };
        let mut changes = vec![RecordChange::Put(Box::new(manifest.clone()), bytes)];
        if term > self.term() {
            changes.insert(0, RecordChange::Term(term));
        }
        self.disk.change_records(changes).map_err(disk_failure)?;
        {
            let mut state = self.state.lock();
            let is_newest = term >= state.term;
            // The end of an object is true in each term.
            if is_newest || !manifest.is_live() {
                state.term = state.term.max(term);
                let kept = state.kept.inline_bytes(&record);
                let bytes = if brings_bytes { inline.len() as u64 } else { kept };
                let bytes = if manifest.is_live() { bytes } else { 0 };
                if manifest.is_live() {
                    for part in state.kept.parts_of(&manifest) {
                        state.lapsing.remove(&part);
                    }
                }
                state.kept.insert(manifest, bytes);
                let newest = state.term;
                drop(state);
                self.end_parts(phase, &old_parts);
                let reply = if is_newest { StageReply::Done } else { StageReply::OldTerm(newest) };
                return Ok(reply.into());
            }
        }
        self.give_back(&record)
    }

    /// A newer leader has come while a manifest was written, and has not seen that: what was before is there again.
    fn give_back(&self, record: &str) -> Answer<Reply> {
        let before = self.state.lock().kept.manifest(record).cloned();
        let change = match before {
            Some(before) => RecordChange::Put(Box::new(before), None),
            None => RecordChange::Remove(record.to_owned()),
        };
        self.disk.change_records(vec![change]).map_err(disk_failure)?;
        Ok(StageReply::OldTerm(self.term()).into())
    }

    /// Changes the phase of records. The bytes of objects that are done are removed.
    pub fn set_phases(&self, term: u64, records: &[String], phase: Phase) -> Answer<Reply> {
        let _lock = self.lock_records(records);
        let mut changed = Vec::new();
        {
            let mut state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            let now = Instant::now();
            state.ended.retain(|_, ended| now.saturating_duration_since(*ended) < LATE_TIME);
            for record in records {
                match state.kept.manifest(record) {
                    Some(manifest) => {
                        let phase = manifest.phase.max(phase);
                        changed.push(Manifest { phase, ..manifest.clone() }.without_needless());
                    }
                    None if phase >= Phase::Done => drop(state.ended.insert(record.clone(), now)),
                    None => {}
                }
            }
        }
        let puts = changed.iter().map(|manifest| {
            let inline = (!manifest.is_live()).then(Vec::new);
            RecordChange::Put(Box::new(manifest.clone()), inline)
        });
        let puts: Vec<RecordChange> = puts.collect();
        if !puts.is_empty() {
            self.disk.change_records(puts).map_err(disk_failure)?;
        }
        let mut ended = Vec::new();
        {
            let mut state = self.state.lock();
            for manifest in changed {
                if state.kept.manifest(&manifest.record).is_none() {
                    continue;
                }
                let is_live = manifest.is_live();
                if !is_live {
                    ended.push((manifest.phase, state.kept.parts_of(&manifest)));
                }
                let bytes = if is_live { state.kept.inline_bytes(&manifest.record) } else { 0 };
                state.kept.insert(manifest, bytes);
            }
        }
        for (phase, parts) in ended {
            self.end_parts(phase, &parts);
        }
        Ok(StageReply::Done.into())
    }

    /// Forgets records that are done.
    pub fn forget(&self, term: u64, records: &[String]) -> Answer<Reply> {
        let _lock = self.lock_records(records);
        let mut ended = Vec::new();
        let mut changes = Vec::new();
        {
            let state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            for record in records {
                if let Some(manifest) = state.kept.manifest(record) {
                    ended.push((manifest.phase, state.kept.parts_of(manifest)));
                    changes.push(RecordChange::Remove(record.clone()));
                }
            }
        }
        if !changes.is_empty() {
            self.disk.change_records(changes).map_err(disk_failure)?;
        }
        let mut state = self.state.lock();
        let now = Instant::now();
        for record in records {
            // A node that is to forget a live record may get that again.
            if state.kept.remove(record).is_none_or(|manifest| !manifest.is_live()) {
                state.ended.insert(record.clone(), now);
            }
        }
        drop(state);
        for (phase, parts) in ended {
            self.end_parts(phase, &parts);
        }
        Ok(StageReply::Done.into())
    }

    /// Removes the parts of an upload that no manifest names.
    pub fn drop_upload(&self, upload: &str) -> Answer<Reply> {
        let parts: Vec<String> = {
            let state = self.state.lock();
            let parts = state.kept.part_names();
            parts.filter(|part| part.starts_with(upload) && !state.is_named(part)).cloned().collect()
        };
        self.remove_parts(&parts)?;
        Ok(StageReply::Done.into())
    }

    /// Removes the parts of an object that ends. A writer that was refused sends the object again, with the same parts: these stay for a while.
    fn end_parts(&self, phase: Phase, parts: &[String]) {
        if phase == Phase::Done {
            // A part that the disk does not remove now is tried again later.
            let _ = self.remove_parts(parts);
            return;
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        parts.iter().for_each(|part| state.lapsing.add(part, now));
    }

    /// Removes the parts of objects that were refused, and not sent again, and of calls that have ended.
    pub fn remove_lapsed(&self) {
        let lapsed = self.state.lock().lapsing.take_lapsed(Instant::now(), LAPSE_TIME);
        let _ = self.remove_parts(&lapsed);
    }

    /// Removes parts that no live manifest names: an object that was sent again has the parts of the first attempt.
    fn remove_parts(&self, parts: &[String]) -> Answer<()> {
        if parts.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let mut removed: Vec<(String, u64)> = Vec::new();
        {
            let mut state = self.state.lock();
            for part in parts.iter().collect::<BTreeSet<_>>() {
                if state.kept.is_named(part) {
                    continue;
                }
                // The manifest that is being written may fail.
                if state.is_named(part) || state.locked_parts.contains(part) {
                    state.lapsing.add(part, now);
                    continue;
                }
                // Here first: a manifest that comes now is refused.
                let len = state.kept.remove_part(part);
                state.locked_parts.insert(part.clone());
                removed.push((part.clone(), len));
            }
        }
        let mut result = Ok(());
        for (part, len) in &removed {
            if let Err(error) = self.disk.remove_part(part) {
                let mut state = self.state.lock();
                state.kept.insert_part(part, *len);
                state.lapsing.add(part, now);
                result = Err(disk_failure(error));
            }
        }
        self.unlock_parts(removed.iter().map(|(part, _)| part));
        result
    }

    /// Waits until none of these parts is finished, linked or removed, and keeps others from that.
    fn lock_parts(&self, parts: &[String]) {
        let mut state = self.state.lock();
        while parts.iter().any(|part| state.locked_parts.contains(part)) {
            self.freed.wait(&mut state);
        }
        state.locked_parts.extend(parts.iter().cloned());
    }

    fn unlock_parts<'a>(&self, parts: impl Iterator<Item = &'a String>) {
        let mut state = self.state.lock();
        for part in parts {
            state.locked_parts.remove(part);
        }
        drop(state);
        self.freed.notify_all();
    }

    /// Adds bytes to a part.
    pub fn append_part(&self, part: &str, offset: u64, bytes: &[u8], is_last: bool) -> Answer<Reply> {
        let mut open = {
            let mut state = self.state.lock();
            let now = Instant::now();
            state.arriving.retain(|_, part| now.saturating_duration_since(part.last) < PART_IDLE);
            self.check_space(&state, bytes.len() as u64)?;
            state.arriving.remove(part)
        };
        if offset == 0 {
            open = None;
        }
        let mut open = match open {
            Some(open) if open.len == offset => open,
            None if offset == 0 => {
                let writer = self.disk.begin_part(part).map_err(disk_failure)?;
                OpenPart { writer, len: 0, last: Instant::now() }
            }
            _ => {
                let why = format!("node {} does not have the bytes of part {part} before {offset}", self.name);
                return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
            }
        };
        open.writer.append(bytes).map_err(disk_failure)?;
        open.len += bytes.len() as u64;
        open.last = Instant::now();
        if !is_last {
            self.state.lock().arriving.insert(part.to_owned(), open);
            return Ok(StageReply::Done.into());
        }
        let len = open.len;
        let names = [part.to_owned()];
        self.lock_parts(&names);
        let finished = open.writer.finish();
        if finished.is_ok() {
            self.state.lock().note_part(part, len);
        }
        self.unlock_parts(names.iter());
        finished.map(|()| StageReply::Done.into()).map_err(disk_failure)
    }

    /// Reads bytes of a part.
    pub fn read_part(&self, part: &str, from: u64, len: u64) -> Answer<Reply> {
        let mut bytes = vec![0; len.min(READ_MAX) as usize];
        self.disk.read_part(part, from, &mut bytes).map_err(disk_failure)?;
        Ok(Reply { reply: StageReply::Bytes, bytes })
    }

    /// The number of bytes of a part.
    pub fn part_len(&self, part: &str) -> Answer<u64> {
        self.disk.part_len(part).map_err(disk_failure)
    }

    /// The bytes of a small object.
    pub fn read_inline(&self, record: &str) -> Answer<Reply> {
        let bytes = self.disk.read_inline(record).map_err(disk_failure)?;
        Ok(Reply { reply: StageReply::Bytes, bytes })
    }

    /// Gives parts a further name each.
    pub fn link_parts(&self, names: &[(String, String)]) -> Answer<Reply> {
        let new: Vec<String> = names.iter().map(|(_, new)| new.clone()).collect();
        self.lock_parts(&new);
        let linked = self.disk.link_parts(names);
        if linked.is_ok() {
            let mut state = self.state.lock();
            for (old, new) in names {
                let len = state.kept.part_len(old);
                state.note_part(new, len);
            }
        }
        self.unlock_parts(new.iter());
        if linked.is_err() {
            // Some may have been made.
            self.remove_parts(&new)?;
        }
        linked.map(|()| StageReply::Done.into()).map_err(disk_failure)
    }

    /// Removes old parts that no manifest names.
    pub fn sweep(&self) {
        let Ok(parts) = self.disk.parts() else { return };
        let old = parts.into_iter().filter(|part| part.age >= ORPHAN_AGE).map(|part| part.name);
        // Those that a manifest names stay, and those that a call may name.
        let is_kept = |part: &String| {
            let state = self.state.lock();
            state.is_named(part) || state.lapsing.contains(part)
        };
        let orphans: Vec<String> = old.filter(|part| !is_kept(part)).collect();
        if !orphans.is_empty() {
            tracing::info!("{} parts of uploads that never ended are removed", orphans.len());
            let _ = self.remove_parts(&orphans);
        }
    }
}
