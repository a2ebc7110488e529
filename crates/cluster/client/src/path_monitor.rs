//! Maintains the paths of a process. One thread checks links and silence; short-lived threads connect and send
//! heartbeats, so that a hung node or rail delays no other. Started only when there are rails.

use crate::heartbeat;
use crate::members::GroupMembers;
use crate::paths::{NodePaths, PathSet, RailDialer};
use spurline_transport::PathWake;
use spurline_types::{Error, Result};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval of link checks.
const IDLE: Duration = Duration::from_secs(1);
/// Interval of handshakes with nodes that have a path down, to detect a restart.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The running monitor; dropping it stops the thread.
pub struct PathMonitor {
    roster: Arc<GroupMembers>,
    wake: Arc<PathWake>,
    stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl PathMonitor {
    /// Maintains the paths of all nodes in `roster`, each of which rings `wake`.
    ///
    /// # Errors
    /// When the thread cannot be started.
    pub fn start(roster: &Arc<GroupMembers>, wake: Arc<PathWake>) -> Result<PathMonitor> {
        let stopping = Arc::new(AtomicBool::new(false));
        let thread = {
            let (roster, wake, stopping) = (Arc::clone(roster), Arc::clone(&wake), Arc::clone(&stopping));
            std::thread::Builder::new().name("keep-paths".into()).spawn(move || run_monitor(&roster, &wake, &stopping))
        };
        let thread = thread.map_err(|e| Error::io("can't start the thread that keeps paths", &e))?;
        Ok(PathMonitor { roster: Arc::clone(roster), wake, stopping, thread: Some(thread) })
    }

    /// Waits until every node's rails are known and every path was tried, or until `deadline`, so that the first
    /// reads find their paths.
    pub fn wait_first(&self, deadline: Instant) {
        let decided =
            || self.roster.snapshot().existing_peers().filter_map(|peer| peer.paths()).all(|paths| paths.is_decided());
        while !decided() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for PathMonitor {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.wake.wake_monitor();
        if let Some(thread) = self.thread.take() {
            // The thread only waits for this wake-up.
            let _ = thread.join();
        }
    }
}

fn run_monitor(roster: &GroupMembers, wake: &PathWake, stopping: &AtomicBool) {
    let mut ask_at = Instant::now();
    while !stopping.load(Ordering::Acquire) {
        let now = Instant::now();
        let ask = now >= ask_at;
        if ask {
            ask_at = now + ASK_AGAIN;
        }
        let mut next = (now + IDLE).min(ask_at);
        let links = LinkStates::default();
        for peer in &roster.peers_in_use() {
            let Some(paths) = peer.paths() else { continue };
            if ask && paths.needs_rails() {
                let asked = Arc::clone(peer);
                let started = spawn_thread("ask-rails", move || asked.fetch_rails());
                if let Err(error) = started {
                    paths.learn_rails(Err(error));
                }
            }
            if let Some(current) = paths.current() {
                next = next.min(maintain_paths(paths, &current, &links));
            }
        }
        wake.wait_until(next);
    }
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
fn maintain_paths(paths: &Arc<NodePaths>, current: &Arc<PathSet>, links: &LinkStates) -> Instant {
    let pool = &current.pool;
    pool.update_links(&|local| links.is_up(paths.dialer(), local));
    let silence = paths.config().silence;
    pool.check_idle(silence);
    pool.close_idle(heartbeat::IDLE);
    for path in pool.begin_due() {
        let (with, of) = (Arc::clone(paths), Arc::clone(current));
        if let Err(error) = spawn_thread("connect-path", move || with.connect_path(&of, path)) {
            pool.connect_failed(path, &error);
        }
    }
    for (path, generation) in pool.begin_growing() {
        let (with, of) = (Arc::clone(paths), Arc::clone(current));
        if let Err(error) = spawn_thread("grow-path", move || with.add_channel(&of, path, generation)) {
            pool.add_channel(path, generation, Err(error));
        }
    }
    // Detection takes up to 1/8 of the silence, the answer up to 1/2: together at most the configured silence.
    for quiet in pool.quiet_paths(silence * 3 / 8) {
        let (with, of) = (Arc::clone(paths), Arc::clone(current));
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
