//! The machine under test: kernel, processor, memory, kernel parameters, load. Only reads.

use crate::stop::check_stop;
use serde_json::{Value, json};
use spurline_sys::MountTable;
use std::path::Path;

fn read_line(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn find_field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|l| l.split(':').next().is_some_and(|n| n.trim() == name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

pub fn describe_machine(memory_dir: &Path, disk_dir: &Path) -> Value {
    let cpuinfo = read_line("/proc/cpuinfo").unwrap_or_default();
    let meminfo = read_line("/proc/meminfo").unwrap_or_default();
    let os = read_line("/etc/os-release").and_then(|text| {
        text.lines().find_map(|l| l.strip_prefix("PRETTY_NAME=")).map(|name| name.trim_matches('"').to_owned())
    });
    let parameters: serde_json::Map<String, Value> = [
        "/sys/module/fuse/parameters/enable_uring",
        "/proc/sys/net/ipv4/tcp_rmem",
        "/proc/sys/net/ipv4/tcp_wmem",
        "/proc/sys/net/ipv4/tcp_congestion_control",
        "/proc/sys/net/core/rmem_max",
        "/proc/sys/net/core/wmem_max",
        "/proc/sys/kernel/io_uring_disabled",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/vm/dirty_ratio",
        "/sys/kernel/mm/transparent_hugepage/enabled",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor",
    ]
    .into_iter()
    .filter_map(|path| Some((path.to_owned(), read_line(path)?.into())))
    .collect();
    json!({
        "kernel": read_line("/proc/sys/kernel/osrelease"),
        "build": read_line("/proc/sys/kernel/version"),
        "arch": std::env::consts::ARCH,
        "os": os,
        "cpu": find_field(&cpuinfo, "model name"),
        "cpus": cpu_count(),
        "hypervisor": virtual_machine(),
        "memory_bytes": find_field(&meminfo, "MemTotal")
            .and_then(|m| m.split(' ').next()?.parse::<u64>().ok()).map(|kib| kib * 1024),
        "memory_dir": file_system(memory_dir),
        "disk_dir": file_system(disk_dir),
        "cmdline": read_line("/proc/cmdline"),
        "parameters": parameters,
    })
}

/// A machine of [`describe_machine`] in a line.
pub fn one_line(machine: &Value) -> String {
    let text = |key: &str| machine[key].as_str().unwrap_or("?").to_owned();
    format!(
        "{}, Linux {}, {} × {}{}, {:.0} GiB of memory; memory dir: {}; disk dir: {}",
        text("os"),
        text("kernel"),
        machine["cpus"],
        text("cpu"),
        if machine["hypervisor"] == true { " (virtual)" } else { "" },
        machine["memory_bytes"].as_f64().unwrap_or(0.0) / f64::from(1u32 << 30),
        text("memory_dir"),
        text("disk_dir"),
    )
}

/// Whether the host's TCP congestion control paces sends.
pub fn paces_sends() -> bool {
    read_line("/proc/sys/net/ipv4/tcp_congestion_control").is_some_and(|name| name.starts_with("bbr"))
}

/// Whether this is a virtual machine.
pub fn virtual_machine() -> bool {
    read_line("/proc/cpuinfo").is_some_and(|text| text.contains(" hypervisor"))
}

/// Memory available to a new process, in bytes.
pub fn available_bytes() -> u64 {
    let meminfo = read_line("/proc/meminfo").unwrap_or_default();
    let kib = find_field(&meminfo, "MemAvailable").and_then(|m| m.split(' ').next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Writes once to every page of `bytes` of memory, and frees the memory. A hypervisor may allocate a guest's page only at the
/// first write, at a few hundred MB/s, which would be measured instead.
pub fn touch_memory(bytes: u64) {
    const SYSTEM_PAGE_BYTES: usize = 4096;
    let each = bytes as usize / cpu_count();
    std::thread::scope(|scope| {
        for _ in 0..cpu_count() {
            scope.spawn(|| {
                let mut memory = vec![0u8; each];
                memory.chunks_mut(SYSTEM_PAGE_BYTES).take_while(|_| check_stop().is_ok()).for_each(|page| page[0] = 1);
                std::hint::black_box(&memory);
            });
        }
    });
}

/// Processors available to this process.
pub fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The load average of the last minute.
pub fn load_average() -> f64 {
    read_line("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// The file system a path is on: type, device, options.
pub fn file_system(path: &Path) -> Option<String> {
    let path = path.canonicalize().ok()?;
    let table = MountTable::read().ok()?;
    let entry = table.seen_at(&path)?;
    // The first word of the file system's options repeats whether the file system is writable.
    let more = entry.options.split_once(',').map_or(String::new(), |(_, more)| format!(",{more}"));
    Some(format!("{} on {} ({}{more})", entry.fstype, entry.source, entry.flags))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine() {
        let here = describe_machine(Path::new("/"), Path::new("/proc"));
        assert!(here["kernel"].as_str().is_some_and(|k| !k.is_empty()));
        assert!(here["memory_bytes"].as_u64().is_some_and(|m| m > 1 << 20));
        assert!(here["disk_dir"].as_str().is_some_and(|f| f.starts_with("proc ")), "{here}");
        assert_eq!(find_field("model name\t: X: y\nother: z", "model name").as_deref(), Some("X: y"));
    }
}
