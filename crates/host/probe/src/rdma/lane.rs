//! The client's end of a stream over verbs. It knows no server but through its queue pair.

use super::ping_pong::{next, put, seen, tell};
use super::{MAX_MEMORY, OPTIONS, Rail, SMALL, arrival, decode, encode, name, say};
use crate::drive::Meter;
use crate::lane::{Lane, Moved, Stop, TICK};
use crate::message::{Op, Plan};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{CmChannel, QueuePair, RemoteRegion, Settled, Slot, VerbsError};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

/// The end of what has no other: the queue pair ends it before, when the path does.
const FAR: Duration = Duration::from_secs(30 * 86_400);
/// Reads of no more bytes are looked for before they are waited for, so many times.
const SHORT: usize = 4096;
const LOOKS: u32 = 400;

/// The client's end of one stream.
pub struct RdmaLane {
    op: Op,
    size: u64,
    // Before the rail, whose memory it uses.
    pair: QueuePair,
    rail: Rail,
    /// Where writes go at the other end.
    region: Option<RemoteRegion>,
    /// Slots of an operation's size to send from.
    large: Vec<Slot>,
}

impl RdmaLane {
    /// Connects stream `index` of the measurement `token` to a listener, from the device that has the address `from`.
    ///
    /// # Errors
    /// When there is no such device, memory can't be registered, or the connection does not stand by `deadline`.
    pub fn connect(
        from: IpAddr,
        to: SocketAddr,
        (token, index): (u64, usize),
        plan: &Plan,
        deadline: Instant,
    ) -> Result<RdmaLane> {
        let op = plan.streams.get(index).copied().unwrap_or(Op::Read);
        if plan.size > MAX_MEMORY {
            let why = format!("operations of {} bytes: over rdma {MAX_MEMORY} are the most", plan.size);
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let mut rail = Rail::open(from, op, plan)?;
        let mut id = CmChannel::new(&rail.verbs)?.id()?;
        id.resolve(from, to, deadline)?;
        let mut pair = QueuePair::new(id, &rail.domain, rail.depths, 0)?;
        let arrive = match op {
            Op::Echo => 1,
            Op::Receive => plan.depth as usize,
            _ => 0,
        };
        let large = rail.equip(&mut pair, arrive)?;
        rail.allow(&mut pair, op);
        pair.connect(OPTIONS, &name(token, index), deadline)?;
        let mut region = None;
        if matches!(op, Op::Write | Op::Fetch | Op::PingPong) {
            while region.is_none() {
                if let Some(got) = arrival(&mut pair)? {
                    region = decode(&got.slot.bytes()[..got.len.min(SMALL)]).filter(|r| r.len >= plan.size);
                    pair.post_receive(got.slot)?;
                } else if Instant::now() >= deadline {
                    return Err(Error::new(ErrorKind::Timeout, "the server lent no memory to write to"));
                }
            }
        }
        Ok(RdmaLane { op, size: plan.size, pair, rail, region, large })
    }

    /// One-sided: only this end's NIC says when a write has arrived.
    fn write(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let Some(region) = self.region else { return Ok(()) };
        let (rail, size) = (&self.rail, self.size);
        // An error destroys the queue pair, and with it what is under way.
        self.pair.writing(Instant::now() + FAR, |writing| {
            let mut since = Instant::now();
            loop {
                while meter.begin(stop) {
                    writing.write(&rail.memory, &rail.data, region, 0, None)?;
                }
                let under_way = meter.under_way() as u64;
                if under_way == 0 {
                    return Ok(());
                }
                match writing.pair().settle(under_way - 1, Instant::now() + TICK) {
                    Ok(()) => since = Instant::now(),
                    Err(VerbsError::Timeout { .. }) => stop.still_nothing(since)?,
                    Err(e) => return Err(e.into()),
                }
                let ops = under_way - writing.pair().under_way();
                meter.moved(Moved { ops: ops as u32, bytes: ops * size });
            }
        })
    }

    /// Asks, and is written to.
    fn read(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let size = self.size;
        let mut small = std::mem::take(&mut self.rail.small);
        let (memory, data) = self.rail.lent();
        self.pair.lend(memory, data, |pair, lent| {
            let mut go = || -> Result<()> {
                let mut since = Instant::now();
                loop {
                    while meter.begin(stop) {
                        say(pair, &mut small, &encode(lent.region()), Instant::now() + TICK * 8)?;
                    }
                    if meter.under_way() == 0 {
                        return Ok(());
                    }
                    let Some(got) = arrival(pair)? else {
                        stop.still_nothing(since)?;
                        continue;
                    };
                    let mut ops = 0;
                    let mut next = Some(got);
                    while let Some(got) = next {
                        ops += u32::from(got.immediate.is_some());
                        pair.post_receive(got.slot)?;
                        next = pair.poll()?;
                    }
                    since = Instant::now();
                    meter.moved(Moved { ops, bytes: u64::from(ops) * size });
                }
            };
            let result = go();
            // After an error the other end may still write.
            let settled = if result.is_ok() { Settled::Yes } else { Settled::No };
            (result, settled)
        })?
    }

    /// One-sided the other way: the NIC takes the bytes out of the server's memory.
    fn fetch(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let Some(region) = self.region else { return Ok(()) };
        let mut since = Instant::now();
        let (mut slots, len) = (std::mem::take(&mut self.large), self.size as usize);
        loop {
            while meter.begin(stop) {
                // As many as operations under way, so there is one.
                let Some(slot) = slots.pop() else { break };
                self.pair.read_slot(slot, len, region, Instant::now() + TICK)?;
            }
            let under_way = meter.under_way() as u64;
            if under_way == 0 {
                self.large = slots;
                return Ok(());
            }
            // A short read is back before a sleep has begun.
            for _ in 0..if len <= SHORT { LOOKS } else { 0 } {
                slots.extend(self.pair.free_slot()?);
                if self.pair.under_way() < under_way {
                    break;
                }
            }
            match self.pair.settle(under_way - 1, Instant::now() + TICK) {
                Ok(()) => since = Instant::now(),
                Err(VerbsError::Timeout { .. }) => stop.still_nothing(since)?,
                Err(e) => return Err(e.into()),
            }
            while let Some(slot) = self.pair.free_slot()? {
                slots.push(slot);
            }
            let ops = under_way - self.pair.under_way();
            meter.moved(Moved { ops: ops as u32, bytes: ops * self.size });
        }
    }

    /// Asks for messages and takes them.
    fn receive(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let mut small = std::mem::take(&mut self.rail.small);
        let mut since = Instant::now();
        loop {
            while meter.begin(stop) {
                say(&mut self.pair, &mut small, &[0], Instant::now() + TICK * 8)?;
            }
            if meter.under_way() == 0 {
                return Ok(());
            }
            let Some(got) = arrival(&mut self.pair)? else {
                stop.still_nothing(since)?;
                continue;
            };
            let mut ops = 0;
            let mut next = Some(got);
            while let Some(got) = next {
                ops += 1;
                self.pair.post_receive(got.slot)?;
                next = self.pair.poll()?;
            }
            since = Instant::now();
            meter.moved(Moved { ops, bytes: u64::from(ops) * self.size });
        }
    }

    /// A write there and one back, each end looking at its memory.
    fn ping_pong(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let Some(region) = self.region else { return Ok(()) };
        let len = self.size as usize;
        let mut small = std::mem::take(&mut self.rail.small);
        let mut large = std::mem::take(&mut self.large);
        let (memory, data) = self.rail.lent();
        self.pair.lend(memory, data, |pair, lent| {
            let mut go = || -> Result<()> {
                tell(pair, &mut small, lent, std::mem::take(&mut large))?;
                let (mut number, far) = (0, Instant::now() + FAR);
                while meter.begin(stop) {
                    number = next(number);
                    put(pair, len, region, number, far)?;
                    meter.keep();
                    let mut since = None;
                    while !seen(pair, lent, len - 1, number, stop)? {
                        // A tick ago.
                        stop.still_nothing(*since.get_or_insert_with(|| Instant::now() - TICK))?;
                    }
                    meter.moved_one(len as u64);
                }
                Ok(())
            };
            let result = go();
            // Every write was answered, or the other end may still write.
            let settled = if result.is_ok() { Settled::Yes } else { Settled::No };
            (result, settled)
        })?
    }

    /// Sends messages; their number comes back.
    fn send(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let (mut told, mut since) = (0u64, Instant::now());
        let len = self.size as usize;
        loop {
            while meter.begin(stop) {
                self.send_large(len)?;
            }
            if meter.under_way() == 0 {
                return Ok(());
            }
            let Some(got) = arrival(&mut self.pair)? else {
                stop.still_nothing(since)?;
                continue;
            };
            let count = got.slot.bytes().first_chunk().map(|bytes| u64::from_le_bytes(*bytes));
            self.pair.post_receive(got.slot)?;
            let new = count.and_then(|count| count.checked_sub(told)).filter(|n| *n <= meter.under_way() as u64);
            let Some(new) = new else {
                return Err(Error::new(ErrorKind::Protocol, "the server counts messages that were not sent"));
            };
            (told, since) = (told + new, Instant::now());
            meter.moved(Moved { ops: new as u32, bytes: new * self.size });
        }
    }

    fn send_large(&mut self, len: usize) -> Result<()> {
        let deadline = Instant::now() + TICK * 8;
        let slot = loop {
            if let Some(slot) = self.large.pop() {
                break slot;
            }
            match self.pair.free_slot()? {
                Some(slot) => break slot,
                None => self.pair.settle(self.pair.under_way().saturating_sub(1), deadline)?,
            }
        };
        Ok(self.pair.send(slot, len, deadline)?)
    }

    /// A message there and one back.
    fn echo(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        let len = self.size as usize;
        while meter.begin(stop) {
            self.send_large(len)?;
            let since = Instant::now();
            let got = loop {
                match arrival(&mut self.pair)? {
                    Some(got) => break got,
                    None => stop.still_nothing(since)?,
                }
            };
            self.pair.post_receive(got.slot)?;
            meter.moved(Moved { ops: 1, bytes: self.size });
        }
        Ok(())
    }
}

impl Lane for RdmaLane {
    fn run(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        match self.op {
            Op::Write => self.write(meter, stop),
            Op::Read => self.read(meter, stop),
            Op::Send => self.send(meter, stop),
            Op::Echo => self.echo(meter, stop),
            Op::Fetch => self.fetch(meter, stop),
            Op::Receive => self.receive(meter, stop),
            Op::PingPong => self.ping_pong(meter, stop),
        }
    }
}
