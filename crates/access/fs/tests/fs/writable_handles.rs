//! File handles of an NFS server that exports a writable mount: the number and generation of an inode that the kernel
//! has forgotten lead back to its object, in this mount and in the next one, however it was renamed through the mount.

use crate::objects;
use crate::records;
use objects::{MemorySource, NoReads, ROOT_OBJECT, writable_config};
use records::MemoryRecords;
use spurline_fs::writable::WritableFileSystem;
use spurline_fs::{
    CallerGroups, DirName, FileEntry, FileService, FsCaller, LookupOutcome, NewNode, ROOT, RequestNumber,
};
use spurline_types::Stats;
use std::sync::Arc;

const CALLER: FsCaller<'static> =
    FsCaller { uid: 0, gid: 0, pid: 0, umask: 0, groups: CallerGroups::Unknown, request: RequestNumber::NONE };

struct Rig {
    source: Arc<MemorySource>,
    records: Arc<MemoryRecords>,
    fs: WritableFileSystem,
}

/// Number and generation, as in a file handle.
type Handle = (u64, u64);

fn handle_of(entry: &FileEntry) -> Handle {
    (entry.ino, entry.generation)
}

impl Rig {
    fn new() -> Rig {
        let source = Arc::new(MemorySource::default());
        let records = Arc::new(MemoryRecords::default());
        let fs = mount(&source, &records);
        Rig { source, records, fs }
    }

    /// Another mount of the same source, with what the first one has kept.
    fn remount(&mut self) {
        self.fs = mount(&self.source, &self.records);
    }

    fn find(&self, parent: u64, name: &str) -> Result<FileEntry, i32> {
        match self.fs.lookup(parent, name.as_bytes(), &CALLER).map_err(|error| error.errno())? {
            LookupOutcome::Found(entry) => Ok(entry),
            LookupOutcome::Absent { .. } => Err(libc::ENOENT),
        }
    }

    fn make(&self, parent: u64, name: &str, directory: bool) -> Handle {
        let new = match directory {
            true => NewNode::Directory { mode: 0o755 },
            false => NewNode::Node { mode: libc::S_IFREG | 0o644, rdev: 0 },
        };
        handle_of(&self.fs.make(parent, name.as_bytes(), new, &CALLER).unwrap())
    }

    fn rename(&self, from: (u64, &str), to: (u64, &str)) {
        let from = DirName { parent: from.0, name: from.1.as_bytes() };
        let to = DirName { parent: to.0, name: to.1.as_bytes() };
        self.fs.rename(from, to, 0, &CALLER).unwrap();
    }

    /// Uses a handle as the server does, and forgets the inode again.
    fn reach(&self, handle: Handle) -> Result<(), i32> {
        let entry = self.find(handle.0, ".")?;
        assert_eq!(handle_of(&entry), handle);
        self.fs.forget(entry.ino, 1);
        Ok(())
    }

    /// The kernel drops its caches.
    fn forget(&self, handles: &[Handle]) {
        handles.iter().for_each(|handle| self.fs.forget(handle.0, u64::MAX));
        assert_eq!(self.fs.known_inodes(), 1);
    }
}

fn mount(source: &Arc<MemorySource>, records: &Arc<MemoryRecords>) -> WritableFileSystem {
    let config = writable_config(u64::MAX);
    let fs = WritableFileSystem::new(Arc::new(NoReads), Arc::clone(source) as _, config, Arc::new(Stats::default()));
    let fs = fs.unwrap();
    fs.keep_names(Arc::clone(records) as _);
    fs
}

#[test]
fn a_handle_outlives_forgetting_renaming_and_the_mount() {
    let mut rig = Rig::new();
    let a = rig.make(ROOT, "a", true);
    let b = rig.make(a.0, "b", true);
    let file = rig.make(b.0, "file", false);
    let other = rig.make(b.0, "other", false);
    rig.rename((ROOT, "a"), (ROOT, "z"));
    rig.rename((b.0, "file"), (ROOT, "moved"));
    // A file over another one.
    let replaced = rig.make(ROOT, "replaced", false);
    rig.rename((b.0, "other"), (ROOT, "replaced"));
    for _ in 0..2 {
        rig.forget(&[a, b, file, other, replaced]);
        for handle in [file, b, a, other] {
            rig.reach(handle).unwrap();
            assert_eq!(rig.fs.known_inodes(), 1, "what was used on the way is forgotten");
        }
        assert_eq!(rig.reach(replaced), Err(libc::ESTALE));
        // The way up, for a server that needs the path.
        assert_eq!(rig.find(b.0, "..").unwrap().ino, a.0);
        assert_eq!(rig.find(a.0, "..").unwrap().ino, ROOT);
        rig.fs.forget(a.0, 1);
        rig.remount();
    }
    // Everything works by the handle alone.
    let again = rig.find(b.0, ".").unwrap();
    let new = rig.make(again.ino, "new", false);
    rig.reach(new).unwrap();
}

/// The process before was killed before the names were on the disk.
#[test]
fn names_are_stored_again() {
    let mut rig = Rig::new();
    let file = rig.make(ROOT, "file", false);
    rig.records.clear();
    rig.fs.keep_names(Arc::clone(&rig.records) as _);
    rig.forget(&[file]);
    rig.reach(file).unwrap();
    rig.remount();
    rig.reach(file).unwrap();
}

#[test]
fn a_file_with_several_names_is_reached_as_long_as_one_is_left() {
    let mut rig = Rig::new();
    let file = rig.make(ROOT, "first", false);
    let entry = rig.fs.link(file.0, ROOT, b"second", &CALLER).unwrap();
    assert_eq!(entry.ino, file.0);
    rig.forget(&[file]);
    rig.remount();
    // The kernel of the second mount has seen one of the names only.
    rig.find(ROOT, "first").unwrap();
    rig.fs.remove(ROOT, b"first", false, &CALLER).unwrap();
    rig.forget(&[file]);
    rig.reach(file).unwrap();
    rig.find(ROOT, "second").unwrap();
    rig.fs.remove(ROOT, b"second", false, &CALLER).unwrap();
    rig.forget(&[file]);
    assert_eq!(rig.reach(file), Err(libc::ESTALE));
}

#[test]
fn names_that_another_host_has_changed_lead_to_no_other_object() {
    let rig = Rig::new();
    let folder = rig.make(ROOT, "folder", true);
    let file = rig.make(folder.0, "file", false);
    rig.forget(&[folder, file]);
    {
        let mut tree = rig.source.tree.lock();
        let at = tree.find(ROOT_OBJECT, b"folder").unwrap();
        tree.remove(at, b"file", false).unwrap();
        tree.make(at, b"file", false).unwrap();
    }
    assert_eq!(rig.reach(file), Err(libc::ESTALE));
    rig.reach(folder).unwrap();
    assert_eq!(rig.reach((folder.0 + 1, 0)), Err(libc::ESTALE), "a number that was never given out");
}
