//! Open files that continue: those of a process that has ended, and those that go over to the version of another mount. Knows no byte.

use crate::found::found_object;
use crate::names::{key_of, path_of};
use crate::object::{KeptFile, OpenObject};
use crate::volume::BucketFiles;
use spurline_object_store::bare_etag;
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::writes::Change;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

impl BucketFiles {
    /// An open file without changes continues with the object that its name leads to now: a mount that had the lock of the file
    /// before may have published it.
    pub fn refresh(&self, object: &OpenObject) -> Result<()> {
        if !object.is_unchanged() {
            return Ok(());
        }
        let path = object.path();
        let step = self.context.next_step();
        match self.requests.run(self.requests.head(&key_of(&self.options.root, &path)?)) {
            Ok(stored) => object.note_found(self.shown_object(&path, found_object(stored)), step),
            // Another mount that has made the file too, and does not get the lock, finds this object when it closes the file.
            Err(error) if error.kind() == ErrorKind::NotFound && object.is_new() => object.publish_changes()?,
            // Programs that have it open read the object that others have removed, while the cache has its bytes.
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(())
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
        if let Some(object) = kept.files.get(&file.number()).and_then(Weak::upgrade) {
            return Ok(object);
        }
        let number = file.number();
        let object = Arc::new(OpenObject::continued(Arc::clone(&self.context), files, file)?);
        kept.insert(number, &object);
        if object.is_current() {
            self.open.lock().insert(object.path(), &object);
        }
        Ok(object)
    }

    /// A process that has ended has made the change: the open files follow.
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
}
