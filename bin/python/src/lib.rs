//! The native part of the Python package `spurline`: one class, a client of a source, over `spurline-runtime`. The Python files
//! beside it own paths, files and data sets. This crate knows Python objects, and neither FUSE nor command lines.
//!
//! Calls that may wait run on the client's own threads, and the caller waits without the interpreter's lock, so that other threads
//! go on and Ctrl-C ends the wait.

mod arena;
mod client;
mod failure;
mod loading;
mod open_source;
mod parallel;
mod range_reads;
mod settings;
mod source_paths;
mod writing;

use pyo3::prelude::*;

/// The module `spurline._native`.
#[pymodule(gil_used = false)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<client::NativeClient>()?;
    module.add_class::<range_reads::RangeReads>()?;
    module.add_class::<loading::LoadJob>()?;
    module.add_class::<writing::WritingFile>()?;
    module.add_class::<arena::Arena>()
}
