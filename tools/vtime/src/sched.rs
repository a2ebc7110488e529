//! Owns the run state: running thread, waiting threads and the clock. Only the thread with the baton touches the state, and
//! passes the baton by the next thread's semaphore. Calls no function that this crate redefines.

use std::cell::{Cell, UnsafeCell};
use std::collections::{BTreeMap, VecDeque};

/// Cost of reading the clock in nanoseconds, so that a polling loop ends.
const LOOK_NS: u64 = 100;
/// A clock read in this many switches threads.
const PREEMPTION_PERIOD: u64 = 16;
/// Virtual time for other threads after the end of the first, in nanoseconds.
const AFTER_NS: u64 = 3_600_000_000_000;

/// Result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunReport {
    /// Hash over all thread switches and times: equal for equal runs.
    pub trace: u64,
    /// Number of thread switches.
    pub switches: u64,
    /// Threads that had not ended.
    pub left: Vec<LeftThread>,
}

/// A thread that had not ended, by number in start order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftThread(pub u64);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThreadState {
    /// Has the baton or can run.
    Ready,
    Waiting {
        /// Wake key: a futex address, or derived from the number of a thread to join.
        on: Option<usize>,
        until: Option<u64>,
    },
}

/// A semaphore with a fixed address.
#[derive(Clone, Copy)]
pub(crate) struct ThreadBaton(*mut libc::sem_t);

// SAFETY: semaphores are made for use by several threads.
unsafe impl Send for ThreadBaton {}

impl ThreadBaton {
    fn new() -> ThreadBaton {
        // SAFETY: all zeroes is a valid value, and the semaphore is initialised before any other thread sees it.
        let sem = Box::into_raw(Box::new(unsafe { std::mem::zeroed::<libc::sem_t>() }));
        // SAFETY: the memory is ours and never freed: an abandoned thread waits on for ever.
        unsafe { libc::sem_init(sem, 0, 0) };
        ThreadBaton(sem)
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

struct VirtualThread {
    state: ThreadState,
    baton: ThreadBaton,
    /// The group of the starting thread, until changed.
    group: u64,
    /// The last wait timed out.
    timed_out: bool,
}

/// All threads of a run.
pub(crate) struct VirtualScheduler {
    now: u64,
    dice: u64,
    threads: BTreeMap<u64, VirtualThread>,
    next: u64,
    /// Thread numbers by pthread_t.
    natives: BTreeMap<usize, u64>,
    /// The kernel's number of the thread that ended last, until it is gone.
    ending: Option<libc::pid_t>,
    /// Waiting threads by key, in order.
    queues: BTreeMap<usize, VecDeque<u64>>,
    /// Groups that do not run, and until when.
    paused: BTreeMap<u64, u64>,
    seed: u64,
    trace: u64,
    switches: u64,
    /// When the first thread ended.
    ended: Option<u64>,
    over: bool,
    done: ThreadBaton,
}

struct SchedulerCell(UnsafeCell<Option<VirtualScheduler>>);

// SAFETY: accessed only by the holder of the baton, and by `begin` and `wait_done` while there is no run.
unsafe impl Sync for SchedulerCell {}

static SCHED: SchedulerCell = SchedulerCell(UnsafeCell::new(None));

thread_local! {
    static ME: Cell<u64> = const { Cell::new(0) };
}

/// The number of the calling thread; `None` for other threads.
pub(crate) fn current_thread() -> Option<u64> {
    // `None` too after the thread-local storage was destroyed.
    ME.try_with(Cell::get).ok().filter(|me| *me != 0)
}

/// The scheduler, for the holder of the baton.
pub(crate) fn scheduler() -> &'static mut VirtualScheduler {
    // SAFETY: the caller is a thread of the run (see `current_thread`) and runs, and so holds the baton. No reference is kept
    // over a call that passes the baton on.
    let held = unsafe { &mut *SCHED.0.get() };
    match held {
        Some(sched) => sched,
        None => std::process::abort(),
    }
}

/// A registered thread that has not started yet.
pub(crate) struct StartedThread(u64, ThreadBaton);

impl StartedThread {
    pub fn number(&self) -> u64 {
        self.0
    }

    /// Makes the calling thread this thread; returns with the baton.
    pub fn enter(&self) {
        self.1.take();
        wait_gone();
        ME.set(self.0);
        crate::symbols::on_exit();
    }
}

impl VirtualScheduler {
    /// Starts a run with a first thread, which gets the baton at once.
    pub fn begin(seed: u64) -> StartedThread {
        let mut sched = VirtualScheduler {
            now: 0,
            dice: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            threads: BTreeMap::new(),
            next: 1,
            natives: BTreeMap::new(),
            ending: None,
            queues: BTreeMap::new(),
            paused: BTreeMap::new(),
            seed,
            trace: seed,
            switches: 0,
            ended: None,
            over: false,
            done: ThreadBaton::new(),
        };
        let first = sched.add_thread(0);
        first.1.give();
        // SAFETY: there is no run, so no thread holds the baton; runs are sequential.
        unsafe { *SCHED.0.get() = Some(sched) };
        first
    }

    /// Waits for the end of the run.
    pub fn wait_done() -> RunReport {
        // SAFETY: `done` is written before the run begins and never after.
        let done = unsafe { (*SCHED.0.get()).as_ref().map(|sched| sched.done) };
        done.into_iter().for_each(ThreadBaton::take);
        // SAFETY: the run is over: remaining threads wait for a baton that is never passed.
        let sched = unsafe { (*SCHED.0.get()).take() };
        let Some(sched) = sched else { std::process::abort() };
        let left = sched.threads.into_keys().map(LeftThread).collect();
        RunReport { trace: sched.trace, switches: sched.switches, left }
    }

    /// Registers a new thread, which belongs to the group of thread `parent`.
    pub fn add_thread(&mut self, parent: u64) -> StartedThread {
        let group = self.threads.get(&parent).map_or(0, |parent| parent.group);
        let number = self.next;
        let baton = ThreadBaton::new();
        self.next += 1;
        self.threads.insert(number, VirtualThread { state: ThreadState::Ready, baton, group, timed_out: false });
        StartedThread(number, baton)
    }

    /// Removes a thread that could not be started.
    pub fn remove_thread(&mut self, begun: &StartedThread) {
        self.threads.remove(&begun.0);
    }

    /// Moves a thread to another group.
    pub fn set_group(&mut self, me: u64, group: u64) {
        if let Some(thread) = self.threads.get_mut(&me) {
            thread.group = group;
        }
    }

    /// No thread of the group runs for this many nanoseconds.
    pub fn pause_group(&mut self, group: u64, nanos: u64) {
        self.paused.insert(group, self.now + nanos);
    }

    fn is_ready(&self, thread: &VirtualThread) -> bool {
        thread.state == ThreadState::Ready && !self.paused.contains_key(&thread.group)
    }

    /// When a thread can run; `None` during a wait for a wake-up only.
    fn runs_at(&self, thread: &VirtualThread) -> Option<u64> {
        let at = match thread.state {
            ThreadState::Ready => self.now,
            ThreadState::Waiting { until, .. } => until?,
        };
        Some(self.paused.get(&thread.group).map_or(at, |until| at.max(*until)))
    }

    /// Records a thread's pthread_t.
    pub fn set_native(&mut self, begun_number: u64, native: usize) {
        self.natives.insert(native, begun_number);
    }

    /// xorshift64.
    pub fn draw_random(&mut self) -> u64 {
        self.dice ^= self.dice << 13;
        self.dice ^= self.dice >> 7;
        self.dice ^= self.dice << 17;
        self.dice
    }

    /// Reads the clock, in nanoseconds since the start of the run; true if the thread must yield now.
    pub fn read_clock(&mut self) -> (u64, bool) {
        self.now += LOOK_NS;
        (self.now, self.draw_random().is_multiple_of(PREEMPTION_PERIOD))
    }

    /// The time in nanoseconds since the start of the run.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Chooses the next thread and advances the clock to the wake-up; `None` when the run is over.
    fn choose_next(&mut self) -> Option<u64> {
        loop {
            for thread in self.threads.values_mut() {
                if let ThreadState::Waiting { until: Some(until), .. } = thread.state
                    && until <= self.now
                {
                    thread.state = ThreadState::Ready;
                    thread.timed_out = true;
                }
            }
            let now = self.now;
            self.paused.retain(|_, until| *until > now);
            let ready = self.threads.values().filter(|thread| self.is_ready(thread)).count() as u64;
            if ready > 0 {
                let nth = (self.draw_random() % ready) as usize;
                let mut threads = self.threads.iter().filter(|(_, thread)| self.is_ready(thread));
                return threads.nth(nth).map(|(number, _)| *number);
            }
            match self.threads.values().filter_map(|thread| self.runs_at(thread)).min() {
                Some(_) if self.ended.is_some_and(|at| self.now > at + AFTER_NS) => return None,
                Some(until) => self.now = until,
                None if self.ended.is_some() => return None,
                None => self.report_stuck(),
            }
        }
    }

    /// Reports a deadlock with what each thread waits for, and ends the process.
    fn report_stuck(&self) -> ! {
        let mut text = format!("seed {}: deadlock {} s into the run:\n", self.seed, self.now / 1_000_000_000);
        for (number, thread) in &self.threads {
            text.push_str(&format!("  thread {number}: {:?}\n", thread.state));
        }
        // SAFETY: pointer and length belong to the text. Not std's stderr: a thread may hold the lock there.
        unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        std::process::abort()
    }

    /// Chooses the next thread; returns the baton for another thread than `me`.
    fn pass_baton(&mut self, me: u64) -> Option<ThreadBaton> {
        match self.choose_next() {
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

/// Passes the baton; returns when this thread has it again.
fn switch_thread(me: u64, sched: &mut VirtualScheduler) {
    if let Some(next) = sched.pass_baton(me) {
        let own = sched.threads[&me].baton;
        next.give();
        own.take();
        wait_gone();
    }
}

/// Waits until the thread that passed the baton at its end is gone: it still frees its memory, and the addresses that other threads
/// get must not depend on which thread is first.
fn wait_gone() {
    let Some(ending) = scheduler().ending.take() else { return };
    // SAFETY: the calls have no memory in common with this process; signal 0 only asks whether the thread is there.
    while unsafe { libc::tgkill(libc::getpid(), ending, 0) } == 0 {
        crate::symbols::let_run();
    }
}

/// Lets other threads run.
pub(crate) fn yield_thread(me: u64) {
    switch_thread(me, scheduler());
}

/// Waits for a wake-up `on` a key or for the time `until`; true if woken.
pub(crate) fn wait_on(me: u64, on: Option<usize>, until: Option<u64>) -> bool {
    let sched = scheduler();
    if let Some(on) = on {
        sched.queues.entry(on).or_default().push_back(me);
    }
    if let Some(thread) = sched.threads.get_mut(&me) {
        thread.state = ThreadState::Waiting { on, until };
        thread.timed_out = false;
    }
    switch_thread(me, sched);
    // Fetched anew: other threads held the baton meanwhile.
    let sched = self::scheduler();
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

/// Wakes up to `most` waiters of `on`; returns the number.
pub(crate) fn wake_waiters(sched: &mut VirtualScheduler, on: usize, most: usize) -> usize {
    let mut woken = 0;
    while woken < most {
        let Some(waiter) = sched.queues.get_mut(&on).and_then(VecDeque::pop_front) else { break };
        if let Some(thread) = sched.threads.get_mut(&waiter)
            && matches!(thread.state, ThreadState::Waiting { on: Some(at), .. } if at == on)
        {
            thread.state = ThreadState::Ready;
            woken += 1;
        }
    }
    woken
}

/// Waits for the end of a thread, given the pthread_t.
pub(crate) fn join_thread(me: u64, native: usize) {
    while let Some(number) = scheduler().natives.get(&native).copied()
        && scheduler().threads.contains_key(&number)
    {
        wait_on(me, Some(end_key(number)), None);
    }
}

/// Wake key for the end of a thread: odd and small, so never a futex address.
fn end_key(number: u64) -> usize {
    number as usize * 2 + 1
}

/// The calling thread ends.
pub(crate) fn exit_thread(me: u64) {
    let sched = scheduler();
    sched.threads.remove(&me);
    sched.natives.retain(|_, number| *number != me);
    wake_waiters(sched, end_key(me), usize::MAX);
    if me == 1 {
        sched.ended = Some(sched.now);
    }
    ME.set(0);
    // SAFETY: the call has no arguments.
    sched.ending = Some(unsafe { libc::gettid() });
    if let Some(next) = sched.pass_baton(me) {
        next.give();
    }
}
