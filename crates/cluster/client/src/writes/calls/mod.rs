//! Calls of a writable mount: each request is sent until a node answers it, or until its deadline, and each change is executed
//! once. The room owns the session, the numbers of changes, and the proofs that processes have one directory. It knows no open
//! files, no locks and no written bytes.
//!
//! 1. **Plan.** [`WriteCallPlan`] says where a request goes, whether it is a query or a numbered change, and until when: the
//!    deadline was fixed when the program's call began, and all requests that serve this call have the same one.
//! 2. **Candidates.** A path has its holders, in the order of their rank: the first of them that can be reached is the home of
//!    the path. An open file has the one process that opened it.
//! 3. **Proof.** A process that was not seen before first proves that it has the directory of the others ([`proof`]).
//! 4. **Attempt.** The request is sent. A process that knows the number of a change repeats its answer. Another process gets the
//!    request marked, and first compares the source with the change.
//! 5. **Failure.** This table decides ([`judge_failure`]):
//!
//!    | failure | request for a path | request for a process |
//!    |---|---|---|
//!    | the connection broke, the node can be reached | the same node once more, then the next | the same process once more, then lost |
//!    | the node can't be reached | next node | lost |
//!    | another process has the node's place | final | lost |
//!    | the node is busy | next node | the same process after a pause |
//!    | the node's release is too old, or the node takes no changes | next node; final if there is no other | final |
//!    | the node refuses this mount, or fails | next node | final |
//!    | an answer that any node would give | final | final |
//! 6. **Round.** After all candidates the request pauses and begins again, until its deadline, or until no node could be reached
//!    for the time of a restart.
//!
//! A node that is alive and late keeps its request until the deadline: the node may still execute it.

mod close_queue;
mod kept;
mod numbers;
mod proof;

use crate::members::MembersSnapshot;
use crate::peer::{GroupPeer, PeerFailure, ROUND_PAUSES, RequestPatience, landing_address};
use crate::placement::{FIRST_HOLDERS, WantedBlock};
use crate::remote::{GroupClient, SCRATCH};
use close_queue::CloseQueue;
pub(super) use close_queue::FailedClose;
pub(super) use kept::node_hash;
pub(super) use numbers::ChangeNumber;
use numbers::ChangeNumbers;
use parking_lot::Mutex;
use proof::ProvenProcesses;
use spurline_proto::{
    AnswerBody as _, ChangeId, NodeRequest, OpenFlags, WireCaller, WriteAnswer, WriteCall, WriteRequest,
};
use spurline_sys::random;
use spurline_transport::CallError;
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, ObjectId, Result, RetryAdvice};
use spurline_volume::kept_client::{ClientStart, KeptClient};
use spurline_volume::writes::{Caller, FileIdentity, NodeAttr};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Attempts on one node before the next.
const NODE_ATTEMPTS: usize = 2;
/// Attempts of a process without an answer are fewer.
const PROCESS_ATTEMPTS_BITS: u32 = 32;
/// A program's call waits for this many answers: of a process that does not answer, and of the next one.
const CALL_ANSWERS: u32 = 2;

thread_local! {
    /// Encoded groups of a caller, reused between requests.
    static CALLER_GROUPS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The process of a node that answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HomeProcess {
    /// The node's name in the group.
    pub node: Arc<str>,
    /// The random number of its process.
    pub instance: u64,
}

pub(crate) struct NodeAnswer {
    pub answer: WriteAnswer,
    /// Bytes of the payload that landed.
    pub payload_len: usize,
    pub home: HomeProcess,
}

/// Where a request goes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum CallTarget<'a> {
    /// The home of this path, or a node after it.
    Path(&'a [u8]),
    /// This process only: it has the file open.
    Process(&'a HomeProcess),
    /// This process only, before it is proven to have the directory of the others.
    Unproven(&'a HomeProcess),
    /// Any process of the node with this name.
    Node(&'a str),
}

impl<'a> CallTarget<'a> {
    /// The only process that may get the request.
    fn process(self) -> Option<&'a HomeProcess> {
        match self {
            CallTarget::Path(_) | CallTarget::Node(_) => None,
            CallTarget::Process(home) | CallTarget::Unproven(home) => Some(home),
        }
    }

    /// The only node that may get the request.
    fn node(self) -> Option<&'a str> {
        match self {
            CallTarget::Path(_) => None,
            CallTarget::Process(home) | CallTarget::Unproven(home) => Some(&home.node),
            CallTarget::Node(name) => Some(name),
        }
    }
}

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CallKind {
    /// It may be executed several times.
    Query,
    /// It is executed once, under this number of the session.
    Change { number: u64 },
    /// As [`CallKind::Query`]: it sets a lock again that another process has set.
    SetAgain,
}

impl CallKind {
    fn is_change(self) -> bool {
        matches!(self, CallKind::Change { .. })
    }

    /// The number on the wire: 0 for a request that changes nothing.
    fn number(self) -> u64 {
        match self {
            CallKind::Change { number } => number,
            CallKind::Query | CallKind::SetAgain => 0,
        }
    }
}

/// When a program's call ends: fixed when it begins, and handed down to all requests that serve it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallDeadline {
    end: Instant,
    patience: RequestPatience,
}

impl CallDeadline {
    fn begin(patience: RequestPatience) -> Self {
        CallDeadline { end: Instant::now() + CALL_ANSWERS * patience.answer, patience }
    }

    /// When a request ends that is sent at `now`: a process that does not answer leaves time for the next one.
    fn of_request(self, now: Instant) -> Instant {
        self.end.min(now + self.patience.answer)
    }

    /// Whether no time is left at `now`.
    pub fn is_over(self, now: Instant) -> bool {
        now >= self.end
    }
}

/// Who calls, what the mount knows, and the bytes of the request.
#[derive(Clone, Copy)]
pub(crate) struct RequestContext<'a> {
    pub caller: &'a Caller,
    /// The objects that the names of a change led to.
    pub known: [Option<FileIdentity>; 2],
    pub payload: &'a [u8],
}

impl<'a> RequestContext<'a> {
    pub fn of(caller: &'a Caller) -> Self {
        RequestContext { caller, known: [None; 2], payload: &[] }
    }
}

/// One request, until a node answers it.
pub(crate) struct WriteCallPlan<'a> {
    pub target: CallTarget<'a>,
    pub kind: CallKind,
    pub call: &'a WriteCall<'a>,
    pub context: RequestContext<'a>,
    /// Where bytes of the answer go.
    pub landing: &'a mut [u8],
    /// Where the request may have been executed earlier.
    pub before: MaybeExecuted,
    pub deadline: CallDeadline,
}

impl<'a> WriteCallPlan<'a> {
    /// A query without bytes.
    pub fn query(
        target: CallTarget<'a>,
        call: &'a WriteCall<'a>,
        caller: &'a Caller,
        deadline: CallDeadline,
    ) -> WriteCallPlan<'a> {
        let context = RequestContext::of(caller);
        let before = MaybeExecuted::Nowhere;
        WriteCallPlan { target, kind: CallKind::Query, call, context, landing: &mut [], before, deadline }
    }

    /// A change; which processes may have got it is known from its number.
    pub fn change(
        target: CallTarget<'a>,
        number: &ChangeNumber<'_>,
        call: &'a WriteCall<'a>,
        context: RequestContext<'a>,
        deadline: CallDeadline,
    ) -> WriteCallPlan<'a> {
        let kind = CallKind::Change { number: number.get() };
        let before = number.before();
        WriteCallPlan { target, kind, call, context, landing: &mut [], before, deadline }
    }
}

/// Which processes may have executed a request. A process knows only its own answers: any other one compares the source with the
/// change first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum MaybeExecuted {
    #[default]
    Nowhere,
    /// By this process, which knows the number of the change.
    At(u64),
    /// By several processes, or under a number that was answered: each one compares.
    Anywhere,
}

impl MaybeExecuted {
    /// This process gets the request.
    pub fn note_sent(&mut self, instance: u64) {
        *self = match *self {
            MaybeExecuted::Nowhere => MaybeExecuted::At(instance),
            _ if self.is_compared_by(instance) => MaybeExecuted::Anywhere,
            same => same,
        };
    }

    /// Whether this process compares the source with the change first.
    pub fn is_compared_by(self, instance: u64) -> bool {
        match self {
            MaybeExecuted::Nowhere => false,
            MaybeExecuted::At(other) => other != instance,
            MaybeExecuted::Anywhere => true,
        }
    }
}

/// Why a request to one process has no answer.
#[derive(Debug)]
pub(crate) enum CallEnd {
    /// The error is final.
    Failed(Error),
    /// The process is gone, or can't be reached; the file has to be opened elsewhere. `sent` if it may have executed
    /// the request.
    Lost { error: Error, sent: bool },
}

impl From<CallEnd> for Error {
    fn from(end: CallEnd) -> Error {
        match end {
            CallEnd::Failed(error) | CallEnd::Lost { error, .. } => error,
        }
    }
}

/// The calls of one mount.
pub(crate) struct WriteCalls {
    client: Arc<GroupClient>,
    /// This mount's session, drawn at random.
    session: u64,
    numbers: ChangeNumbers,
    /// Number of attempts that got no answer and may be executed late. Nodes execute none of them after a request with a
    /// higher number.
    attempts: AtomicU64,
    proofs: ProvenProcesses,
    /// The caller of all changes, in place of the calling processes.
    squash: Option<Caller>,
    /// Processes that executed changes which no sync of all has covered.
    touched: Mutex<Vec<HomeProcess>>,
    closes: CloseQueue,
    /// What outlives this process.
    kept: Option<Arc<dyn KeptClient>>,
    /// An earlier process was the same client.
    goes_on: bool,
    /// The changes that earlier processes may have sent without an answer.
    repeatable: Vec<u64>,
    /// All calls are about locks and names of paths, for which processes need no directory.
    about_paths: bool,
}

impl WriteCalls {
    /// With `kept`, this process goes on as the client of processes before.
    pub fn new(client: Arc<GroupClient>, squash: Option<Caller>, kept: Option<Arc<dyn KeptClient>>) -> WriteCalls {
        let drawn = random();
        let start = match &kept {
            Some(kept) => kept.begin(drawn),
            None => ClientStart { session: drawn, ..ClientStart::default() },
        };
        WriteCalls {
            client,
            session: start.session,
            numbers: ChangeNumbers::new(kept.clone()),
            repeatable: start.pending,
            // Nodes wait for the attempts of processes before, and execute none of them later.
            attempts: AtomicU64::new(start.processes << PROCESS_ATTEMPTS_BITS),
            kept,
            goes_on: start.processes > 0,
            proofs: ProvenProcesses::default(),
            about_paths: false,
            squash,
            touched: Mutex::default(),
            closes: CloseQueue::default(),
        }
    }

    /// Calls about the locks and names of paths only.
    pub fn about_paths(client: Arc<GroupClient>, kept: Option<Arc<dyn KeptClient>>) -> WriteCalls {
        WriteCalls { about_paths: true, ..WriteCalls::new(client, None, kept) }
    }

    /// The deadline of a program's call that begins now.
    pub fn begin(&self) -> CallDeadline {
        CallDeadline::begin(self.client.patience())
    }

    /// A number for a file that is to be opened.
    pub fn new_file_number(&self) -> u64 {
        self.draw_number().get()
    }

    /// The number of a change that no program requests. The change is answered or abandoned when the result is dropped.
    pub fn draw_number(&self) -> ChangeNumber<'_> {
        self.numbers.draw_number()
    }

    /// The number of a change, until [`WriteCalls::end_number`].
    pub fn draw_lasting_number(&self) -> u64 {
        self.numbers.draw_raw()
    }

    /// A change is answered, or abandoned.
    pub fn end_number(&self, number: u64) {
        self.numbers.end_number(number);
    }

    /// This process has changes that the next sync of all covers.
    pub fn note_touched(&self, home: &HomeProcess) {
        let mut touched = self.touched.lock();
        if touched.iter().all(|known| known.instance != home.instance) {
            touched.push(home.clone());
        }
    }

    /// The processes with changes that no sync of all has covered; the caller covers them.
    pub fn take_touched(&self) -> Vec<HomeProcess> {
        std::mem::take(&mut *self.touched.lock())
    }

    /// What a request says about earlier ones: below which number all changes are answered, or how many attempts got no answer.
    fn answered_by(&self, kind: CallKind) -> u64 {
        match kind {
            CallKind::Change { .. } => self.numbers.answered_below(),
            CallKind::Query | CallKind::SetAgain => self.attempts.load(Ordering::Acquire),
        }
    }

    /// Sends a query without bytes.
    ///
    /// # Errors
    /// As [`WriteCalls::run`].
    pub fn query(
        &self,
        target: CallTarget<'_>,
        call: &WriteCall<'_>,
        caller: &Caller,
        deadline: CallDeadline,
    ) -> std::result::Result<NodeAnswer, CallEnd> {
        self.run(WriteCallPlan::query(target, call, caller, deadline))
    }

    /// Sends a change under a new number.
    ///
    /// # Errors
    /// As [`WriteCalls::run`].
    pub fn change(
        &self,
        target: CallTarget<'_>,
        call: &WriteCall<'_>,
        context: RequestContext<'_>,
        deadline: CallDeadline,
    ) -> std::result::Result<NodeAnswer, CallEnd> {
        self.run(WriteCallPlan::change(target, &self.draw_number(), call, context, deadline))
    }

    /// Makes a change about a path, once. The answer is no error of the source.
    ///
    /// # Errors
    /// Those of the nodes and of the source.
    pub fn change_at(
        &self,
        number: &ChangeNumber<'_>,
        path: &[u8],
        call: &WriteCall<'_>,
        context: RequestContext<'_>,
        deadline: CallDeadline,
    ) -> Result<NodeAnswer> {
        let sent = self.run(WriteCallPlan::change(CallTarget::Path(path), number, call, context, deadline))?;
        let changes = match call {
            WriteCall::Open { flags, .. } | WriteCall::OpenAgain { flags, .. } => {
                flags.has_any(OpenFlags::ACCESS | OpenFlags::TRUNCATE)
            }
            WriteCall::OpenDirectory { .. } | WriteCall::OpenPath { .. } => false,
            _ => true,
        };
        if changes {
            self.note_touched(&sent.home);
        }
        Ok(NodeAnswer { answer: settle_answer(sent.answer)?, ..sent })
    }

    /// Sends a request until a node answers it, or until its deadline.
    ///
    /// # Errors
    /// As [`CallEnd`]; a path's request is never lost.
    pub fn run(&self, plan: WriteCallPlan<'_>) -> std::result::Result<NodeAnswer, CallEnd> {
        // Taken out of their cells, so that a nested call finds empty ones and does not panic.
        let mut groups = CALLER_GROUPS.with(RefCell::take);
        let (mut body, mut ranked) = SCRATCH.with(RefCell::take);
        let squashed = self.squash.as_ref().map(|to| Caller { umask: plan.context.caller.umask, ..to.clone() });
        let caller = WireCaller::new(squashed.as_ref().unwrap_or(plan.context.caller), &mut groups);
        let mut pending = PendingCall {
            calls: self,
            caller,
            marked: self.client.members().snapshot().members().len() > 1,
            first_before: plan.before,
            plan,
            unanswered: false,
            passed: Vec::new(),
            body: &mut body,
        };
        let result = pending.run(&mut ranked);
        pending.count_unanswered();
        pending.close_passed(result.as_ref().ok().map(|answer| &answer.home));
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        CALLER_GROUPS.with(|cell| cell.replace(groups));
        result
    }

    /// How long a node has been away that would be the home of a path before the one of `home`.
    pub fn better_node_away(&self, path: &[u8], home: &HomeProcess) -> Option<Duration> {
        let wanted = self.wanted_block(path);
        let view = self.client.members().snapshot();
        let mut ranked = Vec::new();
        view.find_holders(wanted, FIRST_HOLDERS, &mut ranked);
        let better = ranked.iter().map(|index| view.peer(*index)).take_while(|peer| *peer.name() != *home.node);
        better.filter_map(|peer| peer.away()).min()
    }

    /// The nodes except the one of `home`, and except the one of a `lost` process if that is known to be away.
    pub fn other_nodes(&self, home: &HomeProcess, lost: &HomeProcess) -> Vec<Arc<str>> {
        let view = self.client.members().snapshot();
        let peers = (0..view.members().len()).map(|index| view.peer(index as u32));
        let others = peers.filter(|peer| *peer.name() != *home.node);
        others.filter(|peer| peer.is_up() || *peer.name() != *lost.node).map(|peer| peer.name().into()).collect()
    }

    /// The names of all nodes.
    pub fn all_nodes(&self) -> Vec<Arc<str>> {
        let view = self.client.members().snapshot();
        view.members().iter().map(|member| Arc::from(&*member.name)).collect()
    }

    /// How long a node had been away at the last attempt to connect; none for a node that answers.
    pub fn node_away(&self, node: &str) -> Option<Duration> {
        let view = self.client.members().snapshot();
        let mut peers = (0..view.members().len()).map(|index| view.peer(index as u32));
        peers.find(|peer| *peer.name() == *node).and_then(|peer| peer.away_at_last_attempt())
    }

    fn wanted_block(&self, path: &[u8]) -> WantedBlock {
        WantedBlock::of_block(ObjectId::from_text(self.client.source(), path, ""), 0, 1)
    }
}

/// What follows after a failed attempt.
#[derive(Debug, PartialEq, Eq)]
enum FailureVerdict {
    /// The same node gets the request once more.
    SameNode,
    NextNode,
    /// The next node gets the request; if there is none, this failure is final.
    NextOrFinal,
    /// The same process gets the request after a pause.
    Pause,
    /// The process is lost.
    Lost,
    Final,
}

/// The table of failures. `reached`: the node can be reached. `by_path`: other nodes may serve the request as well.
fn judge_failure(failure: &PeerFailure, reached: bool, by_path: bool) -> FailureVerdict {
    let error = match failure {
        PeerFailure::Broken(_) if reached => return FailureVerdict::SameNode,
        PeerFailure::Broken(_) if by_path => return FailureVerdict::NextNode,
        PeerFailure::Broken(_) => return FailureVerdict::Lost,
        PeerFailure::Refused(_) if by_path => return FailureVerdict::NextNode,
        PeerFailure::Refused(_) => return FailureVerdict::Final,
        PeerFailure::Answered(error) => error,
    };
    let advice = error.kind().retry_advice();
    match error.kind() {
        ErrorKind::Unsupported | ErrorKind::ReadOnly if by_path => FailureVerdict::NextOrFinal,
        ErrorKind::Stale if !by_path => FailureVerdict::Lost,
        _ if advice == RetryAdvice::Never => FailureVerdict::Final,
        _ if by_path => FailureVerdict::NextNode,
        _ if advice == RetryAdvice::SamePath => FailureVerdict::Pause,
        _ => FailureVerdict::Final,
    }
}

fn failure_error(failure: PeerFailure) -> Error {
    match failure {
        PeerFailure::Answered(error) | PeerFailure::Broken(error) | PeerFailure::Refused(error) => error,
    }
}

/// Why a round over the candidates has no answer.
enum RoundFailure {
    Ended(CallEnd),
    /// The next round may have a node.
    Again(Error),
}

struct PendingCall<'a> {
    calls: &'a WriteCalls,
    plan: WriteCallPlan<'a>,
    caller: WireCaller<'a>,
    /// Several nodes serve the source.
    marked: bool,
    first_before: MaybeExecuted,
    /// The last attempt was sent and not answered.
    unanswered: bool,
    /// The processes that got it and gave no answer.
    passed: Vec<HomeProcess>,
    body: &'a mut Vec<u8>,
}

impl PendingCall<'_> {
    /// The attempt before may be executed late, also by the same process.
    fn count_unanswered(&mut self) {
        if std::mem::take(&mut self.unanswered) {
            self.calls.attempts.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A process that got the request to open a file, and gave no answer, may have it open.
    fn close_passed(&self, home: Option<&HomeProcess>) {
        let file = match *self.plan.call {
            WriteCall::Open { file, .. }
            | WriteCall::OpenAgain { file, .. }
            | WriteCall::Create { file, .. }
            | WriteCall::CreateUnnamed { file, .. }
            | WriteCall::OpenDirectory { file, .. }
            | WriteCall::OpenPath { file, .. }
            | WriteCall::Reopen { file, .. } => file,
            _ => return,
        };
        let passed = self.passed.iter().filter(|passed| Some(*passed) != home);
        passed.for_each(|passed| self.calls.close_later(passed, &[file]));
    }

    /// The loop of all retries.
    fn run(&mut self, ranked: &mut Vec<u32>) -> std::result::Result<NodeAnswer, CallEnd> {
        let started = Instant::now();
        let until = self.plan.deadline.of_request(started);
        let mut pauses = ROUND_PAUSES;
        loop {
            let error = match self.run_round(ranked, until) {
                Ok(answer) => return Ok(answer),
                Err(RoundFailure::Ended(end)) => return Err(end),
                Err(RoundFailure::Again(error)) => error,
            };
            // A restart of all nodes is hidden for as long as for reads.
            let absence = self.plan.deadline.patience.absence;
            let unreachable = error.kind() == ErrorKind::Unavailable && started.elapsed() >= absence;
            if unreachable || Instant::now() + pauses.upcoming() >= until {
                return Err(CallEnd::Failed(error));
            }
            std::thread::sleep(pauses.next_pause());
        }
    }

    fn lost(&self, error: Error) -> RoundFailure {
        RoundFailure::Ended(CallEnd::Lost { error, sent: self.plan.before != self.first_before })
    }

    /// The nodes that may answer, the best first.
    fn find_candidates(&self, view: &MembersSnapshot, ranked: &mut Vec<u32>) -> std::result::Result<(), RoundFailure> {
        if let CallTarget::Path(path) = self.plan.target {
            view.find_holders(self.calls.wanted_block(path), FIRST_HOLDERS, ranked);
        } else if let Some(node) = self.plan.target.node() {
            let Some(index) = view.members().iter().position(|member| *member.name == *node) else {
                let why = format!("node {node} left the group");
                return Err(self.lost(Error::new(ErrorKind::Unavailable, why)));
            };
            ranked.clear();
            ranked.push(index as u32);
        }
        Ok(())
    }

    /// Tries each candidate.
    fn run_round(&mut self, ranked: &mut Vec<u32>, until: Instant) -> std::result::Result<NodeAnswer, RoundFailure> {
        let by_path = self.plan.target.node().is_none();
        let view = self.calls.client.members().snapshot();
        let view: &MembersSnapshot = &view;
        self.find_candidates(view, ranked)?;
        let mut last = None;
        let mut unfit = None;
        for index in ranked.iter() {
            let peer = view.peer(*index);
            for _ in 0..NODE_ATTEMPTS {
                let failure = match self.attempt(peer, until) {
                    Ok(answer) => return Ok(answer),
                    Err(failure) => failure,
                };
                let verdict = judge_failure(&failure, peer.is_up(), by_path);
                let error = failure_error(failure);
                match verdict {
                    FailureVerdict::Final => return Err(RoundFailure::Ended(CallEnd::Failed(error))),
                    FailureVerdict::Lost => return Err(self.lost(error)),
                    FailureVerdict::Pause => return Err(RoundFailure::Again(error)),
                    FailureVerdict::NextOrFinal => unfit = Some(error),
                    FailureVerdict::NextNode | FailureVerdict::SameNode => last = Some(error),
                }
                if verdict != FailureVerdict::SameNode || Instant::now() >= until {
                    break;
                }
            }
            if Instant::now() >= until {
                break;
            }
        }
        match (last, unfit) {
            // The connections to a process broke that can be reached.
            (Some(error), _) if !by_path => Err(self.lost(error)),
            (Some(error), _) => Err(RoundFailure::Again(error)),
            (None, Some(error)) => Err(RoundFailure::Ended(CallEnd::Failed(error))),
            (None, None) => {
                let why = "the cache group has no node: name one with --registry static:host:port";
                Err(RoundFailure::Again(Error::new(ErrorKind::Unavailable, why)))
            }
        }
    }

    /// One attempt on one node, after its process has proven its directory.
    fn attempt(&mut self, peer: &Arc<GroupPeer>, until: Instant) -> std::result::Result<NodeAnswer, PeerFailure> {
        loop {
            let mut unproven = None;
            let result = self.attempt_once(peer, until, &mut unproven);
            let Some(instance) = unproven else { return result };
            // A node with another directory is skipped.
            self.calls.prove_process(peer, instance, self.plan.deadline).map_err(PeerFailure::Refused)?;
        }
    }

    fn attempt_once(
        &mut self,
        peer: &Arc<GroupPeer>,
        until: Instant,
        unproven: &mut Option<u64>,
    ) -> std::result::Result<NodeAnswer, PeerFailure> {
        let PendingCall { calls, plan, caller, marked, unanswered, passed, body, .. } = self;
        let WriteCallPlan { target, kind, call, context, landing, before, .. } = plan;
        let proven_only = !matches!(target, CallTarget::Unproven(_));
        let mut instance = 0;
        // A request has bytes, or its answer has.
        let only = target.process().map(|process| process.instance);
        let near = landing_address(if context.payload.is_empty() { landing } else { context.payload });
        let answered = peer.attempt_write(near, only, until, &mut |lease, until| {
            let welcome = lease.welcome();
            instance = welcome.instance;
            calls.check_version(welcome).map_err(CallError::Answered)?;
            if proven_only && !calls.is_trusted(instance) {
                *unproven = Some(instance);
                let why = format!("node {} has not proved to have the same directory", welcome.node);
                return Err(CallError::Answered(Error::new(ErrorKind::Stale, why)));
            }
            if std::mem::replace(unanswered, true) {
                calls.attempts.fetch_add(1, Ordering::AcqRel);
            }
            let request = WriteRequest {
                volume: welcome.volume,
                id: ChangeId { session: calls.session, number: kind.number() },
                answered: calls.answered_by(*kind),
                again: *kind == CallKind::SetAgain || kind.is_change() && before.is_compared_by(instance),
                marked: *marked && kind.is_change(),
                known: context.known,
                caller: *caller,
                call: **call,
                payload: context.payload,
            };
            before.note_sent(instance);
            if let (Some(kept), CallKind::Change { number }) = (&calls.kept, *kind) {
                kept.note_sent(number, before.to_kept());
            }
            body.clear();
            let answer = lease.call(&NodeRequest::Write(request), body, landing, &mut |_| {}, until);
            *unanswered = matches!(answer, Err(CallError::Broken(_)));
            if *unanswered && passed.iter().all(|known| known.instance != instance) {
                passed.push(HomeProcess { node: peer.name().into(), instance });
            }
            let answer = answer?;
            let decoded = WriteAnswer::decode(body).map_err(|e| {
                let what = NodeRequest::Write(request);
                CallError::Answered(Error::from(e).context(format_args!("{what}: the answer can't be decoded")))
            })?;
            Ok((decoded, answer.payload_len))
        });
        answered.map(|(answer, payload_len)| {
            let known = target.process().cloned();
            let home = known.unwrap_or_else(|| HomeProcess { node: peer.name().into(), instance });
            NodeAnswer { answer, payload_len, home }
        })
    }
}

/// The value of an answer, or the source's error.
///
/// # Errors
/// The source's; `EIO` when it is not known whether a change was executed.
pub(crate) fn settle_answer(answer: WriteAnswer) -> Result<WriteAnswer> {
    match answer {
        WriteAnswer::Failed(error) => Err(error),
        WriteAnswer::Unclear(why) => {
            let why = format!("it is not known whether a change was executed: {why}");
            Err(Error::new(ErrorKind::Io(EIO), why))
        }
        answer => Ok(answer),
    }
}

/// Whether the nodes may take the bytes later.
pub(crate) fn is_transient(error: &Error) -> bool {
    error.kind().retry_advice() != RetryAdvice::Never
}

/// The attributes of an answer.
///
/// # Errors
/// `Protocol` for an answer of another kind.
pub(crate) fn attr_of(answer: WriteAnswer) -> Result<NodeAttr> {
    match answer {
        WriteAnswer::Attr(attr) | WriteAnswer::Opened(attr, _) => Ok(attr),
        other => Err(unexpected(&other)),
    }
}

/// A file whose move took longer than the call, as when this mount was stopped meanwhile.
pub(crate) fn late_move() -> Error {
    Error::new(ErrorKind::Unavailable, "no node had the file open when the time of the call was over; try again")
}

/// A file that moved too often.
pub(crate) fn unsteady() -> Error {
    Error::new(ErrorKind::Unavailable, "the file moved from node to node; try again")
}

/// The error of an answer of the wrong kind.
pub(crate) fn unexpected(answer: &WriteAnswer) -> Error {
    Error::new(ErrorKind::Protocol, format!("a node gave an answer of another kind: {answer:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_failures() {
        use ErrorKind::{Io, ReadOnly, Stale, Throttled, Unavailable, Unsupported};
        use FailureVerdict::{Final, Lost, NextNode, NextOrFinal, Pause, SameNode};
        let answered = |kind| PeerFailure::Answered(Error::new(kind, ""));
        let broken = || PeerFailure::Broken(Error::new(Unavailable, ""));
        let refused = PeerFailure::Refused(Error::new(ErrorKind::PermissionDenied, ""));
        for (failure, reached, of_path, of_process) in [
            (broken(), true, SameNode, SameNode),
            (broken(), false, NextNode, Lost),
            (answered(Stale), true, Final, Lost),
            (answered(Throttled), true, NextNode, Pause),
            (answered(Unsupported), true, NextOrFinal, Final),
            (answered(ReadOnly), true, NextOrFinal, Final),
            (answered(Unavailable), true, NextNode, Final),
            (refused, true, NextNode, Final),
            (answered(Io(EIO)), true, Final, Final),
        ] {
            assert_eq!(judge_failure(&failure, reached, true), of_path);
            assert_eq!(judge_failure(&failure, reached, false), of_process);
        }
    }

    #[test]
    fn a_request_leaves_time_for_the_next_process_and_ends_with_the_call() {
        let patience = RequestPatience::new(Duration::from_secs(60));
        let deadline = CallDeadline::begin(patience);
        let begun = deadline.end - 2 * patience.answer;
        assert_eq!(deadline.of_request(begun), begun + patience.answer);
        assert_eq!(deadline.of_request(begun + patience.answer * 3 / 2), deadline.end);
        assert!(!deadline.is_over(begun) && deadline.is_over(deadline.end));
    }

    #[test]
    fn a_process_compares_what_any_other_one_may_have_executed() {
        let mut executed = MaybeExecuted::Nowhere;
        assert!(!executed.is_compared_by(1));
        executed.note_sent(1);
        executed.note_sent(1);
        assert!(!executed.is_compared_by(1) && executed.is_compared_by(2));
        // The second process may not have got it: the next request to that one compares, too.
        executed.note_sent(2);
        assert!(executed.is_compared_by(2) && executed.is_compared_by(1));
        executed.note_sent(2);
        assert!(executed.is_compared_by(2));
    }
}
