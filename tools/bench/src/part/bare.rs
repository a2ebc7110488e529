//! The bare block reader and writer of the TCP crate as processes. Knows no frames.

use super::{ReadLane, ReadPart, ServePart, SinkPart, print_ready, read_lanes, serve_for_ever};
use crate::error::Result;
use crate::scratch;
use spurline_net_tcp::{SocketOptions, bare};
use std::sync::Arc;
use std::sync::atomic::Ordering;

pub(super) fn serve(part: &ServePart) -> Result<()> {
    let mut data = vec![0u8; part.size.0 as usize];
    scratch::fill_pattern(0, 0, &mut data);
    let at = bare::serve_data(part.addr, Arc::new(data), SocketOptions::default())?;
    print_ready(at);
    serve_for_ever()
}

pub(super) fn read(part: &ReadPart) -> Result<()> {
    let block = part.block.0 as usize;
    read_lanes(part, |index, stop| {
        let mut reader = bare::BareReader::connect(part.addr, &SocketOptions::default())?;
        let mut lane = ReadLane::new(part, index);
        let mut dst = vec![0u8; block];
        let mut asked = 0u64;
        let mut taken = 0u64;
        let mut first = None;
        for _ in 0..part.depth.max(1) {
            let offset = lane.next_offset();
            first = first.or(Some(offset));
            reader.send_request(offset, part.block.0)?;
            asked += 1;
        }
        while taken < asked {
            reader.receive_answer(&mut dst)?;
            taken += 1;
            if let Some(offset) = first.take() {
                super::transport::check_block(&dst, offset)?;
            }
            if !stop.load(Ordering::Relaxed) {
                reader.send_request(lane.next_offset(), part.block.0)?;
                asked += 1;
            }
        }
        Ok(taken)
    })
}

pub(super) fn serve_sink(part: &SinkPart) -> Result<()> {
    print_ready(bare::serve_sink(part.addr, SocketOptions::default())?);
    serve_for_ever()
}

pub(super) fn write(part: &ReadPart) -> Result<()> {
    let mut block = vec![0u8; part.block.0 as usize];
    scratch::fill_pattern(0, 0, &mut block);
    read_lanes(part, |index, stop| {
        let mut writer = bare::BareWriter::connect(part.addr, &SocketOptions::default(), &block)?;
        let mut lane = ReadLane::new(part, index);
        let mut written = 0;
        while !stop.load(Ordering::Relaxed) {
            writer.write_block(lane.next_offset())?;
            written += 1;
        }
        Ok(written)
    })
}
