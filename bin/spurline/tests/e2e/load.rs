//! The memory budget under many readers, and how soon a change in the origin is seen.

use spurline_rig::world::*;
use spurline_testkit::S3Server;
use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

/// Resident memory of a mount beside `--buffer-size`: code, thread stacks, indexes, the libraries' memory for
/// connections to the origin, in a build without optimisation.
const ALLOWANCE: u64 = 150 << 20;

#[test]
fn two_hundred_and_fifty_six_readers_stay_within_the_budget() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let (files, len) = (24, 8 * MIB);
    for n in 0..files {
        world.file(&format!("source/{n}"), &bytes(n, len));
    }
    // No cache on disk: every block goes through the buffers, again and again.
    let more = ["--buffer-size", "64M", "--cache-size", "0"];
    let source = world.path("source").to_str().unwrap().to_owned();
    let mount = world.mount(&source, &more);
    std::thread::scope(|scope| {
        for reader in 0..256u64 {
            let mount = &mount;
            let work = move || {
                let n = reader % files;
                let want = bytes(n, len);
                let file = File::open(mount.path(n.to_string())).unwrap();
                let mut buf = vec![0; 256 << 10];
                // A part of the file each, some forwards, some jumping about.
                for step in 0..8u64 {
                    let place = if reader % 2 == 0 { reader + step } else { reader * 7 + step * 13 };
                    let at = (place % 32) as usize * buf.len();
                    file.read_exact_at(&mut buf, at as u64).unwrap_or_else(|e| panic!("{n} at {at}: {e}"));
                    assert!(buf[..] == want[at..at + buf.len()], "{n} at {at}");
                }
            };
            std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, work).unwrap();
        }
    });
    let (most, limit) = (mount.process().most_resident(), (64 << 20) + ALLOWANCE);
    println!("most resident {} MiB, limit {} MiB", most >> 20, limit >> 20);
    let stats = mount.stats();
    assert!(count(&stats, "usage", "buffer_bytes") <= 64 << 20, "{stats}");
    assert_eq!(count(&stats, "fuse", "errors"), 0);
    assert!(most < limit, "{most} bytes were resident, more than {limit}");
    mount.unmount();
}

/// Memory of a process that has served nothing, beside the program's file: heaps, stacks, and first pages of buffers.
const AT_REST: u64 = 40 << 20;

#[test]
fn processes_that_served_nothing_touch_little_of_their_budget() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let want = bytes(1, 20 * MIB);
    server.put("data", "file", &want);
    let more = ["--endpoint-url", &server.endpoint(), "--buffer-size", "512M"];
    let node = world.node(&["s3://data"], 0, &more);
    let mount = world.mount("s3://data", &more);
    for process in [&node.process, mount.process()] {
        let touched = process.memory("RssAnon:");
        assert!(touched < AT_REST, "{touched} bytes are touched, more than {AT_REST}");
    }
    assert!(mount.read("file") == want);
    // Also from the cache disk.
    eventually("the blocks are on the disk", || mount.count("blockcache", "blocks") == 20);
    mount.unmount();
}

#[test]
fn names_that_the_kernel_holds_stay_within_their_share() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let (folders, files) = (10, 1500);
    for folder in 0..folders {
        let folder = world.dir(&format!("source/n{folder:08}"));
        (0..files).for_each(|n| drop(File::create(folder.join(format!("ILSVRC2012_{n:08}.JPEG"))).unwrap()));
    }
    let mount = world.mount(world.path("source").to_str().unwrap(), &["--buffer-size", "24M", "--block-size", "256K"]);
    let stats = mount.stats();
    let limit = count(&stats, "fuse", "inode_limit_bytes");
    assert_eq!(limit, 3 << 20);
    let open = File::open(mount.path("n00000000/ILSVRC2012_00000007.JPEG")).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for folder in fs::read_dir(&mount.at).unwrap() {
                    let names = fs::read_dir(folder.unwrap().path()).unwrap();
                    assert_eq!(
                        names.map(|entry| entry.unwrap().metadata().unwrap()).filter(|m| m.len() == 0).count(),
                        files
                    );
                }
            });
        }
    });
    eventually("the names are within their share", || mount.count("fuse", "inode_bytes") <= limit);
    let stats = mount.stats();
    assert!(count(&stats, "fuse", "forgets_requested") >= 5_000, "{stats}");
    assert!(count(&stats, "fuse", "inodes") > 2_000, "the share is used: {stats}");
    assert_eq!(open.metadata().unwrap().len(), 0);
    drop(open);
    assert!(!mount.process().log().contains("set aside"), "{}", mount.process().log());
    mount.unmount();
}

/// Well beyond the cache times the mounts here are given.
const PAST_THE_CACHES: Duration = Duration::from_millis(2500);

fn changes_are_seen(mount: &Mount, put: &dyn Fn(&str, Option<&[u8]>)) {
    assert_eq!(mount.read("file"), b"first");
    assert!(fs::metadata(mount.path("coming")).is_err());
    assert_eq!(mount.read("going"), b"going");
    put("file", Some(b"the second"));
    put("coming", Some(b"came"));
    put("going", None);
    std::thread::sleep(PAST_THE_CACHES);
    assert_eq!(fs::metadata(mount.path("file")).unwrap().len(), 10);
    assert_eq!(mount.read("file"), b"the second");
    assert_eq!(mount.read("coming"), b"came");
    assert_eq!(fs::metadata(mount.path("going")).unwrap_err().kind(), std::io::ErrorKind::NotFound);
    let mut names: Vec<_> = fs::read_dir(&mount.at).unwrap().map(|e| e.unwrap().file_name()).collect();
    names.sort();
    assert_eq!(names, ["coming", "file"]);
    // The same length again: only the version distinguishes them.
    put("file", Some(b"THE SECOND"));
    std::thread::sleep(PAST_THE_CACHES);
    assert_eq!(mount.read("file"), b"THE SECOND");
}

const SHORT: [&str; 6] = ["--attr-cache", "200ms", "--entry-cache", "200ms", "--dir-entry-cache", "200ms"];

#[test]
fn a_change_is_seen_after_the_cache_times_alone() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let put = |name: &str, bytes: Option<&[u8]>| match bytes {
        Some(bytes) => drop(world.file(&format!("source/{name}"), bytes)),
        None => fs::remove_file(world.path("source").join(name)).unwrap(),
    };
    put("file", Some(b"first"));
    put("going", Some(b"going"));
    let mount = world.mount(world.path("source").to_str().unwrap(), &SHORT);
    changes_are_seen(&mount, &put);
    mount.unmount();
}

#[test]
fn a_change_is_seen_after_the_cache_times_through_a_node() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let put = |name: &str, bytes: Option<&[u8]>| match bytes {
        Some(bytes) => drop(server.put("data", name, bytes)),
        None => server.remove("data", name),
    };
    put("file", Some(b"first"));
    put("going", Some(b"going"));
    let node = world.node(&["s3://data"], 0, &["--endpoint-url", &server.endpoint()]);
    let mount = world.consumer("s3://data", &node.address, &SHORT);
    changes_are_seen(&mount, &put);
    mount.unmount();
}
