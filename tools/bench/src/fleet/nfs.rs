//! The ten NFS cases: {v3, v4.2} x {TCP, RDMA} x {single connection, nconnect}, and several addresses with v4.2. This module
//! mounts an export for a run, reads the kernel's resulting connections, and unmounts. Runs no job.

use super::agents::AgentHost;
use crate::child;
use crate::error::{BenchError, Result};
use crate::places::split_name;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Longest wait for a mount of an export.
const NFS_MOUNT_TIMEOUT: Duration = Duration::from_secs(120);
/// The port of NFS over RDMA.
const NFS_RDMA_PORT: u16 = 20049;

/// How many connections a case asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Connections {
    /// The kernel's default: a single connection.
    One,
    /// `nconnect=N`.
    Nconnect,
    /// One for each address of the server (`max_connect`), which NFSv4.1 and later have.
    Addresses,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NfsCase {
    /// The name on the command line and in reports.
    pub name: &'static str,
    version: &'static str,
    pub rdma: bool,
    connections: Connections,
}

const fn case(name: &'static str, version: &'static str, rdma: bool, connections: Connections) -> NfsCase {
    NfsCase { name, version, rdma, connections }
}

pub const NFS_CASES: [NfsCase; 10] = [
    case("v3-tcp", "3", false, Connections::One),
    case("v3-tcp-nconnect", "3", false, Connections::Nconnect),
    case("v3-rdma", "3", true, Connections::One),
    case("v3-rdma-nconnect", "3", true, Connections::Nconnect),
    case("v4-tcp", "4.2", false, Connections::One),
    case("v4-tcp-nconnect", "4.2", false, Connections::Nconnect),
    case("v4-tcp-addresses", "4.2", false, Connections::Addresses),
    case("v4-rdma", "4.2", true, Connections::One),
    case("v4-rdma-nconnect", "4.2", true, Connections::Nconnect),
    case("v4-rdma-addresses", "4.2", true, Connections::Addresses),
];

impl NfsCase {
    /// The cases of these names; all when none is given.
    /// `Usage` for a name that is none.
    pub fn parse_all(names: &[String]) -> Result<Vec<NfsCase>> {
        if names.is_empty() {
            Ok(NFS_CASES.to_vec())
        } else {
            names
                .iter()
                .map(|name| {
                    let found = NFS_CASES.iter().find(|case| case.name == name).copied();
                    found
                        .ok_or_else(|| BenchError::Usage(format!("--nfs-case {name}: the cases are {}", known_cases())))
                })
                .collect()
        }
    }

    /// Options of mount(8).
    pub fn options(&self, nconnect: u32, addresses: usize) -> String {
        let mut words = vec![format!("vers={}", self.version)];
        words.push(if self.rdma { format!("proto=rdma,port={NFS_RDMA_PORT}") } else { "proto=tcp".to_owned() });
        if self.version == "3" {
            // No lock manager: neither end needs a port mapper.
            words.push("nolock,mountproto=tcp".to_owned());
        }
        match self.connections {
            Connections::One => {}
            Connections::Nconnect => words.push(format!("nconnect={nconnect}")),
            Connections::Addresses => words.push(format!("max_connect={addresses}")),
        }
        words.join(",")
    }

    /// Connections that the options ask for.
    pub fn asked(&self, nconnect: u32, addresses: usize) -> usize {
        match self.connections {
            Connections::One => 1,
            Connections::Nconnect => nconnect as usize,
            Connections::Addresses => addresses,
        }
    }
}

fn known_cases() -> String {
    NFS_CASES.map(|case| case.name).join(", ")
}

/// An export: `[NAME=]HOST[,HOST]:/PATH`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NfsExport {
    pub name: String,
    pub addresses: Vec<String>,
    path: String,
}

impl NfsExport {
    /// Parses the command line's form.
    /// `Usage` for any other text.
    pub fn parse(text: &str) -> Result<NfsExport> {
        let (name, place) = split_name(text);
        let (hosts, path) = place.split_once(":/").ok_or_else(|| no_export_error(text))?;
        let addresses: Vec<String> = hosts.split(',').map(str::to_owned).collect();
        // A name that begins with a dash would be an option of mount.
        if name.is_empty() || addresses.iter().any(|address| is_odd_host(address)) || path.contains(['\n', '\r']) {
            return Err(no_export_error(text));
        }
        Ok(NfsExport { name: name.to_owned(), addresses, path: format!("/{path}") })
    }
}

fn is_odd_host(host: &str) -> bool {
    host.is_empty() || host.starts_with('-') || host.contains(char::is_whitespace)
}

/// A case of an export: the mount of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NfsVariant {
    pub case: NfsCase,
    pub export: NfsExport,
    /// N of `nconnect=N`.
    pub nconnect: u32,
}

/// Runs words on a host of the run: here, or over ssh.
pub fn run_on(host: &AgentHost, ssh: bool, words: &[&str]) -> Result<String> {
    let command = if ssh {
        host.piped_command(words)?
    } else {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]);
        command
    };
    child::run_to_end(command, NFS_MOUNT_TIMEOUT).map(|done| done.out)
}

/// An export that is mounted on hosts, unmounted when dropped.
pub struct NfsMounts<'a> {
    hosts: &'a [AgentHost],
    ssh: bool,
    mounted: Vec<PathBuf>,
}

impl<'a> NfsMounts<'a> {
    /// Mounts on all hosts, at a folder below `at`; returns the mountpoint as well.
    /// `Missing` with what mount said.
    pub fn mount(
        hosts: &'a [AgentHost],
        ssh: bool,
        variant: &NfsVariant,
        at: &Path,
    ) -> Result<(NfsMounts<'a>, PathBuf)> {
        let NfsVariant { case, export, nconnect } = variant;
        let options = case.options(*nconnect, export.addresses.len());
        let mut mounts = NfsMounts { hosts, ssh, mounted: Vec::new() };
        // A further address joins the connections of the first mount, by a separate mount.
        let count = if case.connections == Connections::Addresses { export.addresses.len() } else { 1 };
        for (index, address) in export.addresses.iter().take(count).enumerate() {
            let dir = at.join(format!("nfs{index}"));
            let dir_text = dir.display().to_string();
            let place = format!("{address}:{}", export.path);
            for host in hosts {
                let on = |words: &[&str]| run_on(host, ssh, words);
                on(&["mkdir", "-p", &dir_text])?;
                mounts.mounted.insert(0, dir.clone());
                mounts.mounted.dedup();
                on(&["mount", "-t", "nfs", "-o", &options, &place, &dir_text])
                    .map_err(|error| why_not_mounted(error, host))?;
            }
        }
        Ok((mounts, at.join("nfs0")))
    }

    /// The connections that the kernel made, by transport: the `xprt:` lines of `/proc/self/mountstats` at `dir`, on the first host.
    pub fn connections(&self, dir: &Path) -> Result<BTreeMap<String, usize>> {
        let text = run_on(&self.hosts[0], self.ssh, &["cat", "/proc/self/mountstats"])?;
        Ok(count_connections(&text, &dir.display().to_string()))
    }
}

impl Drop for NfsMounts<'_> {
    fn drop(&mut self) {
        for host in self.hosts {
            for dir in &self.mounted {
                // Also after Ctrl-C, which `run_to_end` would see. A busy folder goes with the last user.
                let dir = dir.display().to_string();
                let script = "umount \"$0\" 2>/dev/null || umount -l \"$0\" 2>/dev/null; rmdir \"$0\" 2>/dev/null";
                let quoted = format!("'{script}'");
                let command = if self.ssh {
                    host.piped_command(&["sh", "-c", &quoted, &dir]).ok()
                } else {
                    let mut command = Command::new("sh");
                    command.args(["-c", script, &dir]);
                    Some(command)
                };
                let _ = command.map(|mut command| command.stdin(std::process::Stdio::null()).status());
            }
        }
    }
}

fn why_not_mounted(error: BenchError, host: &AgentHost) -> BenchError {
    let BenchError::Failed(why) = error else { return error };
    let says = |parts: [&str; 3]| parts.iter().any(|part| why.contains(part));
    let remedy = if says(["needs a program with a remote lock", "bad option; for several", "need a /sbin/mount"]) {
        "; apt install nfs-common there"
    } else if says(["must be superuser", "permission denied", "Operation not permitted"]) {
        "; mounting needs root"
    } else {
        ""
    };
    BenchError::Missing(format!("{}: {why}{remedy}", host.host))
}

/// Counts `xprt:` lines of the mount at `dir`.
fn count_connections(text: &str, dir: &str) -> BTreeMap<String, usize> {
    let mut counted = BTreeMap::new();
    let mut here = false;
    for line in text.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("device") => here = line.contains(&format!(" mounted on {dir} with ")),
            Some("xprt:") if here => {
                *counted.entry(words.next().unwrap_or("?").to_owned()).or_default() += 1;
            }
            _ => {}
        }
    }
    counted
}

/// Processor seconds that hosts have been busy, in all.
/// `Missing` for a host whose `/proc/stat` can't be read.
pub fn busy_of(hosts: &[AgentHost], ssh: bool) -> Result<f64> {
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    hosts
        .iter()
        .map(|host| {
            let missing = |why: &str| BenchError::Missing(format!("processor time of {}: {why}", host.host));
            let text = run_on(host, ssh, &["cat", "/proc/stat"]).map_err(|error| match error {
                BenchError::Failed(why) => missing(&why),
                error => error,
            })?;
            busy_seconds(&text, ticks).ok_or_else(|| missing("/proc/stat has no times"))
        })
        .sum()
}

/// Processor seconds that a whole machine has been busy, from the first line of `/proc/stat`.
fn busy_seconds(text: &str, ticks_per_second: f64) -> Option<f64> {
    let fields: Vec<f64> =
        text.lines().next()?.strip_prefix("cpu ")?.split_whitespace().filter_map(|w| w.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq; time taken by a hypervisor is not the machine's.
    let busy = [0, 1, 2, 5, 6].iter().filter_map(|index| fields.get(*index)).sum::<f64>();
    (fields.len() >= 7).then(|| busy / ticks_per_second)
}

/// The test of perftest that moves bytes as NFS does: the server writes the bytes of the client's reads, and reads those of the
/// client's writes.
pub fn perftest_program(writes: bool) -> &'static str {
    if writes { "ib_read_bw" } else { "ib_write_bw" }
}

/// Runs both ends of a test of perftest, the server's at `address` (here, or over ssh), and returns bytes per second.
/// `Missing` without perftest or RDMA; the message has the last lines.
pub fn run_perftest(program: &str, client: &AgentHost, ssh: bool, address: &str, log: &Path) -> Result<f64> {
    let options = ["-F", "-R", "-s", "1048576", "-n", "256", "-t", "16", "-p", "18611"];
    let server = AgentHost { host: address.to_owned(), port: 0 };
    let command = if ssh {
        server.ssh_command(&[&[program], &options[..]].concat())?
    } else {
        let mut command = Command::new(child::require_program(program, "perftest")?);
        command.args(options);
        command
    };
    let _server = child::ServerProcess::start(command, program, log)?;
    let words = [&[program], &options[..], &[address]].concat();
    // The server listens a moment after the start.
    let mut last = BenchError::Interrupted;
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(250));
        crate::stop::check_stop()?;
        match run_on(client, ssh, &words) {
            Ok(out) => {
                return parse_perftest(&out)
                    .ok_or_else(|| BenchError::Missing(format!("{program}: no figure in {out}")));
            }
            Err(error) => last = error,
        }
    }
    Err(BenchError::Missing(format!("{program} to {address}: {last}")))
}

/// The average of perftest's table, in bytes per second; the table has MiB.
fn parse_perftest(text: &str) -> Option<f64> {
    let line = text.lines().rev().find(|line| line.trim_start().starts_with(|c: char| c.is_ascii_digit()))?;
    let numbers: Vec<f64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    numbers.get(3).filter(|rate| **rate > 0.0).map(|rate| rate * f64::from(1u32 << 20))
}

fn no_export_error(text: &str) -> BenchError {
    BenchError::Usage(format!("--nfs '{text}': give [NAME=]HOST[,HOST]:/PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ten_cases_have_options() {
        let options = |name: &str| {
            let case = NfsCase::parse_all(&[name.to_owned()]).unwrap()[0];
            (case.options(4, 2), case.asked(4, 2))
        };
        assert_eq!(options("v3-tcp"), ("vers=3,proto=tcp,nolock,mountproto=tcp".into(), 1));
        assert_eq!(options("v4-rdma-nconnect"), ("vers=4.2,proto=rdma,port=20049,nconnect=4".into(), 4));
        assert_eq!(options("v4-tcp-addresses"), ("vers=4.2,proto=tcp,max_connect=2".into(), 2));
        assert_eq!(NfsCase::parse_all(&[]).unwrap().len(), 10);
        let error = NfsCase::parse_all(&["v5".to_owned()]).unwrap_err().to_string();
        assert!(error.contains("v3-rdma-nconnect"), "{error}");
    }

    #[test]
    fn exports_have_names_and_addresses() {
        let export = NfsExport::parse("tmpfs=10.0.0.1,10.0.1.1:/vmtmp/ram").unwrap();
        assert_eq!((&*export.name, export.addresses.len(), &*export.path), ("tmpfs", 2, "/vmtmp/ram"));
        assert_eq!(NfsExport::parse("nas:/data").unwrap().name, "nas:/data");
        for wrong in ["nas", "=nas:/x", "-o:/x", ":/x", "nas:x", "a b:/x"] {
            assert!(NfsExport::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_kernel_shows_what_it_made() {
        let text = "device proc mounted on /proc with fstype proc\n\
device 10.0.0.1:/a mounted on /m/nfs0 with fstype nfs4 statvers=1.1\n\txprt:\ttcp 0 1 2\n\txprt:\ttcp 0 1 2\n\
device 10.0.0.1:/b mounted on /m/nfs01 with fstype nfs statvers=1.1\n\txprt:\trdma 0 1\n";
        assert_eq!(count_connections(text, "/m/nfs0"), [("tcp".to_owned(), 2)].into());
        assert_eq!(count_connections(text, "/m/nfs01"), [("rdma".to_owned(), 1)].into());
        assert!(count_connections(text, "/m").is_empty());
        assert_eq!(busy_seconds("cpu  100 0 200 4000 5 10 90 77 0 0\ncpu0 1\n", 100.0), Some(4.0));
        assert_eq!(busy_seconds("intr 1", 100.0), None);
        let table = " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n 1048576    185              0.00               61.65              0.000062\n---\n";
        assert_eq!(parse_perftest(table), Some(61.65 * 1_048_576.0));
        assert_eq!(parse_perftest("no"), None);
    }

    #[test]
    fn a_mount_that_fails_says_what_to_do() {
        let host = AgentHost { host: "c1".into(), port: 1 };
        let error =
            why_not_mounted(BenchError::Failed("mount: bad option; for several filesystems (e.g. nfs)".into()), &host);
        assert!(matches!(&error, BenchError::Missing(why) if why.contains("nfs-common")), "{error}");
        assert!(why_not_mounted(BenchError::Failed("must be superuser".into()), &host).to_string().contains("root"));
    }
}
