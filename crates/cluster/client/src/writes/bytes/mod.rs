//! Bytes that were written and are not durable: pieces, their memory, and what the sender threads have to do. The room knows no nodes,
//! and not why a process was lost.
//!
//! 1. A write copies its bytes into a piece of its file ([`pieces`], which has the table of a piece's life), from the mount's memory
//!    for written bytes ([`memory`]), and goes on.
//! 2. A job waits for the senders ([`queue`]): a full piece at once, a growing one after a second.
//! 3. A piece that a process has stays until that process reported a sync. It is sent again when the process is lost.
//! 4. Failures are counted per file ([`FileBytes`]), and reported at each open file's next sync and next close.

mod file_bytes;
mod memory;
mod piece_steps;
mod pieces;
mod queue;

pub(crate) use file_bytes::{FileBytes, ReportedFailures};
pub(crate) use memory::WriteMemory;
pub(crate) use piece_steps::{AddedBytes, AwaitedPiece, NewBytes, NextPiece, PieceOutcome, PieceToSend};
pub(crate) use queue::{NextJob, SendJob, SendQueue};
