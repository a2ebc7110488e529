//! Messages and credits over a queue pair, the same on both sides. Does not know the meaning of requests.

use crate::depths::{SEND_SLOTS, SLOT};
use spurline_mem::BufferPool;
use spurline_proto::rdma::{
    ConnectTerms, MessageKind, MessagePrelude, PRELUDE_LEN, PayloadRegion, SendCredits, WriteNotice,
};
use spurline_proto::{FRAME_ALIGN, FrameHeader, HEADER_LEN, MAX_ANSWER_BODY, MAX_GREETING_BODY, frame_padding};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{MemoryRegion, QueueDepths, QueuePair};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Buffers of longer frames are freed after the call.
const KEPT_FRAME_BYTES: usize = 16 << 10;

/// What arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ArrivedMessage {
    /// A write and the announcement.
    Written(WriteNotice),
    /// A complete frame; for a request, the payload's region.
    Frame(MessageKind, PayloadRegion),
    /// A part of a frame.
    Part,
    /// Credits only.
    Grant,
}

/// The frames that a side accepts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrameLimits {
    kind: MessageKind,
    /// The longest body, in bytes.
    max_body: usize,
}

impl FrameLimits {
    /// Limits of a reader.
    pub const ANSWERS: FrameLimits = FrameLimits { kind: MessageKind::Answer, max_body: MAX_ANSWER_BODY };
    /// Limits of a node before the handshake.
    pub const HANDSHAKES: FrameLimits = FrameLimits { kind: MessageKind::Request, max_body: MAX_GREETING_BODY };
}

/// The frame being received.
#[derive(Default)]
pub(crate) struct FrameAssembly {
    bytes: Vec<u8>,
    /// The total length, while incomplete.
    want: Option<(usize, MessageKind, PayloadRegion, Instant)>,
}

impl FrameAssembly {
    /// The complete frame: header and body.
    pub fn whole_frame(&self) -> Result<(FrameHeader, &[u8])> {
        let (head, rest) = self
            .bytes
            .split_first_chunk::<HEADER_LEN>()
            .ok_or_else(|| Error::new(ErrorKind::Protocol, "a frame is shorter than its header"))?;
        let header = FrameHeader::decode(head)?;
        Ok((header, rest.get(..header.body_len as usize).unwrap_or(rest)))
    }

    /// The bytes of a request that are part of the frame.
    pub fn inline_payload(&self, header: &FrameHeader) -> &[u8] {
        let body_len = header.body_len as usize;
        self.bytes.get(HEADER_LEN + body_len + frame_padding(body_len).len()..).unwrap_or_default()
    }

    /// Since when an incomplete frame is being received.
    pub fn begun_at(&self) -> Option<Instant> {
        self.want.as_ref().map(|(.., begun)| *begun)
    }

    fn add_part(&mut self, prelude: &MessagePrelude, part: &[u8], takes: FrameLimits) -> Result<ArrivedMessage> {
        match (prelude.kind, &self.want) {
            (MessageKind::Grant, _) => return Ok(ArrivedMessage::Grant),
            (MessageKind::Rest, Some(_)) => {}
            (kind, None) if kind == takes.kind => {
                let most = HEADER_LEN + FRAME_ALIGN + takes.max_body;
                let want = prelude.frame_len as usize;
                if want > most {
                    return refuse(format!("a frame of {want} bytes, at most {most} are allowed"));
                }
                self.bytes.clear();
                self.bytes.shrink_to(KEPT_FRAME_BYTES);
                if part.len() == want {
                    self.bytes.extend_from_slice(part);
                    return Ok(ArrivedMessage::Frame(prelude.kind, prelude.region));
                }
                self.want = Some((want, prelude.kind, prelude.region, Instant::now()));
            }
            (kind, _) => return refuse(format!("a message of kind {kind:?} where another was expected")),
        }
        let Some((want, kind, region, _)) = self.want else { return Ok(ArrivedMessage::Part) };
        if self.bytes.len() + part.len() > want {
            return refuse(format!("more than the {want} bytes of a frame"));
        }
        self.bytes.extend_from_slice(part);
        if self.bytes.len() < want {
            return Ok(ArrivedMessage::Part);
        }
        self.want = None;
        Ok(ArrivedMessage::Frame(kind, region))
    }
}

fn refuse<T>(why: String) -> Result<T> {
    Err(Error::new(ErrorKind::Protocol, why))
}

/// A queue pair with message state. The fields are separate, so that receiving continues during writes.
pub(crate) struct RdmaSession {
    pub pair: QueuePair,
    pub line: MessageStream,
}

/// Credits and the frame being received.
pub(crate) struct MessageStream {
    credits: SendCredits,
    peer_slot: usize,
    takes: FrameLimits,
    pub assembly: FrameAssembly,
    /// Whether something arrived since the last check, and the start of the current silence.
    has_arrivals: bool,
    silent_since: Instant,
}

/// The receive limits to announce to the peer.
pub(crate) fn own_terms(depths: QueueDepths) -> ConnectTerms {
    ConnectTerms { receives: depths.receives as u16, slot_len: SLOT as u32 }
}

/// Posts all receives and provides the send slots, from the registered pool.
pub(crate) fn post_buffers(
    pair: &mut QueuePair,
    memory: &Arc<MemoryRegion>,
    depths: QueueDepths,
    deadline: Instant,
) -> Result<()> {
    let pool: &Arc<BufferPool> = memory.pool();
    for slot in memory.split_slots(pool.alloc(depths.receives as usize * SLOT, deadline)?, SLOT)? {
        pair.post_receive(slot)?;
    }
    for slot in memory.split_slots(pool.alloc(SEND_SLOTS as usize * SLOT, deadline)?, SLOT)? {
        pair.keep_slot(slot);
    }
    Ok(())
}

impl RdmaSession {
    pub fn new(pair: QueuePair, own: QueueDepths, peer: ConnectTerms, takes: FrameLimits) -> Self {
        let line = MessageStream {
            credits: SendCredits::new(own_terms(own), peer),
            peer_slot: (peer.slot_len as usize).min(SLOT),
            takes,
            assembly: FrameAssembly::default(),
            has_arrivals: false,
            silent_since: Instant::now(),
        };
        RdmaSession { pair, line }
    }

    /// The next arrival, if any; the receive is posted again. Waits until `deadline` at most for room to send a grant, which is
    /// rare.
    pub fn take_arrived(&mut self, deadline: impl FnOnce() -> Instant) -> Result<Option<ArrivedMessage>> {
        self.line.take_arrived(&mut self.pair, deadline)
    }

    /// Whether a short answer can be sent without waiting for the peer.
    pub fn can_send_now(&mut self) -> bool {
        self.line.credits.may_send() && self.pair.has_free_slot().unwrap_or(true)
    }

    /// Sends a frame, in as many messages as needed.
    pub fn send_frame(
        &mut self,
        kind: MessageKind,
        region: PayloadRegion,
        frame: &[u8],
        deadline: Instant,
    ) -> Result<()> {
        self.line.send_frame(&mut self.pair, kind, region, frame, deadline)
    }
}

impl MessageStream {
    /// Time since the last arrival, as of the checks: arrivals do not read the clock.
    pub fn silent_for(&mut self) -> Duration {
        if std::mem::take(&mut self.has_arrivals) {
            self.reset_silence();
        }
        self.silent_since.elapsed()
    }

    /// The longest frame that a message carries.
    pub fn message_room(&self) -> usize {
        self.peer_slot - PRELUDE_LEN
    }

    /// Restarts the measurement of silence.
    pub fn reset_silence(&mut self) {
        self.silent_since = Instant::now();
    }

    /// Sets the limit of a body's length, in bytes.
    pub fn set_body_limit(&mut self, most: usize) {
        self.takes.max_body = most;
    }

    /// Sends a frame, in as many messages as needed.
    pub fn send_frame(
        &mut self,
        pair: &mut QueuePair,
        kind: MessageKind,
        region: PayloadRegion,
        frame: &[u8],
        deadline: Instant,
    ) -> Result<()> {
        let most = self.message_room();
        let mut kind = kind;
        for part in frame.chunks(most) {
            self.await_credit(pair, deadline)?;
            let mut slot = pair.take_slot(deadline)?;
            let granted = self.credits.account_sent(u8::MAX);
            let prelude = MessagePrelude { kind, granted, frame_len: frame.len() as u32, region };
            let bytes = slot.bytes_mut();
            bytes[..PRELUDE_LEN].copy_from_slice(&prelude.encode());
            bytes[PRELUDE_LEN..PRELUDE_LEN + part.len()].copy_from_slice(part);
            pair.send_message(slot, PRELUDE_LEN + part.len(), deadline)?;
            kind = MessageKind::Rest;
        }
        Ok(())
    }

    pub fn take_arrived(
        &mut self,
        pair: &mut QueuePair,
        deadline: impl FnOnce() -> Instant,
    ) -> Result<Option<ArrivedMessage>> {
        let Some(completion) = pair.poll_receive()? else { return Ok(None) };
        self.has_arrivals = true;
        let (arrived, granted) = match completion.immediate {
            Some(number) => {
                let announced = WriteNotice::decode(number);
                (ArrivedMessage::Written(announced), announced.granted)
            }
            None => {
                let message = completion.slot.bytes().get(..completion.len).unwrap_or_default();
                let (prelude, part) = MessagePrelude::decode(message)?;
                (self.assembly.add_part(&prelude, part, self.takes)?, prelude.granted)
            }
        };
        pair.post_receive(completion.slot)?;
        self.credits.account_received(granted)?;
        if self.credits.must_grant() {
            self.send_grant(pair, deadline())?;
        }
        Ok(Some(arrived))
    }

    fn send_grant(&mut self, pair: &mut QueuePair, deadline: Instant) -> Result<()> {
        let mut slot = pair.take_slot(deadline)?;
        let granted = self.credits.account_sent(u8::MAX);
        let prelude =
            MessagePrelude { kind: MessageKind::Grant, granted, frame_len: 0, region: PayloadRegion::default() };
        slot.bytes_mut()[..PRELUDE_LEN].copy_from_slice(&prelude.encode());
        Ok(pair.send_message(slot, PRELUDE_LEN, deadline)?)
    }

    /// Waits for a credit for a message or an announced write. Only grants may arrive meanwhile.
    pub fn await_credit(&mut self, pair: &mut QueuePair, deadline: Instant) -> Result<()> {
        while !self.credits.may_send() {
            match self.take_arrived(pair, || deadline)? {
                Some(ArrivedMessage::Grant) => {}
                Some(other) => {
                    return Err(Error::new(
                        ErrorKind::Protocol,
                        format!("{other:?} while another frame was being sent"),
                    ));
                }
                None => {
                    if !pair.wait_arrival(deadline)? {
                        return Err(Error::new(
                            ErrorKind::Timeout,
                            "the peer accepts nothing: no credit arrived in time",
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Accounts for an announced write; returns the credits that came along.
    pub fn announce_write(&mut self) -> u8 {
        self.credits.account_sent(WriteNotice::MAX_GRANTED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_of_another_kind_or_beyond_its_limit_takes_no_memory() {
        let frame = |kind, len: usize| MessagePrelude {
            kind,
            granted: 0,
            frame_len: len as u32,
            region: PayloadRegion::default(),
        };
        let most = |body| HEADER_LEN + FRAME_ALIGN + body;
        let greeted = FrameLimits { max_body: 64 << 10, ..FrameLimits::HANDSHAKES };
        for (takes, kind, body, taken) in [
            (FrameLimits::HANDSHAKES, MessageKind::Request, MAX_GREETING_BODY, true),
            (FrameLimits::HANDSHAKES, MessageKind::Request, MAX_GREETING_BODY + 1, false),
            (FrameLimits::HANDSHAKES, MessageKind::Answer, 0, false),
            (FrameLimits::HANDSHAKES, MessageKind::Rest, 0, false),
            (greeted, MessageKind::Request, 64 << 10, true),
            (greeted, MessageKind::Answer, 64 << 10, false),
            (FrameLimits::ANSWERS, MessageKind::Answer, MAX_ANSWER_BODY, true),
            (FrameLimits::ANSWERS, MessageKind::Answer, MAX_ANSWER_BODY + 1, false),
            (FrameLimits::ANSWERS, MessageKind::Request, 0, false),
        ] {
            let mut assembly = FrameAssembly::default();
            let arrived = assembly.add_part(&frame(kind, most(body)), b"part", takes);
            assert_eq!(arrived.is_ok(), taken, "{takes:?} {kind:?} {body}: {arrived:?}");
            assert!(arrived.is_ok() || arrived.is_err_and(|e| e.kind() == ErrorKind::Protocol));
            assert_eq!(assembly.bytes.len(), if taken { 4 } else { 0 });
        }
    }
}
