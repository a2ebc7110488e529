//! `spurline umount`.

use crate::cli::UmountArgs;
use crate::jobs::show::is_terminal;
use crate::report::{print_fault, print_note, print_warnings, printable};
use crate::signals;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;
use spurline_config::Fault;
use spurline_observe::locate::list_mounts;
use spurline_runtime::UnsentBytes;
use spurline_runtime::unmount::{UnmountReport, UnmountRequest, unmount_mount};
use std::cmp::Reverse;
use std::path::PathBuf;
use std::sync::Arc;

/// Unmounts each mount. During the wait for the mount's process, a first signal prints the cause of the wait, and a second signal
/// ends the command.
///
/// # Errors
/// When a path is no mountpoint, is busy, or may not be unmounted by this user.
pub fn run(args: UmountArgs) -> Result<(), Fault> {
    let request = UnmountRequest { force: args.force, lazy: args.lazy, timeout: args.timeout };
    let mountpoints = if args.all { own_mountpoints()? } else { args.mountpoints };
    let line = Arc::new(UnsentLine::new());
    let known = Arc::clone(&line);
    signals::on_stop(move |count| {
        let Some(unsent) = known.last() else { std::process::exit(1) };
        let UnsentBytes { bytes, .. } = &unsent;
        let taker = unsent.taker();
        if count == 1 {
            known.print_warning(format!("waiting for {taker} to take {bytes}; a second signal ends the wait"));
        } else {
            known.print_warning(format!("if the mount's process ends before {taker} takes them, it loses {bytes}"));
            std::process::exit(1);
        }
    })?;
    let report = UnmountReport {
        warn: &|warning| line.print_warning(warning),
        note: &|note| line.bar.suspend(|| print_note(&note)),
        unsent: &|unsent| line.show(unsent),
    };
    let mut faults: Vec<Fault> = Vec::new();
    for mountpoint in &mountpoints {
        let unmounted = unmount_mount(mountpoint, request, &report);
        line.forget();
        faults.extend(unmounted.err());
    }
    line.bar.finish_and_clear();
    let Some(last) = faults.pop() else { return Ok(()) };
    for fault in &faults {
        print_fault(fault);
    }
    Err(last)
}

/// The mounts of this user, of all users for root; inner mounts first.
fn own_mountpoints() -> Result<Vec<PathBuf>, Fault> {
    let me = rustix::process::geteuid();
    let mounts = list_mounts()?.into_iter().filter(|mount| me.is_root() || mount.uid == me.as_raw());
    let mut mountpoints: Vec<PathBuf> = mounts.map(|mount| mount.mountpoint).collect();
    mountpoints.sort_unstable_by_key(|mountpoint| Reverse(mountpoint.components().count()));
    if mountpoints.is_empty() {
        print_note("this host has no mounts of yours");
    }
    Ok(mountpoints)
}

/// What the mount's process waits for: a line that is rewritten on a terminal, and elsewhere one for each change.
struct UnsentLine {
    bar: ProgressBar,
    last: Mutex<Option<UnsentBytes>>,
}

impl UnsentLine {
    fn new() -> UnsentLine {
        let target = if is_terminal() { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(None, target);
        let style = ProgressStyle::with_template("{spinner} {wide_msg}");
        UnsentLine {
            bar: bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner())),
            last: Mutex::default(),
        }
    }

    /// The mount has ended.
    fn forget(&self) {
        *self.last.lock() = None;
    }

    fn last(&self) -> Option<UnsentBytes> {
        self.last.lock().clone()
    }

    fn show(&self, unsent: &UnsentBytes) {
        // Known before the output: a signal may come at once.
        let before = self.last.lock().replace(unsent.clone());
        let text = format!("waiting for {} to take {}", unsent.taker(), unsent.bytes);
        if !self.bar.is_hidden() {
            self.bar.set_message(printable(text.as_bytes()));
            self.bar.tick();
        } else if before.as_ref() != Some(unsent) {
            print_note(&text);
        }
    }

    fn print_warning(&self, warning: String) {
        self.bar.suspend(|| print_warnings(&[warning]));
    }
}
