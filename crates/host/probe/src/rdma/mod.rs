//! Operations over verbs, on reliable connections made by rdma_cm. Knows no control connection.
//!
//! A *write* is the client's RDMA WRITE into memory the server lends; the server's CPU takes no part. A *read* is a
//! small request, answered by the server's WRITE with immediate into memory the client lends, as Spurline moves
//! blocks. A *send* is a message into one of the server's receives; a small answer carries the number received. A
//! *receive* is the same in the other direction, one per request. A *fetch* is the client's RDMA READ of memory the
//! server lends. An *echo* is a message and its return. A *ping-pong* is an RDMA WRITE and one back, noticed by
//! polling the memory, as in perftest's `ib_write_lat`.

mod client;
mod ping_pong;
mod server;

pub use client::RdmaProbeStream;
pub use server::{ConnectedStream, RdmaListener, serve_stream};

use crate::message::{ProbeOp, ProbePlan};
use crate::stream::WAIT_TICK;
use spurline_mem::{BufferPool, PoolBuf};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{
    CmChannel, ConnectOptions, DeviceContext, MemoryAccess, MemoryRegion, MemorySlot, ProtectionDomain, QueueDepths,
    QueuePair, ReceiveCompletion, RemoteRegion, VerbsError, VerbsLibrary,
};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

/// A dead peer is noticed after seven times 268 ms. On some devices 7 retries mean endless retries. Shorter timeouts expire on
/// emulated devices of a busy host, and retransmissions without a loss break connections of Soft-RoCE (Linux 6.1).
const OPTIONS: ConnectOptions = ConnectOptions { ack_timeout: Some(16), retries: 6, rnr_retries: 6 };
/// Bytes of a request, a region or a count.
const SMALL: usize = 64;
/// Most memory of a stream: the memory is locked, and some limits are low.
pub const MAX_MEMORY: u64 = 256 << 20;
/// Most reads under way on a connection; devices run about 16 and queue the others.
const MOST_READS: u32 = 128;
/// Least room for sends and writes. Completions are polled only when there is no room, which then affects few
/// latencies.
const SENDS: u32 = 16;

/// Checks that this host has an RDMA device with this address.
///
/// # Errors
/// Why not, with a remedy.
pub fn check_device(ip: IpAddr) -> Result<()> {
    open_domain(ip).map(drop)
}

fn open_domain(ip: IpAddr) -> Result<(Arc<VerbsLibrary>, Arc<ProtectionDomain>)> {
    let verbs = VerbsLibrary::load().map_err(Error::from)?;
    let mut anchor = CmChannel::new(&verbs)?.create_id()?;
    anchor.bind(SocketAddr::new(ip, 0))?;
    let domain = ProtectionDomain::new(&DeviceContext::of_id(anchor)?)?;
    Ok((verbs, domain))
}

/// The device and the memory of an end of a stream.
struct StreamDevice {
    verbs: Arc<VerbsLibrary>,
    domain: Arc<ProtectionDomain>,
    memory: Arc<MemoryRegion>,
    /// Slots for small messages, to receive and to send.
    small: Vec<MemorySlot>,
    /// Slots of the operation's size, for operations that are messages.
    large: Vec<MemorySlot>,
    /// Memory that the other end reads or writes.
    data: PoolBuf,
    depths: QueueDepths,
}

impl StreamDevice {
    /// Opens the device with this address and registers the memory for a stream of `plan`.
    fn open(ip: IpAddr, op: ProbeOp, plan: &ProbePlan) -> Result<StreamDevice> {
        let (verbs, domain) = open_domain(ip)?;
        let depth = plan.depth as usize;
        let size = usize::try_from(plan.size).unwrap_or(usize::MAX);
        let (messages, lends) = match op {
            ProbeOp::Send | ProbeOp::Receive => (depth, false),
            ProbeOp::Fetch => (depth, true),
            ProbeOp::Echo => (2, false),
            ProbeOp::PingPong => (2, true),
            ProbeOp::Read | ProbeOp::Write => (0, true),
        };
        let bytes = (size as u64).saturating_mul(messages.max(1) as u64);
        if bytes > MAX_MEMORY {
            let why = format!(
                "{bytes} bytes of locked memory for one stream, {MAX_MEMORY} are the most: reduce --size or --depth"
            );
            return Err(Error::new(ErrorKind::Invalid, why));
        }
        let small = SMALL * (depth * 2 + 4);
        // The pool rounds each buffer up to a power of two, and to at least a page.
        let parts = [small, if lends { size } else { SMALL }, size * messages];
        let largest = parts.into_iter().map(slot_bytes).max().unwrap_or(0);
        let all: usize = parts.into_iter().map(slot_bytes).sum();
        let pool = BufferPool::new(all.next_multiple_of(largest) as u64, largest)?;
        let access = if op == ProbeOp::Fetch { MemoryAccess::PeerReadsAndWrites } else { MemoryAccess::PeerWrites };
        let memory = domain.register_pool(&pool, access)?;
        let small = memory.split_slots(take_memory(&pool, small)?, SMALL)?;
        let large =
            if messages > 0 { memory.split_slots(take_memory(&pool, size * messages)?, size)? } else { Vec::new() };
        let mut data = take_memory(&pool, if lends { size } else { SMALL })?;
        // Like real data, not all zero.
        data.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]);
        if let (ProbeOp::PingPong, Some(last)) = (op, data.get_mut(size - 1)) {
            // Number 0 is unused, and so is no ping-pong.
            *last = 0;
        }
        let most = u32::try_from(depth).unwrap_or(u32::MAX) + 2;
        let depths = QueueDepths { receives: most, sends: most.max(SENDS) };
        Ok(StreamDevice { verbs, domain, memory, small, large, data, depths })
    }

    /// Posts receives: large slots where messages of the operation's size arrive, small slots elsewhere. Returns the remaining
    /// large slots, for sending.
    fn post_receives(&mut self, pair: &mut QueuePair, large_arrive: usize) -> Result<Vec<MemorySlot>, VerbsError> {
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

    /// Enables reads on a queue pair, where `op` needs reads, before the connection.
    fn allow_reads(&self, pair: &mut QueuePair, op: ProbeOp) {
        if op == ProbeOp::Fetch {
            pair.allow_reads(self.depths.receives.min(MOST_READS) as u8);
        }
    }

    /// The memory region and the bytes, borrowed separately.
    fn memory_and_data(&mut self) -> (&MemoryRegion, &mut PoolBuf) {
        (&self.memory, &mut self.data)
    }
}

fn take_memory(pool: &Arc<BufferPool>, len: usize) -> Result<PoolBuf> {
    pool.try_alloc(len).ok_or_else(|| Error::new(ErrorKind::NoMemory, format!("no {len} bytes of memory")))
}

fn slot_bytes(len: usize) -> usize {
    len.max(16 << 10).next_power_of_two()
}

/// Sends a few bytes from a spare slot; completed slots become spare.
fn send_small(
    pair: &mut QueuePair,
    small: &mut Vec<MemorySlot>,
    bytes: &[u8],
    deadline: Instant,
) -> Result<(), VerbsError> {
    let slot = loop {
        if let Some(slot) = small.pop() {
            break Some(slot);
        }
        match pair.free_slot()? {
            Some(slot) => break Some(slot),
            None if Instant::now() >= deadline => break None,
            None => pair.wait_in_flight(pair.in_flight().saturating_sub(1), deadline)?,
        }
    };
    let Some(mut slot) = slot else { return Err(VerbsError::Timeout { what: "a slot to send from".into() }) };
    slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    pair.send_message(slot, bytes.len(), deadline)
}

/// Returns what arrives within a tick.
fn next_arrival(pair: &mut QueuePair) -> Result<Option<ReceiveCompletion>, VerbsError> {
    if pair.wait_arrival(Instant::now() + WAIT_TICK)? { pair.poll_receive() } else { Ok(None) }
}

fn encode_region(region: RemoteRegion) -> [u8; 20] {
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&region.addr.to_le_bytes());
    bytes[8..16].copy_from_slice(&region.len.to_le_bytes());
    bytes[16..].copy_from_slice(&region.rkey.to_le_bytes());
    bytes
}

fn decode_region(bytes: &[u8]) -> Option<RemoteRegion> {
    let word = |at: usize| Some(u64::from_le_bytes(*bytes.get(at..at + 8)?.first_chunk()?));
    let rkey = u32::from_le_bytes(*bytes.get(16..20)?.first_chunk()?);
    Some(RemoteRegion { addr: word(0)?, len: word(8)?, rkey })
}

/// Identifies a stream on a connection: token and index.
fn encode_name(token: u64, stream: usize) -> [u8; 10] {
    let mut bytes = [0; 10];
    bytes[..8].copy_from_slice(&token.to_le_bytes());
    bytes[8..].copy_from_slice(&u16::try_from(stream).unwrap_or(u16::MAX).to_le_bytes());
    bytes
}

fn decode_name(bytes: &[u8]) -> Option<(u64, usize)> {
    let token = u64::from_le_bytes(*bytes.first_chunk()?);
    let stream = u16::from_le_bytes(*bytes.get(8..10)?.first_chunk()?);
    Some((token, stream.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_the_address_says_so() {
        let error = check_device([192, 0, 2, 77].into()).unwrap_err();
        assert!(!error.message().is_empty());
    }

    proptest::proptest! {
        #[test]
        fn what_travels_comes_back(addr: u64, len: u64, rkey: u32, token: u64, stream in 0usize..65_535, junk: Vec<u8>) {
            let region = RemoteRegion { addr, len, rkey };
            proptest::prop_assert_eq!(decode_region(&encode_region(region)), Some(region));
            proptest::prop_assert_eq!(decode_name(&encode_name(token, stream)), Some((token, stream)));
            let _ = (decode_region(&junk), decode_name(&junk));
        }
    }
}
