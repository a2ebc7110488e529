//! Heartbeats of the nodes of a group over TCP. A node with requests in flight and no heartbeat is abandoned, so that
//! readers move to another node after a pause of known length. It does not know requests or placement.

use crate::members::GroupMembers;
use crate::peer::GroupPeer;
use spurline_types::{Error, Stats};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How nodes are watched.
pub(crate) struct NodeWatch {
    /// A node with requests in flight is abandoned after this.
    pub silence: Duration,
    pub stats: Arc<Stats>,
}

/// Sends heartbeats where they are due. Called eight times in each silence.
pub(crate) fn check_nodes(members: &GroupMembers, watch: &NodeWatch) {
    let silence = watch.silence;
    let stats = &watch.stats;
    let view = members.snapshot();
    for peer in &members.peers_in_use() {
        // A lone node keeps its requests until their own deadline: there is no alternative.
        let others = match view.members() {
            [] => false,
            [_] => view.existing_peer(0).is_none_or(|only| !Arc::ptr_eq(only, peer)),
            _ => true,
        };
        let pool = peer.tcp_pool();
        pool.set_monitored(others.then_some(silence));
        if !others {
            continue;
        }
        if let Some(owing) = pool.overdue_peer(silence / 2) {
            let asked = Arc::clone(peer);
            let stats = Arc::clone(stats);
            let ask = move || {
                let answer = asked.tcp_pool().send_heartbeat(Instant::now() + silence / 2);
                if asked.tcp_pool().heartbeat_ended(owing, &answer)
                    && let Err(error) = answer
                {
                    stats.remotecache.given_up.add(1);
                    tracing::warn!(peer = asked.name(), %error, "a node has requests outstanding and sends no heartbeat: reads move to other nodes");
                }
            };
            // Without a thread there is no heartbeat, and readers wait for their own deadlines.
            spawn_probe(peer, ask, |peer| {
                peer.tcp_pool().heartbeat_ended(owing, &Ok(()));
            });
        } else if pool.revival_due() {
            let asked = Arc::clone(peer);
            let ask = move || {
                let answer = asked.tcp_pool().send_heartbeat(Instant::now() + silence);
                asked.tcp_pool().revival_ended(&answer);
                if answer.is_ok() {
                    tracing::info!(peer = asked.name(), "a node sends heartbeats again");
                }
            };
            spawn_probe(peer, ask, |peer| {
                peer.tcp_pool().revival_ended(&Err(Error::io("no thread", &std::io::ErrorKind::OutOfMemory.into())))
            });
        }
    }
}

/// Runs `ask` on its own thread, so that a hung node delays no other; runs `instead` if no thread can be started.
fn spawn_probe(peer: &Arc<GroupPeer>, ask: impl FnOnce() + Send + 'static, instead: impl FnOnce(&Arc<GroupPeer>)) {
    if let Err(error) = std::thread::Builder::new().name("heartbeat".into()).spawn(ask) {
        tracing::warn!(peer = peer.name(), %error, "cannot start the thread that sends a heartbeat");
        instead(peer);
    }
}
