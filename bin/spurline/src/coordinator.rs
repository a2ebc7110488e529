//! `spurline coordinator`: a coordinator of the runtime, stopped by signals.

use crate::background::ReadySignal;
use crate::signals;
use spurline_config::{CoordinatorConfig, Fault};
use spurline_runtime::start_coordinator;

/// Runs the coordinator; returns at the end.
///
/// # Errors
/// When the coordinator can't start.
pub fn run(config: CoordinatorConfig, ready: ReadySignal) -> Result<(), Fault> {
    let mut coordinator = start_coordinator(config)?;
    let stopped = signals::stop_channel()?;
    coordinator.log_start();
    ready.signal_ready()?;
    coordinator.keep_directories();
    let _ = stopped.recv();
    coordinator.stop();
    Ok(())
}
