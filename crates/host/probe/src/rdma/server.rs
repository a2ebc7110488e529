//! The server's end of streams over verbs: a listener for each measurement, a thread for each stream. Knows the measurement only
//! by token.

use super::ping_pong::{next_number, send_region, wait_number, write_number};
use super::{
    OPTIONS, SMALL, StreamDevice, decode_name, decode_region, encode_region, next_arrival, open_domain, send_small,
};
use crate::message::{ProbeOp, ProbePlan};
use crate::stream::{StopSignal, WAIT_TICK};
use crate::tcp::ServedBytes;
use spurline_types::{Error, Result};
use spurline_verbs::{CmChannel, CmEventKind, CmId, LoanSettled, MemorySlot, QueuePair, QueuePairBreaker, VerbsError};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A deadline that is never reached, as in the client.
const NO_DEADLINE: Duration = Duration::from_secs(30 * 86_400);

/// Accepts the streams of a measurement.
pub struct RdmaListener {
    channel: Arc<CmChannel>,
    // Keeps the listener open.
    _id: CmId,
    ip: IpAddr,
    port: u16,
}

pub struct ConnectedStream {
    pair: QueuePair,
    rail: StreamDevice,
    large: Vec<MemorySlot>,
    op: ProbeOp,
}

impl ConnectedStream {
    /// Ends the connection from another thread.
    pub fn breaker(&self) -> QueuePairBreaker {
        self.pair.breaker()
    }
}

impl RdmaListener {
    /// Listens on the device with this address.
    ///
    /// # Errors
    /// Without a device, or when the device can't be used.
    pub fn new(ip: IpAddr) -> Result<RdmaListener> {
        let (verbs, _) = open_domain(ip)?;
        let channel = CmChannel::new(&verbs)?;
        let mut id = channel.create_id()?;
        let port = id.listen(SocketAddr::new(ip, 0), 128)?.port();
        Ok(RdmaListener { channel, _id: id, ip, port })
    }

    /// The port, in rdma_cm's own port space.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Accepts connections of the measurement `token` and passes each, with the stream's index, to `begin`, until `stop` is cut;
    /// then breaks all. `begin` must not block.
    pub fn accept_streams(
        &self,
        token: u64,
        plan: &ProbePlan,
        stop: &StopSignal,
        mut begin: impl FnMut(usize, ConnectedStream),
    ) {
        let mut pending: HashMap<usize, (usize, ConnectedStream)> = HashMap::new();
        let mut breakers: HashMap<usize, QueuePairBreaker> = HashMap::new();
        while !stop.is_aborted() {
            let Ok(event) = self.channel.next_event(Instant::now() + WAIT_TICK) else { break };
            let Some(event) = event else { continue };
            match event.kind {
                CmEventKind::ConnectRequest { id, private } => {
                    let stream = decode_name(&private).filter(|(its, _)| *its == token).map(|(_, stream)| stream);
                    let Some((stream, op)) = stream.and_then(|s| Some((s, *plan.streams.get(s)?))) else {
                        id.reject(b"no measurement has that token");
                        continue;
                    };
                    let key = id.key();
                    // A drop refuses the connection.
                    if let Ok(connected) = self.accept_stream(id, op, plan) {
                        breakers.insert(key, connected.breaker());
                        pending.insert(key, (stream, connected));
                    }
                }
                CmEventKind::Established { .. } => {
                    if let Some((stream, connected)) = pending.remove(&event.key) {
                        begin(stream, connected);
                    }
                }
                CmEventKind::Disconnected | CmEventKind::DeviceRemoved => {
                    if let Some(breaker) = breakers.remove(&event.key) {
                        breaker.break_now("the client ended it, its process died, or the device went away");
                    }
                }
                _ => {}
            }
        }
        breakers.values().for_each(|breaker| breaker.break_now("the measurement is over"));
    }

    fn accept_stream(&self, id: CmId, op: ProbeOp, plan: &ProbePlan) -> Result<ConnectedStream> {
        let mut rail = StreamDevice::open(self.ip, op, plan)?;
        let mut pair = QueuePair::new(id, &rail.domain, rail.depths, 0)?;
        let arrive = match op {
            ProbeOp::Send => plan.depth as usize,
            ProbeOp::Echo => 1,
            _ => 0,
        };
        let large = rail.post_receives(&mut pair, arrive)?;
        rail.allow_reads(&mut pair, op);
        pair.accept(OPTIONS, &[])?;
        Ok(ConnectedStream { pair, rail, large, op })
    }
}

/// Serves a stream until the client's end or until `stop` is cut; counts into `served`.
///
/// # Errors
/// When the client did not end the stream.
pub fn serve_stream(
    mut connected: ConnectedStream,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<()> {
    let ended = match connected.op {
        ProbeOp::Write | ProbeOp::Fetch => serve_one_sided(&mut connected, stop),
        ProbeOp::Read => serve_reads(&mut connected, plan, stop, served),
        ProbeOp::Send => serve_sends(&mut connected, plan, stop, served),
        ProbeOp::Echo => serve_echoes(&mut connected, plan, stop, served),
        ProbeOp::Receive => serve_receives(&mut connected, plan, stop, served),
        ProbeOp::PingPong => serve_ping_pongs(&mut connected, plan, stop, served),
    };
    match ended {
        // The client left, or the measurement is over.
        Err(VerbsError::Disconnected { .. }) => Ok(()),
        other => other.map_err(Error::from),
    }
}

/// Lends memory and waits for the end; the NIC does the rest, and the server counts nothing.
fn serve_one_sided(connected: &mut ConnectedStream, stop: &StopSignal) -> Result<(), VerbsError> {
    let mut small = std::mem::take(&mut connected.rail.small);
    let (memory, data) = connected.rail.memory_and_data();
    connected.pair.lend_memory(memory, data, |pair, lent| {
        let mut go = || -> Result<(), VerbsError> {
            send_small(pair, &mut small, &encode_region(lent.region()), Instant::now() + WAIT_TICK * 8)?;
            while !stop.is_aborted() {
                next_arrival(pair)?;
            }
            Ok(())
        };
        (go(), LoanSettled::No)
    })?
}

/// Writes into the memory that each request names.
fn serve_reads(
    connected: &mut ConnectedStream,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<(), VerbsError> {
    let rail = &connected.rail;
    connected.pair.write_borrowed(Instant::now() + NO_DEADLINE, |writing| {
        let mut number = 0u32;
        while !stop.is_aborted() {
            let Some(got) = next_arrival(writing.pair())? else { continue };
            let region = decode_region(&got.slot.bytes()[..got.len.min(SMALL)]);
            writing.pair().post_receive(got.slot)?;
            let Some(region) = region else { return Err(VerbsError::Misuse("a request that names no memory".into())) };
            number = number.wrapping_add(1);
            writing.post_write(&rail.memory, &rail.data, region, 0, Some(number))?;
            served.sent += plan.size;
        }
        Ok(())
    })
}

/// Receives messages and reports the number.
fn serve_sends(
    connected: &mut ConnectedStream,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<(), VerbsError> {
    let mut small = std::mem::take(&mut connected.rail.small);
    let mut count = 0u64;
    while !stop.is_aborted() {
        let Some(got) = next_arrival(&mut connected.pair)? else { continue };
        let mut next = Some(got);
        while let Some(got) = next {
            connected.pair.post_receive(got.slot)?;
            count += 1;
            served.received += plan.size;
            next = connected.pair.poll_receive()?;
        }
        send_small(&mut connected.pair, &mut small, &count.to_le_bytes(), Instant::now() + WAIT_TICK * 8)?;
    }
    Ok(())
}

/// Answers each small message with a message of the operation's size.
fn serve_receives(
    connected: &mut ConnectedStream,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<(), VerbsError> {
    let len = plan.size as usize;
    std::mem::take(&mut connected.large).into_iter().for_each(|slot| connected.pair.keep_slot(slot));
    while !stop.is_aborted() {
        let Some(got) = next_arrival(&mut connected.pair)? else { continue };
        connected.pair.post_receive(got.slot)?;
        let deadline = Instant::now() + WAIT_TICK * 8;
        let slot = connected.pair.take_slot(deadline)?;
        connected.pair.send_message(slot, len, deadline)?;
        served.sent += plan.size;
    }
    Ok(())
}

/// Lends memory, and answers each write with a write.
fn serve_ping_pongs(
    connected: &mut ConnectedStream,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<(), VerbsError> {
    let len = plan.size as usize;
    let mut small = std::mem::take(&mut connected.rail.small);
    let mut large = std::mem::take(&mut connected.large);
    let (memory, data) = connected.rail.memory_and_data();
    connected.pair.lend_memory(memory, data, |pair, lent| {
        let mut go = || -> Result<(), VerbsError> {
            send_region(pair, &mut small, lent, std::mem::take(&mut large))?;
            let mut client_region = None;
            while client_region.is_none() && !stop.is_aborted() {
                let Some(got) = next_arrival(pair)? else { continue };
                client_region = decode_region(&got.slot.bytes()[..got.len.min(SMALL)]).filter(|r| r.len >= plan.size);
                pair.post_receive(got.slot)?;
            }
            let Some(client_region) = client_region else { return Ok(()) };
            let mut number = 1;
            let far = Instant::now() + NO_DEADLINE;
            while !stop.is_aborted() {
                if !wait_number(pair, lent, len - 1, number, stop)? {
                    continue;
                }
                write_number(pair, len, client_region, number, far)?;
                number = next_number(number);
                served.received += plan.size;
                served.sent += plan.size;
            }
            Ok(())
        };
        (go(), LoanSettled::No)
    })?
}

/// Returns each message.
fn serve_echoes(
    connected: &mut ConnectedStream,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<(), VerbsError> {
    let len = plan.size as usize;
    while !stop.is_aborted() {
        let Some(got) = next_arrival(&mut connected.pair)? else { continue };
        connected.pair.post_receive(got.slot)?;
        let slot = match connected.large.pop() {
            Some(slot) => Some(slot),
            None => {
                // The client received the message, or would send no other; only the acknowledgement may be missing.
                connected.pair.wait_in_flight(0, Instant::now() + WAIT_TICK * 8)?;
                connected.pair.free_slot()?
            }
        };
        let Some(slot) = slot else {
            return Err(VerbsError::Misuse("echoes go one at a time".into()));
        };
        connected.pair.send_message(slot, len, Instant::now() + WAIT_TICK * 8)?;
        served.received += plan.size;
        served.sent += plan.size;
    }
    Ok(())
}
