//! The reader's side: a queue pair per channel, the caller's memory lent to the node for the length of a call.
//! It knows neither pools of channels nor what requests mean.

use crate::depths::{READER, SOON};
use crate::rail::{Nearness, Open, Patience, Rail};
use crate::session::{Arrived, Line, Session, Takes, equip, terms};
use spurline_proto::rdma::{MessageKind, Region, Terms};
use spurline_proto::{Op, Request};
use spurline_transport::{Answer, Breaker, CallError, Channel, Connector, Endpoints, TransportKind, prove};
use spurline_trust::Trust;
use spurline_types::{Error, ErrorKind, Result, Stats};
use spurline_verbs::{CmChannel, Lent, MemoryRegion, QueuePair, Settled};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Makes RDMA channels to one peer from one rail.
pub struct RdmaConnector {
    rail: Arc<Rail>,
    peer: SocketAddr,
    shown: String,
    patience: Patience,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
}

impl RdmaConnector {
    /// Will connect to `peer` from `rail`.
    pub fn new(rail: Arc<Rail>, peer: SocketAddr, patience: Patience, stats: Arc<Stats>) -> Self {
        RdmaConnector { rail, peer, shown: peer.to_string(), patience, trust: Trust::anyone(), stats }
    }

    /// The same, proving what `trust` has and asking the peer for it.
    pub fn trusting(mut self, trust: Arc<Trust>) -> Self {
        self.trust = trust;
        self
    }

    /// Connects and gives the channel as its own type.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub fn open(&self, deadline: Instant) -> Result<RdmaChannel> {
        let context = |e: Error| e.context(format_args!("rail {}", self.rail.name()));
        self.rail.device()?;
        let mut open = self.rail.usable()?;
        let connect = |open: &Open| -> Result<Option<Session>> {
            let mut id = CmChannel::new(self.rail.verbs())?.id()?;
            id.resolve(self.rail.ip(), self.peer, deadline)?;
            if !id.is_on(open.domain.context()) {
                return Ok(None);
            }
            // Completions of different channels are spread over the processors the device interrupts.
            static SPREAD: AtomicU32 = AtomicU32::new(0);
            let mut pair = QueuePair::new(id, &open.domain, READER, SPREAD.fetch_add(1, Ordering::Relaxed))?;
            equip(&mut pair, &open.memory, READER, deadline)?;
            let said = pair.connect(self.patience.connect_options(), &terms(READER).encode(), deadline)?;
            let peer = Terms::decode(&said)?;
            Ok(Some(Session::new(pair, READER, peer, Takes::ANSWERS)))
        };
        let session = match connect(&open).map_err(context)? {
            Some(session) => session,
            None => {
                self.rail.let_go(&open);
                open = self.rail.device()?;
                let changing = || Error::new(ErrorKind::Unavailable, "its RDMA device is being changed");
                connect(&open).and_then(|session| session.ok_or_else(changing)).map_err(context)?
            }
        };
        open.watch(session.pair.breaker());
        let (local, peer) = session.pair.id().addresses();
        let shown = |addr: Option<SocketAddr>, or: String| addr.map_or(or, |addr| addr.to_string());
        let endpoints = Endpoints {
            kind: TransportKind::Rdma,
            local: shown(local, self.rail.ip().to_string()),
            peer: shown(peer, self.shown.clone()),
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
        // Nothing is encrypted on a rail, so there is no binding.
        prove(&mut channel, &self.trust, b"", deadline)?;
        Ok(channel)
    }
}

impl Connector for RdmaConnector {
    fn prepare(&self) -> Result<()> {
        self.rail.device().map(drop)
    }
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        Ok(Box::new(self.open(deadline)?))
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Rdma
    }
    fn peer(&self) -> &str {
        &self.shown
    }
}

/// One RDMA connection of a reader.
pub struct RdmaChannel {
    session: Session,
    memory: Arc<MemoryRegion>,
    /// The rail's.
    numa_node: Option<u32>,
    request: Vec<u8>,
    next_id: u64,
    broken: bool,
    endpoints: Endpoints,
    patience: Patience,
    stats: Arc<Stats>,
}

struct PairBreaker(spurline_verbs::Breaker);

impl Breaker for PairBreaker {
    fn break_off(&self) {
        self.0.break_now("it was broken off here");
    }
}

/// What one call is about.
struct Call<'a> {
    op: Op,
    id: u64,
    frame: &'a [u8],
    /// The most payload that is accepted.
    room: usize,
    patience: Patience,
    deadline: Instant,
}

impl RdmaChannel {
    fn exchange(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, CallError> {
        let id = self.next_id;
        self.next_id += 1;
        self.request.clear();
        body.clear();
        // A request that does not fit was never sent, so the channel is as good as before.
        let refused = |e: Error| CallError::Answered(e);
        request.encode(id, &mut self.request).map_err(|e| refused(Error::new(ErrorKind::Invalid, e.to_string())))?;
        let call =
            Call { op: request.op(), id, frame: &self.request, room: dst.len(), patience: self.patience, deadline };
        let Session { pair, line } = &mut self.session;
        if dst.is_empty() {
            return call.run(pair, line, Region::default(), body, progress, meanwhile);
        }
        let mut nearness = Nearness::default();
        let answer = if self.memory.contains(dst) {
            nearness.count(self.memory.pool(), self.numa_node, dst);
            let lent = pair.lend(&self.memory, dst, |pair, lent| {
                settle(call.run(pair, line, region(lent), body, progress, meanwhile))
            });
            lent.map_err(|e| refused(e.into()))??
        } else {
            // Memory the node can't reach: the payload goes through a buffer of the pool.
            let pool = self.memory.pool();
            let mut bounce = pool.alloc_near(dst.len(), self.numa_node, deadline).map_err(refused)?;
            nearness.count(pool, self.numa_node, &bounce);
            let lent = pair.lend(&self.memory, &mut bounce, |pair, lent| {
                let mut copied = 0;
                let mut landed = |n: usize| {
                    if n > copied {
                        lent.copy_to(copied, &mut dst[copied..n]);
                        copied = n;
                    }
                    progress(n);
                };
                settle(call.run(pair, line, region(lent), body, &mut landed, meanwhile))
            });
            let answer = lent.map_err(|e| refused(e.into()))??;
            self.stats.rdma.bounced_bytes.add(answer.payload_len as u64);
            answer
        };
        self.stats.rdma.recv_bytes.add(answer.payload_len as u64);
        nearness.add_to(&self.stats);
        Ok(answer)
    }
}

fn region(lent: &Lent<'_>) -> Region {
    let region = lent.region();
    Region { addr: region.addr, len: region.len, rkey: region.rkey }
}

/// After a whole answer the node writes no more; after anything else it may.
fn settle(result: Result<Answer, CallError>) -> (Result<Answer, CallError>, Settled) {
    let settled = match &result {
        Err(CallError::Broken(_)) => Settled::No,
        Ok(_) | Err(CallError::Answered(_)) => Settled::Yes,
    };
    (result, settled)
}

impl Call<'_> {
    fn run(
        &self,
        pair: &mut QueuePair,
        line: &mut Line,
        region: Region,
        body: &mut Vec<u8>,
        progress: &mut dyn FnMut(usize),
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, CallError> {
        let broken = CallError::Broken;
        pair.expect_soon(self.room <= SOON);
        line.send_frame(pair, MessageKind::Request, region, self.frame, self.deadline).map_err(broken)?;
        meanwhile();
        let mut landed = 0;
        loop {
            self.wait(pair).map_err(broken)?;
            while let Some(arrived) = line.take(pair, || self.deadline).map_err(broken)? {
                match arrived {
                    Arrived::Grant | Arrived::Part => {}
                    Arrived::Written(announced) => {
                        let so_far = announced.so_far as usize;
                        if so_far < landed || so_far > self.room {
                            let why = format!(
                                "{so_far} bytes of payload after {landed}, at most {} were asked for",
                                self.room
                            );
                            return Err(broken(Error::new(ErrorKind::Protocol, why)));
                        }
                        landed = so_far;
                        progress(landed);
                        if announced.last {
                            return Ok(Answer { payload_len: landed });
                        }
                    }
                    Arrived::Frame(MessageKind::Answer, _) => {
                        let answer = self.answer(line, landed, body)?;
                        if answer.payload_len > landed {
                            progress(answer.payload_len);
                        }
                        return Ok(answer);
                    }
                    Arrived::Frame(kind, _) => {
                        let why = format!("a message of kind {kind:?} where an answer was due");
                        return Err(broken(Error::new(ErrorKind::Protocol, why)));
                    }
                }
            }
        }
    }

    /// Waits for the next arrival; when there is none for a while, asks the peer's NIC for a sign of life.
    fn wait(&self, pair: &mut QueuePair) -> Result<()> {
        if pair.has_arrived()? {
            return Ok(());
        }
        let mut probe_at = Instant::now() + self.patience.probe_every();
        loop {
            if pair.wait(self.deadline.min(probe_at))? {
                return Ok(());
            }
            let now = Instant::now();
            if now >= self.deadline {
                return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline"));
            }
            pair.check()?;
            if pair.under_way() == 0 {
                pair.probe(self.deadline)?;
            }
            probe_at = now + self.patience.probe_every();
        }
    }

    fn answer(&self, line: &Line, landed: usize, body: &mut Vec<u8>) -> Result<Answer, CallError> {
        let broken = CallError::Broken;
        let (header, bytes) = line.assembly.frame().map_err(broken)?;
        header.check_answer(self.op, self.id).map_err(|e| broken(e.into()))?;
        let payload_len = header.payload_len as usize;
        if payload_len > self.room {
            let why = format!("the payload has {payload_len} bytes, at most {} were asked for", self.room);
            return Err(broken(Error::new(ErrorKind::Protocol, why)));
        }
        // Writes that can't tell of themselves (iWARP) are told of by this message alone, which comes after them.
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
            Ok(Answer { payload_len })
        } else {
            Err(CallError::Answered(spurline_proto::decode_error(header.status, body)))
        }
    }
}

impl Channel for RdmaChannel {
    fn call(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError> {
        self.call_while(request, body, dst, progress, deadline, &mut || {})
    }

    fn call_while(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, CallError> {
        // Whatever happens, `meanwhile` runs once.
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
            self.exchange(request, body, dst, progress, deadline, &mut once)
        };
        once();
        match result {
            Err(CallError::Broken(error)) if !self.broken => {
                self.broken = true;
                // Telling the node at once that nobody waits for its answer any more.
                self.session.pair.disconnect();
                self.session.pair.breaker().break_now("an earlier call failed");
                Err(CallError::Broken(error.context(format_args!("{request} of {}", self.endpoints))))
            }
            other => other,
        }
    }

    fn breaker(&self) -> Option<Arc<dyn Breaker>> {
        Some(Arc::new(PairBreaker(self.session.pair.breaker())))
    }

    fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    fn probe(&mut self) -> bool {
        // Between calls only credits may arrive.
        let deadline = Instant::now() + self.patience.probe_every();
        !self.broken
            && self.session.pair.check().is_ok()
            && loop {
                match self.session.take(|| deadline) {
                    Ok(None) => break true,
                    Ok(Some(Arrived::Grant)) => {}
                    Ok(Some(_)) | Err(_) => break false,
                }
            }
    }
}
