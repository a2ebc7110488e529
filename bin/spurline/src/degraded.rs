//! Why a process that answers does not work well, from the status. Sends no query and prints nothing.

use spurline_observe::documents::{
    CacheDiskStatus, DISK_NORMAL, MountStatus, NodeStatus, PEER_DOWN, PeerStatus, ProcessRole, ProcessStatus,
    RegistryStatus, STATE_UP,
};
use std::collections::BTreeMap;

/// The state of a process that answers and has [`degraded_reasons`].
const STATE_DEGRADED: &str = "degraded";

/// A sentence for each failing disk, node, registry and source.
pub fn degraded_reasons(status: &ProcessStatus) -> Vec<String> {
    match &status.role {
        ProcessRole::Mount(mount) => mount_reasons(mount),
        ProcessRole::Node(node) => node_reasons(node),
        ProcessRole::Gateway(gateway) => {
            let mut reasons = disk_reasons(&gateway.disks);
            reasons.extend(peer_reasons(&gateway.peers));
            reasons.extend(origin_reasons(&gateway.origin_errors));
            reasons
        }
        ProcessRole::Coordinator(_) | ProcessRole::Other => Vec::new(),
    }
}

fn peer_reasons(peers: &[PeerStatus]) -> impl Iterator<Item = String> {
    let down = peers.iter().filter(|peer| peer.state == PEER_DOWN);
    down.map(|peer| with_reason(format!("node {} is down", peer.address), peer.reason()))
}

fn mount_reasons(mount: &MountStatus) -> Vec<String> {
    let mut reasons = disk_reasons(&mount.disks);
    reasons.extend(peer_reasons(&mount.peers));
    reasons.extend(mount.group.as_ref().and_then(|group| registry_reason(&group.registry)));
    reasons.extend(origin_reasons(&mount.origin_errors));
    reasons
}

/// As [`degraded_reasons`], of a node.
pub fn node_reasons(node: &NodeStatus) -> Vec<String> {
    let mut reasons = disk_reasons(&node.disks);
    reasons.extend(node.group.as_ref().and_then(|group| registry_reason(&group.registry)));
    reasons.extend(origin_reasons(&node.origin_errors));
    reasons
}

fn origin_reasons(errors: &BTreeMap<String, String>) -> impl Iterator<Item = String> {
    errors.iter().map(|(source, error)| format!("{source}: {error}"))
}

fn disk_reasons(disks: &[CacheDiskStatus]) -> Vec<String> {
    let failing = disks.iter().filter(|disk| disk.state != DISK_NORMAL);
    failing.map(|disk| with_reason(format!("cache disk {} is {}", disk.path, disk.state), &disk.reason)).collect()
}

fn registry_reason(status: &RegistryStatus) -> Option<String> {
    let reason = status.reason.as_deref().unwrap_or_default();
    status.is_lost().then(|| with_reason(format!("registry {} is lost", status.registry), reason))
}

/// The state of a process by the reported state and the [`degraded_reasons`].
pub fn state_with(reported: &str, reasons: &[String]) -> String {
    if reported == STATE_UP && !reasons.is_empty() { STATE_DEGRADED.to_owned() } else { reported.to_owned() }
}

fn with_reason(sentence: String, reason: &str) -> String {
    if reason.is_empty() { sentence } else { format!("{sentence}: {reason}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read_status(document: &serde_json::Value) -> ProcessStatus {
        ProcessStatus::from_json(document).unwrap()
    }

    #[test]
    fn failing_parts_are_named_with_their_reason() {
        let well = read_status(&json!({
            "kind": "mount",
            "disks": [{"path": "/a", "state": "normal", "reason": ""}],
            "peers": [{"address": "n1:7000", "state": "up"}, {"address": "n2:7000", "state": "unknown"}],
            "group": {"registry": "etcd://h:1", "state": "up"},
        }));
        assert_eq!((degraded_reasons(&well), state_with(well.state(), &[]).as_str()), (Vec::new(), "up"));
        let ill = read_status(&json!({
            "kind": "mount",
            "state": "up",
            "disks": [{"path": "/a", "state": "unstable", "reason": "3 reads failed"}],
            "peers": [{"address": "n1:7000", "state": "down", "reason": "", "transport": "tcp"}],
            "group": {"registry": "etcd://h:1", "state": "lost", "reason": "no answer"},
        }));
        let reasons = degraded_reasons(&ill);
        assert_eq!(
            reasons,
            [
                "cache disk /a is unstable: 3 reads failed",
                "node n1:7000 is down",
                "registry etcd://h:1 is lost: no answer",
            ]
        );
        assert_eq!(state_with(ill.state(), &reasons), "degraded");
        assert_eq!(state_with("origin does not respond", &reasons), "origin does not respond");
        let node = read_status(&json!({"kind": "node", "origin_errors": {"s3://b": "no route"}}));
        assert_eq!(degraded_reasons(&node), ["s3://b: no route"]);
    }
}
