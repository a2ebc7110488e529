//! The bare block reader of the TCP crate as two processes. It knows no frames.

use super::{ReadLane, ReadPart, ServePart, print_ready, read_lanes, serve_for_ever};
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
        let (mut asked, mut taken) = (0u64, 0u64);
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
