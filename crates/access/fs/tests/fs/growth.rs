//! Open files whose object grows: followed if the served bytes are a prefix of the new version, else left alone.

use crate::support;
use spurline_fs::{FsConfig, LookupOutcome, ROOT};
use std::sync::atomic::Ordering;
use support::{BLOCK, Rig, byte};

fn rig() -> Rig {
    let rig = Rig::new(FsConfig { max_readahead: 0, ..FsConfig::default() });
    rig.tree.appended.store(true, Ordering::Relaxed);
    rig
}

/// The inode number and size that a lookup of `log` finds; its lookup count is lowered again.
fn look(rig: &Rig) -> (u64, u64) {
    let LookupOutcome::Found(entry) = rig.fs.lookup(ROOT, b"log").unwrap() else { panic!("it exists") };
    rig.fs.forget(entry.attr.ino, 1);
    (entry.attr.ino, entry.attr.size)
}

fn appended(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(|at| byte(0, at)).collect()
}

/// The writer opens, appends and closes: `tail -F` compares inode numbers, `tail -f` polls its descriptor.
#[test]
fn an_open_file_that_only_grew_is_followed() {
    let rig = rig();
    rig.tree.put(b"log", 1, 100);
    let ino = rig.walk(b"log").unwrap();
    let fh = rig.fs.open(ino, libc::O_RDONLY, None).unwrap().fh;
    assert_eq!(rig.read(ino, fh, 0, 1000).unwrap(), appended(0, 100));
    let mut size = 100;
    for version in 2..20 {
        // What was served is in the cache, in each version so far.
        rig.tree.cached.lock().push((b"log".to_vec(), version - 1));
        let before = size;
        size += 50 + version;
        rig.tree.put(b"log", version, size);
        rig.pass(2000);
        match version % 3 {
            0 => assert_eq!(look(&rig), (ino, size), "the path leads to the open inode"),
            1 => assert_eq!(rig.fs.getattr(ino, None).unwrap().0.size, size, "the descriptor shows the growth"),
            // Opened again by another program.
            _ => {
                let other = rig.fs.open(ino, libc::O_RDONLY, None).unwrap().fh;
                assert_eq!(rig.read(ino, other, 0, 10_000).unwrap(), appended(0, size));
                rig.fs.release(other).unwrap();
            }
        }
        assert_eq!(rig.read(ino, fh, before, 10_000).unwrap(), appended(before, size - before));
        let now = rig.fs.getxattr(ino, b"user.spurline.version").unwrap();
        assert_eq!(now, format!("v{version}").into_bytes());
    }
    rig.fs.release(fh).unwrap();
    assert_eq!(rig.fs.known_inodes(), 2);
}

/// A reader that never queries attributes meets a block whose old version is gone.
#[test]
fn a_read_of_a_gone_version_continues_with_the_longer_one() {
    let rig = rig();
    rig.tree.put(b"log", 1, 3 * BLOCK);
    let ino = rig.walk(b"log").unwrap();
    let fh = rig.fs.open(ino, libc::O_RDONLY, None).unwrap().fh;
    assert_eq!(rig.read(ino, fh, 0, 100).unwrap(), appended(0, 100));
    rig.tree.put(b"log", 2, 4 * BLOCK);
    // The served block can't be compared any more.
    let stale = rig.read(ino, fh, 2 * BLOCK, 100);
    assert_eq!(Rig::errno(stale), libc::ESTALE);
    rig.tree.put(b"log", 3, 5 * BLOCK);
    rig.tree.cached_blocks.lock().push((b"log".to_vec(), 1, 0));
    assert_eq!(rig.read(ino, fh, 2 * BLOCK, 100).unwrap(), appended(2 * BLOCK, 100));
    assert_eq!(rig.fs.getattr(ino, None).unwrap().0.size, 5 * BLOCK);
}

#[test]
fn other_bytes_a_shorter_file_or_a_closed_one_are_another_inode() {
    let rig = rig();
    let other_bytes = || rig.tree.appended.store(false, Ordering::Relaxed);
    rig.tree.cached.lock().extend([(b"log".to_vec(), 1), (b"log".to_vec(), 2), (b"log".to_vec(), 3)]);
    rig.tree.put(b"log", 1, 100);
    let ino = rig.walk(b"log").unwrap();
    let fh = rig.fs.open(ino, libc::O_RDONLY, None).unwrap().fh;
    rig.read(ino, fh, 0, 10).unwrap();
    rig.tree.put(b"log", 2, 99);
    rig.pass(2000);
    assert_ne!(look(&rig).0, ino, "shorter");
    rig.tree.put(b"log", 3, 200);
    other_bytes();
    rig.pass(2000);
    assert_ne!(look(&rig).0, ino, "rewritten");
    assert_eq!(rig.fs.getattr(ino, None).unwrap().0.size, 100);
    let old: Vec<u8> = (0..100).map(|at| byte(1, at)).collect();
    assert_eq!(rig.read(ino, fh, 0, 1000).unwrap(), old, "the open file keeps its version");
    rig.fs.release(fh).unwrap();
    rig.tree.appended.store(true, Ordering::Relaxed);
    rig.tree.put(b"log", 4, 300);
    rig.pass(2000);
    assert_ne!(look(&rig).0, ino, "closed");
}
