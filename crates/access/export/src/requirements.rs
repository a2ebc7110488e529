//! What this host and this mount need before the kernel's NFS server can serve the mount; each with a remedy.

use crate::configuration::ExportPlan;
use crate::export_records::ExportRecord;
use crate::firewall::check_firewall;
use crate::kernel_server::ServerState;
use crate::server_settings::NfsSettings;
use spurline_fabric::HostFacts;
use spurline_sys::MountTable;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The requirement that NFSv3 clients can lock files.
pub const V3_LOCKS: &str = "nfsv3-locks";

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequirementState {
    /// Fulfilled.
    Met,
    /// Works, with a limit.
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

/// A requirement and the result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequirementOutcome {
    /// The requirement.
    pub name: &'static str,
    /// The result.
    pub state: RequirementState,
    /// What was seen.
    pub evidence: String,
    /// The remedy; empty if the requirement is met.
    pub remedy: String,
}

/// The facts of the mount table about the mount.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MountFacts {
    /// Mounted with allow_other.
    pub allow_other: bool,
    /// Mounted read-only.
    pub read_only: bool,
    /// Locks are set in the source, by requests of the kernel.
    pub source_locks: bool,
}

pub(crate) fn outcome(
    name: &'static str,
    state: RequirementState,
    evidence: impl Into<String>,
    remedy: impl Into<String>,
) -> RequirementOutcome {
    RequirementOutcome { name, state, evidence: evidence.into(), remedy: remedy.into() }
}

/// Checks everything that the plan needs on this host, beside the other exports.
pub fn check_requirements(
    plan: &ExportPlan,
    mount: &MountFacts,
    server: &ServerState,
    settings: &NfsSettings,
    exports: &[(String, ExportRecord)],
    host: &HostFacts,
) -> Vec<RequirementOutcome> {
    use RequirementState::{Limited, Met, Missing};
    let mut all = Vec::new();
    all.push(check_privilege());
    all.push(if mount.allow_other {
        outcome("allow_other", Met, "the mount serves all users", "")
    } else {
        outcome(
            "allow_other",
            Missing,
            "the mount serves only the user that made it, and the NFS server acts as the users of its clients",
            format!(
                "mount again with -o allow_other (umount {0}, then mount … {0} -o allow_other)",
                plan.mountpoint.display()
            ),
        )
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
    all.push(check_fsid(plan, exports));
    if plan.writable && mount.source_locks {
        // fuse_setlk() answers ENOLCK to lockd: there are no requests that are answered later.
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
    all.push(if tools.is_empty() {
        outcome("tools", Met, "exportfs, rpc.nfsd and rpc.mountd are installed", "")
    } else {
        outcome(
            "tools",
            Missing,
            format!("{} can't be found", tools.join(", ")),
            "install the NFS server's tools: nfs-kernel-server (Debian, Ubuntu) or nfs-utils (others)",
        )
    });
    // The folder /proc/fs/nfsd is there in every kernel.
    let file_systems = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    all.push(check_module(
        "nfsd",
        file_systems.lines().any(|line| line.ends_with("\tnfsd")),
        "the kernel has no NFS server; install its modules package",
    ));
    all.push(check_versions(server, settings));
    if plan.rdma {
        all.extend(check_rdma(server, settings, host));
    }
    if let Some(limit) = pseudo_root_limit(plan) {
        all.push(limit);
    } else {
        all.push(outcome("nfsv4-root", Met, "the folders above the mount can be shown to NFSv4 clients", ""));
    }
    all.push(check_firewall(plan.rdma));
    all
}

/// Checks the module, the device and the port of NFS over RDMA.
fn check_rdma(server: &ServerState, settings: &NfsSettings, host: &HostFacts) -> [RequirementOutcome; 3] {
    use RequirementState::{Limited, Met, Missing};
    let loaded = Path::new("/sys/module/rpcrdma").is_dir();
    let remedy = "install the module that belongs to the running RDMA drivers: with a vendor's drivers their own NFS over \
                  RDMA package, else the kernel's modules package";
    let module = match foreign_drivers().filter(|_| !loaded) {
        Some(evidence) => outcome("rpcrdma", Limited, evidence, remedy),
        None => check_module("rpcrdma", loaded, remedy),
    };
    let devices: Vec<&str> = host.devices.iter().map(|d| d.name.as_str()).collect();
    let device = if devices.is_empty() {
        outcome(
            "rdma-device",
            Missing,
            "this host has no RDMA device",
            "export without --rdma, or see `spurline net doctor`",
        )
    } else {
        outcome("rdma-device", Met, devices.join(", "), "")
    };
    let listens = server.rdma_port();
    let wanted = settings.rdma_port();
    let port = match listens.filter(|port| *port != wanted) {
        None => outcome("rdma-port", Met, format!("port {wanted}"), ""),
        Some(port) => outcome(
            "rdma-port",
            Limited,
            format!("the server listens at rdma {port} already, and a kernel's listener can't be closed"),
            format!("give clients that port, or restart the server to use {wanted}"),
        ),
    };
    [module, device, port]
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder| folder.join(name)).find(|file| file.is_file())
}

/// Root, with all rights of the host: root of a container or of a user namespace can't reach the kernel's server.
fn check_privilege() -> RequirementOutcome {
    let user = rustix::process::geteuid();
    if !user.is_root() {
        let remedy = "run it as root: the NFS server belongs to the kernel";
        return outcome("privilege", RequirementState::Missing, format!("this is user {}", user.as_raw()), remedy);
    }
    match missing_right(&read_text("/proc/self/uid_map"), &read_text("/proc/self/status")) {
        None => outcome("privilege", RequirementState::Met, "this is root", ""),
        Some(evidence) => outcome(
            "privilege",
            RequirementState::Missing,
            evidence,
            "run it as root of the host, or in a privileged container: the NFS server belongs to the kernel",
        ),
    }
}

fn read_text(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// The right that root lacks, by the map of users and the status.
fn missing_right(uid_map: &str, status: &str) -> Option<String> {
    const CAP_SYS_ADMIN: u32 = 21;
    let words: Vec<&str> = uid_map.split_whitespace().collect();
    // All users of the host, and no others.
    if !words.is_empty() && words != ["0", "0", "4294967295"] {
        return Some(format!("this is root of a user namespace ({} in /proc/self/uid_map)", words.join(" ")));
    }
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"))?;
    let rights = u64::from_str_radix(effective.trim(), 16).ok()?;
    (rights & (1 << CAP_SYS_ADMIN) == 0)
        .then(|| "this is root without CAP_SYS_ADMIN, as in an unprivileged container".to_owned())
}

/// Two mounts with the same file system id are a single mount for the server: clients of the second reach the first.
fn check_fsid(plan: &ExportPlan, exports: &[(String, ExportRecord)]) -> RequirementOutcome {
    let id = plan.id();
    let fsid = plan.fsid();
    let same = exports
        .iter()
        .find(|(other, record)| *other != id && record.fsid == fsid && record.mountpoint != plan.mountpoint);
    match same {
        None => outcome("fsid", RequirementState::Met, fsid, ""),
        Some((_, record)) => {
            let at = record.mountpoint.display();
            let kind = if plan.writable_mount { "writable" } else { "read-only" };
            outcome(
                "fsid",
                RequirementState::Missing,
                format!(
                    "{at} is exported, a {kind} mount of the same source: clients of this one would reach that one"
                ),
                format!("export one of them only: `spurline export {at} --remove` takes the other one back"),
            )
        }
    }
}

/// Exports change no version that the administrator has switched off.
fn check_versions(server: &ServerState, settings: &NfsSettings) -> RequirementOutcome {
    let refused: Vec<(&str, String)> =
        ["4.2", "3"].into_iter().filter_map(|version| Some((version, server.refusal_of(version, settings)?))).collect();
    match refused.as_slice() {
        [] => outcome("nfs-versions", RequirementState::Met, "NFSv3 and NFSv4.2", ""),
        [(version, why)] => {
            let other = if *version == "3" { "4.2" } else { "3" };
            outcome(
                "nfs-versions",
                RequirementState::Limited,
                format!("NFSv{version} is switched off ({why})"),
                format!("clients use NFSv{other}; {}", version_remedy(version)),
            )
        }
        [(_, why), ..] => outcome(
            "nfs-versions",
            RequirementState::Missing,
            format!("NFSv3 and NFSv4.2 are switched off ({why})"),
            version_remedy("4.2"),
        ),
    }
}

fn version_remedy(version: &str) -> String {
    format!("for NFSv{version}, set vers{version}=y in nfs.conf and start the server again")
}

/// Whether the RDMA drivers that run are a vendor's, while the module of NFS over RDMA is the kernel's: the symbols differ.
fn foreign_drivers() -> Option<String> {
    let taint = std::fs::read_to_string("/sys/module/ib_core/taint").unwrap_or_default();
    let said = Command::new("modinfo").args(["-F", "intree", "rpcrdma"]).stdin(Stdio::null()).output().ok()?;
    (taint.contains('O') && said.stdout.starts_with(b"Y")).then(|| {
        "ib_core is a vendor's module (/sys/module/ib_core/taint), and rpcrdma is the kernel's own: it may not load; --apply tries it"
            .to_owned()
    })
}

fn check_module(name: &'static str, loaded: bool, remedy: &str) -> RequirementOutcome {
    if loaded {
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

/// NFSv4 clients walk from the server's root to the mount, and not every file system can be shown there.
fn pseudo_root_limit(plan: &ExportPlan) -> Option<RequirementOutcome> {
    // The administrator has chosen a root of exports.
    if plan.shown_path != plan.mountpoint {
        return None;
    }
    let mountpoint = &plan.mountpoint;
    let table = MountTable::read().ok()?;
    let above = mountpoint.ancestors().skip(1);
    let mut topmost = above.filter_map(|dir| table.entries().iter().rev().find(|entry| entry.mountpoint == dir));
    let unfit = topmost.find(|entry| matches!(&*entry.fstype, "overlay" | "tmpfs" | "ramfs" | "squashfs" | "9p"));
    unfit.map(|entry| {
        let at = entry.mountpoint.display();
        let kind = &entry.fstype;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_requirement_has_a_remedy() {
        let plan = ExportPlan {
            mountpoint: "/mnt/a".into(),
            shown_path: "/mnt/a".into(),
            source: "/data".into(),
            writable_mount: true,
            clients: vec!["*".into()],
            writable: true,
            trust_root: false,
            rdma: true,
            threads: Some(8),
        };
        let facts = MountFacts { allow_other: false, read_only: true, source_locks: true };
        let check = |facts: &MountFacts| {
            let server = ServerState::default();
            let settings = NfsSettings::default();
            check_requirements(&plan, facts, &server, &settings, &[], &HostFacts::default())
        };
        let all = check(&facts);
        for name in ["allow_other", "writable", "rdma-device"] {
            let found = all.iter().find(|r| r.name == name).unwrap();
            assert!(found.state == RequirementState::Missing && !found.remedy.is_empty(), "{found:?}");
        }
        assert!(all.iter().all(|r| r.state == RequirementState::Met || !r.remedy.is_empty()), "{all:?}");
        let locks = all.iter().find(|r| r.name == "nfsv3-locks").unwrap();
        assert!(locks.state == RequirementState::Limited && locks.remedy.contains("--local-locks"), "{locks:?}");
        let facts = MountFacts { source_locks: false, ..facts };
        let all = check(&facts);
        assert!(all.iter().all(|r| r.name != "nfsv3-locks"), "{all:?}");
    }
    #[test]
    fn two_mounts_of_one_source_and_kind_are_not_both_exported() {
        let plan = |at: &str, writable_mount| ExportPlan {
            mountpoint: at.into(),
            shown_path: at.into(),
            source: "/data".into(),
            writable_mount,
            clients: vec!["*".into()],
            writable: false,
            trust_root: false,
            rdma: false,
            threads: None,
        };
        let first = plan("/mnt/a", true);
        let exports = [(first.id(), first.record())];
        let state = |plan: &ExportPlan| check_fsid(plan, &exports);
        assert_eq!(state(&first).state, RequirementState::Met, "the same once more");
        assert_eq!(state(&plan("/mnt/b", false)).state, RequirementState::Met, "a read-only mount has its own id");
        let same = state(&plan("/mnt/b", true));
        assert!(same.state == RequirementState::Missing && same.remedy.contains("export /mnt/a --remove"), "{same:?}");
        let other = ExportPlan { source: "/others".into(), ..plan("/mnt/b", true) };
        assert_eq!(state(&other).state, RequirementState::Met);
    }

    #[test]
    fn versions_that_are_switched_off_limit_clients() {
        let (mut server, settings) = (ServerState { threads: 8, ..ServerState::default() }, NfsSettings::default());
        assert_eq!(check_versions(&server, &settings).state, RequirementState::Met);
        // As Linux 6.1 shows them.
        server.versions = "-3 +4 +4.1 +4.2".into();
        let limited = check_versions(&server, &settings);
        assert!(limited.state == RequirementState::Limited && limited.remedy.contains("vers3=y"), "{limited:?}");
        server.versions = "-3 -4 -4.1 -4.2".into();
        assert_eq!(check_versions(&server, &settings).state, RequirementState::Missing);
    }

    #[test]
    fn root_of_a_user_namespace_is_not_root() {
        // As Linux 6.1 shows them, for root and after `unshare -Ur`.
        let status = "CapPrm:\t000001ffffffffff\nCapEff:\t000001ffffffffff\nCapBnd:\t000001ffffffffff\n";
        assert_eq!(missing_right("         0          0 4294967295\n", status), None);
        assert!(missing_right("         0          0          1\n", status).unwrap().contains("0 0 1"));
        // The rights that container engines leave by default.
        let few = "CapEff:\t00000000a80425fb\n";
        assert!(missing_right("         0          0 4294967295\n", few).unwrap().contains("CAP_SYS_ADMIN"));
    }
}
