//! Lookups that open the file of the name, for the open that follows in the same call of a program.

use crate::objects::{MemorySource, NO_KERNEL, NoReads, READ_WRITE, writable_config};
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::{CallerGroups, FileEntry, FileService, FsCaller, HandleRef, LookupOutcome, ROOT, RequestNumber};
use spurline_volume::ReadData;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

const FLAGS: u32 = libc::O_RDONLY as u32;

fn caller(thread: u32, uid: u32) -> FsCaller<'static> {
    let request = RequestNumber::NONE;
    FsCaller { uid, gid: 0, pid: thread, umask: 0, groups: CallerGroups::OfDirectory(0), request }
}

struct Rig {
    source: Arc<MemorySource>,
    fs: WritableFileSystem,
}

impl Rig {
    /// A file system with a file in each of two folders, in which threads have opened what they looked up.
    fn with_habits() -> Rig {
        let source = Arc::new(MemorySource::default());
        let config = writable_config(u64::MAX);
        let fs = WritableFileSystem::new(Arc::new(NoReads), Arc::clone(&source) as _, config, Arc::default());
        let rig = Rig { source, fs: fs.unwrap() };
        let made = rig.fs.create(ROOT, b"file", READ_WRITE, &caller(1, 0), &NO_KERNEL).unwrap();
        rig.fs.release(made.1.fh).unwrap();
        rig.make_habit();
        rig
    }

    fn make_habit(&self) {
        for thread in 2..4 {
            let entry = self.find(thread);
            assert_eq!(entry.entry_ttl, Duration::from_secs(1));
            self.open(entry.ino, thread, 0, FLAGS);
        }
    }

    fn find(&self, thread: u32) -> FileEntry {
        match self.fs.lookup(ROOT, b"file", &caller(thread, 0)).unwrap() {
            LookupOutcome::Found(entry) => entry,
            LookupOutcome::Absent { .. } => panic!("it is there"),
        }
    }

    /// Opens and closes a file.
    fn open(&self, ino: u64, thread: u32, uid: u32, flags: u32) {
        let opened = self.fs.open(ino, flags, &caller(thread, uid), &NO_KERNEL).unwrap();
        let mut bytes = [0; 10];
        let read = self.fs.read(HandleRef { ino, fh: opened.fh }, 0, &mut bytes).unwrap();
        assert!(matches!(read, ReadData::Copied(_)));
        self.fs.release(opened.fh).unwrap();
    }

    /// The files that the source has opened, and those of lookups.
    fn counts(&self) -> (u64, u64) {
        (self.source.opened.load(Ordering::Relaxed), self.source.opened_by_lookups.load(Ordering::Relaxed))
    }
}

#[test]
fn an_open_takes_the_file_that_its_lookup_has_opened() {
    let takes_file = || {
        let rig = Rig::with_habits();
        let before = rig.counts();
        let entry = rig.find(7);
        // The next open by the name looks up again.
        assert_eq!(entry.entry_ttl, Duration::ZERO);
        rig.open(entry.ino, 7, 0, FLAGS);
        rig.counts() == (before.0 + 1, before.1 + 1)
    };
    // An open that comes late opens the file itself.
    assert!((0..1000).any(|_| takes_file()));
    let rig = Rig::with_habits();
    let entry = rig.find(7);
    let found = rig.counts();
    rig.open(entry.ino, 8, 0, FLAGS);
    assert_eq!(rig.counts().0, found.0 + 1, "another thread");
    rig.open(entry.ino, 7, 1, FLAGS);
    assert_eq!(rig.counts().0, found.0 + 2, "another user");
    rig.open(entry.ino, 7, 0, libc::O_RDWR as u32);
    assert_eq!(rig.counts().0, found.0 + 3, "other flags");
}

#[test]
fn lookups_of_a_folder_open_nothing_after_one_that_did_so_for_nothing() {
    let rig = Rig::with_habits();
    rig.find(7);
    let found = rig.find(7);
    assert_eq!(found.entry_ttl, Duration::from_secs(1));
    rig.make_habit();
    // The habit needs more opens now.
    assert_eq!(rig.find(7).entry_ttl, Duration::from_secs(1));
    assert_eq!(rig.counts().1, 1);
}
