//! The kernel's NFS server: its state, and the changes that make or take back an export. Every change is a line that an
//! administrator could type.

use crate::configuration::{ExportPlan, ExportRecord, RDMA_PORT, escape_path, fsid_of};
use serde_json::{Value, json};
use spurline_types::octal::unescape_octal;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

/// The largest request of the server: the most that the kernel takes.
const REQUEST_BYTES: u32 = 1 << 20;

/// Makes the server read the tables of exports again.
const RELOAD: [&str; 2] = ["exportfs", "-ra"];
/// How long the kernel keeps an answer: as those of rpc.mountd.
const ANSWER_SECONDS: u64 = 1800;
/// The longest time of a command: systemd may start the server for a minute.
const COMMAND_LIMIT: Duration = Duration::from_secs(90);

/// What the running server shows.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerState {
    /// Its threads; 0 when it does not run.
    pub threads: u32,
    /// Transports and ports: `tcp 2049`, `rdma 20049`.
    pub ports: Vec<String>,
    /// Addresses of clients that it knows.
    pub clients: BTreeSet<String>,
    /// Exported paths, as the kernel knows them.
    pub exported: Vec<String>,
}

impl ServerState {
    /// Reads it from /proc; all is empty where the module is not loaded.
    pub fn read() -> ServerState {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let nfsd = Path::new("/proc/fs/nfsd");
        let mut clients: BTreeSet<String> = BTreeSet::new();
        // NFSv4 clients have a folder each, others are in the cache of addresses.
        for folder in std::fs::read_dir(nfsd.join("clients")).into_iter().flatten().flatten() {
            let info = std::fs::read_to_string(folder.path().join("info")).unwrap_or_default();
            let address = info.lines().find_map(|line| line.strip_prefix("address: "));
            clients.extend(address.map(|a| trim_port(a.trim_matches('"')).to_owned()));
        }
        for line in text("/proc/net/rpc/auth.unix.ip/content").lines().filter(|l| l.starts_with("nfsd ")) {
            clients.extend(line.split_whitespace().nth(1).map(|a| trim_mapped(a).to_owned()));
        }
        let lines = |path: &str| text(path).lines().map(str::to_owned).collect::<Vec<_>>();
        let exported = lines("/proc/fs/nfsd/exports")
            .iter()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_whitespace().next().map(decode_path))
            .collect();
        ServerState { threads: ServerState::read_threads(), ports: lines("/proc/fs/nfsd/portlist"), clients, exported }
    }

    /// Its threads alone; 0 when it does not run.
    pub fn read_threads() -> u32 {
        std::fs::read_to_string("/proc/fs/nfsd/threads").ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Whether it accepts RDMA connections.
    pub fn serves_rdma(&self) -> bool {
        self.ports.iter().any(|port| port.starts_with("rdma "))
    }

    /// As JSON.
    pub fn to_json(&self) -> Value {
        json!({ "threads": self.threads, "ports": self.ports, "clients": self.clients, "exported": self.exported })
    }
}

fn trim_port(address: &str) -> &str {
    match address.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host.trim_matches(['[', ']']),
        _ => address,
    }
}

/// An IPv4 address as clients have it.
pub(crate) fn trim_mapped(address: &str) -> &str {
    address.trim_start_matches("::ffff:")
}

pub(crate) fn decode_path(word: &str) -> String {
    String::from_utf8_lossy(&unescape_octal(word.as_bytes())).into_owned()
}

/// One change, done or to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerChange {
    /// Writes a file.
    Write {
        /// The file.
        path: PathBuf,
        /// Its whole text.
        text: String,
    },
    /// Removes a file.
    Remove(PathBuf),
    /// Runs a command.
    Run(Vec<String>),
    /// Makes the server read the tables of exports again.
    Reload {
        /// The export that this is about, as clients name it.
        path: PathBuf,
        /// Whether it has to be exported afterwards.
        exported: bool,
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
    fn run(words: &[&str]) -> ServerChange {
        ServerChange::Run(words.iter().map(|w| (*w).to_owned()).collect())
    }

    fn kernel(path: &str, word: impl ToString) -> ServerChange {
        ServerChange::Kernel { path: path.into(), word: word.to_string() }
    }

    /// The line that a person would type.
    pub fn command_line(&self) -> String {
        match self {
            ServerChange::Write { path, .. } => format!("write {}", path.display()),
            ServerChange::Remove(path) => format!("rm {}", path.display()),
            ServerChange::Run(words) => words.join(" "),
            ServerChange::Reload { .. } => RELOAD.join(" "),
            ServerChange::Kernel { path, word } => format!("echo {word} > {}", path.display()),
        }
    }

    /// Makes the change; returns what a command said of other exports.
    fn make(&self) -> Result<Vec<String>> {
        match self {
            ServerChange::Write { path, text } => {
                let failed = |e: std::io::Error| Error::io(path.display(), &e);
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(failed)?;
                }
                std::fs::write(path, text).map_err(failed)?;
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
            // It fails when any export of this host can't be made. The others are made nevertheless.
            ServerChange::Reload { path, exported } => {
                let said = run_command(&RELOAD)?;
                if said.success {
                    return Ok(Vec::new());
                }
                if is_exported(path) != *exported {
                    let all =
                        if said.lines.is_empty() { "it gave no reason".to_owned() } else { said.lines.join("; ") };
                    return Err(Error::new(ErrorKind::Unavailable, format!("`{}` failed: {all}", self.command_line())));
                }
                return Ok(said.lines);
            }
        }
        Ok(Vec::new())
    }
}

/// Whether the tools' table has an export.
fn is_exported(path: &Path) -> bool {
    exported_paths().any(|exported| Path::new(&exported) == path)
}

/// The paths in the tools' table, as clients name them.
fn exported_paths() -> impl Iterator<Item = String> {
    let table = std::fs::read_to_string("/var/lib/nfs/etab").unwrap_or_default();
    let paths: Vec<String> = table.lines().filter_map(|line| line.split_whitespace().next()).map(decode_path).collect();
    paths.into_iter()
}

/// The outcome of a command.
struct CommandOutcome {
    success: bool,
    /// What it wrote to standard error.
    lines: Vec<String>,
}

/// Runs a command, for [`COMMAND_LIMIT`] at most.
fn run_command(words: &[&str]) -> Result<CommandOutcome> {
    let (program, rest) = words.split_first().expect("a command has a program");
    let line = words.join(" ");
    let failed = |e: std::io::Error| Error::io(&line, &e);
    let mut command = Command::new(program);
    command.args(rest).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let mut errors = child.stderr.take().expect("it is a pipe");
    let (sender, receiver) = std::sync::mpsc::channel();
    // A thread of its own: a command that hangs in the kernel does not end when it is killed.
    std::thread::Builder::new()
        .name("command".into())
        .spawn(move || {
            let mut text = Vec::new();
            let _ = errors.read_to_end(&mut text);
            let _ = sender.send(text);
        })
        .map_err(failed)?;
    let end = Instant::now() + COMMAND_LIMIT;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
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
    // A daemon that it started may keep the pipe.
    let text = receiver.recv_timeout(Duration::from_secs(1)).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned).collect();
    Ok(CommandOutcome { success: status.success(), lines })
}

/// Whether systemd runs this host's services.
fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

fn is_running(program: &str) -> bool {
    let Ok(processes) = std::fs::read_dir("/proc") else { return false };
    let names = processes.flatten().filter_map(|p| std::fs::read_to_string(p.path().join("comm")).ok());
    names.into_iter().any(|name| name.trim_end() == program)
}

impl ExportPlan {
    /// The changes that make the export, in order, given the server's present state.
    pub fn changes(&self, server: &ServerState, root: &Path) -> Vec<ServerChange> {
        let mut changes = Vec::new();
        for file in [self.settings_file(), self.exports_file()] {
            let path = root.join(&file.path);
            if std::fs::read_to_string(&path).is_ok_and(|text| text == file.text) {
                continue;
            }
            changes.push(ServerChange::Write { path, text: file.text });
        }
        // Another root holds another host's files: its server is not this one.
        if root != Path::new("/") {
            return changes;
        }
        if self.rdma && !Path::new("/sys/module/rpcrdma").is_dir() {
            changes.push(ServerChange::run(&["modprobe", "rpcrdma"]));
        }
        if server.threads > 0 {
            changes.push(ServerChange::Reload { path: self.shown_path.clone(), exported: true });
            if self.rdma && !server.serves_rdma() {
                changes.push(ServerChange::kernel("/proc/fs/nfsd/portlist", format!("rdma {RDMA_PORT}")));
            }
            return changes;
        }
        if !Path::new("/proc/fs/nfsd/threads").exists() {
            changes.push(ServerChange::run(&["modprobe", "nfsd"]));
            changes.push(ServerChange::run(&[
                "sh",
                "-c",
                "mountpoint -q /proc/fs/nfsd || mount -t nfsd nfsd /proc/fs/nfsd",
            ]));
        }
        // It can be set only while no thread runs.
        changes.push(ServerChange::kernel("/proc/fs/nfsd/max_block_size", REQUEST_BYTES));
        if has_systemd() {
            changes.push(ServerChange::run(&["systemctl", "start", "nfs-server"]));
            return changes;
        }
        if !is_running("rpcbind") {
            changes.push(ServerChange::run(&["rpcbind"]));
        }
        changes.push(ServerChange::Reload { path: self.shown_path.clone(), exported: true });
        // It adds the port of RDMA that nfs.conf names, after the threads: the kernel refuses it before.
        changes.push(ServerChange::run(&["rpc.nfsd", &self.threads.to_string()]));
        if !is_running("rpc.mountd") {
            changes.push(ServerChange::run(&["rpc.mountd"]));
        }
        changes
    }
}

/// Makes the changes of a plan one by one, and records them. `prepare` is called when the export has its folder and no
/// client has a file handle yet; `each` gets each change before it is made. Returns what `exportfs` reports of other exports.
///
/// # Errors
/// At the first change that fails. Those before it stay, and [`remove_export`] takes them back.
pub fn apply_plan(
    plan: &ExportPlan,
    root: &Path,
    prepare: &mut dyn FnMut() -> Result<()>,
    each: &mut dyn FnMut(&ServerChange),
) -> Result<Vec<String>> {
    let server = ServerState::read();
    let changes = plan.changes(&server, root);
    let id = plan.id();
    let folder = root.join(plan.state_dir());
    std::fs::create_dir_all(&folder).map_err(|e| Error::io(folder.display(), &e))?;
    let before = ExportRecord::read(root, &id);
    let record = ExportRecord {
        mountpoint: plan.mountpoint.clone(),
        source: plan.source.clone(),
        rdma: plan.rdma,
        started_server: server.threads == 0 || before.is_some_and(|before| before.started_server),
    };
    record.write(root, &id)?;
    prepare()?;
    let mut others = Vec::new();
    for change in &changes {
        each(change);
        others.extend(change.make()?);
    }
    Ok(others)
}

/// Takes an export back: its files, its record and the names of its inodes; the server too, if it was started for it and
/// exports nothing else.
///
/// # Errors
/// When a file can't be removed, or a command fails.
pub fn remove_export(plan: &ExportPlan, root: &Path, each: &mut dyn FnMut(&ServerChange)) -> Result<bool> {
    let id = plan.id();
    let exports = root.join(plan.exports_file().path);
    let record = ExportRecord::read(root, &id);
    if record.is_none() && !exports.exists() {
        return Ok(false);
    }
    let others = ExportRecord::read_all(root).into_iter().any(|(other, _)| other != id);
    let mut changes = vec![ServerChange::Remove(exports)];
    if !others {
        changes.push(ServerChange::Remove(root.join(plan.settings_file().path)));
    }
    let server = ServerState::read();
    if root == Path::new("/") && server.threads > 0 {
        changes.push(ServerChange::Reload { path: plan.shown_path.clone(), exported: false });
        // What the kernel has cached holds the mount.
        changes.push(ServerChange::run(&["exportfs", "-f"]));
        if !others && record.as_ref().is_some_and(|record| record.started_server) && !has_other_exports(plan) {
            changes.push(match has_systemd() {
                true => ServerChange::run(&["systemctl", "stop", "nfs-server"]),
                false => ServerChange::run(&["rpc.nfsd", "0"]),
            });
        }
    }
    for change in &changes {
        each(change);
        change.make()?;
    }
    let folder = root.join(plan.state_dir());
    match std::fs::remove_dir_all(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(folder.display(), &e)),
        _ => Ok(true),
    }
}

/// Makes the kernel ask for all exports again at their next use, as `exportfs -f` does: it still knows a mount that is gone.
///
/// # Errors
/// When the kernel refuses it.
pub fn forget_cached_exports() -> Result<()> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    for cache in ["auth.unix.ip", "auth.unix.gid", "nfsd.fh", "nfsd.export"] {
        let path = format!("/proc/net/rpc/{cache}/flush");
        match std::fs::write(&path, format!("{now}\n")) {
            // No NFS server has run.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            done => done.map_err(|e| Error::io(&path, &e))?,
        }
    }
    Ok(())
}

/// Answers the kernel's questions about an export that rpc.mountd left open while nothing was mounted there: else clients
/// would wait until they expire, two minutes. A question and its answer are lines of the kernel's rpc-cache interface. Returns
/// the number of answers.
///
/// # Errors
/// When the kernel refuses an answer.
pub fn answer_waiting_clients(source: &str, mountpoint: &Path) -> Result<usize> {
    const CACHE: &str = "/proc/net/rpc/nfsd.fh";
    let fsid = fsid_of(source);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let open = std::fs::read_to_string(format!("{CACHE}/content")).unwrap_or_default();
    let mut answered = 0;
    for answer in open.lines().filter_map(|line| answer_to(line, &fsid, now + ANSWER_SECONDS, mountpoint)) {
        let path = format!("{CACHE}/channel");
        std::fs::write(&path, answer).map_err(|e| Error::io(&path, &e))?;
        answered += 1;
    }
    Ok(answered)
}

/// The answer to an open question (`# DOMAIN FSIDTYPE FSID`) about the file system `fsid`; `None` for other lines.
fn answer_to(line: &str, fsid: &str, expires: u64, mountpoint: &Path) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["#", domain, kind, number] = words[..] else { return None };
    let hex = number.strip_prefix("0x")?;
    // The kernel shows the UUID as numbers of four bytes in this machine's order, and takes it as bytes.
    let bytes: String = fsid.chars().filter(|c| *c != '-').collect();
    let reversed = |word: &str| (0..4).rev().map(|n| word.get(2 * n..2 * n + 2)).collect::<Option<String>>();
    let shown = (0..4).map(|n| reversed(bytes.get(8 * n..8 * n + 8)?)).collect::<Option<String>>()?;
    // FSID_UUID16, the kind of an export with a UUID.
    if kind != "6" || (hex != shown && hex != bytes) {
        return None;
    }
    Some(format!("{domain} {kind} \\x{bytes} {expires} {}\n", escape_path(mountpoint)))
}

/// Whether the server exports paths that are not this export.
fn has_other_exports(plan: &ExportPlan) -> bool {
    exported_paths().any(|path| Path::new(&path) != plan.shown_path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(folder: &str) -> ExportPlan {
        ExportPlan {
            mountpoint: folder.into(),
            shown_path: folder.into(),
            source: "s3://datasets".into(),
            clients: vec!["*".into()],
            writable: false,
            trust_root: false,
            rdma: true,
            threads: 8,
        }
    }

    #[test]
    fn the_request_size_comes_before_the_threads_and_a_running_server_only_gets_the_port_of_rdma() {
        let words = |server: &ServerState| -> Vec<String> {
            plan("/mnt/a").changes(server, Path::new("/")).iter().map(ServerChange::command_line).collect()
        };
        let position = |lines: &[String], part: &str| lines.iter().position(|line| line.contains(part));
        let stopped = words(&ServerState::default());
        assert!(position(&stopped, "write /etc/nfs.conf.d/spurline.conf").is_some(), "{stopped:?}");
        let size = position(&stopped, "max_block_size").unwrap();
        if !has_systemd() {
            assert!(size < position(&stopped, "rpc.nfsd 8").unwrap(), "{stopped:?}");
        }
        let running = ServerState { threads: 4, ports: vec!["tcp 2049".into()], ..ServerState::default() };
        let running = words(&running);
        assert!(position(&running, "rpc.nfsd").is_none() && position(&running, "rdma 20049").is_some(), "{running:?}");
        assert!(position(&running, "max_block_size").is_none());
    }

    #[test]
    fn what_is_removed_is_what_was_made_and_the_last_export_takes_the_settings_along() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (a, b) = (plan("/mnt/a"), plan("/mnt/b"));
        let other = root.join("etc/exports.d/other.exports");
        std::fs::create_dir_all(other.parent().unwrap()).unwrap();
        std::fs::write(&other, "/srv *(ro)\n").unwrap();
        for plan in [&a, &b] {
            let mut made = Vec::new();
            apply_plan(plan, root, &mut || Ok(()), &mut |change| made.push(change.command_line())).unwrap();
            assert!(!made.is_empty());
            // The same once more changes nothing.
            let mut again = 0;
            apply_plan(plan, root, &mut || Ok(()), &mut |_| again += 1).unwrap();
            assert_eq!(again, 0);
        }
        let settings = root.join(a.settings_file().path);
        assert!(remove_export(&a, root, &mut |_| {}).unwrap());
        assert!(settings.exists() && root.join(b.exports_file().path).exists());
        assert!(!root.join(a.exports_file().path).exists() && !root.join(a.state_dir()).exists());
        assert!(remove_export(&b, root, &mut |_| {}).unwrap());
        assert!(!settings.exists() && other.exists());
        assert!(!remove_export(&b, root, &mut |_| {}).unwrap(), "a second removal finds nothing");
    }

    #[test]
    fn an_open_question_about_the_export_is_answered() {
        let fsid = "b98bba83-53a7-0d7b-3fe5-a7f7159d9b2e";
        let answer = |line: &str| answer_to(line, fsid, 99, Path::new("/mnt/a b"));
        let line = "10.77.0.0/16 6 0x83ba8bb97b0da753f7a7e53f2e9b9d15";
        let wanted = "10.77.0.0/16 6 \\xb98bba8353a70d7b3fe5a7f7159d9b2e 99 /mnt/a\\040b\n";
        assert_eq!(answer(&format!("# {line}")).unwrap(), wanted);
        assert_eq!(answer(&format!("{line} /mnt/a")), None, "the kernel has its answer");
        assert_eq!(answer("# 10.77.0.0/16 6 0x13ff9fcbe00ba8c755b11e8a489c6e8b"), None, "of another source");
        assert_eq!(answer("#domain fsidtype fsid [path]"), None);
    }

    #[test]
    fn commands_end_with_their_reasons() {
        let said = run_command(&["sh", "-c", "echo first >&2; echo >&2; echo last >&2; exit 1"]).unwrap();
        assert_eq!((said.success, said.lines), (false, vec!["first".to_owned(), "last".to_owned()]));
        let failed = ServerChange::run(&["sh", "-c", "echo why >&2; exit 1"]).make().unwrap_err();
        assert!(failed.to_string().contains("why"), "{failed}");
        assert!(run_command(&["/no/such/program"]).is_err());
    }

    #[test]
    fn words_of_the_kernel() {
        assert_eq!(decode_path("/mnt/my\\040data"), "/mnt/my data");
        assert_eq!(trim_port("10.0.0.1:812"), "10.0.0.1");
        assert_eq!(trim_port("[fd00::1]:812"), "fd00::1");
    }
}
