//! Answers asked for before their reader wants them. A sequential reader of large pieces has the next ones on their
//! way, and they wait in the connections' own buffers: reading ahead so costs no memory of the budget and no copy,
//! where a block fetched ahead into memory is copied once more for its reader. It knows neither offsets' meaning nor
//! how often to try: what it does not have, or what failed, is asked for in the usual way.

use crate::peer::Peer;
use parking_lot::{Condvar, Mutex};
use spurline_transport::{Answer, Begun, CallError};
use spurline_types::ObjectId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Pieces from this length on are asked for ahead one by one; smaller ones come from blocks fetched into memory,
/// where many of them share one request.
pub(crate) const PIECE_FROM: usize = 256 << 10;
/// Pieces of one reader under way beside the one it waits for: one that arrives while another is taken.
const DEPTH: u64 = 2;
/// Readers followed at once.
const STREAMS: usize = 32;
/// A read this many times its own length before or after where its reader was expected is still that reader's: the
/// kernel sends the parts of one long read together.
const NEAR: u64 = 4;
/// An answer that nobody took for this long is given up with its connection.
const STALE: Duration = Duration::from_secs(2);

/// A reader that was found to be sequential.
#[derive(Clone, Copy)]
struct Stream {
    object: ObjectId,
    /// Where its next read is expected; `None` until its first after it was found.
    next: Option<u64>,
    /// Where the last piece asked for ahead ends.
    asked: u64,
    /// It may be asked ahead up to here.
    end: u64,
    /// The number of the read that was its last.
    used: u64,
}

struct Asked {
    object: ObjectId,
    offset: u64,
    len: usize,
    peer: Arc<Peer>,
    begun: Begun,
    since: Instant,
}

#[derive(Default)]
struct State {
    streams: Vec<Stream>,
    asked: Vec<Asked>,
    reads: u64,
    closing: bool,
}

/// The answers under way of one volume.
pub(crate) struct Ahead {
    state: Mutex<State>,
    changed: Condvar,
    most: usize,
}

/// An answer that was asked for: take it, or drop it to give it up.
pub(crate) struct Claimed {
    peer: Arc<Peer>,
    begun: Option<Begun>,
}

impl Claimed {
    /// Waits for the answer.
    pub fn take(mut self, body: &mut Vec<u8>, dst: &mut [u8], deadline: Instant) -> Option<Result<Answer, CallError>> {
        self.begun.take().map(|begun| self.peer.tcp().finish(begun, body, dst, deadline))
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.peer.tcp().abandon(begun);
        }
    }
}

impl From<Asked> for Claimed {
    fn from(asked: Asked) -> Self {
        Claimed { peer: asked.peer, begun: Some(asked.begun) }
    }
}

impl Ahead {
    /// At most `most` answers under way.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Ahead { state: Mutex::default(), changed: Condvar::new(), most })
    }

    /// A reader of `object` is sequential, and may be asked ahead up to the byte `end`.
    pub fn follow(&self, object: ObjectId, end: u64) {
        let mut state = self.state.lock();
        let used = state.reads;
        if let Some(stream) = state.streams.iter_mut().find(|s| s.object == object && s.end < end) {
            (stream.end, stream.used) = (end, used);
            return;
        }
        let stream = Stream { object, next: None, asked: 0, end, used };
        if state.streams.len() < STREAMS {
            state.streams.push(stream);
        } else if let Some(oldest) = state.streams.iter_mut().min_by_key(|s| s.used) {
            *oldest = stream;
        }
    }

    /// Notes a read of `len` bytes at `offset`. The answer to it if it was asked for, and what to ask for now: from
    /// where to where, in pieces of `len`.
    pub fn read(&self, object: ObjectId, offset: u64, len: usize) -> (Option<Claimed>, std::ops::Range<u64>) {
        let mut state = self.state.lock();
        state.reads += 1;
        let (reads, room) = (state.reads, self.most.saturating_sub(state.asked.len()) as u64);
        let at = state.asked.iter().position(|a| a.object == object && a.offset == offset && a.len == len);
        let claimed = at.map(|at| Claimed::from(state.asked.swap_remove(at)));
        let piece = len as u64;
        let near = |next: u64| offset + NEAR * piece >= next && offset <= next + NEAR * piece;
        let stream = state.streams.iter_mut().find(|s| s.object == object && s.next.is_none_or(near));
        let Some(stream) = stream else { return (claimed, 0..0) };
        let end = offset + piece;
        let next = stream.next.map_or(end, |next| next.max(end));
        (stream.next, stream.used) = (Some(next), reads);
        let from = stream.asked.max(next);
        // A gap left by a reader that jumped is not worth filling.
        let from = if from > next + DEPTH * piece { next } else { from };
        let room = room + u64::from(claimed.is_some());
        let to = (next + DEPTH * piece).min(stream.end).min(from + room * piece);
        stream.asked = to.max(stream.asked.min(from));
        (claimed, from..to.max(from))
    }

    /// Keeps an answer that is under way.
    pub fn keep(&self, object: ObjectId, offset: u64, len: usize, peer: Arc<Peer>, begun: Begun) {
        let mut state = self.state.lock();
        let first = state.asked.is_empty();
        state.asked.push(Asked { object, offset, len, peer, begun, since: Instant::now() });
        drop(state);
        if first {
            self.changed.notify_one();
        }
    }

    /// Gives up answers that nobody took, until [`Ahead::close`].
    pub fn sweep(&self) {
        let mut state = self.state.lock();
        while !state.closing {
            let Some(oldest) = state.asked.iter().map(|a| a.since).min() else {
                self.changed.wait(&mut state);
                continue;
            };
            let due = oldest + STALE;
            if Instant::now() < due {
                self.changed.wait_until(&mut state, due);
                continue;
            }
            let stale = |asked: &mut Asked| asked.since + STALE <= Instant::now();
            let given_up: Vec<Claimed> = state.asked.extract_if(.., stale).map(Claimed::from).collect();
            // Their readers are gone or slow: what they would be asked ahead for next is not known any more.
            state.streams.clear();
            parking_lot::MutexGuard::unlocked(&mut state, || drop(given_up));
        }
    }

    /// Gives up all and ends [`Ahead::sweep`].
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        let given_up: Vec<Claimed> = state.asked.drain(..).map(Claimed::from).collect();
        drop(state);
        drop(given_up);
        self.changed.notify_all();
    }
}
