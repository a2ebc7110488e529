//! The changes that make or take back an export: files, commands and words for the kernel. Every change is a line that an
//! administrator could type.

use crate::kernel_server::is_exported;
use spurline_types::{Error, ErrorKind, IoContext, Result};
use std::io::Read as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Makes the server read the tables of exports again.
const RELOAD_COMMAND: [&str; 2] = ["exportfs", "-ra"];
/// The longest time of a command: systemd may start the server for a minute.
const COMMAND_LIMIT: Duration = Duration::from_secs(90);

/// A change, done or to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerChange {
    /// Writes a file.
    Write {
        /// The file.
        path: PathBuf,
        /// The whole text.
        text: String,
    },
    /// Removes a file.
    Remove(PathBuf),
    /// Runs a command.
    Run(Vec<String>),
    /// Makes the server read the tables of exports again.
    Reload {
        /// The path of the export under the clients' name.
        path: PathBuf,
        /// The clients afterwards; none if the export is taken back.
        clients: Vec<String>,
    },
    /// Writes a word to a file of the kernel.
    Kernel {
        /// The file.
        path: PathBuf,
        /// The word.
        word: String,
    },
}

impl ServerChange {
    pub(crate) fn run(words: &[&str]) -> ServerChange {
        ServerChange::Run(words.iter().map(|w| (*w).to_owned()).collect())
    }

    /// Whether the change starts the threads of the server.
    pub(crate) fn starts_server(&self) -> bool {
        let ServerChange::Run(words) = self else { return false };
        words[0] == "rpc.nfsd" || words.iter().eq(["systemctl", "start", "nfs-server"])
    }

    pub(crate) fn kernel(path: &str, word: impl ToString) -> ServerChange {
        ServerChange::Kernel { path: path.into(), word: word.to_string() }
    }

    /// The line that a person would type.
    pub fn command_line(&self) -> String {
        match self {
            ServerChange::Write { path, .. } => format!("write {}", path.display()),
            ServerChange::Remove(path) => format!("rm {}", path.display()),
            ServerChange::Run(words) => words.iter().map(|word| quote_word(word)).collect::<Vec<_>>().join(" "),
            ServerChange::Reload { .. } => RELOAD_COMMAND.join(" "),
            ServerChange::Kernel { path, word } => format!("echo {word} > {}", path.display()),
        }
    }

    /// Makes the change; returns what a command said of other exports.
    pub(crate) fn make(&self) -> Result<Vec<String>> {
        match self {
            ServerChange::Write { path, text } => {
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).io_context(path.display())?;
                }
                std::fs::write(path, text).io_context(path.display())?;
            }
            ServerChange::Remove(path) => match std::fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(Error::io(path.display(), &e)),
                _ => {}
            },
            ServerChange::Kernel { path, word } => {
                std::fs::write(path, format!("{word}\n")).map_err(|e| Error::io(self.command_line(), &e))?;
            }
            ServerChange::Run(words) => {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                let said = run_command(&words)?;
                if !said.success {
                    let last = said.lines.last().map_or("it gave no reason", String::as_str);
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        format!("`{}` failed: {last}", self.command_line()),
                    ));
                }
            }
            // `exportfs` fails when any export of this host can't be made, and the others are made nevertheless. Success is also
            // reported when a client's name can't be resolved, and that client is left out.
            ServerChange::Reload { path, clients } => {
                let said = run_command(&RELOAD_COMMAND)?;
                let refused = unresolved_clients(&said.lines, clients);
                let all = if said.lines.is_empty() { "it gave no reason".to_owned() } else { said.lines.join("; ") };
                if !refused.is_empty() {
                    let text = format!(
                        "clients are not admitted: {} (`{}` says: {all})",
                        refused.join(", "),
                        self.command_line()
                    );
                    return Err(Error::new(ErrorKind::Unavailable, text));
                }
                if is_failed_reload(clients.is_empty(), said.success, is_exported(path)) {
                    let now = if clients.is_empty() { "is still exported" } else { "is not exported" };
                    let text = format!("{} {now} after `{}`: {all}", path.display(), self.command_line());
                    return Err(Error::new(ErrorKind::Unavailable, text));
                }
                return Ok(said.lines);
            }
        }
        Ok(Vec::new())
    }
}

/// Whether a reload has missed the aim. A path that is taken back stays exported where the administrator exports the same path.
fn is_failed_reload(taken_back: bool, success: bool, exported: bool) -> bool {
    if taken_back { exported && !success } else { !exported }
}

/// A word in a form for a shell.
fn quote_word(word: &str) -> String {
    if !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "/.,:=_-+@%".contains(c)) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', "'\\''"))
    }
}

/// Clients that `exportfs` has left out, by the output.
fn unresolved_clients(lines: &[String], clients: &[String]) -> Vec<String> {
    clients
        .iter()
        .filter(|client| lines.iter().any(|line| line.ends_with(&format!("Failed to resolve {client}"))))
        .cloned()
        .collect()
}

struct CommandOutcome {
    success: bool,
    /// The lines of standard error.
    lines: Vec<String>,
}

/// Runs a command, for [`COMMAND_LIMIT`] at most.
fn run_command(words: &[&str]) -> Result<CommandOutcome> {
    let (program, rest) = words.split_first().expect("a command has a program");
    let line = words.join(" ");
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().io_context(&line)?;
    let mut errors = child.stderr.take().expect("it is a pipe");
    let (sender, receiver) = std::sync::mpsc::channel();
    // A separate thread: a command that hangs in the kernel does not end when killed.
    std::thread::Builder::new()
        .name("command".into())
        .spawn(move || {
            let mut text = Vec::new();
            let _ = errors.read_to_end(&mut text);
            let _ = sender.send(text);
        })
        .io_context(&line)?;
    let end = Instant::now() + COMMAND_LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().io_context(&line)? {
            break status;
        }
        if Instant::now() >= end {
            let _ = child.kill();
            let text = format!(
                "`{line}` did not end within {} s: an exported file system may hang (`exportfs -v` lists them)",
                COMMAND_LIMIT.as_secs()
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    // A daemon that the command started may keep the pipe.
    let text = receiver.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    Ok(CommandOutcome { success: status.success(), lines })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_end_with_their_reasons() {
        let said = run_command(&["sh", "-c", "echo first >&2; echo >&2; echo last >&2; exit 1"]).unwrap();
        assert_eq!((said.success, said.lines), (false, vec!["first".to_owned(), "last".to_owned()]));
        let failed = ServerChange::run(&["sh", "-c", "echo why >&2; exit 1"]).make().unwrap_err();
        assert!(failed.to_string().contains("why"), "{failed}");
        assert!(run_command(&["/no/such/program"]).is_err());
    }

    #[test]
    fn a_command_is_shown_as_a_shell_takes_it() {
        let line = ServerChange::run(&["sh", "-c", "mountpoint -q /x || mount it's"]).command_line();
        assert_eq!(line, "sh -c 'mountpoint -q /x || mount it'\\''s'");
        assert_eq!(ServerChange::run(&["rpc.nfsd", "8"]).command_line(), "rpc.nfsd 8");
    }

    #[test]
    fn a_path_may_stay_exported_by_the_administrator() {
        assert!(!is_failed_reload(true, true, true) && !is_failed_reload(true, false, false));
        assert!(is_failed_reload(true, false, true), "the tables may not have been read");
        // exportfs fails for any export of this host.
        assert!(!is_failed_reload(false, false, true) && is_failed_reload(false, true, false));
    }

    #[test]
    fn clients_whose_names_are_not_resolved_are_named() {
        let clients: Vec<String> = ["10.0.0.0/24", "no.such.host", "host"].map(str::to_owned).to_vec();
        // As exportfs of nfs-utils 2.6.2 writes it; it ends with 0.
        let said = ["exportfs: Failed to resolve no.such.host", "exportfs: Failed to resolve no.such.host"];
        assert_eq!(unresolved_clients(&said.map(str::to_owned), &clients), ["no.such.host"]);
        assert!(unresolved_clients(&[], &clients).is_empty());
    }
}
