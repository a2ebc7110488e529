//! Which addresses of this host reach which of the other end, for measurements over several interfaces at once. It
//! connects nothing.

use crate::message::{RailTold, Transport};
use serde::{Deserialize, Serialize};
use spurline_fabric::Tree;
use spurline_proto::{Link, Rail};
use spurline_rails::{Address, host_addresses, usable};
use spurline_transport::pair;
use spurline_types::Result;
use std::net::IpAddr;

/// The most paths of one measurement.
pub const MAX_PATHS: usize = 64;

/// From an address of the client to one of the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PathPlan {
    /// The client's.
    pub from: IpAddr,
    /// The server's.
    pub to: IpAddr,
}

/// This host's interfaces that a transport can use, one address each, of the family of `like` where there is one.
///
/// # Errors
/// When the kernel does not list addresses.
pub fn here(transport: Transport, like: IpAddr) -> Result<Vec<RailTold>> {
    let mut addresses = host_addresses()?;
    addresses.sort_by_key(|a| a.ip.is_ipv4() != like.to_canonical().is_ipv4());
    let rails = match transport {
        Transport::Rdma => usable(&Tree::live(), &addresses).into_iter().map(|found| found.rail).collect(),
        Transport::Tcp => plain(&addresses),
    };
    Ok(rails.iter().map(RailTold::from).collect())
}

/// Interfaces as far as TCP knows them: a name, an address, a network.
fn plain(addresses: &[Address]) -> Vec<Rail> {
    let mut rails: Vec<Rail> = Vec::new();
    for address in addresses.iter().filter(|a| a.routable()) {
        if rails.iter().all(|rail| rail.name != address.interface) {
            rails.push(Rail {
                name: address.interface.clone(),
                address: address.ip,
                prefix_len: address.prefix_len,
                port: 0,
                link: Link::Other(0),
                fabric: 0,
                speed_mbit: 0,
            });
        }
    }
    rails
}

/// Paths over the interfaces `names` of this host, or over all of them, so that each is in one path at least.
///
/// # Errors
/// What is missing, in words: an interface that is none, one that reaches nothing, or all.
pub fn choose(names: Option<&[String]>, ours: &[RailTold], theirs: &[RailTold]) -> Result<Vec<PathPlan>, String> {
    let listed = |rails: &[RailTold]| rails.iter().map(|r| r.interface.as_str()).collect::<Vec<_>>().join(", ");
    let mut chosen: Vec<&RailTold> = Vec::new();
    match names {
        None => chosen.extend(ours),
        Some(names) => {
            for name in names {
                let found = ours.iter().find(|rail| rail.interface == *name);
                let none = || {
                    let there = if ours.is_empty() { "none".to_owned() } else { listed(ours) };
                    format!("{name} can't be used for it here; interfaces that can: {there}")
                };
                let found = found.ok_or_else(none)?;
                if !chosen.contains(&found) {
                    chosen.push(found);
                }
            }
        }
    }
    if chosen.is_empty() {
        return Err("no interface of this host can be used for it".into());
    }
    let local: Vec<Rail> = chosen.iter().map(|rail| rail.rail()).collect();
    let remote: Vec<Rail> = theirs.iter().map(RailTold::rail).collect();
    let mut pairs = match remote.is_empty() {
        true => return Err("the other end has no interface for it".into()),
        false => pair(&local, &remote)?,
    };
    // In one subnet all reach all. Each interface of either side is wanted once; twice only where the others are fewer.
    let (mut used_here, mut used_there) = (vec![0; local.len()], vec![0; remote.len()]);
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
        return Err(format!("{alone} reaches none of the other end's interfaces ({})", listed(theirs)));
    }
    // In the order in which they were named.
    paths.sort_by_key(|(local, _)| *local);
    Ok(paths.into_iter().map(|(_, path)| path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(interface: &str, address: &str) -> RailTold {
        let address = address.parse().unwrap();
        RailTold { interface: interface.into(), address, prefix_len: 24, link: 2, fabric: 0, speed_mbit: 1000 }
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
        assert_eq!(text(&choose(None, &both, &[x.clone(), y.clone()])), "10.0.0.1>10.0.0.2 10.0.1.1>10.0.1.2");
        let one = ["r1".to_owned(), "r1".to_owned()];
        assert_eq!(text(&choose(Some(&one), &both, &[x.clone(), y])), "10.0.1.1>10.0.1.2");
        // One subnet: a path each, not four.
        let (b, y) = (told("r1", "10.0.0.5"), told("s1", "10.0.0.6"));
        let paths = choose(None, &[a.clone(), b.clone()], &[x.clone(), y]);
        assert_eq!(text(&paths), "10.0.0.1>10.0.0.2 10.0.0.5>10.0.0.6");
        // Two against one: both go there.
        assert_eq!(
            text(&choose(None, &[a.clone(), b], std::slice::from_ref(&x))),
            "10.0.0.1>10.0.0.2 10.0.0.5>10.0.0.2"
        );
        let names = ["eth9".to_owned()];
        assert!(text(&choose(Some(&names), &both, &[x])).contains("eth9 can't be used"));
        assert!(text(&choose(None, &both, &[])).contains("the other end has no interface"));
        assert!(text(&choose(None, &[], &[])).contains("no interface of this host"));
    }

    #[test]
    fn this_host_has_what_it_has() {
        let like = IpAddr::from([127, 0, 0, 1]);
        assert!(here(Transport::Tcp, like).unwrap().iter().all(|rail| rail.interface != "lo"));
        assert!(here(Transport::Rdma, like).is_ok());
    }
}
