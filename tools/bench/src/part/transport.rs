//! The transport alone: channels on one side, a service that answers from memory on the other; no FUSE, no cache.

use super::blocks::{BlockLane, check_block};
use super::{BlockPart, BlockWire, print_ready, serve_for_ever};
use crate::engine::ThreadCrew;
use crate::error::{BenchError, Result};
use crate::scratch;
use spurline_mem::BufferPool;
use spurline_net_rdma::{RdmaConnector, RdmaRail, RdmaServer, RdmaServerConfig, RdmaTimeouts};
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{Channel, ConnState, Connector, Responder, Service, perform_handshake};
use spurline_trust::{GroupTokens, Trust};
use spurline_types::{Error as WireError, ErrorKind, Stats};
use spurline_verbs::{MemoryAccess, VerbsLibrary};
use std::net::{IpAddr, SocketAddr};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SOURCE_NAME: &str = "memory";
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Room of an RDMA rail beside the blocks: for the messages of connections.
const MESSAGE_BYTES: u64 = 64 << 20;
/// The token of both sides with TLS, which needs one.
const GROUP_TOKEN: &[u8] = b"q5Ykm0WJ7b2uR1xTzv9sLd3f";

/// Answers reads from memory.
struct MemoryService(Box<dyn Deref<Target = [u8]> + Send + Sync>);

impl Service for MemoryService {
    fn handle_hello(&self, _conn: &ConnState, hello: &HelloRequest<'_>) -> spurline_types::Result<WelcomeAnswer> {
        let volume = VolumeId(1);
        let node = "bench".to_owned();
        Ok(WelcomeAnswer { version: hello.max_version, volume, block_size: 4 << 20, node, ..WelcomeAnswer::default() })
    }

    fn serve_request(
        &self,
        _: &ConnState,
        request: NodeRequest<'_>,
        responder: &mut dyn Responder,
    ) -> spurline_types::Result<()> {
        let NodeRequest::Read(read) = request else {
            return Err(WireError::new(ErrorKind::Unsupported, "only reads are served here"));
        };
        let end = read.offset.saturating_add(u64::from(read.len)).min(self.0.len() as u64) as usize;
        responder.send_data(&[], &[&self.0[(read.offset as usize).min(end)..end]])
    }
}

/// The proofs that both sides require.
fn wire_trust(wire: BlockWire) -> Result<Arc<Trust>> {
    if wire != BlockWire::Tls {
        return Ok(Trust::without_checks());
    }
    let token = GroupTokens::parse(GROUP_TOKEN).map_err(BenchError::Failed)?;
    Ok(Trust::with_tokens("bench", token).with_tls(None)?)
}

/// Memory for blocks and messages, and the RDMA device that reaches this memory.
fn open_rail(
    ip: IpAddr,
    block_bytes: u64,
    largest: u64,
    access: MemoryAccess,
) -> Result<(Arc<BufferPool>, Arc<RdmaRail>)> {
    let pool = BufferPool::new(block_bytes + MESSAGE_BYTES, largest as usize)?;
    let verbs = VerbsLibrary::load().map_err(|why| BenchError::Missing(why.to_string()))?;
    let rail = RdmaRail::open(&verbs, "bench", ip, &pool, access)?;
    Ok((pool, rail))
}

pub(super) fn serve(addr: SocketAddr, bytes: u64, wire: BlockWire) -> Result<()> {
    if let BlockWire::Rdma(ip) = wire {
        let (pool, rail) = open_rail(ip, bytes, bytes, MemoryAccess::Local)?;
        let mut data = pool.alloc(bytes as usize, Instant::now())?;
        scratch::fill_pattern(0, 0, &mut data);
        let service = Arc::new(MemoryService(Box::new(data)));
        let stats = Arc::new(Stats::default());
        let _server = RdmaServer::bind(&[rail], addr.port(), service, RdmaServerConfig::default(), stats)?;
        print_ready(addr);
        serve_for_ever()
    }
    let mut data = vec![0u8; bytes as usize];
    scratch::fill_pattern(0, 0, &mut data);
    let server = serve_memory(addr, data, wire)?;
    print_ready(server.local_addrs().first().map(ToString::to_string).unwrap_or_default());
    serve_for_ever()
}

/// A server over TCP.
pub(super) fn serve_memory(addr: SocketAddr, data: Vec<u8>, wire: BlockWire) -> Result<TcpServer> {
    let config = ServerConfig { trust: wire_trust(wire)?, ..ServerConfig::default() };
    Ok(TcpServer::bind(&[addr], Arc::new(MemoryService(Box::new(data))), config, Arc::new(Stats::default()))?)
}

/// Makes the channels of a reader. Over RDMA each of its concurrent requests has a channel.
pub(super) struct ChannelMaker {
    connector: Box<dyn Connector>,
    /// Memory that the server's device may write; over TCP any memory will do.
    pool: Option<Arc<BufferPool>>,
}

impl ChannelMaker {
    pub(super) fn new(part: &BlockPart) -> Result<Self> {
        let stats = Arc::new(Stats::default());
        if let BlockWire::Rdma(ip) = part.wire {
            let channels = (part.connections * part.depth).max(1) as u64;
            // A block takes a power of two of pages.
            let block_bytes = channels * part.block.next_power_of_two();
            let (pool, rail) = open_rail(ip, block_bytes, part.block, MemoryAccess::PeerWrites)?;
            let connector = Box::new(RdmaConnector::new(rail, part.addr, RdmaTimeouts::default(), stats));
            return Ok(ChannelMaker { connector, pool: Some(pool) });
        }
        if part.depth > 1 {
            return Err(BenchError::Failed("a TCP channel carries one request at a time: use more connections".into()));
        }
        let connector = TcpConnector::new(&part.addr.to_string(), Vec::new(), SocketOptions::default(), stats);
        Ok(ChannelMaker { connector: Box::new(connector.with_trust(wire_trust(part.wire)?)), pool: None })
    }

    fn open(&self, block_bytes: usize) -> Result<ReadChannel> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let mut channel = self.connector.connect(deadline)?;
        perform_handshake(&mut *channel, &HelloRequest::new("bench", SOURCE_NAME), deadline)
            .map_err(WireError::from)?;
        let dst: Box<dyn DerefMut<Target = [u8]> + Send> = match &self.pool {
            Some(pool) => Box::new(pool.alloc(block_bytes, deadline)?),
            None => Box::new(vec![0u8; block_bytes]),
        };
        Ok(ReadChannel { channel, body: Vec::new(), dst, offset: 0, len: 0 })
    }

    /// Reads as a lane of the order.
    pub(super) fn read(&self, part: &BlockPart, crew: &ThreadCrew, lane: usize) -> Result<()> {
        let channels = (0..part.depth.max(1)).map(|_| self.open(part.block as usize));
        let mut channels = channels.collect::<Result<Vec<_>>>()?;
        let mut lane = BlockLane::new(part, lane);
        let mut is_first = true;
        while !crew.is_stopped() {
            read_blocks(&mut channels, &mut lane, part.bytes)?;
            if std::mem::take(&mut is_first) {
                channels.iter().try_for_each(|channel| check_block(&channel.dst[..channel.len], channel.offset))?;
            }
            channels.iter().for_each(|_| crew.add_item());
        }
        Ok(())
    }
}

/// A channel with the last answer.
struct ReadChannel {
    channel: Box<dyn Channel>,
    body: Vec<u8>,
    dst: Box<dyn DerefMut<Target = [u8]> + Send>,
    offset: u64,
    len: usize,
}

/// Reads a block over each channel; all requests are sent before the first answer is awaited.
fn read_blocks(channels: &mut [ReadChannel], lane: &mut BlockLane, size: u64) -> Result<()> {
    let Some((first, others)) = channels.split_first_mut() else { return Ok(()) };
    first.offset = lane.next_offset();
    let request = NodeRequest::Read(ReadRequest {
        volume: VolumeId(1),
        path: b"some/file.bin",
        version: "etag:0123456789abcdef",
        size,
        offset: first.offset,
        len: first.dst.len() as u32,
        flags: ReadFlags::NONE,
    });
    let deadline = Instant::now() + CALL_TIMEOUT;
    let mut of_others = Ok(());
    let answer =
        first.channel.call_while(&request, &mut first.body, &mut first.dst, &mut |_| (), deadline, &mut || {
            of_others = read_blocks(others, lane, size)
        });
    first.len = answer.map_err(WireError::from)?.payload_len;
    of_others
}
