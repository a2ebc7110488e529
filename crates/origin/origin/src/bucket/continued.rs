//! Open files that continue: those that a mount had open in another process, which was lost, above the version that the changes belong
//! to, and those that go over to the version of another mount. Knows no process and no byte.

use super::file_attrs::FileAttrs;
use super::found::{FoundNode, FoundObject, OpenedNode, found_object};
use super::names::{identity_of, is_unpublished, key_of, path_of};
use super::object::{KeptFile, OpenObject};
use super::requests::is_made_by;
use super::volume::BucketFiles;
use crate::s3_wire::bare_etag;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::{Change, FileIdentity, NodePath, PendingVersion};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

impl BucketFiles {
    /// An open file without changes continues with the object that its name leads to now: a mount that had the lock of the file
    /// before may have published it.
    ///
    /// # Errors
    /// The store's.
    pub fn refresh(&self, object: &OpenObject) -> Result<()> {
        if !object.is_unchanged() {
            return Ok(());
        }
        let path = object.path();
        let step = self.context.next_step();
        match self.requests.run(self.requests.head(&key_of(&self.options.root, &path)?)) {
            Ok(stored) => object.note_found(self.shown_object(&path, found_object(stored)), step),
            // Another mount that has made the file too, and does not get the lock, finds this object when it closes the file.
            Err(error) if error.kind() == ErrorKind::NotFound && object.is_new() => object.publish()?,
            // Programs that have it open read the object that others have removed, while the cache has its bytes.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// The file that the mount had open in another process, and whether it has the known changes; `None` for a file that may not be
    /// opened anew.
    pub fn open_again(&self, at: &NodePath<'_>, pending: PendingVersion) -> Result<Option<(Arc<OpenObject>, bool)>> {
        let Some(expected) = at.expected else { return Ok(Some((self.open_object(at.path)?, false))) };
        let known = self.open.lock().find(at.path).filter(|object| object.pending_number() == pending.known);
        if let Some(object) = known.filter(|_| pending.known != 0) {
            return Ok(Some((object, true)));
        }
        if pending.next == 0 {
            return Ok(None);
        }
        let found = self.find_continued(at.path, &expected, pending.follows)?;
        let node = found.map_or(OpenedNode::New(FileAttrs::default()), OpenedNode::Found);
        let object = self.new_object(at.path.to_vec(), node).continuing(pending, expected);
        let object = Arc::new(object);
        let mut open = self.open.lock();
        let outdated = open.find(at.path);
        open.insert(at.path.to_vec(), &object);
        drop(open);
        // Changes of an earlier time are out of date.
        outdated.iter().for_each(|outdated| outdated.note_outdated());
        Ok(Some((object, false)))
    }

    /// The open file that a process which has ended has kept. Several handles have one file.
    ///
    /// # Errors
    /// `Corrupt` for a file whose log or bytes are lost.
    pub fn continue_kept(&self, log: OwnedFd) -> Result<Arc<OpenObject>> {
        let Some(files) = self.context.kept_files.get() else {
            return Err(Error::new(ErrorKind::Invalid, "open files of this mount do not outlive a process"));
        };
        let file = KeptFile::read(log)?;
        let mut kept = self.kept.lock();
        if let Some(object) = kept.get(&file.number()).and_then(Weak::upgrade) {
            return Ok(object);
        }
        let number = file.number();
        let object = Arc::new(OpenObject::continued(Arc::clone(&self.context), files, file)?);
        kept.retain(|_, object| object.strong_count() > 0);
        kept.insert(number, Arc::downgrade(&object));
        if object.is_current() {
            self.open.lock().insert(object.path(), &object);
        }
        Ok(object)
    }

    /// A process that has ended has made the change: the open files follow.
    ///
    /// # Errors
    /// The store's.
    pub fn follow_made(&self, change: &Change<'_>) -> Result<()> {
        self.note_changed(change, true);
        match change {
            Change::Unlink { at } => self.forget_open(&path_of(at)),
            Change::Rename { from, to, .. } => {
                let old = path_of(from);
                let new = path_of(to);
                self.forget_replaced(&new)?;
                for path in self.open_below(&old) {
                    let below = path[old.len()..].to_vec();
                    self.follow_rename(&path, &[new.as_slice(), &below].concat())?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The paths of open files at a path or below it.
    fn open_below(&self, path: &[u8]) -> Vec<Vec<u8>> {
        let open = self.open.lock();
        let below = open.files.keys().filter(|open| {
            let rest = open.strip_prefix(path);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
        });
        below.cloned().collect()
    }

    fn follow_rename(&self, old: &[u8], new: &[u8]) -> Result<()> {
        let found = match self.requests.run(self.requests.head(&key_of(&self.options.root, new)?)) {
            // The file is not published.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            found => found_object(found?),
        };
        self.move_open(old, new, found);
        Ok(())
    }

    /// An open file of another version than that of the name was replaced by a rename.
    fn forget_replaced(&self, path: &[u8]) -> Result<()> {
        let Some(object) = self.open.lock().find(path) else { return Ok(()) };
        let found = match self.requests.run(self.requests.head(&key_of(&self.options.root, path)?)) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            found => found?,
        };
        if object.published_etag().as_deref() != found.raw.etag.as_deref().map(bare_etag) {
            self.forget_open(path);
        }
        Ok(())
    }

    /// The object below the changes of a file that was open in another process: the version at the open, or a version that this mount has
    /// published or renamed since, or any version for a file that `follows`; `None` for a new file.
    fn find_continued(&self, path: &[u8], expected: &FileIdentity, follows: bool) -> Result<Option<FoundObject>> {
        let found = match self.find(path) {
            Ok(FoundNode::Object(found)) => found,
            Ok(_) => return Err(Error::new(ErrorKind::Stale, "another writer has made a folder of the name")),
            Err(error) if error.kind() == ErrorKind::NotFound && is_unpublished(expected) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::new(ErrorKind::Stale, "another writer has removed the object"));
            }
            Err(error) => return Err(error),
        };
        if follows || identity_of(path, &found.attr) == *expected {
            return Ok(Some(found));
        }
        let stored = self.requests.run(self.requests.head(&key_of(&self.options.root, path)?))?;
        let is_same = stored.raw.etag.as_deref().map(bare_etag) == found.attr.etag.as_deref().map(bare_etag);
        if is_same && self.options.mount.is_some_and(|mount| is_made_by(&stored.attributes, mount)) {
            return Ok(Some(found));
        }
        let etag = found.attr.etag.as_deref().unwrap_or("none");
        let why = format!("another writer has changed the object since it was opened; it has ETag {etag} now");
        Err(Error::new(ErrorKind::Stale, why))
    }
}
