//! `spurline umount`.

use crate::cli::UmountArgs;
use spurline_config::Fault;

/// Runs the command.
pub fn run(_args: UmountArgs) -> Result<(), Fault> {
    Err(Fault::failed("umount: not yet wired in this build", ""))
}
