//! Checks of two ends together: link layer, MTU, subnet, and whether traffic leaves by the interface meant.

use crate::address::{is_link_local, route_to, same_network};
use crate::change::Change;
use crate::device::LinkLayer;
use crate::doctor::Case;
use crate::finding::{Finding, Severity, id};
use crate::host::Host;
use crate::interface::Interface;
use std::net::IpAddr;

/// Runs them.
pub fn run(case: &Case<'_>, found: &mut Vec<Finding>) {
    let Some(peer) = &case.ask.peer else { return };
    let them = peer.hostname.clone().unwrap_or_else(|| "the peer".into());
    let wanted = &case.ask.for_rdma;
    let mut shared = false;
    for Pair { own, theirs, to: ip, .. } in pairs(case.host, peer) {
        if !wanted.is_empty() && !wanted.contains(&own.name) {
            continue;
        }
        shared = true;
        mtu(case, own, theirs, &them, found);
        layer(case, peer, own, theirs, &them, found);
        route(case, own, theirs, ip, &them, found);
    }
    if !shared {
        let list = |host: &Host| {
            let of = |i: &Interface| {
                let all = i
                    .addresses
                    .iter()
                    .filter(|(ip, _)| !is_link_local(*ip))
                    .map(|(ip, p)| format!("{} {ip}/{p}", i.name));
                all.collect::<Vec<_>>()
            };
            host.interfaces.iter().filter(|i| !i.is_loopback()).flat_map(of).take(8).collect::<Vec<_>>().join(", ")
        };
        found.push(Finding::new(
            id::PEER_SUBNET,
            if wanted.is_empty() { Severity::Warning } else { Severity::Error },
            &them,
            format!("no subnet has both ends: here {}; there {}", list(case.host), list(peer)),
            "give the interfaces that are cabled together addresses of one subnet; with routers between, RoCE v2 and IPoIB work, and InfiniBand needs an InfiniBand router",
        ));
    }
    layers(case, peer, &them, found);
}

/// Interfaces of both ends that are in one subnet.
#[derive(Debug, Clone, Copy)]
pub struct Pair<'a> {
    /// This host's.
    pub own: &'a Interface,
    /// The peer's.
    pub theirs: &'a Interface,
    /// This host's address there.
    pub from: IpAddr,
    /// The peer's.
    pub to: IpAddr,
}

/// All of them, loopback left out.
pub fn pairs<'a>(host: &'a Host, peer: &'a Host) -> Vec<Pair<'a>> {
    let mut all = Vec::new();
    for own in host.interfaces.iter().filter(|i| !i.is_loopback()) {
        for theirs in peer.interfaces.iter().filter(|i| !i.is_loopback()) {
            let near = own.addresses.iter().filter(|(ip, _)| !is_link_local(*ip)).find_map(|(ip, prefix)| {
                let near = |(other, _): &&(IpAddr, u8)| other != ip && same_network(*ip, *other, *prefix);
                theirs.addresses.iter().find(near).map(|(other, _)| (*ip, *other))
            });
            all.extend(near.map(|(from, to)| Pair { own, theirs, from, to }));
        }
    }
    all
}

fn mtu(case: &Case<'_>, own: &Interface, theirs: &Interface, them: &str, found: &mut Vec<Finding>) {
    let (Some(here), Some(there)) = (own.mtu, theirs.mtu) else { return };
    if here == there {
        return;
    }
    let name = &own.name;
    let rise = here < there && own.max_mtu.is_none_or(|most| there <= most);
    let change = rise.then(|| Change::Mtu { interface: name.clone(), from: Some(here), to: there });
    let rest = if rise {
        String::new()
    } else {
        format!("make them equal: on {them}, ip link set {} mtu {here}", theirs.name)
    };
    found.push(
        Finding::new(
            id::PEER_MTU,
            case.severity([name], Severity::Warning),
            name,
            format!("/sys/class/net/{name}/mtu is {here}, {} on {them} has {there}: large packets of one are lost at the other, small ones pass", theirs.name),
            rest,
        )
        .with(change),
    );
}

fn layer_of(host: &Host, interface: &Interface) -> LinkLayer {
    match host.ports_of(interface).first() {
        Some((_, port)) => port.link_layer,
        None if interface.is_ipoib() => LinkLayer::InfiniBand,
        None => LinkLayer::Ethernet,
    }
}

fn word(layer: LinkLayer) -> &'static str {
    match layer {
        LinkLayer::InfiniBand => "InfiniBand",
        LinkLayer::Ethernet => "Ethernet",
        LinkLayer::Unknown => "neither InfiniBand nor Ethernet",
    }
}

fn layer(case: &Case<'_>, peer: &Host, own: &Interface, theirs: &Interface, them: &str, found: &mut Vec<Finding>) {
    let (here, there) = (layer_of(case.host, own), layer_of(peer, theirs));
    let both = !case.host.ports_of(own).is_empty() && !peer.ports_of(theirs).is_empty();
    if here != there && both {
        found.push(Finding::new(
            id::PEER_LINK_LAYER,
            Severity::Error,
            &own.name,
            format!("{} is {}, {} on {them} is {}", own.name, word(here), theirs.name, word(there)),
            "a VPI card changes its link layer: mlxconfig -d PCI-ADDRESS set LINK_TYPE_P1=1 (InfiniBand) or 2 (Ethernet), then restart",
        ));
    }
}

/// Hosts whose RDMA is of different kinds share a subnet at most through a gateway.
fn layers(case: &Case<'_>, peer: &Host, them: &str, found: &mut Vec<Finding>) {
    let of = |host: &Host| {
        let mut all: Vec<LinkLayer> = Vec::new();
        for port in host.devices.iter().flat_map(|d| &d.ports) {
            if port.link_layer != LinkLayer::Unknown && !all.contains(&port.link_layer) {
                all.push(port.link_layer);
            }
        }
        all
    };
    let (here, there) = (of(case.host), of(peer));
    let told = found.iter().any(|f| f.id == id::PEER_LINK_LAYER);
    if !told && !here.is_empty() && !there.is_empty() && !here.iter().any(|l| there.contains(l)) {
        found.push(Finding::new(
            id::PEER_LINK_LAYER,
            Severity::Error,
            them,
            format!("all RDMA ports here are {}, all on {them} are {}", word(here[0]), word(there[0])),
            "RDMA needs the same on both ends: a VPI card changes its link layer (mlxconfig … LINK_TYPE_P1=1 or 2); until then TCP carries the data",
        ));
    }
}

fn route(case: &Case<'_>, own: &Interface, theirs: &Interface, ip: IpAddr, them: &str, found: &mut Vec<Finding>) {
    let meant = case.ask.for_rdma.is_empty() || case.ask.for_rdma.contains(&own.name);
    if !meant {
        return;
    }
    // What was tried counts more than what the main routing table says: there may be rules and other tables.
    let trial = case.ask.trials.iter().find(|t| t.interface == own.name && t.to == ip);
    let tried = trial.and_then(|t| Some((t.bytes, t.carried.as_ref().ok()?)));
    let evidence = match (tried, route_to(&case.host.routes, ip)) {
        (Some((_, [None, None])), _) => return,
        (Some((bytes, [here, there])), _) => {
            let name = |by: &Option<String>, meant: &Interface| by.clone().unwrap_or_else(|| meant.name.clone());
            format!(
                "of {} KiB sent from {} to {ip} ({} on {them}) the interfaces' counters (/proc/net/dev) moved on {} here and on {} there",
                bytes >> 10,
                own.name,
                theirs.name,
                name(here, own),
                name(there, theirs)
            )
        }
        // Routes of several interfaces into one subnet are told apart by their order, and SAME-SUBNET says so too.
        (None, Some(route)) if route.interface != own.name => {
            format!("packets to {ip} ({} on {them}) leave by {}, not by {}", theirs.name, route.interface, own.name)
        }
        (None, _) => return,
    };
    found.push(Finding::new(
        id::PEER_ROUTE,
        case.severity([&own.name], Severity::Warning),
        &own.name,
        evidence,
        format!(
            "ip route get {ip} shows it; give {} a subnet of its own, or a route: ip route add {ip} dev {}",
            own.name, own.name
        ),
    ));
}
