//! `spurline node`: a node of the runtime, stopped by signals.

use crate::background::Ready;
use crate::signals;
use spurline_config::{Fault, NodeConfig};
use spurline_runtime::start_node;

/// Runs the node; returns when it has ended.
///
/// # Errors
/// When it can't start.
pub fn run(config: NodeConfig, ready: Ready) -> Result<(), Fault> {
    let mut node = start_node(config)?;
    let stopped = signals::stops()?;
    node.log_start();
    ready.signal()?;
    node.keep_directories();
    let _ = stopped.recv();
    node.stop();
    Ok(())
}
