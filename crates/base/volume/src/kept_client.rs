//! What a client of nodes keeps where it outlives this process, so that the next process goes on as the same client: its session,
//! the numbers of changes, and the change of each program's request. Where that is kept is the business of who implements the
//! trait.

use crate::writes::FileIdentity;

/// A change that was sent to a node, or is about to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SentChange {
    /// The number of the change; 0 for none.
    pub number: u64,
    /// The process that may have executed the change: 0 for none, and `u64::MAX` for several.
    pub process: u64,
    /// Where appended bytes were expected to go.
    pub place: u64,
    /// The objects that the names of the change led to before, where known: the next process may find other objects.
    pub known: [Option<FileIdentity>; 2],
}

/// An open file or directory that a process of a node has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeldFile {
    /// The number of the file in the client's session.
    pub number: u64,
    /// A hash of the node's name.
    pub node: u64,
    /// The random number of the node's process.
    pub process: u64,
    /// The client was about to close the file there.
    pub closing: bool,
}

/// What a client begins with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClientStart {
    /// The session.
    pub session: u64,
    /// Processes that were this client before.
    pub processes: u64,
    /// The numbers of changes that these may have sent without an answer.
    pub pending: Vec<u64>,
}

/// The memory of a client that outlives its process.
pub trait KeptClient: Send + Sync {
    /// Begins a process of the client; `session` is that of a client without an earlier process.
    fn begin(&self, session: u64) -> ClientStart;

    /// The number before so many numbers that no process uses but this one.
    fn reserve_numbers(&self, count: u64) -> u64;

    /// The change that a process before has sent for the request which this thread serves, the first time that this is called.
    fn take_repeated(&self) -> Option<SentChange>;

    /// The request that this thread serves is about to send a change.
    fn note_sending(&self, change: &SentChange);

    /// The node that has the file of this record, from now on; 0 is no record.
    fn note_held(&self, record: u32, held: &HeldFile);

    /// This process is about to get the change, if the change is that of the thread's request.
    fn note_sent(&self, number: u64, process: u64);
}
