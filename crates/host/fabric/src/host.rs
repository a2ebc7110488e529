//! A host's facts, combined: which interface uses which port, with which addresses. Judges nothing.

use crate::address;
use crate::device::{self, DeviceInventory, LinkLayer, PortRate, RdmaDevice};
use crate::interface::{self, IpoibMode, NetInterface};
use crate::netlink::{IpRoute, ManagementDevice, NetlinkFacts, PfcState};
use crate::tree::{HostTree, TreeEntry, UnreadFile};
use serde::Serialize;
use std::collections::BTreeMap;

/// Data from netlink, beside the collected files.
const NETLINK_FILE: &str = "netlink.json";
/// The list of unreadable files, beside the collected files.
const LEFT_OUT: &str = "left-out.json";

/// A host's fabric, as shown by the kernel.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct HostFacts {
    /// The host name.
    pub hostname: Option<String>,
    /// The kernel release.
    pub kernel: Option<String>,
    /// RDMA devices.
    pub devices: Vec<RdmaDevice>,
    /// Devices for management datagrams, which no check and no rail uses.
    pub management: Vec<ManagementDevice>,
    /// Network interfaces.
    pub interfaces: Vec<NetInterface>,
    /// Whether each RDMA device belongs to a single network namespace; `None` when unknown.
    pub rdma_exclusive: Option<bool>,
    /// Priority flow control, where reported by a driver.
    #[serde(skip)]
    pub pfc: Vec<PfcState>,
    /// The main routing table.
    #[serde(skip)]
    pub routes: Vec<IpRoute>,
    /// Files that could not be read.
    #[serde(skip)]
    pub left_out: Vec<UnreadFile>,
}

impl HostFacts {
    /// Reads all facts. Never fails: missing files leave fields empty.
    pub fn read_from(tree: &HostTree) -> Self {
        let netlink = netlink_facts(tree);
        let DeviceInventory { mut devices, management } = DeviceInventory::read_from(tree, true, &netlink.management);
        let mut interfaces = interface::read_interfaces(tree);
        let (addresses, routes) = address::read_addresses(tree, &netlink);
        for interface in &mut interfaces {
            let own = addresses.iter().filter(|a| a.interface == interface.name);
            interface.addresses = own.map(|a| (a.ip, a.prefix)).collect();
            add_link(interface, &netlink);
        }
        for device in &mut devices {
            attach_interfaces(device, &interfaces, &netlink);
            correct_rates(device, &interfaces);
            for port in &device.ports {
                for interface in interfaces.iter_mut().filter(|i| i.rdma.is_none() && port.netdevs.contains(&i.name)) {
                    interface.rdma = Some((device.name.clone(), port.number));
                }
            }
        }
        HostFacts {
            hostname: tree.read_text("proc/sys/kernel/hostname").or_else(|| tree.read_text("etc/hostname")),
            kernel: tree.read_text("proc/sys/kernel/osrelease"),
            devices,
            management,
            interfaces,
            rdma_exclusive: netlink.rdma_exclusive,
            pfc: netlink.pfc,
            routes,
            left_out: unread_files(tree),
        }
    }

    /// The interface of that name.
    pub fn interface(&self, name: &str) -> Option<&NetInterface> {
        self.interfaces.iter().find(|i| i.name == name)
    }

    /// The interfaces that carry an interface's packets: itself, a bond's members, or a VLAN's parent.
    pub fn physical_interfaces<'a>(&'a self, interface: &'a NetInterface) -> Vec<&'a NetInterface> {
        let mut found: Vec<&NetInterface> = Vec::new();
        let mut next = vec![interface];
        while let Some(here) = next.pop() {
            let members = self.interfaces.iter().filter(|i| i.master.as_deref() == Some(&here.name));
            let lower = here.lower.iter().chain(&here.parent).filter_map(|n| self.interface(n));
            let below: Vec<&NetInterface> = members.chain(lower).filter(|i| i.name != here.name).collect();
            // A file may contain anything, including two interfaces on top of each other.
            if below.is_empty() || found.len() + next.len() > self.interfaces.len() {
                if !found.iter().any(|f| f.name == here.name) {
                    found.push(here);
                }
            } else {
                next.extend(below);
            }
        }
        found
    }

    /// The active-backup bond in which a device's port is a standby: the port's interface is a member and not the active member.
    pub fn standby_bond(&self, port: &device::DevicePort) -> Option<&NetInterface> {
        let own = port.netdevs.iter().filter_map(|name| self.interface(name)).find(|i| i.master.is_some())?;
        let bond = self.interface(own.master.as_deref()?)?;
        let active = bond.bond_active.as_ref()?;
        // A single device may carry the traffic of both members; then neither is a standby.
        let has_device = self.devices.iter().any(|device| device.function_netdevs.contains(active));
        (bond.bond_mode.as_deref() == Some("active-backup") && *active != own.name && has_device).then_some(bond)
    }

    /// The RDMA devices and ports that an interface's traffic can use, through bonds and VLANs too.
    pub fn ports_of<'a>(&'a self, interface: &'a NetInterface) -> Vec<(&'a RdmaDevice, &'a device::DevicePort)> {
        let mut names = vec![interface.name.as_str()];
        names.extend(self.physical_interfaces(interface).iter().map(|i| i.name.as_str()));
        let all = self.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)));
        all.filter(|(_, p)| p.netdevs.iter().any(|n| names.contains(&n.as_str()))).collect()
    }
}

/// Everything that `read` reads, for an archive: files, netlink's data, and the list of unreadable files.
pub fn collect_facts(tree: &HostTree, read: impl FnOnce(&HostTree)) -> BTreeMap<String, TreeEntry> {
    let netlink = netlink_facts(tree);
    read(tree);
    let mut entries = tree.recorded_entries();
    let mut add = |name: &str, text: serde_json::Result<Vec<u8>>| {
        if let Ok(bytes) = text {
            entries.insert(name.to_owned(), TreeEntry::File(bytes));
        }
    };
    add(NETLINK_FILE, serde_json::to_vec(&netlink));
    add(LEFT_OUT, serde_json::to_vec(&unread_files(tree)));
    entries
}

fn netlink_facts(tree: &HostTree) -> NetlinkFacts {
    if tree.is_live() {
        return NetlinkFacts::query_kernel();
    }
    tree.read_bytes(NETLINK_FILE).and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default()
}

fn unread_files(tree: &HostTree) -> Vec<UnreadFile> {
    let mut all: Vec<UnreadFile> =
        tree.read_bytes(LEFT_OUT).and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default();
    all.extend(tree.left_out());
    all.sort();
    all.dedup();
    all
}

fn add_link(interface: &mut NetInterface, netlink: &NetlinkFacts) {
    if let Some(link) = netlink.links.iter().find(|l| l.name == interface.name) {
        interface.kind = link.kind.clone().or(interface.kind.take());
        interface.vlan = link.vlan.or(interface.vlan);
        interface.max_mtu = link.max_mtu;
        interface.lower_is_elsewhere = link.lower_is_elsewhere;
        let lower = link.lower.filter(|_| !link.lower_is_elsewhere);
        // A veth's lower interface is the other end, which does not count.
        let below = netlink.links.iter().find(|l| Some(l.index) == lower && link.kind.as_deref() != Some("veth"));
        if let Some(below) = below
            && !interface.lower.contains(&below.name)
        {
            interface.lower.push(below.name.clone());
        }
    }
    interface.max_mtu = match interface.ipoib_mode {
        Some(IpoibMode::Datagram) if interface.is_accelerated_ipoib() => Some(NetInterface::ACCELERATED_MTU),
        // Less where the port or the multicast group allows no more.
        Some(IpoibMode::Datagram) => Some(NetInterface::DATAGRAM_4K_MTU),
        Some(IpoibMode::Connected) => Some(NetInterface::CONNECTED_MTU),
        None => interface.max_mtu,
    };
}

/// Rates that differ by less than this share are the same.
const SAME_RATE_SHARE: f64 = 0.05;

/// Replaces rates that a driver makes up: an Ethernet port is as fast as the interface.
fn correct_rates(device: &mut RdmaDevice, interfaces: &[NetInterface]) {
    for port in device.ports.iter_mut().filter(|port| port.link_layer == LinkLayer::Ethernet) {
        let Some(rate) = &mut port.rate else { continue };
        let own =
            interfaces.iter().find(|i| port.netdevs.contains(&i.name) && device.function_netdevs.contains(&i.name));
        let Some((name, speed_mbps)) = own.and_then(|i| Some((&i.name, i.speed_mbps?))) else { continue };
        let gbps = f64::from(speed_mbps) / 1000.0;
        if (rate.gbps - gbps).abs() > gbps * SAME_RATE_SHARE {
            *rate = PortRate { gbps, lanes: 0, speed: String::new(), interface: Some(name.clone()) };
        }
    }
}

/// Adds interfaces that the port's GIDs do not name: on the port's PCI function, or below a software device.
fn attach_interfaces(device: &mut RdmaDevice, interfaces: &[NetInterface], netlink: &NetlinkFacts) {
    let address = device.pci.as_ref().and_then(|p| p.address.as_deref());
    // Interfaces that GIDs name belong to these ports, whatever their numbers: a card in planes uses every third port.
    let named: Vec<String> = device.ports.iter().flat_map(|port| port.netdevs.clone()).collect();
    for port in &mut device.ports {
        let told = netlink.rdma.iter().find(|r| r.device == device.name && r.port == port.number);
        let mut found: Vec<String> = told.and_then(|r| r.netdev.clone()).into_iter().collect();
        if let Some(protocol) = told.and_then(|r| r.protocol.clone()) {
            device.protocol = Some(protocol);
        }
        // An Ethernet port whose GIDs name the interfaces needs no more: the function may also carry representors.
        if port.netdevs.is_empty() && found.is_empty() || port.link_layer == LinkLayer::InfiniBand {
            found.extend(
                interfaces
                    .iter()
                    .filter(|i| !named.contains(&i.name))
                    .filter(|i| {
                        let same = i.pci.as_ref().and_then(|p| p.address.as_deref());
                        let layer = match port.link_layer {
                            LinkLayer::InfiniBand => i.is_ipoib(),
                            _ => !i.is_ipoib(),
                        };
                        // Some drivers have a function for each port and count from 0; others have a single function and number the ports.
                        let number = i.dev_port.is_none_or(|n| n + 1 == port.number || n == 0);
                        let alone = i.dev_port.is_some_and(|n| n + 1 == port.number);
                        address.is_some() && same == address && layer && if port.number == 1 { number } else { alone }
                    })
                    .map(|i| i.name.clone()),
            );
        }
        found.extend(device.parent.clone());
        // Children of IPoIB interfaces have no device.
        for own in found.clone() {
            found.extend(interfaces.iter().filter(|i| i.parent.as_deref() == Some(&own)).map(|i| i.name.clone()));
        }
        for name in found {
            if !port.netdevs.contains(&name) {
                port.netdevs.push(name);
            }
        }
    }
}
