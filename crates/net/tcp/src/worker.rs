//! Serves a readable connection: answers the requests, then parks the connection. Knows neither listeners nor the meaning of
//! requests.

use crate::secure::{NodeEnd, ReceiveStop, tls_only};
use crate::server::{PARKED, TcpConnection, TcpServerState};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use spurline_mem::PoolBuf;
use spurline_proto::{FrameError, FrameHeader, FrameOp, HEADER_LEN, frame_padding};
use spurline_transport::{
    AdmissionGate, FrameResponder, FrameSink, NextStep, PooledServer as _, Responder as _, ServeOutcome, WorkerPool,
    dispatch_request,
};
use spurline_trust::RefusalReason;
use spurline_types::{Error, ErrorKind, Result};
use std::io::IoSlice;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Requests answered on a connection before other connections get a turn, when no worker is idle.
const REQUESTS_PER_TURN: u32 = 32;
/// Requests answered on a connection before the worker first checks the reader's CPU; the interval doubles each time.
const FIRST_CPU_CHECK: u32 = 64;
/// The first byte of a TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;
/// Bytes of a file encrypted at once.
const FILE_PIECE: usize = 256 << 10;
/// Bytes received at once from a connection that writes: the next request and little of the bytes behind, which then go directly
/// into another buffer.
const WRITER_PIECE: usize = 2 << 10;
/// Slices passed to a `sendmsg`.
const MAX_SEND_SLICES: usize = 34;

/// Answers requests of a connection until idle; with `control_only` handshakes and heartbeats only.
pub(crate) fn serve_connection(
    shared: &TcpServerState,
    conn: &TcpConnection,
    inbox: &mut [u8],
    control_only: bool,
) -> ServeOutcome {
    let ReceivedPart { mut filled, mut here, mut begun } = take_received_part(conn, inbox);
    let mut turn = 0u32;
    let mut writes = false;
    // The event reported readable bytes, so the first receive does not wait.
    let mut wait = false;
    loop {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let until = if writes && filled < WRITER_PIECE { WRITER_PIECE } else { inbox.len() };
        let received = match here {
            0 => receive_bytes(conn, &mut inbox[filled..until], flags),
            // Another thread has received the bytes.
            _ => Ok(std::mem::take(&mut here)),
        };
        match received {
            Ok(0) if filled == 0 => return ServeOutcome::Closed,
            Ok(0) => {
                return ServeOutcome::Failed(Error::new(
                    ErrorKind::Protocol,
                    "the reader closed it in the middle of a request",
                ));
            }
            Ok(n) => filled += n,
            Err(ReceiveStop::Tls(error)) => return refuse_tls(shared, conn, &error),
            Err(ReceiveStop::Plain(begin)) => return refuse_plain(shared, conn, &begin),
            Err(ReceiveStop::Os(Errno::INTR)) => continue,
            Err(ReceiveStop::Os(Errno::AGAIN)) => {
                if filled > 0 {
                    let since = Some(begun.unwrap_or_else(Instant::now));
                    *conn.partial.lock() = Some((inbox[..filled].to_vec(), since));
                }
                return park_connection(shared, conn);
            }
            Err(ReceiveStop::Os(Errno::CONNRESET | Errno::TIMEDOUT | Errno::PIPE)) => return ServeOutcome::Closed,
            Err(ReceiveStop::Os(e)) => return ServeOutcome::Failed(Error::io("receiving failed", &e.into())),
        }
        let mut at = 0;
        loop {
            let RequestFrame { header, body, len } = match first_frame(conn, &inbox[at..filled]) {
                Ok(Some(frame)) => frame,
                Ok(None) => break,
                Err(e) => return no_frame(shared, conn, inbox[at], e),
            };
            if control_only
                && !matches!(header.op, FrameOp::Hello | FrameOp::Challenge | FrameOp::Prove | FrameOp::Ping)
            {
                *conn.partial.lock() = Some((inbox[at..filled].to_vec(), None));
                return ServeOutcome::Deferred;
            }
            at += len;
            let payload_len = if conn.state.accepts_payload(&header) { header.payload_len as usize } else { 0 };
            let on_wire = payload_len + frame_padding(payload_len).len();
            let next = if let Some(payload) = inbox[at..filled].get(..on_wire) {
                at += on_wire;
                answer_request(shared, conn, &header, body, &payload[..payload_len])
            } else {
                let payload = match receive_payload(shared, conn, &inbox[at..filled], on_wire) {
                    Ok(payload) => payload,
                    Err(outcome) => return outcome,
                };
                at = filled;
                answer_request(shared, conn, &header, body, &payload[..payload_len])
            };
            writes = payload_len > 0;
            if let NextStep::Close(error) = next {
                return ServeOutcome::Failed(error);
            }
            turn = turn.saturating_add(1);
            end_turn(shared, conn, turn);
        }
        if at > 0 {
            inbox.copy_within(at..filled, 0);
            filled -= at;
            begun = None;
        }
        if filled > 0 {
            if let Err(e) = FrameHeader::check_start(&inbox[..filled]) {
                return no_frame(shared, conn, inbox[0], e);
            }
            begun.get_or_insert_with(Instant::now);
        }
        if shared.worker_pool().stopping() {
            return ServeOutcome::Closed;
        }
        let others_idle = shared.worker_pool().others_idle();
        // Received ciphertext that is not decrypted yet raises no epoll event.
        let nothing_left = conn.tls.as_ref().is_none_or(|tls| tls.lock().is_empty());
        let turn_is_over = !others_idle && turn >= REQUESTS_PER_TURN || control_only && conn.state.for_data();
        if turn_is_over && filled == 0 && nothing_left {
            return park_connection(shared, conn);
        }
        // While another worker waits for events, this worker can wait for the next request here.
        wait = others_idle && !control_only;
    }
}

/// Received bytes at the start of a worker's inbox, which the worker before has left.
struct ReceivedPart {
    /// Bytes that a receive follows.
    filled: usize,
    /// Bytes that no receive follows, as these hold a whole request.
    here: usize,
    /// When the first byte arrived.
    begun: Option<Instant>,
}

fn take_received_part(conn: &TcpConnection, inbox: &mut [u8]) -> ReceivedPart {
    let Some((bytes, begun)) = conn.partial.lock().take() else {
        return ReceivedPart { filled: 0, here: 0, begun: None };
    };
    inbox[..bytes.len()].copy_from_slice(&bytes);
    if begun.is_some() {
        ReceivedPart { filled: bytes.len(), here: 0, begun }
    } else {
        ReceivedPart { filled: 0, here: bytes.len(), begun }
    }
}

/// Receives bytes of requests, decrypted where the connection is.
fn receive_bytes(conn: &TcpConnection, room: &mut [u8], flags: RecvFlags) -> std::result::Result<usize, ReceiveStop> {
    match &conn.tls {
        None => recv(&conn.socket, room, flags).map(|(_, n)| n).map_err(ReceiveStop::Os),
        Some(tls) => tls.lock().receive_plain(&conn.socket, room, flags, &|binding| conn.state.set_binding(binding)),
    }
}

/// A request without payload.
struct RequestFrame<'a> {
    header: FrameHeader,
    body: &'a [u8],
    /// Bytes of header, body and padding.
    len: usize,
}

/// The first request of received bytes; `None` until the request is whole.
fn first_frame<'a>(
    conn: &TcpConnection,
    received: &'a [u8],
) -> std::result::Result<Option<RequestFrame<'a>>, FrameError> {
    let Some(head) = received.first_chunk::<HEADER_LEN>() else { return Ok(None) };
    let header = FrameHeader::decode(head)?;
    // A length above the limit is refused before any byte of the body is awaited.
    let body_len = header.body_len as usize;
    let len = if body_len <= conn.state.max_body() {
        HEADER_LEN + body_len + frame_padding(body_len).len()
    } else {
        HEADER_LEN
    };
    let Some(frame) = received.get(..len) else { return Ok(None) };
    let body = frame[HEADER_LEN..].get(..body_len).unwrap_or_default();
    Ok(Some(RequestFrame { header, body, len }))
}

/// Lets other workers and the reader's processor have a turn after a number of requests.
fn end_turn(shared: &TcpServerState, conn: &TcpConnection, requests: u32) {
    if requests.is_multiple_of(REQUESTS_PER_TURN) {
        shared.worker_pool().renew_permit();
    }
    if requests >= FIRST_CPU_CHECK && requests.is_power_of_two() {
        move_to_reader_cpu(&conn.socket);
    }
}

/// Receives the bytes behind a request into a buffer of the budget; `here` is the start of the bytes.
fn receive_payload(
    shared: &TcpServerState,
    conn: &TcpConnection,
    here: &[u8],
    len: usize,
) -> std::result::Result<PoolBuf, ServeOutcome> {
    let deadline = Instant::now() + shared.config.request_timeout;
    let Some(pool) = &shared.config.payload_pool else {
        return Err(receive_failed(Error::new(ErrorKind::Unsupported, "this server has no memory for them")));
    };
    // Neither the memory nor the bytes have to be there, and other requests are answered meanwhile.
    let mut buffer = match pool.try_alloc(len) {
        Some(buffer) => buffer,
        None => {
            shared.worker_pool().release_permit();
            pool.alloc(len, deadline).map_err(receive_failed)?
        }
    };
    buffer[..here.len()].copy_from_slice(here);
    let mut got = here.len();
    let mut flags = RecvFlags::DONTWAIT;
    while got < len {
        let received = match &conn.tls {
            None => recv(&conn.socket, &mut buffer[got..len], flags).map(|(_, n)| n),
            Some(tls) => match tls.lock().receive_plain(&conn.socket, &mut buffer[got..len], flags, &|_| {}) {
                Ok(n) => Ok(n),
                Err(ReceiveStop::Os(e)) => Err(e),
                Err(ReceiveStop::Tls(error)) => return Err(refuse_tls(shared, conn, &error)),
                Err(ReceiveStop::Plain(begin)) => return Err(refuse_plain(shared, conn, &begin)),
            },
        };
        match received {
            Ok(0) => {
                let why = format!("the reader closed the connection after {got} of {len} bytes");
                return Err(receive_failed(Error::new(ErrorKind::Protocol, why)));
            }
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) if Instant::now() >= deadline || shared.worker_pool().stopping() => {
                let why = format!("{got} of {len} bytes came within {:?}", shared.config.request_timeout);
                return Err(receive_failed(Error::new(ErrorKind::Timeout, why)));
            }
            Err(Errno::AGAIN) => {
                if flags == RecvFlags::DONTWAIT {
                    shared.worker_pool().release_permit();
                }
                flags = RecvFlags::WAITALL;
            }
            Err(e) => return Err(receive_failed(Error::io("the connection failed", &e.into()))),
        }
    }
    Ok(buffer)
}

fn receive_failed(error: Error) -> ServeOutcome {
    ServeOutcome::Failed(error.context("receiving the bytes of a write"))
}

/// Whether the reader closed the connection. The request then was sent to another node, and must not be executed here any more:
/// this process may have been stopped since the arrival.
fn has_hung_up(socket: &TcpStream) -> bool {
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut fds = [PollFd::new(socket, PollFlags::RDHUP)];
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    matches!(poll(&mut fds, Some(&at_once)), Ok(1..)) && fds[0].revents().intersects(gone)
}

/// Moves this thread once to the CPU where the connection's packets arrive. Two busy pairs of threads placed crosswise look
/// balanced to the kernel and stay that way, and each request wakes the other CPU twice.
fn move_to_reader_cpu(socket: &TcpStream) {
    if let Ok(cpu) = rustix::net::sockopt::socket_incoming_cpu(socket) {
        spurline_exec::move_to_cpu(cpu as usize);
    }
}

/// Waits for the connection's next bytes without a thread.
fn park_connection(shared: &TcpServerState, conn: &TcpConnection) -> ServeOutcome {
    match shared.worker_pool().park_connection(&conn.socket, &conn.state, PARKED) {
        Ok(()) => ServeOutcome::Parked,
        Err(_) => ServeOutcome::Closed,
    }
}

fn answer_request(
    shared: &TcpServerState,
    conn: &TcpConnection,
    header: &FrameHeader,
    body: &[u8],
    payload: &[u8],
) -> NextStep {
    shared.stats.tcp.recv_bytes.add(payload.len() as u64);
    let timeout = shared.config.send_timeout;
    let worker_pool = Some(shared.worker_pool());
    let mut sink = SocketSink { socket: &conn.socket, tls: conn.tls.as_ref(), worker_pool, timeout, deadline: None };
    let mut responder = FrameResponder::new(&mut sink, header);
    let gate = AdmissionGate(shared, &*shared.service);
    let next = dispatch_request(&conn.state, header, body, payload, &gate, &mut responder);
    let sent = responder.sent() as u64;
    shared.stats.tcp.send_bytes.add(sent);
    next
}

/// Sends an answer's bytes.
struct SocketSink<'a> {
    socket: &'a TcpStream,
    tls: Option<&'a Mutex<NodeEnd>>,
    /// The pool to notify before a wait.
    worker_pool: Option<&'a WorkerPool>,
    timeout: Duration,
    /// Set by the first send.
    deadline: Option<Instant>,
}

impl SocketSink<'_> {
    /// The deadline for the whole answer, of which `left` bytes remain at the first call.
    fn deadline(&mut self, left: usize) -> Instant {
        let patience = self.timeout + Duration::from_secs((left >> 20) as u64);
        *self.deadline.get_or_insert_with(|| Instant::now() + patience)
    }

    /// Called after a partial send.
    fn check_deadline(&mut self, left: usize) -> Result<()> {
        if Instant::now() >= self.deadline(left) { Err(too_slow(left)) } else { Ok(()) }
    }

    /// The kernel can't encrypt: the file's bytes pass through user space.
    fn send_sealed_file(&mut self, tls: &Mutex<NodeEnd>, file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()> {
        let deadline = self.deadline(len);
        let mut buffer = vec![0; len.min(FILE_PIECE)];
        let mut done = 0;
        while done < len {
            let piece = buffer.len().min(len - done);
            match rustix::io::pread(file, &mut buffer[..piece], offset + done as u64) {
                Ok(0) => return Err(file_too_short(len - done)),
                Ok(n) => {
                    let parts = std::iter::once(&buffer[..n]);
                    tls.lock().seal_and_send(self.socket, parts, deadline).map_err(|e| sealed_error(&e, len - done))?;
                    done += n;
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("reading a file to send failed", &e.into())),
            }
        }
        Ok(())
    }
}

impl FrameSink for SocketSink<'_> {
    fn before_wait(&mut self) {
        if let Some(worker_pool) = self.worker_pool {
            worker_pool.release_permit();
        }
    }

    fn check_reader(&mut self) -> Result<()> {
        if has_hung_up(self.socket) {
            let why = "the reader closed the connection before its request was executed";
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        Ok(())
    }

    fn send_parts(&mut self, head: &[u8], slices: &[&[u8]], tail: [&[u8]; 2], more: bool) -> Result<()> {
        let mut parts = std::iter::once(head).chain(slices.iter().copied()).chain(tail);
        let mut left = parts.clone().map(<[u8]>::len).sum::<usize>();
        if let Some(tls) = self.tls {
            let deadline = self.deadline(left);
            return tls.lock().seal_and_send(self.socket, parts, deadline).map_err(|e| sealed_error(&e, left));
        }
        let mut rest: &[u8] = &[];
        let mut filled = [IoSlice::new(&[]); MAX_SEND_SLICES];
        while left > 0 {
            // Gather the unsent bytes: the rest of a partly sent slice, then further slices.
            let mut n = 0;
            let mut batch = 0;
            while n < MAX_SEND_SLICES {
                let part = if rest.is_empty() { parts.next() } else { Some(std::mem::take(&mut rest)) };
                let Some(part) = part else { break };
                if !part.is_empty() {
                    filled[n] = IoSlice::new(part);
                    batch += part.len();
                    n += 1;
                }
            }
            let mut window = &mut filled[..n];
            let mut flags = SendFlags::NOSIGNAL;
            if more || batch < left {
                flags |= SendFlags::MORE;
            }
            while batch > 0 {
                match sendmsg(self.socket, window, &mut SendAncillaryBuffer::default(), flags) {
                    Ok(sent) => {
                        batch -= sent;
                        left -= sent;
                        if batch > 0 {
                            IoSlice::advance_slices(&mut window, sent);
                            self.check_deadline(left)?;
                        }
                    }
                    Err(Errno::INTR) => {}
                    // The socket's send timeout passed and no byte was accepted.
                    Err(Errno::AGAIN) => return Err(too_slow(left)),
                    Err(e) => return Err(reader_gone(e)),
                }
            }
        }
        Ok(())
    }

    fn send_file(&mut self, file: BorrowedFd<'_>, offset: u64, len: usize, _more: bool) -> Result<()> {
        if let Some(tls) = self.tls {
            return self.send_sealed_file(tls, file, offset, len);
        }
        let mut at = offset;
        let mut left = len;
        while left > 0 {
            match rustix::fs::sendfile(self.socket, file, Some(&mut at), left) {
                Ok(0) => return Err(file_too_short(left)),
                Ok(sent) => {
                    left -= sent;
                    if left > 0 {
                        self.check_deadline(left)?;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(too_slow(left)),
                Err(e @ (Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT)) => return Err(reader_gone(e)),
                Err(e) => return Err(Error::io("sending from a file failed", &e.into())),
            }
        }
        Ok(())
    }
}

fn file_too_short(left: usize) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the file ends {left} bytes before the end of the answer"))
}

fn sealed_error(e: &std::io::Error, left: usize) -> Error {
    match e.kind() {
        std::io::ErrorKind::TimedOut => too_slow(left),
        _ => Error::new(ErrorKind::Unavailable, format!("the reader is gone: {e}")),
    }
}

/// Ends a connection that sent bytes, starting with `first`, that are no frame.
fn no_frame(shared: &TcpServerState, conn: &TcpConnection, first: u8, why: FrameError) -> ServeOutcome {
    if conn.tls.is_some() || first != TLS_HANDSHAKE {
        return ServeOutcome::Failed(why.into());
    }
    let why = "the peer begins with TLS, and this node was started without --tls";
    refuse_tls(shared, conn, &Error::new(ErrorKind::Protocol, why))
}

/// Ends a connection after a failed TLS handshake.
fn refuse_tls(shared: &TcpServerState, conn: &TcpConnection, why: &Error) -> ServeOutcome {
    shared.refusals.record_refusal(&conn.state.endpoints().peer, RefusalReason::Tls, why);
    ServeOutcome::Closed
}

/// The same for a peer without TLS, which gets a plain answer.
fn refuse_plain(shared: &TcpServerState, conn: &TcpConnection, begin: &[u8]) -> ServeOutcome {
    if let Some(Ok(header)) = begin.first_chunk().map(FrameHeader::decode) {
        let timeout = shared.config.send_timeout;
        let mut sink = SocketSink { socket: &conn.socket, tls: None, worker_pool: None, timeout, deadline: None };
        // The connection is refused in any case.
        let _ = FrameResponder::new(&mut sink, &header).send_error(&tls_only());
    }
    refuse_tls(shared, conn, &tls_only())
}

fn too_slow(left: usize) -> Error {
    Error::new(ErrorKind::Timeout, format!("the reader does not receive its answer, {left} bytes are left"))
}

fn reader_gone(e: Errno) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the reader is gone: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;

    #[test]
    fn a_worker_that_comes_to_its_reader_may_run_where_it_could_before() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut socket, _) = listener.accept().unwrap();
        let before = sched_getaffinity(None).unwrap();
        for cpu in (0..CpuSet::MAX_CPU).filter(|cpu| before.is_set(*cpu)) {
            // The reader's packets arrive where it sends them, on this host.
            let mut only = CpuSet::new();
            only.set(cpu);
            sched_setaffinity(None, &only).unwrap();
            reader.write_all(b"?").unwrap();
            socket.read_exact(&mut [0]).unwrap();
            sched_setaffinity(None, &before).unwrap();
            move_to_reader_cpu(&socket);
            assert!(sched_getaffinity(None).unwrap() == before, "after packets on CPU {cpu}");
        }
    }
}
