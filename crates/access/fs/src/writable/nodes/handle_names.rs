//! Names of nodes that outlive the nodes, for file handles of an NFS server. In a source that makes another object of each change,
//! and of each object below a renamed directory, they decide which node an object has. It reads no source.

use super::{NodeTable, NodeTree};
use crate::name_records::NameRecords;
use spurline_volume::writes::{NodeAttr, S_IFDIR, S_IFMT};
use std::sync::Arc;

impl NodeTable {
    /// Keeps all names in the first `records` from now on, and stores the names of the present nodes there. With `names_decide`,
    /// numbers follow the names, whatever the identity of an object.
    pub fn keep_names(&self, records: Arc<dyn NameRecords>, names_decide: bool) {
        let mut tree = self.tree.write();
        tree.names_decide = names_decide;
        let records = Arc::clone(tree.records.get_or_insert(records));
        drop(tree);
        let mut names = Vec::new();
        for (ino, node) in &self.tree.read().nodes {
            names.extend(node.names.iter().map(|name| (*ino, name.parent, Arc::clone(&name.name))));
        }
        // Without the lock: the store may wait for its disk. A name that was removed meanwhile stays in the store. It leads
        // to nothing or to another object, which is found out when it is used.
        for (ino, parent, name) in names {
            records.record_name(ino, parent, &name);
            if names_decide {
                records.record_inode(parent, &name, ino);
            }
        }
    }

    /// Whether numbers follow the names.
    pub fn names_decide(&self) -> bool {
        self.tree.read().names_decide
    }

    /// Another reference to a node whose object the source shows so now; returns the number.
    pub fn see_again(&self, ino: u64, attr: &NodeAttr) -> u64 {
        let now = self.now_ms();
        let mut tree = self.tree.write();
        let keeps = tree.names_decide && tree.is_of_type(ino, attr);
        if !keeps {
            drop(tree);
            return self.intern(None, attr);
        }
        tree.set_identity(ino, attr.identity);
        if let Some(node) = tree.nodes.get_mut(&ino) {
            node.note_sent(attr, now);
        }
        tree.add_lookup(ino);
        ino
    }

    /// Where names are kept.
    pub fn name_records(&self) -> Option<Arc<dyn NameRecords>> {
        self.tree.read().records.clone()
    }

    /// The number that is stored for a name without a node, where names decide.
    pub(super) fn recorded_number(&self, parent: u64, name: &[u8]) -> Option<u64> {
        let tree = self.tree.read();
        let records = tree.records.clone().filter(|_| tree.names_decide && tree.child(parent, name).is_none())?;
        drop(tree);
        // Without the lock: the store may read its disk.
        records.find_inode(parent, name)
    }
}

impl NodeTree {
    /// Whether a node is a directory, or none, as the object with these attributes is.
    fn is_of_type(&self, ino: u64, attr: &NodeAttr) -> bool {
        self.nodes.get(&ino).is_some_and(|node| node.directory == (attr.mode & S_IFMT == S_IFDIR))
    }

    /// The node of a name whose object has these attributes now, where names decide.
    pub(super) fn number_by_name(
        &self,
        parent: u64,
        name: &[u8],
        recorded: Option<u64>,
        attr: &NodeAttr,
    ) -> Option<u64> {
        let known = self.child(parent, name).or(recorded).filter(|_| self.names_decide)?;
        self.is_of_type(known, attr).then_some(known)
    }

    /// Stores a name for file handles.
    pub(super) fn store_name(&self, ino: u64, parent: u64, name: &[u8]) {
        let Some(records) = &self.records else { return };
        records.record_name(ino, parent, name);
        if self.names_decide {
            records.record_inode(parent, name, ino);
        }
    }

    /// Removes a stored name.
    pub(super) fn forget_name(&self, ino: u64, parent: u64, name: &[u8]) {
        let Some(records) = &self.records else { return };
        records.remove_name(ino, parent, name);
        if self.names_decide {
            records.remove_inode(parent, name, ino);
        }
    }
}

/// The generation of a number that stays when the source makes another object of its object: of the number alone.
pub fn generation_of_number(ino: u64) -> u64 {
    xxhash_rust::xxh3::xxh3_64(&ino.to_le_bytes()) >> 32
}
