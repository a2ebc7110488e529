//! Child processes: started in a network namespace or not, never outliving this process, waited for with a deadline,
//! their processor time known. It deliberately knows no tool's words.

use crate::cpu;
use crate::error::{Error, Result};
use crate::stop;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Looks for a program on the path.
///
/// # Errors
/// `Missing`, naming the Debian package.
pub fn need(program: &str, package: &str) -> Result<PathBuf> {
    find(program).ok_or_else(|| Error::Missing(format!("{program} is not installed: apt install {package}")))
}

/// A program on the path.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")]).find_map(|dir| {
        let file = dir.join(program);
        file.is_file().then_some(file)
    })
}

/// A command, in the namespace `net` when given.
pub fn command(program: &Path, net: Option<&str>) -> Command {
    match net {
        None => Command::new(program),
        Some(net) => {
            // nsenter and not `ip netns exec`: the latter also leaves the mount namespace, where mounts must be seen.
            let mut command = Command::new("nsenter");
            command.arg(format!("--net=/run/netns/{net}")).arg("--").arg(program);
            command
        }
    }
}

/// The same command whose process gets `signal` when this one ends, however that comes about, and which a Ctrl-C at the
/// terminal does not reach: this process takes its children down in order.
fn tied(command: &Command, signal: &str) -> Command {
    // Without setpriv (util-linux, on every Debian) only a SIGKILL of this process leaves something behind.
    let mut tied = match find("setpriv") {
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

/// What a finished child left.
#[derive(Debug)]
pub struct Finished {
    /// Its standard output.
    pub out: String,
    /// Seconds of processor it used, with its own reaped children.
    pub cpu: f64,
    /// Seconds it took.
    pub elapsed: f64,
}

/// Runs a command to its end. Only one may run at a time in this process for `cpu` to be right.
///
/// # Errors
/// When it can't be started, fails, or is not done within `limit`.
pub fn run(command: Command, limit: Duration) -> Result<Finished> {
    let name = describe(&command);
    let mut command = tied(&command, "KILL");
    let before = cpu::of_children()?;
    let start = Instant::now();
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| Error::io(format_args!("can't start {name}"), &e))?;
    // Readers of their own, so that neither pipe can fill while the other is waited for.
    let drain = |pipe: Option<Box<dyn std::io::Read + Send>>| {
        std::thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut pipe) = pipe {
                // A child killed in the middle leaves what it leaves.
                let _ = pipe.read_to_end(&mut bytes);
            }
            String::from_utf8_lossy(&bytes).into_owned()
        })
    };
    let out = drain(child.stdout.take().map(|p| Box::new(p) as _));
    let err = drain(child.stderr.take().map(|p| Box::new(p) as _));
    let status = wait(&mut child, &name, limit);
    if status.is_err() {
        // Its group, for tools such as fio that fork.
        let _ = rustix::process::kill_process_group(Pid::from_child(&child), Signal::KILL);
        let _ = child.wait();
    }
    let elapsed = start.elapsed().as_secs_f64();
    let cpu = cpu::of_children()? - before;
    let out = out.join().unwrap_or_default();
    let err = err.join().unwrap_or_default();
    let status = status?;
    if !status.success() {
        let tail: String =
            err.lines().chain(out.lines()).filter(|l| !l.trim().is_empty()).take(6).collect::<Vec<_>>().join(" | ");
        return Err(Error::Failed(format!("{name}: {status}: {tail}")));
    }
    Ok(Finished { out, cpu, elapsed })
}

fn wait(child: &mut Child, name: &str, limit: Duration) -> Result<ExitStatus> {
    stop::wait(name, limit, Duration::from_millis(2), || child.try_wait().map_err(|e| Error::io(name, &e)))
}

/// A command as a person would type it, shortened.
pub fn describe(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    if text.len() > 300 {
        let cut = (0..=300).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        text.truncate(cut);
        text.push('…');
    }
    text
}

/// A process that serves until it is dropped.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    name: String,
    log: PathBuf,
}

impl Daemon {
    /// Starts it, standard error and standard output into `log`.
    ///
    /// # Errors
    /// When it can't be started.
    pub fn start(command: Command, name: &str, log: &Path) -> Result<Self> {
        Self::spawn(command, name, log, false)
    }

    fn spawn(command: Command, name: &str, log: &Path, piped: bool) -> Result<Self> {
        let file = File::create(log).map_err(|e| Error::io(log.display(), &e))?;
        let second = file.try_clone().map_err(|e| Error::io(log.display(), &e))?;
        let words = describe(&command);
        let mut command = tied(&command, "TERM");
        let child = command
            // Some servers end with their input, which is open for as long as this value lives.
            .stdin(if piped { Stdio::piped() } else { Stdio::null() })
            .stdout(if piped { Stdio::piped() } else { Stdio::from(second) })
            .stderr(file)
            .spawn()
            .map_err(|e| Error::io(format_args!("can't start {words}"), &e))?;
        Ok(Daemon { child, name: name.to_owned(), log: log.to_owned() })
    }

    /// Starts a server that tells on its standard output, in a line for each of `words` that starts with it, that it
    /// serves and how; returns what follows the words.
    ///
    /// # Errors
    /// When it ends, says something else, or not all within `limit`.
    pub fn start_saying(
        command: Command,
        words: &[&str],
        name: &str,
        log: &Path,
        limit: Duration,
    ) -> Result<(Self, Vec<String>)> {
        let mut daemon = Daemon::spawn(command, name, log, true)?;
        let Some(pipe) = daemon.child.stdout.take() else { return Err(Error::Failed(format!("{name}: no pipe"))) };
        let (tx, rx) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let mut lines = BufReader::new(pipe);
            // The end of the pipe is told by an empty line. It is read to its end so that the server never blocks.
            loop {
                let mut line = String::new();
                let ended = !matches!(lines.read_line(&mut line), Ok(n) if n > 0);
                let _ = tx.send(line);
                if ended {
                    return;
                }
            }
        });
        let what = format!("{name} to serve");
        let mut said = Vec::new();
        for word in words {
            let line = stop::wait(&what, limit, Duration::from_millis(2), || Ok(rx.try_recv().ok()))?;
            match line.trim_end().strip_prefix(word) {
                Some(rest) => said.push(rest.trim().to_owned()),
                None => return Err(daemon.why_gone(&format!("said {line:?} instead of {word}"))),
            }
        }
        Ok((daemon, said))
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has used so far.
    ///
    /// # Errors
    /// When it is gone.
    pub fn cpu(&self) -> Result<f64> {
        cpu::of(self.pid()).map(cpu::Used::total).map_err(|_| self.why_gone("is gone"))
    }

    /// # Errors
    /// When it has ended, with the last lines of its log.
    pub fn alive(&mut self) -> Result<()> {
        match self.child.try_wait() {
            Ok(None) => Ok(()),
            Ok(Some(status)) => Err(self.why_gone(&format!("ended ({status})"))),
            Err(e) => Err(Error::io(&self.name, &e)),
        }
    }

    /// Where its standard error goes.
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn why_gone(&self, what: &str) -> Error {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        let tail = lines[lines.len().saturating_sub(4)..].join(" | ");
        Error::Failed(format!("{} {what}; its log ends: {tail}", self.name))
    }

    /// Asks it to end and waits, then makes it end. Says whether asking was enough.
    pub fn end(&mut self, limit: Duration) -> bool {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return true;
        }
        // Either may find it gone, which is what is wanted.
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let end = Instant::now() + limit;
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return true;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        false
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.end(Duration::from_secs(5));
    }
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
        let done = run(sh("echo out; echo err >&2"), Duration::from_secs(20)).unwrap();
        assert_eq!(done.out, "out\n");
        let error = run(sh("echo why >&2; exit 3"), Duration::from_secs(20)).unwrap_err().to_string();
        assert!(error.contains("exit status: 3") && error.contains("why"), "{error}");
        let error = run(sh("sleep 60"), Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("not within"), "{error}");
        assert!(matches!(need("no-such-program", "p"), Err(Error::Missing(_))));
    }

    #[test]
    fn words_variables_and_directory_are_kept() {
        let mut command = sh("echo $0 $A $B; pwd");
        command.arg("zero").env("A", "a").env("B", "b").env_remove("B").current_dir("/");
        let command = tied(&command, "KILL");
        assert_eq!(run(command, Duration::from_secs(20)).unwrap().out, "zero a\n/\n");
    }

    #[test]
    fn daemons_end_with_their_guard() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let limit = Duration::from_secs(20);
        let (daemon, said) =
            Daemon::start_saying(sh("echo ready 7; echo key 8; sleep 60"), &["ready", "key"], "d", &log, limit)
                .unwrap();
        assert_eq!(said, ["7", "8"]);
        assert!(daemon.cpu().unwrap() < 60.0);
        let pid = daemon.pid();
        drop(daemon);
        assert!(cpu::of(pid).is_err());
        let error = Daemon::start_saying(sh("echo broken >&2"), &["ready"], "d", &log, limit).unwrap_err().to_string();
        assert!(error.contains("broken"), "{error}");
    }
}
