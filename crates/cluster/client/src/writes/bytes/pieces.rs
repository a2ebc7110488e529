//! The bytes of one file that are not durable yet, as pieces in the order of the writes. It knows neither requests nor nodes.
//!
//! The life of a piece:
//!
//! | state | event | next state |
//! |---|---|---|
//! | unsent | a sender takes it | sending |
//! | sending | a process has it | sent |
//! | sending | no process took it | unsent |
//! | sending | the source refuses it | forgotten |
//! | sent | its process is lost, or an earlier piece is sent again | unsent |
//! | sent | its process reported a sync, or the source failed at it | forgotten |
//! | unsent | its writer takes it back, or its open file ends | forgotten |
//! | unsent, sent | the file is cut before it | forgotten |
//!
//! Pieces that overlap are sent one after the other, so that sending all of them again leaves the file as the program wrote it.

use super::memory::{WriteBuffer, WriteMemory};
use super::piece_steps::{AddedBytes, AwaitedPiece, NewBytes, NextPiece, PieceOutcome, PieceToSend};
use crate::writes::calls::MaybeExecuted;
use spurline_types::Stats;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Least room of a piece: the least buffer of the pool.
const FIRST_ROOM: usize = 16 << 10;
/// Room of a piece of a long sequence of writes: a request of this size costs little more than its bytes.
const MOST_ROOM: usize = 1 << 20;
/// The room of a sequence's next piece is this multiple of the last one's.
const ROOM_GROWTH: usize = 4;

enum PieceLife {
    /// No process has it; `change` is the number of an append without an answer.
    Unsent { buffer: WriteBuffer, before: MaybeExecuted, change: Option<u64> },
    /// A thread has its buffer.
    Sending,
    /// The process `to` has it, as the answer number `stamp` of the file.
    Sent { buffer: WriteBuffer, to: u64, stamp: u64 },
}

struct WrittenPiece {
    number: u64,
    owner: u64,
    offset: u64,
    len: usize,
    appended: bool,
    lose_privileges: Option<(u32, u32)>,
    life: PieceLife,
    /// Its writer waits for its outcome.
    awaited: bool,
    since: Instant,
}

impl WrittenPiece {
    fn end(&self) -> u64 {
        self.offset + self.len as u64
    }

    fn is_sent(&self) -> bool {
        matches!(self.life, PieceLife::Sent { .. })
    }

    fn is_sending(&self) -> bool {
        matches!(self.life, PieceLife::Sending)
    }

    /// The process that has it.
    fn sent_to(&self) -> Option<u64> {
        match self.life {
            PieceLife::Sent { to, .. } => Some(to),
            PieceLife::Unsent { .. } | PieceLife::Sending => None,
        }
    }

    /// The number of its append, if that has no answer.
    fn change(&self) -> Option<u64> {
        match self.life {
            PieceLife::Unsent { change, .. } => change,
            PieceLife::Sent { .. } | PieceLife::Sending => None,
        }
    }

    /// Whether the order of the two matters.
    fn meets(&self, other: &WrittenPiece) -> bool {
        self.appended || other.appended || (self.offset < other.end() && other.offset < self.end())
    }
}

/// The pieces of a file.
#[derive(Default)]
pub(crate) struct PieceList {
    pieces: VecDeque<WrittenPiece>,
    next_number: u64,
    /// All pieces with lower numbers are sent.
    sent_below: u64,
    stamp: u64,
    /// The last piece gets no more bytes.
    sealed: bool,
    unsent_pieces: usize,
    unsent_bytes: u64,
    /// Awaited pieces that the source refused.
    refused: Vec<u64>,
}

impl PieceList {
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Pieces that no process has, those being sent included.
    pub fn unsent_pieces(&self) -> usize {
        self.unsent_pieces
    }

    pub fn unsent_bytes(&self) -> u64 {
        self.unsent_bytes
    }

    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.len as u64).sum()
    }

    /// The end of the piece that reaches farthest.
    pub fn end(&self) -> u64 {
        self.pieces.iter().map(WrittenPiece::end).max().unwrap_or(0)
    }

    /// The number that the next piece gets; the last one gets no more bytes.
    pub fn mark(&mut self) -> u64 {
        self.sealed = true;
        self.next_number
    }

    /// The number of answers until now.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Adds the bytes of a write; `None` when there is no memory.
    pub fn add_bytes(&mut self, memory: &Arc<WriteMemory>, new: &NewBytes<'_>) -> Option<AddedBytes> {
        let NewBytes { owner, offset, data, appended, lose_privileges, awaited, .. } = *new;
        let last = self.pieces.back_mut().filter(|last| last.owner == owner && last.end() == offset && !last.appended);
        let mut room = FIRST_ROOM;
        if let Some(last) = last.filter(|_| !appended) {
            if !self.sealed
                && !awaited
                && last.lose_privileges == lose_privileges
                && let PieceLife::Unsent { buffer, .. } = &mut last.life
                && let Some(free) = buffer.get_mut(last.len..last.len + data.len())
            {
                free.copy_from_slice(data);
                let left = free_room(buffer, last.len + data.len());
                last.len += data.len();
                self.unsent_bytes += data.len() as u64;
                memory.stats.writes.dirty_bytes.add(data.len() as u64);
                // Another write like this one would not fit.
                let ready = left < data.len();
                self.sealed |= ready;
                return Some(AddedBytes { piece: last.number, begun: false, ready });
            }
            let capacity = last.len.next_power_of_two();
            room = (capacity * ROOM_GROWTH).clamp(FIRST_ROOM, MOST_ROOM);
        }
        let mut buffer = match memory.take(room.max(data.len())) {
            Some(buffer) => buffer,
            None => memory.take(data.len())?,
        };
        buffer[..data.len()].copy_from_slice(data);
        let ready = awaited || free_room(&buffer, data.len()) < data.len();
        // The piece before gets no more bytes.
        let before_ready = self.unsent_pieces > 0 && !self.sealed;
        self.pieces.push_back(WrittenPiece {
            number: self.next_number,
            owner,
            offset,
            len: data.len(),
            appended,
            lose_privileges,
            life: PieceLife::Unsent { buffer, before: new.before, change: new.change },
            awaited,
            since: Instant::now(),
        });
        let piece = self.next_number;
        self.next_number += 1;
        self.sealed = ready;
        self.unsent_pieces += 1;
        self.unsent_bytes += data.len() as u64;
        memory.stats.writes.dirty_bytes.add(data.len() as u64);
        Some(AddedBytes { piece, begun: true, ready: ready || before_ready })
    }

    /// Ends the wait for a piece. With `failed`, no process took all of the file's bytes: a piece that none has is
    /// forgotten, since its write reports the failure.
    pub fn end_awaited(&mut self, number: u64, failed: bool, stats: &Stats) -> AwaitedPiece {
        if let Some(at) = self.refused.iter().position(|refused| *refused == number) {
            self.refused.swap_remove(at);
            return AwaitedPiece::Refused;
        }
        let index = self.position_of(number);
        // Released, cut, or moved into the piece before it: it was sent.
        let Some(piece) = self.pieces.get_mut(index).filter(|piece| piece.number == number) else {
            return AwaitedPiece::Written;
        };
        if failed && piece.is_sending() {
            return AwaitedPiece::Sending;
        }
        piece.awaited = false;
        let PieceLife::Unsent { change, .. } = piece.life else { return AwaitedPiece::Written };
        if !failed {
            return AwaitedPiece::Written;
        }
        let len = piece.len;
        self.pieces.remove(index);
        self.count_sent(len, stats);
        self.raise_sent_below();
        AwaitedPiece::TakenBack(change)
    }

    fn position_of(&self, number: u64) -> usize {
        self.pieces.partition_point(|piece| piece.number < number)
    }

    /// The next piece to send of those below `mark`; with `whole`, only pieces that get no more bytes.
    pub fn next_piece(&mut self, mark: u64, whole: bool) -> NextPiece {
        let from = self.position_of(self.sent_below);
        let mut chosen = None;
        let mut waits = false;
        for index in from..self.pieces.len() {
            let piece = &self.pieces[index];
            if piece.number >= mark || chosen.is_some() {
                break;
            }
            let grows = whole && !self.sealed && index + 1 == self.pieces.len();
            match piece.life {
                PieceLife::Sent { .. } => {}
                PieceLife::Unsent { .. } if !grows => {
                    let before = self.pieces.range(from..index);
                    let held = before.into_iter().any(|before| !before.is_sent() && before.meets(piece));
                    if held { waits = true } else { chosen = Some(index) }
                }
                _ => waits = true,
            }
        }
        let Some(index) = chosen else { return if waits { NextPiece::Wait } else { NextPiece::Done } };
        if index + 1 == self.pieces.len() {
            self.sealed = true;
        }
        let piece = &mut self.pieces[index];
        let PieceLife::Unsent { buffer, before, change } = std::mem::replace(&mut piece.life, PieceLife::Sending)
        else {
            return NextPiece::Wait;
        };
        NextPiece::Send(PieceToSend {
            number: piece.number,
            owner: piece.owner,
            offset: piece.offset,
            len: piece.len,
            appended: piece.appended,
            lose_privileges: piece.lose_privileges,
            before,
            change,
            since: piece.since,
            buffer,
        })
    }

    pub fn end_sending(&mut self, sent: PieceToSend, outcome: PieceOutcome, stats: &Stats) {
        let index = self.position_of(sent.number);
        self.stamp += 1;
        let stamp = self.stamp;
        let Some(piece) = self.pieces.get_mut(index).filter(|piece| piece.number == sent.number) else {
            // The file was cut meanwhile.
            return;
        };
        match outcome {
            PieceOutcome::Sent(to) => {
                piece.life = PieceLife::Sent { buffer: sent.buffer, to, stamp };
                let len = piece.len;
                self.count_sent(len, stats);
            }
            PieceOutcome::Unsent(before) => {
                piece.life = PieceLife::Unsent { buffer: sent.buffer, before, change: sent.change };
            }
            PieceOutcome::Refused => {
                let len = piece.len;
                let awaited = piece.awaited;
                self.pieces.remove(index);
                if awaited {
                    self.refused.push(sent.number);
                }
                self.count_sent(len, stats);
            }
        }
        self.raise_sent_below();
        self.merge_appended(sent.number);
    }

    fn count_sent(&mut self, len: usize, stats: &Stats) {
        self.unsent_pieces -= 1;
        self.unsent_bytes -= len as u64;
        stats.writes.dirty_bytes.sub(len as u64);
    }

    fn raise_sent_below(&mut self) {
        let from = self.position_of(self.sent_below);
        let unsent = self.pieces.range(from..).find(|piece| !piece.is_sent());
        self.sent_below = unsent.map_or(self.next_number, |piece| piece.number);
    }

    /// Moves the bytes of a small append into the piece before it: a log of short lines would take a buffer for each.
    fn merge_appended(&mut self, number: u64) {
        let index = self.position_of(number);
        let Some(before) = index.checked_sub(1) else { return };
        let Some(last) = self.pieces.get(index).filter(|piece| piece.number == number) else { return };
        let first = &self.pieces[before];
        let PieceLife::Sent { buffer, to, .. } = &first.life else { return };
        let follows = first.appended && last.appended && first.owner == last.owner && first.end() == last.offset;
        if !follows || last.sent_to() != Some(*to) || buffer.len() < first.len + last.len {
            return;
        }
        let Some(last) = self.pieces.remove(index) else { return };
        let first = &mut self.pieces[before];
        if let PieceLife::Sent { buffer: from, stamp: at, .. } = last.life
            && let PieceLife::Sent { buffer, stamp, .. } = &mut first.life
        {
            buffer[first.len..first.len + last.len].copy_from_slice(&from[..last.len]);
            first.len += last.len;
            *stamp = at;
        }
    }

    /// The process `lost` can't be reached: what it has is unsent again, and so is all that was written later, which may
    /// lie over it. Appends that another process has stay there: they lie behind the others. Returns the bytes.
    pub fn resend_from(&mut self, lost: u64, stats: &Stats) -> u64 {
        let Some(first) = self.pieces.iter().position(|piece| piece.sent_to() == Some(lost)) else { return 0 };
        let mut bytes = 0;
        for piece in self.pieces.range_mut(first..) {
            if piece.sent_to().is_some_and(|to| to == lost || !piece.appended) {
                let PieceLife::Sent { buffer, .. } = std::mem::replace(&mut piece.life, PieceLife::Sending) else {
                    continue;
                };
                // Sent again, it is another change.
                piece.life = PieceLife::Unsent { buffer, before: MaybeExecuted::Anywhere, change: None };
                piece.since = Instant::now();
                // They are lost already, or were given since.
                piece.lose_privileges = None;
                bytes += piece.len as u64;
                self.unsent_pieces += 1;
            }
        }
        self.unsent_bytes += bytes;
        stats.writes.dirty_bytes.add(bytes);
        stats.writes.resent_bytes.add(bytes);
        self.sealed = true;
        self.sent_below = self.sent_below.min(self.pieces[first].number);
        bytes
    }

    /// The process `by` reported a sync, which began when there had been `stamp` answers: its pieces below `mark` are
    /// durable.
    pub fn release(&mut self, mark: u64, stamp: u64, by: u64) {
        self.pieces.retain(|piece| {
            let PieceLife::Sent { to, stamp: at, .. } = piece.life else { return true };
            piece.number >= mark || to != by || at > stamp
        });
    }

    /// A piece is durable by itself: its file was opened for that. It stays if one before it lies below it: sent again, that
    /// one would be over it.
    pub fn release_durable(&mut self, number: u64) {
        let index = self.position_of(number);
        let Some(piece) = self.pieces.get(index).filter(|piece| piece.number == number && piece.is_sent()) else {
            return;
        };
        if self.pieces.range(..index).all(|before| !before.meets(piece)) {
            self.pieces.remove(index);
        }
    }

    /// The first piece below `mark`: its open file, and the process that has it.
    pub fn first_left(&self, mark: u64) -> Option<(u64, Option<u64>)> {
        let first = self.pieces.front().filter(|piece| piece.number < mark)?;
        Some((first.owner, first.sent_to()))
    }

    /// Whether a piece of this open file is being sent.
    pub fn is_sending_for(&self, owner: u64) -> bool {
        self.pieces.iter().any(|piece| piece.owner == owner && piece.is_sending())
    }

    /// The open file `from` ends: what it has sent belongs to the open file `to` from now on, or is forgotten. Returns the
    /// bytes that no process has, which are forgotten too, and adds the numbers of their changes to `changes`.
    pub fn pass_on(&mut self, from: u64, to: Option<u64>, stats: &Stats, changes: &mut Vec<u64>) -> u64 {
        let mut lost = 0;
        let mut unsent_pieces = self.unsent_pieces;
        let mut unsent_bytes = self.unsent_bytes;
        self.pieces.retain_mut(|piece| {
            if piece.owner != from || piece.is_sending() {
                return true;
            }
            if let Some(to) = to.filter(|_| piece.is_sent()) {
                piece.owner = to;
                return true;
            }
            if !piece.is_sent() {
                changes.extend(piece.change());
                lost += piece.len as u64;
                unsent_pieces -= 1;
                unsent_bytes -= piece.len as u64;
            }
            false
        });
        self.unsent_pieces = unsent_pieces;
        self.unsent_bytes = unsent_bytes;
        stats.writes.dirty_bytes.sub(lost);
        self.raise_sent_below();
        lost
    }

    /// Forgets the sent pieces below `mark`: the source could not make them durable.
    pub fn forget_sent(&mut self, mark: u64) {
        self.pieces.retain(|piece| !piece.is_sent() || piece.number >= mark);
    }

    /// Forgets the bytes from `size` on: the file was cut there. Adds the numbers of changes that are forgotten to `changes`.
    pub fn cut_at(&mut self, size: u64, stats: &Stats, changes: &mut Vec<u64>) {
        let mut pieces = std::mem::take(&mut self.pieces);
        pieces.retain_mut(|piece| {
            let left = usize::try_from(size.saturating_sub(piece.offset)).unwrap_or(usize::MAX);
            // One that is being sent is on its way already.
            if piece.len <= left || piece.is_sending() {
                return true;
            }
            let cut = (piece.len - left) as u64;
            piece.len = left;
            if !piece.is_sent() {
                self.unsent_bytes -= cut;
                stats.writes.dirty_bytes.sub(cut);
                if left == 0 {
                    self.unsent_pieces -= 1;
                    changes.extend(piece.change());
                }
            }
            left > 0
        });
        self.pieces = pieces;
        self.sealed = true;
        self.raise_sent_below();
    }
}

/// What a buffer holds beside `len` bytes.
fn free_room(buffer: &WriteBuffer, len: usize) -> usize {
    buffer.len() - len
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_mem::BufferPool;

    fn memory() -> Arc<WriteMemory> {
        WriteMemory::new(&BufferPool::new(16 << 20, 1 << 20).unwrap(), 2 << 20, &Arc::default())
    }

    fn plain(offset: u64, data: &[u8]) -> NewBytes<'_> {
        NewBytes {
            owner: 1,
            offset,
            data,
            appended: false,
            mapped: false,
            lose_privileges: None,
            awaited: false,
            change: None,
            before: MaybeExecuted::Nowhere,
        }
    }

    fn take(list: &mut PieceList) -> Option<PieceToSend> {
        match list.next_piece(u64::MAX, false) {
            NextPiece::Send(piece) => Some(piece),
            NextPiece::Wait | NextPiece::Done => None,
        }
    }

    /// Sends all there is to the process `to`.
    fn send(list: &mut PieceList, to: u64, stats: &Stats) -> Vec<(u64, Vec<u8>)> {
        let mut sent = Vec::new();
        while let Some(piece) = take(list) {
            sent.push((piece.offset, piece.as_new().data.to_vec()));
            list.end_sending(piece, PieceOutcome::Sent(to), stats);
        }
        sent
    }

    #[test]
    fn small_writes_share_a_piece_that_grows_with_their_sequence() {
        let (memory, mut list) = (memory(), PieceList::default());
        let line = [7; 4096];
        let mut begun = Vec::new();
        for n in 0..100u64 {
            let added = list.add_bytes(&memory, &plain(n * 4096, &line)).unwrap();
            if added.begun {
                begun.push(n);
            }
            assert_eq!(added.ready, [3, 19, 83].contains(&n), "a piece is full after write {n}");
        }
        assert_eq!(begun, [0, 4, 20, 84], "16, 64, 256 KiB and a MiB");
        assert!(matches!(list.next_piece(u64::MAX, true), NextPiece::Send(piece) if piece.len == 16 << 10));
        assert_eq!(memory.stats.writes.dirty_bytes.get(), 100 * 4096);
        // Another place, another open file, or a write that loses other privileges.
        for new in [
            plain(0, b"x"),
            NewBytes { owner: 2, ..plain(1, b"x") },
            NewBytes { owner: 2, lose_privileges: Some((1, 1)), ..plain(2, b"x") },
        ] {
            assert!(list.add_bytes(&memory, &new).unwrap().begun);
        }
    }

    #[test]
    fn bytes_stay_until_their_process_has_synced_them() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        list.add_bytes(&memory, &plain(0, b"abc")).unwrap();
        list.add_bytes(&memory, &plain(3, b"def")).unwrap();
        let mark = list.mark();
        list.add_bytes(&memory, &plain(6, b"later")).unwrap();
        assert_eq!(send(&mut list, 1, &stats), [(0, b"abcdef".to_vec()), (6, b"later".to_vec())]);
        list.release(mark, 0, 1);
        list.release(mark, list.stamp(), 2);
        assert_eq!(list.first_left(mark), Some((1, Some(1))), "the sync began too early, or another process made it");
        list.release(mark, list.stamp(), 1);
        assert_eq!((list.first_left(mark), list.first_left(u64::MAX)), (None, Some((1, Some(1)))));
        list.cut_at(8, &stats, &mut Vec::new());
        list.resend_from(1, &stats);
        assert_eq!(send(&mut list, 2, &stats), [(6, b"la".to_vec())]);
        list.cut_at(6, &stats, &mut Vec::new());
        assert!(list.is_empty() && memory.used_bytes() == 0);
    }

    /// Two open files of a file are at two processes while one of them has not seen a loss.
    #[test]
    fn a_loss_leaves_appends_where_another_process_has_them() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        let append = |owner, offset, data| NewBytes { owner, appended: true, ..plain(offset, data) };
        list.add_bytes(&memory, &append(1, 0, b"lost")).unwrap();
        send(&mut list, 1, &stats);
        list.add_bytes(&memory, &append(2, 4, b"kept")).unwrap();
        send(&mut list, 2, &stats);
        assert_eq!(list.resend_from(1, &stats), 4);
        let piece = take(&mut list).unwrap();
        let (found, before) = (piece.as_new().data.to_vec(), piece.before);
        assert_eq!((found, before), (b"lost".to_vec(), MaybeExecuted::Anywhere));
        assert!(take(&mut list).is_none());
        // Bytes at their places are written again: they may lie over those of the lost process.
        list.end_sending(piece, PieceOutcome::Sent(2), &stats);
        list.add_bytes(&memory, &plain(2, b"over")).unwrap();
        send(&mut list, 3, &stats);
        assert_eq!(list.resend_from(2, &stats), 12);
    }

    #[test]
    fn a_durable_write_leaves_what_others_have_sent() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        let own = |offset, data| NewBytes { owner: 2, awaited: true, ..plain(offset, data) };
        list.add_bytes(&memory, &plain(0, b"older")).unwrap();
        send(&mut list, 1, &stats);
        list.pass_on(1, Some(2), &stats, &mut Vec::new());
        let apart = list.add_bytes(&memory, &own(10, b"apart")).unwrap().piece;
        list.release_durable(apart);
        assert_eq!(list.bytes(), 10, "no process has it");
        send(&mut list, 1, &stats);
        list.release_durable(apart);
        let over = list.add_bytes(&memory, &own(3, b"over")).unwrap().piece;
        send(&mut list, 1, &stats);
        list.release_durable(over);
        list.resend_from(1, &stats);
        assert_eq!(send(&mut list, 2, &stats), [(0, b"older".to_vec()), (3, b"over".to_vec())]);
    }

    #[test]
    fn a_cut_ends_the_changes_behind_it() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        for (offset, change) in [(0, 7), (4, 8)] {
            let line = NewBytes { appended: true, ..plain(offset, b"line") };
            list.add_bytes(&memory, &line).unwrap();
            // The first one is in the way of the second one.
            let mut piece = take(&mut list).unwrap();
            piece.change = Some(change);
            list.end_sending(piece, PieceOutcome::Unsent(MaybeExecuted::At(1)), &stats);
            if change == 7 {
                send(&mut list, 1, &stats);
            }
        }
        let mut changes = Vec::new();
        list.cut_at(4, &stats, &mut changes);
        assert_eq!((&*changes, list.unsent_pieces(), list.bytes()), (&[8][..], 0, 4));
        list.resend_from(1, &stats);
        assert_eq!(take(&mut list).unwrap().change, None, "it was answered");
    }

    #[test]
    fn overlapping_pieces_are_sent_in_order() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        for (offset, data) in [(0, b"old"), (10, b"far"), (1, b"new")] {
            list.add_bytes(&memory, &plain(offset, data)).unwrap();
        }
        let (old, far) = (take(&mut list).unwrap(), take(&mut list).unwrap());
        assert_eq!((old.offset, far.offset), (0, 10));
        assert!(matches!(list.next_piece(u64::MAX, false), NextPiece::Wait), "one lies below it");
        list.end_sending(far, PieceOutcome::Sent(1), &stats);
        assert!(matches!(list.next_piece(u64::MAX, false), NextPiece::Wait));
        list.end_sending(old, PieceOutcome::Unsent(MaybeExecuted::At(1)), &stats);
        assert_eq!(send(&mut list, 2, &stats), [(0, b"old".to_vec()), (1, b"new".to_vec())]);
        // What process 1 has is sent again, and what was written later.
        assert_eq!(list.resend_from(1, &stats), 6);
        assert_eq!(send(&mut list, 2, &stats), [(10, b"far".to_vec()), (1, b"new".to_vec())]);
        assert_eq!((list.unsent_pieces(), list.unsent_bytes(), list.resend_from(1, &stats)), (0, 0, 0));
    }

    #[test]
    fn memory_is_limited() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        let block = vec![7; 1 << 20];
        for n in [0, 2 << 20] {
            assert!(list.add_bytes(&memory, &plain(n, &block)).unwrap().ready);
        }
        assert!(list.add_bytes(&memory, &plain(4 << 20, b"x")).is_none(), "all of it is in use");
        send(&mut list, 1, &stats);
        assert!(list.add_bytes(&memory, &plain(4 << 20, b"x")).is_none(), "sent is not durable");
        list.release(u64::MAX, list.stamp(), 1);
        assert!(list.is_empty() && list.add_bytes(&memory, &plain(0, &block)).is_some());
        // What the source refuses is forgotten.
        let piece = take(&mut list).unwrap();
        list.end_sending(piece, PieceOutcome::Refused, &stats);
        assert!(list.is_empty() && memory.used_bytes() == 0);
    }

    #[test]
    fn short_appends_share_a_buffer() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        for n in 0..100u64 {
            let line = NewBytes { appended: true, ..plain(n * 5, b"line\n") };
            assert!(list.add_bytes(&memory, &line).unwrap().begun);
            assert_eq!(send(&mut list, 1, &stats).len(), 1);
        }
        assert_eq!(memory.used_bytes(), 16 << 10);
        list.resend_from(1, &stats);
        assert_eq!(send(&mut list, 2, &stats), [(0, b"line\n".repeat(100))]);
    }

    #[test]
    fn a_write_that_failed_takes_its_own_bytes_back() {
        let (memory, mut list) = (memory(), PieceList::default());
        let stats = Arc::clone(&memory.stats);
        list.add_bytes(&memory, &plain(0, b"kept")).unwrap();
        let own = NewBytes { awaited: true, ..plain(4, b"own") };
        let added = list.add_bytes(&memory, &own).unwrap();
        assert!(added.begun && list.add_bytes(&memory, &plain(7, b"later")).unwrap().begun, "a piece of its own");
        let (kept, sending) = (take(&mut list).unwrap(), take(&mut list).unwrap());
        assert_eq!((sending.offset, list.end_awaited(added.piece, true, &stats)), (4, AwaitedPiece::Sending));
        list.end_sending(sending, PieceOutcome::Unsent(MaybeExecuted::At(1)), &stats);
        list.end_sending(kept, PieceOutcome::Unsent(MaybeExecuted::Nowhere), &stats);
        assert_eq!(list.end_awaited(added.piece, true, &stats), AwaitedPiece::TakenBack(None));
        assert_eq!(send(&mut list, 2, &stats), [(0, b"kept".to_vec()), (7, b"later".to_vec())]);
        // Appends: what a process has is written, whatever else failed, and its number ends with it.
        let line = NewBytes { appended: true, awaited: true, ..plain(12, b"line") };
        let added = list.add_bytes(&memory, &line).unwrap();
        assert_eq!(send(&mut list, 2, &stats).len(), 1);
        list.resend_from(2, &stats);
        assert_eq!(list.end_awaited(added.piece, false, &stats), AwaitedPiece::Written, "it was sent before the loss");
        assert_eq!(send(&mut list, 3, &stats).len(), 3);
        let added = list.add_bytes(&memory, &line).unwrap();
        let mut piece = take(&mut list).unwrap();
        piece.change = Some(7);
        list.end_sending(piece, PieceOutcome::Unsent(MaybeExecuted::At(3)), &stats);
        assert_eq!(list.end_awaited(added.piece, true, &stats), AwaitedPiece::TakenBack(Some(7)));
        let added = list.add_bytes(&memory, &line).unwrap();
        let piece = take(&mut list).unwrap();
        list.end_sending(piece, PieceOutcome::Refused, &stats);
        let ended = [(); 2].map(|()| list.end_awaited(added.piece, false, &stats));
        assert_eq!(ended, [AwaitedPiece::Refused, AwaitedPiece::Written], "reported once");
        assert_eq!((list.unsent_pieces(), list.unsent_bytes(), stats.writes.dirty_bytes.get()), (0, 0, 0));
    }

    #[test]
    fn bytes_of_a_closed_file_pass_to_another_that_can_send_them() {
        let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
        list.add_bytes(&memory, &plain(0, b"sent")).unwrap();
        send(&mut list, 1, &stats);
        list.add_bytes(&memory, &plain(4, b"unsent")).unwrap();
        assert_eq!(list.pass_on(1, Some(2), &stats, &mut Vec::new()), 6);
        assert_eq!((list.first_left(u64::MAX), list.unsent_pieces()), (Some((2, Some(1))), 0));
        assert_eq!(list.pass_on(2, None, &stats, &mut Vec::new()), 0);
        assert!(list.is_empty());
    }

    /// A source with two processes that cache writes: a lost one takes what it has not synced with it.
    #[derive(Default)]
    struct CachingSource {
        durable: Vec<u8>,
        cached: [Vec<(u64, Vec<u8>)>; 2],
    }

    impl CachingSource {
        fn write(&mut self, process: usize, piece: &PieceToSend) {
            self.cached[process].push((piece.offset, piece.as_new().data.to_vec()));
        }

        fn sync(&mut self, process: usize) {
            for (offset, bytes) in self.cached[process].drain(..) {
                let end = offset as usize + bytes.len();
                self.durable.resize(self.durable.len().max(end), 0);
                self.durable[offset as usize..end].copy_from_slice(&bytes);
            }
        }
    }

    /// Writes, sends that end in any order, syncs, and losses of the process: after a last sync the file is as written.
    #[test]
    fn no_order_of_sends_and_losses_changes_the_file() {
        for seed in 1..400u64 {
            let (memory, mut list, stats) = (memory(), PieceList::default(), Stats::default());
            let (mut source, mut wanted) = (CachingSource::default(), Vec::new());
            let (mut sending, mut home) = (Vec::new(), 0);
            let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let mut draw = |below: u64| {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                random % below
            };
            for step in 0..60 {
                match draw(8) {
                    0..3 => {
                        let (offset, data) = (draw(40), vec![step as u8 + 1; 1 + draw(20) as usize]);
                        let end = offset as usize + data.len();
                        wanted.resize(end.max(wanted.len()), 0);
                        wanted[offset as usize..end].copy_from_slice(&data);
                        list.add_bytes(&memory, &plain(offset, &data)).unwrap();
                    }
                    3..5 => sending.extend(take(&mut list).map(|piece| (piece, home))),
                    5 if !sending.is_empty() => {
                        let (piece, to) = sending.swap_remove(draw(sending.len() as u64) as usize);
                        // Executed by a process that is lost meanwhile, it is not there.
                        let outcome = match to == home {
                            true => {
                                source.write(to, &piece);
                                PieceOutcome::Sent(to as u64)
                            }
                            false => PieceOutcome::Unsent(MaybeExecuted::At(to as u64)),
                        };
                        list.end_sending(piece, outcome, &stats);
                    }
                    6 => {
                        let (mark, stamp) = (list.mark(), list.stamp());
                        source.sync(home);
                        list.release(mark, stamp, home as u64);
                    }
                    7 if draw(2) == 0 => {
                        source.cached[home].clear();
                        list.resend_from(home as u64, &stats);
                        home = 1 - home;
                        // The same process can come back, as another one: it has nothing.
                        source.cached[home].clear();
                    }
                    _ => {}
                }
            }
            for (piece, to) in sending {
                list.end_sending(piece, PieceOutcome::Unsent(MaybeExecuted::At(to as u64)), &stats);
            }
            while let Some(piece) = take(&mut list) {
                source.write(home, &piece);
                list.end_sending(piece, PieceOutcome::Sent(home as u64), &stats);
            }
            source.sync(home);
            list.release(u64::MAX, list.stamp(), home as u64);
            assert!(list.is_empty() && list.unsent_bytes() == 0 && memory.used_bytes() == 0, "seed {seed}");
            assert_eq!(source.durable, wanted, "seed {seed}");
        }
    }
}
