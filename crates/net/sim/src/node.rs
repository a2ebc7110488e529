//! A peer in memory: serves on the caller's own thread and answers with a byte stream that faults can cut. Frames pass through
//! the code that TCP uses.

use crate::{FaultPlan, SimFault};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{FrameHeader, HEADER_LEN, NodeRequest};
use spurline_transport::{
    ByteStream, CallAnswer, CallError, Channel, ChannelBreaker, ConnState, ConnectionEndpoints, Connector,
    FrameResponder, FrameSink, NextStep, Service, TransportKind, dispatch_request, receive_answer,
};
use spurline_types::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What follows the bytes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterAnswer {
    /// The next request.
    Continue,
    /// The connection ends.
    Close,
    /// Nothing until the deadline.
    Stall,
}

/// A request on arrival.
struct ArrivedRequest<'a> {
    header: &'a FrameHeader,
    body: &'a [u8],
    payload: &'a [u8],
    conn: &'a ConnState,
    /// Whether the reader still waits for the answer.
    reader_waits: &'a dyn Fn() -> bool,
}

type PlayFn = dyn Fn(&ArrivedRequest<'_>) -> (Vec<u8>, AfterAnswer) + Send + Sync;

/// The process of a node.
#[derive(Clone, Copy, PartialEq, Eq)]
struct NodeLife {
    up: bool,
    /// How often the node was killed: connections of an earlier life are closed.
    kills: u64,
    /// The node executes nothing and answers nothing.
    stopped: bool,
}

/// A node in memory. Cheap to clone.
#[derive(Clone)]
pub struct SimNode {
    inner: Arc<SimNodeState>,
}

struct SimNodeState {
    name: String,
    play: Box<PlayFn>,
    service: Option<Arc<dyn Service>>,
    plan: Arc<FaultPlan>,
    life: Mutex<NodeLife>,
    /// The life has changed, or a channel was broken.
    changed: Condvar,
    next_conn: AtomicU64,
}

impl SimNode {
    /// A running node that answers by `service` and fails by `plan`.
    pub fn new(name: &str, service: Arc<dyn Service>, plan: Arc<FaultPlan>) -> Self {
        let served = Arc::clone(&service);
        Self::build_node(
            name,
            Box::new(move |request| {
                let mut sink = MemorySink { bytes: Vec::new(), reader_waits: request.reader_waits };
                let mut to = FrameResponder::new(&mut sink, request.header);
                let next =
                    dispatch_request(request.conn, request.header, request.body, request.payload, &*served, &mut to);
                (sink.bytes, if next == NextStep::Continue { AfterAnswer::Continue } else { AfterAnswer::Close })
            }),
            Some(service),
            plan,
        )
    }

    /// A running node that answers by `play`: maps a request to the bytes to send and what follows.
    pub fn with_script(
        name: &str,
        play: impl Fn(&FrameHeader) -> (Vec<u8>, AfterAnswer) + Send + Sync + 'static,
        plan: Arc<FaultPlan>,
    ) -> Self {
        Self::build_node(name, Box::new(move |request: &ArrivedRequest<'_>| play(request.header)), None, plan)
    }

    fn build_node(name: &str, play: Box<PlayFn>, service: Option<Arc<dyn Service>>, plan: Arc<FaultPlan>) -> Self {
        let inner = SimNodeState {
            name: name.to_owned(),
            play,
            service,
            plan,
            life: Mutex::new(NodeLife { up: true, kills: 0, stopped: false }),
            changed: Condvar::new(),
            next_conn: AtomicU64::new(1),
        };
        SimNode { inner: Arc::new(inner) }
    }

    /// Ends all connections; new connections are refused until [`SimNode::start`].
    pub fn kill(&self) {
        let mut life = self.inner.life.lock();
        *life = NodeLife { up: false, kills: life.kills + 1, stopped: false };
        self.inner.changed.notify_all();
    }

    /// Stops or continues the process: requests that arrive meanwhile are executed afterwards, also without the reader. For
    /// readers with [`crate::DetachedConnector`]: others wait longer than their deadlines.
    pub fn set_stopped(&self, stopped: bool) {
        let mut life = self.inner.life.lock();
        life.stopped = stopped;
        self.inner.changed.notify_all();
    }

    /// Accepts connections again.
    pub fn start(&self) {
        self.inner.life.lock().up = true;
    }

    /// Connections made so far, including refused connections.
    pub fn connect_count(&self) -> u64 {
        self.inner.next_conn.load(Ordering::Relaxed) - 1
    }

    /// A connector to this node.
    pub fn connector(&self) -> Arc<SimConnector> {
        Arc::new(SimConnector { node: self.clone() })
    }
}

/// Makes channels to a [`SimNode`].
pub struct SimConnector {
    node: SimNode,
}

impl Connector for SimConnector {
    fn connect(&self, _deadline: Instant) -> Result<Box<dyn Channel>> {
        let inner = &self.node.inner;
        let id = inner.next_conn.fetch_add(1, Ordering::Relaxed);
        let NodeLife { up, kills, .. } = *inner.life.lock();
        if !up {
            return Err(Error::new(ErrorKind::Unavailable, format!("{}: connection refused", inner.name)));
        }
        let endpoints =
            ConnectionEndpoints { kind: TransportKind::Sim, local: format!("sim:{id}"), peer: inner.name.clone() };
        let conn = ConnState::new(id, endpoints);
        let node = Arc::clone(inner);
        let ended = Arc::new(AtomicBool::new(false));
        Ok(Box::new(SimChannel { node, conn, kills, pending: Vec::new(), next_id: 1, broken: false, ended }))
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }
    fn peer(&self) -> &str {
        &self.node.inner.name
    }
}

struct SimChannel {
    node: Arc<SimNodeState>,
    conn: ConnState,
    /// The life of the node to which the channel belongs.
    kills: u64,
    /// Bytes sent and not yet received: stray bytes behind an answer.
    pending: Vec<u8>,
    next_id: u64,
    broken: bool,
    /// Interrupted from another thread.
    ended: Arc<AtomicBool>,
}

struct SimBreaker {
    node: Arc<SimNodeState>,
    ended: Arc<AtomicBool>,
}

impl ChannelBreaker for SimBreaker {
    fn break_channel(&self) {
        // Under the lock, so that a waiting call can't check before and sleep after.
        let _life = self.node.life.lock();
        self.ended.store(true, Ordering::Release);
        self.node.changed.notify_all();
    }
}

impl NodeLife {
    /// Whether the node runs, in the life after this many kills.
    fn is(&self, kills: u64) -> bool {
        self.up && self.kills == kills
    }
}

impl SimNodeState {
    fn is_alive(&self, kills: u64) -> bool {
        self.life.lock().is(kills)
    }

    /// Waits while the process is stopped; returns whether the life is still the same.
    fn wait_continued(&self, kills: u64) -> bool {
        let mut life = self.life.lock();
        while life.is(kills) && life.stopped {
            self.changed.wait(&mut life);
        }
        life.is(kills)
    }
}

impl SimChannel {
    fn exchange_frames(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut frame = Vec::new();
        request.encode(id, &mut frame).map_err(|e| CallError::not_sent(&e))?;
        let fault = self.node.plan.draw_fault();
        let ended = self.ended.load(Ordering::Acquire);
        if fault == Some(SimFault::Drop) || self.broken || ended || !self.node.is_alive(self.kills) {
            return Err(broken_call(ErrorKind::Unavailable, "the connection ended"));
        }
        if let Some(SimFault::Delay(delay)) = fault {
            std::thread::sleep(delay.min(deadline.saturating_duration_since(Instant::now())));
        }
        let (head, sent_body) =
            frame.split_first_chunk::<HEADER_LEN>().ok_or_else(|| broken_call(ErrorKind::Invalid, "no header"))?;
        let header = FrameHeader::decode(head).map_err(|e| CallError::Broken(e.into()))?;
        let arrived = ArrivedRequest {
            header: &header,
            body: &sent_body[..header.body_len as usize],
            payload: request.payload(),
            conn: &self.conn,
            reader_waits: &|| !self.ended.load(Ordering::Acquire),
        };
        let lost = || broken_call(ErrorKind::Unavailable, "the connection ended");
        if !self.node.wait_continued(self.kills) {
            return Err(lost());
        }
        let (answer, mut after) = (self.node.play)(&arrived);
        // A process that ended meanwhile answers nothing.
        if !self.node.wait_continued(self.kills) {
            return Err(lost());
        }
        let mut bytes = std::mem::take(&mut self.pending);
        bytes.extend_from_slice(&answer);
        match fault {
            Some(SimFault::Cut) => {
                bytes.truncate(self.node.plan.draw_below(bytes.len()));
                after = AfterAnswer::Close;
            }
            Some(SimFault::Garbage) => {
                let damaged = bytes.len().min(HEADER_LEN);
                bytes[..damaged].fill(0xdb);
            }
            Some(SimFault::Twice) => bytes.extend_from_slice(&answer),
            Some(SimFault::Stall) => {
                bytes.clear();
                after = AfterAnswer::Stall;
            }
            _ => {}
        }
        let mut replay = AnswerReplay { node: &self.node, kills: self.kills, ended: &self.ended, bytes: &bytes, after };
        let result = receive_answer(&mut replay, request.op(), id, body, dst, progress, deadline);
        self.pending = replay.bytes.to_vec();
        self.broken |= after == AfterAnswer::Close;
        result
    }
}

impl Channel for SimChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        let result = self.exchange_frames(request, body, dst, progress, deadline);
        self.broken |= matches!(result, Err(CallError::Broken(_)));
        result.map_err(|e| match e {
            CallError::Broken(_) => e.context(format_args!("{request} of {}", self.conn.endpoints())),
            answered => answered,
        })
    }

    fn breaker(&self) -> Option<Arc<dyn ChannelBreaker>> {
        Some(Arc::new(SimBreaker { node: Arc::clone(&self.node), ended: Arc::clone(&self.ended) }))
    }

    fn endpoints(&self) -> &ConnectionEndpoints {
        self.conn.endpoints()
    }

    fn looks_alive(&mut self) -> bool {
        !self.broken && self.pending.is_empty() && self.node.is_alive(self.kills)
    }
}

impl Drop for SimChannel {
    fn drop(&mut self) {
        if self.conn.peer_name().is_some()
            && let Some(service) = &self.node.service
        {
            service.connection_closed(&self.conn);
        }
    }
}

/// The bytes of an answer, arriving in pieces of random length.
struct AnswerReplay<'a> {
    node: &'a SimNodeState,
    kills: u64,
    ended: &'a AtomicBool,
    bytes: &'a [u8],
    after: AfterAnswer,
}

impl ByteStream for AnswerReplay<'_> {
    fn receive_into(&mut self, first: &mut [u8], second: &mut [u8], all: bool, deadline: Instant) -> Result<usize> {
        if self.bytes.is_empty() && self.after == AfterAnswer::Close {
            return Err(connection_ended());
        }
        if self.bytes.is_empty() {
            let mut life = self.node.life.lock();
            while life.is(self.kills) && !self.ended.load(Ordering::Acquire) {
                if self.node.changed.wait_until(&mut life, deadline).timed_out() {
                    return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline"));
                }
            }
            return Err(connection_ended());
        }
        let there = self.bytes.len().min(first.len() + second.len());
        let n = if all { there } else { 1 + self.node.plan.draw_below(there) };
        let (now, rest) = self.bytes.split_at(n.min(there));
        let head = now.len().min(first.len());
        first[..head].copy_from_slice(&now[..head]);
        second[..now.len() - head].copy_from_slice(&now[head..]);
        self.bytes = rest;
        Ok(now.len())
    }
}

fn connection_ended() -> Error {
    Error::new(ErrorKind::Unavailable, "the connection ended")
}

/// The sending half.
struct MemorySink<'a> {
    bytes: Vec<u8>,
    reader_waits: &'a dyn Fn() -> bool,
}

impl FrameSink for MemorySink<'_> {
    fn send_parts(&mut self, head: &[u8], slices: &[&[u8]], tail: [&[u8]; 2], _more: bool) -> Result<()> {
        self.bytes.extend_from_slice(head);
        slices.iter().for_each(|slice| self.bytes.extend_from_slice(slice));
        tail.iter().for_each(|part| self.bytes.extend_from_slice(part));
        Ok(())
    }

    fn send_file(&mut self, file: BorrowedFd<'_>, offset: u64, len: usize, _more: bool) -> Result<()> {
        let file = file.try_clone_to_owned().map(std::fs::File::from);
        let start = self.bytes.len();
        self.bytes.resize(start + len, 0);
        file.and_then(|file| file.read_exact_at(&mut self.bytes[start..], offset)).map_err(|e| {
            self.bytes.truncate(start);
            Error::io("sending from a file failed", &e)
        })
    }

    fn check_reader(&mut self) -> Result<()> {
        if (self.reader_waits)() { Ok(()) } else { Err(Error::new(ErrorKind::Unavailable, "the reader is gone")) }
    }
}

/// A call whose connection is of no use any more.
pub(crate) fn broken_call(kind: ErrorKind, why: &str) -> CallError {
    CallError::Broken(Error::new(kind, why))
}
