//! The calls on names of a bucket: lookups, new files, removals, renames. What an open file holds is in [`OpenObject`].

use crate::absences::RecentAbsences;
use crate::checked::CheckedBucket;
use crate::directory::BucketFolder;
use crate::file::BucketFile;
use crate::file_attrs::{FileAttrs, file_time};
use crate::found::{FoundNode, FoundObject, OpenedNode, found_object};
use crate::last_known::{LastKnown, StoredName};
use crate::made_folders::{FolderNames, ListedName};
use crate::names::{check_new_name, key_of, node_attr, path_of};
use crate::object::{ObjectContext, OpenObject, keep_all_bytes};
use crate::open_table::OpenTable;
use crate::published::{PublishedBytes, PublishedTimes};
use crate::requests::{BucketRequests, NewObject, mark_of};
use crate::staged::StagingSpace;
use crate::unpublished::EndingFiles;
use crate::write_options::BucketWriteOptions;
use bytes::Bytes;
use parking_lot::Mutex;
use spurline_object_store::{ObjectAttributes, OriginOptions, WriteCondition, bare_etag, marked_as};
use spurline_origin::{ObjectOrigin, OriginStore as _, OutageWatch, StoredNode, folder_attr, object_attr};
use spurline_sys::{join_path, split_path};
use spurline_types::{
    Error, ErrorKind, FileKind, ListPage, OBJECT_HEADERS_XATTR, ObjectAttr, ObjectRef, Result, STAGED_XATTR, Stats,
    Version,
};
use spurline_volume::Volume;
use spurline_volume::capabilities::{DirectoryRename, LockScope, WriteCapabilities};
use spurline_volume::hand_over::{HandOver, LeftOpen, OpenHold, RepeatRule, not_left};
use spurline_volume::kept_files::KeptFiles;
use spurline_volume::path_locks::PathLocks;
use spurline_volume::repeated::{ChangeMark, ChangeOutcome, RepeatedCall, RepeatedChange, outcome_by_names};
use spurline_volume::whole_files::WholeFiles;
use spurline_volume::writes::{
    Caller, Change, CreatedFile, NamePath, NodeAttr, NodePath, OpeningLookups, S_IFDIR, S_IFLNK, S_IFMT, S_IFREG,
    SourceSpace, WritableDirectory, WritableFile, WritableVolume,
};
use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Instant, SystemTime};

/// Longest target of a symbolic link, as Linux has it.
const LINK_MAX: usize = 4096;

/// The files of a bucket, and those of them that are open.
pub(crate) struct BucketFiles {
    pub origin: Arc<ObjectOrigin>,
    pub requests: Arc<BucketRequests>,
    pub options: Arc<BucketWriteOptions>,
    pub context: Arc<ObjectContext>,
    timeout: std::time::Duration,
    started: SystemTime,
    /// By their paths.
    pub open: Mutex<OpenTable<Vec<u8>, OpenObject>>,
    pub absences: Arc<RecentAbsences>,
    outage: Arc<OutageWatch>,
    /// Open files of processes that have ended, by their numbers.
    pub kept: Mutex<OpenTable<u64, OpenObject>>,
}

impl OpenTable<Vec<u8>, OpenObject> {
    /// The file that a path leads to.
    pub fn find(&self, path: &[u8]) -> Option<Arc<OpenObject>> {
        self.files.get(path).and_then(Weak::upgrade).filter(|object| object.is_current())
    }
}

impl BucketFiles {
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    /// A path below a folder; an empty name is the folder itself.
    pub fn join(&self, folder: &[u8], name: &[u8]) -> Vec<u8> {
        if name.is_empty() { folder.to_vec() } else { join_path(folder, name) }
    }

    /// A page of a folder's names, or what the folder had when the store answered last.
    pub fn list_known(&self, path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        let key = (path.to_vec(), cursor.map(<[u8]>::to_vec));
        let page = self.context.known.page(&key).map(Ok);
        self.outage.answer(page, self.deadline(), |deadline| {
            let start = self.context.known.begin(path);
            let page = self.origin.list(path, cursor, max, deadline)?;
            self.context.known.note_page(key.clone(), start, &page, |attr| {
                !self.options.object_attrs && !self.origin.has_own_versions(attr)
            });
            Ok(page)
        })
    }

    /// Whether the store does not respond, so that names have their last known attributes.
    pub fn is_silent(&self) -> bool {
        self.outage.is_silent()
    }

    /// The names and attributes of files in a folder that are open and not in the bucket yet.
    pub fn unpublished_in(&self, folder: &[u8]) -> Vec<(Vec<u8>, NodeAttr)> {
        let open = self.open.lock().all();
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
        let attr = node_attr(&self.options, &object.path(), &object.attr(), &object.file_attrs());
        let nlink = u32::from(!object.is_removed());
        NodeAttr { identity: object.identity(), nlink, ..attr }
    }

    /// The file with changes that are not published at this path.
    pub fn changed_at(&self, path: &[u8]) -> Option<Arc<OpenObject>> {
        self.open.lock().find(path).filter(|object| object.is_changed())
    }

    /// The store has copied an object under a new name: the time that programs have seen stays, and its bytes in a local file
    /// count for the copy.
    pub fn note_copied(
        &self,
        old_path: &[u8],
        old_etag: Option<&str>,
        new_path: &[u8],
        copy: FoundObject,
    ) -> FoundObject {
        let Some(etag) = old_etag else { return copy };
        let old_attr = ObjectAttr { version: Version::new(etag), ..copy.attr.clone() };
        let mtime = self.context.times.shown(old_path, old_attr).mtime;
        let copy = FoundObject { attr: ObjectAttr { mtime, ..copy.attr }, ..copy };
        self.context.times.insert(new_path, &copy.attr);
        let source = self.context.reads.source();
        let old = ObjectRef::new(source, old_path, Version::new(etag), copy.attr.size);
        let new = ObjectRef::new(source, new_path, copy.attr.version.clone(), copy.attr.size);
        self.context.published.move_to(old.id, &new);
        copy
    }

    /// The attributes of an object with the time that programs have seen.
    pub fn shown_attr(&self, path: &[u8], attr: ObjectAttr) -> ObjectAttr {
        self.context.times.shown(path, attr)
    }

    pub fn shown_object(&self, path: &[u8], found: FoundObject) -> FoundObject {
        FoundObject { attr: self.shown_attr(path, found.attr), ..found }
    }

    /// What a path leads to; fails at once in a known outage of the store.
    pub fn find(&self, path: &[u8]) -> Result<FoundNode> {
        self.find_by(path, || self.outage.answer(None, self.deadline(), |deadline| self.look_up(path, deadline)))
    }

    /// What a path leads to, or has led to when the store answered last.
    pub fn find_known(&self, path: &[u8]) -> Result<FoundNode> {
        self.find_by(path, || {
            let known = self.context.known.name(path);
            self.outage.answer(known, self.deadline(), |deadline| self.look_up(path, deadline))
        })
    }

    /// As [`BucketFiles::find_known`], for the kernel, which may create the file next.
    fn find_for_lookup(&self, path: &[u8]) -> Result<FoundNode> {
        let start = self.absences.begin_lookup(path);
        if let Some(since) = self.absent_as_listed(path) {
            self.absences.note(path.to_vec(), start, since);
            return Err(Error::new(ErrorKind::NotFound, "the folder did not have it a moment ago"));
        }
        let begun = Instant::now();
        self.find_known(path).inspect_err(|error| {
            if error.kind() == ErrorKind::NotFound {
                // The group knows for a while what other mounts have made since the lookup began.
                let since = if self.context.path_locks.get().is_some() { begun } else { Instant::now() };
                self.absences.note(path.to_vec(), start, since);
            }
        })
    }

    /// When a name was absent, if a listing of its folder excludes the name.
    fn absent_as_listed(&self, path: &[u8]) -> Option<Instant> {
        let folders = &self.absences.folders;
        if self.changed_at(path).is_some() {
            return None;
        }
        let mut known = folders.look(path);
        if let ListedName::List(start) = known {
            folders.end_listing(path, start, self.list_names(split_path(path).0).ok());
            known = folders.look(path);
        }
        if let ListedName::Absent(since) = known { Some(since) } else { None }
    }

    /// The names of a folder, unless the folder has too many pages.
    fn list_names(&self, folder: &[u8]) -> Result<FolderNames> {
        let folders = &self.absences.folders;
        let mut found = FolderNames { names: HashSet::new(), pages: 0 };
        let mut cursor: Option<Vec<u8>> = None;
        while found.pages <= folders.pages_max() {
            found.pages += 1;
            let page = self.outage.answer(None, self.deadline(), |deadline| {
                self.origin.list(folder, cursor.as_deref(), usize::MAX, deadline)
            });
            let page = match page {
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                page => page?,
            };
            found.names.extend(page.entries.iter().map(|entry| folders.hash(&entry.name)));
            cursor = page.next;
            if cursor.is_none() {
                break;
            }
        }
        Ok(found)
    }

    fn find_by(&self, path: &[u8], look: impl FnOnce() -> Result<StoredName>) -> Result<FoundNode> {
        if let Some(object) = self.changed_at(path) {
            return Ok(FoundNode::Changed(object));
        }
        if path.is_empty() && !self.options.object_attrs {
            return Ok(FoundNode::Folder(None));
        }
        // A name that no key can have does not exist.
        key_of(&self.options.root, path)?;
        Ok(match look()? {
            StoredName::Folder(marker) => FoundNode::Folder(marker),
            StoredName::Object(object) => FoundNode::Object(self.shown_object(path, object)),
        })
    }

    /// The object of the store that a path leads to, whatever files are open; `None` for a free name.
    ///
    /// # Errors
    /// `IsADirectory`; the store's.
    pub fn find_stored(&self, path: &[u8]) -> Result<Option<FoundObject>> {
        key_of(&self.options.root, path)?;
        match self.outage.answer(None, self.deadline(), |deadline| self.look_up(path, deadline)) {
            Ok(StoredName::Object(object)) => Ok(Some(self.shown_object(path, object))),
            Ok(StoredName::Folder(_)) => Err(is_folder()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn look_up(&self, path: &[u8], deadline: Instant) -> Result<StoredName> {
        let start = self.context.known.begin(path);
        let answer = if self.options.object_attrs {
            self.origin.lookup_stored(path, deadline).map(|node| match node {
                StoredNode::Folder(marker) => StoredName::Folder(marker.map(found_object)),
                StoredNode::Object(object) => StoredName::Object(found_object(object)),
            })
        } else {
            self.origin.lookup(path, deadline).map(|attr| match attr.kind {
                FileKind::Directory => StoredName::Folder(None),
                FileKind::File | FileKind::Symlink => StoredName::Object(FoundObject { attr, attributes: None }),
            })
        };
        self.context.known.note_name(path, start, &answer);
        answer
    }

    pub fn attr_at(&self, path: &[u8]) -> Result<NodeAttr> {
        Ok(self.attr_of(path, &self.find(path)?))
    }

    /// The attributes of what a path leads to, or has led to when the store answered last.
    pub fn known_attr_at(&self, path: &[u8]) -> Result<NodeAttr> {
        Ok(self.attr_of(path, &self.find_known(path)?))
    }

    /// The attributes of what was found at a path.
    pub fn attr_of(&self, path: &[u8], found: &FoundNode) -> NodeAttr {
        match found {
            FoundNode::Folder(marker) => self.folder_attr(path, marker.as_ref()),
            FoundNode::Object(object) => node_attr(&self.options, path, &object.attr, &object.file_attrs()),
            FoundNode::Changed(object) => self.open_attr(object),
        }
    }

    /// The attributes of a folder, which its marker has if there is one. Without a time of a marker or an object, it is as old as
    /// this process.
    pub fn folder_attr(&self, path: &[u8], marker: Option<&FoundObject>) -> NodeAttr {
        let own = marker.map(FoundObject::file_attrs).unwrap_or_default();
        let of_marker = marker.map(|marker| marker.attr.mtime);
        let mtime = of_marker.or_else(|| self.origin.folder_time(path)).unwrap_or(self.started);
        node_attr(&self.options, path, &ObjectAttr { mtime, ..folder_attr() }, &own)
    }

    pub fn new_object(&self, path: Vec<u8>, node: OpenedNode) -> OpenObject {
        let object = OpenObject::new(Arc::clone(&self.context), path, node);
        match self.context.kept_files.get() {
            Some(files) => object.kept_by(files),
            None => object,
        }
    }

    /// The file at `path`, which exists.
    pub fn open_object(&self, path: &[u8]) -> Result<Arc<OpenObject>> {
        let step = self.context.next_step();
        self.open_found(path, self.find_known(path)?, step)
    }

    /// What a path leads to, found by a look that began as `step`.
    pub fn open_found(&self, path: &[u8], found: FoundNode, step: u64) -> Result<Arc<OpenObject>> {
        let found = match found {
            FoundNode::Folder(_) => return Err(is_folder()),
            FoundNode::Changed(object) => return Ok(object),
            FoundNode::Object(found) => found,
        };
        let mut open = self.open.lock();
        // Another thread may have opened it meanwhile.
        if let Some(object) = open.find(path) {
            drop(open);
            object.note_found(found, step);
            return Ok(object);
        }
        let object = Arc::new(self.new_object(path.to_vec(), OpenedNode::Found(found)).found_at(step));
        open.insert(path.to_vec(), &object);
        Ok(object)
    }

    /// The attributes of a new object of a caller.
    pub fn new_attrs(&self, file_type: u32, mode: u32, caller: &Caller) -> FileAttrs {
        if !self.options.object_attrs {
            return FileAttrs::default();
        }
        let own = !self.options.squashes;
        FileAttrs {
            mode: Some(file_type | mode & !S_IFMT & !caller.umask),
            uid: Some(if own { caller.uid } else { self.options.uid }),
            gid: Some(if own { caller.gid } else { self.options.gid }),
            mtime: Some(file_time(SystemTime::now())),
            ..FileAttrs::default()
        }
    }

    fn make_folder(&self, at: &NamePath<'_>, new: &FileAttrs, mark: Option<ChangeMark>) -> Result<NodeAttr> {
        let path = path_of(at);
        self.check_absent(&path)?;
        let mut attributes = ObjectAttributes::with_content_type("application/x-directory");
        new.store(&mut attributes);
        let key = format!("{}/", key_of(&self.options.root, &path)?);
        let attributes = marked_as(attributes, &mark_of(mark));
        let marker = NewObject { key: &key, attributes: &attributes, condition: &WriteCondition::None };
        self.requests.run(self.requests.put(&marker, Bytes::new()))?;
        let attr = ObjectAttr { mtime: SystemTime::now(), ..folder_attr() };
        Ok(self.folder_attr(&path, Some(&FoundObject { attr, attributes: Some(attributes) })))
    }

    /// A folder on the way to a new file: there once the file is.
    fn imply_folder(&self, at: &NamePath<'_>) -> Result<NodeAttr> {
        let path = path_of(at);
        self.check_absent(&path)?;
        Ok(self.folder_attr(&path, None))
    }

    /// Removes the marker of a folder, and nothing below.
    fn remove_marker(&self, path: &[u8]) -> Result<NodeAttr> {
        let key = format!("{}/", key_of(&self.options.root, path)?);
        self.requests.run(self.requests.delete(&key, &WriteCondition::None))?;
        Ok(self.folder_attr(path, None))
    }

    fn make_link(
        &self,
        at: &NamePath<'_>,
        target: &[u8],
        new: &FileAttrs,
        mark: Option<ChangeMark>,
    ) -> Result<NodeAttr> {
        let path = path_of(at);
        self.check_absent(&path)?;
        let mut attributes = ObjectAttributes::with_content_type("application/octet-stream");
        new.store(&mut attributes);
        let key = key_of(&self.options.root, &path)?;
        let attributes = marked_as(attributes, &mark_of(mark));
        let link = NewObject { key: &key, attributes: &attributes, condition: &WriteCondition::Absent };
        let put = self.requests.run(self.requests.put(&link, Bytes::copy_from_slice(target)));
        let etag = put.map_err(|error| if error.kind() == ErrorKind::Stale { exists(&path) } else { error })?;
        let attr = object_attr(target.len() as u64, SystemTime::now(), etag);
        let attr = ObjectAttr { kind: FileKind::Symlink, ..attr };
        self.context.times.insert(&path, &attr);
        Ok(node_attr(&self.options, &path, &attr, new))
    }

    fn read_link(&self, path: &[u8]) -> Result<Vec<u8>> {
        let step = self.context.next_step();
        match self.find_known(path)? {
            FoundNode::Object(found) if found.attr.kind == FileKind::Symlink => {
                let mut target = vec![0; usize::try_from(found.attr.size).map_err(|_| not_link_error())?.min(LINK_MAX)];
                let read = self.open_found(path, FoundNode::Object(found), step)?.read(0, &mut target)?;
                target.truncate(read);
                Ok(target)
            }
            _ => Err(not_link_error()),
        }
    }

    /// # Errors
    /// As [`check_new_name`]; `EEXIST` when the path leads to something; the store's.
    fn check_absent(&self, path: &[u8]) -> Result<()> {
        check_new_name(path)?;
        match self.find(path) {
            Ok(_) => Err(exists(path)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn remove_folder(&self, at: &NamePath<'_>) -> Result<()> {
        let path = path_of(at);
        match self.find(&path) {
            Ok(FoundNode::Folder(_)) => {}
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
            let page = self.origin.list(path, cursor.as_deref(), 2, self.deadline())?;
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
            FoundNode::Folder(_) => return Err(is_folder()),
            FoundNode::Object(found) => found.attr.etag,
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
        self.keep_open(&path);
        self.requests.run(self.requests.delete(&key, &self.version_condition(etag)))?;
        self.forget_open(&path);
        Ok(())
    }

    /// The object of this path is about to go: a file that programs have open stays readable.
    pub fn keep_open(&self, path: &[u8]) {
        let open = self.open.lock().files.get(path).and_then(Weak::upgrade);
        // With a conflict, the file is of another object.
        if let Some(object) = open.filter(|object| object.is_current() || object.is_removed()) {
            keep_all_bytes(&object);
        }
    }

    /// The name leads to no open file any more.
    pub fn forget_open(&self, path: &[u8]) {
        let open = self.open.lock().files.remove(path).and_then(|open| open.upgrade());
        if let Some(object) = open {
            object.note_removed();
        }
    }

    /// What a change has done to names that are known; one that has failed may have been made.
    pub fn note_changed(&self, change: &Change<'_>, is_made: bool) {
        let known = &self.context.known;
        match change {
            Change::Unlink { at } | Change::Rmdir { at } if is_made => known.note_removed(&path_of(at)),
            Change::Rename { from, to, .. } => {
                if is_made {
                    known.note_removed(&path_of(from));
                } else {
                    known.forget(&path_of(from));
                }
                known.forget(&path_of(to));
            }
            // A changed file is known when it is published.
            Change::SetAttr { of, .. } | Change::SetXattr { of, .. } | Change::RemoveXattr { of, .. } => {
                if is_made {
                    known.forget_marker(of.path);
                } else {
                    known.forget(of.path);
                }
            }
            Change::Unlink { at }
            | Change::Rmdir { at }
            | Change::Mkdir { at, .. }
            | Change::Mknod { at, .. }
            | Change::Symlink { at, .. }
            | Change::Link { to: at, .. } => known.forget(&path_of(at)),
        }
    }

    /// Names that appear by a change, which has begun at `begun`, are not absent.
    fn note_appeared(&self, change: &Change<'_>, made: &Result<Option<NodeAttr>>, begun: Instant) {
        let absences = &self.absences;
        match (change, made) {
            (Change::Mkdir { at, .. }, Ok(_)) => {
                absences.note_published(&path_of(at));
                absences.folders.note_folder(&path_of(at), begun);
            }
            (Change::Mknod { at, .. } | Change::Symlink { at, .. }, Ok(_)) => absences.note_published(&path_of(at)),
            (Change::Rename { from, to, .. }, Ok(Some(attr))) if attr.mode & S_IFMT != S_IFDIR => {
                absences.note_published(&path_of(from));
                absences.note_published(&path_of(to));
            }
            (
                Change::Mkdir { .. }
                | Change::Mknod { .. }
                | Change::Symlink { .. }
                | Change::Link { .. }
                | Change::Rename { .. },
                _,
            ) => absences.clear(),
            _ => {}
        }
    }

    pub fn version_condition(&self, etag: Option<String>) -> WriteCondition {
        match etag {
            Some(etag) if !self.options.last_writer_wins => WriteCondition::Version(bare_etag(&etag).to_owned()),
            _ => WriteCondition::None,
        }
    }
}

pub(crate) fn exists(path: &[u8]) -> Error {
    Error::new(ErrorKind::Io(libc::EEXIST), format!("'{}' exists", String::from_utf8_lossy(path)))
}

fn is_folder() -> Error {
    Error::new(ErrorKind::IsADirectory, "it is a folder")
}

fn not_offered(what: &str) -> Error {
    Error::new(ErrorKind::Io(libc::EPERM), format!("a bucket has no {what}"))
}

/// The changing side of a bucket.
pub struct WritableBucket {
    pub(crate) files: Arc<BucketFiles>,
}

impl WritableBucket {
    /// Opens the changing side of the bucket `url`, whose objects are read through `reads`, over a [`crate::PublishingOrigin`] of
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
        let CheckedBucket { origin, requests, is_guarded } =
            CheckedBucket::open(url, config, &options, Arc::clone(&stats))?;
        let last_writer_wins = options.last_writer_wins || !is_guarded;
        let root = origin.root().to_owned();
        let options = Arc::new(BucketWriteOptions { root, last_writer_wins, ..options });
        let origin = Arc::new(origin);
        let outage = OutageWatch::new(Arc::clone(&origin) as _, stats, options.stale_if_error);
        let context = ObjectContext {
            requests: Arc::clone(&requests),
            reads,
            options: Arc::clone(&options),
            published,
            times: PublishedTimes::default(),
            space: Arc::new(StagingSpace::new(options.staging_max)),
            writing: Mutex::default(),
            absences: Arc::new(RecentAbsences::new(options.listings_exclude_for)),
            known: Arc::new(LastKnown::new(options.known_names_max)),
            ending: EndingFiles::default(),
            kept_files: OnceLock::new(),
            path_locks: OnceLock::new(),
            steps: AtomicU64::new(0),
        };
        let files = BucketFiles {
            origin,
            requests,
            options,
            absences: Arc::clone(&context.absences),
            outage,
            context: Arc::new(context),
            timeout: config.timeout,
            started: SystemTime::now(),
            open: Mutex::default(),
            kept: Mutex::default(),
        };
        Ok(Arc::new(WritableBucket { files: Arc::new(files) }))
    }

    /// The locks and the new names of files hold among all mounts that have these paths. Called before the first call.
    pub fn share_paths(&self, locks: Arc<dyn PathLocks>) {
        let _ = self.files.context.path_locks.set(locks);
    }

    /// Checks that a bucket can be changed, and completes or removes what mounts have left behind.
    ///
    /// # Errors
    /// As [`WritableBucket::open`].
    pub fn check(url: &str, config: &OriginOptions, options: &BucketWriteOptions, stats: Arc<Stats>) -> Result<()> {
        CheckedBucket::open(url, config, options, stats).map(drop)
    }

    fn open_file(&self, object: Arc<OpenObject>, flags: u32) -> Result<BucketFile> {
        BucketFile::open(&self.files, object, flags)
    }

    /// Whether another process has made a change, by the mark of the change.
    fn find_outcome(&self, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        let made = match repeated.call {
            RepeatedCall::Change(Change::Rename { from, to, .. }) => {
                return self.files.rename_outcome(&from, &to, repeated.known[0], repeated.mark);
            }
            RepeatedCall::Change(Change::Unlink { .. }) => return outcome_by_names(self, repeated),
            // The caller has seen the folder.
            RepeatedCall::Change(Change::Rmdir { at }) => {
                let is_gone = self.files.find(&path_of(&at)).is_err_and(|error| error.kind() == ErrorKind::NotFound);
                return Ok(if is_gone { ChangeOutcome::Made(None) } else { ChangeOutcome::NotMade });
            }
            RepeatedCall::Change(Change::Mkdir { at, .. }) => {
                Some((path_of(&at), [path_of(&at).as_slice(), b"/"].concat()))
            }
            RepeatedCall::Change(Change::Mknod { at, .. } | Change::Symlink { at, .. }) => {
                Some((path_of(&at), path_of(&at)))
            }
            // A new file is in no store before it is published. All other changes have the same result when made again.
            RepeatedCall::CreateExclusive(_) | RepeatedCall::LinkOpen(_) | RepeatedCall::Change(_) => None,
        };
        match made {
            Some((path, marked)) if self.files.has_mark(&marked, repeated.mark)? => {
                Ok(ChangeOutcome::Made(Some(self.files.attr_at(&path)?)))
            }
            _ => Ok(ChangeOutcome::NotMade),
        }
    }

    fn make_change(&self, change: &Change<'_>, caller: &Caller, mark: Option<ChangeMark>) -> Result<Option<NodeAttr>> {
        let files = &self.files;
        match change {
            Change::Mkdir { at, implied: true, .. } => files.imply_folder(at).map(Some),
            Change::Mkdir { at, mode, .. } => {
                files.make_folder(at, &files.new_attrs(S_IFDIR, *mode, caller), mark).map(Some)
            }
            Change::Mknod { at, mode, .. } if mode & S_IFMT == S_IFREG => {
                let object = files.make_file(at, true, files.new_attrs(S_IFREG, *mode, caller))?;
                object.publish_marked(mark)?;
                Ok(Some(files.open_attr(&object)))
            }
            Change::Mknod { .. } => Err(not_offered("devices, pipes and sockets")),
            Change::Symlink { .. } if !files.options.object_attrs => Err(not_offered("symbolic links")),
            Change::Symlink { at, target } => {
                let umasked = Caller { umask: 0, ..caller.clone() };
                files.make_link(at, target, &files.new_attrs(S_IFLNK, 0o777, &umasked), mark).map(Some)
            }
            Change::Link { .. } => Err(not_offered("hard links")),
            Change::Unlink { at } => self.files.remove_file(at).map(|()| None),
            Change::Rmdir { at } => self.files.remove_folder(at).map(|()| None),
            Change::Rename { from, to, flags } => self.files.rename(from, to, *flags, mark).map(Some),
            Change::SetAttr { of, set } => self.files.set_attr(of.path, set).map(Some),
            Change::SetXattr { of, name, value, flags } => {
                self.files.change_xattrs(of.path, name, &|attrs| attrs.set_xattr(name, value, *flags)).map(Some)
            }
            // The headers of a folder are those of its marker.
            Change::RemoveXattr { of, name } if *name == OBJECT_HEADERS_XATTR && !of.path.is_empty() => {
                match files.find(of.path)? {
                    FoundNode::Folder(_) => files.remove_marker(of.path).map(Some),
                    _ => Err(Error::new(
                        ErrorKind::Unsupported,
                        "the headers of an object are replaced, and not removed",
                    )),
                }
            }
            Change::RemoveXattr { of, name } => {
                self.files.change_xattrs(of.path, name, &|attrs| attrs.remove_xattr(name)).map(Some)
            }
        }
    }
}

impl HandOver for WritableBucket {
    fn keep(&self, files: Arc<dyn KeptFiles>) {
        let _ = self.files.context.kept_files.set(files);
    }

    fn adopt(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableFile>> {
        let OpenHold::Descriptor(log) = left.hold else { return Err(not_left()) };
        let object = self.files.continue_kept(log)?;
        Ok(Box::new(self.open_file(object, left.flags & !(libc::O_TRUNC as u32))?))
    }

    fn adopt_directory(&self, left: LeftOpen<'_>) -> Result<Box<dyn WritableDirectory>> {
        Ok(Box::new(BucketFolder::new(Arc::clone(&self.files), left.at.path.to_vec())))
    }

    fn repeat_rule(&self) -> RepeatRule {
        RepeatRule::Marks
    }
}

impl OpeningLookups for WritableBucket {
    fn lookup_open(
        &self,
        at: NamePath<'_>,
        flags: u32,
        _caller: &Caller,
    ) -> Result<(NodeAttr, Option<Box<dyn WritableFile>>)> {
        let path = path_of(&at);
        let step = self.files.context.next_step();
        let found = self.files.find_for_lookup(&path)?;
        let attr = self.files.attr_of(&path, &found);
        if attr.mode & S_IFMT != S_IFREG {
            return Ok((attr, None));
        }
        let file = self.open_file(self.files.open_found(&path, found, step)?, flags)?;
        Ok((attr, Some(Box::new(file))))
    }
}

impl WritableVolume for WritableBucket {
    fn capabilities(&self) -> WriteCapabilities {
        WriteCapabilities {
            rename_directory: DirectoryRename::EachUpTo(self.files.options.rename_limit),
            hard_links: false,
            symlinks: self.files.options.object_attrs,
            modes: self.files.options.object_attrs,
            xattrs: self.files.options.object_attrs,
            acls: false,
            locks: if self.files.context.path_locks.get().is_some() { LockScope::Group } else { LockScope::Mount },
            holes: true,
            copy: true,
            publishes: true,
        }
    }

    fn stat(&self, at: NodePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        self.files.known_attr_at(at.path)
    }

    fn lookup(&self, at: NamePath<'_>, _caller: &Caller) -> Result<NodeAttr> {
        let path = path_of(&at);
        Ok(self.files.attr_of(&path, &self.files.find_for_lookup(&path)?))
    }

    fn opening_lookups(&self) -> Option<&dyn OpeningLookups> {
        Some(self)
    }

    fn readlink(&self, at: NodePath<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        self.files.read_link(at.path)
    }

    fn access(&self, at: NodePath<'_>, _mask: u32, _caller: &Caller) -> Result<()> {
        self.files.find_known(at.path).map(drop)
    }

    fn whole_files(&self) -> Option<&dyn WholeFiles> {
        Some(self)
    }

    fn open(&self, at: NodePath<'_>, flags: u32, _caller: &Caller) -> Result<Box<dyn WritableFile>> {
        Ok(Box::new(self.open_file(self.files.open_object(at.path)?, flags)?))
    }

    fn hand_over(&self) -> Option<&dyn HandOver> {
        Some(self)
    }

    fn create_marked(
        &self,
        at: NamePath<'_>,
        flags: u32,
        mode: u32,
        caller: &Caller,
        _mark: Option<ChangeMark>,
    ) -> Result<CreatedFile> {
        let new = self.files.new_attrs(S_IFREG, mode, caller);
        let object = self.files.make_file(&at, flags & libc::O_EXCL as u32 != 0, new)?;
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
        match self.files.find_known(at.path) {
            Ok(FoundNode::Folder(_)) => {}
            Ok(_) => return Err(Error::new(ErrorKind::NotADirectory, "it is a file")),
            Err(error) => return Err(error),
        }
        Ok(Box::new(BucketFolder::new(Arc::clone(&self.files), at.path.to_vec())))
    }

    fn outcome_of(&self, repeated: &RepeatedChange<'_>) -> Result<ChangeOutcome> {
        let outcome = self.find_outcome(repeated)?;
        if matches!(outcome, ChangeOutcome::Made(_))
            && let RepeatedCall::Change(change) = &repeated.call
        {
            self.files.follow_made(change)?;
        }
        Ok(outcome)
    }

    fn change_marked(
        &self,
        change: &Change<'_>,
        caller: &Caller,
        mark: Option<ChangeMark>,
    ) -> Result<Option<NodeAttr>> {
        let outage = &self.files.outage;
        let was_refused = outage.is_tested();
        let begun = Instant::now();
        let made = self.make_change(change, caller, mark);
        // What was refused before the store got a request is known as before.
        if made.is_ok() || !(was_refused && outage.is_tested()) {
            self.files.note_changed(change, made.is_ok());
        }
        self.files.note_appeared(change, &made, begun);
        made
    }

    fn get_xattr(&self, at: NodePath<'_>, name: &[u8], _caller: &Caller) -> Result<Vec<u8>> {
        match name {
            OBJECT_HEADERS_XATTR => Ok(self.files.object_headers(at.path)?.to_xattr()),
            STAGED_XATTR => self.files.staged_mark(at.path),
            name => self.files.file_attrs_at(at.path)?.xattr(name),
        }
    }

    fn list_xattr(&self, at: NodePath<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        Ok(self.files.file_attrs_at(at.path)?.xattr_names())
    }

    fn space(&self) -> Result<SourceSpace> {
        // A bucket has no limit.
        const BLOCKS: u64 = 1 << 32;
        Ok(SourceSpace {
            block_size: 1 << 20,
            blocks: BLOCKS,
            blocks_free: BLOCKS,
            blocks_available: BLOCKS,
            files: BLOCKS,
            files_free: BLOCKS,
            name_max: 255,
        })
    }

    fn sync_all(&self) -> Result<()> {
        let open = self.files.open.lock().all();
        let mut result = Ok(());
        for object in open {
            result = result.and(object.publish_changes());
        }
        result
    }
}

fn not_link_error() -> Error {
    Error::new(ErrorKind::Invalid, "it is not a symbolic link")
}
