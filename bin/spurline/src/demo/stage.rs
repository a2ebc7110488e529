//! The demo's environment: a private directory, and a node and a mount as processes of this program. Everything is removed at the
//! end, whatever happens.

use super::DemoControl;
use rustix::process::{Pid, Signal, kill_process};
use spurline_config::{Fault, values};
use spurline_observe::client::AdminPeer;
use spurline_observe::locate::{self, RUNTIME_DIR_ENV, SocketOwner};
use spurline_types::{Size, Stats};
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Interval of checks while waiting.
const START_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Longest wait for a process to end by itself.
const PROCESS_END_TIMEOUT: Duration = Duration::from_secs(15);
/// Lines of a log shown when the process fails.
const LOG_LINES: usize = 12;

/// Checks early that mounts can work here.
///
/// # Errors
/// When /dev/fuse or, for users other than root, fusermount3 is missing.
pub fn require_fuse() -> Result<(), Fault> {
    if !Path::new("/dev/fuse").exists() {
        return Err(Fault::missing(
            "/dev/fuse is missing, so nothing can be mounted here",
            "modprobe fuse; in a container: --device /dev/fuse --cap-add SYS_ADMIN",
        ));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !rustix::process::geteuid().is_root()
        && !std::env::split_paths(&path).any(|dir| dir.join("fusermount3").is_file())
    {
        return Err(Fault::missing("fusermount3 is missing and this is not root", "install the package fuse3"));
    }
    Ok(())
}

/// The counters of both processes at the same time.
pub struct StageCounters {
    pub node: Stats,
    pub mount: Stats,
}

/// The directory and the processes of the demo; a drop ends and removes all.
pub struct DemoStage {
    node: Option<Child>,
    mount: Option<Child>,
    address: String,
    limit: Duration,
    exe: PathBuf,
    // Last: removed after the end of the users.
    dir: TempDir,
}

impl DemoStage {
    /// Makes the directory, accessible to this user only.
    ///
    /// # Errors
    /// When the directory can't be made.
    pub fn new(parent: Option<&Path>, limit: Duration) -> Result<Self, Fault> {
        let parent = parent.map_or_else(std::env::temp_dir, Path::to_owned);
        // Mount tables have canonical paths.
        let parent = values::absolute_path(&parent).canonicalize().map_err(|e| directory_error(&parent, &e))?;
        let dir = tempfile::Builder::new()
            .prefix("spurline-demo-")
            .tempdir_in(&parent)
            .map_err(|e| directory_error(&parent, &e))?;
        for part in ["data", "cache", "mnt"] {
            std::fs::create_dir(dir.path().join(part)).map_err(|e| directory_error(&parent, &e))?;
        }
        let exe =
            std::env::current_exe().map_err(|e| Fault::failed(format!("this program can't find itself: {e}"), ""))?;
        Ok(DemoStage { node: None, mount: None, address: String::new(), limit, exe, dir })
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// A path in the directory.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn mountpoint(&self) -> PathBuf {
        self.path("mnt")
    }

    /// The node's address.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The space for data: for the copies, the cache, and as much again left free.
    ///
    /// # Errors
    /// When there is almost none.
    pub fn available_bytes(&self, wanted: u64) -> Result<u64, Fault> {
        let space = rustix::fs::statvfs(self.dir.path())
            .map_err(|e| Fault::failed(format!("{}: {e}", self.dir.path().display()), ""))?;
        let free = space.f_bavail * space.f_frsize;
        if wanted < 1 << 20 {
            return Err(Fault::usage(
                format!("--size {} is too small to show anything", Size(wanted)),
                "give 1M or more",
            ));
        }
        let room = wanted.min(free / 4);
        if room < 1 << 20 {
            let text = format!("{} has only {free} bytes free", self.dir.path().display());
            return Err(Fault::missing(text, "name a directory with more room with --dir"));
        }
        Ok(room)
    }

    /// Starts the node and waits for an answer.
    ///
    /// # Errors
    /// When the node fails or does not answer in time, with the end of the log.
    pub fn start_node(&mut self, bytes: u64, control: &DemoControl) -> Result<Duration, Fault> {
        // A port that was free a moment ago; if taken since, the node's error says so.
        let port = TcpListener::bind("127.0.0.1:0")
            .and_then(|l| l.local_addr())
            .map_err(|e| Fault::failed(format!("a port on 127.0.0.1: {e}"), ""))?
            .port();
        self.address = format!("127.0.0.1:{port}");
        let mut command = self.command("node");
        command.arg("--source").arg(self.path("data")).arg("--cache-dir").arg(self.path("cache"));
        command.arg("--cache-size").arg(Size(bytes * 2 + (64 << 20)).to_string());
        command.args(["--free-space-ratio", "0", "--group-port"]).arg(port.to_string());
        self.node = Some(self.spawn(command, "node")?);
        let socket = self.path("run").join(SocketOwner::Node(&self.address).file_name());
        self.await_answer(ServiceRole::Node, &socket, control)
    }

    /// Starts the mount and waits for an answer.
    ///
    /// # Errors
    /// As [`DemoStage::start_node`].
    pub fn start_mount(&mut self, control: &DemoControl) -> Result<Duration, Fault> {
        let mut command = self.command("mount");
        command.arg(self.path("data")).arg(self.mountpoint());
        command.arg("--registry").arg(format!("static:{}", self.address));
        self.mount = Some(self.spawn(command, "mount")?);
        let socket = self.path("run").join(SocketOwner::Mount(&self.mountpoint()).file_name());
        self.await_answer(ServiceRole::Mount, &socket, control)
    }

    fn command(&self, what: &str) -> Command {
        let mut command = Command::new(&self.exe);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SPURLINE_") {
                command.env_remove(name);
            }
        }
        command.env(RUNTIME_DIR_ENV, self.path("run")).arg(what).args(["--metrics", "none"]);
        // Ctrl-C reaches the demo only, which ends the others in order.
        command.process_group(0);
        command
    }

    fn spawn(&self, mut command: Command, name: &str) -> Result<Child, Fault> {
        let log = File::options()
            .create(true)
            .append(true)
            .open(self.log(name))
            .map_err(|e| Fault::failed(format!("starting the {name}: {e}"), ""))?;
        command
            .stdin(Stdio::null())
            .stdout(log.try_clone().map_err(|e| Fault::failed(format!("starting the {name}: {e}"), ""))?)
            .stderr(log)
            .spawn()
            .map_err(|e| Fault::failed(format!("starting the {name}: {e}"), ""))
    }

    fn log(&self, name: &str) -> PathBuf {
        self.path(name).with_extension("log")
    }

    fn child_of(&mut self, role: ServiceRole) -> &mut Option<Child> {
        match role {
            ServiceRole::Node => &mut self.node,
            ServiceRole::Mount => &mut self.mount,
        }
    }

    fn await_answer(&mut self, role: ServiceRole, socket: &Path, control: &DemoControl) -> Result<Duration, Fault> {
        let start = Instant::now();
        let peer = AdminPeer::Socket(socket.to_owned(), None);
        let mountpoint = self.mountpoint();
        loop {
            control.go_on()?;
            let mounted =
                role == ServiceRole::Node || locate::list_mounts()?.iter().any(|m| m.mountpoint == mountpoint);
            if mounted && peer.fetch_status(self.limit).is_ok() {
                return Ok(start.elapsed());
            }
            let ended = self.child_of(role).as_mut().and_then(|child| child.try_wait().ok().flatten());
            if ended.is_some() || start.elapsed() > self.limit {
                let how = match ended {
                    Some(status) => format!("ended early ({status})"),
                    None => format!("did not answer within {} s", self.limit.as_secs()),
                };
                return Err(Fault::failed(
                    format!("the {} {how}; its log ends:\n{}", role.name(), self.end_of_log(role)),
                    "",
                ));
            }
            std::thread::sleep(START_POLL_INTERVAL);
        }
    }

    fn end_of_log(&self, role: ServiceRole) -> String {
        let text = std::fs::read(self.log(role.name())).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].iter().map(|l| format!("    {l}\n")).collect()
    }

    /// The counters of both processes.
    ///
    /// # Errors
    /// When a process does not answer.
    pub fn counters(&self) -> Result<StageCounters, Fault> {
        let ask = |owner: SocketOwner<'_>| {
            AdminPeer::Socket(self.path("run").join(owner.file_name()), None).fetch_stats(self.limit)
        };
        Ok(StageCounters {
            node: ask(SocketOwner::Node(&self.address))?,
            mount: ask(SocketOwner::Mount(&self.mountpoint()))?,
        })
    }

    /// Unmounts and waits for the mount's process.
    ///
    /// # Errors
    /// When the mount does not end, or ends badly.
    pub fn stop_mount(&mut self, control: &DemoControl) -> Result<(), Fault> {
        self.stop(ServiceRole::Mount, control)
    }

    /// Ends the node.
    ///
    /// # Errors
    /// As [`DemoStage::stop_mount`].
    pub fn stop_node(&mut self, control: &DemoControl) -> Result<(), Fault> {
        self.stop(ServiceRole::Node, control)
    }

    fn stop(&mut self, role: ServiceRole, control: &DemoControl) -> Result<(), Fault> {
        let Some(mut child) = self.child_of(role).take() else { return Ok(()) };
        terminate_child(&child);
        let start = Instant::now();
        while start.elapsed() < PROCESS_END_TIMEOUT {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(()),
                Ok(Some(status)) => {
                    let text =
                        format!("the {} ended with {status}; its log ends:\n{}", role.name(), self.end_of_log(role));
                    return Err(Fault::failed(text, ""));
                }
                _ => std::thread::sleep(START_POLL_INTERVAL),
            }
            if control.go_on().is_err() {
                break;
            }
        }
        *self.child_of(role) = Some(child);
        control.go_on()?;
        Err(Fault::failed(
            format!("the {} did not end within {} s of SIGTERM", role.name(), PROCESS_END_TIMEOUT.as_secs()),
            "",
        ))
    }

    /// Ends what still runs, by force if needed. Never fails.
    fn remove_all(&mut self) {
        let mountpoint = self.mountpoint();
        for role in [ServiceRole::Mount, ServiceRole::Node] {
            let Some(mut child) = self.child_of(role).take() else { continue };
            terminate_child(&child);
            let start = Instant::now();
            while start.elapsed() < PROCESS_END_TIMEOUT && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(START_POLL_INTERVAL);
            }
            if matches!(child.try_wait(), Ok(None)) {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
        if locate::list_mounts().is_ok_and(|all| all.iter().any(|m| m.mountpoint == mountpoint)) {
            let mut command = Command::new(&self.exe);
            command.env(RUNTIME_DIR_ENV, self.path("run")).args(["umount", "--force"]).arg(&mountpoint);
            let _ = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        }
        if locate::list_mounts().is_ok_and(|all| all.iter().any(|m| m.mountpoint == mountpoint)) {
            // Removing the directory now would delete through the mount.
            eprintln!("{} is still mounted and stays", mountpoint.display());
            self.dir.disable_cleanup(true);
        }
    }
}

impl Drop for DemoStage {
    fn drop(&mut self) {
        self.remove_all();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ServiceRole {
    Node,
    Mount,
}

impl ServiceRole {
    fn name(self) -> &'static str {
        match self {
            ServiceRole::Node => "node",
            ServiceRole::Mount => "mount",
        }
    }
}

/// Asks a process to end.
fn terminate_child(child: &Child) {
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
}

fn directory_error(parent: &Path, error: &std::io::Error) -> Fault {
    Fault::missing(format!("a directory in {}: {error}", parent.display()), "name a writable one with --dir")
}
