//! Readers and writers of blocks without a file system, and servers of blocks: those of the TCP crate, without frames, or the
//! transport.

use super::transport::{self, ChannelMaker};
use super::{BlockPart, BlockWire, PartFigures, print_ready, serve_for_ever};
use crate::engine::{ThreadCrew, run_threads};
use crate::error::{BenchError, Result};
use crate::scratch;
use spurline_net_tcp::{SocketOptions, bare};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// The offsets that a thread requests.
pub(super) struct BlockLane {
    /// Next block of a sequential reader, or the state of a random reader.
    at: u64,
    random: bool,
    blocks: u64,
    block: u64,
}

impl BlockLane {
    pub(super) fn new(part: &BlockPart, lane: usize) -> Self {
        let blocks = (part.bytes / part.block).max(1);
        let share = blocks / part.connections.max(1) as u64;
        let at = if part.random { (lane as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) } else { share * lane as u64 };
        BlockLane { at, random: part.random, blocks, block: part.block }
    }

    pub(super) fn next_offset(&mut self) -> u64 {
        if self.random {
            // xorshift64: never zero, long enough.
            self.at ^= self.at << 13;
            self.at ^= self.at >> 7;
            self.at ^= self.at << 17;
            (self.at % self.blocks) * self.block
        } else {
            self.at = (self.at + 1) % self.blocks;
            self.at * self.block
        }
    }
}

/// Runs a thread for each connection, for the time of the order.
pub(super) fn run_lanes(
    part: &BlockPart,
    lane: impl Fn(&ThreadCrew, usize) -> Result<()> + Sync,
) -> Result<PartFigures> {
    let time = Duration::from_millis(part.time_ms);
    let run = run_threads(part.connections.max(1), lane, |_, elapsed| Ok(elapsed < time))?;
    let figures = PartFigures::from(run);
    Ok(PartFigures { bytes: figures.ops * part.block, ..figures })
}

pub(super) fn serve(addr: SocketAddr, bytes: u64, wire: BlockWire) -> Result<()> {
    if wire != BlockWire::Bare {
        return transport::serve(addr, bytes, wire);
    }
    let mut data = vec![0u8; bytes as usize];
    scratch::fill_pattern(0, 0, &mut data);
    print_ready(bare::serve_data(addr, Arc::new(data), SocketOptions::default())?);
    serve_for_ever()
}

pub(super) fn serve_sink(addr: SocketAddr) -> Result<()> {
    print_ready(bare::serve_sink(addr, SocketOptions::default())?);
    serve_for_ever()
}

pub(super) fn run(part: &BlockPart) -> Result<PartFigures> {
    match (part.wire, part.write) {
        (BlockWire::Bare, false) => run_lanes(part, |crew, lane| read_bare(part, crew, lane)),
        (BlockWire::Bare, true) => run_lanes(part, |crew, lane| write_bare(part, crew, lane)),
        (_, true) => Err(BenchError::Failed("the transport alone only reads".into())),
        _ => {
            let maker = ChannelMaker::new(part)?;
            run_lanes(part, |crew, lane| maker.read(part, crew, lane))
        }
    }
}

fn read_bare(part: &BlockPart, crew: &ThreadCrew, lane: usize) -> Result<()> {
    let mut reader = bare::BareReader::connect(part.addr, &SocketOptions::default())?;
    let mut lane = BlockLane::new(part, lane);
    let mut dst = vec![0u8; part.block as usize];
    let mut pending = 0;
    let mut first = None;
    for _ in 0..part.depth.max(1) {
        let offset = lane.next_offset();
        first = first.or(Some(offset));
        reader.send_request(offset, part.block)?;
        pending += 1;
    }
    while pending > 0 {
        reader.receive_answer(&mut dst)?;
        pending -= 1;
        crew.add_item();
        if let Some(offset) = first.take() {
            check_block(&dst, offset)?;
        }
        if !crew.is_stopped() {
            reader.send_request(lane.next_offset(), part.block)?;
            pending += 1;
        }
    }
    Ok(())
}

fn write_bare(part: &BlockPart, crew: &ThreadCrew, lane: usize) -> Result<()> {
    let mut block = vec![0u8; part.block as usize];
    scratch::fill_pattern(0, 0, &mut block);
    let mut writer = bare::BareWriter::connect(part.addr, &SocketOptions::default(), &block)?;
    let mut lane = BlockLane::new(part, lane);
    while !crew.is_stopped() {
        writer.write_block(lane.next_offset())?;
        crew.add_item();
    }
    Ok(())
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
    use std::collections::BTreeSet;

    #[test]
    fn lanes_stay_inside() {
        let mut part = BlockPart { connections: 3, block: 4096, bytes: 64 << 10, ..BlockPart::default() };
        for random in [false, true] {
            part.random = random;
            let mut lane = BlockLane::new(&part, 1);
            let seen: BTreeSet<u64> = (0..1000).map(|_| lane.next_offset()).collect();
            assert_eq!(seen.len(), 16);
            assert!(seen.iter().all(|offset| offset % 4096 == 0 && *offset < 64 << 10));
        }
    }

    #[test]
    fn readers_get_the_right_bytes() {
        let mut data = vec![0u8; 8 << 20];
        scratch::fill_pattern(0, 0, &mut data);
        let mut part = BlockPart { connections: 2, bytes: 8 << 20, random: true, time_ms: 50, ..BlockPart::default() };
        let read = |part: &BlockPart| {
            let figures = run(part).unwrap();
            assert!(figures.ops > 0 && figures.bytes == figures.ops << 20);
        };
        for wire in [BlockWire::Tcp, BlockWire::Tls] {
            let server = transport::serve_memory(part.addr, data.clone(), wire).unwrap();
            let mut part = BlockPart { addr: server.local_addrs()[0], wire, ..part.clone() };
            read(&part);
            part.depth = 2;
            assert!(run(&part).unwrap_err().to_string().contains("more connections"));
            part.write = true;
            assert!(run(&part).is_err());
        }
        part.addr = bare::serve_data(part.addr, Arc::new(data), SocketOptions::default()).unwrap();
        part.depth = 4;
        read(&part);
        part.addr = bare::serve_sink("127.0.0.1:0".parse().unwrap(), SocketOptions::default()).unwrap();
        part.write = true;
        read(&part);
        assert!(check_block(&[1, 2, 3, 4, 5, 6, 7, 8], 0).is_err());
    }
}
