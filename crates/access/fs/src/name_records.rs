//! Names of inodes that outlive the kernel's references and the mount: an NFS server resolves its clients' file handles
//! by them. Where they are stored is the business of who implements the trait.

use crate::inode::ROOT;

/// Directories between a record and the root; more are a loop.
const DEPTH_MAX: usize = 4096;

/// A store of inode names.
pub trait NameRecords: Send + Sync {
    /// Stores the name of an inode: its directory's number, and the name or path below that. Replaces an older name.
    fn record_name(&self, ino: u64, parent: u64, name: &[u8]);

    /// The stored name of an inode.
    fn find_name(&self, ino: u64) -> Option<(u64, Vec<u8>)>;

    /// The path of an inode below the root, by the names of its directories.
    fn find_path(&self, ino: u64) -> Option<Vec<u8>> {
        let mut parts = Vec::new();
        let mut at = ino;
        while at != ROOT {
            if parts.len() == DEPTH_MAX {
                return None;
            }
            let (parent, name) = self.find_name(at)?;
            parts.push(name);
            at = parent;
        }
        parts.reverse();
        Some(parts.join(&b'/'))
    }
}
