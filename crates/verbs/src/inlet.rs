//! A receive queue that the queue pairs of many connections share: one look finds what came on any of them, and one event
//! tells of all that came since it was asked for. It knows no message and no thread.
//!
//! Who is told of something by [`Inlet::next`] has that connection until [`Inlet::done`] says that nothing more came.
//! Anybody may look at any time: what is found for others waits for them here. The event, too, is only taken by
//! [`Inlet::arm`], so whoever calls that last knows of everything that came before it.

use crate::device::Context;
use crate::error::VerbsError;
use crate::polling::{Pace, Polling};
use crate::queue::{BATCH, CompletionQueue, Side, Wake, sleep};
use crate::sys;
use parking_lot::{Condvar, Mutex};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shortest and the longest that one who waits here sleeps before it looks itself.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(10));

/// A receive queue shared by queue pairs of one device.
pub struct Inlet {
    context: Arc<Context>,
    fd: i32,
    /// Completions that fit.
    entries: u32,
    processors: usize,
    state: Mutex<State>,
    /// Something came for one that is being worked on.
    more: Condvar,
}

struct State {
    queue: CompletionQueue,
    members: BTreeMap<u32, Member>,
    /// Those that something came for and nobody works on.
    ready: VecDeque<u32>,
    /// Receives that all members together may have posted.
    promised: u32,
    batch: [sys::WorkCompletion; BATCH],
    pace: Pace,
}

struct Member {
    receives: u32,
    arrived: VecDeque<sys::WorkCompletion>,
    /// It is among those ready, or somebody works on it.
    held: bool,
}

impl Inlet {
    /// A queue on `context` for queue pairs with at most `receives` posted receives in all, fewer where the device has no
    /// more, on a completion vector chosen by `spread`.
    ///
    /// # Errors
    /// As [`CompletionQueue::new`].
    pub fn new(context: &Arc<Context>, receives: u32, spread: u32) -> Result<Arc<Self>, VerbsError> {
        let entries = receives.min(context.limits()?.completions).max(1);
        let queue = CompletionQueue::for_receives(context, entries, spread)?;
        let fd = queue.raw_fd();
        let state = State {
            queue,
            members: BTreeMap::new(),
            ready: VecDeque::new(),
            promised: 0,
            batch: [sys::WorkCompletion::default(); BATCH],
            pace: Pace::new(),
        };
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let (context, state) = (Arc::clone(context), Mutex::new(state));
        Ok(Arc::new(Inlet { context, fd, entries, processors, state, more: Condvar::new() }))
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Becomes readable with an arrival after [`Inlet::arm`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the queue's and stays open as long as it, which is as long as this value.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Whether a queue pair with so many receives fits.
    pub fn has_room(&self, receives: u32) -> bool {
        self.state.lock().promised + receives <= self.entries
    }

    /// Queue pairs that share it.
    pub fn members(&self) -> usize {
        self.state.lock().members.len()
    }

    /// The next queue pair that something came for, to be worked on until it is `done` or the caller says so by
    /// [`Inlet::done`]. One that more came for meanwhile has its turn after the others.
    ///
    /// # Errors
    /// When the device gives no completions any more.
    pub fn next(&self, done: Option<u32>) -> Result<Option<u32>, VerbsError> {
        let mut state = self.state.lock();
        if let Some(number) = done
            && !state.done(number)
        {
            state.ready.push_back(number);
        }
        if state.ready.is_empty() {
            state.gather(&self.more)?;
        }
        Ok(state.ready.pop_front())
    }

    /// The same, looking for a moment where that was worth it lately and a processor is left over.
    ///
    /// # Errors
    /// As [`Inlet::next`].
    pub fn next_soon(&self) -> Result<Option<u32>, VerbsError> {
        let Some(limit) = self.state.lock().pace.next() else { return Ok(None) };
        let Some(_polling) = Polling::begin(self.processors) else { return Ok(None) };
        let begun = Instant::now();
        let mut looks = 0u32;
        let (found, took) = loop {
            if let Some(number) = self.next(None)? {
                break (Some(number), Some(begun.elapsed()));
            }
            looks = looks.wrapping_add(1);
            if Polling::pause(looks) && begun.elapsed() > limit {
                break (None, None);
            }
        };
        self.state.lock().pace.learn(took);
        Ok(found)
    }

    /// Says that all was taken that had come for this queue pair; answers `false` when more came meanwhile, so that it has to
    /// be worked on further.
    pub fn done(&self, number: u32) -> bool {
        self.state.lock().done(number)
    }

    /// Asks for the descriptor to become readable with the next arrival; says whether something is there already, of which
    /// the descriptor may say nothing.
    ///
    /// # Errors
    /// When the device gives no events any more.
    pub fn arm(&self) -> Result<bool, VerbsError> {
        let mut state = self.state.lock();
        state.queue.drain();
        state.queue.arm(Side::Receive)?;
        if state.ready.is_empty() {
            state.gather(&self.more)?;
        }
        Ok(!state.ready.is_empty())
    }

    /// Sleeps until the descriptor is readable, or `deadline`; says which.
    pub fn sleep(&self, deadline: Instant) -> bool {
        sleep(self.fd, None, deadline) != Wake::Deadline
    }

    pub(crate) fn raw(&self) -> *mut sys::Cq {
        self.state.lock().queue.raw(Side::Receive)
    }

    /// Takes in a queue pair that is to be known as `number`, and whose receives carry that in the upper half of theirs.
    pub(crate) fn join(&self, number: u32, receives: u32) -> Result<(), VerbsError> {
        let mut state = self.state.lock();
        if state.members.contains_key(&number) || state.promised + receives > self.entries {
            return Err(VerbsError::Misuse(format!(
                "{number} and its {receives} receives do not fit in a shared queue"
            )));
        }
        state.promised += receives;
        state.members.insert(number, Member { receives, arrived: VecDeque::new(), held: false });
        Ok(())
    }

    /// Lets one go that is destroyed: what it left in the queue is taken out first, so that the others' has room.
    pub(crate) fn leave(&self, number: u32) {
        let mut state = self.state.lock();
        // A device that is gone gives none; then nothing else comes either.
        let _ = state.gather(&self.more);
        if let Some(member) = state.members.remove(&number) {
            state.promised -= member.receives;
            state.ready.retain(|ready| *ready != number);
        }
    }

    /// Moves what came for one to `to`.
    pub(crate) fn take(&self, number: u32, to: &mut VecDeque<sys::WorkCompletion>) -> Result<(), VerbsError> {
        let mut state = self.state.lock();
        if state.move_to(number, to) {
            return Ok(());
        }
        let gathered = state.gather(&self.more);
        if state.move_to(number, to) { Ok(()) } else { gathered }
    }

    /// Sleeps until something may have come for one that is being worked on, or `deadline`. Others may be looking or
    /// nobody, so after ever longer pauses it is looked at here.
    pub(crate) fn wait(
        &self,
        number: u32,
        to: &mut VecDeque<sys::WorkCompletion>,
        deadline: Instant,
    ) -> Result<bool, VerbsError> {
        let mut pause = LOOK_AGAIN.0;
        loop {
            self.take(number, to)?;
            if !to.is_empty() {
                return Ok(true);
            }
            let now = Instant::now();
            if now >= deadline {
                return Ok(false);
            }
            let mut state = self.state.lock();
            if state.members.get(&number).is_none_or(|member| member.arrived.is_empty()) {
                self.more.wait_until(&mut state, deadline.min(now + pause));
            }
            pause = (pause * 2).min(LOOK_AGAIN.1);
        }
    }
}

impl State {
    fn move_to(&mut self, number: u32, to: &mut VecDeque<sys::WorkCompletion>) -> bool {
        match self.members.get_mut(&number) {
            Some(member) if !member.arrived.is_empty() => to.append(&mut member.arrived),
            _ => return false,
        }
        true
    }

    fn done(&mut self, number: u32) -> bool {
        let Some(member) = self.members.get_mut(&number) else { return true };
        member.held = !member.arrived.is_empty();
        !member.held
    }

    /// Takes all completions there are to those they are for.
    fn gather(&mut self, more: &Condvar) -> Result<(), VerbsError> {
        loop {
            let n = self.queue.poll(Side::Receive, &mut self.batch)?;
            for wc in &mut self.batch[..n] {
                let number = (wc.wr_id >> 32) as u32;
                wc.wr_id &= u64::from(u32::MAX);
                // What is for none was left behind by one that is gone.
                let Some(member) = self.members.get_mut(&number) else { continue };
                member.arrived.push_back(*wc);
                if std::mem::replace(&mut member.held, true) {
                    more.notify_all();
                } else {
                    self.ready.push_back(number);
                }
            }
            if n < BATCH {
                return Ok(());
            }
        }
    }
}
