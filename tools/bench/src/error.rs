//! The reasons of a failed measurement. Knows no exit code.

/// Why a measurement failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// A tool, device or permission is missing; dependent cases are skipped.
    #[error("{0}")]
    Missing(String),
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    /// A run failed.
    #[error("{0}")]
    Failed(String),
    /// The user interrupted the run.
    #[error("interrupted")]
    Interrupted,
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, BenchError>;

impl BenchError {
    /// `Failed` with the system's error.
    pub fn io(what: impl std::fmt::Display, error: &std::io::Error) -> Self {
        BenchError::Failed(format!("{what}: {error}"))
    }
}

impl From<spurline_types::Error> for BenchError {
    fn from(error: spurline_types::Error) -> Self {
        BenchError::Failed(error.to_string())
    }
}

/// The file of a failure of the operating system.
pub trait FileContext<T> {
    /// The failure as [`BenchError::io`] has it.
    /// That of the operating system.
    fn in_file(self, path: &std::path::Path) -> Result<T>;
}

impl<T> FileContext<T> for std::io::Result<T> {
    fn in_file(self, path: &std::path::Path) -> Result<T> {
        self.map_err(|error| BenchError::io(path.display(), &error))
    }
}
