//! The condition of a volume, from the answer of the mount process. Knows no pods and no processes.

use spurline_observe::documents::{MountStatus, PEER_DOWN, PeerStatus, ProcessStatus, STATE_UP};

/// Most cache nodes that a condition names.
const MOST_NODES: usize = 3;

/// The condition of a volume, and the size of the cache.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct VolumeHealth {
    /// Whether the volume can't be read, or only in part.
    pub abnormal: bool,
    /// The sentence for a person.
    pub message: String,
    /// Bytes of the source in the mount's own cache.
    pub cached_bytes: u64,
    /// Capacity of that cache in bytes.
    pub cache_bytes: u64,
}

impl VolumeHealth {
    /// A volume that can't be read, and why.
    pub(crate) fn abnormal(message: String) -> Self {
        VolumeHealth { abnormal: true, message, ..VolumeHealth::default() }
    }

    /// The condition by the answer of the mount process. `last_end` says why the process before ended.
    pub(crate) fn of_status(answer: Result<ProcessStatus, String>, last_end: Option<String>) -> Self {
        let answer = match answer {
            Ok(answer) => answer,
            Err(why) => return VolumeHealth::abnormal(format!("the mount process does not answer: {why}")),
        };
        let wrong = match answer.state() {
            STATE_UP => answer.mount().and_then(lost_nodes),
            state => Some(state.to_owned()),
        };
        let mut health = VolumeHealth { abnormal: wrong.is_some(), ..VolumeHealth::default() };
        for disk in answer.disks() {
            health.cached_bytes += disk.used_bytes;
            health.cache_bytes += disk.capacity_bytes;
        }
        health.message = match (wrong, last_end) {
            (Some(why), _) => why,
            (None, Some(why)) => format!("the volume is mounted; its process was replaced because {why}"),
            (None, None) => "the volume is mounted".to_owned(),
        };
        health
    }
}

/// The report that no cache node of the volume answers, when there are nodes.
fn lost_nodes(mount: &MountStatus) -> Option<String> {
    let peers = &mount.peers;
    if peers.is_empty() || peers.iter().any(|peer| peer.state != PEER_DOWN) {
        return None;
    }
    let named: Vec<String> = peers.iter().take(MOST_NODES).map(describe_lost_node).collect();
    let more = if peers.len() > MOST_NODES { ", …" } else { "" };
    Some(format!("no cache node of the volume answers: {}{more}", named.join(", ")))
}

fn describe_lost_node(peer: &PeerStatus) -> String {
    match peer.reason() {
        "" => peer.address.clone(),
        reason => format!("{} ({reason})", peer.address),
    }
}
