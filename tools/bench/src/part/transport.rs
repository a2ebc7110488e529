//! The transport alone: channels on one side, a service that answers from memory on the other; no FUSE, no cache.

use super::{ReadLane, ReadPart, ServePart, print_ready, read_lanes, serve_for_ever};
use crate::error::{BenchError, Result};
use crate::scratch;
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, WelcomeAnswer};
use spurline_transport::{Channel as _, ConnState, Responder, Service, perform_handshake};
use spurline_types::{Error as WireError, ErrorKind, Stats};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SOURCE: &str = "memory";
const DEADLINE: Duration = Duration::from_secs(10);

/// Answers reads from its own memory.
struct MemoryService(Vec<u8>);

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

pub(super) fn serve(part: &ServePart) -> Result<()> {
    let mut data = vec![0u8; part.size.0 as usize];
    scratch::fill_pattern(0, 0, &mut data);
    let server = TcpServer::bind(
        &[part.addr],
        Arc::new(MemoryService(data)),
        ServerConfig::default(),
        Arc::new(Stats::default()),
    )?;
    print_ready(server.local_addrs().first().map(ToString::to_string).unwrap_or_default());
    serve_for_ever()
}

pub(super) fn read(part: &ReadPart) -> Result<()> {
    if part.depth > 1 {
        return Err(BenchError::Failed("a channel carries one request at a time: use more connections".into()));
    }
    let block = part.block.0 as usize;
    let stats = Arc::new(Stats::default());
    read_lanes(part, |index, stop| {
        let connector =
            TcpConnector::new(&part.addr.to_string(), Vec::new(), SocketOptions::default(), Arc::clone(&stats));
        let mut channel = connector.open_channel(Instant::now() + DEADLINE)?;
        perform_handshake(&mut channel, &HelloRequest::new("bench", SOURCE), Instant::now() + DEADLINE)
            .map_err(WireError::from)?;
        let mut lane = ReadLane::new(part, index);
        let mut body = Vec::new();
        let mut dst = vec![0u8; block];
        let mut answers = 0;
        while !stop.load(Ordering::Relaxed) {
            let read = ReadRequest {
                volume: VolumeId(1),
                path: b"some/file.bin",
                version: "etag:0123456789abcdef",
                size: part.size.0,
                offset: lane.next_offset(),
                len: block as u32,
                flags: ReadFlags::NONE,
            };
            let deadline = Instant::now() + DEADLINE;
            let got = channel
                .call(&NodeRequest::Read(read), &mut body, &mut dst, &mut |_| (), deadline)
                .map_err(WireError::from)?;
            if answers == 0 {
                check_block(&dst[..got.payload_len], read.offset)?;
            }
            answers += 1;
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

    #[test]
    fn both_readers_get_the_right_bytes() {
        let mut data = vec![0u8; 8 << 20];
        scratch::fill_pattern(0, 0, &mut data);
        let any = "127.0.0.1:0".parse().unwrap();
        let server = TcpServer::bind(
            &[any],
            Arc::new(MemoryService(data.clone())),
            ServerConfig::default(),
            Arc::new(Stats::default()),
        )
        .unwrap();
        let mut part = ReadPart {
            addr: server.local_addrs()[0],
            connections: 2,
            depth: 1,
            block: Size(1 << 20),
            size: Size(8 << 20),
            random: true,
            time: Duration::from_millis(50),
        };
        read(&part).unwrap();
        part.addr = spurline_net_tcp::bare::serve_data(any, Arc::new(data), SocketOptions::default()).unwrap();
        part.depth = 4;
        super::super::bare::read(&part).unwrap();
        assert!(read(&part).is_err());
        assert!(check_block(&[1, 2, 3, 4, 5, 6, 7, 8], 0).is_err());
    }
}
