//! `spurline coordinator`: a coordinator of the runtime, stopped by signals.

use crate::background::Ready;
use crate::signals;
use spurline_config::{CoordinatorConfig, Fault};
use spurline_runtime::start_coordinator;

/// Runs the coordinator; returns when it has ended.
///
/// # Errors
/// When it can't start.
pub fn run(config: CoordinatorConfig, ready: Ready) -> Result<(), Fault> {
    let mut coordinator = start_coordinator(config)?;
    let stopped = signals::stops()?;
    coordinator.log_start();
    ready.signal()?;
    coordinator.keep_directories();
    let _ = stopped.recv();
    coordinator.stop();
    Ok(())
}
