//! Reading directories: positions, pages, counts of lookups, and directories that change meanwhile.

use crate::support;
use spurline_fs::{FileSystem, FsConfig, LookupOutcome, ROOT};
use spurline_types::{Error, ErrorKind, FileKind, ListPage, ObjectAttr, ObjectRef, Result, Stats, Version};
use spurline_volume::info::FileInfo;
use spurline_volume::{ReadData, Volume, VolumeSpace};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;
use support::{Rig, Tree};

/// The names from `from` on, at most `max` at a time, with the position after each.
fn some(rig: &Rig, ino: u64, fh: u64, from: u64, max: usize, plus: bool) -> Vec<(Vec<u8>, u64, u64)> {
    let mut names = Vec::new();
    let mut take = |item: &spurline_fs::DirItem<'_>| {
        if names.len() == max {
            return false;
        }
        names.push((item.name.to_vec(), item.next, item.ino));
        true
    };
    let answer =
        if plus { rig.fs.readdirplus(ino, fh, from, &mut take) } else { rig.fs.readdir(ino, fh, from, &mut take) };
    answer.unwrap();
    names
}

fn all(rig: &Rig, ino: u64, fh: u64, max: usize, plus: bool) -> Vec<(Vec<u8>, u64, u64)> {
    let mut names: Vec<(Vec<u8>, u64, u64)> = Vec::new();
    loop {
        let from = names.last().map_or(0, |(_, next, _)| *next);
        let more = some(rig, ino, fh, from, max, plus);
        if more.is_empty() {
            return names;
        }
        names.extend(more);
    }
}

fn rig(page: usize, files: usize) -> (Rig, u64) {
    let rig = Rig::new(FsConfig { list_page: page, ..FsConfig::default() });
    rig.tree.dir(b"d");
    for i in 0..files {
        rig.tree.put(format!("d/{i:06}").as_bytes(), 1, i as u64);
    }
    let d = rig.walk(b"d").unwrap();
    (rig, d)
}

/// Opens, reads and closes a file of `size` bytes, and returns the files that were fetched ahead.
fn read_whole(rig: &Rig, ino: u64, size: usize) -> Vec<u64> {
    let fh = rig.fs.open(ino, libc::O_RDONLY, None).unwrap().fh;
    rig.read(ino, fh, 0, size + 1).unwrap();
    rig.fs.release(fh).unwrap();
    let fetched = std::mem::take(&mut *rig.tree.prefetched.lock());
    fetched.iter().map(|(path, _)| String::from_utf8_lossy(&path[2..]).parse().unwrap()).collect()
}

#[test]
fn small_files_are_fetched_ahead_of_a_reader_in_the_order_of_a_listing() {
    let unordered = rig(7, 100);
    let (rig, d) = rig(7, 100);
    rig.tree.put(b"d/000050", 1, 2 << 20);
    let fh = rig.fs.opendir(d).unwrap();
    let listed: Vec<u64> = all(&rig, d, fh, 13, true).into_iter().skip(2).map(|(_, _, ino)| ino).collect();
    let read_from = |from: usize, to: usize| -> Vec<u64> {
        (from..to).filter(|i| *i != 50).flat_map(|i| read_whole(&rig, listed[i], i)).collect()
    };
    assert!(read_from(1, 20).is_empty(), "reads that are quick need no help");
    rig.tree.slow_reads_ms.store(5, Ordering::SeqCst);
    assert!(read_from(1, 4).is_empty(), "three files in a row are no walk");
    let fetched = read_from(4, 60);
    let expected: Vec<u64> = (fetched[0]..91).filter(|i| *i != 50).collect();
    assert_eq!(fetched, expected, "each once, in order, at most 32 ahead, and no long file");
    assert!((6..10).contains(&fetched[0]));
    assert_eq!(rig.stats.blockcache.followed_files.get(), fetched.len() as u64);
    // Two threads that take files from one list, and a file that was left out.
    let mixed = [62, 61, 63, 65, 64, 67, 68].into_iter().flat_map(|i| read_whole(&rig, listed[i], i));
    assert_eq!(mixed.collect::<Vec<_>>(), (91..98).collect::<Vec<u64>>());
    // In another order, none.
    assert!((1..50).rev().all(|i| read_whole(&rig, listed[i], i).is_empty()));
    // A listing without attributes shows no order.
    let (rig, d) = unordered;
    rig.tree.slow_reads_ms.store(5, Ordering::SeqCst);
    let fh = rig.fs.opendir(d).unwrap();
    all(&rig, d, fh, 13, false);
    let inos: Vec<u64> = (1..40).map(|i| rig.walk(format!("d/{i:06}").as_bytes()).unwrap()).collect();
    assert!((1..40).all(|i| read_whole(&rig, inos[i - 1], i).is_empty()));
}

#[test]
fn every_name_once_whatever_the_pages() {
    for (page, max) in [(1, 1), (1, 7), (7, 3), (10, 10), (1000, 13)] {
        let (rig, d) = rig(page, 20);
        let fh = rig.fs.opendir(d).unwrap();
        let names = all(&rig, d, fh, max, false);
        let expected: Vec<Vec<u8>> = [b".".to_vec(), b"..".to_vec()]
            .into_iter()
            .chain((0..20).map(|i| format!("{i:06}").into_bytes()))
            .collect();
        assert_eq!(names.iter().map(|n| n.0.clone()).collect::<Vec<_>>(), expected, "page {page}, {max} at a time");
        assert_eq!((names[0].2, names[1].2), (d, ROOT));
        // A listing shows the number that a lookup shows later.
        assert_eq!(names[2].2, rig.walk(b"d/000000").unwrap());
        // Every returned position leads back to the names after it, in any order.
        for (i, (_, next, _)) in names.iter().enumerate().rev() {
            let after = some(&rig, d, fh, *next, 1, false);
            assert_eq!(after.first().map(|n| &n.0), expected.get(i + 1));
        }
        // In a new handle as well.
        let other = rig.fs.opendir(d).unwrap();
        assert_eq!(some(&rig, d, other, names[11].1, 1, false)[0].0, expected[12]);
        assert!(some(&rig, d, fh, 1 << 40, 1, false).is_empty(), "far past the end there is nothing");
    }
}

#[test]
fn starting_over_sees_the_directory_as_it_is() {
    let (rig, d) = rig(4, 10);
    let fh = rig.fs.opendir(d).unwrap();
    assert_eq!(all(&rig, d, fh, 3, false).len(), 12);
    rig.tree.put(b"d/new", 1, 1);
    rig.tree.remove(b"d/000001");
    let names: Vec<_> = all(&rig, d, fh, 5, false).into_iter().map(|n| n.0).collect();
    assert!(names.contains(&b"new".to_vec()) && !names.contains(&b"000001".to_vec()));
}

#[test]
fn each_name_taken_is_looked_up_once_and_no_other() {
    let (rig, d) = rig(6, 20);
    let fh = rig.fs.opendir(d).unwrap();
    let names = all(&rig, d, fh, 4, true);
    assert_eq!(names.len(), 22);
    assert_eq!(rig.stats.fuse.inodes.get(), 22, "the root, the directory and its files");
    for (name, _, ino) in &names[2..] {
        let LookupOutcome::Found(entry) = rig.fs.lookup(d, name).unwrap() else { panic!("it is there") };
        assert_eq!(entry.attr.ino, *ino);
        rig.fs.forget(*ino, 1);
    }
    // Known by now, so listed with their numbers.
    assert_eq!(some(&rig, d, fh, 2, 1, false)[0].2, names[2].2);
    for (_, _, ino) in &names[2..] {
        rig.fs.forget(*ino, 1);
    }
    assert_eq!(rig.stats.fuse.inodes.get(), 2, "one forget each takes all back");
    assert_eq!(rig.fs.known_inodes(), 2);
}

#[test]
fn names_no_file_can_have_are_left_out_and_counted() {
    let (rig, d) = rig(2, 3);
    rig.tree.put(&[b"d/", &[b'x'; 256][..]].concat(), 1, 1);
    rig.tree.put(&[b"d/", &[b'x'; 255][..]].concat(), 1, 1);
    rig.tree.put(b"d/.", 1, 1);
    rig.tree.put(b"d/..", 1, 1);
    rig.tree.put(b"d/a\0b", 1, 1);
    rig.tree.put(b"d/\xff\n\\ \x01", 1, 1);
    let fh = rig.fs.opendir(d).unwrap();
    let names: BTreeSet<Vec<u8>> = all(&rig, d, fh, 100, true).into_iter().skip(2).map(|n| n.0).collect();
    assert_eq!(names.len(), 5);
    assert!(names.contains(b"\xff\n\\ \x01".as_slice()) && names.contains(&vec![b'x'; 255]));
    assert_eq!(rig.stats.metadata.skipped_names.get(), 4);
    for (name, next, _) in all(&rig, d, fh, 1, false) {
        let again = some(&rig, d, fh, next - 1, 1, false);
        assert_eq!(again.first().map(|n| &n.0), Some(&name));
    }
}

#[test]
fn an_error_half_way_is_told_after_what_was_read() {
    let (rig, d) = rig(5, 10);
    let fh = rig.fs.opendir(d).unwrap();
    assert_eq!(some(&rig, d, fh, 0, 4, false).len(), 4);
    rig.tree.fail_next("list", ErrorKind::Timeout);
    let rest = some(&rig, d, fh, 4, 100, false);
    assert_eq!(rest.len(), 3);
    let from = rest[2].1;
    rig.tree.fail_next("list", ErrorKind::Timeout);
    assert_eq!(Rig::errno(rig.fs.readdir(d, fh, from, &mut |_| true)), libc::ETIMEDOUT);
    assert_eq!(some(&rig, d, fh, from, 100, false).len(), 5, "and then it goes on");
    rig.tree.remove(b"d");
    assert_eq!(
        Rig::errno(rig.fs.readdir(d, fh, 2, &mut |_| true).and(rig.fs.readdir(d, fh, 9, &mut |_| true))),
        libc::ENOENT
    );
}

#[test]
fn names_listed_long_ago_hold_shorter() {
    let (rig, d) = rig(100, 3);
    let fh = rig.fs.opendir(d).unwrap();
    some(&rig, d, fh, 0, 3, false);
    rig.pass(700);
    let ttls = |from| {
        let mut ttls = Vec::new();
        rig.fs
            .readdirplus(d, fh, from, &mut |item| {
                ttls.extend(item.entry.map(|entry| (entry.entry_ttl.as_millis(), entry.attr_ttl.as_millis())));
                true
            })
            .unwrap();
        ttls
    };
    assert_eq!(ttls(3), [(300, 300); 2]);
    rig.pass(700);
    assert_eq!(ttls(4), [(0, 0)]);
    assert_eq!(ttls(0), [(1000, 1000); 3]);
}

#[test]
fn names_of_a_page_that_took_long_hold_shorter_and_wait_for_no_other() {
    let (rig, d) = rig(3, 8);
    let fh = rig.fs.opendir(d).unwrap();
    rig.tree.slow_ms.store(400, Ordering::SeqCst);
    let mut from = 0;
    for names in [5, 3, 2, 0] {
        let lists = rig.tree.lists.load(Ordering::SeqCst);
        let mut seen = 0;
        rig.fs
            .readdirplus(d, fh, from, &mut |item| {
                assert!(item.entry.is_none_or(|entry| entry.attr_ttl.as_millis() == 600), "{:?}", item.entry);
                (from, seen) = (item.next, seen + 1);
                true
            })
            .unwrap();
        assert_eq!(seen, names);
        assert!(rig.tree.lists.load(Ordering::SeqCst) - lists <= 1);
    }
}

/// A directory of very many files that exist only while they are listed, and a count of the most alive.
struct Many {
    files: u64,
    requests: AtomicU64,
}

impl Volume for Many {
    fn source(&self) -> &str {
        "many:"
    }
    fn block_size(&self) -> u64 {
        1 << 20
    }
    fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
        Ok(attr(if path.is_empty() { FileKind::Directory } else { FileKind::File }))
    }
    fn list(&self, _path: &[u8], cursor: Option<&[u8]>, max: usize) -> Result<ListPage> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let first = cursor.map_or(0, |c| u64::from_be_bytes(c.try_into().unwrap()));
        let end = (first + max as u64).min(self.files);
        let entry =
            |i: u64| spurline_types::DirEntry { name: format!("file-{i:08}").into(), attr: attr(FileKind::File) };
        let next = (end < self.files).then(|| end.to_be_bytes().to_vec());
        Ok(ListPage { entries: (first..end).map(entry).collect(), next, marker: None })
    }
    fn readlink(&self, _path: &[u8]) -> Result<Vec<u8>> {
        unreachable!("there are no links")
    }
    fn read(&self, _object: &ObjectRef, _offset: u64, _dst: &mut [u8]) -> Result<ReadData> {
        Ok(ReadData::Copied(0))
    }
    fn prefetch(&self, _object: &ObjectRef, _blocks: Range<u32>, _piece: usize) {}
    fn capacity(&self) -> Result<VolumeSpace> {
        Ok(VolumeSpace { total_bytes: 0, free_bytes: 0, files: 0, files_free: 0 })
    }
    fn info(&self, _path: &[u8]) -> Result<FileInfo> {
        Err(Error::new(ErrorKind::Unsupported, "no blocks are cached"))
    }
}

fn attr(kind: FileKind) -> ObjectAttr {
    let version = Version::new("v");
    ObjectAttr { kind, size: 0, mtime: SystemTime::UNIX_EPOCH, mode: 0o444, version, etag: None }
}

#[test]
fn a_hundred_thousand_names_are_listed_a_page_at_a_time() {
    let many = Arc::new(Many { files: 100_000, requests: AtomicU64::new(0) });
    let stats = Arc::new(Stats::default());
    let fs = FileSystem::new(Arc::clone(&many) as Arc<dyn Volume>, FsConfig::default(), Arc::clone(&stats));
    let fh = fs.opendir(ROOT).unwrap();
    let (mut at, mut seen, mut known) = (0, 0u64, Vec::new());
    loop {
        let before = seen;
        let mut room = 200;
        fs.readdirplus(ROOT, fh, at, &mut |item| {
            if room == 0 {
                return false;
            }
            room -= 1;
            seen += 1;
            at = item.next;
            known.extend(item.entry.map(|entry| entry.attr.ino));
            true
        })
        .unwrap();
        if seen == before {
            break;
        }
    }
    assert_eq!((seen, known.len()), (100_002, 100_000));
    assert_eq!(many.requests.load(Ordering::Relaxed), 100, "each page once");
    assert_eq!(stats.fuse.inodes.get(), 100_001);
    // Back to the middle: one page.
    fs.readdir(ROOT, fh, 50_002, &mut |item| {
        assert_eq!(item.name, b"file-00050000");
        false
    })
    .unwrap();
    assert_eq!(many.requests.load(Ordering::Relaxed), 101);
    // Ahead and back to anywhere: one page each.
    for (n, position) in [99_002u64, 3, 80_002, 80_900, 81_002, 12_345].into_iter().enumerate() {
        let mut names = Vec::new();
        fs.readdir(ROOT, fh, position, &mut |item| {
            names.push(item.name.to_vec());
            names.len() < 2
        })
        .unwrap();
        assert_eq!(names[0], format!("file-{:08}", position - 2).as_bytes());
        let most = 102 + n as u64;
        assert!(many.requests.load(Ordering::Relaxed) <= most, "seek {n}");
    }
    for ino in known {
        fs.forget(ino, 1);
    }
    assert_eq!(stats.fuse.inodes.get(), 1);
    fs.release(fh).unwrap();
    assert_eq!(stats.fuse.open_handles.get(), 0);
}

#[test]
fn who_opens_the_directory_for_every_part_of_a_listing_walks_no_page_again() {
    let many = Arc::new(Many { files: 100_000, requests: AtomicU64::new(0) });
    let fs = FileSystem::new(Arc::clone(&many) as Arc<dyn Volume>, FsConfig::default(), Arc::new(Stats::default()));
    let (mut at, mut seen, mut opened) = (0, 0u64, 0);
    loop {
        let before = seen;
        let mut room = 200;
        let fh = fs.opendir(ROOT).unwrap();
        fs.readdir(ROOT, fh, at, &mut |item| {
            if room == 0 {
                return false;
            }
            assert!(seen < 2 || item.name == format!("file-{:08}", seen - 2).as_bytes());
            (room, seen, at) = (room - 1, seen + 1, item.next);
            true
        })
        .unwrap();
        fs.release(fh).unwrap();
        opened += 1;
        if seen == before {
            break;
        }
    }
    assert_eq!(seen, 100_002);
    assert_eq!(many.requests.load(Ordering::Relaxed), opened, "one page each");
}

#[test]
fn a_handle_that_began_at_the_start_goes_back_in_its_own_listing() {
    let (rig, d) = rig(4, 12);
    let fh = rig.fs.opendir(d).unwrap();
    let names = all(&rig, d, fh, 5, false);
    rig.tree.remove(b"d/000000");
    // Another one sees everything one further ahead.
    let other = rig.fs.opendir(d).unwrap();
    let others = all(&rig, d, other, 5, false);
    assert_eq!(others[8].0, names[9].0);
    for (position, (name, ..)) in names.iter().enumerate().skip(6).rev() {
        assert_eq!(&some(&rig, d, fh, position as u64, 1, false)[0].0, name);
    }
    // And one that begins in the middle is led to where one of them was, unless the volume knows that place no more.
    let lists = || rig.tree.lists.load(Ordering::SeqCst);
    let (third, before) = (rig.fs.opendir(d).unwrap(), lists());
    assert!(some(&rig, d, third, 10, 1, false)[0].0 >= names[10].0);
    assert_eq!(lists() - before, 1);
    let fourth = rig.fs.opendir(d).unwrap();
    rig.tree.fail_next("list", ErrorKind::Invalid);
    assert_eq!(Rig::errno(rig.fs.readdir(d, fourth, 10, &mut |_| true)), libc::EINVAL);
    assert_eq!(some(&rig, d, fourth, 10, 1, false)[0].0, others[10].0);
}

#[test]
fn a_listing_that_never_ends_is_an_error() {
    struct Endless(Arc<Tree>);
    let rig = Rig::new(FsConfig::default());
    let endless = Endless(Arc::clone(&rig.tree));
    impl Volume for Endless {
        fn source(&self) -> &str {
            "endless:"
        }
        fn block_size(&self) -> u64 {
            1
        }
        fn lookup(&self, path: &[u8]) -> Result<ObjectAttr> {
            self.0.lookup(path)
        }
        fn list(&self, _path: &[u8], _cursor: Option<&[u8]>, _max: usize) -> Result<ListPage> {
            Ok(ListPage { next: Some(b"again".to_vec()), ..ListPage::default() })
        }
        fn readlink(&self, path: &[u8]) -> Result<Vec<u8>> {
            self.0.readlink(path)
        }
        fn read(&self, object: &ObjectRef, offset: u64, dst: &mut [u8]) -> Result<ReadData> {
            self.0.read(object, offset, dst)
        }
        fn prefetch(&self, _object: &ObjectRef, _blocks: Range<u32>, _piece: usize) {}
        fn capacity(&self) -> Result<VolumeSpace> {
            self.0.capacity()
        }
        fn info(&self, path: &[u8]) -> Result<FileInfo> {
            self.0.info(path)
        }
    }
    let fs = FileSystem::new(Arc::new(endless), FsConfig::default(), Arc::new(Stats::default()));
    let fh = fs.opendir(ROOT).unwrap();
    assert_eq!(Rig::errno(fs.readdir(ROOT, fh, 2, &mut |_| true)), libc::EPROTO);
}
