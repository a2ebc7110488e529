//! The completion queues of a queue pair and the channel of both: a queue for receives and a queue for sends, so that
//! acknowledgements do not wake a thread that waits for the peer. Knows no memory.

use crate::device::DeviceContext;
use crate::error::VerbsError;
use crate::sys;
use std::cell::Cell;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WakeReason {
    /// There may be a completion.
    Completion,
    /// There may be a connection event.
    Event,
    /// There will be no completion: the device was removed.
    Lost,
    /// The deadline passed.
    Deadline,
}

/// Which of the two queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QueueSide {
    Receive = 0,
    Send = 1,
}

/// Maximum of completions taken by a call.
pub(crate) const BATCH: usize = 8;

/// A completion channel with two completion queues.
pub struct CompletionQueue {
    context: Arc<DeviceContext>,
    channel: *mut sys::IbvCompChannel,
    queues: [*mut sys::IbvCq; 2],
    /// Which queues are armed and have not delivered an event. The event is then either still to come or waits in the descriptor,
    /// so neither arming again nor polling the descriptor is needed: each is a system call.
    armed: [Cell<bool>; 2],
}

// SAFETY: libibverbs locks the queues.
unsafe impl Send for CompletionQueue {}

impl CompletionQueue {
    /// Queues for `receives` and `sends` completions, on a completion vector chosen by `spread`.
    ///
    /// # Errors
    /// [`VerbsError::Call`] when the device has no more, or the limit of locked memory is reached.
    pub fn new(context: &Arc<DeviceContext>, receives: u32, sends: u32, spread: u32) -> Result<Self, VerbsError> {
        let ib = &context.verbs().ib;
        // SAFETY: the context is open.
        let channel = unsafe { (ib.ibv_create_comp_channel)(context.raw()) };
        if channel.is_null() {
            return Err(VerbsError::last_os("ibv_create_comp_channel", context.name()));
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
            return Err(VerbsError::last_os("fcntl", context.name()));
        }
        let vector = (spread % context.completion_vectors()).cast_signed();
        for (side, entries) in [(QueueSide::Receive, receives), (QueueSide::Send, sends)] {
            let entries = i32::try_from(entries.max(1)).unwrap_or(i32::MAX);
            // SAFETY: context and channel are open.
            let queue = unsafe { (ib.ibv_create_cq)(context.raw(), entries, std::ptr::null_mut(), channel, vector) };
            if queue.is_null() {
                return Err(VerbsError::last_os("ibv_create_cq", format!("{} ({entries} entries)", context.name())));
            }
            made.queues[side as usize] = queue;
        }
        Ok(made)
    }

    /// The device.
    pub fn context(&self) -> &Arc<DeviceContext> {
        &self.context
    }

    pub(crate) fn raw(&self, side: QueueSide) -> *mut sys::IbvCq {
        self.queues[side as usize]
    }

    fn raw_fd(&self) -> i32 {
        // SAFETY: the channel is open.
        unsafe { (*self.channel).fd }
    }

    /// Becomes readable when an armed queue has a completion.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is the channel's and stays open as long as the channel.
        unsafe { BorrowedFd::borrow_raw(self.raw_fd()) }
    }

    /// Takes up to [`BATCH`] completions.
    pub(crate) fn poll_side(&self, side: QueueSide, out: &mut [sys::IbvWc; BATCH]) -> Result<usize, VerbsError> {
        let queue = self.raw(side);
        // SAFETY: the queue is open; the operations do not change after the device was opened.
        let poll = unsafe { (*(*queue).context).ops.poll_cq };
        let Some(poll) = poll else { return Err(VerbsError::Misuse("the driver has no poll_cq".into())) };
        // SAFETY: `out` has room for as many as requested.
        let n = unsafe { poll(queue, BATCH as i32, out.as_mut_ptr()) };
        usize::try_from(n).map_err(|_| VerbsError::last_os("ibv_poll_cq", self.context.name()))
    }

    /// Requests an event for the next completion. Earlier completions must be polled for afterwards.
    pub(crate) fn arm_side(&self, side: QueueSide) -> Result<(), VerbsError> {
        let armed = &self.armed[side as usize];
        if armed.get() {
            return Ok(());
        }
        let queue = self.raw(side);
        // SAFETY: as in `poll_side`.
        let notify = unsafe { (*(*queue).context).ops.req_notify_cq };
        let Some(notify) = notify else { return Err(VerbsError::Misuse("the driver has no req_notify_cq".into())) };
        // SAFETY: the queue is open.
        match unsafe { notify(queue, 0) } {
            0 => {
                armed.set(true);
                Ok(())
            }
            failed => Err(VerbsError::from_return("ibv_req_notify_cq", self.context.name(), failed)),
        }
    }

    /// Takes the event of an armed queue, if any; an event of the other keeps the descriptor readable. Returns false when a queue
    /// is armed and no event is available.
    pub(crate) fn drain_event(&self) -> bool {
        if !self.armed.iter().any(Cell::get) {
            return true;
        }
        let ib = &self.context.verbs().ib;
        let mut queue = std::ptr::null_mut();
        let mut cookie = std::ptr::null_mut();
        // SAFETY: the channel is open and non-blocking.
        if unsafe { (ib.ibv_get_cq_event)(self.channel, &mut queue, &mut cookie) } != 0 {
            return false;
        }
        // SAFETY: acknowledges the event just taken, of a queue of this channel.
        unsafe { (ib.ibv_ack_cq_events)(queue, 1) };
        for (own, armed) in self.queues.iter().zip(&self.armed) {
            if *own == queue {
                armed.set(false);
            }
        }
        true
    }

    /// Whether the device was removed: the descriptors then stay readable without any event.
    pub(crate) fn is_lost(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: a valid entry.
        unsafe { libc::poll(&mut fd, 1, 0) > 0 && is_ended(fd.revents) }
    }

    /// Sleeps until an armed queue has a completion, `events` is readable, or `deadline`.
    pub(crate) fn wait_event(&self, events: Option<i32>, deadline: Instant) -> WakeReason {
        let mut fds = [
            libc::pollfd { fd: self.raw_fd(), events: libc::POLLIN, revents: 0 },
            libc::pollfd { fd: events.unwrap_or(-1), events: libc::POLLIN, revents: 0 },
        ];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return WakeReason::Deadline;
            }
            // SAFETY: two valid entries; the kernel ignores a negative descriptor.
            let n = unsafe { libc::ppoll(fds.as_mut_ptr(), 2, &to_timespec(left), std::ptr::null()) };
            if n > 0 {
                if is_ended(fds[0].revents) {
                    return WakeReason::Lost;
                }
                if fds[0].revents != 0 {
                    self.drain_event();
                    return WakeReason::Completion;
                }
                return WakeReason::Event;
            }
        }
    }
}

/// Whether a descriptor reports the end, with nothing left to read.
fn is_ended(revents: libc::c_short) -> bool {
    revents & libc::POLLIN == 0 && revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0
}

pub(crate) fn to_timespec(left: Duration) -> libc::timespec {
    // Limited to an hour, so that no clock arithmetic in the kernel can overflow.
    let left = left.min(Duration::from_secs(3600));
    libc::timespec { tv_sec: left.as_secs().cast_signed(), tv_nsec: i64::from(left.subsec_nanos()) }
}

impl Drop for CompletionQueue {
    fn drop(&mut self) {
        let ib = &self.context.verbs().ib;
        for queue in self.queues {
            if !queue.is_null() {
                // SAFETY: no queue pair uses the queue any more, and every event taken was acknowledged.
                unsafe { (ib.ibv_destroy_cq)(queue) };
            }
        }
        // SAFETY: the queues are gone.
        unsafe { (ib.ibv_destroy_comp_channel)(self.channel) };
    }
}
