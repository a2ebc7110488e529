//! What only netlink tells: addresses, routes, limits of MTU, RDMA namespaces, priority flow control. It owns the few
//! messages of three families (route, RDMA, DCB) and their parsing; no library speaks all three without a runtime.

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// How long the kernel may take to answer one question.
const DEADLINE: Duration = Duration::from_secs(2);
/// The most objects of a kind that are kept: a router's full table says nothing about a fabric.
const MOST: usize = 4096;

/// What only netlink tells of a host; kept as `netlink.json` beside collected files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Netlink {
    /// Network interfaces.
    pub links: Vec<Link>,
    /// Their addresses.
    pub addresses: Vec<Address>,
    /// The main routing table.
    pub routes: Vec<Route>,
    /// Ports of RDMA devices.
    pub rdma: Vec<RdmaPort>,
    /// Whether RDMA devices belong to one network namespace each.
    pub rdma_exclusive: Option<bool>,
    /// Priority flow control, where a driver tells of it.
    pub pfc: Vec<Pfc>,
}

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Link {
    /// Its number.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// What made it: `vlan`, `bond`, `veth`, `ipoib`.
    pub kind: Option<String>,
    /// The most its MTU could be; none when there is no limit.
    pub max_mtu: Option<u32>,
    /// Number of the interface it stands on.
    pub lower: Option<u32>,
    /// Whether that one is in another network namespace.
    pub lower_is_elsewhere: bool,
    /// VLAN number.
    pub vlan: Option<u16>,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The interface.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Bits of its network.
    pub prefix: u8,
}

/// A route to a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The network; unspecified with prefix 0 for the default route.
    pub to: IpAddr,
    /// Bits of the network.
    pub prefix: u8,
    /// The interface.
    pub interface: String,
    /// The router, when there is one between.
    pub via: Option<IpAddr>,
    /// The lower, the better.
    #[serde(default)]
    pub metric: u32,
}

/// A port of an RDMA device.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RdmaPort {
    /// The device.
    pub device: String,
    /// Number of the port.
    pub port: u32,
    /// The interface on it, when it is in this namespace.
    pub netdev: Option<String>,
    /// `ib`, `roce`, `iw`, `usnic`.
    pub protocol: Option<String>,
}

/// Priority flow control of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pfc {
    /// The interface.
    pub interface: String,
    /// One bit for each priority that pauses instead of dropping.
    pub priorities: u8,
}

/// NETLINK_ROUTE is 0, which is what no protocol says.
const ROUTE: Option<Protocol> = None;
const REQUEST: u16 = 1;
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;

impl Netlink {
    /// Asks the running kernel. What it does not answer is left empty: old kernels, no RDMA, a sandbox.
    pub fn ask() -> Self {
        let mut found = Netlink::default();
        // struct ifinfomsg, struct ifaddrmsg, struct rtmsg, all zero: of every family.
        dump(ROUTE, 18, DUMP, &[0; 16], |m| found.links.extend(link(m)));
        let links = found.links.clone();
        dump(ROUTE, 22, DUMP, &[0; 8], |m| found.addresses.extend(address(m, &links)));
        dump(ROUTE, 26, DUMP, &[0; 12], |m| {
            if found.routes.len() < MOST {
                found.routes.extend(route(m, &links));
            }
        });
        let rdma = |command: u16| (5 << 10) | command;
        let mut devices = Vec::new();
        dump(Some(netlink::RDMA), rdma(1), DUMP, &[], |m| devices.extend(rdma_device(m)));
        for (index, protocol) in devices {
            let asked = attribute(1, &index.to_ne_bytes());
            dump(Some(netlink::RDMA), rdma(5), DUMP, &asked, |m| found.rdma.extend(rdma_port(m, protocol.clone())));
        }
        dump(Some(netlink::RDMA), rdma(6), 0, &[], |m| {
            found.rdma_exclusive = rdma_exclusive(m).or(found.rdma_exclusive)
        });
        for name in links.iter().filter(|l| l.kind.is_none()).map(|l| &l.name) {
            let mut asked = vec![0, 21, 0, 0];
            asked.extend(attribute(1, &[name.as_bytes(), &[0]].concat()));
            dump(ROUTE, 78, 0, &asked, |m| found.pfc.extend(pfc(m, name)));
        }
        found
    }
}

/// Sends one message and hands each answer's body to `take`; silence and refusals end it.
fn dump(protocol: Option<Protocol>, kind: u16, flags: u16, body: &[u8], mut take: impl FnMut(&[u8])) {
    // Refused by a kernel without the family or by a sandbox; then there is nothing to take.
    let _ = exchange(protocol, kind, flags, body, &mut take);
}

fn exchange(
    protocol: Option<Protocol>,
    kind: u16,
    flags: u16,
    body: &[u8],
    take: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    let end = Instant::now() + DEADLINE;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(DEADLINE))?;
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend((16 + body.len() as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((REQUEST | flags).to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut buffer = vec![0; 256 * 1024];
    while Instant::now() < end {
        let (got, _) = rustix::net::recv(&socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        for (kind, body) in messages(&buffer[..got.min(buffer.len())]) {
            match kind {
                DONE | ERROR => return Ok(()),
                _ => take(body),
            }
        }
        if flags & DUMP == 0 {
            return Ok(());
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..at + 2)?.try_into().ok().map(u16::from_ne_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

/// Type and body of each message; ends at the first that does not fit.
fn messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut out = Vec::new();
    while let (Some(len), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let len = len as usize;
        let Some(body) = bytes.get(16..len) else { break };
        out.push((kind, body));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    out
}

/// Type and value of each attribute from `start` on; ends at the first that does not fit.
fn attributes(bytes: &[u8], start: usize) -> Vec<(u16, &[u8])> {
    let mut bytes = bytes.get(start..).unwrap_or_default();
    let mut out = Vec::new();
    while let (Some(len), Some(kind)) = (u16_at(bytes, 0), u16_at(bytes, 2)) {
        let len = usize::from(len);
        let Some(value) = bytes.get(4..len) else { break };
        // The two highest bits say nested and network order.
        out.push((kind & 0x3fff, value));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    out
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = 4 + value.len() as u16;
    let mut out = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
    out
}

fn find<'a>(list: &[(u16, &'a [u8])], kind: u16) -> Option<&'a [u8]> {
    list.iter().find(|(k, _)| *k == kind).map(|(_, v)| *v)
}

fn text(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()
}

fn ip(value: &[u8]) -> Option<IpAddr> {
    match value.len() {
        4 => <[u8; 4]>::try_from(value).ok().map(|a| IpAddr::V4(Ipv4Addr::from(a))),
        16 => <[u8; 16]>::try_from(value).ok().map(|a| IpAddr::V6(Ipv6Addr::from(a))),
        _ => None,
    }
}

fn name_of(links: &[Link], index: u32) -> Option<String> {
    links.iter().find(|l| l.index == index).map(|l| l.name.clone())
}

fn link(body: &[u8]) -> Option<Link> {
    let index = u32_at(body, 4)?;
    let all = attributes(body, 16);
    let number = |kind| find(&all, kind).and_then(|v| u32_at(v, 0));
    let info = find(&all, 18).map(|v| attributes(v, 0)).unwrap_or_default();
    let data = find(&info, 2).map(|v| attributes(v, 0)).unwrap_or_default();
    let kind = find(&info, 1).map(text);
    let vlan = find(&data, 1).and_then(|v| u16_at(v, 0)).filter(|_| kind.as_deref() == Some("vlan"));
    Some(Link {
        index,
        name: find(&all, 3).map(text)?,
        kind,
        max_mtu: number(51).filter(|m| *m > 0),
        lower: number(5).filter(|l| *l != index && *l != 0),
        lower_is_elsewhere: find(&all, 37).is_some(),
        vlan,
    })
}

fn address(body: &[u8], links: &[Link]) -> Option<Address> {
    let (prefix, index) = (*body.get(1)?, u32_at(body, 4)?);
    let all = attributes(body, 8);
    // On a point-to-point link IFA_ADDRESS is the other end.
    let ip = find(&all, 2).or_else(|| find(&all, 1)).and_then(ip)?;
    Some(Address { interface: name_of(links, index)?, ip, prefix })
}

fn route(body: &[u8], links: &[Link]) -> Option<Route> {
    let (family, prefix, table, kind) = (*body.first()?, *body.get(1)?, *body.get(4)?, *body.get(7)?);
    if table != 254 || kind != 1 {
        return None;
    }
    let all = attributes(body, 12);
    let any = if family == 10 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    let to = find(&all, 1).map_or(Some(any), ip)?;
    let interface = name_of(links, find(&all, 4).and_then(|v| u32_at(v, 0))?)?;
    let metric = find(&all, 6).and_then(|v| u32_at(v, 0)).unwrap_or(0);
    Some(Route { to, prefix, interface, via: find(&all, 5).and_then(ip), metric })
}

fn rdma_device(body: &[u8]) -> Option<(u32, Option<String>)> {
    let all = attributes(body, 0);
    Some((find(&all, 1).and_then(|v| u32_at(v, 0))?, find(&all, 67).map(text)))
}

fn rdma_port(body: &[u8], protocol: Option<String>) -> Option<RdmaPort> {
    let all = attributes(body, 0);
    Some(RdmaPort {
        device: find(&all, 2).map(text)?,
        port: find(&all, 3).and_then(|v| u32_at(v, 0))?,
        netdev: find(&all, 51).map(text),
        protocol,
    })
}

fn rdma_exclusive(body: &[u8]) -> Option<bool> {
    find(&attributes(body, 0), 66).and_then(|v| v.first().copied()).map(|shared| shared == 0)
}

fn pfc(body: &[u8], interface: &str) -> Option<Pfc> {
    let ieee = find(&attributes(body, 4), 13)?;
    let priorities = *find(&attributes(ieee, 0), 2)?.get(1)?;
    Some(Pfc { interface: interface.to_owned(), priorities })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn this_kernel_answers() {
        let found = Netlink::ask();
        let lo = found.links.iter().find(|l| l.name == "lo");
        if lo.is_none() {
            println!("SKIP: no netlink here");
            return;
        }
        let json = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<Netlink>(&json).unwrap(), found);
    }

    #[test]
    fn a_vlan_and_its_address() {
        let data = attribute(2, &attribute(1, &100u16.to_ne_bytes()));
        let info = attribute(18, &[attribute(1, b"vlan\0"), data].concat());
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&7u32.to_ne_bytes());
        body.extend(attribute(3, b"eth0.100\0"));
        body.extend(attribute(5, &2u32.to_ne_bytes()));
        body.extend(attribute(51, &9000u32.to_ne_bytes()));
        body.extend(info);
        let vlan = link(&body).unwrap();
        let seen = (vlan.name.as_str(), vlan.kind.as_deref(), vlan.vlan, vlan.lower, vlan.max_mtu);
        assert_eq!(seen, ("eth0.100", Some("vlan"), Some(100), Some(2), Some(9000)));
        let mut body = vec![2, 24, 0, 0];
        body.extend(7u32.to_ne_bytes());
        body.extend(attribute(2, &[10, 0, 0, 9]));
        let own = address(&body, &[vlan]).unwrap();
        assert_eq!((own.interface.as_str(), own.ip.to_string().as_str(), own.prefix), ("eth0.100", "10.0.0.9", 24));
    }

    proptest! {
        #[test]
        fn nonsense_is_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let links = [Link { index: 1, name: "lo".into(), ..Link::default() }];
            for (_, body) in messages(&bytes).into_iter().chain([(0, bytes.as_slice())]) {
                let _ = (link(body), address(body, &links), route(body, &links), rdma_device(body));
                let _ = (rdma_port(body, None), rdma_exclusive(body), pfc(body, "x"));
            }
        }
    }
}
