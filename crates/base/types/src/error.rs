//! The error that crosses layers and the wire: a kind to act on and a sentence to read.

use crate::errno::EIO;
use std::fmt;

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an error, as far as a caller acts on it. Numbers travel on the wire and never change meaning. Exhaustive on
/// purpose: code that decides by kind (the errno table above all) must decide for a new kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// No such name.
    NotFound,
    /// A name on the way is not a directory.
    NotADirectory,
    /// A directory where a file was needed.
    IsADirectory,
    /// The origin refused the credentials, or the operating system the access.
    PermissionDenied,
    /// The object no longer has the requested version.
    Stale,
    /// A deadline passed.
    Timeout,
    /// The origin or a peer could not be reached, or closed the connection.
    Unavailable,
    /// The origin throttled the request, or a peer is at the connection limit.
    Throttled,
    /// A disk or a quota is full.
    NoSpace,
    /// The memory budget is exhausted.
    NoMemory,
    /// Bytes whose checksum does not match.
    Corrupt,
    /// An invalid request.
    Invalid,
    /// A request that this build or this origin can't serve.
    Unsupported,
    /// The volume is read-only.
    ReadOnly,
    /// A peer speaks another protocol version or broke the protocol.
    Protocol,
    /// The origin answered, but failed to serve the request until its deadline.
    OriginFailed,
    /// An operating-system error with an errno.
    Io(i32),
    /// A node can't serve uncached data because the origin does not answer; another node may.
    OriginDown,
    /// A kind a newer peer sent; the number is kept.
    Unknown(u16),
}

/// What a caller may do about an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryAdvice {
    /// The same request will fail again.
    Never,
    /// The same request on the same path may succeed after a pause.
    SamePath,
    /// The same request may succeed on another path or peer.
    OtherPath,
}

impl ErrorKind {
    const NAMED: [(ErrorKind, u16); 17] = [
        (ErrorKind::NotFound, 1),
        (ErrorKind::NotADirectory, 2),
        (ErrorKind::IsADirectory, 3),
        (ErrorKind::PermissionDenied, 4),
        (ErrorKind::Stale, 5),
        (ErrorKind::Timeout, 6),
        (ErrorKind::Unavailable, 7),
        (ErrorKind::Throttled, 8),
        (ErrorKind::NoSpace, 9),
        (ErrorKind::NoMemory, 10),
        (ErrorKind::Corrupt, 11),
        (ErrorKind::Invalid, 12),
        (ErrorKind::Unsupported, 13),
        (ErrorKind::ReadOnly, 14),
        (ErrorKind::Protocol, 15),
        (ErrorKind::OriginDown, 16),
        (ErrorKind::OriginFailed, 17),
    ];
    /// Codes from here carry an errno: `IO_BASE + errno`.
    const IO_BASE: u16 = 0x1000;

    /// The number that stands for this kind on the wire.
    pub fn code(self) -> u16 {
        match self {
            ErrorKind::Io(errno) => Self::IO_BASE + u16::try_from(errno.clamp(0, 0xfff)).unwrap_or(0),
            ErrorKind::Unknown(code) => code,
            named => Self::NAMED.iter().find(|(kind, _)| *kind == named).map_or(0, |(_, code)| *code),
        }
    }

    /// The kind of a number from the wire; an unknown number becomes [`ErrorKind::Unknown`].
    pub fn from_code(code: u16) -> Self {
        if (Self::IO_BASE..Self::IO_BASE + 0x1000).contains(&code) {
            return ErrorKind::Io(i32::from(code - Self::IO_BASE));
        }
        Self::NAMED.iter().find(|(_, c)| *c == code).map_or(ErrorKind::Unknown(code), |(kind, _)| *kind)
    }

    /// Whether a retry can help, and where.
    pub fn retry_advice(self) -> RetryAdvice {
        match self {
            ErrorKind::Timeout
            | ErrorKind::Unavailable
            | ErrorKind::Protocol
            | ErrorKind::Corrupt
            | ErrorKind::OriginFailed => RetryAdvice::OtherPath,
            ErrorKind::Throttled | ErrorKind::NoMemory | ErrorKind::OriginDown => RetryAdvice::SamePath,
            _ => RetryAdvice::Never,
        }
    }
}

/// An error: a kind, and a sentence with the fault, the evidence and the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    message: Box<str>,
}

impl Error {
    /// Makes an error of `kind` with a sentence for a person.
    pub fn new(kind: ErrorKind, message: impl Into<Box<str>>) -> Self {
        Error { kind, message: message.into() }
    }
    /// What a caller acts on.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
    /// The sentence.
    pub fn message(&self) -> &str {
        &self.message
    }
    /// The same error with `context: ` before the sentence.
    pub fn context(self, context: impl fmt::Display) -> Self {
        Error { kind: self.kind, message: format!("{context}: {}", self.message).into() }
    }
    /// Chooses between this error of reaching a peer and that of a `later` route: a peer's own answer is more
    /// informative than no answer.
    pub fn prefer_informative(self, later: Error) -> Error {
        if error_worth(&self) == 0 || error_worth(&later) > error_worth(&self) { later } else { self }
    }
    /// An operating-system error, and the operation that failed.
    pub fn io(what: impl fmt::Display, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as Os;
        let kind = match (error.kind(), error.raw_os_error()) {
            (Os::NotFound, _) => ErrorKind::NotFound,
            (Os::PermissionDenied, _) => ErrorKind::PermissionDenied,
            (Os::NotADirectory, _) => ErrorKind::NotADirectory,
            (Os::IsADirectory, _) => ErrorKind::IsADirectory,
            (Os::StorageFull | Os::QuotaExceeded, _) => ErrorKind::NoSpace,
            (Os::StaleNetworkFileHandle, _) => ErrorKind::Stale,
            (Os::TimedOut | Os::WouldBlock, _) => ErrorKind::Timeout,
            (
                Os::ConnectionRefused
                | Os::ConnectionReset
                | Os::ConnectionAborted
                | Os::BrokenPipe
                | Os::UnexpectedEof
                | Os::NotConnected
                | Os::HostUnreachable
                | Os::NetworkUnreachable,
                _,
            ) => ErrorKind::Unavailable,
            (_, Some(errno)) => ErrorKind::Io(errno),
            _ => ErrorKind::Io(EIO),
        };
        Error::new(kind, format!("{what}: {error}"))
    }
}

fn error_worth(error: &Error) -> u8 {
    match error.kind {
        ErrorKind::Unavailable | ErrorKind::Timeout => 0,
        ErrorKind::Throttled => 1,
        _ => 2,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

/// The operation or the file of a failure of the operating system.
pub trait IoContext<T> {
    /// The failure as [`Error::io`] has it, with `what` failed.
    fn io_context(self, what: impl fmt::Display) -> Result<T>;
}

impl<T> IoContext<T> for std::io::Result<T> {
    fn io_context(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Error::io(what, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errno::ENOSPC;

    #[test]
    fn codes_round_trip() {
        for (kind, code) in ErrorKind::NAMED {
            assert_eq!(kind.code(), code);
            assert_eq!(ErrorKind::from_code(code), kind);
        }
        assert_eq!(ErrorKind::from_code(ErrorKind::Io(ENOSPC).code()), ErrorKind::Io(ENOSPC));
        assert_eq!(ErrorKind::from_code(999), ErrorKind::Unknown(999));
        assert_eq!(ErrorKind::Unknown(999).code(), 999);
    }
}
