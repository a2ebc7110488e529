//! The client's end of a stream over verbs. Knows no server except through the queue pair.

use super::ping_pong::{next_number, send_region, wait_number, write_number};
use super::{
    MAX_MEMORY, OPTIONS, SMALL, StreamDevice, decode_region, encode_name, encode_region, next_arrival, send_small,
};
use crate::drive::StreamMeter;
use crate::message::{ProbeOp, ProbePlan};
use crate::stream::{ProbeStream, StopSignal, StreamProgress, WAIT_TICK};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{CmChannel, LoanSettled, MemorySlot, QueuePair, RemoteRegion, VerbsError};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// A deadline that is never reached: a failed path ends the queue pair before.
const NO_DEADLINE: Duration = Duration::from_secs(30 * 86_400);
/// Reads up to this size are polled for [`READ_POLLS`] times before the thread sleeps.
const POLLED_READ_BYTES: usize = 4096;
const READ_POLLS: u32 = 400;

/// The client's end of a stream.
pub struct RdmaProbeStream {
    op: ProbeOp,
    size: u64,
    // Declared before the device, whose memory the pair uses.
    pair: QueuePair,
    rail: StreamDevice,
    /// Target of writes on the server.
    region: Option<RemoteRegion>,
    /// Slots of an operation's size to send from.
    large: Vec<MemorySlot>,
}

impl RdmaProbeStream {
    /// Connects stream `index` of the measurement `token` to a listener, from the device with the address `from`.
    ///
    /// # Errors
    /// When there is no such device, memory can't be registered, or the connection is not complete by `deadline`.
    pub fn connect(
        from: IpAddr,
        to: SocketAddr,
        token: u64,
        index: usize,
        plan: &ProbePlan,
        deadline: Instant,
    ) -> Result<RdmaProbeStream> {
        let op = plan.streams.get(index).copied().unwrap_or(ProbeOp::Read);
        if plan.size > MAX_MEMORY {
            let why = format!("operations of {} bytes: over rdma {MAX_MEMORY} are the most", plan.size);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let mut rail = StreamDevice::open(from, op, plan)?;
        let mut id = CmChannel::new(&rail.verbs)?.create_id()?;
        id.resolve(from, to, deadline)?;
        let mut pair = QueuePair::new(id, &rail.domain, rail.depths, 0)?;
        let arrive = match op {
            ProbeOp::Echo => 1,
            ProbeOp::Receive => plan.depth as usize,
            _ => 0,
        };
        let large = rail.post_receives(&mut pair, arrive)?;
        rail.allow_reads(&mut pair, op);
        pair.connect(OPTIONS, &encode_name(token, index), deadline)?;
        let mut region = None;
        if matches!(op, ProbeOp::Write | ProbeOp::Fetch | ProbeOp::PingPong) {
            while region.is_none() {
                if let Some(got) = next_arrival(&mut pair)? {
                    region = decode_region(&got.slot.bytes()[..got.len.min(SMALL)]).filter(|r| r.len >= plan.size);
                    pair.post_receive(got.slot)?;
                } else if Instant::now() >= deadline {
                    return Err(Error::new(ErrorKind::Timeout, "the server lent no memory to write to"));
                }
            }
        }
        Ok(RdmaProbeStream { op, size: plan.size, pair, rail, region, large })
    }

    /// One-sided writes: only the local NIC reports completions.
    fn run_writes(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let Some(region) = self.region else { return Ok(()) };
        let rail = &self.rail;
        let size = self.size;
        // An error destroys the queue pair, and all operations under way.
        self.pair.write_borrowed(Instant::now() + NO_DEADLINE, |writing| {
            let mut since = Instant::now();
            loop {
                while meter.try_begin(stop) {
                    writing.post_write(&rail.memory, &rail.data, region, 0, None)?;
                }
                let under_way = meter.under_way() as u64;
                if under_way == 0 {
                    return Ok(());
                }
                match writing.pair().wait_in_flight(under_way - 1, Instant::now() + WAIT_TICK) {
                    Ok(()) => since = Instant::now(),
                    Err(VerbsError::Timeout { .. }) => stop.check_stalled(since)?,
                    Err(e) => return Err(e.into()),
                }
                let ops = under_way - writing.pair().in_flight();
                meter.record_progress(StreamProgress { ops: ops as u32, bytes: ops * size });
            }
        })
    }

    /// Requests, each answered by the server's write.
    fn run_reads(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let size = self.size;
        let mut small = std::mem::take(&mut self.rail.small);
        let (memory, data) = self.rail.memory_and_data();
        self.pair.lend_memory(memory, data, |pair, lent| {
            let mut go = || -> Result<()> {
                let mut since = Instant::now();
                loop {
                    while meter.try_begin(stop) {
                        send_small(pair, &mut small, &encode_region(lent.region()), Instant::now() + WAIT_TICK * 8)?;
                    }
                    if meter.under_way() == 0 {
                        return Ok(());
                    }
                    let Some(got) = next_arrival(pair)? else {
                        stop.check_stalled(since)?;
                        continue;
                    };
                    let mut ops = 0;
                    let mut next = Some(got);
                    while let Some(got) = next {
                        ops += u32::from(got.immediate.is_some());
                        pair.post_receive(got.slot)?;
                        next = pair.poll_receive()?;
                    }
                    since = Instant::now();
                    meter.record_progress(StreamProgress { ops, bytes: u64::from(ops) * size });
                }
            };
            let result = go();
            // After an error the server may still write.
            let settled = if result.is_ok() { LoanSettled::Yes } else { LoanSettled::No };
            (result, settled)
        })?
    }

    /// One-sided reads of the server's memory.
    fn run_fetches(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let Some(region) = self.region else { return Ok(()) };
        let mut since = Instant::now();
        let mut slots = std::mem::take(&mut self.large);
        let len = self.size as usize;
        loop {
            while meter.try_begin(stop) {
                // There are as many slots as operations under way.
                let Some(slot) = slots.pop() else { break };
                self.pair.read_slot(slot, len, region, Instant::now() + WAIT_TICK)?;
            }
            let under_way = meter.under_way() as u64;
            if under_way == 0 {
                self.large = slots;
                return Ok(());
            }
            // A short read completes before a sleep would begin.
            for _ in 0..if len <= POLLED_READ_BYTES { READ_POLLS } else { 0 } {
                slots.extend(self.pair.free_slot()?);
                if self.pair.in_flight() < under_way {
                    break;
                }
            }
            match self.pair.wait_in_flight(under_way - 1, Instant::now() + WAIT_TICK) {
                Ok(()) => since = Instant::now(),
                Err(VerbsError::Timeout { .. }) => stop.check_stalled(since)?,
                Err(e) => return Err(e.into()),
            }
            while let Some(slot) = self.pair.free_slot()? {
                slots.push(slot);
            }
            let ops = under_way - self.pair.in_flight();
            meter.record_progress(StreamProgress { ops: ops as u32, bytes: ops * self.size });
        }
    }

    /// Requests, each answered by a message.
    fn run_receives(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let mut small = std::mem::take(&mut self.rail.small);
        let mut since = Instant::now();
        loop {
            while meter.try_begin(stop) {
                send_small(&mut self.pair, &mut small, &[0], Instant::now() + WAIT_TICK * 8)?;
            }
            if meter.under_way() == 0 {
                return Ok(());
            }
            let Some(got) = next_arrival(&mut self.pair)? else {
                stop.check_stalled(since)?;
                continue;
            };
            let mut ops = 0;
            let mut next = Some(got);
            while let Some(got) = next {
                ops += 1;
                self.pair.post_receive(got.slot)?;
                next = self.pair.poll_receive()?;
            }
            since = Instant::now();
            meter.record_progress(StreamProgress { ops, bytes: u64::from(ops) * self.size });
        }
    }

    /// A write to the server and another back; each end polls memory.
    fn run_ping_pongs(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let Some(region) = self.region else { return Ok(()) };
        let len = self.size as usize;
        let mut small = std::mem::take(&mut self.rail.small);
        let mut large = std::mem::take(&mut self.large);
        let (memory, data) = self.rail.memory_and_data();
        self.pair.lend_memory(memory, data, |pair, lent| {
            let mut go = || -> Result<()> {
                send_region(pair, &mut small, lent, std::mem::take(&mut large))?;
                let mut number = 0;
                let far = Instant::now() + NO_DEADLINE;
                while meter.try_begin(stop) {
                    number = next_number(number);
                    write_number(pair, len, region, number, far)?;
                    meter.record_pending();
                    let mut since = None;
                    while !wait_number(pair, lent, len - 1, number, stop)? {
                        // The wait just took a tick.
                        stop.check_stalled(*since.get_or_insert_with(|| Instant::now() - WAIT_TICK))?;
                    }
                    meter.record_single(len as u64);
                }
                Ok(())
            };
            let result = go();
            // Without an answer to every write, the server may still write.
            let settled = if result.is_ok() { LoanSettled::Yes } else { LoanSettled::No };
            (result, settled)
        })?
    }

    /// Messages; the server returns the number.
    fn run_sends(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let mut told = 0u64;
        let mut since = Instant::now();
        let len = self.size as usize;
        loop {
            while meter.try_begin(stop) {
                self.send_message(len)?;
            }
            if meter.under_way() == 0 {
                return Ok(());
            }
            let Some(got) = next_arrival(&mut self.pair)? else {
                stop.check_stalled(since)?;
                continue;
            };
            let count = got.slot.bytes().first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            self.pair.post_receive(got.slot)?;
            let new = count.and_then(|count| count.checked_sub(told)).filter(|n| *n <= meter.under_way() as u64);
            let Some(new) = new else {
                return Err(Error::new(ErrorKind::Protocol, "the server counts messages that were not sent"));
            };
            told += new;
            since = Instant::now();
            meter.record_progress(StreamProgress { ops: new as u32, bytes: new * self.size });
        }
    }

    fn send_message(&mut self, len: usize) -> Result<()> {
        let deadline = Instant::now() + WAIT_TICK * 8;
        let slot = loop {
            if let Some(slot) = self.large.pop() {
                break slot;
            }
            match self.pair.free_slot()? {
                Some(slot) => break slot,
                None => self.pair.wait_in_flight(self.pair.in_flight().saturating_sub(1), deadline)?,
            }
        };
        Ok(self.pair.send_message(slot, len, deadline)?)
    }

    /// A message and the echo.
    fn run_echoes(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        let len = self.size as usize;
        while meter.try_begin(stop) {
            self.send_message(len)?;
            let since = Instant::now();
            let got = loop {
                match next_arrival(&mut self.pair)? {
                    Some(got) => break got,
                    None => stop.check_stalled(since)?,
                }
            };
            self.pair.post_receive(got.slot)?;
            meter.record_progress(StreamProgress { ops: 1, bytes: self.size });
        }
        Ok(())
    }
}

impl ProbeStream for RdmaProbeStream {
    fn run_operations(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        match self.op {
            ProbeOp::Write => self.run_writes(meter, stop),
            ProbeOp::Read => self.run_reads(meter, stop),
            ProbeOp::Send => self.run_sends(meter, stop),
            ProbeOp::Echo => self.run_echoes(meter, stop),
            ProbeOp::Fetch => self.run_fetches(meter, stop),
            ProbeOp::Receive => self.run_receives(meter, stop),
            ProbeOp::PingPong => self.run_ping_pongs(meter, stop),
        }
    }
}
