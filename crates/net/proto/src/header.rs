//! The fixed header at the start of every frame. It does not know the format of bodies.

use crate::{FRAME_VERSION, FrameError, HEADER_LEN, MAGIC, MAX_ANSWER_BODY, MAX_PAYLOAD, MAX_REQUEST_BODY, MAX_WRITE};

/// The operation of a request and of the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FrameOp {
    /// Opens a connection: versions and names.
    Hello,
    /// A heartbeat.
    Ping,
    /// Requests a nonce for a proof, before the handshake.
    Challenge,
    /// Proves that the peer holds the group token.
    Prove,
    /// Attributes of one path.
    Lookup,
    /// Attributes of the object that is the marker of a folder.
    FolderMarker,
    /// A page of a directory.
    List,
    /// Target of a symbolic link.
    ReadLink,
    /// Headers that are stored with an object.
    ObjectHeaders,
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
    /// Takes a part of all blocks out of a node's cache.
    DropAll,
    /// Describes the node itself.
    Describe,
    /// Changes a node's share of its group's blocks.
    Weigh,
    /// Sends rules for folders to a node and returns the node's rules.
    Rules,
    /// Applies the rules for folders to the ranges a node caches.
    Classify,
    /// A page of the objects a node caches.
    HeldObjects,
    /// An operation on a writable volume.
    Write,
    /// A request for the store of a bucket.
    Store,
    /// A call of one node to another about staged files.
    Stage,
    /// An operation of a newer peer; the number is kept.
    Unknown(u16),
}

impl FrameOp {
    const NAMED: [(FrameOp, u16); 23] = [
        (FrameOp::Hello, 1),
        (FrameOp::Ping, 2),
        (FrameOp::Challenge, 3),
        (FrameOp::Prove, 4),
        (FrameOp::Lookup, 16),
        (FrameOp::List, 17),
        (FrameOp::ReadLink, 18),
        (FrameOp::Read, 19),
        (FrameOp::StatFs, 20),
        (FrameOp::Info, 21),
        (FrameOp::Warm, 22),
        (FrameOp::Drop, 23),
        (FrameOp::Describe, 24),
        (FrameOp::Weigh, 25),
        (FrameOp::Rules, 26),
        (FrameOp::Classify, 27),
        (FrameOp::HeldObjects, 28),
        (FrameOp::DropAll, 29),
        (FrameOp::ObjectHeaders, 30),
        (FrameOp::FolderMarker, 31),
        (FrameOp::Write, 32),
        (FrameOp::Store, 33),
        (FrameOp::Stage, 34),
    ];

    /// The number on the wire.
    pub const fn code(self) -> u16 {
        match self {
            FrameOp::Hello => 1,
            FrameOp::Ping => 2,
            FrameOp::Challenge => 3,
            FrameOp::Prove => 4,
            FrameOp::Lookup => 16,
            FrameOp::List => 17,
            FrameOp::ReadLink => 18,
            FrameOp::Read => 19,
            FrameOp::StatFs => 20,
            FrameOp::Info => 21,
            FrameOp::Warm => 22,
            FrameOp::Drop => 23,
            FrameOp::Describe => 24,
            FrameOp::Weigh => 25,
            FrameOp::Rules => 26,
            FrameOp::Classify => 27,
            FrameOp::HeldObjects => 28,
            FrameOp::DropAll => 29,
            FrameOp::ObjectHeaders => 30,
            FrameOp::FolderMarker => 31,
            FrameOp::Write => 32,
            FrameOp::Store => 33,
            FrameOp::Stage => 34,
            FrameOp::Unknown(code) => code,
        }
    }

    /// The operation with a wire number; an unknown number becomes [`FrameOp::Unknown`].
    pub fn from_code(code: u16) -> Self {
        Self::NAMED.iter().find(|(_, c)| *c == code).map_or(FrameOp::Unknown(code), |(op, _)| *op)
    }

    /// Every operation of this build.
    pub fn all_known() -> impl Iterator<Item = FrameOp> {
        Self::NAMED.into_iter().map(|(op, _)| op)
    }
}

/// Bits of a header; unknown bits are kept and ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FrameFlags(pub u16);

impl FrameFlags {
    /// The frame answers a request.
    pub const ANSWER: FrameFlags = FrameFlags(1);

    /// Whether all bits of `other` are set.
    pub fn contains(self, other: FrameFlags) -> bool {
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
pub struct FrameHeader {
    /// Version of the frame.
    pub version: u16,
    /// The operation.
    pub op: FrameOp,
    /// Ties an answer to the request.
    pub id: u64,
    /// Bits.
    pub flags: FrameFlags,
    /// 0, or the code of an error kind (answers only).
    pub status: u16,
    /// Length of the body in bytes.
    pub body_len: u32,
    /// Length of the payload in bytes.
    pub payload_len: u32,
}

impl FrameHeader {
    /// The header of a request with a body of `body_len` bytes and no payload.
    pub fn new_request(op: FrameOp, id: u64, body_len: u32) -> Self {
        FrameHeader { version: FRAME_VERSION, op, id, flags: FrameFlags(0), status: 0, body_len, payload_len: 0 }
    }

    /// The header of an answer to this request.
    ///
    /// # Errors
    /// When a length is above the limit.
    pub fn new_answer(&self, status: u16, body_len: usize, payload_len: usize) -> Result<Self, FrameError> {
        Ok(FrameHeader {
            version: FRAME_VERSION,
            op: self.op,
            id: self.id,
            flags: FrameFlags::ANSWER,
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

    /// Decodes a header. Checks the magic only, so that a peer of another version can still be answered.
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
        Ok(FrameHeader {
            version: u16_at(4),
            op: FrameOp::from_code(u16_at(6)),
            id: u64::from(u32_at(8)) | u64::from(u32_at(12)) << 32,
            flags: FrameFlags(u16_at(16)),
            status: u16_at(18),
            body_len: u32_at(20),
            payload_len: u32_at(24),
        })
    }

    /// Checks the magic of a partially received frame, so that a peer of another protocol is detected before the rest
    /// of a header that it may never send.
    ///
    /// # Errors
    /// When the first bytes differ from the magic.
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

    /// Checks the rules for requests: a supported version, no answer flag, a payload only where bytes are written, and
    /// lengths within their limits.
    ///
    /// # Errors
    /// When a rule does not hold.
    pub fn check_request(&self) -> Result<(), FrameError> {
        self.check_version()?;
        if self.flags.contains(FrameFlags::ANSWER) {
            return Err(FrameError::Value { what: "the flags of a request", value: self.flags.0.into() });
        }
        let takes_bytes = matches!(self.op, FrameOp::Write | FrameOp::Store | FrameOp::Stage);
        let most = if takes_bytes { MAX_WRITE } else { 0 };
        check_len("a request's payload", self.payload_len as usize, most)?;
        check_len("a request's body", self.body_len as usize, MAX_REQUEST_BODY)?;
        Ok(())
    }

    /// Checks the header of the answer to request `id` for `op`.
    ///
    /// # Errors
    /// When the answer is of something else, or a length is above the limit.
    pub fn check_answer(&self, op: FrameOp, id: u64) -> Result<(), FrameError> {
        self.check_version()?;
        if !self.flags.contains(FrameFlags::ANSWER) {
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
        if self.version == FRAME_VERSION { Ok(()) } else { Err(FrameError::Version(self.version)) }
    }
}

/// `len` as the wire's u32, if it is at most `max`.
pub(crate) fn check_len(what: &'static str, len: usize, max: usize) -> Result<u32, FrameError> {
    match u32::try_from(len) {
        Ok(wire) if len <= max => Ok(wire),
        _ => Err(FrameError::TooLong { what, len: len as u64, max: max as u64 }),
    }
}
