//! The wire format over a queue pair: messages with a short prelude, write notices, and the credits that keep receive
//! queues from running empty. It knows no queue pair.
//!
//! A **message** is one SEND of at most the peer's slot length: a [`MessagePrelude`] of [`PRELUDE_LEN`] bytes, then a
//! part of a frame (header and body, as everywhere; no payload). The first message of a request names the region of
//! the reader's memory for the payload. A frame longer than a slot continues in further messages.
//!
//! A **payload** arrives as RDMA writes into that region, in order. Some of them carry a notice as immediate data
//! ([`WriteNotice`]): the number of payload bytes written so far. The last notice may complete the answer, so that a
//! plain read costs one message and one write; every other answer ends with a frame.
//!
//! The **bytes of a request** (a write) are either part of its frame, behind the body's padding, or in the reader's
//! memory: the region then names them, and the node reads them from there. Such a request has no payload in its answer.
//!
//! Every message and every write with a notice consumes one receive of the other side and therefore costs one credit
//! ([`SendCredits`]). Every transfer in the opposite direction also reports the receives posted again.

use crate::codec::ByteCursor;
use crate::{FrameError, HEADER_LEN, MAX_PAYLOAD};

/// Length of the prelude in bytes.
pub const PRELUDE_LEN: usize = 32;
/// The first four bytes of every message: `SPRD`.
pub const RDMA_MAGIC: u32 = u32::from_le_bytes(*b"SPRD");
/// The version of this module's format; both sides send it when they connect.
pub const RDMA_VERSION: u16 = 1;
/// The minimum number of receives that each side must post.
pub const MIN_RECEIVES: u16 = 4;
/// The shortest slot: a prelude, a header and part of a path.
pub const MIN_SLOT_LEN: u32 = 512;

/// The kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// The first part of a request's frame.
    Request,
    /// The first part of an answer's frame.
    Answer,
    /// The next part of the current frame.
    Rest,
    /// No frame, only credits.
    Grant,
}

/// The reader's memory for a payload: the destination, or where the bytes of a request are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PayloadRegion {
    /// Its address in the reader's process.
    pub addr: u64,
    /// Its length in bytes.
    pub len: u64,
    /// Its key.
    pub rkey: u32,
}

/// The first bytes of every message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessagePrelude {
    /// The kind of the message.
    pub kind: MessageKind,
    /// Receives posted again since the last report.
    pub granted: u8,
    /// Length of the whole frame of which this message carries a part.
    pub frame_len: u32,
    /// The destination of the answer's payload, or the place of the request's own; its length is 0 except in a request.
    pub region: PayloadRegion,
}

impl MessagePrelude {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; PRELUDE_LEN] {
        let mut out = [0u8; PRELUDE_LEN];
        out[0..4].copy_from_slice(&RDMA_MAGIC.to_le_bytes());
        out[4] = match self.kind {
            MessageKind::Request => 1,
            MessageKind::Answer => 2,
            MessageKind::Rest => 3,
            MessageKind::Grant => 4,
        };
        out[5] = self.granted;
        // The two remaining bytes are reserved: written as 0, ignored.
        out[8..16].copy_from_slice(&self.region.addr.to_le_bytes());
        // A payload is at most 64 MiB, so the length of its region fits.
        let len = u32::try_from(self.region.len).unwrap_or(u32::MAX);
        out[16..20].copy_from_slice(&len.to_le_bytes());
        out[20..24].copy_from_slice(&self.region.rkey.to_le_bytes());
        out[24..28].copy_from_slice(&self.frame_len.to_le_bytes());
        out
    }

    /// Decodes the front of a message; returns it with the part of a frame behind it.
    ///
    /// # Errors
    /// When the bytes are no message, or the part is longer than the frame.
    pub fn decode(message: &[u8]) -> Result<(Self, &[u8]), FrameError> {
        let mut take = ByteCursor(message);
        let magic = take.take_u32("a message's prelude")?;
        if magic != RDMA_MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let kind = match take.take_u8("a message's kind")? {
            1 => MessageKind::Request,
            2 => MessageKind::Answer,
            3 => MessageKind::Rest,
            4 => MessageKind::Grant,
            value => return Err(FrameError::Value { what: "a message's kind", value: value.into() }),
        };
        let granted = take.take_u8("credits")?;
        take.take_u16("a message's prelude")?;
        let addr = take.take_u64("a region's address")?;
        let len = take.take_u32("a region's length")?;
        let rkey = take.take_u32("a region's key")?;
        let frame_len = take.take_u32("a frame's length")?;
        take.take_u32("a message's prelude")?;
        let part = take.0;
        let fits = match kind {
            MessageKind::Grant => part.is_empty(),
            MessageKind::Request | MessageKind::Answer => part.len() >= HEADER_LEN && part.len() <= frame_len as usize,
            MessageKind::Rest => !part.is_empty() && part.len() <= frame_len as usize,
        };
        if !fits {
            return Err(FrameError::Value { what: "the length of a message", value: part.len() as u64 });
        }
        Ok((MessagePrelude { kind, granted, frame_len, region: PayloadRegion { addr, len: len.into(), rkey } }, part))
    }
}

/// The immediate data of a write with a notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteNotice {
    /// Payload bytes written so far, from the start.
    pub so_far: u32,
    /// Receives posted again, at most [`WriteNotice::MAX_GRANTED`].
    pub granted: u8,
    /// The answer is complete: a success with this payload and an empty body.
    pub last: bool,
}

impl WriteNotice {
    /// The most credits one write can carry.
    pub const MAX_GRANTED: u8 = 15;
    const LAST: u32 = 1 << 31;
    const SO_FAR_BITS: u32 = 27;

    /// The immediate data.
    pub fn encode(self) -> u32 {
        const { assert!(MAX_PAYLOAD < 1 << Self::SO_FAR_BITS) };
        let so_far = self.so_far & ((1 << Self::SO_FAR_BITS) - 1);
        let granted = u32::from(self.granted.min(Self::MAX_GRANTED)) << Self::SO_FAR_BITS;
        so_far | granted | if self.last { Self::LAST } else { 0 }
    }

    /// Decodes immediate data; every number is valid.
    pub fn decode(number: u32) -> Self {
        WriteNotice {
            so_far: number & ((1 << Self::SO_FAR_BITS) - 1),
            granted: (number >> Self::SO_FAR_BITS & 15) as u8,
            last: number & Self::LAST != 0,
        }
    }
}

/// The parameters each side sends when it connects or accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectTerms {
    /// Receives that this side keeps posted: the initial credits of the other side.
    pub receives: u16,
    /// Length of each receive in bytes.
    pub slot_len: u32,
}

impl ConnectTerms {
    /// Length of the encoded parameters in a connect request.
    pub const LEN: usize = 12;

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut out = [0u8; Self::LEN];
        out[0..4].copy_from_slice(&RDMA_MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&RDMA_VERSION.to_le_bytes());
        out[6..8].copy_from_slice(&self.receives.to_le_bytes());
        out[8..12].copy_from_slice(&self.slot_len.to_le_bytes());
        out
    }

    /// Decodes the parameters. Devices pad the data with zeros, so trailing bytes are ignored.
    ///
    /// # Errors
    /// When the peer is no Spurline, of another version, or offers less than the minimum.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let mut take = ByteCursor(bytes);
        let magic = take.take_u32("terms")?;
        if magic != RDMA_MAGIC {
            return Err(FrameError::Magic(magic));
        }
        let version = take.take_u16("terms")?;
        if version != RDMA_VERSION {
            return Err(FrameError::Version(version));
        }
        let terms = ConnectTerms { receives: take.take_u16("terms")?, slot_len: take.take_u32("terms")? };
        if terms.receives < MIN_RECEIVES {
            return Err(FrameError::Value { what: "the number of receives", value: terms.receives.into() });
        }
        if terms.slot_len < MIN_SLOT_LEN {
            return Err(FrameError::Value { what: "the length of receives", value: terms.slot_len.into() });
        }
        Ok(terms)
    }
}

/// One side's credit account: credits to spend, and credits to grant.
///
/// A message needs a credit beyond the last one. The last credit is reserved for grants, so that two sides without
/// credits can still report receives posted again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendCredits {
    /// Receives of the peer that are posted and unused, as far as is known here.
    may_send: u32,
    peer_receives: u32,
    /// Receives posted again here and not reported to the peer yet.
    owed: u32,
    own_receives: u32,
}

impl SendCredits {
    /// The account at the start of a connection.
    pub fn new(own: ConnectTerms, peer: ConnectTerms) -> Self {
        SendCredits {
            may_send: peer.receives.into(),
            peer_receives: peer.receives.into(),
            owed: 0,
            own_receives: own.receives.into(),
        }
    }

    /// Whether a message or a write with a notice may be sent.
    pub fn may_send(&self) -> bool {
        self.may_send > 1
    }

    /// Whether a separate grant must be sent, and may be.
    pub fn must_grant(&self) -> bool {
        self.owed >= self.own_receives / 2 && self.may_send > 0
    }

    /// Accounts for a transfer; returns the number of credits it carries, at most `most`.
    pub fn account_sent(&mut self, most: u8) -> u8 {
        self.may_send = self.may_send.saturating_sub(1);
        let carried = self.owed.min(most.into());
        self.owed -= carried;
        carried as u8
    }

    /// Accounts for a received transfer after the receive was posted again.
    ///
    /// # Errors
    /// When the peer grants more credits than receives.
    pub fn account_received(&mut self, granted: u8) -> Result<(), FrameError> {
        self.owed += 1;
        self.may_send += u32::from(granted);
        if self.may_send > self.peer_receives {
            return Err(FrameError::Value { what: "the peer's credits", value: self.may_send.into() });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..200), fix in any::<bool>()) {
            let mut bytes = bytes;
            if fix && bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&RDMA_MAGIC.to_le_bytes());
            }
            if let Ok((prelude, part)) = MessagePrelude::decode(&bytes) {
                let again = [&prelude.encode()[..], part].concat();
                prop_assert_eq!(MessagePrelude::decode(&again).unwrap(), (prelude, part));
            }
            if let Ok(terms) = ConnectTerms::decode(&bytes) {
                prop_assert_eq!(ConnectTerms::decode(&terms.encode()).unwrap(), terms);
            }
        }

        #[test]
        fn numbers_round_trip(number in any::<u32>()) {
            prop_assert_eq!(WriteNotice::decode(number).encode(), number);
        }

        /// Two sides that send as much as they may, in any order: no receive queue overflows, and neither side stalls
        /// for good.
        #[test]
        fn no_queue_overflows_and_nobody_starves(
            receives in (4u16..20, 4u16..20),
            order in prop::collection::vec((any::<bool>(), 0u8..4), 1..400),
        ) {
            let terms = |receives| ConnectTerms { receives, slot_len: 4096 };
            let (a, b) = (terms(receives.0), terms(receives.1));
            let mut sides = [SendCredits::new(a, b), SendCredits::new(b, a)];
            let room = [usize::from(receives.0), usize::from(receives.1)];
            // Transfers in flight to each side, as the credits they carry.
            let mut ways = [VecDeque::new(), VecDeque::new()];
            let mut sent = [0u32; 2];
            let step = |sides: &mut [SendCredits; 2], ways: &mut [VecDeque<u8>; 2], sent: &mut [u32; 2], who: usize, what| {
                match what {
                    // Sends if it may.
                    0 | 1 => if sides[who].may_send() {
                        let carried = sides[who].account_sent(if what == 0 { u8::MAX } else { WriteNotice::MAX_GRANTED });
                        ways[1 - who].push_back(carried);
                        sent[who] += 1;
                    }
                    // Takes what arrived, and grants when it must.
                    _ => if let Some(granted) = ways[who].pop_front() {
                        sides[who].account_received(granted).unwrap();
                        if sides[who].must_grant() {
                            let carried = sides[who].account_sent(u8::MAX);
                            ways[1 - who].push_back(carried);
                        }
                    }
                }
            };
            for (who, what) in order {
                step(&mut sides, &mut ways, &mut sent, usize::from(who), what);
                for side in 0..2 {
                    prop_assert!(ways[side].len() <= room[side], "{} on their way to {} receives", ways[side].len(), room[side]);
                }
            }
            // When both consume all that arrives, each can send again, whichever was idle.
            for quiet in 0..2 {
                for _ in 0..100 {
                    while ways.iter().any(|w| !w.is_empty()) {
                        step(&mut sides, &mut ways, &mut sent, 0, 2);
                        step(&mut sides, &mut ways, &mut sent, 1, 2);
                    }
                    let before = sent[1 - quiet];
                    step(&mut sides, &mut ways, &mut sent, 1 - quiet, 0);
                    prop_assert!(sent[1 - quiet] > before, "side {} may send no more: {:?}", 1 - quiet, sides);
                    for side in 0..2 {
                        prop_assert!(ways[side].len() <= room[side]);
                    }
                }
            }
        }
    }
}
