//! A worker thread of the server: takes a connection on which something arrived, answers its requests, parks it.
//! It knows neither listeners nor what requests mean.

use crate::responder::RdmaResponder;
use crate::server::{Conn, STOP, Shared};
use crate::session::{Arrived, Session};
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event};
use rustix::io::Errno;
use spurline_proto::rdma::{MessageKind, Region};
use spurline_transport::{Next, dispatch};
use spurline_types::{Error, ErrorKind};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// A worker without work for this long ends, unless it is the last one idle.
const IDLE: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };

/// Takes events until the server stops or there has been nothing to do for long.
pub(crate) fn run_worker(shared: &Arc<Shared>) {
    let mut events: Vec<Event> = Vec::with_capacity(1);
    while !shared.stopping.load(Ordering::Acquire) {
        events.clear();
        shared.idle.fetch_add(1, Ordering::AcqRel);
        let waited = epoll::wait(&shared.epoll, rustix::buffer::spare_capacity(&mut events), Some(&IDLE));
        let others_idle = shared.idle.fetch_sub(1, Ordering::AcqRel) - 1;
        let id = match (waited, events.first()) {
            (Ok(_), Some(event)) => event.data.u64(),
            (Ok(_), None) if others_idle > 0 => return,
            (Ok(_), None) | (Err(Errno::INTR), _) => continue,
            (Err(e), _) => {
                tracing::error!("a worker thread of the RDMA server ends: waiting for events failed: {e}");
                return;
            }
        };
        if id == STOP {
            return;
        }
        let Some(conn) = shared.conn(id) else { continue };
        if others_idle == 0
            && let Err(e) = shared.spawn_worker()
        {
            tracing::warn!("no further worker thread for the RDMA server: {e}; requests wait for those there are");
        }
        // A panic of the service must cost its own connection only, not a worker.
        let served = catch_unwind(AssertUnwindSafe(|| serve(shared, &conn)));
        match served.unwrap_or_else(|_| End::Close(Error::new(ErrorKind::Io(5), "the service panicked"))) {
            End::Parked => {}
            End::Closed => shared.remove(&conn),
            End::Close(error) => {
                tracing::warn!("connection of {} closed: {error}", conn.state.endpoints().peer);
                shared.remove(&conn);
            }
        }
    }
}

enum End {
    /// Nothing has arrived for now; the next arrival is an event.
    Parked,
    /// The reader ended it between two requests.
    Closed,
    /// It can't go on.
    Close(Error),
}

/// Answers requests of one connection until it has none for a while.
fn serve(shared: &Shared, conn: &Conn) -> End {
    let mut session = conn.session.lock();
    let mut served = false;
    loop {
        match session.take(Instant::now() + shared.config.send_timeout) {
            Ok(Some(Arrived::Frame(MessageKind::Request, region))) => {
                served = true;
                if let Next::Close(error) = answer(shared, conn, &mut session, region) {
                    // The reader learns of it by the end of the connection.
                    session.pair.disconnect();
                    return End::Close(error);
                }
                continue;
            }
            Ok(Some(Arrived::Part | Arrived::Grant)) => continue,
            Ok(Some(other)) => {
                session.pair.disconnect();
                return End::Close(Error::new(ErrorKind::Protocol, format!("{other:?} came from a reader")));
            }
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Unavailable && session.line.assembly.begun().is_none() => {
                tracing::debug!("connection of {} ended: {error}", conn.state.endpoints().peer);
                return End::Closed;
            }
            Err(error) => {
                session.pair.disconnect();
                return End::Close(error);
            }
        }
        if shared.stopping.load(Ordering::Acquire) {
            return End::Closed;
        }
        // While another worker waits for events this one can wait for the next request here.
        let others_idle = shared.idle.load(Ordering::Acquire) > 0;
        if others_idle && served && matches!(session.pair.wait(Instant::now() + shared.config.linger), Ok(true)) {
            continue;
        }
        // A reader has one request under way, so between two of them there is a moment in which others get their turn.
        if !matches!(session.pair.arm(), Ok(false)) {
            continue;
        }
        return match shared.park(conn, &session) {
            Ok(()) => End::Parked,
            Err(e) => End::Close(Error::io("parking the connection failed", &e.into())),
        };
    }
}

fn answer(shared: &Shared, conn: &Conn, session: &mut Session, region: Region) -> Next {
    // The request is taken out, as answering needs the rest of the session.
    let assembly = std::mem::take(&mut session.line.assembly);
    let next = match assembly.frame() {
        Err(error) => Next::Close(error),
        Ok((header, body)) => {
            let timeout = shared.config.send_timeout;
            let mut to = RdmaResponder::new(session, &conn.memory, &header, region, conn.max_message, timeout);
            let next = dispatch(&conn.state, &header, body, &*shared.service, &mut to);
            let (sent, writes, writing) = (to.sent() as u64, to.writes, to.writing);
            shared.stats.rdma.write_bytes.add(sent);
            shared.stats.rdma.w_ops.add(writes);
            shared.stats.rdma.w_us.add_us(writing);
            next
        }
    };
    if session.line.assembly.begun().is_none() {
        session.line.assembly = assembly;
    }
    next
}
