//! Operations over TCP: plain sends from memory, receives of whole pieces. No allocation and no hand-over per
//! operation. It knows no control connection.
//!
//! A read is asked for by its number, a write is answered by the count of bytes that arrived so far, an echo needs
//! neither. The stream is otherwise nothing but the bytes.

use crate::drive::Meter;
use crate::lane::{Lane, Moved, Stop, TICK};
use crate::message::{Op, Plan, TcpView};
use crate::tcp_info;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send, sockopt};
use spurline_types::{Congestion, Error, ErrorKind, Result};
use std::net::TcpStream;
use std::time::Instant;

/// Bytes waited for at once: whole pieces cost a fraction of the wake-ups of plain receives.
const PIECE: usize = 256 << 10;
/// Bytes of memory behind each stream; longer operations go through it again and again.
const BUFFER: usize = 1 << 20;
/// Bytes of memory for small operations, several of which are received at once.
const LEAST: usize = 64 << 10;
/// Bytes of a request and of an answer to a write.
const WORD: usize = 8;
/// From this size on a writer looks for answers after every operation, which costs a system call.
const GLANCE: u64 = 64 << 10;

/// A socket with its ticks set.
struct Stream {
    socket: TcpStream,
}

impl Stream {
    fn new(socket: TcpStream, plan: &Plan) -> Result<Self> {
        control(&socket, plan.congestion)
            .map_err(|e| Error::io(format_args!("congestion control {}", plan.congestion), &e))?;
        let set = |id| sockopt::set_socket_timeout(&socket, id, Some(TICK));
        set(sockopt::Timeout::Recv)
            .and_then(|()| set(sockopt::Timeout::Send))
            .map_err(|e| Error::io("can't set a timeout", &e.into()))?;
        Ok(Stream { socket })
    }

    /// One receive: `None` when nothing came within the tick.
    fn receive(&self, into: &mut [u8], flags: RecvFlags) -> Result<Option<usize>> {
        loop {
            match recv(&self.socket, &mut *into, flags) {
                // With MSG_TRUNC the second number is what was taken off the stream, and nothing is in the buffer.
                Ok((_, 0)) => return Err(Error::new(ErrorKind::Unavailable, "the other end closed the connection")),
                Ok((_, n)) => return Ok(Some(n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(e) => return Err(lost(e)),
            }
        }
    }

    /// Receives until `into` is full. At the end of the stream before the first byte, `false`.
    fn receive_all(&self, into: &mut [u8], stop: &Stop, idle: bool) -> Result<bool> {
        let (mut filled, mut since) = (0, Instant::now());
        while filled < into.len() {
            match recv(&self.socket, &mut into[filled..], RecvFlags::WAITALL) {
                Ok((_, 0)) if filled == 0 => return Ok(false),
                Ok((_, 0)) => return Err(Error::new(ErrorKind::Unavailable, "the connection ended midway")),
                Ok((_, n)) => (filled, since) = (filled + n, Instant::now()),
                Err(Errno::INTR) => {}
                // Between two operations a server waits as long as the client likes.
                Err(Errno::AGAIN) if idle && filled == 0 && !stop.is_cut() => since = Instant::now(),
                Err(Errno::AGAIN) => stop.still_nothing(since)?,
                Err(e) => return Err(lost(e)),
            }
        }
        Ok(true)
    }

    /// Sends `len` bytes out of `from`, again and again from its start.
    fn send(&self, from: &[u8], len: u64, stop: &Stop) -> Result<()> {
        let (mut left, mut since) = (len, Instant::now());
        let mut at = 0;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(from.len() - at);
            match send(&self.socket, &from[at..at + most], SendFlags::NOSIGNAL) {
                Ok(n) => {
                    left -= n as u64;
                    at = (at + n) % from.len();
                    since = Instant::now();
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => stop.still_nothing(since)?,
                Err(e) => return Err(lost(e)),
            }
        }
        Ok(())
    }
}

/// Sets the congestion control that the plan names. Connections come with `auto`, which is set before they are made.
fn control(socket: &TcpStream, choice: Congestion) -> std::io::Result<()> {
    let name = match choice {
        Congestion::Auto => return Ok(()),
        // A new socket has it.
        Congestion::System => {
            sockopt::tcp_congestion(rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?)?
        }
        other => other.name().to_owned(),
    };
    Ok(sockopt::set_tcp_congestion(socket, &name)?)
}

fn lost(e: Errno) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the connection failed: {e}"))
}

/// Memory for operations of `size` bytes, not all zero, as data is not.
fn memory(size: u64) -> Vec<u8> {
    let len = usize::try_from(size).unwrap_or(BUFFER).clamp(LEAST, BUFFER);
    (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]).collect()
}

/// How much to receive at once when `left` bytes of an operation are missing, and how.
fn piece(left: u64, discard: bool) -> (usize, RecvFlags) {
    let most = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
    let flags = if discard { RecvFlags::WAITALL | RecvFlags::TRUNC } else { RecvFlags::WAITALL };
    (most, flags)
}

/// The client's end of one stream.
pub struct TcpLane {
    stream: Stream,
    op: Op,
    size: u64,
    discard: bool,
    buffer: Vec<u8>,
    /// Where the next piece goes in the buffer.
    at: usize,
    /// Operations that were begun.
    begun: u64,
    /// Bytes that arrived; at the other end, for writes.
    arrived: u64,
    /// When that last grew.
    since: Instant,
    /// Bytes of an answer that has not come whole.
    partial: [u8; WORD],
    partial_len: usize,
}

impl TcpLane {
    /// A stream of `plan` over a connection that the server has attached.
    ///
    /// # Errors
    /// When the socket takes no timeouts.
    pub fn new(socket: TcpStream, op: Op, plan: &Plan) -> Result<Self> {
        Ok(TcpLane {
            stream: Stream::new(socket, plan)?,
            op,
            size: plan.size,
            discard: plan.discard,
            buffer: memory(plan.size),
            at: 0,
            begun: 0,
            arrived: 0,
            since: Instant::now(),
            partial: [0; WORD],
            partial_len: 0,
        })
    }

    fn arrive(&mut self, bytes: u64) -> Moved {
        let before = self.arrived;
        self.arrived += bytes;
        self.since = Instant::now();
        Moved { ops: (self.arrived / self.size - before / self.size) as u32, bytes }
    }

    /// Receives bytes of reads and echoes.
    fn take_data(&mut self, stop: &Stop) -> Result<Moved> {
        let missing = self.begun * self.size - self.arrived;
        // Many small answers under way are taken as they come, together.
        let together = self.size < PIECE as u64 && missing > self.size;
        let left = if together { missing } else { self.size - self.arrived % self.size };
        let (most, mut flags) = piece(left, self.discard);
        if together {
            flags &= !RecvFlags::WAITALL;
        }
        let end = self.buffer.len().min(self.at + most);
        match self.stream.receive(&mut self.buffer[self.at..end], flags)? {
            Some(n) => {
                self.at = (self.at + n) % self.buffer.len();
                Ok(self.arrive(n as u64))
            }
            None => stop.still_nothing(self.since).map(|()| Moved::default()),
        }
    }

    /// Receives the server's counts of what arrived there.
    fn take_counts(&mut self, flags: RecvFlags) -> Result<Option<Moved>> {
        let mut bytes = [0u8; WORD * 64];
        let kept = self.partial_len;
        bytes[..kept].copy_from_slice(&self.partial[..kept]);
        let Some(n) = self.stream.receive(&mut bytes[kept..], flags)? else { return Ok(None) };
        let got = &bytes[..kept + n];
        let rest = got.len() % WORD;
        let whole = &got[..got.len() - rest];
        self.partial[..rest].copy_from_slice(&got[got.len() - rest..]);
        self.partial_len = rest;
        let Some(last) = whole.last_chunk::<WORD>() else { return Ok(Some(Moved::default())) };
        let count = u64::from_le_bytes(*last);
        if count < self.arrived || count > self.begun * self.size {
            let why = format!("the server says {count} bytes arrived, {} were sent", self.begun * self.size);
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        let new = count - self.arrived;
        Ok(Some(self.arrive(new)))
    }
}

impl TcpLane {
    /// Begins an operation; may wait while the connection takes nothing.
    fn begin(&mut self, stop: &Stop) -> Result<()> {
        if self.arrived == self.begun * self.size {
            // After a pause of one's own making, patience begins anew.
            self.since = Instant::now();
        }
        self.begun += 1;
        match self.op {
            Op::Read => self.stream.send(&self.begun.to_le_bytes(), WORD as u64, stop),
            _ => self.stream.send(&self.buffer, self.size, stop),
        }
    }

    /// Waits for a tick at most until something moved.
    fn advance(&mut self, stop: &Stop) -> Result<Moved> {
        match self.op {
            Op::Read | Op::Echo => self.take_data(stop),
            _ => match self.take_counts(RecvFlags::empty())? {
                Some(moved) => Ok(moved),
                None => stop.still_nothing(self.since).map(|()| Moved::default()),
            },
        }
    }

    /// What moved meanwhile, without waiting, where that is cheap to know.
    fn glance(&mut self) -> Result<Moved> {
        if self.op == Op::Write && self.size >= GLANCE {
            return Ok(self.take_counts(RecvFlags::DONTWAIT)?.unwrap_or_default());
        }
        Ok(Moved::default())
    }
}

impl Lane for TcpLane {
    fn run(&mut self, meter: &mut Meter<'_>, stop: &Stop) -> Result<()> {
        loop {
            while meter.begin(stop) {
                self.begin(stop)?;
                meter.moved(self.glance()?);
            }
            if meter.under_way() == 0 {
                return Ok(());
            }
            meter.moved(self.advance(stop)?);
        }
    }

    fn tcp(&self) -> Option<TcpView> {
        Some(tcp_info::of(&self.stream.socket))
    }
}

/// What the server's end of a stream did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Served {
    /// Bytes it received.
    pub received: u64,
    /// Bytes it sent.
    pub sent: u64,
}

/// Serves one stream until the client closes it, `stop` cuts it, or nothing moves where something should; what was done
/// until then is in `served`.
///
/// # Errors
/// When the stream did not end by the client's leave.
pub fn serve(socket: TcpStream, op: Op, plan: &Plan, stop: &Stop, served: &mut Served) -> Result<()> {
    let stream = Stream::new(socket, plan)?;
    let mut buffer = memory(plan.size);
    match op {
        Op::Read => serve_reads(&stream, plan, &buffer, stop, served),
        Op::Echo => serve_echoes(&stream, plan, &mut buffer, stop, served),
        // A plan for TCP has no other operation.
        _ => serve_writes(&stream, plan, &mut buffer, stop, served),
    }
}

fn serve_reads(stream: &Stream, plan: &Plan, data: &[u8], stop: &Stop, served: &mut Served) -> Result<()> {
    let mut request = [0u8; WORD];
    for number in 1u64.. {
        if !stream.receive_all(&mut request, stop, true)? {
            break;
        }
        if u64::from_le_bytes(request) != number {
            let why = format!("request {} where {number} should be", u64::from_le_bytes(request));
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        stream.send(data, plan.size, stop)?;
        served.sent += plan.size;
    }
    Ok(())
}

fn serve_writes(stream: &Stream, plan: &Plan, into: &mut [u8], stop: &Stop, served: &mut Served) -> Result<()> {
    let mut told = 0;
    // Small operations are taken as they come, together.
    let whole = plan.size >= PIECE as u64;
    loop {
        let left = if whole { plan.size - served.received % plan.size } else { into.len() as u64 };
        let (most, mut flags) = piece(left, plan.discard);
        if !whole {
            flags &= !RecvFlags::WAITALL;
        }
        let start = (served.received % into.len() as u64) as usize;
        let end = into.len().min(start + most);
        let ticked = match recv(&stream.socket, &mut into[start..end], flags) {
            Ok((_, 0)) => return Ok(()),
            Ok((_, n)) => {
                served.received += n as u64;
                // Less than asked for: the tick ended the wait, the link is slow.
                whole && n < end - start
            }
            Err(Errno::INTR) => false,
            Err(Errno::AGAIN) if stop.is_cut() => return Err(Error::new(ErrorKind::Timeout, "given up")),
            Err(Errno::AGAIN) => true,
            Err(e) => return Err(lost(e)),
        };
        // An answer for every operation, and for a slow link one for every tick.
        let ended = served.received / plan.size > told / plan.size;
        if ended || (ticked && served.received > told) {
            told = served.received;
            stream.send(&told.to_le_bytes(), WORD as u64, stop)?;
        }
    }
}

fn serve_echoes(stream: &Stream, plan: &Plan, buffer: &mut [u8], stop: &Stop, served: &mut Served) -> Result<()> {
    loop {
        let mut left = plan.size;
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
            if !stream.receive_all(&mut buffer[..most], stop, left == plan.size)? {
                return Ok(());
            }
            left -= most as u64;
        }
        served.received += plan.size;
        stream.send(buffer, plan.size, stop)?;
        served.sent += plan.size;
    }
}
