//! Which local rail can reach which rail of a peer. Pure: knows neither link states nor connections.

use spurline_proto::{RailInfo, RailLink};
use std::net::IpAddr;

/// A local and a remote rail that should reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailPair {
    /// Index of the local rail.
    pub local: usize,
    /// Index of the peer's rail.
    pub remote: usize,
    /// The lower of both speeds in megabits per second; at least 1.
    pub speed_mbit: u32,
}

/// Pairs the rails that can reach each other.
///
/// Rails of the same link type (and, on InfiniBand, the same subnet prefix) in the same IP subnet reach each other, all with all.
/// Rails without a partner in the subnet are paired in list order where packets are routed: hosts with a separate subnet for each
/// rail list the rails in the same order on both sides.
///
/// # Errors
/// When there is no pair: the reason, as text.
pub fn pair_rails(local: &[RailInfo], remote: &[RailInfo]) -> Result<Vec<RailPair>, String> {
    let make = |l: usize, r: usize| {
        let slower = known_speed(&local[l]).min(known_speed(&remote[r]));
        // If neither side knows a speed, all pairs count the same.
        RailPair { local: l, remote: r, speed_mbit: if slower == u32::MAX { 1 } else { slower } }
    };
    let mut pairs = Vec::new();
    for (r, remote_rail) in remote.iter().enumerate() {
        for (l, local_rail) in local.iter().enumerate() {
            if same_fabric(local_rail, remote_rail) && same_subnet(local_rail, remote_rail) {
                pairs.push(make(l, r));
            }
        }
    }
    let mut locals = pairless_rails(&pairs, |p| p.local, local.len());
    for r in pairless_rails(&pairs, |p| p.remote, remote.len()) {
        let remote_rail = &remote[r];
        if let Some(at) = locals.iter().position(|l| {
            let local_rail = &local[*l];
            let crosses = remote_rail.link.is_routable() || remote_rail.link == RailLink::InfiniBand;
            crosses
                && same_fabric(local_rail, remote_rail)
                && local_rail.address.is_ipv4() == remote_rail.address.is_ipv4()
        }) {
            pairs.push(make(locals.remove(at), r));
        }
    }
    if pairs.is_empty() { Err(why_none(local, remote)) } else { Ok(pairs) }
}

fn known_speed(rail: &RailInfo) -> u32 {
    if rail.speed_mbit == 0 { u32::MAX } else { rail.speed_mbit }
}

fn pairless_rails(taken: &[RailPair], of: fn(&RailPair) -> usize, count: usize) -> Vec<usize> {
    (0..count).filter(|i| !taken.iter().any(|p| of(p) == *i)).collect()
}

fn same_fabric(local_rail: &RailInfo, remote_rail: &RailInfo) -> bool {
    local_rail.link == remote_rail.link
        && (local_rail.link != RailLink::InfiniBand || local_rail.fabric == remote_rail.fabric)
}

fn same_subnet(local_rail: &RailInfo, remote_rail: &RailInfo) -> bool {
    let network = |ip: IpAddr, bits: u8| -> Option<u128> {
        let (number, width) = match ip {
            IpAddr::V4(ip) => (u128::from(u32::from(ip)), 32),
            IpAddr::V6(ip) => (u128::from(ip), 128),
        };
        // A prefix of no bits contains every address.
        Some(number.checked_shr(width - u32::from(bits).min(width)).unwrap_or(0))
    };
    local_rail.address.is_ipv4() == remote_rail.address.is_ipv4()
        && network(local_rail.address, local_rail.prefix_len) == network(remote_rail.address, local_rail.prefix_len)
}

fn why_none(local: &[RailInfo], remote: &[RailInfo]) -> String {
    if remote.is_empty() {
        return "the node serves TCP only: it was started without --rdma-network".to_owned();
    }
    let same_link = local.iter().any(|l| remote.iter().any(|r| l.link == r.link));
    let reason = if !same_link {
        "they are on different fabrics"
    } else if local.iter().any(|l| remote.iter().any(|r| same_fabric(l, r))) {
        "they share no IP subnet"
    } else {
        "their InfiniBand subnet prefixes differ"
    };
    format!(
        "no rail of this side reaches one of the node's, {reason}: here {}; there {}",
        rail_names(local),
        rail_names(remote)
    )
}

fn rail_names(rails: &[RailInfo]) -> String {
    rails.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rail(link: RailLink, address: &str, prefix_len: u8, fabric: u64, speed_mbit: u32) -> RailInfo {
        let name = format!("r{address}");
        RailInfo { name, address: address.parse().unwrap(), prefix_len, port: 1, link, fabric, speed_mbit }
    }
    fn roce(address: &str, speed: u32) -> RailInfo {
        rail(RailLink::RoceV2, address, 24, 0, speed)
    }
    fn ib(address: &str, fabric: u64) -> RailInfo {
        rail(RailLink::InfiniBand, address, 24, fabric, 400_000)
    }

    fn text(local: &[RailInfo], remote: &[RailInfo]) -> String {
        match pair_rails(local, remote) {
            Ok(pairs) => {
                pairs.iter().map(|p| format!("{}-{}@{}", p.local, p.remote, p.speed_mbit)).collect::<Vec<_>>().join(" ")
            }
            Err(why) => why,
        }
    }

    #[test]
    fn rails_of_one_subnet_reach_each_other() {
        let (a, b) = (roce("10.1.0.1", 100_000), roce("10.2.0.1", 25_000));
        let (x, y) = (roce("10.1.0.2", 100_000), roce("10.2.0.2", 100_000));
        assert_eq!(text(&[a.clone(), b.clone()], &[x.clone(), y.clone()]), "0-0@100000 1-1@25000");
        assert_eq!(text(&[b, a.clone()], &[x.clone(), y]), "1-0@100000 0-1@25000");
        // All with all where they can, and nothing known of speeds counts the same for all.
        let z = roce("10.1.0.3", 0);
        assert_eq!(text(&[a.clone(), z.clone()], &[x, z.clone()]), "0-0@100000 1-0@100000 0-1@100000 1-1@1");
        // IPv6, and families that don't meet.
        let six = |ip: &str| rail(RailLink::RoceV2, ip, 64, 0, 1);
        assert_eq!(text(&[six("fd00::1")], &[six("fd00::2")]), "0-0@1");
        assert!(text(&[six("fd00::1")], &[a]).contains("share no IP subnet"));
    }

    #[test]
    fn routed_rails_are_matched_in_their_order() {
        let here = [roce("10.1.1.0", 1), roce("10.1.2.0", 1)];
        let there = [roce("10.2.1.0", 1), roce("10.2.2.0", 1), roce("10.2.3.0", 1)];
        assert_eq!(text(&here, &there), "0-0@1 1-1@1");
        // One that has a partner in its subnet is not taken for another's.
        assert_eq!(text(&here, &[there[0].clone(), roce("10.1.1.9", 1)]), "0-1@1 1-0@1");
        let v1 = |ip: &str| rail(RailLink::RoceV1, ip, 24, 0, 1);
        assert!(text(&[v1("10.1.0.1")], &[v1("10.2.0.1")]).contains("share no IP subnet"));
    }

    #[test]
    fn different_fabrics_are_said() {
        assert_eq!(text(&[ib("10.1.0.1", 7)], &[ib("10.1.0.2", 7)]), "0-0@400000");
        assert!(text(&[ib("10.1.0.1", 7)], &[ib("10.1.0.2", 8)]).contains("subnet prefixes differ"));
        let mixed = text(&[ib("10.1.0.1", 7)], &[roce("10.1.0.2", 100_000)]);
        assert_eq!(
            mixed,
            "no rail of this side reaches one of the node's, they are on different fabrics: here r10.1.0.1 \
             (InfiniBand 10.1.0.1/24, subnet prefix 0000000000000007, 400 Gb/s); there r10.1.0.2 (RoCE v2 10.1.0.2/24, \
             100 Gb/s)"
        );
        assert!(text(&[roce("10.1.0.2", 1)], &[]).contains("serves TCP only"));
    }
}
