//! Sends heartbeats to the nodes of a group. A node with outstanding requests and no heartbeat is abandoned, so that
//! readers move to another node after a pause of known length. Does not know requests or placement.

use crate::members::GroupMembers;
use crate::peer::GroupPeer;
use spurline_transport::PathWake;
use spurline_types::{Error, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Idle channels are closed after this long, except one: a burst needs many, and a node has a limited number for all
/// mounts.
pub(crate) const IDLE: Duration = Duration::from_secs(60);

/// The running heartbeat; dropping it stops the thread.
pub(crate) struct NodeHeartbeat {
    wake: Arc<PathWake>,
    stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl NodeHeartbeat {
    /// Monitors the nodes of `roster`; one with outstanding requests is abandoned after `silence`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(roster: &Arc<GroupMembers>, silence: Duration, stats: &Arc<Stats>) -> Result<NodeHeartbeat> {
        let (wake, stopping) = (Arc::new(PathWake::default()), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (roster, wake, stopping, stats) =
                (Arc::clone(roster), Arc::clone(&wake), Arc::clone(&stopping), Arc::clone(stats));
            let run = move || {
                let mut looked = Instant::now();
                while !stopping.load(Ordering::Acquire) {
                    check_nodes(&roster, silence, &stats);
                    if looked.elapsed() >= silence {
                        looked = Instant::now();
                        roster.snapshot().existing_peers().for_each(|peer| peer.tcp_pool().check_idle(Duration::ZERO));
                        roster.peers_in_use().iter().for_each(|peer| peer.tcp_pool().close_idle(IDLE));
                    }
                    wake.wait_until(Instant::now() + (silence / 8).max(Duration::from_millis(1)));
                }
            };
            std::thread::Builder::new().name("watch-nodes".into()).spawn(run)
        };
        let thread = thread.map_err(|e| Error::io("can't start the thread that watches nodes", &e))?;
        Ok(NodeHeartbeat { wake, stopping, thread: Some(thread) })
    }
}

impl Drop for NodeHeartbeat {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.wake.wake_monitor();
        if let Some(thread) = self.thread.take() {
            // The thread only waits for this wake-up.
            let _ = thread.join();
        }
    }
}

fn check_nodes(roster: &GroupMembers, silence: Duration, stats: &Arc<Stats>) {
    let view = roster.snapshot();
    for peer in &roster.peers_in_use() {
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
            let (asked, stats) = (Arc::clone(peer), Arc::clone(stats));
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
