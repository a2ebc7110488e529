//! `spurline stats`.

use crate::cli::StatsArgs;
use spurline_config::Fault;

/// Runs the command.
pub fn run(_args: StatsArgs) -> Result<(), Fault> {
    Err(Fault::failed("stats: not yet wired in this build", ""))
}
