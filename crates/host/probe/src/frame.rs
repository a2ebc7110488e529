//! Frames of the control connection: a fixed head, and a body whose length is checked before the read. The messages are opaque
//! here.
//!
//! The head and [`REFUSED`] are the same in every version of the protocol, so that incompatible versions can report that.

use spurline_types::{Error, ErrorKind, Result};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Version of the messages.
pub const VERSION: u16 = 1;
/// Kind of a refusal; the body is a text for a person.
pub const REFUSED: u16 = 0;
/// Most bytes of a message's body.
pub const MAX_BODY: u32 = 256 << 10;
/// Most bytes of a host's facts.
pub const MAX_FACTS: u32 = 64 << 20;

const PROBE_MAGIC: [u8; 4] = *b"SPNP";
/// Bytes of a head.
pub const HEAD: usize = 12;

/// The head of a frame: magic, version, kind and length, little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHead {
    /// The sender's protocol version.
    pub version: u16,
    /// Kind of the body.
    pub kind: u16,
    /// Bytes of the body.
    pub len: u32,
}

impl FrameHead {
    /// The wire format.
    pub fn encode(self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[..4].copy_from_slice(&PROBE_MAGIC);
        bytes[4..6].copy_from_slice(&self.version.to_le_bytes());
        bytes[6..8].copy_from_slice(&self.kind.to_le_bytes());
        bytes[8..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Parses a head; `None` for another protocol.
    pub fn decode(bytes: &[u8; HEAD]) -> Option<FrameHead> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (version, rest) = rest.split_first_chunk::<2>()?;
        let (kind, len) = rest.split_first_chunk::<2>()?;
        (*magic == PROBE_MAGIC).then_some(FrameHead {
            version: u16::from_le_bytes(*version),
            kind: u16::from_le_bytes(*kind),
            len: u32::from_le_bytes(*len.first_chunk::<4>()?),
        })
    }
}

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    /// The head.
    pub head: FrameHead,
    /// The body, of the length in the head.
    pub body: Vec<u8>,
}

/// Sends a frame.
///
/// # Errors
/// `Invalid` for a body longer than [`MAX_FACTS`], `Timeout` when the peer accepts nothing until `deadline`, `Unavailable` when
/// the peer is gone.
pub fn send_frame(socket: &TcpStream, kind: u16, body: &[u8], deadline: Instant) -> Result<()> {
    let len = u32::try_from(body.len()).ok().filter(|len| *len <= MAX_FACTS);
    let Some(len) = len else {
        return Err(Error::new(ErrorKind::Invalid, format!("a message of {} bytes is too long", body.len())));
    };
    socket.set_write_timeout(Some(time_left(deadline)?)).map_err(|e| Error::io("sending a message", &e))?;
    let mut bytes = FrameHead { version: VERSION, kind, len }.encode().to_vec();
    bytes.extend_from_slice(body);
    let mut socket = socket;
    socket.write_all(&bytes).map_err(|e| Error::io("sending a message", &e))
}

/// Receives a frame. `None` when the peer closed the connection before the first byte.
///
/// # Errors
/// `Protocol` when the bytes are no frame (the message quotes the first bytes) or a frame is too long; `Timeout` when the frame
/// is incomplete at `deadline`; `Unavailable` when the connection breaks.
pub fn receive_frame(socket: &TcpStream, max: u32, deadline: Instant) -> Result<Option<Frame>> {
    let mut bytes = [0u8; HEAD];
    let got = read_full(socket, &mut bytes, deadline)?;
    if got == 0 {
        return Ok(None);
    }
    let Some(head) = FrameHead::decode(&bytes).filter(|_| got == HEAD) else {
        // The bytes may be anything: escape what a terminal would interpret.
        let seen = bytes[..got].escape_ascii();
        return Err(Error::new(ErrorKind::Protocol, format!("it sent \"{seen}\", which is not this protocol")));
    };
    if head.len > max {
        let why = format!("a message of kind {} with {} bytes, {max} are the most", head.kind, head.len);
        return Err(Error::new(ErrorKind::Protocol, why));
    }
    // Memory grows with the bytes received, not with the announced length.
    let mut body = Vec::new();
    let whole = head.len as usize;
    while body.len() < whole {
        let start = body.len();
        body.resize(whole.min(start + (64 << 10)), 0);
        if read_full(socket, &mut body[start..], deadline)? < body.len() - start {
            return Err(Error::new(ErrorKind::Unavailable, "the connection ended inside a message"));
        }
    }
    Ok(Some(Frame { head, body }))
}

/// Receives until `into` is full or the connection ends.
fn read_full(mut socket: &TcpStream, into: &mut [u8], deadline: Instant) -> Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        socket.set_read_timeout(Some(time_left(deadline)?)).map_err(|e| Error::io("receiving a message", &e))?;
        match socket.read(&mut into[filled..]) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(Error::io("receiving a message", &e)),
        }
    }
    Ok(filled)
}

fn time_left(deadline: Instant) -> Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(Error::new(ErrorKind::Timeout, "the peer took too long")) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(30)
    }

    #[test]
    fn frames_travel() {
        let (one, two) = pair();
        send_frame(&one, 7, b"body", soon()).unwrap();
        send_frame(&one, 8, b"", soon()).unwrap();
        let frame = receive_frame(&two, MAX_BODY, soon()).unwrap().unwrap();
        assert_eq!((frame.head.version, frame.head.kind, frame.body.as_slice()), (VERSION, 7, &b"body"[..]));
        assert_eq!(receive_frame(&two, MAX_BODY, soon()).unwrap().unwrap().head.kind, 8);
        drop(one);
        assert!(receive_frame(&two, MAX_BODY, soon()).unwrap().is_none());
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let long = FrameHead { version: 1, kind: 1, len: MAX_BODY + 1 }.encode();
        let cut = FrameHead { version: 1, kind: 1, len: 10 }.encode();
        for (bytes, kind, says) in [
            (&b"SSH-2.0-OpenSSH_9.2\r\n"[..], ErrorKind::Protocol, "SSH-2.0-Open"),
            (b"\x1b[2J", ErrorKind::Protocol, "\\x1b[2J"),
            (&long, ErrorKind::Protocol, "262144 are the most"),
            (&cut, ErrorKind::Unavailable, "inside a message"),
        ] {
            let (mut one, two) = pair();
            one.write_all(bytes).unwrap();
            drop(one);
            let error = receive_frame(&two, MAX_BODY, soon()).unwrap_err();
            assert!(error.kind() == kind && error.message().contains(says), "{error}");
        }
        let (one, two) = pair();
        let error = receive_frame(&two, MAX_BODY, Instant::now() + Duration::from_millis(20)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        drop(one);
    }

    proptest::proptest! {
        #[test]
        fn heads_decode_what_they_encode(version: u16, kind: u16, len: u32, bytes: [u8; HEAD]) {
            let head = FrameHead { version, kind, len };
            proptest::prop_assert_eq!(FrameHead::decode(&head.encode()), Some(head));
            if let Some(head) = FrameHead::decode(&bytes) {
                proptest::prop_assert_eq!(head.encode(), bytes);
            }
        }
    }
}
