//! A source, nodes that serve it, mounts that read it, and fio as the reader that notices every wrong byte.

use serde_json::Value;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Once;
use std::time::{Duration, Instant};

/// The program in the guest's own memory: the files of the host are far away from there.
pub const BIN: &str = "/vmtmp/spurline";
/// More than a mount of 24 MiB of buffers holds, so that every pass comes over the network.
pub const LEN: usize = 32 << 20;

/// Ends a process when the test does, however it does.
pub struct Running(Child);

impl Running {
    pub fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// Processor time it has used, in seconds.
    pub fn cpu(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap().split(' ').collect();
        // In user space and in the kernel, in hundredths.
        fields[11..13].iter().map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Puts the program where the guest reaches it fast, once.
pub fn ready() {
    static READY: Once = Once::new();
    READY.call_once(|| {
        run("modprobe", &["fuse"]);
        // Figures may be those of another build.
        let program = crate::program::program_path();
        std::fs::copy(program, BIN).unwrap();
    });
}

/// Runs a command to its end; it has to succeed.
pub fn run(program: &str, words: &[&str]) {
    let out = Command::new(program).args(words).output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{program} {words:?}: {text}");
}

pub fn sh(script: &str) {
    run("bash", &["-c", script]);
}

/// Takes a rail's link down.
pub fn link_down(rail: &str) {
    run("ip", &["link", "set", rail, "down"]);
}

/// Takes a rail's link up. Soft-RoCE of Linux 6.1 may need its device made again then: after a message of the connection
/// manager to a link that is down, every later one gets lost.
pub fn link_up(rail: &str, address: &str) {
    // A link that goes down loses its IPv6 addresses.
    let (length, nodad) = if address.contains(':') { ("64", "nodad") } else { ("24", "") };
    sh(&format!("ip link set {rail} up && ip address replace {address}/{length} dev {rail} {nodad}"));
    // Nothing listens there. A device that works reports that at once.
    let answer = Command::new("timeout").args(["10", "rping", "-c", "-a", address, "-p", "1"]).output().unwrap();
    assert_ne!(answer.status.code(), Some(127), "rping is not installed (scripts/setup test does it)");
    if answer.status.code() == Some(124) {
        let device = rail.replace("rail", "rxe");
        println!("  {device} sends no message of the connection manager since its link is up: it is made again");
        sh(&format!("rdma link delete {device} && rdma link add {device} type rxe netdev {rail}"));
    }
}

/// Waits until `until`, or fails with the logs.
pub fn wait(what: &str, logs: &[&Path], mut until: impl FnMut() -> bool) {
    let begun = Instant::now();
    let deadline = begun + Duration::from_secs(300);
    while !until() {
        if Instant::now() > deadline {
            let text: Vec<String> = logs.iter().map(|log| describe_service(log)).collect();
            panic!("{what} did not come about:\n{}", text.join("\n"));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("  {what}: after {:.1} s", begun.elapsed().as_secs_f64());
}

/// The log of a service and its statistics, if it answers.
fn describe_service(log: &Path) -> String {
    let text = std::fs::read_to_string(log).unwrap_or_default();
    match socket_of(&text).filter(|socket| UnixStream::connect(socket).is_ok()) {
        Some(socket) => format!("{text}\n{}\n{}", ask_socket(&socket, "stats"), ask_socket(&socket, "status")),
        None => text,
    }
}

/// Starts a service and waits for the log line that reports it ready.
pub fn start(mut command: Command, log: &Path, ready: &str) -> Running {
    let file = std::fs::File::create(log).unwrap();
    command.stderr(file.try_clone().unwrap()).stdout(file).stdin(Stdio::null());
    let mut process = Running(command.spawn().unwrap());
    wait(ready, &[log], || {
        let text = std::fs::read_to_string(log).unwrap_or_default();
        assert_eq!(process.0.try_wait().unwrap(), None, "it has ended instead of '{ready}':\n{text}");
        text.contains(ready)
    });
    process
}

/// An emulated machine on a busy one may be silent for seconds. These faults show by themselves; lost packets have a
/// test of their own.
pub const SILENCE: Duration = Duration::from_secs(60);

/// The secret of all here: rails reach beyond this machine.
pub fn token(dir: &Path) -> PathBuf {
    dir.join("token")
}

fn patient(more: &[&str]) -> &'static [&'static str] {
    if more.contains(&"--rdma-silence") { &[] } else { &["--rdma-silence", "60s"] }
}

/// Arguments of every mount after its source and mount point.
pub fn mount_words(dir: &Path, registry: &str, more: &[&str]) -> Vec<String> {
    let words = ["--registry", registry, "--buffer-size", "24M", "--block-size", "1M", "--metrics", "none"];
    let timing = ["--rdma-retry", "3s", "--rdma-settle", "2s", "--peer-timeout", "100s"];
    let token = token(dir);
    let token = ["--group-token-file", token.to_str().unwrap()];
    words.iter().chain(&timing).chain(&token).chain(patient(more)).chain(more).map(|word| (*word).to_owned()).collect()
}

/// Arguments of every node.
pub fn node_words(dir: &Path, source: &str, port: u16, more: &[&str]) -> Vec<String> {
    let cache = dir.join(format!("cache-{port}"));
    std::fs::create_dir_all(&cache).unwrap();
    let port = port.to_string();
    let cache = cache.to_str().unwrap();
    let sizes = ["--buffer-size", "64M", "--block-size", "1M", "--cache-size", "100M"];
    let rest = ["node", "--metrics", "none", "--group-port", &port, "--source", source, "--cache-dir", cache];
    let token = token(dir);
    let token = ["--group-token-file", token.to_str().unwrap()];
    rest.iter().chain(&sizes).chain(&token).chain(patient(more)).chain(more).map(|word| (*word).to_owned()).collect()
}

/// A source with one file of known bytes and one of fio's, and the logs of all that runs over it.
pub struct Rig {
    pub dir: PathBuf,
    pub data: Vec<u8>,
    /// What all processes serve: the directory `src`, unless a test has another source.
    pub source: String,
    /// Variables of all processes.
    pub variables: Vec<(&'static str, String)>,
    _dir: Option<tempfile::TempDir>,
}

impl Rig {
    pub fn new() -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let mut rig = Rig::at(dir.path());
        rig._dir = Some(dir);
        rig
    }

    /// The same in a place that both of two machines know.
    pub fn at(dir: &Path) -> Rig {
        ready();
        std::fs::create_dir_all(dir.join("src")).unwrap();
        std::fs::write(token(dir), "q5Ykm0WJ7b2uR1xTzv9sLd3f\n").unwrap();
        let mut data = vec![0u8; LEN];
        for (i, word) in data.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            *word = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
        }
        let source = dir.join("src").display().to_string();
        Rig { dir: dir.to_owned(), data, source, variables: Vec::new(), _dir: None }
    }

    /// Writes the source's files.
    pub fn fill(&self) {
        std::fs::write(self.dir.join("src/file"), &self.data).unwrap();
        let file = self.dir.join("src/fio");
        let words = ["--name=write", "--rw=write", "--bs=128k", "--size=32m", "--verify=crc32c", "--do_verify=0"];
        let file = format!("--filename={}", file.display());
        run("fio", &[&words[..], &[&file]].concat());
    }

    pub fn log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.log"))
    }

    pub fn node(&self, port: u16, words: &[&str]) -> Running {
        let mut node = Command::new(BIN);
        node.args(node_words(&self.dir, &self.source, port, words)).envs(self.variables.iter().cloned());
        start(node, &self.log(&format!("node-{port}")), "over tcp")
    }

    /// A mount of nodes of this machine.
    pub fn mount(&self, name: &str, ports: &[u16], words: &[&str]) -> Mount<'_> {
        let nodes: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        self.mount_of(name, &format!("static:{}", nodes.join(",")), words)
    }

    pub fn mount_of(&self, name: &str, registry: &str, words: &[&str]) -> Mount<'_> {
        let at = self.dir.join(name);
        std::fs::create_dir_all(&at).unwrap();
        let mut mount = Command::new(BIN);
        mount.arg("mount").arg(&self.source).arg(&at).args(mount_words(&self.dir, registry, words));
        let process = start(mount, &self.log(name), "is mounted on");
        Mount { rig: self, at, log: self.log(name), process: Some(process) }
    }
}

/// Queries the admin socket directly: starting the program takes seconds in an emulated machine.
pub fn ask(log: &Path, op: &str) -> Value {
    ask_socket(&socket_of(&std::fs::read_to_string(log).unwrap()).expect("a socket"), op)
}

/// The admin socket that a log names last.
fn socket_of(text: &str) -> Option<PathBuf> {
    text.rsplit_once("socket=").and_then(|(_, rest)| rest.split_whitespace().next()).map(PathBuf::from)
}

/// The same of a socket whose path is known.
pub fn ask_socket(path: &Path, op: &str) -> Value {
    try_ask_socket(path, op).unwrap()
}

/// As [`ask_socket`], of a process that may be gone.
fn try_ask_socket(path: &Path, op: &str) -> io::Result<Value> {
    let mut socket = UnixStream::connect(path)?;
    writeln!(socket, "{{\"op\":\"{op}\"}}")?;
    let mut line = String::new();
    BufReader::new(socket).read_line(&mut line)?;
    Ok(serde_json::from_str::<Value>(&line)?["ok"].take())
}

/// One counter of a mount or a node.
pub fn count(log: &Path, section: &str, name: &str) -> u64 {
    ask(log, "stats")[section][name].as_u64().unwrap_or_else(|| panic!("{section}.{name}"))
}

pub struct Mount<'a> {
    pub rig: &'a Rig,
    pub at: PathBuf,
    pub log: PathBuf,
    process: Option<Running>,
}

impl Mount<'_> {
    /// Reads the whole file past the page cache and compares every byte.
    pub fn pass(&self) {
        std::fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        let got = std::fs::read(self.at.join("file")).expect("a reader sees no error");
        assert!(got == self.rig.data, "wrong bytes in {}", self.at.display());
    }

    /// Processor time it has used, in seconds.
    pub fn cpu(&self) -> f64 {
        self.process.as_ref().map_or(0.0, Running::cpu)
    }

    pub fn count(&self, section: &str, name: &str) -> u64 {
        count(&self.log, section, name)
    }

    /// Bytes received over RDMA and over TCP.
    pub fn received(&self) -> (u64, u64) {
        let stats = ask(&self.log, "stats");
        let bytes = |section: &str| stats[section]["recv_bytes"].as_u64().unwrap();
        (bytes("rdma"), bytes("tcp"))
    }

    /// The status, while a process answers.
    fn try_status(&self) -> io::Result<Value> {
        let socket = socket_of(&std::fs::read_to_string(&self.log)?).ok_or(io::ErrorKind::NotFound)?;
        try_ask_socket(&socket, "status")
    }

    /// Kills the process of a mount with `--recover` and waits until the next one has all `paths`, and has moved more than
    /// `bytes` over RDMA, by the counter of this name.
    pub fn replace_process(&self, paths: u64, counter: &str, bytes: u64) {
        let status = ask(&self.log, "status");
        let restarts = status["keeper"]["restarts"].as_u64().unwrap() + 1;
        run("kill", &["-KILL", &status["pid"].to_string()]);
        self.wait("the next process", |m| m.try_status().is_ok_and(|status| status["keeper"]["restarts"] == restarts));
        self.wait("its paths", |m| m.count("rdma", "paths_up") == paths);
        self.wait("its bytes over RDMA", |m| m.count("rdma", counter) > bytes);
    }

    /// How long programs waited for each of the processes after the first, in milliseconds.
    pub fn pauses(&self) -> Vec<u64> {
        let log = std::fs::read_to_string(&self.log).unwrap();
        let waited = log.lines().filter_map(|line| line.split("programs waited ").nth(1)?.split(' ').next());
        waited.map(|pause| pause.parse().unwrap()).collect()
    }

    /// The transport in use, from `status`.
    pub fn carries(&self) -> String {
        ask(&self.log, "status")["peers"][0]["transport"].as_str().unwrap_or_default().to_owned()
    }

    pub fn wait(&self, what: &str, mut until: impl FnMut(&Self) -> bool) {
        let nodes: Vec<PathBuf> = std::fs::read_dir(&self.rig.dir)
            .unwrap()
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("node-")))
            .collect();
        let logs: Vec<&Path> = std::iter::once(&*self.log).chain(nodes.iter().map(PathBuf::as_path)).collect();
        wait(what, &logs, || until(self));
    }

    /// Waits until this many paths carry data and this many bytes more came over RDMA, or over TCP.
    pub fn wait_bytes(&self, what: &str, paths: u64, tcp: bool) {
        self.wait(what, |m| m.count("rdma", "paths_up") == paths);
        let of = |(rdma, over_tcp): (u64, u64)| if tcp { over_tcp } else { rdma };
        let before = of(self.received());
        self.wait(what, |m| of(m.received()) > before + (2 << 20));
    }

    /// Two readers that compare checksums, until they are ended.
    pub fn fio(&self) -> Fio {
        let file = format!("--filename={}", self.at.join("fio").display());
        let output = self.rig.dir.join("fio.out");
        let mut fio = Command::new("fio");
        fio.args(["--name=read", "--rw=randread", "--bs=128k", "--size=32m", "--direct=1", "--numjobs=2", "--thread"]);
        fio.args(["--verify=crc32c", "--verify_fatal=1", "--time_based", "--runtime=3600", "--group_reporting"]);
        fio.arg(file).stdin(Stdio::null());
        let out = std::fs::File::create(&output).unwrap();
        fio.stderr(out.try_clone().unwrap()).stdout(out);
        Fio { process: Running(fio.spawn().unwrap()), output }
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new(BIN).args(["umount", "--force"]).arg(&self.at).output();
        self.process.take();
    }
}

/// fio at work.
pub struct Fio {
    process: Running,
    output: PathBuf,
}

impl Fio {
    /// Ends it: it has to run still, as it stops at the first error or wrong byte.
    pub fn end(mut self) {
        let child = &mut self.process.0;
        let early = child.try_wait().unwrap();
        run("kill", &["-INT", &child.id().to_string()]);
        let code = child.wait().unwrap().code();
        let text = std::fs::read_to_string(&self.output).unwrap();
        println!("{text}");
        assert!(early.is_none() && code == Some(128), "fio ended by itself ({early:?}) or with {code:?}:\n{text}");
        assert!(text.contains("err= 0") && !text.contains("verify failed"), "{text}");
    }
}
