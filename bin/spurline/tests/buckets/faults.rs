//! A written bucket whose store, disk or mount fails: each object is the old or the new one, errors are reported, and nothing waits
//! without a limit.

use crate::objects::{BUCKET, BucketRig};
use spurline_rig::world::*;
use spurline_rig::writable_group::TmpFs;
use spurline_testkit::{ChaosProxy, ProxyFault};
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;

/// A fault of every request until it is taken back.
const ALWAYS: u32 = 1_000_000;

fn records(rig: &BucketRig) -> usize {
    rig.server.keys(BUCKET).iter().filter(|key| key.contains(".spurline-")).count()
}

#[test]
fn uploads_that_were_left_behind_are_aborted() {
    let Some(rig) = BucketRig::start() else { return };
    rig.server.begin_upload(BUCKET, "p/of-another-program");
    let mut killed = rig.mount("killed", &[]);
    let file = File::create(killed.path("lost")).unwrap();
    file.write_all_at(&bytes(2, 20 * MIB), 0).unwrap();
    eventually("an upload is begun", || (rig.server.open_uploads(), records(&rig)) == (2, 1));
    killed.process_mut().kill();
    drop(file);
    detach(&killed.at);
    // Uploads that are young can belong to a mount that lives.
    let live = rig.mount("live", &[]);
    assert_eq!((rig.server.open_uploads(), records(&rig)), (2, 1));
    assert!(live.process().log().contains("1 uploads of other mounts are under way or were left behind"));
    assert!(fs::read_dir(&live.at).unwrap().next().is_none(), "records are hidden");
    // A file whose upload is aborted although it is open is uploaded again.
    let written = bytes(3, 20 * MIB);
    let open = File::create(live.path("open")).unwrap();
    open.write_all_at(&written[..17 * MIB], 0).unwrap();
    eventually("an upload is begun", || (rig.server.open_uploads(), records(&rig)) == (3, 2));
    let next = rig.mount("next", &["--abort-uploads-after", "0s"]);
    assert_eq!((rig.server.open_uploads(), records(&rig)), (1, 0), "that of the other program stays");
    open.write_all_at(&written[17 * MIB..], 17 * MIB as u64).unwrap();
    open.sync_all().unwrap();
    drop(open);
    assert!(rig.object("p/open").unwrap() == written);
    assert_eq!((rig.server.open_uploads(), records(&rig)), (1, 0));
    next.unmount();
    live.unmount();
}

/// Many files are written while the store refuses and closes connections for a while: each is whole.
#[test]
fn a_storm_delays_files_and_loses_none() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &[]);
    for fault in [ProxyFault::SlowDown, ProxyFault::Error(500, "InternalError", "try again"), ProxyFault::Close] {
        proxy.inject(fault, 8);
    }
    proxy.inject_on(Some("PUT"), "", ProxyFault::LoseAnswer, 6);
    proxy.inject_on(Some("POST"), "", ProxyFault::LoseAnswer, 2);
    std::thread::scope(|scope| {
        for n in 0..6u64 {
            let path = mount.path(format!("file{n}"));
            scope.spawn(move || fs::write(path, bytes(n, 10_000 + n as usize * 3 * MIB)).unwrap());
        }
    });
    for n in 0..6u64 {
        assert!(rig.object(&format!("p/file{n}")).unwrap() == bytes(n, 10_000 + n as usize * 3 * MIB), "{n}");
    }
    mount.unmount();
}

/// A store executes a publication and says neither that nor which object there is: the next publication of the file finds its own
/// object, and goes over it.
#[test]
fn an_object_of_a_publication_that_failed_is_no_conflict() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &["--origin-timeout", "1s"]);
    let file = OpenOptions::new().write(true).create_new(true).open(mount.path("unsure")).unwrap();
    file.write_all_at(b"first", 0).unwrap();
    proxy.inject_on(Some("PUT"), "unsure", ProxyFault::LoseAnswer, ALWAYS);
    proxy.inject_on(Some("HEAD"), "unsure", ProxyFault::Error(500, "InternalError", "try again"), ALWAYS);
    assert!(file.sync_all().is_err());
    assert_eq!(rig.object("p/unsure").unwrap(), b"first");
    file.write_all_at(b"second", 0).unwrap();
    proxy.clear_faults();
    file.sync_all().unwrap();
    assert_eq!(rig.object("p/unsure").unwrap(), b"second");
    drop(file);
    mount.unmount();
}

/// A store that fails each request, does not answer, or is not there: fsync and close report the failure in time, the object is the
/// one before, and later the same bytes are published.
#[test]
fn a_store_that_fails_is_an_error_in_time_and_the_object_stays() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &["--origin-timeout", "1s"]);
    let faults = [
        ProxyFault::SlowDown,
        ProxyFault::Error(500, "InternalError", "try again"),
        ProxyFault::Stall,
        ProxyFault::Error(403, "AccessDenied", "no"),
    ];
    for (round, fault) in faults.iter().enumerate() {
        for (name, len) in [("small", 5000), ("large", 17 * MIB)] {
            let key = format!("p/{name}");
            let before = bytes(100 + round as u64, len);
            rig.server.put(BUCKET, &key, &before);
            let after = bytes(200 + round as u64, len);
            let file = OpenOptions::new().write(true).open(mount.path(name)).unwrap();
            file.write_all_at(&after, 0).unwrap();
            match (name, round % 2) {
                ("small", _) => proxy.inject_on(Some("PUT"), name, fault.clone(), ALWAYS),
                (_, 0) => proxy.inject_on(Some("POST"), "uploadId=", fault.clone(), ALWAYS),
                _ => proxy.inject_on(Some("PUT"), "partNumber=3", fault.clone(), ALWAYS),
            }
            assert!(file.sync_all().is_err(), "{fault:?} {name}");
            assert!(rig.object(&key).unwrap() == before, "{fault:?} {name}: the object before");
            proxy.clear_faults();
            // What was lost on its way may arrive late.
            file.sync_all().unwrap();
            assert!(rig.object(&key).unwrap() == after, "{fault:?} {name}: the object after");
            drop(file);
        }
    }
    proxy.refuse_connections(true);
    let file = File::create(mount.path("new"));
    assert!(file.is_err() || file.unwrap().write_all(b"x").is_ok());
    proxy.refuse_connections(false);
    mount.unmount();
}

/// Without space for changed bytes, on a disk or in memory, the write fails, close fails, and nothing is published.
/// Flags for a disk of 40 MB, and for 100 MB of memory.
fn on_small_disk(disk: &str) -> [&str; 4] {
    ["--cache-dir", disk, "--free-space-ratio", "0.01"]
}

const IN_MEMORY: [&str; 4] = ["--cache-size", "0", "--buffer-size", "100M"];

#[test]
fn a_file_longer_than_local_space_is_whole() {
    let Some(rig) = BucketRig::start() else { return };
    let disk = rig.world.dir("disk");
    let memory = TmpFs::mount(&disk, "size=40m");
    for (name, flags) in [("on-disk", on_small_disk(disk.to_str().unwrap())), ("in-memory", IN_MEMORY)] {
        let mount = rig.mount_with_flags(name, &flags);
        write_beyond_space(&rig, &mount, name);
        mount.unmount();
        assert_eq!((rig.server.open_uploads(), records(&rig)), (0, 0), "{name}");
    }
    drop(memory);
}

/// Writes a file that is longer than local space, reads and changes the middle, cuts the file off, and makes it longer.
fn write_beyond_space(rig: &BucketRig, mount: &Mount, name: &str) {
    let mut text = bytes(2, 150 * MIB);
    let file = File::options().read(true).write(true).create(true).truncate(true).open(mount.path(name)).unwrap();
    for (number, piece) in text.chunks(MIB).enumerate() {
        file.write_all_at(piece, (number * MIB) as u64).unwrap();
    }
    let spilled = rig.server.keys(BUCKET).iter().filter(|key| key.contains(".spurline-part-")).count();
    assert!(spilled > 2, "{name}: {spilled} parts were moved to the store");
    let shown: Vec<_> = fs::read_dir(&mount.at).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        shown.iter().all(|shown| !shown.to_string_lossy().starts_with('.'))
            && rig.object(&format!("p/{name}")).is_none(),
        "{name}: {shown:?}"
    );
    let mut change = |at: usize, piece: &[u8]| {
        file.write_all_at(piece, at as u64).unwrap();
        text[at..at + piece.len()].copy_from_slice(piece);
    };
    change(110 * MIB + 5, b"changed");
    change(119 * MIB + 3, &bytes(3, 18 * MIB));
    change(7, b"the first part");
    for len in [141 * MIB + 9, 143 * MIB] {
        file.set_len(len as u64).unwrap();
        text.resize(len, 0);
    }
    // From this mount, and not from the kernel's cache.
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    for at in [0, 20 * MIB, 109 * MIB, 118 * MIB, 141 * MIB] {
        let mut found = vec![0; 2 * MIB];
        file.read_exact_at(&mut found, at as u64).unwrap();
        assert!(found == text[at..at + 2 * MIB], "{name}: at {at}");
    }
    drop(file);
    assert!(rig.object(&format!("p/{name}")).unwrap() == text, "{name}");
    assert!(mount.read(name) == text, "{name}");
    // The space is free again.
    fs::write(mount.path(name), bytes(4, 12 * MIB)).unwrap();
    assert!(rig.object(&format!("p/{name}")).unwrap() == bytes(4, 12 * MIB), "{name}");
}

/// Where no byte fits, and no part is left that could make room.
#[test]
fn a_full_disk_publishes_nothing() {
    let Some(rig) = BucketRig::start() else { return };
    let disk = rig.world.dir("disk");
    let memory = TmpFs::mount(&disk, "size=40m");
    let mount = rig.mount_with_flags("mnt", &on_small_disk(disk.to_str().unwrap()));
    let filler = disk.join("filler");
    let mut filling = File::create(&filler).unwrap();
    while filling.write_all(&bytes(1, 4096)).is_ok() {}
    let mut file = File::create(mount.path("cut")).unwrap();
    let piece = bytes(2, MIB);
    file.write_all(&piece[..5000]).unwrap();
    let failed = file.write_all(&piece).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    mount.process().wait_for(" are lost: ");
    let log = mount.process().log();
    let lines = ["bytes at 5000), and nothing of its changes is published: ", "free space there"];
    lines.iter().for_each(|line| assert!(log.contains(line), "{line}: {log}"));
    assert!(!log.contains("(5000 bytes) are lost"), "the bytes of the write count: {log}");
    assert_eq!(mount.count("writes", "failures"), 1);
    assert!(rig.object("p/cut").is_none());
    // A file that is cut off before the lost bytes is published again.
    let mut file = File::create(mount.path("again")).unwrap();
    file.write_all(&piece[..5000]).unwrap();
    assert!(file.write_all(&piece).is_err());
    file.set_len(5000).unwrap();
    file.sync_all().unwrap();
    drop(file);
    assert!(rig.object("p/again").unwrap() == piece[..5000]);
    // Afterwards there is space again.
    fs::remove_file(&filler).unwrap();
    drop(filling);
    let whole = bytes(3, 12 * MIB);
    fs::write(mount.path("whole"), &whole).unwrap();
    assert!(rig.object("p/whole").unwrap() == whole);
    mount.unmount();
    assert_eq!((rig.server.open_uploads(), records(&rig)), (0, 0));
    drop(memory);
}

/// Beyond the cache times of the mount.
const PAST_THE_CACHES: std::time::Duration = std::time::Duration::from_millis(1200);

/// Files without changes, names and listings are there while the store is not, also what this mount has changed before.
#[test]
fn a_written_bucket_reads_on_while_its_store_is_stopped() {
    for flags in [&[][..], &["--object-attrs"]] {
        let Some(rig) = BucketRig::start() else { return };
        let mount = rig.mount("mnt", flags);
        let BucketRig { server, world: _world } = rig;
        read_on_without_store(&mount, || drop(server));
        assert_eq!(mount.count("metadata", "silent_origins"), 1);
        mount.process().wait_for("does not respond");
        mount.unmount();
    }
}

/// A mount whose store is stopped reads and lists what it has read, listed or written.
pub fn read_on_without_store(mount: &Mount, stop: impl FnOnce()) {
    let at = |name: &str| mount.path(name);
    let names = |folder: &str| {
        let listed = fs::read_dir(at(folder)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = listed.collect();
        names.sort();
        names
    };
    fs::create_dir_all(at("d/sub")).unwrap();
    for (n, name) in ["d/kept", "d/old", "d/gone", "d/sub/deep"].into_iter().enumerate() {
        fs::write(at(name), bytes(n as u64, 300_000)).unwrap();
    }
    let mut wanted =
        vec![("d/kept", bytes(0, 300_000)), ("d/old", bytes(1, 300_000)), ("d/sub/deep", bytes(3, 300_000))];
    let check = |wanted: &[(&str, Vec<u8>)], listed: &[&str]| {
        assert_eq!(names("d"), listed);
        assert_eq!(names("d/sub"), ["deep"]);
        for (name, bytes) in wanted {
            assert!(fs::read(at(name)).unwrap() == *bytes, "{name}");
        }
    };
    check(&wanted, &["gone", "kept", "old", "sub"]);
    // The mount has made the last state itself.
    wanted[1].1 = bytes(9, 200_000);
    wanted.push(("d/new", bytes(8, 100_000)));
    for (name, bytes) in &wanted[1..] {
        fs::write(at(name), bytes).unwrap();
    }
    fs::remove_file(at("d/gone")).unwrap();
    check(&wanted, &["kept", "new", "old", "sub"]);
    stop();
    for _ in 0..3 {
        std::thread::sleep(PAST_THE_CACHES);
        check(&wanted, &["kept", "new", "old", "sub"]);
        assert_eq!(File::open(at("d/gone")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
        // A name that was not seen is an error, and no absence.
        let unseen = File::open(at("d/unseen")).unwrap_err();
        assert!(unseen.kind() != std::io::ErrorKind::NotFound, "{unseen}");
    }
    for changed in
        [fs::create_dir(at("d/made")), fs::remove_file(at("d/kept")), fs::rename(at("d/old"), at("d/renamed"))]
    {
        assert_eq!(changed.unwrap_err().raw_os_error(), Some(libc::EIO));
    }
    check(&wanted, &["kept", "new", "old", "sub"]);
}
