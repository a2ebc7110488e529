//! `spurline upgrade`.

use crate::cli::UpgradeArgs;
use spurline_config::Fault;
use spurline_observe::locate::list_mounts;
use spurline_runtime::locator::find_mount;
use spurline_runtime::upgrade::upgrade_mount;

/// Runs the command: each mount continues with this program, or the given one.
///
/// # Errors
/// When a mount could not be upgraded; the others are upgraded all the same.
pub fn run(args: UpgradeArgs) -> Result<(), Fault> {
    let program = match args.program {
        Some(program) => program.canonicalize(),
        None => std::env::current_exe(),
    };
    let program = program.map_err(|error| Fault::failed(format!("the program: {error}"), "name it with --program"))?;
    let mounts = match args.mountpoint {
        Some(mountpoint) => vec![find_mount(&mountpoint)?],
        None => list_mounts()?,
    };
    let mut failed = None;
    for mount in &mounts {
        match upgrade_mount(mount, &program) {
            Ok(upgraded) => anstream::println!(
                "{}: version {} in place of {}, after a pause of {} ms",
                mount.mountpoint.display(),
                upgraded.after,
                upgraded.before,
                upgraded.pause_ms
            ),
            Err(fault) => {
                if let Some(earlier) = failed.replace(fault) {
                    crate::report::print_fault(&earlier);
                }
            }
        }
    }
    failed.map_or(Ok(()), Err)
}
