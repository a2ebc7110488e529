//! A node that keeps no rules: plays a script's bytes over a queue pair. What is a payload is written, what is a header
//! with its body is sent, anything else is sent as it is.

use spurline_mem::Pool;
use spurline_proto::rdma::{Announced, MessageKind, PRELUDE_LEN, Prelude, Region, Terms};
use spurline_proto::{HEADER_LEN, Header, MAX_ANSWER_BODY, MAX_PAYLOAD, padding};
use spurline_transport::conformance::{End, Script};
use spurline_verbs::{
    Access, CmChannel, CmEventKind, ConnectOptions, Context, MemoryRegion, ProtectionDomain, QueueDepths, QueuePair,
    RemoteRegion, Verbs,
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
    pub fn start(ip: IpAddr, script: Script) -> Played {
        let verbs = Verbs::load().unwrap();
        let mut anchor = CmChannel::new(&verbs).unwrap().id().unwrap();
        anchor.bind(SocketAddr::new(ip, 0)).unwrap();
        let domain = ProtectionDomain::new(&Context::of(anchor).unwrap()).unwrap();
        let memory = domain.register(&Pool::new(8 << 20, 2 << 20).unwrap(), Access::Local).unwrap();
        let channel = CmChannel::new(&verbs).unwrap();
        let mut listener = channel.id().unwrap();
        let addr = listener.listen(SocketAddr::new(ip, 0), 16).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        std::thread::spawn(move || {
            let _listener = listener;
            let mut breakers = HashMap::new();
            while !stopped.load(Ordering::Acquire) {
                let Some(event) = channel.next(Instant::now() + Duration::from_millis(20)).unwrap() else { continue };
                match event.kind {
                    CmEventKind::ConnectRequest { id, private } => {
                        Terms::decode(&private).unwrap();
                        let key = id.key();
                        let mut pair = QueuePair::new(id, &domain, DEPTHS, 0).unwrap();
                        breakers.insert(key, pair.breaker());
                        for slot in slots(&memory) {
                            pair.post_receive(slot).unwrap();
                        }
                        for slot in slots(&memory) {
                            pair.keep_slot(slot);
                        }
                        let terms = Terms { receives: DEPTHS.receives as u16, slot_len: SLOT as u32 };
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

fn slots(memory: &Arc<MemoryRegion>) -> Vec<spurline_verbs::Slot> {
    memory.slots(memory.pool().try_alloc(SLOT * 32).unwrap(), SLOT).unwrap()
}

fn late() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn send(pair: &mut QueuePair, bytes: &[u8]) -> Option<()> {
    let mut slot = pair.take_slot(late()).ok()?;
    slot.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    pair.send(slot, bytes.len(), late()).ok()
}

/// The next message, its receive posted again.
fn message(pair: &mut QueuePair) -> Option<Vec<u8>> {
    loop {
        if let Some(got) = pair.poll().ok()? {
            let bytes = got.slot.bytes()[..got.len].to_vec();
            pair.post_receive(got.slot).ok()?;
            return Some(bytes);
        }
        pair.wait(late()).ok()?;
    }
}

fn play(mut pair: QueuePair, memory: &Arc<MemoryRegion>, script: &Script) -> Option<()> {
    loop {
        let request = message(&mut pair)?;
        let (prelude, part) = Prelude::decode(&request).unwrap();
        if prelude.kind == MessageKind::Grant {
            continue;
        }
        assert_eq!((prelude.kind, part.len()), (MessageKind::Request, prelude.frame_len as usize));
        let (bytes, end) = script(&Header::decode(part.first_chunk().unwrap()).unwrap());
        answer(&mut pair, memory, prelude.region, &bytes)?;
        match end {
            End::Continue => {}
            End::Close => return None,
            // Until the reader gives up.
            End::Stall => while message(&mut pair).is_some() {},
        }
    }
}

fn answer(pair: &mut QueuePair, memory: &Arc<MemoryRegion>, region: Region, bytes: &[u8]) -> Option<()> {
    let Some(header) = bytes.first_chunk::<HEADER_LEN>().and_then(|head| Header::decode(head).ok()) else {
        // A frame cut within its header is nothing at all here; other bytes are sent as they are.
        let cut = Header::check_start(bytes).is_ok();
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
    let prelude =
        Prelude { kind: MessageKind::Answer, granted: 1, frame_len: frame.len() as u32, region: Region::default() };
    assert!(PRELUDE_LEN + frame.len() <= SLOT, "scripts answer with short bodies");
    send(pair, &[&prelude.encode()[..], &frame].concat())?;
    let whole = payload_len.saturating_add(body_len);
    let stray = rest.get(whole.saturating_add(padding(whole % (1 << 20)).len())..).unwrap_or_default();
    if !absurd && !stray.is_empty() {
        send(pair, &stray[..stray.len().min(SLOT)])?;
    }
    Some(())
}

fn write(pair: &mut QueuePair, memory: &Arc<MemoryRegion>, region: Region, payload: &[u8]) -> Option<()> {
    let mut buf = memory.pool().try_alloc(payload.len()).unwrap();
    buf.copy_from_slice(payload);
    let remote = RemoteRegion { addr: region.addr, len: region.len, rkey: region.rkey };
    pair.writing(late(), |writing| {
        let mut so_far = 0;
        for piece in buf.chunks(256 << 10) {
            let at = so_far as u64;
            so_far += piece.len() as u32;
            let number = Announced { so_far, granted: 0, last: false }.encode();
            writing.write(memory, piece, remote, at, Some(number))?;
        }
        Ok::<(), spurline_verbs::VerbsError>(())
    })
    .ok()
}
