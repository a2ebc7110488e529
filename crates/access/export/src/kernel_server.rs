//! The kernel's NFS server: the state, and the changes that make or take back an export. Does not know how a change is made.

use crate::configuration::{ExportPlan, STATE_DIR, escape_path, export_id, exports_path, shown_path};
use crate::export_records::{ExportRecord, ServerRecord};
use crate::server_changes::ServerChange;
use crate::server_settings::{NfsSettings, settings_file, settings_path, threads_at_start};
use serde_json::{Value, json};
use spurline_sys::unescape_octal;
use spurline_types::{Error, Result};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The largest request that exports ask for.
const EXPORT_REQUEST_BYTES: u32 = 1 << 20;

/// Where the largest request is set.
const REQUEST_FILE: &str = "/proc/fs/nfsd/max_block_size";
/// How long the kernel keeps an answer: as answers of rpc.mountd.
const ANSWER_SECONDS: u64 = 1800;
/// The state of the running server.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ServerState {
    /// The threads; 0 without a running server.
    pub threads: u32,
    /// Transports and ports: `tcp 2049`, `rdma 20049`.
    pub ports: Vec<String>,
    /// Addresses of known clients.
    pub clients: BTreeSet<String>,
    /// Exported paths, as known to the kernel.
    pub exported: Vec<String>,
    /// Versions that are switched on and off: `+3 +4 -4.0 +4.1 +4.2`; empty before the first start.
    pub versions: String,
    /// The largest request; 0 before the first start.
    pub request_bytes: u32,
    /// The memory of this host, from which the kernel derives the largest request.
    pub memory_bytes: u64,
}

impl ServerState {
    /// Reads the state from /proc; all is empty where the module is not loaded.
    pub fn read() -> ServerState {
        let nfsd = Path::new("/proc/fs/nfsd");
        let mut clients: BTreeSet<String> = BTreeSet::new();
        // NFSv4 clients have a folder each, others are in the cache of addresses.
        for folder in std::fs::read_dir(nfsd.join("clients")).into_iter().flatten().flatten() {
            let info = std::fs::read_to_string(folder.path().join("info")).unwrap_or_default();
            let address = info.lines().find_map(|line| line.strip_prefix("address: "));
            clients.extend(address.map(|a| trim_port(a.trim_matches('"')).to_owned()));
        }
        for line in read_text("/proc/net/rpc/auth.unix.ip/content").lines().filter(|l| l.starts_with("nfsd ")) {
            clients.extend(line.split_whitespace().nth(1).map(|a| trim_mapped(a).to_owned()));
        }
        let exported = read_lines("/proc/fs/nfsd/exports")
            .iter()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.split_whitespace().next().map(decode_path))
            .collect();
        // Each port has a line for each address family.
        let ports: BTreeSet<String> = read_lines("/proc/fs/nfsd/portlist").into_iter().collect();
        let memory = read_text("/proc/meminfo")
            .lines()
            .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
        ServerState {
            threads: ServerState::read_threads(),
            ports: ports.into_iter().collect(),
            clients,
            exported,
            versions: read_text("/proc/fs/nfsd/versions").trim().to_owned(),
            request_bytes: read_text("/proc/fs/nfsd/max_block_size").trim().parse().unwrap_or(0),
            memory_bytes: memory.unwrap_or(0) << 10,
        }
    }

    /// The threads alone; 0 without a running server.
    pub fn read_threads() -> u32 {
        std::fs::read_to_string("/proc/fs/nfsd/threads").ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
    }

    /// Whether the server accepts RDMA connections.
    pub fn serves_rdma(&self) -> bool {
        self.ports.iter().any(|port| port.starts_with("rdma "))
    }

    /// The port for RDMA connections.
    pub fn rdma_port(&self) -> Option<u16> {
        self.ports.iter().find_map(|port| port.strip_prefix("rdma ")?.trim().parse().ok())
    }

    /// The obstacle for clients of a version (`3`, `4.2`); `None` for a served version.
    pub fn refusal_of(&self, version: &str, settings: &NfsSettings) -> Option<String> {
        let above = version.split('.').next().unwrap_or(version);
        let off = |version: &str| self.versions.split(' ').any(|word| word.strip_prefix('-') == Some(version));
        // A server that is started follows nfs.conf; other settings stay.
        if self.threads == 0
            && let Some(setting) = settings.refusal_of(version)
        {
            return Some(format!("{setting} in nfs.conf"));
        }
        let stays = self.threads > 0 || !settings.switches_on(version);
        (stays && (off(above) || off(version))).then(|| format!("{} in /proc/fs/nfsd/versions", self.versions))
    }

    /// The largest request that the server has, or will have after the start.
    fn request_limit(&self) -> u32 {
        if self.request_bytes > 0 {
            return self.request_bytes;
        }
        // As nfsd_get_default_max_blksize().
        let mut bytes = EXPORT_REQUEST_BYTES;
        while u64::from(bytes) > self.memory_bytes >> 12 && bytes >= 8 * 1024 * 2 {
            bytes /= 2;
        }
        bytes
    }

    /// As JSON.
    pub fn to_json(&self) -> Value {
        json!({
            "threads": self.threads,
            "ports": self.ports,
            "versions": self.versions,
            "clients": self.clients,
            "exported": self.exported,
        })
    }
}

fn read_lines(path: &str) -> Vec<String> {
    read_text(path).lines().map(str::to_owned).collect::<Vec<_>>()
}

fn read_text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

fn trim_port(address: &str) -> &str {
    match address.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host.trim_matches(['[', ']']),
        _ => address,
    }
}

/// An IPv4 address in the clients' form.
pub(crate) fn trim_mapped(address: &str) -> &str {
    address.trim_start_matches("::ffff:")
}

pub(crate) fn decode_path(word: &str) -> String {
    String::from_utf8_lossy(&unescape_octal(word.as_bytes())).into_owned()
}

/// Whether the tools' table has an export.
pub(crate) fn is_exported(path: &Path) -> bool {
    exported_paths().any(|exported| Path::new(&exported) == path)
}

/// The tools' table.
const EXPORT_TABLE_FILE: &str = "/var/lib/nfs/etab";

/// The paths in the tools' table, under the clients' names.
fn exported_paths() -> impl Iterator<Item = String> {
    let table = std::fs::read_to_string(EXPORT_TABLE_FILE).unwrap_or_default();
    let paths: Vec<String> = table.lines().filter_map(|line| line.split_whitespace().next()).map(decode_path).collect();
    paths.into_iter()
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
        let settings = NfsSettings::read(root);
        let mut changes = Vec::new();
        // Another root holds another host's files: the server there is another.
        let here = root == Path::new("/");
        // First, as the likeliest to fail.
        if here && self.rdma && !Path::new("/sys/module/rpcrdma").is_dir() {
            changes.push(ServerChange::run(&["modprobe", "rpcrdma"]));
        }
        let id = self.id();
        let mut records = ExportRecord::read_all(root);
        for (replaced, _) in
            records.extract_if(.., |(other, record)| *other != id && record.mountpoint == self.mountpoint)
        {
            changes.push(ServerChange::Remove(root.join(exports_path(&replaced))));
        }
        records.retain(|(other, _)| *other != id);
        records.push((id, self.record()));
        let path = settings_path(root);
        let shared = settings_file(&settings, records.iter().map(|(_, record)| record));
        if shared.is_none() && path.exists() {
            changes.push(ServerChange::Remove(path));
        }
        for file in shared.into_iter().chain([self.exports_file()]) {
            let path = root.join(&file.path);
            if std::fs::read_to_string(&path).is_ok_and(|text| text == file.text) {
                continue;
            }
            changes.push(ServerChange::Write { path, text: file.text });
        }
        if !here {
            return changes;
        }
        let reload = ServerChange::Reload { path: self.shown_path.clone(), clients: self.clients.clone() };
        if server.threads > 0 {
            if !changes.is_empty() || !self.is_in_table(root) {
                changes.push(reload);
            }
            if self.rdma && !server.serves_rdma() {
                let word = format!("rdma {}", settings.rdma_port());
                changes.push(ServerChange::kernel("/proc/fs/nfsd/portlist", word));
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
        // The size can be set only while no thread runs.
        if server.request_limit() < EXPORT_REQUEST_BYTES {
            changes.push(ServerChange::kernel(REQUEST_FILE, EXPORT_REQUEST_BYTES));
        }
        if has_systemd() {
            changes.push(ServerChange::run(&["systemctl", "start", "nfs-server"]));
            changes.push(reload);
            return changes;
        }
        if !is_running("rpcbind") {
            changes.push(ServerChange::run(&["rpcbind"]));
        }
        changes.push(reload);
        // Adds the port of RDMA from nfs.conf, after the threads: the kernel refuses the port before.
        let threads = threads_at_start(&settings, records.iter().map(|(_, record)| record)).map(|n| n.to_string());
        changes.push(ServerChange::run(&[&["rpc.nfsd"], threads.as_deref().as_slice()].concat()));
        if !is_running("rpc.mountd") {
            changes.push(ServerChange::run(&["rpc.mountd"]));
        }
        changes
    }

    /// Whether the tools have read the export's table since the write.
    fn is_in_table(&self, root: &Path) -> bool {
        let written = modified_at(&root.join(exports_path(&self.id())));
        is_exported(&self.shown_path) && written.is_some() && modified_at(Path::new(EXPORT_TABLE_FILE)) >= written
    }
}

fn modified_at(path: &Path) -> Option<std::time::SystemTime> {
    std::fs::metadata(path).and_then(|m| m.modified()).ok()
}

/// Makes the changes of a plan in order, and records each. `prepare` is called when the export has its folder and no client has a
/// file handle yet; `each` gets each change before the application. Returns what `exportfs` reports of other exports.
///
/// # Errors
/// At the first change that fails. Changes before that stay, and [`remove_export`] takes them back.
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
    let mut record = ServerRecord::read(root);
    for change in &changes {
        match change {
            ServerChange::Run(words) if ["rpcbind", "rpc.mountd"].contains(&words[0].as_str()) => {
                record.programs.retain(|program| *program != words[0]);
                record.programs.push(words[0].clone());
            }
            ServerChange::Kernel { path, .. } if path == Path::new(REQUEST_FILE) => {
                record.request_bytes = record.request_bytes.or(Some(server.request_limit()));
            }
            ServerChange::Kernel { .. } => record.rdma_added = true,
            _ => {}
        }
    }
    record.write(root)?;
    plan.record().write(root, &id)?;
    prepare()?;
    let mut others = Vec::new();
    for change in &changes {
        each(change);
        let made = change.make();
        // Not before: a server that the administrator starts after a failure is not that of exports.
        if change.starts_server() && ServerState::read_threads() > 0 {
            record.started = true;
            record.write(root)?;
        }
        others.extend(made?);
    }
    // What was exported at this mountpoint before is not there any more.
    for (other, record) in ExportRecord::read_all(root) {
        if other != id && record.mountpoint == plan.mountpoint {
            remove_folder(&root.join(STATE_DIR).join(other))?;
        }
    }
    Ok(others)
}

/// The exports that were made at a mountpoint: the recorded exports, and that of the present source.
pub fn exports_at(root: &Path, mountpoint: &Path, source: Option<&str>) -> Vec<String> {
    let records = ExportRecord::read_all(root).into_iter().filter(|(_, record)| record.mountpoint == mountpoint);
    let mut ids: Vec<String> = records.map(|(id, _)| id).collect();
    let own = source.map(|source| export_id(source, mountpoint));
    ids.extend(own.filter(|id| !ids.contains(id) && root.join(exports_path(id)).exists()));
    ids
}

/// Takes exports of a mountpoint back: files, records and the names of inodes; the server too, if started for exports and without
/// other exports. Returns the remains.
///
/// # Errors
/// When a file can't be removed, or a command fails.
pub fn remove_export(
    ids: &[String],
    mountpoint: &Path,
    root: &Path,
    each: &mut dyn FnMut(&ServerChange),
) -> Result<Vec<String>> {
    let settings = NfsSettings::read(root);
    let (own, others): (Vec<_>, Vec<_>) =
        ExportRecord::read_all(root).into_iter().partition(|(id, _)| ids.contains(id));
    let mut changes: Vec<ServerChange> =
        ids.iter().map(|id| ServerChange::Remove(root.join(exports_path(id)))).collect();
    let path = settings_path(root);
    match settings_file(&settings, others.iter().map(|(_, record)| record)) {
        Some(file) if std::fs::read_to_string(&path).is_ok_and(|text| text == file.text) => {}
        Some(file) => changes.push(ServerChange::Write { path, text: file.text }),
        None if path.exists() => changes.push(ServerChange::Remove(path)),
        None => {}
    }
    let server = ServerState::read();
    let record = ServerRecord::read(root);
    let here = root == Path::new("/");
    let serves = here && server.threads > 0;
    let shown = removed_path(&own, &settings, mountpoint);
    if serves {
        changes.push(ServerChange::Reload { path: shown.clone(), clients: Vec::new() });
        // The kernel's cached exports hold the mount.
        changes.push(ServerChange::run(&["exportfs", "-f"]));
    }
    let mut make = |changes: &[ServerChange]| {
        changes.iter().try_for_each(|change| {
            each(change);
            change.make().map(drop)
        })
    };
    make(&changes)?;
    // Only now the table shows the exports of others.
    let exported: Vec<String> = if serves { exported_paths().collect() } else { Vec::new() };
    if serves && others.is_empty() && record.started && exported.is_empty() {
        let mut changes = vec![if has_systemd() {
            ServerChange::run(&["systemctl", "stop", "nfs-server"])
        } else {
            ServerChange::run(&["rpc.nfsd", "0"])
        }];
        changes.extend(record.request_bytes.map(|bytes| ServerChange::kernel(REQUEST_FILE, bytes)));
        make(&changes)?;
    }
    for id in ids {
        remove_folder(&root.join(STATE_DIR).join(id))?;
    }
    let before = server;
    let server = if here { ServerState::read() } else { ServerState::default() };
    let own_needs = own.iter().map(|(_, record)| record);
    let mut left = Vec::new();
    if exported.iter().any(|path| Path::new(path) == shown) {
        left.push(format!(
            "{} is exported by /etc/exports or another file of /etc/exports.d too, and stays so (`exportfs -v`)",
            shown.display()
        ));
    }
    if before.threads > 0 && server.threads > 0 {
        let asked = own_needs.clone().any(|record| record.rdma) && (record.rdma_added || record.started);
        let rdma = asked && !settings.serves_rdma() && others.iter().all(|(_, record)| !record.rdma);
        if let Some(port) = server.rdma_port().filter(|_| rdma) {
            left.push(format!("the server listens for RDMA at port {port} until it is started again"));
        }
        let wanted = others.iter().filter_map(|(_, record)| record.threads).chain(settings.threads()).max();
        let threads = own_needs.clone().any(|record| record.threads == Some(server.threads));
        if threads && wanted.is_none_or(|wanted| wanted < server.threads) {
            left.push(format!("the server has {} threads until it is started again", server.threads));
        }
    }
    if here && others.is_empty() {
        if let Some(bytes) = record.request_bytes.filter(|before| server.threads > 0 && *before < server.request_bytes)
        {
            let now = server.request_bytes;
            left.push(format!(
                "the largest request is {now} bytes, before it was {bytes}: {REQUEST_FILE}, while no thread runs"
            ));
        }
        let running: Vec<&str> = record.programs.iter().map(String::as_str).filter(|name| is_running(name)).collect();
        if !running.is_empty() {
            left.push(format!("{} still run; they were started for exports", running.join(" and ")));
        }
    }
    if others.is_empty() {
        ServerRecord::remove(root)?;
    }
    Ok(left)
}

/// The path, under the clients' name, of exports that are taken back. The root of exports may be another by now: the records have
/// the former.
fn removed_path(own: &[(String, ExportRecord)], settings: &NfsSettings, mountpoint: &Path) -> PathBuf {
    match own.first() {
        Some((_, record)) => record.shown_path.clone(),
        None => shown_path(settings, mountpoint).unwrap_or_else(|_| mountpoint.to_owned()),
    }
}

fn remove_folder(folder: &Path) -> Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(folder.display(), &e)),
        _ => Ok(()),
    }
}

/// Makes the kernel ask for all exports again at the next use, as `exportfs -f` does: the kernel still knows a mount that is
/// gone.
///
/// # Errors
/// When the kernel refuses that.
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

/// Answers the kernel's questions about an export that rpc.mountd left open while nothing was mounted there: else clients would
/// wait until the questions expire, two minutes. Question and answer are lines of the kernel's rpc-cache interface. Returns the
/// number of answers.
///
/// # Errors
/// When the kernel refuses an answer.
pub fn answer_waiting_clients(source: &str, mountpoint: &Path) -> Result<usize> {
    const HANDLE_CACHE_FILE: &str = "/proc/net/rpc/nfsd.fh";
    let Some(ExportRecord { fsid, .. }) = ExportRecord::read(Path::new("/"), &export_id(source, mountpoint)) else {
        return Ok(0);
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let open = std::fs::read_to_string(format!("{HANDLE_CACHE_FILE}/content")).unwrap_or_default();
    let mut answered = 0;
    for answer in open.lines().filter_map(|line| answer_to(line, &fsid, now + ANSWER_SECONDS, mountpoint)) {
        let path = format!("{HANDLE_CACHE_FILE}/channel");
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
    // The kernel shows the UUID as numbers of four bytes in this machine's order, and takes bytes.
    let bytes: String = fsid.chars().filter(|c| *c != '-').collect();
    let shown = (0..4).map(|n| reversed_bytes(bytes.get(8 * n..8 * n + 8)?)).collect::<Option<String>>()?;
    // FSID_UUID16, the kind of an export with a UUID.
    if kind != "6" || (hex != shown && hex != bytes) {
        return None;
    }
    Some(format!("{domain} {kind} \\x{bytes} {expires} {}\n", escape_path(mountpoint)))
}

fn reversed_bytes(word: &str) -> Option<String> {
    (0..4).rev().map(|n| word.get(2 * n..2 * n + 2)).collect::<Option<String>>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(folder: &str) -> ExportPlan {
        ExportPlan {
            mountpoint: folder.into(),
            shown_path: folder.into(),
            source: "s3://datasets".into(),
            writable_mount: false,
            clients: vec!["*".into()],
            writable: false,
            trust_root: false,
            rdma: true,
            threads: Some(8),
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
        // The kernel's own limit is as large on a host of 4 GiB, and an administrator may have raised it.
        for large in [
            ServerState { memory_bytes: 4 << 30, ..ServerState::default() },
            ServerState { request_bytes: 4 << 20, ..ServerState::default() },
        ] {
            assert!(position(&words(&large), "max_block_size").is_none());
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
        // Exports share the settings of the server, whatever the order in which they are made.
        let (a, b) = (plan("/mnt/a"), ExportPlan { rdma: false, source: "s3://others".into(), ..plan("/mnt/b") });
        let other = root.join("etc/exports.d/other.exports");
        std::fs::create_dir_all(other.parent().unwrap()).unwrap();
        std::fs::write(&other, "/srv *(ro)\n").unwrap();
        let settings = settings_path(root);
        for plan in [&a, &b] {
            let mut made = Vec::new();
            apply_plan(plan, root, &mut || Ok(()), &mut |change| made.push(change.command_line())).unwrap();
            assert!(!made.is_empty());
            // The same once more changes nothing.
            let mut again = 0;
            apply_plan(plan, root, &mut || Ok(()), &mut |_| again += 1).unwrap();
            assert_eq!(again, 0);
            assert!(std::fs::read_to_string(&settings).unwrap().contains("\nrdma=y\nrdma-port=20049\n"));
        }
        let remove = |plan: &ExportPlan| {
            let ids = exports_at(root, &plan.mountpoint, None);
            assert_eq!(ids, [plan.id()]);
            remove_export(&ids, &plan.mountpoint, root, &mut |_| {}).unwrap();
        };
        remove(&a);
        assert!(!std::fs::read_to_string(&settings).unwrap().contains("rdma"));
        assert!(!root.join(exports_path(&a.id())).exists() && !root.join(a.state_dir()).exists());
        assert!(root.join(exports_path(&b.id())).exists());
        remove(&b);
        assert!(!settings.exists() && other.exists());
        assert!(std::fs::read_dir(root.join(STATE_DIR)).unwrap().next().is_none());
        assert!(exports_at(root, &b.mountpoint, Some(&b.source)).is_empty(), "a second removal finds nothing");
    }

    #[test]
    fn another_source_at_a_mountpoint_replaces_the_export_that_was_there() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let (old, new) = (plan("/mnt/a"), ExportPlan { source: "s3://others".into(), ..plan("/mnt/a") });
        apply_plan(&old, root, &mut || Ok(()), &mut |_| {}).unwrap();
        assert_eq!(exports_at(root, Path::new("/mnt/a"), Some("s3://others")), [old.id()]);
        apply_plan(&new, root, &mut || Ok(()), &mut |_| {}).unwrap();
        assert_eq!(exports_at(root, Path::new("/mnt/a"), None), [new.id()]);
        assert!(!root.join(exports_path(&old.id())).exists() && !root.join(old.state_dir()).exists());
    }

    #[test]
    fn an_export_is_taken_back_by_the_path_that_it_was_made_with() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let plan = ExportPlan { shown_path: "/a".into(), ..plan("/srv/a") };
        apply_plan(&plan, root, &mut || Ok(()), &mut |_| {}).unwrap();
        std::fs::write(root.join("etc/nfs.conf"), "[exports]\nrootdir=/other\n").unwrap();
        let (own, settings) = (ExportRecord::read_all(root), NfsSettings::read(root));
        assert_eq!(removed_path(&own, &settings, &plan.mountpoint), Path::new("/a"));
        assert_eq!(removed_path(&[], &settings, &plan.mountpoint), plan.mountpoint, "outside of the root");
        assert_eq!(removed_path(&[], &settings, Path::new("/other/a")), Path::new("/a"));
        remove_export(&[plan.id()], &plan.mountpoint, root, &mut |_| {}).unwrap();
        assert!(ExportRecord::read_all(root).is_empty());
    }

    #[test]
    fn a_server_counts_as_started_only_once_it_is() {
        let root = tempfile::tempdir().unwrap();
        let failed = || Err(Error::new(spurline_types::ErrorKind::Unavailable, "the mount is gone"));
        apply_plan(&plan("/mnt/a"), root.path(), &mut { failed }, &mut |_| {}).unwrap_err();
        assert!(!crate::export_records::started_server(root.path()));
        let starts: Vec<ServerChange> = plan("/mnt/a")
            .changes(&ServerState::default(), Path::new("/"))
            .into_iter()
            .filter(ServerChange::starts_server)
            .collect();
        assert_eq!(starts.len(), 1, "{starts:?}");
    }

    #[test]
    fn versions_that_the_server_does_not_serve() {
        let settings = NfsSettings::default();
        // As Linux 6.1 shows it.
        let versions = "-3 +4 +4.1 +4.2".to_owned();
        let running = ServerState { threads: 3, versions, ..ServerState::default() };
        assert!(running.refusal_of("3", &settings).unwrap().contains("-3 +4"));
        assert_eq!(running.refusal_of("4.2", &settings), None);
        assert_eq!(ServerState::default().refusal_of("3", &settings), None);
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
    fn words_of_the_kernel() {
        assert_eq!(decode_path("/mnt/my\\040data"), "/mnt/my data");
        assert_eq!(trim_port("10.0.0.1:812"), "10.0.0.1");
        assert_eq!(trim_port("[fd00::1]:812"), "fd00::1");
    }
}
