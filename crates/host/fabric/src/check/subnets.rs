//! Checks of several interfaces in one subnet: which one answers, which one sends.

use crate::address::network;
use crate::change::Change;
use crate::doctor::Case;
use crate::finding::{Finding, Severity, id};
use crate::interface::Interface;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// Runs them.
pub fn run(case: &Case<'_>, found: &mut Vec<Finding>) {
    let mut subnets: BTreeMap<(IpAddr, u8), Vec<&Interface>> = BTreeMap::new();
    for interface in case.host.interfaces.iter().filter(|i| !i.is_loopback() && i.is_up) {
        for (ip, prefix) in &interface.addresses {
            // A single address is no subnet, and link-local ones are on every interface.
            let single = if ip.is_ipv4() { 32 } else { 128 };
            if *prefix == single || crate::address::is_link_local(*ip) {
                continue;
            }
            if let Some(net) = network(*ip, *prefix) {
                let list = subnets.entry((net, *prefix)).or_default();
                if !list.iter().any(|i| i.name == interface.name) {
                    list.push(interface);
                }
            }
        }
    }
    // Where only old files tell addresses, two routes to one network say the same.
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
        subnet(case, &format!("{net}/{prefix}"), net.is_ipv4(), list, found);
    }
}

fn subnet(case: &Case<'_>, net: &str, is_v4: bool, list: &[&Interface], found: &mut Vec<Finding>) {
    let names: Vec<String> = list.iter().map(|i| i.name.clone()).collect();
    let subject = names.join(", ");
    let bondable = if list.iter().any(|i| i.is_ipoib()) { "active-backup" } else { "802.3ad" };
    let table = list
        .iter()
        .flat_map(|i| i.addresses.iter().map(move |(ip, prefix)| format!("{} {ip}/{prefix}", i.name)))
        .collect::<Vec<_>>()
        .join(", ");
    found.push(Finding::new(
        id::SAME_SUBNET,
        case.severity(&names, Severity::Warning),
        &subject,
        format!("all in {net} ({table}): the routing table knows one way into a subnet, so one of them sends everything"),
        format!("either a subnet of its own for each (ip address replace …), which lets RDMA use all of them; or one bond over all of them ({bondable}) with one address"),
    ));
    if !is_v4 {
        return;
    }
    let set = |key: &str, to: i64| {
        let changes: Vec<Change> = names
            .iter()
            .filter(|n| case.machine.sysctl(n, key).is_some_and(|v| v < to))
            .map(|n| Change::Sysctl {
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
                .map(|n| format!("{n} {}", case.machine.sysctl(n, key).unwrap_or(0)))
                .collect::<Vec<_>>()
                .join(", ")
        };
        found.push(
            Finding::new(
                id::ARP_FLUX,
                case.severity(&names, Severity::Warning),
                &subject,
                format!("/proc/sys/net/ipv4/conf/*/arp_ignore: {}; arp_announce: {}: each interface answers for the addresses of the others", shown("arp_ignore"), shown("arp_announce")),
                "needed only while both stay in one subnet",
            )
            .with(changes),
        );
    }
    let strict: Vec<&String> = names.iter().filter(|n| case.machine.sysctl(n, "rp_filter") == Some(1)).collect();
    if !strict.is_empty() {
        let changes = strict.iter().map(|n| Change::Sysctl {
            key: format!("net.ipv4.conf.{}.rp_filter", n.replace('.', "/")),
            from: case.machine.sysctls.get(&format!("{n}/rp_filter")).map(ToString::to_string),
            to: "2".to_owned(),
        });
        let shown = strict.iter().map(|n| n.as_str()).collect::<Vec<_>>().join(", ");
        found.push(
            Finding::new(
                id::RP_FILTER,
                case.severity(&names, Severity::Warning),
                &subject,
                format!("/proc/sys/net/ipv4/conf/*/rp_filter is 1 (strict) for {shown}: what comes in by the interface that the route does not name is dropped without a word"),
                "needed only while both stay in one subnet",
            )
            .with(changes),
        );
    }
}
