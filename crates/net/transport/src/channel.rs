//! The reader's side: a channel is a connection on a path, and a connector opens channels. Knows no pool.

use spurline_proto::{AnswerBody, FrameError, FrameOp, HelloRequest, NodeRequest, WelcomeAnswer};
use spurline_types::{Error, ErrorKind, Result};
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// What carries the bytes of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TransportKind {
    /// TCP, the bytes inline.
    Tcp,
    /// RDMA, the node writes into the reader's region.
    Rdma,
    /// Memory of this process, for tests.
    Sim,
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TransportKind::Tcp => "tcp",
            TransportKind::Rdma => "rdma",
            TransportKind::Sim => "sim",
        })
    }
}

/// Both ends of a connection, as text for logs and errors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionEndpoints {
    /// What carries the bytes.
    pub kind: TransportKind,
    /// This side's address.
    pub local: String,
    /// The other side's address.
    pub peer: String,
}

impl fmt::Display for ConnectionEndpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} over {} from {}", self.peer, self.kind, self.local)
    }
}

/// A successful answer: the body is in the caller's `body`, the payload in the caller's `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CallAnswer {
    /// How many bytes of `dst` were filled.
    pub payload_len: usize,
}

/// How a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The peer answered with an error. The channel stays usable.
    Answered(Error),
    /// The answer is incomplete. The channel must be dropped: later bytes there belong to this call.
    Broken(Error),
}

impl CallError {
    /// The error of a request that has no encoding. Such a request was never sent, so the channel stays usable.
    pub fn not_sent(error: &FrameError) -> CallError {
        CallError::Answered(Error::new(ErrorKind::Invalid, error.to_string()))
    }

    /// The error in either case.
    pub fn error(&self) -> &Error {
        match self {
            CallError::Answered(error) | CallError::Broken(error) => error,
        }
    }
    /// Whether the channel must be dropped.
    pub fn is_broken(&self) -> bool {
        matches!(self, CallError::Broken(_))
    }
    /// Adds `context: ` before the error message.
    pub fn context(self, context: impl fmt::Display) -> Self {
        match self {
            CallError::Answered(error) => CallError::Answered(error.context(context)),
            CallError::Broken(error) => CallError::Broken(error.context(context)),
        }
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl std::error::Error for CallError {}

impl From<CallError> for Error {
    fn from(e: CallError) -> Self {
        match e {
            CallError::Answered(error) | CallError::Broken(error) => error,
        }
    }
}

/// Ends the current call on a channel, and every later call, with [`CallError::Broken`]. Used when a path has failed while
/// requests there still wait for answers.
pub trait ChannelBreaker: Send + Sync {
    /// Returns at once; the call ends shortly after. Has no effect on a channel that is already closed.
    fn break_channel(&self);
}

/// A connection on a path. Carries a single call at a time, bounded by a deadline.
pub trait Channel: Send {
    /// Sends `request` and waits for the answer.
    ///
    /// The payload is written to `dst`, whose length is the largest payload accepted. `progress(n)` reports that the first `n`
    /// bytes of `dst` have arrived, in order; `progress` may be called any number of times. The answer's body replaces `body`.
    /// After an error the content of `dst` is undefined; after [`CallError::Broken`] every later call fails as well.
    ///
    /// # Errors
    /// [`CallError::Answered`] with the peer's own error; [`CallError::Broken`] of kind `Timeout` when `deadline`
    /// passed, `Unavailable` when the connection ended, `Protocol` when the peer sent bytes that do not answer this
    /// request.
    fn call(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<CallAnswer, CallError>;

    /// [`Channel::call`] that runs `meanwhile` once, between sending the request and waiting for the answer, where the transport
    /// writes the answer into `dst` by itself in that time. A thread can then receive answers on several channels at once, with
    /// the next channel's call within `meanwhile`. A transport without this ability runs `meanwhile` first.
    fn call_while(
        &mut self,
        request: &NodeRequest<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<CallAnswer, CallError> {
        meanwhile();
        self.call(request, body, dst, progress, deadline)
    }

    /// Sends `request` and returns; only [`Channel::finish_call`] may follow. Until then the answer stays in the
    /// connection's own buffers and needs neither a thread nor memory of the caller.
    ///
    /// # Errors
    /// As [`Channel::call`]; `Unsupported` where the destination must be known when the request is sent.
    fn begin_call(&mut self, request: &NodeRequest<'_>, deadline: Instant) -> Result<(), CallError> {
        let _ = deadline;
        let why = format!("{request} of {}: this transport can't leave an answer in the connection", self.endpoints());
        Err(CallError::Answered(Error::new(ErrorKind::Unsupported, why)))
    }

    /// Receives the answer to the request sent by [`Channel::begin_call`], as [`Channel::call`] would.
    fn finish_call(&mut self, body: &mut Vec<u8>, dst: &mut [u8], deadline: Instant) -> Result<CallAnswer, CallError> {
        let _ = (body, dst, deadline);
        let why = format!("{}: no request was begun", self.endpoints());
        Err(CallError::Answered(Error::new(ErrorKind::Invalid, why)))
    }

    /// A handle that ends this channel's call from another thread; `None` where only the deadline ends the call.
    fn breaker(&self) -> Option<Arc<dyn ChannelBreaker>> {
        None
    }

    /// Both ends of the connection.
    fn endpoints(&self) -> &ConnectionEndpoints;

    /// Whether an idle channel still looks usable: no end of stream and no unexpected bytes. Does not wait.
    fn looks_alive(&mut self) -> bool;
}

/// Opens channels to a peer on a path.
pub trait Connector: Send + Sync {
    /// Prepares slow local resources that do not depend on the peer, such as memory registration with a device that has come
    /// back. Otherwise [`Connector::connect`] does this within the deadline.
    ///
    /// # Errors
    /// `Unavailable` when there is no device.
    fn prepare_device(&self) -> Result<()> {
        Ok(())
    }

    /// Opens a connection without a handshake.
    ///
    /// # Errors
    /// `Timeout` when `deadline` passed, `Unavailable` when the peer refused or can't be reached, `Throttled` when the peer runs
    /// but is at the connection limit.
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>>;

    /// Opens a connection and performs the handshake. Where the peer may have several addresses, uses the first that
    /// answers as this peer. `process` is the peer's last known process number, 0 when unknown.
    ///
    /// # Errors
    /// As [`Connector::connect`] and [`perform_handshake`]; also `Throttled` when the peer ends the connection instead.
    fn connect_and_handshake(
        &self,
        hello: &HelloRequest<'_>,
        process: u64,
        deadline: Instant,
    ) -> Result<(Box<dyn Channel>, WelcomeAnswer)> {
        // There is only a single address.
        let _ = process;
        let mut channel = self.connect(deadline)?;
        let welcome = first_handshake(&mut *channel, hello, deadline)?;
        Ok((channel, welcome))
    }

    /// The transport of the channels.
    fn kind(&self) -> TransportKind;

    /// The peer's address as configured, for logs and errors.
    fn peer(&self) -> &str;
}

/// [`perform_handshake`] on a connection that was just opened.
///
/// # Errors
/// As [`perform_handshake`]; `Throttled` when the peer ends the connection instead.
pub fn first_handshake(
    channel: &mut dyn Channel,
    hello: &HelloRequest<'_>,
    deadline: Instant,
) -> Result<WelcomeAnswer> {
    perform_handshake(channel, hello, deadline).map_err(|error| match error {
        CallError::Broken(error) if error.kind() == ErrorKind::Unavailable => {
            Error::new(ErrorKind::Throttled, error.message())
        }
        other => other.into(),
    })
}

/// Performs the handshake that opens a connection.
///
/// # Errors
/// As [`Channel::call`]; `Protocol` when the two sides share no protocol version.
pub fn perform_handshake(
    channel: &mut dyn Channel,
    hello: &HelloRequest<'_>,
    deadline: Instant,
) -> Result<WelcomeAnswer, CallError> {
    let mut body = Vec::new();
    let welcome: WelcomeAnswer = call_decoded(channel, &NodeRequest::Hello(*hello), &mut body, deadline)?;
    if welcome.version < hello.min_version || welcome.version > hello.max_version {
        let why = format!(
            "{} chose protocol version {}, but {} to {} were offered: run the same release on both sides",
            channel.endpoints(),
            welcome.version,
            hello.min_version,
            hello.max_version
        );
        return Err(CallError::Broken(Error::new(ErrorKind::Protocol, why)));
    }
    Ok(welcome)
}

/// A call whose answer is a single value in the body (`Attr`, `ListPage`, `CapacityAnswer`, `WelcomeAnswer`). `body` is scratch
/// space.
///
/// # Errors
/// As [`Channel::call`]; `Protocol` when the body does not decode.
pub fn call_decoded<T: AnswerBody>(
    channel: &mut dyn Channel,
    request: &NodeRequest<'_>,
    body: &mut Vec<u8>,
    deadline: Instant,
) -> Result<T, CallError> {
    channel.call(request, body, &mut [], &mut |_| {}, deadline)?;
    T::decode(body).map_err(|e| {
        let what = if request.op() == FrameOp::Hello { "handshake" } else { "answer" };
        CallError::Answered(
            Error::from(e).context(format_args!("{request} of {}: its {what} can't be decoded", channel.endpoints())),
        )
    })
}
