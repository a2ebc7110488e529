//! `spurline umount`.

use crate::cli::UmountArgs;
use crate::report::print_warnings;
use spurline_config::Fault;
use spurline_runtime::unmount::{UnmountRequest, unmount_mount};

/// Runs the command.
///
/// # Errors
/// When the path is no mountpoint, is busy, or may not be unmounted by this user.
pub fn run(args: UmountArgs) -> Result<(), Fault> {
    let UmountArgs { mountpoint, force, lazy, timeout } = args;
    unmount_mount(&mountpoint, UnmountRequest { force, lazy, timeout }, &|warning| print_warnings(&[warning]))
}
