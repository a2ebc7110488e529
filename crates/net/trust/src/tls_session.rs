//! A TLS connection as bytes in and bytes out, for blocking and asynchronous sockets alike. Knows no socket.

use crate::tls::explain_failure;
use rustls::Connection;
use spurline_types::{Error, ErrorKind, Result};
use std::io::{self, Read as _, Write as _};
use std::path::PathBuf;

/// The label of RFC 9266: a value that only both ends of a TLS 1.3 connection can compute.
const TLS_EXPORTER_LABEL: &[u8] = b"EXPORTER-Channel-Binding";
/// Plaintext bytes sealed at once.
const SEALED_CHUNK_BYTES: usize = 64 << 10;

/// An encrypted connection.
pub struct TlsSession {
    tls: Connection,
    peer: String,
    cert: Option<PathBuf>,
}

impl TlsSession {
    pub(crate) fn new(mut tls: Connection, peer: &str, cert: Option<PathBuf>) -> TlsSession {
        // Sealed bytes are sent before more are sealed: the caller sets the limit.
        tls.set_buffer_limit(None);
        TlsSession { tls, peer: peer.to_owned(), cert }
    }

    /// Whether the handshake is still in progress; nothing can be sealed yet.
    pub fn is_handshaking(&self) -> bool {
        self.tls.is_handshaking()
    }

    /// The channel binding for the proof of the token: bytes that only both ends know.
    ///
    /// # Errors
    /// During the handshake.
    pub fn channel_binding(&self) -> Result<[u8; 32]> {
        self.tls
            .export_keying_material([0; 32], TLS_EXPORTER_LABEL, Some(b""))
            .map_err(|e| Error::new(ErrorKind::Protocol, format!("{}: TLS: {e}", self.peer)))
    }

    /// Takes ciphertext from the front of `from` and writes plaintext to `to`, until either is exhausted.
    ///
    /// # Errors
    /// When the bytes are no TLS, or the peer's identity is wrong; [`TlsSession::flush_to`] sends the reason to the peer.
    pub fn decrypt_into(&mut self, from: &mut &[u8], to: &mut [u8]) -> Result<usize> {
        let mut got = 0;
        loop {
            while got < to.len() {
                match self.tls.reader().read(&mut to[got..]) {
                    // The peer announced the end of the data.
                    Ok(0) => break,
                    Ok(n) => got += n,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                    Err(e) => return Err(Error::io(format_args!("{}: TLS", self.peer), &e)),
                }
            }
            if from.is_empty() || (got == to.len() && !to.is_empty()) {
                return Ok(got);
            }
            // Into memory: takes as much as there is room for.
            let took = self.tls.read_tls(from).map_err(|e| Error::io(format_args!("{}: TLS", self.peer), &e))?;
            // After the peer's close notification no bytes are accepted.
            if took == 0 {
                let why = format!("{}: TLS: bytes arrived after the end of the connection was announced", self.peer);
                return Err(Error::new(ErrorKind::Protocol, why));
            }
            self.tls.process_new_packets().map_err(|e| explain_failure(&e, &self.peer, self.cert.as_deref()))?;
        }
    }

    /// Seals `plain` and sends the result to `to`, a socket or memory.
    ///
    /// # Errors
    /// The errors of `to`; the connection is unusable afterwards.
    pub fn seal_to(&mut self, plain: &[u8], to: &mut dyn io::Write) -> io::Result<()> {
        for chunk in plain.chunks(SEALED_CHUNK_BYTES) {
            self.queue_plain(chunk)?;
            self.flush_to(to)?;
        }
        Ok(())
    }

    /// Seals `plain` and keeps the result for the next [`TlsSession::flush_to`].
    ///
    /// # Errors
    /// In practice none: the only limit is memory.
    pub fn queue_plain(&mut self, plain: &[u8]) -> io::Result<()> {
        self.tls.writer().write_all(plain)
    }

    /// Sends pending TLS records.
    ///
    /// # Errors
    /// The errors of `to`.
    pub fn flush_to(&mut self, mut to: &mut dyn io::Write) -> io::Result<()> {
        while self.tls.wants_write() {
            self.tls.write_tls(&mut to)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupTokens, Trust};

    #[test]
    fn what_follows_a_goodbye_is_an_error_and_no_endless_loop() {
        let tokens = GroupTokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap();
        let trust = Trust::with_tokens("somebody", tokens).with_tls(None).unwrap();
        let tls = trust.tls().unwrap();
        let (mut reader, mut node) =
            (tls.connect_session("10.0.0.1:7000").unwrap(), tls.accept_session("stranger").unwrap());
        let mut plain = [0; 64];
        while reader.is_handshaking() || node.is_handshaking() {
            for (from, to) in [(0, 1), (1, 0)] {
                let ends = &mut [&mut reader, &mut node];
                let mut wire = Vec::new();
                ends[from].flush_to(&mut wire).unwrap();
                assert_eq!(ends[to].decrypt_into(&mut &wire[..], &mut plain).unwrap(), 0);
            }
        }
        let mut wire = Vec::new();
        reader.seal_to(b"last", &mut wire).unwrap();
        reader.tls.send_close_notify();
        reader.flush_to(&mut wire).unwrap();
        // What came before it is read, and the goodbye itself is no error.
        assert_eq!(node.decrypt_into(&mut &wire[..], &mut plain).unwrap(), 4);
        assert_eq!(node.decrypt_into(&mut &b""[..], &mut plain).unwrap(), 0);
        for room in [&mut [][..], &mut plain[..]] {
            let error = node.decrypt_into(&mut &b"x"[..], room).unwrap_err();
            assert!(error.kind() == ErrorKind::Protocol && error.message().contains("after the end"), "{error}");
        }
    }
}
