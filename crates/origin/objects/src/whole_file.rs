//! New files that have a single writer each. Knows which object a publication may replace, and neither bytes nor requests.

use crate::found::OpenedNode;
use crate::names::check_new_name;
use crate::object::OpenObject;
use crate::volume::{BucketFiles, WritableBucket, exists};
use spurline_types::{ErrorKind, OBJECT_HEADERS_XATTR, ObjectAttr, ObjectHeaders, Result};
use spurline_volume::whole_files::{MayReplace, UnpublishedFile, WholeFiles};
use spurline_volume::writes::{Caller, S_IFREG};
use std::sync::Arc;

/// How often a publication looks for the object of the name, while other writers are faster.
const PUBLISH_ATTEMPTS: u32 = 8;

/// A file without a publication. No table of open files has the object.
struct ApartFile {
    files: Arc<BucketFiles>,
    object: Arc<OpenObject>,
    is_new: bool,
}

impl WholeFiles for WritableBucket {
    fn begin_file(&self, path: &[u8], mode: u32, caller: &Caller) -> Result<Box<dyn UnpublishedFile>> {
        let files = &self.files;
        let found = files.find_stored(path)?;
        let is_new = found.is_none();
        check_new_name(path)?;
        let node = match found {
            Some(found) => OpenedNode::Found(found),
            None => OpenedNode::New { attrs: files.new_attrs(S_IFREG, mode, caller), exclusive: false },
        };
        let object = OpenObject::new(Arc::clone(&files.context), path.to_vec(), node);
        if !is_new {
            object.begin_anew()?;
        }
        let object = Arc::new(object);
        object.add_writer();
        Ok(Box::new(ApartFile { files: Arc::clone(files), object, is_new }))
    }
}

impl UnpublishedFile for ApartFile {
    fn is_new(&self) -> bool {
        self.is_new
    }

    fn set_headers(&self, headers: &ObjectHeaders) -> Result<()> {
        self.object.change_attrs(&|attrs| attrs.set_xattr(OBJECT_HEADERS_XATTR, &headers.to_xattr(), 0))
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.object.write(Some(offset), data).map(drop)
    }

    fn publish(&self, may_replace: MayReplace<'_>) -> Result<()> {
        let path = self.object.path();
        let mut looks_again = matches!(may_replace, MayReplace::Nothing | MayReplace::Checked(_));
        let mut attempt = 1;
        loop {
            if looks_again {
                self.object.go_over(self.files.find_stored(&path)?);
            }
            check_replaced(may_replace, &path, self.object.replaced_object().as_ref())?;
            match self.object.publish_apart() {
                Err(error)
                    if error.kind() == ErrorKind::Stale
                        && !matches!(may_replace, MayReplace::Unchanged)
                        && attempt < PUBLISH_ATTEMPTS =>
                {
                    attempt += 1;
                    looks_again = true;
                }
                published => return published,
            }
        }
    }
}

/// # Errors
/// `EEXIST` where nothing may be replaced; that of the check.
fn check_replaced(may_replace: MayReplace<'_>, path: &[u8], found: Option<&ObjectAttr>) -> Result<()> {
    match may_replace {
        MayReplace::Nothing if found.is_some() => Err(exists(path)),
        MayReplace::Checked(check) => check(found),
        MayReplace::Nothing | MayReplace::Anything | MayReplace::Unchanged => Ok(()),
    }
}

impl Drop for ApartFile {
    fn drop(&mut self) {
        // An object without a publication ends unpublished.
        self.object.note_removed();
    }
}
