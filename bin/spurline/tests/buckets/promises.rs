//! Promises of SEMANTICS about a written bucket that the other files of this test program leave out: what a bucket does not keep,
//! other writers beside a rename or a lost node, a node that goes on after a stop, and a node with little space.

use crate::nodes::{BUCKET, NodesRig};
use crate::objects::BucketRig;
use rustix::fs::{FileType, Mode, XattrFlags, fsetxattr, mknodat};
use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, ProxyFault, S3Server};
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown, symlink};
use std::time::Duration;

#[test]
fn what_a_bucket_does_not_keep_has_no_effect_or_an_errno() {
    let Some(rig) = BucketRig::start() else { return };
    let mount = rig.mount("mnt", &[]);
    check_limits(&mount, &rig.server);
    mount.unmount();
    let Some(rig) = NodesRig::start_with(2, &[]) else { return };
    let mount = rig.mount("mnt", &[]);
    check_limits(&mount, &rig.server);
    mount.unmount();
}

fn check_limits(mount: &Mount, server: &S3Server) {
    let path = mount.path("file");
    let mut file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
    file.write_all(&[1; 100_000]).unwrap();
    let before = fs::metadata(&path).unwrap();
    file.set_permissions(fs::Permissions::from_mode(0o600)).unwrap();
    chown(&path, Some(7), Some(8)).unwrap();
    file.set_modified(std::time::UNIX_EPOCH).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert_eq!((after.mode(), after.uid(), after.gid()), (before.mode(), before.uid(), before.gid()));
    assert_eq!(after.modified().unwrap(), before.modified().unwrap());
    let errno = |done: std::io::Result<()>| done.unwrap_err().raw_os_error();
    assert_eq!(errno(symlink("file", mount.path("link"))), Some(libc::EPERM));
    assert_eq!(errno(fs::hard_link(&path, mount.path("hard"))), Some(libc::EPERM));
    let set = fsetxattr(&file, c"user.name", b"value", XattrFlags::empty());
    assert_eq!(set.unwrap_err(), rustix::io::Errno::OPNOTSUPP);
    let made = mknodat(rustix::fs::CWD, mount.path("pipe"), FileType::Fifo, Mode::RUSR, 0);
    assert_eq!(made.unwrap_err(), rustix::io::Errno::PERM);
    // Locks hold within the mount; a release publishes through nodes.
    let other = File::open(&path).unwrap();
    file.lock().unwrap();
    assert!(matches!(other.try_lock(), Err(fs::TryLockError::WouldBlock)));
    file.unlock().unwrap();
    other.try_lock().unwrap();
    // A hole is zeros, and a copy goes through the kernel.
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, 50_000, 10_000).unwrap();
    let mut copy = File::create(mount.path("copy")).unwrap();
    std::io::copy(&mut File::open(&path).unwrap(), &mut copy).unwrap();
    drop((file, copy));
    let mut wanted = vec![1; 100_000];
    wanted[50_000..60_000].fill(0);
    assert!(server.bytes(BUCKET, "p/file").unwrap() == wanted && server.bytes(BUCKET, "p/copy").unwrap() == wanted);
    // A folder without a marker vanishes with its last file, and then counts as removed.
    server.put(BUCKET, "p/folder/only", b"x");
    fs::remove_file(mount.path("folder/only")).unwrap();
    fs::remove_dir(mount.path("folder")).unwrap();
}

/// What others make or change below a folder while it is renamed keeps its name.
#[test]
fn a_rename_leaves_the_changes_of_others_where_they_are() {
    let Some(rig) = BucketRig::start() else { return };
    let proxy = ChaosProxy::start(rig.server.address()).unwrap();
    ["changed", "last", "other"]
        .iter()
        .for_each(|name| drop(rig.server.put(BUCKET, &format!("p/old/{name}"), name.as_bytes())));
    let mount = rig.mount_from("mnt", &proxy.endpoint(), &[]);
    proxy.inject_on(Some("PUT"), "/new/last", ProxyFault::Stall, 1);
    std::thread::scope(|scope| {
        let renamed = scope.spawn(|| fs::rename(mount.path("old"), mount.path("new")));
        eventually("the object is copied", || rig.object("p/new/changed").is_some());
        eventually("a copy is held up", || proxy.count_requests("PUT", "/new/last") == 1);
        rig.server.put(BUCKET, "p/old/changed", b"by others");
        rig.server.put(BUCKET, "p/old/made", b"by others");
        proxy.refuse_connections(true);
        proxy.refuse_connections(false);
        renamed.join().unwrap().unwrap();
    });
    let keys = rig.server.keys(BUCKET);
    assert_eq!(rig.object("p/old/changed").unwrap(), b"by others", "{keys:?}");
    assert_eq!(rig.object("p/old/made").unwrap(), b"by others", "{keys:?}");
    assert_eq!(rig.object("p/new/other").unwrap(), b"other", "{keys:?}");
    assert_eq!(rig.object("p/new/last").unwrap(), b"last", "{keys:?}");
    assert!(rig.object("p/old/other").is_none() && rig.object("p/old/last").is_none(), "{keys:?}");
    assert!(mount.process().log().contains("'p/old/changed' keeps its name"), "{}", mount.process().log());
    mount.unmount();
}

/// Files that are open for changes, on both nodes.
fn open_files(mount: &Mount, flags: &OpenOptions) -> Vec<(String, File)> {
    let names = (0..6).map(|number| format!("file{number}"));
    names.map(|name| (name.clone(), flags.open(mount.path(&name)).unwrap())).collect()
}

#[test]
fn a_lost_home_replaces_no_change_of_others() {
    let Some(mut rig) = NodesRig::start_with(2, &[]) else { return };
    (0..6).for_each(|number| drop(rig.server.put(BUCKET, &format!("p/file{number}"), b"before")));
    let mount = rig.mount("mnt", &[]);
    let files = open_files(&mount, OpenOptions::new().write(true));
    for (name, file) in &files {
        file.write_all_at(b"ours", 0).unwrap();
        rig.server.put(BUCKET, &format!("p/{name}"), b"by others");
    }
    rig.nodes[0].process.kill();
    for (name, file) in files {
        assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::ESTALE), "{name}");
        drop(file);
        assert_eq!(rig.server.bytes(BUCKET, &format!("p/{name}")).unwrap(), b"by others");
    }
    mount.unmount();
}

/// A node is stopped in the middle of publications, another one makes them, and the files are written once more before the first one
/// goes on.
#[test]
fn a_node_that_goes_on_after_a_stop_replaces_nothing() {
    if !can_mount() {
        return;
    }
    let server = S3Server::in_memory().unwrap();
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let Some(rig) = NodesRig::start_over(2, server, &proxy.endpoint()) else { return };
    let mount = rig.mount("mnt", &[]);
    let files = open_files(&mount, OpenOptions::new().write(true).create_new(true));
    for (name, file) in &files {
        file.write_all_at(name.as_bytes(), 0).unwrap();
    }
    proxy.inject_on(Some("PUT"), "file", ProxyFault::Delay(Duration::from_millis(500)), 6);
    std::thread::scope(|scope| {
        let closes: Vec<_> = files.iter().map(|(_, file)| scope.spawn(|| file.sync_all())).collect();
        eventually("the nodes publish", || proxy.count_requests("PUT", "file") >= 6);
        rig.nodes[0].process.signal(Signal::STOP);
        closes.into_iter().for_each(|close| close.join().unwrap().unwrap());
    });
    for (name, file) in files {
        drop(file);
        assert_eq!(rig.server.bytes(BUCKET, &format!("p/{name}")).unwrap(), name.as_bytes());
        fs::write(mount.path(&name), format!("again {name}")).unwrap();
    }
    rig.nodes[0].process.signal(Signal::CONT);
    // It takes part again.
    for number in 0..20 {
        fs::write(mount.path(format!("new{number}")), b"new").unwrap();
    }
    for number in 0..6 {
        let wanted = format!("again file{number}");
        assert_eq!(rig.server.bytes(BUCKET, &format!("p/file{number}")).unwrap(), wanted.as_bytes());
        assert_eq!(mount.read(format!("file{number}")), wanted.as_bytes());
    }
    mount.unmount();
}

#[test]
fn extended_attributes_that_are_not_published_survive_a_lost_node() {
    let Some(mut rig) = NodesRig::start_with(1, &["--object-attrs"]) else { return };
    let mount = rig.mount("mnt", &[]);
    let file = File::create(mount.path("file")).unwrap();
    file.write_all_at(b"bytes", 0).unwrap();
    fsetxattr(&file, c"user.name", b"value", XattrFlags::empty()).unwrap();
    let port = rig.nodes[0].port();
    rig.nodes[0].process.kill();
    let endpoint = rig.server.endpoint();
    rig.nodes[0] = rig.node(0, port, &endpoint);
    file.write_all_at(b"more", 5).unwrap();
    drop(file);
    assert_eq!(rig.server.bytes(BUCKET, "p/file").unwrap(), b"bytesmore");
    let mut value = [0; 16];
    let len = rustix::fs::getxattr(mount.path("file"), c"user.name", &mut value).unwrap();
    assert_eq!(&value[..len], b"value");
    mount.unmount();
}
