//! Operations over verbs, on reliable connections made by rdma_cm. It knows no control connection.
//!
//! A *write* is the client's RDMA WRITE into memory the server lends: the server's processor has no part in it. A
//! *read* is asked for by a small message and answered by the server's WRITE with immediate into memory the client
//! lends, which is how Spurline moves blocks. A *send* is a message into one of the server's receives, with a small
//! answer that says how many were taken; a *receive* is the same the other way, each asked for. A *fetch* is the client's
//! RDMA READ of memory the server lends. An *echo* is a message there and one back. A *ping-pong* is an RDMA WRITE there
//! and one back, noticed by looking at the memory: the way of perftest's `ib_write_lat`.

mod lane;
mod ping_pong;
mod serve;

pub use lane::RdmaLane;
pub use serve::{Connected, Listener, serve};

use crate::lane::TICK;
use crate::message::{Op, Plan};
use spurline_mem::{Buf, Pool};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{
    Access, CmChannel, Completion, ConnectOptions, Context, MemoryRegion, ProtectionDomain, QueueDepths, QueuePair,
    RemoteRegion, Slot, Verbs, VerbsError,
};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// A dead peer shows after seven times 67 ms. 7 retries would be for ever on some devices.
const OPTIONS: ConnectOptions = ConnectOptions { ack_timeout: Some(14), retries: 6, rnr_retries: 6 };
/// Bytes of a request, a region, or a count.
const SMALL: usize = 64;
/// The most memory of one stream: it is locked, and some limits on that are low.
pub const MAX_MEMORY: u64 = 256 << 20;
/// The most reads under way on one connection; devices allow 16 or so, and let the others wait.
const MOST_READS: u32 = 128;
/// Sends and writes that a stream has room for at least: only when there is none are completions looked at, which then is
/// in the time of few messages.
const SENDS: u32 = 16;

/// Whether this host has a device with this address, and if not why.
///
/// # Errors
/// Why not, and what to do.
pub fn usable(ip: IpAddr) -> Result<()> {
    domain(ip).map(drop)
}

fn domain(ip: IpAddr) -> Result<(Arc<Verbs>, Arc<ProtectionDomain>)> {
    let verbs = Verbs::load().map_err(Error::from)?;
    let mut anchor = CmChannel::new(&verbs)?.id()?;
    anchor.bind(SocketAddr::new(ip, 0))?;
    let domain = ProtectionDomain::new(&Context::of(anchor)?)?;
    Ok((verbs, domain))
}

/// The device and the memory of one end of one stream.
struct Rail {
    verbs: Arc<Verbs>,
    domain: Arc<ProtectionDomain>,
    memory: Arc<MemoryRegion>,
    /// Slots for small messages: to receive into, and to send from.
    small: Vec<Slot>,
    /// Slots of an operation's size, for operations that are messages.
    large: Vec<Slot>,
    /// Memory that is read or written by the other end.
    data: Buf,
    depths: QueueDepths,
}

impl Rail {
    /// Opens the device with this address and registers what a stream of `plan` needs.
    fn open(ip: IpAddr, op: Op, plan: &Plan) -> Result<Rail> {
        let (verbs, domain) = domain(ip)?;
        let depth = plan.depth as usize;
        let size = usize::try_from(plan.size).unwrap_or(usize::MAX);
        let (messages, lends) = match op {
            Op::Send | Op::Receive => (depth, false),
            Op::Fetch => (depth, true),
            Op::Echo => (2, false),
            Op::PingPong => (2, true),
            Op::Read | Op::Write => (0, true),
        };
        let bytes = (size as u64).saturating_mul(messages.max(1) as u64);
        if bytes > MAX_MEMORY {
            let why = format!(
                "{bytes} bytes of locked memory for one stream, {MAX_MEMORY} are the most: less --size or --depth"
            );
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let small = SMALL * (depth * 2 + 4);
        // Each buffer is rounded up to a power of two, and at least a page of the pool.
        let parts = [small, if lends { size } else { SMALL }, size * messages];
        let round = |len: usize| len.max(16 << 10).next_power_of_two();
        let largest = parts.into_iter().map(round).max().unwrap_or(0);
        let all: usize = parts.into_iter().map(round).sum();
        let pool = Pool::new(all.next_multiple_of(largest) as u64, largest)?;
        let access = if op == Op::Fetch { Access::PeerReadsAndWrites } else { Access::PeerWrites };
        let memory = domain.register(&pool, access)?;
        let take = |len: usize| {
            pool.try_alloc(len).ok_or_else(|| Error::new(ErrorKind::NoMemory, format!("no {len} bytes of memory")))
        };
        let small = memory.slots(take(small)?, SMALL)?;
        let large = if messages > 0 { memory.slots(take(size * messages)?, size)? } else { Vec::new() };
        let mut data = take(if lends { size } else { SMALL })?;
        // Not all zero, as data is not.
        data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]);
        if let (Op::PingPong, Some(last)) = (op, data.get_mut(size - 1)) {
            // No ping-pong has the number 0.
            *last = 0;
        }
        let most = u32::try_from(depth).unwrap_or(u32::MAX) + 2;
        let depths = QueueDepths { receives: most, sends: most.max(SENDS) };
        Ok(Rail { verbs, domain, memory, small, large, data, depths })
    }

    /// Posts receives: large ones where messages of an operation's size arrive, small ones elsewhere. Leaves the rest
    /// for sending, in `spare` where it is large.
    fn equip(&mut self, pair: &mut QueuePair, large_arrive: usize) -> Result<Vec<Slot>, VerbsError> {
        let mut receives = self.depths.receives as usize;
        for _ in 0..large_arrive {
            if let Some(slot) = self.large.pop() {
                pair.post_receive(slot)?;
                receives -= 1;
            }
        }
        if large_arrive == 0 {
            for slot in self.small.drain(..receives.min(self.small.len())) {
                pair.post_receive(slot)?;
            }
        }
        Ok(std::mem::take(&mut self.large))
    }

    /// Makes a queue pair ready for what a stream of `op` does, before it is connected.
    fn allow(&self, pair: &mut QueuePair, op: Op) {
        if op == Op::Fetch {
            pair.allow_reads(self.depths.receives.min(MOST_READS) as u8);
        }
    }

    /// The memory and the bytes in it that operations move, apart.
    fn lent(&mut self) -> (&MemoryRegion, &mut Buf) {
        (&self.memory, &mut self.data)
    }
}

/// Sends small bytes from a spare slot; those under way come back as spare ones.
fn say(pair: &mut QueuePair, small: &mut Vec<Slot>, bytes: &[u8], deadline: Instant) -> Result<(), VerbsError> {
    let slot = loop {
        if let Some(slot) = small.pop() {
            break Some(slot);
        }
        match pair.free_slot()? {
            Some(slot) => break Some(slot),
            None if Instant::now() >= deadline => break None,
            None => pair.settle(pair.under_way().saturating_sub(1), deadline)?,
        }
    };
    let Some(mut slot) = slot else { return Err(VerbsError::Timeout { what: "a slot to send from".into() }) };
    slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    pair.send(slot, bytes.len(), deadline)
}

/// What arrives within a tick, if anything.
fn arrival(pair: &mut QueuePair) -> Result<Option<Completion>, VerbsError> {
    if pair.wait(Instant::now() + TICK)? { pair.poll() } else { Ok(None) }
}

fn encode(region: RemoteRegion) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&region.addr.to_le_bytes());
    bytes[8..16].copy_from_slice(&region.len.to_le_bytes());
    bytes[16..].copy_from_slice(&region.rkey.to_le_bytes());
    bytes
}

fn decode(bytes: &[u8]) -> Option<RemoteRegion> {
    let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..at + 8)?.first_chunk()?));
    let rkey = u32::from_le_bytes(*bytes.get(16..20)?.first_chunk()?);
    Some(RemoteRegion { addr: word(0)?, len: word(8)?, rkey })
}

/// By what a connection says which stream it is: token and index.
fn name(token: u64, stream: usize) -> [u8; 10] {
    let mut bytes = [0; 10];
    bytes[..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..].copy_from_slice(&u16::try_from(stream).unwrap_or(u16::MAX).to_le_bytes());
    bytes
}

fn named(bytes: &[u8]) -> Option<(u64, usize)> {
    let token = u64::from_le_bytes(*bytes.first_chunk()?);
    let stream = u16::from_le_bytes(*bytes.get(8..10)?.first_chunk()?);
    Some((token, stream.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_address_says_so() {
        let error = usable([192, 0, 2, 77].into()).unwrap_err();
        assert!(!error.message().is_empty());
    }

    proptest::proptest! {
        #[test]
        fn what_travels_comes_back(addr: u64, len: u64, rkey: u32, token: u64, stream in 0usize..65_535, junk: Vec<u8>) {
            let region = RemoteRegion { addr, len, rkey };
            proptest::prop_assert_eq!(decode(&encode(region)), Some(region));
            proptest::prop_assert_eq!(named(&name(token, stream)), Some((token, stream)));
            let _ = (decode(&junk), named(&junk));
        }
    }
}
