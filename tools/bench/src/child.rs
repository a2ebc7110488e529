//! Child processes: optionally in a network namespace, ended with this process, waited for with a deadline, with processor times.
//! Deliberately knows no tool's arguments.

use crate::cpu;
use crate::error::{BenchError, FileContext as _, Result};
use crate::stop;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

/// A port of loopback at which no program listens.
pub fn free_port() -> std::io::Result<u16> {
    let listener = std::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0))?;
    Ok(listener.local_addr()?.port())
}

/// Finds a program on the path.
/// `Missing`, naming the Debian package.
pub fn require_program(program: &str, package: &str) -> Result<PathBuf> {
    find_program(program)
        .ok_or_else(|| BenchError::Missing(format!("{program} is not installed: apt install {package}")))
}

pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")]).find_map(|dir| {
        let file = dir.join(program);
        file.is_file().then_some(file)
    })
}

/// A command, in the namespace `net` when given.
pub fn command_in(program: &Path, net: Option<&str>) -> Command {
    match net {
        None => Command::new(program),
        Some(net) => {
            // nsenter instead of `ip netns exec`, which also leaves the mount namespace, where mounts must be
            // visible.
            let mut command = Command::new("nsenter");
            command.arg(format!("--net=/run/netns/{net}")).arg("--").arg(program);
            command
        }
    }
}

/// The same command, whose process gets `signal` when this process ends for any reason. A Ctrl-C at the terminal does not reach
/// the child: this process ends all children in order.
fn tie_to_parent(command: &Command, signal: &str) -> Command {
    // Without setpriv (util-linux, on every Debian), only a SIGKILL of this process leaves children behind.
    let mut tied = match find_program("setpriv") {
        Some(setpriv) => {
            let mut tied = Command::new(setpriv);
            tied.args(["--pdeathsig", signal, "--"]).arg(command.get_program());
            tied
        }
        None => Command::new(command.get_program()),
    };
    tied.args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => tied.env(name, value),
            None => tied.env_remove(name),
        };
    }
    if let Some(dir) = command.get_current_dir() {
        tied.current_dir(dir);
    }
    tied.process_group(0);
    tied
}

/// A child that has ended, with success or without.
#[derive(Debug)]
pub struct FinishedChild {
    name: String,
    status: ExitStatus,
    pub out: String,
    pub err: String,
    /// The processor time in seconds, including reaped children.
    pub cpu: f64,
    pub elapsed: f64,
}

impl FinishedChild {
    /// The child that succeeded.
    /// `Failed` with the first lines after a failure.
    pub fn into_success(self) -> Result<FinishedChild> {
        if self.status.success() {
            return Ok(self);
        }
        let lines = self.err.lines().chain(self.out.lines()).filter(|l| !l.trim().is_empty());
        let head: String = lines.take(6).collect::<Vec<_>>().join(" | ");
        Err(BenchError::Failed(format!("{}: {}: {head}", self.name, self.status)))
    }
}

/// Runs a command to the end. Only a single command may run at a time in this process for `cpu` to be right.
pub fn run_to_end(command: Command, limit: Duration) -> Result<FinishedChild> {
    run_to_exit(command, limit)?.into_success()
}

/// The same, where a failure of the command is no error yet.
pub fn run_to_exit(command: Command, limit: Duration) -> Result<FinishedChild> {
    let name = describe_command(&command);
    let mut command = tie_to_parent(&command, "KILL");
    let before = cpu::of_children()?;
    let start = Instant::now();
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|e| BenchError::io(format_args!("can't start {name}"), &e))?;
    // A reader per pipe, so that neither pipe fills up.
    let out = read_to_end_apart(child.stdout.take());
    let err = read_to_end_apart(child.stderr.take());
    let status = stop::wait_until(&name, limit, Duration::from_millis(2), || {
        child.try_wait().map_err(|e| BenchError::io(&name, &e))
    });
    if status.is_err() {
        // The group, for tools such as fio that fork.
        let _ = rustix::process::kill_process_group(Pid::from_child(&child), Signal::KILL);
        let _ = child.wait();
    }
    let elapsed = start.elapsed().as_secs_f64();
    let cpu = cpu::of_children()? - before;
    let out = out.join().unwrap_or_default();
    let err = err.join().unwrap_or_default();
    Ok(FinishedChild { name, status: status?, out, err, cpu, elapsed })
}

/// A command line for messages, shortened.
fn describe_command(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    let text = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    if text.chars().count() > 300 { text.chars().take(300).chain(['…']).collect() } else { text }
}

/// A process that serves until dropped.
#[derive(Debug)]
pub struct ServerProcess {
    child: Child,
    name: String,
    log: PathBuf,
    /// The lines of standard output, where that is a pipe.
    lines: Option<Receiver<String>>,
}

impl ServerProcess {
    /// Starts the process, with standard error and standard output written to `log`.
    pub fn start(command: Command, name: &str, log: &Path) -> Result<Self> {
        Self::spawn(tie_to_parent(&command, "TERM"), name, log, false)
    }

    /// Starts a process whose standard input and output are pipes of this process, for [`ServerProcess::next_line`]. The
    /// process has to end with the input, also when this process dies.
    pub fn start_piped(mut command: Command, name: &str, log: &Path) -> Result<Self> {
        // A Ctrl-C at the terminal ends this process only.
        command.process_group(0);
        Self::spawn(command, name, log, true)
    }

    fn spawn(mut command: Command, name: &str, log: &Path, piped: bool) -> Result<Self> {
        let file = File::create(log).in_file(log)?;
        let second = file.try_clone().in_file(log)?;
        let words = describe_command(&command);
        let mut child = command
            // Some servers end with the input, which stays open for the lifetime of this value.
            .stdin(if piped { Stdio::piped() } else { Stdio::null() })
            .stdout(if piped { Stdio::piped() } else { Stdio::from(second) })
            .stderr(file)
            .spawn()
            .map_err(|e| BenchError::io(format_args!("can't start {words}"), &e))?;
        let lines = child.stdout.take().map(lines_of);
        Ok(ServerProcess { child, name: name.to_owned(), log: log.to_owned(), lines })
    }

    /// Starts a server that announces itself on standard output, with a line for each word of `words` that starts with that word;
    /// returns the rest of each line.
    pub fn start_announcing(
        command: Command,
        words: &[&str],
        name: &str,
        log: &Path,
        limit: Duration,
    ) -> Result<(Self, Vec<String>)> {
        let mut daemon = ServerProcess::spawn(tie_to_parent(&command, "TERM"), name, log, true)?;
        let what = format!("{name} to serve");
        let mut said = Vec::new();
        for word in words {
            let line = stop::wait_until(&what, limit, Duration::from_millis(2), || daemon.next_line())?;
            match line.strip_prefix(word) {
                Some(rest) => said.push(rest.trim().to_owned()),
                None => return Err(daemon.why_gone(&format!("printed {line:?} instead of {word}"))),
            }
        }
        Ok((daemon, said))
    }

    /// The next line of a piped process, if there is one already.
    pub fn next_line(&mut self) -> Result<Option<String>> {
        match self.lines.as_ref().map(Receiver::try_recv) {
            Some(Ok(line)) => Ok(Some(line)),
            Some(Err(TryRecvError::Empty)) => Ok(None),
            _ => Err(self.why_gone("has ended")),
        }
    }

    /// Writes a line to a piped process.
    pub fn send_line(&mut self, line: &str) -> Result<()> {
        let sent = self.child.stdin.as_mut().map(|pipe| writeln!(pipe, "{line}").and_then(|()| pipe.flush()));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(self.why_gone("has ended")) }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The processor time used so far by the process and its descendants, in seconds.
    pub fn cpu(&self) -> Result<f64> {
        cpu::of_tree(self.pid()).map_err(|_| self.why_gone("is gone"))
    }

    /// When the process has ended, with the last lines of the log.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.why_gone(&format!("ended ({status})"))),
            Err(e) => Err(BenchError::io(&self.name, &e)),
        }
    }

    /// Waits until the process accepts connections at `address`.
    pub fn wait_for_listener(&mut self, address: &str) -> Result<()> {
        let what = format!("{} to listen", self.name);
        stop::wait_until(&what, Duration::from_secs(20), Duration::from_millis(20), || {
            self.check_alive()?;
            Ok(std::net::TcpStream::connect(address).is_ok().then_some(()))
        })
    }

    /// The file of standard error.
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn why_gone(&self, what: &str) -> BenchError {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        let tail = lines[lines.len().saturating_sub(4)..].join(" | ");
        BenchError::Failed(format!("{} {what}; its log ends: {tail}", self.name))
    }

    /// Sends SIGTERM and waits, then kills the process. Returns whether SIGTERM was enough.
    pub fn end(&mut self, limit: Duration) -> bool {
        if !matches!(self.child.try_wait(), Ok(Some(_))) {
            // The process may be gone already, which is the goal.
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        }
        let ended = self.wait_for_end(limit);
        if !ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        ended
    }

    /// Closes the input and waits. Returns whether the process has ended.
    pub fn end_input(&mut self, limit: Duration) -> bool {
        drop(self.child.stdin.take());
        self.wait_for_end(limit)
    }

    fn wait_for_end(&mut self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        self.end(Duration::from_secs(5));
    }
}

/// The lines of a pipe, which a thread reads to the end so that the writer never blocks.
fn lines_of(pipe: ChildStdout) -> Receiver<String> {
    let (lines, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(std::io::Result::ok) {
            let _ = lines.send(line);
        }
    });
    receiver
}

/// Reads a pipe to its end in a thread of its own.
fn read_to_end_apart(pipe: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // A killed child leaves partial output.
            let _ = pipe.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn outcomes() {
        let done = run_to_end(sh("echo out; echo err >&2"), Duration::from_secs(20)).unwrap();
        assert_eq!(done.out, "out\n");
        let error = run_to_end(sh("echo why >&2; exit 3"), Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
        let error = run_to_end(sh("sleep 60"), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("not within"), "{error}");
        assert!(matches!(require_program("no-such-program", "p"), Err(BenchError::Missing(_))));
    }

    #[test]
    fn words_variables_and_directory_are_kept() {
        let mut command = sh("echo $0 $A $B; pwd");
        command.arg("zero").env("A", "a").env("B", "b").env_remove("B").current_dir("/");
        let command = tie_to_parent(&command, "KILL");
        assert_eq!(run_to_end(command, Duration::from_secs(20)).unwrap().out, "zero a\n/\n");
    }

    #[test]
    fn daemons_end_with_their_guard() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let limit = Duration::from_secs(20);
        let (daemon, said) = ServerProcess::start_announcing(
            sh("echo ready 7; echo key 8; sleep 60"),
            &["ready", "key"],
            "d",
            &log,
            limit,
        )
        .unwrap();
        assert_eq!(said, ["7", "8"]);
        assert!(daemon.cpu().unwrap() < 60.0);
        let pid = daemon.pid();
        drop(daemon);
        assert!(cpu::of_process(pid).is_err());
        let error = ServerProcess::start_announcing(sh("echo broken >&2"), &["ready"], "d", &log, limit)
            .unwrap_err()
            .to_string();
        assert!(error.contains("broken"), "{error}");
    }
}
