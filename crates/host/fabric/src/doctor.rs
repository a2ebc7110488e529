//! An examination: reads the facts of a host and runs all checks, always in the same order. Files and verdicts are the matter of
//! other modules.

use crate::address::is_link_local;
use crate::check;
use crate::device::{DevicePort, LinkLayer, RdmaDevice};
use crate::finding::{HostFinding, Severity, id};
use crate::host::HostFacts;
use crate::interface::NetInterface;
use crate::machine::MachineFacts;
use crate::tree::HostTree;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Options of an examination.
#[derive(Debug, Clone, Default)]
pub struct DoctorOptions {
    /// Interfaces that must carry RDMA: obstacles there are errors.
    pub for_rdma: Vec<String>,
    /// The expected link layer of every port.
    pub expect: Option<LinkLayer>,
    /// The peer, for comparison.
    pub peer: Option<HostFacts>,
    /// Results of sending bytes to the peer.
    pub trials: Vec<RouteTrial>,
    /// Reply of the subnet manager, by device and port; empty when none was queried.
    pub subnet_manager: BTreeMap<(String, u32), SmAnswer>,
    /// Why interfaces of `for_rdma` cannot be rails, from the code that would use the interfaces.
    pub obstacles: Vec<RailObstacle>,
}

/// Why an interface cannot be a rail.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RailObstacle {
    /// The interface.
    pub interface: String,
    /// The port, `mlx5_0/1`, when the port is at fault.
    pub port: Option<String>,
    /// Id of the finding.
    pub id: &'static str,
    /// The problem.
    pub what: String,
    /// The remedy.
    pub remedy: String,
}

/// Bytes sent to an address of the peer, to find out which interfaces carry the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteTrial {
    /// The interface of this host whose address was the source.
    pub interface: String,
    /// The peer's address.
    pub to: IpAddr,
    /// Number of bytes.
    pub bytes: u64,
    /// The interfaces that carried the bytes, at this host and at the peer, where different from the interfaces with the
    /// addresses; or why the trial failed.
    pub carried: Result<[Option<String>; 2], String>,
}

/// Result of a query to a subnet manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SmAnswer {
    /// A reply came.
    Alive,
    /// No reply, although the query was sent; the library's message.
    Silent(String),
    /// The query could not be sent, and why.
    QueryFailed(String),
}

/// The input of all checks.
#[derive(Debug)]
pub struct CheckInput<'a> {
    /// RDMA devices and interfaces.
    pub host: &'a HostFacts,
    /// The rest of the host.
    pub machine: &'a MachineFacts,
    /// Options of the examination.
    pub options: &'a DoctorOptions,
    /// Whether the facts are from the host that runs the examination.
    pub is_here: bool,
}

/// Examines a host.
pub fn examine(tree: &HostTree, ask: &DoctorOptions) -> Vec<HostFinding> {
    let host = HostFacts::read_from(tree);
    let addresses: Vec<String> = host.devices.iter().filter_map(|d| d.pci.as_ref()?.address.clone()).collect();
    let interfaces: Vec<String> =
        host.interfaces.iter().filter(|i| !i.addresses.is_empty()).map(|i| i.name.clone()).collect();
    let machine = MachineFacts::read_from(tree, &addresses, &interfaces);
    let case = CheckInput { host: &host, machine: &machine, options: ask, is_here: tree.is_live() };
    let mut found = Vec::new();
    check::stack::check_stack(&case, &mut found);
    check::ports::check_ports(&case, &mut found);
    check::roce::check_roce(&case, &mut found);
    check::ip::check_ip(&case, &mut found);
    check::subnets::check_subnets(&case, &mut found);
    check::limits::check_limits(&case, &mut found);
    check::placement::check_placement(&case, &mut found);
    check::peer::check_peer(&case, &mut found);
    report_obstacles(&case, &mut found);
    report_unread_files(tree, &case, &mut found);
    // Most severe first; within a severity, in the order of the checks.
    found.sort_by_key(|f| f.severity);
    found
}

/// Adds the obstacles that a node or a mount would report and no check has found.
fn report_obstacles(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for o in &case.options.obstacles {
        if !found.iter().any(|f| {
            f.severity == Severity::Error && {
                f.subject.contains(&o.interface) || o.port.as_ref().is_some_and(|p| f.subject.contains(p))
            }
        }) {
            found.push(HostFinding::new(o.id, Severity::Error, &o.interface, &o.what, &o.remedy));
        }
    }
}

fn report_unread_files(tree: &HostTree, case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let mut all = case.host.left_out.clone();
    all.extend(tree.left_out());
    all.sort();
    all.dedup();
    let mut reasons: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for left in all {
        reasons.entry(left.why).or_default().push(left.path);
    }
    for (why, paths) in reasons {
        let more = if paths.len() > 3 { format!(" and {} more", paths.len() - 3) } else { String::new() };
        let evidence = format!("{}{more}: {why}", paths.iter().take(3).cloned().collect::<Vec<_>>().join(", "));
        let remedy = if why.contains("permission") {
            case.as_root("these")
        } else {
            "see dmesg: hardware that does not answer".to_owned()
        };
        found.push(HostFinding::new(
            id::CHECK_LEFT_OUT,
            Severity::Info,
            "files that could not be read",
            evidence,
            remedy,
        ));
    }
    for device in case.host.devices.iter().filter(|device| device.is_bare()) {
        found.push(HostFinding::new(
            id::CHECK_LEFT_OUT,
            Severity::Warning,
            &device.name,
            format!("/sys/class/infiniband/{} is there and has no file: neither its type nor its ports can be read", device.name),
            "in a copied folder the targets of symbolic links are missing: use spurline net collect; on the host itself: dmesg shows why the driver failed",
        ));
    }
    let mut silent = |what: &str, why: String, remedy: &str| {
        found.push(HostFinding::new(id::CHECK_LEFT_OUT, Severity::Info, what, why, remedy));
    };
    let with_config = case.as_root("the rest");
    if let Some(first) = case.machine.config_cut.first() {
        silent(
            "relaxed ordering",
            format!("/sys/bus/pci/devices/{first}/config shows only its first 64 bytes"),
            &with_config,
        );
    }
    if case.machine.modules.is_none() && !case.host.devices.is_empty() {
        silent(
            "kernel modules",
            "neither /proc/modules nor /sys/module exists".into(),
            "collect on the host with `net collect`",
        );
    }
    for trial in &case.options.trials {
        if let Err(why) = &trial.carried {
            silent(
                &trial.interface,
                format!("which interface carries packets to {} is unknown, as the trial failed: {why}", trial.to),
                "on that host: spurline net serve --bind all; until then the routing table is assumed to be right",
            );
        }
    }
    let mut said: Vec<&String> = Vec::new();
    for ((device, port), answer) in &case.options.subnet_manager {
        if let SmAnswer::QueryFailed(why) = answer
            && !said.contains(&why)
        {
            said.push(why);
            silent(
                "subnet manager",
                format!("{device}/{port}: {why}"),
                "without it, an SM LID counts as valid although its subnet manager may have stopped",
            );
        }
    }
}

impl<'a> CheckInput<'a> {
    /// Every port, with the device.
    pub fn all_ports(&self) -> impl Iterator<Item = (&'a RdmaDevice, &'a DevicePort)> {
        self.host.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)))
    }

    /// `this host`, `this shell`; of facts that are from elsewhere, the host's name, or the thing on that host.
    pub fn name_of(&self, what: &str) -> String {
        if self.is_here {
            return format!("this {what}");
        }
        let host = self.host.hostname.as_deref().unwrap_or("the collected host");
        if what == "host" { host.to_owned() } else { format!("the {what} on {host}") }
    }

    /// How to see files that only root may read.
    fn as_root(&self, what: &str) -> String {
        if self.is_here {
            return format!("run it as root to include {what}");
        }
        format!("on {}: spurline net collect as root includes {what}", self.name_of("host"))
    }

    /// Whether RDMA is wanted here: present, or requested.
    pub fn wants_rdma(&self) -> bool {
        !self.host.devices.is_empty() || !self.options.for_rdma.is_empty()
    }

    /// Whether --for-rdma names an interface or another on top.
    pub fn is_required(&self, name: &str) -> bool {
        self.options.for_rdma.iter().any(|wanted| {
            wanted == name
                || self
                    .host
                    .interface(wanted)
                    .is_some_and(|i| self.host.physical_interfaces(i).iter().any(|p| p.name == name))
        })
    }

    /// Whether a port has to work: --for-rdma names it, or an interface of the port has an address.
    pub fn is_used(&self, port: &DevicePort) -> bool {
        port.netdevs.iter().any(|n| {
            self.is_required(n) || self.host.interface(n).is_some_and(|i| !i.addresses.is_empty() || i.master.is_some())
        })
    }

    /// Whether an interface has an address of more than a link, or is below another interface.
    fn carries_traffic(&self, interface: &NetInterface) -> bool {
        let name = &interface.name;
        interface.master.is_some()
            || interface.addresses.iter().any(|(ip, _)| !is_link_local(*ip))
            || self.host.interfaces.iter().any(|i| i.lower.contains(name) || i.parent.as_ref() == Some(name))
    }

    /// Whether a port waits for a pod or a guest: a virtual function beside the physical function, without use on this host.
    pub fn is_idle_function(&self, device: &RdmaDevice, port: &DevicePort) -> bool {
        let is_beside = device.pci.as_ref().is_some_and(|pci| pci.physical.is_some());
        is_beside
            && !port.netdevs.iter().any(|name| {
                self.is_required(name) || self.host.interface(name).is_some_and(|i| self.carries_traffic(i))
            })
    }

    /// Whether all ports of an interface are [idle](Self::is_idle_function).
    pub fn is_idle_interface(&self, interface: &NetInterface) -> bool {
        let ports = self.host.ports_of(interface);
        !ports.is_empty() && ports.iter().all(|(device, port)| self.is_idle_function(device, port))
    }

    /// An error where --for-rdma names any of the interfaces, else `otherwise`.
    pub fn severity_for<'n>(&self, names: impl IntoIterator<Item = &'n String>, otherwise: Severity) -> Severity {
        if names.into_iter().any(|n| self.is_required(n)) { Severity::Error } else { otherwise }
    }

    /// Interfaces that can carry RDMA or IP over InfiniBand, or that --for-rdma names.
    pub fn rdma_interfaces(&self) -> impl Iterator<Item = &'a NetInterface> {
        let host = self.host;
        let wanted = &self.options.for_rdma;
        host.interfaces.iter().filter(move |i| {
            !i.is_loopback() && (i.is_ipoib() || wanted.contains(&i.name) || !host.ports_of(i).is_empty())
        })
    }
}

/// The usual name of a port: `mlx5_0/1`.
pub fn port_name(device: &RdmaDevice, port: &DevicePort) -> String {
    format!("{}/{}", device.name, port.number)
}

/// The sysfs directory of a port.
pub fn port_path(device: &RdmaDevice, port: &DevicePort) -> String {
    format!("/sys/class/infiniband/{}/ports/{}", device.name, port.number)
}
