//! The reader's side: a channel is one connection on one path, a connector makes them. It knows no pool.

use spurline_proto::{Body, Hello, Op, Request, Welcome};
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
pub struct Endpoints {
    /// What carries the bytes.
    pub kind: TransportKind,
    /// This side's address.
    pub local: String,
    /// The other side's address.
    pub peer: String,
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} over {} from {}", self.peer, self.kind, self.local)
    }
}

/// A successful answer: its body is in the caller's `body`, its payload in the caller's `dst`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// How many bytes of `dst` were filled.
    pub payload_len: usize,
}

/// How a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallError {
    /// The peer answered with an error. The channel goes on working.
    Answered(Error),
    /// No whole answer came. The channel must be dropped: what may still arrive on it belongs to this call.
    Broken(Error),
}

impl CallError {
    /// The error itself.
    pub fn error(&self) -> &Error {
        match self {
            CallError::Answered(error) | CallError::Broken(error) => error,
        }
    }
    /// Whether the channel must be dropped.
    pub fn is_broken(&self) -> bool {
        matches!(self, CallError::Broken(_))
    }
    /// The same with `context: ` before its sentence.
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

/// Ends the call under way on a channel, and every later one, with [`CallError::Broken`]: for a path that was found
/// dead while its requests wait for answers that will never come.
pub trait Breaker: Send + Sync {
    /// Returns at once; the call ends soon after. Nothing happens when the channel is gone already.
    fn break_off(&self);
}

/// One connection on one path. One call at a time; a deadline bounds each.
pub trait Channel: Send {
    /// Sends `request` and waits for its answer.
    ///
    /// The payload goes to `dst`, whose length is the most accepted, as it arrives; `progress(n)` says that the first
    /// `n` bytes of `dst` are there, in order, and may be called any number of times. The answer's body replaces
    /// `body`. After an error `dst` holds anything; after [`CallError::Broken`] every later call fails too.
    ///
    /// # Errors
    /// [`CallError::Answered`] with the peer's own error; [`CallError::Broken`] of kind `Timeout` when `deadline`
    /// passed, `Unavailable` when the connection ended, `Protocol` when the peer sent what is no answer to this.
    fn call(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
    ) -> Result<Answer, CallError>;

    /// [`Channel::call`] that runs `meanwhile` once, after the request is on its way and before its answer is waited
    /// for, where the answer makes its own way into `dst` in that time. So one thread has answers arrive over several
    /// channels at once: the next channel's call is made within `meanwhile`. A transport that can't do that runs
    /// `meanwhile` first.
    ///
    /// # Errors
    /// Those of [`Channel::call`].
    fn call_while(
        &mut self,
        request: &Request<'_>,
        body: &mut Vec<u8>,
        dst: &mut [u8],
        progress: &mut dyn FnMut(usize),
        deadline: Instant,
        meanwhile: &mut dyn FnMut(),
    ) -> Result<Answer, CallError> {
        meanwhile();
        self.call(request, body, dst, progress, deadline)
    }

    /// Sends `request` and returns; nothing but [`Channel::finish`] may follow. Until then the answer waits in the
    /// connection's own buffers: no thread, and no memory of the caller's, waits with it.
    ///
    /// # Errors
    /// Those of [`Channel::call`]; `Unsupported` where answers have to be told where to go.
    fn begin(&mut self, request: &Request<'_>, deadline: Instant) -> Result<(), CallError> {
        let _ = deadline;
        let why = format!("{request} of {}: answers can't be left in the connection", self.endpoints());
        Err(CallError::Answered(Error::new(ErrorKind::Unsupported, why)))
    }

    /// Takes the answer to the request that [`Channel::begin`] sent, as [`Channel::call`] would.
    ///
    /// # Errors
    /// Those of [`Channel::call`].
    fn finish(&mut self, body: &mut Vec<u8>, dst: &mut [u8], deadline: Instant) -> Result<Answer, CallError> {
        let _ = (body, dst, deadline);
        let why = format!("{}: no request was begun", self.endpoints());
        Err(CallError::Answered(Error::new(ErrorKind::Invalid, why)))
    }

    /// What ends this channel's call from another thread; `None` where only the deadline does.
    fn breaker(&self) -> Option<Arc<dyn Breaker>> {
        None
    }

    /// Both ends.
    fn endpoints(&self) -> &Endpoints;

    /// Whether an idle channel still looks alive, found out without waiting: no end of stream, no unexpected bytes.
    fn probe(&mut self) -> bool;
}

/// Makes channels to one peer on one path.
pub trait Connector: Send + Sync {
    /// Makes ready on this side what may take long and says nothing of the peer: memory is registered with a device that is
    /// back. Without it [`Connector::connect`] does so, within its deadline.
    ///
    /// # Errors
    /// `Unavailable` when there is no device.
    fn prepare(&self) -> Result<()> {
        Ok(())
    }

    /// Opens a connection; no greeting is sent yet.
    ///
    /// # Errors
    /// `Timeout` when `deadline` passed, `Unavailable` when the peer refused or can't be reached, `Throttled` when it is there
    /// and has no place for one more connection.
    fn connect(&self, deadline: Instant) -> Result<Box<dyn Channel>>;

    /// Opens a connection and greets. Where several places may be the peer's, at one where no other answers; `process` is the
    /// number that it had when it was last heard of, 0 where that is not known.
    ///
    /// # Errors
    /// Those of [`Connector::connect`] and of [`greet`]; `Throttled`, too, when the peer ends the connection instead.
    fn connect_to(&self, hello: &Hello<'_>, process: u64, deadline: Instant) -> Result<(Box<dyn Channel>, Welcome)> {
        // There is one place.
        let _ = process;
        let mut channel = self.connect(deadline)?;
        let welcome = greet_first(&mut *channel, hello, deadline)?;
        Ok((channel, welcome))
    }

    /// What would carry the bytes.
    fn kind(&self) -> TransportKind;

    /// The peer's address as configured, for logs and errors.
    fn peer(&self) -> &str;
}

/// [`greet`] over a connection that was just opened.
///
/// # Errors
/// As [`greet`]; `Throttled` when the peer ends the connection instead.
pub fn greet_first(channel: &mut dyn Channel, hello: &Hello<'_>, deadline: Instant) -> Result<Welcome> {
    greet(channel, hello, deadline).map_err(|error| match error {
        CallError::Broken(error) if error.kind() == ErrorKind::Unavailable => {
            Error::new(ErrorKind::Throttled, error.message())
        }
        other => other.into(),
    })
}

/// Sends the greeting that opens a connection.
///
/// # Errors
/// Those of [`Channel::call`]; `Protocol` when the two sides have no protocol version in common.
pub fn greet(channel: &mut dyn Channel, hello: &Hello<'_>, deadline: Instant) -> Result<Welcome, CallError> {
    let mut body = Vec::new();
    let welcome: Welcome = call_for(channel, &Request::Hello(*hello), &mut body, deadline)?;
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

/// A call whose answer is one value in the body (`Attr`, `ListPage`, `StatFs`, `Welcome`). `body` is scratch.
///
/// # Errors
/// Those of [`Channel::call`]; `Protocol` when the body is no such value.
pub fn call_for<T: Body>(
    channel: &mut dyn Channel,
    request: &Request<'_>,
    body: &mut Vec<u8>,
    deadline: Instant,
) -> Result<T, CallError> {
    channel.call(request, body, &mut [], &mut |_| {}, deadline)?;
    T::decode(body).map_err(|e| {
        let what = if request.op() == Op::Hello { "greeting" } else { "answer" };
        CallError::Answered(
            Error::from(e).context(format_args!("{request} of {}: its {what} makes no sense", channel.endpoints())),
        )
    })
}
