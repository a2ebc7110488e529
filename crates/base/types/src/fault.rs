//! An error that ends the program: the fault with the evidence, the remedy, and the exit code.

use crate::ErrorKind;
use std::fmt;

/// Why the program ends; the value is the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExitKind {
    /// Failure.
    Failed = 1,
    /// Usage error.
    Usage = 2,
    /// Missing prerequisite (device, server, permission).
    Missing = 3,
}

/// An error for a person at a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The exit code.
    pub code: ExitKind,
    /// What is wrong, with the evidence.
    pub what: String,
    /// What to do; may be empty when `what` says so.
    pub remedy: String,
    /// The kind of the library error, for callers that have an errno for each kind; `None` for other faults.
    pub kind: Option<ErrorKind>,
}

impl Fault {
    /// Failure (exit 1).
    pub fn failed(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Fault::new(ExitKind::Failed, what.into(), remedy.into())
    }
    /// Usage error (exit 2).
    pub fn usage(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Fault::new(ExitKind::Usage, what.into(), remedy.into())
    }
    /// Missing prerequisite (exit 3).
    pub fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Fault::new(ExitKind::Missing, what.into(), remedy.into())
    }

    fn new(code: ExitKind, what: String, remedy: String) -> Self {
        Fault { code, what, remedy, kind: None }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

impl std::error::Error for Fault {}

impl From<crate::Error> for Fault {
    /// Keeps a library error's sentence and kind; the kind decides the exit code.
    fn from(error: crate::Error) -> Self {
        use ErrorKind as Kind;
        let code = match error.kind() {
            Kind::Invalid => ExitKind::Usage,
            // No answer in time counts as missing.
            Kind::NotFound | Kind::PermissionDenied | Kind::Unavailable | Kind::Timeout | Kind::Unsupported => {
                ExitKind::Missing
            }
            _ => ExitKind::Failed,
        };
        Fault { kind: Some(error.kind()), ..Fault::new(code, error.message().to_owned(), String::new()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, ErrorKind};

    #[test]
    fn a_server_that_does_not_answer_is_a_thing_that_is_missing() {
        let code = |kind| Fault::from(Error::new(kind, "why")).code;
        for kind in [ErrorKind::Unavailable, ErrorKind::Timeout, ErrorKind::NotFound, ErrorKind::PermissionDenied] {
            assert_eq!(code(kind), ExitKind::Missing, "{kind:?}");
        }
        assert_eq!((code(ErrorKind::Invalid), code(ErrorKind::Protocol)), (ExitKind::Usage, ExitKind::Failed));
    }
}
