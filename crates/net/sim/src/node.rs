//! A peer in memory: serves on the caller's own thread, answers as a stream of bytes that faults can cut.
//! Its frames go through the code that TCP uses.

use crate::{Fault, FaultPlan};
use parking_lot::{Condvar, Mutex};
use spurline_proto::{HEADER_LEN, Header, Request};
use spurline_transport::{
    Answer, Breaker, ByteStream, CallError, Channel, ConnState, Connector, Endpoints, FrameResponder, FrameSink, Next,
    Service, TransportKind, dispatch, receive_answer,
};
use spurline_types::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What follows the bytes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    /// The next request.
    Continue,
    /// The connection ends.
    Close,
    /// Nothing until the deadline.
    Stall,
}

type Play = dyn Fn(&Header, &[u8], &ConnState) -> (Vec<u8>, After) + Send + Sync;

/// A node in memory. Cheap to clone.
#[derive(Clone)]
pub struct SimNode {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    play: Box<Play>,
    service: Option<Arc<dyn Service>>,
    plan: Arc<FaultPlan>,
    /// Whether it runs, and how many times it was killed: connections of an earlier life are dead.
    life: Mutex<(bool, u64)>,
    killed: Condvar,
    next_conn: AtomicU64,
}

impl SimNode {
    /// A running node that answers by `service` and fails by `plan`.
    pub fn new(name: &str, service: Arc<dyn Service>, plan: Arc<FaultPlan>) -> Self {
        let served = Arc::clone(&service);
        let play = move |header: &Header, body: &[u8], conn: &ConnState| {
            let mut sink = Memory(Vec::new());
            let next = dispatch(conn, header, body, &*served, &mut FrameResponder::new(&mut sink, header));
            (sink.0, if next == Next::Continue { After::Continue } else { After::Close })
        };
        Self::make(name, Box::new(play), Some(service), plan)
    }

    /// A running node that answers by `play`: the bytes it sends for a request, and what then.
    pub fn playing(
        name: &str,
        play: impl Fn(&Header) -> (Vec<u8>, After) + Send + Sync + 'static,
        plan: Arc<FaultPlan>,
    ) -> Self {
        Self::make(name, Box::new(move |header, _, _| play(header)), None, plan)
    }

    fn make(name: &str, play: Box<Play>, service: Option<Arc<dyn Service>>, plan: Arc<FaultPlan>) -> Self {
        let inner = Inner {
            name: name.to_owned(),
            play,
            service,
            plan,
            life: Mutex::new((true, 0)),
            killed: Condvar::new(),
            next_conn: AtomicU64::new(1),
        };
        SimNode { inner: Arc::new(inner) }
    }

    /// Ends all connections; new ones are refused until [`SimNode::start`].
    pub fn kill(&self) {
        let mut life = self.inner.life.lock();
        *life = (false, life.1 + 1);
        self.inner.killed.notify_all();
    }

    /// Accepts connections again.
    pub fn start(&self) {
        self.inner.life.lock().0 = true;
    }

    /// Connections made so far, refused ones included.
    pub fn connects(&self) -> u64 {
        self.inner.next_conn.load(Ordering::Relaxed) - 1
    }

    /// Makes channels to it.
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
        let (up, life) = *inner.life.lock();
        if !up {
            return Err(Error::new(ErrorKind::Unavailable, format!("{}: connection refused", inner.name)));
        }
        let endpoints = Endpoints { kind: TransportKind::Sim, local: format!("sim:{id}"), peer: inner.name.clone() };
        let conn = ConnState::new(id, endpoints);
        let (node, ended) = (Arc::clone(inner), Arc::new(AtomicBool::new(false)));
        Ok(Box::new(SimChannel { node, conn, life, pending: Vec::new(), next_id: 1, broken: false, ended }))
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Sim
    }
    fn peer(&self) -> &str {
        &self.node.inner.name
    }
}

struct SimChannel {
    node: Arc<Inner>,
    conn: ConnState,
    life: u64,
    /// Bytes sent and not received: stray ones, behind an answer.
    pending: Vec<u8>,
    next_id: u64,
    broken: bool,
    /// Ended from another thread.
    ended: Arc<AtomicBool>,
}

struct End {
    node: Arc<Inner>,
    ended: Arc<AtomicBool>,
}

impl Breaker for End {
    fn break_off(&self) {
        // Under the lock, so that a waiting call can't look before and sleep after.
        let _life = self.node.life.lock();
        self.ended.store(true, Ordering::Release);
        self.node.killed.notify_all();
    }
}

impl Inner {
    fn alive(&self, life: u64) -> bool {
        *self.life.lock() == (true, life)
    }
}

impl SimChannel {
    fn exchange(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        let broken = |kind, why: &str| CallError::Broken(Error::new(kind, why));
        let id = self.next_id;
        self.next_id += 1;
        let mut frame = Vec::new();
        request
            .encode(id, &mut frame)
            .map_err(|e| CallError::Answered(Error::new(ErrorKind::Invalid, e.to_string())))?;
        let fault = self.node.plan.draw();
        let ended = self.ended.load(Ordering::Acquire);
        if fault == Some(Fault::Drop) || self.broken || ended || !self.node.alive(self.life) {
            return Err(broken(ErrorKind::Unavailable, "the connection ended"));
        }
        if let Some(Fault::Delay(delay)) = fault {
            std::thread::sleep(delay.min(deadline.saturating_duration_since(Instant::now())));
        }
        let (head, sent_body) =
            frame.split_first_chunk::<HEADER_LEN>().ok_or_else(|| broken(ErrorKind::Invalid, "no header"))?;
        let header = Header::decode(head).map_err(|e| CallError::Broken(e.into()))?;
        let (answer, mut after) = (self.node.play)(&header, &sent_body[..header.body_len as usize], &self.conn);
        let mut bytes = std::mem::take(&mut self.pending);
        bytes.extend_from_slice(&answer);
        match fault {
            Some(Fault::Cut) => {
                bytes.truncate(self.node.plan.below(bytes.len()));
                after = After::Close;
            }
            Some(Fault::Garbage) => {
                let damaged = bytes.len().min(HEADER_LEN);
                bytes[..damaged].fill(0xdb);
            }
            Some(Fault::Twice) => bytes.extend_from_slice(&answer),
            Some(Fault::Stall) => {
                bytes.clear();
                after = After::Stall;
            }
            _ => {}
        }
        let mut replay = Replay { node: &self.node, life: self.life, ended: &self.ended, bytes: &bytes, after };
        let result = receive_answer(&mut replay, request.op(), id, body, dst, progress, deadline);
        self.pending = replay.bytes.to_vec();
        self.broken |= after == After::Close;
        result
    }
}

impl Channel for SimChannel {
    fn call(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        let result = self.exchange(request, body, dst, progress, deadline);
        self.broken |= matches!(result, Err(CallError::Broken(_)));
        result.map_err(|e| match e {
            CallError::Broken(_) => e.context(format_args!("{request} of {}", self.conn.endpoints())),
            answered => answered,
        })
    }

    fn breaker(&self) -> Option<Arc<dyn Breaker>> {
        Some(Arc::new(End { node: Arc::clone(&self.node), ended: Arc::clone(&self.ended) }))
    }

    fn endpoints(&self) -> &Endpoints {
        self.conn.endpoints()
    }

    fn probe(&mut self) -> bool {
        !self.broken && self.pending.is_empty() && self.node.alive(self.life)
    }
}

impl Drop for SimChannel {
    fn drop(&mut self) {
        if self.conn.peer_name().is_some()
            && let Some(service) = &self.node.service
        {
            service.closed(&self.conn);
        }
    }
}

/// The bytes of an answer, arriving in pieces of drawn lengths.
struct Replay<'a> {
    node: &'a Inner,
    life: u64,
    ended: &'a AtomicBool,
    bytes: &'a [u8],
    after: After,
}

impl ByteStream for Replay<'_> {
    fn receive(&mut self, first: &mut [u8], second: &mut [u8], all: bool, deadline: Instant) -> Result<usize> {
        let ended = || Error::new(ErrorKind::Unavailable, "the connection ended");
        if self.bytes.is_empty() && self.after == After::Close {
            return Err(ended());
        }
        if self.bytes.is_empty() {
            let mut life = self.node.life.lock();
            while *life == (true, self.life) && !self.ended.load(Ordering::Acquire) {
                if self.node.killed.wait_until(&mut life, deadline).timed_out() {
                    return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline"));
                }
            }
            return Err(ended());
        }
        let there = self.bytes.len().min(first.len() + second.len());
        let n = if all { there } else { 1 + self.node.plan.below(there) };
        let (now, rest) = self.bytes.split_at(n.min(there));
        let head = now.len().min(first.len());
        first[..head].copy_from_slice(&now[..head]);
        second[..now.len() - head].copy_from_slice(&now[head..]);
        self.bytes = rest;
        Ok(now.len())
    }
}

/// The sending half.
struct Memory(Vec<u8>);

impl FrameSink for Memory {
    fn send(&mut self, head: &[u8], slices: &[&[u8]], tail: [&[u8]; 2], _more: bool) -> Result<()> {
        self.0.extend_from_slice(head);
        slices.iter().for_each(|slice| self.0.extend_from_slice(slice));
        tail.iter().for_each(|part| self.0.extend_from_slice(part));
        Ok(())
    }

    fn send_file(&mut self, file: BorrowedFd<'_>, offset: u64, len: usize, _more: bool) -> Result<()> {
        let file = file.try_clone_to_owned().map(std::fs::File::from);
        let start = self.0.len();
        self.0.resize(start + len, 0);
        file.and_then(|file| file.read_exact_at(&mut self.0[start..], offset)).map_err(|e| {
            self.0.truncate(start);
            Error::io("sending from a file failed", &e)
        })
    }
}
