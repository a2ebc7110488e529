//! Many ranges of objects in one request, and the result of each, so that a group is warmed and freed without a round
//! trip per file. The module does not know which operation uses the ranges.

use crate::codec::{ByteCursor, PutValue};
use crate::request::take_path;
use crate::{AnswerBody, FrameError, MAX_REQUEST_BODY};
use spurline_types::{Error, ErrorKind};

/// A range of an object at one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectRange<'a> {
    /// The object's path.
    pub path: &'a [u8],
    /// The required version of the bytes.
    pub version: &'a str,
    /// The object's length at that version.
    pub size: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range; the part beyond the object's end is ignored.
    pub len: u64,
}

/// Encoded ranges, validated or encoded here: iterating can't fail.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ObjectRanges<'a>(&'a [u8]);

impl<'a> ObjectRanges<'a> {
    /// The ranges, in order.
    pub fn iter(self) -> impl Iterator<Item = ObjectRange<'a>> {
        let mut take = ByteCursor(self.0);
        std::iter::from_fn(move || if take.0.is_empty() { None } else { take_range(&mut take).ok() })
    }

    pub(crate) fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// Takes the rest of a body.
    pub(crate) fn take_ranges(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        let all = take.0;
        while !take.0.is_empty() {
            take_range(take)?;
        }
        Ok(ObjectRanges(all))
    }
}

impl std::fmt::Debug for ObjectRanges<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

fn take_range<'a>(take: &mut ByteCursor<'a>) -> Result<ObjectRange<'a>, FrameError> {
    Ok(ObjectRange {
        size: take.take_u64("an object's size")?,
        offset: take.take_u64("an offset")?,
        len: take.take_u64("a range's length")?,
        version: take.take_text("a version text")?,
        path: take_path(take)?,
    })
}

/// Ranges collected for a request.
#[derive(Debug, Clone, Default)]
pub struct RangeList {
    bytes: Vec<u8>,
    count: usize,
}

impl RangeList {
    /// Length of the other fields of a request that carries ranges.
    const REQUEST_OVERHEAD: usize = 64;

    /// Adds a range; false, and nothing is added, when it does not fit into the request any more.
    pub fn push(&mut self, part: &ObjectRange<'_>) -> bool {
        let before = self.bytes.len();
        for n in [part.size, part.offset, part.len] {
            self.bytes.put_u64(n);
        }
        self.bytes.put_bytes(part.version.as_bytes());
        self.bytes.put_bytes(part.path);
        if self.bytes.len() > MAX_REQUEST_BODY - Self::REQUEST_OVERHEAD {
            self.bytes.truncate(before);
            return false;
        }
        self.count += 1;
        true
    }

    /// Number of ranges.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The encoded ranges for a request.
    pub fn as_ranges(&self) -> ObjectRanges<'_> {
        ObjectRanges(&self.bytes)
    }
}

/// The longest error message: with as many ranges as fit into a request, all results fit into an answer.
const MAX_ERROR_MESSAGE: usize = 512;

/// The result for a range.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RangeDone {
    /// Bytes of whole blocks that were fetched or dropped.
    pub moved_bytes: u64,
    /// Bytes of whole blocks that were cached already, or that a removal kept because they are pinned.
    pub held_bytes: u64,
    /// Why the operation was not done, or not completely.
    pub error: Option<Error>,
}

/// Answers a request that carries ranges: the result of each, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RangesDone(pub Vec<RangeDone>);

impl AnswerBody for RangesDone {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(u32::try_from(self.0.len()).unwrap_or(u32::MAX));
        for part in &self.0 {
            out.put_u64(part.moved_bytes);
            out.put_u64(part.held_bytes);
            let (code, message) = part.error.as_ref().map_or((0, ""), |error| (error.kind().code(), error.message()));
            out.put_u16(code);
            out.put_bytes(&message.as_bytes()[..message.floor_char_boundary(MAX_ERROR_MESSAGE)]);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        const SHORTEST: usize = 22;
        let mut take = ByteCursor(bytes);
        let count = take.take_u32("a number of ranges")? as usize;
        let mut parts = Vec::with_capacity(count.min(bytes.len() / SHORTEST));
        for _ in 0..count {
            let moved_bytes = take.take_u64("a number of bytes")?;
            let held_bytes = take.take_u64("a number of bytes")?;
            let code = take.take_u16("a status")?;
            let message = take.take_text("an error's message")?;
            if message.len() > MAX_ERROR_MESSAGE {
                let len = message.len() as u64;
                let max = MAX_ERROR_MESSAGE as u64;
                return Err(FrameError::TooLong { what: "an error's message", len, max });
            }
            if code == 0 && !message.is_empty() {
                return Err(FrameError::Value { what: "the status of a range with an error", value: 0 });
            }
            let error = (code != 0).then(|| Error::new(ErrorKind::from_code(code), message));
            parts.push(RangeDone { moved_bytes, held_bytes, error });
        }
        take.expect_end()?;
        Ok(RangesDone(parts))
    }
}
