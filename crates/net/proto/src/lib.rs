//! The wire format of the data plane: a fixed header, a small body, a payload. It knows no socket, no clock and no
//! thread: bytes in, values out.
//!
//! A frame is [`HEADER_LEN`] bytes of header, `payload_len` bytes of payload, `body_len` bytes of body, and zeros up
//! to a multiple of [`FRAME_ALIGN`]. The payload comes before the body so that one `recvmsg` can put the header in a
//! small buffer and the payload directly at its destination. Header and padding keep the payload's offset within the
//! sender's cache lines the same in every frame, whatever the previous lengths. That offset can matter: the bare
//! block reader over loopback at 1 MiB took 0.6-0.8 CPU-s/GB at the reader with its destination 16 bytes into a page,
//! in every run, and 0.14-0.34 at offsets 0, 32, 64, 1024 and 2048. Among those five the machine was too busy to show
//! a difference, so no gain of this padding itself has been shown.
//!
//! A request with a payload has it last: header, body, padding, payload, padding. The node knows from the body what the
//! payload is for, and receives it into memory of its own choice.
//!
//! All numbers are little-endian. A request and the answer share an id and an operation.
//!
//! Decoders borrow from the input, never panic, and never allocate more than the input could hold.
#![forbid(unsafe_code)]

mod answer;
mod codec;
mod header;
mod lock_times;
mod object_ranges;
mod open_flags;
mod proof;
mod rail;
pub mod rdma;
mod request;
mod stage;
mod store;
mod wire_caller;
mod wire_value;
mod write_answer;
mod writes;

pub use answer::{
    AnswerBody, CapacityAnswer, HOT_BODY, REDIRECT_BODY, WelcomeAnswer, decode_error, encode_error_message,
    is_hot_answer, is_redirect,
};
pub use header::{FrameFlags, FrameHeader, FrameOp};
pub use lock_times::{LOCK_TIMES, LockTimes};
pub use object_ranges::{ObjectRange, ObjectRanges, RangeDone, RangeList, RangesDone};
pub use open_flags::OpenFlags;
pub use proof::{Challenge, ChallengeAnswer, MAX_PEER_NAME, NONCE_LEN, PROOF_LEN, PROOF_SCHEME, TokenProof};
pub use rail::{MAX_RAILS, RailInfo, RailLink};
pub use request::{HelloRequest, NodeRequest, ReadFlags, ReadRequest, VolumeId, check_path};
pub use stage::{MAX_STAGE_CALL, StageRequest};
pub use store::{
    SentPart, SentParts, StoreAnswer, StoreAttributes, StoreBody, StoreBytes, StoreCall, StoreCondition, StoreObject,
    StoreOwner, StoreRequest, StoreRetry, StoreSettings, StoreSource, TextList, UploadParts,
};
pub use wire_caller::{MAX_GROUPS, WireCaller};
pub use write_answer::{KnownGrants, WriteAnswer};
pub use writes::{ChangeId, NumberList, WriteCall, WriteRequest};

/// Length of the fixed header in bytes.
pub const HEADER_LEN: usize = 64;
/// Every frame is padded with zeros to a multiple of this many bytes.
pub const FRAME_ALIGN: usize = 64;
/// The first four bytes of every frame: `SPUR`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"SPUR");
/// The oldest protocol version this build speaks.
pub const MIN_VERSION: u16 = 3;
/// The newest protocol version this build speaks.
pub const MAX_VERSION: u16 = 9;
/// The oldest version whose peers write: other operations kept their form since [`MIN_VERSION`], those on writable volumes did
/// not.
pub const MIN_WRITE_VERSION: u16 = 7;
/// The oldest version whose nodes send requests of a mount to the store of a bucket.
pub const MIN_STORE_VERSION: u16 = 8;
/// The oldest version whose nodes answer calls about staged files.
pub const MIN_STAGE_VERSION: u16 = 9;
/// The version of the frames themselves: header, order of parts, padding. The handshake agrees on the format of
/// bodies, so every peer understands a handshake.
pub const FRAME_VERSION: u16 = 1;
/// The longest body of a request: the longest path a file system accepts fits several times.
pub const MAX_REQUEST_BODY: usize = 64 << 10;
/// The longest request body before the handshake: a handshake with the longest source.
pub const MAX_GREETING_BODY: usize = 8 << 10;
/// The longest body of an answer: a page of 1000 names of 1 KiB with attributes fits twice.
pub const MAX_ANSWER_BODY: usize = 4 << 20;
/// The longest payload of one frame: the largest block.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// The longest payload of a request: the bytes of a write, of a piece of an object, or of a staged file.
pub const MAX_WRITE: usize = 4 << 20;
/// The longest version text of an object.
pub const MAX_VERSION_TEXT: usize = 4096;

/// The zeros that follow a payload and a body of together `len` bytes.
pub const fn frame_padding(len: usize) -> &'static [u8] {
    const ZEROS: [u8; FRAME_ALIGN] = [0; FRAME_ALIGN];
    const { assert!(HEADER_LEN.is_multiple_of(FRAME_ALIGN)) };
    ZEROS.split_at(len.next_multiple_of(FRAME_ALIGN) - len).0
}

/// Why bytes are no frame, or a value does not fit in one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// The first four bytes are not [`MAGIC`].
    #[error("the frame starts with {0:#010x} instead of 'SPUR': this is no Spurline peer")]
    Magic(u32),
    /// The protocol version is not supported by this build.
    #[error("the peer speaks protocol version {0}, this build {MIN_VERSION} to {MAX_VERSION}")]
    Version(u16),
    /// A length is above the limit.
    #[error("{what} of {len} bytes, at most {max} are allowed")]
    TooLong {
        /// The value that was too long.
        what: &'static str,
        /// Its length.
        len: u64,
        /// The limit.
        max: u64,
    },
    /// The bytes end inside a value.
    #[error("the bytes end inside {0}")]
    Truncated(&'static str),
    /// Bytes are left after the last value.
    #[error("{0} bytes are left after the last value")]
    Trailing(usize),
    /// A text is not UTF-8.
    #[error("{0} is not UTF-8")]
    NotText(&'static str),
    /// A number has no meaning.
    #[error("{what} has the unknown value {value}")]
    Value {
        /// The kind of number.
        what: &'static str,
        /// The number found.
        value: u64,
    },
    /// A path that no file can have: with NUL, an empty component, `.` or `..`.
    #[error("a path has a component that no file can have: {0}")]
    Path(&'static str),
}

impl From<FrameError> for spurline_types::Error {
    fn from(e: FrameError) -> Self {
        spurline_types::Error::new(spurline_types::ErrorKind::Protocol, e.to_string())
    }
}
