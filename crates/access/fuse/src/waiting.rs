//! Requests that wait for other requests, as a lock waits for a release: meanwhile another slot takes the place, so that the
//! session always has a slot for the request that ends the wait. Does not know the cause of waits.

use crate::dev;
use crate::errno::Errno;
use crate::ring;
use crate::session::SessionShared;
use parking_lot::Mutex;
use spurline_fs::FileService;
use std::cell::Cell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Limit of waiting requests: each has a thread and a slot.
const WAITS_MAX: usize = 512;
/// Slots of each io_uring queue that do not wait, when a wait begins. The kernel gives a queued request only to an entry that
/// replies to another.
const UNBLOCKED_SLOTS: usize = 2;

thread_local! {
    /// The CPU whose io_uring queue this thread serves.
    static QUEUE_CPU: Cell<Option<usize>> = const { Cell::new(None) };
}

/// This thread serves the queue of `cpu`.
pub(crate) fn serve_queue_of(cpu: usize) {
    QUEUE_CPU.set(Some(cpu));
}

/// The waits of a session.
#[derive(Default)]
pub(crate) struct SlotWaits {
    waiting: AtomicUsize,
    queues: Mutex<HashMap<usize, QueueWaits>>,
}

#[derive(Default)]
struct QueueWaits {
    waiting: usize,
    spare: usize,
}

impl SlotWaits {
    /// The number of requests that wait.
    pub fn count(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }
}

trait ReplaceSlot: Send + Sync {
    fn begin(&self, queue: Option<usize>) -> Result<(), Errno>;
    fn end(&self, queue: Option<usize>);
    fn has_no_release(&self, fh: u64) -> bool;
}

/// Begins waits of a session. Cheap to clone.
#[derive(Clone)]
pub(crate) struct WaitingSlots(Arc<dyn ReplaceSlot>);

impl WaitingSlots {
    pub(crate) fn new<S: FileService>(session: &Arc<SessionShared<S>>) -> WaitingSlots {
        WaitingSlots(Arc::new(SessionSlots(Arc::downgrade(session))))
    }

    /// The request of this thread is about to wait for other requests. Dropping the result ends that, on the same thread.
    ///
    /// # Errors
    /// ENOLCK when too many wait, or there is no thread or memory for another slot.
    pub(crate) fn begin_wait(&self) -> Result<WaitingSlot, Errno> {
        let queue = QUEUE_CPU.get();
        self.0.begin(queue)?;
        Ok(WaitingSlot { slots: self.clone(), queue })
    }

    /// Whether it is certain that no RELEASE of handle `fh` is on the way that the kernel queued before the request of this
    /// thread.
    pub(crate) fn has_no_release(&self, fh: u64) -> bool {
        self.0.has_no_release(fh)
    }
}

/// A request that waits.
pub(crate) struct WaitingSlot {
    slots: WaitingSlots,
    queue: Option<usize>,
}

impl Drop for WaitingSlot {
    fn drop(&mut self) {
        self.slots.0.end(self.queue);
    }
}

struct SessionSlots<S>(Weak<SessionShared<S>>);

impl<S: FileService> ReplaceSlot for SessionSlots<S> {
    fn begin(&self, queue: Option<usize>) -> Result<(), Errno> {
        const ENOLCK: Errno = Errno(libc::ENOLCK);
        let Some(shared) = self.0.upgrade() else { return Err(Errno(libc::EINTR)) };
        let waits = &shared.waits;
        if waits.waiting.fetch_add(1, Ordering::AcqRel) >= WAITS_MAX {
            waits.waiting.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("{WAITS_MAX} requests wait for locks already");
            return Err(ENOLCK);
        }
        let Some(cpu) = queue else {
            // The limit of threads has just grown; an idle thread starts another when it takes a request.
            if shared.dev_idle.load(Ordering::Acquire) == 0 {
                dev::grow_threads(&shared);
            }
            return Ok(());
        };
        let mut queues = waits.queues.lock();
        let at = queues.entry(cpu).or_default();
        at.waiting += 1;
        if at.waiting + UNBLOCKED_SLOTS <= shared.ring_depth + at.spare {
            return Ok(());
        }
        match ring::add_entry(&shared, cpu) {
            Ok(()) => {
                at.spare += 1;
                drop(queues);
                shared.wake_queue(cpu);
                Ok(())
            }
            Err(why) => {
                at.waiting -= 1;
                drop(queues);
                waits.waiting.fetch_sub(1, Ordering::AcqRel);
                tracing::warn!("no further io_uring entry for a request that waits: {why}");
                Err(ENOLCK)
            }
        }
    }

    fn end(&self, queue: Option<usize>) {
        let Some(shared) = self.0.upgrade() else { return };
        shared.waits.waiting.fetch_sub(1, Ordering::AcqRel);
        if let Some(cpu) = queue
            && let Some(at) = shared.waits.queues.lock().get_mut(&cpu)
        {
            at.waiting -= 1;
        }
    }

    fn has_no_release(&self, fh: u64) -> bool {
        let Some(shared) = self.0.upgrade() else { return true };
        let background_max = shared.config.max_background.into();
        shared.under_way.has_no_release(fh, background_max, || dev::is_empty(&shared.device))
    }
}
