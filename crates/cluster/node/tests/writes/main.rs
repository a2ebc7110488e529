//! Changes through nodes, over TCP, in a real directory: names, bytes, a node that is lost, and answers that are lost.

mod close_to_open;
mod repeated;
mod rig;
mod slow_answers;
mod stage;
mod store;

use rig::{BLOCK, BoundAnswer, Node, OldRelease, connect, mount, start_writes};
use spurline_net_sim::{FaultPlan, FaultRates};
use spurline_proto::{
    AnswerBody as _, ChangeId, HelloRequest, MAX_VERSION, MIN_WRITE_VERSION, NodeRequest, OpenFlags, WireCaller,
    WriteAnswer, WriteCall, WriteRequest,
};
use spurline_transport::{ConnState, ConnectionEndpoints, Service as _, TransportKind};
use spurline_types::errno::{EACCES, EAGAIN, EEXIST, EIO, ENOTEMPTY, ESTALE};
use spurline_types::{ErrorKind, Result};
use spurline_volume::Volume as _;
use spurline_volume::delayed::DelayedWrites as _;
use spurline_volume::writes::{
    AttrChange, Caller, Change, FileIdentity, FileLock, FileTime, LockFamily, LockKind, LockRange, NamePath, NewTime,
    NodePath, WritableFile, WritableVolume,
};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const O_RDWR: u32 = 2;
const O_CREAT: u32 = 0o100;
const O_EXCL: u32 = 0o200;
const O_APPEND: u32 = 0o2000;

fn root() -> Caller {
    Caller::default()
}

fn dir(path: &[u8]) -> NodePath<'_> {
    NodePath { path, expected: None }
}

fn name<'a>(directory: &'a [u8], name: &'a [u8]) -> NamePath<'a> {
    NamePath { directory: dir(directory), name }
}

fn create(volume: &dyn WritableVolume, path: &str, flags: u32) -> Result<Box<dyn WritableFile>> {
    let (folder, last) = path.rsplit_once('/').unwrap_or(("", path));
    let at = name(folder.as_bytes(), last.as_bytes());
    volume.create(at, O_RDWR | O_CREAT | flags, 0o644, &root()).map(|created| created.file)
}

fn rename(volume: &dyn WritableVolume, from: &str, to: &str) -> Result<()> {
    // The kernel looks names up before it changes them.
    volume.lookup(name(b"", from.as_bytes()), &root())?;
    let change = Change::Rename { from: name(b"", from.as_bytes()), to: name(b"", to.as_bytes()), flags: 0 };
    volume.change(&change, &root()).map(drop)
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|i| ((i * 7 + (i >> 11)) ^ seed) as u8).collect()
}

#[test]
fn names_and_bytes_are_changed_through_a_node() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    assert!(writes.capabilities().hard_links);
    writes.change(&Change::Mkdir { at: name(b"", b"d"), mode: 0o755, implied: false }, &root()).unwrap();
    let file = create(&*writes, "d/f", O_EXCL).unwrap();
    // Within a request, in a buffer of its own, and both around the node's borders.
    let mut at = 0;
    let mut wanted = Vec::new();
    for len in [1usize, 100, 2047, 4096, 65_535, 65_600, 1 << 20, (4 << 20) - 1, 4 << 20] {
        let bytes = pattern(len, at);
        assert_eq!(file.write_at(at as u64, &bytes, None).unwrap(), len);
        at += len;
        wanted.extend(bytes);
    }
    file.sync(false).unwrap();
    assert!(fs::read(source.path().join("d/f")).unwrap() == wanted);
    let mut back = vec![0; 1 << 20];
    assert_eq!(file.read_at(77, &mut back).unwrap(), 1 << 20);
    assert!(back == wanted[77..77 + (1 << 20)]);
    assert_eq!(file.read_at(at as u64 - 5, &mut back).unwrap(), 5);
    assert_eq!(file.stat().unwrap().size, at as u64);
    let set = AttrChange { size: Some(10), ..AttrChange::default() };
    assert_eq!(file.set_attr(&set, &root()).unwrap().size, 10);
    writes.change(&Change::Symlink { at: name(b"d", b"l"), target: b"f" }, &root()).unwrap();
    assert_eq!(writes.readlink(dir(b"d/l"), &root()).unwrap(), b"f");
    writes.change(&Change::Link { from: dir(b"d/f"), to: name(b"d", b"g") }, &root()).unwrap();
    let of = dir(b"d/f");
    writes.change(&Change::SetXattr { of, name: b"user.a", value: b"value", flags: 0 }, &root()).unwrap();
    assert_eq!(writes.get_xattr(of, b"user.a", &root()).unwrap(), b"value");
    let opened = writes.open_directory(dir(b"d"), &root()).unwrap();
    let names: BTreeSet<_> = opened.read(0, 100, true, &root()).unwrap().into_iter().map(|n| n.name).collect();
    let wanted = [&b"."[..], b"..", b"f", b"g", b"l"];
    assert!(names.iter().map(Vec::as_slice).eq(wanted), "{names:?}");
    assert_eq!(fs::metadata(source.path().join("d/g")).unwrap().len(), 10);
    // The source's own errors.
    let again = create(&*writes, "d/f", O_EXCL).err().unwrap();
    assert_eq!(again.kind(), ErrorKind::Io(EEXIST), "{again}");
    let busy = writes.change(&Change::Rmdir { at: name(b"", b"d") }, &root()).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Io(ENOTEMPTY), "{busy}");
    let stranger = Caller { uid: 1234, gid: 1234, ..Caller::default() };
    let denied = writes.change(&Change::Unlink { at: name(b"d", b"f") }, &stranger).unwrap_err();
    assert!(matches!(denied.kind(), ErrorKind::PermissionDenied | ErrorKind::Io(EACCES)), "{denied}");
    // An object that is not the expected one.
    let other = NodePath { path: b"d/f", expected: Some(FileIdentity::from_number(1)) };
    let stale = writes.stat(other, &root()).unwrap_err();
    assert!(matches!(stale.kind(), ErrorKind::Stale | ErrorKind::Io(ESTALE)), "{stale}");
    drop((file, opened));
    // One request closes many files, soon.
    while node.node.writes_in_use().open_files != 0 {
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_node_without_writable_takes_no_change() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), false);
    let error = mount(source.path(), &[&node], None).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::ReadOnly);
    assert!(error.message().contains("--writable"), "{error}");
}

/// Each change is made once, however many requests and answers are lost.
#[test]
fn lost_answers_repeat_nothing() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let plan = Arc::new(FaultPlan::new(7, FaultRates::default()));
    let (_volume, writes) = mount(source.path(), &[&node], Some(Arc::clone(&plan))).unwrap();
    let log = create(&*writes, "log", O_APPEND).unwrap();
    // The request is lost, or its answer is.
    plan.set_rates(FaultRates { drop: 80, cut: 150, garbage: 70, ..FaultRates::default() });
    let mut wanted = Vec::new();
    for round in 0..40 {
        let line = format!("line {round}\n");
        assert_eq!(log.write_at(0, line.as_bytes(), None).unwrap(), line.len());
        log.flush().unwrap();
        wanted.extend(line.into_bytes());
        let (a, b) = (format!("a{round}"), format!("b{round}"));
        drop(create(&*writes, &a, O_EXCL).unwrap_or_else(|e| panic!("{a}: {e}")));
        rename(&*writes, &a, &b).unwrap_or_else(|e| panic!("{a} to {b}: {e}"));
        let link = Change::Link { from: dir(b.as_bytes()), to: name(b"", a.as_bytes()) };
        writes.change(&link, &root()).unwrap();
        writes.change(&Change::Unlink { at: name(b"", b.as_bytes()) }, &root()).unwrap();
        let folder = format!("d{round}");
        writes
            .change(&Change::Mkdir { at: name(b"", folder.as_bytes()), mode: 0o755, implied: false }, &root())
            .unwrap();
        writes.change(&Change::Rmdir { at: name(b"", folder.as_bytes()) }, &root()).unwrap();
    }
    plan.set_rates(FaultRates::default());
    assert!(fs::read(source.path().join("log")).unwrap() == wanted);
    let names = fs::read_dir(source.path()).unwrap().count();
    assert_eq!(names, 41);
}

/// Another process takes over: open files are opened again, and what was made is recognised.
#[test]
fn another_node_takes_over() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1]], None).unwrap();
    let (_other, second) = mount(source.path(), &[&nodes[1], &nodes[0]], None).unwrap();
    let files: Vec<_> = (0..8).map(|n| create(&*writes, &format!("f{n}"), O_EXCL).unwrap()).collect();
    let logs: Vec<_> = (0..4).map(|n| create(&*writes, &format!("log{n}"), O_APPEND).unwrap()).collect();
    let block = pattern(300_000, 3);
    for round in 0..6u64 {
        for file in &files {
            assert_eq!(file.write_at(round * 300_000, &block, None).unwrap(), block.len());
        }
        for log in &logs {
            assert_eq!(log.write_at(0, format!("{round}\n").as_bytes(), None).unwrap(), 2);
            log.flush().unwrap();
        }
        rename(&*writes, &format!("f{round}"), &format!("g{round}")).unwrap();
        // One at a time is away.
        match round {
            1 => nodes[0].kill(),
            2 => nodes[0].restart(),
            3 => nodes[1].kill(),
            4 => nodes[1].restart(),
            _ => {}
        }
    }
    for (n, file) in files.iter().enumerate() {
        // Both processes were lost with bytes that were not synced: they were sent again.
        file.flush().unwrap();
        file.sync(true).unwrap();
        let path = if n < 6 { format!("g{n}") } else { format!("f{n}") };
        assert!(fs::read(source.path().join(&path)).unwrap() == block.repeat(6), "{path}");
        // Close-to-open: another mount, which prefers the other node.
        let seen = second.open(dir(path.as_bytes()), 0, &root()).unwrap();
        let mut bytes = vec![0; block.len()];
        assert_eq!(seen.read_at(5 * 300_000, &mut bytes).unwrap(), block.len());
        assert!(bytes == block);
    }
    for n in 0..4 {
        assert_eq!(fs::read(source.path().join(format!("log{n}"))).unwrap(), b"0\n1\n2\n3\n4\n5\n");
    }
}

/// What was closed without a sync can be lost with its process, and a sync of all says so, once.
#[test]
fn a_sync_of_all_reports_a_lost_node() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1]], None).unwrap();
    for n in 0..16 {
        create(&*writes, &format!("f{n}"), O_EXCL).unwrap().write_at(0, b"bytes", None).unwrap();
    }
    writes.sync_all().unwrap();
    create(&*writes, "later", O_EXCL).unwrap().write_at(0, b"bytes", None).unwrap();
    nodes.iter_mut().for_each(Node::restart);
    let error = writes.sync_all().unwrap_err();
    assert!(error.kind() == ErrorKind::Io(EIO) && error.message().contains("without fsync"), "{error}");
    writes.sync_all().unwrap();
}

fn cut(source: &Path, name: &str, len: u64) {
    fs::File::options().write(true).open(source.join(name)).unwrap().set_len(len).unwrap();
}

/// The host of a node is lost, and with it what was not synced: the next node gets those bytes again.
#[test]
fn unsynced_bytes_reach_the_next_node() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1]], None).unwrap();
    let block = pattern(200_000, 5);
    let file = create(&*writes, "f", O_EXCL).unwrap();
    let log = create(&*writes, "log", O_APPEND).unwrap();
    let mut wanted = block.repeat(8);
    wanted[4 * 200_000..][..4].copy_from_slice(b"over");
    for n in 0..4 {
        file.write_at(n * 200_000, &block, None).unwrap();
    }
    log.write_at(0, b"synced\n", None).unwrap();
    file.sync(true).unwrap();
    log.sync(true).unwrap();
    for n in 4..8 {
        file.write_at(n * 200_000, &block, None).unwrap();
    }
    file.write_at(4 * 200_000, b"over", None).unwrap();
    for line in [&b"one\n"[..], b"two\n"] {
        log.write_at(0, line, None).unwrap();
    }
    // A look at the file sends all that was written.
    assert_eq!((file.stat().unwrap().size, log.stat().unwrap().size), (8 * 200_000, 15));
    assert!(fs::read(source.path().join("f")).unwrap() == wanted);
    cut(source.path(), "f", 4 * 200_000);
    cut(source.path(), "log", 9);
    nodes.iter_mut().for_each(Node::restart);
    // Attributes by path and reads come after the bytes.
    let path = NodePath { path: b"f", expected: Some(file.stat().unwrap().identity) };
    assert_eq!(writes.stat(path, &root()).unwrap().size, 8 * 200_000);
    let mut back = vec![0; 200_000];
    assert_eq!(file.read_at(7 * 200_000, &mut back).unwrap(), back.len());
    assert!(back == block);
    file.sync(true).unwrap();
    log.sync(true).unwrap();
    assert!(fs::read(source.path().join("f")).unwrap() == wanted);
    assert_eq!(fs::read_to_string(source.path().join("log")).unwrap(), "synced\none\ntwo\n");
    // Synced bytes are not sent again: what another host changes stays.
    cut(source.path(), "f", 5);
    nodes.iter_mut().for_each(Node::restart);
    file.sync(true).unwrap();
    assert_eq!(file.stat().unwrap().size, 5);
    // A record of another host behind one that was lost: the mount can't know the place of its own.
    log.write_at(0, b"three\n", None).unwrap();
    log.flush().unwrap();
    fs::write(source.path().join("log"), "synced\none\ntwo\nother").unwrap();
    nodes.iter_mut().for_each(Node::restart);
    let error = log.sync(true).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Io(EIO), "{error}");
    log.sync(true).unwrap();
    assert_eq!(log.flush().unwrap_err().kind(), ErrorKind::Io(EIO));
    log.flush().unwrap();
}

/// Written bytes are visible before anything that would show their absence, and to the directory after a second.
#[test]
fn bytes_written_behind_are_seen() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    let (_other, second) = mount(source.path(), &[&node], None).unwrap();
    let file = create(&*writes, "f", O_EXCL).unwrap();
    let identity = file.stat().unwrap().identity;
    let at = NodePath { path: b"f", expected: Some(identity) };
    let size = || fs::metadata(source.path().join("f")).unwrap().len();
    let mut end = 0;
    let mut write = |file: &dyn WritableFile| {
        file.write_at(end, b"line\n", None).unwrap();
        end += 5;
        end
    };
    let end = write(&*file);
    assert_eq!(size(), 0, "it is written behind");
    assert_eq!(writes.stat(at, &root()).unwrap().size, end);
    let end = write(&*file);
    assert_eq!(writes.lookup(name(b"", b"f"), &root()).unwrap().size, end);
    let end = write(&*file);
    let folder = writes.open_directory(dir(b""), &root()).unwrap();
    let listed = folder.read(0, 100, true, &root()).unwrap();
    let listed = listed.iter().find(|listed| listed.name == b"f").unwrap();
    assert_eq!(listed.attr.unwrap().size, end);
    let end = write(&*file);
    let mut bytes = [0; 5];
    let beside = writes.open(at, O_RDWR, &root()).unwrap();
    assert_eq!(beside.read_at(end - 5, &mut bytes).unwrap(), 5);
    // Two open files of one file, in the order of their writes.
    file.write_at(0, b"first", None).unwrap();
    beside.write_at(0, b"se", None).unwrap();
    assert_eq!((file.read_at(0, &mut bytes).unwrap(), &bytes), (5, b"serst"));
    // A time that is set stays, and a rename takes the bytes with it.
    write(&*beside);
    let time = FileTime { seconds: 1000, nanos: 0 };
    let set = AttrChange { mtime: Some(NewTime::At(time)), ..AttrChange::default() };
    writes.change(&Change::SetAttr { of: at, set }, &root()).unwrap();
    file.flush().unwrap();
    assert_eq!(file.stat().unwrap().mtime, time);
    let end = write(&*beside);
    rename(&*writes, "f", "g").unwrap();
    assert_eq!(second.lookup(name(b"", b"g"), &root()).unwrap().size, end);
    // Cut while bytes are unsent, by its open file and by its path.
    write(&*file);
    let cut = |size| AttrChange { size: Some(size), ..AttrChange::default() };
    assert_eq!(beside.set_attr(&cut(3), &root()).unwrap().size, 3);
    file.write_at(0, b"12345", None).unwrap();
    let of = NodePath { path: b"g", expected: Some(identity) };
    writes.change(&Change::SetAttr { of, set: cut(4) }, &root()).unwrap();
    assert_eq!(fs::read(source.path().join("g")).unwrap(), b"1234");
    // After close, in another mount.
    beside.write_at(4, b"!", None).unwrap();
    beside.flush().unwrap();
    let seen = second.open(dir(b"g"), 0, &root()).unwrap();
    assert_eq!(seen.stat().unwrap().size, 5);
    // Without any call, after a while.
    file.write_at(5, b"?", None).unwrap();
    let deadline = Instant::now() + Duration::from_secs(60);
    while fs::read(source.path().join("g")).unwrap() != b"1234!?" {
        assert!(Instant::now() < deadline, "it is not sent");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Files together larger than the memory: it stays within its limit, whatever the pattern of the writes.
#[test]
fn memory_of_written_bytes_is_bounded() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    let files: Vec<_> = (0..4).map(|n| create(&*writes, &format!("f{n}"), O_EXCL).unwrap()).collect();
    let block = pattern(100_000, 9);
    std::thread::scope(|scope| {
        for file in &files {
            scope.spawn(|| {
                // Backwards, so that no piece grows.
                for n in (0..150u64).rev() {
                    assert_eq!(file.write_at(n * 100_000, &block, None).unwrap(), block.len());
                    let (used, limit) = writes.memory();
                    assert!(used <= limit, "{used} of {limit} bytes");
                }
            });
        }
    });
    for (n, file) in files.iter().enumerate() {
        file.flush().unwrap();
        assert!(fs::read(source.path().join(format!("f{n}"))).unwrap() == block.repeat(150));
    }
    drop(files);
    assert_eq!((writes.memory().0, writes.unsent_files()), (0, Vec::new()));
}

/// A node with another directory at the same path is refused, and named.
#[test]
fn a_node_with_another_directory_is_refused() {
    let (source, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (one, two) = (Node::start(source.path(), true), Node::start_over(source.path(), other.path()));
    let error = mount(source.path(), &[&one, &two], None).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(
        error.message().contains("different directories") && error.message().contains(&two.at.to_string()),
        "{error}"
    );
    // The probe files are gone.
    assert_eq!(fs::read_dir(source.path()).unwrap().count() + fs::read_dir(other.path()).unwrap().count(), 0);
    let (_volume, _writes) = mount(source.path(), &[&one], None).unwrap();
}

/// Releases with another form of writes: each side names the older one, and reads go on.
#[test]
fn an_older_release_is_named_and_reads_go_on() {
    const OLD: u16 = MIN_WRITE_VERSION - 1;
    let source = tempfile::tempdir().unwrap();
    fs::write(source.path().join("f"), b"bytes").unwrap();
    let nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    for count in [1, 2] {
        let nodes: Vec<&Node> = nodes[..count].iter().collect();
        for (found, older, said) in
            [(OLD, "node", "the node's release is older"), (MAX_VERSION, "mount", "the mount's release is older")]
        {
            let old = OldRelease { versions: (OLD, found), node: None, is_old: Arc::new(true.into()) };
            let volume = connect(source.path(), &nodes, None, Some(old)).unwrap();
            let error = volume.open_writes(None, 4 * BLOCK).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{older}: {error}");
            let (speaks, need) = (format!("speaks protocol version {OLD}"), format!("need {MIN_WRITE_VERSION}"));
            for words in [said, &speaks, &need, "upgrade", "--rw"] {
                assert!(error.message().contains(words), "{older}: {error}");
            }
            assert_eq!(volume.lookup(b"f").unwrap().size, 5);
        }
    }
    assert_eq!(fs::read_dir(source.path()).unwrap().count(), 1, "a probe file was made");
}

/// A node that was started again with an older release counts as lost: its files move with their bytes.
#[test]
fn files_of_a_node_with_an_older_release_move_on() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let is_old = Arc::new(AtomicBool::new(false));
    let versions = (MIN_WRITE_VERSION - 1, MIN_WRITE_VERSION - 1);
    let old = OldRelease { versions, node: Some(nodes[0].at), is_old: Arc::clone(&is_old) };
    let volume = connect(source.path(), &[&nodes[0], &nodes[1]], None, Some(old)).unwrap();
    let (_volume, writes) = start_writes(volume).unwrap();
    let files: Vec<_> = (0..8).map(|n| create(&*writes, &format!("f{n}"), O_EXCL).unwrap()).collect();
    let open_files = |node: &Node| node.node.writes_in_use().open_files;
    assert!(open_files(&nodes[0]) > 0 && open_files(&nodes[1]) > 0, "both are homes");
    for file in &files {
        file.write_at(0, b"before, ", None).unwrap();
    }
    is_old.store(true, Ordering::Relaxed);
    nodes[0].restart();
    for (n, file) in files.iter().enumerate() {
        file.write_at(8, b"after", None).unwrap();
        file.sync(true).unwrap();
        assert_eq!(fs::read(source.path().join(format!("f{n}"))).unwrap(), b"before, after");
    }
    assert_eq!(open_files(&nodes[1]), 8);
    for n in 0..8 {
        drop(create(&*writes, &format!("new{n}"), O_EXCL).unwrap());
    }
    // No other node is left.
    nodes[1].kill();
    let error = create(&*writes, "none", O_EXCL).err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// One request looks a name up and opens the file, if that is one of the caller's.
#[test]
fn a_lookup_opens_a_file_that_its_caller_can_open() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    fs::create_dir(source.path().join("d")).unwrap();
    fs::write(source.path().join("d/f"), b"bytes").unwrap();
    std::os::unix::fs::symlink("f", source.path().join("d/l")).unwrap();
    let look = |name: NamePath<'_>, caller: &Caller| writes.opening_lookups().unwrap().lookup_open(name, 0, caller);
    let (attr, file) = look(name(b"d", b"f"), &root()).unwrap();
    let mut bytes = [0; 9];
    assert_eq!((attr.size, file.unwrap().read_at(0, &mut bytes).unwrap()), (5, 5));
    assert!(
        look(name(b"", b"d"), &root()).unwrap().1.is_none() && look(name(b"d", b"l"), &root()).unwrap().1.is_none()
    );
    assert!(look(name(b"d", b"none"), &root()).is_err());
    fs::set_permissions(source.path().join("d/f"), fs::Permissions::from_mode(0o600)).unwrap();
    let stranger = Caller { uid: 1234, gid: 1234, ..Caller::default() };
    // A node without root serves its own user only.
    if let Ok((attr, file)) = look(name(b"d", b"f"), &stranger) {
        assert!(attr.size == 5 && file.is_none());
    }
    // The node does not know what this mount has written.
    let written = create(&*writes, "w", O_EXCL).unwrap();
    written.write_at(0, b"behind", None).unwrap();
    let (attr, file) = look(name(b"", b"w"), &root()).unwrap();
    assert!(attr.size == 6 && file.is_none());
    // The directory is not the expected directory.
    let other = NodePath { path: b"d", expected: Some(FileIdentity::from_number(1)) };
    assert!(look(NamePath { directory: other, name: b"f" }, &root()).is_err());
}

/// Over RDMA, the bytes of a write as another user go to another thread, in memory of the node's budget.
#[test]
fn bytes_for_another_thread_lie_in_the_budget() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let at = String::from("here");
    let conn = ConnState::new(1, ConnectionEndpoints { kind: TransportKind::Rdma, local: at.clone(), peer: at });
    let of = format!("file://{}", source.path().display());
    let volume = node.node.handle_hello(&conn, &HelloRequest::new("test", &of)).unwrap().volume;
    let serve = |number, call, payload: &[u8]| -> Result<WriteAnswer> {
        let id = ChangeId { session: 1, number };
        let (known, caller) = ([None; 2], WireCaller::default());
        let request =
            WriteRequest { volume, id, answered: 0, again: false, marked: false, known, caller, call, payload };
        let mut answer = BoundAnswer::default();
        node.node.serve_request(&conn, NodeRequest::Write(request), &mut answer)?;
        Ok(WriteAnswer::decode(&answer.0).unwrap())
    };
    let flags = OpenFlags::new(O_RDWR | O_CREAT);
    let made = serve(1, WriteCall::Create { at: name(b"", b"f"), flags, mode: 0o644, file: 5 }, &[]).unwrap();
    assert!(matches!(made, WriteAnswer::Created(..)), "{made:?}");
    let bytes = pattern(BLOCK as usize, 1);
    let write = WriteCall::Write { file: 5, offset: 0, append: false, lose_privileges: true, flush: false };
    let held: Vec<_> = std::iter::from_fn(|| node.pool.try_alloc(BLOCK as usize)).collect();
    let full = serve(0, write, &bytes).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::Throttled, "{full}");
    drop(held);
    assert_eq!(serve(0, write, &bytes).unwrap(), WriteAnswer::Number(BLOCK));
    assert!(fs::read(source.path().join("f")).unwrap() == bytes);
}

fn lock_of(owner: u64, start: u64, end: u64, kind: LockKind) -> FileLock {
    FileLock { family: LockFamily::Posix, owner, range: LockRange { start, end }, kind }
}

/// A lock that another mount took while its node was away is lost: nothing that was written under it arrives any more.
#[test]
fn a_lost_lock_fails_the_file_until_it_is_unlocked() {
    let source = tempfile::tempdir().unwrap();
    let mut node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    let (_other, second) = mount(source.path(), &[&node], None).unwrap();
    let file = create(&*writes, "f", 0).unwrap();
    let again = writes.open(dir(b"f"), O_RDWR, &root()).unwrap();
    let (mine, theirs) = (lock_of(1, 0, 9, LockKind::Write), lock_of(1, 5, 7, LockKind::Write));
    file.set_lock(&mine, &root()).unwrap();
    again.write_at(0, b"not synced", None).unwrap();
    again.flush().unwrap();
    let other = second.open(dir(b"f"), O_RDWR, &root()).unwrap();
    assert_eq!(other.set_lock(&theirs, &root()).unwrap_err().kind(), ErrorKind::Io(EAGAIN));
    assert!(other.test_lock(&theirs).unwrap().is_some());
    // Taken again by the next process.
    node.restart();
    file.stat().unwrap();
    assert_eq!(other.set_lock(&theirs, &root()).unwrap_err().kind(), ErrorKind::Io(EAGAIN));
    // Not fast enough.
    node.restart();
    other.set_lock(&theirs, &root()).unwrap();
    other.write_at(0, b"the other's", None).unwrap();
    other.sync(true).unwrap();
    file.stat().unwrap();
    let mut bytes = [0; 20];
    assert_eq!(file.read_at(0, &mut bytes).unwrap_err().kind(), ErrorKind::Io(EIO));
    // Through any open file: the bytes are refused, and that is reported.
    again.write_at(0, b"too late", None).ok();
    assert_eq!(again.sync(true).unwrap_err().kind(), ErrorKind::Io(EIO));
    assert_eq!(fs::read(source.path().join("f")).unwrap(), b"the other's");
    let all = lock_of(1, 0, u64::MAX >> 1, LockKind::Unlock);
    file.set_lock(&all, &root()).unwrap();
    assert_eq!(file.read_at(0, &mut bytes).unwrap(), 11);
    drop(other);
    file.set_lock(&mine, &root()).unwrap();
    again.write_at(0, b"mine again", None).unwrap();
    again.sync(true).unwrap();
    assert_eq!(fs::read(source.path().join("f")).unwrap(), b"mine agains");
}

/// A lock is not taken again when others could have had it since: what was read under it may be old.
#[test]
fn a_lock_that_another_mount_has_had_is_lost_although_it_is_free() {
    let source = tempfile::tempdir().unwrap();
    let mut node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    let (_other, second) = mount(source.path(), &[&node], None).unwrap();
    let file = create(&*writes, "f", 0).unwrap();
    let other = second.open(dir(b"f"), O_RDWR, &root()).unwrap();
    let mine = lock_of(1, 0, 9, LockKind::Write);
    let unlock = FileLock { kind: LockKind::Unlock, ..mine };
    let content = || fs::read_to_string(source.path().join("f")).unwrap();
    let lose = |bytes: &[u8], why: &str| {
        let before = content();
        let written = file.write_at(0, bytes, None).map(drop).and_then(|()| file.sync(true));
        assert_eq!(written.unwrap_err().kind(), ErrorKind::Io(EIO), "{why}");
        assert_eq!(content(), before, "{why}");
        file.set_lock(&unlock, &root()).unwrap();
        // That failure is reported once, here or before.
        let _ = (file.flush(), file.sync(true));
        file.sync(true).unwrap();
    };
    // The mount was silent for too long.
    file.set_lock(&mine, &root()).unwrap();
    file.write_at(0, b"first", None).unwrap();
    node.node.expire_write_sessions_at(Instant::now() + Duration::from_secs(20));
    lose(b"silent", "the node has closed the file");
    // The node was lost, and another mount was faster.
    file.set_lock(&mine, &root()).unwrap();
    node.restart();
    other.set_lock(&mine, &root()).unwrap();
    other.write_at(0, b"theirs", None).unwrap();
    other.set_lock(&unlock, &root()).unwrap();
    lose(b"late", "another mount has had the lock");
    assert_eq!(content(), "theirs");
    // The mount noticed the loss late: others no longer wait for it.
    file.set_lock(&mine, &root()).unwrap();
    writes.set_lock_grace(Duration::ZERO, Duration::ZERO);
    node.restart();
    lose(b"later", "too much time has passed");
    writes.set_lock_grace(Duration::ZERO, Duration::from_secs(60));
    file.set_lock(&mine, &root()).unwrap();
    node.restart();
    file.write_at(0, b"mine", None).unwrap();
    file.sync(true).unwrap();
    assert_eq!(content(), "miners");
}

/// A lock is not taken again while a further node gives no answer, which may have given it to another mount.
#[test]
fn a_lock_is_lost_where_a_further_node_can_not_be_asked() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes: Vec<Node> = (0..3).map(|_| Node::start(source.path(), true)).collect();
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1], &nodes[2]], None).unwrap();
    nodes[2].kill();
    // Some of them belong to either of the others.
    let files: Vec<_> = (0..16).map(|number| create(&*writes, &format!("f{number}"), 0).unwrap()).collect();
    files.iter().for_each(|file| file.set_lock(&lock_of(1, 0, 9, LockKind::Write), &root()).unwrap());
    let of_first = nodes[0].node.writes_in_use().open_files;
    assert!((1..16).contains(&of_first), "{of_first} files belong to the first node");
    writes.set_lock_grace(Duration::ZERO, Duration::from_secs(1));
    nodes[0].kill();
    let is_lost = |error: &spurline_types::Error| error.kind() == ErrorKind::Io(EIO);
    let written = files.iter().map(|file| file.write_at(0, b"under the lock", None));
    assert_eq!(written.filter(|written| written.as_ref().is_err_and(is_lost)).count(), of_first);
}

/// What was written under a lock is not sent again after its release: another mount has changed it since.
#[test]
fn a_lost_node_brings_back_nothing_of_a_released_lock() {
    let source = tempfile::tempdir().unwrap();
    let mut node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    let (_other, second) = mount(source.path(), &[&node], None).unwrap();
    let whole = lock_of(1, 0, u64::MAX >> 1, LockKind::Write);
    let unlock = FileLock { kind: LockKind::Unlock, ..whole };
    let file = create(&*writes, "f", 0).unwrap();
    let beside = writes.open(dir(b"f"), O_RDWR, &root()).unwrap();
    let other = second.open(dir(b"f"), O_RDWR, &root()).unwrap();
    for (round, closes) in [(0, false), (1, true)] {
        let again = writes.open(dir(b"f"), O_RDWR, &root()).unwrap();
        let holder = if closes { &again } else { &file };
        holder.set_lock(&whole, &root()).unwrap();
        holder.write_at(0, b"old", None).unwrap();
        match closes {
            true => drop(again),
            false => file.set_lock(&unlock, &root()).unwrap(),
        }
        other.set_lock(&whole, &root()).unwrap();
        other.write_at(0, b"new", None).unwrap();
        other.set_lock(&unlock, &root()).unwrap();
        node.restart();
        for open in [&file, &beside, &other] {
            open.stat().unwrap();
        }
        assert_eq!(fs::read(source.path().join("f")).unwrap(), b"new", "round {round}");
    }
}

/// After the loss of a node, those that had locks there take them again before others get any.
#[test]
fn new_locks_wait_for_those_of_a_lost_node() {
    const GRACE: Duration = Duration::from_millis(500);
    let source = tempfile::tempdir().unwrap();
    let mut node = Node::start(source.path(), true);
    let (_volume, writes) = mount(source.path(), &[&node], None).unwrap();
    let (_other, second) = mount(source.path(), &[&node], None).unwrap();
    second.set_lock_grace(GRACE, Duration::from_secs(60));
    let file = create(&*writes, "f", 0).unwrap();
    let other = second.open(dir(b"f"), O_RDWR, &root()).unwrap();
    let mine = lock_of(1, 0, 9, LockKind::Write);
    file.set_lock(&mine, &root()).unwrap();
    for _ in 0..2 {
        node.restart();
        let begun = Instant::now();
        let mut answer = other.set_lock(&mine, &root()).map_err(|error| error.kind());
        if begun.elapsed() < GRACE {
            assert_eq!(answer, Err(ErrorKind::Throttled));
        }
        file.write_at(0, b"mine", None).unwrap();
        while answer == Err(ErrorKind::Throttled) {
            std::thread::sleep(Duration::from_millis(20));
            answer = other.set_lock(&mine, &root()).map_err(|error| error.kind());
        }
        assert_eq!(answer, Err(ErrorKind::Io(EAGAIN)), "its holder has it again");
    }
    file.set_lock(&FileLock { kind: LockKind::Unlock, ..mine }, &root()).unwrap();
    other.set_lock(&mine, &root()).unwrap();
}

/// A lock that another mount had on the next node, before this one got it on the lost one, is taken again there.
#[test]
fn earlier_locks_of_others_do_not_count() {
    let source = tempfile::tempdir().unwrap();
    let mut nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let (_volume, writes) = mount(source.path(), &[&nodes[0], &nodes[1]], None).unwrap();
    let (_other, second) = mount(source.path(), &[&nodes[0], &nodes[1]], None).unwrap();
    let mine = lock_of(1, 0, u64::MAX >> 1, LockKind::Write);
    let unlock = FileLock { kind: LockKind::Unlock, ..mine };
    // Some of them belong to either node.
    let names: Vec<String> = (0..16).map(|number| format!("f{number}")).collect();
    names.iter().for_each(|name| drop(create(&*writes, name, O_EXCL).unwrap()));
    let open = |by: &Arc<spurline_client::GroupWrites>| -> Vec<_> {
        names.iter().map(|name| by.open(dir(name.as_bytes()), O_RDWR, &root()).unwrap()).collect()
    };
    for round in 0..2 {
        for lost in [0, 1] {
            nodes[lost].kill();
            for other in open(&second) {
                other.set_lock(&mine, &root()).unwrap();
                other.set_lock(&unlock, &root()).unwrap();
            }
            nodes[lost].restart();
            let files = open(&writes);
            files.iter().for_each(|file| file.set_lock(&mine, &root()).unwrap());
            nodes[lost].kill();
            for (file, name) in files.iter().zip(&names) {
                let bytes = format!("{round} {lost}");
                file.write_at(0, bytes.as_bytes(), None).unwrap();
                file.sync(true).unwrap();
                assert_eq!(fs::read_to_string(source.path().join(name)).unwrap(), bytes);
            }
            nodes[lost].restart();
        }
    }
}

/// A file with a lock that is closed while its node can't be reached is closed there later.
#[test]
fn a_close_that_failed_is_repeated() {
    let source = tempfile::tempdir().unwrap();
    let node = Node::start(source.path(), true);
    let plan = Arc::new(FaultPlan::new(1, FaultRates::default()));
    let (_volume, writes) = mount(source.path(), &[&node], Some(Arc::clone(&plan))).unwrap();
    let (_other, second) = mount(source.path(), &[&node], None).unwrap();
    let mine = lock_of(1, 0, 9, LockKind::Write);
    let file = create(&*writes, "f", 0).unwrap();
    let other = second.open(dir(b"f"), O_RDWR, &root()).unwrap();
    file.set_lock(&mine, &root()).unwrap();
    plan.set_rates(FaultRates { drop: 1000, ..FaultRates::default() });
    drop(file);
    assert_eq!(other.set_lock(&mine, &root()).unwrap_err().kind(), ErrorKind::Io(EAGAIN), "its node has it open");
    plan.set_rates(FaultRates::default());
    let until = Instant::now() + Duration::from_secs(60);
    while let Err(error) = other.set_lock(&mine, &root()) {
        assert!(error.kind() == ErrorKind::Io(EAGAIN) && Instant::now() < until, "{error}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Programs of two mounts count in one file under a lock, while other threads write to it, connections break and the file moves
/// from node to node.
#[test]
fn locks_exclude_each_other_while_connections_break() {
    const ROUNDS: usize = 200;
    let source = tempfile::tempdir().unwrap();
    let nodes = [Node::start(source.path(), true), Node::start(source.path(), true)];
    let plan = Arc::new(FaultPlan::new(7, FaultRates::default()));
    let mounts = [(); 2].map(|()| mount(source.path(), &[&nodes[0], &nodes[1]], Some(Arc::clone(&plan))).unwrap());
    create(&*mounts[0].1, "counter", 0).unwrap().write_at(0, &0u64.to_le_bytes(), None).unwrap();
    let files: Vec<_> =
        mounts.iter().map(|(_, writes)| writes.open(dir(b"counter"), O_RDWR, &root()).unwrap()).collect();
    plan.set_rates(FaultRates { drop: 15, cut: 15, garbage: 15, ..FaultRates::default() });
    let (done, counted, lost) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let until = Instant::now() + Duration::from_secs(120);
    std::thread::scope(|scope| {
        for (number, file) in files.iter().enumerate() {
            let (done, counted, lost) = (&done, &counted, &lost);
            scope.spawn(move || {
                let mine = lock_of(1, 0, 7, LockKind::Write);
                let unlock = FileLock { kind: LockKind::Unlock, ..mine };
                for _ in 0..ROUNDS {
                    while let Err(error) = file.set_lock(&mine, &root()) {
                        assert!(error.kind() == ErrorKind::Io(EAGAIN) && Instant::now() < until, "{error}");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let mut count = [0; 8];
                    let read = file.read_at(0, &mut count);
                    let next = u64::from_le_bytes(count) + 1;
                    match read.and_then(|_| file.write_at(0, &next.to_le_bytes(), None)) {
                        Ok(_) => counted.fetch_add(1, Ordering::Relaxed),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::Io(EIO), "{error}");
                            lost.fetch_add(1, Ordering::Relaxed)
                        }
                    };
                    file.set_lock(&unlock, &root()).unwrap();
                }
                done.fetch_add(1, Ordering::Release);
            });
            scope.spawn(move || {
                for at in 0.. {
                    if done.load(Ordering::Acquire) == 2 {
                        break;
                    }
                    let offset = 4096 * (1 + number as u64 + 2 * (at % 8));
                    // It fails if the lock of the other thread is lost.
                    let _ = file.write_at(offset, &[number as u8; 100], None).and_then(|_| file.sync(true));
                }
            });
        }
    });
    plan.set_rates(FaultRates::default());
    files.iter().for_each(|file| file.sync(false).unwrap());
    let mut count = [0; 8];
    File::open(source.path().join("counter")).unwrap().read_exact_at(&mut count, 0).unwrap();
    let (counted, lost) = (counted.into_inner(), lost.into_inner());
    println!("{counted} counted, {lost} locks lost");
    assert_eq!(u64::from_le_bytes(count), counted as u64, "{lost} locks were lost");
}
