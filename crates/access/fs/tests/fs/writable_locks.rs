//! Locks and the ends of open files, which arrive in any order after close(2) has returned: calls drawn by a seed, as a kernel
//! would make them, beside a model in which a file is closed at once. `SPURLINE_TEST_FS_SEEDS=10..500` runs other seeds.

use crate::objects;
use objects::{MemorySource, NO_KERNEL, NoReads, READ_WRITE, writable_config};
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::{
    BeginWait, CallerGroups, FileService, FsCaller, FsResult, HandleRef, KernelSide, LockRequest, ROOT, RequestNumber,
};
use spurline_types::Stats;
use spurline_volume::locks::{KnownLock, KnownLocks};
use spurline_volume::writes::{FileLock, LockFamily, LockKind, LockRange};
use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

const CALLER: FsCaller<'static> =
    FsCaller { uid: 0, gid: 0, pid: 0, umask: 0, groups: CallerGroups::Unknown, request: RequestNumber::NONE };
/// Owners of the model that are open files; smaller numbers are processes, whose numbers the kernel uses too.
const FIRST_FILE_OWNER: u64 = 1 << 32;
/// The numbers that the kernel has for owners that are open files. Each is used again when its file is closed.
const FIRST_KERNEL_OWNER: u64 = 1000;
const PROCESSES: u64 = 3;
const BYTES: u64 = 12;
const KINDS: [LockKind; 3] = [LockKind::Read, LockKind::Write, LockKind::Unlock];

fn file_system() -> (WritableFileSystem, Arc<MemorySource>) {
    let source = Arc::new(MemorySource::default());
    let (config, stats) = (writable_config(u64::MAX), Arc::new(Stats::default()));
    let fs = WritableFileSystem::new(Arc::new(NoReads), Arc::clone(&source) as _, config, stats).unwrap();
    (fs, source)
}

fn lock(family: LockFamily, owner: u64, bytes: std::ops::Range<u64>, kind: LockKind) -> FileLock {
    FileLock { family, owner, range: LockRange { start: bytes.start, end: bytes.end }, kind }
}

fn request(lock: FileLock) -> LockRequest {
    LockRequest { lock, pid: 7, number: 1 }
}

struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        let mixed = (self.0 ^ (self.0 >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 33) % limit
    }
}

/// An open file of the kernel.
#[derive(Clone, Copy)]
struct OpenOfKernel {
    fh: u64,
    kernel_owner: u64,
    model_owner: u64,
}

/// The part of the kernel: closed files whose RELEASE has not arrived yet, and numbers of owners that can be used again.
struct Kernel {
    closed: Vec<u64>,
    free_owners: Vec<u64>,
    draw: Draw,
}

/// The session between the kernel and the file system: each question makes one more end of a file arrive.
struct SeededSession<'a> {
    fs: &'a WritableFileSystem,
    kernel: RefCell<Kernel>,
}

impl SeededSession<'_> {
    fn deliver_close(&self) {
        let mut kernel = self.kernel.borrow_mut();
        let waiting = kernel.closed.len() as u64;
        if waiting > 0 {
            let at = kernel.draw.below(waiting) as usize;
            let fh = kernel.closed.swap_remove(at);
            self.fs.release(fh).unwrap();
        }
    }
}

impl BeginWait for SeededSession<'_> {
    fn begin_wait(&self) -> FsResult<Box<dyn Any>> {
        Ok(Box::new(()))
    }

    fn has_all_closes(&self, fh: u64) -> bool {
        let on_its_way = self.kernel.borrow().closed.contains(&fh);
        self.deliver_close();
        !on_its_way
    }
}

struct LockModel<'a> {
    session: SeededSession<'a>,
    ino: u64,
    open: Vec<OpenOfKernel>,
    known: KnownLocks,
    opened: u64,
}

impl LockModel<'_> {
    fn below(&self, limit: u64) -> u64 {
        self.session.kernel.borrow_mut().draw.below(limit)
    }

    fn step(&mut self) {
        match self.below(8) {
            0 | 1 => self.open(),
            2 => self.close(),
            3 => self.close_one_descriptor(),
            4 => self.session.deliver_close(),
            _ => self.lock(),
        }
    }

    fn open(&mut self) {
        self.opened += 1;
        let opened = self.session.fs.open(self.ino, libc::O_RDWR as u32, &CALLER, &NO_KERNEL).unwrap();
        let unused = FIRST_KERNEL_OWNER + self.opened;
        let kernel_owner = self.session.kernel.borrow_mut().free_owners.pop().unwrap_or(unused);
        let model_owner = FIRST_FILE_OWNER + self.opened;
        self.open.push(OpenOfKernel { fh: opened.fh, kernel_owner, model_owner });
    }

    /// Another descriptor of the file stays open: the process that closed this one loses its locks.
    fn close_one_descriptor(&mut self) {
        let Some(at) = self.any_open() else { return };
        let process = self.below(PROCESSES);
        self.session.fs.flush(HandleRef { ino: self.ino, fh: self.open[at].fh }, process, &CALLER).unwrap();
        self.known.remove_owner(lock(LockFamily::Posix, process, 0..0, LockKind::Read).owner());
    }

    /// Every process closes its last descriptor.
    fn close(&mut self) {
        let Some(at) = self.any_open() else { return };
        let closed = self.open.swap_remove(at);
        for process in 0..PROCESSES {
            self.session.fs.flush(HandleRef { ino: self.ino, fh: closed.fh }, process, &CALLER).unwrap();
            self.known.remove_owner(lock(LockFamily::Posix, process, 0..0, LockKind::Read).owner());
        }
        for family in [LockFamily::Posix, LockFamily::Flock] {
            self.known.remove_owner(lock(family, closed.model_owner, 0..0, LockKind::Read).owner());
        }
        let mut kernel = self.session.kernel.borrow_mut();
        kernel.closed.push(closed.fh);
        kernel.free_owners.push(closed.kernel_owner);
    }

    fn any_open(&self) -> Option<usize> {
        (!self.open.is_empty()).then(|| self.below(self.open.len() as u64) as usize)
    }

    fn lock(&mut self) {
        let Some(at) = self.any_open() else { return };
        let open = self.open[at];
        let start = self.below(BYTES);
        let bytes = start..start + self.below(BYTES);
        let kind = KINDS[self.below(3) as usize];
        let (asked, modelled) = match self.below(3) {
            0 => {
                let flock = |owner| lock(LockFamily::Flock, owner, 0..0, kind);
                (flock(open.fh), flock(open.model_owner))
            }
            1 => {
                let process = lock(LockFamily::Posix, self.below(PROCESSES), bytes, kind);
                (process, process)
            }
            _ => {
                let of_file = |owner| lock(LockFamily::Posix, owner, bytes.clone(), kind);
                (of_file(open.kernel_owner), of_file(open.model_owner))
            }
        };
        let conflicts = self.known.find_conflict(&modelled).is_some();
        let at = HandleRef { ino: self.ino, fh: open.fh };
        let kernel = KernelSide { waits: Some(&self.session), ..NO_KERNEL };
        if asked.family == LockFamily::Posix && kind != LockKind::Unlock && self.below(3) == 0 {
            let found = self.session.fs.test_lock(at, &asked, 1, &kernel).unwrap();
            assert_eq!(found.is_some(), conflicts, "{asked:?}: {found:?}");
            return;
        }
        match self.session.fs.set_lock(at, &request(asked), false, &CALLER, &kernel) {
            Ok(()) => {
                assert!(!conflicts, "{asked:?} got past a lock");
                self.known.set_range(KnownLock { lock: modelled, pid: 0 });
            }
            Err(error) => assert!(error.errno() == libc::EAGAIN && conflicts, "{asked:?}: {error}"),
        }
    }
}

fn run(seed: u64) {
    let (fs, source) = file_system();
    let (entry, opened) = fs.create(ROOT, b"f", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    fs.release(opened.fh).unwrap();
    let draw = Draw(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let kernel = Kernel { closed: Vec::new(), free_owners: Vec::new(), draw };
    let session = SeededSession { fs: &fs, kernel: RefCell::new(kernel) };
    let (open, known) = (Vec::new(), KnownLocks::default());
    let mut model = LockModel { session, ino: entry.ino, open, known, opened: 0 };
    for step in 0..1000 {
        let stepped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| model.step()));
        stepped.unwrap_or_else(|_| panic!("seed {seed}, step {step}: SPURLINE_TEST_FS_SEEDS={seed}..{}", seed + 1));
    }
    while !model.open.is_empty() {
        model.close();
    }
    while !model.session.kernel.borrow().closed.is_empty() {
        model.session.deliver_close();
    }
    assert!(source.locks.lock().values().all(KnownLocks::is_empty), "seed {seed}: a lock without a file");
    let last = fs.open(entry.ino, libc::O_RDWR as u32, &CALLER, &NO_KERNEL).unwrap();
    for family in [LockFamily::Posix, LockFamily::Flock] {
        let whole = lock(family, FIRST_FILE_OWNER, 0..100, LockKind::Write);
        fs.set_lock(HandleRef { ino: entry.ino, fh: last.fh }, &request(whole), false, &CALLER, &NO_KERNEL).unwrap();
    }
    fs.release(last.fh).unwrap();
}

#[test]
fn locks_agree_with_files_that_are_closed_at_once_in_whatever_order_their_ends_arrive() {
    let seeds = std::env::var("SPURLINE_TEST_FS_SEEDS").unwrap_or("0..40".into());
    let (first, last) = seeds.split_once("..").expect("SPURLINE_TEST_FS_SEEDS is FIRST..LAST");
    (first.parse().unwrap()..last.parse().unwrap()).for_each(run);
}

/// Programs in threads of their own, and the ends of their files in another one.
#[test]
fn a_lock_that_is_set_again_at_once_is_neither_refused_nor_left_behind() {
    const PROGRAMS: u64 = 4;
    const ROUNDS: usize = 2000;
    struct NeverCertain;
    impl BeginWait for NeverCertain {
        fn begin_wait(&self) -> FsResult<Box<dyn Any>> {
            Ok(Box::new(()))
        }
        fn has_all_closes(&self, _fh: u64) -> bool {
            false
        }
    }
    let (fs, source) = file_system();
    let (closed, to_release) = std::sync::mpsc::channel::<u64>();
    std::thread::scope(|scope| {
        scope.spawn(|| to_release.into_iter().for_each(|fh| fs.release(fh).unwrap()));
        for program in 0..PROGRAMS {
            let (closed, fs) = (closed.clone(), &fs);
            scope.spawn(move || {
                let kernel = KernelSide { waits: Some(&NeverCertain), ..NO_KERNEL };
                let name = format!("f{program}");
                let (entry, opened) = fs.create(ROOT, name.as_bytes(), READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
                fs.release(opened.fh).unwrap();
                for round in 0..ROUNDS {
                    let opened = fs.open(entry.ino, libc::O_RDWR as u32, &CALLER, &NO_KERNEL).unwrap();
                    // Now and then with the number of an owner that was used before.
                    let owner = FIRST_KERNEL_OWNER + (round as u64 / 3) % 2;
                    let flock = program % 2 == 0;
                    let (family, owner) =
                        if flock { (LockFamily::Flock, opened.fh) } else { (LockFamily::Posix, owner) };
                    let whole = lock(family, owner, 0..u64::MAX >> 1, LockKind::Write);
                    let at = HandleRef { ino: entry.ino, fh: opened.fh };
                    let set = fs.set_lock(at, &request(whole), false, &CALLER, &kernel);
                    set.unwrap_or_else(|error| panic!("program {program}, round {round}: {error}"));
                    fs.flush(at, program, &CALLER).unwrap();
                    closed.send(opened.fh).unwrap();
                }
            });
        }
        drop(closed);
    });
    assert!(source.locks.lock().values().all(KnownLocks::is_empty), "a lock without a file");
}
