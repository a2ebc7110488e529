//! Checks of RDMA over Ethernet: addresses, flow control, traffic class.

use crate::device::{GidType, LinkLayer, PortState};
use crate::doctor::{CheckInput, port_name, port_path};
use crate::finding::{HostFinding, Severity, id};

/// Runs the checks.
pub fn check_roce(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    for (device, port) in case.all_ports() {
        if port.link_layer != LinkLayer::Ethernet || port.state != PortState::Active || device.is_iwarp() {
            continue;
        }
        if case.is_idle_function(device, port) {
            continue;
        }
        let name = port_name(device, port);
        let path = port_path(device, port);
        let severity = case.severity_for(&port.netdevs, Severity::Warning);
        let v2 = port.gids.iter().filter(|g| g.kind == GidType::RoceV2).count();
        let netdev = port.netdevs.first().cloned().unwrap_or_else(|| "IF".into());
        if case.host.left_out.iter().any(|l| l.path.starts_with(&format!("{path}/gid"))) {
            // Unknown; reported by CHECK-LEFT-OUT.
        } else if case.host.standby_bond(port).is_some() {
            // The bond's addresses are on the active member, and move here when that fails.
        } else if v2 == 0 {
            let remedy = format!(
                "ip link set {netdev} up and give it an address; when the interface is in another network namespace, run this check there; old firmware and ConnectX-3 support RoCE v1 only"
            );
            let evidence = format!("{path}/gid_attrs/types: none of {} entries is RoCE v2", port.gids.len());
            found.push(HostFinding::new(id::GID_ROCE_V2, severity, &name, evidence, remedy));
        } else if !port.gids.iter().any(|g| g.is_routable()) {
            found.push(HostFinding::new(
                id::GID_ROCE_V2,
                severity,
                &name,
                format!(
                    "{path}/gids: every RoCE v2 entry is link-local (fe80::…): valid in one subnet only, not routable"
                ),
                format!("give the interface an address: ip address add ADDRESS/BITS dev {netdev}"),
            ));
        }
        if device.pci.is_none() {
            continue;
        }
        check_flow_control(case, &name, &port.netdevs, found);
        if device.traffic_class.is_none() && device.roce_tos.unwrap_or(0) == 0 && device.roce_tos.is_some() {
            found.push(HostFinding::new(
                id::ROCE_TRAFFIC_CLASS,
                Severity::Info,
                &name,
                format!("/sys/kernel/config/rdma_cm/{}/ports/{}/default_roce_tos is 0: RoCE packets carry DSCP 0, as all others", device.name, port.number),
                format!("when the switches keep a class for RoCE (DSCP 26 mostly): cma_roce_tos -d {} -t 106", device.name),
            ));
        }
    }
}

fn check_flow_control(case: &CheckInput<'_>, name: &str, netdevs: &[String], found: &mut Vec<HostFinding>) {
    let interfaces = netdevs.iter().filter_map(|n| case.host.interface(n));
    let mut below: Vec<&str> =
        interfaces.flat_map(|i| case.host.physical_interfaces(i)).map(|i| i.name.as_str()).collect();
    below.sort_unstable();
    below.dedup();
    let told: Vec<_> = case.host.pfc.iter().filter(|p| below.contains(&p.interface.as_str())).collect();
    if told.is_empty() || told.iter().any(|p| p.priorities != 0) {
        return;
    }
    let first = &told[0].interface;
    found.push(HostFinding::new(
        id::ROCE_FLOW_CONTROL,
        Severity::Info,
        name,
        format!("netlink (dcb pfc show dev {first}): no priority pauses; a full switch drops RoCE packets, and each loss costs many"),
        format!("either PFC on host and switches: dcb pfc set dev {first} prio-pfc all:off 3:on, with RoCE in that priority; or ECN with congestion control, which is sufficient on ConnectX-6 Dx and later"),
    ));
}
