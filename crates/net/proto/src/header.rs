//! The fixed header that starts every frame. It knows nothing of what bodies mean.

use crate::{
    FRAME_VERSION, FrameError, HEADER_LEN, MAGIC, MAX_ANSWER_BODY, MAX_PAYLOAD, MAX_REQUEST_BODY, MAX_VERSION,
    MIN_VERSION,
};

/// What a frame asks, or answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// Opens a connection: versions and names.
    Hello,
    /// Asks for a sign of life.
    Ping,
    /// Asks for a number to be proved with, before the greeting.
    Challenge,
    /// Proves that the peer holds the group token.
    Prove,
    /// Attributes of one path.
    Lookup,
    /// A page of a directory.
    List,
    /// Target of a symbolic link.
    ReadLink,
    /// Bytes of an object at one version.
    Read,
    /// Capacity of a volume.
    StatFs,
    /// Which blocks of an object are held.
    Info,
    /// Brings parts of objects into a node's cache.
    Warm,
    /// Takes parts of objects out of a node's cache.
    Drop,
    /// Bytes of an object, asked by another node.
    Pull,
    /// Changes a node's share of its group's blocks.
    Weigh,
    /// Rules for folders, given to a node and told by it.
    Rules,
    /// Brings what a node holds of parts under the rules for their folders.
    Classify,
    /// Bytes of an object, unless another node is to be asked for them.
    ReadHere,
    /// Bytes of an object, asked by another node, to be fetched when they are not held.
    Seek,
    /// An operation of a newer peer; the number is kept.
    Unknown(u16),
}

impl Op {
    const NAMED: [(Op, u16); 18] = [
        (Op::Hello, 1),
        (Op::Ping, 2),
        (Op::Challenge, 3),
        (Op::Prove, 4),
        (Op::Lookup, 16),
        (Op::List, 17),
        (Op::ReadLink, 18),
        (Op::Read, 19),
        (Op::StatFs, 20),
        (Op::Info, 21),
        (Op::Warm, 22),
        (Op::Drop, 23),
        (Op::Pull, 24),
        (Op::Weigh, 25),
        (Op::Rules, 26),
        (Op::Classify, 27),
        (Op::ReadHere, 28),
        (Op::Seek, 29),
    ];

    /// The number on the wire.
    pub const fn code(self) -> u16 {
        match self {
            Op::Hello => 1,
            Op::Ping => 2,
            Op::Challenge => 3,
            Op::Prove => 4,
            Op::Lookup => 16,
            Op::List => 17,
            Op::ReadLink => 18,
            Op::Read => 19,
            Op::StatFs => 20,
            Op::Info => 21,
            Op::Warm => 22,
            Op::Drop => 23,
            Op::Pull => 24,
            Op::Weigh => 25,
            Op::Rules => 26,
            Op::Classify => 27,
            Op::ReadHere => 28,
            Op::Seek => 29,
            Op::Unknown(code) => code,
        }
    }

    /// The operation of a number from the wire; one not known here becomes [`Op::Unknown`].
    pub fn from_code(code: u16) -> Self {
        Self::NAMED.iter().find(|(_, c)| *c == code).map_or(Op::Unknown(code), |(op, _)| *op)
    }

    /// Every operation this build knows.
    pub fn all() -> impl Iterator<Item = Op> {
        Self::NAMED.into_iter().map(|(op, _)| op)
    }
}

/// Bits of a header; unknown ones are kept and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(pub u16);

impl Flags {
    /// The frame answers a request.
    pub const ANSWER: Flags = Flags(1);

    /// Whether all bits of `other` are set.
    pub fn contains(self, other: Flags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The first [`HEADER_LEN`] bytes of a frame.
///
/// | offset | bytes | field |
/// |---|---|---|
/// | 0 | 4 | magic `SPUR` |
/// | 4 | 2 | version of the frame |
/// | 6 | 2 | operation |
/// | 8 | 8 | request id |
/// | 16 | 2 | flags |
/// | 18 | 2 | status: 0, or the code of an `ErrorKind` |
/// | 20 | 4 | body length |
/// | 24 | 4 | payload length |
/// | 28 | 36 | reserved: written as 0, ignored |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Version of the frame.
    pub version: u16,
    /// What it asks or answers.
    pub op: Op,
    /// Ties an answer to its request.
    pub id: u64,
    /// Bits.
    pub flags: Flags,
    /// 0, or the code of an error kind (answers only).
    pub status: u16,
    /// Length of the body in bytes.
    pub body_len: u32,
    /// Length of the payload in bytes.
    pub payload_len: u32,
}

impl Header {
    /// The header of a request with a body of `body_len` bytes and no payload.
    pub fn request(op: Op, id: u64, body_len: u32) -> Self {
        Header { version: FRAME_VERSION, op, id, flags: Flags(0), status: 0, body_len, payload_len: 0 }
    }

    /// The header of an answer to this request.
    ///
    /// # Errors
    /// When a length is above its limit.
    pub fn answer(&self, status: u16, body_len: usize, payload_len: usize) -> Result<Self, FrameError> {
        Ok(Header {
            version: self.version.clamp(MIN_VERSION, MAX_VERSION),
            op: self.op,
            id: self.id,
            flags: Flags::ANSWER,
            status,
            body_len: check_len("an answer's body", body_len, MAX_ANSWER_BODY)?,
            payload_len: check_len("an answer's payload", payload_len, MAX_PAYLOAD)?,
        })
    }

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0u8; HEADER_LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC.to_le_bytes());
        put(4, &self.version.to_le_bytes());
        put(6, &self.op.code().to_le_bytes());
        put(8, &self.id.to_le_bytes());
        put(16, &self.flags.0.to_le_bytes());
        put(18, &self.status.to_le_bytes());
        put(20, &self.body_len.to_le_bytes());
        put(24, &self.payload_len.to_le_bytes());
        out
    }

    /// Reads the bytes of a header; checks the magic only, so that an answer can still be given to a peer of another
    /// version.
    ///
    /// # Errors
    /// When the magic is another.
    pub fn decode(bytes: &[u8; HEADER_LEN]) -> Result<Self, FrameError> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let magic = u32_at(0);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        Ok(Header {
            version: u16_at(4),
            op: Op::from_code(u16_at(6)),
            id: u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32,
            flags: Flags(u16_at(16)),
            status: u16_at(18),
            body_len: u32_at(20),
            payload_len: u32_at(24),
        })
    }

    /// Checks the magic of a frame whose beginning is all that has arrived, so that a peer of another protocol is found
    /// out before the rest of a header that it may never send.
    ///
    /// # Errors
    /// When the first bytes are others.
    pub fn check_start(bytes: &[u8]) -> Result<(), FrameError> {
        let magic = MAGIC.to_le_bytes();
        let n = bytes.len().min(magic.len());
        if bytes[..n] == magic[..n] {
            return Ok(());
        }
        let mut found = [0; 4];
        found[..n].copy_from_slice(&bytes[..n]);
        Err(FrameError::Magic(u32::from_le_bytes(found)))
    }

    /// Checks what a server accepts: a version it speaks, no answer, no payload, a body within its limit.
    ///
    /// # Errors
    /// When one of them does not hold.
    pub fn check_request(&self) -> Result<(), FrameError> {
        self.check_version()?;
        if self.flags.contains(Flags::ANSWER) {
            return Err(FrameError::Value { what: "the flags of a request", value: self.flags.0.into() });
        }
        check_len("a request's payload", self.payload_len as usize, 0)?;
        check_len("a request's body", self.body_len as usize, MAX_REQUEST_BODY)?;
        Ok(())
    }

    /// Checks what a client accepts as the answer to request `id` for `op`.
    ///
    /// # Errors
    /// When it answers something else, or a length is above its limit.
    pub fn check_answer(&self, op: Op, id: u64) -> Result<(), FrameError> {
        self.check_version()?;
        if !self.flags.contains(Flags::ANSWER) {
            return Err(FrameError::Value { what: "the flags of an answer", value: self.flags.0.into() });
        }
        if self.id != id {
            return Err(FrameError::Value { what: "the request id of an answer", value: self.id });
        }
        if self.op != op {
            return Err(FrameError::Value { what: "the operation of an answer", value: self.op.code().into() });
        }
        check_len("an answer's body", self.body_len as usize, MAX_ANSWER_BODY)?;
        check_len("an answer's payload", self.payload_len as usize, MAX_PAYLOAD)?;
        if self.status != 0 && self.payload_len != 0 {
            return Err(FrameError::Value { what: "the payload length of an error", value: self.payload_len.into() });
        }
        Ok(())
    }

    fn check_version(&self) -> Result<(), FrameError> {
        if (MIN_VERSION..=MAX_VERSION).contains(&self.version) {
            Ok(())
        } else {
            Err(FrameError::Version(self.version))
        }
    }
}

/// `len` as the u32 it is on the wire, if it is at most `max`.
pub(crate) fn check_len(what: &'static str, len: usize, max: usize) -> Result<u32, FrameError> {
    match u32::try_from(len) {
        Ok(wire) if len <= max => Ok(wire),
        _ => Err(FrameError::TooLong { what, len: len as u64, max: max as u64 }),
    }
}
