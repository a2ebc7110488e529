//! The node's side: the service that answers requests, and the rules that every transport applies around the service (handshake
//! first, each request answered once). Knows no bytes of a connection.

use crate::proof_gate::{ProofGate, no_token};
use crate::{ConnectionEndpoints, TransportKind};
use spurline_proto::{
    AnswerBody, FrameError, FrameHeader, FrameOp, HelloRequest, MAX_GREETING_BODY, MAX_REQUEST_BODY, MIN_WRITE_VERSION,
    NodeRequest, WelcomeAnswer,
};
use spurline_trust::Trust;
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Number of the next parking: a lower number means parked for longer.
static NEXT_PARKING: AtomicU64 = AtomicU64::new(WITH_WORKER + 1);
/// A worker owns the connection, or the connection was never parked.
const WITH_WORKER: u64 = 0;
/// The connection is being closed to free a slot.
const EVICTED_CONNECTION: u64 = u64::MAX;

/// The state of the connection a request came on.
#[derive(Debug)]
pub struct ConnState {
    id: u64,
    endpoints: ConnectionEndpoints,
    peer_name: OnceLock<String>,
    /// The protocol version of the handshake; 0 before that.
    version: AtomicU16,
    /// The handshake named a source.
    for_data: AtomicBool,
    /// The connection holds a slot for data.
    admitted: AtomicBool,
    /// The connection is parked in the set of data connections.
    moved: AtomicBool,
    /// The number of the parking, while parked.
    parked: AtomicU64,
    /// The proof required before the handshake; `None` if no proof is required.
    gate: Option<ProofGate>,
}

impl ConnState {
    /// A new connection before the handshake; `id` is unique in this process.
    pub fn new(id: u64, endpoints: ConnectionEndpoints) -> Self {
        ConnState {
            id,
            endpoints,
            peer_name: OnceLock::new(),
            version: AtomicU16::new(0),
            for_data: AtomicBool::new(false),
            admitted: AtomicBool::new(false),
            moved: AtomicBool::new(false),
            parked: AtomicU64::new(WITH_WORKER),
            gate: None,
        }
    }
    /// The same, requiring the proofs of `trust` from the peer first.
    pub fn with_proof(id: u64, endpoints: ConnectionEndpoints, trust: &Arc<Trust>, stats: &Arc<Stats>) -> Self {
        let gate = ProofGate::new(trust, &endpoints.kind.to_string(), stats);
        ConnState { gate: Some(gate), ..ConnState::new(id, endpoints) }
    }
    /// Sets the channel binding of an encrypted connection; later proofs are bound to the channel.
    pub fn set_binding(&self, binding: &[u8]) {
        self.gate.iter().for_each(|gate| gate.set_binding(binding));
    }
    /// The longest request body accepted now; shorter before the handshake.
    pub fn max_body(&self) -> usize {
        if self.peer_name.get().is_some() { MAX_REQUEST_BODY } else { MAX_GREETING_BODY }
    }
    /// Unique in this process.
    pub fn id(&self) -> u64 {
        self.id
    }
    /// Both ends of the connection.
    pub fn endpoints(&self) -> &ConnectionEndpoints {
        &self.endpoints
    }
    /// Whether a request here may have a payload: a peer before the handshake sends none.
    pub fn accepts_payload(&self, header: &FrameHeader) -> bool {
        self.peer_name.get().is_some() && header.check_request().is_ok()
    }
    /// The transport.
    pub fn kind(&self) -> TransportKind {
        self.endpoints.kind
    }
    /// Whether the handshake named a source.
    pub fn for_data(&self) -> bool {
        self.for_data.load(Ordering::Acquire)
    }
    pub(crate) fn is_admitted(&self) -> bool {
        self.admitted.load(Ordering::Acquire)
    }
    pub(crate) fn set_admitted(&self, admitted: bool) {
        self.admitted.store(admitted, Ordering::Release);
    }
    pub(crate) fn moved(&self) -> &AtomicBool {
        &self.moved
    }
    /// Marks the connection as parked.
    pub(crate) fn mark_parked(&self) {
        self.parked.store(NEXT_PARKING.fetch_add(1, Ordering::Relaxed), Ordering::Release);
    }
    /// Marks the connection as owned by a worker; false when the connection is being closed.
    pub(crate) fn mark_taken(&self) -> bool {
        self.parked
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |parked| {
                (parked != EVICTED_CONNECTION).then_some(WITH_WORKER)
            })
            .is_ok()
    }
    /// The number of the parking; `None` while a worker owns the connection.
    pub(crate) fn parked(&self) -> Option<u64> {
        Some(self.parked.load(Ordering::Acquire)).filter(|parked| !matches!(*parked, WITH_WORKER | EVICTED_CONNECTION))
    }
    /// Marks the connection as being closed; false when a worker took the connection since that parking.
    pub(crate) fn mark_evicted(&self, parking: u64) -> bool {
        self.parked.compare_exchange(parking, EVICTED_CONNECTION, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    /// The protocol version of the handshake; 0 before that.
    pub fn version(&self) -> u16 {
        self.version.load(Ordering::Acquire)
    }
    /// The peer's name from the handshake; `None` before that.
    pub fn peer_name(&self) -> Option<&str> {
        self.peer_name.get().map(String::as_str)
    }
}

/// Receives the answer to a request. Exactly a single call of an answering method succeeds per request.
///
/// Payload slices are the node's own memory and only have to live until the method returns.
///
/// # Errors
/// Each fails with `Unavailable` or `Timeout` when the reader is gone or does not read; pass that up with `?`.
pub trait Responder {
    /// Answers with a body and a payload made of `slices` in order; either may be empty.
    fn send_data(&mut self, body: &[u8], slices: &[&[u8]]) -> Result<()>;

    /// Answers with a body and a payload of `len` bytes of `file` from `offset`. A file that turns out to be shorter
    /// ends the connection, because the length was announced.
    fn send_file(&mut self, body: &[u8], file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()>;

    /// Announces a payload of `len` bytes that [`Responder::push_payload`] then supplies in order, while arriving at this node.
    /// Fewer bytes than announced, or an error of the service, end the connection.
    fn begin_payload(&mut self, body: &[u8], len: usize) -> Result<()>;

    /// Supplies the next bytes of a payload announced by [`Responder::begin_payload`].
    fn push_payload(&mut self, bytes: &[u8]) -> Result<()>;

    /// Answers with an error.
    fn send_error(&mut self, error: &Error) -> Result<()>;

    /// To be called before the service blocks on a disk or another machine, so that other requests are answered meanwhile. A
    /// service without this call is detected after a while.
    fn before_wait(&mut self) {}

    /// To be called before a change is executed: whether the reader still waits for the answer. Otherwise the reader has sent the
    /// request elsewhere, and this process may have been stopped since the request arrived.
    ///
    /// # Errors
    /// `Unavailable` when the reader is gone; the change must not be executed then.
    fn check_reader(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether the calling thread must not act as another user, even for a moment: the kernel then refuses the thread's RDMA
    /// requests.
    fn keeps_identity(&self) -> bool {
        false
    }

    /// The NUMA node of the NIC that carries the answer, where the payload is best placed. `None` where that makes no
    /// difference.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// The state of the answer.
    fn answer_state(&self) -> AnswerState;
}

/// The state of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerState {
    /// Nothing was sent.
    None,
    /// A part was sent; only the rest may follow.
    Partial,
    /// All was sent.
    Whole,
}

/// Answers a node's requests. Called by many threads at once. May block as long as needed; the reader's deadline bounds the wait.
pub trait Service: Send + Sync {
    /// Answers a handshake; the transport fills in `version`.
    ///
    /// # Errors
    /// Become the answer: `PermissionDenied` for a source this node does not serve.
    fn handle_hello(&self, conn: &ConnState, hello: &HelloRequest<'_>) -> Result<WelcomeAnswer>;

    /// Answers any other request except `Ping`, through `responder`.
    ///
    /// # Errors
    /// Become the answer when none was given yet, and end the connection otherwise.
    fn serve_request(&self, conn: &ConnState, request: NodeRequest<'_>, responder: &mut dyn Responder) -> Result<()>;

    /// Reports the end of a connection after a completed handshake.
    fn connection_closed(&self, _conn: &ConnState) {}
}

/// What a transport does with the connection after a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// Reads the next request.
    Continue,
    /// Ends the connection, for this reason.
    Close(Error),
}

/// Answers a request of a connection: checks the header, enforces the handshake first, answers requests that need no service, and
/// ensures that every request gets an answer or ends the connection.
///
/// `payload` holds the bytes that followed the frame, as many as the header announces.
pub fn dispatch_request(
    conn: &ConnState,
    header: &FrameHeader,
    body: &[u8],
    payload: &[u8],
    service: &dyn Service,
    responder: &mut dyn Responder,
) -> NextStep {
    if let Err(e) = header.check_request() {
        return close_with_error(e.into(), responder);
    }
    if conn.peer_name().is_none() {
        if header.body_len as usize > MAX_GREETING_BODY {
            let len = header.body_len.into();
            let max = MAX_GREETING_BODY as u64;
            return close_with_error(FrameError::TooLong { what: "a handshake", len, max }.into(), responder);
        }
        match (header.op, &conn.gate) {
            (FrameOp::Challenge | FrameOp::Prove, _) => {}
            // A request before the proof is not examined at all.
            (_, Some(gate)) if !gate.passed() => return close_with_error(gate.unproved_error(), responder),
            (FrameOp::Hello, _) => {}
            (op, _) => {
                let why = format!("{op:?} arrived before the handshake");
                return close_with_error(Error::new(ErrorKind::Protocol, why), responder);
            }
        }
    }
    // The form differs, so the request is not decoded.
    if header.op == FrameOp::Write && conn.version() < MIN_WRITE_VERSION {
        return match responder.send_error(&old_writer(conn)) {
            Ok(()) => NextStep::Continue,
            Err(error) => NextStep::Close(error),
        };
    }
    let answered = match NodeRequest::decode(header.op, body).and_then(|request| request.with_payload(payload)) {
        // Before the handshake there is no second attempt.
        Err(e) if conn.peer_name().is_none() => return close_with_error(e.into(), responder),
        Err(e) => Err(Error::new(ErrorKind::Invalid, e.to_string())),
        Ok(NodeRequest::Challenge(challenge)) => {
            match conn.gate.as_ref().ok_or_else(no_token).and_then(|gate| gate.answer_challenge(&challenge)) {
                Err(e) => return close_with_error(e, responder),
                Ok(challenged) => send_answer(&challenged, responder),
            }
        }
        Ok(NodeRequest::Prove(proof)) => {
            match conn.gate.as_ref().ok_or_else(no_token).and_then(|gate| gate.check_proof(&proof)) {
                Err(e) => return close_with_error(e, responder),
                Ok(proof) => send_answer(&proof, responder),
            }
        }
        Ok(NodeRequest::Hello(hello)) => match hello.negotiate_version() {
            Err(e) => return close_with_error(e.into(), responder),
            Ok(version) => service.handle_hello(conn, &hello).and_then(|welcome| {
                conn.peer_name.get_or_init(|| hello.peer.to_owned());
                conn.version.store(version, Ordering::Release);
                conn.for_data.store(!hello.source.is_empty(), Ordering::Release);
                send_answer(&WelcomeAnswer { version, ..welcome }, responder)
            }),
        },
        Ok(NodeRequest::Ping) => responder.send_data(&[], &[]),
        Ok(NodeRequest::Unknown { op, .. }) => {
            let why = format!("operation {op} is unknown: this node runs an older release");
            Err(Error::new(ErrorKind::Unsupported, why))
        }
        Ok(request) => service.serve_request(conn, request, responder),
    };
    let answered = match (responder.answer_state(), answered) {
        (AnswerState::Whole, Ok(())) => return NextStep::Continue,
        (AnswerState::None, Err(error)) => responder.send_error(&error),
        (AnswerState::None, Ok(())) => {
            responder.send_error(&Error::new(ErrorKind::Unsupported, format!("{:?} is not served here", header.op)))
        }
        (AnswerState::Partial, Ok(())) => {
            Err(Error::new(ErrorKind::Io(EIO), "the service returned fewer bytes than announced"))
        }
        (AnswerState::Partial | AnswerState::Whole, Err(error)) => Err(error),
    };
    match answered {
        Ok(()) => NextStep::Continue,
        Err(error) => NextStep::Close(error),
    }
}

fn close_with_error(error: Error, responder: &mut dyn Responder) -> NextStep {
    // The connection ends in any case, so a failed answer changes nothing.
    let _ = responder.send_error(&error);
    NextStep::Close(error)
}

/// The refusal of a write by a peer whose release is too old for writes.
fn old_writer(conn: &ConnState) -> Error {
    let why = format!(
        "mount '{}' speaks protocol version {}, and writes through this node need {MIN_WRITE_VERSION}: the mount's release is \
         older; upgrade spurline on its host, or mount without --rw",
        conn.peer_name().unwrap_or_default(),
        conn.version()
    );
    Error::new(ErrorKind::Unsupported, why)
}

fn send_answer(value: &impl AnswerBody, responder: &mut dyn Responder) -> Result<()> {
    let mut out = Vec::with_capacity(64);
    value.encode(&mut out);
    responder.send_data(&out, &[])
}
