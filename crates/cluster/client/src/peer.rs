//! One node of the group as this process sees it, and how long to go on trying when it does not answer.
//! It does not know what is asked.

use crate::pace::Pace;
use crate::paths::Paths;
use crate::placement::{FIRST, RULE};
use crate::roster::{Roster, View};
use parking_lot::Mutex;
use spurline_proto::Welcome;
use spurline_transport::{CallError, ChannelPool, Lease, PoolState};
use spurline_types::{Error, ErrorKind, Member, Result, Retry, Size};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long a request may take, and how long a node may be away before its absence is an error.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    /// From the request to the end of its answer (`--peer-timeout`).
    pub answer: Duration,
    /// A node that can't be reached is tried again this long, so that its restart is not seen by readers;
    /// after that, requests fail at once until it is back.
    pub absence: Duration,
}

impl Patience {
    /// Ten seconds of absence, or less when answers are waited for less long.
    pub fn new(answer: Duration) -> Self {
        Patience { answer, absence: answer.min(Duration::from_secs(10)) }
    }

    /// The same, and until when an answer is waited for that is asked for now.
    pub(crate) fn asked_now(self) -> (Patience, Instant) {
        (self, Instant::now() + self.answer)
    }
}

/// Who looks at a deadline so long after it stood still itself: stopped, frozen, moved to another host.
const OVERSLEPT: Duration = Duration::from_secs(1);

/// Whether this process, and no node, is why an answer was not taken by `deadline`.
pub(crate) fn overslept(deadline: Instant) -> bool {
    Instant::now() >= deadline + OVERSLEPT
}

/// How an attempt failed.
enum Failure {
    /// The node answered the request with an error.
    Answered(Error),
    /// The node could not be reached, or broke off.
    Broken(Error),
    /// The node is there and will not serve this mount: it has another source, for example. Waiting changes nothing,
    /// but another node may.
    Refused(Error),
}

/// The address where an answer without a payload lands.
pub(crate) const NOWHERE: usize = 0;

/// Where an answer in `dst` lands: its middle tells more than an end of it that may be over a border.
pub(crate) fn middle(dst: &[u8]) -> usize {
    dst.as_ptr() as usize + dst.len() / 2
}

const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// A node for which less time than this was left, or than an eighth of all, is not one that does not answer.
const LEAST: Duration = Duration::from_millis(100);

/// One node.
pub struct Peer {
    pool: ChannelPool,
    /// The ways beside TCP, which come first. They need memory whose size depends on what the node says first.
    paths: OnceLock<Arc<Paths>>,
    /// The node's name in the group.
    name: String,
    /// Since when every attempt to reach it failed.
    away_since: Mutex<Option<Instant>>,
    pace: Pace,
    /// The process of the node whose settings were compared with this mount's; 0 for none.
    compared: AtomicU64,
}

impl Peer {
    /// The node `member` behind `pool`.
    pub fn new(pool: ChannelPool, member: &Member) -> Arc<Peer> {
        let name = member.name.clone();
        Arc::new(Peer {
            pool,
            paths: OnceLock::new(),
            name,
            away_since: Mutex::new(None),
            pace: Pace::default(),
            compared: AtomicU64::new(0),
        })
    }

    /// The registry tells which process the node is now.
    pub(crate) fn is_now(&self, member: &Member) {
        self.pool.expect(member.instance);
    }

    /// Gives it paths beside TCP, once.
    pub fn set_paths(&self, paths: Paths) {
        // A second time nothing happens: requests may be under way on the first ones.
        let _ = self.paths.set(Arc::new(paths));
    }

    /// Its paths beside TCP.
    pub fn paths(&self) -> Option<&Arc<Paths>> {
        self.paths.get()
    }

    /// Asks the node, over TCP, where its rails are.
    pub(crate) fn ask_rails(&self) {
        let Some(paths) = self.paths() else { return };
        match self.pool.checkout(Instant::now() + paths.config().connect_timeout) {
            Ok(lease) => paths.learn(Ok(lease.welcome())),
            Err(error) => paths.learn(Err(error)),
        }
    }

    /// Its connections over TCP.
    pub(crate) fn tcp(&self) -> &ChannelPool {
        &self.pool
    }

    /// The node's name in the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it can be reached, and over how many connections.
    pub fn state(&self) -> (PoolState, usize) {
        (self.pool.state(), self.pool.open())
    }

    /// Whether it carries data now, over whatever path.
    pub fn is_up(&self) -> bool {
        let over_paths = || self.paths().is_some_and(|paths| paths.up() > 0);
        match self.pool.state() {
            PoolState::Up => true,
            // A channel broke, and others are in use.
            PoolState::Unknown => self.pool.open() > 0 || over_paths(),
            PoolState::Down { .. } => over_paths(),
        }
    }

    /// How soon it answers.
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// Says when the node's settings have blocks looked for elsewhere than where this process looks for them: once for
    /// each process of the node, as it has them for its whole life.
    pub(crate) fn compare(&self, welcome: &Welcome, block_size: u64) {
        let process = welcome.instance.max(1);
        if self.compared.load(Ordering::Relaxed) == process || self.compared.swap(process, Ordering::Relaxed) == process
        {
            return;
        }
        let rule = welcome.capabilities.placing_rule();
        if welcome.block_size != block_size {
            tracing::warn!(
                peer = %self.name,
                "its blocks have {}, those of this group {}: what it holds is looked for in other places; restart it with \
                 --block-size {1}, or all nodes with the same and then this mount",
                Size(welcome.block_size),
                Size(block_size)
            );
        } else if let Some(rule) = rule.filter(|rule| *rule != RULE) {
            tracing::warn!(
                peer = %self.name,
                "it is of a release that places blocks by rule {rule}, and this mount by rule {RULE}: run the same release on both"
            );
        }
    }

    /// Asks this node and no other, and not again, for what is to land at `lands`.
    pub(crate) fn ask_once<T>(
        &self,
        lands: usize,
        deadline: Instant,
        ask: &mut dyn FnMut(&mut Lease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        self.attempt(lands, deadline, true, false, ask).map_err(|failure| match failure {
            Failure::Answered(error) | Failure::Broken(error) | Failure::Refused(error) => error,
        })
    }

    fn away_for(&self) -> Duration {
        self.away_since.lock().map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Asks over a path beside TCP, over another one when that breaks, until none is left. `None` when none carries
    /// data and TCP may be asked.
    fn attempt_paths<T>(
        &self,
        paths: &Paths,
        lands: usize,
        deadline: Instant,
        ask: &mut dyn FnMut(&mut Lease<'_>, Instant) -> Result<T, CallError>,
    ) -> Option<Result<T, Failure>> {
        let near = if lands == NOWHERE { 0 } else { paths.dialer().near(lands) };
        while let Some(current) = paths.current() {
            let mut lease = match current.pool.checkout(deadline, near) {
                Ok(Some(lease)) => lease,
                Ok(None) => break,
                Err(error) => return Some(Err(Failure::Broken(error))),
            };
            let path = lease.path();
            match ask(&mut lease, deadline) {
                Ok(value) => return Some(Ok(value)),
                Err(CallError::Answered(error)) => return Some(Err(Failure::Answered(error))),
                // A request that was too slow for its own deadline is too late for any path.
                Err(CallError::Broken(error)) if Instant::now() >= deadline => {
                    return Some(Err(Failure::Broken(error)));
                }
                Err(CallError::Broken(error)) => {
                    tracing::debug!(peer = %self.name, %error, "a request moves to another path");
                    if let Some(path) = path {
                        current.pool.count_retry(path);
                    }
                }
            }
        }
        paths.forced().then(|| Err(Failure::Broken(paths.why_none())))
    }

    /// Asks this node; one that has to be `in_time` is away when it does not answer. A node closes connections that are idle
    /// where it has no place for others: where it did so at this very moment, it is asked `again`, over another one.
    fn attempt<T>(
        &self,
        lands: usize,
        deadline: Instant,
        in_time: bool,
        mut again: bool,
        ask: &mut dyn FnMut(&mut Lease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T, Failure> {
        let beside = self.paths().and_then(|paths| self.attempt_paths(paths, lands, deadline, ask));
        let result = match beside {
            Some(result) => result,
            None => loop {
                let mut lease = match self.pool.checkout(deadline) {
                    Ok(lease) => lease,
                    Err(error) => {
                        break Err(match error.kind() {
                            ErrorKind::PermissionDenied | ErrorKind::Unsupported | ErrorKind::Invalid => {
                                Failure::Refused(error)
                            }
                            // Of no use to this mount now, whether or not others are served.
                            ErrorKind::Throttled => {
                                Failure::Broken(Error::new(ErrorKind::Unavailable, error.message()))
                            }
                            _ => Failure::Broken(error),
                        });
                    }
                };
                match ask(&mut lease, deadline) {
                    Ok(value) => break Ok(value),
                    Err(CallError::Answered(error)) => break Err(Failure::Answered(error)),
                    Err(CallError::Broken(error)) => {
                        let ended = error.kind() == ErrorKind::Unavailable && lease.was_idle();
                        if !ended || !std::mem::take(&mut again) || Instant::now() >= deadline {
                            break Err(Failure::Broken(error));
                        }
                    }
                }
            },
        };
        let mut away = self.away_since.lock();
        match &result {
            Err(Failure::Broken(error)) if error.kind() == ErrorKind::Timeout && !in_time => {}
            Err(Failure::Broken(error)) => {
                if away.is_none() {
                    tracing::warn!(peer = %self.name, %error, "a node does not answer");
                    *away = Some(Instant::now());
                }
            }
            _ => {
                if let Some(since) = away.take() {
                    tracing::info!(peer = %self.name, away_ms = since.elapsed().as_millis() as u64, "a node answers again");
                }
            }
        }
        result
    }
}

/// Whether a node's error is the answer that any node would give. What may be its own trouble, with its credentials, its
/// descriptors or its mount of the under-store, is when a second node has it, too; `unwell` is the first.
fn is_final(kind: ErrorKind, node: u32, unwell: &mut Option<u32>) -> bool {
    match kind {
        ErrorKind::PermissionDenied | ErrorKind::Io(_) | ErrorKind::Unknown(_) => *unwell.get_or_insert(node) != node,
        kind => kind.retry() == Retry::Never,
    }
}

/// A node that is being asked.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub peer: &'a Arc<Peer>,
    /// How many come before it in the order.
    pub place: usize,
}

/// Asks the nodes that `rank` names, as many as it is told at most, in its order, until one answers: another one at once, and all again after a
/// pause, those that are there by then, until the deadline. The answer is to land at `lands`, an address. An error that a node answered is the answer,
/// unless another node may know better. `ranked` is scratch.
pub(crate) fn ask<T>(
    roster: &Roster,
    lands: usize,
    rank: impl Fn(&View, usize, &mut Vec<u32>),
    ranked: &mut Vec<u32>,
    (patience, mut deadline): (Patience, Instant),
    retries: &spurline_types::stats::Metric,
    mut request: impl FnMut(Asked<'_>, &mut Lease<'_>, Instant) -> Result<T, CallError>,
) -> Result<T> {
    // Once: a machine that is always late is an error in the end.
    let mut may_oversleep = true;
    let least = LEAST.min(patience.answer / 8);
    let mut pause = FIRST_PAUSE;
    // When none of the first few answers, more are asked in the next round.
    let mut most = FIRST;
    let mut answered: Option<Error> = None;
    let mut unwell = None;
    // A node that is known to be down is passed, not asked: whoever comes next is asked for the first time.
    let mut sent = false;
    loop {
        let mut broken: Option<Error> = None;
        let mut all_away = true;
        // Whether one that broke off may be back soon.
        let mut soon_back = false;
        let view = roster.view();
        rank(&view, most, ranked);
        let more = ranked.len() >= most && ranked.len() < view.members().len();
        most = most.saturating_mul(FIRST);
        for (place, index) in ranked.iter().enumerate() {
            // Who used up its time, with one node or before any was asked, still asks the next, which may have the answer at
            // hand.
            let in_time = Instant::now() + least < deadline;
            let peer = view.peer(*index);
            let mut send = |lease: &mut Lease<'_>, deadline| {
                retries.add(u64::from(std::mem::replace(&mut sent, true)));
                request(Asked { peer, place }, lease, deadline)
            };
            match peer.attempt(lands, deadline, in_time, true, &mut send) {
                Ok(value) => return Ok(value),
                Err(Failure::Answered(error)) if is_final(error.kind(), *index, &mut unwell) => return Err(error),
                Err(Failure::Answered(error) | Failure::Refused(error)) => {
                    all_away = false;
                    answered = Some(error);
                }
                Err(Failure::Broken(error)) => {
                    let away = peer.away_for() >= patience.absence;
                    all_away &= away;
                    soon_back |= !away;
                    if in_time || broken.is_none() {
                        broken = Some(error);
                    }
                }
            }
        }
        if more && answered.is_none() && Instant::now() < deadline {
            continue;
        }
        let again = match &answered {
            // Every reachable peer has said no; "slow down" is worth asking again, and one that is only being restarted.
            Some(error) => error.kind().retry() == Retry::SamePath || soon_back,
            None => !all_away,
        };
        if broken.is_some() && overslept(deadline) && std::mem::take(&mut may_oversleep) {
            deadline = Instant::now() + patience.answer;
            continue;
        }
        if !again || Instant::now() + pause >= deadline {
            return Err(answered.or(broken).unwrap_or_else(|| {
                Error::new(
                    ErrorKind::Unavailable,
                    "the cache group has no node: name one with --registry static:host:port",
                )
            }));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}
