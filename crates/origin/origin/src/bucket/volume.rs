//! The calls on names of a bucket: lookups, new files, removals, renames. What an open file holds is in [`OpenObject`].

use super::BucketWriteOptions;
use super::directory::BucketFolder;
use super::file::BucketFile;
use super::names::{key_of, node_attr, path_of};
use super::object::OpenObject;
use super::probe::{find_ignored_condition, unguarded};
use super::published::PublishedBytes;
use super::requests::BucketRequests;
use crate::object_origin::{ObjectOrigin, folder_attr};
use crate::s3_wire::bare_etag;
use crate::write_backend::WriteCondition;
use crate::{OriginOptions, OriginStore as _, SourceLocation};
use parking_lot::Mutex;
use spurline_sys::join_path;
use spurline_types::{Error, ErrorKind, FileKind, ListPage, ObjectAttr, Result, Stats};
use spurline_volume::Volume;
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedChange};
use spurline_volume::writes::{
    AttrChange, Caller, Change, CreatedFile, NamePath, NodeAttr, NodePath, S_IFMT, S_IFREG, SourceSpace,
    WritableDirectory, WritableFile, WritableVolume,
};
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::Instant;

/// Entries of the table of open files, before those that are closed are dropped.
const LEAST_OPEN: usize = 64;

/// The files of a bucket, and those of them that are open.
pub(super) struct BucketFiles {
    origin: ObjectOrigin,
    pub requests: Arc<BucketRequests>,
    reads: Arc<dyn Volume>,
    pub options: Arc<BucketWriteOptions>,
    published: Arc<PublishedBytes>,
    timeout: std::time::Duration,
    pub open: Mutex<OpenTable>,
}

/// Open files by their paths.
#[derive(Default)]
pub(super) struct OpenTable {
    pub files: HashMap<Vec<u8>, Weak<OpenObject>>,
    /// The number of entries at which closed files are dropped.
    sweep_at: usize,
}

impl OpenTable {
    fn find(&self, path: &[u8]) -> Option<Arc<OpenObject>> {
        self.files.get(path).and_then(Weak::upgrade).filter(|object| object.is_current())
    }

    pub fn insert(&mut self, path: Vec<u8>, object: &Arc<OpenObject>) {
        if self.files.len() >= self.sweep_at.max(LEAST_OPEN) {
            self.files.retain(|_, open| open.strong_count() > 0);
            self.sweep_at = 2 * self.files.len();
        }
        self.files.insert(path, Arc::downgrade(object));
    }
}

impl BucketFiles {
    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// A path below a folder; an empty name is the folder itself.
    pub fn join(&self, folder: &[u8], name: &[u8]) -> Vec<u8> {
        if name.is_empty() { folder.to_vec() } else { join_path(folder, name) }
    }

    /// A page of a folder's names.
    pub fn list(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.origin.list(path, cursor, max, self.deadline())
    }

    /// The names and attributes of files in a folder that are open and not in the bucket yet.
    pub fn unpublished_in(&self, folder: &[u8]) -> Vec<(Vec<u8>, NodeAttr)> {
        let open: Vec<_> = self.open.lock().files.values().filter_map(Weak::upgrade).collect();
        let names = open.iter().filter(|object| object.is_changed()).filter_map(|object| {
            let path = object.path();
            let rest = match folder {
                b"" => path.as_slice(),
                folder => path.strip_prefix(folder)?.strip_prefix(b"/")?,
            };
            (!rest.contains(&b'/')).then(|| (rest.to_vec(), self.open_attr(object)))
        });
        names.collect()
    }

    /// The attributes of an open file.
    pub fn open_attr(&self, object: &OpenObject) -> NodeAttr {
        let attr = node_attr(&self.options, &object.path(), &object.attr());
        NodeAttr { identity: object.identity(), ..attr }
    }

    /// The attributes of a file that the bucket has, with the changes that are not published.
    pub fn file_attr(&self, path: &[u8], attr: &ObjectAttr) -> NodeAttr {
        match self.open.lock().find(path) {
            Some(object) if object.is_changed() => self.open_attr(&object),
            _ => node_attr(&self.options, path, attr),
        }
    }

    /// What a path leads to.
    pub fn find(&self, path: &[u8]) -> Result<FoundNode> {
        let open = self.open.lock().find(path);
        if let Some(object) = open.filter(|object| object.is_changed()) {
            return Ok(FoundNode::Changed(object));
        }
        if path.is_empty() {
            return Ok(FoundNode::Folder);
        }
        // A name that no key can have does not exist.
        key_of(&self.options.root, path)?;
        let attr = self.origin.lookup(path, self.deadline())?;
        Ok(if attr.kind == FileKind::Directory { FoundNode::Folder } else { FoundNode::Object(attr) })
    }

    pub fn attr_at(&self, path: &[u8]) -> Result<NodeAttr> {
        Ok(match self.find(path)? {
            FoundNode::Folder => node_attr(&self.options, path, &folder_attr()),
            FoundNode::Object(attr) => node_attr(&self.options, path, &attr),
            FoundNode::Changed(object) => self.open_attr(&object),
        })
    }

    fn new_object(&self, path: Vec<u8>, attr: Option<ObjectAttr>) -> Arc<OpenObject> {
        Arc::new(OpenObject::new(&self.requests, &self.reads, &self.options, &self.published, path, attr))
    }

    /// The file at `path`, which exists.
    fn open_object(&self, path: &[u8]) -> Result<Arc<OpenObject>> {
        let attr = match self.find(path)? {
            FoundNode::Folder => return Err(Error::new(ErrorKind::IsADirectory, "it is a folder")),
            FoundNode::Changed(object) => return Ok(object),
            FoundNode::Object(attr) => attr,
        };
        let mut open = self.open.lock();
        // Another thread may have opened it meanwhile.
        if let Some(object) = open.find(path) {
            drop(open);
            object.note_found(attr);
            return Ok(object);
        }
        let object = self.new_object(path.to_vec(), Some(attr));
        open.insert(path.to_vec(), &object);
        Ok(object)
    }

    fn make_file(&self, at: &NamePath<'_>, exclusive: bool) -> Result<Arc<OpenObject>> {
        let path = path_of(at);
        match self.find(&path) {
            Ok(FoundNode::Folder) if !exclusive => {
                return Err(Error::new(ErrorKind::IsADirectory, "it is a folder"));
            }
            Ok(_) if exclusive => return Err(exists(&path)),
            Ok(_) => return self.open_object(&path),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        let mut open = self.open.lock();
        if let Some(object) = open.find(&path).filter(|object| object.is_changed()) {
            return if exclusive { Err(exists(&path)) } else { Ok(object) };
        }
        let object = self.new_object(path.clone(), None);
        open.insert(path, &object);
        Ok(object)
    }

    fn make_folder(&self, at: &NamePath<'_>) -> Result<NodeAttr> {
        let path = path_of(at);
        match self.find(&path) {
            Ok(_) => return Err(exists(&path)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        self.requests.run(self.make_marker(&path))?;
        Ok(node_attr(&self.options, &path, &folder_attr()))
    }

    fn remove_folder(&self, at: &NamePath<'_>) -> Result<()> {
        let path = path_of(at);
        match self.find(&path) {
            Ok(FoundNode::Folder) => {}
            Ok(_) => return Err(Error::new(ErrorKind::NotADirectory, "it is a file")),
            // It has vanished with its last file.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(error),
        }
        if !self.unpublished_in(&path).is_empty() || self.has_names(&path)? {
            return Err(Error::new(ErrorKind::Io(libc::ENOTEMPTY), "the folder is not empty"));
        }
        let key = format!("{}/", key_of(&self.options.root, &path)?);
        self.requests.run(self.requests.delete(&key, &WriteCondition::None))
    }

    /// Whether a folder has names in the bucket. Its own marker is none, and can fill a page.
    pub fn has_names(&self, path: &[u8]) -> Result<bool> {
        let mut cursor = None;
        loop {
            let page = self.list(path, cursor.as_deref(), 2)?;
            if !page.entries.is_empty() {
                return Ok(true);
            }
            cursor = page.next;
            if cursor.is_none() {
                return Ok(false);
            }
        }
    }

    fn remove_file(&self, at: &NamePath<'_>) -> Result<()> {
        let path = path_of(at);
        let key = key_of(&self.options.root, &path)?;
        let etag = match self.find(&path)? {
            FoundNode::Folder => return Err(Error::new(ErrorKind::IsADirectory, "it is a folder")),
            FoundNode::Object(attr) => attr.etag,
            FoundNode::Changed(object) => {
                // A publication that is under way ends first.
                object.note_removed();
                match object.published_etag() {
                    Some(etag) => Some(etag),
                    None => {
                        self.forget_open(&path);
                        return Ok(());
                    }
                }
            }
        };
        self.requests.run(self.requests.delete(&key, &self.version_condition(etag)))?;
        self.forget_open(&path);
        Ok(())
    }

    /// The name leads to no open file any more.
    pub fn forget_open(&self, path: &[u8]) {
        let open = self.open.lock().files.remove(path).and_then(|open| open.upgrade());
        if let Some(object) = open {
            object.note_removed();
        }
    }

    pub fn version_condition(&self, etag: Option<String>) -> WriteCondition {
        match etag {
            Some(etag) if !self.options.last_writer_wins => WriteCondition::Version(bare_etag(&etag).to_owned()),
            _ => WriteCondition::None,
        }
    }

    fn set_attr(&self, of: &NodePath<'_>, set: &AttrChange) -> Result<NodeAttr> {
        let Some(len) = set.size else { return self.attr_at(of.path) };
        let object = self.open_object(of.path)?;
        object.set_len(len)?;
        object.publish()?;
        Ok(self.open_attr(&object))
    }
}

/// What a path leads to.
pub(super) enum FoundNode {
    Folder,
    /// An object without changes of this process.
    Object(ObjectAttr),
    /// A file with changes that are not published.
    Changed(Arc<OpenObject>),
}

pub(super) fn exists(path: &[u8]) -> Error {
    Error::new(ErrorKind::Io(libc::EEXIST), format!("'{}' exists", String::from_utf8_lossy(path)))
}

fn not_offered(what: &str) -> Error {
    Error::new(ErrorKind::Io(libc::EPERM), format!("a bucket has no {what}"))
}

/// The changing side of a bucket.
pub struct WritableBucket {
    files: Arc<BucketFiles>,
}

impl WritableBucket {
    /// Opens the changing side of the bucket `url`, whose objects are read through `reads`, over a [`super::PublishingOrigin`] of
    /// `published`.
    ///
    /// # Errors
    /// `Invalid` for an impossible URL or configuration; `ReadOnly` for a store that this program can't change;
    /// `Unsupported` for one that does not keep the conditions of writes; the store's.
    pub fn open(
        url: &str,
        config: &OriginOptions,
        options: BucketWriteOptions,
        reads: Arc<dyn Volume>,
        published: Arc<PublishedBytes>,
        stats: Arc<Stats>,
    ) -> Result<Arc<WritableBucket>> {
        let source = SourceLocation::parse(url)?;
        let bucket = crate::open_bucket(&source, config, stats)?;
        let origin = ObjectOrigin::new(source, Arc::clone(&bucket));
        let requests = Arc::new(BucketRequests::new(bucket)?);
        let mut options = BucketWriteOptions { root: origin.root().to_owned(), ..options };
        if let Some(ignored) = requests.run(find_ignored_condition(&requests, &options.root))? {
            let error = unguarded(&requests.describe(), ignored);
            if !options.allow_unguarded_writes {
                return Err(error);
            }
            tracing::warn!("--allow-unguarded-writes: {error}");
            options.last_writer_wins = true;
        }
        let files = BucketFiles {
            origin,
            requests,
            reads,
            options: Arc::new(options),
            published,
            timeout: config.timeout,
            open: Mutex::default(),
        };
        Ok(Arc::new(WritableBucket { files: Arc::new(files) }))
    }

    fn open_file(&self, object: Arc<OpenObject>, flags: u32) -> Result<BucketFile> {
        BucketFile::open(&self.files, object, flags)
    }
}

impl WritableVolume for WritableBucket {
    fn capabilities(&self) -> WriteCapabilities {
        WriteCapabilities {
            rename_directory: DirectoryRename::EachUpTo(self.files.options.rename_limit),
            hard_links: false,
            symlinks: false,
            modes: false,
            xattrs: false,
            acls: false,
            locks: LockScope::Mount,
            holes: true,
            copy: true,
        }
    }

    fn stat(&self, at: NodePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        self.files.attr_at(at.path)
    }

    fn lookup(&self, at: NamePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        self.files.attr_at(&path_of(&at))
    }

    fn readlink(&self, _at: NodePath<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Invalid, "a bucket has no symbolic links"))
    }

    fn access(&self, at: NodePath<'_>, _mask: u32, _caller: &Caller) -> Result<()> {
        self.files.find(at.path).map(drop)
    }

    fn open(&self, at: NodePath<'_>, flags: u32, _caller: &Caller) -> Result<Box<dyn WritableFile>> {
        Ok(Box::new(self.open_file(self.files.open_object(at.path)?, flags)?))
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        _mode: u32,
        _caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let object = self.files.make_file(&at, flags & libc::O_EXCL as u32 != 0)?;
        let file = self.open_file(object, flags)?;
        Ok(CreatedFile { attr: file.attr(), file: Box::new(file), directory: None })
    }

    fn create_unnamed(
        &self,
        _directory: NodePath<'_>,
        _flags: u32,
        _mode: u32,
        _caller: &Caller,
    ) -> Result<(NodeAttr, Box<dyn WritableFile>)> {
        Err(Error::new(ErrorKind::Unsupported, "a bucket has no files without a name"))
    }

    fn link_open(&self, _file: &dyn WritableFile, _to: NamePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        Err(not_offered("hard links"))
    }

    fn open_directory(&self, at: NodePath<'_>, _caller: &Caller) -> Result<Box<dyn WritableDirectory>> {
        match self.files.find(at.path) {
            Ok(FoundNode::Folder) => {}
            Ok(_) => return Err(Error::new(ErrorKind::NotADirectory, "it is a file")),
            Err(error) => return Err(error),
        }
        Ok(Box::new(BucketFolder::new(Arc::clone(&self.files), at.path.to_vec())))
    }

    fn outcome_of(&self, _repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        Ok(ChangeOutcome::Unclear("a bucket is changed by one mount alone"))
    }

    fn change_marked(
        &self,
        change: &Change<'_>,
        _caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<Option<NodeAttr>> {
        match change {
            Change::Mkdir { at, .. } => self.files.make_folder(at).map(Some),
            Change::Mknod { at, mode, .. } if mode & S_IFMT == S_IFREG => {
                let object = self.files.make_file(at, true)?;
                object.publish()?;
                Ok(Some(self.files.open_attr(&object)))
            }
            Change::Mknod { .. } => Err(not_offered("devices, pipes and sockets")),
            Change::Symlink { .. } => Err(not_offered("symbolic links")),
            Change::Link { .. } => Err(not_offered("hard links")),
            Change::Unlink { at } => self.files.remove_file(at).map(|()| None),
            Change::Rmdir { at } => self.files.remove_folder(at).map(|()| None),
            Change::Rename { from, to, flags } => self.files.rename(from, to, *flags).map(Some),
            Change::SetAttr { of, set } => self.files.set_attr(of, set).map(Some),
            Change::SetXattr { .. } | Change::RemoveXattr { .. } => {
                Err(Error::new(ErrorKind::Unsupported, "a bucket keeps no extended attributes"))
            }
        }
    }

    fn get_xattr(&self, _at: NodePath<'_>, _name: &[u8], _caller: &Caller) -> Result<Vec<u8>> {
        Err(Error::new(ErrorKind::Io(libc::ENODATA), "no such extended attribute"))
    }

    fn list_xattr(&self, _at: NodePath<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn space(&self) -> Result<SourceSpace> {
        // A bucket has no limit.
        const BLOCK: u64 = 1 << 20;
        const BLOCKS: u64 = 1 << 32;
        Ok(SourceSpace {
            block_size: BLOCK,
            blocks: BLOCKS,
            blocks_free: BLOCKS,
            blocks_available: BLOCKS,
            files: BLOCKS,
            files_free: BLOCKS,
            name_max: 255,
        })
    }

    fn sync_all(&self) -> Result<()> {
        let open: Vec<_> = self.files.open.lock().files.values().filter_map(Weak::upgrade).collect();
        let mut result = Ok(());
        for object in open {
            result = result.and(object.publish());
        }
        result
    }
}
