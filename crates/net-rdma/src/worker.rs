//! What a worker does with connections on which something arrived: answers their requests, one after the other.
//! It knows neither listeners nor what requests mean.

use crate::hub::Hub;
use crate::responder::RdmaResponder;
use crate::server::{Conn, Shared};
use crate::session::{Arrived, Session};
use spurline_proto::Op;
use spurline_proto::rdma::{MessageKind, Region};
use spurline_transport::{Crewed as _, End, Next, Responder as _, dispatch, say_closed};
use spurline_types::{Error, ErrorKind, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

/// How long a worker sleeps on a hub before it waits for any event: shorter than a request may take before others look
/// after what its worker has.
const LINGER: Duration = Duration::from_millis(1);

/// Answers requests of a hub's connections until there are none, or another worker looks after it.
pub(crate) fn serve(shared: &Shared, hub: &Hub) -> Result<()> {
    let crew = shared.crew();
    let ticket = hub.hold();
    let mut begun = true;
    let mut served = None;
    while !crew.stopping() {
        let found = match served.take() {
            // What came on the last connection meanwhile is known to nobody else.
            Some(number) if !hub.is_held(ticket) => {
                if hub.inlet.done(number) {
                    return Ok(());
                }
                Some(number)
            }
            served => hub.inlet.next(served)?,
        };
        let found = if found.is_none() { hub.inlet.next_soon()? } else { found };
        let Some(number) = found else {
            // The same worker goes on with the same connections where it can: it sits where its memory is.
            let again = !begun && crew.others_idle() && hub.linger(ticket, LINGER)?;
            if !hub.is_held(ticket) || !again && hub.rest(crew, ticket)? {
                return Ok(());
            }
            continue;
        };
        // The first request is begun with the event.
        if !std::mem::replace(&mut begun, false) && !crew.next_request() {
            hub.hand_over(crew, Some(ticket))?;
        }
        if let Some(conn) = shared.of_number(number) {
            serve_one(shared, hub, ticket, &conn);
        }
        served = Some(number);
    }
    Ok(())
}

/// Answers what came on one connection.
fn serve_one(shared: &Shared, hub: &Hub, ticket: u64, conn: &Conn) {
    // A panic of the service must cost its own connection only.
    let served = catch_unwind(AssertUnwindSafe(|| take_all(shared, hub, ticket, conn)));
    match served.unwrap_or_else(|_| End::Close(Error::new(ErrorKind::Io(5), "the service panicked"))) {
        End::Parked => {}
        End::Closed => shared.end(conn),
        End::Close(error) => {
            say_closed(shared.refusals(), &conn.state.endpoints().peer, &error);
            shared.end(conn);
        }
    }
}

fn take_all(shared: &Shared, hub: &Hub, ticket: u64, conn: &Conn) -> End {
    let mut session = conn.session.lock();
    loop {
        match session.take(|| Instant::now() + shared.config.send_timeout) {
            Ok(Some(Arrived::Frame(MessageKind::Request, region))) => {
                if let Next::Close(error) = answer(shared, hub, ticket, conn, &mut session, region) {
                    // The reader learns of it by the end of the connection.
                    session.pair.disconnect();
                    return End::Close(error);
                }
                if shared.crew().stopping() {
                    return End::Closed;
                }
                // A reader has one request under way: the next one is looked for with those of others.
                if !session.pair.has_more() {
                    return End::Parked;
                }
            }
            Ok(Some(Arrived::Part | Arrived::Grant)) => {}
            Ok(Some(other)) => {
                session.pair.disconnect();
                return End::Close(Error::new(ErrorKind::Protocol, format!("{other:?} came from a reader")));
            }
            Ok(None) => return End::Parked,
            Err(error) if error.kind() == ErrorKind::Unavailable && session.line.assembly.begun().is_none() => {
                tracing::debug!("connection of {} ended: {error}", conn.state.endpoints().peer);
                return End::Closed;
            }
            Err(error) => {
                session.pair.disconnect();
                return End::Close(error);
            }
        }
    }
}

fn answer(shared: &Shared, hub: &Hub, ticket: u64, conn: &Conn, session: &mut Session, region: Region) -> Next {
    // The request is taken out, as answering needs the rest of the session.
    let assembly = std::mem::take(&mut session.line.assembly);
    let next = match assembly.frame() {
        Err(error) => Next::Close(error),
        Ok((header, body)) => {
            let timeout = shared.config.send_timeout;
            let others_first = || {
                if let Err(error) = hub.hand_over(shared.crew(), Some(ticket)) {
                    tracing::error!("connections over RDMA stand still: {error}");
                }
            };
            let crew = shared.crew();
            let (memory, most) = (&conn.memory, conn.max_message);
            let to = RdmaResponder::new(crew, &others_first, session, memory, &header, region, most, timeout);
            let mut to = to.near(conn.numa_node);
            if !matches!(header.op, Op::Read | Op::Pull | Op::Ping) {
                // Any other may ask the under-store before it is answered.
                to.waits();
            }
            let next = dispatch(&conn.state, &header, body, &*shared.service, &mut to);
            let (sent, writes, writing) = (to.sent() as u64, to.writes, to.writing);
            to.nearness.add_to(&shared.stats);
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
