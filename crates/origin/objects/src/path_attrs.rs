//! Attributes of what paths of a bucket lead to. Those of a file that is open are changed by [`OpenObject`].

use crate::file_attrs::{FileAttrs, check_space, no_xattr};
use crate::found::{FoundNode, FoundObject, found_object};
use crate::last_known::StoredName;
use crate::names::{default_mode, key_of};
use crate::object::OpenObject;
use crate::requests::{NewObject, marked};
use crate::volume::BucketFiles;
use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _};
use spurline_object_store::{CopySource, ObjectAttributes, WriteCondition, bare_etag, is_staged_etag, without_mark};
use spurline_origin::folder_attr;
use spurline_types::{
    Error, ErrorKind, FileKind, OBJECT_HEADERS_XATTR, ObjectAttr, ObjectHeaders, Result, STAGED_XATTR,
};
use spurline_volume::writes::{AttrChange, NodeAttr, S_IFDIR, S_IFMT};
use std::time::SystemTime;

/// Objects whose metadata are read at once for a listing.
const HEADS_AT_ONCE: usize = 16;

impl BucketFiles {
    /// Changes the attributes of what a path leads to, and the length of a file.
    pub fn set_attr(&self, path: &[u8], set: &AttrChange) -> Result<NodeAttr> {
        let step = self.context.next_step();
        let found = self.find(path)?;
        if let FoundNode::Folder(marker) = found {
            if set.size.is_some() {
                return Err(Error::new(ErrorKind::IsADirectory, "a folder has no length"));
            }
            if !self.options.object_attrs {
                return Ok(self.folder_attr(path, marker.as_ref()));
            }
            return self.change_folder_attrs(path, marker, &|attrs| {
                let mode = default_mode(&self.options, FileKind::Directory);
                attrs.apply(set, S_IFDIR, mode);
                Ok(())
            });
        }
        if set.size.is_none() && !self.options.object_attrs {
            return Ok(self.attr_of(path, &found));
        }
        let object = self.open_found(path, found, step)?;
        if let Some(len) = set.size {
            object.set_len(len)?;
        }
        self.change_file_attrs(&object, set)?;
        // The kernel cuts a file that is opened with O_TRUNC in a call of its own: its close publishes then.
        if set.size.is_some() && !object.has_writers() {
            object.publish()?;
        }
        Ok(self.open_attr(&object))
    }

    /// Changes owner, mode and times of a file.
    pub fn change_file_attrs(&self, object: &OpenObject, set: &AttrChange) -> Result<()> {
        if !self.options.object_attrs {
            return Ok(());
        }
        let default_mode = default_mode(&self.options, object.attr().kind);
        object.change_attrs(&|attrs| {
            attrs.apply(set, default_mode & S_IFMT, default_mode);
            Ok(())
        })
    }

    /// Changes extended attributes of what a path leads to.
    pub fn change_xattrs(&self, path: &[u8], name: &[u8], change: &ChangeAttrs<'_>) -> Result<NodeAttr> {
        self.check_xattr(name)?;
        let step = self.context.next_step();
        match self.find(path)? {
            FoundNode::Folder(marker) => self.change_folder_attrs(path, marker, change),
            found => {
                let object = self.open_found(path, found, step)?;
                object.change_attrs(change)?;
                Ok(self.open_attr(&object))
            }
        }
    }

    /// Whether a bucket keeps an extended attribute with this name.
    ///
    /// # Errors
    /// `EOPNOTSUPP` if not.
    pub fn check_xattr(&self, name: &[u8]) -> Result<()> {
        let is_kept = self.options.object_attrs && name.starts_with(b"user.") && name != STAGED_XATTR;
        if name == OBJECT_HEADERS_XATTR || is_kept {
            return Ok(());
        }
        Err(Error::new(ErrorKind::Unsupported, "a bucket keeps no extended attributes of this kind"))
    }

    /// Owner, mode, times and extended attributes of what a path leads to.
    pub fn file_attrs_at(&self, path: &[u8]) -> Result<FileAttrs> {
        if !self.options.object_attrs {
            return Ok(FileAttrs::default());
        }
        Ok(match self.find_known(path)? {
            FoundNode::Folder(marker) => marker.as_ref().map(FoundObject::file_attrs).unwrap_or_default(),
            FoundNode::Object(found) => found.file_attrs(),
            FoundNode::Changed(object) => object.file_attrs(),
        })
    }

    /// The headers of the object at a path, or of the marker of a folder, as stored.
    pub fn object_headers(&self, path: &[u8]) -> Result<ObjectHeaders> {
        let key = key_of(&self.options.root, path)?;
        let stored = match self.requests.run(self.requests.head(&key)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.requests.run(self.requests.head(&format!("{key}/")))?
            }
            stored => stored?,
        };
        Ok(without_mark(stored.attributes).headers())
    }

    /// The value of [`STAGED_XATTR`] of what a path leads to. A file with changes that are not published is not staged.
    ///
    /// # Errors
    /// `ENODATA` where the store has the file; the nodes'.
    pub fn staged_mark(&self, path: &[u8]) -> Result<Vec<u8>> {
        match self.find_known(path)? {
            FoundNode::Object(found) if found.attr.etag.as_deref().is_some_and(is_staged_etag) => {
                // The version stays after the upload.
                let key = key_of(&self.options.root, path)?;
                let is_unsaved = self.requests.run(self.requests.is_unsaved(&key))?;
                if is_unsaved { Ok(b"1".to_vec()) } else { Err(no_xattr()) }
            }
            _ => Err(no_xattr()),
        }
    }

    /// Changes the attributes of a folder, which are those of its marker: a folder without a marker gets one. The root of a
    /// bucket can have none, and keeps its attributes.
    fn change_folder_attrs(
        &self,
        path: &[u8],
        marker: Option<FoundObject>,
        change: &ChangeAttrs<'_>,
    ) -> Result<NodeAttr> {
        let key = key_of(&self.options.root, path)?;
        let key = if path.is_empty() { key } else { format!("{key}/") };
        let mut attrs = marker.as_ref().map(FoundObject::file_attrs).unwrap_or_default();
        let before = attrs.clone();
        change(&mut attrs)?;
        if key.is_empty() || attrs == before {
            return Ok(self.folder_attr(path, marker.as_ref()));
        }
        let mut attributes = marker
            .as_ref()
            .and_then(|marker| marker.attributes.clone())
            .unwrap_or_else(|| ObjectAttributes::with_content_type("application/x-directory"));
        attrs.store(&mut attributes);
        let attributes = marked(attributes);
        check_space(&attributes)?;
        self.requests.run(async {
            let object = NewObject { key: &key, attributes: &attributes, condition: &WriteCondition::None };
            match &marker {
                // Some stores copy no markers of folders.
                Some(marker) if marker.attr.size > 0 => {
                    let etag = marker.attr.etag.as_deref().map(bare_etag);
                    self.requests.copy(CopySource { key: &key, etag }, marker.attr.size, &object).await
                }
                _ => self.requests.put(&object, Bytes::new()).await,
            }
        })?;
        let attr = ObjectAttr { mtime: SystemTime::now(), ..folder_attr() };
        Ok(self.folder_attr(path, Some(&FoundObject { attr, attributes: Some(attributes) })))
    }

    /// The attributes of names that a listing has found, for those that still exist: those in the metadata of the objects cost
    /// a request each.
    pub fn attrs_of_listed(&self, names: &[ListedPath]) -> Result<Vec<Option<NodeAttr>>> {
        if self.is_silent() {
            return Ok(names.iter().map(|listed| self.known_attr_at(&listed.path).ok()).collect());
        }
        self.requests.run(async {
            let heads = names.iter().map(|listed| self.attr_of_listed(listed));
            futures::stream::iter(heads).buffered(HEADS_AT_ONCE).try_collect().await
        })
    }

    async fn attr_of_listed(&self, listed: &ListedPath) -> Result<Option<NodeAttr>> {
        if let Some(object) = self.changed_at(&listed.path) {
            return Ok(Some(self.open_attr(&object)));
        }
        let Ok(key) = key_of(&self.options.root, &listed.path) else { return Ok(None) };
        let key = if listed.is_folder { format!("{key}/") } else { key };
        let start = self.context.known.begin(&listed.path);
        let found = match self.requests.head(&key).await {
            Ok(object) => Some(found_object(object)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let known = match &found {
            marker if listed.is_folder => Some(StoredName::Folder(marker.clone())),
            object => object.clone().map(StoredName::Object),
        };
        if let Some(known) = known {
            self.context.known.note_name(&listed.path, start, &Ok(known));
        }
        if listed.is_folder {
            return Ok(Some(self.folder_attr(&listed.path, found.as_ref())));
        }
        let found = found.map(|found| FoundNode::Object(self.shown_object(&listed.path, found)));
        Ok(found.map(|found| self.attr_of(&listed.path, &found)))
    }
}

/// A name that a listing has found.
pub(crate) struct ListedPath {
    pub path: Vec<u8>,
    pub is_folder: bool,
}

/// A change of the attributes in an object's metadata.
type ChangeAttrs<'a> = dyn Fn(&mut FileAttrs) -> Result<()> + 'a;
