//! A mount over its life: into the background, queried, unmounted, refused, killed.

use serde_json::Value;
use spurline_rig::program::{mounted_below, spurline, wait_for};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A directory with a source, a mountpoint, a cache and a place for sockets; unmounted at the end.
struct Rig {
    dir: tempfile::TempDir,
}

impl Rig {
    fn new() -> Self {
        let dir = spurline_rig::program::tempdir();
        for part in ["src/sub", "mnt", "cache", "run"] {
            std::fs::create_dir_all(dir.path().join(part)).unwrap();
        }
        rustix::fs::chmod(dir.path().join("run"), rustix::fs::Mode::RWXU).unwrap();
        std::fs::write(dir.path().join("src/sub/file"), b"hello from below").unwrap();
        Rig { dir }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
    fn command(&self) -> Command {
        let mut command = spurline();
        command.env("SPURLINE_RUNTIME_DIR", self.path("run"));
        command
    }
    fn mount(&self, more: &[&str]) -> Output {
        let mut command = self.command();
        command.arg("mount").arg(self.path("src")).arg(self.path("mnt"));
        // As a variable, so that a test can override it by a flag.
        command.env("SPURLINE_CACHE_SIZE", "64M");
        command.arg("--cache-dir").arg(self.path("cache")).args(["--metrics", "none"]);
        command.arg("--log").arg(self.path("log")).arg("-d").args(more);
        command.output().unwrap()
    }
    fn run(&self, word: &str, target: &Path, more: &[&str]) -> Output {
        self.command().arg(word).arg(target).args(more).output().unwrap()
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        if mounted_below(self.dir.path()) {
            let _ = self.run("umount", &self.path("mnt"), &["--force"]);
        }
    }
}

fn text(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

fn process_of(out: &Output) -> String {
    let text = text(out);
    let after = text.split("process ").nth(1).unwrap_or_else(|| panic!("no process in: {text}"));
    after.split(';').next().unwrap().to_owned()
}

#[test]
fn services_of_one_host_serve_metrics_at_different_ports_and_status_shows_them() {
    // Where this fails, another process has the port.
    let _taken = std::net::TcpListener::bind("127.0.0.1:9567");
    let rig = Rig::new();
    let mount = |more: &[&str]| {
        let mut command = rig.command();
        command.arg("mount").arg(rig.path("src")).arg(rig.path("mnt")).args(["--cache-size", "0", "-d", "--log"]);
        command.arg(rig.path("log")).args(more).output().unwrap()
    };
    let out = mount(&[]);
    assert!(out.status.success(), "{}", text(&out));
    let log = std::fs::read_to_string(rig.path("log")).unwrap();
    let line = log.lines().find(|line| line.contains("metrics page")).unwrap_or_else(|| panic!("{log}"));
    // No warning: most mounts are not scraped.
    let address = line.rsplit("address=").next().unwrap();
    assert!(line.contains(" INFO ") && address.starts_with("127.0.0.1:") && !address.ends_with(":9567"), "{line}");
    assert!(!text(&out).contains("warning"), "{}", text(&out));
    let status = text(&rig.run("status", &rig.path("mnt"), &[]));
    assert!(status.contains(&format!("metrics: {address}\n")), "{status}");
    assert!(rig.run("umount", &rig.path("mnt"), &[]).status.success());
    // An address that was given is a promise.
    let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = held.local_addr().unwrap().to_string();
    let out = mount(&["--metrics", &address]);
    assert_eq!(out.status.code(), Some(3), "{}", text(&out));
    assert!(text(&out).contains(&address) && text(&out).contains("--metrics none"), "{}", text(&out));
}

#[test]
fn a_low_limit_of_open_files_is_refused_at_start() {
    let rig = Rig::new();
    let (source, mnt) = (rig.path("src"), rig.path("mnt"));
    let (source, mnt) = (source.to_str().unwrap(), mnt.to_str().unwrap());
    for words in [["mount", source, mnt].as_slice(), &["node", "--source", source, "--allow-anyone"]] {
        let mut shell = Command::new("sh");
        shell.args(["-c", "ulimit -n 64; exec \"$@\"", "-", env!("CARGO_BIN_EXE_spurline")]).args(words);
        shell.args(["--cache-size", "64M", "--metrics", "none", "--cache-dir"]).arg(rig.path("cache"));
        let out = shell.env("SPURLINE_RUNTIME_DIR", rig.path("run")).output().unwrap();
        assert_eq!(out.status.code(), Some(3), "{}", text(&out));
        let text = text(&out);
        assert!(text.contains("only 64 open files") && text.contains("512") && text.contains("ulimit -n"), "{text}");
    }
}

/// The process group and the session of a process. Both are 0 where their leader is in another PID namespace, as below a container's
/// `exec`, which getsid(2) of some libraries takes for an error.
fn group_and_session(pid: &str) -> (i64, i64) {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let fields: Vec<&str> = fields.split(' ').collect();
    (fields[2].parse().unwrap(), fields[3].parse().unwrap())
}

/// timeout(1), batch systems and runners of CI signal the process group of what they started.
#[test]
fn a_background_mount_is_in_no_process_group_of_its_starter() {
    if !spurline_rig::program::fuse() {
        return;
    }
    for more in [&[][..], &["--recover"]] {
        let rig = Rig::new();
        let out = rig.mount(more);
        assert!(out.status.success(), "{}", text(&out));
        let status: Value = serde_json::from_slice(&rig.run("status", &rig.path("mnt"), &["--json"]).stdout).unwrap();
        let processes = [&status["pid"], &status["keeper"]["pid"]];
        let processes: Vec<i32> = processes.iter().filter_map(|pid| Some(pid.as_i64()? as i32)).collect();
        assert_eq!(processes.len(), 1 + more.len(), "{status}");
        let (own_group, own_session) = group_and_session("self");
        for pid in processes {
            let (group, session) = group_and_session(&pid.to_string());
            assert!(group != own_group && session != own_session, "{more:?}");
        }
        assert!(rig.run("umount", &rig.path("mnt"), &[]).status.success());
    }
}

#[test]
fn into_the_background_looked_at_and_away() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let (mnt, log) = (rig.path("mnt"), rig.path("access.log"));
    let out = rig.mount(&["--access-log", log.to_str().unwrap()]);
    assert!(out.status.success(), "{}", text(&out));
    // The command is back, so the mount answers.
    assert_eq!(std::fs::read(mnt.join("sub/file")).unwrap(), b"hello from below");
    let stats: Value = serde_json::from_slice(&rig.run("stats", &mnt, &["--json", "-c", "1"]).stdout).unwrap();
    assert!(stats["fuse"]["ops"].as_u64().unwrap() > 0 && stats["usage"]["rss_bytes"].as_u64().unwrap() > 0, "{stats}");
    let info: Value =
        serde_json::from_slice(&rig.run("info", &mnt.join("sub/../sub/file"), &["--json"]).stdout).unwrap();
    assert_eq!(info["length"], 16, "{info}");
    assert!(text(&rig.run("info", &mnt.join("sub/file"), &[])).contains("blocks"));
    // A path below a missing folder is missing too; the other paths are reported.
    for path in ["missing", "missing/deeper", "sub/missing/c"] {
        let out = rig.run("info", &mnt.join(path), &[]);
        assert_eq!(out.status.code(), Some(3), "{path}: {}", text(&out));
        assert!(text(&out).contains(path) && text(&out).contains("No such file"), "{path}: {}", text(&out));
    }
    let both = rig.run("info", &mnt.join("missing/c"), &[mnt.join("sub/file").to_str().unwrap()]);
    assert!(both.status.code() == Some(1) && text(&both).contains("blocks"), "{}", text(&both));
    let status = text(&rig.run("status", &mnt, &[]));
    assert!(status.contains("mount") && status.contains("normal"), "{status}");
    // Several mounts may share the log: each line has the process and the mountpoint.
    let status: Value = serde_json::from_slice(&rig.run("status", &mnt, &["--json"]).stdout).unwrap();
    let label = format!(" [{} {}] ", status["pid"], mnt.display());
    let lines = std::fs::read_to_string(rig.path("log")).unwrap();
    assert!(!lines.is_empty() && lines.lines().all(|line| line.contains(&label)), "{label}: {lines}");
    // A second mount at the same place, and one with the same cache elsewhere.
    let second = rig.mount(&[]);
    assert_eq!(second.status.code(), Some(1), "{}", text(&second));
    // A process is inside.
    let inside = std::fs::File::open(mnt.join("sub/file")).unwrap();
    let busy = rig.run("umount", &mnt, &[]);
    assert_eq!(busy.status.code(), Some(1), "{}", text(&busy));
    assert!(text(&busy).contains("busy: in use by") && text(&busy).contains("--lazy"), "{}", text(&busy));
    drop(inside);
    let gone = rig.run("umount", &mnt, &[]);
    assert!(gone.status.success(), "{}", text(&gone));
    assert!(!mounted_below(rig.dir.path()));
    // The unmounted process takes its socket away and writes its last lines a moment later.
    let tidy = || std::fs::read_dir(rig.path("run")).unwrap().next().is_none();
    let logged = || {
        let text = std::fs::read_to_string(&log).unwrap();
        text.contains(" read ino=") && text.contains("path=\"/sub/file\"")
    };
    for _ in 0..1000 {
        if !tidy() || !logged() {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
    assert!(tidy() && logged());
    assert!(text(&rig.run("umount", &mnt, &[])).contains("not a mountpoint of spurline"));
}

/// The log's reader is gone and the terminal is closed: neither is a reason to end, or not to.
#[test]
fn a_mount_whose_log_nobody_reads_and_that_ignores_hangups_ends_when_it_is_told_to() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut command = Command::new("sh");
    // As nohup does.
    command.args(["-c", "trap '' HUP; exec \"$0\" \"$@\""]).arg(spurline().get_program());
    command.arg("mount").arg(rig.path("src")).arg(&mnt).arg("--cache-dir").arg(rig.path("cache"));
    command.args(["--cache-size", "64M", "--metrics", "none"]).env("SPURLINE_RUNTIME_DIR", rig.path("run"));
    let mut mount = command.stderr(writer).spawn().unwrap();
    drop(command);
    wait_for("the mount", || mounted_below(rig.dir.path()));
    drop(reader);
    let process = mount.id().to_string();
    let signal = |name: &str| assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
    signal("-HUP");
    // A warning is logged for this one.
    std::fs::remove_dir_all(rig.path("src")).unwrap();
    assert!(std::fs::read(mnt.join("sub/file")).is_err());
    assert!(std::fs::read_dir(mnt.join("sub")).is_err() && mount.try_wait().unwrap().is_none());
    signal("-TERM");
    assert!(mount.wait().unwrap().success());
    assert!(!mounted_below(rig.dir.path()));
}

#[test]
fn a_mount_in_its_own_source_is_refused() {
    let rig = Rig::new();
    for place in ["src", "src/sub"] {
        let mut command = rig.command();
        command.arg("mount").arg(rig.path("src")).arg(rig.path(place)).args(["-o", "nonempty"]);
        let out = command.arg("--cache-dir").arg(rig.path("cache")).output().unwrap();
        assert_eq!(out.status.code(), Some(2), "{}", text(&out));
        assert!(text(&out).contains("would read itself"), "{}", text(&out));
    }
}

#[test]
fn a_cache_in_the_source_is_warned_of() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let cache = rig.path("src/cache");
    let out = rig.mount(&["--cache-dir", cache.to_str().unwrap()]);
    assert!(out.status.success(), "{}", text(&out));
    let log = std::fs::read_to_string(rig.path("log")).unwrap();
    assert_eq!(log.matches("lies in the source").count(), 1, "{log}");
}

/// As mount(8) calls its helper for a line of /etc/fstab.
#[test]
fn a_line_of_fstab_mounts() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let helper = rig.path("mount.spurline");
    std::os::unix::fs::symlink(rig.command().get_program(), &helper).unwrap();
    let mount = |options: String| {
        let mut command = Command::new(&helper);
        command.env("SPURLINE_RUNTIME_DIR", rig.path("run"));
        command.arg(rig.path("src")).arg(rig.path("mnt")).args(["-o", &options]).output().unwrap()
    };
    let cache = rig.path("cache").display().to_string();
    let log = rig.path("log").display().to_string();
    let out = mount(format!("rw,_netdev,nofail,cache-dir={cache},cache-size=64M,metrics=none,log={log}"));
    assert!(out.status.success(), "{}", text(&out));
    assert_eq!(std::fs::read(rig.path("mnt/sub/file")).unwrap(), b"hello from below");
    assert!(rig.run("umount", &rig.path("mnt"), &[]).status.success());
    let out = mount("cach-size=64M".into());
    assert_eq!(out.status.code(), Some(2), "{}", text(&out));
    assert!(text(&out).contains("-o cach-size=64M"), "{}", text(&out));
}

/// As mount(8) calls its helper for `mount -o remount`, with the options of the mount table or of a line of /etc/fstab.
#[test]
fn a_mount_becomes_read_only_and_writable_again() {
    if !spurline_rig::world::can_mount() {
        return;
    }
    let rig = Rig::new();
    let helper = rig.path("mount.fuse.spurline");
    std::os::unix::fs::symlink(rig.command().get_program(), &helper).unwrap();
    let remount = |options: &str| {
        let mut command = Command::new(&helper);
        command.env("SPURLINE_RUNTIME_DIR", rig.path("run")).arg(rig.path("src")).arg(rig.path("mnt"));
        command.args(["-o", options]).output().unwrap()
    };
    let refused = |options: &str, parts: &[&str]| spurline_rig::world::refused(&remount(options), 1, parts);
    let file = rig.path("mnt/new");
    refused("remount,ro", &["is not a mount of Spurline"]);
    assert!(rig.mount(&["--rw"]).status.success());
    let open = std::fs::File::create(&file).unwrap();
    refused("rw,nosuid,nodev,relatime,user_id=0,group_id=0,remount,ro", &["files are open for writing", "fuser -vm"]);
    drop(open);
    // The kernel closes a file after the program.
    wait_for("the mount is read-only", || remount("rw,nosuid,nodev,relatime,user_id=0,remount,ro").status.success());
    assert_eq!(std::fs::write(&file, "no").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    assert_eq!(std::fs::read(&file).unwrap(), b"");
    let out = remount("ro,remount,rw,cache-size=64M,_netdev");
    assert!(out.status.success() && text(&out).contains("stay as they were at its start: cache-size=64M"), "{out:?}");
    std::fs::write(&file, "yes").unwrap();
    let table = spurline_sys::mounted_at(&rig.path("mnt")).unwrap().unwrap().flags;
    assert!(table.contains("nosuid") && table.contains("nodev"), "{table}");
    assert!(rig.run("umount", &rig.path("mnt"), &[]).status.success());
    assert!(rig.mount(&[]).status.success());
    refused("ro,noatime,remount,rw", &["was mounted read-only", "with --rw"]);
}

#[test]
fn a_background_mount_that_fails_says_why_and_with_which_code() {
    let rig = Rig::new();
    std::fs::remove_dir(rig.path("mnt")).unwrap();
    let out = rig.mount(&[]);
    assert_eq!(out.status.code(), Some(3), "{}", text(&out));
    assert!(String::from_utf8_lossy(&out.stderr).contains("mnt"), "{}", text(&out));
}

#[test]
fn the_warnings_of_a_start_reach_the_terminal_and_the_log_once() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    // The first is found by the arguments alone, the second while the mount starts in the background.
    let inside = rig.path("src/sub/cache");
    let rdma = ["--rdma-network", "lo", "--transport", "tcp"];
    let out = rig.mount(&[&rdma[..], &["--cache-dir", inside.to_str().unwrap()]].concat());
    assert!(out.status.success(), "{}", text(&out));
    let shown = String::from_utf8_lossy(&out.stderr).into_owned();
    let log = std::fs::read_to_string(rig.path("log")).unwrap();
    for part in ["--rdma-network has no effect", "lies in the source"] {
        assert_eq!(shown.matches(part).count(), 1, "{part}: {shown}");
        assert_eq!(log.matches(part).count(), 1, "{part}: {log}");
    }
}

#[test]
fn the_mount_of_a_killed_process_is_told_and_taken_away() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    let out = rig.mount(&[]);
    assert!(out.status.success(), "{}", text(&out));
    let process = process_of(&out);
    assert!(Command::new("kill").args(["-KILL", &process]).status().unwrap().success());
    let mut end = None;
    wait_for("the process's end", || {
        end = std::fs::metadata(mnt.join("sub")).err().and_then(|error| error.raw_os_error());
        end.is_some()
    });
    // Calls under way, and later ones (SEMANTICS.md).
    let told = [libc::ECONNABORTED, libc::ECANCELED, libc::EINTR, libc::ENOTCONN];
    assert!(end.is_some_and(|errno| told.contains(&errno)), "{end:?}");
    // Its files are closed one after the other: it is gone when all are.
    let status = format!("/proc/{process}/status");
    wait_for("the whole of it", || std::fs::read_to_string(&status).map_or(true, |text| text.contains("\nState:\tZ")));
    let says = |out: &Output| text(out).contains("is gone, it was killed") && text(out).contains("spurline umount");
    // The last of its threads closes its admin socket.
    wait_for("the end of its socket", || says(&rig.run("stats", &mnt, &["--json"])));
    for command in ["stats", "status"] {
        let out = rig.run(command, &mnt, &["--json"]);
        assert_eq!(out.status.code(), Some(3), "{command}: {}", text(&out));
        assert!(says(&out), "{command}: {}", text(&out));
    }
    // `status` of all services reports it down, and not another user's.
    let all = rig.command().arg("status").output().unwrap();
    let text_of_all = text(&all);
    let line = text_of_all.lines().find(|line| line.contains(mnt.to_str().unwrap())).unwrap_or_default();
    assert!(all.status.code() == Some(1) && line.contains("down") && line.contains("is gone"), "{text_of_all}");
    // The same when its socket is gone as well, as after a crash of the directory it was in.
    for socket in std::fs::read_dir(rig.path("run")).unwrap().flatten() {
        std::fs::remove_file(socket.path()).unwrap();
    }
    // The last of its threads can close the connection after the socket.
    wait_for("the end of its connection", || !text(&rig.run("status", &mnt, &["--json"])).contains("runs as process"));
    let out = rig.run("status", &mnt, &["--json"]);
    let first = std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link == Path::new("pid:[4026531836]"));
    match (first, text(&out).contains("\"state\":\"down\"")) {
        (true, down) => assert!(down && text(&out).contains("no process of this machine"), "{}", text(&out)),
        (false, _) => println!("SKIP: processes: in a container those outside can't be seen"),
    }
    assert_eq!(out.status.code(), Some(3), "{}", text(&out));
    let all = rig.command().arg("status").output().unwrap();
    let text_of_all = text(&all);
    let line = text_of_all.lines().find(|line| line.contains(mnt.to_str().unwrap())).unwrap_or_default();
    assert!(!first || line.contains("down"), "{text_of_all}");
    assert!(rig.run("umount", &mnt, &[]).status.success());
    // The same place, the same cache: both are free again.
    let out = rig.mount(&[]);
    assert!(out.status.success(), "{}", text(&out));
    assert_eq!(std::fs::read(mnt.join("sub/file")).unwrap(), b"hello from below");
    let process = process_of(&out);
    assert!(Command::new("kill").args(["-TERM", &process]).status().unwrap().success());
    wait_for("the unmount", || !mounted_below(rig.dir.path()));
}

#[test]
fn a_source_that_vanishes_is_logged_once_and_once_when_it_is_back() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    let out = rig.mount(&[]);
    assert!(out.status.success(), "{}", text(&out));
    let lines = |words: &str| {
        let log = std::fs::read_to_string(rig.path("log")).unwrap();
        log.lines().filter(|line| line.contains("spurline_origin::directory") && line.contains(words)).count()
    };
    std::fs::rename(rig.path("src"), rig.path("away")).unwrap();
    // Names not yet looked up: each needs a request to the source.
    for n in 0..5 {
        let error = std::fs::metadata(mnt.join(format!("new-{n}"))).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EHOSTDOWN), "{error}");
    }
    assert_eq!((lines("can't be opened"), lines("is available again")), (1, 0));
    std::fs::rename(rig.path("away"), rig.path("src")).unwrap();
    for n in 5..10 {
        let error = std::fs::metadata(mnt.join(format!("new-{n}"))).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{error}");
    }
    assert_eq!((lines("can't be opened"), lines("is available again")), (1, 1));
    assert!(rig.run("umount", &mnt, &[]).status.success());
}

#[test]
fn stats_do_not_wait_for_a_mount_that_hangs() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    let out = rig.mount(&[]);
    assert!(out.status.success(), "{}", text(&out));
    let process = process_of(&out);
    let signal = |name: &str| assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
    // Neither the mount nor the socket answers; any access to the mount would block.
    signal("-STOP");
    let stats = rig.run("stats", &mnt, &["--json", "-c", "1"]);
    let listed = rig.run("umount", Path::new("/"), &[]);
    signal("-CONT");
    assert_eq!(stats.status.code(), Some(3), "{}", text(&stats));
    assert!(text(&stats).contains("no answer within"), "{}", text(&stats));
    assert!(text(&listed).contains("not a mountpoint of spurline"));
    assert!(rig.run("umount", &mnt, &["--force"]).status.success());
    wait_for("the unmount", || !mounted_below(rig.dir.path()));
}

#[test]
fn umount_takes_nothing_of_others_away() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    let out = rig.mount(&[]);
    assert!(out.status.success(), "{}", text(&out));
    let system = |args: &[&str]| Command::new(args[0]).args(&args[1..]).status().unwrap();
    if !system(&["mount", "-t", "tmpfs", "cover", mnt.to_str().unwrap()]).success() {
        assert!(rig.run("umount", &mnt, &[]).status.success());
        return println!("SKIP: mounting a tmpfs needs root");
    }
    std::fs::write(mnt.join("others"), "bytes").unwrap();
    for how in [&[][..], &["--lazy"], &["--force"]] {
        let refused = rig.run("umount", &mnt, how);
        assert_eq!(refused.status.code(), Some(1), "{how:?}: {}", text(&refused));
        assert!(text(&refused).contains("tmpfs from 'cover' lies over the mount"), "{how:?}: {}", text(&refused));
        assert_eq!(std::fs::read(mnt.join("others")).unwrap(), b"bytes");
    }
    assert!(system(&["umount", mnt.to_str().unwrap()]).success());
    // The refused command changed nothing.
    assert_eq!(std::fs::read(mnt.join("sub/file")).unwrap(), b"hello from below");
    let gone = rig.run("umount", &mnt, &[]);
    assert!(gone.status.success() && !runs(&process_of(&out)), "{}", text(&gone));
}

#[test]
fn several_mounts_are_unmounted_by_one_command() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let (one, two) = (Rig::new(), Rig::new());
    for rig in [&one, &two] {
        let out = rig.mount(&[]);
        assert!(out.status.success(), "{}", text(&out));
    }
    let none = one.path("src");
    let (none, last) = (none.to_str().unwrap(), two.path("mnt"));
    let out = one.run("umount", &one.path("mnt"), &[none, last.to_str().unwrap()]);
    assert!(out.status.code() != Some(0) && text(&out).contains(none), "{}", text(&out));
    assert!(!mounted_below(one.dir.path()) && !mounted_below(two.dir.path()));
    // A user without mounts.
    if rustix::process::geteuid().is_root() {
        let out = spurline().args(["umount", "--all"]).uid(54_321).output().unwrap();
        assert!(out.status.success() && text(&out).contains("no mounts of yours"), "{}", text(&out));
    }
}

/// Whether that process is there and not only not waited for yet.
fn runs(process: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    status.is_ok_and(|text| !text.contains("\nState:\tZ"))
}

#[test]
fn umount_returns_when_the_cache_is_free() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    for _ in 0..5 {
        let out = rig.mount(&[]);
        assert!(out.status.success(), "{}", text(&out));
        assert!(mnt.join("sub/file").exists());
        let gone = rig.run("umount", &mnt, &[]);
        assert!(gone.status.success() && !runs(&process_of(&out)), "{}", text(&gone));
    }
}

#[test]
fn a_mount_that_was_detached_leaves_its_place_to_the_next() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    let mount = || rig.mount(&["--cache-size", "0"]);
    let first = mount();
    assert!(first.status.success(), "{}", text(&first));
    let inside = std::fs::File::open(mnt.join("sub/file")).unwrap();
    let lazy = rig.run("umount", &mnt, &["--lazy"]);
    assert!(lazy.status.success() && !mounted_below(rig.dir.path()), "{}", text(&lazy));
    let second = mount();
    assert!(second.status.success(), "{}", text(&second));
    assert_eq!(std::fs::read(mnt.join("sub/file")).unwrap(), b"hello from below");
    // A third mount finds the mount point in use, as the mount table reports it.
    let third = mount();
    assert!(!third.status.success() && text(&third).contains("is mounted there"), "{}", text(&third));
    // The first ends with its last file, and leaves the second its socket.
    drop(inside);
    wait_for("the end of the first", || !runs(&process_of(&first)));
    let stats = rig.run("stats", &mnt, &["--json", "-c", "1"]);
    assert!(stats.status.success(), "{}", text(&stats));
    let gone = rig.run("umount", &mnt, &[]);
    assert!(gone.status.success() && !runs(&process_of(&second)), "{}", text(&gone));
    assert_eq!(std::fs::read_dir(rig.path("run")).unwrap().count(), 0);
}

#[test]
fn umount_by_force_ends_what_hangs_also_where_fusectl_is_not_mounted() {
    if !spurline_rig::program::fuse() {
        return;
    }
    let isolated = |script: &str| {
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]);
        command
    };
    if !isolated("true").status().is_ok_and(|status| status.success()) {
        return println!("SKIP: mount namespaces need root, and unshare of util-linux");
    }
    let rig = Rig::new();
    let mnt = rig.path("mnt");
    // With io_uring the kernel completes requests in the process's own threads, which are stopped here.
    let out = rig.mount(&["--fuse-io", "dev"]);
    assert!(out.status.success(), "{}", text(&out));
    let process = process_of(&out);
    let signal = |name: &str| assert!(Command::new("kill").args([name, &process]).status().unwrap().success());
    signal("-STOP");
    let (tell, told) = std::sync::mpsc::channel();
    let hangs = mnt.join("sub/file");
    std::thread::spawn(move || tell.send(std::fs::read(hangs).map_err(|error| error.raw_os_error())));
    // It hangs for certain once the kernel has its request, which nothing shows; later it fails at once, as it should.
    let mut command =
        isolated("umount /sys/fs/fuse/connections 2>/dev/null; exec \"$0\" umount --force --timeout 1s \"$1\"");
    command.arg(env!("CARGO_BIN_EXE_spurline")).arg(&mnt).env("SPURLINE_RUNTIME_DIR", rig.path("run"));
    let forced = command.output().unwrap();
    let ended = told.recv_timeout(std::time::Duration::from_secs(60));
    signal("-CONT");
    assert!(matches!(ended, Ok(Err(Some(_)))), "{ended:?}, {}", text(&forced));
    // In this namespace the mount is still in the tree, without a server.
    assert!(rig.run("umount", &mnt, &["--force"]).status.success());
    wait_for("the end of the process", || !runs(&process));
}
