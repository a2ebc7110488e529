//! What a worker does with a connection that has something to read: answers its requests, parks it.
//! It knows neither listeners nor what requests mean.

use crate::secure::{NodeEnd, Stop, tls_only};
use crate::server::{Conn, PARKED, Shared};
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use spurline_proto::{FrameError, HEADER_LEN, Header, Op, padding};
use spurline_transport::{Crew, Crewed as _, Door, End, FrameResponder, FrameSink, Next, Responder as _, dispatch};
use spurline_trust::Reason;
use spurline_types::{Error, ErrorKind, Result};
use std::io::IoSlice;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

/// Requests answered on one connection before others get their turn, when no worker is idle.
const TURN: u32 = 32;
/// Requests a worker has answered on one connection when it first looks where its reader is, and again after twice as
/// many each time.
const LOOK_FROM: u32 = 64;
/// The first byte of a TLS connection.
const TLS_HANDSHAKE: u8 = 0x16;
/// Bytes of a file encrypted at once.
const FILE_PIECE: usize = 256 << 10;
/// Slices handed to one `sendmsg`.
const PARTS: usize = 34;

/// Answers requests of one connection until it has none for a while; with `life_only` none but greetings and signs of life.
pub(crate) fn serve(shared: &Shared, conn: &Conn, inbox: &mut [u8], life_only: bool) -> End {
    let mut filled = 0;
    let (mut begun, mut here) = (None, 0);
    if let Some((bytes, since)) = conn.partial.lock().take() {
        inbox[..bytes.len()].copy_from_slice(&bytes);
        match since {
            Some(_) => filled = bytes.len(),
            None => here = bytes.len(),
        }
        begun = since;
    }
    let mut turn = 0u32;
    // The event said that there is something: the first receive does not wait.
    let mut wait = false;
    loop {
        let flags = if wait { RecvFlags::empty() } else { RecvFlags::DONTWAIT };
        let received = match &conn.tls {
            // Another thread has received it.
            _ if here > 0 => Ok(std::mem::take(&mut here)),
            None => recv(&conn.socket, &mut inbox[filled..], flags).map(|(_, n)| n),
            Some(tls) => {
                let bind = |binding: &[u8]| conn.state.bind(binding);
                let received = tls.lock().receive(&conn.socket, &mut inbox[filled..], flags, &bind);
                match received {
                    Ok(n) => Ok(n),
                    Err(Stop::Os(e)) => Err(e),
                    Err(Stop::Tls(error)) => return refuse(shared, conn, &error),
                    Err(Stop::Plain(begin)) => return refuse_plain(shared, conn, &begin),
                }
            }
        };
        match received {
            Ok(0) if filled == 0 => return End::Closed,
            Ok(0) => {
                return End::Close(Error::new(ErrorKind::Protocol, "the reader closed it in the middle of a request"));
            }
            Ok(n) => filled += n,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => {
                if filled > 0 {
                    let since = Some(begun.unwrap_or_else(Instant::now));
                    *conn.partial.lock() = Some((inbox[..filled].to_vec(), since));
                }
                return park(shared, conn);
            }
            Err(Errno::CONNRESET | Errno::TIMEDOUT | Errno::PIPE) => return End::Closed,
            Err(e) => return End::Close(Error::io("receiving failed", &e.into())),
        }
        let mut at = 0;
        while let Some(head) = inbox[at..filled].first_chunk::<HEADER_LEN>() {
            let header = match Header::decode(head) {
                Ok(header) => header,
                Err(e) => return no_frame(shared, conn, head[0], e),
            };
            // A length above the limit is refused before any byte of the body is waited for.
            let body_len = header.body_len as usize;
            let whole = if body_len <= conn.state.max_body() {
                HEADER_LEN + body_len + padding(body_len).len()
            } else {
                HEADER_LEN
            };
            let Some(frame) = inbox[at..filled].get(..whole) else { break };
            if life_only && !matches!(header.op, Op::Hello | Op::Challenge | Op::Prove | Op::Ping) {
                *conn.partial.lock() = Some((inbox[at..filled].to_vec(), None));
                return End::Aside;
            }
            let body = frame[HEADER_LEN..].get(..body_len).unwrap_or_default();
            if let Next::Close(error) = answer(shared, conn, &header, body) {
                return End::Close(error);
            }
            at += whole;
            turn = turn.saturating_add(1);
            if turn.is_multiple_of(TURN) {
                shared.crew().goes_on();
            }
            if turn >= LOOK_FROM && turn.is_power_of_two() {
                come_to_reader(&conn.socket);
            }
        }
        if at > 0 {
            inbox.copy_within(at..filled, 0);
            filled -= at;
            begun = None;
        }
        if filled > 0 {
            if let Err(e) = Header::check_start(&inbox[..filled]) {
                return no_frame(shared, conn, inbox[0], e);
            }
            begun.get_or_insert_with(Instant::now);
        }
        if shared.crew().stopping() {
            return End::Closed;
        }
        let others_idle = shared.crew().others_idle();
        // Bytes that were received and not opened yet ring no bell.
        let nothing_left = conn.tls.as_ref().is_none_or(|tls| tls.lock().is_empty());
        let turn_is_over = !others_idle && turn >= TURN || life_only && conn.state.for_data();
        if turn_is_over && filled == 0 && nothing_left {
            return park(shared, conn);
        }
        // While another worker waits for events this one can wait for the next request here.
        wait = others_idle && !life_only;
    }
}

/// Moves this thread once to the processor on which the connection's packets arrive, and ties it to none. Two busy
/// pairs of threads that sit crosswise are balanced, so the kernel leaves them as they are, and each of their requests
/// wakes the other processor twice. Where another processor is idle the kernel moves the thread on when it next wakes.
fn come_to_reader(socket: &TcpStream) {
    let Ok(there) = rustix::net::sockopt::socket_incoming_cpu(socket) else { return };
    let there = there as usize;
    if there >= CpuSet::MAX_CPU || there == sched_getcpu() {
        return;
    }
    let Ok(anywhere) = sched_getaffinity(None) else { return };
    if !anywhere.is_set(there) {
        return;
    }
    let mut only = CpuSet::new();
    only.set(there);
    // An optimisation: refused, it changes nothing.
    if sched_setaffinity(None, &only).is_ok() {
        let _ = sched_setaffinity(None, &anywhere);
    }
}

/// Waits for the connection's next bytes without a thread.
fn park(shared: &Shared, conn: &Conn) -> End {
    match shared.crew().park(&conn.socket, &conn.state, PARKED) {
        Ok(()) => End::Parked,
        Err(_) => End::Closed,
    }
}

fn answer(shared: &Shared, conn: &Conn, header: &Header, body: &[u8]) -> Next {
    let timeout = shared.config.send_timeout;
    let crew = Some(shared.crew());
    let mut sink = Sink { socket: &conn.socket, tls: conn.tls.as_ref(), crew, timeout, deadline: None };
    let mut responder = FrameResponder::new(&mut sink, header);
    let next = dispatch(&conn.state, header, body, &Door(shared, &*shared.service), &mut responder);
    let sent = responder.sent() as u64;
    shared.stats.tcp.send_bytes.add(sent);
    next
}

/// Sends one answer's bytes.
struct Sink<'a> {
    socket: &'a TcpStream,
    tls: Option<&'a Mutex<NodeEnd>>,
    /// Where it is said that the answer waits.
    crew: Option<&'a Crew>,
    timeout: Duration,
    /// Set by the first send.
    deadline: Option<Instant>,
}

impl Sink<'_> {
    /// Until when the answer has to be taken, `left` bytes of it being left when this is asked first.
    fn deadline(&mut self, left: usize) -> Instant {
        let patience = self.timeout + Duration::from_secs((left >> 20) as u64);
        *self.deadline.get_or_insert_with(|| Instant::now() + patience)
    }

    /// Checked after a send that did not take everything.
    fn check(&mut self, left: usize) -> Result<()> {
        if Instant::now() >= self.deadline(left) { Err(too_slow(left)) } else { Ok(()) }
    }

    /// The kernel can't encrypt: the file's bytes come up here first.
    fn send_sealed_file(&mut self, tls: &Mutex<NodeEnd>, file: BorrowedFd<'_>, offset: u64, len: usize) -> Result<()> {
        let deadline = self.deadline(len);
        let mut buffer = vec![0; len.min(FILE_PIECE)];
        let mut done = 0;
        while done < len {
            let piece = buffer.len().min(len - done);
            match rustix::io::pread(file, &mut buffer[..piece], offset + done as u64) {
                Ok(0) => return Err(short(len - done)),
                Ok(n) => {
                    let parts = std::iter::once(&buffer[..n]);
                    tls.lock().send(self.socket, parts, deadline).map_err(|e| sealed_error(&e, len - done))?;
                    done += n;
                }
                Err(Errno::INTR) => {}
                Err(e) => return Err(Error::io("reading a file to send failed", &e.into())),
            }
        }
        Ok(())
    }
}

impl FrameSink for Sink<'_> {
    fn waits(&mut self) {
        if let Some(crew) = self.crew {
            crew.waits();
        }
    }

    fn send(&mut self, head: &[u8], slices: &[&[u8]], tail: [&[u8]; 2], more: bool) -> Result<()> {
        let mut parts = std::iter::once(head).chain(slices.iter().copied()).chain(tail);
        let mut left = parts.clone().map(<[u8]>::len).sum::<usize>();
        if let Some(tls) = self.tls {
            let deadline = self.deadline(left);
            return tls.lock().send(self.socket, parts, deadline).map_err(|e| sealed_error(&e, left));
        }
        let mut rest: &[u8] = &[];
        let mut filled = [IoSlice::new(&[]); PARTS];
        while left > 0 {
            // Gather what is still to send: the rest of a part sent in half, then further parts.
            let mut n = 0;
            let mut batch = 0;
            while n < PARTS {
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
                            self.check(left)?;
                        }
                    }
                    Err(Errno::INTR) => {}
                    // The socket's own send timeout passed and nothing was taken.
                    Err(Errno::AGAIN) => return Err(too_slow(left)),
                    Err(e) => return Err(gone(e)),
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
                Ok(0) => return Err(short(left)),
                Ok(sent) => {
                    left -= sent;
                    if left > 0 {
                        self.check(left)?;
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(too_slow(left)),
                Err(e @ (Errno::PIPE | Errno::CONNRESET | Errno::TIMEDOUT)) => return Err(gone(e)),
                Err(e) => return Err(Error::io("sending from a file failed", &e.into())),
            }
        }
        Ok(())
    }
}

fn short(left: usize) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the file ends {left} bytes before the end of the answer"))
}

fn sealed_error(e: &std::io::Error, left: usize) -> Error {
    match e.kind() {
        std::io::ErrorKind::TimedOut => too_slow(left),
        _ => Error::new(ErrorKind::Unavailable, format!("the reader is gone: {e}")),
    }
}

/// Ends a connection whose bytes, the first of which is given, are no frame.
fn no_frame(shared: &Shared, conn: &Conn, first: u8, why: FrameError) -> End {
    if conn.tls.is_some() || first != TLS_HANDSHAKE {
        return End::Close(why.into());
    }
    let why = "the peer begins with TLS, and this node was started without --tls";
    refuse(shared, conn, &Error::new(ErrorKind::Protocol, why))
}

/// Ends a connection with which TLS could not be agreed on.
fn refuse(shared: &Shared, conn: &Conn, why: &Error) -> End {
    shared.refusals.refused(&conn.state.endpoints().peer, Reason::Tls, why);
    End::Closed
}

/// The same for a peer that speaks without TLS: it is answered in its own words.
fn refuse_plain(shared: &Shared, conn: &Conn, begin: &[u8]) -> End {
    if let Some(Ok(header)) = begin.first_chunk().map(Header::decode) {
        let timeout = shared.config.send_timeout;
        let mut sink = Sink { socket: &conn.socket, tls: None, crew: None, timeout, deadline: None };
        // It is refused in any case.
        let _ = FrameResponder::new(&mut sink, &header).error(&tls_only());
    }
    refuse(shared, conn, &tls_only())
}

fn too_slow(left: usize) -> Error {
    Error::new(ErrorKind::Timeout, format!("the reader does not take its answer, {left} bytes are left"))
}

fn gone(e: Errno) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the reader is gone: {e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
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
            come_to_reader(&socket);
            assert!(sched_getaffinity(None).unwrap() == before, "after packets on CPU {cpu}");
        }
    }
}
