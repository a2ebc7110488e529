//! The file system of a writable mount: inodes that keep their number while their bytes change, handles, and the
//! operations of POSIX, over a [`WritableVolume`]. It knows neither FUSE nor the source.
//!
//! The source decides what is permitted and what an operation does; this module keeps names, numbers and handles in
//! step with it. A path that moved while it was used is resolved again.

mod change;
mod directory_attrs;
mod groups;
mod kernel_view;
mod life;
mod limit;
mod locks;
mod nodes;
mod open;
mod opener;
mod recall;
mod removed;
mod service;
mod version_reads;

use crate::attr::LookupOutcome;
use crate::block_reads::{BlockReads, ReadAheadLimits};
use crate::errno::{FsError, FsResult, errno_error};
use crate::handle::HandleTable;
use crate::inode_limit::LimitAlarm;
use crate::service::{CallerGroups, FsCaller};
use directory_attrs::DirectoryAttrs;
use groups::CallerRights;
use kernel_view::KernelRefreshes;
use life::MountRecords;
use locks::LockTable;
use nodes::NodeTable;
use open::{OpenNode, OpenNodeDirectory, OpenNodeFile};
use parking_lot::Mutex;
use removed::RemovedDirectory;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_volume::Volume;
use spurline_volume::capabilities::WriteCapabilities;
use spurline_volume::writes::{
    Caller, FileIdentity, NamePath, NodeAttr, NodePath, S_IFDIR, S_IFMT, WritableObject, WritableVolume,
};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};
use version_reads::CacheEvents;

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
pub struct NodeEntry {
    /// The inode's number for the kernel.
    pub ino: u64,
    /// The source's attributes.
    pub attr: NodeAttr,
    /// How long the name is valid.
    pub entry_ttl: Duration,
    /// How long the attributes are valid.
    pub attr_ttl: Duration,
}

/// The result of a lookup.
pub type NodeLookup = LookupOutcome<NodeEntry>;

/// A volume mounted for changes. Every call may be made from any thread.
pub struct WritableFileSystem {
    // Field order is drop order: open handles release their backing files first.
    files: HandleTable<OpenNodeFile>,
    directories: HandleTable<OpenNodeDirectory>,
    opens: Mutex<HashMap<u64, Arc<OpenNode>>>,
    /// Open files whose times can move without a request.
    mappable_opens: AtomicU64,
    nodes: Arc<NodeTable>,
    directory_attrs: DirectoryAttrs,
    locks: Arc<LockTable>,
    refreshes: KernelRefreshes,
    cache_events: CacheEvents,
    limit_alarm: LimitAlarm,
    source: Arc<dyn WritableVolume>,
    volume: Arc<dyn Volume>,
    reads: BlockReads,
    started: Instant,
    config: WritableConfig,
    stats: Arc<Stats>,
    root: FileIdentity,
    /// What the source can do: other calls are refused here.
    can: WriteCapabilities,
    direct_writes: AtomicBool,
    /// An NFS server serves the files.
    exported: AtomicBool,
    /// What outlives this process, of a mount that does.
    life: OnceLock<MountRecords>,
}

impl WritableFileSystem {
    /// Closes everything that is open, after the last request.
    fn close_all(&self) {
        self.files.clear();
        self.directories.clear();
    }

    /// A file system over the changing side of `volume`.
    ///
    /// # Errors
    /// The source's errno for its root.
    pub fn new(
        volume: Arc<dyn Volume>,
        source: Arc<dyn WritableVolume>,
        config: WritableConfig,
        stats: Arc<Stats>,
    ) -> FsResult<Self> {
        let (uid, gid) = config.owner;
        let own = Caller { uid, gid, ..Caller::default() };
        let root = source.stat(NodePath { path: b"", expected: None }, &own)?.identity;
        if config.inode_bytes < u64::MAX {
            stats.fuse.inode_limit_bytes.set(config.inode_bytes);
        }
        let can = source.capabilities();
        let nodes = Arc::new(NodeTable::new(root, Arc::clone(&stats)));
        let limits = ReadAheadLimits { of_reader: config.max_readahead, of_all: config.readahead_budget };
        let names: Weak<NodeTable> = Arc::downgrade(&nodes);
        source.use_names(names);
        Ok(WritableFileSystem {
            files: HandleTable::new(),
            directories: HandleTable::new(),
            opens: Mutex::default(),
            mappable_opens: AtomicU64::new(0),
            nodes,
            directory_attrs: DirectoryAttrs::default(),
            locks: Arc::default(),
            refreshes: KernelRefreshes::default(),
            cache_events: CacheEvents::default(),
            limit_alarm: LimitAlarm::default(),
            source,
            reads: BlockReads::new(Arc::clone(&volume), limits),
            started: Instant::now(),
            volume,
            config,
            stats,
            root,
            can,
            direct_writes: AtomicBool::new(false),
            exported: AtomicBool::new(false),
            life: OnceLock::new(),
        })
    }

    /// The number of inodes referenced by the kernel, the root included.
    pub fn known_inodes(&self) -> usize {
        self.nodes.len()
    }

    /// The path of an inode in quotes, for the log.
    fn logged_path(&self, ino: u64) -> String {
        match self.nodes.resolve(ino) {
            Some(node) => format!("'/{}'", String::from_utf8_lossy(&node.path)),
            None => "an object without a name".to_owned(),
        }
    }

    /// Distinguishes inodes of the kernel that have the same number; the same in every mount of the source.
    fn generation(&self, ino: u64, identity: &FileIdentity) -> u64 {
        match *identity == self.root {
            true => 0,
            false if self.can.publishes => nodes::generation_of_number(ino),
            false => self.nodes.generation(ino, identity),
        }
    }

    /// Runs `op` as the caller. The groups that a kernel does not say are read from the system only where they can matter:
    /// reading them costs as much as a small request. The kernel has already checked permissions with all groups; so without
    /// them a call can only fail, and is then made again. The one group that decides about a new object comes with its
    /// request from Linux 6.3 on. The kernel's NFS server has no groups to read; what the kernel has permitted to it holds.
    fn as_caller<T>(&self, caller: &FsCaller<'_>, groups_decide: bool, op: impl Fn(&Caller) -> Result<T>) -> Result<T> {
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
        match groups::rights_of(caller.pid) {
            CallerRights::Groups(groups) => caller.groups = groups,
            CallerRights::NfsServer => caller.rights_checked = self.config.kernel_checks,
        }
        caller.rights_checked || !caller.groups.is_empty()
    }

    /// Runs `op` on the object of a node, again when its path moved meanwhile. A path that leads nowhere is stale: the kernel
    /// then looks its names up again.
    fn on_node<T>(
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
    fn on_name<T>(
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
    fn while_moving<T>(&self, own: u64, attempt: impl Fn() -> FsResult<T>) -> FsResult<T> {
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
    fn missing(&self, ino: u64) -> FsError {
        match self.nodes.contains(ino) {
            true => errno_error(libc::ENOENT, "the object has no name any more"),
            false => FsError::Stale(ino),
        }
    }

    fn node_entry(&self, ino: u64, attr: NodeAttr) -> NodeEntry {
        let config = &self.config;
        let entry_ttl = if attr.mode & S_IFMT == S_IFDIR { config.dir_entry_ttl } else { config.entry_ttl };
        NodeEntry { ino, attr, entry_ttl, attr_ttl: self.attr_ttl(ino) }
    }

    /// The entry of an object that was seen as `name` in `parent`; raises its lookup count.
    fn intern(&self, parent: u64, name: &[u8], attr: NodeAttr) -> NodeEntry {
        // The root can be seen below itself through a bind mount; it keeps its number.
        let ino = self.nodes.intern(Some((parent, name)), &attr);
        self.compare_cached(ino, &attr);
        if self.nodes.bytes() > self.config.inode_bytes {
            self.limit_alarm.raise();
        }
        self.node_entry(ino, attr)
    }

    /// Finds `name` in the directory `parent`, `.` and `..` included.
    ///
    /// # Errors
    /// `Stale` for a forgotten directory; the source's errno.
    fn lookup(&self, parent: u64, name: &[u8], caller: &FsCaller) -> FsResult<NodeLookup> {
        if matches!(name, b"." | b"..") {
            return self.lookup_handle(parent, name == b"..").map(NodeLookup::Found);
        }
        match self.on_name(parent, name, caller, false, |at, caller| self.source.lookup(at, caller)) {
            Ok(attr) => Ok(NodeLookup::Found(self.intern(parent, name, attr))),
            Err(error) if error.errno() == libc::ENOENT => {
                if let Some(attr) = self.nodes.implied_attr(parent, name) {
                    return Ok(NodeLookup::Found(self.intern(parent, name, attr)));
                }
                self.nodes.unbind(parent, name);
                Ok(NodeLookup::Absent { ttl: self.config.negative_ttl })
            }
            Err(error) => Err(error),
        }
    }

    /// Lowers the lookup count of `ino` by `n`.
    fn forget(&self, ino: u64, n: u64) {
        self.nodes.forget(ino, n);
    }

    /// Attributes, and how long they are valid.
    ///
    /// # Errors
    /// The source's errno.
    fn getattr(&self, ino: u64, fh: Option<u64>, caller: &FsCaller) -> FsResult<(NodeAttr, Duration)> {
        let ttl = self.config.attr_ttl;
        if let Some(file) = fh.and_then(|fh| self.files.get(fh)).filter(|file| file.ino == ino) {
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
    fn note_sent(&self, ino: u64, attr: &NodeAttr) {
        self.nodes.note_sent(ino, attr);
        self.compare_cached(ino, attr);
    }

    /// `answer`, or that of an open file or directory of the node if it has lost its name. A directory that this mount has
    /// removed needs not be open.
    fn or_open_object<T>(
        &self,
        ino: u64,
        answer: FsResult<T>,
        op: impl Fn(&dyn WritableObject) -> Result<T>,
    ) -> FsResult<T> {
        let Err(error) = answer else { return answer };
        if !has_lost_name(&error) {
            return Err(error);
        }
        if let Some(open) = self.open_file_of(ino) {
            return Ok(op(&*open.file)?);
        }
        let removed = RemovedDirectory::find(&self.nodes, ino);
        let of_open = self.directories.find(|open| open.ino == ino).map(|open| op(&*open.directory));
        match (of_open, removed) {
            // Its node was lost with the last that led to it.
            (Some(Err(error)), Some(removed)) if errno_of(&error) == libc::ESTALE => Ok(op(&removed)?),
            (Some(answer), _) => Ok(answer?),
            (None, Some(removed)) => Ok(op(&removed)?),
            (None, None) => Err(error),
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
fn has_lost_name(error: &FsError) -> bool {
    matches!(error.errno(), libc::ENOENT | libc::ESTALE | libc::ENOTDIR)
}
