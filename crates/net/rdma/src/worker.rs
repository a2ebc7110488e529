//! Serves a connection with an event: answers the requests, then parks the connection. Knows neither listeners nor the meaning of
//! requests.

use crate::depths::{PIECE, SLOT, SOON};
use crate::polled_set::{PolledSet, park_conn, ring_bell};
use crate::rail::NumaBytes;
use crate::responder::RdmaResponder;
use crate::server::{RdmaConn, RdmaServerState};
use crate::session::{ArrivedMessage, RdmaSession};
use spurline_mem::PoolBuf;
use spurline_proto::FrameOp;
use spurline_proto::rdma::{MessageKind, PayloadRegion};
use spurline_transport::{AdmissionGate, NextStep, PooledServer as _, Responder as _, ServeOutcome, dispatch_request};
use spurline_trust::RefusalReason;
use spurline_types::{Error, ErrorKind, Result};
use spurline_verbs::RemoteRegion;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Answers requests of a connection, and of others that arrive meanwhile, until no request arrives for a while. With
/// `control_only`, only this connection's, and no data requests.
pub(crate) fn serve_conn(shared: &RdmaServerState, conn: &Arc<RdmaConn>, control_only: bool) -> ServeOutcome {
    let hand = PolledSet::new(shared);
    if !control_only {
        conn.note_event(shared);
    }
    let end = serve_until_idle(shared, conn, control_only, &hand);
    hand.poll_rounds(|conn| serve_until_idle(shared, conn, false, &hand));
    end
}

fn serve_until_idle(
    shared: &RdmaServerState,
    conn: &Arc<RdmaConn>,
    control_only: bool,
    hand: &PolledSet<'_>,
) -> ServeOutcome {
    let mut session = conn.session.lock();
    let mut served = false;
    let mut quick = false;
    loop {
        // A peer before the handshake must not occupy a worker by sending continuously.
        if conn.is_late(&shared.config) {
            session.pair.disconnect();
            let why = format!("no handshake within {:?}", shared.config.request_timeout);
            shared.refusals().record_refusal(&conn.state.endpoints().peer, RefusalReason::Silent, &why);
            return ServeOutcome::Closed;
        }
        if control_only && conn.state.for_data() {
            return ring_bell(shared, conn);
        }
        match session.take_arrived(|| Instant::now() + shared.config.send_timeout) {
            Ok(Some(ArrivedMessage::Frame(MessageKind::Request, region))) => {
                served = true;
                let next;
                (next, quick) = answer_request(shared, conn, &mut session, region, hand);
                if let NextStep::Close(error) = next {
                    // The end of the connection notifies the reader.
                    session.pair.disconnect();
                    return ServeOutcome::Failed(error);
                }
                // A reader has a single outstanding request, so the next has not arrived yet.
            }
            Ok(Some(ArrivedMessage::Part | ArrivedMessage::Grant)) => continue,
            Ok(Some(other)) => {
                session.pair.disconnect();
                return ServeOutcome::Failed(Error::new(ErrorKind::Protocol, format!("{other:?} came from a reader")));
            }
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Unavailable && session.line.assembly.begun_at().is_none() => {
                tracing::debug!("connection of {} ended: {error}", conn.state.endpoints().peer);
                return ServeOutcome::Closed;
            }
            Err(error) => {
                session.pair.disconnect();
                return ServeOutcome::Failed(error);
            }
        }
        if shared.worker_pool().stopping() {
            return ServeOutcome::Closed;
        }
        if quick && !control_only && hand.try_add(conn) {
            return ServeOutcome::Parked;
        }
        // While another worker waits for events, this worker can wait for the next request here. Not when many connections are
        // busy: the next event then has a request without sleeping.
        let events = shared.events.load(Ordering::Relaxed);
        let lonely = events.saturating_sub(conn.events_seen.swap(events, Ordering::Relaxed)) <= 1;
        let lingers = served && lonely && !control_only && hand.is_empty() && shared.worker_pool().others_idle();
        if lingers && matches!(session.pair.wait_arrival(Instant::now() + shared.config.linger), Ok(true)) {
            continue;
        }
        // A reader has a single outstanding request, so other connections are served between two requests.
        if !matches!(session.pair.arm_receive(), Ok(false)) {
            continue;
        }
        return park_conn(shared, conn, &session);
    }
}

/// Answers a request; returns whether the kind was quick.
fn answer_request(
    shared: &RdmaServerState,
    conn: &RdmaConn,
    session: &mut RdmaSession,
    region: PayloadRegion,
    hand: &PolledSet<'_>,
) -> (NextStep, bool) {
    // The request is moved out, as answering needs the rest of the session.
    let assembly = std::mem::take(&mut session.line.assembly);
    let mut quick = false;
    let next = match assembly.whole_frame() {
        Err(error) => NextStep::Close(error),
        Ok((header, body)) => {
            let timeout = conn.send_patience(&shared.config, header.op == FrameOp::Hello);
            quick = matches!(header.op, FrameOp::Read | FrameOp::Ping) && region.len <= SLOT as u64;
            if !quick {
                hand.release_all();
            }
            // Before the handshake a request has no bytes: the request is refused below.
            let payload_len = if conn.state.accepts_payload(&header) { header.payload_len as usize } else { 0 };
            let by_read = payload_len > 0 && region.len > 0;
            let mut fetched = None;
            let payload: &[u8] = if payload_len == 0 {
                &[]
            } else if !by_read {
                assembly.inline_payload(&header)
            } else if region.len != payload_len as u64 {
                let why = format!("a request with {payload_len} bytes names {} bytes of memory", region.len);
                return (NextStep::Close(Error::new(ErrorKind::Protocol, why)), false);
            } else {
                let deadline = Instant::now() + shared.config.request_timeout;
                let mut buffer = match payload_buffer(conn, payload_len, deadline, hand) {
                    Ok(buffer) => buffer,
                    // Nothing was read: the reader sends the request again.
                    Err(error) => {
                        let none = PayloadRegion::default();
                        let mut to = RdmaResponder::new(hand, session, &conn.memory, &header, none, SLOT, timeout);
                        let answered = to.send_error(&error);
                        return (answered.map_or_else(NextStep::Close, |()| NextStep::Continue), false);
                    }
                };
                if let Err(error) = fetch_payload(shared, conn, session, region, &mut buffer, deadline) {
                    return (NextStep::Close(error), false);
                }
                &fetched.insert(buffer)[..payload_len]
            };
            if payload.len() != payload_len {
                let why = format!("{} bytes came with a request that announced {payload_len}", payload.len());
                return (NextStep::Close(Error::new(ErrorKind::Protocol, why)), false);
            }
            if !by_read {
                shared.stats.rdma.recv_bytes.add(payload_len as u64);
            }
            let to = RdmaResponder::new(hand, session, &conn.memory, &header, region, conn.max_message, timeout);
            let mut to = to.near_node(conn.numa_node).with_announcements(conn.announces).after_fetch(by_read);
            let gate = AdmissionGate(shared, &*shared.service);
            let next = dispatch_request(&conn.state, &header, body, payload, &gate, &mut to);
            let sent = to.sent() as u64;
            let writes = to.writes;
            let writing = to.writing;
            to.nearness.add_to(&shared.stats);
            shared.stats.rdma.write_bytes.add(sent);
            shared.stats.rdma.w_ops.add(writes);
            shared.stats.rdma.w_us.add_us(writing);
            next
        }
    };
    session.line.set_body_limit(conn.state.max_body());
    if session.line.assembly.begun_at().is_none() {
        session.line.assembly = assembly;
    }
    (next, quick)
}

/// A buffer of the budget for the bytes of a request.
fn payload_buffer(conn: &RdmaConn, len: usize, deadline: Instant, hand: &PolledSet<'_>) -> Result<PoolBuf> {
    let pool = conn.memory.pool();
    if let Some(buffer) = pool.try_alloc(len) {
        return Ok(buffer);
    }
    // Other requests are answered meanwhile.
    hand.release_before_wait();
    pool.alloc_near(len, conn.numa_node, deadline)
}

/// Reads the bytes of a request from the reader's memory. A reader that gave the request up has destroyed the queue pair, so that
/// this fails: later contents of the memory are never read.
fn fetch_payload(
    shared: &RdmaServerState,
    conn: &RdmaConn,
    session: &mut RdmaSession,
    region: PayloadRegion,
    buffer: &mut PoolBuf,
    deadline: Instant,
) -> Result<()> {
    let len = region.len as usize;
    let mut nearness = NumaBytes::default();
    nearness.count_bytes(conn.memory.pool(), conn.numa_node, &buffer[..len]);
    let remote = RemoteRegion { addr: region.addr, len: region.len, rkey: region.rkey };
    session.pair.expect_soon(len <= SOON);
    let begun = Instant::now();
    let read = session.pair.read_region(&conn.memory, buffer, remote, PIECE.min(conn.max_message), deadline);
    read.map_err(|e| Error::from(e).context("fetching the bytes of a write"))?;
    let counted = &shared.stats.rdma;
    counted.read_bytes.add(region.len);
    counted.r_ops.add(1);
    counted.r_us.add_us(begun.elapsed());
    nearness.add_to(&shared.stats);
    Ok(())
}
