//! Mounts and nodes under test as processes of their own: started, waited for until they answer, asked for their
//! counters, unmounted. It knows the command line of `spurline`, nothing of its inside.

use crate::child::{self, Daemon};
use crate::error::{Error, Result};
use crate::stop;
use serde_json::Value;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Longest wait for a mount or node to answer.
const START: Duration = Duration::from_secs(60);

/// A mounted file system and the process behind it.
#[derive(Debug)]
pub struct Mounted {
    daemon: Daemon,
    at: PathBuf,
    net: Option<String>,
    /// Seconds from the start of the process to the first answer.
    pub started_in: f64,
}

impl Mounted {
    /// Runs `command`, which mounts at `at`, and waits until that answers. `net` is where its counters are asked for.
    ///
    /// # Errors
    /// When it does not, with the end of its log.
    pub fn start(command: Command, at: &Path, net: Option<&str>, log: &Path) -> Result<Self> {
        std::fs::create_dir_all(at).map_err(|e| Error::io(at.display(), &e))?;
        if rustix::fs::access("/dev/fuse", rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK).is_err() {
            return Err(Error::Missing(
                "/dev/fuse can't be opened: needs the fuse module, and root or its group".into(),
            ));
        }
        let outside = std::fs::metadata(at).map_err(|e| Error::io(at.display(), &e))?.dev();
        let start = Instant::now();
        let daemon = Daemon::start(command, "the mount", log)?;
        let mut mounted = Mounted { daemon, at: at.to_owned(), net: net.map(str::to_owned), started_in: 0.0 };
        let daemon = &mut mounted.daemon;
        stop::wait("the mount to answer", START, Duration::from_micros(500), || {
            daemon.alive()?;
            let there = std::fs::metadata(at).is_ok_and(|m| m.dev() != outside);
            Ok((there && std::fs::read_dir(at).is_ok()).then_some(()))
        })?;
        mounted.started_in = start.elapsed().as_secs_f64();
        Ok(mounted)
    }

    /// Where it is mounted.
    pub fn at(&self) -> &Path {
        &self.at
    }

    /// The process behind it.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Its counters.
    ///
    /// # Errors
    /// When it does not tell.
    pub fn counters(&self, spurline: &Path) -> Result<Counters> {
        counters(spurline, &self.at.display().to_string(), self.net.as_deref())
    }

    /// What its log says of the kind of FUSE session.
    pub fn session(&self) -> Option<String> {
        let log = std::fs::read_to_string(self.daemon.log()).ok()?;
        let line = log.lines().find(|l| l.contains("/dev/fuse") || l.contains("FUSE over io_uring"))?;
        Some(line.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.daemon.end(Duration::from_secs(10));
        if is_mounted(&self.at) {
            // Detached, it goes when its last user does.
            let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        }
    }
}

/// Whether something is mounted exactly here.
pub fn is_mounted(at: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().filter_map(|l| l.split(' ').nth(1)).any(|m| Path::new(m) == at)
}

/// A node and its address.
#[derive(Debug)]
pub struct Node {
    daemon: Daemon,
    /// `IP:PORT`.
    pub addr: String,
    net: Option<String>,
    /// Seconds from the start of the process until it accepted a connection.
    pub started_in: f64,
}

impl Node {
    /// Runs `spurline node words…` in `net` and waits until `addr` takes a connection.
    ///
    /// # Errors
    /// When it does not, with the end of its log.
    pub fn start(spurline: &Path, words: &[String], addr: &str, net: Option<&str>, log: &Path) -> Result<Self> {
        let mut command = child::command(spurline, net);
        command.arg("node").args(words);
        let start = Instant::now();
        let daemon = Daemon::start(command, "the node", log)?;
        let mut node = Node { daemon, addr: addr.to_owned(), net: net.map(str::to_owned), started_in: 0.0 };
        let daemon = &mut node.daemon;
        stop::wait("the node to listen", START, Duration::from_millis(5), || {
            daemon.alive()?;
            Ok(listens(daemon.pid(), addr).then_some(()))
        })?;
        node.started_in = start.elapsed().as_secs_f64();
        Ok(node)
    }

    /// Its process.
    pub fn daemon(&self) -> &Daemon {
        &self.daemon
    }

    /// Its counters.
    ///
    /// # Errors
    /// When it does not tell.
    pub fn counters(&self, spurline: &Path) -> Result<Counters> {
        counters(spurline, &self.addr, self.net.as_deref())
    }
}

/// Whether the network namespace of process `pid` has a listener at `addr`: seen from outside, without connecting.
fn listens(pid: u32, addr: &str) -> bool {
    let Some(port) = addr.rsplit(':').next().and_then(|p| p.parse::<u16>().ok()) else { return false };
    let wanted = format!(":{port:04X}");
    ["tcp", "tcp6"].iter().any(|table| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/net/{table}")).unwrap_or_default();
        text.lines().skip(1).any(|l| {
            let mut fields = l.split_ascii_whitespace();
            let (local, state) = (fields.nth(1).unwrap_or(""), fields.nth(1).unwrap_or(""));
            local.ends_with(&wanted) && state == "0A"
        })
    })
}

/// Counters by `section.name`.
pub type Counters = BTreeMap<String, u64>;

/// Asks a mount or node for its counters.
///
/// # Errors
/// When it does not tell.
pub fn counters(spurline: &Path, target: &str, net: Option<&str>) -> Result<Counters> {
    let mut command = child::command(spurline, net);
    command.args(["stats", target, "--json", "-c", "1"]);
    let done = child::run(command, Duration::from_secs(20))?;
    flatten(&done.out)
}

fn flatten(text: &str) -> Result<Counters> {
    let line = text.lines().find(|l| l.starts_with('{')).unwrap_or_default();
    let json: Value = serde_json::from_str(line).map_err(|e| Error::Failed(format!("stats: no JSON ({e}): {text}")))?;
    let mut all = Counters::new();
    for (section, values) in json.as_object().into_iter().flatten() {
        for (name, value) in values.as_object().into_iter().flatten() {
            if let Some(n) = value.as_u64() {
                all.insert(format!("{section}.{name}"), n);
            }
        }
    }
    Ok(all)
}

/// How much each counter grew, those that did not left out.
pub fn growth(before: &Counters, after: &Counters) -> Counters {
    after
        .iter()
        .filter_map(|(name, &now)| {
            let grown = now.saturating_sub(before.get(name).copied().unwrap_or(0));
            (grown > 0).then(|| (name.clone(), grown))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read() {
        let before = flatten("warning\n{\"fuse\":{\"ops\":3,\"read_bytes\":10},\"tcp\":{\"recv_bytes\":0}}\n").unwrap();
        let after = flatten("{\"fuse\":{\"ops\":3,\"read_bytes\":15},\"tcp\":{\"recv_bytes\":7}}").unwrap();
        let grown = growth(&before, &after);
        assert_eq!(grown.len(), 2);
        assert_eq!((grown["fuse.read_bytes"], grown["tcp.recv_bytes"]), (5, 7));
        assert!(flatten("no").is_err());
    }

    #[test]
    fn listeners_are_seen_from_outside() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        assert!(listens(std::process::id(), &addr));
        drop(listener);
        assert!(!listens(std::process::id(), &addr));
    }

    #[test]
    fn mounts_are_seen() {
        assert!(is_mounted(Path::new("/proc")));
        assert!(!is_mounted(Path::new("/proc/self")));
    }
}
