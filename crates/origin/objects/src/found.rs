//! What names of a bucket lead to. It makes no request.

use crate::file_attrs::FileAttrs;
use crate::object::OpenObject;
use spurline_object_store::{ObjectAttributes, StoredObject};
use spurline_origin::file_attr;
use spurline_types::{FileKind, ObjectAttr};
use std::sync::Arc;

/// An object without changes of this process, or the marker of a folder.
#[derive(Clone)]
pub(crate) struct FoundObject {
    pub attr: ObjectAttr,
    /// With `object_attrs` those of the object.
    pub attributes: Option<ObjectAttributes>,
}

impl FoundObject {
    /// Owner, mode, times and extended attributes.
    pub fn file_attrs(&self) -> FileAttrs {
        self.attributes.as_ref().map(FileAttrs::parse).unwrap_or_default()
    }
}

/// The file that is opened.
pub(crate) enum OpenedNode {
    Found(FoundObject),
    New {
        attrs: FileAttrs,
        /// Made with `O_EXCL`: an object of another writer is never this file.
        exclusive: bool,
    },
}

/// An object as its head describes it.
pub(crate) fn found_object(mut stored: StoredObject) -> FoundObject {
    // The note that the store does not have the object is no metadata of the file.
    stored.attributes.take_stage();
    let attr = file_attr(&stored.raw);
    let found = FoundObject { attr, attributes: Some(stored.attributes) };
    if found.file_attrs().is_link() {
        return FoundObject { attr: ObjectAttr { kind: FileKind::Symlink, ..found.attr }, ..found };
    }
    found
}

/// What a path leads to.
pub(crate) enum FoundNode {
    /// A folder; with `object_attrs` its marker, if it has one.
    Folder(Option<FoundObject>),
    /// An object without changes of this process.
    Object(FoundObject),
    /// A file with changes that are not published.
    Changed(Arc<OpenObject>),
}
