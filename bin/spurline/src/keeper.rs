//! The keeper of a mount with `--recover`: this process starts the same command again as the mount's process, and stays.

use crate::background::ReadySignal;
use crate::signals;
use spurline_config::Fault;
use spurline_keeper::{KeeperReports, StopRequests, StoreLink, SupervisedProgram, supervise};
use spurline_runtime::unmount::{UnmountReport, UnmountRequest, unmount_mount};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Runs the mount's process until the mount ends; returns the exit code of its last process.
///
/// # Errors
/// When no process can be started.
pub fn run(ready: ReadySignal, mountpoint: &Path) -> Result<ExitCode, Fault> {
    let program = std::env::current_exe().and_then(SupervisedProgram::open).map_err(keeper_fault)?;
    let stop = Arc::new(StopRequests::new().map_err(keeper_fault)?);
    let requests = Arc::clone(&stop);
    signals::on_stop(move |_| requests.request_stop())?;
    // Without a look at the mountpoint, where a mount may wait for its process.
    let mountpoint = std::path::absolute(mountpoint).unwrap_or_else(|_| mountpoint.to_owned());
    let code = supervise(program, &stop, &mut LoggedReports { ready, mountpoint }, StoreLink::from_environment());
    let code = code.map_err(keeper_fault)?;
    Ok(ExitCode::from(code))
}

fn keeper_fault(error: std::io::Error) -> Fault {
    Fault::failed(format!("the keeper of the mount: {error}"), "")
}

struct LoggedReports {
    ready: ReadySignal,
    mountpoint: PathBuf,
}

impl KeeperReports for LoggedReports {
    fn report_ready(&mut self) -> Result<(), String> {
        self.ready.signal_once().map_err(|fault| fault.what)
    }

    fn report_restart(&mut self, text: &str) {
        tracing::warn!("{text}");
    }

    fn report_loss(&mut self, text: &str) {
        tracing::error!("{text}");
    }

    fn remove_mount(&mut self) {
        let request = UnmountRequest { force: false, lazy: true, timeout: Duration::ZERO };
        let report = UnmountReport {
            warn: &|warning| tracing::warn!("{warning}"),
            note: &|note| tracing::info!("{note}"),
            unsent: &|_| {},
        };
        if let Err(fault) = unmount_mount(&self.mountpoint, request, &report) {
            tracing::error!("the mount can't be removed: {}", fault.what);
        }
    }
}
