//! The reader's side: a blocking socket for each channel; bytes are received directly into the caller's destination. Knows
//! neither pools nor the meaning of requests.

use crate::SocketOptions;
use crate::addr::resolve_peer;
use crate::secure::ReaderEnd;
use crate::source_address::source_towards;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags, SocketFlags, SocketType, bind,
    connect, recv, recvmsg, sendmsg, socket_with, sockopt,
};
use spurline_proto::{FrameOp, NodeRequest, frame_padding};
use spurline_transport::{
    ByteStream, CallAnswer, CallError, Channel, ChannelBreaker, ConnectionEndpoints, Connector, TransportKind,
    prove_token, receive_answer,
};
use spurline_trust::{TlsSession, Trust};
use spurline_types::{Error, ErrorKind, Result, Stats};
use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The receive timeout that stays set on a socket. Only a nearer deadline sets a shorter timeout, so calls with later deadlines
/// cost no extra system call.
const RECEIVE_TIMEOUT: Duration = Duration::from_millis(500);
/// Bytes of a request that are encrypted and sent at once.
const SEALED_PIECE: usize = 256 << 10;
/// Request buffers larger than this are released after the call.
const MAX_KEPT_BUFFER: usize = 4 << 10;

/// Makes TCP channels to a peer.
pub struct TcpConnector {
    peer: String,
    locals: Vec<IpAddr>,
    options: SocketOptions,
    trust: Arc<Trust>,
    stats: Arc<Stats>,
}

impl TcpConnector {
    /// A connector to `peer` (`host:port`). The source address is that of `locals` in the peer's network, or else that of the
    /// route.
    pub fn new(peer: &str, locals: Vec<IpAddr>, options: SocketOptions, stats: Arc<Stats>) -> Self {
        TcpConnector { peer: peer.to_owned(), locals, options, trust: Trust::without_checks(), stats }
    }

    /// The same with trust: proves what `trust` has and requires the same of the peer.
    pub fn with_trust(mut self, trust: Arc<Trust>) -> Self {
        self.trust = trust;
        self
    }

    /// Connects and returns the channel as this type.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub fn open_channel(&self, deadline: Instant) -> Result<TcpChannel> {
        self.open_one_of(&resolve_peer(&self.peer, deadline)?, deadline)
    }

    /// Tries the addresses of the name in order, each for a share of the remaining time.
    fn open_one_of(&self, addresses: &[SocketAddr], deadline: Instant) -> Result<TcpChannel> {
        let ways = addresses.iter().map(|remote| (*remote, source_towards(*remote, &self.locals)));
        let (usable, others): (Vec<_>, Vec<_>) = ways.partition(|(_, local)| self.locals.is_empty() || local.is_some());
        let mut why_not: Option<Error> = None;
        for (at, (remote, local)) in usable.iter().enumerate() {
            let until = share_deadline(Instant::now(), deadline, usable.len() - at);
            let error = match self.open_at(*remote, *local, until) {
                Ok(channel) => return Ok(channel),
                Err(error) => error,
            };
            why_not = Some(match why_not {
                Some(before) => before.prefer_informative(error),
                None => error,
            });
        }
        Err(why_not.unwrap_or_else(|| match others.first() {
            Some((remote, _)) => {
                let family = if remote.is_ipv4() { "IPv4" } else { "IPv6" };
                let has = if self.locals.iter().any(|ip| ip.is_ipv4() == remote.is_ipv4()) {
                    "only loopback ones, which lead to no other host"
                } else {
                    "none"
                };
                let why = format!("{}: {remote} needs an {family} address, --group-network has {has}", self.peer);
                Error::new(ErrorKind::Invalid, why)
            }
            None => Error::new(ErrorKind::Unavailable, format!("{}: no address", self.peer)),
        }))
    }

    fn open_at(&self, remote: SocketAddr, local: Option<IpAddr>, deadline: Instant) -> Result<TcpChannel> {
        let socket = connect_socket(remote, local, &self.options, deadline, "node")?;
        let mut channel = TcpChannel::new(socket, remote, Arc::clone(&self.stats));
        // A peer that closes an accepted connection is running.
        self.prove_identity(&mut channel, deadline).map_err(|error| match error.kind() {
            ErrorKind::Unavailable => Error::new(ErrorKind::Throttled, error.message()),
            _ => error,
        })?;
        Ok(channel)
    }

    fn prove_identity(&self, channel: &mut TcpChannel, deadline: Instant) -> Result<()> {
        let mut binding = Vec::new();
        if let Some(tls) = self.trust.tls() {
            binding = channel.stream.agree_tls(tls.connect_session(&self.peer)?, deadline)?.to_vec();
        }
        prove_token(channel, &self.trust, &binding, deadline)
    }
}

/// The deadline for the first of `left` addresses, so that none uses up the others' time.
fn share_deadline(now: Instant, deadline: Instant, left: usize) -> Instant {
    let time = deadline.saturating_duration_since(now);
    if left > 1 { now + time / u32::try_from(left).unwrap_or(u32::MAX) } else { deadline }
}

impl Connector for TcpConnector {
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>> {
        Ok(Box::new(self.open_channel(deadline)?))
    }
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }
    fn peer(&self) -> &str {
        &self.peer
    }
}

/// Connects to `remote`, from `local` if given, with the options set. `who` names the expected listener in errors.
///
/// # Errors
/// `Unavailable` when nothing listens or there is no route, `Timeout` without an answer by `deadline`, or an error of
/// the operating system.
pub fn connect_socket(
    remote: SocketAddr,
    local: Option<IpAddr>,
    options: &SocketOptions,
    deadline: Instant,
    who: &str,
) -> Result<OwnedFd> {
    let from = local.map(|ip| format!(" from {ip}")).unwrap_or_default();
    let os = |what: &str, e: Errno| match e {
        // Not an error of the operating system: the caller may try another path.
        Errno::CONNREFUSED => Error::new(
            ErrorKind::Unavailable,
            format!("{remote}{from}: connection refused: no {who} listens there; is it running, is the port right?"),
        ),
        Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::NETDOWN | Errno::TIMEDOUT | Errno::CONNRESET => {
            Error::new(ErrorKind::Unavailable, format!("{remote}{from}: {what}: {e}"))
        }
        e => Error::io(format_args!("{remote}{from}: {what}"), &e.into()),
    };
    let family = if remote.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(family, SocketType::STREAM, flags, None).map_err(|e| os("can't make a socket", e))?;
    options
        .apply_before_connect(socket.as_fd())
        .and_then(|()| options.apply_options(socket.as_fd()))
        .map_err(|e| Error::io(format_args!("{remote}{from}: can't set options"), &e))?;
    if let Some(ip) = local {
        bind(&socket, &SocketAddr::new(ip, 0)).map_err(|e| os("can't use the local address", e))?;
    }
    match connect(&socket, &remote) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            wait_ready(&socket, PollFlags::OUT, deadline)
                .and_then(|()| sockopt::socket_error(&socket))
                .and_then(|result| result)
                .map_err(|e| match e {
                    Errno::AGAIN => Error::new(
                        ErrorKind::Timeout,
                        format!("{remote}{from}: no answer to the connection attempt: the host is down or a firewall drops it"),
                    ),
                    e => os("can't connect", e),
                })?;
        }
        Err(e) => return Err(os("can't connect", e)),
    }
    rustix::io::ioctl_fionbio(&socket, false).map_err(|e| os("can't make the socket blocking", e))?;
    Ok(socket)
}

/// Waits until the socket is ready; `EAGAIN` when `deadline` passed.
fn wait_ready(socket: &OwnedFd, what: PollFlags, deadline: Instant) -> rustix::io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::AGAIN);
        }
        let timeout = Timespec::try_from(left).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
        match poll(&mut [PollFd::new(socket, what)], Some(&timeout)) {
            Ok(0) => return Err(Errno::AGAIN),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// Ends a connection from another thread; a waiting call sees the end of stream.
struct SocketBreaker {
    socket: Weak<OwnedFd>,
}

impl ChannelBreaker for SocketBreaker {
    fn break_channel(&self) {
        if let Some(socket) = self.socket.upgrade() {
            // The connection may have ended already.
            let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
        }
    }
}

/// A TCP connection of a reader.
pub struct TcpChannel {
    stream: ReaderStream,
    request: Vec<u8>,
    next_id: u64,
    broken: bool,
    /// The request sent last, while the answer has not been received.
    begun: Option<(FrameOp, u64)>,
    endpoints: ConnectionEndpoints,
    stats: Arc<Stats>,
}

struct ReaderStream {
    /// Shared with breakers, which do not keep the socket open.
    socket: Arc<OwnedFd>,
    /// The receive timeout currently set on the socket.
    timeout: Duration,
    /// The encrypted end; `None` without TLS.
    tls: Option<Box<ReaderEnd>>,
}

impl TcpChannel {
    fn new(socket: OwnedFd, remote: SocketAddr, stats: Arc<Stats>) -> Self {
        let local = rustix::net::getsockname(&socket)
            .ok()
            .and_then(|addr| SocketAddr::try_from(addr).ok())
            .map_or_else(|| "?".into(), |addr| addr.to_string());
        let endpoints = ConnectionEndpoints { kind: TransportKind::Tcp, local, peer: remote.to_string() };
        let stream = ReaderStream { socket: Arc::new(socket), timeout: Duration::ZERO, tls: None };
        TcpChannel {
            stream,
            request: Vec::with_capacity(512),
            next_id: 1,
            broken: false,
            begun: None,
            endpoints,
            stats,
        }
    }

    /// Sends a request and returns the number.
    fn send_request(&mut self, request: &NodeRequest<'_>, deadline: Instant) -> Result<u64, CallError> {
        let id = self.next_id;
        self.next_id += 1;
        self.request.clear();
        // A request that does not fit was never sent, so the channel stays usable.
        request.encode(id, &mut self.request).map_err(|e| CallError::not_sent(&e))?;
        let payload = request.payload();
        let parts = [&self.request, payload, frame_padding(payload.len())];
        self.stream.send_bytes(parts, deadline).map_err(CallError::Broken)?;
        self.stats.tcp.send_bytes.add(payload.len() as u64);
        if self.request.capacity() > MAX_KEPT_BUFFER {
            self.request = Vec::with_capacity(512);
        }
        Ok(id)
    }

    /// An error when an earlier call broke the channel or left an answer there.
    fn check_usable(&self) -> Result<(), CallError> {
        let why = match (self.broken, self.begun) {
            (true, _) => "the channel broke in an earlier call",
            (false, Some(_)) => "an earlier request is still in progress",
            (false, None) => return Ok(()),
        };
        Err(CallError::Broken(Error::new(ErrorKind::Unavailable, format!("{}: {why}", self.endpoints))))
    }

    /// Counts received bytes; closes a channel that broke.
    fn settle_result<T>(
        &mut self,
        result: Result<T, CallError>,
        payload: impl FnOnce(&T) -> usize,
        what: &dyn std::fmt::Display,
    ) -> Result<T, CallError> {
        match result {
            Ok(answer) => {
                self.stats.tcp.recv_bytes.add(payload(&answer) as u64);
                Ok(answer)
            }
            Err(CallError::Broken(error)) => {
                self.broken = true;
                // Bytes of a write that are still here must not arrive later: the write is repeated elsewhere.
                let _ = sockopt::set_socket_linger(&self.stream.socket, Some(Duration::ZERO));
                // Closing at once also stops the node from sending the rest of the answer.
                let _ = rustix::net::shutdown(&self.stream.socket, rustix::net::Shutdown::Both);
                Err(CallError::Broken(error.context(format_args!("{what} of {}", self.endpoints))))
            }
            Err(answered) => Err(answered),
        }
    }
}

impl Channel for TcpChannel {
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError> {
        self.check_usable()?;
        let result = self
            .send_request(request, deadline)
            .and_then(|id| receive_answer(&mut self.stream, request.op(), id, body, dst, progress, deadline));
        self.settle_result(result, |answer| answer.payload_len, request)
    }

    fn begin_call(&mut self, request: &NodeRequest<'_>, deadline: Instant) -> Result<(), CallError> {
        self.check_usable()?;
        let result = self.send_request(request, deadline);
        let id = self.settle_result(result, |_| 0, request)?;
        self.begun = Some((request.op(), id));
        Ok(())
    }

    fn finish_call(&mut self, body: &mut Vec<u8>, dst: &mut [u8], deadline: Instant) -> Result<CallAnswer, CallError> {
        let Some((op, id)) = self.begun.take() else {
            let why = format!("{}: no request was begun", self.endpoints);
            return Err(CallError::Answered(Error::new(ErrorKind::Invalid, why)));
        };
        let result = receive_answer(&mut self.stream, op, id, body, dst, &mut |_| {}, deadline);
        self.settle_result(result, |answer| answer.payload_len, &"the answer to a pipelined request")
    }

    fn breaker(&self) -> Option<Arc<dyn ChannelBreaker>> {
        Some(Arc::new(SocketBreaker { socket: Arc::downgrade(&self.stream.socket) }))
    }

    fn endpoints(&self) -> &ConnectionEndpoints {
        &self.endpoints
    }

    fn looks_alive(&mut self) -> bool {
        // An idle connection has nothing to read: bytes would be stray, an end of stream means that the peer closed the
        // connection.
        let mut byte = [0u8; 1];
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        let left = self.stream.tls.as_ref().is_some_and(|tls| tls.has_leftover());
        !self.broken
            && self.begun.is_none()
            && !left
            && matches!(recv(&self.stream.socket, &mut byte, flags), Err(Errno::AGAIN))
    }
}

impl ReaderStream {
    /// Performs the TLS handshake with a node; returns the channel binding.
    fn agree_tls(&mut self, sealed: TlsSession, deadline: Instant) -> Result<[u8; 32]> {
        let mut end = ReaderEnd::new(sealed);
        loop {
            let mut wire = Vec::new();
            end.sealed.flush_to(&mut wire).map_err(|e| Error::io("TLS", &e))?;
            self.send_raw([&wire, &[], &[]], deadline)?;
            if !end.sealed.is_handshaking() {
                break;
            }
            let n = self.receive_raw(end.receive_room(), &mut [], false, deadline).map_err(|e| match e.kind() {
                ErrorKind::Unavailable => e.context("the TLS handshake failed; was the node started with --tls too?"),
                _ => e,
            })?;
            end.set_received(n);
            if let Err(error) = end.decrypt_received(&mut []) {
                // Report the reason to the node.
                let mut alert = Vec::new();
                let _ = end.sealed.flush_to(&mut alert);
                let _ = self.send_raw([&alert, &[], &[]], deadline);
                return Err(error);
            }
        }
        let binding = end.sealed.channel_binding()?;
        self.tls = Some(Box::new(end));
        Ok(binding)
    }

    fn send_bytes(&mut self, parts: [&[u8]; 3], deadline: Instant) -> Result<()> {
        let Some(tls) = &mut self.tls else { return self.send_raw(parts, deadline) };
        let mut wire = Vec::new();
        for chunk in parts.iter().flat_map(|part| part.chunks(SEALED_PIECE)) {
            wire.clear();
            tls.sealed.seal_to(chunk, &mut wire).map_err(|e| Error::io("TLS", &e))?;
            send_all(&self.socket, [&wire, &[], &[]], deadline)?;
        }
        Ok(())
    }

    fn send_raw(&mut self, parts: [&[u8]; 3], deadline: Instant) -> Result<()> {
        send_all(&self.socket, parts, deadline)
    }

    /// Sets the receive timeout for `deadline`; `None` after the deadline.
    fn arm_timeout(&mut self, deadline: Instant) -> Option<rustix::io::Result<()>> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return None;
        }
        // A zero timeout would mean none at all.
        let wanted = left.clamp(Duration::from_millis(1), RECEIVE_TIMEOUT);
        if wanted < self.timeout
            || (wanted == RECEIVE_TIMEOUT && self.timeout != RECEIVE_TIMEOUT)
            || self.timeout.is_zero()
        {
            self.timeout = wanted;
            return Some(sockopt::set_socket_timeout(&self.socket, sockopt::Timeout::Recv, Some(wanted)));
        }
        Some(Ok(()))
    }
}

/// Sends `parts` in order.
fn send_all(socket: &OwnedFd, parts: [&[u8]; 3], deadline: Instant) -> Result<()> {
    let mut slices = parts.map(IoSlice::new);
    let mut left = &mut slices[..];
    // Leading empty parts count as sent.
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match sendmsg(socket, left, &mut SendAncillaryBuffer::default(), flags) {
            Ok(n) => IoSlice::advance_slices(&mut left, n),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => match wait_ready(socket, PollFlags::OUT, deadline) {
                Ok(()) => {}
                Err(Errno::AGAIN) => {
                    let why = "the peer did not accept the request before the deadline";
                    return Err(Error::new(ErrorKind::Timeout, why));
                }
                Err(e) => return Err(connection_lost(e)),
            },
            Err(e) => return Err(connection_lost(e)),
        }
    }
    Ok(())
}

impl ByteStream for ReaderStream {
    fn receive_into(&mut self, first: &mut [u8], second: &mut [u8], all: bool, deadline: Instant) -> Result<usize> {
        let Some(mut tls) = self.tls.take() else { return self.receive_raw(first, second, all, deadline) };
        let received = loop {
            match tls.decrypt_received(first) {
                Ok(0) => {}
                Ok(n) if n < first.len() || second.is_empty() => break Ok(n),
                Ok(n) => break tls.decrypt_received(second).map(|more| n + more),
                Err(error) => break Err(error),
            }
            match self.receive_raw(tls.receive_room(), &mut [], false, deadline) {
                Ok(n) => tls.set_received(n),
                Err(error) => break Err(error),
            }
        };
        self.tls = Some(tls);
        received
    }
}

impl ReaderStream {
    fn receive_raw(&mut self, first: &mut [u8], second: &mut [u8], all: bool, deadline: Instant) -> Result<usize> {
        let mut flags = if all { RecvFlags::WAITALL } else { RecvFlags::empty() };
        loop {
            match self.arm_timeout(deadline) {
                // Bytes that are here arrived in time: this process may have been suspended.
                None => flags |= RecvFlags::DONTWAIT,
                Some(Err(e)) => return Err(connection_lost(e)),
                Some(Ok(())) => {}
            }
            let result = if second.is_empty() {
                recv(&self.socket, &mut *first, flags).map(|(_, n)| n)
            } else {
                let mut parts = [IoSliceMut::new(first), IoSliceMut::new(second)];
                recvmsg(&self.socket, &mut parts, &mut RecvAncillaryBuffer::default(), flags).map(|m| m.bytes)
            };
            match result {
                Ok(0) => {
                    let why = "the peer closed the connection before it answered (stopped, or at its connection limit)";
                    return Err(Error::new(ErrorKind::Unavailable, why));
                }
                Ok(n) => return Ok(n),
                Err(Errno::AGAIN) if flags.contains(RecvFlags::DONTWAIT) => {
                    return Err(Error::new(ErrorKind::Timeout, "no answer before the deadline"));
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(e) => return Err(connection_lost(e)),
            }
        }
    }
}

/// The error of a connection that failed in use: by whatever name of the operating system, the peer is unreachable.
fn connection_lost(e: Errno) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the connection failed: {e}"))
}

/// Connects for the bare reader, which uses no frames.
pub(crate) fn bare_connect(remote: SocketAddr, options: &SocketOptions, deadline: Instant) -> Result<TcpStream> {
    connect_socket(remote, None, options, deadline, "reader's server").map(TcpStream::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::time::Duration;

    #[test]
    fn each_address_has_its_share_of_the_time() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let deadline = now + second * 9;
        assert_eq!(share_deadline(now, deadline, 3), now + second * 3);
        // What one did not use is the others'.
        assert_eq!(share_deadline(now + second, deadline, 2), now + second * 5);
        assert_eq!(share_deadline(now + second * 5, deadline, 1), deadline);
        assert_eq!(share_deadline(deadline + second, deadline, 2), deadline + second);
    }

    #[test]
    fn an_address_at_which_no_node_answers_is_not_the_last_one_tried() {
        // The first closes the connection before the proof of the token.
        let (stranger, node) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [stranger.local_addr().unwrap(), node.local_addr().unwrap()];
        let refuser = std::thread::spawn(move || drop(stranger.accept()));
        let tokens = spurline_trust::GroupTokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap();
        let trust = Trust::with_tokens("mount", tokens);
        let connector = TcpConnector::new("n1:7000", Vec::new(), SocketOptions::default(), Arc::default());
        let connector = connector.with_trust(trust);
        let asked = std::thread::spawn(move || {
            let (mut socket, _) = node.accept().unwrap();
            std::io::Read::read(&mut socket, &mut [0; 16]).unwrap()
        });
        // The second gives no proof either, but receives the request for one.
        connector.open_one_of(&addresses, Instant::now() + Duration::from_secs(60)).err().unwrap();
        assert!(asked.join().unwrap() > 0);
        refuser.join().unwrap();
    }
}
