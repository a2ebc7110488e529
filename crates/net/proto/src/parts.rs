//! Many ranges of objects in one request, and what became of each: how a group is warmed and freed without a round
//! trip per file. It knows nothing of what is done to them.

use crate::codec::{Put, Take};
use crate::request::take_path;
use crate::{Body, FrameError, MAX_REQUEST_BODY};
use spurline_types::{Error, ErrorKind};

/// A range of an object at one version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'a> {
    /// The object.
    pub path: &'a [u8],
    /// The version its bytes must have.
    pub version: &'a str,
    /// Its length at that version.
    pub size: u64,
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range; what is past the object's end is not meant.
    pub len: u64,
}

/// Encoded parts, checked or made here: going through them can't fail.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    /// The parts, in order.
    pub fn iter(self) -> impl Iterator<Item = Part<'a>> {
        let mut take = Take(self.0);
        std::iter::from_fn(move || if take.0.is_empty() { None } else { take_part(&mut take).ok() })
    }

    pub(crate) fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// All that is left of a body.
    pub(crate) fn take(take: &mut Take<'a>) -> Result<Self, FrameError> {
        let all = take.0;
        while !take.0.is_empty() {
            take_part(take)?;
        }
        Ok(Parts(all))
    }
}

impl std::fmt::Debug for Parts<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

fn take_part<'a>(take: &mut Take<'a>) -> Result<Part<'a>, FrameError> {
    Ok(Part {
        size: take.u64("an object's size")?,
        offset: take.u64("an offset")?,
        len: take.u64("a range's length")?,
        version: take.text("a version text")?,
        path: take_path(take)?,
    })
}

/// Parts being put together for one request.
#[derive(Debug, Clone, Default)]
pub struct PartList {
    bytes: Vec<u8>,
    count: usize,
}

impl PartList {
    /// The rest of a request that carries parts.
    const BESIDE: usize = 64;

    /// Adds a part; false, and nothing is added, when it does not fit into the request any more.
    pub fn push(&mut self, part: &Part<'_>) -> bool {
        let before = self.bytes.len();
        for n in [part.size, part.offset, part.len] {
            self.bytes.put_u64(n);
        }
        self.bytes.put_bytes(part.version.as_bytes());
        self.bytes.put_bytes(part.path);
        if self.bytes.len() > MAX_REQUEST_BODY - Self::BESIDE {
            self.bytes.truncate(before);
            return false;
        }
        self.count += 1;
        true
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// What a request carries.
    pub fn parts(&self) -> Parts<'_> {
        Parts(&self.bytes)
    }
}

/// The most of an error's sentence: with as many parts as fit into a request, all fit into an answer.
const LONGEST_SENTENCE: usize = 512;

/// What became of one part.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartDone {
    /// Bytes of whole blocks that were fetched, or dropped.
    pub moved_bytes: u64,
    /// Bytes of whole blocks that were held already.
    pub held_bytes: u64,
    /// Why it was not done, or not wholly.
    pub error: Option<Error>,
}

/// Answers a request that carries parts: what became of each, in their order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartsDone(pub Vec<PartDone>);

impl Body for PartsDone {
    fn encode(&self, out: &mut Vec<u8>) {
        out.put_u32(u32::try_from(self.0.len()).unwrap_or(u32::MAX));
        for part in &self.0 {
            out.put_u64(part.moved_bytes);
            out.put_u64(part.held_bytes);
            let (code, message) = part.error.as_ref().map_or((0, ""), |error| (error.kind().code(), error.message()));
            out.put_u16(code);
            out.put_bytes(&message.as_bytes()[..message.floor_char_boundary(LONGEST_SENTENCE)]);
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        const SHORTEST: usize = 22;
        let mut take = Take(bytes);
        let count = take.u32("a number of parts")? as usize;
        let mut parts = Vec::with_capacity(count.min(bytes.len() / SHORTEST));
        for _ in 0..count {
            let (moved_bytes, held_bytes) = (take.u64("a number of bytes")?, take.u64("a number of bytes")?);
            let (code, message) = (take.u16("a status")?, take.text("an error's sentence")?);
            if message.len() > LONGEST_SENTENCE {
                let (len, max) = (message.len() as u64, LONGEST_SENTENCE as u64);
                return Err(FrameError::TooLong { what: "an error's sentence", len, max });
            }
            if code == 0 && !message.is_empty() {
                return Err(FrameError::Value { what: "the status of a part with an error", value: 0 });
            }
            let error = (code != 0).then(|| Error::new(ErrorKind::from_code(code), message));
            parts.push(PartDone { moved_bytes, held_bytes, error });
        }
        take.end()?;
        Ok(PartsDone(parts))
    }
}
