//! The worker threads of a node's transport. Idle connections are parked in an epoll set, each armed for a single event; the
//! worker that receives the event owns the connection until the next parking. Memory and threads therefore follow the requests in
//! progress, not the connections.
//!
//! Connections that have not requested data yet (control connections) are in a second epoll set, which a dedicated thread serves:
//! heartbeats are answered even while all workers wait for a slow origin. Any request there that may block is deferred to a few
//! further threads. This module knows neither the bytes of a connection nor the meaning of requests.

use crate::{ConnState, ConnectionSlots, SlotHolder};
use parking_lot::{Condvar, Mutex};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use spurline_exec::{WorkerPermit, WorkerPermits};
use spurline_trust::{RefusalLog, RefusalReason};
use spurline_types::errno::EIO;
use spurline_types::{Error, ErrorKind};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A worker without work ends after this time, unless that worker is the last idle worker.
const IDLE_WORKER_TIMEOUT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// A poll that does not wait.
const NO_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Limit of threads for deferred requests of control connections.
const MAX_DEFERRED_THREADS: usize = 4;
/// Event number of a server stop; no connection has this number.
const STOP_EVENT: u64 = 0;
/// Event number of the control set: a connection there is readable.
const CONTROL_EVENT: u64 = u64::MAX;

/// The state of a connection after the service by a worker.
pub enum ServeOutcome {
    /// No request is pending; the next event is awaited without a thread.
    Parked,
    /// The reader closed the connection between two requests, or can't receive an error.
    Closed,
    /// The connection failed.
    Failed(Error),
    /// A control connection with a next request or answer that may block, which the control thread must not do.
    Deferred,
}

/// A server with connections that a worker pool serves.
pub trait PooledServer: Send + Sync + 'static {
    /// A connection.
    type Conn: SlotHolder;

    /// The pool, which is part of the server.
    fn worker_pool(&self) -> &WorkerPool;
    /// The server's connections.
    fn connection_slots(&self) -> &ConnectionSlots<Self::Conn>;
    /// Size of a worker's own request buffer, in bytes.
    fn inbox_len(&self) -> usize {
        0
    }
    /// Answers requests of a connection until idle for a short while. With `control_only`, answers handshakes and heartbeats
    /// only, and returns as soon as a request for data arrives.
    fn serve_connection(&self, conn: &Arc<Self::Conn>, inbox: &mut [u8], control_only: bool) -> ServeOutcome;
    /// The log and counters of refused connections.
    fn refusals(&self) -> &RefusalLog;
    /// Removes and closes a connection that is over.
    fn remove_connection(&self, conn: &Self::Conn);
}

/// The workers of a server and the awaited events.
pub struct WorkerPool {
    /// The transport's name, for logs and thread names.
    kind: &'static str,
    max_workers: usize,
    epoll: OwnedFd,
    /// Epoll set of control connections; nested in the other set.
    control_epoll: OwnedFd,
    wake: OwnedFd,
    is_stopping: AtomicBool,
    /// Workers waiting for an event.
    idle_workers: AtomicUsize,
    permits: WorkerPermits,
    /// Number of worker threads; the condition is signalled when the number decreases.
    workers: Mutex<usize>,
    /// Whether the additional thread runs.
    control_running: Mutex<bool>,
    control_ended: Condvar,
    ended: Condvar,
    /// Connections deferred by [`ServeOutcome::Deferred`], and the number of threads that serve such connections.
    deferred: Mutex<(VecDeque<u64>, usize)>,
}

impl WorkerPool {
    /// The number of the first connection.
    pub const FIRST_ID: u64 = STOP_EVENT + 1;

    /// A pool of at most `most` workers, initially empty. `at_once` workers wait for events, which is the number that can answer
    /// without blocking; blocked workers come on top. A worker counts as blocked after [`WorkerPool::release_permit`] or when a
    /// request has taken `long`.
    ///
    /// # Errors
    /// When the descriptors can't be created.
    pub fn new(kind: &'static str, most: usize, at_once: usize, long: Duration) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(STOP_EVENT), EventFlags::IN)?;
        let life = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&life, &wake, EventData::new_u64(STOP_EVENT), EventFlags::IN)?;
        epoll::add(&epoll, &life, EventData::new_u64(CONTROL_EVENT), EventFlags::IN)?;
        Ok(WorkerPool {
            kind,
            max_workers: most.max(1),
            epoll,
            control_epoll: life,
            wake,
            is_stopping: AtomicBool::new(false),
            idle_workers: AtomicUsize::new(0),
            permits: WorkerPermits::new(at_once.clamp(1, most.max(1)), long),
            workers: Mutex::new(0),
            control_running: Mutex::new(false),
            control_ended: Condvar::new(),
            ended: Condvar::new(),
            deferred: Mutex::default(),
        })
    }

    /// Waits for the first event of a data connection.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn watch_connection(&self, fd: impl AsFd, id: u64, flags: EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(id), flags | EventFlags::ONESHOT)
    }

    /// Waits for the first event of a control connection.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn watch_control(&self, fd: impl AsFd, id: u64, flags: EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.control_epoll, fd, EventData::new_u64(id), flags | EventFlags::ONESHOT)
    }

    /// Waits for a connection's next event in the connection's set.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn park_connection(&self, fd: impl AsFd, state: &ConnState, flags: EventFlags) -> rustix::io::Result<()> {
        let id = state.id();
        let moved = state.moved();
        let again = |set| epoll::modify(set, fd.as_fd(), EventData::new_u64(id), flags | EventFlags::ONESHOT);
        // Must precede arming: the worker that receives the next event owns the connection from then on.
        state.mark_parked();
        match (moved.load(Ordering::Acquire), state.for_data()) {
            (true, _) => again(&self.epoll),
            (false, false) => again(&self.control_epoll),
            (false, true) => {
                // Must precede arming, so that the change is visible to the worker of the next event.
                moved.store(true, Ordering::Release);
                epoll::delete(&self.control_epoll, fd.as_fd())?;
                self.watch_connection(fd.as_fd(), id, flags)
            }
        }
    }

    /// Whether another worker waits for events, so that this worker may wait on a connection.
    pub fn others_idle(&self) -> bool {
        self.idle_workers.load(Ordering::Acquire) > 0
    }

    /// Call before this worker blocks on a disk or another machine, so that another worker receives events meanwhile.
    pub fn release_permit(&self) {
        self.permits.release_current();
    }

    /// To be called between two requests of a connection. Returns whether the worker still holds the permit.
    pub fn renew_permit(&self) -> bool {
        self.permits.renew_current()
    }

    /// Whether the server is stopping.
    pub fn stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Takes a further connection that is readable, for a worker that polls several.
    pub fn take_ready<S: PooledServer>(shared: &S) -> Option<Arc<S::Conn>> {
        let id = shared.worker_pool().next_event(false, &NO_WAIT).ok().flatten()?;
        shared.connection_slots().get(id).filter(|conn| conn.conn_state().mark_taken())
    }

    /// Runs `serve` on a connection and closes a connection that is over. Returns whether the connection is
    /// [`ServeOutcome::Deferred`].
    pub fn run_service<S: PooledServer>(
        shared: &S,
        conn: &Arc<S::Conn>,
        serve: impl FnOnce(&Arc<S::Conn>) -> ServeOutcome,
    ) -> bool {
        // A panic of the service may cost a connection, not a worker.
        let served = catch_unwind(AssertUnwindSafe(|| serve(conn)));
        match served.unwrap_or_else(|_| ServeOutcome::Failed(Error::new(ErrorKind::Io(EIO), "the service panicked"))) {
            ServeOutcome::Parked => {}
            ServeOutcome::Deferred => return true,
            ServeOutcome::Closed => shared.remove_connection(conn),
            ServeOutcome::Failed(error) => {
                let peer = &conn.conn_state().endpoints().peer;
                let refusals = shared.refusals();
                match error.kind() {
                    ErrorKind::PermissionDenied => refusals.record_refusal(peer, RefusalReason::Proof, &error),
                    ErrorKind::Protocol => refusals.record_refusal(peer, RefusalReason::Frames, &error),
                    _ => refusals.log_closed(peer, &error),
                }
                shared.remove_connection(conn);
            }
        }
        false
    }

    /// The number of the next readable connection, or of a special event; `None` when nothing happened within
    /// `limit`.
    fn next_event(&self, control_only: bool, limit: &Timespec) -> rustix::io::Result<Option<u64>> {
        let mut events = [MaybeUninit::<Event>::uninit(); 1];
        let mut take = |set: &OwnedFd, limit| {
            let (came, _) = epoll::wait(set, &mut events, Some(limit))?;
            Ok(came.first().map(|event| event.data.u64()))
        };
        loop {
            let came = match take(if control_only { &self.control_epoll } else { &self.epoll }, limit)? {
                Some(CONTROL_EVENT) => take(&self.control_epoll, &NO_WAIT)?,
                came => return Ok(came),
            };
            // If empty, another thread was first.
            if came.is_some() {
                return Ok(came);
            }
        }
    }

    /// A descriptor that is readable once the server stops.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Current number of worker threads.
    pub fn workers(&self) -> usize {
        *self.workers.lock()
    }

    /// Stops the workers after the current requests.
    pub fn stop(&self) {
        self.is_stopping.store(true, Ordering::Release);
        self.permits.shut_down();
        // The counter only has to be non-zero; a full counter already is.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits for the workers until `deadline`. Returns whether all ended.
    pub fn join(&self, deadline: Instant) -> bool {
        let mut workers = self.workers.lock();
        while *workers > 0 && !self.ended.wait_until(&mut workers, deadline).timed_out() {}
        let ended = *workers == 0;
        drop(workers);
        let mut watched = self.control_running.lock();
        while *watched && !self.control_ended.wait_until(&mut watched, deadline).timed_out() {}
        ended && !*watched
    }

    /// Starts the thread for control connections.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn_control<S: PooledServer>(shared: &Arc<S>) -> std::io::Result<()> {
        let work = Arc::clone(shared);
        *shared.worker_pool().control_running.lock() = true;
        let name = format!("{}-life", shared.worker_pool().kind);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            run_worker(&work, true);
            let pool = work.worker_pool();
            *pool.control_running.lock() = false;
            pool.control_ended.notify_all();
        });
        spawned.map(drop).inspect_err(|_| *shared.worker_pool().control_running.lock() = false)
    }

    /// Starts a worker unless the limit is reached.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn spawn_worker<S: PooledServer>(shared: &Arc<S>) -> std::io::Result<()> {
        let pool = shared.worker_pool();
        // Threads for deferred requests do not count towards the limit of workers.
        let aside = pool.deferred.lock().1;
        let mut workers = pool.workers.lock();
        if *workers >= pool.max_workers + aside || pool.stopping() {
            return Ok(());
        }
        let work = Arc::clone(shared);
        std::thread::Builder::new().name(format!("{}-{workers}", pool.kind)).spawn(move || {
            run_worker(&work, false);
            let pool = work.worker_pool();
            *pool.workers.lock() -= 1;
            pool.ended.notify_all();
        })?;
        *workers += 1;
        Ok(())
    }
}

/// Serves a connection on a thread other than the control thread, so that a blocked request does not delay `status`
/// either.
fn serve_deferred<S: PooledServer>(shared: &Arc<S>, id: u64) {
    let pool = shared.worker_pool();
    let mut aside = pool.deferred.lock();
    aside.0.push_back(id);
    if aside.1 == MAX_DEFERRED_THREADS {
        return;
    }
    aside.1 += 1;
    drop(aside);
    // Counted as a worker, so that [`WorkerPool::join`] waits for this thread.
    *pool.workers.lock() += 1;
    let work = Arc::clone(shared);
    if let Err(e) = std::thread::Builder::new().name(format!("{}-aside", pool.kind)).spawn(move || {
        let mut inbox = vec![0u8; work.inbox_len()].into_boxed_slice();
        while let Some(id) = next_deferred(work.worker_pool()) {
            if let Some(conn) = work.connection_slots().get(id) {
                WorkerPool::run_service(&*work, &conn, |conn| work.serve_connection(conn, &mut inbox, false));
            }
        }
        *work.worker_pool().workers.lock() -= 1;
        work.worker_pool().ended.notify_all();
    }) {
        tracing::warn!("can't start a thread for requests that may block: {e}; their connections are closed");
        *pool.workers.lock() -= 1;
        while let Some(id) = next_deferred(pool) {
            shared.connection_slots().get(id).iter().for_each(|conn| shared.remove_connection(conn));
        }
    }
}

/// The next connection for a deferred-request thread; `None` when there is none and the thread ends.
fn next_deferred(pool: &WorkerPool) -> Option<u64> {
    let mut aside = pool.deferred.lock();
    let id = if pool.stopping() { None } else { aside.0.pop_front() };
    aside.1 -= usize::from(id.is_none());
    id
}

/// Receives events until the server stops or, except on the control thread, there has been no work for [`IDLE_WORKER_TIMEOUT`].
fn run_worker<S: PooledServer>(shared: &Arc<S>, control_only: bool) {
    let pool = shared.worker_pool();
    let mut inbox = vec![0u8; shared.inbox_len()].into_boxed_slice();
    let mut held: Option<WorkerPermit<'_>> = None;
    while !pool.stopping() {
        // The control thread needs no permit.
        let permit = held.take().or_else(|| if control_only { None } else { pool.permits.acquire_permit() });
        if permit.is_none() && !control_only {
            return;
        }
        let counts = usize::from(!control_only);
        pool.idle_workers.fetch_add(counts, Ordering::AcqRel);
        let came = pool.next_event(control_only, &IDLE_WORKER_TIMEOUT);
        let others_idle = pool.idle_workers.fetch_sub(counts, Ordering::AcqRel) - counts;
        let id = match came {
            Ok(Some(id)) => id,
            Ok(None) if others_idle > 0 && !control_only => return,
            Ok(None) | Err(Errno::INTR) => {
                held = permit;
                continue;
            }
            Err(e) => {
                tracing::error!("a worker thread of the {} server ends: waiting for events failed: {e}", pool.kind);
                return;
            }
        };
        if id == STOP_EVENT {
            return;
        }
        let Some(conn) = shared.connection_slots().get(id).filter(|conn| conn.conn_state().mark_taken()) else {
            held = permit;
            continue;
        };
        permit.iter().for_each(WorkerPermit::begin_request);
        // A worker must remain to receive events in case this request takes long.
        if others_idle == 0
            && !control_only
            && pool.permits.waiting() == 0
            && let Err(e) = WorkerPool::spawn_worker(shared)
        {
            tracing::warn!(
                "no further worker thread for the {} server: {e}; requests wait for the existing ones",
                pool.kind
            );
        }
        if WorkerPool::run_service(&**shared, &conn, |conn| shared.serve_connection(conn, &mut inbox, control_only)) {
            serve_deferred(shared, id);
        }
        held = permit.and_then(WorkerPermit::end_request);
    }
}
