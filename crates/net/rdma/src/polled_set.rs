//! The set of connections that a worker polls while all workers are busy: polling the queues needs no system call, where each
//! request would otherwise cost an event. A connection returns to events after empty rounds, and before anything that blocks,
//! which would delay requests there. Knows no request.

use crate::server::{PARKED, RdmaConn, RdmaServerState};
use crate::session::RdmaSession;
use rustix::event::{EventfdFlags, eventfd};
use spurline_transport::{PooledServer as _, ServeOutcome, WorkerPool};
use spurline_types::Error;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// Maximum size of the set: the requests are answered in turn.
const MAX_POLLED: usize = 8;
/// Empty rounds in a row before the set is released. A set with 40 is no faster.
const EMPTY_ROUNDS: u32 = 2;

/// A full set exchanges a connection after this many rounds.
const FULL_ROUNDS: u32 = 16;

/// Longest time that the acceptor holds a connection's lock in a sweep. A connection locked for longer is found again by the next
/// sweep.
const MAX_SWEEP_HOLD: Duration = Duration::from_millis(1);

/// Whether a connection is in a polled set. Only the holder of the session's lock changes the flag.
#[derive(Default)]
pub(crate) struct PolledFlag(AtomicU8);

const NOT_POLLED: u8 = 0;
const POLLED_RECENTLY: u8 = 1;
const NEGLECTED_ROUNDS: u8 = 2;

impl PolledFlag {
    fn set_polled(&self, held: bool) {
        self.0.store(if held { POLLED_RECENTLY } else { NOT_POLLED }, Ordering::Relaxed);
    }

    fn is_polled(&self) -> bool {
        self.0.load(Ordering::Relaxed) != NOT_POLLED
    }

    /// Whether the connection is in a set but was not polled since the previous call; such a connection leaves the set.
    pub fn check_neglected(&self) -> bool {
        let held = self.0.load(Ordering::Relaxed);
        let next = if held == POLLED_RECENTLY { NEGLECTED_ROUNDS } else { NOT_POLLED };
        self.0.store(next, Ordering::Relaxed);
        held == NEGLECTED_ROUNDS
    }
}

/// The connections that a worker polls.
pub(crate) struct PolledSet<'a> {
    shared: &'a RdmaServerState,
    conns: RefCell<[Option<Arc<RdmaConn>>; MAX_POLLED]>,
}

impl<'a> PolledSet<'a> {
    pub fn new(shared: &'a RdmaServerState) -> Self {
        PolledSet { shared, conns: RefCell::default() }
    }

    /// Adds a connection whose session is locked, unless another worker waits for events. Returns whether the connection was
    /// added.
    pub fn try_add(&self, conn: &Arc<RdmaConn>) -> bool {
        let worker_pool = self.shared.worker_pool();
        if worker_pool.others_idle() || !conn.state.for_data() || !worker_pool.renew_permit() {
            return false;
        }
        let mut conns = self.conns.borrow_mut();
        let Some(free) = conns.iter_mut().find(|at| at.is_none()) else { return false };
        *free = Some(Arc::clone(conn));
        conn.polled.set_polled(true);
        true
    }

    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    fn count(&self) -> usize {
        self.conns.borrow().iter().flatten().count()
    }

    fn remove_at(&self, at: usize) -> Option<Arc<RdmaConn>> {
        self.conns.borrow_mut()[at].take()
    }

    /// Releases the set, and the worker's permit, before the current request blocks.
    pub fn release_before_wait(&self) {
        self.shared.worker_pool().release_permit();
        self.release_all();
    }

    /// Returns all connections of the set to events.
    pub fn release_all(&self) {
        (0..MAX_POLLED).for_each(|at| self.release_at(at));
    }

    fn release_at(&self, at: usize) {
        let Some(conn) = self.remove_at(at) else { return };
        WorkerPool::run_service(self.shared, &conn, |conn| {
            // Another worker may own the connection by now, and may be waiting for a connection that is locked here.
            let Some(mut session) = conn.session.try_lock_for(MAX_SWEEP_HOLD).filter(|_| conn.polled.is_polled())
            else {
                return ServeOutcome::Parked;
            };
            conn.polled.set_polled(false);
            match session.pair.arm_receive() {
                Ok(false) => park_conn(self.shared, conn, &session),
                // Something has arrived, possibly the end of the connection, and causes no further event.
                Ok(true) | Err(_) => ring_bell(self.shared, conn),
            }
        });
    }

    /// Polls the connections of the set in turn, and takes other ready connections, until nothing arrives; `serve` answers
    /// requests.
    pub fn poll_rounds(&self, serve: impl Fn(&Arc<RdmaConn>) -> ServeOutcome) {
        let worker_pool = self.shared.worker_pool();
        let mut empty = 0;
        let mut next = 0;
        let mut rounds = 0u32;
        while !self.is_empty() && !worker_pool.stopping() {
            let mut found = false;
            rounds = rounds.wrapping_add(1);
            // Not while another worker waits for events; and with a full set only now and then.
            let takes = self.count() < MAX_POLLED || rounds.is_multiple_of(FULL_ROUNDS);
            if takes
                && !worker_pool.others_idle()
                && let Some(conn) = WorkerPool::take_ready(self.shared)
            {
                found = true;
                if self.count() == MAX_POLLED {
                    // Connections leave the set in turn, so that a new connection need not wait until all are idle.
                    self.release_at(next);
                    next = (next + 1) % MAX_POLLED;
                }
                WorkerPool::run_service(self.shared, &conn, |conn| {
                    conn.note_event(self.shared);
                    serve(conn)
                });
            }
            for at in 0..MAX_POLLED {
                if !self.poll_one(at, &serve) {
                    continue;
                }
                found = true;
                // A worker that lost its permit has a successor that takes events.
                if !worker_pool.renew_permit() {
                    return self.release_all();
                }
            }
            empty = if found { 0 } else { empty + 1 };
            if empty > EMPTY_ROUNDS {
                return self.release_all();
            }
            if empty > 0 {
                std::thread::yield_now();
                worker_pool.renew_permit();
            }
            if worker_pool.others_idle() && self.count() > 1 {
                // A single connection per round, so that the other worker is busy in the next round.
                (0..MAX_POLLED)
                    .rev()
                    .find(|at| self.conns.borrow()[*at].is_some())
                    .into_iter()
                    .for_each(|at| self.release_at(at));
            }
        }
    }

    /// Answers the requests that have arrived on a connection; returns whether there were any.
    fn poll_one(&self, at: usize, serve: &impl Fn(&Arc<RdmaConn>) -> ServeOutcome) -> bool {
        let Some(conn) = self.remove_at(at) else { return false };
        let arrived = match conn.session.try_lock() {
            // The acceptor holds the lock, or another worker owns the connection.
            None => false,
            Some(_) if !conn.polled.is_polled() => return false,
            Some(mut session) => {
                let arrived = !matches!(session.pair.has_arrived(), Ok(false));
                conn.polled.set_polled(!arrived);
                arrived
            }
        };
        if !arrived {
            self.conns.borrow_mut()[at] = Some(conn);
            return false;
        }
        WorkerPool::run_service(self.shared, &conn, serve);
        true
    }
}

/// Waits for the connection's next event without a thread.
pub(crate) fn park_conn(shared: &RdmaServerState, conn: &RdmaConn, session: &RdmaSession) -> ServeOutcome {
    match shared.worker_pool().park_connection(session.pair.fd(), &conn.state, PARKED) {
        Ok(()) => ServeOutcome::Parked,
        Err(e) => ServeOutcome::Failed(Error::io("parking the connection failed", &e.into())),
    }
}

/// Signals a connection to the workers. A request may have arrived already, and then causes no further event.
pub(crate) fn ring_bell(shared: &RdmaServerState, conn: &RdmaConn) -> ServeOutcome {
    let mut bell = conn.bell.lock();
    let rung = eventfd(1, EventfdFlags::CLOEXEC).and_then(|fd| {
        let fd = bell.insert(fd);
        shared.worker_pool().watch_connection(fd, conn.state.id(), PARKED)
    });
    match rung {
        Ok(()) => ServeOutcome::Parked,
        Err(e) => ServeOutcome::Failed(Error::io("signalling the connection to a worker failed", &e.into())),
    }
}
