//! One encrypted connection as bytes in and bytes out, for blocking and waiting sockets alike. It knows no socket.

use crate::tls::explain;
use rustls::Connection;
use spurline_types::{Error, ErrorKind, Result};
use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;

/// The label of RFC 9266: what both ends of a TLS 1.3 connection can compute, and nobody between them.
const EXPORTER: &[u8] = b"EXPORTER-Channel-Binding";
/// Plain bytes sealed at once.
const CHUNK: usize = 64 << 10;

/// An encrypted connection.
pub struct Sealed {
    tls: Connection,
    peer: String,
    cert: Option<PathBuf>,
}

impl Sealed {
    pub(crate) fn new(mut tls: Connection, peer: &str, cert: Option<PathBuf>) -> Sealed {
        // What is sealed is sent before more is: the bound is the caller's.
        tls.set_buffer_limit(None);
        Sealed { tls, peer: peer.to_owned(), cert }
    }

    /// Whether the connection is still being agreed on: nothing can be sealed yet.
    pub fn is_handshaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// Bytes of the channel that only both ends know, for the proof of the token.
    ///
    /// # Errors
    /// While the connection is still being agreed on.
    pub fn binding(&self) -> Result<[u8; 32]> {
        let wrong = |e: rustls::Error| Error::new(ErrorKind::Protocol, format!("{}: TLS: {e}", self.peer));
        self.tls.export_keying_material([0; 32], EXPORTER, Some(b"")).map_err(wrong)
    }

    /// Takes encrypted bytes from the front of `from` and gives plain ones, until one of both ends is reached.
    ///
    /// # Errors
    /// When they are no TLS, or the peer is not who it has to be; [`Sealed::flush`] sends it the reason.
    pub fn open(&mut self, from: &mut &[u8], to: &mut [u8]) -> Result<usize> {
        let mut got = 0;
        loop {
            while got < to.len() {
                match self.tls.reader().read(&mut to[got..]) {
                    // The peer said that it sends no more.
                    Ok(0) => break,
                    Ok(n) => got += n,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) => return Err(Error::io(format_args!("{}: TLS", self.peer), &e)),
                }
            }
            if from.is_empty() || (got == to.len() && !to.is_empty()) {
                return Ok(got);
            }
            // Into memory: it takes what it has room for.
            let took = self.tls.read_tls(from).map_err(|e| Error::io(format_args!("{}: TLS", self.peer), &e))?;
            // After the peer's goodbye nothing is taken any more, however much it sends.
            if took == 0 {
                let why = format!("{}: TLS: bytes came after the end of the connection was announced", self.peer);
                return Err(Error::new(ErrorKind::Protocol, why));
            }
            self.tls.process_new_packets().map_err(|e| explain(&e, &self.peer, self.cert.as_deref()))?;
        }
    }

    /// Seals `plain` and sends it to `to`, which may be a socket or memory.
    ///
    /// # Errors
    /// Those of `to`, after which the connection is of no use.
    pub fn seal(&mut self, plain: &[u8], to: &mut dyn io::Write) -> io::Result<()> {
        for chunk in plain.chunks(CHUNK) {
            self.put(chunk)?;
            self.flush(to)?;
        }
        Ok(())
    }

    /// Seals `plain` and keeps it for the next [`Sealed::flush`].
    ///
    /// # Errors
    /// None that lasts: there is no bound but memory.
    pub fn put(&mut self, plain: &[u8]) -> io::Result<()> {
        self.tls.writer().write_all(plain)
    }

    /// Sends what TLS itself has to say.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn flush(&mut self, mut to: &mut dyn io::Write) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut to)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Tokens, Trust};

    #[test]
    fn what_follows_a_goodbye_is_an_error_and_no_endless_loop() {
        let tokens = Tokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap();
        let trust = Trust::with_tokens("somebody", tokens).encrypted(None).unwrap();
        let tls = trust.tls().unwrap();
        let (mut reader, mut node) = (tls.connect("10.0.0.1:7000").unwrap(), tls.accept("stranger").unwrap());
        let mut plain = [0; 64];
        while reader.is_handshaking() || node.is_handshaking() {
            for (from, to) in [(0, 1), (1, 0)] {
                let ends = &mut [&mut reader, &mut node];
                let mut wire = Vec::new();
                ends[from].flush(&mut wire).unwrap();
                assert_eq!(ends[to].open(&mut &wire[..], &mut plain).unwrap(), 0);
            }
        }
        let mut wire = Vec::new();
        reader.seal(b"last", &mut wire).unwrap();
        reader.tls.send_close_notify();
        reader.flush(&mut wire).unwrap();
        // What came before it is read, and the goodbye itself is no error.
        assert_eq!(node.open(&mut &wire[..], &mut plain).unwrap(), 4);
        assert_eq!(node.open(&mut &b""[..], &mut plain).unwrap(), 0);
        for room in [&mut [][..], &mut plain[..]] {
            let error = node.open(&mut &b"x"[..], room).unwrap_err();
            assert!(error.kind() == ErrorKind::Protocol && error.message().contains("after the end"), "{error}");
        }
    }
}
