//! `spurline demo`.

use crate::cli::DemoArgs;
use spurline_config::Fault;
use std::process::ExitCode;

/// Runs the command.
pub fn run(_args: DemoArgs) -> Result<ExitCode, Fault> {
    Err(Fault::failed("demo: not yet wired in this build", ""))
}
