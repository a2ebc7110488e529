//! Who runs, who waits for what until when, and what time it is. One thread holds the baton; only that one touches any of
//! this, and it gives the baton on by the next one's semaphore. It calls nothing that is defined anew here.

use std::cell::{Cell, UnsafeCell};
use std::collections::{BTreeMap, VecDeque};

/// What a look at the clock costs, so that nobody waits for it in a loop for ever. Nanoseconds.
const LOOK_NS: u64 = 100;
/// One look at a clock in so many gives the baton away.
const PREEMPT: u64 = 16;
/// Threads that are left after the first one ended have this long. Nanoseconds.
const AFTER_NS: u64 = 3_600_000_000_000;

/// How a run went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    /// Depends on every change of threads and the time of it: equal for equal runs.
    pub trace: u64,
    /// How often another thread went on.
    pub switches: u64,
    /// Threads that had not ended.
    pub left: Vec<Left>,
}

/// A thread that had not ended, by its number, in the order in which they were started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Has the baton, or would take it.
    Ready,
    Waiting {
        /// What wakes it: a futex's address or the number of a thread to be joined.
        on: Option<usize>,
        until: Option<u64>,
    },
}

/// A semaphore whose address stays.
#[derive(Clone, Copy)]
pub(crate) struct Baton(*mut libc::sem_t);

// SAFETY: a semaphore is there to be used by several threads.
unsafe impl Send for Baton {}

impl Baton {
    fn new() -> Baton {
        // SAFETY: all zeroes is a value of the type, and it is made a semaphore before anybody sees it.
        let sem = Box::into_raw(Box::new(unsafe { std::mem::zeroed::<libc::sem_t>() }));
        // SAFETY: the memory is ours and is never freed: a thread that is left for ever keeps waiting on it.
        unsafe { libc::sem_init(sem, 0, 0) };
        Baton(sem)
    }

    fn give(self) {
        // SAFETY: made by `new`, never freed.
        unsafe { libc::sem_post(self.0) };
    }

    pub(crate) fn take(self) {
        // SAFETY: made by `new`, never freed. A signal only interrupts the wait.
        while unsafe { libc::sem_wait(self.0) } != 0 {}
    }
}

struct Thread {
    state: State,
    baton: Baton,
    /// Its last wait ended by the time.
    timed_out: bool,
}

/// All threads of a run.
pub(crate) struct Sched {
    now: u64,
    dice: u64,
    threads: BTreeMap<u64, Thread>,
    next: u64,
    /// The numbers of threads by what the C library calls them.
    natives: BTreeMap<usize, u64>,
    /// Who waits on what, first come first.
    queues: BTreeMap<usize, VecDeque<u64>>,
    trace: u64,
    switches: u64,
    /// When the first thread ended.
    ended: Option<u64>,
    over: bool,
    done: Baton,
}

struct Cellar(UnsafeCell<Option<Sched>>);

// SAFETY: touched by the holder of the baton alone, and by `begin` and `wait` while there is no run.
unsafe impl Sync for Cellar {}

static SCHED: Cellar = Cellar(UnsafeCell::new(None));

thread_local! {
    static ME: Cell<u64> = const { Cell::new(0) };
}

/// The number of the calling thread; `None` when it is not one of ours.
pub(crate) fn me() -> Option<u64> {
    // After the thread's own storage is gone it is nobody's thread any more.
    ME.try_with(Cell::get).ok().filter(|me| *me != 0)
}

/// The scheduler, for the holder of the baton.
pub(crate) fn sched() -> &'static mut Sched {
    // SAFETY: the caller is one of our threads (see `me`) and runs, so it holds the baton, and no other reference is alive:
    // none is kept over a call that gives the baton away.
    let held = unsafe { &mut *SCHED.0.get() };
    match held {
        Some(sched) => sched,
        None => std::process::abort(),
    }
}

/// A thread that was told to begin.
pub(crate) struct Begun(u64, Baton);

impl Begun {
    /// Its number.
    pub fn number(&self) -> u64 {
        self.0
    }

    /// The calling thread is that one from now on; returns when it is its turn.
    pub fn enter(&self) {
        self.1.take();
        ME.set(self.0);
        crate::symbols::on_exit();
    }
}

impl Sched {
    /// A run with its first thread, which goes on at once.
    pub fn begin(seed: u64) -> Begun {
        let mut sched = Sched {
            now: 0,
            dice: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            threads: BTreeMap::new(),
            next: 1,
            natives: BTreeMap::new(),
            queues: BTreeMap::new(),
            trace: seed,
            switches: 0,
            ended: None,
            over: false,
            done: Baton::new(),
        };
        let first = sched.add();
        first.1.give();
        // SAFETY: there is no run, so nobody holds the baton: runs come one after the other.
        unsafe { *SCHED.0.get() = Some(sched) };
        first
    }

    /// Waits until the run is over.
    pub fn wait() -> Ran {
        // SAFETY: `done` is written before the run begins and never after.
        let done = unsafe { (*SCHED.0.get()).as_ref().map(|sched| sched.done) };
        done.into_iter().for_each(Baton::take);
        // SAFETY: the run is over: threads that are left wait for a baton that nobody gives.
        let sched = unsafe { (*SCHED.0.get()).take() };
        let Some(sched) = sched else { std::process::abort() };
        let left = sched.threads.into_keys().map(Left).collect();
        Ran { trace: sched.trace, switches: sched.switches, left }
    }

    /// A new thread, which has not begun.
    pub fn add(&mut self) -> Begun {
        let (number, baton) = (self.next, Baton::new());
        self.next += 1;
        self.threads.insert(number, Thread { state: State::Ready, baton, timed_out: false });
        Begun(number, baton)
    }

    /// What was added could not be started.
    pub fn remove(&mut self, begun: &Begun) {
        self.threads.remove(&begun.0);
    }

    /// What the C library calls a thread.
    pub fn name(&mut self, begun_number: u64, native: usize) {
        self.natives.insert(native, begun_number);
    }

    /// xorshift64.
    pub fn draw(&mut self) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice
    }

    /// Reads the clock, in nanoseconds since the run began; whether the baton is to be given away now.
    pub fn look(&mut self) -> (u64, bool) {
        self.now += LOOK_NS;
        (self.now, self.draw().is_multiple_of(PREEMPT))
    }

    /// The time, in nanoseconds since the run began.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Whose turn it is now, the time moved on to when there is somebody; `None` when the run is over.
    fn choose(&mut self) -> Option<u64> {
        loop {
            for thread in self.threads.values_mut() {
                if let State::Waiting { until: Some(until), .. } = thread.state
                    && until <= self.now
                {
                    (thread.state, thread.timed_out) = (State::Ready, true);
                }
            }
            let ready = self.threads.values().filter(|thread| thread.state == State::Ready).count() as u64;
            if ready > 0 {
                let nth = (self.draw() % ready) as usize;
                return self
                    .threads
                    .iter()
                    .filter(|(_, t)| t.state == State::Ready)
                    .nth(nth)
                    .map(|(number, _)| *number);
            }
            let until = |thread: &Thread| match thread.state {
                State::Waiting { until, .. } => until,
                State::Ready => None,
            };
            match self.threads.values().filter_map(until).min() {
                Some(_) if self.ended.is_some_and(|at| self.now > at + AFTER_NS) => return None,
                Some(until) => self.now = until,
                None if self.ended.is_some() => return None,
                None => self.stuck(),
            }
        }
    }

    /// Nobody can ever go on: says who waits for what, and ends the process.
    fn stuck(&self) -> ! {
        let mut text = format!("every thread waits for another one, {} s into the run:\n", self.now / 1_000_000_000);
        for (number, thread) in &self.threads {
            text.push_str(&format!("  thread {number}: {:?}\n", thread.state));
        }
        // SAFETY: the pointer and the length are those of the text. Not by std, whose lock may be held by one of them.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        std::process::abort()
    }

    /// Gives the baton to whose turn it is; `Some` with that one's, when it is not `me`.
    fn pass(&mut self, me: u64) -> Option<Baton> {
        match self.choose() {
            Some(next) => {
                self.switches += 1;
                let mixed = (self.trace ^ next ^ self.now.rotate_left(20)).wrapping_mul(0xff51_afd7_ed55_8ccd);
                self.trace = mixed ^ (mixed >> 32);
                (next != me).then(|| self.threads[&next].baton)
            }
            None => {
                self.over = true;
                Some(self.done)
            }
        }
    }
}

/// Gives the baton away, and returns when it is this thread's turn again.
fn pause(me: u64, sched: &mut Sched) {
    if let Some(next) = sched.pass(me) {
        let own = sched.threads[&me].baton;
        next.give();
        own.take();
    }
}

/// Lets others go on.
pub(crate) fn give_way(me: u64) {
    pause(me, sched());
}

/// Waits until woken `on` something or until the time is there; whether it was woken.
pub(crate) fn wait(me: u64, on: Option<usize>, until: Option<u64>) -> bool {
    let sched = sched();
    if let Some(on) = on {
        sched.queues.entry(on).or_default().push_back(me);
    }
    if let Some(thread) = sched.threads.get_mut(&me) {
        (thread.state, thread.timed_out) = (State::Waiting { on, until }, false);
    }
    pause(me, sched);
    // Not the reference from before: others held the baton.
    let sched = self::sched();
    let timed_out = sched.threads.get(&me).is_some_and(|thread| thread.timed_out);
    if timed_out && let Some(queue) = on.and_then(|on| sched.queues.get_mut(&on)) {
        queue.retain(|waiter| *waiter != me);
    }
    if let Some(on) = on
        && sched.queues.get(&on).is_some_and(VecDeque::is_empty)
    {
        sched.queues.remove(&on);
    }
    !timed_out
}

/// Wakes up to `most` of those that wait on `on`; how many there were.
pub(crate) fn wake(sched: &mut Sched, on: usize, most: usize) -> usize {
    let mut woken = 0;
    while woken < most {
        let Some(waiter) = sched.queues.get_mut(&on).and_then(VecDeque::pop_front) else { break };
        if let Some(thread) = sched.threads.get_mut(&waiter)
            && matches!(thread.state, State::Waiting { on: Some(at), .. } if at == on)
        {
            thread.state = State::Ready;
            woken += 1;
        }
    }
    woken
}

/// Waits for the end of a thread by what the C library calls it.
pub(crate) fn join(me: u64, native: usize) {
    while let Some(number) = sched().natives.get(&native).copied()
        && sched().threads.contains_key(&number)
    {
        wait(me, Some(end_of(number)), None);
    }
}

/// What those wait on who wait for a thread's end: no address is odd and so small.
fn end_of(number: u64) -> usize {
    number as usize * 2 + 1
}

/// The calling thread ends.
pub(crate) fn exit(me: u64) {
    let sched = sched();
    sched.threads.remove(&me);
    sched.natives.retain(|_, number| *number != me);
    wake(sched, end_of(me), usize::MAX);
    if me == 1 {
        sched.ended = Some(sched.now);
    }
    ME.set(0);
    if let Some(next) = sched.pass(me) {
        next.give();
    }
}
