//! Observation of a running mount or node from outside: an admin socket, a metrics page, logs and an access log. Never accesses a
//! mount, and knows of the process only the [`AdminTarget`].
#![forbid(unsafe_code)]

pub mod access;
pub mod client;
pub mod clock;
pub mod dial;
pub mod documents;
pub mod http;
pub mod locate;
pub mod log;
pub mod server;
pub mod usage;

use serde_json::Value;
use spurline_types::{Error, ErrorKind, Result};

/// What a mount or a node reports about itself. Each call returns within bounded time and never goes through the
/// mount. Calls come from several threads at once.
pub trait AdminTarget: Send + Sync + 'static {
    /// Absolute counters, in the form of `Stats::to_json` where the process has these.
    fn stats(&self) -> Value;

    /// The same as Prometheus text.
    fn prometheus(&self) -> String;

    /// Version, length and blocks of the file at `path` below the source (no leading slash), in the form of
    /// [`documents::InfoDocument`].
    ///
    /// # Errors
    /// As a lookup of the path.
    fn info(&self, path: &[u8]) -> Result<Value>;

    /// Identity and state, in the form of [`documents::ProcessStatus`] where that knows the kind of process.
    fn status(&self) -> Value;

    /// Jobs on many files: starts, reports or stops a job.
    ///
    /// # Errors
    /// When this process runs no jobs, the request is invalid, or the request names no job.
    fn jobs(&self, request: &Value) -> Result<Value> {
        let _ = request;
        Err(Error::new(ErrorKind::Unsupported, "this process runs no jobs; use a mount or the coordinator"))
    }

    /// Prepares the mount for an NFS server: file handles outlive the mount from now on.
    ///
    /// # Errors
    /// When this process has no mount, or the names can't be stored.
    fn prepare_export(&self) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, "this process has no mount"))
    }

    /// Continues the mount with another program. Does not return on success: another process takes this one's place.
    ///
    /// # Errors
    /// When this process has no keeper, or the program can't take over.
    fn upgrade(&self, program: &std::path::Path) -> Result<()> {
        let _ = program;
        Err(Error::new(ErrorKind::Unsupported, "this process is no mount with --recover"))
    }

    /// Whether the process can work now.
    ///
    /// # Errors
    /// The reason, otherwise.
    fn health(&self) -> Result<()> {
        Ok(())
    }
}
