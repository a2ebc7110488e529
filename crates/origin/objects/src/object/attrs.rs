//! Owner, mode, times and extended attributes of an open file: published with the bytes, or by a copy of the object within the store.
//! Knows no bytes.

use super::{ObjectChanges, ObjectFacts, OpenObject};
use crate::file_attrs::{FileAttrs, check_space, file_time, forget_old_bytes};
use crate::names::content_type_of;
use crate::requests::{NewObject, mark_of, marked, new_mark};
use spurline_object_store::{CopySource, ObjectAttributes, WriteCondition, marked_as};
use spurline_origin::object_attr;
use spurline_types::{FileKind, ObjectAttr, Result};
use std::time::SystemTime;

/// The attributes of new bytes, as far as these are not those of the object before.
pub(super) struct NextMetadata {
    changed_at: SystemTime,
    file_attrs: FileAttrs,
    keeps_attrs: bool,
    mark: String,
}

impl ObjectChanges {
    /// The attributes of the object as it is, and of a new one a content type by the name; `None` if only the store knows.
    pub(super) fn known_attributes(&self, is_new: bool, key: &str) -> Option<ObjectAttributes> {
        if is_new {
            return Some(ObjectAttributes::with_content_type(content_type_of(key.as_bytes())));
        }
        self.attributes.clone()
    }
}

impl NextMetadata {
    /// Those of the next publication of the bytes as they are now.
    pub fn of(facts: &ObjectFacts, changes: &mut ObjectChanges, keeps_attrs: bool) -> NextMetadata {
        NextMetadata {
            changed_at: facts.changed_at,
            file_attrs: facts.file_attrs.clone(),
            keeps_attrs,
            mark: mark_of(changes.mark.take()),
        }
    }

    /// The attributes of the next object, after those of the last one.
    pub fn over(self, last: ObjectAttributes) -> ObjectAttributes {
        let mut attributes = last;
        forget_old_bytes(&mut attributes, file_time(self.changed_at));
        if self.keeps_attrs {
            self.file_attrs.store(&mut attributes);
        } else {
            self.file_attrs.store_headers(&mut attributes);
        }
        marked_as(attributes, &self.mark)
    }
}

impl OpenObject {
    /// A write by a caller without the right to keep them takes the file's set-user-ID and set-group-ID bits away.
    pub fn lose_privileges(&self) {
        let mut facts = self.facts.lock();
        let has_lost = facts.file_attrs.lose_privileges();
        facts.attrs_changed |= has_lost;
        drop(facts);
        if has_lost {
            self.keep_state_now();
        }
    }

    async fn last_attributes(&self, changes: &mut ObjectChanges, key: &str) -> Result<ObjectAttributes> {
        if let Some(known) = changes.known_attributes(self.is_new(), key) {
            return Ok(known);
        }
        let found = self.context.requests.attributes_of(key).await?;
        Ok(changes.attributes.insert(found).clone())
    }

    /// The attributes of an object with the bytes as they are now: those of the last one, those of the file, and the mark of a
    /// change.
    pub(super) async fn next_attributes(&self, changes: &mut ObjectChanges, key: &str) -> Result<ObjectAttributes> {
        let last = self.last_attributes(changes, key).await?;
        Ok(NextMetadata::of(&self.facts.lock(), changes, self.context.options.object_attrs).over(last))
    }

    /// Changes owner, mode, times or extended attributes: those of bytes that are not published go with them, others are changed
    /// at once by a copy within the store.
    ///
    /// # Errors
    /// That of `change`; `ENOSPC` when the object's metadata have no space; `Stale` when another writer has replaced the object;
    /// the store's. Nothing is changed then.
    pub fn change_attrs(&self, change: &dyn Fn(&mut FileAttrs) -> Result<()>) -> Result<()> {
        let mut changes = self.changes.lock();
        let before = self.file_attrs();
        let mut attrs = before.clone();
        change(&mut attrs)?;
        if attrs == before {
            return Ok(());
        }
        let mut stored = changes.attributes.clone().unwrap_or_default();
        attrs.store(&mut stored);
        check_space(&marked(stored))?;
        let mut facts = self.facts.lock();
        facts.mtime_is_set |= attrs.mtime != before.mtime;
        facts.file_attrs = attrs;
        facts.attrs_changed = true;
        let has_own_bytes = !facts.state.is_clean();
        drop(facts);
        if has_own_bytes {
            self.keep_state(&changes);
            return Ok(());
        }
        let copied = self.store_attrs(&mut changes);
        if copied.is_err() {
            // The next call reads what the object has.
            changes.attributes = None;
            let mut facts = self.facts.lock();
            facts.file_attrs = before;
            facts.attrs_changed = false;
        }
        self.keep_state(&changes);
        copied
    }

    /// As [`OpenObject::copy_attrs`], also if the process before has done that without a record.
    pub(super) fn store_attrs(&self, changes: &mut ObjectChanges) -> Result<()> {
        let requests = &self.context.requests;
        let copied = requests.run(self.copy_attrs(changes));
        if copied.is_err() && self.continue_failed(changes) {
            return requests.run(self.copy_attrs(changes));
        }
        copied
    }

    /// Writes the file's attributes into the metadata of the object, whose bytes stay.
    pub(super) async fn copy_attrs(&self, changes: &mut ObjectChanges) -> Result<()> {
        let key = self.key()?;
        let Some(before) = self.object() else { return Ok(()) };
        let mut attributes = self.last_attributes(changes, &key).await?;
        let etag = self.published_etag();
        let mut attrs = self.file_attrs();
        if self.context.options.object_attrs {
            if let Some(published) = &self.facts.lock().published {
                // The store takes the time of the copy for that of the bytes.
                attrs.mtime.get_or_insert(file_time(published.mtime));
            }
            attrs.store(&mut attributes);
        } else {
            attrs.store_headers(&mut attributes);
        }
        let attributes = marked_as(attributes, &new_mark());
        let object = NewObject { key: &key, attributes: &attributes, condition: &WriteCondition::None };
        let from = CopySource { key: &key, etag: etag.as_deref() };
        self.keep_sending(&attributes);
        let new_etag = self.context.requests.copy(from, before.size, &object).await?;
        changes.attributes = Some(attributes);
        let mut facts = self.facts.lock();
        let kind = facts.published.as_ref().map_or(FileKind::File, |attr| attr.kind);
        let attr = ObjectAttr { kind, ..object_attr(before.size, SystemTime::now(), new_etag) };
        self.context.times.insert(&facts.path, &attr);
        self.context.note_known(&facts.path, &attr, changes.attributes.as_ref());
        facts.published = Some(attr);
        facts.found_at = self.context.next_step();
        facts.file_attrs = attrs;
        facts.attrs_changed = false;
        drop(facts);
        self.keep_state(changes);
        if let Some(after) = self.object() {
            self.context.published.move_to(before.id, &after);
        }
        Ok(())
    }
}

/// Asks for the attributes of an object, where a close must not need the store: the next object of the name keeps these.
///
/// # Errors
/// The store's.
pub(crate) fn learn_attributes(object: &OpenObject) -> Result<()> {
    let mut changes = object.changes.lock();
    let key = object.key()?;
    let learnt = object.context.requests.run(object.last_attributes(&mut changes, &key));
    learnt.map(drop)
}
