//! The requests that the threads of a session have taken, so that a request for a lock can tell whether the end of an open file
//! (RELEASE) is on the way, and so that a request whose program ends can be answered before its thread is done. Knows no locks.
//!
//! The kernel queues RELEASE before close(2) returns, and several threads take requests. So a later request of the same program can be
//! handled first. No RELEASE from before is on the way when all of this holds at the same moment:
//!
//! 1. No request waits in the kernel.
//! 2. A thread that waits for a request sleeps, and so has taken none.
//! 3. Each other thread has decoded its request, which is neither the RELEASE nor a read or write through the file: the kernel
//!    queues RELEASE after the last of these.
//! 4. Fewer reads, writes and closes are served than the kernel hands over at a time: it holds back none.

use crate::abi::InHeader;
use crate::change_request::ChangeRequest;
use crate::request::FuseRequest;
use crate::session::RequestSlot;
use parking_lot::Mutex;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// In place of the handle of a request: the thread waits for a request.
const WAITING_HANDLE: u64 = u64::MAX;
/// The thread has taken a request that is not decoded.
const UNDECODED_HANDLE: u64 = u64::MAX - 1;
/// The request delays no RELEASE.
const NO_HANDLE: u64 = u64::MAX - 2;

/// A thread that serves requests. Only that thread changes the numbers, which have a separate cache line.
#[repr(align(128))]
pub(crate) struct ServingThread {
    /// The thread's file in `/proc`; `None` if that can't be read.
    stat: Option<PathBuf>,
    /// The CPU of the io_uring queue.
    queue: Option<usize>,
    /// The descriptor of /dev/fuse from which the thread takes requests: the kernel takes their answers from no other.
    device: Option<Arc<OwnedFd>>,
    /// The thread joined a queue in which requests may wait: the kernel gives these to other entries.
    joined_late: bool,
    /// Number of requests taken.
    taken: AtomicU64,
    /// The handle of a read, a write or a RELEASE in service, or a constant from above.
    handle: AtomicU64,
    /// The request in service, unless answered before the thread is done.
    request: Mutex<Option<ServedRequest>>,
    /// The request was answered before the thread is done.
    left: Arc<AtomicBool>,
}

/// The process or thread that waits for the answer of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestWaiter {
    /// A program, which can make the same request again.
    Program,
    /// A program, for a change, which would be made twice by a second request.
    Changer,
    /// A program, for a lock.
    LockWaiter,
    /// A process that closes a file. The kernel does the same at the end of a process, and then no signal reports that.
    Closer,
    /// A program, until the request is done: the answer is written into the memory that the kernel reads.
    ProgramUntilDone,
    /// No program.
    Kernel,
}

impl RequestWaiter {
    pub(crate) fn of_request(request: &FuseRequest) -> RequestWaiter {
        match request {
            // Programs wait for pages, and the kernel lets those go that a signal ends.
            FuseRequest::Read { cached: true, .. } => RequestWaiter::ProgramUntilDone,
            FuseRequest::Change(change) => match change {
                ChangeRequest::Fsync { .. } | ChangeRequest::Fsyncdir { .. } => RequestWaiter::Program,
                ChangeRequest::SetLock { .. } | ChangeRequest::TestLock(_) => RequestWaiter::LockWaiter,
                ChangeRequest::Flush { .. } => RequestWaiter::Closer,
                _ => RequestWaiter::Changer,
            },
            FuseRequest::Release { .. }
            | FuseRequest::Releasedir { .. }
            | FuseRequest::Forget { .. }
            | FuseRequest::BatchForget { .. }
            | FuseRequest::Interrupt { .. }
            | FuseRequest::Destroy
            | FuseRequest::Unknown(_) => RequestWaiter::Kernel,
            _ => RequestWaiter::Program,
        }
    }

    /// Whether the request can be answered before its thread is done.
    pub(crate) fn can_leave(self) -> bool {
        !matches!(self, RequestWaiter::ProgramUntilDone | RequestWaiter::Kernel)
    }
}

/// A request in service.
pub(crate) struct ServedRequest {
    pub(crate) unique: u64,
    /// The thread of the program; 0 without a number in this PID namespace.
    pub(crate) pid: u32,
    pub(crate) since: Instant,
    pub(crate) waiter: RequestWaiter,
    /// When a signal of the program was reported.
    pub(crate) interrupted: Option<Instant>,
    /// Another thread is about to answer.
    pub(crate) is_leaving: bool,
    /// The entry of an io_uring queue, where the answer goes.
    pub(crate) entry: Option<RingEntry>,
}

/// An entry of an io_uring queue with a request.
pub(crate) struct RingEntry {
    pub(crate) slot: RequestSlot,
    pub(crate) commit_id: u64,
}

/// The state of a thread at a moment.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ThreadActivity {
    taken: u64,
    handle: u64,
}

impl ServingThread {
    /// Called before the kernel is asked for a request.
    pub(crate) fn note_waiting(&self) {
        self.handle.store(WAITING_HANDLE, Ordering::Release);
    }

    /// Called at once when the kernel has given a request.
    pub(crate) fn note_taken(&self) {
        self.taken.store(self.taken.load(Ordering::Relaxed) + 1, Ordering::Release);
        self.handle.store(UNDECODED_HANDLE, Ordering::Release);
    }

    /// The request is decoded.
    pub(crate) fn note_request(&self, request: &FuseRequest) {
        let handle = match request {
            FuseRequest::Read { fh, .. } | FuseRequest::Release { fh } => *fh,
            FuseRequest::Change(ChangeRequest::Write { fh, .. }) => *fh,
            _ => NO_HANDLE,
        };
        self.handle.store(handle, Ordering::Release);
    }

    /// Begins the service of a request.
    pub(crate) fn begin_request(&self, header: &InHeader, waiter: RequestWaiter, entry: Option<RingEntry>) {
        let InHeader { unique, pid, .. } = *header;
        let since = Instant::now();
        let request = ServedRequest { unique, pid, since, waiter, interrupted: None, is_leaving: false, entry };
        let mut served = self.request.lock();
        self.left.store(false, Ordering::Release);
        *served = Some(request);
    }

    /// Ends the service of a request; `None` if answered meanwhile.
    pub(crate) fn end_request(&self) -> Option<ServedRequest> {
        self.request.lock().take()
    }

    /// The CPU of the io_uring queue.
    pub(crate) fn queue(&self) -> Option<usize> {
        self.queue
    }

    /// The descriptor of /dev/fuse for answers.
    pub(crate) fn device(&self) -> Option<&OwnedFd> {
        self.device.as_deref()
    }

    /// Calls `look` with the request in service.
    pub(crate) fn with_request<T>(&self, look: impl FnOnce(&mut ServedRequest) -> T) -> Option<T> {
        self.request.lock().as_mut().map(look)
    }

    /// Takes request `unique` away from this thread if `answer` is true, so that the thread goes on without the request. The thread does not
    /// end the request meanwhile.
    pub(crate) fn leave_request(
        &self,
        unique: u64,
        answer: impl FnOnce(&ServedRequest) -> bool,
    ) -> Option<ServedRequest> {
        let mut request = self.request.lock();
        let left = request.take_if(|request| request.unique == unique && answer(request))?;
        self.left.store(true, Ordering::Release);
        // The kernel may have queued a RELEASE since.
        self.handle.store(NO_HANDLE, Ordering::Release);
        Some(left)
    }

    fn activity(&self) -> ThreadActivity {
        // In this order: a handle that is newer than the number is seen at the second look.
        let taken = self.taken.load(Ordering::Acquire);
        ThreadActivity { taken, handle: self.handle.load(Ordering::Acquire) }
    }

    /// Whether the thread sleeps in the kernel.
    fn sleeps(&self) -> bool {
        let Some(stat) = self.stat.as_ref().and_then(|stat| fs::read_to_string(stat).ok()) else { return false };
        // The name before the state can contain anything.
        stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with('S'))
    }

    /// Whether a thread that waits would have been given the requests of the queue.
    fn keeps_queue_empty(&self) -> bool {
        !self.joined_late || self.taken.load(Ordering::Acquire) > 0
    }
}

/// The threads of a session.
#[derive(Default)]
pub(crate) struct RequestsUnderWay {
    threads: Mutex<Vec<Arc<ServingThread>>>,
}

impl RequestsUnderWay {
    /// Adds the calling thread, which serves requests of `device`, until the result is dropped.
    pub(crate) fn add_device_thread(&self, device: &Arc<OwnedFd>) -> AddedThread<'_> {
        self.add(None, false, Some(Arc::clone(device)))
    }

    /// Adds the calling thread until the result is dropped.
    pub(crate) fn add_thread(&self, queue: Option<usize>, joined_late: bool) -> AddedThread<'_> {
        self.add(queue, joined_late, None)
    }

    fn add(&self, queue: Option<usize>, joined_late: bool, device: Option<Arc<OwnedFd>>) -> AddedThread<'_> {
        let stat = fs::read_link("/proc/thread-self").ok().map(|thread| Path::new("/proc").join(thread).join("stat"));
        let taken = AtomicU64::new(0);
        let handle = AtomicU64::new(NO_HANDLE);
        let request = Mutex::default();
        let left = Arc::default();
        spurline_sys::set_call_left(&left);
        let thread = Arc::new(ServingThread { stat, queue, device, joined_late, taken, handle, request, left });
        self.threads.lock().push(Arc::clone(&thread));
        AddedThread { under_way: self, thread }
    }

    /// The threads at this moment.
    pub(crate) fn threads(&self) -> Vec<Arc<ServingThread>> {
        self.threads.lock().clone()
    }

    /// Whether no RELEASE of handle `fh` is on the way that the kernel queued before the request of the calling thread. `false`
    /// if that is not certain. `device_is_empty`: whether no request waits in `/dev/fuse`. `background_max`: how many reads,
    /// writes and closes the kernel hands over at a time.
    pub(crate) fn has_no_release(
        &self,
        fh: u64,
        background_max: usize,
        device_is_empty: impl FnOnce() -> bool,
    ) -> bool {
        let threads = self.threads.lock();
        let first: Vec<ThreadActivity> = threads.iter().map(|thread| thread.activity()).collect();
        if first.iter().any(|activity| activity.handle == UNDECODED_HANDLE || activity.handle == fh) {
            return false;
        }
        if first.iter().filter(|activity| activity.handle < NO_HANDLE).count() >= background_max {
            return false;
        }
        if !threads.iter().any(|thread| thread.queue.is_some()) {
            // At this moment. What a thread takes later was queued later.
            return device_is_empty() && are_unchanged(&threads, &first) && sleep_where_waiting(&threads, &first);
        }
        // The kernel gives a request to an entry that waits as soon as there is such an entry. An entry may begin to wait during
        // the look, so others must not have taken a request until the end of the look.
        let all_empty = threads.iter().filter_map(|thread| thread.queue).all(|queue| {
            let mut of_queue = threads.iter().zip(&first).filter(|(thread, _)| thread.queue == Some(queue));
            of_queue.any(|(thread, activity)| activity.handle == WAITING_HANDLE && thread.keeps_queue_empty())
        });
        all_empty && sleep_where_waiting(&threads, &first) && are_unchanged(&threads, &first)
    }
}

fn are_unchanged(threads: &[Arc<ServingThread>], first: &[ThreadActivity]) -> bool {
    threads.iter().zip(first).all(|(thread, activity)| thread.activity() == *activity)
}

/// Whether each thread that waited sleeps, and has taken nothing until then.
fn sleep_where_waiting(threads: &[Arc<ServingThread>], first: &[ThreadActivity]) -> bool {
    let mut waiting = threads.iter().zip(first).filter(|(_, activity)| activity.handle == WAITING_HANDLE);
    waiting.all(|(thread, activity)| thread.sleeps() && thread.activity() == *activity)
}

/// A thread of a session, until the end.
pub(crate) struct AddedThread<'a> {
    under_way: &'a RequestsUnderWay,
    thread: Arc<ServingThread>,
}

impl std::ops::Deref for AddedThread<'_> {
    type Target = ServingThread;
    fn deref(&self) -> &ServingThread {
        &self.thread
    }
}

impl Drop for AddedThread<'_> {
    fn drop(&mut self) {
        self.under_way.threads.lock().retain(|thread| !Arc::ptr_eq(thread, &self.thread));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Write as _};
    use std::time::Duration;

    const FH: u64 = 7;
    const MANY: usize = 64;

    fn eventually(what: &str, mut done: impl FnMut() -> bool) {
        let came = (0..60_000).any(|_| {
            std::thread::sleep(Duration::from_millis(1));
            done()
        });
        assert!(came, "it never came: {what}");
    }

    #[test]
    fn a_thread_that_has_taken_a_request_leaves_it_open_until_it_is_known() {
        let under_way = RequestsUnderWay::default();
        let own = under_way.add_thread(None, false);
        let certain = |background_max| under_way.has_no_release(FH, background_max, || true);
        assert!(certain(MANY));
        assert!(!under_way.has_no_release(FH, MANY, || false), "a request waits in the kernel");
        own.note_taken();
        assert!(!certain(MANY), "it may be the RELEASE");
        let read = FuseRequest::Read { fh: FH, offset: 0, len: 1, cached: false };
        for request in [FuseRequest::Release { fh: FH }, read] {
            own.note_request(&request);
            assert!(!certain(MANY), "{request:?}");
        }
        own.note_request(&FuseRequest::Release { fh: FH + 1 });
        assert!(certain(MANY));
        assert!(!certain(1), "the kernel may hold one back");
        own.note_request(&FuseRequest::Statfs);
        assert!(certain(1));
    }

    #[test]
    fn a_thread_that_waits_has_taken_nothing_only_while_it_sleeps() {
        let under_way = RequestsUnderWay::default();
        let certain = || under_way.has_no_release(FH, MANY, || true);
        let (mut requests, mut kernel) = std::io::pipe().unwrap();
        let (spins, added) = (AtomicBool::new(true), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let own = under_way.add_thread(None, false);
                own.note_waiting();
                added.store(true, Ordering::Release);
                // As a thread that has taken a request and was interrupted before it could say so.
                while spins.load(Ordering::Acquire) {
                    std::hint::spin_loop();
                }
                requests.read_exact(&mut [0]).unwrap();
                own.note_taken();
                requests.read_exact(&mut [0]).unwrap();
            });
            eventually("the thread is there", || added.load(Ordering::Acquire));
            (0..100).for_each(|_| assert!(!certain()));
            spins.store(false, Ordering::Release);
            eventually("it sleeps", certain);
            kernel.write_all(&[0]).unwrap();
            eventually("it has taken a request", || !certain());
            std::thread::sleep(Duration::from_millis(20));
            assert!(!certain(), "it sleeps with a request");
            kernel.write_all(&[0]).unwrap();
        });
        assert!(certain(), "the thread has ended");
    }

    #[test]
    fn each_queue_needs_an_entry_that_waits() {
        let under_way = RequestsUnderWay::default();
        let certain = || under_way.has_no_release(FH, MANY, || panic!("requests do not come over /dev/fuse"));
        let (mut requests, mut kernel) = std::io::pipe().unwrap();
        let own = under_way.add_thread(Some(0), false);
        own.note_request(&FuseRequest::Statfs);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let late = under_way.add_thread(Some(0), true);
                late.note_waiting();
                requests.read_exact(&mut [0]).unwrap();
                late.note_taken();
                late.note_waiting();
                requests.read_exact(&mut [0]).unwrap();
            });
            std::thread::sleep(Duration::from_millis(20));
            assert!(!certain(), "the kernel gives an entry that joined late nothing of what waited before");
            kernel.write_all(&[0]).unwrap();
            eventually("it has served a request, and waits", certain);
            kernel.write_all(&[0]).unwrap();
        });
        assert!(!certain());
    }
}
