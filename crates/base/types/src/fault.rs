//! A refusal that ends the program: what is wrong with its evidence, what to do, and the exit code.

use std::fmt;

/// Why the program ends, as its exit code says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// It ran and failed.
    Failed = 1,
    /// The words were wrong.
    Usage = 2,
    /// A required thing (device, server, permission) is missing.
    Missing = 3,
}

/// An error for a person at a command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The exit code.
    pub code: Code,
    /// What is wrong, with the evidence.
    pub what: String,
    /// What to do about it; may be empty when `what` says it.
    pub remedy: String,
}

impl Fault {
    /// It ran and failed (exit 1).
    pub fn failed(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Fault { code: Code::Failed, what: what.into(), remedy: remedy.into() }
    }
    /// The words were wrong (exit 2).
    pub fn usage(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Fault { code: Code::Usage, what: what.into(), remedy: remedy.into() }
    }
    /// A required thing is missing (exit 3).
    pub fn missing(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Fault { code: Code::Missing, what: what.into(), remedy: remedy.into() }
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
    /// A library's error: its sentence stands, and its kind decides between failed, wrong and missing.
    fn from(error: crate::Error) -> Self {
        use crate::ErrorKind as Kind;
        let code = match error.kind() {
            Kind::Invalid => Code::Usage,
            // Who does not answer in time is as good as not there.
            Kind::NotFound | Kind::PermissionDenied | Kind::Unavailable | Kind::Timeout | Kind::Unsupported => {
                Code::Missing
            }
            _ => Code::Failed,
        };
        Fault { code, what: error.message().to_owned(), remedy: String::new() }
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
            assert_eq!(code(kind), Code::Missing, "{kind:?}");
        }
        assert_eq!((code(ErrorKind::Invalid), code(ErrorKind::Protocol)), (Code::Usage, Code::Failed));
    }
}
