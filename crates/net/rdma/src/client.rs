//! The reader's side: a queue pair for each channel; the caller's memory is loaned to the node during a call, for writes or for
//! reads. Knows neither pools of channels nor the meaning of requests.

use crate::depths::{READER, READS, SOON};
use crate::rail::{NumaBytes, OpenRail, RdmaRail, RdmaTimeouts};
use crate::session::{ArrivedMessage, FrameLimits, MessageStream, RdmaSession, own_terms, post_buffers};
use spurline_proto::rdma::{ConnectTerms, MessageKind, PayloadRegion};
use spurline_proto::{FrameOp, NodeRequest};
use spurline_transport::{
    CallAnswer, CallError, Channel, ChannelBreaker, ConnectionEndpoints, Connector, TransportKind, prove_token,
};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_verbs::{CmChannel, LoanSettled, MemoryRegion, QueuePair, RemoteRegion};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Opens RDMA channels to a peer from a rail.
pub struct RdmaConnector {
    rail: Arc<RdmaRail>,
    peer: SocketAddr,
    shown: String,
    patience: RdmaTimeouts,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
}

impl RdmaConnector {
    /// A connector to `peer` from `rail`.
    pub fn new(rail: Arc<RdmaRail>, peer: SocketAddr, patience: RdmaTimeouts, stats: Arc<Stats>) -> Self {
        RdmaConnector { rail, peer, shown: peer.to_string(), patience, trust: Trust::without_checks(), stats }
    }

    /// Proves the credentials of `trust` to the peer, and requires the peer's proof.
    pub fn with_trust(mut self, trust: Arc<Trust>) -> Self {
        self.trust = trust;
        self
    }

    /// Connects; returns the concrete channel type.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub fn open_channel(&self, deadline: Instant) -> Result<RdmaChannel> {
        let context = |e: Error| e.context(format_args!("rail {}", self.rail.name()));
        self.rail.open_device()?;
        let mut open = self.rail.usable_device()?;
        let connect = |open: &OpenRail| -> Result<Option<RdmaSession>> {
            let mut id = CmChannel::new(self.rail.verbs())?.create_id()?;
            id.resolve(self.rail.ip(), self.peer, deadline)?;
            if !id.is_on(open.domain.context()) {
                return Ok(None);
            }
            // Distributes the completions of channels over the device's interrupt vectors.
            static SPREAD: AtomicU32 = AtomicU32::new(0);
            let mut pair = QueuePair::new(id, &open.domain, READER, SPREAD.fetch_add(1, Ordering::Relaxed))?;
            if open.memory.allows_remote_read() {
                pair.allow_reads(READS);
            }
            post_buffers(&mut pair, &open.memory, READER, deadline)?;
            let said = pair.connect(self.patience.connect_options(), &own_terms(READER).encode(), deadline)?;
            let peer = ConnectTerms::decode(&said)?;
            Ok(Some(RdmaSession::new(pair, READER, peer, FrameLimits::ANSWERS)))
        };
        let session = match connect(&open).map_err(context)? {
            Some(session) => session,
            None => {
                self.rail.forget_device(&open);
                open = self.rail.open_device()?;
                connect(&open)
                    .and_then(|session| {
                        session.ok_or_else(|| Error::new(ErrorKind::Unavailable, "its RDMA device is being changed"))
                    })
                    .map_err(context)?
            }
        };
        open.watch_breaker(session.pair.breaker());
        let (local, peer) = session.pair.id().addresses();
        let endpoints = ConnectionEndpoints {
            kind: TransportKind::Rdma,
            local: shown_address(local, self.rail.ip().to_string()),
            peer: shown_address(peer, self.shown.clone()),
        };
        let mut channel = RdmaChannel {
            session,
            memory: Arc::clone(&open.memory),
            numa_node: open.numa_node,
            request: Vec::with_capacity(512),
            next_id: 1,
            broken: false,
            endpoints,
            patience: self.patience,
            stats: Arc::clone(&self.stats),
        };
        // A rail has no encryption, so there is no channel binding.
        prove_token(&mut channel, &self.trust, b"", deadline)?;
        Ok(channel)
    }
}

fn shown_address(addr: Option<SocketAddr>, or: String) -> String {
    addr.map_or(or, |addr| addr.to_string())
}

impl Connector for RdmaConnector {
    fn prepare_device(&self) -> Result<()> {
        self.rail.open_device().map(drop)
    }
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        Ok(Box::new(self.open_channel(deadline)?))
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }
    fn peer(&self) -> &str {
        &self.shown
    }
}

/// An RDMA connection of a reader.
pub struct RdmaChannel {
    session: RdmaSession,
    memory: Arc<MemoryRegion>,
    /// The rail's NUMA node.
    numa_node: Option<u32>,
    request: Vec<u8>,
    next_id: u64,
    broken: bool,
    endpoints: ConnectionEndpoints,
    patience: RdmaTimeouts,
    stats: Arc<Stats>,
}

struct RdmaBreaker(spurline_verbs::QueuePairBreaker);

impl ChannelBreaker for RdmaBreaker {
    fn break_channel(&self) {
        self.0.break_now("it was ended on this side");
    }
}

struct ChannelCall<'a> {
    op: FrameOp,
    id: u64,
    frame: &'a [u8],
    /// The maximum payload.
    room: usize,
    /// Whether the answer is expected soon, so that polling may pay.
    soon: bool,
    patience: RdmaTimeouts,
    deadline: Instant,
}

impl RdmaChannel {
    /// Encodes a request; returns the request's number, and whether the payload is part of the frame. A request that can't
    /// be sent leaves the channel usable.
    fn encode_request(&mut self, request: &NodeRequest<'_>) -> Result<(u64, bool), CallError> {
        let id = self.next_id;
        self.next_id += 1;
        self.request.clear();
        request.encode(id, &mut self.request).map_err(|e| CallError::not_sent(&e))?;
        let payload = request.payload();
        let within_frame = payload.len() + self.request.len() <= self.session.line.message_room();
        if within_frame {
            self.request.extend_from_slice(payload);
        }
        Ok((id, within_frame))
    }

    fn exchange_frames(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<CallAnswer, CallError> {
        body.clear();
        let (id, within_frame) = self.encode_request(request)?;
        let payload = request.payload();
        let call = ChannelCall {
            op: request.op(),
            id,
            frame: &self.request,
            room: dst.len(),
            soon: dst.len().max(payload.len()) <= SOON,
            patience: self.patience,
            deadline,
        };
        let RdmaSession { pair, line } = &mut self.session;
        let mut nearness = NumaBytes::default();
        if !payload.is_empty() && !within_frame {
            if !self.memory.allows_remote_read() || !dst.is_empty() {
                let why = format!("{request}: nodes may not read the memory of {}", self.endpoints);
                return Err(CallError::Answered(Error::new(ErrorKind::Unsupported, why)));
            }
            let mut offer = |payload: &[u8]| {
                nearness.count_bytes(self.memory.pool(), self.numa_node, payload);
                let offered = pair.offer_memory(&self.memory, payload, |pair, region| {
                    loan_outcome(call.run_call(pair, line, wire_region(region), body, progress, meanwhile))
                });
                offered.map_err(|e| CallError::Answered(e.into()))?
            };
            let answer = if self.memory.contains(payload) {
                offer(payload)?
            } else {
                // Memory that the node cannot access: the bytes go through a buffer of the pool.
                let mut bounce = self
                    .memory
                    .pool()
                    .alloc_near(payload.len(), self.numa_node, deadline)
                    .map_err(CallError::Answered)?;
                bounce[..payload.len()].copy_from_slice(payload);
                let answer = offer(&bounce[..payload.len()])?;
                self.stats.rdma.bounced_bytes.add(payload.len() as u64);
                answer
            };
            self.stats.rdma.send_bytes.add(payload.len() as u64);
            nearness.add_to(&self.stats);
            return Ok(answer);
        }
        if dst.is_empty() {
            let answer = call.run_call(pair, line, PayloadRegion::default(), body, progress, meanwhile)?;
            self.stats.rdma.send_bytes.add(payload.len() as u64);
            return Ok(answer);
        }
        let answer = if self.memory.contains(dst) {
            nearness.count_bytes(self.memory.pool(), self.numa_node, dst);
            let lent = pair.lend_memory(&self.memory, dst, |pair, lent| {
                loan_outcome(call.run_call(pair, line, wire_region(lent.region()), body, progress, meanwhile))
            });
            lent.map_err(|e| CallError::Answered(e.into()))??
        } else {
            // Memory that the node cannot access: the payload goes through a buffer of the pool.
            let pool = self.memory.pool();
            let mut bounce = pool.alloc_near(dst.len(), self.numa_node, deadline).map_err(CallError::Answered)?;
            nearness.count_bytes(pool, self.numa_node, &bounce);
            let lent = pair.lend_memory(&self.memory, &mut bounce, |pair, lent| {
                let mut copied = 0;
                loan_outcome(call.run_call(
                    pair,
                    line,
                    wire_region(lent.region()),
                    body,
                    &mut |n| {
                        if n > copied {
                            lent.copy_to(copied, &mut dst[copied..n]);
                            copied = n;
                        }
                        progress(n);
                    },
                    meanwhile,
                ))
            });
            let answer = lent.map_err(|e| CallError::Answered(e.into()))??;
            self.stats.rdma.bounced_bytes.add(answer.payload_len as u64);
            answer
        };
        self.stats.rdma.recv_bytes.add(answer.payload_len as u64);
        nearness.add_to(&self.stats);
        Ok(answer)
    }
}

fn wire_region(region: RemoteRegion) -> PayloadRegion {
    PayloadRegion { addr: region.addr, len: region.len, rkey: region.rkey }
}

/// After a complete answer the node neither writes nor reads any more; after any other outcome the node may.
fn loan_outcome(result: Result<CallAnswer, CallError>) -> (Result<CallAnswer, CallError>, LoanSettled) {
    let settled = match &result {
        Err(CallError::Broken(_)) => LoanSettled::No,
        Ok(_) | Err(CallError::Answered(_)) => LoanSettled::Yes,
    };
    (result, settled)
}

impl ChannelCall<'_> {
    fn run_call(
        &self,
        pair: &mut QueuePair,
        line: &mut MessageStream,
        region: PayloadRegion,
        body: &mut Vec<u8>,
        progress: &mut dyn FnMut(usize),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<CallAnswer, CallError> {
        let broken = CallError::Broken;
        pair.expect_soon(self.soon);
        line.send_frame(pair, MessageKind::Request, region, self.frame, self.deadline).map_err(broken)?;
        meanwhile();
        let mut landed = 0;
        loop {
            self.wait_arrival(pair).map_err(broken)?;
            while let Some(arrived) = line.take_arrived(pair, || self.deadline).map_err(broken)? {
                match arrived {
                    ArrivedMessage::Grant | ArrivedMessage::Part => {}
                    ArrivedMessage::Written(announced) => {
                        let so_far = announced.so_far as usize;
                        if so_far < landed || so_far > self.room {
                            let why = format!(
                                "{so_far} bytes of payload after {landed}, at most {} were requested",
                                self.room
                            );
                            return Err(broken(Error::new(ErrorKind::Protocol, why)));
                        }
                        landed = so_far;
                        progress(landed);
                        if announced.last {
                            return Ok(CallAnswer { payload_len: landed });
                        }
                    }
                    ArrivedMessage::Frame(MessageKind::Answer, _) => {
                        let answer = self.decode_answer(line, landed, body)?;
                        if answer.payload_len > landed {
                            progress(answer.payload_len);
                        }
                        return Ok(answer);
                    }
                    ArrivedMessage::Frame(kind, _) => {
                        let why = format!("a message of kind {kind:?} where an answer was expected");
                        return Err(broken(Error::new(ErrorKind::Protocol, why)));
                    }
                }
            }
        }
    }

    /// Waits for the next arrival; probes the peer's NIC whenever nothing arrives for a while.
    fn wait_arrival(&self, pair: &mut QueuePair) -> Result<()> {
        if pair.has_arrived()? {
            return Ok(());
        }
        let mut probe_at = Instant::now() + self.patience.probe_interval();
        loop {
            if pair.wait_arrival(self.deadline.min(probe_at))? {
                return Ok(());
            }
            let now = Instant::now();
            if now >= self.deadline {
                return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline"));
            }
            pair.check_connection()?;
            if pair.in_flight() == 0 {
                pair.post_probe(self.deadline)?;
            }
            probe_at = now + self.patience.probe_interval();
        }
    }

    fn decode_answer(&self, line: &MessageStream, landed: usize, body: &mut Vec<u8>) -> Result<CallAnswer, CallError> {
        let broken = CallError::Broken;
        let (header, bytes) = line.assembly.whole_frame().map_err(broken)?;
        header.check_answer(self.op, self.id).map_err(|e| broken(e.into()))?;
        let payload_len = header.payload_len as usize;
        if payload_len > self.room {
            let why = format!("the payload has {payload_len} bytes, at most {} were requested", self.room);
            return Err(broken(Error::new(ErrorKind::Protocol, why)));
        }
        // Writes without immediate data (iWARP) are announced only by this message, which follows the writes.
        let told = payload_len == landed || landed == 0;
        if bytes.len() != header.body_len as usize || !told {
            let why = format!(
                "an answer with {payload_len} bytes of payload and {} of body came with {landed} and {}",
                header.body_len,
                bytes.len()
            );
            return Err(broken(Error::new(ErrorKind::Protocol, why)));
        }
        body.extend_from_slice(bytes);
        if header.status == 0 {
            Ok(CallAnswer { payload_len })
        } else {
            Err(CallError::Answered(spurline_proto::decode_error(header.status, body)))
        }
    }
}

impl Channel for RdmaChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        self.call_while(request, body, dst, progress, deadline, &mut || {})
    }

    fn call_while(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<CallAnswer, CallError> {
        // In every case `meanwhile` runs exactly once.
        let mut ran = false;
        let mut once = || {
            if !std::mem::replace(&mut ran, true) {
                meanwhile();
            }
        };
        let result = if self.broken {
            let why = format!("{}: the channel broke in an earlier call", self.endpoints);
            Err(CallError::Broken(Error::new(ErrorKind::Unavailable, why)))
        } else {
            self.exchange_frames(request, body, dst, progress, deadline, &mut once)
        };
        once();
        match result {
            Err(CallError::Broken(error)) if !self.broken => {
                self.broken = true;
                // Notifies the node at once that the answer is no longer needed.
                self.session.pair.disconnect();
                self.session.pair.breaker().break_now("an earlier call failed");
                Err(CallError::Broken(error.context(format_args!("{request} of {}", self.endpoints))))
            }
            other => other,
        }
    }

    fn breaker(&self) -> Option<Arc<dyn ChannelBreaker>> {
        Some(Arc::new(RdmaBreaker(self.session.pair.breaker())))
    }

    fn endpoints(&self) -> &ConnectionEndpoints {
        &self.endpoints
    }

    fn looks_alive(&mut self) -> bool {
        // Between calls only credits may arrive.
        let deadline = Instant::now() + self.patience.probe_interval();
        !self.broken
            && self.session.pair.check_connection().is_ok()
            && loop {
                match self.session.take_arrived(|| deadline) {
                    Ok(None) => break true,
                    Ok(Some(ArrivedMessage::Grant)) => {}
                    Ok(Some(_)) | Err(_) => break false,
                }
            }
    }
}
