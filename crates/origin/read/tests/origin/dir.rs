//! Directories as origins: the conformance suite, and their own rules.

use crate::common;
use common::{Fixture, conformance, list_all, object, pattern, read, soon};
use spurline_object_store::OriginOptions;
use spurline_origin::{CachedOrigin, MetadataConfig, OriginStore, open};
use spurline_types::{ErrorKind, FileKind, ObjectRef, SliceSink, Stats};
use std::ffi::OsStr;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

struct Local(PathBuf);

impl Fixture for Local {
    fn put(&self, path: &str, bytes: &[u8]) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    fn remove(&self, path: &str) {
        std::fs::remove_file(self.0.join(path)).unwrap();
    }
    fn folder(&self, path: &str) {
        std::fs::create_dir_all(self.0.join(path)).unwrap();
    }
    fn any_character(&self) -> bool {
        true
    }
}

fn open_dir(path: &Path) -> (Arc<dyn OriginStore>, Arc<Stats>) {
    let stats = Arc::new(Stats::default());
    (open(path.to_str().unwrap(), &OriginOptions::default(), Arc::clone(&stats)).unwrap(), stats)
}

#[test]
fn keeps_the_common_rules() {
    let dir = tempfile::tempdir().unwrap();
    let (store, stats) = open_dir(dir.path());
    conformance(&*store, &stats, &Local(dir.path().into()));
}

#[test]
fn names_are_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (store, _) = open_dir(dir.path());
    let name = b"\xff\xfe\n%\x80";
    std::fs::write(dir.path().join(OsStr::from_bytes(name)), b"x").unwrap();
    assert_eq!(list_all(&*store, b"", 10)[0].name, name);
    let (found, _) = object(&*store, name);
    assert_eq!(read(&*store, &found, 0, 1).unwrap(), b"x");
}

#[test]
fn links_are_shown_and_never_followed() {
    let dir = tempfile::tempdir().unwrap();
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), b"s").unwrap();
    symlink(outside.path(), dir.path().join("link")).unwrap();
    symlink("nowhere", dir.path().join("dangling")).unwrap();
    let (store, stats) = open_dir(dir.path());
    for (name, target) in [("link", outside.path().as_os_str().as_bytes()), ("dangling", b"nowhere")] {
        let attr = store.lookup(name.as_bytes(), soon()).unwrap();
        assert_eq!((attr.kind, attr.size), (FileKind::Symlink, target.len() as u64));
        assert_eq!(store.readlink(name.as_bytes(), soon()).unwrap(), target);
    }
    assert_eq!(list_all(&*store, b"", 10).len(), 2);
    assert_eq!(store.lookup(b"link/secret", soon()).unwrap_err().kind(), ErrorKind::NotADirectory);
    assert_eq!(store.list(b"link", None, 10, soon()).unwrap_err().kind(), ErrorKind::NotADirectory);
    std::fs::write(dir.path().join("file"), b"").unwrap();
    assert_eq!(store.readlink(b"file", soon()).unwrap_err().kind(), ErrorKind::Invalid);
    // A socket is no file here.
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    assert_eq!(list_all(&*store, b"", 10).len(), 3);
    assert_eq!(stats.metadata.skipped_names.get(), 1);
    assert_eq!(store.lookup(b"socket", soon()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn below_a_source_that_the_operator_named_no_link_leads_out() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let named = dir.path().join("named");
    std::fs::create_dir_all(dir.path().join("data/sub/deep")).unwrap();
    std::fs::create_dir(outside.path().join("deep")).unwrap();
    std::fs::write(outside.path().join("deep/secret"), b"s").unwrap();
    std::fs::write(dir.path().join("data/sub/deep/file"), b"f").unwrap();
    // The source itself may be a link: the operator named it.
    symlink("data", &named).unwrap();
    symlink(outside.path(), named.join("out")).unwrap();
    let config = OriginOptions { within: vec![format!("file://{}", named.display())], ..OriginOptions::default() };
    let open = |path: &str| open(named.join(path).to_str().unwrap(), &config, Arc::default()).unwrap();
    assert_eq!(open("").lookup(b"sub/deep/file", soon()).unwrap().size, 1);
    assert_eq!(open("sub/deep").lookup(b"file", soon()).unwrap().size, 1);
    for path in ["out", "out/deep"] {
        let error = open(path).check(soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{path}: {error}");
        assert!(error.message().contains("symbolic link"), "{error}");
        assert!(open(path).lookup(b"secret", soon()).is_err());
    }
    assert_eq!(open("sub/none").check(soon()).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn modes_and_capacity() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), b"").unwrap();
    std::fs::set_permissions(dir.path().join("f"), std::fs::Permissions::from_mode(0o640)).unwrap();
    let (store, _) = open_dir(dir.path());
    assert_eq!(store.lookup(b"f", soon()).unwrap().mode, 0o640);
    let capacity = store.statfs(soon()).unwrap().unwrap();
    assert!(capacity.blocks >= capacity.blocks_free && capacity.block_size > 0);
}

#[test]
fn a_source_that_can_not_be() {
    let dir = tempfile::tempdir().unwrap();
    let (missing, _) = open_dir(&dir.path().join("missing"));
    let error = missing.check(soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("missing") && error.message().contains("create it"), "{error}");
    std::fs::write(dir.path().join("file"), b"").unwrap();
    let (file, _) = open_dir(&dir.path().join("file"));
    assert_eq!(file.check(soon()).unwrap_err().kind(), ErrorKind::NotADirectory);
}

/// The files of a source that is gone (unmounted, say) do not count as deleted.
#[test]
fn a_source_that_vanishes_is_not_one_whose_files_were_deleted() {
    let dir = tempfile::tempdir().unwrap();
    let (root, away) = (dir.path().join("source"), dir.path().join("away"));
    std::fs::create_dir(&root).unwrap();
    std::fs::write(root.join("file"), b"text").unwrap();
    let (store, _) = open_dir(&root);
    let attr = store.lookup(b"file", soon()).unwrap();
    let object = ObjectRef::new(store.source_url(), b"file", attr.version.clone(), attr.size);
    let read = || {
        let mut bytes = vec![0; 4];
        let mut sink = SliceSink::new(&mut bytes);
        store.read(&object, 0, &mut sink, soon())
    };
    read().unwrap();
    std::fs::rename(&root, &away).unwrap();
    assert_eq!(store.lookup(b"file", soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(store.list(b"", None, 10, soon()).unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(read().unwrap_err().kind(), ErrorKind::Unavailable);
    std::fs::rename(&away, &root).unwrap();
    assert_eq!(store.lookup(b"file", soon()).unwrap().version, attr.version);
    std::fs::remove_file(root.join("file")).unwrap();
    assert_eq!(store.lookup(b"file", soon()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn beyond_four_gigabytes() {
    let dir = tempfile::tempdir().unwrap();
    let file = std::fs::File::create(dir.path().join("huge")).unwrap();
    let at = (5u64 << 30) + 12_345;
    file.write_all_at(b"far away", at).unwrap();
    drop(file);
    let (store, _) = open_dir(dir.path());
    let (huge, attr) = object(&*store, b"huge");
    assert_eq!(attr.size, at + 8);
    assert_eq!(read(&*store, &huge, at, 8).unwrap(), b"far away");
}

/// A writer rewrites the file in place as fast as it can, all bytes of one value; whatever a read answers with success
/// has one value only, and it is the one of the version that was looked up.
#[test]
fn a_file_changed_while_read_is_never_a_mix() {
    const LEN: usize = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("f");
    std::fs::write(&path, vec![0; LEN]).unwrap();
    let (store, _) = open_dir(dir.path());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = std::fs::File::options().write(true).open(&path).unwrap();
            let mut value = 1u8;
            while !stop.load(Ordering::Relaxed) {
                file.write_all_at(&vec![value; LEN], 0).unwrap();
                value = value.wrapping_add(1);
                std::thread::sleep(Duration::from_millis(u64::from(value) % 40));
            }
        });
        let (mut whole, mut stale) = (0, 0);
        for _ in 0..60 {
            let (found, _) = object(&*store, b"f");
            // The same version read twice must be the same bytes, however it is cut.
            let first = read(&*store, &found, 0, LEN / 2);
            let second = read(&*store, &found, LEN as u64 / 2, LEN / 2);
            for answer in [&first, &second] {
                match answer {
                    Ok(bytes) => assert!(bytes.iter().all(|b| *b == bytes[0]), "a mix within one read"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Stale),
                }
            }
            match (first, second) {
                (Ok(first), Ok(second)) => {
                    assert_eq!(first[0], second[0], "a mix of two reads of one version");
                    whole += 1;
                }
                _ => stale += 1,
            }
        }
        stop.store(true, Ordering::Relaxed);
        println!("{whole} whole, {stale} stale");
    });
}

/// A file system with times in whole seconds, in a file.
struct WholeSeconds(tempfile::TempDir);

impl WholeSeconds {
    fn mount() -> Result<Self, String> {
        if !rustix::process::geteuid().is_root() {
            return Err("mounting a file system with times of whole seconds needs root".into());
        }
        let dir = tempfile::tempdir().unwrap();
        let (image, at) = (dir.path().join("image"), dir.path().join("at"));
        std::fs::File::create(&image).unwrap().set_len(8 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let run = |program: &str, words: &[&OsStr]| {
            let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
            let done = Command::new(program).args(words).env("PATH", path).output();
            let done = done.map_err(|e| format!("{program} can't be run: {e}"))?;
            let said = || format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim());
            done.status.success().then_some(()).ok_or_else(said)
        };
        let words = ["-q", "-F", "-t", "ext4", "-I", "128"].map(OsStr::new);
        run("mke2fs", &[&words[..], &[image.as_os_str()]].concat())?;
        run("mount", &[OsStr::new("-o"), OsStr::new("loop"), image.as_os_str(), at.as_os_str()])?;
        Ok(WholeSeconds(dir))
    }
}

impl Drop for WholeSeconds {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path().join("at")).status();
    }
}

#[test]
fn where_times_are_whole_seconds_a_file_written_again_has_another_version() {
    let mounted = match WholeSeconds::mount() {
        Ok(mounted) => mounted,
        Err(why) => return spurline_testkit::skip("loop", &why),
    };
    let root = mounted.0.path().join("at");
    let (store, _) = open_dir(&root);
    std::fs::write(root.join("f"), pattern(10_000, 0)).unwrap();
    let file = std::fs::File::options().write(true).open(root.join("f")).unwrap();
    let mut before = None;
    for seed in 1..3 {
        // In place and of the same length: only the times differ.
        file.write_all_at(&pattern(10_000, seed), 0).unwrap();
        let (found, _) = object(&*store, b"f");
        assert_ne!(before.as_ref(), Some(&found.version), "bytes read before would be taken for these");
        assert!(read(&*store, &found, 0, 10_000).unwrap() == pattern(10_000, seed));
        before = Some(found.version);
    }
}

#[test]
fn where_times_are_whole_seconds_a_link_made_anew_has_another_version() {
    let mounted = match WholeSeconds::mount() {
        Ok(mounted) => mounted,
        Err(why) => return spurline_testkit::skip("loop", &why),
    };
    let link = mounted.0.path().join("at/current");
    let (store, _) = open_dir(link.parent().unwrap());
    let mut before = None;
    for target in ["v1", "v2"] {
        // Its inode is free, and is the first one taken again.
        let _ = std::fs::remove_file(&link);
        symlink(target, &link).unwrap();
        let version = store.lookup(b"current", soon()).unwrap().version;
        assert_ne!(before.as_ref(), Some(&version), "the kernel would answer with the target read before");
        assert_eq!(store.readlink(b"current", soon()).unwrap(), target.as_bytes());
        before = Some(version);
    }
}

#[test]
fn a_read_that_waits_for_a_young_file_keeps_no_lookup_waiting() {
    let mounted = match WholeSeconds::mount() {
        Ok(mounted) => mounted,
        Err(why) => return spurline_testkit::skip("loop", &why),
    };
    let root = mounted.0.path().join("at");
    let config = OriginOptions { dir_threads: 1, ..OriginOptions::default() };
    let stats = Arc::new(Stats::default());
    let store = open(root.to_str().unwrap(), &config, Arc::clone(&stats)).unwrap();
    std::fs::write(root.join("other"), b"x").unwrap();
    // On a machine that stalls for two seconds the wait is over before the lookup begins.
    let first = (0..5).any(|seed| {
        std::fs::write(root.join("f"), pattern(10_000, seed)).unwrap();
        let (found, _) = object(&*store, b"f");
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(&*store, &found, 0, 10_000).unwrap());
            while stats.object.in_flight.get() == 0 && !reader.is_finished() {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(50));
            store.lookup(b"other", soon()).unwrap();
            // A reader that has what it waited for would be through by now.
            std::thread::sleep(Duration::from_millis(100));
            let first = !reader.is_finished();
            assert!(reader.join().unwrap() == pattern(10_000, seed));
            first
        })
    });
    assert!(first, "the only thread waited for a file");
}

/// A FUSE mount with a dead server, in a directory.
struct DeadMount(PathBuf);

impl DeadMount {
    fn make(at: PathBuf) -> std::io::Result<Self> {
        std::fs::create_dir(&at)?;
        let server = std::fs::File::options().read(true).write(true).open("/dev/fuse")?;
        let words = format!("fd={},rootmode=40000,user_id=0,group_id=0", server.as_raw_fd());
        let words = std::ffi::CString::new(words).unwrap();
        rustix::mount::mount("dead", &at, "fuse", rustix::mount::MountFlags::empty(), words.as_c_str())?;
        Ok(DeadMount(at))
    }
}

impl Drop for DeadMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_dead_mount_hides_no_name_beside_it_and_is_not_absent() {
    let dir = tempfile::tempdir().unwrap();
    let dead = DeadMount::make(dir.path().join("dead"));
    if let Err(why) = &dead {
        return spurline_testkit::skip("mount", &format!("a FUSE file system can't be mounted: {why}"));
    }
    for n in 0..20 {
        std::fs::write(dir.path().join(format!("f{n}")), b"x").unwrap();
    }
    let (store, stats) = open_dir(dir.path());
    assert_eq!(list_all(&*store, b"", 7).len(), 20);
    assert_eq!(stats.metadata.skipped_names.get(), 1);
    // Neither looked up as it is nor where a listing has answered for the names around it.
    let hour = Duration::from_secs(3600);
    let held = MetadataConfig { ttl: hour, negative_ttl: hour, max_entries: 100_000, ..MetadataConfig::default() };
    let cached = CachedOrigin::new(Arc::clone(&store), held, Arc::clone(&stats));
    for store in [&*store, &cached] {
        for n in 0..20 {
            assert_eq!(store.lookup(format!("f{n}").as_bytes(), soon()).unwrap().size, 1);
        }
        let error = store.lookup(b"dead", soon()).unwrap_err();
        assert_ne!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    // Where nothing can be looked at there is nothing to show.
    for n in 0..20 {
        std::fs::remove_file(dir.path().join(format!("f{n}"))).unwrap();
    }
    assert!(store.list(b"", None, 10, soon()).is_err());
    drop(dead);
    assert_eq!(list_all(&*store, b"", 10).len(), 1);
    assert!(store.lists_all(b""));
}

#[test]
fn a_file_system_that_hangs_costs_no_caller() {
    // A FIFO without a writer is the nearest thing to a hung server that needs no privileges: its open would block,
    // and here it is refused instead.
    let dir = tempfile::tempdir().unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        dir.path().join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .unwrap();
    let (store, _) = open_dir(dir.path());
    let pipe = ObjectRef::new(store.source_url(), b"pipe", spurline_types::Version::new("x"), 10);
    assert_eq!(read(&*store, &pipe, 0, 10).unwrap_err().kind(), ErrorKind::Stale);
    // A deadline that has passed is a timeout, not an answer.
    std::fs::write(dir.path().join("f"), pattern(10, 1)).unwrap();
    let error = store.lookup(b"f", Instant::now() - Duration::from_secs(1));
    assert!(error.is_ok() || error.is_err_and(|e| e.kind() == ErrorKind::Timeout));
}
