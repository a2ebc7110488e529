//! File handles of an NFS server: number and generation of an inode that the kernel has forgotten lead back to its file,
//! in this mount and in the next one.

use crate::records;
use crate::support;
use records::MemoryRecords;
use spurline_fs::{FsConfig, InodeEntry, LookupOutcome, NameRecords, ROOT};
use std::sync::Arc;
use support::Rig;

fn found(rig: &Rig, parent: u64, name: &[u8]) -> Option<InodeEntry> {
    match rig.fs.lookup(parent, name).unwrap() {
        LookupOutcome::Found(entry) => Some(entry),
        LookupOutcome::Absent { .. } => None,
    }
}

fn rig() -> Rig {
    let rig = Rig::new(FsConfig::default());
    rig.tree.dir(b"d");
    rig.tree.put(b"d/file", 1, 100);
    rig.tree.link(b"d/link", b"file");
    rig
}

#[test]
fn a_forgotten_inode_is_found_by_its_number_here_and_in_the_next_mount() {
    let (records, mut before) = (Arc::new(MemoryRecords::default()), None);
    for _ in 0..2 {
        let rig = rig();
        rig.fs.keep_names(Arc::clone(&records) as Arc<dyn NameRecords>);
        // The second mount starts with the handles of the first.
        let (d, file, link) = before.unwrap_or_else(|| {
            let d = found(&rig, ROOT, b"d").unwrap();
            let (file, link) = (found(&rig, d.attr.ino, b"file").unwrap(), found(&rig, d.attr.ino, b"link").unwrap());
            for entry in [file, link, d] {
                rig.fs.forget(entry.attr.ino, 1);
            }
            (d, file, link)
        });
        before = Some((d, file, link));
        assert_eq!(rig.fs.known_inodes(), 1);
        for entry in [file, link, d] {
            let again = found(&rig, entry.attr.ino, b".").unwrap();
            assert_eq!((again.attr.ino, again.generation), (entry.attr.ino, entry.generation));
            rig.fs.forget(entry.attr.ino, 1);
        }
        // The way up, for a server that needs the path.
        assert_eq!(found(&rig, d.attr.ino, b"..").unwrap().attr.ino, ROOT);
        assert_eq!(found(&rig, file.attr.ino, b"..").unwrap().attr.ino, d.attr.ino);
        rig.fs.forget(d.attr.ino, 1);
        assert_eq!(rig.fs.known_inodes(), 1);
    }
}

#[test]
fn the_handle_of_a_replaced_or_removed_file_leads_to_nothing() {
    let rig = rig();
    let d = found(&rig, ROOT, b"d").unwrap().attr.ino;
    let file = found(&rig, d, b"file").unwrap();
    // Names of the present inodes count too.
    rig.fs.keep_names(Arc::new(MemoryRecords::default()));
    rig.tree.put(b"d/file", 2, 100);
    assert!(found(&rig, file.attr.ino, b".").is_none(), "another version");
    rig.fs.forget(file.attr.ino, 1);
    assert!(found(&rig, file.attr.ino, b".").is_none());
    rig.tree.remove(b"d/file");
    assert!(found(&rig, file.attr.ino, b".").is_none());
    assert_eq!(rig.fs.known_inodes(), 2);
}

/// The process before was killed before the names were on the disk.
#[test]
fn names_are_stored_again() {
    let rig = rig();
    let records = Arc::new(MemoryRecords::default());
    rig.fs.keep_names(Arc::clone(&records) as Arc<dyn NameRecords>);
    let d = found(&rig, ROOT, b"d").unwrap().attr.ino;
    records.clear();
    rig.fs.keep_names(records);
    rig.fs.forget(d, 1);
    assert_eq!(found(&rig, d, b".").unwrap().attr.ino, d);
}

#[test]
fn without_records_a_forgotten_inode_is_stale() {
    let rig = rig();
    let d = found(&rig, ROOT, b"d").unwrap().attr.ino;
    rig.fs.forget(d, 1);
    assert_eq!(Rig::errno(rig.fs.lookup(d, b".")), libc::ESTALE);
    rig.fs.keep_names(Arc::new(MemoryRecords::default()));
    assert_eq!(Rig::errno(rig.fs.lookup(d, b".")), libc::ESTALE, "it was forgotten before");
}
