//! How a running mount or node is looked at from outside: an admin socket beside the mount, a metrics page,
//! logs and an access log. It never touches a mount, and knows of the process only its [`AdminTarget`].
#![forbid(unsafe_code)]

pub mod access;
pub mod client;
pub mod clock;
pub mod dial;
pub mod http;
pub mod log;
pub mod place;
pub mod server;
pub mod usage;

use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};

/// What a mount or a node answers about itself. Each call returns within bounded time and never goes
/// through the mount; calls come from several threads at once.
pub trait AdminTarget: Send + Sync + 'static {
    /// Absolute counters, as `Stats::to_json` gives them.
    fn stats(&self) -> Value;

    /// The same as Prometheus text.
    fn prometheus(&self) -> String;

    /// Version, length and blocks of the file at `path` below the source (no leading slash).
    ///
    /// # Errors
    /// As a lookup of the path.
    fn info(&self, path: &[u8]) -> Result<Value>;

    /// What this process is and how it does: kind, version, source, addresses, disks, peers.
    fn status(&self) -> Value;

    /// Work on many files: begins a job, tells of one, stops one.
    ///
    /// # Errors
    /// When this process runs none, the request makes no sense, or it names no job.
    fn jobs(&self, request: &Value) -> Result<Value> {
        let _ = request;
        Err(Error::new(ErrorKind::Unsupported, "this process runs no jobs; ask a mount or the coordinator"))
    }

    /// Whether it can do its work now.
    ///
    /// # Errors
    /// When it can't, saying why.
    fn health(&self) -> Result<()> {
        Ok(())
    }
}
