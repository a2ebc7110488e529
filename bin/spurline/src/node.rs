//! `spurline node`: a node of the runtime, stopped by signals.

use crate::background::ReadySignal;
use crate::signals;
use spurline_config::{Fault, NodeConfig};
use spurline_runtime::start_node;

/// Runs the node; returns at the end.
///
/// # Errors
/// When the node can't start.
pub fn run(config: NodeConfig, ready: ReadySignal) -> Result<(), Fault> {
    let mut node = start_node(config)?;
    let stopped = signals::stop_channel()?;
    node.log_start();
    ready.signal_ready()?;
    node.keep_directories();
    let _ = stopped.recv();
    node.stop();
    Ok(())
}
