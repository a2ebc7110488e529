//! The transport alone: channels on one side, a service that answers from memory on the other; no FUSE, no cache.

use super::{ReadLane, ReadPart, ServePart, TransportReadPart, TransportServePart, TransportWire};
use super::{print_ready, read_lanes, serve_for_ever};
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
use std::net::IpAddr;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
fn wire_trust(wire: &TransportWire) -> Result<Arc<Trust>> {
    if !wire.tls {
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

pub(super) fn serve(part: &TransportServePart) -> Result<()> {
    let ServePart { addr, size } = part.serve;
    let stats = Arc::new(Stats::default());
    if let Some(ip) = part.wire.rdma {
        let (pool, rail) = open_rail(ip, size.0, size.0, MemoryAccess::Local)?;
        let mut data = pool.alloc(size.0 as usize, Instant::now())?;
        scratch::fill_pattern(0, 0, &mut data);
        let service = Arc::new(MemoryService(Box::new(data)));
        let _server = RdmaServer::bind(&[rail], addr.port(), service, RdmaServerConfig::default(), stats)?;
        print_ready(addr);
        serve_for_ever()
    }
    let mut data = vec![0u8; size.0 as usize];
    scratch::fill_pattern(0, 0, &mut data);
    let config = ServerConfig { trust: wire_trust(&part.wire)?, ..ServerConfig::default() };
    let server = TcpServer::bind(&[addr], Arc::new(MemoryService(Box::new(data))), config, stats)?;
    print_ready(server.local_addrs().first().map(ToString::to_string).unwrap_or_default());
    serve_for_ever()
}

/// Makes the channels of a reader.
struct ChannelMaker {
    connector: Box<dyn Connector>,
    /// Memory that the server's device may write; over TCP any memory will do.
    pool: Option<Arc<BufferPool>>,
}

impl ChannelMaker {
    fn new(part: &ReadPart, wire: &TransportWire) -> Result<Self> {
        let stats = Arc::new(Stats::default());
        if let Some(ip) = wire.rdma {
            let channels = (part.connections * part.depth).max(1) as u64;
            // A block takes a power of two of pages.
            let block_bytes = channels * part.block.0.next_power_of_two();
            let (pool, rail) = open_rail(ip, block_bytes, part.block.0, MemoryAccess::PeerWrites)?;
            let connector = Box::new(RdmaConnector::new(rail, part.addr, RdmaTimeouts::default(), stats));
            return Ok(ChannelMaker { connector, pool: Some(pool) });
        }
        let connector = TcpConnector::new(&part.addr.to_string(), Vec::new(), SocketOptions::default(), stats);
        Ok(ChannelMaker { connector: Box::new(connector.with_trust(wire_trust(wire)?)), pool: None })
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
fn read_blocks(channels: &mut [ReadChannel], lane: &mut ReadLane, size: u64) -> Result<()> {
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

pub(super) fn read(part: &TransportReadPart) -> Result<()> {
    let TransportReadPart { read: part, wire } = part;
    if part.depth > 1 && wire.rdma.is_none() {
        return Err(BenchError::Failed("a TCP channel carries one request at a time: use more connections".into()));
    }
    let maker = ChannelMaker::new(part, wire)?;
    read_lanes(part, |index, stop| {
        let mut channels =
            (0..part.depth.max(1)).map(|_| maker.open(part.block.0 as usize)).collect::<Result<Vec<_>>>()?;
        let mut lane = ReadLane::new(part, index);
        let mut answers = 0;
        while !stop.load(Ordering::Relaxed) {
            read_blocks(&mut channels, &mut lane, part.size.0)?;
            if answers == 0 {
                channels.iter().try_for_each(|channel| check_block(&channel.dst[..channel.len], channel.offset))?;
            }
            answers += channels.len() as u64;
        }
        Ok(answers)
    })
}

/// Checks that a block equals the servers' memory at `offset`.
pub(super) fn check_block(got: &[u8], offset: u64) -> Result<()> {
    let mut right = vec![0u8; got.len()];
    scratch::fill_pattern(0, offset, &mut right);
    if !got.is_empty() && got == right { Ok(()) } else { Err(BenchError::Failed(format!("wrong bytes at {offset}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_types::Size;
    use std::net::SocketAddr;

    fn serve_memory(data: &[u8], wire: &TransportWire) -> TcpServer {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let config = ServerConfig { trust: wire_trust(wire).unwrap(), ..ServerConfig::default() };
        let service = Arc::new(MemoryService(Box::new(data.to_vec())));
        TcpServer::bind(&[any], service, config, Arc::new(Stats::default())).unwrap()
    }

    #[test]
    fn readers_get_the_right_bytes() {
        let mut data = vec![0u8; 8 << 20];
        scratch::fill_pattern(0, 0, &mut data);
        let any = "127.0.0.1:0".parse().unwrap();
        let mut part = ReadPart {
            addr: any,
            connections: 2,
            depth: 1,
            block: Size(1 << 20),
            size: Size(8 << 20),
            random: true,
            time: Duration::from_millis(50),
        };
        for wire in [TransportWire::default(), TransportWire { tls: true, rdma: None }] {
            let server = serve_memory(&data, &wire);
            part.addr = server.local_addrs()[0];
            let mut part = TransportReadPart { read: part.clone(), wire };
            read(&part).unwrap();
            part.read.depth = 2;
            assert!(read(&part).is_err());
        }
        part.addr = spurline_net_tcp::bare::serve_data(any, Arc::new(data), SocketOptions::default()).unwrap();
        part.depth = 4;
        super::super::bare::read(&part).unwrap();
        assert!(check_block(&[1, 2, 3, 4, 5, 6, 7, 8], 0).is_err());
    }
}
