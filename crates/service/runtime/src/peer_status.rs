//! The peers of a mount in `status`: states, transports, paths, local addresses. Changes nothing but a state that is out of date.

use spurline_client::{DataPath, GroupPeer, GroupVolume};
use spurline_net_tcp::{LocalAddress, local_addresses};
use spurline_observe::documents::{
    LocalEnd, PEER_DOWN, PEER_UNKNOWN, PEER_UP, PathSpeedCheck, PathStatus, PeerStatus, PeerUse,
};
use spurline_transport::{PathEnds, PathPhase, PathView, PeerReach};
use std::time::{Duration, Instant};

/// Time for the nodes that were down to answer.
const RETRY_LIMIT: Duration = Duration::from_secs(1);

/// All nodes of a mount; those that were down are tried again first.
pub fn peer_status(remote: &GroupVolume) -> Vec<PeerStatus> {
    remote.retry_down_nodes(Instant::now() + RETRY_LIMIT);
    let view = remote.members().snapshot();
    // Without the list of interfaces, addresses are shown alone.
    let interfaces = local_addresses().unwrap_or_default();
    (0..view.members().len() as u32)
        .map(|index| match view.existing_peer(index) {
            Some(peer) => used_peer_status(peer, &interfaces),
            // In a large group, a node that was not needed yet has no connections.
            None => PeerStatus {
                address: view.members()[index as usize].name.clone(),
                state: PEER_UNKNOWN.to_owned(),
                ..PeerStatus::default()
            },
        })
        .collect()
}

fn used_peer_status(peer: &GroupPeer, interfaces: &[LocalAddress]) -> PeerStatus {
    let (tcp_word, reason) = match peer.tcp_reach() {
        PeerReach::Unknown => (PEER_UNKNOWN, String::new()),
        PeerReach::Up => (PEER_UP, String::new()),
        PeerReach::Down { error, .. } => (PEER_DOWN, error.to_string()),
    };
    let (paths, no_paths) = peer.rails().map(|rails| rails.path_views()).unwrap_or_default();
    let data_path = peer.data_path();
    let over_rails = data_path == DataPath::Rails;
    let carrying: Vec<PathEnds> = if over_rails {
        paths.iter().filter(|path| path.phase == PathPhase::Up).flat_map(|path| path.ends.clone()).collect()
    } else {
        peer.tcp_ends()
    };
    let transport = match data_path {
        DataPath::Rails => "rdma",
        DataPath::Tcp => "tcp",
        DataPath::RuledOut => "none",
    };
    PeerStatus {
        address: peer.name().to_owned(),
        state: if over_rails { PEER_UP } else { tcp_word }.to_owned(),
        connections: peer.tcp_connections() as u64,
        slow: peer.latency().is_deprioritised(),
        local: local_ends(&carrying, interfaces),
        paths: paths.iter().map(|path| path_status(path, interfaces)).collect(),
        used: Some(PeerUse { reason, transport: transport.to_owned(), no_paths }),
    }
}

fn path_status(path: &PathView, interfaces: &[LocalAddress]) -> PathStatus {
    PathStatus {
        path: path.spec.name.clone(),
        transport: path.spec.kind.to_string(),
        speed_mbit: path.spec.speed_mbit,
        state: path.phase.name().to_owned(),
        for_seconds: path.for_time.as_secs(),
        channels: path.channels as u64,
        in_flight: path.in_flight as u64,
        silent_seconds: path.silent.map(|silent| silent.as_secs()),
        failovers: path.failovers,
        failbacks: path.failbacks,
        last_failure: path.reason.clone(),
        local: local_ends(&path.ends, interfaces),
        speed_check: path.speed.map(|check| PathSpeedCheck {
            before_bytes_per_s: check.before,
            after_bytes_per_s: check.after,
            slower: check.slower,
        }),
    }
}

/// Each local address with the interface: the addresses that `ss -tnp` shows for TCP.
fn local_ends(ends: &[PathEnds], interfaces: &[LocalAddress]) -> Vec<LocalEnd> {
    let mut all: Vec<LocalEnd> = Vec::new();
    for end in ends.iter().filter_map(|ends| local_end(ends, interfaces)) {
        if !all.contains(&end) {
            all.push(end);
        }
    }
    all
}

fn local_end(ends: &PathEnds, interfaces: &[LocalAddress]) -> Option<LocalEnd> {
    let local = ends.local?;
    // The kernel sends packets to local addresses over loopback, whatever interface has the address.
    let interface = if Some(local) == ends.peer || local.is_loopback() {
        Some("lo".to_owned())
    } else {
        interfaces.iter().find(|known| known.ip == local).map(|known| known.interface.clone())
    };
    Some(LocalEnd { address: local.to_string(), interface })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_address_has_the_interface_that_carries_its_packets() {
        let ip = |text: &str| Some(text.parse().unwrap());
        let known =
            [LocalAddress { interface: "ib0".into(), ip: ip("10.0.0.1").unwrap(), prefix: 24, link_local: false }];
        let shown = |local, peer| local_ends(&[PathEnds { local, peer }], &known);
        let end = |address: &str, interface: Option<&str>| LocalEnd {
            address: address.to_owned(),
            interface: interface.map(ToOwned::to_owned),
        };
        assert_eq!(shown(ip("10.0.0.1"), ip("10.0.0.2")), [end("10.0.0.1", Some("ib0"))]);
        assert_eq!(shown(ip("10.0.0.1"), ip("10.0.0.1")), [end("10.0.0.1", Some("lo"))]);
        assert_eq!(shown(ip("10.9.9.9"), ip("10.0.0.2")), [end("10.9.9.9", None)]);
        assert_eq!(shown(None, ip("10.0.0.2")), []);
    }
}
