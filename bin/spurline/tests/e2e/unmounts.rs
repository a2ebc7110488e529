//! What an unmount leaves behind: bytes that are durable on the nodes, and no process, unless the source hangs.

use rustix::process::Signal;
use spurline_rig::disk_image::DiskImage;
use spurline_rig::world::*;
use spurline_rig::writable_group::{Group, TmpFs, has};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};

/// A group over a file system whose host can lose its power.
fn start_on_disk(count: usize) -> Option<(Group, DiskImage, TmpFs)> {
    if !can_mount() {
        return None;
    }
    let world = World::new();
    // In memory: syncs of a busy disk take seconds.
    let memory = TmpFs::mount(&world.dir("memory"), "size=80m");
    match DiskImage::mount(&memory.0.join("image"), &world.dir("source"), &[]) {
        Ok(disk) => Some((Group::start_at(count, world, disk.at.clone()), disk, memory)),
        Err(why) => {
            skip("ext4", &format!("this kernel mounts no ext4 image: {why}"));
            None
        }
    }
}

#[test]
fn what_was_unmounted_outlives_the_power_of_the_nodes_host() {
    let Some((mut group, disk, _memory)) = start_on_disk(2) else { return };
    let mount = group.mount("mnt", 0, &[]);
    let text = bytes(1, 300_000);
    fs::create_dir(mount.path("folder")).unwrap();
    for n in 0..6 {
        fs::write(mount.path(format!("folder/closed{n}")), &text).unwrap();
    }
    mount.unmount();
    // What nothing has synced is lost, or this test would say nothing.
    fs::write(disk.at.join("beside"), &text).unwrap();
    group.nodes.clear();
    disk.lose_power().unwrap();
    assert!(fs::read(disk.at.join("beside")).unwrap_or_default() != text, "the power was not lost");
    for n in 0..6 {
        assert!(fs::read(disk.at.join(format!("folder/closed{n}"))).unwrap_or_default() == text, "closed{n}");
    }
}

/// Copies, keeps its file open until it may go on, and then syncs.
const COPY: &str = r#"
import os, sys
f, t = os.open(sys.argv[1], os.O_RDONLY), os.open(sys.argv[2], os.O_RDWR | os.O_CREAT)
os.pwrite(t, bytes([7]) * 1000, 0)
at, size = 0, os.fstat(f).st_size
while at < size:
    at += os.copy_file_range(f, t, size - at, at, 500 + at)
os.pwrite(t, b"after", 500 + size)
print("copied", flush=True)
sys.stdin.readline()
os.fsync(t)
"#;

/// The mount keeps written bytes until they are durable, and copied ones it never had: they are durable at once.
#[test]
fn a_copy_outlives_the_power_of_the_nodes_host() {
    if !has("python3") {
        return;
    }
    let Some((mut group, disk, _memory)) = start_on_disk(1) else { return };
    let mount = group.mount("mnt", 0, &[]);
    let text = bytes(2, 300_000);
    fs::write(mount.path("from"), &text).unwrap();
    File::open(mount.path("from")).unwrap().sync_all().unwrap();
    // Another process: programs that this one starts would close its files, and wait for the node that is away.
    let mut copy = Command::new("python3");
    copy.args(["-c", COPY]).args([mount.path("from"), mount.path("to")]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut copy = copy.spawn().unwrap();
    let mut said = String::new();
    BufReader::new(copy.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "copied\n");
    let port = group.nodes[0].port();
    group.nodes.clear();
    disk.lose_power().unwrap();
    let node = group.node(0, port);
    group.nodes.push(node);
    copy.stdin.take().unwrap().write_all(b"go on\n").unwrap();
    assert!(copy.wait().unwrap().success(), "the sync fails");
    let wanted = [&[7; 500][..], &text, b"after"].concat();
    assert!(fs::read(mount.path("to")).unwrap() == wanted && fs::read(disk.at.join("to")).unwrap() == wanted);
    mount.unmount();
}

/// The source is a mount whose process is stopped: no call on it returns, and a process that is in one can't end.
#[test]
fn an_unmount_by_force_names_a_source_that_hangs() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let origin = world.dir("origin");
    fs::write(origin.join("file"), bytes(3, 100_000)).unwrap();
    let mut below = world.mount(origin.to_str().unwrap(), &["--rw", "--no-passthrough"]);
    let (at, cache) = (world.dir("above"), world.dir("cache-above"));
    let mut command = world.command(&["mount", below.at.to_str().unwrap(), at.to_str().unwrap(), "--rw"]);
    command.args(["--no-passthrough", "--cache-size", "0", "--cache-dir"]).arg(cache);
    let mut above = world.mount_at(&mut command, &at);
    below.process().signal(Signal::STOP);
    // In another process: programs that this one starts would close its files, and wait for that.
    let mut reader = Command::new("cat");
    let mut reader = reader.arg(above.path("file")).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    // It waits in FUSE, for an answer of the stopped process.
    let waits = |pid: u32| {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
        let mut places = tasks.filter_map(|task| fs::read_to_string(task.path().join("wchan")).ok());
        places.any(|place| place.contains("request_wait_answer"))
    };
    eventually("a call on the source hangs", || waits(above.process().pid()));
    let mut command = world.command(&["umount", "--force", "--timeout", "300s"]);
    let out = finish(command.arg(&above.at).stdin(Stdio::null()));
    let said = refused(&out, 1, &["is unmounted", "a system call on the source does not return"]);
    assert!(!said.contains("namespace") && !is_mounted(&above.at), "{said}");
    assert!(!reader.wait().unwrap().success(), "the program's call ends");
    below.process().signal(Signal::CONT);
    above.process_mut().wait();
    // Nothing is left behind: the source can be unmounted.
    eventually("the source is free", || Command::new("umount").arg(&below.at).status().unwrap().success());
    below.process_mut().wait();
}

#[test]
fn an_unmount_names_a_stopped_process() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", b"1");
    let mut mount = world.mount(world.path("source").to_str().unwrap(), &["--cache-size", "0"]);
    mount.process().signal(Signal::STOP);
    let pid = mount.process().pid().to_string();
    // The time would not do: the wait for a running process is an hour.
    let mut command = world.command(&["umount", "--timeout", "1h"]);
    let out = finish(command.arg(&mount.at));
    let said =
        refused(&out, 1, &["is unmounted", &format!("its process {pid} is stopped"), &format!("kill -CONT {pid}")]);
    assert!(!said.contains("namespace") && !is_mounted(&mount.at), "{said}");
    mount.process().signal(Signal::CONT);
    assert!(mount.process_mut().wait().success());
}

/// A mount through a node that is killed while it has none of the bytes of an open file.
fn mount_with_unsent_bytes() -> Option<(Group, Mount, Command)> {
    if !has("python3") {
        return None;
    }
    let mut group = Group::start(1)?;
    let mount = group.mount("mnt", 0, &["--peer-timeout", "2s"]);
    let script = "import os, sys; f = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT); print('open', flush=True); \
                  sys.stdin.readline(); os.write(f, bytes(5000)); os._exit(0)";
    let mut writer = Command::new("python3");
    writer.args(["-c", script]).arg(mount.path("lost")).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = writer.spawn().unwrap();
    let mut said = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
    assert_eq!(said, "open\n");
    group.nodes.clear();
    child.stdin.take().unwrap().write_all(b"write\n").unwrap();
    assert!(child.wait().unwrap().success(), "the write is taken, as a node may come back");
    let mut umount = group.world.command(&["umount", "--timeout", "300s"]);
    umount.arg(&mount.at);
    Some((group, mount, umount))
}

const LOST: [&str; 3] =
    ["lost, as no node took them: 4.88 KiB of written bytes: /lost (4.88 KiB)", "fix:", "when a node answers"];

#[test]
fn an_unmount_says_which_bytes_are_lost() {
    let Some((_group, mut mount, mut umount)) = mount_with_unsent_bytes() else { return };
    refused(&finish(&mut umount), 1, &LOST);
    // The process says the same at its end.
    assert_eq!(mount.process_mut().wait().code(), Some(1));
    assert!(LOST.iter().all(|part| mount.process().log().contains(part)), "{}", mount.process().log());
    assert!(!is_mounted(&mount.at));
}

#[test]
fn an_unmount_says_that_a_killed_process_had_bytes_of_its_own() {
    let Some((_group, mut mount, mut umount)) = mount_with_unsent_bytes() else { return };
    let mut umount = umount.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(umount.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("waiting for a node to take 4.88 KiB") {
        assert!(said.read_line(&mut line).unwrap() > 0, "{line}");
    }
    mount.process_mut().kill();
    said.read_to_string(&mut line).unwrap();
    assert_eq!(umount.wait().unwrap().code(), Some(1), "{line}");
    assert!(line.contains("ended without a word") && line.contains("/lost (4.88 KiB)"), "{line}");
}
