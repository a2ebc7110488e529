//! Pairs of local and remote addresses for measurements over several interfaces at once. Opens no connection.

use crate::message::{InterfaceRecord, ProbeTransport};
use serde::{Deserialize, Serialize};
use spurline_fabric::HostTree;
use spurline_proto::{RailInfo, RailLink};
use spurline_rails::{HostAddress, host_addresses, usable_rails};
use spurline_transport::pair_rails;
use spurline_types::Result;
use std::net::IpAddr;

/// Most paths of a measurement.
pub const MAX_PATHS: usize = 64;

/// A path from a client's address to a server's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathPlan {
    /// The client's.
    pub from: IpAddr,
    /// The server's.
    pub to: IpAddr,
}

/// This host's interfaces that a transport can use, an address each, preferring the family of `like`.
///
/// # Errors
/// When the kernel does not list addresses.
pub fn local_interfaces(transport: ProbeTransport, like: IpAddr) -> Result<Vec<InterfaceRecord>> {
    let mut addresses = host_addresses()?;
    addresses.sort_by_key(|a| a.ip.is_ipv4() != like.to_canonical().is_ipv4());
    let rails = match transport {
        ProbeTransport::Rdma => {
            usable_rails(&HostTree::live(), &addresses).into_iter().map(|found| found.rail).collect()
        }
        ProbeTransport::Tcp => tcp_rails(&addresses),
    };
    Ok(rails.iter().map(InterfaceRecord::from).collect())
}

/// Interfaces for TCP: name, address, network.
fn tcp_rails(addresses: &[HostAddress]) -> Vec<RailInfo> {
    let mut rails: Vec<RailInfo> = Vec::new();
    for address in addresses.iter().filter(|a| a.is_routable()) {
        if rails.iter().all(|rail| rail.name != address.interface) {
            rails.push(RailInfo {
                name: address.interface.clone(),
                address: address.ip,
                prefix_len: address.prefix_len,
                port: 0,
                link: RailLink::Other(0),
                fabric: 0,
                speed_mbit: 0,
            });
        }
    }
    rails
}

/// Paths over the local interfaces `names`, or over all, so that no interface is left out.
///
/// # Errors
/// A message with what is missing: an unknown interface, or an interface without a route.
pub fn choose_paths(
    names: Option<&[String]>,
    local_records: &[InterfaceRecord],
    peer_records: &[InterfaceRecord],
) -> Result<Vec<PathPlan>, String> {
    let mut chosen: Vec<&InterfaceRecord> = Vec::new();
    match names {
        None => chosen.extend(local_records),
        Some(names) => {
            for name in names {
                let found = local_records.iter().find(|rail| rail.interface == *name);
                let found = found.ok_or_else(|| {
                    let there =
                        if local_records.is_empty() { "none".to_owned() } else { interface_names(local_records) };
                    format!("{name} can't be used for it here; interfaces that can: {there}")
                })?;
                if !chosen.contains(&found) {
                    chosen.push(found);
                }
            }
        }
    }
    if chosen.is_empty() {
        return Err("no interface of this host can be used for it".into());
    }
    let local: Vec<RailInfo> = chosen.iter().map(|rail| rail.to_rail()).collect();
    let remote: Vec<RailInfo> = peer_records.iter().map(InterfaceRecord::to_rail).collect();
    let mut pairs = if remote.is_empty() {
        return Err("the other end has no interface for it".into());
    } else {
        pair_rails(&local, &remote)?
    };
    // In a subnet every pair is connected. Use each interface once, and twice only where the other side has fewer.
    let mut used_here = vec![0; local.len()];
    let mut used_there = vec![0; remote.len()];
    let mut paths = Vec::new();
    for pass in 0..2 {
        pairs.retain(|p| {
            let fresh = (used_here[p.local] == 0, used_there[p.remote] == 0);
            let take = if pass == 0 { fresh == (true, true) } else { fresh.0 || fresh.1 };
            if take && paths.len() < MAX_PATHS {
                used_here[p.local] += 1;
                used_there[p.remote] += 1;
                let path = PathPlan { from: local[p.local].address, to: remote[p.remote].address };
                paths.push((p.local, path));
            }
            !take
        });
    }
    if let Some(alone) = local.iter().zip(&used_here).find(|(_, used)| **used == 0).map(|(rail, _)| rail)
        && names.is_some()
    {
        return Err(format!("{alone} reaches none of the other end's interfaces ({})", interface_names(peer_records)));
    }
    // In the order of `names`.
    paths.sort_by_key(|(local, _)| *local);
    Ok(paths.into_iter().map(|(_, path)| path).collect())
}

fn interface_names(rails: &[InterfaceRecord]) -> String {
    rails.iter().map(|r| r.interface.as_str()).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(interface: &str, address: &str) -> InterfaceRecord {
        let address = address.parse().unwrap();
        InterfaceRecord { interface: interface.into(), address, prefix_len: 24, link: 2, fabric: 0, speed_mbit: 1000 }
    }

    fn text(paths: &Result<Vec<PathPlan>, String>) -> String {
        match paths {
            Ok(paths) => paths.iter().map(|p| format!("{}>{}", p.from, p.to)).collect::<Vec<_>>().join(" "),
            Err(why) => why.clone(),
        }
    }

    #[test]
    fn every_interface_has_a_path() {
        let (a, b) = (told("r0", "10.0.0.1"), told("r1", "10.0.1.1"));
        let (x, y) = (told("s0", "10.0.0.2"), told("s1", "10.0.1.2"));
        let both = [a.clone(), b.clone()];
        assert_eq!(text(&choose_paths(None, &both, &[x.clone(), y.clone()])), "10.0.0.1>10.0.0.2 10.0.1.1>10.0.1.2");
        let one = ["r1".to_owned(), "r1".to_owned()];
        assert_eq!(text(&choose_paths(Some(&one), &both, &[x.clone(), y])), "10.0.1.1>10.0.1.2");
        // One subnet: two paths, not four.
        let (b, y) = (told("r1", "10.0.0.5"), told("s1", "10.0.0.6"));
        let paths = choose_paths(None, &[a.clone(), b.clone()], &[x.clone(), y]);
        assert_eq!(text(&paths), "10.0.0.1>10.0.0.2 10.0.0.5>10.0.0.6");
        // Two against one: both lead there.
        assert_eq!(
            text(&choose_paths(None, &[a.clone(), b], std::slice::from_ref(&x))),
            "10.0.0.1>10.0.0.2 10.0.0.5>10.0.0.2"
        );
        let names = ["eth9".to_owned()];
        assert!(text(&choose_paths(Some(&names), &both, &[x])).contains("eth9 can't be used"));
        assert!(text(&choose_paths(None, &both, &[])).contains("the other end has no interface"));
        assert!(text(&choose_paths(None, &[], &[])).contains("no interface of this host"));
    }

    #[test]
    fn this_host_has_what_it_has() {
        let like = IpAddr::from([127, 0, 0, 1]);
        assert!(local_interfaces(ProbeTransport::Tcp, like).unwrap().iter().all(|rail| rail.interface != "lo"));
        assert!(local_interfaces(ProbeTransport::Rdma, like).is_ok());
    }
}
