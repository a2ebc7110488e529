//! A source as a bucket: the volume for reads, the files for changes, and how old names and attributes may be.
//! Knows no request.

use crate::keys::KeyPath;
use crate::metadata::KeptHeaders;
use parking_lot::{Mutex, MutexGuard};
use spurline_fs::FileService;
use spurline_types::{Error, ErrorKind, FileKind, ListPage, ObjectAttr, ObjectId, ObjectRef, Result, Version};
use spurline_volume::Volume;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// How long names and attributes that came from the source are used again.
const METADATA_AGE: Duration = Duration::from_secs(1);

/// Locks for changes: several keys share a lock.
const KEY_LOCKS: usize = 64;

/// A source that is served as a bucket.
pub struct SourceBucket {
    /// The bucket's name.
    pub name: String,
    /// For reads.
    pub volume: Arc<dyn Volume>,
    /// The files of a source that is changed.
    pub writes: Option<Arc<dyn FileService>>,
}

/// A bucket in service.
pub(crate) struct OpenBucket {
    pub name: String,
    pub volume: Arc<dyn Volume>,
    pub writes: Option<Arc<dyn FileService>>,
    /// Since when the bucket is served.
    pub opened: SystemTime,
    /// The end of the last change that was made here.
    last_change: Mutex<Option<Instant>>,
    /// Changes of a key exclude each other.
    key_locks: [Mutex<()>; KEY_LOCKS],
    /// Content headers and metadata of objects.
    pub headers: KeptHeaders,
}

impl OpenBucket {
    pub fn new(source: SourceBucket) -> Self {
        let SourceBucket { name, volume, writes } = source;
        OpenBucket {
            name,
            volume,
            writes,
            opened: SystemTime::now(),
            last_change: Mutex::default(),
            key_locks: [const { Mutex::new(()) }; KEY_LOCKS],
            headers: KeptHeaders::default(),
        }
    }

    /// A change has been made: what was learned of the source before is not used again.
    pub fn note_change(&self) {
        *self.last_change.lock() = Some(Instant::now());
    }

    /// Waits until no other change of the object is under way.
    pub fn lock_key(&self, path: &str) -> MutexGuard<'_, ()> {
        let hash = ObjectId::from_text("", path.as_bytes(), "").0 as usize;
        self.key_locks[hash % KEY_LOCKS].lock()
    }

    /// Whether folders exist without objects. In a bucket a folder follows from keys, and may have a marker, which is an object.
    pub fn is_directory(&self) -> bool {
        self.volume.source().starts_with("file://")
    }

    fn max_age(&self) -> Duration {
        let since_change = self.last_change.lock().map_or(Duration::MAX, |at| at.elapsed());
        METADATA_AGE.min(since_change)
    }

    /// The attributes of a path.
    pub fn lookup(&self, path: &str) -> Result<ObjectAttr> {
        self.volume.lookup_within(path.as_bytes(), self.max_age())
    }

    /// The attributes of the object that a folder is: of the folder itself in a directory, of the marker in a bucket.
    ///
    /// # Errors
    /// `NotFound` for a folder without a marker; the errors of the volume.
    pub fn lookup_folder(&self, path: &str) -> Result<ObjectAttr> {
        if self.is_directory() {
            return self.lookup(path);
        }
        let marker = self.volume.lookup_within(format!("{path}/").as_bytes(), self.max_age())?;
        Ok(ObjectAttr { kind: FileKind::Directory, size: 0, ..marker })
    }

    /// The attributes of the object that a key leads to.
    ///
    /// # Errors
    /// `NotFound` for a key of a file that is that of a folder, and the reverse; the errors of the volume.
    pub fn lookup_key(&self, key: KeyPath<'_>) -> Result<ObjectAttr> {
        let found = match key {
            KeyPath::File(path) => self.lookup(path).map(|attr| (attr, FileKind::File)),
            KeyPath::Folder(path) => self.lookup_folder(path).map(|attr| (attr, FileKind::Directory)),
            KeyPath::Nowhere => Err(Error::new(ErrorKind::NotFound, "no object has such a key")),
        };
        match found? {
            (attr, wanted) if attr.kind == wanted => Ok(attr),
            _ => Err(Error::new(ErrorKind::NotFound, "the key leads to no object")),
        }
    }

    /// A page of a folder.
    pub fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.volume.list_within(path, cursor, max, self.max_age())
    }

    /// The object at `path`, in the version that a lookup has found.
    pub fn object_ref(&self, path: &str, attr: &ObjectAttr) -> ObjectRef {
        let version = Version::new(attr.version.settled_text());
        ObjectRef::new(self.volume.source(), path.as_bytes(), version, attr.size)
    }

    /// The etag without quotes: that of the store, or 32 hexadecimal digits that the version determines. The suffix keeps clients
    /// from the belief that the digits are the MD5 of the bytes.
    pub fn etag(&self, path: &[u8], attr: &ObjectAttr) -> String {
        match &attr.etag {
            Some(etag) => etag.trim_start_matches("W/").trim_matches('"').to_owned(),
            None => {
                let id = ObjectId::from_text(self.volume.source(), path, attr.version.settled_text());
                format!("{:032x}-1", id.0)
            }
        }
    }
}
