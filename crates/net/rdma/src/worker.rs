//! What a worker does with a connection on which something arrived: answers its requests, parks it.
//! It knows neither listeners nor what requests mean.

use crate::depths::SLOT;
use crate::hand::{Hand, park, ring};
use crate::responder::RdmaResponder;
use crate::server::{Conn, Shared};
use crate::session::{Arrived, Session};
use spurline_proto::Op;
use spurline_proto::rdma::{MessageKind, Region};
use spurline_transport::{Crewed as _, Door, End, Next, dispatch};
use spurline_trust::Reason;
use spurline_types::{Error, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Answers requests of one connection, and of those that come meanwhile, until there are none for a while; with
/// `life_only` of this one, and none for data.
pub(crate) fn serve(shared: &Shared, conn: &Arc<Conn>, life_only: bool) -> End {
    let hand = Hand::new(shared);
    if !life_only {
        conn.event(shared);
    }
    let end = attend(shared, conn, life_only, &hand);
    hand.go_round(|conn| attend(shared, conn, false, &hand));
    end
}

fn attend(shared: &Shared, conn: &Arc<Conn>, life_only: bool, hand: &Hand<'_>) -> End {
    let mut session = conn.session.lock();
    let (mut served, mut quick) = (false, false);
    loop {
        // A stranger that always has one more word to say keeps a worker no longer than a silent one.
        if conn.is_late(&shared.config) {
            session.pair.disconnect();
            let why = format!("no greeting within {:?}", shared.config.request_timeout);
            shared.refusals().refused(&conn.state.endpoints().peer, Reason::Silent, &why);
            return End::Closed;
        }
        if life_only && conn.state.for_data() {
            return ring(shared, conn);
        }
        match session.take(|| Instant::now() + shared.config.send_timeout) {
            Ok(Some(Arrived::Frame(MessageKind::Request, region))) => {
                served = true;
                let next;
                (next, quick) = answer(shared, conn, &mut session, region, hand);
                if let Next::Close(error) = next {
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
        if quick && !life_only && hand.keep(conn) {
            return End::Parked;
        }
        // While another worker waits for events this one can wait for the next request here: not where many connections
        // are busy, as then it would find requests there without falling asleep.
        let events = shared.events.load(Ordering::Relaxed);
        let lonely = events.saturating_sub(conn.seen.swap(events, Ordering::Relaxed)) <= 1;
        let lingers = served && lonely && !life_only && hand.is_empty() && shared.crew().others_idle();
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

/// Answers one request; says whether it was one of those that take no time.
fn answer(shared: &Shared, conn: &Conn, session: &mut Session, region: Region, hand: &Hand<'_>) -> (Next, bool) {
    // The request is taken out, as answering needs the rest of the session.
    let assembly = std::mem::take(&mut session.line.assembly);
    let mut quick = false;
    let next = match assembly.frame() {
        Err(error) => Next::Close(error),
        Ok((header, body)) => {
            let timeout = conn.patience(&shared.config, header.op == Op::Hello);
            quick = matches!(header.op, Op::Read | Op::ReadHere | Op::Ping) && region.len <= SLOT as u64;
            if !quick {
                hand.let_go();
            }
            let to = RdmaResponder::new(hand, session, &conn.memory, &header, region, conn.max_message, timeout);
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
    (next, quick)
}
