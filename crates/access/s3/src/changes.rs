//! Changes of a source by its files: an object is written whole or not at all, and durable when the call returns. Bytes go into a file of
//! the source as they come. Every call blocks. Knows no request.

use crate::bucket::OpenBucket;
use crate::conditions::names_etag;
use crate::errors::{change_error, volume_error};
use crate::keys::KeyPath;
use crate::metadata::{CONTENT_TYPE, FOLDER_TYPE, type_by_name};
use crate::uploads::BodyTarget;
use parking_lot::Mutex;
use s3s::dto::ETagCondition;
use s3s::{S3ErrorCode, S3Result, s3_error};
use spurline_fs::{
    CallerGroups, FileService, FsCaller, FsError, FsResult, HeldInode, MissingFolders, RequestNumber, WholeFile,
    find_folder,
};
use spurline_types::{Error, ErrorKind, OBJECT_HEADERS_XATTR, ObjectAttr, ObjectHeaders};
use spurline_volume::whole_files::MayReplace;
use std::sync::Arc;

const UMASK: u32 = 0o022;

pub(crate) struct NewObject {
    pub key: String,
    /// Content headers and metadata to store with the object.
    pub headers: Arc<ObjectHeaders>,
    pub condition: WriteCondition,
}

/// An object whose bytes come one after the other; a drop without a publication leaves nothing.
pub(crate) struct ObjectWriter {
    bucket: Arc<OpenBucket>,
    object: NewObject,
    /// From the first byte on.
    file: Option<WholeFile>,
}

impl ObjectWriter {
    /// # Errors
    /// `InvalidArgument` for a key that no object can have.
    pub fn new(bucket: Arc<OpenBucket>, object: NewObject) -> S3Result<Self> {
        if let KeyPath::Nowhere = KeyPath::of_key(&object.key) {
            return Err(s3_error!(InvalidArgument, "the source can't have a file of this name"));
        }
        Ok(ObjectWriter { bucket, object, file: None })
    }

    fn file(&mut self) -> S3Result<&mut WholeFile> {
        let file = match self.file.take() {
            Some(file) => file,
            None => BucketChanges::of(&self.bucket)?.begin_file(&self.object)?,
        };
        Ok(self.file.insert(file))
    }

    /// Writes the bytes that `fill` has, and publishes the object; returns the etag.
    ///
    /// # Errors
    /// That of `fill`; `PreconditionFailed`; the errors of the source.
    pub fn publish(mut self, fill: impl FnOnce(&mut Self) -> S3Result<()>) -> S3Result<String> {
        let mut written = fill(&mut self);
        if written.is_ok() && !self.object.is_folder() {
            // An object without bytes has a file too.
            written = self.file().map(|_| ());
        }
        // Dropped here, where requests may be sent.
        let file = self.file.take();
        written?;
        BucketChanges::of(&self.bucket)?.put(&self.object, file)
    }
}

impl BodyTarget for ObjectWriter {
    fn write(&mut self, bytes: &[u8]) -> S3Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.file()?.write(bytes).map_err(|error| change_error(&error))
    }

    fn discard(mut self) {
        drop(self.file.take());
    }
}

impl Drop for ObjectWriter {
    /// A request that ends in the middle is dropped by a thread of the network, which sends no requests to the source.
    fn drop(&mut self) {
        let Some(file) = self.file.take() else { return };
        let dropped = Arc::new(Mutex::new(Some(file)));
        let file = Arc::clone(&dropped);
        let begun = std::thread::Builder::new().name("s3-discard".to_owned()).spawn(move || drop(file.lock().take()));
        if let Err(error) = begun {
            tracing::warn!("a file of an upload that has ended stays open: {error}");
            std::mem::forget(dropped.lock().take());
        }
    }
}

impl NewObject {
    fn is_folder(&self) -> bool {
        matches!(KeyPath::of_key(&self.key), KeyPath::Folder(_))
    }
}

/// What the key of a new object has to lead to.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteCondition {
    /// The object must not exist.
    pub absent: bool,
    /// The object has this version.
    pub etag: Option<ETagCondition>,
}

/// The calls on the files of a bucket.
pub(crate) struct BucketChanges<'a> {
    bucket: &'a OpenBucket,
    files: &'a Arc<dyn FileService>,
    caller: FsCaller<'static>,
}

impl<'a> BucketChanges<'a> {
    /// The files of a bucket that is changed.
    ///
    /// # Errors
    /// `AccessDenied` for a bucket that is only read.
    pub fn of(bucket: &'a OpenBucket) -> S3Result<Self> {
        let Some(files) = &bucket.writes else {
            return Err(s3_error!(AccessDenied, "the endpoint was started without --writable, and changes nothing"));
        };
        let caller = FsCaller {
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            groups: CallerGroups::All(&[]),
            pid: std::process::id(),
            umask: UMASK,
            request: RequestNumber::NONE,
        };
        Ok(BucketChanges { bucket, files, caller })
    }

    /// Whether an object is seen whole without a rename, as in a bucket.
    fn publishes(&self) -> bool {
        self.files.whole_files().is_some()
    }

    /// Begins the file of an object.
    fn begin_file(&self, object: &NewObject) -> S3Result<WholeFile> {
        let KeyPath::File(path) = KeyPath::of_key(&object.key) else {
            return Err(s3_error!(InvalidRequest, "a key that ends with a slash is a folder, and has no bytes"));
        };
        let files = Arc::clone(self.files);
        let begun = WholeFile::begin(files, path.as_bytes(), MissingFolders::Imply, self.caller).and_then(|file| {
            let default_type = type_by_name(path);
            if file.takes_headers_over() || !is_plain(&object.headers, default_type) {
                file.set_headers(&with_type(&object.headers, default_type))?;
            }
            Ok(file)
        });
        begun.map_err(|error| change_error(&error))
    }

    /// Publishes the file of an object, or makes a folder, and returns the new etag.
    fn put(&self, object: &NewObject, file: Option<WholeFile>) -> S3Result<String> {
        let NewObject { key, headers, condition } = object;
        let place = KeyPath::of_key(key);
        // A directory does not compare the replaced file, and a bucket not the removed object.
        let _alone = self.bucket.lock_key(place.path());
        if file.is_none() || !self.publishes() {
            self.check_condition(place, condition)?;
        }
        let made = match file {
            Some(file) => self.publish(file, place, condition),
            None => self.make_folder(place.path(), headers),
        };
        self.bucket.note_change();
        made.map_err(|error| change_error(&error))?;
        self.etag_of(place)
    }

    fn publish(&self, file: WholeFile, place: KeyPath<'_>, condition: &WriteCondition) -> FsResult<()> {
        match &condition.etag {
            Some(wanted) => file.publish(MayReplace::Checked(&|found| self.check_replaced(place, wanted, found)), true),
            None if condition.absent => file.publish(MayReplace::Nothing, true),
            None => file.publish(MayReplace::Anything, true),
        }
    }

    /// # Errors
    /// `NotFound` without an object, `EEXIST` for another version than the wanted one.
    fn check_replaced(
        &self,
        place: KeyPath<'_>,
        wanted: &ETagCondition,
        found: Option<&ObjectAttr>,
    ) -> spurline_types::Result<()> {
        let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, "there is no object to replace"))?;
        if names_etag(wanted, &self.bucket.etag(place.path().as_bytes(), found)) {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Io(libc::EEXIST), "the object has another version"))
    }

    fn etag_of(&self, key: KeyPath<'_>) -> S3Result<String> {
        let attr = self.bucket.lookup_key(key).map_err(|error| volume_error(&error))?;
        Ok(self.bucket.etag(key.path().as_bytes(), &attr))
    }

    /// Checks the condition before a change; a condition of absence is checked once more with the change.
    fn check_condition(&self, key: KeyPath<'_>, condition: &WriteCondition) -> S3Result<()> {
        if !condition.absent && condition.etag.is_none() {
            return Ok(());
        }
        self.bucket.note_change();
        let found = self.etag_of(key);
        match (&condition.etag, found) {
            (Some(wanted), Ok(etag)) if !names_etag(wanted, &etag) => Err(S3ErrorCode::PreconditionFailed.into()),
            (Some(_), Err(error)) => Err(error),
            (None, Ok(_)) => Err(S3ErrorCode::PreconditionFailed.into()),
            (None, Err(error)) if *error.code() != S3ErrorCode::NoSuchKey => Err(error),
            _ => Ok(()),
        }
    }

    /// Makes a folder, if there is none, and replaces the headers; in a bucket these are the marker's, which a folder may lack.
    fn make_folder(&self, path: &str, headers: &ObjectHeaders) -> FsResult<()> {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = find_folder(&**self.files, above.as_bytes(), MissingFolders::Imply, &self.caller)?;
        let folder = match parent.lookup(name.as_bytes(), &self.caller)? {
            Some(found) if found.is_folder() => found,
            Some(_) => return Err(FsError::NotADirectory),
            None => {
                let made = parent.make_folder(name.as_bytes(), &self.caller)?;
                return self.store_headers(made.ino(), headers);
            }
        };
        let stored = self.headers_at(folder.ino()).unwrap_or_default();
        if is_plain(&stored, FOLDER_TYPE) && !self.publishes() {
            return self.store_headers(folder.ino(), headers);
        }
        self.set_headers(folder.ino(), headers)
    }

    /// Removes the file of an upload that has ended from a folder. A failure leaves the file to the next listing.
    pub fn remove_left_behind(&self, folder: &str, name: &str) {
        if self.publishes() {
            return;
        }
        let parent = find_folder(&**self.files, folder.as_bytes(), MissingFolders::Fail, &self.caller);
        let removed = parent.and_then(|parent| self.files.remove(parent.ino(), name.as_bytes(), false, &self.caller));
        match removed {
            Ok(_) => tracing::info!("removed '{folder}/{name}', which an upload has left that ended with its endpoint"),
            Err(error) => tracing::debug!("the file '{folder}/{name}' of an upload that has ended stays: {error}"),
        }
    }

    /// Stores headers with a folder that has none.
    fn store_headers(&self, ino: u64, headers: &ObjectHeaders) -> FsResult<()> {
        if is_plain(headers, FOLDER_TYPE) {
            return Ok(());
        }
        match self.set_headers(ino, headers) {
            // A directory whose file system has no such attributes.
            Err(error) if error.errno() == libc::EOPNOTSUPP => Ok(()),
            stored => stored,
        }
    }

    fn set_headers(&self, ino: u64, headers: &ObjectHeaders) -> FsResult<()> {
        let value = with_type(headers, FOLDER_TYPE).to_xattr();
        self.files.setxattr(ino, OBJECT_HEADERS_XATTR, &value, 0, &self.caller)
    }

    /// The headers that are stored with a folder; `None` if the source does not answer.
    fn headers_at(&self, ino: u64) -> Option<ObjectHeaders> {
        match self.files.getxattr(ino, OBJECT_HEADERS_XATTR, &self.caller) {
            Ok(value) => Some(ObjectHeaders::from_xattr(&value).unwrap_or_default()),
            Err(error) if matches!(error.errno(), libc::ENODATA | libc::EOPNOTSUPP) => Some(ObjectHeaders::default()),
            Err(_) => None,
        }
    }

    /// The folders on the way to a path, from the root on; `None` if one is missing.
    fn folders_to(&self, path: &str) -> FsResult<Option<Vec<HeldInode<'a>>>> {
        let mut folders = vec![HeldInode::root(&**self.files)];
        let (above, _) = path.rsplit_once('/').unwrap_or_default();
        for name in above.split('/').filter(|name| !name.is_empty()) {
            match folders.last().map(|folder| folder.lookup(name.as_bytes(), &self.caller)).transpose()?.flatten() {
                Some(found) if found.is_folder() => folders.push(found),
                _ => return Ok(None),
            }
        }
        Ok(Some(folders))
    }

    /// Removes an object, if it is there; in a directory, also the folders above that are empty then.
    ///
    /// # Errors
    /// `PreconditionFailed`; the errors of the source.
    pub fn delete(&self, key: &str, etag: Option<&ETagCondition>) -> S3Result<()> {
        let (path, is_folder) = match KeyPath::of_key(key) {
            KeyPath::File(path) => (path, false),
            KeyPath::Folder(path) => (path, true),
            KeyPath::Nowhere => return Ok(()),
        };
        let _alone = self.bucket.lock_key(path);
        if let Some(wanted) = etag {
            let place = if is_folder { KeyPath::Folder(path) } else { KeyPath::File(path) };
            self.check_condition(place, &WriteCondition { absent: false, etag: Some(wanted.clone()) })?;
        }
        let removed = self.remove(path, is_folder);
        self.bucket.note_change();
        removed.map_err(|error| change_error(&error))
    }

    fn remove(&self, path: &str, is_folder: bool) -> FsResult<()> {
        let Some(folders) = self.folders_to(path)? else { return Ok(()) };
        let names: Vec<&str> = path.split('/').collect();
        let (Some(parent), Some(name)) = (folders.last(), names.last()) else { return Ok(()) };
        let found = match parent.lookup(name.as_bytes(), &self.caller)? {
            Some(found) if found.is_folder() == is_folder => found,
            // A folder is not the object without the slash.
            _ => return Ok(()),
        };
        match self.files.remove(parent.ino(), name.as_bytes(), is_folder, &self.caller) {
            Err(error) if error.errno() == libc::ENOENT => return Ok(()),
            // Objects below the folder stay, and so does the folder of a directory.
            Err(error) if is_folder && matches!(error.errno(), libc::ENOTEMPTY | libc::EEXIST) => {
                if self.publishes() {
                    self.files.removexattr(found.ino(), OBJECT_HEADERS_XATTR, &self.caller)?;
                }
                return Ok(());
            }
            removed => removed?,
        }
        if self.publishes() {
            return Ok(());
        }
        let above = folders.iter().zip(&names).rev().skip(1);
        for (folder, name) in above {
            if self.files.remove(folder.ino(), name.as_bytes(), true, &self.caller).is_err() {
                break;
            }
        }
        Ok(())
    }
}

/// Whether the headers say no more than the type that the object has without them.
fn is_plain(headers: &ObjectHeaders, default_type: &str) -> bool {
    headers.0.iter().all(|(header, value)| header == CONTENT_TYPE && value == default_type)
}

/// The headers with a type: that of an object without headers, if no other is given.
fn with_type(headers: &ObjectHeaders, default_type: &str) -> ObjectHeaders {
    let mut headers = headers.clone();
    headers.0.entry(CONTENT_TYPE.to_owned()).or_insert_with(|| default_type.to_owned());
    headers
}
