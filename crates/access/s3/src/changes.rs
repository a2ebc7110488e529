//! Changes of a source by its files: an object is written whole or not at all, and durable when the call returns. Every call
//! blocks. Knows no request.

use crate::bucket::{BucketWrites, OpenBucket};
use crate::chunks::ObjectRange;
use crate::errors::{change_error, volume_error};
use crate::keys::{KeyPath, UPLOAD_PREFIX};
use crate::metadata::{CONTENT_TYPE, FOLDER_TYPE, type_by_name};
use crate::uploads::StagedBytes;
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};
use spurline_fs::{
    CallerGroups, CreateMode, DirName, FileService, FileWrite, FsCaller, FsError, FsResult, HandleRef, HeldInode,
    KernelSide, MissingFolders, RequestNumber, find_folder,
};
use spurline_sys::random;
use spurline_types::{OBJECT_HEADERS_XATTR, ObjectHeaders};
use spurline_volume::writes::{S_IFREG, WritePlace};
use std::sync::Arc;
use std::time::Duration;

const OBJECT_FILE_MODE: u32 = S_IFREG | 0o666;
const UMASK: u32 = 0o022;
/// Attempts to make a file in a folder that others remove meanwhile.
const FOLDER_ATTEMPTS: usize = 5;
/// Attempts to make a file whose name is taken by a file that no reader sees, and the pause between them.
const UNSEEN_ATTEMPTS: usize = 20;
const UNSEEN_PAUSE: Duration = Duration::from_millis(20);

/// The bytes of a new object.
pub(crate) enum NewBytes {
    /// Bytes of uploads, one after the other.
    Staged(Vec<StagedBytes>),
    /// Bytes of another object.
    Object(ObjectRange),
}

impl NewBytes {
    fn is_empty(&self) -> bool {
        match self {
            NewBytes::Staged(parts) => parts.iter().all(|part| part.len == 0),
            NewBytes::Object(range) => range.at >= range.end,
        }
    }
}

/// A new object.
pub(crate) struct NewObject {
    pub bytes: NewBytes,
    /// Content headers and metadata to store with the object.
    pub headers: Arc<ObjectHeaders>,
    pub condition: WriteCondition,
}

/// What the key of a new object has to lead to.
#[derive(Debug, Clone, Default)]
pub(crate) struct WriteCondition {
    /// The object must not exist.
    pub absent: bool,
    /// The object has this version.
    pub etag: Option<s3s::dto::ETagCondition>,
}

/// The calls on the files of a bucket.
pub(crate) struct BucketChanges<'a> {
    bucket: &'a OpenBucket,
    files: &'a dyn FileService,
    publishes: bool,
    caller: FsCaller<'a>,
}

impl<'a> BucketChanges<'a> {
    /// The files of a bucket that is changed.
    ///
    /// # Errors
    /// `AccessDenied` for a bucket that is only read.
    pub fn of(bucket: &'a OpenBucket) -> S3Result<Self> {
        let Some(BucketWrites { files, publishes }) = &bucket.writes else {
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
        Ok(BucketChanges { bucket, files: &**files, publishes: *publishes, caller })
    }

    /// Writes an object, and returns the new etag.
    ///
    /// # Errors
    /// `PreconditionFailed`; the errors of the source.
    pub fn put(&self, key: &str, object: &NewObject) -> S3Result<String> {
        let path = match KeyPath::of_key(key) {
            KeyPath::File(path) => path,
            KeyPath::Folder(path) => return self.put_folder(path, object),
            KeyPath::Nowhere => return Err(s3_error!(InvalidArgument, "the source can't have a file of this name")),
        };
        let _alone = self.bucket.lock_key(path);
        let place = KeyPath::File(path);
        self.check_condition(place, &object.condition)?;
        let written = self.write_file(path, object);
        self.bucket.note_change();
        written?;
        self.etag_of(place)
    }

    fn etag_of(&self, key: KeyPath<'_>) -> S3Result<String> {
        let attr = self.bucket.lookup_key(key).map_err(|error| volume_error(&error))?;
        Ok(self.bucket.etag(key.path().as_bytes(), &attr))
    }

    /// Checks the condition before the bytes are written; a condition of absence is checked once more with the change.
    fn check_condition(&self, key: KeyPath<'_>, condition: &WriteCondition) -> S3Result<()> {
        if !condition.absent && condition.etag.is_none() {
            return Ok(());
        }
        self.bucket.note_change();
        let found = self.etag_of(key);
        match (&condition.etag, found) {
            (Some(wanted), Ok(etag)) if !crate::conditions::names_etag(wanted, &etag) => {
                Err(S3ErrorCode::PreconditionFailed.into())
            }
            (Some(_), Err(error)) => Err(error),
            (None, Ok(_)) => Err(S3ErrorCode::PreconditionFailed.into()),
            (None, Err(error)) if *error.code() != S3ErrorCode::NoSuchKey => Err(error),
            _ => Ok(()),
        }
    }

    fn put_folder(&self, path: &str, object: &NewObject) -> S3Result<String> {
        if !object.bytes.is_empty() {
            return Err(s3_error!(InvalidRequest, "a key that ends with a slash is a folder, and has no bytes"));
        }
        let _alone = self.bucket.lock_key(path);
        let place = KeyPath::Folder(path);
        self.check_condition(place, &object.condition)?;
        let made = self.make_folder(path, &object.headers);
        self.bucket.note_change();
        made?;
        self.etag_of(place)
    }

    /// Makes a folder, if there is none, and replaces the headers; in a bucket these are the marker's, which a folder may lack.
    fn make_folder(&self, path: &str, headers: &ObjectHeaders) -> Result<(), WriteFailure> {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let parent = self.folder(above)?;
        let folder = match parent.lookup(name.as_bytes(), &self.caller)? {
            Some(found) if found.is_folder() => found,
            Some(_) => return Err(FsError::NotADirectory.into()),
            None => {
                let made = parent.make_folder(name.as_bytes(), &self.caller)?;
                return self.store_headers(made.ino(), FOLDER_TYPE, headers);
            }
        };
        let stored = self.headers_at(folder.ino()).unwrap_or_default();
        if is_plain(&stored, FOLDER_TYPE) && !self.publishes {
            return self.store_headers(folder.ino(), FOLDER_TYPE, headers);
        }
        Ok(self.set_headers(folder.ino(), FOLDER_TYPE, headers)?)
    }

    fn write_file(&self, path: &str, object: &NewObject) -> S3Result<()> {
        let (folder, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut attempt = 1;
        loop {
            let written = match self.folder(folder) {
                Ok(parent) if self.publishes => self.write_published(&parent, name, object),
                Ok(parent) => self.write_renamed(&parent, name, object),
                Err(error) => Err(WriteFailure::Folder(error)),
            };
            match written {
                // Another client has removed the last object of the folder, and the folder with it.
                Err(WriteFailure::Made(error) | WriteFailure::Folder(error))
                    if matches!(error.errno(), libc::ENOENT | libc::ESTALE) && attempt < FOLDER_ATTEMPTS =>
                {
                    attempt += 1;
                }
                // A failed upload has left the file, and the close has not reached the node yet.
                Err(WriteFailure::Made(error))
                    if error.errno() == libc::EEXIST && attempt < UNSEEN_ATTEMPTS && !self.is_seen(path) =>
                {
                    std::thread::sleep(UNSEEN_PAUSE);
                    attempt += 1;
                }
                written => return written.map_err(S3Error::from),
            }
        }
    }

    /// Whether readers find an object at a path.
    fn is_seen(&self, path: &str) -> bool {
        self.bucket.note_change();
        self.bucket.lookup(path).is_ok()
    }

    /// Writes a file of another name, and then renames it: others see all bytes or none.
    fn write_renamed(&self, parent: &HeldInode<'_>, name: &str, object: &NewObject) -> Result<(), WriteFailure> {
        let hidden = format!("{UPLOAD_PREFIX}{:016x}", random());
        let (_held, file) = self.create_new(parent, hidden.as_bytes())?;
        let from = DirName { parent: parent.ino(), name: hidden.as_bytes() };
        let to = DirName { parent: parent.ino(), name: name.as_bytes() };
        let flags = if object.condition.absent { libc::RENAME_NOREPLACE } else { 0 };
        let written = self.store_headers(file.ino, type_by_name(name), &object.headers).and_then(|()| {
            self.write_bytes(file, &object.bytes)?;
            self.files.fsync(file, false)?;
            self.files.rename(from, to, flags, &self.caller)?;
            Ok(())
        });
        let released = self.files.release(file.fh);
        if written.is_err() {
            let _ = self.files.remove(parent.ino(), hidden.as_bytes(), false, &self.caller);
        }
        written?;
        released?;
        self.sync_folder(parent)?;
        Ok(())
    }

    /// Removes the file of an upload that has ended from a folder. A failure leaves the file to the next listing.
    pub fn remove_left_behind(&self, folder: &str, name: &str) {
        if self.publishes {
            return;
        }
        let parent = find_folder(self.files, folder.as_bytes(), MissingFolders::Fail, &self.caller);
        let removed = parent.and_then(|parent| self.files.remove(parent.ino(), name.as_bytes(), false, &self.caller));
        match removed {
            Ok(_) => tracing::info!("removed '{folder}/{name}', which an upload has left that ended with its endpoint"),
            Err(error) => tracing::debug!("the file '{folder}/{name}' of an upload that has ended stays: {error}"),
        }
    }

    /// Writes a file that others see at its close, whole.
    fn write_published(&self, parent: &HeldInode<'_>, name: &str, object: &NewObject) -> Result<(), WriteFailure> {
        let known = if object.condition.absent { None } else { parent.lookup(name.as_bytes(), &self.caller)? };
        let replaces = known.is_some();
        let (_held, file) = match known {
            Some(known) if known.is_folder() => return Err(FsError::IsADirectory.into()),
            Some(known) => {
                let flags = (libc::O_WRONLY | libc::O_TRUNC) as u32;
                let opened = self.files.open(known.ino(), flags, &self.caller, &KernelSide::default())?;
                let file = HandleRef { ino: known.ino(), fh: opened.fh };
                (known, file)
            }
            None => self.create_new(parent, name.as_bytes())?,
        };
        let written = self.write_with_headers(file, name, object, replaces);
        let written = written.and_then(|()| Ok(self.files.fsync(file, false)?));
        let discarded = if written.is_err() { self.files.discard(file) } else { Ok(()) };
        let released = self.files.release(file.fh);
        written?;
        discarded?;
        released?;
        Ok(())
    }

    /// Writes headers before bytes: an upload in parts has headers from the begin on.
    fn write_with_headers(
        &self,
        file: HandleRef,
        name: &str,
        object: &NewObject,
        replaces: bool,
    ) -> Result<(), WriteFailure> {
        let default_type = type_by_name(name);
        if replaces || !is_plain(&object.headers, default_type) {
            self.set_headers(file.ino, default_type, &object.headers)?;
        }
        self.write_bytes(file, &object.bytes)
    }

    /// Stores headers with a new file or folder that has none.
    fn store_headers(&self, ino: u64, default_type: &str, headers: &ObjectHeaders) -> Result<(), WriteFailure> {
        if is_plain(headers, default_type) {
            return Ok(());
        }
        match self.set_headers(ino, default_type, headers) {
            // A directory whose file system has no such attributes.
            Err(error) if error.errno() == libc::EOPNOTSUPP => Ok(()),
            stored => Ok(stored?),
        }
    }

    fn set_headers(&self, ino: u64, default_type: &str, headers: &ObjectHeaders) -> FsResult<()> {
        let mut headers = headers.clone();
        headers.0.entry(CONTENT_TYPE.to_owned()).or_insert_with(|| default_type.to_owned());
        self.files.setxattr(ino, OBJECT_HEADERS_XATTR, &headers.to_xattr(), 0, &self.caller)
    }

    /// The headers that are stored with a folder; `None` if the source does not answer.
    fn headers_at(&self, ino: u64) -> Option<ObjectHeaders> {
        match self.files.getxattr(ino, OBJECT_HEADERS_XATTR, &self.caller) {
            Ok(value) => Some(ObjectHeaders::from_xattr(&value).unwrap_or_default()),
            Err(error) if matches!(error.errno(), libc::ENODATA | libc::EOPNOTSUPP) => Some(ObjectHeaders::default()),
            Err(_) => None,
        }
    }

    /// Creates a file, open for writing.
    fn create_new(&self, parent: &HeldInode<'_>, name: &[u8]) -> Result<(HeldInode<'a>, HandleRef), WriteFailure> {
        let flags = (libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY) as u32;
        let how = CreateMode { flags, mode: OBJECT_FILE_MODE };
        let created = self.files.create(parent.ino(), name, how, &self.caller, &KernelSide::default());
        let (entry, opened) = created.map_err(WriteFailure::Made)?;
        Ok((HeldInode::of_entry(self.files, &entry), HandleRef { ino: entry.ino, fh: opened.fh }))
    }

    fn write_bytes(&self, file: HandleRef, bytes: &NewBytes) -> Result<(), WriteFailure> {
        let mut offset = 0;
        match bytes {
            NewBytes::Staged(parts) => {
                for part in parts {
                    part.for_each_piece::<WriteFailure>(&mut |piece| {
                        self.write_piece(file, offset, piece)?;
                        offset += piece.len() as u64;
                        Ok(())
                    })?;
                }
            }
            NewBytes::Object(range) => {
                let mut range = range.clone();
                while range.at < range.end {
                    let piece = range.read_piece().map_err(|error| WriteFailure::Bytes(volume_error(&error)))?;
                    self.write_piece(file, offset, &piece)?;
                    offset += piece.len() as u64;
                }
            }
        }
        Ok(())
    }

    fn write_piece(&self, file: HandleRef, offset: u64, piece: &[u8]) -> FsResult<()> {
        let mut done = 0;
        while done < piece.len() {
            let write = FileWrite {
                offset: offset + done as u64,
                place: WritePlace::Offset,
                data: &piece[done..],
                lose_privileges: false,
            };
            done += self.files.write(file, &write, &self.caller)?;
        }
        Ok(())
    }

    /// Makes the names of a folder durable, where that is a call of its own.
    fn sync_folder(&self, folder: &HeldInode<'_>) -> FsResult<()> {
        let fh = self.files.opendir(folder.ino(), &self.caller)?;
        let synced = self.files.fsyncdir(HandleRef { ino: folder.ino(), fh }, false);
        self.files.releasedir(fh)?;
        match synced {
            Err(FsError::NotServed) => Ok(()),
            synced => synced,
        }
    }

    /// The folder at a path, with all folders above; those that are missing are made, and leave no marker in a bucket.
    fn folder(&self, path: &str) -> FsResult<HeldInode<'a>> {
        find_folder(self.files, path.as_bytes(), MissingFolders::Imply, &self.caller)
    }

    /// The folders on the way to a path, from the root on; `None` if one is missing.
    fn folders_to(&self, path: &str) -> FsResult<Option<Vec<HeldInode<'a>>>> {
        let mut folders = vec![HeldInode::root(self.files)];
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
    pub fn delete(&self, key: &str, etag: Option<&s3s::dto::ETagCondition>) -> S3Result<()> {
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
                if self.publishes {
                    self.files.removexattr(found.ino(), OBJECT_HEADERS_XATTR, &self.caller)?;
                }
                return Ok(());
            }
            removed => removed?,
        }
        if self.publishes {
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

/// Why an object was not written.
enum WriteFailure {
    /// The folder of the file was not found or made.
    Folder(FsError),
    /// The file could not be made.
    Made(FsError),
    /// The source's error.
    Source(FsError),
    /// The bytes could not be read.
    Bytes(S3Error),
}

impl From<FsError> for WriteFailure {
    fn from(error: FsError) -> Self {
        WriteFailure::Source(error)
    }
}

impl From<S3Error> for WriteFailure {
    fn from(error: S3Error) -> Self {
        WriteFailure::Bytes(error)
    }
}

impl From<WriteFailure> for S3Error {
    fn from(failure: WriteFailure) -> Self {
        match failure {
            WriteFailure::Folder(error) | WriteFailure::Made(error) | WriteFailure::Source(error) => {
                change_error(&error)
            }
            WriteFailure::Bytes(error) => error,
        }
    }
}
