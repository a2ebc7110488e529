//! The peers of a mount as `status` shows them: states, transports, paths, local addresses. It changes nothing.

use serde_json::{Value, json};
use spurline_client::{DataPath, GroupVolume};
use spurline_net_tcp::{LocalAddress, local_addresses};
use spurline_transport::{PathEnds, PathPhase, PathView, PeerReach};

/// One object a node.
pub fn peer_status(remote: &GroupVolume) -> Vec<Value> {
    let view = remote.members().snapshot();
    // Without the list of interfaces, addresses are shown alone.
    let interfaces = local_addresses().unwrap_or_default();
    (0..view.members().len() as u32)
        .map(|index| {
            let member = &view.members()[index as usize];
            let Some(peer) = view.existing_peer(index) else {
                // In a large group, a node that was not needed yet has no connections.
                return json!({ "address": member.name, "state": "unknown", "connections": 0, "slow": false, "local": [], "paths": [] });
            };
            let (word, reason) = match peer.tcp_reach() {
                PeerReach::Unknown => ("unknown", String::new()),
                PeerReach::Up => ("up", String::new()),
                PeerReach::Down { error, .. } => ("down", error.to_string()),
            };
            let (paths, why_none) = peer.rails().map(|rails| rails.path_views()).unwrap_or_default();
            let data_path = peer.data_path();
            let over_rails = data_path == DataPath::Rails;
            let carrying = if over_rails {
                paths.iter().filter(|path| path.phase == PathPhase::Up).flat_map(|path| path.ends.clone()).collect()
            } else {
                peer.tcp_ends()
            };
            json!({
                "address": peer.name(),
                "state": if over_rails { "up" } else { word },
                "reason": reason,
                // The transport that carries data now.
                "transport": match data_path {
                    DataPath::Rails => "rdma",
                    DataPath::Tcp => "tcp",
                    DataPath::RuledOut => "none",
                },
                "connections": peer.tcp_connections(),
                // Of the connections that carry data now.
                "local": ends_status(&carrying, &interfaces),
                // Deprioritised: other nodes come first.
                "slow": peer.latency().is_deprioritised(),
                "paths": paths.iter().map(|path| path_status(path, &interfaces)).collect::<Vec<_>>(),
                "no_paths": why_none,
            })
        })
        .collect()
}

fn path_status(path: &PathView, interfaces: &[LocalAddress]) -> Value {
    json!({
        "path": path.spec.name,
        "transport": path.spec.kind.to_string(),
        "speed_mbit": path.spec.speed_mbit,
        "state": path.phase.name(),
        "for_seconds": path.for_time.as_secs(),
        "channels": path.channels,
        "in_flight": path.in_flight,
        // Null without data in flight.
        "silent_seconds": path.silent.map(|silent| silent.as_secs()),
        "failovers": path.failovers,
        "failbacks": path.failbacks,
        "last_failure": path.reason,
        "local": ends_status(&path.ends, interfaces),
        // Compared with the speed before its last failure; null when that is not known yet.
        "speed_check": path.speed.map(|check| json!({
            "before_bytes_per_s": check.before,
            "after_bytes_per_s": check.after,
            "slower": check.slower,
        })),
    })
}

/// Each local address with its interface: the addresses that `ss -tnp` shows for TCP.
fn ends_status(ends: &[PathEnds], interfaces: &[LocalAddress]) -> Value {
    let one = |ends: &PathEnds| {
        let local = ends.local?;
        // The kernel sends packets to its own addresses over loopback, whatever interface has the address.
        let interface = match Some(local) == ends.peer || local.is_loopback() {
            true => Some("lo"),
            false => interfaces.iter().find(|known| known.ip == local).map(|known| known.interface.as_str()),
        };
        Some(json!({ "address": local.to_string(), "interface": interface }))
    };
    let mut all: Vec<Value> = Vec::new();
    for end in ends.iter().filter_map(one) {
        if !all.contains(&end) {
            all.push(end);
        }
    }
    Value::Array(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_address_has_the_interface_that_carries_its_packets() {
        let ip = |text: &str| Some(text.parse().unwrap());
        let known =
            [LocalAddress { interface: "ib0".into(), ip: ip("10.0.0.1").unwrap(), prefix: 24, link_local: false }];
        let shown = |local, peer| ends_status(&[PathEnds { local, peer }], &known).to_string();
        assert_eq!(shown(ip("10.0.0.1"), ip("10.0.0.2")), r#"[{"address":"10.0.0.1","interface":"ib0"}]"#);
        assert_eq!(shown(ip("10.0.0.1"), ip("10.0.0.1")), r#"[{"address":"10.0.0.1","interface":"lo"}]"#);
        assert_eq!(shown(ip("10.9.9.9"), ip("10.0.0.2")), r#"[{"address":"10.9.9.9","interface":null}]"#);
        assert_eq!(shown(None, ip("10.0.0.2")), "[]");
    }
}
