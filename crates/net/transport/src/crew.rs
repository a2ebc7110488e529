//! The threads of a node's transport: idle connections are parked in an epoll set, each armed for one event; a worker
//! that takes the event owns the connection until it parks it again. So memory and threads follow the requests in work,
//! not the connections. Connections that were not asked for data yet are in a set of their own, and one more thread sees
//! to these alone: when all workers wait for a slow under-store, somebody still says that the node is alive. What such a
//! connection is asked for beside that is done by a few threads of its own. It knows neither what a connection is made
//! of nor what requests mean.

use crate::turns::{Turn, Turns};
use crate::{ConnState, Places, Seated};
use parking_lot::{Condvar, Mutex};
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;
use spurline_trust::{Reason, Refusals};
use spurline_types::{Error, ErrorKind};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A worker without work for this long ends, unless it is the last one idle.
const IDLE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// Without waiting.
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
/// Threads at most that do what may wait for connections that are not asked for data.
const ASIDE: usize = 4;
/// The event that is no connection: the server stops.
const STOP: u64 = 0;
/// The event that is no connection: one of those that are not asked for data has something.
const LIFE: u64 = u64::MAX;

/// How serving a connection ended for now.
pub enum End {
    /// Nothing to do on it; its next event is waited for without a thread.
    Parked,
    /// The reader closed it between two requests, or there is nobody to tell.
    Closed,
    /// It can't go on.
    Close(Error),
    /// Of one that is not asked for data: its next request may wait for something, or its answer for the reader, which is
    /// no work for the thread that sees to signs of life.
    Aside,
}

/// What a crew works on.
pub trait Crewed: Send + Sync + 'static {
    /// One connection.
    type Conn: Seated;

    /// The crew, which is part of what it works on.
    fn crew(&self) -> &Crew;
    /// Its connections.
    fn places(&self) -> &Places<Self::Conn>;
    /// Room of a worker's own for requests, in bytes.
    fn inbox_len(&self) -> usize {
        0
    }
    /// Answers requests of one connection until it has none for a while; with `life_only` not for longer than it takes to
    /// see that it is asked for data, and nothing but greetings and signs of life.
    fn serve(&self, conn: &Arc<Self::Conn>, inbox: &mut [u8], life_only: bool) -> End;
    /// Where refused connections are counted and said.
    fn refusals(&self) -> &Refusals;
    /// Forgets a connection that is over, and ends it.
    fn remove(&self, conn: &Self::Conn);
}

/// The workers of one server and the events they wait for.
pub struct Crew {
    /// What carries the bytes, for logs and the names of threads.
    kind: &'static str,
    most: usize,
    epoll: OwnedFd,
    /// Connections that were not asked for data; the other set holds this one.
    life: OwnedFd,
    wake: OwnedFd,
    stopping: AtomicBool,
    /// Workers waiting for an event.
    idle: AtomicUsize,
    turns: Turns,
    /// Worker threads there are; the condition is signalled when it falls.
    workers: Mutex<usize>,
    /// Whether the one more thread runs.
    watched: Mutex<bool>,
    watch_ended: Condvar,
    ended: Condvar,
    /// Connections that [`End::Aside`] left to other threads, and how many of those there are.
    aside: Mutex<(VecDeque<u64>, usize)>,
}

impl Crew {
    /// The number of the first connection.
    pub const FIRST_ID: u64 = STOP + 1;

    /// A crew of at most `most` workers, none yet, of which `at_once` take events: as many as answer at once without
    /// waiting for anything, while those who wait are more. A worker waits when it says so ([`Crew::waits`]), or when it is
    /// on its request for `long`.
    ///
    /// # Errors
    /// When the descriptors can't be had.
    pub fn new(kind: &'static str, most: usize, at_once: usize, long: Duration) -> rustix::io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(STOP), EventFlags::IN)?;
        let life = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&life, &wake, EventData::new_u64(STOP), EventFlags::IN)?;
        epoll::add(&epoll, &life, EventData::new_u64(LIFE), EventFlags::IN)?;
        Ok(Crew {
            kind,
            most: most.max(1),
            epoll,
            life,
            wake,
            stopping: AtomicBool::new(false),
            idle: AtomicUsize::new(0),
            turns: Turns::new(at_once.clamp(1, most.max(1)), long),
            workers: Mutex::new(0),
            watched: Mutex::new(false),
            watch_ended: Condvar::new(),
            ended: Condvar::new(),
            aside: Mutex::default(),
        })
    }

    /// Waits for the first event of a connection.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn watch(&self, fd: impl AsFd, id: u64, flags: EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.epoll, fd, EventData::new_u64(id), flags | EventFlags::ONESHOT)
    }

    /// The same for a connection that is not asked for data yet.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn watch_life(&self, fd: impl AsFd, id: u64, flags: EventFlags) -> rustix::io::Result<()> {
        epoll::add(&self.life, fd, EventData::new_u64(id), flags | EventFlags::ONESHOT)
    }

    /// Waits for a connection's next event among those of its kind.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn park(&self, fd: impl AsFd, state: &ConnState, flags: EventFlags) -> rustix::io::Result<()> {
        let (id, moved) = (state.id(), state.moved());
        let again = |set| epoll::modify(set, fd.as_fd(), EventData::new_u64(id), flags | EventFlags::ONESHOT);
        // Before it is armed, as the worker that takes its next event has it from then on.
        state.park();
        match (moved.load(Ordering::Acquire), state.for_data()) {
            (true, _) => again(&self.epoll),
            (false, false) => again(&self.life),
            (false, true) => {
                // Before it is armed: whoever takes its next event sees it.
                moved.store(true, Ordering::Release);
                epoll::delete(&self.life, fd.as_fd())?;
                self.watch(fd.as_fd(), id, flags)
            }
        }
    }

    /// Whether another worker waits for events, so that this one may wait on its connection.
    pub fn others_idle(&self) -> bool {
        self.idle.load(Ordering::Acquire) > 0
    }

    /// Says that the worker on this thread is about to wait for a disk or another machine: another takes events meanwhile.
    pub fn waits(&self) {
        self.turns.give_away();
    }

    /// Says that the worker on this thread has answered what it was asked and goes on to more; whether it still has its
    /// turn.
    pub fn goes_on(&self) -> bool {
        self.turns.go_on()
    }

    /// Whether the server stops.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Takes the connection on which something arrived, if there is one: for a worker that has others at hand.
    pub fn take_one_more<S: Crewed>(shared: &S) -> Option<Arc<S::Conn>> {
        let id = shared.crew().next_event(false, &NOW).ok().flatten()?;
        shared.places().get(id).filter(|conn| conn.state().take_up())
    }

    /// Answers requests of one connection by `serve`, and ends it where it is over; whether it is to be served [`End::Aside`].
    pub fn attend<S: Crewed>(shared: &S, conn: &Arc<S::Conn>, serve: impl FnOnce(&Arc<S::Conn>) -> End) -> bool {
        // A panic of the service must cost its own connection only, not a worker.
        let served = catch_unwind(AssertUnwindSafe(|| serve(conn)));
        match served.unwrap_or_else(|_| End::Close(Error::new(ErrorKind::Io(5), "the service panicked"))) {
            End::Parked => {}
            End::Aside => return true,
            End::Closed => shared.remove(conn),
            End::Close(error) => {
                let (peer, refusals) = (&conn.state().endpoints().peer, shared.refusals());
                match error.kind() {
                    ErrorKind::PermissionDenied => refusals.refused(peer, Reason::Proof, &error),
                    ErrorKind::Protocol => refusals.refused(peer, Reason::Frames, &error),
                    _ => refusals.say(peer, &error),
                }
                shared.remove(conn);
            }
        }
        false
    }

    /// The number of the next connection on which something arrived, or of what is none; `None` when nothing did within
    /// `limit`.
    fn next_event(&self, life_only: bool, limit: &Timespec) -> rustix::io::Result<Option<u64>> {
        let mut events = [MaybeUninit::<Event>::uninit(); 1];
        let mut take = |set: &OwnedFd, limit| {
            let (came, _) = epoll::wait(set, &mut events, Some(limit))?;
            Ok(came.first().map(|event| event.data.u64()))
        };
        loop {
            let came = match take(if life_only { &self.life } else { &self.epoll }, limit)? {
                Some(LIFE) => take(&self.life, &NOW)?,
                came => return Ok(came),
            };
            // Otherwise another thread was first.
            if came.is_some() {
                return Ok(came);
            }
        }
    }

    /// Readable from when the server stops on.
    pub fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Worker threads there are now.
    pub fn workers(&self) -> usize {
        *self.workers.lock()
    }

    /// Workers end after the request they are on.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.turns.end();
        // The counter only has to be non-zero; when it is full already, it is.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Waits for the workers until `deadline`; says whether all ended.
    pub fn join(&self, deadline: Instant) -> bool {
        let mut workers = self.workers.lock();
        while *workers > 0 && !self.ended.wait_until(&mut workers, deadline).timed_out() {}
        let ended = *workers == 0;
        drop(workers);
        let mut watched = self.watched.lock();
        while *watched && !self.watch_ended.wait_until(&mut watched, deadline).timed_out() {}
        ended && !*watched
    }

    /// Starts the thread that sees to connections which are not asked for data, and to nothing else.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn spawn_life<S: Crewed>(shared: &Arc<S>) -> std::io::Result<()> {
        let work = Arc::clone(shared);
        *shared.crew().watched.lock() = true;
        let name = format!("{}-life", shared.crew().kind);
        let spawned = std::thread::Builder::new().name(name).spawn(move || {
            run(&work, true);
            let crew = work.crew();
            *crew.watched.lock() = false;
            crew.watch_ended.notify_all();
        });
        spawned.map(drop).inspect_err(|_| *shared.crew().watched.lock() = false)
    }

    /// Starts a worker if there may be one more.
    ///
    /// # Errors
    /// When no thread can be had.
    pub fn spawn<S: Crewed>(shared: &Arc<S>) -> std::io::Result<()> {
        let crew = shared.crew();
        // Those aside take no worker's place.
        let aside = crew.aside.lock().1;
        let mut workers = crew.workers.lock();
        if *workers >= crew.most + aside || crew.stopping() {
            return Ok(());
        }
        let work = Arc::clone(shared);
        std::thread::Builder::new().name(format!("{}-{workers}", crew.kind)).spawn(move || {
            run(&work, false);
            let crew = work.crew();
            *crew.workers.lock() -= 1;
            crew.ended.notify_all();
        })?;
        *workers += 1;
        Ok(())
    }
}

/// Serves a connection on another thread than the one that sees to signs of life: what all workers may be waiting for must
/// not keep `status` from being answered either.
fn aside<S: Crewed>(shared: &Arc<S>, id: u64) {
    let crew = shared.crew();
    let mut aside = crew.aside.lock();
    aside.0.push_back(id);
    if aside.1 == ASIDE {
        return;
    }
    aside.1 += 1;
    drop(aside);
    // Counted as a worker, so that it is waited for at the end.
    *crew.workers.lock() += 1;
    let work = Arc::clone(shared);
    let serve = move || {
        let mut inbox = vec![0u8; work.inbox_len()].into_boxed_slice();
        while let Some(id) = next_aside(work.crew()) {
            if let Some(conn) = work.places().get(id) {
                Crew::attend(&*work, &conn, |conn| work.serve(conn, &mut inbox, false));
            }
        }
        *work.crew().workers.lock() -= 1;
        work.crew().ended.notify_all();
    };
    if let Err(e) = std::thread::Builder::new().name(format!("{}-aside", crew.kind)).spawn(serve) {
        tracing::warn!("no thread to answer what may wait: {e}; those who asked are told nothing");
        *crew.workers.lock() -= 1;
        while let Some(id) = next_aside(crew) {
            shared.places().get(id).iter().for_each(|conn| shared.remove(conn));
        }
    }
}

/// The next connection for a thread of [`aside`]; `None` when there is none and the thread ends.
fn next_aside(crew: &Crew) -> Option<u64> {
    let mut aside = crew.aside.lock();
    let id = if crew.stopping() { None } else { aside.0.pop_front() };
    aside.1 -= usize::from(id.is_none());
    id
}

/// Takes events until the server stops or, but for the thread that sees to signs of life, there has been nothing to do
/// for long.
fn run<S: Crewed>(shared: &Arc<S>, life_only: bool) {
    let crew = shared.crew();
    let mut inbox = vec![0u8; shared.inbox_len()].into_boxed_slice();
    let mut held: Option<Turn<'_>> = None;
    while !crew.stopping() {
        // Signs of life are never a matter of turns.
        let turn = held.take().or_else(|| if life_only { None } else { crew.turns.take() });
        if turn.is_none() && !life_only {
            return;
        }
        let counts = usize::from(!life_only);
        crew.idle.fetch_add(counts, Ordering::AcqRel);
        let came = crew.next_event(life_only, &IDLE);
        let others_idle = crew.idle.fetch_sub(counts, Ordering::AcqRel) - counts;
        let id = match came {
            Ok(Some(id)) => id,
            Ok(None) if others_idle > 0 && !life_only => return,
            Ok(None) | Err(Errno::INTR) => {
                held = turn;
                continue;
            }
            Err(e) => {
                tracing::error!("a worker thread of the {} server ends: waiting for events failed: {e}", crew.kind);
                return;
            }
        };
        if id == STOP {
            return;
        }
        let Some(conn) = shared.places().get(id).filter(|conn| conn.state().take_up()) else {
            held = turn;
            continue;
        };
        turn.iter().for_each(Turn::begin);
        // Somebody has to be left who takes events when this request takes long.
        if others_idle == 0
            && !life_only
            && crew.turns.waiting() == 0
            && let Err(e) = Crew::spawn(shared)
        {
            tracing::warn!(
                "no further worker thread for the {} server: {e}; requests wait for those there are",
                crew.kind
            );
        }
        if Crew::attend(&**shared, &conn, |conn| shared.serve(conn, &mut inbox, life_only)) {
            aside(shared, id);
        }
        held = turn.and_then(Turn::done);
    }
}
