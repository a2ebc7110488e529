//! A bucket that is written through nodes: the objects when a call has returned, the files of other mounts, and the price of a
//! lost node.

use crate::attrs::{UNCACHED_FLAGS, check_attributes, copy_twice};
use crate::faults::read_on_without_store;
use crate::objects::{
    OtherServer, check_kept_objects, make_and_remove_names, make_every_change, run_fsx_on, write_through_faults,
};
use spurline_rig::installed_tool::tool;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, ProxyFault, S3Server};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _, chown};
use std::sync::Arc;

pub const BUCKET: &str = "bucket";
/// The kernel's transports.
const TRANSPORTS: [&[&str]; 2] = [&["--fuse-io", "dev"], &["--fuse-io", "uring"]];

/// A bucket in memory, and nodes that change it.
pub struct NodesRig {
    pub server: S3Server,
    pub nodes: Vec<Node>,
    pub world: World,
    /// More flags of the nodes.
    node_words: &'static [&'static str],
}

impl NodesRig {
    fn start(count: usize) -> Option<NodesRig> {
        NodesRig::start_with(count, &[])
    }

    pub fn start_with(count: usize, node_words: &'static [&'static str]) -> Option<NodesRig> {
        if !can_mount() {
            return None;
        }
        let server = S3Server::in_memory().unwrap();
        let endpoint = server.endpoint();
        NodesRig::start_nodes(count, server, &endpoint, node_words)
    }

    pub fn start_over(count: usize, server: S3Server, endpoint: &str) -> Option<NodesRig> {
        NodesRig::start_nodes(count, server, endpoint, &[])
    }

    fn start_nodes(
        count: usize,
        server: S3Server,
        endpoint: &str,
        node_words: &'static [&'static str],
    ) -> Option<NodesRig> {
        server.create_bucket(BUCKET);
        let rig = NodesRig { server, nodes: Vec::new(), world: World::new(), node_words };
        Some(rig.with_nodes(count, endpoint))
    }

    fn with_nodes(mut self, count: usize, endpoint: &str) -> NodesRig {
        for number in 0..count {
            let node = self.node(number, 0, endpoint);
            self.nodes.push(node);
        }
        self
    }

    pub fn node(&self, number: usize, port: u16, endpoint: &str) -> Node {
        let source = source();
        let port = port.to_string();
        let words = ["node", "--writable", "--source", &source, "--endpoint-url", endpoint, "--group-port", &port];
        let mut command = self.world.command(&words);
        command.arg("--cache-dir").arg(self.world.dir(&format!("node-cache-{number}"))).args(self.node_words);
        self.world.node_with(with_credentials(&mut command))
    }

    pub fn mount(&self, name: &str, more: &[&str]) -> Mount {
        self.mount_of(&self.nodes, name, more)
    }

    /// A mount that knows only these nodes.
    pub fn mount_of(&self, nodes: &[Node], name: &str, more: &[&str]) -> Mount {
        let at = self.world.dir(name);
        let nodes: Vec<&str> = nodes.iter().map(|node| node.address.as_str()).collect();
        let registry = format!("static:{}", nodes.join(","));
        let source = source();
        let mut command =
            self.world.command(&["mount", &source, at.to_str().unwrap(), "--rw", "--registry", &registry]);
        self.world.mount_at(command.args(["--peer-silence", "1s"]).args(more), &at)
    }

    fn object(&self, key: &str) -> Option<Vec<u8>> {
        self.server.bytes(BUCKET, key)
    }
}

#[test]
fn a_mount_with_stage_is_refused_where_the_nodes_keep_no_staged_files() {
    let Some(rig) = NodesRig::start(1) else { return };
    let source = source();
    let at = rig.world.dir("mnt");
    let words = ["mount", &source, at.to_str().unwrap(), "--rw", "--stage"];
    refused(&rig.world.run(&words), 2, &["staged files need two nodes", "--registry"]);
    let registry = format!("static:{}", rig.nodes[0].address);
    let out = rig.world.run(&[&words[..], &["--registry", &registry]].concat());
    refused(&out, 3, &["the nodes of the group keep no staged files", "nodes with --stage-size on two machines"]);
    let words = ["node", "--writable", "--source", &source, "--stage-size", "1G", "--registry", &registry];
    refused(&rig.world.run(&words), 2, &["static:", "no terms", "coordinator://HOST:PORT"]);
}

fn source() -> String {
    format!("s3://{BUCKET}/p")
}

#[test]
fn a_bucket_written_through_nodes_reads_on_while_its_store_is_stopped() {
    let Some(rig) = NodesRig::start(1) else { return };
    let mount = rig.mount("mnt", &[]);
    let NodesRig { server, nodes, world: _world, .. } = rig;
    read_on_without_store(&mount, || drop(server));
    mount.unmount();
    drop(nodes);
}

#[test]
fn a_file_closed_through_nodes_is_an_object_whole() {
    for way in TRANSPORTS {
        write_and_read_elsewhere(way);
    }
}

fn write_and_read_elsewhere(way: &[&str]) {
    let Some(rig) = NodesRig::start(2) else { return };
    let one = rig.mount("one", way);
    let two = rig.mount("two", way);
    assert_eq!(fs::read_dir(&two.at).unwrap().count(), 0);
    for (name, len) in [("empty", 0), ("small", 1000), ("one-part", 8 * MIB), ("parts", 30 * MIB + 17)] {
        let bytes = bytes(len as u64, len);
        let mut file = File::create(one.path(name)).unwrap();
        for piece in bytes.chunks(1 << 20) {
            file.write_all(piece).unwrap();
        }
        // Another program closes its copy of the descriptor when it starts.
        assert!(std::process::Command::new("true").status().unwrap().success());
        assert!(rig.object(&format!("p/{name}")).is_none(), "{name} is visible before its close");
        assert_eq!(fs::metadata(one.path(name)).unwrap().len(), len as u64);
        drop(file);
        assert!(rig.object(&format!("p/{name}")).unwrap() == bytes, "{name}");
        assert!(two.read(name) == bytes && one.read(name) == bytes, "{name}");
    }
    // The store gives all of these one length and, most often, one time.
    for number in 0..6 {
        fs::write(one.path("new"), [number; 3000]).unwrap();
        fs::rename(one.path("new"), one.path("replaced")).unwrap();
        assert_eq!(two.read("replaced").len(), 3000);
    }
    eventually("the last version", || two.read("replaced") == [5; 3000]);
    let uid = fs::metadata(one.path("small")).unwrap().uid();
    assert_eq!(uid, rustix::process::geteuid().as_raw());
    assert_eq!(rig.server.open_uploads(), 0);
    assert_eq!(fs::read_dir(&two.at).unwrap().count(), 5);
    one.unmount();
    two.unmount();
}

#[test]
fn files_are_changed_in_every_way_through_nodes() {
    for way in TRANSPORTS {
        let Some(rig) = NodesRig::start(2) else { return };
        rig.server.put(BUCKET, "p/file", &bytes(7, 20 * MIB));
        let mount = rig.mount("mnt", way);
        make_every_change(&mount, &rig.server);
        mount.unmount();
    }
}

#[test]
fn a_large_file_is_written_while_a_node_is_killed() {
    let Some(mut rig) = NodesRig::start(3) else { return };
    let mount = rig.mount("mnt", &[]);
    let content = bytes(9, 40 * MIB);
    let mut file = File::create(mount.path("large")).unwrap();
    for (number, piece) in content.chunks(MIB).enumerate() {
        if number == 20 {
            rig.nodes[0].process.kill();
        }
        file.write_all(piece).unwrap();
    }
    drop(file);
    assert!(rig.object("p/large").unwrap() == content && mount.read("large") == content);
    assert_eq!(rig.server.open_uploads(), 0);
    mount.unmount();
}

#[test]
fn names_are_made_and_removed_through_nodes() {
    let Some(rig) = NodesRig::start(3) else { return };
    let mount = rig.mount("mnt", &[]);
    make_and_remove_names(&mount, &rig.server);
    mount.unmount();
}

#[test]
fn attributes_are_in_the_metadata_of_objects_through_nodes() {
    let Some(rig) = NodesRig::start_with(2, &["--object-attrs"]) else { return };
    let mount = rig.mount("mnt", &["-o", "allow_other"]);
    let other = rig.mount("other", UNCACHED_FLAGS);
    check_attributes(&mount, &other, &rig.server);
    copy_twice(&mount, &rig.world, &rig.server);
    other.unmount();
    mount.unmount();
}

/// The mount has the attributes that are not published, too.
#[test]
fn a_killed_home_takes_no_attributes_with_it() {
    let Some(mut rig) = NodesRig::start_with(2, &["--object-attrs"]) else { return };
    let mount = rig.mount("mnt", &[]);
    let time = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_000_000_000);
    let files: Vec<(String, File)> = (0..6)
        .map(|number| {
            let name = format!("file{number}");
            let file = File::create(mount.path(&name)).unwrap();
            file.write_all_at(name.as_bytes(), 0).unwrap();
            file.set_permissions(fs::Permissions::from_mode(0o640)).unwrap();
            chown(mount.path(&name), Some(7), Some(8)).unwrap();
            file.set_modified(time).unwrap();
            (name, file)
        })
        .collect();
    rig.nodes[0].process.kill();
    for (name, file) in files {
        drop(file);
        assert_eq!(rig.object(&format!("p/{name}")).unwrap(), name.as_bytes());
        let found = fs::metadata(mount.path(&name)).unwrap();
        assert_eq!((found.mode(), found.uid(), found.gid()), (0o100_640, 7, 8), "{name}");
        assert_eq!(found.modified().unwrap(), time, "{name}");
    }
    mount.unmount();
}

#[test]
fn fsx_finds_no_wrong_byte_in_a_bucket_through_nodes() {
    for way in TRANSPORTS {
        let Some(program) = tool("fsx") else { return };
        let Some(rig) = NodesRig::start(2) else { return };
        let mount = rig.mount("mnt", way);
        run_fsx_on(&program, &mount, &rig.world);
        assert!(rig.object("p/file").unwrap() == mount.read("file"));
        assert_eq!(rig.server.open_uploads(), 0);
        mount.unmount();
    }
}

#[test]
fn lost_answers_and_refusals_leave_whole_objects_through_nodes() {
    if !can_mount() {
        return;
    }
    for way in TRANSPORTS {
        let server = S3Server::in_memory().unwrap();
        let proxy = ChaosProxy::start(server.address()).unwrap();
        let Some(rig) = NodesRig::start_over(2, server, &proxy.endpoint()) else { return };
        let mount = rig.mount("mnt", way);
        write_through_faults(&mount, &rig.server, &proxy);
        mount.unmount();
    }
}

/// Renames with open files: they go on under their new names, in whatever process.
#[test]
fn open_files_follow_renames_through_nodes() {
    let Some(rig) = NodesRig::start(3) else { return };
    let mount = rig.mount("mnt", &[]);
    fs::create_dir(mount.path("step.tmp")).unwrap();
    let files: Vec<File> = (0..6)
        .map(|number| {
            let file = File::create(mount.path(format!("step.tmp/{number}"))).unwrap();
            file.write_all_at(b"first", 0).unwrap();
            file
        })
        .collect();
    fs::rename(mount.path("step.tmp"), mount.path("step")).unwrap();
    assert!(rig.server.keys(BUCKET).iter().all(|key| !key.starts_with("p/step.tmp")), "{:?}", rig.server.keys(BUCKET));
    for (number, file) in files.iter().enumerate() {
        assert_eq!(rig.object(&format!("p/step/{number}")).unwrap(), b"first");
        file.write_all_at(b" and more", 5).unwrap();
        fs::rename(mount.path(format!("step/{number}")), mount.path(format!("step/named-{number}"))).unwrap();
        file.write_all_at(b"!", 14).unwrap();
    }
    drop(files);
    for number in 0..6 {
        assert_eq!(mount.read(format!("step/named-{number}")), b"first and more!");
        assert_eq!(rig.object(&format!("p/step/named-{number}")).unwrap(), b"first and more!");
    }
    // A file that is replaced while it is open is published no more.
    let old = File::create(mount.path("step/named-0")).unwrap();
    old.write_all_at(b"gone", 0).unwrap();
    fs::rename(mount.path("step/named-1"), mount.path("step/named-0")).unwrap();
    old.write_all_at(b"gone too", 0).unwrap();
    drop(old);
    assert_eq!(rig.object("p/step/named-0").unwrap(), b"first and more!");
    let removed = File::create(mount.path("removed")).unwrap();
    removed.write_all_at(b"gone", 0).unwrap();
    fs::remove_file(mount.path("removed")).unwrap();
    drop(removed);
    assert!(rig.object("p/removed").is_none());
    mount.unmount();
}

/// The names in a folder, each with the length of the file.
fn listed(mount: &Mount, folder: &str) -> Vec<(String, u64)> {
    let entries = fs::read_dir(mount.path(folder)).unwrap().map(Result::unwrap);
    let mut names: Vec<_> =
        entries.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len())).collect();
    names.sort();
    names
}

/// The files of a folder have their homes on all nodes, of which one makes the listing.
#[test]
fn a_mount_lists_the_files_that_it_makes_on_any_node() {
    let Some(rig) = NodesRig::start(3) else { return };
    let one = rig.mount("one", TRANSPORTS[0]);
    let two = rig.mount("two", TRANSPORTS[1]);
    fs::create_dir(one.path("folder")).unwrap();
    for number in 0..4 {
        fs::write(one.path(format!("folder/old{number}")), b"old").unwrap();
    }
    let mut files: Vec<File> = Vec::new();
    for number in 0..4u8 {
        let mut old = OpenOptions::new().append(true).open(one.path(format!("folder/old{number}"))).unwrap();
        old.write_all(b" and longer").unwrap();
        files.push(old);
        let mut new = File::create(one.path(format!("folder/new{number}"))).unwrap();
        new.write_all(&vec![1; usize::from(number)]).unwrap();
        files.push(new);
    }
    let mut wanted: Vec<(String, u64)> = (0..4).map(|number| (format!("new{number}"), number)).collect();
    let others: Vec<(String, u64)> = (0..4).map(|number| (format!("old{number}"), 3)).collect();
    wanted.extend(others.iter().map(|(name, _)| (name.clone(), 14)));
    assert_eq!(listed(&one, "folder"), wanted);
    assert_eq!(listed(&two, "folder"), others, "what is not published is its own");
    // A folder with files that only this mount knows is not empty.
    fs::create_dir(one.path("full")).unwrap();
    let inside: Vec<File> = (0..4).map(|number| File::create(one.path(format!("full/{number}"))).unwrap()).collect();
    assert_eq!(fs::remove_dir(one.path("full")).unwrap_err().kind(), ErrorKind::DirectoryNotEmpty);
    (0..4).for_each(|number| fs::remove_file(one.path(format!("full/{number}"))).unwrap());
    fs::remove_dir(one.path("full")).unwrap();
    drop(inside);
    drop(files);
    assert_eq!(listed(&one, "folder"), wanted);
    eventually("the other mount sees the names", || listed(&two, "folder") == wanted);
    one.unmount();
    two.unmount();
}

#[test]
fn exclusive_creations_through_nodes_trust_a_listing() {
    if !can_mount() {
        return;
    }
    let server = S3Server::in_memory().unwrap();
    let proxy = ChaosProxy::start(server.address()).unwrap();
    let Some(rig) = NodesRig::start_over(2, server, &proxy.endpoint()) else { return };
    let one = rig.mount("one", TRANSPORTS[0]);
    let two = rig.mount("two", TRANSPORTS[1]);
    fs::create_dir(one.path("folder")).unwrap();
    for n in 0..100 {
        drop(File::create_new(two.path(format!("folder/f{n}"))).unwrap());
        // The listing does not have the name, and the nodes know that the file was made.
        let name = format!("folder/late{n}");
        fs::write(one.path(&name), b"theirs").unwrap();
        assert_eq!(File::create_new(two.path(&name)).unwrap_err().kind(), ErrorKind::AlreadyExists);
    }
    let looked_up = proxy.count_requests("HEAD", "/p/folder/f");
    assert!(looked_up < 50, "{looked_up} of 100 names were asked for");
    one.unmount();
    two.unmount();
}

#[test]
fn nothing_is_written_over_the_change_of_another_mount() {
    let Some(rig) = NodesRig::start(2) else { return };
    rig.server.put(BUCKET, "p/file", b"first");
    let one = rig.mount("one", TRANSPORTS[0]);
    let two = rig.mount("two", TRANSPORTS[1]);
    let file = OpenOptions::new().write(true).open(one.path("file")).unwrap();
    file.write_all_at(b"ours!", 0).unwrap();
    assert_eq!(two.read("file"), b"first", "what is not published is its own");
    fs::write(two.path("file"), b"theirs").unwrap();
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::ESTALE));
    drop(file);
    assert!(one.read("file") == b"theirs" && rig.object("p/file").unwrap() == b"theirs");
    assert!(one.process().log().contains("was changed by another writer since it was opened"));
    // An exclusive creation has one winner, also before its file is published.
    let exclusive = |mount: &Mount| OpenOptions::new().write(true).create_new(true).open(mount.path("lock"));
    let first = exclusive(&one).unwrap();
    assert_eq!(exclusive(&two).unwrap_err().kind(), ErrorKind::AlreadyExists);
    assert_eq!(exclusive(&one).unwrap_err().kind(), ErrorKind::AlreadyExists);
    drop(first);
    assert_eq!(exclusive(&two).unwrap_err().kind(), ErrorKind::AlreadyExists);
    fs::remove_file(two.path("lock")).unwrap();
    exclusive(&two).unwrap();
    fs::remove_file(two.path("lock")).unwrap();
    let removed = exclusive(&one).unwrap();
    fs::remove_file(one.path("lock")).unwrap();
    exclusive(&two).unwrap();
    drop(removed);
    // The changes of a mount that ends go with it.
    let mut lost = rig.mount("lost", &[]);
    let file = OpenOptions::new().write(true).open(lost.path("file")).unwrap();
    file.write_all_at(b"lost", 0).unwrap();
    lost.process_mut().kill();
    drop(file);
    detach(&lost.at);
    assert_eq!(two.read("file"), b"theirs");
    one.unmount();
    two.unmount();
}

/// A file that is changed while its home is killed: its bytes as the program sees them.
struct KilledChange {
    name: String,
    file: File,
    model: Vec<u8>,
}

impl KilledChange {
    fn write(&mut self, offset: usize, data: &[u8]) {
        self.file.write_all_at(data, offset as u64).unwrap();
        self.model.resize(self.model.len().max(offset + data.len()), 0);
        self.model[offset..offset + data.len()].copy_from_slice(data);
    }

    fn cut(&mut self, len: usize) {
        self.file.set_len(len as u64).unwrap();
        self.model.resize(len, 0);
    }
}

/// The mount has all bytes that are not published: the next home gets them, and every file is published whole.
#[test]
fn a_killed_home_costs_a_pause_and_loses_nothing() {
    for way in TRANSPORTS {
        write_while_a_home_is_killed(way);
    }
}

fn write_while_a_home_is_killed(way: &[&str]) {
    let Some(mut rig) = NodesRig::start(2) else { return };
    let before = bytes(3, 9 * MIB);
    for number in 0..8 {
        rig.server.put(BUCKET, &format!("p/old{number}"), &before);
    }
    let mount = rig.mount("mnt", way);
    let mut files: Vec<KilledChange> = Vec::new();
    for number in 0..8 {
        let name = format!("new{number}");
        let file = File::create(mount.path(&name)).unwrap();
        let mut change = KilledChange { name, file, model: Vec::new() };
        change.write(0, &bytes(number, 3 * MIB / 2));
        files.push(change);
        let name = format!("old{number}");
        let file = OpenOptions::new().read(true).write(true).open(mount.path(&name)).unwrap();
        let mut change = KilledChange { name, file, model: before.clone() };
        change.write(100, b"changed");
        change.cut(5 * MIB);
        change.cut(6 * MIB);
        change.write(7 * MIB, b"behind the end");
        files.push(change);
    }
    rig.nodes[0].process.kill();
    for (number, change) in files.iter_mut().enumerate() {
        if number % 3 == 0 {
            change.write(MIB, b"after the kill");
        }
        let mut seen = vec![0; change.model.len()];
        if number % 4 == 1 {
            change.file.read_exact_at(&mut seen, 0).unwrap();
            assert!(seen == change.model, "{} before its publication", change.name);
        }
        assert_eq!(fs::metadata(mount.path(&change.name)).unwrap().len(), change.model.len() as u64);
        change.file.sync_all().unwrap();
    }
    for change in files {
        let KilledChange { name, file, model } = change;
        drop(file);
        assert!(rig.object(&format!("p/{name}")).unwrap() == model, "{name}");
        assert!(mount.read(&name) == model, "{name}");
    }
    // The lost process had acknowledged nothing that the store lacks.
    let out = rig.world.run(&["umount", mount.at.to_str().unwrap()]);
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// The store has made the object, and the home is killed before it learns that.
#[test]
fn a_publication_whose_home_is_killed_is_made_once_and_whole() {
    if !can_mount() {
        return;
    }
    let server = S3Server::in_memory().unwrap();
    let proxy = Arc::new(ChaosProxy::start(server.address()).unwrap());
    let Some(mut rig) = NodesRig::start_over(2, server, &proxy.endpoint()) else { return };
    let mount = rig.mount("mnt", &[]);
    let files: Vec<(String, File)> = (0..6)
        .map(|number| {
            let name = format!("file{number}");
            let file = File::create(mount.path(&name)).unwrap();
            file.write_all_at(name.as_bytes(), 0).unwrap();
            (name, file)
        })
        .collect();
    proxy.inject_on(Some("PUT"), "file", ProxyFault::LoseAnswer, 1000);
    std::thread::scope(|scope| {
        let closes: Vec<_> = files.iter().map(|(_, file)| scope.spawn(|| file.sync_all())).collect();
        eventually("the store has the objects", || rig.server.keys(BUCKET).len() == 6);
        rig.nodes[0].process.kill();
        proxy.clear_faults();
        for close in closes {
            close.join().unwrap().unwrap();
        }
    });
    for (name, file) in files {
        file.write_all_at(b"more", name.len() as u64).unwrap();
        drop(file);
        assert_eq!(rig.object(&format!("p/{name}")).unwrap(), format!("{name}more").as_bytes());
    }
    mount.unmount();
}

/// The mount has no memory for all bytes, and its only node is killed and started again.
#[test]
fn a_file_larger_than_the_mounts_memory_survives_a_lost_node() {
    let Some(mut rig) = NodesRig::start(1) else { return };
    rig.server.put(BUCKET, "p/file", b"before");
    let mount = rig.mount("mnt", &["--buffer-size", "64M"]);
    let mut model = bytes(1, 100 * MIB);
    let file = OpenOptions::new().read(true).write(true).open(mount.path("file")).unwrap();
    file.write_all_at(&model, 0).unwrap();
    let port = rig.nodes[0].port();
    rig.nodes[0].process.kill();
    let endpoint = rig.server.endpoint();
    rig.nodes[0] = rig.node(0, port, &endpoint);
    model[10 * MIB..10 * MIB + 7].copy_from_slice(b"changed");
    file.write_all_at(b"changed", 10 * MIB as u64).unwrap();
    let mut seen = vec![0; MIB];
    file.read_exact_at(&mut seen, 10 * MIB as u64).unwrap();
    assert!(seen == model[10 * MIB..11 * MIB]);
    file.sync_all().unwrap();
    assert!(rig.object("p/file").unwrap() == model);
    drop(file);
    assert!(mount.read("file") == model);
    mount.unmount();
}

/// Run by `make test-all` only.
mod test_all {
    use super::*;

    /// The store's own conditions and parts, on a server of others.
    #[test]
    fn a_server_of_others_keeps_objects_that_are_written_through_a_node() {
        if !can_mount() {
            return;
        }
        let world = World::new();
        let Some(server) = OtherServer::start(&world) else { return };
        let source = source();
        let words = ["node", "--writable", "--source", &source, "--endpoint-url", &server.endpoint, "--cache-dir"];
        let node = world.node_with(with_credentials(world.command(&words).arg(world.dir("node-cache"))));
        let mount = |name: &str| {
            let at = world.dir(name);
            let registry = format!("static:{}", node.address);
            let words = ["mount", &source, at.to_str().unwrap(), "--rw", "--registry", &registry];
            world.mount_at(&mut world.command(&words), &at)
        };
        let one = mount("one");
        let two = mount("two");
        check_kept_objects(&server, &one, &two, &two);
        one.unmount();
        two.unmount();
    }
}
