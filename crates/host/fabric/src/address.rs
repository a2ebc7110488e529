//! Addresses and routes: from netlink where available, else from the kernel's older text files, which hold less.

use crate::netlink::{InterfaceAddress, IpRoute, NetlinkFacts};
use crate::tree::HostTree;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Whether two addresses lie in the same network of that size.
pub fn same_network(a: IpAddr, b: IpAddr, prefix: u8) -> bool {
    network_address(a, prefix).is_some_and(|n| Some(n) == network_address(b, prefix))
}

/// The network of an address.
pub fn network_address(ip: IpAddr, prefix: u8) -> Option<IpAddr> {
    match ip {
        IpAddr::V4(v4) if prefix <= 32 => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            Some(IpAddr::V4(Ipv4Addr::from(u32::from(v4) & mask)))
        }
        IpAddr::V6(v6) if prefix <= 128 => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix)).unwrap_or(0);
            Some(IpAddr::V6(Ipv6Addr::from(u128::from(v6) & mask)))
        }
        _ => None,
    }
}

/// Whether an address reaches only the local link.
pub fn is_link_local(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(v4) => v4.is_link_local(),
        IpAddr::V6(v6) => v6.is_unicast_link_local(),
    }
}

/// Addresses and routes of a host; netlink's data takes precedence.
pub fn read_addresses(tree: &HostTree, netlink: &NetlinkFacts) -> (Vec<InterfaceAddress>, Vec<IpRoute>) {
    // Read in any case, so that the files are in the archive.
    let routes = parse_proc_routes(&tree.read_text("proc/net/route").unwrap_or_default());
    let local = parse_proc_local(&tree.read_text("proc/net/fib_trie").unwrap_or_default());
    let v6 = parse_proc_inet6(&tree.read_text("proc/net/if_inet6").unwrap_or_default());
    if !netlink.addresses.is_empty() {
        return (netlink.addresses.clone(), netlink.routes.clone());
    }
    let mut addresses = v6;
    for ip in local {
        // The interface is that of the narrowest network around the address. These files cannot distinguish between two
        // interfaces in the same network; the first is used.
        let on = routes.iter().filter(|r| r.via.is_none() && same_network(r.to, ip, r.prefix));
        if let Some(route) = on.max_by_key(|r| (r.prefix, std::cmp::Reverse(r.metric))) {
            addresses.push(InterfaceAddress { interface: route.interface.clone(), ip, prefix: route.prefix });
        }
    }
    (addresses, routes)
}

/// The route of packets to `ip`: the interface, and the router between.
pub fn route_to(routes: &[IpRoute], ip: IpAddr) -> Option<&IpRoute> {
    routes
        .iter()
        .filter(|r| r.to.is_ipv4() == ip.is_ipv4() && same_network(r.to, ip, r.prefix))
        .max_by_key(|r| (r.prefix, std::cmp::Reverse(r.metric)))
}

/// `/proc/net/route`: addresses are hexadecimal words in the machine's byte order, which is little-endian here.
fn parse_proc_routes(text: &str) -> Vec<IpRoute> {
    text.lines().skip(1).filter_map(route_of_line).take(4096).collect()
}

fn route_of_line(line: &str) -> Option<IpRoute> {
    let f: Vec<&str> = line.split_whitespace().collect();
    let to = v4_of_hex(f.get(1)?)?;
    let gateway = v4_of_hex(f.get(2)?)?;
    let mask = v4_of_hex(f.get(7)?)?;
    // 1: the route is up.
    let up = u32::from_str_radix(f.get(3)?, 16).ok()? & 1 != 0;
    let via = (!gateway.is_unspecified()).then_some(IpAddr::V4(gateway));
    let prefix = u32::from(mask).count_ones() as u8;
    let metric = f.get(6)?.parse().ok()?;
    up.then(|| IpRoute { to: to.into(), prefix, interface: (*f[0]).to_owned(), via, metric })
}

fn v4_of_hex(hex: &str) -> Option<Ipv4Addr> {
    u32::from_str_radix(hex, 16).ok().map(|v| Ipv4Addr::from(v.swap_bytes()))
}

/// The host's own IPv4 addresses in `/proc/net/fib_trie`: a line with the address, then `/32 host LOCAL`.
fn parse_proc_local(text: &str) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    let mut last: Option<Ipv4Addr> = None;
    for line in text.lines() {
        if let Some(address) = line.trim_start().strip_prefix("|-- ") {
            last = address.trim().parse().ok();
        } else if line.trim() == "/32 host LOCAL"
            && let Some(ip) = last.filter(|ip| !ip.is_loopback())
            && !found.contains(&IpAddr::V4(ip))
        {
            found.push(IpAddr::V4(ip));
        }
    }
    found
}

/// `/proc/net/if_inet6`: address, interface number, prefix, scope, flags, name.
fn parse_proc_inet6(text: &str) -> Vec<InterfaceAddress> {
    text.lines().filter_map(address_of_line).take(4096).collect()
}

fn address_of_line(line: &str) -> Option<InterfaceAddress> {
    let f: Vec<&str> = line.split_whitespace().collect();
    let ip = Ipv6Addr::from(u128::from_str_radix(f.first().filter(|a| a.len() == 32)?, 16).ok()?);
    let prefix = u8::from_str_radix(f.get(2)?, 16).ok().filter(|p| *p <= 128)?;
    Some(InterfaceAddress { interface: (*f.get(5)?).to_owned(), ip: ip.into(), prefix })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUTE: &str = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n\
eth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n\
eth0\t0002A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n\
ib0\t0000000A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
garbage\n";
    const TRIE: &str = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 10.0.0.7\n        /32 host LOCAL\n     |-- 127.0.0.1\n        \
/32 host LOCAL\n     |-- 192.168.2.9\n        /32 host LOCAL\nLocal:\n     |-- 10.0.0.7\n        /32 host LOCAL\n";

    #[test]
    fn old_files_tell_addresses_too() {
        let routes = parse_proc_routes(ROUTE);
        assert_eq!(routes.len(), 3);
        let to = |ip: &str| route_to(&routes, ip.parse().unwrap()).map(|r| r.interface.as_str());
        assert_eq!((to("10.0.0.1"), to("8.8.8.8"), to("::1")), (Some("ib0"), Some("eth0"), None));
        assert_eq!(parse_proc_local(TRIE).len(), 2);
        let v6 = parse_proc_inet6("fe800000000000000000000000000001 02 40 20 80 ib0\nnonsense\n");
        assert_eq!((v6[0].prefix, v6[0].interface.as_str()), (64, "ib0"));
    }

    #[test]
    fn networks() {
        let ip = |t: &str| t.parse::<IpAddr>().unwrap();
        assert!(same_network(ip("10.0.0.1"), ip("10.0.0.200"), 24));
        assert!(!same_network(ip("10.0.0.1"), ip("10.0.1.1"), 24));
        assert!(same_network(ip("10.0.0.1"), ip("9.9.9.9"), 0));
        assert!(!same_network(ip("10.0.0.1"), ip("::1"), 0) && !same_network(ip("1.1.1.1"), ip("1.1.1.1"), 77));
    }
}
