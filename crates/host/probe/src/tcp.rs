//! Operations over TCP: plain sends from memory, receives of whole pieces. No allocation and no thread switch per
//! operation. Knows no control connection.
//!
//! A read is requested by number, a write is answered by the count of bytes received so far, an echo needs neither. The stream
//! contains no other bytes.

use crate::drive::StreamMeter;
use crate::message::{ProbeOp, ProbePlan, TcpView};
use crate::stream::{ProbeStream, StopSignal, StreamProgress, WAIT_TICK};
use crate::tcp_info;
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketType, recv, send, sockopt};
use spurline_types::{Congestion, Error, ErrorKind, Result};
use std::net::TcpStream;
use std::time::Instant;

/// Bytes per receive: whole pieces cost a fraction of the wake-ups of plain receives.
const RECEIVE_BYTES: usize = 256 << 10;
/// Memory of each stream in bytes; longer operations reuse the memory.
const STREAM_BUFFER_BYTES: usize = 1 << 20;
/// Least memory in bytes, so that several small operations fit a receive.
const MIN_BUFFER: usize = 64 << 10;
/// Bytes of a request, and of a write's answer.
const REQUEST_WORD_BYTES: usize = 8;
/// From this size on a writer polls for answers after every operation, at the cost of a system call.
const POLL_FROM: u64 = 64 << 10;

/// A socket whose calls time out after a tick.
struct TimedSocket {
    socket: TcpStream,
}

impl TimedSocket {
    fn new(socket: TcpStream, plan: &ProbePlan) -> Result<Self> {
        set_congestion(&socket, plan.congestion)
            .map_err(|e| Error::io(format_args!("congestion control {}", plan.congestion), &e))?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, Some(WAIT_TICK))
            .and_then(|()| sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(WAIT_TICK)))
            .map_err(|e| Error::io("can't set a timeout", &e.into()))?;
        Ok(TimedSocket { socket })
    }

    /// A receive; `None` when nothing arrived within the tick.
    fn receive_some(&self, into: &mut [u8], flags: RecvFlags) -> Result<Option<usize>> {
        loop {
            match recv(&self.socket, &mut *into, flags) {
                // With MSG_TRUNC the second number is the count of discarded bytes, and the buffer stays empty.
                Ok((_, 0)) => return Err(Error::new(ErrorKind::Unavailable, "the other end closed the connection")),
                Ok((_, n)) => return Ok(Some(n)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(e) => return Err(connection_lost(e)),
            }
        }
    }

    /// Receives until `into` is full; `false` when the stream ends before the first byte.
    fn receive_all(&self, into: &mut [u8], stop: &StopSignal, idle: bool) -> Result<bool> {
        let mut filled = 0;
        let mut since = Instant::now();
        while filled < into.len() {
            match recv(&self.socket, &mut into[filled..], RecvFlags::WAITALL) {
                Ok((_, 0)) if filled == 0 => return Ok(false),
                Ok((_, 0)) => return Err(Error::new(ErrorKind::Unavailable, "the connection ended early")),
                Ok((_, n)) => {
                    filled += n;
                    since = Instant::now();
                }
                Err(Errno::INTR) => {}
                // Between two operations the client may pause for any time.
                Err(Errno::AGAIN) if idle && filled == 0 && !stop.is_aborted() => since = Instant::now(),
                Err(Errno::AGAIN) => stop.check_stalled(since)?,
                Err(e) => return Err(connection_lost(e)),
            }
        }
        Ok(true)
    }

    /// Sends `len` bytes out of `from`, repeatedly from the start.
    fn send_bytes(&self, from: &[u8], len: u64, stop: &StopSignal) -> Result<()> {
        let mut left = len;
        let mut since = Instant::now();
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
                Err(Errno::AGAIN) => stop.check_stalled(since)?,
                Err(e) => return Err(connection_lost(e)),
            }
        }
        Ok(())
    }
}

/// Sets the plan's congestion control. Connections are made with `auto` already.
fn set_congestion(socket: &TcpStream, choice: Congestion) -> std::io::Result<()> {
    let name = match choice {
        Congestion::Auto => return Ok(()),
        // A new socket has the system's default.
        Congestion::System => {
            sockopt::tcp_congestion(rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None)?)?
        }
        other => other.name().to_owned(),
    };
    Ok(sockopt::set_tcp_congestion(socket, &name)?)
}

fn connection_lost(e: Errno) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the connection failed: {e}"))
}

/// Memory for operations of `size` bytes; like real data, not all zero.
fn stream_memory(size: u64) -> Vec<u8> {
    let len = usize::try_from(size).unwrap_or(STREAM_BUFFER_BYTES).clamp(MIN_BUFFER, STREAM_BUFFER_BYTES);
    (0..len).map(|i| (i as u32).wrapping_mul(0x9E37_79B1).to_be_bytes()[0]).collect()
}

/// Size and flags of the next receive when `left` bytes of an operation are missing.
fn receive_size(left: u64, discard: bool) -> (usize, RecvFlags) {
    let most = usize::try_from(left).unwrap_or(RECEIVE_BYTES).min(RECEIVE_BYTES);
    let flags = if discard { RecvFlags::WAITALL | RecvFlags::TRUNC } else { RecvFlags::WAITALL };
    (most, flags)
}

/// The client's end of a stream.
pub struct TcpProbeStream {
    stream: TimedSocket,
    op: ProbeOp,
    size: u64,
    discard: bool,
    buffer: Vec<u8>,
    /// Offset of the next piece in the buffer.
    at: usize,
    /// Operations begun.
    begun: u64,
    /// Bytes that arrived; for writes, at the server.
    arrived: u64,
    /// When `arrived` last grew.
    since: Instant,
    /// Start of an incomplete answer.
    partial: [u8; REQUEST_WORD_BYTES],
    partial_len: usize,
}

impl TcpProbeStream {
    /// A stream of `plan` over an attached connection.
    ///
    /// # Errors
    /// When the socket accepts no timeout.
    pub fn new(socket: TcpStream, op: ProbeOp, plan: &ProbePlan) -> Result<Self> {
        Ok(TcpProbeStream {
            stream: TimedSocket::new(socket, plan)?,
            op,
            size: plan.size,
            discard: plan.discard,
            buffer: stream_memory(plan.size),
            at: 0,
            begun: 0,
            arrived: 0,
            since: Instant::now(),
            partial: [0; REQUEST_WORD_BYTES],
            partial_len: 0,
        })
    }

    fn count_arrived(&mut self, bytes: u64) -> StreamProgress {
        let before = self.arrived;
        self.arrived += bytes;
        self.since = Instant::now();
        StreamProgress { ops: (self.arrived / self.size - before / self.size) as u32, bytes }
    }

    /// Receives bytes of reads and echoes.
    fn receive_data(&mut self, stop: &StopSignal) -> Result<StreamProgress> {
        let missing = self.begun * self.size - self.arrived;
        // Several small answers are received together.
        let together = self.size < RECEIVE_BYTES as u64 && missing > self.size;
        let left = if together { missing } else { self.size - self.arrived % self.size };
        let (most, mut flags) = receive_size(left, self.discard);
        if together {
            flags &= !RecvFlags::WAITALL;
        }
        let end = self.buffer.len().min(self.at + most);
        match self.stream.receive_some(&mut self.buffer[self.at..end], flags)? {
            Some(n) => {
                self.at = (self.at + n) % self.buffer.len();
                Ok(self.count_arrived(n as u64))
            }
            None => stop.check_stalled(self.since).map(|()| StreamProgress::default()),
        }
    }

    /// Receives the server's counts of received bytes.
    fn receive_counts(&mut self, flags: RecvFlags) -> Result<Option<StreamProgress>> {
        let mut bytes = [0u8; REQUEST_WORD_BYTES * 64];
        let kept = self.partial_len;
        bytes[..kept].copy_from_slice(&self.partial[..kept]);
        let Some(n) = self.stream.receive_some(&mut bytes[kept..], flags)? else { return Ok(None) };
        let got = &bytes[..kept + n];
        let rest = got.len() % REQUEST_WORD_BYTES;
        let whole = &got[..got.len() - rest];
        self.partial[..rest].copy_from_slice(&got[got.len() - rest..]);
        self.partial_len = rest;
        let Some(last) = whole.last_chunk::<REQUEST_WORD_BYTES>() else { return Ok(Some(StreamProgress::default())) };
        let count = u64::from_le_bytes(*last);
        if count < self.arrived || count > self.begun * self.size {
            let why = format!("the server says {count} bytes arrived, {} were sent", self.begun * self.size);
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        let new = count - self.arrived;
        Ok(Some(self.count_arrived(new)))
    }
}

impl TcpProbeStream {
    /// Begins an operation; may block while the connection accepts no bytes.
    fn begin_operation(&mut self, stop: &StopSignal) -> Result<()> {
        if self.arrived == self.begun * self.size {
            // The time limit must not include a pause of the client itself.
            self.since = Instant::now();
        }
        self.begun += 1;
        match self.op {
            ProbeOp::Read => self.stream.send_bytes(&self.begun.to_le_bytes(), REQUEST_WORD_BYTES as u64, stop),
            _ => self.stream.send_bytes(&self.buffer, self.size, stop),
        }
    }

    /// Waits for progress, at most a tick.
    fn wait_progress(&mut self, stop: &StopSignal) -> Result<StreamProgress> {
        match self.op {
            ProbeOp::Read | ProbeOp::Echo => self.receive_data(stop),
            _ => match self.receive_counts(RecvFlags::empty())? {
                Some(moved) => Ok(moved),
                None => stop.check_stalled(self.since).map(|()| StreamProgress::default()),
            },
        }
    }

    /// Returns progress without waiting, where a check is cheap.
    fn poll_progress(&mut self) -> Result<StreamProgress> {
        if self.op == ProbeOp::Write && self.size >= POLL_FROM {
            return Ok(self.receive_counts(RecvFlags::DONTWAIT)?.unwrap_or_default());
        }
        Ok(StreamProgress::default())
    }
}

impl ProbeStream for TcpProbeStream {
    fn run_operations(&mut self, meter: &mut StreamMeter<'_>, stop: &StopSignal) -> Result<()> {
        loop {
            while meter.try_begin(stop) {
                self.begin_operation(stop)?;
                meter.record_progress(self.poll_progress()?);
            }
            if meter.under_way() == 0 {
                return Ok(());
            }
            meter.record_progress(self.wait_progress(stop)?);
        }
    }

    fn tcp_view(&self) -> Option<TcpView> {
        Some(tcp_info::connection_view(&self.stream.socket))
    }
}

/// Counts of the server's end of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ServedBytes {
    pub received: u64,
    pub sent: u64,
}

/// Serves a stream until the client closes the stream, `stop` is cut, or progress stalls; counts into `served`.
///
/// # Errors
/// When the client did not end the stream.
pub fn serve_stream(
    socket: TcpStream,
    op: ProbeOp,
    plan: &ProbePlan,
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<()> {
    let stream = TimedSocket::new(socket, plan)?;
    let mut buffer = stream_memory(plan.size);
    match op {
        ProbeOp::Read => serve_reads(&stream, plan, &buffer, stop, served),
        ProbeOp::Echo => serve_echoes(&stream, plan, &mut buffer, stop, served),
        // A plan for TCP has no other operation.
        _ => serve_writes(&stream, plan, &mut buffer, stop, served),
    }
}

fn serve_reads(
    stream: &TimedSocket,
    plan: &ProbePlan,
    data: &[u8],
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<()> {
    let mut request = [0u8; REQUEST_WORD_BYTES];
    for number in 1u64.. {
        if !stream.receive_all(&mut request, stop, true)? {
            break;
        }
        if u64::from_le_bytes(request) != number {
            let why = format!("request {} where {number} should be", u64::from_le_bytes(request));
            return Err(Error::new(ErrorKind::Protocol, why));
        }
        stream.send_bytes(data, plan.size, stop)?;
        served.sent += plan.size;
    }
    Ok(())
}

fn serve_writes(
    stream: &TimedSocket,
    plan: &ProbePlan,
    into: &mut [u8],
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<()> {
    let mut told = 0;
    // Several small operations are received together.
    let whole = plan.size >= RECEIVE_BYTES as u64;
    loop {
        let left = if whole { plan.size - served.received % plan.size } else { into.len() as u64 };
        let (most, mut flags) = receive_size(left, plan.discard);
        if !whole {
            flags &= !RecvFlags::WAITALL;
        }
        let start = (served.received % into.len() as u64) as usize;
        let end = into.len().min(start + most);
        let ticked = match recv(&stream.socket, &mut into[start..end], flags) {
            Ok((_, 0)) => return Ok(()),
            Ok((_, n)) => {
                served.received += n as u64;
                // A short count: the tick ended the wait on a slow link.
                whole && n < end - start
            }
            Err(Errno::INTR) => false,
            Err(Errno::AGAIN) if stop.is_aborted() => return Err(Error::new(ErrorKind::Timeout, "aborted")),
            Err(Errno::AGAIN) => true,
            Err(e) => return Err(connection_lost(e)),
        };
        // An answer for each operation, and on a slow link for each tick.
        let ended = served.received / plan.size > told / plan.size;
        if ended || (ticked && served.received > told) {
            told = served.received;
            stream.send_bytes(&told.to_le_bytes(), REQUEST_WORD_BYTES as u64, stop)?;
        }
    }
}

fn serve_echoes(
    stream: &TimedSocket,
    plan: &ProbePlan,
    buffer: &mut [u8],
    stop: &StopSignal,
    served: &mut ServedBytes,
) -> Result<()> {
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
        stream.send_bytes(buffer, plan.size, stop)?;
        served.sent += plan.size;
    }
}
