//! `spurline umount`.

use crate::cli::UmountArgs;
use crate::report::{print_note, print_warnings};
use crate::signals;
use spurline_config::Fault;
use spurline_runtime::unmount::{UnmountReport, UnmountRequest, unmount_mount};
use std::sync::{Arc, Mutex, PoisonError};

/// Runs the command. During the wait for the mount's process, a first signal prints the cause of the wait, and a second signal
/// ends the command.
///
/// # Errors
/// When the path is no mountpoint, is busy, or may not be unmounted by this user.
pub fn run(args: UmountArgs) -> Result<(), Fault> {
    let UmountArgs { mountpoint, force, lazy, timeout } = args;
    let unsent = Arc::new(Mutex::new(None::<String>));
    let last = Arc::clone(&unsent);
    signals::on_stop(move |count| {
        let unsent = last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match (count, unsent) {
            (1, Some(unsent)) => print_warnings(&[format!("no node has {unsent}; a second signal ends the wait")]),
            (_, Some(unsent)) => {
                print_warnings(&[format!("if the mount's process ends before a node is reached, it loses {unsent}")]);
                std::process::exit(1);
            }
            (_, None) => std::process::exit(1),
        }
    })?;
    let report = UnmountReport {
        warn: &|warning| print_warnings(&[warning]),
        note: &|note| print_note(&note),
        unsent: &|now| {
            // Known before the output: the signal may come at once.
            *unsent.lock().unwrap_or_else(PoisonError::into_inner) = Some(now.clone());
            print_note(&format!("waiting for a node to take {now}"));
        },
    };
    unmount_mount(&mountpoint, UnmountRequest { force, lazy, timeout }, &report)
}
