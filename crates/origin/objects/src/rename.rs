//! Renames in a bucket: copies within the store, then removals. An object is removed only after its copy is there, so a
//! rename that is aborted leaves some names twice and loses none. That of a folder is in `rename_folder`.

use crate::file_attrs::{FileAttrs, file_time};
use crate::found::{FoundNode, FoundObject, found_object};
use crate::names::{KEY_MAX, check_new_name, identity_of, key_of, node_attr, path_of};
use crate::rename_folder::{FolderRename, RenameEnd, RenamedCopy, complete_renames};
use crate::rename_record::{RenameRecord, RenamedObject};
use crate::requests::{BucketRequests, NewObject, is_marked_as, mark_of};
use crate::volume::{BucketFiles, exists};
use bytes::Bytes;
use spurline_object_store::{CopySource, RawObject, StoredObject, WriteCondition, bare_etag, marked_as};
use spurline_types::{Error, ErrorKind, Result};
use spurline_volume::repeated::{ChangeMark, ChangeOutcome};
use spurline_volume::writes::{FileIdentity, NamePath, NodeAttr};

/// From `linux/fs.h`.
const RENAME_NOREPLACE: u32 = 1;

impl BucketFiles {
    /// Renames a file or a folder; `flags` as for `renameat2(2)`. The attributes are those under the new name.
    ///
    /// # Errors
    /// As [`check_new_name`]; `EXDEV` for a folder of too many objects; `EEXIST`, `ENOTEMPTY`, `EISDIR`, `ENOTDIR` for what has the new name; the store's.
    pub fn rename(
        &self,
        from: &NamePath<'_>,
        to: &NamePath<'_>,
        flags: u32,
        mark: Option<ChangeMark>,
    ) -> Result<NodeAttr> {
        let mark = mark_of(mark);
        let old_path = path_of(from);
        let new_path = path_of(to);
        if flags & !RENAME_NOREPLACE != 0 {
            return Err(Error::new(ErrorKind::Invalid, "a bucket can't exchange names"));
        }
        let old = self.find(&old_path)?;
        let new = match self.find(&new_path) {
            Ok(_) if flags & RENAME_NOREPLACE != 0 => return Err(exists(&new_path)),
            Ok(found) => Some(found),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if old_path == new_path {
            return self.attr_at(&old_path);
        }
        check_new_name(&new_path)?;
        if matches!(old, FoundNode::Folder(_)) {
            match new {
                None => {}
                Some(FoundNode::Folder(_)) if self.has_names(&new_path)? => {
                    let why = "the new name is a folder that is not empty";
                    return Err(Error::new(ErrorKind::Io(libc::ENOTEMPTY), why));
                }
                Some(FoundNode::Folder(_)) => {}
                Some(_) => return Err(Error::new(ErrorKind::NotADirectory, "the new name is a file")),
            }
            return self.rename_folder(&old_path, &new_path, mark);
        }
        let condition = match new {
            None => WriteCondition::Absent,
            Some(FoundNode::Folder(_)) => return Err(Error::new(ErrorKind::IsADirectory, "the new name is a folder")),
            Some(FoundNode::Changed(object)) => self.version_condition(object.published_etag()),
            Some(FoundNode::Object(found)) => self.version_condition(found.attr.etag),
        };
        if let FoundNode::Changed(object) = old {
            object.publish_changes()?;
        }
        self.rename_file(&old_path, &new_path, &condition, &mark)
    }

    fn rename_file(
        &self,
        old_path: &[u8],
        new_path: &[u8],
        condition: &WriteCondition,
        mark: &str,
    ) -> Result<NodeAttr> {
        let old_key = key_of(&self.options.root, old_path)?;
        let new_key = key_of(&self.options.root, new_path)?;
        let plan = CopyPlan {
            old_key: &old_key,
            new_key: &new_key,
            etag: None,
            mark,
            condition,
            keeps_mtime: self.options.object_attrs,
        };
        self.keep_open(new_path);
        let CopiedObject { found, source_etag } = self.requests.run(copy_object(&self.requests, &plan))?;
        let found = self.note_copied(old_path, source_etag.as_deref(), new_path, found);
        self.requests.run(self.requests.delete(&old_key, &self.version_condition(source_etag)))?;
        self.forget_open(new_path);
        let attr = node_attr(&self.options, new_path, &found.attr, &self.shown_attrs(&found));
        self.move_open(old_path, new_path, found);
        Ok(attr)
    }

    /// Owner, mode, times and extended attributes of an object that the mount shows.
    fn shown_attrs(&self, found: &FoundObject) -> FileAttrs {
        if self.options.object_attrs { found.file_attrs() } else { FileAttrs::default() }
    }

    /// An open file has another name.
    pub fn move_open(&self, old_path: &[u8], new_path: &[u8], found: FoundObject) {
        let mut open = self.open.lock();
        let moved = open.files.remove(old_path).and_then(|open| open.upgrade());
        if let Some(object) = moved {
            open.insert(new_path.to_vec(), &object);
            drop(open);
            let attributes = found.attributes.filter(|_| self.options.object_attrs);
            object.note_renamed(new_path.to_vec(), FoundObject { attributes, ..found });
        }
    }

    fn rename_folder(&self, old_path: &[u8], new_path: &[u8], mark: String) -> Result<NodeAttr> {
        if new_path.strip_prefix(old_path).is_some_and(|rest| rest.starts_with(b"/")) {
            return Err(Error::new(ErrorKind::Invalid, "a folder can't be moved into itself"));
        }
        self.publish_below(old_path)?;
        let old_key = format!("{}/", key_of(&self.options.root, old_path)?);
        let new_key = format!("{}/", key_of(&self.options.root, new_path)?);
        let ended = self.requests.run(async {
            let objects = self.objects_below(&old_key, &new_key).await?;
            let record =
                RenameRecord::begin(&self.requests, &self.options.root, mark, old_key, new_key, objects).await?;
            FolderRename::of_new_record(&self.requests, record, self.options.rename_rules()).run().await
        });
        let copies = match ended? {
            RenameEnd::Made(copies) => copies,
            RenameEnd::Undone(failure) => {
                return Err(failure
                    .unwrap_or_else(|| Error::new(ErrorKind::OriginFailed, "another mount has undone the rename")));
            }
        };
        for RenamedCopy { object, copy } in copies {
            if !object.is_marker() {
                let old = self.join(old_path, object.name.as_bytes());
                let new = self.join(new_path, object.name.as_bytes());
                let copy = self.note_copied(&old, object.etag.as_deref(), &new, copy);
                self.move_open(&old, &new, copy);
            }
        }
        self.attr_at(new_path)
    }

    /// The objects below a folder, for a rename.
    async fn objects_below(&self, old_key: &str, new_key: &str) -> Result<Vec<RenamedObject>> {
        let limit = usize::try_from(self.options.rename_limit).unwrap_or(usize::MAX);
        let found = self.requests.list_below(old_key, limit).await?;
        if found.len() > limit {
            let why = format!(
                "the folder has more than {limit} files and folders, and a rename copies each of them; --rename-limit allows no more"
            );
            return Err(Error::new(ErrorKind::Io(libc::EXDEV), why));
        }
        let objects = found.into_iter().filter_map(|object| {
            let name = object.key.strip_prefix(old_key)?.to_owned();
            let etag = object.etag.as_deref().map(bare_etag).map(str::to_owned);
            Some(RenamedObject { name, etag, size: object.size })
        });
        let objects: Vec<RenamedObject> = objects.collect();
        if let Some(object) = objects.iter().find(|object| new_key.len() + object.name.len() > KEY_MAX) {
            let why = format!("the key '{new_key}{}' is longer than S3 allows", object.name);
            return Err(Error::new(ErrorKind::Io(libc::ENAMETOOLONG), why));
        }
        Ok(objects)
    }

    /// What became of a rename that another process got before it was lost. The rename of a folder is completed, or undone, by the
    /// record. A copy of a file has the mark of the rename before the source is removed.
    pub fn rename_outcome(
        &self,
        from: &NamePath<'_>,
        to: &NamePath<'_>,
        known: Option<FileIdentity>,
        mark: ChangeMark,
    ) -> Result<ChangeOutcome> {
        let old_path = path_of(from);
        let new_path = path_of(to);
        let mut old = self.find_if_there(&old_path)?;
        let mut new = self.find_if_there(&new_path)?;
        if [&old, &new].iter().any(|found| matches!(found, Some(FoundNode::Folder(_)))) {
            let rules = self.options.rename_rules();
            self.requests.run(async {
                complete_renames(&self.requests, &self.options.root, rules).await;
                Ok(())
            })?;
            old = self.find_if_there(&old_path)?;
            new = self.find_if_there(&new_path)?;
        }
        match (&old, new) {
            (_, Some(FoundNode::Object(found))) if self.has_mark(&new_path, mark)? => {
                self.remove_source(&old_path, old, known)?;
                Ok(ChangeOutcome::Made(Some(self.attr_of(&new_path, &FoundNode::Object(found)))))
            }
            (None, Some(FoundNode::Folder(marker))) => {
                Ok(ChangeOutcome::Made(Some(self.attr_of(&new_path, &FoundNode::Folder(marker)))))
            }
            (None, _) => Ok(ChangeOutcome::Unclear("the old name leads to nothing, and the new one not to its copy")),
            (Some(_), _) => Ok(ChangeOutcome::NotMade),
        }
    }

    /// Removes the source of a copy, unless another writer has changed it.
    fn remove_source(&self, path: &[u8], found: Option<FoundNode>, known: Option<FileIdentity>) -> Result<()> {
        let Some(FoundNode::Object(found)) = found else { return Ok(()) };
        if known != Some(identity_of(path, &found.attr)) {
            return Ok(());
        }
        let key = key_of(&self.options.root, path)?;
        self.requests.run(self.requests.delete(&key, &self.version_condition(found.attr.etag)))
    }

    /// The object of a path; `None` without an object.
    fn find_if_there(&self, path: &[u8]) -> Result<Option<FoundNode>> {
        match self.find(path) {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the object at `path`, or with a trailing slash the marker of a folder, has the mark of a request.
    pub fn has_mark(&self, path: &[u8], mark: ChangeMark) -> Result<bool> {
        match self.requests.run(self.requests.head(&key_of(&self.options.root, path)?)) {
            Ok(found) => Ok(is_marked_as(&found.attributes, &mark_of(Some(mark)))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Publishes the open files below a folder.
    fn publish_below(&self, path: &[u8]) -> Result<()> {
        let open = self.open.lock().all();
        for object in open.iter().filter(|object| object.is_changed()) {
            if object.path().strip_prefix(path).is_some_and(|rest| rest.starts_with(b"/")) {
                object.publish_changes()?;
            }
        }
        Ok(())
    }
}

/// A copy, and the etag of its source.
pub(crate) struct CopiedObject {
    pub found: FoundObject,
    pub source_etag: Option<String>,
}

/// A copy to make.
pub(crate) struct CopyPlan<'a> {
    pub old_key: &'a str,
    pub new_key: &'a str,
    /// The version to copy, if it has to be a certain one.
    pub etag: Option<&'a str>,
    pub mark: &'a str,
    pub condition: &'a WriteCondition,
    /// The copy keeps the time of its source: the store takes the time of the copy for it.
    pub keeps_mtime: bool,
}

/// Copies an object with its attributes.
///
/// # Errors
/// `NotFound`; `Stale` when the source is of another version, or the condition does not hold; the store's.
pub(crate) async fn copy_object(requests: &BucketRequests, plan: &CopyPlan<'_>) -> Result<CopiedObject> {
    let source = requests.head(plan.old_key).await?;
    let source_etag = source.raw.etag.as_deref().map(bare_etag).map(str::to_owned);
    if plan.etag.is_some() && plan.etag != source_etag.as_deref() {
        return Err(Error::new(ErrorKind::Stale, format!("'{}' has been replaced", plan.old_key)));
    }
    let mut attributes = source.attributes;
    if plan.keeps_mtime {
        let mut attrs = FileAttrs::parse(&attributes);
        attrs.mtime.get_or_insert(file_time(source.raw.mtime));
        attrs.store(&mut attributes);
    }
    let attributes = marked_as(attributes, plan.mark);
    let object = NewObject { key: plan.new_key, attributes: &attributes, condition: plan.condition };
    let from = CopySource { key: plan.old_key, etag: source_etag.as_deref() };
    // Some stores copy no markers of folders.
    let new_etag = if plan.old_key.ends_with('/') && source.raw.size == 0 {
        requests.put(&object, Bytes::new()).await?
    } else {
        requests.copy(from, source.raw.size, &object).await?
    };
    let raw = RawObject { key: plan.new_key.to_owned(), etag: Some(new_etag), ..source.raw };
    Ok(CopiedObject { found: found_object(StoredObject { raw, attributes }), source_etag })
}
