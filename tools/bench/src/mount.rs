//! Mounts and nodes under test as separate processes: started, waited for, queried for counters, unmounted. Knows only the
//! command line of `spurline`.

use crate::child::{self, ServerProcess};
use crate::error::{BenchError, Result};
use crate::stop;
use serde_json::Value;
use spurline_sys::MountTable;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait for a mount or node to respond.
const MOUNT_START_TIMEOUT: Duration = Duration::from_secs(60);

/// A mounted file system and the process behind.
#[derive(Debug)]
pub struct MountUnderTest {
    daemon: ServerProcess,
    program: PathBuf,
    at: PathBuf,
    net: Option<String>,
    /// Seconds from the start of the process to the first answer.
    pub started_in: f64,
}

impl MountUnderTest {
    /// Runs `command`, which mounts at `at`, and waits for a response. `program` queries the counters, from the namespace `net`.
    /// Without a response, with the end of the log.
    pub fn start(command: Command, program: &Path, at: &Path, net: Option<&str>, log: &Path) -> Result<Self> {
        std::fs::create_dir_all(at).map_err(|e| BenchError::io(at.display(), &e))?;
        if rustix::fs::access("/dev/fuse", rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK).is_err() {
            return Err(BenchError::Missing(
                "/dev/fuse can't be opened: needs the fuse module, and root or its group".into(),
            ));
        }
        let outside = std::fs::metadata(at).map_err(|e| BenchError::io(at.display(), &e))?.dev();
        let start = Instant::now();
        let daemon = ServerProcess::start(command, "the mount", log)?;
        let mut mounted = MountUnderTest {
            daemon,
            program: program.to_owned(),
            at: at.to_owned(),
            net: net.map(str::to_owned),
            started_in: 0.0,
        };
        let daemon = &mut mounted.daemon;
        stop::wait_until("the mount to answer", MOUNT_START_TIMEOUT, Duration::from_micros(500), || {
            daemon.check_alive()?;
            let there = std::fs::metadata(at).is_ok_and(|m| m.dev() != outside);
            Ok((there && std::fs::read_dir(at).is_ok()).then_some(()))
        })?;
        mounted.started_in = start.elapsed().as_secs_f64();
        Ok(mounted)
    }

    pub fn at(&self) -> &Path {
        &self.at
    }

    pub fn daemon(&self) -> &ServerProcess {
        &self.daemon
    }

    pub fn counters(&self) -> Result<CounterValues> {
        query_counters(&self.program, &self.at.display().to_string(), self.net.as_deref())
    }

    /// The log line on the kind of FUSE session.
    pub fn session_line(&self) -> Option<String> {
        let log = std::fs::read_to_string(self.daemon.log()).ok()?;
        let line = log.lines().find(|l| l.contains("/dev/fuse") || l.contains("FUSE over io_uring"))?;
        Some(line.to_owned())
    }
}

impl Drop for MountUnderTest {
    fn drop(&mut self) {
        self.daemon.end(Duration::from_secs(10));
        if is_mounted(&self.at) {
            // Once detached, the mount ends with the last user.
            let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// Whether `at` is a mountpoint.
pub fn is_mounted(at: &Path) -> bool {
    let table = MountTable::read().unwrap_or_default();
    table.entries().iter().any(|entry| entry.mountpoint == at)
}

/// The folder above which another device begins.
pub fn mountpoint_of(dir: &Path) -> PathBuf {
    let own = device_of(dir);
    let above = dir.ancestors().take_while(|path| device_of(path) == own).last();
    above.unwrap_or(dir).to_owned()
}

fn device_of(path: &Path) -> Option<u64> {
    std::fs::metadata(path).map(|known| known.dev()).ok()
}

/// A node and the address.
#[derive(Debug)]
pub struct NodeUnderTest {
    daemon: ServerProcess,
    program: PathBuf,
    /// `IP:PORT`.
    pub addr: String,
    net: Option<String>,
}

impl NodeUnderTest {
    /// Runs `command` and waits until the node listens at `addr`. `program` queries the counters, from the namespace `net`.
    /// Without a listener, with the end of the log.
    pub fn start(command: Command, program: &Path, addr: &str, net: Option<&str>, log: &Path) -> Result<Self> {
        let daemon = ServerProcess::start(command, "the node", log)?;
        let net = net.map(str::to_owned);
        let mut node = NodeUnderTest { daemon, program: program.to_owned(), addr: addr.to_owned(), net };
        let daemon = &mut node.daemon;
        stop::wait_until("the node to listen", MOUNT_START_TIMEOUT, Duration::from_millis(5), || {
            daemon.check_alive()?;
            Ok(has_listener(daemon.pid(), addr).then_some(()))
        })?;
        Ok(node)
    }

    pub fn daemon(&self) -> &ServerProcess {
        &self.daemon
    }

    pub fn counters(&self) -> Result<CounterValues> {
        query_counters(&self.program, &self.addr, self.net.as_deref())
    }
}

/// Whether the network namespace of process `pid` has a listener at `addr`, without a connection.
fn has_listener(pid: u32, addr: &str) -> bool {
    let Some(port) = addr.rsplit(':').next().and_then(|p| p.parse::<u16>().ok()) else { return false };
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|l| {
            let mut fields = l.split_ascii_whitespace();
            let local = fields.nth(1).unwrap_or("");
            let state = fields.nth(1).unwrap_or("");
            local.ends_with(&wanted) && state == "0A"
        })
    })
}

/// Counters by `section.name`.
pub type CounterValues = BTreeMap<String, u64>;

/// Queries the counters of a mount or node.
pub fn query_counters(spurline: &Path, target: &str, net: Option<&str>) -> Result<CounterValues> {
    let mut command = child::command_in(spurline, net);
    command.args(["stats", target, "--json", "-c", "1"]);
    let done = child::run_to_end(command, Duration::from_secs(20))?;
    parse_counters(&done.out)
}

/// Reads what `stats --json` printed.
pub fn parse_counters(text: &str) -> Result<CounterValues> {
    let line = text.lines().find(|l| l.starts_with('{')).unwrap_or_default();
    let json: Value =
        serde_json::from_str(line).map_err(|e| BenchError::Failed(format!("stats: no JSON ({e}): {text}")))?;
    let mut all = CounterValues::new();
    for (section, values) in json.as_object().into_iter().flatten() {
        for (name, value) in values.as_object().into_iter().flatten() {
            if let Some(n) = value.as_u64() {
                all.insert(format!("{section}.{name}"), n);
            }
        }
    }
    Ok(all)
}

/// A counter, zero where absent.
pub fn counter(values: &CounterValues, name: &str) -> u64 {
    values.get(name).copied().unwrap_or(0)
}

/// The counters that grew, and by how much.
pub fn counter_growth(before: &CounterValues, after: &CounterValues) -> CounterValues {
    after
        .iter()
        .filter_map(|(name, &now)| {
            let grown = now.saturating_sub(counter(before, name));
            (grown > 0).then(|| (name.clone(), grown))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let before =
            parse_counters("warning\n{\"fuse\":{\"ops\":3,\"read_bytes\":10},\"tcp\":{\"recv_bytes\":0}}\n").unwrap();
        let after = parse_counters("{\"fuse\":{\"ops\":3,\"read_bytes\":15},\"tcp\":{\"recv_bytes\":7}}").unwrap();
        let grown = counter_growth(&before, &after);
        assert_eq!(grown.len(), 2);
        assert_eq!((grown["fuse.read_bytes"], grown["tcp.recv_bytes"]), (5, 7));
        assert!(parse_counters("no").is_err());
    }

    #[test]
    fn listeners_are_seen_from_outside() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        assert!(has_listener(std::process::id(), &addr));
        drop(listener);
        assert!(!has_listener(std::process::id(), &addr));
    }

    #[test]
    fn mountpoints_are_found_above() {
        assert_eq!(mountpoint_of(Path::new("/proc/self")), Path::new("/proc"));
        assert_eq!(mountpoint_of(Path::new("/")), Path::new("/"));
    }

    #[test]
    fn mounts_are_seen() {
        assert!(is_mounted(Path::new("/proc")));
        assert!(!is_mounted(Path::new("/proc/self")));
    }
}
