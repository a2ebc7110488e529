//! Failures as Python exceptions: an `OSError` with errno, sentence and path. Knows no call that fails.

use crate::settings::with_names_of_settings;
use crate::source_paths::normal_path;
use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;
use rustix::io::Errno;
use spurline_config::Fault;
use spurline_fs::FsError;
use spurline_types::Error;
use spurline_types::fault::ExitKind;

/// A failed call: errno and sentence, and the path if there is one. Made on any thread.
#[derive(Debug, Clone)]
pub(crate) struct CallFailure {
    pub errno: i32,
    pub sentence: String,
    pub path: Option<Vec<u8>>,
}

impl CallFailure {
    /// A failure of this package's own.
    pub fn new(errno: Errno, sentence: impl Into<String>) -> Self {
        CallFailure { errno: errno.raw_os_error(), sentence: sentence.into(), path: None }
    }

    /// The failure as an exception among results.
    pub fn into_exception(self, py: Python<'_>) -> Bound<'_, PyAny> {
        PyErr::from(self).into_value(py).into_bound(py).into_any()
    }

    /// The same failure, of `path`. Python shows errno and path beside the sentence, which repeats neither then.
    pub fn of_path(self, path: &[u8]) -> Self {
        let shown = format!("'{}': ", String::from_utf8_lossy(&normal_path(path)));
        let sentence = self.sentence.strip_prefix(&shown).unwrap_or(&self.sentence);
        CallFailure { path: Some(path.to_owned()), sentence: sentence.to_owned(), ..self }.without_number()
    }

    /// The same failure, whose sentence does not repeat the number of the errno.
    fn without_number(mut self) -> Self {
        let number = format!(" (os error {})", self.errno);
        let length = self.sentence.strip_suffix(&number).map_or(self.sentence.len(), str::len);
        self.sentence.truncate(length);
        self
    }
}

impl From<Error> for CallFailure {
    fn from(error: Error) -> Self {
        let sentence = error.message().to_owned();
        CallFailure { errno: FsError::Volume(error).errno(), sentence, path: None }
    }
}

impl From<FsError> for CallFailure {
    fn from(error: FsError) -> Self {
        CallFailure { errno: error.errno(), sentence: error.to_string(), path: None }
    }
}

impl From<Fault> for CallFailure {
    fn from(fault: Fault) -> Self {
        let sentence = with_names_of_settings(&fault.to_string());
        if let Some(kind) = fault.kind {
            return CallFailure::from(Error::new(kind, sentence)).without_number();
        }
        let errno = match fault.code {
            ExitKind::Usage => Errno::INVAL,
            ExitKind::Missing => Errno::HOSTDOWN,
            ExitKind::Failed => Errno::IO,
        };
        CallFailure::new(errno, sentence)
    }
}

impl From<CallFailure> for PyErr {
    /// Python chooses the subclass by the errno (`FileNotFoundError` and so on).
    fn from(failure: CallFailure) -> PyErr {
        match failure.path {
            Some(path) => {
                let path = String::from_utf8_lossy(&path).into_owned();
                PyOSError::new_err((failure.errno, failure.sentence, path))
            }
            None => PyOSError::new_err((failure.errno, failure.sentence)),
        }
    }
}
