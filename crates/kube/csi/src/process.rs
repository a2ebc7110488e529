//! Mount processes as children in separate process groups: for hosts without Kubernetes, and for tests. A process outlives the
//! driver; the name is process id and start time, which tells a reused id apart.

use crate::launcher::{LaunchFailure, LaunchPlan, MountLauncher, ProcessState, VolumeEvent};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open, pidfd_send_signal};
use spurline_config::Fault;
use std::collections::HashMap;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// Time for a process to end after SIGTERM. The mount is detached before, so nothing but open files keeps the process.
const TERMINATION_GRACE: Duration = Duration::from_secs(5);
/// The log of a process in the volume's directory.
const LOG_FILE: &str = "log";

/// Starts mount processes on this host.
#[derive(Debug)]
pub struct ProcessLauncher {
    program: PathBuf,
    /// Processes started by this driver, with logs; processes of an earlier driver belong to init.
    children: Mutex<HashMap<String, (Child, PathBuf)>>,
}

impl ProcessLauncher {
    /// Runs `program` (`spurline`) for each mount.
    pub fn new(program: impl Into<PathBuf>) -> Self {
        ProcessLauncher { program: program.into(), children: Mutex::default() }
    }

    /// The state of a child of this driver, which is reaped if it has ended; `None` for another process.
    fn reap(&self, process: &str) -> Option<ProcessState> {
        let mut children = self.children.lock();
        let (child, log) = children.get_mut(process)?;
        // The kernel shows a zombie before the last threads have ended: until then the cause is not known.
        let Some(status) = child.try_wait().ok().flatten() else { return Some(ProcessState::Running) };
        let cause = cause_of_end(&std::fs::read(log).unwrap_or_default(), &status.to_string());
        children.remove(process);
        Some(ProcessState::Ended(cause))
    }
}

#[tonic::async_trait]
impl MountLauncher for ProcessLauncher {
    async fn launch(&self, plan: &LaunchPlan) -> Result<String, LaunchFailure> {
        let path = plan.dir.join(LOG_FILE);
        let log = std::fs::File::create(&path)
            .map_err(|e| Fault::failed(format!("the log {}: {e}", path.display()), "make --state-dir writable"))?;
        let mut command = Command::new(&self.program);
        command.args(&plan.words).envs(plan.environment.iter().map(|(name, value)| (name, value)));
        // Not the driver's variables.
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("SPURLINE_")) {
            if !plan.environment.iter().any(|(own, _)| name == own.as_str()) {
                command.env_remove(name);
            }
        }
        // A separate group: signals of the driver's terminal do not reach the process.
        command.process_group(0).current_dir("/").stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        let child = command
            .spawn()
            .map_err(|e| Fault::failed(format!("the mount process {} can't start: {e}", self.program.display()), ""))?;
        let pid = child.id();
        let name = format!("{pid}:{}", start_time(pid).unwrap_or_default());
        self.children.lock().insert(name.clone(), (child, path));
        Ok(name)
    }

    async fn process_state(&self, process: &str) -> Result<ProcessState, Fault> {
        if let Some(state) = self.reap(process) {
            return Ok(state);
        }
        Ok(match running(process) {
            Some(_) => ProcessState::Running,
            None => ProcessState::Ended(format!("process {process} is gone")),
        })
    }

    async fn stop(&self, process: &str) -> Result<(), Fault> {
        self.reap(process);
        let Some(pid) = running(process) else {
            end_group(process);
            return Ok(());
        };
        let name = process.to_owned();
        let ended = tokio::task::spawn_blocking(move || end_process(pid, &name)).await;
        let ended = ended.unwrap_or_else(|e| Err(Fault::failed(format!("ending process {process}: {e}"), "")));
        self.reap(process);
        end_group(process);
        ended
    }

    async fn end_others(&self, _: &[String]) -> Result<(), Fault> {
        // The driver's records name all processes.
        Ok(())
    }

    async fn report(&self, event: &VolumeEvent) {
        if event.warning {
            tracing::warn!("{}: {}", event.reason, event.message)
        } else {
            tracing::info!("{}: {}", event.reason, event.message)
        }
    }
}

/// SIGTERM, a grace, SIGKILL.
fn end_process(pid: Pid, name: &str) -> Result<(), Fault> {
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        opened => opened.map_err(|errno| ending_error(pid, errno))?,
    };
    // The id may have been reused before the open.
    if running(name).is_none() {
        return Ok(());
    }
    for signal in [Signal::TERM, Signal::KILL] {
        match pidfd_send_signal(&process, signal) {
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            sent => sent.map_err(|errno| ending_error(pid, errno))?,
        }
        let mut ended = [PollFd::new(&process, PollFlags::IN)];
        let limit = Timespec::try_from(TERMINATION_GRACE).ok();
        if poll(&mut ended, limit.as_ref()).is_ok_and(|count| count > 0) {
            return Ok(());
        }
    }
    Err(Fault::failed(format!("process {pid} did not end within {} s of SIGKILL", TERMINATION_GRACE.as_secs()), ""))
}

/// Ends the rest of the group of a process that is gone: a mount's process goes on without a keeper. The group keeps the number
/// from being used again.
fn end_group(name: &str) {
    let Some((pid, _)) = name.split_once(':') else { return };
    let leader = pid.parse().ok().and_then(Pid::from_raw);
    if let Some(leader) = leader.filter(|_| !Path::new("/proc").join(pid).exists()) {
        let _ = kill_process_group(leader, Signal::KILL);
    }
}

/// The process of this name, if running.
fn running(name: &str) -> Option<Pid> {
    let (pid, start) = name.split_once(':')?;
    let pid: u32 = pid.parse().ok()?;
    (start_time(pid)? == start.parse::<u64>().ok()?).then(|| Pid::from_raw(i32::try_from(pid).ok()?)).flatten()
}

/// The start of a process in clock ticks since boot (proc(5), field 22 of stat); `None` when the process is gone or a zombie.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything.
    let mut fields = stat[stat.rfind(')')? + 1..].split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

/// The last error that a mount process printed, with the remedy, in a sentence; else the end status.
pub(crate) fn cause_of_end(log: &[u8], status: &str) -> String {
    let text = String::from_utf8_lossy(log);
    let lines: Vec<&str> = text.lines().collect();
    let Some(at) = lines.iter().rposition(|line| line.starts_with("error: ")) else {
        let last = lines.iter().rev().find(|line| !line.trim().is_empty());
        return last.map_or_else(|| status.to_owned(), |last| format!("{status}; its last line was: {last}"));
    };
    let what = lines[at].trim_start_matches("error: ");
    match lines[at + 1..].iter().find_map(|line| line.trim_start().strip_prefix("fix: ")) {
        Some(fix) => format!("{what}; {fix}"),
        None => what.to_owned(),
    }
}

fn ending_error(pid: Pid, errno: rustix::io::Errno) -> Fault {
    Fault::failed(format!("ending process {pid}: {errno}"), "run the driver as root")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_is_the_printed_error_with_its_remedy() {
        let log = b"12:00 INFO x\nerror: there is no directory /data\n  fix: make it\n";
        assert_eq!(cause_of_end(log, "exit status: 3"), "there is no directory /data; make it");
        assert_eq!(cause_of_end(b"error: why\n", "exit status: 1"), "why");
        assert_eq!(cause_of_end(b"a\nb\n\n", "signal: 9"), "signal: 9; its last line was: b");
        assert_eq!(cause_of_end(b"", "signal: 9 (SIGKILL)"), "signal: 9 (SIGKILL)");
    }

    /// A process that ends between two looks at its state has its cause, too.
    #[test]
    fn the_state_of_a_process_that_ends_has_the_cause() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let launcher = ProcessLauncher::new("sh");
        let script = "echo error: why >&2; exit 3";
        let plan = LaunchPlan {
            key: "v".into(),
            volume_id: "v".into(),
            dir: dir.path().into(),
            words: vec!["-c".into(), script.into()],
            environment: Vec::new(),
            memory: 0,
            launch: 1,
            source_dir: None,
            writable: false,
            recovers: false,
        };
        for _ in 0..100 {
            let process = runtime.block_on(launcher.launch(&plan)).unwrap();
            let cause = loop {
                match runtime.block_on(launcher.process_state(&process)).unwrap() {
                    ProcessState::Ended(cause) => break cause,
                    _ => std::hint::spin_loop(),
                }
            };
            assert_eq!(cause, "why");
        }
    }

    #[test]
    fn a_reused_process_id_is_another_process() {
        let own = std::process::id();
        let start = start_time(own).unwrap();
        assert!(running(&format!("{own}:{start}")).is_some());
        assert!(running(&format!("{own}:{}", start + 1)).is_none());
        for name in ["", "1", "x:y", "999999999:5"] {
            assert!(running(name).is_none(), "{name}");
        }
    }
}
