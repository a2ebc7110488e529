//! Sends one request for a writable volume until a node answers. It knows which process may have executed the request,
//! and nothing about its content.
//!
//! 1. The home of a path is the first of its holders that can be reached; all requests for the path go there.
//! 2. A request whose connection broke is sent once more to the same node: its process remembers its answers.
//! 3. Then it goes to the next holder, marked: that node first compares the source with the change.
//! 4. So does a request whose node is of an older release that knows no changes.
//! 5. A node that is alive and late keeps its request until the deadline: it may still execute it.

use super::GroupWrites;
use super::proof::check_version;
use crate::members::MembersSnapshot;
use crate::peer::{GroupPeer, PeerFailure, landing_address};
use crate::placement::{FIRST_HOLDERS, WantedRun};
use crate::remote::SCRATCH;
use spurline_proto::{AnswerBody as _, NodeRequest, VolumeId, WriteAnswer, WriteCall, WriteRequest};
use spurline_transport::CallError;
use spurline_types::{Error, ErrorKind, ObjectId, Result, RetryAdvice};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Attempts on one node before the next.
const ATTEMPTS: usize = 2;
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// The process of a node that answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HomeProcess {
    /// The node's name in the group.
    pub node: String,
    /// The random number of its process.
    pub instance: u64,
}

/// The answer of a node.
pub(crate) struct NodeAnswer {
    pub answer: WriteAnswer,
    /// Bytes of the payload that landed.
    pub payload_len: usize,
    pub home: HomeProcess,
}

/// Where a request goes.
#[derive(Clone, Copy)]
pub(crate) enum CallTarget<'a> {
    /// The home of this path, or a node after it.
    Path(&'a [u8]),
    /// This process only: it has the file open.
    Process(&'a HomeProcess),
    /// This process only, before it is proven to have the directory of the others.
    Unproven(&'a HomeProcess),
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

/// Makes the request for a connection's volume; the flag is [`WriteRequest::again`].
pub(crate) type BuildRequest<'a> = dyn Fn(VolumeId, bool) -> WriteRequest<'a> + 'a;

impl GroupWrites {
    /// Sends the request until a node answers it, or until the deadline. `before`: where it may have been
    /// executed earlier.
    ///
    /// # Errors
    /// As [`CallEnd`]; a path's request is never lost.
    pub(crate) fn call_node(
        &self,
        target: CallTarget<'_>,
        build: &BuildRequest<'_>,
        before: MaybeExecuted,
        dst: &mut [u8],
    ) -> std::result::Result<NodeAnswer, CallEnd> {
        // Taken out of its cell, so that a nested call finds an empty one and does not panic.
        let (mut body, mut ranked) = SCRATCH.with(RefCell::take);
        let proven_only = !matches!(target, CallTarget::Unproven(_));
        let mut call = PendingCall {
            writes: self,
            build,
            before,
            unanswered: false,
            passed: Vec::new(),
            proven_only,
            body: &mut body,
            dst,
        };
        let result = match target {
            CallTarget::Path(path) => call.run_ranked(path, &mut ranked),
            CallTarget::Process(home) | CallTarget::Unproven(home) => call.run_at(home),
        };
        call.count_unanswered();
        call.close_passed(result.as_ref().ok().map(|answer| &answer.home));
        SCRATCH.with(|cell| cell.replace((body, ranked)));
        result
    }
}

impl GroupWrites {
    /// How long a node has been away that would be the home of a path before the one of `home`.
    pub(super) fn better_node_away(&self, path: &[u8], home: &HomeProcess) -> Option<Duration> {
        let wanted = WantedRun::of_block(ObjectId::from_text(self.client.source(), path, ""), 0, 1);
        let (view, mut ranked) = (self.client.members().snapshot(), Vec::new());
        view.find_holders(wanted, FIRST_HOLDERS, &mut ranked);
        let better = ranked.iter().map(|index| view.peer(*index)).take_while(|peer| peer.name() != home.node);
        better.filter_map(|peer| peer.away()).min()
    }
}

struct PendingCall<'a, 'b> {
    writes: &'a GroupWrites,
    build: &'a BuildRequest<'b>,
    before: MaybeExecuted,
    /// The last attempt was sent and not answered.
    unanswered: bool,
    /// The processes that got it and gave no answer.
    passed: Vec<HomeProcess>,
    /// Other processes are proven first.
    proven_only: bool,
    body: &'a mut Vec<u8>,
    dst: &'a mut [u8],
}

impl PendingCall<'_, '_> {
    /// The attempt before may be executed late, also by the same process.
    fn count_unanswered(&mut self) {
        if std::mem::take(&mut self.unanswered) {
            self.writes.attempts.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// A process that got the request to open a file, and gave no answer, may have it open.
    fn close_passed(&self, home: Option<&HomeProcess>) {
        let passed = self.passed.iter().filter(|passed| Some(*passed) != home);
        let file = match (self.build)(VolumeId::default(), false).call {
            WriteCall::Open { file, .. }
            | WriteCall::Create { file, .. }
            | WriteCall::CreateUnnamed { file, .. }
            | WriteCall::OpenDirectory { file, .. }
            | WriteCall::Reopen { file, .. } => file,
            _ => return,
        };
        passed.for_each(|passed| self.writes.close_later(passed, &[file]));
    }

    fn run_ranked(&mut self, path: &[u8], ranked: &mut Vec<u32>) -> std::result::Result<NodeAnswer, CallEnd> {
        let client = &self.writes.client;
        let patience = client.patience();
        let (started, mut pause) = (Instant::now(), FIRST_PAUSE);
        let deadline = started + patience.answer;
        let wanted = WantedRun::of_block(ObjectId::from_text(client.source(), path, ""), 0, 1);
        loop {
            let (mut last, mut older) = (None, None);
            let view = client.members().snapshot();
            let view: &MembersSnapshot = &view;
            view.find_holders(wanted, FIRST_HOLDERS, ranked);
            for index in ranked.iter() {
                let peer = view.peer(*index);
                for _ in 0..ATTEMPTS {
                    match self.attempt(peer, deadline, None) {
                        Ok(answer) => return Ok(answer),
                        // Its release is older: the next one can have the path.
                        Err(PeerFailure::Answered(error)) if error.kind() == ErrorKind::Unsupported => {
                            older = Some(error);
                            break;
                        }
                        Err(PeerFailure::Answered(error)) if error.kind().retry_advice() == RetryAdvice::Never => {
                            return Err(CallEnd::Failed(error));
                        }
                        Err(PeerFailure::Answered(error) | PeerFailure::Refused(error)) => {
                            last = Some(error);
                            break;
                        }
                        Err(PeerFailure::Broken(error)) => {
                            // A process that can't be reached has not got it.
                            let reached = peer.is_up();
                            last = Some(error);
                            if !reached {
                                break;
                            }
                        }
                    }
                    if Instant::now() >= deadline {
                        break;
                    }
                }
                if Instant::now() >= deadline {
                    break;
                }
            }
            if last.is_none()
                && let Some(error) = older
            {
                return Err(CallEnd::Failed(error));
            }
            let error = last.unwrap_or_else(|| {
                let why = "the cache group has no node: name one with --registry static:host:port";
                Error::new(ErrorKind::Unavailable, why)
            });
            // A restart of all nodes is hidden for as long as for reads.
            let unreachable = error.kind() == ErrorKind::Unavailable && started.elapsed() >= patience.absence;
            if unreachable || Instant::now() + pause >= deadline {
                return Err(CallEnd::Failed(error));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn run_at(&mut self, home: &HomeProcess) -> std::result::Result<NodeAnswer, CallEnd> {
        let client = &self.writes.client;
        let deadline = Instant::now() + client.patience().answer;
        let lost = |error, sent| CallEnd::Lost { error, sent };
        let mut last = None;
        let (before, mut pause) = (self.before, FIRST_PAUSE);
        for _ in 0..ATTEMPTS {
            let view = client.members().snapshot();
            let Some(index) = view.members().iter().position(|member| member.name == home.node) else {
                let why = format!("node {} left the group", home.node);
                return Err(lost(Error::new(ErrorKind::Unavailable, why), self.before != before));
            };
            let peer = view.peer(index as u32);
            loop {
                match self.attempt(peer, deadline, Some(home.instance)) {
                    Ok(answer) => return Ok(answer),
                    Err(PeerFailure::Answered(error)) if error.kind().retry_advice() == RetryAdvice::SamePath => {
                        if Instant::now() + pause >= deadline {
                            return Err(CallEnd::Failed(error));
                        }
                        std::thread::sleep(pause);
                        pause = (pause * 2).min(LONGEST_PAUSE);
                    }
                    Err(PeerFailure::Answered(error)) if error.kind() == ErrorKind::Stale => {
                        return Err(lost(error, self.before != before));
                    }
                    Err(PeerFailure::Answered(error) | PeerFailure::Refused(error)) => {
                        return Err(CallEnd::Failed(error));
                    }
                    Err(PeerFailure::Broken(error)) => {
                        last = Some(error);
                        break;
                    }
                }
            }
            if Instant::now() >= deadline || !peer.is_up() {
                break;
            }
        }
        let error = last.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "no answer"));
        Err(lost(error, self.before != before))
    }

    /// One attempt on one node; with `only`, on no other process than this.
    fn attempt(
        &mut self,
        peer: &Arc<GroupPeer>,
        deadline: Instant,
        only: Option<u64>,
    ) -> std::result::Result<NodeAnswer, PeerFailure> {
        loop {
            let mut unproven = None;
            let result = self.attempt_once(peer, deadline, only, &mut unproven);
            let Some(instance) = unproven else { return result };
            // A node with another directory is skipped.
            self.writes.prove_process(peer, instance).map_err(PeerFailure::Refused)?;
        }
    }

    fn attempt_once(
        &mut self,
        peer: &Arc<GroupPeer>,
        deadline: Instant,
        only: Option<u64>,
        unproven: &mut Option<u64>,
    ) -> std::result::Result<NodeAnswer, PeerFailure> {
        let (writes, proven_only) = (self.writes, self.proven_only);
        let (before, unanswered) = (&mut self.before, &mut self.unanswered);
        let passed = &mut self.passed;
        let (build, body, dst) = (self.build, &mut *self.body, &mut *self.dst);
        let mut instance = 0;
        // A request has bytes, or its answer has.
        let payload = build(VolumeId::default(), false).payload;
        let near = landing_address(if payload.is_empty() { dst } else { payload });
        let answered = peer.attempt_write(near, deadline, &mut |lease, deadline| {
            let welcome = lease.welcome();
            instance = welcome.instance;
            // First: the process that had the file open is gone, whatever release the next one is.
            if only.is_some_and(|only| only != instance) {
                let why = format!("node {} was started again", welcome.node);
                return Err(CallError::Answered(Error::new(ErrorKind::Stale, why)));
            }
            check_version(welcome).map_err(CallError::Answered)?;
            if proven_only && !writes.is_trusted(instance) {
                *unproven = Some(instance);
                let why = format!("node {} has not proved to have the same directory", welcome.node);
                return Err(CallError::Answered(Error::new(ErrorKind::Stale, why)));
            }
            if std::mem::replace(unanswered, true) {
                writes.attempts.fetch_add(1, Ordering::AcqRel);
            }
            let request = NodeRequest::Write(build(welcome.volume, before.is_compared_by(instance)));
            before.note_sent(instance);
            body.clear();
            let answer = lease.call(&request, body, dst, &mut |_| {}, deadline);
            *unanswered = matches!(answer, Err(CallError::Broken(_)));
            if *unanswered && passed.iter().all(|known| known.instance != instance) {
                passed.push(HomeProcess { node: peer.name().to_owned(), instance });
            }
            let answer = answer?;
            let decoded = WriteAnswer::decode(body).map_err(|e| {
                CallError::Answered(Error::from(e).context(format_args!("{request}: the answer can't be decoded")))
            })?;
            Ok((decoded, answer.payload_len))
        });
        answered.map(|(answer, payload_len)| NodeAnswer {
            answer,
            payload_len,
            home: HomeProcess { node: peer.name().to_owned(), instance },
        })
    }
}

/// The value of an answer, or the source's error.
///
/// # Errors
/// The source's; `EIO` when it is not known whether a change was executed.
pub(crate) fn settle_answer(answer: WriteAnswer) -> Result<WriteAnswer> {
    // From `asm-generic/errno-base.h`.
    const EIO: i32 = 5;
    match answer {
        WriteAnswer::Failed(error) => Err(error),
        WriteAnswer::Unclear(why) => {
            let why = format!("it is not known whether a change was executed: {why}");
            Err(Error::new(ErrorKind::Io(EIO), why))
        }
        answer => Ok(answer),
    }
}

/// The error of an answer of the wrong kind.
pub(crate) fn unexpected(answer: &WriteAnswer) -> Error {
    Error::new(ErrorKind::Protocol, format!("a node gave an answer of another kind: {answer:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
