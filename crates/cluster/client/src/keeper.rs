//! Keeps the paths of a process: one thread looks at links and at silence, and has threads of their own connect and
//! ping, so that a node or a rail that hangs holds up nobody else. It is started only where there are rails.

use crate::paths::{Current, Dialer, Paths};
use crate::pulse;
use crate::roster::Roster;
use spurline_transport::Wake;
use spurline_types::{Error, Result};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Links are looked at this often when nothing else happens.
const IDLE: Duration = Duration::from_secs(1);
/// Nodes with a path that does not carry data are asked this often whether they are still the same process.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// The running keeper; it ends when dropped.
pub struct Keeper {
    roster: Arc<Roster>,
    wake: Arc<Wake>,
    stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Keeper {
    /// Keeps the paths of the nodes of `roster`, which all ring `wake`.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(roster: &Arc<Roster>, wake: Arc<Wake>) -> Result<Keeper> {
        let stopping = Arc::new(AtomicBool::new(false));
        let thread = {
            let (roster, wake, stopping) = (Arc::clone(roster), Arc::clone(&wake), Arc::clone(&stopping));
            std::thread::Builder::new().name("keep-paths".into()).spawn(move || run(&roster, &wake, &stopping))
        };
        let thread = thread.map_err(|e| Error::io("can't start the thread that keeps paths", &e))?;
        Ok(Keeper { roster: Arc::clone(roster), wake, stopping, thread: Some(thread) })
    }

    /// Waits until every node was asked for its rails and every path was tried, or until `deadline`: so the first
    /// reads find their paths.
    pub fn wait_first(&self, deadline: Instant) {
        let decided = || self.roster.view().all_made().filter_map(|peer| peer.paths()).all(|paths| paths.decided());
        while !decided() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.wake.ring();
        if let Some(thread) = self.thread.take() {
            // It waits for nothing but the wake-up.
            let _ = thread.join();
        }
    }
}

fn run(roster: &Roster, wake: &Wake, stopping: &AtomicBool) {
    let mut ask_at = Instant::now();
    while !stopping.load(Ordering::Acquire) {
        let now = Instant::now();
        let ask = now >= ask_at;
        if ask {
            ask_at = now + ASK_AGAIN;
        }
        let mut next = (now + IDLE).min(ask_at);
        let links = Links::default();
        for peer in &roster.in_use() {
            let Some(paths) = peer.paths() else { continue };
            if ask && paths.ask() {
                let asked = Arc::clone(peer);
                let started = spawn("ask-rails", move || asked.ask_rails());
                if let Err(error) = started {
                    paths.learn(Err(error));
                }
            }
            if let Some(current) = paths.current() {
                next = next.min(keep(paths, &current, &links));
            }
        }
        wake.wait(next);
    }
}

/// Which links of this machine are up, each looked at once a round, however many nodes there are.
#[derive(Default)]
struct Links(RefCell<Vec<Option<bool>>>);

impl Links {
    fn up(&self, dialer: &dyn Dialer, local: usize) -> bool {
        let mut seen = self.0.borrow_mut();
        if seen.len() <= local {
            seen.resize(local + 1, None);
        }
        *seen[local].get_or_insert_with(|| dialer.link_up(local))
    }
}

/// Does what is due for the paths to one node; says when to look again.
fn keep(paths: &Arc<Paths>, current: &Arc<Current>, links: &Links) -> Instant {
    let pool = &current.pool;
    pool.links(&|local| links.up(paths.dialer(), local));
    let silence = paths.config().silence;
    pool.look(silence);
    pool.close_idle(pulse::IDLE);
    for path in pool.due() {
        let (with, of) = (Arc::clone(paths), Arc::clone(current));
        if let Err(error) = spawn("connect-path", move || with.connect(&of, path)) {
            pool.connect_failed(path, &error);
        }
    }
    for (path, generation) in pool.wanting() {
        let (with, of) = (Arc::clone(paths), Arc::clone(current));
        if let Err(error) = spawn("grow-path", move || with.grow(&of, path, generation)) {
            pool.add(path, generation, Err(error));
        }
    }
    // An eighth until this is seen, half for the answer: the silence that is borne, in all.
    for quiet in pool.quiet(silence * 3 / 8) {
        let (with, of) = (Arc::clone(paths), Arc::clone(current));
        let (path, generation) = quiet.place();
        if let Err(error) = spawn("ping-path", move || with.probe(&of, quiet)) {
            tracing::warn!(path, %error, "a silent path could not be asked for a sign of life");
            pool.not_asked(path, generation);
        }
    }
    let now = Instant::now();
    let patience = if pool.in_flight() > 0 { silence / 8 } else { (silence / 2).min(IDLE) };
    let next = now + patience.max(Duration::from_millis(1));
    pool.next_due().map_or(next, |due| next.min(due.max(now + Duration::from_millis(1))))
}

fn spawn(name: &str, job: impl FnOnce() + Send + 'static) -> Result<()> {
    let spawned = std::thread::Builder::new().name(name.into()).spawn(job);
    spawned.map(drop).map_err(|e| Error::io(format_args!("can't start the thread {name}"), &e))
}
