//! Who may join a group: the group token from its file, its proof by both sides of a connection, and how often a
//! refusal is said. It deliberately knows no socket and no request: bytes in, bytes out. The scheme and what it does
//! not protect stand in `docs/trust.md`.
#![forbid(unsafe_code)]

mod proof;
mod refusals;
mod sealed;
#[cfg(feature = "tokio")]
mod stream;
mod tls;
mod token;
mod watched;

pub use proof::{Asked, Prover};
pub use refusals::{Reason, Refusals};
pub use sealed::Sealed;
#[cfg(feature = "tokio")]
pub use stream::{Guarded, accept, connect, decline};
pub use tls::{Tls, TlsFiles};
pub use token::Tokens;

use spurline_types::{Error, ErrorKind, Result};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use watched::Watched;

/// What a process wants of its peers and shows them.
pub struct Trust {
    name: String,
    tokens: Option<Watched<Tokens>>,
    tls: Option<Watched<Tls>>,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {:?}", self.name, self.tokens().map_or(0, |tokens| tokens.count()))
    }
}

impl Trust {
    /// Asks nothing of anybody and proves nothing.
    pub fn anyone() -> Arc<Trust> {
        Arc::new(Trust { name: String::new(), tokens: None, tls: None })
    }

    /// A process called `name` that proves the tokens of `token_file`, and asks its peers for such a proof. The file is
    /// read again when it changed.
    ///
    /// # Errors
    /// `NotFound` or `PermissionDenied` when the file can't be read, `Invalid` when it holds no good token; the sentence
    /// says what to do.
    pub fn new(name: &str, token_file: Option<&Path>) -> Result<Arc<Trust>> {
        let read = |file: &Path| -> Result<_> {
            let shown = file.to_owned();
            Watched::new(vec![file.to_owned()], Box::new(move || Tokens::read(&shown)))
        };
        let tokens = token_file.map(read).transpose()?;
        Ok(Arc::new(Trust { name: name.to_owned(), tokens, tls: None }))
    }

    /// The same without a file, for tests and benchmarks.
    pub fn with_tokens(name: &str, tokens: Tokens) -> Arc<Trust> {
        Arc::new(Trust { name: name.to_owned(), tokens: Some(Watched::fixed(tokens)), tls: None })
    }

    /// The same, with TLS on TCP and control connections: with the certificates of `files`, which are read again when
    /// they changed, or, without any, with a key made now, whose holder the proof of the token tells.
    ///
    /// # Errors
    /// `Invalid` without files and without a token, and when a file does not hold what it should or its certificate is
    /// not valid; `NotFound` or `PermissionDenied` when one can't be read.
    pub fn encrypted(&self, files: Option<TlsFiles>) -> Result<Arc<Trust>> {
        let tls = match files {
            Some(files) => {
                let watched = vec![files.cert.clone(), files.key.clone(), files.ca.clone()];
                Watched::new(watched, Box::new(move || Tls::with_files(&files)))?
            }
            None if self.tokens.is_none() => {
                let why = "TLS without certificates needs a group token, which tells who is at the other end: give \
                           --group-token-file, or --tls-cert, --tls-key and --tls-ca";
                return Err(Error::new(ErrorKind::Invalid, why));
            }
            None => Watched::fixed(Tls::with_token()?),
        };
        Ok(Arc::new(Trust { name: self.name.clone(), tokens: self.tokens.clone(), tls: Some(tls) }))
    }

    /// How TCP and control connections are encrypted now; `None` where they are not.
    pub fn tls(&self) -> Option<Arc<Tls>> {
        self.tls.as_ref().map(Watched::get)
    }

    /// Whether peers have to prove anything over TCP and control connections.
    pub fn asks(&self) -> bool {
        self.tokens.is_some() || self.tls.is_some()
    }

    /// The tokens now; `None` where no proof is asked for.
    pub fn tokens(&self) -> Option<Arc<Tokens>> {
        self.tokens.as_ref().map(Watched::get)
    }

    /// The name that this process proves under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Begins to prove the token on a connection that this process opened; `None` where there is none.
    ///
    /// # Errors
    /// When the operating system gives no randomness.
    pub fn prover(&self, connection: Connection<'_>) -> Result<Option<Prover>> {
        self.tokens().map(|tokens| Prover::new(tokens, &self.name, connection)).transpose()
    }

    /// Why a connection without a proof is refused here, for the peer to read.
    pub fn unproved(&self) -> Error {
        let why = format!(
            "{} asks for a proof of the group token, and this peer gave none: start it with --group-token-file and the \
             same file as there",
            self.name
        );
        Error::new(ErrorKind::PermissionDenied, why)
    }
}

/// The connection that a proof is made for: it is worth nothing on another.
#[derive(Debug, Clone, Copy)]
pub struct Connection<'a> {
    /// What carries it: `tcp`, `rdma`, `control`.
    pub kind: &'a str,
    /// What both ends of an encrypted connection know and nobody else, so that nobody sits between (RFC 9266); empty
    /// where nothing is encrypted.
    pub binding: &'a [u8],
}
