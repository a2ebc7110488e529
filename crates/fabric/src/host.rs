//! One host's facts, brought together: which interface stands on which port. It judges nothing.

use crate::device::{self, Device, LinkLayer};
use crate::interface::{self, Interface};
use crate::tree::{LeftOut, Tree};
use serde::Serialize;

/// What a host's kernel shows of its fabric.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Host {
    /// Its own name.
    pub hostname: Option<String>,
    /// Release of its kernel.
    pub kernel: Option<String>,
    /// RDMA devices.
    pub devices: Vec<Device>,
    /// Network interfaces.
    pub interfaces: Vec<Interface>,
    /// What could not be looked at.
    #[serde(skip)]
    pub left_out: Vec<LeftOut>,
}

impl Host {
    /// Reads all facts; never fails: what is not there is not in the answer.
    pub fn read(tree: &Tree) -> Self {
        let mut devices = device::read_all(tree);
        let interfaces = interface::read_all(tree);
        for device in &mut devices {
            attach(device, &interfaces);
        }
        Host {
            hostname: tree.text("proc/sys/kernel/hostname").or_else(|| tree.text("etc/hostname")),
            kernel: tree.text("proc/sys/kernel/osrelease"),
            devices,
            interfaces,
            left_out: tree.left_out(),
        }
    }

    /// The interface of that name.
    pub fn interface(&self, name: &str) -> Option<&Interface> {
        self.interfaces.iter().find(|i| i.name == name)
    }
}

/// Adds the interfaces that share the port's PCI function, or that a software device stands on, to those its GIDs name.
fn attach(device: &mut Device, interfaces: &[Interface]) {
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
        let mut found: Vec<String> = interfaces.iter().filter(fits).map(|i| i.name.clone()).collect();
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
