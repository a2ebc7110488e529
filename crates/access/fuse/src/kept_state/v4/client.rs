//! What a client of nodes keeps in the state of a mount: session, numbers, and what was sent for each request. Knows neither nodes
//! nor changes.

use super::{AT_CLIENTS, AT_HELD, AT_NUMBERS, AT_SENT, AT_SESSION, KIND_CHANGE, KNOWN_WORDS, KeptState, store_known};
use spurline_fs::{KeptChange, RequestNumber};
use spurline_volume::kept_client::{ClientStart, HeldFile, KeptClient, SentChange};
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{Ordering, compiler_fence};

thread_local! {
    /// The request that this thread serves.
    static THREAD_REQUEST: Cell<RequestNumber> = const { Cell::new(RequestNumber::NONE) };
}

/// This thread serves a request.
pub(crate) fn set_thread_request(request: RequestNumber) {
    THREAD_REQUEST.set(request);
}

impl KeptState {
    /// The session, the last number that is reserved, and the number of processes.
    pub(in super::super) fn client_numbers(&self) -> [u64; 3] {
        [AT_SESSION, AT_NUMBERS, AT_CLIENTS].map(|at| self.word(at))
    }

    pub(in super::super) fn set_client_numbers(&self, numbers: [u64; 3]) {
        for (at, number) in [AT_SESSION, AT_NUMBERS, AT_CLIENTS].into_iter().zip(numbers) {
            self.words[at].store(number, Ordering::Relaxed);
        }
    }

    /// Finds what processes before have sent, and their records without a request, which threads of this process use again.
    pub(super) fn find_sent(&self) {
        let mut sent = HashMap::new();
        let mut idle = Vec::new();
        self.for_each_block(|at, kind, _| {
            if kind != KIND_CHANGE {
                return;
            }
            match self.read_change(at) {
                Some(change) if change.sent.number != 0 => drop(sent.insert(change.request, change.sent)),
                Some(_) => {}
                None => idle.push(at as u32),
            }
        });
        *self.earlier_sent.lock() = sent;
        *self.idle_changes.lock() = idle;
    }

    /// What a process has sent for the request of a record.
    pub(super) fn read_sent(&self, at: usize) -> SentChange {
        SentChange {
            number: self.word(at + AT_SENT),
            process: self.word(at + AT_SENT + 1),
            place: self.word(at + AT_SENT + 2),
            known: [0, 1].map(|n| self.known_at(at + AT_SENT + 3 + n * KNOWN_WORDS)),
        }
    }

    /// Writes what is sent for the request of a record. A successor finds all of it, or nothing.
    pub(super) fn write_sent(&self, slot: usize, sent: &SentChange) {
        let words = &self.words[slot + AT_SENT..];
        if words[0].load(Ordering::Relaxed) == sent.number {
            // The change is recorded already, by a process before.
            return;
        }
        words[0].store(0, Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
        words[1].store(sent.process, Ordering::Relaxed);
        words[2].store(sent.place, Ordering::Relaxed);
        for (known, words) in sent.known.iter().zip(words[3..].chunks(KNOWN_WORDS)) {
            store_known(words, known.as_ref());
        }
        words[0].store(sent.number, Ordering::Release);
    }
}

impl KeptClient for KeptState {
    fn begin(&self, session: u64) -> ClientStart {
        let processes = self.words[AT_CLIENTS].fetch_add(1, Ordering::Relaxed);
        if processes == 0 {
            self.words[AT_SESSION].store(session, Ordering::Relaxed);
        }
        let mut pending: Vec<u64> = self.earlier_sent.lock().values().map(|sent| sent.number).collect();
        pending.sort_unstable();
        ClientStart { session: self.word(AT_SESSION), processes, pending }
    }

    fn reserve_numbers(&self, count: u64) -> u64 {
        self.words[AT_NUMBERS].fetch_add(count, Ordering::Relaxed)
    }

    fn take_repeated(&self) -> Option<SentChange> {
        let request = THREAD_REQUEST.get();
        if !request.repeated {
            return None;
        }
        self.earlier_sent.lock().remove(&request.number)
    }

    fn note_sending(&self, change: &SentChange) {
        let request = THREAD_REQUEST.get().number;
        if request == 0 {
            return;
        }
        let slot = self.thread_change() as usize;
        if slot == 0 {
            return;
        }
        self.begin_record(slot, &KeptChange { request, ..KeptChange::default() });
        self.write_sent(slot, change);
    }

    fn note_held(&self, record: u32, held: &HeldFile) {
        if record != 0 {
            let words = &self.words[record as usize + AT_HELD..];
            words[1].store(held.node, Ordering::Relaxed);
            words[2].store(held.process, Ordering::Relaxed);
        }
    }

    fn note_sent(&self, number: u64, process: u64) {
        let slot = self.present_change() as usize;
        if slot != 0 && self.word(slot + AT_SENT) == number {
            self.words[slot + AT_SENT + 1].store(process, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spurline_fs::{KeptHandle, KeptRecord, KeptRecords as _};
    use spurline_volume::writes::FileIdentity;

    #[test]
    fn a_client_of_nodes_goes_on_with_its_numbers_and_the_changes_without_an_answer() {
        let state = KeptState::create(0).unwrap();
        assert_eq!(state.begin(5), ClientStart { session: 5, ..ClientStart::default() });
        assert_eq!((state.reserve_numbers(10), state.reserve_numbers(10)), (0, 10));
        let held = HeldFile { number: 1, node: 2, process: u64::MAX, closing: true };
        let handle = KeptHandle {
            fh: 9,
            ino: 5,
            opener: 4_194_303,
            owner: [u32::MAX, 7],
            held: Some(held),
            ..KeptHandle::default()
        };
        let slot =
            state.keep_handle(&KeptHandle { held: Some(HeldFile { number: 1, ..HeldFile::default() }), ..handle });
        state.note_held(slot, &held);
        state.note_closing(slot);
        set_thread_request(RequestNumber { number: 6, repeated: false });
        let known = [Some(FileIdentity::from_number(3)), None];
        let sent = SentChange { number: 11, process: 0, place: 77, known };
        state.note_sending(&SentChange { number: 10, ..sent });
        state.note_sending(&sent);
        state.note_sent(10, 3);
        state.note_sent(11, 4);
        let next = KeptState::open_same(state.duplicate_file().unwrap()).unwrap();
        assert_eq!(next.begin(8), ClientStart { session: 5, processes: 1, pending: vec![11] });
        assert_eq!(next.reserve_numbers(10), 20);
        next.for_each(&mut |_, record| match record {
            KeptRecord::Handle(kept) => assert_eq!(*kept, handle),
            KeptRecord::Change(change) => assert_eq!((change.request, change.made), (6, None)),
            other => panic!("{other:?}"),
        });
        assert_eq!(next.take_repeated(), None, "the request is new");
        set_thread_request(RequestNumber { number: 6, repeated: true });
        assert_eq!(next.take_repeated(), Some(SentChange { process: 4, ..sent }));
        assert_eq!(next.take_repeated(), None);
        set_thread_request(RequestNumber::NONE);
    }

    #[test]
    fn threads_have_records_of_their_own_whatever_they_sent_before_the_records_were_read() {
        let state = KeptState::create(0).unwrap();
        set_thread_request(RequestNumber { number: 6, repeated: false });
        let sent = SentChange { number: 11, process: 0, place: 0, known: [None; 2] };
        state.note_sending(&sent);
        let next = KeptState::open_same(state.duplicate_file().unwrap()).unwrap();
        // No request of a program: as the proof of a directory, or a file that is opened again.
        set_thread_request(RequestNumber::NONE);
        next.note_sent(20, 3);
        next.for_each(&mut |_, _| {});
        set_thread_request(RequestNumber { number: 7, repeated: false });
        next.note_sending(&SentChange { number: 21, ..sent });
        std::thread::scope(|scope| {
            scope.spawn(|| {
                set_thread_request(RequestNumber { number: 8, repeated: false });
                next.note_sending(&SentChange { number: 22, ..sent });
            });
        });
        set_thread_request(RequestNumber::NONE);
        let last = KeptState::open_same(next.duplicate_file().unwrap()).unwrap();
        assert_eq!(last.begin(8).pending, [11, 21, 22]);
    }
}
