//! Checks of limits: locked memory, open files, pipes, huge pages, processor frequency.

use crate::doctor::CheckInput;
use crate::finding::{HostFinding, Severity, id};

/// Recommended minimum of open files: a connection for each peer and path, a file for each block being written.
const RECOMMENDED_OPEN_FILES: u64 = 65_536;

/// Pipes that JuiceFS's splice mode needs.
const SPLICE_PIPE: u64 = 8 << 20;
/// The pipe of a `sendfile`, which a node's splice mode uses.
const SENDFILE_PIPE: u64 = 64 << 10;

/// Runs the checks.
pub fn check_limits(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    if let Some(limit) = case.machine.pipe_max_size.filter(|limit| *limit < SPLICE_PIPE) {
        const PIPE_SIZE_REMEDY: &str = "sysctl -w fs.pipe-max-size=8388608, for good in /etc/sysctl.d/90-pipes.conf";
        let small = limit < SENDFILE_PIPE;
        let severity = if small { Severity::Warning } else { Severity::Info };
        let why = if small {
            "sendfile, which --iorpc-mode splice of a node uses, moves less than 65536 bytes at a time"
        } else {
            "enough for --iorpc-mode splice of a node, which uses sendfile; splice in JuiceFS needs 8388608"
        };
        let remedy = if small {
            PIPE_SIZE_REMEDY.to_owned()
        } else {
            format!("nothing for Spurline; if JuiceFS uses splice on {}: {PIPE_SIZE_REMEDY}", case.name_of("host"))
        };
        let evidence = format!("/proc/sys/fs/pipe-max-size is {limit}: {why}");
        found.push(HostFinding::new(id::PIPE_MAX_SIZE, severity, case.name_of("host"), evidence, remedy));
    }
    if !case.wants_rdma() {
        return;
    }
    check_memlock(case, found);
    let machine = case.machine;
    if let Some((soft, hard)) = machine.open_files.filter(|(soft, hard)| *soft < 1024 || *hard < RECOMMENDED_OPEN_FILES)
    {
        found.push(HostFinding::new(
            id::OPEN_FILES,
            Severity::Warning,
            case.name_of("shell"),
            format!("/proc/self/limits: open files {soft}, at most {hard}"),
            "in the unit: LimitNOFILE=1048576; in a shell: ulimit -n 65536, for good in /etc/security/limits.d/90-nofile.conf: * - nofile 1048576",
        ));
    }
    if let Some((0, size)) = machine.huge_pages {
        found.push(HostFinding::new(
            id::HUGE_PAGES,
            Severity::Info,
            case.name_of("host"),
            format!("/proc/meminfo: HugePages_Total 0, of {} KiB", size / 1024),
            "big buffers register 2 to 4 times as fast on huge pages: sysctl -w vm.nr_hugepages=1024, for good in /etc/sysctl.d/90-hugepages.conf",
        ));
    }
    let slow: Vec<(&String, &usize)> = machine.governors.iter().filter(|(g, _)| *g != "performance").collect();
    if let Some((governor, count)) = slow.first() {
        let driver = machine.governor_driver.as_deref().unwrap_or("unknown");
        found.push(HostFinding::new(
            id::CPU_GOVERNOR,
            Severity::Info,
            "processors",
            format!("/sys/devices/system/cpu/cpufreq/policy*/scaling_governor is {governor} on {count} of them (driver {driver})"),
            "for latency: cpupower frequency-set -g performance; and tuned-adm profile network-latency where tuned is there",
        ));
    }
}

fn check_memlock(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let machine = case.machine;
    let may_lock = machine.capabilities.is_some_and(|c| c >> 14 & 1 == 1);
    if let Some((soft, hard)) = machine.memlock.filter(|(soft, _)| *soft < u64::MAX && !may_lock) {
        let severity = if case.options.for_rdma.is_empty() { Severity::Warning } else { Severity::Error };
        let hard = if hard == u64::MAX { "unlimited".to_owned() } else { format!("{} KiB", hard / 1024) };
        found.push(HostFinding::new(
            id::MEMLOCK_LIMIT,
            severity,
            case.name_of("shell"),
            format!("/proc/self/limits: locked memory {} KiB, at most {hard}: registering more for RDMA fails with ENOMEM", soft / 1024),
            "ulimit -l unlimited; for good in /etc/security/limits.d/90-memlock.conf: * - memlock unlimited, then log in again",
        ));
    }
    for (unit, file, value) in &machine.limited_units {
        let id = if matches!(unit.as_str(), "containerd" | "docker" | "crio") {
            id::MEMLOCK_CONTAINER
        } else {
            id::MEMLOCK_SYSTEMD
        };
        if id == id::MEMLOCK_CONTAINER && machine.docker_memlock.is_some() && unit == "docker" {
            continue;
        }
        found.push(HostFinding::new(
            id,
            Severity::Warning,
            format!("{unit}.service"),
            format!("{file}: {value}; what it starts may lock that much memory and no more"),
            format!("systemctl edit {unit}, with [Service] and LimitMEMLOCK=infinity; then systemctl restart {unit}"),
        ));
    }
}
