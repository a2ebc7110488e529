//! The requests that have waited for long: those of programs that end are answered at once, and the others are counted. The
//! call itself goes on in the thread, without the program. Knows no file system.
//!
//! The kernel keeps a process that a signal ends until the request is answered. FUSE_INTERRUPT reports such a signal, over
//! /dev/fuse also for requests over io_uring, once for each request: of a signal with a handler that comes first, and then not
//! of SIGKILL. So the signals that a program has pending are read, at the report and from time to time.

use crate::abi::InHeader;
use crate::caller_fate::CallerFate;
use crate::dev;
use crate::reply::{DirectReply, ReplyReceipt, send_reply};
use crate::request::FuseRequest;
use crate::ring;
use crate::session::SessionShared;
use crate::under_way::{RequestWaiter, ServedRequest, ServingThread};
use parking_lot::{Condvar, Mutex};
use spurline_fs::FileService;
use std::os::fd::AsFd as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

/// Pause between two looks at the requests in service.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// The same while a program got a signal, or may close its files after that.
const SIGNAL_PAUSE: Duration = Duration::from_millis(100);
/// The same after a program was found to have ended: others that end with it wait for its name or directory, in turn.
const SERIES_PAUSE: Duration = Duration::from_millis(20);
/// For so long after that.
const SERIES_TIME: Duration = Duration::from_secs(2);
/// A request that has waited for longer is counted.
const COUNTED_AFTER: Duration = Duration::from_secs(3);
/// Time after a signal for a program whose signals can't be read.
const UNSEEN_PATIENCE: Duration = Duration::from_secs(5);
/// Limit of requests that go on without a program: each has a thread.
const LEFT_MAX: usize = 256;

/// Wakes the thread that looks at the requests of a session.
#[derive(Default)]
pub(crate) struct RequestWatch {
    woken: Mutex<bool>,
    wake: Condvar,
    /// When the program of a request was last found to have ended.
    program_ended: Mutex<Option<Instant>>,
}

impl RequestWatch {
    fn sleep(&self, pause: Duration) {
        let mut woken = self.woken.lock();
        if !*woken {
            self.wake.wait_for(&mut woken, pause);
        }
        *woken = false;
    }

    fn is_in_series(&self, now: Instant) -> bool {
        self.program_ended.lock().is_some_and(|at| now.saturating_duration_since(at) < SERIES_TIME)
    }

    fn wake_up(&self) {
        *self.woken.lock() = true;
        self.wake.notify_one();
    }
}

/// Starts the thread that looks at the requests of a session, until the session ends.
pub(crate) fn start_watch<S: FileService>(shared: &Arc<SessionShared<S>>) {
    let watch = Arc::clone(&shared.watch);
    let session = Arc::downgrade(shared);
    if let Err(error) = thread::Builder::new().name("fuse-watch".into()).spawn(move || watch_requests(&watch, &session))
    {
        tracing::warn!("programs that are killed wait for their requests: no thread: {error}");
    }
}

fn watch_requests<S: FileService>(watch: &RequestWatch, session: &Weak<SessionShared<S>>) {
    let mut pause = LOOK_PAUSE;
    loop {
        watch.sleep(pause);
        let Some(shared) = session.upgrade() else { return };
        pause = shared.look_at_requests();
    }
}

/// What is known of a request that has no answer yet.
#[derive(Clone, Copy)]
struct WaitingRequest {
    unique: u64,
    pid: u32,
    waiter: RequestWaiter,
    waited: Duration,
    /// The time since a signal of the program.
    signalled: Option<Duration>,
}

impl WaitingRequest {
    fn of_request(request: &ServedRequest, now: Instant) -> Option<WaitingRequest> {
        let since = |at: Instant| now.saturating_duration_since(at);
        let ServedRequest { unique, pid, waiter, .. } = *request;
        let signalled = request.interrupted.map(since);
        (!request.is_leaving).then(|| WaitingRequest { unique, pid, waiter, waited: since(request.since), signalled })
    }

    /// Whether the program does not wait for the answer any more. Signals that came before the request are not reported.
    fn has_ended(&self, is_in_series: bool) -> bool {
        let unreported_after = match self.waiter {
            _ if is_in_series => SERIES_PAUSE,
            RequestWaiter::Closer => SIGNAL_PAUSE,
            _ => LOOK_PAUSE,
        };
        if !self.waiter.can_leave() || (self.signalled.is_none() && self.waited < unreported_after) {
            return false;
        }
        // A program that goes on may make the same request again.
        let is_repeatable = self.waiter == RequestWaiter::Program;
        match CallerFate::of_thread(self.pid) {
            CallerFate::Ends => true,
            CallerFate::Interrupted => is_repeatable,
            CallerFate::Unseen => is_repeatable && self.signalled.is_some_and(|signalled| signalled >= UNSEEN_PATIENCE),
            CallerFate::GoesOn => false,
        }
    }

    /// Whether a program waits for the source.
    fn is_counted(&self) -> bool {
        !matches!(self.waiter, RequestWaiter::Kernel | RequestWaiter::LockWaiter) && self.waited >= COUNTED_AFTER
    }
}

impl<S: FileService> SessionShared<S> {
    /// The program of request `unique` got a signal.
    pub(crate) fn note_interrupt(&self, unique: u64) {
        let now = Instant::now();
        for thread in self.under_way.threads() {
            thread.with_request(|request| {
                if request.unique == unique {
                    request.interrupted = Some(now);
                }
            });
        }
        self.watch.wake_up();
    }

    /// Counts the requests that wait for long, and answers those of programs that end. Returns the pause before the next look.
    fn look_at_requests(self: &Arc<Self>) -> Duration {
        let now = Instant::now();
        let is_in_series = self.watch.is_in_series(now);
        let mut is_signalled = false;
        let mut counted = 0;
        let mut longest = Duration::ZERO;
        for thread in self.under_way.threads() {
            let looked_at = thread.with_request(|request| WaitingRequest::of_request(request, now));
            let Some(waiting) = looked_at.flatten() else { continue };
            let has_ended = waiting.has_ended(is_in_series);
            if has_ended {
                *self.watch.program_ended.lock() = Some(now);
                self.answer_early(&thread, waiting.unique);
            }
            is_signalled |= has_ended || waiting.waiter == RequestWaiter::Closer;
            is_signalled |= waiting.signalled.is_some() && waiting.waiter.can_leave();
            if waiting.is_counted() {
                counted += 1;
                longest = longest.max(waiting.waited);
            }
        }
        let stats = &self.config.stats.fuse;
        stats.waiting_ops.set(counted);
        stats.longest_wait_seconds.set(longest.as_secs());
        if self.watch.is_in_series(now) {
            SERIES_PAUSE
        } else if is_signalled {
            SIGNAL_PAUSE
        } else {
            LOOK_PAUSE
        }
    }

    /// Answers request `unique` of `thread`, which goes on with the call.
    fn answer_early(self: &Arc<Self>, thread: &Arc<ServingThread>, unique: u64) {
        if self.left_requests.load(Ordering::Acquire) >= LEFT_MAX {
            tracing::debug!("{LEFT_MAX} requests of programs that have ended are under way already");
            return;
        }
        if let Some(device) = thread.device() {
            let reply = DirectReply { device: device.as_fd(), unique };
            let left = self.leave_request(thread, unique, |_| send_reply(reply, libc::EINTR, &[]));
            // The limit of threads has just grown.
            if left.is_some() && self.dev_idle.load(Ordering::Acquire) == 0 {
                dev::grow_threads(self);
            }
        } else if let Some(cpu) = thread.queue() {
            let is_ours = thread.with_request(|request| {
                request.is_leaving = request.unique == unique && request.entry.is_some();
                request.is_leaving
            });
            if is_ours == Some(true)
                && let Err(error) = ring::take_entry_over(self, thread, cpu, unique)
            {
                tracing::warn!("no thread for the answer to a program that ends: {error}");
                thread.with_request(|request| request.is_leaving = false);
            }
        }
    }

    /// Takes a request away from a thread: see [`ServingThread::leave_request`].
    pub(crate) fn leave_request(
        &self,
        thread: &ServingThread,
        unique: u64,
        answer: impl FnOnce(&ServedRequest) -> bool,
    ) -> Option<ServedRequest> {
        self.left_requests.fetch_add(1, Ordering::AcqRel);
        let left = thread.leave_request(unique, answer);
        match &left {
            // An unmount waits for changes only.
            Some(request) if request.waiter == RequestWaiter::Program => self.thread_ended(),
            Some(_) => {}
            None => {
                self.left_requests.fetch_sub(1, Ordering::AcqRel);
            }
        }
        left
    }

    /// The call of a request that was answered before is done. `payload` has the reply that was not sent.
    pub(crate) fn request_done_later(
        &self,
        header: &InHeader,
        request: FuseRequest,
        reply: Option<ReplyReceipt>,
        payload: &[u8],
    ) {
        self.left_requests.fetch_sub(1, Ordering::AcqRel);
        if RequestWaiter::of_request(&request) == RequestWaiter::Program {
            self.thread_returned();
        }
        if let Some(reply) = reply {
            self.dispatcher.take_back(header, request, &reply, payload);
        }
    }
}
