//! The kernel's view of a file that others change: which notifications it gets, and in which order. The kernel here drops every
//! answer with attributes, as the real one does when a notification overtakes the answer.

use crate::objects;
use objects::{MemorySource, NO_KERNEL, NoReads, READ_WRITE, writable_config};
use parking_lot::Mutex;
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::{
    BeginWait, CallerGroups, FileService, FileWrite, FsCaller, FsResult, HandleRef, KernelSide, KernelView,
    LockRequest, LookupOutcome, ROOT, RequestNumber,
};
use spurline_types::{Error, ErrorKind, Stats};
use spurline_volume::writes::{AttrChange, FileLock, LockFamily, LockKind, LockRange, WritePlace};
use std::any::Any;
use std::io;
use std::sync::Arc;

const CALLER: FsCaller<'static> =
    FsCaller { uid: 0, gid: 0, pid: 0, umask: 0, groups: CallerGroups::Unknown, request: RequestNumber::NONE };

#[derive(Debug, PartialEq)]
enum Notified {
    Attr,
    Pages,
    Byte(u64, u8),
}

#[derive(Default)]
struct ListedKernel(Mutex<Vec<Notified>>);

impl ListedKernel {
    fn take(&self) -> Vec<Notified> {
        std::mem::take(&mut self.0.lock())
    }
}

impl KernelView for ListedKernel {
    fn forget_attr(&self, _: u64) -> io::Result<()> {
        self.0.lock().push(Notified::Attr);
        Ok(())
    }
    fn drop_pages(&self, _: u64) -> io::Result<()> {
        self.0.lock().push(Notified::Pages);
        Ok(())
    }
    fn store_byte(&self, _: u64, offset: u64, byte: u8) -> io::Result<()> {
        self.0.lock().push(Notified::Byte(offset, byte));
        Ok(())
    }
}

fn mount(source: &Arc<MemorySource>) -> WritableFileSystem {
    let stats = Arc::new(Stats::default());
    WritableFileSystem::new(Arc::new(NoReads), Arc::clone(source) as _, writable_config(u64::MAX), stats).unwrap()
}

fn bytes_at(offset: u64, data: &[u8]) -> FileWrite<'_> {
    FileWrite { offset, place: WritePlace::Offset, data, lose_privileges: false }
}

fn find(fs: &WritableFileSystem, name: &[u8]) -> u64 {
    match fs.lookup(ROOT, name, &CALLER).unwrap() {
        LookupOutcome::Found(entry) => entry.ino,
        LookupOutcome::Absent { .. } => panic!("no such name"),
    }
}

#[test]
fn the_length_of_a_locked_file_is_in_the_kernel_before_its_holder_goes_on() {
    let source = Arc::new(MemorySource::default());
    let kernel = ListedKernel::default();
    let one = mount(&source);
    let two = mount(&source);
    let (entry, theirs) = one.create(ROOT, b"f", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    let ino = find(&two, b"f");
    let ours = two.open(ino, libc::O_RDWR as u32, &CALLER, &NO_KERNEL).unwrap();
    let refresh = || {
        let lock = FileLock {
            family: LockFamily::Posix,
            owner: 1,
            range: LockRange { start: 0, end: 9 },
            kind: LockKind::Write,
        };
        let request = LockRequest { lock, pid: 7, number: 1 };
        let side = KernelSide { view: Some(&kernel), ..NO_KERNEL };
        two.set_lock(HandleRef { ino, fh: ours.fh }, &request, false, &CALLER, &side).unwrap();
        let mut notified = kernel.take();
        assert_eq!(notified.remove(0), Notified::Pages, "stored pages are written before the lock is set");
        notified
    };
    let write = |offset, data: &[u8]| {
        one.write(HandleRef { ino: entry.ino, fh: theirs.fh }, &bytes_at(offset, data), &CALLER).unwrap();
    };
    assert_eq!(refresh(), [Notified::Pages], "it is empty");
    write(0, b"ab");
    assert_eq!(refresh(), [Notified::Pages, Notified::Byte(1, b'b')], "the byte comes after the old pages are gone");
    assert_eq!(refresh(), [Notified::Pages], "the kernel has that length");
    // Answers that the kernel may have dropped raise nothing.
    write(2, b"c");
    two.getattr(ino, Some(ours.fh), &CALLER).unwrap();
    find(&two, b"f");
    assert_eq!(refresh(), [Notified::Pages, Notified::Byte(2, b'c')]);
    // What the kernel wrote itself.
    two.write(HandleRef { ino, fh: ours.fh }, &bytes_at(3, b"d"), &CALLER).unwrap();
    assert_eq!(refresh(), [Notified::Pages]);
    // Another has cut it, which the kernel may have seen, and it grew again.
    let set = AttrChange { size: Some(1), ..AttrChange::default() };
    one.setattr(entry.ino, Some(theirs.fh), &set, &CALLER).unwrap();
    two.getattr(ino, Some(ours.fh), &CALLER).unwrap();
    write(1, b"xy");
    assert_eq!(refresh(), [Notified::Pages, Notified::Byte(2, b'y')]);
}

#[test]
fn an_open_of_a_file_that_grew_puts_its_length_into_the_kernel_once() {
    let source = Arc::new(MemorySource::default());
    let kernel = ListedKernel::default();
    let one = mount(&source);
    let two = mount(&source);
    let (entry, theirs) = one.create(ROOT, b"f", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    let ino = find(&two, b"f");
    let open = || {
        let side = KernelSide { view: Some(&kernel), ..NO_KERNEL };
        two.open(ino, libc::O_RDONLY as u32, &CALLER, &side).unwrap();
        kernel.take()
    };
    assert_eq!(open(), []);
    one.write(HandleRef { ino: entry.ino, fh: theirs.fh }, &bytes_at(0, b"ab"), &CALLER).unwrap();
    assert_eq!(open(), [Notified::Pages, Notified::Byte(1, b'b')]);
    assert_eq!(open(), [], "the kernel's attributes are no older");
    one.write(HandleRef { ino: entry.ino, fh: theirs.fh }, &bytes_at(0, b"x"), &CALLER).unwrap();
    assert_eq!(open(), [Notified::Attr], "the length is the same");
}

/// Slots that are all taken, or not.
struct FullSlots(bool);

impl BeginWait for FullSlots {
    fn begin_wait(&self) -> FsResult<Box<dyn Any>> {
        if self.0 {
            return Err(Error::new(ErrorKind::Io(libc::ENOLCK), "all are taken").into());
        }
        Ok(Box::new(()))
    }

    fn has_all_closes(&self, _fh: u64) -> bool {
        true
    }
}

#[test]
fn without_a_slot_to_wait_in_no_notification_is_sent_and_a_lock_is_refused() {
    let kernel = ListedKernel::default();
    let fs = mount(&Arc::new(MemorySource::default()));
    let (entry, opened) = fs.create(ROOT, b"f", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    let file = HandleRef { ino: entry.ino, fh: opened.fh };
    let set_lock = |kind, slots: &FullSlots| {
        let lock = FileLock { family: LockFamily::Posix, owner: 1, range: LockRange { start: 0, end: 9 }, kind };
        let request = LockRequest { lock, pid: 7, number: 1 };
        let side = KernelSide { view: Some(&kernel), waits: Some(slots), backings: None };
        fs.set_lock(file, &request, false, &CALLER, &side).map_err(|error| error.errno())
    };
    assert_eq!(set_lock(LockKind::Write, &FullSlots(true)), Err(libc::ENOLCK));
    assert_eq!(kernel.take(), []);
    // Stored pages are written before the lock is set, and those of others are read after.
    assert_eq!(set_lock(LockKind::Write, &FullSlots(false)), Ok(()));
    assert_eq!(kernel.take(), [Notified::Pages, Notified::Pages]);
    assert_eq!(set_lock(LockKind::Unlock, &FullSlots(true)), Ok(()), "a release goes on");
    assert_eq!(kernel.take(), []);
    assert_eq!(set_lock(LockKind::Write, &FullSlots(false)), Ok(()));
    kernel.take();
    assert_eq!(set_lock(LockKind::Unlock, &FullSlots(false)), Ok(()));
    assert_eq!(kernel.take(), [Notified::Pages]);
}

#[test]
fn a_kernel_that_opens_a_grown_file_gets_its_length_before_the_answer() {
    let source = Arc::new(MemorySource::default());
    let kernel = ListedKernel::default();
    let one = mount(&source);
    let two = mount(&source);
    let (entry, theirs) = one.create(ROOT, b"f", READ_WRITE, &CALLER, &NO_KERNEL).unwrap();
    let ino = find(&two, b"f");
    one.write(HandleRef { ino: entry.ino, fh: theirs.fh }, &bytes_at(0, b"ab"), &CALLER).unwrap();
    let open = |side: &KernelSide<'_>| two.open(ino, libc::O_RDONLY as u32, &CALLER, side).unwrap();
    open(&KernelSide::default());
    let full = KernelSide { view: Some(&kernel), waits: Some(&FullSlots(true)), backings: None };
    open(&full);
    assert_eq!(kernel.take(), [], "an open does not fail for it");
    open(&KernelSide { waits: Some(&FullSlots(false)), ..full });
    assert_eq!(kernel.take(), [Notified::Pages, Notified::Byte(1, b'b')]);
}
