//! Checks of several interfaces in the same subnet: which interface answers ARP, and which sends.

use crate::address::network_address;
use crate::change::HostChange;
use crate::doctor::CheckInput;
use crate::finding::{HostFinding, Severity, id};
use crate::interface::NetInterface;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Runs the checks.
pub fn check_subnets(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let mut subnets: BTreeMap<(IpAddr, u8), Vec<&NetInterface>> = BTreeMap::new();
    for interface in case.host.interfaces.iter().filter(|i| !i.is_loopback() && i.is_up) {
        for (ip, prefix) in &interface.addresses {
            // A single address is no subnet, and link-local addresses are on every interface.
            let single = if ip.is_ipv4() { 32 } else { 128 };
            if *prefix == single || crate::address::is_link_local(*ip) {
                continue;
            }
            if let Some(net) = network_address(*ip, *prefix) {
                let list = subnets.entry((net, *prefix)).or_default();
                if !list.iter().any(|i| i.name == interface.name) {
                    list.push(interface);
                }
            }
        }
    }
    // Where addresses come from the older files, two routes into the same network show that.
    for route in case.host.routes.iter().filter(|r| r.via.is_none() && r.prefix > 0 && r.prefix < 32 && r.to.is_ipv4())
    {
        if let Some(interface) = case.host.interface(&route.interface).filter(|i| !i.is_loopback() && i.is_up) {
            let list = subnets.entry((route.to, route.prefix)).or_default();
            if !list.is_empty() && !list.iter().any(|i| i.name == interface.name) {
                list.push(interface);
            }
        }
    }
    for ((net, prefix), list) in subnets.iter().filter(|(_, list)| list.len() > 1) {
        check_subnet(case, &format!("{net}/{prefix}"), net.is_ipv4(), list, found);
    }
}

fn check_subnet(case: &CheckInput<'_>, net: &str, is_v4: bool, list: &[&NetInterface], found: &mut Vec<HostFinding>) {
    let names: Vec<String> = list.iter().map(|i| i.name.clone()).collect();
    let subject = names.join(", ");
    let bondable = if list.iter().any(|i| i.is_ipoib()) { "active-backup" } else { "802.3ad" };
    let table = list
        .iter()
        .flat_map(|i| i.addresses.iter().map(move |(ip, prefix)| format!("{} {ip}/{prefix}", i.name)))
        .collect::<Vec<_>>()
        .join(", ");
    found.push(HostFinding::new(
        id::SAME_SUBNET,
        case.severity_for(&names, Severity::Warning),
        &subject,
        format!("all in {net} ({table}): the routing table has one route per subnet, so one of them sends everything"),
        format!("either a subnet of its own for each (ip address replace …), which lets RDMA use all of them; or one bond over all of them ({bondable}) with one address"),
    ));
    if !is_v4 {
        return;
    }
    let set = |key: &str, to: i64| {
        let changes: Vec<HostChange> = names
            .iter()
            .filter(|n| case.machine.sysctl_value(n, key).is_some_and(|v| v < to))
            .map(|n| HostChange::Sysctl {
                key: format!("net.ipv4.conf.{}.{key}", n.replace('.', "/")),
                from: case.machine.sysctls.get(&format!("{n}/{key}")).map(ToString::to_string),
                to: to.to_string(),
            })
            .collect();
        changes
    };
    let mut changes = set("arp_ignore", 1);
    changes.extend(set("arp_announce", 2));
    if !changes.is_empty() {
        let shown = |key: &str| {
            names
                .iter()
                .map(|n| format!("{n} {}", case.machine.sysctl_value(n, key).unwrap_or(0)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        found.push(
            HostFinding::new(
                id::ARP_FLUX,
                case.severity_for(&names, Severity::Warning),
                &subject,
                format!("/proc/sys/net/ipv4/conf/*/arp_ignore: {}; arp_announce: {}: each interface answers for the addresses of the others", shown("arp_ignore"), shown("arp_announce")),
                "needed only while both stay in one subnet",
            )
            .with_changes(changes),
        );
    }
    let strict: Vec<&String> = names.iter().filter(|n| case.machine.sysctl_value(n, "rp_filter") == Some(1)).collect();
    if !strict.is_empty() {
        let changes = strict.iter().map(|n| HostChange::Sysctl {
            key: format!("net.ipv4.conf.{}.rp_filter", n.replace('.', "/")),
            from: case.machine.sysctls.get(&format!("{n}/rp_filter")).map(ToString::to_string),
            to: "2".to_owned(),
        });
        let shown = strict.iter().map(|n| n.as_str()).collect::<Vec<_>>().join(", ");
        found.push(
            HostFinding::new(
                id::RP_FILTER,
                case.severity_for(&names, Severity::Warning),
                &subject,
                format!("/proc/sys/net/ipv4/conf/*/rp_filter is 1 (strict) for {shown}: packets that arrive on another interface than the route's are dropped silently"),
                "needed only while both stay in one subnet",
            )
            .with_changes(changes),
        );
    }
}
