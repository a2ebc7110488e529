//! The writable file system against a model: calls drawn by a seed, as a kernel would make them, on a source in memory. The
//! model has objects and no paths; what the file system adds are paths, inode numbers and the owners of locks.
//! `SPURLINE_TEST_FS_SEEDS=10..500` runs other seeds, `SPURLINE_TEST_FS_STEPS` longer ones.

use crate::objects;
use objects::{
    MemorySource, NO_KERNEL, NoReads, ObjectTree, READ_WRITE, RENAME_EXCHANGE, ROOT_OBJECT, writable_config,
};
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::{
    CallerGroups, CreateMode, DirName, DirRead, FilePosition, FileService, FileWrite, FsCaller, HandleRef, LockRequest,
    LookupOutcome, NewNode, ROOT, RequestNumber, StatAttr,
};
use spurline_types::Stats;
use spurline_volume::ReadData;
use spurline_volume::locks::{KnownLock, KnownLocks};
use spurline_volume::writes::{AttrChange, FileLock, LockFamily, LockKind, LockRange, WritePlace};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const NAMES: [&[u8]; 4] = [b"a", b"b", b"c", b"d"];
const CALLER: FsCaller<'static> =
    FsCaller { uid: 0, gid: 0, pid: 0, umask: 0, groups: CallerGroups::Unknown, request: RequestNumber::NONE };

fn in_directory(parent: u64, name: &[u8]) -> DirName<'_> {
    DirName { parent, name }
}

fn bytes_at(offset: u64, data: &[u8]) -> FileWrite<'_> {
    FileWrite { offset, place: WritePlace::Offset, data, lose_privileges: false }
}

fn file_system() -> (WritableFileSystem, Arc<MemorySource>, Arc<Stats>) {
    let (source, stats) = (Arc::new(MemorySource::default()), Arc::new(Stats::default()));
    let config = writable_config(u64::MAX);
    let fs = WritableFileSystem::new(Arc::new(NoReads), Arc::clone(&source) as _, config, Arc::clone(&stats)).unwrap();
    (fs, source, stats)
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 33) as usize % limit
    }

    fn name(&mut self) -> &'static [u8] {
        NAMES[self.below(NAMES.len())]
    }
}

/// An open file of the kernel.
struct Handle {
    ino: u64,
    fh: u64,
    object: u64,
}

struct Model {
    fs: WritableFileSystem,
    source: Arc<MemorySource>,
    tree: ObjectTree,
    /// Inode numbers that the kernel has: the object and the references.
    known: BTreeMap<u64, (u64, u64)>,
    handles: Vec<Handle>,
    locks: HashMap<u64, KnownLocks>,
    /// Objects that the kernel forgot while they had several names: the names that it looks up later may be gone while
    /// others remain. A kernel would look up one of those before it uses the object.
    forgotten_links: BTreeSet<u64>,
    draw: Draw,
}

impl Model {
    /// The kernel got `ino` for `object`.
    fn refer(&mut self, ino: u64, object: u64, attr: &StatAttr) {
        assert_eq!(attr.ino, object);
        let same = self.known.iter().find(|(_, (known, _))| *known == object).map(|(ino, _)| *ino);
        assert!(same.is_none_or(|same| same == ino), "a known object has one number");
        let entry = self.known.entry(ino).or_insert((object, 0));
        assert_eq!(entry.0, object, "a known number stands for one object");
        entry.1 += 1;
    }

    fn any(&mut self) -> (u64, u64) {
        let at = self.draw.below(self.known.len());
        let (ino, (object, _)) = self.known.iter().nth(at).unwrap();
        (*ino, *object)
    }

    fn any_directory(&mut self) -> (u64, u64) {
        for _ in 0..8 {
            let (ino, object) = self.any();
            if self.tree.is_directory(object) {
                return (ino, object);
            }
        }
        (ROOT, ROOT_OBJECT)
    }

    /// Whether attributes are known: removed directories keep theirs.
    fn has_attributes(&self, object: u64) -> bool {
        self.is_reachable(object) || self.tree.is_directory(object)
    }

    /// A directory for a change. The kernel knows when it has removed one, and makes no requests in it.
    fn live_directory(&mut self) -> (u64, u64) {
        let found = self.any_directory();
        if self.tree.has_name(found.1) { found } else { (ROOT, ROOT_OBJECT) }
    }

    /// Whether the source can be asked about the object: by a name, or by an open file.
    fn is_reachable(&self, object: u64) -> bool {
        self.tree.has_name(object) || self.handles.iter().any(|handle| handle.object == object)
    }

    fn may_be_lost(&self, object: u64) -> bool {
        !self.is_reachable(object) || self.forgotten_links.contains(&object)
    }

    fn step(&mut self) {
        match self.draw.below(24) {
            0..=4 => self.lookup(),
            5 | 6 => self.create(),
            7 => self.mkdir(),
            8 => self.link(),
            9 | 10 => self.remove(),
            11..=13 => self.rename(),
            14 | 15 => self.open(),
            16 | 17 => self.transfer(),
            18 => self.attributes(),
            19 => self.close(),
            20 => self.forget(),
            21 => self.list(),
            _ => self.lock(),
        }
    }

    fn lookup(&mut self) {
        let ((parent, directory), name) = (self.any_directory(), self.draw.name());
        let wanted = self.tree.find(directory, name);
        match (self.fs.lookup(parent, name, &CALLER), wanted) {
            (Ok(LookupOutcome::Found(entry)), Ok(object)) => self.refer(entry.ino, object, &entry.attr),
            (Ok(LookupOutcome::Absent { .. }), Err(libc::ENOENT)) => {}
            (found, wanted) => panic!("{found:?} for {wanted:?}"),
        }
    }

    fn create(&mut self) {
        let ((parent, directory), name) = (self.live_directory(), self.draw.name());
        let exclusive = self.draw.below(2) == 0;
        let wanted = match self.tree.make(directory, name, false) {
            Err(libc::EEXIST) if !exclusive => self.tree.find(directory, name),
            made => made,
        };
        let wanted =
            wanted.and_then(|object| if self.tree.is_directory(object) { Err(libc::EISDIR) } else { Ok(object) });
        let flags = libc::O_RDWR | libc::O_CREAT | if exclusive { libc::O_EXCL } else { 0 };
        match (
            self.fs.create(parent, name, CreateMode { flags: flags as u32, ..READ_WRITE }, &CALLER, &NO_KERNEL),
            wanted,
        ) {
            (Ok((entry, opened)), Ok(object)) => {
                self.refer(entry.ino, object, &entry.attr);
                self.handles.push(Handle { ino: entry.ino, fh: opened.fh, object });
            }
            (Err(error), Err(errno)) => assert_eq!(error.errno(), errno),
            (made, wanted) => panic!("{:?} for {wanted:?}", made.map(|(entry, _)| entry)),
        }
    }

    fn mkdir(&mut self) {
        let ((parent, directory), name) = (self.live_directory(), self.draw.name());
        let wanted = self.tree.make(directory, name, true);
        match (self.fs.make(parent, name, NewNode::Directory { mode: 0o755 }, &CALLER), wanted) {
            (Ok(entry), Ok(object)) => self.refer(entry.ino, object, &entry.attr),
            (Err(error), Err(errno)) => assert_eq!(error.errno(), errno),
            (made, wanted) => panic!("{made:?} for {wanted:?}"),
        }
    }

    fn link(&mut self) {
        let ((ino, object), (parent, directory), name) = (self.any(), self.live_directory(), self.draw.name());
        if !self.tree.has_name(object) {
            return;
        }
        let wanted = self.tree.link(object, directory, name);
        match (self.fs.link(ino, parent, name, &CALLER), wanted) {
            (Ok(entry), Ok(object)) => self.refer(entry.ino, object, &entry.attr),
            (Err(error), Err(errno)) => assert_eq!(error.errno(), errno),
            (made, wanted) => panic!("{made:?} for {wanted:?}"),
        }
    }

    fn remove(&mut self) {
        let ((parent, directory), name) = (self.live_directory(), self.draw.name());
        let is_directory = self.draw.below(2) == 0;
        let wanted = self.tree.remove(directory, name, is_directory);
        let removed = self.fs.remove(parent, name, is_directory, &CALLER).map_err(|error| error.errno());
        assert_eq!(removed, wanted);
    }

    fn rename(&mut self) {
        let (from, to) = (self.live_directory(), self.live_directory());
        let (old, new) = (self.draw.name(), self.draw.name());
        let flags = [0, 0, 1, RENAME_EXCHANGE][self.draw.below(4)];
        let wanted = self.tree.rename((from.1, old), (to.1, new), flags);
        let renamed = self
            .fs
            .rename(in_directory(from.0, old), in_directory(to.0, new), flags, &CALLER)
            .map_err(|error| error.errno());
        assert_eq!(renamed, wanted);
    }

    fn open(&mut self) {
        let (ino, object) = self.any();
        if self.tree.is_directory(object) || self.handles.len() > 20 {
            return;
        }
        let truncate = self.draw.below(4) == 0 && self.tree.has_name(object);
        let flags = libc::O_RDWR | if truncate { libc::O_TRUNC } else { 0 };
        match self.fs.open(ino, flags as u32, &CALLER, &NO_KERNEL) {
            Ok(opened) => {
                assert!(self.is_reachable(object));
                if truncate {
                    self.tree.truncate(object, 0).unwrap();
                }
                self.handles.push(Handle { ino, fh: opened.fh, object });
            }
            Err(error) => {
                assert!(matches!(error.errno(), libc::ENOENT | libc::ESTALE) && self.may_be_lost(object), "{error}");
            }
        }
    }

    fn pick_handle(&mut self) -> Option<(u64, u64, u64)> {
        (!self.handles.is_empty()).then(|| {
            let at = self.draw.below(self.handles.len());
            let Handle { ino, fh, object } = self.handles[at];
            (ino, fh, object)
        })
    }

    fn transfer(&mut self) {
        let Some((ino, fh, object)) = self.pick_handle() else { return };
        let (offset, len) = (self.draw.below(3000) as u64, self.draw.below(2000) + 1);
        if self.draw.below(2) == 0 {
            let data: Vec<u8> = (0..len).map(|_| self.draw.below(256) as u8).collect();
            assert_eq!(self.fs.write(HandleRef { ino, fh }, &bytes_at(offset, &data), &CALLER).unwrap(), len);
            self.tree.write(object, offset, &data).unwrap();
        } else {
            let mut read = vec![0; len];
            let ReadData::Copied(n) = self.fs.read(HandleRef { ino, fh }, offset, &mut read).unwrap() else {
                panic!("the source has no cached bytes");
            };
            assert_eq!(&read[..n], self.tree.read(object, offset, len).unwrap());
        }
    }

    fn attributes(&mut self) {
        let (ino, object) = self.any();
        let fh = self.handles.iter().find(|handle| handle.ino == ino && handle.fh % 2 == 0).map(|handle| handle.fh);
        let set = (self.draw.below(2) == 0 && !self.tree.is_directory(object)).then(|| self.draw.below(4000) as u64);
        let answer = match set {
            Some(len) => {
                let set = AttrChange { size: Some(len), ..AttrChange::default() };
                self.fs.setattr(ino, fh, &set, &CALLER)
            }
            None => self.fs.getattr(ino, fh, &CALLER),
        };
        match answer {
            Ok((attr, _)) => {
                assert!(self.has_attributes(object));
                if let Some(len) = set {
                    self.tree.truncate(object, len).unwrap();
                }
                let wanted = self.tree.attr(object);
                assert_eq!((attr.ino, attr.size, attr.nlink), (wanted.inode, wanted.size, wanted.nlink));
            }
            Err(error) => {
                assert!(!self.tree.is_directory(object), "{error}");
                assert!(matches!(error.errno(), libc::ENOENT | libc::ESTALE) && self.may_be_lost(object), "{error}");
            }
        }
    }

    fn close(&mut self) {
        if self.handles.is_empty() {
            return;
        }
        let at = self.draw.below(self.handles.len());
        let Handle { ino, fh, object } = self.handles.swap_remove(at);
        // Every process that has it closes its descriptor before the file is released, and so loses its locks.
        for owner in 0..3 {
            self.fs.flush(HandleRef { ino, fh }, owner, &CALLER).unwrap();
        }
        self.fs.release(fh).unwrap();
        let known = self.locks.entry(object).or_default();
        let posix = (0..3).map(|owner| lock(LockFamily::Posix, owner, 0..0, LockKind::Read));
        let gone = posix.chain([lock(LockFamily::Flock, fh, 0..0, LockKind::Read)]);
        gone.for_each(|lock| known.remove_owner(lock.owner()));
    }

    fn forget(&mut self) {
        let (ino, _) = self.any();
        if ino == ROOT || self.handles.iter().any(|handle| handle.ino == ino) {
            return;
        }
        let all = self.known[&ino].1;
        let n = self.draw.below(all as usize) as u64 + 1;
        self.fs.forget(ino, n);
        match n == all {
            true => {
                let object = self.known.remove(&ino).unwrap().0;
                if self.tree.has_name(object) && !self.tree.is_directory(object) && self.tree.attr(object).nlink > 1 {
                    self.forgotten_links.insert(object);
                }
            }
            false => self.known.get_mut(&ino).unwrap().1 -= n,
        }
    }

    fn list(&mut self) {
        let ((ino, directory), plus) = (self.any_directory(), self.draw.below(2) == 0);
        let fh = self.fs.opendir(ino, &CALLER).unwrap();
        let (mut names, mut entries) = (Vec::new(), Vec::new());
        let (max, room) = (1 + self.draw.below(4), self.draw.below(5));
        let mut at = 0;
        loop {
            let (before, mut left) = (at, room + 1);
            let read = DirRead { directory: HandleRef { ino, fh }, from: at, names_max: max, plus };
            self.fs
                .readdir(&read, &CALLER, &mut |listed| {
                    if left == 0 {
                        return false;
                    }
                    (left, at) = (left - 1, listed.next);
                    names.push((listed.name.to_vec(), listed.ino));
                    entries.extend(listed.entry.map(|entry| (entry, listed.ino)));
                    true
                })
                .unwrap();
            if at == before {
                break;
            }
        }
        self.fs.releasedir(fh).unwrap();
        let wanted = if self.tree.has_name(directory) { self.tree.list(directory).unwrap() } else { Vec::new() };
        assert_eq!(names, wanted);
        assert_eq!(entries.len(), if plus { names.len() } else { 0 });
        entries.iter().for_each(|(entry, object)| self.refer(entry.ino, *object, &entry.attr));
    }

    fn lock(&mut self) {
        let Some((ino, fh, object)) = self.pick_handle() else { return };
        let (start, len) = (self.draw.below(20) as u64, self.draw.below(20) as u64);
        let kind = [LockKind::Read, LockKind::Write, LockKind::Unlock][self.draw.below(3)];
        let lock = match self.draw.below(4) {
            0 => lock(LockFamily::Flock, fh, 0..0, kind),
            _ => lock(LockFamily::Posix, self.draw.below(3) as u64, start..start + len, kind),
        };
        let known = self.locks.entry(object).or_default();
        let conflict = known.find_conflict(&lock);
        if lock.family == LockFamily::Posix && kind != LockKind::Unlock && self.draw.below(3) == 0 {
            let found = self.fs.test_lock(HandleRef { ino, fh }, &lock, 1, &NO_KERNEL).unwrap();
            assert_eq!(found.is_some(), conflict.is_some());
            return;
        }
        let request = LockRequest { lock, pid: 7, number: 1 };
        match self.fs.set_lock(HandleRef { ino, fh }, &request, false, &CALLER, &NO_KERNEL) {
            Ok(()) => {
                assert!(conflict.is_none(), "{lock:?} got past {conflict:?}");
                known.set_range(KnownLock { lock, pid: 0 });
            }
            Err(error) => assert!(error.errno() == libc::EAGAIN && conflict.is_some(), "{lock:?}: {error}"),
        }
    }
}

fn lock(family: LockFamily, owner: u64, range: std::ops::Range<u64>, kind: LockKind) -> FileLock {
    FileLock { family, owner, range: LockRange { start: range.start, end: range.end }, kind }
}

fn run(seed: u64, steps: usize) {
    let (fs, source, stats) = file_system();
    let (known, handles, locks) = (BTreeMap::from([(ROOT, (ROOT_OBJECT, 1))]), Vec::new(), HashMap::new());
    let draw = Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let (tree, forgotten_links) = (ObjectTree::default(), BTreeSet::new());
    let mut model = Model { fs, source, tree, known, handles, locks, forgotten_links, draw };
    for step in 0..steps {
        let stepped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.step()));
        stepped.unwrap_or_else(|_| panic!("seed {seed}, step {step}: SPURLINE_TEST_FS_SEEDS={seed}..{}", seed + 1));
    }
    // Nothing is left when the kernel has forgotten everything.
    for handle in model.handles.drain(..) {
        model.fs.release(handle.fh).unwrap();
    }
    assert!(model.source.locks.lock().values().all(KnownLocks::is_empty), "seed {seed}");
    for (ino, (_, references)) in model.known.iter().filter(|(ino, _)| **ino != ROOT) {
        model.fs.forget(*ino, *references);
    }
    let left = (model.fs.known_inodes(), stats.fuse.inodes.get(), stats.fuse.inode_bytes.get());
    assert_eq!((left, stats.fuse.open_handles.get()), ((1, 1, 0), 0), "seed {seed}");
}

#[test]
fn the_file_system_agrees_with_a_model_without_paths() {
    let from_environment = |name| std::env::var(name).ok();
    let seeds = from_environment("SPURLINE_TEST_FS_SEEDS").unwrap_or("0..40".into());
    let (first, last) = seeds.split_once("..").expect("SPURLINE_TEST_FS_SEEDS is FIRST..LAST");
    let steps = from_environment("SPURLINE_TEST_FS_STEPS").map_or(2000, |steps| steps.parse().unwrap());
    (first.parse().unwrap()..last.parse().unwrap()).for_each(|seed| run(seed, steps));
}

/// Directories are renamed to and fro above files that are used: no call sees a moment without a name.
#[test]
fn renames_of_directories_are_hidden_from_calls_below_them() {
    let (fs, _, _) = file_system();
    let directory =
        |parent, name: &[u8]| fs.make(parent, name, NewNode::Directory { mode: 0o755 }, &CALLER).unwrap().ino;
    let tops = [directory(ROOT, b"x"), directory(ROOT, b"y")];
    let moved = directory(tops[0], b"moved");
    let below = directory(moved, b"below");
    let (file, opened) = fs.create(below, b"file", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..3000 {
                let (from, to) = (tops[n % 2], tops[(n + 1) % 2]);
                fs.rename(in_directory(from, b"moved"), in_directory(to, b"moved"), 0, &CALLER).unwrap();
            }
            stop.store(true, Ordering::Release);
        });
        for thread in 0..2 {
            let (fs, stop, opened) = (&fs, &stop, &opened);
            scope.spawn(move || {
                let own = [b'n', b'0' + thread];
                while !stop.load(Ordering::Acquire) {
                    assert_eq!(fs.getattr(file.ino, None, &CALLER).unwrap().0.ino, file.attr.ino);
                    assert!(matches!(fs.lookup(below, b"file", &CALLER).unwrap(), LookupOutcome::Found(_)));
                    fs.write(HandleRef { ino: file.ino, fh: opened.fh }, &bytes_at(0, b"x"), &CALLER).unwrap();
                    let made = fs.make(below, &own, NewNode::Node { mode: libc::S_IFREG, rdev: 0 }, &CALLER).unwrap();
                    fs.remove(below, &own, false, &CALLER).unwrap();
                    fs.forget(made.ino, 1);
                }
            });
        }
    });
}

/// Each call has the errno of its manual page, before the source gets it. Other calls that begin alike are made.
#[test]
fn what_a_source_cannot_do_is_refused() {
    let source = Arc::new(MemorySource { directories_stay: true, ..MemorySource::default() });
    let config = writable_config(u64::MAX);
    let fs = WritableFileSystem::new(Arc::new(NoReads), source, config, Arc::default()).unwrap();
    let errno = |answer: Result<(), spurline_fs::FsError>| answer.err().map(|error| error.errno());
    let link = fs.make(ROOT, b"link", NewNode::Symlink { target: b"file" }, &CALLER).map(drop);
    assert_eq!(errno(link), Some(libc::EPERM));
    fs.make(ROOT, b"folder", NewNode::Directory { mode: 0o755 }, &CALLER).unwrap();
    assert_eq!(
        errno(fs.rename(in_directory(ROOT, b"folder"), in_directory(ROOT, b"other"), 0, &CALLER)),
        Some(libc::EXDEV)
    );
    let (file, opened) = fs.create(ROOT, b"file", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    let exchange = fs.rename(in_directory(ROOT, b"file"), in_directory(ROOT, b"folder"), RENAME_EXCHANGE, &CALLER);
    assert_eq!(errno(exchange), Some(libc::EXDEV));
    assert_eq!(errno(fs.rename(in_directory(ROOT, b"file"), in_directory(ROOT, b"other"), 0, &CALLER)), None);
    assert_eq!(errno(fs.setxattr(file.ino, b"user.a", b"1", 0, &CALLER)), Some(libc::EOPNOTSUPP));
    assert_eq!(errno(fs.getxattr(file.ino, b"user.a", &CALLER).map(drop)), Some(libc::EOPNOTSUPP));
    let position = |offset| FilePosition { file: HandleRef { ino: file.ino, fh: opened.fh }, offset };
    assert_eq!(errno(fs.lseek(position(0).file, 0, libc::SEEK_HOLE as u32).map(drop)), Some(libc::EINVAL));
    let copied = fs.copy_file_range(position(0), position(9), 1, &CALLER);
    assert_eq!(errno(copied.map(drop)), Some(libc::EOPNOTSUPP));
    // Programs that copy files need success.
    let set = AttrChange { mode: Some(0o600), uid: Some(7), size: Some(5), ..AttrChange::default() };
    assert_eq!(fs.setattr(file.ino, None, &set, &CALLER).unwrap().0.size, 5);
}
