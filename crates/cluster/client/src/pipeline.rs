//! Pipelined reads: requests sent before their reader needs them. The next pieces of a sequential reader wait in the
//! connections' own buffers, which costs no budget memory and no extra copy; a block fetched into memory is copied
//! once more. A missing or failed piece is read in the normal way.

use crate::peer::GroupPeer;
use parking_lot::{Condvar, Mutex};
use spurline_transport::{BegunCall, ChannelLease};
use spurline_types::ObjectId;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Minimum length of a pipelined piece. Smaller pieces come from blocks fetched into memory, where many share one
/// request.
pub(crate) const PIECE_FROM: usize = 256 << 10;
/// Pieces per reader in flight beside the one it waits for.
const DEPTH: u64 = 2;
/// Maximum readers followed.
const STREAMS: usize = 32;
/// A read within this many lengths of the expected offset belongs to the same reader: the kernel reorders parts of
/// one long read.
const NEAR: u64 = 4;
/// An answer not taken for this long is dropped with its connection.
const STALE: Duration = Duration::from_secs(2);
/// The same when another reader needs its slot.
const OUSTED: Duration = Duration::from_millis(100);

/// A sequential reader.
#[derive(Clone, Copy)]
struct ReadStream {
    object: ObjectId,
    /// Offset of its next expected read; `None` before the first one.
    next: Option<u64>,
    /// End of the last pipelined piece.
    asked: u64,
    /// Limit of the pipelining.
    end: u64,
    /// Below this byte no node is asked to fetch: the nodes had the blocks before.
    held_to: u64,
    /// Number of its last read.
    used: u64,
}

struct PipelinedAnswer {
    object: ObjectId,
    offset: u64,
    len: usize,
    peer: Arc<GroupPeer>,
    begun: BegunCall,
    since: Instant,
}

#[derive(Default)]
struct PipelineState {
    streams: Vec<ReadStream>,
    asked: Vec<PipelinedAnswer>,
    /// Pieces being sent now; they count as pipelined.
    reserved: usize,
    reads: u64,
    closing: bool,
}

/// The pipelined reads of one volume.
pub(crate) struct PipelinedReads {
    state: Mutex<PipelineState>,
    changed: Condvar,
    most: usize,
}

/// A pipelined answer to take; dropping it abandons the call.
pub(crate) struct ClaimedAnswer {
    peer: Arc<GroupPeer>,
    begun: Option<BegunCall>,
}

impl ClaimedAnswer {
    /// Passes the node and the channel of the answer to `take`.
    pub fn resume_call(mut self, take: impl FnOnce(&Arc<GroupPeer>, &mut ChannelLease<'_>)) {
        let peer = Arc::clone(&self.peer);
        if let Some(begun) = self.begun.take() {
            take(&peer, &mut peer.tcp_pool().resume_call(begun));
        }
    }
}

impl Drop for ClaimedAnswer {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.peer.tcp_pool().abandon_call(begun);
        }
    }
}

impl From<PipelinedAnswer> for ClaimedAnswer {
    fn from(asked: PipelinedAnswer) -> Self {
        ClaimedAnswer { peer: asked.peer, begun: Some(asked.begun) }
    }
}

/// No free slot for the wanted pieces.
struct PipelineFull;

impl PipelineState {
    /// The range to request after a read; reserves its pieces.
    fn next_range(
        &mut self,
        object: ObjectId,
        offset: u64,
        piece: u64,
        most: usize,
    ) -> Result<std::ops::Range<u64>, PipelineFull> {
        self.reads += 1;
        let room = most.saturating_sub(self.asked.len() + self.reserved) as u64;
        let distance_max = NEAR * piece;
        let stream = self.streams.iter_mut().find(|stream| {
            stream.object == object && stream.next.is_none_or(|next| offset.abs_diff(next) <= distance_max)
        });
        let Some(stream) = stream else { return Ok(0..0) };
        let end = offset + piece;
        let next = stream.next.map_or(end, |next| next.max(end));
        stream.next = Some(next);
        stream.used = self.reads;
        // Do not fill the gap left by a reader that jumped.
        let from = if stream.asked > next + DEPTH * piece { next } else { stream.asked.max(next) };
        let wanted = (next + DEPTH * piece).min(stream.end).saturating_sub(from).div_ceil(piece);
        let pieces = wanted.min(room);
        if pieces == 0 {
            return if wanted > 0 { Err(PipelineFull) } else { Ok(0..0) };
        }
        stream.asked = from + pieces * piece;
        self.reserved += pieces as usize;
        Ok(from..from + pieces * piece)
    }

    /// Removes an answer without a reader.
    fn evict_stale(&mut self) -> Option<ClaimedAnswer> {
        let at = self.asked.iter().position(|asked| asked.since.elapsed() >= OUSTED)?;
        Some(ClaimedAnswer::from(self.asked.swap_remove(at)))
    }
}

impl PipelinedReads {
    /// At most `most` answers in flight.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(PipelinedReads { state: Mutex::default(), changed: Condvar::new(), most })
    }

    /// Follows a sequential reader of `object` up to the byte `end`. Returns whether the nodes may have to fetch the bytes.
    pub fn follow_reader(&self, object: ObjectId, end: u64) -> bool {
        let mut state = self.state.lock();
        let used = state.reads;
        if let Some(stream) = state.streams.iter_mut().find(|s| s.object == object && s.end < end) {
            stream.end = end;
            stream.used = used;
            return end > stream.held_to;
        }
        let stream = ReadStream { object, next: None, asked: 0, end, held_to: 0, used };
        if state.streams.len() < STREAMS {
            state.streams.push(stream);
        } else if let Some(oldest) = state.streams.iter_mut().min_by_key(|s| s.used) {
            *oldest = stream;
        }
        true
    }

    /// The nodes had what readers of `object` come to: more of that is expected up to the byte `end`.
    pub fn note_held(&self, object: ObjectId, end: u64) {
        let mut state = self.state.lock();
        state.streams.iter_mut().filter(|stream| stream.object == object).for_each(|stream| stream.held_to = end);
    }

    /// Records a read of `len` bytes at `offset`. Returns its pipelined answer, if any, and the range to request now
    /// in pieces of `len`. Pass each piece to [`PipelinedReads::keep_answer`] or [`PipelinedReads::release_pieces`].
    pub fn note_read(
        &self,
        object: ObjectId,
        offset: u64,
        len: usize,
    ) -> (Option<ClaimedAnswer>, std::ops::Range<u64>) {
        let mut state = self.state.lock();
        let at = state.asked.iter().position(|a| a.object == object && a.offset == offset && a.len == len);
        let claimed = at.map(|at| ClaimedAnswer::from(state.asked.swap_remove(at)));
        let next = state.next_range(object, offset, len as u64, self.most);
        let ousted = next.is_err().then(|| state.evict_stale()).flatten();
        drop(state);
        // Closing the connection takes a system call: not under the lock.
        drop(ousted);
        (claimed, next.unwrap_or(0..0))
    }

    /// Stores an answer in flight.
    pub fn keep_answer(&self, object: ObjectId, offset: u64, len: usize, peer: Arc<GroupPeer>, begun: BegunCall) {
        let mut state = self.state.lock();
        state.reserved -= 1;
        let first = state.asked.is_empty();
        state.asked.push(PipelinedAnswer { object, offset, len, peer, begun, since: Instant::now() });
        drop(state);
        if first {
            self.changed.notify_one();
        }
    }

    /// Returns the reservation of pieces that were not sent.
    pub fn release_pieces(&self, pieces: u64) {
        self.state.lock().reserved -= pieces as usize;
    }

    /// Drops stale answers until [`PipelinedReads::close`].
    pub fn sweep_stale(&self) {
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
            let given_up: Vec<ClaimedAnswer> = state
                .asked
                .extract_if(.., |asked| asked.since + STALE <= Instant::now())
                .map(ClaimedAnswer::from)
                .collect();
            // Their readers are gone or slow: the expected offsets are unknown.
            state.streams.clear();
            parking_lot::MutexGuard::unlocked(&mut state, || drop(given_up));
        }
    }

    /// Drops all answers and ends [`PipelinedReads::sweep_stale`].
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closing = true;
        let given_up: Vec<ClaimedAnswer> = state.asked.drain(..).map(ClaimedAnswer::from).collect();
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
        ObjectId::from_text("s", name, "1")
    }

    #[test]
    fn a_reader_is_asked_ahead_two_pieces_and_no_further_than_it_may() {
        let ahead = PipelinedReads::new(4);
        let a = object(b"a");
        assert_eq!(ahead.note_read(a, 0, PIECE as usize).1, 0..0, "not known as sequential");
        ahead.follow_reader(a, 5 * PIECE);
        assert_eq!(ahead.note_read(a, PIECE, PIECE as usize).1, 2 * PIECE..4 * PIECE);
        assert_eq!(ahead.note_read(a, 2 * PIECE, PIECE as usize).1, 4 * PIECE..5 * PIECE);
        assert_eq!(ahead.note_read(a, 3 * PIECE, PIECE as usize).1, 0..0, "the limit ends the pipelining");
        ahead.note_held(a, 90 * PIECE);
        assert!(!ahead.follow_reader(a, 89 * PIECE) && ahead.follow_reader(object(b"b"), 89 * PIECE));
        // The kernel sends the parts of a long read out of order.
        assert!(ahead.follow_reader(a, 100 * PIECE));
        ahead.release_pieces(3);
        assert_eq!(ahead.note_read(a, 5 * PIECE, PIECE as usize).1, 6 * PIECE..8 * PIECE);
        assert_eq!(ahead.note_read(a, 4 * PIECE, PIECE as usize).1, 0..0);
    }

    #[test]
    fn never_more_is_asked_for_than_may_be() {
        let ahead = PipelinedReads::new(3);
        let (a, b) = (object(b"a"), object(b"b"));
        ahead.follow_reader(a, 100 * PIECE);
        ahead.follow_reader(b, 100 * PIECE);
        let pieces = |range: std::ops::Range<u64>| (range.end - range.start) / PIECE;
        assert_eq!(pieces(ahead.note_read(a, 0, PIECE as usize).1), 2);
        assert_eq!(pieces(ahead.note_read(b, 0, PIECE as usize).1), 1, "reserved pieces count");
        assert_eq!(pieces(ahead.note_read(b, PIECE, PIECE as usize).1), 0);
        ahead.release_pieces(3);
        assert_eq!(pieces(ahead.note_read(b, 2 * PIECE, PIECE as usize).1), 2);
    }

    #[test]
    fn a_reader_elsewhere_in_the_file_is_left_alone() {
        let ahead = PipelinedReads::new(8);
        let a = object(b"a");
        ahead.follow_reader(a, 100 * PIECE);
        assert_eq!(ahead.note_read(a, 0, PIECE as usize).1, PIECE..3 * PIECE);
        assert_eq!(ahead.note_read(a, 50 * PIECE, PIECE as usize).1, 0..0);
        assert_eq!(ahead.note_read(a, PIECE, PIECE as usize).1, 3 * PIECE..4 * PIECE);
    }
}
