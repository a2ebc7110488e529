//! The work of the path monitor: connects rail paths, adds channels, and detects links that are down, connections that ended, and
//! silence.

use super::{IDLE_ENDED, PathEntry, PathSlot, PathView, RailPool};
use crate::channel_set::{ChannelRemains, next_random};
use crate::path_liveness::LastHeard;
use crate::{Channel, PathPhase};
use spurline_proto::WelcomeAnswer;
use spurline_types::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A path with requests in flight and no bytes received for a while.
pub struct QuietPath {
    /// Index of the path.
    pub path: usize,
    /// The channel for a heartbeat; `None` after a break.
    pub probe: Option<Box<dyn Channel>>,
    last_heard: LastHeard,
    generation: u64,
}

impl QuietPath {
    /// The path and generation, for [`RailPool::probe_skipped`].
    pub fn path_generation(&self) -> (usize, u64) {
        (self.path, self.generation)
    }
}

impl RailPool {
    /// Reports whether the link of each local rail is up.
    pub fn update_links(&self, up: &dyn Fn(usize) -> bool) {
        for (index, path) in self.paths.iter().enumerate() {
            let link = up(path.spec.local);
            let mut inner = self.inner.lock();
            let before = inner.slots[index].state.phase();
            let carried = inner.slots[index].state.link_changed(self.now(), link);
            let after = inner.slots[index].state.phase();
            let remains = carried.then(|| self.clear_path(&mut inner, index, "the local link went down"));
            drop(inner);
            if before != after && !carried {
                tracing::info!(peer = %self.peer, path = %path.spec.name, "the local link {}", match after {
                    PathPhase::Settling => "came back; it carries data when it has settled",
                    _ => "is down",
                });
            }
            if carried {
                self.changed.notify_all();
            }
            drop(remains);
        }
    }

    /// The paths to connect now; each counts as connecting from here on.
    pub fn begin_due(&self) -> Vec<usize> {
        let now = self.now();
        let mut inner = self.inner.lock();
        inner
            .slots
            .iter_mut()
            .enumerate()
            .filter_map(|(path, slot)| slot.state.begin_connect(now).then_some(path))
            .collect()
    }

    /// When the next path is due.
    pub fn next_due(&self) -> Option<Instant> {
        let inner = self.inner.lock();
        let due = inner.slots.iter().filter_map(|slot| slot.state.due_at()).min();
        due.map(|at| self.started + at)
    }

    /// Whether a path is due or connecting; a start waits for the first attempts.
    pub fn is_undecided(&self) -> bool {
        let inner = self.inner.lock();
        inner.slots.iter().any(|slot| matches!(slot.state.phase(), PathPhase::Due | PathPhase::Connecting))
    }

    /// Requests in flight.
    pub fn in_flight(&self) -> usize {
        self.paths.iter().map(|path| path.liveness.in_flight()).sum()
    }

    /// Reports that a path has its first channel, and a channel for heartbeats.
    pub fn path_connected(
        &self,
        path: usize,
        channel: Box<dyn Channel>,
        welcome: Arc<WelcomeAnswer>,
        probe: Option<Box<dyn Channel>>,
    ) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[path];
        let failbacks = slot.state.failbacks();
        if !slot.state.connect_succeeded(self.now()) {
            // The link went down meanwhile.
            drop(inner);
            return;
        }
        let back = slot.state.failbacks() > failbacks;
        slot.probe = probe;
        slot.put_new(channel, welcome);
        self.paths[path].liveness.bytes_arrived(self.now());
        self.up.fetch_add(1, Ordering::AcqRel);
        let PathEntry { spec, counters, share, speed, .. } = &self.paths[path];
        counters.report_state(None, Some(true), |_, _| {});
        drop(inner);
        self.stats.rdma.paths_up.add(1);
        self.stats.rdma.paths_down.sub(1);
        if back {
            counters.failbacks.add(1);
            self.stats.rdma.failbacks.add(1);
            counters.slower.set(0);
            share.store(1000, Ordering::Relaxed);
            speed.lock().path_returned();
        }
        let what = if back { "carries data again" } else { "carries data" };
        tracing::info!(peer = %self.peer, path = %spec.name, kind = %spec.kind, "a path {what}");
        self.changed.notify_all();
    }

    /// Reports that a path could not be connected.
    pub fn connect_failed(&self, path: usize, error: &Error) {
        let mut inner = self.inner.lock();
        let random = next_random(&mut inner.random);
        let state = &mut inner.slots[path].state;
        state.connect_failed(self.now(), error, random);
        let again = state.due_at().map(|at| at.saturating_sub(self.now()));
        drop(inner);
        let PathEntry { spec, counters, .. } = &self.paths[path];
        counters.set_last_failure(error.message());
        let again = again.map_or(0, |d| d.as_millis().div_ceil(1000));
        tracing::warn!(peer = %self.peer, path = %spec.name, "a path can't be used: {error}; tried again in {again} s");
    }

    /// The paths that need a further channel, with the generation for [`RailPool::add_channel`].
    pub fn begin_growing(&self) -> Vec<(usize, u64)> {
        let mut inner = self.inner.lock();
        inner
            .slots
            .iter_mut()
            .enumerate()
            .filter_map(|(path, slot)| {
                let grow = slot.wanted && self.may_grow(slot);
                if grow {
                    slot.wanted = false;
                    slot.growing = true;
                }
                grow.then_some((path, slot.channels.generation()))
            })
            .collect()
    }

    /// Reports the result of making a further channel. A failure does not affect working channels; without any, the path fails,
    /// as requests would otherwise wait until the deadlines.
    pub fn add_channel(&self, path: usize, generation: u64, made: Result<(Box<dyn Channel>, Arc<WelcomeAnswer>)>) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[path];
        if slot.channels.generation() != generation {
            // The path has failed since, so the channel is not used.
            drop(inner);
            return;
        }
        slot.growing = false;
        let mut remains = ChannelRemains::default();
        match made {
            Ok((channel, welcome)) if slot.channels.open_count() < self.max_channels => slot.put_new(channel, welcome),
            Err(error) if slot.channels.open_count() == 0 => {
                let why = format!("its last channel is gone, and no other could be made: {error}");
                remains = self.fail_path(&mut inner, path, &why);
            }
            _ => {}
        }
        drop(inner);
        self.changed.notify_all();
        drop(remains);
    }

    /// Probes idle paths, each at most once per `every`, without sending anything. A path fails when the peer closed all
    /// channels.
    pub fn check_idle(&self, every: Duration) {
        for (index, path) in self.paths.iter().enumerate() {
            let mut inner = self.inner.lock();
            let slot = &mut inner.slots[index];
            let up = slot.state.phase() == PathPhase::Up;
            let silent = if up { path.liveness.silent_for(self.now()) } else { Duration::ZERO };
            path.counters.silent_s.set(silent.as_secs());
            let unused = up && path.liveness.in_flight() == 0;
            if !unused || slot.last_checked.elapsed() < every {
                continue;
            }
            slot.last_checked = Instant::now();
            let ended = slot.channels.take_ended();
            if ended.is_empty() {
                continue;
            }
            slot.wanted = true;
            let probe = slot.probe.take_if(|probe| !probe.looks_alive());
            let mut remains = ChannelRemains::default();
            if slot.channels.open_count() == 0 {
                remains = self.fail_path(&mut inner, index, IDLE_ENDED);
            }
            drop(inner);
            self.changed.notify_all();
            drop((ended, probe, remains));
        }
    }

    /// Closes channels unused for `idle`, except the most recently used channel of each path: the peer has connection slots and
    /// memory for a limited number.
    pub fn close_idle(&self, idle: Duration) {
        let now = Instant::now();
        let mut inner = self.inner.lock();
        let unused: Vec<_> = inner.slots.iter_mut().flat_map(|slot| slot.channels.take_unused(now, idle)).collect();
        drop(inner);
        // Not under the lock, which requests wait for.
        drop(unused);
    }

    /// The paths with requests in flight and no bytes received for `silence`. The caller sends each
    /// a heartbeat and reports the result to [`RailPool::probe_answered`] or [`RailPool::probe_failed`].
    pub fn quiet_paths(&self, silence: Duration) -> Vec<QuietPath> {
        let now = self.now();
        let mut inner = self.inner.lock();
        inner
            .slots
            .iter_mut()
            .enumerate()
            .filter_map(|(path, slot)| {
                let up = slot.state.phase() == PathPhase::Up;
                let last_heard = if up { self.paths[path].liveness.claim_overdue(now, silence)? } else { return None };
                Some(QuietPath { path, probe: slot.probe.take(), last_heard, generation: slot.channels.generation() })
            })
            .collect()
    }

    /// Reports that a heartbeat could not be sent; the path is offered again while quiet.
    pub fn probe_skipped(&self, path: usize, generation: u64) {
        let inner = self.inner.lock();
        if inner.slots[path].channels.generation() == generation {
            self.paths[path].liveness.release_heartbeat();
        }
    }

    /// Reports that a quiet path answered a heartbeat over `probe`.
    pub fn probe_answered(&self, quiet: &QuietPath, probe: Box<dyn Channel>) {
        let mut inner = self.inner.lock();
        let slot = &mut inner.slots[quiet.path];
        let mut outdated = Some(probe);
        if slot.channels.generation() == quiet.generation {
            let liveness = &self.paths[quiet.path].liveness;
            liveness.bytes_arrived(self.now());
            liveness.release_heartbeat();
            slot.probe = outdated.take();
        }
        drop(inner);
        drop(outdated);
    }

    /// Reports that a quiet path did not answer. The path has failed, unless bytes arrived meanwhile.
    pub fn probe_failed(&self, quiet: &QuietPath, why: &str) {
        let mut inner = self.inner.lock();
        let mut remains = ChannelRemains::default();
        if inner.slots[quiet.path].channels.generation() == quiet.generation {
            let liveness = &self.paths[quiet.path].liveness;
            liveness.release_heartbeat();
            if liveness.last_heard() == quiet.last_heard && liveness.in_flight() > 0 {
                remains = self.fail_path(&mut inner, quiet.path, why);
            }
        }
        drop(inner);
        self.changed.notify_all();
        drop(remains);
    }

    /// Reports that the peer is a new process: failed paths are tried at once.
    pub fn peer_restarted(&self) {
        let now = self.now();
        let mut inner = self.inner.lock();
        inner.slots.iter_mut().for_each(|slot| slot.state.peer_restarted(now));
    }

    /// Ends every path, because the peer has other rails now.
    pub fn close(&self, why: &str) {
        for path in 0..self.paths.len() {
            let remains = self.fail_path(&mut self.inner.lock(), path, why);
            drop(remains);
        }
        self.changed.notify_all();
    }

    /// The state of every path, for `status`.
    pub fn view(&self) -> Vec<PathView> {
        let now = self.now();
        let inner = self.inner.lock();
        self.paths
            .iter()
            .zip(&inner.slots)
            .map(|(path, slot)| PathView {
                spec: path.spec.clone(),
                phase: slot.state.phase(),
                for_time: now.saturating_sub(slot.state.since()),
                channels: slot.channels.open_count(),
                in_flight: path.liveness.in_flight(),
                silent: (slot.state.phase() == PathPhase::Up).then(|| path.liveness.silent_for(now)),
                reason: slot.state.reason().map(str::to_owned),
                failovers: slot.state.failovers(),
                failbacks: slot.state.failbacks(),
                speed: path.speed.lock().last(),
                ends: slot.channels.distinct_ends(),
            })
            .collect()
    }
}

impl PathSlot {
    fn put_new(&mut self, channel: Box<dyn Channel>, welcome: Arc<WelcomeAnswer>) {
        let channel = self.channels.admit_channel(channel, welcome);
        // The channel is of the current generation.
        let _ = self.channels.put_idle(channel);
    }
}
