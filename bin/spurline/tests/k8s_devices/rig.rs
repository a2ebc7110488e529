//! A node in a folder, the plugin on it, and the device manager of kubelet beside it.

use serde_json::Value;
pub use spurline_rig::program::{LIMIT, spurline};
use spurline_testkit::hosts::Made;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Runs the binary; its exit code, standard output and standard error.
pub fn run(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = spurline().args(arguments).output().expect("the binary starts");
    let text = |bytes| String::from_utf8(bytes).expect("output is text");
    (status.code().expect("an exit code"), text(stdout), text(stderr))
}

/// A configuration with one resource for all InfiniBand HCAs.
pub fn ib_config(slots: u32) -> String {
    let selectors = "{\"linkTypes\": [\"infiniband\"]}";
    format!(
        "{{\"periodicUpdateInterval\": 1, \"configList\": [{{\"resourceName\": \"ib\", \"rdmaHcaMax\": {slots}, \
         \"selectors\": {selectors}}}]}}"
    )
}

/// Waits until `done` gives a value.
pub fn wait_for<T>(what: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(start.elapsed() < LIMIT, "{what} did not come within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// A node in a folder with a plugin.
pub struct NodeRig {
    dir: tempfile::TempDir,
    plugin: Option<Child>,
    metrics: u16,
}

impl NodeRig {
    /// The folders, with the files of `made` and a configuration.
    pub fn new(made: &Made, config: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        made.write_to(&dir.path().join("host"));
        std::fs::create_dir(dir.path().join("plugins")).unwrap();
        let rig = NodeRig { dir, plugin: None, metrics: free_port() };
        rig.configure(config);
        rig
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn configure(&self, config: &str) {
        let new = self.path("config.new");
        std::fs::write(&new, config).unwrap();
        std::fs::rename(new, self.path("config.json")).unwrap();
    }

    /// Changes a file of the node.
    pub fn set(&self, file: &str, text: &str) {
        std::fs::write(self.path("host").join(file), format!("{text}\n")).unwrap();
    }

    /// The plugin's command.
    pub fn command(&self, more: &[&str]) -> Command {
        let mut command = spurline();
        command.args(["k8s", "device-plugin", "--health-interval", "200ms"]);
        command.arg("--config-file").arg(self.path("config.json"));
        command.arg("--plugin-dir").arg(self.path("plugins"));
        command.arg("--host-root").arg(self.path("host"));
        command.arg("--metrics").arg(format!("127.0.0.1:{}", self.metrics)).args(more);
        command
    }

    /// Starts the plugin.
    pub fn start(&mut self, more: &[&str]) {
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path("log")).unwrap();
        let child = self.command(more).stderr(log).stdout(Stdio::null()).spawn().unwrap();
        self.plugin = Some(child);
    }

    /// The plugin's process id.
    pub fn pid(&self) -> u32 {
        self.plugin.as_ref().expect("the plugin runs").id()
    }

    /// Ends it by SIGTERM; its exit code.
    pub fn stop(&mut self) -> Option<i32> {
        let pid = self.pid();
        assert!(Command::new("kill").arg(pid.to_string()).status().unwrap().success());
        self.plugin.take().and_then(|mut child| child.wait().unwrap().code())
    }

    /// Ends it by SIGKILL.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.plugin.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Waits until the log has `text` that many times.
    pub fn wait_log(&self, text: &str, times: usize) {
        let start = Instant::now();
        while self.log().matches(text).count() < times {
            assert!(start.elapsed() < LIMIT, "no '{text}' in the log:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The names of sockets in kubelet's directory, kubelet's own left out.
    pub fn sockets(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.path("plugins")).unwrap().map(|e| e.unwrap().file_name());
        let mut names: Vec<String> = names.map(|n| n.to_string_lossy().into_owned()).collect();
        names.retain(|n| n.ends_with(".sock") && n != "kubelet.sock");
        names.sort();
        names
    }

    /// A page of the metrics server.
    pub fn page(&self, path: &str) -> Option<String> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.metrics)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(10))).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        std::io::read_to_string(stream).ok()
    }

    /// The value of a metric with these labels.
    pub fn metric(&self, line: &str) -> Option<u64> {
        let page = self.page("/metrics")?;
        page.lines().find_map(|l| l.strip_prefix(line)?.trim().parse().ok())
    }
}

impl Drop for NodeRig {
    fn drop(&mut self) {
        self.kill();
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The device manager of kubelet, on a node's directory.
pub struct KubeletRig {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl KubeletRig {
    /// Starts it; `None` with a SKIP where it can't be built.
    pub fn start(node: &NodeRig, policy: &str) -> Option<Self> {
        let program = spurline_testkit::go_program("kubelet-devices", "kubelet")?;
        let mut command = Command::new(program);
        command.arg("--dir").arg(node.path("plugins")).args(["--policy", policy, "--numa", "2"]);
        let log = std::fs::File::create(node.path("kubelet.log")).unwrap();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("kubelet's device manager starts");
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut kubelet = KubeletRig { child, input, output };
        assert_eq!(kubelet.answer()["ready"], true);
        Some(kubelet)
    }

    fn answer(&mut self) -> Value {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("kubelet answers '{line}': {e}"))
    }

    /// Sends a command.
    pub fn ask(&mut self, command: &str) -> Value {
        writeln!(self.input, "{command}").unwrap();
        let answer = self.answer();
        assert!(answer["error"].is_null(), "{command}: {answer}");
        answer
    }

    /// Capacity and allocatable of a resource; `None` when kubelet does not know it.
    pub fn capacity(&mut self, resource: &str) -> Option<(u64, u64)> {
        let all = self.ask("capacity");
        Some((all["capacity"][resource].as_u64()?, all["allocatable"][resource].as_u64()?))
    }

    /// Waits for a capacity and allocatable.
    pub fn wait_capacity(&mut self, resource: &str, wanted: (u64, u64)) {
        let mut last = None;
        let start = Instant::now();
        while last != Some(wanted) {
            assert!(start.elapsed() < LIMIT, "{resource}: {last:?}, not {wanted:?}");
            std::thread::sleep(Duration::from_millis(20));
            last = self.capacity(resource);
        }
    }

    /// Admits a pod; its answer.
    pub fn pod(&mut self, name: &str, resource: &str, count: u32) -> Value {
        self.ask(&format!("pod {name} {resource} {count}"))
    }
}

impl Drop for KubeletRig {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The strings of a JSON list, sorted.
pub fn texts(value: &Value) -> Vec<String> {
    let mut all: Vec<String> =
        value.as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect();
    all.sort();
    all
}
