//! The server's end of streams over verbs: one listener a measurement, one thread a stream. It knows the measurement
//! only as far as it is handed connections' names.

use super::ping_pong::{next, put, seen, tell};
use super::{OPTIONS, Rail, SMALL, arrival, decode, domain, encode, named, say};
use crate::lane::{Stop, TICK};
use crate::message::{Op, Plan};
use crate::tcp::Served;
use spurline_types::{Error, Result};
use spurline_verbs::{Breaker, CmChannel, CmEventKind, CmId, QueuePair, Settled, Slot, VerbsError};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The end of what has no other, see the client's.
const FAR: Duration = Duration::from_secs(30 * 86_400);

/// Where the streams of one measurement connect to.
pub struct Listener {
    channel: Arc<CmChannel>,
    // Kept: connections are asked for as long as it lives.
    _id: CmId,
    ip: IpAddr,
    port: u16,
}

/// A stream that is connected.
pub struct Connected {
    pair: QueuePair,
    rail: Rail,
    large: Vec<Slot>,
    op: Op,
}

impl Connected {
    /// To end it from another thread.
    pub fn breaker(&self) -> Breaker {
        self.pair.breaker()
    }
}

impl Listener {
    /// Listens on the device that has this address.
    ///
    /// # Errors
    /// When there is none, or it can't be used.
    pub fn new(ip: IpAddr) -> Result<Listener> {
        let (verbs, _) = domain(ip)?;
        let channel = CmChannel::new(&verbs)?;
        let mut id = channel.id()?;
        let port = id.listen(SocketAddr::new(ip, 0), 128)?.port();
        Ok(Listener { channel, _id: id, ip, port })
    }

    /// The port, of rdma_cm's own space.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Takes connections of the measurement `token` and hands each, with its stream's number, to `begin`, until `stop` is
    /// cut; then all are broken. `begin` must not wait.
    pub fn run(&self, token: u64, plan: &Plan, stop: &Stop, mut begin: impl FnMut(usize, Connected)) {
        let mut pending: HashMap<usize, (usize, Connected)> = HashMap::new();
        let mut breakers: HashMap<usize, Breaker> = HashMap::new();
        while !stop.is_cut() {
            let Ok(event) = self.channel.next(Instant::now() + TICK) else { break };
            let Some(event) = event else { continue };
            match event.kind {
                CmEventKind::ConnectRequest { id, private } => {
                    let stream = named(&private).filter(|(its, _)| *its == token).map(|(_, stream)| stream);
                    let Some((stream, op)) = stream.and_then(|s| Some((s, *plan.streams.get(s)?))) else {
                        id.reject(b"no measurement has that token");
                        continue;
                    };
                    let key = id.key();
                    // One that can't be equipped is refused by being dropped.
                    if let Ok(connected) = self.accept(id, op, plan) {
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

    fn accept(&self, id: CmId, op: Op, plan: &Plan) -> Result<Connected> {
        let mut rail = Rail::open(self.ip, op, plan)?;
        let mut pair = QueuePair::new(id, &rail.domain, rail.depths, 0)?;
        let arrive = match op {
            Op::Send => plan.depth as usize,
            Op::Echo => 1,
            _ => 0,
        };
        let large = rail.equip(&mut pair, arrive)?;
        rail.allow(&mut pair, op);
        pair.accept(OPTIONS, &[])?;
        Ok(Connected { pair, rail, large, op })
    }
}

/// Serves a stream until the client ends it or `stop` is cut; what was done until then is in `served`.
///
/// # Errors
/// When the stream did not end by the client's leave.
pub fn serve(mut connected: Connected, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<()> {
    let ended = match connected.op {
        Op::Write | Op::Fetch => one_sided(&mut connected, stop),
        Op::Read => reads(&mut connected, plan, stop, served),
        Op::Send => sends(&mut connected, plan, stop, served),
        Op::Echo => echoes(&mut connected, plan, stop, served),
        Op::Receive => receives(&mut connected, plan, stop, served),
        Op::PingPong => ping_pongs(&mut connected, plan, stop, served),
    };
    match ended {
        // The client left, or the measurement is over.
        Err(VerbsError::Disconnected { .. }) => Ok(()),
        other => other.map_err(Error::from),
    }
}

/// Lends memory, and waits for the end: the NIC does all the rest, and nobody counts here.
fn one_sided(connected: &mut Connected, stop: &Stop) -> Result<(), VerbsError> {
    let mut small = std::mem::take(&mut connected.rail.small);
    let (memory, data) = connected.rail.lent();
    connected.pair.lend(memory, data, |pair, lent| {
        let mut go = || -> Result<(), VerbsError> {
            say(pair, &mut small, &encode(lent.region()), Instant::now() + TICK * 8)?;
            while !stop.is_cut() {
                arrival(pair)?;
            }
            Ok(())
        };
        (go(), Settled::No)
    })?
}

/// Writes into what each request names.
fn reads(connected: &mut Connected, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<(), VerbsError> {
    let rail = &connected.rail;
    connected.pair.writing(Instant::now() + FAR, |writing| {
        let mut number = 0u32;
        while !stop.is_cut() {
            let Some(got) = arrival(writing.pair())? else { continue };
            let region = decode(&got.slot.bytes()[..got.len.min(SMALL)]);
            writing.pair().post_receive(got.slot)?;
            let Some(region) = region else { return Err(VerbsError::Misuse("a request that names no memory".into())) };
            number = number.wrapping_add(1);
            writing.write(&rail.memory, &rail.data, region, 0, Some(number))?;
            served.sent += plan.size;
        }
        Ok(())
    })
}

/// Takes messages and says how many there were.
fn sends(connected: &mut Connected, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<(), VerbsError> {
    let mut small = std::mem::take(&mut connected.rail.small);
    let mut count = 0u64;
    while !stop.is_cut() {
        let Some(got) = arrival(&mut connected.pair)? else { continue };
        let mut next = Some(got);
        while let Some(got) = next {
            connected.pair.post_receive(got.slot)?;
            count += 1;
            served.received += plan.size;
            next = connected.pair.poll()?;
        }
        say(&mut connected.pair, &mut small, &count.to_le_bytes(), Instant::now() + TICK * 8)?;
    }
    Ok(())
}

/// Answers each small message with one of an operation's size.
fn receives(connected: &mut Connected, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<(), VerbsError> {
    let len = plan.size as usize;
    std::mem::take(&mut connected.large).into_iter().for_each(|slot| connected.pair.keep_slot(slot));
    while !stop.is_cut() {
        let Some(got) = arrival(&mut connected.pair)? else { continue };
        connected.pair.post_receive(got.slot)?;
        let deadline = Instant::now() + TICK * 8;
        let slot = connected.pair.take_slot(deadline)?;
        connected.pair.send(slot, len, deadline)?;
        served.sent += plan.size;
    }
    Ok(())
}

/// Lends memory, and writes back what was written there.
fn ping_pongs(connected: &mut Connected, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<(), VerbsError> {
    let len = plan.size as usize;
    let mut small = std::mem::take(&mut connected.rail.small);
    let mut large = std::mem::take(&mut connected.large);
    let (memory, data) = connected.rail.lent();
    connected.pair.lend(memory, data, |pair, lent| {
        let mut go = || -> Result<(), VerbsError> {
            tell(pair, &mut small, lent, std::mem::take(&mut large))?;
            let mut theirs = None;
            while theirs.is_none() && !stop.is_cut() {
                let Some(got) = arrival(pair)? else { continue };
                theirs = decode(&got.slot.bytes()[..got.len.min(SMALL)]).filter(|r| r.len >= plan.size);
                pair.post_receive(got.slot)?;
            }
            let Some(theirs) = theirs else { return Ok(()) };
            let (mut number, far) = (1, Instant::now() + FAR);
            while !stop.is_cut() {
                if !seen(pair, lent, len - 1, number, stop)? {
                    continue;
                }
                put(pair, len, theirs, number, far)?;
                number = next(number);
                served.received += plan.size;
                served.sent += plan.size;
            }
            Ok(())
        };
        (go(), Settled::No)
    })?
}

/// Sends back what it gets.
fn echoes(connected: &mut Connected, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<(), VerbsError> {
    let len = plan.size as usize;
    while !stop.is_cut() {
        let Some(got) = arrival(&mut connected.pair)? else { continue };
        connected.pair.post_receive(got.slot)?;
        let slot = match connected.large.pop() {
            Some(slot) => Some(slot),
            None => {
                // It was received, or there would be no next; its acknowledgement may be on the way.
                connected.pair.settle(0, Instant::now() + TICK * 8)?;
                connected.pair.free_slot()?
            }
        };
        let Some(slot) = slot else {
            return Err(VerbsError::Misuse("echoes go one at a time".into()));
        };
        connected.pair.send(slot, len, Instant::now() + TICK * 8)?;
        served.received += plan.size;
        served.sent += plan.size;
    }
    Ok(())
}
