//! An open folder of a bucket: its names in a fixed order, with those of new files that are not published yet. It makes no
//! change.

use super::names::node_attr;
use super::volume::BucketFiles;
use crate::object_origin::folder_attr;
use parking_lot::Mutex;
use spurline_types::{Error, ErrorKind, FileKind, Result};
use spurline_volume::writes::{
    AttrChange, Caller, ListedName, NodeAttr, OpenAttrCall, S_IFDIR, S_IFMT, WritableDirectory, WritableObject,
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
pub(super) struct BucketFolder {
    files: Arc<BucketFiles>,
    path: Vec<u8>,
    listing: Mutex<FolderListing>,
}

impl BucketFolder {
    pub fn new(files: Arc<BucketFiles>, path: Vec<u8>) -> BucketFolder {
        BucketFolder { files, path, listing: Mutex::default() }
    }

    fn attr(&self) -> NodeAttr {
        node_attr(&self.files.options, &self.path, &folder_attr())
    }

    fn add_name(&self, listing: &mut FolderListing, name: Vec<u8>, attr: NodeAttr) {
        if listing.seen.insert(name.clone()) {
            let next = listing.names.len() as u64 + 1;
            let listed = ListedName { name, file_type: attr.mode & S_IFMT, inode: attr.inode, next, attr: Some(attr) };
            listing.names.push(listed);
        }
    }

    fn begin(&self, listing: &mut FolderListing) {
        *listing = FolderListing::default();
        for name in [b".".as_slice(), b".."] {
            let next = listing.names.len() as u64 + 1;
            listing.names.push(ListedName {
                name: name.to_vec(),
                file_type: S_IFDIR,
                inode: self.attr().inode,
                next,
                attr: None,
            });
        }
        for (name, attr) in self.files.unpublished_in(&self.path) {
            self.add_name(listing, name, attr);
        }
    }

    fn add_page(&self, listing: &mut FolderListing) -> Result<()> {
        let first = listing.cursor.is_none();
        let page = match self.files.list(&self.path, listing.cursor.as_deref(), PAGE) {
            // A folder that has vanished with its last file is empty.
            Err(error) if error.kind() == ErrorKind::NotFound && first => {
                listing.ended = true;
                return Ok(());
            }
            page => page?,
        };
        for entry in page.entries {
            let path = self.files.join(&self.path, &entry.name);
            let attr = match entry.attr.kind {
                FileKind::File => self.files.file_attr(&path, &entry.attr),
                _ => node_attr(&self.files.options, &path, &entry.attr),
            };
            self.add_name(listing, entry.name, attr);
        }
        listing.ended = page.next.is_none();
        listing.cursor = page.next;
        Ok(())
    }
}

impl WritableObject for BucketFolder {
    fn stat(&self) -> Result<NodeAttr> {
        Ok(self.attr())
    }

    fn set_attr(&self, set: &AttrChange, _caller: &Caller) -> Result<NodeAttr> {
        match set.size {
            Some(_) => Err(Error::new(ErrorKind::IsADirectory, "a folder has no length")),
            None => Ok(self.attr()),
        }
    }

    fn call_attr(&self, call: &OpenAttrCall<'_>, _caller: &Caller) -> Result<Vec<u8>> {
        super::file::answer_attr_call(call)
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
        let names = listing.names.iter().skip(from).take(max.max(1)).cloned();
        Ok(names.map(|listed| ListedName { attr: listed.attr.filter(|_| attrs), ..listed }).collect())
    }
}
