//! The encrypted form of both ends of a connection: bytes of the socket in, plain ones out, and back. It knows neither
//! frames nor who is at the other end.

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use spurline_trust::Sealed;
use spurline_types::{Error, ErrorKind, Result};
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::time::Instant;

/// Encrypted bytes received at once by a node: requests are small.
const NODE_PIECE: usize = 16 << 10;
/// Encrypted bytes received at once by a reader.
const READER_PIECE: usize = 64 << 10;
/// Plain bytes sealed before they are sent.
const SEND: usize = 256 << 10;

/// A reader's end.
pub(crate) struct ReaderEnd {
    pub sealed: Sealed,
    cipher: Box<[u8]>,
    from: usize,
    to: usize,
}

impl ReaderEnd {
    pub fn new(sealed: Sealed) -> Self {
        ReaderEnd { sealed, cipher: vec![0; READER_PIECE].into(), from: 0, to: 0 }
    }
    /// Plain bytes of what has been received already.
    pub fn open(&mut self, dst: &mut [u8]) -> Result<usize> {
        let mut rest = &self.cipher[self.from..self.to];
        let got = self.sealed.open(&mut rest, dst);
        self.from = self.to - rest.len();
        got
    }
    /// Where the socket's next bytes go, all earlier ones being open.
    pub fn room(&mut self) -> &mut [u8] {
        &mut self.cipher
    }
    /// So many came.
    pub fn came(&mut self, n: usize) {
        (self.from, self.to) = (0, n);
    }
    /// Whether bytes are left that nobody asked for.
    pub fn left(&self) -> bool {
        self.from < self.to
    }
}

/// A node's end.
pub(crate) struct NodeEnd {
    sealed: Sealed,
    /// Encrypted bytes that there was no room for.
    rest: Vec<u8>,
    /// Whether plain bytes may be left inside.
    full: bool,
    begun: bool,
    bound: bool,
}

/// Why a node's end gave no bytes.
pub(crate) enum Stop {
    /// The socket's own reason.
    Os(Errno),
    /// TLS could not be agreed on, or broke.
    Tls(Error),
    /// The peer speaks without TLS: its first bytes.
    Plain(Vec<u8>),
}

impl NodeEnd {
    pub fn new(sealed: Sealed) -> Self {
        NodeEnd { sealed, rest: Vec::new(), full: false, begun: false, bound: false }
    }

    /// Whether the socket is the only place where further bytes can be.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty() && !self.full
    }

    /// Receives plain bytes; 0 when the peer closed. `bind` is given the channel binding once there is one.
    pub fn receive(
        &mut self,
        socket: &TcpStream,
        dst: &mut [u8],
        flags: RecvFlags,
        bind: &dyn Fn(&[u8]),
    ) -> std::result::Result<usize, Stop> {
        loop {
            if !self.is_empty() {
                let rest = std::mem::take(&mut self.rest);
                let got = self.open(&rest, socket, dst)?;
                if got > 0 {
                    return Ok(got);
                }
            }
            let mut cipher = [0; NODE_PIECE];
            let n = match recv(socket, &mut cipher[..], flags) {
                Ok((_, 0)) => return Ok(0),
                Ok((_, n)) => n,
                Err(e) => return Err(Stop::Os(e)),
            };
            // A frame's first byte is no TLS record's.
            if !std::mem::replace(&mut self.begun, true) && cipher[0] == b'S' {
                return Err(Stop::Plain(cipher[..n].to_vec()));
            }
            let got = self.open(&cipher[..n], socket, dst)?;
            if !self.bound && !self.sealed.is_handshaking() {
                self.bound = true;
                bind(&self.sealed.binding().map_err(Stop::Tls)?);
            }
            if got > 0 {
                return Ok(got);
            }
        }
    }

    fn open(&mut self, cipher: &[u8], socket: &TcpStream, dst: &mut [u8]) -> std::result::Result<usize, Stop> {
        let mut rest = cipher;
        let got = self.sealed.open(&mut rest, dst);
        self.rest = rest.to_vec();
        self.full = got.as_ref().is_ok_and(|got| *got == dst.len());
        // Its part of the handshake, or the alert that says why not; the socket has room for either.
        let _ = self.sealed.flush(&mut Plain { socket, deadline: None });
        got.map_err(Stop::Tls)
    }

    /// Seals and sends `parts` in order.
    pub fn send<'a>(
        &mut self,
        socket: &TcpStream,
        parts: impl Iterator<Item = &'a [u8]>,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut to = Plain { socket, deadline: Some(deadline) };
        let mut waiting = 0;
        for chunk in parts.flat_map(|part| part.chunks(SEND)) {
            self.sealed.put(chunk)?;
            waiting += chunk.len();
            if waiting >= SEND {
                self.sealed.flush(&mut to)?;
                waiting = 0;
            }
        }
        self.sealed.flush(&mut to)
    }
}

/// A socket to write to as it is; its own send timeout bounds each write.
struct Plain<'a> {
    socket: &'a TcpStream,
    deadline: Option<Instant>,
}

impl io::Write for Plain<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(buf)])
    }
    fn write_vectored(&mut self, bufs: &[IoSlice<'_>]) -> io::Result<usize> {
        loop {
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(io::ErrorKind::TimedOut.into());
            }
            match sendmsg(self.socket, bufs, &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
                Ok(n) => return Ok(n),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Err(io::ErrorKind::TimedOut.into()),
                Err(e) => return Err(e.into()),
            }
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a peer without TLS is told by a node that has it.
pub(crate) fn tls_only() -> Error {
    let why =
        "this node speaks TLS only: start the peer with --tls, or with --tls-cert, --tls-key and --tls-ca as the node";
    Error::new(ErrorKind::PermissionDenied, why)
}
