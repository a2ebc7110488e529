//! A writable file system that continues with what another has kept: each request that comes again is made once, whether or not
//! the result of the first attempt was noted.

use crate::objects;
use objects::{NO_KERNEL, NoReads, writable_config};
use parking_lot::Mutex;
use spurline_directory::WritableSource;
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::*;
use spurline_types::Stats;
use spurline_volume::kept_files::{KeptFileKey, KeptFiles};
use spurline_volume::writes::{FileLock, LockFamily, LockKind, LockRange, WritePlace};
use std::collections::HashMap;
use std::fs;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

/// Records and descriptors that outlive a file system.
#[derive(Default)]
struct Keeper {
    records: Mutex<Vec<Option<OwnedRecord>>>,
    changes: Mutex<HashMap<u64, KeptChange>>,
    /// As if the process ended between a change and the note of its result: nothing is kept from then on.
    loses_result: AtomicBool,
    has_ended: AtomicBool,
    files: Mutex<HashMap<KeptFileKey, OwnedFd>>,
}

#[derive(Clone)]
enum OwnedRecord {
    Node(KeptNode),
    Name { ino: u64, parent: u64, name: Vec<u8> },
    Handle(KeptHandle),
    Lock(KeptLock),
}

impl OwnedRecord {
    fn order(&self) -> u32 {
        match self {
            OwnedRecord::Node(_) => 0,
            OwnedRecord::Name { .. } => 1,
            OwnedRecord::Handle(_) => 2,
            OwnedRecord::Lock(_) => 3,
        }
    }
}

impl Keeper {
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }
}

impl KeptRecords for Keeper {
    fn keep(&self, record: &KeptRecord<'_>) -> RecordSlot {
        if self.has_ended() {
            return 0;
        }
        let owned = match *record {
            KeptRecord::Node(node) => OwnedRecord::Node(node),
            KeptRecord::Name(KeptName { ino, parent, name }) => OwnedRecord::Name { ino, parent, name: name.to_vec() },
            KeptRecord::Handle(handle) => OwnedRecord::Handle(handle),
            KeptRecord::Lock(lock) => OwnedRecord::Lock(lock),
            KeptRecord::Inode(_) | KeptRecord::Change(_) => panic!("{record:?}"),
        };
        let mut records = self.records.lock();
        records.push(Some(owned));
        records.len() as RecordSlot
    }

    fn add_lookup(&self, slot: RecordSlot) {
        if let Some(Some(OwnedRecord::Node(node))) = self.records.lock().get_mut((slot as usize).wrapping_sub(1)) {
            node.lookups += 1;
        }
    }

    fn sub_lookups(&self, slot: RecordSlot, n: u64) {
        if let Some(Some(OwnedRecord::Node(node))) = self.records.lock().get_mut((slot as usize).wrapping_sub(1)) {
            node.lookups = node.lookups.saturating_sub(n);
        }
    }

    fn note_closing(&self, _slot: RecordSlot) {}

    fn remove_record(&self, slot: RecordSlot) {
        if slot > 0 && slot < RecordSlot::MAX && !self.has_ended() {
            self.records.lock()[slot as usize - 1] = None;
        }
    }

    fn for_each(&self, visit: &mut dyn FnMut(RecordSlot, &KeptRecord<'_>)) {
        let all = self.records.lock().clone();
        for order in 0..4 {
            for (at, record) in all.iter().enumerate() {
                let slot = at as RecordSlot + 1;
                match record.as_ref().filter(|record| record.order() == order) {
                    None => {}
                    Some(OwnedRecord::Node(node)) => visit(slot, &KeptRecord::Node(*node)),
                    Some(OwnedRecord::Name { ino, parent, name }) => {
                        visit(slot, &KeptRecord::Name(KeptName { ino: *ino, parent: *parent, name }));
                    }
                    Some(OwnedRecord::Handle(handle)) => visit(slot, &KeptRecord::Handle(*handle)),
                    Some(OwnedRecord::Lock(lock)) => visit(slot, &KeptRecord::Lock(*lock)),
                }
            }
        }
        let changes = self.changes.lock().clone();
        changes.values().for_each(|change| visit(RecordSlot::MAX, &KeptRecord::Change(*change)));
    }

    fn note_change(&self, change: &KeptChange) {
        if self.loses_result.load(Ordering::Relaxed) && change.made.is_some() {
            self.has_ended.store(true, Ordering::Relaxed);
        }
        if self.has_ended() {
            return;
        }
        let mut changes = self.changes.lock();
        changes.entry(change.request).or_insert(*change).made = change.made;
    }
}

impl KeptFiles for Keeper {
    fn keep_file(&self, key: KeptFileKey, file: BorrowedFd<'_>) {
        if self.has_ended() {
            return;
        }
        self.files.lock().insert(key, file.try_clone_to_owned().unwrap());
    }

    fn drop_file(&self, key: KeptFileKey) {
        if !self.has_ended() {
            self.files.lock().remove(&key);
        }
    }

    fn take_file(&self, key: KeptFileKey) -> Option<OwnedFd> {
        self.files.lock().get(&key).map(|file| file.try_clone().unwrap())
    }

    fn drop_untaken(&self) {}
}

/// A process of a mount, and all before it.
struct Life<'a> {
    origin: &'a Path,
    keeper: Arc<Keeper>,
    takeovers: u64,
    fs: WritableFileSystem,
    requests: u64,
    loses_results: bool,
}

fn begin(origin: &Path, keeper: &Arc<Keeper>, takeovers: u64) -> WritableFileSystem {
    let source = WritableSource::open(origin, None).unwrap();
    let fs = WritableFileSystem::new(Arc::new(NoReads), source, writable_config(u64::MAX), Arc::<Stats>::default());
    let fs = fs.unwrap();
    let life = KeptLife {
        records: Arc::clone(keeper) as _,
        files: Some(Arc::clone(keeper) as _),
        takeovers,
        ended_at: SystemTime::now(),
        register: None,
    };
    assert!(fs.keep_life(&life));
    fs
}

impl<'a> Life<'a> {
    fn new(origin: &'a Path, loses_results: bool) -> Life<'a> {
        let keeper = Arc::<Keeper>::default();
        let fs = begin(origin, &keeper, 0);
        Life { origin, keeper, takeovers: 0, fs, requests: 0, loses_results }
    }

    /// The process ends, and another goes on.
    fn end(&mut self) {
        self.takeovers += 1;
        self.keeper.loses_result.store(false, Ordering::Relaxed);
        self.keeper.has_ended.store(false, Ordering::Relaxed);
        let next = begin(self.origin, &self.keeper, self.takeovers);
        // A process that is killed closes and unlocks nothing by itself.
        std::mem::forget(std::mem::replace(&mut self.fs, next));
    }

    /// Makes a request that the process does not answer, and again in the next process.
    fn twice<T>(&mut self, call: impl Fn(&WritableFileSystem, &FsCaller<'_>) -> FsResult<T>) -> (T, T) {
        self.requests += 1;
        self.keeper.loses_result.store(self.loses_results, Ordering::Relaxed);
        let first = call(&self.fs, &request(self.requests, false)).unwrap();
        self.end();
        (first, call(&self.fs, &request(self.requests, true)).unwrap())
    }
}

fn request(number: u64, repeated: bool) -> FsCaller<'static> {
    FsCaller { request: RequestNumber { number, repeated }, ..FsCaller::default() }
}

fn name(name: &str) -> DirName<'_> {
    DirName { parent: ROOT, name: name.as_bytes() }
}

fn handle_of(made: &(FileEntry, OpenedFile)) -> HandleRef {
    HandleRef { ino: made.0.ino, fh: made.1.fh }
}

fn write(text: &str, place: WritePlace) -> FileWrite<'_> {
    FileWrite { offset: 0, place, data: text.as_bytes(), lose_privileges: false }
}

const EXCLUSIVE: u32 = (libc::O_CREAT | libc::O_EXCL | libc::O_RDWR) as u32;

fn exclusive(mode: u32) -> CreateMode {
    CreateMode { flags: EXCLUSIVE, mode }
}

#[test]
fn names_are_changed_once() {
    for loses_results in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let mut life = Life::new(at, loses_results);
        let (first, again) = life.twice(|fs, caller| fs.create(ROOT, b"a", exclusive(0o400), caller, &NO_KERNEL));
        assert_eq!(first.0.ino, again.0.ino);
        assert_eq!(first.1.fh == again.1.fh, !loses_results, "without a record the file is opened again");
        let ino = first.0.ino;
        let directory = NewNode::Directory { mode: 0o755 };
        let (first, again) = life.twice(|fs, caller| fs.make(ROOT, b"d", directory, caller));
        assert_eq!((first.ino, first.attr.ino), (again.ino, again.attr.ino));
        life.twice(|fs, caller| fs.make(first.ino, b"s", NewNode::Symlink { target: b"target" }, caller));
        life.twice(|fs, caller| fs.link(ino, ROOT, b"b", caller));
        life.twice(|fs, caller| fs.rename(name("a"), name("c"), 0, caller));
        life.twice(|fs, caller| fs.rename(name("b"), name("c"), 2, caller));
        life.twice(|fs, caller| fs.remove(ROOT, b"b", false, caller));
        life.twice(|fs, caller| fs.rename(name("d"), name("e"), 0, caller));
        life.twice(|fs, caller| fs.remove(first.ino, b"s", false, caller));
        life.twice(|fs, caller| fs.remove(ROOT, b"e", true, caller));
        let left: Vec<_> = fs::read_dir(at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["c"], "{loses_results}");
        // What another program has made is found, and not taken for the own.
        fs::write(at.join("other"), "text").unwrap();
        let refused = life.fs.create(ROOT, b"other", exclusive(0o600), &request(1000, true), &NO_KERNEL).err().unwrap();
        assert_eq!(refused.errno(), libc::EEXIST);
    }
}

#[test]
fn an_append_is_made_once_also_when_a_part_was_made() {
    for loses_results in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let mut life = Life::new(folder.path(), loses_results);
        let flags = EXCLUSIVE | libc::O_APPEND as u32;
        let how = CreateMode { flags, mode: 0o600 };
        let file = handle_of(&life.twice(|fs, caller| fs.create(ROOT, b"log", how, caller, &NO_KERNEL)).1);
        for record in ["first ", "second ", "second "] {
            let (first, again) = life.twice(|fs, caller| fs.write(file, &write(record, WritePlace::End), caller));
            assert_eq!((first, again), (record.len(), record.len()));
        }
        if loses_results {
            // A kill within the system call has written a part.
            life.requests += 1;
            let before = fs::metadata(folder.path().join("log")).unwrap().len();
            life.keeper.note_change(&KeptChange { request: life.requests, before, ..KeptChange::default() });
            fs::write(folder.path().join("log"), "first second second thi").unwrap();
            life.end();
            let caller = request(life.requests, true);
            assert_eq!(life.fs.write(file, &write("third ", WritePlace::End), &caller).unwrap(), 6);
        } else {
            life.twice(|fs, caller| fs.write(file, &write("third ", WritePlace::End), caller));
        }
        assert_eq!(fs::read_to_string(folder.path().join("log")).unwrap(), "first second second third ");
    }
}

#[test]
fn open_files_and_locks_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut life = Life::new(folder.path(), false);
    let caller = FsCaller::default();
    let file = handle_of(&life.fs.create(ROOT, b"file", exclusive(0o600), &caller, &NO_KERNEL).unwrap());
    let other = life.fs.open(file.ino, libc::O_RDWR as u32, &caller, &NO_KERNEL).unwrap().fh;
    let other = HandleRef { fh: other, ..file };
    life.fs.write(file, &write("bytes", WritePlace::Offset), &caller).unwrap();
    let directory = life.fs.opendir(ROOT, &caller).unwrap();
    let range = LockRange { start: 2, end: 9 };
    let posix = FileLock { family: LockFamily::Posix, owner: 7, range, kind: LockKind::Write };
    let flock = FileLock { family: LockFamily::Flock, owner: file.fh, ..posix };
    for lock in [posix, flock] {
        life.fs.set_lock(file, &LockRequest { lock, pid: 70, number: 0 }, false, &caller, &NO_KERNEL).unwrap();
    }
    life.fs.remove(ROOT, b"file", false, &caller).unwrap();
    for _ in 0..2 {
        life.end();
        let mut seen = [0; 5];
        life.fs.read(file, 0, &mut seen).unwrap();
        assert_eq!(&seen, b"bytes");
        assert_eq!(life.fs.getattr(file.ino, None, &caller).unwrap().0.nlink, 0);
        // By the table of this process, and by the source.
        for (family, owner) in [(LockFamily::Posix, 8), (LockFamily::Flock, other.fh)] {
            let lock = FileLock { family, owner, range, kind: LockKind::Read };
            let request = LockRequest { lock, pid: 80, number: 0 };
            let refused = life.fs.set_lock(other, &request, false, &caller, &NO_KERNEL).err().unwrap();
            assert_eq!(refused.errno(), libc::EAGAIN);
        }
        let found = life.fs.test_lock(other, &FileLock { owner: 8, ..posix }, 0, &NO_KERNEL).unwrap().unwrap();
        assert_eq!((found.range, found.pid), (range, 70));
    }
    for lock in [posix, flock] {
        let unlock = FileLock { kind: LockKind::Unlock, ..lock };
        life.fs.set_lock(file, &LockRequest { lock: unlock, pid: 70, number: 0 }, false, &caller, &NO_KERNEL).unwrap();
    }
    life.end();
    for (family, owner) in [(LockFamily::Posix, 8), (LockFamily::Flock, other.fh)] {
        let lock = FileLock { family, owner, range, kind: LockKind::Write };
        life.fs.set_lock(other, &LockRequest { lock, pid: 80, number: 0 }, false, &caller, &NO_KERNEL).unwrap();
    }
    life.fs.release(file.fh).unwrap();
    life.fs.release(other.fh).unwrap();
    life.fs.releasedir(directory).unwrap();
    life.fs.forget(file.ino, 2);
    assert!(life.keeper.files.lock().is_empty());
    assert!(life.keeper.records.lock().iter().all(Option::is_none), "nothing is left");
}
