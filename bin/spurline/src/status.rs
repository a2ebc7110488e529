//! `spurline status`.

use crate::cli::StatusArgs;
use spurline_config::Fault;
use std::process::ExitCode;

/// Runs the command.
pub fn run(_args: StatusArgs) -> Result<ExitCode, Fault> {
    Err(Fault::failed("status: not yet wired in this build", ""))
}
