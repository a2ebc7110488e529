//! The request of one node to another about staged files. It knows neither the calls nor the answers: both are bytes here.

use crate::codec::{ByteCursor, PutValue};
use crate::{FrameError, MAX_REQUEST_BODY};

/// The longest call: a body without the call's own length.
pub const MAX_STAGE_CALL: usize = MAX_REQUEST_BODY - size_of::<u32>();

/// A call of one node to another about staged files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageRequest<'a> {
    /// The call, at most [`MAX_STAGE_CALL`] bytes.
    pub call: &'a [u8],
    /// The bytes of the call, at most [`MAX_WRITE`](crate::MAX_WRITE).
    pub payload: &'a [u8],
}

impl<'a> StageRequest<'a> {
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.put_bytes(self.call);
    }

    pub(crate) fn take(take: &mut ByteCursor<'a>) -> Result<Self, FrameError> {
        Ok(StageRequest { call: take.take_bytes("a call about staged files")?, payload: &[] })
    }
}
