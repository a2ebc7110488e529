//! Extended attributes with an object's etag, version and URL. They are read-only.

use crate::errno::{FsError, FsResult};
use crate::fs::FileSystem;
use crate::inode::Inode;
use spurline_types::{FileKind, STAGED_XATTR, is_staged_etag, url};

const ETAG: &[u8] = b"user.spurline.etag";
const VERSION: &[u8] = b"user.spurline.version";
const SOURCE: &[u8] = b"user.spurline.source";

impl FileSystem {
    /// The attribute `name`: `user.spurline.etag` and `user.spurline.version` of files, `user.spurline.source` (the
    /// URL) of files and directories; `user.spurline.staged` of files that nodes keep and the store does not have, for which the nodes are
    /// asked.
    ///
    /// # Errors
    /// `NoData` for any other name; `NoNamespace` for `system.*` and `security.*`, after which programs stop
    /// querying; `Stale`; the volume's for `user.spurline.staged`.
    pub fn getxattr(&self, ino: u64, name: &[u8]) -> FsResult<Vec<u8>> {
        let inode = self.live_inode(ino)?;
        if name.starts_with(b"system.") || name.starts_with(b"security.") {
            return Err(FsError::NoNamespace);
        }
        let value = match name {
            ETAG => inode.current().etag().map(|etag| etag.as_bytes().to_vec()),
            STAGED_XATTR => self.is_unsaved(&inode)?.then(|| b"1".to_vec()),
            VERSION if inode.kind == FileKind::File => Some(inode.current().version.as_str().as_bytes().to_vec()),
            SOURCE if inode.kind != FileKind::Symlink => Some(self.inode_url(&inode)),
            _ => None,
        };
        value.ok_or(FsError::NoData)
    }

    /// The names of an inode's attributes: none. Tools that copy extended attributes (`cp -a`, `tar --xattrs`) would
    /// write the ones of [`FileSystem::getxattr`] to their copies, where they are wrong.
    ///
    /// # Errors
    /// `Stale`.
    pub fn listxattr(&self, ino: u64) -> FsResult<Vec<u8>> {
        self.live_inode(ino).map(|_| Vec::new())
    }

    /// Whether the store does not have the file. A version of nodes stays after the upload, so the nodes are asked.
    fn is_unsaved(&self, inode: &Inode) -> FsResult<bool> {
        if !inode.current().etag().is_some_and(is_staged_etag) {
            return Ok(false);
        }
        Ok(self.volume.object_headers(inode.path())?.take_staged())
    }

    fn inode_url(&self, inode: &Inode) -> Vec<u8> {
        url::join_url(self.volume.source(), inode.path())
    }
}
