//! Chooses the source address of a connection among several addresses of this host. Reads interfaces and routes and connects
//! nothing.

use crate::addr::{LocalAddress, in_net, local_addresses};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

/// The address of `locals` to reach `remote` from; `None` when no address can.
pub(crate) fn source_towards(remote: SocketAddr, locals: &[IpAddr]) -> Option<IpAddr> {
    if locals.is_empty() {
        return None;
    }
    // If interfaces can't be listed, the route decides.
    choose_source(remote.ip(), locals, &local_addresses().unwrap_or_default(), || routed_source(remote))
}

/// An address in the network of `remote` first, or else that of the route.
fn choose_source(
    remote: IpAddr,
    locals: &[IpAddr],
    here: &[LocalAddress],
    routed: impl FnOnce() -> Option<IpAddr>,
) -> Option<IpAddr> {
    // A loopback address reaches this host only.
    let near = remote.is_loopback() || here.iter().any(|local| local.ip == remote);
    let mut fit: Vec<IpAddr> =
        locals.iter().filter(|ip| ip.is_ipv4() == remote.is_ipv4() && (near || !ip.is_loopback())).copied().collect();
    let shared = |ip: &IpAddr| {
        here.iter()
            .filter(|local| local.prefix > 0 && local.ip == *ip && in_net(remote, *ip, local.prefix))
            .map(|local| local.prefix)
            .max()
    };
    let nearest = fit.iter().filter_map(shared).max();
    if nearest.is_some() {
        fit.retain(|ip| shared(ip) == nearest);
    }
    match fit[..] {
        [] => None,
        [one] => Some(one),
        [first, ..] => Some(routed().filter(|ip| fit.contains(ip)).unwrap_or(first)),
    }
}

/// The source address of the kernel's route to `remote`. Sends nothing.
fn routed_source(remote: SocketAddr) -> Option<IpAddr> {
    let any = if remote.is_ipv4() { IpAddr::from(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(remote).ok()?;
    socket.local_addr().ok().map(|at| at.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Vec<LocalAddress> {
        let address = |interface: &str, ip: &str, prefix| LocalAddress {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
            prefix,
            link_local: false,
        };
        vec![
            address("lo", "127.0.0.1", 8),
            address("eth0", "10.1.2.3", 16),
            address("eth1", "10.2.0.9", 16),
            address("eth2", "10.2.7.9", 24),
            address("eth3", "10.1.2.4", 16),
            address("tun0", "192.0.2.5", 0),
            address("lo", "::1", 128),
            address("eth0", "fd00::7", 64),
            address("eth1", "fd01::7", 64),
        ]
    }

    /// From where to `remote` when `locals` may be used and the kernel would take `route`.
    fn from(remote: &str, locals: &str, route: &str) -> Option<String> {
        let locals: Vec<IpAddr> = locals.split_whitespace().map(|ip| ip.parse().unwrap()).collect();
        choose_source(remote.parse().unwrap(), &locals, &here(), || route.parse().ok()).map(|ip| ip.to_string())
    }

    #[test]
    fn a_connection_goes_out_from_the_network_of_its_peer() {
        let all = "127.0.0.1 10.1.2.3 10.2.0.9 10.2.7.9 192.0.2.5 ::1 fd00::7 fd01::7";
        for (remote, source) in [
            ("10.1.9.9", "10.1.2.3"),
            ("10.2.9.9", "10.2.0.9"),
            ("10.2.7.1", "10.2.7.9"),
            ("fd01::1", "fd01::7"),
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "::1"),
        ] {
            assert_eq!(from(remote, all, "10.1.2.3").as_deref(), Some(source), "{remote}");
        }
        // In no network of this host, or in two: as routed, where that is one of those given.
        assert_eq!(from("198.51.100.1", all, "10.2.0.9").as_deref(), Some("10.2.0.9"));
        assert_eq!(from("198.51.100.1", all, "203.0.113.1").as_deref(), Some("10.1.2.3"));
        assert_eq!(from("198.51.100.1", all, "no route").as_deref(), Some("10.1.2.3"));
        assert_eq!(from("10.1.9.9", "10.1.2.3 10.1.2.4", "10.1.2.4").as_deref(), Some("10.1.2.4"));
        assert_eq!(from("10.1.9.9", "10.1.2.3 10.1.2.4", "10.2.0.9").as_deref(), Some("10.1.2.3"));
        assert_eq!(from("10.1.9.9", "10.2.0.9 10.2.7.9", "10.2.7.9").as_deref(), Some("10.2.7.9"));
    }

    #[test]
    fn another_host_is_not_asked_from_a_loopback_address() {
        assert_eq!(from("10.1.9.9", "127.0.0.1", "10.1.2.3"), None);
        assert_eq!(from("fd00::1", "::1 10.1.2.3", "fd00::7"), None);
        assert_eq!(from("10.1.2.3", "127.0.0.1", "10.1.2.3").as_deref(), Some("127.0.0.1"), "an address of this host");
        // One that this host has not got is refused by the kernel, which says so.
        assert_eq!(from("10.1.9.9", "203.0.113.1", "10.1.2.3").as_deref(), Some("203.0.113.1"));
    }

    #[test]
    fn the_kernel_knows_a_route_to_itself() {
        assert_eq!(routed_source("127.0.0.1:9".parse().unwrap()), Some(IpAddr::from(Ipv4Addr::LOCALHOST)));
    }
}
