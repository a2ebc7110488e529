//! Makes local space for changed bytes: parts of open files are moved to hidden objects of the bucket, and read from there.
//!
//! | space | a part that is full | a change that does not fit |
//! |---|---|---|
//! | enough | is sent to the upload, and stays here | - |
//! | short | is spilled, and the upload copies the hidden object | - |
//! | none | the same | waits until the store has a part, of this file or else of another one; the first part and the last go last |
//!
//! A spilled part is below later changes of its bytes, like the object below a file. It is removed when the file is published or
//! abandoned.

use super::{LEAST_COPY, ObjectChanges, OpenObject, PartBody};
use crate::spilled::{Heartbeats, SpillGroup, SpilledPart};
use crate::staged::StagedBytes;
use spurline_types::{Error, ErrorKind, ObjectRef, Result, Version};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use tokio::task::JoinHandle;

/// Parts of a file that are moved at once: their bodies need memory while memory is short.
const SPILLS_IN_FLIGHT: usize = 4;

/// A part on its way to a hidden object.
struct PartUnderway {
    range: Range<u64>,
    stored: JoinHandle<Result<SpilledPart>>,
    /// Changed since.
    changed: bool,
}

/// The parts of a file that are being spilled.
#[derive(Default)]
pub(super) struct Spilling {
    /// From the first spilled part on.
    group: Option<Arc<SpillGroup>>,
    /// While there are spilled parts.
    heartbeats: Option<Heartbeats>,
    parts: BTreeMap<u32, PartUnderway>,
}

impl Spilling {
    /// The parts of a file that was open in another process.
    pub fn continued(group: Arc<SpillGroup>) -> Spilling {
        Spilling { heartbeats: Some(group.begin_heartbeats()), group: Some(group), parts: BTreeMap::new() }
    }

    /// The mark of the file in the names of hidden objects.
    pub fn mark(&self) -> Option<&str> {
        self.group.as_ref().map(|group| group.mark())
    }

    /// The file has no spilled parts any more.
    pub fn note_published(&mut self) {
        self.heartbeats = None;
        self.parts.clear();
    }

    /// Bytes of these parts were changed.
    pub fn note_changed(&mut self, range: &Range<u64>) {
        for part in self.parts.values_mut() {
            part.changed |= part.range.start < range.end && range.start < part.range.end;
        }
    }

    /// Removes all hidden objects, those of `staged` included.
    pub fn end(self, staged: Option<StagedBytes>) -> Option<impl Future<Output = Result<()>>> {
        let group = self.group?;
        Some(async move {
            for part in self.parts.into_values() {
                drop(part.stored.await);
            }
            drop(staged);
            drop(self.heartbeats);
            group.wait_for_removals().await;
            Ok(())
        })
    }
}

impl OpenObject {
    /// Makes a change of the bytes in a range, which may need space.
    ///
    /// # Errors
    /// Those of the change and of the store; `NoSpace` when all parts of this file are in the store.
    pub(super) fn change_bytes(
        &self,
        changes: &mut ObjectChanges,
        range: Range<u64>,
        change: &dyn Fn(&mut StagedBytes) -> Result<()>,
    ) -> Result<()> {
        stage_bytes(self, changes, change)?;
        self.note_change(changes, range);
        Ok(())
    }

    /// Makes space by parts of other files, after a write without space; its failure if that is another one, or if no file has any.
    pub(super) fn make_room_elsewhere(&self, failure: Error) -> Option<Error> {
        if failure.kind() != ErrorKind::NoSpace {
            return Some(failure);
        }
        let mut failure = failure;
        let used = self.context.space.used_bytes();
        let files = self.context.writing.lock().all();
        for other in files.iter().filter(|file| !std::ptr::eq(&***file, self)) {
            let mut changes = other.changes.lock();
            match self.context.requests.run(other.make_room(&mut changes)) {
                Ok(true) => return None,
                Ok(false) => {}
                // A conflict of the other file is for the writers of that file.
                Err(error) if matches!(error.kind(), ErrorKind::Stale | ErrorKind::NotFound) => {
                    tracing::debug!("an open file makes no room: {error}");
                }
                Err(error) => failure = error,
            }
        }
        // A file that was being published meanwhile has given its space back.
        (self.context.space.used_bytes() >= used).then_some(failure)
    }

    /// Spills parts, unless some are on their way, and waits for the space of the first; false if no part has any.
    async fn make_room(&self, changes: &mut ObjectChanges) -> Result<bool> {
        loop {
            let is_begun = !changes.spilling.parts.is_empty();
            if !is_begun {
                for (number, range) in self.parts_to_spill(changes) {
                    self.spill_part(changes, number, range).await?;
                }
            }
            let mut failure = None;
            while let Some((number, part)) = changes.spilling.parts.pop_first() {
                match self.settle_spilled(changes, number, part).await {
                    Ok(true) => return Ok(true),
                    Ok(false) => {}
                    Err(error) => failure = Some(error),
                }
            }
            if !is_begun {
                return failure.map_or(Ok(false), Err);
            }
        }
    }

    /// The parts with the most bytes in local space; those at the ends of the file only if no other has any.
    fn parts_to_spill(&self, changes: &ObjectChanges) -> Vec<(u32, Range<u64>)> {
        let Some(staged) = &changes.staged else { return Vec::new() };
        let lengths = self.context.options.part_lengths();
        let last = lengths.at(staged.len().saturating_sub(1));
        let mut local = Vec::new();
        for number in 1..=last {
            let range = lengths.range(number);
            let range = range.start..range.end.min(staged.len());
            let len = staged.local_len(range.clone());
            if len > 0 {
                local.push((number == 1 || number == last, Reverse(len), number, range));
            }
        }
        local.sort_unstable_by_key(|(is_end, len, number, _)| (*is_end, *len, *number));
        let are_ends = local.first().is_some_and(|(is_end, ..)| *is_end);
        let chosen = local.into_iter().take_while(|(is_end, ..)| *is_end == are_ends).take(SPILLS_IN_FLIGHT);
        chosen.map(|(_, _, number, range)| (number, range)).collect()
    }

    /// Stores a part in a hidden object, which goes on after this call.
    async fn spill_part(&self, changes: &mut ObjectChanges, number: u32, range: Range<u64>) -> Result<()> {
        let reserved = self.context.requests.reserve_body(range.end - range.start).await?;
        let body = self.staged_bytes(changes, range.clone())?;
        let context = &self.context;
        let is_new = changes.spilling.group.is_none();
        let group =
            changes.spilling.group.get_or_insert_with(|| SpillGroup::new(&context.requests, &context.options.root));
        let stored = Arc::clone(group).store(body);
        if changes.spilling.heartbeats.is_none() {
            changes.spilling.heartbeats = Some(group.begin_heartbeats());
        }
        if is_new {
            self.keep_state(changes);
        }
        let stored = self.context.requests.spawn(async move {
            let _reserved = reserved;
            stored.await
        })?;
        changes.spilling.parts.insert(number, PartUnderway { range, stored, changed: false });
        Ok(())
    }

    fn has_short_space(&self) -> bool {
        self.context.space.is_short(&self.context.options)
    }

    /// Spills a part that a write has filled, if it is not the first one and space is short; false if the part stays here.
    pub(super) async fn spill_full_part(
        &self,
        changes: &mut ObjectChanges,
        number: u32,
        range: Range<u64>,
    ) -> Result<bool> {
        if number == 1 || !self.has_short_space() || self.context.published.clear() && !self.has_short_space() {
            return Ok(false);
        }
        if !changes.spilling.parts.contains_key(&number) {
            self.settle_spills(changes, SPILLS_IN_FLIGHT).await;
            self.spill_part(changes, number, range).await?;
        }
        Ok(true)
    }

    /// Waits until fewer than `limit` parts are on their way. A part that failed stays here.
    pub(super) async fn settle_spills(&self, changes: &mut ObjectChanges, limit: usize) {
        while changes.spilling.parts.len() >= limit
            && let Some((number, part)) = changes.spilling.parts.pop_first()
        {
            if let Err(error) = self.settle_spilled(changes, number, part).await {
                tracing::debug!("part {number} stays in local space: {error}");
            }
        }
    }

    /// Waits for a part that is being spilled; whether its space is free.
    async fn settle_spilled(&self, changes: &mut ObjectChanges, number: u32, part: PartUnderway) -> Result<bool> {
        let PartUnderway { range, stored, changed } = part;
        let stored = stored.await.map_err(|error| Error::new(ErrorKind::Unavailable, error.to_string()))??;
        let Some(staged) = &mut changes.staged else { return Ok(false) };
        if changed {
            return Ok(false);
        }
        self.keep_spilled(range.start, &stored);
        staged.note_spilled(range.start, stored);
        let is_sent = changes.upload.as_ref().is_some_and(|upload| upload.parts.contains_key(&number));
        let is_full = range == self.context.options.part_lengths().range(number);
        if is_full
            && !is_sent
            && self.is_changed()
            && let Err(error) = self.send_part(changes, number, range).await
        {
            tracing::debug!("part {number} is copied later: {error}");
        }
        Ok(true)
    }

    /// Fills `dst` from a spilled part, or from the object below.
    pub(super) fn read_below(
        &self,
        part: Option<&SpilledPart>,
        object: Option<&ObjectRef>,
        offset: u64,
        dst: &mut [u8],
    ) -> Result<()> {
        let Some(part) = part else { return self.read_object(object, offset, dst) };
        let source = self.context.reads.source();
        let hidden = ObjectRef::new(source, part.path(), Version::new(&part.etag), part.object_len);
        self.read_object(Some(&hidden), offset, dst).map_err(|error| {
            let why = format!("bytes of an open file that were moved to the bucket as '{}': {error}", part.key());
            Error::new(error.kind(), why)
        })
    }

    /// The store copies a part from where its bytes are; `None` if they are not in a single object.
    pub(super) fn copied_body(&self, changes: &ObjectChanges, key: &str, range: &Range<u64>) -> Option<PartBody> {
        let len = range.end - range.start;
        if len < LEAST_COPY.min(self.context.options.part_len) {
            return None;
        }
        let staged = changes.staged.as_ref();
        if let Some(part) = staged.and_then(|staged| staged.spilled_part(range.clone())) {
            return Some(PartBody::Copied { key: part.key().to_owned(), etag: part.etag.clone(), range: 0..len });
        }
        let etag = self.published_etag()?;
        staged.is_none_or(|staged| staged.is_of_object(range.clone())).then(|| PartBody::Copied {
            key: key.to_owned(),
            etag,
            range: range.clone(),
        })
    }
}

/// Puts bytes into local space, which may need room.
///
/// # Errors
/// As [`OpenObject::change_bytes`].
pub(super) fn stage_bytes(
    file: &OpenObject,
    changes: &mut ObjectChanges,
    change: &dyn Fn(&mut StagedBytes) -> Result<()>,
) -> Result<()> {
    loop {
        match change(file.stage(changes)?) {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                // Local files of objects that are published already go first.
                if !file.context.published.clear() && !file.context.requests.run(file.make_room(changes))? {
                    return Err(error);
                }
            }
            staged => return staged,
        }
    }
}
