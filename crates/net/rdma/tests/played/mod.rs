//! A node that keeps no rules: plays a script's bytes over a queue pair. What is a payload is written, what is a header
//! with its body is sent, anything else is sent as it is.

use spurline_mem::BufferPool;
use spurline_proto::rdma::{ConnectTerms, MessageKind, MessagePrelude, PRELUDE_LEN, PayloadRegion, WriteNotice};
use spurline_proto::{FrameHeader, HEADER_LEN, MAX_ANSWER_BODY, MAX_PAYLOAD, frame_padding};
use spurline_transport::conformance::{PeerScript, ScriptEnd};
use spurline_verbs::{
    CmChannel, CmEventKind, ConnectOptions, DeviceContext, MemoryAccess, MemoryRegion, ProtectionDomain, QueueDepths,
    QueuePair, RemoteRegion, VerbsLibrary,
};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const DEPTHS: QueueDepths = QueueDepths { receives: 32, sends: 32 };
const SLOT: usize = 4096;

pub struct Played {
    pub addr: SocketAddr,
    stop: Arc<AtomicBool>,
}

impl Drop for Played {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
    }
}

impl Played {
    pub fn start(ip: IpAddr, script: PeerScript) -> Played {
        let verbs = VerbsLibrary::load().unwrap();
        let mut anchor = CmChannel::new(&verbs).unwrap().create_id().unwrap();
        anchor.bind(SocketAddr::new(ip, 0)).unwrap();
        let domain = ProtectionDomain::new(&DeviceContext::of_id(anchor).unwrap()).unwrap();
        let memory = domain.register_pool(&BufferPool::new(8 << 20, 2 << 20).unwrap(), MemoryAccess::Local).unwrap();
        let channel = CmChannel::new(&verbs).unwrap();
        let mut listener = channel.create_id().unwrap();
        let addr = listener.listen(SocketAddr::new(ip, 0), 16).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || {
            let _listener = listener;
            let mut breakers = HashMap::new();
            while !stopped.load(Ordering::Acquire) {
                let Some(event) = channel.next_event(Instant::now() + Duration::from_millis(20)).unwrap() else {
                    continue;
                };
                match event.kind {
                    CmEventKind::ConnectRequest { id, private } => {
                        ConnectTerms::decode(&private).unwrap();
                        let key = id.key();
                        let mut pair = QueuePair::new(id, &domain, DEPTHS, 0).unwrap();
                        breakers.insert(key, pair.breaker());
                        for slot in slots(&memory) {
                            pair.post_receive(slot).unwrap();
                        }
                        for slot in slots(&memory) {
                            pair.keep_slot(slot);
                        }
                        let terms = ConnectTerms { receives: DEPTHS.receives as u16, slot_len: SLOT as u32 };
                        let options = ConnectOptions { ack_timeout: Some(14), retries: 6, rnr_retries: 6 };
                        if pair.accept(options, &terms.encode()).is_ok() {
                            let (memory, script) = (Arc::clone(&memory), Arc::clone(&script));
                            std::thread::spawn(move || play(pair, &memory, &script));
                        }
                    }
                    CmEventKind::Disconnected => {
                        if let Some(breaker) = breakers.remove(&event.key) {
                            breaker.break_now("the reader ended it");
                        }
                    }
                    _ => {}
                }
            }
            breakers.values().for_each(|breaker| breaker.break_now("the play is over"));
        });
        Played { addr, stop }
    }
}

fn slots(memory: &Arc<MemoryRegion>) -> Vec<spurline_verbs::MemorySlot> {
    memory.split_slots(memory.pool().try_alloc(SLOT * 32).unwrap(), SLOT).unwrap()
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn send(pair: &mut QueuePair, bytes: &[u8]) -> Option<()> {
    let mut slot = pair.take_slot(late()).ok()?;
    slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    pair.send_message(slot, bytes.len(), late()).ok()
}

/// The next message, its receive posted again.
fn message(pair: &mut QueuePair) -> Option<Vec<u8>> {
    loop {
        if let Some(got) = pair.poll_receive().ok()? {
            let bytes = got.slot.bytes()[..got.len].to_vec();
            pair.post_receive(got.slot).ok()?;
            return Some(bytes);
        }
        pair.wait_arrival(late()).ok()?;
    }
}

fn play(mut pair: QueuePair, memory: &Arc<MemoryRegion>, script: &PeerScript) -> Option<()> {
    loop {
        let request = message(&mut pair)?;
        let (prelude, part) = MessagePrelude::decode(&request).unwrap();
        if prelude.kind == MessageKind::Grant {
            continue;
        }
        assert_eq!((prelude.kind, part.len()), (MessageKind::Request, prelude.frame_len as usize));
        let (bytes, end) = script(&FrameHeader::decode(part.first_chunk().unwrap()).unwrap());
        answer(&mut pair, memory, prelude.region, &bytes)?;
        match end {
            ScriptEnd::Continue => {}
            ScriptEnd::Close => return None,
            // Until the reader closes the connection.
            ScriptEnd::Stall => while message(&mut pair).is_some() {},
        }
    }
}

fn answer(pair: &mut QueuePair, memory: &Arc<MemoryRegion>, region: PayloadRegion, bytes: &[u8]) -> Option<()> {
    let Some(header) = bytes.first_chunk::<HEADER_LEN>().and_then(|head| FrameHeader::decode(head).ok()) else {
        // A frame cut within its header is nothing at all here; other bytes are sent as they are.
        let cut = FrameHeader::check_start(bytes).is_ok();
        return if cut { Some(()) } else { send(pair, &bytes[..bytes.len().min(SLOT)]) };
    };
    let (payload_len, body_len) = (header.payload_len as usize, header.body_len as usize);
    let rest = &bytes[HEADER_LEN..];
    let absurd = payload_len > MAX_PAYLOAD || body_len > MAX_ANSWER_BODY;
    if !absurd {
        let payload = &rest[..payload_len.min(rest.len())];
        if !payload.is_empty() && payload.len() as u64 <= region.len {
            write(pair, memory, region, payload)?;
        }
        if rest.len() < payload_len + body_len {
            return Some(());
        }
    }
    // Credits are given back generously: one for each request.
    let frame = [&bytes[..HEADER_LEN], if absurd { &[] } else { &rest[payload_len..payload_len + body_len] }].concat();
    let prelude = MessagePrelude {
        kind: MessageKind::Answer,
        granted: 1,
        frame_len: frame.len() as u32,
        region: PayloadRegion::default(),
    };
    assert!(PRELUDE_LEN + frame.len() <= SLOT, "scripts answer with short bodies");
    send(pair, &[&prelude.encode()[..], &frame].concat())?;
    let whole = payload_len.saturating_add(body_len);
    let stray = rest.get(whole.saturating_add(frame_padding(whole % (1 << 20)).len())..).unwrap_or_default();
    if !absurd && !stray.is_empty() {
        send(pair, &stray[..stray.len().min(SLOT)])?;
    }
    Some(())
}

fn write(pair: &mut QueuePair, memory: &Arc<MemoryRegion>, region: PayloadRegion, payload: &[u8]) -> Option<()> {
    let mut buf = memory.pool().try_alloc(payload.len()).unwrap();
    buf.copy_from_slice(payload);
    let remote = RemoteRegion { addr: region.addr, len: region.len, rkey: region.rkey };
    pair.write_borrowed(late(), |writing| {
        let mut so_far = 0;
        for piece in buf.chunks(256 << 10) {
            let at = so_far as u64;
            so_far += piece.len() as u32;
            let number = WriteNotice { so_far, granted: 0, last: false }.encode();
            writing.post_write(memory, piece, remote, at, Some(number))?;
        }
        Ok::<(), spurline_verbs::VerbsError>(())
    })
    .ok()
}
