//! Names, inodes and attributes of a writable mount: which object of the source a call means, and with which rights the call is
//! made. The source decides which calls are permitted and how an operation works; names and numbers are kept in step with the source. A path
//! that moved while it was used is resolved again. Changes are in `change`, file handles in `recall`, the limit of inodes in `limit`.
//! It knows open files only as objects that are left when their names are gone, and no locks.

use super::directory_attrs::DirectoryAttrs;
use super::groups::{CallerRights, rights_of};
use super::life::MountRecords;
use super::nodes::{NodeTable, generation_of_number};
use super::open_nodes::{OpenNodeFile, OpenNodes};
use super::removed::RemovedDirectory;
use crate::attr::LookupOutcome;
use crate::errno::{FsError, FsResult, errno_error};
use crate::inode_limit::LimitAlarm;
use crate::service::{CallerGroups, FsCaller};
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_volume::capabilities::WriteCapabilities;
use spurline_volume::writes::{
    Caller, FileIdentity, NamePath, NodeAttr, NodePath, S_IFDIR, S_IFMT, WritableFile, WritableObject, WritableVolume,
};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// Attempts of a call whose path moved meanwhile.
const MOVES: u32 = 200;

/// Options of a writable file system.
#[derive(Debug, Clone)]
pub struct WritableConfig {
    /// How long attributes are valid.
    pub attr_ttl: Duration,
    /// How long the name of a file is valid.
    pub entry_ttl: Duration,
    /// How long the name of a directory is valid.
    pub dir_entry_ttl: Duration,
    /// How long the absence of a name is valid.
    pub negative_ttl: Duration,
    /// The kernel checks permissions by mode, owner and group too, with all groups of the caller.
    pub kernel_checks: bool,
    /// Limit of the memory for inodes, in bytes; `u64::MAX` for none.
    pub inode_bytes: u64,
    /// The read-ahead limit of one reader, in bytes; 0 disables read-ahead.
    pub max_readahead: u64,
    /// The read-ahead limit of all readers together, in bytes.
    pub readahead_budget: u64,
    /// User and group of this process.
    pub owner: (u32, u32),
    /// User and group that the source makes all changes as, if they are not the caller's.
    pub squash: Option<(u32, u32)>,
}

/// An inode of a writable mount, and how long the kernel may cache its name and attributes.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeEntry {
    /// The inode's number for the kernel.
    pub ino: u64,
    /// The source's attributes.
    pub attr: NodeAttr,
    /// How long the name is valid.
    pub entry_ttl: Duration,
    /// How long the attributes are valid.
    pub attr_ttl: Duration,
}

/// What a lookup has found, and the file if the source has opened that too.
pub(super) type FoundEntry = (NodeEntry, Option<Box<dyn WritableFile>>);

/// The names, inodes and attributes of a mount, over its source.
pub(super) struct MountNames {
    // Field order is drop order: open files are closed before the end of the source.
    pub open_nodes: Arc<OpenNodes>,
    pub nodes: Arc<NodeTable>,
    pub directory_attrs: DirectoryAttrs,
    pub limit_alarm: LimitAlarm,
    pub life: Arc<MountRecords>,
    pub source: Arc<dyn WritableVolume>,
    pub config: WritableConfig,
    pub stats: Arc<Stats>,
    root: FileIdentity,
    /// The abilities of the source: other calls are refused here.
    pub can: WriteCapabilities,
    /// An NFS server serves the files.
    pub exported: AtomicBool,
}

impl MountNames {
    /// The names below the root of `source`.
    pub fn new(source: Arc<dyn WritableVolume>, config: WritableConfig, stats: Arc<Stats>) -> FsResult<MountNames> {
        let (uid, gid) = config.owner;
        let own = Caller { uid, gid, ..Caller::default() };
        let root = source.stat(NodePath { path: b"", expected: None }, &own)?.identity;
        if config.inode_bytes < u64::MAX {
            stats.fuse.inode_limit_bytes.set(config.inode_bytes);
        }
        let nodes = Arc::new(NodeTable::new(root, Arc::clone(&stats)));
        let known: Weak<NodeTable> = Arc::downgrade(&nodes);
        source.use_names(known);
        let squash_uid = config.squash.map(|(uid, _)| uid);
        Ok(MountNames {
            open_nodes: Arc::default(),
            nodes,
            directory_attrs: DirectoryAttrs::default(),
            limit_alarm: LimitAlarm::default(),
            life: Arc::new(MountRecords::new(Arc::clone(&source), squash_uid)),
            can: source.capabilities(),
            source,
            config,
            stats,
            root,
            exported: AtomicBool::new(false),
        })
    }

    /// Distinguishes inodes of the kernel that have the same number; the same in every mount of the source.
    pub fn generation(&self, ino: u64, identity: &FileIdentity) -> u64 {
        match *identity == self.root {
            true => 0,
            false if self.can.publishes => generation_of_number(ino),
            false => self.nodes.generation(ino, identity),
        }
    }

    /// Runs `op` as the caller. The groups that a kernel does not say are read from the system only where they can matter:
    /// reading them costs as much as a small request. The kernel has already checked permissions with all groups; so without
    /// them a call can only fail, and is then made again. The one group that decides about a new object comes with its
    /// request from Linux 6.3 on. The kernel's NFS server has no groups to read; the kernel's permission holds.
    pub fn as_caller<T>(
        &self,
        caller: &FsCaller<'_>,
        groups_decide: bool,
        op: impl Fn(&Caller) -> Result<T>,
    ) -> Result<T> {
        let FsCaller { uid, gid, pid, umask, groups, .. } = *caller;
        let mut own = Caller { uid, gid, groups: Vec::new(), pid, umask, rights_checked: false };
        if uid == 0 {
            return op(&own);
        }
        match groups {
            CallerGroups::All(groups) => {
                own.groups = groups.to_vec();
                return op(&own);
            }
            CallerGroups::OfDirectory(group) => own.groups = vec![group],
            CallerGroups::Unknown | CallerGroups::NotOfDirectory => {}
        }
        if self.config.kernel_checks && (!groups_decide || groups != CallerGroups::Unknown) {
            match op(&own) {
                Err(error) if matches!(errno_of(&error), libc::EACCES | libc::EPERM) => {
                    match self.add_rights(&mut own) {
                        true => op(&own),
                        false => Err(error),
                    }
                }
                answer => answer,
            }
        } else {
            self.add_rights(&mut own);
            op(&own)
        }
    }

    /// Adds the rights that a caller has beside its user and group; false if there are none.
    fn add_rights(&self, caller: &mut Caller) -> bool {
        match rights_of(caller.pid) {
            CallerRights::Groups(groups) => caller.groups = groups,
            CallerRights::NfsServer => caller.rights_checked = self.config.kernel_checks,
        }
        caller.rights_checked || !caller.groups.is_empty()
    }

    /// Runs `op` on the object of a node, again when its path moved meanwhile. A path that leads nowhere is stale: the kernel
    /// then looks its names up again.
    pub fn on_node<T>(
        &self,
        ino: u64,
        caller: &FsCaller,
        groups_decide: bool,
        op: impl Fn(NodePath<'_>, &Caller) -> Result<T>,
    ) -> FsResult<T> {
        self.at_node(ino, caller, groups_decide, op).map_err(|error| match error.errno() {
            libc::ENOENT | libc::ENOTDIR => FsError::Stale(ino),
            _ => error,
        })
    }

    fn at_node<T>(
        &self,
        ino: u64,
        caller: &FsCaller,
        groups_decide: bool,
        op: impl Fn(NodePath<'_>, &Caller) -> Result<T>,
    ) -> FsResult<T> {
        self.while_moving(0, || {
            let node = self.nodes.resolve(ino).ok_or_else(|| self.missing(ino))?;
            let at = NodePath { path: &node.path, expected: Some(node.identity) };
            Ok(self.as_caller(caller, groups_decide, |caller| op(at, caller))?)
        })
    }

    /// Runs `op` on a name in a directory, again when the directory moved meanwhile.
    pub fn on_name<T>(
        &self,
        parent: u64,
        name: &[u8],
        caller: &FsCaller,
        groups_decide: bool,
        op: impl Fn(NamePath<'_>, &Caller) -> Result<T>,
    ) -> FsResult<T> {
        self.at_node(parent, caller, groups_decide, |directory, caller| op(NamePath { directory, name }, caller))
    }

    /// Runs `attempt` until no rename but `own` ones can explain its failure.
    pub fn while_moving<T>(&self, own: u64, attempt: impl Fn() -> FsResult<T>) -> FsResult<T> {
        for tries in 0.. {
            let mark = self.nodes.rename_mark();
            match attempt() {
                Err(error)
                    if matches!(error.errno(), libc::ENOENT | libc::ENOTDIR | libc::ESTALE)
                        && tries < MOVES
                        && self.nodes.may_have_moved(mark, own) =>
                {
                    // The rename may still be under way.
                    if tries > 2 {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                }
                answer => return answer,
            }
        }
        Err(FsError::Stale(0))
    }

    /// The error of a node without a path.
    pub fn missing(&self, ino: u64) -> FsError {
        match self.nodes.contains(ino) {
            true => errno_error(libc::ENOENT, "the object has no name any more"),
            false => FsError::Stale(ino),
        }
    }

    pub fn node_entry(&self, ino: u64, attr: NodeAttr) -> NodeEntry {
        let config = &self.config;
        let entry_ttl = if attr.mode & S_IFMT == S_IFDIR { config.dir_entry_ttl } else { config.entry_ttl };
        NodeEntry { ino, attr, entry_ttl, attr_ttl: self.attr_ttl(ino) }
    }

    /// How long the kernel may keep the attributes of a node.
    pub fn attr_ttl(&self, ino: u64) -> Duration {
        if self.open_nodes.is_mappable(ino) { Duration::ZERO } else { self.config.attr_ttl }
    }

    /// The entry of an object that was seen as `name` in `parent`; raises its lookup count.
    pub fn intern(&self, parent: u64, name: &[u8], attr: NodeAttr) -> NodeEntry {
        // The root can be seen below itself through a bind mount; it keeps its number.
        let ino = self.nodes.intern(Some((parent, name)), &attr);
        self.open_nodes.compare_cached(ino, &attr);
        if self.nodes.bytes() > self.config.inode_bytes {
            self.limit_alarm.raise();
        }
        self.node_entry(ino, attr)
    }

    /// Finds `name` in the directory `parent`, `.` and `..` included; `look` asks the source, and may open the file.
    pub fn lookup_by(
        &self,
        parent: u64,
        name: &[u8],
        caller: &FsCaller,
        look: impl Fn(NamePath<'_>, &Caller) -> Result<(NodeAttr, Option<Box<dyn WritableFile>>)>,
    ) -> FsResult<LookupOutcome<FoundEntry>> {
        if matches!(name, b"." | b"..") {
            return Ok(LookupOutcome::Found((self.lookup_handle(parent, name == b"..")?, None)));
        }
        match self.on_name(parent, name, caller, false, look) {
            Ok((attr, file)) => Ok(LookupOutcome::Found((self.intern(parent, name, attr), file))),
            Err(error) if error.errno() == libc::ENOENT => {
                if let Some(attr) = self.nodes.implied_attr(parent, name) {
                    return Ok(LookupOutcome::Found((self.intern(parent, name, attr), None)));
                }
                self.nodes.unbind(parent, name);
                Ok(LookupOutcome::Absent { ttl: self.config.negative_ttl })
            }
            Err(error) => Err(error),
        }
    }

    /// Attributes, and how long they are valid.
    pub fn getattr(&self, ino: u64, fh: Option<u64>, caller: &FsCaller) -> FsResult<(NodeAttr, Duration)> {
        let ttl = self.config.attr_ttl;
        if let Some(file) = fh.and_then(|fh| self.open_nodes.file(ino, fh).ok()) {
            let attr = file.file.stat()?;
            self.note_sent(ino, &attr);
            return Ok((attr, self.attr_ttl(ino)));
        }
        if let Some(known) = self.directory_attrs.find(ino, ttl) {
            return Ok(known);
        }
        let answer = self.on_node(ino, caller, false, |at, caller| self.source.stat(at, caller));
        let attr = self.or_open_object(ino, answer, |open| open.stat())?;
        self.note_sent(ino, &attr);
        Ok((attr, self.attr_ttl(ino)))
    }

    /// These attributes go to the kernel.
    pub fn note_sent(&self, ino: u64, attr: &NodeAttr) {
        self.nodes.note_sent(ino, attr);
        self.open_nodes.compare_cached(ino, attr);
    }

    /// `answer`, or that of an open file or directory of the node if it has lost its name. A directory that this mount has
    /// removed needs not be open.
    pub fn or_open_object<T>(
        &self,
        ino: u64,
        answer: FsResult<T>,
        op: impl Fn(&dyn WritableObject) -> Result<T>,
    ) -> FsResult<T> {
        let Err(error) = answer else { return answer };
        if !has_lost_name(&error) {
            return Err(error);
        }
        if let Some(open) = self.open_nodes.any_file(ino) {
            return Ok(op(&*open.file)?);
        }
        let removed = RemovedDirectory::find(&self.nodes, ino);
        let of_open = self.open_nodes.directories.find(|open| open.ino == ino).map(|open| op(&*open.directory));
        match (of_open, removed) {
            // Its node was lost with the last that led to it.
            (Some(Err(error)), Some(removed)) if errno_of(&error) == libc::ESTALE => Ok(op(&removed)?),
            (Some(answer), _) => Ok(answer?),
            (None, Some(removed)) => Ok(op(&removed)?),
            (None, None) => Err(error),
        }
    }

    /// The node of an open file keeps its number when the source has made another object of the file.
    pub fn follow_identity(&self, file: &OpenNodeFile) {
        if let Some(identity) = file.file.new_identity() {
            self.nodes.set_identity(file.ino, identity);
        }
    }
}

fn errno_of(error: &Error) -> i32 {
    match error.kind() {
        ErrorKind::Io(errno) => errno,
        _ => 0,
    }
}

/// Whether no path of the object leads to it any more.
pub(super) fn has_lost_name(error: &FsError) -> bool {
    matches!(error.errno(), libc::ENOENT | libc::ESTALE | libc::ENOTDIR)
}
