//! The inode table of a writable mount: which number belongs to which object of the source, under which names. A
//! rename moves a whole tree by changing one name. It calls no volume and knows no handles.

mod handle_names;

pub(super) use handle_names::generation_of_number;

use super::kernel_inode::KernelInode;
use crate::inode::{ROOT, usable_number};
use crate::kept_records::{KeptName, KeptNode, KeptRecord, KeptRecords, RecordSlot};
use crate::name_records::NameRecords;
use crate::service::DirName;
use parking_lot::RwLock;
use spurline_types::Stats;
use spurline_volume::writes::{FileIdentity, FileTime, KnownNames, NodeAttr, S_IFDIR, S_IFMT};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Memory of a node: itself, and its places in two hash tables that are on average two thirds full.
const NODE_BYTES: u64 = 480;
/// Memory of the attributes that a directory keeps beside that.
const DIRECTORY_ATTR_BYTES: u64 = 160;
/// Memory of the records of a node and its name, in a mount that outlives its process.
const RECORD_BYTES: u64 = 192;
/// Memory of a name beside its bytes: in the node, in its directory, and as an allocation of its own.
const NAME_BYTES: u64 = 150;

/// The bytes of a file as they were seen once.
#[derive(Clone, Copy, PartialEq, Eq)]
struct SeenBytes {
    size: u64,
    mtime: FileTime,
    ctime: FileTime,
}

impl SeenBytes {
    fn of(attr: &NodeAttr) -> Option<SeenBytes> {
        Some(SeenBytes { size: attr.size, mtime: attr.mtime, ctime: attr.ctime })
    }
}

pub(super) struct NodeName {
    /// The directory's number.
    pub parent: u64,
    pub name: Arc<[u8]>,
    /// The record that outlives this process; 0 for none.
    record: RecordSlot,
}

/// An object the kernel knows.
struct TreeNode {
    identity: FileIdentity,
    /// Since the table was made, in milliseconds.
    used_ms: u64,
    directory: bool,
    /// The generation that the kernel knows, where the identity has changed since.
    known_generation: Option<u64>,
    /// Of a directory: the attributes that the kernel got last, for the time after its removal.
    last_attr: Option<Box<NodeAttr>>,
    /// This mount has removed or replaced the directory.
    removed: bool,
    /// The directory is on the way to a new file, and the source may not show it yet.
    implied: bool,
    /// References held by the kernel.
    lookups: u64,
    /// Its names. Any of them leads to it.
    names: Vec<NodeName>,
    /// The record that outlives this process; 0 for none.
    record: RecordSlot,
    /// Known names in a directory.
    children: Option<HashMap<Arc<[u8]>, u64>>,
    /// What the last open saw; kernel pages of an earlier one are dropped.
    opened_as: Option<SeenBytes>,
    /// What the attributes said that the kernel got last.
    sent: Option<SeenBytes>,
    /// Since it was first opened.
    kernel_inode: Option<Arc<KernelInode>>,
    /// Until then, it is known to have no file capabilities.
    bare_until_ms: u64,
}

impl TreeNode {
    /// Neither the kernel nor a name below it needs the node.
    fn is_unused(&self) -> bool {
        self.lookups == 0 && self.children.as_ref().is_none_or(|children| children.is_empty())
    }

    fn new(identity: FileIdentity, directory: bool) -> Box<TreeNode> {
        Box::new(TreeNode {
            identity,
            used_ms: 0,
            directory,
            known_generation: None,
            last_attr: None,
            removed: false,
            implied: false,
            lookups: 0,
            names: Vec::new(),
            record: 0,
            children: None,
            opened_as: None,
            sent: None,
            kernel_inode: None,
            bare_until_ms: 0,
        })
    }

    /// These attributes go to the kernel.
    fn note_sent(&mut self, attr: &NodeAttr, now_ms: u64) {
        self.sent = SeenBytes::of(attr);
        self.used_ms = now_ms;
        if let Some(inode) = &self.kernel_inode {
            inode.note_sent(attr);
        }
        if self.directory {
            match &mut self.last_attr {
                Some(last) => **last = *attr,
                last => *last = Some(Box::new(*attr)),
            }
        }
    }

    fn as_kept(&self, ino: u64) -> KeptRecord<'static> {
        let removed = self.last_attr.as_ref().filter(|_| self.removed);
        KeptRecord::Node(KeptNode {
            ino,
            lookups: self.lookups,
            identity: self.identity,
            known_generation: self.known_generation,
            directory: self.directory,
            removed: removed.map(|attr| [attr.mode, attr.uid, attr.gid]),
        })
    }

    /// Memory of the node without its names; `is_kept`: with its records.
    fn own_bytes(&self, is_kept: bool) -> u64 {
        let attr = if self.directory { DIRECTORY_ATTR_BYTES } else { 0 };
        NODE_BYTES + attr + if is_kept { RECORD_BYTES } else { 0 }
    }
}

struct NodeTree {
    stats: Arc<Stats>,
    nodes: HashMap<u64, Box<TreeNode>>,
    by_identity: HashMap<FileIdentity, u64>,
    /// The names are kept there, for file handles of an NFS server.
    records: Option<Arc<dyn NameRecords>>,
    /// With `records`: an object keeps its number as long as a name leads to an object of its type. For sources that make another
    /// object of each change, and of each object below a renamed directory.
    names_decide: bool,
    /// Nodes and names are kept there, for a successor of this process.
    kept: Option<Arc<dyn KeptRecords>>,
    /// Memory of all nodes but the root.
    bytes: u64,
}

/// A node that no program has open, for [`NodeTable::for_each_idle`].
pub(super) struct IdleNode<'a> {
    pub ino: u64,
    pub directory: bool,
    pub name: Option<&'a NodeName>,
    pub age: Duration,
    pub bytes: u64,
}

/// A path and the object it leads to.
pub(super) struct ResolvedNode {
    pub path: Vec<u8>,
    pub identity: FileIdentity,
}

/// How the bytes of a file compare at an open.
pub(super) struct SeenAtOpen {
    /// They are those of the open before.
    pub same: bool,
    /// They are not those of the attributes that the kernel has.
    pub moved: bool,
    pub kernel_inode: Arc<KernelInode>,
}

/// All objects the kernel knows.
pub(super) struct NodeTable {
    tree: RwLock<NodeTree>,
    /// Renames begun and ended: a path that was resolved in between may lead nowhere.
    begun: AtomicU64,
    ended: AtomicU64,
    since: Instant,
}

impl NodeTable {
    /// A table with the root only.
    pub fn new(root: FileIdentity, stats: Arc<Stats>) -> Self {
        stats.fuse.inodes.add(1);
        let mut node = TreeNode::new(root, true);
        node.lookups = u64::MAX;
        let tree = NodeTree {
            stats,
            nodes: HashMap::from([(ROOT, node)]),
            by_identity: HashMap::from([(root, ROOT)]),
            records: None,
            names_decide: false,
            kept: None,
            bytes: 0,
        };
        let begun = AtomicU64::new(0);
        let ended = AtomicU64::new(0);
        NodeTable { tree: RwLock::new(tree), begun, ended, since: Instant::now() }
    }

    /// Raises the reference count of a node by one; false if there is no such node.
    pub fn hold(&self, ino: u64) -> bool {
        let mut tree = self.tree.write();
        tree.add_lookup(ino)
    }

    /// Keeps all nodes and names in `records` from now on. Called before the first request.
    pub fn keep_records(&self, records: &Arc<dyn KeptRecords>) {
        self.tree.write().kept = Some(Arc::clone(records));
    }

    /// Adds a node of the process before; false if there is another of its number.
    pub fn adopt_node(&self, record: RecordSlot, kept: &KeptNode) -> bool {
        let mut tree = self.tree.write();
        if tree.nodes.contains_key(&kept.ino) {
            return false;
        }
        let mut node = TreeNode::new(kept.identity, kept.directory);
        node.lookups = kept.lookups;
        node.known_generation = kept.known_generation;
        node.removed = kept.removed.is_some();
        node.record = record;
        if kept.directory {
            node.last_attr = Some(Box::new(adopted_attr(kept)));
        }
        let bytes = node.own_bytes(tree.kept.is_some());
        tree.nodes.insert(kept.ino, node);
        tree.by_identity.insert(kept.identity, kept.ino);
        tree.stats.fuse.inodes.add(1);
        tree.add_memory(bytes);
        true
    }

    /// Adds a name of an adopted node; false if it leads nowhere.
    pub fn adopt_name(&self, record: RecordSlot, kept: &KeptName<'_>) -> bool {
        let mut tree = self.tree.write();
        let KeptName { ino, parent, name } = *kept;
        if tree.child(parent, name).is_some() || !tree.nodes.contains_key(&ino) {
            return false;
        }
        let name: Arc<[u8]> = name.into();
        let Some(directory) = tree.nodes.get_mut(&parent) else { return false };
        directory.children.get_or_insert_default().insert(Arc::clone(&name), ino);
        tree.add_memory(name_bytes(&name));
        if let Some(node) = tree.nodes.get_mut(&ino) {
            node.names.push(NodeName { parent, name, record });
        }
        true
    }

    /// The object that a name is known to lead to.
    pub fn identity_at(&self, parent: u64, name: &[u8]) -> Option<FileIdentity> {
        let tree = self.tree.read();
        Some(tree.nodes.get(&tree.child(parent, name)?)?.identity)
    }

    /// The object of a node.
    pub fn identity_of(&self, ino: u64) -> Option<FileIdentity> {
        self.tree.read().nodes.get(&ino).map(|node| node.identity)
    }

    /// The attributes of a node's file in the kernel.
    pub fn kernel_inode(&self, ino: u64) -> Arc<KernelInode> {
        let mut tree = self.tree.write();
        tree.nodes.get_mut(&ino).map(|node| Arc::clone(node.kernel_inode.get_or_insert_default())).unwrap_or_default()
    }

    /// The memory of all nodes but the root, in bytes; at most a tenth too few.
    pub fn bytes(&self) -> u64 {
        self.tree.read().bytes
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Calls `f` with every node that the kernel knows and `is_open` does not, but the root.
    pub fn for_each_idle(&self, is_open: impl Fn(u64) -> bool, mut f: impl FnMut(IdleNode<'_>)) {
        let tree = self.tree.read();
        let now = self.now_ms();
        for (ino, node) in &tree.nodes {
            if *ino == ROOT || node.lookups == 0 || is_open(*ino) {
                continue;
            }
            f(IdleNode {
                ino: *ino,
                directory: node.directory,
                name: node.names.first(),
                age: Duration::from_millis(now.saturating_sub(node.used_ms)),
                bytes: node.own_bytes(tree.kept.is_some())
                    + node.names.iter().map(|name| name_bytes(&name.name)).sum::<u64>(),
            });
        }
    }

    /// The number of objects, the root included.
    pub fn len(&self) -> usize {
        self.tree.read().nodes.len()
    }

    /// The present path of a node; `None` if it has no name, or the kernel has forgotten it.
    pub fn resolve(&self, ino: u64) -> Option<ResolvedNode> {
        let tree = self.tree.read();
        Some(ResolvedNode { identity: tree.nodes.get(&ino)?.identity, path: tree.path_of(ino, None)? })
    }

    /// Whether the kernel knows the node.
    pub fn contains(&self, ino: u64) -> bool {
        self.tree.read().nodes.contains_key(&ino)
    }

    /// Whether a name is known to lead to a directory.
    pub fn is_directory(&self, parent: u64, name: &[u8]) -> bool {
        let tree = self.tree.read();
        let node = tree.child(parent, name).and_then(|ino| tree.nodes.get(&ino));
        node.is_some_and(|node| node.directory)
    }

    /// The directory that holds a node's first name.
    pub fn parent_of(&self, ino: u64) -> u64 {
        let tree = self.tree.read();
        tree.nodes.get(&ino).and_then(|node| node.names.first()).map_or(ROOT, |name| name.parent)
    }

    /// The node of an object that was seen as `name` in `parent`: existing or new, with one more reference. Without a
    /// name, it has none yet.
    pub fn intern(&self, name: Option<(u64, &[u8])>, attr: &NodeAttr) -> u64 {
        let identity = attr.identity;
        let now = self.now_ms();
        if let Some((parent, name)) = name {
            // The usual case changes no name.
            let tree = self.tree.read();
            let known = tree.child(parent, name).filter(|ino| tree.nodes[ino].identity == identity);
            drop(tree);
            if known.is_some() {
                let mut tree = self.tree.write();
                if let Some(ino) = tree.child(parent, name)
                    && let Some(node) = tree.nodes.get_mut(&ino).filter(|node| node.identity == identity)
                {
                    node.note_sent(attr, now);
                    tree.add_lookup(ino);
                    return ino;
                }
            }
        }
        let recorded = name.and_then(|(parent, name)| self.recorded_number(parent, name));
        let mut tree = self.tree.write();
        let by_name = name.and_then(|(parent, name)| tree.number_by_name(parent, name, recorded, attr));
        if let Some(ino) = by_name {
            tree.set_identity(ino, identity);
        }
        let known = by_name.or_else(|| tree.by_identity.get(&identity).copied());
        let ino = known.unwrap_or_else(|| {
            let free = recorded.filter(|ino| !tree.nodes.contains_key(ino));
            let ino = free.unwrap_or_else(|| tree.free_number(&identity));
            let mut node = TreeNode::new(identity, attr.mode & S_IFMT == S_IFDIR);
            let bytes = node.own_bytes(tree.kept.is_some());
            if let Some(kept) = &tree.kept {
                node.record = kept.keep(&node.as_kept(ino));
            }
            tree.nodes.insert(ino, node);
            tree.by_identity.insert(identity, ino);
            tree.stats.fuse.inodes.add(1);
            tree.add_memory(bytes);
            ino
        });
        if let Some((parent, name)) = name {
            tree.bind(parent, name, ino);
        }
        if let Some(node) = tree.nodes.get_mut(&ino) {
            node.note_sent(attr, now);
        }
        tree.add_lookup(ino);
        ino
    }

    /// The object of a node has this identity from now on: its source made another object of a change.
    pub fn set_identity(&self, ino: u64, identity: FileIdentity) {
        let known = self.tree.read().nodes.get(&ino).map(|node| node.identity);
        if known.is_some_and(|known| known != identity) {
            self.tree.write().set_identity(ino, identity);
        }
    }

    /// The generation of a node: for the kernel, another one would be another file.
    pub fn generation(&self, ino: u64, identity: &FileIdentity) -> u64 {
        let known = self.tree.read().nodes.get(&ino).and_then(|node| node.known_generation);
        known.unwrap_or_else(|| generation_of(identity))
    }

    /// The node that a name leads to.
    pub fn node_at(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.tree.read().child(parent, name)
    }

    /// The directory is there as long as its node is, whatever the source shows.
    pub fn note_implied(&self, ino: u64) {
        if let Some(node) = self.tree.write().nodes.get_mut(&ino) {
            node.implied = true;
        }
    }

    /// The attributes of such a directory.
    pub fn implied_attr(&self, parent: u64, name: &[u8]) -> Option<NodeAttr> {
        let tree = self.tree.read();
        let node = tree.nodes.get(&tree.child(parent, name)?).filter(|node| node.implied)?;
        node.last_attr.as_deref().copied()
    }

    /// Removes a name.
    pub fn unbind(&self, parent: u64, name: &[u8]) {
        let recorded = self.recorded_number(parent, name);
        let mut tree = self.tree.write();
        match recorded {
            // The next object of this name is another one.
            Some(ino) => tree.forget_name(ino, parent, name),
            None => tree.unbind(parent, name),
        }
    }

    /// Removes a name whose object this mount has removed or replaced.
    pub fn remove(&self, parent: u64, name: &[u8]) {
        let mut tree = self.tree.write();
        tree.mark_removed(parent, name);
        tree.unbind(parent, name);
    }

    /// The attributes of a directory that this mount has removed, without links.
    pub fn removed_attr(&self, ino: u64) -> Option<NodeAttr> {
        let tree = self.tree.read();
        let node = tree.nodes.get(&ino).filter(|node| node.removed)?;
        node.last_attr.as_ref().map(|attr| NodeAttr { nlink: 0, ..**attr })
    }

    /// Begins a rename: until the result is dropped, a path that leads nowhere is resolved again.
    pub fn begin_rename(&self) -> RenameMark<'_> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        RenameMark(self)
    }

    /// A mark for [`NodeTable::may_have_moved`], taken before a path is resolved.
    pub fn rename_mark(&self) -> u64 {
        self.ended.load(Ordering::SeqCst)
    }

    /// Whether a path resolved after `mark` may have moved since, by other renames than the `own` ones under way.
    pub fn may_have_moved(&self, mark: u64, own: u64) -> bool {
        self.begun.load(Ordering::SeqCst) != mark + own
    }

    /// Applies a rename that the source has made.
    pub fn rename(&self, from: DirName<'_>, to: DirName<'_>, exchange: bool) {
        let mut tree = self.tree.write();
        let moved = tree.child(from.parent, from.name);
        let other = tree.child(to.parent, to.name);
        // Two names of one object: the source changes nothing.
        if moved.is_some() && moved == other {
            return;
        }
        if !exchange {
            tree.mark_removed(to.parent, to.name);
        }
        let other = other.filter(|_| exchange);
        // Before the records of the old names go: a node without a name would be lost.
        let moved_record = moved.map_or(0, |ino| tree.keep_name(ino, to.parent, to.name));
        let other_record = other.map_or(0, |ino| tree.keep_name(ino, from.parent, from.name));
        tree.unbind(from.parent, from.name);
        tree.unbind(to.parent, to.name);
        if let Some(moved) = moved {
            tree.bind_kept(to.parent, to.name, moved, moved_record);
        }
        if let Some(other) = other {
            tree.bind_kept(from.parent, from.name, other, other_record);
        }
    }

    /// Lowers the reference count by `n`.
    pub fn forget(&self, ino: u64, n: u64) {
        if ino == ROOT {
            return;
        }
        let mut tree = self.tree.write();
        if let Some(node) = tree.nodes.get_mut(&ino) {
            node.lookups = node.lookups.saturating_sub(n);
            let record = node.record;
            if let Some(kept) = &tree.kept {
                kept.sub_lookups(record, n);
            }
            tree.remove_unused(ino);
        }
    }

    /// Stores attributes that the kernel gets.
    pub fn note_sent(&self, ino: u64, attr: &NodeAttr) {
        let now = self.now_ms();
        if let Some(node) = self.tree.write().nodes.get_mut(&ino) {
            node.note_sent(attr, now);
        }
    }

    /// The kernel gets no older attributes than these from now on.
    pub fn note_refreshed(&self, ino: u64, attr: &NodeAttr) {
        if let Some(node) = self.tree.write().nodes.get_mut(&ino) {
            node.sent = SeenBytes::of(attr);
        }
    }

    /// Notes that a file has no capabilities, as one that was just made; `within`: for how long that is certain enough.
    pub fn note_bare(&self, ino: u64, within: Duration) {
        let until = self.now_ms() + u64::try_from(within.as_millis()).unwrap_or(0);
        if let Some(node) = self.tree.write().nodes.get_mut(&ino) {
            node.bare_until_ms = until;
        }
    }

    /// Whether a file is known to have no capabilities.
    pub fn is_bare(&self, ino: u64) -> bool {
        self.tree.read().nodes.get(&ino).is_some_and(|node| self.now_ms() < node.bare_until_ms)
    }

    /// Stores what an open saw.
    pub fn note_open(&self, ino: u64, attr: &NodeAttr) -> SeenAtOpen {
        let now = self.now_ms();
        let mut tree = self.tree.write();
        let Some(node) = tree.nodes.get_mut(&ino) else {
            return SeenAtOpen { same: false, moved: true, kernel_inode: Arc::default() };
        };
        let seen = SeenBytes::of(attr);
        node.used_ms = now;
        let same = std::mem::replace(&mut node.opened_as, seen) == seen;
        let kernel_inode = Arc::clone(node.kernel_inode.get_or_insert_default());
        kernel_inode.note_mode(attr.mode);
        SeenAtOpen { same, moved: node.sent != seen, kernel_inode }
    }
}

/// A rename under way.
pub(super) struct RenameMark<'a>(&'a NodeTable);

impl Drop for RenameMark<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}

/// Two hashes of an object, the same in every mount of the source and on every host.
fn hash_of(identity: &FileIdentity) -> (u64, u64) {
    let hash = xxhash_rust::xxh3::xxh3_128(identity.bytes());
    (hash as u64, (hash >> 64) as u64)
}

/// The number of an object's node.
pub(super) fn number_of(identity: &FileIdentity) -> u64 {
    usable_number(hash_of(identity).0)
}

/// Distinguishes objects that have the same number; 32 bits, as the kernel stores them.
pub(super) fn generation_of(identity: &FileIdentity) -> u64 {
    hash_of(identity).1 >> 32
}

/// The attributes of a directory of the process before, as far as they are kept: they matter after its removal.
fn adopted_attr(kept: &KeptNode) -> NodeAttr {
    let [mode, uid, gid] = kept.removed.unwrap_or([S_IFDIR | 0o755, 0, 0]);
    let time = FileTime::default();
    NodeAttr {
        identity: kept.identity,
        inode: kept.ino,
        mode,
        nlink: 0,
        uid,
        gid,
        rdev: 0,
        size: 0,
        blocks: 0,
        blksize: 4096,
        atime: time,
        mtime: time,
        ctime: time,
    }
}

fn name_bytes(name: &[u8]) -> u64 {
    NAME_BYTES + name.len() as u64
}

impl KnownNames for NodeTable {
    fn paths_of(&self, identity: FileIdentity) -> Vec<Vec<u8>> {
        let tree = self.tree.read();
        let node = tree.by_identity.get(&identity).and_then(|ino| tree.nodes.get(ino));
        let names = node.map_or(&[][..], |node| &node.names);
        names.iter().filter_map(|name| tree.path_of(name.parent, Some(&name.name))).collect()
    }

    fn object_at(&self, path: &[u8]) -> Option<FileIdentity> {
        let tree = self.tree.read();
        let mut names = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty());
        let ino = names.try_fold(ROOT, |ino, name| tree.child(ino, name))?;
        tree.nodes.get(&ino).map(|node| node.identity)
    }
}

impl NodeTree {
    fn set_identity(&mut self, ino: u64, identity: FileIdentity) {
        let Some(node) = self.nodes.get_mut(&ino).filter(|node| node.identity != identity) else { return };
        let earlier = std::mem::replace(&mut node.identity, identity);
        node.known_generation.get_or_insert(generation_of(&earlier));
        if self.by_identity.get(&earlier) == Some(&ino) {
            self.by_identity.remove(&earlier);
        }
        self.by_identity.insert(identity, ino);
        self.keep_again(ino);
    }

    /// The path of a node, or of `last` in it.
    fn path_of(&self, ino: u64, last: Option<&Arc<[u8]>>) -> Option<Vec<u8>> {
        let mut parts: Vec<&Arc<[u8]>> = Vec::with_capacity(16);
        let mut at = ino;
        let mut len = 0;
        if let Some(last) = last {
            len = last.len() + 1;
            parts.push(last);
        }
        while at != ROOT {
            let NodeName { parent, name, .. } = self.nodes.get(&at)?.names.first()?;
            len += name.len() + 1;
            parts.push(name);
            at = *parent;
        }
        let mut path = Vec::with_capacity(len);
        for part in parts.iter().rev() {
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(part);
        }
        Some(path)
    }

    /// Raises the reference count of a node by one; false if there is no such node.
    fn add_lookup(&mut self, ino: u64) -> bool {
        let Some(node) = self.nodes.get_mut(&ino) else { return false };
        node.lookups = node.lookups.saturating_add(1);
        if let Some(kept) = &self.kept {
            kept.add_lookup(node.record);
        }
        true
    }

    /// Replaces the record of a node that has changed.
    fn keep_again(&mut self, ino: u64) {
        let Some(kept) = &self.kept else { return };
        if let Some(node) = self.nodes.get_mut(&ino).filter(|_| ino != ROOT) {
            let record = kept.keep(&node.as_kept(ino));
            kept.remove_record(std::mem::replace(&mut node.record, record));
        }
    }

    fn keep_name(&self, ino: u64, parent: u64, name: &[u8]) -> RecordSlot {
        self.kept.as_ref().map_or(0, |kept| kept.keep(&KeptRecord::Name(KeptName { ino, parent, name })))
    }

    fn remove_record(&self, record: RecordSlot) {
        if let Some(kept) = &self.kept {
            kept.remove_record(record);
        }
    }

    fn add_memory(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.stats.fuse.inode_bytes.add(bytes);
    }

    fn free_memory(&mut self, bytes: u64) {
        self.bytes -= bytes;
        self.stats.fuse.inode_bytes.sub(bytes);
    }

    /// The number of a new node: that of its identity, or one after it if another node has that.
    fn free_number(&self, identity: &FileIdentity) -> u64 {
        let mut number = number_of(identity);
        while self.nodes.contains_key(&number) {
            number = usable_number(number + 1);
        }
        number
    }

    fn child(&self, parent: u64, name: &[u8]) -> Option<u64> {
        self.nodes.get(&parent)?.children.as_ref()?.get(name).copied()
    }

    /// Notes that the directory of this name, if it is one, was removed.
    fn mark_removed(&mut self, parent: u64, name: &[u8]) {
        if let Some(ino) = self.child(parent, name)
            && let Some(node) = self.nodes.get_mut(&ino)
        {
            node.removed = node.directory;
            if node.removed {
                self.keep_again(ino);
            }
        }
    }

    fn bind(&mut self, parent: u64, name: &[u8], ino: u64) {
        if self.child(parent, name) != Some(ino) {
            let record = self.keep_name(ino, parent, name);
            self.bind_kept(parent, name, ino, record);
        }
    }

    /// As [`NodeTree::bind`], with the record of the name.
    fn bind_kept(&mut self, parent: u64, name: &[u8], ino: u64, record: RecordSlot) {
        self.unbind(parent, name);
        let name: Arc<[u8]> = name.into();
        let Some(directory) = self.nodes.get_mut(&parent) else { return self.remove_record(record) };
        directory.children.get_or_insert_default().insert(Arc::clone(&name), ino);
        let mut lost = Vec::new();
        if let Some(node) = self.nodes.get_mut(&ino) {
            let was_removed = std::mem::replace(&mut node.removed, false);
            if was_removed {
                self.keep_again(ino);
            }
        }
        if let Some(node) = self.nodes.get_mut(&ino) {
            if node.children.is_some() {
                // A directory has one name: another host has moved it.
                lost = std::mem::take(&mut node.names);
            }
            if node.names.is_empty() {
                node.names.reserve_exact(1);
            }
            node.names.insert(0, NodeName { parent, name: Arc::clone(&name), record });
            self.add_memory(name_bytes(&name));
        }
        self.store_name(ino, parent, &name);
        for NodeName { parent, name, record } in lost {
            self.remove_record(record);
            self.forget_name(ino, parent, &name);
            self.free_memory(name_bytes(&name));
            self.remove_child(parent, &name);
        }
    }

    fn unbind(&mut self, parent: u64, name: &[u8]) {
        let Some(ino) = self.child(parent, name) else { return };
        self.remove_child(parent, name);
        if let Some(node) = self.nodes.get_mut(&ino) {
            let at = node.names.iter().position(|own| own.parent == parent && *own.name == *name);
            let record = at.map_or(0, |at| node.names.remove(at).record);
            self.remove_record(record);
            self.free_memory(name_bytes(name));
        }
        self.forget_name(ino, parent, name);
        self.remove_unused(ino);
    }

    fn remove_child(&mut self, parent: u64, name: &[u8]) {
        if let Some(directory) = self.nodes.get_mut(&parent)
            && let Some(children) = &mut directory.children
        {
            children.remove(name);
        }
        self.remove_unused(parent);
    }

    /// Removes a node that neither the kernel nor a known name below it needs; then the directories above it likewise.
    fn remove_unused(&mut self, ino: u64) {
        let mut waiting = vec![ino];
        while let Some(ino) = waiting.pop() {
            if ino == ROOT || !self.nodes.get(&ino).is_some_and(|node| node.is_unused()) {
                continue;
            }
            let Some(node) = self.nodes.remove(&ino) else { continue };
            self.stats.fuse.inodes.sub(1);
            let names: u64 = node.names.iter().map(|name| name_bytes(&name.name)).sum();
            self.free_memory(node.own_bytes(self.kept.is_some()) + names);
            self.remove_record(node.record);
            if self.by_identity.get(&node.identity) == Some(&ino) {
                self.by_identity.remove(&node.identity);
            }
            for NodeName { parent, name, record } in node.names {
                self.remove_record(record);
                if let Some(children) = self.nodes.get_mut(&parent).and_then(|node| node.children.as_mut()) {
                    children.remove(&name);
                }
                waiting.push(parent);
            }
        }
    }
}

impl Drop for NodeTree {
    fn drop(&mut self) {
        self.stats.fuse.inodes.sub(self.nodes.len() as u64);
        self.stats.fuse.inode_bytes.sub(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(number: u64) -> FileIdentity {
        FileIdentity::from_number(number)
    }

    fn seen(number: u64) -> NodeAttr {
        NodeAttr {
            identity: object(number),
            inode: number,
            mode: 0,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            size: 0,
            blocks: 0,
            blksize: 4096,
            atime: Default::default(),
            mtime: Default::default(),
            ctime: Default::default(),
        }
    }

    fn path(table: &NodeTable, ino: u64) -> Option<String> {
        table.resolve(ino).map(|node| String::from_utf8(node.path).unwrap())
    }

    fn in_root(name: &[u8]) -> DirName<'_> {
        DirName { parent: ROOT, name }
    }

    #[test]
    fn a_rename_moves_a_tree_and_hard_links_share_an_inode() {
        let table = NodeTable::new(object(1), Arc::default());
        let a = table.intern(Some((ROOT, b"a")), &seen(2));
        let b = table.intern(Some((a, b"b")), &seen(3));
        let file = table.intern(Some((b, b"file")), &seen(4));
        assert_eq!(path(&table, file).unwrap(), "a/b/file");
        assert_eq!(table.intern(Some((ROOT, b"link")), &seen(4)), file);
        assert_eq!(table.paths_of(object(4)), [&b"link"[..], b"a/b/file"]);
        assert!(table.paths_of(object(5)).is_empty());
        table.rename(in_root(b"a"), in_root(b"z"), false);
        assert_eq!(path(&table, b).unwrap(), "z/b");
        table.unbind(ROOT, b"link");
        assert_eq!(path(&table, file).unwrap(), "z/b/file");
        table.unbind(b, b"file");
        assert!(table.contains(file) && table.resolve(file).is_none());
        // Both lookups are forgotten; directories stay while the kernel knows them.
        table.forget(file, 2);
        assert!(!table.contains(file));
        table.forget(a, 1);
        assert!(table.contains(a), "the directory below it needs its name");
        table.forget(b, 1);
        assert_eq!(table.len(), 1);
    }

    #[test]
    fn an_exchange_swaps_names_and_a_replaced_object_loses_its_own() {
        let table = NodeTable::new(object(1), Arc::default());
        let a = table.intern(Some((ROOT, b"a")), &seen(2));
        let b = table.intern(Some((ROOT, b"b")), &seen(3));
        table.rename(in_root(b"a"), in_root(b"b"), true);
        assert_eq!((path(&table, a).unwrap(), path(&table, b).unwrap()), ("b".into(), "a".into()));
        table.rename(in_root(b"a"), in_root(b"b"), false);
        assert_eq!((path(&table, a), path(&table, b).unwrap()), (None, "b".into()));
        // Another host has put another object there.
        let other = table.intern(Some((ROOT, b"b")), &seen(9));
        assert!(other != b && path(&table, b).is_none() && path(&table, other).unwrap() == "b");
    }

    #[test]
    fn a_path_that_was_resolved_during_a_rename_may_have_moved() {
        let table = NodeTable::new(object(1), Arc::default());
        let before = table.rename_mark();
        assert!(!table.may_have_moved(before, 0));
        let rename = table.begin_rename();
        let during = table.rename_mark();
        assert!(table.may_have_moved(before, 0) && table.may_have_moved(during, 0));
        assert!(!table.may_have_moved(during, 1), "a rename does not wait for itself");
        drop(rename);
        assert!(table.may_have_moved(during, 0) && !table.may_have_moved(table.rename_mark(), 0));
    }
}
