//! Owns the state of one node as seen by this process, and the retry loop over ranked nodes. Does not know which of a
//! node's paths a request takes (`peer_paths`), nor the content of requests.

use crate::latency::LatencyTracker;
use crate::members::{GroupMembers, MembersSnapshot};
use crate::node_rails::NodeRails;
pub(crate) use crate::peer_paths::PeerFailure;
use crate::peer_paths::{DataPath, PathCall, PeerPaths, SplitRails};
use crate::placement::{FIRST_HOLDERS, PLACEMENT_RULE};
use crate::read_plan::CallPlan;
use parking_lot::Mutex;
use spurline_proto::WelcomeAnswer;
use spurline_sys::Backoff;
use spurline_transport::{CallError, ChannelLease, DemandPool, PathEnds, PeerReach};
use spurline_types::{Error, ErrorKind, Member, Result, RetryAdvice, Size};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Timeout of a request, and of a node's absence before it becomes an error.
#[derive(Debug, Clone, Copy)]
pub struct RequestPatience {
    /// From sending the request to the end of its answer (`--peer-timeout`).
    pub answer: Duration,
    /// How long to retry an unreachable node, to hide its restart from readers. Later requests fail at once until it
    /// is back.
    pub absence: Duration,
}

impl RequestPatience {
    /// Ten seconds of absence, or the answer timeout if that is shorter.
    pub fn new(answer: Duration) -> Self {
        RequestPatience { answer, absence: answer.min(Duration::from_secs(10)) }
    }
}

/// A deadline noticed this late means that our own process was suspended (stopped, frozen or migrated).
const SUSPENDED_AFTER: Duration = Duration::from_secs(1);

/// Whether the answer missed `deadline` because this process was suspended.
pub(crate) fn was_suspended(deadline: Instant) -> bool {
    Instant::now() >= deadline + SUSPENDED_AFTER
}

/// Address that stands for `dst`: its middle, because an end may lie on another NUMA node's page.
pub(crate) fn landing_address(dst: &[u8]) -> usize {
    dst.as_ptr() as usize + dst.len() / 2
}

/// Pauses between rounds over all nodes, of reads and of changes.
pub(crate) const ROUND_PAUSES: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500));
/// A timeout shorter than this, or than an eighth of the whole, does not count as an unresponsive node.
const LEAST_TIME: Duration = Duration::from_millis(100);

/// One node of the group.
pub struct GroupPeer {
    paths: PeerPaths,
    /// The node's name in the group.
    name: String,
    /// Start of the current sequence of failed attempts.
    away_since: Mutex<Option<Instant>>,
    latency: LatencyTracker,
    /// The process instance last compared with our settings; 0 for none.
    compared: AtomicU64,
}

impl GroupPeer {
    /// The node `member`, reached over `tcp`.
    pub fn new(tcp: DemandPool, member: &Member) -> Arc<GroupPeer> {
        let name = member.name.clone();
        Arc::new(GroupPeer {
            paths: PeerPaths::new(tcp),
            name,
            away_since: Mutex::new(None),
            latency: LatencyTracker::default(),
            compared: AtomicU64::new(0),
        })
    }

    /// Takes the node's process instance from the registry.
    pub(crate) fn update_member(&self, member: &Member) {
        self.paths.tcp().expect_process(member.instance);
    }

    /// Adds paths over rails. Only the first call has an effect.
    pub fn set_rails(&self, rails: NodeRails) {
        self.paths.set_rails(rails);
    }

    /// Its paths over rails.
    pub fn rails(&self) -> Option<&Arc<NodeRails>> {
        self.paths.rails()
    }

    /// Fetches the node's rails over TCP.
    pub(crate) fn fetch_rails(&self) {
        let Some(rails) = self.rails() else { return };
        match self.tcp_pool().checkout(Instant::now() + rails.config().connect_timeout) {
            Ok(lease) => rails.learn_rails(Ok(lease.welcome())),
            Err(error) => rails.learn_rails(Err(error)),
        }
    }

    /// The rails for a read in parts into `lands`; `None` while fewer than two carry data.
    pub(crate) fn several_rails(&self, lands: Option<usize>) -> Option<SplitRails> {
        self.paths.several_rails(lands)
    }

    /// Its TCP connections.
    pub(crate) fn tcp_pool(&self) -> &DemandPool {
        self.paths.tcp()
    }

    /// The node's name in the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it can be reached over TCP, as far as is known.
    pub fn tcp_reach(&self) -> PeerReach {
        self.tcp_pool().reach()
    }

    /// The number of TCP connections.
    pub fn tcp_connections(&self) -> usize {
        self.tcp_pool().open_count()
    }

    /// The addresses of its TCP connections, each pair once.
    pub fn tcp_ends(&self) -> Vec<PathEnds> {
        self.tcp_pool().connection_ends()
    }

    /// The kind of path that the next request takes.
    pub fn data_path(&self) -> DataPath {
        self.paths.data_path()
    }

    /// Whether any path to it is connected, as far as is known.
    pub fn is_up(&self) -> bool {
        self.paths.is_up()
    }

    /// Whether no path to it is connected and the last attempt over TCP failed.
    pub(crate) fn is_down(&self) -> bool {
        self.paths.is_down()
    }

    /// Whether a connection to it stands and none broke since the last answer.
    pub fn is_connected(&self) -> bool {
        self.paths.is_connected()
    }

    /// Its latency tracker.
    pub fn latency(&self) -> &LatencyTracker {
        &self.latency
    }

    /// Warns when the node places blocks by other settings than this process. Once per process instance, because the
    /// settings are fixed for its lifetime.
    pub(crate) fn compare_settings(&self, welcome: &WelcomeAnswer, block_size: u64) {
        let process = welcome.instance.max(1);
        if self.compared.load(Ordering::Relaxed) == process || self.compared.swap(process, Ordering::Relaxed) == process
        {
            return;
        }
        let rule = Some(welcome.placement_rule).filter(|rule| *rule != 0);
        if welcome.block_size != block_size {
            tracing::warn!(
                peer = %self.name,
                "its block size is {}, that of this group {}: its blocks are looked up on other nodes; restart it with \
                 --block-size {1}, or restart all nodes with the same size and then this mount",
                Size(welcome.block_size),
                Size(block_size)
            );
        } else if let Some(rule) = rule.filter(|rule| *rule != PLACEMENT_RULE) {
            tracing::warn!(
                peer = %self.name,
                "its release places blocks by rule {rule}, this mount by rule {PLACEMENT_RULE}: run the same release on both"
            );
        }
    }

    /// Calls this node once, without retries.
    pub(crate) fn call_once<T>(
        &self,
        plan: &CallPlan,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        self.attempt_once(plan.lands, plan.deadline, ask)
    }

    /// Calls this node once, without retries. `lands` is the address of the bytes.
    pub(crate) fn attempt_once<T>(
        &self,
        lands: Option<usize>,
        deadline: Instant,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T> {
        let call = PathCall { lands, deadline, may_repeat: false, process: None };
        let terms = AttemptTerms { call, late_is_away: true };
        self.attempt_call(terms, ask).map_err(|failure| match failure {
            PeerFailure::Answered(error) | PeerFailure::Broken(error) | PeerFailure::Refused(error) => error,
        })
    }

    /// Calls this node, for a request that may change something. `near` is the address of its bytes; with `process`, no other
    /// process of the node gets the request.
    pub(crate) fn attempt_write<T>(
        &self,
        near: usize,
        process: Option<u64>,
        deadline: Instant,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T, PeerFailure> {
        let call = PathCall { lands: Some(near), deadline, may_repeat: true, process };
        self.attempt_call(AttemptTerms { call, late_is_away: true }, ask)
    }

    fn away_for(&self) -> Duration {
        self.away().unwrap_or_default()
    }

    /// How long it has been away, if it is.
    pub(crate) fn away(&self) -> Option<Duration> {
        self.away_since.lock().map(|since| since.elapsed())
    }

    /// How long the node had been away at the last attempt to connect; none for a node that answers.
    pub(crate) fn away_at_last_attempt(&self) -> Option<Duration> {
        let since_attempt = self.tcp_pool().since_failure().unwrap_or_default();
        self.away().map(|away| away.saturating_sub(since_attempt))
    }

    /// One attempt on this node.
    fn attempt_call<T>(
        &self,
        terms: AttemptTerms,
        ask: &mut dyn FnMut(&mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
    ) -> Result<T, PeerFailure> {
        self.note_result(self.paths.call(terms.call, ask), terms.late_is_away)
    }

    /// Records whether the node answered.
    fn note_result<T>(&self, result: Result<T, PeerFailure>, late_is_away: bool) -> Result<T, PeerFailure> {
        let mut away = self.away_since.lock();
        match &result {
            Err(PeerFailure::Broken(error)) if error.kind() == ErrorKind::Timeout && !late_is_away => {}
            Err(PeerFailure::Broken(error)) => {
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

/// Whether any node would answer with this error. Errors of credentials, descriptors or origin mounts may be local to
/// one node: they are final when a second node returns them. `unwell` holds the first.
fn is_final(kind: ErrorKind, node: u32, unwell: &mut Option<u32>) -> bool {
    match kind {
        ErrorKind::PermissionDenied | ErrorKind::Io(_) | ErrorKind::Unknown(_) => *unwell.get_or_insert(node) != node,
        kind => kind.retry_advice() == RetryAdvice::Never,
    }
}

/// The terms of one attempt on one node.
#[derive(Clone, Copy)]
struct AttemptTerms {
    call: PathCall,
    /// A missing answer marks the node as away.
    late_is_away: bool,
}

/// One attempt on one node.
#[derive(Clone, Copy)]
pub(crate) struct PeerAttempt<'a> {
    pub peer: &'a Arc<GroupPeer>,
    /// Its index in the ranking.
    pub rank: usize,
}

/// Calls the nodes ranked by `rank` until one answers: the next one at once, and after a round all reachable nodes
/// again with a pause, until the deadline. A node's error is final unless another node may succeed. `ranked` is scratch
/// memory.
pub(crate) fn call_ranked<T>(
    members: &GroupMembers,
    plan: &CallPlan,
    rank: impl Fn(&MembersSnapshot, usize, &mut Vec<u32>),
    ranked: &mut Vec<u32>,
    retries: &spurline_types::stats::Metric,
    mut request: impl FnMut(PeerAttempt<'_>, &mut ChannelLease<'_>, Instant) -> Result<T, CallError>,
) -> Result<T> {
    let CallPlan { lands, patience, mut deadline, .. } = *plan;
    // Once only: a host that is always late must get an error in the end.
    let mut may_oversleep = true;
    let least = LEAST_TIME.min(patience.answer / 8);
    let mut pauses = ROUND_PAUSES;
    // If all of the first few fail, the next round tries more.
    let mut most = FIRST_HOLDERS;
    let mut answered: Option<Error> = None;
    let mut unwell = None;
    // Nodes known to be down are skipped without counting as an attempt.
    let mut sent = false;
    loop {
        let mut broken: Option<Error> = None;
        let mut all_away = true;
        // Whether an unreachable node may be back soon.
        let mut soon_back = false;
        let view = members.snapshot();
        rank(&view, most, ranked);
        let more = ranked.len() >= most && ranked.len() < view.members().len();
        most = most.saturating_mul(FIRST_HOLDERS);
        for (place, index) in ranked.iter().enumerate() {
            // After its deadline the request still tries one more node, which may have the answer ready.
            let late_is_away = Instant::now() + least < deadline;
            let peer = view.peer(*index);
            let call = PathCall { lands, deadline, may_repeat: true, process: None };
            let terms = AttemptTerms { call, late_is_away };
            let mut send = |lease: &mut ChannelLease<'_>, deadline| {
                retries.add(u64::from(std::mem::replace(&mut sent, true)));
                request(PeerAttempt { peer, rank: place }, lease, deadline)
            };
            match peer.attempt_call(terms, &mut send) {
                Ok(value) => return Ok(value),
                Err(PeerFailure::Answered(error)) if is_final(error.kind(), *index, &mut unwell) => return Err(error),
                Err(PeerFailure::Answered(error) | PeerFailure::Refused(error)) => {
                    all_away = false;
                    answered = Some(error);
                }
                Err(PeerFailure::Broken(error)) => {
                    let away = peer.away_for() >= patience.absence;
                    all_away &= away;
                    soon_back |= !away;
                    if late_is_away || broken.is_none() {
                        broken = Some(error);
                    }
                }
            }
        }
        if more && answered.is_none() && Instant::now() < deadline {
            continue;
        }
        let again = match &answered {
            // Every reachable node failed. Retry after throttling or during a restart.
            Some(error) => error.kind().retry_advice() == RetryAdvice::SamePath || soon_back,
            None => !all_away,
        };
        if broken.is_some() && was_suspended(deadline) && std::mem::take(&mut may_oversleep) {
            deadline = Instant::now() + patience.answer;
            continue;
        }
        if !again || Instant::now() + pauses.upcoming() >= deadline {
            return Err(answered.or(broken).unwrap_or_else(|| {
                Error::new(
                    ErrorKind::Unavailable,
                    "the cache group has no node: name one with --registry static:host:port",
                )
            }));
        }
        std::thread::sleep(pauses.next_pause());
    }
}
