//! Connections that share a receive queue, and which worker looks after them: one event tells of all that came on any of
//! them, and the worker that takes it answers one after the other until nothing is left. A worker that has to wait lets
//! the others go first, so that another takes them. It knows no request.

use crate::depths::NODE;
use crate::server::PARKED;
use parking_lot::Mutex;
use rustix::event::epoll::EventFlags;
use rustix::event::{EventfdFlags, eventfd};
use spurline_transport::Crew;
use spurline_types::{Error, Result};
use spurline_verbs::{Context, Inlet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The most connections of a hub, so that its queue stays within what every device has.
const CONNECTIONS: u32 = 256;

/// Connections of one device that share a receive queue.
pub(crate) struct Hub {
    pub id: u64,
    pub inlet: Arc<Inlet>,
    /// Always readable: to wake a worker for what no event tells of any more.
    always: OwnedFd,
    /// The ticket of the worker that looks after it; 0: none, an event is waited for. Changed under the lock of `tickets`,
    /// and so is the event asked for: a worker that was relieved takes no event of those that came after it.
    now: AtomicU64,
    /// Tickets given out.
    tickets: Mutex<u64>,
}

impl Hub {
    /// A hub without connections, watched by `crew`.
    pub fn new(context: &Arc<Context>, id: u64, crew: &Crew) -> Result<Arc<Hub>> {
        let os = |e: rustix::io::Errno| Error::io("can't watch a receive queue", &e.into());
        let inlet = Inlet::new(context, CONNECTIONS * NODE.receives, id as u32)?;
        let always = eventfd(1, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(os)?;
        inlet.arm()?;
        crew.watch(inlet.fd(), id, PARKED).map_err(os)?;
        crew.watch(&always, id, EventFlags::empty()).map_err(os)?;
        Ok(Arc::new(Hub { id, inlet, always, now: AtomicU64::new(0), tickets: Mutex::new(0) }))
    }

    /// The calling worker looks after it from now on; whoever did finds out by its ticket.
    pub fn hold(&self) -> u64 {
        let mut tickets = self.tickets.lock();
        *tickets += 1;
        self.now.store(*tickets, Ordering::Release);
        *tickets
    }

    /// Whether it is still the worker with this ticket that looks after it.
    pub fn is_held(&self, ticket: u64) -> bool {
        self.now.load(Ordering::Acquire) == ticket
    }

    /// The worker with this ticket found nothing more and sleeps until something comes, for `longest`; answers whether it
    /// has to look again.
    pub fn linger(&self, ticket: u64, longest: Duration) -> Result<bool> {
        let tickets = self.tickets.lock();
        if !self.is_held(ticket) || self.inlet.arm()? {
            return Ok(true);
        }
        drop(tickets);
        Ok(self.inlet.sleep(Instant::now() + longest))
    }

    /// The worker with this ticket found nothing more: the next event is waited for. Answers `false` when something came
    /// just now, and it has to go on.
    pub fn rest(&self, crew: &Crew, ticket: u64) -> Result<bool> {
        let _tickets = self.tickets.lock();
        if !self.is_held(ticket) {
            return Ok(true);
        }
        if self.inlet.arm()? {
            return Ok(false);
        }
        self.now.store(0, Ordering::Release);
        self.park(crew)?;
        Ok(true)
    }

    /// Lets others look after it, if the worker with this ticket does (`None`: whoever does).
    pub fn hand_over(&self, crew: &Crew, ticket: Option<u64>) -> Result<()> {
        let _tickets = self.tickets.lock();
        if self.is_held(0) || ticket.is_some_and(|ticket| !self.is_held(ticket)) {
            return Ok(());
        }
        self.now.store(0, Ordering::Release);
        let more = self.inlet.arm()?;
        self.park(crew)?;
        if more {
            // No event tells of what was taken out of the queue already.
            crew.kick(&self.always, self.id).map_err(|e| Error::io("waking a worker failed", &e.into()))?;
        }
        Ok(())
    }

    fn park(&self, crew: &Crew) -> Result<()> {
        crew.park(self.inlet.fd(), self.id, PARKED).map_err(|e| Error::io("parking connections failed", &e.into()))
    }
}
