//! An open folder of a bucket: its names in a fixed order, with those of new files that are not published yet. It makes no
//! change.

use crate::file_attrs::FileAttrs;
use crate::names::{inode_of, node_attr};
use crate::path_attrs::ListedPath;
use crate::volume::BucketFiles;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, FileKind, Result};
use spurline_volume::writes::{
    AttrChange, Caller, ListedName, NodeAttr, OpenAttrCall, S_IFDIR, S_IFMT, S_IFREG, WritableDirectory, WritableObject,
};
use std::collections::HashSet;
use std::sync::Arc;

/// Names of one request.
const PAGE: usize = 1000;

/// Names that were listed; the position of a name is its index and one.
#[derive(Default)]
struct FolderListing {
    names: Vec<ListedName>,
    seen: HashSet<Vec<u8>>,
    cursor: Option<Vec<u8>>,
    /// All names are there.
    ended: bool,
}

/// An open folder.
pub(crate) struct BucketFolder {
    files: Arc<BucketFiles>,
    path: Vec<u8>,
    listing: Mutex<FolderListing>,
}

impl BucketFolder {
    pub fn new(files: Arc<BucketFiles>, path: Vec<u8>) -> BucketFolder {
        BucketFolder { files, path, listing: Mutex::default() }
    }

    /// Adds a name with its attributes, or those of a listing without them.
    fn add_name(&self, listing: &mut FolderListing, name: Vec<u8>, file_type: u32, attr: Option<NodeAttr>) {
        if listing.seen.insert(name.clone()) {
            let next = listing.names.len() as u64 + 1;
            let inode = inode_of(&self.files.join(&self.path, &name));
            listing.names.push(ListedName { name, file_type, inode, next, attr });
        }
    }

    fn begin(&self, listing: &mut FolderListing) {
        *listing = FolderListing::default();
        for name in [b".".as_slice(), b".."] {
            let next = listing.names.len() as u64 + 1;
            listing.names.push(ListedName {
                name: name.to_vec(),
                file_type: S_IFDIR,
                inode: inode_of(&self.path),
                next,
                attr: None,
            });
        }
        for (name, attr) in self.files.unpublished_in(&self.path) {
            self.add_name(listing, name, attr.mode & S_IFMT, Some(attr));
        }
    }

    fn add_page(&self, listing: &mut FolderListing) -> Result<()> {
        let first = listing.cursor.is_none();
        let page = match self.files.list_known(&self.path, listing.cursor.as_deref(), PAGE) {
            // A folder that has vanished with its last file is empty.
            Err(error) if error.kind() == ErrorKind::NotFound && first => {
                listing.ended = true;
                return Ok(());
            }
            page => page?,
        };
        for entry in page.entries {
            if self.files.options.object_attrs {
                // Whether an object is a symbolic link is in its metadata, which no listing has.
                let file_type = if entry.attr.kind == FileKind::Directory { S_IFDIR } else { 0 };
                self.add_name(listing, entry.name, file_type, None);
                continue;
            }
            // The lookup of a name that a program wants to know more of has the version.
            if self.files.origin.has_own_versions(&entry.attr) {
                self.add_name(listing, entry.name, S_IFREG, None);
                continue;
            }
            let path = self.files.join(&self.path, &entry.name);
            let attr = match self.files.changed_at(&path) {
                Some(object) => self.files.open_attr(&object),
                None => {
                    let attr = self.files.shown_attr(&path, entry.attr);
                    node_attr(&self.files.options, &path, &attr, &FileAttrs::default())
                }
            };
            self.add_name(listing, entry.name, attr.mode & S_IFMT, Some(attr));
        }
        listing.ended = page.next.is_none();
        listing.cursor = page.next;
        Ok(())
    }

    /// Adds the attributes that no listing has to names of one; a name that has vanished keeps none.
    fn add_attrs(&self, names: &mut [ListedName]) -> Result<()> {
        let paths: Vec<ListedPath> = names
            .iter_mut()
            .filter(|listed| lacks_attr(listed))
            .map(|listed| ListedPath {
                path: self.files.join(&self.path, &listed.name),
                is_folder: listed.file_type == S_IFDIR,
            })
            .collect();
        let found = self.files.attrs_of_listed(&paths)?;
        for (listed, attr) in names.iter_mut().filter(|listed| lacks_attr(listed)).zip(found) {
            listed.file_type = attr.map_or(listed.file_type, |attr| attr.mode & S_IFMT);
            listed.attr = attr;
        }
        Ok(())
    }
}

impl WritableObject for BucketFolder {
    fn stat(&self) -> Result<NodeAttr> {
        if self.files.options.object_attrs {
            return self.files.known_attr_at(&self.path);
        }
        Ok(self.files.folder_attr(&self.path, None))
    }

    fn set_attr(&self, set: &AttrChange, _caller: &Caller) -> Result<NodeAttr> {
        self.files.set_attr(&self.path, set)
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        match call {
            // Every caller has all rights that the mode shows.
            OpenAttrCall::Access(_) => Ok(Vec::new()),
            OpenAttrCall::List => Ok(self.files.file_attrs_at(&self.path)?.xattr_names()),
            OpenAttrCall::Get(name) => self.files.file_attrs_at(&self.path)?.xattr(name),
            // Those of a folder that has a name are changed by its path.
            OpenAttrCall::Set { .. } | OpenAttrCall::Remove(_) => {
                Err(Error::new(ErrorKind::Unsupported, "the folder has no name any more"))
            }
        }
    }

    fn sync(&self, _data_only: bool) -> Result<()> {
        // A name is in the bucket when its call has returned.
        Ok(())
    }
}

impl WritableDirectory for BucketFolder {
    fn read(&self, from: u64, max: usize, attrs: bool, _caller: &Caller) -> Result<Vec<ListedName>> {
        let mut listing = self.listing.lock();
        if from == 0 {
            self.begin(&mut listing);
        }
        let from = usize::try_from(from).unwrap_or(usize::MAX);
        while listing.names.len() <= from && !listing.ended {
            self.add_page(&mut listing)?;
        }
        let mut names: Vec<ListedName> = listing.names.iter().skip(from).take(max.max(1)).cloned().collect();
        drop(listing);
        if attrs && self.files.options.object_attrs {
            self.add_attrs(&mut names)?;
        }
        Ok(names.into_iter().map(|listed| ListedName { attr: listed.attr.filter(|_| attrs), ..listed }).collect())
    }
}

fn lacks_attr(listed: &ListedName) -> bool {
    listed.attr.is_none() && !matches!(&listed.name[..], b"." | b"..")
}
