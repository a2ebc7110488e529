//! The part of a node that keeps staged objects for the group. It takes orders of the newest term only, and knows no store.
//!
//! | the leader's call | is executed if |
//! |---|---|
//! | `Fence` | its term is the newest: earlier leaders are refused from then on |
//! | `Hold`, `SetPhases`, `Forget` | its term is the newest |
//! | parts, reads | always: a part counts when a manifest names it |

use crate::disk::{PartWriter, RecordChange, StageDisk};
use crate::manifest::{Manifest, Phase};
use crate::message::{Answer, NodeFacts, Reply, StageReply};
use crate::peers::failure_of;
use parking_lot::Mutex;
use spurline_object_store::RequestFailure;
use spurline_types::{ErrorKind, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Parts that no manifest names are removed at this age: no upload of a writer lasts as long.
const ORPHAN_AGE: Duration = Duration::from_secs(24 * 3600);
/// A part whose next bytes do not come for this long is given up.
const PART_IDLE: Duration = Duration::from_secs(120);
/// Manifests and their pieces in an answer.
const LISTED_PIECES: usize = 2000;
/// Most bytes of an answer.
pub const READ_MAX: u64 = 4 << 20;

struct OpenPart {
    writer: Box<dyn PartWriter>,
    len: u64,
    last: Instant,
}

#[derive(Default)]
struct HolderState {
    term: u64,
    /// By mark, each with the bytes beside the manifest.
    manifests: HashMap<String, (Manifest, u64)>,
    /// Bytes of each part.
    parts: HashMap<String, u64>,
    arriving: HashMap<String, OpenPart>,
}

impl HolderState {
    fn used(&self) -> u64 {
        let inline: u64 = self.manifests.values().map(|(_, bytes)| bytes).sum();
        let arriving: u64 = self.arriving.values().map(|part| part.len).sum();
        inline + arriving + self.parts.values().sum::<u64>()
    }
}

/// What a node keeps.
pub struct Holder {
    name: String,
    domain: String,
    size: u64,
    disk: Arc<dyn StageDisk>,
    state: Mutex<HolderState>,
}

impl Holder {
    /// Reads what the disk has.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(name: &str, domain: &str, size: u64, disk: Arc<dyn StageDisk>) -> Result<Holder> {
        let manifests = disk.manifests()?.into_iter();
        let manifests = manifests.map(|(manifest, bytes)| (manifest.mark.clone(), (manifest, bytes))).collect();
        let parts = disk.parts()?.into_iter().map(|part| (part.name, part.len)).collect();
        let state = HolderState { term: disk.term()?, manifests, parts, arriving: HashMap::new() };
        Ok(Holder { name: name.to_owned(), domain: domain.to_owned(), size, disk, state: Mutex::new(state) })
    }

    /// Space and place.
    pub fn facts(&self) -> NodeFacts {
        NodeFacts { domain: self.domain.clone(), size: self.size, used: self.state.lock().used() }
    }

    /// The number of objects that wait for their upload.
    pub fn kept_objects(&self) -> usize {
        self.state.lock().manifests.values().filter(|(manifest, _)| manifest.phase != Phase::Done).count()
    }

    /// The newest term.
    pub fn term(&self) -> u64 {
        self.state.lock().term
    }

    /// Takes orders of this term from now on.
    pub fn fence(&self, term: u64) -> Answer<Reply> {
        {
            let mut state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            state.term = term;
        }
        self.disk.change_records(vec![RecordChange::Term(term)]).map_err(failure_of)?;
        Ok(StageReply::Facts(self.facts()).into())
    }

    /// Manifests by mark, as many as fit into an answer.
    pub fn list_kept(&self, after: &str) -> Reply {
        let state = self.state.lock();
        let mut marks: Vec<&String> = state.manifests.keys().filter(|mark| mark.as_str() > after).collect();
        marks.sort_unstable();
        let mut listed = Vec::new();
        let mut weight = 0;
        let mut marks = marks.into_iter();
        for mark in marks.by_ref() {
            if let Some((manifest, _)) = state.manifests.get(mark) {
                weight += 1 + manifest.pieces.len();
                listed.push(manifest.clone());
            }
            if weight >= LISTED_PIECES {
                break;
            }
        }
        let has_more = marks.next().is_some();
        StageReply::Kept(listed, has_more).into()
    }

    fn check_space(&self, state: &HolderState, more: u64) -> Answer<()> {
        if state.used() + more <= self.size {
            return Ok(());
        }
        let why = format!("node {} keeps as many staged bytes as --stage-size permits ({})", self.name, self.size);
        Err(RequestFailure::transient(ErrorKind::NoSpace, why))
    }

    /// Keeps a manifest.
    pub fn hold(&self, term: u64, manifest: Manifest, inline: &[u8]) -> Answer<Reply> {
        let mark = manifest.mark.clone();
        let brings_bytes = manifest.pieces.is_empty();
        {
            let state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            let missing = manifest.parts_at(&self.name).find(|slice| !state.parts.contains_key(&slice.part));
            if let Some(slice) = missing {
                let why = format!("node {} does not have part {} of '{}'", self.name, slice.part, manifest.at.key);
                return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
            }
            if brings_bytes && manifest.phase == Phase::Waiting && !state.manifests.contains_key(&mark) {
                self.check_space(&state, inline.len() as u64)?;
            }
        }
        let bytes = brings_bytes.then(|| inline.to_vec());
        let mut changes = vec![RecordChange::Put(Box::new(manifest.clone()), bytes)];
        if term > self.term() {
            changes.insert(0, RecordChange::Term(term));
        }
        self.disk.change_records(changes).map_err(failure_of)?;
        let mut state = self.state.lock();
        if term < state.term {
            // The newer leader has not seen the manifest.
            let newest = state.term;
            drop(state);
            self.disk.change_records(vec![RecordChange::Remove(mark)]).map_err(failure_of)?;
            return Ok(StageReply::OldTerm(newest).into());
        }
        state.term = term;
        state.manifests.insert(mark, (manifest, inline.len() as u64));
        Ok(StageReply::Done.into())
    }

    /// Changes the phase of objects. The bytes of objects that are done are removed.
    pub fn set_phases(&self, term: u64, marks: &[String], phase: Phase) -> Answer<Reply> {
        let mut changes = Vec::new();
        let mut parts = Vec::new();
        {
            let mut state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            for mark in marks {
                let Some((manifest, bytes)) = state.manifests.get_mut(mark) else { continue };
                manifest.phase = manifest.phase.max(phase);
                let mut inline = None;
                if phase == Phase::Done {
                    parts.extend(manifest.parts_at(&self.name).map(|slice| slice.part.clone()));
                    *bytes = 0;
                    inline = Some(Vec::new());
                }
                changes.push(RecordChange::Put(Box::new(manifest.clone()), inline));
            }
        }
        if !changes.is_empty() {
            self.disk.change_records(changes).map_err(failure_of)?;
        }
        self.remove_parts(&parts)?;
        Ok(StageReply::Done.into())
    }

    /// Forgets objects that are done.
    pub fn forget(&self, term: u64, marks: &[String]) -> Answer<Reply> {
        let mut parts = Vec::new();
        let mut changes = Vec::new();
        {
            let mut state = self.state.lock();
            if term < state.term {
                return Ok(StageReply::OldTerm(state.term).into());
            }
            for mark in marks {
                if let Some((manifest, _)) = state.manifests.remove(mark) {
                    parts.extend(manifest.parts_at(&self.name).map(|slice| slice.part.clone()));
                    changes.push(RecordChange::Remove(mark.clone()));
                }
            }
        }
        if !changes.is_empty() {
            self.disk.change_records(changes).map_err(failure_of)?;
        }
        self.remove_parts(&parts)?;
        Ok(StageReply::Done.into())
    }

    /// Removes the parts of an upload that no manifest names.
    pub fn drop_upload(&self, upload: &str) -> Answer<Reply> {
        let named = self.named_parts();
        let parts: Vec<String> = {
            let state = self.state.lock();
            let of_upload = state.parts.keys().filter(|part| part.starts_with(upload) && !named.contains(*part));
            of_upload.cloned().collect()
        };
        self.remove_parts(&parts)?;
        Ok(StageReply::Done.into())
    }

    fn named_parts(&self) -> HashSet<String> {
        let state = self.state.lock();
        let manifests = state.manifests.values();
        manifests.flat_map(|(manifest, _)| manifest.parts_at(&self.name).map(|slice| slice.part.clone())).collect()
    }

    fn remove_parts(&self, parts: &[String]) -> Answer<()> {
        for part in parts {
            self.disk.remove_part(part).map_err(failure_of)?;
            self.state.lock().parts.remove(part);
        }
        Ok(())
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
                let writer = self.disk.begin_part(part).map_err(failure_of)?;
                OpenPart { writer, len: 0, last: Instant::now() }
            }
            _ => {
                let why = format!("node {} does not have the bytes of part {part} before {offset}", self.name);
                return Err(RequestFailure::transient(ErrorKind::Unavailable, why));
            }
        };
        open.writer.append(bytes).map_err(failure_of)?;
        open.len += bytes.len() as u64;
        open.last = Instant::now();
        if !is_last {
            self.state.lock().arriving.insert(part.to_owned(), open);
            return Ok(StageReply::Done.into());
        }
        let len = open.len;
        open.writer.finish().map_err(failure_of)?;
        self.state.lock().parts.insert(part.to_owned(), len);
        Ok(StageReply::Done.into())
    }

    /// Reads bytes of a part.
    pub fn read_part(&self, part: &str, from: u64, len: u64) -> Answer<Reply> {
        let mut bytes = vec![0; len.min(READ_MAX) as usize];
        self.disk.read_part(part, from, &mut bytes).map_err(|error| match error.kind() {
            ErrorKind::Corrupt | ErrorKind::Io(_) => {
                RequestFailure::transient(ErrorKind::Unavailable, error.message().to_owned())
            }
            _ => failure_of(error),
        })?;
        Ok(Reply { reply: StageReply::Bytes, bytes })
    }

    /// The number of bytes of a part.
    pub fn part_len(&self, part: &str) -> Answer<u64> {
        self.disk.part_len(part).map_err(failure_of)
    }

    /// The bytes of a small object.
    pub fn read_inline(&self, mark: &str) -> Answer<Reply> {
        let bytes = self.disk.read_inline(mark).map_err(failure_of)?;
        Ok(Reply { reply: StageReply::Bytes, bytes })
    }

    /// Gives parts a further name each.
    pub fn link_parts(&self, names: &[(String, String)]) -> Answer<Reply> {
        self.disk.link_parts(names).map_err(failure_of)?;
        let mut state = self.state.lock();
        for (old, new) in names {
            let len = state.parts.get(old).copied().unwrap_or_default();
            state.parts.insert(new.clone(), len);
        }
        Ok(StageReply::Done.into())
    }

    /// Removes old parts that no manifest names.
    pub fn sweep(&self) {
        let Ok(parts) = self.disk.parts() else { return };
        let named = self.named_parts();
        let orphans = parts.into_iter().filter(|part| part.age >= ORPHAN_AGE && !named.contains(&part.name));
        let orphans: Vec<String> = orphans.map(|part| part.name).collect();
        if !orphans.is_empty() {
            tracing::info!("{} parts of uploads that never ended are removed", orphans.len());
            let _ = self.remove_parts(&orphans);
        }
    }
}
