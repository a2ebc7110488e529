//! Checks of a card's placement: PCI Express, NUMA, IOMMU, ordering.

use crate::device::{DevicePort, LinkLayer, PortState, RdmaDevice};
use crate::doctor::CheckInput;
use crate::finding::{HostFinding, Severity, id};

/// Runs the checks.
pub fn check_placement(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let mut addresses: Vec<&str> = Vec::new();
    for device in &case.host.devices {
        let Some(address) = device.pci.as_ref().and_then(|p| p.address.as_deref()) else { continue };
        if addresses.contains(&address) {
            continue;
        }
        addresses.push(address);
        check_pcie_link(case, device, address, found);
        check_pcie_memory(case, device, address, found);
    }
    check_numa(case, found);
}

fn format_gts(tenths: u32) -> String {
    format!("{} GT/s", f64::from(tenths) / 10.0)
}

/// Data rate of a link after encoding, in Gb/s.
fn link_gbps(tenths: u32, lanes: u32) -> f64 {
    let efficiency = if tenths <= 50 { 0.8 } else { 128.0 / 130.0 };
    f64::from(tenths) / 10.0 * f64::from(lanes) * efficiency
}

/// The data rate of a device's active ports in Gb/s.
fn active_gbps(device: &RdmaDevice) -> f64 {
    let active = device.ports.iter().filter(|port| port.state == PortState::Active);
    active.filter_map(data_gbps).sum()
}

/// The data rate of a port in Gb/s. The rates of InfiniBand's older speeds include the 8b/10b encoding.
fn data_gbps(port: &DevicePort) -> Option<f64> {
    let rate = port.rate.as_ref()?;
    let is_coded = port.link_layer == LinkLayer::InfiniBand && matches!(rate.speed.as_str(), "SDR" | "DDR" | "QDR");
    Some(if is_coded { rate.gbps * 0.8 } else { rate.gbps })
}

/// The domain of a PCI address, and the rest; the slot is the rest without the function.
fn split_address(device: &RdmaDevice) -> Option<(&str, &str)> {
    device.pci.as_ref()?.address.as_deref()?.split_once(':')
}

/// The pair of functions that carry a port together: a soldered card (GB10) has a part of the lanes in each of two PCI domains.
/// The link of a single function carries less than the port, and both carry the whole rate. Gives the pair in `device`'s slot,
/// the own function first.
fn port_pair<'a>(case: &CheckInput<'a>, device: &RdmaDevice) -> Option<(&'a RdmaDevice, &'a RdmaDevice)> {
    let (domain, rest) = split_address(device)?;
    let slot = rest.split('.').next()?;
    for own in &case.host.devices {
        let Some((own_domain, own_rest)) = split_address(own) else { continue };
        if own_domain != domain || own_rest.split('.').next() != Some(slot) {
            continue;
        }
        let twin = case.host.devices.iter().find(|other| {
            let is_twin = split_address(other).is_some_and(|(domain, rest)| domain != own_domain && rest == own_rest);
            is_twin && shares_port(own, other)
        });
        if let Some(twin) = twin {
            return Some((own, twin));
        }
    }
    None
}

/// Whether two functions of a board have equal links that carry the rate of a port only together.
fn shares_port(one: &RdmaDevice, other: &RdmaDevice) -> bool {
    let Some((first, second)) = one.pci.as_ref().zip(other.pci.as_ref()) else { return false };
    let Some((speed, width)) = first.speed.zip(first.width) else { return false };
    let link = link_gbps(speed, width);
    let rate = active_gbps(one);
    one.board_id.is_some()
        && one.board_id == other.board_id
        && first.speed == second.speed
        && first.width == second.width
        && rate == active_gbps(other)
        && link < rate
        && rate <= link * 2.0
}

fn check_pcie_link(case: &CheckInput<'_>, device: &RdmaDevice, address: &str, found: &mut Vec<HostFinding>) {
    let Some(pci) = &device.pci else { return };
    let at = format!("/sys/bus/pci/devices/{address}");
    if let Some((own, twin)) = port_pair(case, device) {
        if own.name == device.name {
            report_port_pair(&at, own, twin, found);
        }
        return;
    }
    let remedy = "reseat the card, in a slot of its own width and generation; look at the BIOS's settings of that slot (bifurcation, link speed) and at riser cables";
    if let (Some(now), Some(most)) = (pci.width, pci.max_width)
        && now < most
    {
        let evidence = format!("{at}/current_link_width is {now}, max_link_width is {most}");
        found.push(HostFinding::new(id::PCIE_WIDTH, Severity::Warning, &device.name, evidence, remedy));
    }
    if let (Some(now), Some(most)) = (pci.speed, pci.max_speed)
        && now < most
    {
        let evidence =
            format!("{at}/current_link_speed is {}, max_link_speed is {}", format_gts(now), format_gts(most));
        found.push(HostFinding::new(id::PCIE_SPEED, Severity::Warning, &device.name, evidence, remedy));
    }
    let rate = active_gbps(device);
    if let (Some(speed), Some(width)) = (pci.speed, pci.width) {
        let most = link_gbps(speed, width);
        if rate > most {
            found.push(HostFinding::new(
                id::PCIE_BANDWIDTH,
                Severity::Warning,
                &device.name,
                format!("{at}: {} x{width} carries {most:.0} Gb/s, the ports {rate:.0} Gb/s", format_gts(speed)),
                "the slot is the limit: use one of a later generation or more lanes, or expect no more than it carries",
            ));
        }
    }
}

/// Two functions of a port: no fault, and a half of the port's rate for programs that use a single interface.
fn report_port_pair(at: &str, own: &RdmaDevice, twin: &RdmaDevice, found: &mut Vec<HostFinding>) {
    let Some((speed, width)) = own.pci.as_ref().and_then(|pci| pci.speed.zip(pci.width)) else { return };
    let address = twin.pci.as_ref().and_then(|pci| pci.address.as_deref()).unwrap_or_default();
    let names: Vec<&str> = [own, twin].iter().flat_map(|d| d.function_netdevs.iter()).map(String::as_str).collect();
    found.push(HostFinding::new(
        id::PCIE_BANDWIDTH,
        Severity::Info,
        &own.name,
        format!(
            "{at}: {} x{width} carries {:.0} Gb/s, the port {:.0} Gb/s; {} ({address}) is a second function of the same board with the same link: a soldered card that has its lanes in two PCI domains",
            format_gts(speed),
            link_gbps(speed, width),
            active_gbps(own),
            twin.name
        ),
        format!(
            "no fault, and nothing to reseat: for the port's whole rate use the interfaces of both functions ({}), each with a subnet of its own",
            names.join(", ")
        ),
    ));
}

fn check_pcie_memory(case: &CheckInput<'_>, device: &RdmaDevice, address: &str, found: &mut Vec<HostFinding>) {
    if let Some(kind) = case.machine.iommu.get(address).filter(|k| k.starts_with("DMA")) {
        found.push(HostFinding::new(
            id::IOMMU,
            Severity::Info,
            &device.name,
            format!("/sys/bus/pci/devices/{address}/iommu_group/type is {kind}: the addresses of every transfer are translated"),
            "on the kernel's command line: iommu=pt (and intel_iommu=on or amd_iommu=on where guests get devices), then restart; GPUDirect between cards also wants ACS off",
        ));
    }
    if case.machine.relaxed_ordering.get(address) == Some(&false) {
        found.push(HostFinding::new(
            id::RELAXED_ORDERING,
            Severity::Info,
            &device.name,
            format!("/sys/bus/pci/devices/{address}/config: Device Control has relaxed ordering off; on AMD and Arm hosts that costs up to half of the rate"),
            format!("in the BIOS (PCIe relaxed ordering), or setpci -s {address} CAP_EXP+8.w=0010:0010 until the next restart"),
        ));
    }
}

fn check_numa(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let machine = case.machine;
    let nics: Vec<(&RdmaDevice, u32)> = case.host.devices.iter().filter_map(|d| Some((d, numa_node_of(d)?))).collect();
    if nics.is_empty() || machine.distances.len() < 2 {
        return;
    }
    for (what, list) in [("disk", &machine.disks), ("GPU", &machine.gpus)] {
        let far: Vec<&(String, Option<u32>)> =
            list.iter().filter(|(_, n)| n.is_some_and(|n| !nics.iter().any(|(_, nic)| *nic == n))).collect();
        let Some((_, Some(other))) = far.first() else { continue };
        let names = far.iter().map(|(n, _)| n.as_str()).collect::<Vec<_>>().join(", ");
        let (nic, own) = nics[0];
        let distance = machine.distances.get(&own).and_then(|d| d.get(*other as usize));
        let distance = distance.map_or(String::new(), |d| format!(" (distance {d}, own node 10)"));
        found.push(HostFinding::new(
            id::NUMA_DISTANCE,
            Severity::Info,
            &names,
            format!("NUMA node {other}, and no RDMA device is on it: {} is on node {own}{distance}", nic.name),
            format!("small reads are about a third slower across nodes: put a card beside each {what}, or the {what}s of the cache beside the card"),
        ));
    }
}

fn numa_node_of(d: &RdmaDevice) -> Option<u32> {
    d.pci.as_ref().and_then(|p| p.numa_node)
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_a_slot_carries() {
        assert_eq!(super::link_gbps(320, 16).round(), 504.0);
        assert_eq!(super::link_gbps(25, 8).round(), 16.0);
    }
}
