//! What goes into the list of a file's pieces and what comes out: written bytes, a piece for a sender, and the outcomes. It knows no list.

use super::memory::WriteBuffer;
use crate::writes::calls::MaybeExecuted;
use std::time::Instant;

/// Bytes to add.
pub(crate) struct NewBytes<'a> {
    /// The number of the open file that wrote them.
    pub owner: u64,
    pub offset: u64,
    pub data: &'a [u8],
    /// They were appended, and are expected at `offset`.
    pub appended: bool,
    /// They are pages of a memory map.
    pub mapped: bool,
    /// The file loses its privilege bits as if this user and group wrote.
    pub lose_privileges: Option<(u32, u32)>,
    /// The writer waits for the outcome: the bytes are a piece of their own, so that they can be taken back.
    pub awaited: bool,
    /// The number of an append, if that is known already.
    pub change: Option<u64>,
    /// The processes that may have executed it.
    pub before: MaybeExecuted,
}

/// What a write added.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AddedBytes {
    /// The number of their piece.
    pub piece: u64,
    /// A piece begins, which has to be sent within some time.
    pub begun: bool,
    /// A piece got no more room and can be sent.
    pub ready: bool,
}

/// A piece that is being sent.
pub(crate) struct PieceToSend {
    pub(super) number: u64,
    pub owner: u64,
    pub offset: u64,
    pub len: usize,
    pub appended: bool,
    pub lose_privileges: Option<(u32, u32)>,
    pub before: MaybeExecuted,
    /// The number of an append without an answer.
    pub change: Option<u64>,
    /// When its first byte was written.
    pub since: Instant,
    pub(super) buffer: WriteBuffer,
}

impl PieceToSend {
    /// The bytes, as they were written.
    pub fn as_new(&self) -> NewBytes<'_> {
        NewBytes {
            owner: self.owner,
            offset: self.offset,
            data: &self.buffer[..self.len],
            appended: self.appended,
            mapped: false,
            lose_privileges: self.lose_privileges,
            awaited: false,
            change: self.change,
            before: self.before,
        }
    }
}

/// The outcome of sending a piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PieceOutcome {
    /// This process has it.
    Sent(u64),
    /// It has to be sent again.
    Unsent(MaybeExecuted),
    /// The source refuses it.
    Refused,
}

/// What became of a piece whose writer waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AwaitedPiece {
    /// A process has it, or had it and was lost since: it is kept like the bytes of other writes.
    Written,
    /// The source refuses it.
    Refused,
    /// No process took it, and it is forgotten. With the number of an append without an answer.
    TakenBack(Option<u64>),
    /// Another thread is sending it.
    Sending,
}

/// What to do next to have all pieces sent.
pub(crate) enum NextPiece {
    Send(PieceToSend),
    /// Other threads send the rest.
    Wait,
    Done,
}
