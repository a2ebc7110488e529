//! Faults and bad input: each ends in a bounded time, with the right bytes or a message with a remedy.

use rustix::fs::Mode;
use rustix::process::Signal;
use spurline_rig::world::*;
use spurline_testkit::{ChaosProxy, ProxyFault, S3Server};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

#[test]
fn what_is_no_mountpoint_is_told_apart() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", b"1");
    let file = world.file("full/file", b"2");
    let (source, full) = (world.path("source"), world.path("full"));
    let try_at = |at: &Path| {
        let mut command = world.command(&["mount"]);
        command.args([&source, at]).args(["--cache-size", "0"]);
        finish(&mut command)
    };
    refused(&try_at(&world.path("none")), 3, &["none does not exist", "mkdir -p"]);
    refused(&try_at(&file), 1, &["is not a directory"]);
    refused(&try_at(&full), 1, &["is not empty", "'file'", "-o nonempty"]);
    let mount = world.mount(source.to_str().unwrap(), &["--cache-size", "0"]);
    refused(&try_at(&mount.at), 1, &["is busy", "umount"]);
    assert_eq!(mount.read("file"), b"1");
    let at = mount.at.clone();
    mount.unmount();
    assert!(fs::read_dir(at).unwrap().next().is_none());
}

#[test]
fn without_the_device_of_fuse_a_mount_says_what_is_missing() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    world.file("source/file", b"1");
    // A mount namespace where /dev is empty.
    let script = "mount -t tmpfs none /dev && exec \"$@\"";
    let mut command = world.command(&[]);
    command.args(world.mount_words(world.path("source").to_str().unwrap()));
    let mut apart = Command::new("unshare");
    apart.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]);
    apart.arg(command.get_program()).args(command.get_args());
    same_environment(&mut apart, &command);
    refused(&finish(&mut apart), 3, &["/dev/fuse can't be opened", "modprobe fuse", "--device /dev/fuse"]);
}

/// A mount that is to be refused before it is made.
fn no_mount(world: &World, source: &str, credentials: bool, more: &[&str]) -> std::process::Output {
    let mut command = world.command(&[]);
    command.args(world.mount_words(source)).args(more);
    if credentials {
        with_credentials(&mut command);
    }
    let out = finish(&mut command);
    assert!(!is_mounted(&world.path("mnt")));
    out
}

#[test]
fn wrong_sources_are_refused_in_words() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let server = S3Server::in_memory().unwrap();
    server.create_bucket("data");
    let endpoint = server.endpoint();
    let at = ["--endpoint-url", &endpoint, "--origin-timeout", "5s"];
    refused(&no_mount(&world, "s4://data", true, &at), 2, &["unknown scheme 's4'", "s3://BUCKET"]);
    refused(&no_mount(&world, "s3://nobucket", true, &at), 3, &["nobucket", "bucket"]);
    let none = world.path("none");
    refused(&no_mount(&world, none.to_str().unwrap(), true, &[]), 3, &["none"]);
    let file = world.file("file", b"1");
    let out = no_mount(&world, file.to_str().unwrap(), true, &[]);
    refused(&out, 2, &["file", "directory"]);
    let mut command = world.command(&[]);
    command.args(world.mount_words("s3://data")).args(at);
    command.env("AWS_ACCESS_KEY_ID", "SOMEBODYELSE").env("AWS_SECRET_ACCESS_KEY", "wrong");
    let text = refused(&finish(&mut command), 3, &["s3://data", "access key SOME", "AWS_ACCESS_KEY_ID"]);
    assert!(!text.contains("wrong"), "a secret in a message: {text}");
    let closed = format!("http://{}", crate::remote::closed_port());
    let at = ["--endpoint-url", &closed, "--origin-timeout", "5s"];
    refused(&no_mount(&world, "s3://data", true, &at), 3, &[&closed[7..]]);
    let at = ["--endpoint-url", "http://nowhere.invalid:9000", "--origin-timeout", "5s"];
    refused(&no_mount(&world, "s3://data", true, &at), 3, &["s3://data", "nowhere.invalid:9000"]);
    // A listener without accept: connections open, and stay silent.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let quiet = format!("http://{}", silent.local_addr().unwrap());
    let at = ["--endpoint-url", &quiet, "--origin-timeout", "2s"];
    refused(&no_mount(&world, "s3://data", true, &at), 3, &["s3://data", "no answer from", &quiet]);
    // A node refuses the same at its start.
    let mut command = world.command(&[]);
    command.args(world.node_words(&["s3://nobucket"], 0)).args(["--endpoint-url", &endpoint]);
    refused(&finish(with_credentials(&mut command)), 3, &["nobucket"]);
}

/// A bucket behind a proxy that misbehaves on demand, with one file of `len` bytes in it.
struct Chaos {
    world: World,
    server: S3Server,
    proxy: ChaosProxy,
    text: Vec<u8>,
}

impl Chaos {
    fn new(len: usize) -> Chaos {
        let server = S3Server::in_memory().unwrap();
        server.create_bucket("data");
        let text = bytes(21, len);
        server.put("data", "file", &text);
        let proxy = ChaosProxy::start(server.address()).unwrap();
        Chaos { world: World::new(), server, proxy, text }
    }
    fn mount(&self, more: &[&str]) -> Mount {
        let endpoint = self.proxy.endpoint();
        self.world.mount("s3://data", &[&["--endpoint-url", &endpoint][..], more].concat())
    }
}

#[test]
fn an_under_store_that_stalls_is_an_error_in_time() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(3 * MIB);
    let mount = chaos.mount(&["--origin-timeout", "2s"]);
    chaos.proxy.inject(ProxyFault::Stall, 1000);
    let error = fs::read(mount.path("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
    assert!(mount.count("object", "in_flight") < 100);
    chaos.proxy.clear_faults();
    eventually("reads once the store answers", || fs::read(mount.path("file")).is_ok_and(|b| b == chaos.text));
    mount.unmount();
}

#[test]
fn an_origin_that_fails_until_the_deadline_is_an_io_error() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(3 * MIB);
    let mount = chaos.mount(&["--origin-timeout", "2s"]);
    let file = File::open(mount.path("file")).unwrap();
    let mut buf = vec![0; MIB];
    for fault in [ProxyFault::Error(500, "InternalError", "again"), ProxyFault::SlowDown, ProxyFault::Close] {
        chaos.proxy.inject(fault.clone(), 1000);
        let error = file.read_at(&mut buf, MIB as u64).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{fault:?}");
        let lookup = fs::metadata(mount.path(format!("absent-{fault:?}").replace('/', "")));
        assert_eq!(lookup.unwrap_err().raw_os_error(), Some(libc::EIO), "{fault:?}");
        chaos.proxy.clear_faults();
    }
    drop(file);
    mount.unmount();
}

#[test]
fn an_under_store_that_stalls_between_stat_and_read_is_an_error_in_time() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(3 * MIB);
    let mount = chaos.mount(&["--origin-timeout", "2s", "--origin-stall-timeout", "500ms"]);
    let file = File::open(mount.path("file")).unwrap();
    chaos.proxy.inject_on(Some("GET"), "/file", ProxyFault::StallAfter(1000), 1000);
    let mut buf = vec![0; MIB];
    let error = file.read_at(&mut buf, MIB as u64).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ETIMEDOUT));
    chaos.proxy.clear_faults();
    eventually("reads once the store answers", || file.read_exact_at(&mut buf, MIB as u64).is_ok());
    assert!(buf[..] == chaos.text[MIB..2 * MIB]);
    drop(file);
    mount.unmount();
}

#[test]
fn slow_down_for_a_while_is_waited_for_and_counted() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(2 * MIB);
    let mount = chaos.mount(&[]);
    let file = File::open(mount.path("file")).unwrap();
    chaos.proxy.inject_on(Some("GET"), "/file", ProxyFault::SlowDown, 3);
    let mut buf = vec![0; chaos.text.len()];
    file.read_exact_at(&mut buf, 0).unwrap();
    assert!(buf == chaos.text);
    let stats = mount.stats();
    assert_eq!(count(&stats, "object", "throttled"), 3);
    assert!(count(&stats, "object", "retries") >= 3);
    assert_eq!(count(&stats, "object", "errors"), 0);
    drop(file);
    mount.unmount();
}

#[test]
fn a_transfer_cut_in_half_goes_on_where_it_ended() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(8 * MIB);
    let mount = chaos.mount(&[]);
    let file = File::open(mount.path("file")).unwrap();
    chaos.proxy.inject_on(Some("GET"), "/file", ProxyFault::CutHalf, 5);
    let mut buf = vec![0; chaos.text.len()];
    file.read_exact_at(&mut buf, 0).unwrap();
    assert!(buf == chaos.text);
    let stats = mount.stats();
    assert_eq!(count(&stats, "object", "retries"), 5);
    assert_eq!(count(&stats, "object", "get_bytes"), chaos.text.len() as u64, "what had come was not fetched again");
    drop(file);
    mount.unmount();
}

#[test]
fn an_object_replaced_while_it_is_read_is_never_a_mix() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(6 * MIB);
    let new = bytes(22, chaos.text.len());
    let mount = chaos.mount(&["--attr-cache", "200ms", "--entry-cache", "200ms", "--max-readahead", "0"]);
    let old = File::open(mount.path("file")).unwrap();
    let mut buf = vec![0; MIB];
    old.read_exact_at(&mut buf, 0).unwrap();
    assert!(buf[..] == chaos.text[..MIB]);
    chaos.server.put("data", "file", &new);
    // The handle keeps its version: bytes of it, or an error, at every offset.
    let mut stale = 0;
    for at in (0..6).map(|n| n * MIB).chain([MIB / 2, 5 * MIB + 77]) {
        match old.read_at(&mut buf, at as u64) {
            Ok(n) => assert!(buf[..n] == chaos.text[at..at + n], "bytes of another version at {at}"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "at {at}: {error}");
                stale += 1;
            }
        }
    }
    assert!(stale > 0, "blocks that were never read can't be had any more");
    let inode = old.metadata().unwrap().ino();
    std::thread::sleep(Duration::from_secs(1));
    // Past the cache times a new open sees the new version, whole.
    assert!(mount.read("file") == new);
    assert_ne!(fs::metadata(mount.path("file")).unwrap().ino(), inode);
    drop(old);
    mount.unmount();
}

#[test]
fn replaced_again_and_again_every_read_is_one_version() {
    if !can_mount() {
        return;
    }
    let chaos = Chaos::new(4 * MIB);
    let caches = ["--attr-cache", "50ms", "--entry-cache", "50ms"];
    let mount = chaos.mount(&caches);
    let versions: Vec<Vec<u8>> = (0..6).map(|n| vec![n as u8 + 1; 4 * MIB]).collect();
    chaos.server.put("data", "file", &versions[0]);
    std::thread::sleep(Duration::from_millis(500));
    let done = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = std::collections::BTreeSet::new();
            while !done.load(Ordering::SeqCst) {
                match fs::read(mount.path("file")) {
                    Ok(all) => {
                        assert_eq!(all.len(), 4 * MIB);
                        assert!(all.iter().all(|b| *b == all[0]), "a mix of two versions");
                        seen.insert(all[0]);
                    }
                    Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}"),
                }
            }
            seen
        });
        for version in &versions[1..] {
            std::thread::sleep(Duration::from_millis(300));
            chaos.server.put("data", "file", version);
        }
        eventually("the last version", || fs::read(mount.path("file")).is_ok_and(|b| b == versions[5]));
        done.store(true, Ordering::SeqCst);
        reader.join().unwrap()
    });
    println!("versions seen whole: {seen:?}");
    mount.unmount();
}

#[test]
fn the_number_that_a_refused_budget_names_works() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let text = bytes(30, 9 * MIB);
    world.file("source/file", &text);
    let source = world.path("source").to_str().unwrap().to_owned();
    let text_of = refused(&no_mount(&world, &source, true, &["--buffer-size", "3M"]), 2, &["is too small", "needed"]);
    let number = text_of.split("--buffer-size ").last().unwrap().split('M').next().unwrap();
    let number: u64 = number.parse().unwrap_or_else(|_| panic!("no number in {text_of}"));
    let less = format!("{}M", number - 1);
    refused(&no_mount(&world, &source, true, &["--buffer-size", &less]), 2, &["is too small"]);
    let mount = world.mount(&source, &["--buffer-size", &format!("{number}M")]);
    let path = mount.path("file");
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| assert!(fs::read(&path).unwrap() == text));
        }
    });
    mount.unmount();
    // The same of a node.
    let node = |size: &str| {
        let mut command = world.command(&[]);
        command.args(world.node_words(&[&source], 0)).args(["--buffer-size", size]);
        command
    };
    let text_of = refused(&finish(&mut node("2M")), 2, &["is too small", "needed"]);
    let number = text_of.split("--buffer-size ").last().unwrap().split('M').next().unwrap();
    let node = world.node_with(&mut node(&format!("{number}M")));
    let mount = world.consumer(&source, &node.address, &[]);
    assert!(mount.read("file") == text);
    mount.unmount();
}

#[test]
fn sigterm_and_sigint_unmount_cleanly() {
    if !can_mount() {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        let world = World::new();
        world.file("source/file", b"1");
        let mut mount = world.mount(world.path("source").to_str().unwrap(), &[]);
        assert_eq!(mount.read("file"), b"1");
        mount.process().signal(signal);
        let status = mount.process_mut().wait();
        assert!(status.success(), "{status} after {signal:?}: {}", mount.process().log());
        assert!(!is_mounted(&mount.at));
        assert!(fs::read_dir(world.path("run")).unwrap().next().is_none(), "the admin socket stays behind");
        let mut node = world.node(&[world.path("source").to_str().unwrap()], 0, &[]);
        node.process.signal(signal);
        assert!(node.process.wait().success());
    }
}

#[test]
fn a_signal_while_the_mount_is_being_made_leaves_nothing_behind() {
    if !can_mount() {
        return;
    }
    // Under nohup hangups are ignored, by what is started here as well.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    let ignored = u64::from_str_radix(ignored, 16).unwrap();
    let heard = |signal: &Signal| ignored >> (signal.as_raw() - 1) & 1 == 0;
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT].into_iter().filter(heard) {
        for pause in [0, 1, 3, 10] {
            let world = World::new();
            world.file("source/file", b"1");
            let at = world.dir("mnt");
            let mut command = spurline(&world.path("run"));
            command.args(world.mount_words(world.path("source").to_str().unwrap()));
            let mut process = Process::start(&mut command, &world.log_path("mount"));
            let start = Instant::now();
            while !is_mounted(&at) {
                assert!(start.elapsed() < Duration::from_secs(60), "{}", process.log());
            }
            std::thread::sleep(Duration::from_millis(pause));
            process.signal(signal);
            let status = process.wait();
            assert!(status.success(), "{status} after {signal:?} and {pause} ms: {}", process.log());
            assert!(!is_mounted(&at), "{signal:?} after {pause} ms: {}", process.log());
        }
    }
}

/// A mount of a user without rights, in a mount namespace of its own.
struct UserMount<'a> {
    world: &'a World,
    binary: &'a Path,
    mount: Mount,
}

const DROP_RIGHTS: [&str; 4] = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];

impl UserMount<'_> {
    /// With `device` as /dev/fuse.
    fn start<'a>(world: &'a World, binary: &'a Path, device: &Path, more: &[&str]) -> UserMount<'a> {
        let script = "mount --bind \"$1\" /dev/fuse && shift && exec \"$@\"";
        let mut command = world.command(&[]);
        let words = world.mount_words(world.path("source").to_str().unwrap());
        command.args(words).arg("--recover").args(more);
        let mut apart = Command::new("unshare");
        apart.args(["--mount", "--propagation", "private", "sh", "-c", script, "sh"]).arg(device);
        apart.args(DROP_RIGHTS).arg(binary).args(command.get_args()).current_dir("/");
        same_environment(&mut apart, &command);
        let mount = world.mount_with(&mut apart);
        assert!(mounted_for(&mount.process().pid().to_string(), &mount.at) && !is_mounted(&mount.at));
        UserMount { world, binary, mount }
    }

    /// A program of the user. Root can't enter such a mount.
    fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new("nsenter");
        let pid = self.mount.process().pid();
        command.args([&format!("--mount=/proc/{pid}/ns/mnt")]).args(DROP_RIGHTS).arg(program);
        same_environment(&mut command, &self.world.command(&[]));
        command
    }

    fn run(&self, word: &str) {
        let out = finish(self.command(self.binary).arg(word).arg(&self.mount.at));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    }

    fn status(&self) -> serde_json::Value {
        let out = finish(self.command(self.binary).args(["status", "--json"]).arg(&self.mount.at));
        serde_json::from_slice(&out.stdout).unwrap_or_default()
    }

    /// The keeper starts the mount's process again.
    fn kill_server(&self) {
        send(self.status()["pid"].as_u64().unwrap() as u32, Signal::KILL);
        eventually("the next process", || self.status()["keeper"]["restarts"] == 1);
    }

    fn read(&self) -> Vec<u8> {
        finish(self.command("cat").arg(self.mount.path("file"))).stdout
    }

    fn unmount(mut self) {
        self.run("umount");
        let status = self.mount.process_mut().wait();
        assert!(status.success(), "{status}: {}", self.mount.process().log());
    }
}

#[test]
fn a_user_without_rights_mounts_through_fusermount3() {
    if !can_mount() {
        return;
    }
    if finish(Command::new("sh").args(["-c", "command -v fusermount3"])).stdout.is_empty() {
        return skip("fusermount", "there is no fusermount3");
    }
    const NOBODY: u32 = 65534;
    let world = World::new();
    world.file("source/file", &bytes(40, 2 * MIB));
    for dir in ["run", "mnt", "cache", "source"] {
        std::os::unix::fs::chown(world.dir(dir), Some(NOBODY), Some(NOBODY)).unwrap();
    }
    rustix::fs::chmod(world.path(""), Mode::from_raw_mode(0o755)).unwrap();
    // The binary may lie where only root can go.
    let binary = world.path("spurline");
    fs::copy(env!("CARGO_BIN_EXE_spurline"), &binary).unwrap();
    rustix::fs::chmod(&binary, Mode::from_raw_mode(0o755)).unwrap();
    let reachable = finish(Command::new(&binary).arg("--version").uid(NOBODY).gid(NOBODY));
    if !reachable.status.success() {
        return skip("fusermount", "another user can't reach the temporary directory");
    }
    // /dev/fuse may be root's alone: the mount gets one of its own, in a private mount namespace.
    let device = world.path("fuse");
    let made = finish(Command::new("mknod").args(["-m", "666"]).arg(&device).args(["c", "10", "229"]));
    if !made.status.success() || File::options().read(true).write(true).open(&device).is_err() {
        return skip("fusermount", "no device can be made here");
    }
    let mount = UserMount::start(&world, &binary, &device, &[]);
    assert!(mount.read() == bytes(40, 2 * MIB));
    mount.kill_server();
    mount.run("upgrade");
    assert!(mount.read() == bytes(40, 2 * MIB));
    mount.unmount();
    let mount = UserMount::start(&world, &binary, &device, &["--rw"]);
    let script = "set -e; cd \"$1\"; exec 3>log; n=0; while [ ! -e end ]; do echo $n >&3; n=$((n + 1)); \
        echo text >new; mv new old; [ \"$(cat old)\" = text ]; rm old; done";
    let mut writer = mount.command("sh").args(["-c", script, "sh"]).arg(&mount.mount.at).spawn().unwrap();
    let log = || fs::read_to_string(world.path("source/log")).unwrap_or_default();
    let wait_for_writes = || {
        let lines = log().lines().count();
        eventually("the user's program writes", || log().lines().count() > lines + 5);
    };
    wait_for_writes();
    mount.kill_server();
    wait_for_writes();
    mount.run("upgrade");
    wait_for_writes();
    fs::write(world.path("source/end"), "").unwrap();
    assert!(writer.wait().unwrap().success());
    mount.unmount();
    let log = log();
    assert!(log.lines().enumerate().all(|(n, line)| line == n.to_string()), "{log}");
}
