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
        check_pcie_link(device, address, found);
        check_pcie_memory(case, device, address, found);
    }
    check_numa(case, found);
}

fn format_gts(tenths: u32) -> String {
    format!("{} GT/s", f64::from(tenths) / 10.0)
}

/// Data rate of a link after its encoding, in Gb/s.
fn link_gbps(tenths: u32, lanes: u32) -> f64 {
    let efficiency = if tenths <= 50 { 0.8 } else { 128.0 / 130.0 };
    f64::from(tenths) / 10.0 * f64::from(lanes) * efficiency
}

fn check_pcie_link(device: &RdmaDevice, address: &str, found: &mut Vec<HostFinding>) {
    let Some(pci) = &device.pci else { return };
    let at = format!("/sys/bus/pci/devices/{address}");
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
    let active = device.ports.iter().filter(|p| p.state == PortState::Active);
    // The rates of InfiniBand's older speeds include their 8b/10b encoding.
    let data = |p: &DevicePort| {
        let rate = p.rate.as_ref()?;
        let coded = p.link_layer == LinkLayer::InfiniBand && matches!(rate.speed.as_str(), "SDR" | "DDR" | "QDR");
        Some(if coded { rate.gbps * 0.8 } else { rate.gbps })
    };
    let rate: f64 = active.filter_map(data).sum();
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
    let node = |d: &RdmaDevice| d.pci.as_ref().and_then(|p| p.numa_node);
    let nics: Vec<(&RdmaDevice, u32)> = case.host.devices.iter().filter_map(|d| Some((d, node(d)?))).collect();
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

#[cfg(test)]
mod tests {
    #[test]
    fn what_a_slot_carries() {
        assert_eq!(super::link_gbps(320, 16).round(), 504.0);
        assert_eq!(super::link_gbps(25, 8).round(), 16.0);
    }
}
