//! Background start: the command starts itself again, waits until that process is ready, and passes on the exit code. Never forks
//! a process that has threads. A service that systemd started (`Type=notify`) reports to systemd here.
//!
//! The process leaves the process group of the command only when it is ready. An automount (autofs) gives way to the group of the
//! mount helper and lets every other process wait for the mount, also the process that makes the mount.

use spurline_config::Fault;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// Set in the background process.
pub const CHILD_VARIABLE: &str = "SPURLINE_BACKGROUND_CHILD";
/// The line that the background process writes when ready.
const READY_LINE: &[u8] = b"ready\n";
/// Time for a start beyond the first answer of the origin: reading the index of a full cache.
const START_ALLOWANCE: Duration = Duration::from_secs(60);

/// The socket of systemd's protocol sd_notify(3): a path, or an abstract name after '@'.
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// Set while this process is in the process group of the waiting command.
static IN_COMMAND_GROUP: AtomicBool = AtomicBool::new(false);

/// Whether the terminal sends signals to this process and to the waiting command. The end of that command is then a signal too,
/// and the first signal is no separate request.
pub fn shares_terminal_signals() -> bool {
    IN_COMMAND_GROUP.load(Ordering::Acquire)
}

/// Whether [`launch_background`] started this process.
pub fn is_child() -> bool {
    std::env::var_os(CHILD_VARIABLE).is_some()
}

/// Whether a keeper has started this process, and reports for this process to the waiting command or to systemd.
pub fn has_keeper() -> bool {
    std::env::var_os(spurline_keeper::LIFE_VARIABLE).is_some()
}

/// Starts this command again in the background and waits until that process is ready or has failed.
///
/// # Errors
/// When the process can't be started, or neither becomes ready nor ends in time.
pub fn launch_background(origin_timeout: Duration, log: &Path) -> Result<ExitCode, Fault> {
    let exe = std::env::current_exe()
        .map_err(|e| Fault::failed(format!("this program can't find itself: {e}"), "mount /proc, or leave out -d"))?;
    // Under a fixed name: the file may be a link at mount(8)'s place for helpers.
    let mut child = Command::new(exe)
        .arg0("spurline")
        .args(std::env::args_os().skip(1))
        .env(CHILD_VARIABLE, "1")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| Fault::failed(format!("this program can't start itself in the background: {e}"), ""))?;
    let (sender, receiver) = mpsc::channel();
    if let Some(mut out) = child.stdout.take() {
        std::thread::spawn(move || {
            let mut word = [0; READY_LINE.len()];
            let ready = out.read_exact(&mut word).is_ok() && word == *READY_LINE;
            let _ = sender.send(ready);
        });
    }
    let limit = origin_timeout + START_ALLOWANCE;
    match receiver.recv_timeout(limit) {
        Ok(true) => {
            anstream::println!(
                "spurline runs in the background as process {}; its log is {}",
                child.id(),
                log.display()
            );
            Ok(ExitCode::SUCCESS)
        }
        Err(mpsc::RecvTimeoutError::Timeout) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(Fault::failed(
                format!("the background process did not answer within {} s and was ended", limit.as_secs()),
                "run the command without -d to see where it stays, or raise --origin-timeout",
            ))
        }
        // The standard output ended without the word: the process failed, and printed the reason on the shared standard error.
        Ok(false) | Err(mpsc::RecvTimeoutError::Disconnected) => {
            let status =
                child.wait().map_err(|e| Fault::failed(format!("waiting for the background process: {e}"), ""))?;
            match status.code() {
                Some(code @ 1..=255) => Ok(ExitCode::from(code as u8)),
                _ => Err(Fault::failed(format!("the background process ended early: {status}"), "")),
            }
        }
    }
}

/// Signals the waiting command, or systemd, that the service is ready.
#[derive(Debug)]
pub struct ReadySignal {
    /// Replaces the terminal; opened at the start, while descriptors are available.
    null: Option<File>,
}

impl ReadySignal {
    /// Prepares a background process to outlive the terminal.
    ///
    /// # Errors
    /// When the end of the waiting command can't be followed, or /dev/null can't be opened.
    pub fn new() -> Result<Self, Fault> {
        IN_COMMAND_GROUP.store(is_child() || has_keeper(), Ordering::Release);
        if !is_child() || has_keeper() {
            return Ok(ReadySignal { null: None });
        }
        // An interrupted start ends with the waiting command.
        let follow = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM));
        follow.map_err(|e| Fault::failed(format!("no signal at the end of the parent process: {e}"), ""))?;
        let null = File::options().read(true).write(true).open("/dev/null");
        Ok(ReadySignal { null: Some(null.map_err(|e| Fault::failed(format!("/dev/null can't be opened: {e}"), ""))?) })
    }

    /// The same for a process with a keeper, which signals readiness itself.
    ///
    /// # Errors
    /// When the terminal can't be left.
    pub fn leave_terminal(self, background: bool) -> Result<(), Fault> {
        spurline_observe::log::end_start();
        if !background {
            return Ok(());
        }
        leave_command_group()?;
        let null = File::options().read(true).write(true).open("/dev/null");
        let null = null.map_err(|e| Fault::failed(format!("/dev/null can't be opened: {e}"), ""))?;
        rustix::stdio::dup2_stdout(&null).map_err(detach_fault)?;
        rustix::stdio::dup2_stderr(&null).map_err(detach_fault)
    }

    /// Signals readiness: the waiting command returns, and the terminal is released.
    ///
    /// # Errors
    /// When the waiting command has ended (interrupted): the service should end too.
    pub fn signal_ready(mut self) -> Result<(), Fault> {
        self.signal_once()
    }

    /// As [`ReadySignal::signal_ready`], of which only the first call has an effect.
    pub fn signal_once(&mut self) -> Result<(), Fault> {
        spurline_observe::log::end_start();
        let Some(null) = self.null.take() else {
            if let Some(socket) = std::env::var_os(NOTIFY_SOCKET) {
                notify_systemd(&socket).unwrap_or_else(|error| {
                    tracing::warn!("systemd does not learn that this service is ready: {}: {error}", socket.display());
                });
            }
            return Ok(());
        };
        leave_command_group()?;
        rustix::process::set_parent_process_death_signal(None)
            .map_err(|e| Fault::failed(format!("detaching from the command that started this process: {e}"), ""))?;
        let mut out = std::io::stdout().lock();
        out.write_all(READY_LINE)
            .and_then(|()| out.flush())
            .map_err(|e| Fault::failed(format!("the command that started this process is gone: {e}"), ""))?;
        drop(out);
        // Everything that can fail comes before this word.
        rustix::stdio::dup2_stdout(&null).map_err(detach_fault)?;
        rustix::stdio::dup2_stderr(&null).map_err(detach_fault)
    }
}

/// Leaves the session and process group of the command that started this process: job control, timeout(1) and batch systems
/// signal process groups.
fn leave_command_group() -> Result<(), Fault> {
    // A working directory would prevent the unmount of the file system there.
    std::env::set_current_dir("/").map_err(|e| Fault::failed(format!("changing to /: {e}"), ""))?;
    rustix::process::setsid().map_err(|e| Fault::failed(format!("no session of its own: {e}"), ""))?;
    IN_COMMAND_GROUP.store(false, Ordering::Release);
    Ok(())
}

fn detach_fault(e: rustix::io::Errno) -> Fault {
    Fault::failed(format!("detaching from the terminal: {e}"), "")
}

/// Reports that this service is ready.
fn notify_systemd(socket: &OsStr) -> std::io::Result<()> {
    let address = match socket.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(socket)?,
    };
    UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn systemd_learns_that_a_service_is_ready() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let name = format!("@spurline-test-{}", std::process::id());
        let abstract_name = SocketAddr::from_abstract_name(&name.as_bytes()[1..]).unwrap();
        for (socket, word) in [
            (UnixDatagram::bind(&path).unwrap(), path.as_os_str()),
            (UnixDatagram::bind_addr(&abstract_name).unwrap(), OsStr::new(&name)),
        ] {
            notify_systemd(word).unwrap();
            let mut got = [0; 64];
            let len = socket.recv(&mut got).unwrap();
            assert_eq!(&got[..len], b"READY=1");
        }
        assert!(notify_systemd(OsStr::new("/nonexistent/socket")).is_err());
    }
}
