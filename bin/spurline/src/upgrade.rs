//! `spurline upgrade`.

use crate::cli::UpgradeArgs;
use spurline_config::Fault;
use spurline_observe::locate::list_mounts;
use spurline_runtime::locator::find_mount;
use spurline_runtime::upgrade::{UpgradedMount, upgrade_mount};

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
    let is_named = args.mountpoint.is_some();
    let mounts = match args.mountpoint {
        Some(mountpoint) => vec![find_mount(&mountpoint)?],
        None => list_mounts()?,
    };
    let mut failed = None;
    for mount in &mounts {
        let at = mount.mountpoint.display();
        let fault = match upgrade_mount(mount, &program) {
            Ok(Some(upgraded)) => {
                let UpgradedMount { before, after, pause_ms } = upgraded;
                anstream::println!("{at}: version {after} in place of {before}, after a pause of {pause_ms} ms");
                continue;
            }
            Ok(None) if !is_named => {
                anstream::println!("{at}: as before, because the mount is without --recover");
                continue;
            }
            Ok(None) => Fault::failed(
                format!("{at} has no keeper: only a mount with --recover can continue with another program"),
                "unmount, and mount again with --recover",
            ),
            Err(fault) => fault,
        };
        if let Some(earlier) = failed.replace(fault) {
            crate::report::print_fault(&earlier);
        }
    }
    failed.map_or(Ok(()), Err)
}
