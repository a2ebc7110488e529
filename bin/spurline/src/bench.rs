//! `spurline bench`: the bench crate's words and errors as this program's.

use spurline_bench::BenchError;
use spurline_config::Fault;
use std::process::ExitCode;

/// Runs the command.
///
/// # Errors
/// When nothing could be measured, or it was interrupted.
pub fn run(args: &spurline_bench::BenchArgs) -> Result<ExitCode, Fault> {
    match spurline_bench::run(args) {
        // A figure that could not be taken is a failure; one below its floor is one only when that was asked for.
        Ok(Some(outcome)) if outcome.broken > 0 || (outcome.strict && outcome.below > 0) => Ok(ExitCode::from(1)),
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(BenchError::Missing(what)) => Err(Fault::missing(what, "")),
        Err(e) => Err(Fault::failed(format!("bench: {e}"), "")),
    }
}
