//! What this host and this mount need before the kernel's NFS server can serve the mount; each with a remedy.

use crate::configuration::ExportPlan;
use crate::kernel_server::ServerState;
use spurline_fabric::HostFacts;
use spurline_types::octal::unescape_octal;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The requirement that NFSv3 clients can lock files.
pub const V3_LOCKS: &str = "nfsv3-locks";

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequirementState {
    /// Fulfilled.
    Met,
    /// It works, with a limit.
    Limited,
    /// The export can't work.
    Missing,
}

impl RequirementState {
    /// As a word of JSON.
    pub fn word(self) -> &'static str {
        match self {
            RequirementState::Met => "ok",
            RequirementState::Limited => "warning",
            RequirementState::Missing => "error",
        }
    }
}

/// A requirement and its result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequirementOutcome {
    /// What is required.
    pub name: &'static str,
    /// The result.
    pub state: RequirementState,
    /// What was seen.
    pub evidence: String,
    /// What to do; empty if it is met.
    pub remedy: String,
}

/// What the mount table says of the mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MountFacts {
    /// Mounted with allow_other.
    pub allow_other: bool,
    /// Mounted read-only.
    pub read_only: bool,
    /// Locks are set in the source, by requests of the kernel.
    pub source_locks: bool,
}

fn outcome(
    name: &'static str,
    state: RequirementState,
    evidence: impl Into<String>,
    remedy: impl Into<String>,
) -> RequirementOutcome {
    RequirementOutcome { name, state, evidence: evidence.into(), remedy: remedy.into() }
}

/// Checks everything that the plan needs on this host.
pub fn check_requirements(
    plan: &ExportPlan,
    mount: &MountFacts,
    server: &ServerState,
    host: &HostFacts,
) -> Vec<RequirementOutcome> {
    use RequirementState::{Limited, Met, Missing};
    let mut all = Vec::new();
    let root = rustix::process::geteuid().is_root();
    all.push(match root {
        true => outcome("privilege", Met, "this is root", ""),
        false => outcome(
            "privilege",
            Missing,
            format!("this is user {}", rustix::process::geteuid().as_raw()),
            "run it as root: the NFS server belongs to the kernel",
        ),
    });
    all.push(match mount.allow_other {
        true => outcome("allow_other", Met, "the mount serves all users", ""),
        false => outcome(
            "allow_other",
            Missing,
            "the mount serves only the user that made it, and the NFS server acts as the users of its clients",
            format!(
                "mount again with -o allow_other (umount {0}, then mount … {0} -o allow_other)",
                plan.mountpoint.display()
            ),
        ),
    });
    all.push(match (plan.writable, mount.read_only) {
        (true, true) => outcome(
            "writable",
            Missing,
            "--rw was given, and the mount is read-only",
            "mount with --rw, or export without it",
        ),
        (true, false) => outcome("writable", Met, "the mount can be written", ""),
        (false, _) => outcome("writable", Met, "exported read-only", ""),
    });
    if plan.writable && mount.source_locks {
        // fuse_setlk() answers ENOLCK to lockd: it has no requests that are answered later.
        all.push(outcome(
            V3_LOCKS,
            Limited,
            "the kernel refuses locks of NFSv3 clients (NLM) with ENOLCK on a mount that sets locks in the source; NFSv4 has them",
            "use NFSv4, or mount with --local-locks (locks then hold among this mount's programs and clients only); the client's \
             nolock keeps them on that client",
        ));
    }
    let tools: Vec<&str> =
        ["exportfs", "rpc.nfsd", "rpc.mountd"].into_iter().filter(|tool| find_program(tool).is_none()).collect();
    all.push(match tools.is_empty() {
        true => outcome("tools", Met, "exportfs, rpc.nfsd and rpc.mountd are installed", ""),
        false => outcome(
            "tools",
            Missing,
            format!("{} can't be found", tools.join(", ")),
            "install the NFS server's tools: nfs-kernel-server (Debian, Ubuntu) or nfs-utils (others)",
        ),
    });
    all.push(check_module(
        "nfsd",
        Path::new("/proc/fs/nfsd"),
        "the kernel has no NFS server; install its modules package",
    ));
    if plan.rdma {
        all.push(check_module(
            "rpcrdma",
            Path::new("/sys/module/rpcrdma"),
            "install the module that belongs to the running RDMA drivers: with a vendor's drivers their own NFS over RDMA \
             package, else the kernel's modules package",
        ));
        let devices: Vec<&str> = host.devices.iter().map(|d| d.name.as_str()).collect();
        all.push(match devices.is_empty() {
            false => outcome("rdma-device", Met, devices.join(", "), ""),
            true => outcome(
                "rdma-device",
                Missing,
                "this host has no RDMA device",
                "export without --rdma, or see `spurline net doctor`",
            ),
        });
        let foreign = server.ports.iter().find(|port| port.starts_with("rdma ") && !port.ends_with(" 20049"));
        all.push(match foreign {
            None => outcome("rdma-port", Met, "port 20049", ""),
            Some(port) => outcome(
                "rdma-port",
                Limited,
                format!("the server listens at {port} already"),
                "give clients that port, or restart the server to use 20049",
            ),
        });
    }
    if let Some(limit) = pseudo_root_limit(plan) {
        all.push(limit);
    } else {
        all.push(outcome("nfsv4-root", Met, "the folders above the mount can be shown to NFSv4 clients", ""));
    }
    all.push(check_firewall(plan.rdma));
    all
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn check_module(name: &'static str, loaded: &Path, remedy: &str) -> RequirementOutcome {
    if loaded.is_dir() {
        return outcome(name, RequirementState::Met, "loaded", "");
    }
    let out = Command::new("modprobe").args(["--dry-run", "--quiet", name]).stdin(Stdio::null()).output();
    if out.is_ok_and(|out| out.status.success()) {
        return outcome(name, RequirementState::Met, "can be loaded", "");
    }
    let inside = Path::new("/run/.containerenv").exists() || Path::new("/.dockerenv").exists();
    let remedy = if inside { "run it on the host: a container can't load modules of the kernel" } else { remedy };
    outcome(name, RequirementState::Missing, format!("modprobe finds no module {name} for this kernel"), remedy)
}

/// NFSv4 clients walk from the server's root to the mount, and not every file system can be shown to them.
fn pseudo_root_limit(plan: &ExportPlan) -> Option<RequirementOutcome> {
    // The administrator has chosen a root of exports.
    if plan.shown_path != plan.mountpoint {
        return None;
    }
    let mountpoint = &plan.mountpoint;
    let table = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mounts: Vec<(PathBuf, &str)> = table
        .lines()
        .filter_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            let at = unescape_octal(left.split(' ').nth(4)?.as_bytes());
            Some((PathBuf::from(OsString::from_vec(at)), right.split(' ').next()?))
        })
        .collect();
    let above = mountpoint.ancestors().skip(1);
    let kinds = above.filter_map(|dir| mounts.iter().rev().find(|(at, _)| at == dir));
    let unfit = kinds.into_iter().find(|(_, kind)| matches!(*kind, "overlay" | "tmpfs" | "ramfs" | "squashfs" | "9p"));
    unfit.map(|(at, kind)| {
        let at = at.display();
        outcome(
            "nfsv4-root",
            RequirementState::Limited,
            format!("{at} is {kind}, which the server can't show to NFSv4 clients without a setting; NFSv3 is not affected"),
            format!(
                "mount below a disk's file system, or make {} the root of all exports: [exports] rootdir={0} in /etc/nfs.conf",
                mountpoint.parent().unwrap_or(Path::new("/")).display()
            ),
        )
    })
}

fn check_firewall(rdma: bool) -> RequirementOutcome {
    let ufw =
        std::fs::read_to_string("/etc/ufw/ufw.conf").is_ok_and(|text| text.lines().any(|l| l.trim() == "ENABLED=yes"));
    let firewalld = Path::new("/run/firewalld").is_dir();
    let more = if rdma { "; RDMA passes a host's firewall by, but switches may filter it" } else { "" };
    match (ufw, firewalld) {
        (false, false) => outcome("firewall", RequirementState::Met, "neither ufw nor firewalld is active", ""),
        (true, _) => outcome(
            "firewall",
            RequirementState::Limited,
            "ufw is active",
            format!("allow the clients: ufw allow from CLIENTS to any port 2049,111,20048 proto tcp{more}"),
        ),
        (_, true) => outcome(
            "firewall",
            RequirementState::Limited,
            "firewalld is active",
            format!("allow the clients: firewall-cmd --add-service={{nfs,rpc-bind,mountd}}{more}"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_requirement_has_a_remedy() {
        let plan = ExportPlan {
            mountpoint: "/mnt/a".into(),
            shown_path: "/mnt/a".into(),
            source: "/data".into(),
            clients: vec!["*".into()],
            writable: true,
            trust_root: false,
            rdma: true,
            threads: 8,
        };
        let facts = MountFacts { allow_other: false, read_only: true, source_locks: true };
        let all = check_requirements(&plan, &facts, &ServerState::default(), &HostFacts::default());
        for name in ["allow_other", "writable", "rdma-device"] {
            let found = all.iter().find(|r| r.name == name).unwrap();
            assert!(found.state == RequirementState::Missing && !found.remedy.is_empty(), "{found:?}");
        }
        assert!(all.iter().all(|r| r.state == RequirementState::Met || !r.remedy.is_empty()), "{all:?}");
        let locks = all.iter().find(|r| r.name == "nfsv3-locks").unwrap();
        assert!(locks.state == RequirementState::Limited && locks.remedy.contains("--local-locks"), "{locks:?}");
        let facts = MountFacts { source_locks: false, ..facts };
        let all = check_requirements(&plan, &facts, &ServerState::default(), &HostFacts::default());
        assert!(all.iter().all(|r| r.name != "nfsv3-locks"), "{all:?}");
    }
}
