//! Facts that only netlink reports: addresses, routes, MTU limits, RDMA namespaces, priority flow control. Owns the few messages
//! of three families (route, RDMA, DCB) and the parsing.

use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};
use serde::{Deserialize, Serialize};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Deadline of a request to the kernel.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// Limit of objects of each kind: a router's full table is irrelevant for a fabric.
const MAX_OBJECTS: usize = 4096;

/// Netlink's data about a host; stored as `netlink.json` beside collected files.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetlinkFacts {
    /// Network interfaces.
    pub links: Vec<LinkAttributes>,
    /// The addresses.
    pub addresses: Vec<InterfaceAddress>,
    /// The main routing table.
    pub routes: Vec<IpRoute>,
    /// Ports of RDMA devices.
    pub rdma: Vec<RdmaPort>,
    /// RDMA devices that carry no data.
    pub management: Vec<ManagementDevice>,
    /// Whether each RDMA device belongs to a single network namespace.
    pub rdma_exclusive: Option<bool>,
    /// Priority flow control, where reported by a driver.
    pub pfc: Vec<PfcState>,
}

/// An interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LinkAttributes {
    /// The number.
    pub index: u32,
    pub name: String,
    /// The kind: `vlan`, `bond`, `veth`, `ipoib`.
    pub kind: Option<String>,
    /// The highest MTU; `None` when there is no limit.
    pub max_mtu: Option<u32>,
    /// Index of the interface below.
    pub lower: Option<u32>,
    /// Whether that interface is in another network namespace.
    pub lower_is_elsewhere: bool,
    /// VLAN number.
    pub vlan: Option<u16>,
}

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceAddress {
    /// The interface.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Prefix length.
    pub prefix: u8,
}

/// A route to a network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpRoute {
    /// The network; unspecified with prefix 0 for the default route.
    pub to: IpAddr,
    /// Prefix length.
    pub prefix: u8,
    /// The interface.
    pub interface: String,
    /// The gateway, if any.
    pub via: Option<IpAddr>,
    /// Route metric; lower is preferred.
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
    /// The interface, when in this namespace.
    pub netdev: Option<String>,
    /// `ib`, `roce`, `iw`, `usnic`.
    pub protocol: Option<String>,
}

/// A device of type SMI: management datagrams of the planes of another device, without verbs (Linux 6.11).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ManagementDevice {
    /// The name, `smi0`.
    pub device: String,
    /// The device that carries the data, `mlx5_0`.
    pub parent: String,
}

/// Priority flow control of an interface.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PfcState {
    /// The interface.
    pub interface: String,
    /// A bit for each priority with flow control.
    pub priorities: u8,
}

/// NETLINK_ROUTE is 0, which rustix expresses as no protocol.
const ROUTE_PROTOCOL: Option<Protocol> = None;
const FLAG_REQUEST: u16 = 1;
const FLAG_DUMP: u16 = 0x300;
const MESSAGE_ERROR: u16 = 2;
const MESSAGE_DONE: u16 = 3;

impl NetlinkFacts {
    /// Queries the running kernel. A failed query leaves a field empty: old kernels, no RDMA, a sandbox.
    pub fn query_kernel() -> Self {
        let mut found = NetlinkFacts::default();
        // struct ifinfomsg, struct ifaddrmsg, struct rtmsg, all zero: every family.
        dump_table(ROUTE_PROTOCOL, 18, FLAG_DUMP, &[0; 16], |m| found.links.extend(parse_link(m)));
        let links = found.links.clone();
        dump_table(ROUTE_PROTOCOL, 22, FLAG_DUMP, &[0; 8], |m| found.addresses.extend(parse_address(m, &links)));
        dump_table(ROUTE_PROTOCOL, 26, FLAG_DUMP, &[0; 12], |m| {
            if found.routes.len() < MAX_OBJECTS {
                found.routes.extend(parse_route(m, &links));
            }
        });
        let mut devices = Vec::new();
        dump_table(Some(netlink::RDMA), rdma_message(1), FLAG_DUMP, &[], |m| devices.extend(parse_rdma_device(m)));
        for device in devices {
            let asked = encode_attribute(1, &device.index.to_ne_bytes());
            dump_table(Some(netlink::RDMA), rdma_message(5), FLAG_DUMP, &asked, |m| {
                found.rdma.extend(parse_rdma_port(m, device.protocol.clone()))
            });
            found.management.extend(device.management);
        }
        dump_table(Some(netlink::RDMA), rdma_message(6), 0, &[], |m| {
            found.rdma_exclusive = parse_rdma_exclusive(m).or(found.rdma_exclusive)
        });
        for name in links.iter().filter(|l| l.kind.is_none()).map(|l| &l.name) {
            let mut asked = vec![0, 21, 0, 0];
            asked.extend(encode_attribute(1, &[name.as_bytes(), &[0]].concat()));
            dump_table(ROUTE_PROTOCOL, 78, 0, &asked, |m| found.pfc.extend(parse_pfc(m, name)));
        }
        found
    }
}

fn rdma_message(command: u16) -> u16 {
    (5 << 10) | command
}

/// Sends a message and passes the body of each reply to `take`, until the end, a timeout or an error.
fn dump_table(protocol: Option<Protocol>, kind: u16, flags: u16, body: &[u8], mut take: impl FnMut(&[u8])) {
    // A kernel without the family or a sandbox refuses; then there is no data.
    let _ = exchange_messages(protocol, kind, flags, body, &mut take);
}

fn exchange_messages(
    protocol: Option<Protocol>,
    kind: u16,
    flags: u16,
    body: &[u8],
    take: &mut dyn FnMut(&[u8]),
) -> io::Result<()> {
    let end = Instant::now() + REQUEST_TIMEOUT;
    let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(REQUEST_TIMEOUT))?;
    let mut message = Vec::with_capacity(16 + body.len());
    message.extend((16 + body.len() as u32).to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend((FLAG_REQUEST | flags).to_ne_bytes());
    message.extend(1u32.to_ne_bytes());
    message.extend(0u32.to_ne_bytes());
    message.extend(body);
    rustix::net::sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut buffer = vec![0; 256 * 1024];
    while Instant::now() < end {
        let (got, _) = rustix::net::recv(&socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        for (kind, body) in parse_messages(&buffer[..got.min(buffer.len())]) {
            match kind {
                MESSAGE_DONE | MESSAGE_ERROR => return Ok(()),
                _ => take(body),
            }
        }
        if flags & FLAG_DUMP == 0 {
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

/// Type and body of each message; ends at the first malformed message.
fn parse_messages(mut bytes: &[u8]) -> Vec<(u16, &[u8])> {
    let mut out = Vec::new();
    while let (Some(len), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let len = len as usize;
        let Some(body) = bytes.get(16..len) else { break };
        out.push((kind, body));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    out
}

/// Type and value of each attribute from `start` on; ends at the first malformed attribute.
fn parse_attributes(bytes: &[u8], start: usize) -> Vec<(u16, &[u8])> {
    let mut bytes = bytes.get(start..).unwrap_or_default();
    let mut out = Vec::new();
    while let (Some(len), Some(kind)) = (u16_at(bytes, 0), u16_at(bytes, 2)) {
        let len = usize::from(len);
        let Some(value) = bytes.get(4..len) else { break };
        // The two highest bits are flags: nested, network byte order.
        out.push((kind & 0x3fff, value));
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    out
}

fn encode_attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let len = 4 + value.len() as u16;
    let mut out = [len.to_ne_bytes(), kind.to_ne_bytes()].concat();
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
    out
}

fn find_attribute<'a>(list: &[(u16, &'a [u8])], kind: u16) -> Option<&'a [u8]> {
    list.iter().find(|(k, _)| *k == kind).map(|(_, v)| *v)
}

fn text_value(value: &[u8]) -> String {
    String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()
}

fn ip_value(value: &[u8]) -> Option<IpAddr> {
    match value.len() {
        4 => <[u8; 4]>::try_from(value).ok().map(|a| IpAddr::V4(Ipv4Addr::from(a))),
        16 => <[u8; 16]>::try_from(value).ok().map(|a| IpAddr::V6(Ipv6Addr::from(a))),
        _ => None,
    }
}

fn link_name(links: &[LinkAttributes], index: u32) -> Option<String> {
    links.iter().find(|l| l.index == index).map(|l| l.name.clone())
}

fn parse_link(body: &[u8]) -> Option<LinkAttributes> {
    let index = u32_at(body, 4)?;
    let all = parse_attributes(body, 16);
    let number = |kind| find_attribute(&all, kind).and_then(|v| u32_at(v, 0));
    let info = find_attribute(&all, 18).map(|v| parse_attributes(v, 0)).unwrap_or_default();
    let data = find_attribute(&info, 2).map(|v| parse_attributes(v, 0)).unwrap_or_default();
    let kind = find_attribute(&info, 1).map(text_value);
    let vlan = find_attribute(&data, 1).and_then(|v| u16_at(v, 0)).filter(|_| kind.as_deref() == Some("vlan"));
    Some(LinkAttributes {
        index,
        name: find_attribute(&all, 3).map(text_value)?,
        kind,
        max_mtu: number(51).filter(|m| *m > 0),
        lower: number(5).filter(|l| *l != index && *l != 0),
        lower_is_elsewhere: find_attribute(&all, 37).is_some(),
        vlan,
    })
}

fn parse_address(body: &[u8], links: &[LinkAttributes]) -> Option<InterfaceAddress> {
    let prefix = *body.get(1)?;
    let index = u32_at(body, 4)?;
    let all = parse_attributes(body, 8);
    // On a point-to-point link IFA_ADDRESS is the peer's address.
    let ip = find_attribute(&all, 2).or_else(|| find_attribute(&all, 1)).and_then(ip_value)?;
    Some(InterfaceAddress { interface: link_name(links, index)?, ip, prefix })
}

fn parse_route(body: &[u8], links: &[LinkAttributes]) -> Option<IpRoute> {
    let family = *body.first()?;
    let prefix = *body.get(1)?;
    let table = *body.get(4)?;
    let kind = *body.get(7)?;
    if table != 254 || kind != 1 {
        return None;
    }
    let all = parse_attributes(body, 12);
    let any = if family == 10 { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
    let to = find_attribute(&all, 1).map_or(Some(any), ip_value)?;
    let interface = link_name(links, find_attribute(&all, 4).and_then(|v| u32_at(v, 0))?)?;
    let metric = find_attribute(&all, 6).and_then(|v| u32_at(v, 0)).unwrap_or(0);
    Some(IpRoute { to, prefix, interface, via: find_attribute(&all, 5).and_then(ip_value), metric })
}

/// RDMA_NLDEV_ATTR_DEV_TYPE, the value for a device of type SMI, and RDMA_NLDEV_ATTR_PARENT_NAME (rdma_netlink.h).
const DEVICE_TYPE_ATTRIBUTE: u16 = 99;
const SMI_DEVICE_TYPE: u8 = 1;
const PARENT_NAME_ATTRIBUTE: u16 = 100;

/// A device as the kernel lists it.
struct ListedDevice {
    index: u32,
    protocol: Option<String>,
    management: Option<ManagementDevice>,
}

fn parse_rdma_device(body: &[u8]) -> Option<ListedDevice> {
    let all = parse_attributes(body, 0);
    let is_smi = find_attribute(&all, DEVICE_TYPE_ATTRIBUTE).and_then(|v| v.first()) == Some(&SMI_DEVICE_TYPE);
    let name = find_attribute(&all, 2).map(text_value);
    let parent = find_attribute(&all, PARENT_NAME_ATTRIBUTE).map(text_value);
    Some(ListedDevice {
        index: find_attribute(&all, 1).and_then(|v| u32_at(v, 0))?,
        protocol: find_attribute(&all, 67).map(text_value),
        management: name.zip(parent).filter(|_| is_smi).map(|(device, parent)| ManagementDevice { device, parent }),
    })
}

fn parse_rdma_port(body: &[u8], protocol: Option<String>) -> Option<RdmaPort> {
    let all = parse_attributes(body, 0);
    Some(RdmaPort {
        device: find_attribute(&all, 2).map(text_value)?,
        port: find_attribute(&all, 3).and_then(|v| u32_at(v, 0))?,
        netdev: find_attribute(&all, 51).map(text_value),
        protocol,
    })
}

fn parse_rdma_exclusive(body: &[u8]) -> Option<bool> {
    find_attribute(&parse_attributes(body, 0), 66).and_then(|v| v.first().copied()).map(|shared| shared == 0)
}

fn parse_pfc(body: &[u8], interface: &str) -> Option<PfcState> {
    let ieee = find_attribute(&parse_attributes(body, 4), 13)?;
    let priorities = *find_attribute(&parse_attributes(ieee, 0), 2)?.get(1)?;
    Some(PfcState { interface: interface.to_owned(), priorities })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn this_kernel_answers() {
        let found = NetlinkFacts::query_kernel();
        let lo = found.links.iter().find(|l| l.name == "lo");
        if lo.is_none() {
            println!("SKIP: no netlink here");
            return;
        }
        let json = serde_json::to_string(&found).unwrap();
        assert_eq!(serde_json::from_str::<NetlinkFacts>(&json).unwrap(), found);
    }

    #[test]
    fn a_vlan_and_its_address() {
        let data = encode_attribute(2, &encode_attribute(1, &100u16.to_ne_bytes()));
        let info = encode_attribute(18, &[encode_attribute(1, b"vlan\0"), data].concat());
        let mut body = vec![0; 16];
        body[4..8].copy_from_slice(&7u32.to_ne_bytes());
        body.extend(encode_attribute(3, b"eth0.100\0"));
        body.extend(encode_attribute(5, &2u32.to_ne_bytes()));
        body.extend(encode_attribute(51, &9000u32.to_ne_bytes()));
        body.extend(info);
        let vlan = parse_link(&body).unwrap();
        let seen = (vlan.name.as_str(), vlan.kind.as_deref(), vlan.vlan, vlan.lower, vlan.max_mtu);
        assert_eq!(seen, ("eth0.100", Some("vlan"), Some(100), Some(2), Some(9000)));
        let mut body = vec![2, 24, 0, 0];
        body.extend(7u32.to_ne_bytes());
        body.extend(encode_attribute(2, &[10, 0, 0, 9]));
        let own = parse_address(&body, &[vlan]).unwrap();
        assert_eq!((own.interface.as_str(), own.ip.to_string().as_str(), own.prefix), ("eth0.100", "10.0.0.9", 24));
    }

    #[test]
    fn a_management_device_and_its_parent() {
        let mut body = encode_attribute(1, &4u32.to_ne_bytes());
        body.extend(encode_attribute(2, b"smi0\0"));
        let data = parse_rdma_device(&body).unwrap();
        assert!(data.index == 4 && data.management.is_none());
        body.extend(encode_attribute(DEVICE_TYPE_ATTRIBUTE, &[SMI_DEVICE_TYPE]));
        body.extend(encode_attribute(PARENT_NAME_ATTRIBUTE, b"mlx5_0\0"));
        let management = ManagementDevice { device: "smi0".into(), parent: "mlx5_0".into() };
        assert_eq!(parse_rdma_device(&body).unwrap().management, Some(management));
    }

    proptest! {
        #[test]
        fn nonsense_is_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let links = [LinkAttributes { index: 1, name: "lo".into(), ..LinkAttributes::default() }];
            for (_, body) in parse_messages(&bytes).into_iter().chain([(0, bytes.as_slice())]) {
                let _ = (parse_link(body), parse_address(body, &links), parse_route(body, &links), parse_rdma_device(body).is_some());
                let _ = (parse_rdma_port(body, None), parse_rdma_exclusive(body), parse_pfc(body, "x"));
            }
        }
    }
}
