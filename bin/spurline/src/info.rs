//! `spurline info`.

use crate::cli::InfoArgs;
use spurline_config::Fault;

/// Runs the command.
pub fn run(_args: InfoArgs) -> Result<(), Fault> {
    Err(Fault::failed("info: not yet wired in this build", ""))
}
