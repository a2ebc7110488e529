//! The completion queues of one queue pair and the channel that tells of them: one queue for receives, one for what
//! was sent, so that acknowledgements wake nobody who waits for the peer. It knows no memory.

use crate::device::Context;
use crate::error::VerbsError;
use crate::sys;
use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// There may be a completion.
    Completion,
    /// There may be an event of the connection.
    Event,
    /// There will be no completion: the device was taken away.
    Lost,
    /// The deadline passed.
    Deadline,
}

/// Which of the two queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Receive = 0,
    Send = 1,
}

/// The most completions taken by one call.
pub(crate) const BATCH: usize = 8;

/// A completion channel with its two completion queues.
pub struct CompletionQueue {
    context: Arc<Context>,
    channel: *mut sys::CompChannel,
    queues: [*mut sys::Cq; 2],
    /// Which of them were asked for an event that was not taken yet. So an event is either still to come or waits in the
    /// descriptor, and neither asking again nor looking for more is needed: each is a system call.
    armed: [Cell<bool>; 2],
}

// SAFETY: libibverbs locks its queues itself.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    /// Queues for `receives` and `sends` completions, on a completion vector chosen by `spread`.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the device has no more, or the limit of locked memory is reached.
    pub fn new(context: &Arc<Context>, receives: u32, sends: u32, spread: u32) -> Result<Self, VerbsError> {
        let ib = &context.verbs().ib;
        // SAFETY: the context is open.
        let channel = unsafe { (ib.ibv_create_comp_channel)(context.raw()) };
        if channel.is_null() {
            return Err(VerbsError::last("ibv_create_comp_channel", context.name()));
        }
        let mut made = CompletionQueue {
            context: Arc::clone(context),
            channel,
            queues: [std::ptr::null_mut(); 2],
            armed: Default::default(),
        };
        let fd = made.raw_fd();
        // SAFETY: the channel's own descriptor.
        if unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return Err(VerbsError::last("fcntl", context.name()));
        }
        let vector = (spread % context.completion_vectors()).cast_signed();
        for (side, entries) in [(Side::Receive, receives), (Side::Send, sends)] {
            let entries = i32::try_from(entries.max(1)).unwrap_or(i32::MAX);
            // SAFETY: context and channel are open.
            let queue = unsafe { (ib.ibv_create_cq)(context.raw(), entries, std::ptr::null_mut(), channel, vector) };
            if queue.is_null() {
                return Err(VerbsError::last("ibv_create_cq", format!("{} ({entries} entries)", context.name())));
            }
            made.queues[side as usize] = queue;
        }
        Ok(made)
    }

    /// The device.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self, side: Side) -> *mut sys::Cq {
        self.queues[side as usize]
    }

    fn raw_fd(&self) -> i32 {
        // SAFETY: the channel is open.
        unsafe { (*self.channel).fd }
    }

    /// Becomes readable when an armed queue has a completion.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and stays open as long as it.
        unsafe { BorrowedFd::borrow_raw(self.raw_fd()) }
    }

    /// Takes up to [`BATCH`] completions.
    pub(crate) fn poll(&self, side: Side, out: &mut [sys::WorkCompletion; BATCH]) -> Result<usize, VerbsError> {
        let queue = self.raw(side);
        // SAFETY: the queue is open; its operations do not change after the device was opened.
        let poll = unsafe { (*(*queue).context).ops.poll_cq };
        let Some(poll) = poll else { return Err(VerbsError::Misuse("the driver has no poll_cq".into())) };
        // SAFETY: `out` has room for as many as are asked for.
        let n = unsafe { poll(queue, BATCH as i32, out.as_mut_ptr()) };
        usize::try_from(n).map_err(|_| VerbsError::last("ibv_poll_cq", self.context.name()))
    }

    /// Asks for an event with the next completion. What completed before has to be polled for afterwards.
    pub(crate) fn arm(&self, side: Side) -> Result<(), VerbsError> {
        let armed = &self.armed[side as usize];
        if armed.get() {
            return Ok(());
        }
        let queue = self.raw(side);
        // SAFETY: as in `poll`.
        let notify = unsafe { (*(*queue).context).ops.req_notify_cq };
        let Some(notify) = notify else { return Err(VerbsError::Misuse("the driver has no req_notify_cq".into())) };
        // SAFETY: the queue is open.
        match unsafe { notify(queue, 0) } {
            0 => {
                armed.set(true);
                Ok(())
            }
            failed => Err(VerbsError::returned("ibv_req_notify_cq", self.context.name(), failed)),
        }
    }

    /// Takes the event of one armed queue, if it has come. That of the other keeps the descriptor readable. Says whether
    /// all is as it should be: one was taken, or none was asked for.
    pub(crate) fn drain(&self) -> bool {
        if !self.armed.iter().any(Cell::get) {
            return true;
        }
        let ib = &self.context.verbs().ib;
        let mut queue = std::ptr::null_mut();
        let mut cookie = std::ptr::null_mut();
        // SAFETY: the channel is open and does not block.
        if unsafe { (ib.ibv_get_cq_event)(self.channel, &mut queue, &mut cookie) } != 0 {
            return false;
        }
        // SAFETY: the event just taken, of a queue of this channel.
        unsafe { (ib.ibv_ack_cq_events)(queue, 1) };
        for (own, armed) in self.queues.iter().zip(&self.armed) {
            if *own == queue {
                armed.set(false);
            }
        }
        true
    }

    /// Whether the device was taken away: its descriptors then say that there is something, and there never is.
    pub(crate) fn is_lost(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid entry.
        unsafe { libc::poll(&mut fd, 1, 0) > 0 && over(fd.revents) }
    }

    /// Sleeps until an armed queue has a completion, `events` is readable, or `deadline`.
    pub(crate) fn sleep(&self, events: Option<i32>, deadline: Instant) -> Wake {
        let mut fds = [
            libc::pollfd { fd: self.raw_fd(), events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: events.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
        ];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Wake::Deadline;
            }
            // SAFETY: two valid entries; a negative descriptor is left out by the kernel.
            let n = unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &timespec(left), std::ptr::null()) };
            if n > 0 {
                if over(fds[0].revents) {
                    return Wake::Lost;
                }
                if fds[0].revents != 0 {
                    self.drain();
                    return Wake::Completion;
                }
                return Wake::Event;
            }
        }
    }
}

/// Whether a descriptor reports its end, with nothing left to be read.
fn over(revents: libc::c_short) -> bool {
    revents & libc::POLLIN == 0 && revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
}

pub(crate) fn timespec(left: Duration) -> libc::timespec {
    // An hour at most, so that no clock arithmetic of the kernel can overflow.
    let left = left.min(Duration::from_secs(3600));
    libc::timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let ib = &self.context.verbs().ib;
        for queue in self.queues {
            if !queue.is_null() {
                // SAFETY: no queue pair uses it any more, and every event taken was acknowledged.
                unsafe { (ib.ibv_destroy_cq)(queue) };
            }
        }
        // SAFETY: its queues are gone.
        unsafe { (ib.ibv_destroy_comp_channel)(self.channel) };
    }
}
