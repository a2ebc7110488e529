//! A node and its mount over RDMA rails, with the real binary on real verbs in the virtual machine: which transport
//! carried the bytes, and what a reader sees when links go down and come back.

use serde_json::Value;
use spurline_testkit::{GuestNet, run_in_guest};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The program in the guest's own memory: the files of the host are far away from there.
const BIN: &str = "/tmp/spurline";
/// More than a mount of 24 MiB of buffers holds, so that every pass comes over the network.
const LEN: usize = 32 << 20;

#[test]
fn in_the_virtual_machine() {
    run_in_guest(GuestNet::Two, &["guest_"], 400);
}

/// Ends a process when the test does, however it does.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Rig {
    dir: tempfile::TempDir,
    data: Vec<u8>,
    port: u16,
    _node: Running,
}

fn word(i: u64) -> u64 {
    (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ i
}

fn run(program: &str, words: &[&str]) -> String {
    let out = Command::new(program).args(words).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{program} {words:?}: {text}");
    text
}

fn wait(what: &str, logs: &[&Path], mut until: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(90);
    while !until() {
        if Instant::now() > deadline {
            let text: Vec<String> = logs.iter().filter_map(|log| std::fs::read_to_string(log).ok()).collect();
            panic!("{what} did not come about:\n{}", text.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

impl Rig {
    /// A source of one file, and a node that serves it.
    fn new(port: u16, network: &str) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let data: Vec<u8> = (0..LEN as u64 / 8).flat_map(|i| word(i).to_le_bytes()).collect();
        for name in ["src", "cache"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        std::fs::write(dir.path().join("src/file"), &data).unwrap();
        let (source, cache) = (dir.path().join("src"), dir.path().join("cache"));
        let mut node = Command::new(BIN);
        node.args(["node", "--buffer-size", "100M", "--block-size", "1M", "--metrics", "none", "--cache-size", "200M"]);
        node.arg("--source").arg(&source).arg("--cache-dir").arg(&cache);
        node.args(["--group-port", &port.to_string(), "--rdma-network", network]);
        std::fs::write(dir.path().join("token"), "q5Ykm0WJ7b2uR1xTzv9sLd3f\n").unwrap();
        node.arg("--group-token-file").arg(dir.path().join("token"));
        let log = dir.path().join("node.log");
        let node = start(node, &log, "over tcp");
        Rig { dir, data, port, _node: node }
    }

    fn log(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.log"))
    }

    fn mount<'a>(&'a self, name: &str, words: &[&str]) -> Mount<'a> {
        let at = self.dir.path().join(name);
        std::fs::create_dir(&at).unwrap();
        let mut mount = Command::new(BIN);
        mount.arg("mount").arg(self.dir.path().join("src")).arg(&at).args(words);
        mount.args([
            "--registry",
            &format!("static:127.0.0.1:{}", self.port),
            "--buffer-size",
            "24M",
            "--block-size",
            "1M",
        ]);
        mount.arg("--group-token-file").arg(self.dir.path().join("token"));
        mount.args(["--metrics", "none", "--rdma-retry", "5s", "--rdma-settle", "2s"]);
        let process = start(mount, &self.log(name), "is mounted on");
        Mount { rig: self, at, log: self.log(name), process: Some(process) }
    }
}

fn start(mut command: Command, log: &Path, ready: &str) -> Running {
    let file = std::fs::File::create(log).unwrap();
    command.stderr(file.try_clone().unwrap()).stdout(file).stdin(Stdio::null());
    let process = Running(command.spawn().unwrap());
    wait(ready, &[log], || std::fs::read_to_string(log).is_ok_and(|text| text.contains(ready)));
    process
}

struct Mount<'a> {
    rig: &'a Rig,
    at: PathBuf,
    log: PathBuf,
    process: Option<Running>,
}

impl Mount<'_> {
    /// Reads the whole file past the page cache and compares every byte.
    fn pass(&self) {
        std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        let got = std::fs::read(self.at.join("file")).expect("a reader sees no error");
        assert_eq!(got.len(), LEN);
        if let Some(at) = (0..LEN).step_by(8).find(|at| got[*at..at + 8] != self.rig.data[*at..at + 8]) {
            panic!("wrong bytes at {at}");
        }
    }

    /// Asks the admin socket itself: starting the program for each question takes seconds in an emulated machine.
    fn ask(&self, op: &str) -> Value {
        let log = std::fs::read_to_string(&self.log).unwrap();
        let path = log.split("socket=").nth(1).and_then(|rest| rest.split_whitespace().next()).expect("a socket");
        let mut socket = UnixStream::connect(path).unwrap();
        writeln!(socket, "{{\"op\":\"{op}\"}}").unwrap();
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()["ok"].take()
    }

    fn count(&self, section: &str, name: &str) -> u64 {
        self.ask("stats")[section][name].as_u64().unwrap_or_else(|| panic!("{section}.{name}"))
    }

    /// What carries data now, as `status` says it.
    fn carries(&self) -> String {
        self.ask("status")["peers"][0]["transport"].as_str().unwrap_or_default().to_owned()
    }

    fn wait(&self, what: &str, mut until: impl FnMut(&Self) -> bool) {
        wait(what, &[&self.log, &self.rig.log("node")], || until(self));
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new(BIN).args(["umount", "--force"]).arg(&self.at).output();
        self.process.take();
    }
}

fn link(name: &str, to: &str) {
    run("ip", &["link", "set", name, to]);
}

#[test]
#[ignore = "runs in the virtual machine"]
fn guest_rails_carry_the_bytes_and_readers_outlive_their_links() {
    run("modprobe", &["fuse"]);
    std::fs::copy(env!("CARGO_BIN_EXE_spurline"), BIN).unwrap();
    let rig = Rig::new(7000, "rail0:rail1");
    let mount = rig.mount("both", &["--rdma-network", "rail0:rail1"]);
    mount.wait("both paths", |m| m.count("rdma", "paths_up") == 2);
    mount.pass();
    let (all, rdma) = (mount.count("remotecache", "recv_bytes"), mount.count("rdma", "recv_bytes"));
    assert!(all >= LEN as u64 && rdma * 100 >= all * 99, "{rdma} of {all} bytes over RDMA");
    assert_eq!(mount.carries(), "rdma");
    let paths = mount.ask("stats")["paths"].as_array().unwrap().clone();
    let each = |name: &str| paths.iter().find(|p| p["path"] == name).and_then(|p| p["recv_bytes"].as_u64()).unwrap();
    assert!(each("rail0-rail0") > 0 && each("rail1-rail1") > 0, "{paths:?}");

    // Mixed clients: one without rails, beside the other.
    let tcp = rig.mount("tcp", &[]);
    tcp.pass();
    assert_eq!((tcp.count("rdma", "recv_bytes"), tcp.carries().as_str()), (0, "tcp"));
    drop(tcp);

    let (stop, passes) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Acquire) {
                mount.pass();
                passes.fetch_add(1, Ordering::Relaxed);
            }
        });
        let script = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            link("rail0", "down");
            mount.wait("the failover of one rail", |m| m.count("rdma", "paths_up") == 1);
            let before = mount.count("rdma", "recv_bytes");
            mount.wait("its share on the other", |m| m.count("rdma", "recv_bytes") > before + (4 << 20));
            assert_eq!(mount.count("tcp", "recv_bytes"), 0, "TCP while a rail was left");
            link("rail1", "down");
            mount.wait("tcp", |m| m.carries() == "tcp" && m.count("tcp", "recv_bytes") > 4 << 20);
            link("rail0", "up");
            link("rail1", "up");
            mount.wait("failback", |m| m.carries() == "rdma" && m.count("rdma", "failbacks") > 0);
            let before = mount.count("rdma", "recv_bytes");
            mount.wait("bytes over RDMA again", |m| m.count("rdma", "recv_bytes") > before + (4 << 20));
        }));
        stop.store(true, Ordering::Release);
        let read = reader.join();
        if let Some(panic) = script.err().or(read.err()) {
            std::panic::resume_unwind(panic);
        }
    });
    assert!(passes.load(Ordering::Relaxed) > 0);
    assert!(mount.count("rdma", "failovers") >= 2);
    let log = std::fs::read_to_string(&mount.log).unwrap();
    for line in ["a path carries data peer=", "a path failed: ", "no path is left", "a path carries data again"] {
        assert!(log.contains(line), "'{line}' is not in the log:\n{log}");
    }
}
