//! File handles of an NFS server: a handle is an inode's number and generation. The kernel requests `.` or `..` of a number
//! that it may have forgotten, and that this mount may never have given out. A number leads to its object by the names
//! that were kept, each compared with the object it leads to.

use super::names::{MountNames, NodeEntry};
use super::nodes::number_of;
use crate::errno::{FsError, FsResult};
use crate::name_records::DEPTH_MAX;
use crate::service::FsCaller;
use spurline_volume::writes::NodeAttr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl MountNames {
    /// Keeps the names of all inodes in the first `records` from now on, and stores the names of the present inodes there: file
    /// handles of an NFS server are resolved by them.
    pub fn keep_names(&self, records: Arc<dyn crate::NameRecords>) {
        self.exported.store(true, Ordering::Relaxed);
        self.nodes.keep_names(records, self.can.publishes);
    }

    /// The inode number that programs see. Where a rename makes another object of a file, so that the source's number changes, clients
    /// of an NFS server see that of the file handle: for them, a handle with another number is another file.
    pub fn shown_number(&self, ino: u64, attr: &NodeAttr) -> u64 {
        if self.can.publishes && self.exported.load(Ordering::Relaxed) { ino } else { attr.inode }
    }

    /// The object of a file handle, or its directory. No caller may be refused: the kernel has checked the right to use
    /// handles, and the server checks its clients' rights afterwards.
    pub fn lookup_handle(&self, ino: u64, of_parent: bool) -> FsResult<NodeEntry> {
        if !self.nodes.hold(ino) {
            self.while_moving(0, || self.recall(ino, 0))?;
        }
        let at = if of_parent { self.nodes.parent_of(ino) } else { ino };
        let answer = self.on_node(at, &self.own_caller(), false, |at, caller| self.source.stat(at, caller));
        let entry = self.or_open_object(at, answer, |open| open.stat()).map(|attr| {
            let number = self.nodes.see_again(at, &attr);
            self.node_entry(number, attr)
        });
        self.nodes.forget(ino, 1);
        entry
    }

    /// This process, for requests of the kernel that belong to no caller.
    fn own_caller(&self) -> FsCaller<'static> {
        let (uid, gid) = self.config.owner;
        FsCaller { uid, gid, ..FsCaller::default() }
    }

    /// Takes a forgotten object into the table again, with one reference.
    fn recall(&self, ino: u64, depth: usize) -> FsResult<()> {
        let records = self.nodes.name_records().filter(|_| depth < DEPTH_MAX).ok_or(FsError::Stale(ino))?;
        let own = self.own_caller();
        for (parent, name) in records.find_names(ino) {
            if !self.nodes.hold(parent) {
                match self.recall(parent, depth + 1) {
                    Err(FsError::Stale(_)) => continue,
                    answer => answer?,
                }
            }
            let found = self.on_name(parent, &name, &own, false, |at, caller| self.source.lookup(at, caller));
            let here = found.map(|attr| {
                // Each change of a bucket's file makes another object, and so does the rename of a folder above it.
                let same = self.nodes.names_decide() || number_of(&attr.identity) == ino;
                // The number is taken if another object has the same hash.
                same.then(|| self.intern(parent, &name, attr).ino).is_some_and(|number| {
                    if number != ino {
                        self.nodes.forget(number, 1);
                    }
                    number == ino
                })
            });
            // The name holds its directory now.
            self.nodes.forget(parent, 1);
            match here {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) if matches!(error.errno(), libc::ENOENT | libc::ENOTDIR | libc::ESTALE) => {}
                Err(error) => return Err(error),
            }
        }
        Err(FsError::Stale(ino))
    }
}
