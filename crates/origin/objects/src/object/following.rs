//! An open file without changes goes over to the object that another mount has published. Knows no locks.

use super::state::{ObjectEvent, ObjectState};
use super::{ObjectChanges, ObjectFacts, OpenObject};
use crate::found::{FoundObject, found_object};
use crate::requests::is_marked_as;
use spurline_object_store::{ObjectAttributes, mark_in};
use spurline_types::FileKind;

/// Failed publications that are remembered: a storm of failures has one program's attempts.
const FAILED_MARKS_MAX: usize = 16;

impl OpenObject {
    /// Whether the file is new, and not published yet.
    pub fn is_new(&self) -> bool {
        self.facts.lock().published.is_none()
    }

    /// Whether the file has no changes of this mount. A new file has none before the first byte.
    pub fn is_unchanged(&self) -> bool {
        let changes = self.changes.lock();
        self.can_follow(&changes, &self.facts.lock())
    }

    fn can_follow(&self, changes: &ObjectChanges, facts: &ObjectFacts) -> bool {
        // A lone mount knows no other: an object that appears meanwhile is another writer's.
        let is_shared = self.context.path_locks.get().is_some() && !self.is_exclusive;
        match facts.state {
            ObjectState::Clean => !facts.attrs_changed,
            ObjectState::Changed => is_shared && facts.published.is_none() && changes.staged.is_none(),
            _ => false,
        }
    }

    /// An open, or a lock, has found the object in this version, by a look that began as `step`; a file with changes keeps the version
    /// that it was opened with. A look that took long may have begun before what is known by now.
    pub fn note_found(&self, found: FoundObject, step: u64) {
        let mut changes = self.changes.lock();
        let mut facts = self.facts.lock();
        if step > facts.found_at && self.can_follow(&changes, &facts) {
            facts.found_at = step;
            follow(&mut changes, &mut facts, found);
            drop(facts);
            self.keep_state(&changes);
        }
    }

    /// Both mounts created this path without `O_EXCL`, as programs create lock files. This mount's file is empty and unwritten: it
    /// becomes a handle of the object that the other mount published. False if the other mount has published none, or this mount's
    /// file is written.
    pub(super) fn join_published(&self, changes: &mut ObjectChanges) -> bool {
        let facts = self.facts.lock();
        if facts.published.is_some() || !self.can_follow(changes, &facts) {
            return false;
        }
        drop(facts);
        let Ok(key) = self.key() else { return false };
        let step = self.context.next_step();
        let Ok(stored) = self.context.requests.run(self.context.requests.head(&key)) else { return false };
        let found = found_object(stored);
        if found.attr.kind != FileKind::File {
            return false;
        }
        let mut facts = self.facts.lock();
        facts.found_at = step;
        follow(changes, &mut facts, found);
        true
    }

    /// Whether a publication of this file that failed has made the object after all: the next one goes over that.
    pub(super) fn continue_failed(&self, changes: &ObjectChanges) -> bool {
        if changes.failed_marks.is_empty() {
            return false;
        }
        let Ok(key) = self.key() else { return false };
        let Ok(stored) = self.context.requests.run(self.context.requests.head(&key)) else { return false };
        if !changes.failed_marks.iter().any(|mark| is_marked_as(&stored.attributes, mark)) {
            return false;
        }
        let mut facts = self.facts.lock();
        facts.published = Some(found_object(stored).attr);
        facts.found_at = self.context.next_step();
        true
    }
}

impl ObjectChanges {
    /// A publication with these attributes failed.
    pub(super) fn note_failed(&mut self, attributes: &ObjectAttributes) {
        if self.failed_marks.len() == FAILED_MARKS_MAX {
            self.failed_marks.pop_front();
        }
        self.failed_marks.extend(mark_in(attributes).map(str::to_owned));
    }
}

/// The file is the object in this version, without changes.
fn follow(changes: &mut ObjectChanges, facts: &mut ObjectFacts, found: FoundObject) {
    facts.apply(ObjectEvent::Published);
    facts.attrs_changed = false;
    facts.file_attrs = found.file_attrs();
    let is_known = facts.published.as_ref().is_some_and(|known| known.version == found.attr.version);
    if is_known {
        changes.attributes = found.attributes;
    } else {
        let spilling = std::mem::take(&mut changes.spilling);
        *changes = ObjectChanges { attributes: found.attributes, spilling, ..ObjectChanges::default() };
        facts.len = found.attr.size;
        facts.published = Some(found.attr);
    }
}
