//! Facts of a host beyond the fabric that decide whether RDMA works, and how fast: modules, libraries, limits, NUMA, PCI
//! functions, container. Judges nothing.

use crate::device::PciFunction;
use crate::persist::{self, SavedSettings};
use crate::tree::HostTree;
use std::collections::{BTreeMap, BTreeSet};

/// Library directories of the distributions.
const LIBRARY_DIRS: &[&str] = &[
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/lib",
    "usr/local/lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib64",
    "opt/mellanox/lib",
];
/// Units whose processes register memory, or start processes that do.
const REGISTERING_UNITS: &[&str] = &["containerd", "docker", "crio", "kubelet", "slurmd", "spurline", "spurline-node"];
/// Kernel command-line parameters that are read; all others are left out for privacy.
const READ_PARAMETERS: &[&str] =
    &["iommu", "intel_iommu", "amd_iommu", "pci", "hugepages", "hugepagesz", "default_hugepagesz"];

/// The policy of a virtual function: whether the port follows that of the physical function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VfPolicy {
    /// The file, on the host of the physical function.
    pub file: String,
    /// `Follow`, `Up` or `Down`.
    pub word: String,
}

/// The facts.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MachineFacts {
    /// Loaded and built-in modules; `None` where the kernel lists no modules.
    pub modules: Option<BTreeSet<String>>,
    /// Libraries by name, with the directory.
    pub libraries: BTreeMap<&'static str, String>,
    /// Providers of libibverbs by file name; `None` when there is no such directory.
    pub providers: Option<Vec<String>>,
    /// Whether any library directory exists.
    pub has_libraries: bool,
    /// Version of the OFED's modules.
    pub ofed: Option<String>,
    /// Soft and hard limit of locked memory of this process, in bytes; `u64::MAX` for unlimited.
    pub memlock: Option<(u64, u64)>,
    /// Soft and hard limit of open files of this process.
    pub open_files: Option<(u64, u64)>,
    /// Units whose limit of locked memory is finite: name, file, setting.
    pub limited_units: Vec<(String, String, String)>,
    /// Docker's configured limit of locked memory.
    pub docker_memlock: Option<String>,
    /// Effective capabilities.
    pub capabilities: Option<u64>,
    /// Evidence that this is a container.
    pub container: Option<String>,
    /// Names in `/dev/infiniband`; `None` when there is no `/dev`.
    pub char_devices: Option<Vec<String>>,
    /// Names of device nodes for verbs by RDMA device, as given by the kernel.
    pub verbs_nodes: BTreeMap<String, String>,
    /// The `char_devices` that this user may not open.
    pub denied: Vec<String>,
    /// Number of reserved huge pages, and the size of each in bytes.
    pub huge_pages: Option<(u64, u64)>,
    /// `fs.pipe-max-size` in bytes.
    pub pipe_max_size: Option<u64>,
    /// Frequency governors, with the number of processors.
    pub governors: BTreeMap<String, usize>,
    /// The frequency driver.
    pub governor_driver: Option<String>,
    /// Distances of NUMA nodes, by node.
    pub distances: BTreeMap<u32, Vec<u32>>,
    /// NVMe disks, each with the NUMA node.
    pub disks: Vec<(String, Option<u32>)>,
    /// GPUs, each with the NUMA node.
    pub gpus: Vec<(String, Option<u32>)>,
    /// PCI functions with the ids of RDMA hardware or the class of InfiniBand.
    pub functions: Vec<PciFunction>,
    /// Policies of virtual functions, by PCI address.
    pub vf_policies: BTreeMap<String, VfPolicy>,
    /// Domain type of the IOMMU by PCI address, `DMA`, `identity`.
    pub iommu: BTreeMap<String, String>,
    /// Whether relaxed ordering is on, by PCI address, where readable.
    pub relaxed_ordering: BTreeMap<String, bool>,
    /// PCI addresses whose configuration space was cut off before the capability.
    pub config_cut: Vec<String>,
    /// Parameters of the kernel command line.
    pub parameters: Vec<String>,
    /// Kernel parameters for ARP and reverse path filtering, by key below `net.ipv4.conf`.
    pub sysctls: BTreeMap<String, i64>,
    /// Persistent interface settings.
    pub saved: SavedSettings,
}

impl MachineFacts {
    /// Reads all facts; `addresses` are PCI functions of RDMA devices, `interfaces` the names of interfaces with IP addresses.
    pub fn read_from(tree: &HostTree, addresses: &[String], interfaces: &[String]) -> Self {
        let mut machine = MachineFacts {
            modules: kernel_modules(tree),
            ofed: tree.read_text("sys/module/mlx_compat/version"),
            memlock: process_limit(tree, "Max locked memory"),
            open_files: process_limit(tree, "Max open files"),
            limited_units: limited_units(tree),
            docker_memlock: tree.read_text_filtered("etc/docker/daemon.json", docker_limits).filter(|t| !t.is_empty()),
            capabilities: effective_capabilities(tree),
            container: container_evidence(tree),
            huge_pages: huge_pages(tree),
            pipe_max_size: tree.read_number("proc/sys/fs/pipe-max-size").and_then(|n| u64::try_from(n).ok()),
            disks: nvme_disks(tree),
            parameters: kernel_parameters(tree),
            saved: persist::read_saved(tree),
            ..MachineFacts::default()
        };
        machine.read_libraries(tree);
        machine.read_char_devices(tree);
        machine.read_processors(tree);
        machine.read_functions(tree, addresses);
        for name in interfaces.iter().map(String::as_str).chain(["all"]) {
            for key in ["arp_ignore", "arp_announce", "rp_filter"] {
                if let Some(value) = tree.read_number(&format!("proc/sys/net/ipv4/conf/{name}/{key}")) {
                    machine.sysctls.insert(format!("{name}/{key}"), value);
                }
            }
        }
        machine
    }

    /// Whether a module is loaded or built in; `None` where the kernel lists no modules.
    pub fn has_module(&self, name: &str) -> Option<bool> {
        self.modules.as_ref().map(|m| m.contains(name))
    }

    /// The effective value for an interface: the larger of the interface's value and that of `all`.
    pub fn sysctl_value(&self, interface: &str, key: &str) -> Option<i64> {
        let of = |name: &str| self.sysctls.get(&format!("{name}/{key}")).copied();
        of(interface).max(of("all"))
    }

    fn read_libraries(&mut self, tree: &HostTree) {
        for dir in LIBRARY_DIRS {
            self.has_libraries |= tree.exists(dir);
            for name in ["libibverbs.so.1", "librdmacm.so.1", "libibumad.so.3"] {
                if !self.libraries.contains_key(name) && tree.exists(&format!("{dir}/{name}")) {
                    self.libraries.insert(name, format!("/{dir}"));
                }
            }
            let providers = tree.list_names(&format!("{dir}/libibverbs"));
            if !providers.is_empty() {
                self.providers.get_or_insert_default().extend(providers);
            }
        }
    }

    fn read_char_devices(&mut self, tree: &HostTree) {
        if !tree.exists("dev") {
            return;
        }
        let names = tree.list_names("dev/infiniband");
        if tree.is_live() {
            let both = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
            self.denied = names
                .iter()
                .filter(|n| n.starts_with("uverbs") || *n == "rdma_cm")
                .filter(|n| rustix::fs::access(format!("/dev/infiniband/{n}"), both).is_err())
                .cloned()
                .collect();
        }
        self.char_devices = Some(names);
        let class = "sys/class/infiniband_verbs";
        for node in tree.list_names(class).into_iter().filter(|name| name.starts_with("uverbs")) {
            if let Some(device) = tree.read_text(&format!("{class}/{node}/ibdev")) {
                self.verbs_nodes.insert(device, node);
            }
        }
    }

    fn read_processors(&mut self, tree: &HostTree) {
        let cpu = "sys/devices/system/cpu";
        for policy in tree.list_names(&format!("{cpu}/cpufreq")).iter().filter(|n| n.starts_with("policy")) {
            if let Some(governor) = tree.read_text(&format!("{cpu}/cpufreq/{policy}/scaling_governor")) {
                *self.governors.entry(governor).or_default() += 1;
            }
        }
        if self.governors.is_empty()
            && let Some(governor) = tree.read_text(&format!("{cpu}/cpu0/cpufreq/scaling_governor"))
        {
            self.governors.insert(governor, 1);
        }
        self.governor_driver = tree.read_text(&format!("{cpu}/cpu0/cpufreq/scaling_driver"));
        for node in tree.list_names("sys/devices/system/node") {
            let number = node.strip_prefix("node").and_then(|n| n.parse().ok());
            let distances = number.and_then(|_| tree.read_text(&format!("sys/devices/system/node/{node}/distance")));
            if let (Some(number), Some(distances)) = (number, distances) {
                self.distances.insert(number, distances.split_whitespace().filter_map(|d| d.parse().ok()).collect());
            }
        }
    }

    fn read_functions(&mut self, tree: &HostTree, addresses: &[String]) {
        let all = "sys/bus/pci/devices";
        for address in tree.list_names(all) {
            let at = format!("{all}/{address}");
            let Some(class) = tree.read_number(&format!("{at}/class")).map(|c| c >> 8) else { continue };
            match class {
                // Display controllers: AMD and NVIDIA devices that compute.
                0x0300 | 0x0302 | 0x1200
                    if matches!(tree.read_number(&format!("{at}/vendor")), Some(0x10de | 0x1002)) =>
                {
                    let node = tree.read_number(&format!("{at}/numa_node")).and_then(|n| u32::try_from(n).ok());
                    self.gpus.push((address.clone(), node));
                }
                // Network, InfiniBand and fabric controllers; an InfiniHost has class 0x0c06.
                0x0200 | 0x0207 | 0x0208 | 0x0280 | 0x0c06 => {
                    let Some(mut pci) = PciFunction::read_from(tree, &at) else { continue };
                    pci.address = Some(address.clone());
                    if pci.model().is_some() || matches!(class, 0x0207 | 0x0c06) {
                        self.functions.push(pci);
                    }
                }
                _ => {}
            }
        }
        for address in addresses {
            let at = format!("{all}/{address}");
            for number in tree.list_names(&format!("{at}/sriov")) {
                let word = tree.read_text(&format!("{at}/sriov/{number}/policy"));
                let function = tree.link_name(&format!("{at}/virtfn{number}"));
                if let (Some(word), Some(function)) = (word, function) {
                    let file = format!("/{at}/sriov/{number}/policy");
                    self.vf_policies.insert(function, VfPolicy { file, word });
                }
            }
            if let Some(kind) = tree.read_text(&format!("{at}/iommu_group/type")) {
                self.iommu.insert(address.clone(), kind);
            }
            let Some(config) = tree.read_bytes(&format!("{at}/config")) else { continue };
            if let Some(on) = relaxed_ordering(&config) {
                self.relaxed_ordering.insert(address.clone(), on);
            } else if config.len() <= 64 {
                self.config_cut.push(address.clone());
            }
        }
    }
}

fn kernel_modules(tree: &HostTree) -> Option<BTreeSet<String>> {
    let loaded = tree.read_text("proc/modules");
    // This also lists built-in modules that have parameters.
    let names = tree.list_names("sys/module");
    if loaded.is_none() && names.is_empty() {
        return None;
    }
    let mut all: BTreeSet<String> = names.into_iter().collect();
    all.extend(loaded.unwrap_or_default().lines().filter_map(|l| l.split(' ').next()).map(str::to_owned));
    if let Some(release) = tree.read_text("proc/sys/kernel/osrelease")
        && let Some(built_in) = tree.read_text(&format!("lib/modules/{release}/modules.builtin"))
    {
        all.extend(
            built_in.lines().filter_map(|path| Some(path.rsplit('/').next()?.strip_suffix(".ko")?.replace('-', "_"))),
        );
    }
    Some(all)
}

/// `Max locked memory         65536                65536                bytes`.
fn process_limit(tree: &HostTree, name: &str) -> Option<(u64, u64)> {
    let text = tree.read_text("proc/self/limits")?;
    let mut words = text.lines().find_map(|l| l.strip_prefix(name))?.split_whitespace();
    let mut next = || match words.next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    Some((next()?, next()?))
}

/// Units without an infinite limit, where the manager's default is not infinite either.
fn limited_units(tree: &HostTree) -> Vec<(String, String, String)> {
    let said = |path: &str, key: &str| {
        let text = tree.read_text_filtered(path, |text| {
            text.lines().filter(|l| l.contains("LimitMEMLOCK") || l.starts_with('[')).collect::<Vec<_>>().join("\n")
        })?;
        text.lines()
            .rev()
            .find_map(|l| l.trim().strip_prefix(key)?.trim().strip_prefix('=').map(|v| v.trim().to_owned()))
    };
    let mut default = None;
    for dir in ["usr/lib/systemd/system.conf.d", "etc/systemd/system.conf.d"] {
        for name in tree.list_names(dir) {
            default = said(&format!("{dir}/{name}"), "DefaultLimitMEMLOCK").or(default);
        }
    }
    default = default.or_else(|| said("etc/systemd/system.conf", "DefaultLimitMEMLOCK"));
    if default.as_deref().is_some_and(|v| v.starts_with("infinity")) {
        return Vec::new();
    }
    let mut limited = Vec::new();
    for unit in REGISTERING_UNITS {
        let dirs = ["etc/systemd/system", "run/systemd/system", "usr/lib/systemd/system", "lib/systemd/system"];
        let Some(file) = dirs.iter().map(|d| format!("{d}/{unit}.service")).find(|f| tree.exists(f)) else { continue };
        let mut value = said(&file, "LimitMEMLOCK");
        for dir in dirs.iter().rev() {
            for name in tree.list_names(&format!("{dir}/{unit}.service.d")) {
                value = said(&format!("{dir}/{unit}.service.d/{name}"), "LimitMEMLOCK").or(value);
            }
        }
        let (value, from) = match value {
            Some(value) if value.starts_with("infinity") => continue,
            Some(value) => (format!("LimitMEMLOCK={value}"), format!("/{file}")),
            None => (
                default.as_ref().map_or("no LimitMEMLOCK".to_owned(), |d| format!("DefaultLimitMEMLOCK={d}")),
                format!("/{file}"),
            ),
        };
        limited.push(((*unit).to_owned(), from, value));
    }
    limited
}

/// The limits in Docker's configuration.
fn docker_limits(text: &str) -> String {
    let json: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
    // An archive holds this part alone.
    let limits = json.get("default-ulimits").unwrap_or(&json);
    limits.get("memlock").map(|m| serde_json::json!({ "memlock": m }).to_string()).unwrap_or_default()
}

fn effective_capabilities(tree: &HostTree) -> Option<u64> {
    let text = tree.read_text_filtered("proc/self/status", capability_lines)?;
    u64::from_str_radix(text.strip_prefix("CapEff:")?.trim(), 16).ok()
}

fn capability_lines(text: &str) -> String {
    text.lines().filter(|l| l.starts_with("CapEff:")).collect::<String>()
}

fn container_evidence(tree: &HostTree) -> Option<String> {
    let signs = [".dockerenv", "run/.containerenv", "run/secrets/kubernetes.io", "var/run/secrets/kubernetes.io"];
    if let Some(sign) = signs.iter().find(|s| tree.exists(s)) {
        return Some(format!("/{sign} exists"));
    }
    let groups = tree.read_text("proc/self/cgroup")?;
    let words = ["kubepods", "/docker/", "/docker-", "cri-containerd", "libpod"];
    let line = groups.lines().find(|l| words.iter().any(|w| l.contains(w)))?;
    Some(format!("/proc/self/cgroup has {line}"))
}

fn huge_pages(tree: &HostTree) -> Option<(u64, u64)> {
    let text = tree.read_text("proc/meminfo")?;
    let value = |key: &str| {
        let line = text.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    Some((value("HugePages_Total")?, value("Hugepagesize")?.saturating_mul(1024)))
}

fn nvme_disks(tree: &HostTree) -> Vec<(String, Option<u32>)> {
    let names = tree.list_names("sys/class/nvme");
    names.into_iter().map(|name| (name.clone(), numa_node_of_disk(tree, &name))).collect()
}

fn numa_node_of_disk(tree: &HostTree, name: &str) -> Option<u32> {
    let files = ["numa_node", "device/numa_node"].map(|f| tree.read_number(&format!("sys/class/nvme/{name}/{f}")));
    files.into_iter().flatten().find_map(|n| u32::try_from(n).ok())
}

fn kernel_parameters(tree: &HostTree) -> Vec<String> {
    let text = tree
        .read_text_filtered("proc/cmdline", |text| {
            text.split_whitespace()
                .filter(|word| READ_PARAMETERS.contains(&word.split('=').next().unwrap_or_default()))
                .collect::<Vec<_>>()
                .join(" ")
        })
        .unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

/// Bit 4 of Device Control in the PCI Express capability. An unprivileged user sees only 64 bytes, which end before that.
fn relaxed_ordering(config: &[u8]) -> Option<bool> {
    let mut at = usize::from(*config.get(0x34)?);
    // At most as many capabilities as fit, in case of a loop.
    for _ in 0..48 {
        if at < 0x40 {
            return None;
        }
        if *config.get(at)? == 0x10 {
            return Some(config.get(at + 8)? & 0x10 != 0);
        }
        at = usize::from(*config.get(at + 1)?);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relaxed_ordering_in_the_pcie_capability() {
        let mut config = vec![0; 256];
        config[0x34] = 0x60;
        (config[0x60], config[0x61]) = (0x01, 0x80);
        (config[0x80], config[0x88]) = (0x10, 0x10);
        assert_eq!(relaxed_ordering(&config), Some(true));
        config[0x88] = 0;
        assert_eq!(relaxed_ordering(&config), Some(false));
        assert_eq!(relaxed_ordering(&config[..64]), None);
        config[0x61] = 0x60;
        assert_eq!(relaxed_ordering(&config), None, "a circle");
    }
}
