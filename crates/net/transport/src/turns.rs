//! Whose turn it is to wait for events: as many workers as there are processors to run them, and one more for each that
//! takes long over its request. So a burst of small requests is answered by few threads that do not fall asleep between
//! them, and one that waits for a disk or another machine is in nobody's way. It knows no connection.

use parking_lot::{Condvar, Mutex};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A worker that had no turn for this long is one too many.
const SPARE: Duration = Duration::from_secs(10);

thread_local! {
    /// The turn this thread began a request with, and when.
    static ON: Cell<(usize, u64)> = const { Cell::new((0, 0)) };
}

/// The turns of one crew.
pub(crate) struct Turns {
    started: Instant,
    /// A worker that is on its request for longer has its turn given to another.
    long: Duration,
    /// When the request was begun that each turn's worker is on, in µs since the start; 0 while it waits for events.
    since: Box<[AtomicU64]>,
    /// Requests begun so far, so that one who looks now and then sees whether there are any.
    begun: AtomicU64,
    /// Workers without a turn.
    waiting: AtomicUsize,
    /// Nobody looks for requests that take long, as there were none.
    asleep: AtomicBool,
    inner: Mutex<Inner>,
    /// For the one who looks for requests that take long; for the other workers without a turn.
    watcher: Condvar,
    reserve: Condvar,
}

struct Inner {
    free: Vec<usize>,
    watched: bool,
    over: bool,
}

/// The right to wait for events; given back when it is dropped.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    slot: usize,
}

impl Turns {
    pub fn new(at_once: usize, long: Duration) -> Self {
        let at_once = at_once.max(1);
        Turns {
            started: Instant::now(),
            long,
            since: (0..at_once).map(|_| AtomicU64::new(0)).collect(),
            begun: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            asleep: AtomicBool::new(false),
            inner: Mutex::new(Inner { free: (0..at_once).rev().collect(), watched: false, over: false }),
            watcher: Condvar::new(),
            reserve: Condvar::new(),
        }
    }

    /// Workers without a turn.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::SeqCst)
    }

    /// Nobody gets a turn any more.
    pub fn end(&self) {
        self.inner.lock().over = true;
        self.watcher.notify_all();
        self.reserve.notify_all();
    }

    /// Gives the turn away with which this thread began its request, as it is about to wait.
    pub fn give_away(&self) {
        let (slot, begun) = ON.take();
        if begun != 0 && self.since[slot].compare_exchange(begun, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            drop(Turn { turns: self, slot });
        }
    }

    /// This thread goes on to another request, so that what took long was not one of them; whether it still has its turn.
    pub fn go_on(&self) -> bool {
        let (slot, begun) = ON.get();
        if begun == 0 {
            return false;
        }
        let now = self.now();
        let own = self.since[slot].compare_exchange(begun, now, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        ON.set(if own { (slot, now) } else { (0, 0) });
        own
    }

    fn now(&self) -> u64 {
        // Never 0, which says that there is no request.
        self.started.elapsed().as_micros() as u64 + 1
    }

    /// Waits for a turn; `None` when they are over, or when this worker was not needed for long.
    pub fn take(&self) -> Option<Turn<'_>> {
        let mut inner = self.inner.lock();
        if inner.over {
            return None;
        }
        if let Some(slot) = inner.free.pop() {
            return Some(Turn { turns: self, slot });
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let came = Instant::now();
        let slot = loop {
            if inner.over {
                break None;
            }
            if let Some(slot) = inner.free.pop() {
                break Some(slot);
            }
            let late = came.elapsed() > SPARE;
            if inner.watched {
                if late {
                    // There is another.
                    break None;
                }
                self.reserve.wait_for(&mut inner, SPARE);
                continue;
            }
            if late && self.needless() {
                self.reserve.notify_one();
                return None;
            }
            // Those that are overdue already wait for nobody to look a while longer.
            if let Some(slot) = self.long() {
                break Some(slot);
            }
            inner.watched = true;
            let begun = self.begun.load(Ordering::SeqCst);
            let timed_out = self.watcher.wait_for(&mut inner, self.long).timed_out();
            let idle = timed_out && begun == self.begun.load(Ordering::SeqCst) && self.nothing_begun();
            if idle && !inner.over && inner.free.is_empty() {
                // Whoever begins a request now sees this, or else its request is seen here.
                self.asleep.store(true, Ordering::SeqCst);
                if self.nothing_begun() {
                    self.watcher.wait_for(&mut inner, SPARE);
                }
                self.asleep.store(false, Ordering::SeqCst);
            }
            inner.watched = false;
            if let Some(slot) = self.long() {
                break Some(slot);
            }
        };
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if !inner.watched {
            self.reserve.notify_one();
        }
        slot.map(|slot| Turn { turns: self, slot })
    }

    fn nothing_begun(&self) -> bool {
        self.since.iter().all(|since| since.load(Ordering::SeqCst) == 0)
    }

    /// Whether a worker may go that would be missed if a request took long now; it is no longer counted then.
    fn needless(&self) -> bool {
        // Whoever begins a request now sees that nobody waits, or else its request is seen here.
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if self.nothing_begun() {
            return true;
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        false
    }

    /// Takes the turn of a worker whose request takes long.
    fn long(&self) -> Option<usize> {
        let before = self.now().saturating_sub(self.long.as_micros() as u64);
        self.since.iter().position(|since| {
            let begun = since.load(Ordering::SeqCst);
            begun != 0
                && begun <= before
                && since.compare_exchange(begun, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok()
        })
    }
}

impl<'a> Turn<'a> {
    /// Says that this thread takes a request.
    pub fn begin(&self) {
        let now = self.turns.now();
        self.turns.since[self.slot].store(now, Ordering::SeqCst);
        ON.set((self.slot, now));
        self.turns.begun.fetch_add(1, Ordering::SeqCst);
        if self.turns.asleep.load(Ordering::SeqCst) {
            let _inner = self.turns.inner.lock();
            self.turns.watcher.notify_one();
        }
    }

    /// Says that it was answered; gives the turn on, unless another worker has it by now.
    pub fn done(self) -> Option<Turn<'a>> {
        let (_, begun) = ON.take();
        // No two requests of one turn begin at the same time: in between it took long.
        let since = &self.turns.since[self.slot];
        if begun != 0 && since.compare_exchange(begun, 0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            return Some(self);
        }
        std::mem::forget(self);
        None
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut inner = self.turns.inner.lock();
        inner.free.push(self.slot);
        let watched = inner.watched;
        drop(inner);
        if watched {
            self.turns.watcher.notify_one()
        } else {
            self.turns.reserve.notify_one()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LONG: Duration = Duration::from_millis(2);

    fn soon() -> Duration {
        Duration::from_secs(60)
    }

    #[test]
    fn a_turn_that_takes_long_is_another_workers() {
        let turns = Turns::new(1, LONG);
        let first = turns.take().unwrap();
        first.begin();
        std::thread::scope(|scope| {
            let (has, had) = channel();
            let (go, gone) = channel::<()>();
            let turns = &turns;
            scope.spawn(move || {
                let second = turns.take().unwrap();
                has.send(()).unwrap();
                gone.recv_timeout(soon()).unwrap();
                drop(second);
            });
            // It gets the turn although the first never gives it back.
            had.recv_timeout(soon()).unwrap();
            assert!(first.done().is_none() && turns.waiting() == 0);
            go.send(()).unwrap();
            // And the one who lost it gets it when it is given back.
            let again = turns.take().unwrap();
            again.begin();
            drop(again.done());
        });
        assert_eq!(turns.inner.lock().free.len(), 1);
    }

    #[test]
    fn a_worker_that_is_about_to_wait_gives_its_turn_away() {
        let turns = Turns::new(1, LONG);
        let first = turns.take().unwrap();
        turns.give_away();
        first.begin();
        turns.give_away();
        // Without waiting: it is there.
        let second = turns.take().unwrap();
        assert!(first.done().is_none() && turns.inner.lock().free.is_empty());
        drop(second);
        assert_eq!(turns.inner.lock().free.len(), 1);
    }

    #[test]
    fn turns_are_given_on_among_many_and_end() {
        let turns = Turns::new(2, LONG);
        let served = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for worker in 0..6u64 {
                let (turns, served) = (&turns, &served);
                scope.spawn(move || {
                    let mut held = None;
                    while let Some(turn) = held.take().or_else(|| turns.take()) {
                        turn.begin();
                        if (served.fetch_add(1, Ordering::SeqCst) as u64 + worker).is_multiple_of(50) {
                            std::thread::sleep(2 * LONG);
                        }
                        held = turn.done();
                        if served.load(Ordering::SeqCst).is_multiple_of(7) {
                            held = None;
                        }
                    }
                });
            }
            let until = Instant::now() + soon();
            while served.load(Ordering::SeqCst) < 2000 {
                assert!(Instant::now() < until, "nobody has a turn any more");
                std::thread::yield_now();
            }
            turns.end();
        });
        assert!(turns.take().is_none() && turns.waiting() == 0);
        assert_eq!(turns.inner.lock().free.len(), 2, "a turn was lost or made");
    }
}
