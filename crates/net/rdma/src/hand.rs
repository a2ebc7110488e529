//! The connections that a worker keeps at hand while all workers are busy: it looks at their queues in turn, without a
//! system call, where each request would cost an event otherwise. Events are asked for again when a round found nothing,
//! and before anything that waits: whoever is at hand then would wait with it. It knows no request.

use crate::server::{Conn, PARKED, Shared};
use crate::session::Session;
use rustix::event::{EventfdFlags, eventfd};
use spurline_transport::{Crew, Crewed as _, End};
use spurline_types::Error;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// The most at hand: their requests are answered one after the other.
const MOST: usize = 8;
/// So many rounds in a row may find nothing before events are asked for. With 40 it is no faster.
const EMPTY_ROUNDS: u32 = 2;

/// Who has as many at hand as may be takes another in their place after so many rounds.
const FULL_ROUNDS: u32 = 16;

/// The acceptor has a connection for no longer than this when it looks for those that are neglected. One that it keeps for longer
/// it finds again.
const SWEPT: Duration = Duration::from_millis(1);

/// Whether a worker has a connection at hand. Changed by whoever has locked its session.
#[derive(Default)]
pub(crate) struct Held(AtomicU8);

const NOT: u8 = 0;
const LOOKED_AT: u8 = 1;
const LEFT: u8 = 2;

impl Held {
    fn set(&self, held: bool) {
        self.0.store(if held { LOOKED_AT } else { NOT }, Ordering::Relaxed);
    }

    fn is_held(&self) -> bool {
        self.0.load(Ordering::Relaxed) != NOT
    }

    /// Whether nobody has looked at it since this was asked last, though it is at hand; it is not any more then.
    pub fn is_neglected(&self) -> bool {
        let held = self.0.load(Ordering::Relaxed);
        let next = if held == LOOKED_AT { LEFT } else { NOT };
        self.0.store(next, Ordering::Relaxed);
        held == LEFT
    }
}

/// What a worker has at hand.
pub(crate) struct Hand<'a> {
    shared: &'a Shared,
    conns: RefCell<[Option<Arc<Conn>>; MOST]>,
}

impl<'a> Hand<'a> {
    pub fn new(shared: &'a Shared) -> Self {
        Hand { shared, conns: RefCell::default() }
    }

    /// Keeps a connection whose session is locked, unless a worker waits for its next event; says whether it does.
    pub fn keep(&self, conn: &Arc<Conn>) -> bool {
        let crew = self.shared.crew();
        if crew.others_idle() || !conn.state.for_data() || !crew.goes_on() {
            return false;
        }
        let mut conns = self.conns.borrow_mut();
        let Some(free) = conns.iter_mut().find(|at| at.is_none()) else { return false };
        *free = Some(Arc::clone(conn));
        conn.held.set(true);
        true
    }

    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    fn count(&self) -> usize {
        self.conns.borrow().iter().flatten().count()
    }

    fn take(&self, at: usize) -> Option<Arc<Conn>> {
        self.conns.borrow_mut()[at].take()
    }

    /// The request in work is about to wait.
    pub fn waits(&self) {
        self.shared.crew().waits();
        self.let_go();
    }

    /// Asks for events of all that are at hand.
    pub fn let_go(&self) {
        (0..MOST).for_each(|at| self.let_go_of(at));
    }

    fn let_go_of(&self, at: usize) {
        let Some(conn) = self.take(at) else { return };
        Crew::attend(self.shared, &conn, |conn| {
            // Another worker may have it by now and be after one that is locked here: then it is that worker's.
            let Some(mut session) = conn.session.try_lock_for(SWEPT).filter(|_| conn.held.is_held()) else {
                return End::Parked;
            };
            conn.held.set(false);
            match session.pair.arm() {
                Ok(false) => park(self.shared, conn, &session),
                // Something is there already, be it the end, and nothing tells of it any more.
                Ok(true) | Err(_) => ring(self.shared, conn),
            }
        });
    }

    /// Looks at all that are at hand in turn, and at what else comes, until nothing does: `serve` answers what has come.
    pub fn go_round(&self, serve: impl Fn(&Arc<Conn>) -> End) {
        let crew = self.shared.crew();
        let (mut empty, mut next, mut rounds) = (0, 0, 0u32);
        while !self.is_empty() && !crew.stopping() {
            let mut found = false;
            rounds = rounds.wrapping_add(1);
            // Not what another worker waits for, nor, at once, what another has room for.
            let takes = self.count() < MOST || rounds % FULL_ROUNDS == 0;
            if takes
                && !crew.others_idle()
                && let Some(conn) = Crew::take_one_more(self.shared)
            {
                found = true;
                if self.count() == MOST {
                    // Who has been at hand makes room in turn, so that nobody has to wait for all of them to fall silent.
                    self.let_go_of(next);
                    next = (next + 1) % MOST;
                }
                Crew::attend(self.shared, &conn, |conn| {
                    conn.event(self.shared);
                    serve(conn)
                });
            }
            for at in 0..MOST {
                if !self.look(at, &serve) {
                    continue;
                }
                found = true;
                // Whoever lost its turn has a successor that takes events.
                if !crew.goes_on() {
                    return self.let_go();
                }
            }
            empty = if found { 0 } else { empty + 1 };
            if empty > EMPTY_ROUNDS {
                return self.let_go();
            }
            if empty > 0 {
                std::thread::yield_now();
                crew.goes_on();
            }
            if crew.others_idle() && self.count() > 1 {
                // One for each round, so that the other is not idle by the next.
                (0..MOST)
                    .rev()
                    .find(|at| self.conns.borrow()[*at].is_some())
                    .into_iter()
                    .for_each(|at| self.let_go_of(at));
            }
        }
    }

    /// Answers what has come on one connection; says whether anything had.
    fn look(&self, at: usize, serve: &impl Fn(&Arc<Conn>) -> End) -> bool {
        let Some(conn) = self.take(at) else { return false };
        let arrived = match conn.session.try_lock() {
            // The acceptor looks at it, or another worker has it by now.
            None => false,
            Some(_) if !conn.held.is_held() => return false,
            Some(mut session) => {
                let arrived = !matches!(session.pair.has_arrived(), Ok(false));
                conn.held.set(!arrived);
                arrived
            }
        };
        if !arrived {
            self.conns.borrow_mut()[at] = Some(conn);
            return false;
        }
        Crew::attend(self.shared, &conn, serve);
        true
    }
}

/// Waits for the connection's next event without a thread.
pub(crate) fn park(shared: &Shared, conn: &Conn, session: &Session) -> End {
    match shared.crew().park(session.pair.fd(), &conn.state, PARKED) {
        Ok(()) => End::Parked,
        Err(e) => End::Close(Error::io("parking the connection failed", &e.into())),
    }
}

/// Leaves a connection to a worker. Its first request may be here already, and then nothing more comes that would wake
/// one.
pub(crate) fn ring(shared: &Shared, conn: &Conn) -> End {
    let mut bell = conn.bell.lock();
    let rung = eventfd(1, EventfdFlags::CLOEXEC).and_then(|fd| {
        let fd = bell.insert(fd);
        shared.crew().watch(fd, conn.state.id(), PARKED)
    });
    match rung {
        Ok(()) => End::Parked,
        Err(e) => End::Close(Error::io("handing the connection over failed", &e.into())),
    }
}
