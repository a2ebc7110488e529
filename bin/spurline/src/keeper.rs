//! The keeper of a mount with `--recover`: this process starts the same command again as the mount's process, and stays.

use crate::background::ReadySignal;
use crate::signals;
use spurline_config::Fault;
use spurline_keeper::{KeeperReports, StopRequests, SupervisedProgram, supervise};
use std::process::ExitCode;
use std::sync::Arc;

/// Runs the mount's process until the mount ends; returns the exit code of its last process.
///
/// # Errors
/// When no process can be started.
pub fn run(ready: ReadySignal) -> Result<ExitCode, Fault> {
    let failed = |error: std::io::Error| Fault::failed(format!("the keeper of the mount: {error}"), "");
    let program = std::env::current_exe().and_then(SupervisedProgram::open).map_err(failed)?;
    let stop = Arc::new(StopRequests::default());
    let requests = Arc::clone(&stop);
    signals::on_stop(move |_| requests.request_stop())?;
    let code = supervise(program, &stop, &mut LoggedReports(ready)).map_err(failed)?;
    Ok(ExitCode::from(code))
}

struct LoggedReports(ReadySignal);

impl KeeperReports for LoggedReports {
    fn report_ready(&mut self) -> Result<(), String> {
        self.0.signal_once().map_err(|fault| fault.what)
    }

    fn report_restart(&mut self, text: &str) {
        tracing::warn!("{text}");
    }

    fn report_loss(&mut self, text: &str) {
        tracing::error!("{text}");
    }
}
