//! Answers asked for before their reader wants them. A sequential reader of large pieces has the next ones on their
//! way, and they wait in the connections' own buffers: reading ahead so costs no memory of the budget and no copy,
//! where a block fetched ahead into memory is copied once more for its reader. It knows neither offsets' meaning nor
//! how often to try: what it does not have, or what failed, is asked for in the usual way.

use crate::peer::Peer;
use parking_lot::{Condvar, Mutex};
use spurline_transport::{Begun, Lease};
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
/// The same where another reader could be asked ahead for instead.
const OUSTED: Duration = Duration::from_millis(100);

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
    /// Pieces that are being asked for: they count as asked.
    reserved: usize,
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
    /// Who was asked, and the channel that the answer comes over.
    pub fn resume(mut self, take: impl FnOnce(&Arc<Peer>, &mut Lease<'_>)) {
        let peer = Arc::clone(&self.peer);
        if let Some(begun) = self.begun.take() {
            take(&peer, &mut peer.tcp().resume(begun));
        }
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

/// There is no room for what should be asked for.
struct Full;

impl State {
    /// What to ask for after a read, and reserves it.
    fn next(&mut self, object: ObjectId, offset: u64, piece: u64, most: usize) -> Result<std::ops::Range<u64>, Full> {
        self.reads += 1;
        let room = most.saturating_sub(self.asked.len() + self.reserved) as u64;
        let near = |next: u64| offset + NEAR * piece >= next && offset <= next + NEAR * piece;
        let stream = self.streams.iter_mut().find(|s| s.object == object && s.next.is_none_or(near));
        let Some(stream) = stream else { return Ok(0..0) };
        let end = offset + piece;
        let next = stream.next.map_or(end, |next| next.max(end));
        (stream.next, stream.used) = (Some(next), self.reads);
        // A gap left by a reader that jumped is not worth filling.
        let from = if stream.asked > next + DEPTH * piece { next } else { stream.asked.max(next) };
        let wanted = (next + DEPTH * piece).min(stream.end).saturating_sub(from).div_ceil(piece);
        let pieces = wanted.min(room);
        if pieces == 0 {
            return if wanted > 0 { Err(Full) } else { Ok(0..0) };
        }
        stream.asked = from + pieces * piece;
        self.reserved += pieces as usize;
        Ok(from..from + pieces * piece)
    }

    /// An answer whose reader seems to be gone.
    fn oust(&mut self) -> Option<Claimed> {
        let at = self.asked.iter().position(|asked| asked.since.elapsed() >= OUSTED)?;
        Some(Claimed::from(self.asked.swap_remove(at)))
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
    /// where to where, in pieces of `len`. Each piece has to be given to [`Ahead::keep`] or [`Ahead::release`].
    pub fn read(&self, object: ObjectId, offset: u64, len: usize) -> (Option<Claimed>, std::ops::Range<u64>) {
        let mut state = self.state.lock();
        let at = state.asked.iter().position(|a| a.object == object && a.offset == offset && a.len == len);
        let claimed = at.map(|at| Claimed::from(state.asked.swap_remove(at)));
        let next = state.next(object, offset, len as u64, self.most);
        let ousted = next.is_err().then(|| state.oust()).flatten();
        drop(state);
        // Closing its connection takes a system call.
        drop(ousted);
        (claimed, next.unwrap_or(0..0))
    }

    /// Keeps an answer that is under way.
    pub fn keep(&self, object: ObjectId, offset: u64, len: usize, peer: Arc<Peer>, begun: Begun) {
        let mut state = self.state.lock();
        state.reserved -= 1;
        let first = state.asked.is_empty();
        state.asked.push(Asked { object, offset, len, peer, begun, since: Instant::now() });
        drop(state);
        if first {
            self.changed.notify_one();
        }
    }

    /// So many pieces were not asked for after all.
    pub fn release(&self, pieces: u64) {
        self.state.lock().reserved -= pieces as usize;
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

#[cfg(test)]
mod tests {
    use super::*;

    const PIECE: u64 = 1 << 20;

    fn object(name: &[u8]) -> ObjectId {
        ObjectId::hash("s", name, "1")
    }

    #[test]
    fn a_reader_is_asked_ahead_two_pieces_and_no_further_than_it_may() {
        let ahead = Ahead::new(4);
        let a = object(b"a");
        assert_eq!(ahead.read(a, 0, PIECE as usize).1, 0..0, "nobody said it is sequential");
        ahead.follow(a, 5 * PIECE);
        assert_eq!(ahead.read(a, PIECE, PIECE as usize).1, 2 * PIECE..4 * PIECE);
        assert_eq!(ahead.read(a, 2 * PIECE, PIECE as usize).1, 4 * PIECE..5 * PIECE);
        assert_eq!(ahead.read(a, 3 * PIECE, PIECE as usize).1, 0..0, "it may not be followed further");
        // The kernel sends the parts of a long read out of order.
        ahead.follow(a, 100 * PIECE);
        ahead.release(3);
        assert_eq!(ahead.read(a, 5 * PIECE, PIECE as usize).1, 6 * PIECE..8 * PIECE);
        assert_eq!(ahead.read(a, 4 * PIECE, PIECE as usize).1, 0..0);
    }

    #[test]
    fn never_more_is_asked_for_than_may_be() {
        let ahead = Ahead::new(3);
        let (a, b) = (object(b"a"), object(b"b"));
        ahead.follow(a, 100 * PIECE);
        ahead.follow(b, 100 * PIECE);
        let pieces = |range: std::ops::Range<u64>| (range.end - range.start) / PIECE;
        assert_eq!(pieces(ahead.read(a, 0, PIECE as usize).1), 2);
        assert_eq!(pieces(ahead.read(b, 0, PIECE as usize).1), 1, "what is being asked for counts");
        assert_eq!(pieces(ahead.read(b, PIECE, PIECE as usize).1), 0);
        ahead.release(3);
        assert_eq!(pieces(ahead.read(b, 2 * PIECE, PIECE as usize).1), 2);
    }

    #[test]
    fn a_reader_elsewhere_in_the_file_is_left_alone() {
        let ahead = Ahead::new(8);
        let a = object(b"a");
        ahead.follow(a, 100 * PIECE);
        assert_eq!(ahead.read(a, 0, PIECE as usize).1, PIECE..3 * PIECE);
        assert_eq!(ahead.read(a, 50 * PIECE, PIECE as usize).1, 0..0);
        assert_eq!(ahead.read(a, PIECE, PIECE as usize).1, 3 * PIECE..4 * PIECE);
    }
}
