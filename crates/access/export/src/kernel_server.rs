//! The kernel's NFS server: its state, and the changes that make or take back an export. Every change is a line that an
//! administrator could type.

use crate::configuration::{ExportPlan, ExportRecord, RDMA_PORT};
use serde_json::{Value, json};
use spurline_types::octal::unescape_octal;
use spurline_types::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The largest request of the server: the most that the kernel takes.
const REQUEST_BYTES: u32 = 1 << 20;

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
            clients.extend(line.split_whitespace().nth(1).map(|a| a.trim_start_matches("::ffff:").to_owned()));
        }
        let lines = |path: &str| text(path).lines().map(str::to_owned).collect::<Vec<_>>();
        let exported = lines("/proc/fs/nfsd/exports")
            .iter()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_whitespace().next().map(decode_path))
            .collect();
        ServerState {
            threads: text("/proc/fs/nfsd/threads").trim().parse().unwrap_or(0),
            ports: lines("/proc/fs/nfsd/portlist"),
            clients,
            exported,
        }
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

fn decode_path(word: &str) -> String {
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
            ServerChange::Kernel { path, word } => format!("echo {word} > {}", path.display()),
        }
    }

    fn make(&self) -> Result<()> {
        match self {
            ServerChange::Write { path, text } => {
                let failed = |e: std::io::Error| Error::io(path.display(), &e);
                if let Some(folder) = path.parent() {
                    std::fs::create_dir_all(folder).map_err(failed)?;
                }
                std::fs::write(path, text).map_err(failed)
            }
            ServerChange::Remove(path) => match std::fs::remove_file(path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(path.display(), &e)),
                _ => Ok(()),
            },
            ServerChange::Kernel { path, word } => {
                std::fs::write(path, format!("{word}\n")).map_err(|e| Error::io(self.command_line(), &e))
            }
            ServerChange::Run(words) => {
                let (program, rest) = words.split_first().expect("a command has a program");
                let out = Command::new(program).args(rest).output();
                let out = out.map_err(|e| Error::io(self.command_line(), &e))?;
                if out.status.success() {
                    return Ok(());
                }
                let text = String::from_utf8_lossy(&out.stderr);
                let last = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it gave no reason").trim();
                let text = format!("`{}` failed: {last}", self.command_line());
                Err(Error::new(ErrorKind::Unavailable, text))
            }
        }
    }
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
            changes.push(ServerChange::run(&["exportfs", "-ra"]));
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
        changes.push(ServerChange::run(&["exportfs", "-ra"]));
        // It adds the port of RDMA that nfs.conf names, after the threads: the kernel refuses it before.
        changes.push(ServerChange::run(&["rpc.nfsd", &self.threads.to_string()]));
        if !is_running("rpc.mountd") {
            changes.push(ServerChange::run(&["rpc.mountd"]));
        }
        changes
    }
}

/// Makes the changes of a plan one by one, and records them. `prepare` is called when the export has its folder and no
/// client has a file handle yet; `each` gets each change before it is made.
///
/// # Errors
/// At the first change that fails. Those before it stay, and [`remove_export`] takes them back.
pub fn apply_plan(
    plan: &ExportPlan,
    root: &Path,
    prepare: &mut dyn FnMut() -> Result<()>,
    each: &mut dyn FnMut(&ServerChange),
) -> Result<()> {
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
    for change in &changes {
        each(change);
        change.make()?;
    }
    Ok(())
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
        changes.push(ServerChange::run(&["exportfs", "-ra"]));
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

/// Whether the server exports paths that are not this export.
fn has_other_exports(plan: &ExportPlan) -> bool {
    let table = std::fs::read_to_string("/var/lib/nfs/etab").unwrap_or_default();
    let own = plan.shown_path.display().to_string();
    table.lines().filter_map(|line| line.split_whitespace().next()).any(|path| decode_path(path) != own)
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
    fn words_of_the_kernel() {
        assert_eq!(decode_path("/mnt/my\\040data"), "/mnt/my data");
        assert_eq!(trim_port("10.0.0.1:812"), "10.0.0.1");
        assert_eq!(trim_port("[fd00::1]:812"), "fd00::1");
    }
}
