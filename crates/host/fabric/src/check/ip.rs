//! Checks of IP on RDMA interfaces: IPoIB mode, MTU, addresses, persistent settings, bonds.

use crate::change::HostChange;
use crate::device::PortState;
use crate::doctor::CheckInput;
use crate::finding::{HostFinding, Severity, id};
use crate::interface::{IpoibMode, NetInterface};
use crate::persist::SavedSetting;

const IPOIB_DATAGRAM_MTU: u32 = NetInterface::DATAGRAM_MTU;
const DATAGRAM_4K: u32 = NetInterface::DATAGRAM_4K_MTU;
const IPOIB_CONNECTED_MTU: u32 = NetInterface::CONNECTED_MTU;
/// The first kernel with accelerated IPoIB on Omni-Path.
const ACCELERATED_SINCE: (u32, u32) = (5, 8);
/// Release of an older kernel with the same ability: that of RHEL 8.
const ACCELERATED_RELEASE: &str = "4.18.0-";
/// MTU of Ethernet jumbo frames.
const JUMBO_MTU: u32 = 9000;

/// Runs the checks.
pub fn check_ip(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for interface in case.rdma_interfaces().filter(|interface| !case.is_idle_interface(interface)) {
        check_mode(case, interface, found);
        check_mtu(case, interface, found);
        check_address(case, interface, found);
        check_saved(case, interface, found);
    }
    for bond in case.host.interfaces.iter().filter(|i| i.bond_mode.is_some()) {
        check_bond(case, bond, found);
    }
}

/// The limits of IPoIB on a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum IpoibLimits {
    /// Connected mode is possible.
    Connected,
    /// Datagram mode only, with packets of at most 4 KiB.
    Datagram,
    /// Omni-Path on a kernel that accelerates datagram mode, with packets of 10 KiB.
    Accelerated,
}

impl IpoibLimits {
    fn of(case: &CheckInput<'_>, interface: &NetInterface) -> Self {
        let ports = case.host.ports_of(interface);
        let device = ports.first().map(|(device, _)| *device);
        if device.is_some_and(|device| device.is_omni_path()) {
            let accelerated = interface.is_accelerated_ipoib() || accelerates_ipoib(case.host.kernel.as_deref());
            return if accelerated { IpoibLimits::Accelerated } else { IpoibLimits::Connected };
        }
        let pci = device.and_then(|device| device.pci.as_ref()).or(interface.pci.as_ref());
        let has_connected = pci.and_then(|pci| pci.model()).is_some_and(|model| model.connected_ipoib);
        if has_connected { IpoibLimits::Connected } else { IpoibLimits::Datagram }
    }

    /// The highest MTU of datagram mode.
    fn datagram_mtu(self) -> u32 {
        if self == IpoibLimits::Accelerated { NetInterface::ACCELERATED_MTU } else { DATAGRAM_4K }
    }
}

/// Whether a kernel accelerates IPoIB on Omni-Path.
fn accelerates_ipoib(release: Option<&str>) -> bool {
    let Some(release) = release else { return false };
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|word| word.parse::<u32>().ok());
    let major = numbers.next().unwrap_or(0);
    let minor = numbers.next().unwrap_or(0);
    (major, minor) >= ACCELERATED_SINCE || release.starts_with(ACCELERATED_RELEASE)
}

fn wanted_mtu(case: &CheckInput<'_>, interface: &NetInterface) -> Option<(u32, String)> {
    case.machine.saved.of_interface(&interface.name).find_map(|s| Some((s.mtu?, s.file.clone())))
}

fn check_mode(case: &CheckInput<'_>, interface: &NetInterface, found: &mut Vec<HostFinding>) {
    // A bond has no mode: the members have.
    if !interface.is_ipoib() || interface.parent.is_some() || interface.bond_mode.is_some() {
        return;
    }
    if !interface.is_up && !case.is_required(&interface.name) {
        return;
    }
    let limits = IpoibLimits::of(case, interface);
    let name = &interface.name;
    let mtu = interface.mtu.unwrap_or(0);
    let shown = interface.mtu.map_or("?".into(), |m| m.to_string());
    let evidence = format!(
        "/sys/class/net/{name}/mode is {}, mtu is {shown}",
        interface.ipoib_mode.map_or("not shown", IpoibMode::as_str)
    );
    match (interface.ipoib_mode, limits) {
        (Some(IpoibMode::Connected), _) => {}
        (Some(IpoibMode::Datagram), IpoibLimits::Connected) => {
            let changes = [
                HostChange::Mode { interface: name.clone(), from: interface.ipoib_mode, to: IpoibMode::Connected },
                HostChange::Mtu { interface: name.clone(), from: interface.mtu, to: IPOIB_CONNECTED_MTU },
            ];
            found.push(
                HostFinding::new(
                    id::IPOIB_MODE,
                    Severity::Warning,
                    name,
                    format!("{evidence}: each packet of at most 4 KiB costs the processor; TCP reaches a part of the link's rate"),
                    "on all hosts of the subnet; RDMA itself does not depend on it",
                )
                .with_changes(changes),
            );
        }
        _ if interface.is_accelerated_ipoib() => found.push(HostFinding::new(
            id::IPOIB_MODE,
            Severity::Info,
            name,
            format!("{evidence}: accelerated IPoIB of Omni-Path, which has datagram mode only"),
            "no action: packets have 10 KiB; RDMA itself does not depend on it",
        )),
        (_, IpoibLimits::Accelerated) => found.push(HostFinding::new(
            id::IPOIB_MODE,
            Severity::Info,
            name,
            format!("{evidence}: the kernel accelerates IPoIB on Omni-Path, with an MTU of up to {}", NetInterface::ACCELERATED_MTU),
            "the fabric manager sets the limit: MTU 10240 for the multicast group in opafm.xml, then restart opafm and raise the MTU on all hosts of the subnet",
        )),
        _ => found.push(HostFinding::new(
            id::IPOIB_MODE,
            Severity::Info,
            name,
            format!("{evidence}: ConnectX-4 and later, and cloud fabrics, have datagram mode only"),
            "no action: send data over RDMA, which has no such limit; TCP over IPoIB stays below the link's rate",
        )),
    }
    if interface.ipoib_mode != Some(IpoibMode::Connected)
        && let Some((wanted, file)) = wanted_mtu(case, interface)
            .filter(|(wanted, _)| *wanted > limits.datagram_mtu() || (*wanted > mtu && mtu == IPOIB_DATAGRAM_MTU))
    {
        found.push(HostFinding::new(
            id::IPOIB_MTU_REFUSED,
            Severity::Warning,
            name,
            format!("{file} asks for MTU {wanted}, but the kernel keeps {shown}: in datagram mode the limit is {IPOIB_DATAGRAM_MTU} ({} where the subnet manager gives larger packets), and `ip link set {name} mtu {wanted}` says \"Invalid argument\"", limits.datagram_mtu()),
            format!("remove the MTU from {file}; on cloud fabrics {IPOIB_DATAGRAM_MTU} is normal and needs no action"),
        ));
    }
}

fn check_mtu(case: &CheckInput<'_>, interface: &NetInterface, found: &mut Vec<HostFinding>) {
    let (name, Some(mtu)) = (&interface.name, interface.mtu) else { return };
    // A member of a bond follows the bond.
    if interface.master.is_some() || !interface.is_up && !case.is_required(name) {
        return;
    }
    let change = |to: u32| [HostChange::Mtu { interface: name.clone(), from: Some(mtu), to }];
    let shown = format!("/sys/class/net/{name}/mtu is {mtu}");
    let ports = case.host.ports_of(interface);
    let iwarp = ports.iter().any(|(d, _)| d.node_type.as_deref() == Some("RNIC"));
    let most = interface.max_mtu.unwrap_or(u32::MAX);
    match interface.ipoib_mode {
        Some(IpoibMode::Connected) if mtu < IPOIB_CONNECTED_MTU => found.push(
            HostFinding::new(
                id::MTU_LOW,
                Severity::Warning,
                name,
                format!("{shown}, connected mode allows {IPOIB_CONNECTED_MTU}"),
                "on all hosts of the subnet",
            )
            .with_changes(change(IPOIB_CONNECTED_MTU)),
        ),
        Some(IpoibMode::Connected) => {}
        _ if interface.is_ipoib() && mtu < IPOIB_DATAGRAM_MTU => found.push(
            HostFinding::new(
                id::MTU_LOW,
                Severity::Warning,
                name,
                format!("{shown}, datagram mode allows {IPOIB_DATAGRAM_MTU} at least"),
                "on all hosts of the subnet",
            )
            .with_changes(change(IPOIB_DATAGRAM_MTU)),
        ),
        _ if interface.is_ipoib() => {}
        _ if mtu < JUMBO_MTU && most >= JUMBO_MTU => {
            let packet = match mtu {
                4200.. => 4096,
                2200.. => 2048,
                1150.. => 1024,
                _ => 512,
            };
            let rdma = if ports.is_empty() || iwarp {
                String::new()
            } else {
                format!(": RoCE packets carry {packet} of 4096 bytes")
            };
            let severity = if mtu < 1500 || (mtu < 4200 && !ports.is_empty() && !iwarp) {
                Severity::Warning
            } else {
                Severity::Info
            };
            // Larger packets gain nothing without hardware.
            let severity = if ports.iter().all(|(d, _)| d.pci.is_none()) { Severity::Info } else { severity };
            found.push(
                HostFinding::new(
                    id::MTU_LOW,
                    severity,
                    name,
                    format!("{shown}, {JUMBO_MTU} is possible{rdma}"),
                    "only when the switch ports and all hosts of the subnet do the same: try it with ping -M do -s 8972 HOST",
                )
                .with_changes(change(JUMBO_MTU)),
            );
        }
        _ => {}
    }
}

fn check_address(case: &CheckInput<'_>, interface: &NetInterface, found: &mut Vec<HostFinding>) {
    let name = &interface.name;
    // Addresses of a bond's members, and of a VLAN's parent, are on the interface above.
    let above = case.host.interfaces.iter().any(|i| i.lower.contains(name) || i.parent.as_ref() == Some(name));
    let ports = case.host.ports_of(interface);
    let active = ports.iter().any(|(_, p)| p.state == PortState::Active);
    let has_global = interface.addresses.iter().any(|(ip, _)| !crate::address::is_link_local(*ip));
    if interface.master.is_some() || above || has_global || !(active || case.is_required(name)) {
        return;
    }
    // Where addresses are unknown, a missing address is no finding.
    if case.host.interfaces.iter().all(|i| i.addresses.is_empty()) && !case.is_required(name) {
        return;
    }
    let kind = match interface.addresses.first() {
        Some((ip, _)) => format!("only the link-local {ip}"),
        None => "no IPv4 and no IPv6 address".to_owned(),
    };
    found.push(HostFinding::new(
        id::NO_ADDRESS,
        case.severity_for([name], Severity::Warning),
        name,
        format!("{name} has {kind}; rdma_cm finds devices by IP address"),
        format!("ip address add 10.0.0.1/24 dev {name} && ip link set {name} up, with a subnet of its own for each interface"),
    ));
}

fn check_saved(case: &CheckInput<'_>, interface: &NetInterface, found: &mut Vec<HostFinding>) {
    if !case.machine.saved.any || interface.master.is_some() || interface.addresses.is_empty() {
        return;
    }
    let name = &interface.name;
    let all: Vec<&SavedSetting> = case.machine.saved.of_interface(name).collect();
    let mut lost = Vec::new();
    if let Some((ip, prefix)) =
        interface.addresses.iter().find(|(ip, _)| ip.is_ipv4() && !all.iter().any(|s| s.assigns_address(*ip)))
    {
        lost.push(format!("address {ip}/{prefix}"));
    }
    let default = if interface.is_ipoib() { IPOIB_DATAGRAM_MTU } else { 1500 };
    if let Some(mtu) = interface.mtu.filter(|m| *m != default && *m != DATAGRAM_4K)
        && !interface.is_accelerated_ipoib()
        && !all.iter().any(|s| s.mtu == Some(mtu))
    {
        lost.push(format!("MTU {mtu}"));
    }
    if interface.ipoib_mode == Some(IpoibMode::Connected) && !all.iter().any(|s| s.mode == Some(IpoibMode::Connected)) {
        lost.push("mode connected".to_owned());
    }
    if !lost.is_empty() {
        let mut keep = Vec::new();
        if lost.iter().any(|l| l.starts_with("mode")) {
            let mode = IpoibMode::Connected;
            keep.push(HostChange::Mode { interface: name.clone(), from: Some(mode), to: mode });
        }
        if let Some(mtu) = interface.mtu.filter(|_| lost.iter().any(|l| l.starts_with("MTU"))) {
            keep.push(HostChange::Mtu { interface: name.clone(), from: Some(mtu), to: mtu });
        }
        let where_ = match all.first() {
            Some(setting) => format!("{} does not contain them", setting.file),
            None => "no file of ifupdown, systemd-networkd or NetworkManager names the interface".to_owned(),
        };
        let mut finding = HostFinding::new(
            id::NOT_PERSISTED,
            Severity::Warning,
            name,
            format!("{name}: {} will be gone after a restart: {where_}", lost.join(", ")),
            "spurline net fix --persist ifupdown (or networkd, networkmanager) writes MTU and mode; addresses by hand in the same file",
        );
        finding.changes = keep;
        found.push(finding);
    }
}

fn check_bond(case: &CheckInput<'_>, bond: &NetInterface, found: &mut Vec<HostFinding>) {
    let name = &bond.name;
    let members: Vec<&NetInterface> = case.host.interfaces.iter().filter(|i| i.master.as_ref() == Some(name)).collect();
    let mode = bond.bond_mode.as_deref().unwrap_or_default();
    let ipoib = bond.is_ipoib() || members.iter().any(|m| m.is_ipoib());
    let rdma = !case.host.ports_of(bond).is_empty();
    let shown = format!("/sys/class/net/{name}/bonding/mode is {mode}");
    if ipoib && mode != "active-backup" {
        found.push(HostFinding::new(
            id::BOND_MODE,
            Severity::Error,
            name,
            format!("{shown}: IPoIB interfaces work in active-backup only"),
            "ip link set BOND down, free the members, echo active-backup > /sys/class/net/BOND/bonding/mode; to use both ports at once give each a subnet of its own",
        ));
    } else if rdma && !ipoib && !matches!(mode, "active-backup" | "balance-xor" | "802.3ad") {
        found.push(HostFinding::new(
            id::BOND_MODE,
            case.severity_for([name], Severity::Warning),
            name,
            format!("{shown}: RoCE follows a bond in active-backup, balance-xor and 802.3ad only"),
            format!("in the bond's configuration: mode 802.3ad with a switch that speaks LACP, else active-backup; by hand: ip link set {name} type bond mode 802.3ad while it has no members"),
        ));
    }
    for member in members.iter().filter(|m| m.carrier == Some(false) || !m.is_up) {
        let state = if member.is_up { "carrier is 0" } else { "is switched off" };
        found.push(
            HostFinding::new(
                id::BOND_MEMBER,
                case.severity_for([name], Severity::Warning),
                &member.name,
                format!("/sys/class/net/{}: {state}: {name} runs with less than its members", member.name),
                "look at the cable and the switch port",
            )
            .with_changes((!member.is_up).then(|| HostChange::Up { interface: member.name.clone() })),
        );
    }
}
