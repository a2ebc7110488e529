//! The encrypted form of both ends of a connection: ciphertext from the socket to plaintext, and back. Knows neither frames nor
//! the peer.

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use spurline_trust::TlsSession;
use spurline_types::{Error, ErrorKind, Result};
use std::io::{self, IoSlice};
use std::net::TcpStream;
use std::time::Instant;

/// Ciphertext bytes per receive call of a node: requests are small.
const NODE_PIECE: usize = 16 << 10;
/// Ciphertext bytes per receive call of a reader.
const READER_PIECE: usize = 64 << 10;
/// Plaintext bytes sealed before sending.
const SEALED_BYTES: usize = 256 << 10;

/// A reader's end.
pub(crate) struct ReaderEnd {
    pub sealed: TlsSession,
    cipher: Box<[u8]>,
    from: usize,
    to: usize,
}

impl ReaderEnd {
    pub fn new(sealed: TlsSession) -> Self {
        ReaderEnd { sealed, cipher: vec![0; READER_PIECE].into(), from: 0, to: 0 }
    }
    /// Decrypts bytes that were received already.
    pub fn decrypt_received(&mut self, dst: &mut [u8]) -> Result<usize> {
        let mut rest = &self.cipher[self.from..self.to];
        let got = self.sealed.decrypt_into(&mut rest, dst);
        self.from = self.to - rest.len();
        got
    }
    /// The buffer for the socket's next bytes, once all earlier bytes are decrypted.
    pub fn receive_room(&mut self) -> &mut [u8] {
        &mut self.cipher
    }
    /// Records the number of bytes received.
    pub fn set_received(&mut self, n: usize) {
        self.from = 0;
        self.to = n;
    }
    /// Whether bytes beyond the answer were received.
    pub fn has_leftover(&self) -> bool {
        self.from < self.to
    }
}

/// A node's end.
pub(crate) struct NodeEnd {
    sealed: TlsSession,
    /// Ciphertext bytes that did not fit.
    rest: Vec<u8>,
    /// Whether plaintext may be left inside.
    full: bool,
    begun: bool,
    bound: bool,
}

/// Why a node's end returned no bytes.
pub(crate) enum ReceiveStop {
    /// The error of the socket.
    Os(Errno),
    /// The TLS handshake or session failed.
    Tls(Error),
    /// The peer does not use TLS: the first bytes.
    Plain(Vec<u8>),
}

impl NodeEnd {
    pub fn new(sealed: TlsSession) -> Self {
        NodeEnd { sealed, rest: Vec::new(), full: false, begun: false, bound: false }
    }

    /// Whether further bytes can only come from the socket.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty() && !self.full
    }

    /// Receives plaintext; 0 when the peer closed. Passes the channel binding to `bind` once the handshake is
    /// complete.
    pub fn receive_plain(
        &mut self,
        socket: &TcpStream,
        dst: &mut [u8],
        flags: RecvFlags,
        bind: &dyn Fn(&[u8]),
    ) -> std::result::Result<usize, ReceiveStop> {
        loop {
            if !self.is_empty() {
                let rest = std::mem::take(&mut self.rest);
                let got = self.decrypt_into(&rest, socket, dst)?;
                if got > 0 {
                    return Ok(got);
                }
            }
            let mut cipher = [0; NODE_PIECE];
            let n = match recv(socket, &mut cipher[..], flags) {
                Ok((_, 0)) => return Ok(0),
                Ok((_, n)) => n,
                Err(e) => return Err(ReceiveStop::Os(e)),
            };
            // No TLS record starts with the first byte of a frame.
            if !std::mem::replace(&mut self.begun, true) && cipher[0] == b'S' {
                return Err(ReceiveStop::Plain(cipher[..n].to_vec()));
            }
            let got = self.decrypt_into(&cipher[..n], socket, dst)?;
            if !self.bound && !self.sealed.is_handshaking() {
                self.bound = true;
                bind(&self.sealed.channel_binding().map_err(ReceiveStop::Tls)?);
            }
            if got > 0 {
                return Ok(got);
            }
        }
    }

    fn decrypt_into(
        &mut self,
        cipher: &[u8],
        socket: &TcpStream,
        dst: &mut [u8],
    ) -> std::result::Result<usize, ReceiveStop> {
        let mut rest = cipher;
        let got = self.sealed.decrypt_into(&mut rest, dst);
        self.rest = rest.to_vec();
        self.full = got.as_ref().is_ok_and(|got| *got == dst.len());
        // TLS's own handshake message or alert; the socket has room for either.
        let _ = self.sealed.flush_to(&mut PlainSocket { socket, deadline: None });
        got.map_err(ReceiveStop::Tls)
    }

    /// Seals and sends `parts` in order.
    pub fn seal_and_send<'a>(
        &mut self,
        socket: &TcpStream,
        parts: impl Iterator<Item = &'a [u8]>,
        deadline: Instant,
    ) -> io::Result<()> {
        let mut to = PlainSocket { socket, deadline: Some(deadline) };
        let mut waiting = 0;
        for chunk in parts.flat_map(|part| part.chunks(SEALED_BYTES)) {
            self.sealed.queue_plain(chunk)?;
            waiting += chunk.len();
            if waiting >= SEALED_BYTES {
                self.sealed.flush_to(&mut to)?;
                waiting = 0;
            }
        }
        self.sealed.flush_to(&mut to)
    }
}

/// Writes to a socket without encryption; the socket's send timeout bounds each write.
struct PlainSocket<'a> {
    socket: &'a TcpStream,
    deadline: Option<Instant>,
}

impl io::Write for PlainSocket<'_> {
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

/// The answer to a peer without TLS from a node with TLS.
pub(crate) fn tls_only() -> Error {
    let why =
        "this node speaks TLS only: start the peer with --tls, or with --tls-cert, --tls-key and --tls-ca as the node";
    Error::new(ErrorKind::PermissionDenied, why)
}
