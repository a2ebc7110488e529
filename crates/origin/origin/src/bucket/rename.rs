//! Renames in a bucket: copies within the store, then removals. An object is removed only after its copy is there, so a
//! rename that is aborted leaves some names twice and loses none.

use super::file_attrs::{FileAttrs, file_time};
use super::names::{key_of, node_attr, path_of};
use super::object::FoundObject;
use super::requests::{BucketRequests, NewObject, marked};
use super::volume::{BucketFiles, FoundNode, exists, found_object};
use crate::backend::RawObject;
use crate::s3_wire::bare_etag;
use crate::write_backend::{CopySource, ObjectAttributes, StoredObject, WriteCondition};
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use spurline_types::{Error, ErrorKind, FileKind, Result};
use spurline_volume::writes::{NamePath, NodeAttr};
use std::sync::{Arc, Weak};

/// From `linux/fs.h`.
const RENAME_NOREPLACE: u32 = 1;
/// Objects that are copied or removed at the same time.
const REQUESTS_AT_ONCE: usize = 16;
/// Names of one request.
const PAGE: usize = 1000;

/// The names below a folder, relative to it.
#[derive(Default)]
struct FolderTree {
    files: Vec<Vec<u8>>,
    /// The folder itself, as an empty name, and those below it.
    folders: Vec<Vec<u8>>,
}

impl BucketFiles {
    /// Renames a file or a folder; `flags` as for `renameat2(2)`. The attributes are those under the new name.
    ///
    /// # Errors
    /// `EXDEV` for a folder of too many objects; `EEXIST`, `ENOTEMPTY`, `EISDIR`, `ENOTDIR` for what has the new name; the store's.
    pub fn rename(&self, from: &NamePath<'_>, to: &NamePath<'_>, flags: u32) -> Result<NodeAttr> {
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
            return self.rename_folder(&old_path, &new_path);
        }
        let condition = match new {
            None => WriteCondition::Absent,
            Some(FoundNode::Folder(_)) => return Err(Error::new(ErrorKind::IsADirectory, "the new name is a folder")),
            Some(FoundNode::Changed(object)) => self.version_condition(object.published_etag()),
            Some(FoundNode::Object(found)) => self.version_condition(found.attr.etag),
        };
        if let FoundNode::Changed(object) = old {
            object.publish()?;
        }
        self.rename_file(&old_path, &new_path, &condition)
    }

    fn rename_file(&self, old_path: &[u8], new_path: &[u8], condition: &WriteCondition) -> Result<NodeAttr> {
        let old_key = key_of(&self.options.root, old_path)?;
        let new_key = key_of(&self.options.root, new_path)?;
        let keeps_mtime = self.options.object_attrs;
        let copy = copy_object(&self.requests, &old_key, &new_key, condition, keeps_mtime);
        let CopiedObject { found, source_etag } = self.requests.run(copy)?;
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
    fn move_open(&self, old_path: &[u8], new_path: &[u8], found: FoundObject) {
        let mut open = self.open.lock();
        let moved = open.files.remove(old_path).and_then(|open| open.upgrade());
        if let Some(object) = moved {
            open.insert(new_path.to_vec(), &object);
            drop(open);
            let attributes = found.attributes.filter(|_| self.options.object_attrs);
            object.note_renamed(new_path.to_vec(), FoundObject { attributes, ..found });
        }
    }

    fn rename_folder(&self, old_path: &[u8], new_path: &[u8]) -> Result<NodeAttr> {
        if new_path.strip_prefix(old_path).is_some_and(|rest| rest.starts_with(b"/")) {
            return Err(Error::new(ErrorKind::Invalid, "a folder can't be moved into itself"));
        }
        self.publish_below(old_path)?;
        let tree = self.tree_below(old_path)?;
        let count = (tree.files.len() + tree.folders.len()) as u64;
        if count > self.options.rename_limit {
            let why = format!(
                "the folder has {count} files and folders, and a rename copies each of them; --rename-limit is {}",
                self.options.rename_limit
            );
            return Err(Error::new(ErrorKind::Io(libc::EXDEV), why));
        }
        let copied = self.requests.run(async {
            let copies = tree.files.iter().map(|name| self.copy_below(old_path, new_path, name));
            futures::stream::iter(copies).buffered(REQUESTS_AT_ONCE).try_collect::<Vec<_>>().await
        })?;
        self.requests.run(async {
            let copies = tree.folders.iter().map(|folder| self.copy_marker(old_path, new_path, folder));
            futures::stream::iter(copies).buffered(REQUESTS_AT_ONCE).try_collect::<Vec<()>>().await
        })?;
        self.requests.run(async {
            let removals = tree.files.iter().zip(&copied).map(|(name, copy)| async move {
                let key = key_of(&self.options.root, &self.join(old_path, name))?;
                self.requests.delete(&key, &self.version_condition(copy.source_etag.clone())).await
            });
            futures::stream::iter(removals).buffered(REQUESTS_AT_ONCE).try_collect::<Vec<()>>().await
        })?;
        // The deepest first.
        for folder in tree.folders.iter().rev() {
            let key = format!("{}/", key_of(&self.options.root, &self.join(old_path, folder))?);
            self.requests.run(self.requests.delete(&key, &WriteCondition::None))?;
        }
        for (name, copy) in tree.files.iter().zip(copied) {
            self.move_open(&self.join(old_path, name), &self.join(new_path, name), copy.found);
        }
        self.attr_at(new_path)
    }

    /// Copies a file below a folder to the same name below another one.
    async fn copy_below(&self, old: &[u8], new: &[u8], name: &[u8]) -> Result<CopiedObject> {
        let old_key = key_of(&self.options.root, &self.join(old, name))?;
        let new_key = key_of(&self.options.root, &self.join(new, name))?;
        copy_object(&self.requests, &old_key, &new_key, &WriteCondition::None, self.options.object_attrs).await
    }

    /// Makes the marker of a folder below another one, with the attributes of the old one if there is one.
    async fn copy_marker(&self, old: &[u8], new: &[u8], name: &[u8]) -> Result<()> {
        let new_path = self.join(new, name);
        let old_key = format!("{}/", key_of(&self.options.root, &self.join(old, name))?);
        let new_key = format!("{}/", key_of(&self.options.root, &new_path)?);
        let keeps_mtime = self.options.object_attrs;
        match copy_object(&self.requests, &old_key, &new_key, &WriteCondition::None, keeps_mtime).await {
            Err(error) if error.kind() == ErrorKind::NotFound => self.make_marker(&new_path).await,
            copied => copied.map(drop),
        }
    }

    /// Makes the marker of a folder.
    async fn make_marker(&self, path: &[u8]) -> Result<()> {
        let key = format!("{}/", key_of(&self.options.root, path)?);
        let attributes = marked(ObjectAttributes::with_content_type("application/x-directory"));
        let marker = NewObject { key: &key, attributes: &attributes, condition: &WriteCondition::None };
        self.requests.put(&marker, Bytes::new()).await.map(drop)
    }

    /// Publishes the open files below a folder.
    fn publish_below(&self, path: &[u8]) -> Result<()> {
        let open: Vec<_> = self.open.lock().files.values().filter_map(Weak::upgrade).collect();
        let is_below = |path_of_file: &[u8]| path_of_file.strip_prefix(path).is_some_and(|rest| rest.starts_with(b"/"));
        for object in open.iter().filter(|object: &&Arc<_>| object.is_changed() && is_below(&object.path())) {
            object.publish()?;
        }
        Ok(())
    }

    /// All names below a folder, up to a little more than a rename may have.
    fn tree_below(&self, path: &[u8]) -> Result<FolderTree> {
        let mut tree = FolderTree { files: Vec::new(), folders: vec![Vec::new()] };
        let mut next_folder = 0;
        while let Some(folder) = tree.folders.get(next_folder).cloned() {
            next_folder += 1;
            let mut cursor = None;
            loop {
                let page = self.list(&self.join(path, &folder), cursor.as_deref(), PAGE)?;
                for entry in page.entries {
                    let name = self.join(&folder, &entry.name);
                    if entry.attr.kind == FileKind::Directory { tree.folders.push(name) } else { tree.files.push(name) }
                }
                if (tree.files.len() + tree.folders.len()) as u64 > self.options.rename_limit {
                    return Ok(tree);
                }
                cursor = page.next;
                if cursor.is_none() {
                    break;
                }
            }
        }
        Ok(tree)
    }
}

/// A copy, and the etag of its source.
struct CopiedObject {
    found: FoundObject,
    source_etag: Option<String>,
}

/// Copies an object with its attributes; with `keeps_mtime` also its time, as the store takes the time of the copy for it.
async fn copy_object(
    requests: &BucketRequests,
    old_key: &str,
    new_key: &str,
    condition: &WriteCondition,
    keeps_mtime: bool,
) -> Result<CopiedObject> {
    let source = requests.head(old_key).await?;
    let source_etag = source.raw.etag.as_deref().map(bare_etag).map(str::to_owned);
    let mut attributes = source.attributes.clone();
    if keeps_mtime {
        let mut attrs = FileAttrs::parse(&attributes);
        attrs.mtime.get_or_insert(file_time(source.raw.mtime));
        attrs.store(&mut attributes);
    }
    let attributes = marked(attributes);
    let object = NewObject { key: new_key, attributes: &attributes, condition };
    let from = CopySource { key: old_key, etag: source_etag.as_deref() };
    let new_etag = requests.copy(from, source.raw.size, &object).await?;
    let raw = RawObject { key: new_key.to_owned(), etag: Some(new_etag), ..source.raw };
    Ok(CopiedObject { found: found_object(StoredObject { raw, attributes }), source_etag })
}
