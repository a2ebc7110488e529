//! Messages and credits over one queue pair, the same on both sides. It knows no request's meaning.

use crate::depths::{SEND_SLOTS, SLOT};
use spurline_mem::Pool;
use spurline_proto::rdma::{Announced, Credits, MessageKind, PRELUDE_LEN, Prelude, Region, Terms};
use spurline_proto::{FRAME_ALIGN, HEADER_LEN, Header, MAX_ANSWER_BODY, MAX_GREETING_BODY};
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::{MemoryRegion, QueueDepths, QueuePair};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Frames longer than this are given back after their call.
const KEEP: usize = 16 << 10;

/// What arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arrived {
    /// A write announced itself.
    Written(Announced),
    /// A frame is whole; its payload's region, in a request.
    Frame(MessageKind, Region),
    /// A part of a frame.
    Part,
    /// Credits only.
    Grant,
}

/// Which frames a side takes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Takes {
    kind: MessageKind,
    /// The longest body, in bytes.
    most_body: usize,
}

impl Takes {
    /// What a reader takes.
    pub const ANSWERS: Takes = Takes { kind: MessageKind::Answer, most_body: MAX_ANSWER_BODY };
    /// What a node takes of somebody who has not greeted.
    pub const GREETINGS: Takes = Takes { kind: MessageKind::Request, most_body: MAX_GREETING_BODY };
}

/// The frame that is being received.
#[derive(Default)]
pub(crate) struct Assembly {
    bytes: Vec<u8>,
    /// Its whole length while it is not whole.
    want: Option<(usize, MessageKind, Region, Instant)>,
}

impl Assembly {
    /// The frame that is whole: its header, and what follows it.
    pub fn frame(&self) -> Result<(Header, &[u8])> {
        let short = || Error::new(ErrorKind::Protocol, "a frame is shorter than its header");
        let (head, rest) = self.bytes.split_first_chunk::<HEADER_LEN>().ok_or_else(short)?;
        let header = Header::decode(head)?;
        Ok((header, rest.get(..header.body_len as usize).unwrap_or(rest)))
    }

    /// Since when a frame that is not whole is being received.
    pub fn begun(&self) -> Option<Instant> {
        self.want.as_ref().map(|(.., begun)| *begun)
    }

    fn add(&mut self, prelude: &Prelude, part: &[u8], takes: Takes) -> Result<Arrived> {
        let refuse = |why: String| Err(Error::new(ErrorKind::Protocol, why));
        match (prelude.kind, &self.want) {
            (MessageKind::Grant, _) => return Ok(Arrived::Grant),
            (MessageKind::Rest, Some(_)) => {}
            (kind, None) if kind == takes.kind => {
                let most = HEADER_LEN + FRAME_ALIGN + takes.most_body;
                let want = prelude.frame_len as usize;
                if want > most {
                    return refuse(format!("a frame of {want} bytes, at most {most} are allowed"));
                }
                self.bytes.clear();
                self.bytes.shrink_to(KEEP);
                if part.len() == want {
                    self.bytes.extend_from_slice(part);
                    return Ok(Arrived::Frame(prelude.kind, prelude.region));
                }
                self.want = Some((want, prelude.kind, prelude.region, Instant::now()));
            }
            (kind, _) => return refuse(format!("a message of kind {kind:?} where another was due")),
        }
        let Some((want, kind, region, _)) = self.want else { return Ok(Arrived::Part) };
        if self.bytes.len() + part.len() > want {
            return refuse(format!("more than the {want} bytes of a frame"));
        }
        self.bytes.extend_from_slice(part);
        if self.bytes.len() < want {
            return Ok(Arrived::Part);
        }
        self.want = None;
        Ok(Arrived::Frame(kind, region))
    }
}

/// A queue pair with what messages need. Its fields are apart so that writes under way can go on receiving.
pub(crate) struct Session {
    pub pair: QueuePair,
    pub line: Line,
}

/// Credits and the frame being received.
pub(crate) struct Line {
    credits: Credits,
    peer_slot: usize,
    takes: Takes,
    pub assembly: Assembly,
    /// Whether something arrived since somebody last asked, and since when nothing had then.
    heard: bool,
    silent: Instant,
}

/// What this side receives, as it tells the peer.
pub(crate) fn terms(depths: QueueDepths) -> Terms {
    Terms { receives: depths.receives as u16, slot_len: SLOT as u32 }
}

/// Posts all receives and leaves slots for sending, out of the registered pool.
pub(crate) fn equip(
    pair: &mut QueuePair,
    memory: &Arc<MemoryRegion>,
    depths: QueueDepths,
    deadline: Instant,
) -> Result<()> {
    let pool: &Arc<Pool> = memory.pool();
    for slot in memory.slots(pool.alloc(depths.receives as usize * SLOT, deadline)?, SLOT)? {
        pair.post_receive(slot)?;
    }
    for slot in memory.slots(pool.alloc(SEND_SLOTS as usize * SLOT, deadline)?, SLOT)? {
        pair.keep_slot(slot);
    }
    Ok(())
}

impl Session {
    pub fn new(pair: QueuePair, own: QueueDepths, peer: Terms, takes: Takes) -> Self {
        let line = Line {
            credits: Credits::new(terms(own), peer),
            peer_slot: (peer.slot_len as usize).min(SLOT),
            takes,
            assembly: Assembly::default(),
            heard: false,
            silent: Instant::now(),
        };
        Session { pair, line }
    }

    /// The next thing that has arrived, if any; its receive is posted again. Until `deadline` at most it waits for room to
    /// say so, which it rarely has to.
    pub fn take(&mut self, deadline: impl FnOnce() -> Instant) -> Result<Option<Arrived>> {
        self.line.take(&mut self.pair, deadline)
    }

    /// Whether a short answer can be sent without waiting for the peer.
    pub fn is_free(&mut self) -> bool {
        self.line.credits.may_send() && self.pair.has_free_slot().unwrap_or(true)
    }

    /// Sends a frame, in as many messages as it needs.
    pub fn send_frame(&mut self, kind: MessageKind, region: Region, frame: &[u8], deadline: Instant) -> Result<()> {
        self.line.send_frame(&mut self.pair, kind, region, frame, deadline)
    }
}

impl Line {
    /// For how long nothing has arrived, as far as whoever asks now and then can tell: arrivals don't look at the clock.
    pub fn silent_for(&mut self) -> Duration {
        if std::mem::take(&mut self.heard) {
            self.listen_anew();
        }
        self.silent.elapsed()
    }

    /// Silence is counted from now on.
    pub fn listen_anew(&mut self) {
        self.silent = Instant::now();
    }

    /// From now on a body may have so many bytes.
    pub fn take_bodies_of(&mut self, most: usize) {
        self.takes.most_body = most;
    }

    /// Sends a frame, in as many messages as it needs.
    pub fn send_frame(
        &mut self,
        pair: &mut QueuePair,
        kind: MessageKind,
        region: Region,
        frame: &[u8],
        deadline: Instant,
    ) -> Result<()> {
        let most = self.peer_slot - PRELUDE_LEN;
        let mut kind = kind;
        for part in frame.chunks(most) {
            self.await_credit(pair, deadline)?;
            let mut slot = pair.take_slot(deadline)?;
            let granted = self.credits.sent(u8::MAX);
            let prelude = Prelude { kind, granted, frame_len: frame.len() as u32, region };
            let bytes = slot.bytes_mut();
            bytes[..PRELUDE_LEN].copy_from_slice(&prelude.encode());
            bytes[PRELUDE_LEN..PRELUDE_LEN + part.len()].copy_from_slice(part);
            pair.send(slot, PRELUDE_LEN + part.len(), deadline)?;
            kind = MessageKind::Rest;
        }
        Ok(())
    }

    pub fn take(&mut self, pair: &mut QueuePair, deadline: impl FnOnce() -> Instant) -> Result<Option<Arrived>> {
        let Some(completion) = pair.poll()? else { return Ok(None) };
        self.heard = true;
        let (arrived, granted) = match completion.immediate {
            Some(number) => {
                let announced = Announced::decode(number);
                (Arrived::Written(announced), announced.granted)
            }
            None => {
                let message = completion.slot.bytes().get(..completion.len).unwrap_or_default();
                let (prelude, part) = Prelude::decode(message)?;
                (self.assembly.add(&prelude, part, self.takes)?, prelude.granted)
            }
        };
        pair.post_receive(completion.slot)?;
        self.credits.received(granted)?;
        if self.credits.must_grant() {
            self.grant(pair, deadline())?;
        }
        Ok(Some(arrived))
    }

    fn grant(&mut self, pair: &mut QueuePair, deadline: Instant) -> Result<()> {
        let mut slot = pair.take_slot(deadline)?;
        let granted = self.credits.sent(u8::MAX);
        let prelude = Prelude { kind: MessageKind::Grant, granted, frame_len: 0, region: Region::default() };
        slot.bytes_mut()[..PRELUDE_LEN].copy_from_slice(&prelude.encode());
        Ok(pair.send(slot, PRELUDE_LEN, deadline)?)
    }

    /// Waits until a message or an announced write may be sent. Nothing but grants may arrive meanwhile.
    pub fn await_credit(&mut self, pair: &mut QueuePair, deadline: Instant) -> Result<()> {
        while !self.credits.may_send() {
            match self.take(pair, || deadline)? {
                Some(Arrived::Grant) => {}
                Some(other) => {
                    return Err(Error::new(
                        ErrorKind::Protocol,
                        format!("{other:?} while another frame was under way"),
                    ));
                }
                None => {
                    if !pair.wait(deadline)? {
                        return Err(Error::new(
                            ErrorKind::Timeout,
                            "the peer takes nothing: it gave no credit in time",
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Accounts for an announced write: the credits it carries.
    pub fn announced(&mut self) -> u8 {
        self.credits.sent(Announced::MAX_GRANTED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_of_another_kind_or_beyond_its_limit_takes_no_memory() {
        let frame = |kind, len: usize| Prelude { kind, granted: 0, frame_len: len as u32, region: Region::default() };
        let most = |body| HEADER_LEN + FRAME_ALIGN + body;
        let greeted = Takes { most_body: 64 << 10, ..Takes::GREETINGS };
        for (takes, kind, body, taken) in [
            (Takes::GREETINGS, MessageKind::Request, MAX_GREETING_BODY, true),
            (Takes::GREETINGS, MessageKind::Request, MAX_GREETING_BODY + 1, false),
            (Takes::GREETINGS, MessageKind::Answer, 0, false),
            (Takes::GREETINGS, MessageKind::Rest, 0, false),
            (greeted, MessageKind::Request, 64 << 10, true),
            (greeted, MessageKind::Answer, 64 << 10, false),
            (Takes::ANSWERS, MessageKind::Answer, MAX_ANSWER_BODY, true),
            (Takes::ANSWERS, MessageKind::Answer, MAX_ANSWER_BODY + 1, false),
            (Takes::ANSWERS, MessageKind::Request, 0, false),
        ] {
            let mut assembly = Assembly::default();
            let arrived = assembly.add(&frame(kind, most(body)), b"part", takes);
            assert_eq!(arrived.is_ok(), taken, "{takes:?} {kind:?} {body}: {arrived:?}");
            assert!(arrived.is_ok() || arrived.is_err_and(|e| e.kind() == ErrorKind::Protocol));
            assert_eq!(assembly.bytes.len(), if taken { 4 } else { 0 });
        }
    }
}
