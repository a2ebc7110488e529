//! Names of inodes that outlive the kernel's references and the mount: an NFS server resolves its clients' file handles
//! by them. Where they are stored is the business of who implements the trait.

use crate::inode::ROOT;

/// Directories between a record and the root; more are a loop.
pub(crate) const DEPTH_MAX: usize = 4096;

/// A store of inode names. An inode has several after hard links were made.
pub trait NameRecords: Send + Sync {
    /// Stores a name of an inode: its directory's number, and the name or path below that.
    fn record_name(&self, ino: u64, parent: u64, name: &[u8]);

    /// Removes a name that no longer leads to the inode.
    fn remove_name(&self, ino: u64, parent: u64, name: &[u8]);

    /// The stored names of an inode.
    fn find_names(&self, ino: u64) -> Vec<(u64, Vec<u8>)>;

    /// Stores the number of the inode that a name leads to, for sources whose names decide which file a handle is of.
    fn record_inode(&self, parent: u64, name: &[u8], ino: u64);

    /// Removes this number of a name.
    fn remove_inode(&self, parent: u64, name: &[u8], ino: u64);

    /// The stored number of the inode that a name leads to.
    fn find_inode(&self, parent: u64, name: &[u8]) -> Option<u64>;

    /// The path of an inode below the root, by the first names of it and of its directories.
    fn find_path(&self, ino: u64) -> Option<Vec<u8>> {
        let mut parts = Vec::new();
        let mut at = ino;
        while at != ROOT {
            if parts.len() == DEPTH_MAX {
                return None;
            }
            let (parent, name) = self.find_names(at).into_iter().next()?;
            parts.push(name);
            at = parent;
        }
        parts.reverse();
        Some(parts.join(&b'/'))
    }
}
