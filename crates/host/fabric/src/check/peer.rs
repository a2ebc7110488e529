//! Checks of both ends together: link layer, MTU, subnet, and whether traffic uses the intended interface.

use crate::address::{is_link_local, route_to, same_network};
use crate::change::HostChange;
use crate::device::LinkLayer;
use crate::doctor::CheckInput;
use crate::finding::{HostFinding, Severity, id};
use crate::host::HostFacts;
use crate::interface::NetInterface;
use std::net::IpAddr;

/// Runs the checks.
pub fn check_peer(case: &CheckInput<'_>, found: &mut Vec<HostFinding>) {
    let Some(peer) = &case.options.peer else { return };
    let them = peer.hostname.clone().unwrap_or_else(|| "the peer".into());
    let wanted = &case.options.for_rdma;
    let mut shared = false;
    for InterfacePair { own, remote, to: ip, .. } in interface_pairs(case.host, peer) {
        if !wanted.is_empty() && !wanted.contains(&own.name) {
            continue;
        }
        shared = true;
        compare_mtu(case, own, remote, &them, found);
        compare_layer(case, peer, own, remote, &them, found);
        compare_route(case, own, remote, ip, &them, found);
    }
    if !shared {
        found.push(HostFinding::new(
            id::PEER_SUBNET,
            if wanted.is_empty() { Severity::Warning } else { Severity::Error },
            &them,
            format!("no subnet has both ends: here {}; there {}", list_addresses(case.host), list_addresses(peer)),
            "give the interfaces that are cabled together addresses of one subnet; with routers between, RoCE v2 and IPoIB work, and InfiniBand needs an InfiniBand router",
        ));
    }
    compare_layers(case, peer, &them, found);
}

/// Interfaces of both ends in the same subnet.
#[derive(Debug, Clone, Copy)]
pub struct InterfacePair<'a> {
    /// The interface of this host.
    pub own: &'a NetInterface,
    /// The interface of the peer.
    pub remote: &'a NetInterface,
    /// The address of this host.
    pub from: IpAddr,
    /// The address of the peer.
    pub to: IpAddr,
}

/// All pairs except loopback.
pub fn interface_pairs<'a>(host: &'a HostFacts, peer: &'a HostFacts) -> Vec<InterfacePair<'a>> {
    let mut all = Vec::new();
    for own in host.interfaces.iter().filter(|i| !i.is_loopback()) {
        for remote in peer.interfaces.iter().filter(|i| !i.is_loopback()) {
            let near = own.addresses.iter().filter(|(ip, _)| !is_link_local(*ip)).find_map(|(ip, prefix)| {
                remote
                    .addresses
                    .iter()
                    .find(|(other, _)| other != ip && same_network(*ip, *other, *prefix))
                    .map(|(other, _)| (*ip, *other))
            });
            all.extend(near.map(|(from, to)| InterfacePair { own, remote, from, to }));
        }
    }
    all
}

fn compare_mtu(
    case: &CheckInput<'_>,
    own: &NetInterface,
    remote: &NetInterface,
    them: &str,
    found: &mut Vec<HostFinding>,
) {
    let (Some(here), Some(there)) = (own.mtu, remote.mtu) else { return };
    if here == there {
        return;
    }
    let name = &own.name;
    let rise = here < there && own.max_mtu.is_none_or(|most| there <= most);
    let change = rise.then(|| HostChange::Mtu { interface: name.clone(), from: Some(here), to: there });
    let rest = if rise {
        String::new()
    } else {
        format!("make them equal: on {them}, ip link set {} mtu {here}", remote.name)
    };
    found.push(
        HostFinding::new(
            id::PEER_MTU,
            case.severity_for([name], Severity::Warning),
            name,
            format!("/sys/class/net/{name}/mtu is {here}, {} on {them} has {there}: large packets from one are lost at the other, small ones arrive", remote.name),
            rest,
        )
        .with_changes(change),
    );
}

fn layer_of(host: &HostFacts, interface: &NetInterface) -> LinkLayer {
    match host.ports_of(interface).first() {
        Some((_, port)) => port.link_layer,
        None if interface.is_ipoib() => LinkLayer::InfiniBand,
        None => LinkLayer::Ethernet,
    }
}

fn layer_name(layer: LinkLayer) -> &'static str {
    match layer {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::Unknown => "neither InfiniBand nor Ethernet",
    }
}

fn compare_layer(
    case: &CheckInput<'_>,
    peer: &HostFacts,
    own: &NetInterface,
    remote: &NetInterface,
    them: &str,
    found: &mut Vec<HostFinding>,
) {
    let here = layer_of(case.host, own);
    let there = layer_of(peer, remote);
    let both = !case.host.ports_of(own).is_empty() && !peer.ports_of(remote).is_empty();
    if here != there && both {
        found.push(HostFinding::new(
            id::PEER_LINK_LAYER,
            Severity::Error,
            &own.name,
            format!("{} is {}, {} on {them} is {}", own.name, layer_name(here), remote.name, layer_name(there)),
            "a VPI card changes its link layer: mlxconfig -d PCI-ADDRESS set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet), then restart",
        ));
    }
}

/// Hosts with different kinds of RDMA share a subnet through a gateway at most.
fn compare_layers(case: &CheckInput<'_>, peer: &HostFacts, them: &str, found: &mut Vec<HostFinding>) {
    let here = link_layers(case.host);
    let there = link_layers(peer);
    let told = found.iter().any(|f| f.id == id::PEER_LINK_LAYER);
    if !told && !here.is_empty() && !there.is_empty() && !here.iter().any(|l| there.contains(l)) {
        found.push(HostFinding::new(
            id::PEER_LINK_LAYER,
            Severity::Error,
            them,
            format!("all RDMA ports here are {}, all on {them} are {}", layer_name(here[0]), layer_name(there[0])),
            "RDMA needs the same on both ends: a VPI card changes its link layer (mlxconfig … LINK_TYPE_P1=1 or 2); until then TCP carries the data",
        ));
    }
}

fn link_layers(host: &HostFacts) -> Vec<LinkLayer> {
    let mut all: Vec<LinkLayer> = Vec::new();
    for port in host.devices.iter().flat_map(|d| &d.ports) {
        if port.link_layer != LinkLayer::Unknown && !all.contains(&port.link_layer) {
            all.push(port.link_layer);
        }
    }
    all
}

fn compare_route(
    case: &CheckInput<'_>,
    own: &NetInterface,
    remote: &NetInterface,
    ip: IpAddr,
    them: &str,
    found: &mut Vec<HostFinding>,
) {
    let meant = case.options.for_rdma.is_empty() || case.options.for_rdma.contains(&own.name);
    if !meant {
        return;
    }
    // A trial outweighs the main routing table: there may be policy rules and other tables.
    let trial = case.options.trials.iter().find(|t| t.interface == own.name && t.to == ip);
    let tried = trial.and_then(|t| Some((t.bytes, t.carried.as_ref().ok()?)));
    let evidence = match (tried, route_to(&case.host.routes, ip)) {
        (Some((_, [None, None])), _) => return,
        (Some((bytes, [here, there])), _) => {
            format!(
                "of {} KiB sent from {} to {ip} ({} on {them}) the interfaces' counters (/proc/net/dev) moved on {} here and on {} there",
                bytes >> 10,
                own.name,
                remote.name,
                carrying_name(here, own),
                carrying_name(there, remote)
            )
        }
        // With routes of several interfaces into the same subnet the first applies; SAME-SUBNET reports that too.
        (None, Some(route)) if route.interface != own.name => {
            format!("packets to {ip} ({} on {them}) leave by {}, not by {}", remote.name, route.interface, own.name)
        }
        (None, _) => return,
    };
    found.push(HostFinding::new(
        id::PEER_ROUTE,
        case.severity_for([&own.name], Severity::Warning),
        &own.name,
        evidence,
        format!(
            "ip route get {ip} shows it; give {} a subnet of its own, or a route: ip route add {ip} dev {}",
            own.name, own.name
        ),
    ));
}

fn carrying_name(by: &Option<String>, meant: &NetInterface) -> String {
    by.clone().unwrap_or_else(|| meant.name.clone())
}

/// The first addresses of a host, with their interfaces.
fn list_addresses(host: &HostFacts) -> String {
    let mut shown = Vec::new();
    for interface in host.interfaces.iter().filter(|interface| !interface.is_loopback()) {
        let addresses = interface.addresses.iter().filter(|(ip, _)| !is_link_local(*ip));
        shown.extend(addresses.map(|(ip, prefix)| format!("{} {ip}/{prefix}", interface.name)));
    }
    shown.truncate(8);
    shown.join(", ")
}
