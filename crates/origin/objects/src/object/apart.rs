//! A file of a single writer: no name leads to the file before the publication, and several files of one path know nothing of each other.
//! Knows no check of the replaced object.

use super::OpenObject;
use crate::found::FoundObject;
use crate::names::content_type_of;
use spurline_object_store::ObjectAttributes;
use spurline_types::{ObjectAttr, Result};

impl OpenObject {
    /// Empties the file before the first byte, which counts as a change also of an empty object.
    pub fn begin_anew(&self) -> Result<()> {
        let mut changes = self.changes.lock();
        let before = self.facts.lock().len;
        self.stage(&mut changes)?.set_len(0)?;
        self.note_change(&mut changes, 0..before);
        Ok(())
    }

    /// The object that the next publication replaces.
    pub fn replaced_object(&self) -> Option<ObjectAttr> {
        self.facts.lock().published.clone()
    }

    /// The next publication replaces this object, to which the name leads now. A new file takes nothing over from the object.
    pub fn go_over(&self, found: Option<FoundObject>) {
        let mut changes = self.changes.lock();
        let mut facts = self.facts.lock();
        if facts.published.is_none() {
            changes.attributes = Some(ObjectAttributes::with_content_type(content_type_of(&facts.path)));
        } else if let Some(found) = &found {
            changes.attributes = found.attributes.clone();
        }
        facts.published = found.map(|found| found.attr);
        facts.found_at = self.context.next_step();
    }

    /// Publishes the file over the object of [`OpenObject::replaced_object`], or under a free name.
    ///
    /// # Errors
    /// `Stale` where the name leads to another object by now; the bytes stay for the next call. As [`OpenObject::publish`].
    pub fn publish_apart(&self) -> Result<()> {
        let mut changes = self.changes.lock();
        self.facts.lock().publication()?;
        let Err(error) = self.send_all(&mut changes) else { return Ok(()) };
        Err(self.find_conflict().unwrap_or(error))
    }
}
