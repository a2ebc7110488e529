//! The machine's limits: processors, memory, the control group. Read once at start.

use std::path::{Path, PathBuf};

/// The machine's limits.
#[derive(Debug, Clone)]
pub struct HostLimits {
    /// Processors this process may use.
    pub processors: usize,
    /// Memory of the machine in bytes, if known.
    pub memory_bytes: Option<u64>,
    /// The tightest memory limit among this process's control groups, and the file.
    pub cgroup: Option<(u64, PathBuf)>,
    /// Whether this process is root.
    pub root: bool,
    /// The home directory.
    pub home: Option<PathBuf>,
    /// `fs.pipe-max-size` in bytes, if known.
    pub pipe_max_size: Option<u64>,
}

impl HostLimits {
    /// Reads the limits of this machine.
    pub fn detect() -> Self {
        HostLimits {
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_of(&text)),
            cgroup: cgroup_limit(Path::new("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")),
            root: rustix::process::geteuid().is_root(),
            home: std::env::var_os("HOME").map(PathBuf::from).filter(|h| h.is_absolute()),
            pipe_max_size: std::fs::read_to_string("/proc/sys/fs/pipe-max-size")
                .ok()
                .and_then(|n| n.trim().parse().ok()),
        }
    }
}

fn memory_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
}

/// Limits above this mean "none": cgroup v1 writes the largest page-aligned number instead of a word.
const NO_LIMIT: u64 = 1 << 60;

/// The smallest limit from this process's group up to the root, in cgroup v1 or v2.
fn cgroup_limit(membership: &Path, root: &Path) -> Option<(u64, PathBuf)> {
    let text = std::fs::read_to_string(membership).ok()?;
    let mut best: Option<(u64, PathBuf)> = None;
    for line in text.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (base, file) = match controllers {
            "" => (root.to_owned(), "memory.max"),
            c if c.split(',').any(|c| c == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        // In a container the path may be the host's; then only the visible root has a limit.
        let mut dir = base.join(path.trim_start_matches('/'));
        loop {
            let candidate = dir.join(file);
            if let Some(limit) = std::fs::read_to_string(&candidate).ok().and_then(|t| t.trim().parse::<u64>().ok())
                && limit < NO_LIMIT
                && best.as_ref().is_none_or(|(b, _)| limit < *b)
            {
                best = Some((limit, candidate));
            }
            if dir == base || !dir.pop() {
                break;
            }
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory() {
        assert_eq!(memory_of("MemFree: 1 kB\nMemTotal:   2048 kB\n"), Some(2 << 20));
        assert_eq!(memory_of("nothing"), None);
    }

    #[test]
    fn control_groups_of_both_versions() {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("self", "0::/a/b\n");
        put("cg/a/memory.max", "1000\n");
        put("cg/a/b/memory.max", "max\n");
        let (limit, file) = cgroup_limit(&dir.path().join("self"), &dir.path().join("cg")).unwrap();
        assert_eq!(limit, 1000);
        assert!(file.ends_with("a/memory.max"));

        put("self1", "5:cpu:/x\n4:memory,hugetlb:/host/only\n");
        put("cg/memory/memory.limit_in_bytes", "777\n");
        assert_eq!(cgroup_limit(&dir.path().join("self1"), &dir.path().join("cg")).unwrap().0, 777);
        put("cg/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert!(cgroup_limit(&dir.path().join("self1"), &dir.path().join("cg")).is_none());
    }
}
