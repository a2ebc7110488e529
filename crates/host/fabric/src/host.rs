//! One host's facts, brought together: which interface stands on which port, with which addresses. It judges nothing.

use crate::address;
use crate::device::{self, Device, LinkLayer};
use crate::interface::{self, Interface, IpoibMode};
use crate::netlink::{Netlink, Pfc, Route};
use crate::tree::{Entry, LeftOut, Tree};
use serde::Serialize;
use std::collections::BTreeMap;

/// What only netlink tells, beside collected files.
const NETLINK: &str = "netlink.json";
/// What the collector could not look at, beside collected files.
const LEFT_OUT: &str = "left-out.json";

/// What a host's kernel shows of its fabric.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Host {
    /// Its own name.
    pub hostname: Option<String>,
    /// Release of its kernel.
    pub kernel: Option<String>,
    /// RDMA devices.
    pub devices: Vec<Device>,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// Whether RDMA devices belong to one network namespace each; none where nobody told.
    pub rdma_exclusive: Option<bool>,
    /// Priority flow control, where a driver tells of it.
    #[serde(skip)]
    pub pfc: Vec<Pfc>,
    /// The main routing table.
    #[serde(skip)]
    pub routes: Vec<Route>,
    /// What could not be looked at.
    #[serde(skip)]
    pub left_out: Vec<LeftOut>,
}

impl Host {
    /// Reads all facts; never fails: what is not there is not in the answer.
    pub fn read(tree: &Tree) -> Self {
        let netlink = netlink(tree);
        let mut devices = device::read_all(tree, true);
        let mut interfaces = interface::read_all(tree);
        let (addresses, routes) = address::read(tree, &netlink);
        for interface in &mut interfaces {
            let own = addresses.iter().filter(|a| a.interface == interface.name);
            interface.addresses = own.map(|a| (a.ip, a.prefix)).collect();
            add_link(interface, &netlink);
        }
        for device in &mut devices {
            attach(device, &interfaces, &netlink);
            for port in &device.ports {
                for interface in interfaces.iter_mut().filter(|i| i.rdma.is_none() && port.netdevs.contains(&i.name)) {
                    interface.rdma = Some((device.name.clone(), port.number));
                }
            }
        }
        Host {
            hostname: tree.text("proc/sys/kernel/hostname").or_else(|| tree.text("etc/hostname")),
            kernel: tree.text("proc/sys/kernel/osrelease"),
            devices,
            interfaces,
            rdma_exclusive: netlink.rdma_exclusive,
            pfc: netlink.pfc,
            routes,
            left_out: left_out(tree),
        }
    }

    /// The interface of that name.
    pub fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|i| i.name == name)
    }

    /// The interfaces that an interface's packets leave by: itself, or a bond's members, or what a VLAN stands on.
    pub fn physical<'a>(&'a self, interface: &'a Interface) -> Vec<&'a Interface> {
        let mut found: Vec<&Interface> = Vec::new();
        let mut next = vec![interface];
        while let Some(here) = next.pop() {
            let members = self.interfaces.iter().filter(|i| i.master.as_deref() == Some(&here.name));
            let lower = here.lower.iter().chain(&here.parent).filter_map(|n| self.interface(n));
            let below: Vec<&Interface> = members.chain(lower).filter(|i| i.name != here.name).collect();
            // A file may say anything, also that two interfaces stand on each other.
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

    /// The RDMA device and port that an interface's traffic can use, through bonds and VLANs too.
    pub fn ports_of<'a>(&'a self, interface: &'a Interface) -> Vec<(&'a Device, &'a device::Port)> {
        let mut names = vec![interface.name.as_str()];
        names.extend(self.physical(interface).iter().map(|i| i.name.as_str()));
        let all = self.devices.iter().flat_map(|d| d.ports.iter().map(move |p| (d, p)));
        all.filter(|(_, p)| p.netdevs.iter().any(|n| names.contains(&n.as_str()))).collect()
    }
}

/// Everything `read` reads, to be written into an archive: files, netlink's answers, what was left out.
pub fn collect(tree: &Tree, read: impl FnOnce(&Tree)) -> BTreeMap<String, Entry> {
    let netlink = netlink(tree);
    read(tree);
    let mut entries = tree.recorded();
    let mut add = |name: &str, text: serde_json::Result<Vec<u8>>| {
        if let Ok(bytes) = text {
            entries.insert(name.to_owned(), Entry::File(bytes));
        }
    };
    add(NETLINK, serde_json::to_vec(&netlink));
    add(LEFT_OUT, serde_json::to_vec(&left_out(tree)));
    entries
}

fn netlink(tree: &Tree) -> Netlink {
    if tree.is_live() {
        return Netlink::ask();
    }
    tree.bytes(NETLINK).and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default()
}

fn left_out(tree: &Tree) -> Vec<LeftOut> {
    let mut all: Vec<LeftOut> =
        tree.bytes(LEFT_OUT).and_then(|json| serde_json::from_slice(&json).ok()).unwrap_or_default();
    all.extend(tree.left_out());
    all.sort();
    all.dedup();
    all
}

fn add_link(interface: &mut Interface, netlink: &Netlink) {
    if let Some(link) = netlink.links.iter().find(|l| l.name == interface.name) {
        interface.kind = link.kind.clone().or(interface.kind.take());
        interface.vlan = link.vlan.or(interface.vlan);
        interface.max_mtu = link.max_mtu;
        interface.lower_is_elsewhere = link.lower_is_elsewhere;
        let lower = link.lower.filter(|_| !link.lower_is_elsewhere);
        // A veth stands on its other end, which is no lower interface.
        let below = netlink.links.iter().find(|l| Some(l.index) == lower && link.kind.as_deref() != Some("veth"));
        if let Some(below) = below
            && !interface.lower.contains(&below.name)
        {
            interface.lower.push(below.name.clone());
        }
    }
    interface.max_mtu = match interface.ipoib_mode {
        // 4096 bytes of an InfiniBand packet less the 4 of IPoIB's own header; 2048 less 4 where the port or the
        // multicast group does not do more.
        Some(IpoibMode::Datagram) => Some(4092),
        Some(IpoibMode::Connected) => Some(65520),
        None => interface.max_mtu,
    };
}

/// Adds the interfaces that share the port's PCI function, or that a software device stands on, to those its GIDs name.
fn attach(device: &mut Device, interfaces: &[Interface], netlink: &Netlink) {
    let address = device.pci.as_ref().and_then(|p| p.address.as_deref());
    for port in &mut device.ports {
        let fits = |i: &&Interface| {
            let same = i.pci.as_ref().and_then(|p| p.address.as_deref());
            let layer = match port.link_layer {
                LinkLayer::InfiniBand => i.is_ipoib(),
                _ => !i.is_ipoib(),
            };
            // Some drivers have a function per port and count 0, some one function and count ports.
            let number = i.dev_port.is_none_or(|n| n + 1 == port.number || n == 0);
            let alone = i.dev_port.is_some_and(|n| n + 1 == port.number);
            address.is_some() && same == address && layer && if port.number == 1 { number } else { alone }
        };
        let told = netlink.rdma.iter().find(|r| r.device == device.name && r.port == port.number);
        let mut found: Vec<String> = told.and_then(|r| r.netdev.clone()).into_iter().collect();
        if let Some(protocol) = told.and_then(|r| r.protocol.clone()) {
            device.protocol = Some(protocol);
        }
        // An Ethernet port that names its interfaces in its addresses is not asked twice: beside it, the function may
        // carry representors.
        if port.netdevs.is_empty() && found.is_empty() || port.link_layer == LinkLayer::InfiniBand {
            found.extend(interfaces.iter().filter(fits).map(|i| i.name.clone()));
        }
        found.extend(device.parent.clone());
        // Children of IPoIB interfaces have no device of their own.
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
