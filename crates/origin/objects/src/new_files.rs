//! New files of a bucket: an exclusive creation has a single winner among the programs of this mount, and among the mounts of the same
//! nodes. Knows no bytes.

use crate::absences::{ABSENCE_AGE, EXCLUSIVE_ABSENCE_AGE, LookupStart, RESERVED_ABSENCE_AGE};
use crate::file_attrs::FileAttrs;
use crate::found::{FoundNode, OpenedNode};
use crate::names::{check_new_name, path_of};
use crate::object::OpenObject;
use crate::volume::{BucketFiles, exists};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::path_locks::LockedPath;
use spurline_volume::writes::NamePath;
use std::sync::Arc;
use std::time::Duration;

impl BucketFiles {
    /// What the path of a new file leads to. A lookup within `absence_age` has mostly shown that the path leads to nothing.
    fn find_existing(&self, path: &[u8], absence_age: Duration) -> Result<FoundNode> {
        if self.absences.take(path, absence_age) && self.changed_at(path).is_none() {
            return Err(Error::new(ErrorKind::NotFound, "a lookup did not find it"));
        }
        self.find(path)
    }

    /// Makes the file of a name, or opens the one that is there.
    ///
    /// # Errors
    /// `Io(EEXIST)` for an exclusive creation when there is one, or another mount is making it; those of [`check_new_name`], of the store,
    /// and of the nodes.
    pub fn make_file(&self, at: &NamePath<'_>, exclusive: bool, new: FileAttrs) -> Result<Arc<OpenObject>> {
        let path = path_of(at);
        // Before the look at the store: the mount that has the name makes the object.
        let reserved = self.context.path_locks.get().filter(|_| exclusive);
        let reserved = reserved.map(|locks| locks.reserve(&path)).transpose()?;
        loop {
            let start = self.absences.begin_lookup(&path);
            if let Some(object) = self.make_file_at(&path, exclusive, &new, reserved.as_ref(), start)? {
                return Ok(object);
            }
        }
    }

    /// Makes a new file, or opens the one that is there; `None` when an exclusive creation has to look again, since another file of the
    /// name may have been published after `start`.
    fn make_file_at(
        &self,
        path: &[u8],
        exclusive: bool,
        new: &FileAttrs,
        reserved: Option<&Arc<dyn LockedPath>>,
        start: LookupStart,
    ) -> Result<Option<Arc<OpenObject>>> {
        let step = self.context.next_step();
        let absence_age = match reserved {
            Some(_) => RESERVED_ABSENCE_AGE,
            None if exclusive => EXCLUSIVE_ABSENCE_AGE,
            None => ABSENCE_AGE,
        };
        match self.find_existing(path, absence_age) {
            Ok(_) if exclusive => return Err(exists(path)),
            Ok(found) => return self.open_found(path, found, step).map(Some),
            Err(error) if error.kind() == ErrorKind::NotFound => check_new_name(path)?,
            Err(error) => return Err(error),
        }
        let mut open = self.open.lock();
        if let Some(object) = open.find(path).filter(|object| object.is_changed()) {
            return if exclusive { Err(exists(path)) } else { Ok(Some(object)) };
        }
        // After the looks at open files: a file is noted as published before it counts as unchanged.
        if exclusive && self.absences.has_publications_since(path, start) {
            return Ok(None);
        }
        let node = OpenedNode::New { attrs: new.clone(), exclusive };
        let object = Arc::new(self.new_object(path.to_vec(), node));
        reserved.into_iter().for_each(|reserved| object.lock_by(Arc::clone(reserved)));
        open.insert(path.to_vec(), &object);
        self.absences.folders.note_file(path);
        Ok(Some(object))
    }
}
