//! Shared by the end-to-end tests: starts the binary, waits for it, and cleans up, also after a panic. Knows the
//! binary's log lines only.

use serde_json::Value;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub use spurline_testkit::skip;
use spurline_testkit::{ACCESS_KEY, SECRET_KEY};

/// How often processes are killed in a long form, in which they may live longer than in others.
pub const KILLS_VARIABLE: &str = "SPURLINE_TEST_KILLS";
/// No wait of a test lasts longer: what hangs fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const MIB: usize = 1 << 20;

/// Whether mounts can be made here; prints the reason if not.
pub fn can_mount() -> bool {
    if !is_root() {
        skip("fuse", "mounting directly needs root");
        return false;
    }
    match File::options().read(true).write(true).open("/dev/fuse") {
        Ok(_) => true,
        Err(error) => {
            skip("fuse", &format!("/dev/fuse can't be opened: {error}"));
            false
        }
    }
}

pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// The binary, with no variable of the caller's that could steer it.
pub fn spurline(runtime: &Path) -> Command {
    let mut command = Command::new(crate::program::program_path());
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("SPURLINE_") || name.starts_with("AWS_") {
            command.env_remove(&*name);
        }
    }
    command.env_remove("RUST_LOG").env("SPURLINE_RUNTIME_DIR", runtime).envs(SMALL).stdin(Stdio::null());
    command
}

/// The credentials the embedded S3 server knows.
pub fn with_credentials(command: &mut Command) -> &mut Command {
    command.env("AWS_ACCESS_KEY_ID", ACCESS_KEY).env("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
}

/// Gives `to` the variables that `from` was given, for a command wrapped in another.
pub fn same_environment(to: &mut Command, from: &Command) {
    for (name, value) in from.get_envs() {
        match value {
            Some(value) => to.env(name, value),
            None => to.env_remove(name),
        };
    }
}

/// A directory of one test, with everything its processes need.
pub struct World {
    dir: TempDir,
}

impl World {
    pub fn new() -> World {
        let world = World { dir: tempfile::Builder::new().prefix("spurline-e2e-").tempdir().unwrap() };
        fs::create_dir(world.path("run")).unwrap();
        rustix::fs::chmod(world.path("run"), rustix::fs::Mode::RWXU).unwrap();
        world
    }
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }
    /// A directory in it, made when it is not there.
    pub fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        match fs::create_dir_all(&path) {
            // A mount without its process can't be examined.
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => panic!("{}: {error}", path.display()),
            _ => path,
        }
    }
    pub fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = spurline(&self.path("run"));
        command.args(words);
        command
    }
    /// Runs a command that ends by itself.
    pub fn run(&self, words: &[&str]) -> Output {
        finish(&mut self.command(words))
    }
    /// Arguments of a mount with a small cache of its own.
    pub fn mount_words(&self, source: &str) -> Vec<OsString> {
        let cache = self.dir("cache");
        let mut words: Vec<OsString> = vec!["mount".into(), source.into(), self.dir("mnt").into()];
        words.extend(["--cache-dir".into(), cache.into()]);
        words
    }
    /// A mount at `mnt`, with credentials for the embedded server.
    pub fn mount(&self, source: &str, more: &[&str]) -> Mount {
        let mut command = spurline(&self.path("run"));
        command.args(self.mount_words(source)).args(more);
        self.mount_with(with_credentials(&mut command))
    }
    /// A mount at `mnt` by a command made elsewhere.
    pub fn mount_with(&self, command: &mut Command) -> Mount {
        self.mount_at(command, &self.dir("mnt"))
    }
    /// A mount at `at` by a command made elsewhere.
    pub fn mount_at(&self, command: &mut Command, at: &Path) -> Mount {
        let process = Process::start(command, &self.log_path("mount"));
        let mount = Mount { process: Some(process), at: at.to_owned(), runtime: self.path("run") };
        mount.process().wait_for(" is mounted on ");
        mount
    }
    /// A cache node of these sources, with credentials for the embedded server, on a port of choice (0: any).
    pub fn node(&self, sources: &[&str], port: u16, more: &[&str]) -> Node {
        let mut command = spurline(&self.path("run"));
        command.args(self.node_words(sources, port)).args(more);
        self.node_with(with_credentials(&mut command))
    }
    pub fn node_words(&self, sources: &[&str], port: u16) -> Vec<OsString> {
        let mut words: Vec<OsString> = vec!["node".into(), "--group-port".into(), port.to_string().into()];
        for source in sources {
            words.extend(["--source".into(), source.into()]);
        }
        words.extend(["--cache-dir".into(), self.dir("node-cache").into()]);
        words
    }
    pub fn node_with(&self, command: &mut Command) -> Node {
        let process = Process::start(command, &self.log_path("node"));
        let line = process.wait_for("serving on ");
        let after = line.split("serving on ").nth(1).unwrap();
        let address = after.split([' ', ',']).next().unwrap().to_owned();
        Node { process, address, runtime: self.path("run") }
    }
    /// A mount at `mnt` that reads from `node`, with no credentials and no cache.
    pub fn consumer(&self, source: &str, node: &str, more: &[&str]) -> Mount {
        self.mount_with(&mut self.consumer_command(source, node, more))
    }
    pub fn consumer_command(&self, source: &str, node: &str, more: &[&str]) -> Command {
        let at = self.dir("mnt");
        let registry = format!("static:{node}");
        let mut command = self.command(&["mount", source, at.to_str().unwrap(), "--registry", &registry]);
        command.args(more);
        command
    }
    pub fn log_path(&self, of: &str) -> PathBuf {
        (0..).map(|n| self.path(format!("{of}-{n}.log"))).find(|path| !path.exists()).unwrap()
    }
}

/// Small, and independent of the machine's disk and ports. Set as variables, so that a test can override them by a
/// flag.
const SMALL: [(&str, &str); 5] = [
    ("SPURLINE_CACHE_SIZE", "1G"),
    ("SPURLINE_FREE_SPACE_RATIO", "0"),
    ("SPURLINE_BLOCK_SIZE", "1M"),
    ("SPURLINE_BUFFER_SIZE", "128M"),
    ("SPURLINE_METRICS", "none"),
];

/// Two network namespaces joined by a veth pair; taken away when dropped.
pub struct Hosts(pub String, pub String);

impl Hosts {
    pub fn new() -> Option<Hosts> {
        if !is_root() {
            skip("netns", "network namespaces need root");
            return None;
        }
        // Tests of one program run side by side.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let id = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let hosts = Hosts(format!("spl{id}a"), format!("spl{id}b"));
        let (a, b) = (&hosts.0, &hosts.1);
        let steps = [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add spl0 netns {a} type veth peer name spl0 netns {b}"),
            format!("-n {a} addr add 10.213.0.1/24 dev spl0"),
            format!("-n {b} addr add 10.213.0.2/24 dev spl0"),
            format!("-n {a} addr add fd13::1/64 dev spl0 nodad"),
            format!("-n {b} addr add fd13::2/64 dev spl0 nodad"),
            format!("-n {a} link set spl0 up"),
            format!("-n {b} link set spl0 up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ];
        for step in steps {
            if let Err(why) = ip(&step) {
                skip("netns", &why);
                return None;
            }
        }
        Some(hosts)
    }
    /// The command as a process of that host; mounts are shared with the other hosts.
    pub fn on(host: &str, command: &Command) -> Command {
        let mut wrapped = Command::new("nsenter");
        wrapped.arg(format!("--net=/run/netns/{host}")).arg(command.get_program()).args(command.get_args());
        same_environment(&mut wrapped, command);
        wrapped
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in [&self.0, &self.1] {
            let _ = Command::new("ip").args(["netns", "del", host]).output();
        }
    }
}

/// Runs `ip` with these arguments.
///
/// # Errors
/// Its standard error.
pub fn ip(words: &str) -> Result<(), String> {
    let out = Command::new("ip").args(words.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
    let said = String::from_utf8_lossy(&out.stderr);
    if out.status.success() { Ok(()) } else { Err(format!("ip {words}: {}", said.trim())) }
}

/// Runs a command to its end; one that does not end is killed and fails the test.
pub fn finish(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = |mut from: Box<dyn std::io::Read + Send>| {
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            let _ = from.read_to_end(&mut bytes);
            let _ = sender.send(bytes);
        });
        receiver
    };
    let (out, err) = (reader(Box::new(out)), reader(Box::new(err)));
    let status = wait(&mut child, PATIENCE);
    if status.is_none() {
        let _ = child.kill();
    }
    // What the child started may keep its pipes.
    let bytes =
        |from: std::sync::mpsc::Receiver<Vec<u8>>| from.recv_timeout(Duration::from_secs(5)).unwrap_or_default();
    let (stdout, stderr) = (bytes(out), bytes(err));
    let status = status.unwrap_or_else(|| panic!("{command:?} hangs: {}", String::from_utf8_lossy(&stderr)));
    Output { status, stdout, stderr }
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    while start.elapsed() < limit {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

/// Asserts exit code `code` and a message that contains all of `says`.
pub fn refused(out: &Output, code: i32, says: &[&str]) -> String {
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(code), "{text}");
    for part in says {
        assert!(text.contains(part), "{part:?} is missing in: {text}");
    }
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// A process that runs until it is stopped, its standard error in a file.
pub struct Process {
    child: Child,
    log: PathBuf,
    over: Arc<AtomicBool>,
}

impl Process {
    pub fn start(command: &mut Command, log: &Path) -> Process {
        Process::spawn(command.stdout(Stdio::null()).stderr(File::create(log).unwrap()), log)
    }
    /// As above, for a program that reports on its standard output: that is its log too.
    pub fn start_telling(command: &mut Command, log: &Path) -> Process {
        let file = File::create(log).unwrap();
        Process::spawn(command.stdout(file.try_clone().unwrap()).stderr(file), log)
    }
    fn spawn(command: &mut Command, log: &Path) -> Process {
        let child = command.spawn().unwrap();
        let over = Arc::new(AtomicBool::new(false));
        let (watched, pid) = (Arc::clone(&over), child.id());
        // A test that is stuck in a mount can't clean up: ending the mount's process sets it free, and it fails.
        std::thread::spawn(move || {
            let start = Instant::now();
            while start.elapsed() < PATIENCE * 6 || std::env::var_os(KILLS_VARIABLE).is_some() {
                std::thread::sleep(Duration::from_millis(50));
                if watched.load(Ordering::SeqCst) {
                    return;
                }
            }
            eprintln!("a test hangs; process {pid} is killed");
            send(pid, rustix::process::Signal::KILL);
        });
        Process { child, log: log.into(), over }
    }
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    /// The log so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }
    /// Waits until it has logged a line with this in it.
    pub fn wait_for(&self, what: &str) -> String {
        let start = Instant::now();
        loop {
            let log = self.log();
            if let Some(line) = log.lines().find(|line| line.contains(what)) {
                return line.to_owned();
            }
            let ended = !Path::new(&format!("/proc/{}/fd/2", self.pid())).exists() && !is_running(self.pid());
            assert!(!ended, "the process ended without saying {what:?}: {log}");
            assert!(start.elapsed() < PATIENCE, "the process does not say {what:?}: {log}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    /// Sends a signal; returns from SIGSTOP when all threads have stopped: until the first has seen the signal, the others work on.
    pub fn signal(&self, signal: rustix::process::Signal) {
        send(self.pid(), signal);
        if signal == rustix::process::Signal::STOP {
            eventually("all threads are stopped", || self.is_stopped());
        }
    }
    fn is_stopped(&self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap().flatten();
        let states = threads.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok());
        states.into_iter().all(|status| status.contains("\nState:\tT"))
    }
    /// Waits until it ends.
    pub fn wait(&mut self) -> ExitStatus {
        let status = wait(&mut self.child, PATIENCE);
        status.unwrap_or_else(|| panic!("the process does not end: {}", self.log()))
    }
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        assert_eq!(self.wait().signal(), Some(9));
    }
    /// The most memory it ever had resident, in bytes.
    pub fn most_resident(&self) -> u64 {
        self.memory("VmHWM:")
    }
    /// A line of the kernel's figures about memory, in bytes.
    pub fn memory(&self, figure: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with(figure)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.over.store(true, Ordering::SeqCst);
        if std::thread::panicking() {
            eprintln!("--- {}\n{}---", self.log.display(), self.log());
        }
    }
}

fn is_running(pid: u32) -> bool {
    // The third word after the name distinguishes a zombie from a live process.
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with('Z'))
}

pub fn send(pid: u32, signal: rustix::process::Signal) {
    if let Some(pid) = rustix::process::Pid::from_raw(pid as i32) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Waits until a program has a request to a mount that is not answered.
pub fn wait_for_request(program: &Child) {
    let place = format!("/proc/{}/wchan", program.id());
    eventually("a request without an answer", || fs::read_to_string(&place).unwrap() == "request_wait_answer");
}

/// The counters of the process behind `target`.
pub fn stats(runtime: &Path, target: &OsStr) -> Value {
    let mut command = spurline(runtime);
    command.arg("stats").arg(target).args(["--json", "-c", "1"]);
    let out = finish(&mut command);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// One counter.
pub fn count(stats: &Value, section: &str, name: &str) -> u64 {
    stats[section][name].as_u64().unwrap_or_else(|| panic!("no {section}.{name} in {stats}"))
}

/// A mount with its process; unmounted when dropped.
pub struct Mount {
    process: Option<Process>,
    pub at: PathBuf,
    runtime: PathBuf,
}

impl Mount {
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.at.join(name)
    }
    pub fn read(&self, name: impl AsRef<Path>) -> Vec<u8> {
        let path = self.path(name);
        fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    }
    pub fn process(&self) -> &Process {
        self.process.as_ref().unwrap()
    }
    pub fn process_mut(&mut self) -> &mut Process {
        self.process.as_mut().unwrap()
    }
    pub fn stats(&self) -> Value {
        stats(&self.runtime, self.at.as_os_str())
    }
    pub fn count(&self, section: &str, name: &str) -> u64 {
        count(&self.stats(), section, name)
    }
    /// Unmounts as a person would and waits for the process.
    pub fn unmount(mut self) {
        let mut command = spurline(&self.runtime);
        let out = finish(command.arg("umount").arg(&self.at));
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let status = self.process_mut().wait();
        assert!(status.success(), "{status}: {}", self.process().log());
        assert!(!is_mounted(&self.at));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        drop(self.process.take());
        detach(&self.at);
    }
}

/// Takes whatever is mounted there away, however dead.
pub fn detach(at: &Path) {
    use rustix::mount::{UnmountFlags, unmount};
    for _ in 0..4 {
        if !is_mounted(at) || unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW).is_err() {
            return;
        }
    }
}

/// Whether something is mounted there, by the mount table: a dead mount must not be touched.
pub fn is_mounted(at: &Path) -> bool {
    mounted_for("self", at)
}

/// The same as process `pid` sees it.
pub fn mounted_for(pid: &str, at: &Path) -> bool {
    let table = fs::read(format!("/proc/{pid}/mountinfo")).unwrap();
    table.split(|b| *b == b'\n').any(|line| line.split(|b| *b == b' ').nth(4) == Some(at.as_os_str().as_bytes()))
}

/// A cache node with its process.
pub struct Node {
    pub process: Process,
    pub address: String,
    runtime: PathBuf,
}

impl Node {
    pub fn port(&self) -> u16 {
        self.address.rsplit(':').next().unwrap().parse().unwrap()
    }
    pub fn stats(&self) -> Value {
        stats(&self.runtime, OsStr::new(&self.address))
    }
    pub fn count(&self, section: &str, name: &str) -> u64 {
        count(&self.stats(), section, name)
    }
}

/// Bytes that are the same for the same seed, and no two blocks alike.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

/// The entry at a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Thing {
    File(Vec<u8>),
    Link(PathBuf),
    Folder,
}

/// Everything below `root`, by path; directory entries must agree with `stat`.
pub fn tree(root: &Path) -> BTreeMap<Vec<u8>, Thing> {
    let mut found = BTreeMap::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(root.join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let below = folder.join(entry.file_name());
            let path = root.join(&below);
            let meta = fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert_eq!(entry.file_type().unwrap(), meta.file_type(), "{}", path.display());
            let thing = if meta.is_dir() {
                folders.push(below.clone());
                Thing::Folder
            } else if meta.is_symlink() {
                Thing::Link(fs::read_link(&path).unwrap())
            } else {
                let bytes = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                assert_eq!(meta.len(), bytes.len() as u64, "{}", path.display());
                Thing::File(bytes)
            };
            assert!(found.insert(below.as_os_str().as_bytes().to_vec(), thing).is_none(), "{} twice", path.display());
        }
    }
    found
}

/// Fails with the first path at which two trees differ; never prints contents.
pub fn assert_same(got: &BTreeMap<Vec<u8>, Thing>, want: &BTreeMap<Vec<u8>, Thing>) {
    let name = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
    let kind = |thing: Option<&Thing>| match thing {
        None => "nothing".to_owned(),
        Some(Thing::File(bytes)) => format!("a file of {} bytes", bytes.len()),
        Some(other) => format!("{other:?}"),
    };
    for path in want.keys().chain(got.keys()) {
        let (g, w) = (got.get(path), want.get(path));
        assert!(g == w, "{}: there is {}, wanted is {}", name(path), kind(g), kind(w));
    }
}

/// Repeats until true; the time it takes does not matter as long as it ends.
pub fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !so() {
        assert!(start.elapsed() < PATIENCE, "never came: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
