//! What a worker does with a connection on which something arrived: answers its requests, parks it.
//! It knows neither listeners nor what requests mean.

use crate::responder::RdmaResponder;
use crate::server::{Conn, PARKED, Shared};
use crate::session::{Arrived, Session};
use rustix::event::{EventfdFlags, eventfd};
use spurline_proto::Op;
use spurline_proto::rdma::{MessageKind, Region};
use spurline_transport::{Crewed as _, Door, End, Next, dispatch};
use spurline_trust::Reason;
use spurline_types::{Error, ErrorKind};
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Answers requests of one connection until it has none for a while; with `life_only` none for data.
pub(crate) fn serve(shared: &Shared, conn: &Conn, life_only: bool) -> End {
    let mut session = conn.session.lock();
    if !life_only {
        drop(conn.bell.lock().take());
    }
    shared.events.fetch_add(1, Ordering::Relaxed);
    let mut served = false;
    loop {
        // A stranger that always has one more word to say keeps a worker no longer than a silent one.
        if conn.is_late(&shared.config) {
            session.pair.disconnect();
            let why = format!("no greeting within {:?}", shared.config.request_timeout);
            shared.refusals().refused(&conn.state.endpoints().peer, Reason::Silent, &why);
            return End::Closed;
        }
        if life_only && conn.state.for_data() {
            return hand_over(shared, conn);
        }
        match session.take(|| Instant::now() + shared.config.send_timeout) {
            Ok(Some(Arrived::Frame(MessageKind::Request, region))) => {
                served = true;
                if let Next::Close(error) = answer(shared, conn, &mut session, region) {
                    // The reader learns of it by the end of the connection.
                    session.pair.disconnect();
                    return End::Close(error);
                }
                // A reader has one request under way, so the next is not there yet.
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
        if shared.crew().stopping() {
            return End::Closed;
        }
        // While another worker waits for events this one can wait for the next request here: not where many connections
        // are busy, as then it would find requests there without falling asleep.
        let events = shared.events.load(Ordering::Relaxed);
        let lonely = events.saturating_sub(conn.seen.swap(events, Ordering::Relaxed)) <= 1;
        let lingers = served && lonely && !life_only && shared.crew().others_idle();
        if lingers && matches!(session.pair.wait(Instant::now() + shared.config.linger), Ok(true)) {
            continue;
        }
        // A reader has one request under way, so between two of them there is a moment in which others get their turn.
        if !matches!(session.pair.arm(), Ok(false)) {
            continue;
        }
        return park(shared, conn, &session);
    }
}

/// Waits for the connection's next event without a thread.
fn park(shared: &Shared, conn: &Conn, session: &Session) -> End {
    match shared.crew().park(session.pair.fd(), &conn.state, PARKED) {
        Ok(()) => End::Parked,
        Err(e) => End::Close(Error::io("parking the connection failed", &e.into())),
    }
}

/// Leaves a connection that is asked for data to a worker. Its first request may be here already, and then nothing more
/// comes that would wake one.
fn hand_over(shared: &Shared, conn: &Conn) -> End {
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

fn answer(shared: &Shared, conn: &Conn, session: &mut Session, region: Region) -> Next {
    // The request is taken out, as answering needs the rest of the session.
    let assembly = std::mem::take(&mut session.line.assembly);
    let next = match assembly.frame() {
        Err(error) => Next::Close(error),
        Ok((header, body)) => {
            let timeout = conn.patience(&shared.config, header.op == Op::Hello);
            let crew = shared.crew();
            let to = RdmaResponder::new(crew, session, &conn.memory, &header, region, conn.max_message, timeout);
            let mut to = to.near(conn.numa_node).announcing(conn.announces);
            let next = dispatch(&conn.state, &header, body, &Door(shared, &*shared.service), &mut to);
            let (sent, writes, writing) = (to.sent() as u64, to.writes, to.writing);
            to.nearness.add_to(&shared.stats);
            shared.stats.rdma.write_bytes.add(sent);
            shared.stats.rdma.w_ops.add(writes);
            shared.stats.rdma.w_us.add_us(writing);
            next
        }
    };
    session.line.take_bodies_of(conn.state.max_body());
    if session.line.assembly.begun().is_none() {
        session.line.assembly = assembly;
    }
    next
}
