//! The node's side: what a request is answered by, and the rules every transport keeps around it (greeting first,
//! every request answered once). It knows no connection's bytes.

use crate::gate::{Gate, no_token};
use crate::{Endpoints, TransportKind};
use spurline_proto::{Body, FrameError, Header, Hello, MAX_GREETING_BODY, MAX_REQUEST_BODY, Op, Request, Welcome};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// The number of the next parking: whose is lower is parked for longer.
static PARKINGS: AtomicU64 = AtomicU64::new(WITH_WORKER + 1);
/// A worker has the connection, or it was never parked.
const WITH_WORKER: u64 = 0;
/// The connection is being ended to make room for another.
const GOES: u64 = u64::MAX;

/// What is known of the connection a request came on.
#[derive(Debug)]
pub struct ConnState {
    id: u64,
    endpoints: Endpoints,
    peer_name: OnceLock<String>,
    /// It greeted for a source.
    for_data: AtomicBool,
    /// It has one of the places for those that do.
    admitted: AtomicBool,
    /// It is parked among those that are asked for data.
    moved: AtomicBool,
    /// The number of its parking while it is parked.
    parked: AtomicU64,
    /// What has to be proved before the greeting; `None` for nothing.
    gate: Option<Gate>,
}

impl ConnState {
    /// A new connection that has not greeted yet; `id` is unique in this process.
    pub fn new(id: u64, endpoints: Endpoints) -> Self {
        ConnState {
            id,
            endpoints,
            peer_name: OnceLock::new(),
            for_data: AtomicBool::new(false),
            admitted: AtomicBool::new(false),
            moved: AtomicBool::new(false),
            parked: AtomicU64::new(WITH_WORKER),
            gate: None,
        }
    }
    /// The same for a connection whose peer has to prove first what `trust` asks for.
    pub fn guarded(id: u64, endpoints: Endpoints, trust: &Arc<Trust>, stats: &Arc<Stats>) -> Self {
        let gate = Gate::new(trust, &endpoints.kind.to_string(), stats);
        ConnState { gate: Some(gate), ..ConnState::new(id, endpoints) }
    }
    /// The channel binding of a connection that was encrypted: what is proved from now on is proved for it.
    pub fn bind(&self, binding: &[u8]) {
        self.gate.iter().for_each(|gate| gate.bind(binding));
    }
    /// The longest body a request may have now: strangers get less room.
    pub fn max_body(&self) -> usize {
        if self.peer_name.get().is_some() { MAX_REQUEST_BODY } else { MAX_GREETING_BODY }
    }
    /// Unique in this process.
    pub fn id(&self) -> u64 {
        self.id
    }
    /// Both ends.
    pub fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }
    /// What carries the bytes.
    pub fn kind(&self) -> TransportKind {
        self.endpoints.kind
    }
    /// Whether it greeted for a source.
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
    /// A worker leaves it.
    pub(crate) fn park(&self) {
        self.parked.store(PARKINGS.fetch_add(1, Ordering::Relaxed), Ordering::Release);
    }
    /// A worker takes it, unless it is being ended.
    pub(crate) fn take_up(&self) -> bool {
        let unless_it_goes = |parked| (parked != GOES).then_some(WITH_WORKER);
        self.parked.fetch_update(Ordering::AcqRel, Ordering::Acquire, unless_it_goes).is_ok()
    }
    /// The number of its parking; `None` while a worker has it.
    pub(crate) fn parked(&self) -> Option<u64> {
        Some(self.parked.load(Ordering::Acquire)).filter(|parked| !matches!(*parked, WITH_WORKER | GOES))
    }
    /// Says that it is being ended, unless a worker took it since that parking.
    pub(crate) fn give_up_place(&self, parking: u64) -> bool {
        self.parked.compare_exchange(parking, GOES, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
    /// The name the peer gave in its greeting; `None` before that.
    pub fn peer_name(&self) -> Option<&str> {
        self.peer_name.get().map(String::as_str)
    }
}

/// Takes the answer to one request. Exactly one of the answering methods succeeds per request.
///
/// Payload slices are the node's own memory and only have to live until the method returns.
///
/// # Errors
/// Each fails with `Unavailable` or `Timeout` when the reader is gone or does not read; hand that up with `?`.
pub trait Responder {
    /// Answers with a body and a payload made of `slices` in order; either may be empty.
    fn data(&mut self, body: &[u8], slices: &[&[u8]]) -> Result<()>;

    /// Answers with a body and a payload of `len` bytes of `file` from `offset`.
    /// A file that turns out to be shorter ends the connection: the length was promised.
    fn file(&mut self, body: &[u8], file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()>;

    /// Promises a payload of `len` bytes that [`Responder::push`] then brings in order, while it is still on its way
    /// to this node. Fewer bytes than promised, or an error of the service, end the connection.
    fn begin(&mut self, body: &[u8], len: usize) -> Result<()>;

    /// Brings the next bytes of a payload promised by [`Responder::begin`].
    fn push(&mut self, bytes: &[u8]) -> Result<()>;

    /// Answers with an error.
    fn error(&mut self, error: &Error) -> Result<()>;

    /// Says that the service is about to wait for a disk or another machine, so that others are answered meanwhile. One
    /// that says nothing is found out after a while.
    fn waits(&mut self) {}

    /// The NUMA node of the NIC that carries the answer: bytes that are brought for it are best brought there. `None`
    /// where that makes no difference.
    fn numa_node(&self) -> Option<u32> {
        None
    }

    /// What has become of the answer.
    fn progress(&self) -> AnswerState;
}

/// What has become of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AnswerState {
    /// Nothing was sent.
    None,
    /// A part was sent; nothing but its rest may follow.
    Partial,
    /// All was sent.
    Whole,
}

/// What a node does with requests. Called by many threads at once; may block as long as it needs, the reader's own
/// deadline bounds its wait.
pub trait Service: Send + Sync {
    /// Answers a greeting; the transport sees to `version`.
    ///
    /// # Errors
    /// Become the answer: `PermissionDenied` for a source this node does not serve.
    fn hello(&self, conn: &ConnState, hello: &Hello<'_>) -> Result<Welcome>;

    /// Answers any other request but `Ping` through `responder`.
    ///
    /// # Errors
    /// Become the answer when none was given yet, and end the connection otherwise.
    fn serve(&self, conn: &ConnState, request: Request<'_>, responder: &mut dyn Responder) -> Result<()>;

    /// A connection that had greeted ended.
    fn closed(&self, _conn: &ConnState) {}
}

/// What a transport does with the connection after a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Reads the next request.
    Continue,
    /// Ends the connection, for this reason.
    Close(Error),
}

/// Has one request of a connection answered: checks the header, keeps the rule that a greeting comes first, answers
/// what no service needs to see, and sees to it that every request gets an answer or ends its connection.
pub fn dispatch(
    conn: &ConnState,
    header: &Header,
    body: &[u8],
    service: &dyn Service,
    responder: &mut dyn Responder,
) -> Next {
    let refuse = |error: Error, responder: &mut dyn Responder| {
        // The connection ends anyway: that the answer could not be sent changes nothing.
        let _ = responder.error(&error);
        Next::Close(error)
    };
    if let Err(e) = header.check_request() {
        return refuse(e.into(), responder);
    }
    if conn.peer_name().is_none() {
        if header.body_len as usize > MAX_GREETING_BODY {
            let (len, max) = (header.body_len.into(), MAX_GREETING_BODY as u64);
            return refuse(FrameError::TooLong { what: "a greeting", len, max }.into(), responder);
        }
        match (header.op, &conn.gate) {
            (Op::Challenge | Op::Prove, _) => {}
            // What a stranger says is not even looked at.
            (_, Some(gate)) if !gate.passed() => return refuse(gate.unproved(), responder),
            (Op::Hello, _) => {}
            (op, _) => {
                let why = format!("{op:?} came before the greeting");
                return refuse(Error::new(ErrorKind::Protocol, why), responder);
            }
        }
    }
    let answered = match Request::decode(header.op, body) {
        // A stranger gets one try.
        Err(e) if conn.peer_name().is_none() => return refuse(e.into(), responder),
        Err(e) => Err(Error::new(ErrorKind::Invalid, e.to_string())),
        Ok(Request::Challenge(challenge)) => {
            match conn.gate.as_ref().ok_or_else(no_token).and_then(|gate| gate.challenged(&challenge)) {
                Err(e) => return refuse(e, responder),
                Ok(challenged) => answer(&challenged, responder),
            }
        }
        Ok(Request::Prove(proof)) => match conn.gate.as_ref().ok_or_else(no_token).and_then(|gate| gate.proved(&proof))
        {
            Err(e) => return refuse(e, responder),
            Ok(proof) => answer(&proof, responder),
        },
        Ok(Request::Hello(hello)) => match hello.negotiate() {
            Err(e) => return refuse(e.into(), responder),
            Ok(version) => service.hello(conn, &hello).and_then(|welcome| {
                conn.peer_name.get_or_init(|| hello.peer.to_owned());
                conn.for_data.store(!hello.source.is_empty(), Ordering::Release);
                answer(&Welcome { version, ..welcome }, responder)
            }),
        },
        Ok(Request::Ping) => responder.data(&[], &[]),
        Ok(Request::Unknown { op, .. }) => {
            let why = format!("operation {op} is not known here: the node runs an older release");
            Err(Error::new(ErrorKind::Unsupported, why))
        }
        Ok(request) => service.serve(conn, request, responder),
    };
    let answered = match (responder.progress(), answered) {
        (AnswerState::Whole, Ok(())) => return Next::Continue,
        (AnswerState::None, Err(error)) => responder.error(&error),
        (AnswerState::None, Ok(())) => {
            responder.error(&Error::new(ErrorKind::Unsupported, format!("{:?} is not served here", header.op)))
        }
        (AnswerState::Partial, Ok(())) => {
            Err(Error::new(ErrorKind::Io(5), "the service gave fewer bytes than it had promised"))
        }
        (AnswerState::Partial | AnswerState::Whole, Err(error)) => Err(error),
    };
    match answered {
        Ok(()) => Next::Continue,
        Err(error) => Next::Close(error),
    }
}

fn answer(value: &impl Body, responder: &mut dyn Responder) -> Result<()> {
    let mut out = Vec::with_capacity(64);
    value.encode(&mut out);
    responder.data(&out, &[])
}
