//! Addresses: `host:port` of a peer, and which addresses of this host `--group-network` selects. Opens no socket.

use if_addrs::IfAddr;
use spurline_types::{Error, ErrorKind, Result};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The addresses of `host:port`. A literal IPv4 or `[IPv6]` address needs no name service; an address with a scope
/// (`[fe80::1%eth0]:7000`) is left to the name service.
///
/// # Errors
/// `Invalid` when the text is no `host:port`, `Unavailable` when the name is unknown, `Timeout` when the name service
/// does not answer before `deadline`.
pub fn resolve_peer(peer: &str, deadline: Instant) -> Result<Vec<SocketAddr>> {
    if let Ok(addr) = peer.parse::<SocketAddr>() {
        return Ok(vec![addr]);
    }
    let Some(name) = host_and_port(peer) else {
        let why =
            format!("'{peer}' is no address: use host:port, 192.0.2.1:port or [2001:db8::1]:port, port 0 to 65535");
        return Err(Error::new(ErrorKind::Invalid, why));
    };
    // The name service has no deadline, so the query runs on a thread that may outlive this call.
    let (tx, rx) = mpsc::sync_channel(1);
    std::thread::Builder::new()
        .name("resolve".into())
        .spawn(move || {
            let found = name.to_socket_addrs().map(|found| found.collect::<Vec<_>>());
            // The caller may have timed out.
            let _ = tx.send(found);
        })
        .map_err(|e| Error::io(format_args!("{peer}: no thread for the name service"), &e))?;
    match rx.recv_timeout(deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))) {
        Ok(Ok(found)) if !found.is_empty() => Ok(found),
        Ok(Ok(_)) => Err(Error::new(ErrorKind::Unavailable, format!("{peer}: the name has no address"))),
        Ok(Err(e)) => Err(Error::new(ErrorKind::Unavailable, format!("{peer}: the name does not resolve: {e}"))),
        Err(_) => Err(Error::new(ErrorKind::Timeout, format!("{peer}: the name service did not answer in time"))),
    }
}

/// The two halves of `host:port`, without brackets.
fn host_and_port(peer: &str) -> Option<(String, u16)> {
    let (host, port) = peer.rsplit_once(':')?;
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']'));
    let right = bare.map_or(!host.is_empty() && !host.contains(':'), |h| h.contains(':'));
    right.then_some((bare.unwrap_or(host).to_owned(), port.parse().ok()?))
}

/// An address of an interface of this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalAddress {
    /// The interface's name.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
    /// Length of the network prefix in bits; 0 where unknown.
    pub prefix: u8,
    /// Whether valid on a single link only (`fe80::…`), and so useless to other hosts without a scope.
    pub link_local: bool,
}

/// Every address of this host.
///
/// # Errors
/// When the kernel does not list the addresses.
pub fn local_addresses() -> Result<Vec<LocalAddress>> {
    let found = if_addrs::get_if_addrs().map_err(|e| Error::io("can't list this host's network interfaces", &e))?;
    Ok(found
        .into_iter()
        .map(|i| {
            let prefix = match &i.addr {
                IfAddr::V4(v4) => v4.prefixlen,
                IfAddr::V6(v6) => v6.prefixlen,
            };
            LocalAddress { ip: i.ip(), prefix, link_local: i.is_link_local(), interface: i.name }
        })
        .collect())
}

/// The addresses of this host selected by `spec` (`--group-network`): interface names, addresses and CIDRs separated
/// by `:` (`eth0:10.1.0.0/16`), IPv6 in brackets (`[2001:db8::1]:[fd00::/8]`), or separated by `,` without brackets.
/// In the given order, without duplicates.
///
/// # Errors
/// `Invalid` when a part selects no address of this host; the message names the part and the addresses there are.
pub fn group_addresses(spec: &str) -> Result<Vec<IpAddr>> {
    flag_addresses("--group-network", spec)
}

/// The same for another flag, named in errors.
///
/// # Errors
/// As [`group_addresses`].
pub fn flag_addresses(flag: &str, spec: &str) -> Result<Vec<IpAddr>> {
    select_addresses(spec, &local_addresses()?).map_err(|(part, why, there)| {
        Error::new(ErrorKind::Invalid, format!("{flag} '{part}': {why}; this host has {there}"))
    })
}

/// The unusable part, the reason, and the addresses of this host.
type UnusablePart = (String, String, String);

fn select_addresses(spec: &str, here: &[LocalAddress]) -> Result<Vec<IpAddr>, UnusablePart> {
    let mut chosen: Vec<IpAddr> = Vec::new();
    for part in split_spec(spec) {
        let part = part.trim();
        let wanted: Vec<IpAddr> = if let Ok(ip) = part.parse::<IpAddr>() {
            here.iter().filter(|a| a.ip == ip).map(|a| a.ip).collect()
        } else if let Some((net, bits)) = part.split_once('/') {
            let net = net.parse::<IpAddr>().ok();
            let bits = bits.parse::<u8>().ok();
            let (Some(net), Some(bits)) = (net, bits) else {
                return Err(unusable_part(part, "it is no CIDR", here));
            };
            if bits > if net.is_ipv4() { 32 } else { 128 } {
                return Err(unusable_part(part, "its prefix is longer than an address", here));
            }
            here.iter().filter(|a| in_net(a.ip, net, bits)).map(|a| a.ip).collect()
        } else {
            if !here.iter().any(|a| a.interface == part) {
                return Err(unusable_part(part, "no interface has that name, or it has no address", here));
            }
            here.iter().filter(|a| a.interface == part && !a.link_local).map(|a| a.ip).collect()
        };
        if wanted.is_empty() {
            return Err(unusable_part(part, "no address of this host matches", here));
        }
        for ip in wanted {
            if !chosen.contains(&ip) {
                chosen.push(ip);
            }
        }
    }
    if chosen.is_empty() { Err(unusable_part(spec, "it is empty", here)) } else { Ok(chosen) }
}

/// Parts between `,`, or between `:` outside brackets, without brackets.
fn split_spec(spec: &str) -> Vec<&str> {
    // A single IPv6 address or network needs no brackets.
    let (net, bits) = spec.split_once('/').unwrap_or((spec, ""));
    if net.trim().parse::<IpAddr>().is_ok() && bits.trim().bytes().all(|b| b.is_ascii_digit()) {
        return vec![spec];
    }
    let mut depth = 0usize;
    let by_comma = spec.contains(',');
    spec.split(|c: char| {
        match c {
            '[' => depth += 1,
            ']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' || (c == ':' && depth == 0 && !by_comma)
    })
    .map(|part| part.trim().trim_start_matches('[').trim_end_matches(']'))
    .filter(|part| !part.is_empty())
    .collect()
}

/// Whether the first `bits` of both are equal.
pub(crate) fn in_net(ip: IpAddr, net: IpAddr, bits: u8) -> bool {
    let (ip, net, width) = match (ip, net) {
        (IpAddr::V4(ip), IpAddr::V4(net)) => (u128::from(u32::from(ip)), u128::from(u32::from(net)), 32),
        (IpAddr::V6(ip), IpAddr::V6(net)) => (u128::from(ip), u128::from(net), 128),
        _ => return false,
    };
    // A shift by the whole width would overflow: a prefix of no bits contains every address.
    let shift = width - u32::from(bits);
    shift >= width || ip >> shift == net >> shift
}

fn unusable_part(part: &str, why: &str, here: &[LocalAddress]) -> UnusablePart {
    let mut there = String::new();
    for a in here {
        if !there.is_empty() {
            there.push_str(", ");
        }
        there.push_str(&format!("{} {}", a.interface, a.ip));
    }
    (part.to_owned(), why.to_owned(), there)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn here() -> Vec<LocalAddress> {
        let address = |interface: &str, ip: &str| LocalAddress {
            interface: interface.into(),
            ip: ip.parse().unwrap(),
            prefix: 16,
            link_local: ip.starts_with("fe80"),
        };
        vec![
            address("lo", "127.0.0.1"),
            address("eth0", "10.1.2.3"),
            address("eth0", "fe80::1"),
            address("ib0", "fd00::7"),
            address("ib0", "10.2.0.9"),
        ]
    }

    fn text(spec: &str) -> String {
        match select_addresses(spec, &here()) {
            Ok(ips) => ips.iter().map(IpAddr::to_string).collect::<Vec<_>>().join(" "),
            Err((part, why, there)) => format!("{part}: {why}; {there}"),
        }
    }

    #[test]
    fn networks_are_found() {
        assert_eq!(text("eth0"), "10.1.2.3");
        assert_eq!(text("eth0:ib0"), "10.1.2.3 fd00::7 10.2.0.9");
        assert_eq!(text("10.0.0.0/8"), "10.1.2.3 10.2.0.9");
        assert_eq!(text("fd00::/8"), "fd00::7");
        assert_eq!(text("fd00::7"), "fd00::7");
        assert_eq!(text("[fd00::/8]:eth0"), "fd00::7 10.1.2.3");
        assert_eq!(text("ib0,eth0,10.1.2.3"), "fd00::7 10.2.0.9 10.1.2.3");
        for both in ["10.2.0.0/16:10.1.0.0/16", "10.2.0.0/16,10.1.0.0/16", "10.2.0.0/16:eth0"] {
            assert_eq!(text(both), "10.2.0.9 10.1.2.3", "{both}");
        }
        assert_eq!(text("0.0.0.0/0"), "127.0.0.1 10.1.2.3 10.2.0.9");
    }

    #[test]
    fn wrong_ones_say_what_there_is() {
        for (spec, why) in [
            ("eth7", "no interface has that name"),
            ("10.9.0.0/16", "no address of this host matches"),
            ("10.1.2.4", "no address of this host matches"),
            ("10.1.2.3/33", "longer than an address"),
            ("10.1.2/8", "no CIDR"),
            ("", "it is empty"),
        ] {
            let error = text(spec);
            assert!(error.contains(why) && error.contains("eth0 10.1.2.3"), "{spec}: {error}");
        }
    }

    #[test]
    fn peers_resolve() {
        let soon = Instant::now() + Duration::from_secs(10);
        assert_eq!(resolve_peer("127.0.0.1:80", soon).unwrap().len(), 1);
        assert_eq!(resolve_peer("[::1]:80", soon).unwrap()[0].to_string(), "[::1]:80");
        for wrong in ["host", "host:", ":80", "host:99999", "::1:80", "", "a:b:1", "[host]:1", "[::1:1"] {
            assert_eq!(resolve_peer(wrong, soon).unwrap_err().kind(), ErrorKind::Invalid, "{wrong}");
        }
        assert!(!resolve_peer("localhost:80", soon).unwrap().is_empty());
        assert_eq!(resolve_peer("[fe80::1%lo]:80", soon).unwrap()[0].port(), 80);
    }

    proptest::proptest! {
        #[test]
        fn never_panics(spec in ".{0,40}", bits: u8, a: u128, b: u128) {
            let _ = select_addresses(&spec, &here());
            if bits <= 128 {
                in_net(IpAddr::V6(a.into()), IpAddr::V6(b.into()), bits);
            }
        }
    }
}
