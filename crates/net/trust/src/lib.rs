//! Membership of a group: the group token, the token's file and proof by both sides of a connection, TLS, and rate-limited
//! logging of refusals. Knows no socket and no request: bytes in, bytes out. `docs/trust.md` describes the scheme and the limits
//! of the protection.
#![forbid(unsafe_code)]

mod proof;
mod refusals;
#[cfg(feature = "tokio")]
mod stream;
mod tls;
mod tls_session;
mod token;
mod watched_files;

pub use proof::{TokenProver, TokenVerifier};
pub use refusals::{RefusalLog, RefusalReason};
#[cfg(feature = "tokio")]
pub use stream::{GuardedStream, accept_stream, connect_stream, decline_proof};
pub use tls::{TlsContext, TlsFiles};
pub use tls_session::TlsSession;
pub use token::GroupTokens;
pub use watched_files::WatchedFiles;

use spurline_types::{Error, ErrorKind, Result};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The proofs that a process requires of peers and gives to peers.
pub struct Trust {
    name: String,
    tokens: Option<WatchedFiles<GroupTokens>>,
    tls: Option<WatchedFiles<TlsContext>>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {:?}", self.name, self.tokens().map_or(0, |tokens| tokens.count()))
    }
}

impl Trust {
    /// Trust without any check or proof.
    pub fn without_checks() -> Arc<Trust> {
        Arc::new(Trust { name: String::new(), tokens: None, tls: None })
    }

    /// Trust for a process called `name` that proves the tokens of `token_file` and requires the same proof of peers. A changed
    /// file is read again.
    ///
    /// # Errors
    /// `NotFound` or `PermissionDenied` when the file can't be read, `Invalid` when the file contains no valid token; the message
    /// names the remedy.
    pub fn new(name: &str, token_file: Option<&Path>) -> Result<Arc<Trust>> {
        let tokens = token_file
            .map(|file| -> Result<_> {
                let shown = file.to_owned();
                WatchedFiles::new(vec![file.to_owned()], Box::new(move || GroupTokens::read_file(&shown)))
            })
            .transpose()?;
        Ok(Arc::new(Trust { name: name.to_owned(), tokens, tls: None }))
    }

    /// The same without a file, for tests and benchmarks.
    pub fn with_tokens(name: &str, tokens: GroupTokens) -> Arc<Trust> {
        Arc::new(Trust { name: name.to_owned(), tokens: Some(WatchedFiles::without_files(tokens)), tls: None })
    }

    /// The same with TLS on TCP and control connections: with the certificates of `files`, which are read again after a change,
    /// or else with a key made now, authenticated by the proof of the token.
    ///
    /// # Errors
    /// `Invalid` without files and without a token, and when a file's content or certificate is not valid; `NotFound` or
    /// `PermissionDenied` when a file can't be read.
    pub fn with_tls(&self, files: Option<TlsFiles>) -> Result<Arc<Trust>> {
        let tls = match files {
            Some(files) => {
                let watched = vec![files.cert.clone(), files.key.clone(), files.ca.clone()];
                WatchedFiles::new(watched, Box::new(move || TlsContext::with_files(&files)))?
            }
            None if self.tokens.is_none() => {
                let why = "TLS without certificates needs a group token, which identifies the peer: give \
                           --group-token-file, or --tls-cert, --tls-key and --tls-ca";
                return Err(Error::new(ErrorKind::Invalid, why));
            }
            None => WatchedFiles::without_files(TlsContext::with_token()?),
        };
        Ok(Arc::new(Trust { name: self.name.clone(), tokens: self.tokens.clone(), tls: Some(tls) }))
    }

    /// The current TLS configuration of TCP and control connections; `None` without TLS.
    pub fn tls(&self) -> Option<Arc<TlsContext>> {
        self.tls.as_ref().map(WatchedFiles::get)
    }

    /// Whether peers must prove anything on TCP and control connections.
    pub fn checks_peers(&self) -> bool {
        self.tokens.is_some() || self.tls.is_some()
    }

    /// The current tokens; `None` where no proof is required.
    pub fn tokens(&self) -> Option<Arc<GroupTokens>> {
        self.tokens.as_ref().map(WatchedFiles::get)
    }

    /// The name of this process in proofs.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Starts a proof on a connection that this process opened; `None` where there is no token.
    ///
    /// # Errors
    /// When the operating system returns no randomness.
    pub fn prover(&self, connection: ProofConnection<'_>) -> Result<Option<TokenProver>> {
        self.tokens().map(|tokens| TokenProver::new(tokens, &self.name, connection)).transpose()
    }

    /// The error for a peer without a proof.
    pub fn unproved_error(&self) -> Error {
        let why = format!(
            "{} requires a proof of the group token, and this peer gave none: start it with --group-token-file and the \
             same file as there",
            self.name
        );
        Error::new(ErrorKind::PermissionDenied, why)
    }
}

/// The connection that a proof is bound to: the proof is invalid on any other.
#[derive(Debug, Clone, Copy)]
pub struct ProofConnection<'a> {
    /// The transport: `tcp`, `rdma`, `control`.
    pub kind: &'a str,
    /// A value known only to both ends of an encrypted connection, which excludes a man in the middle (RFC 9266);
    /// empty without TLS.
    pub binding: &'a [u8],
}
