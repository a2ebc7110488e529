//! The conformance suite that every origin must pass; the tests beside this file run it on each of them.
#![allow(dead_code, reason = "each test binary uses a part")]

use spurline_origin::OriginStore;
pub use spurline_testkit::pattern;
use spurline_types::{DirEntry, ErrorKind, FileKind, ObjectAttr, ObjectRef, SliceSink, Stats};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Writes files to the origin, independently of the tested code.
pub trait Fixture {
    /// Writes a file, replacing what is there.
    fn put(&self, path: &str, bytes: &[u8]);
    /// Removes a file.
    fn remove(&self, path: &str);
    /// Makes an empty folder.
    fn folder(&self, path: &str);
    /// Whether names may hold any character but `/`; otherwise only printable ones.
    fn any_character(&self) -> bool;
    /// Names in the big folder: fewer where putting them is slow.
    fn many(&self) -> usize {
        2500
    }
}

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub fn object(store: &dyn OriginStore, path: &[u8]) -> (ObjectRef, ObjectAttr) {
    let attr = store.lookup(path, soon()).unwrap_or_else(|e| panic!("{}: {e}", String::from_utf8_lossy(path)));
    (ObjectRef::new(store.source_url(), path, attr.version.clone(), attr.size), attr)
}

pub fn read(store: &dyn OriginStore, object: &ObjectRef, offset: u64, len: usize) -> spurline_types::Result<Vec<u8>> {
    let mut bytes = vec![0xaa; len];
    let mut sink = SliceSink::new(&mut bytes);
    store.read(object, offset, &mut sink, soon())?;
    assert_eq!(sink.filled(), len, "a read that succeeds has filled its sink");
    Ok(bytes)
}

/// Reads until the deadline; returns the result and the bytes received.
pub fn read_until(
    store: &dyn OriginStore,
    object: &ObjectRef,
    len: usize,
    deadline: Instant,
) -> (spurline_types::Result<()>, Vec<u8>) {
    let mut bytes = vec![0; len];
    let mut sink = spurline_types::SliceSink::new(&mut bytes);
    let answer = store.read(object, 0, &mut sink, deadline);
    let filled = sink.filled();
    bytes.truncate(filled);
    (answer, bytes)
}

pub fn list_all(store: &dyn OriginStore, path: &[u8], max: usize) -> Vec<DirEntry> {
    let (mut all, mut cursor) = (Vec::new(), None);
    for _ in 0..100_000 {
        let page = store.list(path, cursor.as_deref(), max, soon()).unwrap();
        assert!(page.entries.len() <= max.max(1));
        all.extend(page.entries);
        match page.next {
            Some(next) => cursor = Some(next),
            None => return all,
        }
    }
    panic!("a listing without end");
}

fn names(entries: &[DirEntry]) -> Vec<&[u8]> {
    let mut names: Vec<&[u8]> = entries.iter().map(|e| e.name.as_slice()).collect();
    names.sort_unstable();
    names
}

/// Runs all parts.
pub fn conformance(store: &dyn OriginStore, stats: &Arc<Stats>, fixture: &dyn Fixture) {
    store.check(soon()).unwrap();
    assert!(!store.describe().is_empty());
    reads(store, fixture);
    folders(store, fixture);
    pages(store, fixture);
    odd_names(store, fixture);
    versions(store, fixture);
    assert_eq!(stats.object.in_flight.get(), 0);
    assert!(stats.object.get_ops.get() > 0 && stats.object.get_bytes.get() > 0 && stats.metadata.ops.get() > 0);
}

fn reads(store: &dyn OriginStore, fixture: &dyn Fixture) {
    let bytes = pattern(3_000_001, 1);
    fixture.put("reads/big", &bytes);
    fixture.put("reads/empty", b"");
    let (big, attr) = object(store, b"reads/big");
    assert_eq!((attr.kind, attr.size), (FileKind::File, 3_000_001));
    assert!(attr.mtime.elapsed().is_ok_and(|age| age < Duration::from_secs(600)), "{:?}", attr.mtime);
    for (offset, len) in [(0, 3_000_001), (0, 1), (3_000_000, 1), (1_234_567, 999_999), (1 << 20, 1 << 20), (5, 0)] {
        let got = read(store, &big, offset, len).unwrap();
        assert!(got == bytes[offset as usize..offset as usize + len], "{len} bytes at {offset}");
    }
    let past = read(store, &big, 3_000_000, 2).unwrap_err();
    assert_eq!(past.kind(), ErrorKind::Invalid);
    let (empty, attr) = object(store, b"reads/empty");
    assert_eq!(attr.size, 0);
    assert_eq!(read(store, &empty, 0, 0).unwrap(), b"");
    // Many readers at once.
    std::thread::scope(|scope| {
        for i in 0..16u64 {
            let (big, bytes) = (&big, &bytes);
            scope.spawn(move || {
                let at = i * 180_000;
                assert!(read(store, big, at, 200_000).unwrap() == bytes[at as usize..at as usize + 200_000]);
            });
        }
    });
}

fn folders(store: &dyn OriginStore, fixture: &dyn Fixture) {
    fixture.put("tree/a/b/c", b"1");
    fixture.put("tree/a/d", b"22");
    fixture.folder("tree/empty");
    let root = store.lookup(b"", soon()).unwrap();
    assert_eq!(root.kind, FileKind::Directory);
    for path in [&b"tree"[..], b"tree/a", b"tree/a/b", b"tree/empty"] {
        let attr = store.lookup(path, soon()).unwrap_or_else(|e| panic!("{}: {e}", String::from_utf8_lossy(path)));
        assert_eq!((attr.kind, attr.size), (FileKind::Directory, 0), "{}", String::from_utf8_lossy(path));
    }
    let tree = list_all(store, b"tree", 1000);
    assert_eq!(names(&tree), [&b"a"[..], b"empty"]);
    assert!(tree.iter().all(|e| e.attr.kind == FileKind::Directory));
    // A lookup of a file written just now waits until its version is final; a listing does not.
    store.lookup(b"tree/a/d", soon()).unwrap();
    let a = list_all(store, b"tree/a", 1000);
    assert_eq!(names(&a), [&b"b"[..], b"d"]);
    assert!(list_all(store, b"tree/empty", 1000).is_empty());
    // A listing and a lookup return the same attributes.
    for entry in a {
        let path = [b"tree/a/", entry.name.as_slice()].concat();
        assert_eq!(store.lookup(&path, soon()).unwrap(), entry.attr);
    }
    for path in [&b"nothing"[..], b"tree/a/nothing", b"tree/a/b/c2", b"nothing/at/all"] {
        assert_eq!(store.lookup(path, soon()).unwrap_err().kind(), ErrorKind::NotFound);
    }
    assert_eq!(store.list(b"tree/nothing", None, 10, soon()).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(store.list(b"tree/a/d", None, 10, soon()).unwrap_err().kind(), ErrorKind::NotADirectory);
    // The marker of a folder, which a bucket may have.
    let marker = store.lookup(b"tree/empty/", soon());
    if store.capabilities().etags {
        assert_eq!(marker.map(|attr| (attr.kind, attr.size)).unwrap(), (FileKind::File, 0));
        assert_eq!(store.lookup(b"tree/nothing/", soon()).unwrap_err().kind(), ErrorKind::NotFound);
    } else {
        assert_eq!(marker.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(store.list(b"tree/", None, 10, soon()).unwrap_err().kind(), ErrorKind::Invalid);
    for path in [&b"/tree"[..], b"a//b", b"..", b"a/../b", b".", b"a\0b"] {
        assert_eq!(store.lookup(path, soon()).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(store.list(path, None, 10, soon()).unwrap_err().kind(), ErrorKind::Invalid);
    }
}

fn pages(store: &dyn OriginStore, fixture: &dyn Fixture) {
    let many = fixture.many();
    for i in 0..many {
        fixture.put(&format!("many/f{i:06}"), format!("{i}").as_bytes());
    }
    for max in [100, 1000, 5000] {
        let all = list_all(store, b"many", max);
        let seen: BTreeMap<_, _> = all.iter().map(|e| (e.name.clone(), e.attr.size)).collect();
        assert_eq!((all.len(), seen.len()), (many, many), "with pages of {max}");
        assert_eq!(seen.get(&b"f000123"[..]), Some(&3));
    }
}

fn odd_names(store: &dyn OriginStore, fixture: &dyn Fixture) {
    let longest = "l".repeat(255);
    let mut odd = vec![
        &longest,
        "plain",
        "with space",
        " leading",
        "trailing ",
        "per%cent",
        "per%20cent",
        "%2e%2e",
        "%2F",
        "plus+plus",
        "a#b",
        "a?b=c&d",
        "a*b",
        "[x]",
        "{y}",
        "a\\b",
        "qu\"ote",
        "apo'strophe",
        "<tag>&amp;",
        "semi;colon",
        "col:on",
        "ti~lde",
        "dol$lar",
        "at@x",
        "comma,eq=",
        "…",
        "ünïcode",
        "日本語",
        "emoji🚂",
        "e\u{301}",
        "-dash",
        ".hidden",
        "...",
        "..x",
        "x..",
        "a=b",
        "`tick`",
        "pi|pe",
        "ca^ret",
        "ex!cl",
        "(par)",
    ];
    if fixture.any_character() {
        odd.extend(["new\nline", "tab\tbed", "ret\rurn", "bell\u{7}", "\u{1}", "del\u{7f}", "nb\u{a0}sp"]);
    }
    for (i, name) in odd.iter().enumerate() {
        fixture.put(&format!("odd/{name}"), format!("{i}:{name}").as_bytes());
        fixture.put(&format!("deep/{name}/in"), name.as_bytes());
    }
    let listed = list_all(store, b"odd", 1000);
    let mut expected: Vec<&[u8]> = odd.iter().map(|n| n.as_bytes()).collect();
    expected.sort_unstable();
    assert_eq!(names(&listed), expected);
    assert_eq!(names(&list_all(store, b"deep", 7)), expected);
    for (i, name) in odd.iter().enumerate() {
        let (found, _) = object(store, format!("odd/{name}").as_bytes());
        let content = format!("{i}:{name}");
        assert_eq!(read(store, &found, 0, content.len()).unwrap(), content.as_bytes(), "{name:?}");
        let inside = list_all(store, format!("deep/{name}").as_bytes(), 10);
        assert_eq!(names(&inside), [&b"in"[..]], "{name:?}");
    }
}

fn versions(store: &dyn OriginStore, fixture: &dyn Fixture) {
    let (old, new) = (pattern(500_000, 2), pattern(500_000, 3));
    fixture.put("versions/f", &old);
    let (first, _) = object(store, b"versions/f");
    assert!(read(store, &first, 1000, 1000).unwrap() == old[1000..2000]);
    let (again, _) = object(store, b"versions/f");
    assert_eq!(first, again, "an object left alone keeps its version");
    fixture.put("versions/f", &new);
    let error = read(store, &first, 1000, 1000).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Stale, "{error}");
    let (second, _) = object(store, b"versions/f");
    assert_ne!(first.version, second.version);
    assert!(read(store, &second, 0, 500_000).unwrap() == new);
    fixture.put("versions/f", &new[..100]);
    assert_eq!(read(store, &second, 0, 50).unwrap_err().kind(), ErrorKind::Stale);
    fixture.remove("versions/f");
    assert_eq!(read(store, &second, 0, 1000).unwrap_err().kind(), ErrorKind::Stale);
    assert_eq!(store.lookup(b"versions/f", soon()).unwrap_err().kind(), ErrorKind::NotFound);
}
