//! `spurline bench`.

use crate::cli::BenchArgs;
use spurline_config::Fault;
use std::process::ExitCode;

/// Runs the command.
pub fn run(_args: BenchArgs) -> Result<ExitCode, Fault> {
    Err(Fault::failed("bench: not yet wired in this build", ""))
}
