//! Why a measurement did not happen. It knows no exit code.

/// Why a measurement did not happen.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tool, device or permission is not here; what needs it is skipped.
    #[error("{0}")]
    Missing(String),
    /// It ran and failed.
    #[error("{0}")]
    Failed(String),
    /// The user asked for an end.
    #[error("interrupted")]
    Interrupted,
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `Failed` with the system's reason.
    pub fn io(what: impl std::fmt::Display, error: &std::io::Error) -> Self {
        Error::Failed(format!("{what}: {error}"))
    }
}

impl From<spurline_types::Error> for Error {
    fn from(error: spurline_types::Error) -> Self {
        Error::Failed(error.to_string())
    }
}
