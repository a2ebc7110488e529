//! The path monitor: one thread of a process watches the paths to all nodes of a group, over TCP and RDMA. It checks
//! links, silence and connections that ended. Short-lived threads connect and send heartbeats, so that a hung node or
//! rail delays no other. It does not know requests or placement.

use crate::heartbeat::{self, NodeWatch};
use crate::members::GroupMembers;
use crate::node_rails::{NodeRails, RailDialer, RailSet};
use spurline_transport::PathWake;
use spurline_types::{Error, Result, Stats};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Interval of link checks.
const IDLE: Duration = Duration::from_secs(1);
/// Interval of handshakes with nodes that have a path down, to detect a restart.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// Idle channels are closed after this long, except one: a burst needs many, and a node has a limited number for all
/// mounts.
const CLOSE_IDLE: Duration = Duration::from_secs(60);

/// The running monitor; dropping its last clone stops the thread.
#[derive(Clone)]
pub struct PathMonitor {
    members: Arc<GroupMembers>,
    thread: Arc<MonitorThread>,
}

/// The thread and what it is to watch.
pub(crate) struct MonitorThread {
    control: Arc<MonitorControl>,
    handle: Option<std::thread::JoinHandle<()>>,
}

struct MonitorControl {
    wake: Arc<PathWake>,
    stopping: AtomicBool,
    /// Set once nodes are watched for silence.
    nodes: OnceLock<NodeWatch>,
}

impl PathMonitor {
    /// Maintains the paths of all nodes in `members`. A list of members has one monitor: a second call returns the
    /// running one.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(members: &Arc<GroupMembers>) -> Result<PathMonitor> {
        let mut running = members.monitor().lock();
        let thread = match running.upgrade() {
            Some(thread) => thread,
            None => Arc::new(MonitorThread::start(members)?),
        };
        *running = Arc::downgrade(&thread);
        Ok(PathMonitor { members: Arc::clone(members), thread })
    }

    /// Watches the nodes for silence as well: one with requests in flight is abandoned after `silence` if there are
    /// others. Only the first call has an effect.
    pub(crate) fn watch_nodes(&self, silence: Duration, stats: &Arc<Stats>) {
        let control = &self.thread.control;
        if control.nodes.set(NodeWatch { silence, stats: Arc::clone(stats) }).is_ok() {
            control.wake.wake_monitor();
        }
    }

    /// Waits until every node's rails are known and every path was tried, or until `deadline`, so that the first
    /// reads find their paths.
    pub fn wait_first(&self, deadline: Instant) {
        while !self.all_decided() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn all_decided(&self) -> bool {
        self.members.snapshot().existing_peers().filter_map(|peer| peer.rails()).all(|rails| rails.is_decided())
    }
}

impl MonitorThread {
    fn start(members: &Arc<GroupMembers>) -> Result<MonitorThread> {
        let control = Arc::new(MonitorControl {
            wake: Arc::clone(members.path_wake()),
            stopping: AtomicBool::new(false),
            nodes: OnceLock::new(),
        });
        let members = Arc::clone(members);
        let of = Arc::clone(&control);
        let spawned = std::thread::Builder::new().name("watch-paths".into()).spawn(move || run_monitor(&members, &of));
        let handle = spawned.map_err(|e| Error::io("can't start the thread that watches paths", &e))?;
        Ok(MonitorThread { control, handle: Some(handle) })
    }
}

impl Drop for MonitorThread {
    fn drop(&mut self) {
        self.control.stopping.store(true, Ordering::Release);
        self.control.wake.wake_monitor();
        if let Some(handle) = self.handle.take() {
            // The thread only waits for this wake-up.
            let _ = handle.join();
        }
    }
}

fn run_monitor(members: &GroupMembers, control: &MonitorControl) {
    let start = Instant::now();
    let mut rails_at = start;
    let mut rails_asked = start;
    let mut nodes_at = start;
    let mut idle_at = start;
    let mut woken = true;
    while !control.stopping.load(Ordering::Acquire) {
        let now = Instant::now();
        if woken || now >= rails_at {
            rails_at = maintain_rails(members, now, &mut rails_asked);
        }
        let mut next = rails_at;
        if let Some(watch) = control.nodes.get() {
            if now >= nodes_at {
                nodes_at = now + (watch.silence / 8).max(Duration::from_millis(1));
                heartbeat::check_nodes(members, watch);
            }
            if now >= idle_at {
                idle_at = now + watch.silence;
                members.snapshot().existing_peers().for_each(|peer| peer.tcp_pool().check_idle());
                members.peers_in_use().iter().for_each(|peer| peer.tcp_pool().close_idle(CLOSE_IDLE));
            }
            next = next.min(nodes_at).min(idle_at);
        }
        woken = control.wake.wait_until(next);
    }
}

/// Does the work due for the rails of all nodes; returns the time of the next check. `ask_at` is the time of the next
/// handshakes with nodes that have a path down.
fn maintain_rails(members: &GroupMembers, now: Instant, ask_at: &mut Instant) -> Instant {
    let ask = now >= *ask_at;
    if ask {
        *ask_at = now + ASK_AGAIN;
    }
    let mut next = (now + IDLE).min(*ask_at);
    let links = LinkStates::default();
    for peer in &members.peers_in_use() {
        let Some(rails) = peer.rails() else { continue };
        if ask && rails.needs_rails() {
            let asked = Arc::clone(peer);
            let started = spawn_thread("ask-rails", move || asked.fetch_rails());
            if let Err(error) = started {
                rails.learn_rails(Err(error));
            }
        }
        if let Some(current) = rails.current() {
            next = next.min(maintain_paths(rails, &current, &links));
        }
    }
    next
}

/// Link states of this machine, each read once per round whatever the number of nodes.
#[derive(Default)]
struct LinkStates(RefCell<Vec<Option<bool>>>);

impl LinkStates {
    fn is_up(&self, dialer: &dyn RailDialer, local: usize) -> bool {
        let mut seen = self.0.borrow_mut();
        if seen.len() <= local {
            seen.resize(local + 1, None);
        }
        *seen[local].get_or_insert_with(|| dialer.link_up(local))
    }
}

/// Does the work due for one node's paths; returns the time of the next check.
fn maintain_paths(rails: &Arc<NodeRails>, current: &Arc<RailSet>, links: &LinkStates) -> Instant {
    let pool = &current.pool;
    pool.update_links(&|local| links.is_up(rails.dialer(), local));
    let silence = rails.config().silence;
    pool.check_idle(silence);
    pool.close_idle(CLOSE_IDLE);
    for path in pool.begin_due() {
        let with = Arc::clone(rails);
        let of = Arc::clone(current);
        if let Err(error) = spawn_thread("connect-path", move || with.connect_path(&of, path)) {
            pool.connect_failed(path, &error);
        }
    }
    for (path, generation) in pool.begin_growing() {
        let with = Arc::clone(rails);
        let of = Arc::clone(current);
        if let Err(error) = spawn_thread("grow-path", move || with.add_channel(&of, path, generation)) {
            pool.add_channel(path, generation, Err(error));
        }
    }
    // Detection takes up to 1/8 of the silence, the answer up to 1/2: together at most the configured silence.
    for quiet in pool.quiet_paths(silence * 3 / 8) {
        let with = Arc::clone(rails);
        let of = Arc::clone(current);
        let (path, generation) = quiet.path_generation();
        if let Err(error) = spawn_thread("ping-path", move || with.probe_path(&of, quiet)) {
            tracing::warn!(path, %error, "cannot send a heartbeat over a silent path");
            pool.probe_skipped(path, generation);
        }
    }
    let now = Instant::now();
    let patience = if pool.in_flight() > 0 { silence / 8 } else { (silence / 2).min(IDLE) };
    let next = now + patience.max(Duration::from_millis(1));
    pool.next_due().map_or(next, |due| next.min(due.max(now + Duration::from_millis(1))))
}

fn spawn_thread(name: &str, job: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(job);
    spawned.map(drop).map_err(|e| Error::io(format_args!("can't start the thread {name}"), &e))
}
