//! Watches the nodes of a group for signs of life: one that owes answers and gives none is given up, so that readers go
//! on with another node after a pause of known length. It knows neither requests nor who holds what.

use crate::peer::Peer;
use crate::roster::Roster;
use spurline_transport::Wake;
use spurline_types::{Error, Result, Stats};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Channels that nobody used for this long are closed, but for one: a burst of reads needs many, and a node has places for so
/// many only, for all its mounts.
pub(crate) const IDLE: Duration = Duration::from_secs(60);

/// The running watch; it ends when dropped.
pub(crate) struct Pulse {
    wake: Arc<Wake>,
    stopping: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pulse {
    /// Watches the nodes of `roster`: one that owes answers is given up after `silence`.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn start(roster: &Arc<Roster>, silence: Duration, stats: &Arc<Stats>) -> Result<Pulse> {
        let (wake, stopping) = (Arc::new(Wake::default()), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (roster, wake, stopping, stats) =
                (Arc::clone(roster), Arc::clone(&wake), Arc::clone(&stopping), Arc::clone(stats));
            let run = move || {
                let mut looked = Instant::now();
                while !stopping.load(Ordering::Acquire) {
                    look(&roster, silence, &stats);
                    if looked.elapsed() >= silence {
                        looked = Instant::now();
                        roster.view().all_made().for_each(|peer| peer.tcp().look());
                        roster.in_use().iter().for_each(|peer| peer.tcp().close_idle(IDLE));
                    }
                    wake.wait(Instant::now() + (silence / 8).max(Duration::from_millis(1)));
                }
            };
            std::thread::Builder::new().name("watch-nodes".into()).spawn(run)
        };
        let thread = thread.map_err(|e| Error::io("can't start the thread that watches nodes", &e))?;
        Ok(Pulse { wake, stopping, thread: Some(thread) })
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.wake.ring();
        if let Some(thread) = self.thread.take() {
            // It waits for nothing but the wake-up.
            let _ = thread.join();
        }
    }
}

fn look(roster: &Roster, silence: Duration, stats: &Arc<Stats>) {
    let view = roster.view();
    for peer in &roster.in_use() {
        // Of a lone node everything is waited for as long as a request may take: there is nobody else to ask.
        let others = match view.members() {
            [] => false,
            [_] => view.made(0).is_none_or(|only| !Arc::ptr_eq(only, peer)),
            _ => true,
        };
        let pool = peer.tcp();
        pool.watch(others.then_some(silence));
        if !others {
            continue;
        }
        if let Some(owing) = pool.owing(silence / 2) {
            let (asked, stats) = (Arc::clone(peer), Arc::clone(stats));
            let ask = move || {
                let answer = asked.tcp().sign_of_life(Instant::now() + silence / 2);
                if asked.tcp().heard_of(owing, &answer)
                    && let Err(error) = answer
                {
                    stats.remotecache.given_up.add(1);
                    tracing::warn!(peer = asked.name(), %error, "a node owes answers and gives no sign of life: others are asked");
                }
            };
            // Without a thread it is not asked, and readers wait for their own deadlines.
            spawn(peer, ask, |peer| {
                peer.tcp().heard_of(owing, &Ok(()));
            });
        } else if pool.to_be_revived() {
            let asked = Arc::clone(peer);
            let ask = move || {
                let answer = asked.tcp().sign_of_life(Instant::now() + silence);
                asked.tcp().revive(&answer);
                if answer.is_ok() {
                    tracing::info!(peer = asked.name(), "a node gives signs of life again");
                }
            };
            spawn(peer, ask, |peer| {
                peer.tcp().revive(&Err(Error::io("no thread", &std::io::ErrorKind::OutOfMemory.into())))
            });
        }
    }
}

/// Runs `ask` on a thread of its own, so that a node that hangs holds up nobody else, or `instead` where there is none.
fn spawn(peer: &Arc<Peer>, ask: impl FnOnce() + Send + 'static, instead: impl FnOnce(&Arc<Peer>)) {
    if let Err(error) = std::thread::Builder::new().name("ask-node".into()).spawn(ask) {
        tracing::warn!(peer = peer.name(), %error, "a node could not be asked for a sign of life");
        instead(peer);
    }
}
